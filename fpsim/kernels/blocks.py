"""Blocks: what is computed for a block, its scale, and for an element of it, its rounding at that scale.

Blocks whose scales are powers of two are rounded by integers alone, see rounding.at_scale. Others multiply and divide
in float32, each operation rounded by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fpsim.kernels.bits import leading_zeros
from fpsim.kernels.codebooks import make_rounding
from fpsim.kernels.compile import float32_bits, float32_of
from fpsim.kernels.core import BOOK, SEARCHED_BOOK, make_at_scale
from fpsim.kernels.deferred import njit

# How a scale follows from amax. It selects the code that is compiled.
POWER = 0  # a power of two, see SCALE_RULES in fpsim.formats.blocks
GAINED = 1  # a power of two, and elements are rounded at a multiple of their size
DIVIDED = 2  # largest / amax in float32, by which elements are multiplied
NARROW = 3  # amax / largest in a format of its own, beneath a float32 for the tensor
QUOTIENT = 4  # amax / largest in float32, by which elements are divided

FLOOR, CEIL, EVEN, NEAREST = range(4)


class BlockPlan(NamedTuple):
    """A block format and a rounding of its elements as what a kernel takes."""

    rule: int
    shape: int
    scale_shape: int
    kind: int
    parameters: tuple[int, ...]


# Where things are in the parameters of a BlockPlan. The elements' Plan in 32 bits comes first, 8 integers.
WIDE_PLAN = 8  # of the elements in 64 bits, for scales at which float32's own subnormals would be in the way
SCALE_PLAN = 16  # of the scale's format
SCALE_RULE = 24
EMAX = 25  # the exponent of the largest element
LARGEST_MANTISSA = 26  # its float32 mantissa field
HALF_ULP = 27  # of an element's significand, in units of a float32's last place
LEAST_EXPONENT, MOST_EXPONENT = 28, 29  # of a scale
LEAST_SHIFT, MOST_SHIFT = 30, 31  # of log2 of what elements are multiplied by, in 32 bits
LARGEST, GAIN, SCALE_LARGEST = 32, 33, 34  # as float32 patterns
LEAST_AMAX = 35  # as a float32 pattern
PARAMETERS = 36

MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)
MANTISSA = np.uint32(0x007FFFFF)
IMPLICIT = np.uint32(0x00800000)
SQRT2_MANTISSA = np.uint32(3474675)  # floor(2**23 * (sqrt(2) - 1)): no float32 is sqrt(2)
FLOAT32_LARGEST = np.float32(np.finfo(np.float32).max)


@njit(forceinline=True)
def finite_magnitude(word):
    magnitude = np.uint32(word & MAGNITUDE)
    return magnitude if magnitude < INFINITY else np.uint32(0)


@njit(forceinline=True)
def normalised(magnitude):
    """The exponent field and the mantissa field of a number above zero; a subnormal's as if the range went on below."""
    is_subnormal = np.uint32(magnitude) < IMPLICIT
    distance = np.int32(np.int32(leading_zeros(np.uint32(magnitude))) - np.int32(8))  # of the leading bit to its place
    distance = distance if is_subnormal else np.int32(0)
    field = np.int32(np.uint32(magnitude) >> np.uint32(23))
    field = np.int32(np.int32(1) - distance) if is_subnormal else field
    return field, np.uint32(np.uint32(np.uint32(magnitude) << np.uint32(distance)) & MANTISSA)


@njit(inline="always")
def wanted_exponent(amax, p):
    """log2 of the scale that the rule gives a block whose largest finite magnitude has the pattern `amax`, above 0."""
    field, mantissa = normalised(amax)
    up = np.int32(0)
    if p[SCALE_RULE] == CEIL:
        up = np.int32(mantissa > np.uint32(p[LARGEST_MANTISSA]))
    elif p[SCALE_RULE] == EVEN:
        up = np.int32(np.uint32(mantissa + np.uint32(p[HALF_ULP])) >= IMPLICIT)
    elif p[SCALE_RULE] == NEAREST:
        up = np.int32(mantissa > SQRT2_MANTISSA)
    return np.int32(np.int32(field - np.int32(127)) - np.int32(np.int32(p[EMAX]) - up))


@njit(inline="always")
def exponent_of_scale(amax, p):
    """The same within what the scale's format and a float32 hold; the least for a block of zeros."""
    least, most = np.int32(p[LEAST_EXPONENT]), np.int32(p[MOST_EXPONENT])
    found = max(least, min(most, wanted_exponent(amax, p)))
    return found if amax != np.uint32(0) else least


@njit(inline="always")
def wanted_scale(amax, whole, p):
    """What is rounded to the scale of a block beneath a tensor's own, in the order of TransformerEngine."""
    return np.float32(float32_of(amax) * np.float32(whole * np.float32(np.float32(1) / float32_of(p[LARGEST]))))


@njit(forceinline=True)
def power_of_two(exponent):
    """2**exponent as a float32 pattern, for exponents from -149 to 127."""
    normal = np.uint32(np.uint32(exponent + np.int32(127)) << np.uint32(23))
    subnormal = np.uint32(np.uint32(1) << np.uint32(np.uint32(exponent + np.int32(149)) & np.uint32(31)))
    return normal if exponent >= np.int32(-126) else subnormal


@njit(forceinline=True)
def widened(word):
    """The float64 pattern of a float32's, by integers."""
    sign = np.uint64(np.uint64(word >> np.uint32(31)) << np.uint64(63))
    magnitude = np.uint32(word & MAGNITUDE)
    if magnitude == np.uint32(0):
        return sign
    field, mantissa = normalised(magnitude)
    wide = np.int64(2047) if magnitude >= INFINITY else np.int64(field) + np.int64(1023 - 127)
    high = np.uint64(np.uint64(wide) << np.uint64(52))
    return np.uint64(sign | high | np.uint64(np.uint64(mantissa) << np.uint64(29)))


@njit(forceinline=True)
def narrowed(bits):
    """The float32 pattern of a float64's whose value a float32 holds."""
    sign = np.uint32(np.uint32(bits >> np.uint64(63)) << np.uint32(31))
    field = np.int64((bits >> np.uint64(52)) & np.uint64(0x7FF))
    mantissa = np.uint64(bits & np.uint64((1 << 52) - 1))
    if field == np.int64(2047):
        return np.uint32(sign | INFINITY | np.uint32(mantissa >> np.uint64(29)))
    exponent = np.int64(field - np.int64(1023))
    if exponent >= np.int64(-126):
        high = np.uint32(np.uint32(exponent + np.int64(127)) << np.uint32(23))
        return np.uint32(sign | high | np.uint32(mantissa >> np.uint64(29)))
    if field == np.int64(0):
        return sign
    significand = np.uint64(mantissa | np.uint64(1 << 52))
    return np.uint32(sign | np.uint32(significand >> np.uint64(np.int64(29 - 126) - exponent)))


@njit(forceinline=True)
def divided_by_power(bits, exponent):
    """The float64 pattern of a number over 2**exponent, neither of them far from float32's range."""
    field = np.uint64((bits >> np.uint64(52)) & np.uint64(0x7FF))
    is_moved = np.uint64(0) < field < np.uint64(0x7FF)
    return np.uint64(bits - np.uint64(np.int64(exponent) << np.int64(52))) if is_moved else np.uint64(bits)


@cache
def make_tensor_scale(kind: int) -> Callable[..., Any]:
    """What brings the scale of the block with the tensor's amax to the top of the scales' format."""

    @njit(inline="always")
    def tensor_scale(tensor_amax, p):
        if kind != NARROW or tensor_amax <= np.int64(0):
            return np.float32(1)
        top = np.float32(float32_of(p[SCALE_LARGEST]) * float32_of(p[LARGEST]))
        return min(np.float32(top / float32_of(tensor_amax)), FLOAT32_LARGEST)

    return tensor_scale  # type: ignore[no-any-return]


@cache
def make_numbers(scale_shape: int, kind: int) -> Callable[..., Any]:
    """What is computed once for a block, as a compiled function.

    It gives the four numbers of rounding.at_scale, what elements are multiplied `by` before they are rounded and
    `back` afterwards (the scale itself, where it is a power of two), and log2 of such a scale.
    """
    at_scale, round_scale = make_at_scale(32), make_rounding(0, scale_shape, 32)
    u32, i32, i64, f32, s = np.uint32, np.int32, np.int64, np.float32, SCALE_PLAN

    @njit(inline="always")
    def numbers(amax, shared, whole, p):
        """amax: of the block's finite elements. shared: what to take instead where it is not negative."""
        origin, largest, overflow, smallest = i32(p[1]), u32(p[2]), u32(p[3]), u32(p[4])
        by, back, exponent = f32(1), f32(1), i32(0)
        a = u32(shared) if shared >= i64(0) else u32(amax)
        if kind == POWER or kind == GAINED:
            exponent = exponent_of_scale(a, p)
            shift = max(p[LEAST_SHIFT], min(p[MOST_SHIFT], -i64(exponent)))
            origin, largest, overflow, smallest = at_scale(p[1], p[2], p[3], p[4], shift)
            by, back = float32_of(p[GAIN]), float32_of(power_of_two(exponent))
        elif kind == DIVIDED:
            nonzero = a if a != u32(0) else u32(p[LARGEST])  # a block of zeros has a scale of 1
            by = min(f32(float32_of(p[LARGEST]) / float32_of(nonzero)), FLOAT32_LARGEST)
            by = float32_of(shared) if shared >= i64(0) else by
            back = f32(f32(1) / by)
        elif kind == QUOTIENT:
            back = f32(float32_of(max(a, u32(p[LEAST_AMAX]))) / float32_of(p[LARGEST]))
            by = back if back != f32(0) else f32(1)
        else:
            top, over, least, sign = u32(p[s + 2]), u32(p[s + 3]), u32(p[s + 4]), u32(p[s + 5])
            q, used, odd = float32_bits(wanted_scale(a, whole, p)), u32(p[s + 6]), u32(p[s + 7])
            back = float32_of(round_scale(q, u32(0), i32(p[s]), i32(p[s + 1]), top, over, least, sign, used, odd))
            divisor = f32(back * f32(f32(1) / whole))
            by = min(f32(f32(1) / divisor), FLOAT32_LARGEST) if divisor != f32(0) else FLOAT32_LARGEST
        return i32(origin), u32(largest), u32(overflow), u32(smallest), f32(by), f32(back), i32(exponent)

    return numbers  # type: ignore[no-any-return]


@cache
def make_apply(rule: int, shape: int, kind: int) -> Callable[..., Any]:
    """The rounding of one element of a block in 32 bits, as a compiled function."""
    round_bits = make_rounding(rule, shape, 32)

    @njit(forceinline=True)
    def apply(word, noise, shift, zero_sign, used, odd, origin, largest, overflow, smallest, by, back, whole):
        if kind == POWER:
            return round_bits(word, noise, shift, origin, largest, overflow, smallest, zero_sign, used, odd)
        scaled = float32_bits(np.float32(float32_of(word) / by if kind == QUOTIENT else float32_of(word) * by))
        r = round_bits(scaled, noise, shift, origin, largest, overflow, smallest, zero_sign, used, odd)
        if kind == GAINED:
            # the rounding was at the scale already: what is left to undo is the gain
            return float32_bits(np.float32(float32_of(r) / by))
        if kind == DIVIDED or kind == QUOTIENT:
            return float32_bits(np.float32(float32_of(r) * back))
        return float32_bits(np.float32(np.float32(float32_of(r) * back) / whole))

    return apply  # type: ignore[no-any-return]


@cache
def make_apply_far(rule: int, shape: int, kind: int) -> Callable[..., Any]:
    """The rounding of one element of a block whose scale is too far for 32 bits: powers of two alone go so far."""
    round_wide, at_scale = make_rounding(rule, shape, 64), make_at_scale(64)
    u64, i64, w, is_book = np.uint64, np.int64, WIDE_PLAN, shape in (BOOK, SEARCHED_BOOK)

    @njit(forceinline=True)
    def apply_far(word, noise, exponent, p):
        if not is_book and np.uint32(word & MAGNITUDE) == np.uint32(0):
            return np.uint32(word & np.uint32(p[5]))
        by = float32_of(p[GAIN])
        scaled = float32_bits(np.float32(float32_of(word) * by)) if kind == GAINED else np.uint32(word)
        log2_scale = i64(0) if is_book else -i64(exponent)
        origin, largest, overflow, smallest = at_scale(p[w + 1], p[w + 2], p[w + 3], p[w + 4], log2_scale)
        bits, used = u64(u64(noise) << u64(32)), u64(u64(p[w + 6]) << u64(32))
        sign, odd, shift, wide = u64(p[w + 5]), u64(p[w + 7]), i64(p[w]), widened(scaled)
        wide = divided_by_power(wide, exponent) if is_book else wide  # a table stays as it is
        rounded = round_wide(wide, bits, shift, origin, largest, overflow, smallest, sign, used, odd)
        rounded = narrowed(divided_by_power(rounded, -exponent) if is_book else rounded)
        return float32_bits(np.float32(float32_of(rounded) / by)) if kind == GAINED else rounded

    return apply_far  # type: ignore[no-any-return]


@njit(inline="always")
def is_near(exponent, p):
    """Whether elements can be rounded at this scale in 32 bits."""
    return p[LEAST_SHIFT] <= -np.int64(exponent) <= p[MOST_SHIFT]
