"""Prepare a sweep: plan its cells, plan damaged and lost cells again, and delete leftover files.

Trainings with the same first formats share one training until their formats differ. Each of them then continues from
the state at this step (`Branches`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ada_loss.files import is_leftover, remove_from, require_own
from ada_loss.lab.cells.cell_updates import UPDATE, split
from ada_loss.lab.cells.cells import Cell, digest, is_intact
from ada_loss.lab.cells.identity import is_own
from ada_loss.lab.cells.ledger import Ledger
from ada_loss.lab.cells.missing import CELL_ID, Missing, read_snapshot
from ada_loss.lab.cells.telemetry import is_whole, telemetry_content
from ada_loss.lab.terminal import say
from ada_loss.lab.training.format_schedule import SCHEDULE, FormatSchedule, Start, as_schedule
from ada_loss.lab.training.rollouts import ROLLOUT

__all__ = ["Branches", "prepare"]

# The number of lost cells whose ids are printed.
MOST_NAMED = 5
NAME = re.compile(r"[0-9a-f]{16}\.branch")  # the name of a file, made by `digest`


def prepare(ledger: Ledger, out: Path, cells: Sequence[Cell], retry_failed: bool) -> list[Cell]:
    """Plan the cells, and return the cells that have to run.

    Cells that a dead driver left running, and cells whose rows or files are lost or damaged, are planned again. Cells
    of another sweep into the folder stay unchanged. Raises ChangedFolder, before anything is planned, if a folder of
    the sweep is a link.
    """
    folders = out / "telemetry", out / "checkpoints"
    # The folders are checked first, because behind a broken link every result would count as lost.
    for folder in folders:
        require_own(folder)
    asked = {cell.id: cell for cell in cells}
    rows, _, missing = read_snapshot(ledger, out, drives=True)
    _say_lost(missing, asked)
    ledger.add((cell.id, cell.config) for cell in cells)
    gone = _repair(ledger, rows, asked)
    states = {**dict.fromkeys(asked, "planned"), **{row["id"]: row["state"] for row in rows if row["id"] not in gone}}
    again = []
    for row in rows:
        cell, state = row["id"], row["state"]
        if state == "running" or (cell in asked and retry_failed and state == "failed"):
            again.append(cell)
        elif cell in asked and state == "done" and not _has_telemetry(out, row):
            say(f"The telemetry of cell {cell} is missing or damaged: it will be run again.")
            again.append(cell)
    ledger.release(again)
    states |= dict.fromkeys(again, "planned")
    _remove_leftovers(out, folders, states)
    return [cell for cell in cells if states[cell.id] == "planned"]


def _say_lost(missing: Missing, asked: Collection[str]) -> None:
    """Print the cells of this sweep that the ledger has lost; `Results` reports lost cells of other sweeps."""
    rows, results = ([cell for cell in cells if cell in asked] for cells in (missing.cells, missing.results))
    if rows:
        say(
            f"The ledger has lost the rows of {len(rows)} of {missing.planned} cells, {_names(rows)}: "
            f"they will be run again."
        )
    if results:
        say(
            f"The ledger lacks the result of {len(results)} cells that have telemetry, {_names(results)}: the driver "
            f"was killed, or what was written last is lost. They will be run again."
        )
    if missing.plan_was_changed:
        say("The plan of the ledger was deleted or changed: it may have lost rows. It is written again.")


def _names(cells: Sequence[str]) -> str:
    more = f" and {len(cells) - MOST_NAMED} more" if len(cells) > MOST_NAMED else ""
    return ", ".join(cells[:MOST_NAMED]) + more


def _repair(ledger: Ledger, rows: Sequence[Mapping[str, Any]], asked: Mapping[str, Cell]) -> set[str]:
    """Plan damaged cells again, and delete damaged rows whose ids match no cell; return the ids of all these rows."""
    changed = [row for row in rows if row["damaged"]]
    ours = {row["id"]: asked[row["id"]].config for row in changed if row["id"] in asked}
    lost = {
        row["id"]: row["damaged"]
        for row in changed
        if row["id"] not in asked and not is_intact(row["id"], row["config"])
    }
    for words, cells in (("it will be run again", ours), ("it is known no more, and is deleted", lost)):
        for cell in cells:
            say(f"The row of cell {cell} in the ledger was changed or damaged: {words}.")
    ledger.repair(ours)
    ledger.forget(lost.values())
    return {*ours, *lost}


def _has_telemetry(out: Path, row: Mapping[str, Any]) -> bool:
    try:
        content = telemetry_content(out, row["id"])
    except (FileNotFoundError, ValueError):
        return False
    return is_whole(content, row["telemetry_bytes"], row["telemetry_sha256"])


def _remove_leftovers(out: Path, folders: Sequence[Path], states: Mapping[str, str]) -> None:
    """Delete leftovers of a driver that died: unfinished files, telemetry without a result, old checkpoints.

    Only files with the names that a sweep gives its files are deleted, and no file behind a link.
    """

    def is_old(name: str) -> bool:
        cell, kind = os.path.splitext(name)
        was_running = kind in (".steps", ".live") and CELL_ID.fullmatch(cell) is not None
        state = states.get(cell)
        # A cell without a result has no telemetry to keep, and a cell with a result needs no checkpoint.
        is_over = state is not None and (kind, state == "done") in ((".npz", False), (".pt", True))
        return was_running or is_over or is_leftover(name)

    remove_from(out, is_leftover, is_own=False)
    for folder in folders:
        remove_from(folder, is_old)


class Branches:
    """States that cells share, as files in a folder. The first cell that reaches a state writes it.

    Cells share a state if they differ only in their formats from this state on. A cell's result has the same
    bits with and without shared states. Cells of a user's training function share no states.

    cells: the cells to run.
    folder: the folder of the files.
    keep: whether files are kept, and also written for cells that are added later. Otherwise files that no cell needs
        are deleted.
    """

    def __init__(self, cells: Sequence[Cell], folder: Path, keep: bool = False) -> None:
        self.folder, self.keep = folder, keep
        self._of: dict[str, dict[Start, Path]] = {}
        self._given_up: set[Path] = set()
        for path, start, sharing in self._shared(cells):
            for cell in sharing:
                self._of.setdefault(cell, {})[start] = path
        self._remove_all_but({path for files in self._of.values() for path in files.values()})

    def of(self, cell: str) -> dict[Start, Path]:
        """Return the files of a cell, by the cell's id, in the order of their starts."""
        return dict(sorted(self._of.get(cell, {}).items()))

    def is_held(self, cell: str, running: Collection[str]) -> bool:
        """True if a cell has to wait for a running cell, which will write a state from which this cell can begin."""
        wanted = self._ahead(cell)
        return any(not wanted.isdisjoint(self._ahead(other)) for other in running) if wanted else False

    def finish(self, cell: str, left: Iterable[str]) -> None:
        """Handle the end of a cell.

        Other cells no longer wait for states that this cell did not write. States that no cell needs are deleted.

        left: the cells that run or wait.
        """
        if cell not in self._of:
            return
        self._given_up |= self._ahead(cell)
        self._remove_all_but({path for other in left for path in self.of(other).values()})

    def _ahead(self, cell: str) -> set[Path]:
        """Return the files that a cell would write if it began now: the files after its last existing file."""
        ahead: set[Path] = set()
        for path in self.of(cell).values() if cell in self._of else ():
            ahead = set() if path.exists() else {*ahead, path}
        return ahead - self._given_up

    def _remove_all_but(self, needed: Collection[Path]) -> None:
        names = {path.name for path in needed}
        if not self.keep:
            remove_from(self.folder, lambda name: NAME.fullmatch(name) is not None and name not in names)

    def _shared(self, cells: Sequence[Cell]) -> list[tuple[Path, Start, list[str]]]:
        """Return file, start and cells of each state that is shared, already exists, or should be kept."""
        alike: dict[str, list[tuple[str, FormatSchedule]]] = {}
        has_schedules = any(SCHEDULE in split(cell.config["format"])[0] for cell in cells)
        for cell in cells if has_schedules else ():
            if not is_own(cell.config["task"]):
                fmt, update = split(cell.config["format"])
                # Cells share a state if they differ only in later formats. An update or a rollout applies from the
                # start.
                others = {name: value for name, value in cell.config.items() if name != "format"}
                others |= {} if update is None else {UPDATE: update}
                others |= {ROLLOUT: cell.config["format"][ROLLOUT]} if ROLLOUT in cell.config["format"] else {}
                alike.setdefault(digest(others), []).append((cell.id, as_schedule(fmt)))
        shared = []
        for rest, schedules in alike.items():
            for start in sorted({stage.start for _, schedule in schedules for stage in schedule.stages[1:]}):
                parting: dict[Path, dict[str, str]] = {}
                for cell_id, schedule in schedules:
                    if _is_ordered(schedule, start):
                        name = digest([rest, schedule.before(start).stages, start])
                        path = self.folder / f"{name}.branch"
                        # The next formats are compared as text. Cells that continue with the same format separate only
                        # at a later start.
                        parting.setdefault(path, {})[cell_id] = json.dumps(_format_from(schedule, start))
                for path, formats in parting.items():
                    if len({*formats.values()}) > 1 or path.exists() or self.keep:
                        shared.append((path, start, [*formats]))
        return shared


def _is_ordered(schedule: FormatSchedule, start: Start) -> bool:
    """True if a start can be compared with the starts of a schedule: both must be fractions, or both steps."""
    return all(type(stage.start) is type(start) for stage in schedule.stages[1:])


def _format_from(schedule: FormatSchedule, start: Start) -> Any:
    """Return the format that a schedule has from a start on."""
    return [stage.fmt for stage in schedule.stages if stage.start <= start][-1]
