"""Results of releases that compute other numbers: a folder has one version, or says which result has which."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fpsim
from ada_loss import Results
from ada_loss.__main__ import app
from ada_loss.lab.cells.ledger import Ledger
from ada_loss.lab.sweep.driver import resume, sweep
from ada_loss.lab.tasks import digits
from ada_loss.lab.training import train
from fpsim.changes import CHANGES

# What release 0.1 wrote, with schema version 2: these columns, and a digest of them
COLUMNS = ("id", "position", "config", "state", "attempts", "finished", "seconds", "metrics", "diverged", "skipped")
COLUMNS += ("underflow", "telemetry_bytes", "telemetry_sha256", "error", "traceback")


def small(out: Path, **options: Any) -> Results:
    grid: dict[str, Any] = {"task_options": {"epochs": 1}, "baseline": False, "show_progress": False, "seeds": 1}
    return sweep("sweep_tasks:tiny", ["e5m2", "fp16"], out=out, **{**grid, **options})


def as_before(out: Path) -> None:
    """Make the ledger of a folder what the release before the numbers were counted would have written."""
    with contextlib.closing(sqlite3.connect(out / "ledger.sqlite")) as sql, sql:
        for values in sql.execute(f"SELECT {', '.join(COLUMNS)} FROM cells").fetchall():
            digest = hashlib.sha256(json.dumps([*values]).encode()).hexdigest()
            sql.execute("UPDATE cells SET digest = ? WHERE id = ?", (digest, values[0]))
        sql.execute("ALTER TABLE cells DROP COLUMN bits")
        sql.execute("PRAGMA user_version = 2")


def content(out: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in out.rglob("*") if path.is_file() and path.suffix != ".lock"}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    small(tmp_path)
    as_before(tmp_path)
    return tmp_path


def test_a_folder_with_other_numbers_is_refused_in_words_that_name_what_changed(old: Path) -> None:
    before = content(old)
    for go_on in (lambda: small(old), lambda: small(old, seeds=2, minimize=["mse"]), lambda: resume(old)):
        with pytest.raises(ValueError, match="has numbers of version 1; this release computes version") as refused:
            go_on()
        for words in (*(words for changed in CHANGES.values() for words in changed), "keep_old=True (--keep-old)"):
            assert words in str(refused.value)
    done = CliRunner().invoke(app, ["resume", str(old), "--trust"])
    assert (done.exit_code, done.output.count("\n")) == (2, 1)
    assert "float64 in fp32" in done.output
    assert content(old) == before  # an older release can still go on with it


def test_a_folder_is_read_whatever_its_numbers(old: Path) -> None:
    results = Results(old)
    assert [cell["damaged"] for cell in results.cells] == [0, 0]
    assert results.old.startswith("Of 2 results, the numbers are 2 of version 1; this release computes version")
    assert results.table().count("fp16", "none") == 1
    assert len(results.verdicts()) == 1
    assert [row["bits_version"] for row in results.rows()] == [1, 1]
    page = results.report().read_text()
    assert results.old in page
    assert page.count("done, numbers of version 1</td>") == 2
    assert results.old in str(results)


def test_what_goes_on_with_old_results_keeps_them_and_marks_them(old: Path) -> None:
    first = {cell["id"]: cell for cell in Results(old).cells}
    results = small(old, seeds=2, keep_old=True)
    assert {cell["id"]: cell for cell in results.cells if cell["id"] in first} == first
    versions = {row["id"]: row["bits_version"] for row in results.rows()}
    assert versions == {cell["id"]: 1 if cell["id"] in first else fpsim.BITS for cell in results.cells}
    page = results.report().read_text()
    assert (page.count("done, numbers of version 1</td>"), page.count("done</td>")) == (2, 2)
    with pytest.raises(ValueError, match="has numbers of version 1"):
        small(old, seeds=2)


def test_a_folder_of_this_version_says_nothing_of_versions(tmp_path: Path) -> None:
    results = small(tmp_path)
    assert [cell["bits"] for cell in results.cells] == [fpsim.BITS] * 2
    assert results.old == ""
    assert "bits_version" not in results.rows()[0]
    assert "numbers of version" not in results.report().read_text()


def test_what_an_older_release_has_only_planned_is_trained(old: Path) -> None:
    with contextlib.closing(sqlite3.connect(old / "ledger.sqlite")) as sql, sql:
        sql.execute("UPDATE cells SET state = 'planned'")
    results = small(old)  # the rows were changed, so that it says so, and repairs them
    assert [cell["bits"] for cell in results.cells] == [fpsim.BITS] * 2


def test_a_folder_of_a_newer_release_is_refused_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fpsim, "BITS", fpsim.BITS + 1)
        small(tmp_path)
    with pytest.raises(ValueError, match=f"version {fpsim.BITS + 1}; a newer release than this one computed them"):
        small(tmp_path)


def test_a_version_that_was_changed_in_the_file_is_found(tmp_path: Path) -> None:
    small(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as sql, sql:
        sql.execute("UPDATE cells SET bits = NULL WHERE position = 0")
        sql.execute("UPDATE cells SET bits = 7 WHERE position = 1")
    with Ledger(tmp_path / "ledger.sqlite", readonly=True) as ledger:
        assert all(row["damaged"] for row in ledger.rows())


def test_a_checkpoint_with_other_numbers_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception):
        pass

    def stop(_: int) -> None:
        if checkpoint.exists():
            raise Stop

    checkpoint, options = tmp_path / "one.pt", {"epochs": 1, "steps": 3}
    with monkeypatch.context() as patch:
        patch.setattr(fpsim, "BITS", fpsim.BITS - 1)
        with pytest.raises(Stop):
            train(digits(), "fp16", checkpoint=checkpoint, checkpoint_seconds=0.0, progress=stop, **options)
    with pytest.warns(UserWarning, match="is of another training"):
        train(digits(), "fp16", checkpoint=checkpoint, **options)


def test_each_version_of_the_numbers_says_what_it_changed() -> None:
    assert [*CHANGES] == [*range(2, fpsim.BITS + 1)]
    promises = (Path(__file__).parents[4] / "docs" / "promises.md").read_text()
    assert all(words in promises.replace("\n", " ") for changed in CHANGES.values() for words in changed)
    assert fpsim.changes_since(fpsim.BITS) == ""
