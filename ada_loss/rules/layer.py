"""How far to scale one layer's gradient: statistics in, a power of two out. Pure arithmetic.

Zhao, Vogel, Ahmed, Luk, "Reducing Underflow in Mixed Precision Training by Gradient Scaling", IJCAI 2020. A gradient g
carries the scale S it has gathered so far; a layer that multiplies it by its weights W chooses a factor, and what
leaves the layer carries S times the factor.

The functions in lower case are the formulas. They run as they stand in Python, and are compiled for CUDA: scalars,
indices and `math` alone. `g` and `w` are `Moments` of the gradient in its true size and of the other operand (all zero
where there is none), `terms` how many products add up to one element of the result; `u_min` and `u_max`, the smallest
magnitude and the largest of the format, come divided by S.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real
from statistics import NormalDist
from typing import Any, ClassVar

from fpsim.scaling import AMAX, AMIN, COUNT, LOG_MEAN, LOG_MEAN_SQUARE, MEAN_SQUARE, NONZERO

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

GRAD_WEIGHT, GRAD, PRODUCT = range(3)
NEVER = 1 << 20  # a log2_scale beyond what any container holds


def floor_log2(x):  # type: ignore[no-untyped-def]
    """The exponent of the largest power of two not above `x`; 0 for what is not finite or not above 0.

    By frexp: a float32 log2 rounds up just below a power of two.

    >>> [floor_log2(x) for x in (1.0, 7.9999999, 8.0, 0.3)]
    [0, 2, 3, -2]
    """
    if not (0.0 < x < math.inf):
        return 0
    return math.frexp(x)[1] - 1


def fitting_log2_scale(amax, u_max):  # type: ignore[no-untyped-def]
    """The largest exponent k with amax * 2**k <= u_max: the overflow limit. NEVER where amax is 0.

    >>> fitting_log2_scale(1.0, 65504.0), fitting_log2_scale(65505.0, 65504.0)
    (15, -1)
    """
    if amax == 0.0:
        return NEVER
    a, exponent = math.frexp(amax)
    b, top = math.frexp(u_max)
    return top - exponent - (1 if a > b else 0)


def overflow_limit(g, w, terms, u_max):  # type: ignore[no-untyped-def]
    """The largest factor under which neither the scaled gradient nor any sum of its products can overflow."""
    largest = g[AMAX]
    if w[COUNT] > 0.0:
        largest = largest * max(1.0, terms * w[AMAX])
    return u_max / largest if largest > 0.0 else math.inf


def approx_range(g, w, terms, u_min, u_max, unit, p):  # type: ignore[no-untyped-def]
    """Zhao et al. 2020: a centred normal of the result's standard deviation has at most the share p below u_min.

    p: (sqrt(2) erfinv(share), which statistics, lognormal?, sqrt(2) erfinv(2 share - 1)).
    """
    if not g[AMAX] < math.inf or g[NONZERO] == 0.0 or not w[AMAX] < math.inf:
        return 1.0
    limit = overflow_limit(g, w, terms, u_max)
    if p[2] > 0.0 and w[COUNT] == 0.0:
        deviation = math.sqrt(max(g[LOG_MEAN_SQUARE] - g[LOG_MEAN] * g[LOG_MEAN], 0.0))
        needed = math.exp(min(math.log(u_min) - g[LOG_MEAN] - deviation * p[3], 700.0))  # below float64's largest
    else:
        # raw second moments: the mean of a gradient that is constant counts too
        square = g[MEAN_SQUARE]
        if w[COUNT] > 0.0 and p[1] != GRAD:
            square = square * w[MEAN_SQUARE]
            if p[1] == GRAD_WEIGHT:
                square = square * (0.5 * terms)  # half of the terms are zero behind a ReLU
        if square == 0.0:
            return 1.0
        needed = u_min / p[0] / math.sqrt(square)  # their product may underflow
    return min(max(needed, 1.0), limit)


def abs_range(g, w, terms, u_min, u_max, unit, p):  # type: ignore[no-untyped-def]
    """The smallest product of non-zero magnitudes, summed `terms` times, reaches u_min."""
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
    """`g` holds the moments of the products themselves: the smallest reaches u_min, `terms` of the largest fit."""
    if not 0.0 < g[AMAX] < math.inf:
        return 1.0
    return min(max(u_min / g[AMIN], 1.0), u_max / (terms * g[AMAX]))


def fixed(g, w, terms, u_min, u_max, unit, p):  # type: ignore[no-untyped-def]
    """The same factor everywhere: p[0]."""
    return p[0]


def exact(bins, first, log2_threshold, share):  # type: ignore[no-untyped-def]
    """The smallest k for which at most the share of non-zero elements has |x| * 2**k <= 2**log2_threshold.

    Entry i of `bins` counts 2**(first+i) < |x| <= 2**(first+i+1). 0 where all elements are zero.
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
    """A factor within its own bound, and within the one of the scale that it multiplies."""
    return min(factor, scale_bound, accumulated_bound * math.ldexp(1.0, int(-log2_scale)))


def branch_exponent(amaxima, log2_scales, u_max):  # type: ignore[no-untyped-def]
    """Where branches meet in the original, see branch_log2_scale; -4, the last that is tried, where nothing fits."""
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
    """Where branches meet in the original: the largest of their scales at which the largest true gradient fits.

    amaxima: the largest magnitudes of the branches' gradients in their true size. If none fits, the smallest scale is
    halved while it is 1/8 or more; OverflowError if the last one does not fit either.

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
    """A rule of one layer. It predicts a product from its operands, or measures the gradient that arrived."""

    name: ClassVar[str]
    predicts: ClassVar[bool] = True
    logs: ClassVar[bool] = False

    def factor(self, g: Any, w: Any, terms: int, u_min: float, u_max: float) -> float:
        """The unbound factor for a gradient that carries the scale 1; moments of `w` all zero where there is none."""
        return float(type(self).core()(g, w, terms, u_min, u_max, 1.0, self.parameters()))

    @staticmethod
    def core() -> Any:
        """The formula."""
        raise NotImplementedError

    def parameters(self) -> tuple[float, ...]:
        """What the formula is given beside the statistics."""
        return (0.0,)

    def _require(self, name: str, holds: bool, possible: str) -> None:
        if not holds:
            raise ValueError(f"{name}={getattr(self, name)!r} makes no {self.name} rule: it must be {possible}.")


def _is_number(x: object) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool) and math.isfinite(x)


@dataclass(frozen=True)
class ApproxRange(LayerRule):
    """The method of Zhao et al.: at most the share `n_uf_threshold` of the products underflows, if they are normal.

    stats: "grad+weight" (the last generation of the authors' code), "grad" (the one labelled as the IJCAI submission:
    no weights) or "product" (the first: no sum). lognormal: for gradients without weights (casts), whose magnitudes
    are taken as lognormal.

    >>> from fpsim.moments import Moments
    >>> g = Moments(256, 256, 0, 2.0**-40, -(2.0**-20), 2.0**-20, 2.0**-20, 2.0**-20)
    >>> w = Moments(512, 512, 0, 2.0**-12, -(2.0**-6), 2.0**-6, 2.0**-6, 2.0**-6)
    >>> round(ApproxRange().factor(g, w, 32, 6e-8, 65504.0), 3)
    803.177
    """

    name: ClassVar[str] = "approx_range"
    n_uf_threshold: float = 1e-3
    stats: str = "grad+weight"
    lognormal: bool = False

    def __post_init__(self) -> None:
        share = self.n_uf_threshold
        self._require("n_uf_threshold", _is_number(share) and 0 < share < 1, "a share between 0 and 1, both excluded")
        self._require("stats", self.stats in ("grad+weight", "grad", "product"), "'grad+weight', 'grad' or 'product'")
        self._require("lognormal", isinstance(self.lognormal, bool), "True or False")

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
        # and a step of Newton's, for 1 + share has lost digits of a small one
        slope = math.sqrt(2 / math.pi) * math.exp(-half_width * half_width / 2)
        half_width += (share - math.erf(half_width / math.sqrt(2))) / slope
        kind = ("grad+weight", "grad", "product").index(self.stats)
        return half_width, float(kind), float(self.lognormal), normal.inv_cdf(share)


@dataclass(frozen=True)
class AbsRange(LayerRule):
    """From the smallest and the largest non-zero magnitudes alone."""

    name: ClassVar[str] = "abs_range"

    @staticmethod
    def core() -> Any:
        return abs_range


@dataclass(frozen=True)
class ElementWiseRange(LayerRule):
    """From every product of a gradient's element and a weight's: linear layers and convolutions, for diagnosis.

    max_rescue_ratio: the share of the products, largest first, that need not underflow; None for all of them, found
    channel by channel. With a share every product is formed: at most 2**27 of them.
    """

    name: ClassVar[str] = "element_wise_range"
    max_rescue_ratio: float | None = None

    def __post_init__(self) -> None:
        ratio = self.max_rescue_ratio
        holds = ratio is None or (_is_number(ratio) and 0 < ratio <= 1)
        self._require("max_rescue_ratio", holds, "a share above 0 and up to 1, or None")

    @staticmethod
    def core() -> Any:
        return element_wise_range


@dataclass(frozen=True)
class Fixed(LayerRule):
    """The factor `fixed_loss_scale` at every layer; with 1, plain loss scaling by `init_scale`."""

    name: ClassVar[str] = "fixed"
    fixed_loss_scale: float = 1.0

    def __post_init__(self) -> None:
        scale = self.fixed_loss_scale
        self._require("fixed_loss_scale", _is_number(scale) and scale > 0, "a finite number above 0")

    @staticmethod
    def core() -> Any:
        return fixed

    def parameters(self) -> tuple[float, ...]:
        return (float(self.fixed_loss_scale),)


@dataclass(frozen=True)
class Exact(LayerRule):
    """The smallest scale, 1 or more, at which at most the share `n_uf_threshold` of this very tensor underflows.

    From the histogram of its exponents, so that it needs no model of the numbers: what the others are measured with.
    """

    name: ClassVar[str] = "exact"
    predicts: ClassVar[bool] = False
    n_uf_threshold: float = 1e-3

    def __post_init__(self) -> None:
        share = self.n_uf_threshold
        self._require("n_uf_threshold", _is_number(share) and 0 <= share < 1, "a share, 0 or more and below 1")


@dataclass(frozen=True)
class Current(LayerRule):
    """This tensor's largest magnitude to the top of the range, less `margin` powers of two."""

    name: ClassVar[str] = "current"
    predicts: ClassVar[bool] = False
    margin: int = 0

    def __post_init__(self) -> None:
        _require_whole(self, "margin", 0)


@dataclass(frozen=True)
class AmaxHistory(LayerRule):
    """Delayed scaling, as in NVIDIA's Transformer Engine: the largest magnitude of the last `length` steps to the top.

    The step itself is not among them, so that nothing waits for its statistics; the first one has the scale 1.
    """

    name: ClassVar[str] = "amax_history"
    predicts: ClassVar[bool] = False
    length: int = 16
    margin: int = 0

    def __post_init__(self) -> None:
        _require_whole(self, "length", 1)
        _require_whole(self, "margin", 0)


def _require_whole(rule: LayerRule, name: str, least: int) -> None:
    value = getattr(rule, name)
    holds = isinstance(value, int) and not isinstance(value, bool) and value >= least
    rule._require(name, holds, f"a whole number, {least} or more")


LAYER_RULES: dict[str, type[LayerRule]] = {
    rule.name: rule for rule in (ApproxRange, AbsRange, ElementWiseRange, Fixed, Exact, Current, AmaxHistory)
}


def layer_rule(name: str, **params: Any) -> LayerRule:
    """The per-layer rule of that name, with its parameters.

    Raises ValueError for an unknown name or an impossible value, TypeError for an unknown parameter.

    >>> layer_rule("exact", n_uf_threshold=1e-2)
    Exact(n_uf_threshold=0.01)
    """
    rule = LAYER_RULES.get(name)
    if rule is None:
        near = difflib.get_close_matches(str(name), LAYER_RULES, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"Unknown layer rule {name!r}.{hint} Known: {', '.join(LAYER_RULES)}.")
    known = [f.name for f in fields(rule)]
    for param in params:
        if param not in known:
            raise TypeError(f"The rule {name!r} has no parameter {param!r}. It has: {', '.join(known) or 'none'}.")
    return rule(**params)


def as_layer_rule(rule: LayerRule | str) -> LayerRule:
    """A rule from a rule or a name.

    >>> as_layer_rule("abs_range")
    AbsRange()
    """
    return rule if isinstance(rule, LayerRule) else layer_rule(rule)
