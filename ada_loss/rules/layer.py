"""Rules of one layer: statistics of its gradient in, a power of two for its scale out. Pure arithmetic.

Zhao, Vogel, Ahmed, Luk, "Reducing Underflow in Mixed Precision Training by Gradient Scaling", IJCAI 2020. A gradient
carries a scale S, the product of the factors chosen so far. A layer that multiplies the gradient by its weights chooses
one more factor, and the gradient that leaves the layer carries S times this factor.

The functions in lower case are the formulas. They run in Python, and are compiled for CUDA, so they use scalars,
indices and `math` only. The formulas of factors share one signature:

g: `Moments` of the gradient in its true size, S left out, after it was rounded at S.
w: `Moments` of the other operand, all zero if there is none.
terms: the number of products that are added for one element of the result.
u_min: the smallest magnitude of the format, divided by S.
u_max: the largest magnitude of the format, divided by S.
unit: 1 / S.
p: `parameters()` of the rule.

A new rule is a subclass of LayerRule and an entry in LAYER_RULES. One that predicts needs its formula, given by
`core()`. One that measures needs a kernel in `layerwise/scale_kernels.py`, called in `ScaleChooser._measure_scale`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Any, ClassVar

from ada_loss import checks
from ada_loss.checks import Possible, param
from fpsim.checks import did_you_mean, is_whole, shown
from fpsim.scaling import AMAX, AMIN, COUNT, LOG_MEAN, LOG_MEAN_SQUARE, MEAN, MEAN_SQUARE, NONZERO

__all__ = [
    "LAYER_RULES",
    "AbsRange",
    "AmaxHistory",
    "ApproxRange",
    "Current",
    "ElementWiseRange",
    "Exact",
    "Fixed",
    "LayerRule",
    "as_layer_rule",
    "branch_log2_scale",
    "fitting_log2_scale",
    "floor_log2",
    "layer_rule",
]

STATS = ("grad+weight", "grad", "product")
GRAD_WEIGHT, GRAD, PRODUCT = range(len(STATS))
HALF_WIDTH, STATISTICS, IS_LOGNORMAL, QUANTILE = range(4)  # the parameters of approx_range
NEVER = 1 << 20  # a log2_scale beyond those of any container

ONE_OF_STATS = Possible("'grad+weight', 'grad' or 'product'", lambda v: v in STATS)
SHARE = checks.number("a share between 0 and 1, both excluded", lambda v: 0 < v < 1)
SHARE_OR_ZERO = checks.number("a share, 0 or more and below 1", lambda v: 0 <= v < 1)
SHARE_OR_ONE = checks.number("a share above 0 and up to 1", lambda v: 0 < v <= 1)


def floor_log2(x):  # type: ignore[no-untyped-def]
    """The exponent of the largest power of two not above `x`, or 0 if x is not finite or not above 0.

    It is computed by frexp, because a float32 log2 rounds up just below a power of two.

    >>> [floor_log2(x) for x in (1.0, 7.9999999, 8.0, 0.3)]
    [0, 2, 3, -2]
    """
    if not (0.0 < x < math.inf):
        return 0
    return math.frexp(x)[1] - 1


def fitting_log2_scale(amax, u_max):  # type: ignore[no-untyped-def]
    """The largest exponent k with amax * 2**k <= u_max, beyond which a tensor overflows. NEVER if amax is 0.

    >>> fitting_log2_scale(1.0, 65504.0), fitting_log2_scale(65505.0, 65504.0)
    (15, -1)
    """
    if amax == 0.0:
        return NEVER
    a, exponent = math.frexp(amax)
    b, top = math.frexp(u_max)
    return top - exponent - (1 if a > b else 0)


# The least variance, as a share of the second moment, that is told from a constant's, which is 0: float64 sums of 2**24
# equal numbers were found to leave a share of 2**-35. The deviation is then 2**-15 of the numbers.
LEAST_VARIANCE = 2.0**-30


def overflow_limit(g, w, terms, u_max):  # type: ignore[no-untyped-def]
    """The largest factor with which neither the gradient nor a sum of its products can overflow."""
    largest = g[AMAX]
    if w[COUNT] > 0.0:
        largest = largest * max(1.0, terms * w[AMAX])
    return u_max / largest if largest > 0.0 else math.inf


def approx_range(g, w, terms, u_min, u_max, unit, p):  # type: ignore[no-untyped-def]
    """Zhao et al. 2020: at most a share of the results is below u_min if they are normal with mean 0.

    Their standard deviation comes from the second moments of both operands; under GRAD it is the gradient's own, and
    the other operand bounds nothing either. p is indexed by HALF_WIDTH (sqrt(2) erfinv(share)), STATISTICS,
    IS_LOGNORMAL and QUANTILE (sqrt(2) erfinv(2 share - 1)).
    """
    if not g[AMAX] < math.inf or g[NONZERO] == 0.0 or not w[AMAX] < math.inf:
        return 1.0
    limit = u_max / g[AMAX] if p[STATISTICS] == GRAD else overflow_limit(g, w, terms, u_max)
    if p[IS_LOGNORMAL] > 0.0 and w[COUNT] == 0.0:
        deviation = math.sqrt(max(g[LOG_MEAN_SQUARE] - g[LOG_MEAN] * g[LOG_MEAN], 0.0))
        # exp(700) is below float64's largest
        needed = math.exp(min(math.log(u_min) - g[LOG_MEAN] - deviation * p[QUANTILE], 700.0))
    else:
        # the raw second moment, and no variance: a constant gradient has a size, but no deviation
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
        needed = u_min / p[HALF_WIDTH] / math.sqrt(square)  # in two steps: the product of the divisors may underflow
    return min(max(needed, 1.0), limit)


def abs_range(g, w, terms, u_min, u_max, unit, p):  # type: ignore[no-untyped-def]
    """The smallest product of non-zero magnitudes, added `terms` times, reaches u_min."""
    if not g[AMAX] < math.inf or g[NONZERO] == 0.0 or not w[AMAX] < math.inf:
        return 1.0
    smallest, k = g[AMIN], 1.0
    if w[COUNT] > 0.0:
        if w[NONZERO] == 0.0:
            return 1.0
        smallest, k = smallest * w[AMIN], terms
    needed = u_min / (k * max(smallest, 1e-15 * unit))
    return min(max(needed, 1.0), overflow_limit(g, w, terms, u_max))


def element_wise_range(g, w, terms, u_min, u_max, unit, p):  # type: ignore[no-untyped-def]
    """The smallest product reaches u_min, and the largest can be added `terms` times.

    Here `g` are the moments of the products themselves.
    """
    if not 0.0 < g[AMAX] < math.inf:
        return 1.0
    return min(max(u_min / g[AMIN], 1.0), u_max / (terms * g[AMAX]))


def fixed(g, w, terms, u_min, u_max, unit, p):  # type: ignore[no-untyped-def]
    """The same factor everywhere."""
    return p[0]


def exact(bins, first, log2_threshold, share):  # type: ignore[no-untyped-def]
    """The smallest k with which at most a share of the non-zero elements has |x| * 2**k <= 2**log2_threshold.

    bins: entry i is the number of elements with 2**(first+i) < |x| <= 2**(first+i+1). The result is 0 if all are 0.
        With 2**(first+i) <= |x| < 2**(first+i+1), what lies at the threshold is kept: |x| * 2**k < 2**log2_threshold.
    first: the exponent of the first entry.
    log2_threshold: log2 of the magnitude up to which, or below which, an element is lost.
    share: the share of the elements that may be lost.
    """
    total = 0
    for i in range(len(bins)):
        total += bins[i]
    if total == 0:
        return 0
    below, i = 0, 0
    while i < len(bins) and below + bins[i] <= share * total:
        below += bins[i]
        i += 1
    return log2_threshold - (first + i)


def bounded(factor, log2_scale, scale_bound, accumulated_bound):  # type: ignore[no-untyped-def]
    """The factor within its bounds.

    factor: the factor that a rule asks for.
    log2_scale: log2 of the scale that it multiplies.
    scale_bound: the largest factor.
    accumulated_bound: the largest product of scale and factor.
    """
    return min(factor, scale_bound, accumulated_bound * math.ldexp(1.0, int(-log2_scale)))


def branch_exponent(amaxima, log2_scales, u_max):  # type: ignore[no-untyped-def]
    """See branch_log2_scale, which checks the result: the gradient does not fit if no scale down to 2**-4 is enough."""
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
    """The scale at which branches meet in the authors' code: the largest of theirs at which all gradients fit.

    If none of them is small enough, the smallest is halved while it is 1/8 or more.

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


@dataclass(frozen=True)
class LayerRule:
    """A rule that chooses the scale of one layer's gradient."""

    name: ClassVar[str]  # the name for `layer_rule`
    predicts: ClassVar[bool] = True  # it predicts a product from its operands; others measure the gradient itself
    logs: ClassVar[bool] = False  # it needs the moments of log|x|

    def __post_init__(self) -> None:
        checks.check_fields(self, f"{self.name} rule")

    def factor(self, g: Any, w: Any, terms: int, u_min: float, u_max: float) -> float:
        """The factor for a gradient that carries the scale 1, without bounds. For arguments see the module.

        Raises NotImplementedError for a rule that measures.
        """
        return float(type(self).core()(g, w, terms, u_min, u_max, 1.0, self.parameters()))

    @staticmethod
    def core() -> Any:
        """The formula of the factor."""
        raise NotImplementedError

    def parameters(self) -> tuple[float, ...]:
        """The last argument of the formula."""
        return (0.0,)


@dataclass(frozen=True)
class ApproxRange(LayerRule):
    """The method of Zhao et al. 2020: at most a share of the products underflows if they are normal.

    n_uf_threshold: that share.
    stats: which of the authors' versions: "grad+weight" (the last one), "grad" (labelled as the IJCAI submission: the
        standard deviation and the largest magnitude of the gradient alone, so that a constant one has the factor 1) or
        "product" (the first one; it leaves the sum out).
    lognormal: for gradients without weights (casts), take their magnitudes as lognormal.

    >>> from fpsim.moments import Moments
    >>> g = Moments(256, 256, 0, 2.0**-40, -(2.0**-20), 2.0**-20, 2.0**-20, 2.0**-20)
    >>> w = Moments(512, 512, 0, 2.0**-12, -(2.0**-6), 2.0**-6, 2.0**-6, 2.0**-6)
    >>> round(ApproxRange().factor(g, w, 32, 6e-8, 65504.0), 3)
    803.177
    """

    name: ClassVar[str] = "approx_range"
    n_uf_threshold: float = param(1e-3, SHARE)
    stats: str = param("grad+weight", ONE_OF_STATS)
    lognormal: bool = param(False, checks.FLAG)

    @property
    def logs(self) -> bool:  # type: ignore[override]
        return self.lognormal

    @staticmethod
    def core() -> Any:
        return approx_range

    def parameters(self) -> tuple[float, ...]:
        normal, share = NormalDist(), self.n_uf_threshold
        # sqrt(2) erfinv(2q - 1) is the normal's quantile at q
        half_width = normal.inv_cdf((1 + share) / 2)
        # 1 + share has lost digits of a small share, which one step of Newton's method restores
        slope = math.sqrt(2 / math.pi) * math.exp(-half_width * half_width / 2)
        half_width += (share - math.erf(half_width / math.sqrt(2))) / slope
        return half_width, float(STATS.index(self.stats)), float(self.lognormal), normal.inv_cdf(share)


@dataclass(frozen=True)
class AbsRange(LayerRule):
    """No product underflows, by the smallest and the largest non-zero magnitudes of both operands alone.

    The smallest product is taken `terms` times, as if sums never cancelled: where they do, some underflow.
    """

    name: ClassVar[str] = "abs_range"

    @staticmethod
    def core() -> Any:
        return abs_range


@dataclass(frozen=True)
class ElementWiseRange(LayerRule):
    """No product underflows, by all products of an element of the gradient and a weight; slow, for diagnosis.

    It serves linear layers and convolutions.

    max_rescue_ratio: the share of the products, largest first, that must not underflow. None for all of them, which
        is found channel by channel. With a share every product is formed, at most 2**27 of them.
    """

    name: ClassVar[str] = "element_wise_range"
    max_rescue_ratio: float | None = param(None, SHARE_OR_ONE.or_none())

    @staticmethod
    def core() -> Any:
        return element_wise_range


@dataclass(frozen=True)
class Fixed(LayerRule):
    """The same factor at every layer.

    fixed_loss_scale: the factor. With 1 this is loss scaling by `init_scale`.
    """

    name: ClassVar[str] = "fixed"
    fixed_loss_scale: float = param(1.0, checks.POSITIVE)

    @staticmethod
    def core() -> Any:
        return fixed

    def parameters(self) -> tuple[float, ...]:
        return (float(self.fixed_loss_scale),)


@dataclass(frozen=True)
class Exact(LayerRule):
    """The smallest scale, 1 or more, at which at most a share of the gradient itself underflows.

    The share is counted in the histogram of exponents, without a model of the numbers. Other rules are compared with
    this one.

    n_uf_threshold: that share.
    """

    name: ClassVar[str] = "exact"
    predicts: ClassVar[bool] = False
    n_uf_threshold: float = param(1e-3, SHARE_OR_ZERO)


@dataclass(frozen=True)
class Current(LayerRule):
    """Scale the gradient's largest magnitude to just below the format's maximum.

    margin: the powers of two by which to stay below it.
    """

    name: ClassVar[str] = "current"
    predicts: ClassVar[bool] = False
    margin: int = param(0, checks.COUNT)


@dataclass(frozen=True)
class AmaxHistory(LayerRule):
    """Delayed scaling, as in NVIDIA's Transformer Engine: as Current, by the largest magnitude of the last steps.

    The coming step is not among them, so nothing waits for its statistics. Until a step has had a gradient that is not
    zero, a gradient's own largest magnitude counts: each layer has its scale from the first step on.

    length: the number of steps.
    margin: the powers of two by which to stay below the format's maximum.
    """

    name: ClassVar[str] = "amax_history"
    predicts: ClassVar[bool] = False
    length: int = param(16, Possible("a whole number from 1 to 2**20", lambda v: is_whole(v, 1) and v <= 2**20))
    margin: int = param(0, checks.COUNT)


LAYER_RULES: dict[str, type[LayerRule]] = {
    rule.name: rule for rule in (ApproxRange, AbsRange, ElementWiseRange, Fixed, Exact, Current, AmaxHistory)
}


def layer_rule(name: str, **params: Any) -> LayerRule:
    """A rule of one layer by its name.

    name: "approx_range", "abs_range", "element_wise_range", "fixed", "exact", "current" or "amax_history".
    params: the parameters of its class.

    Raises ValueError for an unknown name or an impossible value, TypeError for an unknown parameter.

    >>> layer_rule("exact", n_uf_threshold=1e-2)
    Exact(n_uf_threshold=0.01)
    """
    rule = LAYER_RULES.get(name) if isinstance(name, str) else None
    if rule is None:
        near = did_you_mean(name, LAYER_RULES)
        raise ValueError(f"Unknown layer rule {shown(name)}.{near} Known: {', '.join(LAYER_RULES)}.")
    known = [f.name for f in fields(rule)]
    for given in params:
        if given not in known:
            raise TypeError(f"The rule {name!r} has no parameter {given!r}. It has: {', '.join(known) or 'none'}.")
    return rule(**params)


def as_layer_rule(rule: LayerRule | str) -> LayerRule:
    """A rule from a rule or from its name.

    >>> as_layer_rule("abs_range")
    AbsRange()
    """
    return rule if isinstance(rule, LayerRule) else layer_rule(rule)
