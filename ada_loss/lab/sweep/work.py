"""The work of a worker: train one cell, and return its result and its telemetry.

After the time limit an exception is raised. If the exception does not end the training, the process is ended.
"""

from __future__ import annotations

import ctypes
import faulthandler
import math
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

import fpsim
from ada_loss.lab.cells.cell_formats import policy_of, rollout_of
from ada_loss.lab.cells.cell_updates import update_of
from ada_loss.lab.cells.identity import MakeTask, TrainFunction, is_local, is_own, path_of
from ada_loss.lab.cells.telemetry import LiveFile, live_path, npz, telemetry
from ada_loss.lab.sweep.engines import Engine, keep_freed_memory
from ada_loss.lab.sweep.execution import Execution
from ada_loss.lab.sweep.progress import StepFile, steps_path
from ada_loss.lab.tasks import add_to_path, find_task, folder_of
from ada_loss.lab.training.format_schedule import Start
from ada_loss.lab.training.generators import kept_generators, seed_generators
from ada_loss.lab.training.job import Job, require_storable, run_job
from ada_loss.lab.training.loop import Training
from ada_loss.lab.training.options import TrainOptions
from ada_loss.lab.training.run import Run, Stopped, underflow_share

__all__ = [
    "GRACE",
    "TimeLimit",
    "WorkOrder",
    "obey",
    "order_of",
    "run_cell",
    "said",
    "training_of",
    "within_time",
    "work",
]

Result = TypeVar("Result")

# torch's thread count and random numbers are global to the process: two cells in threads would disturb each other.
ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class WorkOrder:
    """Instructions for a worker, in addition to a cell's configuration. They are pickled.

    make_task: the task function or training function; None if the worker can import it by its name.
    device: where the cell computes.
    time_limit: the time limit in seconds; None for no limit.
    ends_process: whether the worker may end its process to keep the time limit.
    folders: the folders from which the driver imported tasks; the worker looks there too.
    is_live: whether the worker writes the curves of a cell while it trains, for trackers.
    """

    make_task: MakeTask | TrainFunction | None
    device: str
    time_limit: float | None
    ends_process: bool
    folders: tuple[str, ...] = ()
    is_live: bool = False


def order_of(
    tasks: Iterable[str],
    make_task: MakeTask | TrainFunction | None,
    execution: Execution,
    engine: Engine,
    is_live: bool = False,
) -> WorkOrder:
    """Return the instructions for cells with these tasks. A task that workers can import is passed by its name."""
    names = [*dict.fromkeys(tasks)]
    is_importable = not any(map(is_local, names))
    folders = dict.fromkeys(folder for name in names if is_importable and (folder := folder_of(path_of(name))))
    function = None if is_importable else make_task
    return WorkOrder(function, execution.device, execution.time_limit, engine.own_processes, tuple(folders), is_live)


def obey(order: WorkOrder, job: Callable[[], Result]) -> Result:
    """Call a worker's job; a process runs one job at a time. Raises TimeLimit if the job exceeds the time limit."""
    if order.ends_process:
        keep_freed_memory()
    for folder in order.folders:
        add_to_path(folder)
    with ONE_AT_A_TIME:
        return within_time(order.time_limit, job, end_process=order.ends_process)


def work(
    config: Mapping[str, Any], order: WorkOrder, checkpoint: Path, branches: Mapping[Start, Path] | None = None
) -> tuple[dict[str, Any], bytes, str]:
    """Return the result of a cell, its telemetry, and the traceback of an exception ("" if there is none).

    An exception of the cell is returned, not raised, because its traceback would be lost between processes. Ctrl-C is
    raised.

    config, checkpoint, branches: as in `run_cell`.
    """
    train = partial(run_cell, config, order.make_task, order.device, checkpoint, branches, order.is_live)
    try:
        return (*obey(order, train), "")
    except KeyboardInterrupt:
        raise
    # All exceptions are caught, even SystemExit: only this cell fails, and other cells go on.
    except BaseException as error:
        return {"error": said(error)}, b"", traceback.format_exc()


def said(error: BaseException) -> str:
    """Return an exception as one line: its class and its text.

    >>> said(ValueError("no"))
    'ValueError: no'
    """
    try:
        text = str(error)
    # A mistake in a user's exception class must not hide that the cell failed.
    except Exception:
        text = "an exception without a readable text"
    return text if isinstance(error, TimeLimit) else f"{type(error).__name__}: {text}"


def run_cell(
    config: Mapping[str, Any],
    make_task: MakeTask | TrainFunction | None = None,
    device: str = "cpu",
    checkpoint: Path | None = None,
    branches: Mapping[Start, Path] | None = None,
    is_live: bool = False,
) -> tuple[dict[str, Any], bytes]:
    """Train a cell; return its result for the ledger, and its telemetry as the content of an .npz file.

    A training whose last loss is inf or NaN, or whose loss scale can fall no further, has diverged. Divergence is a
    result, not an error.

    config: the cell's configuration.
    make_task: the task function or training function; None to find it by the name in the configuration.
    device: where the cell computes.
    checkpoint: a file from which an interrupted training continues; see `Training.run`.
    branches: files that this cell shares with other cells; see `Training.run`. A user's training function has none.
    is_live: whether the curves are written next to the checkpoint during the training.
    Raises TypeError if the task's function does not return a Task.
    """
    threads = torch.get_num_threads()
    steps, goals = None, {}
    # One thread is used: cells share a machine, and sums must not depend on the number of its cores.
    torch.set_num_threads(1)
    try:
        function: Any = make_task or find_task(path_of(config["task"]))
        if checkpoint is not None:
            steps = StepFile(steps_path(checkpoint))
        live = live_path(checkpoint) if checkpoint is not None and is_live else None
        if is_own(config["task"]):
            run, error = _run_own(_job(config, device, checkpoint, steps, live), function)
        else:
            with kept_generators([device] if device.startswith("cuda") else []):
                # The generators are seeded here for a task that does not seed them itself.
                seed_generators(config["seed"])
                training = training_of(config, function, device)
                goals = training.task.goals
                if steps is not None:
                    steps.total = training.total
                run, error = (
                    training.run(checkpoint, progress=_both(steps, live, training.so_far), branches=branches),
                    None,
                )
    except Stopped as stopped:
        run, error = stopped.run, str(stopped)
    finally:
        torch.set_num_threads(threads)
        if steps is not None:
            steps.remove()
    result, content = _result(run, error)
    return {**result, "goals": goals}, content


def _both(steps: StepFile | None, live: Path | None, run: Callable[[], Run]) -> Callable[[int], object] | None:
    """Combine the callbacks of a training: one writes the number of steps, and the other writes the curves so far."""
    if steps is None or live is None:
        return steps
    file = LiveFile(live, run)

    def progress(done: int) -> None:
        steps(done)
        file(done)

    return progress


def training_of(config: Mapping[str, Any], make_task: MakeTask, device: str) -> Training:
    """Create the training of a task. Raises TypeError if the function does not return a Task."""
    task = make_task(config["seed"])
    if not is_dataclass(task):
        raise TypeError(f"The task gave {type(task).__name__}. It must give an ada_loss.lab.tasks.Task.")
    formats = policy_of(config["format"], config["rounding"])
    options = TrainOptions(scaling=config["scaling"], seed=config["seed"], device=device, **config["options"])
    return Training(task, formats, None, options, update_of(config["format"]), rollout_of(config["format"]))


def _run_own(job: Job, train: TrainFunction) -> tuple[Run, str | None]:
    """Call a training function. If it fails in the first step after resuming, its checkpoint is deleted.

    A retry from the same checkpoint would fail again.
    """
    try:
        return run_job(job, train)
    # The checkpoint is not the cause of these exceptions.
    except (TimeLimit, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if job.drop_checkpoint():
            error.add_note("It failed in the first step behind its checkpoint, which is deleted: a retry starts over.")
        raise


def _job(
    config: Mapping[str, Any], device: str, checkpoint: Path | None, steps: StepFile | None, live: Path | None
) -> Job:
    """Create the job that a training function gets."""
    formats = policy_of(config["format"], config["rounding"])
    first, *others = formats.stages
    fmt, rounding = (formats, None) if others else (first.fmt, first.rounding)
    update = update_of(config["format"])
    job = Job(fmt, rounding, config["scaling"], config["seed"], device, config["options"], checkpoint, update=update)
    job.progress = _both(steps, live, job.so_far)
    return job


def _result(run: Run, error: str | None) -> tuple[dict[str, Any], bytes]:
    """Return the result of a cell for the ledger, and its telemetry."""
    for name in run.metrics:
        if not isinstance(name, str):
            raise TypeError(f"The task names a metric {name!r}. Expected: a string.")
        require_storable(name)
    # Only the last loss counts, because an earlier inf is a skipped step. If a user's training logs no loss, its
    # metrics count.
    last = run.losses[-1:] or [*run.metrics.values()]
    diverged = error is not None or not all(map(math.isfinite, last))
    result = {"metrics": run.metrics, "seconds": run.seconds, "diverged": diverged, "skipped": run.skipped}
    result |= {"underflow": underflow_share(run.rows) if run.rows else None, "error": error, "bits": fpsim.BITS}
    return result, npz(telemetry(run))


GRACE = 10.0  # seconds from the exception to the end of the process


class TimeLimit(Exception):
    """Raised if a cell runs for longer than its time limit."""


def within_time(
    seconds: float | None, work: Callable[[], Result], *, end_process: bool = False, grace: float = GRACE
) -> Result:
    """Call `work` and return its result. After `seconds`, TimeLimit is raised between two instructions of Python.

    seconds: the time limit; None for no limit.
    end_process: whether to end the process if the exception does not help: a call into C that never returns does not
        notice the exception.
    grace: the seconds from the exception to the end of the process.
    Raises TimeLimit.

    >>> within_time(60, lambda: 1 + 1)
    2
    """
    if seconds is None:
        return work()
    thread, lock, over, fired = ctypes.c_ulong(threading.get_ident()), threading.Lock(), [False], [False]

    def interrupt() -> None:
        with lock:
            if not over[0]:
                fired[0] = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TimeLimit))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    # There is only one frame and no context manager: the exception may come at any line, and must find its handler.
    try:
        if end_process:
            faulthandler.dump_traceback_later(seconds + grace, exit=True, file=2)
        timer.start()
        try:
            return work()
        finally:
            with lock:
                over[0] = True
            # The exception may still be pending, and would otherwise be raised in some later line.
            if fired[0]:
                _let_come()
    except TimeLimit:
        raise TimeLimit(f"It ran for longer than its time limit of {seconds:g} s.") from None
    finally:
        timer.cancel()
        if end_process:
            faulthandler.cancel_dump_traceback_later()


def _let_come() -> None:
    """Run until Python has raised an exception that is pending for this thread, and catch the exception."""
    # Setting None instead would clear the exception, but from then on Python would look for an exception at every call
    # (https://github.com/python/cpython/blob/v3.11.7/Python/ceval.c, `_PyEval_SignalAsyncExc`). This is slower, and in
    # Python 3.11 a debugger or a trace of opcodes would never end.
    try:
        # The interpreter looks for a pending exception in each iteration of a loop.
        for _ in range(3):
            pass
    except TimeLimit:
        pass
