"""diagnose(model, step): find the origin of a step's first inf, NaN or saturated number."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fpsim.border import require_memory, require_module
from fpsim.checks import shown
from fpsim.emulation.operations import spelling_of
from fpsim.emulation.tracing import Operation
from fpsim.insight.masks import fills, leaking
from fpsim.insight.ranges import Glance, glance
from fpsim.insight.reasons.explaining import zero_divisors
from fpsim.insight.reasons.timeline import Rounded, Timeline, is_backward, numbers_row, overflow_of, way_to
from fpsim.insight.rows import Rows, number
from fpsim.insight.stepping import as_step, nothing_ran, preserve, traced
from fpsim.torch_modes import keeps_grad_mode
from fpsim.undoing import Undo, undone

__all__ = ["Diagnosis", "diagnose"]

ELSEWHERE = "fpsim.why(model, step) looks at optimizers, lost gradients and lost updates too."
SHOWN = 12  # how many rows a printed table has
CAME_IN = ("input", "parameter", "buffer")  # roles of tensors that were not finite before the step
AFTER = ("the parameter", "the buffer", "the gradient that is kept in")  # roles of tensors that were not after it
LEAST_SCALE, MOST_SCALE = -60, 60  # log2 of the scales that are searched


class Diagnosis(Rows):
    """The failure of one step: one row per site where inf, NaN or saturation appeared, in order of occurrence.

    cause: the first inf or NaN, otherwise the first saturation; None if nothing broke.
    operands: rows of the operands of the cause.
    chain: rows of the operations from the cause to the loss, with their results and gradients.
    run: a row for each operation: the finite amax and the non-finite share of its result, and of the result's gradient.
    layers: a row for each gradient, with the largest scale at which it fits, the smallest first; only with a scaler.
    checked: the checks that were made, in words.
    scale: the scaler's scale, and the largest power of two at which no gradient overflows; None without a scaler.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cause: dict[str, Any] | None = None
        self.checked = ""
        self.operands, self.chain, self.run, self.layers = Rows(), Rows(), Rows(), Rows()
        self.scale: tuple[float, float | None] | None = None

    def __str__(self) -> str:
        if self.cause is None:
            return f"Nothing is inf, NaN or saturated. {ELSEWHERE}\n{self.checked}"
        c = self.cause
        if c["role"] in CAME_IN:
            lines = [f"{c['kind']} came in with {c['role']} {c['site']}: {c['count']} of {c['of']}"]
            return "\n".join([*lines, "", "From there to the loss:", str(_shortened(self.chain))])
        if c["role"] in AFTER:
            return f"{c['kind']} is in {c['role']} {c['site']}, {c['count']} of {c['of']}, after the step. {ELSEWHERE}"
        where = "backward" if is_backward(c["role"]) else "forward"
        at = f", call {c['call'] + 1} of {c['calls']}" if c["calls"] > 1 else ""
        at += f", called by {c['caller']}" if c["caller"] else ""
        amax = f"finite amax {number(c['amax'])}" if c["count"] < c["of"] or c["amax"] else "no number is finite"
        lines = [
            f"{c['kind']} first appears {where} at {c['site']}, {c['role']}{at}: {c['count']} of {c['of']} "
            f"({100 * c['count'] / c['of']:.3g} %){c['note']}; {amax}, end of the format {c['largest']:g}"
        ]
        if self.operands:
            lines += ["", "What was read:", str(self.operands)]
        if self.chain:
            lines += ["", "From there to the loss:", str(_shortened(self.chain))]
        if self.scale is not None:
            lines += ["", f"The scale is {self.scale[0]:g}. " + self._fitting()]
        return "\n".join(lines)

    def _fitting(self) -> str:
        assert self.scale is not None
        if self.scale[1] is None:
            return f"Gradients are not finite down to a scale of 2^{LEAST_SCALE}."
        rows = Rows(self.layers[:SHOWN])
        return f"The largest power of two at which no gradient overflows is {self.scale[1]:g}:\n{rows}"

    __repr__ = __str__

    def plot(self) -> Any:
        """Plot the amax of all results and gradients, and where they are not finite; needs matplotlib."""
        from fpsim.insight.pictures import plot_ranges

        return plot_ranges(self.run, self.cause)


def _shortened(rows: Rows) -> Rows:
    if len(rows) <= SHOWN:
        return rows
    gap = dict.fromkeys(rows[0], "...")
    return Rows([*rows[: SHOWN // 2], gap, *rows[-SHOWN // 2 :]])


@keeps_grad_mode
def diagnose(
    model: nn.Module,
    step: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Diagnosis:
    """Run a step; name the operation where inf, NaN or saturation first appears, its operands, and the path to loss.

    A step is a forward and a backward pass, `lambda: loss(model(x), y).backward()`, without the optimizer's step. The
    model may be float32, under autocast or quantised. Parameters, buffers, gradients and random numbers are restored
    afterwards.

    Each row has:

    - site, call, calls: the operation, the number of this call, and the number of all its calls.
    - role: "activation", "error" for its gradient, "weight_grad", or the operand of a product; for tensors that were
      not finite before the step, "input", "parameter" or "buffer".
    - kind: "inf", "-inf", "NaN" or "saturation".
    - count, of: the number of elements of this kind, and of all elements.
    - amax, largest: the finite amax before rounding, and the largest number of the format.
    - caller, note: the caller of a module that has several callers, and a remark.

    Masks are left out: infinities that were filled in, and finite constants such as -1e9, unless a softmax gives weight
    to them. Saturation is found in formats without scales, and in formats with one scale for the whole tensor. Nothing
    is seen inside of recomputation in a checkpoint, custom autograd functions and compiled code. If nothing breaks,
    parameters, buffers and gradients are checked after the step.

    Args:
        model: the model of the step.
        step: a function without arguments, or a batch. With a batch, the model's output has a `.loss`, or `loss`
            computes it.
        loss: a function from the model's output to a scalar, for a batch.
        scaler: the torch.amp.GradScaler of the step, if it skips step after step. The step is then run at other scales
            too, to find the largest scale at which no gradient overflows. The scaler's state is restored.

    Raises:
        TypeError: for a scaler other than torch.amp.GradScaler, and for a step of another kind.
        ValueError: for a step in which no operation was seen.

    >>> model = nn.ReLU6()
    >>> diagnosis = diagnose(model, lambda: model(torch.ones(2)) * 3e38 * 3e38)
    >>> diagnosis.cause["site"], diagnosis.cause["kind"], diagnosis.cause["count"]
    (':mul_1', 'inf', 2)
    """
    require_module(model)
    require_memory(model)
    step = as_step(model, step, loss, "diagnose")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(
            f"scaler is {shown(scaler)}, of type {type(scaler).__name__}. Expected: a torch.amp.GradScaler, or None."
        )
    seen = _run(model, step)
    if not seen.operations and not seen.broken:
        raise nothing_ran(model, "diagnose")
    result = Diagnosis()
    result.extend(seen.told(event, operation) for event, operation in seen.broken)
    # A saturated number is finite, and the step continues with it. If an inf or NaN appears later, the inf or NaN is
    # the cause.
    of_cause = next((pair for pair in seen.broken if pair[0]["kind"] != "saturation"), next(iter(seen.broken), None))
    if of_cause is not None:
        result.cause, operation = seen.told(*of_cause), of_cause[1]
        if operation is not None:
            read = _read_backward if is_backward(result.cause["role"]) else _read_forward
            result.operands, result.chain = read(operation), _chain(operation, seen.loss())
    result.checked = _looked_at(model, seen)
    result.run.extend(numbers_row(operation) for operation in seen.operations if operation.computes)
    if scaler is not None and scaler.is_enabled():
        state = scaler.state_dict()

        def at_other_scales(undo: Undo) -> None:
            undo.by(partial(scaler.load_state_dict, state))
            result.scale, result.layers = _scales(model, step, scaler, state)

        undone(at_other_scales)
    return result


def _looked_at(model: nn.Module, seen: Seen) -> str:
    """Describe the checks that were made."""
    arrived = {operation.site for operation in seen.gradients if operation.name == "parameter"}
    results = len(seen.gradients) - len(arrived)
    return (
        f"Looked at: {len(seen.operations)} results, {results} gradients of results, those of {len(arrived)} of "
        f"{sum(1 for _ in model.parameters())} parameters; parameters, buffers and .grad afterwards."
    )


def _read_forward(operation: Operation) -> Rows:
    """Return rows of the tensors that an operation read."""
    rows, ranges = Rows(), operation.notes.get("operands", ())
    names = operation.notes.get("names", ["(from outside)"] * len(operation.sources))
    for source, name, read in zip(operation.sources, names, ranges, strict=False):
        rows.append({"what": name if source is None else source.site, "range": str(read)})
    rows.extend({"what": what, "range": text} for what, text in operation.notes.get("integers", ()))
    return rows


def _read_backward(operation: Operation) -> Rows:
    """Return rows of the tensors that a result's gradient is computed from: gradients and operands of its readers."""
    rows = Rows()
    for child in operation.children:
        # Go through views to the operations that compute with them.
        if not child.computes:
            rows.extend(_read_backward(child))
        elif "gradient" in child.notes:
            rows.append({"what": f"gradient of {child.site}", "range": str(child.notes["gradient"])})
            rows.extend(_read_forward(child))
    return rows


def _chain(operation: Operation, loss: Operation | None) -> Rows:
    """Return rows of the operations from this one to the loss."""
    rows = Rows()
    for at in way_to(loss, operation):
        if at.computes or at is operation or at is loss:
            held = {name: at.notes.get(name) for name in ("result", "gradient")}
            rows.append({"site": at.site, **{k: None if v is None else str(v) for k, v in held.items()}})
    return rows


def _run(model: nn.Module, step: Callable[[], object]) -> Seen:
    seen = Seen(model)

    def run(undo: Undo) -> None:
        trace = traced(model, seen, "diagnose", undo)
        preserve(model, undo)
        trace.run(step)
        # If something broke in the step, the final tensors need no check: its inf or NaN is in the gradients as well.
        if not seen.broken:
            seen.afterwards(model)

    undone(run)
    return seen


def _scales(
    model: nn.Module, step: Callable[[], object], scaler: torch.amp.GradScaler, state: dict[str, Any]
) -> tuple[tuple[float, float | None], Rows]:
    """Return (the scaler's scale, the largest power of two at which all gradients fit), and a row for each gradient."""

    def at(log2_scale: int) -> Seen:
        scaler.load_state_dict({**state, "scale": math.ldexp(1.0, log2_scale)})
        return _run(model, step)

    now = state["scale"]
    # A gradient that overflowed has no amax, so first go down to a scale at which all gradients are finite.
    base = min(math.floor(math.log2(now)), MOST_SCALE)
    while (seen := at(base)) and _overflows(seen):
        if base <= LEAST_SCALE:
            return (now, None), Rows()
        base = max(base - 8, LEAST_SCALE)
    rows = Rows()
    for operation in seen.gradients:
        gradient = operation.notes["gradient"]
        role = "weight_grad" if operation.name == "parameter" else "error"
        amax = seen.unrounded.get((operation.site, role), gradient.amax)
        # Under autocast a float32 gradient was cast from the narrower dtype in which the result was read.
        ends = [child.notes["result"].largest for child in operation.children]
        limit = min(seen.limits.get(operation.site, math.inf), gradient.largest, *ends)
        if amax and (operation.computes or role == "weight_grad"):
            fits = math.ldexp(1.0, base + math.floor(math.log2(limit / amax)))
            rows.append({"site": operation.site, "role": role, "amax": math.ldexp(amax, -base), "fits": fits})
    rows.sort(key=lambda row: row["fits"])
    if not rows:
        return (now, None), rows
    # The estimate assumes that gradients are linear in the scale. Rounding makes them slightly nonlinear, so neighbours
    # of the estimate are tried.
    log2_scale = max(min(int(math.log2(rows[0]["fits"])), MOST_SCALE), base)
    while log2_scale > base and _overflows(at(log2_scale)):
        log2_scale -= 1
    while log2_scale < MOST_SCALE and not _overflows(at(log2_scale + 1)):
        log2_scale += 1
    return (now, math.ldexp(1.0, log2_scale)), rows


def _overflows(seen: Seen) -> bool:
    """True if any gradient is not finite."""
    return any(operation.notes["gradient"].kinds for operation in seen.gradients)


class Seen(Timeline):
    """A timeline whose events are rows: one for each kind (inf, -inf, NaN or saturation) that appears at a site.

    broken: the rows in the order of time, each with its operation.
    limits: by site, the largest number of the format to which the gradient is rounded.
    unrounded: by site and role, the amax of gradients before they are rounded.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.broken: list[tuple[dict[str, Any], Operation | None]] = []
        self.limits: dict[str, float] = {}
        self.unrounded: dict[tuple[str, str], float] = {}
        self._looked_at: set[int] = set()  # ids of tensors from outside that were checked
        self._by_site: dict[str, Operation] = {}
        self._parameters: dict[str, str] = {}  # the name of the parameter that is rounded at a site

    def loss(self) -> Operation | None:
        """Return the operation at which the backward pass began; the last one if there was no backward pass."""
        return next(iter(self.gradients), self.operations[-1] if self.operations else None)

    def judge(
        self, operation: Operation, given: list[Tensor], operands: list[Tensor], result: Tensor, rounded: list[Rounded]
    ) -> None:
        notes = operation.notes
        self._by_site.update(dict.fromkeys((operation.site, *(r.site for r in rounded)), operation))
        notes["names"] = [self.names.get(id(x), "(from outside)") for x in given]
        # Map the sites at which this operation's parameters are rounded to their names: a bias is ":weight_1" there.
        names = [s.site for s in operation.sources if s is not None and s.name == "parameter"]
        self._parameters.update(zip([r.site for r in rounded if r.role == "weight"], names, strict=False))
        if not fills(operation):
            for source, x, numbers in zip(operation.sources, given, notes["operands"], strict=True):
                self._note_outside(operation, source, x, numbers)
        self._note_divisors(operation)
        kinds = self._note_roundings(operation, rounded)
        if not fills(operation) and "inf" not in kinds:
            self._note(operation, "activation", notes["result"], notes["operands"])
        self._note_leak(operation, result)

    def told(self, event: dict[str, Any], operation: Operation | None) -> dict[str, Any]:
        """Return the row of an event, with the number of calls of its site, and the caller of a shared module."""
        caller = ""
        # A module is usually called by the module around it, and its name begins with the caller's name. No name begins
        # with "\0", which stands for a missing caller here.
        if operation is not None and operation.module and not operation.module.startswith(operation.caller or "\0"):
            caller = operation.caller
        calls = 1 if operation is None else self.calls.get(operation.site, 1)
        return {"note": "", **event, "calls": calls, "caller": caller}

    def _note_divisors(self, operation: Operation) -> None:
        """Note integers among the operands of a division, and divisions by zero."""
        assert self.trace is not None
        (values, options), notes = self.trace.arguments, operation.notes
        spelling = spelling_of(operation.name)
        if spelling.row.divides is None:
            return
        integers = [
            (i, a) for i, a in enumerate(values) if isinstance(a, Tensor) and not a.is_floating_point() and a.numel()
        ]
        notes["integers"] = [(f"operand {i + 1} (integers)", str(glance(a))) for i, a in integers]
        zeros = zero_divisors(operation, values, options)
        notes["divides"] = f", a division by zero ({zeros})" if zeros else ""

    def _note_roundings(self, operation: Operation, rounded: list[Rounded]) -> set[str]:
        """Note inf, NaN and saturation in this operation's roundings, except masks, and return the kinds."""
        masked, kinds, aside = operation.notes["masked"], set(), []
        for one in rounded:
            site, role, before, after = one[:4]
            event, largest = _rounding_row(self._parameters.get(site, site), one)
            if role in ("activation", "output"):
                operation.notes["end"] = largest
            if event is None:
                continue
            kinds.add(event["kind"])
            event["call"] = operation.call
            # The constant of a mask may be beyond the format. This breaks nothing, unless a softmax gives it weight.
            if masked is not None and masked.shape == before.shape:
                aside.append(event)
                count = overflow_of(one._replace(before=before[~masked], after=after[~masked]))[1]
                if not count:
                    continue
                event = {**event, "count": count, "of": int((~masked).sum())}
            self.broken.append((event, operation))
        operation.notes["aside"] = aside
        return kinds

    def _note_leak(self, operation: Operation, result: Tensor) -> None:
        """Note the mask whose constant was clipped, if a softmax gives weight to masked positions."""
        weights, at = leaking(operation, result), operation
        if weights is None:
            return
        while (source := at.sources[0] if at.sources else None) is not None and source.notes.get("masked") is not None:
            at = source
            for event in at.notes.get("aside", ()):
                note = f", a mask that leaks: {operation.site} gives up to {float(weights.max()):.3g} of weight to it"
                self.broken.append(({**event, "note": note}, at))

    def _note_outside(self, operation: Operation, source: Operation | None, x: Tensor, numbers: Glance) -> None:
        """Note NaN and inf in an input, buffer or parameter at its first read."""
        is_parameter = source is not None and source.name == "parameter"
        if not (source is None or is_parameter) or id(x) in self._looked_at:
            return
        self._looked_at.add(id(x))
        # -inf in any tensor but a parameter may be a mask.
        kinds = numbers.kinds if is_parameter else numbers.kinds - {"-inf"}
        name = self.names.get(id(x))
        site = source.site if source is not None else name or f"(from outside), read by {operation.site}"
        role = "parameter" if is_parameter else "input" if name is None else "buffer"
        for kind in sorted(kinds, reverse=True):
            self._broke(operation, site, role, kind, numbers)

    def _broke(
        self, operation: Operation | None, site: str, role: str, kind: str, numbers: Glance, **more: Any
    ) -> None:
        """Note the row of a tensor that is not finite. more: entries of the row that replace the default ones."""
        counts = {"NaN": numbers.nan, "inf": numbers.plus, "-inf": numbers.minus}
        event = {"site": site, "call": 0, "role": role, "kind": kind, "count": counts[kind], "of": numbers.count}
        self.broken.append(({**event, "amax": numbers.amax, "largest": numbers.largest, **more}, operation))

    def afterwards(self, model: nn.Module) -> None:
        """Note tensors that are not finite at the end of a step in which nothing else broke."""
        kept: list[tuple[str, str, Tensor]] = [(AFTER[0], n, p) for n, p in model.named_parameters()]
        kept += [(AFTER[2], n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
        kept += [(AFTER[1], n, b) for n, b in model.named_buffers() if b.is_floating_point()]
        for role, name, x in kept:
            numbers = glance(x)
            if numbers.nan or numbers.plus or (numbers.minus and role != AFTER[1]):
                self._broke(None, name, role, numbers.worst, numbers, count=numbers.nonfinite)

    def judge_gradient(self, operation: Operation, role: str, gradient: Tensor) -> None:
        numbers: Glance = operation.notes["gradient"]
        after = [child.notes["gradient"] for child in operation.children if "gradient" in child.notes]
        # For a view, the operation that computed its values is named, and only once.
        at = operation.origin
        if not any(event["site"] == at.site and event["role"] == role for event, _ in self.broken):
            self._note(at, role, numbers, after)

    def _note(self, operation: Operation, role: str, numbers: Glance, before: list[Glance]) -> None:
        """Note inf, -inf and NaN in a tensor, unless a tensor from which it is computed has the same kind."""
        ends = [numbers.largest, self.limits.get(operation.site, math.inf)]
        # Under autocast, as in `_scales`, a float32 gradient was cast from the dtype in which the result was read.
        if is_backward(role):
            ends += [child.notes["result"].largest for child in operation.children]
        elif operation.notes.get("end") is not None:
            ends = [operation.notes["end"]]
        note = "" if is_backward(role) else operation.notes.get("divides", "")
        for kind in sorted(numbers.kinds.difference(*(b.kinds for b in before)), reverse=True):
            more = {"call": operation.call, "note": note, "largest": min(ends)}
            self._broke(operation, operation.site, role, kind, numbers, **more)

    def judge_rounded_gradient(self, rounded: Rounded) -> None:
        site, role, before = rounded[:3]
        name = self._parameters.get(site, site)
        self.unrounded[name, role] = glance(before).amax
        event, self.limits[name] = _rounding_row(name, rounded)
        if event is not None:
            self.broken.append((event, self._by_site.get(site)))


def _rounding_row(name: str, rounded: Rounded) -> tuple[dict[str, Any] | None, float]:
    """Return the row of a rounding that broke or saturated finite numbers, and the largest number of its format."""
    largest, count = overflow_of(rounded)
    if not count:
        return None, largest
    _, role, before, after = rounded[:4]
    kind = "saturation" if bool(after.isfinite().all()) else ("NaN" if bool(after.isnan().any()) else "inf")
    event = {"site": name, "call": 0, "role": role, "kind": kind, "count": count, "of": before.numel()}
    finite = before[before.isfinite()]
    return {**event, "amax": float(finite.abs().max()) if finite.numel() else 0.0, "largest": largest}, largest
