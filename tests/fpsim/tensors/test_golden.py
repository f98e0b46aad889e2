"""The golden vectors: made by the oracle, equal to other libraries where these have the format, and replayed."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gfloat
import golden_blocks
import golden_vectors
import ml_dtypes
import numpy as np
import pytest
import torch
from format_cases import GFLOAT, ML_DTYPES, same

import fpsim
from fpsim.__main__ import main
from fpsim.tensors import golden
from fpsim.tensors.golden import FILE, block_cases, cases, replay

CASES = cases()
GFLOAT_RULES = {
    "nearest_even": gfloat.RoundMode.TiesToEven,
    "nearest_away": gfloat.RoundMode.TiesToAway,
    "toward_zero": gfloat.RoundMode.TowardZero,
    "up": gfloat.RoundMode.TowardPositive,
    "down": gfloat.RoundMode.TowardNegative,
}


def test_the_file_is_what_the_oracle_gives() -> None:
    assert FILE.read_text(encoding="ascii") == golden_vectors.content(), "run `python tests/golden_vectors.py --write`"


def test_there_are_vectors_of_every_named_format_and_every_rounding() -> None:
    assert {case.fmt for case in CASES} == set(fpsim.CATALOGUE)
    assert {case.rounding for case in CASES} == {*GFLOAT_RULES, "to_odd", "stochastic"}
    assert sum(len(case.x) for case in CASES) == 9920
    different = {(case.fmt, case.rounding, case.seed) for case in CASES}
    assert len(different) == len(CASES)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_to_nearest_they_are_the_casts_of_ml_dtypes(name: str) -> None:
    (case,) = (case for case in CASES if (case.fmt, case.rounding) == (name, "nearest_even"))
    fmt = fpsim.CATALOGUE[name]
    within = case.x.abs() <= fmt.largest  # beyond it, casts of ml_dtypes give NaN where these saturate
    if name == "e8m0fnu":
        within &= case.x.abs() >= 2.0**-126  # ml_dtypes misrounds 22 subnormals of float32
    assert within.sum() > 20
    with np.errstate(all="ignore"):
        theirs = torch.from_numpy(case.x.numpy().astype(ML_DTYPES[name]).astype(np.float32))
    assert same(case.expected[within], theirs[within])


@pytest.mark.parametrize("rounding", GFLOAT_RULES)
@pytest.mark.parametrize("name", GFLOAT)
def test_they_are_what_gfloat_rounds(name: str, rounding: str) -> None:
    (case,) = (case for case in CASES if (case.fmt, case.rounding) == (name, rounding))
    compared = 0
    for x, expected in zip(case.x.tolist(), case.expected.tolist(), strict=True):
        if abs(x) <= fpsim.CATALOGUE[name].largest:
            theirs = gfloat.round_float(GFLOAT[name], x, GFLOAT_RULES[rounding])
            assert struct.pack("<d", theirs) == struct.pack("<d", expected), x
            compared += 1
    assert compared > 20


def test_the_stream_of_a_seed_is_that_of_manual_seed() -> None:
    case = next(case for case in CASES if case.fmt == "e5m2" and case.rounding == "stochastic")
    fpsim.manual_seed(case.seed)
    try:
        assert same(fpsim.round_to(case.x, "e5m2", "stochastic"), case.expected)
    finally:
        fpsim.manual_seed(None)


@pytest.mark.full
def test_every_vector_is_replayed_and_the_stream_of_the_caller_goes_on() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    rows = list(replay("cpu"))
    assert [row for row in rows if not row.ok] == []
    assert len(rows) == len(fpsim.CATALOGUE) + len(golden_blocks.FORMATS)
    assert torch.equal(torch.get_rng_state(), state)


def test_one_changed_bit_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(FILE.read_text(encoding="ascii"))
    case = content["cases"][0]
    content["cases"] = [case]  # each compiles a loop
    last = case["outputs"][-1]
    case["outputs"] = case["outputs"][:-1] + ("0" if last != "0" else "1")
    changed = tmp_path / "golden.json"
    changed.write_text(json.dumps(content), encoding="ascii")
    (wrong,) = (row for row in replay("cpu", changed) if not row.ok)
    assert wrong.check == f"{case['format']} golden vectors"
    assert wrong.detail.startswith("1 of 62 numbers differ: ")
    monkeypatch.setattr("fpsim.__main__.replay", lambda device: [wrong])
    monkeypatch.setattr("fpsim.__main__.verify", lambda *_: iter(()))
    assert main(["verify"]) == 1
    assert "1 of 1 checks failed" in capsys.readouterr().out


def test_vectors_of_another_stream_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "golden.json"
    other.write_text(json.dumps({"stream": golden.STREAM + 1, "inputs": {}, "cases": []}), encoding="ascii")
    with pytest.raises(ValueError, match=r"has the noise of stream 2\. This version draws stream 1"):
        cases(other)


# The section of blocks

BYTES = {
    "e2m1fn": ml_dtypes.float4_e2m1fn,
    "e2m3fn": ml_dtypes.float6_e2m3fn,
    "e3m2fn": ml_dtypes.float6_e3m2fn,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}


def blocks_alone(tmp_path: Path, change: dict[str, str], number: int) -> Path:
    """A file with one case of the section of blocks, of which parts are changed."""
    content = json.loads(FILE.read_text(encoding="ascii"))
    content["cases"], content["blocks"]["cases"] = [], [content["blocks"]["cases"][number] | change]
    file = tmp_path / "golden.json"
    file.write_text(json.dumps(content), encoding="ascii")
    return file


def test_blocks_of_every_kind_are_replayed() -> None:
    found = block_cases()
    assert {case.fmt for case in found} == {*golden_blocks.FORMATS}
    assert any(case.x.isinf().any() and case.expected.isinf().any() for case in found)  # 448 * 2**127, saturated
    assert any(case.x.isinf().any() and case.expected.isnan().any() for case in found)
    content = json.loads(FILE.read_text(encoding="ascii"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(golden, "cases", lambda _: [])  # each compiles a loop
        rows = list(replay("cpu"))
    assert [row for row in rows if not row.ok] == []
    assert [row.check for row in rows] == [f"{name} golden blocks" for name in golden_blocks.FORMATS]
    assert len(found) == len(content["blocks"]["cases"])


@pytest.mark.parametrize("number", range(len(block_cases())))
def test_their_outputs_are_the_codes_as_ml_dtypes_reads_them(number: int) -> None:
    case = block_cases()[number]
    f = fpsim.as_format(case.fmt)
    assert isinstance(f, fpsim.BlockFormat)
    codes = np.frombuffer(case.codes, np.uint8)
    if f.element.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], -1).ravel()
    elements = codes.view(np.int8) / 64 if str(f.element) not in BYTES else codes.view(BYTES[str(f.element)])
    if f.scale.bits == 32:
        scales = np.frombuffer(case.scales, np.float32)
    else:
        scales = np.frombuffer(case.scales, ml_dtypes.float8_e8m0fnu if f.has_power_scale else ml_dtypes.float8_e4m3fn)
    each = scales.astype(np.float64).repeat(len(codes) // len(scales))
    with np.errstate(over="ignore"):
        values = (elements.astype(np.float64) * each).astype(np.float32)
    values = values if case.tensor_scale is None else values / case.tensor_scale.numpy()
    assert same(torch.from_numpy(values).view_as(case.expected), case.expected)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("codes", "byte 0 of the codes is 0x"),
        ("scales", "byte 0 of the scales is 0x"),
        ("tensor_scale", "the tensor_scale is "),
        ("outputs", "rounds to "),
    ],
)
def test_one_changed_bit_of_a_block_is_found(part: str, words: str, tmp_path: Path) -> None:
    content = json.loads(FILE.read_text(encoding="ascii"))["blocks"]["cases"]
    number = next(i for i, case in enumerate(content) if case["format"] == "nvfp4")
    given = content[number][part]
    other = f"{int(given[1], 16) ^ 1:x}"
    (row,) = replay("cpu", blocks_alone(tmp_path, {part: given[0] + other + given[2:]}, number))
    assert (row.check, row.ok) == ("nvfp4 golden blocks", False)
    assert words in row.detail


def test_blocks_of_another_version_are_refused(tmp_path: Path) -> None:
    other = blocks_alone(tmp_path, {}, 0)
    content = json.loads(other.read_text(encoding="ascii"))
    content["blocks"]["version"] = golden.BLOCKS_VERSION + 1
    other.write_text(json.dumps(content), encoding="ascii")
    with pytest.raises(ValueError, match=r"section of blocks of .* has version 2\. Expected: version 1"):
        block_cases(other)
