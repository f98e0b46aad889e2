"""Checks of arguments that are torch's: modules, seeds, optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fpsim.checks import is_whole, shown

__all__ = ["require_memory", "require_module", "require_optimizer", "require_seed"]

MOST_SEED = 2**64 - 1


def require_module(model: Any, name: str = "model", remedy: str = "") -> None:
    """Raise TypeError for what is not a torch.nn.Module.

    remedy: what to do instead, a sentence.

    >>> require_module(3)
    Traceback (most recent call last):
    TypeError: model is 3, of type int. Expected: a torch.nn.Module.
    """
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise TypeError(f"{name} is {shown(model)}, of type {kind}. Expected: a torch.nn.Module.{remedy}")


def require_memory(model: nn.Module) -> None:
    """Raise TypeError for a model with a parameter or a buffer on device meta, where tensors hold no numbers.

    >>> require_memory(nn.Linear(2, 2, device="meta"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    TypeError: weight of the model is on device meta, where tensors hold no numbers. Expected: a model on cpu or cuda...
    """
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.is_meta:
            raise TypeError(
                f"{name} of the model is on device meta, where tensors hold no numbers. Expected: a model on cpu or "
                f"cuda. Give it memory with model.to_empty(device='cpu'), and load its numbers."
            )


def require_seed(seed: Any, name: str = "seed") -> None:
    """Raise TypeError for what is not an integer, ValueError for one that torch's generators do not take.

    >>> require_seed(2**70)
    Traceback (most recent call last):
    ValueError: seed=1180591620717411303424 is out of range. Expected: an integer from -2**63 to 2**64 - 1.
    """
    if not is_whole(seed):
        raise TypeError(f"{name}={shown(seed)} is not an integer. Expected: an integer from -2**63 to 2**64 - 1.")
    if not -(2**63) <= seed <= MOST_SEED:
        raise ValueError(f"{name}={shown(seed)} is out of range. Expected: an integer from -2**63 to 2**64 - 1.")


def require_optimizer(optimizer: Any, name: str = "optimizer") -> None:
    """Raise TypeError for what is not an optimizer, or does not wrap one as accelerators do.

    >>> require_optimizer("sgd")
    Traceback (most recent call last):
    TypeError: optimizer is 'sgd', of type str. Expected: a torch.optim.Optimizer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, "param_groups"):
        kind = type(optimizer).__name__
        raise TypeError(f"{name} is {shown(optimizer)}, of type {kind}. Expected: a torch.optim.Optimizer.")
