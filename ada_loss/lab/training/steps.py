"""What a training step is made of: the optimizer, the learning rate, the backward pass; and the evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ada_loss.lab.tasks import Task
from ada_loss.lab.training.batches import Batches, TensorBatches
from ada_loss.lab.training.options import TrainOptions
from ada_loss.scalers import GradScaler

__all__ = ["EVALUATED", "backward", "evaluate", "learning_rate_at", "make_optimizer"]

EVALUATED = 256  # samples at once

Forward = Callable[[Tensor], Tensor]


def make_optimizer(options: TrainOptions, model: nn.Module) -> torch.optim.Optimizer:
    """torch's optimizer of the model's parameters."""
    common: dict[str, Any] = {"lr": options.learning_rate, "weight_decay": options.weight_decay}
    if options.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), momentum=options.momentum, **common)
    return (torch.optim.Adam if options.optimizer == "adam" else torch.optim.AdamW)(model.parameters(), **common)


def learning_rate_at(options: TrainOptions, step: int, total: int) -> float:
    """The learning rate of a step, counted from 0, of `total` steps.

    >>> [learning_rate_at(TrainOptions(learning_rate=8.0, schedule="linear", warmup=2), step, 4) for step in range(4)]
    [4.0, 8.0, 8.0, 4.0]
    """
    return options.learning_rate * _rate(options.schedule, options.warmup, step, total)


def _rate(schedule: str, warmup: int, step: int, total: int) -> float:
    """The learning rate of a step over the largest."""
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    share = (step - warmup) / max(total - warmup, 1)
    return (1 + math.cos(math.pi * share)) / 2 if schedule == "cosine" else 1 - share


def backward(
    task: Task,
    forward: Forward,
    scaler: GradScaler,
    x: Tensor,
    y: Tensor,
    micro_batches: int,
    measured: dict[str, float] | None = None,
) -> float:
    """Add the scaled gradients of a batch to the parameters, part by part; gives the loss of the batch.

    forward: the model, or its forward pass in real float16.
    x, y: the inputs and the targets of the batch.
    micro_batches: the number of parts.
    measured: gets the numbers of the task's curves.
    """
    total, parts = 0.0, min(micro_batches, len(x))
    for inputs, targets in zip(x.tensor_split(parts), y.tensor_split(parts)):
        outputs = forward(inputs)
        loss = task.loss(outputs, targets)
        if micro_batches > 1:
            loss = loss * (len(inputs) / len(x))
        scaler.scale(loss).backward()
        total += loss.item()
        if measured is not None:
            for name, measure in task.curves.items():
                share = len(inputs) / len(x)
                measured[name] = measured.get(name, 0.0) + share * float(measure(outputs.detach(), targets))
    return total


def evaluate(
    task: Task, model: nn.Module, forward: Forward, data: Batches, seed: int, cuda_devices: Sequence[str]
) -> dict[str, float]:
    """The task's metrics on its test data, computed in the format of the model, which is left in training mode.

    forward: the model, or its forward pass in real float16.
    data: for the test; of an iterable of batches the outputs of all are put together.
    seed, cuda_devices: of the noise of the evaluation, which leaves that of the training as it was.
    """
    model.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=cuda_devices):
        torch.manual_seed(seed)
        if isinstance(data, TensorBatches):
            outputs, targets = torch.cat([forward(part) for part in data.inputs.split(EVALUATED)]), data.targets
        else:
            pairs = [(forward(x), y) for x, y in data.epoch(0)]
            outputs, targets = (torch.cat(parts) for parts in zip(*pairs))
        metrics = {name: float(metric(outputs, targets)) for name, metric in task.metrics.items()}
    model.train()
    return metrics
