"""Powers of two that gradients carry: host numbers, or tensors where the host would have to wait for a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ada_loss.layerwise.scale_kernels import NORMAL, quotient, sum_with_headroom, with_headroom
from fpsim.scaling import amax_of, memory_of, on_device

__all__ = ["HALF", "HEADROOM", "Power", "Ratio", "aligned", "from_to", "largest", "meet", "on", "times"]

# log2 of a power of two: a number, or (1,) int64 on the device of the gradients that carry it
Power = int | Tensor
# the multiplier of a gradient: its exponent as a number, or the factor itself, (1,) float32 on its device
Ratio = int | Tensor
# The number of powers of two of headroom that a sum of branches leaves for the products and weight gradients behind it.
# Without this headroom, products behind a fork with a gate of 1e-6 overflowed.
HEADROOM = 10
HALF = torch.float16


def on(power: Power, device: torch.device) -> Tensor:
    """Return the exponent as a tensor on the device; a number is written there without waiting for the device."""
    if isinstance(power, Tensor):
        return power.to(device, non_blocking=True)
    return torch.full((1,), power, dtype=torch.int64, device=device)


def largest(powers: Sequence[Power], device: torch.device) -> Power:
    """Return the largest power, as a tensor if one of the powers is a tensor."""
    numbers = [power for power in powers if isinstance(power, int)]
    result: Power | None = max(numbers, default=None)
    for power in powers:
        if isinstance(power, Tensor) and power is not result:
            result = power if result is None else torch.maximum(on(result, device), on(power, device))
    assert result is not None
    return result


def from_to(came: Power, goes: Power, device: torch.device) -> Ratio:
    """Return the ratio from the power `came` to the power `goes`; the number 0 if the powers are equal."""
    if came is goes:
        return 0
    if isinstance(came, int) and isinstance(goes, int):
        return goes - came
    factor = torch.empty(1, dtype=torch.float32, device=device)
    on_device(quotient, on(goes, device), on(came, device), factor)
    return factor


def times(g: Tensor, ratio: Ratio) -> Tensor:
    """Return the gradient times the ratio, rounded once, in its dtype; the same tensor if the ratio is the number 0."""
    if isinstance(ratio, Tensor):
        if g.dtype is not HALF:
            return g * ratio.to(g.device, non_blocking=True).view(())
        # On a GPU torch would cast a 0-d tensor to float16 before the product; this kernel multiplies in float32.
        result = g.clone()
        infinite = torch.zeros(1, dtype=torch.float32, device=g.device)  # the kernel's flag, which nobody reads
        torch._amp_foreach_non_finite_check_and_unscale_([result], infinite, ratio)
        return result
    if ratio == 0:
        return g
    # The ratio is applied in steps of float32's normal powers of two: 2.0**ratio is a Python float, but the product is
    # computed in float32.
    while abs(ratio) > NORMAL:
        step = NORMAL if ratio > 0 else -NORMAL
        g, ratio = g * 2.0**step, ratio - step
    return g * 2.0**ratio


ROOM = torch.finfo(HALF).max / 2.0**HEADROOM


def aligned(gradients: Iterable[Tensor | None], came: dict[int, Power]) -> tuple[list[Tensor | None], Power]:
    """Bring the gradients of a node's results to one power of two; return the gradients and the power.

    The power is the largest of the gradients' powers, lowered until each float16 gradient keeps its headroom. came: the
    powers, by the index of the gradient.
    """
    result, powers = [*gradients], [*came.values()]
    first = powers[0]
    if all(p is first or (isinstance(p, int) and p == first) for p in powers):
        return result, first
    device = next(g.device for g in result if g is not None)
    top = largest(powers, device)
    for nr, power in came.items():
        g = result[nr]
        if g is None or g.dtype is not HALF or not g.numel() or power is top:
            continue
        moments = amax_of(g.detach())
        if isinstance(top, int) and isinstance(power, int) and g.is_cpu:
            found = [0]
            with_headroom([top], [power], memory_of(moments), [ROOM], found)
            top = found[0]
        else:
            out = torch.empty(1, dtype=torch.int64, device=g.device)
            limit = torch.full((1,), ROOM, dtype=torch.float64, device=g.device)
            on_device(with_headroom, on(top, g.device), on(power, g.device), moments, limit, out)
            top = out
    for nr, power in came.items():
        if (g := result[nr]) is not None:
            result[nr] = times(g, from_to(power, top, g.device))
    return result, top


def meet(parts: Sequence[tuple[Tensor, Power]]) -> tuple[Tensor, Power]:
    """Add gradients at the largest of their powers of two, lowered until the sum keeps its headroom, in their dtype.

    parts: each gradient and its power.
    """
    # float16 gradients are added in float32, because their sum may exceed float16 before it is lowered. Other gradients
    # are added in their dtype.
    g, top = parts[0]
    is_half, device = g.dtype is HALF, g.device
    top = largest([power for _, power in parts], device)
    total: Tensor | None = None
    for part, power in parts:
        wide = times(part.float() if is_half else part, from_to(power, top, device))
        total = wide if total is None else total + wide
    assert total is not None
    if not is_half or not total.numel():
        return total, top
    moments = amax_of(total.detach())
    power = top
    if isinstance(top, int) and total.is_cpu:
        found = [0]
        sum_with_headroom([top], memory_of(moments), [ROOM], found)
        power = found[0]
    else:
        power = torch.empty(1, dtype=torch.int64, device=device)
        limit = torch.full((1,), ROOM, dtype=torch.float64, device=device)
        on_device(sum_with_headroom, on(top, device), moments, limit, power)
    return times(total, from_to(top, power, device)).to(HALF), power
