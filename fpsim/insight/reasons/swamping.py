"""Find sums that lose terms (swamping): each sum is recomputed in float64 from its operands."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fpsim.emulation.operations import Kind, row_of, spelling_of
from fpsim.emulation.tracing import Operation
from fpsim.insight.ranges import Ends, first_index
from fpsim.insight.reasons.event import Event
from fpsim.insight.reasons.widening import LOW
from fpsim.tensors.accumulators import Accumulator
from fpsim.tensors.spec import rounding_spec
from fpsim.torch_internals import map_leaves

__all__ = [
    "HALF_ULP",
    "WRONG",
    "Sums",
    "Swamped",
    "additions_behind",
    "integers_event",
    "swamped",
    "swamped_event",
    "swamped_gradient_event",
    "swamped_in",
]

WRONG = 8.0  # a sum with an error of more half ulps than this is wrong
HALF_ULP = 2.0**-24  # half an ulp of 1 in float32
SHARE = 0.125  # a sum is swamped if this share of its terms is lost, as by 64 roundings of half an ulp of bfloat16
FELT = 0.01  # from this relative error on, a sum in an emulated accumulator is an event
MASK = 1e30  # a number from this magnitude on is a mask
# Operations that add up many numbers in one call. The operations of `INTO` add them to their first argument.
INTO = frozenset("index_add index_put scatter_add".split())
INSIDE = frozenset("sum nansum mean cumsum dot vdot inner mv trace".split()) | INTO
# Operations that return the numbers of their argument in the same order.
SAME = frozenset("detach clone contiguous alias view reshape unsqueeze squeeze flatten data".split())


class Swamped(NamedTuple):
    """A sum that is wrong.

    half_ulps: the error in half ulps. error: the relative error. mine, true: the sum's value, and the exact value.
    terms: the number of terms. ends: the range of the format in which the terms are added up.
    """

    half_ulps: float
    error: float
    mine: str
    true: str
    terms: int
    ends: Ends

    def __str__(self) -> str:
        return (
            f"A sum of {self.terms} terms is {self.mine} in {self.ends.name}, and {self.true} if the same terms are "
            f"added up in float32: {self.half_ulps:.3g} times half an ulp, a relative error of {self.error:.3g}."
        )


@dataclass
class _Sum:
    """The value that a tensor would have if all its terms had been added exactly.

    total: this value, in float64. largest: the largest magnitude of its partial sums. held: the tensor's own value.
    added: the sum of the magnitudes of all terms that were added, one by one, to something larger.
    """

    total: Tensor
    largest: Tensor
    held: Tensor
    terms: int
    added: Tensor


class Sums:
    """Sums of a step's operations, recomputed in float64. Terms are added one by one, or many in one call.

    A sum is wrong if its error is more than 8 times this bound: half an ulp of the exact value or of the largest
    partial sum, plus the largest error of the sum in float32. Errors are root mean squares over the elements.
    """

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()  # {tensor: _Sum}

    @torch.no_grad()
    def add(
        self, operation: Operation, given: list[Tensor], read: list[Tensor], result: Tensor, call: tuple[Any, Any]
    ) -> None:
        """Visit an operation, and note whether it adds, and the error of its result.

        given: the operands. read: the operands' values at the time of the call. call: all arguments of the call.
        """
        row, ends, is_native = row_of(operation.name), operation.notes["ends"], False
        name = row.name.removesuffix("_")
        if row.kind is Kind.ADDITION or name == "lerp":
            new = self._of_addition(operation, given, read, call)
        elif row.kind is Kind.MULTIPLICATION or name == "div":
            new = self._of_factor(operation, given, read, call)
        elif name in INSIDE:
            # An emulated sum is rounded once, for any number of terms. Its operands may not be rounded yet.
            is_native = isinstance(ends.holder, torch.dtype) and all(x.dtype is ends.holder for x in read)
            is_wanted = _is_low(ends) and (is_native or name in INTO)
            new = self._of_many(name, given, read, call) if is_wanted else None
        elif row.kind is Kind.CAST or name in SAME:
            new = self._of_same(operation, given, read, result)
        else:
            return
        if new is None or new.total.shape != result.shape:
            return
        new.held = result.detach().clone()
        self._known[result] = new
        operation.notes["adds"] = True
        if _is_low(ends) and not operation.notes["result"].kinds:
            slack = new.terms * HALF_ULP * new.largest
            # A native sum in one call is rounded once, so half ulps of its result count. In any other sum the partial
            # sums are rounded too, and they may be larger.
            scale = new.total.abs() if name in INSIDE and is_native else new.largest
            added = None if name in INSIDE else new.added
            operation.notes["swamped"] = swamped(result, new.total, scale, slack, ends, new.terms, added)

    def _of(self, x: Any, given: list[Tensor], read: list[Tensor]) -> _Sum:
        """Return the exact value of an argument: a sum that was tracked, or the argument's own numbers."""
        if not isinstance(x, Tensor):
            total = torch.tensor(float(x), dtype=torch.float64)
            return _Sum(total, total.abs(), total, int(x != 0), torch.zeros_like(total))
        tensor = next((g for g, r in zip(given, read, strict=True) if r is x), x)
        known = self._known.get(tensor)
        # If the tensor was written to in the meantime, it no longer holds the sum that was tracked.
        if known is not None and known.held.shape == x.shape and torch.equal(known.held, x):
            return known  # type: ignore[no-any-return]
        total = x.detach().double()
        return _Sum(total, total.abs(), x, 1, torch.zeros_like(total))

    def _of_addition(
        self, operation: Operation, given: list[Tensor], read: list[Tensor], call: tuple[Any, Any]
    ) -> _Sum | None:
        spelling, (args, kwargs) = spelling_of(operation.name), call
        is_lerp = spelling.row.name == "lerp"
        values = [spelling.get(i, args, kwargs) for i in (0, 1)]
        values[1] = kwargs.get("end", values[1]) if is_lerp else values[1]
        alpha = kwargs.get("weight" if is_lerp else "alpha", args[2] if len(args) > 2 else 1)
        if not all(isinstance(x, Tensor | int | float) for x in (*values, alpha)):
            return None
        # A sum is not tracked if all its operands and its result are float32.
        is_low = any(isinstance(x, Tensor) and (x.dtype in LOW or self._is_known(x, given, read)) for x in values)
        if not is_low and not _is_low(operation.notes["ends"]):
            return None
        a, b = (self._of(x, given, read) for x in values)
        alpha = alpha.double() if isinstance(alpha, Tensor) else alpha
        change = alpha * (b.total - a.total if is_lerp else b.total)
        total = a.total - change if spelling.row.name == "sub" else a.total + change
        largest = torch.maximum(torch.maximum(a.largest, abs(alpha) * b.largest), total.abs())
        added = a.added + b.added + torch.minimum(a.total.abs(), abs(change))
        return _Sum(total, largest, total, a.terms + b.terms, added)

    def _of_factor(
        self, operation: Operation, given: list[Tensor], read: list[Tensor], call: tuple[Any, Any]
    ) -> _Sum | None:
        """Return a sum that is multiplied or divided by another number, as in a moving average."""
        spelling, (args, kwargs) = spelling_of(operation.name), call
        a, b = (spelling.get(i, args, kwargs) for i in (0, 1))
        if not any(isinstance(x, Tensor) and self._is_known(x, given, read) for x in (a, b)):
            return None
        if not all(isinstance(x, Tensor | int | float) for x in (a, b)) or "rounding_mode" in kwargs:
            return None
        parts = [self._of(x, given, read) for x in (a, b)]
        if not any(part.terms > 1 for part in parts):
            return None
        (a, b), combined = parts, torch.div if spelling.row.name == "div" else torch.mul
        largest = combined(a.largest, b.total.abs() if combined is torch.div else b.largest)
        added = combined(a.added, b.total.abs()) + (0 if combined is torch.div else a.total.abs() * b.added)
        return _Sum(combined(a.total, b.total), largest, a.total, a.terms + b.terms - 1, added)

    def _is_known(self, x: Tensor, given: list[Tensor], read: list[Tensor]) -> bool:
        return any(r is x and g in self._known for g, r in zip(given, read, strict=True))

    def _of_many(self, name: str, given: list[Tensor], read: list[Tensor], call: tuple[Any, Any]) -> _Sum | None:
        """Return the exact sum of a call that adds up many numbers; None if torch.<name> refuses its arguments."""
        (args, kwargs), known = call, None
        if name in INTO and args and isinstance(args[0], Tensor):
            known = self._of(args[0], given, read)

        def wide(x: Any, magnitudes: bool) -> Any:
            if isinstance(x, torch.dtype):
                return torch.float64
            if not isinstance(x, Tensor) or not x.is_floating_point():
                return x
            if known is not None and x is args[0]:
                return known.largest if magnitudes else known.total
            return x.detach().double().abs() if magnitudes else x.detach().double()

        # The call runs twice in float64: on the values, and on their magnitudes, which bound the partial sums.
        with suppress(Exception):
            totals = []
            for magnitudes in (False, True):
                values, options = map_leaves(lambda x, m=magnitudes: wide(x, m), (args, kwargs))  # type: ignore[misc]
                totals.append(getattr(torch, name)(*values, **options))
            most = max(x.numel() for x in read)
            terms = (0 if known is None else known.terms) + max(1, most // max(totals[0].numel(), 1))
            terms = most if name == "cumsum" else terms
            return _Sum(totals[0], totals[1], totals[0], terms, torch.zeros_like(totals[0]))
        return None

    def _of_same(self, operation: Operation, given: list[Tensor], read: list[Tensor], result: Tensor) -> _Sum | None:
        if len(read) != 1 or read[0].numel() != result.numel():
            return None
        source = operation.sources[0]
        is_cast = read[0].dtype in LOW or (
            source is not None and "ends" in source.notes and _is_low(source.notes["ends"])
        )
        if not self._is_known(read[0], given, read) and not (is_cast and row_of(operation.name).kind is Kind.CAST):
            return None
        known = self._of(read[0], given, read)
        total, largest, added = (x.reshape(result.shape) for x in (known.total, known.largest, known.added))
        return _Sum(total, largest, total, known.terms, added)


def _is_low(ends: Ends) -> bool:
    return ends.epsilon > 2 * HALF_ULP


def swamped(
    result: Tensor,
    true: Tensor,
    scale: Tensor,
    slack: Tensor,
    ends: Ends,
    terms: int,
    added: Tensor | None = None,
) -> Swamped | None:
    """Describe the error of a sum; None if it is right.

    true: float64. scale: the error is measured in half ulps of these magnitudes. slack: the largest error of float32.
    added: the sum of the magnitudes of terms that were added one by one to larger numbers.
    """
    mine = result.detach().double()
    # Masks and overflows are left out: a single one would hide all other errors.
    numbers = true.isfinite() & (true.abs() < min(MASK, ends.largest)) & mine.isfinite()
    error, exact = (mine - true)[numbers], true[numbers]
    half_ulps = wrong_by(error, scale.expand(true.shape)[numbers], slack.expand(true.shape)[numbers], ends)
    if half_ulps <= WRONG:
        return None
    # Sixty equal terms are all rounded alike. Their sum is inaccurate, but no term is swamped. So the error counts only
    # if it is at least an eighth of the added terms.
    if added is not None and float(error.norm()) < SHARE * float(added.expand(true.shape)[numbers].norm()):
        return None
    shown = [
        f"{float(x.min()):.6g} to {float(x.max()):.6g}" if x.numel() > 1 else f"{float(x.sum()):.6g}"
        for x in (mine[numbers], exact)
    ]
    relative = float(error.norm() / exact.norm()) if bool(exact.any()) else float("inf")
    return Swamped(half_ulps, relative, shown[0], shown[1], terms, ends)


def wrong_by(error: Tensor, scale: Tensor, slack: Tensor, ends: Ends) -> float:
    """Express an error in half ulps of the magnitudes `scale`, as a root mean square over the elements."""
    exponents = torch.frexp(scale.clamp(min=max(ends.smallest, 1e-300)))[1] - 1
    half_ulp = torch.ldexp(torch.full_like(scale, ends.epsilon / 2), exponents).clamp(min=ends.smallest / 2)
    # The error of stochastic rounding is up to a whole ulp.
    if getattr(ends.holder, "rounding", "") == "stochastic":
        half_ulp = 2 * half_ulp
    allowed = float((half_ulp + slack).norm())
    return float(error.norm()) / allowed if allowed else 0.0


def swamped_in(accumulator: Accumulator, a: Tensor, b: Tensor, added: Tensor | None, result: Tensor) -> Swamped | None:
    """Compare a product in an emulated accumulator with float64; return None if it is right."""
    ends = Ends.of_spec(rounding_spec(accumulator.result_format, accumulator.rounding))
    total, most = torch.matmul(a.double(), b.double()), torch.matmul(a.double().abs(), b.double().abs())
    if added is not None:
        total, most = total + added.double(), most + added.double().abs()
    terms = a.shape[-1]
    wrong = swamped(result, total, total.abs(), terms * HALF_ULP * most, ends, terms)
    # Recipes have accumulators of 14 bits: a smaller error is negligible compared with the rounding of the operands.
    return None if wrong is None or wrong.error < FELT else wrong


def additions_behind(operation: Operation) -> list[Operation]:
    """Return the additions that make up a sum, from last to first, and then the operation to whose result they add."""
    found, waiting = {id(operation): operation}, [operation]
    while waiting:
        at = waiting.pop()
        if not at.notes.get("adds"):
            continue
        for parent in at.parents:
            if (
                id(parent) not in found
                and parent.name != "parameter"
                and (parent.notes.get("adds") or parent is at.sources[0])
            ):
                found[id(parent)] = parent
                waiting.append(parent)
    return sorted(found.values(), key=lambda o: -o.index)


def swamped_event(operation: Operation) -> Event:
    """Return the event of the sum to which an operation belongs, at the addition with the largest error."""
    at, further = operation, _next_addition(operation)
    while further is not None:
        wrong: Swamped | None = further.notes.get("swamped")
        # Operations that pass the sum on have the same error, except for rounding.
        if wrong is not None and wrong.error > 1.001 * at.notes["swamped"].error and _adds(further):
            at = further
        further = _next_addition(further)
    event = _event(at, "activation", at.notes["swamped"])
    event.stretch = additions_behind(at)
    if operation is not at:
        event.why.append(f"It is wrong from {operation.site} on.")
    return event


def _next_addition(operation: Operation) -> Operation | None:
    return next((c for c in operation.children if c.notes.get("adds")), None)


def _adds(operation: Operation) -> bool:
    row = row_of(operation.name)
    return row.kind in (Kind.ADDITION, Kind.PRODUCT) or row.name in INSIDE or row.name == "lerp"


def swamped_gradient_event(operation: Operation) -> Event:
    """Return the event of a gradient that an emulated accumulator adds up."""
    event = _event(operation, "error", operation.notes["swamped_gradient"])
    event.stretch = [operation]
    return event


def _event(at: Operation, role: str, wrong: Swamped) -> Event:
    count = at.notes["result"].count
    event = Event("float32", "swamping", at.site, role, count, count, [str(wrong)], at, at, remedy="sum")
    event.fmt, event.ends = wrong.ends.name, wrong.ends
    event.reads_of(at)
    return event


def integers_event(
    operation: Operation, integers: tuple[Tensor, Tensor], numbers: Mapping[Any, tuple[Tensor, Tensor | None]]
) -> Event | None:
    """Return the event of integers that are read from a result whose format cannot hold them; None if all are right.

    integers: the integers that were read, in the step and in float32.
    numbers: results by the id of an operation, in the step and in float32.
    """
    mine, true = integers
    result = numbers[id(operation)][1]
    if mine.shape != true.shape or result is None or result.shape != true.shape:
        return None
    # Only whole numbers are compared: the cast to integers rounds any other number, in float32 too.
    lost = (mine != true) & (result.double() == true.double())
    # Go back to the operation at which the numbers begin to differ from those of float32.
    at, way = operation, {id(operation): operation}
    while (
        before := next((p for p in at.parents if id(p) not in way and _differs(numbers.get(id(p)))), None)
    ) is not None:
        at = before
        way[id(at)] = at
    ends = at.notes["ends"]
    if not ends.epsilon:
        return None
    # A format with p bits holds all integers up to 2**p, and its epsilon is 2**(1 - p).
    holds = 2 / ends.epsilon
    lost &= true.double().abs() > holds
    if not bool(lost.any()):
        return None
    event = Event("float32", "integers lost", at.site, "activation", int(lost.sum()), lost.numel())
    event.operation = event.origin = at
    event.fmt, event.ends, event.remedy = ends.name, ends, "sum"
    event.stretch = [*way.values()]
    event.why.append(
        f"{event.count} of {event.of} integers that are read from it differ from float32's (first at "
        f"{first_index(lost) or '0'}): {int(mine[lost][0])} for {int(true[lost][0])}. {ends.name} holds all integers "
        f"up to {holds:g}."
    )
    event.reads_of(at)
    return event


def _differs(pair: tuple[Tensor, Tensor | None] | None) -> bool:
    if pair is None or pair[1] is None or pair[0].shape != pair[1].shape:
        return False
    return not torch.equal(pair[0].double(), pair[1].double())
