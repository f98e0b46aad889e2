"""Restore state after any exit: an error, Ctrl-C at any point, the end of a generator."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["Block", "Exit", "Undo", "undone"]

Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])


class Undo:
    """Stack of actions that restore state, run last in, first out.

    Register an action before the change that it undoes. The action may run twice, or before the change has happened.
    """

    def __init__(self) -> None:
        self._actions: list[Callable[[], object]] = []

    def by(self, action: Callable[[], object]) -> None:
        """Register the action that undoes the next change."""
        self._actions.append(action)

    def __call__(self) -> None:
        actions = self._actions
        while actions:
            # An action is removed only after it has run: a signal within it, or before the `pop`, makes it run again.
            try:
                actions[-1]()
            # An action that fails is not tried again; the second call of `undone` runs the others.
            except Exception:
                actions.pop()
                raise
            actions.pop()


def undone(function: Callable[[Undo], Result]) -> Result:
    """Run `function(undo)`, then the registered actions. After one interrupt at any point, all changes are undone."""
    undo = Undo()
    try:
        return function(undo)
    finally:
        # This is called twice: Python handles a signal between any two calls, in a `finally` too.
        try:
            undo()
        finally:
            undo()


# Blocks: `with` statements whose changes are undone, whenever Ctrl-C arrives.
#
# Python may handle a signal at the first instruction of `__exit__`, before any of its lines has run. The block itself
# then lives on with the traceback, which a notebook keeps. But only the `with` statement refers to the function that it
# calls at its end, and it drops this function after any exception. When the function is collected, the block is left
# if it was not left before.


class Exit:
    """`__exit__` of a class: runs its method `leave`, which may run a second time after an interrupt.

    The class has a flag `is_inside`, which its `__enter__` sets.
    """

    def __get__(self, block: Any, owner: Any = None) -> Any:
        if block is None:
            return _leave
        leave = functools.partial(_leave, block)
        # A `with` statement reads `__exit__` before it calls `__enter__`.
        if not block.is_inside:
            block.held = weakref.ref(leave, functools.partial(_lost, weakref.ref(block)))
        return leave


def _leave(block: Any, *_: object) -> None:
    block.leave()
    block.is_inside = False


def _lost(block: Callable[[], Any], _: object) -> None:
    left = block()
    if left is not None and left.is_inside:
        _leave(left)


class Block(Generic[Result]):
    """A `with` block that runs `begin(undo)`, and at its end the registered actions. It decorates functions too.

    begin: returns the value of the `with` statement.
    """

    def __init__(self, begin: Callable[[Undo], Result]) -> None:
        self._begin, self._undo, self.is_inside = begin, Undo(), False

    def __enter__(self) -> Result:
        if self.is_inside:
            raise RuntimeError("This block is running already. Make another one for a block inside of it.")
        # The flag is set first: after a signal in `begin` the block has to be left.
        try:
            self.is_inside = True
            return self._begin(self._undo)
        except BaseException:
            _leave(self)
            raise

    __exit__ = Exit()

    def leave(self) -> None:
        """Undo the changes of the block."""
        try:
            self._undo()
        finally:
            self._undo()

    def __call__(self, function: Function) -> Function:
        """Wrap a function so that each call runs in a new block."""

        @functools.wraps(function)
        def within(*args: Any, **kwargs: Any) -> Any:
            with Block(self._begin):
                return function(*args, **kwargs)

        return within  # type: ignore[return-value]
