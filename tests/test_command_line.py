"""The command line, in processes of its own and as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ada_loss.lab.sweep import sweep

CONFIG = """
task: sweep_tasks:tiny
formats: [fp16, e5m2]
scaling: [none, 1024]
seeds: 2
task_options: {epochs: 1}
"""


def ada_loss(*words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "ada_loss", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep that is done, but for one cell that failed."""
    folder = tmp_path_factory.mktemp("sweep")
    options: Any = {"task_options": {"epochs": 1}, "show_progress": False}
    sweep("sweep_tasks:raises", ["fp16", "e5m2"], ["none", 8], seeds=[0, 1], out=folder, **options)
    return folder


def test_a_sweep_runs_prints_its_table_and_names_its_report(tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(CONFIG)
    done = ada_loss("sweep", config, "--out", tmp_path / "out")
    assert "| format \\ scaling | none | 1024 |" in done.stdout
    assert "| fp16 | " in done.stdout
    report = tmp_path / "out" / "report.html"
    assert f"Report: {report}" in done.stdout
    assert report.read_text().startswith("<!doctype html>")
    assert "8/8" in done.stderr  # the progress bar
    again = ada_loss("sweep", config, "--out", tmp_path / "out", "--json")
    assert json.loads(again.stdout)["counts"] == {"planned": 0, "running": 0, "done": 8, "failed": 0}
    more = ada_loss("sweep", config, "--out", tmp_path / "out", "--seeds", 3, "--json")
    assert json.loads(more.stdout)["counts"]["done"] == 12


def test_failed_cells_are_an_exit_code_of_their_own(out: Path) -> None:
    done = ada_loss("resume", out, code=1)
    assert "RuntimeError: seed 1 is not to be had" in done.stdout


def test_status_tells_how_far_a_sweep_is(out: Path) -> None:
    assert "8 cells: 0 planned, 0 running, 4 done, 4 failed" in ada_loss("status", out).stdout
    told = json.loads(ada_loss("status", out, "--json").stdout)
    assert (told["cells"], told["done"], len(told["failures"])) == (8, 4, 4)


def test_tables_go_to_papers(out: Path) -> None:
    assert "| e5m2 |" in ada_loss("table", out).stdout
    assert r"\toprule" in ada_loss("table", out, "--to", "latex").stdout
    assert ada_loss("table", out, "--to", "csv").stdout.startswith("format,scaling,accuracy mean")
    rows = json.loads(ada_loss("table", out, "--to", "json", "--where", "format=fp16").stdout)
    assert [row["scaling"] for row in rows] == ["none", "8"]
    assert "Possible: markdown" in ada_loss("table", out, "--to", "word", code=2).stderr
    assert "Possible: NAME=VALUE" in ada_loss("table", out, "--where", "fp16", code=2).stderr


def test_a_report_goes_where_it_is_told(out: Path, tmp_path: Path) -> None:
    target = tmp_path / "paper.html"
    assert str(target) in ada_loss("report", out, "--to", target, "--question", "Which is it?").stdout
    assert "Which is it?" in target.read_text()


def test_the_catalogue_is_printed() -> None:
    lines = ada_loss("formats").stdout.splitlines()
    assert lines[0].split()[:2] == ["name", "bits"]
    assert any(line.split()[:5] == ["fp16", "16", "5", "10", "65504"] for line in lines)
    assert next(row for row in json.loads(ada_loss("formats", "--json").stdout) if row["name"] == "e4m3fn")["bits"] == 8


def test_inspect_shows_modules_and_sites() -> None:
    said = ada_loss("inspect", "digits", "--format", "e5m2").stdout
    assert "block.conv1  Conv2d" in said
    assert "block.conv1:conv2d" in said
    sites = json.loads(ada_loss("inspect", "sweep_tasks:tiny", "--json").stdout, parse_constant=pytest.fail)["sites"]
    assert {row["role"] for row in sites} == {"weight", "activation", "error", "weight_grad"}
    told = json.loads(ada_loss("inspect", "torch.nn:Identity", "--json").stdout)
    assert told == {
        "modules": [
            {"module": "(model)", "type": "Identity"}
            | dict.fromkeys(("weight", "activation", "error", "weight_grad"), "fp16 nearest_even")
        ],
        "sites": [],
    }
    assert "needs 2 arguments" in ada_loss("inspect", "torch.nn:Linear", code=2).stderr
    assert "gave a bool" in ada_loss("inspect", "torch.cuda:is_available", code=2).stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sweep", "nowhere.yaml"], "There is no file 'nowhere.yaml'"),
        (["resume", "nowhere"], "There is no ledger at"),
        (["status", "nowhere"], "There is no ledger at"),
        (["table", "nowhere"], "There is no ledger at"),
        (["report", "nowhere"], "There is no ledger at"),
        (["inspect", "digit"], "Did you mean digits?"),
        (["inspect", "digits", "--format", "fp61"], "Unknown format 'fp61'"),
    ],
)
def test_bad_input_is_one_line_and_the_exit_code_2(words: list[str], said: str) -> None:
    done = ada_loss(*words, code=2)
    assert said in done.stderr
    assert done.stdout == ""


def test_a_target_that_cannot_be_written_is_one_line(tmp_path: Path, out: Path) -> None:
    config, file = tmp_path / "mine.yaml", tmp_path / "file"
    config.write_text(CONFIG)
    file.touch()
    assert f"{file} cannot be written" in ada_loss("sweep", config, "--out", file, code=3).stderr
    assert "File exists" in ada_loss("report", out, "--to", file / "report.html", code=2).stderr


def test_a_ledger_that_is_damaged_is_one_line(tmp_path: Path, out: Path) -> None:
    content = (out / "ledger.sqlite").read_bytes()
    (tmp_path / "ledger.sqlite").write_bytes(content[:4096] + b"?" * (len(content) - 4096))
    for command in ("status", "table", "resume"):
        assert "The ledger cannot be read: database disk" in ada_loss(command, tmp_path, code=2).stderr


def test_a_mistyped_configuration_is_named_with_its_place(tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(CONFIG.replace("epochs: 1", "epoch: 1"))
    said = ada_loss("sweep", config, code=2).stderr
    assert "Unknown key task_options.epoch. Did you mean epochs?" in said
    assert not (tmp_path / "runs").exists()


def test_help_needs_no_torch() -> None:
    code = "import sys; sys.argv = ['ada-loss', '--help']\nfrom ada_loss.__main__ import main\n"
    code += "try: main()\nexcept SystemExit as end: assert not end.code\n"
    code += "assert not {'torch', 'numba', 'dask', 'matplotlib'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "sweep" in done.stdout
