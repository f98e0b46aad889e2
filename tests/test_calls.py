"""What a small call costs in functions of ours: no more than it did, and the counter counts."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fpsim

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "calls.py"
MOST = {
    'round_to(x, "e4m3fn")': 5,
    'round_to(x, "mxfp8_e4m3")': 11,
    "Linear and GELU in e4m3fn, forward": 99,
    "Linear and GELU in e4m3fn, backward": 28,
    "an addition under emulate": 14,
}


@pytest.fixture(scope="module")
def counts() -> dict[str, int]:
    """By a process of its own: whether anything was ever float32 on purpose is asked of the process."""
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    return {name: int(number) for name, number in re.findall(r"^(.*?) +(\d+) calls of", done.stdout, re.MULTILINE)}


@pytest.mark.parametrize("name", MOST)
def test_a_small_call_enters_no_more_functions_than_it_did(name: str, counts: dict[str, int]) -> None:
    assert counts[name] <= MOST[name]


def test_each_call_is_counted_once_and_nothing_of_torch() -> None:
    calls, x = SimpleNamespace(**runpy.run_path(str(SCRIPT))), torch.ones(4)
    fpsim.round_to(x, "fp16")
    found = calls.entered(lambda: [fpsim.round_to(x, "fp16") for _ in range(3)])
    assert found["tensors/ops.py: round_to"] == 3
    assert found["tensors/launch.py: launch"] == 3
    assert all((Path(fpsim.__file__).parent / name.partition(":")[0]).exists() for name in found)
