"""Whether a forward of ours is reached behind the wrappers of other libraries.

Some keep what they found in `forward` as an attribute of the module, some in a closure; some take its `__func__` and
bind that again.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from fpsim.models.forwards import KEY, EmulatedForward, UnboundForward

__all__ = ["bound_elsewhere", "is_ours", "is_reached"]


def bound_elsewhere(model: nn.Module, originals: Iterable[nn.Module]) -> str | None:
    """The name of a module in a copy whose `forward` still runs one of the originals, if there is one."""
    known = {id(module) for module in originals}
    for name, module in model.named_modules():
        for layer in _layers(vars(module).get("forward")):
            if id(layer) in known or id(getattr(layer, "__self__", None)) in known:
                return name or type(module).__name__
    return None


def is_reached(module: nn.Module, emulated: EmulatedForward) -> bool:
    """Whether a call of the module comes there: it is `forward`, or inside of that, or kept by the module besides."""
    attributes = vars(module)
    kept = (value for name, value in attributes.items() if name != KEY and not isinstance(value, nn.Module))
    return "forward" in attributes and any(is_ours(layer, emulated) for value in kept for layer in _layers(value))


def is_ours(layer: Any, emulated: EmulatedForward) -> bool:
    function = layer.__func__ if isinstance(layer, types.MethodType) else layer
    return function is emulated or isinstance(function, UnboundForward)


def _layers(forward: Any) -> Iterator[Any]:
    """`forward`, and the functions that it may call: what it wraps, closes over, or keeps."""
    waiting, seen = [forward], set()
    while waiting:
        layer = waiting.pop()
        if not callable(layer) or isinstance(layer, type) or id(layer) in seen:
            continue
        seen.add(id(layer))
        yield layer
        if not isinstance(layer, EmulatedForward | nn.Module):
            waiting += _inside(layer)


def _inside(layer: Any) -> list[Any]:
    if isinstance(layer, types.MethodType):
        return [layer.__func__]
    if isinstance(layer, functools.partial):
        return [layer.func, *layer.args, *vars(layer).values()]
    cells = getattr(layer, "__closure__", None) or ()
    contents = [cell.cell_contents for cell in cells if cell != types.CellType()]
    return [*contents, *getattr(layer, "__dict__", {}).values()]
