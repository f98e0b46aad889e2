"""Fields that one pass over a tensor gathers: moments, the tally of a rounding, and the counts of lost numbers.

The loops of `kernels` write these fields by number, and their callers take the numbers from here. This file does not
import torch, because Numba compiles the numbers in.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "AMAX",
    "AMIN",
    "COUNT",
    "LOG_MEAN",
    "LOG_MEAN_SQUARE",
    "MAXIMUM",
    "MEAN",
    "MEAN_SQUARE",
    "MINIMUM",
    "NONZERO",
    "TALLY_COUNTS",
    "Moments",
]


class Moments(NamedTuple):
    """Statistics of one pass over a tensor; as a tensor, ten float64 in this order.

    mean_square is the raw second moment: the variance is mean_square - mean**2. amax and amin are the largest and the
    smallest non-zero magnitude; amin is 0 if all elements are zero. log_mean and log_mean_square are the mean and the
    mean square of log|x| over non-zero elements, if they were asked for, else 0. If an element is not finite, amax is
    inf, and the other fields have no meaning. All fields are 0 for an empty tensor.
    """

    count: float  # type: ignore[assignment]  # a field here, a method of tuple there
    nonzero: float
    mean: float
    mean_square: float
    minimum: float
    maximum: float
    amax: float
    amin: float
    log_mean: float = 0.0
    log_mean_square: float = 0.0

    @property
    def variance(self) -> float:
        """Variance of the population: E[x**2] - E[x]**2."""
        return max(self.mean_square - self.mean * self.mean, 0.0)


COUNT, NONZERO, MEAN, MEAN_SQUARE, MINIMUM, MAXIMUM, AMAX, AMIN, LOG_MEAN, LOG_MEAN_SQUARE = range(len(Moments._fields))

# Fields of a tally: counts of elements and of the blocks that share a scale as int64, sums as float64, and a histogram
# of float64's exponent fields.
TALLY_COUNTS = (
    *("count", "nonzero", "underflow", "subnormal", "overflow", "nonfinite", "exact"),
    *("blocks", "zero_blocks", "scale_underflow", "scale_overflow"),
)
TALLY_COUNT, TALLY_NONZERO, TALLY_UNDERFLOW, TALLY_SUBNORMAL, TALLY_OVERFLOW, TALLY_NONFINITE, TALLY_EXACT = range(7)
ELEMENT_COUNTS = 7  # number of the TALLY_COUNTS that count elements
TALLY_SUMS = ("signal", "noise", "amax", "log2_scale_spread", "dead_zone", "along")
TALLY_SIGNAL, TALLY_NOISE, TALLY_AMAX, TALLY_SPREAD, TALLY_DEAD_ZONE, TALLY_ALONG = range(6)
EXPONENT_FIELDS = 2048  # number of exponent fields of a float64
EXPONENT_BIAS = 1023

# Statistics of the blocks of one tensor, int64: the counts of blocks as in TALLY_COUNTS, two counts of elements, and
# the float64 patterns of two scales, the smallest and the largest above 0 among the blocks that are not all zero.
BLOCKS, ZERO_BLOCKS, SCALE_UNDERFLOW, SCALE_OVERFLOW = range(4)
BLOCK_SUBNORMAL, BLOCK_SATURATED, SMALLEST_SCALE, LARGEST_SCALE = range(4, 8)
BLOCK_FIELDS = 8

# Numbers lost by a rounding: int64 counts.
LOST_COUNTS = ("zeros", "underflow", "overflow")
ZERO_BEFORE, LOST_TO_ZERO, LOST_TO_OVERFLOW = range(3)
