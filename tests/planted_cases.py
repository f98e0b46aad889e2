"""All that is planted, by cause, and which of it stands for the rest: in the default tier one step of each cause.

A file of planted steps is named by the cause: `planted_overflow.py` and so on. A step that fails is a `Case` in
`CASES`; `FINE` has the steps in which nothing is wrong, by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import planted_came_in  # noqa: F401  these register what they plant
import planted_controls  # noqa: F401
import planted_division  # noqa: F401
import planted_domains  # noqa: F401
import planted_gradients  # noqa: F401
import planted_grid
import planted_healthy  # noqa: F401
import planted_lost  # noqa: F401
import planted_masks  # noqa: F401
import planted_overflow  # noqa: F401
import planted_precision  # noqa: F401
import planted_steps
import planted_sums  # noqa: F401
import planted_updates  # noqa: F401
import pytest
from planted_steps import HEALTHY, Case

GRID = [*planted_grid.grid()]
STEPS = planted_steps.CASES
CASES = [*STEPS, *GRID]
CONTROLS = [*planted_grid.controls()]
HEALTHY_STEPS = [(build.__name__, build) for builds in HEALTHY.values() for build in builds]
FINE: list[tuple[str, Callable[[], Any]]] = [*HEALTHY_STEPS, *CONTROLS]


def step_named(name: str) -> Callable[..., Any]:
    """What builds a step, failing or not."""
    return {**{case.name: case.build for case in CASES}, **dict(FINE)}[name]


def one_of_each(names: Iterable[str]) -> list[str]:
    """One model and one format of each cause "cause-model-format", another one from cause to cause."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.split("-")[0], []).append(name)
    return [each[i % len(each)] for i, each in enumerate(found.values())]


def first_of_each_kind(cases: Iterable[Case]) -> set[str]:
    """The first of each kind in each role, by name."""
    found: dict[tuple[str, str], str] = {}
    for case in cases:
        found.setdefault((case.kind, case.role), case.name)
    return {*found.values()}


FEW = one_of_each(case.name for case in GRID)
SHOWN = first_of_each_kind(case for case in (*STEPS, *GRID) if not case.missed and (case in STEPS or case.name in FEW))
SHOWN_FINE = {*one_of_each(name for name, _ in CONTROLS), *(name for name, _ in HEALTHY_STEPS[::8])}


def failing() -> list[Any]:
    """All cases, as parameters of a test: one of each kind by default, each step in full, each model in slow.

    Causes in models, drawn at random, are those of `planted_random`.
    """
    few = {*SHOWN, *(case.name for case in STEPS)}
    marks: dict[bool, list[Any]] = {True: [], False: [pytest.mark.full]}
    return [
        pytest.param(
            case,
            id=case.name,
            marks=[
                *(marks[case.name in SHOWN] if case.name in few else [pytest.mark.slow]),
                *([pytest.mark.xfail(reason=case.missed, strict=True)] if case.missed else []),
            ],
        )
        for case in CASES
    ]


def fine() -> list[Any]:
    """All steps in which nothing is wrong, as parameters of a test: some of each sort by default, models in slow."""
    models = dict(CONTROLS).keys() - {*one_of_each(name for name, _ in CONTROLS)}
    marks = {
        name: pytest.mark.slow if name in models else pytest.mark.full for name, _ in FINE if name not in SHOWN_FINE
    }
    return [pytest.param(build, id=name, marks=[marks[name]] if name in marks else []) for name, build in FINE]
