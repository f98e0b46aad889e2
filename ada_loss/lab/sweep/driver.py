"""The sweep: plan cells, run those that are not done, keep what they give."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from tqdm.auto import tqdm

from ada_loss.lab.environment import environment
from ada_loss.lab.files import write_atomically
from ada_loss.lab.results.results import Results
from ada_loss.lab.results.trackers import Tracker, make_trackers
from ada_loss.lab.sweep.cells import Cell, plan, run_cell
from ada_loss.lab.sweep.engines import (
    Engine,
    keep_freed_memory,
    open_engine,
    refuse_in_a_starting_worker,
    require_known,
    require_memory,
)
from ada_loss.lab.sweep.identity import MakeTask
from ada_loss.lab.sweep.ledger import CannotWrite, Ledger
from ada_loss.lab.sweep.limits import GRACE, TimeLimit, within_time
from ada_loss.lab.tasks import find_task

__all__ = ["SweepStopped", "resume", "sweep"]

MOST_DEATHS = 3
ONE_AT_A_TIME = threading.Lock()  # torch's thread count and random numbers belong to the process, not to a thread


class SweepStopped(RuntimeError):
    """A sweep that could not go on. What was done is kept."""


def sweep(
    task: str | MakeTask,
    formats: Sequence[Any],
    scaling: Sequence[str | float] = ("none",),
    *,
    roundings: Sequence[str] = ("nearest_even",),
    seeds: int | Sequence[int] = 1,
    task_options: Mapping[str, Any] | None = None,
    workers: int = 1,
    engine: str | Executor | None = None,
    out: str | os.PathLike[str] = "runs/sweep",
    device: str = "cpu",
    time_limit: float | None = None,
    memory_limit: str | int = "auto",
    resources: Mapping[str, float] | None = None,
    engine_timeout: float = 30,
    retry_failed: bool = False,
    track: Sequence[str | Tracker] = (),
    show_progress: bool = True,
) -> Results:
    """Train the task once for each format, scaling method, rounding and seed, and give what came out.

    Run it again to go on where it was stopped: cells that are done in `out` are not run again, those that failed only
    with `retry_failed`. A cell is its configuration: what differs in anything is another cell. A training that diverges
    is a result; one that raises, hangs or kills its worker is a failure, and the others go on.

    task: a name, "module:function", or a function from a seed to a Task. formats: names, or mappings with the fields
    of `fpsim.Policy`. scaling: see `make_scaling`. seeds: how many, or which. task_options: those of `train`.
    engine: "here" (for one worker), "local" (processes of this machine), "tcp://..." (a Dask scheduler), or an
    executor; see `open_engine`, also for memory_limit and resources. device: where cells compute, "cpu" or "cuda".
    time_limit: seconds of one cell. A cell that was interrupted goes on from its checkpoint in `out`, to the same bits.
    track: who else is told of finished cells, "tensorboard" and "mlflow" in the sweep's folder, or trackers.
    Raises ValueError and TypeError before any work for what cannot be, SweepStopped where it cannot go on.
    """
    _check(workers, time_limit, engine_timeout, memory_limit, resources, device, out, engine, retry_failed)
    cells = plan(task, formats, scaling, roundings=roundings, seeds=seeds, options=task_options)
    engine = engine or ("here" if workers == 1 and time_limit is None else "local")
    options = {"resources": resources, "memory_limit": memory_limit, "timeout": engine_timeout}
    function = None if isinstance(task, str) else task
    orders = _Orders(function, time_limit, device)
    _run(Path(out), cells, orders, engine, workers, options, retry_failed, track, show_progress)
    return Results(out)


def resume(
    out: str | os.PathLike[str],
    *,
    workers: int = 1,
    engine: str | Executor | None = None,
    device: str = "cpu",
    time_limit: float | None = None,
    memory_limit: str | int = "auto",
    resources: Mapping[str, float] | None = None,
    engine_timeout: float = 30,
    retry_failed: bool = False,
    track: Sequence[str | Tracker] = (),
    show_progress: bool = True,
) -> Results:
    """Go on with all cells of a ledger that are not done, and give what came out.

    Raises ValueError where a task is a function that was passed to `sweep`: only that call knows it.
    """
    _check(workers, time_limit, engine_timeout, memory_limit, resources, device, out, engine, retry_failed)
    with Ledger(Path(out) / "ledger.sqlite", readonly=True) as ledger:
        cells = [Cell(row["config"]) for row in ledger.rows()]
    for name in {cell.config["task"] for cell in cells}:
        if "@" in name:
            raise ValueError(
                f"The task {name!r} is a function of a notebook or a script. A ledger knows it by name only. "
                f"Call sweep(...) again with the same arguments."
            )
        find_task(name)
    engine = engine or ("here" if workers == 1 and time_limit is None else "local")
    options = {"resources": resources, "memory_limit": memory_limit, "timeout": engine_timeout}
    orders = _Orders(None, time_limit, device)
    _run(Path(out), cells, orders, engine, workers, options, retry_failed, track, show_progress)
    return Results(out)


def _check(
    workers: Any,
    time_limit: Any,
    engine_timeout: Any,
    memory_limit: Any,
    resources: Any,
    device: Any,
    out: Any,
    engine: Any,
    retry_failed: Any,
) -> None:
    """What comes from a user and is not seen before cells run."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"workers={workers!r} computes nothing. Possible: 1 or more.")
    for name, seconds in (("time_limit", time_limit), ("engine_timeout", engine_timeout)):
        if name == "time_limit" and seconds is None:
            continue
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise ValueError(f"{name}={seconds!r} is impossible. Possible: seconds, above 0.")
    if resources is not None and not (
        isinstance(resources, Mapping)
        and all(isinstance(k, str) and isinstance(v, int | float) and v > 0 for k, v in resources.items())
    ):
        raise ValueError(f"resources={resources!r} is impossible. Possible: what a cell takes, such as {{'GPU': 1}}.")
    if not isinstance(device, str) or device.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} is impossible. Possible: 'cpu', 'cuda', or one card such as 'cuda:1'.")
    if not isinstance(out, str | os.PathLike):
        raise ValueError(f"out={out!r} is impossible. Possible: the path of a folder.")
    if engine is not None:
        require_known(engine)
    require_memory(memory_limit)
    if not isinstance(retry_failed, bool):  # YAML 1.2 has `no` for a word
        raise ValueError(f"retry_failed={retry_failed!r} is impossible. Possible: true or false.")


@dataclass(frozen=True)
class _Orders:
    """What is the same for all cells of a run, and no part of what they are."""

    make_task: MakeTask | None
    seconds: float | None
    device: str


def _work(
    config: Mapping[str, Any], orders: _Orders, end_process: bool, checkpoint: Path
) -> tuple[dict[str, Any], bytes, str]:
    """What a worker does. An exception of the cell is an answer: its traceback is not lost on the way."""
    if end_process:
        keep_freed_memory()
    try:
        with ONE_AT_A_TIME:
            work = partial(run_cell, config, orders.make_task, orders.device, checkpoint)
            return (*within_time(orders.seconds, work, end_process=end_process), "")
    except (Exception, SystemExit) as error:
        words = str(error) if isinstance(error, TimeLimit) else f"{type(error).__name__}: {error}"
        return {"error": words}, b"", traceback.format_exc()


def _run(
    out: Path,
    cells: Sequence[Cell],
    orders: _Orders,
    engine: str | Executor,
    workers: int,
    engine_options: Mapping[str, Any],
    retry_failed: bool,
    track: Sequence[str | Tracker],
    show_progress: bool,
) -> None:
    refuse_in_a_starting_worker()
    lock = FileLock(out / "ledger.lock", timeout=0)  # the system lets go of it when the process dies, however it dies
    try:
        trackers = make_trackers(track, out)
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise SweepStopped(
            f"Another process is sweeping into {out}. One driver at a time writes a ledger. "
            f"Wait for it, or give another out=."
        ) from None
    except OSError as error:
        raise _cannot_be_written(out, error) from error
    try:
        with Ledger(out / "ledger.sqlite") as ledger:
            todo = _prepare(ledger, out, cells, retry_failed)
            telling = _Telling(trackers, out)
            telling.catch_up(ledger)
            if todo:
                with open_engine(engine, workers, **engine_options) as opened:
                    ledger.add_session({**environment(), "engine": opened.name})
                    driver = _Driver(ledger, out, opened, orders, telling)
                    driver.run(todo, len(cells), show_progress)
    except (OSError, CannotWrite) as error:
        if isinstance(error, ConnectionError):
            raise
        raise _cannot_be_written(out, error) from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Interrupted. What was done is kept in {out}: run the same again to go on.") from None
    finally:
        lock.release()


def _cannot_be_written(out: Path, error: Exception) -> SweepStopped:
    return SweepStopped(
        f"The sweep stopped, for {out} cannot be written: {error}. What was done is kept. "
        f"Make room, or see to the folder, and run the same again."
    )


def _prepare(ledger: Ledger, out: Path, cells: Sequence[Cell], retry_failed: bool) -> list[Cell]:
    """Plan the cells, release those that a dead driver left running or whose files are damaged; give what is to do."""
    for leftover in out.glob("telemetry/.*.tmp"):
        leftover.unlink()
    ledger.add((cell.id, cell.config) for cell in cells)
    states = ledger.states()
    again = [cell for cell, (state, _) in states.items() if state == "running"]
    asked = {cell.id: states[cell.id] for cell in cells}  # another sweep into the folder keeps what it has
    damaged = [cell for cell, (state, size) in asked.items() if state == "done" and _size(out, cell) != size]
    for cell in damaged:
        tqdm.write(f"The telemetry of cell {cell} is missing or damaged: it will be run again.", file=sys.stderr)
    retried = [cell for cell, (state, _) in asked.items() if retry_failed and state == "failed"]
    ledger.release([*again, *damaged, *retried])
    states = ledger.states()
    return [cell for cell in cells if states[cell.id][0] == "planned"]


def telemetry_path(out: Path, cell: str) -> Path:
    return out / "telemetry" / f"{cell}.npz"


def _size(out: Path, cell: str) -> int | None:
    try:
        return telemetry_path(out, cell).stat().st_size
    except FileNotFoundError:
        return None


class _Telling:
    """Trackers are told once of each cell that is done. One that fails is left out: no result is lost for it."""

    def __init__(self, trackers: Sequence[Tracker], out: Path) -> None:
        self.trackers, self.out = [*trackers], out
        self.known: dict[int, set[str]] = {}  # by tracker: a cell whose file was damaged runs again, and is known

    def catch_up(self, ledger: Ledger) -> None:
        """Tell of what was done before, and not told: by another run, or just before a crash."""
        for tracker in [*self.trackers]:
            self.known[id(tracker)] = self._try(tracker, tracker.known) or set()
            for row in ledger.rows("done"):
                self._log(tracker, row["id"], row["config"], row)

    def tell(self, cell: str, config: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        for tracker in [*self.trackers]:
            self._log(tracker, cell, config, row)

    def _log(self, tracker: Tracker, cell: str, config: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        if tracker not in self.trackers or cell in self.known[id(tracker)]:
            return
        self.known[id(tracker)].add(cell)
        complete = {**dict.fromkeys(("seconds", "skipped", "underflow", "diverged")), **row}
        self._try(tracker, lambda: tracker.log(cell, config, complete, telemetry_path(self.out, cell)))

    def _try(self, tracker: Tracker, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:  # whatever a store may say: the ledger has the cell
            self.trackers.remove(tracker)
            warnings.warn(
                f"{type(tracker).__name__} failed ({type(error).__name__}: {error}) and is told no more. The results "
                f"are in {self.out}. See to it and run the same again: it is told of what it missed.",
                stacklevel=2,
            )
            return None


class _Driver:
    """One run of the loop: as many cells under way as there are slots; only this process writes."""

    def __init__(self, ledger: Ledger, out: Path, engine: Engine, orders: _Orders, telling: _Telling) -> None:
        self.ledger, self.out, self.engine, self.orders, self.telling = ledger, out, engine, orders, telling
        self.running: dict[Future[Any], tuple[Cell, float]] = {}
        self.deaths: Counter[str] = Counter()
        self.best, self._best = "", math.nan

    def run(self, todo: Sequence[Cell], total: int, show_progress: bool) -> None:
        waiting = deque(todo)
        with tqdm(total=total, initial=total - len(todo), unit="cell", disable=not show_progress) as bar:
            try:
                while waiting or self.running:
                    while waiting and len(self.running) < self.engine.slots():
                        self._submit(waiting.popleft())
                    finished, _ = wait(self.running, timeout=1, return_when=FIRST_COMPLETED)
                    for future in finished:
                        cell, started = self.running.pop(future)
                        if self._settle(cell, future, time.monotonic() - started):
                            bar.update()
                            bar.set_postfix_str(self.best, refresh=False)
                        else:
                            waiting.appendleft(cell)
            finally:  # Ctrl-C, a full disk: what ran is to be run again
                for future in self.running:
                    future.cancel()
                self._try_to_release()

    def _submit(self, cell: Cell) -> None:
        self.ledger.start(cell.id)
        try:
            submit: Callable[..., Future[Any]] = self.engine.executor.submit
            checkpoint = (self.out / "checkpoints" / f"{cell.id}.pt").absolute()
            future = submit(_work, cell.config, self.orders, self.engine.own_processes, checkpoint)
        except RuntimeError as error:
            raise self._refused(error) from error
        self.running[future] = cell, time.monotonic()

    def _refused(self, error: RuntimeError) -> SweepStopped:
        return SweepStopped(
            f"The executor takes no more work: {error}. What was done is kept. "
            f"Run the same again; engine='local' replaces workers that die."
        )

    def _settle(self, cell: Cell, future: Future[Any], seconds: float) -> bool:
        """Write down what became of a cell; False where it has to run again."""
        try:
            result, telemetry, trace = future.result()
        except self.engine.worker_died:
            return self._bury(cell, seconds)
        except CancelledError as error:
            raise SweepStopped(
                f"The scheduler of {self.engine.name} is gone. What was done is kept. Start it and run the same again."
            ) from error
        except BrokenExecutor as error:
            raise self._refused(error) from error
        except Exception as error:  # of the way there or back: _work itself gives those of the cell as an answer
            result, telemetry, trace = {"error": f"{type(error).__name__}: {error}"}, b"", traceback.format_exc()
        if trace:
            self.ledger.fail(cell.id, result["error"], trace)
            return True
        write_atomically(telemetry_path(self.out, cell.id), telemetry)
        self.ledger.finish(cell.id, {**result, "telemetry_bytes": len(telemetry)})
        self.telling.tell(cell.id, cell.config, result)
        self._compare(cell, result)
        return True

    def _bury(self, cell: Cell, seconds: float) -> bool:
        self.deaths[cell.id] += 1
        limit = self.orders.seconds
        if limit is not None and seconds >= limit + GRACE / 2:
            self.ledger.fail(cell.id, f"It did not end by its time limit of {limit:g} s: its worker was ended.")
            return True
        if self.deaths[cell.id] < MOST_DEATHS:
            return False
        self.ledger.fail(
            cell.id,
            f"The worker that ran it died {MOST_DEATHS} times, for instance for lack of memory or by a crash. "
            f"Try it with engine='here', or with more memory.",
        )
        return True

    def _compare(self, cell: Cell, result: Mapping[str, Any]) -> None:
        for name, value in list(result["metrics"].items())[:1]:
            if not self._best >= value:
                self._best, self.best = value, f"best: {cell} {name} {value:.4g}"

    def _try_to_release(self) -> None:
        try:
            states = self.ledger.states()  # not only of self.running: one may have been interrupted on its way there
            self.ledger.release([cell for cell, (state, _) in states.items() if state == "running"])
        except CannotWrite:
            return  # the disk is full: the next driver finds them running, and releases them
