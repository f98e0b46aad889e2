"""GradScaler: any loss-scale rule behind the interface of `torch.amp.GradScaler`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ada_loss.checks import POSITIVE, require
from ada_loss.layerwise.native import NativeScaling
from ada_loss.rules.loss import LossRule, as_loss_rule, loss_rule
from ada_loss.rules.loss.base import Off, Static
from ada_loss.scalers.verbs import PassThrough, Scaling, parameter_of
from fpsim.checks import require_flag, require_mapping, shown

__all__ = ["GradScaler", "NoScaler"]

# The first argument of torch.amp.GradScaler is a device, but here it is a rule. Code for torch passes one of these.
DEVICES = ("cpu", "cuda", "mps", "xpu")


class GradScaler:
    """Scale a loss, unscale gradients, step if they are finite, and let a rule choose the next scale.

    Drop-in for `torch.amp.GradScaler`. A step with a gradient that is not finite changes no parameter, unless
    the rule skips nothing (`static`). Nothing is copied to the host until `step` decides whether to skip, or `update`
    adjusts the scale; with torch's rule and a fused optimizer, which skips by itself, nothing is copied at all.

    Args:
        rule: a `LossRule`, the name of a system ("torch", "nnabla", ...), or a number for a constant scale. A device
            selects torch's rule. The rule "off" does not scale. None selects torch's rule or, with `layers`, a constant
            scale of 1 that skips steps with gradients that are not finite.
        max_gradient_norm: the global norm to which `step` clips the unscaled gradients of its optimizer.
        enabled: False disables scaling, like the rule "off".
        layers: a model in real float16 training (torch.autocast, half weights). Its gradients then have a scale for
            each layer, in addition to the rule's scale. `ada_loss.layerwise.native.NativeScaling(model, ...)` instead
            of the model takes settings. A skipped step lowers the scales of layers in which numbers left the range.
            `state_dict()` stores them under "layers".
        device: accepted as in torch, and not used: the scale is put on the device of each loss.
        params: parameters of the rule, if it is given by name.

    Raises:
        ValueError: for an invalid value.
        TypeError: for a parameter that the rule lacks.

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

    _has_warned = False
    layers: NativeScaling | None

    def __init__(
        self,
        rule: LossRule | str | float | torch.device | None = None,
        *,
        max_gradient_norm: float | None = None,
        enabled: bool = True,
        layers: nn.Module | NativeScaling | None = None,
        device: str | torch.device | None = None,
        **params: Any,
    ) -> None:
        # With layers the loss needs no scale. Steps with an overflow must still be skipped, because this lowers the
        # layers' scales.
        if rule is None:
            rule = Static(1.0, skip_overflow=True) if layers is not None and not params else "torch"
        if isinstance(rule, str | torch.device):
            name = str(rule)
            rule = loss_rule("torch" if name.partition(":")[0] in DEVICES else name, **params)
        elif params:
            raise TypeError(
                f"Parameters were given besides the rule {shown(rule)}: {', '.join(params)}. "
                f"They go with a system's name only. Give the name, or put them into the rule."
            )
        require("max_gradient_norm", max_gradient_norm, POSITIVE.or_none(), "GradScaler", None)
        require_flag("enabled", enabled)
        if device is not None and not isinstance(device, str | torch.device):
            raise TypeError(f"device={shown(device)} is not a device. Expected: one as in torch; it is not needed.")
        if isinstance(device, str):
            try:
                torch.device(device)
            except RuntimeError:
                raise ValueError(
                    f"device={shown(device)} is not a device. Expected: one as in torch, such as 'cuda'; it "
                    f"is not needed."
                ) from None
        self.max_gradient_norm = max_gradient_norm
        rule = as_loss_rule(rule)
        is_off = not enabled or isinstance(rule, Off)
        if enabled and is_off and layers is not None:
            raise ValueError(
                "layers was given to a scaler that is off, which checks no gradient. Expected: layers=None, or a rule, "
                "1.0 for a loss that is not scaled."
            )
        self._verbs: Scaling | PassThrough = PassThrough() if is_off else Scaling(rule)
        if layers is not None and not isinstance(layers, NativeScaling):
            layers = NativeScaling(layers)
        self.layers = layers if enabled else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rule!r}, max_gradient_norm={self.max_gradient_norm})"

    @property
    def rule(self) -> LossRule:
        """Return the rule for the coming step. Copies its state to the host if the device has adjusted it."""
        return self._verbs.rule

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss by the scale, or every loss in lists, tuples, mappings and other iterables (lazily).

        Raises ValueError for anything else.

        >>> GradScaler(4.0).scale([torch.tensor(1.0), (torch.tensor(2.0),)])
        [tensor(4.), (tensor(8.),)]
        """
        scaled = self._verbs.scale(self, outputs)
        return self.layers.scale(scaled) if self.layers is not None and isinstance(outputs, Tensor) else scaled

    def __call__(self, outputs: Any) -> Any:
        """Same as `scale`: `scaler(loss).backward()`."""
        return self.scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, in place, and record whether all are finite.

        `step` does this by itself. Call it once before `step` to inspect or change the gradients. Sparse gradients
        are coalesced.

        Raises ValueError for float16 gradients, since the quotient would underflow; RuntimeError for a second call.
        """
        self._verbs.unscale_(optimizer)
        # The scales of layers are lowered before gradients are clipped. Clipping would spread one NaN to all gradients,
        # and every layer's scale would be lowered.
        self._lower_layers(optimizer)

    def clip_(self, optimizer: Optimizer, max_norm: float) -> None:
        """Multiply the unscaled gradients of an optimizer by max_norm / (their global norm + 1e-6), at most by 1.

        A norm that is not finite counts as an overflow, as in Cerebras. `step` does this for `max_gradient_norm`.
        """
        self._verbs.clip_(optimizer, max_norm)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale if `unscale_` has not been called, clip, and call `optimizer.step(*args, **kwargs)` or skip it.

        Returns the result of `optimizer.step`, or None if it is skipped.
        """
        result = self._verbs.step(self, optimizer, args, kwargs)
        if self.layers is not None and not self.layers.has_scaled:
            self._warn_of_a_plain_loss()
        # The scales of layers are lowered here too, for optimizers that unscale by themselves. In update() it would be
        # too late, because a loop may delete the gradients before update().
        self._lower_layers(optimizer)
        return result

    def _warn_of_a_plain_loss(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "No loss was scaled since the last update(), so gradients of layers had no scales. Expected: "
                "scaler.scale(loss).backward() before each step(optimizer), and one update() after it.",
                stacklevel=3,
            )

    def _lower_layers(self, optimizer: Optimizer) -> None:
        if self.layers is not None and self._verbs.skips and self._verbs.overflowed(optimizer):
            self.layers.overflowed()

    def overflowed(self, optimizer: Optimizer) -> bool:
        """Return True if `unscale_` or `step` has found a gradient that is not finite since the last `update`.

        Only gradients of this optimizer count. Copies one number to the host, unless `step` has already copied it.
        """
        return self._verbs.overflowed(optimizer)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Let the rule choose the next scale. Call it once, after all optimizers have stepped.

        new_scale: the next scale, instead of the rule's choice.

        Raises FloatingPointError if the rule's system stops because its scale cannot fall further. The scaler can still
        be saved, and keeps the scale it had.
        """
        self._verbs.update(new_scale)
        if self.layers is not None:
            self.layers.has_scaled = False

    @property
    def skipped(self) -> int:
        """Return the number of steps skipped since this scaler was created, as counted by `update`.

        Copies a number to the host for each device on which an optimizer skips by itself. `state_dict()` does not
        contain the number.

        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer, scaler = torch.optim.SGD([weight]), GradScaler("torch")
        >>> for size in (1.0, torch.inf, 1.0):
        ...     scaler.scale(weight.sum() * size).backward()
        ...     scaler.step(optimizer)
        ...     scaler.update()
        ...     optimizer.zero_grad()
        >>> scaler.skipped
        1
        """
        return self._verbs.skipped

    def get_scale(self) -> float:
        """Return the scale of the coming step. Copies it to the host if the device has adjusted it."""
        return self.rule.scale

    def get_growth_factor(self) -> float:
        """Return the rule's `growth_factor`. Raises AttributeError for rules without a parameter of this name."""
        return parameter_of(self.rule, "growth_factor")

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the rule's `growth_factor`. Raises AttributeError for rules without a parameter of this name."""
        self._verbs.set_parameter("growth_factor", new_factor)

    def get_backoff_factor(self) -> float:
        """Return the rule's `backoff_factor`. Raises AttributeError for rules without a parameter of this name."""
        return parameter_of(self.rule, "backoff_factor")

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the rule's `backoff_factor`. Raises AttributeError for rules without a parameter of this name."""
        self._verbs.set_parameter("backoff_factor", new_factor)

    def get_growth_interval(self) -> int:
        """Return the rule's `growth_interval`. Raises AttributeError for rules without a parameter of this name."""
        return parameter_of(self.rule, "growth_interval")

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the rule's `growth_interval`. Raises AttributeError for rules without a parameter of this name."""
        self._verbs.set_parameter("growth_interval", new_interval)

    def is_enabled(self) -> bool:
        """Return True if this scaler scales at all."""
        return self._verbs.is_enabled

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's name, its parameters and its state, and `max_gradient_norm`, as plain values.

        `torch.amp.GradScaler` can load the state of torch's rule, and the other way round.
        """
        state = self._verbs.state_dict(self)
        return state if self.layers is None else {**state, "layers": self.layers.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a saved state, at any time. Raises RuntimeError if the state is empty, or of another rule.

        A scaler with layers accepts a state without scales of layers and warns: the next step chooses the scales again.
        """
        if self.layers is None:
            self._verbs.load_state_dict(self, state_dict)
            return
        require_mapping("state_dict", state_dict, "what state_dict() returns")
        state = dict(state_dict)
        layers = state.pop("layers", None)
        before = self._verbs.state_dict(self)
        self._verbs.load_state_dict(self, state)
        if layers is None:
            warnings.warn(
                "The state has no scales of layers, as one that a scaler without layers saved. They are chosen in the "
                "next step.",
                stacklevel=2,
            )
            return
        # A refused state must change nothing. The rule's part of the state is already loaded, so the old state is
        # restored.
        try:
            self.layers.load_state_dict(layers)
        except BaseException:
            self._verbs.load_state_dict(self, before)
            raise

    def __getstate__(self) -> dict[str, Any]:
        # As in torch, the copy has no tensors of the scale; they are created again on the devices where the copy is
        # used.
        return {**self.__dict__, "_verbs": self._verbs.between_steps()}


class _IsOff(type):
    """Let `isinstance(scaler, NoScaler)` test whether a scaler is off, regardless of its class."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if cls is NoScaler:
            return isinstance(instance, GradScaler) and not instance.is_enabled()
        return super().__instancecheck__(instance)


class NoScaler(GradScaler, metaclass=_IsOff):
    """A disabled scaler: no scaling, no checks, no skipped steps. `max_gradient_norm` still clips.

    Every disabled scaler is an instance of this class: `GradScaler(enabled=False)`, `GradScaler("off")`, and
    disabled scalers of a subclass.

    >>> GradScaler(enabled=False).scale(torch.tensor(3.0))
    tensor(3.)
    >>> isinstance(GradScaler(enabled=False), NoScaler)
    True
    """

    def __init__(self, *args: Any, enabled: bool = False, **params: Any) -> None:
        super().__init__(*args, **params, enabled=False)
