"""The ledger of a sweep."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ada_loss
from ada_loss.lab.cells.cells import plan
from ada_loss.lab.cells.ledger import SCHEMA_VERSION, Ledger, RowChanged
from ada_loss.lab.cells.missing import Plan
from ada_loss.lab.errors import UnreadableLedger


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
        assert ledger.states() == {"b": "done", "a": "failed"}
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
        with pytest.raises(RowChanged, match="The row of cell a"):  # a result is never counted twice
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
    start = time.process_time()
    with Ledger(path, readonly=True) as ledger:
        assert ledger.counts()["planned"] == 10_000
    assert (
        time.process_time() - start < 10
    )  # measured: 0.14 s, for the digest of each row; what is quadratic takes minutes


def test_the_log_is_brought_into_the_file_now_and_then_and_waits_for_no_reader(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ada_loss.lab.cells.ledger.TRUNCATE_EVERY", 0.0)
    log = path.with_name("ledger.sqlite-wal")
    with Ledger(path) as ledger, contextlib.closing(sqlite3.connect(path, isolation_level=None)) as reader:
        ledger.add([("a", {}), ("b", {})])
        ledger.start("a")
        assert log.stat().st_size > 0
        ledger.finish("a", {})
        assert log.stat().st_size == 0
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM cells WHERE state = 'done'").fetchone() == (1,)
        start = time.monotonic()
        ledger.start("b")
        ledger.finish("b", {})
        assert time.monotonic() - start < 8  # the patience of other statements is 10 s
        assert log.stat().st_size > 0
        assert ledger.counts()["done"] == 2


def test_a_plan_of_ids_is_kept_with_the_number_of_sessions(path: Path) -> None:
    with Ledger(path) as ledger:
        assert ledger.plan() is None
        ledger.add([("b", {}), ("a", {})])
        ledger.add_session({"git": None})
        ledger.add([("a", {}), ("c", {})])
    with Ledger(path, readonly=True) as ledger:
        assert ledger.plan() == Plan(frozenset("abc"), 1)


def test_a_ledger_of_version_1_is_refused_in_words_and_left_alone(path: Path) -> None:
    Ledger(path).close()
    with contextlib.closing(sqlite3.connect(path)) as sql, sql:
        for column in ("digest", "telemetry_sha256", "bits"):
            sql.execute(f"ALTER TABLE cells DROP COLUMN {column}")
        sql.execute("ALTER TABLE sessions DROP COLUMN digest")
        sql.execute("PRAGMA user_version = 1")
    before = path.read_bytes()
    words = "schema version 1, before the first release.*reads 2 to 3. Run that sweep again into another folder"
    for readonly in (False, True):
        with pytest.raises(ValueError, match=words):
            Ledger(path, readonly=readonly)
    assert path.read_bytes() == before


def test_a_cell_has_the_id_that_it_had_before_the_lab_was_put_into_folders() -> None:
    policy = {"error": "e5m2", "weight_grad": "fp16", "overflow": "nan"}
    options = {"steps": 2, "learning_rate": 1, "record_every": 1}
    methods: list[str | float] = ["none", 8, "exact normal"]
    cells = plan("digits", ["fp32", "half", policy], methods, roundings=["stochastic"], seeds=[0, 7], options=options)
    assert [cell.id for cell in cells] == (
        "60bb476dcea0d1c0 8178acece8a7114b de528696a8ae8a1e 90faa9274b38e10e 4284e9e724dafd0a e56cf354834719d8 "
        "0e9748169472001c 18b05acfb68db297 9ee5b8280b5cf26b d35290138baabe70 2252d1d5a9f6dfcc 768caa4cbd072df3 "
        "811594318a6ab6de 0247338b689e249b"
    ).split()


def test_a_session_that_was_changed_is_left_out(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.add_session({"git": "a"})
        ledger.add_session({"git": "b"})
    with contextlib.closing(sqlite3.connect(path)) as sql, sql:
        sql.execute("UPDATE sessions SET environment = '{}' WHERE environment LIKE '%\"a\"%'")
    with Ledger(path, readonly=True) as ledger:
        assert [session["git"] for session in ledger.sessions()] == ["b"]


def ended_well(work: Callable[[], object]) -> bool:
    """Whether something works in a process without rights: for root, no folder is read-only."""
    child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:
                os.seteuid(65534)
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


@pytest.fixture
def readonly_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:  # which anyone may enter
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        folder.chmod(0o755)


def test_a_finished_ledger_in_a_folder_that_cannot_be_written_opens(readonly_folder: Path) -> None:
    path = readonly_folder / "ledger.sqlite"
    with Ledger(path) as ledger:
        ledger.add([("a", {})])
    readonly_folder.chmod(0o555)

    def read() -> None:
        assert not os.access(readonly_folder, os.W_OK, effective_ids=True)
        with Ledger(path, readonly=True) as ledger:
            assert ledger.counts()["planned"] == 1
        with pytest.raises(sqlite3.OperationalError, match=r"readonly|unable to open"):
            Ledger(path)

    assert ended_well(read)


def test_a_ledger_whose_log_waits_beside_it_is_not_read_without_it(readonly_folder: Path) -> None:
    path, copy = readonly_folder / "there" / "ledger.sqlite", readonly_folder / "here" / "ledger.sqlite"
    copy.parent.mkdir()
    with Ledger(path) as ledger:
        ledger.add([("a", {})])
        for file in (path, path.with_name("ledger.sqlite-wal")):  # as a killed driver leaves them
            shutil.copy(file, copy.parent)
    assert copy.with_name("ledger.sqlite-wal").stat().st_size > 0
    copy.parent.chmod(0o555)

    def read() -> None:
        with pytest.raises(UnreadableLedger, match=r"The ledger cannot be read: .*here"):
            Ledger(copy, readonly=True)

    assert ended_well(read)


def test_a_damaged_ledger_is_a_valueerror_with_the_place(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.add((f"{n:05}", {"seed": n}) for n in range(300))
    content = path.read_bytes()
    page = 4096
    path.write_bytes(content[: 2 * page] + b"?" * page + content[3 * page :])
    for look in (lambda: Ledger(path, readonly=True), lambda: Ledger(path), lambda: ada_loss.Results(path.parent)):
        with pytest.raises(UnreadableLedger, match=rf"The ledger cannot be read: .*{path.name}\. Name another folder"):
            look()


def test_a_ledger_with_other_columns_is_damaged(path: Path) -> None:
    Ledger(path).close()
    with contextlib.closing(sqlite3.connect(path)) as sql, sql:
        sql.execute("ALTER TABLE cells RENAME COLUMN metrics TO metrix")
    with pytest.raises(UnreadableLedger, match="its table cells has not the columns of version 3"):
        Ledger(path, readonly=True)


def test_a_row_without_a_configuration_is_a_failure_of_its_own(path: Path) -> None:
    config = {"task": "digits", "format": "fp16", "rounding": "nearest_even", "scaling": "none", "seed": 0}
    with Ledger(path) as ledger:
        for cell, content in (("a", {**config, "options": {}}), ("b", {})):
            ledger.add([(cell, content)])
            ledger.start(cell)
            ledger.finish(cell, {"metrics": {"accuracy": 0.5}, "diverged": False, "skipped": 0})
    results = ada_loss.Results(path.parent)
    assert [row["id"] for row in results.rows()] == ["a"]
    assert [failed["id"] for failed in results.failures()] == ["b"]
    assert results.report().exists()
    with pytest.raises(ValueError, match=r"The cell '[ab]' of the ledger is damaged"):
        ada_loss.resume(path.parent)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not list what a process has open")
def test_a_file_that_is_no_ledger_is_closed_at_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(b"something else, and longer than the head of a database: " + bytes(100))
    with pytest.raises(ValueError, match="ledger") as refused:
        Ledger(path)
    assert refused.tb is not None  # the frames, which hold the connection, are still there
    assert str(path) not in {str(open_file.resolve()) for open_file in Path("/proc/self/fd").iterdir()}
