"""Before a sweep runs: its cells are planned, what is damaged or lost is planned again, leftovers are deleted."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ada_loss.files import is_leftover, remove_from, require_own
from ada_loss.lab.cells.cells import Cell, is_intact
from ada_loss.lab.cells.ledger import Ledger
from ada_loss.lab.cells.missing import CELL_ID, Missing, read_snapshot
from ada_loss.lab.cells.telemetry import is_whole, telemetry_content
from ada_loss.lab.terminal import say

__all__ = ["prepare"]

MOST_NAMED = 5  # ids of lost cells


def prepare(ledger: Ledger, out: Path, cells: Sequence[Cell], retry_failed: bool) -> list[Cell]:
    """Plan the cells, and give those that are to run.

    Cells that a dead driver left running, and cells whose rows or files are lost or damaged, are planned again. Those
    of another sweep into the folder stay as they are. Raises ChangedFolder, before anything is planned, where a folder
    of the sweep is a link.
    """
    folders = out / "telemetry", out / "checkpoints"
    for folder in folders:  # first: where a link leads nowhere, every result would count as lost
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
    """Say which of the cells that are asked for the ledger has lost; `Results` tells of the others."""
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
    """Plan damaged cells again, and delete the damaged rows whose ids are those of no cell; gives the ids of both."""
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
    """Delete what a driver that died left behind: files half written, telemetry without a result, old checkpoints.

    Nothing but what a sweep names so is deleted, and nothing where a link leads.
    """

    def is_old(name: str) -> bool:
        cell, kind = os.path.splitext(name)
        was_running = kind in (".steps", ".live") and CELL_ID.fullmatch(cell) is not None
        state = states.get(cell)
        is_over = state is not None and (kind, state == "done") in ((".npz", False), (".pt", True))
        return was_running or is_over or is_leftover(name)

    remove_from(out, is_leftover, is_own=False)
    for folder in folders:
        remove_from(folder, is_old)
