"""How one weight lies in a packed checkpoint: the layouts of compressed-tensors, which vLLM and transformers load."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpsim.formats.blocks import BlockFormat
from fpsim.formats.codebook import Codebook
from fpsim.formats.floats import CATALOGUE
from fpsim.tensors.codes import decode, encode
from fpsim.tensors.ops import round_to
from fpsim.tensors.spec import RoundingSpec, Spec

__all__ = ["LAYOUTS", "Layout", "Packed", "is_dense", "layout_of", "packed"]

FLOAT_QUANTIZED = "float-quantized"
# By element, block, scale: the word of config.json, the strategy, and the type of a scale. compressed-tensors 0.20:
# config/base.py, compressors/*/base.py, quantization/quant_scheme.py.
LAYOUTS = {
    ("e2m1fn", 16, "e4m3fn"): ("nvfp4-pack-quantized", "tensor_group", "torch.float8_e4m3fn"),
    ("e2m1fn", 32, "e8m0fnu"): ("mxfp4-pack-quantized", "group", "torch.uint8"),
    ("e2m3fn", 32, "e8m0fnu"): ("mxfp6-pack-quantized", "group", "torch.uint8"),
    ("e4m3fn", 32, "e8m0fnu"): ("mxfp8-quantized", "group", "torch.uint8"),
}
EXPECTED = (
    "nvfp4, e2m1fn per 16 e4m3fn, mxfp4, mxfp6_e2m3, mxfp8_e4m3, e4m3fn, and e4m3fn per tensor, row, tile or number of "
    "elements, such as 'e4m3fn per row fp32'"
)


class Layout(NamedTuple):
    """What a loader has to know of a weight.

    format: its word for how tensors are packed.
    weights: its arguments of quantisation, as JSON.
    """

    format: str
    weights: dict[str, Any]


class Packed(NamedTuple):
    """A weight as it is stored.

    tensors: by their names in the module.
    emulated: the numbers that the emulated model computes with, float32.
    loaded: those that the loader makes of the tensors, in its arithmetic and its dtype.
    """

    tensors: dict[str, Tensor]
    emulated: Tensor
    loaded: Tensor


def is_dense(spec: Spec | None) -> bool:
    """Whether a weight of this format is stored as it is: the format has a dtype of torch that checkpoints are in."""
    return spec is None or (isinstance(spec, RoundingSpec) and (spec.dtype is not None or spec.is_float32))


def layout_of(spec: Spec, what: str) -> Layout:
    """The layout of a format. what: the weight, for an error. Raises ValueError for what has no place in it."""
    f = spec.fmt
    if spec.rounding == "stochastic":
        raise ValueError(
            f"{what} is rounded stochastically, to other numbers in each call; a checkpoint has one of them. Expected: "
            f"a weight that is rounded to nearest."
        )
    if isinstance(f, Codebook) or (isinstance(f, BlockFormat) and isinstance(f.element, Codebook)):
        raise ValueError(f"{what} is in {f}: the layout has no place for a code book. Expected: {EXPECTED}.")
    if isinstance(f, BlockFormat) and f.is_delayed:
        raise ValueError(
            f"{what} is in {f}, whose scale follows from earlier steps. Expected: a format whose scale is that of the "
            f"weight, such as 'e4m3fn per tensor fp32'."
        )
    shared: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    if f == CATALOGUE["e4m3fn"]:
        return Layout(FLOAT_QUANTIZED, {**shared, "strategy": "tensor", "group_size": None})
    if not isinstance(f, BlockFormat) or f.gain != 1:
        raise ValueError(f"{what} is in {f}, for which the layout has no name. Expected: {EXPECTED}.")
    known = LAYOUTS.get((str(f.element), f.block, str(f.scale)))  # type: ignore[arg-type]
    is_nvfp4 = known is not None and known[1] == "tensor_group"
    if known is not None and (is_nvfp4 or not f.tensor_scale) and f.tensor_scale in (True, False):
        name, strategy, dtype = known
        bits = f.element.bits
        return Layout(
            name, {**shared, "num_bits": bits, "strategy": strategy, "group_size": f.block, "scale_dtype": dtype}
        )
    if f.element != CATALOGUE["e4m3fn"] or f.tensor_scale:
        raise ValueError(f"{what} is in {f}, for which the layout has no name. Expected: {EXPECTED}.")
    if isinstance(f.block, tuple):
        blocks = {"strategy": "block", "group_size": None, "block_structure": list(f.block)}
        return Layout(FLOAT_QUANTIZED, {**shared, **blocks})
    if isinstance(f.block, int):
        return Layout(FLOAT_QUANTIZED, {**shared, "strategy": "group", "group_size": f.block})
    strategy = {"tensor": "tensor", "row": "channel"}[f.block]
    return Layout(FLOAT_QUANTIZED, {**shared, "strategy": strategy, "group_size": None})


def packed(weight: Tensor, spec: Spec, layout: Layout, what: str) -> Packed:
    """The tensors of a weight, (out, in) float32, whose blocks run along the last axis.

    Raises ValueError for a weight that is not finite, or whose length the blocks do not divide.
    """
    size = layout.weights["group_size"]
    if size and weight.shape[-1] % size:
        raise ValueError(
            f"{what} has shape {tuple(weight.shape)}, whose rows {size} does not divide, and the loader takes whole "
            f"blocks alone. Expected: rows of a multiple of {size}; or leave the layer in float32 by overrides."
        )
    if not weight.isfinite().all():
        raise ValueError(f"{what} holds an infinity or NaN. Expected: finite weights.")
    f = spec.fmt
    if not isinstance(f, BlockFormat):
        codes = encode(weight, f, spec.rounding, spec.overflow)  # type: ignore[arg-type]
        tensors = {"weight": codes.to(torch.uint8).view(torch.float8_e4m3fn), "weight_scale": torch.ones(1)}
        values = decode(codes, f)  # type: ignore[arg-type]
        return Packed(tensors, values, values)
    blocks = encode(weight, f, spec.rounding, spec.overflow)
    emulated, elements = decode(blocks), decode(blocks.unpacked(), f.element)  # type: ignore[arg-type]
    scales = decode(blocks.scales, f.scale) if f.scale.bits <= 16 else blocks.scales
    if layout.format == FLOAT_QUANTIZED:
        shape = {"tensor": (1,), "channel": (-1, 1)}.get(layout.weights["strategy"], tuple(scales.shape))
        tensors = {"weight": blocks.codes.view(torch.float8_e4m3fn), "weight_scale": scales.reshape(shape).contiguous()}
        # rounded as the loader does, in float32: a product of an element and a scale, which is what decode computes
        return Packed(tensors, emulated, emulated)
    each = scales.repeat_interleave(size, -1)
    if layout.format == "nvfp4-pack-quantized":
        whole = torch.ones(1) if blocks.tensor_scale is None else blocks.tensor_scale.reshape(1)
        codes_of_scales = blocks.scales.to(torch.uint8).view(torch.float8_e4m3fn)
        tensors = {"weight_packed": blocks.codes, "weight_scale": codes_of_scales, "weight_global_scale": whole}
        return Packed(tensors, emulated, (elements * (each / whole)).bfloat16())
    name, stored = "weight_packed", blocks.codes
    if layout.format == "mxfp8-quantized":
        name, stored = "weight", blocks.codes.view(torch.float8_e4m3fn)
    elif layout.format == "mxfp6-pack-quantized":
        stored = _in_three_bytes(blocks.codes)
    return Packed({name: stored, "weight_scale": blocks.scales}, emulated, (elements * each).bfloat16())


def _in_three_bytes(codes: Tensor) -> Tensor:
    """Four codes of 6 bits in three bytes, the first one in the lowest bits."""
    of_four = codes.to(torch.int32).unflatten(-1, (-1, 4)) << torch.tensor([0, 6, 12, 18], dtype=torch.int32)
    word = of_four.sum(-1, dtype=torch.int32)
    return torch.stack([word & 255, word >> 8 & 255, word >> 16], -1).to(torch.uint8).flatten(-2)


def rounded_role(x: Tensor, spec: RoundingSpec | None, what: str) -> Tensor:
    """A parameter as its module uses it, in its own dtype. Raises ValueError where that is another in each call."""
    if spec is None:
        return x.detach()
    if spec.rounding == "stochastic":
        raise ValueError(
            f"{what} is rounded stochastically, to other numbers in each call; a checkpoint has one of them. Expected: "
            f"a weight that is rounded to nearest."
        )
    return round_to(x.detach(), spec.fmt, spec.rounding, spec.overflow)
