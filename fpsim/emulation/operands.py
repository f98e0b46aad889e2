"""Which operands of a call are rounded."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from fpsim.emulation.marks import WIDE, is_made_here
from fpsim.policies.policy import RoleSpecs

__all__ = ["Rounds", "leaves_float32"]


class Rounds(Enum):
    """Choice of the operands of a call that are rounded."""

    ALL = "all: of products, convolutions and normalisations, as autocast does, and of moved tensors"
    ALL_BUT_WIDE = "all but those that are float32 on purpose, from which torch takes the number as it is"
    VIEWED = "weights, and tensors from outside with a gradient: other memory is viewed as it is, and rounded in use"
    NOTHING = "nothing: autocast was switched off here"

    def leaves(self, x: Tensor, known: str | None) -> bool:
        """True if a tensor that is not used as a weight stays unrounded. known: the tensor's format."""
        # A view of a rounded copy would not show later writes to the viewed memory.
        if self is Rounds.VIEWED:
            return is_made_here(x) or not x.requires_grad
        return known == WIDE and self is Rounds.ALL_BUT_WIDE


def leaves_float32(specs: RoleSpecs, x: Tensor) -> bool:
    """True if `x` is float32 and no role rounds it."""
    return x.dtype is torch.float32 and all(spec is None or spec.is_float32 for spec in specs)
