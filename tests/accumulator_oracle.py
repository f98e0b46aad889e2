"""Sums by the words of the specification: fractions, rounded by the oracle of formats; the noise from the paper's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import oracle
from format_cases import oracle_format

from fpsim import Accumulator, FloatFormat, as_format

SUMS, PRODUCTS, OUTER, BIAS = range(4)


def noise_word(element: int, kind: int, number: int, key: int) -> int:
    """The 32 random bits of one rounding of one element of a product."""
    counter = (element % 2**32, kind * 2**30 + number // 4, 0, 0)
    return oracle.threefry(counter, (key % 2**32, (key >> 32) ^ (element >> 32), 0, 0), 12)[number % 4]


def rounded(
    x: Fraction | float, f: FloatFormat, rounding: str, overflow: str | None, bits: int, noise: int, variant: str = "A"
) -> float:
    """A fraction, or a float that is zero or not finite, rounded to a format."""
    fmt = oracle_format(f)
    if x == 0:
        return float(x) if fmt.has_negative_zero else 0.0
    if (isinstance(x, float) and not math.isfinite(x)) or rounding != "stochastic":
        towards = "nearest_even" if rounding == "stochastic" else rounding
        return oracle.round_to(fmt, x, towards, f.resolve_overflow(overflow))  # type: ignore[arg-type]
    x = Fraction(x)
    if abs(x) >= fmt.next_magnitude:
        return oracle.round_to(fmt, x, "nearest_even", f.resolve_overflow(overflow))  # type: ignore[arg-type]
    below, above, _ = fmt.neighbours(abs(x))
    result = above if oracle.goes_up(oracle.distance(fmt, x), bits, noise >> (32 - bits), variant) else below
    if result > fmt.largest:
        return oracle.round_to(fmt, math.copysign(math.inf, x), "nearest_even", f.resolve_overflow(overflow))
    if result == 0 and not fmt.has_negative_zero:
        return 0.0
    return math.copysign(float(result), x)


def times(a: float, b: float) -> Fraction | float:
    """Exact; a float where it is zero, which has a sign, or not finite."""
    product = a * b  # of two float32: exact in float64
    return Fraction(product) if math.isfinite(product) and product else product


def plus(x: Fraction | float, y: Fraction | float) -> Fraction | float:
    if all(isinstance(v, Fraction) or math.isfinite(v) for v in (x, y)):
        exact = Fraction(x) + Fraction(y)
        return exact if exact else float(x) + float(y)  # two zeros, or x - x
    return float(x) + float(y)


class Summing:
    """The accumulator of one element, by its definition."""

    def __init__(self, accumulator: Accumulator, element: int = 0, key: int = 0) -> None:
        self.accumulator, self.element, self.key = accumulator, element, key
        self.format = as_format(accumulator.format)
        self.outer = as_format(accumulator.outer or accumulator.format)
        given = accumulator.operands
        self.operands = given if isinstance(given, tuple) else (given, given)

    def bits(self, f: FloatFormat | None) -> int:
        """How many random bits decide: all 32, or as many as a sum in 53 bits, of which the last is odd, has left."""
        given = self.accumulator.random_bits
        return given or (32 if f is None else min(32, 52 - f.precision))

    def noise(self, kind: int, number: int) -> int:
        return noise_word(self.element, kind, number, self.key)

    def to_sum(self, x: Fraction | float, number: int) -> float:
        a = self.accumulator
        return rounded(
            x, self.format, a.rounding, a.overflow, self.bits(self.format), self.noise(SUMS, number), a.variant
        )

    def to_sum_of_group(self, x: Fraction | float, number: int) -> float:
        """The same, which overflows where the exponent would be too large, toward zero as well."""
        return self.beyond(x) if math.isfinite(x) and self.is_beyond(x) else self.to_sum(x, number)

    def is_beyond(self, x: Fraction | float) -> bool:
        return abs(x) >= oracle_format(self.format).next_magnitude

    def beyond(self, x: Fraction | float) -> float:
        values = {"inf": math.inf, "nan": math.nan, "saturate": self.format.largest}
        return math.copysign(values[self.format.resolve_overflow(self.accumulator.overflow)], x)

    def to_outer(self, x: Fraction | float, kind: int, number: int) -> float:
        a = self.accumulator
        overflow = a.overflow if a.outer is None else None
        rounding = a.outer_rounding or a.rounding
        return rounded(x, self.outer, rounding, overflow, self.bits(self.outer), self.noise(kind, number), a.variant)

    def to_product(self, x: Fraction | float, number: int) -> Fraction | float:
        a = self.accumulator
        if a.product is None:
            return x
        noise = self.noise(PRODUCTS, number)
        return rounded(x, as_format(a.product), a.product_rounding, None, self.bits(None), noise, a.variant)

    def chunks(self, terms: int) -> Iterator[range]:
        length = self.accumulator.chunk or max(terms, 1)
        return (range(start, min(start + length, terms)) for start in range(0, terms, length))

    def total(self, a: list[float], b: list[float], bias: float | None = None) -> float:
        outer, inner, groups = 0.0, 0.0, 0
        for number, chunk in enumerate(self.chunks(len(a))):
            inner = 0.0
            if self.accumulator.group is None:
                for k in chunk:
                    inner = self.to_sum(plus(inner, self.to_product(times(a[k], b[k]), k)), k)
            else:
                for start in range(chunk.start, chunk.stop, self.accumulator.group):
                    group = range(start, min(start + self.accumulator.group, chunk.stop))
                    inner = self.to_sum_of_group(self.aligned(inner, [(a[k], b[k]) for k in group]), groups)
                    groups += 1
            outer = self.to_outer(plus(outer, inner), OUTER, number)
        result = inner if self.accumulator.chunk is None else outer
        return result if bias is None else self.to_outer(plus(result, bias), BIAS, 0)

    def aligned(self, inner: float, factors: list[tuple[float, float]]) -> Fraction | float:
        """Xie et al. 2025, T-FDPA: every number is cut off below the largest exponent's `group_bits` bits."""
        products = [a * b for a, b in factors]
        if self.accumulator.sum_bits is not None:
            products = [self.beyond(p) if math.isfinite(p) and self.is_beyond(p) else p for p in products]
        if not all(map(math.isfinite, [inner, *products])):
            return math.fsum([inner, *products]) if _agree([inner, *products]) else math.nan
        first, second = self.operands
        exponents = [_exponent(a, first) + _exponent(b, second) for a, b in factors if a and b]
        if inner:
            exponents.append(_exponent(inner, self.format if first or second else None))
        if not exponents:
            return 0.0
        zero = self.accumulator.zero_exponent
        if zero is not None and (not inner or any(not a or not b for a, b in factors)):
            exponents.append(zero)
        bits = self.accumulator.group_bits
        assert bits is not None
        if self.accumulator.sum_bits is not None:
            return self.aligned_twice(inner, products, exponents[: len([p for p in products if p])])
        unit = Fraction(2) ** (max(exponents) - bits + 1)
        return sum(math.trunc(Fraction(x) / unit) for x in (inner, *products)) * unit or 0.0

    def aligned_twice(self, inner: float, products: list[float], exponents: list[int]) -> Fraction | float:
        """Xie et al. 2025, TR-FDPA: products by themselves, then their sum and the accumulator, toward -inf."""
        bits, sum_bits = self.accumulator.group_bits, self.accumulator.sum_bits
        assert bits is not None
        assert sum_bits is not None
        least = 1 - self.format.bias
        dot, tops = Fraction(0), [_exponent(inner, self.format) if inner else least]
        if exponents:
            unit = Fraction(2) ** (max(exponents) - bits + 1)
            dot = sum((math.trunc(Fraction(x) / unit) for x in products), start=Fraction(0)) * unit
            tops.append(max(exponents))
        total = _floor(dot, max(tops) - sum_bits) + _floor(Fraction(inner), max(tops) - bits + 1)
        if not total:
            return 0.0
        return _floor(total, max(oracle.floor_log2(abs(total)), least) - sum_bits + 1)


def _floor(x: Fraction, exponent: int) -> Fraction:
    unit = Fraction(2) ** exponent
    return math.floor(x / unit) * unit


def _exponent(x: float, fmt: FloatFormat | None) -> int:
    """Of a number that is not zero, as the format's exponent field has it; of its leading bit without a format."""
    leading = math.frexp(x)[1] - 1
    return leading if fmt is None else max(leading, 1 - fmt.bias)


def _agree(values: list[float]) -> bool:
    """Whether there is no NaN, and no two infinities of different sign."""
    return not any(map(math.isnan, values)) and len({v for v in values if math.isinf(v)}) <= 1
