"""CUDA: in the simulator and as PTX anywhere, on a card where there is one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fpsim
from fpsim import kernels, ops, round_to
from fpsim.rounding import ROUNDINGS

HERE = Path(__file__).parent


def run_alone(file: str, **environment: str) -> None:
    """pytest on one file in a process of its own: the simulator is chosen when Numba is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(HERE / "cuda" / file)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, cwd=HERE.parent)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_the_kernels_in_the_simulator() -> None:
    run_alone("simulator.py", NUMBA_ENABLE_CUDASIM="1")


@pytest.mark.skipif(importlib.util.find_spec("nvidia") is None, reason="NVVM is not installed: pip install nvidia-nvvm")
def test_the_kernels_as_ptx() -> None:
    run_alone("ptx.py")


def test_a_cuda_tensor_without_numba_cuda_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "numba_cuda", None)  # what Python leaves for a package that is not there
    with pytest.raises(RuntimeError, match=r"numba-cuda is not installed.*pip install 'fpsim\[cuda12\]'.*\.cpu\(\)"):
        kernels.cuda_loop.__wrapped__(0, 0, 32)


# On a card


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in fpsim.CATALOGUE for dtype in (torch.float32, torch.float64)),
        ("fp16", torch.float16),
        ("e5m2", torch.float16),
        ("e4m3fn", torch.bfloat16),
    ],
    ids=str,
)
def test_the_card_gives_the_bits_of_the_cpu(name: str, rounding: str, dtype: torch.dtype) -> None:
    x = (torch.randn(100_003, dtype=torch.float64) * torch.exp2(torch.randint(-45, 36, (100_003,)))).to(dtype)
    fpsim.manual_seed(3)
    expected = round_to(x, name, rounding)
    fpsim.manual_seed(3)
    got = round_to(x.cuda(), name, rounding).cpu()
    assert torch.equal(got.nan_to_num(123.0), expected.nan_to_num(123.0))
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.signbit(), expected.signbit())


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_strides_place_and_streams_change_nothing_on_the_card(rounding: str) -> None:
    x = torch.randn(16, 8, 12, 10)
    for view in (x, x.transpose(0, 3), x[::2, 1:], x.to(memory_format=torch.channels_last)):
        fpsim.manual_seed(5)
        expected = round_to(view, "e4m3fn", rounding)
        for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                card = torch.empty_strided(view.size(), view.stride(), device="cuda").copy_(view)
                fpsim.manual_seed(5)
                got = round_to(card, "e4m3fn", rounding)
                fpsim.manual_seed(5)
                fpsim.round_to_(card, "e4m3fn", rounding)
            stream.synchronize()
            assert torch.equal(got.cpu(), expected)
            assert torch.equal(card.cpu(), expected)


@pytest.mark.gpu
def test_rounding_on_the_card_waits_for_nothing() -> None:
    x = torch.randn(1000, device="cuda")
    spec = ops.rounding_spec("fp16")
    ops._rounded(x, spec)  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        round_to(x, "fp16")
        round_to(x, "fp16", "stochastic")
        fpsim.round_to_(x.t(), "e5m2")
    finally:
        torch.cuda.set_sync_debug_mode("default")
