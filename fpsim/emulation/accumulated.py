"""Products written as products of matrices, for an accumulator that torch does not have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fpsim.emulation.forms import Batched, Convolution, ConvolutionSettings, Form, Linear
from fpsim.tensors.accumulators import Accumulator

__all__ = ["Multiplies", "Multiply", "in_matrices", "in_order"]

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (n, i, k) by (n, k, j), and the addend: (n, i, j)
Multiplies = tuple[Multiply, ...]  # of fprop, dgrad and wgrad


def in_matrices(form: Form, multiply: Sequence[Multiply | None]) -> Form:
    """Return the same product with sums made by `multiply`, of fprop, dgrad and wgrad; None leaves a sum to torch.

    Raises NotImplementedError for a form that is not known as a product of matrices.
    """
    for kind, made in ((Linear, _Linear), (Batched, _Batched), (Convolution, _Convolution)):
        if isinstance(form, kind):
            matrices = made(form, tuple(own or _torchs for own in multiply))  # type: ignore[arg-type]
            # On the instance, so that a product without an accumulator keeps the form's own method.
            for name, own in zip(("forward", "data_gradient", "weight_gradient"), multiply, strict=True):
                if own is None:
                    setattr(matrices, name, getattr(form, name))
            return matrices
    raise NotImplementedError(
        "This product is not known as a product of matrices, and cannot be added up in an accumulator of its own. "
        "Expected: linear layers, matrix products and convolutions; Products(accumulator=None)."
    )


def in_order(form: Form, accumulators: Sequence[Accumulator]) -> Sequence[Accumulator]:
    """Return the accumulators of the three products, with operands in the order of the product of `in_matrices`."""
    # These forms multiply x by dy for the weight gradient; an accumulator with a format for each operand has dy first.
    is_turned = form.settings.transposed if isinstance(form, Convolution) else isinstance(form, Batched)
    return (*accumulators[:2], accumulators[2].turned) if is_turned else accumulators


def _torchs(*_: Any) -> Tensor:
    raise AssertionError("this product is torch's own")


class _Linear(Linear):
    def __init__(self, form: Linear, multiply: Multiplies) -> None:
        self.leading, self._multiply = form.leading, multiply

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        added = None if bias is None else bias.expand(1, x.shape[0], w.shape[0])
        return self._multiply[0](x[None], w.t()[None], added).reshape(*self.leading, w.shape[0])

    def data_gradient(self, dy: Tensor, w: Tensor) -> Tensor:
        return self._multiply[1](dy[None], w[None], None).view(*self.leading, w.shape[1])

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return self._multiply[2](dy.t()[None], x[None], None)[0]


class _Batched(Batched):
    def __init__(self, form: Batched, multiply: Multiplies) -> None:
        self.shapes, self._multiply = form.shapes, multiply

    def _product(self, multiply: Multiply, a: Tensor, b: Tensor) -> Tensor:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        flat = [x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (a, b)]
        return multiply(flat[0], flat[1], None).view(*batch, a.shape[-2], b.shape[-1])

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return self._product(self._multiply[0], x, w)

    def data_gradient(self, dy: Tensor, w: Tensor) -> Tensor:
        return self._product(self._multiply[1], dy, w.mT).sum_to_size(self.shapes[0])

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return self._product(self._multiply[2], x.mT, dy).sum_to_size(self.shapes[1])


class _Convolution(Convolution):
    """Each output is a sum over channels and, for each of them, over the kernel's positions in order."""

    def __init__(self, form: Convolution, multiply: Multiplies) -> None:
        self.shapes, self.settings, self.groups = form.shapes, form.settings, form.groups
        self.fprop, self.dgrad, self.wgrad = form.fprop, form.dgrad, form.wgrad
        self._multiply = multiply

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        if self.settings.transposed:
            return self._transposed(self._multiply[0], x, w, _transposed_size(x.shape, w.shape, self.settings), bias)
        return self._plain(self._multiply[0], x, w, bias)

    def data_gradient(self, dy: Tensor, w: Tensor) -> Tensor:
        if self.settings.transposed:
            return self._plain(self._multiply[1], dy, w, None)
        return self._transposed(self._multiply[1], dy, w, self.shapes[0], None)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        outer, inner = (x, dy) if self.settings.transposed else (dy, x)
        groups, w = self.settings.groups, self.shapes[1]
        rows = outer.unflatten(1, (groups, -1)).movedim(0, 2).flatten(2)  # (groups, out, batch and positions)
        patches = _patches(inner, w[2:], self.settings, outer.shape[2:])
        return self._multiply[2](rows, patches, None).reshape(w)

    def _plain(self, multiply: Multiply, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        s = self.settings
        out = [
            (size + 2 * p - d * (k - 1) - 1) // step + 1
            for size, p, d, k, step in zip(x.shape[2:], s.padding, s.dilation, w.shape[2:], s.stride, strict=True)
        ]
        columns = w.unflatten(0, (s.groups, -1)).flatten(2).mT  # (groups, in and positions of the kernel, out)
        y = multiply(_patches(x, w.shape[2:], s, out), columns, _rows_of(bias, s.groups, x.shape[0], out))
        return _from_rows(y, x.shape[0], out)

    def _transposed(self, multiply: Multiply, x: Tensor, w: Tensor, size: Sequence[int], bias: Tensor | None) -> Tensor:
        """Convolve x, with zeros between its elements, with the kernel turned around."""
        s, n = self.settings, len(w.shape) - 2
        spread = x.new_zeros(*x.shape[:2], *((length - 1) * step + 1 for length, step in zip(x.shape[2:], s.stride)))
        places: tuple[Any, ...] = (..., *(slice(None, None, step) for step in s.stride))
        spread[places] = x
        pads = []
        for i in reversed(range(n)):
            before = s.dilation[i] * (w.shape[2 + i] - 1) - s.padding[i]
            behind = size[2 + i] + s.dilation[i] * (w.shape[2 + i] - 1) - before - spread.shape[2 + i]
            pads += [before, behind]
        spread = F.pad(spread, pads)
        turned = w.flip([*range(2, n + 2)]).unflatten(0, (s.groups, -1)).transpose(1, 2)  # (groups, out, in, ...)
        one = [1] * n
        plain = ConvolutionSettings(one, [0] * n, s.dilation, False, [0] * n, s.groups)
        out = list(size[2:])
        y = multiply(
            _patches(spread, w.shape[2:], plain, out), turned.flatten(2).mT, _rows_of(bias, s.groups, x.shape[0], out)
        )
        return _from_rows(y, x.shape[0], out)


def _transposed_size(x: torch.Size, w: torch.Size, s: ConvolutionSettings) -> list[int]:
    lists = zip(x[2:], s.stride, s.padding, s.dilation, w[2:], s.output_padding, strict=True)
    return [x[0], w[1] * s.groups, *((n - 1) * step - 2 * p + d * (k - 1) + o + 1 for n, step, p, d, k, o in lists)]


def _patches(x: Tensor, kernel: Sequence[int], s: ConvolutionSettings, out: Sequence[int]) -> Tensor:
    """Return the inputs of each output: (groups, batch and output positions, channels and positions of the kernel)."""
    n = len(kernel)
    x = F.pad(x, [p for pad in reversed(s.padding) for p in (pad, pad)])
    for i in range(n):
        x = x.unfold(2 + i, s.dilation[i] * (kernel[i] - 1) + 1, s.stride[i])[..., :: s.dilation[i]]
        # With a stride, the last inputs may belong to no output: the weight gradient has fewer positions.
        x = x.narrow(2 + i, 0, out[i])
    x = x.unflatten(1, (s.groups, -1)).movedim(2, n + 2)  # (batch, groups, positions, channels, kernel)
    return x.transpose(0, 1).reshape(s.groups, x.shape[0] * math.prod(out), x.shape[n + 2] * math.prod(kernel))


def _rows_of(bias: Tensor | None, groups: int, batch: int, out: Sequence[int]) -> Tensor | None:
    if bias is None:
        return None
    per_group = bias.view(groups, 1, -1)
    return per_group.expand(groups, batch * math.prod(out), per_group.shape[2])


def _from_rows(y: Tensor, batch: int, out: Sequence[int]) -> Tensor:
    """Rearrange (groups, batch and positions, channels) as (batch, groups and channels, positions)."""
    return y.unflatten(1, (batch, *out)).movedim(-1, 1).movedim(2, 0).flatten(1, 2).contiguous()
