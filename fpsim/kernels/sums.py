"""One step of a sum: an exact product, an exact sum, and one rounding of the sum, for the CPU and for CUDA.

Numbers are float64, and roundings are `core.make_round` on their patterns. This is exact for these reasons:

- Operands are float32, with 24 significant bits. Their product has at most 48 significant bits and lies between
  2**-298 and 2**256, so that a float64 (53 bits, normal from 2**-1022) holds it exactly. A compiler that contracts the
  product and the addition behind it to a fused multiply-add therefore changes nothing.
- The sum s = fl(x + y) of two float64 and its error, x + y = s + error, are exact by Knuth's TwoSum (TAOCP vol. 2,
  4.2.2, theorem B). Its additions do not overflow, and do not underflow because all are multiples of 2**-298.
- From s and the error follows x + y rounded to odd: x + y cut off to 53 bits toward zero, with the last bit set if
  something was cut off. If `error` points toward zero, the cut-off pattern is the one below s; else it is s itself.
- A number that is rounded to odd with 53 bits, and then to a format of p <= 51 bits, is the same as after one rounding
  (Boldo and Melquiond, IEEE Trans. Computers 57(4), 2008, theorem 3): the last bit says on which side of every value,
  and of every middle between two values, the exact sum lies. A subnormal spacing of the format is coarser, and
  therefore leaves more bits.
- Stochastic rounding compares random bits with the leading 52 - p of the bits that are cut off, without the last bit:
  Accumulator.random_bits_of asks for no more.

An exact sum of zero is +0, except for the sum of two -0. This holds under "down" too, where IEEE 754-2019, 6.3 has -0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from fpsim.compiling.compile import float64_bits, float64_of_bits
from fpsim.compiling.deferred import njit
from fpsim.kernels.containers import narrowed, shift_left, widened
from fpsim.kernels.core import draws_noise, make_round
from fpsim.kernels.threefry import NOISE_ROUNDS, threefry

EXACT = -1  # in place of a rule: no rounding

# Kinds of noise. The second word of a counter has the kind in its two highest bits, and below it a quarter of the
# rounding's number, because a counter serves four roundings.
SUM_NOISE, PRODUCT_NOISE, OUTER_NOISE, BIAS_NOISE = range(4)

_u64 = np.uint64


@njit(forceinline=True)
def bits_of(x):
    return np.uint64(float64_bits(x))


@njit(forceinline=True)
def widen(word):
    """Return the float64 of a float32's pattern."""
    return float64_of_bits(widened(word))


@njit(forceinline=True)
def narrow(x):
    """Return the pattern of a float32 that holds this float64 exactly; a NaN stays a NaN."""
    return narrowed(bits_of(x))


def _inlined(rule: int) -> dict[str, Any]:
    """Return options by which LLVM inlines a step or, for a stochastic rule, Numba.

    If LLVM inlines, compiling takes half the time; but LLVM vectorises a stochastic step only if Numba inlined it.
    """
    return {"inline": "always"} if draws_noise(rule) else {"forceinline": True}


@cache
def make_round_value(rule: int, shape: int) -> Callable[..., Any]:
    """Return a compiled function that rounds one float64: (x, noise, Numbers).

    noise: 32 bits, which only stochastic rules use.
    """
    if rule == EXACT:

        @njit(forceinline=True)
        def keep(x, noise, numbers):
            return x

        return keep  # type: ignore[no-any-return]
    round_bits = make_round(rule, shape, 64)

    @njit(**_inlined(rule))
    def round_value(x, noise, numbers):
        return float64_of_bits(_u64(round_bits(bits_of(x), _u64(_u64(noise) << _u64(32)), numbers)))

    return round_value  # type: ignore[no-any-return]


@njit(forceinline=True)
def odd_sum(x, y):
    """Return x + y rounded to odd, see above. Sums that are not finite follow IEEE 754: their error is NaN."""
    s = x + y
    t = s - x
    error = (x - (s - t)) + (y - t)
    word = bits_of(s)
    is_cut = _u64((error < 0.0) | (error > 0.0))  # not `!= 0.0`, which is true for a NaN
    toward_zero = _u64(_u64(word ^ bits_of(error)) >> _u64(63))
    return float64_of_bits(_u64(_u64(word - _u64(is_cut & toward_zero)) | is_cut))


@cache
def make_add(rule: int, shape: int) -> Callable[..., Any]:
    """Return a compiled function that adds two float64 with one rounding: (x, y, noise, Numbers)."""
    round_value = make_round_value(rule, shape)

    @njit(**_inlined(rule))
    def add(x, y, noise, numbers):
        return round_value(odd_sum(x, y), noise, numbers)

    return add  # type: ignore[no-any-return]


@njit(forceinline=True)
def exponent_field(x):
    """Return the biased exponent as int64: 0 for zero, 2047 if not finite. No number here is subnormal."""
    return np.int64(_u64(_u64(bits_of(x) >> _u64(52)) & _u64(2047)))


@njit(forceinline=True)
def sum_field(x, least, zero):
    """Return the biased exponent with which a sum counts in a group: at least `least`, and `zero` if it is zero."""
    field = exponent_field(x)
    return zero if field == np.int64(0) else max(field, least)


@njit(forceinline=True)
def product_field(a, b, least_a, least_b, zero):
    """Return the biased exponent of a product before a multiplier normalises it: the sum of its factors' exponents.

    A factor counts with at least `least_a` or `least_b`: the exponent field of a subnormal contains its format's least
    exponent, however many leading zeros follow. A product that is zero counts with `zero`.
    """
    field_a, field_b = exponent_field(a), exponent_field(b)
    field = np.int64(max(field_a, least_a) + max(field_b, least_b) - np.int64(1023))
    return zero if min(field_a, field_b) == np.int64(0) else field


@njit(forceinline=True)
def cut_off(x, top, bits):
    """Cut `x` off toward zero to a multiple of 2**(top - 1023 - (bits - 1)); a zero is +0. Infinities and NaN stay."""
    field = exponent_field(x)
    drop = np.int64(top - field + np.int64(53) - bits)
    word = bits_of(x)
    below = _u64(shift_left(_u64(1), _u64(drop)) - _u64(1))
    kept = _u64(0) if drop > np.int64(52) else _u64(word & _u64(~below))
    return float64_of_bits(word if field == np.int64(2047) else kept)


@njit(forceinline=True)
def floor_off(x, top, bits):
    """Cut off as `cut_off` does, but toward minus infinity."""
    kept = cut_off(x, top, bits)
    unit = float64_of_bits(_u64(_u64(max(np.int64(top - bits + np.int64(1)), np.int64(1))) << _u64(52)))
    return kept - unit if x < 0.0 and kept > x else kept


@njit(forceinline=True)
def met_sum(products, top, x, bits, sum_bits, least):
    """Add a sum of products, aligned at `top`, to an accumulator `x`.

    The two numbers, and then their sum, are cut off toward minus infinity.
    """
    own = max(exponent_field(x), least)
    both = max(top, own)
    total = floor_off(products, both, np.int64(sum_bits + np.int64(1))) + floor_off(x, both, bits)
    return floor_off(total, max(exponent_field(total), least), sum_bits)


@njit(forceinline=True)
def with_overflow(rounded, total, limit, overflow):
    """Return `rounded`, or `overflow` with the sign of `total` if the magnitude of `total` is at least `limit`.

    limit, overflow: patterns of float64.

    With rounding toward zero, IEEE 754 returns the largest number there; an accumulator that cuts off bits of its
    significand overflows.
    """
    sign = _u64(_u64(1) << _u64(63))
    word, infinity = bits_of(total), _u64(0x7FF0000000000000)
    magnitude = _u64(word & _u64(~sign))
    is_beyond = magnitude >= _u64(limit) and magnitude < infinity
    return float64_of_bits(_u64(_u64(word & sign) | _u64(overflow))) if is_beyond else rounded


@njit(forceinline=True)
def sum_noise(element, kind, quad, key0, key1):
    """Return the noise of four roundings, number 4 quad to 4 quad + 3, of one element of a product.

    The first word of the counter is the element's index; the bits of the index above 2**32 change the key.
    """
    index = _u64(element)
    low, high = np.uint32(index & _u64(0xFFFFFFFF)), np.uint32(index >> _u64(32))
    second = np.uint32(_u64(_u64(_u64(kind) << _u64(30)) | _u64(quad)))
    return threefry(low, second, np.uint32(key0), np.uint32(np.uint32(key1) ^ high), NOISE_ROUNDS)
