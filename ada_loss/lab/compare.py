"""Formats side by side on one task: the runs, their table, the files that are left behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tqdm.auto import tqdm

import fpsim
from ada_loss.lab.tasks import Task
from ada_loss.lab.train import train

__all__ = ["COLUMNS", "FORMATS", "compare", "format_table", "underflow_share"]

FORMATS = ("fp32", "fp16", "bf16", "cb16", "e5m2", "e4m3fn")
COLUMNS = ("format", "rounding", "accuracy", "underflow", "seconds")


def underflow_share(rows: Sequence[dict[str, Any]], role: str = "error") -> float:
    """Share of the non-zero elements of a role's tensors that became zero when they were rounded."""
    chosen = [row for row in rows if row["role"] == role]
    nonzero = sum(row["nonzero"] for row in chosen)
    return sum(row["underflow"] for row in chosen) / nonzero if nonzero else 0.0


def compare(
    make_task: Callable[[int], Task],
    formats: Sequence[str] = FORMATS,
    roundings: Sequence[str] = ("nearest_even", "stochastic"),
    *,
    epochs: int = 12,
    seed: int = 0,
    record_every: int = 4,
    show_progress: bool = True,
) -> list[dict[str, Any]]:
    """Train the task once for each format and rounding (fp32 once) and give a row for each.

    A row holds the columns of the table and, under "sites", the tallies of the recorded sites.
    Raises ValueError for an unknown format before any training starts.
    """
    cells = [(fmt, rounding) for fmt in formats for rounding in roundings]
    for fmt, _ in cells:
        fpsim.as_format(fmt)
    wide = fpsim.as_format("fp32")
    cells = [(f, r) for f, r in cells if fpsim.as_format(f) != wide or r == roundings[0]]
    task = make_task(seed)
    steps = len(cells) * epochs * -(-len(task.train[0]) // 64)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small are faster so, and seconds do not depend on who else computes
    try:
        return _runs(task, cells, steps, epochs, seed, record_every, show_progress)
    finally:
        torch.set_num_threads(threads)


def _runs(
    task: Task,
    cells: Sequence[tuple[str, str]],
    steps: int,
    epochs: int,
    seed: int,
    record_every: int,
    show_progress: bool,
) -> list[dict[str, Any]]:
    results = []
    with tqdm(total=steps, unit="step", disable=not show_progress) as bar:
        for fmt, rounding in cells:
            bar.set_description(f"{fmt} {rounding}")
            run = train(task, fmt, rounding, epochs=epochs, seed=seed, record_every=record_every, progress=bar.update)
            share = underflow_share(run.rows)
            values = (fmt, rounding, run.metrics["accuracy"], share, run.seconds)
            results.append({**dict(zip(COLUMNS, values, strict=True)), "sites": run.rows})
    return results


def format_table(results: Sequence[dict[str, Any]]) -> str:
    """The table of `compare` as text, one line a run.

    >>> print(format_table([dict(format="fp16", rounding="up", accuracy=0.5, underflow=0.125, seconds=1.0)]))
    format   rounding      accuracy  underflow  seconds
    fp16     up              50.0 %    12.50 %      1.0
    """
    lines = [f"{'format':8} {'rounding':13} {'accuracy':>8}  {'underflow':>9}  {'seconds':>7}"]
    for row in results:
        percent = f"{100 * row['accuracy']:6.1f} %  {100 * row['underflow']:7.2f} %"
        lines.append(f"{row['format']:8} {row['rounding']:13} {percent}  {row['seconds']:7.1f}")
    return "\n".join(lines)
