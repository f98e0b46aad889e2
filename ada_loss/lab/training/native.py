"""Native cells, which train in real float16 under torch.autocast: what stands for one, and what one cannot have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

import fpsim
from fpsim.checks import shown
from fpsim.scaling import listeners

__all__ = [
    "NATIVE",
    "canonical_native",
    "in_float16",
    "is_native",
    "native_label",
    "refused_with_native",
    "require_native",
    "unquantized",
]

NATIVE = "native"  # the key of a mapping that stands where a format may stand
FORMAT = "fp16"  # its only value: the format that torch.autocast computes in and that a scale helps
EXAMPLE = f"{{'{NATIVE}': '{FORMAT}'}}"
ROUNDING = "nearest_even"  # of the hardware
APART = f"Give {EXAMPLE} in a grid of its own, under `also`"
WRONG = {"accumulation": "float64", "master_weights": "none"}  # values of options that ask for emulation


def is_native(fmt: Any) -> bool:
    """Whether a format is that of a native cell, right or wrong."""
    return isinstance(fmt, Mapping) and NATIVE in fmt


def native_label(fmt: Mapping[str, Any]) -> str:
    """The words of a table for a native format.

    >>> native_label({"native": "fp16"})
    'fp16 native'
    """
    return f"{fmt[NATIVE]} {NATIVE}"


def canonical_native(fmt: Mapping[str, Any]) -> dict[str, str]:
    """The canonical form of a native format. Raises ValueError for another format, and for fields of a policy.

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
    """The error of a combination that a native cell cannot have."""
    return ValueError(f"{given} was given with the format {EXAMPLE}. {reason} {remedy}.")


def require_native(rounding: str | None, options: Mapping[str, Any], update: object = None) -> None:
    """Raise ValueError for what an emulated cell may have and a native one may not.

    rounding: of the cell, None for the usual one. options: of the training. update: what the optimizer stores.
    """
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
    """A copy of a model that is to train natively. Raises ValueError for a quantised one, which would be emulated."""
    try:
        listeners(model)
    except ValueError:
        return deepcopy(model)
    raise ValueError(
        f"The task's model, {type(model).__name__}, is quantised: it would be emulated in a native cell. Give the task "
        f"the model that fpsim.quantize was given."
    )


def in_float16(model: nn.Module, device: str) -> Callable[[Tensor], Tensor]:
    """The forward pass of a model under torch.autocast in float16; the outputs are float32.

    So the loss is computed in float32, as that of an emulated model, whose outputs are rounded and then leave it.
    """
    kind = torch.device(device).type

    def forward(x: Tensor) -> Tensor:
        with torch.autocast(kind, dtype=torch.float16):
            outputs = model(x)
        return outputs.float() if outputs.dtype is torch.float16 else outputs

    return forward
