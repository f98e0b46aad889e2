"""Entering the emulation: for a module, for a block of code, and for the recomputation of a checkpoint.

Threads that a forward starts are not emulated, and one warning says so.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import cache, lru_cache, partial
from multiprocessing.pool import ThreadPool
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef

from fpsim.emulation.arguments import tensors_in
from fpsim.emulation.calls import Action, call_of
from fpsim.emulation.casts import is_float32_island
from fpsim.emulation.checkpoints import watch_checkpoints
from fpsim.emulation.marks import forget_everywhere, note_inference_write
from fpsim.emulation.mode import Emulation, TracedEmulation
from fpsim.emulation.own_functions import watch_own_code
from fpsim.emulation.roundings import Copy, values_of
from fpsim.emulation.scope import NO_SPECS, Listeners, Scope, active, make_scope
from fpsim.emulation.steps import watch_steps
from fpsim.policies.policy import FormatLike
from fpsim.policies.recipes import as_policy
from fpsim.torch_internals import tell_of_swaps
from fpsim.torch_modes import any_mode, keeps_grad_mode, modes, push_mode, take_off, watch_bodies
from fpsim.undoing import Block, Undo

__all__ = ["Position", "computing_a_weight", "emulate", "enter", "run_entered", "take_off_leftovers"]

_warned: weakref.WeakSet[Listeners] = weakref.WeakSet()
_lock = threading.Lock()
_POOLS = {
    ThreadPoolExecutor: ("submit",),
    ThreadPool: ("apply_async", "_map_async", "imap", "imap_unordered"),  # all other methods call these
}


@functools.cache
def watch_threads() -> None:
    """Patch threads to warn, once per model, if emulated code computes in a thread that it starts or gives work to.

    Modules of a quantised model enter their own emulation in the thread that calls them.
    """
    # Threads get a warning instead of emulation: sites are numbered in the order of calls, which threads do not fix.
    start = threading.Thread.start
    # Threads of pools outlive the call that starts them: in pools, each task is watched instead of the thread.
    of_pools = {pool.__module__ for pool in _POOLS}

    @functools.wraps(start)
    def started(self: Any) -> None:
        run = self.run
        watched = _watched(run)
        if watched is not run and getattr(getattr(self, "_target", None), "__module__", None) not in of_pools:

            def run_once() -> None:
                # The attribute and this closure refer to each other, and would keep the thread's arguments alive.
                del self.run
                watched()

            self.run = run_once
        start(self)

    threading.Thread.start = started  # type: ignore[method-assign]
    for pool, names in _POOLS.items():
        for name in names:
            setattr(pool, name, _giving_watched(getattr(pool, name)))


def _giving_watched(method: Any) -> Any:
    """Wrap a pool's method, whose first argument is a function, so that this function is watched."""

    @functools.wraps(method)
    def give(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return method(self, _watched(fn), *args, **kwargs)

    return give


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`; if the caller is emulated code, return a wrapper that warns when `function` computes."""
    emulation = active.emulation
    if emulation is None or emulation.scope.rounds_nothing or emulation.scope.listeners in _warned:
        return function
    return functools.partial(_run, _Unemulated(emulation.scope), function)


def _run(mode: TorchFunctionMode, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with mode:
        return function(*args, **kwargs)


class _Unemulated(TorchFunctionMode):
    """Mode that warns of the first operation that computes with numbers outside of any emulation."""

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.name, self.listeners = scope.name, weakref.ref(scope.listeners)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if active.emulation is None and not torch.compiler.is_compiling() and self._is_due():
            call = call_of(func)
            if call.action is Action.COMPUTE and any(map(_is_of_numbers, tensors_in((*args, *kwargs.values())))):
                self._warn(call.name)
        return func(*args, **kwargs)

    def _is_due(self) -> bool:
        listeners = self.listeners()
        return listeners is not None and listeners not in _warned

    def _warn(self, operation: str) -> None:
        # Two threads may reach this point at once.
        with _lock:
            if not self._is_due():
                return
            _warned.add(self.listeners())  # type: ignore[arg-type]
        warnings.warn(
            f"{operation} ran in thread {threading.current_thread().name!r}, to which emulated code at "
            f"{self.name or 'the top level'} gave work. Operations in another thread are not emulated: they compute in "
            f"float32, forward and backward, except inside of the modules of a quantised model. Compute in the thread "
            f"that calls the model, or make the function's code a module's forward.",
            stacklevel=3,
        )


def _is_of_numbers(x: Tensor) -> bool:
    return x.is_floating_point()


def enter(scope: Scope, undo: Undo) -> None:
    """Activate `scope` in the mode that is active in this thread, or in a new mode."""
    emulation: Emulation | None = active.emulation
    # A call of a model begins here, unless one of its own modules calls another.
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
    """Warn if a block that began inside of this one has not ended: from here on the inner block rounds nothing."""
    if emulation.scope is not scope:
        warnings.warn(
            "A block of fpsim.emulate was left before one that began inside of it, and that one rounds nothing from "
            "here on. A block holds for its thread: coroutines that take turns within theirs compute in each other's "
            "formats. Leave blocks in the opposite order of their begin, and await nothing inside of them.",
            stacklevel=2,
        )


def _go_back(emulation: Emulation, scope: Scope, previous: Scope) -> None:
    # The scope stays if this block ends late, after the block around it.
    if emulation.scope is scope:
        emulation.scope = previous


def run_entered(
    scope: Scope,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    has_names: bool = True,
) -> Any:
    """Run `function(*args, **kwargs)` under `scope`. State is restored after any exception, at any point."""
    # Like `enter`, but without an `Undo`: this runs in each call of each module.
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
        # The mode is disarmed first: if torch puts it back later, after a signal, it rounds nothing.
        active.emulation, emulation.scope, emulation.has_names = None, _NOTHING, False
        try:
            take_off(emulation)
        # A signal arrived before `take_off`, or within it.
        except BaseException:
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
    # Writes to inference tensors outside of the emulation were not counted.
    note_inference_write()
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
    """Remove modes that an interrupted call has left on torch's stack, and warn."""
    # torch pops a mode and pushes it again around each of its Python functions (`_pop_mode_temporarily`). If a signal
    # arrives meanwhile, torch pushes the mode only when the traceback is collected, after we have removed the mode.
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


# The scope of modes that have ended: such a mode rounds nothing, even if it is still on a stack.
_NOTHING = Scope("", NO_SPECS, (), Listeners())


class Position:
    """Position of a forward pass: its scope with the sites counted so far, and the operands rounded already."""

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
        """Return the rounded copies of this tensor."""
        return next((copies for reference, copies in self.operands.items() if reference() is x), None)

    def enter(self, undo: Undo) -> None:
        """Activate the emulation at this position until `undo` ends it."""
        self.scope.counts = dict(self.counts)
        emulation = Emulation(self.scope, self.aliases, self.has_names)
        emulation.names |= self.names
        emulation.take_over(self.operands)
        # A checkpoint switches autocast off again, in a block of its own.
        emulation.autocast_depth -= self.is_island
        watch_checkpoints(Position)
        watch_own_code(_run_in)
        note_inference_write()
        _activate(emulation, undo)


@contextmanager
def computing_a_weight() -> Iterator[None]:
    """Compute a weight from master values, in float32, inside of the block; the weight is rounded where it is used."""
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

    This is the twin of `torch.autocast`: put the forward pass and the loss inside, the backward pass and the
    optimizer's step outside. Operands that come from outside are rounded, each result is rounded once, and each
    gradient is rounded on its way back. Results of a parametrisation count as activations here; `quantize` knows that
    they are weights.

    Args:
        fmt: a format for every role, or a Policy without overrides, since overrides need modules.
        rounding: as in `quantize`.

    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> with emulate("e4m3fn"):
    ...     y = x / 3
    >>> y
    tensor([0.3438, 0.6875, 1.0000])
    """
    return Block(partial(_emulate, fmt, rounding))


def _emulate(fmt: FormatLike, rounding: str | Mapping[str, str] | None, undo: Undo) -> None:
    # A format's name always means the same format: all its blocks share one check of the arguments and the plans of
    # functions. A Policy may hold mappings, which can change between two blocks.
    if isinstance(fmt, str) and (rounding is None or isinstance(rounding, str)):
        scope = _scope_of_name(fmt, rounding)
    else:
        scope = _scope_of(fmt, rounding)
    take_off_leftovers()
    enter(scope.of_block(Listeners()), undo)


def _scope_of(fmt: FormatLike, rounding: str | Mapping[str, str] | None) -> Scope:
    """Check the arguments of `emulate`, and return the scope of its blocks."""
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
    if policy.fused:
        raise ValueError(
            "emulate() knows no modules, and the policy has fused=True, which rounds what leaves one. Use "
            "quantize(model, policy)."
        )
    if rounding is not None:
        policy = policy.with_rounding(rounding)
    return make_scope("", policy, Listeners())


_scope_of_name = lru_cache(maxsize=64)(_scope_of)
