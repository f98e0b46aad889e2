"""Any loss-scale rule behind the verbs of `torch.amp.GradScaler`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ada_loss.checks import POSITIVE, Possible, require
from ada_loss.rules.loss import LossRule, as_loss_rule, loss_rule
from ada_loss.rules.loss.base import float32
from ada_loss.rules.loss.counting import Torch
from ada_loss.rules.loss.fixed import Off
from ada_loss.scalers.gradients import Gradients, OnDevice, clip_to_norm_, gradients_of, one_on, total_of
from fpsim.checks import is_number

__all__ = ["GradScaler", "NoScaler"]

DEVICES = ("cpu", "cuda", "mps", "xpu")  # what torch.amp.GradScaler takes in the place of our rule
REACHED = Possible("a number, 0 or more", lambda v: is_number(v) and v >= 0)
TORCH_STATE = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


class GradScaler:
    """Scales a loss, unscales gradients, steps where they are finite, and lets a rule choose the next scale.

    rule: a `LossRule`, a system's name ("torch", "nnabla", ...) with its parameters, or a number: it stays.
    A drop-in for `torch.amp.GradScaler`: `device=`, or a device in the place of the rule, is accepted and
    means torch's rule; the scale goes where the losses are. `enabled=False`, or the rule "off", does nothing.
    max_gradient_norm: `step` clips the unscaled gradients of its optimizer to this global norm.

    A step with a gradient that is not finite changes no parameter, unless the rule skips nothing (`static`).
    Nothing is copied to the host before `step` has to choose or `update` to adjust, and nothing at all where
    a fused optimizer chooses by itself and the rule is torch's.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = torch.optim.SGD([weight], lr=0.5)
    >>> scaler = GradScaler("nnabla", scale=8.0)
    >>> scaler(weight.sum()).backward()
    >>> weight.grad
    tensor([8.])
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> weight.detach(), scaler.get_scale()
    (tensor([0.5000]), 8.0)
    """

    def __init__(
        self,
        rule: LossRule | str | float | torch.device = "torch",
        *,
        max_gradient_norm: float | None = None,
        enabled: bool = True,
        device: str | torch.device | None = None,
        **params: Any,
    ) -> None:
        if isinstance(rule, str | torch.device):
            name = str(rule)
            rule = loss_rule("torch" if name.partition(":")[0] in DEVICES else name, **params)
        elif params:
            raise TypeError(
                f"Parameters came beside the rule {rule!r}: {', '.join(params)}. "
                f"They go with a system's name only. Give the name, or put them into the rule."
            )
        require("max_gradient_norm", max_gradient_norm, POSITIVE.or_none(), "GradScaler", None)
        self.max_gradient_norm = max_gradient_norm
        self._rule = as_loss_rule(rule)
        if not enabled or isinstance(self._rule, Off):
            cls: Any = type(self)
            self._rule, self.__class__ = Off(), _disabled(cls)
        self._ahead: tuple[Tensor, Tensor] | None = None  # scale and count, once the device has adjusted them
        self._scales: dict[torch.device, Tensor] = {}  # the scale, and its inverse, where they are needed
        self._inverses: dict[torch.device, Tensor] = {}
        self._scaled = False
        self._progress: dict[int, _Progress] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rule!r}, max_gradient_norm={self.max_gradient_norm})"

    @property
    def rule(self) -> LossRule:
        """The rule for the coming step. Copies it from the device, where it was adjusted there."""
        if self._ahead is not None:
            scale, good = self._ahead
            self._adopt(self._rule.evolve(scale=scale.item(), good=int(good.item())))
        return self._rule

    def scale(self, outputs: Any) -> Any:
        """A loss, or a nest of losses, times the scale: lists, tuples, mappings, other iterables (lazily).

        >>> GradScaler(4.0).scale([torch.tensor(1.0), (torch.tensor(2.0),)])
        [tensor(4.), (tensor(8.),)]
        """
        if isinstance(outputs, Tensor):
            self._scaled = True
            return outputs * self._scale_on(outputs.device)
        if isinstance(outputs, Mapping):
            return {name: self.scale(value) for name, value in outputs.items()}
        if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
            return type(outputs)(*map(self.scale, outputs))
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(map(self.scale, outputs))
        if isinstance(outputs, Iterable) and not isinstance(outputs, str):
            return map(self.scale, outputs)
        raise ValueError(
            f"outputs must be a Tensor or an iterable of Tensors, not {type(outputs).__name__}. "
            f"Give scale() the loss before .item()."
        )

    def __call__(self, outputs: Any) -> Any:
        """The same as `scale`: `scaler(loss).backward()`."""
        return self.scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, in place, and note whether all are finite.

        `step` does it by itself; call it before, once, to look at the gradients or to change them. Sparse
        gradients are coalesced. Raises ValueError for float16 gradients, where the quotient would underflow.
        """
        progress = self._begin(optimizer, "unscale_")
        if progress.stage is not Stage.READY:
            when = "has already been called on this optimizer since the last update()"
            if progress.stage is Stage.STEPPED:
                when = "is being called after step()"
            raise RuntimeError(f"unscale_() {when}. Call it once, between backward() and step().")
        gradients = gradients_of(optimizer)
        for _, dtype in gradients:
            if dtype is torch.float16:
                raise ValueError(
                    "Attempting to unscale FP16 gradients. Float32 gradients have the range for it. "
                    "Keep the parameters in float32 and let autocast or the emulation lower the precision."
                )
        self._check(progress, gradients, self._inverse_on)
        if self._rule.needs_largest:
            some = [g for grads in gradients.values() for g in grads if g.numel()]
            progress.largest = list(torch._foreach_norm(some, ord=float("inf"))) if some else []
        progress.stage = Stage.UNSCALED

    def clip_(self, optimizer: Optimizer, max_norm: float) -> None:
        """Multiply an optimizer's unscaled gradients by max_norm / (their global norm + 1e-6), at most by 1.

        A norm that is not finite is an overflow, as for Cerebras. `step` does it for `max_gradient_norm`.
        """
        progress = self._begin(optimizer, "clip_")
        if progress.stage is not Stage.UNSCALED:
            raise RuntimeError(
                f"clip_() is being called on gradients that are {progress.stage.value}, not unscaled. "
                f"Call unscale_(optimizer) first, and step(optimizer) after."
            )
        norm = clip_to_norm_(gradients_of(optimizer), max_norm)
        if norm is not None:
            progress.require_checked()
            progress.found_inf[norm.device] += ~torch.isfinite(norm)
            progress.known = None

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale if `unscale_` has not been called, clip, and `optimizer.step(*args, **kwargs)`, or skip it.

        Returns what `optimizer.step` returns, None where it is skipped.
        """
        if "closure" in kwargs or any(callable(a) for a in args):
            raise RuntimeError(
                "Closure use is not currently supported if GradScaler is enabled. The scaler must see the "
                "gradients before each step. Take an optimizer without closure, or GradScaler(enabled=False)."
            )
        progress = self._begin(optimizer, "step")
        if progress.stage is Stage.STEPPED:
            raise RuntimeError("step() has already been called since the last update(). Call update() first.")
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        must_unscale = not fused or self.max_gradient_norm is not None or self._rule.needs_largest
        if progress.stage is Stage.READY and must_unscale:
            self.unscale_(optimizer)
        if self.max_gradient_norm is not None:
            self.clip_(optimizer, self.max_gradient_norm)
        if fused:
            result = self._step_fused(optimizer, progress, args, kwargs)
        else:
            progress.require_checked()
            skip = self._rule.skips and progress.overflow()
            result = None if skip else optimizer.step(*args, **kwargs)
        progress.stage = Stage.STEPPED
        return result

    def overflowed(self, optimizer: Optimizer) -> bool:
        """Whether `unscale_` or `step` found a gradient of this optimizer that is not finite, since `update`.

        Copies one number to the host, unless `step` has done so.
        """
        return self._begin(optimizer, "overflowed").overflow()

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Let the rule choose the next scale, or set it; call it once all optimizers have stepped.

        Raises FloatingPointError where the rule's system stops because its scale cannot fall further; the
        scaler can be saved then, and goes on with the scale it had.
        """
        self._require_scaled("update")
        if new_scale is not None:
            self._adopt(replace(self.rule, scale=self._given(new_scale)))
            self._progress = {}
            return
        seen = [progress for progress in self._progress.values() if progress.found_inf]
        if not seen:
            raise RuntimeError(
                "No inf checks were recorded prior to update. No optimizer with gradients has stepped yet. "
                "Call step(optimizer) first."
            )
        self._progress = {}
        if not self._rule.dynamic:
            return
        if type(self._rule) is Torch and any(progress.known is None for progress in seen):
            found = total_of(found for progress in seen for found in progress.found_inf.values())
            assert found is not None
            self._adjust_on_device(self._rule, found)
            return
        ok = not any(progress.overflow() for progress in seen)
        largest = [float(t) for progress in seen for t in progress.largest] if ok else []
        self._adopt(self.rule.adjust(ok, max(largest, default=None)))

    def get_scale(self) -> float:
        """The scale of the coming step. Copies it to the host where the device has adjusted it."""
        return self.rule.scale

    def get_growth_factor(self) -> float:
        """The rule's `growth_factor`; AttributeError for rules that call it otherwise, or have none."""
        return self._parameter("growth_factor")

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the rule's `growth_factor`."""
        self._set_parameter("growth_factor", new_factor)

    def get_backoff_factor(self) -> float:
        """The rule's `backoff_factor`; AttributeError for rules that call it otherwise, or have none."""
        return self._parameter("backoff_factor")

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the rule's `backoff_factor`."""
        self._set_parameter("backoff_factor", new_factor)

    def get_growth_interval(self) -> int:
        """The rule's `growth_interval`; AttributeError for rules that call it otherwise, or have none."""
        return self._parameter("growth_interval")

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the rule's `growth_interval`."""
        self._set_parameter("growth_interval", new_interval)

    def is_enabled(self) -> bool:
        """Whether this scaler scales at all."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """The rule's name, all its parameters and all it remembers, and `max_gradient_norm`, as plain values.

        For torch's rule `torch.amp.GradScaler` can load it, and the other way round.
        """
        rule = self.rule
        state = {f.name: getattr(rule, f.name) for f in fields(rule)}
        if type(rule) is Torch:
            state["_growth_tracker"] = state.pop("good")
        return {"rule": rule.system, **state, "max_gradient_norm": self.max_gradient_norm}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up a state, at any time. Raises RuntimeError for an empty one, and for one of another rule."""
        state = dict(state_dict)
        if not state:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved from a disabled instance of "
                "GradScaler. A state has the rule's parameters. Save it where is_enabled() is true."
            )
        rule = self.rule
        if set(state) == TORCH_STATE and type(rule) is Torch:
            state = {"rule": rule.system, "init_scale": rule.init_scale, **state}
        name = state.pop("rule", None)
        if name != rule.system:
            raise RuntimeError(
                f"The state is of the rule {name!r}, and this scaler goes by {rule.system!r}. A state fits a "
                f"scaler of its own rule. Make one, GradScaler({name!r}, ...), or start this one afresh."
            )
        norm = state.pop("max_gradient_norm", self.max_gradient_norm)
        if "_growth_tracker" in state:
            state["good"] = state.pop("_growth_tracker")
        names = {f.name for f in fields(rule)}
        if set(state) != names:
            raise RuntimeError(
                f"The state of the rule {name!r} came without {sorted(names - set(state))} and with "
                f"{sorted(set(state) - names)}. It has {', '.join(sorted(names))}. Save it with state_dict()."
            )
        rule = _changed(rule, state.pop("scale"), **state)
        require("max_gradient_norm", norm, POSITIVE.or_none(), "GradScaler", None)
        self.max_gradient_norm = norm
        self._progress = {}
        self._adopt(rule)

    def __getstate__(self) -> dict[str, Any]:
        if self._progress:
            raise RuntimeError(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end "
                "after scaler.update(). Call update() first, or save state_dict(), at any time."
            )
        rule = self.rule
        return {**self.__dict__, "_rule": rule, "_ahead": None, "_scales": {}, "_inverses": {}}

    def _require_scaled(self, verb: str) -> None:
        if not self._scaled:
            raise RuntimeError(
                f"Attempted {verb} but nothing was scaled yet. This may indicate your script did not use "
                f"scaler.scale(loss or outputs) earlier in the iteration. Call scaler.scale(loss).backward()."
            )

    def _begin(self, optimizer: Optimizer, verb: str) -> _Progress:
        self._require_scaled(verb)
        progress = self._progress.get(id(optimizer))
        if progress is None:
            progress = self._progress[id(optimizer)] = _Progress()
        return progress

    def _scale_on(self, device: torch.device) -> Tensor:
        scale = self._scales.get(device)
        if scale is None:
            # a tensor, as in torch: a 0-d float16 loss is promoted by it, and would overflow by a number
            if self._ahead is not None:
                scale = self._ahead[0].to(device, non_blocking=True, copy=True)
            else:
                scale = torch.full((), float32(self._rule.scale), dtype=torch.float32, device=device)
            self._scales[device] = scale
        return scale

    def _inverse_on(self, device: torch.device) -> Tensor:
        inverse = self._inverses.get(device)
        if inverse is None:
            scale = self._scale_on(device)
            # in double, for some compilers divide floats inexactly; mps has no double
            exact = scale if device.type == "mps" else scale.double()
            inverse = self._inverses[device] = exact.reciprocal().float()
        return inverse

    def _check(self, progress: _Progress, gradients: Gradients, inverse_on: OnDevice) -> None:
        """Multiply the gradients by the inverse and note which devices hold one that is not finite."""
        for (device, _), grads in gradients.items():
            found = progress.found_inf.get(device)
            if found is None:
                found = progress.found_inf[device] = torch.zeros((), dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse_on(device))

    def _step_fused(self, optimizer: Any, progress: _Progress, args: Any, kwargs: dict[str, Any]) -> Any:
        """A step of an optimizer that divides by the scale and skips by itself, on its device."""
        if "grad_scaler" in inspect.signature(optimizer.step).parameters:  # the older of torch's contracts
            return optimizer.step(*args, **kwargs, grad_scaler=self)
        scale = getattr(optimizer, "grad_scale", None)
        if progress.stage is Stage.READY:
            self._check(progress, gradients_of(optimizer), one_on)
        elif not progress.found_inf and gradients_of(optimizer):  # they came after unscale_
            progress.require_checked()
        found = total_of(progress.found_inf.values())
        if progress.stage is Stage.READY and found is not None:
            scale = self._scale_on(found.device) * (1 if scale is None else scale)
        optimizer.grad_scale, optimizer.found_inf = scale, found if self._rule.skips else None
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def _adjust_on_device(self, rule: Torch, found: Tensor) -> None:
        """torch's rule in torch's own kernel: the same arithmetic, and the host need not know."""
        if self._ahead is None:
            good = torch.full((), rule.good, dtype=torch.int32, device=found.device)
            self._ahead = self._scale_on(found.device).clone(), good
        scale, good = self._ahead
        found = found.to(scale.device, non_blocking=True)
        factors = rule.growth_factor, rule.backoff_factor
        torch._amp_update_scale_(scale, good, found, *factors, rule.growth_interval)
        self._scales, self._inverses = {}, {}

    def _adopt(self, rule: LossRule) -> None:
        if rule.scale != self._rule.scale or self._ahead is not None:
            self._scales, self._inverses = {}, {}
        self._rule, self._ahead = rule, None

    def _given(self, new_scale: float | Tensor) -> float:
        if not isinstance(new_scale, Tensor):
            return new_scale
        if new_scale.numel() != 1 or new_scale.requires_grad:
            raise ValueError(
                f"new_scale came as a tensor of {new_scale.numel()} elements. new_scale should be a float or "
                f"a 1-element torch.FloatTensor with requires_grad=False. Give the number."
            )
        return float(new_scale)

    def _parameter(self, name: str) -> Any:
        rule = self.rule
        if not hasattr(rule, name):
            raise AttributeError(
                f"The rule {rule.system!r} has no {name!r}. "
                f"It has {', '.join(f.name for f in fields(rule))}. Read them in scaler.rule."
            )
        return getattr(rule, name)

    def _set_parameter(self, name: str, value: float) -> None:
        self._parameter(name)
        self._adopt(_changed(self.rule, self.rule.scale, **{name: value}))


class NoScaler(GradScaler):
    """What `GradScaler(enabled=False)` and `GradScaler("off")` give: no scaling, no checks, nothing skipped.

    `max_gradient_norm` still clips. Setting a parameter of the rule does nothing, for there is none to read.

    >>> GradScaler(enabled=False).scale(torch.tensor(3.0))
    tensor(3.)
    """

    def __init__(self, *args: Any, enabled: bool = False, **params: Any) -> None:
        super().__init__(*args, **params, enabled=False)

    def scale(self, outputs: Any) -> Any:
        return outputs

    def unscale_(self, optimizer: Optimizer) -> None:
        pass

    def clip_(self, optimizer: Optimizer, max_norm: float) -> None:
        clip_to_norm_(gradients_of(optimizer), max_norm)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self.max_gradient_norm is not None:
            self.clip_(optimizer, self.max_gradient_norm)
        return optimizer.step(*args, **kwargs)

    def overflowed(self, optimizer: Optimizer) -> bool:
        return False

    def update(self, new_scale: float | Tensor | None = None) -> None:
        pass

    def _set_parameter(self, name: str, value: float) -> None:
        pass

    def is_enabled(self) -> bool:
        return False

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        pass


@cache
def _disabled(cls: Any) -> Any:
    """`NoScaler` for a class of scalers: what a subclass overrides stays, and its `super()` is `NoScaler`."""
    if cls is GradScaler:
        return NoScaler
    if issubclass(cls, NoScaler):
        return cls

    def reduce(self: GradScaler) -> Any:  # pickle would look for this class by its name, and find the subclass
        return _blank, (cls,), self.__getstate__()

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls, NoScaler), {**names, "__reduce__": reduce})


def _blank(cls: Any) -> Any:
    return object.__new__(_disabled(cls))


class Stage(Enum):
    """How far an optimizer has come since the last update."""

    READY = "not unscaled"
    UNSCALED = "unscaled"
    STEPPED = "used up by step()"


class _Progress:
    """What the scaler knows of one optimizer since the last update."""

    __slots__ = ("found_inf", "known", "largest", "stage")

    def __init__(self) -> None:
        self.stage = Stage.READY
        self.found_inf: dict[torch.device, Tensor] = {}  # 0-d, above 0 where a gradient was not finite
        self.known: bool | None = None  # found_inf, once it was copied to the host
        self.largest: list[Tensor] = []  # 0-d, for rules that need the largest gradient

    def require_checked(self) -> None:
        if not self.found_inf:
            raise RuntimeError(
                "No inf checks were recorded for this optimizer. None of its parameters has a gradient. "
                "Call backward() first, and see that the loss depends on its parameters."
            )

    def overflow(self) -> bool:
        """Whether a gradient was not finite, on the host."""
        if self.known is None:
            self.require_checked()
            self.known = any(found.item() != 0 for found in self.found_inf.values())
        return self.known


def _changed(rule: LossRule, scale: float, **others: Any) -> LossRule:
    """The rule with other parameters and memories, at a scale at which it may have arrived but not begin: 0 or inf."""
    require("scale", scale, REACHED, "GradScaler")
    return replace(rule, **others, scale=1.0).evolve(scale=float(scale))
