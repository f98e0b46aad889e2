"""How often a verdict is wrong, and what it finds: simulated sweeps whose truth was planted.

    python benchmarks/verdicts.py --sweeps 4000

prints the share of sweeps with a wrong statement anywhere, also of a metric that is counted in examples, the share of
settings that are found, what becomes of settings that collapse with some seeds, and how often so many seeds decide as
are said to. docs/verdict.md has the tables.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ada_loss.lab.results.judgement import MOST_SEEDS, collapsed_seeds, decide, judge

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


class Cell(NamedTuple):
    """What is simulated: how many settings and seeds, the deviation in tolerances, the kind of noise, the truth."""

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


def sweeps(cell: Cell, count: int, seed: int = 0) -> tuple[Array, Array]:
    """Simulated sweeps: the true means (settings,), and differences (count, settings, seeds) at a tolerance of 1."""
    rng = np.random.default_rng([seed, *map(ord, f"{cell.kind} {cell.truth}"), round(10 * cell.deviation), *cell[:2]])
    places = np.arange(cell.settings)
    if cell.truth == "thirds":
        means = np.resize([EQUAL, EDGE, FAR], cell.settings)
    else:
        means = np.where(places < (cell.settings // 5 if cell.truth == "fifth" else cell.settings), EDGE, EQUAL)
    deviations = np.full((count, cell.settings, 1), cell.deviation)
    if cell.kind == "unequal":
        deviations[rng.permuted(np.tile(places < cell.settings // 5, (count, 1)), axis=1)] = 5.0
    elif cell.kind == "drawn":
        deviations *= np.exp(0.5 * rng.standard_normal(deviations.shape))
    elif cell.kind.startswith("wide"):
        deviations[:, means == EDGE] *= float(cell.kind.removeprefix("wide"))
    noise = rng.standard_normal((count, cell.settings, cell.seeds))
    if cell.kind != "normal":  # each difference is of two trainings, and that in float32 is the same for all settings
        noise = (noise - rng.standard_normal((count, 1, cell.seeds))) / math.sqrt(2)
    return means, means[:, None] + deviations * noise


def outcomes(differences: Array, equivalence: bool = False) -> NDArray[np.str_]:
    """What the verdict says of each setting, (count, settings): collapses are counted, the others are tested."""
    means, variances = differences.mean(axis=2), differences.var(axis=2, ddof=1)
    seeds = np.full(means.shape[-1], differences.shape[2])
    said = decide(means, variances, seeds, 1.0, equivalence=equivalence).outcomes.astype("<U10")
    for i in np.flatnonzero((differences < -10).any(axis=(1, 2))):
        out = [bool(collapsed_seeds([*one], 1.0)) for one in differences[i]]
        tested = [one for one, is_out in zip(differences[i], out, strict=True) if not is_out]
        said[i] = "collapsed"
        said[i, ~np.array(out)] = [one.outcome for one in judge(tested, 1.0, equivalence=equivalence)]
    return said


def are_wrong(means: Array, said: NDArray[np.str_], equivalence: bool = False) -> NDArray[np.bool_]:
    """Which statements are wrong. At the tolerance itself either one is."""
    wrong = ((said == "match") & (means <= EDGE)) | ((said == "short") & (means >= EDGE))
    if equivalence:
        wrong |= ((said == "match") & (means >= -EDGE)) | ((said == "above") & (means <= -EDGE))
    return wrong


def share_wrong(cell: Cell, count: int, seed: int = 0) -> float:
    """The share of sweeps with a wrong statement anywhere."""
    means, differences = sweeps(cell, count, seed)
    return float(are_wrong(means, outcomes(differences)).any(axis=1).mean())


def shares_found(cell: Cell, count: int, seed: int = 0) -> tuple[float, float]:
    """The shares of equal settings found to be no more than the tolerance below, and of far ones found short."""
    means, differences = sweeps(cell, count, seed)
    said = outcomes(differences)
    return float((said[:, means == EQUAL] == "match").mean()), float((said[:, means == FAR] == "short").mean())


class Collapses(NamedTuple):
    """What becomes of settings that equal float32 where they do not collapse, as shares of them; and of sweeps.

    unseen: no seed collapsed. counted: "collapses with ... seeds". whole: all seeds collapsed, and it falls short.
    match: said to be no more than the tolerance below. wrong: sweeps with a wrong statement on a setting of which some
    seed did not collapse, judged against its trainings that did not.
    """

    unseen: float
    counted: float
    whole: float
    match: float
    wrong: float


def collapses(rate: float, seeds: int, count: int, settings: int = 15, seed: int = 0) -> Collapses:
    """Sweeps of a third each equal, at the tolerance and far, where each seed collapses at a rate."""
    cell = Cell(settings, seeds, 0.3, "shared", "thirds")
    means, differences = sweeps(cell, count, seed)
    down = np.random.default_rng([seed, round(100 * rate), seeds]).random(differences.shape) < rate
    said = outcomes(differences - COLLAPSE * down)
    equal = means == EQUAL
    wrong = are_wrong(means, said) & ~down.all(axis=2)
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
    found = decide(means, variances, np.full(settings, seeds), examples, step=1.0)
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


def print_counted_and_decided(sweeps: int) -> None:
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


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweeps", type=int, default=4000, help="simulated in each cell")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    heads = [f"{m} x {n}, {d:g}" for d, m, n in product(DEVIATIONS, SETTINGS, SEEDS)]
    print("Sweeps with a wrong statement anywhere, in %. Columns: settings x seeds, deviation in tolerances")
    width = 2 + max(map(len, TRUTHS.values())) + max(map(len, KINDS.values()))
    print(f"{'':{width}}" + "".join(f"{head:>13}" for head in heads))
    rows: dict[tuple[str, str], list[tuple[float, Cell]]] = {}
    for cell in cells():
        row = rows.setdefault((cell.truth, cell.kind), [])
        row.append((share_wrong(cell, options.sweeps, options.seed), cell))
        if len(row) == len(heads):
            values = "".join(f"{100 * value:13.1f}" for value, _ in row)
            print(f"{f'{TRUTHS[cell.truth]}; {KINDS[cell.kind]}':{width}}{values}", flush=True)
    every = [one for row in rows.values() for one in row]
    for title, chosen in (("up to 5 seeds", True), ("more", False)):
        value, worst = max(one for one in every if (one[1].seeds <= 5) == chosen)
        print(f"The largest, {title}: {100 * value:.1f} % in {tuple(worst)}")
    print("\nEqual settings that are found, and those 4 tolerances below, in %")
    for kind in ("shared", "unequal", "drawn"):
        for settings in SETTINGS:
            found_ones = [
                shares_found(Cell(settings, seeds, deviation, kind, "thirds"), options.sweeps, options.seed)
                for deviation, seeds in product(DEVIATIONS, SEEDS)
            ]
            words = " ".join(f"{100 * equal:5.0f} {100 * far:4.0f}" for equal, far in found_ones)
            print(f"{kind:10}{settings:4} settings  {words}", flush=True)
    print(
        "\nSettings that collapse by 20 tolerances, 15 a sweep, in %: unseen, counted, all seeds, match; wrong sweeps"
    )
    for rate, seeds in product((0.1, 0.2, 0.4), SEEDS):
        values = collapses(rate, seeds, max(options.sweeps // 10, 50), seed=options.seed)
        print(f"rate {rate:g}, {seeds:2} seeds  " + " ".join(f"{100 * value:6.1f}" for value in values), flush=True)
    print_counted_and_decided(options.sweeps)


if __name__ == "__main__":
    main()
