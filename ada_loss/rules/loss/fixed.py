"""Rules without adjustment: no scaling, and a constant scale."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import ClassVar

from ada_loss.checks import FLAG, POSITIVE, number, param
from ada_loss.rules.loss.base import LossRule, state

__all__ = ["Off", "Static"]

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
    skip_overflow: skip steps with a gradient that is not finite. Without it such gradients reach the parameters.

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
