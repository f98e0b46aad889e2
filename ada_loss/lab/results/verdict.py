"""The verdict of a sweep: which settings are worse than float32 by more than a tolerance, are not, or are undecided."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ada_loss.lab.cells.cell_formats import BASELINE, STOCHASTIC_GRADIENTS
from ada_loss.lab.results import comparison as pairs
from ada_loss.lab.results.comparison import Comparison, require_level
from ada_loss.lab.results.judgement import LEAST_SEEDS, LEVEL, judge_sweep, smallest_step
from ada_loss.lab.results.results import StoredResults, first_metric, telling_axes
from ada_loss.lab.results.statements import WORSE, Combination, Verdict
from ada_loss.lab.results.table import is_share, mean_of
from fpsim.checks import is_finite_number, is_number, shown

__all__ = ["LEAST_SEEDS", "Combination", "Verdict", "compare", "default_tolerance", "verdicts"]

# The default tolerance: one point of a share, and for another metric a hundredth of float32's mean.
TOLERANCE = 0.01
# If float32's mean is within this many deviations of 0, there is no default tolerance: 1 % of such a mean is noise.
NEAR_ZERO = 3.0
# The largest number of seeds of a setting whose files are read for skipped steps, underflow and overflow.
MOST_READ = 100
OF_SHARES = {"losses", "sites.role", "sites.nonzero", "sites.underflow", "sites.overflow"}
GRADIENTS = {"weight_grad": " of weight gradients", "error": ""}  # roles, in words


def verdicts(
    results: StoredResults,
    metric: str | None = None,
    tolerance: float | None = None,
    level: float = LEVEL,
    equivalence: bool = False,
) -> list[Verdict]:
    """See `Results.verdicts`."""
    if tolerance is not None and not (is_finite_number(tolerance) and 0 <= tolerance <= sys.float_info.max):
        raise ValueError(f"tolerance={shown(tolerance)} is invalid. Expected: 0 or more, in the units of the metric.")
    require_level(level)
    if metric is not None:
        results.require_metric(metric)
    done = {row["id"]: row for row in results.rows()}
    rows = [
        done.get(cell["id"], results.settings_of(cell)) for cell in results.cells if cell["state"] in ("done", "failed")
    ]
    axes = [axis for axis in telling_axes(results.settings, rows) if axis not in ("format", "rounding", "scaling")]
    judged = []
    for choice in dict.fromkeys(tuple((axis, str(row.get(axis))) for axis in axes) for row in rows):
        chosen = [row for row in rows if all(str(row.get(axis)) == value for axis, value in choice)]
        name = metric or first_metric(results, [row["id"] for row in chosen])
        if name is not None:
            subject = ", ".join(value if axis == "task" else f"{axis} {value}" for axis, value in choice)
            judged.append(_verdict(results, chosen, results.shown(name), tolerance, level, subject, equivalence))
    return judged


def compare(
    results: StoredResults,
    a: str | Mapping[str, Any],
    b: str | Mapping[str, Any],
    metric: str | None = None,
    level: float = LEVEL,
) -> Comparison:
    """See `Results.compare`. A comparison with float32 includes a's statement from the verdict on all settings."""
    comparison = pairs.compare(results, a, b, metric, level)
    cells = {row["id"] for row in pairs.rows_of_side(results, a)}
    if {row["format"] for row in pairs.rows_of_side(results, b)} != {results.float32}:
        return comparison
    for verdict in verdicts(results, metric, level=level):
        for one in verdict.combinations:
            if cells <= {*one.cells} and not verdict.problem:
                return replace(comparison, statement=verdict.statement(one))
    return comparison


def _verdict(
    results: StoredResults,
    rows: Sequence[Mapping[str, Any]],
    metric: str,
    tolerance: float | None,
    level: float,
    subject: str,
    equivalence: bool,
) -> Verdict:
    values = {row["seed"]: _number(row, metric) for row in rows if row["format"] == results.float32}
    baseline = {seed: value for seed, value in values.items() if math.isfinite(value)}
    sign = results.directions.sign(metric)
    known = default_tolerance(metric, [*baseline.values()]) if tolerance is None else tolerance
    tolerance = 0.0 if known is None else known
    is_judged = sign and len(baseline) >= LEAST_SEEDS and known is not None
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row, words in zip(rows, _words_of_settings(rows), strict=True):
        if row["format"] != results.float32:
            groups.setdefault((row["format"], words), []).append(row)
    combinations = []
    for (fmt, rest), chosen in groups.items():
        one = _combination(fmt, rest, chosen, metric, baseline, level)
        if is_judged and one.outcome == "undecided" and len(one.comparison.differences) < LEAST_SEEDS:
            one = replace(one, outcome="few")
        combinations.append(one)
    if is_judged:
        # The size of the values that are compared: float32's largest value, plus the tolerance.
        size = max(map(abs, baseline.values())) + tolerance
        step = smallest_step([value for row in rows if math.isfinite(value := _number(row, metric))], size)
        combinations = _judged(combinations, baseline, tolerance, level, sign, equivalence, step)
    # Files are read only for settings whose losses will be shown.
    by_id = {row["id"]: row for row in rows}
    combinations = [
        replace(
            one,
            shares=_shares(results, [by_id[cell] for cell in one.cells if "diverged" in by_id[cell]][:MOST_READ]),
            why=next((results.reasons[cell] for cell in one.cells if cell in results.reasons), ""),
        )
        if one.outcome in WORSE
        else one
        for one in combinations
    ]
    lost = tuple(seed for seed in values if seed not in baseline)
    return Verdict(metric, baseline, tolerance, level, combinations, subject, sign, equivalence, lost, known is None)


def default_tolerance(metric: str, float32: Sequence[float]) -> float | None:
    """Return one point for a share, else a hundredth of float32's mean; None if this mean is too near 0.

    >>> default_tolerance("accuracy", [0.9, 0.8]), default_tolerance("loss", [2.0, 2.0, 2.0])
    (0.01, 0.02)
    >>> default_tolerance("loss", [0.01, -0.02, 0.005]) is None
    True
    """
    if is_share(metric):
        return TOLERANCE
    mean = abs(mean_of(float32)) if float32 else 0.0
    deviation = statistics.stdev(float32) if len(float32) >= LEAST_SEEDS else 0.0
    return None if mean <= NEAR_ZERO * deviation else TOLERANCE * mean


def _words_of_settings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a description of each row's setting without the format: rounding and scaling, if they vary between rows.

    Stochastic rounding of gradients follows from format and scaling, and is always mentioned.
    """
    told = {axis: len({row[axis] for row in rows} - {STOCHASTIC_GRADIENTS}) > 1 for axis in ("rounding", "scaling")}
    roundings: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        roundings.setdefault((row["format"], row["scaling"]), set()).add(row["rounding"])
    settings = []
    for row in rows:
        is_stochastic = row["rounding"] == STOCHASTIC_GRADIENTS
        has_both = len(roundings[row["format"], row["scaling"]]) > 1
        said = {"rounding": (told["rounding"] or has_both) and not is_stochastic, "scaling": told["scaling"]}
        words = [row[axis] for axis in said if said[axis]]
        settings.append(", ".join(filter(None, [" ".join(words), "gradients rounded stochastically" * is_stochastic])))
    return settings


def _combination(
    fmt: str, rest: str, rows: Sequence[Mapping[str, Any]], metric: str, baseline: Mapping[int, float], level: float
) -> Combination:
    """Return a setting with its differences from float32: "undecided" until it is tested, or "diverged" or "failed"."""
    # Only rows of finished cells have the column "diverged"; the cells of the other rows failed.
    finished = [row for row in rows if "diverged" in row]
    silent = [row for row in finished if not row["diverged"] and not is_number(row.get(metric))]
    told = [row for row in finished if row not in silent]
    differences = {r["seed"]: _number(r, metric) - baseline[r["seed"]] for r in told if r["seed"] in baseline}
    diverged = sum(math.isnan(_number(row, metric)) for row in told)
    comparison = Comparison(f"{fmt} {rest}".strip(), BASELINE, metric, differences, level, diverged)
    outcome = "failed" if not told else "diverged" if diverged else "undecided"
    failed = tuple(row["seed"] for row in rows if "diverged" not in row)
    without = tuple(row["seed"] for row in silent)
    cells = tuple(row["id"] for row in rows)
    return Combination(fmt, rest, outcome, comparison, len(finished), failed=failed, silent=without, cells=cells)


def _judged(
    combinations: Sequence[Combination],
    baseline: Mapping[int, float],
    tolerance: float,
    level: float,
    sign: int,
    equivalence: bool,
    step: float,
) -> list[Combination]:
    """Return the combinations, after all undecided combinations were judged together."""
    chosen = [i for i, one in enumerate(combinations) if one.outcome == "undecided"]
    differences = [[sign * value for value in combinations[i].comparison.differences.values()] for i in chosen]
    judged = [*combinations]
    # The combinations are judged at once, because the level of each test depends on the number of tests.
    found = judge_sweep(differences, [*baseline.values()], tolerance, level, equivalence, step)
    for i, judgement in zip(chosen, found, strict=True):
        seeds = [*combinations[i].comparison.differences]
        if judgement.outcome == "collapsed":
            low = tuple(seeds[place] for place in judgement.low)
            judged[i] = replace(judged[i], outcome="collapsed", collapsed=low)
        else:
            judged[i] = replace(judged[i], outcome=judgement.outcome, judgement=judgement)
    return judged


def _number(row: Mapping[str, Any], metric: str) -> float:
    """Return the metric of a row; NaN if it is not finite, or if the training diverged, whatever its metric is."""
    value: Any = row.get(metric)
    return float(value) if is_finite_number(value) and not row.get("diverged") else math.nan


def _shares(results: StoredResults, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the losses of trainings: the shares of skipped steps, and of gradients that underflowed or overflowed.

    Of the two roles, gradients of activations and gradients of weights, only the role with the larger loss is returned.
    """
    lost: dict[str, list[float]] = {}
    for row in rows:
        arrays = results.readable_telemetry(row["id"], OF_SHARES.__contains__)
        for kind in ("underflow", "overflow"):
            shares = {words: _share(arrays, role, kind) for role, words in GRADIENTS.items()}
            if kind == "underflow" and row["underflow"] is not None:
                shares[GRADIENTS["error"]] = row["underflow"]
            for words, share in shares.items():
                lost.setdefault(f"{kind}{words}", []).append(share)
        if len(arrays.get("losses", ())):
            lost.setdefault("skipped steps", []).append((row["skipped"] or 0) / len(arrays["losses"]))
    means = {name: mean_of(values) for name, values in lost.items()}
    for kind in ("underflow", "overflow"):
        del means[min((f"{kind}{words}" for words in GRADIENTS.values()), key=lambda name: means[name])]
    return means


def _share(arrays: Mapping[str, Any], role: str, kind: str) -> float:
    """Return the share of a role's non-zero elements that underflowed or overflowed; 0 without a recording."""
    if not {"sites.role", "sites.nonzero", f"sites.{kind}"} <= arrays.keys():
        return 0.0
    chosen = arrays["sites.role"] == role
    return float(arrays[f"sites.{kind}"][chosen].sum()) / max(float(arrays["sites.nonzero"][chosen].sum()), 1.0)
