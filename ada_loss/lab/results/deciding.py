"""Estimates of the tolerances that a sweep of a task can decide, from the spread of the task's metric over the seeds.

`benchmarks/tasks.py` measured the spread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ada_loss.files import strict_json
from ada_loss.lab.results.judgement import LEAST_SEEDS, smallest_tolerance
from ada_loss.lab.results.table import is_share
from ada_loss.lab.tasks import TASKS

__all__ = ["FILE", "PAIRED", "SEEDS", "Spread", "decidable", "spread_of", "spreads", "task_rows"]

SEEDS = (3, 5, 10)
FILE = Path(__file__).with_name("spread.json")
# The setting whose differences from float32 were measured. A verdict judges paired differences, and their spread
# differs from the spread of the metric.
PAIRED = "gradients in e5m2, adaptive"


def decidable(task: str, seeds: int, settings: int = 1) -> str:
    """Return, in words, the smallest tolerance that this many seeds can probably decide; "" for an unmeasured task.

    Args:
        task: the name of the task.
        seeds: the number of seeds of each setting.
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
    """Return a row for each task of the library: its metric, float32's mean and deviation, decidable tolerances.

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


class Spread(NamedTuple):
    """The spread of a task's first metric, with the task's default options.

    metric: the metric that is judged.
    seeds, mean, deviation: the number of seeds, the mean and the standard deviation of float32.
    paired_seeds, paired: the number of differences of the setting `PAIRED` from float32, and their standard deviation.
    """

    metric: str
    seeds: int
    mean: float
    deviation: float
    paired_seeds: int
    paired: float


def spread_of(task: str) -> Spread | None:
    """Return the spread of a task of this library; None for another task, or for one that was not measured.

    >>> spread_of("deep_digits").metric, spread_of("mine:task") is None
    ('accuracy', True)
    """
    return _known().get(task)


def _known() -> dict[str, Spread]:
    content: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    return {
        task: Spread(**dict[str, Any]((name, math.nan if value is None else value) for name, value in values.items()))
        for task, values in content.items()
    }


def spreads(of_tasks: Mapping[str, Spread]) -> bytes:
    """Return the content of `FILE`: numbers with four digits; null for the deviation of a single value."""
    content = {
        task: {name: float(f"{v:.4g}") if isinstance(v, float) else v for name, v in one._asdict().items()}
        for task, one in of_tasks.items()
    }
    return strict_json(content).encode()
