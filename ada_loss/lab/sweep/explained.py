"""Reasons why cells diverged or fell short: each cell trains again up to the failing step, where `fpsim.why` runs."""

from __future__ import annotations

import json
import math
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fpsim
from ada_loss.files import write_atomically
from ada_loss.lab.cells.identity import MakeTask, TrainFunction, is_own, path_of
from ada_loss.lab.results import Results
from ada_loss.lab.results.results import REASONS, read_reasons
from ada_loss.lab.results.statements import WORSE
from ada_loss.lab.sweep.engines import Engine, open_engine
from ada_loss.lab.sweep.execution import Execution
from ada_loss.lab.sweep.work import WorkOrder, obey, order_of, said, training_of
from ada_loss.lab.tasks import find_task
from ada_loss.lab.training.generators import kept_generators, seed_generators
from ada_loss.lab.training.loop import Training, backward
from ada_loss.lab.training.native import is_native
from ada_loss.lab.training.run import Stopped

__all__ = ["explain"]

NOT_AGAIN = "not asked: a training function of one's own is not run again"
NOT_NATIVE = "not asked: fpsim.why tries formats on an emulated model; it explains cells of the format fp16"
NOTHING = "fpsim.why finds nothing that is wrong with the step"


def explain(out: Path, execution: Execution, make_task: MakeTask | TrainFunction | None) -> dict[str, str]:
    """Return the reasons why cells of a folder diverged or fell short, by cell. New reasons are stored in the folder.

    For a cell that diverged, `fpsim.why` examines the step whose loss is not finite, and the step before, which may
    have spoilt the parameters. For a setting that falls short, `fpsim.why` examines the last step of one seed, and, if
    nothing is wrong there, the first step. If the examination fails, there is only a warning, because the results must
    not be lost. The next call tries again.

    execution: the execution of the new trainings, with their time limit.
    """
    results, reasons = Results(out), read_reasons(out)
    configs = {cell["id"]: cell["config"] for cell in results.cells}

    def keep(cell: str, reason: str) -> None:
        reasons[cell] = reason
        write_atomically(out / REASONS, json.dumps(reasons, indent=1).encode())

    waiting: deque[tuple[str, list[int]]] = deque()
    for cell in [cell for cell in _asked(results) if cell not in reasons]:
        steps = _steps([float(x) for x in results.readable_telemetry(cell).get("losses", ())])
        if not steps:
            keep(cell, NOTHING)
        elif is_own(configs[cell]["task"]):
            keep(cell, NOT_AGAIN)
        elif is_native(configs[cell]["format"]):
            keep(cell, NOT_NATIVE)
        else:
            waiting.append((cell, steps))
    if waiting:
        with open_engine(execution) as engine:
            order = order_of((configs[cell]["task"] for cell, _ in waiting), make_task, execution, engine)
            for cell, future in _as_they_end(engine, order, configs, waiting):
                # The future has an exception if, for example, a worker died. Exceptions of the cell itself are in the
                # result.
                error = future.exception()
                reason, told = ("", said(error)) if error is not None else future.result()
                if told:
                    config = configs[cell]
                    where = f"{config['format']}, {config['scaling']}, seed {config['seed']}"
                    warnings.warn(f"fpsim.why could not be asked about {where}: {told}", stacklevel=2)
                else:
                    keep(cell, reason)
    return reasons


def _as_they_end(
    engine: Engine, order: WorkOrder, configs: Mapping[str, Any], waiting: deque[tuple[str, list[int]]]
) -> Iterator[tuple[str, Future[Any]]]:
    """Yield cells with their finished futures; run as many cells at once as the engine has slots."""
    running: dict[Future[Any], str] = {}
    try:
        while waiting or running:
            while waiting and len(running) < engine.slots():
                cell, steps = waiting.popleft()
                running[engine.executor.submit(_ask, configs[cell], order, steps)] = cell
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future
    finally:
        for future in running:
            future.cancel()


def _ask(config: Mapping[str, Any], order: WorkOrder, steps: Sequence[int]) -> tuple[str, str]:
    """Return the reason of a cell, and the text of an exception of the task or of `why`, or "". A worker calls this."""
    try:
        return obey(order, partial(_reason, config, order.device, order.make_task, steps)), ""
    except KeyboardInterrupt:
        raise
    # All exceptions are caught, even a task's SystemExit, because the results of the sweep must stay.
    except BaseException as error:
        return "", said(error)


def _asked(results: Results) -> list[str]:
    """Return the cells that need a reason: all that diverged, and one cell of each setting that falls short."""
    cells = [row["id"] for row in results.rows() if row["diverged"]]
    done = {row["id"] for row in results.rows()}
    if any(row["metrics"] for row in results.cells):
        for verdict in results.verdicts():
            short = [one for one in verdict.combinations if one.outcome in WORSE]
            for one in short:
                cells += [cell for cell in one.cells if cell in done][: 0 if set(cells) & {*one.cells} else 1]
    return [*dict.fromkeys(cells)]


def _steps(losses: Sequence[float]) -> list[int]:
    """Return the steps to examine, counted from 0, in the order of their importance."""
    bad = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
    # The last step comes first. If a network learned nothing, its gradient may have vanished in the last step, also in
    # float32. Then the first step tells the reason.
    if bad is None:
        return [*dict.fromkeys((len(losses) - 1, 0))] if losses else []
    return [i for i in (bad - 1, bad) if i >= 0]


class _ReachedError(Exception):
    """Raised when the last step to examine is reached."""


def _reason(
    config: Mapping[str, Any], device: str, make_task: MakeTask | TrainFunction | None, steps: Sequence[int]
) -> str:
    function: Any = make_task or find_task(path_of(config["task"]))
    # Recording is off, because `why` cannot examine a model that is being recorded. Evaluations are off to save time.
    unseen = {"record_every": 0, "evaluate_every": 0}
    options = {name: unseen.get(name, value) for name, value in config["options"].items()}
    found: dict[int, list[str]] = {}
    threads = torch.get_num_threads()
    # One thread is used, as in the cell's training: the same sums in the same order lead to the same step.
    torch.set_num_threads(1)
    try:
        with kept_generators([device] if device.startswith("cuda") else []), suppress(_ReachedError, Stopped):
            seed_generators(config["seed"])
            training = training_of({**config, "options": options}, function, device)

            def before_step(x: Tensor, y: Tensor) -> None:
                at = training.state.steps
                if at in steps:
                    found[at] = _headline(training, x, y)
                    if found.get(steps[0]) or at == max(steps):
                        raise _ReachedError

            training.before_step = before_step
            training.run()
    finally:
        torch.set_num_threads(threads)
    return next((found[at][0] for at in steps if found.get(at)), NOTHING)


def _headline(training: Training, x: Tensor, y: Tensor) -> list[str]:
    """Return the first line of `why` about a step, with the first remedy that works; [] if `why` finds nothing."""
    scaler = training.scaler
    state = scaler.state_dict()

    def step() -> float:
        training.optimizer.zero_grad()
        loss = backward(training.task, training.forward, scaler, x, y, training.options.micro_batches)
        scaler.step(training.optimizer)
        # FloatingPointError is raised if the scale can fall no further, which is the very failure to explain.
        with suppress(FloatingPointError):
            scaler.update()
        # `why` calls this function several times, and each call must begin with the same scale.
        scaler.load_state_dict(state)
        return loss

    reason = fpsim.why(training.model, step, training.optimizer)
    if reason.cause is None:
        return []
    first = str(reason).splitlines()[0].rstrip(".")
    return [f"{first}; {reason.tried[0]['what']} is enough" if reason.tried else first]
