"""The naive oracle of code books: values from their definitions, rounding by both neighbours in fractions."""

from __future__ import annotations

import math
from bisect import bisect_right
from fractions import Fraction
from functools import cache

import torch


def dynamic_map(signed: bool, max_exponent_bits: int = 7, total_bits: int = 8) -> list[float]:
    """bitsandbytes' `create_dynamic_map` in its own steps: a mean of each part of a linear scale, decade by decade."""
    data: list[float] = []
    non_sign_bits = total_bits - 1
    for i in range(max_exponent_bits):
        items = 2 ** (i + non_sign_bits - max_exponent_bits + (0 if signed else 1)) + 1
        boundaries = torch.linspace(0.1, 1, items)
        means = (boundaries[:-1] + boundaries[1:]) / 2.0
        data += ((10 ** (-(max_exponent_bits - 1) + i)) * means).tolist()
        if signed:
            data += (-(10 ** (-(max_exponent_bits - 1) + i)) * means).tolist()
    return sorted([*data, 0.0, 1.0])


def posit(code: int, bits: int) -> Fraction | None:
    """Standard for Posit Arithmetic 2022, 3.3: ((1 - 3s) + f) * 2**((1 - 2s) * (4r + e + s)); None for NaR."""
    if code == 0:
        return Fraction(0)
    if code == 1 << (bits - 1):
        return None
    digits = [(code >> (bits - 1 - i)) & 1 for i in range(bits)] + [0] * bits  # bits beyond the end are zero
    s, rest = digits[0], digits[1:]
    k = next((i for i, d in enumerate(rest[: bits - 1]) if d != rest[0]), bits - 1)
    r = k - 1 if rest[0] else -k
    behind = rest[k + 1 :]
    e = 2 * behind[0] + behind[1]
    f = sum(Fraction(d, 2 ** (i + 1)) for i, d in enumerate(behind[2:]))
    return ((1 - 3 * s) + f) * Fraction(2) ** ((1 - 2 * s) * (4 * r + e + s))


@cache
def _positive_posits(bits: int) -> list[Fraction | None]:
    return [posit(code, bits) for code in range(1, 1 << (bits - 1))]


def rounded_to_posit(x: Fraction, bits: int) -> Fraction:
    """Standard for Posit Arithmetic 2022, 4.1, by looking at the codes around x."""
    negative, x = x < 0, abs(x)
    codes = range(1, 1 << (bits - 1))
    values = _positive_posits(bits)
    if x == 0:
        return x
    index = bisect_right(values, x) - 1  # type: ignore[type-var]
    if index < 0:
        found = values[0]
    elif x >= values[-1] or x == values[index]:  # type: ignore[operator]
        found = values[index]
    else:
        between = posit(2 * codes[index] + 1, bits + 1)
        assert between is not None
        low = x < between or (x == between and codes[index] % 2 == 0)
        found = values[index if low else index + 1]
    assert found is not None
    return -found if negative else found


def hif8(code: int) -> float:
    """arXiv 2409.16626, tables 1 and 2: S, a dot field D of 2 to 4 bits, an exponent of D bits with its sign first and
    its leading one left out, the mantissa."""
    text = f"{code:08b}"
    sign = -1.0 if text[0] == "1" else 1.0
    dots = {"11": 4, "10": 3, "01": 2, "001": 1, "0001": 0, "0000": None}
    dot = next(d for d in dots if text[1:].startswith(d))
    size, rest = dots[dot], text[1 + len(dot) :]
    if size is None:
        m = int(rest, 2)
        if m == 0:
            return math.nan if sign < 0 else 0.0
        return sign * 2.0 ** (m - 23)
    exponent, mantissa = rest[:size], rest[size:]
    e = int("1" + exponent[1:], 2) * (-1 if exponent[0] == "1" else 1) if size else 0
    if e == 15 and mantissa == "1":
        return sign * math.inf
    return sign * (1 + int(mantissa, 2) / 2 ** len(mantissa)) * 2.0**e


@cache
def _listed(values: tuple[float, ...]) -> tuple[list[float], dict[float, int]]:
    """The finite values in ascending order, and the codes of all: places in `values`."""
    return sorted({v + 0.0 for v in values if math.isfinite(v)}), {v: i for i, v in reversed([*enumerate(values)])}


def nearest(values: tuple[float, ...], ties: str, x: float) -> float:
    """The value of a book to which a finite x is rounded."""
    numbers, code = _listed(values)
    index = bisect_right(numbers, x) - 1
    if index < 0 or index == len(numbers) - 1 or numbers[index] == x:
        return numbers[max(index, 0)]
    low, high = numbers[index : index + 2]
    distances = x - low, high - x
    if max(distances) > 1.5 * min(distances):  # clear in spite of float64's roundings, and five times as fast
        return low if distances[0] < distances[1] else high
    below, above = Fraction(x) - Fraction(low), Fraction(high) - Fraction(x)
    if below != above:
        return low if below < above else high
    if ties in ("up", "down"):
        return high if ties == "up" else low
    if ties == "even":
        return low if code[low] % 2 == 0 else high
    if abs(low) == abs(high):
        return high
    return max(low, high, key=abs) if ties == "away" else min(low, high, key=abs)


def share(values: tuple[float, ...], x: float) -> tuple[float, float, Fraction]:
    """The neighbours of an x inside of a book, the one that a magnitude leaves first, and its share of their distance.

    Between a value and its negative, where neither is nearer to zero, the one on the other side is left.
    """
    numbers, _ = _listed(values)
    index = min(max(bisect_right(numbers, x) - 1, 0), len(numbers) - 2)
    low, high = numbers[index : index + 2]
    if x < 0:
        if x == low and index:  # of a negative number that is a value, the spacing behind it
            low, high = numbers[index - 1 : index + 1]
        low, high = high, low
    return low, high, abs(Fraction(x) - Fraction(low)) / abs(Fraction(high) - Fraction(low))
