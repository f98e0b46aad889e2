"""Formats that several tests go through: made to order, and those that ml_dtypes and gfloat have too."""

from __future__ import annotations

from fractions import Fraction

import gfloat.formats
import ml_dtypes
import numpy as np
import oracle
import torch

import fpsim
from fpsim import FloatFormat, as_format

CUSTOM = [
    *(as_format(name) for name in ("e3m3", "e1m3", "e2m0", "e5m0", "e4m5fn", "e3m0fnuz", "e8m0", "e6m12", "e5m7")),
    FloatFormat(1, 4, 0, "none"),
    FloatFormat(1, 2, -3, "fn"),
    FloatFormat(4, 3, subnormals=False),
    FloatFormat(4, 3, 8, "fnuz", subnormals=False),
    FloatFormat(3, 0, 3, subnormals=False),
    FloatFormat(8, 7, subnormals=False),  # float32's exponents with a gap
    FloatFormat(4, 3, 140),  # all its values among float32's subnormals
    FloatFormat(5, 2, 140),
    FloatFormat(4, 3, 145, subnormals=False),
    FloatFormat(5, 2, 93),  # spacing 2**-94: the last that float32 rounds for itself
    FloatFormat(5, 2, 94),
    FloatFormat(3, 3, -120),  # close to float32's largest
    FloatFormat(3, 2, -120, "none"),
    FloatFormat(8, 3, 130, "fn"),  # the standard's bias would leave float32's range
    FloatFormat(8, 2, 128, "fnuz"),
    FloatFormat(3, 2, 4, "p3109"),
    FloatFormat(4, 4, 6, "dlfloat"),
    FloatFormat(5, 2, 140, "dlfloat"),
    FloatFormat(4, 0, 7, "scale"),
    FloatFormat(7, 0, 149, "scale"),  # powers of two among float32's subnormals
]
ALL = [*fpsim.CATALOGUE.values(), *CUSTOM]


def family(f: FloatFormat) -> tuple[str, bool, bool]:
    """What formats have in common that round by the same branches: special codes, subnormals, and float32's."""
    return f.specials, f.subnormals, f.bias > 127


ML_DTYPES = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e4m3b11fnuz": ml_dtypes.float8_e4m3b11fnuz,
    "e5m2": ml_dtypes.float8_e5m2,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e3m4": ml_dtypes.float8_e3m4,
    "e8m0fnu": ml_dtypes.float8_e8m0fnu,
    "e2m3fn": ml_dtypes.float6_e2m3fn,
    "e3m2fn": ml_dtypes.float6_e3m2fn,
    "e2m1fn": ml_dtypes.float4_e2m1fn,
}

GFLOAT = {
    "fp16": gfloat.formats.format_info_binary16,
    "bf16": gfloat.formats.format_info_bfloat16,
    "e4m3fn": gfloat.formats.format_info_ocp_e4m3,
    "e5m2": gfloat.formats.format_info_ocp_e5m2,
    "e2m3fn": gfloat.formats.format_info_ocp_e2m3,
    "e3m2fn": gfloat.formats.format_info_ocp_e3m2,
    "e2m1fn": gfloat.formats.format_info_ocp_e2m1,
    "p3109_p3": gfloat.formats.format_info_p3109(8, 3),
    "p3109_p4": gfloat.formats.format_info_p3109(8, 4),
}


def oracle_format(f: FloatFormat) -> oracle.Format:
    return oracle.make(f.exponent_bits, f.mantissa_bits, f.bias, f.specials, f.subnormals)


def fits(f: FloatFormat, dtype: torch.dtype) -> bool:
    """Whether `dtype` holds the values of `f` next to zero, next to one binade's end and next to the largest."""
    fmt = oracle_format(f)
    spacing = fmt.next_magnitude - fmt.largest
    lowest = Fraction(2) ** fmt.lowest_exponent
    ends = [fmt.smallest, lowest * (2 - Fraction(1, 2**f.mantissa_bits)), fmt.largest - spacing, fmt.largest]
    values = torch.tensor([float(v) for v in ends if 0 < v <= fmt.largest], dtype=torch.float64)
    return torch.equal(values.to(dtype).double(), values)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, any NaN equal to any NaN."""
    nan = a.isnan() & b.isnan()
    return bool((nan | ((a == b) & (a.signbit() == b.signbit()))).all())
