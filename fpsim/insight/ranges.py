"""Ranges: the finite range of a tensor with its counts of inf and NaN, and the range of a format or a dtype."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from fpsim.formats.blocks import BlockFormat
from fpsim.formats.codebook import Codebook
from fpsim.formats.floats import FloatFormat
from fpsim.tensors.ops import round_to
from fpsim.tensors.spec import Spec

__all__ = [
    "Ends",
    "Glance",
    "are_passed_on",
    "binades_in",
    "epsilon_of",
    "expected_error",
    "first_index",
    "glance",
]


@dataclass(frozen=True)
class Glance:
    """Statistics of a tensor from one pass over it.

    count, nonzero: the number of elements, and the number of elements that are not zero.
    low, high: the smallest and the largest finite number; 0 if there is none.
    nan, plus, minus: the numbers of NaN, inf and -inf.
    ends: the number of elements that are float32's largest number or its negative. These are masks, and `low` and
        `high` leave them out.
    largest: the largest number of the dtype.
    """

    count: int
    nonzero: int
    low: float
    high: float
    nan: int = 0
    plus: int = 0
    minus: int = 0
    ends: int = 0
    largest: float = math.inf

    @property
    def amax(self) -> float:
        return max(abs(self.low), abs(self.high))

    @property
    def nonfinite(self) -> int:
        return self.nan + self.plus + self.minus

    @property
    def kinds(self) -> set[str]:
        return set(compress(("NaN", "inf", "-inf"), (self.nan, self.plus, self.minus)))

    @property
    def worst(self) -> str:
        """The kind of the non-finite numbers; if there are several kinds, NaN comes before inf, and inf before -inf."""
        return "NaN" if self.nan else "inf" if self.plus else "-inf"

    @property
    def has_zeros(self) -> bool:
        return self.nonzero < self.count

    def __str__(self) -> str:
        if self.nonfinite:
            words = [f"{self.low:.3g} to {self.high:.3g}"] if self.nonfinite < self.count else []
            counts = ((self.plus, "inf"), (self.minus, "-inf"), (self.nan, "NaN"))
            return ", ".join([*words, *(f"{n} of {self.count} {name}" for n, name in counts if n)])
        zeros = self.count - self.nonzero
        text = f"{self.low:.3g} to {self.high:.3g}" if self.low != self.high else f"{self.low:.3g}"
        return f"{text}, {zeros} of {self.count} zero" if zeros and self.count > 1 else text


def glance(x: Tensor) -> Glance:
    """Return a glance at a tensor of numbers; for an empty tensor all values are 0."""
    x = x.detach()
    # A sparse gradient leaves out zeros that have not underflowed, so they are not counted.
    if x.layout is not torch.strided:
        x = x.coalesce().values() if x.layout is torch.sparse_coo else x.to_dense()
    if not x.is_floating_point():
        x = x.double()
    largest = torch.finfo(x.dtype).max
    if not x.numel():
        return Glance(0, 0, 0.0, 0.0, largest=largest)
    count, nonzero, (low, high) = x.numel(), int(torch.count_nonzero(x)), map(float, torch.aminmax(x))
    # In float32, `torch.finfo(x.dtype).min` is a mask like -inf, which stays as it is under every format.
    beyond = largest if x.dtype is torch.float32 else math.inf
    # One pass is enough for most tensors. If any element is NaN, aminmax returns NaN, and this condition is False.
    if -beyond < low and high < beyond:
        return Glance(count, nonzero, low, high, largest=largest)
    is_finite = x.isfinite()
    inner = is_finite & (x.abs() != beyond)
    values = x[inner]
    low, high = map(float, torch.aminmax(values)) if values.numel() else (0.0, 0.0)
    counts = int(x.isnan().sum()), int((x == torch.inf).sum()), int((x == -torch.inf).sum())
    return Glance(count, nonzero, low, high, *counts, ends=int(is_finite.sum()) - values.numel(), largest=largest)


def are_passed_on(result: Tensor, operands: list[Tensor]) -> bool:
    """True if each infinity of an element-wise result is also in an operand, possibly with the other sign."""
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
    """Return the index of the first true element, "3, 7"; "" for a scalar, or if no element is true."""
    places = where.nonzero()
    return ", ".join(map(str, places[0].tolist())) if len(places) else ""


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
    def of_spec(cls, spec: Spec, scale: float | None = None) -> Ends:
        """Return the ends of a format. If numbers share scales, these are the ends at `scale`; 0 and inf for None."""
        fmt = spec.fmt
        if isinstance(fmt, BlockFormat) and scale is not None:
            return cls(str(fmt), fmt.largest / scale, float(getattr(fmt.element, "smallest", 0.0)) / scale, None)
        # Each block has a separate range, so it is not known which numbers are outside of their block's range.
        if isinstance(fmt, BlockFormat):
            return cls(str(fmt), math.inf, 0.0, None)
        return cls(str(fmt), fmt.largest, float(getattr(fmt, "smallest", 0.0)), spec)

    @property
    def epsilon(self) -> float:
        """The relative distance of neighbouring numbers; 0 for formats that share scales."""
        if isinstance(self.holder, torch.dtype):
            return torch.finfo(self.holder).eps
        return 0.0 if self.holder is None else epsilon_of(self.holder)

    def holds(self, value: float) -> bool:
        """True if this non-zero number is not rounded to zero."""
        return self.rounded(value) != 0

    def rounded(self, value: float) -> float:
        """Round a number to the nearest one of the format; return it unchanged if the scale is unknown."""
        if self.holder is None:
            return value
        # The tensor is float64, because a float32 tensor would round the number a first time before the cast.
        if isinstance(self.holder, torch.dtype):
            return float(torch.tensor(value, dtype=torch.float64).to(self.holder))
        return float(round_to(torch.tensor(value), self.holder.fmt, "nearest_even"))


def epsilon_of(spec: Spec) -> float:
    """Return the relative distance of neighbours in a format or its elements; 0 if numbers are equally spaced."""
    return float(getattr(getattr(spec.fmt, "element", spec.fmt), "epsilon", 0.0))


def expected_error(spec: Spec | torch.dtype, count: int = 1) -> float:
    """Return the expected relative error, in the Euclidean norm, of rounding `count` numbers in a format's range.

    Shared scales add no error, because a value is an element times its scale.

    >>> from fpsim.tensors.spec import any_spec
    >>> round(expected_error(any_spec("e2m1fn")), 3), round(expected_error(any_spec("int8 per 32 fp32")), 4)
    (0.094, 0.0059)
    """
    # 28 = 12 * 7 / 3: the mean square error of rounding to nearest is ulp**2 / 12, and the mean square of numbers that
    # are uniform in the binade from 1 to 2 is 7/3.
    if isinstance(spec, torch.dtype):
        return torch.finfo(spec).eps / math.sqrt(28)
    element = spec.fmt.element if isinstance(spec.fmt, BlockFormat) else spec.fmt
    # The mean square error of stochastic rounding is twice as large, that of rounding down or up four times as large.
    more = 1.0 if spec.rounding.startswith("nearest") else math.sqrt(2) if spec.rounding == "stochastic" else 2.0
    if isinstance(element, FloatFormat):
        return more * element.epsilon / math.sqrt(28)
    if isinstance(spec.fmt, BlockFormat):
        rows, columns = spec.fmt.tile
        count = rows * columns or count
    # If the numbers of a format are equally spaced, the error depends on the largest number. For `count` normally
    # distributed numbers, the largest is about sqrt(2 log(count)) standard deviations. It is assumed to become the
    # largest value of the format.
    levels = len(element.finite) if isinstance(element, Codebook) else 2**element.word_length
    return more * 2 / levels / math.sqrt(12) * math.sqrt(2 * math.log(max(count, 2)))


def binades_in(exponents: Mapping[int, int]) -> int:
    """Return the number of binades from the 0.5th to the 99.5th percentile of magnitudes, inclusive; 0 for zeros."""
    total, seen, inside = sum(exponents.values()), 0, []
    for exponent in sorted(exponents):
        before, seen = seen, seen + exponents[exponent]
        if seen > 0.005 * total and before < 0.995 * total:
            inside.append(exponent)
    return inside[-1] - inside[0] + 1 if inside else 0
