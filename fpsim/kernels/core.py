"""Rounding: integer functions of one bit pattern.

One definition serves the CPU and CUDA. No compiled function here touches a floating-point number, so that two targets
cannot differ. `uint32 + uint32` is `uint64` in Numba: the result of every step is cast back, because the loops would
vectorise at half the width otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fpsim.checks import refuse, shown
from fpsim.compiling.deferred import njit
from fpsim.formats.codebook import Codebook
from fpsim.formats.fixed_point import FixedPoint
from fpsim.formats.floats import FloatFormat
from fpsim.kernels.containers import integers, shift_left, shift_right

ROUNDINGS = ("nearest_even", "nearest_away", "toward_zero", "up", "down", "to_odd", "stochastic")
NEAREST_EVEN, NEAREST_AWAY, TOWARD_ZERO, UP, DOWN, TO_ODD, STOCHASTIC = range(7)

# Variants of stochastic rounding with few random bits, by name. Variant A is STOCHASTIC; the others follow in this
# order.
#
# With r random bits, the random number R lies between 0 and 2**r - 1. A magnitude is rounded up if d 2**r + R >= 2**r,
# where d is its distance to the lower neighbour in units of the spacing. The variants differ in how d 2**r becomes an
# integer before this test:
#
# - "A" truncates it. Results are too close to zero, by (2**-r - 2**-D) / 2 of the spacing on average where D bits are
#   discarded: by 2**-(r + 1), if D is large.
# - "B" rounds it to nearest, ties away from zero. Results are too far from zero by 2**-(D + 1).
# - "C" rounds it to nearest, ties to even. There is no bias.
# - "C_ties_to_odd" rounds it to nearest, ties to odd. There is no bias.
# - "C_to_odd" rounds it to odd: every number but an integer becomes the odd integer next to it. There is no bias, and a
#   number that is not a value of the format can always go both ways.
#
# A, B and C are StochasticA, StochasticB and StochasticC of IEEE P3109 (interim report, 4.7.4), and StochasticFastest,
# StochasticFast and Stochastic of gfloat, whose StochasticOdd is C_ties_to_odd.
VARIANTS = ("A", "B", "C", "C_ties_to_odd", "C_to_odd")
STOCHASTIC_B, STOCHASTIC_C, STOCHASTIC_C_TIES_TO_ODD, STOCHASTIC_C_TO_ODD = range(STOCHASTIC + 1, STOCHASTIC + 5)
MOST_BITS = 30  # of 32: below R, a kernel needs one bit for ties, and one bit for "more was cut off"

CARRYING = (NEAREST_EVEN, NEAREST_AWAY, TOWARD_ZERO)  # rules that add at most half a spacing

# Shapes: how a format's values lie among those of the container. The shape selects the code that is compiled.
FLAT = 0  # the container's own exponents, fewer mantissa bits: one spacing in units of the last place
GRID = 1  # a narrower exponent range with subnormals: below it the spacing stays the same
GAP = 2  # a narrower exponent range without subnormals: nothing between zero and the smallest value
SCALE = 3  # powers of two without sign or zero
UNSIGNED_ZERO_GRID = 4  # GRID without -0: a shape of its own, because a test for -0 costs GRID an eighth of its speed
FIXED = 5  # UNSIGNED_ZERO_GRID whose lowest value is not minus its largest
BOOK, SEARCHED_BOOK = 6, 7  # a table of values, see kernels/codebooks.py
BESIDE_GAP = 8  # GAP, for numbers outside the gap: zero, and from the smallest value on. No Plan has this shape


class Container(NamedTuple):
    """An IEEE binary interchange format whose bit patterns the core rounds."""

    width: int
    mantissa_bits: int
    bias: int

    def bits(self, value: float) -> int:
        """Return the bit pattern of `value`, rounded to nearest even; for 64 bits, of any value but a subnormal.

        The pattern is computed in float64, where float32's subnormals are normal: a processor that flushes subnormals
        keeps them.
        """
        sign = int(math.copysign(1.0, value) < 0) << (self.width - 1)
        infinity = (2 * self.bias + 1) << self.mantissa_bits
        if value == 0:
            return sign
        if not math.isfinite(value):
            return sign | infinity | (1 << (self.mantissa_bits - 1) if math.isnan(value) else 0)
        exponent = max(math.frexp(value)[1] - 1, 1 - self.bias)
        significand = math.ldexp(abs(value), self.mantissa_bits - exponent)  # without the leading bit: subnormal
        return sign | min(((exponent - (1 - self.bias)) << self.mantissa_bits) + round(significand), infinity)


BINARY32 = Container(32, 23, 127)
BINARY64 = Container(64, 52, 1023)


class Numbers(NamedTuple):
    """A format, an overflow rule and a number of random bits, as the functions of this file take them.

    Numbers of the format are patterns of the container. Code books use the fields differently: see
    kernels/codebooks.py.
    """

    ulp_shift: int  # from a pattern's highest bit down to the last place of a normal number of the format
    origin: int  # a magnitude minus this number has its own ulp_shift in the exponent field: see round_grid
    largest: int  # the largest finite magnitude, and the result for magnitudes beyond it
    overflow: int
    smallest: int  # the smallest magnitude above zero
    zero_sign: int  # the sign bit if the format has -0, else 0
    used: int  # a mask of the random bits in use, among the 32 of a word
    odd: int  # 1 if every significand is odd, because there are no mantissa bits
    lowest: int  # the magnitude of the lowest number, in FIXED


NUMBERS = len(Numbers._fields)


class Plan(NamedTuple):
    """A format, a rounding and an overflow rule as a kernel takes them: three compiled-in integers, and the numbers."""

    rule: int
    shape: int
    width: int
    numbers: Numbers


def needs_wider_container(fmt: FloatFormat | FixedPoint | Codebook) -> bool:
    """Return whether float32 input has to be rounded in a float64 container."""
    if isinstance(fmt, Codebook):
        return False
    if fmt.specials == "scale":
        # Among float32's subnormals, round_scale handles only the largest power of two.
        return fmt.min_exponent < -BINARY32.bias
    if fmt.mantissa_bits == BINARY32.mantissa_bits:
        # There is no bit to discard, but the functions below need at least one.
        return True
    if _is_flat(fmt, BINARY32):
        return False
    # A subnormal of float32 has no leading bit, but round_grid adds one. This does no harm if no word of noise can lift
    # a subnormal to the next value. That holds if the subnormal is below 2**-32 of a spacing, and therefore for all
    # subnormals if the spacing is at least 2**-94.
    return fmt.min_ulp_exponent < -94


def _is_flat(fmt: FloatFormat | FixedPoint, container: Container) -> bool:
    same_exponents = fmt.min_exponent == 1 - container.bias and fmt.subnormals
    return same_exponents and fmt.mantissa_bits > 0 and fmt.has_negative_zero


def require_variant(variant: str, is_stochastic: bool, random_bits: int | None, most: int = MOST_BITS) -> None:
    """Raise ValueError for a variant that does not exist, or that does not fit the rounding and its random bits.

    most: the most random bits that a variant other than "A" can have.
    """
    if not isinstance(variant, str) or variant not in VARIANTS:
        raise ValueError(refuse(f"Unknown variant {shown(variant)}", VARIANTS, word=variant))
    if variant == "A":
        return
    if not is_stochastic:
        raise ValueError(
            f"Got variant={variant!r} without a 'stochastic' rounding, which alone has variants. "
            f"Use rounding='stochastic', or omit variant."
        )
    if random_bits is None:
        raise ValueError(
            f"Got variant={variant!r} without random_bits. Variants differ in how a distance is rounded to a few "
            f"random bits. Use random_bits=8, or another number from 1 to {most}, or omit variant."
        )
    if random_bits > most:
        raise ValueError(
            f"Got random_bits={shown(random_bits)} with variant={variant!r}, which looks at more bits. "
            f"Use random_bits from 1 to {most}, or variant='A'."
        )


def draws_noise(rule: int) -> bool:
    """Return whether a rule is stochastic, in any variant."""
    return rule >= STOCHASTIC


def make_plan(
    fmt: FloatFormat | FixedPoint,
    rounding: str,
    overflow: str | None,
    random_bits: int | None,
    width: int,
    variant: str = "A",
) -> Plan:
    """Resolve names to the integers of a kernel for a container of `width` bits."""
    container = BINARY32 if width == 32 else BINARY64
    rule = ROUNDINGS.index(rounding) + VARIANTS.index(variant)
    if fmt.specials == "scale":
        shape = SCALE
    elif has_lone_lowest(fmt):
        shape = FIXED
    elif _is_flat(fmt, container):
        shape = FLAT
    else:
        shape = (GRID if fmt.has_negative_zero else UNSIGNED_ZERO_GRID) if fmt.subnormals else GAP
    values = {"inf": float("inf"), "nan": float("nan"), "saturate": fmt.largest}
    top_field = fmt.min_ulp_exponent + container.mantissa_bits + container.bias - (width - 1)
    numbers = Numbers(
        ulp_shift=width - 1 - (container.mantissa_bits - fmt.mantissa_bits),
        origin=top_field << container.mantissa_bits,
        largest=container.bits(fmt.largest),
        overflow=container.bits(values[fmt.resolve_overflow(overflow)]),
        smallest=container.bits(fmt.smallest),
        zero_sign=(1 << (width - 1)) if fmt.has_negative_zero else 0,
        # The mask selects the leading bits of a word, because random bits are added to the leading discarded bits.
        used=0xFFFFFFFF & ~((1 << (32 - random_bits)) - 1) if random_bits else 0xFFFFFFFF,
        odd=int(fmt.mantissa_bits == 0),
        lowest=container.bits(abs(fmt.lowest)) if isinstance(fmt, FixedPoint) else 0,
    )
    # The numbers are wrapped to the signed range: plans are passed as int64, even for 64-bit containers.
    return Plan(rule, shape, width, Numbers._make(n - (1 << 64) if n >= 1 << 63 else n for n in numbers))


def has_lone_lowest(fmt: FloatFormat | FixedPoint) -> bool:
    """Return whether the lowest value is not minus the largest: two's complement, and integers without a sign."""
    return isinstance(fmt, FixedPoint) and fmt.lowest != -fmt.largest


def scale_limits(fmt: FloatFormat | FixedPoint | Codebook, width: int) -> tuple[int, int]:
    """Return the least and the largest log2 of a scale at which `width` bits can round to `fmt`: see at_scale.

    The result is (0, 0) if a scale would change nothing, because the format has the container's own exponents. It is
    (0, 0) too if at_scale cannot move all numbers of a format: code books, and fixed point whose lowest value has no
    opposite.
    """
    if isinstance(fmt, Codebook):
        return 0, 0
    container = BINARY32 if width == 32 else BINARY64
    if (
        fmt.specials == "scale"
        or has_lone_lowest(fmt)
        or (width == 32 and (needs_wider_container(fmt) or _is_flat(fmt, container)))
    ):
        return 0, 0
    # The smallest spacing with which subnormals of the container do no harm, as in needs_wider_container.
    lowest = -94 if width == 32 else -950
    highest = math.frexp(fmt.largest)[1] - 1
    return min(0, highest - container.bias), max(0, fmt.min_ulp_exponent - lowest)


@cache
def make_numbers_from(width: int, first: int = 0) -> Callable[..., Any]:
    """Return a compiled function that reads Numbers from memory or a tuple, beginning at index `first`."""
    uint, sint, to_top, i = *integers(width), width - 32, first

    @njit(inline="always", keeps_types=True)
    def numbers_from(p):
        # The function returns values, not a view: a view would be read again after every number that is written.
        return Numbers(
            sint(p[i]), sint(p[i + 1]), uint(p[i + 2]), uint(p[i + 3]), uint(p[i + 4]), uint(p[i + 5]),
            uint(uint(p[i + 6]) << uint(to_top)), uint(p[i + 7]), uint(p[i + 8]),
        )  # fmt: skip

    return numbers_from  # type: ignore[no-any-return]


@njit(forceinline=True, keeps_types=True)
def with_ends(numbers, origin, largest, overflow, smallest):
    """Return Numbers in which the four numbers that depend on a scale are replaced."""
    return Numbers(
        numbers.ulp_shift, origin, largest, overflow, smallest,
        numbers.zero_sign, numbers.used, numbers.odd, numbers.lowest,
    )  # fmt: skip


@cache
def make_at_scale(width: int) -> Callable[..., Any]:
    """Return a compiled function that converts the Numbers of a format to the Numbers of the scaled format.

    Rounding at scale 2**k means to multiply by 2**k, round, and divide again. This is the same as rounding to a format
    whose values are all 2**k times smaller, for which only exponents change. Nothing is multiplied, and nothing is lost
    on the way as long as `k` stays within scale_limits.
    """
    container = BINARY32 if width == 32 else BINARY64
    uint, sint = integers(width)
    infinity, mantissa_bits = np.int64(container.bits(float("inf"))), np.int64(container.mantissa_bits)

    @njit(forceinline=True, keeps_types=True)
    def at_scale(numbers, log2_scale):
        step, overflow = np.int64(np.int64(log2_scale) << mantissa_bits), np.int64(numbers.overflow)
        # inf and NaN are the same at every scale.
        moved = overflow if overflow >= infinity else np.int64(overflow - step)
        origin, largest = sint(np.int64(numbers.origin) - step), uint(np.int64(numbers.largest) - step)
        return with_ends(numbers, origin, largest, uint(moved), uint(np.int64(numbers.smallest) - step))

    return at_scale  # type: ignore[no-any-return]


def make_drawn(rule: int, width: int) -> Callable[..., Any]:
    """Return a compiled function of (noise, mask of the used bits) that prepares a stochastic rule's random bits."""
    uint, _ = integers(width)
    zero, one, is_b_or_c = uint(0), uint(1), rule > STOCHASTIC

    @njit(forceinline=True)
    def drawn(noise, used):
        """Return a word with the random bits R, and 1 if a number exactly at the border is not rounded up, else 0.

        The bits below R are set so that the sum of the word and a distance carries if, and only if, the distance goes
        up.

        In units of 2**-r, a distance goes up if it rounds to T = 2**r - R or beyond. The smallest distance that does so
        is T in A, and T - 1/2 in B. In C the border is T - 1/2 too, but this distance itself goes up only where T, and
        therefore R, is even. When rounding to odd, all distances above T - 1 go up where T is odd, else all from T on.
        """
        bits = uint(noise & used)
        if not is_b_or_c:
            return bits, zero
        last = uint(zero - used)  # the last of the random bits
        odd = uint(bits & last) != zero
        half = uint(last >> one)
        if rule == STOCHASTIC_B:
            return uint(bits | half), zero
        if rule == STOCHASTIC_C_TO_ODD:
            return (uint(bits | uint(last - one)), one) if odd else (bits, zero)
        stays = one if odd != (rule == STOCHASTIC_C_TIES_TO_ODD) else zero
        return uint(bits | uint(half - stays)), stays

    return drawn  # type: ignore[no-any-return]


def make_round(rule: int, shape: int, width: int) -> Callable[..., Any]:
    """Return a compiled function of (bits, noise, Numbers) that rounds one bit pattern.

    `rule`, `shape` and `width` are compiled in. The format's numbers stay arguments, so that one compilation serves
    every format of a shape. `noise` holds 32 uniform bits at the top of the word, which only stochastic rules use.

    The steps are: the sign is split off. `drawn` prepares the random bits. `round_flat`, `round_grid` or, in GAP below
    the smallest number, `round_gap` returns a multiple of the spacing: each adds `addend` before the lower bits are cut
    off. A magnitude beyond the largest number becomes `overflow`. A NaN is put back. The sign is put back, unless the
    result is a zero without a sign. SCALE has a separate function, `round_scale`.
    """
    container = BINARY32 if width == 32 else BINARY64
    uint, sint = integers(width)
    zero, one = uint(0), uint(1)
    top = uint(1 << (width - 1))  # the sign bit
    infinity = uint(container.bits(float("inf")))
    nan = uint(container.bits(float("nan")))
    mantissa_bits = uint(container.mantissa_bits)
    field_shift = sint(container.mantissa_bits)
    implicit = uint(1 << container.mantissa_bits)  # the leading significand bit; one step of the exponent field
    below_leading = uint(width - container.mantissa_bits)
    gap_shift = sint(32 + 23 - container.mantissa_bits)
    to_24_bits = uint(container.mantissa_bits - 23)
    # The flags are constants, because `in` over a tuple is a loop at run time in CUDA.
    is_carrying, is_grid = rule in CARRYING, shape in (GRID, UNSIGNED_ZERO_GRID, FIXED)
    is_stochastic, is_b_or_c = draws_noise(rule), rule > STOCHASTIC
    is_nearest_or_stochastic = rule in (NEAREST_EVEN, NEAREST_AWAY) or is_stochastic
    goes_beyond = is_nearest_or_stochastic or rule == UP
    may_lose_sign = shape in (GAP, BESIDE_GAP, UNSIGNED_ZERO_GRID, FIXED)
    drawn = make_drawn(rule, width)

    @njit(forceinline=True)
    def addend(ulp, odd, negative, noise):
        """Return the number to add to a magnitude before it is cut off below `ulp`. odd: whether bit `ulp` is set."""
        half, mask = uint(ulp >> one), uint(ulp - one)
        if rule == NEAREST_EVEN:
            # IEEE 754-2019, 4.3.1: a tie carries only from an odd neighbour.
            return half if odd else uint(half - one)
        if rule == NEAREST_AWAY:
            return half
        if rule == UP:
            return zero if negative else mask
        if rule == DOWN:
            return mask if negative else zero
        if rule == TO_ODD:
            return zero if odd else mask
        if is_stochastic:
            return noise
        return zero  # TOWARD_ZERO

    @njit(forceinline=True)
    def round_flat(a, negative, noise, ulp, numbers):
        odd = uint(uint(a & ulp) | numbers.odd) != zero
        return uint(uint(a + addend(ulp, odd, negative, noise)) & uint(zero - ulp))

    @njit(forceinline=True)
    def round_grid(a, negative, noise, numbers):
        significand = uint(uint(a & uint(implicit - one)) | implicit)
        # s = width - 1 - (number of discarded bits): constant for normals, and one less for each binade below them.
        s = min(numbers.ulp_shift, sint(sint(sint(a) - numbers.origin) >> field_shift))
        ulp = shift_right(top, uint(s))  # 0 stands for 2**width and more
        odd = uint(significand & ulp) != zero
        if is_carrying:
            # A magnitude below half of the smallest value loses all bits. From that half to the smallest value, 2 *
            # implicit is left.
            kept = uint(uint(significand + addend(ulp, odd, negative, noise)) & uint(zero - ulp))
            return uint(a + uint(kept - significand)) if kept != zero else zero
        mask = uint(ulp - one)
        low = uint(significand & mask)
        if is_stochastic:
            left = sint(s + sint(1))  # a shift to the top, for the distance to the lower neighbour in spacings
            right = uint(sint(0) - left)
            fraction = uint(shift_left(significand, uint(left)) | shift_right(significand, right))
            # The spacing has more than `width` bits here: the bits cut off from the fraction decide ties.
            if is_b_or_c and left < sint(0) and a != zero:
                cut = shift_left(fraction, right) != significand
                fraction = uint(fraction | (one if cut else zero))
            up = noise > uint(~fraction)  # fraction + noise carries
        else:
            up = addend(ulp, odd, negative, noise) > uint(mask & uint(~low))  # low + addend carries
            up = up and a != zero  # zero has no leading bit
        below_smallest = mask >= uint(uint(implicit << one) - one)
        base = zero if below_smallest else uint(a - low)
        step = numbers.smallest if below_smallest else ulp
        return uint(base + (step if up else zero))

    @njit(forceinline=True)
    def round_gap(a, negative, noise, stays, smallest):
        """Round a magnitude below `smallest` to zero or `smallest`."""
        if rule == NEAREST_EVEN:
            up = a > uint(smallest - implicit)  # half of `smallest`: a tie goes to zero
        elif rule == NEAREST_AWAY:
            up = a >= uint(smallest - implicit)
        elif rule == UP:
            up = a != zero and not negative
        elif rule == DOWN:
            up = a != zero and negative
        elif rule == TO_ODD:
            up = a != zero
        elif is_stochastic:
            # The test is a / smallest >= 1 - noise / 2**32, multiplied out: 24 bits times 32 bits fit into 64.
            bound = np.uint64(uint(uint(smallest & uint(implicit - one)) | implicit) >> to_24_bits)
            rest = np.uint64(np.uint64(1 << 32) - np.uint64(noise >> uint(width - 32)))
            bound = np.uint64(bound * np.uint64(rest - np.uint64(stays)))
            distance = sint(gap_shift + sint(sint(a >> mantissa_bits) - sint(smallest >> mantissa_bits)))
            whole = np.uint64(uint(a & uint(implicit - one)) | implicit)
            if distance >= sint(0):
                value = np.uint64(whole << np.uint64(distance))
            else:
                value = shift_right(whole, np.uint64(-distance))
            up = value >= bound
            if is_b_or_c and stays != zero:
                cut = distance < sint(0) and shift_left(value, np.uint64(-distance)) != whole
                up = a != zero and (value > bound or (value == bound and cut))
        else:
            up = False
        return smallest if up else zero

    @njit(forceinline=True)
    def round_bits(u, noise, numbers):
        a = uint(u & uint(top - one))
        sign = uint(u & top)
        negative = sign != zero
        noise, stays = drawn(noise, numbers.used)
        if is_grid:
            r = round_grid(a, negative, noise, numbers)
        else:
            ulp = uint(top >> uint(numbers.ulp_shift))
            if is_stochastic:
                # The noise is aligned with the bits that are cut off: a carry out of these bits rounds up.
                r = round_flat(a, negative, shift_right(noise, uint(numbers.ulp_shift + sint(1))), ulp, numbers)
            else:
                r = round_flat(a, negative, noise, ulp, numbers)
            if shape == GAP:
                r = round_gap(a, negative, noise, stays, numbers.smallest) if a < numbers.smallest else r
        if is_nearest_or_stochastic:
            beyond = numbers.overflow
        # A directed rounding moves a finite value to infinity only on its own side.
        else:
            away = (rule == UP and not negative) or (rule == DOWN and negative)
            beyond = numbers.overflow if away or a >= infinity else numbers.largest
        if shape == FIXED:
            end = numbers.lowest if negative else numbers.largest
            r = end if r > end else r
        else:
            r = beyond if r > numbers.largest else r
        if may_lose_sign:
            sign = uint(sign & numbers.zero_sign) if r == zero else sign
        r = a if a > infinity else r  # NaN keeps its payload
        return uint(r | sign)

    @njit(forceinline=True)
    def round_scale(u, noise, numbers):
        a = uint(u & uint(top - one))
        positive = u < top and a != zero
        # float32 holds the smallest power, 2**-127, as a subnormal.
        subnormal = a < implicit
        base = numbers.smallest if subnormal else uint(a & uint(~uint(implicit - one)))
        ulp = numbers.smallest if subnormal else implicit
        low = uint(a - base) if a >= base else zero
        noise = drawn(noise, numbers.used)[0] >> (below_leading + one if subnormal else below_leading)
        # Every significand is odd, because there are no mantissa bits: a tie goes up.
        up = addend(ulp, True, False, uint(noise)) > uint(uint(ulp - one) & uint(~low))
        r = uint(base + (ulp if up else zero))
        r = max(r, numbers.smallest)
        beyond = numbers.overflow if goes_beyond or a >= infinity else numbers.largest
        r = beyond if r > numbers.largest else r
        return r if positive and a <= infinity else nan

    return round_scale if shape == SCALE else round_bits
