"""Check arguments of torch's types: modules, optimizers, tensors, and seeds of its generators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fpsim.checks import is_whole, shown
from fpsim.torch_modes import is_stand_in

__all__ = [
    "require_initialised",
    "require_memory",
    "require_module",
    "require_optimizer",
    "require_result",
    "require_seed",
]

MOST_SEED = 2**64 - 1


def require_module(model: Any, name: str = "model", remedy: str = "") -> None:
    """Raise TypeError for anything but a torch.nn.Module.

    remedy: a sentence at the end of the error, which names an alternative.

    >>> require_module(3)
    Traceback (most recent call last):
    TypeError: model is 3, of type int. Expected: a torch.nn.Module.
    """
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise TypeError(f"{name} is {shown(model)}, of type {kind}. Expected: a torch.nn.Module.{remedy}")


def require_memory(model: nn.Module) -> None:
    """Raise TypeError for a model with a parameter or a buffer that is meta or fake, and under a FakeTensorMode.

    >>> require_memory(nn.Linear(2, 2, device="meta"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    TypeError: weight of the model is on device meta, where tensors hold no numbers. Expected: a model on cpu or cuda...
    """
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if is_stand_in(x):
            raise TypeError(
                f"{name} of the model is {_kind(x)}, where tensors hold no numbers. Expected: a model on cpu or "
                f"cuda. Give it memory with model.to_empty(device='cpu'), and load its numbers."
            )
    # Under a FakeTensorMode, a model of real tensors computes fake results.
    if is_stand_in(torch.empty(0, device="cpu")):
        raise TypeError(
            "This is called under a FakeTensorMode, where tensors hold no numbers. Expected: a call outside of its "
            "block, with a model on cpu or cuda."
        )


def require_initialised(model: nn.Module) -> None:
    """Raise ValueError for a model with a parameter or a buffer of a lazy module that has not run yet.

    >>> require_initialised(nn.LazyLinear(2))
    Traceback (most recent call last):
    ValueError: weight of the model has no shape yet, as of a lazy module. Run the model once before: model(batch).
    """
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(x):
            raise ValueError(
                f"{name} of the model has no shape yet, as of a lazy module. Run the model once before: model(batch)."
            )


def require_result(x: Tensor, what: str, verb: str) -> None:
    """Raise TypeError for a result of a step that is meta or fake, as the result of a batch of such tensors is.

    what, verb: the result in words, and the public function that reads its numbers.
    """
    if is_stand_in(x):
        raise TypeError(
            f"{what} is {_kind(x)}, where tensors hold no numbers for fpsim.{verb} to read. Expected: a model and a "
            f"batch on cpu or cuda, outside of a FakeTensorMode."
        )


def _kind(x: Tensor) -> str:
    return "on device meta" if x.device.type == "meta" else "of a FakeTensorMode"


def require_seed(seed: Any) -> None:
    """Raise TypeError for anything but an integer, ValueError for an integer that torch's generators do not accept.

    >>> require_seed(2**70)
    Traceback (most recent call last):
    ValueError: seed=1180591620717411303424 is out of range. Expected: an integer from -2**63 to 2**64 - 1.
    """
    if not is_whole(seed):
        raise TypeError(f"seed={shown(seed)} is not an integer. Expected: an integer from -2**63 to 2**64 - 1.")
    if not -(2**63) <= seed <= MOST_SEED:
        raise ValueError(f"seed={shown(seed)} is out of range. Expected: an integer from -2**63 to 2**64 - 1.")


def require_optimizer(optimizer: Any) -> None:
    """Raise TypeError for anything but an optimizer or a wrapper of an optimizer, such as Accelerate's.

    >>> require_optimizer("sgd")
    Traceback (most recent call last):
    TypeError: optimizer is 'sgd', of type str. Expected: a torch.optim.Optimizer.
    """
    # The attribute is checked too, because not every wrapper is a subclass.
    if not isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, "param_groups"):
        kind = type(optimizer).__name__
        raise TypeError(f"optimizer is {shown(optimizer)}, of type {kind}. Expected: a torch.optim.Optimizer.")
