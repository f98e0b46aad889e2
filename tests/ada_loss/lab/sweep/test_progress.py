"""What a sweep says while it runs, and in the end of what failed; and mistyped arguments."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from children import environment

import ada_loss
import fpsim
from ada_loss.lab import terminal
from ada_loss.lab.sweep import progress
from ada_loss.lab.sweep.config import with_settings
from ada_loss.lab.sweep.driver import resume, sweep
from ada_loss.lab.tasks import digits
from ada_loss.lab.training import train

SWEEP = "ada_loss.sweep('sweep_tasks:tiny', ['e5m2'], seeds=3, task_options={'epochs': 1}, out=sys.argv[1])"
CODE = f"import sys\nsys.path.append('tests')\nimport ada_loss\n{SWEEP}"


@pytest.mark.full
def test_without_a_terminal_there_are_plain_lines_from_the_first_moment_on(tmp_path: Path) -> None:
    said = subprocess.run([sys.executable, "-c", CODE, tmp_path], capture_output=True, text=True, env=environment())
    lines = said.stderr.splitlines()
    assert lines[0] == "6 cells; one at a time in this process"
    seeds = r"[\d.]+ ± [\d.]+ % \(3 seeds\)"
    means = rf"e5m2 nearest_even none {seeds}, fp32 nearest_even none {seeds}"
    assert re.fullmatch(rf"6/6 cells, \d+ s; best mean accuracy: {means}", lines[-2])
    assert lines[-1].startswith(f"results.report() writes {tmp_path / 'report.html'}: verdict, tables")
    assert "\r" not in said.stderr
    assert said.stdout == ""


@pytest.mark.full
def test_on_a_terminal_there_is_a_bar(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
    terminal = {**environment(), "TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", CODE, tmp_path], stderr=theirs, env=terminal)
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        said += part
    os.close(ours)
    assert process.wait() == 0
    assert b"6 cells; one at a time" in said
    assert b"6/6" in said
    assert b"\r" in said


def test_a_sweep_from_python_offers_its_report_and_a_silent_one_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"task_options": {"epochs": 1}, "out": tmp_path, "baseline": False}
    results = sweep("sweep_tasks:tiny", ["e5m2"], **options)
    said = capsys.readouterr().err
    (path,) = re.findall(r"^results\.report\(\) writes (.*?): ", said, re.MULTILINE)
    assert not Path(path).exists()
    assert str(results.report()) == path  # what was offered
    sweep("sweep_tasks:tiny", ["e5m2"], show_progress=False, **options)
    assert "report()" not in capsys.readouterr().err
    with terminal.without_offers():  # as the command line has it, which writes the report
        sweep("sweep_tasks:tiny", ["e5m2"], **options)
    assert "report()" not in capsys.readouterr().err


def test_the_steps_of_a_cell_are_told_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("WRITTEN_EVERY", "READ_EVERY", "FIRST_LINE", "LINE_EVERY"):
        monkeypatch.setattr(progress, name, 0.02)
    sweep("sweep_tasks:tiny", ["e5m2"], seeds=1, task_options={"epochs": 400}, out=tmp_path)
    told = [int(step) for step in re.findall(r"at step (\d+)/400", capfd.readouterr().err)]
    assert len(told) > 1
    assert all(0 < step <= 400 for step in told)
    assert not [*tmp_path.glob("checkpoints/*.steps")]


def test_steps_that_a_dead_worker_left_are_removed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"task_options": {"epochs": 1}, "out": tmp_path, "show_progress": False}
    sweep("sweep_tasks:tiny", ["e5m2"], **options)
    (tmp_path / "checkpoints" / "0123456789abcdef.steps").write_text("3 9")
    sweep("sweep_tasks:tiny", ["e5m2"], seeds=2, **options)
    assert not [*tmp_path.glob("checkpoints/*.steps")]


def test_a_sweep_says_which_cells_failed_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"task_options": {"epochs": 1}, "baseline": False, "show_progress": False}
    results = sweep("sweep_tasks:raises", ["fp16", "e5m2"], seeds=2, out=tmp_path, **options)
    failed = {cell["id"]: cell["config"]["format"] for cell in results.failures()}
    assert len(failed) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("2 cells failed: RuntimeError: seed 1 is not to be had: ")
    assert all(f"{fmt} nearest_even none seed 1 ({cell})" in first for cell, fmt in failed.items())
    assert second == "Results.failures() has every traceback; retry_failed=True runs them again."
    resume(tmp_path, trust=True, show_progress=False)
    assert "2 cells failed" in capsys.readouterr().err
    sweep("sweep_tasks:raises", ["fp16"], seeds=[0], out=tmp_path, **options)
    assert capsys.readouterr().err == ""  # of another call's cells nothing is said


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: fpsim.Policy(weights="fp16"),
            "Policy() has no argument 'weights'. Did you mean 'weight'? Expected",
        ),  # type: ignore[call-arg]
        (lambda: fpsim.quantize(digits().model, format="fp16"), "quantize() has no argument 'format'."),  # type: ignore[call-arg]
        (
            lambda: fpsim.quantize(digits().model, "fp16", overrides={"head": None}),  # type: ignore[call-arg]
            "quantize() has no argument 'overrides'. It is an argument of Policy: quantize(model, fpsim.Policy(..., ov",
        ),
        (lambda: train(digits(), epoch=3), "TrainOptions() has no argument 'epoch'. Did you mean 'epochs'?"),
        (
            lambda: ada_loss.sweep("digits", ["fp16"], epochs=3),  # type: ignore[call-arg]
            "sweep() has no argument 'epochs'. It is an option of the training: task_options={'epochs': ...}.",
        ),
        (lambda: ada_loss.sweep("digits", ["fp16"], seed=3), "sweep() has no argument 'seed'. Did you mean 'seeds'?"),  # type: ignore[call-arg]
        (
            lambda: ada_loss.search("digits", epochs=3),
            "search() has no argument 'epochs'. It is an option of the training: task_options={'epochs': ...}.",
        ),
        (lambda: ada_loss.search("digits", divice="cpu"), "search() has no argument 'divice'. Did you mean 'device'?"),
    ],
)
def test_a_mistyped_argument_meets_the_one_that_was_meant(call: Any, words: str) -> None:
    with pytest.raises(TypeError) as error:
        call()
    assert str(error.value).startswith(words)


def test_a_key_of_the_file_can_be_set() -> None:
    read = {"task": "digits", "formats": ["fp16"], "task_options": {"epochs": 6, "optimizer": "adam"}}
    found = with_settings(read, ["task_options.epochs=3", "formats=[fp16, {error: e5m2}]", "scaling=[none, 1e3]"])
    assert found["task_options"] == {"epochs": 3, "optimizer": "adam"}
    assert found["formats"] == ["fp16", {"error": "e5m2"}]
    assert found["scaling"] == ["none", 1000.0]
    assert read["task_options"]["epochs"] == 6


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("task_options.epochs", "Expected: key=value. Take task_options.epochs=3"),
        ("=3", "Expected: key=value"),
        ("epochs=3", "unknown key 'epochs'. Did you mean task_options.epochs?"),
        ("sedes=3", "unknown key 'sedes'. Did you mean 'seeds'?"),
        ("seeds=[1", "is not YAML"),
        ("task.epochs=3", "task is 'digits', and has no epochs. Set task itself."),
    ],
)
def test_what_is_no_setting_is_refused(setting: str, words: str) -> None:
    with pytest.raises(ValueError, match="--set") as error:
        with_settings({"task": "digits"}, [setting])
    assert words in str(error.value)
