"""What a glance at a tensor tells."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fpsim
from fpsim.insight.ranges import Glance, glance

END, HALF = torch.finfo(torch.float32).max, torch.finfo(torch.float16).max
NAN, INF = math.nan, math.inf

CASES = {
    "numbers": (torch.tensor([-2.0, 0.0, 3.0]), Glance(3, 2, -2.0, 3.0, largest=END), "-2 to 3, 1 of 3 zero"),
    "one number": (torch.tensor(2.5), Glance(1, 1, 2.5, 2.5, largest=END), "2.5"),
    "nothing": (torch.empty(0), Glance(0, 0, 0.0, 0.0, largest=END), "0"),
    "integers": (
        torch.tensor([3, 0]),
        Glance(2, 1, 0.0, 3.0, largest=torch.finfo(torch.float64).max),
        "0 to 3, 1 of 2 zero",
    ),
    "infinities": (
        torch.tensor([1.0, INF, -INF, NAN, NAN]),
        Glance(5, 5, 1.0, 1.0, nan=2, plus=1, minus=1, largest=END),
        "1 to 1, 1 of 5 inf, 1 of 5 -inf, 2 of 5 NaN",
    ),
    "NaN only": (torch.tensor([NAN]), Glance(1, 1, 0.0, 0.0, nan=1, largest=END), "1 of 1 NaN"),
    "a mask": (torch.tensor([-END, 0.5, 2.0]), Glance(3, 3, 0.5, 2.0, ends=1, largest=END), "0.5 to 2"),
    "the end of half, which is a number": (
        torch.tensor([-HALF, 1.0], dtype=torch.float16),
        Glance(2, 2, -HALF, 1.0, largest=HALF),
        "-6.55e+04 to 1",
    ),
    "sparse": (
        torch.tensor([0.0, 4.0, INF]).to_sparse(),
        Glance(2, 2, 4.0, 4.0, plus=1, largest=END),
        "4 to 4, 1 of 2 inf",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_glance_counts_and_bounds_what_a_tensor_holds(name: str) -> None:
    x, expected, words = CASES[name]
    assert glance(x) == expected
    assert str(glance(x)) == words


@pytest.mark.parametrize(
    ("x", "kinds", "worst"),
    [([1.0], set(), None), ([NAN, -INF], {"NaN", "-inf"}, "NaN"), ([INF, -INF], {"inf", "-inf"}, "inf")],
)
def test_kinds_are_those_that_are_there(x: list[float], kinds: set[str], worst: str | None) -> None:
    found = glance(torch.tensor(x))
    assert found.kinds == kinds
    assert worst is None or found.worst == worst


def test_diagnose_looks_at_sparse_gradients_too() -> None:
    table, indices = nn.Embedding(8, 4, sparse=True), torch.tensor([1, 2])
    assert not fpsim.diagnose(table, lambda: table(indices).sum().backward())
    found = fpsim.diagnose(table, lambda: table(indices).sum().backward(torch.tensor(INF)))
    assert found.cause is not None
    assert (found.cause["site"], found.cause["role"], found.cause["kind"]) == (":sum", "error", "inf")
