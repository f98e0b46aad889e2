"""Optimizer steps inside of an emulation: they remain float32 steps on the master weights."""

from __future__ import annotations

import inspect
import types
import warnings
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fpsim.emulation.scope import Scope, active

__all__ = ["Step", "note_emulated", "watch_steps"]


class Step:
    """Running step of an optimizer.

    frame: the frame of the code that runs the step.
    scope: the scope of the emulation when the step began.
    """

    def __init__(self, frame: Any, scope: Scope) -> None:
        self._frame, self._scope, self._is_paused = frame, scope, False

    def is_running(self, scope: Scope) -> bool:
        """True if a call in this scope belongs to the step, and not to a model that its closure runs."""
        # The frame is checked, because no hook runs after a step that raises an error.
        return scope is self._scope and not self._is_paused and _is_executing(self._frame)

    def paused(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return the closure of a step, wrapped so that emulation is on while it computes the loss again."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._is_paused = True
            try:
                return closure(*args, **kwargs)
            finally:
                self._is_paused = False

        return run


_emulated: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def note_emulated(optimizer: Optimizer) -> None:
    """Exclude an optimizer from the hooks of `watch_steps`, because it emulates each of its operations itself."""
    _emulated.add(optimizer)


@cache
def watch_steps() -> None:
    """Register hooks, once in a process, that leave steps of optimizers inside of an emulation in float32."""
    register_optimizer_step_pre_hook(_begin)
    register_optimizer_step_post_hook(_end)


def _begin(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # `write` is set in the scope of an optimizer in whose step each operation is rounded.
    emulation = active.emulation
    if emulation is None or emulation.scope.write is not None or optimizer in _emulated:
        return None
    warnings.warn(
        "An optimizer's step ran inside of fpsim.emulate(...). It stays a float32 step on the master weights. Put it "
        "outside of the block; fpsim.quantize_optimizer(optimizer, update) stores weights and states in few bits.",
        stacklevel=3,
    )
    emulation.step = step = Step(_running_step(), emulation.scope)
    is_closure = [callable(x) for x in args]
    if not any(is_closure) and not callable(kwargs.get("closure")):
        return None
    args = tuple(step.paused(x) if wraps else x for x, wraps in zip(args, is_closure, strict=True))
    return args, {name: step.paused(x) if name == "closure" and callable(x) else x for name, x in kwargs.items()}


def _end(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if active.emulation is not None and active.emulation.scope.write is None:
        active.emulation.step = None
        active.emulation.forget_operands()


# The code of the wrapper that torch puts around `step`; a subclass's own step may have any name and file.
_STEP_WRAPPER = next(c for c in Optimizer.profile_hook_step.__code__.co_consts if isinstance(c, types.CodeType))


def _running_step() -> Any:
    """Return the frame of the wrapper around the optimizer's `step`; called by a hook that the wrapper runs."""
    frame: Any = inspect.currentframe()
    while frame.f_back is not None and frame.f_code is not _STEP_WRAPPER:
        frame = frame.f_back
    return frame


def _is_executing(frame: Any) -> bool:
    """True if a frame has not returned or raised yet. If it has, its variables are dropped."""
    # `clear` raises for a frame that is still executing: there is no other public way to ask.
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False
