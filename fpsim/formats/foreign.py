"""Formats of other libraries: dtypes of torch, NumPy and ml_dtypes, and gfloat's FormatInfo."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from fpsim.checks import shown
from fpsim.formats.floats import FloatFormat, as_float_format

__all__ = ["from_other_library"]

FLOAT_NAME = re.compile(r"b?float\d+\w*")


def from_other_library(fmt: Any) -> FloatFormat:
    """Return the float format that an object of another library describes, without importing torch or gfloat.

    fmt: a floating dtype of torch, a NumPy scalar type or dtype (ml_dtypes has some), or gfloat's FormatInfo.
    Raises TypeError for anything else, ValueError for a format that this library does not have, such as float64.

    >>> import ml_dtypes
    >>> str(from_other_library(ml_dtypes.float8_e4m3fnuz)), str(from_other_library(np.dtype("float16")))
    ('e4m3fnuz', 'fp16')
    """
    kind = type(fmt)
    # Types are compared by name: `isinstance` would need torch and gfloat, which this folder does not import.
    if kind.__name__ == "FormatInfo" and kind.__module__.partition(".")[0] == "gfloat":
        return _from_gfloat(fmt)
    if kind.__name__ == "dtype" and kind.__module__ == "torch":
        name = str(fmt).removeprefix("torch.")
    elif isinstance(fmt, np.dtype):
        name = fmt.name
    elif isinstance(fmt, type) and issubclass(fmt, np.generic):
        name = fmt.__name__
    else:
        name = ""
    if not FLOAT_NAME.fullmatch(name):
        raise TypeError(
            f"Expected a format, got {shown(fmt)} of type {kind.__name__}. Use a name such as 'fp16', a "
            f"FloatFormat, a floating dtype of torch, NumPy or ml_dtypes, or gfloat's FormatInfo."
        )
    return as_float_format(name)


def _from_gfloat(info: Any) -> FloatFormat:
    mantissa_bits = info.precision - 1
    # The key is (signed, has infinities, has -0, NaNs among the highest codes of a sign).
    kinds = {
        (True, True, True, 2**mantissa_bits - 1): "ieee",
        (True, True, False, 0): "p3109",
        (True, False, True, 1): "fn",
        (True, False, False, 0): "fnuz",
        (True, False, True, 0): "none",
        (False, False, False, 1): "scale",
    }
    kind = (info.is_signed, info.num_posinfs > 0, info.has_nz, info.num_high_nans)
    if info.is_twos_complement or kind not in kinds:
        raise ValueError(
            f"gfloat's format {info.name!r} has codes that no format of this library has. Expected: the special codes "
            f"of IEEE 754, OCP OFP8 and MX, ml_dtypes or P3109; for integers fpsim.FixedPoint."
        )
    return FloatFormat(info.expBits, mantissa_bits, info.bias, kinds[kind], info.has_subnormals)
