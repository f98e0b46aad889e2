"""Tasks for the tests of the sweep: a real but tiny training, and every way in which one goes wrong."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ada_loss.lab.tasks import Task, accuracy
from ada_loss.lab.tasks.task import trained_with


def tiny(seed: int) -> Task:
    """A logistic regression of 8 points: a few milliseconds."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 2, generator=generator)
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.randn(2, 2, generator=generator))
        model.bias.zero_()
    y = (x[:, 0] > 0).long()
    return Task("tiny", model, (x, y), (x, y), nn.functional.cross_entropy, {"accuracy": accuracy})


def measured_in_tensors(seed: int) -> Task:
    """A metric as many write it; of the seed 1, one that is not a number at all."""
    task = tiny(seed)

    def share(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        right = (outputs.argmax(dim=1) == targets).float()
        return right if seed == 1 else right.mean()

    return Task("tensors", task.model, task.train, task.test, task.loss, {"accuracy": share})  # type: ignore[dict-item]


class Autocast(nn.Sequential):
    """Two layers in half, and a loss whose gradients 8 bits lose without a scale."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(nn.Linear(2, 8), nn.Linear(8, 2))
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", self.dtype):
            return super().forward(x).float()


def _in_half(seed: int, dtype: torch.dtype) -> Task:
    task = tiny(seed)
    torch.manual_seed(seed)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets) * 2.0**-20

    return replace(task, model=Autocast(dtype), loss=loss)


@trained_with(optimizer="adam", learning_rate=0.1, batch_size=8, schedule="constant")
def in_bfloat16(seed: int) -> Task:
    return _in_half(seed, torch.bfloat16)


@trained_with(optimizer="adam", learning_rate=0.1, batch_size=8, schedule="constant")
def in_float16(seed: int) -> Task:
    return _in_half(seed, torch.float16)


def slow(seed: int) -> Task:
    time.sleep(0.15)
    return tiny(seed)


def raises(seed: int) -> Task:
    if seed == 1:
        raise RuntimeError("seed 1 is not to be had.")
    return tiny(seed)


def diverges(seed: int) -> Task:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets) * math.inf

    task = tiny(seed)
    return Task("diverges", task.model, task.train, task.test, loss, task.metrics)


def hangs_in_python(seed: int) -> Task:
    while seed == 1:
        time.sleep(0.01)
    return tiny(seed)


def hangs_in_c(seed: int) -> Task:
    if seed == 1:
        time.sleep(10_000)
    return tiny(seed)


def kills_its_worker(seed: int) -> Task:
    if seed == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return tiny(seed)


def kills_its_worker_once(seed: int) -> Task:
    """The first time it runs, as a file in the folder of an environment variable tells."""
    mark = Path(os.environ["SWEEP_TEST_MARK"]) / f"died-{seed}"
    if seed == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return tiny(seed)


def eats_memory(seed: int) -> Task:
    hoard = []
    while seed == 1:
        hoard.append(torch.ones(2**22))  # 16 MiB
        time.sleep(0.02)  # as fast as real ones grow, and slow enough for the watch every 100 ms
    return tiny(seed)


@trained_with(steps=1, learning_rate=0.0)
def sorts(seed: int) -> Task:
    """Points to the left and to the right of 1, told apart by a threshold: it takes four bits of an activation.

    In steps of an eighth between 0 and 2, so that 0.875 and 1.125 need 1 + 3 significant bits, and no training at all.
    """
    x = torch.arange(1, 16).reshape(-1, 1) / 8 + seed * 0.0
    y = (x[:, 0] > 1).long()
    model = nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0], [1.0]]))
        model.bias.copy_(torch.tensor([1.0, 0.0]))
    keep = (x[:, 0] != 1).nonzero().flatten()
    return Task(
        "sorts", model, (x[keep], y[keep]), (x[keep], y[keep]), nn.functional.cross_entropy, {"accuracy": accuracy}
    )


@trained_with(optimizer="adam", learning_rate=0.02, epochs=40, batch_size=89)
def wines(seed: int) -> Task:
    """Three kinds of wine by 13 measurements as they were taken, from 0.1 to 1,680, which the first layer normalises.

    In e4m3fn, which ends at 448, it would cut off the most telling one; the layers behind it have small numbers.
    """
    from sklearn.datasets import load_wine

    values, kinds = load_wine(return_X_y=True)
    x, y = torch.tensor(values, dtype=torch.float32), torch.tensor(kinds)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [part for width in (13, 16, 16) for part in (nn.Linear(width, 16), nn.ReLU())]
        model = nn.Sequential(nn.BatchNorm1d(13), *layers, nn.Linear(16, 3))
    train, test = (x[::2], y[::2]), (x[1::2], y[1::2])
    return Task("wines", model, train, test, nn.functional.cross_entropy, {"accuracy": accuracy})


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def raises_oddly(seed: int) -> Task:
    """Exceptions that are not to stop a sweep: another for each seed below 6."""
    odd = (
        ValueError("file \udcff"),
        ValueError("x" * 5_000_000 + "the end"),
        GeneratorExit("closed"),
        asyncio.CancelledError("gone"),
        Unreadable(),
        BaseExceptionGroup("many", [SystemExit(3)]),
    )
    if seed < len(odd):
        raise odd[seed]
    return tiny(seed)


def oddly_measured(seed: int) -> Task:
    """Metrics with the names of other columns, and with what matplotlib takes for a formula."""
    task = tiny(seed)
    names = (r"cost $\foo$", "format", "seed", "underflow", "items", "values", "a<b>&'\"", "_x", "$")
    metrics = dict.fromkeys(names, accuracy)
    return Task("odd", task.model, task.train, task.test, task.loss, metrics)


def measured_without_a_name(seed: int) -> Task:
    task = tiny(seed)
    return Task("unnamed", task.model, task.train, task.test, task.loss, {3: accuracy} if seed else task.metrics)  # type: ignore[dict-item]


def writes_a_mark(seed: str) -> None:
    """What nobody is to call: its seed is a file's name."""
    Path(str(seed)).touch()


def moment() -> None:
    """Called for each sample of `noisy`; tests put something else here."""


class Noisy(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples with noise of every global generator."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        moment()
        x = torch.randn(2) + np.random.rand() + random.random()  # noqa: NPY002
        return x, torch.tensor(index % 2)


def noisy(seed: int) -> Task:
    """A task that seeds nothing, neither its model nor its data."""
    loader = torch.utils.data.DataLoader(Noisy(), batch_size=3, shuffle=True)
    test = (torch.randn(6, 2), torch.arange(6) % 2)
    return Task("noisy", nn.Linear(2, 2), loader, test, nn.functional.cross_entropy, {"accuracy": accuracy})


INTERRUPTED_AFTER = 0  # steps of all trainings together; 0 for never


def counted(seed: int) -> Task:
    """`tiny`, which adds a byte for each step to the file that an environment variable names.

    Another variable has the number of steps of one training at which the process is killed, once.
    """
    file, dies_after = Path(os.environ["SWEEP_TEST_STEPS"]), int(os.environ.get("SWEEP_TEST_DIES_AFTER", 0))
    own = itertools.count(1)

    def count(x: torch.Tensor) -> torch.Tensor:
        with file.open("ab") as opened:
            opened.write(b".")
            taken = opened.tell()
        mark = file.with_name("died")
        if next(own) == dies_after and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if taken == INTERRUPTED_AFTER:
            raise KeyboardInterrupt
        return x

    task = tiny(seed)
    return Task("counted", task.model, task.train, task.test, task.loss, task.metrics, count)


def with_a_goal(seed: int) -> Task:
    """A metric whose name tells no direction, with a goal."""
    return replace(without_a_goal(seed), goal="minimize")


def without_a_goal(seed: int) -> Task:
    return replace(tiny(seed), metrics={"speed": accuracy})


def with_bits_in_its_loss(seed: int) -> Task:
    """A metric that falls with every bit of the weights: the share of the output that rounding changed."""
    task = tiny(seed)
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.25, 1.25], [1.25, 1.25]]))  # with one bit of mantissa: 1 or 1.5

    def nll(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        x = task.test[0]  # type: ignore[index]
        exact = x @ torch.full((2, 2), 1.25)
        return float(((outputs - exact).abs() / exact.abs()).max())

    return replace(task, model=model, loss=lambda outputs, targets: 0.0 * outputs.sum(), metrics={"val_nll": nll})


@trained_with(optimizer="adam", learning_rate=0.01, epochs=4, schedule="constant")
def faint(seed: int) -> Task:
    """Four layers, and a loss so small that float16 loses the gradients of the first ones. The batches have an order.

    The metrics judge it after 12 steps.
    """
    generator = torch.Generator().manual_seed(seed)
    batches = [(x := torch.randn(16, 8, generator=generator), x[:, :4].argmax(1)) for _ in range(3)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [layer for width in (8, 32, 32) for layer in (nn.Linear(width, 32), nn.GELU())]
        model = nn.Sequential(*layers, nn.Linear(32, 4))

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets) * 2.0**-18

    def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return float(nn.functional.cross_entropy(outputs, targets))

    return Task("faint", model, batches, batches, loss, {"cross_entropy": cross_entropy, "accuracy": accuracy})


def in_steps(x: torch.Tensor, axis: int) -> torch.Tensor:
    """An operand of products: 15 steps from the smallest to the largest number along the axis that is summed over."""
    step = x.abs().amax(axis, keepdim=True).clamp(min=1e-30) / 7
    return (x / step).round() * step


no_operand = 3
