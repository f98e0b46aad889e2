"""What made a gradient inf or NaN: a slope without end, or a number beyond the format."""

from __future__ import annotations

from torch import Tensor

from fpsim.emulation.operations import Kind, Row, row_of, spelling_of
from fpsim.emulation.tracing import Operation
from fpsim.insight.ranges import Ends, Glance, first_index, glance
from fpsim.insight.reasons.event import Event

__all__ = ["explain_gradient"]


def explain_gradient(operation: Operation, at: Operation, role: str, gradient: Tensor, kinds: set[str]) -> Event:
    """The event of a gradient that is not finite, while those that it was computed from are.

    operation: whose result or parameter it is of. at: the operation that is named for it, beyond views.
    """
    numbers = glance(gradient)
    ends = _ends_of(operation)
    event = Event("backward", "overflow", at.site, role, numbers.nonfinite, numbers.count, operation=at, origin=at)
    event.fmt, event.ends, event.batch = ends.name, ends, at.notes.get("batch")
    readers = [*_readers(operation)]
    for child in readers:
        read = operation.notes["result"]
        row = row_of(child.name)
        at_zero = 0.0 in row.steep and read.has_zeros and _is_steep(child, operation)
        if at_zero or _reaches_a_border(row, read):
            event.kind, event.place, event.operation, event.origin = "infinite slope", child.site, child, child
            zeros = read.count - read.nonzero
            what = f"{zeros} of the {read.count} numbers that it read are 0" if at_zero else f"it read {read}"
            arrived = child.notes.get("gradient")
            came = f"; the incoming gradient was {arrived}" if arrived is not None else ""
            event.why.append(f"{what}, where the slope of {child.name} has no end{came}.")
            event.why.append(f"{event.count} of {event.of} gradients of {at.site} are not finite.")
            event.read = [(at.site, str(read))]
            event.read += [(f"gradient of {child.site}", str(arrived))] if arrived is not None else []
            event.remedy = "slope"
            return event
    if _of_infinities(event, readers, operation, numbers) or _of_decomposition(event, readers, at):
        return event
    event.remedy = "scale"
    if _is_too_small_for_overflow(operation, readers, numbers, ends):
        return _of_unknown_slope(event, readers, operation, at)
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


def _of_infinities(event: Event, readers: list[Operation], operation: Operation, numbers: Glance) -> bool:
    """A slope that is computed from an infinity: of a sum of exponentials that is log(0), or of a product."""
    if not numbers.nan:
        return False
    for child in readers:
        result: Glance | None = child.notes.get("result")
        row = row_of(child.name)
        if row.kind is Kind.LOG_SUM and result is not None and result.minus:
            event.kind, event.remedy = "infinity minus infinity", "floor"
            event.why.append(
                f"{result.minus} of {result.count} results of {child.name} are -inf, for all that it adds is "
                f"exp(-inf): its slope there is exp(-inf + inf)."
            )
        else:
            others = [s for s in child.sources if s is not None and s is not operation and "result" in s.notes]
            infinite = [s for s in others if s.notes["result"].kinds]
            if not (row.multiplies or row.kind is Kind.PRODUCT) or not infinite:
                continue
            event.kind, event.remedy = "zero times infinity", "product"
            event.why.append(
                f"{child.name} multiplies its gradient by {infinite[0].site}, which holds "
                f"{infinite[0].notes['result']}."
            )
        event.place, event.operation, event.origin = child.site, child, child
        event.why.append(f"{event.count} of {event.of} gradients of {operation.site} are not finite.")
        event.read = [(s.site, str(s.notes["result"])) for s in child.parents if "result" in s.notes]
        return True
    return False


def _of_decomposition(event: Event, readers: list[Operation], at: Operation) -> bool:
    """Vectors of equal eigenvalues or singular values: they may turn, and have no slope."""
    child = next((c for c in readers if row_of(c.name).kind is Kind.DECOMPOSITION), None)
    if child is None:
        return False
    event.kind, event.remedy = "infinite slope", "slope"
    event.place, event.operation, event.origin = child.site, child, child
    values = "singular values" if "svd" in child.name else "eigenvalues"
    event.why.append(
        f"The vectors of {child.name} have no slope where two {values} are equal: it divides by their difference."
    )
    event.why.append(f"{event.count} of {event.of} gradients of {at.site} are not finite.")
    event.read = [(s.site, str(s.notes["result"])) for s in child.parents if "result" in s.notes]
    return True


def _is_too_small_for_overflow(operation: Operation, readers: list[Operation], numbers: Glance, ends: Ends) -> bool:
    """Whether no slope that is a product of what was read and given comes near the end of the format."""
    known = [c for c in readers if "gradient" in c.notes and "result" in c.notes]
    if any(0.0 in row_of(c.name).steep for c in known):
        return False  # its slope is large where what it reads is small, without a zero there
    sizes, count = [1.0, numbers.amax], 1
    for child in known:
        sizes += [child.notes["result"].amax, *(g.amax for g in child.notes["operands"])]
        sizes += [abs(c) for c in child.notes["numbers"]]
        count = max(count, child.notes["result"].count)
    incoming = max((c.notes["gradient"].amax for c in known), default=max(numbers.amax, 1.0))
    if any(c.notes["gradient"].kinds for c in known) or operation.name == "parameter":
        return False
    largest = max(sizes)
    return incoming * largest * largest * largest * count < ends.largest  # a power raises where it overflows


def _of_unknown_slope(event: Event, readers: list[Operation], operation: Operation, at: Operation) -> Event:
    known = [c for c in readers if "gradient" in c.notes]
    event.kind, event.remedy = "infinite slope", "slope"
    if len(known) == 1:
        child = known[0]
        event.place, event.operation, event.origin = child.site, child, child
        event.why.append(
            f"{event.count} of {event.of} gradients of {at.site} are not finite, though {child.name} read "
            f"{operation.notes['result']} and a gradient of {child.notes['gradient']}."
        )
    else:
        who = "what reads it" if known else "a function that is not seen, such as an autograd function of one's own,"
        event.why.append(f"{event.count} of {event.of} gradients that {who} gives are not finite; no number is large.")
        event.remedy = "unseen"
    event.read = [(operation.site, str(operation.notes["result"]))]
    return event


def _reaches_a_border(row: Row, read: Glance) -> bool:
    """Whether numbers reach a border of an operation's domain, other than 0, at which its slope is infinite."""
    domain = row.domain
    if domain is None:
        return False
    is_low = domain.low != 0 and domain.low in row.steep and read.low <= domain.low
    return is_low or (domain.high in row.steep and read.high >= domain.high)


def _is_steep(child: Operation, operation: Operation) -> bool:
    """Whether the slope of `child` in what `operation` gave has no end at zero."""
    spelling = spelling_of(child.name)
    if spelling.row.divides is not None:
        at = spelling.place(spelling.row.divides)
        others = [*child.sources[:at], *child.sources[at + 1 :]]
        return len(child.sources) > at and child.sources[at] is not None and operation not in others
    if spelling.row.kind is Kind.POWER:
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
