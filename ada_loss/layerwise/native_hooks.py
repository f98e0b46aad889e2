"""Hooks of a native backward pass at the nodes of its plan.

The hooks multiply gradients, hold them where branches meet, and divide them at leaves.

`Checks` finds code with which scaling of layers cannot return true gradients. It raises an error, or warns once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ada_loss.layerwise.native_graph import (
    CONVOLUTION,
    GATE,
    INSIDE,
    MATRICES,
    Arrivals,
    Cell,
    Entry,
    Exit,
    Factor,
    Gradients,
    Meeting,
    Node,
    Plan,
    parameter_behind,
    plan_of,
)
from ada_loss.layerwise.native_powers import Power, Ratio, aligned, from_to, meet, times
from fpsim.scaling import (
    call_at_the_end_of_backward,
    calls_of_backward,
    current_graph_task,
    current_node,
    edge_of,
    graph_tasks_so_far,
    key_of,
    slot_shapes,
    sum_sent_by_convolution,
    take_float32_gradients,
    version_of,
    will_run,
)

__all__ = ["NativePass", "watch_sent"]

Choose = Callable[[Factor, list[Tensor], Power], Power]
Observe = Callable[[Factor, Tensor, Power], None]
Leaves = list[tuple[Tensor, frozenset[str]]]
MODULE_HOOK = "BackwardHookFunctionBackward"


class NativePass:
    """Carry powers of two through the backward passes of losses, and divide them out at every leaf.

    The gradient of a leaf equals its gradient in a plain pass bit for bit, if no number leaves the range of its dtype.
    A leaf of the dtype `half` gets a float32 gradient.

    names: the names of parameters, by id, for sites; the mapping may change between losses. half: the dtype whose range
        gradients must fit.
    choose: a function from a site, the gradients that arrive there, and log2 of the power of two that the gradients
        carry, to log2 of the factor.
    needs_half: whether to refuse a loss whose graph has no half gradient.
    on_begin: a function that is called when a pass begins, with the sites in order, the leaves with the sites on which
        each of them depends, and whether no site was left out.
    """

    # The running graph tasks of scaled losses, of all scalers. Each task divides by its own powers only, so no two
    # losses may meet in one task.
    running: ClassVar[set[int]] = set()

    def __init__(
        self,
        names: dict[int, str],
        choose: Choose,
        half: torch.dtype = torch.float16,
        on_begin: Callable[[list[str], Leaves, bool], None] = lambda sites, leaves, is_whole: None,
        needs_half: bool = False,
    ) -> None:
        self.needs_half = needs_half
        self.names, self.choose, self.half, self.on_begin = names, choose, half, on_begin
        self.checks = Checks()
        self._arrivals: Arrivals = {}  # the arrivals of the last pass; they hold powers, but no tensors of the graph

    def scale(self, loss: Tensor, ones: Collection[str] = frozenset(), observe: Observe | None = None) -> Tensor:
        """Copy `loss` (any shape) and hook the backward pass of the copy.

        Raises NotImplementedError for a reentrant checkpoint; TypeError for a half leaf with a half gradient, for a
        loss that requires no gradient, and, with `needs_half`, for a loss without a half gradient in its graph. The
        backward pass of the copy raises NotImplementedError with create_graph=True, or if other code than autograd
        writes a parameter's gradient; RuntimeError if two scaled losses, or a scaled and an unscaled loss, meet in it.

        ones: sites whose factor is known to be 1, which need no hook.
        observe: a function that is called with a product's factor, the gradient of its input (float32, unrounded), and
            log2 of the power of two that this gradient carries.
        """
        if not loss.requires_grad:
            raise TypeError("Got a loss that requires no gradient. Expected: the loss of a forward pass, not detached.")
        # A copy is returned, not a view: a later in-place operation, such as `loss /= steps`, would take a view out of
        # its graph.
        loss = loss.clone()
        self.checks.names = self.names
        plan = plan_of(loss.grad_fn, self.names, self.half, ones)
        if self.needs_half and not plan.has_half:
            raise TypeError(
                f"Got a loss whose backward pass has no {self.half} gradient: float32 and bfloat16 have nothing to "
                f"scale. Compute the loss under torch.autocast(device, dtype={self.half}), or with such weights."
            )
        for leaf, _ in plan.leaves:
            if leaf.dtype is self.half:
                if leaf.grad is not None and leaf.grad.dtype is self.half:
                    raise TypeError(
                        f"Got a {self.half} gradient in a leaf, where small gradients are lost. "
                        f"Expected: none, or float32. Call optimizer.zero_grad() before the first scaled loss."
                    )
                take_float32_gradients(leaf)
        self._hook(plan, not ones, observe)
        return loss

    def power_at(self, tensor: Tensor) -> Power | None:
        """Return log2 of the power that a tensor's gradient carried in the last pass; None if it had no gradient."""
        node, nr = edge_of(tensor)
        if node is None:
            return 0
        cell = self._arrivals.get(key_of(node), {}).get(nr)
        return None if cell is None else cell.log2

    def _hook(self, plan: Plan, is_whole: bool, observe: Observe | None) -> None:
        task = _Task()
        # The functions below must not capture the plan, because the plan holds the root. A node that is held by its own
        # hook is never freed.
        cells, meetings, carried, sites, leaves = plan.cells, plan.meetings, plan.carried, plan.sites, plan.leaves
        arrivals = plan.arrivals

        def begin(gradients: Gradients) -> None:
            if torch.is_grad_enabled():
                raise NotImplementedError("Got create_graph=True: a second backward pass would see scaled gradients.")
            task.number = current_graph_task()
            if task.number in NativePass.running:
                raise RuntimeError("Two scaled losses meet in one backward pass. Scale their sum.")
            NativePass.running.add(task.number)
            self._arrivals = arrivals
            if cells:
                self.checks.look_at_call(current_node(), arrivals)
            # The graph may be retained and run once more, so all state of the previous pass is deleted.
            for cell in cells:
                cell.log2 = None
            for meeting, producers in meetings:
                # `backward(inputs=...)` runs only a part of the graph. Only producers that run are counted; otherwise a
                # meeting would never be complete.
                meeting.expected = sum(will_run(node) for node in producers)
                meeting.held.clear()
            task.undelivered = {id(leaf): (leaf, *written(leaf)) for leaf in carried}
            call_at_the_end_of_backward(end)
            self.on_begin(sites, leaves, is_whole)

        def end() -> None:
            # If no hook divided a leaf's gradient, the leaf must have no new gradient. A fused kernel violates this if
            # it writes weight gradients without autograd.
            NativePass.running.discard(task.number)
            left, task.undelivered = task.undelivered, {}
            for leaf, *before in left.values():
                if [*written(leaf)] != before:
                    self.checks.refuse_written(leaf)

        # Only the root's hook holds nodes (the producers of meetings), and the root is not part of a meeting: otherwise
        # a node would keep itself alive.
        plan.root.register_prehook(begin)  # before any other hook of the root
        for entry in plan.entries:
            entry.node.register_prehook(self._entering(task, entry))
            if observe is not None and entry.factor is not None:
                self._watch(task, entry, entry.factor, observe)
        self.checks.look_at(plan, lambda: current_graph_task() == task.number)
        for leaving in plan.exits:
            leaving.node.register_hook(self._leaving(task, leaving))

    def _entering(self, task: _Task, entry: Entry) -> Callable[[Gradients], Gradients | None]:
        slots, out, factor, choose = entry.slots, entry.out, entry.factor, self.choose

        def multiply(gradients: Gradients) -> Gradients | None:
            if current_graph_task() != task.number:
                return None
            came = {nr: _known(slots[nr]) for nr, g in enumerate(gradients) if g is not None and nr in slots}
            if not came:  # a pass over a part of the graph may bring no gradient here; later nodes still read `out`
                out.log2 = 0
                return None
            result, log2 = aligned(gradients, came)
            some = [g for g in result if g is not None]
            more = 0 if factor is None else choose(factor, some, log2)
            if isinstance(more, Tensor) or more != 0:
                out.log2 = log2 + more
                ratio = from_to(log2, out.log2, some[0].device)
                result = [None if g is None else times(g, ratio) for g in result]
            else:
                out.log2 = log2
            return tuple(result)

        return multiply

    def _watch(self, task: _Task, entry: Entry, factor: Factor, observe: Observe) -> None:
        out = entry.out  # the entry holds the node
        watch_sent(
            entry.node,  # after the hook that multiplies
            self.half,
            lambda sent: observe(factor, sent, _known(out)),
            lambda: current_graph_task() == task.number,
        )

    def _leaving(self, task: _Task, leaving: Exit) -> Callable[[Gradients, Gradients], Gradients | None]:
        cell, edges = leaving.cell, leaving.edges

        def divide(gradients: Gradients, _: Any) -> Gradients | None:
            if current_graph_task() != task.number:
                return None
            result, log2 = [*gradients], _known(cell)
            ratio: Ratio | None = None  # the same for every leaf of the node
            for edge, end in edges:
                g = result[edge]
                if isinstance(end, Meeting):
                    result[edge] = _gather(end, g, log2)
                elif g is not None:
                    task.undelivered.pop(id(end), None)
                    ratio = from_to(log2, 0, g.device) if ratio is None else ratio
                    result[edge] = times(g, ratio)
            return tuple(result)

        return divide


class _Task:
    """The graph task of one scaled loss; its hooks do nothing in other tasks.

    undelivered: leaves with carried gradients that no hook has divided yet, and their `.grad` before the pass.
    """

    number = -2  # the number before the first pass; torch returns -1 outside of a backward pass

    def __init__(self) -> None:
        self.undelivered: dict[int, tuple[Tensor, int, int]] = {}


def _known(cell: Cell) -> Power:
    assert cell.log2 is not None
    return cell.log2


def _gather(meeting: Meeting, g: Tensor | None, log2: Power) -> Tensor | None:
    """Hold a part of the sum; return the sum when the last part has arrived, and None before."""
    # Parts are held, because the sum may overflow at the scale of the part that arrives first. A producer that sends no
    # gradient is counted too; otherwise its meeting would never be complete.
    meeting.held.append((g, log2))
    if len(meeting.held) < meeting.expected:
        return None
    parts = [(part, power) for part, power in meeting.held if part is not None]
    meeting.held.clear()
    if not parts:
        meeting.cell.log2 = 0
        return None
    total, meeting.cell.log2 = meet(parts)
    return total


class Checks:
    """Look for code that would see gradients times the scale of a layer, and remember the nodes that were checked.

    names: the names of parameters, by id. parameters: a function that returns the parameters that a pass may write to
        in addition to the leaves of its graph.
    """

    def __init__(self) -> None:
        self.names: Mapping[int, str] = {}
        self.parameters: Callable[[], Iterable[Tensor]] = tuple
        self._seen: set[tuple[str, int]] = set()  # Functions, by kind and number, that wrote no gradient
        self._warned: set[str] = set()

    def look_at(self, plan: Plan, is_ours: Callable[[], bool]) -> None:
        """Warn of problems that can be seen in the plan's graph, and hook Functions that were not seen before.

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
            # Functions are remembered by their kind and their number in the plan, not by node, because each forward
            # pass creates new nodes. One check of each Function is enough.
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
                    continue  # this is the call of another thread
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
            if is_ours():  # no lock is needed, because only one thread runs the nodes of a device
                before[:] = [(leaf, written(leaf)) for leaf in every.values() if leaf.device == device]
                begun = graph_tasks_so_far()

        def compare(sent: Gradients, _: Gradients) -> None:
            if not is_ours():
                return
            # If no backward pass ran inside, the written gradient is true: FSDP2 reduces gradients in such a Function.
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
    """Return the identity and the version of a leaf's gradient."""
    return (0, 0) if leaf.grad is None else (id(leaf.grad), version_of(leaf.grad))


def _may_add_a_constant(node: Node, slots: Collection[int]) -> bool:
    own = slot_shapes(node)
    if any(math.prod(own[nr]) == 1 for nr in slots):
        return False
    edges = ((child, nr) for child, nr in node.next_functions if child is not None and not hasattr(child, "variable"))
    return any(math.prod(slot_shapes(child)[nr]) == 1 for child, nr in edges)


def _entered(roots: Iterable[Node | None], arrivals: Arrivals) -> Iterator[tuple[Node, int]]:
    """Yield the slots, except those of leaves, at which the graph behind `roots` enters the planned graph."""
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


CAST = "ToCopyBackward0"
TURNS = ("TBackward0", CAST)  # nodes through which a weight can be followed without losing how it was multiplied


def watch_sent(
    node: Node, half: torch.dtype, tell: Callable[[Tensor], None], is_wanted: Callable[[], bool] = lambda: True
) -> None:
    """Call `tell` in each backward pass with the gradient of a product's input, in float32 before rounding.

    Nodes for which `_sent_by` returns None, and passes in which `is_wanted` returns False, are skipped. Call this
    after the registration of other hooks that change the incoming gradient. tell, is_wanted: functions that must not
    hold a node.
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
    """Return a function from the gradient of a product's output to the gradient of its input, both in float32.

    The other operand is the parameter, rounded to `half` as by autocast. Returns None if the other operand is not a
    parameter, because saved tensors are not read (a checkpoint allows only one read), and for a compiled region, whose
    computation is unknown. The returned function becomes a hook of the node and must not hold the node; otherwise the
    graph would never be freed.
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
    matrix = found[0] if found[1] else found[0].t()  # transposed once more, as in the backward pass
    return lambda g: g @ matrix if is_right else matrix @ g


def _operand(node: Node | None, half: torch.dtype) -> tuple[Tensor, bool] | None:
    """Return the parameter behind casts and transpositions, and whether it was transposed.

    The parameter has the values that are multiplied: rounded to `half`, in a float32 tensor.
    """
    is_transposed = False
    while node is not None and not hasattr(node, "variable"):
        if node.name() not in TURNS:
            return None
        is_transposed ^= node.name() != CAST
        node = node.next_functions[0][0]
    return None if node is None else (node.variable.detach().to(half).float(), is_transposed)
