"""What a folder has lost is told: deleted rows, deleted sessions, older rows after a damaged log."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from children import environment

from ada_loss.lab.cells.ledger import Ledger
from ada_loss.lab.errors import UnreadableLedger
from ada_loss.lab.results import Results
from ada_loss.lab.sweep.driver import resume, sweep

CELLS = 6  # two formats with three seeds


def small(out: Path) -> Results:
    options: Any = {"task_options": {"epochs": 1}, "baseline": False, "show_progress": False}
    return sweep("sweep_tasks:tiny", ["e5m2", "fp16"], seeds=3, out=out, **options)


def outcomes(results: Results) -> dict[str, float]:
    return {row["id"]: row["accuracy"] for row in results.rows()}


def execute(out: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(out / "ledger.sqlite")) as sql, sql:
        for statement in statements:
            sql.execute(statement)


def told(out: Path) -> str:
    """What opening the results of a folder warns of; "" for nothing."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        Results(out)
    return " ".join(str(warning.message) for warning in found)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    small(out)
    return out


@pytest.fixture
def out(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "out"))


LOST = {
    "one": ("DELETE FROM cells WHERE position = 4", 1),
    "a-seed": ("DELETE FROM cells WHERE position % 3 = 1", 2),
    "all": ("DELETE FROM cells", CELLS),
}


@pytest.mark.parametrize("telemetry", [True, False], ids=["telemetry", "no-telemetry"])
@pytest.mark.parametrize("lost", LOST)
def test_deleted_rows_are_told_by_everything_that_reads_and_trained_again(
    out: Path, whole: Path, lost: str, telemetry: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    statement, count = LOST[lost]
    execute(out, statement)
    if not telemetry:
        shutil.rmtree(out / "telemetry")
    words = f"{count} of {CELLS} cells {'is' if count == 1 else 'are'} missing: the ledger has lost"
    assert words in told(out)
    with pytest.warns(UserWarning, match=words):
        assert f"{count} missing" in repr(Results(out))
    if telemetry:
        with pytest.warns(UserWarning, match=words):
            resume(out, trust=True, show_progress=False)
        assert words in told(out)  # it knows no configuration of theirs
    capsys.readouterr()
    assert outcomes(small(out)) == outcomes(Results(whole))
    assert f"has lost the rows of {count} of {CELLS} cells" in capsys.readouterr().err
    assert told(out) == ""


def test_the_status_says_how_many_cells_are_missing(out: Path) -> None:
    execute(out, LOST["a-seed"][0])
    command = [sys.executable, "-m", "ada_loss", "status", str(out)]
    found = subprocess.run(command, capture_output=True, text=True, env=environment(), check=True).stdout
    assert "2 of 6 cells are missing: the ledger has lost their rows. Call sweep(...)" in found


def test_a_ledger_without_a_plan_misses_rows_by_their_telemetry_and_gets_a_plan_from_the_next_driver(out: Path) -> None:
    execute(out, "DROP TABLE plan")
    assert told(out) == ""
    execute(out, LOST["one"][0])
    assert f"1 of {CELLS} cells is missing" in told(out)
    small(out)
    execute(out, "DELETE FROM cells WHERE position = 0")
    shutil.rmtree(out / "telemetry")
    assert f"1 of {CELLS} cells is missing" in told(out)


def test_a_plan_that_was_changed_or_emptied_is_told_until_the_next_driver_writes_it(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for statement in ("UPDATE plan SET content = replace(content, '1', '2')", "DELETE FROM plan"):
        execute(out, statement)
        assert "The plan of the ledger was deleted or changed" in told(out)
        capsys.readouterr()
        small(out)
        assert "The plan of the ledger was deleted or changed" in capsys.readouterr().err
        assert told(out) == ""


def test_sessions_that_were_deleted_or_changed_are_told(out: Path) -> None:
    with Ledger(out / "ledger.sqlite") as ledger:
        ledger.add_session({"git": "a"})
        ledger.add_session({"git": "b"})
    execute(out, "UPDATE sessions SET environment = '{}' WHERE environment LIKE '%\"a\"%'")
    assert "1 session of a driver was deleted or changed" in told(out)
    execute(out, "DELETE FROM sessions")
    assert "3 sessions of drivers were deleted or changed" in told(out)


def test_other_cells_into_a_folder_are_missing_nothing_and_keep_what_is_missed(out: Path) -> None:
    execute(out, LOST["one"][0])
    options: Any = {"task_options": {"epochs": 1}, "baseline": False, "show_progress": False}
    with pytest.warns(UserWarning, match=f"1 of {CELLS + 1} cells is missing"):
        sweep("sweep_tasks:tiny", ["bf16"], out=out, **options)


def killed_driver(out: Path) -> None:
    """A sweep whose process is killed when all its cells are done, so that its log waits beside the ledger."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            Ledger.close = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
            small(out)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_after_a_damaged_log_no_result_is_older_without_a_word(tmp_path: Path) -> None:
    """As after a power cut: SQLite takes the log up to its first bad frame, and does not say what is behind it."""
    killed_driver(tmp_path / "killed")
    log = (tmp_path / "killed" / "ledger.sqlite-wal").read_bytes()
    frames = range(32, len(log) + 1, 24 + 4096)
    assert len(frames) > 20
    expected, draws, older = None, random.Random(0), 0
    for i, end in enumerate([len(log), *frames, *draws.sample(range(32, len(log)), 20)]):
        out = Path(shutil.copytree(tmp_path / "killed", tmp_path / f"{i}"))
        damaged = bytearray(log)
        if i % 2:
            damaged[end:] = bytes(len(log) - end)
        else:
            del damaged[end:]
        (out / "ledger.sqlite-wal").write_bytes(damaged)
        try:
            words = told(out)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = outcomes(Results(out))
        except ValueError as error:  # before the tables were there
            if "not a ledger" in str(error):
                continue
            raise
        expected = found if expected is None else expected
        assert len(expected) == CELLS
        assert expected.items() >= found.items()
        older += found != expected
        assert (found == expected) == (words == ""), f"cut at {end} of {len(log)}: {words!r}"
        shutil.rmtree(out)
    assert older > 10


def no_file(path: Path, kind: str) -> None:
    """Put a pipe that nobody writes to, or a link to a device without an end, in the place of a file."""
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes among files")
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_is_neither_waited_for_nor_read_without_end(kind: str, out: Path) -> None:
    results = Results(out)
    cell, metrics = results.cells[0]["id"], outcomes(results)
    no_file(out / "telemetry" / f"{cell}.npz", kind)
    with pytest.raises(ValueError, match=r"is missing or damaged .* is not a regular file"):
        Results(out).telemetry(cell)
    no_file(out / "ledger.sqlite", kind)
    with pytest.raises(UnreadableLedger, match="it is not a file"):
        Results(out)
    shutil.rmtree(out)
    assert outcomes(small(out)) == metrics
    no_file(out / "telemetry" / f"{cell}.npz", kind)
    assert outcomes(small(out)) == metrics  # the cell is trained again
    assert len(Results(out).telemetry(cell)) > 0
