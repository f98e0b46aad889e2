"""The door to torch and NumPy: autograd, transforms, tracing, memory, bad input."""

from __future__ import annotations

import math
import threading

import ml_dtypes
import numpy as np
import pytest
import torch
from test_formats import ML_DTYPES
from torch._subclasses.fake_tensor import FakeTensorMode

import fpsim
from fpsim import Rounder, as_format, decode, encode, round_to, round_to_

ARGUMENTS = (repr(as_format("e4m3fn")), "nearest_even", "saturate", 0, None)


def test_the_operator_passes_torchs_own_checks() -> None:
    key = torch.tensor(12345)
    for x in (torch.randn(4, 5), torch.randn(6, 4).t()[::2], torch.randn(3, dtype=torch.float64), torch.empty(0)):
        for leaf in (x, x.clone().requires_grad_()):
            torch.library.opcheck(torch.ops.fpsim.round.default, (leaf, *ARGUMENTS))
            torch.library.opcheck(
                torch.ops.fpsim.round.default, (leaf, repr(as_format("e5m2")), "stochastic", "inf", 0, key)
            )


@pytest.mark.filterwarnings("ignore")
def test_it_compiles_as_one_graph_and_gives_the_same() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return round_to(x * 3, "e4m3fn") + 1

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    x = torch.randn(37, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    out, expected = compiled(x), f(y)
    out.sum().backward()
    expected.sum().backward()
    assert torch.equal(out, expected)
    assert x.grad is not None
    assert y.grad is not None
    assert torch.equal(x.grad, y.grad)


@pytest.mark.filterwarnings("ignore")
def test_stochastic_rounding_compiles_as_one_graph() -> None:
    compiled = torch.compile(lambda x: round_to(x, "e5m2", "stochastic"), fullgraph=True, backend="aot_eager")
    x = torch.full((4096,), 1.125)
    first, second = compiled(x), compiled(x)
    assert set(first.tolist()) == {1.0, 1.25}
    assert not torch.equal(first, second)


def test_the_gradient_is_straight_through_also_twice() -> None:
    for size in (5, 40_000):  # a small tensor and one that takes the other way
        x = torch.randn(size, requires_grad=True)
        y = round_to(x, "e5m2")
        (gradient,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        assert torch.equal(gradient, 3 * y**2)
        (second,) = torch.autograd.grad(gradient.sum(), x)
        assert torch.equal(second, 6 * y)


def test_functional_transforms_see_the_straight_through_gradient() -> None:
    x = torch.randn(6, 3)

    def f(v: torch.Tensor) -> torch.Tensor:
        return (round_to(v, "e4m3fn") ** 2).sum()

    assert torch.equal(torch.func.grad(f)(x), 2 * round_to(x, "e4m3fn"))
    assert torch.equal(torch.func.vmap(lambda v: round_to(v, "e4m3fn"))(x), round_to(x, "e4m3fn"))
    assert torch.equal(
        torch.func.vmap(lambda v: round_to(v, "e4m3fn"), in_dims=1, out_dims=1)(x), round_to(x, "e4m3fn")
    )
    assert torch.equal(torch.func.vmap(torch.func.grad(f))(x), 2 * round_to(x, "e4m3fn"))  # per-sample gradients
    noisy = torch.func.vmap(lambda v: round_to(v, "e5m2", "stochastic"), randomness="different")(
        torch.full((9, 99), 1.125)
    )
    assert set(noisy.flatten().tolist()) == {1.0, 1.25}


def test_meta_and_fake_tensors_keep_shape_and_dtype() -> None:
    x = torch.empty(3, 4, device="meta", dtype=torch.float64)
    assert round_to(x, "fp16").shape == (3, 4)
    assert round_to(x, "fp16", "stochastic").device.type == "meta"
    with FakeTensorMode():
        y = torch.randn(2, 5, requires_grad=True)
        z = round_to(y, "bf16")
        assert z.shape == (2, 5)
        assert z.requires_grad
        assert round_to_(torch.randn(2), "bf16").shape == (2,)


def test_any_strides_are_rounded_in_place_and_out_of_place() -> None:
    base = torch.randn(8, 6, 4)
    for view in (base, base.transpose(0, 2), base[::2, 1:, ::3], base[..., 0], base[0, 0, 0], base[:0]):
        expected = round_to(view.contiguous(), "e4m3fn")
        assert torch.equal(round_to(view, "e4m3fn"), expected)
        copy = base.clone().as_strided(view.size(), view.stride(), view.storage_offset())
        assert round_to_(copy, "e4m3fn") is copy
        assert torch.equal(copy, expected)
    expanded = torch.tensor([1.1, 2.3])[:, None].expand(2, 5)
    assert torch.equal(round_to(expanded, "e4m3fn"), round_to(expanded.clone(), "e4m3fn"))
    assert (
        round_to(base.to(memory_format=torch.contiguous_format).permute(2, 0, 1), "fp16").stride()
        == base.permute(2, 0, 1).stride()
    )


def test_rounding_in_place_touches_only_the_view() -> None:
    base = torch.full((4, 4), 1.1)
    round_to_(base[1:3, ::2], "e4m3fn")
    assert int((base == 1.125).sum()) == 4
    assert int((base == torch.tensor(1.1)).sum()) == 12


def test_rounding_in_place_keeps_the_gradient_and_tells_autograd() -> None:
    x = torch.randn(5, requires_grad=True)
    y = x * 2
    z = round_to_(y, "e4m3fn")
    assert z is y
    (z**2).sum().backward()
    assert torch.equal(x.grad, 2 * 2 * z.detach())  # type: ignore[arg-type]
    a = (x * 2).exp()
    round_to_(a, "e4m3fn")  # exp saved its result: autograd must notice the change
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        a.sum().backward()
    with pytest.raises(RuntimeError, match=r"leaf.*Use round_to\(x\)"):
        round_to_(x, "fp16")
    with torch.no_grad():
        round_to_(x, "fp16")


def test_out_is_written_to() -> None:
    x, out = torch.randn(100), torch.full((100,), 7.0)
    assert round_to(x, "e5m2", out=out) is out
    assert torch.equal(out, round_to(x, "e5m2"))
    round_to(x.double()[::2], "e5m2", out=(half := torch.empty(50, dtype=torch.float64)))
    assert torch.equal(half, round_to(x.double()[::2], "e5m2"))
    assert round_to(x, "fp32", out=out) is out
    assert torch.equal(out, x)
    assert round_to(x, "e5m2", out=x) is x  # in place


def test_numpy_arrays_come_back_as_arrays() -> None:
    for dtype in (np.float32, np.float64, np.float16):
        x = np.linspace(-2, 2, 12, dtype=dtype).reshape(3, 4)
        got = round_to(x, "e4m3fn")
        assert isinstance(got, np.ndarray)
        assert got.dtype == dtype
        assert np.array_equal(got, x.astype(ml_dtypes.float8_e4m3fn).astype(dtype))
        assert np.array_equal(round_to(x.T, "e4m3fn"), got.T)
    frozen = np.ones(3, np.float32) * np.float32(1.1)
    frozen.flags.writeable = False
    assert round_to(frozen, "e4m3fn")[0] == 1.125
    out = np.empty((3, 4))
    assert round_to(np.full((3, 4), 1.1), "e4m3fn", out=out) is out
    assert (out == 1.125).all()
    assert round_to(np.array(1.1), "e4m3fn").shape == ()


def test_empty_and_scalar_tensors_work() -> None:
    assert round_to(torch.empty(0, 3), "fp16").shape == (0, 3)
    assert round_to(torch.empty(0), "fp16", "stochastic").shape == (0,)
    assert float(round_to(torch.tensor(1.1), "e4m3fn")) == 1.125
    assert float(round_to(torch.tensor(1.1, dtype=torch.float64), "e4m3fn")) == 1.125


def test_nan_and_inf_are_neither_lost_nor_invented() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 3e38, -1e-45, 0.0])
    for fmt in fpsim.CATALOGUE.values():
        if not fmt.is_signed:
            continue
        for rounding in ("nearest_even", "toward_zero", "stochastic"):
            y = round_to(x, fmt, rounding)
            assert y[0].isnan()
            assert not y[1:].isnan().any()
            assert not y[4:].isinf().any()
            assert bool(y[1] == (math.inf if fmt.has_inf else fmt.largest))


def test_a_parameter_and_a_subclass_are_rounded() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.1]))
    assert round_to(parameter, "e4m3fn").item() == 1.125
    assert round_to(parameter, "e4m3fn").requires_grad


# The layer


def test_a_rounder_rounds_each_direction_to_its_format() -> None:
    x = torch.tensor([1.1, -0.3], requires_grad=True)
    y = Rounder("e4m3fn", "e5m2")(x)
    assert y.tolist() == [1.125, -0.3125]
    y.backward(torch.tensor([1.1, 0.3]))
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 0.3125]
    z = Rounder(backward="e5m2")(x)
    assert torch.equal(z, x)
    assert "forward=e4m3fn nearest_even, backward=float32" in repr(Rounder("e4m3fn"))


def test_a_rounder_supports_double_backward() -> None:
    x = torch.tensor([1.1], requires_grad=True)
    (g,) = torch.autograd.grad((Rounder("e4m3fn", "e5m2")(x) ** 3).sum(), x, create_graph=True)
    assert g.item() == float(round_to(torch.tensor(3 * 1.125**2), "e5m2"))
    (second,) = torch.autograd.grad(g, x)
    assert second.item() == 7.0  # 6 * 1.125 = 6.75, rounded to e5m2 on its way back through the layer


# Codes


@pytest.mark.parametrize("name", ML_DTYPES)
def test_codes_are_those_of_ml_dtypes(name: str) -> None:
    f = as_format(name)
    codes = np.arange(2**f.bits, dtype=np.uint16 if f.bits == 16 else np.uint8)
    with np.errstate(invalid="ignore"):
        values = torch.from_numpy(codes.view(ML_DTYPES[name]).astype(np.float32))
    got = decode(torch.from_numpy(codes.astype(np.int32)), name)
    assert bool(((got == values) & (got.signbit() == values.signbit()) | got.isnan() & values.isnan()).all())
    finite = ~values.isnan()
    assert torch.equal(encode(values[finite], name), torch.from_numpy(codes.astype(np.int32))[finite])
    if f.has_nan:
        assert decode(encode(torch.tensor([math.nan]), name), name).isnan().all()


def test_encode_rounds_first() -> None:
    x = torch.randn(3, 1000) * 100
    theirs = x.numpy().astype(ml_dtypes.float8_e5m2).view(np.uint8).astype(np.int32)
    assert torch.equal(encode(x, "e5m2"), torch.from_numpy(theirs))


def test_codes_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="no code for it"):
        encode(torch.tensor([math.nan]), "e2m1fn")
    with pytest.raises(ValueError, match="0 to 255"):
        decode(torch.tensor([256]), "e5m2")
    with pytest.raises(TypeError, match="integer"):
        decode(torch.tensor([1.0]), "e5m2")
    with pytest.raises(ValueError, match="up to 16 bits"):
        encode(torch.ones(1), "tf32")


# Threads and processes


def test_two_python_threads_round_at_once() -> None:
    torch.set_num_threads(2)
    x = torch.randn(2**19)
    expected = {name: round_to(x, name) for name in ("fp16", "e5m2")}
    failures: list[str] = []

    def work(name: str) -> None:
        for _ in range(20):
            if not torch.equal(round_to(x, name), expected[name]):
                failures.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in expected for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


class Rounded(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> torch.Tensor:
        # no arithmetic of torch's here: after a fork its own threads may hang
        torch.set_num_threads(2)
        return round_to(self.x[i], "e5m2")


@pytest.mark.timeout(120)
def test_a_forked_worker_rounds_after_the_parent_used_its_threads() -> None:
    torch.set_num_threads(2)
    x = torch.randn(4, 2**19)
    round_to(x, "e5m2")
    loader = torch.utils.data.DataLoader(Rounded(x), batch_size=None, num_workers=2, multiprocessing_context="fork")
    for i, y in enumerate(loader):
        assert torch.equal(y, round_to(x[i], "e5m2"))


# Bad input: what came, what is possible, what to do


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(2, dtype=torch.int64), r"dtype int64\. Possible: float32.*x\.float\(\)"),
        (torch.ones(2, dtype=torch.bool), "dtype bool"),
        (torch.ones(2, dtype=torch.complex64), r"dtype complex64.*x\.real and x\.imag"),
        (torch.ones(2, 2).to_sparse(), r"sparse_coo.*Possible: dense.*x\.values\(\)"),
        ([1.0, 2.0], r"x is list\. Possible: a torch\.Tensor"),
        (1.5, "x is float"),
        (np.array([1, 2]), r"dtype int64.*astype"),
        (np.array([1.0], dtype=">f4"), "native byte order"),
        (np.array(["a"]), "Possible: float32"),
    ],
)
def test_tensors_that_cannot_be_rounded_are_refused(x: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        round_to(x, "fp16")  # type: ignore[call-overload]


def test_unknown_words_are_refused() -> None:
    x = torch.ones(2)
    with pytest.raises(ValueError, match="Unknown format 'fp9'"):
        round_to(x, "fp9")
    with pytest.raises(ValueError, match=r"Unknown rounding 'nearest'\. Known: nearest_even"):
        round_to(x, "fp16", "nearest")
    with pytest.raises(ValueError, match=r"Unknown overflow 'clip'\. Known: inf, nan, saturate"):
        round_to(x, "fp16", overflow="clip")
    with pytest.raises(ValueError, match=r"overflow='inf' is impossible: e4m3fn has no inf.*Possible: nan, saturate"):
        round_to(x, "e4m3fn", overflow="inf")


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.empty(4, 3).t(), r"strides \(1, 3\), which is not contiguous"),
        (torch.empty(3, 4, dtype=torch.float64), r"out has dtype torch\.float64, x has torch\.float32"),
        (torch.empty(4, 3), r"out has shape \(4, 3\), x has \(3, 4\)"),
        (torch.empty(3, 4, device="meta"), "out has device meta"),
    ],
)
def test_an_unfit_out_is_refused(out: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        round_to(torch.ones(3, 4), "fp16", out=out)


def test_out_with_a_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match=r"out= keeps no gradient.*torch\.no_grad"):
        round_to(torch.ones(2, requires_grad=True), "fp16", out=torch.empty(2))
    with pytest.raises(TypeError, match="out is list"):
        round_to(torch.ones(2), "fp16", out=[1.0, 2.0])  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="out is Tensor and x a numpy"):
        round_to(np.ones(2), "fp16", out=torch.empty(2))  # type: ignore[call-overload]
