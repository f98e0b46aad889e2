"""Explain why a result, or a gradient, became inf or NaN, from its operands and their operations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fpsim.emulation.operations import Domain, Kind, Row, row_of, spelling_of
from fpsim.emulation.tracing import Operation
from fpsim.insight.masks import number_in
from fpsim.insight.ranges import Ends, Glance, first_index, glance
from fpsim.insight.reasons.event import Event
from fpsim.insight.reasons.explaining_losses import (
    Look,
    of_alignment,
    of_determinant,
    of_emptiness,
    of_normalisation,
    of_poles,
    of_softmax,
    of_target,
)

__all__ = ["explain_forward", "explain_gradient", "source_name", "zero_divisors"]


def explain_forward(
    operation: Operation,
    operands: list[Tensor],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    result: Tensor,
    kinds: set[str],
    ends: Ends,
) -> Event:
    """Return the event of an operation with finite operands, and a result that is not finite.

    kinds: which of "NaN", "inf" and "-inf" are in the result, and are not explained by its operands.
    ends: the ends of the result's format, or of its dtype.
    """
    numbers = glance(result)
    event = Event("forward", "", operation.site, "activation", operation=operation, origin=operation, ends=ends)
    event.count, event.of, event.fmt = numbers.nonfinite, numbers.count, ends.name
    look = Look(operation, operands, *arguments, ~result.isfinite(), numbers)
    event.read = [(source_name(s, i), str(_read(s, x))) for i, (s, x) in enumerate(look.read)]
    if any(explain(event, look) for explain in _EXPLANATIONS):
        return event
    # Infinities among the operands are checked first, then those among the arguments. An overflow comes last: its only
    # sign is that nothing else explains the result.
    infinite = [(i, s, x) for i, (s, x) in enumerate(look.read) if bool(x.isinf().any())]
    if kinds == {"NaN"} and infinite:
        i, source, x = infinite[0]
        held = "inf" if bool((x == torch.inf).any()) else "-inf"
        event.kind = what = _of_infinities(operation.name, [other for other in operands if other is not x])
        words = f"are {what}" if what != "NaN" else "are NaN"
        event.why.append(f"{event.count} of {event.of} {words}; {source_name(source, i)} holds {held}.")
        return event
    if given := [c for c in operation.notes["numbers"] if not math.isfinite(c)]:
        return _of_numbers(event, kinds, given, operands)
    row = row_of(operation.name)
    # The partial sums of products may overflow to both infinities, and the sum of these is NaN.
    sums_products = row.kind is Kind.PRODUCT or (row.kind is Kind.NORMALISATION and row.adds)
    if kinds - {"NaN"} or sums_products or any(float(glance(x).amax) > ends.largest for x in operands):
        event.kind = "overflow"
        whole = [x for x in look.arguments if isinstance(x, Tensor) and not x.is_floating_point()]
        large = [f"{what} {text}" for what, text in event.read[:2]] or [f"integers {glance(x)}" for x in whole[:1]]
        words = event.beyond(ends.name, ends.largest, first_index(look.no_number))
        event.why.append(f"{words}; it read {' and '.join(large) or 'nothing'}.")
        return event
    event.kind = "NaN"
    event.why.append(f"{event.count} of {event.of} are NaN, and what it read is finite.")
    return event


def _of_numbers(event: Event, kinds: set[str], given: list[float], operands: list[Tensor]) -> Event:
    """Explain a result by non-finite Python numbers among the arguments of the call."""
    assert event.operation is not None
    has_nan = "NaN" in kinds
    is_made = has_nan and not any(map(math.isnan, given))
    event.kind = _of_infinities(event.operation.name, operands) if is_made else "NaN" if has_nan else "infinity"
    which = "infinite" if event.kind == "infinity" else event.kind
    event.why.append(f"{event.count} of {event.of} are {which}; {given[0]:g} is among the arguments of the call.")
    return event


def _read(source: Operation | None, x: Tensor) -> Glance:
    """Return a glance at an operand."""
    # The glance in the operand's notes is preferred: if the operation was in place, the tensor holds the result now.
    known: Glance | None = None if source is None else source.notes.get("result")
    return known or glance(x)


def _of_infinities(name: str, others: list[Tensor]) -> str:
    """Name the operation on infinities whose result is NaN. others: the other operands."""
    row = row_of(name)
    if row.kind is Kind.DIVISION:
        return "infinity by infinity"
    if row.adds:
        return "infinity minus infinity"
    if row.multiplies or row.kind in (Kind.LOSS, Kind.CROSS_ENTROPY):
        return "zero times infinity"
    if row.kind is Kind.PRODUCT:
        return "zero times infinity" if any(bool((x == 0).any()) for x in others) else "infinity minus infinity"
    return "NaN"


def source_name(source: Operation | None, position: int) -> str:
    return f"operand {position + 1} (from outside)" if source is None else source.site


def _of_division(event: Event, look: Look) -> bool:
    """Explain a result by a divisor that is 0, or by 0 to a negative power."""
    spelling = spelling_of(look.name)
    row, divisor, inverts = spelling.row, None, True
    if row.name in ("normalize", "cosine_similarity"):
        return _of_lost_eps(event, look)
    if row.divides is not None:
        divisor = spelling.get(row.divides, look.values, look.options)
    elif row.kind is Kind.POWER:
        divisor, exponent = spelling.get(0, look.values, look.options), spelling.get(1, look.values, look.options)
        inverts = exponent is not None and exponent < 0
    if divisor is None:
        return False
    if not isinstance(divisor, Tensor):
        divisor = torch.tensor(float(divisor))
    zeros = (divisor == 0) & inverts
    if not bool(zeros.any()):
        return False
    both = torch.broadcast_shapes(zeros.shape, look.no_number.shape) == look.no_number.shape
    where = zeros.broadcast_to(look.no_number.shape) & look.no_number if both else look.no_number
    n = int(where.sum())
    if not n:
        return False
    is_nan = look.numbers.nan == look.numbers.nonfinite
    over = "the rest of a division by 0" if row.name in ("remainder", "fmod") else "0 / 0" if is_nan else "x / 0"
    event.kind = "division by zero"
    at = first_index(where)
    event.why.append(f"{n} of {event.of} are {over}" + (f" (first at {at})." if at else "."))
    if not divisor.is_floating_point():
        event.read.append(("divisor (integers)", f"{int(zeros.sum())} of {divisor.numel()} zero"))
        event.why.append("The divisor is an integer, a count, and is 0.")
        event.remedy = "clamp"
        return True
    source = next((s for s, x in look.read if x is divisor), None)
    _trace_zero(event, source)
    # A norm or a standard deviation may be a whole number too, but it is not a count.
    is_measure = source is not None and row_of(source.name).is_measure
    is_whole = bool((divisor == divisor.round()).all()) and not bool((divisor < 0).any())
    if event.origin is look.operation and is_whole and not is_measure:
        event.why.append("It has whole numbers only, as a count has.")
        event.remedy = "clamp"
    return True


def zero_divisors(operation: Operation, values: tuple[Any, ...], options: dict[str, Any]) -> str:
    """Describe how many divisors of a division are zero; "" if none is, and for other operations."""
    spelling = spelling_of(operation.name)
    if spelling.row.divides is None:
        return ""
    divisor = spelling.get(spelling.row.divides, values, options)
    if isinstance(divisor, Tensor):
        zeros = int((divisor == 0).sum())
        return f"{zeros} of {divisor.numel()} divisors" if zeros else ""
    return "1 of 1 divisors" if isinstance(divisor, int | float) and divisor == 0 else ""


def _trace_zero(event: Event, source: Operation | None) -> None:
    """Find the operation that made a divisor zero, and set it as the place of the remedy."""
    at, steps = source, 0
    nearest: Operation | None = None
    # Go back through results with zeros, to a constant that was lost, or to an operation whose operands have no zeros.
    while at is not None and steps < 12 and at.name != "parameter":
        steps += 1
        ends: Ends = at.notes["ends"]
        # A constant below 0.01 is taken for an eps.
        lost = [c for c in at.notes["numbers"] if c and abs(c) < 1e-2 and not ends.holds(c)]
        if lost and at.notes["result"].has_zeros and row_of(at.name).name in ("add", "clamp", "clamp_min"):
            event.origin, event.constant, event.remedy = at, lost[0], "eps"
            event.why.append(
                f"The divisor is 0 because {at.site} lost its constant: 0 + {lost[0]:g} is 0 in {ends.name} "
                f"(least number {ends.smallest:.3g})."
            )
            return
        operands = [p for p in at.parents if p.notes.get("result") is not None]
        if at.notes["result"].has_zeros and not any(p.notes["result"].has_zeros for p in operands) and operands:
            nearest = at
            break
        following = [p for p in operands if p.notes["result"].has_zeros]
        if not following:
            break
        at = following[0]
    if nearest is not None and nearest.computes:
        event.origin = nearest
        ranges = " and ".join(f"{p.site} {p.notes['result']}" for p in nearest.parents[:2])
        event.why.append(f"The divisor is 0 because {nearest.site} underflows to 0; it read {ranges}.")
    elif source is not None:
        event.why.append(f"The divisor is {source.site}, with {source.notes['result']}.")


def _of_lost_eps(event: Event, look: Look) -> bool:
    """Explain the NaN of normalize or cosine_similarity by an eps that the format rounds to 0."""
    # Without an argument, eps is torch's default: 1e-12 for normalize, 1e-8 for cosine_similarity.
    eps = next((c for c in number_in(look.arguments) if 0 < c < 1e-3), 1e-12 if look.name == "normalize" else 1e-8)
    if event.ends.holds(eps):
        return False
    event.kind, event.constant, event.remedy = "division by zero", eps, "eps"
    event.why.append(
        f"{event.count} of {event.of} are 0 / 0, because its eps {eps:g} is 0 in {event.ends.name} (least number "
        f"{event.ends.smallest:.3g})."
    )
    return True


def _of_domain(event: Event, look: Look) -> bool:
    """Explain a result by numbers outside of the operation's domain, or on its border."""
    spelling = spelling_of(look.name)
    row, domain = spelling.row, spelling.row.domain or Domain(0.0)
    x = spelling.get(domain.at, look.values, look.options)
    if x is None or (row.domain is None and row.kind is not Kind.POWER):
        return False
    x = x if isinstance(x, Tensor) else torch.tensor(float(x))
    begins = domain.low
    zeros, negatives = int((x == begins).sum()) * (not domain.holds_low), int((x < begins).sum())
    above = int(((x > domain.high) if domain.holds_high else (x >= domain.high)).sum()) if domain.high < math.inf else 0
    if row.kind is Kind.LOGARITHM and (zeros or negatives):
        event.kind = "logarithm of a negative number" if negatives else "logarithm of zero"
        which = f"are {f'below {begins:g}' if begins else 'negative'}" if negatives else f"are {begins:g}"
        event.why.append(f"{negatives or zeros} of the {x.numel()} numbers that it read {which}.")
        if event.kind == "logarithm of zero":
            source = next((s for s, y in look.read if y is x), None)
            # Mathematically, a softmax or a sigmoid of finite numbers is never 0: a 0 comes from underflow, and float32
            # helps.
            if source is not None and source.computes and row_of(source.name).underflows:
                event.origin = source
                event.why.append(
                    f"{source.site} underflows to 0 (least number of {event.ends.name} {event.ends.smallest:.3g})."
                )
        return True
    if row.kind is Kind.LOGARITHM and above:
        event.kind = "outside of its domain"
        event.why.append(f"{above} of the {x.numel()} numbers that it read are {domain.high:g} or more.")
        return True
    if row.kind is Kind.ROOT and negatives:
        event.kind = "root of a negative number"
        event.why.append(f"{negatives} of {x.numel()} are negative, down to {float(x.min()):.3g}.")
        return True
    if row.kind is Kind.BOUNDED and (zeros or negatives or above):
        event.kind = "outside of its domain"
        event.why.append(f"{look.name} read {glance(x)}.")
        return True
    if row.kind is Kind.POWER and negatives and event.count:
        exponent = spelling.get(1, look.values, look.options)
        if exponent is not None and bool(torch.as_tensor(exponent).double().frac().any()):
            event.kind = "root of a negative number"
            which = (
                "some exponents are not whole numbers"
                if isinstance(exponent, Tensor)
                else f"the exponent is {exponent:g}"
            )
            event.why.append(f"{negatives} of {x.numel()} are negative, and {which}.")
            return True
    return False


_EXPLANATIONS = (
    *(_of_division, _of_domain, of_softmax, of_emptiness, of_alignment),
    *(of_target, of_normalisation, of_determinant, of_poles),
)


def explain_gradient(operation: Operation, at: Operation, role: str, gradient: Tensor, kinds: set[str]) -> Event:
    """Return the event of a gradient that is not finite, but was computed from finite gradients.

    operation: the operation or parameter of the gradient. at: the operation that the event names; it is not a view.
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
            event.why.append(f"{what}, where the slope of {child.name} is infinite{came}.")
            event.why.append(f"{event.count} of {event.of} gradients of {at.site} are not finite.")
            event.read = [(at.site, str(read))]
            event.read += [(f"gradient of {child.site}", str(arrived))] if arrived is not None else []
            event.remedy = "slope"
            return event
    if _of_infinite_slope(event, readers, operation, numbers) or _of_decomposition(event, readers, at):
        return event
    if _of_zero_divisors(event, readers, at):
        return event
    # Nothing else explains the event, so the gradient is too large for its format. The exception is a gradient for
    # which no product of the numbers comes near the end of the format.
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


def _of_infinite_slope(event: Event, readers: list[Operation], operation: Operation, numbers: Glance) -> bool:
    """Explain a gradient by a slope computed from an infinity: log(0) in a logsumexp, or an infinite factor."""
    if not numbers.nan:
        return False
    for child in readers:
        result: Glance | None = child.notes.get("result")
        row = row_of(child.name)
        if row.kind is Kind.LOG_SUM and result is not None and result.minus:
            event.kind, event.remedy = "infinity minus infinity", "floor"
            event.why.append(
                f"{result.minus} of {result.count} results of {child.name} are -inf, because all that it adds is "
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
        _blame(event, child, operation)
        return True
    return False


def _blame(event: Event, reader: Operation, at: Operation) -> None:
    """Set the reader of a result as the place at which the result's gradient broke. at: the result's operation."""
    event.place, event.operation, event.origin = reader.site, reader, reader
    event.why.append(f"{event.count} of {event.of} gradients of {at.site} are not finite.")
    event.reads_of(reader)


def _of_zero_divisors(event: Event, readers: list[Operation], at: Operation) -> bool:
    """Explain a gradient by a division by 0: the slope in the dividend is 1 / 0, and the incoming gradient may be 0."""
    child = next((c for c in readers if c.notes.get("zero divisors")), None)
    if child is None:
        return False
    event.kind, event.remedy = "division by zero", "clamp"
    event.why.append(f"The slope of {child.name} is 1 / 0 where its divisor is 0 ({child.notes['zero divisors']}).")
    _blame(event, child, at)
    return True


def _of_decomposition(event: Event, readers: list[Operation], at: Operation) -> bool:
    """Explain a gradient by equal eigenvalues or singular values: their vectors may rotate, and have no slope."""
    child = next((c for c in readers if row_of(c.name).kind is Kind.DECOMPOSITION), None)
    if child is None:
        return False
    event.kind, event.remedy = "infinite slope", "slope"
    values = "singular values" if "svd" in child.name else "eigenvalues"
    event.why.append(
        f"The vectors of {child.name} have no slope where two {values} are equal: it divides by their difference."
    )
    _blame(event, child, at)
    return True


def _is_too_small_for_overflow(operation: Operation, readers: list[Operation], numbers: Glance, ends: Ends) -> bool:
    """True if no slope that is a product of operands and results comes near the end of the format."""
    known = [c for c in readers if "gradient" in c.notes and "result" in c.notes]
    # The slope of a root or a logarithm is large at small operands, even if none of them is zero.
    if any(0.0 in row_of(c.name).steep for c in known):
        return False
    sizes, count = [1.0, numbers.amax], 1
    for child in known:
        sizes += [child.notes["result"].amax, *(g.amax for g in child.notes["operands"])]
        sizes += [abs(c) for c in child.notes["numbers"]]
        count = max(count, child.notes["result"].count)
    incoming = max((c.notes["gradient"].amax for c in known), default=max(numbers.amax, 1.0))
    if any(c.notes["gradient"].kinds for c in known) or operation.name == "parameter":
        return False
    largest = max(sizes)
    # A product is written out instead of `largest**3`: Python's power raises OverflowError, and a product becomes inf.
    return incoming * largest * largest * largest * count < ends.largest


def _of_unknown_slope(event: Event, readers: list[Operation], operation: Operation, at: Operation) -> Event:
    """Blame the only function that reads the result, or one that was not seen, for a gradient without overflow."""
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
        who = "what reads it" if known else "a function that is not seen, such as a custom autograd function,"
        event.why.append(f"{event.count} of {event.of} gradients that {who} gives are not finite; no number is large.")
        event.remedy = "unseen"
    event.read = [(operation.site, str(operation.notes["result"]))]
    return event


def _reaches_a_border(row: Row, read: Glance) -> bool:
    """True if numbers reach a border of an operation's domain, other than 0, at which the slope is infinite."""
    domain = row.domain
    if domain is None:
        return False
    is_low = domain.low != 0 and domain.low in row.steep and read.low <= domain.low
    return is_low or (domain.high in row.steep and read.high >= domain.high)


def _is_steep(child: Operation, operation: Operation) -> bool:
    """True if the slope of `child` with respect to the result of `operation` is unbounded at zero."""
    spelling = spelling_of(child.name)
    if spelling.row.divides is not None:
        at = spelling.place(spelling.row.divides)
        others = [*child.sources[:at], *child.sources[at + 1 :]]
        return len(child.sources) > at and child.sources[at] is not None and operation not in others
    if spelling.row.kind is Kind.POWER:
        return any(c < 1 for c in child.notes["numbers"])
    return True


def _ends_of(operation: Operation) -> Ends:
    """Return the range of a gradient's format, or of the smallest format of the operations that compute it."""
    ends = [c.notes["ends"] for c in operation.children if "ends" in c.notes]
    own = operation.notes.get("gradient_ends") or operation.notes.get("ends")
    if operation.name == "parameter":
        ends += [operation.notes["gradient_ends"]] if "gradient_ends" in operation.notes else []
    elif own is not None:
        ends.append(own)
    return min(ends, key=lambda e: e.largest)


def _readers(operation: Operation) -> list[Operation]:
    """Return the operations that compute with a result or with a view of it; the views are left out."""
    readers: list[Operation] = []
    for child in operation.children:
        readers += [child] if child.computes else _readers(child)
    return readers
