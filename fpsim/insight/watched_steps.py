"""What an optimizer's steps did to the weights of a model that is watched: which did not move, and what was lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from fpsim.insight.lost_updates import LostUpdates, unrecorded
from fpsim.insight.suggesting_updates import Stepped
from fpsim.models.optimizers import quantized_optimizer_of
from fpsim.tensors.spec import holds_numbers

__all__ = ["WatchedSteps"]

MOST_NAMED = 8  # parameters in a line


class WatchedSteps:
    """The steps of an optimizer that follow watched calls of a model.

    last: the last of them, on which an update is tried.
    updates: what was lost where the optimizer is quantised, unless that is recorded already.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, every: int) -> None:
        self.last: Stepped | None = None
        self._before: dict[str, Tensor] = {}
        self._moved: dict[str, bool] = {}  # of parameters that had a gradient
        self._left: dict[int, tuple[int, int]] = {}  # of weights with a gradient: how many stayed the same, of how many
        quantized = None if optimizer is None else quantized_optimizer_of(optimizer)
        self.updates = [LostUpdates(q, every) for q in unrecorded([] if quantized is None else [quantized])]

    def detach(self) -> None:
        """Record no longer what is lost."""
        for lost in self.updates:
            lost.detach()

    def begin(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        """Keep the parameters before a step, as the model sees them."""
        quantized = quantized_optimizer_of(optimizer)
        for name, p in parameters.items():
            self._before[name] = (p if quantized is None else quantized.seen_by_the_model(p)).detach().clone()

    def end(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], step: int
    ) -> Iterator[tuple[str, Tensor, nn.Parameter]]:
        """The names of the parameters that were kept, with what they were and are; count what the step did to them.

        step: the watched call before it.
        """
        kept, self._before = self._before, {}
        if not kept:
            return
        gradients: dict[Tensor, Tensor] = {}
        left = of = 0
        for name, before in kept.items():
            parameter = parameters[name]
            yield name, before, parameter
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided or not holds_numbers(before):
                continue
            gradients[parameter] = gradient.detach().clone()
            had, same = gradient != 0, before == parameter.detach()
            of, left = of + int(had.sum()), left + int((had & same).sum())
            if bool(had.any()):
                self._moved[name] = self._moved.get(name, False) or not bool(same.all())
        self.last = Stepped(step, optimizer, gradients)
        self._left[step] = left, of

    def never_moved(self) -> list[str]:
        """The names of the parameters that had a gradient, not all zero, and that no step changed at all."""
        return [name for name, has_moved in self._moved.items() if not has_moved]

    def lines(self) -> list[str]:
        """What was found, in words."""
        lines = []
        for step, (left, of) in self._left.items():
            if left:
                lines.append(
                    f"Step {step} left {100 * left / of:.3g} % of the weights that had a gradient as they were."
                )
        if still := self.never_moved():
            more = f" and {len(still) - MOST_NAMED} more" if len(still) > MOST_NAMED else ""
            lines.append(f"No watched step has changed {', '.join(still[:MOST_NAMED])}{more}.")
        for lost in self.updates:
            if lost.share is not None:
                lines.append(f"{100 * lost.share:.3g} % of the updates were lost, stored as {lost.words}.")
        return lines
