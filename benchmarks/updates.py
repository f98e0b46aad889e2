"""What stored formats cost the `chars` task, and what they lose: the table of docs/updates.md. And what they take.

    python benchmarks/updates.py --rate 3e-4 --seeds 1
    python benchmarks/updates.py --rate 3e-4 --figure docs/updates.png
    python benchmarks/updates.py --speed --elements 4194304
    python benchmarks/updates.py --recording

AdamW, 200 steps of 32 sequences, weight decay 0.01, a warm-up of 20 steps and a cosine to a tenth of the rate.
Speed is processor time on one thread, the least of some repetitions, beside copies and plain AdamW in the same run.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

import fpsim
from ada_loss.files import write_atomically
from ada_loss.lab.results.figures import DASHES, colour, figure_bytes
from ada_loss.lab.tasks.chars import bits_per_character, chars
from fpsim import Update
from fpsim.insight.pictures import new_picture
from fpsim.insight.rows import Rows
from fpsim.models.storing import store_
from fpsim.policies.update import state_storage

UPDATES = {
    "float32": Update(),
    "bf16 nearest": Update(weight="bf16"),
    "bf16 stochastic": Update(weight="bf16", rounding="stochastic"),
    "bf16 Kahan": Update(weight="bf16", compensation="kahan"),
    "8-bit states": fpsim.UPDATES["adam8bit"],
    "FP8-LM": fpsim.UPDATES["fp8_lm"],
}


@dataclass(frozen=True)
class Training:
    """What one training ended in, and what is drawn of it.

    losses: of each step, in bits. lost: share of lost updates, by recorded step. norms: weights of norms at the end.
    """

    bits: float
    share_lost: float | None
    edq: float | None
    losses: list[float]
    lost: dict[int, float]
    norms: list[float]

    @property
    def still(self) -> float:
        """The share of norm weights that are what they began as."""
        return self.norms.count(1.0) / len(self.norms)


def train(update: Update, rate: float, seed: int, steps: int = 200) -> Training:
    """One training with what its updates lost."""
    task = chars(seed)
    model, (inputs, targets) = task.model, task.train
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    quantized = fpsim.quantize_optimizer(optimizer, update, model, seed=seed)
    warm, last = 20, 0.1
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min((i + 1) / warm, 1) * (last + (1 - last) * (1 + math.cos(math.pi * i / steps)) / 2),
    )
    losses = []
    with fpsim.lost_updates(quantized, every=10) as lost:
        for _ in range(steps):
            batch = torch.randint(len(inputs), (32,))
            optimizer.zero_grad()
            loss = task.loss(model(inputs[batch]), targets[batch])
            losses.append(loss.item() / math.log(2))
            loss.backward()
            optimizer.step()
            schedule.step()
    norms = [p for name, p in model.named_parameters() if "norm" in name and name.endswith("weight")]
    with torch.no_grad():
        bits = bits_per_character(model(task.test[0]), task.test[1])
    by_step = {row["step"]: row["lost"] for row in lost.steps() if row["lost"] is not None}
    ends = torch.cat([p.detach().flatten() for p in norms]).tolist()
    return Training(bits, lost.share, lost.edq, losses, by_step, ends)


def figure_of(trainings: Mapping[str, Training], rate: float) -> Figure:
    """Loss, lost updates, and where the weights of the norms ended."""
    picture = new_picture(9.6, 3.1)
    loss, lost, norms = picture.subplots(1, 3)
    ends = [x for training in trainings.values() for x in training.norms]
    low, high = min(ends), max(ends)
    edges = torch.linspace(low - 1e-4, high + 1e-4, 61)
    for i, (name, training) in enumerate(trainings.items()):
        look: dict[str, Any] = {
            "color": colour(i),
            "linestyle": DASHES[i % len(DASHES)],
            "linewidth": 1.3,
            "label": name,
        }
        losses = [statistics.mean(training.losses[max(j - 9, 0) : j + 1]) for j in range(len(training.losses))]
        loss.plot(range(1, len(losses) + 1), losses, **look)
        lost.plot([*training.lost], [100 * share for share in training.lost.values()], **look)
        counts = torch.histogram(torch.tensor(training.norms), edges).hist
        width = float(edges[1] - edges[0])
        heights = (counts / counts.max() * 0.85).tolist()
        norms.bar(edges[:-1].tolist(), heights, width, bottom=-i, align="edge", color=colour(i))
    loss.set(xlabel="step", ylabel="loss in bits, mean of 10 steps", title=f"AdamW at {rate:g}")
    lost.set(xlabel="step", ylabel="lost updates in %", ylim=(-2, 102), title="updates that change nothing")
    norms.set(xlabel="value at the end", title="weights of the norms, all 1 at first")
    norms.set_yticks(range(0, -len(trainings), -1), [*trainings], fontsize=8)
    for axes in (loss, lost, norms):
        axes.title.set_fontsize(9)
        axes.spines[["top", "right"]].set_visible(False)
    picture.legend(*loss.get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    return picture


def seconds_of(runs: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """The least processor time of each call, after one that compiles; in turn, so that all meet the same machine."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(repetitions + 1):
        for name, run in runs.items():
            began = time.process_time()
            run()
            if repetition:
                times[name].append(time.process_time() - began)
    return {name: min(seconds) for name, seconds in times.items()}


def stepping(update: Update | str | None, elements: int, every: int | None = None) -> Callable[[], object]:
    """A step of AdamW on one parameter; ten of them where every tenth is recorded."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(elements))
    optimizer = torch.optim.AdamW([p], lr=1e-3)
    quantized = None if update is None else fpsim.quantize_optimizer(optimizer, update)
    p.grad = torch.randn(elements)
    record = None if every is None or quantized is None else fpsim.lost_updates(quantized, every)

    def steps() -> None:
        for _ in range(1 if record is None else record.every):
            optimizer.step()

    return steps


def peers(elements: int) -> dict[str, Callable[[], object]]:
    """Steps of torchao's optimizers, compiled as it does, where it is installed. bitsandbytes has none for a CPU."""
    try:
        from torchao.optim import AdamW8bit, _AdamW
    except ImportError:
        return {}
    torch.manual_seed(0)
    steps: dict[str, Callable[[], object]] = {}
    for name, make, dtype in (
        ("torchao AdamW8bit", AdamW8bit, torch.float32),
        ("torchao _AdamW, bf16_stochastic_round", partial(_AdamW, bf16_stochastic_round=True), torch.bfloat16),
    ):
        p = torch.nn.Parameter(torch.randn(elements, dtype=dtype))
        p.grad = torch.randn(elements, dtype=dtype)
        steps[name] = make([p], lr=1e-3).step
    return steps


def speed(elements: int, repetitions: int) -> Rows:
    """Processor time of what is stored: of copies, of two 8-bit states, of steps; with the ratio to what is beside."""
    torch.set_num_threads(1)
    a, b = torch.randn(elements), torch.rand(elements)
    to = torch.empty(elements)
    update = fpsim.UPDATES["adam8bit"]
    states = [(a, state_storage(update, "exp_avg")), (b, state_storage(update, "exp_avg_sq"))]

    def copies() -> None:
        for x in (a, b, a, b):
            to.copy_(x)

    def two_states() -> None:
        for x, storage in states:
            assert storage is not None
            store_(x, storage)

    weights = Update(weight="bf16", rounding="stochastic")
    names = ("bf16_sr", "bf16_remainder", "adam8bit", "fp8_lm", "bf16")
    runs: dict[str, Callable[[], object]] = {
        "copy two float32 tensors twice": copies,
        "encode and decode two 8-bit states": two_states,
        "AdamW": stepping(None, elements),
        **{f"AdamW, {name}": stepping(name, elements) for name in names},
        "AdamW, bf16 weights alone, stochastically": stepping(weights, elements),
        "the same, lost updates of each tenth step": stepping(weights, elements, 10),
    }
    *_, alone, recorded = runs
    runs |= peers(elements)
    times = seconds_of(runs, repetitions)
    times[recorded] /= 10
    beside = {**dict.fromkeys(runs, "AdamW"), **dict.fromkeys([*runs][:2], next(iter(runs))), recorded: alone}
    return Rows(
        {"what": name, "seconds": seconds, "ratio": seconds / times[beside[name]], "to": beside[name]}
        for name, seconds in times.items()
    )


def recording(pairs: int = 6, steps: int = 20) -> list[float]:
    """The time of a step of `chars` with lost updates of every tenth recorded, in that of one without, in pairs."""
    torch.set_num_threads(1)
    task = chars(0)
    model, (inputs, targets) = task.model, task.train
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    quantized = fpsim.quantize_optimizer(optimizer, "bf16_sr", model)

    def run() -> float:
        began = time.process_time()
        for _ in range(steps):
            batch = torch.randint(len(inputs), (32,))
            optimizer.zero_grad()
            task.loss(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
        return time.process_time() - began

    run()
    ratios = []
    for _ in range(pairs):
        plain = run()
        with fpsim.lost_updates(quantized, every=10):
            ratios.append(run() / plain)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--speed", action="store_true", help="Measure what storing takes, not what it loses.")
    parser.add_argument("--recording", action="store_true", help="Measure what recording adds to a training step.")
    parser.add_argument("--elements", type=int, default=2**22)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--figure", help="Draw the trainings of seed 0 there.")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    if arguments.recording:
        ratios = recording()
        print(f"{statistics.median(ratios):.3f} of a step without, {min(ratios):.3f} to {max(ratios):.3f}")
        return
    if arguments.speed:
        print(speed(arguments.elements, arguments.repetitions))
        return
    torch.set_num_threads(1)
    rows, first = Rows(), {}
    for name, update in UPDATES.items():
        for seed in range(arguments.seeds):
            trained = train(update, arguments.rate, seed, arguments.steps)
            first.setdefault(name, trained)
            values = {
                "bits": trained.bits,
                "lost": trained.share_lost,
                "edq": trained.edq,
                "norm weights at 1": trained.still,
            }
            rows.append({"update": name, "rate": arguments.rate, "seed": seed, **values})
            print(rows[-1], flush=True)
    print(rows)
    if arguments.figure:
        write_atomically(Path(arguments.figure), figure_bytes(figure_of(first, arguments.rate)))


if __name__ == "__main__":
    main()
