"""Checks for backward passes that layer scaling would falsify: an error, or a warning once, while the pass runs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from torch import Tensor

from ada_loss.layerwise.native_graph import INSIDE, Arrivals, Gradients, Node, Plan
from fpsim.scaling import (
    calls_of_backward,
    edge_of,
    graph_tasks_so_far,
    key_of,
    slot_shapes,
    version_of,
)

__all__ = ["Checks", "written"]

MODULE_HOOK = "BackwardHookFunctionBackward"


class Checks:
    """Look for code that would see gradients times the scale of a layer, and remember the nodes that were checked.

    names: of parameters, by id. parameters: returns those that a pass may write to besides the leaves of its graph.
    """

    def __init__(self) -> None:
        self.names: Mapping[int, str] = {}
        self.parameters: Callable[[], Iterable[Tensor]] = tuple
        self._seen: set[tuple[str, int]] = set()  # Functions by kind and number that wrote no gradient
        self._warned: set[str] = set()

    def look_at(self, plan: Plan, is_ours: Callable[[], bool]) -> None:
        """Warn of problems that the plan's graph alone shows, and hook Functions that were not seen before.

        is_ours: whether the running graph task is the pass of the plan.
        """
        count: dict[str, int] = {}
        for node, slots in plan.functions:
            kind = node.name()
            if kind == MODULE_HOOK:
                self._warn(
                    kind,
                    "A module has a full backward hook, which sees gradients times the scale of their layer. "
                    "scaler.layers.true_grad(tensor, gradient) divides that of a tensor; parameters have true ones.",
                )
            elif not kind.startswith(INSIDE) and _may_add_a_constant(node, slots):
                self._warn(
                    kind,
                    f"{kind} sends a gradient to a single number, as a Function does that adds the constant gradient "
                    f"of an auxiliary loss, and a constant would be divided by the scale of its layer. Add the "
                    f"auxiliary loss to the loss: scaler.scale(loss + auxiliary).",
                )
            count[kind] = number = count.get(kind, 0) + 1
            if (kind, number) not in self._seen:
                self._watch(node, (kind, number), [leaf for leaf, _ in plan.leaves], is_ours)

    def look_at_call(self, root: Node, arrivals: Arrivals) -> None:
        """Compare the arguments of `backward` or `grad` with the graph of the scaled loss.

        root: the node of the scaled loss, which is running. arrivals: the powers that gradients in its graph carry.
        Raises RuntimeError if the gradient of another loss enters that graph.
        """
        for outputs, inputs in calls_of_backward():
            roots = [edge_of(x)[0] for x in outputs]
            if len(roots) == 1 and roots[0] is root:
                others: list[tuple[Node, int]] = []
            else:
                found = [*_entered(roots, arrivals)]
                if not any(child is root for child, _ in found):
                    continue  # the call of another thread
                others = [(child, nr) for child, nr in found if child is not root]
            for child, nr in others:
                if _is_carried(arrivals, child, nr):
                    raise RuntimeError(
                        f"Got a loss that is not scaled in the backward pass of a scaled one: its gradient enters at "
                        f"{child.name()}, where others carry the scale of a layer. Expected: the scale of the sum, "
                        f"scaler.scale(a + b) in the place of scaler.scale(a) + b."
                    )
            if any(node is not None and _is_carried(arrivals, node, nr) for node, nr in map(edge_of, inputs)):
                self._warn(
                    "inputs",
                    "The gradient of a hidden tensor was asked for, which has the scale of its layer. "
                    "scaler.layers.true_grad(tensor, gradient) divides by it; parameters have true gradients.",
                )
            return

    def refuse_written(self, leaf: Tensor, by: str = "other code than autograd") -> None:
        """Raise NotImplementedError for a gradient that no hook has divided."""
        raise NotImplementedError(
            f"The gradient of {self.names.get(id(leaf), 'a parameter')} was written by {by}, as fused weight gradients "
            f"are, or by a backward pass within a Function's backward, and has the scale of its layer. Turn that off, "
            f"or let the Function return the gradient (torch.autograd.grad, not backward)."
        )

    def _watch(self, node: Node, key: tuple[str, int], leaves: Iterable[Tensor], is_ours: Callable[[], bool]) -> None:
        every = {id(leaf): leaf for leaf in (*leaves, *self.parameters())}
        before: list[tuple[Tensor, tuple[int, int]]] = []
        begun = 0

        def keep(gradients: Gradients) -> None:
            nonlocal begun
            device = next((g.device for g in gradients if g is not None), None)
            if is_ours():  # only one thread runs the nodes of a device
                before[:] = [(leaf, written(leaf)) for leaf in every.values() if leaf.device == device]
                begun = graph_tasks_so_far()

        def compare(sent: Gradients, _: Gradients) -> None:
            if not is_ours():
                return
            # Without a backward pass inside, what was written is true: FSDP2 reduces gradients in such a Function.
            has_passes = graph_tasks_so_far() > begun + 1
            for leaf, was in before:
                if has_passes and written(leaf) != was:
                    self.refuse_written(leaf, f"other code than autograd, in {key[0]}")
            before.clear()
            self._seen.add(key)

        node.register_prehook(keep)
        node.register_hook(compare)

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, stacklevel=2)


def written(leaf: Tensor) -> tuple[int, int]:
    """Identity and version of the gradient of a leaf."""
    return (0, 0) if leaf.grad is None else (id(leaf.grad), version_of(leaf.grad))


def _may_add_a_constant(node: Node, slots: Collection[int]) -> bool:
    own = slot_shapes(node)
    if any(math.prod(own[nr]) == 1 for nr in slots):
        return False
    edges = ((child, nr) for child, nr in node.next_functions if child is not None and not hasattr(child, "variable"))
    return any(math.prod(slot_shapes(child)[nr]) == 1 for child, nr in edges)


def _entered(roots: Iterable[Node | None], arrivals: Arrivals) -> Iterator[tuple[Node, int]]:
    """The slots at which the graph above enters the planned graph, leaves excepted."""
    waiting = [(root, 0) for root in roots if root is not None]
    above: set[Node] = set()
    while waiting:
        node, nr = waiting.pop()
        if hasattr(node, "variable"):
            continue
        if key_of(node) in arrivals:
            yield node, nr
        elif node not in above:
            above.add(node)
            waiting += [(child, nr) for child, nr in node.next_functions if child is not None]


def _is_carried(arrivals: Arrivals, node: Node, nr: int) -> bool:
    slots = arrivals.get(key_of(node))
    return slots is not None and nr in slots and bool(slots[nr].sites)
