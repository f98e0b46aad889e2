"""Variants of stochastic rounding with few random bits, by name.

With r random bits, a number R from 0 to 2**r - 1, a magnitude goes up if d 2**r + R >= 2**r, where d is its distance to
the lower neighbour in units of the spacing. Variants differ in how d 2**r becomes an integer before:

- "A" cuts it off. Results are too close to zero, by (2**-r - 2**-D) / 2 of the spacing on average where D bits are
  discarded: by 2**-(r + 1), if D is large.
- "B" rounds it to nearest, ties away from zero. Results are too far from zero by 2**-(D + 1).
- "C" rounds it to nearest, ties to even. Without bias.
- "C_ties_to_odd" rounds it to nearest, ties to odd. Without bias.
- "C_to_odd" rounds it to odd: all but integers become the odd one next to them. Without bias, and a number
  that is not a value of the format can always go both ways.

A, B and C are StochasticA, StochasticB and StochasticC of IEEE P3109 (interim report, 4.7.4), and StochasticFastest,
StochasticFast and Stochastic of gfloat, whose StochasticOdd is C_ties_to_odd.
"""

from __future__ import annotations

from fpsim.checks import refuse, shown

__all__ = ["MOST_BITS", "VARIANTS", "require_variant"]

VARIANTS = ("A", "B", "C", "C_ties_to_odd", "C_to_odd")
MOST_BITS = 30  # of 32: below R, a kernel needs one bit for ties, and one for "more was cut off"


def require_variant(variant: str, is_stochastic: bool, random_bits: int | None, most: int = MOST_BITS) -> None:
    """Raise ValueError for a variant that does not exist, or does not fit the rounding and its random bits.

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
