"""What a glance at a tensor tells."""

from __future__ import annotations

import math

import pytest
import tiers
import torch
from torch import nn

import fpsim
from fpsim.insight.ranges import Ends, Glance, expected_error, glance
from fpsim.tensors.spec import any_spec

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


NATIVE = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3fn": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


def in_blocks(x: torch.Tensor, levels: int, largest: float) -> torch.Tensor:
    """Integers up to `largest`, at a scale for each row, by hand."""
    scale = x.abs().amax(-1, keepdim=True) / largest
    return (x / scale).round().clamp(-levels, levels) * scale


@tiers.parametrize("name", [*NATIVE, "int8 per 32 fp32", "int4 per 32 fp32"], keep=["e4m3fn", "int4 per 32 fp32"])
def test_the_error_that_is_expected_is_that_of_normal_numbers(name: str) -> None:
    x = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
    largest = {"int8": 127, "int4": 7}.get(name[:4], 0)
    rounded = in_blocks(x, largest, largest) if largest else x.to(NATIVE[name]).float()
    error = float((rounded - x).norm() / x.norm())
    # a binade's normal numbers are not quite even, and the largest of 32 is seldom just sqrt(2 log(32)) deviations
    assert expected_error(any_spec(name)) == pytest.approx(error, rel=0.25)


def test_the_error_that_is_expected_of_other_roundings_is_that_of_their_variance() -> None:
    """Of an error that is even between two values: ulp**2 / 12 to nearest, / 6 stochastically, / 3 downwards."""
    nearest, stochastic, down = (expected_error(any_spec("e4m3fn", r)) for r in ("nearest_even", "stochastic", "down"))
    assert stochastic == pytest.approx(nearest * math.sqrt(2))
    assert down == pytest.approx(nearest * 2)
    assert expected_error(torch.bfloat16) == pytest.approx(expected_error(any_spec("bf16")))


def test_a_format_with_scales_has_ends_where_the_scale_is_known() -> None:
    """448 and 2**-9 are those of e4m3fn."""
    ends = Ends.of_spec(any_spec("e4m3fn per tensor fp32 delayed"), 0.5)
    assert (ends.largest, ends.smallest) == (896.0, 2.0**-8)
