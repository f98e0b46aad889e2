"""How often a verdict is wrong, and what it finds: simulated sweeps whose truth was planted.

    python benchmarks/verdicts.py --sweeps 4000

prints the share of sweeps with a wrong statement anywhere, collapses among them: also with heavy tails, of a metric
that is counted in examples, and of one near 0. And the share of settings and of collapses that are found, what becomes
of settings that collapse with some seeds, and how often so many seeds decide as are said to. docs/verdict.md has the
tables.

    python benchmarks/verdicts.py --sweeps 10000 --only scenarios [--noise t3 contaminated]

prints one of the tables, or some of its rows.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ada_loss.lab.results.judgement import LEVEL, MOST_SEEDS, collapses, decide, judge, level_of_tests, seeds_apart
from ada_loss.lab.results.verdict import default_tolerance

Array = NDArray[np.float64]
EQUAL, EDGE, FAR = 0.0, -1.0, -4.0  # true differences from float32, in tolerances
COLLAPSE = 20.0  # tolerances that a seed loses where it collapses
SETTINGS, SEEDS, DEVIATIONS = (5, 15, 40), (3, 5, 10), (0.3, 1.0)
KINDS = {
    "normal": "normal, independent",
    "shared": "float32 in common (all others, too)",
    "unequal": "a fifth, at random, have a deviation of 5",
    "drawn": "deviations lognormal, by 0.5",
    "wide2": "at the tolerance twice the deviation",
    "wide3": "at the tolerance three times",
    "wide5": "at the tolerance five times",
}
TRUTHS = {"edge": "all at the tolerance", "fifth": "a fifth there, others equal", "thirds": "a third there, equal, far"}
# Noise that is far from normal, of float32 too. Contaminated noise has the deviation but for one training in ten.
HEAVY = {
    "t3": "t with 3 degrees of freedom",
    "contaminated": "one in ten has ten times the deviation",
    "patches": "float32's own values of the task patches",
}
OUTLIERS = {"contaminated": (0.1, 10.0), "rare": (0.05, 20.0)}  # how often, and how many times the deviation
ONE_SIDED = {"tail down": "exponential, with its tail down", "tail up": "with its tail up"}
# Not covered; float32 is quiet and normal. What is rare and far away is a collapse by the rule.
UNCOVERED = {"rare": "one in twenty has twenty times the deviation", **ONE_SIDED}
SCENARIOS = {
    "normal": KINDS["normal"],
    "shared": KINDS["shared"],
    "unequal": KINDS["unequal"],
    "twenty": "a fifth, at random, varies twenty times as much",
    **HEAVY,
    **UNCOVERED,
}
WIDE = (0.3, 1.0, 3.0, 6.3, 10.0)  # deviations in tolerances; 6.3 is that of the task patches
QUIET = 0.1  # of the deviation: that of float32, in `UNCOVERED`
TASKS = Path(__file__).parents[1] / "docs" / "tasks.csv"


class Cell(NamedTuple):
    """What is simulated: how many settings and seeds, the deviation in tolerances, the kind of noise, the truth.

    truth: one of `TRUTHS`, or "equal": all settings equal float32.
    """

    settings: int
    seeds: int
    deviation: float
    kind: str
    truth: str


def cells() -> Iterator[Cell]:
    """All cells of the simulation."""
    for truth, kind, deviation, settings, seeds in product(TRUTHS, KINDS, DEVIATIONS, SETTINGS, SEEDS):
        if truth != "edge" or not kind.startswith("wide"):  # that all vary more is nothing new
            yield Cell(settings, seeds, deviation, kind, truth)


def sweeps(cell: Cell, count: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """Simulated sweeps at a tolerance of 1.

    The true means (settings,), the differences (count, settings, seeds), and the deviation of float32 over its seeds
    (count,).
    """
    rng = np.random.default_rng([seed, *map(ord, f"{cell.kind} {cell.truth}"), round(10 * cell.deviation), *cell[:2]])
    places = np.arange(cell.settings)
    if cell.truth == "thirds":
        means = np.resize([EQUAL, EDGE, FAR], cell.settings)
    elif cell.truth == "equal":
        means = np.full(cell.settings, EQUAL)
    else:
        means = np.where(places < (cell.settings // 5 if cell.truth == "fifth" else cell.settings), EDGE, EQUAL)
    deviations = np.full((count, cell.settings, 1), cell.deviation)
    if cell.kind in ("unequal", "twenty"):
        wide = 5.0 if cell.kind == "unequal" else 20 * cell.deviation
        deviations[rng.permuted(np.tile(places < max(cell.settings // 5, 1), (count, 1)), axis=1)] = wide
    elif cell.kind == "drawn":
        deviations *= np.exp(0.5 * rng.standard_normal(deviations.shape))
    elif cell.kind.startswith("wide"):
        deviations[:, means == EDGE] *= float(cell.kind.removeprefix("wide"))
    # each difference is of two trainings, and that in float32 is the same for all settings
    values = _noise(rng, cell.kind, (count, cell.settings + 1, cell.seeds))
    others, float32 = values[:, 1:], values[:, :1]
    if cell.kind == "normal":
        noise = others
    elif cell.kind in UNCOVERED:
        float32 = QUIET * float32
        noise = others - float32
    else:
        noise = (others - float32) / math.sqrt(2)
    spread = cell.deviation * float32.std(axis=2, ddof=1)[:, 0] / (1.0 if cell.kind in UNCOVERED else math.sqrt(2))
    return means, means[:, None] + deviations * noise, spread


def _noise(rng: np.random.Generator, kind: str, shape: tuple[int, int, int]) -> Array:
    """Trainings without a difference: (sweeps, float32 and settings, seeds)."""
    if kind == "t3":
        return rng.standard_t(3, shape) / math.sqrt(3)
    if kind in OUTLIERS:
        rate, times = OUTLIERS[kind]
        are_far = rng.random(shape) < rate
        if kind in UNCOVERED:
            are_far[:, 0] = False
        return rng.standard_normal(shape) * np.where(are_far, times, 1.0)
    if kind == "patches":
        count, rows, seeds = shape
        own = own_values()
        if rows * seeds > len(own):
            return rng.choice(own, shape)
        return rng.permuted(np.tile(own, (count, 1)), axis=1)[:, : rows * seeds].reshape(shape)
    if kind in ONE_SIDED:
        noise = rng.standard_exponential(shape) - 1
        noise[:, 0] = rng.standard_normal(shape[::2])
        return -noise if kind == "tail down" else noise
    return rng.standard_normal(shape)


@cache
def own_values() -> Array:
    """float32's 30 accuracies of the task patches, with a deviation of 1."""
    with TASKS.open() as file:
        rows = [row for row in csv.reader(file) if row[:2] == ["patches", "float32"] and row[3] == "accuracy"]
    values = np.array([float(row[4]) for row in rows])
    return (values - values.mean()) / values.std(ddof=1)


def outcomes(differences: Array, float32: Array, equivalence: bool = False) -> NDArray[np.str_]:
    """What the verdict says of each setting, (count, settings): which collapse, and what the tests of the others say.

    As `judge_sweep` does, of many sweeps at once.

    float32: its deviation, (count,).
    """
    low = np.stack(collapses([*np.moveaxis(differences, 1, 0)], float32, 1.0), axis=-1) > 0
    said = np.where(low, "collapsed", "undecided").astype("<U10")
    aside = low | (seeds_apart(differences, 1.0) > 0)
    for chosen in np.unique(aside, axis=0):
        which = (aside == chosen).all(axis=1)
        if not chosen.all():
            said[np.ix_(which, ~chosen)] = _tested(differences[which][:, ~chosen], (~chosen).mean(), equivalence)
    return said


def _tested(differences: Array, share: float, equivalence: bool) -> NDArray[np.str_]:
    """What the tests say where they have a share of the level."""
    means, variances = differences.mean(axis=2), differences.var(axis=2, ddof=1)
    _, settings, seeds = differences.shape
    level = share * level_of_tests(LEVEL, settings, seeds)
    found = decide(means, variances, np.full(settings, seeds), 1.0, level, equivalence=equivalence)
    return found.outcomes.astype("<U10")


def are_wrong(
    means: Array, said: NDArray[np.str_], equivalence: bool = False, planted: NDArray[np.bool_] | bool = False
) -> NDArray[np.bool_]:
    """Which statements are wrong. At the tolerance itself either one is.

    planted: which settings truly collapse with some seed.
    """
    wrong = ((said == "match") & (means <= EDGE)) | ((said == "short") & (means >= EDGE))
    if equivalence:
        wrong |= ((said == "match") & (means >= -EDGE)) | ((said == "above") & (means <= -EDGE))
    return wrong | ((said == "collapsed") & ~np.asarray(planted))


def share_wrong(cell: Cell, count: int, seed: int = 0) -> float:
    """The share of sweeps with a wrong statement anywhere."""
    means, differences, float32 = sweeps(cell, count, seed)
    return float(are_wrong(means, outcomes(differences, float32)).any(axis=1).mean())


class Scenario(NamedTuple):
    """Shares of sweeps: with a wrong statement anywhere, and with a collapse that is none."""

    wrong: float
    collapsed: float


def scenario(cell: Cell, count: int, seed: int = 0) -> Scenario:
    """Sweeps without a collapse: how many have a wrong statement, and how many say of a setting that it collapses."""
    means, differences, float32 = sweeps(cell, count, seed)
    said = outcomes(differences, float32)
    wrong = are_wrong(means, said).any(axis=1)
    return Scenario(float(wrong.mean()), float((said == "collapsed").any(axis=1).mean()))


def share_of_collapses_found(settings: int, seeds: int, deviation: float, count: int, seed: int = 0) -> float:
    """Of settings that equal float32 but for one seed that collapses, one in each sweep, the share that is named."""
    _, differences, float32 = sweeps(Cell(settings, seeds, deviation, "shared", "equal"), count, seed)
    differences[:, 0, 0] -= COLLAPSE
    return float((outcomes(differences, float32)[:, 0] == "collapsed").mean())


def near_zero(settings: int, seeds: int, mean: float, count: int, seed: int = 0) -> tuple[float, float]:
    """Sweeps of a metric near 0 whose settings equal float32, at the tolerance that is taken where none is given.

    Shares of the sweeps: those that have no such tolerance, and those with a wrong statement.

    mean: of float32, in its deviations.
    """
    rng = np.random.default_rng([seed, settings, seeds, round(100 * mean)])
    values = mean + rng.standard_normal((count, settings + 1, seeds))
    tolerances = [default_tolerance("loss", [*one]) for one in values[:, 0]]
    kept = np.array([one is not None for one in tolerances])
    scale = np.array([one for one in tolerances if one is not None])[:, None, None]
    differences = (values[kept, 1:] - values[kept, :1]) / scale
    said = outcomes(differences, values[kept, 0].std(axis=1, ddof=1) / scale[:, 0, 0])
    wrong = are_wrong(np.zeros(settings), said).any(axis=1).sum() / count
    return float(1 - kept.mean()), float(wrong)


def shares_found(cell: Cell, count: int, seed: int = 0) -> tuple[float, float]:
    """The shares of equal settings found to be no more than the tolerance below, and of far ones found short."""
    means, differences, float32 = sweeps(cell, count, seed)
    said = outcomes(differences, float32)
    return float((said[:, means == EQUAL] == "match").mean()), float((said[:, means == FAR] == "short").mean())


class Collapses(NamedTuple):
    """What becomes of settings that equal float32 where they do not collapse, as shares of them; and of sweeps.

    unseen: no seed collapsed. found: "collapses with ... seeds". whole: all seeds collapsed, and it falls short.
    match: said to be no more than the tolerance below. wrong: sweeps with a wrong statement, judged against those
    trainings of a setting that did not collapse; that it falls short is right where one did.
    """

    unseen: float
    found: float
    whole: float
    match: float
    wrong: float


def collapsing(rate: float, seeds: int, count: int, settings: int = 15, seed: int = 0) -> Collapses:
    """Sweeps of a third each equal, at the tolerance and far, where each seed collapses at a rate."""
    cell = Cell(settings, seeds, 0.3, "shared", "thirds")
    means, differences, float32 = sweeps(cell, count, seed)
    down = np.random.default_rng([seed, round(100 * rate), seeds]).random(differences.shape) < rate
    said = outcomes(differences - COLLAPSE * down, float32)
    equal = means == EQUAL
    is_down = down.any(axis=2)
    wrong = are_wrong(means, said, planted=is_down) & ~(is_down & (said == "short"))
    return Collapses(
        float((~down[:, equal].any(axis=2)).mean()),
        float((said[:, equal] == "collapsed").mean()),
        float(down[:, equal].all(axis=2).mean()),
        float((said[:, equal] == "match").mean()),
        float(wrong.any(axis=1).mean()),
    )


def mean_rounded(mean: Array, deviation: float) -> Array:
    """The expected value of a normal number that is rounded to an integer."""
    places = np.floor(mean)[:, None] + np.arange(-40, 41)
    ends = stats.norm.cdf((places[..., None] + [-0.5, 0.5] - mean[:, None, None]) / deviation)
    return (places * np.diff(ends)[..., 0]).sum(axis=1)


def share_wrong_where_counted(settings: int, seeds: int, examples: float, deviation: float, count: int) -> float:
    """The share of sweeps with a wrong statement, where the metric is counted in examples of a test set.

    All settings are at the tolerance: there is the expected value of their differences.

    examples: the tolerance, such as 3.6 for a point of 360 examples.
    deviation: of a difference, in examples.
    """
    rng = np.random.default_rng([settings, seeds, round(10 * examples), round(10 * deviation)])
    each = deviation / math.sqrt(2)
    start = rng.uniform(size=count)
    float32 = np.round(start[:, None, None] + each * rng.standard_normal((count, 1, seeds)))
    others = np.round(start[:, None, None] - examples + each * rng.standard_normal((count, settings, seeds)))
    edge = mean_rounded(start - examples, each) - mean_rounded(start, each)
    differences = others - float32 - (edge + examples)[:, None, None]  # so that all sweeps have the same tolerance
    means, variances = differences.mean(axis=2), differences.var(axis=2, ddof=1)
    level = level_of_tests(LEVEL, settings, seeds)
    found = decide(means, variances, np.full(settings, seeds), examples, level, step=1.0)
    return float((found.outcomes != "undecided").any(axis=1).mean())


def share_decided(settings: int, seeds: int, deviation: float, count: int) -> float:
    """Of open settings of which a number of seeds is said to decide, the share that so many seeds decide.

    Their true means are 0 to 4 tolerances below float32, but not at the tolerance.
    """
    rng = np.random.default_rng([settings, seeds, round(10 * deviation), 1])
    came_true = []
    for _ in range(count):
        means = rng.choice([0.0, -0.5, -1.5, -2.0, -4.0], settings)
        drawn = means[:, None] + deviation * rng.standard_normal((settings, MOST_SEEDS))
        for i, one in enumerate(judge([*drawn[:, :seeds]], 1.0)):
            if one.outcome == "undecided" and one.seeds <= MOST_SEEDS:
                came_true.append(judge([*drawn[:, : one.seeds]], 1.0)[i].outcome != "undecided")
    return float(np.mean(came_true)) if came_true else math.nan


def print_cells(count: int, seed: int) -> None:
    """Print the share of wrong sweeps in every cell."""
    heads = [f"{m} x {n}, {d:g}" for d, m, n in product(DEVIATIONS, SETTINGS, SEEDS)]
    print("Sweeps with a wrong statement anywhere, in %. Columns: settings x seeds, deviation in tolerances")
    width = 2 + max(map(len, TRUTHS.values())) + max(map(len, KINDS.values()))
    print(f"{'':{width}}" + "".join(f"{head:>13}" for head in heads))
    rows: dict[tuple[str, str], list[tuple[float, Cell]]] = {}
    for cell in cells():
        row = rows.setdefault((cell.truth, cell.kind), [])
        row.append((share_wrong(cell, count, seed), cell))
        if len(row) == len(heads):
            values = "".join(f"{100 * value:13.1f}" for value, _ in row)
            print(f"{f'{TRUTHS[cell.truth]}; {KINDS[cell.kind]}':{width}}{values}", flush=True)
    every = [one for row in rows.values() for one in row]
    for title, chosen in (("up to 5 seeds", True), ("more", False)):
        value, worst = max(one for one in every if (one[1].seeds <= 5) == chosen)
        print(f"The largest, {title}: {100 * value:.1f} % in {tuple(worst)}")


def scenario_cells(kind: str) -> Iterator[Cell]:
    """The cells of a scenario; where float32's own values are taken, as many settings as they suffice for, too."""
    for truth, deviation, settings, seeds in product(("equal", "edge"), WIDE, (1, *SETTINGS), SEEDS):
        if kind != "patches" or (truth, deviation) == ("equal", 6.3):
            yield Cell(settings, seeds, deviation, kind, truth)
    if kind == "patches":
        yield from (Cell(30 // seeds - 1, seeds, 6.3, kind, "equal") for seeds in SEEDS)


def print_scenarios(count: int, seed: int, noise: Sequence[str] = (*SCENARIOS,)) -> None:
    """Print the worst cells of each scenario."""
    print("\nSweeps without a collapse, in %: wrong anywhere (with a collapse that is none), the worst cell by seeds")
    for kind, words in SCENARIOS.items():
        if kind not in noise:
            continue
        found = {cell: scenario(cell, count, seed) for cell in scenario_cells(kind)}
        said = []
        for seeds in SEEDS:
            of_seeds = {cell: one for cell, one in found.items() if cell.seeds == seeds}
            worst = max(of_seeds, key=lambda cell: of_seeds[cell].wrong)
            most = max(one.collapsed for one in of_seeds.values())
            where = f"{worst.settings} x {worst.deviation:g}, {worst.truth}"
            said.append(f"{100 * of_seeds[worst].wrong:5.1f} ({100 * most:.1f}) [{where}]")
        print(f"{words:50}" + "".join(f"{one:>34}" for one in said), flush=True)


def print_near_zero(count: int, seed: int) -> None:
    """Print how often a metric near 0 has no tolerance, and how often a sweep that has one is wrong."""
    print("\nMetrics near 0, 15 settings that equal float32, in %: without a tolerance, wrong sweeps; 3, 5, 10 seeds")
    for mean in (0.0, 1.0, 3.0, 5.0):
        values = [near_zero(15, seeds, mean, count, seed) for seeds in SEEDS]
        words = " ".join(f"{100 * refused:6.1f} {100 * wrong:4.1f}" for refused, wrong in values)
        print(f"a mean of {mean:g} deviations {words}", flush=True)


def print_found(count: int, seed: int) -> None:
    """Print what is found: settings, and collapses."""
    print("\nEqual settings that are found, and those 4 tolerances below, in %")
    for kind in ("shared", "unequal", "drawn"):
        for settings in SETTINGS:
            found = [
                shares_found(Cell(settings, seeds, deviation, kind, "thirds"), count, seed)
                for deviation, seeds in product(DEVIATIONS, SEEDS)
            ]
            words = " ".join(f"{100 * equal:5.0f} {100 * far:4.0f}" for equal, far in found)
            print(f"{kind:10}{settings:4} settings  {words}", flush=True)
    print("\nOne seed of one setting collapses by 20 tolerances: found, in %; 3, 4, 5, 10 seeds")
    for deviation, settings in product((0.1, 0.3, 0.5, 1.0), (1, *SETTINGS)):
        shares = [share_of_collapses_found(settings, seeds, deviation, count, seed) for seeds in (3, 4, 5, 10)]
        print(f"deviation {deviation:g}, {settings:2} settings " + " ".join(f"{100 * one:6.1f}" for one in shares))
    print("\nSettings that collapse by 20 tolerances, 15 a sweep, in %: unseen, found, all seeds, match; wrong sweeps")
    for rate, seeds in product((0.1, 0.2, 0.4), SEEDS):
        values = collapsing(rate, seeds, max(count // 10, 50), seed=seed)
        print(f"rate {rate:g}, {seeds:2} seeds  " + " ".join(f"{100 * value:6.1f}" for value in values), flush=True)


def print_counted_and_decided(sweeps: int, _: int) -> None:
    """Print the tables of metrics that are counted, and of the seeds that would decide."""
    deviations = (0.3, 0.6, 1.0, 2.0, 4.0)
    print("\nCounted in examples, all at the tolerance: wrong sweeps in %; deviations of 0.3, 0.6, 1, 2, 4 examples")
    for settings, seeds, examples in product((1, 4, 15), SEEDS, (1.8, 3.6, 10.0)):
        words = [100 * share_wrong_where_counted(settings, seeds, examples, one, sweeps) for one in deviations]
        print(f"{settings:2} x {seeds:2}, {examples:4} examples " + " ".join(f"{value:5.1f}" for value in words))
    print('\n"About N seeds would probably decide it" came true, in %; deviations of 0.3, 1, 3 tolerances')
    for settings, seeds in product((1, 4, 15), SEEDS):
        count = max(sweeps // (16 * settings), 20)
        values = [100 * share_decided(settings, seeds, one, count) for one in (0.3, 1.0, 3.0)]
        print(f"{settings:2} x {seeds:2} " + " ".join(f"{value:5.0f}" for value in values), flush=True)


TABLES: dict[str, Callable[[int, int], None]] = {
    "cells": print_cells,
    "scenarios": print_scenarios,
    "zero": print_near_zero,
    "found": print_found,
    "counted": print_counted_and_decided,
}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweeps", type=int, default=4000, help="simulated in each cell")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=TABLES, default=[*TABLES], help="tables (default all)")
    parser.add_argument("--noise", nargs="+", choices=SCENARIOS, help="the scenarios' (default all)", metavar="NAME")
    options = parser.parse_args()
    for name in options.only:
        if name == "scenarios" and options.noise:
            print_scenarios(options.sweeps, options.seed, options.noise)
        else:
            TABLES[name](options.sweeps, options.seed)


if __name__ == "__main__":
    main()
