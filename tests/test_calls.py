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
    "Linear and GELU in e4m3fn, forward": 106,
    "Linear and GELU in e4m3fn, backward": 28,
    "an addition under emulate": 14,
    "why on README's example, insight's own part": 3500,
}
MOST_FILES, MOST_RUNS = 13, 10  # of insight that `why` enters there, and of the step


@pytest.fixture(scope="module")
def printed() -> str:
    """By a process of its own: whether anything was ever float32 on purpose is asked of the process."""
    return subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def counts(printed: str) -> dict[str, int]:
    return {name: int(number) for name, number in re.findall(r"^(.*?) +(\d+) calls of", printed, re.MULTILINE)}


@pytest.mark.parametrize("name", MOST)
def test_a_small_call_enters_no_more_functions_than_it_did(name: str, counts: dict[str, int]) -> None:
    assert counts[name] <= MOST[name]


def test_why_stays_in_few_files_and_runs_the_step_no_more_often_than_it_did(printed: str) -> None:
    found = re.search(r"^why on .* in (\d+) files, of (\d+) runs of the step", printed, re.MULTILINE)
    assert found is not None
    files, runs = map(int, found.groups())
    assert files <= MOST_FILES
    assert runs <= MOST_RUNS


def test_each_call_is_counted_once_and_nothing_of_torch() -> None:
    calls, x = SimpleNamespace(**runpy.run_path(str(SCRIPT))), torch.ones(4)
    fpsim.round_to(x, "fp16")
    found = calls.entered(lambda: [fpsim.round_to(x, "fp16") for _ in range(3)])
    assert found["tensors/ops.py: round_to"] == 3
    assert found["tensors/launch.py: launch"] == 3
    assert all((Path(fpsim.__file__).parent / name.partition(":")[0]).exists() for name in found)
