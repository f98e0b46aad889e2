"""Kernels that choose the scale of a gradient, and the scale that is passed on, on the gradient's device.

Each kernel is a function over small arrays. It runs in Python for a gradient on the CPU, and is compiled as a CUDA
kernel of one thread for a gradient on a GPU, so that no number is copied to the host. Kernels share these arguments:

log2_scale: (1,) int64, the requested scale: the scale with which the gradient arrived, or the scale that was held.
moments, g, w: `Moments` as (10,) float64. `moments` are those of the gradient before rounding. `g` are those of the
    rounded gradient, or, where a gradient enters the format, of the gradient before rounding. `w` are those of the
    product's other operand.
limits: `Limits` as (7,) float64.
out: (1,) int64, where the scale is written.
chosen: (5,) float64, where the decision is written for a recorder, in the fields of `CHOSEN`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import NamedTuple

from ada_loss.rules.formulas import bounded, branch_exponent, exact, fitting_log2_scale, floor_log2
from fpsim.scaling import AMAX, COUNT

__all__ = [
    "BOUND",
    "CHOSEN",
    "FACTOR_BOUND",
    "FINAL",
    "HIGHEST",
    "HOLD",
    "IF_UNKNOWN",
    "LOST_EXPONENT",
    "LOWEST",
    "NORMAL",
    "POWER_OF_TWO",
    "RECOMPUTE",
    "REQUESTED",
    "REUSE",
    "SCALE_BOUND",
    "UNBOUND",
    "U_MAX",
    "U_MIN",
    "Limits",
    "SiteMode",
    "carried_factor_kernel",
    "delayed_scaling",
    "factor_kernel",
    "keep_what_is_not_finite",
    "least_error_scale",
    "meeting_scale",
    "pass_scale_on",
    "quotient",
    "retain_last_informative",
    "scale_to_max",
    "smallest_sufficient_scale",
    "sum_with_headroom",
    "with_headroom",
]


class SiteMode(IntEnum):
    """Mode of a site in a step that chooses scales. Except under HOLD, the scale follows from the consumers' scales."""

    HOLD = 0  # the gradient is rounded at the site's held scale, and its products reuse their factors
    REUSE = 1  # factors of an earlier step are reused
    IF_UNKNOWN = 2  # factors that are not known yet are computed from new statistics
    RECOMPUTE = 3  # all factors are computed from new statistics


# These names are for speed: Python 3.11 takes 60 ns to look up a member of an Enum class.
HOLD, REUSE, IF_UNKNOWN, RECOMPUTE = SiteMode


class Limits(NamedTuple):
    """Bounds of a gradient's scale in one format and container."""

    u_min: float  # rules keep gradients above this magnitude
    u_max: float  # the format's largest magnitude
    lowest: float  # the lowest and the highest log2_scale that the container can carry
    highest: float
    factor_bound: float  # the largest factor of one product, inf for no bound
    scale_bound: float  # the largest scale that factors may add up to, inf for no bound
    lost_exponent: float  # magnitudes below 2**lost_exponent underflow; this one too if `Constants.loses_ties`


U_MIN, U_MAX, LOWEST, HIGHEST, FACTOR_BOUND, SCALE_BOUND, LOST_EXPONENT = range(len(Limits._fields))
# Fields for a recorder: the factor that the rule computed, this factor within its bounds, the bounded factor's exponent
# as a power of two, the requested log2_scale, and the log2_scale at which the gradient was rounded.
CHOSEN = range(5)
UNBOUND, BOUND, POWER_OF_TWO, REQUESTED, FINAL = CHOSEN


def _fit(k, amax, limits, out, chosen):
    """Lower the requested exponent k until a gradient of this amax fits; scale 1 for a gradient that is not finite."""
    chosen[REQUESTED] = k
    # `not amax < inf` is true for NaN too. At scale 1 such a gradient reaches the parameters, where a scaler sees it.
    k = 0 if not amax < math.inf else min(k, fitting_log2_scale(amax, limits[U_MAX]))
    k = min(max(k, int(limits[LOWEST])), int(limits[HIGHEST]))
    out[0] = k
    chosen[FINAL] = k


def pass_scale_on(log2_scale, moments, limits, out, chosen):
    """Keep the requested scale, or lower it if the gradient would overflow."""
    _fit(log2_scale[0], moments[AMAX], limits, out, chosen)


def retain_last_informative(requested, held, moments, out):
    """Write the scale to hold: the requested scale, or the last one if the gradient is all zero or not finite."""
    out[0] = requested[0] if 0.0 < moments[AMAX] < math.inf else held[0]


def _measured(k, log2_scale, limits, chosen):
    """Return the scale k that a rule measured, or the user's bound if the scale exceeds this bound."""
    if limits[SCALE_BOUND] < math.inf:
        k = min(k, floor_log2(limits[SCALE_BOUND]))
    chosen[POWER_OF_TWO] = k - log2_scale[0]
    return k


def keep_what_is_not_finite(before, after):
    """Mark the moments of a rounded gradient as not finite if the unrounded gradient was not finite.

    Without the mark an inf would be lost, because rounding may saturate it.
    """
    if not before[AMAX] < math.inf:
        after[AMAX] = math.inf


def scale_to_max(log2_scale, moments, limits, margin, out, chosen):
    """Scale amax to just below the format's maximum, less `margin` powers of two."""
    k = log2_scale[0]
    if 0.0 < moments[AMAX] < math.inf:
        k = fitting_log2_scale(moments[AMAX], limits[U_MAX]) - margin[0]
    k = _measured(k, log2_scale, limits, chosen)
    _fit(k, moments[AMAX], limits, out, chosen)


def delayed_scaling(log2_scale, moments, limits, margin, history, out, chosen):
    """Scale the largest amax of the past steps to just below the maximum; then add this step's amax to `history`.

    If the history is all zero, this step's own amax is used.
    """
    largest = 0.0
    for i in range(len(history)):
        largest = max(largest, history[i])
    if largest == 0.0 and moments[AMAX] < math.inf:
        largest = moments[AMAX]
    k = fitting_log2_scale(largest, limits[U_MAX]) - margin[0] if largest > 0.0 else 0
    k = _measured(k, log2_scale, limits, chosen)
    _fit(k, moments[AMAX], limits, out, chosen)
    if moments[AMAX] < math.inf:  # otherwise one overflow would fix the scale for the length of the history
        for i in range(len(history) - 1):
            history[i] = history[i + 1]
        history[len(history) - 1] = moments[AMAX]


def smallest_sufficient_scale(log2_scale, moments, limits, bins, first, share, out, chosen):
    """Choose the smallest scale, 1 or more, at which at most `share` of the elements underflows.

    bins, first: from `binades`: the elements counted by exponent, and the exponent of the first count. A power of two
        is the end of a binade if rounding loses elements at the threshold, and otherwise the beginning of a binade.
    """
    k = max(exact(bins, first[0], int(limits[LOST_EXPONENT]), share[0]), 0)
    k = _measured(k, log2_scale, limits, chosen)
    _fit(k, moments[AMAX], limits, out, chosen)


def least_error_scale(log2_scale, moments, limits, errors, out, chosen):
    """Choose the scale with the least squared error among the fitting scale and larger ones; of equals the smaller.

    errors: the error of each scale, beginning with the scale in `out`. An error that is not finite, after an overflow,
        never counts as smaller.
    """
    best, k = 0, out[0]
    for i in range(1, len(errors)):
        if errors[i] < errors[best]:
            best = i
    # `_fit` is not used, because the largest elements may saturate at the scale of least error.
    k = _measured(k + best, log2_scale, limits, chosen)
    k = min(max(k, int(limits[LOWEST])), int(limits[HIGHEST]))
    out[0] = k
    chosen[FINAL] = k


def meeting_scale(amaxima, log2_scales, limits, out):
    """Choose the scale of a sum of branches, each rounded at its own scale, as Zhao et al. do."""
    out[0] = branch_exponent(amaxima, log2_scales, limits[U_MAX])


@cache
def factor_kernel(formula: Callable[..., float]) -> Callable[..., None]:
    """Return the kernel that chooses the scale behind a product: the scale of its output's gradient times a factor.

    mode: (1,) int64, a SiteMode: whether the factor is computed or reused from an earlier step.
    factor: (1,) float64; 0 is an unknown factor, and scales by 1. The old factor is kept if the gradient or the other
        operand is all zero or not finite, because its statistics are then unusable.
    p: the rule's parameters.
    """

    def choose_factor(log2_scale, g, w, terms, limits, p, mode, factor, out, chosen):
        s = log2_scale[0]
        tells = 0.0 < g[AMAX] < math.inf and (w[COUNT] == 0.0 or 0.0 < w[AMAX] < math.inf)
        is_computed = mode[0] == RECOMPUTE or (mode[0] == IF_UNKNOWN and factor[0] == 0.0)
        if tells and is_computed:
            # The gradient has its true size, so the format's limits are divided by the scale instead.
            unit = math.ldexp(1.0, int(-s))
            factor[0] = formula(g, w, float(terms[0]), limits[U_MIN] * unit, limits[U_MAX] * unit, unit, p)
        unbound = factor[0] if factor[0] > 0.0 else 1.0
        bound = bounded(unbound, s, limits[FACTOR_BOUND], limits[SCALE_BOUND])
        k = floor_log2(bound)
        chosen[UNBOUND], chosen[BOUND], chosen[POWER_OF_TWO] = unbound, bound, k
        out[0] = min(max(s + k, int(limits[LOWEST])), int(limits[HIGHEST]))

    return choose_factor


@cache
def carried_factor_kernel(formula: Callable[..., float]) -> Callable[..., None]:
    """Return the kernel that writes to `out` the power of two by which a gradient that carries a scale is multiplied.

    The moments are those of the gradient times its power, so the formula's unit is 1. log2_scale is the power that the
    gradient carries. The other arguments are those of `factor_kernel`, except for:

    room: (4,) float64: the largest magnitude that a sum of the product's terms may reach, 0 for no limit; whether the
        gradient itself must not exceed this magnitude; log2 of the largest scale, for a site that overflowed; the
        number of elements of the gradient that are added up for a bias.
    factor: a power of two within that room. The old factor is kept if the gradient is all zero or not finite.
    """

    def choose_carried(log2_scale, g, w, terms, limits, p, mode, room, factor, out, chosen):
        s = log2_scale[0]
        is_computed = mode[0] == RECOMPUTE or (mode[0] == IF_UNKNOWN and factor[0] == 0.0)
        if is_computed and 0.0 < g[AMAX] < math.inf:
            asked = factor[0] if factor[0] > 0.0 else 1.0
            if w[COUNT] == 0.0 or 0.0 < w[AMAX] < math.inf:
                asked = formula(g, w, float(terms[0]), limits[U_MIN], limits[U_MAX], 1.0, p)
            chosen[UNBOUND] = asked
            k = floor_log2(asked)
            if room[0] > 0.0:
                gain = float(terms[0]) * w[AMAX] if w[COUNT] > 0.0 else 1.0
                if room[1] > 0.0:
                    gain = max(gain, 1.0)
                gain = max(gain, room[3])
                k = min(k, fitting_log2_scale(g[AMAX] * gain, room[0]))
            factor[0] = math.ldexp(1.0, int(k))
        bound = bounded(factor[0] if factor[0] > 0.0 else 1.0, s, limits[FACTOR_BOUND], limits[SCALE_BOUND])
        k = floor_log2(bound)
        chosen[BOUND], chosen[POWER_OF_TWO], chosen[REQUESTED] = bound, k, s + k
        k = min(s + k, int(room[2]))
        k = min(max(k, int(limits[LOWEST])), int(limits[HIGHEST]))
        chosen[FINAL] = k
        out[0] = k - s

    return choose_carried


# In the kernels of native backward passes, the powers that gradients carry (top, power, goes, came) are (1,) int64.
NORMAL = 126  # 2**-126 to 2**126 are normal numbers of float32


def quotient(goes, came, out):
    """Write the factor 2**(goes - came), from the scale that a gradient came with to the one with which it goes on."""
    # The exponent is clamped: float32 holds the true gradient at any scale in use, and beyond the clamp the product
    # rounds to zero anyway.
    out[0] = math.ldexp(1.0, min(max(goes[0] - came[0], -NORMAL), NORMAL))


def with_headroom(top, power, moments, limit, out):
    """Lower the power `top` until a gradient stays below the limit when its present power, `power`, becomes `top`.

    A gradient that already exceeds the limit keeps its power.
    """
    out[0] = top[0]
    if 0.0 < moments[AMAX] < math.inf:
        out[0] = min(top[0], power[0] + max(fitting_log2_scale(moments[AMAX], limit[0]), 0))


def sum_with_headroom(top, moments, limit, out):
    """Lower the power `top` of a sum until the sum stays below the limit."""
    out[0] = top[0]
    if 0.0 < moments[AMAX] < math.inf:
        out[0] = top[0] + min(fitting_log2_scale(moments[AMAX], limit[0]), 0)
