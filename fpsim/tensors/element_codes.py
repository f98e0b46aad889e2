"""Codes of single numbers: the bit patterns of a small float format, and the numbers of a code book."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fpsim.formats.blocks import as_format
from fpsim.formats.codebook import Codebook
from fpsim.formats.floats import FloatFormat
from fpsim.kernels.core import BINARY32, BINARY64
from fpsim.tensors.ops import round_to

__all__ = ["Coded", "codable", "element_codes", "element_values"]

Coded = FloatFormat | Codebook


def element_codes(x: Tensor, f: Coded, rounding: str = "nearest_even", overflow: str | None = None) -> Tensor:
    """Round a floating tensor and return the codes, int32. Raises ValueError for a NaN that has no code."""
    x = x.detach()
    rounded = round_to(x if x.dtype is torch.float64 else x.float(), f, rounding, overflow)
    is_nan = rounded.isnan()
    if not f.has_nan and is_nan.any():
        raise ValueError(f"x holds NaN and {f} has no code for it. Expected: finite values; see torch.nan_to_num.")
    width = 64 if x.dtype is torch.float64 else 32
    table, codes = (torch.from_numpy(a).to(x.device) for a in _code_table(f, width))
    # Patterns are compared, which no processor flushes to zero. As integers, those of negative numbers run backwards.
    patterns = rounded.view(torch.int32 if width == 32 else torch.int64)
    ordered = (patterns ^ ((patterns >> (width - 1)) & torch.iinfo(patterns.dtype).max)).contiguous()
    result = codes[torch.searchsorted(table, ordered).clamp_(max=len(table) - 1)]
    return torch.where(is_nan, torch.full_like(result, f.encode(math.nan) if f.has_nan else 0), result)


def element_values(codes: Tensor, f: Coded) -> Tensor:
    """Return the float32 values of integer codes. Raises ValueError for codes out of range."""
    index = codes.long()
    table = torch.from_numpy(_value_table(f))
    if codes.numel() and not 0 <= int(index.min()) <= int(index.max()) < len(table):
        raise ValueError(
            f"codes holds {int(index.min())} to {int(index.max())}. The codes of {f} are 0 to {len(table) - 1}."
        )
    return table.to(codes.device)[index]


def codable(fmt: str | Coded) -> Coded:
    """Return the format if its numbers have codes, else raise ValueError."""
    f = as_format(fmt)
    if not isinstance(f, Coded):
        raise ValueError(f"{f} has no codes here. Expected: a float format of up to 16 bits, or a code book.")
    if f.bits > 16:
        raise ValueError(f"{f} has {f.bits} bits. encode() and decode() take formats of up to 16 bits.")
    return f


# Arrays, not tensors: a cached tensor would keep the device or the tracer of the first call.


@cache
def _value_table(f: Coded) -> np.ndarray[Any, Any]:
    values = f.values if isinstance(f, Codebook) else [f.decode(code) for code in range(2**f.bits)]
    return np.array([BINARY32.bits(v) for v in values], np.uint32).view(np.float32)


@cache
def _code_table(f: Coded, width: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the patterns of all values in a container of `width` bits, with inf and -0, in order, and their codes."""
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
