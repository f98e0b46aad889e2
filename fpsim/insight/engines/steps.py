"""The operations of a module's own code on both sides, and the first at which they part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fpsim.insight.engines.places import MARGIN, TINY, Place, floats_of, relative_of
from fpsim.insight.engines.sides import Pair, cloned

__all__ = ["first_step_apart"]

# What gives numbers that are there already, in another shape.
_VIEWS = frozenset(
    "__get__ __getitem__ chunk clone contiguous detach expand expand_as flatten narrow permute repeat "
    "repeat_interleave reshape select split squeeze t transpose unbind unflatten unsqueeze view view_as".split()
)


class _Step(NamedTuple):
    name: str
    results: list[Tensor]


class _Steps(TorchFunctionMode):
    """Keeps what each function of torch gives while `is_asked`."""

    def __init__(self, is_asked: Callable[[], bool]) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self._is_asked = is_asked

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if self._is_asked() and name not in _VIEWS and (results := floats_of(out)):
            self.steps.append(_Step(name.strip("_"), [x.detach().clone() for x in results]))
        return out


def first_step_apart(pair: Pair, place: Place, valid: Tensor) -> str:
    """What the own code of a place computes where both sides part first, as words; empty where nothing is seen."""
    steps = []
    for side in "ab":
        mode = _Steps(lambda: pair.running == place.name)
        choice = (lambda n: "b" if n == place.name else "a") if side == "b" else (lambda n: "a")
        torch.manual_seed(pair.seed)
        pair.quietly(pair.doors[side][place.name], choice, cloned(place.inputs), lambda mode=mode: mode)
        steps.append(mode.steps)
    margin = max(MARGIN * place.floor, TINY)
    here, there = (_unknown(one, other, valid, margin) for one, other in (steps, steps[::-1]))
    if here and there and here[0].name == there[0].name:
        return f"first apart at {here[0].name}"
    words = [", ".join(step.name for step in some[:3]) for some in (here, there)]
    alone = [f"{side} alone computes {of}" for side, of in zip("ab", words, strict=True) if of]
    return "first apart: " + " and ".join(alone) if alone else ""


def _unknown(steps: list[_Step], others: list[_Step], valid: Tensor, margin: float) -> list[_Step]:
    """The steps with a result that none of the others has, in their order."""

    def is_there(x: Tensor) -> bool:
        same = (y for step in others for y in step.results if y.shape == x.shape)
        return any(relative_of([x], [y], valid) <= margin for y in same)

    return [step for step in steps if not all(map(is_there, step.results))]
