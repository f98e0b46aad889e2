"""A task: a model, data, a loss and metrics, made from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ada_loss.lab.directions import goals_of
from fpsim.checks import did_you_mean, require_callable, require_mapping, shown

__all__ = ["Task", "accuracy", "is_pair", "made_of", "seeded", "settled_by", "trained_with", "types_of_pair"]


# Iterables whose items are not batches.
NO_BATCHES = (tuple, list, dict, Tensor, np.ndarray, str, bytes, bytearray, range, set, frozenset)


@dataclass(frozen=True)
class Task:
    """A model with its data, loss and metrics, ready to be trained.

    Args:
        name: the name of the task, for errors and titles.
        model: the model; it is copied before it is trained.
        train, test: inputs and targets, two tensors of equal length; or an iterable of batches that can be iterated
            repeatedly, such as a torch DataLoader, where each batch is two tensors.
        loss: a function from outputs and targets to a 0-d tensor.
        metrics: {name: a function of outputs and targets that returns a float}; tables show the first metric. The
            outputs of all batches of an iterable are concatenated first.
        goal: "minimize" or "maximize" for the first metric, or {metric: "minimize" or "maximize"}. A goal is needed
            only if a metric's name does not tell: "accuracy" and "bleu" should be large, "loss" and "mse" small.
        augment: a function that changes the inputs of each training batch, and may draw torch's random numbers; None
            leaves the inputs unchanged.
        play: a function for a model that learns from its own samples. It takes the forward pass of the engine that
            draws, and inputs and targets of a training batch; it returns the inputs and targets from which the model
            learns. With None the model learns from the batch itself.
        curves: {name: a function of outputs and targets of a training batch that returns a float}, measured in each
            step; the mean over the steps is a metric too.

    Raises:
        TypeError: for data of another kind.
        ValueError: for tensors of different lengths, or without elements.
    """

    name: str
    model: nn.Module
    train: tuple[Tensor, Tensor] | Iterable[Any]
    test: tuple[Tensor, Tensor] | Iterable[Any]
    loss: Callable[[Tensor, Tensor], Tensor]
    metrics: dict[str, Callable[[Tensor, Tensor], float]]
    augment: Callable[[Tensor], Tensor] | None = None
    goal: str | Mapping[str, str] | None = None
    play: Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    curves: Mapping[str, Callable[[Tensor, Tensor], float]] = field(default_factory=dict)

    @property
    def goals(self) -> dict[str, str]:
        """Return the goal as {metric: "minimize" or "maximize"}. Raises ValueError or TypeError for another goal."""
        return goals_of(self.goal, next(iter(self.metrics), None))

    def __post_init__(self) -> None:
        self._check_words()
        # The goal of a misspelt metric would never be used, and the verdict would be missing for no visible reason.
        for metric in self.goals:
            known = [*self.metrics, *self.curves]
            if metric not in known:
                hint = did_you_mean(metric, known)
                raise ValueError(
                    f"The task {self.name!r} states a goal for {shown(metric)}, which is not one of its metrics.{hint} "
                    f"Known: {', '.join(map(str, known))}."
                )
        for part, data in (("train", self.train), ("test", self.test)):
            if isinstance(data, Iterable) and not isinstance(data, NO_BATCHES):
                if isinstance(data, Iterator):
                    raise TypeError(
                        f"{part} of the task {self.name!r} is {type(data).__name__}, which one pass exhausts. "
                        f"Expected: a DataLoader, or another object whose __iter__ begins again."
                    )
                continue
            if isinstance(data, list) and data and all(isinstance(batch, tuple | list) for batch in data):
                # A list of batches, which can be iterated again.
                continue
            if not is_pair(data):
                raise TypeError(
                    f"{part} of the task {self.name!r} is {types_of_pair(data)}. Expected: two tensors, "
                    f"inputs and targets, or an iterable of batches such as a DataLoader."
                )
            inputs, targets = data
            if not 0 < len(inputs) == len(targets):
                raise ValueError(
                    f"{part} of the task {self.name!r} has {len(inputs)} inputs and {len(targets)} targets. "
                    f"Expected: the same number of both, 1 or more."
                )

    def _check_words(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name={shown(self.name)} is not a string. Expected: the task's name.")
        if not self.name.isprintable() or not self.name.strip():
            raise ValueError(f"name={shown(self.name)} is not a name. Expected: printable characters, not all blank.")
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"model of the task {self.name!r} is {shown(self.model)}. Expected: a torch.nn.Module.")
        require_callable("loss", self.loss, "torch.nn.functional.mse_loss")
        if self.augment is not None:
            require_callable("augment", self.augment, "lambda x: x + 0.1 * torch.randn_like(x)")
        if self.play is not None:
            require_callable("play", self.play, "lambda forward, x, y: (x, forward(x).argmax(-1))")
        for part in ("metrics", "curves"):
            measures: Any = getattr(self, part)
            require_mapping(part, measures, "{'accuracy': accuracy}")
            for name, measure in measures.items():
                if not isinstance(name, str) or not callable(measure):
                    raise TypeError(
                        f"{part} has {shown(name)}: {shown(measure)}. Expected: names of functions of outputs and "
                        f"targets."
                    )
        if both := [name for name in self.curves if name in self.metrics]:
            raise ValueError(
                f"{shown(both[0])} is a metric and a curve of the task {self.name!r}. Give each its own name."
            )


def types_of_pair(data: Any) -> str:
    """Return types in words, for an error message: of both parts of a pair, or of an object that is not a pair."""
    is_two = isinstance(data, tuple | list) and len(data) == 2
    return " and ".join(type(part).__name__ for part in data) if is_two else type(data).__name__


def is_pair(data: Any) -> TypeGuard[tuple[Tensor, Tensor]]:
    """Return True if data are two tensors."""
    return isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the share of the samples whose largest output is the target's; NaN outputs are wrong."""
    # argmax counts NaN as the largest output, which could be the output of the target's class.
    right = (outputs.argmax(dim=1) == targets) & ~outputs.isnan().any(dim=1)
    return float(right.float().mean())


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """Create a model with initial weights from the seed, without changing the state of torch's random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


Make = TypeVar("Make", bound=Callable[..., Task])


def trained_with(**options: Any) -> Callable[[Make], Make]:
    """Attach defaults of the options of `train` to a task's function; a sweep's task_options override the defaults."""

    def with_options(make_task: Make) -> Make:
        make_task.options = options  # type: ignore[attr-defined]
        return make_task

    return with_options


def made_of(argument: str) -> Callable[[Make], Make]:
    """Let a task's name contain the path of the user's own file or folder, as in "chars=book.txt".

    argument: the name of the argument of the task's function that takes the path.
    """

    def with_argument(make_task: Make) -> Make:
        make_task.made_of = argument  # type: ignore[attr-defined]
        return make_task

    return with_argument


def settled_by(**kinds: type) -> Callable[[Make], Make]:
    """Let a task's name contain arguments of its function, as in "cifar10,depth=56".

    kinds: the type of each argument, int or str.
    """

    def with_settings(make_task: Make) -> Make:
        make_task.settings = kinds  # type: ignore[attr-defined]
        return make_task

    return with_settings
