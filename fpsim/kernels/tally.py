"""Tally of a rounding: the effects on the numbers of a tensor, counted in one pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fpsim.compiling.compile import CUDA_THREADS, cuda, float64_bits, float64_of_bits, pointer, uses_cuda
from fpsim.compiling.deferred import carray, njit
from fpsim.compiling.native import Loop, compiled_loop
from fpsim.kernels.containers import integers, make_limit, make_value, times_power, widened
from fpsim.kernels.core import BINARY32, BINARY64
from fpsim.kernels.statistics import (
    ELEMENT_COUNTS,
    EXPONENT_FIELDS,
    LOST_COUNTS,
    LOST_TO_OVERFLOW,
    LOST_TO_ZERO,
    TALLY_ALONG,
    TALLY_AMAX,
    TALLY_COUNT,
    TALLY_COUNTS,
    TALLY_DEAD_ZONE,
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

if TYPE_CHECKING:
    from fpsim.compiling.card import CudaKernel

# A processor may flush products up to this number to zero. All targets count such products as zero, to agree.
LEAST_PRODUCT = math.ldexp(1.0, -1022)

CARD_SUMS = 4  # signal, noise, dead_zone and along: the TALLY_SUMS that threads add up

_MAGNITUDE = np.uint64((1 << 63) - 1)
_INFINITY = np.uint64(BINARY64.bits(math.inf))
# Masks are left out: their squares would hide the squares of all other numbers.
_MASK = np.uint64(BINARY64.bits(float(np.finfo(np.float32).max)))


@njit(forceinline=True)
def product(x, y):
    multiplied = x * y
    return multiplied if abs(multiplied) > LEAST_PRODUCT else 0.0


@cache
def _make_wide(size: int) -> Callable[..., Any]:
    """Return a compiled function that returns the float64 pattern of a number of `size` bytes."""

    @njit(forceinline=True)
    def wide(word):
        return widened(word) if size == 4 else np.uint64(word)

    return wide  # type: ignore[no-any-return]


@cache
def tally_loop(size: int) -> Loop:
    """Return a loop that compares `n` numbers of `size` bytes before (address `src`) and after rounding (`dst`).

    In one pass, the loop adds to int64 counts, float64 sums and an int64 histogram. Their fields are TALLY_COUNTS,
    TALLY_SUMS and EXPONENT_FIELDS of `statistics`.
    """
    (uint, _), wide, zero = integers(8 * size), _make_wide(size), np.uint64(0)

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
        # The sums stay in registers: an addition in memory would wait for the store before it.
        nonfinite, nonzero, underflow, subnormal, overflow, exact = 0, 0, 0, 0, 0, 0
        signal, noise, dead_zone, along = s[TALLY_SIGNAL], s[TALLY_NOISE], s[TALLY_DEAD_ZONE], s[TALLY_ALONG]
        for i in range(n):
            before, after = wide(x[i]), wide(r[i])
            # Bit patterns are compared, so that no subnormal is flushed before it is counted.
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
            if rounded < _INFINITY and magnitude != _MASK:
                value = float64_of_bits(before)
                change, squared = float64_of_bits(after) - value, product(value, value)
                signal += squared
                noise += product(change, change)
                dead_zone += squared if rounded == zero else 0.0
                along += product(value, change)
        c[TALLY_COUNT] += n
        c[TALLY_NONFINITE] += nonfinite
        c[TALLY_NONZERO] += nonzero
        c[TALLY_UNDERFLOW] += underflow
        c[TALLY_SUBNORMAL] += subnormal
        c[TALLY_OVERFLOW] += overflow
        c[TALLY_EXACT] += exact
        s[TALLY_SIGNAL], s[TALLY_NOISE], s[TALLY_AMAX] = signal, noise, float64_of_bits(amax)
        s[TALLY_DEAD_ZONE], s[TALLY_ALONG] = dead_zone, along

    return loop


@uses_cuda
def tally_kernel(size: int) -> Callable[..., None]:
    """Return the body of the CUDA kernel that does what `tally_loop` does, as a Python function for all targets.

    smallest_normal, saturated_from, largest: patterns of float64.
    counts, exponents: int64 arrays that are added to.
    amax: the pattern of a float64 in an int64 array.
    sums: float64, the signal, noise, dead_zone and along of each block of threads, which the caller adds up.
    """
    from numba import float64, int64, uint32

    wide, value_of, zero = _make_wide(size), make_value(64), np.uint64(0)

    def kernel(x, r, n, smallest_normal, saturated_from, largest, counts, exponents, amax, sums):
        parts = cuda.shared.array((CARD_SUMS, CUDA_THREADS), float64)
        found = cuda.shared.array(ELEMENT_COUNTS, int64)
        # Exponents are counted in shared memory: a block needs one atomic addition to memory for each bin, not for each
        # element.
        bins = cuda.shared.array(EXPONENT_FIELDS, uint32)
        t, block, threads = cuda.threadIdx.x, cuda.blockIdx.x, cuda.blockDim.x
        for field in range(t, EXPONENT_FIELDS, threads):
            bins[field] = 0
        for field in range(t, ELEMENT_COUNTS, threads):
            found[field] = 0
        cuda.syncthreads()
        normal, saturated, top = np.uint64(smallest_normal), np.uint64(saturated_from), np.uint64(largest)
        highest, signal, noise, dead_zone, along = np.uint64(0), 0.0, 0.0, 0.0, 0.0
        count, nonfinite, nonzero, underflow, subnormal, overflow, exact = 0, 0, 0, 0, 0, 0, 0
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            before, after = np.uint64(wide(x[i])), np.uint64(wide(r[i]))
            magnitude, rounded = np.uint64(before & _MAGNITUDE), np.uint64(after & _MAGNITUDE)
            count += 1
            if magnitude >= _INFINITY:
                nonfinite += 1
                continue
            highest = max(highest, magnitude)
            if magnitude > zero:
                nonzero += 1
                underflow += int(rounded == zero)
                cuda.atomic.add(bins, magnitude >> np.uint64(52), uint32(1))
            subnormal += int(zero < rounded < normal)
            overflow += int(rounded >= _INFINITY or (rounded == top and magnitude >= saturated))
            exact += int(before == after or np.uint64(magnitude | rounded) == zero)
            if rounded < _INFINITY and magnitude != _MASK:
                value = value_of(before)
                change, squared = value_of(after) - value, product(value, value)
                signal += squared
                noise += product(change, change)
                dead_zone += squared if rounded == zero else 0.0
                along += product(value, change)
        parts[0, t], parts[1, t], parts[2, t], parts[3, t] = signal, noise, dead_zone, along
        cuda.atomic.add(found, TALLY_COUNT, count)
        cuda.atomic.add(found, TALLY_NONFINITE, nonfinite)
        cuda.atomic.add(found, TALLY_NONZERO, nonzero)
        cuda.atomic.add(found, TALLY_UNDERFLOW, underflow)
        cuda.atomic.add(found, TALLY_SUBNORMAL, subnormal)
        cuda.atomic.add(found, TALLY_OVERFLOW, overflow)
        cuda.atomic.add(found, TALLY_EXACT, exact)
        cuda.atomic.max(amax, 0, int64(highest))
        half = threads // 2
        cuda.syncthreads()
        while half > 0:
            if t < half:
                for field in range(CARD_SUMS):
                    parts[field, t] += parts[field, t + half]
            cuda.syncthreads()
            half //= 2
        for field in range(t, EXPONENT_FIELDS, threads):
            if bins[field] > 0:
                cuda.atomic.add(exponents, field, int64(bins[field]))
        for field in range(t, ELEMENT_COUNTS, threads):
            cuda.atomic.add(counts, field, found[field])
        # The sums are not added atomically, because their last bits would then depend on the order in which blocks
        # finish.
        for field in range(t, CARD_SUMS, threads):
            sums[CARD_SUMS * block + field] = parts[field, 0]

    return kernel


@cache
def cuda_tally(size: int) -> CudaKernel:
    """Return the kernel with its launch, in any number of blocks."""
    from numba import types

    from fpsim.compiling.card import FLOATS64, INTEGER, WORDS32, WORDS64, CudaKernel, for_card

    words, integers = WORDS32 if size == 4 else WORDS64, types.Array(types.int64, 1, "C")
    signature = words, words, *[INTEGER] * 4, integers, integers, integers, FLOATS64
    return CudaKernel(lambda: for_card(tally_kernel(size)), signature, "tally", size)


@cache
def _make_lost(size: int) -> Callable[..., Any]:
    """Return a compiled function that says whether a number was zero, became zero, or overflowed."""
    uint, _ = integers(8 * size)
    magnitude_mask = uint((1 << (8 * size - 1)) - 1)
    zero, infinity = uint(0), uint((BINARY32 if size == 4 else BINARY64).bits(float("inf")))

    # Bit patterns are compared, which vectorises.
    @njit(forceinline=True)
    def lost(x, r, highest):
        before, after = uint(x & magnitude_mask), uint(r & magnitude_mask)
        overflow = (before < infinity) & ((after >= infinity) | (before > highest))
        return before == zero, (before != zero) & (after == zero), overflow

    return lost  # type: ignore[no-any-return]


@cache
def lost_loop(size: int) -> Loop:
    """Return a loop that counts the losses of a rounding of `n` numbers of `size` bytes: `src` before, `dst` after.

    The loop adds to the int64 LOST_COUNTS at `counts`: numbers that were zero before; other numbers that became zero;
    and finite numbers that did not stay finite, or whose magnitude is above `limit`.
    """
    (uint, _), limit_of, lost = integers(8 * size), make_limit(8 * size), _make_lost(size)

    @compiled_loop(size)
    def loop(src, dst, n, limit: float, counts):
        x = carray(pointer(src), (n,), uint)
        r = carray(pointer(dst), (n,), uint)
        c = carray(pointer(counts), (len(LOST_COUNTS),), np.int64)
        highest = limit_of(limit)
        zeros, underflow, overflow = 0, 0, 0
        for i in range(n):
            is_zero, becomes_zero, overflows = lost(x[i], r[i], highest)
            zeros += is_zero
            underflow += becomes_zero
            overflow += overflows
        c[ZERO_BEFORE] += zeros
        c[LOST_TO_ZERO] += underflow
        c[LOST_TO_OVERFLOW] += overflow

    return loop


@uses_cuda
def lost_kernel(size: int) -> Callable[..., None]:
    """Return the body of the CUDA kernel that does what `lost_loop` does, as a Python function.

    largest: the pattern of a float64.
    log2_scale: an int64 in memory; the limit is `largest * 2**-log2_scale`.
    counts: an int64 array that is added to.
    """
    from numba import int64

    limit_of, lost, fields = make_limit(8 * size), _make_lost(size), len(LOST_COUNTS)

    @njit(forceinline=True)
    def limit_at(largest, log2_scale):
        return limit_of(float64_of_bits(times_power(np.uint64(largest), -np.int64(log2_scale))))

    def kernel(x, r, n, largest, log2_scale, counts):
        found = cuda.shared.array(fields, int64)
        for field in range(cuda.threadIdx.x, fields, cuda.blockDim.x):
            found[field] = 0
        cuda.syncthreads()
        highest = limit_at(largest, log2_scale[0])
        zeros, underflow, overflow = 0, 0, 0
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            is_zero, becomes_zero, overflows = lost(x[i], r[i], highest)
            zeros += is_zero
            underflow += becomes_zero
            overflow += overflows
        cuda.atomic.add(found, ZERO_BEFORE, zeros)
        cuda.atomic.add(found, LOST_TO_ZERO, underflow)
        cuda.atomic.add(found, LOST_TO_OVERFLOW, overflow)
        cuda.syncthreads()
        for field in range(cuda.threadIdx.x, fields, cuda.blockDim.x):
            cuda.atomic.add(counts, field, found[field])

    return kernel


@cache
def cuda_lost(size: int) -> CudaKernel:
    """Return the kernel with its launch, in any number of blocks."""
    from numba import types

    from fpsim.compiling.card import INTEGER, INTEGERS, WORDS32, WORDS64, CudaKernel, for_card

    words = WORDS32 if size == 4 else WORDS64
    signature = words, words, INTEGER, INTEGER, INTEGERS, types.Array(types.int64, 1, "C")
    return CudaKernel(lambda: for_card(lost_kernel(size)), signature, "lost", size)
