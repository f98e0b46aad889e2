"""What made a gradient inf or NaN: a slope without end, or a number beyond the format."""

from __future__ import annotations

from torch import Tensor

from fpsim.emulation.tracing import Operation
from fpsim.insight.reasons.event import Event
from fpsim.insight.reasons.numbers import Ends, first_index, glance

__all__ = ["explain_gradient"]

# Functions whose slope has no end at zero, or at the border of their domain.
_AT_ZERO = frozenset(
    "sqrt rsqrt log log2 log10 reciprocal norm linalg_norm linalg_vector_norm div truediv true_divide divide pow std "
    "cdist pairwise_distance logit xlogy rtruediv float_power".split()
)
_AT_ONE = frozenset("asin acos atanh acosh arccos arcsin arctanh arccosh log1p logit erfinv".split())


def explain_gradient(operation: Operation, at: Operation, role: str, gradient: Tensor, kinds: set[str]) -> Event:
    """The event of a gradient that is not finite, while those that it was computed from are.

    operation: whose result or parameter it is of. at: the operation that is named for it, beyond views.
    """
    numbers = glance(gradient)
    assert numbers.counts is not None
    ends = _ends_of(operation)
    event = Event(
        "backward", "overflow", at.site, role, numbers.counts.nonfinite, numbers.count, operation=at, origin=at
    )
    event.fmt, event.ends, event.batch = ends.name, ends, at.notes.get("batch")
    readers = [*_readers(operation)]
    for child in readers:
        read = operation.notes["result"]
        at_zero = child.name in _AT_ZERO and read.has_zeros and _is_steep(child, operation)
        at_one = child.name in _AT_ONE and max(abs(read.low), abs(read.high)) >= 1
        if at_zero or at_one:
            event.kind, event.place, event.operation, event.origin = "infinite slope", child.site, child, child
            zeros = read.count - read.nonzero
            what = f"{zeros} of the {read.count} numbers that it read are 0" if at_zero else f"it read {read}"
            arrived = child.notes.get("gradient")
            event.why.append(
                f"{what}, where the slope of {child.name} has no end; the incoming gradient was {arrived}."
            )
            event.why.append(f"{event.count} of {event.of} gradients of {at.site} are not finite.")
            event.read = [(at.site, str(read)), (f"gradient of {child.site}", str(arrived))]
            event.remedy = "slope"
            return event
    event.remedy = "scale"
    what = "beyond" if "inf" in kinds or "-inf" in kinds else "NaN by sums beyond"
    event.why.append(
        f"{event.count} of {event.of} are {what} {ends.largest:.6g}, the end of {ends.name} (first at "
        f"{first_index(~gradient.isfinite()) or '0'}); finite ones reach {numbers.amax:.4g}."
    )
    for child in readers[:2]:
        if "gradient" in child.notes:
            event.read.append((f"gradient of {child.site}", str(child.notes["gradient"])))
        event.read += [(s.site, str(s.notes["result"])) for s in child.parents if s is not operation][:2]
    return event


def _is_steep(child: Operation, operation: Operation) -> bool:
    """Whether the slope of `child` in what `operation` gave has no end at zero."""
    if child.name in ("div", "truediv", "true_divide", "divide"):
        return len(child.sources) > 1 and child.sources[1] is not None and child.sources[0] is not operation
    if child.name in ("pow", "float_power"):
        return any(c < 1 for c in child.notes["numbers"])
    return True


def _ends_of(operation: Operation) -> Ends:
    """Where the gradient of a result ends: in its own format, or in that of the operations that compute it."""
    ends = [c.notes["ends"] for c in operation.children if "ends" in c.notes]
    own = operation.notes.get("gradient_ends") or operation.notes.get("ends")
    if operation.name == "parameter":
        ends += [operation.notes["gradient_ends"]] if "gradient_ends" in operation.notes else []
    elif own is not None:
        ends.append(own)
    return min(ends, key=lambda e: e.largest)


def _readers(operation: Operation) -> list[Operation]:
    """The operations that compute with a result, beyond views of it."""
    readers: list[Operation] = []
    for child in operation.children:
        readers += [child] if child.computes else _readers(child)
    return readers
