"""A task: a model, data, a loss and metrics, made from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

__all__ = ["Task", "accuracy", "trained_with"]


@dataclass(frozen=True)
class Task:
    """What is trained.

    name: for errors and titles.
    model: is copied before it is trained.
    train, test: inputs and targets, two tensors of one length each.
    loss: takes outputs and targets, and gives a 0-d tensor.
    metrics: {name: a function of outputs and targets that gives a float}; the first is the one that tables show.
    Raises TypeError for data that are no two tensors, ValueError for tensors of different or no length.
    """

    name: str
    model: nn.Module
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    metrics: dict[str, Callable[[Tensor, Tensor], float]]

    def __post_init__(self) -> None:
        for part, data in (("train", self.train), ("test", self.test)):
            is_pair = isinstance(data, tuple | list) and len(data) == 2
            if not is_pair or not all(isinstance(t, Tensor) for t in data):
                came = " and ".join(type(t).__name__ for t in data) if is_pair else type(data).__name__
                raise TypeError(
                    f"{part} of the task {self.name!r} came as {came}. Possible: two tensors, inputs and targets. "
                    f"Put batches together with torch.cat."
                )
            inputs, targets = data
            if not 0 < len(inputs) == len(targets):
                raise ValueError(
                    f"{part} of the task {self.name!r} came with {len(inputs)} inputs and {len(targets)} targets. "
                    f"Possible: the same number of both, 1 or more."
                )


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Share of the samples whose largest output is the target's; NaN outputs are wrong."""
    right = (outputs.argmax(dim=1) == targets) & ~outputs.isnan().any(dim=1)
    return float(right.float().mean())


Make = TypeVar("Make", bound=Callable[..., Task])


def trained_with(**options: Any) -> Callable[[Make], Make]:
    """Give a task's function its own defaults for the options of `train`; a sweep's task_options override them."""

    def with_options(make_task: Make) -> Make:
        make_task.options = options  # type: ignore[attr-defined]
        return make_task

    return with_options
