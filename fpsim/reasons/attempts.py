"""What is tried on a step: a change works where the step is finite under it, and the event is gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fpsim.policy import Policy
from fpsim.reasons.event import Event
from fpsim.reasons.timeline import Timeline
from fpsim.reasons.trials import Change, Outcome, Trials

__all__ = ["EPS", "Attempts", "Remedy"]

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
    """Ends a run with the first event: a look at a whole step takes ten steps' time."""

    def _add(self, event: Event) -> None:
        raise _StillThereError(event.kind)


class _StillThereError(Exception):
    """Something breaks under the change that is tried."""


class Attempts:
    """Tries changes, and knows whether the event is gone."""

    def __init__(self, trials: Trials, event: Event, was: Outcome, seen: Timeline) -> None:
        self.trials, self.event = trials, event
        # What reads a result that is float32 now rounds it itself: a saturation that was not there is no cure.
        self.others = {(e.place, e.role) for e in seen.saturations} - {(event.place, event.role)}
        self.is_visible = not was.is_finite  # whether inf or NaN at the end of the step shows the event

    def works(self, change: Change, gone: Callable[[Timeline], bool] | None = None) -> Outcome | None:
        """What a run under the change gave; None where it fails, or the event is still there."""
        seen = _Unbroken(self.trials.model)
        try:
            if self.is_visible and gone is None and not change.policies:
                outcome = self.trials.run(change)
                return outcome if outcome.is_finite else None
            outcome = self.trials.run(change, seen)
        except Exception:  # a step in other dtypes may be refused by torch: then this is no remedy
            return None
        if not outcome.is_finite or seen.events:
            return None
        if any((e.place, e.role) not in self.others for e in seen.saturations):
            return None
        return outcome if gone is None or gone(seen) else None
