"""What is tried on a step: a change works where the step is finite under it, and the event is gone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fpsim.emulation.tracing import Operation
from fpsim.insight.reasons.event import Event
from fpsim.insight.reasons.timeline import Timeline
from fpsim.insight.reasons.trials import Change, Outcome, Trials
from fpsim.insight.reasons.widening import Widening
from fpsim.policies.policy import Policy

__all__ = ["EPS", "Attempts", "Remedy", "descendants"]

EPS = (1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)


@dataclass
class Remedy:
    """What was tried, and worked.

    what: in words. name: "eps", "scale", "float32", "clamp", "fill", "mask", "slope", "master", "clear", "rate".
    value: the number that was taken. sites: of the operations that ran in float32.
    loss: what the step then gave. policy: for a quantised model, where the remedy is one.
    """

    what: str
    name: str
    value: float | None = None
    sites: list[str] = field(default_factory=list)
    loss: float | None = None
    policy: Policy | None = None
    detail: str = ""

    def row(self) -> dict[str, Any]:
        return {"remedy": self.name, "what": self.what, "value": self.value, "sites": self.sites, "loss": self.loss}


class _Unbroken(Timeline):
    """Ends a run with the first event that was not known: a look at a whole step takes ten steps' time."""

    def __init__(self, model: nn.Module, known: Collection[tuple[str, str]]) -> None:
        super().__init__(model)
        self._known = known

    def _add(self, event: Event) -> None:
        if (event.place, event.kind) not in self._known:
            raise _StillThereError(event.kind)


class _StillThereError(Exception):
    """Something breaks under the change that is tried."""


class Attempts:
    """Tries changes, and knows whether the event is gone.

    is_visible: whether inf or NaN at the end of the step shows the event.
    has_one: whether a remedy is known already: then another one is not worth many runs.
    """

    def __init__(self, trials: Trials, event: Event, was: Outcome, seen: Timeline) -> None:
        self.trials, self.event, self.is_visible = trials, event, not was.is_finite
        self.has_one = False
        # What reads a result that is float32 now rounds it itself: a saturation that was not there is not a cure.
        self._saturations = {(e.place, e.role) for e in seen.saturations} - {(event.place, event.role)}
        following = set() if event.operation is None else descendants(event.operation)
        # What does not follow from the event, such as an infinity that comes to nothing, stays where it was.
        others = [e for e in seen.events if e.operation is not None and id(e.operation) not in following]
        self._known = {(e.place, e.kind) for e in others} - {(event.place, event.kind)}

    def ends_finite(self, change: Change) -> Outcome | None:
        """What a run under the change gave, without a look inside; None where it fails or ends in inf or NaN."""
        try:
            outcome = self.trials.run(change, until_broken=True)
        except Exception:  # a step in other dtypes may be refused by torch: then this is not a remedy
            return None
        return outcome if outcome.is_finite and not _moves_only(change) else None

    def works(self, change: Change, gone: Callable[[Timeline], bool] | None = None) -> Outcome | None:
        """What a run under the change gave; None where it fails, or the event is still there."""
        if self.is_visible and gone is None:  # a look inside takes as long as ten runs without one
            outcome = self.ends_finite(change)
            if outcome is None or not change.policies:
                return outcome
        return self.looks_well(change, gone)

    def looks_well(self, change: Change, gone: Callable[[Timeline], bool] | None = None) -> Outcome | None:
        """As `works`, with a look at each result: nothing breaks, leaks or saturates that was not known."""
        seen = _Unbroken(self.trials.model, self._known)
        try:
            outcome = self.trials.run(change, seen)
        except Exception:  # as above, or something breaks
            self.is_visible = False  # if it was: the end of a step does not tell, and is not asked again
            return None
        if not outcome.is_finite or any((e.place, e.kind) not in self._known for e in seen.events):
            return None
        if _moves_only(change):
            return None
        if any((e.place, e.role) not in self._saturations for e in seen.saturations):
            return None
        return outcome if gone is None or gone(seen) else None


def _moves_only(change: Change) -> bool:
    """Whether an overflow is only moved: to where a float32 result is read in its former dtype."""
    return isinstance(change.edit, Widening) and change.edit.overflows


def descendants(start: Operation) -> set[int]:
    """The ids of an operation and of all that read its result, near or far."""
    ids, waiting = set(), [start]
    while waiting:
        at = waiting.pop()
        if id(at) not in ids:
            ids.add(id(at))
            waiting += at.children
    return ids
