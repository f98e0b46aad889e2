"""The naive oracle: formats from their definition, rounding by looking at the neighbours, all in fractions."""

from __future__ import annotations

import math
from bisect import bisect_right
from fractions import Fraction
from functools import cache
from typing import NamedTuple


class Format(NamedTuple):
    """A format as the ascending list of its finite magnitudes, each with the last digit of its significand."""

    magnitudes: list[Fraction]
    odd: list[bool]
    next_magnitude: Fraction  # the first one beyond the largest, were the exponent unbounded
    has_negative_zero: bool
    signed: bool


@cache
def make(e: int, m: int, bias: int, specials: str = "ieee", subnormals: bool = True) -> Format:
    """A format from the fields of all its codes without the sign."""
    found: dict[Fraction, bool] = {}
    for field in range(2**e):
        for mantissa in range(2**m):
            top, all_ones = field == 2**e - 1, mantissa == 2**m - 1
            if (specials == "ieee" and top) or (specials not in ("ieee", "fnuz", "none") and top and all_ones):
                continue
            fraction, normal = Fraction(mantissa, 2**m), Fraction(2) ** (field - bias)
            # IEEE 754-2019, 4.3.1: with one significant digit every significand but zero's is odd
            odd = mantissa % 2 == 1 or m == 0
            if specials in ("dlfloat", "scale"):
                value = (1 + fraction) * normal
                if specials == "dlfloat" and field == mantissa == 0:
                    value, odd = Fraction(0), False
            elif field == 0:
                value = fraction * 2 * normal if subnormals else Fraction(0)
                odd = odd and value != 0
            else:
                value = (1 + fraction) * normal
            found.setdefault(value, odd)
    magnitudes = sorted(found)
    lowest = (0 if specials in ("dlfloat", "scale") else 1) - bias
    ulp = Fraction(2) ** (max(floor_log2(magnitudes[-1]), lowest) - m)
    signed = specials != "scale"
    negative_zero = specials in ("ieee", "fn", "none", "dlfloat")
    return Format(magnitudes, [found[v] for v in magnitudes], magnitudes[-1] + ulp, negative_zero, signed)


def floor_log2(x: Fraction) -> int:
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= x else exponent - 1


def neighbours(fmt: Format, magnitude: Fraction) -> tuple[Fraction, Fraction, bool]:
    """The magnitudes at or below and above, and whether the lower one is odd; not for beyond `next_magnitude`."""
    low = bisect_right(fmt.magnitudes, magnitude) - 1
    above = fmt.magnitudes[low + 1] if low + 1 < len(fmt.magnitudes) else fmt.next_magnitude
    return fmt.magnitudes[low], above, fmt.odd[low]


def round_to(fmt: Format, x: float, rounding: str, overflow: str) -> float:
    """The rounded value of a float, by the words of the specification."""
    largest = fmt.magnitudes[-1]
    beyond = {"inf": math.inf, "nan": math.nan, "saturate": float(largest)}[overflow]
    if math.isnan(x) or (not fmt.signed and x <= 0):
        return math.nan
    if math.isinf(x):
        return math.copysign(beyond, x)
    magnitude = abs(Fraction(x))
    if magnitude < fmt.magnitudes[0]:
        return float(fmt.magnitudes[0])  # a scale: no zero
    away = {"up": x > 0, "down": x < 0}.get(rounding)
    if magnitude >= fmt.next_magnitude:
        rounded = fmt.next_magnitude
    else:
        below, above, odd = neighbours(fmt, magnitude)
        distance, half = magnitude - below, (above - below) / 2
        if rounding == "nearest_even":
            away = distance > half or (distance == half and odd)
        elif rounding == "nearest_away":
            away = distance >= half
        elif rounding == "to_odd":
            away = not odd
        rounded = above if away and distance else below
    if rounded > largest:
        stays_finite = rounding in ("toward_zero", "to_odd") or away is False
        return math.copysign(float(largest) if stays_finite else beyond, x)
    if rounded == 0 and not fmt.has_negative_zero:
        return 0.0
    return math.copysign(float(rounded), x)


def round_up_probability(fmt: Format, x: float, random_bits: int) -> Fraction:
    """Under stochastic rounding: the distance to the lower neighbour over the gap, cut to `random_bits` bits."""
    below, above, _ = neighbours(fmt, abs(Fraction(x)))
    share = (abs(Fraction(x)) - below) / (above - below)
    return Fraction(math.floor(share * 2**random_bits), 2**random_bits)
