"""Infinities and NaN that come to nothing: they reach no loss and no gradient of a parameter."""

from __future__ import annotations

from collections.abc import Callable

from fpsim.emulation.operations import row_of
from fpsim.emulation.tracing import Operation
from fpsim.insight.reasons.event import Event
from fpsim.insight.seen import fills

__all__ = ["causes_first", "comes_to_nothing", "reaches_a_loss"]

_WIDE = ("float32", "float64", "fp32")


def causes_first(
    events: list[Event], losses: list[Operation], is_finite: bool, is_so_in_float32: Callable[[Event], bool]
) -> list[Event]:
    """The events that can make a step fail, in their order, those that die out after the others.

    The bucket of a position, `log(0).to(torch.long)`, is minus infinity in each step of a T5 and harms nobody.

    is_finite: whether the step is, at its end; what dies out is then left out where float32 has it too. An overflow
        stays: what it did to the numbers that follow is not known.
    is_so_in_float32: whether it is not finite at an event's operation in float32 either; asked only if needed.
    """
    dying = [event for event in events if _dies(event, losses)]
    if is_finite:
        harmless = [e for e in dying if e.kind != "overflow" and (e.fmt in _WIDE or is_so_in_float32(e))]
        return [event for event in events if not any(event is other for other in harmless)]
    living = [event for event in events if not any(event is other for other in dying)]
    return [*living, *dying]


def comes_to_nothing(readers: list[Operation], losses: list[Operation], is_emulated: bool, broken: set[str]) -> bool:
    """Whether what operations read that is not finite reaches no loss, no gradient of a parameter and no buffer.

    is_emulated: whether a format may have saturated it; then it must have been masked or left out.
    broken: the names of the modules of which a buffer became inf or NaN.
    """
    bad = [o for o in readers if _is_bad(o, "result")]
    reached = _reached(bad)
    if any(o.module in broken for o in reached):
        return False
    reading = [*readers, *(c for o in reached for c in o.children)]
    if is_emulated and any(o.computes and not _is_bad(o, "result") and not _replaces(o) for o in reading):
        return False
    return _ends_early(bad, readers, losses)


def _replaces(operation: Operation) -> bool:
    """Whether an operation puts other numbers in the place of infinities and NaN."""
    return fills(operation) or not row_of(operation.name).passes


def reaches_a_loss(readers: list[Operation], losses: list[Operation], broken: set[str]) -> bool:
    """Whether what operations read that is not finite leads to a loss, or a buffer, that is not; as above."""
    reached = _reached([o for o in readers if _is_bad(o, "result")])
    return any(operation in losses or operation.module in broken for operation in reached)


def _dies(event: Event, losses: list[Operation]) -> bool:
    """Whether all that follows from the infinities and NaN of a result, or of a gradient, ends before it harms."""
    at = event.operation
    if at is None:
        return False
    if event.stage == "forward" and event.role == "activation" and _is_bad(at, "result"):
        return _ends_early([at], [at], losses)
    if event.stage == "backward" and event.role == "error":
        return any(_is_bad(o, "gradient") for o in (at, *at.parents)) and not _reaches_a_parameter([at])
    return False


def _ends_early(bad: list[Operation], first: list[Operation], losses: list[Operation]) -> bool:
    """As `_dies`. bad: the first results that are not finite. first: the first operations whose gradients may be so."""
    reached = _reached(bad)
    if any(operation in losses for operation in reached):
        return False
    return not _reaches_a_parameter([*first, *reached])


def _reached(bad: list[Operation]) -> list[Operation]:
    """The operations to whose results infinities and NaN lead from those of others, with these."""
    reached, waiting = {id(o): o for o in bad}, [*bad]
    while waiting:
        following = [c for c in waiting.pop().children if id(c) not in reached and _is_bad(c, "result")]
        reached.update((id(c), c) for c in following)
        waiting += following
    return [*reached.values()]


def _reaches_a_parameter(starts: list[Operation]) -> bool:
    """Whether gradients that are not finite lead from operations to a parameter, or to a tensor from outside."""
    known, waiting = {id(o) for o in starts}, [*starts]
    while waiting:
        operation = waiting.pop()
        is_bad = _is_bad(operation, "gradient")
        if is_bad and (operation.name == "parameter" or operation.notes.get("is_open")):
            return True
        following = [p for p in operation.parents if id(p) not in known and _is_bad(p, "gradient")]
        known.update(id(p) for p in following)
        waiting += following
    return False


def _is_bad(operation: Operation, note: str) -> bool:
    if note == "gradient":  # of any backward pass: that of the last one may be finite
        return bool(operation.notes.get("had_bad_gradient"))
    return note in operation.notes and bool(operation.notes[note].kinds)
