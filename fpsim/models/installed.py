"""Install the emulation of a module under its policy, uninstall it, and find it."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from fpsim.border import require_module
from fpsim.emulation.scope import Listeners
from fpsim.models.computed_weights import adopt, release
from fpsim.models.forwards import KEY, EmulatedForward, UnboundForward, leave
from fpsim.policies.policy import Policy, describe

__all__ = ["bound_elsewhere", "emulated_forward", "emulated_forwards", "install", "is_ours", "is_reached", "uninstall"]


def install(module: nn.Module, name: str, policy: Policy, listeners: Listeners) -> None:
    """Let `module` run under its policy."""
    emulated = vars(module).get(KEY)
    # A wrapper of another library may still call the forward of a model that was dequantised. This forward is reused,
    # because a second forward around it would round twice.
    if emulated is not None and is_reached(module, emulated):
        emulated.renew(name, policy, listeners)
    else:
        emulated = EmulatedForward(module, name, policy, listeners)
        module.forward = emulated
        vars(module)[KEY] = emulated
    module.extra_repr = _EmulatedRepr(module)  # type: ignore[method-assign]
    vars(module)["__prepare_scriptable__"] = _NoScript()
    adopt(module)


def uninstall(module: nn.Module) -> None:
    """Undo `install`, even if the forward was wrapped since."""
    attributes = vars(module)
    emulated = attributes[KEY]
    for name, value in list(attributes.items()):
        if name == KEY or not is_ours(value, emulated):
            continue
        if name == "forward" and emulated.inner is None:
            del attributes[name]
        else:
            attributes[name] = emulated.true_forward(module)
    for name in ("extra_repr", "__prepare_scriptable__"):
        attributes.pop(name, None)
    leave(module)
    release(module)
    if is_reached(module, emulated):
        emulated.renew(emulated.name, None, emulated.listeners)
    else:
        del attributes[KEY]


def emulated_forward(module: nn.Module) -> EmulatedForward | None:
    """Return the emulation of this one module, behind any wrappers; None for a module that is not quantised."""
    emulated = vars(module).get(KEY)
    return emulated if emulated is not None and emulated.policy is not None and is_reached(module, emulated) else None


def emulated_forwards(model: nn.Module) -> Iterator[tuple[nn.Module, EmulatedForward]]:
    """Yield the quantised modules inside `model`, and their emulations. Raises TypeError if `model` is not a module."""
    require_module(model)
    for module in model.modules():
        emulated = emulated_forward(module)
        if emulated is not None:
            yield module, emulated


class _EmulatedRepr:
    """Replaces a module's `extra_repr`, and adds the module's formats to it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> str:
        own = type(self.module).extra_repr(self.module)
        emulated = vars(self.module)[KEY]
        words = f"fpsim: {describe(emulated.specs, emulated.products, emulated.stored)}"
        return f"{own}, {words}" if own else words


class _NoScript:
    """An attribute that torch.jit.script looks up in a module, and calls."""

    def __call__(self) -> Any:
        raise NotImplementedError(
            "torch.jit.script reached a quantised model, whose rounding TorchScript cannot express. Expected: "
            "torch.compile and torch.export. Script the model that fpsim.dequantize(model) returns."
        )


# Whether an emulated forward is reached behind the wrappers of other libraries


def bound_elsewhere(model: nn.Module, originals: Iterable[nn.Module]) -> str | None:
    """Name a copied module whose `forward` still runs one of the original modules; None if there is none."""
    known = {id(module) for module in originals}
    for name, module in model.named_modules():
        for layer in _layers(vars(module).get("forward")):
            if id(layer) in known or id(getattr(layer, "__self__", None)) in known:
                return name or type(module).__name__
    return None


def is_reached(module: nn.Module, emulated: EmulatedForward) -> bool:
    """Return whether a call of the module reaches its emulation: as `forward`, inside it, or in another attribute."""
    attributes = vars(module)
    kept = (value for name, value in attributes.items() if name != KEY and not isinstance(value, nn.Module))
    return "forward" in attributes and any(is_ours(layer, emulated) for value in kept for layer in _layers(value))


def is_ours(layer: Any, emulated: EmulatedForward) -> bool:
    """Return whether a function is this emulation, or made from its `__func__`."""
    function = layer.__func__ if isinstance(layer, types.MethodType) else layer
    return function is emulated or isinstance(function, UnboundForward)


def _layers(forward: Any) -> Iterator[Any]:
    """Yield `forward`, and the functions that it may call: functions that it wraps, closes over, or keeps."""
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
        # `__wrapped__` may name the function that was replaced: the wrapper calls `func`, which calls its argument.
        return [layer.func, *layer.args, *(x for name, x in vars(layer).items() if name != "__wrapped__")]
    cells = getattr(layer, "__closure__", None) or ()
    contents = [cell.cell_contents for cell in cells if cell != types.CellType()]
    return [*contents, *getattr(layer, "__dict__", {}).values()]
