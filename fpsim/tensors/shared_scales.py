"""Rounding to formats whose blocks share a scale: how a tensor is cut into blocks, and who rounds them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fpsim.checks import shown
from fpsim.formats.blocks import BlockFormat, as_format
from fpsim.kernels import block_amax, block_dense, block_loops, block_teams, blocks
from fpsim.kernels.codebook_tables import any_plan
from fpsim.kernels.core import BINARY32, make_plan, scale_limits
from fpsim.kernels.moments import partial_words
from fpsim.tensors.launch import (
    NO_KEY_ADDRESS,
    PARALLEL_FROM,
    key_arguments,
    on_card,
    parts_of,
    rounded,
    run_on_card,
    run_parts,
)
from fpsim.tensors.noise import new_key_for
from fpsim.tensors.spec import BlockSpec, address_of, rounding_spec

if TYPE_CHECKING:
    from fpsim.compiling.card import CudaKernel

__all__ = ["BlockAxes", "Cut", "block_scales", "recorded_amax", "rounded_blocks"]

_RULES = {"floor": blocks.FLOOR, "ceil": blocks.CEIL, "even": blocks.EVEN, "nearest": blocks.NEAREST}


@cache
def block_plan(spec: BlockSpec) -> blocks.BlockPlan:
    """The integers that a kernel takes, see the indices in kernels/blocks.py."""
    f, element = spec.fmt, spec.element
    words = element.fmt, element.rounding, element.overflow, element.random_bits
    plans = [any_plan(*words, width, element.variant) for width in (32, 64)]
    if plans[0].shape != plans[1].shape:  # a code book that is searched in one container
        plans = [any_plan(*words, width, element.variant, search=True) for width in (32, 64)]
    scale = make_plan(f.scale, "nearest_even", "saturate", None, 32)
    largest = BINARY32.bits(f.element.largest)
    emax = math.frexp(f.element.largest)[1] - 1
    least_shift, most_shift = scale_limits(f.element, 32)
    # powers of two that a float32 can hold: the element's smallest value, and its largest, times the scale
    least = max(f.scale.min_exponent, -BINARY32.bias - 22 - f.element.min_ulp_exponent)
    most = min(math.frexp(f.scale.largest)[1] - 1, BINARY32.bias - emax)
    if not f.has_power_scale:
        kind = blocks.DIVIDED if f.scale.mantissa_bits == BINARY32.mantissa_bits else blocks.NARROW
        kind = blocks.QUOTIENT if f.scale_rule == "absmax" else kind
    else:
        kind = blocks.POWER if f.gain == 1 else blocks.GAINED
    numbers = (
        *plans[0].numbers,
        *plans[1].numbers,
        *scale.numbers,
        _RULES.get(str(f.scale_rule), 0),
        emax,
        largest & ((1 << 23) - 1),
        1 << max(22 - f.element.mantissa_bits, 0),
        least,
        most,
        least_shift,
        most_shift,
        largest,
        BINARY32.bits(f.gain),
        BINARY32.bits(f.scale.largest),
        BINARY32.bits(f.least_amax),
        *_of_infinity(f, spec.overflow),
    )
    assert len(numbers) == blocks.PARAMETERS
    assert plans[0].shape == plans[1].shape
    return blocks.BlockPlan(plans[0].rule, plans[0].shape, scale.shape, kind, numbers)


def _of_infinity(f: BlockFormat, overflow: str) -> tuple[int, int, int, int]:
    """The parameters COUNTED, INFINITE_SCALE, INFINITE_EXPONENT and INFINITE_ELEMENT of a plan."""
    every_nan, infinity, nan = int(blocks.MAGNITUDE), int(blocks.INFINITY), int(blocks.NAN)
    if f.is_delayed:  # whose scale is that of before: an element is on its own
        is_nan = f.nonfinite == "nan" and f.element.has_nan and overflow == "saturate"
        return every_nan, BINARY32.bits(1.0), 0, nan if is_nan else 0
    if f.nonfinite == "nan":
        return every_nan, nan, blocks.NAN_EXPONENT, 0
    return infinity, BINARY32.bits(f.scale_of_infinity), math.frexp(f.scale_of_infinity)[1] - 1, 0


class BlockAxes(NamedTuple):
    """How a contiguous tensor is cut: (outer, R, middle, C, inner) in blocks of r by c along R and C."""

    outer: int
    rows: int
    middle: int
    columns: int
    inner: int
    r: int
    c: int

    @property
    def blocks(self) -> tuple[int, int, int, int, int]:
        """How many blocks there are along each."""
        return self.outer, -(-self.rows // self.r), self.middle, -(-self.columns // self.c), self.inner


def axis_pair(axis: int | tuple[int, int] | None) -> tuple[int, int | None]:
    """Along which axis blocks run, and along which the rows of a tile. Raises ValueError for what is neither."""
    if isinstance(axis, tuple):
        if len(axis) != 2:
            raise ValueError(f"axis={shown(axis)} is not a pair. Expected: one axis, or (across, axis) for tiles.")
        return axis[1], axis[0]
    return (-1 if axis is None else axis), None


def require_no_axis(axis: object, fmt: object) -> None:
    """Raise ValueError for an axis that was given with a format of single numbers."""
    if axis is not None:
        as_format(fmt)  # which raises for what is not a format at all
        raise ValueError(f"axis={shown(axis)} was given with {shown(fmt)}, whose numbers share no scale. Omit axis.")


class Cut(NamedTuple):
    """How a tensor is cut into blocks, and the scale that it comes with: arguments of `rounded_blocks`."""

    axis: int = -1
    across: int | None = None
    scale: Tensor | None = None


def block_axes(shape: torch.Size, tile: tuple[int, int], axis: int, across: int | None) -> BlockAxes:
    """How a tensor of this shape is cut, blocks running along `axis` and a tile's rows along `across`.

    Raises ValueError for axes that the shape does not have.
    """
    rank = max(len(shape), 1)
    axis = _axis(axis, shape, "axis")
    r, c = tile
    if c == 0 and r == 0:
        return BlockAxes(1, 1, 1, math.prod(shape), 1, 1, max(math.prod(shape), 1))
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


def _axis(axis: int, shape: torch.Size, name: str) -> int:
    rank = max(len(shape), 1)
    if isinstance(axis, bool) or not isinstance(axis, int) or not -rank <= axis < rank:
        raise ValueError(
            f"{name}={shown(axis)} is not an axis of a tensor of shape {tuple(shape)}. Expected: {-rank} to {rank - 1}."
        )
    return axis % rank


def amax_pattern(x: Tensor, plan: blocks.BlockPlan) -> Tensor:
    """The pattern of the largest magnitude of a contiguous tensor, an int64 on its device.

    Masks do not count. An infinity does, and NaN where it makes a scale NaN.
    """
    if x.is_cuda:
        return _amax_on_card(x, _saturates(plan))[block_amax.FOUND]
    return torch.tensor(_amax_on_cpu(x, plan)[0])


def recorded_amax(x: Tensor, spec: BlockSpec) -> Tensor:
    """The largest magnitude of a floating tensor that later steps take a scale from, a float32 of no dimension."""
    source = x.detach().to(torch.float32, memory_format=torch.contiguous_format).contiguous()
    return amax_pattern(source, block_plan(spec)).to(torch.int32).view(torch.float32)


def _saturates(plan: blocks.BlockPlan) -> int:
    return block_amax.SATURATES if plan.parameters[blocks.COUNTED] == blocks.INFINITY else 0


def _amax_on_card(x: Tensor, asked: int, largest: float = 1.0) -> Tensor:
    """What one pass over a contiguous tensor finds, int64 at the places of kernels.block_amax. asked: its flags."""
    from fpsim.compiling.card import array_words

    out = torch.full((block_amax.PLACES,), -1, dtype=torch.int64, device=x.device)
    address, words = address_of(x), array_words(address_of(out), (block_amax.PLACES,), 8)
    arguments = address, x.numel(), int(address % 16 == 0), BINARY32.bits(largest), asked, *words
    run_on_card(block_amax.cuda_amax(), x, partial_words(x.numel(), 4)[0], arguments)
    return out


def _amax_on_cpu(x: Tensor, plan: blocks.BlockPlan) -> tuple[int, int]:
    """The same, and 1 where there is a mask, an infinity or NaN, else 0."""
    loop, address, counted = block_loops.cpu_amax().native, address_of(x), plan.parameters[blocks.COUNTED]
    if x.numel() < PARALLEL_FROM:
        found = loop(address, x.numel(), counted)
        return found % block_loops.HAS_SPECIALS, found // block_loops.HAS_SPECIALS
    parts = [(address + first * 4, length, counted) for first, length in parts_of(x.numel())]
    each = run_parts(loop, parts, x)
    return max(found % block_loops.HAS_SPECIALS for found in each), max(each) // block_loops.HAS_SPECIALS


def rounded_blocks(
    x: Tensor,
    spec: BlockSpec,
    axis: int = -1,
    across: int | None = None,
    key: Tensor | None = None,
    scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """A rounded copy of `x`, below autograd, whose blocks share scales.

    x: float32, float64, float16 or bfloat16, any shape and strides. Float64 is rounded once where scales are powers of
        two, and becomes float32 first where they are not.
    axis: along which blocks run: the contraction axis of a product.
    across: along which the rows of a tile run; None takes the axis before `axis`, or the next for the first one.
    key: of the noise; None draws one.
    scale: of delayed scaling, a float32 of one element on the device of `x`: what elements are multiplied by.
    out: a contiguous float32 of the shape and device of `x` to write to, which shares no memory with it.
    Raises ValueError for axes that `x` does not have.
    """
    return _run(x, spec, axis, across, key, scale, False, out)[0]


def block_scales(x: Tensor, spec: BlockSpec, axis: int = -1, across: int | None = None) -> Tensor:
    """The scales of the blocks of `x`, a value of the block being element * scale.

    A tensor's own second scale is not among them. float32; `x`'s shape with each axis that blocks run along divided by
    their length, rounded up.
    """
    scales = _run(x, spec, axis, across, None, None, True)[1]
    assert scales is not None
    if spec.fmt.block == "tensor" or not x.dim():
        return scales.flatten()[0]
    (r, c), shape, along = spec.fmt.tile, list(x.shape), axis % x.dim()
    shape[along] = -(-shape[along] // (c or shape[along]))
    if r != 1:
        other = (along - 1 if along else 1) if across is None else across
        shape[other] = -(-shape[other] // r)
    return scales.reshape(shape)


def shared_numbers(source: Tensor, f: BlockFormat, plan: blocks.BlockPlan, scale: Tensor | None) -> Tensor:
    """Two int64: what stands in for every block's own amax, and the pattern of the tensor's; -1 for neither.

    On the CPU a third: whether there are masks or infinities where the first is given, -1 where nobody looked.

    source: a contiguous float32.
    scale: of delayed scaling.
    """
    divides = plan.kind == blocks.DIVIDED
    if source.is_cuda:
        if asked := asked_of(f, plan):
            return _amax_on_card(source, asked, f.element.largest)[:2]
        shared = torch.full((2,), -1, dtype=torch.int64, device=source.device)
        if scale is not None:
            shared[0] = scale.detach().reshape(()).view(torch.int32).long()
        return shared
    number = has_specials = -1
    if scale is not None:
        number = int(scale.detach().reshape(()).view(torch.int32))
    elif f.block == "tensor":
        number, has_specials = _amax_on_cpu(source, plan)
        if divides and number >= blocks.INFINITY:
            number = BINARY32.bits(f.scale_of_infinity)  # which is NaN or 1, as its inverse
        elif divides:
            number = _multiplier_on_cpu(number, f.element.largest)
    of_tensor = _amax_on_cpu(source, plan)[0] if f.tensor_scale else -1
    # from numpy: a default device of torch's is not meant for it, and it takes a third of the time of torch.tensor
    return torch.from_numpy(np.array((number, of_tensor, has_specials)))


def asked_of(f: BlockFormat, plan: blocks.BlockPlan) -> int:
    """The flags of kernels.block_amax for what the blocks of a tensor share; 0 where no pass over it is needed."""
    asked = block_amax.OF_TENSOR if f.tensor_scale else 0
    if f.block == "tensor" and not f.is_delayed:
        asked |= block_amax.MULTIPLIER if plan.kind == blocks.DIVIDED else block_amax.AMAX
    return asked | _saturates(plan) if asked else 0


def in_parts(axes: BlockAxes, is_cuda: bool) -> BlockAxes:
    """A tensor that is one block, cut into parts that have its scale."""
    return axes._replace(c=min(1 << (8 if is_cuda else 12), axes.columns))


def _run(
    x: Tensor,
    spec: BlockSpec,
    axis: int,
    across: int | None,
    key: Tensor | None,
    scale: Tensor | None,
    wants_scales: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    f = spec.fmt
    if f.is_delayed != (scale is not None):
        raise ValueError(
            f"{f} takes its scale from earlier steps, and none was given. Expected: as an operand of products in a "
            f"quantised model, which remembers them; here, the same format with scale_rule='amax'."
            if f.is_delayed
            else f"A scale was given for {f}, which computes its own. Omit scale."
        )
    if type(axis) is not int or (across is not None and type(across) is not int):
        block_axes(x.shape, f.tile, axis, across)  # which raises for what is not an axis, and may have no hash
    plan, axes, work = _kept(spec, x.shape, axis, across, x.is_cuda)
    source = x.detach()
    if x.dtype is torch.float64:
        source = _narrowed(source, plan.kind == blocks.POWER)
    elif x.dtype is not torch.float32 or not x.is_contiguous():
        source = source.to(torch.float32, memory_format=torch.contiguous_format).contiguous()
    out = torch.empty_like(source) if out is None else out
    scales = None
    if source.numel():
        shares = scale is not None or f.tensor_scale or f.block == "tensor" or x.is_cuda
        shared = shared_numbers(source, f, plan, scale) if shares else _NOTHING_SHARED
        if wants_scales:
            scales = torch.empty(axes.blocks, device=x.device)
        if spec.element.rounding == "stochastic" and key is None:
            key = new_key_for(x)
        if isinstance(work, Launch):
            _run_on_card(work, plan, key, source, out, shared, scales)
        else:
            assert work is not None
            _run_on_cpu(work, key, source, out, shared, scales)
    if x.dtype is torch.float64:
        return torch.where(out.abs() == _MASK, x.detach(), out.to(x.dtype)), scales
    return out if x.dtype is torch.float32 else out.to(x.dtype), scales


_MASK = torch.finfo(torch.float32).max
_BELOW_MASK = math.ldexp(2**24 - 2, 104)


def _narrowed(x: Tensor, to_odd: bool) -> Tensor:
    """Contiguous float32 of float64 numbers; masks of either dtype as masks, what float32 does not hold as infinity.

    to_odd: what was rounded to odd and is rounded again, to fewer bits, is rounded as if once (Boldo, Melquiond 2008),
        and so is the power of two that is looked for. A scale that is multiplied in float32 asks for the nearest.
    """
    near = x.to(torch.float32, memory_format=torch.contiguous_format).contiguous()
    narrow = rounded(x, rounding_spec("fp32", "to_odd")).to(torch.float32).contiguous() if to_odd else near
    narrow = torch.where(near.isfinite(), narrow.clamp(-_BELOW_MASK, _BELOW_MASK), near)
    magnitude = x.abs()
    is_mask = (magnitude == _MASK) | (magnitude == torch.finfo(torch.float64).max)
    return torch.where(is_mask, x.sign().to(torch.float32) * _MASK, narrow)


_LARGEST = BINARY32.bits(torch.finfo(torch.float32).max)


def _multiplier_on_cpu(amax: int, largest: float) -> int:
    """largest / amax as a float32 pattern; 1 where amax is 0 (NVIDIA TransformerEngine, Float8CurrentScaling).

    The quotient is rounded once: float64 has more than twice the bits of float32.
    """
    if amax == 0:
        return BINARY32.bits(1.0)
    field, mantissa = amax >> 23, amax & 0x7FFFFF
    value = math.ldexp(mantissa | (0x800000 if field else 0), max(field, 1) - 150)  # right where subnormals are flushed
    return min(BINARY32.bits(largest / value), _LARGEST)


_NOTHING_SHARED = torch.full((3,), -1, dtype=torch.int64, device="cpu")


class _Units(NamedTuple):
    """What rounds tensors of one cut on the CPU: the loop, how many units of work there are, and its integers."""

    loop: Callable[..., Any]
    total: int
    integers: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]  # dims and parameters
    addresses: tuple[int, int]


class Launch(NamedTuple):
    """What rounds tensors of one cut on a card: the kernel, its grid, and integers around those of the plan."""

    kernel: CudaKernel
    grid: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    is_dense: bool  # one more follows `before`: whether the memory is aligned


def launch_of(plan: blocks.BlockPlan, axes: BlockAxes, f: BlockFormat, threads: int | None = None) -> Launch:
    """How a card rounds a tensor. threads: of a block; None for the kernel's own."""
    words = plan.rule, plan.shape, plan.scale_shape, plan.kind
    # rows have a length for each tensor, and would have a kernel for each length
    size = {"tensor": block_dense.ONE_SCALE, "row": None}.get(str(f.block), block_dense.dense_size(axes))
    if size is None:
        kernel = block_teams.cuda_rounding(*words, block_teams.is_small(axes))
        grid, team = block_teams.grid_of(axes, threads or kernel.threads)
        return Launch(kernel, grid, axes, (team,), False)
    kernel, count = block_dense.cuda_rounding(*words, size), math.prod(axes[:5])
    return Launch(kernel, block_dense.grid_of(count, threads or kernel.threads), (count,), (), True)


@lru_cache(1 << 12, typed=True)  # True is not an axis
def _kept(
    spec: BlockSpec, shape: torch.Size, axis: int, across: int | None, is_cuda: bool
) -> tuple[blocks.BlockPlan, BlockAxes, _Units | Launch | None]:
    """How tensors of one shape are rounded: the format's integers, the cut, and the work."""
    plan, axes = block_plan(spec), block_axes(shape, spec.fmt.tile, axis, across)
    if not math.prod(shape):
        return plan, axes, None
    if spec.fmt.block == "tensor":
        axes = in_parts(axes, is_cuda)
    return plan, axes, launch_of(plan, axes, spec.fmt) if is_cuda else _units(plan, axes)


def _units(plan: blocks.BlockPlan, axes: BlockAxes) -> _Units:
    words = (plan.rule, plan.shape, plan.scale_shape, plan.kind)
    if axes.inner == 1:
        loop, total = block_loops.cpu_along(*words), math.prod(axes.blocks)
    else:
        lane_blocks = -(-axes.inner // block_loops.lanes_of(axes.r, axes.c))
        loop, total = block_loops.cpu_across(*words), math.prod(axes.blocks[:4]) * lane_blocks
    dims, parameters = np.array(axes, np.int64), np.array(plan.parameters, np.int64)
    return _Units(loop.native, total, (dims, parameters), (dims.ctypes.data, parameters.ctypes.data))


def _run_on_cpu(
    units: _Units, key: Tensor | None, source: Tensor, out: Tensor, shared: Tensor, scales: Tensor | None
) -> None:
    addresses = (
        address_of(source),
        address_of(out),
        *units.addresses,
        NO_KEY_ADDRESS if key is None else key.data_ptr(),
        shared.data_ptr(),
        0 if scales is None else scales.data_ptr(),
    )
    if source.numel() < PARALLEL_FROM:
        units.loop(*addresses, 0, units.total)
        return
    per_thread = -(-units.total // len(parts_of(source.numel())))
    parts = [(*addresses, i, min(i + per_thread, units.total)) for i in range(0, units.total, per_thread)]
    run_parts(units.loop, parts, source, out, units, key, shared, scales)


def _run_on_card(
    work: Launch,
    plan: blocks.BlockPlan,
    key: Tensor | None,
    source: Tensor,
    out: Tensor,
    shared: Tensor,
    scales: Tensor | None,
) -> None:
    read, written = address_of(source), address_of(out)
    before = (*work.before, int((read | written) % 16 == 0)) if work.is_dense else work.before
    parameters = on_card(plan.shape, plan.parameters, source, (0, blocks.WIDE_NUMBERS))
    scale_words = (0, 0) if scales is None else (scales.data_ptr(), 1)
    words = read, written, *before, *parameters, shared.data_ptr(), *scale_words, *key_arguments(key), *work.after
    run_on_card(work.kernel, source, work.grid, words)
