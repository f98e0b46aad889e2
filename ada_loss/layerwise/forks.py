"""Where gradients of several consumers meet, as in the original: each is rounded at a scale before they add up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ada_loss.layerwise.graph import errors_behind, is_entry
from ada_loss.layerwise.scale_kernels import pass_scale_on
from ada_loss.layerwise.sites import Edge, Place
from ada_loss.rules.layer import AMAX
from fpsim.scaling import amax_of, on_device, round_differentiably

__all__ = ["round_shares"]


def round_shares(place: Place, node: Any, operands: Iterable[Any], edges: Iterable[tuple[Any, Edge]]) -> None:
    """Round what leaves an operation towards its operands, before anything is added to it.

    place: of the operation's result, which `node` of the graph made. edges: those of its products, each with the
    entry into the graph behind its operand.
    """
    senders: dict[Any, Place | Edge] = {**dict.fromkeys(_entries(operands), place), **dict(edges)}
    seen, stack = {node}, [node]
    while stack:
        consumer = stack.pop()
        for index, entry in enumerate(consumer.next_functions):
            if entry in senders or is_entry(*entry):
                targets = errors_behind(entry)
                if targets:
                    consumer.register_hook(_RoundBranch(senders.get(entry, place), targets, index))
            elif entry[0] is not None and entry[0] not in seen:
                seen.add(entry[0])
                stack.append(entry[0])


def _entries(operands: Iterable[Any]) -> Iterator[tuple[Any, int]]:
    """Where the gradients of operands enter the graph behind them."""
    for x in operands:
        if isinstance(x, Tensor) and x.grad_fn is not None:
            yield x.grad_fn, x.output_nr
        elif isinstance(x, tuple | list):
            yield from _entries(x)


class _RoundBranch:
    """A hook behind a consumer: rounds its share of a gradient at its own scale, before the shares are added."""

    __slots__ = ("index", "sender", "targets")

    def __init__(self, sender: Place | Edge, targets: list[Place], index: int) -> None:
        self.sender, self.targets, self.index = sender, targets, index

    def __call__(self, shares: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...] | None:
        share, first = shares[self.index], self.targets[0]
        sent = next((arrival for arrival in first.arrivals if arrival.sender is self.sender), None)
        if share is None or sent is None:
            return None
        log2_scale, limits = torch.empty_like(sent.log2_scale), first.engine.limits_of(first, share)
        on_device(pass_scale_on, sent.log2_scale, amax_of(share), limits, log2_scale, torch.empty_like(limits))
        rounded = round_differentiably(share, first.spec, log2_scale)
        arrival = sent._replace(log2_scale=log2_scale, amax=amax_of(rounded)[AMAX : AMAX + 1])
        for target in self.targets:  # in the place of what was sent, or beside it where an operand is taken twice
            open_ = (i for i, a in enumerate(target.arrivals) if a.sender is self.sender and a.amax is None)
            at = next(open_, len(target.arrivals))
            target.arrivals[at : at + 1] = [arrival]
        return (*shares[: self.index], rounded, *shares[self.index + 1 :])
