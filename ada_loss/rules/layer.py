"""Rules of one layer, which choose the scale of its gradient: the paper's rules, and rules that measure.

A new rule is a subclass of LayerRule and an entry in LAYER_RULES. A rule that predicts needs a formula in
`formulas.py`, which `core()` returns. A rule that measures names its statistic in `measures`; a new statistic needs a
kernel in `layerwise/scale_kernels.py` and its call in `MEASURES` of `layerwise/chooser.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Any, ClassVar

from ada_loss import checks
from ada_loss.checks import Possible, param
from ada_loss.rules.formulas import BOUNDS, STATS, abs_range, approx_range, element_wise_range, fixed
from fpsim.checks import is_whole, refuse, shown

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
    "Mse",
    "as_layer_rule",
    "layer_rule",
]


ONE_OF_STATS = Possible("'grad+weight', 'grad' or 'product'", lambda v: v in STATS)
ONE_OF_BOUNDS = Possible("'measured' or 'worst_case'", lambda v: v in BOUNDS)
SHARE = checks.number("a share between 0 and 1, both excluded", lambda v: 0 < v < 1)
SHARE_OR_ZERO = checks.number("a share, 0 or more and below 1", lambda v: 0 <= v < 1)
SHARE_OR_ONE = checks.number("a share above 0 and up to 1", lambda v: 0 < v <= 1)


@dataclass(frozen=True)
class LayerRule:
    """A rule that chooses the scale of one layer's gradient."""

    name: ClassVar[str]  # the name for `layer_rule`
    predicts: ClassVar[bool] = True  # it predicts a product from its operands; other rules measure the gradient itself
    measures: ClassVar[str] = ""  # the statistic of a rule that measures, a key of `layerwise.chooser.MEASURES`
    is_constant: ClassVar[bool] = False  # its factor depends neither on the gradient nor on operands
    forms_products: ClassVar[bool] = False  # it needs the moments of all products, which are formed one by one
    logs: ClassVar[bool] = False  # it needs the moments of log|x|
    # In a format of few bits the rule scales the largest magnitude to just below the maximum. Nothing saturates, so
    # stochastic rounding has no bias.
    fits_few_bits: ClassVar[bool] = False
    saturates: ClassVar[bool] = False  # it may choose a scale at which the largest elements saturate

    def __post_init__(self) -> None:
        checks.check_fields(self, f"{self.name} rule")

    def factor(self, g: Any, w: Any, terms: int, u_min: float, u_max: float) -> float:
        """Return the unbounded factor for a gradient that carries scale 1. `formulas.py` documents the arguments.

        Raises NotImplementedError for a rule that measures.
        """
        return float(type(self).core()(g, w, terms, u_min, u_max, 1.0, self.parameters()))

    @staticmethod
    def core() -> Any:
        """Return the formula of the factor."""
        raise NotImplementedError

    def parameters(self) -> tuple[float, ...]:
        """Return the last argument of the formula."""
        return (0.0,)


@dataclass(frozen=True)
class ApproxRange(LayerRule):
    """The method of Zhao et al. 2020: at most a share of normally distributed products underflows.

    n_uf_threshold: the share of the products that may underflow.
    stats: the authors' version of the statistics: "grad+weight" (the last version), "grad" (labelled as the IJCAI
        submission: only the standard deviation and the largest magnitude of the gradient, so that a constant gradient
        has the factor 1) or "product" (the first version, which leaves the sum out).
    lognormal: whether the magnitudes of gradients without weights (casts) are taken as lognormal.
    bound: how products are kept from overflowing. "measured": each scale is lowered until the gradient at its site
        fits, which every rule does. "worst_case": in addition, the authors' limit on the factor, which assumes that all
        terms of a sum have the largest magnitude and the same sign. In formats of few bits that limit dominates: in
        e2m1fn the scales are smaller by 2**8 to 2**14, and all gradients underflow.

    >>> from fpsim.tensors.moments import Moments
    >>> g = Moments(256, 256, 0, 2.0**-40, -(2.0**-20), 2.0**-20, 2.0**-20, 2.0**-20)
    >>> w = Moments(512, 512, 0, 2.0**-12, -(2.0**-6), 2.0**-6, 2.0**-6, 2.0**-6)
    >>> round(ApproxRange().factor(g, w, 32, 6e-8, 65504.0), 3)
    803.177
    """

    name: ClassVar[str] = "approx_range"
    n_uf_threshold: float = param(1e-3, SHARE)
    stats: str = param("grad+weight", ONE_OF_STATS)
    lognormal: bool = param(False, checks.FLAG)
    bound: str = param("measured", ONE_OF_BOUNDS)

    # `logs` and `fits_few_bits` are constants of other rules. They are properties here, because they follow from
    # parameters of this rule.
    @property
    def logs(self) -> bool:  # type: ignore[override]
        return self.lognormal

    @property
    def fits_few_bits(self) -> bool:  # type: ignore[override]
        return self.bound == "measured"

    @staticmethod
    def core() -> Any:
        return approx_range

    def parameters(self) -> tuple[float, ...]:
        normal, share = NormalDist(), self.n_uf_threshold
        # sqrt(2) erfinv(2q - 1) is the normal's quantile at q, so that no SciPy is needed for erfinv.
        half_width = normal.inv_cdf((1 + share) / 2)
        # 1 + share has lost digits of a small share, and one step of Newton's method restores them.
        slope = math.sqrt(2 / math.pi) * math.exp(-half_width * half_width / 2)
        half_width += (share - math.erf(half_width / math.sqrt(2))) / slope
        words = float(STATS.index(self.stats)), float(self.lognormal), normal.inv_cdf(share)
        return half_width, *words, float(BOUNDS.index(self.bound))


@dataclass(frozen=True)
class AbsRange(LayerRule):
    """Keep every product from underflowing, judged by the extreme non-zero magnitudes of both operands.

    The smallest product counts `terms` times, as if terms of a sum never cancelled. Where they cancel, some results
    underflow.
    """

    name: ClassVar[str] = "abs_range"

    @staticmethod
    def core() -> Any:
        return abs_range


@dataclass(frozen=True)
class ElementWiseRange(LayerRule):
    """Keep every product from underflowing, judged by all products of a gradient element and a weight; slow.

    The rule is for the diagnosis of linear layers and convolutions.

    max_rescue_ratio: the share of the products, counted from the largest, that must not underflow. None for all
        products, whose smallest and largest are found channel by channel. With a share every product is formed, at most
        2**27 of them.
    """

    name: ClassVar[str] = "element_wise_range"
    forms_products: ClassVar[bool] = True
    max_rescue_ratio: float | None = param(None, SHARE_OR_ONE.or_none())

    @staticmethod
    def core() -> Any:
        return element_wise_range


@dataclass(frozen=True)
class Fixed(LayerRule):
    """Use the same factor at every layer.

    fixed_loss_scale: the factor. With 1 the rule is plain loss scaling by `init_scale`.
    """

    name: ClassVar[str] = "fixed"
    is_constant: ClassVar[bool] = True
    fixed_loss_scale: float = param(1.0, checks.POSITIVE)

    @staticmethod
    def core() -> Any:
        return fixed

    def parameters(self) -> tuple[float, ...]:
        return (float(self.fixed_loss_scale),)


@dataclass(frozen=True)
class Exact(LayerRule):
    """Choose the smallest scale, 1 or more, at which at most a share of the gradient itself underflows.

    The share is counted in a histogram of exponents, without assuming a distribution. This makes the rule the reference
    for the other rules.

    n_uf_threshold: the share of the gradient's elements that may underflow.
    """

    name: ClassVar[str] = "exact"
    predicts: ClassVar[bool] = False
    measures: ClassVar[str] = "share of underflow"
    n_uf_threshold: float = param(1e-3, SHARE_OR_ZERO)


@dataclass(frozen=True)
class Current(LayerRule):
    """Scale the gradient's largest magnitude to just below the format's maximum.

    margin: the number of powers of two by which to stay below the maximum.
    """

    name: ClassVar[str] = "current"
    predicts: ClassVar[bool] = False
    measures: ClassVar[str] = "amax"
    fits_few_bits: ClassVar[bool] = True
    margin: int = param(0, checks.COUNT)


@dataclass(frozen=True)
class AmaxHistory(LayerRule):
    """Delayed scaling as in NVIDIA's Transformer Engine: like Current, but by the largest magnitude of the last steps.

    The current step is not among them, so nothing waits for its statistics. Until the history has a nonzero gradient,
    the gradient's own largest magnitude is used.

    length: the number of steps.
    margin: the number of powers of two by which to stay below the format's maximum.
    """

    name: ClassVar[str] = "amax_history"
    predicts: ClassVar[bool] = False
    measures: ClassVar[str] = "amax of the last steps"
    length: int = param(16, Possible("a whole number from 1 to 2**20", lambda v: is_whole(v, 1) and v <= 2**20))
    margin: int = param(0, checks.COUNT)


@dataclass(frozen=True)
class Mse(LayerRule):
    """Choose the scale with the least squared error: the scale of `Current`, or 2, 4 or 8 times that scale.

    The rule is for rounding to nearest. In 6 bits and fewer it keeps small elements that `Current` loses, and saturates
    a few large elements; in 8 bits it equals `Current`. Never combine it with stochastic rounding, whose errors average
    out only without saturation; a warning says so. The gradient of the loss itself (see `fpsim.last_layers`) needs its
    largest element, and is better left in a wider format.
    """

    name: ClassVar[str] = "mse"
    predicts: ClassVar[bool] = False
    measures: ClassVar[str] = "squared error"
    saturates: ClassVar[bool] = True


LAYER_RULES: dict[str, type[LayerRule]] = {
    rule.name: rule for rule in (ApproxRange, AbsRange, ElementWiseRange, Fixed, Exact, Current, AmaxHistory, Mse)
}


def layer_rule(name: str, **params: Any) -> LayerRule:
    """Create a layer rule by its name.

    Args:
        name: "approx_range", "abs_range", "element_wise_range", "fixed", "exact", "current", "amax_history" or "mse".
        params: the parameters of the rule's class.

    Raises:
        ValueError: for an unknown name or an invalid value.
        TypeError: for an unknown parameter.

    >>> layer_rule("exact", n_uf_threshold=1e-2)
    Exact(n_uf_threshold=0.01)
    """
    rule = LAYER_RULES.get(name) if isinstance(name, str) else None
    if rule is None:
        raise ValueError(refuse(f"Unknown layer rule {shown(name)}", LAYER_RULES, word=name))
    known = [f.name for f in fields(rule)]
    for given in params:
        if given not in known:
            raise TypeError(f"The rule {name!r} has no parameter {given!r}. It has: {', '.join(known) or 'none'}.")
    return rule(**params)


def as_layer_rule(rule: LayerRule | str) -> LayerRule:
    """Convert a rule or its name to a rule.

    >>> as_layer_rule("abs_range")
    AbsRange()
    """
    return rule if isinstance(rule, LayerRule) else layer_rule(rule)
