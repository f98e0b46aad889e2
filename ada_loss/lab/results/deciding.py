"""Tolerances that a sweep of a task can decide, given the spread of the task's metric over seeds."""

from __future__ import annotations

import math

from ada_loss.lab.results.judgement import LEAST_SEEDS, smallest_tolerance
from ada_loss.lab.results.table import is_share
from ada_loss.lab.tasks import TASKS
from ada_loss.lab.tasks.spread import PAIRED, Spread, spread_of

__all__ = ["SEEDS", "decidable", "task_rows"]

SEEDS = (3, 5, 10)


def decidable(task: str, seeds: int, settings: int = 1) -> str:
    """The smallest tolerance that this many seeds can probably decide; "" for a task that was not measured.

    Args:
        task: its name.
        seeds: of each setting.
        settings: the number of settings compared with float32 together.

    >>> decidable("mine:task", 5)
    ''
    """
    one = spread_of(task)
    if one is None or not settings:
        return ""
    if seeds < LEAST_SEEDS:
        return f"{task}: {seeds} seed{'s' * (seeds > 1)} cannot decide anything. Give seeds={LEAST_SEEDS}, better 5."
    if one.paired_seeds < LEAST_SEEDS:
        return ""
    tolerance = _number(one, smallest_tolerance(one.paired, seeds, settings))
    return (
        f"{task}: with {seeds} seeds and {settings} setting{'s' * (settings > 1)}, one that equals float32 is likely "
        f"found from a tolerance of {tolerance} in {one.metric} on (a deviation of {_number(one, one.paired)} over "
        f"{one.paired_seeds} seeds, measured with {PAIRED}, and the task's own options)."
    )


def task_rows() -> list[dict[str, str]]:
    """A row for each task of the library: its metric, float32's mean and deviation, and the decidable tolerances.

    >>> task_rows()[0]["task"]
    'digits'
    """
    rows = []
    for task in TASKS:
        one = spread_of(task)
        row = {"task": task, "metric": "not measured", "float32": "", "seeds": ""}
        row |= {f"{count} seeds": "" for count in SEEDS}
        if one is not None:
            row |= {"metric": one.metric, "seeds": str(one.seeds)}
            row["float32"] = _number(one, one.mean)
            if not math.isnan(one.deviation):
                row["float32"] += f" ± {_number(one, one.deviation)}"
            if one.paired_seeds >= LEAST_SEEDS:
                for count in SEEDS:
                    row[f"{count} seeds"] = _number(one, smallest_tolerance(one.paired, count))
        rows.append(row)
    return rows


def _number(one: Spread, value: float) -> str:
    return f"{100 * value:.2f} %" if is_share(one.metric) else f"{value:.3g}"
