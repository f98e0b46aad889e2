"""How differences from float32 are judged: one test for each setting, at the tolerance, with a bound for all together.

The differences of every setting are tested against minus the tolerance, two-sided: the setting is no more than the
tolerance worse, or it is more, or that is open. Holm's procedure (1979) bounds the chance of a wrong statement. With
five settings or more and few seeds, variances that are alike are moderated by each other (Smyth 2004,
doi:10.2202/1544-6115.1027).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fpsim.checks import pip_install

try:
    from scipy import special, stats
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
    "collapsed_seeds",
    "decide",
    "is_sharing",
    "judge",
    "largest_rate_unseen",
    "smallest_step",
    "smallest_tolerance",
]

LEVEL = 0.05  # of a verdict, and of a test
LEAST_SEEDS = 3  # with two, a t-test at 5 % needs a difference of 12.7 standard errors
LEAST_SHARED = 5  # settings from which on variances are shared
MOST_SHARED = (
    5  # seeds up to which they are: with more, a setting's own variance finds as much, and needs no raised limit
)
# Where variances may be shared, the simulation of benchmarks/verdicts.py chose the next three. Its cells: 5, 15 and 40
# settings; 3 and 5 seeds; normal, with float32 in common, with variances that differ, also where settings at the
# tolerance vary 2 to 5 times as much as those that equal float32. Sweeps look like that; without the raised limit up to
# 21 % of them have a wrong statement then, which hardly any level repairs.
PART_OF_LEVEL = 0.6
SHARE_OF_LARGER = 0.9  # a shared variance is raised to what this share of settings that have it stay below
ALIKE = 8.0  # prior degrees of freedom from which on variances count as alike
SIMULATED = 0.049  # the largest share of simulated sweeps with a wrong statement, at the level of 5 % (20,000 sweeps)
COLLAPSE, OTHERS = 10.0, 5.0  # in tolerances: a seed that collapsed is below the first, the others' median above
APART = 3.0  # ranges of the other seeds that a collapse is below their median
NEGLIGIBLE = 1e-3  # of the tolerance: a smaller deviation tells nothing of the others'
NO_EXCESS = 1e-9  # of the variance of logarithms: settings with less differ no more than equal ones do
PART_OF_STEP = 0.5  # of the step in which a metric is counted: a deviation is taken to be no smaller
MOST_COUNTED = 10_000  # examples of a test set, in whose shares a metric is counted
MOST_SINGLE = 1_000  # the largest denominator of a fraction that is told from other numbers in float32,
LEAST_SINGLE = 4  # where so many values are fractions: a quarter of all numbers are, and pi / 4 is 355 / 452
MOST_VALUES = 64  # in which that is seen
NOISE = 2.0**-50  # of the largest value: differences of float64 numbers are not known better
MOST_DECIMALS = 6  # to which a metric is seen to be rounded: a float32 has no more
MOST_SLACK = 0.05  # of a multiple; beyond, any number may be one
SINGLE = 2.0**-23  # of a value: a share may have been computed in float32
MOST_SQUARED = 1e150  # differences of which float64 holds the variance; larger ones are beyond any tolerance
POWER = 0.8
MOST_SEEDS = 100


@dataclass(frozen=True)
class Judgement:
    """What the test says of a setting.

    outcome: "match" (worse by no more than the tolerance), "short" (by more), "undecided", or, of a test for
        equivalence, "above" (better by more than the tolerance).
    mean: of the differences, positive where the setting is better.
    interval: of the mean, at the level at which this setting was tested; the interval is on one side of minus the
        tolerance exactly where the test decides.
    p: the p-value, before Holm's correction.
    margin: how far from the tolerance a mean is that so many seeds with this deviation decide with 80 %.
    seeds: how many would decide with a probability of 80 % if mean and deviation are the true ones; 0 where it is
        decided, `MOST_SEEDS` + 1 for more than that.
    """

    outcome: str
    mean: float
    interval: tuple[float, float]
    p: float
    margin: float
    seeds: int = 0


def collapsed_seeds(differences: Sequence[float], tolerance: float) -> list[int]:
    """The places of the seeds that collapsed: more than 10 tolerances worse, far from the others.

    The others' median is less than 5 tolerances worse, and a collapse lies below it by more than three times the
    range of the others: a setting that varies as much with every seed has not collapsed.

    differences: of all seeds, positive where the setting is better.

    >>> collapsed_seeds([0.1, -20.0, 0.2, -0.1], 1.0), collapsed_seeds([8.0, -11.0, -2.0], 1.0)
    ([1], [])
    """
    low = [place for place, value in enumerate(differences) if value < -COLLAPSE * tolerance]
    others = [value for place, value in enumerate(differences) if place not in low]
    if not tolerance or not low or not others or np.median(others) <= -OTHERS * tolerance:
        return []
    apart = np.median(others) - max(differences[place] for place in low)
    return low if apart > APART * (max(others) - min(others)) else []


def largest_rate_unseen(seeds: int) -> float:
    """The largest rate of collapses of which none is seen in so many seeds with a probability of 5 %.

    >>> round(largest_rate_unseen(3), 2), round(largest_rate_unseen(10), 2)
    (0.63, 0.26)
    """
    return 1 - 0.05 ** (1 / seeds)


def smallest_step(values: Sequence[float], size: float | None = None) -> float:
    """The step in which a metric is counted: 1 / N, or 100 / N, where all its values are whole multiples of that.

    Of several it is the largest; with N up to `MOST_COUNTED`. The accuracy over a test set of N examples is counted so,
    also where it was rounded to n decimals, if N is less than 10^(n - 1). Where all are fractions of denominators that
    differ, as an F1, it is 1 / the largest of these. Where there is none, or a single value, it is what float64
    resolves beside `size`.

    values: finite ones.
    size: of the values that are to be told apart; that of the largest unless given. One setting may be 1e30 of a
        perplexity, and the others are not less certain for it.

    >>> round(1 / smallest_step([354 / 360, 355 / 360, 351 / 360]))
    360
    >>> round(1 / smallest_step([0.9833, 0.9861, 0.975]))
    360
    """
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
        # of the whole, not of the value: 1 - accuracy has the error of the accuracy
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
    """The largest `whole` / N of which all values are multiples but for `slack`; 0 where there is none."""
    counts = np.arange(1, MOST_COUNTED + 1) / whole
    counts = counts[slack * counts < MOST_SLACK]
    for value in values:  # the first one leaves few
        counts = counts[_distance(value * counts) <= slack * counts]
    counts = counts[np.round(values.max() * counts) - np.round(values.min() * counts) >= 1]
    return float(1 / counts[0]) if len(counts) else 0.0


def _step_of_fractions(values: NDArray[Any], slack: float, most: int) -> float:
    """1 / the largest denominator, where all values are fractions of denominators up to `most`; 0 otherwise.

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
    """How far numbers are from the nearest integer."""
    distance: NDArray[Any] = np.abs(numbers - np.round(numbers))
    return distance


def _rounding(values: NDArray[Any]) -> float:
    """What was rounded away where all values have few decimals: half of their last one; 0 where they have more."""
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
    """What the tests of sweeps say: arrays of (..., settings), a sweep for each place of the leading axes.

    levels: at which each setting was tested.
    variances, freedom: with which it was, and their degrees of freedom.
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
    """`judge` from means and variances, of many sweeps at once.

    means, variances: of the differences, (..., settings).
    counts: of seeds, of the same shape, or one that is broadcast to it.
    """
    settings, seeds = means.shape[-1], int(counts.max())
    freedom = np.broadcast_to(counts - 1.0, means.shape)
    if is_sharing(settings, seeds):
        variances, freedom = _moderated(variances, freedom, tolerance)
    # Three accuracies that are counted are often equal: that is no certainty. Without this up to 70 % of sweeps have a
    # wrong statement, where the deviation is less than one example of the test set
    variances = np.maximum(variances, (PART_OF_STEP * step) ** 2)
    outcomes, p = _outcomes(means, np.sqrt(variances / counts), freedom, tolerance, equivalence)
    rejected, levels = _holm(p, _family(level, settings, seeds))
    return Decisions(np.where(rejected, outcomes, "undecided"), p, levels, variances, freedom)


def is_sharing(settings: int, seeds: int) -> bool:
    """Whether variances may be shared among so many settings with so many seeds."""
    return settings >= LEAST_SHARED and seeds <= MOST_SHARED


def _family(level: float, settings: int, seeds: int) -> float:
    """The level at which all settings are tested together, such that a wrong statement is no likelier than `level`."""
    return level * PART_OF_LEVEL if is_sharing(settings, seeds) else level


def _outcomes(
    means: NDArray[Any], errors: NDArray[Any], freedom: NDArray[Any], tolerance: float, equivalence: bool
) -> tuple[NDArray[Any], NDArray[Any]]:
    """What each setting's test would say if it decides, and its p-value."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        below = np.nan_to_num((means + tolerance) / errors, nan=0.0, posinf=np.inf, neginf=-np.inf)
        above = np.nan_to_num((means - tolerance) / errors, nan=0.0, posinf=np.inf, neginf=-np.inf)
    if not equivalence:
        return np.where(below > 0, "match", "short"), 2 * stats.t.sf(np.abs(below), freedom)
    both = np.maximum(stats.t.sf(below, freedom), stats.t.cdf(above, freedom))
    sides = np.stack([both, stats.t.cdf(below, freedom), stats.t.sf(above, freedom)])
    return np.array(["match", "short", "above"])[sides.argmin(axis=0)], np.minimum(2 * sides.min(axis=0), 1.0)


def _holm(p: NDArray[Any], level: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """Which hypotheses Holm's procedure rejects, and the level at which each was tested.

    Those after the first that is not rejected are not tested: theirs is its level.
    """
    count = p.shape[-1]
    order = np.argsort(p, axis=-1, kind="stable")
    steps = level / (count - np.arange(count))
    is_rejected = np.logical_and.accumulate(np.take_along_axis(p, order, -1) <= steps, axis=-1)
    last = np.minimum(is_rejected.sum(axis=-1, keepdims=True), count - 1)
    places = np.argsort(order, axis=-1, kind="stable")
    return np.take_along_axis(is_rejected, places, -1), steps[np.minimum(places, last)]


def _moderated(variances: NDArray[Any], freedom: NDArray[Any], tolerance: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """The variances, moderated by what all of them have in common, and their degrees of freedom.

    Smyth 2004, 6.2: they are draws of a scaled inverse chi-squared distribution, whose two parameters come from the
    mean and the variance of their logarithms. The degrees of freedom are at most those of all settings together.

    A setting that varies more than the others must not gain by them. So the shared variance is raised to the 90 % limit
    of what a setting that has it shows by chance; one that shows more keeps its own, with its own degrees of freedom.
    Where variances are not alike, each setting keeps its own, but for those that show none.
    """
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
    limit = shared * stats.chi2.ppf(SHARE_OF_LARGER, freedom) / freedom
    is_own = (variances > limit) | (known & (prior < ALIKE)) | (number < LEAST_SHARED)
    return np.where(is_own, variances, limit), np.where(is_own, freedom, np.minimum(prior + freedom, most))


def _inverse_trigamma(value: NDArray[Any]) -> NDArray[Any]:
    """Where the trigamma function has these values, above 0; Newton's method of Smyth 2004, appendix."""
    x = 0.5 + 1 / value
    for _ in range(50):
        trigamma = special.polygamma(1, x)
        step = trigamma * (1 - trigamma / value) / special.polygamma(2, x)
        x = x + step
        if np.all(-step / x < 1e-10):
            break
    return x


def _seeds_that_decide(margin: float, variance: float, seeds: int, level: float) -> int:
    """How many seeds decide a setting with probability `POWER`, if its mean and variance are the true ones."""
    if not margin:  # at the tolerance itself, no number does
        return MOST_SEEDS + 1
    counts, errors = _needed(level)
    enough = counts[(counts > seeds) & (errors * np.sqrt(variance / counts) <= abs(margin))]
    return int(enough[0]) if len(enough) else MOST_SEEDS + 1


def smallest_tolerance(deviation: float, seeds: int, settings: int = 1, level: float = LEVEL) -> float:
    """The tolerance at which a setting that equals float32 is found to be no worse with a probability of 80 %.

    deviation: of its differences from float32, seed by seed.
    seeds: two or more.
    settings: that are tested together. It is what the strictest of their tests needs.

    >>> f"{smallest_tolerance(0.3, 5):.2f}, {smallest_tolerance(0.3, 5, settings=4):.2f}"
    '0.50, 0.71'
    """
    strict = _family(level, settings, seeds) / settings
    return float(_needed(strict)[1][min(seeds, MOST_SEEDS) - 2] * deviation / np.sqrt(seeds))


@lru_cache(maxsize=64)
def _needed(level: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """Numbers of seeds, and how many standard errors away from the tolerance a mean has to be with each."""
    counts = np.arange(2, MOST_SEEDS + 1)
    return counts, stats.t.isf(level / 2, counts - 1) + stats.t.ppf(POWER, counts - 1)
