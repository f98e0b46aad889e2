"""A second definition of rounding, in float64 arithmetic, to verify the kernels: `python -m fpsim verify`.

This definition shares nothing with `kernels/core.py`: significands are counted in units of the last place, which is
exact in float64, and the noise is computed independently. The formats, with their exponents and largest values, come
from `formats/`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fpsim.formats.blocks import BlockFormat
from fpsim.formats.codebook import Codebook
from fpsim.formats.floats import FloatFormat

__all__ = ["noise_of", "rounded_in_blocks", "rounded_in_float64", "rounded_to_codebook"]

Array = np.ndarray[Any, np.dtype[Any]]
_WORD = 2.0**32
Few = tuple[int, str] | None  # random bits and variant, if they are given


def rounded_in_float64(
    x: Array,
    fmt: FloatFormat,
    rounding: str,
    noise: Array | None = None,
    random_bits: int | None = None,
    variant: str = "A",
) -> Array:
    """Return the expected `fpsim.round_to(x, fmt, rounding, None, random_bits, variant=variant)`, as float64.

    NaN has no payload here.

    x: float32, of any shape.
    noise: uint32 of the same shape for "stochastic": see `noise_of`.
    """
    few = None if random_bits is None else (random_bits, variant)
    with np.errstate(invalid="ignore", over="ignore"):
        wide = x.astype(np.float64)
        a, negative = np.abs(wide), np.signbit(wide)
        finite = np.where(np.isfinite(a), a, 0.0)
        exponent = np.maximum(np.frexp(finite)[1] - 1, fmt.min_exponent)
        # The unit is a power of two, by which float64 divides every float32 exactly.
        unit = np.ldexp(1.0, exponent - fmt.mantissa_bits)
        r = _whole(finite / unit, negative, rounding, noise, few) * unit
        if not fmt.subnormals:
            gap = finite < fmt.smallest
            r = np.where(gap, _beside_a_gap(finite, fmt.smallest, negative, rounding, noise, few), r)
        # A scale cannot be zero: numbers below the smallest power become this power.
        if not fmt.has_zero:
            r = np.maximum(r, fmt.smallest)
        r = np.where(np.isinf(a), np.inf, r)
        r = np.where(r > fmt.largest, _beyond(a, fmt, rounding, negative), r)
        r = np.copysign(r, wide)
    if not fmt.has_negative_zero:
        r = np.where(r == 0, 0.0, r)
    is_nan = np.isnan(wide) | (~np.asarray(fmt.has_zero) & ((wide <= 0) | np.isinf(wide) & negative))
    return np.where(is_nan, np.nan, r)


def _whole(k: Array, negative: Array, rounding: str, noise: Array | None, few: Few) -> Array:
    """Round k, a magnitude in units of the last place, to whole units."""
    low = np.floor(k)
    rest = k - low
    if rounding == "nearest_even":
        return np.rint(k)
    if rounding == "nearest_away":
        return low + (rest >= 0.5)
    if rounding == "toward_zero":
        return low
    if rounding in ("up", "down"):
        return low + ((rest > 0) & (negative == (rounding == "down")))
    if rounding == "to_odd":
        return low + ((rest > 0) & (low % 2 == 0))
    assert noise is not None
    if few is not None:
        return low + _goes_up(rest, 1.0, noise, *few)
    return low + (np.floor(rest * _WORD) + noise >= _WORD)


def _goes_up(part: Array, whole: float, noise: Array, random_bits: int, variant: str) -> Array:
    """Return whether a number at the distance `part` above its lower neighbour is rounded up, by IEEE P3109, 4.7.4.

    whole: the distance between the two neighbours.

    The computation is exact: it uses products with powers of two, a remainder, and a quotient that is an integer below
    2**32.
    """
    random, top = (noise >> np.uint32(32 - random_bits)).astype(np.float64), 2.0**random_bits
    # Rounding to nearest, ties away, means to add a half and cut off: both sides are counted in halves.
    if variant == "B":
        random, top = 2 * random + 1, 2 * top
    rest = np.fmod(part * top, whole)
    low = (part * top - rest) / whole
    odd = low % 2 == 1
    up = {
        "A": rest < 0,
        "B": rest < 0,
        "C": (2 * rest > whole) | ((2 * rest == whole) & odd),
        "C_ties_to_odd": (2 * rest > whole) | ((2 * rest == whole) & ~odd),
        "C_to_odd": (rest > 0) & ~odd,
    }[variant]
    return low + up + random >= top


def _beside_a_gap(a: Array, smallest: float, negative: Array, rounding: str, noise: Array | None, few: Few) -> Array:
    """Round to zero or to the smallest value, between which there is no other value."""
    if rounding == "nearest_even":
        up = a > smallest / 2
    elif rounding == "nearest_away":
        up = a >= smallest / 2
    elif rounding == "stochastic":
        assert noise is not None
        if few is not None:
            return np.where(_goes_up(np.minimum(a, smallest), smallest, noise, *few), smallest, 0.0)
        up = a * _WORD >= smallest * (_WORD - noise.astype(np.float64))
    elif rounding == "toward_zero":
        up = np.zeros(a.shape, bool)
    else:
        up = (a > 0) & ((rounding == "to_odd") | (negative == (rounding == "down")))
    return np.where(up, smallest, 0.0)


def _beyond(a: Array, fmt: FloatFormat, rounding: str, negative: Array) -> Array:
    """Return the result for numbers beyond the largest value.

    Directed roundings keep the result finite, unless the number is infinite or the rounding goes outwards.
    """
    overflow = {"inf": np.inf, "nan": np.nan, "saturate": fmt.largest}[fmt.resolve_overflow()]
    if rounding in ("nearest_even", "nearest_away", "stochastic"):
        return np.full(a.shape, overflow)
    outwards = np.isinf(a)
    if rounding in ("up", "down"):
        outwards = outwards | (negative == (rounding == "down"))
    return np.where(outwards, overflow, fmt.largest)


# Threefry-4x32 with 12 rounds: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
_ROTATIONS = ((10, 26), (11, 21), (13, 27), (23, 5), (6, 20), (17, 11), (25, 10), (18, 20))


def noise_of(n: int, key: int) -> Array:
    """Return the noise of the first n elements of a call with this key of 64 bits, as uint32."""
    counters = np.arange(-(-n // 128) * 16, dtype=np.uint64)
    # (4, counters): word w of counter 16 b + l is for element 128 b + 32 w + l.
    words = _threefry(counters, key)
    blocks = words.reshape(4, -1, 16).transpose(1, 0, 2)  # block, word, lane
    exchanged = (blocks << np.uint32(16)) | (blocks >> np.uint32(16))  # for the elements 16 places further on
    return np.stack([blocks, exchanged], axis=2).reshape(-1)[:n]


def _threefry(counters: Array, key: int) -> Array:
    k = [np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32 & 0xFFFFFFFF), np.uint32(0), np.uint32(0)]
    k.append(np.uint32(0x1BD11BDA) ^ k[0] ^ k[1])
    low, high = (counters & np.uint64(0xFFFFFFFF)).astype(np.uint32), (counters >> np.uint64(32)).astype(np.uint32)
    x = [low + k[0], high + k[1], np.zeros_like(low), np.zeros_like(low)]
    with np.errstate(over="ignore"):
        for i in range(12):
            first, second = _ROTATIONS[i % 8]
            a, b = (1, 3) if i % 2 == 0 else (3, 1)
            for at, other, turn in ((0, a, first), (2, b, second)):
                x[at] = x[at] + x[other]
                x[other] = ((x[other] << np.uint32(turn)) | (x[other] >> np.uint32(32 - turn))) ^ x[at]
            if i % 4 == 3:
                injection = i // 4 + 1
                x = [x[j] + k[(injection + j) % 5] for j in range(4)]
                x[3] = x[3] + np.uint32(injection)
    return np.stack(x)


def rounded_to_codebook(x: Array, book: Codebook, rounding: str) -> Array:
    """Return the expected `fpsim.round_to(x, book, rounding)`, as float64. NaN has no payload here.

    book: a code book whose borders float64 holds exactly.
    rounding: "nearest_even", "toward_zero", "up" or "down".
    """
    with np.errstate(invalid="ignore"):  # a signalling NaN
        wide = x.astype(np.float64)
    values = np.array([v for v, _ in book.ascending])
    last = len(values) - 1
    if rounding == "nearest_even":
        borders = np.array(book.midpoints)
        below = np.searchsorted(borders, wide, "left")  # the number of borders that were passed
        goes_up = np.array([book.goes_up(i) for i in range(last)])
        beside = np.minimum(below, last - 1)
        index = below + ((wide == borders[beside]) & (below < last) & goes_up[beside])
    else:
        low = np.clip(np.searchsorted(values, wide, "right") - 1, 0, last)
        high = np.clip(np.searchsorted(values, wide, "left"), 0, last)
        up = (wide < 0) if rounding == "toward_zero" else np.full(wide.shape, rounding == "up")
        index = np.where(up, high, low)
    chosen = values[index]
    zero = np.copysign(0.0, wide) if book.has_negative_zero else np.zeros_like(wide)
    return np.where(np.isnan(wide), np.nan, np.where(chosen == 0, zero, chosen))


def rounded_in_blocks(x: Array, fmt: BlockFormat) -> Array:
    """Return the expected `fpsim.round_to(x, fmt)`, as float64.

    x: float32 of two axes, in blocks along the last axis.
    fmt: a format whose scales are powers of two, with the scale rule "floor" or "ceil".
    """
    length = fmt.tile[1] or x.shape[1]
    with np.errstate(invalid="ignore"):
        wide = x.astype(np.float64)
    places = range(0, x.shape[1], length)
    return np.concatenate([np.stack([_block(row[i : i + length], fmt) for row in wide]) for i in places], axis=1)


def _block(v: Array, fmt: BlockFormat) -> Array:
    element = fmt.element
    assert isinstance(element, FloatFormat)
    is_mask = np.abs(v) == np.finfo(np.float32).max
    amax = np.abs(np.where(is_mask, 0.0, v)).max()
    if fmt.nonfinite == "saturate":
        amax = np.abs(np.where(is_mask | np.isnan(v), 0.0, v)).max()
    elif not np.isfinite(amax):
        return np.full(v.shape, np.nan)
    scale = fmt.scale_of_infinity if amax == np.inf else 2.0 ** _log2_scale(amax, element.largest, str(fmt.scale_rule))
    # Elements saturate: OCP MX v1.0, 6.3.
    with np.errstate(over="ignore"):
        elements = rounded_in_float64(np.clip(v / scale, -element.largest, element.largest), element, "nearest_even")
        rounded = (elements * scale).astype(np.float32).astype(np.float64)
    return np.where(is_mask, v, rounded)


def _log2_scale(amax: float, largest: float, rule: str) -> int:
    """Return log2 of the scale of a block. largest: the largest value of the element format."""
    emax, least = math.frexp(largest)[1] - 1, -127
    if amax == 0:
        return least
    wanted = math.frexp(amax)[1] - 1 - emax
    if rule == "ceil":
        wanted += int(amax > math.ldexp(largest, wanted))
    # The exponent is clamped to the range of e8m0fnu, and to exponents at which a float32 holds the largest element.
    return max(least, min(127 - emax, wanted))
