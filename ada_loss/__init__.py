"""ada_loss: gradient scaling for training in small number formats, and a lab that compares it."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any


def _require_our_fpsim() -> None:
    """Raise ImportError if `fpsim` is another project's package, which PyPI would install into the same folder."""
    module = sys.modules.get("fpsim")
    if module is None:
        # The marker is read from the source of `fpsim/__init__.py`, because importing the package takes a second. If
        # there is no source, the package is imported.
        spec = find_spec("fpsim")
        source = getattr(spec and spec.loader, "get_source", lambda _: "")("fpsim")
        if source is not None and '__distribution__ = "ada-loss"' in source:
            return
        module = import_module("fpsim") if source is None else None
    if getattr(module, "__distribution__", None) != "ada-loss":
        raise ImportError(
            "Got a package fpsim that is not the one of ada-loss. The fpsim of the package index is another project "
            "in a folder of the same name. Uninstall it, then install ada-loss again: `pip uninstall fpsim` and "
            "`pip install --force-reinstall --no-deps ada-loss` (from a checkout: `-e FOLDER` in place of the name)."
        )


_require_our_fpsim()

if TYPE_CHECKING:
    from ada_loss.lab.results import Results
    from ada_loss.lab.studies.search import search
    from ada_loss.lab.sweep.driver import resume, sweep
    from ada_loss.lab.tasks import Task
    from ada_loss.lab.training import Job
    from ada_loss.layerwise import AdaLossScaled
    from ada_loss.record import Recorder
    from ada_loss.rules import LayerRule, LossRule, layer_rule, loss_rule, trajectory
    from ada_loss.scalers import GradScaler, Updater
    from ada_loss.transforms import (
        AdaLossTransform,
        AdaLossTransformBasicBlock,
        AdaLossTransformBatchNorm,
        AdaLossTransformBottleneck,
        AdaLossTransformCast,
        AdaLossTransformConv2d,
        AdaLossTransformLinear,
    )

# Names are imported on first use, so that the command line answers --help without importing torch.
_HOMES = {
    "ada_loss.lab.results": ("Results",),
    "ada_loss.lab.studies.search": ("search",),
    "ada_loss.lab.sweep.driver": ("resume", "sweep"),
    "ada_loss.lab.tasks": ("Task",),
    "ada_loss.lab.training": ("Job",),
    "ada_loss.layerwise": ("AdaLossScaled",),
    "ada_loss.record": ("Recorder",),
    "ada_loss.rules": ("LayerRule", "LossRule", "layer_rule", "loss_rule", "trajectory"),
    "ada_loss.scalers": ("GradScaler", "Updater"),
    "ada_loss.transforms": (
        "AdaLossTransform",
        "AdaLossTransformBasicBlock",
        "AdaLossTransformBatchNorm",
        "AdaLossTransformBottleneck",
        "AdaLossTransformCast",
        "AdaLossTransformConv2d",
        "AdaLossTransformLinear",
    ),
}

__all__ = [
    "AdaLossScaled",
    "AdaLossTransform",
    "AdaLossTransformBasicBlock",
    "AdaLossTransformBatchNorm",
    "AdaLossTransformBottleneck",
    "AdaLossTransformCast",
    "AdaLossTransformConv2d",
    "AdaLossTransformLinear",
    "GradScaler",
    "Job",
    "LayerRule",
    "LossRule",
    "Recorder",
    "Results",
    "Task",
    "Updater",
    "layer_rule",
    "loss_rule",
    "resume",
    "search",
    "sweep",
    "trajectory",
]


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("ada-loss")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'ada_loss' has no attribute {name!r}. Known: {', '.join(__all__)}.")
