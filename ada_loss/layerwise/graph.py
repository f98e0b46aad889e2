"""Search for the sites in the autograd graph of a forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ada_loss.layerwise.sites import GradientSite, ProductEdge
from ada_loss.transforms import Product
from fpsim.scaling import base_of

__all__ = ["Entry", "error_sites_behind", "has_site", "link", "register", "sites_behind"]

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
