"""Recomputation and saved tensors in a backward pass: with the format, scope and noise of the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fpsim.emulation.marks import (
    format_of,
    is_view_of_weight,
    is_weight,
    mark_as_view_of_weight,
    mark_as_weight,
    mark_like,
)
from fpsim.emulation.scope import active
from fpsim.tensors.noise import noise_state, replay_noise
from fpsim.torch_internals import wrap_checkpoints
from fpsim.undoing import Undo, undone

__all__ = ["Hooks", "packed_afterwards", "watch_checkpoints"]


class _Replay:
    """Function that a checkpoint runs, with the state to restore when the backward pass runs it again.

    function: the checkpoint's function.
    args: its arguments.
    start: position of the forward pass; it has `scope`, `copies_of(x)` and `enter(undo)`.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], start: Any) -> None:
        self.function, self.start = function, start
        # The marks of the arguments are stored, because the recomputation gets other tensors with the same numbers.
        self.formats = [format_of(x) if isinstance(x, Tensor) else None for x in args]
        stands_in = start.scope.stands_in
        self.weights = [isinstance(x, Tensor) and (is_weight(x) or stands_in(x)) for x in args]
        self.views = [isinstance(x, Tensor) and is_view_of_weight(x) for x in args]
        self.copies = [start.copies_of(x) if isinstance(x, Tensor) else None for x in args]
        self.noise = noise_state()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # This is the forward pass itself, which runs under emulation.
        if active.emulation is not None:
            return self.function(*args, **kwargs)
        for x, known in zip(args, self.formats, strict=False):
            if isinstance(x, Tensor) and known is not None:
                mark_like(x, known)
        for x, was_weight, was_view in zip(args, self.weights, self.views, strict=False):
            # A reentrant checkpoint detaches its arguments, so that a parameter comes back as a plain tensor.
            if was_weight and not self.start.scope.stands_in(x):
                mark_as_weight(x)
            elif was_view:
                mark_as_view_of_weight(x)

        def again(undo: Undo) -> Any:
            replay_noise(self.noise, undo)
            self.start.enter(undo)
            # An argument may have been rounded stochastically before the checkpoint: its copies are used again.
            for x, copies in zip(args, self.copies, strict=False):
                if copies:
                    active.emulation.know_values(x, copies)
            return self.function(*args, **kwargs)

        return undone(again)


def _settle(outputs: Any) -> None:
    """Leave the gradients of a reentrant checkpoint's outputs to its recomputation, which rounds them."""
    if active.emulation is None:
        return
    if active.stand_ins is not None:
        raise NotImplementedError(
            f"A reentrant checkpoint at {active.emulation.scope.name or 'the top level'} runs a backward pass of its "
            f"own, which a compiled program cannot hold. Use checkpoint(..., use_reentrant=False)."
        )
    for x in outputs if isinstance(outputs, tuple | list) else (outputs,):
        if isinstance(x, Tensor) and (known := format_of(x)) is not None:
            mark_like(x, known)


@cache
def watch_checkpoints(position_of: Callable[[Any], Any]) -> None:
    """Patch torch's checkpoints, once in a process, so that a checkpoint in emulated code also recomputes emulated.

    position_of: function that returns the position of the forward pass of an emulation.
    """

    def wrap(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
        return function if active.emulation is None else _Replay(function, args, position_of(active.emulation))

    wrap_checkpoints(wrap, _settle)


# Saved tensors: what an operation saves for its backward pass is packed after the operation's result is rounded. If the
# operation saves its result, which is rounded in place later, hooks that pack at once would store unrounded numbers.


Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class _Saved:
    """Holder of a saved tensor: the tensor itself until the block ends, and the hook's packed value afterwards."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


@contextmanager
def packed_afterwards(hooks: Hooks) -> Iterator[None]:
    """Save tensors unpacked inside of the block; when the block ends, `hooks` pack them."""
    pack, unpack = hooks
    waiting: list[_Saved] = []

    def keep(x: Tensor) -> _Saved:
        saved = _Saved(x)
        waiting.append(saved)
        return saved

    with saved_tensors_hooks(keep, lambda saved: unpack(saved.value)):
        yield
    for saved in waiting:
        saved.value = pack(saved.value)
