"""The result of a training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from fpsim.insight.rows import Rows

__all__ = ["Run", "Stopped", "is_of_role", "underflow_share"]


@dataclass(frozen=True)
class Run:
    """The result of one training.

    metrics: the task's metrics on its test data; empty if the training was stopped.
    losses: the loss of every step.
    rows: the tallies of every site over the whole training; empty without a recording.
    seconds: the time of training, without evaluations.
    scales: the loss scale before every step.
    skipped_steps: the steps that were skipped because a gradient was not finite.
    history: (steps so far, rows up to this step), at some 20 steps of a long training.
    layer_scales: (steps so far, {site: log2_scale of its gradient}) at the same steps, for adaptive scaling.
    evaluations: (steps so far, metrics), in the order of the steps.
    curves: {name: (step, number)} of the task's curves, and of the numbers that a training function logged.
    updates: {"step", "lost", "edq"} at recorded steps, counted from 0, as in `fpsim.LostUpdates.steps`.
    parameters: the rows of `fpsim.LostUpdates.table` at the end.
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
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    updates: list[dict[str, Any]] = field(default_factory=list)
    parameters: list[dict[str, Any]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.losses)

    def __bool__(self) -> bool:
        return True  # len() would make a training without logged losses false

    def __repr__(self) -> str:
        numbers = {**self.metrics, "steps": len(self), "skipped": self.skipped, "seconds": self.seconds}
        if self.losses:
            numbers["last loss"] = self.losses[-1]
        return str(Rows([numbers]))

    def to_frame(self) -> Any:
        """Return a pandas.DataFrame with the loss and the loss scale of each step."""
        return Rows({"step": k, "loss": loss, "scale": scale} for k, (loss, scale) in self._steps()).to_frame()

    def _steps(self) -> Iterator[tuple[int, tuple[float, float | None]]]:
        # A training function may log fewer losses than its scaler has steps, or use no scaler.
        return enumerate(zip_longest(self.losses, self.scales[: len(self.losses)]))

    def plot(self) -> Any:
        """Return a figure with the loss of every step; needs matplotlib."""
        from fpsim.insight.pictures import new_axes

        picture, axes = new_axes(7.2, 3.2)
        axes.plot(range(len(self)), self.losses, linewidth=1.2)
        for step in self.skipped_steps:
            axes.axvline(step, color="0.5", linewidth=0.5, linestyle=":")
        axes.set_xlabel("step" + ("; dotted: skipped" if self.skipped_steps else ""))
        axes.set_ylabel("loss, lower is better")
        axes.set_title(", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items()), fontsize=9)
        return picture

    @property
    def skipped(self) -> int:
        """Return the number of skipped steps."""
        return len(self.skipped_steps)


class Stopped(FloatingPointError):
    """Raised if the loss rule stops the training, because the loss scale cannot fall further.

    run: the training up to this step.
    """

    def __init__(self, message: str, run: Run) -> None:
        super().__init__(message)
        self.run = run


def is_of_role(name: str, role: str) -> bool:
    """Return True if a tally belongs to a role's tensors. "error" includes gradients of activations as operands.

    >>> [is_of_role(name, "error") for name in ("error", "dgrad.dy", "wgrad.dy", "wgrad.x", "weight_grad")]
    [True, True, True, False, False]
    """
    return name == role or (role == "error" and name.endswith(".dy"))


def underflow_share(rows: Sequence[dict[str, Any]], role: str = "error") -> float:
    """Return the share of the non-zero elements of a role's tensors that rounding turned into zero.

    rows: the tallies of a recording.
    role: "weight", "activation", "error" or "weight_grad", or an operand such as "fprop.x". "error" includes the
        operands "dgrad.dy" and "wgrad.dy".

    >>> rows = [{"role": "error", "nonzero": 8, "underflow_count": 2}, {"role": "wgrad.x", "nonzero": 8}]
    >>> underflow_share(rows)
    0.25
    """
    chosen = [row for row in rows if is_of_role(row["role"], role)]
    nonzero = sum(row["nonzero"] for row in chosen)
    return sum(row["underflow_count"] for row in chosen) / nonzero if nonzero else 0.0
