"""Progress of a cell while it trains: its curves so far, in a file that the worker writes and the driver reads."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from ada_loss.files import MOST_BYTES, append_to, opened, write_atomically
from ada_loss.lab.cells.telemetry import Curves, Numbers, curves_of, telemetry
from ada_loss.lab.training.run import Run

__all__ = ["LiveFile", "LiveReader", "live_path"]

EVERY = 1.0  # seconds, at least
LEISURE = 50  # a worker waits so many times as long as it took to write: 2 % of its time at most


def live_path(checkpoint: Path) -> Path:
    """The file with the curves of a cell so far, next to its checkpoint."""
    return checkpoint.with_suffix(".live")


class LiveFile:
    """Progress callback that appends the growth of the curves from time to time.

    If the file cannot be written, it is skipped: the driver gets the whole at the end.

    path: of the file, which begins empty.
    run: returns the current state of the training.
    """

    def __init__(self, path: Path, run: Callable[[], Run]) -> None:
        self.path, self._run, self._told = path, run, dict[str, int]()
        self._next = time.monotonic() + EVERY
        with suppress(OSError):
            write_atomically(path, b"", is_kept=False, is_own=True)

    def __call__(self, steps: int) -> None:
        began = time.monotonic()
        if began < self._next:
            return
        self.write()
        ended = time.monotonic()
        self._next = ended + max(EVERY, LEISURE * (ended - began))

    def write(self) -> None:
        """Append the new values."""
        lines = []
        for name, (steps, values) in curves_of(telemetry(self._run())).items():
            told = self._told.get(name, 0)
            if len(steps) > told:
                lines.append(json.dumps([name, told, steps[told:].tolist(), values[told:].tolist()]) + "\n")
                self._told[name] = len(steps)
        with suppress(OSError, ValueError):
            append_to(self.path, "".join(lines).encode())


class LiveReader:
    """Read what a worker appends to its file. A restarted worker writes the same from the start.

    path: of the file, which may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._at, self.told = path, 0, dict[str, int]()

    def read(self) -> Curves:
        """The new values since the last call, {name: (steps, values)}."""
        try:
            with opened(self.path) as file:
                if file.seek(0, os.SEEK_END) < self._at:
                    self._at = 0
                file.seek(self._at)
                content = file.read(MOST_BYTES)
        except (OSError, ValueError):  # not there yet, not there any more, or nothing that a worker wrote
            return {}
        whole = content[: content.rfind(b"\n") + 1]
        self._at += len(whole) or len(content) // MOST_BYTES * MOST_BYTES  # no worker writes a line as long
        gained: Curves = {}
        for line in whole.splitlines():
            try:
                name, first, steps, values = json.loads(line)
                new = self._new(name, first, np.array(steps, float), np.array(values, float))
            except (
                ValueError,
                TypeError,
                OverflowError,
                RecursionError,
            ):  # the worker began again
                continue
            if len(new[0]):
                before = gained.get(name, (np.empty(0), np.empty(0)))
                gained[name] = np.concatenate([before[0], new[0]]), np.concatenate([before[1], new[1]])
        return gained

    def rest(self, curves: Curves) -> Curves:
        """The part of the whole curves that was not read yet."""
        unread = {name: self._new(name, 0, *points) for name, points in curves.items()}
        return {name: points for name, points in unread.items() if len(points[0])}

    def _new(self, name: str, first: int, steps: Numbers, values: Numbers) -> tuple[Numbers, Numbers]:
        told = self.told.get(name, 0)
        skip = max(told - first, 0)
        if first > told:  # a line is lost: what follows is told in the end
            return steps[:0], values[:0]
        self.told[name] = max(told, first + len(steps))
        return steps[skip:], values[skip:]
