"""How places find one another in the graph that a forward pass makes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ada_loss.layerwise.sites import Place

__all__ = ["errors_behind", "is_entry", "register", "sources"]

_KEY = "ada_loss"  # under which a node of the graph keeps the places of its outputs


def register(place: Place, node: Any, nr: int) -> None:
    """Let others find a place: that of output `nr` of a node of the graph."""
    node.metadata.setdefault(_KEY, {})[nr] = place


def is_entry(node: Any, nr: int) -> bool:
    """Whether there is a place right there."""
    return node is not None and nr in node.metadata.get(_KEY, {})


def errors_behind(entry: tuple[Any, int]) -> list[Place]:
    """The nearest places behind an operand where an error is rounded, and no parameter's gradient."""
    return [place for place in sources([entry]) if place.role == "error"]


def sources(edges: Iterable[tuple[Any, int | None]]) -> list[Place]:
    """The nearest places against the direction of the forward pass.

    An output number of None looks behind a node, whatever places its own outputs have.
    """
    found, seen, stack = [], set(), list(edges)
    while stack:
        node, nr = stack.pop()
        if node is None:
            continue
        place = None if nr is None else node.metadata.get(_KEY, {}).get(nr)
        if place is not None:
            found.append(place)
        elif (node, nr) not in seen:
            seen.add((node, nr))
            stack.extend(node.next_functions)
    return found
