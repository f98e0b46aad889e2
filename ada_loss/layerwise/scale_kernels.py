"""At which scale a gradient is rounded, and which one it hands on: decided where the numbers are.

Each is a function over small arrays, which runs in Python for a gradient on the CPU and is compiled as a kernel of one
thread for a card: no number goes to the host. `limits` holds u_min, u_max, the least and the largest log2_scale, the
bounds of a factor and of a scale, and the exponent up to which magnitudes are lost; `chosen` is left for a recorder.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from ada_loss.rules.layer import (
    AMAX,
    COUNT,
    bounded,
    branch_exponent,
    exact,
    fitting_log2_scale,
    floor_log2,
)

__all__ = [
    "ANEW",
    "IF_UNKNOWN",
    "REUSE",
    "branch",
    "by_binades",
    "by_history",
    "choose_with",
    "hold",
    "keep",
    "to_the_top",
]

REUSE, IF_UNKNOWN, ANEW = range(3)  # when a factor is computed
UNBOUND, BOUND, POWER_OF_TWO, WANTED, FINAL = range(5)  # the fields of `chosen`


def _settle(k, amax, limits, out, chosen):  # type: ignore[no-untyped-def]
    """The scale for a gradient of this amax: the wanted one, unless it would overflow; 1 if it is not finite."""
    chosen[WANTED] = k
    k = 0 if not amax < math.inf else min(k, fitting_log2_scale(amax, limits[1]))
    k = min(max(k, int(limits[2])), int(limits[3]))
    out[0] = k
    chosen[FINAL] = k


def keep(log2_scale, moments, limits, out, chosen):  # type: ignore[no-untyped-def]
    """Pass the scale on."""
    _settle(log2_scale[0], moments[AMAX], limits, out, chosen)


def hold(wanted, kept, moments, out):  # type: ignore[no-untyped-def]
    """The scale to be kept for the steps to come."""
    out[0] = wanted[0] if 0.0 < moments[AMAX] < math.inf else kept[0]


def to_the_top(log2_scale, moments, limits, margin, out, chosen):  # type: ignore[no-untyped-def]
    """The largest magnitude to the top of the range."""
    k = log2_scale[0]
    if 0.0 < moments[AMAX] < math.inf:
        k = fitting_log2_scale(moments[AMAX], limits[1]) - margin[0]
    chosen[POWER_OF_TWO] = k - log2_scale[0]
    _settle(k, moments[AMAX], limits, out, chosen)


def by_history(log2_scale, moments, limits, margin, history, out, chosen):  # type: ignore[no-untyped-def]
    """The largest magnitude of the past steps to the top of the range; then remember this one's."""
    largest = 0.0
    for i in range(len(history)):
        largest = max(largest, history[i])
    k = fitting_log2_scale(largest, limits[1]) - margin[0] if largest > 0.0 else 0
    chosen[POWER_OF_TWO] = k - log2_scale[0]
    _settle(k, moments[AMAX], limits, out, chosen)
    if moments[AMAX] < math.inf:
        for i in range(len(history) - 1):
            history[i] = history[i + 1]
        history[len(history) - 1] = moments[AMAX]


def by_binades(log2_scale, moments, limits, bins, first, share, out, chosen):  # type: ignore[no-untyped-def]
    """The smallest scale at which at most a share underflows, and 1 at least."""
    k = max(exact(bins, first[0], int(limits[6]), share[0]), 0)
    chosen[POWER_OF_TWO] = k - log2_scale[0]
    _settle(k, moments[AMAX], limits, out, chosen)


def branch(amaxima, log2_scales, limits, out):  # type: ignore[no-untyped-def]
    """Where branches meet, as in the original."""
    out[0] = branch_exponent(amaxima, log2_scales, limits[1])


@cache
def choose_with(core: Callable[..., float]) -> Callable[..., None]:
    """The decision for what a product gives: a factor from statistics, or the one of an earlier step.

    A gradient of zeros or one that is not finite tells nothing, nor do such weights: the factor stays what it was; 0
    is one that is not known yet, and scales by 1.
    """

    def choose(log2_scale, g, w, terms, limits, p, when, factor, out, chosen):  # type: ignore[no-untyped-def]
        s = log2_scale[0]
        tells = 0.0 < g[AMAX] < math.inf and (w[COUNT] == 0.0 or 0.0 < w[AMAX] < math.inf)
        if tells and (when[0] == ANEW or (when[0] == IF_UNKNOWN and factor[0] == 0.0)):
            unit = math.ldexp(1.0, int(-s))
            factor[0] = core(g, w, float(terms[0]), limits[0] * unit, limits[1] * unit, unit, p)
        unbound = factor[0] if factor[0] > 0.0 else 1.0
        bound = bounded(unbound, s, limits[4], limits[5])
        k = floor_log2(bound)
        chosen[UNBOUND], chosen[BOUND], chosen[POWER_OF_TWO] = unbound, bound, k
        out[0] = min(max(s + k, int(limits[2])), int(limits[3]))

    return choose
