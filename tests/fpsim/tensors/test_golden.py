"""The golden vectors: made by the oracle, equal to other libraries where these have the format, and replayed."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gfloat
import golden_vectors
import numpy as np
import pytest
import torch
from format_cases import GFLOAT, ML_DTYPES, same

import fpsim
from fpsim.__main__ import main
from fpsim.tensors import golden
from fpsim.tensors.golden import FILE, cases, replay

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
    assert len(rows) == len(fpsim.CATALOGUE)
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
