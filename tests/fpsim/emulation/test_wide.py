"""float32 on purpose: where code asks for it, emulated code computes what native code in bfloat16 and float16 does."""

from __future__ import annotations

import gc
import random
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from module_functions import Product
from tiers import parametrize
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fpsim
from fpsim import Policy, emulate, quantize, round_to

NATIVE = {"bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = pytest.mark.parametrize("fmt", NATIVE)


def both_ways(function: Callable[..., Any], fmt: str, *inputs: Tensor) -> tuple[Any, Any]:
    """What native code gives, and what emulated code does, from the same numbers."""
    rounded = [x.to(NATIVE[fmt]) if x.is_floating_point() else x for x in inputs]
    outside = [x.float() if x.is_floating_point() else x for x in rounded]
    native = function(*rounded)
    with emulate(fmt):
        emulated = function(*outside)
    return native, emulated


def positions(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(size, dtype=dtype) / 7


def positions_by_name(size: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    return positions(size, dtype)


def by_a_variable(x: Tensor, y: Tensor) -> Tensor:
    compute = torch.float64 if x.device.type == "cpu" else torch.float32
    own = x.dtype
    wide = torch.arange(x.shape[-1], dtype=compute) / 7
    return (wide.to(torch.float32) * x.to(own) * 1.1).to(own) + y.to(own) * 0.3


def by_a_parameter(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    dtype = dtype or torch.float32
    return x.to(dtype) * 1.1


def rotated(x: Tensor, y: Tensor) -> Tensor:
    """A rotary code by complex numbers, as the first Llama wrote it."""
    angles = torch.outer(torch.arange(x.shape[0]).float(), 1.0 / 10 ** torch.arange(x.shape[1] // 2).float())
    turned = torch.view_as_complex(x.float().reshape(x.shape[0], -1, 2)) * torch.polar(torch.ones_like(angles), angles)
    return (torch.view_as_real(turned).flatten(1) * 1.1 + 0.3).type_as(y)


def filtered(x: Tensor, y: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x.float()) * 0.3) * 1.1 + y


# Each takes tensors that native code has in its dtype, and gives one.
ISLANDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "to float32 and back": lambda x, y: (x.to(torch.float32) * 1.1).to(x.dtype),
    "float and back": lambda x, y: (x.float() * 1.1 + 0.3).type_as(y),
    "back by to(other)": lambda x, y: (x.float() * 1.1).to(y),
    "back by type": lambda x, y: (x.float() * 1.1).type(y.dtype),
    "stays float32": lambda x, y: x.float() * 1.1 - 0.3,
    "stays float32 in a copy on its device": lambda x, y: (x.float() * 1.1).to(x.device, copy=True) * 1.1,
    "promotion": lambda x, y: x.float() * y + 0.1,
    "promotion through a chain": lambda x, y: ((x + y) * (x * y).to(torch.float32)).exp(),
    "softmax in float32": lambda x, y: torch.softmax(x, dim=-1, dtype=torch.float32),
    "softmax in float32, cast back": lambda x, y: F.softmax(x, dim=-1, dtype=torch.float32).to(y.dtype),
    "mean in float32": lambda x, y: x.mean(-1, keepdim=True, dtype=torch.float32) * x,
    "a scalar tensor promotes nothing": lambda x, y: x * torch.tensor(0.1, dtype=torch.float32),
    "a 0-d island promotes nothing": lambda x, y: x * y.float().flatten()[0],
    "a 0-d island that is moved promotes nothing": lambda x, y: torch.maximum(x, torch.tensor(0.1)) * 1.1,
    "integers": lambda x, y: torch.arange(x.shape[-1]) / 7 * x,
    "a factory": lambda x, y: torch.full(x.shape, 0.1) * x,
    "a factory in float32": lambda x, y: torch.arange(x.shape[-1], dtype=torch.float32) * 0.1 * x,
    "a factory in the model's dtype": lambda x, y: torch.full(x.shape, 0.1, dtype=x.dtype) * x,
    "like the model's": lambda x, y: torch.full_like(x, 0.1) * x,
    "like an island": lambda x, y: torch.full_like(x.float(), 0.1) * x,
    "joined": lambda x, y: torch.cat([x, y.float() * 1.1]),
    "chosen": lambda x, y: torch.where(x > 0, x, y.float() * 1.1),
    "written into": lambda x, y: (x * 1.0).add_(y.float() * 1.1),
    "an island written into": lambda x, y: x.float().add_(y).mul_(1.1),
    "set": lambda x, y: (x * 1.0).index_put((torch.tensor([0]),), (y.float() * 1.1)[0].to(x.dtype)),
    "a product of islands": lambda x, y: x.float() @ y.float().mT,
    "an outer product, which multiplies element by element": lambda x, y: torch.outer(x[0], y[0].float()) * 1.1,
    "a norm in Python": lambda x, y: (
        y * (x.to(torch.float32) * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    ),
    "a variable that was set to float64": by_a_variable,
    "a default": lambda x, y: positions(x.shape[-1]) * x,
    "a default by name": lambda x, y: positions_by_name(x.shape[-1]) * x,
    "no default": lambda x, y: positions(x.shape[-1], x.dtype) * x,
    "no default by name": lambda x, y: positions_by_name(x.shape[-1], dtype=y.dtype) * x,
    "a parameter": lambda x, y: by_a_parameter(x, torch.float32) + y,
    "a parameter left out": lambda x, y: by_a_parameter(x) + y,
    "a parameter of the model's dtype": lambda x, y: by_a_parameter(x.float(), y.dtype) + y,
    "a literal that is not a dtype of the call": lambda x, y: (
        torch.full(x.shape, 1 + 8 * torch.finfo(torch.float32).eps, dtype=x.dtype) * x.float().to(y.dtype)
    ),
    "filled": lambda x, y: torch.zeros(8).fill_(0.1) * x,
    "filled in the model's dtype": lambda x, y: (x * 1.0).fill_(0.1) * y,
    "filled with zeros": lambda x, y: torch.ones(8).zero_() + x * 1.1,
    "distinct numbers": lambda x, y: torch.unique(x.float() * 1.1) * 0.3,
    "distinct numbers of the model's": lambda x, y: torch.unique(x * 1.1) * 0.3,
    "distinct numbers, counted": lambda x, y: torch.unique((x.float() * 1.1)[0], return_counts=True)[0] * y,
    "repeats left out": lambda x, y: (y.float() * 1.1).flatten().unique_consecutive() + x.flatten(),
    "a tensor of an island": lambda x, y: torch.as_tensor(x.float() * 1.1) * y,
    "the type FloatTensor": lambda x, y: x.type(torch.FloatTensor) * 1.1 - y,
    "the type FloatTensor by name": lambda x, y: x.type("torch.FloatTensor") * 1.1 - y,
    "integers to the type FloatTensor": lambda x, y: torch.arange(8).type(torch.FloatTensor) * 0.1 * x,
    "the type of another": lambda x, y: (x.float() * 1.1).type(y.type()) * y,
    "complex numbers": rotated,
    "a Fourier transform": filtered,
    "cast without an island": lambda x, y: x.to(y.dtype) * 1.1 + y,
}


@FORMATS
@pytest.mark.parametrize("name", ISLANDS)
def test_an_island_computes_as_native_code_does(name: str, fmt: str) -> None:
    native, emulated = both_ways(ISLANDS[name], fmt, torch.randn(6, 8), torch.randn(6, 8))
    # sums too: on the CPU native code adds up the same float32 numbers with the same kernel
    assert torch.equal(emulated, native.float())
    is_narrow = torch.equal(emulated, round_to(emulated, fmt))
    assert is_narrow == (native.dtype is NATIVE[fmt]) or torch.equal(native.float(), native.to(NATIVE[fmt]).float())


DRAWN: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform_": lambda x: torch.empty(500).uniform_(),
    "normal_": lambda x: torch.empty(500).normal_(),
    "exponential_": lambda x: torch.empty(500).exponential_(),
    "normal": lambda x: torch.normal(x.float(), 1.0),
    "poisson": lambda x: torch.poisson(x.float().abs() * 1000),
}


@FORMATS
@pytest.mark.parametrize("name", DRAWN)
def test_what_is_drawn_in_float32_stays_there(name: str, fmt: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(500).to(NATIVE[fmt]).float()
    torch.manual_seed(3)
    drawn = DRAWN[name](x)
    torch.manual_seed(3)
    with emulate(fmt):
        emulated = DRAWN[name](x)
        product = emulated * x
    assert torch.equal(emulated, drawn)
    assert torch.equal(product, drawn * x)


@FORMATS
def test_what_is_drawn_in_the_model_s_dtype_is_in_the_format(fmt: str) -> None:
    x = torch.randn(500).abs()
    with emulate(fmt):
        drawn = (x * 1.0).uniform_(), (x * 1.0).exponential_(), torch.poisson(x * 1e4)
    for values in drawn:
        assert torch.equal(values.to(NATIVE[fmt]).float(), values)
        assert values.unique().numel() > 1


def test_float64_stays_float64_in_a_model_of_float32() -> None:
    """Rotary codes of Flux: positions in float32 times frequencies in float64."""

    def codes(x: Tensor) -> Tensor:
        return torch.outer(x.float(), 1 / 10000 ** (torch.arange(8, dtype=torch.float64) / 8))

    x = torch.arange(20.0)
    with emulate("fp32"):
        emulated = codes(x)
    assert emulated.dtype is torch.float64
    assert torch.equal(emulated, codes(x))


def variance(d: Tensor) -> Tensor:
    """Of numbers near 10,000, of which float32 leaves nothing."""
    return d.pow(2).mean() - d.mean().pow(2)


def float64_of(x: Tensor) -> Tensor:
    return torch.linspace(0.1, 1, x.shape[-1], dtype=torch.float64)


# Each is given numbers and a buffer.
FLOAT64: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "double": lambda x, b: variance(x.double()).float(),
    "to": lambda x, b: variance(x.to(torch.float64)).to(torch.float32),
    "to, by name": lambda x, b: variance(x.to(dtype=torch.float64)),
    "to a device": lambda x, b: variance(x.to("cpu", torch.float64)),
    "to, of another's dtype": lambda x, b: variance(x.to(float64_of(x).dtype)),
    "to, like another": lambda x, b: variance(x.to(float64_of(x))),
    "type_as": lambda x, b: variance(x.type_as(float64_of(x))),
    "type": lambda x, b: variance(x.type(torch.float64)),
    "type, in words": lambda x, b: variance(x.type("torch.DoubleTensor")),
    "type, a class": lambda x, b: variance(x.type(torch.DoubleTensor)),
    "as_tensor": lambda x, b: variance(torch.as_tensor(x, dtype=torch.float64)),
    "complex128": lambda x, b: (x.to(torch.complex128) / 3).real,
    "times float64": lambda x, b: variance(x * torch.full_like(x, 1.5, dtype=torch.float64)),
    "times ones of another's dtype": lambda x, b: variance(x * torch.ones_like(x, dtype=float64_of(x).dtype)),
    "a factory": lambda x, b: torch.full((6,), 1 / 3, dtype=torch.float64) * x,
    "a factory of another's dtype": lambda x, b: torch.full((6,), 1 / 3, dtype=float64_of(x).dtype) * x,
    "new_tensor": lambda x, b: x.new_tensor([1 / 3] * 6, dtype=torch.float64) * x,
    "a sum": lambda x, b: x.sum(0, dtype=torch.float64) / 3,
    "a mean of another's dtype": lambda x, b: x.double().square().mean() - x.mean(dtype=float64_of(x).dtype) ** 2,
    "softmax": lambda x, b: torch.softmax(x, -1, dtype=torch.float64) / 3,
    "a product": lambda x, b: x.double() @ float64_of(x),
    "a product with a buffer": lambda x, b: x.double() @ b.double(),
    "a buffer": lambda x, b: b.double() / 3 * x,
    "a buffer, to": lambda x, b: b.to(torch.float64) / 3,
    "a Fourier transform": lambda x, b: torch.fft.rfft(x.double()).abs(),
    "joined": lambda x, b: variance(torch.cat([x.double(), x])),
    "in place": lambda x, b: x.double().mul_(1 / 3).add_(x),
    "without a gradient": lambda x, b: x.detach().double() / 3 * x,
}


@parametrize("way", FLOAT64, keep={"double", "to", "type, in words", "a factory of another's dtype", "a buffer"})
@parametrize("fmt", ["fp32", "bf16", "e4m3fn", "recipe:mxfp8"], keep={"fp32", "e4m3fn"})
def test_float64_that_a_forward_asks_for_stays_float64(way: str, fmt: str) -> None:
    """Numbers are those of torch itself: of inputs that the format has, or of any input in float32."""

    class Detour(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("b", torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0]))

        def forward(self, x: Tensor) -> Tensor:
            return FLOAT64[way](x, self.b)

    x = torch.randn(200, 6) + 1e4 if fmt == "fp32" else round_to(torch.randn(200, 6) * 16, "e4m3fn")
    results = []
    for model in (Detour(), quantize(Detour(), fmt)):
        given = x.clone().requires_grad_()
        out = model(given)
        if out.requires_grad:
            out.square().sum().backward()
        results.append((out.detach(), given.grad))
    (expected, gradient), (got, emulated) = results
    assert got.dtype is expected.dtype
    assert torch.equal(got, expected)
    if fmt == "fp32" and gradient is not None:
        assert emulated is not None
        assert torch.equal(emulated, gradient)


OF_FLOAT64: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a buffer": lambda m, x: x * m.b / 3,
    "a buffer, cast back": lambda m, x: (x * m.b / 3).float() * m.w,
    "a view of a buffer": lambda m, x: m.b[1:3] * x[0, 0] / 3,
    "written to a buffer": lambda m, x: x * m.seen.add_(x.detach().double().mean(0) / 3),
    "a parameter": lambda m, x: x.double() @ m.w64 / 3 + m.w.sum(),
    "a layer": lambda m, x: m.layer(x.double()).to(x.dtype) * m.w,
    "an LSTM": lambda m, x: m.lstm(x.double())[0],
    "joined": lambda m, x: torch.cat([x[0], m.b]) / 3,
    "in place": lambda m, x: (x * 1).mul_(m.b / 3),
    "an input": lambda m, x: x / 3 * m.w,
}


@parametrize("way", OF_FLOAT64, keep={"a buffer", "a parameter", "an LSTM"})
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_fp32_leaves_float64_of_a_model_of_float32_alone(way: str, dtype: torch.dtype) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.w64 = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4).double() / 3)
            self.layer, self.lstm = nn.Linear(4, 4).double(), nn.LSTM(4, 4).double()
            self.register_buffer("b", torch.randn(4).double() / 3)
            self.register_buffer("seen", torch.zeros(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return OF_FLOAT64[way](self, x)

    x, model = torch.randn(3, 4).to(dtype), Mixed()
    results: list[list[Tensor | None]] = []
    for m in (quantize(model, "fp32"), model):
        given = x.clone().requires_grad_()
        out = m(given)
        out.square().sum().backward()
        results.append([out, given.grad, m.seen, *(p.grad for p in m.parameters())])
    for found, expected in zip(*results, strict=True):
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert found.dtype is expected.dtype
            assert torch.equal(found, expected)


def test_a_model_of_float64_is_rounded_in_float64() -> None:
    """There `x.to(y.dtype)` asks for the model's own dtype, which holds the format's numbers."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.rand(6, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x.to(self.w.dtype) * self.w

    q, x = quantize(Own(), "e4m3fn"), torch.rand(50, 6)
    out, w = q(x).detach(), q.w.detach()
    assert out.dtype is torch.float64
    assert torch.equal(out, round_to(round_to(x, "e4m3fn").double() * round_to(w, "e4m3fn"), "e4m3fn"))


UNARY: list[Callable[[Tensor], Tensor]] = [
    lambda x: x * 1.1,
    lambda x: x + 0.25,  # of a scalar with more digits, torch's addition on the CPU rounds the scalar first
    lambda x: -x,
    lambda x: x.abs().sqrt(),
    lambda x: F.relu(x),
    lambda x: x.float(),
    lambda x: x.to(torch.float32),
    lambda x: x.mT.contiguous().mT,
    lambda x: x[:, :1] - x,
    lambda x: (x.abs() + 1.0).reciprocal(),
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    torch.sub,
    torch.mul,
    lambda x, y: x / (y.abs() + 0.5),
    torch.maximum,
    lambda x, y: torch.where(x > y, x, y),
    lambda x, y: torch.cat([x, y], -1)[:, ::2],
    lambda x, y: x.type_as(y),
    lambda x, y: torch.stack([x, y]).amax(0),
]


@FORMATS
@pytest.mark.parametrize("seed", range(40))
def test_random_programs_with_casts_equal_native_ones_bit_for_bit(seed: int, fmt: str) -> None:
    draw = random.Random(seed)
    steps = [(draw.random() < 0.5, draw.randrange(100), draw.randrange(100), draw.randrange(100)) for _ in range(16)]

    def program(x: Tensor, y: Tensor) -> list[Tensor]:
        found, narrow = [x, y], x
        for is_unary, which, i, j in steps:
            a, b = found[i % len(found)], found[j % len(found)]
            found.append(UNARY[which % len(UNARY)](a) if is_unary else BINARY[which % len(BINARY)](a, b))
            if which % 5 == 0:
                found.append(found[-1].to(narrow.dtype))
        return found

    native, emulated = both_ways(program, fmt, torch.randn(4, 6), torch.randn(4, 6))
    for n, e in zip(native, emulated, strict=True):
        assert torch.equal(n.float().nan_to_num(), e.nan_to_num())


@FORMATS
def test_the_gradient_is_rounded_at_the_border_of_an_island_and_not_inside(fmt: str) -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        x = x * 1.0
        h = (x.to(torch.float32) * 1.1).square() * 0.7
        return (h.to(x.dtype) * w).float().sum()

    x, w = torch.randn(5, 7).to(NATIVE[fmt]), torch.randn(5, 7).to(NATIVE[fmt])
    native = x.clone().requires_grad_()
    loss(native, w).backward()
    leaf, outside_w = x.float().requires_grad_(), w.float()
    with emulate(fmt):
        out = loss(leaf, outside_w)
    out.backward()
    assert torch.equal(leaf.grad, native.grad.float())  # type: ignore[union-attr, arg-type]


def test_islands_change_no_gradient_where_the_format_is_float32_too() -> None:
    def loss(x: Tensor) -> Tensor:
        h = x * 1.1
        wide = h.to(torch.float32)  # the same tensor: three gradients meet at it, and a fourth with a copy between
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (h + wide.to(x.dtype) * 0.3).pow(3).sum()

    x = torch.randn(64, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(loss(x), x)
    with emulate("fp32"):
        out = loss(x)
    assert torch.equal(torch.autograd.grad(out, x)[0], expected)


def test_distinct_positions_stay_distinct() -> None:
    positions = torch.arange(2048)
    inverse = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))

    def codes(positions: Tensor, inverse: Tensor, x: Tensor) -> Tensor:
        angles = positions[:, None].float() * inverse[None, :].float()
        return angles.cos().to(x.dtype)

    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inverse", inverse)

        def forward(self, x: Tensor) -> Tensor:
            return codes(positions, self.inverse, x)

    emulated = quantize(Codes(), "bf16")(torch.ones(1))  # a buffer stays float32
    expected = (positions[:, None] * inverse).cos().to(torch.bfloat16).float()
    assert torch.equal(emulated, expected)
    assert len(quantize(Codes(), "e4m3fn")(torch.ones(1)).unique(dim=0)) > 1000


@pytest.mark.parametrize("fmt", ["bf16", "e5m2"])
def test_counts_of_what_is_float32_on_purpose_are_exact(fmt: str) -> None:
    experts = torch.arange(3001) % 3  # as transformers counts tokens, to know where the rows of each expert end
    with emulate(fmt):
        counts = torch.histc(experts.float(), bins=3, min=0, max=2)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    assert ends.tolist() == [1001, 2001, 3001]


def test_an_island_under_autocast_switched_off_keeps_what_comes_from_outside() -> None:
    x, weight = torch.randn(4, 4), nn.Parameter(torch.randn(4, 4))
    with emulate("e5m2"):
        with torch.autocast("cpu", enabled=False):
            y = F.linear(x.float(), weight)
            z = x * 1.1
        inside = F.linear(x, weight)
    assert torch.equal(y, F.linear(x, weight))
    assert torch.equal(z, x * 1.1)
    assert torch.equal(inside, round_to(inside, "e5m2"))


OF_A_WEIGHT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "T": lambda x, w: x @ w.T,
    "t and a row": lambda x, w: torch.addmm(w[0], x, w.t()),
    "view": lambda x, w: F.linear(x, w.view(4, 4)),
    "slice": lambda x, w: F.linear(x, w[:, :]),
    "chunk": lambda x, w: F.linear(x, torch.cat(w.chunk(2))),
    "unbind": lambda x, w: F.layer_norm(x, (4,), *w.unbind()[:2]),
    "T and float": lambda x, w: x @ w.T.float(),
    "float": lambda x, w: F.linear(x, w.float()),
    "detach": lambda x, w: F.linear(x, w.detach()),
}


@parametrize("spelling", OF_A_WEIGHT, keep={"T", "unbind"})
@pytest.mark.parametrize("way", ["eager", "compiled", "checkpoint"])
def test_an_island_reads_a_weight_as_it_is_however_it_is_viewed(spelling: str, way: str) -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def inner(self, x: Tensor) -> Tensor:
            return OF_A_WEIGHT[spelling](x, self.weight)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                x = x.float()
                if way == "checkpoint":
                    return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]
                return self.inner(x)

    plain = Router()
    model: Any = quantize(plain, "e5m2")
    called = torch.compile(model, backend="aot_eager") if way == "compiled" else model
    x = torch.randn(5, 4)
    expected, result = plain(x), called(x)
    assert torch.equal(result, expected)
    if expected.requires_grad:
        expected.square().sum().backward()
        result.square().sum().backward()
        assert torch.equal(model.weight.grad, plain.weight.grad)  # type: ignore[arg-type]


def test_a_view_of_a_weight_that_was_made_in_an_island_is_rounded_outside() -> None:
    x, weight = torch.randn(4, 4), nn.Parameter(torch.randn(4, 4))
    with emulate("e5m2"):
        with torch.autocast("cpu", enabled=False):
            w = weight.T
        y = x @ w
    assert torch.equal(y, round_to(round_to(x, "e5m2") @ round_to(weight, "e5m2").T, "e5m2"))


@pytest.mark.parametrize("is_cast", [True, False])  # numbers of the format come in, if not
@parametrize("policy", ["e5m2", Policy(weight="e5m2", error="bf16"), "mxfp8_e4m3"], ids=str, keep=["e5m2"])
def test_a_function_in_an_island_computes_as_the_same_operations_do(policy: Any, is_cast: bool) -> None:
    class Net(nn.Module):
        def __init__(self, linear: Callable[[Tensor, Tensor], Tensor]) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.first, self.second = linear, nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            with torch.autocast("cpu", enabled=False):
                y = self.linear(x.float() if is_cast else x, self.second) * 1.1
            return y @ self.first.weight

    found = []
    for linear in (lambda x, w: x @ w.T, Product.apply):
        model = quantize(Net(linear), policy)
        y = model(torch.randn(5, 4, generator=torch.Generator().manual_seed(1)))
        y.square().sum().backward()
        found.append([y, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *found))


# Masks


LEAST = torch.finfo(torch.float32).min
LOW = ["e2m1fn", "e3m2fn", "e4m3fn", "e5m2", "fp16", "bf16"]


@pytest.mark.parametrize("fmt", LOW)
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic", "toward_zero"])
def test_a_mask_hides_and_a_fully_masked_row_is_uniform(fmt: str, rounding: str) -> None:
    scores, mask = torch.randn(4, 4), torch.full((4, 4), LEAST).triu(1)
    mask[3] = LEAST
    with emulate(fmt, rounding=rounding):
        weights = torch.softmax(scores + mask, -1)
    assert weights.isfinite().all()
    assert (weights[:3].triu(1) == 0).all()
    if rounding == "nearest_even":
        assert (weights[3] == round_to(torch.tensor(0.25), fmt)).all()


WAYS_TO_SCALE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "quotient": lambda x, mask: (x + mask) / 8,
    "product before": lambda x, mask: x + mask * 0.5,
    "product of a number": lambda x, mask: 0.3 * (mask + x),
    "in place": lambda x, mask: (x + mask).mul_(0.125),
    "in place, twice": lambda x, mask: x.add(mask).div_(3.0).mul_(0.7),
}


@pytest.mark.parametrize("fmt", LOW)
@pytest.mark.parametrize("way", WAYS_TO_SCALE)
def test_a_mask_that_is_scaled_hides_and_a_fully_masked_row_is_uniform(fmt: str, way: str) -> None:
    scores, hidden = torch.randn(4, 4), torch.ones(4, 4, dtype=torch.bool).triu(1)
    hidden[3] = True
    with emulate(fmt):
        x = scores + 0.0
        mask = torch.zeros(4, 4, dtype=x.dtype).masked_fill(hidden, torch.finfo(x.dtype).min)
        weights = torch.softmax(WAYS_TO_SCALE[way](x, mask), -1)
    assert (weights[:3].triu(1) == 0).all()
    assert (weights[3] == round_to(torch.tensor(0.25), fmt)).all()


def test_a_number_that_overflows_is_no_mask() -> None:
    x = torch.tensor([1.0, -2.0])
    with emulate("e5m2"):
        assert ((x + 0.0) * 1e30).tolist() == [torch.inf, -torch.inf]


@pytest.mark.parametrize("fmt", LOW)
def test_every_way_to_mask_keeps_the_mask(fmt: str) -> None:
    scores, hidden = torch.randn(3, 3), torch.ones(3, 3, dtype=torch.bool).triu(1)
    with emulate(fmt):
        ways = [
            scores.masked_fill(hidden, torch.finfo(scores.dtype).min),
            torch.where(hidden, torch.finfo(scores.dtype).min, scores),
            scores + torch.zeros(3, 3, dtype=scores.dtype).masked_fill(hidden, torch.finfo(scores.dtype).min),
        ]
    for way in ways:
        assert (way[hidden] == torch.finfo(NATIVE.get(fmt, torch.float32)).min).all()
        assert torch.equal(way[~hidden], round_to(scores, fmt)[~hidden])


# No inf among their values.
FINITE = ["e2m1fn", "e2m3fn", "e3m2fn", "e4m3fn", "e4m3fnuz", "e5m2fnuz", "hfp8_143"]


@pytest.mark.parametrize("fmt", FINITE)
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic", "toward_zero"])
def test_minus_infinity_hides_in_a_format_without_it(fmt: str, rounding: str) -> None:
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    mask = torch.zeros(5, 5).masked_fill(hidden, -torch.inf)
    q, k = torch.randn(1, 5, 4), torch.randn(1, 4, 5)
    with emulate(fmt, rounding=rounding):
        scores = (q @ k)[0]
        ways = [
            scores + mask,
            (scores * 2 + mask) / 2,
            scores.masked_fill(hidden, -torch.inf),
            scores.clone().masked_fill_(hidden, float("-inf")) * 0.5,
            torch.where(hidden, torch.tensor(-torch.inf), scores),
            torch.baddbmm(mask[None], q, k)[0],
            (scores + mask).sub_(1.0),
        ]
        weights = [torch.softmax(way, -1) for way in ways]
    for way, found in zip(ways, weights, strict=True):
        assert (way[hidden] == -torch.inf).all()
        assert way[~hidden].isfinite().all()
        assert (found[hidden] == 0).all()


@pytest.mark.parametrize("fmt", FINITE)
def test_infinity_that_is_computed_saturates(fmt: str) -> None:
    largest, zero, one = fpsim.as_format(fmt).largest, torch.zeros(3), torch.ones(3)
    with emulate(fmt):
        made = [zero.log(), zero.add(0.0).log_(), -1 / zero, -one / zero, zero.log2()]
        positive = [1 / zero, zero + torch.inf, torch.exp(zero + 100)]
    for x in made:
        assert (x == -largest).all()
    for x in positive:
        assert (x == largest).all()


@pytest.mark.parametrize("fmt", ["e2m1fn", "e4m3fn", "bf16"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_an_attention_of_torch_sees_no_future(fmt: str, need_weights: bool) -> None:
    attention = quantize(nn.MultiheadAttention(8, 2, batch_first=True), fmt)
    mask, x = nn.Transformer.generate_square_subsequent_mask(5), torch.randn(1, 5, 8)
    changed = x.clone()
    changed[:, -1] = 3 * torch.randn(8)
    before, after = (
        attention(x, x, x, attn_mask=mask, need_weights=need_weights, is_causal=False)[0] for x in (x, changed)
    )
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before, after)


def test_a_wide_format_that_saturates_does_so_at_an_overflow_of_float32_too() -> None:
    big = torch.full((1, 1), 2.0**100)
    with emulate(Policy(activation="bf16", overflow="saturate")):
        product = -big @ big
    assert product.item() == -fpsim.as_format("bf16").largest


def test_the_largest_number_that_is_no_mask_overflows_as_ever() -> None:
    below = torch.nextafter(torch.tensor(LEAST), torch.tensor(0.0))
    with emulate("fp16"):
        assert (torch.stack([below, below]) * 1.0 == -torch.inf).all()
    assert round_to(torch.tensor([LEAST]), "fp16").item() == -torch.inf  # round_to knows no masks


def test_a_weight_of_that_size_is_no_mask() -> None:
    layer = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(-LEAST)
    assert quantize(layer, Policy(weight="e4m3fn"))(torch.ones(1, 1)).item() == 448.0


def test_compiled_and_mapped_code_keeps_masks_too() -> None:
    scores, mask = torch.randn(2, 3), torch.full((2, 3), LEAST)

    def hide(scores: Tensor, mask: Tensor) -> Tensor:
        with emulate("fp16"):
            return scores + mask

    assert (torch.func.vmap(hide)(scores, mask) == LEAST).all()


def test_mapped_code_keeps_minus_infinity_too() -> None:
    scores, mask = torch.randn(2, 3), torch.full((2, 3), -torch.inf)

    def hide(scores: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        with emulate("e2m1fn"):
            return scores + mask, (scores * 0).log()

    hidden, computed = torch.func.vmap(hide)(scores, mask)
    assert (hidden == -torch.inf).all()
    assert (computed == -6).all()


def test_a_norm_of_a_library_computes_as_in_native_code() -> None:
    class RMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(6) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            wide = x.to(torch.float32)
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            return self.weight * wide.to(x.dtype)

    norm, x = RMSNorm(), (torch.randn(4, 6) * 1000).half().float()  # its squares would overflow in fp16
    native = RMSNorm()
    native.load_state_dict(norm.state_dict())
    expected = native.half()(x.half()).float()
    assert torch.equal(quantize(norm, "fp16")(x), expected)


def test_what_ran_wide_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    class Island(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.float().exp() * 2).type_as(x)

    model = quantize(nn.Sequential(nn.Linear(3, 3), Island()), "fp16")
    assert "float32 on purpose" not in str(fpsim.summary(model))
    with fpsim.record(model) as recording:
        model(torch.ones(2, 3))
    assert "exp, mul" in str(fpsim.summary(model))
    wide = [row for row in recording.rows() if row["format"] == "fp32"]
    assert [row["site"] for row in wide] == ["1:exp", "1:mul"]
    assert {row["role"] for row in wide} == {"activation"}


# Writes: that a tensor is float32 on purpose is a property of its dtype, not of its values


def halves_written(z: Tensor, y: Tensor) -> None:
    a, _ = z.chunk(2)
    a.copy_(y[: len(a)])


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "setting items": lambda z, y: z.__setitem__((slice(None), slice(0, 4)), y[:, :4]),
    "setting all": lambda z, y: z.__setitem__(..., y),
    "a row": lambda z, y: z[0].mul_(1.003),
    "a slice": lambda z, y: z[:, :4].add_(y[:, :4]),
    "halves": halves_written,
    "a view": lambda z, y: z.view(-1).mul_(1.003),
    "data": lambda z, y: z.data.add_(y),
    "detach": lambda z, y: z.detach().add_(y),
    "a list": lambda z, y: torch._foreach_add_([z], [y]),
    "a list of numbers": lambda z, y: torch._foreach_mul_([z], 1.003),
    "itself": lambda z, y: z.mul_(1.003),
    "an operator": lambda z, y: z.__iadd__(y),
    "copy_": lambda z, y: z.copy_(y),
    "fill_": lambda z, y: z.fill_(0.3),
    "zero_": lambda z, y: z.zero_(),
    "masked_fill_": lambda z, y: z.masked_fill_(y > 0, 0.3),
    "index_add_": lambda z, y: z.index_add_(0, torch.tensor([0]), y[:1].float()),
    "out=": lambda z, y: torch.mul(y, 1.003, out=z),
    "a gradient": lambda z, y: z.requires_grad_(),
    "transposed": lambda z, y: z.T.mul_(1.003),
}


@FORMATS
@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("made", ["zeros", "float()", "dtype="])
def test_no_write_changes_what_is_float32_on_purpose(made: str, way: str, fmt: str) -> None:
    makers = {
        "zeros": lambda x: torch.zeros(4, 8),
        "float()": lambda x: x.float() * 1.003,
        "dtype=": lambda x: torch.full_like(x, 0.1, dtype=torch.float32),
    }

    def function(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            z = makers[made](x)
            WRITES[way](z, y)
            return (z.detach() + 0.25) * 1.0001

    native, emulated = both_ways(function, fmt, torch.randn(4, 8), torch.randn(4, 8))
    assert native.dtype is torch.float32
    assert torch.equal(emulated, native)


@FORMATS
def test_a_cast_to_the_models_dtype_rounds_what_was_written_to(fmt: str) -> None:
    def function(x: Tensor) -> Tensor:
        z = torch.zeros(4, 8)
        z[:, :4] = x[:, :4].float() * 1.003
        return z.to(x.dtype)

    native, emulated = both_ways(function, fmt, torch.randn(4, 8))
    assert torch.equal(emulated, native.float())


@FORMATS
def test_data_that_is_set_takes_its_dtype_along(fmt: str) -> None:
    def to_wide(x: Tensor) -> Tensor:
        y = x * 1.1
        y.data = x.float() * 1.003
        return (y + 0.25) * 1.0001

    def to_narrow(x: Tensor) -> Tensor:
        z = x.float()
        z.data = x * 1.1
        return (z + 0.25) * 1.0001

    for function in (to_wide, to_narrow):
        with torch.no_grad():
            native, emulated = both_ways(function, fmt, torch.randn(4, 8))
        assert torch.equal(emulated, native.float())


@pytest.mark.parametrize("way", ["data", "set_"])
@FORMATS
def test_a_tensor_from_outside_whose_data_are_replaced_is_rounded_again(fmt: str, way: str) -> None:
    def function(x: Tensor) -> Tensor:
        before = x * 1.1
        if way == "data":
            x.data = x.detach() * 3
        else:
            x.set_(x.detach() * 3)
        return before + x * 1.1

    with torch.no_grad():
        native, emulated = both_ways(function, fmt, torch.randn(4, 8))
    assert torch.equal(emulated, native.float())


@FORMATS
def test_a_target_that_is_only_compared_promotes_nothing(fmt: str) -> None:
    target = torch.ones(4)
    target[1] = -1
    for function in (
        lambda x, y: F.cosine_embedding_loss(x, y, target),
        lambda x, y: F.hinge_embedding_loss(x[:, 0], target),
    ):
        native, emulated = both_ways(function, fmt, torch.randn(4, 8), torch.randn(4, 8))
        assert native.dtype is NATIVE[fmt]
        assert torch.equal(emulated, emulated.to(NATIVE[fmt]).float())
        assert abs(emulated - native.float()) <= 4 * torch.finfo(NATIVE[fmt]).eps * abs(native.float())


@FORMATS
def test_what_a_dtype_says_decides_as_in_native_code(fmt: str) -> None:
    def function(x: Tensor) -> Tensor:
        if x.dtype == torch.float16:
            return x.clamp(-1, 1)
        least = torch.finfo(x.dtype).min
        return torch.softmax(torch.full_like(x, least) / 8, -1) + torch.result_type(x, x.float()).itemsize

    native, emulated = both_ways(function, fmt, torch.randn(4, 8) * 4)
    assert torch.equal(emulated, native.float())


def test_a_policy_with_several_formats_has_no_names() -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.seen: list[torch.dtype] = []

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append((self.a(x) * 1).dtype)
            return self.b(x)

    one, several = (
        quantize(M(), "bf16"),
        quantize(M(), Policy(activation="bf16", overrides={"b": Policy(activation="e4m3fn")})),
    )
    for model in (one, several):
        model(torch.randn(2, 8))
    assert one.seen == [torch.bfloat16]
    assert several.seen == [torch.float32]
    with_float32 = quantize(M(), Policy(activation="bf16", overrides={"b": None}))
    with_float32(torch.randn(2, 8))
    assert with_float32.seen == [torch.bfloat16]
    real = quantize(M().bfloat16(), "bf16")
    real(torch.randn(2, 8).bfloat16())
    assert real.seen == [torch.bfloat16]


def test_a_real_tensor_of_the_formats_dtype_meets_the_container() -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.to(torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                z = self.a(x)
            y = z.to(x.dtype) @ x.mT + z @ x.mT
            return self.b(x.to(self.b.weight.dtype)) + y.sum()

    plain, x = M(), torch.randn(8, 8).bfloat16()
    native = plain.to(torch.bfloat16)(x)
    y = quantize(M(), "bf16")
    y.load_state_dict(plain.state_dict())
    out = y(x.float())
    out.sum().backward()
    assert out.dtype is torch.float32
    # sums of products in another order differ before they are rounded, by 2^-9 at most each: z, two products, their
    # sum, its sum over all, the second layer, the result
    assert (out - native.float()).norm() <= 7 * 2.0**-9 * native.float().norm()


@pytest.mark.parametrize("fmt", ["bf16", "e4m3fn"])
def test_asking_for_a_dtype_keeps_nothing_alive(fmt: str) -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.lstm = nn.Linear(8, 8), nn.LSTM(8, 8)
            self.seen: list[weakref.ref[Tensor]] = []

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            self.seen.append(weakref.ref(y))
            return (y[0] * self.linear.weight[0] + self.lstm(y)[0]).to(x.dtype).float()

    model = quantize(M(), fmt)
    gc.disable()
    try:
        model(torch.randn(4, 8)).sum().backward()
        assert model.seen[0]() is None
    finally:
        gc.enable()


def test_a_real_tensor_of_another_dtype_is_widened_before_it_is_cast() -> None:
    class M(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.table.to(x.dtype) + self.table.to(x)

    model, table = M(), torch.randn(8).bfloat16()
    model.table = table  # neither a parameter nor a buffer: no conversion of the model reaches it
    x = torch.randn(3, 8).half()
    assert torch.equal(quantize(model, "fp16")(x.float()), model(x).float())


def test_a_loop_in_one_block_keeps_nothing() -> None:
    weight, x, counts = nn.Parameter(torch.randn(4, 4)), torch.randn(2, 4), []
    gc.freeze()  # what other tests have left is not looked through thirty times
    try:
        with emulate("bf16"):
            for _ in range(30):
                y = F.linear(x, weight)
                (y * weight[0]).to(y.dtype).sum().backward()
                weight.grad = None
                gc.collect()
                counts.append(sum(1 for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)))
    finally:
        gc.unfreeze()
    assert counts[-1] == counts[10]


def nested(layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that they are a prototype
        return torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=layout)


def test_jagged_tensors_are_refused_and_pass_in_float32() -> None:
    x, linear = nested(torch.jagged), nn.Linear(4, 4)
    with pytest.raises(NotImplementedError, match=r"Got a nested tensor from linear.*to_padded_tensor"):
        quantize(linear, "e4m3fn")(x)
    found, expected = quantize(linear, "fp32")(x), linear(x)
    assert all(map(torch.equal, found.unbind(), expected.unbind()))


def test_strided_nested_tensors_are_emulated() -> None:
    x, model = nested(torch.strided), quantize(nn.Linear(4, 4), "e4m3fn")
    assert all(torch.equal(y, model(part)) for y, part in zip(model(x).unbind(), x.unbind(), strict=True))


@pytest.mark.parametrize("fmt", ["bf16", "e4m3fn"])
def test_a_package_whose_name_begins_with_torch_is_no_part_of_torch(fmt: str) -> None:
    code = "def forward(x):\n    y = x * 1.1\n    return y.dtype, y.to(torch.float32) * 1.0001\n"
    file = f"{Path(torch.__file__).parent}_geometric/nn/conv.py"
    space: dict[str, Any] = {"torch": torch}
    exec(compile(code, file, "exec"), space)
    x = torch.tensor([1.0, 2.0])
    with fpsim.emulate(fmt):
        dtype, wide = space["forward"](x)
    assert dtype is (torch.bfloat16 if fmt == "bf16" else torch.float32)
    assert not torch.equal(wide, fpsim.round_to(wide, fmt))


@FORMATS
def test_a_mask_of_float32_is_beyond_a_narrow_dtype_that_a_function_is_given(fmt: str) -> None:
    def masked(x: Tensor) -> Tensor:
        hidden = torch.tensor([[True, True, True], [True, False, False]])
        scores = torch.full((2, 3), 0.3).masked_fill(hidden, torch.finfo(torch.float32).min)
        return torch.softmax(scores, -1, dtype=x.dtype)

    native, emulated = both_ways(masked, fmt, torch.ones(3))
    assert torch.equal(native[1].float(), emulated[1])
    assert native[0].isnan().all()  # rounded to -inf, every one
    assert emulated[0].isnan().all()


KINDS = {"wide": torch.float32}  # a dtype that is looked up is not there in words


# Each asks for a dtype, or gives one, and computes so that it shows which one it was.
ASKED: dict[str, Callable[[Tensor], Any]] = {
    "the dtype of a cast": lambda x: (x.float() / 3).to(x.float().dtype),
    "the type of a narrow and of a wide tensor": lambda x: (x.type(), x.float().type()),
    "a wide copy on a device": lambda x: x.float().to("cpu", copy=True) / 3,
    "a dtype that is looked up": lambda x: torch.softmax(x, -1, dtype=KINDS["wide"]),
    "a power in float64": lambda x: torch.float_power(x, 1.5) / 3,
    "ones like integers": lambda x: torch.ones_like(torch.ones(2, dtype=torch.int64), dtype=x.dtype) / 3,
    "a number for a narrow tensor": lambda x: torch.full((2,), 0.3, out=x * 1),
}


@pytest.mark.parametrize("name", ASKED)
@FORMATS
def test_a_dtype_that_is_asked_for_is_the_native_one(name: str, fmt: str) -> None:
    native, emulated = both_ways(ASKED[name], fmt, torch.tensor([1.0, 3.0]))
    if isinstance(native, Tensor):
        assert torch.equal(emulated, native.to(emulated.dtype))
    else:
        assert emulated == native


def test_what_is_stored_in_a_narrow_tensor_is_in_the_format_whatever_it_was_computed_from() -> None:
    narrow = torch.zeros(2)
    with emulate("e4m3fn"):
        torch.div(torch.tensor([1.0, 3.0]).float(), 3, out=narrow)
    assert torch.equal(narrow, (torch.tensor([1.0, 3.0]) / 3).to(torch.float8_e4m3fn).float())


def test_a_dtype_that_is_a_default_is_written_in_words() -> None:
    def cast(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return x.to(dtype) / 3

    x = torch.tensor([1.0, 3.0])
    with emulate("e4m3fn"):
        wide, narrow = cast(x), cast(x, x.dtype)
    assert torch.equal(wide, x / 3)
    assert torch.equal(narrow, (x / 3).to(torch.float8_e4m3fn).float())


def test_memory_that_is_set_takes_its_dtype_along() -> None:
    def shares(x: Tensor, other: Tensor) -> Tensor:
        return torch.ops.aten.set_.source_Tensor(x, other) / 3  # type: ignore[no-any-return]

    x, third = torch.tensor([1.0, 3.0]), torch.tensor([1.0, 3.0]) / 3
    with emulate("e4m3fn"):
        wide, narrow = shares(x * 1, x.float() / 3), shares(x.float(), x / 3)
    assert torch.equal(wide, third / 3)
    in_format = third.to(torch.float8_e4m3fn).float()
    assert torch.equal(narrow, (in_format / 3).to(torch.float8_e4m3fn).float())


def test_a_gradient_cast_to_its_own_dtype_is_the_tensor_itself() -> None:
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    with emulate(Policy(activation="e4m3fn")):
        (gradient,) = torch.autograd.grad((x * x).sum(), x)
        assert gradient.to(gradient.dtype) is gradient
