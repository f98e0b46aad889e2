"""What the backward products are made of: the original tensors, or what the forward product used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiers
import torch
import torch.nn.functional as F
from module_functions import Product
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fpsim
from fpsim import Operand, Policy, Products, quantize, round_to

FORMATS = ["mxfp4", "nvfp4", "e4m3fn per row fp32", "e5m2"]


class StraightThrough(torch.autograd.Function):
    """Rounds a tensor, and gives its gradient back as it comes: how quantisation-aware training is written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: str, axis: int) -> Tensor:
        return round_to(x, fmt, axis=None if fmt == "e5m2" else axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, None, None


ste: Callable[..., Tensor] = StraightThrough.apply


class One(nn.Module):
    """A weight and a product, written in a way."""

    def __init__(self, shape: tuple[int, ...], product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.1)
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.w)


# The product, the shapes of x and w, and along which axis each is quantised in the forward product.
WAYS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...], int, int]] = {
    "linear": (F.linear, (3, 5, 64), (32, 64), -1, 1),
    "matmul": (torch.matmul, (5, 64), (64, 32), -1, 0),
    "weight_first": (lambda x, w: w @ x, (64, 5), (32, 64), 0, 1),
    "convolution": (lambda x, w: F.conv2d(x, w, padding=1), (2, 32, 5, 5), (16, 32, 3, 3), 1, 1),
    "einsum": (lambda x, w: torch.einsum("bti,oi->bto", x, w), (3, 5, 64), (32, 64), -1, 1),
    "batched": (torch.bmm, (4, 5, 64), (4, 64, 8), -1, 1),
}
KEPT = {"linear", "convolution", "batched"}


ORDER = 1e-5  # of the largest: 64 terms of float32 in another order, 64 * 2**-24 * 2.5; a rounding is off by 2**-5


def same(a: Tensor, b: Tensor) -> bool:
    """Equal up to the order of sums, which each processor's BLAS chooses, and for bfloat16 its rounding of them."""
    order = 2.0**-7 if a.dtype is torch.bfloat16 else ORDER
    return torch.allclose(a, b, rtol=0.0, atol=order * float(b.detach().abs().max()))


def gradients(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(dy)
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def case(way: str) -> tuple[One, Tensor, Tensor]:
    product, of_x, of_w, *_ = WAYS[way]
    generator = torch.Generator().manual_seed(2)
    model, x = One(of_w, product), torch.randn(of_x, generator=generator) * 2
    return model, x, torch.randn(model(x).shape, generator=generator)


@pytest.mark.parametrize("fmt", FORMATS)
@tiers.parametrize("way", [*WAYS], keep=KEPT)
def test_a_dequantised_backward_pass_is_the_straight_through_graph(way: str, fmt: str) -> None:
    model, x, dy = case(way)
    product, _, _, of_x, of_w = WAYS[way]
    by_hand = One(model.w.shape, lambda x, w: product(ste(x, fmt, of_x), ste(w, fmt, of_w)))
    expected = gradients(by_hand, x, dy)
    for backward, is_equal in (("dequantized", True), ("float32", False)):
        policy = Policy(products=Products(fprop=(fmt, fmt), backward=backward))
        for got, wanted in zip(gradients(quantize(model, policy), x, dy)[1:], expected[1:], strict=True):
            assert same(got, wanted) is is_equal
    plain = gradients(model, x, dy)
    policy = Policy(products=Products.all(fmt, backward="float32"))
    again = gradients(quantize(model, policy), x, dy)
    assert all(same(a, b) for a, b in zip(again, [expected[0], *plain[1:]], strict=True))


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_backward_operand_rounds_once_more_what_the_forward_product_used(fmt: str) -> None:
    model, x, dy = case("matmul")
    w = model.w.detach()
    twice = Operand(fmt, source="fprop")
    policy = Policy(products=Products(fprop=(fmt, fmt), dgrad=("e5m2", twice), wgrad=("e5m2", twice)))
    _, dx, dw = gradients(quantize(model, policy), x, dy)

    def rounded(x: Tensor, *axes: int) -> Tensor:
        for axis in axes:
            x = round_to(x, fmt, axis=None if fmt == "e5m2" else axis)
        return x

    dy = round_to(dy, "e5m2")
    assert same(dx, dy @ rounded(w, 0, 1).T)
    assert same(dw, (dy.T @ rounded(x, 1, 0)).T)
    assert fmt == "e5m2" or not torch.equal(rounded(w, 0, 1), rounded(w, 1))  # guards the test


@pytest.mark.parametrize("fmt", ["mxfp4", "e5m2"])
@pytest.mark.parametrize("way", ["compiled", "checkpoint", "own_function", "frozen", "half"])
def test_every_way_to_run_a_product_uses_the_same_copies(way: str, fmt: str) -> None:
    model, x, dy = case("linear")
    x, dy = x.flatten(0, 1), dy.flatten(0, 1)
    policy = Policy(products=Products(fprop=(fmt, fmt), backward="dequantized"))
    expected = gradients(quantize(model, policy), x, dy)
    if way == "half":
        model, x, dy = model.bfloat16(), x.bfloat16(), dy.bfloat16()
        w = model.w.detach()
        wide = [round_to(t.float(), fmt, axis=None if fmt == "e5m2" else 1) for t in (x, w)]
        expected = [t.bfloat16() for t in (wide[0] @ wide[1].T, dy.float() @ wide[1], dy.float().T @ wide[0])]
    if way == "own_function":
        model.product = Product.apply
    quantised: Any = quantize(model, policy)
    run = {
        "compiled": torch.compile(quantised, backend="aot_eager"),
        "checkpoint": lambda x: checkpoint(quantised, x, use_reentrant=False),
    }.get(way, quantised)
    if way == "frozen":
        with fpsim.frozen(quantised):
            leaf = x.clone().requires_grad_()
            y = run(leaf)
            y.backward(dy)
        got = [y.detach(), leaf.grad]
    else:
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.backward(dy)
        got = [y.detach(), leaf.grad, quantised.w.grad]
    for mine, wanted in zip(got, expected, strict=False):
        assert same(mine, wanted)


@pytest.mark.parametrize("operand", [Operand("e2m1fn", "stochastic"), Operand("e4m3fn per tensor delayed")], ids=str)
def test_noise_and_scales_of_the_forward_product_are_those_of_the_backward_pass(operand: Operand) -> None:
    model, _, dy = case("linear")
    quantised = quantize(model, Policy(products=Products(fprop=(None, operand), backward="dequantized")))
    x = torch.eye(64).expand(3, 64, 64).clone().requires_grad_()  # y is what the product used of w
    for _ in range(2):
        x.grad = None
        y = quantised(x)
        used = y[0].T
        y.backward(dy[:, :1].expand(3, 64, 32).contiguous())
    assert x.grad is not None
    assert same(x.grad, dy[:, :1].expand(3, 64, 32) @ used)
    assert not torch.equal(used, model.w)


def test_products_of_two_activations_use_them_too() -> None:
    class Scores(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x.flip(-1).mT

    x, dy = torch.randn(2, 6, 64), torch.randn(2, 6, 6)
    policy = Policy(products=Products(fprop=("mxfp4", "mxfp4"), backward="dequantized", attention=True))

    class ByHand(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ste(x, "mxfp4", -1) @ ste(x.flip(-1), "mxfp4", -1).mT

    assert all(map(same, gradients(quantize(Scores(), policy), x, dy), gradients(ByHand(), x, dy)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Operand(None), "An Operand without a format"),
        (lambda: Operand(None, "stochastic", source="fprop"), "rounds nothing again"),
        (lambda: Operand("mxfp4", source="forward"), "Unknown source='forward'. Known: original, fprop"),
        (
            lambda: Products.all(Operand("mxfp4", source="fprop")),
            "fprop: x has source='fprop'. Expected: it at w of",
        ),
        (lambda: Products(("bf16", "bf16"), (Operand("bf16", source="fprop"), None)), "dgrad: dy has source='fprop'"),
        (lambda: Products(("bf16", None), (None, Operand("bf16", source="fprop"))), "nothing would change"),
        (lambda: Products(("bf16", "bf16"), (None, "bf16"), backward="float32"), "says what its second operand is"),
        (lambda: Products.all("bf16", backward="dequantised"), "Did you mean 'dequantized'"),
        (
            lambda: Products((*[Operand("mxfp4", hadamard=fpsim.Hadamard(16, "random"))] * 2,), backward="dequantized"),
            "where w is transformed with random signs",
        ),
    ],
)
def test_a_source_that_is_not_there_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_backward_is_short_for_operands() -> None:
    used = Operand(None, source="fprop")
    expected = Products(("mxfp4", "mxfp4"), (None, used), (None, used))
    assert Products.all("mxfp4", backward="dequantized") == expected
    assert Products(("mxfp4", "mxfp4"), backward="dequantized") == expected == eval(repr(expected), vars(fpsim))
    by_operand = Products.by_operand(x="bf16", w="mxfp4", dy="e5m2", backward="dequantized")
    assert by_operand == Products(("bf16", "mxfp4"), ("e5m2", used), ("e5m2", used))
    assert Products.by_operand(w="mxfp4", backward="dequantized").wgrad == (None, None)
    assert expected.with_rounding("stochastic").dgrad == (None, used)
