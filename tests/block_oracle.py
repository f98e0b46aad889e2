"""Block formats by hand, in fractions: slow, and sharing nothing with the package but the formats' lists of values."""

from __future__ import annotations

import bisect
from fractions import Fraction

import numpy as np

from fpsim import BlockFormat


def floor_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


def nearest(value: Fraction, values: tuple[float, ...]) -> Fraction:
    """The nearest of a format's values, ties to the even code, the largest beyond it."""
    positive = [Fraction(v) for v in values if v >= 0]
    magnitude = abs(value)
    above = bisect.bisect_left(positive, magnitude)
    if above == len(positive):
        found = positive[-1]
    elif positive[above] == magnitude:
        found = magnitude
    else:
        low, high = magnitude - positive[above - 1], positive[above] - magnitude
        goes_down = low < high or (low == high and (above - 1) % 2 == 0)
        found = positive[above - 1] if goes_down else positive[above]
    return -found if value < 0 else found


def wanted_exponent(amax: Fraction, f: BlockFormat) -> int:
    """log2 of the scale that a block asks for: OCP MX v1.0, 6.3, and its kin."""
    largest = Fraction(f.element.largest)
    emax = floor_log2(largest)
    exponent = floor_log2(amax)
    if f.scale_rule == "floor":
        found = exponent - emax
    elif f.scale_rule == "ceil":
        found = floor_log2(amax / largest)
        found += Fraction(2) ** found < amax / largest
    elif f.scale_rule == "even":
        ulp = Fraction(2) ** (exponent - f.element.mantissa_bits)
        found = floor_log2((amax / ulp + Fraction(1, 2)).__floor__() * ulp) - emax
    elif f.scale_rule == "floor_plus1":
        found = exponent - emax + 1
    elif f.scale_rule == "ceil_amax":
        found = exponent - emax + (amax != Fraction(2) ** exponent)
    elif f.scale_rule == "mid_max":  # brevitas: ceil(log2(amax) - log2(mid)), mid beside largest and 2**(emax + 1)
        mid = (largest + Fraction(2) ** (emax + 1)) / 2
        found = exponent - emax + (amax * Fraction(2) ** (emax - exponent) > mid)
    elif str(f.scale_rule).startswith("uos"):
        ulp = Fraction(2) ** (exponent - f.element.mantissa_bits)
        found = floor_log2(amax + Fraction(str(f.scale_rule)[4:-1]) * ulp) - emax
    else:  # nearest: amax / 2**exponent above sqrt(2)
        found = exponent - emax + (amax * amax > 2 * Fraction(4) ** exponent)
    return found


def scale_exponent(amax: Fraction, f: BlockFormat) -> int:
    """log2 of the scale of a block."""
    if amax == 0:
        return -127
    emax = floor_log2(Fraction(f.element.largest))
    return max(-127, min(127 - emax, wanted_exponent(amax, f)))  # a float32 holds the largest element at that scale


def round_block(block: list[float], f: BlockFormat) -> list[Fraction]:
    scale = Fraction(2) ** scale_exponent(max(abs(Fraction(v)) for v in block), f)
    values = f.element.values()
    return [nearest(Fraction(v) / scale, values) * scale for v in block]


def nvfp4(x: np.ndarray, tile: tuple[int, int] = (1, 16)) -> np.ndarray:
    """NVFP4 in the order of TransformerEngine's reference, all in float32; x: (rows, columns)."""
    f32, top = np.float32, np.float32(448) * np.float32(6)
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], f32)
    halves = (e2m1[1:] + e2m1[:-1]) / 2
    amax = np.abs(x).max(initial=0)
    with np.errstate(over="ignore"):
        whole = f32(1) if amax == 0 else min(f32(top / amax), np.finfo(f32).max)
    out = np.empty_like(x)
    for i in range(0, x.shape[0], tile[0]):
        for j in range(0, x.shape[1], tile[1]):
            block = x[i : i + tile[0], j : j + tile[1]]
            wanted = f32(np.abs(block).max() * f32(whole * (f32(1) / f32(6))))
            scale = e4m3fn(min(wanted, f32(448)))
            divisor = f32(scale * f32(f32(1) / whole))
            with np.errstate(over="ignore"):
                by = np.finfo(f32).max if divisor == 0 else min(f32(1) / divisor, np.finfo(f32).max)
            scaled = np.clip((block * by).astype(f32), -6, 6)
            index = np.searchsorted(halves, np.abs(scaled))  # below or at a midpoint: the lower one
            at_tie = (index < 7) & (np.abs(scaled) == halves[np.minimum(index, 6)]) & (index % 2 == 1)
            element = np.copysign(e2m1[index + at_tie], scaled)
            out[i : i + tile[0], j : j + tile[1]] = (element * scale).astype(f32) / whole
    return out


def e4m3fn(x: np.floating) -> np.float32:
    import ml_dtypes

    return np.float32(np.float32(x).astype(ml_dtypes.float8_e4m3fn))
