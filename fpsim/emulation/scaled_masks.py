"""Masks: float32's extremes, where attention may not look, in formats of which code cannot ask the extremes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fpsim.emulation.casts import WIDE_DTYPES
from fpsim.emulation.marks import is_roundable
from fpsim.kernels.statistics import AMAX
from fpsim.tensors.moments import amax_of
from fpsim.tensors.spec import RoundingSpec
from fpsim.torch_internals import is_traced
from fpsim.torch_modes import is_plain

__all__ = ["keep_masks", "masks_to_scale"]


def masks_to_scale(spec: RoundingSpec | None, args: tuple[Any, ...]) -> Tensor | None:
    """Which numbers are masks, where a call multiplies or divides a tensor by a number; None where none can be lost.

    A mask that was scaled would be a number, and become infinite or saturate. Where torch has a name for the format,
    masks are the format's own extremes, and scaling them is as it is in native code.
    """
    if spec is None or spec.dtype is not None or float(spec.fmt.largest) > 2.0**100:
        return None
    tensors = [x for x in args if isinstance(x, Tensor)]
    if len(tensors) != 1 or not is_roundable(tensors[0]) or tensors[0].dtype not in WIDE_DTYPES:
        return None
    x = tensors[0].detach()
    largest, is_now = torch.finfo(x.dtype).max, is_plain(x)
    if not (is_now or is_traced(x)):
        return None  # under a transform, which shows tensors without memory
    if is_now and x.is_cpu and float(amax_of(x)[AMAX]) < largest:  # in one pass; on a card the processor would wait
        return None
    return x.abs() == largest


def keep_masks(out: Any, masks: Tensor | None) -> Any:
    """Make masks again of what came from masks, in the memory of `out` and below autograd.

    `(scores + mask) / 8` has a row of equal masks then, where native code has a row of equal numbers.
    """
    if masks is not None and out.dtype in WIDE_DTYPES and out.shape == masks.shape:
        with torch.no_grad():
            largest = torch.finfo(out.dtype).max
            out.data.copy_(torch.where(masks & out.isfinite(), out.sign() * largest, out))
    return out
