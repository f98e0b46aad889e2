"""What a task is: a model, data, a loss and metrics, made from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

__all__ = ["Task", "accuracy", "trained_with"]


@dataclass(frozen=True)
class Task:
    """What is trained. `loss` takes outputs and targets; so does each metric, and gives a float."""

    name: str
    model: nn.Module
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    metrics: dict[str, Callable[[Tensor, Tensor], float]]


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Share of the samples whose largest output is the target's; NaN outputs are wrong."""
    right = (outputs.argmax(dim=1) == targets) & ~outputs.isnan().any(dim=1)
    return float(right.float().mean())


Make = TypeVar("Make", bound=Callable[..., Task])


def trained_with(**options: Any) -> Callable[[Make], Make]:
    """Give a task's function its own defaults for the options of `train`; a sweep's task_options win over them."""

    def with_options(make_task: Make) -> Make:
        make_task.options = options  # type: ignore[attr-defined]
        return make_task

    return with_options
