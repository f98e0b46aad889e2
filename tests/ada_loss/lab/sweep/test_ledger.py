"""The ledger of a sweep."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest

import ada_loss
from ada_loss.lab.sweep.cells import plan
from ada_loss.lab.sweep.ledger import SCHEMA_VERSION, Ledger
from ada_loss.lab.sweep.telemetry import telemetry_path


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


# A ledger that was written before the lab was put into folders

BEFORE = Path(__file__).parents[3] / "data" / "ledger_v1.sql"
POLICY = {"error": "e5m2", "weight_grad": "fp16", "overflow": "nan"}
GRID = {"formats": ["fp32", "half", POLICY], "scaling": ["none", 8, "exact normal"], "roundings": ["stochastic"]}
ACCURACIES = {  # of the test's 450 images, by id
    **{"60bb476dcea0d1c0": 45, "8178acece8a7114b": 59, "de528696a8ae8a1e": 45, "90faa9274b38e10e": 60},
    **{"4284e9e724dafd0a": 45, "e56cf354834719d8": 60, "0e9748169472001c": 45, "18b05acfb68db297": 60},
    **{"9ee5b8280b5cf26b": 45, "d35290138baabe70": 51, "2252d1d5a9f6dfcc": 45, "768caa4cbd072df3": 59},
}
FAILED, PLANNED = "811594318a6ab6de", "0247338b689e249b"


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """The folder of that sweep, with telemetry of the right size."""
    with sqlite3.connect(tmp_path / "ledger.sqlite") as sql:
        sql.executescript(BEFORE.read_text())
    sql.close()
    (tmp_path / "telemetry").mkdir()
    for cell in ada_loss.Results(tmp_path).cells:
        telemetry_path(tmp_path, cell["id"]).write_bytes(b"x" * (cell["telemetry_bytes"] or 0))
    return tmp_path


def test_a_ledger_of_before_opens_with_equal_results(before: Path) -> None:
    results = ada_loss.Results(before)
    assert results.counts == {"planned": 1, "running": 0, "done": 12, "failed": 1}
    assert {row["id"]: round(450 * row["accuracy"]) for row in results.rows()} == ACCURACIES
    assert results.rows()[8]["underflow"] == 0.2852484546254417
    assert [cell["error"] for cell in results.failures()] == ["MemoryError: no memory left"]
    assert results.table().mean("fp16", "8") == pytest.approx((45 + 60) / 900)


def test_a_ledger_of_before_has_the_ids_that_a_sweep_has_today(before: Path) -> None:
    options = {"steps": 2, "learning_rate": 1, "record_every": 1}
    cells = plan("digits", **GRID, seeds=[0, 7], options=options)  # type: ignore[arg-type]
    assert [cell.id for cell in cells] == [*ACCURACIES, FAILED, PLANNED]
    stored = {cell["id"]: cell["config"] for cell in ada_loss.Results(before).cells}
    assert {cell.id: cell.config for cell in cells} == stored
    assert all([*cell.config["options"]] == [*stored[cell.id]["options"]] for cell in cells)  # the columns of tables


def test_a_ledger_of_before_is_resumed_with_what_was_not_done(before: Path) -> None:
    first = {cell["id"]: cell for cell in ada_loss.Results(before).cells}
    results = ada_loss.resume(before, show_progress=False)
    assert results.counts == {"planned": 0, "running": 0, "done": 13, "failed": 1}
    cells = {cell["id"]: cell for cell in results.cells}
    assert {i: cell for i, cell in cells.items() if i != PLANNED} == {i: c for i, c in first.items() if i != PLANNED}
    assert cells[PLANNED]["attempts"] == 2  # the first was released
    assert 0 < cells[PLANNED]["metrics"]["accuracy"] < 1
