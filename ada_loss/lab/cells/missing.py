"""Detect missing data in a sweep's folder: planned cells without a row, telemetry without a result, lost sessions.

A driver locks the folder. While a driver runs, telemetry without a result does not count as missing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ada_loss.files import NO_LINK, NO_WAIT, require_own_file

__all__ = ["CELL_ID", "Missing", "Plan", "Snapshot", "is_driven", "lock_path", "read_snapshot", "require_lockable"]

try:
    import fcntl
# Windows has no fcntl, so a folder never counts as driven there.
except ImportError:
    fcntl = None  # type: ignore[assignment]


def lock_path(out: Path) -> Path:
    """Return the path of the lock file of a folder's driver. The kernel releases the lock when the process dies."""
    return out / "ledger.lock"


def require_lockable(out: Path) -> None:
    """Raise ChangedFolder if the lock is not a regular file but, for example, a pipe or a link."""
    require_own_file(lock_path(out))


def is_driven(out: Path) -> bool:
    """True if a driver on this machine runs in a folder, or if this cannot be determined. The folder is not changed.

    >>> is_driven(Path("nowhere"))
    False
    """
    path = lock_path(out)
    # A driver locks only a regular file, and opening a pipe would wait for its other end.
    if not path.is_file() or path.is_symlink():
        return False
    try:
        file = os.open(path, os.O_RDONLY | NO_LINK | NO_WAIT)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        if fcntl is not None:
            # The shared lock is held only for a moment. A driver that starts now retries for longer than that.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except OSError:
        pass
    finally:
        os.close(file)
    return True


CELL_ID = re.compile("[0-9a-f]{16}")
FILE = re.compile(rf"({CELL_ID.pattern})\.npz")  # a file of telemetry


class Plan(NamedTuple):
    """The expected content of a ledger, to detect missing rows.

    cells: the ids of all cells that were ever planned.
    sessions: the number of drivers so far.
    is_intact: whether the stored plan is unchanged. If not, the other fields are empty.
    """

    cells: frozenset[str]
    sessions: int
    is_intact: bool = True


@dataclass(frozen=True)
class Missing:
    """Lost data of a sweep's folder. Its truth value is False if nothing is lost. `str` describes the losses.

    cells: the ids of cells that were planned, or have telemetry, but have no row.
    planned: the number of cells that should exist.
    results: the ids of cells that have telemetry, but a row without a result.
    sessions: the number of drivers' environments that are missing or damaged.
    plan_was_changed: whether the plan is unreadable.

    >>> print(Missing(("a", "b"), 9))
    2 of 9 cells are missing: the ledger has lost their rows. Call sweep(...) with the arguments of that sweep: it \
trains them again.
    """

    cells: tuple[str, ...] = ()
    planned: int = 0
    results: tuple[str, ...] = ()
    sessions: int = 0
    plan_was_changed: bool = False

    def __bool__(self) -> bool:
        return bool(self.cells or self.results or self.sessions or self.plan_was_changed)

    def __str__(self) -> str:
        words = []
        if self.cells:
            are = "is" if len(self.cells) == 1 else "are"
            words.append(
                f"{len(self.cells)} of {self.planned} cells {are} missing: the ledger has lost their rows. Call "
                f"sweep(...) with the arguments of that sweep: it trains them again."
            )
        if self.results:
            cells = "cell that has" if len(self.results) == 1 else "cells that have"
            words.append(
                f"The ledger lacks the result of {len(self.results)} {cells} telemetry: the driver was killed, or what "
                f"was written last is lost. Run the sweep again: it trains them again."
            )
        if self.sessions:
            have = "session of a driver was" if self.sessions == 1 else "sessions of drivers were"
            words.append(f"{self.sessions} {have} deleted or changed: with which versions it ran is not known.")
        if self.plan_was_changed:
            words.append(
                "The plan of the ledger was deleted or changed: whether cells are missing is not known. "
                "Run the sweep again: it writes a new one."
            )
        return " ".join(words)


class Snapshot(NamedTuple):
    """A ledger's rows and sessions at one moment, and its lost data."""

    rows: list[dict[str, Any]]
    sessions: list[dict[str, Any]]
    missing: Missing


class _Ledger(Protocol):
    def plan(self) -> Plan | None: ...
    def rows(self) -> list[dict[str, Any]]: ...
    def sessions(self) -> list[dict[str, Any]]: ...


def read_snapshot(ledger: _Ledger, out: Path, *, drives: bool = False) -> Snapshot:
    """Read a folder's ledger, and find lost data. This changes nothing, and reads no telemetry.

    ledger, out: the ledger and the folder of the sweep. If the ledger has no plan, missing rows are found only by their
        telemetry.
    drives: whether the caller is the folder's driver. While another driver runs, telemetry is not compared with rows,
        because a driver writes a cell's telemetry before its result.
    """
    # The lock is checked before and after reading: a driver that starts or ends in between may have written telemetry
    # without a result.
    driven = not drives and is_driven(out)
    # The plan is read before the rows: cells that a driver adds in between then have rows, and do not count as missing.
    plan = ledger.plan()
    rows, sessions = ledger.rows(), ledger.sessions()
    files = _with_telemetry(out, {row["id"] for row in rows if _is_done(row)})
    if driven or (not drives and is_driven(out)):
        files = set()
    return Snapshot(rows, sessions, _missing(rows, len(sessions), plan, files))


def _missing(rows: Iterable[Mapping[str, Any]], sessions: int, plan: Plan | None, files: set[str]) -> Missing:
    known = {row["id"]: row for row in rows}
    expected = files if plan is None else files | plan.cells
    strangers = [cell for cell, row in known.items() if row["damaged"] and cell not in expected]
    # A damaged row with an unknown id is probably the row of a lost cell. For each such row one cell is removed from
    # the lost cells; otherwise the cell would be reported twice.
    lost = sorted(expected - known.keys())[len(strangers) :]
    return Missing(
        cells=tuple(lost),
        planned=len(known) + len(lost),
        results=tuple(sorted(cell for cell in files & known.keys() if not _is_done(known[cell]))),
        sessions=0 if plan is None else max(plan.sessions - sessions, 0),
        plan_was_changed=plan is not None and not plan.is_intact,
    )


def _with_telemetry(out: Path, done: Collection[str]) -> set[str]:
    """Return the ids of cells with telemetry; an empty file counts only if the cell is done."""
    ids = set()
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(out / "telemetry") as entries:
        for entry in entries:
            # A driver that has just started may delete leftover files during this loop.
            with suppress(FileNotFoundError):
                found = FILE.fullmatch(entry.name)
                # `stat` is called only if it is needed, not for each of 100,000 files.
                if found and (found[1] in done or entry.stat().st_size):
                    ids.add(found[1])
    return ids


def _is_done(row: Mapping[str, Any]) -> bool:
    """True if a row has a result, or may have had one before it was damaged; damage is reported elsewhere."""
    return bool(row["damaged"]) or row["state"] == "done"
