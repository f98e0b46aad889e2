"""What a rounding did to the numbers of a tensor, counted in one pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numba import carray

from fpsim import rounding
from fpsim.kernels.compile import compiled_loop, float64_bits, pointer
from fpsim.statistics import (
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


@cache
def tally_loop(size: int) -> Callable[..., None]:
    """Compare `n` numbers of `size` bytes before (address `src`) and after rounding (`dst`), in one pass.

    Adds to int64 counts, float64 sums and an int64 histogram, whose fields `statistics` names: TALLY_COUNTS,
    TALLY_SUMS, EXPONENT_FIELDS.
    """
    floating = np.float32 if size == 4 else np.float64

    @compiled_loop(size)
    def loop(src, dst, n, counts, sums, exponents, smallest_normal, saturated_from, largest):  # type: ignore[no-untyped-def]
        x = carray(pointer(src), (n,), floating)
        r = carray(pointer(dst), (n,), floating)
        c = carray(pointer(counts), (len(TALLY_COUNTS),), np.int64)
        s = carray(pointer(sums), (len(TALLY_SUMS),), np.float64)
        h = carray(pointer(exponents), (EXPONENT_FIELDS,), np.int64)
        for i in range(n):
            before, after = np.float64(x[i]), np.float64(r[i])
            magnitude, rounded = abs(before), abs(after)
            c[TALLY_COUNT] += 1
            if not magnitude < np.inf:
                c[TALLY_NONFINITE] += 1
                continue
            s[TALLY_AMAX] = max(s[TALLY_AMAX], magnitude)
            if magnitude > 0.0:
                c[TALLY_NONZERO] += 1
                c[TALLY_UNDERFLOW] += rounded == 0.0
                h[float64_bits(magnitude) >> 52] += 1
            c[TALLY_SUBNORMAL] += 0.0 < rounded < smallest_normal
            c[TALLY_OVERFLOW] += (not rounded < np.inf) or (rounded == largest and magnitude >= saturated_from)
            c[TALLY_EXACT] += before == after
            if rounded < np.inf:
                s[TALLY_SIGNAL] += before * before
                s[TALLY_NOISE] += (after - before) * (after - before)

    return loop


@cache
def lost_loop(size: int) -> Callable[..., None]:
    """Count what `n` numbers of `size` bytes at `src` lost when they became those at `dst`.

    Adds to the int64 LOST_COUNTS at `counts`: zeros before; other numbers that became zero; finite ones that did not
    stay finite, or whose magnitude is above `limit`. By bit patterns, which vectorise.
    """
    uint, floating = (np.uint32, np.float32) if size == 4 else (np.uint64, np.float64)
    container = rounding.BINARY32 if size == 4 else rounding.BINARY64
    magnitude_mask = uint((1 << (8 * size - 1)) - 1)
    zero, infinity = uint(0), uint(container.bits(float("inf")))

    @compiled_loop(size)
    def loop(src, dst, n, limit, counts):  # type: ignore[no-untyped-def]
        x = carray(pointer(src), (n,), uint)
        r = carray(pointer(dst), (n,), uint)
        c = carray(pointer(counts), (len(LOST_COUNTS),), np.int64)
        scratch = np.full(1, limit, floating)
        highest = scratch.view(uint)[0]
        if np.float64(scratch[0]) > limit:
            highest = uint(highest - uint(1))
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
