"""Entering the emulation: for a module, for a block of code, and for what a checkpoint runs again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef

from fpsim.emulation.casts import is_float32_island
from fpsim.emulation.checkpoints import watch_checkpoints
from fpsim.emulation.marks import forget_everywhere, note_inference_write
from fpsim.emulation.mode import Emulation, TracedEmulation
from fpsim.emulation.own_functions import watch_own_code
from fpsim.emulation.roundings import Copy, values_of
from fpsim.emulation.scope import NO_SPECS, Listeners, Scope, active, make_scope
from fpsim.emulation.steps import watch_steps
from fpsim.emulation.threads import watch_threads
from fpsim.policies.policy import FormatLike
from fpsim.policies.recipes import as_policy
from fpsim.torch_internals import tell_of_swaps
from fpsim.torch_modes import any_mode, keeps_grad_mode, modes, push_mode, take_off, watch_bodies
from fpsim.undoing import Block, Undo

__all__ = ["Position", "computing_a_weight", "emulate", "enter", "run_entered", "take_off_leftovers"]


def enter(scope: Scope, undo: Undo) -> None:
    """Run what follows under `scope`: in the mode that is active in this thread, or in a new one."""
    emulation: Emulation | None = active.emulation
    if emulation is None or emulation.scope.listeners is not scope.listeners:
        scope.listeners.histories.begin_call()
    if emulation is None:
        emulation = _new_emulation(scope, True)
        _activate(emulation, undo)
        undo.by(partial(_warn_of_inner, emulation, scope))
        return
    around = emulation.scope
    undo.by(partial(_go_back, emulation, scope, around))
    scope.weights, scope.is_float64 = around.weights, around.is_float64
    emulation.scope = scope


def _warn_of_inner(emulation: Emulation, scope: Scope) -> None:
    """Warn where a block that began inside of this one has not ended, and computes in float32 from here on."""
    if emulation.scope is not scope:
        warnings.warn(
            "A block of fpsim.emulate was left before one that began inside of it, and that one rounds nothing from "
            "here on. A block holds for its thread: coroutines that take turns within theirs compute in each other's "
            "formats. Leave blocks in the opposite order of their begin, and await nothing inside of them.",
            stacklevel=2,
        )


def _go_back(emulation: Emulation, scope: Scope, previous: Scope) -> None:
    if emulation.scope is scope:  # else it ends late
        emulation.scope = previous


def run_entered(
    scope: Scope,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    has_names: bool = True,
) -> Any:
    """`function(*args, **kwargs)` under `scope`. Nothing stays behind, whatever is raised and wherever."""
    emulation: Emulation | None = active.emulation
    if emulation is None or emulation.scope.listeners is not scope.listeners:
        scope.listeners.histories.begin_call()
    if emulation is not None:
        previous = emulation.scope
        try:
            emulation.scope = scope
            return function(*args, **kwargs)
        finally:
            emulation.scope = previous
    emulation = _new_emulation(scope, has_names)
    return _run_in(emulation, function, args, kwargs)


@keeps_grad_mode
def _run_in(
    emulation: Emulation, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    try:
        active.emulation = emulation
        push_mode(emulation)
        return function(*args, **kwargs)
    finally:
        active.emulation, emulation.scope, emulation.has_names = None, _NOTHING, False
        try:
            take_off(emulation)
        except BaseException:  # a signal came before it, or within it
            take_off(emulation)
            raise


def _new_emulation(scope: Scope, has_names: bool) -> Emulation:
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise NotImplementedError(
            "torch.jit.trace reached emulated code, and would see no rounding. Expected: torch.compile and "
            "torch.export. Trace the model that fpsim.dequantize(model) gives, or export the quantised one."
        )
    watch_checkpoints(Position)
    watch_own_code(_run_in)
    watch_steps()
    _watch_torch()
    note_inference_write()  # what happened outside was not seen
    take_off_leftovers()
    if active.stand_ins is not None:
        return TracedEmulation(active.stand_ins, scope, has_names)
    return Emulation(scope, has_names=has_names)


@cache
def _watch_torch() -> None:
    watch_bodies()
    tell_of_swaps(forget_everywhere)
    watch_threads()


def _activate(emulation: Emulation, undo: Undo) -> None:
    undo.by(partial(_end, emulation))
    active.emulation = emulation
    push_mode(emulation)


def _end(emulation: Emulation) -> None:
    if active.emulation is emulation:
        active.emulation = None
    emulation.scope, emulation.has_names = _NOTHING, False
    take_off(emulation)


def take_off_leftovers() -> None:
    """Take off what an interrupted call has left on torch's stack of modes, and say so.

    torch takes a mode off and puts it back around each of its functions in Python (`_pop_mode_temporarily`). A signal
    that is handled while it does so lets it put the mode back as late as the traceback is forgotten, after we have
    taken it off.
    """
    leftovers = [mode for mode in modes() if _is_leftover(mode)] if any_mode() else []
    if not leftovers:
        return
    for mode in leftovers:
        take_off(mode)
    warnings.warn(
        f"An interrupted call of fpsim has left {len(leftovers)} of its modes on torch's stack. They have changed no "
        f"number since, but made each call of torch slower. They are taken off.",
        stacklevel=2,
    )


def _is_leftover(mode: TorchFunctionMode) -> bool:
    if isinstance(mode, Emulation):
        return mode is not active.emulation
    return getattr(mode, "has_ended", False)


_NOTHING = Scope("", NO_SPECS, (), Listeners())  # of a mode that has ended: wherever it still lies, it rounds nothing


class Position:
    """Where a forward pass is: its scope with the sites counted so far, and the operands that are rounded already."""

    def __init__(self, emulation: Emulation) -> None:
        scope, is_grad = emulation.scope, torch.is_grad_enabled()
        self.scope = scope.again(scope.weights, scope.wide, scope.is_float64)
        self.counts, self.aliases = dict(scope.counts), emulation.aliases
        self.has_names, self.names = emulation.has_names, set(emulation.names)
        self.is_island = is_float32_island(emulation.autocast_depth)
        self.operands = {
            TensorWeakRef(x): copies if is_grad else values_of(copies)  # a reentrant checkpoint has a graph of its own
            for x, copies in emulation.rounded_operands()
        }

    def copies_of(self, x: Tensor) -> dict[Any, Copy] | None:
        """The rounded copies of this tensor."""
        return next((copies for reference, copies in self.operands.items() if reference() is x), None)

    def enter(self, undo: Undo) -> None:
        """Run from here on as the first time, until it is undone."""
        self.scope.counts = dict(self.counts)
        emulation = Emulation(self.scope, self.aliases, self.has_names)
        emulation.names |= self.names
        emulation.take_over(self.operands)
        emulation.autocast_depth -= self.is_island  # a checkpoint switches autocast off again, in a block of its own
        watch_checkpoints(Position)
        watch_own_code(_run_in)
        note_inference_write()
        _activate(emulation, undo)


@contextmanager
def computing_a_weight() -> Iterator[None]:
    """Run in float32, whatever the scope around: from master values to a weight that is rounded where it is used."""
    emulation: Emulation | None = active.emulation
    if emulation is None:
        yield
        return
    around = emulation.scope
    scope = Scope(around.name, NO_SPECS, (), around.listeners)
    try:
        emulation.scope = scope
        yield
    finally:
        if emulation.scope is scope:
            emulation.scope = around


def emulate(fmt: FormatLike, rounding: str | Mapping[str, str] | None = None) -> AbstractContextManager[None]:
    """Compute every torch call of the block as hardware with format `fmt` would, forward and backward.

    The twin of `torch.autocast`: put the forward pass and the loss inside, the backward pass and the optimizer's step
    outside. Operands that come from outside are rounded, each result is rounded once, and gradients on their way back.
    What a parametrisation computes counts as activations here; `quantize` knows it for weights.

    Args:
        fmt: a format for every role, or a Policy without overrides: there are no modules here.
        rounding: as in `quantize`.

    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> with emulate("e4m3fn"):
    ...     y = x / 3
    >>> y
    tensor([0.3438, 0.6875, 1.0000])
    """
    return Block(partial(_emulate, fmt, rounding))


def _emulate(fmt: FormatLike, rounding: str | Mapping[str, str] | None, undo: Undo) -> None:
    policy = as_policy(fmt)
    if policy.overrides:
        raise ValueError("emulate() knows no modules, and the policy has overrides. Use quantize(model, policy).")
    if policy.products is not None and policy.products.is_delayed:
        raise ValueError(
            "emulate() remembers nothing from step to step, and the policy has operands with delayed scaling. Use "
            "quantize(model, policy), or the same formats with scale_rule='amax'."
        )
    if policy.cached is not None:
        raise ValueError(
            "emulate() knows no modules, and the policy has cache=, which is that of the attention of a model. Use "
            "quantize(model, policy)."
        )
    if rounding is not None:
        policy = policy.with_rounding(rounding)
    take_off_leftovers()
    enter(make_scope("", policy, Listeners()), undo)
