"""How sites find one another in the autograd graph, and branches="original": each branch is rounded on its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ada_loss.layerwise.constants import Constants
from ada_loss.layerwise.scale_kernels import CHOSEN, pass_scale_on
from ada_loss.layerwise.sites import GradientSite, ProductEdge
from ada_loss.transforms import Product
from fpsim.scaling import AMAX, amax_of, base_of, on_device, round_differentiably

__all__ = ["Entry", "error_sites_behind", "link", "register", "round_branches", "sites_behind"]

Entry = tuple[Any, int | None]  # a node of the graph and the number of one of its outputs
_KEY = "ada_loss"  # under which a node's metadata holds the sites of its outputs


def register(site: GradientSite, out: Tensor) -> None:
    """Store the site of `out` in its graph node, for `sites_behind`."""
    node: Any = out.grad_fn
    node.metadata.setdefault(_KEY, {})[out.output_nr] = site


def link(site: GradientSite, out: Tensor, products: Iterable[Product]) -> dict[Entry, ProductEdge]:
    """Find the sites behind `out`: those that a product reaches, and those that its scale is passed on to.

    site: that of `out`.
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
    """The graph entry at which an operand's gradient arrives, behind the operation that returned `out`."""
    node: Any = operand.grad_fn
    if operand is not out:
        return node, operand.output_nr
    if base_of(operand) is not None:  # the operation wrote to a part of another tensor, whose rest it did not multiply
        return None, 0
    return node.next_functions[0]  # type: ignore[no-any-return]  # the operation wrote to its first operand


def has_site(entry: Entry) -> bool:
    """True if the entry itself has a site."""
    node, nr = entry
    return node is not None and nr in node.metadata.get(_KEY, {})


def error_sites_behind(entry: Entry) -> list[GradientSite]:
    """The nearest sites behind an operand that round an error, not a parameter's gradient."""
    return [site for site in sites_behind([entry]) if site.role == "error"]


def sites_behind(entries: Iterable[Entry]) -> list[GradientSite]:
    """The nearest sites, searched from output to input.

    entries: where to start. An output number of None looks behind a node, whatever sites its own outputs have.
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

    site: that of `out`.
    out: the operation's result.
    operands: its arguments: tensors, sequences of tensors, and others, which are skipped.
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
    """The graph entries at which the gradients of operands arrive."""
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
        chosen = limits.new_empty(len(CHOSEN))  # no recorder is told
        on_device(pass_scale_on, sent.log2_scale, amax_of(branch), limits, log2_scale, chosen)
        rounded = round_differentiably(branch, first.spec, log2_scale)
        new = sent._replace(log2_scale=log2_scale, amax=amax_of(rounded)[AMAX : AMAX + 1])
        for target in self.targets:
            # it replaces what was sent, and is added to it from the second time on that an operand is taken
            sent_before = (i for i, a in enumerate(target.incoming) if a.sender is self.sender and a.amax is None)
            at = next(sent_before, len(target.incoming))
            target.incoming[at : at + 1] = [new]
        return (*gradients[: self.index], rounded, *gradients[self.index + 1 :])
