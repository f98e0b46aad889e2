"""`Job`: passes a cell's format and scaling to a training function of the user, and records the training."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

import fpsim
from ada_loss.lab.devices import float32_in_full, require_device_name
from ada_loss.lab.environment import versions
from ada_loss.lab.training.checkpoints import Checkpoints, DelayedScaling
from ada_loss.lab.training.format_schedule import FormatSchedule, FormatSwitch, as_schedule, quantized
from ada_loss.lab.training.generators import kept_generators, seed_generators
from ada_loss.lab.training.methods import make_scaling, require_method
from ada_loss.lab.training.run import Run
from ada_loss.lab.training.stored_weights import RECORD_UPDATES_EVERY, steps_together
from ada_loss.scalers import GradScaler
from fpsim import FormatLike, LostUpdates, Recording, Update
from fpsim.checks import is_number, is_whole, require_callable, require_mapping, require_whole, shown
from fpsim.scaling import as_update, require_optimizer, require_seed

__all__ = ["Job", "JobScaler", "require_storable", "run_job"]

AnOptimizer = TypeVar("AnOptimizer", bound=Optimizer)
RECORD_EVERY = 100
MOST_STEPS = 2**53
# The number of steps is unknown, so the points of the history lie further and further apart: the step of each point is
# 1.25 times the step of the previous point.
FIRST_POINT, POINT_FACTOR = 10, 1.25
GATHERED = ("scales", "skipped", "curves", "history", "layer_scales")


class JobScaler(GradScaler):
    """A `GradScaler` that reports the scale of every step to its job, and whether the step was skipped."""

    job: Job | None = None
    _skipped = False

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        returned = super().step(optimizer, *args, **kwargs)
        # Several optimizers may step between two updates. The step counts as skipped if one optimizer skipped it.
        self._skipped = self._skipped or self.overflowed(optimizer)
        return returned

    def update(self, new_scale: Any = None) -> None:
        if self.job is not None:
            self.job.note_update(self.get_scale(), self._skipped)
        self._skipped = False
        super().update(new_scale)


class Job:
    """One cell of a sweep, for a training function of your own, which trains and returns its metrics.

    Args:
        fmt, rounding: the format of the cell and its rounding, as `fpsim.quantize` takes them. The format may be a
            schedule of formats, which `quantize` and `begin_step` follow.
        scaling: the scaling method, "none", a number, "torch", "adaptive" ...
        seed: the seed of the generators of torch, NumPy and Python; use it for all other randomness too.
        device: where the training runs, "cpu", "cuda" or "cuda:1".
        options: the `task_options` of the sweep.
        update: how the optimizer stores weights and states, a fpsim.Update or its name; `optimizer` follows it.

    >>> job = Job("fp16", scaling=1024.0)
    >>> model = job.quantize(nn.Linear(2, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> scaler = job.scaler(optimizer)
    >>> loss = model(torch.ones(1, 2)).square().sum()
    >>> scaler.scale(loss).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> job.log(0, loss=loss)
    >>> job.scales
    [1024.0]
    """

    def __init__(
        self,
        fmt: FormatLike | FormatSchedule | Mapping[str, Any] = None,
        rounding: str | None = None,
        scaling: str | float = "none",
        seed: int = 0,
        device: str = "cpu",
        options: Mapping[str, Any] | None = None,
        checkpoint: Path | None = None,
        progress: Callable[[int], object] | None = None,
        update: Update | str | None = None,
    ) -> None:
        self.update = None if as_update(update).is_float32 else as_update(update)
        self.fmt, self.rounding, self.scaling, self.seed, self.device = fmt, rounding, scaling, seed, device
        if rounding is not None:
            fpsim.Policy(weight="fp16", rounding=rounding)  # raises ValueError for an unknown rounding
        if not isinstance(scaling, str) and not is_number(scaling):
            raise TypeError(f"scaling={shown(scaling)} is not a scaling method. Expected: a name or a number.")
        require_method(scaling)
        require_seed(seed)
        require_device_name(device)
        if checkpoint is not None and (not isinstance(checkpoint, str | Path) or not str(checkpoint).strip("\0 ")):
            raise TypeError(f"checkpoint={shown(checkpoint)} is not a path. Expected: the path of a file, or None.")
        if progress is not None:
            require_callable("progress", progress, "lambda steps: None")
        if options is not None:
            require_mapping("options", options, "{'epochs': 3}")
            for name in options:
                if not isinstance(name, str):
                    raise TypeError(f"options names {shown(name)}. Expected: strings as names, such as 'epochs'.")
        self.options = dict(options or {})
        self._schedule = as_schedule(fmt, rounding)
        self._switch: FormatSwitch | None = None
        self._follows = False
        self.scales: list[float] = []
        self.skipped: list[int] = []
        self.curves: dict[str, list[tuple[int, float]]] = {}
        self.history: list[tuple[int, list[dict[str, Any]]]] = []
        self.layer_scales: list[tuple[int, dict[str, int]]] = []
        self._path, self.progress, self._told = checkpoint, progress, 0
        # The number of finished steps, as given to `checkpoint`, and the last step that was logged or scaled, counted
        # from 0. A training function may omit the calls that set one of the two.
        self._done, self._last = 0, 0
        self._before, self._since = 0.0, time.perf_counter()  # seconds of earlier attempts, and the start of this one
        self._recording: Recording | None = None
        self._scaler: JobScaler | None = None
        self._model: nn.Module | None = None
        self._adaptive: Any = None
        self._checkpoints: Checkpoints | None = None
        self._held, self._is_named = ExitStack(), False
        self._lost: list[LostUpdates] = []
        self._has_optimizer = False
        self._resumed_at: tuple[int, int] | None = None

    @property
    def format(self) -> str:
        """Return the format in words."""
        return str(self._schedule) if len(self._schedule.stages) > 1 else str(self.fmt or "fp32")

    def quantize(self, model: nn.Module, *, inplace: bool = False, record_every: int = RECORD_EVERY) -> Any:
        """Return the model in the cell's format, on the cell's device, with a scale per layer if the method has one.

        A job has only one model. The effect of rounding at each of the model's sites is recorded for the report.

        model: the model; it is copied unless `inplace`, which is for code that already holds the model.
        record_every: the interval of calls that are tallied at every site; 0 records nothing.
        Raises ValueError for a second model.
        """
        if self._model is not None:
            raise ValueError("This job has a quantised model already. Put several models into one module first.")
        if not is_whole(record_every, least=0):
            raise ValueError(f"record_every={shown(record_every)} is invalid. Expected: an integer, 0 or more.")
        emulated = quantized(model, self._schedule, inplace=inplace).to(self.device)
        self._switch = FormatSwitch(emulated, self._schedule)
        scaler, self._adaptive = make_scaling(self.scaling, emulated, JobScaler)
        assert isinstance(scaler, JobScaler)
        scaler.job, self._scaler = self, scaler
        if self._adaptive is not None:
            self._held.enter_context(self._adaptive)
        if record_every:
            self._recording = self._held.enter_context(fpsim.record(emulated, every=record_every))
        self._model = emulated
        return emulated

    def scaler(self, optimizer: Optimizer | None = None) -> GradScaler:
        """Return the loss scaler of the cell's method, with torch's methods: scale, unscale_, step, update.

        With every method the scaler skips a step whose gradients are not finite. With adaptive scaling the loss scale
        is 1.

        optimizer: optional, for code with one scaler per optimizer; it is not stored.
        Raises ValueError before `quantize`, because layers' scales belong to a model.
        """
        if optimizer is not None:
            require_optimizer(optimizer)
        if self._scaler is None:
            raise ValueError("There is no scaler before the model. Call job.quantize(model) first.")
        return self._scaler

    def optimizer(self, optimizer: AnOptimizer, model: nn.Module | None = None) -> AnOptimizer:
        """Make an optimizer store weights and states in the formats of the cell's `Update`, and return it.

        Call it for each optimizer before its first step, and before `checkpoint`. Lost updates are recorded in every
        tenth step. In a sweep without updates, nothing changes.

        model: the model whose names the update's overrides use; None for the model of `quantize`.
        Raises TypeError for anything but an optimizer, ValueError for an optimizer that lacks the states of the update.

        >>> model = nn.Linear(1, 1)
        >>> optimizer = Job(update="bf16_sr").optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> bool((model.weight == model.weight.bfloat16()).all())
        True
        """
        require_optimizer(optimizer)
        self._has_optimizer = True
        if self.update is not None:
            of = self._model if model is None else model
            quantized = fpsim.quantize_optimizer(optimizer, self.update, of, seed=self.seed)
            self._lost.append(fpsim.lost_updates(quantized, RECORD_UPDATES_EVERY))
        return optimizer

    def begin_step(self, step: int, steps: int) -> None:
        """Switch the model to the schedule's format for a step. Call it before each step of a cell with a schedule.

        step: counted from 0.
        steps: the number of steps of the whole training.
        Raises ValueError before `quantize`, and if a format of the schedule would have no step.
        """
        for name, value, least in (("step", step, 0), ("number of steps", steps, 1)):
            if not is_whole(value, least):
                raise TypeError(f"The {name} {shown(value)} is not a count. Expected: an integer, {least} or more.")
        if self._switch is None:
            raise ValueError("There is no model to follow the schedule. Call job.quantize(model) first.")
        if step >= steps:
            raise ValueError(f"step={shown(step)} is beyond steps={shown(steps)}. Expected: 0 to {shown(steps - 1)}.")
        self._follows = True
        self._switch.enter(step, steps)

    def log(self, step: int, **numbers: Any) -> None:
        """Log numbers at a step, for curves of the report and of `Results.curves`. "loss" reveals a divergence.

        step: counted from 0.
        numbers: floats, or tensors of one element.
        Raises TypeError for anything but a number, ValueError for a name that is not valid Unicode.
        """
        if not is_whole(step, least=0) or step > MOST_STEPS:
            raise TypeError(f"The step {shown(step)} is not a count. Expected: an integer, 0 or more.")
        for name, value in numbers.items():
            require_storable(name)
            self.curves.setdefault(name, []).append((int(step), _number(name, value)))
        self._last = max(self._last, int(step))
        self._tell()

    def note_update(self, scale: float, skipped: bool) -> None:
        """Record the scale of a step, and whether the step was skipped. The job's scaler calls this at each update."""
        if skipped:
            self.skipped.append(len(self.scales))
        self.scales.append(scale)
        self._last = max(self._last, len(self.scales) - 1)
        self._tell()

    def _tell(self) -> None:
        done = self._last + 1
        # The next point depends only on the history, which a checkpoint stores: a resumed training has the same points
        # as an uninterrupted one.
        if done >= (math.ceil(POINT_FACTOR * self.history[-1][0]) if self.history else FIRST_POINT):
            self._record_point()
        if self.progress is not None and done > self._told:
            self.progress(done - self._told)
            self._told = done

    def _record_point(self) -> None:
        """Add a point to the history, with the scales of the layers. An earlier point of the same step is replaced."""
        if self._recording is None:
            return
        done = self._last + 1
        if self.history and self.history[-1][0] == done:
            del self.history[-1], self.layer_scales[-1:]
        self.history.append((done, [*self._recording.rows()]))
        if self._adaptive is not None:
            self.layer_scales.append((done, self._adaptive.log2_scales()))

    @property
    def seconds(self) -> float:
        """Return the seconds of training, including interrupted attempts up to their checkpoints."""
        return self._before + time.perf_counter() - self._since

    def checkpoint(self, step: int = 0, **stateful: Any) -> int:
        """Restore the named objects on the first call, and save them on later calls. Returns the next step.

        Later calls have no names.

        start = job.checkpoint(model=model, optimizer=optimizer) restores both if the cell was interrupted, together
        with the scaler and all logged and recorded numbers. At the end of each step, job.checkpoint(step + 1) saves all
        of this if half a minute has passed.

        step: the number of finished steps.
        stateful: objects with `state_dict` and `load_state_dict`, such as schedules and data loaders.
        Raises ValueError if there is nothing to save.
        """
        require_whole("step", step, 0, MOST_STEPS)
        for name, thing in stateful.items():
            if isinstance(thing, type) or not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise TypeError(f"{name} is {shown(thing)}. Expected: an object with state_dict and load_state_dict.")
        if stateful:
            states = {**stateful, "job": self, "scaler": self._scaler, "adaptive": self._adaptive}
            states["recording"] = self._recording
            states |= {f"updates {i}": lost for i, lost in enumerate(self._lost)}
            # States are loaded in this order: "job" first switches the model to the format to which the state of
            # delayed scaling belongs.
            present = {name: thing for name, thing in states.items() if thing is not None}
            if self._model is not None:
                present["delayed scaling"] = DelayedScaling(self._model)
            self._done = step
            if self._path is not None:
                words = {"format": str(self._schedule), "scaling": self.scaling}
                words |= {} if self.update is None else {"update": str(self.update)}
                identity = {**words, "seed": self.seed, "names": [*present], "versions": versions()}
                cuda = [self.device] if self.device.startswith("cuda") else []
                self._checkpoints = Checkpoints(self._path, present, identity, 30.0, cuda, is_own=True)
                if self._checkpoints.load():
                    self._resumed_at = self._done, self._last
            self._is_named = True
            return self._done
        if not self._is_named:
            raise ValueError(
                "job.checkpoint() was called without anything to save. Name it once, before the loop: "
                "start = job.checkpoint(model=model, optimizer=optimizer)."
            )
        self._done, self._last = step, max(self._last, step - 1)
        if self._checkpoints is not None and self._checkpoints.is_due():
            self._checkpoints.save()
        return step

    def state_dict(self) -> dict[str, Any]:
        """Return the telemetry and the progress, for the checkpoint."""
        stage = {} if self._switch is None else {"stage": self._switch.stage}
        words = {"step": self._done, "last": self._last, "seconds": self.seconds}
        return {**words, **stage, **{name: getattr(self, name) for name in GATHERED}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state."""
        self._done, self._last, self._before = state["step"], state["last"], state["seconds"]
        if self._switch is not None:
            self._switch.enter_stage(state["stage"])
        for name in GATHERED:
            setattr(self, name, state[name])

    def result(self, metrics: Mapping[str, Any], seconds: float) -> Run:
        """Return the result of the cell in the same form as a built-in training.

        metrics: the return value of the training function.
        Raises TypeError for anything but a mapping from names to numbers.
        """
        if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
            raise TypeError(
                f"The training function returned {shown(metrics)}. Expected: its metrics, a mapping from names to "
                f"numbers, such as {{'accuracy': 0.9}}."
            )
        for name in metrics:
            require_storable(name)
        stage = 0 if self._switch is None else self._switch.stage
        if stage < len(self._schedule.stages) - 1 and not self._follows:
            raise ValueError(
                f"The format is the schedule {self._schedule}, and the training function does not follow it. Call "
                f"job.begin_step(step, steps) before each step."
            )
        if self.update is not None and not self._has_optimizer:
            raise ValueError(
                f"The cell has the update {self.update}, and the training function does not follow it. Give each "
                f"optimizer to job.optimizer(optimizer) before it steps."
            )
        self._record_point()
        return replace(self.so_far(), metrics={n: _number(n, v) for n, v in metrics.items()}, seconds=seconds)

    def so_far(self) -> Run:
        """Return the training so far, without metrics."""
        return Run(
            metrics={},
            losses=[value for _, value in self.curves.get("loss", [])],
            rows=self.history[-1][1] if self.history else [],
            seconds=self.seconds,
            scales=self.scales,
            skipped_steps=self.skipped,
            history=self.history,
            layer_scales=self.layer_scales,
            curves=self.curves,
            updates=[*steps_together(self._lost)],
            parameters=[row for lost in self._lost for row in lost.table()],
        )

    def close(self) -> None:
        """End the recording and the layers' scaling."""
        self._held.close()

    def drop_checkpoint(self) -> bool:
        """Delete the checkpoint if the training resumed from it and has finished no step since.

        Returns True if the checkpoint was deleted.
        """
        # With such a checkpoint every retry might fail at the same step.
        is_at_fault = self._resumed_at is not None and self._resumed_at == (self._done, self._last)
        if is_at_fault:
            self.over()
        return is_at_fault

    def over(self) -> None:
        """Delete the checkpoint: the training is over."""
        if self._checkpoints is not None:
            self._checkpoints.remove()


def run_job(job: Job, train: Callable[[Job], Mapping[str, Any]]) -> tuple[Run, str | None]:
    """Call a training function. Returns the run and, if the loss rule stopped the training, the rule's message.

    The generators of torch, NumPy and Python are seeded with the job's seed, and restored afterwards.
    """
    cuda = [job.device] if job.device.startswith("cuda") else []
    error = None
    metrics: Mapping[str, Any] = {}
    with kept_generators(cuda), float32_in_full(job.device):
        seed_generators(job.seed)
        # A loss rule raises this error if its scale can fall no further. The cell has then diverged, which is a result
        # and not a failure.
        try:
            metrics = train(job)
        except FloatingPointError as stopped:
            error = str(stopped)
        finally:
            job.close()
    run = job.result(metrics, job.seconds)
    job.over()
    return run, error


def require_storable(name: str) -> None:
    """Raise ValueError for a metric's or curve's name that UTF-8 cannot encode, because of half a surrogate pair."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"The name {shown(name)} is not Unicode: {error.reason}. Use text that UTF-8 can encode."
        ) from None


def _number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    # float() of a larger int raises OverflowError, which would not name the number.
    if not is_number(value) or (isinstance(value, int) and abs(value) > sys.float_info.max):
        raise TypeError(f"{name} is {shown(value)}. Expected: a number, or a tensor of one element.")
    return float(value)
