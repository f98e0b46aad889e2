"""The CUDA kernels in Numba's simulator, against the CPU loops. Run by test_cuda.py in a process of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import cuda

from fpsim import as_format, kernels, ops
from fpsim.ops import rounding_spec
from fpsim.rounding import ROUNDINGS

FORMATS = {"bf16": "FLAT", "e4m3fn": "GRID", "dlfloat16": "GAP", "e8m0fnu": "SCALE", "e5m2fnuz": "GRID"}


def simulated(x: torch.Tensor, name: str, rounding: str, key: int, extra: int = 3) -> torch.Tensor:
    """Round through the kernel; `extra` guard elements behind the end must stay."""
    width = 64 if x.dtype is torch.float64 else 32
    plan = ops._kernel(rounding_spec(name, rounding), width).plan
    integer = np.uint64 if width == 64 else np.uint32
    source = x.numpy().view(integer)
    target = np.full(len(source) + extra, 77, integer)
    kernels.cuda_loop(plan.rule, plan.shape, plan.width)(
        cuda.to_device(source),
        device := cuda.to_device(target),
        len(source),
        plan.parameters,
        key & 0xFFFFFFFF,
        key >> 32,
        0,
    )
    result = device.copy_to_host()
    assert (result[len(source) :] == 77).all()
    return torch.from_numpy(result[: len(source)].view(x.numpy().dtype))


def sample(n: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(n, dtype=torch.float64) * torch.exp2(torch.randint(-45, 36, (n,)))
    x[:6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 2.0**-149], dtype=torch.float64)
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", FORMATS)
def test_the_kernel_gives_the_bits_of_the_cpu(name: str, rounding: str, dtype: torch.dtype) -> None:
    x = sample(389, dtype)
    spec, key = rounding_spec(name, rounding), 0x123456789ABCDEF
    expected = ops._rounded(x, spec, torch.tensor(key))
    integer = torch.int64 if dtype is torch.float64 else torch.int32
    assert torch.equal(simulated(x, name, rounding, key).view(integer), expected.view(integer))


@pytest.mark.parametrize("n", [1, 15, 16, 17, 127, 128, 129, 256, 257])
def test_every_length_is_covered_and_nothing_beyond(n: int) -> None:
    x = sample(400, torch.float32)[:n].clone()
    for rounding in ("nearest_even", "stochastic"):
        expected = ops._rounded(x, rounding_spec("fp16", rounding), torch.tensor(99))
        assert torch.equal(simulated(x, "fp16", rounding, 99).view(torch.int32), expected.view(torch.int32))


def test_the_formats_cover_every_shape() -> None:
    shapes = {ops._kernel(rounding_spec(as_format(name)), 32).plan.shape for name in FORMATS}
    assert shapes == {0, 1, 2, 3, 4}
