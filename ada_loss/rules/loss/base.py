"""What the rules of all systems have in common: a frozen value with a scale, its parameters and its memories."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from ada_loss.checks import POSITIVE, Possible, number, require

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "FLOAT32",
    "FLOAT32_MAX",
    "FLOAT32_SMALLEST_NORMAL",
    "LossRule",
    "finite_or",
    "float32",
    "param",
    "state",
    "stopped",
    "trajectory",
]

FLOAT32_MAX = (2 - 2**-23) * 2.0**127
FLOAT32_SMALLEST_NORMAL = 2.0**-126
FLOAT32_SMALLEST = 2.0**-149

FLOAT32 = number("a number above 0 that float32 holds", lambda v: 0 < v <= FLOAT32_MAX)


def param(default: Any, possible: Possible) -> Any:
    """A parameter of a rule, and what it may be."""
    return field(default=default, metadata={"possible": possible})


def state(default: Any, possible: Possible) -> Any:
    """What a rule remembers: given by name, for a rule taken up where another run left it."""
    return field(default=default, kw_only=True, metadata={"possible": possible})


@dataclass(frozen=True)
class LossRule:
    """A loss scale and what becomes of it: a value with `scale`, and `adjust(ok)` for the value after a step.

    Two rules are equal where all their parameters and all they remember are.
    """

    system: ClassVar[str]  # its name for `loss_rule`
    single: ClassVar[bool] = False  # the system keeps its scale in float32
    dynamic: ClassVar[bool] = True  # adjust() may change it
    needs_largest: ClassVar[bool] = False  # adjust() wants the largest gradient
    fixed_by: ClassVar[str | None] = None  # the parameter that, being a number, asks for a fixed scale
    floor_and_ceiling: ClassVar[tuple[str, str] | None] = None  # parameters that bound the scale

    scale: float = state(None, POSITIVE.or_none())

    @property
    def skips(self) -> bool:
        """Whether the step is skipped when a gradient is not finite."""
        return True

    def adjust(self, ok: bool, largest: float | None = None) -> Self:
        """The rule after a step; `ok` says that all gradients were finite.

        largest: the largest magnitude among the unscaled gradients, for rules with `needs_largest`.
        Raises FloatingPointError where the system stops because its scale cannot fall further.
        """
        return self

    def _start(self) -> float:
        """The scale of the first step."""
        return self.scale

    def _memories(self) -> dict[str, Any]:
        """What a rule that has seen no step remembers, where nothing else was given."""
        return {"scale": self._start()}

    def __post_init__(self) -> None:
        for f in fields(self):
            value, owner = getattr(self, f.name), f"rule {self.system!r}"
            require(f.name, value, f.metadata["possible"], owner, f.default)
        if self.floor_and_ceiling is not None:
            floor, ceiling = (getattr(self, name) for name in self.floor_and_ceiling)
            if floor is not None and ceiling is not None and floor > ceiling:
                names = " and ".join(self.floor_and_ceiling)
                raise ValueError(
                    f"{names} of the rule {self.system!r} came as {floor!r} and {ceiling!r}. "
                    f"The floor may be the ceiling at most. Lower it, or exchange the two."
                )
        for name, first in self._memories().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, first)
        scale = float32(self.scale) if self.single else float(self.scale)
        if not 0 < scale < math.inf:
            raise ValueError(
                f"A scale of {self.scale!r} makes no rule {self.system!r}: as float32 it is {scale}. "
                f"Give one between {FLOAT32_SMALLEST} and {FLOAT32_MAX}."
            )
        object.__setattr__(self, "scale", scale)

    def evolve(self, **changes: Any) -> Self:
        """This rule with other memories. Not checked: arithmetic may lead where no parameter may start."""
        after = object.__new__(type(self))  # under 1 us; dataclasses.replace would check it all again, 8 us
        after.__dict__.update(self.__dict__, **changes)
        return after


def float32(x: float) -> float:
    """The nearest float32; beyond the largest it is inf.

    >>> float32(0.1), float32(1e300)
    (0.10000000149011612, inf)
    """
    return ctypes.c_float(x).value


def finite_or(new: float, old: float) -> float:
    """The new scale, unless it overflowed."""
    return new if math.isfinite(new) else old


def trajectory(rule: LossRule, oks: Iterable[bool]) -> list[float]:
    """The scale before each step and after the last, where `oks` says which steps had finite gradients.

    >>> from ada_loss import loss_rule
    >>> trajectory(loss_rule("torch", init_scale=8.0, growth_interval=2), [True, True, True, False])
    [8.0, 8.0, 16.0, 16.0, 8.0]
    """
    scales = [rule.scale]
    for ok in oks:
        rule = rule.adjust(ok)
        scales.append(rule.scale)
    return scales


def stopped(system: str, scale: float, floor: str, value: float) -> FloatingPointError:
    return FloatingPointError(
        f"The rule {system!r} stops: gradients overflowed at a scale of {scale!r}, and {floor} is {value!r}. "
        f"The loss is probably exploding: lower the learning rate, clip the gradients, or lower {floor}."
    )
