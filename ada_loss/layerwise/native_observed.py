"""The gradient a native product sends on, before rounding: recomputed in float32 in an observer's steps only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ada_loss.layerwise.native_graph import CONVOLUTION, GATE, MATRICES, Node, parameter_behind
from fpsim.scaling import slot_shapes, sum_sent_by_convolution

__all__ = ["watch_sent"]

CAST = "ToCopyBackward0"
TURNS = ("TBackward0", CAST)  # nodes behind which a weight is still found as it was multiplied


def watch_sent(
    node: Node, half: torch.dtype, tell: Callable[[Tensor], None], is_wanted: Callable[[], bool] = lambda: True
) -> None:
    """Call `tell` in each backward pass with the gradient that a product sends on, in float32 before rounding.

    Nodes for which `_sent_by` returns None, and passes in which `is_wanted` is false, are skipped. Register this after
    other hooks that change the incoming gradient. tell, is_wanted: must not hold a node.
    """
    sent = _sent_by(node, half)
    arrived: list[Tensor | None] = []
    if sent is None:
        return

    def keep(gradients: tuple[Tensor | None, ...]) -> None:
        arrived[:] = gradients

    def told(*_: object) -> None:
        if arrived and arrived[0] is not None and is_wanted():
            tell(sent(arrived[0].detach().float()))
        arrived.clear()

    node.register_prehook(keep)
    node.register_hook(told)


def _sent_by(node: Node, half: torch.dtype) -> Callable[[Tensor], Tensor] | None:
    """A function from a product's incoming gradient to the gradient it sends on, both in float32.

    The other operand is the parameter, rounded to `half` as autocast does. None if it is not a parameter: saved tensors
    are not read, as a checkpoint allows only one read; and a compiled region's computation is unknown.
    The function becomes a hook of the node and must not hold it, or the graph would never be freed.
    """
    edges = node.next_functions
    kind = node.name()
    if kind == CAST:
        return lambda g: g
    if kind in MATRICES:
        return _by_matrix(node, half)
    if kind == CONVOLUTION and edges[0][0] is not None and hasattr(edges[1][0], "name"):
        weight = _operand(edges[1][0], half)
        (child, nr) = edges[0]
        sent = sum_sent_by_convolution(node, slot_shapes(child)[nr])
        return None if weight is None else lambda g: sent(g, weight[0])
    if kind == GATE:
        for i in range(2):
            (child, nr), gate = edges[1 - i], _operand(edges[i][0], half)
            if gate is not None and child is not None and parameter_behind(child) is None:
                shape = slot_shapes(child)[nr]
                return lambda g: (g * gate[0]).sum_to_size(shape)
    return None


def _by_matrix(node: Node, half: torch.dtype) -> Callable[[Tensor], Tensor] | None:
    first, second = (child for child, _ in node.next_functions[-2:])
    found, is_right = _operand(second, half), True
    if found is None or found[0].dim() != 2:
        found, is_right, first = _operand(first, half), False, second
    if found is None or found[0].dim() != 2 or first is None:
        return None
    matrix = found[0] if found[1] else found[0].t()  # transposed once more, as the backward pass has it
    return lambda g: g @ matrix if is_right else matrix @ g


def _operand(node: Node | None, half: torch.dtype) -> tuple[Tensor, bool] | None:
    """The parameter behind casts and transpositions as it was multiplied, in float32, and whether it was transposed."""
    is_transposed = False
    while node is not None and not hasattr(node, "variable"):
        if node.name() not in TURNS:
            return None
        is_transposed ^= node.name() != CAST
        node = node.next_functions[0][0]
    return None if node is None else (node.variable.detach().to(half).float(), is_transposed)
