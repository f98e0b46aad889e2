"""why(model, step): find the cause of a failing step in one command, with a remedy that was tried on it."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fpsim.border import require_memory
from fpsim.insight.reasons.event import Event
from fpsim.insight.reasons.finding import Finding, find
from fpsim.insight.reasons.timeline import numbers_row
from fpsim.insight.reasons.trials import Remedy
from fpsim.insight.rows import Rows
from fpsim.insight.stepping import as_step, nothing_ran
from fpsim.policies.policy import Policy
from fpsim.torch_modes import keeps_grad_mode

__all__ = ["Why", "why"]

LINES = 15
WIDTH = 200  # how many characters a line of operations has


class Why(Rows):
    """Causes of a failing step: a row for each finding, the cause first; see `why`.

    cause: the first row; None if nothing was found. It has a `stage`, `place`, `role` and `kind`.
    tried: rows of the remedies that were run on this step and worked, each with its loss.
    read: rows of the operands of the cause. chain: the sites from the cause to the loss.
    run: a row for each operation: the finite amax and the non-finite share of its result, and of the result's gradient.
    loss, float32: the loss of the step, and its loss in float32; None if the step was not run in float32.
    checked: the checks that were made, in words. runs: how often the step was run.
    """

    def __init__(self, finding: Finding) -> None:
        super().__init__(event.row() for event in finding.events)
        self._event = finding.events[0] if finding.events else None
        self._remedies: list[Remedy] = finding.remedies
        self.cause: dict[str, Any] | None = self[0] if self else None
        self.tried = Rows(remedy.row() for remedy in finding.remedies)
        self.read = Rows({"what": what, "range": text} for what, text in (self._event.read if self._event else ()))
        self.chain: list[str] = finding.chain
        self.run = Rows(numbers_row(operation) for operation in finding.operations if operation.computes)
        self.loss, self.float32, self.runs = finding.loss, finding.float32, finding.runs
        self._float32_bad = finding.float32_bad
        self.checked: list[str] = finding.checked
        self._calls, self._unfed = finding.calls, finding.unfed

    def policy(self) -> Policy:
        """Return the policy of the first remedy that is a policy. Raises ValueError without such a remedy."""
        for remedy in self._remedies:
            if remedy.policy is not None:
                return remedy.policy
        raise ValueError(
            "No remedy that was tried here is a policy. Expected: a quantised model for which float32 in some "
            "operations is enough; see `tried`."
        )

    def __str__(self) -> str:
        if self._event is None:
            return "\n".join(["Nothing was found that makes this step fail. What was checked:", *self.checked][:LINES])
        event = self._event
        lines = [self._headline(event), " ".join(event.why), self._remedy_line(event)]
        lines += [f"Read: {row['what']}: {row['range']}" for row in self.read[:4]]
        if self.chain:
            lines.append(f"To the loss: {_cut(self.chain)}")
        if self.loss is not None:
            words = f"loss {self.loss:.6g}"
            words += f", {self.float32:.6g} in float32" if self.float32 is not None else ""
            # A finite loss would suggest that float32 works, although a gradient or buffer in float32 is not finite.
            is_hidden = self.float32 is not None and math.isfinite(self.float32) and self._float32_bad
            lines.append(words + (f"; not finite there: {self._float32_bad[0]}" if is_hidden else ""))
        others = [f"{row['kind']} at {row['place']}" for row in self[1:4]]
        if others:
            lines.append(f"Also seen, later: {'; '.join(others)}")
        return "\n".join(lines[:LINES])

    __repr__ = __str__

    def _headline(self, event: Event) -> str:
        at = event.operation
        # "inf" and "-inf" keep their spelling; `capitalize` would also turn "NaN" into "Nan".
        words = event.kind if event.kind.startswith(("inf ", "-inf ")) else event.kind[0].upper() + event.kind[1:]
        line = f"{words} at {event.place}, {event.role}"
        if event.kind.endswith("came in"):
            line = f"{words} with {_article(event.role)} {event.role}: {event.place}"
        line += f", in {event.fmt}" if event.fmt else ""
        total = 1 if at is None else self._calls.get(at.site, 1)
        if at is not None and total > 1:
            line += f", call {at.call + 1} of {total}"
        # A module is usually called by the module around it, and its name begins with the caller's name. Any other
        # caller is printed.
        if at is not None and at.module and at.caller and not at.module.startswith(at.caller):
            line += f", called by {at.caller}"
        return line + (f", in batch {event.batch}" if event.batch is not None else "") + "."

    def _remedy_line(self, event: Event) -> str:
        if not self._remedies:
            return f"Do: {_advice(event, self.float32, self._float32_bad, self._unfed)}"
        first, *others = self._remedies
        line = f"Tried: {first.what}" + (
            f" -> loss {first.loss:.6g}" if first.loss is not None else " -> all is finite"
        )
        line += f" (float32 {self.float32:.6g})" if self.float32 is not None and first.loss is not None else ""
        line += f"; {first.detail}" if first.detail else ""
        for other in others:
            line += f". Also tried: {other.what}"
            line += f" -> loss {other.loss:.6g}" if other.loss is not None else ""
            line += f"; {other.detail}" if other.detail else ""
        if any(remedy.policy is not None for remedy in self._remedies):
            line += ". policy() has it"
        return line + "."

    def plot(self) -> Any:
        """Plot the amax of all results and gradients, with the cause labelled; needs matplotlib."""
        from fpsim.insight.pictures import plot_ranges

        event, cause = self._event, None
        if event is not None:
            at = event.operation
            site, call = (event.place, 0) if at is None else (at.site, at.call)
            largest = event.ends.largest if event.ends is not None else math.inf
            cause = {"site": site, "call": call, "kind": event.kind, "largest": largest}
        picture = plot_ranges(self.run, cause)
        picture.axes[0].set_title(str(self).splitlines()[0].replace("$", r"\$"), fontsize=9)
        return picture

    def _repr_png_(self) -> bytes | None:
        # Without matplotlib a notebook shows the text.
        try:
            return self.plot()._repr_png_()  # type: ignore[no-any-return]
        except ImportError:
            return None


def _article(role: str) -> str:
    return "an" if role[0] in "aeio" else "a"


def _cut(sites: list[str]) -> str:
    # Keep both ends of the chain: the operation that broke, and the loss.
    shown = sites if len(sites) <= 9 else [*sites[:5], "...", *sites[-3:]]
    line = " -> ".join(shown)
    return line if len(line) <= WIDTH else f"{line[: WIDTH // 2]} ... {line[-WIDTH // 2 :]}"


def _advice(event: Event, float32: float | None, float32_bad: list[str], unfed: list[str]) -> str:
    """Return advice if no remedy worked.

    unfed: the parameters that had no gradient under the change that made the step finite.
    """
    if event.kind == "division by zero" and event.remedy == "clamp":
        said = "Skip batches in which nothing is counted, or divide by max(count, 1)."
    else:
        said = _said(event, float32, float32_bad)
    if not unfed:
        return f"{said} (not tried)" if said else "no remedy that was tried is enough."
    names = ", ".join(unfed[:3]) + (f" and {len(unfed) - 3} more" if len(unfed) > 3 else "")
    return f"{said} Tried, does not help: what makes the step finite leaves no gradient for {names}.".lstrip()


def _said(event: Event, float32: float | None, float32_bad: list[str]) -> str:
    """Return advice for an event, or "". If float32 fails too, the advice says that no format is to blame."""
    is_bad = float32 is not None and (bool(float32_bad) or not math.isfinite(float32))
    blame = "No format is to blame: float32 gives NaN or inf too. " if is_bad else ""
    if is_bad and event.fmt in ("float16", "bfloat16"):
        blame = f"Operations in float32 give NaN or inf too, from the same {event.fmt} parameters and buffers. "
    if event.kind.endswith("came in"):
        if event.role == "input":
            return f"{blame}Look at how this batch is made, and drop or clean it."
        if event.role == "gradient":
            return "call optimizer.zero_grad() before the step."
        load = "load an earlier checkpoint; why() on the step before it tells which update wrote it."
        if event.fmt and not event.kind.startswith("NaN") and event.role in ("parameter", "buffer"):
            # An infinity that exists before the step was made by a cast, or by an update.
            cast, largest = {"float16": "half"}.get(event.fmt, event.fmt), torch.finfo(getattr(torch, event.fmt)).max
            made = f"{blame}A cast such as .{cast}() turns numbers beyond {largest:.6g} into inf: keep them in float32."
            return f"{made} If an update made it, {load}" if event.remedy == "update" else made
        return f"{blame}{load.capitalize()}"
    if event.kind == "integers lost":
        return "Keep ids and positions in integers, or in float32."
    if event.kind == "swamping":
        return "Add up in float32." if event.role != "gradient" else "Add the gradients up in float32."
    if event.remedy == "skip":
        return f"{blame}Skip batches without a target, or divide by max(count, 1)."
    if event.remedy == "target":
        return f"{blame}Do not mask targets, and do not smooth labels over masked classes."
    if event.remedy == "correction":
        return f"{blame}Use correction=0, or skip batches of one."
    if event.kind == "zero times infinity":
        return f"{blame}Use masked_fill or where instead of a product with a mask."
    if event.kind.startswith("rate is"):
        return "Look at what sets lr, such as a schedule of 0 steps."
    if event.stage == "buffers":
        return "Keep this module's buffers in float32."
    if event.kind == "logarithm of zero":
        return f"{blame}Compute the logarithm itself, as by log_softmax, logsigmoid or logsumexp."
    return blame.rstrip()


@keeps_grad_mode
def why(
    model: nn.Module,
    step: Any,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    batches: int | None = None,
    *,
    loss: Callable[[Any], Tensor] | None = None,
) -> Why:
    """Find the cause of a failing step: its place, role and kind, the numbers, and a remedy that was tried on it.

    The checks run in this order, and the first problem is reported: inputs, parameters, buffers, gradients and states
    of the optimizer before the step; each result of the forward pass; the loss; each gradient of the backward pass, and
    gradients that are completely lost; the gradients after accumulation; the optimizer's step, and the share of its
    updates that changed nothing; buffers after the step; finally, the step compared with float32.

    The step is run several times, and must be the same each time: `why` first runs it twice to check this. The model,
    the optimizer, the scaler and random numbers are restored afterwards. The model may be float32, half, bfloat16,
    under autocast or quantised.

    Args:
        model: the model of the step.
        step: a function without arguments that runs forward and backward, and may include the optimizer's step; or a
            batch. With a batch, the model's output has a `.loss`, or `loss` computes it.
        optimizer: the optimizer whose states are checked. If `step` does not call optimizer.step(), `why` calls it
            after `step`.
        scaler: the GradScaler that `step` uses.
        batches: the number of batches; `step(i)` is then called for each i below this number.
        loss: a function from the model's output to a scalar, for a batch.

    Returns:
        A `Why`, which prints at most fifteen lines. It has rows, `to_frame()`, `plot()`, and `policy()` if a remedy is
        a policy.

    Raises:
        TypeError: for a model, step or optimizer of another kind.
        ValueError: for a step whose loss differs the second time, a step in which no operation was seen, and a model
            that is being recorded.
        Exception: the step's own error, if nothing became inf or NaN before it.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    >>> with torch.no_grad():
    ...     _ = model[1].weight.fill_(torch.nan)
    >>> reason = why(model, lambda: model(torch.ones(1, 2)).sum().backward())
    >>> reason.cause["place"], reason.cause["role"], reason.cause["kind"]
    ('1.weight', 'parameter', 'NaN came in')
    """
    _require(model, optimizer, batches)
    # Any object with these methods is accepted, because other libraries have scalers of their own.
    if scaler is not None and not all(callable(getattr(scaler, name, None)) for name in ("scale", "step", "update")):
        raise TypeError(f"Got {type(scaler).__name__} as the scaler. Expected a GradScaler that `step` uses, or None.")
    run = as_step(model, step, loss, "why", 0 if batches is None else 1)
    finding = find(model, run, optimizer, scaler, batches)
    if not finding.operations and not finding.events:
        raise nothing_ran(model, "why")
    return Why(finding)


def _require(model: object, optimizer: object, batches: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"Got {type(model).__name__} as the model. Expected a torch.nn.Module: why(model, step).")
    require_memory(model)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"Got {type(optimizer).__name__} as the optimizer. Expected a torch.optim.Optimizer, or None.")
    if batches is not None and (not isinstance(batches, int) or isinstance(batches, bool) or batches < 1):
        raise ValueError(
            f"Got batches={reprlib.repr(batches)}. Expected 1 or more; omit it for a step without arguments."
        )
