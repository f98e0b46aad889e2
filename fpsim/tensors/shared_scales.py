"""Rounding to formats whose blocks share a scale: scales, choices among candidates, and the launch on CPU and card."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fpsim.formats.blocks import BlockFormat, Choose
from fpsim.kernels import block_choice, block_dense, block_loops, block_teams, blocks
from fpsim.kernels.codebooks import any_plan
from fpsim.kernels.core import BINARY32, make_plan, scale_limits
from fpsim.kernels.moments import partial_words
from fpsim.tensors.cuts import BlockAxes, block_axes, runs_elsewhere, second_amaxes
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
from fpsim.tensors.spec import BlockSpec, address_of, any_spec, rounding_spec

if TYPE_CHECKING:
    from fpsim.compiling.card import CudaKernel

__all__ = ["block_scales", "recorded_amax", "rounded_blocks"]


@cache
def block_plan(spec: BlockSpec, of: BlockFormat | None = None) -> blocks.BlockPlan:
    """Return the plan of a kernel, whose integers have the indices that kernels/blocks.py lists.

    of: the format with a choice, if `spec` is one of its candidates.
    """
    f, element = spec.fmt, spec.element
    words = element.fmt, element.rounding, element.overflow, element.random_bits
    plans = [any_plan(*words, width, element.variant) for width in (32, 64)]
    # A code book may need a search in one of the two containers only, but both plans must have the same shape.
    if plans[0].shape != plans[1].shape:
        plans = [any_plan(*words, width, element.variant, search=True) for width in (32, 64)]
    scale = make_plan(f.scale, "nearest_even", "saturate", None, 32)
    emax = math.frexp(f.element.largest)[1] - 1
    least_shift, most_shift = scale_limits(f.element, 32)
    # Limits of log2 of a scale: float32 has to hold the element's smallest and largest values times the scale.
    least = max(f.scale.min_exponent, -BINARY32.bias - 22 - f.element.min_ulp_exponent)
    most = min(math.frexp(f.scale.largest)[1] - 1, BINARY32.bias - emax)
    if not f.has_power_scale:
        kind = blocks.DIVIDED if f.scale.mantissa_bits == BINARY32.mantissa_bits else blocks.NARROW
        kind = blocks.QUOTIENT if f.scale_rule == "absmax" else kind
    else:
        kind = blocks.POWER if f.gain == 1 else blocks.GAINED
    highest = 0.0 if f.scale_rule == "amax" and of is None else (of or f).lands_on
    numbers = (
        *plans[0].numbers,
        *plans[1].numbers,
        *scale.numbers,
        emax,
        f.rounds_up_from,
        least,
        most,
        least_shift,
        most_shift,
        BINARY32.bits(f.lands_on),
        BINARY32.bits(f.gain),
        BINARY32.bits(highest) if highest else 0,
        BINARY32.bits(highest / f.lands_on),
        BINARY32.bits(float(np.float32((of or f).tensor_lands_on))) if f.tensor_scale else 0,
        BINARY32.bits(f.least_amax),
        *_of_infinity(f, spec.overflow),
    )
    assert len(numbers) == blocks.PARAMETERS
    assert plans[0].shape == plans[1].shape
    return blocks.BlockPlan(plans[0].rule, plans[0].shape, scale.shape, kind, numbers)


def _of_infinity(f: BlockFormat, overflow: str) -> tuple[int, int, int, int]:
    """Return the parameters COUNTED, INFINITE_SCALE, INFINITE_EXPONENT and INFINITE_ELEMENT of a plan."""
    every_nan, infinity, nan = int(blocks.MAGNITUDE), int(blocks.INFINITY), int(blocks.NAN)
    # A delayed scale comes from earlier tensors: each infinite element is treated separately.
    if f.is_delayed:
        is_nan = f.nonfinite == "nan" and f.element.has_nan and overflow == "saturate"
        return every_nan, BINARY32.bits(1.0), 0, nan if is_nan else 0
    if f.nonfinite == "nan":
        return every_nan, nan, blocks.NAN_EXPONENT, 0
    return infinity, BINARY32.bits(f.scale_of_infinity), math.frexp(f.scale_of_infinity)[1] - 1, 0


def amax_pattern(x: Tensor, plan: blocks.BlockPlan) -> Tensor:
    """Return the pattern of the largest magnitude of a contiguous tensor, as an int64 on its device.

    Masks do not count. An infinity counts, and a NaN counts if it makes a scale NaN.
    """
    if x.is_cuda:
        return _amax_on_card(x, _saturates(plan))[block_dense.FOUND]
    return torch.tensor(_amax_on_cpu(x, plan)[0])


def recorded_amax(x: Tensor, spec: BlockSpec) -> Tensor:
    """Return the amax of a floating tensor, a float32 of no dimension, from which later steps compute a scale."""
    source = x.detach().to(torch.float32, memory_format=torch.contiguous_format).contiguous()
    return amax_pattern(source, block_plan(spec)).to(torch.int32).view(torch.float32)


def _saturates(plan: blocks.BlockPlan) -> int:
    return block_dense.SATURATES if plan.parameters[blocks.COUNTED] == blocks.INFINITY else 0


def _amax_on_card(x: Tensor, asked: int, largest: float = 1.0) -> Tensor:
    """Return the int64 results of one pass over a tensor. asked: flags; kernels.block_dense describes both."""
    from fpsim.compiling.card import array_words

    out = torch.full((block_dense.PLACES,), -1, dtype=torch.int64, device=x.device)
    address, words = address_of(x), array_words(address_of(out), (block_dense.PLACES,), 8)
    arguments = address, x.numel(), int(address % 16 == 0), BINARY32.bits(largest), asked, *words
    run_on_card(block_dense.cuda_amax(), x, partial_words(x.numel(), 4)[0], arguments)
    return out


def _amax_on_cpu(x: Tensor, plan: blocks.BlockPlan) -> tuple[int, int]:
    """Return the number that `amax_pattern` returns, and 1 if there is a mask, an infinity or a NaN, else 0."""
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
    """Return a rounded copy of `x`, below autograd, whose blocks share scales.

    x: float32, float64, float16 or bfloat16, of any shape and strides. Float64 is rounded once where scales are powers
        of two; otherwise it becomes float32 first.
    axis: the axis of the blocks, which is the contraction axis of a product.
    across: the axis of the rows of a tile; None takes the axis before `axis`, or the axis after it if `axis` is the
        first.
    key: the key of the noise; None draws a new key.
    scale: the scale of delayed scaling, a float32 of one element on the device of `x`, by which elements are
        multiplied.
    out: a contiguous float32 of the shape and device of `x` to write to, which shares no memory with `x`.
    Raises ValueError for axes that `x` does not have.
    """
    return rounded_with_scales(x, spec, axis, across, key, scale, False, out)[0]


def rounds_blocks(spec: BlockSpec, axis: int, across: int | None) -> Callable[[Tensor], Tensor]:
    """Return `rounded_blocks` specialised to one spec, for callers that round many small tensors."""
    round_any, f = partial(rounded_blocks, spec=spec, axis=axis, across=across), spec.fmt
    has_more = f.is_delayed or f.tensor_scale is not False or isinstance(f.scale_rule, Choose)
    if has_more or spec.element.rounding == "stochastic":
        return round_any
    plan, is_of_tensor, lands_on = block_plan(spec), f.block == "tensor", f.lands_on
    nothing_shared = _NOTHING_SHARED.data_ptr()

    def round_blocks(x: Tensor) -> Tensor:
        source = x.data_ptr()
        # Under torch's lazy negation (`is_neg`), the memory holds the numbers before the negation.
        is_usual = x.is_cpu and x.dtype is torch.float32 and x.is_contiguous() and not x.is_neg()
        if not is_usual or not source or not 0 < x.numel() < PARALLEL_FROM:
            return round_any(x)
        work, out = _kept(spec, x.shape, axis, across, False)[2], torch.empty_like(x)
        assert isinstance(work, _Units)
        shared = array("q", _shared_on_cpu(x, f, plan, lands_on)) if is_of_tensor else None
        address = nothing_shared if shared is None else shared.buffer_info()[0]
        work.loop(source, out.data_ptr(), *work.addresses, NO_KEY_ADDRESS, address, 0, 0, work.total)
        return out

    return round_blocks


def block_scales(x: Tensor, spec: BlockSpec, axis: int = -1, across: int | None = None) -> Tensor:
    """Return the scales of the blocks of `x`, float32: a value is element * scale.

    The second scale of a tensor is not included. The shape is that of `x`, but each axis along which blocks run is
    divided by their length and rounded up.
    """
    if runs_elsewhere(spec.fmt, x, axis):
        return block_scales(x.movedim(axis, -1), spec).movedim(-1, axis)
    scales = rounded_with_scales(x, spec, axis, across, None, None, True)[1]
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
    """Return two int64: a number that replaces the amax of each block, and the pattern of the tensor's amax.

    A number that is not needed is -1. On the CPU a third number follows: 1 if the tensor has a mask, an infinity or a
    NaN, 0 if not, and -1 if this is unknown. For a format with second scales of parts of a tensor, the layout is that
    of kernels.blocks.second_place.

    source: a contiguous float32. scale: the scale of delayed scaling.
    """
    if not isinstance(f.tensor_scale, bool):
        amaxes = second_amaxes(source, f, plan.parameters[blocks.COUNTED])
        length = (source.shape[-1] if source.dim() else 1) if f.tensor_scale == "row" else f.tensor_scale
        head = torch.tensor([-1 - -(-int(length) // f.tile[1]), -1, -1], device=source.device)
        return torch.cat([head, amaxes.flatten()])
    if source.is_cuda:
        if asked := asked_of(f, plan):
            return _amax_on_card(source, asked, f.lands_on)[:2]
        shared = torch.full((2,), -1, dtype=torch.int64, device=source.device)
        if scale is not None:
            shared[0] = scale.detach().reshape(()).view(torch.int32).long()
        return shared
    number = has_specials = -1
    if scale is not None:
        number = int(scale.detach().reshape(()).view(torch.int32))
    elif f.block == "tensor":
        number, _, has_specials = _shared_on_cpu(source, f, plan, f.lands_on)
    of_tensor = _amax_on_cpu(source, plan)[0] if f.tensor_scale else -1
    # The tensor comes from NumPy, which ignores torch's default device, and takes a third of the time of torch.tensor.
    return torch.from_numpy(np.array((number, of_tensor, has_specials)))


def _shared_on_cpu(source: Tensor, f: BlockFormat, plan: blocks.BlockPlan, lands_on: float) -> tuple[int, int, int]:
    """Return the `shared_numbers` of a tensor that is one block without a second scale. lands_on: `f.lands_on`."""
    number, has_specials = _amax_on_cpu(source, plan)
    if plan.kind == blocks.DIVIDED:
        # The scale of an infinite tensor is NaN or 1, each of which is its own inverse.
        if number >= blocks.INFINITY:
            number = BINARY32.bits(f.scale_of_infinity)
        else:
            number = _multiplier_on_cpu(number, lands_on)
    return number, -1, has_specials


def asked_of(f: BlockFormat, plan: blocks.BlockPlan) -> int:
    """Return the flags of kernels.block_dense for the values that all blocks share; 0 if no pass is needed."""
    asked = block_dense.OF_TENSOR if f.tensor_scale else 0
    if f.block == "tensor" and not f.is_delayed:
        asked |= block_dense.MULTIPLIER if plan.kind == blocks.DIVIDED else block_dense.AMAX
    return asked | _saturates(plan) if asked else 0


def in_parts(axes: BlockAxes, is_cuda: bool) -> BlockAxes:
    """Cut a tensor that is one block into parts, which keep the scale of the whole tensor."""
    return axes._replace(c=min(1 << (8 if is_cuda else 12), axes.columns))


def rounded_with_scales(
    x: Tensor,
    spec: BlockSpec,
    axis: int,
    across: int | None,
    key: Tensor | None,
    scale: Tensor | None,
    wants_scales: bool,
    out: Tensor | None = None,
    of: BlockFormat | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the result of `rounded_blocks`, and the scales if they are wanted. of: as in `block_plan`."""
    f = spec.fmt
    if f.is_delayed != (scale is not None):
        raise ValueError(
            f"{f} takes its scale from earlier steps, and none was given. Expected: as an operand of products in a "
            f"quantised model, which remembers them; here, the same format with scale_rule='amax'."
            if f.is_delayed
            else f"A scale was given for {f}, which computes its own. Omit scale."
        )
    if type(axis) is not int or (across is not None and type(across) is not int):
        # An invalid axis raises here: it may not be hashable, as the cache below requires.
        block_axes(x.shape, f.tile, axis, across)
    if type(f.tensor_scale) is not bool and runs_elsewhere(f, x, axis):
        moved, scales = rounded_with_scales(x.movedim(axis, -1), spec, -1, None, key, scale, wants_scales, None, of)
        moved = moved.movedim(-1, axis)
        return moved.contiguous() if out is None else out.copy_(moved), scales
    chooses = isinstance(f.scale_rule, Choose)
    plan, axes, work = _kept(spec.candidates[0] if chooses else spec, x.shape, axis, across, x.is_cuda, of)
    source, scales = x.detach(), None
    if x.dtype is torch.float64:
        source = _narrowed(source, plan.kind == blocks.POWER)
    elif x.dtype is not torch.float32 or not x.is_contiguous():
        source = source.to(torch.float32, memory_format=torch.contiguous_format).contiguous()
    out = torch.empty_like(source) if out is None else out
    if source.numel():
        if spec.element.rounding == "stochastic" and key is None:
            key = new_key_for(x)
        if chooses:
            scales = _round_by_choice(source, spec, axis, across, key, wants_scales, out)
        else:
            shares = scale is not None or f.tensor_scale or f.block == "tensor" or x.is_cuda
            shared = shared_numbers(source, f, plan, scale) if shares else _NOTHING_SHARED
            if wants_scales:
                scales = torch.empty(axes.blocks, device=x.device)
            if isinstance(work, Launch):
                _run_on_card(work, plan, key, source, out, shared, scales)
            else:
                assert work is not None
                _run_on_cpu(work, key, source, out, shared, scales)
    if x.dtype is torch.float64:
        return torch.where(out.abs() == _MASK, x.detach(), out.to(x.dtype)), scales
    return out if x.dtype is torch.float32 else out.to(x.dtype), scales


class Choice(NamedTuple):
    """The candidate of each block. chosen: the index of each block's candidate, uint8 on the CPU, int64 on a card."""

    axes: BlockAxes
    chosen: Tensor


def choose(source: Tensor, spec: BlockSpec, axis: int, across: int | None, out: Tensor | None = None) -> Choice:
    """Choose a candidate for each block of a contiguous float32 with elements.

    If `spec` is stochastic, the choice is made by rounding to nearest even.

    out: receives the tensor rounded with the choice, if given.
    """
    if spec.element.rounding == "stochastic":
        spec = any_spec(spec.fmt, "nearest_even", spec.element.overflow)  # type: ignore[assignment]
    axes = block_axes(source.shape, spec.fmt.tile, axis, across)
    dtype = torch.int64 if source.is_cuda else torch.uint8
    choice = Choice(axes, torch.empty(math.prod(axes.blocks), dtype=dtype, device=source.device))
    out = torch.empty_like(source) if out is None else out
    _by_candidates(source, spec, choice, axis, across, None, out, is_given=False)
    return choice


def _round_by_choice(
    source: Tensor, spec: BlockSpec, axis: int, across: int | None, key: Tensor | None, wants_scales: bool, out: Tensor
) -> Tensor | None:
    """Round each block of a contiguous float32 by its best scale rule, and return the scales if they are wanted."""
    choice, scales = choose(source, spec, axis, across, out), None
    if spec.element.rounding == "stochastic":
        _by_candidates(source, spec, choice, axis, across, key, out, is_given=True)
    for number, candidate in enumerate(spec.candidates if wants_scales else ()):
        _, of_this = rounded_with_scales(source, candidate, axis, across, key, None, True, None, spec.fmt)
        assert of_this is not None
        scales = of_this if scales is None else torch.where((choice.chosen == number).view_as(scales), of_this, scales)
    return scales


def take(choice: Choice, number: int, source: Tensor, out: Tensor) -> None:
    """Copy the blocks that take candidate `number` from `source` to `out`, which are both contiguous float32."""
    outer, rows, middle, columns, inner, r, c = choice.axes
    by_block = (choice.chosen == number).view(choice.axes.blocks)
    is_taken = by_block.repeat_interleave(r, 1)[:, :rows].repeat_interleave(c, 3)[:, :, :, :columns]
    shape = outer, rows, middle, columns, inner
    out.view(shape).copy_(torch.where(is_taken, source.view(shape), out.view(shape)))


def _by_candidates(
    source: Tensor,
    spec: BlockSpec,
    choice: Choice,
    axis: int,
    across: int | None,
    key: Tensor | None,
    out: Tensor,
    is_given: bool,
) -> None:
    """Round to each candidate, and store in `out` each block's nearest result, or the chosen result if `is_given`."""
    f, axes, chosen = spec.fmt, choice.axes, choice.chosen
    assert isinstance(f.scale_rule, Choose)
    error = block_choice.ERRORS.index(f.scale_rule.error)
    ties = block_choice.GIVEN if is_given else int(f.scale_rule.ties == "last")
    cut = source.shape, axis, across, source.is_cuda, f
    works = [_kept(candidate, *cut)[2] for candidate in spec.candidates]
    plan = block_plan(spec.candidates[0], f)
    shares = f.tensor_scale or source.is_cuda
    shared = shared_numbers(source, f, plan, None) if shares else _NOTHING_SHARED
    if not source.is_cuda:
        _by_candidates_on_cpu(works, axes, error, ties, key, source, out, shared, chosen)  # type: ignore[arg-type]
        return
    other, errors = torch.empty_like(source), torch.empty(chosen.numel(), dtype=torch.float64, device=source.device)
    nearer = block_teams.cuda_choice(error, block_teams.is_small(axes))
    grid, team = block_teams.grid_of(axes, nearer.threads)
    for number, (candidate, work) in enumerate(zip(spec.candidates, works, strict=True)):
        assert isinstance(work, Launch)
        into = other if number else out
        _run_on_card(work, block_plan(candidate, f), key, source, into, shared, None)
        if number:
            tensors = address_of(source), address_of(out), address_of(other)
            words = *tensors, *axes, address_of(errors), address_of(chosen), number, ties, team
            run_on_card(nearer, source, grid, words)


# The number of elements that are rounded to all candidates before the next elements: few enough to stay in the cache.
_AT_ONCE = 1 << 16


def _by_candidates_on_cpu(
    works: list[_Units],
    axes: BlockAxes,
    error: int,
    ties: int,
    key: Tensor | None,
    source: Tensor,
    out: Tensor,
    shared: Tensor,
    chosen: Tensor,
) -> None:
    """Round as `_by_candidates` does, in contiguous parts, so that only one part of another candidate is stored."""
    blocks = axes.blocks
    nearer = (block_choice.cpu_along if axes.inner == 1 else block_choice.cpu_across)(error).native
    line = axes.middle * axes.columns * axes.inner  # elements of a row
    # A group is a block in all lanes, or a whole row of tiles: the smallest contiguous part.
    in_group = blocks[2] * blocks[3] if axes.r > 1 else 1
    groups = math.prod(blocks[:4]) // in_group
    size = axes.r * line if axes.r > 1 else axes.c * axes.inner
    units = works[0].total // groups
    at_once = max(1, _AT_ONCE // size)

    def begin(group: int) -> int:
        """Return the index in memory of the first element of a group."""
        if axes.r > 1:
            return (group // blocks[1] * axes.rows + group % blocks[1] * axes.r) * line
        return group // blocks[3] * axes.columns * axes.inner + group % blocks[3] * axes.c * axes.inner

    def run(first: int, last: int) -> None:
        other, errors = torch.empty(at_once * size), torch.empty(at_once * in_group * axes.inner, dtype=torch.float64)
        rest = NO_KEY_ADDRESS if key is None else key.data_ptr(), shared.data_ptr(), 0
        for i in range(first, last, at_once):
            # The loops count units from the beginning of a whole tensor, so that these are the addresses at which a
            # whole tensor would begin.
            beside = other.data_ptr() - 4 * begin(i)
            known = errors.data_ptr() - 8 * i * in_group * axes.inner
            part = i * units, min(i + at_once, last) * units
            for number, work in enumerate(works):
                work.loop(address_of(source), beside if number else address_of(out), *work.addresses, *rest, *part)
                if number:
                    tensors = address_of(source), address_of(out), beside
                    nearer(*tensors, work.addresses[0], known, address_of(chosen), number, ties, *part)

    step = -(-groups // len(parts_of(source.numel())))
    parts = [(i, min(i + step, groups)) for i in range(0, groups, step)]
    run_parts(run, parts, source, out, chosen, shared)


_MASK = torch.finfo(torch.float32).max
_BELOW_MASK = math.ldexp(2**24 - 2, 104)


def _narrowed(x: Tensor, to_odd: bool) -> Tensor:
    """Convert float64 to contiguous float32. Masks of either dtype become masks; numbers beyond float32 become inf.

    to_odd: round to odd. Rounding to odd first, and then to fewer bits, has the result of a single rounding (Boldo,
        Melquiond 2008), and the same power of two as a scale. A scale that multiplies in float32
        needs the nearest number instead.
    """
    near = x.to(torch.float32, memory_format=torch.contiguous_format).contiguous()
    narrow = rounded(x, rounding_spec("fp32", "to_odd")).to(torch.float32).contiguous() if to_odd else near
    narrow = torch.where(near.isfinite(), narrow.clamp(-_BELOW_MASK, _BELOW_MASK), near)
    magnitude = x.abs()
    is_mask = (magnitude == _MASK) | (magnitude == torch.finfo(torch.float64).max)
    # `where` gives its result the strides of the mask, which are the strides of x.
    return torch.where(is_mask, x.sign().to(torch.float32) * _MASK, narrow).contiguous()


_LARGEST = BINARY32.bits(torch.finfo(torch.float32).max)


def _multiplier_on_cpu(amax: int, largest: float) -> int:
    """Return largest / amax as a float32 pattern; 1 where amax is 0 (NVIDIA TransformerEngine, Float8CurrentScaling).

    The result is that of a single rounding, because float64 has more than twice as many bits as float32.
    """
    if amax == 0:
        return BINARY32.bits(1.0)
    field, mantissa = amax >> 23, amax & 0x7FFFFF
    value = math.ldexp(mantissa | (0x800000 if field else 0), max(field, 1) - 150)  # subnormals are not flushed
    quotient = largest / value
    # For a normal number, the processor's conversion is faster.
    if 2.0**-126 <= quotient < 2.0**127:
        return int(_PATTERN.unpack(_NUMBER.pack(quotient))[0])
    return min(BINARY32.bits(quotient), _LARGEST)


_NUMBER, _PATTERN = struct.Struct("=f"), struct.Struct("=i")
_NOTHING_SHARED = torch.full((3,), -1, dtype=torch.int64, device="cpu")


class _Units(NamedTuple):
    """Work on tensors with the same cut on the CPU: the loop, the number of units of work, and the loop's integers."""

    loop: Callable[..., Any]
    total: int
    integers: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]  # dims and parameters
    addresses: tuple[int, int]


class Launch(NamedTuple):
    """Work on tensors with the same cut on a card: the kernel, its grid, and integers before and after the plan's."""

    kernel: CudaKernel
    grid: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    is_dense: bool  # one more integer follows `before`: whether the memory is aligned


def launch_of(plan: blocks.BlockPlan, axes: BlockAxes, f: BlockFormat, threads: int | None = None) -> Launch:
    """Return the launch that rounds a tensor on a card. threads: threads of a block; None for the kernel's default."""
    words = plan.rule, plan.shape, plan.scale_shape, plan.kind
    # Rows differ in length between tensors, and each length would need a separate kernel.
    size = {"tensor": block_dense.ONE_SCALE, "row": None}.get(str(f.block), block_dense.dense_size(axes))
    if size is None or not isinstance(f.tensor_scale, bool):
        kernel = block_teams.cuda_rounding(*words, block_teams.is_small(axes))
        grid, team = block_teams.grid_of(axes, threads or kernel.threads)
        return Launch(kernel, grid, axes, (team,), False)
    kernel, count = block_dense.cuda_rounding(*words, size), math.prod(axes[:5])
    return Launch(kernel, block_dense.grid_of(count, threads or kernel.threads), (count,), (), True)


# `typed`, because True is not an axis.
@lru_cache(1 << 12, typed=True)
def _kept(
    spec: BlockSpec,
    shape: torch.Size,
    axis: int,
    across: int | None,
    is_cuda: bool,
    of: BlockFormat | None = None,
) -> tuple[blocks.BlockPlan, BlockAxes, _Units | Launch | None]:
    """Return the plan, the cut and the work for tensors of one shape."""
    plan, axes = block_plan(spec, of), block_axes(shape, spec.fmt.tile, axis, across)
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
