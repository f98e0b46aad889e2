"""The CUDA kernels compiled to PTX without a card. Run by test_cuda.py in a process of its own."""

from __future__ import annotations

import re

import pytest
from numba import types
from numba.cuda import compile_ptx

from fpsim.kernels import cuda_kernel
from fpsim.rounding import ROUNDINGS

# An instruction on floating-point registers or with a floating-point type.
FLOATING = re.compile(r"^\s*(?!\.|//)\S*\.(f16|f16x2|bf16|bf16x2|f32|f64|tf32)\b", re.MULTILINE)


def ptx(rule: int, shape: int, width: int, capability: tuple[int, int]) -> str:
    integer = types.uint32 if width == 32 else types.uint64
    array = types.Array(integer, 1, "C")
    signature = (array, array, *[types.int64] * 11)
    text, _ = compile_ptx(cuda_kernel(rule, shape, width), signature, cc=capability)
    return str(text)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)], ids="cc{0[0]}.{0[1]}".format)
@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("shape", range(5), ids=["flat", "grid", "gap", "scale", "unsigned_zero"])
@pytest.mark.parametrize("rule", range(7), ids=ROUNDINGS)
def test_the_kernel_compiles_and_holds_no_floating_point(
    rule: int, shape: int, width: int, capability: tuple[int, int]
) -> None:
    text = ptx(rule, shape, width, capability)
    assert f".target sm_{capability[0]}{capability[1]}" in text
    assert FLOATING.findall(text) == []


def test_a_floating_point_instruction_would_be_found() -> None:
    def kernel(x, y):  # type: ignore[no-untyped-def]
        y[0] = x[0] * x[1] + x[2]

    array = types.Array(types.float32, 1, "C")
    text, _ = compile_ptx(kernel, (array, array), cc=(9, 0))
    assert FLOATING.findall(str(text)) != []
