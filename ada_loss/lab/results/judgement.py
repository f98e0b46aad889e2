"""Statistics of differences from float32: collapses, and one test for each other setting, with a bound for all.

A seed has collapsed if the other seeds of its setting rule out that it is one of them. The differences of every other
setting are tested against minus the tolerance, two-sided: the setting is worse by at most the tolerance, or by more, or
undecided. Holm's procedure (1979) bounds the chance of a wrong statement. With five settings or more and
few seeds, variances that are alike are moderated by each other (Smyth 2004, doi:10.2202/1544-6115.1027).
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

LEVEL = 0.05  # of a verdict, and of a test
# With two seeds, a t-test at 5 % needs a difference of 12.7 standard errors.
LEAST_SEEDS = 3
# Variances are shared among at least so many settings, with at most so many seeds: with more seeds, a setting's own
# variance finds as much, and needs no raised limit.
LEAST_SHARED = 5
MOST_SHARED = 5
# Where variances may be shared, the simulation of benchmarks/verdicts.py chose the next three. Its cells: 5, 15 and 40
# settings; 3 and 5 seeds; normal, with float32 in common, with variances that differ, also where settings at the
# tolerance vary 2 to 5 times as much as those that equal float32. Sweeps look like that; without the raised limit up to
# 21 % of them have a wrong statement then, which hardly any level repairs.
PART_OF_LEVEL = 0.6
SHARE_OF_LARGER = 0.9  # a shared variance is raised to this quantile of the variances that settings with it show
ALIKE = 8.0  # prior degrees of freedom from which on variances count as alike
SIMULATED = 0.049  # the largest share of simulated sweeps with a wrong statement, at the level of 5 % (20,000 sweeps)
COLLAPSE = 10.0  # tolerances that a seed loses at least where it collapses
PART_OF_COLLAPSES = 0.1  # of the level
# A collapse is below its other seeds by more than these multiples of what others show by chance. They are for tails
# that are heavier than normal: where one value in ten has ten times the deviation, five seeds often have one of them.
OF_DEVIATION = 35.0  # deviations of the other seeds
OF_USUAL = 50.0  # deviations that the other settings usually have
OF_FLOAT32 = 10.0  # deviations of float32, which differs from seed to seed by more than a setting does from float32
USUAL = 0.25  # the share of the other settings whose deviations are below the usual one
LEAST_OTHERS = 3  # settings from which a usual deviation is taken
MOST_COLLAPSED = 10  # seeds of a setting that are tested
# Tolerances, and ranges of the other seeds, for a setting that is set aside; see `seeds_apart`.
OTHERS = 5.0
APART = 3.0
# A seed is much worse by so many deviations of float32 and of other settings, and so many times as much as the best.
MUCH = 4.0
TWICE = 2.0
NEGLIGIBLE = 1e-3  # of the tolerance: a smaller deviation says nothing about those of other settings
NO_EXCESS = 1e-9  # of the variance of logarithms: settings with less differ no more than equal ones
# A deviation is taken to be at least this part of the step in which a metric is counted.
PART_OF_STEP = 0.5
MOST_COUNTED = 10_000  # examples of a test set whose size is found
# In float32, fractions up to this denominator differ from other numbers, if so many values are fractions: a quarter of
# all numbers are such a fraction, as pi / 4 is 355 / 452.
MOST_SINGLE = 1_000
LEAST_SINGLE = 4
MOST_VALUES = 64  # that are searched for a step
NOISE = 2.0**-50  # of the largest value: the resolution of differences between float64 numbers
MOST_DECIMALS = 6  # to which a metric may be rounded: a float32 has no more
MOST_SLACK = 0.05  # of a multiple; with more, any number may be one
SINGLE = 2.0**-23  # of a value: a share may have been computed in float32
# The variance of larger differences overflows float64. They are beyond any tolerance, and may be clipped.
MOST_SQUARED = 1e150
POWER = 0.8
MOST_SEEDS = 100


@dataclass(frozen=True)
class Judgement:
    """Result of the test of a setting.

    outcome: "match" (worse by no more than the tolerance), "short" (by more), "undecided", or, of a test for
        equivalence, "above" (better by more than the tolerance). Of a sweep also "collapsed" (with the seeds `low`),
        and "worse": not decided, but worse by more than the tolerance with every seed, and much worse with one.
    mean: of the differences, positive where the setting is better.
    interval: of the mean, at the level at which this setting was tested; it lies on one side of minus the tolerance
        exactly if the test decides.
    p: the p-value, before Holm's correction.
    margin: the distance from the tolerance that this many seeds with this deviation decide with a probability of 80 %.
    seeds: how many would decide with a probability of 80 % if mean and deviation are the true ones; 0 if decided,
        `MOST_SEEDS` + 1 for more than that.
    low: the indices of the seeds that collapsed or, if undecided, may have.
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

    float32: its metric, of two seeds or more.
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
    # Which settings are tested depends on the measurements, so each keeps the part of the level that it had among all.
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
        if aside[i]:  # tested alone for its interval: its variance must not be shared
            (alone,) = judge([differences[i]], tolerance, level / len(values), equivalence, step)
            found[i] = replace(alone, outcome="undecided", low=places)
        if found[i].outcome == "undecided" and _is_much_worse(one, tolerance, max(float(usual[i]), float(deviation))):
            found[i] = replace(found[i], outcome="worse")
        judgements.append(found[i])
    return judgements


def level_of_tests(level: float, settings: int, seeds: int) -> float:
    """The level of a sweep's tests, after the share spent on collapses.

    With shared variances the tests use less than all of it already (`PART_OF_LEVEL`).
    """
    return level if is_sharing(settings, seeds) else (1 - PART_OF_COLLAPSES) * level


def collapses(
    differences: Sequence[NDArray[Any]],
    float32: NDArray[Any] | float,
    tolerance: float,
    level: float = LEVEL,
    step: float = 0.0,
) -> list[NDArray[Any]]:
    """Count the collapsed seeds of each setting, the lowest ones: an array (...) for each setting.

    The k lowest of n seeds collapsed if they lie below the mean of the others by so many deviations of the others that
    k of n normal draws do so with a chance of less than the setting's part of the level, whatever their mean and
    deviation are. With three seeds that takes thousands of deviations, with five some forty.

    Where tails are heavier than normal, chance does more. So they also lie below that mean by more than `OF_DEVIATION`
    deviations of the others, by `OF_USUAL` that the other settings usually have, and by `OF_FLOAT32` of float32's. And
    by `COLLAPSE` tolerances, below float32 too.

    differences: for each setting those of its seeds, (..., seeds), three seeds or more.
    float32: the deviation of float32 over its seeds, (...).
    The others are those of `judge`.
    """
    if not differences:
        return []
    # Upward deviations only: a collapse in another setting would raise the usual deviation, and hide this one.
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
            # Half as much for each seed more: the parts add up to `part`, and one collapse is likelier than several.
            chance = part * 2 ** (most - k) / (2**most - 1)
            apart = max(OF_DEVIATION, _deviations_apart(seeds, k, chance)) * deviation
            is_low = others.mean(axis=-1) - highest > np.maximum(apart, least[..., i])
            count[is_low & (highest < -COLLAPSE * tolerance)] = k
        found.append(count)
    return found


def seeds_apart(differences: NDArray[Any], tolerance: float) -> NDArray[Any]:
    """Count seeds so far below the others that the setting is set aside as undecided, (...).

    So few seeds may not distinguish a collapse from chance. A t-test of such a setting is meaningless, and its variance
    must not be shared. These seeds lose more than `COLLAPSE` tolerances, the others' median less than `OTHERS`, and
    they lie below it by more than `APART` ranges of the others.

    differences: of its seeds, (..., seeds).
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
    """The deviation, estimated from the distance of the largest value above the median, which no collapse affects."""
    # The expected value of the largest of n normal draws is about the quantile at (n - 3/8) / (n + 1/4): Blom 1958.
    count = values.shape[-1]
    above: NDArray[Any] = values.max(axis=-1) - np.median(values, axis=-1)
    return above / special.ndtri((count - 0.375) / (count + 0.25))


def _usual_of_others(deviations: NDArray[Any]) -> NDArray[Any]:
    """The quantile `USUAL` of the other settings' deviations, for each of (..., settings); 0 if there are few."""
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
    """The distance below the others' mean, in their deviations, that the `low` lowest draws reach with this chance.

    For each choice of `low` seeds the chance that all of them are c deviations s of the r others below their mean m is
    that of E[P(x < m - c s)^low], where m is normal with a variance of 1 / r and (r - 1) s^2 chi-squared; the bound is
    that times the number of choices. With one low seed it is Student's prediction interval.
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
    """The largest rate of collapses of which this many seeds show none with a probability of 5 %.

    >>> round(largest_rate_unseen(3), 2), round(largest_rate_unseen(10), 2)
    (0.63, 0.26)
    """
    return 1 - 0.05 ** (1 / seeds)


def smallest_step(values: Sequence[float], size: float | None = None) -> float:
    """Find the step in which a metric is counted: the largest 1 / N or 100 / N of which all values are multiples.

    The accuracy over a test set of N examples is counted so, even if it was rounded to n decimals and N is less than
    10^(n - 1). N is at most `MOST_COUNTED`. If all values are fractions of different denominators, as an F1 is, the
    step is 1 / the largest of these. Without a step, or with a single value, it is the resolution of float64 at `size`.

    values: finite ones.
    size: the size of the values that are compared; None for that of the largest. One setting may be 1e30 of a
        perplexity, and the others are not less certain for it.

    >>> round(1 / smallest_step([354 / 360, 355 / 360, 351 / 360]))
    360
    >>> round(1 / smallest_step([0.9833, 0.9861, 0.975]))
    360
    """
    # From the values alone: a folder, or a training function of the user's own, gives no size of a test set.
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
        # Of the whole, not of the value: 1 - accuracy has the error of the accuracy.
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
    """The largest `whole` / N of which all values are multiples within `slack`; 0 without one."""
    counts = np.arange(1, MOST_COUNTED + 1) / whole
    counts = counts[slack * counts < MOST_SLACK]
    for value in values:  # one by one: the first one leaves few of 10,000 candidates
        counts = counts[_distance(value * counts) <= slack * counts]
    # A step larger than the range of the values would make them equal.
    counts = counts[np.round(values.max() * counts) - np.round(values.min() * counts) >= 1]
    return float(1 / counts[0]) if len(counts) else 0.0


def _step_of_fractions(values: NDArray[Any], slack: float, most: int) -> float:
    """1 / the largest denominator if all values are fractions of denominators up to `most`; 0 otherwise.

    An F1 is 2 TP / (2 TP + FP + FN), and one example more or less moves it by about 1 / that denominator.
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
    """The distances of numbers from the nearest integer."""
    distance: NDArray[Any] = np.abs(numbers - np.round(numbers))
    return distance


def _rounding(values: NDArray[Any]) -> float:
    """Half of the last decimal if all values have few decimals, the largest error of rounding them; 0 otherwise."""
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

    differences: for each setting those of its seeds, `LEAST_SEEDS` or more, positive where it is better.
    tolerance: 0 or more, in the same units.
    level: the bound for a wrong statement anywhere, if differences are normal.
    equivalence: whether "match" is to say that the setting is within the tolerance on both sides: two one-sided tests
        (Schuirmann 1987).
    step: in which the metric is counted; see `smallest_step`.

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

    levels: at which each setting was tested.
    variances, freedom: those used, and their degrees of freedom.
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
    """Run `judge` on means and variances, of many sweeps at once.

    means, variances: of the differences, (..., settings).
    counts: of seeds, of the same shape, or one that is broadcast to it.
    """
    settings, seeds = means.shape[-1], int(counts.max())
    freedom = np.broadcast_to(counts - 1.0, means.shape)
    if is_sharing(settings, seeds):
        variances, freedom = _moderated(variances, freedom, tolerance)
    # Three accuracies that are counted are often equal by chance. Without this, up to 70 % of sweeps have a wrong
    # statement if the deviation is less than one example of the test set.
    variances = np.maximum(variances, (PART_OF_STEP * step) ** 2)
    outcomes, p = _outcomes(means, np.sqrt(variances / counts), freedom, tolerance, equivalence)
    rejected, levels = _holm(p, _family(level, settings, seeds))
    return Decisions(np.where(rejected, outcomes, "undecided"), p, levels, variances, freedom)


def is_sharing(settings: int, seeds: int) -> bool:
    """True if variances may be shared among this many settings with this many seeds."""
    return settings >= LEAST_SHARED and seeds <= MOST_SHARED


def _family(level: float, settings: int, seeds: int) -> float:
    """The level for all tests together at which the chance of a wrong statement stays below `level`."""
    return level * PART_OF_LEVEL if is_sharing(settings, seeds) else level


def _outcomes(
    means: NDArray[Any], errors: NDArray[Any], freedom: NDArray[Any], tolerance: float, equivalence: bool
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The outcome of each setting's test, should it decide, and its p-value."""
    # Without variance the quotient is infinite, which decides, or at the tolerance itself 0 / 0, which must not.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        below = np.nan_to_num((means + tolerance) / errors, nan=0.0, posinf=np.inf, neginf=-np.inf)
        above = np.nan_to_num((means - tolerance) / errors, nan=0.0, posinf=np.inf, neginf=-np.inf)
    if not equivalence:
        return np.where(below > 0, "match", "short"), 2 * stats.t.sf(np.abs(below), freedom)
    both = np.maximum(stats.t.sf(below, freedom), stats.t.cdf(above, freedom))
    sides = np.stack([both, stats.t.cdf(below, freedom), stats.t.sf(above, freedom)])
    return np.array(["match", "short", "above"])[sides.argmin(axis=0)], np.minimum(2 * sides.min(axis=0), 1.0)


def _holm(p: NDArray[Any], level: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """The hypotheses that Holm's procedure rejects, and the level at which each was tested."""
    # By hand: libraries give corrected p-values, and intervals need the levels. Hypotheses after the first that is not
    # rejected are not tested, and have its level.
    count = p.shape[-1]
    order = np.argsort(p, axis=-1, kind="stable")
    steps = level / (count - np.arange(count))
    is_rejected = np.logical_and.accumulate(np.take_along_axis(p, order, -1) <= steps, axis=-1)
    last = np.minimum(is_rejected.sum(axis=-1, keepdims=True), count - 1)
    places = np.argsort(order, axis=-1, kind="stable")
    return np.take_along_axis(is_rejected, places, -1), steps[np.minimum(places, last)]


def _moderated(variances: NDArray[Any], freedom: NDArray[Any], tolerance: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """The variances, moderated by each other, and their degrees of freedom.

    Smyth 2004, 6.2: they are draws of a scaled inverse chi-squared distribution, whose two parameters come from the
    mean and the variance of their logarithms. The degrees of freedom are at most those of all settings together.
    """
    # A variance of zero has no logarithm, and nearly none would dominate the mean of all.
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
    # A setting that varies more than the others must not gain by them: the shared variance is raised to the 90 % limit
    # of the variances that settings with it show by chance. One that shows more keeps its own, with its own degrees of
    # freedom. If variances are not alike, each setting keeps its own, except those that show none.
    limit = shared * stats.chi2.ppf(SHARE_OF_LARGER, freedom) / freedom
    is_own = (variances > limit) | (known & (prior < ALIKE)) | (number < LEAST_SHARED)
    return np.where(is_own, variances, limit), np.where(is_own, freedom, np.minimum(prior + freedom, most))


def _inverse_trigamma(value: NDArray[Any]) -> NDArray[Any]:
    """The inverse of the trigamma function above 0, by Newton's method of Smyth 2004, appendix."""
    x = 0.5 + 1 / value
    for _ in range(50):
        trigamma = special.polygamma(1, x)
        step = trigamma * (1 - trigamma / value) / special.polygamma(2, x)
        x = x + step
        if np.all(-step / x < 1e-10):
            break
    return x


def _seeds_that_decide(margin: float, variance: float, seeds: int, level: float) -> int:
    """The number of seeds that decide a setting with probability `POWER` if its mean and variance are true."""
    if not margin:  # no number of seeds decides a mean at the tolerance itself
        return MOST_SEEDS + 1
    counts, errors = _needed(level)
    enough = counts[(counts > seeds) & (errors * np.sqrt(variance / counts) <= abs(margin))]
    return int(enough[0]) if len(enough) else MOST_SEEDS + 1


def smallest_tolerance(deviation: float, seeds: int, settings: int = 1, level: float = LEVEL) -> float:
    """The tolerance at which a setting that equals float32 is found to be no worse with a probability of 80 %.

    deviation: of its differences from float32, seed by seed.
    seeds: two or more.
    settings: the number tested together. The result is for the strictest of their tests.

    >>> f"{smallest_tolerance(0.3, 5):.2f}, {smallest_tolerance(0.3, 5, settings=4):.2f}"
    '0.51, 0.72'
    """
    strict = _family(level_of_tests(level, settings, seeds), settings, seeds) / settings
    return float(_needed(strict)[1][min(seeds, MOST_SEEDS) - 2] * deviation / np.sqrt(seeds))


@lru_cache(maxsize=64)
def _needed(level: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """Numbers of seeds, and the distance from the tolerance that a mean needs with each, in standard errors."""
    counts = np.arange(2, MOST_SEEDS + 1)
    return counts, stats.t.isf(level / 2, counts - 1) + stats.t.ppf(POWER, counts - 1)
