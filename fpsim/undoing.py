"""What has to be put back, whatever is raised: an error, Ctrl-C in any place, the end of a generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["Undo", "undone"]

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Undo:
    """Actions that put something back, the last one first.

    Python handles a signal between any two calls, in a `finally` and at the first line of an `__exit__` too. So an
    action is named before what it undoes is done, and may be run twice; and `undone` asks twice.
    """

    def __init__(self) -> None:
        self._actions: list[Callable[[], object]] = []

    def by(self, action: Callable[[], object]) -> None:
        """Undo by this action what comes next."""
        self._actions.append(action)

    def __call__(self) -> None:
        actions = self._actions
        while actions:
            try:
                actions[-1]()
            except Exception:
                actions.pop()  # the others' turn comes when it is asked again
                raise
            actions.pop()


def undone(function: Callable[[Undo], Result]) -> Result:
    """Run `function(undo)`, and undo what it has named there. One signal while this is done leaves nothing behind."""
    undo = Undo()
    try:
        return function(undo)
    finally:
        try:
            undo()
        finally:
            undo()
