"""Golden vectors: numbers and their rounded values, stored in `golden.json` and replayed by `python -m fpsim verify`.

The file is data for any project. Numbers are the bits of a float32 in hexadecimal, eight digits each; any NaN stands
for every NaN. The outputs come from a definition in fractions that shares nothing with this package. The section
`blocks` contains the stored form of tensors whose blocks share scales; its `about` describes this form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fpsim.tensors.codes import decode, encode
from fpsim.tensors.noise import seed_here
from fpsim.tensors.ops import round_to
from fpsim.tensors.verify import Row
from fpsim.undoing import Undo, undone

__all__ = ["BLOCKS_VERSION", "FILE", "STREAM", "BlockCase", "Case", "block_cases", "cases", "replay"]

FILE = Path(__file__).with_name("golden.json")
# The version of the noise: another number means other outputs of stochastic rounding for the same seed.
STREAM = 1
# The version of the section of blocks: another number means other codes, scales or outputs.
BLOCKS_VERSION = 1


class Case(NamedTuple):
    """Numbers that are rounded in one call.

    seed: the seed for `fpsim.manual_seed`, in stochastic rounding.
    """

    fmt: str
    rounding: str
    seed: int | None
    random_bits: int | None
    variant: str
    x: Tensor
    expected: Tensor


class BlockCase(NamedTuple):
    """A tensor that is encoded in one call, and its stored form.

    codes, scales: the bytes of the codes, row by row; for scales in float32, the bytes of the numbers.
    tensor_scale: the second scale; None for a format that has none.
    """

    fmt: str
    x: Tensor
    codes: bytes
    scales: bytes
    tensor_scale: Tensor | None
    expected: Tensor


def _tensor(words: str) -> Tensor:
    return torch.from_numpy(np.array([int(word, 16) for word in words.split()], np.uint32).view(np.float32))


def cases(file: Path = FILE) -> list[Case]:
    """Return the cases of the file.

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


def block_cases(file: Path = FILE) -> list[BlockCase]:
    """Return the cases of the section of blocks.

    >>> first = block_cases()[0]
    >>> first.fmt, tuple(first.x.shape), len(first.codes), len(first.scales)
    ('mxfp4', (9, 64), 288, 18)
    """
    content = json.loads(file.read_text(encoding="ascii")).get("blocks", {"version": BLOCKS_VERSION, "cases": []})
    if content["version"] != BLOCKS_VERSION:
        raise ValueError(
            f"The section of blocks of {file} has version {content['version']}. Expected: version {BLOCKS_VERSION}."
        )
    inputs = {name: _tensor(words).view(-1, content["columns"]) for name, words in content.get("inputs", {}).items()}
    return [
        BlockCase(
            case["format"],
            inputs[case["input"]],
            bytes.fromhex(case["codes"]),
            _tensor(case["scales"]).numpy().tobytes() if case["scale_bits"] == 32 else bytes.fromhex(case["scales"]),
            None if case["tensor_scale"] is None else _tensor(case["tensor_scale"])[0],
            _tensor(case["outputs"]).view(-1, content["columns"]),
        )
        for case in content["cases"]
    ]


def replay(device: str, file: Path = FILE) -> Iterator[Row]:
    """Round the inputs of each case on a device, and compare the bits. Yields a row for each format, blocks too."""
    by_format: dict[str, list[Case]] = {}
    for case in cases(file):
        by_format.setdefault(case.fmt, []).append(case)
    for name, of_format in by_format.items():
        count, wrong, first = 0, 0, ""
        for case in of_format:
            result = _rounded(case, device)
            differs = _differs(result, case.expected)
            count, wrong = count + len(result), wrong + int(differs.sum())
            if differs.any() and not first:
                i = int(differs.nonzero()[0])
                x, y, z = (float(t[i]) for t in (case.x, result, case.expected))
                first = f"{x!r} {case.rounding} gives {y!r}, not {z!r}"
        detail = f"{wrong} of {count:,} numbers differ: {first}" if wrong else f"{count:,} numbers"
        yield Row(f"{name} golden vectors", not wrong, detail)
    blocks: dict[str, list[BlockCase]] = {}
    for block_case in block_cases(file):
        blocks.setdefault(block_case.fmt, []).append(block_case)
    for name, of_blocks in blocks.items():
        found = [words for case in of_blocks if (words := _wrong_part(case, device))]
        count = sum(case.x.numel() for case in of_blocks)
        yield Row(f"{name} golden blocks", not found, found[0] if found else f"{count:,} numbers and their codes")


def _differs(result: Tensor, expected: Tensor) -> Tensor:
    """Return a mask of the elements whose bits differ; any NaN equals any other NaN."""
    both_nan = result.isnan() & expected.isnan()
    return (result.view(torch.int32) != expected.view(torch.int32)) & ~both_nan


def _wrong_part(case: BlockCase, device: str) -> str:
    """Return the first part of the stored form that differs, in words; "" if all is as expected."""
    x = case.x.to(device)
    stored = encode(x, case.fmt)
    for name, part, expected in (("codes", stored.codes, case.codes), ("scales", stored.scales, case.scales)):
        found = part.cpu().numpy()
        is_nan = found != found
        # For scales in float32, any NaN stands for every NaN.
        if name == "scales" and is_nan.any():
            found = np.where(is_nan, np.float32(np.nan), found)
        if found.tobytes() != expected:
            byte = next(i for i, (a, b) in enumerate(zip(found.tobytes(), expected, strict=True)) if a != b)
            return f"byte {byte} of the {name} is {found.tobytes()[byte]:#04x}, not {expected[byte]:#04x}"
    second = stored.tensor_scale
    if case.tensor_scale is not None and (second is None or _differs(second.cpu(), case.tensor_scale).any()):
        return f"the tensor_scale is {second!r}, not {float(case.tensor_scale)!r}"
    for words, result in (("rounds", round_to(x, case.fmt)), ("decodes", decode(stored))):
        differs = _differs(result.cpu(), case.expected)
        if differs.any():
            at = tuple(differs.nonzero()[0].tolist())
            return f"{float(case.x[at])!r} {words} to {float(result[at])!r}, not {float(case.expected[at])!r}"
    return ""


def _rounded(case: Case, device: str) -> Tensor:
    """Round the numbers of a case, and restore the streams of random numbers."""

    def rounded(undo: Undo) -> Tensor:
        if case.seed is not None:
            seed_here(undo, case.seed, case.seed)
        x = case.x.to(device)
        return round_to(x, case.fmt, case.rounding, None, case.random_bits, variant=case.variant)

    return undone(rounded).cpu()
