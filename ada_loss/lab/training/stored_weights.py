"""Lost updates of a training whose weights are stored in few bits: by an `Update`, or by rounding after each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import fpsim
from fpsim import LostUpdates, Update
from fpsim.scaling import UpdateCounts

__all__ = ["RECORD_UPDATES_EVERY", "RoundedWeights", "every_of", "steps_together", "stored"]

# To record a step takes about as long as a step of a small model. At most every tenth step is recorded, and about 100
# steps in all.
RECORD_UPDATES_EVERY = 10
MOST_RECORDED = 100


def stored(
    optimizer: torch.optim.Optimizer, update: Update, model: nn.Module, seed: int, total: int, records: bool
) -> LostUpdates | None:
    """Make the optimizer store weights and states as an `Update` has them. Returns the lost updates, if `records`.

    total: the number of steps.
    """
    quantized = fpsim.quantize_optimizer(optimizer, update, model, seed=seed)
    return fpsim.lost_updates(quantized, every_of(total)) if records else None


def every_of(total: int) -> int:
    """Return the interval of recorded steps in a training of `total` steps."""
    return max(RECORD_UPDATES_EVERY, total // MOST_RECORDED)


def steps_together(records: Sequence[LostUpdates]) -> list[dict[str, Any]]:
    """Merge the rows of several optimizers: the row of a step has the shares over all weights recorded in this step."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        for row in record.steps():
            by_step.setdefault(row["step"], []).append(row)
    return [
        {"step": step, "lost": _mean(rows, "lost", "wanted"), "edq": _mean(rows, "edq", "norm")}
        for step, rows in sorted(by_step.items())
    ]


def _mean(rows: Sequence[dict[str, Any]], name: str, weight: str) -> float | None:
    known = [row for row in rows if row[name] is not None]
    total = sum(row[weight] for row in known)
    return sum(row[name] * row[weight] for row in known) / total if total else None


class RoundedWeights:
    """Round the weights after each step of an optimizer, by `fpsim.round_parameters_`, and record lost updates.

    rows: {"step", "lost", "edq"}, as in `LostUpdates.steps`.
    """

    def __init__(self, model: nn.Module, every: int) -> None:
        self.model, self.every = model, every
        self.rows: list[dict[str, Any]] = []

    @torch.no_grad()
    def step(self, number: int, run: Callable[[], object]) -> None:
        """Run a step of the optimizer, and then round the weights."""
        if self.every == 0 or number % self.every:
            run()
            fpsim.round_parameters_(self.model)
            return
        before = [p.detach().clone() for p in self.model.parameters()]
        run()
        parameters, counts = [*self.model.parameters()], UpdateCounts()
        wanted = [p.detach() - old for p, old in zip(parameters, before, strict=True)]
        fpsim.round_parameters_(self.model)
        for p, old, intended in zip(parameters, before, wanted, strict=True):
            counts.add(UpdateCounts.of(old, p.detach(), intended))
        self.rows.append({"step": number, "lost": counts.share, "edq": counts.edq})

    def state_dict(self) -> dict[str, Any]:
        """Return the rows."""
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state."""
        self.rows = [*state["rows"]]
