"""Forwards of a few lines that random programs found: numbers, dtypes and gradients are those of native code."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpsim

NATIVE = {"bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = pytest.mark.parametrize("fmt", NATIVE)
STOCHASTIC = fpsim.as_policy("e4m3fn", "stochastic")


class Layer(nn.Module):
    """Parameters, a buffer, and a forward that is given."""

    at = 0.0

    def __init__(self, run: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run = run
        self.w = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("b", torch.randn(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.run(self, x)
        return y, (y.detach() + 0.25) * 1.0123  # which shows whether y is float32


def hold(run: Callable[[Layer, Tensor], Tensor], fmt: str) -> None:
    """Native code and the emulation give the same numbers, the same gradient, and write the same."""
    dtype = NATIVE[fmt]
    native, emulated = Layer(run).to(dtype), fpsim.quantize(Layer(run).to(dtype).float(), fmt)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    given = [x.clone(), x.float()]
    pairs: list[tuple[Tensor, Tensor]] = []
    found = [model(inp) for model, inp in zip((native, emulated), given, strict=True)]
    assert found[0][0].requires_grad == found[1][0].requires_grad
    pairs += zip(*found, strict=True)
    if found[0][0].requires_grad:
        for y, _ in found:
            y.float().sum().backward()
        if native.w.grad is not None:
            assert emulated.w.grad is not None
            pairs.append((native.w.grad, emulated.w.grad))
    pairs += [tuple(given), (native.b, emulated.b.to(dtype)), (native.w, emulated.w.to(dtype))]  # type: ignore[list-item]
    for a, b in pairs:
        assert torch.equal(a.detach().double(), b.detach().double())


def wide(x: Tensor) -> Tensor:
    """float32 on purpose, between the format's numbers."""
    return x.float() * 1.003


@FORMATS
@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("move", [torch.broadcast_tensors, torch.atleast_3d, lambda *both: torch.atleast_1d([*both])])
def test_of_several_tensors_that_are_moved_each_keeps_its_dtype(
    move: Callable[..., tuple[Tensor, ...]], position: int, fmt: str
) -> None:
    hold(lambda self, x: move(x * 1.1, wide(x))[position] * 1.1, fmt)


@FORMATS
@pytest.mark.parametrize("is_wide", [False, True])
def test_what_is_copied_into_a_part_takes_the_dtype_of_the_whole(is_wide: bool, fmt: str) -> None:
    def run(self: Layer, x: Tensor) -> Tensor:
        whole, part = (wide(x), x[0] * 1.1) if is_wide else (x * 1.1, wide(x[0]))
        found = [whole.select_scatter(part, 0, 1), whole.slice_scatter(part[None], 0, 1, 2)]
        found += [whole.diagonal_scatter(part), whole.as_strided_scatter(part, (4,), (1,))]
        return torch.stack(found) * 1.1

    hold(run, fmt)


@FORMATS
@pytest.mark.parametrize(
    "run",
    [
        lambda self, x: torch.vmap(lambda row: row.float() * 1.003)(x),
        lambda self, x: torch.vmap(lambda row: row * 1.1)(wide(x)),
        lambda self, x: torch.vmap(torch.vmap(lambda q: q.float() * 1.003))(x).to(x.dtype) * 1.1,
        lambda self, x: torch.vmap(lambda row, q: row * q, in_dims=(1, None))(x * 1.1, wide(x[0])),
        lambda self, x: torch.func.grad(lambda q: (q * q * 1.1).sum())(wide(x)),
        lambda self, x: torch.vmap(torch.func.grad(lambda q: (q.float() * q).sum()))(x * 1.1),
    ],
)
def test_what_is_float32_on_purpose_is_so_inside_of_a_transform_and_after_it(
    run: Callable[[Layer, Tensor], Tensor], fmt: str
) -> None:
    hold(run, fmt)


class Dropping(torch.autograd.Function):
    """Has no gradient for its second operand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 1.5, None


class OfTwo(nn.Module):
    """Gives a Function, as the operand without a gradient, what a forward makes of an input and a parameter."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.run, self.w = run, nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return Dropping.apply(x, self.run(y) + self.run(self.w))  # type: ignore[no-any-return]


@tiers.parametrize("fmt", ["fp32", "bf16", "mxfp8_e4m3", "recipe:mxfp8", "stochastically"], keep={"fp32", "bf16"})
@pytest.mark.parametrize(
    "run",
    [
        lambda y: y * 1.1,
        torch.vmap(lambda row: row.sin() * 1.1, randomness="different"),
        torch.vmap(torch.vmap(lambda q: (q * 1.1).relu_(), randomness="same"), randomness="same"),
        torch.vmap(torch.func.grad(lambda row: (row * row).sum()), randomness="different"),
        lambda y: torch.func.jvp(lambda q: q * q, (y,), (y,))[1],
        lambda y: torch.func.vjp(lambda q: q * q, y)[1](y)[0],
        lambda y: F.linear(y, y),
    ],
    ids=["plainly", "vmap", "vmap of vmap", "vmap of grad", "jvp", "vjp", "product"],
)
def test_where_a_function_gives_no_gradient_nobody_behind_it_has_one(run: Callable[[Tensor], Tensor], fmt: str) -> None:
    policy = STOCHASTIC if fmt == "stochastically" else fmt
    for model in (OfTwo(run), fpsim.quantize(OfTwo(run), policy)):
        x, y = (torch.ones(4, 4, requires_grad=True) for _ in range(2))
        model(x, y).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 1.5))  # type: ignore[arg-type]
        assert y.grad is None
        assert model.w.grad is None


@FORMATS
@pytest.mark.parametrize("write", [lambda y, r: y.mul_(r), lambda y, r: y[0].mul_(r), lambda y, r: y.add_(r.float())])
def test_what_a_transform_gave_can_be_written_to(write: Callable[[Tensor, Tensor], object], fmt: str) -> None:
    def run(self: Layer, x: Tensor) -> Tensor:
        y = torch.vmap(lambda row: row * 1.1)(self.w)
        write(y, x[0])
        torch._foreach_add_([y], [wide(x)])
        return y

    hold(run, fmt)


@FORMATS
@pytest.mark.parametrize("cast", [wide, lambda x: x * 1.1], ids=["float32", "narrow"])
@pytest.mark.parametrize(
    "gradient",
    [
        lambda q: torch.func.grad(lambda v: (v * 1.1).sum())(q),
        lambda q: torch.vmap(torch.func.grad(lambda v: (v.float() * v).sum()))(q),
        lambda q: torch.func.vjp(lambda v: v * 1.1, q)[1](q)[0],
        lambda q: torch.func.jacrev(lambda v: v * 1.1)(q[0]),
        lambda q: torch.func.jacfwd(lambda v: v * 1.1)(q[0]),
    ],
    ids=["grad", "vmap of grad", "vjp", "jacrev", "jacfwd"],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda g, x: g * 1.1,
        lambda g, x: torch._foreach_mul_([g], 1.1)[0],
        lambda g, x: (g if g._base is None else g.clone()).mul_(x),  # torch refuses one of several views
        lambda g, x: g.to(torch.promote_types(g.dtype, x.dtype)).mul_(1.1) + g,
    ],
    ids=["used", "written to in a list", "written to with a gradient", "cast to what it is"],
)
def test_a_gradient_that_a_transform_gave_is_a_result_like_any_other(
    use: Callable[[Tensor, Tensor], Tensor],
    gradient: Callable[[Tensor], Tensor],
    cast: Callable[[Tensor], Tensor],
    fmt: str,
) -> None:
    hold(lambda self, x: use(gradient(cast(x).detach()), self.w), fmt)


AT = 0.3  # of neither format: the nearest number of bf16 and of fp16 is larger


@FORMATS
@pytest.mark.parametrize(
    "threshold",
    [
        lambda x: x.clamp(-AT, AT),
        lambda x: torch.clip(x, max=AT),
        lambda x: (x * 1.0).clamp_(max=AT),
        lambda x: torch.clamp_max(x, AT),
        lambda x: (-x).clamp_min(-AT),
        lambda x: F.hardshrink(x, AT),
        lambda x: F.threshold(x, AT, 0.1),
        lambda x: F.hardtanh(x, -AT, AT),
        lambda x: x % AT,
        lambda x: torch.remainder(x, AT),
        lambda x: torch.fmod(x, AT),
        lambda x: torch._foreach_clamp_max([x], AT)[0],
        lambda x: torch._foreach_clamp_max_([x * 1.0], AT)[0],
        lambda x: x.float().clamp(-AT, AT),
        lambda x: x.float() % AT,
    ],
)
def test_a_number_that_elements_are_compared_with_is_one_of_their_dtype(
    threshold: Callable[[Tensor], Tensor], fmt: str
) -> None:
    def run(self: Layer, x: Tensor) -> Tensor:
        ties = torch.tensor([AT, -AT, 2 * AT, 0.1]).to(self.w.dtype)
        return threshold((self.w - self.w.detach()) + ties)  # values, and gradients at the ties

    hold(run, fmt)


@FORMATS
@pytest.mark.parametrize("cast", [wide, lambda x: x * 1.1])
def test_a_gradient_has_the_dtype_of_what_it_is_the_gradient_of(cast: Callable[[Tensor], Tensor], fmt: str) -> None:
    def by_function(self: Layer, x: Tensor) -> Tensor:
        q = cast(x).detach().requires_grad_()
        return torch.autograd.grad((q * q).sum(), q)[0] * 1.1

    def by_attribute(self: Layer, x: Tensor) -> Tensor:
        q = cast(x).detach().requires_grad_()
        (q * q).sum().backward()
        assert q.grad is not None
        return q.grad * 1.1

    hold(by_function, fmt)
    hold(by_attribute, fmt)


@FORMATS
@pytest.mark.parametrize(
    "write",
    [
        lambda h, w: h.add_(w),
        lambda h, w: h.mul_(w.double()),
        lambda h, w: h.__setitem__(0, w[0]),
        lambda h, w: h.copy_(w.float()),
        lambda h, w: torch._foreach_mul_([h], [w]),
    ],
)
def test_a_write_over_a_cast_that_did_nothing_has_its_gradient(
    write: Callable[[Tensor, Tensor], object], fmt: str
) -> None:
    def run(self: Layer, x: Tensor) -> Tensor:
        h = x.to(self.w.dtype)  # x itself, natively
        write(h, self.w)
        return h * 1.1

    hold(run, fmt)


@FORMATS
@pytest.mark.parametrize(
    "use",
    [
        lambda v, at: v.clamp(max=at),
        lambda v, at: v % at,
        lambda v, at: torch.where(v > at, v, v * 0.5),
        lambda v, at: torch._foreach_clamp_max([v, v * 1.5], [at, at])[1],
        lambda v, at: v.remainder(np.float64(at)),
    ],
)
def test_a_number_is_rounded_inside_of_a_transform_that_has_not_met_it(
    use: Callable[[Tensor, float], Tensor], fmt: str
) -> None:
    numbers = itertools.count(1)  # each is met in a transform first: what is known of a number is kept

    def run(self: Layer, x: Tensor) -> Tensor:
        at = self.at
        return torch.func.grad(lambda v: use(v, at).sum())(x.detach()) + use(self.w * 1.0, at).detach()

    for i in itertools.islice(numbers, 3):
        Layer.at = 0.3 + i * 0.0371 + 0.001 * (fmt == "fp16")
        hold(run, fmt)


@FORMATS
@pytest.mark.parametrize(
    "write",
    [
        lambda x, h: x.T.__setitem__(..., h),
        lambda x, h: x.copy_(h),
        lambda x, h: x[1].copy_(h[0]),
        lambda x, h: x.view(16)[:4].copy_(h[2]),
    ],
    ids=["an item of a view", "a copy", "a copy to a row", "a copy to a part"],
)
def test_the_extremes_of_float32_written_to_an_input_are_numbers(
    write: Callable[[Tensor, Tensor], object], fmt: str
) -> None:
    def run(self: Layer, x: Tensor) -> Tensor:
        h = self.b.float().masked_fill(self.b > 0.25, torch.finfo(torch.float32).min)
        with torch.no_grad():
            write(x, h)
        return x.float()

    hold(run, fmt)


@FORMATS
@pytest.mark.parametrize("of", [lambda self, x: x, lambda self, x: self.b], ids=["an input", "a buffer"])
@pytest.mark.parametrize(
    "write",
    [
        lambda h, x: torch.clamp(x * 1.1, -0.3, 0.3, out=h),
        lambda h, x: torch.mul(x, 0.5, out=h),
        lambda h, x: h[1].copy_(x[0]),
        lambda h, x: h.scatter_(0, torch.tensor([[2, 0, 3, 1]]), x * 1.1),
    ],
)
def test_a_write_over_a_cast_that_did_nothing_arrives_where_it_came_from(
    write: Callable[[Tensor, Tensor], object], of: Callable[[Layer, Tensor], Tensor], fmt: str
) -> None:
    def run(self: Layer, x: Tensor) -> Tensor:
        h = of(self, x).to(self.w.dtype)
        write(h, x.clone())
        return torch.stack([h * 1.1, of(self, x) * 1.1])

    hold(run, fmt)


@FORMATS
@pytest.mark.parametrize("drop", [F.dropout, F.alpha_dropout, F.feature_alpha_dropout, nn.Dropout(0.0)])
def test_a_dropout_that_drops_nothing_gives_the_tensor_itself(drop: Callable[..., Tensor], fmt: str) -> None:
    def run(self: Layer, x: Tensor) -> Tensor:
        y = x * 1.1
        y[0].fill_(0.3)
        z = drop(y) if isinstance(drop, nn.Module) else drop(y, 0.5, training=False)
        z.mul_(1.1)
        return y

    hold(run, fmt)


@FORMATS
def test_a_number_over_a_tensor_is_rounded_twice(fmt: str) -> None:
    hold(lambda self, x: 3.0 / (x.abs() + 1.0), fmt)
    hold(lambda self, x: 3.0 / (self.w.detach().abs() + 1.0), fmt)  # gradients of a reciprocal round inside
    hold(lambda self, x: 3.0 / wide(x), fmt)


@FORMATS
@pytest.mark.parametrize("at", ["first", "second", "other=", "0-d of another"])
@pytest.mark.parametrize(
    "name",
    """
    add sub mul div floor_divide remainder fmod pow maximum minimum fmax fmin hypot atan2 logaddexp logaddexp2 igamma
    igammac copysign addcmul addcdiv
    """.split(),
)
def test_a_float32_tensor_without_dimensions_is_cast_where_torch_casts_it(name: str, at: str, fmt: str) -> None:
    def run(self: Layer, x: Tensor) -> Tensor:
        y = x.abs() + 0.5
        t = y.float().mean() if at == "0-d of another" else torch.tensor(AT)
        if name.startswith("addc"):
            return getattr(torch, name)(*((y, t, y) if at == "first" else (y, y, t)))
        if at == "first":
            return getattr(torch, name)(t, y)
        return getattr(torch, name)(y, other=t) if at == "other=" and name != "pow" else getattr(torch, name)(y, t)

    hold(run, fmt)


@FORMATS
@pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "smooth_l1_loss"])
def test_losses_of_a_float32_target_without_dimensions_are_float32(name: str, fmt: str) -> None:
    def run(self: Layer, x: Tensor) -> Tensor:
        loss = getattr(F, name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of the target's shape
            return loss(x * self.w, torch.tensor(AT), reduction="none")

    hold(run, fmt)


@FORMATS
def test_float32s_least_number_is_beyond_what_it_is_copied_into(fmt: str) -> None:
    def run(self: Layer, x: Tensor) -> Tensor:
        mask = torch.full((4,), torch.finfo(torch.float32).min)
        y = x * 1.1
        y[0] = mask
        y[1].copy_(mask)
        return y

    hold(run, fmt)


@FORMATS
def test_the_name_of_a_tensor_of_float64_is_no_name_of_the_format(fmt: str) -> None:
    hold(lambda self, x: x.abs().float().type(x.double().type()) * 1.0123, fmt)


OPERATORS: list[Callable[[Tensor], object]] = [lambda x: x * 1.0, lambda x: 2 - x, lambda x: x @ x, lambda x: -x]


@pytest.mark.parametrize(("fmt", "other"), [("bf16", torch.float16), ("fp16", torch.bfloat16)])
@pytest.mark.parametrize("operator", OPERATORS, ids=["times", "minus", "matmul", "negative"])
def test_a_dtype_too_narrow_for_the_format_is_refused_in_words_by_operators_too(
    operator: Callable[[Tensor], object], fmt: str, other: torch.dtype
) -> None:
    x = torch.randn(3)
    with fpsim.emulate(fmt), pytest.raises(RuntimeError, match=r"cannot hold every value of .*Convert it with x.float"):
        operator(x.to(other))
