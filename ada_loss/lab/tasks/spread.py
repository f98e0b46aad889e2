"""How much the metric of a task differs from seed to seed, as `benchmarks/tasks.py` measured it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ada_loss.files import strict_json

__all__ = ["FILE", "PAIRED", "Spread", "spread_of", "spreads"]

FILE = Path(__file__).with_name("spread.json")
PAIRED = "gradients in e5m2, adaptive"  # the setting whose differences from float32 are measured


class Spread(NamedTuple):
    """The spread of a task's first metric with its own options.

    metric: which is judged.
    seeds, mean, deviation: of float32.
    paired_seeds, paired: how many differences from float32 there are, of `PAIRED`, and their standard deviation.
    """

    metric: str
    seeds: int
    mean: float
    deviation: float
    paired_seeds: int
    paired: float


def spread_of(task: str) -> Spread | None:
    """The spread of a task of this library; None for another, or one that was not measured.

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
    """The content of the file: four digits, and null where one value has no deviation."""
    content = {
        task: {name: float(f"{v:.4g}") if isinstance(v, float) else v for name, v in one._asdict().items()}
        for task, one in of_tasks.items()
    }
    return strict_json(content).encode()
