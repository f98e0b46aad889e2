"""The products of a backward pass: their operands, however they are spelt, and their terms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from layerwise_cases import backward, seeded
from torch import Tensor, nn

from ada_loss import AdaLossScaled
from fpsim import Policy, quantize


class Called(nn.Module):
    def __init__(self, call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.call, self.first = call, nn.Linear(4, 4)
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4) * 1e-3), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.first(x), self.weight, self.bias)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w, b: F.linear(x, bias=b, weight=w),
        lambda x, w, b: F.linear(x, bias=None, weight=w),
        lambda x, w, b: F.linear(weight=w, input=x),
        lambda x, w, b: torch.matmul(other=w.t(), input=x),
        lambda x, w, b: torch.addmm(mat2=w.t(), mat1=x, input=b),
        lambda x, w, b: torch.baddbmm(b, batch2=w.t()[None], batch1=x[None])[0],
    ],
    ids=["bias first", "no bias", "weight first", "matmul", "addmm", "baddbmm"],
)
def test_operands_that_are_named_in_another_order_are_the_same_operands(call: Callable[..., Tensor]) -> None:
    scales = []
    for way in (F.linear, call):
        torch.manual_seed(0)
        model = quantize(Called(way), Policy(error="fp16"))
        with AdaLossScaled(model) as handle:
            backward(model, torch.randn(3, 4, generator=seeded()), 1e-6)
            scales.append(handle.last_log2_scale("first:linear"))
    assert scales[0] == scales[1] > 0


@pytest.mark.parametrize(
    ("product", "spelt"),
    [
        (lambda x, w: x @ w.t(), lambda x, w: torch.linalg.matmul(x, w.t())),
        (lambda x, w: torch.chain_matmul(x, w.t(), w), lambda x, w: torch.linalg.multi_dot([x, w.t(), w])),
        (lambda x, w: torch.inner(x, w[0]), lambda x, w: torch.linalg.vecdot(x, w[0])),
        (lambda x, w: F.linear(x, w[:1])[:, 0], lambda x, w: F.linear(x, w[0])),
    ],
    ids=["matmul", "multi_dot", "vecdot", "one output"],
)
@pytest.mark.filterwarnings("ignore:.*chain_matmul is deprecated:UserWarning")
def test_a_product_is_the_same_however_it_is_spelt(
    product: Callable[[Tensor, Tensor], Tensor], spelt: Callable[[Tensor, Tensor], Tensor]
) -> None:
    scales = []
    for way in (product, spelt):
        torch.manual_seed(0)
        model = quantize(Called(lambda x, w, _, way=way: way(x, w)), Policy(error="fp16"))
        with AdaLossScaled(model) as handle:
            backward(model, torch.randn(3, 4, generator=seeded()), 1e-2)
            scales.append(handle.last_log2_scale("first:linear"))
    assert scales[0] == scales[1] > 0


def test_groups_count_only_their_own_terms() -> None:
    from ada_loss.transforms import PRODUCTS

    x, w = torch.ones(2, 6, 5, 5), torch.ones(8, 3, 3, 3)
    (product,) = PRODUCTS["conv2d"](x, w, None, 1, 1, 1, 2)
    assert product.terms == 8 // 2 * 9
    assert PRODUCTS["conv2d"](torch.ones(6, 5, 5), w)[0].terms == 8 // 2 * 9
    assert PRODUCTS["conv_transpose2d"](torch.ones(2, 8, 5, 5), torch.ones(8, 3, 2, 2))[0].terms == 3 * 4
    assert PRODUCTS["linear"](torch.ones(4, 7), torch.ones(3, 7))[0].terms == 3


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((4, 5), (5, 3)),
        ((2, 4, 5), (2, 5, 3)),
        ((2, 4, 5), (5, 3)),
        ((4, 5), (2, 5, 3)),
        ((2, 1, 4, 5), (6, 5, 3)),  # both are broadcast
        ((5,), (5,)),
        ((5,), (5, 3)),
    ],
    ids=str,
)
def test_a_matrix_products_terms_are_those_that_a_gradient_of_ones_adds_up(a: tuple[int], b: tuple[int]) -> None:
    from ada_loss.transforms import PRODUCTS

    x, y = torch.ones(a, requires_grad=True), torch.ones(b, requires_grad=True)
    torch.matmul(x, y).sum().backward()  # every element of a gradient counts its terms
    for product, operand in zip(PRODUCTS["matmul"](x, y), (x, y), strict=True):
        assert product.operand is operand
        assert torch.equal(operand.grad, torch.full_like(operand, product.terms))


def test_einsums_terms_are_counted_too() -> None:
    from ada_loss.transforms import PRODUCTS

    x, y = torch.ones(2, 3, 4, requires_grad=True), torch.ones(4, 5, requires_grad=True)
    torch.einsum("abc,cd->ad", x, y).sum().backward()
    for product in PRODUCTS["einsum"]("abc,cd->ad", x, y):
        assert torch.equal(product.operand.grad, torch.full_like(product.operand, product.terms))
