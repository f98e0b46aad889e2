"""Aliases: tensors that share memory with a base: a parameter, buffer or input. Writes are rounded as for the base.

`w[0]`, `w.detach()` and `w.data` lie in the memory of the master weight. Code that reads them expects numbers of the
format; code that writes to them expects the parameter to change. Each view of a parameter therefore exists twice: as a
view of the parameter's rounded copy, and as a view of the parameter's own memory. This file tracks which of the two
views the code holds, and finds the other one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fpsim.emulation.arguments import tensors_in
from fpsim.emulation.calls import WRITTEN_TO, Call
from fpsim.emulation.marks import (
    ByIdentity,
    format_of,
    is_made_here,
    is_marked_wide,
    is_roundable,
    is_state,
    is_view_of_weight,
    is_weight,
    mark,
    mark_as_seen_from_outside,
    mark_as_state,
    mark_as_view_of_weight,
    mark_as_weight,
    writes_behind,
)
from fpsim.emulation.operands import Rounds
from fpsim.tensors.expressions import round_here_
from fpsim.tensors.launch import round_memory_
from fpsim.tensors.spec import RoundingSpec
from fpsim.torch_internals import is_traced, share_storage
from fpsim.torch_modes import below_transforms, has_transform, is_plain, memory_behind
from fpsim.torch_nodes import is_view_of_function

__all__ = [
    "Alias",
    "Aliases",
    "note_write",
    "round_behind",
    "spec_of_memory",
    "view_from_outside",
    "write_outside",
    "written_outside",
]


# All emulations that track nothing share this dictionary, so that entering a mode makes none. It stays empty.
_NOTHING: ByIdentity[Any] = ByIdentity()


class Alias:
    """State tracked for one tensor.

    base: the parameter, buffer or input.
    is_of_copy: whether the tensor is a view of the rounded copy, and not of the base's own memory.
    rounded: the same view of the rounded copy, if the tensor lies in the base's own memory and that view is known.
    state: the value of `Aliases.state_of(base)` when `rounded` was made.
    """

    __slots__ = ("_own", "base", "is_of_copy", "rounded", "state")

    def __init__(
        self,
        base: Tensor,
        own: Callable[[], Tensor] | None = None,
        rounded: Tensor | None = None,
        state: Any = 0,
    ) -> None:
        self.base, self.is_of_copy, self.rounded, self.state = base, own is not None, rounded, state
        self._own: Any = own

    def memory(self, x: Tensor) -> Tensor:
        """Return `x`, or if it is a view of the rounded copy, the same view of the base's own memory."""
        if not self.is_of_copy:
            return x
        # The view is made when it is first needed, because few views are written to.
        if not isinstance(self._own, Tensor):
            self._own = self._own()
        return self._own  # type: ignore[no-any-return]


class Aliases:
    """The aliases of one emulation, as weak references."""

    def __init__(self) -> None:
        self.is_blank = True  # whether no tensor was ever known
        self._known: ByIdentity[Alias] = _NOTHING
        self._writes: ByIdentity[int] = _NOTHING  # writes to a base by `.data`, which has its own version counter

    @property
    def is_empty(self) -> bool:
        """True if no alias is tracked."""
        return not self._known.held

    def of(self, x: Tensor) -> Alias | None:
        """Return the state of this tensor; None if it is not tracked."""
        return self._known.get(x) if self._known.held else None

    def may_know(self, x: Tensor) -> bool:
        """True if the tensor may be tracked. This costs one look-up, for callers that check in each torch call."""
        return id(x) in self._known.held

    def add(self, x: Tensor, alias: Alias) -> None:
        """Track this tensor."""
        if self.is_blank:
            self.is_blank, self._known, self._writes = False, ByIdentity(), ByIdentity()
        self._known[x] = alias

    def state_of(self, x: Tensor) -> Any:
        """Return a value that changes whenever the memory of a tensor is written to, through any alias."""
        alias = self.of(x)
        base = x if alias is None else alias.base
        unseen = self._writes.get(base) if self._writes.held else 0
        return (writes_behind(base), unseen) if unseen else writes_behind(base)

    def copies_of(self, base: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the views of the base's rounded copy, each with the same view of the base's own memory."""
        return [(x, a.memory(x)) for x, a in self._known.items() if a.base is base and a.is_of_copy]

    def note_write(self, x: Tensor) -> None:
        """Count a write to the base of this tensor, because the base's own version counter may not see it."""
        alias = self.of(x)
        if alias is not None:
            self._writes[alias.base] = (self._writes.get(alias.base) or 0) + 1


def note_write(emulation: Any, x: Tensor) -> None:
    """Record a write to `x`, which may be an alias, and round the memory again into its rounded copies."""
    aliases: Aliases = emulation.aliases
    if aliases.is_empty:
        return
    aliases.note_write(x)
    alias = aliases.of(x)
    # Other tensors may share the memory of a result, and a write through `.data` does not raise their version counters:
    # all rounded copies are dropped.
    if alias is not None and is_made_here(alias.base):
        emulation.forget_operands()
    base = x if alias is None else alias.base
    specs, has_role = emulation.scope.specs, _is_weight(emulation, base)
    for copy, own in aliases.copies_of(base):
        has_history = torch.is_grad_enabled() and own.requires_grad and own.grad_fn is not None
        _refresh(copy, own, specs.weight if has_role else specs.activation, not has_role, has_history)
        if has_history:
            emulation.hook(copy, emulation.scope.site(WRITTEN_TO.name), WRITTEN_TO.name, (own,))


def _refresh(copy: Tensor, own: Tensor, spec: RoundingSpec | None, keep_masks: bool, has_history: bool) -> None:
    """Round the base's memory `own` again into a copy in use. has_history: whether the graph records the write."""
    known = format_of(copy)
    # The first `copy_` records the write in the graph; the second one, below autograd, is followed by the rounding.
    if has_history:
        copy.copy_(own)
    with torch.no_grad():
        copy.data.copy_(own)
        if spec is not None:
            round_here_(copy, spec, keep_masks=keep_masks)
    if known is not None:
        mark(copy, known)


def view_from_outside(
    emulation: Any, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return a view of a tensor from outside: of its rounded copy if gradients flow, else of its own memory.

    Returns NotImplemented if the call makes a copy, and for tensors whose views need no tracking or cannot be tracked.
    """
    x, aliases = args[0], emulation.aliases
    alias = aliases.of(x)
    is_seen = alias is not None or is_plain(x) or is_traced(x)
    # Without a graph, code may write to a part of a transform's tensor: the write goes to the tensor behind it.
    is_seen = is_seen or (has_transform() and not torch.is_grad_enabled())
    if not is_roundable(x) or is_marked_wide(x) or not is_seen:
        return NotImplemented
    base = x if alias is None else alias.base
    is_of_copy = alias is not None and alias.is_of_copy
    # A view that an autograd Function saved comes back as a tensor with the mark of a weight, and without an alias.
    has_role = _is_weight(emulation, base) or (not is_of_copy and is_weight(x))
    leaves_raw = not is_of_copy and emulation.leaves_raw((x,))  # where autocast is switched off
    is_known = alias is not None and (is_of_copy or alias.rounded is not None)
    if is_state(x) or (not has_role and (leaves_raw or not (x.requires_grad or is_known))):
        return _view_as_it_is(emulation, func, call, args, kwargs, base)
    rounded = x if is_of_copy or leaves_raw else emulation.operand(x, Rounds.ALL)
    if rounded is x and not is_of_copy:  # nothing is rounded
        out = call(func, args, kwargs)
        _add_all(aliases, out, x, [Alias(base)] * sum(1 for _ in tensors_in(out)))
        return _with_role(emulation, out, has_role, has_role)
    memory = x if alias is None else alias.memory(x)

    def of_memory() -> Any:
        # A transform's tensor is not detached, because a write has to reach its tangent too.
        as_it_is = call.name == "data" or (has_transform() and not is_plain(memory))
        return func(memory if as_it_is else memory.detach(), *args[1:], **kwargs)

    # With a graph the code gets a view of the copy, whose gradient reaches the parameter through the rounding. Without
    # a graph it gets a view of the base's memory: writes reach the base, and reads find the copy through the alias.
    if torch.is_grad_enabled() and rounded.requires_grad and call.name not in ("detach", "data"):
        out = call(func, (rounded, *args[1:]), kwargs)
        if not all(_shares_memory(view, rounded) for view in tensors_in(out)):
            return NotImplemented
        emulation.carry_marks(out, [rounded], None, None)
        count = sum(1 for _ in tensors_in(out))
        known = [Alias(base, own=partial(_own_view, of_memory, i, has_role)) for i in range(count)]
        _add_all(aliases, out, rounded, known)
        return _with_role(emulation, out, False, has_role)
    own = of_memory()
    if not all(_shares_memory(view, memory) for view in tensors_in(own)):
        return NotImplemented
    with torch.no_grad():
        of_copy = func(rounded.detach(), *args[1:], **kwargs)
    emulation.carry_marks(of_copy, [rounded], None, None)
    if has_role:
        _with_role(emulation, of_copy, False, True)
    state = aliases.state_of(base)
    known = [Alias(base, rounded=view, state=state) for view in tensors_in(of_copy)]
    _add_all(aliases, own, memory, known)
    return _with_role(emulation, own, has_role, has_role)


def _shares_memory(x: Tensor, y: Tensor) -> bool:
    """True if two tensors share memory; under a transform of torch.func, the tensors behind it are compared."""
    return share_storage(memory_behind(x), memory_behind(y)) if has_transform() else share_storage(x, y)


def _own_view(of_memory: Callable[[], Any], i: int, has_role: bool) -> Tensor:
    """Return the i-th of the views of a parameter's own memory that a call returns."""
    view = [*tensors_in(of_memory())][i]
    if has_role:
        mark_as_weight(view)
    return view


def _view_as_it_is(
    emulation: Any, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], base: Tensor
) -> Any:
    """Return an unrounded view of a buffer or of a tensor from outside without a gradient; its readers round it."""
    out = call(func, args, kwargs)
    for view in tensors_in(out):
        if not _shares_memory(view, args[0]):
            return NotImplemented if is_roundable(view) else out
        if is_state(args[0]):
            mark_as_state(view)
        else:
            mark_as_seen_from_outside(view)
        if view is not args[0]:
            emulation.aliases.add(view, Alias(base))
    return out


def _add_all(aliases: Aliases, out: Any, x: Tensor, known: list[Alias]) -> None:
    for view, alias in zip(tensors_in(out), known, strict=True):
        if view is not x:
            aliases.add(view, alias)


def _with_role(emulation: Any, out: Any, has_role: bool, is_of_weight: bool) -> Any:
    scope = emulation.scope
    is_of_weight = is_of_weight and not (scope.products is None and scope.listeners.scaling is None)
    for view in tensors_in(out):
        if has_role:
            mark_as_weight(view)
        if is_of_weight and not is_view_of_weight(view):
            mark_as_view_of_weight(view)
    return out


def write_outside(
    emulation: Any, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Write to a parameter, a buffer, or a view of a tensor from outside.

    Parameters and buffers store the numbers as they are. Any other tensor from outside stores numbers of the format.
    """
    x, aliases = args[0], emulation.aliases
    alias = aliases.of(x)
    base, target = (x, x) if alias is None else (alias.base, alias.memory(x))
    # The call runs unchanged, so that torch raises its own error; a write to the memory would raise none.
    if target is not x and torch.is_grad_enabled() and x.requires_grad and is_view_of_function(x):
        return call(func, args, kwargs)
    if not _is_weight(emulation, base):
        args = (x, *(emulation.prepared(y, Rounds.ALL_BUT_WIDE, []) for y in args[1:]))
        kwargs = {name: emulation.prepared(y, Rounds.ALL_BUT_WIDE, []) for name, y in kwargs.items()}
    # The memory is detached, so that torch itself would not refuse the write: raise its error here.
    if target is not x and torch.is_grad_enabled() and base.requires_grad and base.is_leaf:
        raise RuntimeError("a view of a leaf Variable that requires grad is being used in an in-place operation.")
    spec = spec_of_memory(emulation, x)
    if spec is not None:
        if emulation.has_wide and call.copies:
            args = emulation.cast_to_format(args)
        # The target is rounded before the call too, because an in-place operation also reads it, as an operand.
        round_seen_(target, spec)
    run = partial(call, func, (target, *args[1:]), kwargs)
    write = emulation.scope.write
    out = run() if write is None or not _is_weight(emulation, base) else write(base, run)
    if spec is not None:
        round_seen_(target, spec)
    note_write(emulation, x)
    return x if out is target else out


def written_outside(emulation: Any, x: Tensor) -> None:
    """Round the result of a call with `out=x`."""
    spec = spec_of_memory(emulation, x)
    if spec is not None:
        round_seen_(x, spec)
    note_write(emulation, x)


def spec_of_memory(emulation: Any, x: Tensor) -> RoundingSpec | None:
    """Return the spec of numbers that are written to `x`; None for parameters and buffers, which take any number."""
    alias = emulation.aliases.of(x)
    base = x if alias is None else alias.base
    is_as_it_is = is_state(x) or _is_weight(emulation, base) or not is_roundable(x)
    return None if is_as_it_is else emulation.scope.specs.activation


def round_seen_(x: Tensor, spec: RoundingSpec) -> None:
    """Round a tensor that was written to, in place."""
    if not (has_transform() and round_behind(x, spec)):
        round_here_(x, spec, keep_masks=True)


def round_behind(x: Tensor, spec: RoundingSpec, keep_infinity: bool = True) -> bool:
    """Round the tensor behind a transform in place, so that an operation's saved copy is rounded too.

    Returns False if that is not possible.
    """
    memory = memory_behind(x)
    # Stochastic rounding is left to the transform, which may need separate noise for each element of a batch.
    if spec.rounding == "stochastic" or type(memory) is not Tensor or not (memory.is_cpu or memory.is_cuda):
        return False
    if not is_roundable(memory):
        return False
    with below_transforms():
        round_memory_(memory, spec, keep_masks=True, keep_infinity=keep_infinity)
    return True


def _is_weight(emulation: Any, base: Tensor) -> bool:
    return is_weight(base) or emulation.scope.stands_in(base)
