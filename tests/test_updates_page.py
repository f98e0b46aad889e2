"""The page docs/updates.md: its names are those of `fpsim.UPDATES`, and what it writes runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fpsim
from fpsim import UPDATES, Update, quantize_optimizer

PAGE = (Path(__file__).parents[1] / "docs" / "updates.md").read_text()


def rows_of(title: str) -> list[list[str]]:
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_table_has_each_update_by_name():
    assert [row[0].strip("` ") for row in rows_of("Updates by name")] == list(UPDATES)


def ways() -> list[str]:
    """What the right column says to write, where that is complete."""
    found = [way for row in rows_of("Coming from other libraries") for way in re.findall(r"`([^`]+)`", row[-1])]
    return [way for way in found if "..." not in way]


@pytest.mark.parametrize("way", ways())
def test_what_comes_from_other_libraries_runs(way):
    params = [nn.Parameter(torch.randn(64, 64))]
    names = {"quantize_optimizer": quantize_optimizer, "Update": Update, "params": params, "fpsim": fpsim}
    optimizer = torch.optim.AdamW(params)
    found = eval(way, {**names, "opt": optimizer, "AdamW": torch.optim.AdamW})
    if not isinstance(found, fpsim.QuantizedOptimizer):
        found = quantize_optimizer(optimizer, found)
    params[0].grad = torch.ones(64, 64)
    optimizer.step()
    assert not found.update.is_float32


def test_the_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    model = nn.Linear(3, 3)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    names: dict = {"model": model, "train": train}
    exec(code, names)
    assert len(names["lost"].rows()) == 2


def test_the_update_without_a_name_is_the_named_one():
    (words,) = re.findall(r"Without a name, the same update is `(.*?)`", PAGE)
    assert eval(words, {"fpsim": fpsim}) == UPDATES["bf16_sr"]
