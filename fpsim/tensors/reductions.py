"""Sums over ranks: each rank has a part, and every addition is rounded to the format in which parts are sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fpsim.checks import refuse, require_word, shown
from fpsim.formats.floats import as_float_format
from fpsim.tensors.launch import rounded
from fpsim.tensors.spec import RoundingSpec, require_floating, rounding_spec, under_transform
from fpsim.torch_modes import layers_behind

__all__ = ["REDUCTIONS", "all_reduce", "reduced"]

SEGMENT_BYTES = 1 << 20  # gloo's largest segment, allreduce.cc: kMaxSegmentSize of a ring
SEGMENTS = 2  # the fewest segments that a rank has

Add = Callable[[Tensor, Tensor], Tensor]


def _linear(parts: Sequence[Tensor], add: Add, _: int) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = add(total, part)
    return total


def _tree(parts: Sequence[Tensor], add: Add, _: int) -> Tensor:
    level = [*parts]
    while len(level) > 1:
        pairs = [add(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) // 2 * 2 :]  # if their number is odd, the last one is added at a later level
    return level[0]


def _ring(parts: Sequence[Tensor], add: Add, size: int) -> Tensor:
    """Add up chunk c of the flat tensor from rank c - 1 downwards, as measured with gloo's all_reduce."""
    ranks, count, shape = len(parts), parts[0].numel(), parts[0].shape
    # A chunk is a whole number of segments: its length decides at which rank the sum of an element begins.
    segments = max(SEGMENTS, -(-count * size // (ranks * SEGMENT_BYTES)))
    chunk = segments * -(-count // (segments * ranks))
    flat = [part.reshape(-1) for part in parts]
    chunks = []
    for c in range(min(ranks, -(-count // max(chunk, 1)))):
        of_ranks = [flat[(c - 1 - hop) % ranks][c * chunk : (c + 1) * chunk] for hop in range(ranks)]
        chunks.append(_linear(of_ranks, add, size))
    return torch.cat(chunks).view(shape) if chunks else parts[0].clone()


REDUCTIONS: dict[str, Callable[[Sequence[Tensor], Add, int], Tensor]] = {
    "ring": _ring,
    "tree": _tree,
    "linear": _linear,
}


def reduced(parts: Sequence[Tensor], spec: RoundingSpec, order: str) -> Tensor:
    """Return, below autograd, the sum of float32 parts of one shape, whose numbers are already values of the format."""
    is_float32 = spec.fmt == as_float_format("fp32") and spec.rounding == "nearest_even"

    def add(a: Tensor, b: Tensor) -> Tensor:
        # The float64 sum is exact enough: the bits that it drops are below half a last place of either number.
        return a + b if is_float32 else rounded(a.double() + b.double(), spec).float()

    return REDUCTIONS[order](parts, add, max(1, math.ceil(int(spec.fmt.bits) / 8)))


def all_reduce(
    tensors: Sequence[Tensor], fmt: Any = "fp32", order: str = "ring", rounding: str = "nearest_even"
) -> Tensor:
    """Return the sum of the tensors of all ranks, as a collective that sends numbers in a format computes it.

    Each rank's tensor is rounded to the format, and so is the result of each addition on the way.

    Args:
        tensors: one tensor of each rank, all of one shape, floating dtype and device. For a bucket, this is the flat
            tensor that is reduced: the position of an element in it decides at which rank its sum begins.
        fmt: the format in which numbers are sent, a format of single numbers.
        order: "ring", "tree" or "linear". "ring" is the order of gloo's all_reduce: the flat tensor is cut into as many
            chunks as there are ranks; the sum of chunk c begins with rank c - 1, and ranks go down. In "tree",
            neighbours are added, then the neighbouring sums. In "linear", the sum begins with rank 0.
        rounding: "nearest_even" or "stochastic".

    Returns:
        The sum, in the dtype of the tensors; no gradient passes. DDP and FSDP divide each rank's gradient by the number
        of ranks before the sum.

    Raises:
        ValueError: for no tensors, unequal tensors, or an unknown order.
        TypeError: for anything other than floating tensors.

    >>> halves = [torch.tensor([256.0, 1.0]), torch.tensor([1.0, 256.0]), torch.tensor([1.0, 1.0])]
    >>> all_reduce(halves, "bf16", "linear"), all_reduce(halves, "bf16", "linear").equal(sum(halves))
    (tensor([256., 256.]), False)
    """
    # Sums are float64, which is not exact enough for the other roundings.
    require_word("rounding", rounding, ("nearest_even", "stochastic"))
    spec = rounding_spec(fmt, rounding)
    if not isinstance(order, str) or order not in REDUCTIONS:
        raise ValueError(refuse(f"Unknown order {shown(order)}", REDUCTIONS, word=order))
    if not isinstance(tensors, Sequence) or not tensors:
        raise ValueError(f"tensors={shown(tensors)}. Expected: a list of the tensors of all ranks, at least one.")
    for rank, x in enumerate(tensors):
        require_floating(x, f"tensors[{rank}]")
        if any(True for _ in layers_behind(x)):
            raise under_transform("all_reduce")
        if (x.shape, x.dtype, x.device) != (tensors[0].shape, tensors[0].dtype, tensors[0].device):
            raise ValueError(
                f"tensors[{rank}] has shape {tuple(x.shape)}, {x.dtype} on {x.device}, and tensors[0] "
                f"{tuple(tensors[0].shape)}, {tensors[0].dtype} on {tensors[0].device}. Expected: equal ones."
            )
    wide = (x.detach().contiguous() if x.dtype is torch.float64 else x.detach().float() for x in tensors)
    parts = [rounded(x, spec).float() for x in wide]
    return reduced(parts, spec, order).to(tensors[0].dtype)
