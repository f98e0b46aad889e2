"""Scalers, a small model and its batches, for the tests of `GradScaler`.

Scales are powers of two and the numbers small, so scaling and unscaling are exact: a scaled run equals a run without
scaling bit for bit.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ada_loss import GradScaler

Make = Callable[..., Any]
REFUSED = (RuntimeError, AssertionError, ValueError)  # torch asserts what we raise as RuntimeError


def torchs(**params: Any) -> Any:
    return torch.amp.GradScaler("cpu", **params)


def ours(**params: Any) -> GradScaler:
    return GradScaler("cpu", **params)


def model_and_optimizer(seed: int = 0, **options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return model, torch.optim.SGD(model.parameters(), **{"lr": 1.0, **options})


def batches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    both = torch.randn(count, 2, 8, 8, generator=generator)
    return [(x, y) for x, y in both]


def spoil(model: nn.Sequential, value: float = math.inf) -> None:
    model[1].weight.grad.fill_(value)


def sparse(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A 2 x 3 gradient whose first and third value belong to one index."""
    indices = torch.tensor([[0, 1, 0], [2, 0, 2]])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Ss]parse.*")
        return torch.sparse_coo_tensor(indices, torch.tensor(values, dtype=dtype), (2, 3))


def ready(make: Make) -> tuple[Any, nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = make(init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    return scaler, weight, optimizer


def gradients(scaler: Any, weight: nn.Parameter, optimizer: Any, *values: float) -> list[float]:
    """Step with each of these gradients, and give the scale before each step and after the last."""
    scales = [scaler.get_scale()]
    for value in values:
        scaler.scale(torch.ones(()))
        weight.grad = torch.full_like(weight, value)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales
