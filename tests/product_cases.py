"""Operands quantised by hand in NumPy, and a listener that keeps what a product was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fpsim.scaling import listeners

# By name: bits of the mantissa, exponent of the smallest normal, largest value, exponent of the largest
ELEMENTS = {
    "mxfp8_e4m3": (3, -6, 448.0, 8),
    "mxfp8_e5m2": (2, -14, 57344.0, 15),
    "mxfp6_e3m2": (2, -2, 28.0, 4),
    "mxfp6_e2m3": (3, 0, 7.5, 2),
    "mxfp4": (1, 0, 6.0, 2),
    "mxint8": (6, 0, 127 / 64, 0),
}


def by_hand(x: Tensor, fmt: str, axis: int) -> Tensor:
    """OCP MX v1.0, 6.3 in float64: blocks of 32 along an axis, scales rounded down, elements saturated."""
    mantissa_bits, least_exponent, largest, emax = ELEMENTS[fmt]
    moved = np.moveaxis(x.detach().double().numpy(), axis, -1)
    length = moved.shape[-1]
    padded = np.concatenate([moved, np.zeros((*moved.shape[:-1], -length % 32))], -1)
    blocks = padded.reshape(*padded.shape[:-1], -1, 32)
    amax = np.abs(blocks).max(-1, keepdims=True)
    scale = 2.0 ** (np.floor(np.log2(np.where(amax == 0, 1, amax))) - emax)
    v = np.clip(blocks / scale, -largest, largest)
    exponent = np.floor(np.log2(np.where(v == 0, 1, np.abs(v))))
    ulp = 2.0 ** (np.maximum(exponent, least_exponent) - mantissa_bits)
    values = (np.rint(v / ulp) * ulp * scale).reshape(padded.shape)[..., :length]
    return torch.from_numpy(np.moveaxis(values, -1, axis).copy()).float()


class Kept:
    """An observer that keeps what each operand was before and after."""

    def __init__(self, model: nn.Module) -> None:
        self.before: dict[tuple[str, str], Tensor] = {}
        self.after: dict[tuple[str, str], Tensor] = {}
        (found,) = listeners(model)
        found.observer = self

    def wants(self, site: str, role: str) -> bool:
        return True

    def __call__(self, site: str, role: str, before: Tensor, after: Tensor, spec: Any, cut: Any = None) -> None:
        self.before[site, role], self.after[site, role] = before.clone(), after.clone()

    def operand(self, role: str) -> Tensor:
        """What was kept of the only site with this role."""
        (found,) = [x for (_, r), x in self.after.items() if r == role]
        return found


class Calls(nn.Module):
    """A module that computes f(x, w) with its parameter w."""

    def __init__(self, f: Callable[[Tensor, Tensor], Tensor], w: Tensor) -> None:
        super().__init__()
        self.f, self.w = f, nn.Parameter(w)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x, self.w)


def gradients(model: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """y, dx, and the gradients of the parameters."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
