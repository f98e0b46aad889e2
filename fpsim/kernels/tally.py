"""What a rounding did to the numbers of a tensor, counted in one pass."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from fpsim.kernels.compile import float64_bits, float64_of_bits, pointer
from fpsim.kernels.containers import make_limit, widened
from fpsim.kernels.core import BINARY32, BINARY64
from fpsim.kernels.deferred import carray, njit
from fpsim.kernels.native import Loop, compiled_loop
from fpsim.kernels.statistics import (
    EXPONENT_FIELDS,
    LOST_COUNTS,
    LOST_TO_OVERFLOW,
    LOST_TO_ZERO,
    TALLY_AMAX,
    TALLY_COUNT,
    TALLY_COUNTS,
    TALLY_EXACT,
    TALLY_NOISE,
    TALLY_NONFINITE,
    TALLY_NONZERO,
    TALLY_OVERFLOW,
    TALLY_SIGNAL,
    TALLY_SUBNORMAL,
    TALLY_SUMS,
    TALLY_UNDERFLOW,
    ZERO_BEFORE,
)

LEAST_SQUARE = math.ldexp(1.0, -1022)  # up to it a processor may flush a square to zero, and so we all do

_MAGNITUDE = np.uint64((1 << 63) - 1)
_INFINITY = np.uint64(BINARY64.bits(math.inf))


@njit(forceinline=True)
def square(x):
    squared = x * x
    return squared if squared > LEAST_SQUARE else 0.0


@cache
def tally_loop(size: int) -> Loop:
    """Compare `n` numbers of `size` bytes before (address `src`) and after rounding (`dst`), in one pass.

    Adds to int64 counts, float64 sums and an int64 histogram, whose fields `statistics` names: TALLY_COUNTS,
    TALLY_SUMS, EXPONENT_FIELDS. Bit patterns are compared, so that a flushed subnormal counts for what it is.
    """
    uint = np.uint32 if size == 4 else np.uint64
    zero = np.uint64(0)

    @compiled_loop(size)
    def loop(src, dst, n, counts, sums, exponents, smallest_normal: float, saturated_from: float, largest: float):
        x = carray(pointer(src), (n,), uint)
        r = carray(pointer(dst), (n,), uint)
        c = carray(pointer(counts), (len(TALLY_COUNTS),), np.int64)
        s = carray(pointer(sums), (len(TALLY_SUMS),), np.float64)
        h = carray(pointer(exponents), (EXPONENT_FIELDS,), np.int64)
        normal, top = np.uint64(float64_bits(smallest_normal)), np.uint64(float64_bits(largest))
        saturated = np.uint64(float64_bits(saturated_from))
        amax = np.uint64(float64_bits(s[TALLY_AMAX]))
        # in registers: what is added to in memory waits for its last store
        nonfinite, nonzero, underflow, subnormal, overflow, exact = 0, 0, 0, 0, 0, 0
        signal, noise = s[TALLY_SIGNAL], s[TALLY_NOISE]
        for i in range(n):
            before, after = (widened(x[i]), widened(r[i])) if size == 4 else (np.uint64(x[i]), np.uint64(r[i]))
            magnitude, rounded = np.uint64(before & _MAGNITUDE), np.uint64(after & _MAGNITUDE)
            if magnitude >= _INFINITY:
                nonfinite += 1
                continue
            amax = max(amax, magnitude)
            if magnitude > zero:
                nonzero += 1
                underflow += int(rounded == zero)
                h[magnitude >> np.uint64(52)] += 1
            subnormal += int(zero < rounded < normal)
            overflow += int(rounded >= _INFINITY or (rounded == top and magnitude >= saturated))
            exact += int(before == after or np.uint64(magnitude | rounded) == zero)
            if rounded < _INFINITY:
                value = float64_of_bits(before)
                signal += square(value)
                noise += square(float64_of_bits(after) - value)
        c[TALLY_COUNT] += n
        c[TALLY_NONFINITE] += nonfinite
        c[TALLY_NONZERO] += nonzero
        c[TALLY_UNDERFLOW] += underflow
        c[TALLY_SUBNORMAL] += subnormal
        c[TALLY_OVERFLOW] += overflow
        c[TALLY_EXACT] += exact
        s[TALLY_SIGNAL], s[TALLY_NOISE], s[TALLY_AMAX] = signal, noise, float64_of_bits(amax)

    return loop


@cache
def lost_loop(size: int) -> Loop:
    """Count what `n` numbers of `size` bytes at `src` lost when they became those at `dst`.

    Adds to the int64 LOST_COUNTS at `counts`: zeros before; other numbers that became zero; finite ones that did not
    stay finite, or whose magnitude is above `limit`. By bit patterns, which vectorise.
    """
    uint, limit_of = np.uint32 if size == 4 else np.uint64, make_limit(8 * size)
    container = BINARY32 if size == 4 else BINARY64
    magnitude_mask = uint((1 << (8 * size - 1)) - 1)
    zero, infinity = uint(0), uint(container.bits(float("inf")))

    @compiled_loop(size)
    def loop(src, dst, n, limit: float, counts):
        x = carray(pointer(src), (n,), uint)
        r = carray(pointer(dst), (n,), uint)
        c = carray(pointer(counts), (len(LOST_COUNTS),), np.int64)
        highest = limit_of(limit)
        zeros, underflow, overflow = 0, 0, 0
        for i in range(n):
            before, after = uint(x[i] & magnitude_mask), uint(r[i] & magnitude_mask)
            zeros += before == zero
            underflow += (before != zero) & (after == zero)
            overflow += (before < infinity) & ((after >= infinity) | (before > highest))
        c[ZERO_BEFORE] += zeros
        c[LOST_TO_ZERO] += underflow
        c[LOST_TO_OVERFLOW] += overflow

    return loop
