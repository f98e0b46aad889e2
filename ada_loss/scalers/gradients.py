"""Operations on the gradients of an optimizer: collect, unscale and check, clip, sum over processes.

They use the private `torch._amp_*` and `torch._foreach_*`, as `torch.amp.GradScaler` does: one call for many tensors,
without a copy to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

__all__ = [
    "Gradients",
    "all_reduce_",
    "clip_to_norm_",
    "gradients_of",
    "join_overflows_",
    "largest_of",
    "one_on",
    "parameters_of",
    "total_of",
    "unscale_and_check_",
]

Gradients = dict[tuple[torch.device, torch.dtype], list[Tensor]]


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters of all groups."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def gradients_of(optimizer: Optimizer) -> Gradients:
    """Return lists of gradients by device and dtype. A sparse gradient is coalesced, and its values are listed."""
    # torch's foreach kernels take lists of tensors with one device and dtype.
    gradients: Gradients = {}
    for parameter in parameters_of(optimizer):
        grad = parameter.grad
        if grad is None:
            continue
        if grad.is_sparse:
            # It is coalesced before the check, because the sum of two finite values of one index may overflow.
            grad = parameter.grad = grad.coalesce()
            grad = grad.values()
        gradients.setdefault((grad.device, grad.dtype), []).append(grad)
    return gradients


def unscale_and_check_(
    gradients: Gradients, inverse_on: Callable[[torch.device], Tensor], found_inf: dict[torch.device, Tensor]
) -> None:
    """Multiply gradients by the inverse of the scale, in place, and record on which devices a gradient is not finite.

    gradients: the gradients of one optimizer.
    inverse_on: a function that returns the inverse on a device, as 0-d float32.
    found_inf: for each device a 0-d float32, which becomes 1 if a gradient there is not finite; new devices are added.
    """
    for (device, _), grads in gradients.items():
        flag = found_inf.get(device)
        if flag is None:
            flag = found_inf[device] = torch.zeros((), dtype=torch.float32, device=device)
        # One pass over all gradients of a device. The flag stays on the device, so the host does not wait.
        torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inverse_on(device))


def one_on(device: torch.device) -> Tensor:
    """Return an inverse of 1, with which `unscale_and_check_` leaves gradients unchanged."""
    return torch.ones((), dtype=torch.float32, device=device)


def largest_of(gradients: Gradients) -> list[Tensor]:
    """Return the largest magnitude of each gradient, 0-d; gradients without elements are left out."""
    some = [grad for grads in gradients.values() for grad in grads if grad.numel()]
    return list(torch._foreach_norm(some, ord=float("inf"))) if some else []


def clip_to_norm_(gradients: Gradients, max_norm: float) -> Tensor | None:
    """Clip gradients to a global norm, in place, and return the norm before clipping; None if there is no gradient."""
    every = [grad for grads in gradients.values() for grad in grads]
    if not every:
        return None
    norm = torch.nn.utils.get_total_norm(every)
    # The 1e-6 and the clamp are as in torch.nn.utils.clip_grad_norm_. The gradients are always multiplied, so that the
    # host need not compare the norm.
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for (device, _), grads in gradients.items():
        torch._foreach_mul_(grads, coefficient.to(device, non_blocking=device.type != "cpu"))
    return norm


def total_of(tensors: Iterable[Tensor]) -> Tensor | None:
    """Return the sum of 0-d tensors, on the device of the first tensor; None if there are no tensors."""
    total: Tensor | None = None
    for each in tensors:
        total = each if total is None else total + each.to(total.device, non_blocking=not total.is_cpu)
    return total


def all_reduce_(parameters: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Sum gradients over a process group, in one collective for each device and type.

    A gradient that is missing on some ranks counts as zero there, and a gradient that is missing on all ranks stays
    None. For this, the same collective also counts the ranks that have each gradient.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    for alike in kinds.values():
        if any(p.grad is not None and p.grad.is_sparse for p in alike):
            raise ValueError(
                "A sparse gradient reached an Updater with a process group, which adds dense ones. "
                "Set sparse=False, or leave out process_group."
            )
        # The flags are sent together with the gradients, because every rank must enter the same number of collectives.
        present = torch.tensor([float(p.grad is not None) for p in alike]).to(alike[0])
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in alike]
        packed = torch.cat([present, *(g.reshape(-1) for g in flat)])
        dist.all_reduce(packed, group=group)
        counts, *sums = packed.split([len(alike), *(p.numel() for p in alike)])
        for parameter, count, total in zip(alike, counts.tolist(), sums):
            if count:
                parameter.grad = total.view_as(parameter)


def join_overflows_(kept: Iterable[Tensor], summed: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Make gradients NaN on every rank if some rank has a gradient in `kept` that is not finite.

    All ranks then skip the step.

    kept: the parameters whose gradients are not summed: each rank has its own.
    summed: the parameters whose gradients are equal on all ranks. Their gradients become NaN too, because a rank may
        have no parameter of `kept`.
    """
    kept, summed = list(kept), list(summed)
    # Instead of a flag, the gradients are set to NaN. The check of every rank then finds the overflow, with any scaler.
    grads = [p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in kept if p.grad is not None]
    lost = torch.zeros(1, device=summed[0].device)
    for grad in grads:
        lost += (~torch.isfinite(grad).all()).to(lost.device)
    dist.all_reduce(lost, group=group)
    for parameter in (*kept, *summed):
        if parameter.grad is not None and not parameter.grad.is_sparse:
            parameter.grad.masked_fill_((lost > 0).to(parameter.grad.device), float("nan"))
