"""Scaling methods side by side on one task, over several seeds: the runs and their table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from joblib import Parallel, delayed
from tqdm.auto import tqdm

import fpsim
from ada_loss.lab.plots import method_words
from ada_loss.lab.tasks import deep_digits
from ada_loss.lab.train import make_scaling, train
from fpsim import Policy

__all__ = ["COLUMNS", "FORMATS", "METHODS", "as_method", "method_table", "run_methods"]

# The gradients' formats; "nan" behind one lets an overflow become NaN where the format would saturate.
FORMATS = ("e5m2", "e4m3fn nan", "e4m3fn")
METHODS: tuple[str | float, ...] = (
    "none",
    *(2.0**k for k in range(1, 21)),
    *("torch", "nnabla", "cerebras", "approx_range", "abs_range", "exact", "abs_range normal", "exact normal"),
)
EPOCHS = 40
COLUMNS = ("format", "method", "seed", "accuracy", "skipped", "scale")


def as_method(word: str) -> str | float:
    """A method from a word of the command line: a number is a constant scale.

    >>> as_method("1024"), as_method("torch")
    (1024.0, 'torch')
    """
    try:
        return float(word)
    except ValueError:
        return word


def _policy(fmt: str) -> Policy:
    """Gradients of activations and of weights in the format, all else in float32."""
    name, _, overflow = fmt.partition(" ")
    return Policy(error=name, weight_grad=name, overflow=dict.fromkeys(("error", "weight_grad"), overflow or None))


def _cell(fmt: str, method: str | float, seed: int, epochs: int) -> dict[str, Any]:
    torch.set_num_threads(1)  # tensors this small are faster so, and two runs do not share a core
    policy = None if fmt == "fp32" else _policy(fmt)
    options: dict[str, Any] = {"optimizer": "adam", "learning_rate": 1e-3, "epochs": epochs, "seed": seed}
    run = train(deep_digits(seed), policy, scaling=method, **options)
    words = {"format": fmt, "method": str(method), "seed": seed}
    return {**words, "accuracy": run.metrics["accuracy"], "skipped": run.skipped, "scale": run.scales[-1]}


def run_methods(
    formats: Sequence[str] = FORMATS,
    methods: Sequence[str | float] = METHODS,
    *,
    seeds: int = 5,
    epochs: int = EPOCHS,
    workers: int = 1,
    show_progress: bool = True,
) -> list[dict[str, Any]]:
    """Train `deep_digits` in float32, and with each format and method, once for each seed; a row for each run.

    A row holds format, method, seed, accuracy on the test images, skipped (steps) and scale (the loss's, at the end).

    >>> rows = run_methods(["e5m2"], ["none"], seeds=1, epochs=1, show_progress=False)
    >>> [(row["format"], row["method"]) for row in rows]
    [('fp32', 'none'), ('e5m2', 'none')]
    """
    for fmt in formats:
        _policy(fmt)
    probe = fpsim.quantize(torch.nn.Linear(1, 1), None)
    for method in methods:  # what cannot be is said before anything runs
        _, adaptive = make_scaling(method, probe)
        if adaptive is not None:
            adaptive.detach()
    cells = [
        (fmt, m, seed)
        for fmt, m in [("fp32", "none"), *((f, m) for f in formats for m in methods)]
        for seed in range(seeds)
    ]
    jobs = Parallel(n_jobs=workers, return_as="generator")(delayed(_cell)(*cell, epochs) for cell in cells)
    return list(tqdm(jobs, total=len(cells), unit="run", disable=not show_progress))


def method_table(rows: Sequence[dict[str, Any]]) -> str:
    """Mean and standard deviation of the test accuracy over the seeds, in %, as Markdown: methods down, formats across.

    >>> print(method_table([dict(format="e5m2", method=m, seed=0, accuracy=0.5) for m in ("none", "1024.0")]))
    | scaling | e5m2 |
    |---|---|
    | none | 50.0 |
    | 2^10 | 50.0 |
    """
    formats = [f for f in dict.fromkeys(row["format"] for row in rows) if f != "fp32"]
    lines = ["| scaling | " + " | ".join(formats) + " |", "|---" * (1 + len(formats)) + "|"]
    float32 = [row["accuracy"] for row in rows if row["format"] == "fp32"]
    if float32:
        lines.append("| float32 | " + " | ".join([_mean(float32)] * len(formats)) + " |")
    for method in dict.fromkeys(row["method"] for row in rows if row["format"] != "fp32"):
        found = [[r["accuracy"] for r in rows if (r["format"], r["method"]) == (fmt, method)] for fmt in formats]
        lines.append(f"| {method_words(method)} | " + " | ".join(map(_mean, found)) + " |")
    return "\n".join(lines)


def _mean(accuracies: Sequence[float]) -> str:
    mean = 100 * statistics.mean(accuracies)
    return f"{mean:.1f}" if len(accuracies) == 1 else f"{mean:.1f} ± {100 * statistics.stdev(accuracies):.1f}"
