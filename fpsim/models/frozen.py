"""Weights that do not change, as in generation and evaluation: each is rounded once, not at each call."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial

from torch import Tensor, nn

from fpsim.emulation.kept_weights import KeptWeights
from fpsim.emulation.scope import Listeners
from fpsim.models.installed import emulated_forwards
from fpsim.undoing import Block, Undo

__all__ = ["frozen"]


def frozen(model: nn.Module) -> AbstractContextManager[None]:
    """Round each weight of a quantised model once, at the first call inside of the block that uses it.

    For generation token by token, and for evaluation: the numbers that come out are the same, bit for bit. Kept are the
    weights in the formats of their roles and, for operands of products, in the formats of the forward product. Rounded
    at each call as ever are weights whose rounding is stochastic or whose scale is delayed, weights whose gradient is
    recorded (use `torch.no_grad()`), and all while the model is recorded or watched.

    Weights must not be written to inside. A call that meets a weight which an operation of torch has written to raises
    RuntimeError; a write that torch does not count (`w.data`, NumPy) is seen when the block ends, which raises then.

    Args:
        model: a model that `quantize` gave.

    Raises:
        TypeError: for what is not a module.
        ValueError: for a model that is not quantised.
        RuntimeError: for a weight that was written to inside.

    >>> import torch, fpsim
    >>> model = fpsim.quantize(torch.nn.Linear(4, 4), "e4m3fn")
    >>> x = torch.ones(1, 4)
    >>> with torch.no_grad(), fpsim.frozen(model):
    ...     tokens = [model(x) for _ in range(3)]  # the weight and the bias are rounded at the first one
    """
    listeners = {id(f.listeners): f.listeners for _, f in emulated_forwards(model)}
    if not listeners:
        raise ValueError(
            f"This {type(model).__name__} is not quantised, and rounds no weights. "
            f"Use fpsim.quantize(model, fmt) first."
        )
    return Block(partial(_freeze, model, [*listeners.values()]))


def _freeze(model: nn.Module, listeners: list[Listeners], undo: Undo) -> None:
    kept = KeptWeights(partial(_name_of, model))
    undo.by(kept.require_unchanged)  # the last to be done: what raises comes after all is put back
    for each in listeners:
        undo.by(partial(_put_back, each, each.kept_weights))
        each.kept_weights = kept


def _put_back(listeners: Listeners, before: KeptWeights | None) -> None:
    listeners.kept_weights = before


def _name_of(model: nn.Module, x: Tensor) -> str:
    name = next((name for name, p in model.named_parameters() if p is x), None)
    return "A weight" if name is None else f"The weight {name!r}"
