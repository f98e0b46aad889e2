"""Threads that a forward starts: what computes there is not emulated, and one warning says so."""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fpsim.emulation.arguments import tensors_in
from fpsim.emulation.calls import Action, call_of
from fpsim.emulation.scope import Listeners, Scope, active

__all__ = ["watch_threads"]

_warned: weakref.WeakSet[Listeners] = weakref.WeakSet()
_lock = threading.Lock()
_POOLS = {
    ThreadPoolExecutor: ("submit",),
    ThreadPool: ("apply_async", "_map_async", "imap", "imap_unordered"),  # all others call these
}


@functools.cache
def watch_threads() -> None:
    """From here on, warn once per model if emulated code computes in another thread that it starts or gives work to.

    It is not emulated: sites are counted in the order of calls, which two threads do not have. Modules of a quantised
    model enter their own emulation in whichever thread they are called.
    """
    start = threading.Thread.start
    of_pools = {pool.__module__ for pool in _POOLS}  # whose threads live on, and are given work by these methods

    @functools.wraps(start)
    def started(self: Any) -> None:
        run = self.run
        watched = _watched(run)
        if watched is not run and getattr(getattr(self, "_target", None), "__module__", None) not in of_pools:

            def run_once() -> None:
                del self.run  # a cycle
                watched()

            self.run = run_once
        start(self)

    threading.Thread.start = started  # type: ignore[method-assign]
    for pool, names in _POOLS.items():
        for name in names:
            setattr(pool, name, _giving_watched(getattr(pool, name)))


def _giving_watched(method: Any) -> Any:
    """A method of a pool that is given a function first."""

    @functools.wraps(method)
    def give(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return method(self, _watched(fn), *args, **kwargs)

    return give


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which warns when it computes, if emulated code asks for it here."""
    emulation = active.emulation
    if emulation is None or emulation.scope.rounds_nothing or emulation.scope.listeners in _warned:
        return function
    return functools.partial(_run, _Unemulated(emulation.scope), function)


def _run(mode: TorchFunctionMode, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with mode:
        return function(*args, **kwargs)


class _Unemulated(TorchFunctionMode):
    """Warns of the first operation that computes with numbers outside of any emulation."""

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
        with _lock:  # two threads may come here at once
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
