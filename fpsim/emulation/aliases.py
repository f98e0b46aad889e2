"""Aliases: tensors in the memory of a parameter or a buffer, in which what is written arrives where it belongs.

`w[0]`, `w.detach()` and `w.data` lie in the memory of the master weight. Code that reads them wants numbers of the
format; code that writes to them wants the parameter to change. So each view of a parameter exists twice: as a view of
its rounded copy, and as a view of its own memory. Which of them the code holds, and where the other one is, is kept
here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fpsim.autograd import is_plain
from fpsim.emulation.arguments import tensors_in
from fpsim.emulation.calls import Call
from fpsim.emulation.marks import (
    WIDE,
    format_of,
    is_roundable,
    is_state,
    is_view_of_weight,
    mark,
    mark_as_state,
    mark_as_view_of_weight,
    mark_as_weight,
    writes_to,
)
from fpsim.emulation.operands import Rounds
from fpsim.torch_internals import is_traced, share_storage

__all__ = ["Alias", "Aliases", "note_write", "view_of_master", "write_to_master"]


class Alias(NamedTuple):
    """What is known of one tensor.

    base: the parameter or buffer.
    own: the same view of the base's own memory, where the tensor is one of the rounded copy; None where it is its own.
    rounded: the same view of the rounded copy, where the tensor lies in the base's own memory and that is known.
    state: of the base when `rounded` was made, as `Aliases.state_of` says it.
    """

    base: Tensor
    own: Tensor | None = None
    rounded: Tensor | None = None
    state: Any = 0


class Aliases:
    """The aliases that one emulation knows; it keeps none of them alive."""

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()
        self._writes = WeakTensorKeyDictionary()  # {base: writes through `.data`, which counts for itself}

    def of(self, x: Tensor) -> Alias | None:
        """What is known of this tensor."""
        return self._known.get(x) if self._known.data else None

    def add(self, x: Tensor, alias: Alias) -> None:
        """Know this tensor."""
        self._known[x] = alias

    def state_of(self, x: Tensor) -> Any:
        """What changes whenever the memory of a tensor is written to, through whichever alias."""
        alias = self.of(x)
        base = x if alias is None else alias.base
        unseen = self._writes.get(base, 0) if self._writes.data else 0
        return (writes_to(base), unseen) if unseen else writes_to(base)

    def note_write(self, x: Tensor) -> None:
        """The base of this tensor may have been written to where its own counter does not see it."""
        alias = self.of(x)
        if alias is not None:
            self._writes[alias.base] = self._writes.get(alias.base, 0) + 1


def note_write(emulation: Any, x: Tensor) -> None:
    """Somebody wrote to `x`, which may be an alias."""
    emulation.aliases.note_write(x)


def view_of_master(
    emulation: Any, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A view of a parameter or a buffer: of the rounded copy where gradients flow, else of the memory itself.

    NotImplemented for what is no such view: the call makes a copy, or the tensor cannot be looked into.
    """
    x, aliases = args[0], emulation.aliases
    if not is_roundable(x) or format_of(x) == WIDE or not (is_plain(x) or is_traced(x)):
        return NotImplemented
    alias = aliases.of(x)
    base, memory = (x, x) if alias is None else (alias.base, x if alias.own is None else alias.own)
    if is_state(x):
        out = call(func, args, kwargs)
        for view in tensors_in(out):
            if share_storage(view, x):
                mark_as_state(view)
                aliases.add(view, Alias(base))
        return out
    rounded = x if alias is not None and alias.own is not None else emulation.operand(x, Rounds.ALL)
    if rounded is x and (alias is None or alias.own is None):  # weights are not rounded
        out = call(func, args, kwargs)
        _add_all(aliases, out, x, [Alias(base)] * sum(1 for _ in tensors_in(out)))
        return _as_weights(emulation, out)
    with torch.no_grad():
        of_memory = func(memory, *args[1:], **kwargs)
    if not all(share_storage(view, memory) for view in tensors_in(of_memory)):
        return NotImplemented
    if torch.is_grad_enabled() and rounded.requires_grad and call.name not in ("detach", "data"):
        out = call(func, (rounded, *args[1:]), kwargs)
        emulation.carry_marks(out, [rounded], None, None)
        _add_all(aliases, out, rounded, [Alias(base, own=view) for view in tensors_in(of_memory)])
        return _as_weights(emulation, out, has_role=False)
    with torch.no_grad():
        of_copy = func(rounded.detach(), *args[1:], **kwargs)
        emulation.carry_marks(of_copy, [rounded], None, None)
    state = aliases.state_of(base)
    known = [Alias(base, rounded=view, state=state) for view in tensors_in(of_copy)]
    _add_all(aliases, of_memory, memory, known)
    return _as_weights(emulation, of_memory)


def _add_all(aliases: Aliases, out: Any, x: Tensor, known: list[Alias]) -> None:
    for view, alias in zip(tensors_in(out), known, strict=True):
        if view is not x:
            aliases.add(view, alias)


def _as_weights(emulation: Any, out: Any, has_role: bool = True) -> Any:
    for view in tensors_in(out):
        if has_role:
            mark_as_weight(view)
        if emulation.scope.products is not None and not is_view_of_weight(view):
            mark_as_view_of_weight(view)
    return out


def write_to_master(
    emulation: Any, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A write to a parameter or a buffer, or to a view of one: what was computed is stored, and nothing rounds it."""
    x, aliases = args[0], emulation.aliases
    alias = aliases.of(x)
    if is_state(x):
        args = (x, *(emulation.prepared(y, Rounds.ALL_BUT_WIDE, []) for y in args[1:]))
        kwargs = {name: emulation.prepared(y, Rounds.ALL_BUT_WIDE, []) for name, y in kwargs.items()}
    if alias is None or alias.own is None:
        out = call(func, args, kwargs)
        aliases.note_write(x)
        return out
    if torch.is_grad_enabled() and alias.base.requires_grad and alias.base.is_leaf:
        raise RuntimeError("a view of a leaf Variable that requires grad is being used in an in-place operation.")
    known = format_of(x)
    call(func, (alias.own, *args[1:]), kwargs)
    aliases.note_write(x)
    mark_as_weight(alias.own)
    with torch.no_grad():
        x.data.copy_(emulation.operand(alias.own, Rounds.ALL))
    if known is not None:
        mark(x, known)
    return None if call.name == "setitem" else x
