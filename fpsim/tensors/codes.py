"""Codes: the bit patterns of a small format, from numbers and back; and the scales that blocks of numbers share."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fpsim.checks import shown
from fpsim.formats.blocks import BlockFormat, as_format
from fpsim.formats.codebook import Codebook
from fpsim.formats.floats import FloatFormat
from fpsim.kernels.core import BINARY32, BINARY64
from fpsim.tensors.cuts import axis_pair
from fpsim.tensors.ops import round_to
from fpsim.tensors.shared_scales import block_scales
from fpsim.tensors.spec import BlockSpec, any_spec, require_float32, require_floating, under_transform
from fpsim.torch_modes import is_plain, is_sample

__all__ = ["decode", "encode", "scales_of"]

Coded = FloatFormat | Codebook


def encode(x: Tensor, fmt: str | Coded, rounding: str = "nearest_even", overflow: str | None = None) -> Tensor:
    """Round `x` to a format of up to 16 bits, or a code book, and return the codes.

    NaN gives the canonical (first quiet) NaN.

    Args:
        x, fmt, rounding, overflow: as in `round_to`; `x` is a tensor.

    Returns:
        Int32 in the shape of `x`, on its device.

    Raises:
        ValueError: for a format of more than 16 bits, and where `x` holds a NaN and the format has none.

    >>> encode(torch.tensor([1.0, -448.0]), "e4m3fn")
    tensor([ 56, 254], dtype=torch.int32)
    """
    f = _codable(fmt)
    require_floating(x)
    if x.device.type == "meta":
        raise TypeError("x is on device meta, where tensors hold no numbers to encode. Expected: cpu, cuda.")
    x = x.detach()
    rounded = round_to(x if x.dtype is torch.float64 else x.float(), f, rounding, overflow)
    is_nan = rounded.isnan()
    if not f.has_nan and is_nan.any():
        raise ValueError(f"x holds NaN and {f} has no code for it. Expected: finite values; see torch.nan_to_num.")
    width = 64 if x.dtype is torch.float64 else 32
    table, codes = (torch.from_numpy(a).to(x.device) for a in _code_table(f, width))
    # by patterns, which no processor flushes to zero; read as integers, those of negative numbers run backwards
    patterns = rounded.view(torch.int32 if width == 32 else torch.int64)
    ordered = (patterns ^ ((patterns >> (width - 1)) & torch.iinfo(patterns.dtype).max)).contiguous()
    result = codes[torch.searchsorted(table, ordered).clamp_(max=len(table) - 1)]
    return torch.where(is_nan, torch.full_like(result, f.encode(math.nan) if f.has_nan else 0), result)


def scales_of(x: Tensor, fmt: str | BlockFormat, *, axis: int | tuple[int, int] | None = None) -> Tensor:
    """The scales that the blocks of `x` share in a format: each value is an element times the scale of its block.

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


def decode(codes: Tensor, fmt: str | Coded) -> Tensor:
    """The values of integer codes of a format of up to 16 bits, or of a code book.

    Args:
        codes: a tensor of any integer dtype and shape.
        fmt: a format, or its name.

    Returns:
        Float32 in the shape of `codes`, on its device.

    Raises:
        ValueError: for a format of more than 16 bits and for codes out of range.
        TypeError: for other dtypes.

    >>> decode(torch.tensor([0x3C00, 0x7C00]), "fp16")
    tensor([1., inf])
    """
    f = _codable(fmt)
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
    index = codes.long()
    table = torch.from_numpy(_value_table(f))
    if codes.numel() and not 0 <= int(index.min()) <= int(index.max()) < len(table):
        raise ValueError(
            f"codes holds {int(index.min())} to {int(index.max())}. The codes of {f} are 0 to {len(table) - 1}."
        )
    return table.to(codes.device)[index]


def _codable(fmt: str | Coded) -> Coded:
    f = as_format(fmt)
    if not isinstance(f, Coded):
        raise ValueError(f"{f} has no codes here. Expected: a float format of up to 16 bits, or a code book.")
    if f.bits > 16:
        raise ValueError(f"{f} has {f.bits} bits. encode() and decode() take formats of up to 16 bits.")
    return f


# Arrays, not tensors: a tensor would keep the device or the tracer under which it was first asked for.


@cache
def _value_table(f: Coded) -> np.ndarray[Any, Any]:
    values = f.values if isinstance(f, Codebook) else [f.decode(code) for code in range(2**f.bits)]
    return np.array([BINARY32.bits(v) for v in values], np.uint32).view(np.float32)


@cache
def _code_table(f: Coded, width: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The patterns of all values in a container of `width` bits, inf and -0 included, in order, and their codes."""
    values = [v for v, _ in f.ascending] if isinstance(f, Codebook) else [*f.values()]
    if f.has_inf and not isinstance(f, Codebook):
        values = [-math.inf, *values, math.inf]
    if f.has_negative_zero:
        values.insert(values.index(0.0), -0.0)
    container = BINARY32 if width == 32 else BINARY64
    integer: Any = np.int32 if width == 32 else np.int64
    patterns = np.array([container.bits(v) for v in values], np.uint32 if width == 32 else np.uint64).view(integer)
    ordered = patterns ^ ((patterns >> (width - 1)) & np.iinfo(integer).max)
    return ordered, np.array([f.encode(v) for v in values], np.int32)
