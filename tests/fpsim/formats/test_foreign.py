"""Formats as other libraries write them, against the values that those libraries give to their codes."""

from __future__ import annotations

from typing import Any

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from format_cases import GFLOAT, ML_DTYPES, same

import fpsim

TORCH = {
    "fp32": torch.float32,
    "fp16": torch.half,
    "bf16": torch.bfloat16,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2": torch.float8_e5m2,
    "e5m2fnuz": torch.float8_e5m2fnuz,
    "e8m0fnu": torch.float8_e8m0fnu,
}


@pytest.mark.parametrize("name", TORCH)
def test_a_dtype_of_torch_is_a_format(name: str) -> None:
    assert fpsim.as_format(TORCH[name]) == fpsim.as_format(name)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_a_scalar_type_of_numpy_or_ml_dtypes_and_its_dtype_are_formats(name: str) -> None:
    found = fpsim.as_format(ML_DTYPES[name])
    assert found == fpsim.as_format(np.dtype(ML_DTYPES[name])) == fpsim.as_format(name)
    info = ml_dtypes.finfo(ML_DTYPES[name])
    assert (found.largest, found.smallest_normal) == (float(info.max), float(info.smallest_normal))


@pytest.mark.parametrize("info", [*GFLOAT.values(), gfloat.formats.format_info_p3109(6, 3)], ids=lambda info: info.name)
def test_a_format_of_gfloat_has_its_values_at_its_codes(info: Any) -> None:
    fmt = fpsim.as_format(info)
    for code in range(2**info.k) if info.k <= 8 else range(0, 2**info.k, 97):
        theirs = torch.tensor(gfloat.decode_float(info, code).fval)
        assert same(torch.tensor(fmt.decode(code)), theirs) or (
            theirs.isnan() and torch.tensor(fmt.decode(code)).isnan()
        )


def test_it_is_taken_wherever_a_format_is() -> None:
    x = torch.linspace(-3, 3, 50)
    expected = fpsim.round_to(x, "e4m3fn")
    for fmt in (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn, gfloat.formats.format_info_ocp_e4m3):
        assert torch.equal(fpsim.round_to(x, fmt), expected)
        model = fpsim.quantize(torch.nn.Linear(2, 2), fmt)
        assert "e4m3fn" in str(model)
    assert fpsim.Policy(error=torch.float8_e5m2).specs() == fpsim.Policy(error="e5m2").specs()
    assert fpsim.Policy(overrides={"head": torch.bfloat16}).overrides


@pytest.mark.parametrize(
    "other", [torch.int8, torch.complex64, ml_dtypes.int4, np.int32, np.dtype("U3"), float, 3, None]
)
def test_what_is_no_floating_dtype_is_refused(other: Any) -> None:
    with pytest.raises(TypeError, match=r"Expected a format, got .* Use a name .* a floating dtype of torch"):
        fpsim.as_format(other)


def test_a_format_that_float32_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="Unknown format 'float64'"):
        fpsim.as_format(torch.float64)
    with pytest.raises(ValueError, match="exponent_bits=11 makes no format"):
        fpsim.as_format(gfloat.formats.format_info_binary64)
    with pytest.raises(ValueError, match=r"gfloat's format 'ocp_int8' has codes .* fpsim\.FixedPoint"):
        fpsim.as_format(gfloat.formats.format_info_ocp_int8)
