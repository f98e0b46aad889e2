"""The formats of a model before it is trained: of its modules, and of every site of one step."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fpsim
from ada_loss.files import data_frame
from ada_loss.lab.tasks import Task, find_task, is_of_library
from ada_loss.lab.tasks.task import is_pair
from fpsim import FormatLike

__all__ = ["Description", "describe"]

BATCH = 8


@dataclass(frozen=True)
class Description:
    """The formats of a model. `str` returns two tables.

    modules: a row for each module, with its format for each role.
    sites: the tallies of every site of one training step; empty for a model without a task.
    """

    modules: list[dict[str, str]]
    sites: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for JSON."""
        return {"modules": self.modules, "sites": self.sites}

    def __len__(self) -> int:
        return len(self.modules)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return str(self)

    def to_frame(self) -> Any:
        """Return the sites as a pandas.DataFrame, or the modules if there are no sites."""
        return data_frame(self.sites or self.modules)

    def __str__(self) -> str:
        words = _columns(self.modules, list(self.modules[0]))
        if not self.sites:
            return words
        rows = [
            {
                **{name: str(row[name]) for name in ("site", "role", "format")},
                "elements": str(row["count"]),
                "underflow": f"{row['underflow']:.2%}",
                "overflow": f"{row['overflow']:.2%}",
            }
            for row in self.sites
        ]
        head = f"The sites of one step of {BATCH} samples, forward and backward:"
        return f"{words}\n\n{head}\n{_columns(rows, list(rows[0]))}"


def describe(name: str, fmt: FormatLike = "fp16") -> Description:
    """Quantise a model, and describe it.

    name: the name of a task, or "module:function" for a function that returns a task or a model. A function with a
        parameter is called with the seed 0.
    fmt: a format for every role, or a Policy.
    Raises ValueError for an unknown name, TypeError for a function that returns neither a task nor a model.

    >>> description = describe("digits", "e5m2")
    >>> description.modules[1]["module"], description.modules[1]["error"]
    ('stem', 'e5m2 nearest_even')
    >>> [row["site"] for row in description.sites if row["role"] == "weight"][0]
    'stem:weight'
    """
    function = find_task(name)
    made = function(0) if is_of_library(name) else _call(name, function)
    if not isinstance(made, Task | nn.Module):
        raise TypeError(f"{name} gave a {type(made).__name__}. Expected: a torch.nn.Module, or a Task of ada_loss.lab.")
    model = fpsim.quantize(made.model if isinstance(made, Task) else made, fmt)
    modules = [{**row._asdict()} for row in fpsim.summary(model)]
    return Description(modules, _sites(made, model) if isinstance(made, Task) else [])


def _call(name: str, function: Any) -> Any:
    """Call a function, with the seed 0 if it has a required parameter.

    The function of a task has this parameter; the function of a model usually has none.
    """
    try:
        required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    except (TypeError, ValueError):
        required = []
    wanted = [p for p in required if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if len(wanted) > 1:
        raise ValueError(f"{name} needs {len(wanted)} arguments. Expected: a function of a seed, or of nothing.")
    return function(0) if wanted else function()


def _sites(task: Task, model: nn.Module) -> list[dict[str, Any]]:
    batch = task.train if is_pair(task.train) else next(iter(task.train))
    x, y = (t[:BATCH] for t in batch)
    # Samples and dropout must not change the state of the caller's random numbers.
    with torch.random.fork_rng(devices=[]):
        # The batch has prompts, but the loss takes samples, which are drawn from the prompts.
        if task.play is not None:
            x, y = task.play(model, x, y)
        with fpsim.record(model) as record:
            task.loss(model(x), y).backward()
    return record.rows()


def _columns(rows: list[dict[str, str]], names: list[str]) -> str:
    widths = [max(len(name), *(len(str(row[name])) for row in rows)) for name in names]
    lines = [names, ["-" * width for width in widths], *([str(row[name]) for name in names] for row in rows)]
    return "\n".join("  ".join(word.ljust(w) for word, w in zip(line, widths)).rstrip() for line in lines)
