"""Frame of all classics: measurements by setting and seed, resumed after an interruption, and three output files."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fpsim
from ada_loss.files import csv_bytes, folder_at, mapping_in, write_atomically
from ada_loss.lab.devices import device_problem, float32_in_full, require_device_name
from ada_loss.lab.environment import versions
from ada_loss.lab.results.figures import figure_bytes
from ada_loss.lab.studies.classics.papers import Paper
from ada_loss.lab.studies.classics.telling import Row, Rows
from ada_loss.lab.tasks import Task
from ada_loss.lab.training import Run, train
from ada_loss.lab.training.generators import kept_generators, seed_generators
from fpsim.checks import is_whole, shown

__all__ = ["ByHand", "Classic", "Reproduction", "Setting", "perceptron", "reproduce", "trained"]

Setting = Row
# By chance, all of 5 seeds show an effect in the expected direction in 1 of 32 cases.
SEEDS, QUICK_SEEDS = 5, 2
MOST_SEEDS = 1000


@dataclass(frozen=True)
class Classic:
    """A published effect, with the functions that measure, judge, describe and draw it.

    settings: a function from whether the run is quick to the settings: mappings from names to words or numbers.
    measure: a function from a setting, a seed and a device to rows of numbers; the generators are seeded before.
    holds: a function from the rows of one seed to whether the rows show the effect, in direction and size.
    says: a function from all rows to sentences with the measured numbers; line breaks in a sentence do not matter.
    draw: a function from all rows to a matplotlib figure.
    """

    settings: Callable[[bool], Sequence[Setting]]
    measure: Callable[[Setting, int, str], list[Row]]
    holds: Callable[[Rows], bool]
    says: Callable[[Rows], Iterable[str]]
    draw: Callable[[Rows], Any]

    def verdict(self, rows: Rows) -> str:
        """Return in words whether the effect is there: in all seeds, in none, or in some, so that one cannot tell."""
        seeds = rows.distinct("seed")
        count = sum(self.holds(rows.of(seed=seed)) for seed in seeds)
        if count == len(seeds):
            return f"The effect is there in all of {count} seeds."
        if count == 0:
            return f"The effect is not there in any of {len(seeds)} seeds."
        return f"One cannot tell whether the effect is there: it is in {count} of {len(seeds)} seeds."

    def text(self, paper: Paper, rows: Rows) -> str:
        """Return the paragraphs: the claim, the observation, the limits."""
        seen = " ".join(" ".join([self.verdict(rows), *self.says(rows)]).split())
        return "\n\n".join(
            (f"# {paper.title}", f"**Claim.** {paper.claim}", f"**What you see.** {seen}")
            + (f"**What is not shown at this size.** {paper.limits}",)
        )


@dataclass(frozen=True)
class Reproduction:
    """Result of `reproduce`. `str` returns the paragraphs.

    rows: the rows of all measurements, each with the setting, the seed, and one or several numbers.
    seconds: the processor time, including the time of stored measurements of earlier runs.
    files: the paths of the picture, the rows as CSV, and the paragraphs as Markdown.
    """

    rows: Rows
    text: str
    seconds: float
    files: list[Path]

    def __str__(self) -> str:
        return self.text


def reproduce(
    name: str,
    classic: Classic,
    paper: Paper,
    *,
    seeds: int | Sequence[int] | None = None,
    device: str = "cpu",
    out: str | Path = "runs/classics",
    quick: bool = False,
    progress: Callable[[str], object] | None = None,
) -> Reproduction:
    """Measure each setting with each seed, unless the folder has the measurement, and write the three files.

    Each measurement is stored atomically in a separate file. A run that was killed can therefore be resumed, and two
    runs may share a folder. A stored measurement of another release, torch or device is not used.

    Args:
        name: the name of the classic.
        classic: the measurement.
        paper: the paper that is reproduced.
        seeds: the number of seeds, counted from 0, or a list of seeds; None for 5 seeds, or for 2 with `quick`.
        device: "cpu" or "cuda".
        out: the folder for NAME.png, NAME.csv, NAME.md and the measurements; a quick run writes NAME-quick.png etc.
        quick: whether to run fewer and shorter measurements, which take some 30 seconds.
        progress: a function that is called with a line of text after each measurement.

    Raises:
        ValueError: for invalid seeds, and for a device or a folder that cannot be used.
    """
    folder, chosen = folder_at(out), _seeds(seeds, quick)
    require_device_name(device)
    if problem := device_problem(device):
        raise ValueError(problem)
    asked = [{**setting, "seed": seed} for setting in classic.settings(quick) for seed in chosen]
    rows = Rows()
    seconds = 0.0
    for i, one in enumerate(asked, 1):
        found = _measured(classic, one, device, folder / name)
        rows += [{**one, **row} for row in found["rows"]]
        seconds += found["seconds"]
        if progress is not None:
            words = ", ".join(f"{key} {value}" for key, value in one.items())
            progress(f"{i} of {len(asked)}: {words}: {found['seconds']:.1f} s of the processor")
    text = classic.text(paper, rows)
    columns = [*dict.fromkeys(key for row in rows for key in row)]
    # All three contents are made before the first file is written, so that an error does not mix files of two runs.
    contents = {"png": figure_bytes(classic.draw(rows)), "csv": csv_bytes(rows, columns), "md": f"{text}\n".encode()}
    files = [folder / f"{name}{'-quick' * quick}.{kind}" for kind in contents]
    for path, content in zip(files, contents.values(), strict=True):
        write_atomically(path, content)
    return Reproduction(rows, text, seconds, files)


def _seeds(seeds: object, quick: bool) -> list[int]:
    if seeds is None:
        seeds = QUICK_SEEDS if quick else SEEDS
    if is_whole(seeds, 1) and seeds <= MOST_SEEDS:  # type: ignore[operator]
        return list(range(int(seeds)))  # type: ignore[call-overload]
    is_list = isinstance(seeds, Sequence) and not isinstance(seeds, str) and 0 < len(seeds) == len({*seeds})
    if is_list and all(is_whole(seed, 0) and seed < 2**32 for seed in seeds):  # type: ignore[attr-defined]
        return [int(seed) for seed in seeds]  # type: ignore[attr-defined]
    raise ValueError(
        f"seeds={shown(seeds)} is neither how many nor which. Expected: 1 to {MOST_SEEDS}, or different integers from "
        f"0 to 2**32 - 1."
    )


def _measured(classic: Classic, asked: Setting, device: str, folder: Path) -> dict[str, Any]:
    """Return the rows of a setting and a seed, and the seconds of their measurement; from a file if there is one."""
    key = json.dumps({**asked, **_made_with(device)}, sort_keys=True)
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.json"
    # A damaged file gives {}, and the measurement is repeated.
    kept = mapping_in(path)
    # The whole key is compared, because the name of the file has only a part of the key's hash.
    if kept.get("asked") == key:
        return kept
    # Processor time is measured, so that other processes on the machine do not count.
    began = time.process_time()
    with _alone(device):
        seed_generators(asked["seed"])
        setting = {name: value for name, value in asked.items() if name != "seed"}
        rows = classic.measure(setting, asked["seed"], device)
    kept = {"asked": key, "seconds": time.process_time() - began, "rows": rows}
    write_atomically(path, json.dumps(kept).encode())
    return kept


def _made_with(device: str) -> dict[str, Any]:
    """Return the other conditions of a measurement, in addition to setting and seed."""
    # These conditions are in the key of the file: a measurement of another release, torch or device is not reused.
    return {"bits": fpsim.BITS, "device": device, **{name: versions()[name] for name in ("ada-loss", "torch")}}


@contextmanager
def _alone(device: str) -> Iterator[None]:
    """Run the block in one thread, and restore the generators and the number of threads at its end.

    In one thread, sums have a fixed order, and processor time equals wall time.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with kept_generators([device] * device.startswith("cuda")), float32_in_full(device):
            yield
    finally:
        torch.set_num_threads(threads)


def trained(make_task: Callable[[int], Task], seed: int, device: str, fmt: Any = None, **options: Any) -> Run:
    """Train a task by the lab's `train`, with the task's options; the options given here override them."""
    shared = {**getattr(make_task, "options", {}), "seed": seed, "device": device}
    return train(make_task(seed), fmt, **{**shared, **options})


def perceptron(*sizes: int) -> nn.Sequential:
    """Return linear layers with ReLU between them, with Glorot and Bengio's normal weights and zero biases.

    >>> perceptron(784, 10)
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=784, out_features=10, bias=True)
    )
    """
    linear = [nn.Linear(*pair) for pair in pairwise(sizes)]
    for layer in linear:
        nn.init.xavier_normal_(layer.weight)
        nn.init.zeros_(layer.bias)
    between = [part for layer in linear[1:] for part in (nn.ReLU(), layer)]
    return nn.Sequential(nn.Flatten(), linear[0], *between)


class ByHand:
    """A task on a device, for a classic that runs the training steps itself, and not by the lab's `train`.

    model: the model that is trained: the task's model, or another one.
    size: the number of training examples.
    """

    def __init__(self, task: Task, device: str, model: nn.Module | None = None) -> None:
        assert isinstance(task.train, tuple)
        assert isinstance(task.test, tuple)
        self._task, self.size = task, len(task.train[0])
        self.model = (task.model if model is None else model).to(device)
        self._train, self.test = ([x.to(device) for x in pair] for pair in (task.train, task.test))

    def step(self, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
        """Run a training step with the examples of these indices. Returns the loss before the step."""
        inputs, targets = self._train
        optimizer.zero_grad()
        loss = self._task.loss(self.model(inputs[batch]), targets[batch])
        loss.backward()
        optimizer.step()
        return loss.item()

    def steps(self, optimizer: torch.optim.Optimizer, batches: Iterable[Tensor]) -> None:
        """Run a training step with each batch of indices."""
        for batch in batches:
            self.step(optimizer, batch)

    def metric(self) -> float:
        """Return the task's first metric on the test data."""
        with torch.no_grad():
            return next(iter(self._task.metrics.values()))(self.model(self.test[0]), self.test[1])
