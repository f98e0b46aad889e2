"""Threads that a forward starts: what computes there is not emulated, and one warning says so."""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fpsim.emulation.arguments import tensors_in
from fpsim.emulation.calls import Action, call_of
from fpsim.emulation.scope import Listeners, Scope, active

__all__ = ["watch_threads"]

_warned: weakref.WeakSet[Listeners] = weakref.WeakSet()


@functools.cache
def watch_threads() -> None:
    """From here on, what computes in a thread that emulated code starts, or gives work to, warns, once for a model.

    It is not emulated: sites are counted in the order of calls, which two threads do not have. Modules of a quantised
    model enter their own emulation in whichever thread they are called.
    """
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit

    @functools.wraps(start)
    def started(self: Any) -> None:
        if getattr(getattr(self, "_target", None), "__module__", None) != ThreadPoolExecutor.__module__:
            self.run = _watched(self.run)  # a pool's own threads are given work by `submit`
        start(self)

    @functools.wraps(submit)
    def submitted(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return submit(self, _watched(fn), *args, **kwargs)

    threading.Thread.start = started  # type: ignore[method-assign]
    ThreadPoolExecutor.submit = submitted  # type: ignore[method-assign]


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
