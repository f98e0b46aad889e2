"""Fixed point: integers times one power of two."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from fpsim.checks import is_whole, shown
from fpsim.formats.floats import FLOAT32_LARGEST, FLOAT32_SMALLEST_EXPONENT

__all__ = ["FixedPoint", "named_fixed_point"]


@dataclass(frozen=True)
class FixedPoint:
    """The numbers `k * 2**-fraction_length` for the integers `k` of `word_length` bits.

    The format has neither inf nor NaN nor -0; numbers beyond the ends saturate.

    Formats are values: equal fields make equal, hashable formats, and `as_format(repr(f)) == f`.

    Args:
        word_length: 2 to 25 bits if signed, including the sign; 1 to 24 if not.
        fraction_length: how many of the bits lie behind the point; may be negative, or larger than the number of bits.
        signed: two's complement, `-2**(word_length - 1) <= k < 2**(word_length - 1)`; False starts at 0.
        symmetric: leave out the lowest number of two's complement, so that `-x` is in the format whenever `x` is.
            Elements of block formats are symmetric (OCP MX v1.0, 5.3.3).

    Raises:
        ValueError: for fields that make no format, or a format that float32 cannot hold.

    >>> int8 = FixedPoint(8, 0)
    >>> int8.lowest, int8.largest, FixedPoint(4, 2).values()[-2:]
    (-128.0, 127.0, (1.5, 1.75))
    """

    word_length: int
    fraction_length: int = 0
    signed: bool = True
    symmetric: bool = False

    def __post_init__(self) -> None:
        for name in ("signed", "symmetric"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={shown(getattr(self, name))} makes no format. Expected: True, False.")
        least, most = (2, 25) if self.signed else (1, 24)
        if not is_whole(self.word_length, least) or self.word_length > most:
            raise ValueError(
                f"word_length={shown(self.word_length)} makes no format that a float32 holds. "
                f"Expected: the integers {least} to {most}."
            )
        # The length is bounded first, so that the checks below cannot compute powers of two with billions of digits.
        if not is_whole(self.fraction_length) or abs(self.fraction_length) > 10**9:
            given = shown(self.fraction_length)
            raise ValueError(f"fraction_length={given} makes no format. Expected: an integer, from -127 to 149.")
        if self.symmetric and not self.signed:
            raise ValueError("symmetric=True is for signed formats. Omit it with signed=False.")
        lowest_exponent, beyond = -self.fraction_length, self.digits - self.fraction_length
        if lowest_exponent < FLOAT32_SMALLEST_EXPONENT or beyond > 128 or -self.lowest > FLOAT32_LARGEST:
            raise ValueError(
                f"A float32 cannot hold {self!r}: its values are multiples of 2**{lowest_exponent} up to 2**{beyond}. "
                f"Use another fraction_length."
            )

    def __str__(self) -> str:
        name = f"{'int' if self.signed else 'uint'}{self.word_length}"
        return name if self == named_fixed_point(name) else repr(self)

    @property
    def digits(self) -> int:
        """Bits without the sign."""
        return self.word_length - int(self.signed)

    @property
    def largest(self) -> float:
        """The largest value."""
        return math.ldexp(2**self.digits - 1, -self.fraction_length)

    @property
    def lowest(self) -> float:
        """The lowest value."""
        if not self.signed:
            return 0.0
        return -self.largest if self.symmetric else -math.ldexp(2**self.digits, -self.fraction_length)

    def values(self) -> tuple[float, ...]:
        """Return all values in ascending order, for formats of up to 16 bits."""
        if self.word_length > 16:
            raise ValueError(f"values() of {self} would list 2**{self.word_length} numbers. It lists up to 2**16.")
        step = math.ldexp(1.0, -self.fraction_length)
        return tuple(k * step for k in range(int(self.lowest / step), 2**self.digits))

    # The interface that a rounding needs of every format. In terms of floats, every value is subnormal or in the first
    # normal binade.

    specials = "fixed"
    subnormals = True
    is_signed = has_zero = True
    has_inf = has_nan = has_negative_zero = False

    @property
    def bits(self) -> int:
        return self.word_length

    @property
    def mantissa_bits(self) -> int:
        return self.digits - 1

    @property
    def precision(self) -> int:
        return self.digits

    @property
    def min_exponent(self) -> int:
        return self.digits - 1 - self.fraction_length

    @property
    def min_ulp_exponent(self) -> int:
        return -self.fraction_length

    @property
    def smallest_normal(self) -> float:
        return math.ldexp(1.0, self.min_exponent)

    @property
    def smallest(self) -> float:
        """The smallest positive value."""
        return math.ldexp(1.0, -self.fraction_length)

    # As in FloatFormat, the smallest value is subnormal.
    smallest_subnormal = smallest

    def resolve_overflow(self, overflow: str | None = None) -> str:
        """Return "saturate". Raises ValueError for any other rule."""
        if overflow is not None and (not isinstance(overflow, str) or overflow != "saturate"):
            raise ValueError(
                f"overflow={shown(overflow)} is invalid: {self} has neither inf nor NaN. Expected: saturate, or None."
            )
        return "saturate"


_NAME = re.compile(r"(u?)int(\d{1,2})")


def named_fixed_point(name: str) -> FixedPoint | None:
    """Return the format of a name such as "int8" or "uint4"; None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else FixedPoint(int(match[2]), 0, signed=not match[1])
