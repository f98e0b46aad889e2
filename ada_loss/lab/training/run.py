"""What came out of one training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Run", "Stopped", "underflow_share"]


@dataclass(frozen=True)
class Run:
    """What came out of one training.

    metrics: on the test data. losses, scales: of every step, the loss scale before it. skipped_steps: those at which a
    gradient was not finite. rows: the tallies of its sites. history: the tallies up to a step, for some 20 steps of a
    long run: (steps so far, rows). layer_scales: at the same steps, with adaptive scaling, (steps so far, {site:
    log2_scale of its gradient}). evaluations: (steps so far, metrics). seconds: of training.
    """

    metrics: dict[str, float]
    losses: list[float]
    rows: list[dict[str, Any]]
    seconds: float
    scales: list[float]
    skipped_steps: list[int]
    history: list[tuple[int, list[dict[str, Any]]]] = field(default_factory=list)
    layer_scales: list[tuple[int, dict[str, int]]] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    @property
    def skipped(self) -> int:
        """How many steps were skipped."""
        return len(self.skipped_steps)


class Stopped(FloatingPointError):
    """A training that its loss rule stopped, since its scale cannot fall further; run: what came out until then."""

    def __init__(self, message: str, run: Run) -> None:
        super().__init__(message)
        self.run = run


def underflow_share(rows: Sequence[dict[str, Any]], role: str = "error") -> float:
    """Share of the non-zero elements of a role's tensors that became zero when they were rounded.

    >>> underflow_share([{"role": "error", "nonzero": 8, "underflow": 2}])
    0.25
    """
    chosen = [row for row in rows if row["role"] == role]
    nonzero = sum(row["nonzero"] for row in chosen)
    return sum(row["underflow"] for row in chosen) / nonzero if nonzero else 0.0
