"""Run operations of a native model in more bits: all of them for a reference, or some of them as a remedy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fpsim.emulation.calls import Action, Call
from fpsim.torch_internals import map_leaves, tensors_of

__all__ = ["LOW", "Widening"]

LOW = (torch.float16, torch.bfloat16)
_CASTS = frozenset("half bfloat16 to type type_as".split())
_ALL_CASTS = _CASTS | {"float", "double"}


class Widening:
    """An `edit` of a trace that runs operations in float32, and casts their results back for other operations.

    chosen: the indices of the operations; None for all of them. wide: the wide dtype, float32 or float64.
    given: the name and the dtype of each result in the unedited step, by the indices of the calls.
    gradients: the gradients of the parameters' wide copies, which no cast to the parameter's dtype has rounded.
    overflows: whether any number becomes inf when it is cast back. Then the overflow has only moved.
    """

    def __init__(
        self,
        chosen: Collection[int] | None,
        wide: torch.dtype = torch.float32,
        given: Mapping[int, tuple[str, torch.dtype]] | None = None,
    ) -> None:
        self.chosen, self.wide, self._given = chosen, wide, given or {}
        # A step that raises an error in low precision may continue in float32, with calls that `given` does not have.
        self._end = max(self._given, default=-1)
        self._low = LOW if wide is torch.float32 else (*LOW, torch.float32)
        self._casts = _CASTS if wide is torch.float32 else _CASTS | {"float"}
        self.gradients: dict[int, Tensor] = {}
        self._wide = WeakTensorKeyDictionary()  # {a tensor that is wide here: its dtype in the unedited step}
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self.overflows = False

    def __call__(
        self, index: int, kind: Call, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        out: Any
        tensors = [x for x in tensors_of((args, kwargs)) if x.is_floating_point()]
        is_move = kind.action is Action.MOVE and kind.name not in self._casts
        chosen = self.chosen is None or index in self.chosen
        # A view of a tensor that is wide here is wide too.
        if is_move and not chosen:
            chosen = any(x in self._wide for x in tensors)
        # A tensor that is written to cannot change its dtype.
        if kind.in_place and tensors and tensors[0].dtype in self._low:
            chosen = False
        is_cast = kind.name in _ALL_CASTS and bool(tensors) and bool(args) and args[0] is tensors[0]
        name, dtype = self._given.get(index, ("", None))
        before = [dtype] if name == kind.name else []
        # In the unedited step this cast returned its operand, so it was not an operation. It must not become one here,
        # because an operation is identified by its number among the operations with the same name.
        if is_cast and not name and index <= self._end:
            out = func(*args, **kwargs)
            return tensors[0] if out.is_floating_point() and out.layout is torch.strided else out
        # A cast of a wide tensor to a wide dtype loses nothing, so its result stays wide.
        if not chosen and is_cast and tensors[0] in self._wide and not _wanted(kind.name, args, kwargs, self._low):
            return self._marked(func(*args, **kwargs), tensors, before)
        # Integers are read from a wide tensor without rounding: rounding could change an index.
        if not chosen:
            if not _to_integers(kind.name, args, kwargs):
                args, kwargs = map_leaves(self._narrowed, (args, kwargs))
            return func(*args, **kwargs)
        lows = [x.dtype for x in tensors if x.dtype in self._low] + [self._wide[x] for x in tensors if x in self._wide]
        # Add the dtype that is requested by a cast, or by a call that makes a tensor from integers.
        lows += _wanted(kind.name, args, kwargs, self._low)
        device = tensors[0].device.type if tensors else "cpu"
        if torch.is_autocast_enabled(device) and not lows:
            lows = [torch.get_autocast_dtype(device)]
        if kind.name in self._casts and isinstance(args[0], Tensor) and _wanted(kind.name, args, kwargs, self._low):
            out = self._widened(args[0]) if args[0].is_floating_point() else args[0].to(self.wide)
        else:
            with torch.autocast(device, enabled=False):
                args, kwargs = map_leaves(self._widened, (args, kwargs))
                out = func(*args, **kwargs)
        return self._marked(out, tensors if is_cast else [], before or lows)

    def _marked(self, out: Any, operands: list[Tensor], before: Sequence[torch.dtype | None]) -> Any:
        """Mark a call's result with its dtype in the unedited step."""
        # A cast may return its operand here, although it was an operation with a new tensor in the unedited step.
        if any(out is x for x in operands):
            out = out.clone()
        for x in tensors_of(out):
            if before and before[0] in self._low and x.dtype is self.wide:
                self._wide[x] = before[0]
        return out

    def _note(self, key: int, gradient: Tensor) -> None:
        # A step may run several backward passes. Their gradients are added up.
        known = self.gradients.get(key)
        self.gradients[key] = gradient.detach() if known is None else known + gradient.detach()

    def _narrowed(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x not in self._wide:
            return x
        narrow = x.to(self._wide[x])
        lost = narrow.isinf() & x.isfinite()
        # Numbers far below zero may be a mask if they are not all of the tensor.
        self.overflows |= bool((lost & (x > 0)).any()) or bool(lost.all() and x.numel())
        return narrow

    def _widened(self, x: Any) -> Any:
        if isinstance(x, torch.dtype):
            return self.wide if x in self._low else x
        if not isinstance(x, Tensor) or x.dtype not in self._low:
            return x
        if not (x.is_leaf and x.requires_grad):
            return x.to(self.wide)
        # All readers of a parameter share one copy, so its hook sees their gradients added up in the wide dtype.
        if id(x) not in self._copies:
            copy = x.to(self.wide)
            if copy.requires_grad:
                copy.register_hook(partial(self._note, id(x)))
            self._copies[id(x)] = x, copy
        return self._copies[id(x)][1]


def _to_integers(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a call casts a tensor to integers."""
    if name in ("long", "int", "short", "char", "byte"):
        return True
    dtypes = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)]
    return name in ("to", "type") and bool(dtypes) and not any(d.is_floating_point for d in dtypes)


def _wanted(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], low: tuple[torch.dtype, ...] = LOW
) -> list[torch.dtype]:
    """Return the dtypes of fewer bits that a call requests."""
    named = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32}
    if name in named:
        return [d for d in (named[name],) if d in low]
    given = [*args[1:], *kwargs.values()]
    others = [x.dtype for x in given if isinstance(x, Tensor)] if name in _CASTS else []
    return [d for d in (*given, *others) if isinstance(d, torch.dtype) and d in low]
