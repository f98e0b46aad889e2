"""Train a task: the loop, the optimizer, the learning rate, the backward pass of a batch, and the evaluation."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fpsim
from ada_loss.lab.devices import float32_in_full
from ada_loss.lab.environment import versions
from ada_loss.lab.tasks import Task
from ada_loss.lab.training.batches import Batches, TensorBatches, batches_of
from ada_loss.lab.training.checkpoints import Checkpoints, DelayedScaling
from ada_loss.lab.training.format_schedule import (
    FormatSchedule,
    FormatSwitch,
    Start,
    as_schedule,
    quantized,
    step_of,
)
from ada_loss.lab.training.generators import kept_generators
from ada_loss.lab.training.methods import make_native_scaling, make_scaling
from ada_loss.lab.training.native import canonical_native, in_float16, is_native, require_native, unquantized
from ada_loss.lab.training.options import TrainOptions
from ada_loss.lab.training.rollouts import Rollout, Sampler, as_rollout
from ada_loss.lab.training.run import Run, Stopped
from ada_loss.lab.training.stored_weights import RoundedWeights, every_of, stored
from ada_loss.scalers import GradScaler
from fpsim import FormatLike, LostUpdates, Recording, Update
from fpsim.checks import shown
from fpsim.scaling import as_update

__all__ = ["Training", "TrainingState", "backward", "make_optimizer", "train"]

# A point of the history takes 3 ms. A long training has HISTORY points; a short training has a point for every SAMPLES
# tallied calls.
HISTORY = 20
SAMPLES = 5
EVALUATED = 256  # the number of samples that are evaluated at once
Forward = Callable[[Tensor], Tensor]


def train(
    task: Task,
    fmt: FormatLike | FormatSchedule | Mapping[str, Any] = None,
    rounding: str | None = None,
    *,
    update: Update | str | None = None,
    rollout: Rollout | FormatLike | Mapping[str, Any] = None,
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 30.0,
    progress: Callable[[int], object] | None = None,
    **options: Any,
) -> Run:
    """Train a copy of the task's model in a format. All further arguments are those of `TrainOptions`.

    task: the model, its data, its loss and its metrics; the evaluation is computed in the format too.
    fmt: a format for every role, a recipe ("recipe:nvfp4"), a Policy, or None for plain float32. Several formats form a
        schedule: {"schedule": {0: "fp16", 0.8: "bf16"}} computes the last fifth of the steps in bf16; see
        `as_schedule`. {"native": "fp16"} is real float16, under torch.autocast, without emulation.
    rounding: the rounding of every role; None for the policy's rounding, or nearest-even.
    update: how the optimizer stores weights and states, a fpsim.Update or its name ("bf16_sr"); None for float32.
    rollout: the format of the engine that draws the samples of a task with a `play`, such as `rl`, or {"format": ...,
        "weights": ...}; None for the trainer's format, without importance weights.
    checkpoint, checkpoint_seconds, progress: see `Training.run`.
    Raises ValueError for invalid options, Stopped if the loss rule stops the training.

    >>> from ada_loss.lab.tasks import digits
    >>> run = train(digits(), "bf16", epochs=1)
    >>> len(run.losses), run.metrics["accuracy"] > 0.5
    (22, True)
    """
    own = None if rollout is None else as_rollout(rollout)
    training = Training(task, fmt, rounding, TrainOptions(**options), update, own)
    return training.run(checkpoint, checkpoint_seconds, progress)


@dataclass
class TrainingState:
    """Progress and telemetry of a training, which a checkpoint stores with the states of its objects.

    order: the state of the batches' generator at the beginning of the epoch.
    batches: the number of finished batches of the epoch.
    The other fields are those of `Run`.
    """

    order: Tensor
    batches: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped_steps: list[int] = field(default_factory=list)
    history: list[tuple[int, list[dict[str, Any]]]] = field(default_factory=list)
    layer_scales: list[tuple[int, dict[str, int]]] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """The number of finished steps."""
        return len(self.losses)

    def state_dict(self) -> dict[str, Any]:
        """Return all fields: tensors, numbers and strings."""
        return {**vars(self)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state. Raises ValueError for other fields, or values of another type."""
        # The checkpoint's identity tells versions apart, so only a file that was edited by hand fails here.
        kinds = {name: type(value) for name, value in vars(self).items()}
        if {name: type(value) for name, value in state.items()} != kinds or state["batches"] < 0:
            raise ValueError(
                f"The state has {', '.join(state)}. Expected: {', '.join(kinds)}, as a training saves them."
            )
        vars(self).update(state)

    def result(self, metrics: dict[str, float]) -> Run:
        """Return the training so far as a `Run`, whose fields have the same names."""
        shared = {f.name: getattr(self, f.name) for f in fields(Run) if hasattr(self, f.name)}
        return Run(metrics=metrics, rows=self.history[-1][1] if self.history else [], **shared)


class Training:
    """One training: the model, the objects that train it, the data, and the state."""

    def __init__(
        self,
        task: Task,
        fmt: FormatLike | FormatSchedule | Mapping[str, Any],
        rounding: str | None,
        options: TrainOptions,
        update: Update | str | None = None,
        rollout: Rollout | None = None,
    ) -> None:
        container = torch.float64 if options.accumulation == "float64" else torch.float32
        self.task, self.options, self.schedule = task, options, as_schedule(fmt, rounding)
        first = self.schedule.stages[0]
        self.is_native, self.adaptive = is_native(first.fmt), None
        self.update = None if as_update(update).is_float32 else as_update(update)
        self.recording = Recording(options.record_every) if options.record_every else None
        self.scaler: GradScaler
        self.model: nn.Module
        if isinstance(first.fmt, Mapping) and self.is_native:
            canonical_native(first.fmt)
            require_native(first.rounding, asdict(options), None if self.update is None else update)
            self.model = unquantized(task.model).to(options.device, container)
            self.scaler = scaler = make_native_scaling(options.scaling, self.model)
            if self.recording is not None:
                scaler.record(self.recording, self.model)
        else:
            # float32 is a policy without roles, so that every emulated training takes the same path
            self.model = quantized(task.model, self.schedule).to(options.device, container)
            self.scaler, self.adaptive = make_scaling(options.scaling, self.model)
        self.forward = in_float16(self.model, options.device) if self.is_native else self.model
        self.formats = FormatSwitch(self.model, self.schedule)
        self.rollout, self.sampler = rollout, None
        if task.play is not None or rollout is not None:
            self.rollout = rollout or Rollout()
            self.sampler = Sampler(task, self.schedule, self.rollout, options.device, container)
            self.task = self.sampler.task  # the same task, but with importance weights in its loss
        self.optimizer = make_optimizer(options, self.model)
        self.batches = batches_of(task.train, options.batch_size, options.seed, options.device, container)
        self.test = batches_of(task.test, EVALUATED, 0, options.device, container)
        self.total = options.steps or options.epochs * self._epoch_length("epochs")
        # The result is not used: the call raises an error now if a format of the schedule would have no step.
        self.schedule.steps(self.total)
        self.state = TrainingState(self.batches.order())
        self.lost = self._lost()
        self.point_every = max(SAMPLES * options.record_every, self.total // HISTORY)
        # Dropout draws from the generator of the GPU.
        self.cuda_devices = [options.device] if options.device.startswith("cuda") else []
        self.checkpoints: Checkpoints | None = None
        self.branches: dict[int, Checkpoints] = {}
        self.progress: Callable[[int], object] = lambda _: None
        self.before_step: Callable[[Tensor, Tensor], object] = lambda x, y: None
        self._since = 0.0

    def run(
        self,
        checkpoint: Path | None = None,
        checkpoint_seconds: float = 30.0,
        progress: Callable[[int], object] | None = None,
        branches: Mapping[Start, Path] | None = None,
    ) -> Run:
        """Train to the end. The same seed leads to the same bits, even after an interruption.

        checkpoint: a file from which an interrupted training resumes; it is deleted at the end. None for no
            checkpoints. A checkpoint of another model, or of other data, options or versions, is ignored with a
            warning.
        checkpoint_seconds: the time between two checkpoints.
        progress: a function that is called with 1 after every step, and before the first step with the number of steps
            in the checkpoint.
        branches: files of shared states, by the start of a format. A shared state is the state at which this format
            begins; all trainings that are equal up to this state share the file. Without a checkpoint, the training
            starts from the latest file that exists. Missing files are written.
        Raises Stopped if the loss rule stops the training.
        """
        self._open_checkpoints(checkpoint, checkpoint_seconds, branches)
        self.progress = progress or self.progress
        with (
            kept_generators(self.cuda_devices),  # fpsim's own stream follows no seed of ours, and no checkpoint has it
            float32_in_full(self.options.device),
            self.adaptive or nullcontext(),
        ):
            torch.manual_seed(self.options.seed)  # the noise of stochastic rounding
            own = [] if self.checkpoints is None else [self.checkpoints]
            # The latest state is loaded. The training's own checkpoint has more steps than any shared state, so it is
            # tried first, and then the shared states from the last to the first.
            if any(kept.load() for kept in (*own, *reversed(self.branches.values()))):
                self.progress(self.state.steps)
                self.batches.restore(self.state.order)
                self._enter_last()  # an evaluation may come before the next step
            self.model.train()
            self._since = time.perf_counter()
            while self.state.steps < self.total:
                self._run_epoch()
            metrics = self._evaluate()
        if self.options.evaluate_every:
            self.state.evaluations.append((self.state.steps, metrics))
        if self.checkpoints is not None:
            self.checkpoints.remove()
        return self._result(metrics)

    def so_far(self) -> Run:
        """Return the training so far, with the metrics of the last evaluation."""
        evaluations = self.state.evaluations
        return self._result(dict(evaluations[-1][1]) if evaluations else {})

    def _lost(self) -> LostUpdates | RoundedWeights | None:
        """Return the record of lost updates; None if the optimizer stores float32."""
        options, records = self.options, self.options.record_every > 0
        if self.update is not None:
            if options.master_weights == "none":
                raise ValueError(
                    f"master_weights='none' was given with the update {self.update}, which says how weights are "
                    f"stored. Omit one of them."
                )
            return stored(self.optimizer, self.update, self.model, options.seed, self.total, records)
        if options.master_weights == "none":
            return RoundedWeights(self.model, every_of(self.total) if records else 0)
        return None

    def _result(self, metrics: dict[str, float]) -> Run:
        """Return the training so far, with its lost updates."""
        result = self.state.result(metrics)
        if isinstance(self.lost, LostUpdates):
            return replace(result, updates=[*self.lost.steps()], parameters=[*self.lost.table()])
        return result if self.lost is None else replace(result, updates=[*self.lost.rows])

    def _run_epoch(self) -> None:
        """Run the rest of an epoch, at most to the last step."""
        state, every = self.state, self.options.evaluate_every
        # The generator's state is read before the epoch is drawn. A resumed epoch is drawn again from this state, and
        # its finished batches are skipped.
        state.order = self.batches.order()
        # In a native training, the scaler itself passes tallies to the recording. Evaluations are outside of this
        # block, and are not tallied.
        is_recorded = self.recording is not None and not self.is_native
        with fpsim.record(self.model, into=self.recording) if is_recorded else nullcontext():
            for x, y in islice(self.batches.epoch(state.batches), self.total - state.steps):
                self._step(x if self.task.augment is None else self.task.augment(x), y)
                state.batches += 1
                self._record_point()
                self.progress(1)
                self._save()
        state.batches = 0
        if every and (state.steps // self._epoch_length("evaluate_every")) % every == 0 and state.steps < self.total:
            state.evaluations.append((state.steps, self._evaluate()))

    def _save(self) -> None:
        """Write the checkpoint if it is due, and the shared state of this step unless its file exists."""
        branch = self.branches.get(self.state.steps)
        due = [self.checkpoints] if self.checkpoints is not None and self.checkpoints.is_due() else []
        due += [branch] if branch is not None and not branch.path.exists() else []
        for kept in due:
            self._add_seconds()
            kept.save()

    def _epoch_length(self, option: str) -> int:
        if self.batches.length is None:
            raise ValueError(
                f"{option} counts passes over the training data, and {shown(self.task.train)} has no length. "
                f"Give steps, or data with a length."
            )
        return self.batches.length

    def _step(self, x: Tensor, y: Tensor) -> None:
        options, state, done = self.options, self.state, self.state.steps
        self._enter(done)
        # The rate is set by hand, because torch's schedules warn if the first step is skipped, which is usual with a
        # large loss scale.
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(options, done, self.total)
        if self.sampler is not None:
            x, y = self.sampler.draw(self.model, x, y)
        self.before_step(x, y)
        state.scales.append(self.scaler.get_scale())
        self.optimizer.zero_grad()
        measured: dict[str, float] = {}
        loss = backward(self.task, self.forward, self.scaler, x, y, options.micro_batches, measured)
        state.losses.append(loss)
        for name, value in measured.items():
            state.curves.setdefault(name, []).append((done, value))
        if options.max_gradient_norm:
            self.scaler.unscale_(self.optimizer)
            self.scaler.clip_(self.optimizer, options.max_gradient_norm)
        if isinstance(self.lost, RoundedWeights):
            self.lost.step(done, lambda: self.scaler.step(self.optimizer))
        else:
            self.scaler.step(self.optimizer)
        # `overflowed` is called before update(), which deletes the results of this step's checks.
        if self.scaler.overflowed(self.optimizer):
            state.skipped_steps.append(done)
        try:
            self.scaler.update()
        except FloatingPointError as error:
            raise self._stopped(error) from None

    def _record_point(self) -> None:
        """Add a point to the history, with the scales of the layers, if a point is due."""
        state = self.state
        if self.recording is not None and (state.steps % self.point_every == 0 or state.steps == self.total):
            state.history.append((state.steps, [*self.recording.rows()]))
            layers = self.adaptive or self.scaler.layers
            if layers is not None:
                state.layer_scales.append((state.steps, layers.log2_scales()))

    def _evaluate(self) -> dict[str, float]:
        self._add_seconds()  # the clock stops for the evaluation: `Run.seconds` is only the time of training
        metrics = evaluate(self.task, self.model, self.forward, self.test, self.options.seed, self.cuda_devices)
        metrics |= {name: statistics.fmean(v for _, v in points) for name, points in self.state.curves.items()}
        self._since = time.perf_counter()
        return metrics

    def _add_seconds(self) -> None:
        """Add the time since the last call to the training's seconds."""
        now = time.perf_counter()
        self.state.seconds += now - self._since
        self._since = now

    def _stopped(self, error: FloatingPointError) -> Stopped:
        if self.recording is not None:
            self.state.history.append((self.state.steps, [*self.recording.rows()]))
        self._add_seconds()
        if self.checkpoints is not None:  # it is removed, because a resumed training would only stop again
            self.checkpoints.remove()
        return Stopped(str(error), self._result({}))

    def _enter(self, step: int) -> None:
        """Switch model and sampler to the format of a step."""
        self.formats.enter(step, self.total)
        if self.sampler is not None:
            self.sampler.enter(step, self.total)

    def _enter_last(self) -> None:
        """Switch to the format of the last finished step."""
        self._enter(max(self.state.steps - 1, 0))

    def _open_checkpoints(self, path: Path | None, seconds: float, shared: Mapping[Start, Path] | None) -> None:
        is_own, branches = shared is not None, shared or {}  # only a sweep passes `shared`, even if it is empty
        if path is None and not branches:
            return
        stateful = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler, "adaptive": self.adaptive}
        stateful |= {"training": self.state, "recording": self.recording, "updates": self.lost}
        present = {name: thing for name, thing in stateful.items() if thing is not None}
        # States are loaded in this order. Delayed scaling needs the format of the last step, so it comes after
        # "training", which counts the steps.
        if not self.is_native:
            present["delayed scaling"] = DelayedScaling(self.model, self._enter_last)
        if self.sampler is not None and not self.sampler.is_native:
            present["rollouts"] = DelayedScaling(self.sampler.model, self._enter_last)
        tensors = {**self.batches.tensors, **dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        # A task is code, so its name does not identify it. Its data and initial weights identify it instead.
        identity = {**asdict(self.options), "versions": versions(), "tensors": _fingerprint(tensors)}
        identity["state"] = [f.name for f in fields(TrainingState)]
        identity["update"] = "" if self.update is None else str(self.update)
        identity["rollout"] = "" if self.rollout is None else str(self.rollout)

        def opened(where: Path, formats: str) -> Checkpoints:
            words = {"format": formats, **identity}
            return Checkpoints(where, present, words, seconds, self.cuda_devices, is_own)

        self.checkpoints = None if path is None else opened(path, str(self.schedule))
        steps = {step_of(start, self.total): start for start in branches}
        for step, start in sorted(steps.items()):
            self.branches[step] = opened(branches[start], f"{self.schedule.before(start)} until {start}")


def _fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of names, shapes, dtypes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).numpy())
    return digest.hexdigest()


def make_optimizer(options: TrainOptions, model: nn.Module) -> torch.optim.Optimizer:
    """Create torch's optimizer for the model's parameters."""
    common: dict[str, Any] = {"lr": options.learning_rate, "weight_decay": options.weight_decay}
    if options.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), momentum=options.momentum, **common)
    return (torch.optim.Adam if options.optimizer == "adam" else torch.optim.AdamW)(model.parameters(), **common)


def learning_rate_at(options: TrainOptions, step: int, total: int) -> float:
    """Return the learning rate of a step, counted from 0, of `total` steps.

    >>> [learning_rate_at(TrainOptions(learning_rate=8.0, schedule="linear", warmup=2), step, 4) for step in range(4)]
    [4.0, 8.0, 8.0, 4.0]
    """
    return options.learning_rate * _rate(options.schedule, options.warmup, step, total)


def _rate(schedule: str, warmup: int, step: int, total: int) -> float:
    """Return the learning rate of a step, divided by the peak."""
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    share = (step - warmup) / max(total - warmup, 1)
    return (1 + math.cos(math.pi * share)) / 2 if schedule == "cosine" else 1 - share


def backward(
    task: Task,
    forward: Forward,
    scaler: GradScaler,
    x: Tensor,
    y: Tensor,
    micro_batches: int,
    measured: dict[str, float] | None = None,
) -> float:
    """Add the scaled gradients of a batch to the parameters' gradients, part by part. Returns the batch's loss.

    forward: the model, or its forward pass in real float16.
    x, y: the inputs and the targets of the batch.
    micro_batches: the number of parts.
    measured: a mapping to which the numbers of the task's curves are added.
    """
    total, parts = 0.0, min(micro_batches, len(x))
    for inputs, targets in zip(x.tensor_split(parts), y.tensor_split(parts)):
        outputs = forward(inputs)
        loss = task.loss(outputs, targets)
        if micro_batches > 1:  # losses are means, and the parts of an uneven split have different sizes
            loss = loss * (len(inputs) / len(x))
        scaler.scale(loss).backward()
        total += loss.item()
        if measured is not None:
            share = len(inputs) / len(x)
            for name, measure in task.curves.items():
                measured[name] = measured.get(name, 0.0) + share * float(measure(outputs.detach(), targets))
    return total


def evaluate(
    task: Task, model: nn.Module, forward: Forward, data: Batches, seed: int, cuda_devices: Sequence[str]
) -> dict[str, float]:
    """Compute the task's metrics on its test data, in the model's format. The model is then in training mode again.

    forward: the model, or its forward pass in real float16.
    data: the test data; the outputs of an iterable's batches are concatenated.
    seed, cuda_devices: the seed and the CUDA devices of the evaluation's noise.
    """
    model.eval()
    # The evaluation seeds torch's generators, which are restored afterwards. A training therefore has the same bits
    # with and without evaluations in between.
    with torch.no_grad(), torch.random.fork_rng(devices=cuda_devices):
        torch.manual_seed(seed)
        if isinstance(data, TensorBatches):
            outputs, targets = torch.cat([forward(part) for part in data.inputs.split(EVALUATED)]), data.targets
        else:
            pairs = [(forward(x), y) for x, y in data.epoch(0)]
            outputs, targets = (torch.cat(parts) for parts in zip(*pairs))
        metrics = {name: float(metric(outputs, targets)) for name, metric in task.metrics.items()}
    model.train()
    return metrics
