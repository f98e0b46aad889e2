"""What is planted in each of several models and formats, and what must be named there.

Causes that `planted_random` draws, too, are planted only where it has nothing like it: in the models of transformers,
and in formats that it does not draw them in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import planted_losses  # noqa: F401  these register their kinds
import planted_outer_kinds  # noqa: F401
import torch
from planted_kinds import KINDS
from planted_models import LIBRARY, Planted, parts_of
from planted_steps import Case
from torch import Tensor

ALL = ("gpt", "conv", "encoder", "decoder")
ATTENDING = ("gpt", "encoder", "decoder")
FP16 = ("half", "autocast", "fp16")
NARROW = ("half", "fp16")
ANY = ("float32", "half", "fp16", "bf16", "mxfp4")
CAME_IN = (*ANY, "autocast", "e4m3fn")
NOT_IN = {("sum overflows", "resnet")}  # whose last axis is three pixels long
EVERY = (*ALL, *LIBRARY)
NOT_DRAWN = ("bert", "llama")  # the bodies of `planted_bench` are like the others
POINT = "blocks.1.point:"

Plant = Callable[[Planted], None]


@dataclass(frozen=True)
class Cause:
    """plant: what is planted. kind, role: what must be said. place: how the place ends, or, up to a colon, begins.

    `place_in` is for one model, where "{up}" and the like are names of its modules.
    """

    plant: Plant
    kind: str
    place: str
    role: str
    models: tuple[str, ...]
    formats: tuple[str, ...]

    def place_in(self, model: str) -> str:
        return self.place.format(**parts_of(model))

    def case(self, name: str, model: str, fmt: str) -> Case:
        place = re.escape(self.place_in(model))
        pattern = f".*{place}" + (".*" if place.endswith(":") else "")
        return Case(
            f"{name}-{model}-{fmt}", partial(Planted, model, fmt, self.plant), self.kind, pattern, self.role, "grid"
        )


CAUSES: dict[str, Cause] = {}
CONTROLS: dict[str, tuple[Plant, tuple[str, ...], tuple[str, ...]]] = {}


def cause(
    kind: str, place: str, role: str, models: tuple[str, ...], formats: tuple[str, ...]
) -> Callable[[Plant], Plant]:
    """Register what is planted in a model."""

    def registered(plant: Plant) -> Plant:
        CAUSES[plant.__name__] = Cause(plant, kind, place, role, models, formats)
        return plant

    return registered


def at_point(
    kind: str, place: str, models: tuple[str, ...], formats: tuple[str, ...], role: str = "activation"
) -> Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]:
    """Register an operation to be planted in a block; in models of LIBRARY too where it is planted in ALL."""

    def registered(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def plant(planted: Planted) -> None:
            planted.point.plant = function

        name = function.__name__.replace("_", " ")
        CAUSES[name] = Cause(plant, kind, f"{POINT}{place}", role, models, formats)
        return function

    return registered


def control(models: tuple[str, ...], formats: tuple[str, ...]) -> Callable[[Plant], None]:
    """Register a change after which nothing is wrong."""

    def registered(change: Plant) -> None:
        CONTROLS[change.__name__] = change, models, formats

    return registered


def zero_row(x: Tensor) -> Tensor:
    """The first token, or the first pixel row, is zero."""
    keep = torch.ones_like(x)
    keep[:, :1] = 0
    return x * keep


def first_floating(planted: Planted) -> Tensor:
    return planted.part("up").weight  # type: ignore[no-any-return]


def is_drawn(name: str, model: str, fmt: str) -> bool:
    """Whether `planted_random` has the cause in such a model and in this format."""
    drawn = KINDS.get(name.replace("_", " "))
    return drawn is not None and model not in NOT_DRAWN and fmt in drawn.formats


def grid() -> Iterator[Case]:
    """Each cause in each of its models and formats, but for what is drawn."""
    for name, found in CAUSES.items():
        is_operation = found.models == ALL and found.place.startswith(POINT)
        library = [model for model in LIBRARY if is_operation and (name, model) not in NOT_IN]
        for model in (*found.models, *library):
            for fmt in found.formats[: 2 if model in library else None]:
                if not is_drawn(name, model, fmt):
                    yield found.case(name, model, fmt)


def controls() -> Iterator[tuple[str, Callable[[], Planted]]]:
    """Each step in which nothing is wrong, by its name."""
    for name, (change, models, formats) in CONTROLS.items():
        for model in models:
            for fmt in formats:
                yield f"{name}-{model}-{fmt}", partial(Planted, model, fmt, change)
