"""branches="original": where a tensor has several consumers, each branch is rounded before they are added."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ada_loss.layerwise.constants import Constants
from ada_loss.layerwise.graph import Entry, error_sites_behind, has_site
from ada_loss.layerwise.scale_kernels import CHOSEN, pass_scale_on
from ada_loss.layerwise.sites import GradientSite, ProductEdge
from fpsim.scaling import AMAX, amax_of, on_device, round_differentiably

__all__ = ["round_branches"]


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
