"""Implementations of the methods of a GradScaler: `Scaling` if it is enabled, `PassThrough` if it is off."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from enum import Enum
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ada_loss.checks import NOT_NEGATIVE, POSITIVE, Possible, require
from ada_loss.rules.loss import LossRule
from ada_loss.rules.loss.base import Off, float32
from ada_loss.rules.loss.counting import Torch
from ada_loss.scalers.gradients import clip_to_norm_, gradients_of, largest_of, one_on, total_of, unscale_and_check_
from fpsim.checks import is_number, require_mapping, shown
from fpsim.scaling import require_optimizer

__all__ = ["PassThrough", "Scaling", "parameter_of"]

REACHED = Possible("a number, 0 or more", lambda v: is_number(v) and v >= 0)
LIMIT = Possible(
    "a number, 0 or more, inf for no limit", lambda v: is_number(v) and (NOT_NEGATIVE.allows(v) or v == math.inf)
)
TORCH_STATE = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


class Scaler(Protocol):
    """The calling GradScaler. Methods call one another through this object, because a subclass may override them."""

    max_gradient_norm: float | None

    def scale(self, outputs: Any) -> Any: ...

    def unscale_(self, optimizer: Optimizer) -> None: ...

    def clip_(self, optimizer: Optimizer, max_norm: float) -> None: ...


class Scaling:
    """Methods of an enabled scaler, with its rule and the progress of each optimizer since the last update.

    GradScaler documents the methods.
    """

    is_enabled: ClassVar[bool] = True

    def __init__(self, rule: LossRule) -> None:
        self._rule = rule
        self._adjusted: tuple[Tensor, Tensor] | None = None  # scale and count, if the device has adjusted them
        self._has_scaled = False
        self.scales: dict[torch.device, Tensor] = {}  # the scale, on each device where it was needed
        self.inverses: dict[torch.device, Tensor] = {}
        self.progress: dict[int, Progress] = {}  # by id of the optimizer
        self._skipped = 0
        self._skipped_on: dict[torch.device, Tensor] = {}  # skipped steps that only the device knows

    @property
    def skipped(self) -> int:
        return self._skipped + sum(int(count) for count in self._skipped_on.values())

    @property
    def rule(self) -> LossRule:
        if self._adjusted is not None:
            scale, good = self._adjusted
            self._adopt(self._rule.evolve(scale=scale.item(), good=int(good.item())))
        return self._rule

    @property
    def skips(self) -> bool:
        """Return True if steps with an overflow are skipped. Unlike `rule`, this copies nothing to the host."""
        return self._rule.skips

    def set_parameter(self, name: str, value: float) -> None:
        parameter_of(self.rule, name)
        self._adopt(_changed(self.rule, self.rule.scale, **{name: value}))

    def scale(self, scaler: Scaler, outputs: Any) -> Any:
        if isinstance(outputs, Tensor):
            self._has_scaled = True
            return outputs * self._scale_on(outputs.device)
        if isinstance(outputs, Mapping):
            return {name: scaler.scale(value) for name, value in outputs.items()}
        if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
            return type(outputs)(*map(scaler.scale, outputs))
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(map(scaler.scale, outputs))
        if isinstance(outputs, Iterable) and not isinstance(outputs, str):
            return map(scaler.scale, outputs)
        raise ValueError(
            f"outputs must be a Tensor or an iterable of Tensors, not {type(outputs).__name__}. "
            f"Give scale() the loss before .item()."
        )

    def unscale_(self, optimizer: Optimizer) -> None:
        require_optimizer(optimizer)
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
        unscale_and_check_(gradients, self._inverse_on, progress.found_inf)
        if self._rule.needs_largest:
            progress.largest = largest_of(gradients)
        progress.stage = Stage.UNSCALED

    def clip_(self, optimizer: Optimizer, max_norm: float) -> None:
        require_optimizer(optimizer)
        require("max_norm", max_norm, LIMIT, "limit of a norm")
        progress = self._begin(optimizer, "clip_")
        if progress.stage is not Stage.UNSCALED:
            raise RuntimeError(
                f"clip_() is being called on gradients that are {progress.stage.value}, not unscaled. "
                f"Call unscale_(optimizer) first, and step(optimizer) after."
            )
        norm = clip_to_norm_(gradients_of(optimizer), float(max_norm))
        # The norm of finite gradients may overflow. Clipping would then set all of them to zero. As in Cerebras, the
        # step is skipped instead.
        if norm is not None:
            progress.require_checked()
            progress.found_inf[norm.device] += ~torch.isfinite(norm)
            progress.known = None

    def step(self, scaler: Scaler, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "closure" in kwargs or any(callable(a) for a in args):
            raise RuntimeError(
                "Closure use is not currently supported if GradScaler is enabled. The scaler must see the "
                "gradients before each step. Take an optimizer without closure, or GradScaler(enabled=False)."
            )
        require_optimizer(optimizer)
        progress = self._begin(optimizer, "step")
        if progress.stage is Stage.STEPPED:
            raise RuntimeError("step() has already been called since the last update(). Call update() first.")
        # A fused optimizer unscales in its own kernel. But clipping, and rules that need the largest gradient, need
        # unscaled gradients before the optimizer's step.
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        must_unscale = not fused or scaler.max_gradient_norm is not None or self._rule.needs_largest
        if progress.stage is Stage.READY and must_unscale:
            scaler.unscale_(optimizer)
        if scaler.max_gradient_norm is not None:
            scaler.clip_(optimizer, scaler.max_gradient_norm)
        if fused:
            result = self._step_fused(scaler, optimizer, progress, args, kwargs)
        else:
            progress.require_checked()
            skip = self._rule.skips and progress.overflow()
            result = None if skip else optimizer.step(*args, **kwargs)
        progress.stage = Stage.STEPPED
        return result

    def overflowed(self, optimizer: Optimizer) -> bool:
        require_optimizer(optimizer)
        return self._begin(optimizer, "overflowed").overflow()

    def update(self, new_scale: float | Tensor | None = None) -> None:
        self._require_scaled("update")
        self._count_skipped()  # first, because progress is dropped below
        if new_scale is not None:
            scale = _number_of(new_scale)
            require("new_scale", scale, POSITIVE, "GradScaler")
            self._adopt(replace(self.rule, scale=scale))
            self.progress = {}
            return
        seen = [progress for progress in self.progress.values() if progress.found_inf]
        if not seen:
            raise RuntimeError(
                "No inf checks were recorded prior to update. No optimizer with gradients has stepped yet. "
                "Call step(optimizer) first."
            )
        self.progress = {}
        if not self._rule.dynamic:
            return
        # The host does not know yet whether this step overflowed, and need not know: torch's kernel adjusts the scale
        # on the device. The test is not isinstance, because apex's rule with hysteresis is a subclass of torch's rule,
        # and the kernel does not count its overflows.
        if type(self._rule) is Torch and any(progress.known is None for progress in seen):
            found_inf = total_of(flag for progress in seen for flag in progress.found_inf.values())
            assert found_inf is not None
            self._adjust_on_device(self._rule, found_inf)
            return
        ok = not any(progress.overflow() for progress in seen)
        # `progress.largest` is empty unless the rule needs the largest gradient, because each copy to the host waits
        # for the device.
        largest = [float(t) for progress in seen for t in progress.largest] if ok else []
        self._adopt(self.rule.adjust(ok, max(largest, default=None)))

    def _count_skipped(self) -> None:
        """Count the finished step if an optimizer skipped it. With a fused optimizer the count is on the device."""
        seen = [progress for progress in self.progress.values() if progress.stage is Stage.STEPPED]
        if not self._rule.skips or not seen:
            return
        unknown = [flag for progress in seen if progress.known is None for flag in progress.found_inf.values()]
        if any(progress.known for progress in seen):
            self._skipped += 1
        elif (found := total_of(unknown)) is not None:
            skips = (found != 0).to(torch.int64)
            before = self._skipped_on.get(found.device)
            self._skipped_on[found.device] = skips if before is None else before + skips

    def state_dict(self, scaler: Scaler) -> dict[str, Any]:
        rule = self.rule
        state = {f.name: getattr(rule, f.name) for f in fields(rule)}
        if type(rule) is Torch:
            state["_growth_tracker"] = state.pop("good")
        return {"rule": rule.system, **state, "max_gradient_norm": scaler.max_gradient_norm}

    def load_state_dict(self, scaler: Scaler, state_dict: Mapping[str, Any]) -> None:
        require_mapping("state_dict", state_dict, "what state_dict() returns")
        state = dict(state_dict)
        if not state:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved from a disabled instance of "
                "GradScaler. A state has the rule's parameters. Save it where is_enabled() is true."
            )
        rule = self.rule
        # A state of torch.amp.GradScaler has neither the name of a rule nor the scale of the first step.
        if set(state) == TORCH_STATE and type(rule) is Torch:
            state = {"rule": rule.system, "init_scale": rule.init_scale, **state}
        name = state.pop("rule", None)
        if name != rule.system:
            raise RuntimeError(
                f"The state is of the rule {name!r}, and this scaler goes by {rule.system!r}. A state fits a "
                f"scaler of its own rule. Make one, GradScaler({name!r}, ...), or start this one afresh."
            )
        norm = state.pop("max_gradient_norm", scaler.max_gradient_norm)
        if "_growth_tracker" in state:
            state["good"] = state.pop("_growth_tracker")
        names = {f.name for f in fields(rule)}
        if set(state) != names:
            raise RuntimeError(
                f"The state of the rule {name!r} was given without {sorted(names - set(state))} and with "
                f"{sorted(set(state) - names)}. It has {', '.join(sorted(names))}. Save it with state_dict()."
            )
        scale = state["scale"]
        rule = _changed(rule, state.pop("scale"), **state)
        require("max_gradient_norm", norm, POSITIVE.or_none(), "GradScaler", None)
        scaler.max_gradient_norm = norm
        self.progress = {}
        self._adopt(rule)
        # A scale of 0 or inf is loaded too: a rule can reach these values, and its state continues from there.
        if not POSITIVE.allows(float32(scale)):
            warnings.warn(
                f"The state has scale={shown(scale)}, {float32(scale)} as float32: with 0 the parameters become NaN, "
                f"and with inf each step is skipped. Call update(new_scale=...) with a finite number above 0 before "
                f"the next step.",
                RuntimeWarning,
                stacklevel=3,
            )

    def between_steps(self) -> Scaling:
        """Return a copy without tensors, for pickling. Raises RuntimeError in the middle of a step."""
        if self.progress:
            raise RuntimeError(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end "
                "after scaler.update(). Call update() first, or save state_dict(), at any time."
            )
        saved = Scaling(self.rule)  # the property, which fetches a scale that the device has adjusted
        saved._has_scaled, saved._skipped = self._has_scaled, self.skipped
        return saved

    def _require_scaled(self, verb: str) -> None:
        if not self._has_scaled:
            raise RuntimeError(
                f"Attempted {verb} but nothing was scaled yet. This may indicate your script did not use "
                f"scaler.scale(loss or outputs) earlier in the iteration. Call scaler.scale(loss).backward()."
            )

    def _begin(self, optimizer: Optimizer, verb: str) -> Progress:
        self._require_scaled(verb)
        progress = self.progress.get(id(optimizer))
        if progress is None:
            progress = self.progress[id(optimizer)] = Progress()
        return progress

    def _scale_on(self, device: torch.device) -> Tensor:
        scale = self.scales.get(device)
        if scale is None:
            # The scale is a float32 tensor, as in torch, so that a 0-d float16 loss is promoted to float32. Multiplied
            # by a Python number, the loss would stay float16 and overflow.
            if self._adjusted is not None:
                scale = self._adjusted[0].to(device, non_blocking=device.type != "cpu", copy=True)
            else:
                scale = torch.full((), float32(self._rule.scale), dtype=torch.float32, device=device)
            self.scales[device] = scale
        return scale

    def _inverse_on(self, device: torch.device) -> Tensor:
        inverse = self.inverses.get(device)
        if inverse is None:
            scale = self._scale_on(device)
            # The inverse is computed in float64, because some compilers divide float32 inexactly; mps has no float64.
            exact = scale if device.type == "mps" else scale.double()
            inverse = self.inverses[device] = exact.reciprocal().float()
        return inverse

    def _step_fused(
        self, scaler: Scaler, optimizer: Any, progress: Progress, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Step with an optimizer that unscales and skips by itself, on its device."""
        if "grad_scaler" in inspect.signature(optimizer.step).parameters:  # the older of torch's contracts
            return optimizer.step(*args, **kwargs, grad_scaler=scaler)
        scale = getattr(optimizer, "grad_scale", None)
        if progress.stage is Stage.READY:
            unscale_and_check_(gradients_of(optimizer), one_on, progress.found_inf)
        elif not progress.found_inf and gradients_of(optimizer):  # gradients that appeared after unscale_
            progress.require_checked()
        found_inf = total_of(progress.found_inf.values())
        if progress.stage is Stage.READY and found_inf is not None:
            scale = self._scale_on(found_inf.device) * (1 if scale is None else scale)
        optimizer.grad_scale, optimizer.found_inf = scale, found_inf if self._rule.skips else None
        try:
            return optimizer.step(*args, **kwargs)
        finally:  # as in torch: otherwise a later step without a scaler would read these attributes
            del optimizer.grad_scale, optimizer.found_inf

    def _adjust_on_device(self, rule: Torch, found_inf: Tensor) -> None:
        """Adjust torch's rule in torch's own kernel: the same arithmetic, without a copy to the host."""
        if self._adjusted is None:
            good = torch.full((), rule.good, dtype=torch.int32, device=found_inf.device)
            self._adjusted = self._scale_on(found_inf.device).clone(), good
        scale, good = self._adjusted
        found_inf = found_inf.to(scale.device, non_blocking=not scale.is_cpu)
        factors = rule.growth_factor, rule.backoff_factor
        torch._amp_update_scale_(scale, good, found_inf, *factors, rule.growth_interval)
        self.scales, self.inverses = {}, {}

    def _adopt(self, rule: LossRule) -> None:
        # If the scale is unchanged, its tensors stay cached. Most steps do not change the scale, and need not create
        # the tensors of all devices again.
        if rule.scale != self._rule.scale or self._adjusted is not None:
            self.scales, self.inverses = {}, {}
        self._rule, self._adjusted = rule, None


class PassThrough:
    """Methods of a disabled scaler: outputs and gradients stay unchanged, and no step is skipped.

    `max_gradient_norm` still clips. Setting a parameter of the rule does nothing.
    """

    is_enabled: ClassVar[bool] = False
    skips: ClassVar[bool] = False
    skipped: ClassVar[int] = 0
    rule: ClassVar[LossRule] = Off()

    def set_parameter(self, name: str, value: float) -> None:
        pass

    def scale(self, scaler: Scaler, outputs: Any) -> Any:
        return outputs

    def unscale_(self, optimizer: Optimizer) -> None:
        pass

    def clip_(self, optimizer: Optimizer, max_norm: float) -> None:
        clip_to_norm_(gradients_of(optimizer), max_norm)

    def step(self, scaler: Scaler, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if scaler.max_gradient_norm is not None:
            scaler.clip_(optimizer, scaler.max_gradient_norm)
        return optimizer.step(*args, **kwargs)

    def overflowed(self, optimizer: Optimizer) -> bool:
        return False

    def update(self, new_scale: float | Tensor | None = None) -> None:
        pass

    def state_dict(self, scaler: Scaler) -> dict[str, Any]:
        return {}

    def load_state_dict(self, scaler: Scaler, state_dict: Mapping[str, Any]) -> None:
        pass

    def between_steps(self) -> PassThrough:
        return self


class Stage(Enum):
    """Stage of an optimizer between two updates."""

    READY = "not unscaled"
    UNSCALED = "unscaled"
    STEPPED = "used up by step()"


class Progress:
    """State tracked for one optimizer since the last update."""

    __slots__ = ("found_inf", "known", "largest", "stage")

    def __init__(self) -> None:
        self.stage = Stage.READY
        self.found_inf: dict[torch.device, Tensor] = {}  # 0-d, above 0 if a gradient was not finite
        self.known: bool | None = None  # whether a gradient was not finite, once the flags were copied to the host
        self.largest: list[Tensor] = []  # 0-d, for rules that need the largest gradient

    def require_checked(self) -> None:
        if not self.found_inf:
            raise RuntimeError(
                "No inf checks were recorded for this optimizer. None of its parameters has a gradient. "
                "Call backward() first, and see that the loss depends on its parameters."
            )

    def overflow(self) -> bool:
        """Return True if a gradient was not finite; copies the flags to the host."""
        if self.known is None:
            self.require_checked()
            self.known = any(flag.item() != 0 for flag in self.found_inf.values())
        return self.known


def parameter_of(rule: LossRule, name: str) -> Any:
    """Return a parameter of a rule. Raises AttributeError for an unknown name."""
    if not hasattr(rule, name):
        raise AttributeError(
            f"The rule {rule.system!r} has no {name!r}. "
            f"It has {', '.join(f.name for f in fields(rule))}. Read them in scaler.rule."
        )
    return getattr(rule, name)


def _changed(rule: LossRule, scale: float, **others: Any) -> LossRule:
    """Copy a rule with other values. The scale may be 0 or inf: a rule can reach these, but cannot start with them."""
    require("scale", scale, REACHED, "GradScaler")
    # replace() checks every field, and refuses a scale of 0 or inf; evolve() does not.
    return replace(rule, **others, scale=1.0).evolve(scale=float(scale))


def _number_of(new_scale: float | Tensor) -> float:
    if not isinstance(new_scale, Tensor):
        return new_scale
    if new_scale.numel() != 1 or new_scale.requires_grad:
        raise ValueError(
            f"new_scale is a tensor of {new_scale.numel()} elements. new_scale should be a float or "
            f"a 1-element torch.FloatTensor with requires_grad=False. Give the number."
        )
    return float(new_scale)
