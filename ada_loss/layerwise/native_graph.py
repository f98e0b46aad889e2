"""The plan of a native backward pass: the nodes of a loss's graph that multiply, join and unscale gradients.

A node of autograd's graph has slots, where gradients arrive. Each slot belongs to a cell, which holds the power of two
that the slot's gradients carry. A plan holds no tensors except the parameters, which it identifies as objects.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ada_loss.layerwise.native_powers import Power
from fpsim.scaling import convolution_of, is_python_function, key_of, slot_dtypes, slot_shapes

__all__ = ["Arrivals", "Cell", "Entry", "Exit", "Factor", "Gradients", "Meeting", "Plan", "plan_of"]

Node = Any  # torch.autograd.graph.Node; its classes have members that the base class does not declare
# Names of torch's classes of nodes. A test compares these tables with the nodes that operations create in the installed
# torch.
MATRICES = ("AddmmBackward0", "MmBackward0", "BmmBackward0", "BaddbmmBackward0", "LinearBackward0")
CONVOLUTION = "ConvolutionBackward0"
INSIDE = ("ScaledDotProduct", "CompiledFunctionBackward", "CudnnRnn", "MkldnnRnn")  # prefixes; products within one node
GATE = "MulBackward0"
PRODUCTS = frozenset((*MATRICES, CONVOLUTION, GATE))
PASSED = (
    "TBackward0",
    "ToCopyBackward0",
    "TransposeBackward0",
    "ViewBackward0",
    "PermuteBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ExpandBackward0",
)
REENTRANT = "CheckpointFunctionBackward"


@dataclass(eq=False, slots=True)
class Cell:
    """The power of two that a group of gradients carries in the running pass.

    sites: the last sites that multiplied the gradients, one on each branch; empty for the true gradient before any
        factor.
    log2: the exponent of the power of two; None until the first of the gradients arrives.
    """

    sites: frozenset[str] = frozenset()
    log2: Power | None = None


Gradients = tuple[Tensor | None, ...]
# the cells of the slots of each node that is not a leaf, by `key_of(node)`
Arrivals = dict[tuple[str, int], dict[int, Cell]]


@dataclass(eq=False, slots=True)
class Meeting:
    """A slot whose parts belong to different cells. Parts are held until the last part of this pass arrives."""

    cell: Cell
    expected: int = 0
    held: list[tuple[Tensor | None, Power]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Factor:
    """A site where a gradient is multiplied.

    parameter: the parameter that multiplies the gradient, also as a view or cast; None if the operand is no parameter.
    terms: how many products add up to one element of the result.
    is_wide: whether the gradient arrives in a dtype wider than half, and may exceed the range of half.
    rows: how many elements of the gradient add up to one element of the bias's gradient; 0 without a bias.
    """

    site: str
    parameter: Tensor | None
    terms: int
    is_wide: bool
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """A node whose incoming gradients are scaled to the power in the cell `out`. slots: the cells of its slots."""

    node: Node
    slots: dict[int, Cell]
    out: Cell
    factor: Factor | None


@dataclass(frozen=True, slots=True)
class Exit:
    """A node whose outgoing gradients are divided (at an edge to a leaf) or held (at an edge to a meeting)."""

    node: Node
    cell: Cell
    edges: list[tuple[int, Meeting | Tensor]]


@dataclass(frozen=True, slots=True)
class Plan:
    """All hooks of a graph, in the order of the backward pass."""

    root: Node
    cells: list[Cell]
    entries: list[Entry]
    exits: list[Exit]
    meetings: list[tuple[Meeting, list[Node]]]  # with their producers, once for each edge
    leaves: list[tuple[Tensor, frozenset[str]]]  # with the sites whose factors their gradients have carried
    carried: list[Tensor]  # leaves to which every edge brings a gradient that carries a factor
    sites: list[str]  # in the order of the backward pass, including sites that need no hook
    arrivals: Arrivals
    functions: list[tuple[Node, dict[int, Cell]]]  # Functions written in Python that get gradients with a factor
    has_half: bool  # whether a gradient of the half dtype arrives anywhere


def plan_of(
    root: Node, names: dict[int, str], half: torch.dtype = torch.float16, ones: Collection[str] = frozenset()
) -> Plan:
    """Plan the backward pass that begins at `root`.

    names: the names of parameters, by id. half: the dtype whose range gradients must fit. ones: sites whose factor is
        1.
    Raises NotImplementedError for a reentrant checkpoint, whose inner backward pass escapes the hooks of this graph.
    """
    edges, arriving = _edges_of(root)
    has_half = any(half in slot_dtypes(node) for node in edges)
    true, plan = Cell(log2=0), Plan(root, [], [], [], [], [], [], [], {}, [], has_half)
    producers: dict[Node, dict[int, list[tuple[Node, int, Cell]]]] = defaultdict(lambda: defaultdict(list))
    exits: dict[Node, Exit] = {}
    used: dict[str, int] = defaultdict(int)

    def new_cell(sites: frozenset[str]) -> Cell:
        plan.cells.append(Cell(sites))
        return plan.cells[-1]

    def leave(node: Node, cell: Cell, edge: int, end: Meeting | Tensor) -> None:
        exits.setdefault(node, Exit(node, cell, [])).edges.append((edge, end))

    # Kahn's order: a node comes after all its producers, so the cells of its slots are known.
    ready = [root]
    while ready:
        node = ready.pop()
        if hasattr(node, "variable"):
            # A leaf is no meeting: each producer divides its part of the gradient, and a meeting would divide it again.
            cells = [cell for parts in producers[node].values() for *_, cell in parts]
            plan.leaves.append((node.variable, frozenset(s for cell in cells for s in cell.sites)))
            if all(cell is not true for cell in cells):
                plan.carried.append(node.variable)
            continue
        kind = node.name()
        if kind == REENTRANT:
            raise NotImplementedError(
                "Got torch.utils.checkpoint(..., use_reentrant=True), whose backward pass no hook sees. "
                "Use use_reentrant=False."
            )
        slots = {} if node is not root else {0: true}
        for nr, parts in producers[node].items():
            # A slot is a meeting only if its parts carry different powers. Otherwise torch itself adds the parts.
            slots[nr] = parts[0][2]
            if len(parts) > 1 and any(cell is not slots[nr] for _, _, cell in parts):
                meeting = Meeting(new_cell(frozenset(s for *_, cell in parts for s in cell.sites)))
                slots[nr] = meeting.cell
                plan.meetings.append((meeting, [producer for producer, _, _ in parts]))
                for producer, edge, cell in parts:
                    leave(producer, cell, edge, meeting)
        plan.arrivals[key_of(node)] = slots
        if is_python_function(node) and any(cell.sites for cell in slots.values()):
            plan.functions.append((node, slots))
        factor = _factor(node, kind, edges[node], slots, names, half, used)
        if factor is not None:
            plan.sites.append(factor.site)
            factor = None if factor.site in ones else factor  # its name stays taken, so that other names do not change
        cells = [*slots.values()]
        cell = cells[0]
        if factor is not None or (len(cells) > 1 and any(other is not cell for other in cells)):
            passed = frozenset(s for other in cells for s in other.sites)
            cell = new_cell(passed if factor is None else frozenset((factor.site,)))
            plan.entries.append(Entry(node, slots, cell, factor))
        for edge, (child, nr) in enumerate(edges[node]):
            if child is None:
                continue
            producers[child][nr].append((node, edge, cell))
            # The division is at the edge, not at the leaf: the parts of its gradient may carry different powers.
            if hasattr(child, "variable") and cell is not true:
                leave(node, cell, edge, child.variable)
            arriving[child] -= 1
            if not arriving[child]:
                ready.append(child)
    plan.exits.extend(exits.values())
    return plan


def _edges_of(root: Node) -> tuple[dict[Node, tuple[tuple[Node, int], ...]], dict[Node, int]]:
    """Return the edges of every reachable node, and the number of edges that arrive at each node."""
    # Every node is kept in `edges`, because torch creates a new Python object for a node without a reference.
    edges: dict[Node, tuple[tuple[Node, int], ...]] = {}
    arriving: dict[Node, int] = defaultdict(int)
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node in edges:
            continue
        edges[node] = tuple((child, nr) for child, nr in node.next_functions)
        for child, _ in edges[node]:
            if child is not None:
                arriving[child] += 1
                waiting.append(child)
    return edges, arriving


def parameter_behind(node: Node | None) -> Tensor | None:
    """Return the leaf behind views and casts; None if there is none."""
    # The search follows the graph and does not read the node's saved tensors, because a checkpoint allows only one read
    # of them.
    while node is not None and not hasattr(node, "variable"):
        if node.name() not in PASSED:
            return None
        node = node.next_functions[0][0]
    return None if node is None else node.variable


def _factor(
    node: Node,
    kind: str,
    edges: tuple[tuple[Node, int], ...],
    slots: dict[int, Cell],
    names: dict[int, str],
    half: torch.dtype,
    used: dict[str, int],
) -> Factor | None:
    arrives = slot_dtypes(node)
    is_product = kind in PRODUCTS
    if not is_product and not kind.startswith(INSIDE) and not _narrows(edges, slots, arrives, half):
        return None
    children = [child for child, _ in edges]
    # Complex numbers consist of two float32 numbers: they need no factor, and have no moments from which to choose a
    # factor.
    if not any(children) or any(arrives[nr].is_complex for nr in slots):
        return None
    rows, terms, word = 0, 1, kind.removesuffix("Backward0")
    parameter: Tensor | None = None
    behind = [parameter_behind(child) for child in children] if is_product else []
    if kind in MATRICES:
        at = next((i for i in reversed(range(len(behind))) if (p := behind[i]) is not None and p.dim() > 1), None)
        # If no parameter can be found, as in attention, the factor follows from the gradient alone.
        if at is not None:
            parameter, word, shape = behind[at], "linear", slot_shapes(node)[0]
            terms = shape[-1] if at == len(behind) - 1 else shape[-2]  # x @ w, or w @ x
        if kind == "AddmmBackward0" and (bias := behind[0]) is not None and bias.dim() == 1:
            rows = slot_shapes(node)[0][0]
    elif kind == CONVOLUTION:
        parameter, word = behind[1], "convolution"
        if parameter is not None:
            child, nr = edges[1]  # the view's shape is needed, which may differ from the parameter's
            shape, (groups, is_transposed) = slot_shapes(child)[nr], convolution_of(node)
            out = shape[1] if is_transposed else shape[0] // groups
            terms = out * math.prod(shape[2:])
        if behind[2] is not None:
            shape = slot_shapes(node)[0]
            rows = math.prod(shape) // shape[1]
    elif kind == GATE and any(p is not None for p in behind):
        others = [i for i, child in enumerate(children) if child is not None and behind[i] is None]
        if not others:  # only leaves lie behind it, so no gradient goes on that could underflow
            return None
        parameter, word = next(p for p in behind if p is not None), "mul"
        child, nr = edges[others[0]]
        terms = math.prod(slot_shapes(node)[0]) // max(math.prod(slot_shapes(child)[nr]), 1)
    elif kind == GATE and not _narrows(edges, slots, arrives, half):
        return None
    module = names.get(id(parameter), "").rpartition(".")[0]
    base = f"{module}:{word}"
    used[base] += 1
    site = base if used[base] == 1 else f"{base}#{used[base] - 1}"
    return Factor(site, parameter, max(terms, 1), all(arrives[nr] is not half for nr in slots), rows)


def _narrows(
    edges: tuple[tuple[Node, int], ...], slots: dict[int, Cell], arrives: list[torch.dtype], half: torch.dtype
) -> bool:
    # Dtypes are compared, not the names of casts: autograd's engine itself casts the gradient of `x32 + y16`, after the
    # node has run.
    for nr in slots:
        if arrives[nr] is torch.float32:
            return any(c is not None and not hasattr(c, "variable") and slot_dtypes(c)[nr] is half for c, nr in edges)
    return False
