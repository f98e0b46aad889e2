"""Hadamard transforms are Sylvester's matrix times signs: exact where they can be, the same in any layout."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tiers
import torch
from scipy.linalg import hadamard as sylvester
from torch import Tensor

import fpsim
from fpsim import Hadamard, hadamard
from fpsim.tensors.hadamard import padded_to_groups

SIZES = [2**k for k in range(1, 11)]
FEW = {16}  # each compiles a loop
FIXED = np.array([1 if sign == "+" else -1 for sign in "+++-+------+-+--"])  # NVIDIA TransformerEngine
KEY = torch.tensor(0x123456789ABCDEF)


def integers(*shape: int) -> Tensor:
    return torch.randint(-50, 51, shape, generator=torch.Generator().manual_seed(0)).float()


def by_matrix(x: Tensor, size: int, signs: np.ndarray | None = None) -> np.ndarray:
    """x D H / sqrt(size) along the last axis in float64."""
    d = np.ones(size) if signs is None else np.resize(signs, size)
    groups = x.double().numpy().reshape(*x.shape[:-1], -1, size)
    return (groups * d @ sylvester(size) / math.sqrt(size)).reshape(x.shape)


def signs_of(transform: Hadamard, *keys: Tensor) -> Tensor:
    """The diagonal D of each key, found in 1 D H by the inverse of H: H itself, but for a factor."""
    rows = [hadamard(torch.ones(1, transform.size), transform, key=key) for key in keys]
    return torch.from_numpy(by_matrix(torch.cat(rows), transform.size)).float().round()


def in_stages(x: np.ndarray, size: int) -> np.ndarray:
    """The fast transform in the numbers of `x`: sums and differences of pairs 1, 2, 4, ... apart."""
    h = 1
    while h < size:
        pairs = x.reshape(-1, 2, h)
        x = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(x.shape)
        h *= 2
    return x * x.dtype.type(size**-0.5)


@tiers.parametrize("size", SIZES, keep=FEW)
def test_it_multiplies_each_group_by_the_matrix_of_sylvester(size: int) -> None:
    x = torch.randn(3, 2 * size, dtype=torch.float64)
    # each of log2(size) sums, the product and the factor round once, relative to at most sum|x| / sqrt(size)
    bound = (math.log2(size) + 2) * 2**-53 * float(x.abs().sum(1).max()) / math.sqrt(size)
    assert np.abs(hadamard(x, Hadamard(size)).numpy() - by_matrix(x, size)).max() <= bound


@pytest.mark.parametrize("shape", [(5, 1024), (1, 1024), (37, 2048)], ids=str)
@tiers.parametrize("size", SIZES, keep=FEW)
def test_float32_is_added_in_the_order_of_the_fast_transform(size: int, shape: tuple[int, int]) -> None:
    x = torch.randn(shape) * 2.0 ** torch.randint(-20, 20, shape)
    assert np.array_equal(hadamard(x, Hadamard(size)).numpy(), in_stages(x.numpy(), size))


@pytest.mark.parametrize("signs", [None, "fixed"])
@tiers.parametrize("size", [4, 16, 64, 256, 1024], keep=FEW)
def test_small_integers_are_transformed_exactly_where_the_root_is_a_power_of_two(size: int, signs: str | None) -> None:
    x = integers(7, 2 * size) * 2.0**-40
    expected = by_matrix(x, size, FIXED if signs else None)
    assert np.array_equal(hadamard(x, Hadamard(size, signs)).double().numpy(), expected)


@tiers.parametrize("size", SIZES, keep=FEW)
def test_fixed_signs_begin_anew_after_16(size: int) -> None:
    assert np.array_equal(signs_of(Hadamard(size, "fixed"), KEY)[0].numpy(), np.resize(FIXED, size))


@pytest.mark.parametrize("signs", [None, "fixed", "random"])
@tiers.parametrize("size", [4, 16, 64, 256], keep=FEW)
def test_a_product_of_two_transformed_operands_is_the_product_of_the_operands(size: int, signs: str | None) -> None:
    x, w, transform = integers(9, 2 * size), integers(5, 2 * size), Hadamard(size, signs)
    # in float64, where the sums are exact in any order
    product = hadamard(x, transform, key=KEY).double() @ hadamard(w, transform, key=KEY).double().T
    assert torch.equal(product, x.double() @ w.double().T)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("length", [1, 15, 16, 29])
def test_operands_that_are_padded_have_the_same_product(length: int, axis: int) -> None:
    x, w, transform = integers(length, 3), integers(length, 5), Hadamard(16, "fixed")
    expected = x.T @ w
    if axis:
        x, w = x.T, w.T
    x, w = (padded_to_groups(t, transform, axis) for t in (x, w))
    assert x.shape[axis] == -(-length // 16) * 16
    x, w = (hadamard(t, transform, axis) for t in (x, w))
    assert torch.equal(x @ w.T if axis else x.T @ w, expected)


@tiers.parametrize("size", [2, 16, 1024], keep=FEW)
def test_random_signs_are_plus_or_minus_alike_and_independent(size: int) -> None:
    n = 2000
    signs = signs_of(Hadamard(size, "random"), *torch.arange(n))
    assert signs.abs().eq(1).all()
    products = signs.T @ signs / n  # a mean of n fair signs: 6 standard deviations, for at most 2**20 of them
    assert (products - torch.eye(size)).abs().max() < 6 / math.sqrt(n)
    assert signs.mean(0).abs().max() < 6 / math.sqrt(n)


def test_a_key_decides_random_signs_and_no_other() -> None:
    x, transform = torch.randn(4, 64), Hadamard(64, "random")
    fpsim.manual_seed(0)
    first, second = hadamard(x, transform), hadamard(x, transform)
    fpsim.manual_seed(0)
    assert torch.equal(hadamard(x, transform), first)
    assert not torch.equal(first, second)
    fpsim.manual_seed(None)
    # every group has the same signs
    same = torch.ones(1, 128).view(2, 64)
    a, b = hadamard(same.view(1, 128), transform, key=KEY).view(2, 64)
    assert torch.equal(a, b)
    assert torch.equal(hadamard(x, Hadamard(64, "fixed"), key=KEY), hadamard(x, Hadamard(64, "fixed")))


@tiers.parametrize("size", [2, 16, 64], keep=FEW)
@pytest.mark.parametrize("inner", [1, 2, 3, 15, 16, 17, 40])
def test_any_axis_gives_what_the_last_one_gives(size: int, inner: int) -> None:
    x = torch.randn(3, 2 * size, inner)
    for transform in (Hadamard(size), Hadamard(size, "fixed"), Hadamard(size, "random")):
        expected = hadamard(x.movedim(1, -1).contiguous(), transform, key=KEY).movedim(-1, 1)
        assert torch.equal(hadamard(x, transform, axis=1, key=KEY), expected)
        assert torch.equal(hadamard(x, transform, axis=-2, key=KEY), expected)


def test_any_strides_give_the_same_and_dense_ones_stay() -> None:
    x = torch.randn(8, 32, 6, 16)
    for axis in (1, 3):
        expected = hadamard(x, Hadamard(16, "fixed"), axis)
        dense = x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)
        with_holes = torch.randn(8, 32, 12, 17)[:, :, ::2, 1:].copy_(x)
        for view in (dense, with_holes, x.contiguous(memory_format=torch.channels_last)):
            assert torch.equal(hadamard(view, Hadamard(16, "fixed"), axis), expected)
            assert torch.equal(view, x)
        assert hadamard(dense, Hadamard(16), axis).stride() == dense.stride()
    expanded = torch.randn(16, 1).expand(16, 5)
    assert torch.equal(hadamard(expanded, Hadamard(16), 0), hadamard(expanded.contiguous(), Hadamard(16), 0))


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0,)], ids=str)
def test_empty_tensors_stay_empty(shape: tuple[int, ...]) -> None:
    assert hadamard(torch.empty(shape), Hadamard(16), 0 if shape[0] == 16 else -1).shape == shape


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_nothing(threads: int) -> None:
    x = torch.randn(3, 1 << 17)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for axis, view in ((-1, x), (0, x.view(-1, 3)), (0, x.view(256, -1))):
            expected = in_stages(view.movedim(axis, -1).contiguous().numpy(), 64)
            got = hadamard(view, Hadamard(64), axis).movedim(axis, -1)
            assert np.array_equal(got.numpy(), expected)
    finally:
        torch.set_num_threads(before)


def test_half_precision_is_computed_in_float32_and_rounded_once() -> None:
    x = torch.randn(5, 64)
    for dtype in (torch.float16, torch.bfloat16):
        narrow = x.to(dtype)
        assert torch.equal(hadamard(narrow, Hadamard(16)), hadamard(narrow.float(), Hadamard(16)).to(dtype))


def test_what_is_not_finite_reaches_its_group_alone() -> None:
    for value in (torch.nan, torch.inf):
        x = torch.ones(3, 32)
        x[1, 2] = value
        y = hadamard(x, Hadamard(16))
        assert not y[1, :16].isfinite().any()
        assert y[[0, 2]].isfinite().all()
        assert y[1, 16:].isfinite().all()
    largest = torch.finfo(torch.float32).max
    assert hadamard(torch.full((16,), largest), Hadamard(16))[0] == torch.inf


@pytest.mark.parametrize("signs", [None, "fixed", "random"])
def test_the_gradient_is_that_of_the_linear_map(signs: str | None) -> None:
    transform = Hadamard(16, signs)
    x = torch.randn(2, 32, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: hadamard(v, transform, 1, KEY), x)
    assert torch.autograd.gradgradcheck(lambda v: hadamard(v, transform, 1, KEY), x)


def test_transforms_of_functions_see_one_operator() -> None:
    x = torch.randn(4, 3, 16)
    for transform in (Hadamard(16), Hadamard(16, "random")):
        batched = torch.func.vmap(lambda v, t=transform: hadamard(v, t, key=KEY), in_dims=1)(x)
        assert torch.equal(batched, hadamard(x, transform, key=KEY).movedim(1, 0))
    keys = torch.arange(4)
    each = torch.func.vmap(lambda v, key: hadamard(v, Hadamard(16, "random"), key=key))(x, keys)
    for sample, key, got in zip(x, keys, each, strict=True):
        assert torch.equal(got, hadamard(sample, Hadamard(16, "random"), key=key))
    one = torch.func.vmap(lambda key: hadamard(x[0], Hadamard(16, "random"), key=key))(keys)
    assert torch.equal(one[2], hadamard(x[0], Hadamard(16, "random"), key=keys[2]))
    for arguments in (
        (x.requires_grad_(), 16, "fixed", 2, False, None),
        (torch.randn(4, 3, 32)[:, :, ::2], 16, "random", 2, True, KEY),
    ):
        torch.library.opcheck(torch.ops.fpsim.hadamard, arguments)


def test_equal_transforms_are_one_value() -> None:
    assert Hadamard(16, "fixed") == Hadamard(np.int64(16), "fixed")
    assert hash(Hadamard(16)) == hash(Hadamard(16, None))
    assert eval(repr(Hadamard(64, "random"))) == Hadamard(64, "random")
    assert [str(Hadamard(16)), str(Hadamard(64, "random"))] == ["Hadamard 16", "Hadamard 64 random signs"]


@pytest.mark.parametrize("size", [0, 1, 3, 48, 2048, -16, 16.0, True, "16"])
def test_a_size_that_is_no_power_of_two_is_refused(size: object) -> None:
    with pytest.raises(ValueError, match=r"size=.* is invalid.*powers of two, 2 to 1024"):
        Hadamard(size)  # type: ignore[arg-type]


def test_other_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Unknown signs 'fixt'\. Did you mean 'fixed'\?"):
        Hadamard(16, "fixt")
    with pytest.raises(ValueError, match=r"size 16 reached x of shape \(3, 24\) along axis 1, whose length 24 .*8 at"):
        hadamard(torch.ones(3, 24), Hadamard(16))
    with pytest.raises(ValueError, match="no size at all, for it is odd"):
        hadamard(torch.ones(25), Hadamard(2))
    for axis in (2, -3):
        with pytest.raises(IndexError, match=f"axis={axis} is out of range for 2 dimensions. Expected: -2 to 1"):
            hadamard(torch.ones(16, 16), Hadamard(16), axis)
    with pytest.raises(IndexError, match="axis=-1 is out of range for 0 dimensions"):
        hadamard(torch.tensor(1.0), Hadamard(2))
    with pytest.raises(TypeError, match=r"transform is int.*Hadamard\(16\)"):
        hadamard(torch.ones(16), 16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"numpy\.ndarray"):
        hadamard(np.ones(16), Hadamard(16))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="int64"):
        hadamard(torch.ones(16, dtype=torch.int64), Hadamard(16))


@pytest.mark.parametrize("size", [2048, 0, 3, 2.0, True])
def test_sizes_are_powers_of_two_up_to_1024(size: object) -> None:
    with pytest.raises(ValueError, match=r"is invalid for a Hadamard transform\. Expected: powers of two, 2 to 1024"):
        fpsim.Hadamard(size)  # type: ignore[arg-type]
