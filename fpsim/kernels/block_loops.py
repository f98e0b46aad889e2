"""Blocks on the CPU: the loops over memory.

A tensor is seen as (outer, R, middle, C, inner), contiguous, in blocks of `r` by `c` along R and C. If `inner` is 1,
the elements of a block lie side by side ("along" the memory). Otherwise neighbours in memory belong to neighbouring
blocks ("across").
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from fpsim.compiling.compile import pointer, stack_array
from fpsim.compiling.deferred import carray, njit
from fpsim.compiling.native import Loop, compiled_loop
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
from fpsim.kernels.core import draws_noise, make_numbers_from, with_ends
from fpsim.kernels.threefry import NOISE_BLOCK, element_noise, fill_noise

# The number of neighbours in memory that are rounded side by side; fewer if a block is long, to stay in the cache.
LANES = 256
LONG_BLOCK, LANES_OF_LONG = 128, 64
# The number of blocks whose BlockScales `cpu_along` computes side by side, which takes a quarter less time for blocks
# of 16 elements.
BATCH = 64


def lanes_of(r: int, c: int) -> int:
    """Return how many blocks side by side make up a unit of work of `cpu_across`."""
    return LANES if r * c <= LONG_BLOCK else LANES_OF_LONG


@njit(forceinline=True)
def place_of(unit, outer, rows, middle, columns, inner, r, c):
    """Return the index of a block's first element, the block's height, its length and the distance of its rows.

    Beyond the last block the height is 0. unit: the number of the block, counted by outer, R, middle, C and inner.
    """
    row_blocks, column_blocks, step = (rows + r - 1) // r, (columns + c - 1) // c, middle * columns * inner
    rest, lane = unit // inner, unit % inner
    rest, column = rest // column_blocks, rest % column_blocks
    rest, m = rest // middle, rest % middle
    o, row = rest // row_blocks, rest % row_blocks
    height, length = min(r, rows - row * r), min(c, columns - column * c)
    base = (((o * rows + row * r) * middle + m) * columns + column * c) * inner + lane
    return base, height if o < outer else 0, length, step


@njit(inline="always")
def amax_of(xs, count, amax):
    """Return the largest of all patterns, including special ones. A result below MASK is the amax."""
    for i in range(count):
        amax = max(amax, magnitude_of(xs[i]))
    return amax


@njit(inline="always")
def counted_amax(xs, count, counted, amax):
    """Return the largest magnitude, as `counted_magnitude` counts it."""
    for i in range(count):
        amax = max(amax, counted_magnitude(xs[i], counted))
    return amax


@njit(inline="always")
def treat_specials(xs, ys, count, back, p):
    """Correct masks and infinities among elements that were all rounded at one scale."""
    for i in range(count):
        ys[i] = special_element(xs[i], ys[i], back, p)


HAS_SPECIALS = 1 << 32  # added to an amax


@cache
def cpu_amax() -> Loop:
    """Return a loop that returns the pattern of the amax of `n` float32 at address `src`; see `counted_magnitude`.

    The loop adds HAS_SPECIALS if there is a mask, an infinity or a NaN.
    """

    @compiled_loop()
    def loop(src, n, counted):
        x = carray(pointer(src), (n,), np.uint32)
        amax = amax_of(x, n, np.uint32(0))
        if amax < MASK:
            return np.int64(amax)
        return np.int64(np.int64(counted_amax(x, n, np.uint32(counted), np.uint32(0))) + np.int64(HAS_SPECIALS))

    return loop


@cache
def _numbers_of(scale_shape: int, kind: int) -> Callable[..., Any]:
    """Return a compiled function that writes the BlockScale of `count` blocks to arrays.

    The function returns whether one of the scales is too far for 32 bits.
    """
    block_scale = make_block_scale(scale_shape, kind)

    @njit(inline="always")
    def fill(count, amaxes, shared, whole, p, origins, largests, overflows, smallests, by, back, exponents):
        for i in range(count):
            s = block_scale(amaxes[i], shared, whole, p)
            origins[i], largests[i], overflows[i], smallests[i] = s.origin, s.largest, s.overflow, s.smallest
            by[i], back[i], exponents[i] = s.by, s.back, s.exponent
        far = False
        if kind <= GAINED:
            for i in range(count):
                far = far or not is_near(exponents[i], p)
        return far

    return fill  # type: ignore[no-any-return]


@cache
def _memory_of(count: int) -> tuple[Callable[[], Any], ...]:
    """Return four functions that allocate a loop's memory: a block of noise, and `count` uint32, int32 and float32."""
    kinds = np.uint32, np.int32, np.float32
    return stack_array(NOISE_BLOCK, np.uint32), *(stack_array(count, kind) for kind in kinds)


@cache
def _run_along(rule: int, shape: int, kind: int) -> Callable[..., Any]:
    """Return a compiled function that rounds neighbours in memory that share a scale.

    The function returns the number of the noise block that is loaded.
    """
    apply, is_stochastic = make_apply(rule, shape, kind), draws_noise(rule)

    @njit(inline="always")
    def plain(xs, ys, count, words, numbers, by, back, whole):
        for i in range(count):
            ys[i] = apply(xs[i], words[i] if is_stochastic else np.uint32(0), numbers, by, back, whole)

    @njit(inline="always")
    def run(xs, ys, start, noise, have, k, numbers, by, back, whole):
        count = len(xs)
        if not is_stochastic:
            plain(xs, ys, count, xs, numbers, by, back, whole)
            return have
        done = 0
        while done < count:
            block, place = (start + done) // NOISE_BLOCK, (start + done) % NOISE_BLOCK
            if block != have:
                fill_noise(noise, block, k[0], k[1])
                have = block
            length = min(NOISE_BLOCK - place, count - done)
            xp, yp, words = xs[done : done + length], ys[done : done + length], noise[place : place + length]
            plain(xp, yp, length, words, numbers, by, back, whole)
            done += length
        return have

    return run  # type: ignore[no-any-return]


# The length of a block is an argument. A loop with a compiled-in length took twice the time, because LLVM unrolls a
# loop over 32 elements before it can vectorise the loop.
@cache
def cpu_along(rule: int, shape: int, scale_shape: int, kind: int) -> Loop:
    """Return a loop that rounds blocks whose elements lie side by side: `inner` is 1.

    All but the last two arguments are addresses: src, dst; dims (of BlockAxes); parameters (of a BlockPlan); key (two
    uint32).

    shared: int64 numbers. The first is a pattern to use in place of every block's own amax, or below 0. The second is
        the pattern of the tensor's amax. The third says, if the first is given, whether there may be masks or
        infinities: 0, 1, or -1 if unknown. `second_place` reads the numbers after these.
    scales: float32, one for each block; 0 to write no scales.
    first, last: the blocks to round, counted by outer, R, middle and C.
    """
    fill, run = _numbers_of(scale_shape, kind), _run_along(rule, shape, kind)
    tensor_scale, apply_far = make_tensor_scale(kind), make_apply_far(rule, shape, kind)
    u32, i64, is_stochastic = np.uint32, np.int64, draws_noise(rule)
    new_noise, new_words, new_integers, new_floats = _memory_of(BATCH)
    numbers_from = make_numbers_from(32)

    @compiled_loop(rule, shape, scale_shape, kind, error_model="numpy")
    def loop(src, dst, dims, parameters, key, shared, scales, first, last):
        d = carray(pointer(dims), (7,), i64)
        outer, rows, middle, columns, r, c = d[0], d[1], d[2], d[3], d[5], d[6]
        p, keys = carray(pointer(parameters), (PARAMETERS,), i64), carray(pointer(key), (2,), u32)
        n, step = outer * rows * middle * columns, middle * columns
        common = carray(pointer(shared), (3 + n,), i64)
        x, y = carray(pointer(src), (n,), u32), carray(pointer(dst), (n,), u32)
        row_blocks, column_blocks = -(-rows // r), -(-columns // c)
        found = carray(pointer(scales), (outer * row_blocks * middle * column_blocks,), np.float32)
        noise, have, whole = new_noise(), -1, tensor_scale(common[1], p)
        amaxes, largests, overflows, smallests = new_words(), new_words(), new_words(), new_words()
        origins, exponents, by, back = new_integers(), new_integers(), new_floats(), new_floats()
        elements, is_known = numbers_from(p), common[0] >= 0 and common[2] >= 0
        at_once = i64(-1) - common[0]  # blocks that share a second scale; 0 or less if it is the tensor's
        unit = first
        while unit < last:  # neighbours along C, whose numbers are computed side by side
            row, column = unit // column_blocks, unit % column_blocks
            rest, i = row // middle, row // middle % row_blocks
            line = ((rest // row_blocks * rows + i * r) * middle + row % middle) * columns
            height, count = min(r, rows - i * r), min(BATCH, column_blocks - column, last - unit)
            if at_once > 0:
                count = min(count, at_once - column % at_once)
                whole = tensor_scale(common[second_place(common[0], unit, column_blocks)], p)
            # All patterns are compared first, which vectorises. Only masks, infinities and NaN need a second pass.
            for b in range(count):
                begin, length, amax = line + (column + b) * c, min(c, columns - (column + b) * c), u32(0)
                for j in range(0 if is_known else height):
                    amax = amax_of(x[begin + j * step : begin + j * step + length], length, amax)
                amaxes[b] = amax
            has_specials = common[2] > 0 if is_known else amax_of(amaxes, count, u32(0)) >= MASK
            for b in range(count if has_specials else 0):
                begin, length, amax = line + (column + b) * c, min(c, columns - (column + b) * c), u32(0)
                for j in range(height):
                    xs = x[begin + j * step : begin + j * step + length]
                    amax = counted_amax(xs, length, u32(p[COUNTED]), amax)
                amaxes[b] = amax
            fill(count, amaxes, common[0], whole, p, origins, largests, overflows, smallests, by, back, exponents)
            if scales != 0:
                for b in range(count):
                    found[unit + b] = back[b]
            for b in range(count):
                begin, length = line + (column + b) * c, min(c, columns - (column + b) * c)
                far = kind <= GAINED and not is_near(exponents[b], p)
                numbers = with_ends(elements, origins[b], largests[b], overflows[b], smallests[b])
                for j in range(height):
                    start = begin + j * step
                    xs, ys = x[start : start + length], y[start : start + length]
                    # Elements are rounded one by one: a far scale is rare, and 64 bits gain nothing from vectors.
                    if far:
                        for k in range(length):
                            bits = element_noise(start + k, keys[0], keys[1]) if is_stochastic else u32(0)
                            ys[k] = apply_far(xs[k], bits, exponents[b], p)
                    else:
                        have = run(xs, ys, start, noise, have, keys, numbers, by[b], back[b], whole)
            for b in range(count if has_specials else 0):
                begin, length = line + (column + b) * c, min(c, columns - (column + b) * c)
                for j in range(height):
                    start = begin + j * step
                    treat_specials(x[start : start + length], y[start : start + length], length, back[b], p)
            unit += count

    return loop


@cache
def _run_across(rule: int, shape: int, kind: int) -> Callable[..., Any]:
    """Return a compiled function that rounds neighbours in memory, each of which has another scale.

    The function returns the number of the noise block that is loaded.
    """
    apply, is_stochastic, numbers_from = make_apply(rule, shape, kind), draws_noise(rule), make_numbers_from(32)

    @njit(inline="always")
    def run(xs, ys, start, noise, have, k, p, origins, largests, overflows, smallests, by, back, whole):
        elements = numbers_from(p)
        done, count = 0, len(xs)
        while done < count:
            length, words = count - done, noise
            if is_stochastic:
                block, place = (start + done) // NOISE_BLOCK, (start + done) % NOISE_BLOCK
                if block != have:
                    fill_noise(noise, block, k[0], k[1])
                    have = block
                length = min(NOISE_BLOCK - place, length)
                words = noise[place : place + length]
            xp, yp = xs[done : done + length], ys[done : done + length]
            os, ls = origins[done : done + length], largests[done : done + length]
            vs, ss = overflows[done : done + length], smallests[done : done + length]
            bs, ks = by[done : done + length], back[done : done + length]
            for i in range(length):
                word = words[i] if is_stochastic else np.uint32(0)
                yp[i] = apply(xp[i], word, with_ends(elements, os[i], ls[i], vs[i], ss[i]), bs[i], ks[i], whole)
            done += length
        return have

    return run  # type: ignore[no-any-return]


@cache
def cpu_across(rule: int, shape: int, scale_shape: int, kind: int) -> Loop:
    """Return a loop that rounds blocks whose elements lie beside elements of other blocks: `inner` is above 1.

    The arguments are those of cpu_along, but a unit of work is `lanes_of` blocks side by side. Units are counted by
    outer, R, middle, C and lanes.
    """
    fill, run = _numbers_of(scale_shape, kind), _run_across(rule, shape, kind)
    tensor_scale, apply_far = make_tensor_scale(kind), make_apply_far(rule, shape, kind)
    u32, i64, is_stochastic = np.uint32, np.int64, draws_noise(rule)
    new_noise, new_words, new_integers, new_floats = _memory_of(LANES)

    @compiled_loop(rule, shape, scale_shape, kind, error_model="numpy")
    def loop(src, dst, dims, parameters, key, shared, scales, first, last):
        d, common = carray(pointer(dims), (7,), i64), carray(pointer(shared), (3,), i64)
        outer, rows, middle, columns, inner, r, c = d[0], d[1], d[2], d[3], d[4], d[5], d[6]
        p, k = carray(pointer(parameters), (PARAMETERS,), i64), carray(pointer(key), (2,), u32)
        n, step = outer * rows * middle * columns * inner, middle * columns * inner
        x, y = carray(pointer(src), (n,), u32), carray(pointer(dst), (n,), u32)
        row_blocks, column_blocks = -(-rows // r), -(-columns // c)
        found = carray(pointer(scales), (outer * row_blocks * middle * column_blocks * inner,), np.float32)
        lanes = LANES if r * c <= LONG_BLOCK else LANES_OF_LONG
        lane_blocks = -(-inner // lanes)
        noise, have, whole = new_noise(), -1, tensor_scale(common[1], p)
        amaxes, largests, overflows, smallests = new_words(), new_words(), new_words(), new_words()
        origins, exponents, by, back = new_integers(), new_integers(), new_floats(), new_floats()
        for unit in range(first, last):
            block, lane = unit // lane_blocks, unit % lane_blocks * lanes
            rest, column = block // column_blocks, block % column_blocks
            rest, m = rest // middle, rest % middle
            o, row = rest // row_blocks, rest % row_blocks
            width, height, length = min(lanes, inner - lane), min(r, rows - row * r), min(c, columns - column * c)
            base = (((o * rows + row * r) * middle + m) * columns + column * c) * inner + lane
            for i in range(width):
                amaxes[i] = 0
            for t in range(height * length):
                start = base + t // length * step + t % length * inner
                xs = x[start : start + width]
                for i in range(width):
                    amaxes[i] = max(amaxes[i], magnitude_of(xs[i]))
            most = amax_of(amaxes, width, u32(0))
            if most >= MASK:
                for i in range(width):
                    amaxes[i] = 0
                for t in range(height * length):
                    start = base + t // length * step + t % length * inner
                    for i in range(width):
                        amaxes[i] = max(amaxes[i], counted_magnitude(x[start + i], u32(p[COUNTED])))
            far = fill(width, amaxes, common[0], whole, p, origins, largests, overflows, smallests, by, back, exponents)
            if scales != 0:
                for i in range(width):
                    found[block * inner + lane + i] = back[i]
            for t in range(height * length):
                start = base + t // length * step + t % length * inner
                xs, ys = x[start : start + width], y[start : start + width]
                have = run(xs, ys, start, noise, have, k, p, origins, largests, overflows, smallests, by, back, whole)
                # Elements at a far scale are rounded again in 64 bits, lane by lane: such scales are rare, and the
                # vectorised pass has no branch for them.
                for i in range(width if far else 0):
                    if not is_near(exponents[i], p):
                        bits = element_noise(start + i, k[0], k[1]) if is_stochastic else u32(0)
                        ys[i] = apply_far(xs[i], bits, exponents[i], p)
                for i in range(width if most >= MASK else 0):
                    ys[i] = special_element(xs[i], ys[i], back[i], p)

    return loop
