"""Gradients of which nothing is left in the first step, as of a branch behind a gate of 1e-6: told of once."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from fpsim.scaling import RoundingSpec, rounded

__all__ = ["Dead"]

SHOWN = 3


class Dead:
    """Looks at the first step of a rule that predicts, and copies from the device once, at the beginning of the next.

    It looks at the gradients of results, not of parameters: a key's bias has noise for a gradient, and no loss there.
    """

    def __init__(self, may_look: bool) -> None:
        self.looks = may_look
        self._step: int | None = None
        self._found: list[tuple[str, Tensor]] = []

    def begin(self, step: int) -> None:
        """A step begins: the first is looked at; after it what was found is told."""
        if self._step is None:
            self._step = step
        elif self.looks:
            self.looks = False
            self._tell()

    def wants(self, role: str) -> bool:
        return self.looks and role == "error" and not _is_captured()

    def note(self, site: str, was_something: Tensor, gradient: Tensor, spec: RoundingSpec, log2_scale: Tensor) -> None:
        """Note whether a gradient that was not zero is, once it is rounded; its noise is none of the training's."""
        left = rounded(gradient, spec, torch.tensor(0, device="cpu"), log2_scale).any()
        self._found.append((site, was_something & ~left))

    def _tell(self) -> None:
        if not self._found or _is_captured():
            return
        flags = torch.stack([flag.cpu() for _, flag in self._found]).tolist()
        sites = [site for (site, _), flag in zip(self._found, flags, strict=True) if flag]
        self._found = []
        if sites:
            others = f" and {len(sites) - SHOWN} more" if len(sites) > SHOWN else ""
            warnings.warn(
                f"Every gradient of {', '.join(sites[:SHOWN])}{others} underflowed in the first step of AdaLossScaled: "
                f"this rule changes the scale at matrix products only, and passes it on through all else, such as a "
                f"gate of 1e-6. Use rule='current', init_scale=2.0**20 or a loss scale.",
                stacklevel=2,
            )


def _is_captured() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
