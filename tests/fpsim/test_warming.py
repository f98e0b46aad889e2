"""`python -m fpsim warm`: after it a first step compiles nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fpsim
from fpsim import warming
from fpsim.__main__ import main

FIRST_STEPS = """
import sys, torch, fpsim
for what in ("fp16", "recipe:mxfp8", "recipe:nvfp4", *fpsim.UPDATES):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    optimizer = (torch.optim.Muon if what.startswith("muon") else torch.optim.AdamW)(
        [p for p in model.parameters() if p.dim() == 2], lr=1e-3
    )
    if what in fpsim.UPDATES:
        fpsim.quantize_optimizer(optimizer, what)
    else:
        model = fpsim.quantize(model, what)
    model(torch.randn(64, 64)).square().mean().backward()
    optimizer.step()
    assert "numba" not in sys.modules, what
"""


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.timeout(900)
@pytest.mark.full
def test_after_it_the_first_step_of_each_format_and_update_compiles_nothing(tmp_path: Path) -> None:
    done = python(tmp_path, "-m", "fpsim", "warm")
    assert done.stdout.startswith(f"Machine code is in {tmp_path / 'fpsim'}")
    assert done.stderr.count("\n") >= len(warming.STEPS)
    assert python(tmp_path, "-c", FIRST_STEPS).stderr == ""


def test_it_runs_every_recipe_and_every_update() -> None:
    recipes = {f"recipe:{row.name}" for row in fpsim.recipes()}
    updates = {f"update {name}" for name in fpsim.UPDATES if name != "muon_bf16"}
    assert recipes | updates <= set(warming.STEPS)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two steps, in this process; the devices that they ran on."""
    ran: list[str] = []
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr("fpsim.compiling.kept._is_said", False)
    for steps in ("fpsim.warming.STEPS", "fpsim.__main__.STEPS"):
        monkeypatch.setattr(steps, {"first": ran.append, "second": ran.append})
    return ran


def test_it_shows_each_step_and_where_the_code_is(
    one_process: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert main(["warm"]) == 0
    said = capsys.readouterr()
    assert one_process == ["cpu", "cpu"]
    assert [line.rstrip() for line in said.err.splitlines()] == [
        f"[{'.' * 30}] 0/2 starting", f"[{'#' * 15}{'.' * 15}] 1/2 first", f"[{'#' * 30}] 2/2 second", ""
    ]  # fmt: skip
    assert said.out == f"Machine code is in {tmp_path / 'fpsim'}, after 0 seconds.\n"


def test_ctrl_c_ends_it_with_130_and_says_that_it_goes_on(
    one_process: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(device: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(warming.STEPS, "second", interrupt)
    assert main(["warm"]) == 130
    assert one_process == ["cpu"]
    assert "Interrupted. What is compiled is kept; the same command goes on." in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_an_error(
    one_process: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> Path:
        raise PermissionError("/there cannot be written")

    monkeypatch.setattr("fpsim.__main__.folder_of_code", refuse)
    with pytest.raises(SystemExit, match="2"):
        main(["warm"])
    error = capsys.readouterr().err
    assert "Machine code cannot be kept (/there cannot be written). Set NUMBA_CACHE_DIR to a folder that can" in error
    assert one_process == []
