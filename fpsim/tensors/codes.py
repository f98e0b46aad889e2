"""Encode numbers to the codes of a small format, decode them, and find the scales that blocks share."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor

from fpsim.checks import shown
from fpsim.formats.blocks import BlockFormat, as_format
from fpsim.tensors.block_codes import BlockCodes, decode_blocks, encode_blocks
from fpsim.tensors.cuts import axis_pair, require_no_axis
from fpsim.tensors.element_codes import Coded, codable, element_codes, element_values
from fpsim.tensors.shared_scales import block_scales
from fpsim.tensors.spec import BlockSpec, any_spec, require_float32, require_floating, under_transform
from fpsim.torch_modes import is_plain, is_sample

__all__ = ["BlockCodes", "decode", "encode", "scales_of"]


@overload
def encode(
    x: Tensor,
    fmt: BlockFormat,
    rounding: str = ...,
    overflow: str | None = ...,
    *,
    axis: int | tuple[int, int] | None = ...,
) -> BlockCodes: ...
@overload
def encode(x: Tensor, fmt: Coded, rounding: str = ..., overflow: str | None = ..., *, axis: None = ...) -> Tensor: ...
@overload
def encode(
    x: Tensor, fmt: str, rounding: str = ..., overflow: str | None = ..., *, axis: int | tuple[int, int] | None = ...
) -> Any: ...
def encode(
    x: Tensor,
    fmt: str | Coded | BlockFormat,
    rounding: str = "nearest_even",
    overflow: str | None = None,
    *,
    axis: int | tuple[int, int] | None = None,
) -> Tensor | BlockCodes:
    """Round `x` to a format of up to 16 bits, a code book, or a format of blocks, and return the codes.

    NaN gets the code of the canonical quiet NaN. In a block whose scale is NaN, elements get the code 0 if their format
    has no NaN.

    Args:
        x, fmt, rounding, overflow: as in `round_to`; `x` is a tensor, of a format of blocks in float32.
        axis: of a format of blocks, as in `round_to`.

    Returns:
        Int32 in the shape of `x`, on its device. For a format of blocks a `BlockCodes`: the codes, two of 4 bits in a
        byte, the codes of the scales, and the second scale. `decode` returns the values of `round_to`, bit for bit.

    Raises:
        ValueError: for a format of more than 16 bits, if `x` holds a NaN or a mask without a code, and for blocks of an
            empty tensor.

    >>> encode(torch.tensor([1.0, -448.0]), "e4m3fn")
    tensor([ 56, 254], dtype=torch.int32)
    >>> x = torch.tensor([[6.0, 0.5, -3.0, 1.0]])
    >>> encode(x, "nvfp4")
    BlockCodes(nvfp4 (1, 4): codes uint8 (1, 2), scales uint8 (1, 1), tensor_scale float32 ())
    >>> decode(encode(x, "nvfp4"))
    tensor([[ 6.0000,  0.5000, -3.0000,  1.0000]])
    """
    parsed = as_format(fmt)
    if isinstance(parsed, BlockFormat):
        require_floating(x)
        _require_memory(x)
        spec = any_spec(parsed, rounding, overflow)
        assert isinstance(spec, BlockSpec)
        return encode_blocks(x, spec, axis)
    require_no_axis(axis, fmt)
    f = codable(fmt)  # type: ignore[arg-type]
    require_floating(x)
    _require_memory(x)
    return element_codes(x, f, rounding, overflow)


def _require_memory(x: Tensor) -> None:
    if x.device.type == "meta":
        raise TypeError("x is on device meta, where tensors hold no numbers to encode. Expected: cpu, cuda.")


def scales_of(x: Tensor, fmt: str | BlockFormat, *, axis: int | tuple[int, int] | None = None) -> Tensor:
    """Return the scales that the blocks of `x` share in a format: each value is an element times the scale of its
    block.

    The second scale of a whole tensor, as in NVFP4, is not among them.

    The second scale of a whole tensor, as NVFP4 has one, is not among them.

    Args:
        x: a float32 tensor of any strides, on the CPU or a CUDA device.
        fmt: a format whose numbers share scales, or its name.
        axis: as in `round_to`.

    Returns:
        Float32 in the shape of `x`, each axis that blocks run along divided by their length and rounded up; of no
        dimension where the whole tensor has one scale.

    Raises:
        ValueError: for a format of single numbers, for delayed scaling, and for a tensor without elements.
        TypeError: for other dtypes.
        NotImplementedError: under torch.compile and transforms of torch.func.

    >>> scales_of(torch.tensor([[6.0, 0.5, 96.0, 1.0]]), "e2m1fn per 2")
    tensor([[ 1., 16.]])
    """
    spec = any_spec(fmt)
    if not isinstance(spec, BlockSpec):
        raise ValueError(
            f"The numbers of fmt={shown(fmt)} share no scale. Expected: a format of blocks, such as 'mxfp4'."
        )
    require_float32(x)
    if not is_plain(x):
        raise under_transform("scales_of")
    if not x.numel():
        raise ValueError(f"x of shape {tuple(x.shape)} has no elements, and no scales. Expected: one element or more.")
    return block_scales(x, spec, *axis_pair(axis))


@overload
def decode(codes: BlockCodes, fmt: None = ...) -> Tensor: ...
@overload
def decode(codes: Tensor, fmt: str | Coded) -> Tensor: ...
def decode(codes: Tensor | BlockCodes, fmt: str | Coded | None = None) -> Tensor:
    """Return the values of integer codes of a format of up to 16 bits, of a code book, or of blocks.

    Args:
        codes: a tensor of any integer dtype and shape, or the `BlockCodes` of a format of blocks.
        fmt: a format, or its name. A `BlockCodes` has its own.

    Returns:
        Float32 in the shape of `codes`, on its device; of blocks in the shape of the tensor.

    Raises:
        ValueError: for a format of more than 16 bits and for codes out of range.
        TypeError: for other dtypes.

    >>> decode(torch.tensor([0x3C00, 0x7C00]), "fp16")
    tensor([1., inf])
    >>> scale = torch.tensor([[128]], dtype=torch.uint8)  # 2**1
    >>> decode(BlockCodes("mxfp4", (1, 4), torch.tensor([[0x17, 0x2D]], dtype=torch.uint8), scale))
    tensor([[12.,  1., -6.,  2.]])
    """
    if isinstance(codes, BlockCodes):
        if fmt is not None and as_format(fmt) != codes.fmt:
            raise ValueError(f"codes are of {codes.fmt}, and fmt={shown(fmt)} was given. Omit fmt.")
        return decode_blocks(codes)
    if fmt is None:
        raise TypeError("decode got no fmt. Expected: the format of the codes; a BlockCodes alone has its own.")
    f = codable(fmt)
    if not isinstance(codes, Tensor):
        raise TypeError(f"codes is {type(codes).__name__}. Expected: a torch.Tensor; wrap it with torch.as_tensor.")
    if codes.layout is not torch.strided or codes.device.type == "meta":
        layout = str(codes.layout).removeprefix("torch.")
        raise TypeError(
            f"codes has layout {layout} on device {codes.device}. Expected: a dense tensor that holds numbers."
        )
    if codes.dtype.is_floating_point or codes.dtype.is_complex or codes.dtype is torch.bool:
        raise TypeError(f"codes has dtype {str(codes.dtype).removeprefix('torch.')}. Expected: any integer dtype.")
    if is_sample(codes):
        raise under_transform("decode")
    return element_values(codes, f)
