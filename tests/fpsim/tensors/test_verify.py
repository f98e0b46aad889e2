"""`python -m fpsim verify`: it passes on right kernels, finds wrong ones, and its reference agrees with the oracle."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import oracle
import pytest
import tiers
import torch
from format_cases import oracle_format, same

from fpsim.__main__ import main
from fpsim.formats.codebook import CODEBOOKS
from fpsim.formats.floats import CATALOGUE
from fpsim.tensors import verify
from fpsim.tensors.golden import block_cases
from fpsim.tensors.launch import rounded
from fpsim.tensors.reference import noise_of, rounded_in_float64


@tiers.parametrize(
    "fmt",
    ["e4m3fn", "e5m2fnuz", "dlfloat16", "fp16", "e2m1fn", "e8m0fnu"],
    keep={"e5m2fnuz", "dlfloat16", "e8m0fnu"},
)
@pytest.mark.parametrize("rounding", ["nearest_even", "nearest_away", "toward_zero", "up", "down", "to_odd"])
def test_the_reference_is_the_oracle(fmt: str, rounding: str) -> None:
    f = CATALOGUE[fmt]
    x = verify.patterns()[:: 1009 if fmt in ("fp16", "dlfloat16") else 211]
    naive, overflow = oracle_format(f), f.resolve_overflow()
    expected = torch.tensor([oracle.round_to(naive, v, rounding, overflow) for v in x.tolist()], dtype=torch.float64)
    assert same(torch.from_numpy(rounded_in_float64(x.numpy(), f, rounding)), expected)


@pytest.mark.full
def test_the_quick_form_passes_and_prints_a_row_for_each_format_and_rounding_and_variant() -> None:
    done = subprocess.run([sys.executable, "-m", "fpsim", "verify", "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    golden = {case.fmt for case in block_cases()}
    rows = 13 * len(CATALOGUE) + 4 * len(CODEBOOKS) + len(verify.BLOCKS_OF_POWERS) + len(golden)
    assert len([line for line in done.stdout.splitlines() if " ok " in line]) == rows
    assert done.stdout.endswith(f"all {rows} checks passed\n")


def test_one_wrong_bit_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def off(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        y = rounded(x, *rest)
        y[x == 1.5] += 2**-20
        return y

    monkeypatch.setattr(verify, "rounded", off)
    monkeypatch.setattr(verify, "CATALOGUE", {"fp16": CATALOGUE["fp16"]})
    monkeypatch.setattr(verify, "CODEBOOKS", {})
    monkeypatch.setattr(verify, "BLOCKS_OF_POWERS", ())
    monkeypatch.setattr("fpsim.__main__.replay", lambda device: iter(()))
    assert main(["verify"]) == 1
    shown = capsys.readouterr().out
    assert "fp16 nearest_even                  WRONG" in shown
    assert "1.5 gives 1.5000009536743164, not 1.5" in shown
    assert "12 of 12 checks failed" in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_card_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["verify", "--device", "cuda"])
    assert left.value.code == 2
    assert "torch sees no card" in capsys.readouterr().err


@pytest.mark.gpu
def test_it_passes_on_a_card() -> None:
    assert main(["verify", "--device", "cuda"]) == 0


def test_the_noise_of_the_reference_is_the_oracles() -> None:
    expected = [oracle.noise_word(element, verify.KEY) for element in range(300)]
    assert noise_of(300, verify.KEY).tolist() == expected
