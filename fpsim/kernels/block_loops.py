"""Blocks: the loops over memory.

A tensor is seen as (outer, R, middle, C, inner), contiguous, in blocks of `r` by `c` along R and C. Where `inner` is 1
a block's elements lie side by side ("along" the memory); otherwise neighbours in memory belong to neighbouring blocks
("across").
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import carray, njit

from fpsim.kernels.blocks import (
    GAINED,
    LEAST_SHIFT,
    MAGNITUDE,
    MOST_SHIFT,
    PARAMETERS,
    finite_magnitude,
    functions,
)
from fpsim.kernels.compile import CUDA_THREADS, compiled_loop, cuda_module, pointer
from fpsim.kernels.round import exchange_halves, fill_noise, noise_words
from fpsim.rounding import NOISE_BLOCK, NOISE_LANES, STOCHASTIC

cuda: Any = None  # numba-cuda's module once it is needed; a global, because the simulator swaps it in those


@njit(inline="always")
def element_noise(index, key0, key1):  # type: ignore[no-untyped-def]
    """The noise word of one element, see rounding.NOISE_BLOCK."""
    block, place = index // NOISE_BLOCK, index % NOISE_BLOCK
    part, lane = place // NOISE_LANES, place % NOISE_LANES
    w0, w1, w2, w3 = noise_words(block * NOISE_LANES + lane, key0, key1)
    word = w0 if part < 2 else (w1 if part < 4 else (w2 if part < 6 else w3))
    return exchange_halves(word) if part % 2 else word


@njit(inline="always")
def is_near(exponent, p):  # type: ignore[no-untyped-def]
    """Whether elements can be rounded at this scale in 32 bits."""
    return p[LEAST_SHIFT] <= -np.int64(exponent) <= p[MOST_SHIFT]


@cache
def cpu_amax() -> Callable[..., int]:
    """The pattern of the largest finite magnitude of `n` float32 at address `src`."""

    @compiled_loop()
    def loop(src, n):  # type: ignore[no-untyped-def]
        x = carray(pointer(src), (n,), np.uint32)
        amax = np.uint32(0)
        for i in range(n):
            amax = max(amax, finite_magnitude(x[i]))
        return np.int64(amax)

    return loop


@cache
def cpu_along(rule: int, shape: int, scale_shape: int, kind: int, size: int) -> Callable[..., None]:
    """Round blocks whose elements lie side by side: `inner` is 1.

    size: the length of a block along C where it is compiled in; 0 for any.
    Addresses: src, dst; parameters (of a BlockPlan); key (two uint32); shared (two int64: a pattern to take instead of
    every block's own number, or -1, and the pattern of the tensor's amax); scales (float32, one for a block; 0 for
    nowhere). Blocks `first` to `last` are rounded, counted by outer, R, middle and C.
    """
    tensor_scale, numbers, apply, apply_wide = functions(rule, shape, scale_shape, kind)
    u32, i32 = np.uint32, np.int32

    @njit(inline="always")
    def run(xs, ys, count, start, noise, have, k, p, origin, largest, overflow, smallest, by, back, whole):  # type: ignore[no-untyped-def]
        shift, zero_sign, used, odd = i32(p[0]), u32(p[5]), u32(p[6]), u32(p[7])
        if rule != STOCHASTIC:
            for i in range(count):
                ys[i] = apply(
                    xs[i], u32(0), shift, zero_sign, used, odd, origin, largest, overflow, smallest, by, back, whole
                )
            return have
        done = 0
        while done < count:
            block, place = (start + done) // NOISE_BLOCK, (start + done) % NOISE_BLOCK
            if block != have:
                fill_noise(noise, block, k[0], k[1])
                have = block
            length = min(NOISE_BLOCK - place, count - done)
            xp, yp, np_ = xs[done : done + length], ys[done : done + length], noise[place : place + length]
            for i in range(length):
                yp[i] = apply(
                    xp[i], np_[i], shift, zero_sign, used, odd, origin, largest, overflow, smallest, by, back, whole
                )
            done += length
        return have

    @njit(inline="always")
    def run_far(xs, ys, count, start, k, p, exponent, at_zero):  # type: ignore[no-untyped-def]
        for i in range(count):
            if u32(xs[i] & MAGNITUDE) == u32(0):
                ys[i] = u32(xs[i] & at_zero)
            else:
                bits = element_noise(start + i, k[0], k[1]) if rule == STOCHASTIC else u32(0)
                ys[i] = apply_wide(xs[i], bits, exponent, p)

    @compiled_loop(rule, shape, scale_shape, kind, size, error_model="numpy")
    def loop(src, dst, dims, parameters, key, shared, scales, first, last):  # type: ignore[no-untyped-def]
        d = carray(pointer(dims), (7,), np.int64)
        outer, rows_all, middle, columns_all, r, c = d[0], d[1], d[2], d[3], d[5], d[6]
        p = carray(pointer(parameters), (PARAMETERS,), np.int64)
        k = carray(pointer(key), (2,), np.uint32)
        common = carray(pointer(shared), (2,), np.int64)
        n = outer * rows_all * middle * columns_all
        x, y = carray(pointer(src), (n,), np.uint32), carray(pointer(dst), (n,), np.uint32)
        row_blocks, column_blocks = -(-rows_all // r), -(-columns_all // c)
        found = carray(pointer(scales), (outer * row_blocks * middle * column_blocks,), np.float32)
        noise, have = np.empty(NOISE_BLOCK, np.uint32), -1
        whole = tensor_scale(common[1], p)
        column, rest = first % column_blocks, first // column_blocks
        m, rest = rest % middle, rest // middle
        row, o = rest % row_blocks, rest // row_blocks
        for unit in range(first, last):
            begin, width = column * c, min(c, columns_all - column * c)
            height = min(r, rows_all - row * r)
            base = ((o * rows_all + row * r) * middle + m) * columns_all + begin
            step = middle * columns_all
            amax = u32(0)
            if common[0] < 0:
                for i in range(height):
                    xs = x[base + i * step : base + i * step + width]
                    if size and width == size:
                        for j in range(size):
                            amax = max(amax, finite_magnitude(xs[j]))
                    else:
                        for j in range(width):
                            amax = max(amax, finite_magnitude(xs[j]))
            origin, largest, overflow, smallest, by, back, exponent = numbers(amax, common[0], common[1], p)
            if scales != 0:
                found[unit] = back
            near = kind > GAINED or is_near(exponent, p)
            for i in range(height):
                start = base + i * step
                xs, ys = x[start : start + width], y[start : start + width]
                if not near:
                    run_far(xs, ys, width, start, k, p, exponent, u32(p[5]))
                elif size and width == size:
                    have = run(
                        xs, ys, size, start, noise, have, k, p, origin, largest, overflow, smallest, by, back, whole
                    )
                else:
                    have = run(
                        xs, ys, width, start, noise, have, k, p, origin, largest, overflow, smallest, by, back, whole
                    )
            column += 1
            if column == column_blocks:
                column = 0
                m += 1
                if m == middle:
                    m = 0
                    row += 1
                    if row == row_blocks:
                        row = 0
                        o += 1

    return loop


LANES = 256  # neighbours in memory that are rounded side by side; fewer where a block is long, to stay in the cache
LONG_BLOCK, LANES_OF_LONG = 128, 64


def lanes_of(r: int, c: int) -> int:
    """How many lanes a unit of work of `cpu_across` has."""
    return LANES if r * c <= LONG_BLOCK else LANES_OF_LONG


@cache
def cpu_across(rule: int, shape: int, scale_shape: int, kind: int) -> Callable[..., None]:
    """Round blocks whose neighbours in memory belong to other blocks: `inner` is above 1.

    As cpu_along, but a unit of work is `lanes_of` blocks side by side; units are counted by outer, R, middle, C, lanes.
    """
    tensor_scale, numbers, apply, apply_wide = functions(rule, shape, scale_shape, kind)
    u32, i32 = np.uint32, np.int32

    @njit(inline="always")
    def round_run(xs, ys, start, count, noise, have, k, p, numbers_of, by, back, whole):  # type: ignore[no-untyped-def]
        shift, zero_sign, used, odd = i32(p[0]), u32(p[5]), u32(p[6]), u32(p[7])
        origins, largests, overflows, smallests = numbers_of
        done = 0
        while done < count:
            length = count - done
            if rule == STOCHASTIC:
                block, place = (start + done) // NOISE_BLOCK, (start + done) % NOISE_BLOCK
                if block != have:
                    fill_noise(noise, block, k[0], k[1])
                    have = block
                length = min(NOISE_BLOCK - place, length)
                words = noise[place : place + length]
            else:
                words = noise
            xp, yp = xs[done : done + length], ys[done : done + length]
            os, ls = origins[done : done + length], largests[done : done + length]
            vs, ss = overflows[done : done + length], smallests[done : done + length]
            bs, ks = by[done : done + length], back[done : done + length]
            for i in range(length):
                word = words[i] if rule == STOCHASTIC else u32(0)
                yp[i] = apply(xp[i], word, shift, zero_sign, used, odd, os[i], ls[i], vs[i], ss[i], bs[i], ks[i], whole)
            done += length
        return have

    @compiled_loop(rule, shape, scale_shape, kind, error_model="numpy")
    def loop(src, dst, dims, parameters, key, shared, scales, first, last):  # type: ignore[no-untyped-def]
        d = carray(pointer(dims), (7,), np.int64)
        outer, rows_all, middle, columns_all, inner, r, c = d[0], d[1], d[2], d[3], d[4], d[5], d[6]
        p = carray(pointer(parameters), (PARAMETERS,), np.int64)
        k = carray(pointer(key), (2,), np.uint32)
        common = carray(pointer(shared), (2,), np.int64)
        n = outer * rows_all * middle * columns_all * inner
        x, y = carray(pointer(src), (n,), np.uint32), carray(pointer(dst), (n,), np.uint32)
        row_blocks, column_blocks = -(-rows_all // r), -(-columns_all // c)
        found = carray(pointer(scales), (outer * row_blocks * middle * column_blocks * inner,), np.float32)
        lanes = LANES if r * c <= LONG_BLOCK else LANES_OF_LONG
        lane_blocks = -(-inner // lanes)
        noise, have = np.empty(NOISE_BLOCK, np.uint32), -1
        amaxes, largests = np.empty(LANES, np.uint32), np.empty(LANES, np.uint32)
        overflows, smallests = np.empty(LANES, np.uint32), np.empty(LANES, np.uint32)
        origins, exponents = np.empty(LANES, np.int32), np.empty(LANES, np.int32)
        by, back = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
        numbers_of = (origins, largests, overflows, smallests)
        whole = tensor_scale(common[1], p)
        for unit in range(first, last):
            rest, lane_block = unit // lane_blocks, unit % lane_blocks
            block = rest
            rest, column = rest // column_blocks, rest % column_blocks
            rest, m = rest // middle, rest % middle
            o, row = rest // row_blocks, rest % row_blocks
            lane = lane_block * lanes
            width = min(lanes, inner - lane)
            columns, height = min(c, columns_all - column * c), min(r, rows_all - row * r)
            base = (((o * rows_all + row * r) * middle + m) * columns_all + column * c) * inner + lane
            step = middle * columns_all * inner
            amaxes[:] = u32(0)
            for i in range(height):
                for j in range(columns):
                    start = base + i * step + j * inner
                    xs = x[start : start + width]
                    for lane in range(width):
                        amaxes[lane] = max(amaxes[lane], finite_magnitude(xs[lane]))
            far = False
            for lane in range(width):
                origin, largest, overflow, smallest, b, s, e = numbers(amaxes[lane], common[0], common[1], p)
                origins[lane], largests[lane], overflows[lane], smallests[lane] = origin, largest, overflow, smallest
                by[lane], back[lane], exponents[lane] = b, s, e
                if kind <= GAINED and not is_near(e, p):
                    far = True
            if scales != 0:
                start = block * inner + lane_block * lanes
                for lane in range(width):
                    found[start + lane] = back[lane]
            for i in range(height):
                for j in range(columns):
                    start = base + i * step + j * inner
                    xs, ys = x[start : start + width], y[start : start + width]
                    have = round_run(xs, ys, start, width, noise, have, k, p, numbers_of, by, back, whole)
            if not far:
                continue
            for i in range(height):
                for j in range(columns):
                    start = base + i * step + j * inner
                    for lane in range(width):
                        word = x[start + lane]
                        if u32(word & MAGNITUDE) != u32(0) and not is_near(exponents[lane], p):
                            bits = element_noise(start + lane, k[0], k[1]) if rule == STOCHASTIC else u32(0)
                            y[start + lane] = apply_wide(word, bits, exponents[lane], p)

    return loop


def cuda_kernel(rule: int, shape: int, scale_shape: int, kind: int) -> Callable[..., None]:
    """The body of a CUDA kernel as a Python function, for jit, PTX and the simulator alike.

    A thread rounds one block. `x` and `y` are flat arrays of uint32; the dimensions are those of BlockAxes; `p` holds
    a BlockPlan's integers, `shared` two int64, as for the CPU's loops; `scales` one float32 for each block, or none.
    """
    global cuda
    cuda = cuda_module()
    tensor_scale, numbers, apply, apply_wide = functions(rule, shape, scale_shape, kind)
    u32, i32 = np.uint32, np.int32

    def kernel(x, y, outer, rows_all, middle, columns_all, inner, r, c, p, shared, scales, key0, key1):  # type: ignore[no-untyped-def]
        row_blocks, column_blocks = (rows_all + r - 1) // r, (columns_all + c - 1) // c
        unit = cuda.grid(1)
        if unit >= outer * row_blocks * middle * column_blocks * inner:
            return
        rest, lane = unit // inner, unit % inner
        rest, column = rest // column_blocks, rest % column_blocks
        rest, m = rest // middle, rest % middle
        o, row = rest // row_blocks, rest % row_blocks
        columns, height = min(c, columns_all - column * c), min(r, rows_all - row * r)
        base = (((o * rows_all + row * r) * middle + m) * columns_all + column * c) * inner + lane
        step = middle * columns_all * inner
        amax = u32(0)
        if shared[0] < 0:
            for i in range(height):
                for j in range(columns):
                    amax = max(amax, finite_magnitude(x[base + i * step + j * inner]))
        whole = tensor_scale(shared[1], p)
        origin, largest, overflow, smallest, by, back, exponent = numbers(amax, shared[0], shared[1], p)
        if len(scales) > 0:
            scales[unit] = back
        near = kind > GAINED or is_near(exponent, p)
        shift, zero_sign, used, odd = i32(p[0]), u32(p[5]), u32(p[6]), u32(p[7])
        for i in range(height):
            for j in range(columns):
                index = base + i * step + j * inner
                word, bits = x[index], u32(0)
                if rule == STOCHASTIC:
                    bits = element_noise(index, key0, key1)
                if near:
                    y[index] = apply(
                        word, bits, shift, zero_sign, used, odd, origin, largest, overflow, smallest, by, back, whole
                    )
                elif u32(word & MAGNITUDE) == u32(0):
                    y[index] = u32(word & zero_sign)
                else:
                    y[index] = apply_wide(word, bits, exponent, p)

    return kernel


@cache
def cuda_loop(rule: int, shape: int, scale_shape: int, kind: int) -> Callable[..., None]:
    """The compiled kernel with its launch: (x, y, axes, blocks, parameters, shared, scales, key0, key1, stream)."""
    kernel = cuda_module().jit(cuda_kernel(rule, shape, scale_shape, kind))

    def launch(
        x: Any, y: Any, axes: tuple[int, ...], blocks: int, p: Any, shared: Any, scales: Any, key0: int, key1: int,
        stream: Any,
    ) -> None:  # fmt: skip
        kernel[-(-blocks // CUDA_THREADS), CUDA_THREADS, stream](x, y, *axes, p, shared, scales, key0, key1)

    return launch
