"""Scales of layers in real float16 (`ada_loss.GradScaler(layers=model)`) on models that it was not designed with.

    python benchmarks/native.py [--only models] [--only costs] [--write]

models: each of native_models.py trains for twenty steps under torch.autocast. Before and after, the gradients of its
parameters are compared with float32's: the relative error of each parameter's, of which the median is shown, beside
that of the best constant loss scale of 2^0 to 2^24; and the share of gradients that are zero where float32's are not.
A model whose first gradients are not finite is asked again, as a step that is skipped does, and the passes are shown.
costs: whole training steps of a GPT-2 with scales of layers over those with torch.amp.GradScaler, in pairs, by the
processor time of one thread, with the operations and the walk over the graph. Few CPUs multiply float16, others take
a hundred times as long as for float32, beside which nothing would show: products are of float32 here, and rounded.
Prints tables (models: before, after), and with --write keeps them in benchmarks/results/native.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from native_models import subjects
from parity_models import Subject
from report import machine
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ada_loss
from ada_loss.layerwise.native import NativeScaling
from ada_loss.layerwise.native_graph import plan_of
from ada_loss.rules.layer import Fixed

RESULTS = Path(__file__).parent / "results" / "native.json"
STEPS = 20
CONSTANTS = tuple(2.0**k for k in range(25))
GOAL = 1.1  # times the error of the best constant
LOST = 0.001  # share of gradients above which a model is named


@dataclass(frozen=True)
class Found:
    """How far the gradients of a model are from float32's.

    error: of its parameters, the median. lost: share that is zero where float32's is not. best: log2 of the constant.
    passes: how many backward passes were needed until all gradients were finite.
    """

    error: float
    lost: float
    best: int
    best_error: float
    best_lost: float
    passes: int

    @property
    def ratio(self) -> float:
        return self.error / self.best_error


@dataclass(frozen=True)
class Row:
    name: str
    before: Found
    after: Found
    skipped: int
    losses: tuple[float, float]

    @property
    def is_met(self) -> bool:
        return max(self.before.ratio, self.after.ratio) <= GOAL and all(map(math.isfinite, self.losses))


def loss_of(subject: Subject, *, is_half: bool = True) -> Tensor:
    with torch.autocast("cpu", torch.float16, enabled=is_half):
        logits = subject.model(**subject.inputs)["logits"]
    return nn.functional.cross_entropy(logits.float().flatten(0, -2), subject.target.flatten())


def gradients(model: nn.Module, loss: Tensor, scale: Callable[[Tensor], Tensor] = lambda loss: loss) -> list[Tensor]:
    model.zero_grad()
    scale(loss).backward(retain_graph=True)
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def error(found: list[Tensor], true: list[Tensor]) -> float:
    each = [float((g - t).norm() / t.norm()) for g, t in zip(found, true, strict=True) if t.any()]
    return statistics.median(math.inf if math.isnan(e) else e for e in each)


def lost(found: list[Tensor], true: list[Tensor]) -> float:
    zeros = sum(int(((g == 0) & (t != 0)).sum()) for g, t in zip(found, true, strict=True))
    return zeros / sum(int((t != 0).sum()) for t in true)


def compared(subject: Subject) -> Found:
    model = subject.model
    true = gradients(model, loss_of(subject, is_half=False))
    loss = loss_of(subject)
    layers = ada_loss.GradScaler(layers=model).layers
    assert layers is not None
    ours, passes = gradients(model, loss, layers.scale), 1
    while passes < STEPS and not all(bool(g.isfinite().all()) for g in ours):
        layers.overflowed()
        ours, passes = gradients(model, loss, layers.scale), passes + 1
    others = []
    for constant in CONSTANTS:
        found = [g / constant for g in gradients(model, loss, lambda loss, c=constant: loss * c)]  # type: ignore[misc]
        others.append((error(found, true), int(math.log2(constant)), lost(found, true)))
    best = min(others)
    return Found(error(ours, true), lost(ours, true), best[1], best[0], best[2], passes)


def trained(subject: Subject) -> tuple[int, tuple[float, float]]:
    """How many of the steps were skipped, and the first and the last loss."""
    model, skipped, losses = subject.model, 0, []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = ada_loss.GradScaler(layers=model)
    optimizer.zero_grad()  # the constants' gradients
    for _ in range(STEPS):
        loss = loss_of(subject)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        skipped += scaler.overflowed(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return skipped, (losses[0], losses[-1])


def models() -> Iterator[Row]:
    for subject in subjects():
        subject.model.eval()  # without dropout, so that two passes are of one function
        before = compared(subject)
        skipped, losses = trained(subject)
        yield Row(subject.name, before, compared(subject), skipped, losses)


def with_fast_products() -> torch.library.Library:
    """Let the CPU multiply matrices of float16 in float32, until what is returned is dropped."""

    def mm(a: Tensor, b: Tensor) -> Tensor:
        out = torch.empty(a.shape[0], b.shape[1])
        return torch.mm(a.float(), b.float(), out=out).to(a.dtype)

    def bmm(a: Tensor, b: Tensor) -> Tensor:
        out = torch.empty(*a.shape[:2], b.shape[2])
        return torch.bmm(a.float(), b.float(), out=out).to(a.dtype)

    def addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        out = torch.empty(a.shape[0], b.shape[1])
        return torch.addmm(c.float(), a.float(), b.float(), beta=beta, alpha=alpha, out=out).to(a.dtype)

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they take the place of torch's own kernels
        for name, function in (("mm", mm), ("bmm", bmm), ("addmm", addmm)):
            library.impl(name, function, "CPU")
    return library


def gpt2_step(make_scaler: Callable[[nn.Module], Any], tokens: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A GPT-2, and a whole training step of it, which returns the loss."""
    torch.manual_seed(0)
    size = {"n_embd": 256, "n_layer": 4, "n_head": 8, "n_positions": 128, "bos_token_id": 1, "eos_token_id": 1}
    config = transformers.GPT2Config(vocab_size=1024, attn_implementation="eager", **size)
    model = transformers.GPT2LMHeadModel(config).eval()
    x, scaler = torch.randint(0, 1024, (tokens // 128, 128)), make_scaler(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        with torch.autocast("cpu", torch.float16):
            logits = model(input_ids=x).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), x[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return model, step


FORMS: dict[str, tuple[Callable[[nn.Module], Any], float | None]] = {
    "GradScaler('torch'), no layers": (lambda model: ada_loss.GradScaler("torch"), None),
    "a factor at every step": (lambda model: ada_loss.GradScaler(layers=model), 1.2),
    "a factor at each 100th step": (
        lambda model: ada_loss.GradScaler(layers=NativeScaling(model, update_every=100)),
        1.03,
    ),
    "all factors 1, of each 100th step": (
        lambda model: ada_loss.GradScaler(layers=NativeScaling(model, Fixed(1.0), update_every=100)),
        1.0,
    ),
}


class Operations(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def costs(pairs: int, tokens: int) -> Iterator[tuple[str, float, float, float | None, int]]:
    """For each form: its name, its time over torch's, the error of that, the goal, and the operations that it adds."""
    products = with_fast_products()
    try:
        _, theirs = gpt2_step(lambda model: torch.amp.GradScaler("cpu", init_scale=1.0), tokens)
        for name, (make, goal) in FORMS.items():
            _, ours = gpt2_step(make, tokens)
            for _ in range(3):
                theirs(), ours()
            with Operations() as plain:
                theirs()
            with Operations() as scaled:
                ours()
            ratios, runs = [], [theirs, ours]
            for _ in range(pairs):
                seconds = {}
                for run in runs:
                    began = time.process_time()
                    run()
                    seconds[run] = time.process_time() - began
                runs.reverse()
                ratios.append(seconds[ours] / seconds[theirs])
            spread = statistics.stdev(ratios) / math.sqrt(pairs)
            yield name, statistics.median(ratios), spread, goal, scaled.count - plain.count
    finally:
        del products


def walk() -> tuple[int, float]:
    """How many nodes the graph of the loss has, and microseconds for each that planning takes, the fastest of many."""
    model, step = gpt2_step(lambda model: ada_loss.GradScaler("torch"), 128)
    root, names = step().clone().grad_fn, {id(p): name for name, p in model.named_parameters()}
    nodes, seconds = len(plan_of(root, names).arrivals), []
    for _ in range(100):
        began = time.process_time()
        plan_of(root, names)
        seconds.append(time.process_time() - began)
    return nodes, 1e6 * min(seconds) / nodes


def print_models() -> list[dict[str, Any]]:
    title = ["model", *("error", "best constant", "ratio") * 2, "lost", "lost by that", "skipped", "loss"]
    print(f"| {' | '.join(title)} |", "|" + " --- |" * len(title), sep="\n")
    rows = []
    for row in models():
        rows.append(row)
        cells = [row.name]
        for found in (row.before, row.after):
            passes = "" if found.passes == 1 else f" ({found.passes} passes)"
            cells += [f"{found.error:.2e}{passes}", f"{found.best_error:.2e} (2^{found.best})", f"{found.ratio:.2f}"]
        both = row.before, row.after
        cells += [f"{max(f.lost for f in both):.3%}", f"{max(f.best_lost for f in both):.3%}"]
        cells += [str(row.skipped), f"{row.losses[0]:.2f} to {row.losses[1]:.2f}"]
        print("| " + " | ".join(cells) + " |", flush=True)
    missed = [row.name for row in rows if not row.is_met]
    loses = [row.name for row in rows if max(row.before.lost, row.after.lost) > LOST]
    print(f"{len(rows)} models; above {GOAL} times the best constant: {', '.join(missed) or 'none'};", end=" ")
    print(f"more than {LOST:.1%} lost: {', '.join(loses) or 'none'}")
    return [{**asdict(row), "met": row.is_met} for row in rows]


def print_costs(pairs: int, tokens: int) -> dict[str, Any]:
    rows = []
    for name, ratio, spread, goal, operations in costs(pairs, tokens):
        met = None if goal is None else ratio - 2 * spread <= goal
        verdict = "" if goal is None else f"   goal <= {goal:g}: {'met' if met else 'MISSED'}"
        print(
            f"{name:36} {ratio:6.3f} +- {2 * spread:.3f} of torch's, {operations:5} operations more{verdict}",
            flush=True,
        )
        row = {"name": name, "value": round(ratio, 4), "error": round(spread, 4), "goal": goal, "met": met}
        rows.append({**row, "operations": operations})
    nodes, microseconds = walk()
    print(f"the walk: {nodes} nodes, {microseconds:.1f} us each")
    return {
        "tokens": tokens,
        "pairs": pairs,
        "steps": rows,
        "nodes": nodes,
        "microseconds a node": round(microseconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("models", "costs"), action="append")
    parser.add_argument("--pairs", type=int, default=16, help="of steps, for costs")
    parser.add_argument("--tokens", type=int, default=1024, help="of a step, for costs, a multiple of 128")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # with two, each product waits for the other where a core is busy
    wanted = arguments.only or ["models", "costs"]
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found["machine"] = machine()
    for name in wanted:
        found[name] = print_models() if name == "models" else print_costs(arguments.pairs, arguments.tokens)
        if arguments.write:
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
