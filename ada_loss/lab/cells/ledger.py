"""The ledger of a sweep: one SQLite file with its cells, their states and their results."""

from __future__ import annotations

import gc
import json
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ada_loss.files import ChangedFolder
from ada_loss.lab.cells.missing import Plan
from ada_loss.lab.cells.stored_text import Configs, as_float64, digest_of, is_json_number, json_object, storable
from ada_loss.lab.errors import UnreadableLedger

__all__ = [
    "BESIDE",
    "DAMAGED",
    "SCHEMA_VERSION",
    "STATES",
    "CannotWrite",
    "Ledger",
    "OtherBits",
    "RowChanged",
    "counted",
]

SCHEMA_VERSION = 3
# The oldest version of the ledger that can be read. Version 2 stores no version of the numbers. Version 1 has no
# digests, and was never released.
FIRST_VERSION = 2
APPLICATION_ID = 0x4C6F7373  # "Loss", in the header of the file
CannotWrite = sqlite3.OperationalError  # raised for a full disk or a missing permission
STATES = ("planned", "running", "done", "failed")
BESIDE = ("-wal", "-shm", "-journal")  # suffixes of the files that SQLite opens next to the ledger
# The size of the largest file that is opened. 100,000 finished cells take 100 MB.
MOST_BYTES = 1 << 32
MOST_BYTES_OF_A_ROW = 1 << 26
# The log is written into the file after this many seconds, so that a damaged log loses less.
TRUNCATE_EVERY = 60.0

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
    traceback TEXT,
    telemetry_sha256 TEXT,
    digest TEXT,
    bits INTEGER
) STRICT;
CREATE INDEX cells_by_state ON cells (state);
CREATE TABLE sessions (started REAL NOT NULL, environment TEXT NOT NULL, digest TEXT) STRICT;
"""
# The plan as JSON, with its digest. A ledger without a plan can be read, and the next driver adds the plan.
PLAN_SCHEMA = "CREATE TABLE IF NOT EXISTS plan (content TEXT NOT NULL, digest TEXT NOT NULL) STRICT"
FIRST_BITS = 1  # the version of numbers that were stored without a version; see `fpsim.BITS`
TEXTS = ("error", "traceback")
RESULT = (
    "seconds",
    "metrics",
    "diverged",
    "skipped",
    "underflow",
    "telemetry_bytes",
    "telemetry_sha256",
    *TEXTS,
    "bits",
)
COLUMNS = ("id", "position", "config", "state", "attempts", "finished", *RESULT)
# The columns in every digest. "bits" is added to a digest only if it is set, because version 2 had no "bits".
SEALED = COLUMNS[:-1]
DAMAGED = "its row of the ledger was changed by something else than a sweep; run the sweep again: it repeats the cell"


class OtherBits(ValueError):
    """Raised if a ledger's results come from versions of the library with other numbers; `bits` lists the versions."""

    def __init__(self, bits: Iterable[int]) -> None:
        self.bits = sorted(bits)
        super().__init__(f"numbers of version {' and '.join(map(str, self.bits))}")


class RowChanged(LookupError):
    """Raised if a row of the ledger has changed since its driver wrote it."""


class Ledger:
    """Cells and their states in a file. One driver writes; any number of processes read (write-ahead log).

    Every change is one transaction. If a process is killed, all complete transactions are kept. Every row carries a
    digest of its content. A row that does not match its digest is "damaged": it counts as failed, with an error that
    says so, and the next driver plans the cell again.

    path: the file, or ":memory:".
    readonly: True for readers; the file must exist. In a folder that cannot be written, the log of the file must be
        empty. It is not empty if a driver died there.
    bits: the version of the numbers that a driver writes; None to continue results of any version.
    Raises OtherBits if results have another version of the numbers; FileNotFoundError if there is no file to read;
    ValueError for a file that is not a ledger, that is damaged, or that has version 1 or a newer version than this. A
    ledger of version 2 is opened, and a driver converts it to this version.

    >>> with Ledger(":memory:") as ledger:
    ...     ledger.add([("a1", {"seed": 0}), ("b2", {"seed": 1})])
    ...     ledger.start("a1")
    ...     ledger.finish("a1", {"metrics": {"accuracy": 0.5}})
    ...     ledger.counts()
    2
    {'planned': 1, 'running': 0, 'done': 1, 'failed': 0}
    """

    def __init__(self, path: Path | str, *, readonly: bool = False, bits: int | None = None) -> None:
        self.bits = bits
        self.path, self.readonly, self._is_open = Path(path), readonly, False
        # The identity of the file that is written; None for a ledger in memory, and for readers.
        self._file: tuple[int, int] | None = None
        memory = str(path) == ":memory:"
        if readonly and not self.path.exists():
            raise FileNotFoundError(f"There is no ledger at {self.path}. Name the folder of a sweep, its `out`.")
        if not memory:
            self._require_files()
        if not memory and not readonly:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._connect(":memory:" if memory else f"{self.path.absolute().as_uri()}?mode={'ro' if readonly else 'rwc'}")
        try:
            self._open()
        except sqlite3.OperationalError as error:
            self._sql.close()
            # The disk is full or a permission is missing: the content may be fine.
            if not readonly:
                raise
            if not self._is_at_rest():
                raise self._unreadable(error) from None
            self._open_unchanging()
        except BaseException:
            self._sql.close()
            raise
        self._file = None if memory or readonly else _identity(self.path)

    def _require_files(self) -> None:
        """Raise UnreadableLedger unless all files that SQLite will open are regular files of this folder."""
        # Without this check SQLite would wait for the other end of a pipe, read a device forever, and write to the
        # target of a link.
        for suffix in ("", *BESIDE):
            path = self.path.with_name(self.path.name + suffix)
            if path.is_symlink():
                raise self._unreadable(f"{(suffix and path.name) or 'it'} is not a file, but a link")
            if path.exists() and not path.is_file():
                raise self._unreadable(f"{(suffix and path.name) or 'it'} is not a file")
        if self.path.exists() and (size := self.path.stat().st_size) > MOST_BYTES:
            raise self._unreadable(f"it has {size:,} bytes, more than {MOST_BYTES:,}")

    def require_the_same(self) -> None:
        """Raise ChangedFolder if the file was deleted or replaced, so that further writes would be lost."""
        try:
            is_there = self._file is None or _identity(self.path) == self._file
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise ChangedFolder(
                f"{self.path} was deleted, or another file was put in its place, while the sweep ran. Put it "
                f"back, or begin again in another folder."
            )

    def _connect(self, uri: str) -> None:
        self._sql = sqlite3.connect(uri, uri=uri != ":memory:", isolation_level=None, timeout=10)
        self._sql.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES_OF_A_ROW)
        self._sql.row_factory = sqlite3.Row
        # Text that is not UTF-8 must not raise an error here: the digest finds the damaged row.
        self._sql.text_factory = partial(str, encoding="utf-8", errors="backslashreplace")

    def _is_at_rest(self) -> bool:
        """True if no transaction waits in the log, so that the file can be read without its log."""
        log = self.path.with_name(self.path.name + "-wal")
        return not log.exists() or log.stat().st_size == 0

    def _open_unchanging(self) -> None:
        """Open a file in a folder that cannot be written, where SQLite cannot create the files of its log."""
        self._connect(f"{self.path.absolute().as_uri()}?mode=ro&immutable=1")
        try:
            self._open()
        except sqlite3.OperationalError as error:
            self._sql.close()
            raise self._unreadable(error) from None
        except BaseException:
            self._sql.close()
            raise

    def _unreadable(self, error: object) -> UnreadableLedger:
        remedy = "Name another folder, or put its ledger.sqlite back."
        return UnreadableLedger(f"The ledger cannot be read: {error}. It is {self.path}. {remedy}")

    def _open(self) -> None:
        try:
            owner, version = (
                self._sql.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
            )
            tables = self._sql.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        except sqlite3.OperationalError:
            raise
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.path} is not a ledger of a sweep ({error}). Name another `out`.") from None
        if (version and owner != APPLICATION_ID) or (version == 0 and (tables or self.readonly)):
            raise ValueError(f"{self.path} is not a ledger of a sweep. Name another `out`.")
        if version > SCHEMA_VERSION:
            raise ValueError(
                f"{self.path} was written with schema version {version}. This release reads up to {SCHEMA_VERSION}. "
                f"Update it, or name another `out`."
            )
        if 0 < version < FIRST_VERSION:
            raise ValueError(
                f"{self.path} was written with schema version {version}, before the first release, without digests of "
                f"its rows. This release reads {FIRST_VERSION} to {SCHEMA_VERSION}. Run that sweep again into another "
                f"folder."
            )
        # A foreign file may hold views and triggers, and SQLite would run their functions.
        self._query("PRAGMA trusted_schema = OFF")
        if version == 0:
            self._create()
        else:
            self._require_sound(version)
            if self.bits is not None:
                # The numbers are checked here, before anything in the folder changes.
                self._require_bits(version)
        if not self.readonly:
            # There are only two transactions for each cell, so full synchronization costs little.
            self._query("PRAGMA synchronous = FULL")
            if 0 < version < SCHEMA_VERSION:
                self._bring_up()
        self._is_open = True
        self._truncated = time.monotonic()

    def _create(self) -> None:
        self._query("PRAGMA journal_mode = WAL")
        with self._transaction():
            for statement in SCHEMA.strip().removesuffix(";").split(";\n"):
                self._query(statement)
            self._query(f"PRAGMA application_id = {APPLICATION_ID}")
            self._query(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _require_sound(self, version: int) -> None:
        """Raise UnreadableLedger for damage, for a view, trigger or virtual table, and for unexpected columns."""
        for kind, name, text in map(tuple, self._query("SELECT type, name, sql FROM sqlite_master")):
            # A trigger can change written rows, and a view or a virtual table may compute forever.
            is_plain = kind == "index" or (kind == "table" and str(text).upper().startswith("CREATE TABLE"))
            if not is_plain:
                raise self._unreadable(f"it holds the {kind} {name!r}, which no sweep writes")
        (problem,) = self._query("PRAGMA integrity_check(1)")[0]
        if problem != "ok":
            problem = " ".join(problem.removeprefix("*** in database main ***").split())
            raise self._unreadable(f"it is damaged ({problem})")
        cells = {*COLUMNS, "digest"} - ({"bits"} if version == FIRST_VERSION else set())
        expected = {"cells": cells, "sessions": {"started", "environment", "digest"}}
        for table, columns in expected.items():
            # table_xinfo, because table_info hides computed columns.
            there = {row["name"] for row in self._query(f"PRAGMA table_xinfo({table})")}
            if there != columns:
                raise self._unreadable(f"its table {table} has not the columns of version {version}")

    def _require_bits(self, version: int) -> None:
        """Raise OtherBits if a finished cell has another version of the numbers than the driver."""
        column = str(FIRST_BITS) if version == FIRST_VERSION else f"coalesce(bits, {FIRST_BITS})"
        found = {row[0] for row in self._query(f"SELECT DISTINCT {column} FROM cells WHERE state = 'done'")}
        if found - {self.bits}:
            raise OtherBits(found - {self.bits})

    def _bring_up(self) -> None:
        """Add the missing column to a ledger of version 2."""
        with self._transaction():
            self._query("ALTER TABLE cells ADD COLUMN bits INTEGER")
            self._query(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _query(self, statement: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[sqlite3.Row]:
        """Return the rows that a statement yields. Raises UnreadableLedger if the file is damaged."""
        try:
            return self._sql.execute(statement, values).fetchall()
        except sqlite3.OperationalError as error:
            if self.readonly and self._is_open:
                raise self._unreadable(error) from None
            raise
        # UnicodeDecodeError comes from names of columns, which the text factory does not decode.
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise self._unreadable(error) from None

    def _transaction(self) -> _Transaction:
        self.require_the_same()
        return _Transaction(self._sql, self._query)

    def _seal(self, cell: str) -> None:
        """Compute the digest of a cell's row, and write it into the row."""
        (row,) = self._query("SELECT * FROM cells WHERE id = ?", (cell,))
        self._query("UPDATE cells SET digest = ? WHERE id = ?", (_cell_digest(row), cell))

    def add(self, cells: Iterable[tuple[str, dict[str, Any]]]) -> int:
        """Plan cells, given as (id, configuration); known cells stay unchanged. Returns the number of new cells."""
        with self._transaction():
            plan = self._plan_or_rows()
            first = self._query("SELECT coalesce(max(position) + 1, 0) FROM cells")[0][0]
            known = {row["id"] for row in self._query("SELECT id FROM cells")}
            new, asked = 0, set()
            for position, (cell, config) in enumerate(cells, first):
                asked.add(cell)
                if cell not in known:
                    known.add(cell)
                    row = {**dict.fromkeys(COLUMNS), "id": cell, "position": position, "config": json.dumps(config)}
                    row |= {"state": "planned", "attempts": 0}
                    row["digest"] = _cell_digest(row)
                    names = ", ".join(row)
                    places = ", ".join(f":{name}" for name in row)
                    self._query(f"INSERT INTO cells ({names}) VALUES ({places})", row)
                    new += 1
            self._write_plan(plan._replace(cells=plan.cells | asked))
            return new

    def plan(self) -> Plan | None:
        """Return the stored plan; None in a ledger of an earlier version, which has no plan."""
        if not self._query("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'plan'"):
            return None
        rows = self._query("SELECT content, digest FROM plan")
        content = json_object(rows[0]["content"]) if len(rows) == 1 else None
        if content is None or rows[0]["digest"] != digest_of([rows[0]["content"]]):
            return Plan(frozenset(), 0, is_intact=False)
        return Plan(frozenset(content["cells"]), content["sessions"])

    def _plan_or_rows(self) -> Plan:
        """Return the stored plan, or, if it is missing or damaged, a plan of all intact rows and sessions."""
        plan = self.plan()
        if plan is None or not plan.is_intact:
            plan = Plan(frozenset(row["id"] for row in self.rows() if not row["damaged"]), len(self.sessions()))
        return plan

    def _write_plan(self, plan: Plan) -> None:
        if plan == self.plan():
            return
        content = json.dumps({"cells": sorted(plan.cells), "sessions": plan.sessions})
        self._query(PLAN_SCHEMA)
        self._query("DELETE FROM plan")
        self._query("INSERT INTO plan VALUES (?, ?)", (content, digest_of([content])))

    def start(self, cell: str) -> None:
        """Mark a planned cell as running, and count the attempt. Raises RowChanged if its row has changed."""
        with self._transaction():
            self._require_row(cell, "planned")
            self._query("UPDATE cells SET state = 'running', attempts = attempts + 1 WHERE id = ?", (cell,))
            self._seal(cell)

    def _require_row(self, cell: str, state: str) -> None:
        rows = self._query("SELECT * FROM cells WHERE id = ?", (cell,))
        if not rows or rows[0]["state"] != state or rows[0]["digest"] != _cell_digest(rows[0]):
            raise RowChanged(f"The row of cell {cell} was deleted, or changed by something else than a sweep.")

    def restore(self, cell: str, config: dict[str, Any], state: str) -> None:
        """Write the row of a cell again, as planned or running; only the attempts of the old row are kept."""
        self.add([(cell, config)])
        with self._transaction():
            self._query("UPDATE cells SET config = ? WHERE id = ?", (json.dumps(config), cell))
            self._plan_again(cell)
            self._query("UPDATE cells SET state = ? WHERE id = ?", (state, cell))
            self._seal(cell)

    def release(self, cells: Iterable[str]) -> None:
        """Mark cells as planned again: their results are deleted, their attempts are kept."""
        with self._transaction():
            for cell in cells:
                self._plan_again(cell)

    def repair(self, cells: Mapping[str, dict[str, Any]]) -> None:
        """Plan damaged cells again, which are given as {id: configuration}."""
        with self._transaction():
            for cell, config in cells.items():
                self._query("UPDATE cells SET config = ? WHERE id = ?", (json.dumps(config), cell))
                self._plan_again(cell)

    def _plan_again(self, cell: str) -> None:
        forgotten = ", ".join(f"{name} = NULL" for name in RESULT)
        self._query(f"UPDATE cells SET state = 'planned', finished = NULL, {forgotten} WHERE id = ?", (cell,))
        self._seal(cell)

    def forget(self, numbers: Iterable[int]) -> None:
        """Delete damaged rows by their row numbers, because their ids may not be text."""
        with self._transaction():
            for number in numbers:
                self._query("DELETE FROM cells WHERE rowid = ?", (number,))

    def finish(self, cell: str, result: dict[str, Any]) -> None:
        """Write the result of a running cell. Raises RowChanged if its row has changed.

        result: any of "seconds", "metrics", "diverged", "skipped", "underflow", "telemetry_bytes", "telemetry_sha256",
            "error", "bits".
        """
        self._settle(cell, "done", result)

    def fail(self, cell: str, error: str, traceback: str = "") -> None:
        """Mark a running cell as failed, with its error. The middle of a long text is left out."""
        self._settle(cell, "failed", {"error": error, "traceback": traceback})

    def _settle(self, cell: str, state: str, result: dict[str, Any]) -> None:
        values = {name: result.get(name) for name in RESULT}
        if values["metrics"] is not None:
            values["metrics"] = json.dumps(values["metrics"])
        values |= {name: storable(text) for name in TEXTS if (text := values[name]) is not None}
        names = ", ".join(f"{name} = :{name}" for name in RESULT)
        with self._transaction():
            self._require_row(cell, "running")
            self._query(
                f"UPDATE cells SET state = :state, finished = :finished, {names} WHERE id = :id",
                {"state": state, "finished": time.time(), "id": cell, **values},
            )
            self._seal(cell)
        if time.monotonic() - self._truncated >= TRUNCATE_EVERY:
            self._truncate_log()

    def _truncate_log(self) -> None:
        """Write the log into the file and empty the log; skip this if a reader blocks it."""
        self._truncated = time.monotonic()
        # A reader blocks the truncation. The driver must not wait for the reader: the next truncation will empty the
        # log.
        (patience,) = self._query("PRAGMA busy_timeout")[0]
        self._query("PRAGMA busy_timeout = 50")
        self._query("PRAGMA wal_checkpoint(TRUNCATE)")
        self._query(f"PRAGMA busy_timeout = {patience}")

    def counts(self) -> dict[str, int]:
        """Return the number of cells in each state."""
        return counted(self.rows())

    def rows(self, state: str | None = None) -> list[dict[str, Any]]:
        """Return a dictionary of columns for each cell, in the order of planning, with decoded "config" and "metrics".

        The key "damaged" is 0, or the row's number in the file if the row is damaged. A damaged row has the state
        "failed" and no result; its configuration is empty unless it can still be read.

        state: only cells in this state; None for all.
        """
        # A damaged row counts as failed, whatever its stored state is. For "failed", all rows are therefore read.
        where = "" if state in (None, "failed") else "WHERE state = :state"
        found = self._query(f"SELECT rowid AS number, * FROM cells {where} ORDER BY position, id", {"state": state})
        # The names are read once for all rows: asking each sqlite3.Row for its names takes longer than decoding the
        # row.
        configs, names = Configs(), found[0].keys() if found else []
        with _without_collector():
            rows = [self._decoded(dict(zip(names, row)), configs) for row in found]
        return [row for row in rows if state in (None, row["state"])]

    def _decoded(self, stored: dict[str, Any], configs: Configs) -> dict[str, Any]:
        row: dict[str, Any] = stored if "bits" in stored else dict.fromkeys(COLUMNS) | stored
        changed = row["digest"] != _cell_digest(row)
        config, metrics = configs.decoded(row["config"]), json_object(row["metrics"] or "{}")
        metrics = metrics and {name: as_float64(value) for name, value in metrics.items()}
        row |= {"config": config or {}, "metrics": metrics or {}, "damaged": 0}
        if row["state"] == "done" and row["bits"] is None:
            row["bits"] = FIRST_BITS
        row.pop("digest", None)
        number = row.pop("number")
        if changed or config is None or metrics is None or not all(map(is_json_number, metrics.values())):
            row |= {**dict.fromkeys(RESULT), "state": "failed", "metrics": {}, "error": DAMAGED, "damaged": number}
        return row

    def states(self) -> dict[str, str]:
        """Return {id: state} for all cells."""
        return {row["id"]: row["state"] for row in self.rows()}

    def add_session(self, environment: dict[str, Any]) -> None:
        """Add a session: the environment of a driver, and the current time."""
        row = {"started": time.time(), "environment": json.dumps(environment)}
        with self._transaction():
            plan = self._plan_or_rows()
            self._query("INSERT INTO sessions VALUES (?, ?, ?)", (*row.values(), _session_digest(row)))
            self._write_plan(plan._replace(sessions=plan.sessions + 1))

    def sessions(self) -> list[dict[str, Any]]:
        """Return the environments of all drivers in order, each with "started", in seconds since 1970.

        Damaged entries are left out.
        """
        sessions = []
        for row in self._query("SELECT * FROM sessions ORDER BY started"):
            environment = json_object(row["environment"])
            is_intact = row["digest"] == _session_digest(row)
            if is_intact and environment is not None and math.isfinite(row["started"]):
                sessions.append({"started": row["started"], **environment})
        return sessions

    def close(self) -> None:
        self._sql.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def counted(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Count the rows in each state.

    >>> counted([{"state": "done"}, {"state": "done"}])
    {'planned': 0, 'running': 0, 'done': 2, 'failed': 0}
    """
    counts = Counter(row["state"] for row in rows)
    return {state: counts[state] for state in STATES}


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disable the cycle collector in a block. It would use a quarter of the time in which 100,000 rows are created."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _identity(path: Path) -> tuple[int, int]:
    """Return the device and inode of a file, which do not depend on its name."""
    found = path.stat()
    return found.st_dev, found.st_ino


def _cell_digest(row: Any) -> str:
    values = [row[name] for name in SEALED]
    return digest_of(values if row["bits"] is None else [*values, row["bits"]])


def _session_digest(row: Any) -> str:
    return digest_of([row["started"], row["environment"]])


class _Transaction:
    """Context manager for a transaction: the statements in its block take effect all together, or not at all."""

    def __init__(self, sql: sqlite3.Connection, query: Callable[[str], object]) -> None:
        self._sql, self._query = sql, query

    def __enter__(self) -> None:
        # If Ctrl-C came between an earlier BEGIN and its block, that transaction is still open.
        if self._sql.in_transaction:
            self._query("ROLLBACK")
        self._query("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._query("COMMIT")
        # If a full disk has already ended the transaction, there is nothing to roll back.
        elif self._sql.in_transaction:
            self._query("ROLLBACK")
