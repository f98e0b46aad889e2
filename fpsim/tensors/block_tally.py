"""Tally of a rounding in blocks: their scales, and elements at the ends of their range."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from fpsim.formats.blocks import BlockFormat, Choose
from fpsim.formats.codebook import Codebook
from fpsim.formats.fixed_point import FixedPoint
from fpsim.kernels import block_tally, block_teams
from fpsim.kernels.blocks import BlockPlan
from fpsim.kernels.statistics import BLOCK_FIELDS, BLOCKS, LARGEST_SCALE, SMALLEST_SCALE, ZERO_BLOCKS
from fpsim.tensors.cuts import BlockAxes, Cut, block_axes, runs_elsewhere
from fpsim.tensors.launch import parts_of, run_on_card, run_parts
from fpsim.tensors.shared_scales import amax_pattern, block_plan, choose, in_parts, shared_numbers, take
from fpsim.tensors.spec import BlockSpec, address_of, saturated_from

__all__ = ["blocks_between"]

_LARGEST = torch.iinfo(torch.int64).max


def blocks_between(before: Tensor, after: Tensor, spec: BlockSpec, cut: Cut) -> Tensor:
    """Tally the blocks of a rounding: the BLOCK_FIELDS of `statistics`, without a copy to the host.

    before, after: floating tensors of the same shape and device, with any strides; they are converted to float32.
    cut: the cut of the rounding.
    Returns eight int64 on the same device.
    """
    x, r = (t.detach().to(torch.float32, memory_format=torch.contiguous_format).contiguous() for t in (before, after))
    if x.numel() == 0:
        return _row(x.device)
    if runs_elsewhere(spec.fmt, x, cut.axis):
        return blocks_between(x.movedim(cut.axis, -1), r.movedim(cut.axis, -1), spec, Cut(-1))
    if not isinstance(spec.fmt.scale_rule, Choose):
        return _of_one_rule(x, x, r, spec, cut)
    choice = choose(x, spec, cut.axis, cut.across)
    rows = []
    for number, candidate in enumerate(spec.candidates):
        # `own` is zero in the blocks that use another candidate, so that these blocks count only as zero blocks.
        own = torch.zeros_like(x)
        take(choice, number, x, own)
        rows.append(_of_one_rule(own, x, r, candidate, cut, spec.fmt))
    total = joined(torch.stack(rows))
    # Every candidate's tally counts all blocks, including those of other candidates, which count as zero blocks.
    total[BLOCKS] = rows[0][BLOCKS]
    total[ZERO_BLOCKS] -= (len(rows) - 1) * rows[0][BLOCKS]
    return total


def _of_one_rule(
    x: Tensor, tensor: Tensor, r: Tensor, spec: BlockSpec, cut: Cut, of: BlockFormat | None = None
) -> Tensor:
    """Tally contiguous float32 blocks by one scale rule.

    tensor: the tensor whose amax determines the second scale. of: as in `block_plan`.
    """
    plan, axes = block_plan(spec, of), block_axes(x.shape, spec.fmt.tile, cut.axis, cut.across)
    shared = shared_numbers(tensor, spec.fmt, plan, cut.scale)
    if isinstance(spec.fmt.tensor_scale, bool):
        shared = torch.cat([shared[:2], shared.new_full((1,), -1)])
    if spec.fmt.block == "tensor":
        shared[2] = amax_pattern(x, plan)
        axes = in_parts(axes, x.is_cuda)
    limits = limits_of(spec)
    if x.is_cuda:
        return _on_cuda(x, r, axes, plan, shared, limits)
    parts = len(parts_of(x.numel()))
    total = math.prod(axes.blocks)
    rows = torch.stack([_row(x.device)] * parts)
    words = np.array(axes, np.int64), np.array(plan.parameters, np.int64), np.array(limits, np.float64)
    dims, parameters, ends = (w.ctypes.data for w in words)
    begins = [total * i // parts for i in range(parts + 1)]
    addresses = address_of(x), address_of(r), dims, parameters, shared.data_ptr(), ends
    calls = [(*addresses, rows[i].data_ptr(), begins[i], begins[i + 1]) for i in range(parts)]
    run_parts(block_tally.cpu_loop(plan.scale_shape, plan.kind), calls, x, r, rows, shared, words)
    return joined(rows)


def joined(rows: Tensor) -> Tensor:
    """Join several rows of BLOCK_FIELDS, (n, BLOCK_FIELDS), into one row."""
    total = rows.sum(0)
    total[SMALLEST_SCALE], total[LARGEST_SCALE] = rows[:, SMALLEST_SCALE].amin(), rows[:, LARGEST_SCALE].amax()
    return total


def _row(device: torch.device) -> Tensor:
    row = torch.zeros(BLOCK_FIELDS, dtype=torch.int64, device=device)
    row[SMALLEST_SCALE] = _LARGEST
    return row


def _on_cuda(
    x: Tensor, r: Tensor, axes: BlockAxes, plan: BlockPlan, shared: Tensor, limits: tuple[float, float, float]
) -> Tensor:
    from fpsim.compiling.card import array_words

    row = _row(x.device)
    words = address_of(x), address_of(r), *axes, *plan.parameters, shared.data_ptr()
    row_words = array_words(row.data_ptr(), (BLOCK_FIELDS,), 8)
    loop = block_teams.cuda_tally(plan.scale_shape, plan.kind, block_teams.is_small(axes))
    grid, team = block_teams.grid_of(axes, loop.threads)
    run_on_card(loop, x, grid, (*words, *row_words, *limits, team))
    return row


@cache
def limits_of(spec: BlockSpec) -> tuple[float, float, float]:
    """Return the bound of subnormal elements, and the magnitudes from which elements and scales saturate."""
    element = spec.fmt.element
    # The first limit is halfway between the smallest normal and the largest subnormal value, because elements are
    # multiplied by scales that round. Fixed point has no subnormals.
    normal = 0.0
    if not isinstance(element, FixedPoint | Codebook):
        normal = element.smallest_normal - math.ldexp(0.5, element.min_ulp_exponent)
    return normal, saturated_from(element), saturated_from(spec.fmt.scale)
