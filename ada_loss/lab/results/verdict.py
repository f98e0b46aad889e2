"""The verdict of a sweep: which combinations keep the metric of float32, which do not, and what they lost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ada_loss.lab.directions import hint_for
from ada_loss.lab.results.comparison import LEVEL, Comparison, in_units, per_cent, require_level
from ada_loss.lab.results.results import StoredResults, settings_of, telling_axes
from ada_loss.lab.results.table import SHARES, mean_and_deviation
from ada_loss.lab.sweep.cell_formats import BASELINE
from fpsim.checks import is_finite_number, is_number, shown

__all__ = ["LEAST_SEEDS", "Combination", "Verdict", "verdicts"]

LEAST_SEEDS = 3  # with two, a t-test at 5 % needs a difference of 12.7 standard errors
TOLERANCE = 0.01  # a point of a share; of another metric, a hundredth of float32's mean
MOST_NAMED = 8  # combinations of one kind that are named with their differences
MOST_LISTED = 12  # formats of those that are only listed
GRADIENTS = {"weight_grad": " of weight gradients", "error": ""}  # roles, in words
NOTABLE = 0.005  # shares of lost gradients that are said
VERBS = {  # of one combination, and of several
    "match": ("matches it within {tolerance}", "match it within {tolerance}"),
    "short": ("falls short", "fall short"),
    "diverged": ("diverges", "diverge"),
    "undecided": ("needs more seeds", "need more seeds"),
    "failed": ("gave no result", "gave no result"),
}


@dataclass(frozen=True)
class Combination:
    """A format with its scaling method, and whatever else differs, against float32.

    fmt, rest: the format, and the other settings that differ, as words.
    outcome: "match", "short", "undecided", "diverged" or "failed".
    comparison: with float32; without differences where it failed.
    seeds: how many trainings are done.
    shares: what its trainings lost, {"underflow", "overflow", "skipped steps": a share}, as means over the seeds.
    """

    fmt: str
    rest: str
    outcome: str
    comparison: Comparison
    seeds: int
    shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The combination in words."""
        return f"{self.fmt} ({self.rest})" if self.rest else self.fmt

    @property
    def reasons(self) -> str:
        """What its trainings lost, in words; "" where that is nothing."""
        diverged = self.comparison.diverged
        words = [f"{diverged} of {self.seeds} diverged"] if diverged else []
        words += [f"{name} {per_cent(round(share, 3))}" for name, share in self.shares.items() if share >= NOTABLE]
        return ", ".join(words)


@dataclass(frozen=True)
class Verdict:
    """What a sweep says of float32 and the others. Its `str` is a paragraph.

    A combination matches where the confidence interval of its difference from float32 lies above minus the tolerance,
    and falls short where the interval lies below zero and the mean beyond the tolerance. Else the seeds do not tell.
    One that diverged with any seed is said to diverge. Each comparison has its own level: among twenty that match in
    truth, one falls short by chance at 5 %.

    metric: its name.
    baseline: of float32, {seed: metric}; empty without float32.
    tolerance: in units of the metric.
    level: of each comparison.
    combinations: in the order of the sweep.
    subject: what the verdict is about where a sweep has several: the task, the options that differ.
    sign: 1 where a larger metric is better, -1 where a smaller is; 0 where it is not known: nothing is judged then.
    """

    metric: str
    baseline: Mapping[int, float]
    tolerance: float
    level: float
    combinations: Sequence[Combination]
    subject: str = ""
    sign: int = 1

    def of(self, outcome: str) -> list[Combination]:
        """The combinations of an outcome."""
        return [one for one in self.combinations if one.outcome == outcome]

    @property
    def problem(self) -> str:
        """Why there is no verdict, as a sentence; "" where there is one."""
        if not self.baseline:
            return "No verdict: there is no float32 to compare with. Leave baseline=True, or add 'fp32' to the formats."
        if not self.combinations:
            return "No verdict: there is nothing but float32."
        if not self.sign:
            return (
                f"No verdict: nothing tells whether a larger or a smaller {self.metric} is better. "
                f"{hint_for(self.metric)}"
            )
        if len(self.baseline) < LEAST_SEEDS:
            count = f"{len(self.baseline)} seed{'s' * (len(self.baseline) > 1)}"
            return f"No verdict: {count} cannot tell a difference from chance. Give seeds={LEAST_SEEDS}, better 5."
        return ""

    def __str__(self) -> str:
        words: tuple[str, ...]
        if self.problem:
            words = (self.problem, self._named("diverged"), self._listed("failed"))
        else:
            values = [*self.baseline.values()]
            mean = mean_and_deviation(self.metric, statistics.fmean(values), statistics.stdev(values))
            better = ", lower is better" * (self.sign < 0)
            words = (
                f"float32 gives {self.metric} {mean}{' %' * (self.metric in SHARES)}{better}.",
                self._listed("match"),
                self._named("short"),
                self._named("diverged"),
                self._listed("undecided"),
                self._listed("failed"),
                f"Paired t-tests over {len(values)} seeds, each at the level of {per_cent(self.level)}.",
            )
        return f"{self.subject}{': ' * bool(self.subject)}{' '.join(filter(None, words))}"

    @property
    def _tolerance(self) -> str:
        words = in_units(self.metric, self.tolerance)
        return words.removesuffix("s").replace("1.0", "1") if words == "1.0 points" else words

    def _named(self, outcome: str) -> str:
        """The combinations of an outcome with their differences and what they lost, the worst first."""
        found = sorted(self.of(outcome), key=lambda one: -abs(one.comparison.mean))
        words = []
        for one in found[:MOST_NAMED]:
            by = f" by {in_units(self.metric, abs(one.comparison.mean))}" if outcome == "short" else ""
            words.append(f"{one.name}{by}{', ' * bool(one.reasons)}{one.reasons}")
        words += [f"{len(found) - MOST_NAMED} more"] if len(found) > MOST_NAMED else []
        return self._count(outcome) + "; ".join(words) + "." if found else ""

    def _listed(self, outcome: str) -> str:
        """The combinations of an outcome by their formats."""
        found, words = self.of(outcome), []
        for fmt in dict.fromkeys(one.fmt for one in found):
            rests = [one.rest for one in found if one.fmt == fmt]
            count = sum(one.fmt == fmt for one in self.combinations)
            is_all = len(rests) == count > 1
            words.append(f"{fmt} (all {count})" if is_all else f"{fmt} ({', '.join(rests)})" if rests[0] else fmt)
        if len(words) > MOST_LISTED:
            words[MOST_LISTED:] = [f"{len(words) - MOST_LISTED} formats more"]
        return self._count(outcome) + ", ".join(words) + "." if found else ""

    def _count(self, outcome: str) -> str:
        count = len(self.of(outcome))
        verb = VERBS[outcome][count > 1].format(tolerance=self._tolerance)
        return f"{count} of {len(self.combinations)} {verb}: "


def verdicts(
    results: StoredResults, metric: str | None = None, tolerance: float | None = None, level: float = LEVEL
) -> list[Verdict]:
    """See `Results.verdicts`."""
    if tolerance is not None and not (is_finite_number(tolerance) and tolerance >= 0):
        raise ValueError(
            f"tolerance={shown(tolerance)} is impossible. Possible: 0 or more, in the units of the metric."
        )
    require_level(level)
    done = {row["id"]: row for row in results.rows()}
    rows = [done.get(cell["id"], settings_of(cell)) for cell in results.cells if cell["state"] in ("done", "failed")]
    metrics = {cell["id"]: [*cell["metrics"]] for cell in results.cells}
    axes = [axis for axis in telling_axes(results.settings, rows) if axis not in ("format", "rounding", "scaling")]
    found = []
    for choice in dict.fromkeys(tuple((axis, str(row.get(axis))) for axis in axes) for row in rows):
        chosen = [row for row in rows if all(str(row.get(axis)) == value for axis, value in choice)]
        name = metric or next((key for row in chosen for key in metrics[row["id"]]), None)
        if name is not None:
            subject = ", ".join(value if axis == "task" else f"{axis} {value}" for axis, value in choice)
            found.append(_verdict(results, chosen, name, tolerance, level, subject))
    return found


def _verdict(
    results: StoredResults,
    rows: Sequence[Mapping[str, Any]],
    metric: str,
    tolerance: float | None,
    level: float,
    subject: str,
) -> Verdict:
    values = {row["seed"]: _number(row, metric) for row in rows if row["format"] == BASELINE}
    baseline = {seed: value for seed, value in values.items() if math.isfinite(value)}
    if tolerance is None:
        mean = statistics.fmean(baseline.values()) if baseline else 0.0
        tolerance = TOLERANCE if metric in SHARES else TOLERANCE * abs(mean)
    sign = results.directions.sign(metric)
    varying = [axis for axis in ("rounding", "scaling") if len({row[axis] for row in rows}) > 1]
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["format"] != BASELINE:
            groups.setdefault((row["format"], " ".join(row[axis] for axis in varying)), []).append(row)
    combinations = []
    for (fmt, rest), chosen in groups.items():
        found = [row for row in chosen if "diverged" in row]  # the others failed
        differences = {r["seed"]: _number(r, metric) - baseline[r["seed"]] for r in found if r["seed"] in baseline}
        diverged = sum(row["diverged"] for row in found)
        comparison = Comparison(f"{fmt} {rest}".strip(), BASELINE, metric, differences, level, diverged)
        outcome = _outcome(comparison, tolerance, sign) if found else "failed"
        shares = _shares(results, found) if outcome in ("short", "diverged") else {}
        combinations.append(Combination(fmt, rest, outcome, comparison, len(found), shares))
    return Verdict(metric, baseline, tolerance, level, combinations, subject, sign)


def _number(row: Mapping[str, Any], metric: str) -> float:
    """The metric of a row; NaN where its training gave none."""
    value: Any = row.get(metric)
    return float(value) if is_number(value) else math.nan


def _outcome(comparison: Comparison, tolerance: float, sign: int) -> str:
    """What the interval of the difference says; see `Verdict`."""
    if comparison.diverged:
        return "diverged"
    if len(comparison.differences) < LEAST_SEEDS or math.isnan(comparison.error):
        return "undecided"
    if not sign:
        return "undecided"
    low, high = sorted(sign * bound for bound in comparison.interval)
    if low >= -tolerance:
        return "match"
    return "short" if high < 0 and sign * comparison.mean < -tolerance else "undecided"


def _shares(results: StoredResults, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What the trainings lost: steps that were skipped, and gradients that underflowed or overflowed.

    Of the gradients of activations and those of weights, the ones that lost more.
    """
    lost: dict[str, list[float]] = {}
    for row in rows:
        arrays = results.readable_telemetry(row["id"])
        for kind in ("underflow", "overflow"):
            shares = {words: _share(arrays, role, kind) for role, words in GRADIENTS.items()}
            if kind == "underflow" and row["underflow"] is not None:
                shares[GRADIENTS["error"]] = row["underflow"]
            for words, share in shares.items():
                lost.setdefault(f"{kind}{words}", []).append(share)
        if len(arrays.get("losses", ())):
            lost.setdefault("skipped steps", []).append((row["skipped"] or 0) / len(arrays["losses"]))
    means = {name: statistics.fmean(values) for name, values in lost.items()}
    for kind in ("underflow", "overflow"):
        del means[min((f"{kind}{words}" for words in GRADIENTS.values()), key=lambda name: means[name])]
    return means


def _share(arrays: Mapping[str, Any], role: str, kind: str) -> float:
    """The share of the non-zero elements of a role's tensors that underflowed or overflowed; 0 without a recording."""
    if not {"sites.role", "sites.nonzero", f"sites.{kind}"} <= arrays.keys():
        return 0.0
    chosen = arrays["sites.role"] == role
    return float(arrays[f"sites.{kind}"][chosen].sum()) / max(float(arrays["sites.nonzero"][chosen].sum()), 1.0)
