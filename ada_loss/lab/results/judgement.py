"""Statistics of differences from float32: collapses, and one test for each other setting, with a common bound.

A seed has collapsed if it is too low to belong to the other seeds of its setting. The differences of each setting
without a collapse are tested against minus the tolerance, two-sided: the setting is worse by at most the tolerance, or
by more, or undecided. Holm's procedure (1979) bounds the chance of a wrong statement. With five settings or more and
few seeds, similar variances are moderated by each other (Smyth 2004, doi:10.2202/1544-6115.1027).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fpsim.checks import pip_install

try:
    from scipy import optimize, special, stats
except ImportError as error:
    raise ImportError(f"A verdict needs {error.name}, which is not installed: {pip_install('lab')}.") from None

__all__ = [
    "COLLAPSE",
    "LEAST_SEEDS",
    "LEAST_SHARED",
    "LEVEL",
    "MOST_SEEDS",
    "PART_OF_STEP",
    "SIMULATED",
    "Decisions",
    "Judgement",
    "collapses",
    "decide",
    "is_sharing",
    "judge",
    "judge_sweep",
    "largest_rate_unseen",
    "level_of_tests",
    "seeds_apart",
    "smallest_step",
    "smallest_tolerance",
]

LEVEL = 0.05  # the level of a verdict, and of a test
# With two seeds, a t-test at 5 % needs a difference of 12.7 standard errors.
LEAST_SEEDS = 3
# The least number of settings, and the largest number of seeds, with which variances are shared. With more seeds, a
# test with a setting's own variance has as much power, and needs no raised limit.
LEAST_SHARED = 5
MOST_SHARED = 5
# For shared variances, the simulation of benchmarks/verdicts.py chose the next three constants. It simulates 5, 15 and
# 40 settings with 3 and 5 seeds; differences are normal, with float32 in common. Variances may differ. As in real
# sweeps, settings at the tolerance may vary 2 to 5 times as much as settings that equal float32. Without the raised
# limit up to 21 % of such sweeps have a wrong statement, and a lower level would hardly help.
PART_OF_LEVEL = 0.6
SHARE_OF_LARGER = 0.9  # a shared variance is raised to this quantile of the sample variances of settings with it
ALIKE = 8.0  # the least prior degrees of freedom at which variances count as alike
SIMULATED = 0.049  # the largest share of simulated sweeps with a wrong statement, at the level of 5 % (20,000 sweeps)
COLLAPSE = 10.0  # the number of tolerances that a collapsed seed loses at least
PART_OF_COLLAPSES = 0.1  # the part of the level that collapses may use
# A collapsed seed is below the other seeds by more than these multiples of chance deviations. The multiples allow for
# tails that are heavier than normal: if one value in ten has ten times the deviation, one of five seeds often is such a
# value.
OF_DEVIATION = 35.0  # deviations of the other seeds
OF_USUAL = 50.0  # usual deviations of the other settings
OF_FLOAT32 = 10.0  # deviations of float32, which differs from seed to seed by more than a setting does from float32
USUAL = 0.25  # the share of the other settings whose deviations are below the usual one
LEAST_OTHERS = 3  # the least number of settings from which a usual deviation is taken
MOST_COLLAPSED = 10  # the largest number of a setting's seeds that are tested
# Limits of `seeds_apart`: in tolerances for the median of the other seeds, and in ranges of the other seeds.
OTHERS = 5.0
APART = 3.0
# A seed is much worse if its loss exceeds MUCH deviations of float32 and of other settings, and TWICE times the loss of
# the best seed.
MUCH = 4.0
TWICE = 2.0
NEGLIGIBLE = 1e-3  # a deviation below this part of the tolerance says nothing about other settings' deviations
NO_EXCESS = 1e-9  # with less excess variance of logarithms, settings differ no more than equal settings do
# A deviation is taken to be at least this part of the step in which a metric is counted.
PART_OF_STEP = 0.5
MOST_COUNTED = 10_000  # the largest test set whose size is found, in examples
# In float32, fractions with denominators up to MOST_SINGLE can be distinguished from other numbers if there are at
# least LEAST_SINGLE values. A single value proves nothing: a quarter of all numbers are such fractions by chance, as
# pi / 4 is 355 / 452.
MOST_SINGLE = 1_000
LEAST_SINGLE = 4
MOST_VALUES = 64  # the largest number of values that are searched for a step
NOISE = 2.0**-50  # the resolution of differences between float64 numbers, as a part of the largest value
MOST_DECIMALS = 6  # the largest number of decimals of a rounded metric: a float32 has no more
MOST_SLACK = 0.05  # the largest slack, as a part of a step; with more slack, any number may be a multiple
SINGLE = 2.0**-23  # the slack, as a part of a value, because a share may have been computed in float32
# The variance of larger differences would overflow float64. Such differences exceed any tolerance, and may be clipped.
MOST_SQUARED = 1e150
POWER = 0.8
MOST_SEEDS = 100


@dataclass(frozen=True)
class Judgement:
    """Result of the test of a setting.

    outcome: "match" (worse by no more than the tolerance), "short" (worse by more), "undecided", or, in a test for
        equivalence, "above" (better by more than the tolerance). `judge_sweep` also returns "collapsed" (the seeds
        `low` collapsed), and "worse": not decided, but worse by more than the tolerance with every seed, and much worse
        with one.
    mean: the mean of the differences, positive if the setting is better.
    interval: the confidence interval of the mean, at the level at which this setting was tested. It lies on one side of
        minus the tolerance if and only if the test decides.
    p: the p-value, before Holm's correction.
    margin: the distance from the tolerance at which this many seeds with this deviation decide, with a probability of
        80 %.
    seeds: how many seeds would decide with a probability of 80 % if the true mean and deviation are the measured ones;
        0 if the test decides, `MOST_SEEDS` + 1 for more than `MOST_SEEDS`.
    low: the indices of the seeds that collapsed or, if the test is undecided, may have collapsed.
    """

    outcome: str
    mean: float
    interval: tuple[float, float]
    p: float
    margin: float
    seeds: int = 0
    low: tuple[int, ...] = ()


def judge_sweep(
    differences: Sequence[Sequence[float]],
    float32: Sequence[float],
    tolerance: float,
    level: float = LEVEL,
    equivalence: bool = False,
    step: float = 0.0,
) -> list[Judgement]:
    """Judge all settings of a sweep: find collapsed seeds, and test the other settings by `judge`.

    float32: the metric of float32, for two seeds or more.
    The other arguments are those of `judge`.

    >>> near = [[0.1, -0.2, 0.3, 0.0, -0.1]] * 3
    >>> found = judge_sweep([*near, [0.1, -20.0, 0.2, -0.1, 0.0]], [90.1, 90.4, 89.8, 90.0, 90.2], 1.0)
    >>> [one.outcome for one in found], found[-1].low
    (['match', 'match', 'match', 'collapsed'], (1,))
    """
    values = [np.clip(np.asarray(one, dtype=np.float64), -MOST_SQUARED, MOST_SQUARED) for one in differences]
    deviation = np.std(np.clip(float32, -MOST_SQUARED, MOST_SQUARED), ddof=1)
    low = [int(count) for count in collapses(values, deviation, tolerance, level, step)]
    aside = [int(count) for count in (seeds_apart(one, tolerance) for one in values)]
    tested = [i for i in range(len(values)) if not low[i] and not aside[i]]
    used = level_of_tests(level, len(tested), max((len(values[i]) for i in tested), default=0))
    # The measurements decide which settings are tested, so each tested setting keeps the part of the level that it
    # would have if all settings were tested.
    used *= len(tested) / max(len(values), 1)
    found = dict(zip(tested, judge([differences[i] for i in tested], tolerance, used, equivalence, step), strict=True))
    usual = _usual_of_others(np.array([_upward_deviation(one) for one in values]))
    judgements = []
    for i, one in enumerate(values):
        places = tuple(sorted(int(place) for place in np.argsort(one, kind="stable")[: low[i] or aside[i]]))
        if low[i]:
            mean = float(np.mean(differences[i]))
            judgements.append(Judgement("collapsed", mean, (np.nan, np.nan), np.nan, np.nan, 0, places))
            continue
        if aside[i]:  # it is tested alone, for its interval, because its variance must not be shared
            (alone,) = judge([differences[i]], tolerance, level / len(values), equivalence, step)
            found[i] = replace(alone, outcome="undecided", low=places)
        if found[i].outcome == "undecided" and _is_much_worse(one, tolerance, max(float(usual[i]), float(deviation))):
            found[i] = replace(found[i], outcome="worse")
        judgements.append(found[i])
    return judgements


def level_of_tests(level: float, settings: int, seeds: int) -> float:
    """Return the level of a sweep's tests, which is `level` without the part that the tests for collapses use.

    With shared variances the tests already use less than the whole level (`PART_OF_LEVEL`).
    """
    return level if is_sharing(settings, seeds) else (1 - PART_OF_COLLAPSES) * level


def collapses(
    differences: Sequence[NDArray[Any]],
    float32: NDArray[Any] | float,
    tolerance: float,
    level: float = LEVEL,
    step: float = 0.0,
) -> list[NDArray[Any]]:
    """Return the number of collapsed seeds of each setting, an array (...). Collapsed seeds are the lowest seeds.

    The k lowest of n seeds have collapsed if they lie far below the mean of the others. The distance is so many
    deviations of the others that k of n normal draws reach it with a chance below the setting's part of the level, for
    any mean and deviation. With three seeds the distance is thousands of deviations, with five seeds some forty.

    If tails are heavier than normal, chance differences are larger. Collapsed seeds must therefore also lie below the
    mean of the others by more than `OF_DEVIATION` deviations of the others, `OF_USUAL` usual deviations of the other
    settings, and `OF_FLOAT32` deviations of float32. They must also lie below this mean, and below float32, by
    `COLLAPSE` tolerances.

    differences: for each setting the differences of its seeds, (..., seeds), three seeds or more.
    float32: the deviation of float32 over its seeds, (...).
    The other arguments are those of `judge`.
    """
    if not differences:
        return []
    # Only upward deviations count: a collapse in another setting would raise the usual deviation, and hide this
    # collapse.
    usual = _usual_of_others(np.stack([_upward_deviation(one) for one in differences], axis=-1))
    least = np.maximum(OF_USUAL * usual, OF_FLOAT32 * np.asarray(float32)[..., None])
    least = np.maximum(least, COLLAPSE * tolerance)
    part = PART_OF_COLLAPSES * level / len(differences)
    found = []
    for i, one in enumerate(differences):
        ordered = np.sort(one, axis=-1)
        seeds = ordered.shape[-1]
        most = min(max(seeds - LEAST_SEEDS, 1), MOST_COLLAPSED)
        count = np.zeros(ordered.shape[:-1], dtype=int)
        for k in range(1, most + 1):
            if not (ordered[..., k - 1] < -COLLAPSE * tolerance).any():
                break
            others, highest = ordered[..., k:], ordered[..., k - 1]
            deviation = np.maximum(others.std(axis=-1, ddof=1), PART_OF_STEP * step)
            # Each number k of seeds gets half the chance of k - 1: the chances add up to `part`, and one collapse is
            # likelier than several.
            chance = part * 2 ** (most - k) / (2**most - 1)
            apart = max(OF_DEVIATION, _deviations_apart(seeds, k, chance)) * deviation
            is_low = others.mean(axis=-1) - highest > np.maximum(apart, least[..., i])
            count[is_low & (highest < -COLLAPSE * tolerance)] = k
        found.append(count)
    return found


def seeds_apart(differences: NDArray[Any], tolerance: float) -> NDArray[Any]:
    """Return the number of seeds, (...), that are so far below the others that the setting is set aside as undecided.

    Few seeds may not suffice to distinguish a collapse from chance. A t-test of such a setting is meaningless, and its
    variance must not be shared. The counted seeds lose more than `COLLAPSE` tolerances, and lie below the median of the
    others by more than `APART` ranges of the others. This median loses less than `OTHERS` tolerances.

    differences: the differences of the setting's seeds, (..., seeds).
    """
    ordered = np.sort(differences, axis=-1)
    are_low = ordered < -COLLAPSE * tolerance
    number = are_low.sum(axis=-1)
    count = np.zeros(ordered.shape[:-1], dtype=int)
    for k in range(1, ordered.shape[-1]):
        others = ordered[..., k:]
        middle = np.median(others, axis=-1)
        is_apart = middle - ordered[..., k - 1] > APART * (others[..., -1] - others[..., 0])
        count[(number == k) & is_apart & (middle > -OTHERS * tolerance)] = k
    return count


def _upward_deviation(values: NDArray[Any]) -> NDArray[Any]:
    """Return an estimate of the deviation that no collapse affects: from the largest value's distance to the median."""
    # The expected value of the largest of n normal draws is about the quantile at (n - 3/8) / (n + 1/4): Blom 1958.
    count = values.shape[-1]
    above: NDArray[Any] = values.max(axis=-1) - np.median(values, axis=-1)
    return above / special.ndtri((count - 0.375) / (count + 0.25))


def _usual_of_others(deviations: NDArray[Any]) -> NDArray[Any]:
    """Return the quantile `USUAL` of the other settings' deviations, (..., settings); 0 if there are few settings."""
    count = deviations.shape[-1]
    if count <= LEAST_OTHERS:
        return np.zeros_like(deviations)
    ordered = np.sort(deviations, axis=-1)
    place = int(USUAL * (count - 1))
    here, behind = ordered[..., place, None], ordered[..., place + 1, None]
    usual: NDArray[Any] = np.where(deviations <= here, behind, here)  # without the setting itself
    return usual


def _is_much_worse(values: NDArray[Any], tolerance: float, deviation: float) -> bool:
    """True if a setting is worse with every seed, and much worse with one of them."""
    best, worst = float(values.max()), float(values.min())
    return best < -tolerance and worst < min(-COLLAPSE * tolerance, -MUCH * deviation, TWICE * best)


@lru_cache(maxsize=1024)
def _deviations_apart(seeds: int, low: int, chance: float) -> float:
    """Return the distance below the others' mean that the lowest `low` draws all exceed with a probability of `chance`.

    The distance c is in deviations of the others. Take any choice of `low` seeds, and let m and s be the mean and the
    deviation of the r others. The chance that all chosen seeds are below m - c s is E[P(x < m - c s)^low], where m is
    normal with variance 1 / r, and (r - 1) s^2 is chi-squared. The bound is this chance times the number of choices.
    With one low seed the bound is Student's prediction interval.
    """
    rest = seeds - low
    s, weight = np.exp(np.linspace(-16.0, 4.0, 801)), 20.0 / 800
    mean = np.linspace(-8.0, 8.0, 161)
    density = stats.norm.pdf(mean) * (mean[1] - mean[0])
    below = (special.ndtr(mean[:, None] / np.sqrt(rest) - s) ** low * density[:, None]).sum(axis=0)

    def excess(log_c: float) -> float:
        root = np.sqrt(rest - 1.0) * s / np.exp(log_c)
        total = (below * stats.chi.pdf(root, rest - 1.0) * root).sum() * weight
        return float(np.log(max(special.comb(seeds, low) * total, 1e-300)) - np.log(chance))

    return float(np.exp(optimize.brentq(excess, -3.0, 40.0)))


def largest_rate_unseen(seeds: int) -> float:
    """Return the rate of collapses at which this many seeds show no collapse with a probability of 5 %.

    >>> round(largest_rate_unseen(3), 2), round(largest_rate_unseen(10), 2)
    (0.63, 0.26)
    """
    return 1 - 0.05 ** (1 / seeds)


def smallest_step(values: Sequence[float], size: float | None = None) -> float:
    """Find the step in which a metric is counted: the largest 1 / N or 100 / N that divides all values.

    The accuracy over a test set of N examples has such a step, even if it was rounded to n decimals, as long as N is
    less than 10^(n - 1). N is at most `MOST_COUNTED`. If all values are fractions with different denominators, as an F1
    is, the step is 1 / the largest denominator. If there is no step, or only a single value, the result is the
    resolution of float64 at `size`.

    values: the finite values.
    size: the size of the values that are compared; None for the size of the largest value. With `size`, a perplexity of
        1e30 in one setting does not make the other settings less certain.

    >>> round(1 / smallest_step([354 / 360, 355 / 360, 351 / 360]))
    360
    >>> round(1 / smallest_step([0.9833, 0.9861, 0.975]))
    360
    """
    # Only the values are used: neither a folder nor a user's training function tells the size of the test set.
    distinct = np.unique(np.asarray(values, dtype=np.float64))
    if not len(distinct):
        return 0.0
    largest = float(np.abs(distinct).max())
    steps = [NOISE * (largest if size is None else size)]
    if len(distinct) < 2:
        return steps[0]
    chosen = distinct[np.linspace(0, len(distinct) - 1, min(MOST_VALUES, len(distinct))).astype(int)]
    for whole in (1.0, 100.0):
        is_share = whole / 100 < largest <= whole
        # The slack is relative to the whole, not to the value: 1 - accuracy has the error of the accuracy.
        single = 2 * SINGLE * (whole if is_share else largest)
        steps.append(_step_within(chosen, whole, single))
        if is_share and (rounded := _rounding(chosen)):
            steps.append(_step_within(chosen, whole, single + rounded))
    if not any(steps[1:]) and largest <= 1:
        steps.append(_step_of_fractions(chosen, NOISE * largest, MOST_COUNTED))
        if len(chosen) >= LEAST_SINGLE:
            steps.append(_step_of_fractions(chosen, 2 * SINGLE * largest, MOST_SINGLE))
    return max(steps)


def _step_within(values: NDArray[Any], whole: float, slack: float) -> float:
    """Return the largest `whole` / N that divides all values within `slack`; 0 if there is none."""
    counts = np.arange(1, MOST_COUNTED + 1) / whole
    counts = counts[slack * counts < MOST_SLACK]
    for value in values:  # one by one, because the first value leaves few of 10,000 candidates
        counts = counts[_distance(value * counts) <= slack * counts]
    # A step larger than the range of the values would make them equal.
    counts = counts[np.round(values.max() * counts) - np.round(values.min() * counts) >= 1]
    return float(1 / counts[0]) if len(counts) else 0.0


def _step_of_fractions(values: NDArray[Any], slack: float, most: int) -> float:
    """Return 1 / the largest denominator if all values are fractions with denominators up to `most`; 0 otherwise.

    An F1 is 2 TP / (2 TP + FP + FN), and one example more or less changes it by about 1 / the denominator.
    """
    counts = np.arange(1, most + 1)
    largest = 0
    for value in values:
        fits = _distance(value * counts) <= slack * counts
        if not fits.any():
            return 0.0
        largest = max(largest, int(counts[fits.argmax()]))
    return 1 / largest


def _distance(numbers: NDArray[Any]) -> NDArray[Any]:
    """Return the distances of numbers from the nearest integer."""
    distance: NDArray[Any] = np.abs(numbers - np.round(numbers))
    return distance


def _rounding(values: NDArray[Any]) -> float:
    """Return the largest rounding error, half of the last decimal, if all values have few decimals; 0 otherwise."""
    near = SINGLE * np.abs(values).max()
    decimals = (n for n in range(1, MOST_DECIMALS + 1) if (np.abs(values - np.round(values, n)) <= near).all())
    return next((0.5 * 10.0**-n for n in decimals), 0.0)


def judge(
    differences: Sequence[Sequence[float]],
    tolerance: float,
    level: float = LEVEL,
    equivalence: bool = False,
    step: float = 0.0,
) -> list[Judgement]:
    """Test each setting's differences from float32.

    differences: for each setting the differences of its seeds, `LEAST_SEEDS` or more, positive if it is better.
    tolerance: the tolerance, 0 or more, in the same units.
    level: the bound for the probability of any wrong statement, if differences are normal.
    equivalence: whether "match" means that the setting is within the tolerance on both sides, by two one-sided tests
        (Schuirmann 1987).
    step: the step in which the metric is counted; see `smallest_step`.

    >>> [found.outcome for found in judge([[0.0, 0.1, -0.1], [-5.0, -5.1, -4.9], [-1.5, -0.9, -0.8]], 1.0)]
    ['match', 'short', 'undecided']
    """
    if not differences:
        return []
    means = np.array([np.mean(values) for values in differences])
    counts = np.array([len(values) for values in differences])
    variances = np.array([np.var(np.clip(values, -MOST_SQUARED, MOST_SQUARED), ddof=1) for values in differences])
    tested = decide(means, variances, counts, tolerance, level, equivalence, step)
    errors = np.sqrt(tested.variances / counts)
    widths = stats.t.isf(tested.levels / 2, tested.freedom) * errors
    strict = _family(level, len(means), counts.max()) / len(means)
    judgements = []
    for i, mean in enumerate(means):
        interval = float(mean - widths[i]), float(mean + widths[i])
        outcome = str(tested.outcomes[i])
        is_open = outcome == "undecided"
        seeds = _seeds_that_decide(mean + tolerance, tested.variances[i], counts[i], strict) if is_open else 0
        margin = _needed(strict)[1][min(counts[i], MOST_SEEDS) - 2] * errors[i]
        judgements.append(Judgement(outcome, float(mean), interval, float(tested.p[i]), float(margin), seeds))
    return judgements


class Decisions(NamedTuple):
    """Decisions of the tests of sweeps: arrays of (..., settings), a sweep for each index of the leading axes.

    levels: the level at which each setting was tested.
    variances, freedom: the variances that were used, and their degrees of freedom.
    """

    outcomes: NDArray[Any]
    p: NDArray[Any]
    levels: NDArray[Any]
    variances: NDArray[Any]
    freedom: NDArray[Any]


def decide(
    means: NDArray[Any],
    variances: NDArray[Any],
    counts: NDArray[Any],
    tolerance: float,
    level: float = LEVEL,
    equivalence: bool = False,
    step: float = 0.0,
) -> Decisions:
    """Test like `judge`, but from means and variances, and for many sweeps at once.

    means, variances: the means and variances of the differences, (..., settings).
    counts: the numbers of seeds, of the same shape, or of a shape that is broadcast to it.
    """
    settings, seeds = means.shape[-1], int(counts.max())
    freedom = np.broadcast_to(counts - 1.0, means.shape)
    if is_sharing(settings, seeds):
        variances, freedom = _moderated(variances, freedom, tolerance)
    # Three accuracies are often equal by chance, because accuracies are counted. Without this least variance, up to
    # 70 % of sweeps have a wrong statement if the deviation is less than one example of the test set.
    variances = np.maximum(variances, (PART_OF_STEP * step) ** 2)
    outcomes, p = _outcomes(means, np.sqrt(variances / counts), freedom, tolerance, equivalence)
    rejected, levels = _holm(p, _family(level, settings, seeds))
    return Decisions(np.where(rejected, outcomes, "undecided"), p, levels, variances, freedom)


def is_sharing(settings: int, seeds: int) -> bool:
    """True if variances may be shared among this many settings with this many seeds."""
    return settings >= LEAST_SHARED and seeds <= MOST_SHARED


def _family(level: float, settings: int, seeds: int) -> float:
    """Return the level for all tests together that keeps the chance of a wrong statement below `level`."""
    return level * PART_OF_LEVEL if is_sharing(settings, seeds) else level


def _outcomes(
    means: NDArray[Any], errors: NDArray[Any], freedom: NDArray[Any], tolerance: float, equivalence: bool
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the outcome that each setting's test has if it decides, and its p-value."""
    # If the variance is 0, the quotient is infinite, which decides. If the mean is also exactly at the tolerance, the
    # quotient is 0 / 0, which must not decide.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        below = np.nan_to_num((means + tolerance) / errors, nan=0.0, posinf=np.inf, neginf=-np.inf)
        above = np.nan_to_num((means - tolerance) / errors, nan=0.0, posinf=np.inf, neginf=-np.inf)
    if not equivalence:
        return np.where(below > 0, "match", "short"), 2 * stats.t.sf(np.abs(below), freedom)
    both = np.maximum(stats.t.sf(below, freedom), stats.t.cdf(above, freedom))
    sides = np.stack([both, stats.t.cdf(below, freedom), stats.t.sf(above, freedom)])
    return np.array(["match", "short", "above"])[sides.argmin(axis=0)], np.minimum(2 * sides.min(axis=0), 1.0)


def _holm(p: NDArray[Any], level: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return which hypotheses Holm's procedure rejects, and the level at which each hypothesis was tested."""
    # No library is used, because libraries return corrected p-values, but intervals need the levels. Hypotheses after
    # the first hypothesis that is not rejected are not tested, and get the level of that hypothesis.
    count = p.shape[-1]
    order = np.argsort(p, axis=-1, kind="stable")
    steps = level / (count - np.arange(count))
    is_rejected = np.logical_and.accumulate(np.take_along_axis(p, order, -1) <= steps, axis=-1)
    last = np.minimum(is_rejected.sum(axis=-1, keepdims=True), count - 1)
    places = np.argsort(order, axis=-1, kind="stable")
    return np.take_along_axis(is_rejected, places, -1), steps[np.minimum(places, last)]


def _moderated(variances: NDArray[Any], freedom: NDArray[Any], tolerance: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the variances, moderated by each other, and their degrees of freedom.

    Smyth 2004, 6.2: variances are draws from a scaled inverse chi-squared distribution. Its two parameters come from
    the mean and the variance of their logarithms. The degrees of freedom are at most those of all settings together.
    """
    # A variance of zero has no logarithm, and the logarithm of a tiny variance would dominate the mean of all.
    known = variances > (NEGLIGIBLE * tolerance) ** 2
    number = known.sum(axis=-1, keepdims=True)
    half = freedom / 2
    logs = np.log(np.where(known, variances, 1.0)) - special.digamma(half) + np.log(half)
    count = np.maximum(number, 2)
    center = np.where(known, logs, 0.0).sum(axis=-1, keepdims=True) / count
    spread = np.where(known, (logs - center) ** 2, 0.0).sum(axis=-1, keepdims=True) / (count - 1)
    excess = spread - np.where(known, special.polygamma(1, half), 0.0).sum(axis=-1, keepdims=True) / count
    prior = 2 * _inverse_trigamma(np.maximum(excess, NO_EXCESS))
    common = np.exp(center + special.digamma(prior / 2) - np.log(prior / 2))
    weight = prior / (prior + freedom)
    shared = weight * common + (1 - weight) * variances
    most = np.where(known, freedom, 0.0).sum(axis=-1, keepdims=True)
    # A setting that varies more than the others must not gain from them. Therefore the shared variance is raised to the
    # 90 % quantile of sample variances with this true variance. A setting with a larger sample variance keeps its own
    # variance, with its own degrees of freedom. If variances are not alike, each setting keeps its own variance, except
    # settings whose variance is 0.
    limit = shared * stats.chi2.ppf(SHARE_OF_LARGER, freedom) / freedom
    is_own = (variances > limit) | (known & (prior < ALIKE)) | (number < LEAST_SHARED)
    return np.where(is_own, variances, limit), np.where(is_own, freedom, np.minimum(prior + freedom, most))


def _inverse_trigamma(value: NDArray[Any]) -> NDArray[Any]:
    """Return the inverse of the trigamma function above 0, by Newton's method (Smyth 2004, appendix)."""
    x = 0.5 + 1 / value
    for _ in range(50):
        trigamma = special.polygamma(1, x)
        step = trigamma * (1 - trigamma / value) / special.polygamma(2, x)
        x = x + step
        if np.all(-step / x < 1e-10):
            break
    return x


def _seeds_that_decide(margin: float, variance: float, seeds: int, level: float) -> int:
    """Return the number of seeds that decide a setting with probability `POWER` if its mean and variance are true."""
    if not margin:  # no number of seeds can decide a mean that is exactly at the tolerance
        return MOST_SEEDS + 1
    counts, errors = _needed(level)
    enough = counts[(counts > seeds) & (errors * np.sqrt(variance / counts) <= abs(margin))]
    return int(enough[0]) if len(enough) else MOST_SEEDS + 1


def smallest_tolerance(deviation: float, seeds: int, settings: int = 1, level: float = LEVEL) -> float:
    """Return the tolerance at which a setting that equals float32 is found no worse with a probability of 80 %.

    deviation: the deviation of the setting's differences from float32, seed by seed.
    seeds: the number of seeds, two or more.
    settings: the number of settings that are tested together. The result is for the strictest of their tests.

    >>> f"{smallest_tolerance(0.3, 5):.2f}, {smallest_tolerance(0.3, 5, settings=4):.2f}"
    '0.51, 0.72'
    """
    strict = _family(level_of_tests(level, settings, seeds), settings, seeds) / settings
    return float(_needed(strict)[1][min(seeds, MOST_SEEDS) - 2] * deviation / np.sqrt(seeds))


@lru_cache(maxsize=64)
def _needed(level: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return numbers of seeds, and for each the distance from the tolerance at which a mean decides with `POWER`.

    The distances are in standard errors.
    """
    counts = np.arange(2, MOST_SEEDS + 1)
    return counts, stats.t.isf(level / 2, counts - 1) + stats.t.ppf(POWER, counts - 1)
