"""fp16 by torch's own cast: the oracle of what a model computes under emulation."""

from __future__ import annotations

import torch
from torch import Tensor

FP16 = "fp16"


def h(x: Tensor) -> Tensor:
    """To fp16 and back by torch's own cast: the oracle of every expectation here."""
    return x.detach().half().float()


def is_fp16(x: Tensor) -> bool:
    return torch.equal(x.detach(), h(x))


def randn(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape).requires_grad_(grad)
