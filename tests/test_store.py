"""The ledger of a sweep."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest

from ada_loss.lab.sweep.ledger import SCHEMA_VERSION, Ledger


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def test_what_was_written_is_there_when_it_is_opened_again(path: Path) -> None:
    with Ledger(path) as ledger:
        assert ledger.add([("b", {"seed": 1}), ("a", {"seed": 2.5})]) == 2
        ledger.start("b")
        ledger.finish("b", {"metrics": {"accuracy": float("nan")}, "diverged": True, "telemetry_bytes": 7})
        ledger.start("a")
        ledger.fail("a", "ValueError: no", "Traceback")
        ledger.add_session({"git": None})
    with Ledger(path, readonly=True) as ledger:
        first, second = ledger.rows()
        assert (first["id"], first["config"], first["state"], first["attempts"]) == ("b", {"seed": 1}, "done", 1)
        assert str(first["metrics"]["accuracy"]) == "nan"
        assert first["diverged"] == 1
        assert (second["error"], second["traceback"], second["state"]) == ("ValueError: no", "Traceback", "failed")
        assert ledger.counts() == {"planned": 0, "running": 0, "done": 1, "failed": 1}
        assert ledger.states() == {"b": ("done", 7), "a": ("failed", None)}
        assert [s["git"] for s in ledger.sessions()] == [None]
        assert [row["id"] for row in ledger.rows("failed")] == ["a"]


def test_known_cells_stay_as_they_are(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.add([("a", {})])
        ledger.start("a")
        assert ledger.add([("a", {}), ("c", {})]) == 1
        assert ledger.counts()["running"] == 1


def test_a_released_cell_forgets_its_result_and_keeps_its_attempts(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.add([("a", {})])
        ledger.start("a")
        ledger.fail("a", "no")
        ledger.release(["a"])
        (row,) = ledger.rows()
        assert (row["state"], row["error"], row["attempts"]) == ("planned", None, 1)


def test_a_cell_that_does_not_run_cannot_be_settled(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.add([("a", {})])
        ledger.start("a")
        ledger.finish("a", {})
        with pytest.raises(AssertionError):  # a result is never counted twice
            ledger.finish("a", {})


def test_a_newer_schema_is_refused_with_its_version(path: Path) -> None:
    Ledger(path).close()
    with sqlite3.connect(path) as sql:
        sql.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 41}")
    sql.close()
    for readonly in (False, True):
        with pytest.raises(ValueError, match=f"schema version {SCHEMA_VERSION + 41}.*reads up to {SCHEMA_VERSION}"):
            Ledger(path, readonly=readonly)


def test_what_is_no_ledger_is_refused_and_left_alone(path: Path) -> None:
    path.write_bytes(b"a text, and no data base, that is longer than a header" * 10)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not a ledger"):
        Ledger(path)
    assert path.read_bytes() == before
    other = path.with_name("other.sqlite")
    with sqlite3.connect(other) as sql:
        sql.execute("CREATE TABLE mine (x)")
    sql.close()
    with pytest.raises(ValueError, match="not a ledger"):
        Ledger(other)
    with sqlite3.connect(other) as sql:
        sql.execute("PRAGMA user_version = 1")  # as many programs number their own
    sql.close()
    for readonly in (False, True):
        with pytest.raises(ValueError, match="not a ledger"):
            Ledger(other, readonly=readonly)
    with pytest.raises(FileNotFoundError, match="There is no ledger"):
        Ledger(path.with_name("nothing"), readonly=True)


def test_a_reader_sees_what_is_finished_while_a_driver_writes(path: Path) -> None:
    with Ledger(path) as driver, Ledger(path, readonly=True) as reader:
        driver.add([("a", {})])
        driver.start("a")
        assert reader.counts()["running"] == 1


def test_the_status_of_ten_thousand_cells_is_quick(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.add((f"{n:05}", {"seed": n}) for n in range(10_000))
    start = time.perf_counter()
    with Ledger(path, readonly=True) as ledger:
        assert ledger.counts()["planned"] == 10_000
    assert time.perf_counter() - start < 0.5  # measured: some 3 ms
