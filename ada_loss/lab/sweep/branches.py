"""Branches: trainings whose formats begin alike are trained once until they part, and each goes on from that state."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from ada_loss.files import remove_from
from ada_loss.lab.cells.cell_updates import UPDATE, split
from ada_loss.lab.cells.cells import Cell, digest
from ada_loss.lab.cells.identity import is_own
from ada_loss.lab.training.format_schedule import SCHEDULE, FormatSchedule, Start, as_schedule
from ada_loss.lab.training.rollouts import ROLLOUT

__all__ = ["Branches"]

NAME = re.compile(r"[0-9a-f]{16}\.branch")  # of a file: what `digest` gives


class Branches:
    """The states that cells share, as files in a folder: the first cell that comes to one writes it.

    Cells share a state if they differ in nothing but their formats from there on. Their results are those of cells that
    share nothing, to the bit. A training function of the user's own shares none.

    cells: those that are to run.
    folder: of the files.
    keep: whether the files are kept, and written for cells to come too. Otherwise those that no cell needs are deleted.
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
        """The files of a cell, by its id, in the order of their starts."""
        return dict(sorted(self._of.get(cell, {}).items()))

    def is_held(self, cell: str, running: Collection[str]) -> bool:
        """Whether a cell waits, because one that runs is on its way to a state that this one can begin from."""
        wanted = self._ahead(cell)
        return any(not wanted.isdisjoint(self._ahead(other)) for other in running) if wanted else False

    def finish(self, cell: str, left: Iterable[str]) -> None:
        """A cell is over: what it has not written others do not wait for, and what none needs any more is deleted.

        left: the cells that run or wait.
        """
        if cell not in self._of:
            return
        self._given_up |= self._ahead(cell)
        self._remove_all_but({path for other in left for path in self.of(other).values()})

    def _ahead(self, cell: str) -> set[Path]:
        """The files behind the last that exists: a cell that begins now writes them."""
        ahead: set[Path] = set()
        for path in self.of(cell).values() if cell in self._of else ():
            ahead = set() if path.exists() else {*ahead, path}
        return ahead - self._given_up

    def _remove_all_but(self, needed: Collection[Path]) -> None:
        names = {path.name for path in needed}
        if not self.keep:
            remove_from(self.folder, lambda name: NAME.fullmatch(name) is not None and name not in names)

    def _shared(self, cells: Sequence[Cell]) -> list[tuple[Path, Start, list[str]]]:
        """The file, the start and the cells of each state that is shared, there already, or to be kept."""
        alike: dict[str, list[tuple[str, FormatSchedule]]] = {}
        has_schedules = any(SCHEDULE in split(cell.config["format"])[0] for cell in cells)
        for cell in cells if has_schedules else ():
            if not is_own(cell.config["task"]):
                fmt, update = split(cell.config["format"])
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
                        parting.setdefault(path, {})[cell_id] = json.dumps(_format_from(schedule, start))
                for path, formats in parting.items():
                    if len({*formats.values()}) > 1 or path.exists() or self.keep:
                        shared.append((path, start, [*formats]))
        return shared


def _is_ordered(schedule: FormatSchedule, start: Start) -> bool:
    """Whether a start can be compared with those of a schedule before the number of steps is known."""
    return all(type(stage.start) is type(start) for stage in schedule.stages[1:])


def _format_from(schedule: FormatSchedule, start: Start) -> Any:
    """The format that a schedule has from a start on."""
    return [stage.fmt for stage in schedule.stages if stage.start <= start][-1]
