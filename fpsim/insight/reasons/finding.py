"""Run the checks of a step in their order, until one of them finds an event."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fpsim.emulation.operations import row_of
from fpsim.emulation.tracing import Operation
from fpsim.insight.masks import fills, is_mask_like
from fpsim.insight.ranges import Glance, first_index, glance
from fpsim.insight.reasons.against import Keeping, around, error_event, may_be_lost, relative_errors
from fpsim.insight.reasons.event import Event
from fpsim.insight.reasons.gradient_sums import WideReads, gradient_sum_event, read_often, reads_event
from fpsim.insight.reasons.remedies import remedies, update_remedies, widened_reads
from fpsim.insight.reasons.timeline import way_to
from fpsim.insight.reasons.trials import Change, Outcome, Reference, Remedy, Trials
from fpsim.insight.reasons.updates import Averages, Updates
from fpsim.insight.reasons.widening import LOW
from fpsim.insight.stepping import require_unrecorded
from fpsim.models.quantize import listeners
from fpsim.models.storing import states_in

__all__ = ["Finding", "causes_first", "comes_to_nothing", "find", "reaches_a_loss"]

WIDE = ("float32", "float64", "fp32")  # a run in float32 would not differ from these, and is not needed


@dataclass
class Finding:
    """Result of the checks: the events, of which the first is the cause, and the remedies that worked."""

    events: list[Event] = field(default_factory=list)
    remedies: list[Remedy] = field(default_factory=list)
    unfed: list[str] = field(default_factory=list)  # parameters without a gradient in a step made finite
    chain: list[str] = field(default_factory=list)
    operations: list[Any] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    checked: list[str] = field(default_factory=list)
    loss: float | None = None
    float32: float | None = None
    float32_bad: list[str] = field(default_factory=list)  # the non-finite tensors at the end of the step in float32
    runs: int = 0


def find(model: nn.Module, step: Callable[..., object], optimizer: Any, scaler: Any, batches: int | None) -> Finding:
    """Run the checks of a step; see `why` for the arguments."""
    trials = Trials(model, step, optimizer, scaler, batches)
    require_unrecorded(listeners(model) if trials.emulated else [])
    before = _state_before(model, trials.kept.optimizers)
    try:
        first = trials.run()
    except Exception as error:
        return _of_raising(trials, before, error)
    second = trials.run()
    # At the first use of some functions, torch probes them with its own backward passes.
    if len(first.losses) != len(second.losses):
        first, second = second, trials.run()
    _require_same(first, second)
    trials.returns_loss = scaler is None and first.losses == [first.returned]
    return _Checks(trials, before).run()


class _Checks:
    """The checks of a step that runs the same each time. They run in order, until one of them finds events.

    before: events of the state before the step. buffers: events of the buffers after the step.
    seen, updates, was: the traced run, the steps of its optimizers, and its outcome.
    gradients: a glance at each parameter's `.grad` before the optimizer's step, or at the end.
    held: parameters whose `.grad` was not finite before the step, and that the step does not clear.
    """

    def __init__(self, trials: Trials, before: list[Event]) -> None:
        self.trials, self.model, self.before = trials, trials.model, before
        self.seen, self.updates = Keeping(trials.model), Updates(trials.model)
        self.gradients: dict[str, Glance] = {}
        self.held = {event.place for event in before if event.role == "gradient"}
        self.buffers: list[Event] = []
        self.averages = self.seen.averages = Averages(trials.model)
        self.result = Finding()

    def run(self) -> Finding:
        """Run the step under a timeline, check its observations, and try remedies for the first event."""
        self._look()
        unread = self._leave_out_unread()
        self.reference = Reference(self.trials, self.seen)
        result, events = self.result, self._first_events()
        # If the step is not finite, these tensors were read after all, by code that is not traced, such as a vmap.
        if unread and not self.was.is_finite and all(map(_may_be_of_unread, events)):
            events = [*unread, *events]
        result.events = events
        if events:
            cause = events[0]
            result.chain = [] if cause.operation is None else _chain(cause, self.seen)
            result.remedies = self._tried(cause)
        result.runs = self.trials.runs
        return result

    # The traced run

    def _look(self) -> None:
        """Run the step under a timeline, and keep its outcome."""
        self.seen.at_first_gradient = self._note_cleared
        self.was = self.trials.run(
            None, self.seen, self._before_update, self.updates.after, self._at_end, keeps_gradients=True
        )
        self.losses = self.seen.losses()
        result, seen = self.result, self.seen
        result.loss, result.operations, result.calls = self.was.loss, seen.operations, seen.calls
        result.checked = _checked(self.model, self.trials, seen, self.updates)

    def _note_cleared(self) -> None:
        """Drop from `held` the gradients that the step has cleared before it added to them."""
        named = self.model.named_parameters()
        self.held.intersection_update(n for n, p in named if p.grad is not None and glance(p.grad).kinds)

    def _before_update(self, optimizer: Any) -> None:
        self._note_gradients()
        self.updates.before(optimizer)

    def _at_end(self) -> None:
        self._note_gradients()
        self.updates.at_end()
        self.buffers = _buffers_after(self.model, self.trials)
        self.averages.end(p for o in self.trials.kept.optimizers for group in o.param_groups for p in group["params"])

    def _note_gradients(self) -> None:
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                self.gradients.setdefault(name, glance(p.grad))

    def _leave_out_unread(self) -> list[Event]:
        """Remove from `before` the events of parameters and buffers that no operation reads, and return them."""
        before = [event for event in self.before if event.role != "gradient" or event.place in self.held]
        operations = self.seen.operations
        read = {s.site for o in operations for s in o.sources if s is not None}
        read |= {name for name, b in self.model.named_buffers() if id(b) in self.seen.outside}
        unread = [e for e in before if operations and e.role in ("parameter", "buffer") and e.place not in read]
        for event in unread:
            self.result.checked.append(
                f"{event.place} holds numbers that are not finite, and the step does not read it."
            )
            self.was.bad = [bad for bad in self.was.bad if bad != f"{event.role} {event.place}"]
            self.trials.unread.add(event.place)
        self.before = [event for event in before if event not in unread]
        return unread

    # The checks

    def _first_events(self) -> list[Event]:
        """Return the events of the first check that finds any, the cause first."""
        inputs, is_emulated = [e for e in self.seen.events if e.role == "input"], self.trials.emulated
        self.broken = {event.place.rpartition(".")[0] for event in self.buffers}
        self.harmless = [e for e in inputs if comes_to_nothing(e.readers, self.losses, is_emulated, self.broken)]
        self.inputs = [e for e in inputs if e not in self.harmless]
        # The checks go from cause to effect: a bad input explains bad numbers, and these explain lost gradients and
        # updates. The first check with an event ends the search, because later checks would report its consequences.
        checks = (
            *(self._state, self._broken_numbers, self._lost_gradient, self._accumulated, self._updates),
            *(self._buffers, self._error, self._shared_reads, self._end),
        )
        return next((events for check in checks if (events := check())), [])

    def _state(self) -> list[Event]:
        """Return events of inputs, then of parameters, buffers and states, then of gradients that were not cleared."""
        is_bad = {name for name, gradient in self.gradients.items() if gradient.kinds}
        # A gradient from before the step counts only if it is still not finite when the optimizer reads it.
        at_begin = [e for e in self.before if e.role != "gradient" or e.place in is_bad]
        readers = {s.site: o.site for o in reversed(self.seen.operations) for s in o.sources if s is not None}
        stepped = {id(p) for o in self.trials.kept.optimizers for group in o.param_groups for p in group["params"]}
        updated = {name for name, p in self.model.named_parameters() if id(p) in stepped}
        for event in at_begin:
            event.remedy = "update" if event.role == "parameter" and event.place in updated else event.remedy
            if event.place in readers:
                event.why.append(f"It is read first by {readers[event.place]}.")
        if self.inputs or any(e.role in ("parameter", "buffer") for e in at_begin):
            self.reference.tell(self.result)
        return [*self.inputs, *sorted(at_begin, key=lambda event: event.role == "gradient")]

    def _broken_numbers(self) -> list[Event]:
        """Return events of the step itself: inf and NaN, or saturation if there is no inf or NaN."""
        seen, is_finite = self.seen, self.was.is_finite
        hard = [e for e in seen.events if e.stage != "state"]
        hard = causes_first(hard, self.losses, is_finite, self.reference.breaks_too)
        # Minus infinities are usually masks. They count only if the loss is not finite and has no other cause.
        minus = [] if is_finite or any(e.stage == "forward" for e in hard) else seen.minus
        minus = [e for e in minus if reaches_a_loss(e.readers, self.losses, self.broken)]
        if minus:
            return minus
        events = hard or seen.saturations
        if not events:
            return []
        self.reference.tell(self.result)
        if not hard and events[0].stage == "backward" and self.reference.is_wanted:
            # With delayed scaling, operands of the forward pass may have been lost before, at the scale of an earlier
            # step.
            before, _ = error_event(seen, self.reference.seen, self.reference.far(self.was))
            if before is not None and before.role.startswith("fprop"):
                return [before, *_own_causes(events)]
        return _own_causes(events)

    def _lost_gradient(self) -> list[Event]:
        if not (self.reference.is_wanted and may_be_lost(self.seen)):
            return []
        lost = self.reference.lost(self.seen, self.was)
        if lost is None:
            return []
        self.result.float32 = self.reference.outcome.loss
        earlier, _ = error_event(self.seen, self.reference.seen, self.reference.far(self.was))
        if earlier is None:
            return [lost]
        # If a result is lost, its gradients are lost too, so the result is the cause. An error that grows has no such
        # effect.
        return [lost, earlier] if earlier.kind in ("error grows", "swamping") else [earlier, lost]

    def _accumulated(self) -> list[Event]:
        swamped = [gradient_sum_event(name, sums) for name, sums in self.seen.gradient_sums.items() if sums.wrong]
        return _accumulated(self.model, self.gradients, self.seen, self.trials) or swamped

    def _updates(self) -> list[Event]:
        if self.updates.events:
            return self.updates.events
        lost = self.updates.lost()
        return [] if lost is None else [lost]

    def _buffers(self) -> list[Event]:
        if self.buffers or not self.was.is_finite:
            return self.buffers
        still = self.averages.event(self.trials)
        return [] if still is None else [still]

    def _error(self) -> list[Event]:
        """Find a result that is lost, wrongly summed, or far from that of float32."""
        checked = self.result.checked
        if not self.reference.is_wanted:
            checked.append("The model computes in float32 or more: there is nothing to compare it with.")
            return []
        error, worst = error_event(self.seen, self.reference.seen, self.reference.far(self.was))
        self.result.float32 = self.reference.outcome.loss
        checked.append(f"Against float32: the largest relative error of a result is {worst:.3g}.")
        return [] if error is None else [error]

    def _shared_reads(self) -> list[Event]:
        """Find tensors whose many gradients are added up in too few bits."""
        often = read_often(self.seen.operations)
        # In an emulated model autograd already adds up gradients in float32.
        if self.trials.emulated or not self.was.is_finite or not any(often):
            return []
        ids = {name: id(p) for name, p in self.model.named_parameters()}
        self._wide_reads = WideReads({o.index for o in often[0]}, {ids[p.site] for p in often[1] if p.site in ids})
        outcome = self.trials.run(Change(edit=self._wide_reads), keeps_gradients=True)
        # `relative_errors` leaves out gradients that are only the remainder of a sum that cancels.
        true = {n: outcome.gradients[n] for n in relative_errors(outcome.gradients, outcome.gradients, 1.0)}
        event = reads_event(often, self._wide_reads, ids, self.was.gradients, true)
        return [] if event is None else [event]

    def _end(self) -> list[Event]:
        """Return an event without a known cause."""
        if self.was.is_finite:
            return []
        # The step may return another value than its loss. An input that is otherwise harmless may lead to that value.
        if self.harmless:
            return self.harmless
        bad = self.was.bad
        event = Event("loss", "NaN", bad[0] if bad else "the loss", "loss")
        event.why.append(
            f"Not finite at the end of the step: {', '.join(bad[:3]) or 'the loss'}; no operation that is seen made it."
        )
        return [event]

    def _tried(self, cause: Event) -> list[Remedy]:
        is_gradient = cause.role == "gradient"
        if cause.kind == "swamping" and is_gradient:
            return []
        if cause.remedy == "gradient sum":
            return widened_reads(self.trials, cause, self.seen, self.was, self.reference, self._wide_reads)
        if cause.remedy == "average":
            return self.averages.remedies(cause)
        if cause.stage in ("buffers", "loss") or (cause.stage == "state" and not is_gradient):
            return []
        if cause.stage in ("optimizer", "accumulation") or is_gradient:
            return update_remedies(self.trials, cause, self.updates, self.seen)
        found, self.result.unfed = remedies(self.trials, cause, self.seen, self.was, self.reference)
        return found


def _may_be_of_unread(event: Event) -> bool:
    """True if an event may come from code that is not traced, or from a Python number that is not finite."""
    given = () if event.operation is None else event.operation.notes.get("numbers", ())
    return event.stage == "loss" or event.place.startswith("operand ") or not all(map(math.isfinite, given))


def _of_raising(trials: Trials, before: list[Event], error: Exception) -> Finding:
    """Find events before the error of a step, such as a loss that refuses NaN; if there are none, raise the error."""
    seen, was = Keeping(trials.model), Outcome([], None, ["an exception"])
    # The step raises the same error again, and `seen` has all operations before that.
    with suppress(Exception):
        trials.run(None, seen)
    state = [*(e for e in seen.events if e.stage == "state"), *(e for e in before if e.role in ("parameter", "buffer"))]
    finding = Finding(state or causes_first(seen.events, seen.losses(), False, lambda event: False))
    if not finding.events:
        raise error
    cause = finding.events[0]
    cause.why.append(f"Then the step raises {type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}")
    finding.operations, finding.calls = seen.operations, seen.calls
    reference = Reference(trials, seen)
    reference.tell(finding)
    if cause.operation is not None:
        finding.chain = _chain(cause, seen)
    if not state:
        finding.remedies, finding.unfed = remedies(trials, cause, seen, was, reference)
    finding.runs = trials.runs
    return finding


def _require_same(first: Outcome, second: Outcome) -> None:
    a, b = [first.returned, *first.losses], [second.returned, *second.losses]
    if repr(a) != repr(b):
        shown = next(((x, y) for x, y in zip(a, b, strict=False) if repr(x) != repr(y)), (len(a), len(b)))
        raise ValueError(
            f"The step gave loss {shown[0]} and then {shown[1]}. Expected the same step each time: take the batch "
            f"outside of `step`, draw random numbers from torch's own generator, and keep no state besides the model's "
            f"and the optimizer's. Give a GradScaler that it uses as scaler=."
        )


def _state_before(model: nn.Module, optimizers: list[Any]) -> list[Event]:
    """Return the events of parameters, buffers, gradients and states that are not finite before the step."""
    candidates = []
    for name, p in model.named_parameters():
        candidates.append(_came_in(name, "parameter", p))
    for name, b in model.named_buffers():
        # Causal masks are buffers of minus infinity; running statistics are never masks.
        is_mask = b.is_floating_point() and is_mask_like(b)
        statistics = name.endswith(("running_mean", "running_var"))
        if not is_mask or statistics:
            candidates.append(_came_in(name, "buffer", b))
    for name, p in model.named_parameters():
        if p.grad is not None:
            candidates.append(_came_in(name, "gradient", p.grad))
        for optimizer in optimizers:
            for state in states_in(optimizer.state.get(p, {})):
                candidates.append(_came_in(f"{name} {state.text}", "optimizer state", state.x))
    events = [event for event in candidates if event is not None]
    for role in ("parameter", "buffer", "gradient", "optimizer state"):
        same = [event for event in events if event.role == role]
        if len(same) > 1:
            same[0].why.append(f"{len(same)} of the {role}s hold such numbers.")
    return events


def _came_in(name: str, role: str, x: Tensor) -> Event | None:
    if not x.is_floating_point():
        return None
    values = glance(x)
    if not values.nonfinite:
        return None
    kind = values.worst
    event = Event("state", f"{kind} came in", name, role, values.nonfinite, values.count)
    at = first_index(~x.detach().isfinite()) if x.layout is torch.strided else ""
    event.why.append(f"{event.count} of {event.of} numbers before the step" + (f" (first at {at})." if at else "."))
    event.read = [(name, str(values))]
    event.fmt = str(x.dtype).removeprefix("torch.") if x.dtype in LOW else ""
    return event


def _buffers_after(model: nn.Module, trials: Trials) -> list[Event]:
    """Return the events of buffers that the step has made inf or NaN."""
    events = []
    kept = {id(tensor): value for tensor, value in trials.kept.tensors}
    for name, b in model.named_buffers():
        before = kept.get(id(b))
        if not b.is_floating_point() or (before is not None and not bool(before.isfinite().all())):
            continue
        values = glance(b)
        if not values.nonfinite or (values.minus and is_mask_like(b)):
            continue
        event = Event("buffers", "overflow", name, "buffer", values.nonfinite, values.count)
        largest = torch.finfo(b.dtype).max
        event.fmt = str(b.dtype).removeprefix("torch.")
        event.why.append(
            f"{event.count} of {event.of} are not finite after the step (first at {first_index(~b.isfinite())}), and "
            f"were before; {event.fmt} ends at {largest:.6g}."
        )
        event.read = [(f"{name} before", str(glance(before)))] if before is not None else []
        events.append(event)
    return events


def _own_causes(events: list[Event]) -> list[Event]:
    """Return the first event, and the later events that are not its consequences."""
    if not events:
        return []
    first, *others = events
    if first.operation is None:
        return events
    reached = first.operation.all_ahead()
    later = [e for e in others if e.stage == first.stage and id(e.operation) not in reached]
    return [first, *later]


def _accumulated(model: nn.Module, gradients: dict[str, Glance], seen: Keeping, trials: Trials) -> list[Event]:
    """Return the events of `.grad` that became inf or NaN when finite gradients were added to it."""
    events = []
    kept = {id(p): value for p, _, value in trials.kept.gradients}
    for name, p in model.named_parameters():
        gradient = gradients.get(name)
        if gradient is None or not gradient.nonfinite:
            continue
        arrived = seen.arrived.get(name, [])
        held = kept.get(id(p))
        event = Event("accumulation", "overflow", name, "gradient", gradient.nonfinite, gradient.count)
        event.fmt, event.remedy = str(p.dtype).removeprefix("torch."), "clear"
        held_text = f"held up to {glance(held).amax:.4g} before the step, and " if held is not None else ""
        largest = max((g.amax for g in arrived), default=0.0)
        event.why.append(
            f".grad {held_text}got {len(arrived)} gradients of up to {largest:.4g}; {event.count} of {event.of} sums "
            f"are beyond {torch.finfo(p.dtype).max:.6g}, the end of {event.fmt}."
        )
        if held is not None:
            event.read.append((f".grad of {name} before", str(glance(held))))
        event.read += [(f"gradient that arrived at {name}", str(g)) for g in arrived[:2]]
        events.append(event)
    return events


def _chain(cause: Event, seen: Keeping) -> list[str]:
    at = cause.operation
    assert at is not None
    reached = at.all_ahead()
    loss = next((o for o in reversed(seen.losses()) if id(o) in reached), None)
    return [o.site for o in way_to(loss, at) if o.computes]


def _checked(model: nn.Module, trials: Trials, seen: Keeping, updates: Updates) -> list[str]:
    """Describe the checks that were made."""
    gradients = sum("gradient" in o.notes for o in seen.operations)
    wanted, moved = sum(r["wanted"] for r in updates.rows), sum(r["moved"] for r in updates.rows)
    lines = [
        f"State before: {sum(1 for _ in model.parameters())} parameters, {sum(1 for _ in model.buffers())} buffers, "
        f"their gradients, inputs, {len(trials.kept.optimizers)} optimizers.",
        f"Forward: {len(seen.operations)} results. Backward: {gradients} gradients of results, {len(seen.arrived)} of "
        f"parameters.",
    ]
    if updates.steps:
        share = f"{moved} of {wanted} updates changed a number" if wanted else "updates not compared"
        lines.append(f"Optimizer: {updates.steps} steps, {share}.")
    else:
        lines.append("Optimizer: no step was taken; give optimizer= to look at it.")
    return lines


def causes_first(
    events: list[Event], losses: list[Operation], is_finite: bool, is_so_in_float32: Callable[[Event], bool]
) -> list[Event]:
    """Return the events that can make a step fail, in their order. Events without an effect follow, or are left out.

    is_finite: whether the step is finite at its end.
    is_so_in_float32: whether an event's operation is not finite in float32 either; called only if needed.
    """
    # The bucket of a position, `log(0).to(torch.long)`, is minus infinity in each step of a T5, and is harmless.
    dying = [event for event in events if _dies(event, losses)]
    if is_finite:
        # The event of an overflow is kept: its effect on the numbers that follow is not known.
        harmless = [e for e in dying if not _overflows(e) and (e.fmt in WIDE or is_so_in_float32(e))]
        return [event for event in events if not any(event is other for other in harmless)]
    living = [event for event in events if not any(event is other for other in dying)]
    return [*living, *dying]


def _overflows(event: Event) -> bool:
    """True if numbers became too large for a format."""
    # A gradient with NaN but without inf usually comes from a mask: 0 times the infinite slope of a masked number.
    return event.kind == "overflow" and not (event.stage == "backward" and _kinds_of_gradients(event) == {"NaN"})


def _kinds_of_gradients(event: Event) -> set[str]:
    """Return the kinds of infinities and NaN in the gradients at the place of an event."""
    # The gradients of the operands count too: a relu may pass none of its own infinities on.
    named = [] if event.operation is None else around(event.operation)
    gradients = [o.notes["gradient"] for o in named if "gradient" in o.notes]
    return {kind for gradient in gradients for kind in gradient.kinds}


def comes_to_nothing(readers: list[Operation], losses: list[Operation], is_emulated: bool, broken: set[str]) -> bool:
    """True if infinities and NaN that operations read reach no loss, no gradient of a parameter and no buffer.

    is_emulated: whether the model is quantised. broken: the names of modules in which a buffer became inf or NaN.
    """
    bad = [o for o in readers if _is_bad(o, "result")]
    reached = _reached(bad)
    if any(o.module in broken for o in reached):
        return False
    reading = [*readers, *(c for o in reached for c in o.children)]
    # A format may have saturated an infinity: a finite result of a reader does not prove that it was masked.
    if is_emulated and any(o.computes and not _is_bad(o, "result") and not _replaces(o) for o in reading):
        return False
    return _ends_early(bad, readers, losses)


def _replaces(operation: Operation) -> bool:
    """True if an operation replaces infinities and NaN by other numbers."""
    return fills(operation) or not row_of(operation.name).passes


def reaches_a_loss(readers: list[Operation], losses: list[Operation], broken: set[str]) -> bool:
    """True if infinities and NaN that operations read lead to a loss or a buffer that is not finite."""
    reached = _reached([o for o in readers if _is_bad(o, "result")])
    return any(operation in losses or operation.module in broken for operation in reached)


def _dies(event: Event, losses: list[Operation]) -> bool:
    """True if the infinities and NaN of a result, or of a gradient, reach no loss, parameter or buffer."""
    at = event.operation
    if at is None:
        return False
    if event.stage == "forward" and event.role == "activation" and _is_bad(at, "result"):
        return _ends_early([at], [at], losses)
    if event.stage == "backward" and event.role == "error":
        return any(_is_bad(o, "gradient") for o in around(at)) and not _reaches_a_parameter([at])
    return False


def _ends_early(bad: list[Operation], first: list[Operation], losses: list[Operation]) -> bool:
    """True if infinities and NaN reach no loss, and their gradients no parameter.

    bad: the first results that are not finite. first: the first operations whose gradients may not be finite.
    """
    reached = _reached(bad)
    if any(operation in losses for operation in reached):
        return False
    return not _reaches_a_parameter([*first, *reached])


def _reached(bad: list[Operation]) -> list[Operation]:
    """Return these operations, and all operations to whose results their infinities and NaN lead."""
    reached, waiting = {id(o): o for o in bad}, [*bad]
    while waiting:
        following = [c for c in waiting.pop().children if id(c) not in reached and _is_bad(c, "result")]
        reached.update((id(c), c) for c in following)
        waiting += following
    return [*reached.values()]


def _reaches_a_parameter(starts: list[Operation]) -> bool:
    """True if gradients that are not finite lead from operations to a parameter, or to a tensor from outside."""
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
    # A step may run several backward passes, and the gradient of the last one may be finite.
    if note == "gradient":
        return bool(operation.notes.get("had_bad_gradient"))
    return note in operation.notes and bool(operation.notes[note].kinds)
