"""Numbers and tensors of other kinds beside the format: integers, float32 by promotion, and the format's own step."""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import tiers
import torch
import torch.nn.functional as F
from module_blocks import Function
from operand_kinds import EXCEPTIONS, faults, rows
from tiers import parametrize
from torch import Tensor, nn

import fpsim
from fpsim import emulate, quantize

NATIVE = {"bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = pytest.mark.parametrize("fmt", NATIVE)
N = torch.tensor([257, 1001, 2049, 70001])
X = torch.tensor([1.0, -2.0, 0.5, 3.0])


def written(x: Tensor) -> Tensor:
    z = x * 1
    z[1] = 1001
    z[2:4] = N[2:4]
    return z


def marked(x: Tensor) -> Tensor:
    """A write, after which the tensor is known to be in the format."""
    z = x * 1
    z[1] = 257
    return z - 255


INTEGERS: dict[str, Callable[[Tensor], Tensor]] = {
    "x * n": lambda x: x * N,
    "x + n": lambda x: x + N,
    "n - x": lambda x: N - x,
    "x / n": lambda x: x / N,
    "n / x": lambda x: N / x,
    "n // x": lambda x: N // x,
    "x ** n": lambda x: (x / 4) ** torch.tensor([257, 1001, 2, 3]),
    "x + 257, a tensor": lambda x: x + torch.tensor(257),
    "x * 257, a tensor": lambda x: x * torch.tensor(257),
    "x * [257]": lambda x: x * torch.tensor([257]),
    "maximum": lambda x: torch.maximum(x, N),
    "maximum of one": lambda x: torch.maximum(x, torch.tensor(257)),
    "max": lambda x: torch.max(x, N),
    "where": lambda x: torch.where(x > 0, x, N),
    "clamp": lambda x: (x * 1000).clamp(-257, 1001),
    "clamp by tensors": lambda x: (x * 1000).clamp(-N, N),
    "cat": lambda x: torch.cat([x, N]),
    "stack": lambda x: torch.stack([N, x, N]),
    "stack of one each": lambda x: torch.stack([x[0], torch.tensor(257)]),
    "block_diag": lambda x: torch.block_diag(x, N),
    "diff": lambda x: torch.diff(x, append=N),
    "z[...] = n": written,
    "z[1] = 257; z - 255": marked,
    "x == 257": lambda x: x * 256 == 257,
    "x == 257, by name": lambda x: torch.eq(input=x * 256, other=257),
    "x > n": lambda x: x * 256 > torch.tensor([255, -513, 127, 769]),
    "n >= x": lambda x: torch.tensor([257, -511, 129, 767]) >= x * 256,
    "x % 257": lambda x: (x * 256) % 257,
    "x % np.int64(257)": lambda x: (x * 256) % np.int64(257),  # type: ignore[operator]
    "fmod": lambda x: torch.fmod(x * 256, 257),
    "mse_loss": lambda x: F.mse_loss(x, N, reduction="none"),
    "huber_loss": lambda x: F.huber_loss(x, N, reduction="none"),
    "outer": lambda x: torch.outer(N, x),
    "einsum": lambda x: torch.einsum("i,j->ij", N, x),
    "addcmul": lambda x: torch.addcmul(x, N, x),
    "in place": lambda x: (x * 1).mul_(N),
    "into out": lambda x: torch.add(x, N, out=x.new_empty(4)),
    "foreach": lambda x: torch._foreach_mul([x], [N])[0],
    "foreach, in place": lambda x: (y := x * 1, torch._foreach_add_([y], [N]))[0],
    "foreach_maximum": lambda x: torch._foreach_maximum([x * 1], [257])[0],
    "foreach_clamp_max": lambda x: torch._foreach_clamp_max([x * 1000], 257)[0],
    "copy_": lambda x: (x * 1).copy_(N),
    "on an input": lambda x: (x.__setitem__(0, 257), x - 255)[1],
}


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.double().nan_to_num(0.125), b.double().nan_to_num(0.125))


@FORMATS
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_beside_numbers_of_the_format_become_numbers_of_it(name: str, fmt: str) -> None:
    run = INTEGERS[name]
    native = run(X.to(NATIVE[fmt]))
    emulated = quantize(Function(run), fmt)(X.clone())
    assert same(native, emulated)


def in_e4m3fn(x: Tensor) -> Tensor:
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).float()


OF_E4M3FN: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "x * n": (lambda x: x * N, lambda x, n: x * n),
    "n + x": (lambda x: N + x, lambda x, n: n + x),
    "cat": (lambda x: torch.cat([x, N]), lambda x, n: torch.cat([x, n])),
    "minimum": (lambda x: torch.minimum(x * 256, N), lambda x, n: torch.minimum(in_e4m3fn(x * 256), n)),
    "z[...] = n": (written, lambda x, n: torch.stack([x[0], in_e4m3fn(torch.tensor(1001)), n[2], n[3]])),
}


@pytest.mark.parametrize("name", OF_E4M3FN)
def test_a_format_that_torch_does_not_compute_in_has_the_same_rule(name: str) -> None:
    run, expected = OF_E4M3FN[name]
    assert torch.equal(quantize(Function(run), "e4m3fn")(X.clone()), in_e4m3fn(expected(X, in_e4m3fn(N))))


def sure(x: Tensor) -> Tensor:
    """Logits whose losses are zero for the classes of `POSITIONS`, and infinite for all others."""
    is_one = torch.arange(1500) == POSITIONS[:, None]
    return torch.where(is_one, x[0, 0] * 0, torch.full_like(is_one, -math.inf, dtype=x.dtype))


def test_integers_are_rounded_to_nearest_and_draw_no_noise() -> None:
    options = {"fmt": "e5m2", "rounding": "stochastic"}
    model = quantize(Function(lambda x: torch.cat([x * N, x * 1.1])), **options)  # type: ignore[arg-type]
    drawn = quantize(Function(lambda x: torch.cat([x * 4, x * 1.1])), **options)  # type: ignore[arg-type]
    nearest = N.float().to(torch.float8_e5m2).float()
    ones = torch.tensor([1.0, -1.0, 1.0, 1.0])
    for seed in range(5):
        found = []
        for each in (model, drawn):
            fpsim.manual_seed(seed)
            found.append(each(ones))
        assert torch.equal(found[0][:4], ones * nearest)
        assert torch.equal(found[0][4:], found[1][4:])


TABLE = torch.arange(3000.0).view(1500, 2) % 7
POSITIONS = torch.tensor([257, 1001])
# Each takes integers that are not numbers of either format, and no operands.
INDICES: dict[str, Callable[[Tensor], Tensor]] = {
    "x[i]": lambda x: x[POSITIONS],
    "x[i] = 1": lambda x: (x * 1).index_put((POSITIONS,), torch.ones((), dtype=x.dtype)),
    "gather": lambda x: x.gather(0, POSITIONS[:, None]),
    "index_select": lambda x: x.index_select(0, POSITIONS),
    "index_add": lambda x: x.index_add(0, POSITIONS, x[:2]),
    "take_along_dim": lambda x: x.take_along_dim(POSITIONS[:, None], 0),
    "embedding": lambda x: F.embedding(POSITIONS, x),
    "cross_entropy": lambda x: F.cross_entropy(sure(x), POSITIONS, reduction="none"),
    "nll_loss": lambda x: F.nll_loss(x.T, POSITIONS, reduction="none"),
    "scatter": lambda x: x.scatter(0, POSITIONS[:, None], 5.0),
    "repeat_interleave": lambda x: x[:2].repeat_interleave(torch.tensor([257, 3]), 0),
    "sums of labels": lambda x: POSITIONS * 2 + x.new_zeros(2).long(),
    "one_hot": lambda x: F.one_hot(POSITIONS, 1002).to(x.dtype),
}


@FORMATS
@pytest.mark.parametrize("name", INDICES)
def test_indices_and_labels_stay_integers(name: str, fmt: str) -> None:
    run = INDICES[name]
    assert same(run(TABLE.to(NATIVE[fmt])), quantize(Function(run), fmt)(TABLE))


def test_integers_and_weighted_counts_in_fp32_are_those_of_the_model() -> None:
    big = torch.tensor([2**24 + 1, 3, 2**40 + 1, 5])
    for run in (
        lambda x: x * big,
        lambda x: torch.cat([x, big]),
        lambda x: x % 16777217,
        lambda x: x < 16777217,
        lambda x: torch.bincount(torch.arange(4) % 2, weights=x * 1.003),
    ):
        plain, emulated = run(X), quantize(Function(run), "fp32")(X)
        assert plain.dtype is emulated.dtype
        assert torch.equal(plain, emulated)


@pytest.mark.parametrize("fmt", ["bf16", "e4m3fn"])
def test_a_compiled_program_has_the_same_numbers(fmt: str) -> None:
    names = ["x + n", "x / n", "maximum", "cat", "z[...] = n", "x == 257", "x > n", "x % 257", "einsum", "in place"]

    class All(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return [INTEGERS[name](x) for name in names]

    model = quantize(All(), fmt)
    expected = model(X)
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(X)
    assert all(map(same, found, expected))


KINDS_ROWS = list(rows())


@parametrize(
    ("name", "fmt"),
    [
        pytest.param(name, fmt, marks=[] if place % 2 == turn else [pytest.mark.slow])
        for place, name in enumerate(KINDS_ROWS)
        for turn, fmt in enumerate(NATIVE)
    ],
    keep=tiers.every(13),
)
def test_every_operation_takes_every_kind_of_operand_as_native_code_does(name: str, fmt: str) -> None:
    _, found = faults(name, fmt)
    assert {key: text for key, text in found.items() if not EXCEPTIONS(name, *key)} == {}


# float32 that is made, and float32 beside the format


def wide(x: Tensor) -> Tensor:
    return x.float() * 1.003


def sparse(values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 3]]), values, (8,))


PROMOTED: dict[str, Callable[[Tensor], Tensor]] = {
    "einsum of rotary codes": lambda x: torch.einsum("i,j->ij", torch.arange(1000, 1008).float(), x).cos(),
    "einsum of a batch": lambda x: torch.einsum("bi,i->bi", x.view(2, 4), wide(x)[:4]),
    "einsum of rows": lambda x: torch.einsum("bi,bi->bi", wide(x).view(2, 4), x.view(2, 4)),
    "einsum with a number": lambda x: torch.einsum("bi,->bi", x.view(2, 4), wide(x)[0]),
    "einsum with an ellipsis": lambda x: torch.einsum("...n,d->...nd", x.view(2, 4), wide(x)),
    "einsum by numbers": lambda x: torch.einsum(x, [0], wide(x), [1], [0, 1]),
    "an einsum that sums": lambda x: torch.einsum("i,ij->j", x, x[:, None] * x) * 1.1,
    "addr": lambda x: torch.addr(torch.zeros(8, 8, dtype=x.dtype), wide(x), x),
    "inner with a number of the format": lambda x: torch.inner(wide(x), x[1]),
    "inner with a number of float32": lambda x: torch.inner(x, wide(x)[1]) * 1.1,
    "foreach_mul": lambda x: torch._foreach_mul([x * 1], [wide(x)])[0],
    "foreach_add": lambda x: torch._foreach_add([wide(x), x * 1], [x * 1, x * 1])[0],
    "foreach_sub of float32 and a number": lambda x: torch._foreach_sub([x * 1], [wide(x)], alpha=2)[0],
    "foreach_add_": lambda x: (y := x * 1, torch._foreach_add_([y], [wide(x)]), y * 1.1)[2],
    "huber_loss": lambda x: F.huber_loss(x, torch.linspace(0, 1, 8), reduction="none"),
    "mse_loss": lambda x: F.mse_loss(x, torch.linspace(0, 1, 8), reduction="none"),
    "ldexp": lambda x: torch.ldexp(torch.linspace(0, 1, 8), x),
    "ldexp of the format": lambda x: torch.ldexp(x, x * 2),
    "ldexp by integers": lambda x: torch.ldexp(x, torch.arange(8)) * 1.003,
    "bincount with weights": lambda x: torch.bincount(torch.arange(8) % 4, weights=x * 1) * 1.003,
    "bincount with float32": lambda x: torch.bincount(torch.arange(8) % 4, weights=wide(x)) * 1.003,
    "fftfreq": lambda x: x * torch.fft.fftfreq(8),
    "rfftfreq": lambda x: x * torch.fft.rfftfreq(14),
    "a sparse tensor": lambda x: (
        x * torch.sparse_coo_tensor(torch.tensor([[0, 3]]), torch.tensor([1.003, 0.7]), (8,)).to_dense()
    ),
    "a sparse tensor of the format": lambda x: (
        1.1 * torch.sparse_coo_tensor(torch.tensor([[0, 3]]), x[:2] * 1.1, (8,)).to_dense()
    ),
    "float32 to sparse": lambda x: x * wide(x).to_sparse().to_dense(),
    **{
        f"{name}_window": lambda x, name=name: x * getattr(torch, f"{name}_window")(8)
        for name in ("hann", "hamming", "blackman", "bartlett", "kaiser")
    },
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@FORMATS
@pytest.mark.parametrize("name", PROMOTED)
def test_float32_beside_the_format_stays_float32_where_native_code_has_it(name: str, fmt: str) -> None:
    x = torch.linspace(-1, 1, 8).to(NATIVE[fmt])
    native, kinds = PROMOTED[name](x), []

    def run(x: Tensor) -> Tensor:
        y = PROMOTED[name](x)
        kinds.append(y.dtype)
        return y

    emulated = quantize(Function(run), fmt)(x.float())
    assert kinds == [native.dtype]
    assert same(native, emulated)


# The next number of the format


ENDS = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan]


def test_nextafter_in_bf16_is_that_of_torch() -> None:
    bits = torch.arange(-(2**15), 2**15, 37, dtype=torch.int32).to(torch.int16)
    x = torch.cat([bits.view(torch.bfloat16), torch.tensor(ENDS).bfloat16()])
    for toward in (*ENDS, 3.0):
        end = torch.full_like(x, toward)
        native = torch.nextafter(x, end)
        given, far = x.float(), end.float()
        with emulate("bf16"):
            found = torch.nextafter(given * 1, far)
            by_method = (given * 1).nextafter_(far)
        for y in (found, by_method):
            assert same(y, native)


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e2m1fn"])
def test_nextafter_moves_by_the_step_of_any_format(name: str) -> None:
    kind = getattr(ml_dtypes, {"e4m3fn": "float8_e4m3fn", "e5m2": "float8_e5m2", "e2m1fn": "float4_e2m1fn"}[name])
    values = np.arange(256 if name != "e2m1fn" else 16, dtype=np.uint8).view(kind)
    values = values[np.isfinite(values.astype(np.float32))]
    for toward in (-3.0, 0.0, 1.0, float(values.astype(np.float32).max())):
        expected = np.nextafter(values, kind(toward)).astype(np.float32)
        x = torch.from_numpy(values.astype(np.float32))
        with emulate(name):
            found = torch.nextafter(x * 1, torch.full_like(x, toward))
        assert np.array_equal(found.numpy(), expected)


def test_nextafter_of_float32_on_purpose_is_that_of_float32() -> None:
    x = torch.tensor([1.0, 3.0])
    with emulate("bf16"):
        found = torch.nextafter(x.float(), torch.full((2,), 9.0))
    assert torch.equal(found, torch.nextafter(x, torch.full((2,), 9.0)))


@FORMATS
@pytest.mark.parametrize(
    "run", [lambda x: x.view(torch.int16), lambda x: torch.arange(4, dtype=torch.int16).view(x.dtype)]
)
def test_a_view_of_the_bits_of_a_number_of_the_format_is_refused(run: Callable[[Tensor], Tensor], fmt: str) -> None:
    with pytest.raises(NotImplementedError, match=r"asks for the bits .* held in float32 here.*Use x\.to\("):
        quantize(Function(run), fmt)(X)


@FORMATS
def test_bits_of_float32_on_purpose_and_a_view_as_the_own_dtype_are_given(fmt: str) -> None:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return wide(x).view(torch.int32), (x * 1.1).view(x.dtype)

    x = X.to(NATIVE[fmt])
    native, emulated = run(x), quantize(Function(run), fmt)(x.float())  # type: ignore[arg-type]
    assert all(map(same, native, emulated))
