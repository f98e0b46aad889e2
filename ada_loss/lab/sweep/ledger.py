"""The ledger of a sweep: one SQLite file with its cells, their states and their results."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["SCHEMA_VERSION", "STATES", "CannotWrite", "Damaged", "Ledger"]

SCHEMA_VERSION = 1
APPLICATION_ID = 0x4C6F7373  # "Loss", in the header of the file
CannotWrite = sqlite3.OperationalError  # raised for a full disk or a missing permission
Damaged = sqlite3.DatabaseError  # raised while reading a damaged file
STATES = ("planned", "running", "done", "failed")

SCHEMA = """
CREATE TABLE cells (
    id TEXT PRIMARY KEY,
    position INTEGER NOT NULL,
    config TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'planned' CHECK (state IN ('planned', 'running', 'done', 'failed')),
    attempts INTEGER NOT NULL DEFAULT 0,
    finished REAL,
    seconds REAL,
    metrics TEXT,
    diverged INTEGER,
    skipped INTEGER,
    underflow REAL,
    telemetry_bytes INTEGER,
    error TEXT,
    traceback TEXT
) STRICT;
CREATE INDEX cells_by_state ON cells (state);
CREATE TABLE sessions (started REAL NOT NULL, environment TEXT NOT NULL) STRICT;
"""
RESULT = ("seconds", "metrics", "diverged", "skipped", "underflow", "telemetry_bytes", "error", "traceback")


class Ledger:
    """Cells and their states in a file. One driver writes; any number of processes read (write-ahead log).

    Every method that changes something is one transaction: a killed process leaves the last complete one.

    path: the file, or ":memory:".
    readonly: for readers; the file must exist.
    Raises FileNotFoundError without a file to read; ValueError for a file that is no ledger, or of a newer version.

    >>> with Ledger(":memory:") as ledger:
    ...     ledger.add([("a1", {"seed": 0}), ("b2", {"seed": 1})])
    ...     ledger.start("a1")
    ...     ledger.finish("a1", {"metrics": {"accuracy": 0.5}})
    ...     ledger.counts()
    2
    {'planned': 1, 'running': 0, 'done': 1, 'failed': 0}
    """

    def __init__(self, path: Path | str, *, readonly: bool = False) -> None:
        self.path = Path(path)
        memory = str(path) == ":memory:"
        if readonly and not self.path.exists():
            raise FileNotFoundError(f"There is no ledger at {self.path}. Name the folder of a sweep, its `out`.")
        if not memory and not readonly:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        uri = ":memory:" if memory else f"{self.path.absolute().as_uri()}?mode={'ro' if readonly else 'rwc'}"
        self._sql = sqlite3.connect(uri, uri=not memory, isolation_level=None, timeout=10)
        try:
            self._open(readonly)
        except sqlite3.DatabaseError as error:
            self._sql.close()
            if isinstance(error, sqlite3.OperationalError):  # disk full, no permission: the content may be fine
                raise
            raise ValueError(f"{self.path} is not a ledger of a sweep ({error}). Name another `out`.") from None
        except BaseException:
            self._sql.close()
            raise

    def _open(self, readonly: bool) -> None:
        self._sql.row_factory = sqlite3.Row
        owner, version = (
            self._sql.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        if version and owner != APPLICATION_ID:
            raise ValueError(f"{self.path} is not a ledger of a sweep. Name another `out`.")
        if version > SCHEMA_VERSION:
            raise ValueError(
                f"{self.path} was written with schema version {version}. This release reads up to {SCHEMA_VERSION}. "
                f"Update it, or name another `out`."
            )
        if version == 0:
            tables = self._sql.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if tables or readonly:
                raise ValueError(f"{self.path} is not a ledger of a sweep. Name another `out`.")
            self._sql.execute("PRAGMA journal_mode = WAL")
            with self._transaction():
                for statement in SCHEMA.strip().removesuffix(";").split(";\n"):
                    self._sql.execute(statement)
                self._sql.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                self._sql.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        if not readonly:
            self._sql.execute("PRAGMA synchronous = FULL")  # 2 transactions a cell: safety costs little

    def _transaction(self) -> _Transaction:
        return _Transaction(self._sql)

    def add(self, cells: Iterable[tuple[str, dict[str, Any]]]) -> int:
        """Plan cells, given as (id, configuration); known cells stay as they are. Gives the number of new ones."""
        with self._transaction():
            first = self._sql.execute("SELECT coalesce(max(position) + 1, 0) FROM cells").fetchone()[0]
            rows = [(i, first + n, json.dumps(config)) for n, (i, config) in enumerate(cells)]
            before = self._sql.total_changes
            self._sql.executemany("INSERT OR IGNORE INTO cells (id, position, config) VALUES (?, ?, ?)", rows)
            return self._sql.total_changes - before

    def start(self, cell: str) -> None:
        """Mark a cell as running, and count the attempt."""
        self._sql.execute("UPDATE cells SET state = 'running', attempts = attempts + 1 WHERE id = ?", (cell,))

    def release(self, cells: Sequence[str]) -> None:
        """Mark cells as planned again: their results are deleted, their attempts are kept."""
        forgotten = ", ".join(f"{name} = NULL" for name in RESULT)
        with self._transaction():
            self._sql.executemany(
                f"UPDATE cells SET state = 'planned', finished = NULL, {forgotten} WHERE id = ?", [(c,) for c in cells]
            )

    def finish(self, cell: str, result: dict[str, Any]) -> None:
        """Write the result of a running cell.

        result: any of "seconds", "metrics", "diverged", "skipped", "underflow", "telemetry_bytes", "error".
        """
        self._settle(cell, "done", result)

    def fail(self, cell: str, error: str, traceback: str = "") -> None:
        """Write why a running cell gave no result."""
        self._settle(cell, "failed", {"error": error, "traceback": traceback})

    def _settle(self, cell: str, state: str, result: dict[str, Any]) -> None:
        values = {name: result.get(name) for name in RESULT}
        if values["metrics"] is not None:
            values["metrics"] = json.dumps(values["metrics"])
        names = ", ".join(f"{name} = :{name}" for name in RESULT)
        changed = self._sql.execute(
            f"UPDATE cells SET state = :state, finished = :finished, {names} WHERE id = :id AND state = 'running'",
            {"state": state, "finished": time.time(), "id": cell, **values},
        )
        assert changed.rowcount == 1, f"{cell} has a result and was not running"

    def counts(self) -> dict[str, int]:
        """The number of cells in each state."""
        found = dict(self._sql.execute("SELECT state, count(*) FROM cells GROUP BY state").fetchall())
        return {state: found.get(state, 0) for state in STATES}

    def seconds(self) -> float:
        """The seconds of training in all cells that are done."""
        return float(
            self._sql.execute("SELECT coalesce(sum(seconds), 0) FROM cells WHERE state = 'done'").fetchone()[0]
        )

    def states(self) -> dict[str, tuple[str, int | None]]:
        """{id: (state, size of the telemetry file in bytes)} of every cell."""
        return {row[0]: (row[1], row[2]) for row in self._sql.execute("SELECT id, state, telemetry_bytes FROM cells")}

    def rows(self, state: str | None = None) -> list[dict[str, Any]]:
        """A dictionary of its columns for each cell, in the order of planning, with "config" and "metrics" decoded.

        state: only cells in this state; None for all.
        """
        where = "" if state is None else "WHERE state = ?"
        found = self._sql.execute(f"SELECT * FROM cells {where} ORDER BY position, id", (state,) if state else ())
        rows = [dict(row) for row in found]
        for row in rows:
            row["config"], row["metrics"] = json.loads(row["config"]), json.loads(row["metrics"] or "{}")
        return rows

    def add_session(self, environment: dict[str, Any]) -> None:
        """Write the environment of a driver, with the time."""
        self._sql.execute("INSERT INTO sessions VALUES (?, ?)", (time.time(), json.dumps(environment)))

    def sessions(self) -> list[dict[str, Any]]:
        """The environments of all drivers in their order, each with "started", in seconds since 1970."""
        found = self._sql.execute("SELECT started, environment FROM sessions ORDER BY started")
        return [{"started": row["started"], **json.loads(row["environment"])} for row in found]

    def close(self) -> None:
        self._sql.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Transaction:
    """A context in which all statements take effect, or none."""

    def __init__(self, sql: sqlite3.Connection) -> None:
        self._sql = sql

    def __enter__(self) -> None:
        self._sql.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, *_: object) -> None:
        self._sql.execute("COMMIT" if kind is None else "ROLLBACK")
