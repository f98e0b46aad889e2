"""What a network's heads lose of their gradients in small formats, after a training in float32.

    python benchmarks/heads.py detection --steps 256

prints for each layer, format and scaling method the relative error of its weight gradient against float32, and site by
site the share of the gradient's elements that became zero. docs/tasks.md quotes it.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch

import fpsim
from ada_loss.lab.tasks import find_task
from ada_loss.lab.tasks.task import Task
from ada_loss.lab.training.methods import make_scaling

SEED, BATCH = 300, 32


def trained(task: Task, steps: int, learning_rate: float) -> torch.nn.Module:
    """The task's model after some steps of Adam in float32."""
    model = copy.deepcopy(task.model)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    x, y = task.train  # type: ignore[misc]
    draw = torch.Generator().manual_seed(SEED)
    for _ in range(steps):
        chosen = torch.randint(len(x), (BATCH,), generator=draw)
        optimizer.zero_grad()
        task.loss(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
    return model


def gradients(task: Task, model: torch.nn.Module, fmt: str | None, scaling: Any) -> tuple[dict[str, Any], list[Any]]:
    """The weight gradients of one batch, unscaled, and the tallies of what was rounded."""
    emulated = fpsim.quantize(model, fpsim.Policy(error=fmt, weight_grad=fmt))
    scaler, adaptive = make_scaling(scaling, emulated)
    x, y = (part[:BATCH] for part in task.train)
    with fpsim.record(emulated) as record:
        for _ in range(2):  # adaptive scaling may choose by the last step
            emulated.zero_grad()
            scaler.scale(task.loss(emulated(x), y)).backward()
    if adaptive is not None:
        adaptive.detach()
    scale = scaler.get_scale()
    return {name: p.grad / scale for name, p in emulated.named_parameters() if p.ndim > 1}, record.rows()


def main() -> None:
    """Print the table of a task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = find_task(options.task)(SEED)
    model = trained(task, options.steps, options.learning_rate)
    true, _ = gradients(task, model, None, "none")
    columns: dict[str, tuple[dict[str, float], dict[str, float]]] = {}
    for fmt in ("fp16", "e5m2", "e4m3fn"):
        for scaling in ("none", 1024.0, "adaptive"):
            rounded, rows = gradients(task, model, fmt, scaling)
            errors = {name: float((rounded[name] - one).norm() / one.norm()) for name, one in true.items()}
            lost: dict[str, list[int]] = {}
            for row in rows:
                if row["role"] == "error":
                    both = lost.setdefault(row["site"].rpartition(":")[0] or row["site"], [0, 0])
                    both[0] += row["underflow_count"]
                    both[1] += row["nonzero"]
            columns[f"{fmt} {scaling}"] = (errors, {site: a / max(b, 1) for site, (a, b) in lost.items()})
    print(f"| layer | {' | '.join(columns)} |\n| --- | {' | '.join('---:' for _ in columns)} |")
    for name in true:
        print(f"| {name} | {' | '.join(f'{errors[name]:.2g}' for errors, _ in columns.values())} |")
    print(f"| all | {' | '.join(f'{sum(e.values()) / len(e):.2g}' for e, _ in columns.values())} |")
    print("Share of the gradients of results that became zero, by site:")
    for site in next(iter(columns.values()))[1]:
        print(f"| {site} | {' | '.join(f'{lost.get(site, 0.0):.1%}' for _, lost in columns.values())} |")


if __name__ == "__main__":
    main()
