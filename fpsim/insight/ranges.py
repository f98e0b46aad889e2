"""What a tensor holds: its range, and how much of it is not finite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fpsim.insight.rows import number

__all__ = ["Range", "binades_in", "range_of"]


@dataclass(frozen=True)
class Range:
    """What a tensor holds.

    low, high: the smallest and the largest finite number.
    smallest: the smallest magnitude that is not zero; 0 where all are.
    largest: what its dtype ends at.
    """

    count: int
    low: float
    high: float
    smallest: float
    nan: int
    plus: int
    minus: int
    largest: float

    @property
    def amax(self) -> float:
        return max(abs(self.low), abs(self.high))

    @property
    def nonfinite(self) -> int:
        return self.nan + self.plus + self.minus

    @property
    def kinds(self) -> set[str]:
        return {name for name, n in (("NaN", self.nan), ("inf", self.plus), ("-inf", self.minus)) if n}

    def __str__(self) -> str:
        words = [f"{number(self.low)} to {number(self.high)}"] if self.nonfinite < self.count or not self.count else []
        counts = ((self.plus, "inf"), (self.minus, "-inf"), (self.nan, "NaN"))
        return ", ".join([*words, *(f"{n} of {self.count} {name}" for n, name in counts if n)])


def range_of(x: Tensor) -> Range:
    """The range of a tensor of floating-point numbers; float32's largest is a mask, and left out."""
    x, largest = x.detach(), torch.finfo(x.dtype).max
    counts_as_number = x.isfinite()
    if x.dtype is torch.float32:
        counts_as_number &= x.abs() != largest
    finite = x[counts_as_number].double()
    magnitudes = finite.abs()[finite != 0]
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 0.0)
    smallest = float(magnitudes.min()) if magnitudes.numel() else 0.0
    counts = (int(x.isnan().sum()), int((x == torch.inf).sum()), int((x == -torch.inf).sum()))
    return Range(x.numel(), low, high, smallest, *counts, largest)


def binades_in(exponents: Mapping[int, int]) -> int:
    """How many binades lie between the 0.5th and the 99.5th percentile of the magnitudes, with both; 0 for zeros."""
    total, seen, inside = sum(exponents.values()), 0, []
    for exponent in sorted(exponents):
        before, seen = seen, seen + exponents[exponent]
        if seen > 0.005 * total and before < 0.995 * total:
            inside.append(exponent)
    return inside[-1] - inside[0] + 1 if inside else 0
