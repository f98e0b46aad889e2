"""Rollouts of reinforcement learning: samples drawn from the policy in their own format, and importance weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ada_loss.lab.tasks.policy_gradient import WEIGHTS
from ada_loss.lab.tasks.task import Task
from ada_loss.lab.training.format_schedule import FormatSchedule, FormatSwitch, as_schedule, quantized
from ada_loss.lab.training.native import in_float16, is_native, unquantized
from fpsim.checks import did_you_mean, shown

__all__ = ["ROLLOUT", "WEIGHTS_KEY", "Rollout", "Sampler", "as_rollout"]

ROLLOUT = "rollout"  # the key of a mapping in the list of formats, in addition to "format"
FORMAT, WEIGHTS_KEY = "format", "weights"
EXPECTED = "Expected: a format, or {'format': 'recipe:fp8_tile', 'weights': 'token'}"


@dataclass(frozen=True)
class Rollout:
    """Format and importance weights of rollouts.

    fmt: the format of the engine that draws samples, as `fpsim.quantize` takes it, or a schedule; None for the
        trainer's format.
    weights: the importance weights in the trainer's loss: "none", "token" or "truncated"; see `policy_gradient`.
    """

    fmt: Any = None
    weights: str = "none"


def as_rollout(given: Any) -> Rollout:
    """Return the rollout that a user wrote as a format, or as a mapping with "format", "weights" or both.

    The format is not checked here. Raises ValueError for unknown weights, and for a mapping that also has other keys.

    >>> as_rollout("e4m3fn").weights, as_rollout({"weights": "token"}).fmt is None
    ('none', True)
    >>> as_rollout({"format": "fp16", "weights": "tokens"})
    Traceback (most recent call last):
    ValueError: Unknown weights 'tokens' of rollouts. Did you mean 'token'? Known: none, token, truncated.
    """
    if isinstance(given, Rollout):
        given = {FORMAT: given.fmt, WEIGHTS_KEY: given.weights}
    # A policy is a mapping too, whose keys are roles.
    if not isinstance(given, Mapping) or not {FORMAT, WEIGHTS_KEY} & {*given}:
        return Rollout(given)
    if others := [name for name in given if name not in (FORMAT, WEIGHTS_KEY)]:
        raise ValueError(
            f"A rollout has {', '.join(map(shown, others))} in addition to its format or weights. {EXPECTED}; the "
            f"format may be a mapping."
        )
    weights = given.get(WEIGHTS_KEY, Rollout.weights)
    if weights not in WEIGHTS:
        hint = did_you_mean(weights, WEIGHTS)
        raise ValueError(f"Unknown weights {shown(weights)} of rollouts.{hint} Known: {', '.join(WEIGHTS)}.")
    return Rollout(given.get(FORMAT), weights)


class Sampler:
    """Draw samples with a copy of the model in the rollouts' format; before each draw it gets the trainer's weights.

    task: a task with a `play`.
    schedule: the trainer's formats, for rollouts without a format.
    """

    def __init__(
        self, task: Task, schedule: FormatSchedule, rollout: Rollout, device: str, container: torch.dtype
    ) -> None:
        if task.play is None:
            raise ValueError(
                f"The task {task.name!r} draws no samples, and a rollout was given: {shown(rollout)}. Use the task "
                f"'rl' or a Task with play=, or leave the rollout out."
            )
        self.task, self._play = weighted(task, rollout.weights), task.play
        own = schedule if rollout.fmt is None else as_schedule(rollout.fmt)
        self.is_native = is_native(own.stages[0].fmt)
        # A copy is used, because the trainer's model is recorded, has hooks, and keeps the state of delayed scaling.
        copy: nn.Module = unquantized(task.model) if self.is_native else quantized(task.model, own)
        self.model = copy.to(device, container).eval()
        self._forward = in_float16(self.model, device) if self.is_native else self.model
        self._switch = FormatSwitch(self.model, own)

    def enter(self, step: int, total: int) -> None:
        """Switch to the format of a step, if the schedule has several formats."""
        self._switch.enter(step, total)

    def draw(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a batch for the trainer, with the current weights of its model."""
        # Only the weights' values are copied: the copy of the model keeps its format and the state of its delayed
        # scaling.
        with torch.no_grad():
            ours, theirs = ([*m.parameters(), *m.buffers()] for m in (self.model, model))
            for mine, other in zip(ours, theirs, strict=True):
                mine.copy_(other)
            return self._play(self._forward, x, y)


def weighted(task: Task, weights: str) -> Task:
    """Return the task with the named importance weights in its loss."""
    if weights == Rollout.weights:
        return task
    # A user's loss need not take importance weights. The signature of a loss tells whether it takes them.
    if WEIGHTS_KEY not in inspect.signature(task.loss).parameters:
        raise ValueError(
            f"The loss of the task {task.name!r} takes no weights, and {weights!r} were given. Expected: a loss of "
            f"outputs, targets and weights=, as ada_loss.lab.tasks.policy_gradient.policy_gradient is one."
        )
    loss: Any = task.loss  # which takes weights, as its signature says
    return replace(task, loss=partial(loss, weights=weights))
