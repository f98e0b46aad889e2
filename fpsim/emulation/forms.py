"""The forms of a product: where its sums run, and how its two gradients follow from its operands.

A product is linear in each of x and w. Its gradients are products of the same kind, at operands of their own:
`dx = vjp(f, at=w)(dy)`. `ByVjp` computes them so, for any such function; the other forms are written by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["Batched", "ByVjp", "Convolution", "Form", "Linear", "Side"]


class Side(NamedTuple):
    """How an operand lies in a product: the axis that the product sums over, and that along which tiles have rows."""

    axis: int
    across: int


Sides = tuple[Side, Side]
_ROWS, _COLUMNS = Side(1, 0), Side(0, 1)


class Form(Protocol):
    """One bilinear operation. All operands come arranged, as `arrange` gives them."""

    fprop: Sides  # of x and w
    dgrad: Sides  # of dy and w
    wgrad: Sides  # of dy and x
    groups: int  # how many sums lie one behind the other along the axes of fprop and dgrad

    def arrange(self, x: Tensor) -> Tensor:
        """x or dy, with the axes that the sides name; w has them as it is."""
        ...

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """y, as torch gives it."""
        ...

    def data_gradient(self, dy: Tensor, w: Tensor) -> Tensor:
        """dx, in the shape that x was given in."""
        ...

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """dw, in the shape of w."""
        ...

    def bias_gradient(self, dy: Tensor) -> Tensor:
        """The gradient of the bias: dy summed over all axes but that of features."""
        ...


class Linear:
    """y = x w^T. x: (..., in), w: (out, in), bias: (out,). All leading axes of x are tokens, flattened in order."""

    fprop, dgrad, wgrad = (_ROWS, _ROWS), (_ROWS, _COLUMNS), (_COLUMNS, _COLUMNS)
    groups = 1

    def __init__(self, x: Tensor, w: Tensor) -> None:
        self.leading = x.shape[:-1]

    def arrange(self, x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1]) if x.numel() else x.reshape(x.shape[:-1].numel(), x.shape[-1])

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        y = x.new_empty(*self.leading, w.shape[0])  # no view, which autograd would let nobody change in place
        rows = y.view(x.shape[0], w.shape[0])
        torch.mm(x, w.t(), out=rows) if bias is None else torch.addmm(bias, x, w.t(), out=rows)
        return y

    def data_gradient(self, dy: Tensor, w: Tensor) -> Tensor:
        return torch.mm(dy, w).view(*self.leading, w.shape[1])

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return torch.mm(dy.t(), x)

    def bias_gradient(self, dy: Tensor) -> Tensor:
        return self.arrange(dy).sum(0)


class Batched:
    """y = x w. x: (..., rows, inner), w: (..., inner, columns), whose leading axes are broadcast. No bias."""

    fprop = Side(-1, -2), Side(-2, -1)
    dgrad = Side(-1, -2), Side(-1, -2)
    wgrad = Side(-2, -1), Side(-2, -1)
    groups = 1

    def __init__(self, x: Tensor, w: Tensor) -> None:
        self.shapes = x.shape, w.shape

    def arrange(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return torch.matmul(x, w)

    def data_gradient(self, dy: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(dy, w.mT).sum_to_size(self.shapes[0])

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return torch.matmul(x.mT, dy).sum_to_size(self.shapes[1])

    def bias_gradient(self, dy: Tensor) -> Tensor:
        raise AssertionError("a batched product has no bias")


class ConvolutionSettings(NamedTuple):
    """What torch.convolution takes besides its tensors."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


class Convolution:
    """A convolution of any kind. x: (batch, in, ...), w: (out, in / groups, ...); transposed (in, out / groups, ...).

    Blocks run along channels, and along the batch for the weight gradient, as in microxcaling.
    """

    def __init__(self, x: Tensor, w: Tensor, settings: ConvolutionSettings) -> None:
        self.shapes, self.settings, self.groups = (x.shape, w.shape), settings, settings.groups
        inner, outer = (_COLUMNS, _ROWS) if settings.transposed else (_ROWS, _COLUMNS)
        self.fprop, self.dgrad, self.wgrad = (_ROWS, inner), (_ROWS, outer), (_COLUMNS, _COLUMNS)

    def arrange(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(x, w, bias, *self.settings)

    def data_gradient(self, dy: Tensor, w: Tensor) -> Tensor:
        like_x = dy.new_empty(1).expand(self.shapes[0])
        return self._backward(dy, like_x, w, [True, False, False])[0]

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        like_w = dy.new_empty(1).expand(self.shapes[1])
        return self._backward(dy, x, like_w, [False, True, False])[1]

    def bias_gradient(self, dy: Tensor) -> Tensor:
        return dy.sum([0, *range(2, dy.dim())])

    def _backward(self, dy: Tensor, x: Tensor, w: Tensor, wanted: list[bool]) -> Any:
        return torch.ops.aten.convolution_backward(dy, x, w, None, *self.settings, wanted)


class ByVjp:
    """Any function f(x, w) that is linear in each of them; its gradients are its own vjp at other operands."""

    groups = 1

    def __init__(self, x: Tensor, w: Tensor, f: Callable[[Tensor, Tensor], Tensor], sides: tuple[Sides, Sides, Sides]):
        self.shapes, self._f = (x.shape, w.shape), f
        self.fprop, self.dgrad, self.wgrad = sides

    def arrange(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return self._f(x, w)

    def data_gradient(self, dy: Tensor, w: Tensor) -> Tensor:
        with torch.enable_grad():
            x = dy.new_zeros(self.shapes[0]).requires_grad_()
            return torch.autograd.grad(self._f(x, w), x, dy)[0]

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        with torch.enable_grad():
            w = dy.new_zeros(self.shapes[1]).requires_grad_()
            return torch.autograd.grad(self._f(x, w), w, dy)[0]

    def bias_gradient(self, dy: Tensor) -> Tensor:
        raise AssertionError("a bias is added outside")
