"""Code books: formats that are a list of numbers, and the named books, each built as its source describes it."""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any

from fpsim.checks import number_of, refuse, shown
from fpsim.formats.floats import FLOAT32_LARGEST

__all__ = ["CODEBOOKS", "TIES", "Codebook"]

TIES = ("even", "up", "down", "away", "zero")
MOST_VALUES = 2**16
NAMES: dict[Codebook, str] = {}  # of the books that have a name: filled from CODEBOOKS


@dataclass(frozen=True, eq=False)
class Codebook:
    """A format that is a list of numbers: code `i` stands for `values[i]`.

    A number between two neighbours becomes the nearer one. NaN stays NaN. A result that is zero keeps the sign of the
    input if the book holds -0, and is +0 otherwise. A number beyond the ends becomes the nearest value, and so does inf
    unless the book holds it.

    Args:
        values: 2 to 2**16 different numbers in the order of their codes, which need not be ascending. Each is stored as
            the nearest float32. They may include inf, -inf, one NaN, and -0 in addition to 0.
        ties: where a number exactly between two neighbours goes: "even" to the neighbour with the even code; "up" to
            the larger neighbour; "down" to the smaller neighbour; "away" from zero; "zero" towards zero. "away" and
            "zero" go up between a value and its negative.
        borders: the numbers that separate neighbours, ascending, one for each pair of neighbours among the different
            values, inf included and NaN not; None for the midpoints. Each border lies between its two neighbours, or at
            one of them, and `ties` says where the border itself goes. The midpoint of the largest finite value and inf
            is where the next value would begin if the last spacing went on, as in IEEE 754. Stochastic rounding depends
            on the distances only.

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
        # Text distinguishes 0 from -0, and makes NaN equal NaN.
        return tuple(map(str, self.values)), self.ties, self.borders

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Codebook) else NotImplemented

    # The hash is cached: a book has up to 2**16 values, and formats are keys of caches that every rounding looks up.
    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        # Only the fields are pickled: a cached hash of a string differs from process to process.
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def digest(self) -> str:
        """Twelve hexadecimal digits that distinguish this book from others."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return NAMES.get(self) or f"codebook{len(self.values)}_{self.digest}"

    @cached_property
    def ascending(self) -> tuple[tuple[float, int], ...]:
        """Values in ascending order, each with its code, without NaN and without -0."""
        numbers = ((v, code) for code, v in enumerate(self.values) if not math.isnan(v))
        return tuple((v, code) for v, code in sorted(numbers) if v or math.copysign(1, v) > 0)

    @cached_property
    def exact_borders(self) -> tuple[Fraction, ...]:
        """Borders between neighbours of `ascending`: `borders`, or the exact midpoints, which float64 may not hold."""
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
        """Return whether the border between the values `i` and `i + 1` of `ascending` is rounded up to the latter."""
        (low, low_code), (high, high_code) = self.ascending[i : i + 2]
        # If the border is a value of the book, the value stays.
        if self.exact_borders[i] in (low, high):
            return self.exact_borders[i] == high
        if self.ties == "even":
            return high_code % 2 == 0 and low_code % 2 == 1
        if self.ties in ("away", "zero"):
            return (abs(high) > abs(low)) == (self.ties == "away") or abs(high) == abs(low)
        return self.ties == "up"

    # Codes

    def decode(self, code: int) -> float:
        """Return the value of a code. Raises ValueError for a code out of range."""
        if isinstance(code, bool) or not isinstance(code, int) or not 0 <= code < len(self.values):
            raise ValueError(f"Code {shown(code)} is out of range for {self}: 0 to {len(self.values) - 1}.")
        return self.values[code]

    @cached_property
    def _codes(self) -> dict[str, int]:
        return {str(v): code for code, v in enumerate(self.values)}

    def encode(self, value: float) -> int:
        """Return the code of a value of the book. Raises ValueError for other numbers: round them first."""
        value = number_of("value", value)
        code = self._codes.get(str(value))
        # A book without -0 encodes -0 as 0: the key "-0.0" is not among its codes.
        if code is None and value == 0:
            code = self._codes.get("0.0")
        if code is None:
            raise ValueError(f"value={value!r} is not a value of {self}. Round it first: fpsim.round_to.")
        return code

    # The interface that a rounding needs of every format

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
        """Return the largest number of significant bits of a value, and the exponent of the lowest bit of any value."""
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
        # The last spacing is at the end farther from zero; for the negative end, the values are mirrored.
        end = [*self.finite] if self.finite[-1] >= -self.finite[0] else [-v for v in reversed(self.finite)]
        return end[-1] + (end[-1] - end[-2]) / 2

    def resolve_overflow(self, overflow: str | None = None) -> str:
        """Return "inf" for a book that holds an infinity, else "saturate". Either kind of book accepts "saturate".

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
    # A complex tensor raises RuntimeError.
    except (TypeError, ValueError, OverflowError, RuntimeError):
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


# QLoRA (Dettmers et al. 2023, appendix E): quantiles of the normal distribution, with a zero, scaled to -1 and 1.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def _linspace(count: int) -> list[float]:
    """Compute torch.linspace(0.1, 1, count) as torch does: each half from its own end, each step rounded to float32."""
    f = nearest_float32
    start, end = f(0.1), 1.0
    step = f(f(end - start) / f(count - 1)) if count > 1 else 0.0
    # torch computes start + i * step as one multiply-add; with factors of 24 and 10 bits, the product is exact in
    # float64.
    return [f(start + step * i) if i < count // 2 else f(end - step * (count - i - 1)) for i in range(count)]


def dynamic_map(signed: bool, most_exponents: int, bits: int) -> tuple[float, ...]:
    """Return the values of bitsandbytes' `create_dynamic_map(signed, most_exponents, bits)`, ascending.

    The values form decades, from the top decade downwards, each with half as many fractions as the one above. The
    fractions are the means of a linear scale from 0.1 to 1. 0 and 1 are added (Dettmers et al., 8-bit Optimizers via
    Block-wise Quantization, arXiv 2110.02861, section 2).
    """
    f, values = nearest_float32, [0.0, 1.0]
    for i in range(most_exponents):
        fractions = 2 ** (i + bits - 1 - most_exponents + (0 if signed else 1))
        borders = _linspace(fractions + 1)
        power = f(10.0 ** (i - most_exponents + 1))
        for low, high in pairwise(borders):
            value = f(power * f(f(low + high) / 2))
            values += [value, -value] if signed else [value]
    return tuple(sorted(values))


def _hif8() -> Codebook:
    """Build HiFloat8 (Luo et al. 2024, arXiv 2409.16626, tables 1 to 4): a prefix gives the width of the exponent."""
    magnitudes = []
    for code in range(128):
        # The prefixes 11, 10 and 01 stand for exponents of 4, 3 and 2 bits, 001 for one bit, and 0001 for none. Codes
        # that begin with 0000 are powers of two only.
        if code >> 5:
            exponent_bits, rest = (code >> 5) + 1, 5
        elif code >> 4:
            exponent_bits, rest = 1, 4
        else:
            exponent_bits, rest = 0, 3
        # Codes below 8 are powers of two from 2**-22 on, except for code 0, which is zero.
        if code < 8:
            magnitudes.append(math.ldexp(1.0, code - 23) if code else 0.0)
            continue
        mantissa_bits = rest - exponent_bits
        field, mantissa = divmod(code & (2**rest - 1), 2**mantissa_bits)
        exponent = 0
        # An exponent is a sign, and a magnitude whose leading one is not stored.
        if exponent_bits:
            size = 2 ** (exponent_bits - 1)
            exponent = (size + field % size) * (-1 if field & size else 1)
        magnitudes.append(math.ldexp(2**mantissa_bits + mantissa, exponent - mantissa_bits))
    beyond = magnitudes[0x6F]  # 1.5 * 2**15, whose code is that of inf
    magnitudes[0x6F] = math.inf
    book = Codebook((*magnitudes, math.nan, *(-v for v in magnitudes[1:])), ties="away")
    # The border before inf is not the default: the spacing doubles at the largest value, 2**15, so that the last
    # spacing is too small.
    end = (book.largest + beyond) / 2
    return replace(book, borders=(-end, *book.midpoints[1:-1], end))


def posit_value(code: int, bits: int) -> float:
    """Return the value of a posit (Standard for Posit Arithmetic 2022, section 3: es = 2); NaN for NaR."""
    if code == 0:
        return 0.0
    if code == 1 << (bits - 1):
        return math.nan
    if code >> (bits - 1):
        return -posit_value((1 << bits) - code, bits)
    text = f"{code:0{bits}b}"[1:]
    run = len(text) - len(text.lstrip(text[0]))
    regime = run - 1 if text[0] == "1" else -run
    rest = text[run + 1 :]
    exponent = int(rest[:2].ljust(2, "0"), 2)
    fraction = rest[2:]
    significand = 1 + (int(fraction, 2) / 2 ** len(fraction) if fraction else 0.0)
    return math.ldexp(significand, 4 * regime + exponent)


def _posit(bits: int) -> Codebook:
    """Build a posit format.

    Its borders are the posits of one more bit, with ties to the even code (section 4.1). Only zero becomes zero, and no
    number becomes NaR.
    """
    half = 1 << (bits - 1)
    ascending = [*range(half + 1, 2 * half), *range(half)]
    borders = [posit_value(2 * code + 1, bits + 1) for code in ascending[:-1]]
    zero = ascending.index(0)
    # Both borders around zero are zero itself, so that every other number, however small, stays above or below it.
    borders[zero - 1] = borders[zero] = 0.0
    return Codebook(tuple(posit_value(code, bits) for code in range(2 * half)), "even", tuple(borders))


CODEBOOKS: dict[str, Codebook] = {
    "nf4": Codebook(NF4, ties="up"),
    "dynamic8": Codebook(dynamic_map(True, 7, 8), ties="up"),  # for first moments in 8-bit optimizers
    "udynamic8": Codebook(dynamic_map(False, 7, 8), ties="up"),  # for second moments
    "dynamic4": Codebook(dynamic_map(True, 3, 4), ties="up"),
    "ulinear4": Codebook(tuple(i / 16 for i in range(1, 17)), ties="up"),  # torchao's OptimState4bit: no zero
    "hif8": _hif8(),
    "ternary": Codebook((-1.0, 0.0, 1.0), ties="zero"),
    "posit8": _posit(8),
}

NAMES.update((book, name) for name, book in CODEBOOKS.items())
