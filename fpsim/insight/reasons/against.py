"""Compare a step with the same step in float32: lost gradients, lost results, and errors that grow."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fpsim.emulation.operations import Kind, row_of
from fpsim.emulation.tracing import Operation
from fpsim.insight.compare import GONE, GROWTH, Errors, key_of, nothing_is_left
from fpsim.insight.ranges import Ends, Glance
from fpsim.insight.reasons.event import Event
from fpsim.insight.reasons.gradient_sums import GradientSum
from fpsim.insight.reasons.swamping import (
    Sums,
    Swamped,
    integers_event,
    swamped_event,
    swamped_gradient_event,
    swamped_in,
)
from fpsim.insight.reasons.timeline import Rounded, Timeline
from fpsim.insight.reasons.widening import LOW
from fpsim.tensors.accumulators import Accumulator
from fpsim.torch_internals import current_graph_task
from fpsim.torch_modes import without_torch_function

__all__ = [
    *("Keeping", "around", "error_event", "lost_gradient", "may_be_lost", "ratio", "relative_errors", "shortened"),
]

LOST = 0.99  # a gradient is lost if at least this share of its non-zero numbers became zero
HALF = 0.5  # from this lost share of the readers' gradients on, the loss is taken to begin at the readers
BEGUN = 0.1  # from this lost share on, a loss of gradients has begun
FELT = 0.05  # from this missing part on, the loss of a parameter's gradient matters
NOISE = 1e-4  # a sum below this times the summed gradients is the remainder of numbers that cancel
CANCELLED = 2.0**-20  # a sum of two gradients below this times their size is float32's rounding error
GROWN, LARGE = 8.0, 0.1  # from this growth and this size on, an error is an event
Key = tuple[str, int, int]


class Keeping(Timeline):
    """Timeline that keeps each result for a comparison."""

    def __init__(self, model: Any, results: bool = True) -> None:
        super().__init__(model)
        self.results: dict[Key, Tensor] = {}
        self.by_key: dict[Key, Operation] = {}
        self.order: list[Key] = []
        self.integers: dict[Key, Tensor] = {}  # integers that are read from a result
        self.gradient_sums: dict[str, GradientSum] = {}  # of parameters, by name
        self.averages: Any = None  # an `Averages` that visits each operation too
        self._keeps, self._sums = results, Sums()
        self._accumulated: Swamped | None = None  # the error in the accumulator of the product that runs now
        self._parameters = dict(model.named_parameters())

    def forward(self, operation: Operation, operands: list[Tensor], result: Tensor) -> None:
        super().forward(operation, operands, result)
        if self.is_update(result):
            return
        key = _key(operation)
        self.by_key[key] = operation
        self.order.append(key)
        if self._keeps:
            self.results[key] = result.detach().clone()

    def judge(
        self, operation: Operation, given: list[Tensor], operands: list[Tensor], result: Tensor, rounded: list[Rounded]
    ) -> None:
        super().judge(operation, given, operands, result, rounded)
        assert self.trace is not None
        if self.averages is not None:
            self.averages.see(operation, given)
        if self._keeps:
            self._sums.add(operation, given, operands, result, self.trace.arguments)
            if self._accumulated is not None:
                operation.notes["swamped"], self._accumulated = self._accumulated, None

    def keeps(self, x: Tensor) -> bool:
        assert self.trace is not None
        if self.averages is not None and not self.is_update(x):
            self.averages.written(x, self.trace.results.get(x) is None, self.trace.place)
        return super().keeps(x)

    def cast(self, operation: Operation, integers: Tensor) -> None:
        if self._keeps:
            self.integers[operation.site, operation.call, self.batch or 0] = integers.detach().clone()

    def summed(
        self, site: str, a: Tensor, b: Tensor, added: Tensor | None, result: Tensor, accumulator: Accumulator
    ) -> None:
        """Observe the result of a product that an emulated accumulator has added up."""
        if not self._keeps:
            return
        with without_torch_function():
            wrong = swamped_in(accumulator, a, b, added, result)
        # In the forward pass the product's operation is visited after this call; in a backward pass it is known.
        if current_graph_task() < 0:
            self._accumulated = wrong
        elif wrong is not None and (operation := self.last_at(site)) is not None:
            operation.notes.setdefault("swamped_gradient", wrong)

    def backward(self, operation: Operation, gradient: Tensor) -> None:
        super().backward(operation, gradient)
        if operation.name == "parameter" and self._keeps and gradient.dtype in LOW:
            known = self.gradient_sums.setdefault(operation.site, GradientSum())
            known.add(self._parameters[operation.site].grad, gradient)


def may_be_lost(seen: Keeping) -> bool:
    """True if any gradient of the step is mostly zero: then a run in float32 is worth its cost."""
    gradients = (o.notes["gradient"] for o in (*seen.operations, *seen.gradients) if "gradient" in o.notes)
    return any(gradient.nonzero < 0.5 * gradient.count for gradient in gradients)


def lost_gradient(seen: Keeping, reference: Keeping, wide: dict[str, Glance], short: Collection[str]) -> Event | None:
    """Return the event of the first gradient, in backward order, that is lost in the step but not in float32.

    wide: the gradients of parameters in the reference that no cast has rounded, by name.
    short: the names of parameters whose gradient is shorter than the reference's.
    """
    share: dict[int, float] = {}
    found: tuple[Operation, Glance, Glance] | None = None
    unfed: list[str] = []
    for operation in seen.gradients:
        gradient: Glance = operation.notes["gradient"]
        true = _true_gradient(operation, _same(operation, reference), reference, wide)
        if true is None or not true.nonzero or true.kinds or gradient.kinds:
            continue
        share[id(operation)] = lost = 1 - min(gradient.nonzero / true.nonzero, 1.0)
        # A few numbers among thousands of zeros say nothing about a format.
        if (
            lost < LOST
            or (true.count > 1 and true.nonzero < 0.001 * true.count)
            or _is_noise(operation, true, reference)
        ):
            continue
        if operation.name == "parameter" and not gradient.nonzero:
            unfed.append(operation.site)
        # If the gradients of the readers are lost too, gradients began to be lost at the readers.
        around = max((share.get(id(c), 0.0) for c in _readers(operation)), default=0.0)
        if found is None and around < LOST and (around < HALF or _matters(operation, short)):
            found = operation, gradient, true
    return None if found is None else _lost_event(*found, share, unfed)


def _same(operation: Operation, reference: Keeping) -> Operation | None:
    return reference.by_key.get(_key(operation))


def _matters(operation: Operation, short: Collection[str]) -> bool:
    """True if a parameter loses its gradient because of this lost gradient."""
    if operation.name == "parameter":
        return True
    # In a recurrent network, the gradient that goes back over many steps is negligible compared with that of the last
    # steps.
    parameters = [o.site for o in operation.all_behind().values() if o.name == "parameter"]
    return not parameters or any(name in short for name in parameters)


def _true_gradient(
    operation: Operation, other: Operation | None, reference: Keeping, wide: dict[str, Glance]
) -> Glance | None:
    """Return the gradient of a result or a parameter in the reference."""
    if operation.name == "parameter":
        return wide.get(operation.site) or next(iter(reference.arrived.get(operation.site, [])), None)
    return None if other is None else other.notes.get("gradient")


def _readers(operation: Operation) -> list[Operation]:
    """Return the operations that read a result or a view of it."""
    return [r for c in operation.children for r in ([c] if c.computes else [c, *_readers(c)])]


def _is_noise(operation: Operation, true: Glance, reference: Keeping) -> bool:
    """True if a gradient is negligible, or only the remainder of a sum that cancels."""
    if true.amax < 1e-36:
        return True
    if operation.name != "parameter":
        if all(_cancels_nothing(reader) for reader in _readers(operation)):
            return False
        around = [reference.by_key.get(_key(c)) for c in _readers(operation)]
        most = max((o.notes["gradient"].amax for o in around if o is not None and "gradient" in o.notes), default=0.0)
        is_sum = len(around) > 1 and all(row_of(reader.name).kind is Kind.ADDITION for reader in _readers(operation))
        # An example is the mean of x - x.mean(), in which the two gradients of x cancel.
        return true.amax < (CANCELLED if is_sum else 1e-12) * most
    # The gradient of an embedding's row is not a sum over all arriving gradients, as the gradient of a bias is.
    if operation.notes["result"].count > 1 and any(c.name == "embedding" for c in operation.children):
        return False
    around = [reference.by_key.get(_key(c)) for c in operation.children]
    most = max((o.notes["gradient"].amax for o in around if o is not None and "gradient" in o.notes), default=0.0)
    return true.amax < NOISE * most


def _cancels_nothing(operation: Operation) -> bool:
    """True if the gradient of an operation's operand is the gradient of the result, times one number."""
    row = row_of(operation.name)
    return row.scales or row.kind is Kind.CAST or row.name in ("sum", "mean")


def _lost_event(
    operation: Operation, gradient: Glance, true: Glance, share: Mapping[int, float], unfed: list[str]
) -> Event:
    is_parameter = operation.name == "parameter"
    at = operation.origin
    ends = _gradient_ends(operation, at)
    event = Event("backward", "gradient lost", at.site, "weight_grad" if is_parameter else "error")
    event.operation = event.origin = at
    event.count, event.of, event.fmt, event.ends = true.nonzero - gradient.nonzero, true.nonzero, ends.name, ends
    event.batch, event.remedy, event.largest = operation.notes.get("batch"), "scale", true.amax
    # If gradients of this size are in the format's range, they are 0 for another reason: the slope is 0 here.
    below = ": below its" if true.amax < ends.smallest else ", above its"
    least = f"{below} least number {ends.smallest:.3g}" if ends.smallest else ""
    event.why.append(
        f"{event.count} of {event.of} gradients are 0 in {ends.name} and not in float32, where the largest is "
        f"{true.amax:.3g}{least}."
    )
    event.stretch = way = _stretch(operation, share)
    if len(way) > 1:
        shown = way if len(way) <= 5 else [way[i * (len(way) - 1) // 4] for i in range(5)]
        words = ", ".join(f"{100 * share[id(o)]:.3g} % at {_with_call(o)}" for o in shown)
        event.why.append(f"It begins at {_with_call(way[0])} on the way back: {words} are lost.")
    layers = [*dict.fromkeys(name.rpartition(".")[0] or name for name in reversed(unfed))]
    if layers:
        names = ", ".join(layers[:6]) + (f" and {len(layers) - 6} more" if len(layers) > 6 else "")
        event.why.append(f"No gradient at all is left for {names}.")
    for child in operation.children[:3]:
        if "gradient" in child.notes:
            event.read.append((f"gradient of {child.site}", str(child.notes["gradient"])))
            event.read += [(s.site, str(s.notes["result"])) for s in child.parents if s is not operation][:1]
    return event


def _stretch(operation: Operation, share: Mapping[int, float]) -> list[Operation]:
    """Return the operations along which gradients are lost, in backward order, up to the given operation."""
    way = [operation]
    while True:
        known = [o for o in _readers(way[-1]) if share.get(id(o), 0.0) >= BEGUN and o not in way]
        if not known:
            return [*reversed(way)]
        way.append(max(known, key=lambda o: share[id(o)]))


def _with_call(operation: Operation) -> str:
    return f"{operation.site}, call {operation.call + 1}" if operation.call else operation.site


def _gradient_ends(operation: Operation, at: Operation) -> Ends:
    """Return the range of a gradient's format; if it has several, that of the format whose least number is largest."""
    ends = [e for o in {id(operation): operation, id(at): at}.values() for e in o.notes.get("error_ends", {}).values()]
    ends += [e for c in operation.children for e in c.notes.get("error_ends", {}).values()]
    ends += [c.notes["ends"] for c in operation.children if "ends" in c.notes]
    if "gradient_ends" in operation.notes:
        ends.append(operation.notes["gradient_ends"])
    return max(ends, key=lambda e: (e.smallest, -e.largest)) if ends else Ends.of_dtype(torch.float32)


def error_event(seen: Keeping, reference: Keeping, far: Collection[str]) -> tuple[Event | None, float]:
    """Return the first event that the comparison with float32 finds, and the largest error.

    Such an event is a lost result, a wrong sum or an error that has grown.

    far: the names of parameters whose gradient is far from the reference's.
    """
    errors, worst = Errors(), 0.0
    grown: Callable[[], Event] | None = None
    begins = None
    for key in seen.order:
        operation, true = seen.by_key[key], reference.results.get(key)
        mine = seen.results[key]
        if operation.notes.get("swamped") is not None:
            return swamped_event(operation), worst
        if true is None or true.shape != mine.shape or not true.numel():
            continue
        error, entering = _measured(errors, operation, mine, true), errors.entering(operation)
        worst = max(worst, error)
        if key in seen.integers and key in reference.integers:
            numbers = {id(o): (seen.results[k], reference.results.get(k)) for k, o in seen.by_key.items()}
            lost = integers_event(operation, (seen.integers[key], reference.integers[key]), numbers)
            if lost is not None:
                return lost, error
        if not operation.computes:
            continue
        is_start = error > 0 and begins is None
        # An error that exists from the start has not grown.
        if is_start:
            begins = min(error, operation.notes["own"])
        is_grown = error >= max(LARGE, GROWN * entering, GROWTH * operation.notes["own"])
        is_gone = nothing_is_left(error, entering) or (_lost_operand(operation) and is_grown)
        if is_gone and ("lost" in operation.notes or _is_missed(operation, seen, reference, far)):
            is_difference = not _lost_operand(operation) and _is_difference(operation, true)
            event = _grown_event if is_difference else _gone_event
            return event(operation, mine, true, error, entering), error
        is_first = begins is not None and (is_start or error >= GROWN * begins)
        # The first grown error is kept. A result of which nothing is left has priority, even if it comes later.
        if is_grown and is_first and grown is None and _is_missed(operation, seen, reference, far):
            grown = partial(_grown_event, operation, mine, true, error, entering)
    if grown is None:
        wrong = (o for o in reversed(seen.operations) if "swamped_gradient" in o.notes)
        return next(map(swamped_gradient_event, wrong), None), worst
    return grown(), worst


def _is_missed(operation: Operation, seen: Keeping, reference: Keeping, far: Collection[str]) -> bool:
    """True if a lost result is still wrong after it was combined with other numbers, or in a weight's gradient."""
    # A number times a gate of a millionth is 0 in half precision. If the product is added to that number, its loss has
    # no effect. The same holds for a partial sum that crosses zero.
    errors, known, waiting = Errors(), {id(operation)}, [operation]
    for at in waiting:
        readers = [reader for reader in _readers(at) if id(reader) not in known]
        known.update(map(id, readers))
        for reader in readers:
            # A loss may be near the reference's loss although its terms are not.
            if reader.notes["result"].count == 1:
                return True
            # A large bias may hide a wrong product in the result, but not in the weight's gradient.
            if any(p.name == "parameter" and p.site in far for p in reader.parents):
                return True
            mine, true = (run.results.get(_key(reader)) for run in (seen, reference))
            if mine is None or true is None or mine.shape != true.shape:
                return True
            error = _measured(errors, reader, mine, true)
            if LARGE <= error < GONE:
                return True
            waiting += [reader] if error >= GONE else []
        if not at.children:
            return True
    return False


def around(operation: Operation) -> list[Operation]:
    """Return an operation, its operands, and the operations that pass its result on.

    Events of gradients at any of these operations name this operation.
    """
    found, waiting = [operation, *operation.parents], [operation]
    while waiting:
        further = [c for c in waiting.pop().children if not c.computes]
        found += further
        waiting += further
    return found


def _key(operation: Operation) -> Key:
    return operation.site, operation.call, operation.notes.get("batch") or 0


def _measured(errors: Errors, operation: Operation, mine: Tensor, true: Tensor) -> float:
    """Return the relative error of a result's numbers, without masks; 0 if all numbers are negligible."""
    a, b, masked = true.double(), mine.double(), operation.notes.get("masked")
    numbers = a.isfinite() & b.isfinite() & (a.abs() < 1e30)
    if masked is not None and masked.shape == numbers.shape:
        numbers = numbers & ~masked
    key = key_of(operation, "activation")
    if float(a[numbers].norm()) >= 1e-30:
        errors.add(key, a, b, numbers)
    return errors.relative(key) or 0.0


def _lost_operand(operation: Operation) -> bool:
    """True if all numbers of an operand were rounded to 0 at the input of a product: then only the addend is left."""
    return "lost" in operation.notes and operation.notes["lost"][1].startswith("fprop")


def _gone_event(operation: Operation, mine: Tensor, true: Tensor, error: float, entering: float) -> Event:
    ends: Ends = operation.notes["ends"]
    zeros, lost = int(((mine == 0) & (true != 0)).sum()), operation.notes.get("lost")
    kind = "underflow" if _lost_operand(operation) or zeros > 0.5 * mine.numel() else "error"
    event = Event("float32", kind, operation.site, "activation", zeros or mine.numel(), mine.numel())
    event.operation = event.origin = operation
    event.fmt, event.ends = operation.notes["coarsest"] if kind == "error" else ends.name, ends
    true_range = f"{float(true.double().min()):.3g} to {float(true.double().max()):.3g}"
    if kind == "underflow" and lost is not None:
        event.place, event.role, numbers, event.ends = lost
        event.fmt, event.count = event.ends.name, numbers.nonzero
        event.of = numbers.count
        least = f"least number {event.ends.smallest:.3g}"
        least += f" at the scale of this step, largest {event.ends.largest:.3g}" if event.ends.holder is None else ""
        event.why.append(f"All of it is 0 in {event.fmt} ({least}): {numbers} before, read by {operation.site}.")
    elif kind == "underflow":
        least = f"least number {ends.smallest:.3g}"
        # The results of float32 are in the format's range, so an operand was rounded to 0 before.
        if float(true.abs().max()) > ends.smallest:
            event.fmt = operation.notes["coarsest"]
            least = f"of {ends.name} {ends.smallest:.3g}; an operand is in {event.fmt}"
        event.why.append(
            f"{zeros} of {event.of} results are 0 in {ends.name} and not in float32, where they are {true_range} "
            f"({least})."
        )
    else:
        event.why.append(
            f"Nothing of it is left: relative error {error:.3g} against float32, {entering:.3g} entering; float32 has "
            f"{true_range}."
        )
    event.reads_of(operation)
    return event


def _grown_event(operation: Operation, mine: Tensor, true: Tensor, error: float, entering: float) -> Event:
    ends: Ends = operation.notes["ends"]
    read = [p for p in operation.parents if "result" in p.notes]
    result_amax = float(true.abs().max())
    operand_amax = max((p.notes["result"].amax for p in read), default=0.0)
    is_difference = _is_difference(operation, true)
    event = Event("float32", "cancellation" if is_difference else "error grows", operation.site, "activation")
    event.count = event.of = mine.numel()
    event.operation = event.origin = operation
    event.fmt, event.ends = operation.notes["coarsest"], ends
    event.why.append(f"The relative error against float32 is {error:.3g} here; {entering:.3g} entered.")
    if is_difference:
        wide: list[Ends] = [p.notes.get("ends", ends) for p in (operation, *read)]
        coarsest = max(wide, key=lambda e: e.epsilon)
        event.fmt = coarsest.name
        event.why.append(
            f"Numbers up to {operand_amax:.4g} cancel to {result_amax:.3g}, and {event.fmt} has an ulp of "
            f"{_ulp(operand_amax, coarsest):.3g} there."
        )
    event.reads_of(operation)
    return event


def _is_difference(operation: Operation, true: Tensor) -> bool:
    """True if an addition of large numbers has a small result."""
    largest = max((p.notes["result"].amax for p in operation.parents if "result" in p.notes), default=0.0)
    return row_of(operation.name).kind is Kind.ADDITION and largest > 8 * float(true.abs().max())


def _ulp(x: float, ends: Ends) -> float:
    return ends.epsilon * 2.0 ** math.floor(math.log2(x)) if x else 0.0


def ratio(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the factor by which gradients in `a` are larger than the same gradients in `b`."""
    # A GradScaler divides the gradients that its optimizer reads, but not the gradients that a hook has seen.
    pairs = [(a[name].double().ravel(), g.double().ravel()) for name, g in b.items() if name in a]
    over, of = sum(float(x @ y) for x, y in pairs), sum(float(y @ y) for _, y in pairs)
    return over / of if of and math.isfinite(over / of) and over / of > 0 else 1.0


def relative_errors(gradients: Mapping[str, Tensor], truth: Mapping[str, Tensor], by: float) -> dict[str, float]:
    """Return the relative error of the gradient of each parameter, at most 1; 1 if the gradient is not finite.

    Parameters without a reference are left out.

    by: the factor by which these gradients are scaled relative to the true ones.
    """
    amax = {name: float(g.abs().max()) if g.numel() else 0.0 for name, g in truth.items()}
    largest: dict[str, float] = {}  # the largest amax of each module
    for name in truth:
        module = name.rpartition(".")[0]
        largest[module] = max(largest.get(module, 0.0), amax[name])
    found = {}
    for name, g in truth.items():
        # The remainder of a sum that cancels is rounding noise in float32 too, for example for a bias before a norm.
        if amax[name] < 1e-36 or amax[name] < NOISE * largest[name.rpartition(".")[0]]:
            continue
        mine, wide = gradients.get(name), g.double()
        error = 1.0 if mine is None else float((mine.double() / by - wide).norm() / wide.norm())
        # A NaN differs from itself; min(NaN, 1.0) would be NaN.
        found[name] = min(error, 1.0) if error == error else 1.0
    return found


def shortened(gradients: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> set[str]:
    """Return the parameters whose gradient is partly missing."""
    found = set()
    for name, g in truth.items():
        mine, wide = gradients.get(name), g.double()
        # The component along the true gradient is measured: on average, rounding alone does not reduce it.
        square = float((wide * wide).sum())
        if mine is None or (square and float((mine.double() * wide).sum()) < (1 - FELT) * square):
            found.add(name)
    return found
