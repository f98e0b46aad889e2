"""The scalar steps of a sum, each against fractions, numpy's casts or the paper's noise."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import accumulator_oracle
import numpy as np
import pytest
from numba import njit

from fpsim.kernels.sums import (
    BIAS_NOISE,
    OUTER_NOISE,
    PRODUCT_NOISE,
    SUM_NOISE,
    cut_off,
    floor_off,
    narrow,
    odd_sum,
    product_field,
    sum_field,
    sum_noise,
    widen,
    with_overflow,
)


@njit
def widen_all(words: Any, out: Any) -> None:
    for i in range(len(words)):
        out[i] = widen(words[i])


@njit
def narrow_all(numbers: Any, out: Any) -> None:
    for i in range(len(numbers)):
        out[i] = narrow(numbers[i])


def every_kind_of_float32() -> np.ndarray[Any, Any]:
    """Each exponent, with mantissas of all lengths, of both signs."""
    mantissas = np.array([0, 1, 2, 3, 0x400000, 0x3FFFFF, 0x7FFFFF, 0x2AAAAA, *(1 << i for i in range(23))], np.uint32)
    words = (np.arange(256, dtype=np.uint32)[:, None] << 23 | mantissas).ravel()
    return np.concatenate([words, words | np.uint32(1 << 31)])


def test_a_float32_becomes_the_float64_that_numpy_makes_of_it() -> None:
    words = every_kind_of_float32()
    out = np.empty(len(words))
    widen_all(words, out)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(out, words.view(np.float32).astype(np.float64))
    assert (np.signbit(out) == (words >> 31).astype(bool)).all()


def test_a_float64_becomes_the_float32_that_numpy_makes_of_it() -> None:
    words = every_kind_of_float32()
    with np.errstate(invalid="ignore"):
        numbers = words.view(np.float32).astype(np.float64)
    out = np.empty(len(words), np.uint32)
    narrow_all(numbers, out)
    is_nan = np.isnan(numbers)
    assert (out[~is_nan] == words[~is_nan]).all()
    assert np.isnan(out[is_nan].view(np.float32)).all()


def odd(exact: Fraction) -> float:
    """Rounded to odd with 53 bits: cut off toward zero, and the last bit set where something was cut off."""
    if exact == 0:
        return 0.0
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    if Fraction(2) ** exponent > abs(exact):
        exponent -= 1
    unit = Fraction(2) ** (exponent - 52)
    count = abs(exact) / unit
    whole = math.floor(count)
    return math.copysign(float((whole if whole == count else whole | 1) * unit), exact)


def test_a_sum_is_rounded_to_odd() -> None:
    random = np.random.default_rng(0)
    cases = [(1.0, 2.0**-53), (1.0, -(2.0**-53)), (1.0, -(2.0**-54)), (1.0, -(2.0**-55)), (2.0**-52 + 1, 2.0**-54)]
    cases += [(1.0, 2.0**-200), (-1.0, 2.0**-200), (2.0**256, -(2.0**-298)), (3.0, -3.0), (2.0**-298, 2.0**-297)]
    for _ in range(3000):
        x = float(random.integers(-(2**24), 2**24)) * 2.0 ** float(random.integers(-60, 60))
        y = float(random.integers(-(2**48), 2**48)) * 2.0 ** float(random.integers(-110, 40))
        cases += [(x, y), (y, x)]
    inexact = 0
    for x, y in cases:
        exact = Fraction(x) + Fraction(y)
        got = odd_of(x, y)
        assert got == odd(exact), (x, y)
        inexact += Fraction(got) != exact
    assert inexact > 1000


@njit
def odd_of(x: float, y: float) -> float:
    return odd_sum(x, y)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("x", "y"), [(math.inf, 1.0), (1.0, -math.inf), (math.inf, -math.inf), (math.nan, 1.0), (1e300, math.nan)]
)
def test_what_is_not_finite_stays_what_it_is(x: float, y: float) -> None:
    np.testing.assert_equal(odd_of(x, y), x + y)


def test_zeros_have_the_sign_of_ieee_754() -> None:
    for x in (0.0, -0.0):
        for y in (0.0, -0.0):
            assert math.copysign(1.0, odd_of(x, y)) == math.copysign(1.0, x + y)
    assert math.copysign(1.0, odd_of(-1.5, 1.5)) == 1.0


@njit
def cut(x: float, top: int, bits: int) -> float:
    return cut_off(x, top, bits)  # type: ignore[no-any-return]


@njit
def fields(a: float, b: float, least_a: int = 0, least_b: int = 0, zero: int = 0) -> tuple[int, int]:
    return sum_field(a, least_a, zero), product_field(a, b, least_a, least_b, zero)


def test_numbers_are_cut_off_toward_zero_below_the_largest_exponent() -> None:
    for bits in (1, 2, 14, 25, 46):
        for top in (0, 3, 100, -140):
            unit = Fraction(2) ** (top - bits + 1)
            for x in (1.0, -1.0, 3.999, 0.7, -0.7, 1 + 2.0**-13, -(1 + 2.0**-14), 2.0**-149, 0.0, -0.0, 1e-30):
                x = math.copysign(min(abs(x) * 2.0**top, 2.0 ** (top + 2) - float(unit)), x)
                got = cut(x, top + 1023, bits)
                assert Fraction(got) == math.trunc(Fraction(x) / unit) * unit
                assert got != 0 or math.copysign(1.0, got) == 1.0
    for x in (math.inf, -math.inf, math.nan):
        np.testing.assert_equal(cut(x, 1023, 14), x)


@njit
def floored(x: float, top: int, bits: int) -> float:
    return floor_off(x, top, bits)  # type: ignore[no-any-return]


def test_numbers_are_cut_off_toward_minus_infinity_below_an_exponent() -> None:
    for bits, top in itertools.product((1, 2, 14, 33), (0, 3, 100, -140)):
        unit = Fraction(2) ** (top - bits + 1)
        for x in (1.0, -1.0, 3.999, 0.7, -0.7, 1 + 2.0**-13, -(1 + 2.0**-14), 2.0**-149, -(2.0**-149), 0.0, -1e-30):
            x = math.copysign(min(abs(x) * 2.0**top, 2.0 ** (top + 2) - float(unit)), x)
            assert Fraction(floored(x, top + 1023, bits)) == math.floor(Fraction(x) / unit) * unit
    for x in (math.inf, -math.inf, math.nan):
        np.testing.assert_equal(floored(x, 1023, 14), x)
    assert floored(0.0, 0, 14) == 0.0


def test_the_exponent_of_a_product_is_the_sum_of_its_factors() -> None:
    assert fields(1.5, 1.5) == (1023, 1023)  # 2.25, before a multiplier normalises it
    assert fields(-0.3, 5.0) == (1021, 1023)
    assert fields(2.0**-149, 2.0**-149) == (1023 - 149, 1023 - 298)


def test_a_subnormal_counts_with_the_least_exponent_of_its_format() -> None:
    fp16, e5m2 = 1023 - 14, 1023 - 14
    for smaller in (2.0**-15, -(2.0**-24), 3 * 2.0**-24):
        assert fields(smaller, 1.5, fp16, e5m2) == (fp16, fp16)
        assert fields(1.5, smaller, fp16, e5m2) == (1023, e5m2)
        assert fields(smaller, smaller, fp16, 0)[1] == fp16 + math.frexp(smaller)[1] - 1
    assert fields(2.0**-14, -(2.0**-13), fp16, e5m2) == (fp16, 1023 - 27)


def test_a_zero_counts_with_an_exponent_of_its_own() -> None:
    for a, b in ((0.0, 2.0**127), (-0.0, 1.0), (0.0, 0.0)):
        assert fields(a, b, 900, 900, 890) == (890, 890)
        assert fields(b, a, 900, 900, 890)[1] == 890
        assert fields(a, b) == (0, 0)  # below that of every number
    assert fields(2.0**-149, 2.0**-149, 0, 0, 890) == (1023 - 149, 1023 - 298)


@njit
def beyond(rounded: float, total: float, limit: int, overflow: int) -> float:
    return with_overflow(rounded, total, limit, overflow)  # type: ignore[no-any-return]


def test_a_sum_beyond_the_limit_overflows_and_what_is_not_finite_stays() -> None:
    pattern = {x: int(np.float64(x).view(np.int64)) for x in (448.0, 480.0, math.inf)}
    for overflow in (448.0, math.inf):
        for x in (480.0, -480.0, 1e300):
            assert beyond(7.0, x, pattern[480.0], pattern[overflow]) == math.copysign(overflow, x)
        for x in (479.99999999999994, -448.0, 0.0, math.inf, -math.inf, math.nan):
            assert beyond(7.0, x, pattern[480.0], pattern[overflow]) == 7.0


@njit
def words_of(element: int, kind: int, quad: int, key0: int, key1: int) -> Any:
    return sum_noise(element, kind, quad, key0, key1)


@pytest.mark.parametrize("element", [0, 1, 77, 2**32 - 1, 2**32, 5 * 2**32 + 3])
def test_the_noise_is_that_of_the_paper(element: int) -> None:
    key = 0x123456789ABCDEF
    for kind in (SUM_NOISE, PRODUCT_NOISE, OUTER_NOISE, BIAS_NOISE):
        for quad in (0, 3, 2**28):
            wanted = [accumulator_oracle.noise_word(element, kind, 4 * quad + i, key) for i in range(4)]
            assert list(words_of(element, kind, quad, key & 0xFFFFFFFF, key >> 32)) == wanted
