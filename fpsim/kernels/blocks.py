"""Blocks: what is computed for a block, its scale, and for an element of it, its rounding at that scale.

Blocks whose scales are powers of two are rounded by integers alone, see rounding.at_scale. Others multiply and divide
in float32, each operation rounded by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from fpsim.rounding import make_at_scale, make_round

cuda: Any = None  # numba-cuda's module once it is needed; a global, because the simulator swaps it in those

# How a scale follows from amax. It selects the code that is compiled.
POWER = 0  # a power of two, see SCALE_RULES in fpsim.blocks
GAINED = 1  # a power of two, and elements are rounded at a multiple of their size
DIVIDED = 2  # largest / amax in float32, by which elements are multiplied
NARROW = 3  # amax / largest in a format of its own, beneath a float32 for the tensor

FLOOR, CEIL, EVEN, NEAREST = range(4)


class BlockPlan(NamedTuple):
    """A block format and a rounding of its elements as what a kernel takes."""

    rule: int
    shape: int
    scale_shape: int
    kind: int
    parameters: tuple[int, ...]


# Where things are in the parameters of a BlockPlan.
NARROW_PLAN = 0  # of the elements in 32 bits, 8 integers
WIDE_PLAN = 8  # of the elements in 64 bits, for scales at which float32's own subnormals would be in the way
SCALE_PLAN = 16  # of the scale's format, 8 integers
SCALE_RULE = 24
EMAX = 25  # the exponent of the largest element
LARGEST_MANTISSA = 26  # its float32 mantissa field
HALF_ULP = 27  # of an element's significand, in units of a float32's last place
LEAST_EXPONENT, MOST_EXPONENT = 28, 29  # of a scale
LEAST_SHIFT, MOST_SHIFT = 30, 31  # of log2 of what elements are multiplied by, in 32 bits
LARGEST, GAIN, SCALE_LARGEST = 32, 33, 34  # as float32 patterns
PARAMETERS = 35

MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)
MANTISSA = np.uint32(0x007FFFFF)
IMPLICIT = np.uint32(0x00800000)
SQRT2_MANTISSA = np.uint32(3474675)  # floor(2**23 * (sqrt(2) - 1)): no float32 is sqrt(2)
FLOAT32_LARGEST = np.float32(np.finfo(np.float32).max)


def _bitcast(source: Any, target: Any, kind: Any) -> Any:
    def bitcast(typingctx: Any, x: Any) -> Any:
        if x != source:
            return None

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], kind)

        return target(source), generate

    return intrinsic(bitcast)


_to_bits = _bitcast(types.float32, types.uint32, ir.IntType(32))
_to_float = _bitcast(types.uint32, types.float32, ir.FloatType())


@njit(inline="always")
def bits_of(x):  # type: ignore[no-untyped-def]
    return _to_bits(np.float32(x))


@njit(inline="always")
def float_of(bits):  # type: ignore[no-untyped-def]
    return _to_float(np.uint32(bits))


@njit(inline="always")
def finite_magnitude(word):  # type: ignore[no-untyped-def]
    magnitude = np.uint32(word & MAGNITUDE)
    return magnitude if magnitude < INFINITY else np.uint32(0)


@njit(inline="always")
def exponent_of_scale(amax, scale_rule, emax, largest_mantissa, half_ulp, least, most):  # type: ignore[no-untyped-def]
    """log2 of the scale of a block whose largest finite magnitude has the pattern `amax`; `least` for zero."""
    mantissa = np.uint32(amax & MANTISSA)
    exponent = np.int32(amax >> np.uint32(23))
    if exponent == np.int32(0):
        exponent = np.int32(1)
        while np.uint32(0) < mantissa < IMPLICIT:  # a subnormal: 23 steps at most
            mantissa = np.uint32(mantissa << np.uint32(1))
            exponent = np.int32(exponent - np.int32(1))
        mantissa = np.uint32(mantissa & MANTISSA)
    up = np.int32(0)
    if scale_rule == CEIL:
        up = np.int32(mantissa > np.uint32(largest_mantissa))
    elif scale_rule == EVEN:
        up = np.int32(np.uint32(mantissa + np.uint32(half_ulp)) >= IMPLICIT)
    elif scale_rule == NEAREST:
        up = np.int32(mantissa > SQRT2_MANTISSA)
    found = np.int32(exponent - np.int32(127) - np.int32(emax) + up)
    found = np.int32(max(np.int32(least), min(np.int32(most), found)))
    return found if amax != np.uint32(0) else np.int32(least)


@njit(inline="always")
def power_of_two(exponent):  # type: ignore[no-untyped-def]
    """2**exponent as a float32 pattern, for exponents from -149 to 127."""
    if exponent >= np.int32(-126):
        return np.uint32(np.uint32(exponent + np.int32(127)) << np.uint32(23))
    return np.uint32(np.uint32(1) << np.uint32(exponent + np.int32(149)))


@njit(inline="always")
def widened(word):  # type: ignore[no-untyped-def]
    """The float64 pattern of a float32's, by integers."""
    sign = np.uint64(np.uint64(word >> np.uint32(31)) << np.uint64(63))
    field, mantissa = np.int64((word & MAGNITUDE) >> np.uint32(23)), np.uint32(word & MANTISSA)
    if field == np.int64(0):
        if mantissa == np.uint32(0):
            return sign
        field = np.int64(1)
        while mantissa < IMPLICIT:
            mantissa = np.uint32(mantissa << np.uint32(1))
            field = np.int64(field - np.int64(1))
        mantissa = np.uint32(mantissa & MANTISSA)
    field = np.int64(2047) if field == np.int64(255) else np.int64(field + np.int64(1023 - 127))
    return np.uint64(
        sign | np.uint64(np.uint64(field) << np.uint64(52)) | np.uint64(np.uint64(mantissa) << np.uint64(29))
    )


@njit(inline="always")
def narrowed(bits):  # type: ignore[no-untyped-def]
    """The float32 pattern of a float64's whose value a float32 holds."""
    sign = np.uint32(np.uint32(bits >> np.uint64(63)) << np.uint32(31))
    field = np.int64((bits >> np.uint64(52)) & np.uint64(0x7FF))
    mantissa = np.uint64(bits & np.uint64((1 << 52) - 1))
    if field == np.int64(2047):
        return np.uint32(sign | INFINITY | np.uint32(mantissa >> np.uint64(29)))
    exponent = np.int64(field - np.int64(1023))
    if exponent >= np.int64(-126):
        return np.uint32(
            sign
            | np.uint32(np.uint32(exponent + np.int64(127)) << np.uint32(23))
            | np.uint32(mantissa >> np.uint64(29))
        )
    if field == np.int64(0):
        return sign
    significand = np.uint64(mantissa | np.uint64(1 << 52))
    return np.uint32(sign | np.uint32(significand >> np.uint64(np.int64(29 - 126) - exponent)))


class Functions(NamedTuple):
    """The scalar functions of one BlockPlan, for the CPU's loops and the CUDA kernels alike."""

    tensor_scale: Callable[..., Any]
    numbers: Callable[..., Any]
    apply: Callable[..., Any]
    apply_wide: Callable[..., Any]


@cache
def functions(rule: int, shape: int, scale_shape: int, kind: int) -> Functions:
    """What is computed once for a tensor, for a block and for an element."""
    round_bits, at_scale = make_round(rule, shape, 32), make_at_scale(32)
    round_wide, at_wide_scale = make_round(rule, shape, 64), make_at_scale(64)
    round_scale = make_round(0, scale_shape, 32)
    u32, i32, i64, f32 = np.uint32, np.int32, np.int64, np.float32

    @njit(inline="always")
    def tensor_scale(tensor_amax, p):  # type: ignore[no-untyped-def]
        """What brings the scale of the block with the tensor's amax to the top of the scales' format."""
        if tensor_amax <= i64(0):
            return f32(1)
        top = f32(float_of(u32(p[SCALE_LARGEST])) * float_of(u32(p[LARGEST])))
        return min(f32(top / float_of(u32(tensor_amax))), FLOAT32_LARGEST)

    @njit(inline="always")
    def numbers(amax, shared, tensor_amax, p):  # type: ignore[no-untyped-def]
        """Where elements are rounded, what they are multiplied by before, and back, and log2 of a power of two.

        amax: of the block's finite elements. shared: what to take instead where it is not negative.
        """
        origin, largest, overflow, smallest = i32(p[1]), u32(p[2]), u32(p[3]), u32(p[4])
        by, back, exponent = f32(1), f32(1), i32(0)
        if kind == POWER or kind == GAINED:
            a = u32(shared) if shared >= i64(0) else u32(amax)
            exponent = exponent_of_scale(
                a, p[SCALE_RULE], p[EMAX], p[LARGEST_MANTISSA], p[HALF_ULP], p[LEAST_EXPONENT], p[MOST_EXPONENT]
            )
            shift = i64(max(p[LEAST_SHIFT], min(p[MOST_SHIFT], -i64(exponent))))
            origin, largest, overflow, smallest = at_scale(p[1], p[2], p[3], p[4], shift)
            back = float_of(power_of_two(exponent))  # the scale itself
            by = float_of(u32(p[GAIN]))
        elif kind == DIVIDED:
            if shared >= i64(0):
                by = float_of(u32(shared))
            elif amax != u32(0):
                by = min(f32(float_of(u32(p[LARGEST])) / float_of(amax)), FLOAT32_LARGEST)
            back = f32(f32(1) / by)
        else:
            a = u32(shared) if shared >= i64(0) else u32(amax)
            whole = tensor_scale(tensor_amax, p)
            wanted = f32(float_of(a) * f32(whole * f32(f32(1) / float_of(u32(p[LARGEST])))))
            rounded = round_scale(
                bits_of(wanted), u32(0), i32(p[16]), i32(p[17]), u32(p[18]), u32(p[19]), u32(p[20]), u32(p[21]),
                u32(p[22]), u32(p[23]),
            )  # fmt: skip
            back = float_of(rounded)
            divisor = f32(back * f32(f32(1) / whole))
            by = FLOAT32_LARGEST if divisor == f32(0) else min(f32(f32(1) / divisor), FLOAT32_LARGEST)
        return origin, largest, overflow, smallest, by, back, exponent

    @njit(inline="always")
    def apply(word, noise, shift, zero_sign, used, odd, origin, largest, overflow, smallest, by, back, whole):  # type: ignore[no-untyped-def]
        """One element, in 32 bits."""
        if kind == POWER:
            return round_bits(word, noise, shift, origin, largest, overflow, smallest, zero_sign, used, odd)
        scaled = bits_of(float_of(word) * by)
        r = round_bits(scaled, noise, shift, origin, largest, overflow, smallest, zero_sign, used, odd)
        if kind == GAINED:
            return bits_of(float_of(r) / by)
        if kind == DIVIDED:
            return bits_of(float_of(r) * back)
        return bits_of(f32(float_of(r) * back) / whole)

    @njit(inline="always")
    def apply_wide(word, noise, exponent, p):  # type: ignore[no-untyped-def]
        """One element of a block whose scale is too far for 32 bits. Powers of two alone go so far."""
        by = float_of(u32(p[GAIN]))
        scaled = bits_of(float_of(word) * by) if kind == GAINED else u32(word)
        o, la, ov, s = at_wide_scale(p[9], p[10], p[11], p[12], -i64(exponent))
        bits = np.uint64(np.uint64(noise) << np.uint64(32))
        used = np.uint64(np.uint64(p[14]) << np.uint64(32))
        r = narrowed(
            round_wide(widened(scaled), bits, i64(p[8]), o, la, ov, s, np.uint64(p[13]), used, np.uint64(p[15]))
        )
        return bits_of(float_of(r) / by) if kind == GAINED else r

    return Functions(tensor_scale, numbers, apply, apply_wide)
