"""Infinities and NaN that come to nothing: no loss, no gradient and no other result has them."""

from __future__ import annotations

from collections.abc import Callable

from fpsim.emulation.tracing import Operation
from fpsim.insight.reasons.event import Event

__all__ = ["causes_first"]

_WIDE = ("float32", "float64", "fp32")


def causes_first(
    events: list[Event], losses: list[Operation], is_finite: bool, is_so_in_float32: Callable[[Event], bool]
) -> list[Event]:
    """The events that can make a step fail, in their order, those that die out after the others.

    The bucket of a position, `log(0).to(torch.long)`, is minus infinity in each step of a T5 and harms nobody.

    is_finite: whether the step is, at its end; what dies out is then left out where float32 has it too. An overflow
        stays: what it did to the numbers that follow is not known.
    is_so_in_float32: whether the result of an event's operation is not finite in float32 either; asked only if needed.
    """
    dying = [event for event in events if _dies(event, losses)]
    if is_finite:
        harmless = [e for e in dying if e.kind != "overflow" and (e.fmt in _WIDE or is_so_in_float32(e))]
        return [event for event in events if not any(event is other for other in harmless)]
    living = [event for event in events if not any(event is other for other in dying)]
    return [*living, *dying]


def _dies(event: Event, losses: list[Operation]) -> bool:
    """Whether all that follows from the infinities and NaN of a result ends before the loss, and harms no gradient."""
    at = event.operation
    if event.stage != "forward" or event.role != "activation" or at is None or not _is_bad(at, "result"):
        return False
    reached, waiting = {id(at)}, [at]
    while waiting:
        operation = waiting.pop()
        if operation in losses or any(_is_bad(o, "gradient") for o in (operation, *operation.parents)):
            return False
        following = [c for c in operation.children if id(c) not in reached and _is_bad(c, "result")]
        reached.update(id(c) for c in following)
        waiting += following
    return True


def _is_bad(operation: Operation, note: str) -> bool:
    return note in operation.notes and bool(operation.notes[note].kinds)
