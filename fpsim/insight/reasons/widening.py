"""Operations of a native model in float32: all of them for a reference, or some of them as a remedy."""

from __future__ import annotations

from collections.abc import Callable, Collection
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
_TO_FLOAT32 = frozenset("float to type".split())


class Widening:
    """An `edit` of a trace that runs operations in float32, and brings what others read of them back.

    chosen: the indices of the operations; None for all of them.
    gradients: those of the parameters' float32 copies, which no cast to the parameter's dtype has rounded.
    overflows: whether anything that is brought back becomes inf: then the overflow has only moved.
    """

    def __init__(self, chosen: Collection[int] | None) -> None:
        self.chosen = chosen
        self.gradients: dict[int, Tensor] = {}
        self._wide = WeakTensorKeyDictionary()  # {a tensor that is float32 here: the dtype that it had}
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self.overflows = False

    def __call__(
        self, index: int, kind: Call, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        out: Any
        tensors = [x for x in tensors_of((args, kwargs)) if x.is_floating_point()]
        is_move = kind.action is Action.MOVE and kind.name not in _CASTS
        chosen = self.chosen is None or index in self.chosen
        if is_move and not chosen:  # a view of what is float32 here is so too
            chosen = any(x in self._wide for x in tensors)
        if kind.in_place and tensors and tensors[0].dtype in LOW:
            chosen = False  # the tensor that is written to cannot change its dtype
        if not chosen and kind.name in _TO_FLOAT32 and tensors and tensors[0] in self._wide:
            if not _wanted(kind.name, args, kwargs):  # a cast of what is float32 here, to float32: nothing is lost
                out = func(*args, **kwargs)
                return out.clone() if out is tensors[0] else out
        if not chosen:
            args, kwargs = map_leaves(self._narrowed, (args, kwargs))
            return func(*args, **kwargs)
        lows = [x.dtype for x in tensors if x.dtype in LOW] + [self._wide[x] for x in tensors if x in self._wide]
        lows += _wanted(kind.name, args, kwargs)  # by a cast, or by what makes a tensor of integers
        device = tensors[0].device.type if tensors else "cpu"
        if torch.is_autocast_enabled(device) and not lows:
            lows = [torch.get_autocast_dtype(device)]
        if kind.name in _CASTS and tensors and _wanted(kind.name, args, kwargs):
            out = self._widened(tensors[0])
            out = out.clone() if out is tensors[0] else out
        else:
            with torch.autocast(device, enabled=False):
                args, kwargs = map_leaves(self._widened, (args, kwargs))
                out = func(*args, **kwargs)
        for x in tensors_of(out):
            if lows and x.dtype is torch.float32:
                self._wide[x] = lows[0]
        return out

    def _note(self, key: int, gradient: Tensor) -> None:
        self.gradients[key] = gradient.detach()

    def _narrowed(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x not in self._wide:
            return x
        narrow = x.to(self._wide[x])
        lost = narrow.isinf() & x.isfinite()
        self.overflows |= bool((lost & (x > 0)).any()) or bool(lost.all() and x.numel())  # the rest may be a mask
        return narrow

    def _widened(self, x: Any) -> Any:
        if isinstance(x, torch.dtype):
            return torch.float32 if x in LOW else x
        if not isinstance(x, Tensor) or x.dtype not in LOW:
            return x
        if not (x.is_leaf and x.requires_grad):
            return x.float()
        if id(x) not in self._copies:
            copy = x.float()
            if copy.requires_grad:
                copy.register_hook(partial(self._note, id(x)))
            self._copies[id(x)] = x, copy
        return self._copies[id(x)][1]


def _wanted(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.dtype]:
    """The small dtypes that a call asks for."""
    named = {"half": torch.float16, "bfloat16": torch.bfloat16}
    if name in named:
        return [named[name]]
    given = [*args[1:], *kwargs.values()]
    others = [x.dtype for x in given if isinstance(x, Tensor)] if name in _CASTS else []
    return [d for d in (*given, *others) if isinstance(d, torch.dtype) and d in LOW]
