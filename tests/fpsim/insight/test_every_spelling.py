"""What `why` says of an operation is the same in every spelling that torch has.

The spellings are found by walking torch: each function whose canonical name is that of a row of the table, with its
arguments by position, by name and with `out=`; tensors or numbers beside the tensor in which a number is planted; lists
of tensors for `torch._foreach_*`. What an operation in place wrote is read from the tensor, not from what it returns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpsim
from fpsim.emulation.operations import TABLE, Domain, Kind, Row, canonical, spelling_of

SPACES = {"torch": torch, "Tensor": Tensor, "F": torch.nn.functional, "special": torch.special}
REFUSALS = (TypeError, RuntimeError, NotImplementedError)
X = "x"  # among arguments: the tensor in which a number is planted
# What these need beside it.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("xlogy", "xlog1py", "igamma", "igammac"), (2.0, X)),
    **dict.fromkeys(("zeta", "ldexp"), (X, 2.0)),
    "polygamma": (1, X),
    "mvlgamma": (X, 2),
    "mul": (X, 1e5),
}
# Of a number far from 0 they give NaN or a number, or they need a degree.
SATURATE = ("erfcx", "modified_bessel_i1", "i1", *(name for name in TABLE if "polynomial" in name))


@dataclass(frozen=True)
class Plant:
    """A number for which an operation gives inf or NaN, one for which it gives a number, and what is to be said."""

    row: Row
    kind: str
    bad: float
    good: float = 0.75
    arguments: tuple[Any, ...] = (X,)

    def __str__(self) -> str:
        return f"{self.row.name}-{self.kind.replace(' ', '_')}"


def plants_of(row: Row) -> Iterator[Plant]:
    arguments = ARGUMENTS.get(row.name, (X,))
    if row.divides is not None:
        yield Plant(row, "division by zero", 0.0, arguments=(*(2.0,) * row.divides, X))
    if row.kind is Kind.POWER:
        yield Plant(row, "division by zero", 0.0, arguments=(X, -1.5))
        yield Plant(row, "root of a negative number", -0.5, arguments=(X, 0.5))
        if row.name == "pow":
            yield Plant(row, "overflow", 1e20, arguments=(X, 2.0))
    if row.domain is not None:
        yield from outside(row, row.domain, arguments)
    if row.kind is Kind.GAMMA:
        yield Plant(row, "outside of its domain", 0.0, 1.75, arguments)
    if row.kind in (Kind.GROWING, Kind.MULTIPLICATION) and row.name not in SATURATE:
        yield Plant(row, "overflow", 3e38, arguments=arguments)
    if row.kind is Kind.ADDITION:
        yield Plant(row, "overflow", 3e38, arguments=(X, -3e38 if row.name == "sub" else 3e38))


def outside(row: Row, domain: Domain, arguments: tuple[Any, ...]) -> Iterator[Plant]:
    """Numbers at the borders of a domain and beyond them."""
    at = below = "root of a negative number" if row.kind is Kind.ROOT else "outside of its domain"
    if row.kind is Kind.LOGARITHM:
        at, below = "logarithm of zero", "logarithm of a negative number"
    good = domain.low + 0.25
    if not domain.holds_low:
        yield Plant(row, at, domain.low, good, arguments)
    yield Plant(row, below, domain.low - 0.5, good, arguments)
    if domain.high < math.inf:
        yield Plant(row, "outside of its domain", domain.high + 0.5, good, arguments)


PLANTS = [plant for row in TABLE.values() for plant in plants_of(row)]
FIRST_OF_ITS_KIND = [*{(plant.row.kind, plant.kind): plant for plant in reversed(PLANTS)}.values()]


@dataclass(frozen=True)
class Spelling:
    """One way to write an operation, with its arguments by "position", by "name", or with "out"."""

    name: str  # "Tensor.div_"
    function: Any
    form: str = "position"
    are_tensors: bool = False
    is_reversed: bool = False  # of numbers that are degrees: torch.polygamma(1, x), and x.polygamma(1)
    has_gradient: bool = True  # torch has none through `out=`, and of some functions

    @property
    def writes(self) -> bool:
        name = self.name.rpartition(".")[2]
        return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")

    def compute(self, plant: Plant, x: Tensor) -> Tensor:
        """The tensor that holds the result afterwards."""
        name = self.name.rpartition(".")[2]
        x = x.double() if name == "float_power_" else x  # it takes no other dtype
        values = [x if a == X else a for a in plant.arguments]
        if self.are_tensors:
            values = [torch.full_like(x, a, requires_grad=False) if isinstance(a, float) else a for a in values]
        if spelling_of(name).is_swapped or self.is_reversed:
            values = values[::-1]
        if name.startswith("_foreach_"):
            values = [[a] if isinstance(a, Tensor) else a for a in values]
        if self.form == "name":
            out = self.function(**dict(zip(plant.row.arguments, values, strict=False)))
        else:
            out = self.function(*values, **({"out": torch.empty_like(x)} if self.form == "out" else {}))
        out = values[0] if self.writes else out
        return out[0] if isinstance(out, list | tuple) else out


def spellings_of(plant: Plant) -> Iterator[Spelling]:
    """Those that run, the plain one first."""
    for space, owner in SPACES.items():
        for name in dir(owner):
            function = getattr(owner, name, None)
            if not callable(function) or canonical(name) != plant.row.name:
                continue
            forms = [(s, replace(s, has_gradient=False)) for s in forms_of(f"{space}.{name}", function)]
            found = [s for s in (next((s for s in both if runs(s, plant)), None) for both in forms) if s is not None]
            assert found, f"{space}.{name} was called in no way that it takes"
            yield from found


def forms_of(name: str, function: Any) -> Iterator[Spelling]:
    for are_tensors in (False, True):
        for form in ("position", "name", "out"):
            for is_reversed in (False, True):
                yield Spelling(name, function, form, are_tensors, is_reversed)


def runs(spelling: Spelling, plant: Plant) -> bool:
    """Whether torch takes a call, and gives inf or NaN for the planted number alone."""
    if spelling.is_reversed and not any(isinstance(a, int) for a in plant.arguments):
        return False
    if spelling.are_tensors and not any(isinstance(a, float) for a in plant.arguments):
        return False
    x = torch.tensor([[plant.good, plant.bad]], requires_grad=spelling.has_gradient)
    try:
        out = spelling.compute(plant, x * 1)
        if isinstance(out, Tensor) and out.requires_grad:
            out.sum().backward()
    except REFUSALS:
        return False
    return isinstance(out, Tensor) and out.isfinite().tolist() == [[True, False]]


def said(spelling: Spelling, plant: Plant) -> tuple[Any, ...]:
    """What `why` says: the kind, the operation, the count, and the remedies that it tried."""
    torch.manual_seed(0)
    model, inputs = nn.Linear(4, 3), torch.randn(2, 4)
    base = torch.full((2, 3), plant.good)
    base[1, 2] = plant.bad

    def step() -> Tensor:
        y = model(inputs)
        with torch.set_grad_enabled(spelling.has_gradient):
            result = spelling.compute(plant, torch.sub(y, y.detach()).add(base))
        loss = (result + 0 * y).sum()
        loss.backward()
        return loss

    found = fpsim.why(model, step)
    if found.cause is None:
        return (None,)
    place = re.sub(r"_\d+$", "", found.cause["place"].removeprefix(":"))
    remedies = [(row["remedy"], row["value"]) for row in found.tried]
    return found.cause["kind"], canonical(place), found.cause["count"], found.cause["of"], remedies


@pytest.mark.parametrize(
    ("plant", "all_of_them"),
    [
        *(pytest.param(plant, False, id=f"{plant}-one") for plant in FIRST_OF_ITS_KIND),
        *(pytest.param(plant, True, id=f"{plant}", marks=pytest.mark.full) for plant in PLANTS),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_why_says_the_same_in_every_spelling(plant: Plant, all_of_them: bool) -> None:
    plain, *others = spellings_of(plant)
    if not all_of_them:
        others = [*filter(lambda s: s.writes, others), *others][:1]
    # of a spelling that torch gives no gradient, float64 may be a remedy where it saves the result alone
    with_gradient = {s.has_gradient for s in (plain, *others)}
    expected = {has: said(replace(plain, has_gradient=has), plant) for has in with_gradient}
    assert {answer[:4] for answer in expected.values()} == {(plant.kind, plant.row.name, 1, 6)}
    answers = {spelling: said(spelling, plant) for spelling in others}
    told = 4 if plant.row.name == "remainder" else 5  # that of a divisor of 1e-12 is noise, and so is what it cures
    assert {s: answer for s, answer in answers.items() if answer[:told] != expected[s.has_gradient][:told]} == {}
