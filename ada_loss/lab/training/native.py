"""Native cells, which train in real float16 under torch.autocast: their notation, scaler and recording."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fpsim
from ada_loss.layerwise.native_graph import plan_of
from ada_loss.layerwise.native_hooks import watch_sent
from ada_loss.layerwise.native_powers import HALF
from ada_loss.scalers import GradScaler
from fpsim import Recording
from fpsim.checks import shown
from fpsim.scaling import RoundingSpec, as_policy, listeners, rounded, to_float64

__all__ = [
    "NATIVE",
    "NativeScaler",
    "canonical_native",
    "in_float16",
    "is_native",
    "native_label",
    "refused_with_native",
    "require_native",
    "unquantized",
]

NATIVE = "native"  # the key in a mapping that takes the place of a format
FORMAT = "fp16"  # its only value: the only format of torch.autocast that needs a scale
EXAMPLE = f"{{'{NATIVE}': '{FORMAT}'}}"
ROUNDING = "nearest_even"  # the rounding of the hardware
APART = f"Give {EXAMPLE} in a grid of its own, under `also`"
WRONG = {"accumulation": "float64", "master_weights": "none"}  # values of options that ask for emulation


def is_native(fmt: Any) -> bool:
    """Return True if a format is that of a native cell, valid or not."""
    return isinstance(fmt, Mapping) and NATIVE in fmt


def native_label(fmt: Mapping[str, Any]) -> str:
    """Return the name of a native format in tables.

    >>> native_label({"native": "fp16"})
    'fp16 native'
    """
    return f"{fmt[NATIVE]} {NATIVE}"


def canonical_native(fmt: Mapping[str, Any]) -> dict[str, str]:
    """Return the canonical form of a native format. Raises ValueError for other formats and for fields of a policy.

    >>> canonical_native({"native": "half"})
    {'native': 'fp16'}
    """
    others = [key for key in fmt if key != NATIVE]
    if others:
        raise ValueError(
            f"The format {shown(dict(fmt))} has {', '.join(map(shown, others))} besides {NATIVE!r}. A native cell "
            f"computes in float16 as the hardware does, without roles, products or overrides. Use {EXAMPLE}, or leave "
            f"{NATIVE!r} out: the fields are emulated."
        )
    given = fmt[NATIVE]
    try:
        name = str(fpsim.as_format(given))
    except (TypeError, ValueError):
        name = ""
    if name != FORMAT:
        reason = "A scale changes no gradient of bfloat16, which has float32's exponents. " if name == "bf16" else ""
        remedy = f"Write {name!r} without {NATIVE!r}: it is emulated." if name else f"Write {EXAMPLE}."
        raise ValueError(
            f"A format has {NATIVE}={shown(given)}. Expected: {FORMAT!r}, in which torch.autocast computes. "
            f"{reason}{remedy}"
        )
    return {NATIVE: FORMAT}


def refused_with_native(given: str, reason: str, remedy: str) -> ValueError:
    """Return the error for a setting that cannot be combined with a native format."""
    return ValueError(f"{given} was given with the format {EXAMPLE}. {reason} {remedy}.")


def require_native(rounding: str | None, options: Mapping[str, Any], update: object = None) -> None:
    """Raise ValueError for settings of an emulated cell that a native cell refuses.

    rounding: the rounding of the cell; None for the usual rounding. options: the options of the training. update: how
        the optimizer stores weights and states.
    """
    # Such settings are refused, not ignored: otherwise two cells with different settings would be the same training.
    if rounding not in (None, ROUNDING):
        raise refused_with_native(
            f"The rounding {shown(rounding)}",
            "Hardware rounds float16 to the nearest, ties to even.",
            f"Omit roundings, or use {ROUNDING!r}. {APART}, if the other formats have several",
        )
    if update is not None:
        raise refused_with_native(
            f"The update {shown(update)}",
            "A native cell stores float32 weights and states, as a training under autocast does.",
            f"Omit the update. {APART}, if the other formats have several",
        )
    for name, value in WRONG.items():
        if options.get(name) == value:
            raise refused_with_native(
                f"task_options.{name}={value!r}",
                "It is a setting of the emulation: hardware adds up as it does, and weights stay float32 under "
                "autocast.",
                f"Omit {name}. {APART}, with task_options of its own, if the other formats need it",
            )


def unquantized(model: nn.Module) -> nn.Module:
    """Return a copy of a model for native training. Raises ValueError for a quantised model: it would be emulated."""
    try:
        listeners(model)
    except ValueError:
        return deepcopy(model)
    raise ValueError(
        f"The task's model, {type(model).__name__}, is quantised: it would be emulated in a native cell. Give the task "
        f"the model that fpsim.quantize was given."
    )


def in_float16(model: nn.Module, device: str) -> Callable[[Tensor], Tensor]:
    """Return the forward pass of a model under torch.autocast in float16, with float32 outputs."""
    kind = torch.device(device).type

    def forward(x: Tensor) -> Tensor:
        with torch.autocast(kind, dtype=torch.float16):
            outputs = model(x)
        # The loss is computed in float32, as with an emulated model, whose outputs are rounded and whose loss is not.
        return outputs.float() if outputs.dtype is torch.float16 else outputs

    return forward


class NativeScaler(GradScaler):
    """A `GradScaler` that tallies the input gradients that products compute in the backward pass.

    It tallies with every method, so that native cells can be compared with each other and with emulated cells.
    Recording changes no bit of a training.
    """

    _sent: _Sent | None = None

    def record(self, recording: Recording, model: nn.Module) -> None:
        """Start to tally gradients under the role "error", in the backward passes that the recording chooses."""
        self._sent = _Sent(recording, model)
        if self.layers is not None:
            self.layers.observer = self._sent  # type: ignore[assignment]  # it has all methods that are called

    def scale(self, outputs: Any) -> Any:
        scaled = super().scale(outputs)
        if self._sent is not None and self.layers is None:
            self._sent.watch(scaled)
        return scaled

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a saved state, as `GradScaler` does, but raise ValueError if the scales of layers are missing."""
        # `GradScaler` would warn and choose the scales again. The resumed cell would then not have the bits of an
        # uninterrupted cell.
        if self.layers is not None and "layers" not in state_dict:
            raise ValueError(
                "The state of the scaler has no scales of layers, and this training has some. Expected: a state that "
                "was saved by one with the same scaling."
            )
        super().load_state_dict(state_dict)


class _Sent:
    """Tally the input gradients of products, before and after rounding to float16, by the site of the product.

    If layers have scales, this object is the observer of their scaling, instead of a `Recorder`.
    """

    def __init__(self, recording: Recording, model: nn.Module) -> None:
        self.recording, self.model = recording, model
        spec = as_policy(FORMAT).specs().error
        assert spec is not None
        self.spec: RoundingSpec = spec

    def wants(self, step: int) -> bool:
        """Return True if the next backward pass is tallied."""
        # The recording counts the backward passes, because a checkpoint stores the recording's state.
        return self.recording.wants("", "native pass")

    def __call__(
        self, step: int, site: str, role: str, spec: RoundingSpec, gradient: Tensor, log2_scale: Tensor, chosen: Tensor
    ) -> None:
        """Tally an unscaled gradient. log2_scale: log2 of the scale with which the hardware rounds the gradient."""
        # The gradient is tallied with its scale, because the hardware rounds the scaled gradient. The container is
        # float64, whose exponents suffice for every scale.
        self._tally(site, to_float64(gradient, log2_scale))

    def watch(self, loss: Tensor) -> None:
        """Tally the backward pass of a loss if layers have no scales."""
        if not self.wants(0) or loss.grad_fn is None:  # if the graph is missing, torch's error in backward() says so
            return
        names = {id(p): name for name, p in self.model.named_parameters()}
        for entry in plan_of(loss.grad_fn, names, HALF).entries:
            if entry.factor is not None:
                watch_sent(entry.node, HALF, partial(self._tally, entry.factor.site))

    def _tally(self, site: str, before: Tensor) -> None:
        key = torch.tensor(0, device="cpu")  # no noise: float16 rounds to nearest
        self.recording(site, "error", before, rounded(before, self.spec, key, None), self.spec)
