"""Overview of a sweep: a row for each format, with its best scaling, its metric, and the gradients it lost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ada_loss.lab.results.comparison import in_units, per_cent
from ada_loss.lab.results.judgement import LEAST_SEEDS
from ada_loss.lab.results.results import StoredResults
from ada_loss.lab.results.statements import SECTIONS, WORSE, Combination, Verdict
from ada_loss.lab.results.table import is_share, mean_and_deviation, mean_of
from fpsim.checks import is_finite_number, is_number

__all__ = ["OverviewRow", "overview"]


class OverviewRow(NamedTuple):
    """Row of a format: name, best setting, the metric there, difference from float32, lost gradients, as text.

    kind: "match", "above", "short" or "open", as in the verdict; "" for float32, and where nothing is judged.
    cells: the ids of the format's cells, under every setting.
    """

    format: str
    best: str
    metric: str
    difference: str
    lost: str
    kind: str
    cells: tuple[str, ...]


def overview(results: StoredResults, verdict: Verdict) -> list[OverviewRow]:
    """A row for float32 and one for each format of a verdict, in the order of the sweep.

    The best setting of a format has the best mean difference from float32, paired by seed, among those without diverged
    seeds, or else with the fewest. If seeds failed, three must be left. Without float32 it is the setting with the best
    mean. If the metric's direction is unknown, or no seed has a number, there is "-".
    """
    rows = {row["id"]: row for row in results.rows()}
    values = [*verdict.baseline.values()]
    of_float32 = []
    if values:
        baseline = tuple(row["id"] for row in rows.values() if row["format"] == results.float32)
        of_float32.append(OverviewRow("float32", "", _metric(verdict.metric, values), "", "", "", baseline))
    settings: dict[str, list[Combination]] = {}
    for one in verdict.combinations:
        settings.setdefault(one.fmt, []).append(one)
    return of_float32 + [_row(fmt, chosen, verdict, rows) for fmt, chosen in settings.items()]


def _row(
    fmt: str, chosen: Sequence[Combination], verdict: Verdict, rows: Mapping[str, Mapping[str, Any]]
) -> OverviewRow:
    def numbers(one: Combination) -> list[float]:
        known = [rows[cell] for cell in one.cells if cell in rows and not rows[cell]["diverged"]]
        return [float(row[verdict.metric]) for row in known if is_finite_number(row.get(verdict.metric))]

    def differences(one: Combination) -> list[float]:
        return [value for value in one.comparison.differences.values() if math.isfinite(value)]

    are_paired = all(differences(one) for one in chosen if numbers(one))

    def worth(one: Combination) -> tuple[float, float]:
        values = differences(one) if are_paired else numbers(one)
        seeds = one.seeds - len(one.silent) if len(numbers(one)) >= LEAST_SEEDS else one.asked
        return len(numbers(one)) / seeds, verdict.sign * mean_of(values) if values else -math.inf

    cells = tuple(cell for one in chosen for cell in one.cells)
    diverged, seeds = sum(one.comparison.diverged for one in chosen), sum(one.seeds for one in chosen)
    if len(chosen) > 1 and not any(map(numbers, chosen)):
        kind = "" if verdict.problem else "short" if diverged else "open"
        return OverviewRow(fmt, "-", "-", f"{diverged} of {seeds} diverged" if diverged else "-", "-", kind, cells)
    if not verdict.sign and len(chosen) > 1:
        return OverviewRow(fmt, "-", "-", "-", "-", "", cells)
    best = max(chosen, key=worth)
    mean = best.comparison.mean
    difference = in_units(verdict.metric, mean, unit=False, tolerance=verdict.tolerance) if math.isfinite(mean) else "-"
    if (known := len(numbers(best))) < best.asked and difference != "-":
        difference += f", {known} of {best.asked} seeds"
    if best.comparison.diverged:
        difference = f"{best.comparison.diverged} of {best.seeds} diverged"
    lost = [rows[cell]["underflow"] for cell in best.cells if cell in rows and is_number(rows[cell]["underflow"])]
    kind = next((kind for kind, outcomes in SECTIONS.items() if best.outcome in outcomes), "")
    kind = "short" if best.outcome in WORSE else kind
    return OverviewRow(
        fmt,
        best.rest,
        _metric(verdict.metric, numbers(best)),
        difference,
        per_cent(round(mean_of(lost), 3)) if lost else "-",
        "" if verdict.problem else kind,
        cells,
    )


def _metric(name: str, values: Sequence[float]) -> str:
    """Mean and deviation, in % for shares."""
    if not values:
        return "-"
    is_finite = len(values) > 1 and all(map(math.isfinite, values))
    words = mean_and_deviation(name, mean_of(values), statistics.stdev(values) if is_finite else math.nan)
    return f"{words} %" if is_share(name) else words
