"""Rounding to shared scales under autograd, transforms and tracers: the operator, and its straight-through gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fpsim.formats.blocks import Format
from fpsim.kernels.blocks import COUNTED
from fpsim.tensors.autograd import OperatorWords, is_transformed, require_no_forward_mode
from fpsim.tensors.cuts import block_axes, of_each_element, second_amaxes_along, second_of_each_element
from fpsim.tensors.noise import new_traceable_key
from fpsim.tensors.shared_scales import block_plan, block_scales, recorded_amax, rounded_blocks
from fpsim.tensors.spec import BlockSpec, Spec, any_spec, saturated_from
from fpsim.torch_internals import constant_under_compile, keep_none
from fpsim.torch_modes import PlainFunction, is_plain

__all__ = ["apply_block_operator", "block_words", "passes", "round_blocks_differentiably", "round_blocks_traced"]


def _spec(fmt: str, rounding: str, overflow: str, random_bits: int, variant: str) -> BlockSpec:
    spec = any_spec(fmt, rounding, overflow, random_bits or None, variant)
    assert isinstance(spec, BlockSpec)
    return spec


# The operator that torch.compile, FakeTensorMode and functorch see.


@torch.library.custom_op("fpsim::round_blocks", mutates_args=())
def _round_blocks_op(
    x: Tensor,
    fmt: str,
    rounding: str,
    overflow: str,
    random_bits: int,
    axis: int,
    across: int | None,
    key: Tensor | None,
    variant: str = "A",
) -> Tensor:
    return rounded_blocks(x, _spec(fmt, rounding, overflow, random_bits, variant), axis, across, key)


@_round_blocks_op.register_fake
def _(
    x: Tensor,
    fmt: str,
    rounding: str,
    overflow: str,
    random_bits: int,
    axis: int,
    across: int | None,
    key: Tensor | None,
    variant: str = "A",
) -> Tensor:
    # An axis that the tensor does not have raises here: when the program is traced, not only when it runs.
    block_axes(x.shape, _spec(fmt, rounding, overflow, random_bits, variant).fmt.tile, axis, across)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_round_blocks_op.register_vmap
def _(
    info: Any, in_dims: Any, x: Tensor, fmt: str, rounding: str, overflow: str, random_bits: int, axis: int,
    across: int | None, key: Tensor | None, variant: str = "A",
) -> tuple[Tensor, int]:  # fmt: skip
    """Round each sample in separate blocks: one scale of the whole tensor becomes one scale for each sample."""
    words = fmt, rounding, overflow, random_bits, variant
    dim, key_dim = in_dims[0], in_dims[7]
    samples = x.unbind(dim) if dim is not None else [x] * info.batch_size
    keys = key.unbind(key_dim) if key is not None and key_dim is not None else [key] * info.batch_size
    rounded = [apply_block_operator(s, words, axis, across, k) for s, k in zip(samples, keys, strict=True)]
    return torch.stack(rounded), 0


def _backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
    return gradient, *[None] * 8


_round_blocks_op.register_autograd(_backward, setup_context=keep_none)


@constant_under_compile
def block_words(
    fmt: str | Format, rounding: str, overflow: str | None, random_bits: int | None, variant: str
) -> OperatorWords:
    """Return the operator's arguments as constants of a compiled graph, as `autograd.operator_words` does."""
    spec = any_spec(fmt, rounding, overflow, random_bits, variant)
    assert isinstance(spec, BlockSpec)
    return _words_of(spec)


def _words_of(spec: BlockSpec) -> OperatorWords:
    return repr(spec.fmt), spec.rounding, spec.overflow, spec.random_bits or 0, spec.variant


def apply_block_operator(
    x: Tensor, words: OperatorWords, axis: int, across: int | None, key: Tensor | None = None
) -> Tensor:
    """Round `x` with the operator. key: the key of stochastic rounding; None draws a new key."""
    require_no_forward_mode("A rounding in blocks")
    if key is None and words[1] == "stochastic":
        key = new_traceable_key(x)
    return torch.ops.fpsim.round_blocks(x, *words[:-1], axis, across, key, words[-1])  # type: ignore[no-any-return]


def passes(x: Tensor, spec: Spec, axis: int, across: int | None) -> Tensor:
    """Return a bool mask in the shape of `x`: False for elements half an ulp or more beyond the largest value."""
    if not isinstance(spec, BlockSpec):
        return ~(x.detach().abs() >= saturated_from(spec.fmt))
    return torch.ops.fpsim.block_passes(x, *_words_of(spec), axis, across)  # type: ignore[no-any-return]


@torch.library.custom_op("fpsim::block_passes", mutates_args=())
def _block_passes(
    x: Tensor, fmt: str, rounding: str, overflow: str, random_bits: int, variant: str, axis: int, across: int | None
) -> Tensor:
    spec, source = _spec(fmt, rounding, overflow, random_bits, variant), x.detach().to(torch.float32)
    if not x.numel():
        return torch.empty(x.shape, dtype=torch.bool, device=x.device)
    scales = of_each_element(block_scales(source, spec, axis, across), spec.fmt, x.shape, axis, across)
    limit = scales.double() * saturated_from(spec.fmt.element) / spec.fmt.gain
    # The second scale is computed as in kernels.blocks.make_tensor_scale.
    if spec.fmt.tensor_scale:
        amax = _amaxes(source, spec, axis)
        whole = (torch.tensor(spec.fmt.tensor_lands_on, device=x.device) / amax).clamp(max=_MASK)
        limit /= torch.where(amax == 0, 1.0, torch.where(amax.isfinite(), whole, 1.0))
    magnitude = source.abs()
    # Under a scale of 0 no element saturates, because all elements are zero.
    return ~((magnitude >= limit) & (limit > 0) & (magnitude != _MASK))


_MASK = torch.finfo(torch.float32).max


def _amaxes(x: Tensor, spec: BlockSpec, axis: int) -> Tensor:
    """Return the float32 amax from which each element's second scale is computed.

    The result has no dimension if the tensor has a single second scale.
    """
    f = spec.fmt
    if isinstance(f.tensor_scale, bool):
        return recorded_amax(x, spec)
    amaxes = second_amaxes_along(x, f, block_plan(spec).parameters[COUNTED], axis)
    return second_of_each_element(amaxes, f, x.shape, axis)


@_block_passes.register_fake
def _(
    x: Tensor, fmt: str, rounding: str, overflow: str, random_bits: int, variant: str, axis: int, across: int | None
) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.bool)


def round_blocks_differentiably(x: Tensor, spec: BlockSpec, axis: int, across: int | None) -> Tensor:
    """Round as `rounded_blocks` does; the gradient passes unchanged."""
    if is_plain(x) and not (x.requires_grad and torch.is_grad_enabled()):
        return rounded_blocks(x, spec, axis, across)
    return round_blocks_traced(x, spec, axis, across)


def round_blocks_traced(x: Tensor, spec: BlockSpec, axis: int, across: int | None) -> Tensor:
    """Round with the operator, which tracers see."""
    if not is_transformed():
        return apply_block_operator(x, _words_of(spec), axis, across)
    key = new_traceable_key(x) if spec.rounding == "stochastic" else None
    return _Transformed.apply(x, *_words_of(spec), axis, across, key)  # type: ignore[no-any-return]


class _Transformed(PlainFunction):
    """The operator under torch.func transforms; forward-mode tangents pass unchanged too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, fmt: str, rounding: str, overflow: str, random_bits: int, variant: str, axis: int,
        across: int | None, key: Tensor | None,
    ) -> Tensor:  # fmt: skip
        return apply_block_operator(x, (fmt, rounding, overflow, random_bits, variant), axis, across, key)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        keep_none(ctx)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        return gradient, *[None] * 8

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return tangent.view_as(tangent)
