"""The naive oracle: formats from their definition, rounding by looking at the neighbours, all in fractions."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property, lru_cache


@dataclass(frozen=True)
class Format:
    """A format by its fields, and what its definition says of them."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: str = "ieee"
    subnormals: bool = True

    @property
    def signed(self) -> bool:
        return self.specials != "scale"

    @property
    def has_negative_zero(self) -> bool:
        return self.specials in ("ieee", "fn", "none", "dlfloat")

    def value(self, field: int, mantissa: int) -> tuple[Fraction, bool] | None:
        """The magnitude of a code without its sign and whether its significand is odd; None for inf and NaN."""
        top, all_ones = field == 2**self.exponent_bits - 1, mantissa == 2**self.mantissa_bits - 1
        if top and (self.specials == "ieee" or (self.specials not in ("fnuz", "none") and all_ones)):
            return None
        fraction, power = Fraction(mantissa, 2**self.mantissa_bits), Fraction(2) ** (field - self.bias)
        # IEEE 754-2019, 4.3.1: with one significant digit every significand but zero's is odd
        odd = mantissa % 2 == 1 or self.mantissa_bits == 0
        if self.specials in ("dlfloat", "scale"):
            if self.specials == "dlfloat" and field == mantissa == 0:
                return Fraction(0), False
            return (1 + fraction) * power, odd
        if field == 0:
            magnitude = fraction * 2 * power if self.subnormals else Fraction(0)
            return magnitude, odd and magnitude != 0
        return (1 + fraction) * power, odd

    @cached_property
    def _listed(self) -> tuple[list[Fraction], list[bool]]:
        found: dict[Fraction, bool] = {}
        for field in range(2**self.exponent_bits):
            for mantissa in range(2**self.mantissa_bits):
                if (value := self.value(field, mantissa)) is not None:
                    found.setdefault(*value)
        magnitudes = sorted(found)
        return magnitudes, [found[v] for v in magnitudes]

    @property
    def magnitudes(self) -> list[Fraction]:
        """All finite magnitudes in ascending order: for formats with few."""
        return self._listed[0]

    @cached_property
    def largest(self) -> Fraction:
        top = 2**self.exponent_bits - 1
        last = 2**self.mantissa_bits - 1
        codes = [(field, m) for field in (top, top - 1) for m in (last, last - 1) if field >= 0 and m >= 0]
        return max(found[0] for field, m in codes if (found := self.value(field, m)) is not None)

    @property
    def lowest_exponent(self) -> int:
        """Of the smallest binade of normal numbers."""
        return (0 if self.specials in ("dlfloat", "scale") else 1) - self.bias

    @cached_property
    def smallest(self) -> Fraction:
        """The smallest positive magnitude."""
        lowest = Fraction(2) ** self.lowest_exponent
        if self.specials == "dlfloat":
            return lowest * (1 + Fraction(1, 2**self.mantissa_bits))
        return lowest / 2**self.mantissa_bits if self.subnormals and self.specials != "scale" else lowest

    @cached_property
    def next_magnitude(self) -> Fraction:
        """The first magnitude beyond the largest, were the exponent unbounded."""
        return self.largest + Fraction(2) ** (max(floor_log2(self.largest), self.lowest_exponent) - self.mantissa_bits)

    @cached_property
    def _thresholds(self) -> tuple[int, list[int]]:
        """A power of two, and every magnitude in units of its inverse: integers are searched faster than fractions."""
        unit = max(v.denominator for v in self.magnitudes)
        return unit, [v.numerator * (unit // v.denominator) for v in self.magnitudes]

    def neighbours(self, magnitude: Fraction) -> tuple[Fraction, Fraction, bool]:
        """The magnitudes at or below and above, and whether the lower one is odd; not from `next_magnitude` on."""
        if self.exponent_bits + self.mantissa_bits > 18:
            return self.neighbours_by_spacing(magnitude)
        magnitudes, odd = self._listed
        unit, thresholds = self._thresholds
        low = bisect_right(thresholds, magnitude.numerator * unit // magnitude.denominator) - 1
        above = magnitudes[low + 1] if low + 1 < len(magnitudes) else self.next_magnitude
        return magnitudes[low], above, odd[low]

    def neighbours_by_spacing(self, magnitude: Fraction) -> tuple[Fraction, Fraction, bool]:
        """The same for formats with too many values to list: multiples of the spacing in the binade of `magnitude`."""
        if magnitude < self.smallest:
            return Fraction(0), self.smallest, False
        exponent = max(floor_log2(magnitude), self.lowest_exponent)
        spacing = Fraction(2) ** (exponent - self.mantissa_bits)
        steps = math.floor(magnitude / spacing)
        return steps * spacing, (steps + 1) * spacing, steps % 2 == 1 or self.mantissa_bits == 0


@cache
def make(e: int, m: int, bias: int, specials: str = "ieee", subnormals: bool = True) -> Format:
    return Format(e, m, bias, specials, subnormals)


def floor_log2(x: Fraction) -> int:
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= x else exponent - 1


@lru_cache(maxsize=2**16)
def between(fmt: Format, magnitude: float) -> tuple[float, float, bool, int]:
    """The neighbours of a magnitude, whether the lower one is odd, and the side of their middle: -1, 0 or 1.

    Kept, because every rule asks it of the same numbers, with both signs. All neighbours are floats exactly.
    """
    if magnitude >= fmt.next_magnitude:
        return float(fmt.next_magnitude), float(fmt.next_magnitude), False, 1
    below, above, odd = fmt.neighbours(Fraction(magnitude))
    middle = (below + above) / 2
    return float(below), float(above), odd, (magnitude > middle) - (magnitude < middle)


def round_to(fmt: Format, x: float, rounding: str, overflow: str) -> float:
    """The rounded value of a float, by the words of the specification."""
    largest = float(fmt.largest)
    beyond = {"inf": math.inf, "nan": math.nan, "saturate": largest}[overflow]
    if math.isnan(x) or (not fmt.signed and x <= 0):
        return math.nan
    if math.isinf(x):
        return math.copysign(beyond, x)
    if not fmt.signed and x < fmt.smallest:
        return float(fmt.smallest)  # a scale: no zero
    below, above, odd, side = between(fmt, abs(x))
    away = {"up": x > 0, "down": x < 0}.get(rounding)
    if rounding == "nearest_even":
        away = side > 0 or (side == 0 and odd)
    elif rounding == "nearest_away":
        away = side >= 0
    elif rounding == "to_odd":
        away = not odd
    rounded = above if away and abs(x) != below else below
    if rounded > largest:
        stays_finite = rounding in ("toward_zero", "to_odd") or away is False
        return math.copysign(largest if stays_finite else beyond, x)
    if rounded == 0 and not fmt.has_negative_zero:
        return 0.0
    return math.copysign(rounded, x)


def distance(fmt: Format, x: float | Fraction) -> Fraction:
    """From the lower neighbour of the magnitude of x, over the gap between its neighbours."""
    below, above, _ = fmt.neighbours(abs(Fraction(x)))
    return (abs(Fraction(x)) - below) / (above - below)


def round_up_probability(fmt: Format, x: float, random_bits: int) -> Fraction:
    """Under stochastic rounding: the distance to the lower neighbour over the gap, cut to `random_bits` bits."""
    return Fraction(math.floor(distance(fmt, x) * 2**random_bits), 2**random_bits)


def goes_up(share: Fraction, r: int, random: int, variant: str) -> bool:
    """Stochastic rounding with r random bits: IEEE P3109, 4.7.4, StochasticA, B and C, and C with another rounding."""
    scaled = share * 2**r
    low, rest, half = math.floor(scaled), scaled - math.floor(scaled), Fraction(1, 2)
    if variant == "A":
        return low + random >= 2**r
    if variant == "B":
        return math.floor(share * 2 ** (r + 1)) + 2 * random + 1 >= 2 ** (r + 1)
    if variant == "C":
        rounded = round(scaled)  # Python rounds fractions to nearest even
    elif variant == "C_ties_to_odd":
        rounded = low + (rest > half or (rest == half and low % 2 == 0))
    else:
        rounded = low + (rest > 0 and low % 2 == 0)
    return rounded + random >= 2**r


# Threefry-4x32 as the paper's table 2 and figure 1 have it: Salmon et al., SC 2011.

ROTATIONS = ((10, 26), (11, 21), (13, 27), (23, 5), (6, 20), (17, 11), (25, 10), (18, 20))


def threefry(counter: tuple[int, ...], key: tuple[int, ...], rounds: int) -> tuple[int, ...]:
    """Four words for a counter of four words and a key of four."""
    word = 2**32
    keys = [*key, 0x1BD11BDA ^ key[0] ^ key[1] ^ key[2] ^ key[3]]
    x = [(c + k) % word for c, k in zip(counter, keys, strict=False)]
    for r in range(rounds):
        for (a, b), rotation in zip(
            ((0, 1), (2, 3)) if r % 2 == 0 else ((0, 3), (2, 1)), ROTATIONS[r % 8], strict=True
        ):
            x[a] = (x[a] + x[b]) % word
            x[b] = ((x[b] << rotation | x[b] >> (32 - rotation)) % word) ^ x[a]
        if r % 4 == 3:
            s = r // 4 + 1
            x = [(x[i] + keys[(s + i) % 5] + (s if i == 3 else 0)) % word for i in range(4)]
    return tuple(x)


def noise_word(element: int, key: int) -> int:
    """The 32 random bits of an element, as threefry.NOISE_BLOCK's comment lays them out."""
    block, place = divmod(element, 128)
    group, lane = divmod(place, 16)
    counter = 16 * block + lane
    k = (key % 2**32, key >> 32, 0, 0)
    word = threefry((counter % 2**32, counter >> 32, 0, 0), k, 12)[group // 2]
    return (word >> 16 | word << 16) % 2**32 if group % 2 else word
