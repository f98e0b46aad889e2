"""The overview of a sweep: a row for each format, with its best scaling, its metric, and the gradients it lost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ada_loss.lab.cells.cell_formats import BASELINE
from ada_loss.lab.results.comparison import in_units, per_cent
from ada_loss.lab.results.results import StoredResults
from ada_loss.lab.results.statements import SECTIONS, Combination, Verdict
from ada_loss.lab.results.table import is_share, mean_and_deviation
from fpsim.checks import is_number

__all__ = ["OverviewRow", "overview"]


class OverviewRow(NamedTuple):
    """A format: its name, its best setting, the metric there, the difference from float32, the gradients lost, as text.

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

    The best setting of a format is the one with the best mean, of those of which all seeds gave a number; where no
    direction of the metric is known, or no seed of it gave a number, there is "-".
    """
    rows = {row["id"]: row for row in results.rows()}
    values = [*verdict.baseline.values()]
    of_float32 = []
    if values:
        baseline = tuple(row["id"] for row in rows.values() if row["format"] == BASELINE)
        of_float32.append(OverviewRow("float32", "", _metric(verdict.metric, values), "", "", "", baseline))
    settings: dict[str, list[Combination]] = {}
    for one in verdict.combinations:
        settings.setdefault(one.fmt, []).append(one)
    return of_float32 + [_row(fmt, chosen, verdict, rows) for fmt, chosen in settings.items()]


def _row(
    fmt: str, chosen: Sequence[Combination], verdict: Verdict, rows: Mapping[str, Mapping[str, Any]]
) -> OverviewRow:
    def numbers(one: Combination) -> list[float]:
        values = (rows[cell].get(verdict.metric) for cell in one.cells if cell in rows)
        return [float(value) for value in values if is_number(value)]  # type: ignore[arg-type]

    def worth(one: Combination) -> float:
        mean = verdict.sign * statistics.fmean(numbers(one) or [math.nan])
        is_whole = len(numbers(one)) == one.asked and not one.comparison.diverged
        return mean + (0 if is_whole else -math.inf) if math.isfinite(mean) else -math.inf

    cells = tuple(cell for one in chosen for cell in one.cells)
    if not verdict.sign and len(chosen) > 1:
        return OverviewRow(fmt, "-", "-", "-", "-", "", cells)
    best = max(chosen, key=worth)
    mean = best.comparison.mean
    difference = in_units(verdict.metric, mean, unit=False, tolerance=verdict.tolerance) if math.isfinite(mean) else "-"
    if best.comparison.diverged:
        difference = f"{best.comparison.diverged} of {best.seeds} diverged"
    lost = [rows[cell]["underflow"] for cell in best.cells if cell in rows and is_number(rows[cell]["underflow"])]
    kind = next((kind for kind, outcomes in SECTIONS.items() if best.outcome in outcomes), "")
    return OverviewRow(
        fmt,
        best.rest,
        _metric(verdict.metric, numbers(best)),
        difference,
        per_cent(round(statistics.fmean(lost), 3)) if lost else "-",
        "" if verdict.problem else kind,
        cells,
    )


def _metric(name: str, values: Sequence[float]) -> str:
    """Mean and deviation, in % for shares."""
    if not values:
        return "-"
    is_finite = len(values) > 1 and all(map(math.isfinite, values))
    words = mean_and_deviation(name, statistics.fmean(values), statistics.stdev(values) if is_finite else math.nan)
    return f"{words} %" if is_share(name) else words
