"""Every operation of torch computes in the emulation as native code does, or is listed with the reason.

`tests/every_operation.py` says what is compared.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from children import environment
from tiers import parametrize

import fpsim

NATIVE = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "parity.md").read_text()
MOST_THAT_DIFFER = 25
DIFFER = dict(re.findall(r"^\| `([\w.]+)` \| (.+) \|$", PAGE.partition("## Operations that differ")[2], re.MULTILINE))


def hold(fmt: str, samples: int, every: int = 1) -> None:
    """Compare so many samples of each operation, or of one in `every` of them; 0 for all samples."""
    command = [sys.executable, str(ROOT / "tests" / "every_operation.py")]
    command += ["--format", fmt, "--samples", str(samples), "--every", str(every)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    print(fmt, found["operations"], "operations,", found["calls"], "calls,", *found["faults"])
    assert found["operations"] > 500 // every
    assert {name: texts for name, texts in found["faults"].items() if name not in DIFFER} == {}


@parametrize(
    ("fmt", "samples", "every"), [("bf16", 2, 1), ("fp16", 1, 1), ("bf16", 1, 90)], keep=lambda *case: case[2] > 1
)
def test_every_operation_is_as_near_to_float64_as_native_code(fmt: str, samples: int, every: int) -> None:
    hold(fmt, samples, every)


@pytest.mark.slow
@pytest.mark.timeout(10**5)
@pytest.mark.parametrize("fmt", NATIVE)
def test_every_sample_of_every_operation_is_as_near_to_float64_as_native_code(fmt: str) -> None:
    hold(fmt, 0)


def test_few_operations_differ_and_each_has_a_reason() -> None:
    assert 0 < len(DIFFER) <= MOST_THAT_DIFFER
    assert min(map(len, DIFFER.values())) > 20


def foreach_calls(name: str, fmt: str) -> Iterator[tuple[list[Any], Any]]:
    """The arguments with which native code takes one of torch's operations on lists, and what it makes of them."""
    torch.manual_seed(0)
    low = [torch.rand(3, 5).to(NATIVE[fmt]) + 0.5 for _ in range(4)]
    function = getattr(torch, name)
    for given in ([], [1.01], [low[1:2]], [low[1:2], 0.3], [low[1:2], low[2:3]], [low[1:2], low[2:3], 0.3]):
        z = low[0].clone()
        try:
            function([z], *given)
        except (RuntimeError, TypeError):
            continue
        yield [low[0], *given], z


FOREACH = sorted(name for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_"))


@pytest.mark.parametrize("fmt", NATIVE)
@pytest.mark.parametrize("name", FOREACH)
def test_an_operation_on_lists_leaves_numbers_of_the_format(name: str, fmt: str) -> None:
    unit = torch.finfo(NATIVE[fmt]).eps
    for (first, *given), native in foreach_calls(name, fmt):
        wide = [[x.float() for x in value] if isinstance(value, list) else value for value in given]
        for view in (lambda z: z, lambda z: z[:], lambda z: z.detach()):
            outside = first.float()
            with fpsim.emulate(fmt):
                z = outside * 1.0
                getattr(torch, name)([view(z)], *wide)
            assert torch.equal(z.nan_to_num(7), z.to(NATIVE[fmt]).float().nan_to_num(7)), given
            # native code rounds inside of some of them: addcdiv, pow
            assert torch.allclose(z, native.float(), rtol=3 * unit, atol=unit / 2, equal_nan=True), given


@pytest.mark.parametrize("fmt", NATIVE)
def test_what_is_made_like_a_tensor_of_the_format_is_in_it(fmt: str) -> None:
    third = torch.tensor(0.3).to(NATIVE[fmt]).float()
    outside = torch.ones(3)
    with fpsim.emulate(fmt):
        x = outside * 1.0
        made = [x.new_full((3,), 0.3), torch.full_like(x, 0.3), x.new_tensor([0.3] * 3), x.clone().fill_(0.3)]
    for y in made:
        assert torch.equal(y, third.expand(3))
