"""Which operands of a call are brought into their formats."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from fpsim.emulation.marks import WIDE, format_of
from fpsim.policy import RoleSpecs

__all__ = ["Rounds", "leaves_float32"]


class Rounds(Enum):
    """Which operands of a call are brought into their formats."""

    ALL = "all: of products, convolutions and normalisations, as autocast does"
    ALL_BUT_WIDE = "all but those that are float32 on purpose, from which torch takes the number as it is"
    SCALARS = "weights, and scalars that are float32 on purpose: values are moved, and a scalar promotes nothing"
    WEIGHTS = "weights alone: values are moved, or the result is float32 on purpose"
    NOTHING = "none: autocast was switched off here"

    def leaves(self, x: Tensor) -> bool:
        """Whether a tensor without a weight's role stays as it is."""
        if self is Rounds.ALL or self is Rounds.WEIGHTS:
            return self is Rounds.WEIGHTS
        return (format_of(x) == WIDE) == (self is Rounds.ALL_BUT_WIDE)


def leaves_float32(specs: RoleSpecs, x: Tensor) -> bool:
    """Whether no role rounds `x`, which is float32."""
    return x.dtype is torch.float32 and all(spec is None or spec.is_float32 for spec in specs)
