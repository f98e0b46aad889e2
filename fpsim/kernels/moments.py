"""Moments, range and exponents of a tensor, gathered in one pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fpsim.compiling.compile import CUDA_THREADS, cuda, float32_of, float64_of_bits, pointer, uses_cuda
from fpsim.compiling.deferred import carray, njit
from fpsim.compiling.native import Loop, compiled_loop
from fpsim.kernels.containers import UNIT, integers, make_value
from fpsim.kernels.core import BINARY32, BINARY64
from fpsim.kernels.statistics import (
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

if TYPE_CHECKING:
    from fpsim.compiling.card import CudaKernel

FIELDS = len(Moments._fields)


@cache
def moments_loop(size: int, only_amax: bool, logs: bool) -> Loop:
    """Return a loop that gathers the Moments of `n` numbers of `size` bytes at address `src` into float64 at `row`.

    amax is inf if a number is not finite; amin is 0 if all numbers are zero. only_amax: the other fields stay as they
    are.
    """
    uint, sint, floating = (np.uint32, np.int32, np.float32) if size == 4 else (np.uint64, np.int64, np.float64)
    number = make_value(8 * size)
    container = BINARY32 if size == 4 else BINARY64
    magnitude_mask = uint((1 << (8 * size - 1)) - 1)
    sign_shift, one, zero = sint(8 * size - 1), uint(1), uint(0)
    infinity, nothing = uint(container.bits(float("inf"))), uint((1 << (8 * size)) - 1)
    smallest_normal = uint(1 << container.mantissa_bits)

    # The compiler may change only the order of the sums: otherwise they do not vectorise.
    @compiled_loop(size, only_amax, logs, fastmath={"reassoc"})
    def loop(src, n, row):
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
                # Extremes are found from bit patterns, which vectorises.
                magnitude = uint(bits[i] & magnitude_mask)
                amax = max(amax, magnitude)
                amin = min(amin, uint(magnitude - one))  # zero wraps around to the largest
                nonzero += magnitude != zero
                word = sint(bits[i])
                # Negative patterns are reversed, so that signed integers compare as the numbers do.
                ordered = sint(word ^ sint(sint(word >> sign_shift) & sint(magnitude_mask)))
                lowest, highest = min(lowest, ordered), max(highest, ordered)
                value = np.float64(values[i])
                # The processor may have flushed a subnormal: the value is computed from the pattern, in units of the
                # smallest subnormal.
                if size == 4 and magnitude < smallest_normal:
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
def exponents_loop(size: int, power_begins: bool = False) -> Loop:
    """Return a loop that counts `n` numbers at address `src` by binade, into int64 at `bins`.

    Bin f counts 2**(f-b) < |x| <= 2**(f-b+1), where f is the exponent field of the next smaller magnitude, and b the
    bias. A power of two therefore ends its bin. This suits a threshold that is a power of two: a tie, exactly at the
    threshold, counts as below it.
    power_begins: f is the number's own exponent field instead, and a power of two begins its bin.
    Zero, inf and NaN are not counted.
    """
    uint = np.uint32 if size == 4 else np.uint64
    container = BINARY32 if size == 4 else BINARY64
    magnitude_mask = uint((1 << (8 * size - 1)) - 1)
    infinity, mantissa_bits = uint(container.bits(float("inf"))), uint(container.mantissa_bits)
    less = uint(0 if power_begins else 1)

    @compiled_loop(size, power_begins)
    def loop(src, n, bins):
        bits = carray(pointer(src), (n,), uint)
        out = carray(pointer(bins), (2 << (8 * size - 2 - container.mantissa_bits),), np.int64)
        for i in range(n):
            magnitude = uint(bits[i] & magnitude_mask)
            if uint(0) < magnitude < infinity:
                out[uint(magnitude - less) >> mantissa_bits] += 1

    return loop


# The largest number of blocks: eight for each multiprocessor of an H100, all of which are resident at once.
MOMENTS_BLOCKS = 1024

# Partial results that blocks leave for the last block to join. The number of blocks depends only on n, and all results
# are joined in a fixed order, so that the sums have the same last bit every time.
_NONZERO, _LOWEST, _HIGHEST, _AMAX, _AMIN = range(5)
_INTEGERS, _SUMS = 5, 4
_NOTHING = (1 << 63) - 1  # in place of the smallest magnitude


def partial_words(n: int, size: int) -> tuple[int, int, int]:
    """Return the numbers of blocks, int64 and float64 for `n` numbers; the caller sets the first int64 to zero."""
    blocks = max(1, min(MOMENTS_BLOCKS, -(-n * size // (CUDA_THREADS * 16))))
    return blocks, 1 + _INTEGERS * blocks, _SUMS * blocks


@cache
def _make_number(size: int) -> Callable[..., Any]:
    """Return a compiled function that returns the number of a pattern, as float64."""

    # Unlike make_value, this function does not convert by integers, because a card flushes no subnormals here.
    @njit(inline="always")
    def number(word):
        return np.float64(float32_of(np.uint32(word))) if size == 4 else float64_of_bits(np.uint64(word))

    return number  # type: ignore[no-any-return]


def _make_take(size: int, only_amax: bool, logs: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return two functions: `begin` returns a thread's initial state, and `take` adds a pattern to the state."""
    uint, sint = integers(8 * size)
    magnitude_mask, sign_shift = uint((1 << (8 * size - 1)) - 1), sint(8 * size - 1)
    zero, one, number = uint(0), uint(1), _make_number(size)

    @njit(inline="always")
    def begin():
        lowest, highest = sint(magnitude_mask), sint(~sint(magnitude_mask))
        return np.uint32(0), lowest, highest, zero, uint(~zero), 0.0, 0.0, 0.0, 0.0

    @njit(inline="always")
    def take(word, state):
        nonzero, lowest, highest, amax, amin, total, squares, logs_total, log_squares = state
        magnitude = uint(word & magnitude_mask)
        amax = max(amax, magnitude)
        if not only_amax:
            amin = min(amin, uint(magnitude - one))  # zero wraps around to the largest
            nonzero = np.uint32(nonzero + np.uint32(magnitude != zero))
            ordered = sint(sint(word) ^ sint(sint(sint(word) >> sign_shift) & sint(magnitude_mask)))
            lowest, highest = min(lowest, ordered), max(highest, ordered)
            # Sums are float64: a float32's square lies between 2**-298 and 2**256, and a sum of 2**30 squares keeps 23
            # bits.
            value = number(word)
            total += value
            squares += value * value
            if logs and magnitude != zero:
                log = math.log(abs(value))
                logs_total += log
                log_squares += log * log
        return nonzero, lowest, highest, amax, amin, total, squares, logs_total, log_squares

    return begin, take


def _for_each(function: Callable[..., Any], lanes: int) -> Callable[..., Any]:
    """Return a function that applies `function` to each element of a tuple in turn."""

    # The calls are written out, because indexing a tuple with a variable is a branch.
    def both(words, state):
        return function(words[1], function(words[0], state))

    def all_four(words, state):
        return function(words[3], function(words[2], function(words[1], function(words[0], state))))

    return both if lanes == 2 else all_four


def _make_join(only_amax: bool) -> Callable[..., None]:
    """Return a function that joins the results of a block's threads, by halves, into the column of thread 0."""

    def join(shared, sums, t):
        half = cuda.blockDim.x // 2
        cuda.syncthreads()
        while half > 0:
            if t < half:
                shared[_AMAX, t] = max(shared[_AMAX, t], shared[_AMAX, t + half])
                if not only_amax:
                    shared[_NONZERO, t] += shared[_NONZERO, t + half]
                    shared[_LOWEST, t] = min(shared[_LOWEST, t], shared[_LOWEST, t + half])
                    shared[_HIGHEST, t] = max(shared[_HIGHEST, t], shared[_HIGHEST, t + half])
                    shared[_AMIN, t] = min(shared[_AMIN, t], shared[_AMIN, t + half])
                    for field in range(_SUMS):
                        sums[field, t] += sums[field, t + half]
            cuda.syncthreads()
            half //= 2

    return join


@uses_cuda
def cuda_moments_kernel(size: int, only_amax: bool, logs: bool) -> Callable[..., None]:
    """Return the body of the CUDA kernel that gathers the Moments of `n` patterns at `x` into the float64 at `out`.

    is_aligned: whether x begins at a multiple of 16 bytes.
    rows, sums: the memory of `partial_words`. The last block to finish joins all partial results.
    """
    from numba import float64, int64

    from fpsim.compiling.card import vector_access

    load, _ = vector_access(8 * size)
    begin, take = _make_take(size, only_amax, logs)
    take_all = _for_each(take, 16 // size)
    join, write = _make_join(only_amax), _make_write(size, only_amax)
    lanes, threads, integers, floats = 16 // size, CUDA_THREADS, _INTEGERS, _SUMS
    largest = np.int64((1 << (8 * size - 1)) - 1)

    def kernel(x, n, is_aligned, rows, sums, out):
        shared, shared_sums = (
            cuda.shared.array((integers, threads), int64),
            cuda.shared.array((floats, threads), float64),
        )
        ticket = cuda.shared.array(1, int64)
        t, block, blocks = cuda.threadIdx.x, cuda.blockIdx.x, cuda.gridDim.x
        thread, step, state = cuda.grid(1), cuda.gridsize(1), begin()
        vectors = n // lanes if is_aligned else 0
        for i in range(thread, vectors, step):
            words = load(x, i)
            state = take_all(words, state)
        for i in range(vectors * lanes + thread, n, step):
            state = take(x[i], state)
        nonzero, lowest, highest, amax, amin, total, squares, logs_total, log_squares = state
        shared[_NONZERO, t], shared[_LOWEST, t], shared[_HIGHEST, t] = nonzero, lowest, highest
        shared[_AMAX, t], shared[_AMIN, t] = amax, int64(amin) + 1 if nonzero > 0 else _NOTHING
        shared_sums[0, t], shared_sums[1, t] = total, squares
        shared_sums[2, t], shared_sums[3, t] = logs_total, log_squares
        join(shared, shared_sums, t)
        if t < integers:
            rows[1 + block * integers + t] = shared[t, 0]
        if t < floats:
            sums[block * floats + t] = shared_sums[t, 0]
        # A block that sees this block's ticket also sees this block's results.
        cuda.threadfence()
        cuda.syncthreads()
        if t == 0:
            ticket[0] = cuda.atomic.add(rows, 0, 1)
        cuda.syncthreads()
        if ticket[0] != blocks - 1:
            return
        cuda.threadfence()
        shared[_NONZERO, t], shared[_LOWEST, t], shared[_HIGHEST, t] = 0, largest, ~largest
        shared[_AMAX, t], shared[_AMIN, t] = 0, _NOTHING
        for field in range(floats):
            shared_sums[field, t] = 0.0
        for i in range(t, blocks, threads):
            row = 1 + i * integers
            shared[_NONZERO, t] += rows[row + _NONZERO]
            shared[_LOWEST, t] = min(shared[_LOWEST, t], rows[row + _LOWEST])
            shared[_HIGHEST, t] = max(shared[_HIGHEST, t], rows[row + _HIGHEST])
            shared[_AMAX, t] = max(shared[_AMAX, t], rows[row + _AMAX])
            shared[_AMIN, t] = min(shared[_AMIN, t], rows[row + _AMIN])
            for field in range(floats):
                shared_sums[field, t] += sums[i * floats + field]
        join(shared, shared_sums, t)
        if t == 0:
            write(shared, shared_sums, n, out)

    return kernel


def _make_write(size: int, only_amax: bool) -> Callable[..., Any]:
    """Return the function that writes the result, run by the last thread on column 0 of the joined arrays."""
    uint, sint = integers(8 * size)
    container = BINARY32 if size == 4 else BINARY64
    infinity, number = np.int64(container.bits(float("inf"))), _make_number(size)
    magnitude_mask, sign_shift = sint((1 << (8 * size - 1)) - 1), sint(8 * size - 1)

    @njit(forceinline=True)
    def value(ordered):
        word = sint(ordered)
        return number(uint(sint(word ^ sint(sint(word >> sign_shift) & magnitude_mask))))

    def write(shared, sums, n, out):
        out[AMAX] = number(uint(min(shared[_AMAX, 0], infinity)))
        if only_amax:
            return
        nonzero = shared[_NONZERO, 0]
        whole, some = float(max(n, 1)), float(max(nonzero, 1))
        out[COUNT], out[NONZERO] = float(n), float(nonzero)
        out[MEAN], out[MEAN_SQUARE] = sums[0, 0] / whole, sums[1, 0] / whole
        out[MINIMUM], out[MAXIMUM] = 0.0, 0.0
        if n > 0:
            out[MINIMUM], out[MAXIMUM] = value(shared[_LOWEST, 0]), value(shared[_HIGHEST, 0])
        out[AMIN] = number(uint(shared[_AMIN, 0])) if nonzero > 0 else 0.0
        out[LOG_MEAN], out[LOG_MEAN_SQUARE] = sums[2, 0] / some, sums[3, 0] / some

    return write


@uses_cuda
def cuda_exponents_kernel(size: int, power_begins: bool = False) -> Callable[..., None]:
    """Return the body of the CUDA kernel that counts by binade as `exponents_loop` does, into the int64 array `bins`.

    x: `n` patterns.
    is_aligned: whether they begin at a multiple of 16 bytes.

    A block counts in shared memory, and adds its counts to `bins` at its end. It needs one atomic addition in memory
    for each binade, and not for each element.
    """
    from numba import int64, uint32

    from fpsim.compiling.card import vector_access

    uint, _ = integers(8 * size)
    load, _ = vector_access(8 * size)
    container = BINARY32 if size == 4 else BINARY64
    magnitude_mask = uint((1 << (8 * size - 1)) - 1)
    infinity, mantissa_bits = uint(container.bits(float("inf"))), uint(container.mantissa_bits)
    less, zero = uint(0 if power_begins else 1), uint(0)
    lanes, fields = 16 // size, 2 * container.bias + 2

    def count(word, counts):
        magnitude = uint(word & magnitude_mask)
        if magnitude > zero and magnitude < infinity:
            cuda.atomic.add(counts, uint(magnitude - less) >> mantissa_bits, uint32(1))
        return counts

    count_all = _for_each(count, 16 // size)

    def kernel(x, n, is_aligned, bins):
        counts = cuda.shared.array(fields, uint32)
        thread, step = cuda.grid(1), cuda.gridsize(1)
        for field in range(cuda.threadIdx.x, fields, cuda.blockDim.x):
            counts[field] = 0
        cuda.syncthreads()
        vectors = n // lanes if is_aligned else 0
        for i in range(thread, vectors, step):
            words = load(x, i)
            count_all(words, counts)
        for i in range(vectors * lanes + thread, n, step):
            count(x[i], counts)
        cuda.syncthreads()
        for field in range(cuda.threadIdx.x, fields, cuda.blockDim.x):
            if counts[field] > 0:
                cuda.atomic.add(bins, field, int64(counts[field]))

    return kernel


@cache
def cuda_moments(size: int, only_amax: bool, logs: bool) -> CudaKernel:
    """Return the kernel as a CudaKernel, which launches it; `partial_words` returns the number of blocks."""
    from numba import types

    from fpsim.compiling.card import FLOATS64, INTEGER, WORDS32, WORDS64, CudaKernel, for_card

    patterns, rows = WORDS32 if size == 4 else WORDS64, types.Array(types.int64, 1, "C")
    signature = patterns, INTEGER, INTEGER, rows, FLOATS64, FLOATS64
    return CudaKernel(
        lambda: for_card(cuda_moments_kernel(size, only_amax, logs)), signature, "moments", size, only_amax, logs
    )


@cache
def cuda_exponents(size: int, power_begins: bool = False) -> CudaKernel:
    """Return the kernel with its launch, in any number of blocks."""
    from numba import types

    from fpsim.compiling.card import INTEGER, WORDS32, WORDS64, CudaKernel, for_card

    signature = WORDS32 if size == 4 else WORDS64, INTEGER, INTEGER, types.Array(types.int64, 1, "C")
    return CudaKernel(
        lambda: for_card(cuda_exponents_kernel(size, power_begins)), signature, "exponents", size, power_begins
    )
