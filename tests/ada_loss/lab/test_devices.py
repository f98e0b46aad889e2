"""float32 on a GPU is float32 while a cell computes, and afterwards what it was before."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tiers

HEAD = """
import pytest
import torch
from torch.backends import cudnn
from ada_loss.lab.devices import float32_in_full

def now():
    return cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
"""
INSIDE = "('ieee', 'ieee')"


def said(code: str) -> list[str]:
    """What a process prints, of its own: torch keeps these settings for all of one."""
    return subprocess.run([sys.executable, "-c", HEAD + code], capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )


@tiers.parametrize(
    "before",
    [
        "pass",
        "cudnn.allow_tf32 = False",
        "cudnn.conv.fp32_precision = 'tf32'; cudnn.rnn.fp32_precision = 'ieee'",
        "cudnn.fp32_precision = 'tf32'",
        "torch.backends.fp32_precision = 'tf32'",
        "torch.backends.fp32_precision = 'ieee'",
    ],
    keep={"cudnn.conv.fp32_precision = 'tf32'; cudnn.rnn.fp32_precision = 'ieee'"},  # each is a process
)
def test_convolutions_are_not_computed_in_tf32_on_a_card_and_as_before_afterwards(before: str) -> None:
    code = """
print(now())
with float32_in_full("cpu"):
    print(now())
try:
    with float32_in_full("cuda:1"):
        print(now())
        raise KeyError
except KeyError:
    print(now())
"""
    first, on_cpu, inside, after, _ = said(before + code)
    assert first == on_cpu == after
    assert inside == INSIDE


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.full
def test_the_older_of_torchs_two_interfaces_says_the_same(before: bool) -> None:
    code = f"""
cudnn.allow_tf32 = {before}
with float32_in_full("cuda"):
    print(cudnn.allow_tf32)
print(cudnn.allow_tf32)
"""
    assert said(code)[:2] == ["False", str(before)]


def test_trainings_of_several_threads_end_in_any_order() -> None:
    code = """
first, second = (float32_in_full("cuda") for _ in range(2))
before = now()
first.__enter__(), second.__enter__()
first.__exit__(None, None, None)
print(now())
second.__exit__(None, None, None)
print(now() == before)
"""
    assert said(code)[:2] == [INSIDE, "True"]
