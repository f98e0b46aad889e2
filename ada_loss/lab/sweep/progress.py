"""Progress of a sweep: a bar on a terminal, plain lines elsewhere, with the steps of running cells."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import stdev
from types import TracebackType
from typing import Any

from ada_loss.files import content_of, remove_from, write_atomically
from ada_loss.lab.directions import Directions, hint_for, keep_directions
from ada_loss.lab.results.table import is_share, mean_and_deviation, mean_of
from ada_loss.lab.terminal import say, tqdm

__all__ = ["Progress", "StepFile", "steps_path"]

WRITTEN_EVERY = 0.5  # seconds
READ_EVERY = 1.0
# The seconds until the first line, and the longest pause between lines: the pause doubles with each line up to this
# limit.
FIRST_LINE, LINE_EVERY = 2.0, 10.0
MOST_SHOWN = 4  # the number of cells whose steps are shown


def steps_path(checkpoint: Path) -> Path:
    """Return the path of the file with the number of a cell's steps so far, next to the cell's checkpoint."""
    return checkpoint.with_suffix(".steps")


class StepFile:
    """Progress callback that writes the number of steps from time to time, if the file can be written.

    path: the path of the file; its folder is created.
    total: the number of steps; 0 if it is unknown.
    """

    def __init__(self, path: Path, total: int = 0) -> None:
        self.path, self.total, self.done, self._last = path, total, 0, 0.0

    def __call__(self, steps: int) -> None:
        self.done += steps
        if time.monotonic() - self._last >= WRITTEN_EVERY:
            self._last = time.monotonic()
            with suppress(OSError):
                write_atomically(self.path, f"{self.done} {self.total}".encode(), is_kept=False, is_own=True)

    def remove(self) -> None:
        """Delete the file at the end of the training."""
        with suppress(OSError):
            remove_from(self.path.parent, self.path.name.__eq__)


class Progress:
    """Display of the finished cells, the steps of the running cells, and the best mean so far.

    total, done: the number of cells, and of cells that are already done.
    out: the folder of the sweep, where workers write their steps.
    title: a description of the work; "" for none.
    is_shown: whether anything is shown.
    goals: the directions of metrics, as stated; a task's own goals come with its results.
    """

    def __init__(
        self, total: int, done: int, out: Path, title: str, is_shown: bool, goals: Mapping[str, str] = {}
    ) -> None:
        self.total, self.done, self.out, self.title, self.is_shown = total, done, out, title, is_shown
        self.best, self._first, self._began, self._said = "", done, time.monotonic(), time.monotonic()
        self.running: dict[str, None] = {}
        self.goals = dict(goals)
        self._metric, self._told = "", set[str]()
        # For each setting: its description, whether it is float32, and its values.
        self._values: dict[str, tuple[str, bool, list[float]]] = {}
        self._bar, self._pause = None, FIRST_LINE
        self._over = threading.Event()
        # The thread is a daemon: it must not keep the process alive if an exception killed the driver.
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def begin(self, words: str) -> None:
        """Print the first line, before any cell runs."""
        if self.is_shown:
            before = f", {self._first} of {self.total} done before" if self._first else ""
            title = f"{self.title}: " if self.title else ""
            say(f"{title}{self.total - self._first} cells{before}; {words}")

    def __enter__(self) -> Progress:
        if self.is_shown and _shows_bars():
            self._bar = tqdm(total=self.total, initial=self.done, unit="cell", desc=self.title or None)
        if self.is_shown:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        # The thread was not started if nothing is shown.
        if self._thread.is_alive():
            self._thread.join()
        if self._bar is not None:
            self._bar.set_postfix_str(self.best)
            self._bar.close()
        elif self.is_shown:
            self._say_line()

    def start(self, cell: str) -> None:
        """Count a cell as running."""
        self.running[cell] = None

    def settle(self, cell: str, is_over: bool) -> None:
        """Count a cell as stopped. is_over: whether it is done or failed, and does not run again."""
        self.running.pop(cell, None)
        self.done += is_over
        if self._bar is not None and is_over:
            self._bar.update()

    def compare(self, cell: str, result: Mapping[str, Any], setting: str = "", is_baseline: bool = False) -> None:
        """Add a cell to the mean of its setting, by its first metric; store the goals that its task states.

        If the direction of the metric is unknown, no setting is best. A setting with a diverged training is never best.
        Only the first cell's metric is used, because values of two metrics are not comparable.

        cell: the cell in words, "fp16 nearest_even none seed 0".
        setting: a name that cells share if they differ only in the seed; "" for the cell's words without the seed.
        is_baseline: whether the cell is float32, which is shown next to the best setting.
        """
        told = {name: goal for name, goal in result.get("goals", {}).items() if name not in self.goals}
        if told:
            self.goals |= told
            keep_directions(self.out, told)
        words = cell.rpartition(" seed ")[0] or cell
        for name, value in [*result["metrics"].items()][:1]:
            if not Directions(self.goals).sign(name):
                self._say_once(f"No verdict on {name}: nothing tells whether more of it is better. {hint_for(name)}")
            elif name == (self._metric or name):
                self._metric = name
                values = self._values.setdefault(setting or words, (words, is_baseline, []))[2]
                values.append(math.nan if result.get("diverged") else value)
        self.best = self._best_so_far()

    def _say_once(self, words: str) -> None:
        if self.is_shown and words not in self._told:
            self._told.add(words)
            say(words)

    def _best_so_far(self) -> str:
        """Return the setting with the best mean so far, and float32's mean, each with its number of seeds."""
        sign = Directions(self.goals).sign(self._metric) if self._metric else 0
        parts = []
        for wanted in (False, True):
            means = [
                (sign * mean_of(values), words, values)
                for words, is_baseline, values in self._values.values()
                if is_baseline == wanted and not math.isnan(mean_of(values))
            ]
            if means:
                best, words, values = max(means)
                deviation = stdev(values) if len(values) > 1 else math.nan
                unit = " %" if is_share(self._metric) else ""
                seeds = "1 seed" if len(values) == 1 else f"{len(values)} seeds"
                parts.append(f"{words} {mean_and_deviation(self._metric, sign * best, deviation)}{unit} ({seeds})")
        return f"best mean {self._metric}: {', '.join(parts)}" if parts else ""

    def _watch(self) -> None:
        while not self._over.wait(READ_EVERY):
            if self._bar is not None:
                self._bar.set_postfix_str("; ".join(filter(None, (self._steps(), self.best))))
            elif time.monotonic() - self._said >= self._pause:
                self._pause = min(2 * self._pause, LINE_EVERY)
                self._say_line()

    def _say_line(self) -> None:
        self._said = time.monotonic()
        seconds = time.monotonic() - self._began
        words = [f"{self.title + ': ' if self.title else ''}{self.done}/{self.total} cells", f"{seconds:.0f} s"]
        # Only the cells of this run count, because earlier cells took none of these seconds.
        if self._first < self.done < self.total:
            left = seconds / (self.done - self._first) * (self.total - self.done)
            words.append(f"about {left:.0f} s left")
        say("; ".join(filter(None, (", ".join(words), self._steps(), self.best))))

    def _steps(self) -> str:
        """Return the steps of the running cells, in words."""
        steps = []
        for cell in [*self.running]:
            with suppress(OSError, ValueError):
                done, total = map(int, content_of(steps_path(self.out / "checkpoints" / f"{cell}.pt"), 100).split())
                steps.append(f"{done}/{total}" if total else str(done))
        more = [f"{len(steps) - MOST_SHOWN} more"] if len(steps) > MOST_SHOWN else []
        return f"at step {', '.join([*steps[:MOST_SHOWN], *more])}" if steps else ""


def _shows_bars() -> bool:
    """True if a progress bar can be redrawn in place: on a terminal, and in a notebook with widgets."""
    in_a_notebook = any(base.__name__ == "tqdm_notebook" for base in tqdm.__mro__)
    return in_a_notebook or (sys.stderr.isatty() and os.environ.get("TERM") != "dumb")
