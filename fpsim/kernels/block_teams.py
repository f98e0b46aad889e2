"""Blocks on a card: kernels in which a team of threads shares each block of the format.

Neighbouring threads access neighbouring addresses: within one block if the block is contiguous in memory, otherwise
across blocks. In this way accesses coalesce into whole sectors, and many threads share a long row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fpsim.compiling.compile import CUDA_THREADS, cuda, uses_cuda
from fpsim.compiling.deferred import njit
from fpsim.kernels.block_choice import GIVEN, make_error
from fpsim.kernels.block_loops import place_of
from fpsim.kernels.block_tally import end_of_range, has_scale, make_facts
from fpsim.kernels.blocks import (
    COUNTED,
    GAINED,
    MASK,
    PARAMETERS,
    counted_magnitude,
    is_near,
    magnitude_of,
    make_apply,
    make_apply_far,
    make_block_scale,
    make_tensor_scale,
    second_place,
    special_element,
)
from fpsim.kernels.containers import leading_zeros
from fpsim.kernels.core import draws_noise, make_numbers_from, with_ends
from fpsim.kernels.statistics import (
    BLOCK_FIELDS,
    BLOCK_SATURATED,
    BLOCK_SUBNORMAL,
    BLOCKS,
    LARGEST_SCALE,
    SCALE_OVERFLOW,
    SCALE_UNDERFLOW,
    SMALLEST_SCALE,
    ZERO_BLOCKS,
)
from fpsim.kernels.threefry import element_noise, key_words

if TYPE_CHECKING:
    from fpsim.compiling.card import CudaKernel

# The number of elements of a block for each thread of its team: with fewer, the scale would take most of the time.
ELEMENTS = 4
SECTOR = 8  # float32 numbers in 32 bytes, which is the least that a card reads
BUSY = 1 << 17  # number of threads that fill a card
MANY = 1 << 31  # number of elements from which on places need more than 32 bits
NO_SCALE = (1 << 63) - 1  # in place of the smallest scale


def grid_of(axes: Sequence[int], threads: int) -> tuple[int, int]:
    """Return the number of CUDA blocks of `threads` threads in a launch, and the threads per team, a power of two.

    axes: the fields of BlockAxes.
    """
    outer, rows, middle, columns, inner, r, c = axes
    blocks, size = outer * -(-rows // r) * middle * -(-columns // c) * inner, min(r, rows) * min(c, columns)
    if inner == 1:
        wanted, most = max(size // ELEMENTS, min(SECTOR, size // 2)), threads
    # Neighbours belong to other blocks here: a team only adds threads.
    else:
        wanted, most = min(size // ELEMENTS, -(-BUSY // blocks)), threads // SECTOR
    team = 1
    while 2 * team <= min(wanted, most):
        team *= 2
    return -(-blocks // (threads // team)), team


def is_small(axes: Sequence[int]) -> bool:
    """Return whether the indices of all elements are below 2**31, so that threads can compute them in 32 bits."""
    return math.prod(axes[:5]) < MANY and max(axes) < MANY


@njit(inline="always")
def log2(n):
    """Return the logarithm of a power of two, a uint32."""
    return np.uint32(np.uint32(31) - np.uint32(leading_zeros(n)))


def place_in_team(inner, team):
    """Return this thread's block, its number in the team, and the team's first index and step in shared memory.

    The number of threads of a CUDA block and of a team is a power of two.
    """
    u32, u64 = np.uint32, np.uint64
    thread, threads, size = u32(cuda.threadIdx.x), u32(cuda.blockDim.x), u32(team)
    log2_team = log2(size)
    teams = u32(threads >> log2_team)
    first = np.int64(cuda.blockIdx.x) * np.int64(teams)
    if inner == 1:
        number, member = u32(thread >> log2_team), u32(thread & u32(size - u32(1)))
        return first + np.int64(number), member, u64(thread) - u64(member), u64(1)
    number, member = u32(thread & u32(teams - u32(1))), u32(thread >> log2(teams))
    return first + np.int64(number), member, u64(number), u64(teams)


@njit(inline="always")
def divided(n, d):
    """Return quotient and remainder of two uint32: by a shift for a power of two, as most divisors are."""
    u32 = np.uint32
    is_power = u32(d & u32(d - u32(1))) == u32(0)
    q = u32(n >> log2(d)) if is_power else u32(n // d)
    return q, u32(n - u32(q * d))


@njit(inline="always")
def place_in_32_bits(unit, outer, rows, middle, columns, inner, r, c):
    """Return what `block_loops.place_of` returns, computed in 32 bits, for small tensors."""
    # A card divides 64-bit integers slowly.
    u32 = np.uint32
    height, width, along = u32(r), u32(c), u32(columns)
    row_blocks, _ = divided(u32(rows + r - 1), height)
    column_blocks, _ = divided(u32(columns + c - 1), width)
    rest, lane = divided(u32(unit), u32(inner))
    rest, column = divided(rest, column_blocks)
    rest, m = divided(rest, u32(middle))
    o, row = divided(rest, row_blocks)
    row, column = u32(row * height), u32(column * width)
    line = u32(u32(u32(o * u32(rows) + row) * u32(middle)) + m)
    base = u32(u32(u32(u32(line * along) + column) * u32(inner)) + lane)
    height, width = min(height, u32(u32(rows) - row)), min(width, u32(along - column))
    return base, height if o < u32(outer) else u32(0), width, u32(u32(u32(middle) * along) * u32(inner))


@cache
def _make_walk(small: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return two functions by which a thread iterates over its elements of a block: `begin` and `further`."""
    place, integer = (place_in_32_bits, np.uint32) if small else (place_of, np.int64)

    @njit(inline="always")
    def begin(unit, member, team, outer, rows, middle, columns, inner, r, c):
        """Return row, column and index in memory of the first element, and the limits and distances for `further`."""
        base, height, length, step = place(unit, outer, rows, middle, columns, inner, r, c)
        j, k, down, along, apart = integer(0), integer(member), integer(0), integer(team), integer(inner)
        # Divisions are needed only here: with the quotients known, each further step needs additions and a comparison.
        if along >= length:
            j, k, down, along = (
                integer(k // length),
                integer(k % length),
                integer(along // length),
                integer(along % length),
            )
        index = integer(base + integer(integer(j * step) + integer(k * apart)))
        ahead, back = integer(integer(down * step) + integer(along * apart)), integer(step - integer(length * apart))
        return (j, k, index), (height, length, down, along, ahead, back)

    @njit(inline="always")
    def further(at, walk):
        """Return row, column and index of the thread's next element, a team's size further on."""
        j, k, index = at
        _, length, down, along, ahead, back = walk
        j, k, index = integer(j + down), integer(k + along), integer(index + ahead)
        if k >= length:
            j, k, index = integer(j + integer(1)), integer(k - length), integer(index + back)
        return j, k, index

    return begin, further


def _make_amax(further: Callable[..., Any]) -> Callable[..., Any]:
    def amax_of_team(x, start, walk, shared, member, leader, apart, team, counted):
        """Return the pattern of a block's largest magnitude, and whether this thread has masks, infinities or NaN.

        All threads have to call this function, including threads without a block, because it has barriers.
        """
        amax, at = np.uint32(0), start
        while at[0] < walk[0]:
            amax = max(amax, magnitude_of(x[at[2]]))
            at = further(at, walk)
        has_specials = amax >= MASK
        if has_specials:
            amax, at = np.uint32(0), start
            while at[0] < walk[0]:
                amax = max(amax, counted_magnitude(x[at[2]], counted))
                at = further(at, walk)
        mine, half = leader + np.uint64(member) * apart, np.uint32(np.uint32(team) >> np.uint32(1))
        shared[mine] = amax
        while half > np.uint32(0):
            cuda.syncthreads()
            if member < half:
                shared[mine] = max(shared[mine], shared[mine + np.uint64(half) * apart])
            half = np.uint32(half >> np.uint32(1))
        cuda.syncthreads()
        return shared[leader], has_specials

    return amax_of_team


@uses_cuda
def rounding_kernel(rule: int, shape: int, scale_shape: int, kind: int, small: bool) -> Callable[..., None]:
    """Return the body of a CUDA kernel as a Python function, for jit, PTX and the simulator alike.

    x, y: flat memory of uint32.
    outer to c: the dimensions of BlockAxes.
    p: a tuple of a BlockPlan's integers.
    given: int64, as `shared` of the CPU's loops.
    scales: a float32 for each block, if `has_scales`.
    key: an int64 in memory if `has_key`; otherwise the key is `word`.
    team: as `grid_of` returns it. small: as `is_small` returns it.
    """
    from numba import uint32

    tensor_scale, block_scale = make_tensor_scale(kind), make_block_scale(scale_shape, kind)
    apply, apply_far = make_apply(rule, shape, kind), make_apply_far(rule, shape, kind)
    begin, further = _make_walk(small)
    amax_of_team = _make_amax(further)
    u32, is_stochastic, numbers_from = np.uint32, draws_noise(rule), make_numbers_from(32)

    def kernel(x, y, outer, rows, middle, columns, inner, r, c, p, given, scales, has_scales, key, has_key, word, team):
        shared = cuda.shared.array(CUDA_THREADS, uint32)
        unit, member, leader, apart = place_in_team(inner, team)
        at, walk = begin(unit, member, team, outer, rows, middle, columns, inner, r, c)
        amax, has_specials = u32(0), True
        if given[0] < 0:
            amax, has_specials = amax_of_team(x, at, walk, shared, member, leader, apart, team, u32(p[COUNTED]))
        whole = tensor_scale(
            given[second_place(given[0], unit, (columns + c - 1) // c)] if walk[0] > 0 else given[1], p
        )
        # Every thread of a team computes the scale, because broadcasting the scale would cost one more barrier.
        scale = block_scale(amax, given[0], whole, p)
        if has_scales and member == 0 and walk[0] > 0:
            scales[unit] = scale.back
        near = kind > GAINED or is_near(scale.exponent, p)
        numbers = with_ends(numbers_from(p), scale.origin, scale.largest, scale.overflow, scale.smallest)
        key0, key1 = key_words(key[0] if has_key else word)
        while at[0] < walk[0]:
            index, bits = at[2], u32(0)
            number = x[index]
            if is_stochastic:
                bits = element_noise(index, key0, key1)
            if near:
                rounded = apply(number, bits, numbers, scale.by, scale.back, whole)
            else:
                rounded = apply_far(number, bits, scale.exponent, p)
            y[index] = special_element(number, rounded, scale.back, p) if has_specials else rounded
            at = further(at, walk)

    return kernel


@uses_cuda
def tally_kernel(scale_shape: int, kind: int, small: bool) -> Callable[..., None]:
    """Return the body of a kernel that tallies a rounding from `x` to `y`: one row of BLOCK_FIELDS, int64 at `out`.

    The arguments are those of `block_tally.cpu_loop`, whose `shared` is `given` here. A block of threads counts in
    shared memory.
    """
    from numba import int64, uint32

    facts, tensor_scale = make_facts(scale_shape, kind), make_tensor_scale(kind)
    u32, i64, (begin, further) = np.uint32, np.int64, _make_walk(small)
    amax_of_team = _make_amax(further)

    def kernel(x, y, outer, rows, middle, columns, inner, r, c, p, given, out, normal, saturated, of_scale, team):
        shared = cuda.shared.array(CUDA_THREADS, uint32)  # one array a line: the simulator tells them apart by it
        counts = cuda.shared.array(BLOCK_FIELDS, int64)
        thread = cuda.threadIdx.x
        for field in range(thread, BLOCK_FIELDS, cuda.blockDim.x):
            counts[field] = NO_SCALE if field == SMALLEST_SCALE else 0
        unit, member, leader, apart = place_in_team(inner, team)
        at, walk = begin(unit, member, team, outer, rows, middle, columns, inner, r, c)
        amax = u32(max(given[2], i64(0)))
        if given[0] < 0:
            amax, _ = amax_of_team(x, at, walk, shared, member, leader, apart, team, u32(p[COUNTED]))
        # `amax_of_team` has barriers, which make the zeroed counts visible; without it, a barrier is needed here.
        else:
            cuda.syncthreads()
        if walk[0] > 0:
            counted = member == 0 and (given[0] < 0 or unit == 0)
            if counted:
                cuda.atomic.add(counts, BLOCKS, 1)
                if amax == u32(0):
                    cuda.atomic.add(counts, ZERO_BLOCKS, 1)
            of_second = given[second_place(given[0], unit, (columns + c - 1) // c)]
            if has_scale(amax, of_second, p):
                whole = tensor_scale(of_second, p)
                is_under, is_over, scale, low, high = facts(amax, given[0], whole, p, normal, saturated, of_scale)
                if counted and is_under:
                    cuda.atomic.add(counts, SCALE_UNDERFLOW, 1)
                if counted and is_over:
                    cuda.atomic.add(counts, SCALE_OVERFLOW, 1)
                if member == 0 and scale > 0:
                    cuda.atomic.min(counts, SMALLEST_SCALE, scale)
                    cuda.atomic.max(counts, LARGEST_SCALE, scale)
                subnormals, saturations = 0, 0
                while at[0] < walk[0]:
                    is_subnormal, is_saturated = end_of_range(x[at[2]], y[at[2]], low, high)
                    subnormals += is_subnormal
                    saturations += is_saturated
                    at = further(at, walk)
                if subnormals > 0:
                    cuda.atomic.add(counts, BLOCK_SUBNORMAL, subnormals)
                if saturations > 0:
                    cuda.atomic.add(counts, BLOCK_SATURATED, saturations)
        cuda.syncthreads()
        for field in range(thread, BLOCK_FIELDS, cuda.blockDim.x):
            if field == SMALLEST_SCALE:
                cuda.atomic.min(out, field, counts[field])
            elif field == LARGEST_SCALE:
                cuda.atomic.max(out, field, counts[field])
            elif counts[field] > 0:
                cuda.atomic.add(out, field, counts[field])

    return kernel


@uses_cuda
def choice_kernel(error: int, small: bool) -> Callable[..., None]:
    """Return the body of a kernel that chooses among results with several scales, as `block_choice.cpu_along` does.

    `chosen` is int64.
    """
    from numba import float64

    of_element, joined = make_error(error)
    (begin, further), places = _make_walk(small), 2 * CUDA_THREADS

    def kernel(x, kept, other, outer, rows, middle, columns, inner, r, c, errors, chosen, candidate, ties, team):
        shared = cuda.shared.array(places, float64)
        unit, member, leader, apart = place_in_team(inner, team)
        start, walk = begin(unit, member, team, outer, rows, middle, columns, inner, r, c)
        is_taken = False
        if ties == GIVEN:
            is_taken = walk[0] > 0 and chosen[unit] == candidate
        else:
            of_kept, of_other, at = 0.0, 0.0, start
            while at[0] < walk[0]:
                i = at[2]
                if candidate == 1:
                    of_kept = joined(of_kept, of_element(x[i], kept[i]))
                of_other = joined(of_other, of_element(x[i], other[i]))
                at = further(at, walk)
            # Both errors are reduced in one pass over shared memory, in two halves that are CUDA_THREADS apart.
            mine, half = leader + np.uint64(member) * apart, np.uint32(np.uint32(team) >> np.uint32(1))
            second = np.uint64(CUDA_THREADS)
            shared[mine], shared[mine + second] = of_kept, of_other
            while half > np.uint32(0):
                cuda.syncthreads()
                if member < half:
                    beside = mine + np.uint64(half) * apart
                    shared[mine] = joined(shared[mine], shared[beside])
                    shared[mine + second] = joined(shared[mine + second], shared[beside + second])
                half = np.uint32(half >> np.uint32(1))
            cuda.syncthreads()
            before, after = shared[leader], shared[leader + second]
            if candidate != 1 and walk[0] > 0:
                before = errors[unit]
            is_taken = after < before or (ties == 1 and after == before)
            # No thread writes the block's error before all threads have read it.
            cuda.syncthreads()
            if member == 0 and walk[0] > 0:
                errors[unit] = after if is_taken else before
                if is_taken or candidate == 1:
                    chosen[unit] = candidate if is_taken else 0
        at = start
        while is_taken and at[0] < walk[0]:
            kept[at[2]] = other[at[2]]
            at = further(at, walk)

    return kernel


@cache
def cuda_choice(error: int, small: bool = True) -> CudaKernel:
    """Return the kernel with its launch; `grid_of` returns the number of blocks."""
    from fpsim.compiling.card import FLOATS32, FLOATS64, INTEGER, INTEGERS, CudaKernel, for_card

    signature = FLOATS32, FLOATS32, FLOATS32, *[INTEGER] * 7, FLOATS64, INTEGERS, INTEGER, INTEGER, INTEGER
    return CudaKernel(lambda: for_card(choice_kernel(error, small)), signature, "block_choice", error, small)


@cache
def cuda_rounding(rule: int, shape: int, scale_shape: int, kind: int, small: bool = True) -> CudaKernel:
    """Return the kernel with its launch; `grid_of` returns the number of blocks."""
    from numba import types

    from fpsim.compiling.card import FLOATS32, INTEGER, INTEGERS, WORDS32, CudaKernel, for_card

    parameters = types.UniTuple(types.int64, PARAMETERS)
    key = INTEGERS, INTEGER, INTEGER
    signature = WORDS32, WORDS32, *[INTEGER] * 7, parameters, INTEGERS, FLOATS32, INTEGER, *key, INTEGER
    words = rule, shape, scale_shape, kind, small
    return CudaKernel(lambda: for_card(rounding_kernel(*words)), signature, "blocks", *words)


@cache
def cuda_tally(scale_shape: int, kind: int, small: bool = True) -> CudaKernel:
    """Return the kernel with its launch; `grid_of` returns the number of blocks."""
    from numba import types

    from fpsim.compiling.card import INTEGER, INTEGERS, WORDS32, CudaKernel, for_card

    parameters, out = types.UniTuple(types.int64, PARAMETERS), types.Array(types.int64, 1, "C")
    signature = WORDS32, WORDS32, *[INTEGER] * 7, parameters, INTEGERS, out, *[types.float64] * 3, INTEGER
    words = scale_shape, kind, small
    return CudaKernel(lambda: for_card(tally_kernel(*words)), signature, "block_tally", *words)
