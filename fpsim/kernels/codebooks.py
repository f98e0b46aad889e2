"""Code books: rounding of one bit pattern by table lookup, construction of the tables, and the Plan of any format.

The Numbers of a code book have other meanings than those of other formats: see BookNumbers.

    shift, base: the bucket of a magnitude `a` is `(a >> shift) - base`, limited to 0 to buckets - 1
    low, high: the two halves of the table's address, of 32 bits each
    buckets: the number of buckets; in a searched book, the size of its list, a power of two
    used: as in other formats
    values: the number of possible results

A table has two halves, one for numbers without a sign bit and one for numbers with a sign bit. The second half is
mirrored, so that only magnitudes are compared. In words of the container, a half consists of:

    limits (buckets): the magnitude at which the result changes within a bucket. A bucket has at most one limit; if
        it has none, this is the pattern of a NaN. In a searched book: the magnitudes at which results begin,
        ascending, padded with a NaN's pattern.
    starts (buckets, not in a searched book): the index of the result below the limit
    results (values): the values' patterns with their signs
    spacings (4 * values, in stochastic rounding): see `make_goes_up`
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fpsim.compiling.compile import load32, load64
from fpsim.compiling.deferred import njit
from fpsim.formats.codebook import Codebook
from fpsim.formats.fixed_point import FixedPoint
from fpsim.formats.floats import FloatFormat
from fpsim.kernels.containers import shift_left, shift_right
from fpsim.kernels.core import (
    BINARY32,
    BINARY64,
    BOOK,
    SEARCHED_BOOK,
    STOCHASTIC,
    VARIANTS,
    Container,
    Numbers,
    Plan,
    draws_noise,
    make_drawn,
    make_plan,
    make_round,
)

SPACING_WORDS = 4
# The largest number of buckets of a half. Beyond it, a search through the limits costs less than memory outside of the
# cache.
MOST_BUCKETS = 1 << 14


class BookNumbers(NamedTuple):
    """The Numbers of a code book, whose fields have other meanings, and therefore other names."""

    shift: int
    base: int
    low: int
    high: int
    buckets: int
    no_sign: int  # 0, as the sign of a result is in its table
    used: int
    values: int
    no_lowest: int = 0


def make_rounding(rule: int, shape: int, width: int) -> Callable[..., Any]:
    """Return a compiled function that rounds one bit pattern to a format of any kind: see `core.make_round`."""
    return make_round_in_book(rule, shape, width) if shape in (BOOK, SEARCHED_BOOK) else make_round(rule, shape, width)


@cache
def make_goes_up(rule: int, width: int) -> Callable[..., Any]:
    """Return a compiled function that says whether a magnitude goes up to the next value, in stochastic rounding.

    The four words at `at` describe the spacing between the two values. The first word is its length, of 32 bits and in
    units of 2**q, or 0 if there is no next value. The next two words are the halves of its beginning, in units of
    2**(q - 32) and modulo 2**64. The fourth word is 32 - q, modulo 2**width. The distance to the beginning is counted
    in units of 2**(q - 32) too, and bits beyond 64 cancel out. The magnitude goes up if distance / (2**32 * length) >=
    1 - R / 2**32, multiplied out.
    """
    container = BINARY32 if width == 32 else BINARY64
    uint, sint = (np.uint32, np.int32) if width == 32 else (np.uint64, np.int64)
    implicit, mantissa_bits = uint(1 << container.mantissa_bits), uint(container.mantissa_bits)
    lowest = np.int64(container.bias + container.mantissa_bits)
    load, drawn, is_b_or_c = (load32 if width == 32 else load64), make_drawn(rule, width), rule > STOCHASTIC
    u64, i64 = np.uint64, np.int64

    @njit(forceinline=True)
    def goes_up(a, noise, used, address, at):
        length = u64(load(address, at))
        begin = u64(u64(load(address, at + i64(1))) | u64(u64(load(address, at + i64(2))) << u64(32)))
        is_subnormal = a < implicit
        field = i64(1) if is_subnormal else i64(a >> mantissa_bits)
        significand = u64(a) if is_subnormal else u64(u64(a & uint(implicit - uint(1))) | u64(implicit))
        shift = i64(i64(field - lowest) + i64(sint(load(address, at + i64(3)))))
        left, right = u64(max(shift, i64(0))), u64(max(i64(-shift), i64(0)))
        place = shift_right(shift_left(significand, left), right)
        distance = u64(place - begin)
        bits, stays = drawn(noise, used)
        rest = u64(u64(1 << 32) - u64(bits >> uint(width - 32)))
        bound = u64(length * u64(rest - u64(stays)))
        up = distance >= bound
        if is_b_or_c and stays != uint(0):
            cut = shift < i64(0) and shift_left(place, right) != significand
            up = distance > bound or (distance == bound and cut)
        return up and length != u64(0)

    return goes_up  # type: ignore[no-any-return]


@cache
def make_round_in_book(rule: int, shape: int, width: int) -> Callable[..., Any]:
    """Return a compiled function of (bits, noise, Numbers) that rounds one bit pattern to a code book."""
    container = BINARY32 if width == 32 else BINARY64
    uint = np.uint32 if width == 32 else np.uint64
    top, infinity = uint(1 << (width - 1)), uint(container.bits(float("inf")))
    is_stochastic, is_searched = draws_noise(rule), shape == SEARCHED_BOOK
    load, goes_up = (load32 if width == 32 else load64), make_goes_up(rule if is_stochastic else STOCHASTIC, width)
    u32, u64, i64 = np.uint32, np.uint64, np.int64

    @njit(forceinline=True)
    def searched(a, address, first, size):
        """Return how many limits of a list, apart from the first one, are at most `a`."""
        # This binary search has a fixed number of steps: threads of a warp stay together, and so do lanes of a vector.
        at, step = i64(0), i64(size >> i64(1))
        while step > i64(0):
            at = i64(at + step) if load(address, i64(first + i64(at + step))) <= a else at
            step = i64(step >> i64(1))
        return at

    @njit(forceinline=True)
    def round_in_book(u, noise, numbers):
        shift, base, low, high, buckets, _, used, values, _ = numbers  # in the order of BookNumbers
        a = uint(u & uint(top - uint(1)))
        address = u64(u64(u32(low)) | u64(u64(u32(high)) << u64(32)))
        size, results = i64(buckets), i64(values)
        # A searched book has only limits; buckets have limits and starts.
        lists = size if is_searched else i64(size * i64(2))
        half = i64(lists + i64(results * i64(1 + SPACING_WORDS) if is_stochastic else results))
        first = half if u >= top else i64(0)
        if is_searched:
            found = searched(a, address, first, size)
        # A bucket holds at most one limit, so that two loads find the result without a search.
        else:
            bucket = i64(i64(a >> uint(shift)) - i64(base))
            bucket = i64(first + max(i64(0), min(i64(size - i64(1)), bucket)))
            found = i64(load(address, i64(bucket + size)))
            found = i64(found + i64(1)) if a >= load(address, bucket) else found
        begin = i64(first + lists)
        if is_stochastic:
            at = i64(i64(begin + results) + i64(found * i64(SPACING_WORDS)))
            found = i64(found + i64(1)) if a <= infinity and goes_up(a, noise, used, address, at) else found
        r = load(address, i64(begin + min(found, i64(results - i64(1)))))
        return u if a > infinity else r  # NaN keeps its payload

    return round_in_book  # type: ignore[no-any-return]


def any_plan(
    fmt: FloatFormat | FixedPoint | Codebook,
    rounding: str,
    overflow: str | None,
    random_bits: int | None,
    width: int,
    variant: str = "A",
    search: bool = False,
) -> Plan:
    """Resolve names to the integers of a kernel for a container of `width` bits, for a format of single numbers.

    search: whether to search through a code book even if buckets would do.
    """
    if not isinstance(fmt, Codebook):
        return make_plan(fmt, rounding, overflow, random_bits, width, variant)
    is_stochastic = rounding == "stochastic"
    rule = STOCHASTIC + VARIANTS.index(variant) if is_stochastic else 0
    table = _table_of(fmt, rounding, fmt.resolve_overflow(overflow), width, search)
    low, high = halves_of(table.words.ctypes.data)
    used = 0xFFFFFFFF & ~((1 << (32 - random_bits)) - 1) if random_bits else 0xFFFFFFFF
    numbers = BookNumbers(table.shift, table.base, low, high, table.buckets, 0, used, table.results)
    return Plan(rule, table.shape, width, Numbers(*numbers))


class Table(NamedTuple):
    """A table, as described in the first lines of this file."""

    shape: int
    shift: int
    base: int
    buckets: int
    results: int
    words: np.ndarray[Any, Any]


# Tables by address, stored for the life of the process: a kernel holds addresses, which keep no memory alive.
_kept: dict[int, np.ndarray[Any, Any]] = {}


def halves_of(address: int) -> tuple[int, int]:
    """Split an address into halves, in which a Plan stores it."""
    return address & 0xFFFFFFFF, address >> 32


def table_address(numbers: Sequence[int]) -> int:
    """Return the address of the table from the Numbers of a code book."""
    book = BookNumbers(*numbers)
    return book.low | book.high << 32


def table_at(address: int) -> np.ndarray[Any, Any]:
    """Return the words of the table at an address of the CPU's memory."""
    return _kept[address]


class _Result(NamedTuple):
    """One result of a half: the least magnitude that is rounded to it, its pattern, and the spacing above it."""

    limit: int
    pattern: int
    spacing: tuple[int, ...] = (0, 0, 0, 0)


@cache
def _table_of(book: Codebook, rounding: str, overflow: str, width: int, search: bool) -> Table:
    """Build the table of a book for a rounding and an overflow rule. Its limits encode `ties` and directions."""
    container = BINARY32 if width == 32 else BINARY64
    make = _stochastic_half if rounding == "stochastic" else _half
    halves = [make(book, rounding, overflow, container, reflected) for reflected in (False, True)]
    count = max(map(len, halves))
    # The halves share shift, base and size, so that a kernel needs one set of numbers for both signs.
    buckets = None if search else _buckets(halves, container)
    words: list[int] = []
    nan = (1 << (width - 1)) - 1
    for results in halves:
        limits = [r.limit for r in results]
        if buckets is None:
            size = 1 << max(count - 1, 1).bit_length()
            words += [*limits, *[nan] * (size - len(limits))]
        else:
            shift, base, size = buckets
            words += _bucket_lists(limits, shift, base, size, nan)
        padded = [*results, *[results[-1]] * (count - len(results))]
        words += [r.pattern for r in padded]
        if rounding == "stochastic":
            words += [word & ((1 << width) - 1) for r in padded for word in r.spacing]
    array = np.array(words, np.uint32 if width == 32 else np.uint64)
    _kept[array.ctypes.data] = array
    if buckets is None:
        return Table(SEARCHED_BOOK, 0, 0, size, count, array)
    return Table(BOOK, *buckets, count, array)


def _bucket_lists(limits: list[int], shift: int, base: int, size: int, nan: int) -> list[int]:
    """Return the limits and the starts of the buckets of one half."""
    places, starts = [nan] * size, [0] * size
    for limit in limits[1:]:
        places[_bucket(limit, shift, base, size)] = limit
    found = 0
    for bucket in range(size):
        starts[bucket] = found
        found += places[bucket] != nan
    return places + starts


def _bucket(magnitude: int, shift: int, base: int, size: int) -> int:
    return max(0, min(size - 1, (magnitude >> shift) - base))


def _buckets(halves: list[list[_Result]], container: Container) -> tuple[int, int, int] | None:
    """Return shift, base and number of the fewest buckets with at most one limit each; None if these are too many."""
    limits = [sorted(r.limit for r in half[1:]) for half in halves]
    # The search begins at the coarsest shift: the first shift that separates all limits yields the smallest table.
    for shift in range(container.mantissa_bits, 0, -1):
        present = sorted(limit >> shift for half in limits for limit in half)
        if not present:
            return shift, 0, 1
        # All magnitudes below the buckets of both halves' second limits share one bucket.
        seconds = [half[1] >> shift for half in limits if len(half) > 1]
        base = max(0, min(seconds, default=present[0]) - 1)
        size = present[-1] - base + 1
        if size > MOST_BUCKETS:
            return None
        if all(len({_bucket(x, shift, base, size) for x in half}) == len(half) for half in limits):
            return shift, base, size
    return None


Bound = Fraction | float  # a float if it is infinite


def _least_pattern(bound: Bound, inclusive: bool, container: Container) -> int:
    """Return the least pattern whose magnitude is above a bound, or equal to it if `inclusive`."""
    if isinstance(bound, float):
        return container.bits(math.inf) if bound > 0 else 0
    if bound < 0 or (bound == 0 and inclusive):
        return 0
    exponent = max(_floor_log2(bound), 1 - container.bias) if bound else 1 - container.bias
    unit = Fraction(2) ** (exponent - container.mantissa_bits)  # the container's last place in the bound's binade
    steps, rest = divmod(bound, unit)
    pattern = ((exponent - (1 - container.bias)) << container.mantissa_bits) + int(steps)
    return pattern + int(rest > 0 or not inclusive)


def _floor_log2(x: Fraction) -> int:
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= x else exponent - 1


def _numbers(book: Codebook, overflow: str) -> tuple[list[float], int]:
    """Return the possible values of a result, in order, and how many entries of `book.ascending` come before them."""
    found = [v for v, _ in book.ascending]
    if overflow != "saturate":
        return found, 0
    return [*book.finite], int(math.isinf(found[0]))


def _half(book: Codebook, rounding: str, overflow: str, container: Container, reflected: bool) -> list[_Result]:
    """Return the results of numbers without a sign bit or, if `reflected`, with one; then all signs are reversed."""
    numbers, skipped = _numbers(book, overflow)
    steps = [_step(book, i + skipped, rounding) for i in range(len(numbers) - 1)]
    if reflected:
        numbers, steps = numbers[::-1], [(-bound, not inclusive) for bound, inclusive in reversed(steps)]
    limits = [0, *(_least_pattern(bound, inclusive, container) for bound, inclusive in steps)]
    patterns = [_pattern(book, v, reflected, container) for v in numbers]
    # Among the results that begin at zero or below, the last is the first of this half. The others belong to the other
    # half.
    first = bisect_right(limits, 0) - 1
    return [_Result(0, patterns[first]), *map(_Result, limits[first + 1 :], patterns[first + 1 :])]


def _step(book: Codebook, i: int, rounding: str) -> tuple[Bound, bool]:
    """Return the bound from which a number becomes value `i + 1` and not `i`, and whether the bound is included."""
    (low, _), (high, _) = book.ascending[i : i + 2]
    border = book.exact_borders[i]
    if rounding == "nearest_away" and border not in (low, high):
        return border, abs(high) >= abs(low)
    # In a book without zero, a number between the two signs has no neighbour toward zero: it becomes the nearer value.
    if rounding.startswith("nearest") or (rounding == "toward_zero" and low < 0 < high):
        return border, book.goes_up(i)
    if rounding == "up" or (rounding == "toward_zero" and high <= 0):
        return _bound(low), False
    return _bound(high), True


def _bound(value: float) -> Bound:
    return value if math.isinf(value) else Fraction(value)


def _stochastic_half(
    book: Codebook, rounding: str, overflow: str, container: Container, reflected: bool
) -> list[_Result]:
    """Return the results of `_half` for stochastic rounding, each with the spacing up to the next one."""
    numbers, skipped = _numbers(book, overflow)
    begins: list[Fraction] = []
    for i, v in enumerate(numbers):
        # The interval of an infinity begins where the next value would be if the last spacing went on.
        if math.isinf(v):
            at, beside = (skipped, numbers[1]) if v < 0 else (skipped + i - 1, numbers[-2])
            begins.append(2 * book.exact_borders[at] - Fraction(beside))
        else:
            begins.append(Fraction(v))
    if reflected:
        numbers, begins = numbers[::-1], [-b for b in reversed(begins)]
    patterns = [_pattern(book, v, reflected, container) for v in numbers]
    found = [_Result(0, patterns[0])]
    for i, (begin, pattern) in enumerate(zip(begins, patterns, strict=True)):
        spacing = _spacing(begin, begins[i + 1]) if i + 1 < len(begins) else (0, 0, 0, 0)
        found.append(_Result(_least_pattern(begin, True, container), pattern, spacing))
    first = bisect_right([r.limit for r in found], 0) - 1
    return [found[first]._replace(limit=0), *found[first + 1 :]]


def _spacing(begin: Fraction, end: Fraction) -> tuple[int, int, int, int]:
    """Return the four words that describe a spacing for `make_goes_up`. The length is rounded to 32 bits."""
    q = _floor_log2(end - begin) - 31
    length = round((end - begin) / Fraction(2) ** q)
    # A length that is rounded up to the next power of two has 33 bits.
    if length == 1 << 32:
        q, length = q + 1, 1 << 31
    place = math.floor(begin * Fraction(2) ** (32 - q)) % (1 << 64)
    return length, place & 0xFFFFFFFF, place >> 32, 32 - q


def _pattern(book: Codebook, value: float, reflected: bool, container: Container) -> int:
    if value == 0:
        value = -0.0 if reflected and book.has_negative_zero else 0.0
    return container.bits(value)
