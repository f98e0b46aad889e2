"""The moments, the range and the exponents of a tensor, gathered in one pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import carray

from fpsim import rounding
from fpsim.kernels.compile import CUDA_THREADS, compiled_loop, cuda_module, pointer
from fpsim.kernels.containers import UNIT, make_value
from fpsim.statistics import (
    AMAX,
    AMIN,
    COUNT,
    LOG_MEAN,
    LOG_MEAN_SQUARE,
    MAXIMUM,
    MEAN,
    MEAN_SQUARE,
    MINIMUM,
    NONZERO,
    Moments,
)

FIELDS = len(Moments._fields)

cuda: Any = None  # numba-cuda's module once it is needed; a global, because the simulator swaps it in those


@cache
def moments_loop(size: int, only_amax: bool, logs: bool) -> Callable[..., None]:
    """Gather the Moments of `n` numbers of `size` bytes from address `src` into the float64 fields at `row`.

    The extremes go by bit patterns, which vectorise; so do the sums, because their order is left to the compiler.
    amax is inf where a number is not finite; amin is 0 where none is above 0. only_amax: the other fields stay.
    """
    uint, sint, floating = (np.uint32, np.int32, np.float32) if size == 4 else (np.uint64, np.int64, np.float64)
    number = make_value(8 * size)
    container = rounding.BINARY32 if size == 4 else rounding.BINARY64
    magnitude_mask = uint((1 << (8 * size - 1)) - 1)
    sign_shift, one, zero = sint(8 * size - 1), uint(1), uint(0)
    infinity, nothing = uint(container.bits(float("inf"))), uint((1 << (8 * size)) - 1)
    smallest_normal = uint(1 << container.mantissa_bits)

    @compiled_loop(size, only_amax, logs, fastmath={"reassoc"})
    def loop(src, n, row):  # type: ignore[no-untyped-def]
        bits = carray(pointer(src), (n,), uint)
        values = carray(pointer(src), (n,), floating)
        out = carray(pointer(row), (FIELDS,), np.float64)
        amax = zero
        if only_amax:
            for i in range(n):
                amax = max(amax, uint(bits[i] & magnitude_mask))
        else:
            nonzero, amin, lowest, highest = 0, nothing, sint(magnitude_mask), sint(~sint(magnitude_mask))
            total, squares, logs_total, log_squares = 0.0, 0.0, 0.0, 0.0
            for i in range(n):
                magnitude = uint(bits[i] & magnitude_mask)
                amax = max(amax, magnitude)
                amin = min(amin, uint(magnitude - one))  # zero wraps around to the largest
                nonzero += magnitude != zero
                word = sint(bits[i])
                ordered = sint(word ^ sint(sint(word >> sign_shift) & sint(magnitude_mask)))
                lowest, highest = min(lowest, ordered), max(highest, ordered)
                value = np.float64(values[i])
                if size == 4 and magnitude < smallest_normal:  # which the processor may have flushed
                    value = np.float64(np.int32(magnitude)) * UNIT
                    value = -value if sint(bits[i]) < 0 else value
                total += value
                squares += value * value
                if logs and magnitude != zero:
                    log = math.log(abs(value))
                    logs_total += log
                    log_squares += log * log
            minimum = number(uint(lowest ^ sint(sint(lowest >> sign_shift) & sint(magnitude_mask))))
            maximum = number(uint(highest ^ sint(sint(highest >> sign_shift) & sint(magnitude_mask))))
            whole, some = np.float64(max(n, 1)), np.float64(max(nonzero, 1))
            out[COUNT], out[NONZERO] = n, nonzero
            out[MEAN], out[MEAN_SQUARE] = total / whole, squares / whole
            out[MINIMUM], out[MAXIMUM] = (minimum, maximum) if n > 0 else (0.0, 0.0)
            out[AMIN] = number(uint(amin + one)) if nonzero > 0 else 0.0
            out[LOG_MEAN], out[LOG_MEAN_SQUARE] = logs_total / some, log_squares / some
        out[AMAX] = number(min(amax, infinity))

    return loop


@cache
def exponents_loop(size: int, power_begins: bool = False) -> Callable[..., None]:
    """Count `n` numbers from address `src` by binade into int64 at `bins`: bin f holds 2**(f-b) < |x| <= 2**(f-b+1).

    f is the exponent field of the next smaller magnitude, b the bias, so that a power of two ends its bin: at a
    threshold of that kind a tie falls. power_begins: f is the number's own field, and a power of two begins its bin.
    Zero, inf and NaN are not counted.
    """
    uint = np.uint32 if size == 4 else np.uint64
    container = rounding.BINARY32 if size == 4 else rounding.BINARY64
    magnitude_mask = uint((1 << (8 * size - 1)) - 1)
    infinity, mantissa_bits = uint(container.bits(float("inf"))), uint(container.mantissa_bits)
    less = uint(0 if power_begins else 1)

    @compiled_loop(size, power_begins)
    def loop(src, n, bins):  # type: ignore[no-untyped-def]
        bits = carray(pointer(src), (n,), uint)
        out = carray(pointer(bins), (2 << (8 * size - 2 - container.mantissa_bits),), np.int64)
        for i in range(n):
            magnitude = uint(bits[i] & magnitude_mask)
            if uint(0) < magnitude < infinity:
                out[uint(magnitude - less) >> mantissa_bits] += 1

    return loop


MOMENTS_BLOCKS = 128  # of a fixed number, so that the sums' order, and with it their last bit, is the same every time


def cuda_moments_kernel(logs: bool) -> Callable[..., None]:
    """The body of the CUDA kernel that gathers the Moments of a flat array, one row of `rows` for each block."""
    global cuda
    cuda = cuda_module()
    from numba import float64

    fields, threads, infinity = FIELDS, CUDA_THREADS, math.inf

    def kernel(x, n, rows):  # type: ignore[no-untyped-def]
        shared = cuda.shared.array((fields, threads), float64)
        t = cuda.threadIdx.x
        count, nonzero, total, squares, logs_total, log_squares = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        lowest, highest, amax, amin = infinity, -infinity, 0.0, infinity
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            value = float64(x[i])
            magnitude = abs(value)
            count += 1.0
            total += value
            squares += value * value
            lowest, highest = min(lowest, value), max(highest, value)
            amax = max(amax, magnitude) if magnitude < infinity else infinity
            if magnitude > 0.0:
                nonzero += 1.0
                amin = min(amin, magnitude)
                if logs:
                    log = math.log(magnitude)
                    logs_total += log
                    log_squares += log * log
        # sums while they are joined; the means come last
        row = (count, nonzero, total, squares, lowest, highest, amax, amin, logs_total, log_squares)
        for field in range(fields):
            shared[field, t] = row[field]
        cuda.syncthreads()
        half = threads // 2
        while half > 0:
            if t < half:
                for field in range(fields):
                    a, b = shared[field, t], shared[field, t + half]
                    if field == MINIMUM or field == AMIN:
                        shared[field, t] = min(a, b)
                    elif field == MAXIMUM or field == AMAX:
                        shared[field, t] = max(a, b)
                    else:
                        shared[field, t] = a + b
            cuda.syncthreads()
            half //= 2
        if t == 0:
            count, nonzero = max(shared[COUNT, 0], 1.0), max(shared[NONZERO, 0], 1.0)
            for field in range(fields):
                value = shared[field, 0]
                if field == MEAN or field == MEAN_SQUARE:
                    value /= count
                elif field == LOG_MEAN or field == LOG_MEAN_SQUARE:
                    value /= nonzero
                rows[cuda.blockIdx.x, field] = value

    return kernel


def cuda_amax_kernel() -> Callable[..., None]:
    """The body of the CUDA kernel for the largest magnitude of each block's share: inf for what is not finite."""
    global cuda
    cuda = cuda_module()
    from numba import float64

    threads, infinity = CUDA_THREADS, math.inf

    def kernel(x, n, rows):  # type: ignore[no-untyped-def]
        shared = cuda.shared.array(threads, float64)
        t = cuda.threadIdx.x
        amax = 0.0
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            magnitude = abs(float64(x[i]))
            amax = max(amax, magnitude) if magnitude < infinity else infinity
        shared[t] = amax
        cuda.syncthreads()
        half = threads // 2
        while half > 0:
            if t < half:
                shared[t] = max(shared[t], shared[t + half])
            cuda.syncthreads()
            half //= 2
        if t == 0:
            rows[cuda.blockIdx.x, AMAX] = shared[0]

    return kernel


def cuda_exponents_kernel(size: int, power_begins: bool = False) -> Callable[..., None]:
    """The body of the CUDA kernel that counts by binade as `exponents_loop` does; `bits` is flat and unsigned."""
    global cuda
    cuda = cuda_module()
    uint = np.uint32 if size == 4 else np.uint64
    container = rounding.BINARY32 if size == 4 else rounding.BINARY64
    magnitude_mask = uint((1 << (8 * size - 1)) - 1)
    infinity, mantissa_bits = uint(container.bits(float("inf"))), uint(container.mantissa_bits)
    less = uint(0 if power_begins else 1)

    def kernel(bits, n, bins):  # type: ignore[no-untyped-def]
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            magnitude = uint(bits[i] & magnitude_mask)
            if uint(0) < magnitude < infinity:
                cuda.atomic.add(bins, uint(magnitude - less) >> mantissa_bits, 1)

    return kernel


@cache
def cuda_moments(only_amax: bool, logs: bool) -> Callable[..., None]:
    """The compiled kernel with its launch: (x, n, rows, stream), rows: (MOMENTS_BLOCKS, FIELDS) float64."""
    kernel = cuda_module().jit(cuda_amax_kernel() if only_amax else cuda_moments_kernel(logs))

    def launch(x: Any, n: int, rows: Any, stream: Any) -> None:
        kernel[MOMENTS_BLOCKS, CUDA_THREADS, stream](x, n, rows)

    return launch


@cache
def cuda_exponents(size: int, power_begins: bool = False) -> Callable[..., None]:
    """The compiled kernel with its launch: (bits, n, bins, stream)."""
    kernel = cuda_module().jit(cuda_exponents_kernel(size, power_begins))

    def launch(bits: Any, n: int, bins: Any, stream: Any) -> None:
        kernel[MOMENTS_BLOCKS, CUDA_THREADS, stream](bits, n, bins)

    return launch
