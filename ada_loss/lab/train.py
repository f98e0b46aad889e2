"""The one training loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import fpsim
from ada_loss.lab.tasks import Task
from fpsim.policy import FormatLike

__all__ = ["Run", "train"]


@dataclass(frozen=True)
class Run:
    """What came out of one training: the metrics on the test data, the loss of every step, the tallies of its sites."""

    metrics: dict[str, float]
    losses: list[float]
    rows: list[dict[str, Any]]
    seconds: float


def train(
    task: Task,
    fmt: FormatLike = None,
    rounding: str = "nearest_even",
    *,
    epochs: int = 12,
    batch_size: int = 64,
    learning_rate: float = 0.05,
    momentum: float = 0.9,
    seed: int = 0,
    record_every: int = 0,
    progress: Callable[[int], object] | None = None,
) -> Run:
    """Train a copy of the task's model in a format, with float32 master weights; the same bits for a seed.

    SGD with momentum; the learning rate falls to zero along a cosine.

    fmt: a format for every role, a Policy, or None for plain float32. Test metrics are computed in the format too.
    record_every: tally each n-th call of every site; 0 records nothing. progress: called with 1 after every step.

    >>> from ada_loss.lab.tasks import digits
    >>> run = train(digits(), "bf16", epochs=1)
    >>> len(run.losses), run.metrics["accuracy"] > 0.5
    (22, True)
    """
    # float32 is a policy without roles: every run goes the same way
    model = fpsim.quantize(task.model, fmt, rounding=rounding if fmt is not None else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum)
    x, y = task.train
    steps = epochs * -(-len(x) // batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = torch.Generator().manual_seed(seed)
    losses = []
    start = time.perf_counter()
    with (
        torch.random.fork_rng(devices=[]),
        fpsim.record(model, record_every) if record_every else nullcontext() as record,
    ):
        torch.manual_seed(seed)  # the noise of stochastic rounding
        model.train()
        for _ in range(epochs):
            for batch in torch.randperm(len(x), generator=order).split(batch_size):
                optimizer.zero_grad()
                loss = task.loss(model(x[batch]), y[batch])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
                if progress is not None:
                    progress(1)
        rows = record.rows() if record is not None else []
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        outputs = model(task.test[0])
        metrics = {name: metric(outputs, task.test[1]) for name, metric in task.metrics.items()}
    return Run(metrics, losses, rows, seconds)
