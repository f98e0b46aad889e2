"""The table of operations: every spelling that torch has leads to one row, and every pointwise function has one."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpsim
from fpsim.emulation.operations import TABLE, Kind, canonical, row_of, spelling_of

SPACES = (Tensor, torch, torch.nn.functional, torch.special, torch.linalg)
# Pointwise functions without a row, and why.
WITHOUT_A_ROW: dict[str, str] = {}


@pytest.mark.parametrize(
    ("spelling", "name", "is_swapped"),
    [
        ("div", "div", False),
        ("div_", "div", False),
        ("divide_", "div", False),
        ("true_divide", "div", False),
        ("__truediv__", "div", False),
        ("itruediv", "div", False),
        ("__rtruediv__", "div", True),
        ("rdiv", "div", True),
        ("_foreach_div_", "div", False),
        ("rsub", "sub", True),
        ("__radd__", "add", False),
        ("__rpow__", "pow", True),
        ("special_gammaln", "lgamma", False),
        ("special_expit", "sigmoid", False),
        ("_threshold", "threshold", False),
        ("linalg_vector_norm", "vector_norm", False),
        ("isinf", "isinf", False),  # no sinf in place
        ("round", "round", False),
        ("index_add_", "index_add", False),  # it has no row
    ],
)
def test_a_spelling_leads_to_the_row_of_its_operation(spelling: str, name: str, is_swapped: bool) -> None:
    assert canonical(spelling) == name
    assert spelling_of(spelling).is_swapped == is_swapped


def test_arguments_are_found_by_position_by_name_and_swapped() -> None:
    assert spelling_of("div").get(1, (1.0, 2.0), {}) == 2.0
    assert spelling_of("div").get(1, (1.0,), {"other": 2.0}) == 2.0
    assert spelling_of("div").get(0, (), {"input": 1.0, "other": 2.0}) == 1.0
    assert spelling_of("rdiv").get(1, (1.0, 2.0), {}) == 1.0
    assert spelling_of("pow").find(1, (1.0,), {"exponent": 2.0}) == "exponent"
    assert spelling_of("addcdiv").get(2, (1.0, 2.0, 3.0), {"value": 4.0}) == 3.0
    assert spelling_of("log").get(0, (), {}) is None


def test_no_name_is_in_two_rows() -> None:
    names = [name for row in TABLE.values() for name in (row.name, *row.spellings)]
    assert [name for name in {*names} if names.count(name) > 1] == []


def documented() -> Iterator[tuple[str, str]]:
    """The name of each function of torch that its documentation calls the same as another one, and the other's."""
    said = re.compile(r"^(?:.*\n)*?\s*(?:Alias for|In-place version of) :(?:func|meth):`~?\.?([\w.]+)", re.MULTILINE)
    for space in SPACES:
        for name in dir(space):
            found = said.match(inspect.getdoc(getattr(space, name, None)) or "")
            if found:
                yield name, found[1].rpartition(".")[2].removesuffix("()")


def test_what_torch_documents_as_an_alias_or_as_in_place_has_the_same_row() -> None:
    pairs = [*documented()]
    assert len(pairs) > 150
    wrong = [(name, other) for name, other in pairs if canonical(name) != canonical(other)]
    assert [(a, b) for a, b in wrong if {row_of(a).kind, row_of(b).kind} != {Kind.OTHER}] == []


def is_pointwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


def test_every_pointwise_function_of_torch_has_a_row() -> None:
    functions = [f for group in torch.overrides.get_overridable_functions().values() for f in group]
    names = {getattr(f, "__name__", "") for f in functions} | {n for n in dir(torch) if n.startswith("_foreach_")}
    names |= {
        f"special_{n}" for n in dir(torch.special) if isinstance(getattr(torch.special, n), types.BuiltinFunctionType)
    }
    pointwise = {n for n in names if is_pointwise(n)}
    assert len(pointwise) > 200
    without = {n for n in pointwise if row_of(n).kind is Kind.OTHER}
    assert without == {*WITHOUT_A_ROW}


@pytest.mark.parametrize(
    ("function", "alias"), [(torch.log1p, torch.special.log1p), (torch.logit, torch.special.logit)]
)
def test_minus_infinity_saturates_in_each_spelling(function: Any, alias: Any) -> None:
    x, pole = torch.ones(2), -1.0 if function is torch.log1p else 0.0
    for f in (function, alias):

        class Model(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return f(x * pole)  # noqa: B023

        assert fpsim.quantize(Model(), "e4m3fn")(x).tolist() == [-448.0, -448.0]
