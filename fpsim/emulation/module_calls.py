"""What stands in the place of a module's call: those who have something to do around it, whatever the call raises.

Hooks will not do: torch calls a forward hook after an error, and not after a KeyboardInterrupt.
"""

# In this package, for `casts` looks for the code that called past the frames of the package.

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from fpsim.torch_modes import CALL_SLOT, call_inside, module_called

__all__ = ["Around", "around_calls", "not_around_calls", "who_is_around"]

# Runs a call: around(call, args, kwargs) returns call(*args, **kwargs).
Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _Surrounded:
    """A module's call with those around it. Copies of the module are called as if this were not there.

    arounds: who runs the call, the outermost last.
    before: what stood there before.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.arounds: list[Around] = []
        self.before: Callable[..., Any] | None = getattr(module, CALL_SLOT)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self.module()
        module = module_called() or own
        assert module is not None
        if module is not own:  # a shallow copy, such as a replica of nn.DataParallel
            return call_inside(module)(*args, **kwargs)
        call = call_inside(module) if self.before is None else self.before
        for around in (*self.arounds,):
            call = partial(_run, around, call)
        return call(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def _run(around: Around, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return around(call, args, kwargs)


def around_calls(module: nn.Module, around: Around) -> None:
    """Have calls of `module` run by `around`, outside of those who run them already, until `not_around_calls`."""
    attributes = vars(module)
    while True:  # another thread may take the slot away meanwhile
        surrounded = attributes.setdefault(CALL_SLOT, _Surrounded(module))
        if not isinstance(surrounded, _Surrounded):
            surrounded = attributes[CALL_SLOT] = _Surrounded(module)
        if around not in surrounded.arounds:
            surrounded.arounds.append(around)
        if attributes.get(CALL_SLOT) is surrounded:
            return


def not_around_calls(module: nn.Module, around: Around) -> None:
    """End that; does nothing where it has ended."""
    attributes = vars(module)
    surrounded = attributes.get(CALL_SLOT)
    if not isinstance(surrounded, _Surrounded):
        return
    if around in surrounded.arounds:
        surrounded.arounds.remove(around)
    if not surrounded.arounds:
        if surrounded.before is None:
            attributes.pop(CALL_SLOT, None)
        else:
            attributes[CALL_SLOT] = surrounded.before


def who_is_around(module: nn.Module) -> list[Around]:
    """Who runs the calls of `module`, in the order in which they came."""
    surrounded = vars(module).get(CALL_SLOT)
    return [*surrounded.arounds] if isinstance(surrounded, _Surrounded) else []
