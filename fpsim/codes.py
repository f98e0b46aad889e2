"""Codes: the bit patterns of a small format, from numbers and back."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fpsim.blocks import as_format
from fpsim.formats import FloatFormat
from fpsim.ops import round_to
from fpsim.spec import require_floating

__all__ = ["decode", "encode"]


def encode(x: Tensor, fmt: str | FloatFormat, rounding: str = "nearest_even", overflow: str | None = None) -> Tensor:
    """Round `x` to a format of up to 16 bits and give the codes.

    NaN gives the canonical (first quiet) NaN.

    x, fmt, rounding, overflow: as in `round_to`; `x` is a tensor.
    Returns int32 in the shape of `x`, on its device.
    Raises ValueError for a format of more than 16 bits, and where `x` holds a NaN and the format has none.

    >>> encode(torch.tensor([1.0, -448.0]), "e4m3fn")
    tensor([ 56, 254], dtype=torch.int32)
    """
    f = _codable(fmt)
    require_floating(x)
    values, codes = map(torch.from_numpy, _code_table(f))
    rounded = round_to(x.detach().double(), f, rounding, overflow)
    if not f.has_nan and rounded.isnan().any():
        raise ValueError(f"x holds NaN and {f} has no code for it. Possible: finite values; see torch.nan_to_num.")
    table, index = values.to(x.device), codes.to(x.device)
    result = index[torch.searchsorted(table, rounded).clamp_(max=len(table) - 1)]
    special = torch.full_like(result, f.encode(float("nan")) if f.has_nan else 0)
    result = torch.where(rounded.isnan(), special, result)
    if f.has_negative_zero:
        result = torch.where((rounded == 0) & rounded.signbit(), special.fill_(f.encode(-0.0)), result)
    return result


def decode(codes: Tensor, fmt: str | FloatFormat) -> Tensor:
    """The values of integer codes of a format of up to 16 bits.

    codes: a tensor of any integer dtype and shape.
    fmt: a format, or its name.
    Returns float32 in the shape of `codes`, on its device.
    Raises ValueError for a format of more than 16 bits and for codes out of range, TypeError for other dtypes.

    >>> decode(torch.tensor([0x3C00, 0x7C00]), "fp16")
    tensor([1., inf])
    """
    f = _codable(fmt)
    if not isinstance(codes, Tensor):
        raise TypeError(f"codes is {type(codes).__name__}. Possible: a torch.Tensor; wrap it with torch.as_tensor.")
    if codes.dtype.is_floating_point or codes.dtype.is_complex or codes.dtype is torch.bool:
        raise TypeError(f"codes has dtype {str(codes.dtype).removeprefix('torch.')}. Possible: any integer dtype.")
    index = codes.long()
    if codes.numel() and not 0 <= int(index.min()) <= int(index.max()) < 2**f.bits:
        raise ValueError(
            f"codes holds {int(index.min())} to {int(index.max())}. The codes of {f} are 0 to {2**f.bits - 1}."
        )
    return torch.from_numpy(_value_table(f)).to(codes.device)[index]


def _codable(fmt: str | FloatFormat) -> FloatFormat:
    f = as_format(fmt)
    if not isinstance(f, FloatFormat):
        raise ValueError(f"{f} has no codes here. encode() and decode() take float formats of up to 16 bits.")
    if f.bits > 16:
        raise ValueError(f"{f} has {f.bits} bits. encode() and decode() take formats of up to 16 bits.")
    return f


# Arrays, not tensors: a tensor would keep the device or the tracer under which it was first asked for.


@cache
def _value_table(f: FloatFormat) -> np.ndarray[Any, Any]:
    return np.array([f.decode(code) for code in range(2**f.bits)], np.float32)


@cache
def _code_table(f: FloatFormat) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Ascending values, inf included, and their codes."""
    values = [*f.values()]
    if f.has_inf:
        values = [-math.inf, *values, math.inf]
    return np.array(values), np.array([f.encode(v) for v in values], np.int32)
