"""diagnose(model, step): where a step's first inf, NaN or saturated number comes from."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fpsim.blocks import BlockFormat
from fpsim.border import require_memory, require_module
from fpsim.checks import require_callable, shown
from fpsim.emulation.scope import Listeners, Observer
from fpsim.emulation.tracing import Operation, Trace
from fpsim.forwards import emulated_forwards
from fpsim.model import listeners
from fpsim.noise import keep_random_numbers
from fpsim.ranges import Range, range_of
from fpsim.rows import Rows, number
from fpsim.shared_scales import Cut
from fpsim.spec import Spec
from fpsim.tally import Accumulator
from fpsim.torch_modes import keeps_grad_mode
from fpsim.undoing import Undo, undone

__all__ = ["FILLS", "Diagnosis", "diagnose", "overflow_of"]

# What puts an infinity in its result on purpose.
FILLS = frozenset("masked_fill masked_fill_ index_fill index_fill_ full full_like new_full fill where tensor".split())
CAME_IN = ("input", "parameter", "buffer")  # roles of what was not finite before anything was computed
AFTER = ("the parameter", "the buffer", "the gradient that is kept in")  # and of what is not finite afterwards
ELSEWHERE = "fpsim.why(model, step) looks at optimizers, lost gradients and lost updates too."
SHOWN = 12  # rows of a printed table
LEAST_SCALE, MOST_SCALE = -60, 60  # log2, between which a scale is looked for


class Diagnosis(Rows):
    """What broke in one step: a row for each place where inf, NaN or saturation appeared, the first one first.

    cause: the first inf or NaN, or where there is none the first saturation; None where all is well.
    operands: rows of what the operation of the cause read.
    chain: rows of the operations from there to the loss, with their results and gradients.
    run: rows of all operations: finite amax, and the share that is not finite, of the result and of its gradient.
    layers: rows of the largest scales at which the gradients fit, the least first; of a step with a scaler.
    scale: the scaler's scale, and the largest power of two at which no gradient overflows; None without a scaler.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cause: dict[str, Any] | None = None
        self.operands, self.chain, self.run, self.layers = Rows(), Rows(), Rows(), Rows()
        self.scale: tuple[float, float | None] | None = None

    def __str__(self) -> str:
        if self.cause is None:
            return f"Nothing is inf, NaN or saturated. {ELSEWHERE}"
        c = self.cause
        if c["role"] in CAME_IN:
            lines = [f"{c['kind']} came in with {c['role']} {c['site']}: {c['count']} of {c['of']}"]
            return "\n".join([*lines, "", "From there to the loss:", str(_shortened(self.chain))])
        if c["role"] in AFTER:
            return f"{c['kind']} is in {c['role']} {c['site']}, {c['count']} of {c['of']}, after the step. {ELSEWHERE}"
        where = "backward" if _is_backward(c["role"]) else "forward"
        lines = [
            f"{c['kind']} first appears {where} at {c['site']}, {c['role']}: {c['count']} of {c['of']} "
            f"({100 * c['count'] / c['of']:.3g} %); finite amax {number(c['amax'])}, end of the format {c['largest']:g}"
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
        """A figure: the amax of all results and gradients, and where they are not finite; needs matplotlib."""
        from fpsim.pictures import plot_ranges

        return plot_ranges(self.run, self.cause)


def _is_backward(role: str) -> bool:
    return role in ("error", "weight_grad") or role.startswith(("dgrad", "wgrad"))


def _shortened(rows: Rows) -> Rows:
    if len(rows) <= SHOWN:
        return rows
    gap = dict.fromkeys(rows[0], "...")
    return Rows([*rows[: SHOWN // 2], gap, *rows[-SHOWN // 2 :]])


@keeps_grad_mode
def diagnose(model: nn.Module, step: Callable[[], object], *, scaler: torch.amp.GradScaler | None = None) -> Diagnosis:
    """Run a step, and name where inf, NaN or saturation first appears, what was read there, and the way to the loss.

    A step is a forward and a backward pass, `lambda: loss(model(x), y).backward()`, without the optimizer's. It may be
    of a float32 model, of one under autocast, or of a quantised one. Parameters, buffers, gradients and random numbers
    are put back afterwards. An infinity that was filled in as a mask is none.

    Each row has `site` and `call` (the n-th of a site), the `role` ("activation", "error" for its gradient,
    "weight_grad", the operand of a product; "input", "parameter" or "buffer" of what came in), `kind` ("inf", "-inf",
    "NaN" or "saturation"), `count` of so many numbers, the finite `amax` before rounding, and `largest`, where the
    format ends. Saturation is seen in formats of single numbers and of one scale for a tensor. What a checkpoint runs
    again, custom autograd functions and compiled code are not seen inside. Where nothing breaks, parameters, buffers
    and gradients are looked at after the step.

    model: whose step it is.
    step: what runs it.
    scaler: a torch.amp.GradScaler that `step` uses, if it keeps skipping: the step is run at other scales too, and the
        scale at which no gradient overflows is looked for. Its state is put back.
    Raises TypeError for a scaler that is no torch.amp.GradScaler.

    >>> model = nn.ReLU6()
    >>> found = diagnose(model, lambda: model(torch.ones(2)) * 3e38 * 3e38)
    >>> found.cause["site"], found.cause["kind"], found.cause["count"]
    (':mul_1', 'inf', 2)
    """
    require_module(model)
    require_memory(model)
    require_callable("step", step, "lambda: loss(model(x), y).backward()")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(
            f"scaler is {shown(scaler)}, of type {type(scaler).__name__}. Possible: a torch.amp.GradScaler, or None."
        )
    seen = _run(model, step)
    result = Diagnosis()
    result.extend(event for event, _ in seen.events)
    of_cause = next((pair for pair in seen.events if pair[0]["kind"] != "saturation"), next(iter(seen.events), None))
    if of_cause is not None:
        result.cause, operation = of_cause
        if operation is not None:
            read = _read_backward if _is_backward(result.cause["role"]) else _read_forward
            result.operands, result.chain = read(operation), _chain(operation, seen.loss())
    result.run.extend(_numbers(operation) for operation in seen.operations if operation.computes)
    if scaler is not None and scaler.is_enabled():
        state = scaler.state_dict()

        def at_other_scales(undo: Undo) -> None:
            undo.by(partial(scaler.load_state_dict, state))
            result.scale, result.layers = _scales(model, step, scaler, state)

        undone(at_other_scales)
    return result


def _read_forward(operation: Operation) -> Rows:
    rows, ranges = Rows(), operation.notes.get("operands", ())
    names = operation.notes.get("names", ["(from outside)"] * len(operation.sources))
    for source, name, found in zip(operation.sources, names, ranges, strict=False):
        rows.append({"what": name if source is None else source.site, "range": str(found)})
    return rows


def _read_backward(operation: Operation) -> Rows:
    """What the gradient of a result is computed from: the gradients of what read it, and their operands."""
    rows = Rows()
    for child in operation.children:
        if not child.computes:
            rows.extend(_read_backward(child))
        elif "gradient" in child.notes:
            rows.append({"what": f"gradient of {child.site}", "range": str(child.notes["gradient"])})
            rows.extend(_read_forward(child))
    return rows


def _numbers(operation: Operation) -> dict[str, Any]:
    row: dict[str, Any] = {"site": operation.site, "call": operation.call}
    for name, words in (("result", ""), ("gradient", "gradient_")):
        found: Range | None = operation.notes.get(name)
        row[f"{words}amax"] = None if found is None else found.amax
        masks = found.minus if found is not None and name == "result" and operation.name in FILLS else 0
        row[f"{words}nonfinite"] = None if found is None else (found.nonfinite - masks) / max(found.count, 1)
    return row


def _chain(operation: Operation, loss: Operation | None) -> Rows:
    """The operations from one to the loss, through results that are not finite where there are any."""
    leads = set() if loss is None else loss.all_behind()
    rows, at = Rows(), operation
    while True:
        if at.computes or at is operation or at is loss:
            result, gradient = at.notes.get("result"), at.notes.get("gradient")
            rows.append({"site": at.site, "result": result, "gradient": gradient})
        further = [o for o in at.children if id(o) in leads]
        if at is loss or not further:
            return Rows({k: v if v is None or k == "site" else str(v) for k, v in row.items()} for row in rows)
        at = max(further, key=lambda o: bool(o.notes["result"].kinds))


class _Seen:
    """The visitor, and the observer of a quantised model: notes ranges, and where they stop being ones of numbers."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = {id(buffer): name for name, buffer in model.named_buffers()}
        self._outside: set[int] = set()  # the tensors from outside that were looked at
        self.events: list[tuple[dict[str, Any], Operation | None]] = []
        self.operations: list[Operation] = []
        self.gradients: list[Operation] = []
        self.limits: dict[str, float] = {}  # of the formats that gradients are rounded to, by site
        self.unrounded: dict[tuple[str, str], float] = {}  # the amax of gradients before they are rounded
        self._waiting: list[dict[str, Any]] = []  # of roundings of the operation that runs
        self._sites: list[str] = []
        self._by_site: dict[str, Operation] = {}

    def loss(self) -> Operation | None:
        """What the backward pass began at, or the last operation."""
        return next(iter(self.gradients), self.operations[-1] if self.operations else None)

    def forward(self, operation: Operation, operands: list[Tensor], result: Tensor) -> None:
        known = [None if source is None else source.notes.get("result") for source in operation.sources]
        ranges = [k or range_of(x) for k, x in zip(known, operands, strict=True)]
        operation.notes.update(operands=ranges, result=range_of(result))
        self.operations.append(operation)
        self._by_site.update(dict.fromkeys((operation.site, *self._sites), operation))
        operation.notes["names"] = [self._buffers.get(id(x), "(from outside)") for x in operands]
        if operation.name not in FILLS:
            for source, x, found in zip(operation.sources, operands, ranges, strict=True):
                self._note_outside(operation, source, x, found)
        rounded = {event["kind"] for event in self._waiting}
        for event in self._waiting:
            self.events.append(({**event, "call": operation.call}, operation))
        self._waiting, self._sites = [], []
        if operation.name not in FILLS and "inf" not in rounded:
            self._note(operation, "activation", operation.notes["result"], ranges)

    def _note_outside(self, operation: Operation, source: Operation | None, x: Tensor, found: Range) -> None:
        """Note what came in: NaN and inf; minus infinity in a parameter only, for elsewhere it may be a mask."""
        is_parameter = source is not None and source.name == "parameter"
        if not (source is None or is_parameter) or id(x) in self._outside:
            return
        self._outside.add(id(x))
        kinds = found.kinds if is_parameter else found.kinds - {"-inf"}
        name = self._buffers.get(id(x))
        site = source.site if source is not None else name or f"(from outside), read by {operation.site}"
        role = "parameter" if is_parameter else "input" if name is None else "buffer"
        counts = {"NaN": found.nan, "inf": found.plus, "-inf": found.minus}
        for kind in sorted(kinds, reverse=True):
            event = {"site": site, "call": 0, "role": role, "kind": kind}
            end = {"count": counts[kind], "of": found.count, "amax": found.amax, "largest": found.largest}
            self.events.append(({**event, **end}, operation))

    def afterwards(self, model: nn.Module) -> None:
        """Note what is not finite at the end of a step in which nothing else was found."""
        kept: list[tuple[str, str, Tensor]] = [(AFTER[0], n, p) for n, p in model.named_parameters()]
        kept += [(AFTER[2], n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
        kept += [(AFTER[1], n, b) for n, b in model.named_buffers() if b.is_floating_point()]
        for role, name, x in kept:
            found = range_of(x.coalesce().values() if x.layout is torch.sparse_coo else x)
            kind = "NaN" if found.nan else "inf" if found.plus else "-inf"
            if found.nan or found.plus or (found.minus and role != AFTER[1]):
                event = {"site": name, "call": 0, "role": role, "kind": kind, "count": found.nonfinite}
                end = {"of": found.count, "amax": found.amax, "largest": found.largest}
                self.events.append(({**event, **end}, None))

    def backward(self, operation: Operation, gradient: Tensor) -> None:
        role, found = "weight_grad" if operation.name == "parameter" else "error", range_of(gradient)
        operation.notes["gradient"] = found
        self.gradients.append(operation)
        after = [child.notes["gradient"] for child in operation.children if "gradient" in child.notes]
        while not operation.computes and len(operation.parents) == 1 and operation.parents[0].name != "parameter":
            operation = operation.parents[0]  # of a view: what gave the values is to be named
        if not any(event["site"] == operation.site and event["role"] == role for event, _ in self.events):
            self._note(operation, role, found, after)

    def _note(self, operation: Operation, role: str, found: Range, before: list[Range]) -> None:
        """Note what is not finite in a tensor, and is in none of those that it was computed from."""
        counts = {"NaN": found.nan, "inf": found.plus, "-inf": found.minus}
        for kind in sorted(found.kinds.difference(*(b.kinds for b in before)), reverse=True):
            event = {"site": operation.site, "call": operation.call, "role": role, "kind": kind}
            end = {"count": counts[kind], "of": found.count, "amax": found.amax, "largest": found.largest}
            self.events.append(({**event, **end}, operation))

    # As the observer of the emulation

    def wants(self, site: str, role: str) -> bool:
        return True

    def __call__(self, site: str, role: str, before: Tensor, after: Tensor, spec: Spec, cut: Cut | None = None) -> None:
        largest, count = overflow_of(before, after, spec)
        finite = before[before.isfinite()]
        amax = float(finite.abs().max()) if finite.numel() else 0.0
        if _is_backward(role):
            self.limits[site], self.unrounded[site, role] = largest, amax
        else:
            self._sites.append(site)
        if not count:
            return
        kind = "saturation" if bool(after.isfinite().all()) else ("NaN" if bool(after.isnan().any()) else "inf")
        event = {"site": site, "call": 0, "role": role, "kind": kind, "count": count, "of": before.numel()}
        event |= {"amax": amax, "largest": largest}
        if _is_backward(role):
            self.events.append((event, self._by_site.get(site)))
        else:
            self._waiting.append(event)


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


def _run(model: nn.Module, step: Callable[[], object]) -> _Seen:
    seen = _Seen(model)
    emulated = any(True for _ in emulated_forwards(model))
    registered = listeners(model) if emulated else []
    trace = Trace(model, seen, emulated, verb="diagnose")

    def run(undo: Undo) -> None:
        undo.by(trace.remove)
        trace.install_alone()
        if any(listener.observer is not None for listener in registered):
            raise ValueError("This model is being recorded. Leave the `with fpsim.record(...)` block first.")
        undo.by(partial(_observe, registered, None))
        _observe(registered, seen)
        _preserve(model, undo)
        trace.run(step)
        if not seen.events:
            seen.afterwards(model)

    undone(run)
    return seen


def _observe(registered: list[Listeners], observer: Observer | None) -> None:
    for listener in registered:
        listener.observer = observer


def _preserve(model: nn.Module, undo: Undo) -> None:
    """Put back parameters, buffers, gradients, delayed scaling and random numbers."""
    tensors = [*model.parameters(), *model.buffers()]
    values = [t.detach().clone() for t in tensors]
    gradients = [p.grad for p in model.parameters()]
    kept = [None if g is None else g.clone() for g in gradients]
    histories = [listener.histories for listener in listeners(model)] if any(emulated_forwards(model)) else []
    states = [h.state_dict() for h in histories]

    def put_back() -> None:
        for t, value in zip(tensors, values, strict=True):
            if not torch.equal(t, value):
                t.detach().copy_(value)
        for p, gradient, saved in zip(model.parameters(), gradients, kept, strict=True):
            if gradient is not None and saved is not None:
                gradient.detach().copy_(saved)
            p.grad = gradient
        for h, state in zip(histories, states, strict=True):
            h.load_state_dict(state)

    undo.by(put_back)
    keep_random_numbers(undo)


# The scale of a GradScaler


def _scales(
    model: nn.Module, step: Callable[[], object], scaler: torch.amp.GradScaler, state: dict[str, Any]
) -> tuple[tuple[float, float | None], Rows]:
    """The scale and the largest power of two that fits; and the largest that fits each gradient, the least first."""

    def at(log2_scale: int) -> _Seen:
        scaler.load_state_dict({**state, "scale": math.ldexp(1.0, log2_scale)})
        return _run(model, step)

    now = state["scale"]
    base = min(math.floor(math.log2(now)), MOST_SCALE)
    while (seen := at(base)) and _overflows(seen):
        if base <= LEAST_SCALE:
            return (now, None), Rows()
        base = max(base - 8, LEAST_SCALE)
    rows = Rows()
    for operation in seen.gradients:
        found = operation.notes["gradient"]
        role = "weight_grad" if operation.name == "parameter" else "error"
        amax = seen.unrounded.get((operation.site, role), found.amax)
        # under autocast a float32 gradient was one of the smaller dtype, in which the operation behind computes
        ends = [child.notes["result"].largest for child in operation.children]
        limit = min(seen.limits.get(operation.site, math.inf), found.largest, *ends)
        if amax and (operation.computes or role == "weight_grad"):
            fits = math.ldexp(1.0, base + math.floor(math.log2(limit / amax)))
            rows.append({"site": operation.site, "role": role, "amax": math.ldexp(amax, -base), "fits": fits})
    rows.sort(key=lambda row: row["fits"])
    if not rows:
        return (now, None), rows
    log2_scale = max(min(int(math.log2(rows[0]["fits"])), MOST_SCALE), base)
    while log2_scale > base and _overflows(at(log2_scale)):
        log2_scale -= 1
    while log2_scale < MOST_SCALE and not _overflows(at(log2_scale + 1)):
        log2_scale += 1
    return (now, math.ldexp(1.0, log2_scale)), rows


def _overflows(seen: _Seen) -> bool:
    """Whether any gradient is not finite."""
    return any(operation.notes["gradient"].kinds for operation in seen.gradients)
