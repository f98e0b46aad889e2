"""Run one step again and again, with a change or in more bits, and decide whether the change is a remedy."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fpsim.border import require_result
from fpsim.emulation.calls import Call
from fpsim.emulation.tracing import BACKWARD, Edit, Operation
from fpsim.insight.masks import is_mask_like
from fpsim.insight.ranges import glance
from fpsim.insight.reasons.against import Keeping, around, error_event, lost_gradient, ratio, relative_errors, shortened
from fpsim.insight.reasons.event import Event
from fpsim.insight.reasons.timeline import Timeline, entrances
from fpsim.insight.reasons.widening import LOW, Widening
from fpsim.insight.stepping import Kept, traced
from fpsim.models.installed import emulated_forwards
from fpsim.models.quantize import install_policies, policies_of
from fpsim.policies.policy import Policy
from fpsim.tensors.noise import keep_random_numbers, noise_state, replayed_noise
from fpsim.torch_modes import hook_steps, push_mode, take_off, unhook_call, unhook_steps, without_torch_function
from fpsim.undoing import Undo, undone

__all__ = ["EPS", "NEARER", "Attempts", "Change", "Outcome", "Reference", "Remedy", "Trials"]


@dataclass(frozen=True)
class Change:
    """The changes that are tried in a run.

    edit: a function that changes calls of torch. policies: {name: policy} for modules of a quantised model.
    loss_scale: the gradient with which backward passes begin at the loss. options: new options of parameter groups.
    rate: a factor for their learning rates. clear: whether gradients are cleared first.
    """

    edit: Edit | None = None
    policies: Mapping[str, Policy] = field(default_factory=dict)
    loss_scale: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    rate: float = 1.0
    clear: bool = False


@dataclass
class Outcome:
    """Outcome of a run: the losses of its backward passes, and the names of tensors that are not finite at its end.

    gradients: {name: gradient} of parameters, as an optimizer first read them, or at the end; empty if not kept.
    """

    losses: list[float]
    returned: float | None
    bad: list[str]
    gradients: dict[str, Tensor] = field(default_factory=dict)

    @property
    def loss(self) -> float | None:
        if self.returned is not None:
            return self.returned
        return sum(self.losses) / len(self.losses) if self.losses else None

    @property
    def is_finite(self) -> bool:
        return not self.bad and (self.loss is None or math.isfinite(self.loss))


class Trials:
    """A step that can be run again; see `why` for the arguments. runs: how often it has run."""

    def __init__(
        self, model: nn.Module, step: Callable[..., object], optimizer: Any, scaler: Any, batches: int | None
    ) -> None:
        self.model, self.step, self.scaler, self.batches = model, step, scaler, batches
        self.optimizer, self.runs = optimizer, 0
        self.emulated = any(emulated_forwards(model))
        self.kept = Kept(model, optimizer, scaler)
        self.policies = policies_of(model) if self.emulated else {}
        self._has_changed = False
        self.returns_loss = False  # whether the step is known to return the loss of its backward pass
        self.unread: set[str] = set()  # parameters and buffers that are not finite, and that the step does not read
        self._own = {id(p) for p in model.parameters()}

    def run(
        self,
        change: Change | None = None,
        visitor: Timeline | None = None,
        before_update: Callable[[Any], None] | None = None,
        after_update: Callable[[Any], None] | None = None,
        at_end: Callable[[], None] | None = None,
        until_broken: bool = False,
        keeps_gradients: bool = False,
    ) -> Outcome:
        """Run the step and the optimizer's step, and restore everything.

        before_update, after_update: called before and after each step of an optimizer. at_end: called before restoring.
        until_broken: whether to raise FloatingPointError if a backward pass would begin at a loss that is not finite.
        """
        change = change or Change()
        self.runs += 1
        watched = _Backward(change.loss_scale, until_broken)
        gradients: dict[str, Tensor] = {}

        def keep(optimizer: Any = None) -> None:
            # An optimizer becomes known at its first step: its state is kept from here on.
            if optimizer is not None:
                self.kept.before_step(optimizer)
            for name, p in self.model.named_parameters() if keeps_gradients else ():
                if p.grad is not None and name not in gradients:
                    gradients[name] = p.grad.detach().to_dense() if p.grad.is_sparse else p.grad.detach().clone()
            if optimizer is not None and before_update is not None:
                before_update(optimizer)

        steps = _Steps(self._own, visitor, keep, after_update)
        # The mode is slow: torch calls it for each property of a tensor that the emulation reads.
        is_watched = change.loss_scale != 1 or not (self.emulated and self.returns_loss)

        def edit(index: int, kind: Call, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            # An optimizer's own calls are not edited: its states have the dtypes of its parameters.
            if change.edit is None or (steps.is_running and not torch.is_grad_enabled()):
                return func(*args, **kwargs)
            return change.edit(index, kind, func, args, kwargs)

        def start(undo: Undo) -> tuple[float | None, list[str]]:
            undo.by(self.kept.restore)
            keep_random_numbers(undo)
            undo.by(partial(self._policies, self.policies))
            undo.by(steps.end)
            self._change(change)
            steps.begin()
            run = partial(self._step, visitor, steps)
            if visitor is not None or change.edit is not None:
                trace = traced(self.model, visitor or _Nobody(), "why", undo, None if change.edit is None else edit)
                trace.on_backward = watched.begin
                run = partial(trace.run, run)
            elif is_watched:
                undo.by(watched.end)
                push_mode(watched)
            if visitor is not None:
                for name, part in entrances(self.model):
                    hook = partial(visitor.entered, name)
                    undo.by(partial(unhook_call, part, hook))
                    part.register_forward_pre_hook(hook, with_kwargs=True)
            returned = run()
            with without_torch_function():
                keep()
                bad = self._nonfinite()
                if at_end is not None:
                    at_end()
            return returned, bad

        with replayed_noise(noise_state()):
            returned, bad = undone(start)
        # Backward passes begin at losses that a GradScaler has multiplied.
        scale = float(self.scaler.get_scale()) if self.scaler is not None and hasattr(self.scaler, "get_scale") else 1.0
        return Outcome([value / scale for value in watched.losses], returned, bad, gradients)

    def _step(self, visitor: Timeline | None, steps: _Steps) -> float | None:
        """Run the step for each batch, then the optimizer's step; return the mean of the numbers the step returned."""
        returned: list[float] = []
        for i in range(self.batches or 1):
            if visitor is not None:
                visitor.batch = i if self.batches is not None else None
            out = self.step() if self.batches is None else self.step(i)
            if isinstance(out, Tensor):
                with without_torch_function():
                    if out.numel() == 1:
                        returned.append(float(out.detach()))
            elif isinstance(out, int | float) and not isinstance(out, bool):
                returned.append(float(out))
        # The optimizer steps here only if the step has not called it.
        if self.optimizer is not None and not steps.count:
            if self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
        return sum(returned) / len(returned) if returned else None

    def _nonfinite(self) -> list[str]:
        """Name the gradients, parameters and buffers that are not finite."""
        names = []
        for kind, tensors in (("parameter", self.model.named_parameters()), ("buffer", self.model.named_buffers())):
            for name, x in tensors:
                if kind == "parameter" and x.grad is not None and not _is_finite(x.grad):
                    names.append(f"gradient {name}")
                if name in self.unread or not x.is_floating_point():
                    continue
                if not _is_finite(x) and not (kind == "buffer" and is_mask_like(x)):
                    names.append(f"{kind} {name}")
        return names

    def _change(self, change: Change) -> None:
        if change.clear:
            for parameter in self.model.parameters():
                parameter.grad = None
        for optimizer in self.kept.optimizers:
            for group in optimizer.param_groups:
                group.update({k: v for k, v in change.options.items() if k in group})
                if change.rate != 1:
                    group["lr"] = group["lr"] * change.rate
        self._policies(change.policies)

    def _policies(self, policies: Mapping[str, Policy]) -> None:
        # Most runs change no policy, and the model's own policies are already installed.
        if policies and (policies is not self.policies or self._has_changed):
            self._has_changed = policies is not self.policies
            install_policies(self.model, policies)


def _is_finite(x: Tensor) -> bool:
    values = x.coalesce().values() if x.layout is torch.sparse_coo else x
    return bool(values.isfinite().all())


class _Nobody:
    """Visitor that ignores all operations."""

    def forward(self, operation: Operation, operands: list[Tensor], result: Tensor) -> None: ...

    def backward(self, operation: Operation, gradient: Tensor) -> None: ...


class _Backward(TorchFunctionMode):
    """Mode that notes the losses at which backward passes begin, and changes the gradients with which they begin."""

    def __init__(self, loss_scale: float, until_broken: bool) -> None:
        super().__init__()
        self.loss_scale, self.until_broken, self.has_ended = loss_scale, until_broken, False
        self.losses: list[float] = []

    def end(self) -> None:
        self.has_ended = True
        take_off(self)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return func(*args, **kwargs) if self.has_ended or func not in BACKWARD else self.begin(func, args, kwargs)

    def begin(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin a backward pass."""
        if isinstance(args[0], Tensor) and args[0].numel() == 1:
            root = args[0].detach()
            require_result(root, "The loss", "why")
            self.losses.append(float(root))
            if self.until_broken and not math.isfinite(self.losses[-1]):
                raise FloatingPointError(f"The loss is {self.losses[-1]}.")
            name = "gradient" if func is Tensor.backward else "grad_tensors"
            given = args[1] if len(args) > 1 else kwargs.get(name)
            if self.loss_scale != 1 and given is None:
                kwargs, args = {**kwargs, name: torch.full_like(root, self.loss_scale)}, args[:1]
        return func(*args, **kwargs)


class _Steps:
    """Hooks around the steps of a model's optimizers. count: the number of steps so far."""

    def __init__(self, own: set[int], visitor: Timeline | None, before: Any, after: Any) -> None:
        self.own, self.visitor, self.before, self.after = own, visitor, before, after
        self.count, self.is_running = 0, False

    def begin(self) -> None:
        hook_steps(None, self._pre, self._post)

    def end(self) -> None:
        unhook_steps(None, self._pre, self._post)

    def _is_own(self, optimizer: Any) -> bool:
        return any(id(p) in self.own for group in optimizer.param_groups for p in group["params"])

    def _pre(self, optimizer: Any, *_: Any) -> None:
        if self._is_own(optimizer):
            self.count += 1
            self._tell(True)
            with without_torch_function():
                self.before(optimizer)

    def _post(self, optimizer: Any, *_: Any) -> None:
        if self._is_own(optimizer):
            self._tell(False)
            if self.after is not None:
                with without_torch_function():
                    self.after(optimizer)

    def _tell(self, is_running: bool) -> None:
        self.is_running = is_running
        if self.visitor is not None:
            self.visitor.is_in_optimizer = is_running


# Trials, and the test for a remedy

NEARER = 4.0  # the factor by which a remedy brings a step nearer to the reference
FAR = 0.5  # a gradient with at least this relative error is far from the reference's
ULPS, LEAST_NEAR, MOST_NEAR = 4, 0.01, 0.1  # bounds of the errors that always count as near: rounding makes them
LEAST_LOSS = 1e-6  # a smaller loss is the remainder of a sum that cancels
MOST = 28  # the most runs of the step; the last run verifies the finding
EPS = (1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)


@dataclass
class Remedy:
    """A change that was tried, and worked.

    what: the change in words. name: "eps", "scale", "format", "float32", "float64", "clamp", "divisor", "fill", "mask",
        "infinity", "slope", "sum", "master", "stochastic", "clear", "rate" or "optimizer eps".
    value: the number that was chosen. sites: the sites of the operations that ran in float32.
    loss: the loss of the step under the change. policy: the remedy as a policy, if it is one of a quantised model.
    """

    what: str
    name: str
    value: float | None = None
    sites: list[str] = field(default_factory=list)
    loss: float | None = None
    policy: Policy | None = None
    detail: str = ""

    def row(self) -> dict[str, Any]:
        return {"remedy": self.name, "what": self.what, "value": self.value, "sites": self.sites, "loss": self.loss}


class Reference:
    """The same step in float32, run on demand; in float64 if float32 is not finite, or if the step is in float32.

    is_wanted: whether the step computes in fewer bits than float32.
    """

    def __init__(self, trials: Trials, seen: Timeline) -> None:
        self.trials, self.given = trials, {o.index: (o.name, o.notes["dtype"]) for o in seen.operations}
        self._has_low = any(dtype in LOW for _, dtype in self.given.values())
        self.is_wanted = trials.emulated or self._has_low
        self._seen: Keeping | None = None
        self._wide: dict[str, Tensor] = {}
        self._outcome: Outcome | None = None
        self._truth: Outcome | None = None
        self.dtype: torch.dtype | None = None  # the dtype of `truth`
        self._is_known = False  # whether `truth` was computed; it may be None after that too

    def _run(self, visitor: Keeping | None = None, dtype: torch.dtype = torch.float32) -> Outcome:
        """Run the step in more bits. No cast rounds its gradients; they have the scale of the step's gradients."""
        policies = dict.fromkeys(self.trials.policies, Policy()) if self.trials.emulated else {}
        # A policy alone does not undo the casts to low dtypes in the model's own code.
        is_own = self.trials.emulated and dtype is torch.float32 and not self._has_low
        edit = None if is_own else Widening(None, dtype, self.given)
        outcome = self.trials.run(Change(edit=edit, policies=policies), visitor, keeps_gradients=True)
        if edit is not None:
            names = {id(p): name for name, p in self.trials.model.named_parameters()}
            wide = {names[key]: g for key, g in edit.gradients.items() if key in names}
            by = ratio(outcome.gradients, wide)
            outcome.gradients.update((name, by * g) for name, g in wide.items())
            self._wide = wide if dtype is torch.float32 else self._wide
        return outcome

    @property
    def seen(self) -> Keeping:
        if self._seen is None:
            self._seen = Keeping(self.trials.model)
            self._outcome = self._run(self._seen)
            # Only this run shows whether the model's own code casts to low dtypes. If it does, the step is run again
            # without these casts.
            if self.trials.emulated and not self._has_low:
                self._has_low = any(o.notes["dtype"] in LOW for o in self._seen.operations)
                self._seen = None if self._has_low else self._seen
                return self.seen
        return self._seen

    @property
    def outcome(self) -> Outcome:
        """Outcome in float32."""
        if self._outcome is None:
            self._outcome = self._run()
        return self._outcome

    @property
    def truth(self) -> Outcome | None:
        """The reference for remedies; None if float64 is not finite either, or torch refuses it."""
        if not self._is_known:
            self._is_known = True
            for dtype in (torch.float32, torch.float64) if self.is_wanted else (torch.float64,):
                with suppress(Exception):  # torch refuses some mixtures of dtypes
                    outcome = self.outcome if dtype is torch.float32 else self._run(dtype=dtype)
                    if outcome.is_finite and (outcome.gradients or outcome.loss is not None):
                        self._truth, self.dtype = outcome, dtype
                        break
        return self._truth

    def tell(self, result: Any) -> None:
        """Put the loss of the step in float32 into the result, unless the step is in float32 already."""
        if self.is_wanted:
            with suppress(Exception):  # as above; the loss in float32 then stays unknown
                result.float32, result.float32_bad = self.outcome.loss, self.outcome.bad

    def breaks_too(self, event: Event) -> bool:
        """True if the result of an event's operation, or a gradient there, is not finite in float32 either."""
        at = event.operation
        same = None if at is None else self.seen.by_key.get((at.site, at.call, event.batch or 0))
        if same is None or event.stage == "forward":
            return same is not None and bool(same.notes["result"].kinds)
        return any(o.notes.get("had_bad_gradient") for o in around(same))

    def far(self, outcome: Outcome) -> set[str]:
        """Return the names of parameters whose gradient in the outcome is FAR from float32's."""
        errors = relative_errors(outcome.gradients, self.outcome.gradients, 1.0)
        return {name for name, error in errors.items() if error >= FAR}

    def lost(self, seen: Keeping, outcome: Outcome) -> Event | None:
        """Return the event of the first gradient that a run has lost, but float32 has not."""
        # `self.seen` is read first, because its run fills `_wide`.
        numbers = self.seen, {name: glance(g) for name, g in self._wide.items()}
        return lost_gradient(seen, *numbers, shortened(outcome.gradients, self.outcome.gradients))


class _Unbroken(Keeping):
    """Visitor that ends a run at the first new event, because observing a whole step takes ten times as long."""

    def __init__(self, model: nn.Module, known: Collection[tuple[str, str]], results: bool) -> None:
        super().__init__(model, results)
        self._known = known

    def _add(self, event: Event) -> None:
        if (event.place, event.kind) not in self._known:
            raise _StillThereError(event.kind)


class _StillThereError(Exception):
    """Raised if something breaks under the change that is tried."""


class Attempts:
    """Trials of changes, and the test for a remedy.

    A change is a remedy if the event is absent in the step under the change, and the step passes these tests. Errors
    are relative to the reference.

    - Each parameter that has a gradient in the reference has a gradient.
    - Each gradient whose error was FAR or more has an error that is smaller by the factor NEARER, or as small as
      rounding makes it. No other gradient has an error above FAR. If no error was FAR or more, the mean of all errors
      is smaller by NEARER. If the step was not finite before, each error is at most 1 - 1 / NEARER instead.
    - The error of the loss is at most 1 / NEARER of the larger of two errors before: of the loss, and of the gradients.
    - Without a reference, the loss and all gradients are finite, and no gradient has become zero. Zeros are accepted if
      the event's place passes on a gradient: they are due to the batch.

    is_visible: whether inf or NaN at the end of the step shows the event.
    has_one: whether a remedy is known already. Then another one is not worth many runs.
    wide: the dtype of the reference; None without one.
    is_looking: whether the operations of each trial are observed; else only the state at its end.
    unfed: the parameters without a gradient under the first change that would otherwise have been a remedy.
    was_finite, distance: whether the last run was finite, and its distance from the reference, at most 1.
    """

    def __init__(self, trials: Trials, event: Event, was: Outcome, seen: Timeline, reference: Reference) -> None:
        self.trials, self.event, self.is_visible, self.reference = trials, event, not was.is_finite, reference
        self.was, self.has_one, self.is_looking = was, False, False
        self.was_finite, self.distance = True, 1.0
        self.unfed: list[str] = []
        # If a result is in float32 now, its reader rounds it, and may saturate. That is not a remedy.
        self._saturations = {(e.place, e.role) for e in seen.saturations} - {(event.place, event.role)}
        following = {} if event.operation is None else event.operation.all_ahead()
        # Events that do not follow from this one, such as an infinity without effect, may stay.
        others = [e for e in seen.events if e.operation is not None and id(e.operation) not in following]
        self._known = {(e.place, e.kind) for e in others} - {(event.place, event.kind)}
        truth = reference.truth
        self.wide = reference.dtype
        ulp = 0.0 if event.ends is None else event.ends.epsilon
        self._near = near = min(max(ULPS * ulp, LEAST_NEAR), MOST_NEAR)
        self._errors = {} if truth is None else relative_errors(was.gradients, truth.gradients, 1.0)
        # The largest error that each gradient may have. Rounding may move the gradients that were near.
        self._most = {n: FAR if e < FAR else max(e / NEARER, near) for n, e in self._errors.items()}

    def works(self, change: Change, looks: bool = True) -> Outcome | None:
        """Return the outcome of a run under the change; None if it does not help.

        looks: whether to observe the operations too, if the end of the step does not show the event.
        """
        if self.trials.runs >= MOST:
            return None
        # A run with its operations observed takes as long as ten other runs.
        outcome = self._ends_well(change)
        # Without a reference, it may be right that a parameter has no gradient. Only an observed run shows that.
        if outcome is None and self.reference.truth is None and self.was_finite:
            return self.looks_well(change)
        if outcome is None or not (self.is_looking or (looks and (change.policies or not self.is_visible))):
            return outcome
        return self.looks_well(change)

    def is_finite(self, change: Change) -> bool:
        """True if a run under the change ends without inf and NaN."""
        return (outcome := self._run(change)) is not None and outcome.is_finite

    def _run(self, change: Change, visitor: Timeline | None = None) -> Outcome | None:
        # torch may refuse a step in other dtypes, and the visitor ends a run in which something breaks.
        try:
            return self.trials.run(change, visitor, until_broken=visitor is None, keeps_gradients=True)
        except Exception:
            return None

    def _ends_well(self, change: Change) -> Outcome | None:
        """Return the outcome of a run under the change, judged by its end; None if it fails or is no remedy."""
        outcome = self._run(change)
        self.was_finite = outcome is not None and outcome.is_finite
        if outcome is None or not self.was_finite or not self._is_nearer(outcome, change.loss_scale):
            return None
        return None if _moves_only(change) else outcome

    def _is_nearer(self, outcome: Outcome, loss_scale: float, seen: Keeping | None = None) -> bool:
        truth, was = self.reference.truth, self.was
        if truth is None:
            return self._goes_on(seen) or self._feeds(outcome, [n for n, g in was.gradients.items() if bool(g.any())])
        # A step that clips its gradients, or divides them by a scale of its own, undoes the loss scale.
        factors = (loss_scale, 1.0) if loss_scale != 1 else (1.0,)
        errors = [relative_errors(outcome.gradients, truth.gradients, by) for by in factors]
        (loss, gradients), now = min(((self._distances(outcome, e), e) for e in errors), key=lambda pair: max(pair[0]))
        before = self._distances(was, self._errors)
        self.distance, limit = max(loss, gradients), max(before) / NEARER
        # A step that was not finite had no distance to compare with, and a change such as another eps changes slopes.
        most = max(before[1] / NEARER, self._near) if was.is_finite else 1 - 1 / NEARER
        is_near = gradients <= most and all(now[n] <= (m if was.is_finite else most) for n, m in self._most.items())
        return is_near and loss <= max(limit, self._near) and self._feeds(outcome, self._errors)

    def _goes_on(self, seen: Keeping | None) -> bool:
        """True if a gradient that arrived at the place of the event was passed on by it."""
        at = self.event.operation
        same = None if seen is None or at is None else seen.by_key.get((at.site, at.call, self.event.batch or 0))
        if same is None or not (arrived := same.notes.get("gradient")) or not arrived.nonzero:
            return False
        return any(p.notes["gradient"].nonzero for p in same.parents if "gradient" in p.notes)

    def _feeds(self, outcome: Outcome, names: Iterable[str]) -> bool:
        """True if each of these parameters has a gradient."""
        unfed = [n for n in names if n in outcome.gradients and not bool(outcome.gradients[n].any())]
        self.unfed = self.unfed or unfed
        return not unfed

    def _distances(self, outcome: Outcome, errors: Mapping[str, float]) -> tuple[float, float]:
        """Return a run's distances from the reference, at most 1: of its loss, and of the gradients that were far."""
        truth = self.reference.truth
        assert truth is not None
        # If no gradient was far, the mean of the errors counts, because rounding may change any of them.
        far = [errors.get(name, 1.0) for name, error in self._errors.items() if error >= FAR]
        of_gradients = max(far) if far else sum(errors.values()) / max(len(errors), 1)
        of_loss = 0.0
        if truth.loss is not None and outcome.loss is not None:
            of_loss = abs(outcome.loss - truth.loss) / max(abs(truth.loss), LEAST_LOSS)
        # A NaN differs from itself; min(NaN, 1.0) would be NaN.
        return min(of_loss, 1.0) if of_loss == of_loss else 1.0, of_gradients

    def _is_held(self, seen: Timeline) -> bool:
        """True if at least half of the lost gradient's numbers are not zero now."""
        event, at = self.event, self.event.operation
        is_parameter = event.role == "weight_grad" or at is None
        place = (event.place, 0) if is_parameter or at is None else (at.site, at.call)
        same = (o for o in seen.gradients if (o.site, o.call) == place)
        return any(o.notes["gradient"].nonzero >= 0.5 * event.of for o in same)

    def lost_shares(self, outcome: Outcome) -> str:
        """Describe which share of the reference gradients' non-zero numbers was lost before, and is lost now."""
        truth = self.reference.truth
        if truth is None:
            return ""
        of = {name: int(g.count_nonzero()) for name, g in truth.gradients.items() if name in self._errors}
        shares = []
        for run in (self.was, outcome):
            left = {n: int(g.count_nonzero()) for n, g in run.gradients.items() if n in of}
            shares.append(1 - sum(min(left.get(n, 0), of[n]) for n in of) / max(sum(of.values()), 1))
        return f"{100 * shares[0]:.3g} % of the gradients of parameters were lost, and {100 * shares[1]:.3g} % are now"

    def looks_well(self, change: Change) -> Outcome | None:
        """Return the outcome if the changed step works without a new inf, NaN, leak or saturation; else None."""
        is_compared = self.event.stage == "float32"
        seen = _Unbroken(self.trials.model, self._known, is_compared)
        outcome = self._run(change, seen)
        if outcome is None or not outcome.is_finite or not self._is_nearer(outcome, change.loss_scale, seen):
            return None
        breaks = any((e.place, e.kind) not in self._known for e in seen.events)
        if breaks or _moves_only(change) or any((e.place, e.role) not in self._saturations for e in seen.saturations):
            return None
        if self.event.kind == "gradient lost" and (not self._is_held(seen) or self.reference.lost(seen, outcome)):
            return None
        if is_compared:
            left, _ = error_event(seen, self.reference.seen, self.reference.far(outcome))
            places = self.event.place, *(o.site for o in self.event.stretch)
            return outcome if left is None or left.kind != self.event.kind or left.place not in places else None
        return outcome


def _moves_only(change: Change) -> bool:
    """True if the overflow has only moved to the place where a float32 result is read in its former dtype."""
    return isinstance(change.edit, Widening) and change.edit.overflows
