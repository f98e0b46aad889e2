"""Blocks on a card: the kernel for blocks that follow each other in memory, which is how most tensors are cut.

The number of threads that share a block is compiled in. A thread rounds 16 bytes, and indices are divided by constants
only. With one scale for the whole tensor, the same kernel takes any number of elements. A second kernel finds the amax
of a tensor, and the numbers that all its blocks share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from fpsim.compiling.compile import CUDA_THREADS, cuda, float32_bits, float32_of, uses_cuda
from fpsim.compiling.deferred import njit
from fpsim.kernels.blocks import (
    COUNTED,
    FLOAT32_LARGEST,
    GAINED,
    INFINITY,
    MAGNITUDE,
    MASK,
    NAN,
    PARAMETERS,
    amax_of_vector,
    counted_amax_of_vector,
    counted_magnitude,
    is_near,
    make_apply,
    make_apply_far,
    make_block_scale,
    make_tensor_scale,
    special_element,
    special_vector,
)
from fpsim.kernels.core import draws_noise, make_numbers_from, with_ends
from fpsim.kernels.threefry import NOISE_BLOCK, NOISE_LANES, exchange_halves, key_words, noise_words

if TYPE_CHECKING:
    from fpsim.compiling.card import CudaKernel

VECTOR = 4  # float32 that a thread takes
WARP = NOISE_BLOCK // VECTOR  # threads that share a block of noise, and so divide those of a launch
ONE_SCALE = 0  # in place of the size of a block: one scale for the whole tensor
# Sizes of blocks. A team has at most a warp's threads, so that a launch of whole warps holds whole teams.
SIZES = tuple(VECTOR << i for i in range(6))

# Flags of `amax_kernel`. AMAX or MULTIPLIER: the first of the two shared numbers is the amax or the multiplier.
# OF_TENSOR: the second number is the amax. SATURATES: infinity saturates.
AMAX, MULTIPLIER, OF_TENSOR, SATURATES = 1, 2, 4, 8
PLACES = 4  # the two numbers that blocks share, the amax, and how many blocks of threads are done; all begin as -1
_FIRST, _SECOND, FOUND, _DONE = range(PLACES)


def dense_size(axes: Sequence[int]) -> int | None:
    """Return the size of the blocks if `dense_kernel` can round them, else None. axes: the fields of BlockAxes."""
    _, _, _, columns, inner, r, c = axes
    return c if inner == 1 and r == 1 and c in SIZES and columns % c == 0 else None


def grid_of(count: int, threads: int) -> int:
    """Return how many blocks of `threads` threads round `count` elements."""
    return -(-count // (VECTOR * threads))


def amax_of_team(most, shared, thread, team):
    """Return the largest value of a team, after each thread has written one to shared memory and passed a barrier."""
    leader = np.uint64(thread // np.uint32(team)) * np.uint64(team)
    for j in range(team):
        most = max(most, shared[leader + np.uint64(j)])
    return most


def leave_noise(words, thread, vector, key0, key1):
    """Write this thread's words of a block of noise into shared memory, each at the index of its element.

    Two threads have the same counter, and each writes half of the counter's words: see threefry.NOISE_BLOCK.
    """
    u32, u64, lanes = np.uint32, np.uint64, np.uint64(NOISE_LANES)
    w0, w1, w2, w3 = noise_words(vector // u64(WARP) * lanes + vector % lanes, key0, key1)
    is_second = thread % u32(WARP) >= lanes
    first, second = (w2, w3) if is_second else (w0, w1)
    at = u64(thread // u32(WARP)) * u64(NOISE_BLOCK) + (u64(NOISE_BLOCK // 2) if is_second else u64(0))
    at += u64(thread % u32(NOISE_LANES))
    words[at], words[at + lanes] = first, exchange_halves(first)
    words[at + u64(2) * lanes], words[at + u64(3) * lanes] = second, exchange_halves(second)


@uses_cuda
def dense_kernel(rule: int, shape: int, scale_shape: int, kind: int, size: int) -> Callable[..., None]:
    """Return the body of a CUDA kernel as a Python function, for jit, PTX and the simulator alike.

    x, y: `n` uint32 each, in blocks of `size`. With ONE_SCALE `n` may be any number, and the amax or the multiplier is
        given.
    is_aligned: whether x and y both begin at multiples of 16 bytes.
    The other arguments are those of `block_teams.rounding_kernel`.
    """
    from numba import uint32

    from fpsim.compiling.card import IS_SIMULATED, VECTOR_BYTES, vector_access

    tensor_scale, block_scale = make_tensor_scale(kind), make_block_scale(scale_shape, kind)
    apply, apply_far = make_apply(rule, shape, kind), make_apply_far(rule, shape, kind)
    load, store = vector_access(32)
    u32, u64, is_stochastic, team = np.uint32, np.uint64, draws_noise(rule), size // VECTOR
    numbers_from, has_barrier, can_be_far = make_numbers_from(32), team > 1 or is_stochastic, kind <= GAINED
    alignment = None if IS_SIMULATED else VECTOR_BYTES  # so that neighbours in shared memory are read at once
    shared_amaxes, shared_words = CUDA_THREADS if team > 1 else 1, CUDA_THREADS * VECTOR if is_stochastic else 1

    def kernel(x, y, n, is_aligned, p, given, scales, has_scales, key, has_key, word):
        shared = cuda.shared.array(shared_amaxes, uint32, alignment)
        words = cuda.shared.array(shared_words, uint32, alignment)
        thread, whole = u32(cuda.threadIdx.x), tensor_scale(given[1], p)
        vector = cuda.grid(1)
        first = vector * VECTOR
        x0, x1, x2, x3, amax = u32(0), u32(0), u32(0), u32(0), u32(0)
        exists = first + VECTOR <= n
        if exists:
            if is_aligned:
                x0, x1, x2, x3 = load(x, vector)
            else:
                x0, x1, x2, x3 = x[first], x[first + 1], x[first + 2], x[first + 3]
        amax = amax_of_vector(x0, x1, x2, x3)
        has_specials = amax >= MASK
        if has_specials:
            amax = counted_amax_of_vector(x0, x1, x2, x3, u32(p[COUNTED]))
        if team > 1:
            shared[thread] = amax
        # Noise goes through shared memory: a counter's words belong to elements 16 apart, a thread's to neighbours.
        if is_stochastic:
            key0, key1 = key_words(key[0] if has_key else word)
            leave_noise(words, thread, u64(vector), key0, key1)
        if has_barrier:
            cuda.syncthreads()
        if team > 1:
            amax = amax_of_team(amax, shared, thread, team)
        scale = block_scale(amax, given[0], whole, p)
        numbers = with_ends(numbers_from(p), scale.origin, scale.largest, scale.overflow, scale.smallest)
        if has_scales and (thread % u32(team) == u32(0) and exists if team > 0 else vector == 0):
            scales[vector // team if team > 0 else 0] = scale.back
        near, mine = not can_be_far or is_near(scale.exponent, p), u64(u32(thread * u32(VECTOR)))
        n0, n1, n2, n3 = u32(0), u32(0), u32(0), u32(0)
        if exists and near:
            if is_stochastic:
                n0, n1, n2, n3 = words[mine], words[mine + u64(1)], words[mine + u64(2)], words[mine + u64(3)]
            y0 = apply(x0, n0, numbers, scale.by, scale.back, whole)
            y1 = apply(x1, n1, numbers, scale.by, scale.back, whole)
            y2 = apply(x2, n2, numbers, scale.by, scale.back, whole)
            y3 = apply(x3, n3, numbers, scale.by, scale.back, whole)
            if has_specials:
                y0, y1, y2, y3 = special_vector((x0, x1, x2, x3), (y0, y1, y2, y3), scale.back, p)
            if is_aligned:
                store(y, vector, (y0, y1, y2, y3))
            else:
                y[first], y[first + 1], y[first + 2], y[first + 3] = y0, y1, y2, y3
        # The slow path is for a scale that 32 bits cannot hold, and for the last elements of a tensor with one scale.
        elif can_be_far or team == 0:
            for i in range(first, min(first + VECTOR, n)):
                bits = words[mine + u64(i - first)] if is_stochastic else u32(0)
                if team == 0 and near:
                    rounded = apply(x[i], bits, numbers, scale.by, scale.back, whole)
                    y[i] = special_element(x[i], rounded, scale.back, p)
                elif can_be_far:
                    y[i] = special_element(x[i], apply_far(x[i], bits, scale.exponent, p), scale.back, p)

    return kernel


@cache
def cuda_rounding(rule: int, shape: int, scale_shape: int, kind: int, size: int) -> CudaKernel:
    """Return the kernel as a CudaKernel, which launches it; `grid_of` returns the number of blocks."""
    from numba import types

    from fpsim.compiling.card import FLOATS32, INTEGER, INTEGERS, WORDS32, CudaKernel, for_card

    parameters = types.UniTuple(types.int64, PARAMETERS)
    signature = WORDS32, WORDS32, INTEGER, INTEGER, parameters, INTEGERS, FLOATS32, INTEGER, INTEGERS, INTEGER, INTEGER
    words = rule, shape, scale_shape, kind, size
    return CudaKernel(lambda: for_card(dense_kernel(*words)), signature, "dense", *words)


@njit(inline="always")
def multiplier(amax, largest):
    """Return largest / amax as float32; 1 where amax is 0 (NVIDIA TransformerEngine, Float8CurrentScaling).

    The arguments and the result are bit patterns. The result for an infinite amax has no meaning.
    """
    nonzero = amax if amax != np.uint32(0) else largest
    return float32_bits(min(np.float32(float32_of(largest) / float32_of(nonzero)), FLOAT32_LARGEST))


@uses_cuda
def amax_kernel() -> Callable[..., None]:
    """Return the body of a CUDA kernel that finds the pattern of the amax of `n` uint32, with `counted_magnitude`.

    is_aligned: whether x begins at a multiple of 16 bytes.
    largest: the pattern of the largest value of the elements' format.
    asked: flags of the numbers to write. The block of threads that finishes last writes these numbers.
    out: PLACES int64.
    """
    from numba import int64, uint32

    from fpsim.compiling.card import vector_access

    load, _ = vector_access(32)
    u32 = np.uint32

    def kernel(x, n, is_aligned, largest, asked, out):
        shared = cuda.shared.array(CUDA_THREADS, uint32)
        t, thread, step, amax = cuda.threadIdx.x, cuda.grid(1), cuda.gridsize(1), u32(0)
        counted = INFINITY if asked & SATURATES else MAGNITUDE
        vectors = n // 4 if is_aligned else 0
        for i in range(thread, vectors, step):
            x0, x1, x2, x3 = load(x, i)
            # Most vectors hold no mask, infinity or NaN: one comparison of the largest of all patterns finds the few
            # vectors that do.
            most = amax_of_vector(x0, x1, x2, x3)
            if most >= MASK:
                most = counted_amax_of_vector(x0, x1, x2, x3, counted)
            amax = max(amax, most)
        for i in range(vectors * 4 + thread, n, step):
            amax = max(amax, counted_magnitude(x[i], counted))
        shared[t] = amax
        half = cuda.blockDim.x // 2
        cuda.syncthreads()
        while half > 0:
            if t < half:
                shared[t] = max(shared[t], shared[t + half])
            cuda.syncthreads()
            half //= 2
        if t > 0:
            return
        cuda.atomic.max(out, FOUND, int64(shared[0]))
        # A thread that sees this block as done also sees its result.
        cuda.threadfence()
        if cuda.atomic.add(out, _DONE, 1) == cuda.gridDim.x - 2:  # it began at -1
            cuda.threadfence()
            found = u32(cuda.atomic.max(out, FOUND, 0))
            if asked & MULTIPLIER and found >= INFINITY:
                out[_FIRST] = int64(float32_bits(np.float32(1)) if asked & SATURATES else NAN)
            elif asked & MULTIPLIER:
                out[_FIRST] = int64(multiplier(found, u32(largest)))
            elif asked & AMAX:
                out[_FIRST] = int64(found)
            if asked & OF_TENSOR:
                out[_SECOND] = int64(found)

    return kernel


@cache
def cuda_amax() -> CudaKernel:
    """Return the kernel with its launch, in any number of blocks."""
    from numba import types

    from fpsim.compiling.card import INTEGER, WORDS32, CudaKernel, for_card

    signature = WORDS32, INTEGER, INTEGER, INTEGER, INTEGER, types.Array(types.int64, 1, "C")
    return CudaKernel(lambda: for_card(amax_kernel()), signature, "amax")
