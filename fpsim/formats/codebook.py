"""Code books: formats that are a list of numbers."""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any

from fpsim.checks import number_of, refuse, shown
from fpsim.formats.floats import FLOAT32_LARGEST

__all__ = ["TIES", "Codebook"]

TIES = ("even", "up", "down", "away", "zero")
MOST_VALUES = 2**16
NAMES: dict[Codebook, str] = {}  # of the books that have one: see codebooks


@dataclass(frozen=True, eq=False)
class Codebook:
    """A format that is a list of numbers: code `i` stands for `values[i]`.

    A number between two neighbours becomes the nearer one. NaN stays NaN. A result that is zero keeps the sign of the
    input if the book holds -0, and is +0 otherwise. A number beyond the ends becomes the nearest value, and so does inf
    unless the book holds it.

    Args:
        values: 2 to 2**16 different numbers in the order of their codes, which need not be ascending. Each is kept as
            the nearest float32. Among them may be inf, -inf, one NaN, and -0 besides 0.
        ties: where a number exactly between two neighbours goes: "even" to the one with the even code; "up" to the
            larger one; "down" to the smaller one; "away" from zero; "zero" towards zero. "away" and "zero" go up
            between a value and its negative.
        borders: the numbers that separate neighbours, ascending, one less than the different values in order, inf
            among them and NaN not; None for the midpoints. Each is a number from one neighbour to the other, and
            `ties` says where it goes itself. The midpoint of the largest finite value and inf is where the next value
            would begin if the last spacing went on, as in IEEE 754. Stochastic rounding goes by the distances alone.

    Formats are values: equal fields make equal, hashable formats, and `as_format(repr(f)) == f`.

    Raises:
        ValueError: for numbers that make no code book.

    >>> levels = Codebook((-1.0, 0.0, 0.25, 1.0), ties="up")
    >>> levels.bits, levels.lowest, levels.largest, levels.decode(2), levels.encode(1.0)
    (2, -1.0, 1.0, 0.25, 3)
    >>> levels.midpoints
    (-0.5, 0.125, 0.625)
    """

    values: tuple[float, ...]
    ties: str = "even"
    borders: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _float32s(self.values))
        if not isinstance(self.ties, str) or self.ties not in TIES:
            raise ValueError(refuse(f"Unknown ties {shown(self.ties)}", TIES, word=self.ties))
        _require_values(self)
        if self.borders is not None:
            object.__setattr__(self, "borders", _borders(self))
        if self.ties == "even":
            _require_alternating_codes(self)

    # Values

    @cached_property
    def _key(self) -> tuple[tuple[str, ...], str, tuple[float, ...] | None]:
        return tuple(map(str, self.values)), self.ties, self.borders  # text tells 0 from -0, and NaN equals NaN

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Codebook) else NotImplemented

    # Cached: a book has up to 2**16 values, and formats are keys of caches that every rounding looks up.
    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}  # hashes differ between processes

    @cached_property
    def digest(self) -> str:
        """Twelve hexadecimal digits that tell this book from others."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return NAMES.get(self) or f"codebook{len(self.values)}_{self.digest}"

    @cached_property
    def ascending(self) -> tuple[tuple[float, int], ...]:
        """Twelve hexadecimal digits that distinguish this book from others."""
        numbers = ((v, code) for code, v in enumerate(self.values) if not math.isnan(v))
        return tuple((v, code) for v, code in sorted(numbers) if v or math.copysign(1, v) > 0)

    @cached_property
    def exact_borders(self) -> tuple[Fraction, ...]:
        """Borders between neighbours of `ascending`: `borders`, or the exact midpoints, which float64 need not hold."""
        if self.borders is not None:
            return tuple(map(Fraction, self.borders))
        numbers = [v for v, _ in self.ascending]
        borders = []
        for i, (low, high) in enumerate(pairwise(numbers)):
            # No midpoint with an infinity exists. IEEE 754 overflows where the next value would begin if the last
            # spacing went on.
            if math.isinf(low):
                borders.append(Fraction(high) + (Fraction(high) - Fraction(numbers[i + 2])) / 2)
            elif math.isinf(high):
                borders.append(Fraction(low) + (Fraction(low) - Fraction(numbers[i - 1])) / 2)
            else:
                borders.append((Fraction(low) + Fraction(high)) / 2)
        return tuple(borders)

    @property
    def midpoints(self) -> tuple[float, ...]:
        """Borders between neighbours in ascending order, as the nearest float64."""
        return tuple(map(float, self.exact_borders))

    def goes_up(self, i: int) -> bool:
        """True if the border between the values `i` and `i + 1` of `ascending` goes to the upper one."""
        (low, low_code), (high, high_code) = self.ascending[i : i + 2]
        if self.exact_borders[i] in (low, high):  # a value of the book stays
            return self.exact_borders[i] == high
        if self.ties == "even":
            return high_code % 2 == 0 and low_code % 2 == 1
        if self.ties in ("away", "zero"):
            return (abs(high) > abs(low)) == (self.ties == "away") or abs(high) == abs(low)
        return self.ties == "up"

    # Codes

    def decode(self, code: int) -> float:
        """The value of a code. Raises ValueError for a code out of range."""
        if isinstance(code, bool) or not isinstance(code, int) or not 0 <= code < len(self.values):
            raise ValueError(f"Code {shown(code)} is out of range for {self}: 0 to {len(self.values) - 1}.")
        return self.values[code]

    @cached_property
    def _codes(self) -> dict[str, int]:
        return {str(v): code for code, v in enumerate(self.values)}

    def encode(self, value: float) -> int:
        """The code of a value of the book. Raises ValueError for other numbers: round them first."""
        value = number_of("value", value)
        code = self._codes.get(str(value))
        # A book without -0 encodes it as 0: the key "-0.0" is not among its codes.
        if code is None and value == 0:
            code = self._codes.get("0.0")
        if code is None:
            raise ValueError(f"value={value!r} is not a value of {self}. Round it first: fpsim.round_to.")
        return code

    # Interface that a rounding uses of every format

    specials = "book"
    subnormals = True

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return (len(self.values) - 1).bit_length()

    @cached_property
    def finite(self) -> tuple[float, ...]:
        """The finite values in ascending order, 0 once."""
        return tuple(v for v, _ in self.ascending if math.isfinite(v))

    @property
    def largest(self) -> float:
        """The largest finite magnitude, of either sign."""
        return max(abs(self.finite[0]), abs(self.finite[-1]))

    @property
    def lowest(self) -> float:
        """The lowest finite value."""
        return self.finite[0]

    @cached_property
    def smallest(self) -> float:
        """The smallest magnitude above zero."""
        return min(abs(v) for v in self.finite if v)

    @property
    def smallest_normal(self) -> float:
        """The same as `smallest`: no value is subnormal."""
        return self.smallest

    @property
    def is_signed(self) -> bool:
        return self.lowest < 0

    @property
    def has_zero(self) -> bool:
        return 0.0 in self.finite

    @property
    def has_negative_zero(self) -> bool:
        return "-0.0" in self._codes

    @property
    def has_nan(self) -> bool:
        return "nan" in self._codes

    @property
    def has_inf(self) -> bool:
        """True if an infinity is among the values."""
        return "inf" in self._codes or "-inf" in self._codes

    @cached_property
    def _digits(self) -> tuple[int, int]:
        """Return the largest number of significant bits of a value, and the exponent of the lowest bit of all."""
        most, lowest = 1, 1000
        for v in self.finite:
            numerator, denominator = abs(v).as_integer_ratio()
            if numerator:
                zeros = (numerator & -numerator).bit_length() - 1
                most = max(most, numerator.bit_length() - zeros)
                lowest = min(lowest, zeros - (denominator.bit_length() - 1))
        return most, lowest

    @property
    def mantissa_bits(self) -> int:
        """One less than the significant bits that the values need."""
        return self._digits[0] - 1

    @property
    def precision(self) -> int:
        return self._digits[0]

    @property
    def min_ulp_exponent(self) -> int:
        """The exponent of the lowest bit of any value."""
        return self._digits[1]

    @property
    def min_exponent(self) -> int:
        return self.min_ulp_exponent + self.mantissa_bits

    @property
    def saturated_from(self) -> float:
        """Magnitude from which saturation is counted: the largest value plus half of the last spacing."""
        # The end farther from zero, mirrored if it is the negative one.
        end = [*self.finite] if self.finite[-1] >= -self.finite[0] else [-v for v in reversed(self.finite)]
        return end[-1] + (end[-1] - end[-2]) / 2

    def resolve_overflow(self, overflow: str | None = None) -> str:
        """Return "inf" for a book that holds an infinity, else "saturate"; "saturate" can be asked for in both.

        Raises ValueError for anything else.
        """
        possible = ("inf", "saturate") if self.has_inf else ("saturate",)
        if overflow is not None and (not isinstance(overflow, str) or overflow not in possible):
            raise ValueError(
                f"Got overflow={shown(overflow)} with {self}"
                + ("" if self.has_inf else ", which holds no inf")
                + f". Expected: {', '.join(possible)}, or None."
            )
        return possible[0] if overflow is None else overflow


def nearest_float32(value: float) -> float:
    """Return the float32 nearest to a number, as a float."""
    if math.isfinite(value) and abs(value) > FLOAT32_LARGEST:
        raise ValueError(f"{value!r} is beyond float32, whose largest number is {FLOAT32_LARGEST:g}.")
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _numbers(name: str, given: Any) -> tuple[float, ...]:
    try:
        return tuple(float(v) for v in ([given] if isinstance(given, str) else given))
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: of a complex tensor
        expected = "Expected: (-1.0, 0.0, 1.0), for instance."
        raise ValueError(f"{name}={shown(given)} is not a sequence of numbers. {expected}") from None


def _float32s(given: Any) -> tuple[float, ...]:
    numbers = _numbers("values", given)
    if not 2 <= len(numbers) <= MOST_VALUES:
        raise ValueError(f"values={shown(given)} has {len(numbers)} numbers. Expected: 2 to {MOST_VALUES}.")
    return tuple(math.nan if math.isnan(v) else nearest_float32(v) for v in numbers)


def _require_values(book: Codebook) -> None:
    texts = [str(v) for v in book.values]
    if len(set(texts)) < len(texts):
        twice = next(t for i, t in enumerate(texts) if t in texts[:i])
        raise ValueError(f"The code book holds {twice} twice, as float32 numbers. Expected: values that differ.")
    if "-0.0" in texts and "0.0" not in texts:
        raise ValueError("The code book holds -0 without 0. Expected: 0 alone, or both.")
    if len(book.finite) < 2:
        raise ValueError(f"The code book holds {len(book.finite)} finite values. Expected: at least 2.")


def _borders(book: Codebook) -> tuple[float, ...]:
    borders, numbers = _numbers("borders", book.borders), [v for v, _ in book.ascending]
    if len(borders) != len(numbers) - 1:
        raise ValueError(
            f"borders={shown(book.borders)} has {len(borders)} numbers for {len(numbers)} values. Expected: "
            f"{len(numbers) - 1}."
        )
    for border, low, high in zip(borders, numbers, numbers[1:], strict=False):
        if not (low <= border <= high and math.isfinite(border)):
            raise ValueError(
                f"borders={shown(book.borders)} has {border!r}, which does not lie between its values, {low!r} and "
                f"{high!r}."
            )
    return borders


def _require_alternating_codes(book: Codebook) -> None:
    for (low, a), (high, b) in pairwise(book.ascending):
        if a % 2 == b % 2:
            raise ValueError(
                f"ties='even' needs neighbours of which one has an even code. {low!r} and {high!r} have the codes {a} "
                f"and {b}. Give the values in ascending order, or use ties='up', 'down', 'away' or 'zero'."
            )
