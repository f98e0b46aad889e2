"""Running one step again and again: with or without a change, and put back afterwards; and whether a change works."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fpsim.border import require_result
from fpsim.emulation.arguments import tensors_in
from fpsim.emulation.calls import Call
from fpsim.emulation.tracing import BACKWARD, Edit, Operation
from fpsim.insight.masks import is_mask_like
from fpsim.insight.reasons.event import Event
from fpsim.insight.reasons.timeline import Timeline
from fpsim.insight.reasons.widening import Widening
from fpsim.insight.stepping import Kept, traced
from fpsim.models.installed import emulated_forwards
from fpsim.models.quantize import install_policies, policies_of
from fpsim.policies.policy import Policy
from fpsim.tensors.noise import keep_random_numbers, noise_state, replayed_noise
from fpsim.torch_modes import hook_steps, push_mode, take_off, unhook_call, unhook_steps, without_torch_function
from fpsim.undoing import Undo, undone

__all__ = ["EPS", "Attempts", "Change", "Outcome", "Remedy", "Trials", "descendants"]


@dataclass(frozen=True)
class Change:
    """What is tried in a run.

    edit: changes calls of torch functions. policies: of modules of a quantised model, by name.
    loss_scale: what the gradient of the loss begins with. options: of the optimizers' groups.
    clear: whether gradients are forgotten first.
    """

    edit: Edit | None = None
    policies: Mapping[str, Policy] = field(default_factory=dict)
    loss_scale: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    rate: float = 1.0
    clear: bool = False


@dataclass
class Outcome:
    """What a run gave: the losses of its backward passes, and the names of what is not finite at its end."""

    losses: list[float]
    returned: float | None
    bad: list[str]

    @property
    def loss(self) -> float | None:
        if self.returned is not None:
            return self.returned
        return sum(self.losses) / len(self.losses) if self.losses else None

    @property
    def is_finite(self) -> bool:
        return not self.bad and (self.loss is None or math.isfinite(self.loss))


class Trials:
    """A step that can be run again; see `why` for the arguments. runs: how often it was."""

    def __init__(
        self, model: nn.Module, step: Callable[..., object], optimizer: Any, scaler: Any, batches: int | None
    ) -> None:
        self.model, self.step, self.scaler, self.batches = model, step, scaler, batches
        self.optimizer, self.runs = optimizer, 0
        self.emulated = any(True for _ in emulated_forwards(model))
        self.kept = Kept(model, optimizer, scaler)
        self.policies = policies_of(model) if self.emulated else {}
        self._has_changed = False
        self.returns_loss = False  # whether it is known to return what its backward pass begins at
        self.unread: set[str] = set()  # parameters and buffers that the step does not read, and that hold no numbers
        self._own = {id(p) for p in model.parameters()}

    def run(
        self,
        change: Change | None = None,
        visitor: Any = None,
        before_update: Callable[[Any], None] | None = None,
        after_update: Callable[[Any], None] | None = None,
        at_end: Callable[[], None] | None = None,
        until_broken: bool = False,
    ) -> Outcome:
        """Run the step, with the optimizer's, and put all back.

        before_update, after_update: called around each step of an optimizer. at_end: before anything is put back.
        until_broken: raises FloatingPointError where a backward pass would begin at a loss that is not finite.
        """
        change = change or Change()
        self.runs += 1
        watched = _Backward(change.loss_scale, until_broken)
        steps = _Steps(self._own, visitor, self.kept.know, before_update, after_update)
        # The mode is asked about each property that the emulation reads of a tensor: no run has it that can do without.
        is_watched = change.loss_scale != 1 or not (self.emulated and self.returns_loss)

        def edit(
            index: int, kind: Call, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            if change.edit is None or (steps.is_running and not torch.is_grad_enabled()):
                return func(*args, **kwargs)  # an optimizer's own: its states have the dtypes of its parameters
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
            if isinstance(visitor, Timeline):
                hook = visitor_inputs(visitor)
                undo.by(partial(unhook_call, self.model, hook))
                self.model.register_forward_pre_hook(hook, with_kwargs=True)
            returned = run()
            with without_torch_function():
                bad = self._nonfinite()
                if at_end is not None:
                    at_end()
            return returned, bad

        with replayed_noise(noise_state()):
            returned, bad = undone(start)
        scale = float(self.scaler.get_scale()) if self.scaler is not None and hasattr(self.scaler, "get_scale") else 1.0
        return Outcome([value / scale for value in watched.losses], returned, bad)

    def _step(self, visitor: Any, steps: _Steps) -> float | None:
        returned: list[float] = []
        for i in range(self.batches or 1):
            if visitor is not None and hasattr(visitor, "batch"):
                visitor.batch = i if self.batches is not None else None
            out = self.step() if self.batches is None else self.step(i)
            if isinstance(out, Tensor):
                with without_torch_function():
                    if out.numel() == 1:
                        returned.append(float(out.detach()))
            elif isinstance(out, int | float) and not isinstance(out, bool):
                returned.append(float(out))
        if self.optimizer is not None and not steps.count:
            if self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
        return sum(returned) / len(returned) if returned else None

    def _nonfinite(self) -> list[str]:
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
        if policies and (policies is not self.policies or self._has_changed):
            self._has_changed = policies is not self.policies
            install_policies(self.model, policies)


def visitor_inputs(visitor: Timeline) -> Callable[..., None]:
    """A hook that tells a timeline the names of the model's inputs."""

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        code = getattr(module.forward, "__code__", None)
        names = list(code.co_varnames[1 : code.co_argcount]) if code is not None else []
        for i, value in enumerate(args):
            for x in tensors_in(value):
                visitor.inputs.setdefault(id(x), names[i] if i < len(names) else f"input {i + 1}")
        for name, value in kwargs.items():
            for x in tensors_in(value):
                visitor.inputs.setdefault(id(x), name)

    return note


def _is_finite(x: Tensor) -> bool:
    values = x.coalesce().values() if x.layout is torch.sparse_coo else x
    return bool(values.isfinite().all())


class _Nobody:
    """A visitor that looks at nothing."""

    def forward(self, operation: Operation, operands: list[Tensor], result: Tensor) -> None: ...

    def backward(self, operation: Operation, gradient: Tensor) -> None: ...


class _Backward(TorchFunctionMode):
    """Reads what backward passes begin at, and begins them with another gradient."""

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
    """Sees the steps of the optimizers of a model."""

    def __init__(self, own: set[int], visitor: Any, know: Any, before: Any, after: Any) -> None:
        self.own, self.visitor, self.before, self.after, self.count = own, visitor, before, after, 0
        self._know = know
        self.is_running = False

    def begin(self) -> None:
        hook_steps(None, self._pre, self._post)

    def end(self) -> None:
        unhook_steps(None, self._pre, self._post)

    def _is_own(self, optimizer: Any) -> bool:
        return any(id(p) in self.own for group in optimizer.param_groups for p in group["params"])

    def _pre(self, optimizer: Any, *_: Any) -> None:
        if self._is_own(optimizer):
            self.count += 1
            self.is_running = True
            self._know(optimizer)
            if hasattr(self.visitor, "is_in_optimizer"):
                self.visitor.is_in_optimizer = True
            if self.before is not None:
                with without_torch_function():
                    self.before(optimizer)

    def _post(self, optimizer: Any, *_: Any) -> None:
        if self._is_own(optimizer):
            self.is_running = False
            if hasattr(self.visitor, "is_in_optimizer"):
                self.visitor.is_in_optimizer = False
            if self.after is not None:
                with without_torch_function():
                    self.after(optimizer)


# What is tried: a change works where the step is finite under it, and the event is gone


EPS = (1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)


@dataclass
class Remedy:
    """What was tried, and worked.

    what: in words. name: "eps", "scale", "float32", "clamp", "fill", "mask", "slope", "master", "clear", "rate".
    value: the number that was taken. sites: of the operations that ran in float32.
    loss: what the step then gave. policy: for a quantised model, where the remedy is one.
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


class _Unbroken(Timeline):
    """Ends a run with the first event that was not known: a look at a whole step takes ten steps' time."""

    def __init__(self, model: nn.Module, known: Collection[tuple[str, str]]) -> None:
        super().__init__(model)
        self._known = known

    def _add(self, event: Event) -> None:
        if (event.place, event.kind) not in self._known:
            raise _StillThereError(event.kind)


class _StillThereError(Exception):
    """Something breaks under the change that is tried."""


class Attempts:
    """Tries changes, and knows whether the event is gone.

    is_visible: whether inf or NaN at the end of the step shows the event.
    has_one: whether a remedy is known already: then another one is not worth many runs.
    """

    def __init__(self, trials: Trials, event: Event, was: Outcome, seen: Timeline) -> None:
        self.trials, self.event, self.is_visible = trials, event, not was.is_finite
        self.has_one = False
        # What reads a result that is float32 now rounds it itself: a saturation that was not there is not a cure.
        self._saturations = {(e.place, e.role) for e in seen.saturations} - {(event.place, event.role)}
        following = set() if event.operation is None else descendants(event.operation)
        # What does not follow from the event, such as an infinity that comes to nothing, stays where it was.
        others = [e for e in seen.events if e.operation is not None and id(e.operation) not in following]
        self._known = {(e.place, e.kind) for e in others} - {(event.place, event.kind)}

    def ends_finite(self, change: Change) -> Outcome | None:
        """What a run under the change gave, without a look inside; None where it fails or ends in inf or NaN."""
        try:
            outcome = self.trials.run(change, until_broken=True)
        except Exception:  # a step in other dtypes may be refused by torch: then this is not a remedy
            return None
        return outcome if outcome.is_finite and not _moves_only(change) else None

    def works(self, change: Change, gone: Callable[[Timeline], bool] | None = None) -> Outcome | None:
        """What a run under the change gave; None where it fails, or the event is still there."""
        if self.is_visible and gone is None:  # a look inside takes as long as ten runs without one
            outcome = self.ends_finite(change)
            if outcome is None or not change.policies:
                return outcome
        return self.looks_well(change, gone)

    def looks_well(self, change: Change, gone: Callable[[Timeline], bool] | None = None) -> Outcome | None:
        """As `works`, with a look at each result: nothing breaks, leaks or saturates that was not known."""
        seen = _Unbroken(self.trials.model, self._known)
        try:
            outcome = self.trials.run(change, seen)
        except Exception:  # as above, or something breaks
            self.is_visible = False  # if it was: the end of a step does not tell, and is not asked again
            return None
        if not outcome.is_finite or any((e.place, e.kind) not in self._known for e in seen.events):
            return None
        if _moves_only(change):
            return None
        if any((e.place, e.role) not in self._saturations for e in seen.saturations):
            return None
        return outcome if gone is None or gone(seen) else None


def _moves_only(change: Change) -> bool:
    """Whether an overflow is only moved: to where a float32 result is read in its former dtype."""
    return isinstance(change.edit, Widening) and change.edit.overflows


def descendants(start: Operation) -> set[int]:
    """The ids of an operation and of all that read its result, near or far."""
    ids, waiting = set(), [start]
    while waiting:
        at = waiting.pop()
        if id(at) not in ids:
            ids.add(id(at))
            waiting += at.children
    return ids
