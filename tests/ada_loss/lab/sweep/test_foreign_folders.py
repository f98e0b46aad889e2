"""A folder of someone else, or one that changes meanwhile: whatever lies in the place of a file of a sweep, each action
gives a result or says what is wrong, soon, and nothing outside of the folder changes."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import sqlite3
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiers
from children import environment
from typer.testing import CliRunner

from ada_loss import Job
from ada_loss.__main__ import app
from ada_loss.files import write_atomically
from ada_loss.lab.cells.cells import is_intact
from ada_loss.lab.cells.ledger import Ledger
from ada_loss.lab.cells.telemetry import arrays_of, npz
from ada_loss.lab.errors import SweepStopped, UnreadableLedger
from ada_loss.lab.results import Results
from ada_loss.lab.sweep.driver import resume, sweep

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes among files")

SCRIPT = Path(__file__).parents[3] / "foreign_folder.py"
SAID = {"ValueError", "OSError", "SweepStopped"}  # what a user may catch; their words say what to do
SECONDS = 30.0  # of an action: each takes a fraction of one
FOUND = ("ledger.lock", "ledger.sqlite", "ledger.sqlite-journal", "names.json", "reasons.json", "report.html")
FOUND += ("telemetry", "telemetry/ID.npz", "checkpoints", "checkpoints/ID.pt", "checkpoints/ID.steps")
FOUND += ("checkpoints/ID.live", "checkpoints/ID.branch")


def acted(work: Path, *words: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(work), *words], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr[-3000:]  # whatever waits for ever ends with the place where it does
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every seventh case of two kinds, without the actions that take long."""
    words = ("--things", "link", "pipe", "--share", "7", "--actions", "status", "table", "resume", "afterwards")
    return acted(tmp_path_factory.mktemp("some"), *words)


@tiers.parametrize("share", ["some", "9"], keep={"some"})  # no share has a factor in common with the kinds of a place
def test_whatever_lies_in_the_place_of_a_file_is_a_result_or_said_and_nothing_else_changes(
    tmp_path: Path, some: list[dict[str, Any]], share: str
) -> None:
    first, *cases = some if share == "some" else acted(tmp_path, "--share", share)
    assert {case["when"] for case in cases} == {"before", "at"}
    assert len({(case["thing"], case["place"]) for case in cases}) >= 8
    metrics = first["gave"]["afterwards"]["gave"]
    for case in cases:
        about = f"{case['thing']} {case['when']} {case['place']}"
        assert case["changed"] == [], about
        for name, told in case["gave"].items():
            assert told["seconds"] < SECONDS, (about, name)
            if "raised" in told:
                assert SAID & {*told["raised"]}, (about, name, told)
                assert told["words"], (about, name)
            elif isinstance(told["gave"], dict):  # and no wrong number
                assert told["gave"].items() <= metrics.items(), (about, name)


def test_a_sweep_opens_what_it_writes_as_no_link_and_under_names_that_nobody_can_guess(
    some: list[dict[str, Any]],
) -> None:
    first = some[0]
    assert {*FOUND} <= {*first["places"]}, "the audit hook has missed a file, and so have the tests beside this"
    assert first["unsafe"] == []
    assert first["guessable"] == []


def test_a_report_leaves_what_a_link_in_the_place_of_its_file_leads_to(tmp_path: Path) -> None:
    precious, report = tmp_path / "precious", tmp_path / "out" / "report.html"
    precious.write_text("precious")
    report.parent.mkdir()
    report.symlink_to(precious)
    (report.parent / f".report.html.{os.getpid()}.tmp").symlink_to(precious)  # the name of earlier releases
    write_atomically(report, b"<html>")
    assert (precious.read_text(), report.read_bytes(), report.is_symlink()) == ("precious", b"<html>", False)


# What was found by hand


def small(out: Path, **options: Any) -> Results:
    grid: dict[str, Any] = {"task_options": {"epochs": 1}, "baseline": False, "show_progress": False}
    return sweep("sweep_tasks:tiny", ["e5m2", "fp16"], out=out, **{"seeds": 1, **grid, **options})


def own(out: Path, train: Callable[[Job], dict[str, float]], **options: Any) -> Results:
    return sweep(train=train, formats=["e5m2", "fp16"], out=out, baseline=False, show_progress=False, **options)


def execute(out: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(out / "ledger.sqlite")) as sql, sql:
        for statement in statements:
            sql.execute(statement)


@pytest.mark.parametrize(
    ("statements", "words"),
    [
        (["CREATE TRIGGER t AFTER UPDATE ON cells BEGIN DELETE FROM cells; END"], "it holds the trigger 't'"),
        (["ALTER TABLE cells RENAME TO c", "CREATE VIEW cells AS SELECT * FROM c"], "it holds the view 'cells'"),
        (["CREATE VIRTUAL TABLE v USING fts5(x)"], "it holds the table 'v'"),
        (["ALTER TABLE cells ADD COLUMN x INTEGER AS (length(zeroblob(1000000)))"], "not the columns of version"),
    ],
    ids=["trigger", "view", "virtual-table", "computed-column"],
)
def test_a_ledger_that_would_compute_is_not_opened(tmp_path: Path, statements: list[str], words: str) -> None:
    small(tmp_path)
    execute(tmp_path, *statements)
    for opened in (Results, small, resume):
        with pytest.raises(UnreadableLedger, match=words):
            opened(tmp_path)


@pytest.mark.parametrize("name", ["telemetry", "checkpoints"])
@pytest.mark.parametrize("leads_to", ["a folder", "nothing"])
def test_a_link_in_the_place_of_a_folder_stops_a_sweep_before_it_gives_up_a_result(
    tmp_path: Path, name: str, leads_to: str
) -> None:
    """As on a disk that is not mounted: what is done would count as lost, and be planned again."""
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    first = small(out).cells
    if (out / name).exists():
        (out / name).rename(tmp_path / "moved")
    (out / name).symlink_to(elsewhere)
    if leads_to == "a folder":
        elsewhere.mkdir()
    with pytest.raises(SweepStopped, match=f"{name} is a link"):
        small(out, seeds=2)
    assert Results(out).cells == first


@pytest.mark.parametrize("name", ["mlflow.db", "mlflow.db-journal"])
@pytest.mark.parametrize("make", [getattr(os, "mkfifo", os.mkdir), os.mkdir], ids=["pipe", "folder"])
def test_what_is_in_the_place_of_the_database_of_mlflow_is_not_waited_for(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    (tmp_path / "mlflow").mkdir()
    make(tmp_path / "mlflow" / name)
    with pytest.raises(SweepStopped, match=f"{name} is not a file. Remove it"):
        small(tmp_path, track=["mlflow"])


CHANGES = ("DELETE FROM cells", "UPDATE cells SET seconds = 7", "UPDATE cells SET state = 'planned', config = '{}'")


@pytest.mark.parametrize("change", CHANGES, ids=["deleted", "planned", "configured"])
def test_a_row_that_is_changed_while_its_cell_trains_is_written_again_with_the_result(
    tmp_path: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def vandal(job: Job) -> dict[str, float]:
        execute(tmp_path, f"{change} WHERE state = 'running'")
        return {"accuracy": 0.5}

    results = own(tmp_path, vandal)
    assert [row["accuracy"] for row in results.rows()] == [0.5, 0.5]
    assert results.counts["done"] == 2
    assert not results.missing
    assert all(is_intact(cell["id"], cell["config"]) for cell in results.cells)
    assert "was deleted, or changed by something else than a sweep. It is written again." in capsys.readouterr().err


@pytest.mark.parametrize("what", ["ledger.sqlite", "."], ids=["ledger", "folder"])
def test_a_sweep_whose_ledger_is_gone_stops_at_the_next_cell(tmp_path: Path, what: str) -> None:
    out, trained = tmp_path / "out", []

    def vandal(job: Job) -> dict[str, float]:
        trained.append(job.seed)
        shutil.rmtree(out) if what == "." else (out / what).unlink()
        return {"accuracy": 0.5}

    with pytest.raises(SweepStopped, match=r"ledger.sqlite was deleted, or another file was put in its place"):
        own(out, vandal, seeds=4)
    assert len(trained) == 1
    assert not list(tmp_path.rglob("*.npz"))


def test_a_metric_of_four_hundred_digits_is_infinite(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        for fmt, value in (("fp32", 1), ("fp16", 10**400), ("e5m2", -(10**400))):
            config = {"task": "t", "format": fmt, "rounding": "up", "scaling": "none", "seed": 10**400}
            ledger.add([(fmt, {**config, "options": {"size": 10**400, "other": 7}})])
            ledger.start(fmt)
            ledger.finish(fmt, {"metrics": {"loss": value}, "diverged": False})
    results = Results(tmp_path)
    assert [row["loss"] for row in results.rows()] == [1, math.inf, -math.inf]  # as JSON's 1e400 is
    assert results.table().text("fp16", "none") == "inf"
    assert "10000000" in str(results.table(where={"size": 10**400, "seed": 10**400}).where["size"])
    assert len(results.verdicts()) == 1
    assert results.report().exists()


CODES, CONTROLS = "\x1b]0;owned\x07\x9b31m\u202e", {*"\x1b\x07\x9b\u202e"}


def test_names_of_a_folder_send_no_codes_to_the_terminal(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        for number in range(2):
            words = {axis: f"{axis}{CODES}" for axis in ("task", "format", "rounding", "scaling")}
            cell = f"{number}{CODES}\n| forged | 99.9 |"
            ledger.add([(cell, {**words, "seed": 0, "options": {f"o{CODES}": f"{number}{CODES}\n| forged |"}})])
            ledger.start(cell)
            ledger.finish(cell, {"metrics": {f"accuracy{CODES}": 0.5}, "diverged": False})
    (tmp_path / "reasons.json").write_text(json.dumps({f"0{CODES}": f"why{CODES}"}))
    results = Results(tmp_path)
    printed = [str(results), results.words, *(table.to(kind) for table in results.tables() for kind in TABLES)]
    printed += [str(verdict) for verdict in results.verdicts()]
    option = f"o{CODES}".encode("unicode_escape").decode()
    chosen = results.table(where={"format": f"format{CODES}", option: f"0{CODES}\n| forged |"})
    assert chosen.count(chosen.down[0], chosen.across[0]) == 1
    for words in printed:
        assert not CONTROLS & {*words}
        assert not any(line.startswith("| forged") for line in words.splitlines())
    for words in (["table", str(tmp_path)], ["status", str(tmp_path)], ["verdict", str(tmp_path)]):
        assert not CONTROLS & {*CliRunner().invoke(app, words).output}


TABLES = ("markdown", "latex", "csv")


def bomb(shape: str, dtype: str, size: int) -> bytes:
    """An .npz file with one array of so many zeros, whatever its head says."""
    head = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("losses.npy", "w") as entry:
        entry.write(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode())
        for _ in range(size >> 20):
            entry.write(bytes(1 << 20))
    return content.getvalue()


BOMBS = {
    "unpacks": (("(100663296,)", "<f8", 768 << 20), "it unpacks to more than"),
    "says-more": (("(1000000000000,)", "<f8", 0), "elements in"),
    "of-no-size": (("(1000000000000,)", "<U0", 0), "elements in"),
}


@tiers.parametrize("kind", BOMBS, keep={"says-more", "of-no-size"})
def test_telemetry_that_unpacks_to_more_than_trainings_have_is_refused_before_it_does(
    tmp_path: Path, kind: str
) -> None:
    results = small(tmp_path)
    cell = results.cells[0]["id"]
    arguments, words = BOMBS[kind]
    content = bomb(*arguments)
    assert len(content) < 2 << 20
    (tmp_path / "telemetry" / f"{cell}.npz").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(ValueError, match=words):
        arrays_of(content)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert results.readable_telemetry(cell) == {}
    assert results.report().exists()


def test_arrays_are_read_as_numpy_reads_them() -> None:
    arrays = {"f": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "words": np.array(["a", "bc"]), "one": np.array(3)}
    arrays |= {"none": np.empty((0, 4)), "flags": np.array([True, False]), "long": np.zeros((1, 2, 3), np.int16)}
    read = arrays_of(npz(arrays))
    with np.load(io.BytesIO(npz(arrays))) as known:
        assert {*read} == {*known}
        for name in read:
            assert np.array_equal(read[name], known[name])
            assert (read[name].dtype, read[name].flags.writeable) == (known[name].dtype, True)
