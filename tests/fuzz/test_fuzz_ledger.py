"""Ledgers that were damaged, drivers that were killed: no change passes unnoticed, and nothing is lost."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import sweep_tasks
from damage import accidents, damaged
from fuzzing import documented, fuzz
from hypothesis import strategies as st

from ada_loss.lab.cells.ledger import Ledger
from ada_loss.lab.errors import SweepStopped
from ada_loss.lab.results import Results
from ada_loss.lab.sweep import driver
from ada_loss.lab.sweep.driver import resume, sweep

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["ada_loss.lab.sweep.driver"])
SEEDS = 12


def swept(out: Path, **options: Any) -> Results:
    arguments: dict[str, Any] = {"task_options": {"epochs": 1}, "seeds": SEEDS, "baseline": False}
    return sweep("sweep_tasks:raises", ["e5m2"], ["none"], out=out, show_progress=False, **{**arguments, **options})


def outcomes(results: Results) -> dict[str, Any]:
    """What is known of each cell, but for its time."""
    return {row["id"]: {name: value for name, value in row.items() if name != "seconds"} for row in results.rows()}


@cache
def finished() -> tuple[tempfile.TemporaryDirectory[str], dict[str, Any]]:
    """The folder of a sweep that is done, and the outcomes of its cells."""
    folder = tempfile.TemporaryDirectory()
    results = swept(Path(folder.name))
    return folder, outcomes(results)


@fuzz(150, happened=accidents(), and_runs_again=st.integers(0, 9))
def test_fuzz_a_damaged_ledger_is_refused_or_its_damaged_cells_are_named(happened: Any, and_runs_again: int) -> None:
    source, expected = finished()
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out"
        shutil.copytree(source.name, out)
        path = out / "ledger.sqlite"
        path.write_bytes(damaged(path.read_bytes(), happened))
        with documented(ValueError) as outcome, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*deleted or changed")  # the plan, or sessions
            results = Results(out)
        if outcome.error is None:
            wrong = {row["id"] for row in results.cells if row["damaged"]}
            found = outcomes(results)
            assert all(found[cell] == expected[cell] for cell in found)
            assert len(results.cells) == SEEDS
            assert len(found.keys() | wrong) >= len(expected)
            if results.cells:
                assert results.report(out / "report.html").exists()
        if and_runs_again == 0:
            with documented(ValueError, SweepStopped) as outcome, warnings.catch_warnings():
                warnings.filterwarnings("ignore", "(?s).*deleted or changed")
                results = swept(out)
            if outcome.error is None:
                assert outcomes(results) == expected
        else:
            with documented(ValueError, SweepStopped):
                resume(out, show_progress=False)  # the task is not trusted


def swept_until(out: Path, place: str, number: int) -> None:
    """A driver that is killed when it comes to a place for the n-th time."""
    owner, name = {"before": (Ledger, "finish"), "after": (Ledger, "finish"), "rename": (os, "replace")}[place]
    original, times = getattr(owner, name), iter(range(number, -1, -1))

    def reached(*arguments: Any, **options: Any) -> Any:
        is_last = next(times, 1) == 0
        if is_last and place != "after":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **options)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, reached)
    assert driver.Ledger is Ledger
    swept(out)


KILLS = st.lists(st.tuples(st.sampled_from(["before", "after", "rename"]), st.integers(0, SEEDS - 2)), max_size=4)


@fuzz(4, kills=KILLS)
def test_fuzz_a_driver_that_is_killed_between_telemetry_and_ledger_loses_nothing(kills: list[tuple[str, int]]) -> None:
    _, expected = finished()
    assert callable(sweep_tasks.raises)
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        for place, number in kills:
            process = PROCESSES.Process(target=swept_until, args=(out, place, number))
            process.start()
            process.join()
            assert process.exitcode in (-signal.SIGKILL, 0)
        results = swept(out)
        assert outcomes(results) == expected
        assert all(results.telemetry(cell)["losses"].size for cell in expected)
        files = {path.name for folder in ("telemetry", "checkpoints") for path in out.glob(f"{folder}/*")}
        files |= {path.name for folder in ("telemetry", "checkpoints") for path in out.glob(f"{folder}/.*")}
        assert files == {f"{cell}.npz" for cell in expected}
