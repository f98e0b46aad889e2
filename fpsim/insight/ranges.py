"""What a tensor holds: its range, and how much of it is not finite; and what a format makes of a number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fpsim.formats.blocks import BlockFormat
from fpsim.insight.rows import number
from fpsim.tensors.ops import round_to
from fpsim.tensors.spec import Spec

__all__ = [
    "Ends",
    "Glance",
    "Range",
    "are_passed_on",
    "binades_in",
    "first_index",
    "glance",
    "is_mask_like",
    "range_of",
]


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


@dataclass(frozen=True)
class Glance:
    """What one pass over a tensor tells.

    low, high: NaN where there is one. counts: of all kinds, where not all is finite.
    """

    count: int
    nonzero: int
    low: float
    high: float
    counts: Range | None

    @property
    def kinds(self) -> set[str]:
        return set() if self.counts is None else self.counts.kinds

    @property
    def amax(self) -> float:
        return max(abs(self.low), abs(self.high)) if self.counts is None else self.counts.amax

    @property
    def has_zeros(self) -> bool:
        return self.nonzero < self.count

    @property
    def nonfinite(self) -> float:
        return 0.0 if self.counts is None else self.counts.nonfinite / max(self.count, 1)

    def __str__(self) -> str:
        if self.counts is not None:
            known = self.counts.nonfinite < self.counts.count
            words = [f"{self.counts.low:.3g} to {self.counts.high:.3g}"] if known else []
            counts = ((self.counts.plus, "inf"), (self.counts.minus, "-inf"), (self.counts.nan, "NaN"))
            return ", ".join([*words, *(f"{n} of {self.count} {name}" for n, name in counts if n)])
        zeros = self.count - self.nonzero
        text = f"{self.low:.3g} to {self.high:.3g}" if self.low != self.high else f"{self.low:.3g}"
        return f"{text}, {zeros} of {self.count} zero" if zeros and self.count > 1 else text


def glance(x: Tensor) -> Glance:
    """A glance at a tensor of numbers; of an empty one all is 0."""
    x = x.detach()
    if x.layout is not torch.strided:
        x = x.coalesce().values() if x.layout is torch.sparse_coo else x.to_dense()
    if not x.numel():
        return Glance(0, 0, 0.0, 0.0, None)
    if not x.is_floating_point():
        x = x.double()
    low, high = (float(v) for v in torch.aminmax(x))
    is_finite = math.isfinite(low) and math.isfinite(high)
    return Glance(x.numel(), int(torch.count_nonzero(x)), low, high, None if is_finite else range_of(x))


def is_mask_like(x: Tensor) -> bool:
    """Whether minus infinity stands in a tensor for what may not be looked at: nothing else there is above zero."""
    return not bool((x > 0).any()) and not bool(x.isnan().any())


def are_passed_on(result: Tensor, operands: list[Tensor]) -> bool:
    """Whether each infinity of an element-wise result comes from one of an operand, with another sign perhaps."""
    try:
        shape = torch.broadcast_shapes(*(x.shape for x in operands))
    except RuntimeError:
        return False
    if shape != result.shape or result.dim() == 0:
        return False
    held = torch.zeros(shape, dtype=torch.bool, device=result.device)
    for x in operands:
        held |= x.isinf()
    return not bool((result.isinf() & ~held).any())


def first_index(where: Tensor) -> str:
    """The index of the first true element, "3, 7"; "" of a scalar or where there is none."""
    places = where.nonzero()
    return ", ".join(str(int(i)) for i in places[0]) if len(places) else ""


@dataclass(frozen=True)
class Ends:
    """The name, the largest and the least number of a format or of a dtype of torch."""

    name: str
    largest: float
    smallest: float
    holder: Any  # a Spec, or a torch.dtype

    @classmethod
    def of_dtype(cls, dtype: torch.dtype) -> Ends:
        info = torch.finfo(dtype)
        return cls(str(dtype).removeprefix("torch."), info.max, info.smallest_normal * info.eps, dtype)

    @classmethod
    def of_spec(cls, spec: Spec) -> Ends:
        fmt = spec.fmt
        if isinstance(fmt, BlockFormat):
            return cls(str(fmt), math.inf, 0.0, None)
        return cls(str(fmt), fmt.largest, float(getattr(fmt, "smallest", 0.0)), spec)

    def holds(self, value: float) -> bool:
        """Whether a number that is not zero is not rounded to zero."""
        return self.rounded(value) != 0

    def rounded(self, value: float) -> float:
        if self.holder is None:
            return value
        if isinstance(self.holder, torch.dtype):
            return float(torch.tensor(value, dtype=torch.float64).to(self.holder))
        return float(round_to(torch.tensor(value), self.holder.fmt, "nearest_even"))


def binades_in(exponents: Mapping[int, int]) -> int:
    """How many binades lie between the 0.5th and the 99.5th percentile of the magnitudes, with both; 0 for zeros."""
    total, seen, inside = sum(exponents.values()), 0, []
    for exponent in sorted(exponents):
        before, seen = seen, seen + exponents[exponent]
        if seen > 0.005 * total and before < 0.995 * total:
            inside.append(exponent)
    return inside[-1] - inside[0] + 1 if inside else 0
