"""Gradients of operands that saturate, or that are transformed, beside graphs of torch's own operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from module_functions import Product
from tiers import parametrize
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fpsim import (
    BlockFormat,
    Hadamard,
    Operand,
    Policy,
    Products,
    as_format,
    hadamard,
    quantize,
    round_to,
    scales_of,
    tally,
)
from fpsim.tensors.block_autograd import passes
from fpsim.tensors.spec import any_spec

# Each format, its largest element and half of the spacing there; 0 elements share a scale in a format of single numbers
FORMATS: dict[str, tuple[float, int]] = {
    "mxfp4": (7.0, 32),
    "e2m1fn per 16 e4m3fn fp32 amax/9": (7.0, 16),
    "e4m3fn per 32 saturate": (464.0, 32),
    "int4 per row fp32 amax/10": (7.5, 64),
    "e2m1fn": (7.0, 0),
}


def passing(x: Tensor, fmt: str, axis: int) -> Tensor:
    """Where |x| is below the largest element and half a spacing, times the scale of its block."""
    limit, block = FORMATS[fmt]
    if not block:
        return x.abs() < limit
    scales = scales_of(x, fmt, axis=axis).repeat_interleave(block, axis)
    if "e4m3fn fp32" in fmt:  # beneath the scale of the tensor, whose amax lands on 9 times 448
        scales = scales * (x.abs().max() / (9 * 448))
    return x.abs() < limit * scales


def estimated(x: Tensor, fmt: str, axis: int, clips: bool = True) -> Tensor:
    """Rounded, with the gradient one where it passes and zero elsewhere."""
    q = round_to(x.detach(), fmt, axis=axis if FORMATS[fmt][1] else None)
    through = x + (q - x).detach()
    return torch.where(passing(x.detach(), fmt, axis), through, q) if clips else through


# The product; the shapes of x and w; along which axis each is quantised
WAYS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...], int, int]] = {
    "linear": (F.linear, (3, 5, 64), (32, 64), 2, 1),
    "matmul": (torch.matmul, (5, 64), (64, 32), 1, 0),
    "convolution": (lambda x, w: F.conv2d(x, w, padding=1), (2, 64, 5, 5), (16, 64, 3, 3), 1, 1),
    "einsum": (lambda x, w: torch.einsum("bti,oi->bto", x, w), (3, 5, 64), (32, 64), 2, 1),
}


class One(nn.Module):
    def __init__(self, w: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.w, self.product = nn.Parameter(w.clone()), product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.w)


def case(way: str) -> tuple[One, Tensor, Tensor]:
    product, of_x, of_w, *_ = WAYS[way]
    generator = torch.Generator().manual_seed(3)
    w, x = (torch.randn(shape, generator=generator) ** 3 for shape in (of_w, of_x))
    return One(w, product), x, torch.randn(product(x, w).shape, generator=generator)


def gradients(run: Callable[[Tensor], Tensor], w: Tensor, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    w.grad = None
    run(x).backward(dy)
    assert x.grad is not None
    assert w.grad is not None
    return x.grad, w.grad


def alike(a: Tensor, b: Tensor) -> bool:
    """Up to the order of a sum, and with zeros in the same places."""
    return torch.allclose(a, b, rtol=0, atol=1e-5 * float(b.abs().max())) and torch.equal(a == 0, b == 0)


@pytest.mark.parametrize("fmt", FORMATS)
@parametrize("way", [*WAYS], keep={"linear"})
def test_a_gradient_is_zero_where_its_operand_saturated(way: str, fmt: str) -> None:
    model, x, dy = case(way)
    product, _, _, of_x, of_w = WAYS[way]
    by_hand = One(model.w.detach(), lambda x, w: product(estimated(x, fmt, of_x), estimated(w, fmt, of_w)))
    expected = gradients(by_hand, by_hand.w, x, dy)
    operand = Operand(fmt, ste="clip")
    q = quantize(model, Policy(products=Products(fprop=(operand, operand), backward="dequantized")))
    for run in (q, lambda x: checkpoint(q, x, use_reentrant=False)):
        found = gradients(run, q.w, x, dy)
        assert all(map(alike, found, expected))
    assert any(bool((g == 0).any()) for g in found)
    through = quantize(model, Policy(products=Products(fprop=(fmt, fmt), backward="dequantized")))
    assert not all(map(alike, gradients(through, through.w, x, dy), expected))


@pytest.mark.filterwarnings("ignore")
@parametrize("fmt", FORMATS, keep={"mxfp4"})
def test_a_program_clips_as_eager_code_does(fmt: str) -> None:
    model, x, dy = case("linear")
    operand = Operand(fmt, ste="clip", hadamard=Hadamard(32))
    q = quantize(model, Policy(products=Products(fprop=(operand, operand), backward="dequantized")))
    expected = gradients(q, q.w, x, dy)
    found = gradients(torch.compile(q, backend="aot_eager", fullgraph=True), q.w, x, dy)
    assert all(map(alike, found, expected))


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("backward", ["original", "dequantized"])
@parametrize("way", ["linear", "matmul", "convolution"], keep={"linear"})
def test_gradients_of_a_transformed_operand_are_transformed_back(way: str, backward: str, clips: bool) -> None:
    model, x, dy = case(way)
    product, _, _, of_x, of_w = WAYS[way]
    transform = Hadamard(32, "fixed")
    operand = Operand("mxfp4", hadamard=transform, ste="clip" if clips else "pass")
    q = quantize(model, Policy(products=Products(fprop=(operand, operand), backward=backward)))

    def of(x: Tensor, axis: int) -> Tensor:
        return estimated(hadamard(x, transform, axis=axis), "mxfp4", axis, clips)

    if backward == "dequantized":
        by_hand = One(model.w.detach(), lambda x, w: product(of(x, of_x), of(w, of_w)))
        expected = gradients(by_hand, by_hand.w, x, dy)
    else:  # the gradient of the plain product, clipped where it is transformed
        w = model.w.detach()
        plain = gradients(model, model.w, x, dy)
        masks = [passing(hadamard(t, transform, axis=a), "mxfp4", a) for t, a in ((x, of_x), (w, of_w))]
        there = [
            hadamard(g, transform, axis=a) * (m | (not clips))
            for g, a, m in zip(plain, (of_x, of_w), masks, strict=True)
        ]
        expected = tuple(back(g, transform, a) for g, a in zip(there, (of_x, of_w), strict=True))  # type: ignore[assignment]
    for got, wanted in zip(gradients(q, q.w, x, dy), expected, strict=True):
        assert torch.allclose(got, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))


def back(x: Tensor, transform: Hadamard, axis: int) -> Tensor:
    """The inverse of a transform, by its matrix."""
    matrix = hadamard(torch.eye(transform.size), transform, axis=1)
    turned = x.movedim(axis, -1)
    return (turned.reshape(-1, transform.size) @ matrix.T).view(turned.shape).movedim(-1, axis)


TALLIED = ["nvfp4", "nvfp4_4over6", "e2m1fn per 16 e4m3fn fp32 amax/9", "mxfp4", "e4m3fn per row fp32"]


@parametrize("size", [1.0, 1e-30, 1e-37, 1e-38], keep={1.0, 1e-37})
@pytest.mark.parametrize("fmt", TALLIED)
def test_as_many_gradients_are_clipped_as_a_tally_counts_saturations(fmt: str, size: float) -> None:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(5)) * size
    assert int((~passes(x, any_spec(fmt), -1, None)).sum()) == tally(x, fmt).overflow


@pytest.mark.parametrize("fmt", TALLIED)
@pytest.mark.parametrize("value", [torch.finfo(torch.float32).max, torch.nan], ids=["mask", "NaN"])
def test_what_is_no_number_changes_no_gradient_but_in_its_row(fmt: str, value: float) -> None:
    x, f = torch.randn(16, 64, generator=torch.Generator().manual_seed(5)), as_format(fmt)
    assert isinstance(f, BlockFormat)
    spec = any_spec(replace(f, nonfinite="saturate"))
    before = passes(x, spec, -1, None)
    x[-1, -1] = value
    after = passes(x, spec, -1, None)
    assert torch.equal(after[:-1], before[:-1])
    assert after[-1, -1]
    x[-1, -1] = torch.inf
    assert tally(x, spec.fmt).overflow == int((~passes(x, spec, -1, None)).sum()) - 1  # it was infinite before


def test_a_function_says_where_its_gradient_passes() -> None:
    def cut(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        return x.clamp(-1, 1), x.abs() < 0.5

    model, x, dy = case("linear")
    operand = Operand(cut, ste="clip")
    q = quantize(model, Policy(products=Products(fprop=(operand, operand), backward="dequantized")))
    of_x, of_w = gradients(q, q.w, x, dy)
    assert torch.equal(of_x == 0, x.abs() >= 0.5)
    assert torch.equal(of_w == 0, model.w.detach().abs() >= 0.5)
    with torch.no_grad():
        assert torch.allclose(q(x), F.linear(x.clamp(-1, 1), model.w.clamp(-1, 1)))


CLIPS = Operand("mxfp4", ste="clip")


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Operand("mxfp4", ste="none"), ValueError, "Unknown ste='none'"),
        (lambda: Operand(None, source="fprop", ste="clip"), ValueError, "does not say here where it saturates"),
        (lambda: Operand("e4m3fn per tensor delayed", ste="clip"), ValueError, "does not say here where it saturates"),
        (lambda: Products(dgrad=(None, CLIPS)), ValueError, "dgrad has ste='clip'. Expected: it at x or w of fprop"),
        (
            lambda: Products(fprop=(Operand("mxfp4", hadamard=Hadamard(32, "random")),) * 2, backward="dequantized"),
            ValueError,
            "transformed with random signs",
        ),
    ],
)
def test_what_cannot_be_clipped_or_transformed_back_is_refused(make: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_what_a_model_refuses() -> None:
    x = torch.randn(4, 48, requires_grad=True)
    own = quantize(One(torch.randn(8, 48), Product.apply), Policy(products=Products(fprop=(CLIPS, CLIPS))))
    with pytest.raises(NotImplementedError, match=r"in the backward pass of the model's own code, gives a gradient"):
        own(x).sum().backward()
    turned = Operand("mxfp4", hadamard=Hadamard(32))
    q = quantize(nn.Linear(48, 8), Policy(products=Products(fprop=(turned, turned), backward="dequantized")))
    with pytest.raises(ValueError, match=r"whose gradients are transformed back, whose length 48 it does not divide"):
        q(x)
    pair = quantize(
        nn.Linear(48, 8), Policy(products=Products(fprop=(Operand(torch.clone, name="f", ste="clip"), None)))
    )
    with pytest.raises(TypeError):
        pair(x)
    one = Operand(lambda x, axis: x * 1, name="one", ste="clip")
    pair = quantize(nn.Linear(48, 8), Policy(products=Products(fprop=(one, None))))
    with pytest.raises(TypeError, match=r"one at .* returned Tensor\. Expected: with ste='clip' a pair"):
        pair(x)
