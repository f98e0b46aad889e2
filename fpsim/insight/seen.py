"""What `diagnose` sees of a step: ranges of results and gradients, and where they stop being those of numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fpsim.emulation.operations import Kind, row_of, spelling_of
from fpsim.emulation.tracing import Operation, Trace
from fpsim.formats.blocks import BlockFormat
from fpsim.insight.masks import leaking, masked_in
from fpsim.insight.ranges import Glance, glance
from fpsim.tensors.shared_scales import Cut
from fpsim.tensors.spec import Spec
from fpsim.tensors.tally import Accumulator

__all__ = ["AFTER", "CAME_IN", "Seen", "fills", "is_backward", "overflow_of"]

CAME_IN = ("input", "parameter", "buffer")  # roles of what was not finite before anything was computed
AFTER = ("the parameter", "the buffer", "the gradient that is kept in")  # and of what is not finite afterwards


def fills(operation: Operation) -> bool:
    """Whether an operation puts an infinity in its result on purpose."""
    return row_of(operation.name).kind is Kind.FILL


def is_backward(role: str) -> bool:
    return role in ("error", "weight_grad") or role.startswith(("dgrad", "wgrad"))


class Seen:
    """The visitor, and the observer of a quantised model: notes ranges, and where they stop being ones of numbers."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = {id(buffer): name for name, buffer in model.named_buffers()}
        self._outside: set[int] = set()  # the tensors from outside that were looked at
        self.events: list[tuple[dict[str, Any], Operation | None]] = []
        self.operations: list[Operation] = []
        self.gradients: list[Operation] = []
        self.limits: dict[str, float] = {}  # of the formats that gradients are rounded to, by site
        self.unrounded: dict[tuple[str, str], float] = {}  # the amax of gradients before they are rounded
        self.trace: Trace | None = None
        self.calls: dict[str, int] = {}  # of each site
        # of the roundings of the operation that runs: their sites, and those of parameters; and what broke in them
        self._waiting: list[tuple[dict[str, Any], Tensor, Tensor, Spec]] = []
        self._sites: list[str] = []
        self._weights: list[str] = []
        self._end: float | None = None  # of the format of its result
        self._by_site: dict[str, Operation] = {}
        self._parameters: dict[str, str] = {}  # the parameters that are rounded at a site, by its name

    def loss(self) -> Operation | None:
        """What the backward pass began at, or the last operation."""
        return next(iter(self.gradients), self.operations[-1] if self.operations else None)

    def keeps(self, x: Tensor) -> bool:
        """Whether what a call is about to write to is looked at before."""
        return True

    def forward(self, operation: Operation, operands: list[Tensor], result: Tensor) -> None:
        held = operands if self.trace is None else [self.trace.read(x) for x in operands]
        known = [None if source is None else source.notes.get("result") for source in operation.sources]
        ranges = [k or glance(x) for k, x in zip(known, held, strict=True)]
        operation.notes.update(operands=ranges, result=glance(result))
        self.operations.append(operation)
        self.calls[operation.site] = max(self.calls.get(operation.site, 0), operation.call + 1)
        self._by_site.update(dict.fromkeys((operation.site, *self._sites), operation))
        operation.notes["names"] = [self._buffers.get(id(x), "(from outside)") for x in operands]
        if not fills(operation):
            for source, x, numbers in zip(operation.sources, operands, ranges, strict=True):
                self._note_outside(operation, source, x, numbers)
        self._name_weights(operation)
        self._note_arguments(operation, held, result)
        rounded = self._note_roundings(operation)
        if not fills(operation) and "inf" not in rounded:
            self._note(operation, "activation", operation.notes["result"], ranges)
        self._note_leak(operation, result)
        self._waiting, self._sites, self._weights, self._end = [], [], [], None

    def told(self, event: dict[str, Any], operation: Operation | None) -> dict[str, Any]:
        """The row of an event: with the calls of its site, and who called a module that several call."""
        caller = ""
        if operation is not None and operation.module and not operation.module.startswith(operation.caller or "\0"):
            caller = operation.caller
        calls = 1 if operation is None else self.calls.get(operation.site, 1)
        return {"note": "", **event, "calls": calls, "caller": caller}

    def _name_weights(self, operation: Operation) -> None:
        """Know the parameters behind the sites at which this operation's are rounded: a bias is ":weight_1" there."""
        names = [s.site for s in operation.sources if s is not None and s.name == "parameter"]
        self._parameters.update(zip(self._weights, names, strict=False))

    def _note_arguments(self, operation: Operation, operands: list[Tensor], result: Tensor) -> None:
        """Note masks, integers among the operands, and divisions by zero."""
        values, options = ((), {}) if self.trace is None else self.trace.arguments
        arguments = (*values, *options.values())
        notes = operation.notes
        notes["masked"] = masked_in(operation, operands, arguments, result)
        notes["end"] = self._end
        integers = [
            (i, a) for i, a in enumerate(values) if isinstance(a, Tensor) and not a.is_floating_point() and a.numel()
        ]
        spelling = spelling_of(operation.name)
        if spelling.row.divides is not None:
            notes["integers"] = [(f"operand {i + 1} (integers)", _of_integers(a)) for i, a in integers]
        divisor = None if spelling.row.divides is None else spelling.get(spelling.row.divides, values, options)
        if isinstance(divisor, Tensor):
            zeros = int((divisor == 0).sum())
            notes["divides"] = f", a division by zero ({zeros} of {divisor.numel()} divisors)" if zeros else ""
        elif isinstance(divisor, int | float) and divisor == 0:
            notes["divides"] = ", a division by zero"

    def _note_roundings(self, operation: Operation) -> set[str]:
        """Note what broke where this operation's tensors were rounded, and give the kinds; what masks is set aside."""
        masked, kinds, aside = operation.notes["masked"], set(), []
        for event, before, after, spec in self._waiting:
            kinds.add(event["kind"])
            event = {**event, "call": operation.call, "site": self._parameters.get(event["site"], event["site"])}
            if masked is not None and masked.shape == before.shape:
                aside.append(event)
                count = overflow_of(before[~masked], after[~masked], spec)[1]
                if not count:
                    continue
                event = {**event, "count": count, "of": int((~masked).sum())}
            self.events.append((event, operation))
        operation.notes["aside"] = aside
        return kinds

    def _note_leak(self, operation: Operation, result: Tensor) -> None:
        """Note the mask whose constant was cut off, where a softmax gives weight to what it masks."""
        weights, at = leaking(operation, result), operation
        if weights is None:
            return
        while (source := at.sources[0] if at.sources else None) is not None and source.notes.get("masked") is not None:
            at = source
            for event in at.notes.get("aside", ()):
                note = f", a mask that leaks: {operation.site} gives up to {float(weights.max()):.3g} of weight to it"
                self.events.append(({**event, "note": note}, at))

    def _note_outside(self, operation: Operation, source: Operation | None, x: Tensor, numbers: Glance) -> None:
        """Note NaN and inf in an input; minus infinity in a parameter only, for elsewhere it may be a mask."""
        is_parameter = source is not None and source.name == "parameter"
        if not (source is None or is_parameter) or id(x) in self._outside:
            return
        self._outside.add(id(x))
        kinds = numbers.kinds if is_parameter else numbers.kinds - {"-inf"}
        name = self._buffers.get(id(x))
        site = source.site if source is not None else name or f"(from outside), read by {operation.site}"
        role = "parameter" if is_parameter else "input" if name is None else "buffer"
        counts = {"NaN": numbers.nan, "inf": numbers.plus, "-inf": numbers.minus}
        for kind in sorted(kinds, reverse=True):
            event = {"site": site, "call": 0, "role": role, "kind": kind}
            end = {"count": counts[kind], "of": numbers.count, "amax": numbers.amax, "largest": numbers.largest}
            self.events.append(({**event, **end}, operation))

    def afterwards(self, model: nn.Module) -> None:
        """Note what is not finite at the end of a step in which nothing else was found."""
        kept: list[tuple[str, str, Tensor]] = [(AFTER[0], n, p) for n, p in model.named_parameters()]
        kept += [(AFTER[2], n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
        kept += [(AFTER[1], n, b) for n, b in model.named_buffers() if b.is_floating_point()]
        for role, name, x in kept:
            numbers = glance(x)
            kind = numbers.worst
            if numbers.nan or numbers.plus or (numbers.minus and role != AFTER[1]):
                event = {"site": name, "call": 0, "role": role, "kind": kind, "count": numbers.nonfinite}
                end = {"of": numbers.count, "amax": numbers.amax, "largest": numbers.largest}
                self.events.append(({**event, **end}, None))

    def backward(self, operation: Operation, gradient: Tensor) -> None:
        role, numbers = "weight_grad" if operation.name == "parameter" else "error", glance(gradient)
        operation.notes["gradient"] = numbers
        self.gradients.append(operation)
        after = [child.notes["gradient"] for child in operation.children if "gradient" in child.notes]
        operation = operation.origin  # of a view: what gave the values is to be named
        if not any(event["site"] == operation.site and event["role"] == role for event, _ in self.events):
            self._note(operation, role, numbers, after)

    def _note(self, operation: Operation, role: str, numbers: Glance, before: list[Glance]) -> None:
        """Note what is not finite in a tensor, and is in none of those that it was computed from."""
        counts = {"NaN": numbers.nan, "inf": numbers.plus, "-inf": numbers.minus}
        ends = [numbers.largest, self.limits.get(operation.site, math.inf)]
        if is_backward(role):  # under autocast a float32 gradient was one of the dtype in which the result was read
            ends += [child.notes["result"].largest for child in operation.children]
        elif operation.notes.get("end") is not None:
            ends = [operation.notes["end"]]
        note = "" if is_backward(role) else operation.notes.get("divides", "")
        for kind in sorted(numbers.kinds.difference(*(b.kinds for b in before)), reverse=True):
            event = {"site": operation.site, "call": operation.call, "role": role, "kind": kind, "note": note}
            end = {"count": counts[kind], "of": numbers.count, "amax": numbers.amax, "largest": min(ends)}
            self.events.append(({**event, **end}, operation))

    # As the observer of the emulation

    def wants(self, site: str, role: str) -> bool:
        return True

    def __call__(self, site: str, role: str, before: Tensor, after: Tensor, spec: Spec, cut: Cut | None = None) -> None:
        largest, count = overflow_of(before, after, spec)
        finite = before[before.isfinite()]
        amax = float(finite.abs().max()) if finite.numel() else 0.0
        name = self._parameters.get(site, site)
        if is_backward(role):
            self.limits[name], self.unrounded[name, role] = largest, amax
        else:
            self._sites.append(site)
            if role == "weight":
                self._weights.append(site)
            elif role in ("activation", "output"):
                self._end = largest
        if not count:
            return
        kind = "saturation" if bool(after.isfinite().all()) else ("NaN" if bool(after.isnan().any()) else "inf")
        event = {"site": name, "call": 0, "role": role, "kind": kind, "count": count, "of": before.numel()}
        event |= {"amax": amax, "largest": largest}
        if is_backward(role):
            self.events.append((event, self._by_site.get(site)))
        else:
            self._waiting.append((event, before.detach(), after.detach(), spec))


def overflow_of(before: Tensor, after: Tensor, spec: Spec) -> tuple[float, int]:
    """The largest value that a rounding can give, and how many finite numbers became inf, NaN or that, and were not."""
    fmt = spec.fmt
    if not isinstance(fmt, BlockFormat):
        sums = Accumulator(spec, before.device)
        sums.add(before, after)
        return fmt.largest, sums.result().overflow
    if fmt.block != "tensor" or not after.numel():
        return math.inf, int((before.isfinite() & ~after.isfinite()).sum())
    # The scale is not told. Beyond half an ulp of any value above the largest result something was cut off, and that
    # result is the format's largest value at this scale, whose own half an ulp then decides.
    top, magnitudes = float(after.abs().max()), torch.where(before.isfinite(), before.abs(), 0.0)
    mantissa_bits = getattr(fmt.element, "mantissa_bits", 0)
    if float(magnitudes.max()) <= top * (1 + math.ldexp(1.0, -1 - mantissa_bits)):
        return top, 0
    binade = math.frexp(fmt.element.largest)[1] - 1
    half_ulp = math.ldexp(0.5, binade - mantissa_bits) if mantissa_bits else 0.5
    return top, int((magnitudes > top * (1 + half_ulp / fmt.element.largest)).sum())


def _of_integers(x: Tensor) -> str:
    low, high, zeros = int(x.min()), int(x.max()), int((x == 0).sum())
    return f"{low} to {high}" + (f", {zeros} of {x.numel()} zero" if zeros and x.numel() > 1 else "")
