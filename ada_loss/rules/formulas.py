"""The formulas of layer rules: from statistics of a layer's gradient to a power of two or a factor. Pure arithmetic.

Zhao, Vogel, Ahmed, Luk, "Reducing Underflow in Mixed Precision Training by Gradient Scaling", IJCAI 2020. A gradient
carries a scale S, the product of the factors chosen so far. A layer that multiplies the gradient by its weights chooses
one more factor, and the gradient that leaves the layer carries S times this factor.

The formulas run in Python, and are also compiled for CUDA, so they use only scalars, indices and `math`. The formulas
of factors share one signature:

g: `Moments` of the gradient in its true size (without S), after it was rounded at S.
w: `Moments` of the other operand, all zero if there is none.
terms: the number of products that are added for one element of the result.
u_min: the smallest magnitude of the format, divided by S.
u_max: the largest magnitude of the format, divided by S.
unit: 1 / S.
p: `parameters()` of the rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fpsim.scaling import AMAX, AMIN, COUNT, LOG_MEAN, LOG_MEAN_SQUARE, MEAN, MEAN_SQUARE, NONZERO

__all__ = [
    "BOUNDS",
    "NEVER",
    "STATS",
    "abs_range",
    "approx_range",
    "bounded",
    "branch_exponent",
    "branch_log2_scale",
    "element_wise_range",
    "exact",
    "fitting_log2_scale",
    "fixed",
    "floor_log2",
    "overflow_limit",
]

STATS = ("grad+weight", "grad", "product")
GRAD_WEIGHT, GRAD, PRODUCT = range(len(STATS))
BOUNDS = ("measured", "worst_case")
MEASURED_BOUND, WORST_CASE = range(len(BOUNDS))
HALF_WIDTH, STATISTICS, IS_LOGNORMAL, QUANTILE, BOUND = range(5)  # the parameters of approx_range
# A log2_scale beyond the range of any container. It is not inf, because exponents are int64 in the kernels.
NEVER = 1 << 20


def floor_log2(x):
    """Return the exponent of the largest power of two not above `x`, or 0 if x is not finite or not above 0.

    >>> [floor_log2(x) for x in (1.0, 7.9999999, 8.0, 0.3)]
    [0, 2, 3, -2]
    """
    if not (0.0 < x < math.inf):
        return 0
    # frexp is used, because a float32 log2 rounds up just below a power of two.
    return math.frexp(x)[1] - 1


def fitting_log2_scale(amax, u_max):
    """Return the largest k with amax * 2**k <= u_max, or NEVER if amax is 0. Above u_max a tensor overflows.

    >>> fitting_log2_scale(1.0, 65504.0), fitting_log2_scale(65505.0, 65504.0)
    (15, -1)
    """
    if amax == 0.0:
        return NEVER
    # Exponents and mantissas are compared, because u_max / amax may overflow, or round up to a power of two at which
    # amax is too large.
    a, exponent = math.frexp(amax)
    b, top = math.frexp(u_max)
    return top - exponent - (1 if a > b else 0)


# The least variance, as a share of the second moment, that counts as larger than 0. Equal numbers have the variance 0,
# but float64 sums of 2**24 equal numbers were found to leave a share of 2**-35. At the least variance, the deviation is
# 2**-15 of the numbers.
LEAST_VARIANCE = 2.0**-30


def overflow_limit(g, w, terms, u_max):
    """Return the largest factor at which neither the gradient nor a sum of its products can overflow."""
    largest = g[AMAX]
    if w[COUNT] > 0.0:
        largest = largest * max(1.0, terms * w[AMAX])
    return u_max / largest if largest > 0.0 else math.inf


def approx_range(g, w, terms, u_min, u_max, unit, p):
    """Return the factor of Zhao et al. 2020, at which at most a share of the results is below u_min.

    The results are taken as normally distributed with the mean 0. Their standard deviation comes from the second
    moments of both operands. Under GRAD it is the standard deviation of the gradient, and the other operand does not
    enter the bound either. p is indexed by HALF_WIDTH
    (sqrt(2) erfinv(share)), STATISTICS, IS_LOGNORMAL, QUANTILE (sqrt(2) erfinv(2 share - 1)) and BOUND.
    """
    if not g[AMAX] < math.inf or g[NONZERO] == 0.0 or not w[AMAX] < math.inf:
        return 1.0
    limit = u_max / g[AMAX] if p[STATISTICS] == GRAD else overflow_limit(g, w, terms, u_max)
    if p[BOUND] == MEASURED_BOUND and w[COUNT] > 0.0:
        limit = math.inf  # the scale of the product's result is lowered later if the result does not fit
    if p[IS_LOGNORMAL] > 0.0 and w[COUNT] == 0.0:
        deviation = math.sqrt(max(g[LOG_MEAN_SQUARE] - g[LOG_MEAN] * g[LOG_MEAN], 0.0))
        # The mean of logarithms may be far from log(u_min); exp(700) is below float64's largest number.
        needed = math.exp(min(math.log(u_min) - g[LOG_MEAN] - deviation * p[QUANTILE], 700.0))
    else:
        # The raw second moment is used, not the variance: a constant gradient has a size, but no deviation.
        square = g[MEAN_SQUARE]
        if p[STATISTICS] == GRAD:
            square = square - g[MEAN] * g[MEAN]
            if square < LEAST_VARIANCE * g[MEAN_SQUARE]:
                return 1.0
        elif w[COUNT] > 0.0:
            square = square * w[MEAN_SQUARE]
            if p[STATISTICS] == GRAD_WEIGHT:
                square = square * (0.5 * terms)  # a ReLU sets half of the terms to zero
        if square == 0.0:
            return 1.0
        # The division takes two steps, because the product of the divisors may underflow.
        needed = u_min / p[HALF_WIDTH] / math.sqrt(square)
    return min(max(needed, 1.0), limit)


def abs_range(g, w, terms, u_min, u_max, unit, p):
    """Return the factor at which the smallest nonzero product, added `terms` times, reaches u_min."""
    if not g[AMAX] < math.inf or g[NONZERO] == 0.0 or not w[AMAX] < math.inf:
        return 1.0
    smallest, k = g[AMIN], 1.0
    if w[COUNT] > 0.0:
        if w[NONZERO] == 0.0:
            return 1.0
        smallest, k = smallest * w[AMIN], terms
    # The floor of 1e-15 comes from the authors, and applies to a product that carries the scale.
    needed = u_min / (k * max(smallest, 1e-15 * unit))
    return min(max(needed, 1.0), overflow_limit(g, w, terms, u_max))


def element_wise_range(g, w, terms, u_min, u_max, unit, p):
    """Return the factor at which the smallest product reaches u_min and the largest can be added `terms` times.

    `g` holds the moments of the products themselves.
    """
    if not 0.0 < g[AMAX] < math.inf:
        return 1.0
    return min(max(u_min / g[AMIN], 1.0), u_max / (terms * g[AMAX]))


def fixed(g, w, terms, u_min, u_max, unit, p):
    """Return a constant factor."""
    return p[0]


def exact(bins, first, log2_threshold, share):
    """Return the smallest k with which at most a share of the non-zero elements has |x| * 2**k <= 2**log2_threshold.

    bins: entry i is the number of elements with 2**(first+i) < |x| <= 2**(first+i+1). The result is 0 if all entries
        are 0. If entries count 2**(first+i) <= |x| < 2**(first+i+1) instead, elements at the threshold are not lost:
        the condition is then |x| * 2**k < 2**log2_threshold.
    first: the exponent of the first entry.
    log2_threshold: log2 of the magnitude up to which, or below which, an element is lost.
    share: the share of the elements that may be lost.
    """
    total = 0
    for i in range(len(bins)):
        total += bins[i]
    if total == 0:
        return 0
    # The loop goes from the smallest exponents upwards, as long as all elements up to there may be lost.
    below, i = 0, 0
    while i < len(bins) and below + bins[i] <= share * total:
        below += bins[i]
        i += 1
    return log2_threshold - (first + i)


def bounded(factor, log2_scale, scale_bound, accumulated_bound):
    """Clamp a factor to its bounds.

    factor: the factor that a rule asks for.
    log2_scale: log2 of the scale that the factor multiplies.
    scale_bound: the largest factor.
    accumulated_bound: the largest product of scale and factor.
    """
    return min(factor, scale_bound, accumulated_bound * math.ldexp(1.0, int(-log2_scale)))


def branch_exponent(amaxima, log2_scales, u_max):
    """Return the result of branch_log2_scale without its check: no scale down to 2**-4 may be small enough."""
    # This follows the authors' code step by step: it has `<` where a format would allow equality, and it stops halving
    # where their code stops.
    largest = 0.0
    for i in range(len(amaxima)):
        largest = max(largest, amaxima[i])
    best, lowest = -NEVER, NEVER
    for i in range(len(log2_scales)):
        k = log2_scales[i]
        lowest = min(lowest, k)
        if k > best and math.ldexp(largest, int(k)) < u_max:
            best = k
    if best > -NEVER:
        return best
    while lowest >= -3 and not math.ldexp(largest, int(lowest)) < u_max:
        lowest -= 1
    return lowest


def branch_log2_scale(amaxima: Sequence[float], log2_scales: Sequence[int], u_max: float) -> int:
    """Return the scale of a sum of branches in the authors' code: the largest branch scale at which all gradients fit.

    If no branch's scale is small enough, the smallest scale is halved while it is 1/8 or more.

    amaxima: the largest magnitude of each branch's gradient in its true size.
    log2_scales: log2 of each branch's scale.
    u_max: the limit, below which the largest scaled gradient must stay.

    Raises OverflowError if the last scale is not small enough either.

    >>> branch_log2_scale([100 / 64, 50 / 16], [6, 4], 65504.0)
    6
    """
    k = branch_exponent(amaxima, log2_scales, u_max)
    if not math.ldexp(max(amaxima), k) < u_max:
        raise OverflowError(
            f"A gradient of {max(amaxima):g} does not fit below {u_max:g} even at the scale 2**{k}. "
            f"Its training has diverged, or the format is too narrow."
        )
    return int(k)
