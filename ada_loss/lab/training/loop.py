"""The one training loop."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fpsim
from ada_loss.lab.environment import versions
from ada_loss.lab.tasks import Task
from ada_loss.lab.training.checkpoints import Checkpoints
from ada_loss.lab.training.methods import make_scaling
from ada_loss.lab.training.run import Run, Stopped
from ada_loss.scalers import GradScaler
from fpsim import FormatLike, Recording, round_parameters_

__all__ = ["AT_LEAST", "CHOICES", "train"]

CHOICES = {
    "optimizer": ("sgd", "adam", "adamw"),
    "schedule": ("cosine", "linear", "constant"),
    "master_weights": ("float32", "none"),
    "accumulation": ("float32", "float64"),
}
AT_LEAST = {"epochs": 1, "batch_size": 1, "micro_batches": 1}  # 0 for other numbers
HISTORY = 20  # points of the tallies' history in a long run
SAMPLES = 5  # of a site, between two points at least: a point takes 3 ms
EVALUATED = 256  # samples at once


@dataclass
class _State:
    """What a training has gathered, and where it is in its data: all that a checkpoint keeps beside the machines'."""

    order: Tensor  # of the generator, as the epoch began
    batches: int = 0  # of the epoch that are done
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped_steps: list[int] = field(default_factory=list)
    history: list[tuple[int, list[dict[str, Any]]]] = field(default_factory=list)
    layer_scales: list[tuple[int, dict[str, int]]] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)


def train(
    task: Task,
    fmt: FormatLike = None,
    rounding: str | None = None,
    *,
    scaling: str | float = "none",
    optimizer: str = "sgd",
    epochs: int = 12,
    steps: int = 0,
    batch_size: int = 64,
    micro_batches: int = 1,
    learning_rate: float = 0.05,
    schedule: str = "cosine",
    warmup: int = 0,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    max_gradient_norm: float = 0.0,
    master_weights: str = "float32",
    accumulation: str = "float32",
    seed: int = 0,
    record_every: int = 100,
    evaluate_every: int = 0,
    device: str = "cpu",
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 30.0,
    progress: Callable[[int], object] | None = None,
) -> Run:
    """Train a copy of the task's model in a format; the same bits for a seed, also if it is interrupted and resumed.

    fmt: a format for every role, a Policy, or None for plain float32. Test metrics are computed in the format too.
    rounding: of every role, if not the policy's own, or nearest-even.
    scaling: of gradients, see make_scaling. optimizer: "sgd" with momentum, "adam" or "adamw". epochs: passes over the
    training data; steps: how many there are in all, if not 0. micro_batches: parts of a batch whose gradients are
    added up. learning_rate: its largest value, after `warmup` steps of a linear rise; schedule: how it goes from there,
    to zero along a "cosine" or a line ("linear"), or "constant". max_gradient_norm: of all gradients together, beyond
    which they are clipped; 0 for no limit. master_weights: "float32", or "none", where parameters are rounded to their
    format after each step. accumulation: the container in which an operation adds up before it rounds.
    record_every: tally each n-th call of every site; 0 records nothing. evaluate_every: test metrics after each n-th
    epoch too. checkpoint: a file from which an interrupted training goes on, written every `checkpoint_seconds` and
    removed in the end; one of another model, other data, settings or versions is left aside with a warning.
    progress: called with 1 after every step, and before the first with the steps of the checkpoint.
    Raises ValueError for an unknown word, and for impossible numbers; Stopped where the loss rule stops the
    training.

    >>> from ada_loss.lab.tasks import digits
    >>> run = train(digits(), "bf16", epochs=1)
    >>> len(run.losses), run.metrics["accuracy"] > 0.5
    (22, True)
    """
    words = {"optimizer": optimizer, "schedule": schedule, "master_weights": master_weights}
    for name, word in {**words, "accumulation": accumulation}.items():
        if word not in CHOICES[name]:
            raise ValueError(f"Unknown {name} {word!r}. Known: {', '.join(CHOICES[name])}.")
    counts = {"epochs": epochs, "steps": steps, "batch_size": batch_size, "micro_batches": micro_batches}
    counts |= {"warmup": warmup, "record_every": record_every, "evaluate_every": evaluate_every}
    sizes = {"learning_rate": learning_rate, "momentum": momentum, "weight_decay": weight_decay}
    for name, number in {**counts, **sizes, "max_gradient_norm": max_gradient_norm}.items():
        if not AT_LEAST.get(name, 0) <= number < math.inf:
            raise ValueError(f"{name} came as {number!r}. Possible: a finite number, {AT_LEAST.get(name, 0)} or more.")
    container = torch.float64 if accumulation == "float64" else torch.float32
    # float32 is a policy without roles: every run goes the same way
    model = fpsim.quantize(task.model, fmt, rounding=rounding).to(device, container)
    scaler, adaptive = make_scaling(scaling, model)
    chosen = _make_optimizer(optimizer, model, learning_rate, momentum, weight_decay)
    (x, y), test = ([_placed(t, device, container) for t in data] for data in (task.train, task.test))
    total = steps or epochs * -(-len(x) // batch_size)
    order = torch.Generator().manual_seed(seed)
    state, recording = _State(order.get_state()), Recording(record_every) if record_every else None
    cards = [device] if device.startswith("cuda") else []  # their dropout has random numbers of its own
    machines = {"model": model, "optimizer": chosen, "scaler": scaler}
    if adaptive is not None:
        machines["adaptive"] = adaptive  # type: ignore[assignment]
    settings: list[Any] = [str(fmt), rounding, scaling, seed, total, batch_size, micro_batches, learning_rate, warmup]
    settings += [*words.values(), accumulation, momentum, weight_decay, max_gradient_norm]
    settings += [record_every, evaluate_every, device]
    checkpoints = None
    if checkpoint is not None:
        start_from = {"inputs": x, "targets": y, **dict(model.named_parameters()), **dict(model.named_buffers())}
        settings += [versions(), _fingerprint(start_from)]
        checkpoints = Checkpoints(checkpoint, machines, settings, checkpoint_seconds, cards)
    points = max(SAMPLES * record_every, total // HISTORY)
    with (
        torch.random.fork_rng(devices=cards),
        fpsim.noise_of_torch(),  # of its own stream neither a seed nor a checkpoint knows
        adaptive or nullcontext(),
    ):
        torch.manual_seed(seed)  # the noise of stochastic rounding
        if checkpoints is not None and (saved := checkpoints.load()) is not None:
            state, kept = saved
            if recording is not None:
                recording.continue_from(kept)
            if progress is not None:
                progress(len(state.losses))
        order.set_state(state.order)
        model.train()
        start = time.perf_counter()
        while len(state.losses) < total:
            state.order = order.get_state()
            epoch = torch.randperm(len(x), generator=order).split(batch_size)
            with nullcontext() if recording is None else fpsim.record(model, into=recording):
                for batch in epoch[state.batches : state.batches + total - len(state.losses)]:
                    done = len(state.losses)
                    for group in chosen.param_groups:  # by hand: torch's schedules warn where the first step is skipped
                        group["lr"] = learning_rate * _rate(schedule, warmup, done, total)
                    state.scales.append(scaler.get_scale())
                    state.losses.append(_backward(task, model, scaler, chosen, x, y, batch, micro_batches))
                    if max_gradient_norm:
                        scaler.unscale_(chosen)
                        scaler.clip_(chosen, max_gradient_norm)
                    scaler.step(chosen)
                    if scaler.overflowed(chosen):
                        state.skipped_steps.append(done)
                    try:
                        scaler.update()
                    except FloatingPointError as error:
                        if recording is not None:
                            state.history.append((done + 1, recording.rows()))
                        state.seconds += time.perf_counter() - start
                        if checkpoints is not None:
                            checkpoints.remove()
                        raise Stopped(str(error), _run(state, {})) from None
                    if master_weights == "none":
                        round_parameters_(model)
                    state.batches += 1
                    if recording is not None and ((done + 1) % points == 0 or done + 1 == total):
                        state.history.append((done + 1, recording.rows()))
                        if adaptive is not None:
                            state.layer_scales.append((done + 1, adaptive.log2_scales()))
                    if progress is not None:
                        progress(1)
                    if checkpoints is not None and checkpoints.is_due():
                        state.seconds, start = state.seconds + time.perf_counter() - start, time.perf_counter()
                        checkpoints.save(state, recording)
            state.batches = 0
            finished = len(state.losses) // len(epoch)
            if evaluate_every and finished % evaluate_every == 0 and len(state.losses) < total:
                state.seconds += time.perf_counter() - start
                state.evaluations.append((len(state.losses), _evaluate(task, model, test, seed, cards)))
                model.train()
                start = time.perf_counter()
        state.seconds += time.perf_counter() - start
        metrics = _evaluate(task, model, test, seed, cards)
    if evaluate_every:
        state.evaluations.append((len(state.losses), metrics))
    if checkpoints is not None:
        checkpoints.remove()
    return _run(state, metrics)


def _run(state: _State, metrics: dict[str, float]) -> Run:
    return Run(
        metrics,
        state.losses,
        state.history[-1][1] if state.history else [],
        state.seconds,
        state.scales,
        state.skipped_steps,
        state.history,
        state.layer_scales,
        state.evaluations,
    )


def _placed(data: Tensor, device: str, container: torch.dtype) -> Tensor:
    return data.to(device, container if data.is_floating_point() else data.dtype)


def _fingerprint(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().reshape(-1).cpu().numpy())
    return digest.hexdigest()


def _backward(
    task: Task,
    model: nn.Module,
    scaler: GradScaler,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    y: Tensor,
    batch: Tensor,
    micro_batches: int,
) -> float:
    """Gradients of a batch, part by part; gives its loss."""
    optimizer.zero_grad()
    total = 0.0
    for part in batch.tensor_split(min(micro_batches, len(batch))):
        loss = task.loss(model(x[part]), y[part])
        if micro_batches > 1:
            loss = loss * (len(part) / len(batch))
        scaler.scale(loss).backward()
        total += loss.item()
    return total


def _rate(schedule: str, warmup: int, step: int, total: int) -> float:
    """The learning rate of a step over the largest."""
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    share = (step - warmup) / max(total - warmup, 1)
    return (1 + math.cos(math.pi * share)) / 2 if schedule == "cosine" else 1 - share


def _evaluate(
    task: Task, model: nn.Module, test: Sequence[Tensor], seed: int, cards: Sequence[str]
) -> dict[str, float]:
    """The task's metrics on its test data, computed in the format, with noise of their own."""
    model.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=cards):
        torch.manual_seed(seed)
        outputs = torch.cat([model(part) for part in test[0].split(EVALUATED)])
        return {name: float(metric(outputs, test[1])) for name, metric in task.metrics.items()}


def _make_optimizer(
    name: str, model: nn.Module, learning_rate: float, momentum: float, weight_decay: float
) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": learning_rate, "weight_decay": weight_decay}
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), momentum=momentum, **options)
    return (torch.optim.Adam if name == "adam" else torch.optim.AdamW)(model.parameters(), **options)
