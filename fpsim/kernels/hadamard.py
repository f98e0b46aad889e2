"""Hadamard transforms: the loops that multiply groups of elements along one axis by signs and Sylvester's matrix."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fpsim.compiling.compile import CUDA_THREADS, cuda, pointer, stack_array, uses_cuda
from fpsim.compiling.deferred import carray, njit
from fpsim.compiling.native import Loop, compiled_loop
from fpsim.kernels.threefry import NOISE_ROUNDS, key_words, threefry

if TYPE_CHECKING:
    from fpsim.compiling.card import CudaKernel

# The number of groups side by side on the CPU: a cache line of float32, so that small groups have vectors too.
LANES = 16
# The high word of the signs' counters. No tensor's rounding noise reaches it, so that one key serves signs and noise.
SIGNS = 0x5347

# A tensor's memory is seen as (groups, size, inner), and is transformed along the second axis. A line is one group at
# one inner index: `size` elements that are `inner` apart. In each stage, h = 1, 2, 4, ..., each pair that is h apart
# becomes its sum and its difference. The order of the additions is part of the definition, so that every target
# computes the same bits.


@njit(forceinline=True)
def lower(a, b):
    """Return the first of a pair after a stage."""
    return a + b


@njit(forceinline=True)
def upper(a, b):
    """Return the second of a pair after a stage."""
    return a - b


@njit(forceinline=True)
def is_negated(element, pattern, is_random, key0, key1):
    """Return 1 if the sign of a group's element is minus, else 0.

    The signs are 16 repeated bits, `pattern`, or noise if `is_random`, with 128 bits a counter.
    """
    if not is_random:
        return (np.uint32(pattern) >> np.uint32(element % 16)) & np.uint32(1)
    counter = np.uint32(element // 128)
    w0, w1, w2, w3 = threefry(counter, np.uint32(SIGNS), np.uint32(key0), np.uint32(key1), NOISE_ROUNDS)
    which = element // 32 % 4
    word = (w0 if which == 0 else w1) if which < 2 else (w2 if which == 2 else w3)
    return (np.uint32(word) >> np.uint32(element % 32)) & np.uint32(1)


def _stages(size: int) -> Callable[..., Any]:
    """Return a function that runs all stages on `size` rows of LANES numbers. count: `size`, as an argument."""

    @njit(forceinline=True)
    def nothing(rows, count):
        pass

    def followed_by(before: Callable[..., Any], h: int) -> Callable[..., Any]:
        # The distance is compiled in: LLVM then sees that the two rows of a pair share no memory.
        distance = h * LANES

        @njit(forceinline=True)
        def stages(rows, count):
            before(rows, count)
            for first in range(0, count, 2 * h):
                for row in range(first, first + h):
                    for i in range(row * LANES, (row + 1) * LANES):
                        a, b = rows[i], rows[i + distance]
                        rows[i] = lower(a, b)
                        rows[i + distance] = upper(a, b)

        return stages  # type: ignore[no-any-return]

    done: Callable[..., Any] = nothing
    h = 1
    while h < size:
        done = followed_by(done, h)
        h *= 2
    return done


def floating_of(width: int) -> Any:
    return np.float32 if width == 32 else np.float64


@cache
def cpu_loop(size: int, width: int) -> Loop:
    """Return a loop that transforms the lines `first` to `last` from address `src` to `dst`, which may be `src`.

    pattern, is_random: the source of the signs: see `is_negated`.
    key: the address of two uint32 words.
    is_inverse: whether the signs come after the matrix, which undoes a transform.
    """
    floating, stages = floating_of(width), _stages(size)
    factor, one = floating(size**-0.5), floating(1)
    new_rows, new_signs = stack_array(size * LANES, floating), stack_array(size, floating)
    new_bases = stack_array(LANES, np.int64)

    @compiled_loop(size, width)
    def loop(src, dst, first, last, inner, pattern, is_random, is_inverse, key):
        k = carray(pointer(key), (2,), np.uint32)
        lines = last + inner  # an upper bound, which only serves as the arrays' declared length
        x, y = carray(pointer(src), (lines * size,), floating), carray(pointer(dst), (lines * size,), floating)
        rows, bases, before, after = new_rows(), new_bases(), new_signs(), new_signs()
        for i in range(size * LANES):
            rows[i] = 0  # lanes without a line are transformed too
        # `count` is not a constant for LLVM, which would otherwise unroll every stage, and compile for 4 s.
        count = size if inner > 0 else 0
        for e in range(count):
            sign = -one if is_negated(e, pattern, is_random, k[0], k[1]) else one
            before[e], after[e] = (one, sign * factor) if is_inverse else (sign, factor)
        line = first
        while line < last:
            group, column = line // inner, line % inner
            start = group * size * inner + column
            are_neighbours = inner >= LANES  # the lanes, in memory
            m = min(LANES, last - line)
            if are_neighbours:
                m = min(m, inner - column)
                for e in range(count):
                    for lane in range(m):
                        rows[e * LANES + lane] = x[start + e * inner + lane] * before[e]
            else:
                for lane in range(m):
                    other = line + lane
                    bases[lane] = other // inner * size * inner + other % inner
                for lane in range(m):
                    base = bases[lane]
                    for e in range(count):
                        rows[e * LANES + lane] = x[base + e * inner] * before[e]
            # Both cases share one call, because LLVM would compile two calls twice.
            stages(rows, count)
            if are_neighbours:
                for e in range(count):
                    for lane in range(m):
                        y[start + e * inner + lane] = rows[e * LANES + lane] * after[e]
            else:
                for lane in range(m):
                    base = bases[lane]
                    for e in range(count):
                        y[base + e * inner] = rows[e * LANES + lane] * after[e]
            line += m

    return loop


@uses_cuda
def cuda_kernel(size: int, width: int) -> Callable[..., None]:
    """Return the body of the CUDA kernel as a Python function, for jit, PTX and the simulator alike.

    `x` and `y` are flat memory of floats. The key is an int64 in memory if `has_key`, else it is `word`. A thread holds
    one element, and a block of threads has `size` threads for each of its lines.
    """
    from numba import float32, float64

    floating = float32 if width == 32 else float64
    threads = threads_of(size)
    lines_of_block = threads // size
    factor = floating_of(width)(size**-0.5)

    def kernel(x, y, lines, inner, pattern, is_random, is_inverse, key, has_key, word):
        shared = cuda.shared.array(threads, floating)
        t = cuda.threadIdx.x
        # Neighbouring threads take neighbours in memory: elements of a line, or the same element of several lines.
        step = 1 if inner == 1 else lines_of_block
        element = t // step % size
        line = cuda.blockIdx.x * lines_of_block + (t // size if inner == 1 else t % lines_of_block)
        place = (line // inner * size + element) * inner + line % inner
        key0, key1 = key_words(key[0] if has_key else word)
        # The number is negated, not multiplied by a sign: such a product could be fused with the first sum.
        negated = is_negated(element, pattern, is_random, key0, key1) != 0
        value = floating(0.0)
        if line < lines:
            value = -x[place] if negated and not is_inverse else x[place]
        h = 1
        while h < size:
            shared[t] = value
            cuda.syncthreads()
            other = shared[t ^ (h * step)]
            cuda.syncthreads()
            value = floating(upper(other, value) if element & h else lower(value, other))
            h *= 2
        if line < lines:
            y[place] = (-value if negated and is_inverse else value) * factor

    return kernel


def threads_of(size: int) -> int:
    """Return the number of threads of a block for groups of this size."""
    return max(CUDA_THREADS, size)


@cache
def cuda_loop(size: int, width: int) -> CudaKernel:
    """Return the kernel with its launch, in blocks whose `threads` hold whole groups."""
    from fpsim.compiling.card import FLOATS32, FLOATS64, INTEGER, INTEGERS, CudaKernel

    floats = FLOATS32 if width == 32 else FLOATS64
    signature = floats, floats, *[INTEGER] * 5, INTEGERS, INTEGER, INTEGER
    body = partial(cuda_kernel, size, width)
    return CudaKernel(body, signature, "hadamard", size, width, threads=threads_of(size))
