"""LossRule, the base of all systems: a frozen value with a scale, parameters, and a state that steps change.

`Off` and `Static` have no state.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ada_loss.checks import FLAG, POSITIVE, Possible, check_fields, number, param
from fpsim.checks import require_iterable, shown

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "FLOAT32",
    "FLOAT32_MAX",
    "FLOAT32_SMALLEST_NORMAL",
    "LossRule",
    "Off",
    "Static",
    "finite_or",
    "float32",
    "state",
    "stopped",
    "trajectory",
]

FLOAT32_MAX = (2 - 2**-23) * 2.0**127
FLOAT32_SMALLEST_NORMAL = 2.0**-126
FLOAT32_SMALLEST = 2.0**-149

FLOAT32 = number("a number above 0 that float32 holds", lambda v: 0 < v <= FLOAT32_MAX)


def state(default: Any, possible: Possible) -> Any:
    """Declare a field that steps change. It is keyword-only, and is given to resume from the state of another run.

    default: the value before the first step, or None if the parameters determine it (see `_initial_state`).
    possible: the values that it may have.
    """
    return field(default=default, kw_only=True, metadata={"possible": possible})


@dataclass(frozen=True)
class LossRule:
    """A loss scale and how it changes: `scale` is the scale of the coming step, `adjust(ok)` the rule after that step.

    Two rules are equal if their parameters and their states are equal.
    """

    system: ClassVar[str]  # the name for `loss_rule`
    single: ClassVar[bool] = False  # the system keeps its scale in float32
    dynamic: ClassVar[bool] = True  # adjust() may change the scale
    needs_largest: ClassVar[bool] = False  # adjust() needs the largest gradient
    fixed_by: ClassVar[str | None] = None  # the parameter that fixes the scale if it is a number
    floor_and_ceiling: ClassVar[tuple[str, str] | None] = None  # the parameters that bound the scale

    scale: float = state(None, POSITIVE.or_none())

    @property
    def skips(self) -> bool:
        """Return True if a step is skipped when a gradient is not finite."""
        return True

    def adjust(self, ok: bool, largest: float | None = None) -> Self:
        """Return the rule after a step.

        ok: whether all gradients were finite.
        largest: the largest magnitude of the unscaled gradients, for rules with `needs_largest`.

        Raises FloatingPointError if the system stops because its scale cannot fall further.
        """
        return self

    def _start(self) -> float:
        """Return the scale of the first step."""
        return self.scale

    def _initial_state(self) -> dict[str, Any]:
        """Return the initial values of the state's fields whose default is None."""
        return {"scale": self._start()}

    def __post_init__(self) -> None:
        check_fields(self, f"rule {self.system!r}")
        if self.floor_and_ceiling is not None:
            floor, ceiling = (getattr(self, name) for name in self.floor_and_ceiling)
            if floor is not None and ceiling is not None and floor > ceiling:
                names = " and ".join(self.floor_and_ceiling)
                raise ValueError(
                    f"{names} of the rule {self.system!r} are {floor!r} and {ceiling!r}. "
                    f"The floor may be at most the ceiling. Lower it, or exchange the two."
                )
        # The initial state is set after the checks, because it follows from the parameters.
        for name, first in self._initial_state().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, first)
        # A system that keeps its scale in float32 also rounds its initial scale.
        scale = float32(self.scale) if self.single else float(self.scale)
        if not 0 < scale < math.inf:
            raise ValueError(
                f"A scale of {shown(self.scale)} makes no rule {self.system!r}: as float32 it is {scale}. "
                f"Give one between {FLOAT32_SMALLEST} and {FLOAT32_MAX}."
            )
        object.__setattr__(self, "scale", scale)

    def evolve(self, **changes: Any) -> Self:
        """Copy this rule with another state, without checks: a scale may become 0 or inf, but not start with these."""
        # This takes less than 1 us in each step. dataclasses.replace would repeat all checks and take 8 us.
        after = object.__new__(type(self))
        after.__dict__.update(self.__dict__, **changes)
        return after


def float32(x: float) -> float:
    """Return the float32 nearest to x, or inf if x exceeds the largest float32.

    >>> float32(0.1), float32(1e300)
    (0.10000000149011612, inf)
    """
    return ctypes.c_float(x).value


def finite_or(new: float, old: float) -> float:
    """Return the new scale, or the old scale if the new one is inf."""
    return new if math.isfinite(new) else old


def trajectory(rule: LossRule, oks: Iterable[bool]) -> list[float]:
    """Return the scales before each step and after the last step.

    Args:
        rule: the rule before the first step.
        oks: for each step whether all gradients were finite.

    >>> from ada_loss import loss_rule
    >>> trajectory(loss_rule("torch", init_scale=8.0, growth_interval=2), [True, True, True, False])
    [8.0, 8.0, 16.0, 16.0, 8.0]
    """
    if not isinstance(rule, LossRule):
        raise TypeError(f"rule is {shown(rule)}. Expected: a LossRule, such as ada_loss.loss_rule('torch').")
    oks = require_iterable("oks", oks, "[True, False]")
    for ok in oks:
        if not isinstance(ok, bool) and type(ok).__name__ not in ("bool_", "bool"):  # NumPy's is not a bool
            raise TypeError(f"oks holds {shown(ok)}. Expected: for each step True or False.")
    scales = [rule.scale]
    for ok in oks:
        rule = rule.adjust(ok)
        scales.append(rule.scale)
    return scales


def stopped(system: str, scale: float, floor: str, value: float) -> FloatingPointError:
    """Return the error of a system that stops the training at its smallest scale.

    system: the system's name.
    scale: the scale at which gradients overflowed.
    floor: the name of the parameter that bounds the scale from below.
    value: the value of that parameter.
    """
    return FloatingPointError(
        f"The rule {system!r} stops: gradients overflowed at a scale of {scale!r}, and {floor} is {value!r}. "
        f"The loss is probably exploding: lower the learning rate, clip the gradients, or lower {floor}."
    )


ONE = number("1, because this rule does not scale", lambda v: v == 1)


@dataclass(frozen=True)
class Off(LossRule):
    """No scaling. Gradients are not checked, and no step is skipped.

    >>> Off().scale, Off().skips
    (1.0, False)
    """

    system: ClassVar[str] = "off"
    dynamic: ClassVar[bool] = False

    scale: float = state(1.0, ONE)

    @property
    def skips(self) -> bool:
        return False


@dataclass(frozen=True)
class Static(LossRule):
    """A constant scale.

    scale: the scale.
    skip_overflow: whether to skip steps with a gradient that is not finite. If not, such gradients reach the
        parameters.

    >>> Static(128.0).adjust(ok=False).scale
    128.0
    """

    system: ClassVar[str] = "static"
    dynamic: ClassVar[bool] = False

    scale: float = param(MISSING, POSITIVE)
    skip_overflow: bool = param(False, FLAG)

    @property
    def skips(self) -> bool:
        return self.skip_overflow
