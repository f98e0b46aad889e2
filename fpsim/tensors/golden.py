"""Golden vectors: numbers and what they become, kept in `golden.json` and replayed by `python -m fpsim verify`.

The file is data for any project. Numbers are the bits of a float32 in hexadecimal, eight digits each; any NaN stands
for every NaN. The outputs come from a definition in fractions that shares nothing with this package.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fpsim.tensors.noise import seed_here
from fpsim.tensors.ops import round_to
from fpsim.tensors.verify import Row
from fpsim.undoing import Undo, undone

__all__ = ["FILE", "STREAM", "Case", "cases", "replay"]

FILE = Path(__file__).with_name("golden.json")
STREAM = 1  # the version of the noise: another number means other outputs of stochastic rounding for the same seed


class Case(NamedTuple):
    """Numbers that are rounded in one call.

    seed: of `fpsim.manual_seed`, for stochastic rounding.
    """

    fmt: str
    rounding: str
    seed: int | None
    random_bits: int | None
    variant: str
    x: Tensor
    expected: Tensor


def _tensor(words: str) -> Tensor:
    return torch.from_numpy(np.array([int(word, 16) for word in words.split()], np.uint32).view(np.float32))


def cases(file: Path = FILE) -> list[Case]:
    """The cases of the file.

    >>> sum(len(case.x) for case in cases())
    9920
    """
    content = json.loads(file.read_text(encoding="ascii"))
    if content["stream"] != STREAM:
        raise ValueError(f"{file} has the noise of stream {content['stream']}. This version draws stream {STREAM}.")
    inputs = {name: _tensor(words) for name, words in content["inputs"].items()}
    return [
        Case(
            case["format"],
            case["rounding"],
            case["seed"],
            case["random_bits"],
            case["variant"],
            inputs[case["format"]],
            _tensor(case["outputs"]),
        )
        for case in content["cases"]
    ]


def replay(device: str, file: Path = FILE) -> Iterator[Row]:
    """Round the inputs of each case on a device, and compare the bits: a row for each format."""
    by_format: dict[str, list[Case]] = {}
    for case in cases(file):
        by_format.setdefault(case.fmt, []).append(case)
    for name, of_format in by_format.items():
        count, wrong, first = 0, 0, ""
        for case in of_format:
            result = _rounded(case, device)
            both_nan = result.isnan() & case.expected.isnan()
            differs = (result.view(torch.int32) != case.expected.view(torch.int32)) & ~both_nan
            count, wrong = count + len(result), wrong + int(differs.sum())
            if differs.any() and not first:
                i = int(differs.nonzero()[0])
                x, y, z = (float(t[i]) for t in (case.x, result, case.expected))
                first = f"{x!r} {case.rounding} gives {y!r}, not {z!r}"
        detail = f"{wrong} of {count:,} numbers differ: {first}" if wrong else f"{count:,} numbers"
        yield Row(f"{name} golden vectors", not wrong, detail)


def _rounded(case: Case, device: str) -> Tensor:
    def rounded(undo: Undo) -> Tensor:
        if case.seed is not None:
            seed_here(undo, case.seed, case.seed)
        x = case.x.to(device)
        return round_to(x, case.fmt, case.rounding, None, case.random_bits, variant=case.variant)

    return undone(rounded).cpu()
