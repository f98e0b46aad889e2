"""Steps: count backward passes, and decide whether one chooses all scales, completes them, or holds them.

A backward pass is a *graph task*, numbered upwards by torch. Each is a step of its own, except one that a checkpoint
runs within another.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from ada_loss.layerwise.sites import SiteState

__all__ = ["BETWEEN", "COMPLETE", "UPDATE", "Schedule", "StepKind"]


class StepKind(Enum):
    """Kinds of steps."""

    UPDATE = "all scales are chosen"
    COMPLETE = "sites are linked: scales that are not known yet are chosen, others are held"
    BETWEEN = "between updates: sites are not linked, and all scales are held"


UPDATE, COMPLETE, BETWEEN = StepKind  # for speed: Python 3.11 takes 60 ns to look a member up in its class


class Schedule:
    """Count steps, and hold the kind of the current one.

    update_every: every n-th step is an update.
    holds_scales: whether scales are held between updates, rather than factors.
    states: those of all sites, a mapping that grows while the model trains.
    """

    def __init__(self, update_every: int, holds_scales: bool, states: Mapping[Any, SiteState]) -> None:
        self.step = 0
        self.kind = UPDATE
        self.last_update = -update_every  # the step from which the next update is counted
        self.is_all_known: bool | None = None  # whether all scales are; None if not checked yet
        self._graph_task = -1  # of the current step
        self._update_every, self._holds_scales, self._states = update_every, holds_scales, states
        self._roots: dict[int, int] = {}  # of graph tasks within the current step

    def load(self, step: int, last_update: int) -> None:
        """Resume from a saved step."""
        self.step, self.last_update = step, last_update
        self.is_all_known = None

    def links_sites(self, graph_task: int) -> bool:
        """True if sites made now must be linked, because their step, this one or the next, chooses scales.

        Steps between updates choose none, and skip the search of the graph to save time.

        graph_task: the one in which the forward pass runs, -1 outside of one.
        """
        if not self._holds_scales:
            return True
        if graph_task >= 0 and self._roots.get(graph_task, graph_task) <= self._graph_task:  # a checkpoint's forward
            return self.kind is not BETWEEN
        if self.step + 1 - self.last_update >= self._update_every:
            return True
        if self.is_all_known is None:
            # a site that no step has reached since the update may never come again
            reached = [s for s in self._states.values() if s.last_step >= self.last_update]
            self.is_all_known = all(s.held_log2_scale is not None and s.knows(s.factors_on_host) for s in reached)
        return not self.is_all_known

    def enter(self, graph_task: int, made_in: int, is_linked: bool) -> bool:
        """Record that a gradient reached a site; return True if it begins a new step.

        graph_task: the one in which it arrived.
        made_in: the site's; a checkpoint's graph task belongs to the step that runs its forward pass.
        is_linked: whether the site is linked.
        """
        root = graph_task
        if made_in >= 0:
            root = self._roots.setdefault(graph_task, self._roots.get(made_in, made_in))
        begins = root > self._graph_task
        if begins:
            self._graph_task = root
            self.step += 1
            self._roots.clear()
            self.is_all_known = self.is_all_known or None  # what was not known may be by now
            is_due = self.step - self.last_update >= self._update_every
            self.kind = BETWEEN if not is_linked else UPDATE if is_due else COMPLETE
            if self.kind is UPDATE:
                self.last_update = self.step
        if not is_linked and self.kind is UPDATE:  # the site is of an earlier forward pass
            self.last_update = self.step - self._update_every  # so that the next step is an update
        return begins
