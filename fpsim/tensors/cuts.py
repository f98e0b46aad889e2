"""Cuts of a tensor into blocks that share a scale."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fpsim.checks import shown
from fpsim.formats.blocks import BlockFormat, as_format
from fpsim.kernels import blocks

__all__ = [
    "BlockAxes",
    "Cut",
    "axis_pair",
    "block_axes",
    "of_each_element",
    "require_no_axis",
    "runs_elsewhere",
    "second_amaxes",
    "second_amaxes_along",
    "second_of_each_element",
]

MAGNITUDE, MASK = int(blocks.MAGNITUDE), int(blocks.MASK)


class BlockAxes(NamedTuple):
    """The cut of a contiguous tensor: (outer, R, middle, C, inner) in blocks of r by c along R and C."""

    outer: int
    rows: int
    middle: int
    columns: int
    inner: int
    r: int
    c: int

    @property
    def blocks(self) -> tuple[int, int, int, int, int]:
        """Number of blocks along each of the five axes."""
        return self.outer, -(-self.rows // self.r), self.middle, -(-self.columns // self.c), self.inner


def axis_pair(axis: int | tuple[int, int] | None) -> tuple[int, int | None]:
    """Return the axis along which blocks run, and the axis of a tile's rows. Raises ValueError for anything else."""
    if isinstance(axis, tuple):
        if len(axis) != 2:
            raise ValueError(f"axis={shown(axis)} is not a pair. Expected: one axis, or (across, axis) for tiles.")
        return axis[1], axis[0]
    return (-1 if axis is None else axis), None


def require_no_axis(axis: object, fmt: object) -> None:
    """Raise ValueError for an axis that was given with a format of single numbers."""
    if axis is not None:
        # A value that is not a format at all raises here.
        as_format(fmt)
        raise ValueError(f"axis={shown(axis)} was given with {shown(fmt)}, whose numbers share no scale. Omit axis.")


class Cut(NamedTuple):
    """A cut into blocks, and a given scale or None: arguments of `rounded_blocks`."""

    axis: int = -1
    across: int | None = None
    scale: Tensor | None = None


def block_axes(shape: torch.Size, tile: tuple[int, int], axis: int, across: int | None) -> BlockAxes:
    """Return the cut of a tensor of this shape, with blocks along `axis` and a tile's rows along `across`.

    Raises ValueError for axes that the shape does not have.
    """
    rank = max(len(shape), 1)
    axis = _axis(axis, shape, "axis")
    r, c = tile
    if c == 0 and r == 0:
        return BlockAxes(1, 1, 1, math.prod(shape), 1, 1, max(math.prod(shape), 1))
    # For a row without elements the block length is one, which avoids a division by zero; the row has no blocks.
    c = c or max(shape[axis] if shape else 1, 1)
    sizes = list(shape) or [1]
    if r == 1:
        return BlockAxes(math.prod(sizes[:axis]), 1, 1, sizes[axis], math.prod(sizes[axis + 1 :]), 1, c)
    if rank < 2:
        raise ValueError(
            f"Tiles of {r} x {c} were given for a tensor of shape {tuple(shape)}. Expected: two axes or more, or a "
            f"format whose blocks run along one."
        )
    across = (axis - 1 if axis else 1) if across is None else _axis(across, shape, "across")
    if across == axis:
        raise ValueError(
            f"axis and across are both {axis}. The rows of a tile run along another axis than its columns."
        )
    # R is the axis that comes first in memory, so that a kernel walks through tiles of either orientation in the same
    # way.
    first, second = sorted((axis, across))
    sides = (r, c) if across < axis else (c, r)
    return BlockAxes(
        math.prod(sizes[:first]),
        sizes[first],
        math.prod(sizes[first + 1 : second]),
        sizes[second],
        math.prod(sizes[second + 1 :]),
        *sides,
    )


def runs_elsewhere(f: BlockFormat, x: Tensor, axis: int) -> bool:
    """Return whether `axis` has to be moved last before the cut, since parts with a second scale must be contiguous."""
    rank = x.dim()
    if isinstance(f.tensor_scale, bool) or type(axis) is not int or not -rank <= axis < rank:
        # An invalid axis is refused when the tensor is cut.
        return False
    return axis % rank != rank - 1


def second_amaxes(x: Tensor, f: BlockFormat, counted: int) -> Tensor:
    """Return the patterns of the amaxes that determine second scales: int32, of shape (rows, second scales in a row).

    x: a contiguous float32 with elements, in blocks along the last axis. counted: as in `counted_magnitude` of the
    kernels.
    """
    patterns = x.view(torch.int32).view(-1, x.shape[-1] if x.dim() else 1) & MAGNITUDE
    patterns = torch.where((patterns == MASK) | (patterns > counted), 0, patterns)
    if isinstance(f.tensor_scale, str):
        return patterns.amax(-1, keepdim=True)
    length = int(f.tensor_scale)
    return torch.nn.functional.pad(patterns, (0, -patterns.shape[-1] % length)).unflatten(-1, (-1, length)).amax(-1)


def second_amaxes_along(x: Tensor, f: BlockFormat, counted: int, axis: int) -> Tensor:
    """Return the amaxes that determine second scales, as float32: one for each part of `x` along `axis`."""
    if not x.dim():
        return second_amaxes(x, f, counted).view(torch.float32).view(())
    moved = x.movedim(axis, -1).contiguous()
    return second_amaxes(moved, f, counted).view(torch.float32).view(*moved.shape[:-1], -1).movedim(-1, axis)


def of_each_element(scales: Tensor, f: BlockFormat, shape: torch.Size, axis: int, across: int | None) -> Tensor:
    """Expand the scales of blocks, as `scales_of` returns them, to the elements of a tensor of this shape.

    If the tensor has a single scale, the result has no dimension.
    """
    if f.block == "tensor" or not shape:
        return scales
    (r, c), along = f.tile, axis % len(shape)
    scales = scales.repeat_interleave(c or shape[along], along).narrow(along, 0, shape[along])
    if r != 1:
        other = ((along - 1) if along else 1) if across is None else across % len(shape)
        scales = scales.repeat_interleave(r, other).narrow(other, 0, shape[other])
    return scales


def second_of_each_element(second: Tensor, f: BlockFormat, shape: torch.Size, axis: int) -> Tensor:
    """Expand second scales, or their amaxes, from the parts of a tensor along `axis` to its elements."""
    if isinstance(f.tensor_scale, bool) or not shape:
        return second
    along = axis % len(shape)
    length = shape[along] if f.tensor_scale == "row" else int(f.tensor_scale)
    return second.repeat_interleave(length, along).narrow(along, 0, shape[along])


def _axis(axis: int, shape: torch.Size, name: str) -> int:
    rank = max(len(shape), 1)
    if isinstance(axis, bool) or not isinstance(axis, int) or not -rank <= axis < rank:
        raise ValueError(
            f"{name}={shown(axis)} is not an axis of a tensor of shape {tuple(shape)}. Expected: {-rank} to {rank - 1}."
        )
    return axis % rank
