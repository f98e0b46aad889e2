"""Rounding: the loops that round the patterns of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpsim.compiling.compile import CUDA_THREADS, cuda, pointer, stack_array, uses_cuda
from fpsim.compiling.deferred import carray, njit
from fpsim.compiling.native import Loop, compiled_loop
from fpsim.kernels.codebooks import make_rounding
from fpsim.kernels.containers import integers, make_limit, make_value
from fpsim.kernels.core import (
    BESIDE_GAP,
    BINARY32,
    BINARY64,
    GAP,
    NUMBERS,
    draws_noise,
    make_at_scale,
    make_numbers_from,
    make_round,
)
from fpsim.kernels.threefry import NOISE_BLOCK, NOISE_LANES, exchange_halves, fill_noise, key_words, noise_words

if TYPE_CHECKING:
    from fpsim.compiling.card import CudaKernel


class Masks(NamedTuple):
    """Patterns that stay unchanged because they do not stand for numbers: see launch.masks_of.

    magnitude: patterns of this magnitude stay; 0 stands for none.
    keeps_infinity: whether minus infinity stays too.
    """

    magnitude: int = 0
    keeps_infinity: bool = False


NO_MASKS = Masks()


@cache
def _make_is_mask(width: int, masks: Masks) -> Callable[..., Any]:
    """Return a compiled function that says whether a pattern stays as it is."""
    uint, _ = integers(width)
    magnitude_mask, unchanged = uint((1 << (width - 1)) - 1), uint(masks.magnitude)
    minus_infinity = uint((BINARY32 if width == 32 else BINARY64).bits(float("-inf")))
    has_any, keeps_infinity = masks.magnitude != 0, masks.keeps_infinity

    @njit(forceinline=True)
    def is_mask(word):
        if not has_any:
            return False
        is_largest = uint(word & magnitude_mask) == unchanged
        return is_largest or word == minus_infinity if keeps_infinity else is_largest

    return is_mask  # type: ignore[no-any-return]


@cache
def make_lie_beside(width: int) -> Callable[..., Any]:
    """Return a compiled function that says whether no number of an array lies in the gap of a GAP format.

    Inside the gap, a stochastic rounding multiplies integers of 64 bits.
    """
    uint, _ = integers(width)
    magnitude_mask, one = uint((1 << (width - 1)) - 1), uint(1)

    @njit(inline="always")
    def lie_beside(xs, smallest):
        inside = uint(0)
        for i in range(len(xs)):
            # Zero lies outside the gap: minus one, it wraps around to the largest integer.
            less = uint(uint(xs[i] & magnitude_mask) - one)
            inside = uint(inside | uint(less < uint(smallest - one)))
        return inside == uint(0)

    return lie_beside  # type: ignore[no-any-return]


@cache
def _cpu_body(
    rule: int, shape: int, width: int, in_place: bool, limited: bool, masks: Masks = NO_MASKS
) -> Callable[..., Any]:
    """Return a compiled function that rounds the patterns of array `x` into array `y`.

    in_place: whether the two are one array; otherwise they share no memory.

    limited: patterns of a magnitude above `limit` stay as they are, and the largest magnitude is returned.
    masks: the patterns that stay as they are.
    """
    round_bits, is_mask, (uint, _) = make_rounding(rule, shape, width), _make_is_mask(width, masks), integers(width)
    numbers_from, at_scale, is_stochastic = make_numbers_from(width), make_at_scale(width), draws_noise(rule)
    to_top, magnitude_mask = uint(width - 32), uint((1 << (width - 1)) - 1)
    new_noise, can_skip = stack_array(NOISE_BLOCK, np.uint32), shape == GAP and is_stochastic
    round_beside, lie_beside = make_round(rule, BESIDE_GAP, width) if can_skip else round_bits, make_lie_beside(width)

    @njit(inline="always")
    def body(x, y, n, p, key, block, log2_scale, limit):
        numbers, amax = at_scale(numbers_from(p), log2_scale), uint(0)
        if is_stochastic:
            noise = new_noise()
            for start in range(0, n, NOISE_BLOCK):
                fill_noise(noise, block, key[0], key[1])
                block += 1
                ys = y[start : start + NOISE_BLOCK]
                xs = ys if in_place else x[start : start + NOISE_BLOCK]
                # A whole block of noise is tested for numbers in the gap, which are rare: without any, the loop needs
                # no 64-bit products.
                beside = can_skip and lie_beside(xs, numbers.smallest)
                for i in range(len(ys)):
                    bits, word = uint(uint(noise[i]) << to_top), xs[i]
                    rounded = round_beside(word, bits, numbers) if beside else round_bits(word, bits, numbers)
                    rounded = word if is_mask(word) else rounded
                    if limited:
                        magnitude = uint(word & magnitude_mask)
                        amax = max(amax, magnitude)
                        rounded = word if magnitude > limit else rounded
                    ys[i] = rounded
        else:
            for i in range(n):
                word = x[i]
                rounded = round_bits(word, uint(0), numbers)
                rounded = word if is_mask(word) else rounded
                if limited:
                    magnitude = uint(word & magnitude_mask)
                    amax = max(amax, magnitude)
                    rounded = word if magnitude > limit else rounded
                y[i] = rounded
        return amax

    return body  # type: ignore[no-any-return]


@cache
def cpu_loop(rule: int, shape: int, width: int, masks: Masks = NO_MASKS) -> Loop:
    """Return a loop that rounds `n` patterns from address `src` to address `dst` (which may be `src`).

    `parameters` is the address of a Plan's numbers, and `key` the address of two uint32 words. The noise starts at
    block `block`, so that a tensor cut at multiples of NOISE_BLOCK gets the same bits. `log2_scale` is the address of
    an int64: see core.at_scale. masks: the patterns that stay as they are. The loop runs without the GIL, and allocates
    only one block of noise.
    """
    uint, _ = integers(width)
    out_of_place, in_place = (_cpu_body(rule, shape, width, same, False, masks) for same in (False, True))

    @compiled_loop(rule, shape, width, *masks)
    def loop(src, dst, n, parameters, key, block, log2_scale):
        p = carray(pointer(parameters), (NUMBERS,), np.int64)
        scale = carray(pointer(log2_scale), (1,), np.int64)[0]
        k = carray(pointer(key), (2,), np.uint32)
        y = carray(pointer(dst), (n,), uint)
        # There are two bodies, because LLVM vectorises a loop over one array, or over two arrays that it finds disjoint
        # at run time.
        if src == dst:
            in_place(y, y, n, p, k, block, scale, uint(0))
        else:
            out_of_place(carray(pointer(src), (n,), uint), y, n, p, k, block, scale, uint(0))

    return loop


@cache
def cpu_fitting_loop(rule: int, shape: int, width: int) -> Loop:
    """Return a loop that rounds, in place, those of `n` patterns at address `src` whose magnitude is at most `ceiling`.

    The loop returns the largest magnitude of all patterns, from the same pass, or inf if a pattern is not finite.
    Everything else is as in `cpu_loop`.
    """
    body = _cpu_body(rule, shape, width, True, True)
    uint, _ = integers(width)
    container = BINARY32 if width == 32 else BINARY64
    infinity, limit_of, value_of = uint(container.bits(float("inf"))), make_limit(width), make_value(width)

    @compiled_loop(rule, shape, width)
    def loop(src, n, parameters, key, block, log2_scale, ceiling: float):
        p = carray(pointer(parameters), (NUMBERS,), np.int64)
        scale = carray(pointer(log2_scale), (1,), np.int64)[0]
        k = carray(pointer(key), (2,), np.uint32)
        x = carray(pointer(src), (n,), uint)
        amax = body(x, x, n, p, k, block, scale, limit_of(ceiling))
        return value_of(min(amax, infinity))

    return loop


ALIGNED, HAS_SCALE, HAS_KEY = 1, 2, 4  # flags of a launch, see cuda_kernel


@uses_cuda
def cuda_kernel(rule: int, shape: int, width: int, masks: Masks = NO_MASKS) -> Callable[..., None]:
    """Return the body of a CUDA kernel as a Python function, for the card, PTX and the simulator alike.

    x, y: the `n` patterns, and their rounded values: the same memory, or memory that does not overlap.
    log2_scale, key: an int64 each, which are read if `flags` has HAS_SCALE or HAS_KEY. Otherwise the scale is 0, and
        the key is `word`.
    flags: also has ALIGNED if x and y both begin at multiples of 16 bytes.
    parameters: a Plan's numbers, as a tuple of int64.
    masks: the patterns that stay as they are.

    A thread rounds 16 bytes of neighbours, which it loads and stores at once if they are aligned and all exist. In
    stochastic rounding, a thread rounds the eight patterns whose noise comes from one counter. These patterns are 16
    apart, so that a warp reads whole sectors.
    """
    from fpsim.compiling.card import vector_access

    round_bits, is_mask, (uint, _) = make_rounding(rule, shape, width), _make_is_mask(width, masks), integers(width)
    numbers_from, at_scale, is_stochastic = make_numbers_from(width), make_at_scale(width), draws_noise(rule)
    to_top, lanes = uint(width - 32), 128 // width
    load, store = vector_access(width)

    @njit(inline="always")
    def rounded(word, noise, numbers):
        r = round_bits(word, uint(uint(noise) << to_top), numbers)
        return word if is_mask(word) else r

    @njit(inline="always")
    def each(words, p):
        if width == 64:
            return rounded(words[0], 0, p), rounded(words[1], 0, p)
        return rounded(words[0], 0, p), rounded(words[1], 0, p), rounded(words[2], 0, p), rounded(words[3], 0, p)

    def kernel(x, y, log2_scale, key, n, flags, word, parameters):
        thread = cuda.grid(1)
        p = at_scale(numbers_from(parameters), log2_scale[0] if flags & HAS_SCALE else 0)
        if is_stochastic:
            key0, key1 = key_words(key[0] if flags & HAS_KEY else word)
            w0, w1, w2, w3 = noise_words(thread, key0, key1)
            i = (thread >> 4) * NOISE_BLOCK + (thread & 15)
            # All loads come first: the compiler cannot know that no store changes the values that are loaded next.
            if i + 112 < n:
                x0, x1, x2, x3 = x[i], x[i + 16], x[i + 32], x[i + 48]
                x4, x5, x6, x7 = x[i + 64], x[i + 80], x[i + 96], x[i + 112]
                y[i], y[i + 16] = rounded(x0, w0, p), rounded(x1, exchange_halves(w0), p)
                y[i + 32], y[i + 48] = rounded(x2, w1, p), rounded(x3, exchange_halves(w1), p)
                y[i + 64], y[i + 80] = rounded(x4, w2, p), rounded(x5, exchange_halves(w2), p)
                y[i + 96], y[i + 112] = rounded(x6, w3, p), rounded(x7, exchange_halves(w3), p)
            else:
                while i < n:
                    y[i] = rounded(x[i], w0, p)
                    if i + 16 < n:
                        y[i + 16] = rounded(x[i + 16], exchange_halves(w0), p)
                    w0, w1, w2 = w1, w2, w3
                    i += 32
        else:
            first = thread * lanes
            if flags & ALIGNED and first + lanes <= n:
                store(y, thread, each(load(x, thread), p))
            else:
                for i in range(first, min(first + lanes, n)):
                    y[i] = rounded(x[i], 0, p)

    return kernel


@cache
def cuda_loop(rule: int, shape: int, width: int, masks: Masks = NO_MASKS) -> CudaKernel:
    """Return the kernel with its launch: (device, stream, blocks, and the arguments of `cuda_kernel`)."""
    from numba import types

    from fpsim.compiling.card import INTEGER, INTEGERS, WORDS32, WORDS64, CudaKernel

    words = WORDS32 if width == 32 else WORDS64
    signature = words, words, INTEGERS, INTEGERS, *[INTEGER] * 3, types.UniTuple(types.int64, NUMBERS)
    return CudaKernel(partial(cuda_kernel, rule, shape, width, masks), signature, "round", rule, shape, width, *masks)


def elements_of_block(rule: int, width: int) -> int:
    """Return how many patterns a block of CUDA_THREADS threads rounds."""
    return CUDA_THREADS * (NOISE_BLOCK // NOISE_LANES if draws_noise(rule) else 128 // width)
