"""Blocks: the scale of one block, and the rounding of one element at that scale.

Blocks whose scales are powers of two are rounded with integers only: see core.at_scale. All other blocks multiply and
divide in float32, and each operation is rounded separately.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fpsim.compiling.compile import float32_bits, float32_of
from fpsim.compiling.deferred import njit
from fpsim.kernels.codebooks import make_rounding
from fpsim.kernels.containers import leading_zeros, narrowed, widened
from fpsim.kernels.core import BOOK, NUMBERS, SEARCHED_BOOK, make_at_scale, make_numbers_from

# Kinds: how a scale is computed from amax. The kind selects the code that is compiled.
POWER = 0  # a power of two, see SCALE_RULES in fpsim.formats.blocks
GAINED = 1  # a power of two, and elements are rounded at a multiple of their size
DIVIDED = 2  # largest / amax in float32, by which elements are multiplied
NARROW = 3  # amax / largest in a format of its own, beneath a float32 scale of the tensor
QUOTIENT = 4  # amax / largest in float32, by which elements are divided


class BlockPlan(NamedTuple):
    """A block format and a rounding of its elements, as the integers that a kernel takes."""

    rule: int
    shape: int
    scale_shape: int
    kind: int
    parameters: tuple[int, ...]


# Indices in the parameters of a BlockPlan. The Numbers of the elements in 32 bits come first.
WIDE_NUMBERS = NUMBERS  # for elements in 64 bits: at some scales float32's own subnormals would be in the way
SCALE_NUMBERS = 2 * NUMBERS  # Numbers of the scale's format
(
    EMAX,  # the exponent of the largest element
    UP_FROM,  # the mantissa field of an amax from which its exponent counts as one more: the rule of a power of two
    LEAST_EXPONENT,  # the least exponent of a scale
    MOST_EXPONENT,
    LEAST_SHIFT,  # the least log2 of the factor of elements, in 32 bits
    MOST_SHIFT,
    LANDS_ON,  # the element that an amax becomes: a float32 pattern, like all that follow
    GAIN,
    LANDS_HIGHEST_ON,  # among the candidates of a choice; 0 beneath an amax that lands on the largest element
    EXPANSION,  # LANDS_HIGHEST_ON divided by LANDS_ON
    TENSOR_LANDS_ON,  # the value that the tensor's amax becomes under a scale of its own
    LEAST_AMAX,
    COUNTED,  # the largest magnitude that an amax counts: infinity, or every NaN
    INFINITE_SCALE,  # the scale of a block whose amax is not finite
    INFINITE_EXPONENT,  # log2 of that scale
    INFINITE_ELEMENT,  # replaces an infinity that the scale does not see; 0 to round it
    PARAMETERS,  # the number of parameters
) = range(3 * NUMBERS, 3 * NUMBERS + 17)

MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)
SIGN = np.uint32(1 << 31)
MANTISSA = np.uint32(0x007FFFFF)
IMPLICIT = np.uint32(0x00800000)
FLOAT32_LARGEST = np.float32(np.finfo(np.float32).max)
# float32's largest number: plus and minus this number are masks. No finite number is above it, so that one comparison
# of a magnitude finds masks, infinities and NaN alike.
MASK = np.uint32(0x7F7FFFFF)
NAN = np.uint32(0x7FC00000)
NAN_EXPONENT = 1 << 12  # in place of log2 of a scale that is NaN: far beyond every other exponent


@njit(forceinline=True)
def magnitude_of(word):
    return np.uint32(word & MAGNITUDE)


@njit(forceinline=True)
def counted_magnitude(word, counted):
    """Return the magnitude as an amax counts it: 0 for masks, and for patterns above `counted`."""
    magnitude = np.uint32(word & MAGNITUDE)
    return np.uint32(0) if magnitude == MASK or magnitude > counted else magnitude


@njit(forceinline=True)
def amax_of_vector(x0, x1, x2, x3):
    """Return the largest of all patterns, including special ones. A result below MASK is the amax."""
    return max(max(magnitude_of(x0), magnitude_of(x1)), max(magnitude_of(x2), magnitude_of(x3)))


@njit(forceinline=True)
def counted_amax_of_vector(x0, x1, x2, x3, counted):
    """Return the largest magnitude, as `counted_magnitude` counts it."""
    first = max(counted_magnitude(x0, counted), counted_magnitude(x1, counted))
    return max(first, max(counted_magnitude(x2, counted), counted_magnitude(x3, counted)))


@njit(inline="always")
def special_element(before, after, back, p):
    """Return the result for an element that may be a mask or an infinity. after: the rounded element.

    back: the scale of the block; only whether the scale is NaN matters.
    """
    magnitude = np.uint32(before & MAGNITUDE)
    if magnitude == MASK and back == back:
        return np.uint32(before)
    is_replaced = magnitude == INFINITY and p[INFINITE_ELEMENT] != np.int64(0)
    return np.uint32(np.uint32(before) | np.uint32(p[INFINITE_ELEMENT])) if is_replaced else np.uint32(after)


@njit(inline="always")
def special_vector(before, after, back, p):
    """Return four elements, each as `special_element` does."""
    x0, x1, x2, x3 = before
    y0, y1, y2, y3 = after
    y0, y1 = special_element(x0, y0, back, p), special_element(x1, y1, back, p)
    return y0, y1, special_element(x2, y2, back, p), special_element(x3, y3, back, p)


@njit(forceinline=True)
def normalised(magnitude):
    """Return exponent and mantissa fields of a number above zero; a subnormal gets the fields of a normal number."""
    is_subnormal = np.uint32(magnitude) < IMPLICIT
    distance = np.int32(np.int32(leading_zeros(np.uint32(magnitude))) - np.int32(8))  # from leading bit to its place
    distance = distance if is_subnormal else np.int32(0)
    field = np.int32(np.uint32(magnitude) >> np.uint32(23))
    field = np.int32(np.int32(1) - distance) if is_subnormal else field
    return field, np.uint32(np.uint32(np.uint32(magnitude) << np.uint32(distance)) & MANTISSA)


@njit(inline="always")
def wanted_exponent(amax, p):
    """Return log2 of the scale that the rule asks for, for a block whose amax has the pattern `amax`, above 0."""
    field, mantissa = normalised(amax)
    up = np.int32(mantissa >= np.uint32(p[UP_FROM]))
    return np.int32(np.int32(field - np.int32(127)) - np.int32(np.int32(p[EMAX]) - up))


@njit(inline="always")
def exponent_of_scale(amax, p):
    """Return `wanted_exponent`, clamped to the range of the scale's format and of float32; the least one for zeros."""
    least, most = np.int32(p[LEAST_EXPONENT]), np.int32(p[MOST_EXPONENT])
    found = max(least, min(most, wanted_exponent(amax, p)))
    found = found if amax != np.uint32(0) else least
    return found if amax < INFINITY else np.int32(p[INFINITE_EXPONENT])


@njit(inline="always")
def wanted_scale(amax, whole, p):
    """Return the number that is rounded to a block's scale, for a tensor that has a second scale."""
    # The order of operations is TransformerEngine's; if the amax lands elsewhere than on the largest element, it is
    # fouroversix's.
    if p[LANDS_HIGHEST_ON] != np.int64(0):
        highest = np.float32(np.float32(float32_of(amax) / float32_of(p[LANDS_HIGHEST_ON])) * whole)
        return np.float32(highest * float32_of(p[EXPANSION]))
    return np.float32(float32_of(amax) * np.float32(whole * np.float32(np.float32(1) / float32_of(p[LANDS_ON]))))


@njit(forceinline=True)
def power_of_two(exponent):
    """Return 2**exponent as a float32 pattern, for exponents from -149 to 127."""
    normal = np.uint32(np.uint32(exponent + np.int32(127)) << np.uint32(23))
    # The shift is computed for normal exponents too. Its amount is masked, because a shift by a word's width or more is
    # undefined.
    subnormal = np.uint32(np.uint32(1) << np.uint32(np.uint32(exponent + np.int32(149)) & np.uint32(31)))
    return normal if exponent >= np.int32(-126) else subnormal


@njit(forceinline=True)
def divided_by_power(bits, exponent):
    """Return the float64 pattern of a number divided by 2**exponent; both are within or near float32's range."""
    field = np.uint64((bits >> np.uint64(52)) & np.uint64(0x7FF))
    is_moved = np.uint64(0) < field < np.uint64(0x7FF)
    return np.uint64(bits - np.uint64(np.int64(exponent) << np.int64(52))) if is_moved else np.uint64(bits)


@cache
def make_tensor_scale(kind: int) -> Callable[..., Any]:
    """Return a compiled function for the tensor's scale.

    This scale brings the scale of the tensor's largest block to the top of the format of block scales.
    """

    @njit(inline="always")
    def tensor_scale(tensor_amax, p):
        if kind != NARROW or tensor_amax <= np.int64(0):
            return np.float32(1)
        # The scale of an infinite amax is 1 in TransformerEngine, compute_global_encode_scaling_factor_FP4.
        if tensor_amax >= np.int64(INFINITY):
            return float32_of(NAN) if p[INFINITE_SCALE] > np.int64(INFINITY) else np.float32(1)
        return min(np.float32(float32_of(p[TENSOR_LANDS_ON]) / float32_of(tensor_amax)), FLOAT32_LARGEST)

    return tensor_scale  # type: ignore[no-any-return]


@njit(inline="always")
def second_place(first, unit, columns):
    """Return the index, in a loop's `shared`, of the amax from which the second scale of a block is computed.

    first: the first number in `shared`: -1 if the tensor has one second scale, whose amax is the next number; -1 - n if
        n blocks share a second scale, whose amaxes begin at the fourth number, row by row.
    unit: the number of the block, counted by rows of `columns`.
    """
    n = np.int64(-1) - first
    if n <= np.int64(0):
        return np.int64(1)
    in_row = (columns + n - np.int64(1)) // n
    return np.int64(3) + unit // columns * in_row + unit % columns // n


class BlockScale(NamedTuple):
    """Numbers computed once for a block: the four Numbers of its elements that depend on the scale, and the scale."""

    origin: np.int32
    largest: np.uint32
    overflow: np.uint32
    smallest: np.uint32
    by: np.float32  # multiplies elements before they are rounded
    back: np.float32  # multiplies elements afterwards; the scale itself if that is a power of two
    exponent: np.int32  # log2 of the scale if that is a power of two


@cache
def make_block_scale(scale_shape: int, kind: int) -> Callable[..., Any]:
    """Return a compiled function that computes a block's BlockScale."""
    at_scale, round_scale = make_at_scale(32), make_rounding(0, scale_shape, 32)
    elements, scales = make_numbers_from(32), make_numbers_from(32, SCALE_NUMBERS)
    u32, i32, i64, f32 = np.uint32, np.int32, np.int64, np.float32

    @njit(inline="always")
    def block_scale(amax, shared, whole, p):
        """Return the BlockScale. amax: as `counted_magnitude` counts it. shared: replaces amax if not negative."""
        numbers = elements(p)
        by, back, exponent = f32(1), f32(1), i32(0)
        a = u32(shared) if shared >= i64(0) else u32(amax)
        is_finite, infinite = a < INFINITY, float32_of(p[INFINITE_SCALE])
        if kind == POWER or kind == GAINED:
            exponent = exponent_of_scale(a, p)
            # The shift is clamped to the exponents at which 32 bits can round; `apply_far` rounds elements at a scale
            # beyond these.
            shift = max(p[LEAST_SHIFT], min(p[MOST_SHIFT], -i64(exponent)))
            numbers = at_scale(numbers, shift)
            by, back = float32_of(p[GAIN]), float32_of(power_of_two(exponent)) if is_finite else infinite
        elif kind == DIVIDED:
            # A block of zeros has a scale of 1.
            nonzero = a if a != u32(0) else u32(p[LANDS_ON])
            by = min(f32(float32_of(p[LANDS_ON]) / float32_of(nonzero)), FLOAT32_LARGEST)
            # The scale of an infinite block is 1 or NaN, and so is its inverse.
            by = by if is_finite else infinite
            # For this kind `shared` is the multiplier itself, computed once for the whole tensor.
            by = float32_of(shared) if shared >= i64(0) else by
            back = f32(f32(1) / by)
        elif kind == QUOTIENT:
            back = f32(float32_of(max(a, u32(p[LEAST_AMAX]))) / float32_of(p[LANDS_ON]))
            back = back if is_finite else infinite
            by = back if back != f32(0) else f32(1)
        else:
            back = float32_of(round_scale(float32_bits(wanted_scale(a, whole, p)), u32(0), scales(p)))
            back = back if is_finite else infinite
            # There are two reciprocals, in the order of TransformerEngine: whole / back in one step may differ in the
            # last bit.
            divisor = f32(back * f32(f32(1) / whole))
            by = min(f32(f32(1) / divisor), FLOAT32_LARGEST) if divisor != f32(0) else FLOAT32_LARGEST
        return BlockScale(
            numbers.origin, numbers.largest, numbers.overflow, numbers.smallest, f32(by), f32(back), i32(exponent)
        )

    return block_scale  # type: ignore[no-any-return]


@cache
def make_apply(rule: int, shape: int, kind: int) -> Callable[..., Any]:
    """Return a compiled function that rounds one element in 32 bits. numbers: the Numbers at the block's scale."""
    round_bits = make_rounding(rule, shape, 32)

    @njit(forceinline=True)
    def apply(word, noise, numbers, by, back, whole):
        if kind == POWER:
            return round_bits(word, noise, numbers)
        # QUOTIENT divides, as bitsandbytes and torchao do: a product with the reciprocal may differ in the last bit.
        scaled = float32_bits(np.float32(float32_of(word) / by if kind == QUOTIENT else float32_of(word) * by))
        r = round_bits(scaled, noise, numbers)
        if kind == GAINED:
            # The scale was applied within the rounding: only the gain is left to undo.
            return float32_bits(np.float32(float32_of(r) / by))
        if kind == DIVIDED or kind == QUOTIENT:
            return float32_bits(np.float32(float32_of(r) * back))
        return float32_bits(np.float32(np.float32(float32_of(r) * back) / whole))

    return apply  # type: ignore[no-any-return]


@cache
def make_apply_far(rule: int, shape: int, kind: int) -> Callable[..., Any]:
    """Return a compiled function that rounds an element at a power of two that is too far for 32 bits."""
    round_wide, at_scale = make_rounding(rule, shape, 64), make_at_scale(64)
    narrow_numbers, wide_numbers = make_numbers_from(32), make_numbers_from(64, WIDE_NUMBERS)
    u32, u64, i64, is_book = np.uint32, np.uint64, np.int64, shape in (BOOK, SEARCHED_BOOK)
    beyond, infinity64, magnitude64 = u64((1023 + 128) << 52), u64(0x7FF << 52), u64((1 << 63) - 1)

    @njit(forceinline=True)
    def apply_far(word, noise, exponent, p):
        if exponent == np.int32(NAN_EXPONENT):
            return NAN
        if not is_book and np.uint32(word & MAGNITUDE) == np.uint32(0):
            return np.uint32(word & narrow_numbers(p).zero_sign)
        by = float32_of(p[GAIN])
        scaled = float32_bits(np.float32(float32_of(word) * by)) if kind == GAINED else np.uint32(word)
        # A code book's table cannot be moved to a scale: its numbers are scaled instead.
        numbers, wide = at_scale(wide_numbers(p), i64(0) if is_book else -i64(exponent)), widened(scaled)
        wide = divided_by_power(wide, exponent) if is_book else wide
        rounded = round_wide(wide, u64(u64(noise) << u64(32)), numbers)
        rounded = divided_by_power(rounded, -exponent) if is_book else rounded
        # At the largest of all scales, an element may lie beyond float32's range.
        is_beyond = beyond <= u64(rounded & magnitude64) < infinity64
        rounded = u32(u32(word & SIGN) | INFINITY) if is_beyond else narrowed(rounded)
        return float32_bits(np.float32(float32_of(rounded) / by)) if kind == GAINED else rounded

    return apply_far  # type: ignore[no-any-return]


@njit(inline="always")
def is_near(exponent, p):
    """Return whether elements can be rounded at this scale in 32 bits."""
    return p[LEAST_SHIFT] <= -np.int64(exponent) <= p[MOST_SHIFT]
