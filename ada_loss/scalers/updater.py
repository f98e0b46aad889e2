"""Updater: a whole training step in one call, repeated after an overflow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ada_loss.checks import COUNT, NOT_NEGATIVE, POSITIVE, STEPS, require
from ada_loss.scalers.grad_scaler import GradScaler
from ada_loss.scalers.gradients import all_reduce_, join_overflows_, parameters_of
from fpsim.checks import require_iterable, shown
from fpsim.scaling import require_optimizer

__all__ = ["Updater"]


class Updater:
    """Run a whole training step in one call. After an overflow, retry it with new data and a smaller scale.

    This is NNabla's `DynamicLossScalingUpdater` with any scaler. `update` sets the gradients to zero, adds up the
    gradients of `accumulate` losses, sums them over `process_group`, unscales and clips them, adds the weight decay,
    steps, and lets the rule adjust.

    Args:
        optimizer: the optimizer, whose parameters are trained.
        loss_fn: a function from the data that `data_feeder` returns to a loss.
        data_feeder: a function without arguments that returns the data of the next loss.
        scaler: any GradScaler.
        accumulate: the number of losses whose gradients are summed. For the mean, divide each loss by this number.
        weight_decay: the factor with which the weights are added to the gradients.
        process_group: None for one process, `torch.distributed.group.WORLD` for all. Every rank must have the same
            parameters and an equal rule; then all see the same gradients, and skip, retry and adjust together.
        clip: the global norm to which the unscaled gradients are clipped.
        max_retries: the largest number of retries of a skipped step.
        grads: the parameters whose gradients are summed over `process_group`; None for all. Each rank keeps its own
            gradients of the other parameters; if one of these gradients overflows on one rank, all ranks retry.

    Raises:
        ValueError: for an invalid value.
        TypeError: for a function that is not callable.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.tensor([2.0]))
    >>> data = iter([3.0e38, 1.0])
    >>> scaler, sgd = GradScaler("nnabla", scale=8.0), torch.optim.SGD([weight], lr=0.5)
    >>> updater = Updater(sgd, lambda x: (x * weight).sum(), lambda: next(data), scaler)
    >>> updater.update(), weight.detach(), scaler.get_scale()
    (tensor(2.), tensor([1.5000]), 4.0)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        loss_fn: Callable[[Any], Tensor],
        data_feeder: Callable[[], Any],
        scaler: GradScaler,
        accumulate: int = 1,
        weight_decay: float | None = None,
        process_group: dist.ProcessGroup | None = None,
        clip: float | None = None,
        max_retries: int = 100,
        grads: Iterable[Tensor] | None = None,
    ) -> None:
        for name, function in (("loss_fn", loss_fn), ("data_feeder", data_feeder)):
            if not callable(function) or (isinstance(function, type) and issubclass(function, nn.Module)):
                raise TypeError(
                    f"{name} is {shown(function)}. It must be callable: a retry calls it again. "
                    f"Give a function; for an iterator, lambda: next(iterator)."
                )
        require_optimizer(optimizer)
        if not isinstance(scaler, torch.amp.GradScaler | GradScaler):
            raise TypeError(f"scaler is {shown(scaler)}. Expected: an ada_loss.GradScaler.")
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(f"process_group is {shown(process_group)}. Expected: a torch.distributed.ProcessGroup.")
        require("accumulate", accumulate, STEPS, "Updater", 1)
        require("weight_decay", weight_decay, NOT_NEGATIVE.or_none(), "Updater", None)
        require("clip", clip, POSITIVE.or_none(), "Updater", None)
        require("max_retries", max_retries, COUNT, "Updater", 100)
        self.optimizer, self.loss_fn, self.data_feeder, self.scaler = optimizer, loss_fn, data_feeder, scaler
        self.accumulate, self.weight_decay, self.clip = accumulate, weight_decay, clip
        self.process_group, self.max_retries = process_group, max_retries
        self.grads = None if grads is None else self._summed(grads)

    def update(self) -> Tensor | None:
        """Run one step. Returns the unscaled sum of its losses; None if all tries overflowed and no weight changed."""
        for _ in range(1 + self.max_retries):
            loss = self._backward()
            self.scaler.unscale_(self.optimizer)
            if self.clip is not None:
                self.scaler.clip_(self.optimizer, self.clip)
            if self.weight_decay is not None:
                self._decay(self.weight_decay)
            self.scaler.step(self.optimizer)
            # `overflowed` is called before update(), which deletes the results of this step's checks.
            skipped = self.scaler.rule.skips and self.scaler.overflowed(self.optimizer)
            self.scaler.update()
            if not skipped:
                return loss
        return None

    def _backward(self) -> Tensor:
        self.optimizer.zero_grad()
        total: Tensor | None = None
        for _ in range(self.accumulate):
            loss = self.loss_fn(self.data_feeder())
            self.scaler.scale(loss).backward()
            total = loss.detach() if total is None else total + loss.detach()
        if self.process_group is not None:
            self._sum_over(self.process_group)
        assert total is not None
        return total

    def _sum_over(self, group: dist.ProcessGroup) -> None:
        if self.grads is None:
            all_reduce_(parameters_of(self.optimizer), group)
            return
        all_reduce_(self.grads, group)
        # A sum carries an overflow to all ranks. An overflow in a gradient that a rank keeps for itself has to be
        # shared, because all ranks must skip the same steps.
        if self.scaler.rule.skips:
            summed = set(map(id, self.grads))
            join_overflows_((p for p in parameters_of(self.optimizer) if id(p) not in summed), self.grads, group)

    def _summed(self, grads: Iterable[Tensor]) -> list[Tensor]:
        """Check `grads` and return it as a list."""
        listed = require_iterable("grads", grads, "list(model.body.parameters())")
        if not listed:
            raise ValueError("grads is empty, and nothing would be summed. Omit it for all gradients.")
        known = set(map(id, parameters_of(self.optimizer)))
        for given in listed:
            if id(given) not in known:
                what = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else shown(given)
                raise ValueError(
                    f"grads holds {what}, which is no parameter of the optimizer. Expected: some of its parameters, "
                    f"such as list(model.body.parameters())."
                )
        if self.process_group is None:
            raise ValueError(
                "grads was given without process_group: one process sums nothing. Give process_group, or omit grads."
            )
        return listed

    def _decay(self, rate: float) -> None:
        for parameter in parameters_of(self.optimizer):
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise ValueError(
                    f"weight_decay={rate} was given with a sparse gradient. It goes with dense gradients only. "
                    f"Leave it out, or set sparse=False in the layer."
                )
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach(), alpha=rate)
