"""Entering the emulation: for a module, for a block of code, and for what a checkpoint runs again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.utils.weak import TensorWeakRef

from fpsim.emulation.checkpoints import watch_checkpoints
from fpsim.emulation.marks import note_inference_write
from fpsim.emulation.mode import Emulation
from fpsim.emulation.scope import NO_SPECS, Listeners, Scope, active, make_scope
from fpsim.emulation.steps import watch_steps
from fpsim.policy import FormatLike
from fpsim.recipes import as_policy_of
from fpsim.torch_internals import current_graph_task

__all__ = ["Position", "computing_a_weight", "emulate", "entered"]


@contextmanager
def entered(scope: Scope, has_names: bool = True) -> Iterator[Emulation]:
    """Run under `scope`: in the mode that is active in this thread, or in a new one.

    has_names: whether torch's name of the format may stand for it, in a new one.
    """
    emulation: Emulation | None = active.emulation
    histories = scope.listeners.histories
    is_outermost = emulation is None or emulation.scope.listeners is not scope.listeners
    if is_outermost and len(histories) and torch.is_grad_enabled() and current_graph_task() < 0:
        histories.begin_step()
    if emulation is not None:
        previous, emulation.scope = emulation.scope, scope
        try:
            yield emulation
        finally:
            emulation.scope = previous
        return
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise NotImplementedError(
            "torch.jit.trace came to emulated code, and would see no rounding. Possible: torch.compile and "
            "torch.export. Trace the model that fpsim.dequantize(model) gives, or export the quantised one."
        )
    with _activated(Emulation(scope, has_names=has_names)) as emulation:
        yield emulation


@contextmanager
def _activated(emulation: Emulation) -> Iterator[Emulation]:
    watch_checkpoints(Position)
    watch_steps()
    note_inference_write()  # what happened outside was not seen
    active.emulation = emulation
    try:
        with emulation:
            yield emulation
    finally:
        active.emulation = None


class Position:
    """Where a forward pass is: its scope with the sites counted so far, and the operands that are rounded already."""

    def __init__(self, emulation: Emulation) -> None:
        scope, is_grad = emulation.scope, torch.is_grad_enabled()
        self.scope = Scope(
            scope.name, scope.specs, scope.float32, scope.listeners, scope.weights, scope.wide, scope.products
        )
        self.counts, self.aliases = dict(scope.counts), emulation.aliases
        self.has_names, self.names = emulation.has_names, set(emulation.names)
        self.operands = {
            TensorWeakRef(x): {key: copy for key, copy in copies.items() if copy[1].requires_grad <= is_grad}
            for x, copies in emulation.rounded_operands()
        }

    @contextmanager
    def entered(self) -> Iterator[Emulation]:
        """Run from here on as the first time."""
        self.scope.counts = dict(self.counts)
        emulation = Emulation(self.scope, self.aliases, self.has_names)
        emulation.names |= self.names
        emulation.take_over(self.operands)
        with _activated(emulation):
            yield emulation


@contextmanager
def computing_a_weight() -> Iterator[None]:
    """Run in float32, whatever the scope around: from master values to a weight that is rounded where it is used."""
    emulation: Emulation | None = active.emulation
    if emulation is None:
        yield
        return
    around = emulation.scope
    emulation.scope = Scope(around.name, NO_SPECS, (), around.listeners)
    try:
        yield
    finally:
        emulation.scope = around


@contextmanager
def emulate(fmt: FormatLike, rounding: str | Mapping[str, str] | None = None) -> Iterator[None]:
    """Compute every torch call of the block as hardware with format `fmt` would, forward and backward.

    The twin of `torch.autocast`: put the forward pass and the loss inside, the backward pass and the optimizer's step
    outside. Operands that come from outside are rounded, each result is rounded once, and gradients on their way back.
    `fmt` is a format for every role or a Policy (without overrides: there are no modules here). What a parametrisation
    computes counts as activations here; `quantize` knows it for weights.

    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> with emulate("e4m3fn"):
    ...     y = x / 3
    >>> y
    tensor([0.3438, 0.6875, 1.0000])
    """
    policy = as_policy_of(fmt)
    if policy.overrides:
        raise ValueError("emulate() knows no modules, and the policy has overrides. Use quantize(model, policy).")
    if policy.products is not None and policy.products.is_delayed:
        raise ValueError(
            "emulate() remembers nothing from step to step, and the policy has operands with delayed scaling. Use "
            "quantize(model, policy), or the same formats with scale_rule='amax'."
        )
    if rounding is not None:
        policy = policy.with_rounding(rounding)
    with entered(make_scope("", policy, Listeners())):
        yield
