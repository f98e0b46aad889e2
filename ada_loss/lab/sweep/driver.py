"""The driver of a sweep: it plans cells, runs the cells that are not done, and stores their results.

The driver does not depend on formats, scaling methods or tasks: `cells.py` checks them, and `work.py` trains a cell.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, wait
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import fpsim
from ada_loss.files import ChangedFolder, content_of, folder_at, require_own, strict_json, write_atomically
from ada_loss.lab.cells.cell_formats import BASELINE, ImportedOperand, label, operand_functions
from ada_loss.lab.cells.cells import OPTIONS, Cell, digest, plan_all, stored_cell
from ada_loss.lab.cells.identity import MakeTask, TrainFunction, is_local, path_of
from ada_loss.lab.cells.ledger import CannotWrite, Ledger, OtherBits, RowChanged
from ada_loss.lab.cells.missing import lock_path, require_lockable
from ada_loss.lab.cells.names import keep_names
from ada_loss.lab.cells.telemetry import telemetry_digest, telemetry_path
from ada_loss.lab.directions import keep_directions, stated
from ada_loss.lab.environment import environment
from ada_loss.lab.errors import SweepStopped
from ada_loss.lab.results import Results
from ada_loss.lab.results.results import since
from ada_loss.lab.results.trackers import Notifier, Tracker, make_trackers
from ada_loss.lab.sweep.engines import Engine, open_engine, refuse_in_a_starting_worker
from ada_loss.lab.sweep.execution import Execution
from ada_loss.lab.sweep.explained import explain
from ada_loss.lab.sweep.prepare import Branches, prepare
from ada_loss.lab.sweep.progress import Progress
from ada_loss.lab.sweep.work import GRACE, WorkOrder, order_of, said, work
from ada_loss.lab.tasks import find_task, is_of_library
from ada_loss.lab.terminal import offer, say
from fpsim.checks import known_arguments, pip_install, require_flag

__all__ = ["is_trusted", "remember", "resume", "run_cells", "sweep"]

try:
    from filelock import FileLock, Timeout
except ImportError as error:
    raise ImportError(f"A sweep needs {error.name}, which is not installed: {pip_install('lab')}.") from None


# A cell fails after this number of workers have died while running the cell.
MOST_DEATHS = 3
# The number of letters of an error that are printed.
MOST_LETTERS = 200
# The largest number of kinds of failures that are printed, and of cells that are printed for each kind.
MOST_SAID = 5


def _an_option(name: str) -> str:
    """Return advice for a training option that was given as an argument, for `known_arguments`."""
    return f" It is an option of the training: task_options={{{name!r}: ...}}." if name in OPTIONS else ""


@known_arguments(_an_option)
def sweep(
    task: str | MakeTask | None = None,
    formats: Sequence[Any] = (),
    scaling: Sequence[str | float] = ("none",),
    *,
    train: str | TrainFunction | None = None,
    roundings: Sequence[str] | None = None,
    seeds: int | Sequence[int] = 1,
    task_options: Mapping[str, Any] | None = None,
    updates: Sequence[Any] | None = None,
    also: Sequence[Mapping[str, Any]] = (),
    baseline: bool = True,
    workers: int = Execution.workers,
    engine: str | Executor | None = Execution.engine,
    out: str | os.PathLike[str] = "runs/sweep",
    device: str = Execution.device,
    time_limit: float | None = Execution.time_limit,
    memory_limit: str | int = Execution.memory_limit,
    resources: Mapping[str, float] | None = Execution.resources,
    engine_timeout: float = Execution.engine_timeout,
    retry_failed: bool = Execution.retry_failed,
    keep_states: bool = Execution.keep_states,
    keep_old: bool = Execution.keep_old,
    track: Sequence[str | Tracker] = (),
    minimize: Sequence[str] = (),
    maximize: Sequence[str] = (),
    why: bool = False,
    show_progress: bool = True,
) -> Results:
    """Train the task once for each format, scaling method, rounding and seed, and return the results.

    Call `sweep` again to resume: cells that are done in `out` do not run again, and failed cells run again only with
    `retry_failed`. A cell is identified by its whole configuration: any difference makes it another cell. A training
    that diverges is a result. A training that raises an error, hangs or kills its worker is a failure, and the other
    cells go on. An interrupted cell resumes from its checkpoint in `out`, with the same bits as without the
    interruption.

    Args:
        task: the name of a task (`ada-loss tasks` lists them), "module:function", or a function from a seed to a
            `Task`.
        formats: names, recipes ("recipe:nvfp4"), or mappings with the fields of `fpsim.Policy`. The field "products" is
            itself a mapping: from "x", "w" and "dy" to the formats of operands, or with the fields of `fpsim.Products`.
            {"schedule": {0: "fp16", 0.8: "bf16"}} switches formats during the training, each at a fraction of all steps
            or at a step number. {"native": "fp16"} trains in real float16, under torch.autocast. {"name": "mine",
            "format": "mxfp4"} gives a format a name of your own.
        scaling: how gradients are scaled: "none", a number for a constant, a loss rule's name ("torch", "nnabla"),
            "adaptive" or a layer rule's name ("exact", "current").
        train: a training function of your own instead of a task. It takes a `Job`, which has the format, the scaling
            method, the seed, the device and task_options, trains, and returns its metrics as {name: number}.
        roundings: names of rounding rules, each for all roles; "stochastic_gradients" rounds only the gradients
            stochastically. None is nearest-even, or "stochastic_gradients" where adaptive or current scaling fits
            gradients to a format of at most 6 bits.
        seeds: the number of seeds, or the seeds.
        task_options: the options of the training: "optimizer", "learning_rate", "steps" and others, which the page
            "Configuring a sweep" lists.
        updates: the formats in which the optimizer stores weights and states: names of `fpsim.UPDATES`, or mappings
            with the fields of `fpsim.Update`; "float32" leaves the optimizer as it is.
        also: further grids of cells for the same folder. Each is a mapping of the arguments above that differ from the
            first grid. A grid with another task has that task's options.
        baseline: whether the float32 baseline of the report is trained with each seed too.
        workers: the number of processes on this machine; for an executor of unknown size, the number of cells in
            flight.
        engine: what computes the cells: "here", this process; "local", processes of this machine; "tcp://HOST:PORT" or
            "tls://HOST:PORT", the workers of a Dask scheduler; an executor of concurrent.futures. None is "here" for
            one worker without a time limit, else "local".
        device: where a cell computes, "cpu", "cuda" or one GPU such as "cuda:1".
        time_limit: the seconds that one cell may take; None for no limit.
        memory_limit: the memory beyond which a local worker is replaced: "auto" divides the machine's memory among the
            workers; otherwise a number of bytes such as "4 GiB", or 0 for no limit.
        resources: the Dask resources that a cell requires of its worker, such as {"GPU": 1}; local workers are started
            with them.
        engine_timeout: the seconds to wait for a scheduler, and for its first worker.
        retry_failed: whether cells that failed run again.
        keep_states: whether the folder keeps the training states at which formats change, so that cells added later
            start from them; each state is as large as a checkpoint.
        keep_old: whether to continue a folder whose results another version of this library computed with other bits;
            see `fpsim.BITS`.
        out: the folder of the sweep, with its ledger, telemetry and report.
        track: the trackers that log the cells while they train: "tensorboard", "mlflow" and "wandb", which write to the
            folder, or tracker objects.
        minimize: the metrics whose smaller values are better, if their names do not tell; stored in `out`. They
            override `Task.goal`.
        maximize: the metrics whose larger values are better, if their names do not tell; stored in `out`. They override
            `Task.goal`.
        why: whether to explain failures: the workers train again each cell that diverged, and one cell of each setting
            that falls short of float32. They stop at the failing step and call `fpsim.why` there. The reason is in the
            column "reason" of rows, and in the verdict.
        show_progress: whether a progress bar is shown.

    Raises:
        ValueError: for invalid arguments, and for a folder with numbers of another version of this library, before any
            work.
        TypeError: for arguments of another type, before any work.
        RuntimeError: if the sweep cannot continue; the message names the remedy.
    """
    execution = _execution(locals())
    require_flag("show_progress", show_progress)
    require_flag("why", why)
    folder, said = folder_at(out), stated(minimize, maximize)
    grid = {"task": task, "formats": formats, "scaling": scaling, "roundings": roundings, "seeds": seeds}
    grid["updates"] = updates
    cells = plan_all({**grid, "task_options": task_options, "train": train}, also, baseline)
    given = task if train is None else train
    function = None if isinstance(given, str) else given
    if show_progress:
        _say_what_is_decidable(cells)
    results = run_cells(cells, folder, execution, function, track=track, show_progress=show_progress, goals=said)
    if why and explain(folder, execution, function):
        results = Results(folder)
    _offer_the_report(results, show_progress)
    return results


@known_arguments(_an_option)
def resume(
    out: str | os.PathLike[str],
    *,
    workers: int = Execution.workers,
    engine: str | Executor | None = Execution.engine,
    device: str = Execution.device,
    time_limit: float | None = Execution.time_limit,
    memory_limit: str | int = Execution.memory_limit,
    resources: Mapping[str, float] | None = Execution.resources,
    engine_timeout: float = Execution.engine_timeout,
    retry_failed: bool = Execution.retry_failed,
    keep_states: bool = Execution.keep_states,
    keep_old: bool = Execution.keep_old,
    track: Sequence[str | Tracker] = (),
    show_progress: bool = True,
    trust: bool = False,
) -> Results:
    """Run all cells of a ledger that are not done, and return the results.

    The arguments that are not listed here are those of `sweep`.

    Args:
        out: the folder of the sweep.
        trust: whether to import and run tasks and operands that the ledger names and that are not of this library. If
            False, such code is refused unless you have run it into this folder before: otherwise the author of the
            ledger would choose the code that runs here.

    Raises:
        ValueError: for a ledger whose cells cannot be read, or have the numbers of another version, for a task that is
            not trusted, and for a task that is a function which was passed to `sweep`: only that call has the function.
    """
    execution = _execution(locals())
    require_flag("show_progress", show_progress)
    require_flag("trust", trust)
    folder = folder_at(out)
    with Ledger(folder / "ledger.sqlite", readonly=True) as ledger:
        cells = [stored_cell(row["id"], row["config"]) for row in ledger.rows()]
    # This check comes before anything runs: a ledger may be foreign, and importing its task would run foreign code.
    for name in dict.fromkeys(cell.config["task"] for cell in cells):
        if is_local(name):
            raise ValueError(
                f"The task {name!r} is a function of a notebook or a script. A ledger knows it by name only. "
                f"Call sweep(...) again with the same arguments."
            )
        if not is_of_library(name):
            _require_trust("task", name, folder, trust)
        find_task(path_of(name))
    for name in _functions_of(cells):
        _require_trust("operand", name, folder, trust)
    results = run_cells(cells, folder, execution, track=track, show_progress=show_progress)
    _offer_the_report(results, show_progress)
    return results


def _offer_the_report(results: Results, show_progress: bool) -> None:
    """Suggest the report, because a sweep from Python does not write it; the command line does."""
    if show_progress and results.counts["done"]:
        offer(f"results.report() writes {results.out / 'report.html'}: verdict, tables, pictures and every cell.")


def _require_trust(kind: str, name: str, folder: Path, trust: bool) -> None:
    """Raise ValueError if only the ledger, and not the user, names code that would run."""
    if not trust and not is_trusted(folder, name):
        raise ValueError(
            f"The ledger names the {kind} {name!r}, which is code from outside of this library, and resuming would "
            f"run it; you have not run it into this folder yourself. If you know it and trust {folder}, give "
            f"trust=True (--trust), or call sweep(...) again, which names the {kind} itself."
        )


def _functions_of(cells: Sequence[Cell]) -> list[str]:
    """Return the import paths of these cells' operands."""
    return [*dict.fromkeys(path for cell in cells for path in operand_functions(cell.config["format"]))]


def _execution(arguments: Mapping[str, Any]) -> Execution:
    """Return the execution that the arguments of `sweep` or `resume` describe."""
    return Execution(**{field.name: arguments[field.name] for field in fields(Execution)})


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    execution: Execution,
    make_task: MakeTask | TrainFunction | None = None,
    *,
    track: Sequence[str | Tracker] = (),
    show_progress: bool = True,
    title: str = "",
    goals: Mapping[str, str] = {},
) -> Results:
    """Run the cells that are not done in a folder, and return the results of the whole folder.

    make_task: the task or the training of the cells, if it is a function that was passed to `sweep`.
    out, execution, track, show_progress: as in `sweep`.
    title: the purpose of these cells, printed before the progress.
    goals: the directions of metrics, as stated; see `ada_loss.lab.directions`.
    Raises SweepStopped if the folder is in use or cannot be written, or if the engine takes no more work.
    """
    refuse_in_a_starting_worker()
    functions = _functions_of(cells)
    # This import only checks, before any work: a function that cannot be imported would fail in every cell.
    for path in functions:
        ImportedOperand(path).function  # noqa: B018
    # The driver waits up to a second for the lock, because a reader that calls `is_driven` holds it for a moment.
    lock = FileLock(lock_path(out), timeout=1)
    try:
        require_lockable(out)
        trackers = make_trackers(track, out)
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise SweepStopped(
            f"Another process is sweeping into {out}. One driver at a time writes a ledger. "
            f"Wait for it, or give another out=."
        ) from None
    except OSError as error:
        raise _stopped(out, error) from error
    try:
        with Ledger(out / "ledger.sqlite", bits=None if execution.keep_old else fpsim.BITS) as ledger:
            # Nothing else in the folder is written before the lock is held and the version of the numbers is checked.
            keep_directions(out, goals)
            own = (name for cell in cells if not is_of_library(name := cell.config["task"]))
            remember(out, (*own, *functions))
            keep_names(out, {label(cell.config["format"]): cell.name for cell in cells if cell.name})
            todo = prepare(ledger, out, cells, execution.retry_failed)
            notifier = Notifier(trackers, out)
            notifier.catch_up(ledger)
            if todo:
                progress = Progress(len(cells), len(cells) - len(todo), out, title, show_progress, goals)
                progress.begin(execution.words)
                with open_engine(execution) as engine:
                    ledger.add_session({**environment(), "engine": engine.name})
                    tasks = (cell.config["task"] for cell in cells)
                    order = order_of(tasks, make_task, execution, engine, notifier.is_live)
                    branches = Branches(todo, (out / "checkpoints").absolute(), execution.keep_states)
                    _Driver(ledger, out, engine, order, notifier, progress, branches).run(todo)
    except OtherBits as error:
        raise ValueError(
            f"{out} has {error}; {since(error.bits)}. Results of both would stand in one table. Use another folder; or "
            f"keep_old=True (--keep-old), which marks the old ones in the report. Table, verdict and report of the "
            f"folder as it is need neither."
        ) from None
    except (OSError, CannotWrite) as error:
        # The scheduler's ConnectionError is an OSError too. It keeps its own message, because the folder is not the
        # cause.
        if isinstance(error, ConnectionError):
            raise
        raise _stopped(out, error) from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Interrupted. What was done is kept in {out}: run the same again to go on.") from None
    finally:
        lock.release()
    results = Results(out)
    _say_failures(results, cells)
    return results


def _say_what_is_decidable(cells: Sequence[Cell]) -> None:
    """Print which tolerance these seeds and settings can decide, for each task that runs with its default options."""
    # `decidable` is imported late, because it needs SciPy, which a sweep without progress does not need.
    from ada_loss.lab.results.deciding import decidable

    for task in dict.fromkeys(cell.config["task"] for cell in cells):
        chosen = [cell.config for cell in cells if cell.config["task"] == task]
        if not is_of_library(task):
            continue
        own = {**OPTIONS, **getattr(find_task(task), "options", {})}
        # The spread was measured with the task's default options; with other options it may differ.
        if any(one["options"] != own for one in chosen):
            continue
        seeds = {one["seed"] for one in chosen}
        settings = {(str(one["format"]), one["rounding"], one["scaling"]) for one in chosen if one["format"] != "fp32"}
        if words := decidable(task, len(seeds), len(settings)):
            say(words)


def _say_failures(results: Results, cells: Sequence[Cell]) -> None:
    """Print on stderr which of these cells have failed, and why."""
    asked = {cell.id: cell for cell in cells}
    kinds: dict[str, list[str]] = {}
    for row in results.failures():
        if row["id"] in asked:
            first_line = (str(row["error"]).splitlines() or [""])[0][:MOST_LETTERS].removesuffix(".")
            kinds.setdefault(first_line, []).append(f"{asked[row['id']]} ({row['id']})")
    for words, failed in [*kinds.items()][:MOST_SAID]:
        more = f" and {len(failed) - MOST_SAID} more" if len(failed) > MOST_SAID else ""
        say(f"{len(failed)} cell{'s' * (len(failed) > 1)} failed: {words}: {', '.join(failed[:MOST_SAID])}{more}")
    if kinds:
        say("Results.failures() has every traceback; retry_failed=True runs them again.")


def _stopped(out: Path, error: Exception) -> SweepStopped:
    # The message of ChangedFolder already names the remedy.
    if isinstance(error, ChangedFolder):
        return SweepStopped(f"The sweep stopped: {error} What was done is kept.")
    return SweepStopped(
        f"The sweep stopped, because {out} cannot be written: {error}. What was done is kept. "
        f"Make room, or make the folder writable, and run the same again."
    )


class _Driver:
    """A driver that keeps as many cells running as the engine has slots. Only this process writes results.

    ledger, out, engine, notifier: the ledger and the folder of the results, the engine that runs cells, and the
        notifier of trackers.
    order: instructions for every worker, in addition to a cell's configuration.
    running: the submitted cells, with the time of their submission.
    deaths: how many workers died while they ran a cell, by the cell's id.
    progress: the display, which counts every cell.
    branches: states that cells share. While a cell computes a state, other cells that can begin from this state wait.
    """

    def __init__(
        self,
        ledger: Ledger,
        out: Path,
        engine: Engine,
        order: WorkOrder,
        notifier: Notifier,
        progress: Progress,
        branches: Branches,
    ) -> None:
        self.ledger, self.out, self.engine, self.order, self.notifier = ledger, out, engine, order, notifier
        self.progress, self.branches = progress, branches
        self.running: dict[Future[Any], tuple[Cell, float]] = {}
        self.deaths: Counter[str] = Counter()

    def run(self, todo: Sequence[Cell]) -> None:
        """Run cells until each of them is done or has failed."""
        waiting = deque(todo)
        with self.progress:
            try:
                while waiting or self.running:
                    while len(self.running) < self.engine.slots() and (cell := self._next(waiting)):
                        self._submit(cell)
                    # The wait has a timeout, because the engine may get more slots: workers of a cluster come and go.
                    finished, _ = wait(self.running, timeout=1, return_when=FIRST_COMPLETED)
                    for future in finished:
                        cell, started = self.running.pop(future)
                        is_over = self._settle(cell, future, time.monotonic() - started)
                        self.progress.settle(cell.id, is_over)
                        if is_over:
                            self.notifier.stop(cell.id)
                            self.branches.finish(cell.id, (left.id for left in [*waiting, *self._cells()]))
                        else:
                            waiting.appendleft(cell)
            # This block also runs after Ctrl-C and on a full disk. Cells that were running are planned again.
            finally:
                for future in self.running:
                    future.cancel()
                self._try_to_release()
                self.notifier.close()

    def _next(self, waiting: deque[Cell]) -> Cell | None:
        """Remove and return the first cell that need not wait for a running cell; None if all cells have to wait."""
        running = [cell.id for cell in self._cells()]
        for place, cell in enumerate(waiting):
            if not self.branches.is_held(cell.id, running):
                del waiting[place]
                return cell
        return None

    def _cells(self) -> list[Cell]:
        return [cell for cell, _ in self.running.values()]

    def _submit(self, cell: Cell) -> None:
        # The folder is checked before each cell, because a link may have replaced it since the last check.
        require_own(self.out / "checkpoints")
        # The ledger is written first: if the driver dies afterwards, the cell counts as running and is planned again.
        self._write(cell, "planned", lambda: self.ledger.start(cell.id))
        self.progress.start(cell.id)
        self.notifier.start(cell.id, cell.config)
        try:
            submit: Callable[..., Future[Any]] = self.engine.executor.submit
            checkpoint = (self.out / "checkpoints" / f"{cell.id}.pt").absolute()
            future = submit(work, cell.config, self.order, checkpoint, self.branches.of(cell.id))
        except RuntimeError as error:
            raise self._refused(error) from error
        self.running[future] = cell, time.monotonic()

    def _refused(self, error: RuntimeError) -> SweepStopped:
        return SweepStopped(
            f"The executor takes no more work: {error}. What was done is kept. "
            f"Run the same again; engine='local' replaces workers that die."
        )

    def _settle(self, cell: Cell, future: Future[Any], seconds: float) -> bool:
        """Write the result or the failure of a cell. Returns False if the cell has to run again."""
        try:
            result, telemetry, trace = future.result()
        except self.engine.worker_died:
            return self._settle_death(cell, seconds)
        except CancelledError as error:
            raise SweepStopped(
                f"The scheduler of {self.engine.name} is gone. What was done is kept. Start it and run the same again."
            ) from error
        except BrokenExecutor as error:
            raise self._refused(error) from error
        # These are exceptions of the transport, such as a result that cannot be pickled: `work` returns exceptions of
        # the cell.
        except Exception as error:
            result, telemetry, trace = {"error": said(error)}, b"", traceback.format_exc()
        if trace:
            self._fail(cell, result["error"], trace)
            return True
        self.ledger.require_the_same()
        # The file is written before the row, so that a row that is done has its telemetry, even if the driver dies.
        write_atomically(telemetry_path(self.out, cell.id), telemetry, is_own=True)
        written = {"telemetry_bytes": len(telemetry), "telemetry_sha256": telemetry_digest(telemetry)}
        self._write(cell, "running", lambda: self.ledger.finish(cell.id, {**result, **written}))
        self.notifier.tell(cell.id, cell.config, result)
        setting = digest({**cell.config, "seed": None})
        self.progress.compare(str(cell), result, setting, cell.config["format"] == BASELINE)
        return True

    def _fail(self, cell: Cell, error: str, trace: str = "") -> None:
        self._write(cell, "running", lambda: self.ledger.fail(cell.id, error, trace))

    def _write(self, cell: Cell, state: str, change: Callable[[], None]) -> None:
        """Change the row of a cell. A row that was damaged is first written again, so that no result is lost."""
        try:
            change()
        except RowChanged as error:
            say(f"{error} It is written again.")
            self.ledger.restore(cell.id, cell.config, state)
            change()

    def _settle_death(self, cell: Cell, seconds: float) -> bool:
        """Count the death of a cell's worker after some seconds. Returns False if the cell has to run again."""
        self.deaths[cell.id] += 1
        limit = self.order.time_limit
        # The worker ends itself GRACE seconds after the time limit, so a death near that time is due to the limit, not
        # to a crash.
        if limit is not None and seconds >= limit + GRACE / 2:
            self._fail(cell, f"It did not end by its time limit of {limit:g} s: its worker was ended.")
            return True
        if self.deaths[cell.id] < MOST_DEATHS:
            return False
        self._fail(
            cell,
            f"The worker that ran it died {MOST_DEATHS} times, for instance for lack of memory or by a crash. "
            f"Try it with engine='here', or with more memory.",
        )
        return True

    def _try_to_release(self) -> None:
        """Plan again all cells that are running in the ledger."""
        try:
            # The running cells come from the ledger: if the driver was interrupted between writing the ledger and
            # self.running, a cell is only in the ledger.
            running = self.ledger.rows("running")
            self.ledger.release([row["id"] for row in running])
        except (CannotWrite, ChangedFolder):
            # On a full disk the cells stay "running" in the ledger, and the next driver plans them again.
            return


def _file(out: Path) -> Path:
    """Return the path of the list of a folder's tasks, in the state folder of XDG Base Directory 0.8."""
    # `resume` may import these tasks, because the user has named them before. The list is stored outside of the folder,
    # because a foreign folder could contain any list.
    given = os.environ.get("XDG_STATE_HOME", "")
    home = Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state"
    return home / "ada-loss" / f"{hashlib.sha256(os.fsencode(out.resolve())).hexdigest()[:32]}.json"


def _known(out: Path) -> list[str]:
    try:
        kept = json.loads(content_of(_file(out)))
    # RuntimeError is raised if the user has no home folder.
    except (OSError, ValueError, RuntimeError, RecursionError):
        return []
    is_ours = isinstance(kept, dict) and kept.get("folder") == str(out.resolve())
    return [task for task in kept.get("tasks", []) if isinstance(task, str)] if is_ours else []


def remember(out: Path, tasks: Iterable[str]) -> None:
    """Store that the user runs these tasks into a folder. A state folder that cannot be written is ignored."""
    together = [*dict.fromkeys([*_known(out), *tasks])]
    if together != _known(out):
        with suppress(OSError, RuntimeError):
            write_atomically(_file(out), strict_json({"folder": str(out.resolve()), "tasks": together}).encode())


def is_trusted(out: Path, task: str) -> bool:
    """True if this user has run a task into this folder."""
    return task in _known(out)
