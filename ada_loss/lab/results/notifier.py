"""Notifier: reports each cell to the trackers of a sweep once, and running cells while they train."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ada_loss.files import remove_from
from ada_loss.lab.cells.ledger import Ledger
from ada_loss.lab.cells.names import names_of, read_names
from ada_loss.lab.cells.telemetry import LiveReader, curves_of, live_path, read_telemetry, telemetry_path
from ada_loss.lab.directions import Directions, read_directions
from ada_loss.lab.results.trackers import About, Tracker, TrackerOfRuns

__all__ = ["Notifier"]

READ_EVERY = 1.0  # seconds
METHODS = ("begin", "add", "finish", "abandon")


class Notifier:
    """Report each finished cell to trackers once. A tracker that fails is dropped: it must not cost a result.

    Trackers of running cells get what the workers write, every second, if driver and workers share the folder;
    otherwise they get the whole at the end.

    trackers: the receivers.
    out: the folder of the sweep.
    """

    def __init__(self, trackers: Sequence[Tracker], out: Path) -> None:
        self.trackers, self.out = [*trackers], out
        self._known: dict[int, set[str]] = {}  # by tracker: a cell whose file was damaged runs again, and is known
        self._training: dict[str, tuple[Mapping[str, Any], LiveReader]] = {}
        self._begun: dict[int, set[str]] = {}
        self._lock = threading.RLock()  # trackers are told by the thread that follows, and by the driver's
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._names: dict[str, str] = {}

    @property
    def is_live(self) -> bool:
        """True if a tracker follows running trainings."""
        return any(map(_is_live, self.trackers))

    def catch_up(self, ledger: Ledger) -> None:
        """Report cells that were finished before: by another run, or just before a crash."""
        rows = ledger.rows() if self.trackers else []
        self._names = names_of((row["config"].get("format") for row in rows), read_names(self.out))
        for tracker in [*self.trackers]:
            self._known[id(tracker)] = self._try(tracker, tracker.known) or set()
            self._begun[id(tracker)] = set()
            for row in rows:
                if row["state"] == "done":
                    self._log(tracker, row["id"], row["config"], row)

    def start(self, cell: str, config: Mapping[str, Any]) -> None:
        """Report that a cell starts to train."""
        if not self.is_live:
            return
        with self._lock:
            if cell not in self._training:  # one whose worker died goes on as it was
                self._training[cell] = config, LiveReader(live_path(self.out / "checkpoints" / f"{cell}.pt"))
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, daemon=True)
            self._thread.start()

    def tell(self, cell: str, config: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        """Report a finished cell; the arguments are those of `Tracker.log`."""
        with self._lock:
            for tracker in [*self.trackers]:
                self._log(tracker, cell, config, row)
            self._forget(cell)

    def stop(self, cell: str) -> None:
        """Report that a cell stopped training, perhaps by a failure."""
        with self._lock:
            for tracker in [*self.trackers]:
                if cell in self._begun[id(tracker)]:
                    self._begun[id(tracker)].discard(cell)
                    self._try(tracker, lambda told=tracker: told.abandon(cell))  # type: ignore[misc]
            self._forget(cell)

    def close(self) -> None:
        """End unfinished runs; they are restarted the next time."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        for cell in [*self._training]:
            self.stop(cell)

    def _forget(self, cell: str) -> None:
        training = self._training.pop(cell, None)
        if training is not None:
            path = training[1].path
            with suppress(OSError):
                remove_from(path.parent, path.name.__eq__)

    def _follow(self) -> None:
        while not self._over.wait(READ_EVERY):
            with self._lock:
                for cell, (config, reader) in [*self._training.items()]:
                    self._tell_what_is_new(cell, config, reader)

    def _tell_what_is_new(self, cell: str, config: Mapping[str, Any], reader: LiveReader) -> None:
        curves = reader.read()
        for tracker in [*self.trackers] if curves else ():
            if _is_live(tracker) and cell not in self._known[id(tracker)]:
                self._begin(tracker, cell, config)
                self._try(tracker, lambda told=tracker: told.add(cell, curves))  # type: ignore[misc]

    def _begin(self, tracker: Any, cell: str, config: Mapping[str, Any]) -> None:
        if cell not in self._begun[id(tracker)]:
            self._begun[id(tracker)].add(cell)
            about = About.of(config, self._names, self.out.absolute().name, Directions(read_directions(self.out)))
            self._try(tracker, lambda: tracker.begin(cell, config, about))

    def _log(self, tracker: Any, cell: str, config: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        if tracker not in self.trackers or cell in self._known[id(tracker)]:
            return
        self._known[id(tracker)].add(cell)
        complete = {**dict.fromkeys(("seconds", "skipped", "underflow", "diverged")), **row}
        path = telemetry_path(self.out, cell)
        if not _is_live(tracker):
            self._try(tracker, lambda: tracker.log(cell, config, complete, path))
            return
        was_begun = cell in self._begun[id(tracker)]
        self._begin(tracker, cell, config)
        self._begun[id(tracker)].discard(cell)
        reader = self._training[cell][1] if was_begun and cell in self._training else LiveReader(path)

        def finish() -> None:
            told = dict(reader.told)
            rest = reader.rest(curves_of(read_telemetry(self.out, cell)))
            reader.told = told  # another tracker has as much to come
            tracker.add(cell, rest)
            tracker.finish(cell, complete, path)

        self._try(tracker, finish)

    def _try(self, tracker: Any, work: Callable[[], Any]) -> Any:
        if tracker not in self.trackers:
            return None
        try:
            return work()
        except Exception as error:  # a store may raise anything; the ledger has the cell
            self.trackers.remove(tracker)
            warnings.warn(
                f"{type(tracker).__name__} failed ({type(error).__name__}: {error}) and is told no more. The results "
                f"are in {self.out}. Repair it and run the same again: it is told of what it missed.",
                stacklevel=2,
            )
            return None


def _is_live(tracker: object) -> bool:
    return isinstance(tracker, TrackerOfRuns) or all(hasattr(tracker, name) for name in METHODS)
