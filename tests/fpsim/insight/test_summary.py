"""A summary prints in 100 columns: equal modules on one line, products where a layer multiplies, nothing left out."""

from __future__ import annotations

import re
from itertools import product

import pytest
import torch
from torch import nn

import fpsim
from fpsim.insight.summary import Line, grouped, shown_in


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.feed_forward = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.norm = nn.LayerNorm(8)


class Model(nn.Module):
    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 10)


def members(name: str) -> list[str]:
    """The modules that a line stands for, spelled out by other code than the one that joined them."""
    ways = []
    for part in name.split("."):
        if re.fullmatch(r"[0-9,-]+", part):
            ends = [list(map(int, run.split("-"))) for run in part.split(",")]
            ways.append([str(i) for run in ends for i in range(run[0], run[-1] + 1)])
        else:
            ways.append([part])
    return [".".join(parts) for parts in product(*ways)]


@pytest.mark.parametrize("fmt", ["recipe:nvfp4", "recipe:mxfp8", "bf16", "e2m1fn per 16x16 e4m3fn fp32 saturate"])
def test_a_large_model_has_a_line_for_a_group_and_100_columns(fmt: str) -> None:
    rows = fpsim.summary(fpsim.quantize(Model(), fmt))
    table = str(rows).split("\n\n")[0].splitlines()
    assert max(map(len, str(rows).splitlines())) <= 100
    assert len(table) <= 24 < len(rows)
    printed = [line.split()[:3] for line in table[2:]]
    assert [name for module, *_ in printed for name in members(module)] != []
    assert sorted(name for module, *_ in printed for name in members(module)) == sorted(row.module for row in rows)
    by_name = {row.module: row for row in rows}
    for module, count, kind in printed:
        assert int(count) == len(members(module))
        assert len({by_name[name][1:] for name in members(module)}) == 1  # each is what the line says
        assert by_name[members(module)[0]].type == kind


def test_products_stand_where_a_layer_multiplies_by_a_weight() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.ModuleList([nn.Linear(32, 32), nn.ReLU(), nn.Conv1d(32, 32, 3)])
            self.mine = nn.ParameterList([nn.Parameter(torch.ones(32, 32))])

    for attention, where in ((False, {"body.0", "body.2", "mine"}), (True, None)):
        policy = fpsim.Policy(products=fpsim.Products.all("mxfp8_e4m3", attention=attention))
        rows = fpsim.summary(fpsim.quantize(Net(), policy))
        lines = str(rows).splitlines()[2:]
        printed = {line.split()[0] for line in lines if re.search(r"  (mxfp8_e4m3|A$)", line)}
        assert {row.module for row in rows if row.products} == {row.module for row in rows}  # the rows say it of all
        assert printed == ({row.module for row in rows} if where is None else where)


def test_a_group_is_split_where_its_modules_are_not_a_range_in_each_place() -> None:
    pairs = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (4, 0)]
    lines = grouped(Line(f"a.{i}.b.{j}.c", 1, "Linear", ("bf16",), "", "") for i, j in pairs)
    assert [(line.module, line.modules) for line in lines] == [("a.0-1.b.0-1.c", 4), ("a.2,4.b.0.c", 2)]
    kinds = grouped(Line(f"{i}", 1, kind, (), "", "") for i, kind in enumerate(["Linear", "ReLU"] * 2))
    assert [(line.module, line.type) for line in kinds] == [("0,2", "Linear"), ("1,3", "ReLU")]


def test_what_is_too_long_for_the_table_stands_below_it_whole() -> None:
    operands = "fprop=(e4m3fn per 128x128 fp32 nearest_even, e4m3fn per 128x128 fp32 nearest_even)"
    line = Line(
        "x" * 120,
        1,
        "Linear",
        ("bf16 nearest_even", "e5m2 stochastic", "bf16 nearest_even", "float32"),
        operands,
        "exp",
    )
    text = shown_in([line], ("weight", "activation", "error", "weight_grad"))
    assert max(map(len, text.splitlines())) <= 100
    words = " ".join(text.split())
    assert f"A: {operands}" in words
    assert "1: weight=bf16, activation=e5m2 stochastic, error=bf16, weight_grad=float32" in words
    assert "a: exp" in words
    assert "Rounding is nearest_even where none is named." in words
    assert re.search(r"x+\.\.\.x+ ", text)


def test_a_short_table_has_every_module_and_every_word_in_its_place() -> None:
    text = str(fpsim.summary(fpsim.quantize(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "bf16")))
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["(model)", "0", "1"]
    assert text.count("bf16 nearest_even") == 12
