"""What compiles for longer than a second says so once on stderr."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from fpsim.compiling import kept
from fpsim.compiling.kept import kept_code, one_process_for


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a process that has compiled nothing, on an empty folder, outside of a scheduler."""
    monkeypatch.setattr(kept, "_is_said", False)
    monkeypatch.setattr(kept, "_waited", 0.0)
    monkeypatch.setattr(kept, "AFTER", 0.2)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    for name in kept._RANKS:
        monkeypatch.delenv(name, raising=False)


def compile_for(seconds: float, name: str = "hadamard-16.o") -> None:
    kept_code(name, lambda: time.sleep(seconds) or b"code")


def test_a_long_one_is_named_while_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with one_process_for("hadamard-16.o"):
        end = time.monotonic() + 30
        said = ""
        while not said and time.monotonic() < end:
            time.sleep(0.02)
            said = capsys.readouterr().err
    assert said.startswith("fpsim compiles its loops for this processor (now: hadamard)")
    assert "3 to 20 seconds" in said
    assert said.endswith("python -m fpsim warm\n")


def test_it_is_said_once_for_all_loops(capsys: pytest.CaptureFixture[str]) -> None:
    for name in "abc":
        compile_for(0.6, name)
    said = capsys.readouterr()
    assert (said.out, said.err.count("fpsim compiles")) == ("", 1)


def test_many_short_ones_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(40):
        compile_for(0.03, str(i))
    assert capsys.readouterr().err.count("fpsim compiles") == 1


def test_a_short_one_says_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "AFTER", 30.0)
    compile_for(0.0)
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_what_is_on_disk_says_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compile_for(0.0)
    monkeypatch.setattr(kept, "AFTER", 0.0)
    compile_for(1.0)  # found, and not made
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("3", 0)])
def test_of_many_ranks_the_first_says_it(
    rank: str, lines: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    compile_for(0.6)
    assert capsys.readouterr().err.count("fpsim compiles") == lines


def test_a_worker_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    worker = multiprocessing.get_context("fork").Process(target=compile_for, args=(0.6,))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0
    assert capfd.readouterr().err == ""
    compile_for(0.6, "another")  # and this process does, in the same stream
    assert "now: another" in capfd.readouterr().err


def test_where_no_thread_can_be_started_it_compiles_without_the_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(timer: kept.Timer) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(kept.Timer, "start", refuse)
    assert kept_code("round.o", lambda: b"code") == b"code"
    assert capsys.readouterr().err == ""
