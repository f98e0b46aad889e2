"""What made a normalisation, a determinant or a gamma function give inf or NaN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fpsim.emulation.operations import Kind, row_of
from fpsim.insight.ranges import Glance
from fpsim.insight.reasons.event import Event

__all__ = ["of_determinant", "of_normalisation", "of_poles"]


def of_normalisation(
    event: Event,
    name: str,
    operands: list[Tensor],
    arguments: tuple[Any, ...],
    options: Any,
    no_number: Tensor,
    numbers: Glance,
) -> bool:
    """A normalisation divides by a deviation of 0 where nothing is added to it, or takes the root of a variance."""
    if not all(bool(x.isfinite().all()) for x in operands):
        return False
    row = row_of(name)
    if row.name == "weight_norm" and len(arguments) > 2:
        v, dim = arguments[0], arguments[2]
        zeros = (v == 0).all(dim=[i for i in range(v.dim()) if i != dim]) if dim >= 0 else (v == 0).all()
        if not bool(zeros.any()):
            return False
        event.kind = "division by zero"
        event.why.append(f"{int(zeros.sum())} of {zeros.numel()} directions are 0, and so is their norm: 0 / 0.")
        return True
    if row.kind is not Kind.NORMALISATION or not row.adds:
        return False
    eps, variance = options.get("eps"), arguments[2] if len(arguments) > 2 else None
    if row.name != "batch_norm" or options.get("training") or not isinstance(variance, Tensor):
        variance = None
    if variance is not None and bool((variance + (eps or 0.0) < 0).any()):
        event.kind = "root of a negative number"
        n, low = int((variance < 0).sum()), float(variance.min())
        event.why.append(f"{n} of {variance.numel()} running variances are negative, down to {low:.3g}.")
        return True
    if eps != 0 or not numbers.nan:
        return False
    event.kind, event.constant, event.remedy = "division by zero", 0.0, "eps"
    event.why.append(f"{event.count} of {event.of} are divided by a deviation of 0, and eps, which is added, is 0.")
    return True


def of_determinant(
    event: Event,
    name: str,
    operands: list[Tensor],
    arguments: tuple[Any, ...],
    options: Any,
    no_number: Tensor,
    numbers: Glance,
) -> bool:
    """The logarithm of a determinant that is 0, or negative."""
    if row_of(name).kind is not Kind.LOG_DETERMINANT or not operands or not bool(operands[0].isfinite().all()):
        return False
    singular = numbers.minus
    event.kind = "logarithm of zero" if singular else "logarithm of a negative number"
    which = "0: it is singular" if singular else "negative"
    event.why.append(f"The determinant of {singular or event.count} of {event.of} matrices is {which}.")
    return True


def of_poles(
    event: Event, name: str, operands: list[Tensor], arguments: tuple[Any, ...], options: Any, no_number: Tensor, _: Any
) -> bool:
    """A gamma function has no value at 0, -1, -2, ..."""
    if row_of(name).kind is not Kind.GAMMA or not operands:
        return False
    x, row = operands[-1], row_of(name)
    degree = next((int(a) for a in arguments if isinstance(a, int)), 1) if row.name == "mvlgamma" else 1
    shifted = torch.stack([x - i / 2 for i in range(degree)])  # it adds gamma functions at x, x - 1/2, x - 1, ...
    poles = ((shifted <= 0) & (shifted == shifted.floor()) & shifted.isfinite()).any(0)
    if not bool(poles.any()):
        return False
    event.kind = "outside of its domain"
    event.why.append(f"{int(poles.sum())} of {x.numel()} numbers that it read are 0 or negative whole ones: a pole.")
    return True
