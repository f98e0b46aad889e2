"""Code books: rounding of one bit pattern by a table, and the choice between it and `core.make_round`.

The Numbers of a code book have other meanings than those of other formats, see BookNumbers:

    shift, base: the bucket of a magnitude `a` is `(a >> shift) - base`, within 0 to buckets - 1
    low, high: the halves of the table's address, of 32 bits each
    buckets: in a book that is searched, the size of its list, a power of two
    used: as elsewhere values: the number of possible results

A table has two halves, for numbers without and with a sign bit; in the second everything is reflected, so that only
magnitudes are compared. A half has, in words of the container:

    limits (buckets): in a bucket lies at most one magnitude at which the result changes, this one, or a NaN's pattern.
        In a list that is searched the results begin at these magnitudes, ascending, filled up with a NaN's.
    starts (buckets, not in a list that is searched): the number of the result below the limit
    results (values): the values' patterns with their signs
    spacings (4 * values, in stochastic rounding): see `make_goes_up`
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fpsim.compiling.compile import load32, load64
from fpsim.compiling.deferred import njit
from fpsim.kernels.bits import shift_left, shift_right
from fpsim.kernels.core import (
    BINARY32,
    BINARY64,
    BOOK,
    SEARCHED_BOOK,
    STOCHASTIC,
    draws_noise,
    make_drawn,
    make_round,
)

SPACING_WORDS = 4


class BookNumbers(NamedTuple):
    """The Numbers of a code book, under names of their own."""

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

    The four words at `at` say where the spacing begins, and how long it is, in units of 2**q: `length` of 32 bits, 0
    where no value is next; the two halves of `begin`, 64 bits modulo 2**64, which count 2**-32 of a unit; and 32 - q,
    modulo 2**width. The distance to the beginning is counted in the same units, and bits beyond 64 cancel out. It goes
    up if distance / (2**32 * length) >= 1 - R / 2**32, multiplied out.
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
    """Return a compiled function that rounds one bit pattern to a code book, called as that of `core.make_round`."""
    container = BINARY32 if width == 32 else BINARY64
    uint = np.uint32 if width == 32 else np.uint64
    top, infinity = uint(1 << (width - 1)), uint(container.bits(float("inf")))
    is_stochastic, is_searched = draws_noise(rule), shape == SEARCHED_BOOK
    load, goes_up = (load32 if width == 32 else load64), make_goes_up(rule if is_stochastic else STOCHASTIC, width)
    u32, u64, i64 = np.uint32, np.uint64, np.int64

    @njit(forceinline=True)
    def searched(a, address, first, size):
        """Count the limits of a list, without its first one, that are at most `a`."""
        # Binary search with a fixed number of steps: threads of a warp stay together, and lanes of a vector too.
        at, step = i64(0), i64(size >> i64(1))
        while step > i64(0):
            at = i64(at + step) if load(address, i64(first + i64(at + step))) <= a else at
            step = i64(step >> i64(1))
        return at

    @njit(forceinline=True)
    def round_in_book(u, noise, numbers):
        shift, base, low, high, buckets, _, used, values, _ = numbers  # as BookNumbers has them
        a = uint(u & uint(top - uint(1)))
        address = u64(u64(u32(low)) | u64(u64(u32(high)) << u64(32)))
        size, results = i64(buckets), i64(values)
        lists = size if is_searched else i64(size * i64(2))
        half = i64(lists + i64(results * i64(1 + SPACING_WORDS) if is_stochastic else results))
        first = half if u >= top else i64(0)
        if is_searched:
            found = searched(a, address, first, size)
        # A bucket holds one limit at most, so that two loads find the result without a search.
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
