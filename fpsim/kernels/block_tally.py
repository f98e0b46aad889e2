"""Tally of a rounding to shared scales: of the scales themselves, and of elements at the ends of their range."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from fpsim.compiling.compile import (
    float32_bits,
    float32_of,
    float64_bits,
    float64_of_bits,
    pointer,
)
from fpsim.compiling.deferred import carray, njit
from fpsim.compiling.native import Loop, compiled_loop
from fpsim.kernels.block_loops import place_of
from fpsim.kernels.blocks import (
    COUNTED,
    DIVIDED,
    FLOAT32_LARGEST,
    GAIN,
    GAINED,
    INFINITE_SCALE,
    INFINITY,
    LEAST_EXPONENT,
    MAGNITUDE,
    MASK,
    MOST_EXPONENT,
    NARROW,
    PARAMETERS,
    POWER,
    QUOTIENT,
    counted_magnitude,
    make_block_scale,
    make_tensor_scale,
    second_place,
    wanted_exponent,
    wanted_scale,
)
from fpsim.kernels.containers import widened
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

_MAGNITUDE = np.uint64((1 << 63) - 1)
_INFINITY = np.uint64(0x7FF << 52)


@cache
def make_facts(scale_shape: int, kind: int) -> Callable[..., Any]:
    """Return a compiled function that returns a tally's facts about one block, for which `has_scale` is true.

    The facts are: whether the scale was raised to the smallest of its format or became zero; whether it was lowered to
    the largest; the float64 pattern of the scale; and the patterns of two magnitudes: below the first an element is
    subnormal, and from the second on it saturates.
    """
    block_scale = make_block_scale(scale_shape, kind)
    u32, u64, i64, f64 = np.uint32, np.uint64, np.int64, np.float64

    @njit(inline="always")
    def facts(amax, shared, whole, p, smallest_normal, saturated_from, scale_saturated_from):
        """Return the facts. The limits are those of an element and of the scale's format."""
        block = block_scale(amax, shared, whole, p)
        a = u32(shared) if shared >= i64(0) else u32(amax)
        scale = u64(widened(float32_bits(block.back)))
        unit = float64_of_bits(scale)  # the value of an element 1
        is_under, is_over = False, False
        # The wanted scale is compared with the range: the scale in use is clamped, and does not show whether it was
        # beyond the range.
        if kind == POWER or kind == GAINED:
            wanted = i64(wanted_exponent(a, p))
            is_under, is_over = wanted < p[LEAST_EXPONENT], wanted > p[MOST_EXPONENT]
            unit = float64_of_bits(u64(u64(i64(block.exponent) + i64(1023)) << u64(52))) / f64(float32_of(p[GAIN]))
        elif kind == DIVIDED:
            is_under = block.by >= FLOAT32_LARGEST
        elif kind == QUOTIENT:
            is_under = scale == u64(0)
        elif kind == NARROW:
            is_under, is_over = scale == u64(0), f64(wanted_scale(a, whole, p)) >= scale_saturated_from
            unit = unit / f64(whole)
        normal, saturated = u64(float64_bits(smallest_normal * unit)), u64(float64_bits(saturated_from * unit))
        return is_under, is_over, scale, normal, saturated if unit > 0.0 else _INFINITY

    return facts  # type: ignore[no-any-return]


@njit(inline="always")
def has_scale(amax, tensor_amax, p):
    """Return whether a block is not all zero, and its scale is not NaN."""
    is_nan = p[INFINITE_SCALE] > np.int64(INFINITY) and (amax >= INFINITY or tensor_amax >= np.int64(INFINITY))
    return amax != np.uint32(0) and not is_nan


@njit(inline="always")
def end_of_range(before, after, normal, saturated):
    """Return whether an element became subnormal, and whether it saturated: 0 or 1."""
    x, r = np.uint64(widened(before) & _MAGNITUDE), np.uint64(widened(after) & _MAGNITUDE)
    is_number = x < _INFINITY and r < _INFINITY and np.uint32(before & MAGNITUDE) != MASK
    return int(is_number and np.uint64(0) < r < normal), int(is_number and x >= saturated)


@cache
def cpu_loop(scale_shape: int, kind: int) -> Loop:
    """Return a loop that tallies the blocks `first` to `last` into the BLOCK_FIELDS at `row`.

    Blocks are counted by outer, R, middle, C and inner. All arguments but `first`, `last` and `row` are addresses: src
    and dst (float32, before and after); dims (of BlockAxes); parameters (of a BlockPlan); limits (three float64: see
    make_facts).

    shared: int64, as in block_loops, but the third number is the pattern of the tensor's amax if all blocks share one
        scale, which is then the scale of block 0.
    """
    facts, tensor_scale = make_facts(scale_shape, kind), make_tensor_scale(kind)
    u32, i64 = np.uint32, np.int64

    @compiled_loop(scale_shape, kind, error_model="numpy")
    def loop(src, dst, dims, parameters, shared, limits, row, first, last):
        d = carray(pointer(dims), (7,), i64)
        outer, rows, middle, columns, inner, r, c = d[0], d[1], d[2], d[3], d[4], d[5], d[6]
        p, f = carray(pointer(parameters), (PARAMETERS,), i64), carray(pointer(limits), (3,), np.float64)
        n = outer * rows * middle * columns * inner
        common, column_blocks = carray(pointer(shared), (3 + n,), i64), (columns + c - 1) // c
        x, y = carray(pointer(src), (n,), u32), carray(pointer(dst), (n,), u32)
        out = carray(pointer(row), (BLOCK_FIELDS,), i64)
        for unit in range(first, last):
            base, height, length, step = place_of(unit, outer, rows, middle, columns, inner, r, c)
            amax = u32(max(common[2], i64(0)))
            for j in range(height if common[0] < 0 else 0):
                for k in range(length):
                    amax = max(amax, counted_magnitude(x[base + j * step + k * inner], u32(p[COUNTED])))
            is_counted = common[0] < 0 or unit == 0
            out[BLOCKS] += int(is_counted)
            out[ZERO_BLOCKS] += int(is_counted and amax == u32(0))
            of_second = common[second_place(common[0], unit, column_blocks)]
            if not has_scale(amax, of_second, p):
                continue
            whole = tensor_scale(of_second, p)
            is_under, is_over, scale, normal, saturated = facts(amax, common[0], whole, p, f[0], f[1], f[2])
            out[SCALE_UNDERFLOW] += int(is_under and is_counted)
            out[SCALE_OVERFLOW] += int(is_over and is_counted)
            if scale > 0:
                out[SMALLEST_SCALE] = min(out[SMALLEST_SCALE], i64(scale))
                out[LARGEST_SCALE] = max(out[LARGEST_SCALE], i64(scale))
            subnormals, saturations = 0, 0
            for j in range(height):
                for k in range(length):
                    at = base + j * step + k * inner
                    is_subnormal, is_saturated = end_of_range(x[at], y[at], normal, saturated)
                    subnormals += is_subnormal
                    saturations += is_saturated
            out[BLOCK_SUBNORMAL] += subnormals
            out[BLOCK_SATURATED] += saturations

    return loop
