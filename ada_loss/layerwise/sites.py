"""Sites where gradients are rounded: their links in the autograd graph, and their state from step to step.

A site is a place in the model where a tensor is rounded. A `GradientSite` belongs to one forward pass and links to the
sites behind it, towards the model's input. With branches="original" each branch is rounded separately. A `SiteState`
belongs to the training and holds scales and statistics.

`Schedule` counts backward passes, and decides whether a pass chooses all scales, completes them, or holds them. A
backward pass is a *graph task*; torch gives later tasks larger numbers. Each backward pass is a separate step, except a
pass that a checkpoint runs within another pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ada_loss.layerwise.constants import Constants
from ada_loss.layerwise.scale_kernels import CHOSEN, HIGHEST, LOWEST, U_MAX, pass_scale_on
from ada_loss.transforms import Product
from fpsim.scaling import (
    AMAX,
    Moments,
    RoundingSpec,
    amax_of,
    base_of,
    keep_memory_of,
    memory_of,
    on_device,
    round_differentiably,
)

__all__ = [
    "BETWEEN",
    "COMPLETE",
    "HEADROOM",
    "MEASURED",
    "UPDATE",
    "Entry",
    "GradientSite",
    "IncomingScale",
    "ProductEdge",
    "Schedule",
    "SiteState",
    "StepKind",
    "error_sites_behind",
    "link",
    "register",
    "round_branches",
    "sites_behind",
]

# A gradient may be up to this many times as large as the last one and still be rounded before its amax is known.
HEADROOM = 16.0
MEASURED = -1  # the index of the factor of a site's own gradient; products count from 0


class SiteState:
    """State of one site from step to step."""

    __slots__ = (
        "ceiling",
        "chosen",
        "factors",
        "factors_on_host",
        "held_log2_scale",
        "history",
        "last_amax",
        "last_step",
        "log2_scale",
        "moments",
        "rounded_moments",
        "uses",
    )

    def __init__(self) -> None:
        self.factors: dict[int, Tensor] = {}  # by product, or MEASURED; 0 means that the factor is not known yet
        self.factors_on_host: dict[int, Tensor] = {}  # copies of the factors, which arrive later from a GPU
        self.held_log2_scale: Tensor | None = None  # used between updates, unless the gradient would overflow
        self.ceiling = 0.0  # on the CPU, the largest magnitude that fits at the held scale; 0 where it is not known
        self.last_amax = 0.0  # the amax of the last gradient, if the ceiling is known
        self.last_step = 0  # the last step in which a gradient arrived
        self.uses = 0  # the number of the site's gradients in that step, counted in the state of the first of them
        self.history: Tensor | None = None  # the history of amax, for delayed scaling
        self.log2_scale: Tensor | None = None  # log2 of the scale at which the last gradient was rounded
        # Moments of the unrounded gradient, often only its amax; and moments of the rounded gradient, if a product
        # needs them.
        self.moments = keep_memory_of(torch.zeros(len(Moments._fields), dtype=torch.float64, device="cpu"))
        self.rounded_moments = keep_memory_of(torch.zeros_like(self.moments))
        self.chosen = keep_memory_of(torch.full((len(CHOSEN),), math.nan, dtype=torch.float64, device="cpu"))

    def has_headroom(self) -> bool:
        """Return True if the last gradient was so far below the ceiling that the next gradient should fit."""
        return 0.0 < self.last_amax * HEADROOM <= self.ceiling

    def knows(self, indices: Iterable[int]) -> bool:
        """Return True if these factors are known on the host. Does not wait for a pending copy from a GPU."""
        known = self.factors_on_host
        return all(index in known and memory_of(known[index])[0] != 0 for index in indices)

    def copy_to_host(self, index: int) -> None:
        """Start a copy of a factor to the host."""
        # In every step the host calls `knows`, which must not wait for the GPU.
        factor = self.factors[index]
        if factor.device.type == "cpu":
            self.factors_on_host[index] = factor
            return
        if index not in self.factors_on_host:
            self.factors_on_host[index] = keep_memory_of(
                torch.zeros(1, dtype=torch.float64, device="cpu", pin_memory=True)
            )
        self.factors_on_host[index].copy_(factor, non_blocking=True)

    def factor(self, index: int, device: torch.device) -> Tensor:
        """Return the cached factor of this index; a new factor is 0, which means unknown."""
        factor = self.factors.get(index)
        if factor is None:
            factor = self.factors[index] = keep_memory_of(torch.zeros(1, dtype=torch.float64, device=device))
        return factor

    def note_headroom(self, held: Tensor, limits: Tensor) -> None:
        """Record the ceiling and the amax from which the next step predicts whether its gradient fits (CPU only)."""
        if held.is_cpu:
            k, bounds = memory_of(held)[0], memory_of(limits)
            can_be_carried = bounds[LOWEST] <= k <= bounds[HIGHEST]
            self.ceiling = math.ldexp(bounds[U_MAX], -k) if can_be_carried else 0.0
            self.last_amax = float(memory_of(self.moments)[AMAX])

    def move_to(self, device: torch.device) -> None:
        """Move the state's tensors to the device of the site's gradient."""
        if device.type == "cuda":  # the memory is pinned; otherwise the host would wait for each copy
            self.factors_on_host = {i: keep_memory_of(f.pin_memory()) for i, f in self.factors_on_host.items()}
        self.factors = {index: factor.to(device) for index, factor in self.factors.items()}
        self.history = None if self.history is None else self.history.to(device)
        self.held_log2_scale = None if self.held_log2_scale is None else self.held_log2_scale.to(device)
        self.ceiling = 0.0  # only gradients on the CPU are rounded before their amax is known
        self.moments, self.rounded_moments = self.moments.to(device), self.rounded_moments.to(device)
        self.chosen = self.chosen.to(device)

    def as_plain(self) -> dict[str, Any]:
        """Return the state of a site for `state_dict`, as plain values; copies numbers to the host."""
        return {
            "factors": {index: float(f) for index, f in self.factors.items()},
            "kept": None if self.held_log2_scale is None else int(self.held_log2_scale),
            "amax": self.last_amax,
            "ceiling": self.ceiling,
            "reached": self.last_step,
            "history": None if self.history is None else self.history.tolist(),
            "log2_scale": None if self.log2_scale is None else int(self.log2_scale),
        }

    def load_plain(self, saved: Mapping[str, Any]) -> None:
        """Load saved values into tensors on the CPU. The held scale and its ceiling are not loaded here."""
        for index, factor in saved["factors"].items():
            self.factors[int(index)] = keep_memory_of(torch.tensor([factor], dtype=torch.float64, device="cpu"))
        self.factors_on_host = dict(self.factors)
        self.last_amax, self.last_step = saved["amax"], saved["reached"]
        if saved["history"] is not None:
            self.history = torch.tensor(saved["history"], dtype=torch.float64, device="cpu")
        if saved.get("log2_scale") is not None:
            self.log2_scale = torch.tensor([saved["log2_scale"]], device="cpu")


class IncomingScale(NamedTuple):
    """The scale that a consumer of a tensor sends to the tensor's site."""

    log2_scale: Tensor  # log2 of the scale that the consumer requests
    is_new: bool  # whether it was chosen in this step; False for a held scale
    must_measure: bool  # whether the product hides its operands, so that the factor must come from the gradient itself
    sender: GradientSite | ProductEdge
    amax: Tensor | None = None  # amax of the consumer's gradient, if it is known: with branches="original"


class ProductEdge:
    """One operand of a product, and the sites that the operand's gradient reaches."""

    __slots__ = ("channel", "index", "is_hidden", "other", "other_moments", "targets", "terms")

    def __init__(self, targets: list[GradientSite], product: Product, index: int) -> None:
        self.targets, self.terms, self.index = targets, product.terms, index
        self.channel = product.channel
        self.is_hidden = product.other is None
        # This takes no additional memory: autograd saves the operand for the backward pass anyway. The operand is
        # released once its moments are known, if nothing else of it is needed.
        self.other = None if product.other is None else product.other.detach()
        if self.other is not None and product.gain != 1:
            self.other = self.other * product.gain
        self.other_moments: Tensor | None = None


class GradientSite:
    """One tensor of one forward pass whose gradient is rounded, with the sources and targets of its scale."""

    __slots__ = (
        "dtype",
        "graph_task",
        "incoming",
        "is_linked",
        "is_selected",
        "key",
        "made_in",
        "passes_on_to",
        "predicted",
        "products",
        "role",
        "spec",
    )

    def __init__(
        self,
        name: str,
        role: str,
        spec: RoundingSpec,
        dtype: torch.dtype,
        is_selected: bool,
        is_linked: bool,
        made_in: int,
    ) -> None:
        self.key, self.role, self.spec, self.dtype = (name, role), role, spec, dtype
        self.is_selected = is_selected  # whether the products of its module are scaled
        self.is_linked = is_linked  # whether it links to other sites; between updates no site does
        self.made_in = made_in  # the graph task in which a checkpoint ran this forward pass, or -1
        self.products: list[ProductEdge] = []  # the operands whose gradients get a factor
        self.predicted: list[int] = []  # the indices of the products whose factor is computed here
        self.passes_on_to: list[GradientSite] = []  # sites that get its scale without a factor
        self.incoming: list[IncomingScale] = []
        self.graph_task = -1  # the graph task in which these scales arrived

    def receive(self, graph_task: int, incoming: IncomingScale) -> None:
        """Add the scale of one consumer, and drop the scales of an earlier, partial backward pass."""
        if self.graph_task != graph_task:
            self.graph_task, self.incoming = graph_task, []
        self.incoming.append(incoming)


class StepKind(Enum):
    """Kinds of steps."""

    UPDATE = "all scales are chosen"
    COMPLETE = "sites are linked: scales that are not known yet are chosen, others are held"
    BETWEEN = "between updates: sites are not linked, and all scales are held"


# These names are for speed: Python 3.11 takes 60 ns to look up a member of an Enum class.
UPDATE, COMPLETE, BETWEEN = StepKind


class Schedule:
    """Count steps, and hold the kind of the current step.

    update_every: the interval of updates, in steps.
    holds_scales: whether scales are held between updates, rather than factors.
    states: the states of all sites, a mapping that grows while the model trains.
    """

    def __init__(self, update_every: int, holds_scales: bool, states: Mapping[Any, SiteState]) -> None:
        self.step = 0
        self.kind = UPDATE
        self.last_update = -update_every  # the step after which the next update is counted
        self.is_all_known: bool | None = None  # whether all scales are known; None if this is not checked yet
        self._graph_task = -1  # the graph task of the current step
        self._update_every, self._holds_scales, self._states = update_every, holds_scales, states
        self._roots: dict[int, int] = {}  # the outermost task of each graph task within the current step

    def load(self, step: int, last_update: int) -> None:
        """Resume from a saved step."""
        self.step, self.last_update = step, last_update
        self.is_all_known = None

    def links_sites(self, graph_task: int) -> bool:
        """Return True if sites that are created now must be linked, because their step chooses scales.

        Their step is the current step for the forward pass of a checkpoint, and the next step otherwise.

        graph_task: the graph task in which the forward pass runs; -1 outside of a backward pass.
        """
        if not self._holds_scales:
            return True
        if graph_task >= 0 and self._roots.get(graph_task, graph_task) <= self._graph_task:  # a checkpoint's forward
            return self.kind is not BETWEEN
        if self.step + 1 - self.last_update >= self._update_every:
            return True
        if self.is_all_known is None:
            # A site without a gradient since the update may never get a gradient again. It is left out; otherwise sites
            # might be linked forever, waiting for its scale.
            reached = [s for s in self._states.values() if s.last_step >= self.last_update]
            self.is_all_known = all(s.held_log2_scale is not None and s.knows(s.factors_on_host) for s in reached)
        return not self.is_all_known

    def enter(self, graph_task: int, made_in: int, is_linked: bool) -> bool:
        """Record that a gradient reached a site; return True if the gradient begins a new step.

        graph_task: the graph task in which the gradient arrived.
        made_in: `made_in` of the site; a checkpoint's graph task belongs to the step that runs its forward pass.
        is_linked: whether the site is linked.
        """
        root = graph_task
        if made_in >= 0:
            root = self._roots.setdefault(graph_task, self._roots.get(made_in, made_in))
        # torch numbers graph tasks upwards: a larger number is a new backward pass, and a smaller one is an outer pass
        # that goes on after an inner one.
        begins = root > self._graph_task
        if begins:
            self._graph_task = root
            self.step += 1
            self._roots.clear()
            self.is_all_known = self.is_all_known or None  # ask again: unknown scales may be known by now
            is_due = self.step - self.last_update >= self._update_every
            self.kind = BETWEEN if not is_linked else UPDATE if is_due else COMPLETE
            if self.kind is UPDATE:
                self.last_update = self.step
        # The site comes from an earlier forward pass and cannot choose a scale, so the next step becomes an update too.
        if not is_linked and self.kind is UPDATE:
            self.last_update = self.step - self._update_every
        return begins


Entry = tuple[Any, int | None]  # a node of the graph and the number of one of its outputs
_KEY = "ada_loss"  # the key under which a node's metadata holds the sites of its outputs


def register(site: GradientSite, out: Tensor) -> None:
    """Store the site of `out` in its graph node, for `sites_behind`."""
    # The site is stored in the node's metadata, which lives as long as the graph. A table by id would need to know when
    # the graph is freed.
    node: Any = out.grad_fn
    node.metadata.setdefault(_KEY, {})[out.output_nr] = site


def link(site: GradientSite, out: Tensor, products: Iterable[Product]) -> dict[Entry, ProductEdge]:
    """Find the sites behind `out`: sites that a product reaches, and sites that get the scale without a factor.

    site: the site of `out`.
    out: an operation's result.
    products: the products of that operation whose operands' gradients get a factor.
    Returns the product edges by the graph entry of each operand.
    """
    edges: dict[Entry, ProductEdge] = {}
    for index, product in enumerate(products):
        entry = _entry_of(product.operand, out)
        targets = error_sites_behind(entry)
        if targets:
            edge = edges[entry] = ProductEdge(targets, product, index)
            site.products.append(edge)
            if not edge.is_hidden:
                site.predicted.append(index)
    reached = {id(target) for edge in site.products for target in edge.targets}
    others = {id(other): other for other in sites_behind([(out.grad_fn, None)]) if id(other) not in reached}
    site.passes_on_to = list(others.values())
    return edges


def _entry_of(operand: Tensor, out: Tensor) -> Entry:
    """Return the graph entry at which an operand's gradient arrives, behind the operation that returned `out`."""
    node: Any = operand.grad_fn
    if operand is not out:
        return node, operand.output_nr
    # The operation wrote to the operand, so the operand is the result itself. If it is a view, the rest of its base was
    # not multiplied, and no factor would be right for the whole base.
    if base_of(operand) is not None:
        return None, 0
    return node.next_functions[0]  # type: ignore[no-any-return]


def has_site(entry: Entry) -> bool:
    """Return True if the entry itself has a site."""
    node, nr = entry
    return node is not None and nr in node.metadata.get(_KEY, {})


def error_sites_behind(entry: Entry) -> list[GradientSite]:
    """Return the nearest sites behind an operand that round an error, not a parameter's gradient."""
    return [site for site in sites_behind([entry]) if site.role == "error"]


def sites_behind(entries: Iterable[Entry]) -> list[GradientSite]:
    """Return the nearest sites, searched from output to input.

    entries: where the search starts. With None as the output number, the search starts behind the node and ignores the
        sites of the node's outputs.
    """
    sites, seen, stack = [], set(), list(entries)
    while stack:
        node, nr = stack.pop()
        if node is None:
            continue
        site = None if nr is None else node.metadata.get(_KEY, {}).get(nr)
        if site is not None:
            sites.append(site)
        elif (node, nr) not in seen:
            seen.add((node, nr))
            stack.extend(node.next_functions)
    return sites


def round_branches(
    site: GradientSite, out: Tensor, operands: Iterable[Any], edges: Mapping[Entry, ProductEdge], constants: Constants
) -> None:
    """Round the gradient of each operand as it leaves an operation, before other consumers' gradients are added to it.

    site: the site of `out`.
    out: the operation's result.
    operands: the operation's arguments: tensors, sequences of tensors, and other objects, which are skipped.
    edges: the operation's products, by the graph entry of each operand.
    constants: the cache of limits.
    """
    senders: dict[Any, GradientSite | ProductEdge] = {**dict.fromkeys(_entries(operands), site), **edges}
    seen, stack = {out.grad_fn}, [out.grad_fn]
    while stack:
        consumer: Any = stack.pop()
        for index, entry in enumerate(consumer.next_functions):
            if entry in senders or has_site(entry):
                targets = error_sites_behind(entry)
                if targets:
                    consumer.register_hook(_RoundBranch(senders.get(entry, site), targets, index, constants))
            elif entry[0] is not None and entry[0] not in seen:
                seen.add(entry[0])
                stack.append(entry[0])


def _entries(operands: Iterable[Any]) -> Iterator[Entry]:
    """Yield the graph entries at which the gradients of operands arrive."""
    for x in operands:
        if isinstance(x, Tensor) and x.grad_fn is not None:
            yield x.grad_fn, x.output_nr
        elif isinstance(x, tuple | list):
            yield from _entries(x)


class _RoundBranch:
    """Hook on a consumer that rounds the gradient of one of its inputs at the scale of this branch."""

    __slots__ = ("constants", "index", "sender", "targets")

    def __init__(
        self, sender: GradientSite | ProductEdge, targets: list[GradientSite], index: int, constants: Constants
    ) -> None:
        self.sender, self.targets, self.index, self.constants = sender, targets, index, constants

    def __call__(self, gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...] | None:
        branch, first = gradients[self.index], self.targets[0]
        sent = next((incoming for incoming in first.incoming if incoming.sender is self.sender), None)
        if branch is None or sent is None:
            return None
        limits = self.constants.limits_of(first.spec, first.dtype, branch.device)
        log2_scale = torch.empty_like(sent.log2_scale)
        chosen = limits.new_empty(len(CHOSEN))  # not passed to a recorder
        on_device(pass_scale_on, sent.log2_scale, amax_of(branch), limits, log2_scale, chosen)
        rounded = round_differentiably(branch, first.spec, log2_scale)
        new = sent._replace(log2_scale=log2_scale, amax=amax_of(rounded)[AMAX : AMAX + 1])
        for target in self.targets:
            # The new scale replaces the scale that was sent. If the operation takes an operand more than once, later
            # scales are added.
            sent_before = (i for i, a in enumerate(target.incoming) if a.sender is self.sender and a.amax is None)
            at = next(sent_before, len(target.incoming))
            target.incoming[at : at + 1] = [new]
        return (*gradients[: self.index], rounded, *gradients[self.index + 1 :])
