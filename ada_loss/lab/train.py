"""The one training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import fpsim
from ada_loss.lab.tasks import Task
from ada_loss.layerwise import AdaLossScaled
from ada_loss.rules import LAYER_RULES, SYSTEMS, loss_rule
from ada_loss.scalers import GradScaler
from fpsim.policy import FormatLike

__all__ = ["OPTIMIZERS", "Run", "make_scaling", "train", "underflow_share"]

OPTIMIZERS = ("sgd", "adam")
HISTORY = 20  # points of the tallies' history in a run, and steps between two at least: one takes 3 ms


@dataclass(frozen=True)
class Run:
    """What came out of one training.

    metrics: on the test data. losses, scales: of every step, the loss scale before it. rows: the tallies of its sites.
    skipped: how many steps were skipped because a gradient was not finite. seconds: of training.
    history: the tallies up to a step, for some 20 steps of a long run: (steps so far, rows).
    """

    metrics: dict[str, float]
    losses: list[float]
    rows: list[dict[str, Any]]
    seconds: float
    scales: list[float]
    skipped: int
    history: list[tuple[int, list[dict[str, Any]]]] = field(default_factory=list)


def underflow_share(rows: Sequence[dict[str, Any]], role: str = "error") -> float:
    """Share of the non-zero elements of a role's tensors that became zero when they were rounded.

    >>> underflow_share([{"role": "error", "nonzero": 8, "underflow": 2}])
    0.25
    """
    chosen = [row for row in rows if row["role"] == role]
    nonzero = sum(row["nonzero"] for row in chosen)
    return sum(row["underflow"] for row in chosen) / nonzero if nonzero else 0.0


def make_scaling(method: str | float, model: nn.Module) -> tuple[GradScaler, AdaLossScaled | None]:
    """A loss scaler, and adaptive scaling attached to the quantised model where the method asks for it.

    method: "none"; a number, that scale throughout; a loss rule's name ("torch", "nnabla", ...) with its system's
    defaults; "adaptive", or a layer rule's name ("approx_range", "exact", ...), with " normal" behind it to keep
    gradients above the smallest normal number. A step with a gradient that is not finite is skipped under each of
    them, so that they are compared on one footing.
    """
    constant = 1.0
    adaptive = None
    if isinstance(method, str):
        if method in SYSTEMS and method not in ("none", "off", "static"):
            return GradScaler(method), None
        name, _, u_min = method.partition(" ")
        name = "approx_range" if name == "adaptive" else name
        if method != "none":
            if name not in LAYER_RULES or u_min not in ("", "normal"):
                known = ", ".join(["none", "a number", "adaptive", *LAYER_RULES, *SYSTEMS])
                raise ValueError(f"Unknown scaling method {method!r}. Known: {known}.")
            adaptive = AdaLossScaled(model, rule=name, u_min=u_min or "smallest")
    else:
        constant = float(method)
    return GradScaler(loss_rule("static", scale=constant, skip_overflow=True)), adaptive


def train(
    task: Task,
    fmt: FormatLike = None,
    rounding: str = "nearest_even",
    *,
    scaling: str | float = "none",
    optimizer: str = "sgd",
    epochs: int = 12,
    batch_size: int = 64,
    learning_rate: float = 0.05,
    momentum: float = 0.9,
    seed: int = 0,
    record_every: int = 0,
    progress: Callable[[int], object] | None = None,
) -> Run:
    """Train a copy of the task's model in a format, with float32 master weights; the same bits for a seed.

    The learning rate falls to zero along a cosine.

    fmt: a format for every role, a Policy, or None for plain float32. Test metrics are computed in the format too.
    scaling: of gradients, see make_scaling. optimizer: "sgd" with momentum, or "adam".
    record_every: tally each n-th call of every site; 0 records nothing. progress: called with 1 after every step.

    >>> from ada_loss.lab.tasks import digits
    >>> run = train(digits(), "bf16", epochs=1)
    >>> len(run.losses), run.metrics["accuracy"] > 0.5
    (22, True)
    """
    # float32 is a policy without roles: every run goes the same way
    model = fpsim.quantize(task.model, fmt, rounding=rounding if fmt is not None else None)
    scaler, adaptive = make_scaling(scaling, model)
    chosen = _make_optimizer(optimizer, model, learning_rate, momentum)
    x, y = task.train
    steps = epochs * -(-len(x) // batch_size)
    order = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    scales: list[float] = []
    skipped = 0
    history: list[tuple[int, list[dict[str, Any]]]] = []
    start = time.perf_counter()
    with (
        torch.random.fork_rng(devices=[]),
        adaptive or nullcontext(),
        fpsim.record(model, record_every) if record_every else nullcontext() as record,
    ):
        torch.manual_seed(seed)  # the noise of stochastic rounding
        model.train()
        for _ in range(epochs):
            for batch in torch.randperm(len(x), generator=order).split(batch_size):
                for group in chosen.param_groups:  # by hand: torch's schedules warn where the first step is skipped
                    group["lr"] = learning_rate * (1 + math.cos(math.pi * len(losses) / steps)) / 2
                chosen.zero_grad()
                loss = task.loss(model(x[batch]), y[batch])
                scales.append(scaler.get_scale())
                scaler.scale(loss).backward()
                scaler.step(chosen)
                skipped += scaler.overflowed(chosen)
                scaler.update()
                losses.append(loss.item())
                if record is not None and (len(losses) % max(HISTORY, steps // HISTORY) == 0 or len(losses) == steps):
                    history.append((len(losses), record.rows()))
                if progress is not None:
                    progress(1)
        rows = history[-1][1] if history else []
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        outputs = model(task.test[0])
        metrics = {name: metric(outputs, task.test[1]) for name, metric in task.metrics.items()}
    return Run(metrics, losses, rows, seconds, scales, skipped, history)


def _make_optimizer(name: str, model: nn.Module, learning_rate: float, momentum: float) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum)
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=learning_rate)
    raise ValueError(f"Unknown optimizer {name!r}. Known: {', '.join(OPTIMIZERS)}.")
