"""last_layers: find the layers whose products no other product follows on the way to the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fpsim.border import require_memory, require_module
from fpsim.checks import shown
from fpsim.emulation.calls import LOOK_UPS
from fpsim.emulation.product_calls import CALLS
from fpsim.emulation.recurrent import OPERATIONS
from fpsim.emulation.scope import active
from fpsim.emulation.tracing import Operation, Trace
from fpsim.insight.stepping import as_step, preserve, switching, traced
from fpsim.torch_modes import keeps_grad_mode
from fpsim.undoing import Undo, undone

__all__ = ["last_layers"]

_PRODUCTS = {*CALLS, *OPERATIONS}


@keeps_grad_mode
def last_layers(model: nn.Module, step: Any, *, loss: Callable[[Any], Tensor] | None = None) -> list[str]:
    """The names of the layers whose product with a weight reaches the loss through no other such product.

    Of a classifier or a language model that is its head; of a detector, each of its heads; of a model whose head shares
    the embedding's weight, the module that multiplies by it. The gradient that comes to them is that of the loss:
    a few large elements, and many small ones that add up to as much. Rounded to nearest in 4 bits the small ones are
    lost and the sum is wrong at any scale. A model that keeps these layers in a wider format trains:

        policy = fpsim.Policy(error="e2m1fn", overrides=dict.fromkeys(fpsim.last_layers(model, step), "bf16"))

    The step runs once, in float32. Parameters, buffers, gradients and random numbers are as they were afterwards.

    Args:
        model: any module, quantised or not.
        step: a function without arguments that returns the loss, or a batch, where the output has a `.loss` or with
            `loss`.
        loss: from the output of a batch to its loss.

    Returns:
        Names as in `model.named_modules()`, in the order they were called; "" for operations of the model itself.

    Raises:
        TypeError: for a step that does not return a tensor.
        ValueError: where no product leads to the loss.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> last_layers(net, lambda: net(torch.ones(1, 4)).square().mean())
    ['2']
    """
    require_module(model)
    require_memory(model)
    run = as_step(model, step, loss, "last_layers")

    def last(undo: Undo) -> list[str]:
        preserve(model, undo)
        switching(model, undo)(None)
        trace = traced(model, _Listed(), "last_layers", undo)
        total = trace.run(run)
        if not isinstance(total, Tensor):
            raise TypeError(
                f"Got {shown(total)}, of type {type(total).__name__}, from the step. Expected: the loss, a tensor: "
                f"fpsim.last_layers(model, lambda: loss(model(x)))."
            )
        return _last(trace, total)

    return undone(last)


class _Listed:
    """Notes which operations multiply by a weight that something computed: torch's prune and parametrizations."""

    def forward(self, operation: Operation, operands: list[Tensor], result: Tensor) -> None:
        scope = None if active.emulation is None else active.emulation.scope
        operation.notes["has_weight"] = scope is not None and any(map(scope.stands_in, operands))

    def backward(self, operation: Operation, gradient: Tensor) -> None:
        pass


def _last(trace: Trace, total: Tensor) -> list[str]:
    layers: dict[int, str] = {}
    known, waiting = set[int](), [trace.results.get(total)]
    while waiting:
        operation = waiting.pop()
        if operation is None or id(operation) in known:
            continue
        known.add(id(operation))
        has_weight = operation.notes.get("has_weight") or any(map(_is_of_parameters, operation.sources))
        if operation.name in _PRODUCTS and has_weight:
            layers[operation.index] = operation.module
        else:
            waiting += operation.parents
    if not layers:
        raise ValueError(
            f"No product with a parameter of {type(trace.model).__name__} leads to what the step returned. Expected: "
            f"a step that calls the model and returns the loss of its output."
        )
    return [*dict.fromkeys(module for _, module in sorted(layers.items()))]


def _is_of_parameters(operation: Operation | None) -> bool:
    """True if a tensor follows from parameters alone: a weight, a view of one, or a result computed from weights."""
    if operation is None or operation.name in LOOK_UPS:  # an embedding depends on its indices
        return False
    return operation.name == "parameter" or (bool(operation.sources) and all(map(_is_of_parameters, operation.sources)))
