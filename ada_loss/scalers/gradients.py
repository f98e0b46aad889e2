"""What is done to the gradients of an optimizer: collect, clip, add up over processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

__all__ = [
    "Gradients",
    "OnDevice",
    "all_reduce_",
    "clip_to_norm_",
    "gradients_of",
    "one_on",
    "parameters_of",
    "total_of",
]

OnDevice = Callable[[torch.device], Tensor]
Gradients = dict[tuple[torch.device, torch.dtype], list[Tensor]]


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def gradients_of(optimizer: Optimizer) -> Gradients:
    """The gradients, each kind in one list for one call; of a sparse one its values, each index once."""
    found: Gradients = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is None:
                continue
            if grad.is_sparse:
                # the sum of two finite values of one index may overflow: only the sum tells
                grad = parameter.grad = grad.coalesce()
                grad = grad._values()
            kind = grad.device, grad.dtype
            if kind in found:
                found[kind].append(grad)
            else:
                found[kind] = [grad]
    return found


def clip_to_norm_(gradients: Gradients, max_norm: float) -> Tensor | None:
    """Clip to a global norm, in place, and give the norm there was; None where there is no gradient."""
    every = [grad for grads in gradients.values() for grad in grads]
    if not every:
        return None
    norm = torch.nn.utils.get_total_norm(every)
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for (device, _), grads in gradients.items():
        torch._foreach_mul_(grads, coefficient.to(device, non_blocking=True))
    return norm


def total_of(found: Iterable[Tensor]) -> Tensor | None:
    """The sum of 0-d tensors, on the device of the first; None of none."""
    total: Tensor | None = None
    for each in found:
        total = each if total is None else total + each.to(total.device, non_blocking=True)
    return total


def one_on(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


def all_reduce_(parameters: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Add gradients over the group, one collective for each device and type; missing here counts as zero.

    A gradient that is missing on every rank stays missing: a count of those that have it travels along.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    for alike in kinds.values():
        if any(p.grad is not None and p.grad.is_sparse for p in alike):
            raise ValueError(
                "A sparse gradient came to an Updater with a process group, which adds dense ones. "
                "Set sparse=False, or leave out process_group."
            )
        present = torch.tensor([float(p.grad is not None) for p in alike]).to(alike[0])
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in alike]
        packed = torch.cat([present, *(g.reshape(-1) for g in flat)])
        dist.all_reduce(packed, group=group)
        counts, *sums = packed.split([len(alike), *(p.numel() for p in alike)])
        for parameter, count, total in zip(alike, counts.tolist(), sums):
            if count:
                parameter.grad = total.view_as(parameter)
