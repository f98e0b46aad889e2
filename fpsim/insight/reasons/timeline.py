"""Visit a traced step: take a glance at each result and gradient, and collect the events in the order of time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fpsim.emulation.arguments import tensors_in
from fpsim.emulation.tracing import Operation, Trace
from fpsim.formats.blocks import BlockFormat
from fpsim.insight.masks import fills, leak, masked_in, number_in
from fpsim.insight.ranges import Ends, Glance, are_passed_on, expected_error, first_index, glance
from fpsim.insight.reasons.event import Event
from fpsim.insight.reasons.explaining import explain_forward, explain_gradient, source_name, zero_divisors
from fpsim.tensors.cuts import Cut
from fpsim.tensors.spec import OwnFormat, Spec
from fpsim.tensors.tally import Accumulator
from fpsim.torch_internals import version_of

__all__ = ["Rounded", "Timeline", "entrances", "is_backward", "numbers_row", "overflow_of", "way_to"]

SATURATES = 2.0  # saturation is an event from this times the largest number of the format on


class Rounded(NamedTuple):
    """A rounding of an operand or a result of the operation that runs."""

    site: str
    role: str
    before: Tensor
    after: Tensor
    spec: Spec
    cut: Cut | None = None

    @property
    def expected_error(self) -> float:
        """The expected relative error of such a rounding."""
        # For a user's own rounding function, only the error that it made here is known.
        if isinstance(self.spec.fmt, OwnFormat):
            before = self.before.float()
            return float(
                (self.after.float() - before).norm() / before.norm().clamp(min=torch.finfo(torch.float32).tiny)
            )
        return expected_error(self.spec, self.before.numel())

    @property
    def ends(self) -> Ends:
        """The range of the format, at the scale of the tensor if it has one."""
        scale = None if self.cut is None or self.cut.scale is None else float(self.cut.scale)
        return Ends.of_spec(self.spec, scale)


class Timeline:
    """The visitor of a traced step, and the observer of a quantised model.

    It writes its observations into the notes of each operation. `judge`, `judge_gradient` and `judge_rounded_gradient`
    decide which observations are events. `why` uses these methods as they are; `diagnose` overrides them.

    operations: the operations in the order of the run, each with glances in its notes.
    gradients: the operations and parameters in the order in which their gradients arrived.
    events: the events in the order of time.
    saturations: events of saturation in formats without an infinity, which break nothing at once.
    """

    def __init__(self, model: nn.Module) -> None:
        self.operations: list[Operation] = []
        self.gradients: list[Operation] = []
        self.events: list[Event] = []
        self.saturations: list[Event] = []
        self.minus: list[Event] = []  # events of minus infinity from outside, which may be a mask
        self.batch: int | None = None
        self.trace: Trace | None = None
        self.is_in_optimizer = False
        self.arrived: dict[str, list[Glance]] = {}  # the gradients of parameters, by name
        self.at_first_gradient: Callable[[], object] | None = None  # called once, before any gradient is added
        self.calls: dict[str, int] = {}
        self.names = {id(b): name for name, b in model.named_buffers()}
        self.inputs: dict[int, str] = {}
        self._model = model
        self._rounded: list[Rounded] = []
        self._ends: Ends | None = None
        self.outside: dict[int, Event | None] = {}  # events of non-finite tensors from outside, by id
        self._last: dict[str, Operation] = {}

    def entered(self, part: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Name the tensors among the arguments of the model, or of a part of it; this is a hook on the call."""
        code = getattr(module.forward, "__code__", None)
        names = list(code.co_varnames[1 : code.co_argcount]) if code is not None else []
        first = [(names[i] if i < len(names) else f"input {i + 1}", value) for i, value in enumerate(args)]
        for name, value in (*first, *kwargs.items()):
            for x in tensors_in(value):
                self.inputs.setdefault(id(x), f"{part}.{name}" if part else name)

    # As the visitor

    def is_update(self, result: Tensor) -> bool:
        """True if this result is part of an optimizer's own computation."""
        # The closure that LBFGS calls is a forward pass of the model, although it runs inside of the optimizer's step.
        return self.is_in_optimizer and not result.requires_grad

    def keeps(self, x: Tensor) -> bool:
        """True if a tensor must be copied before a call writes to it."""
        return not self.is_update(x)

    def cast(self, operation: Operation, integers: Tensor) -> None:
        """Visit the integers to which a call casts the result of an operation."""

    @torch.no_grad()
    def forward(self, operation: Operation, operands: list[Tensor], result: Tensor) -> None:
        if self.is_update(result):
            self._rounded = []
            return
        assert self.trace is not None
        given, operands = operands, [*map(self.trace.read, operands)]
        values, options = self.trace.arguments
        arguments = (*values, *options.values())
        ends, of_result = self._ends or Ends.of_dtype(result.dtype), glance(result)
        notes = operation.notes
        notes.update(ends=ends, result=of_result, numbers=number_in(arguments), batch=self.batch, dtype=result.dtype)
        self._last[operation.site] = operation
        self.calls[operation.site] = max(self.calls.get(operation.site, 0), operation.call + 1)
        self.operations.append(operation)
        notes["operands"] = self._operands(operation, given, operands)
        wanted = [x for x in (*given, *tensors_in(arguments)) if x.requires_grad]
        # "is_open" means that the gradient goes on to a tensor from outside, which is neither a result of an operation
        # nor a parameter.
        notes["is_open"] = None in map(self.trace.results.get, wanted)
        notes["masked"] = masked_in(operation, operands, arguments, result)
        rounded, self._rounded, self._ends = self._rounded, [], None
        self.judge(operation, given, operands, result, rounded)

    def judge(
        self, operation: Operation, given: list[Tensor], operands: list[Tensor], result: Tensor, rounded: list[Rounded]
    ) -> None:
        """Find events in the result of an operation.

        given: the operands. operands: the operands' values at the time of the call. rounded: the call's roundings.
        """
        assert self.trace is not None
        notes = operation.notes
        of_result: Glance = notes["result"]
        own = [(one.expected_error, str(one.spec.fmt)) for one in rounded]
        own.append((expected_error(notes["dtype"]), notes["ends"].name))
        notes["own"], notes["coarsest"] = math.hypot(*(error for error, _ in own)), max(own)[1]
        is_fill = fills(operation) or notes["masked"] is not None
        is_known = self._of_roundings(operation, rounded, is_fill) is not None
        if of_result.nonfinite and not (is_known or is_fill):
            before = set().union(*(g.kinds for g in notes["operands"]))
            # A NaN among the operands explains any number that is not finite. An infinity explains infinities of the
            # same sign. In an element-wise result it also explains an infinity of the other sign in the same place.
            new = set() if "NaN" in before else of_result.kinds - before
            if new and before and "NaN" not in new and are_passed_on(result, operands):
                new = set()
            if new:
                self._add(explain_forward(operation, operands, self.trace.arguments, result, new, notes["ends"]))
        if of_result.nonfinite:
            notes["zero divisors"] = zero_divisors(operation, *self.trace.arguments)
        else:
            event = leak(operation, operands, result, notes["ends"])
            if event is not None:
                self._add(event)

    def _operands(self, operation: Operation, operands: list[Tensor], held: list[Tensor]) -> list[Glance]:
        """Return glances at operands. held: the operands' values at the time of the call."""
        glances = []
        for i, (source, x, read) in enumerate(zip(operation.sources, operands, held, strict=True)):
            known = None if source is None else source.notes.get("result")
            if source is not None and source.name == "parameter" and source.notes.get("version") != version_of(x):
                known = self._written(source, operation, x, known)
            of_operand = known or glance(read)
            if source is not None:
                source.notes["result"] = of_operand
            elif of_operand.kinds:
                if id(x) not in self.outside:
                    self.outside[id(x)] = self._came_in(operation, i, x, read, of_operand)
                if (event := self.outside[id(x)]) is not None:
                    event.readers.append(operation)
            glances.append(of_operand)
        return glances

    def _written(self, parameter: Operation, reader: Operation, x: Tensor, before: Glance | None) -> Glance:
        """Note an event if a write within the step broke a parameter; return a glance at the parameter."""
        # An optimizer that calls its closure several times, such as LBFGS, writes between two reads.
        parameter.notes["version"], now = version_of(x), glance(x)
        if before is not None and now.nonfinite and not before.nonfinite:
            kind = "NaN" if now.nan else "overflow"
            event = Event("optimizer", kind, parameter.site, "update", now.nonfinite, now.count)
            event.fmt = str(x.dtype).removeprefix("torch.")
            event.why.append(
                f"{event.count} of {event.of} became inf or NaN within the step, before {reader.site} read it again; "
                f"it was {before}."
            )
            self._add(event)
        return now

    def _came_in(self, operation: Operation, position: int, x: Tensor, read: Tensor, numbers: Glance) -> Event | None:
        """Note an input or a buffer that is not finite, and return its event."""
        # A `.grad` was made by this step, or was checked before the step.
        if any(x is p.grad for p in self._model.parameters()):
            return None
        name = self.names.get(id(x))
        role = "buffer" if name is not None else "input"
        name = name or self.inputs.get(id(x)) or f"operand {position + 1} of {operation.site}"
        kind = numbers.worst
        event = Event("state", f"{kind} came in", name, role, numbers.nonfinite, numbers.count, batch=self.batch)
        event.why.append(
            f"{event.count} of {event.of} numbers (first at {first_index(~read.isfinite()) or '0'}), "
            f"read first by {operation.site}."
        )
        event.read = [(name, str(numbers))]
        # An input comes before everything that is computed from it. Minus infinity may be a mask, and counts only if
        # nothing else explains the step.
        if kind != "-inf":
            self.events.insert(0, event)
        else:
            self.minus.append(event)
        return event

    def _of_roundings(self, operation: Operation, rounded: list[Rounded], is_fill: bool) -> Event | None:
        """Return the event of this operation's roundings, if anything but a mask broke."""
        for one in rounded:
            # All numbers of an operand became 0. The comparison with float32 uses this note if the result is lost.
            if one.role not in ("activation", "output") and not bool(one.after.any()) and bool(one.before.any()):
                unrounded = glance(one.before)
                operation.notes["lost"] = _place_of(operation, one.role, unrounded), one.role, unrounded, one.ends
            event = self._rounding_event(operation, one)
            if event is None or is_fill:
                continue
            if event.kind == "saturation":
                self.saturations.append(event)
            else:
                self._add(event)
                return event
        return None

    def _rounding_event(self, operation: Operation, rounded: Rounded) -> Event | None:
        _, role, before, after, spec, _ = rounded
        unrounded, ends = glance(before), rounded.ends
        # Most roundings return here, without a count of the elements.
        if not isinstance(spec.fmt, BlockFormat) and unrounded.amax <= ends.largest and not unrounded.ends:
            return None
        largest, count = overflow_of(rounded)
        if not count:
            return None
        kind = "saturation" if bool(after.isfinite().all()) else "overflow"
        if kind == "saturation" and unrounded.amax < SATURATES * largest:
            return None
        stage, place = "backward" if is_backward(role) else "forward", _place_of(operation, role, unrounded)
        event = Event(stage, kind, place, role, count, before.numel(), operation=operation, origin=operation)
        event.fmt, event.ends, event.largest = str(spec.fmt), ends, unrounded.amax
        words = event.beyond(event.fmt, largest, first_index(before.abs() > largest))
        event.why.append(f"{words}, up to {unrounded.amax:.6g}.")
        event.read = [
            (source_name(s, i), str(s.notes["result"])) for i, s in enumerate(operation.sources) if s is not None
        ]
        return event

    def backward(self, operation: Operation, gradient: Tensor) -> None:
        if self.at_first_gradient is not None and not self.gradients:
            self.at_first_gradient()
        numbers = glance(gradient)
        is_parameter = operation.name == "parameter"
        role = "weight_grad" if is_parameter else "error"
        known: Glance | None = operation.notes.get("gradient")
        operation.notes["gradient"] = numbers
        # A step may run several backward passes; above, the gradient of the last one is noted.
        operation.notes["had_bad_gradient"] = bool(numbers.kinds) or operation.notes.get("had_bad_gradient", False)
        operation.notes["gradient_ends"] = Ends.of_dtype(gradient.dtype)
        if is_parameter:
            self.arrived.setdefault(operation.site, []).append(numbers)
        if known is None or not is_parameter:
            self.gradients.append(operation)
        self.judge_gradient(operation, role, gradient)

    def judge_gradient(self, operation: Operation, role: str, gradient: Tensor) -> None:
        """Find events in a gradient that arrived."""
        numbers: Glance = operation.notes["gradient"]
        if not numbers.nonfinite:
            return
        new = numbers.kinds
        for child in operation.children:
            if (after := child.notes.get("gradient")) is not None and after.nonfinite:
                new = set() if after.nan else new - after.kinds
        if new:
            at = operation.origin
            # The rounding of the gradient, or an operation behind a view, may already have the same event.
            broken = [e for e in self.events if e.stage == "backward"]
            if not any(e.operation is at or e.operation in at.children or e.place == at.site for e in broken):
                self._add(explain_gradient(operation, at, role, gradient, new))

    def _add(self, event: Event) -> None:
        event.batch = self.batch if event.stage == "forward" else event.batch
        self.events.append(event)

    def last_at(self, site: str) -> Operation | None:
        """Return the last operation of a site."""
        return self._last.get(site)

    # As the observer of the emulation

    def wants(self, site: str, role: str) -> bool:
        return True

    def __call__(self, site: str, role: str, before: Tensor, after: Tensor, spec: Spec, cut: Cut | None = None) -> None:
        if role in ("activation", "output") or self._ends is None:
            self._ends = Ends.of_spec(spec)
        rounded = Rounded(site, role, before.detach(), after.detach(), spec, cut)
        if is_backward(role):
            self._ends = None
            self.judge_rounded_gradient(rounded)
        else:
            self._rounded.append(rounded)

    def judge_rounded_gradient(self, rounded: Rounded) -> None:
        """Find events in the rounding of a gradient."""
        site, role, before = rounded[:3]
        operation = self._last.get(site)
        if operation is None:
            return
        operation.notes.setdefault("error_ends", {})[role] = rounded.ends
        event = self._rounding_event(operation, rounded)
        if event is not None:
            event.stage, event.remedy, event.batch = "backward", "scale", operation.notes.get("batch")
            if role == "weight_grad":
                names = [
                    p for p in operation.parents if p.name == "parameter" and p.notes["result"].count == before.numel()
                ]
                event.place = names[0].site if names else event.place
            (self.saturations if event.kind == "saturation" else self.events).append(event)

    def losses(self) -> list[Operation]:
        """Return the operations at which backward passes began, in order; if there is none, the last operation."""
        starts = [o for o in self.gradients if not any("gradient" in c.notes for c in o.children)]
        scalars = [o for o in starts if o.notes.get("result") is not None and o.notes["result"].count == 1]
        return [*dict.fromkeys(scalars)] or self.operations[-1:]


def entrances(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a model with its name; if it has no forward, also the parts that a step must call."""
    yield name, model
    # nn.ModuleDict, nn.ModuleList and some models are only containers, and their forward raises an error.
    if type(model).forward is nn.Module.forward:
        for child, module in model.named_children():
            yield from entrances(module, f"{name}.{child}" if name else child)


def is_backward(role: str) -> bool:
    return role in ("error", "weight_grad") or role.startswith(("dgrad", "wgrad"))


def _place_of(operation: Operation, role: str, unrounded: Glance) -> str:
    """Return the place of a rounding: the parameter that was rounded, or the operation."""
    if role not in ("weight", "fprop.w"):
        return operation.site
    names = [s for s in operation.parents if s.name == "parameter"]
    # A bias has the role of a weight too: the amax tells which of the two was rounded.
    at = [s for s in names if s.notes["result"].amax == unrounded.amax]
    return next((s.site for s in at or names), operation.site)


def overflow_of(rounded: Rounded) -> tuple[float, int]:
    """Return the largest value of a format, and the count of finite numbers that became inf, NaN or that value."""
    _, _, before, after, spec, cut = rounded
    # A number that was not finite before has an event at its own place. Its block becomes NaN because of it.
    if isinstance(spec.fmt, BlockFormat) and spec.fmt.nonfinite == "nan" and not bool(before.isfinite().all()):
        return math.inf, 0
    # The scale rule may let the largest number of a block saturate, so saturation of blocks is not an event.
    if isinstance(spec.fmt, BlockFormat) and spec.fmt.block != "tensor":
        return math.inf, int((before.isfinite() & ~after.isfinite()).sum())
    sums, largest = Accumulator(spec, before.device), rounded.ends.largest
    sums.add(before, after, cut)
    count = sums.result().overflow
    # If the scale is not known, the largest result is taken for the end of the format.
    if count and math.isinf(largest):
        largest = glance(after).amax
    return largest, count


def way_to(loss: Operation | None, start: Operation) -> list[Operation]:
    """Return a path of operations from `start` to the loss, inclusive; non-finite results are preferred."""
    leads, way = set() if loss is None else loss.all_behind(), [start]
    while way[-1] is not loss and (further := [o for o in way[-1].children if id(o) in leads]):
        way.append(max(further, key=lambda o: bool(o.notes["result"].nonfinite)))
    return way


def numbers_row(operation: Operation) -> dict[str, Any]:
    """Return the row of an operation: the finite amax and the non-finite share of its result and its gradient."""
    row: dict[str, Any] = {"site": operation.site, "call": operation.call}
    for name, words in (("result", ""), ("gradient", "gradient_")):
        numbers: Glance | None = operation.notes.get(name)
        row[f"{words}amax"] = None if numbers is None else numbers.amax
        is_mask = fills(operation) or operation.notes.get("masked") is not None
        masks = numbers.minus if numbers is not None and name == "result" and is_mask else 0
        row[f"{words}nonfinite"] = None if numbers is None else (numbers.nonfinite - masks) / max(numbers.count, 1)
    return row
