"""Rules with a tolerance: they back off when the share of overflows since the last change of scale is too large."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ada_loss.checks import ABOVE_ONE, AT_LEAST_ONE, COUNT, NOT_NEGATIVE, POSITIVE, STEPS, number, param
from ada_loss.rules.loss.base import FLOAT32, LossRule, float32, state, stopped
from ada_loss.rules.loss.counting import CountingRule
from fpsim.checks import is_number

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Cerebras", "CerebrasTensorflow", "Fairseq", "Metaseq"]

TWO = number("2, the only multiplier of this system", lambda v: v == 2)
CEREBRAS_FLOOR = number("a finite number, 2**-14 or more", lambda v: v >= 2.0**-14)
# Cerebras' documentation of GradScaler prints the powers of two without their caret, as decimal exponents.
CEREBRAS_MISPRINTS = {2e-14: ("2e-14", "2.0**-14"), 2e15: ("2e15", "2.0**15"), 2e31: ("2e31", "2.0**31")}


@dataclass(frozen=True)
class Fairseq(CountingRule):
    """fairseq `DynamicLossScaler`: backs off when the share of overflows since the last change reaches `tolerance`.

    Growth sets the number of steps in that share to 0, but not the number of overflows, as in fairseq.

    scale_window: good steps in a row before the scale grows.
    tolerance: the share of overflows at which the scale backs off; 0 to back off at every overflow.
    threshold: the smallest scale to which the rule backs off; None for no limit.
    min_loss_scale: the training stops if an overflow leaves the scale at this value or below.

    >>> from ada_loss import trajectory
    >>> trajectory(Fairseq(init_scale=8.0, scale_window=2, tolerance=0.5), [True, True, False, True, False])
    [8.0, 8.0, 16.0, 8.0, 8.0, 4.0]
    """

    system: ClassVar[str] = "fairseq"
    after_growth: ClassVar[int | None] = None

    init_scale: float = param(2.0**15, POSITIVE)
    scale_factor: float = param(2.0, ABOVE_ONE)
    scale_window: int = param(2000, STEPS)
    tolerance: float = param(0.0, NOT_NEGATIVE)
    threshold: float | None = param(None, POSITIVE.or_none())
    min_loss_scale: float = param(1e-4, NOT_NEGATIVE)
    steps: int = state(0, COUNT)  # since the last change of the scale
    overflows: int = state(0, COUNT)  # since the scale last backed off

    def _start(self) -> float:
        return self.init_scale

    def _due(self) -> bool:
        return (self.good + 1) % self.scale_window == 0

    def _grown(self) -> float:
        return self.scale * self.scale_factor

    def _backed_off(self) -> float:
        return max(self.scale / self.scale_factor, self.threshold or 0.0)

    def _good_step(self) -> Self:
        return super()._good_step().evolve(steps=0 if self._due() else self.steps + 1)

    def _overflow(self) -> Self:
        # The overflow itself counts in the share, as in fairseq.
        seen = self.evolve(good=0, steps=self.steps + 1, overflows=self.overflows + 1)
        if seen.overflows / seen.steps >= self.tolerance:
            seen = self.evolve(good=0, steps=0, overflows=0, scale=self._backed_off())
        return seen._at_floor(self.scale)

    def _at_floor(self, scale_before: float) -> Self:
        """Return this rule; raises FloatingPointError if its scale is too small."""
        if self.scale <= self.min_loss_scale:
            raise stopped(self.system, scale_before, "min_loss_scale", self.min_loss_scale)
        return self


@dataclass(frozen=True)
class Metaseq(Fairseq):
    """metaseq `DynamicLossScaler`: like fairseq, but the window grows and shrinks with the scale.

    scale_window: the first window: good steps in a row before the scale grows.
    min_loss_scale: the smallest scale; at this scale an overflow still shrinks the window.

    >>> from ada_loss import trajectory
    >>> trajectory(Metaseq(init_scale=8.0, scale_window=1), [True, True, True, True])
    [8.0, 16.0, 32.0, 32.0, 64.0]
    """

    system: ClassVar[str] = "metaseq"

    init_scale: float = param(4.0, POSITIVE)
    scale_window: int = param(256, STEPS)
    min_loss_scale: float = param(2.0**-5, NOT_NEGATIVE)
    window: float = state(None, AT_LEAST_ONE.or_none())

    def _initial_state(self) -> dict[str, Any]:
        return {**super()._initial_state(), "window": self.scale_window}

    def _due(self) -> bool:
        return (self.good + 1) % self.window == 0

    def _good_step(self) -> Self:
        after = super()._good_step()
        return after.evolve(window=self.window * self.scale_factor) if self._due() else after

    def _overflow(self) -> Self:
        after = super()._overflow()
        backed_off = after.steps == 0
        return after.evolve(window=max(int(self.window / self.scale_factor), 1)) if backed_off else after

    def _at_floor(self, scale_before: float) -> Self:
        return self.evolve(scale=scale_before) if self.scale < self.min_loss_scale else self


@dataclass(frozen=True)
class _CerebrasRule(LossRule):
    """Halve the scale if the share of overflows exceeds `overflow_tolerance`; double the scale if `_due` returns True.

    The share is counted since the last change of the scale. Overflows within the tolerance count as steps towards
    growth.
    """

    single: ClassVar[bool] = True
    floor_and_ceiling: ClassVar[tuple[str, str] | None] = ("min_loss_scale", "max_loss_scale")

    initial_loss_scale: float = param(2.0**15, POSITIVE)
    min_loss_scale: float = param(2.0**-14, CEREBRAS_FLOOR)
    max_loss_scale: float = param(2.0**15, FLOAT32)
    overflow_tolerance: float = param(0.0, NOT_NEGATIVE)
    steps: int = state(0, COUNT)  # since the last change of the scale
    overflows: int = state(0, COUNT)

    def __post_init__(self) -> None:
        for name in ("initial_loss_scale", "min_loss_scale", "max_loss_scale"):
            given = getattr(self, name)
            # Without this error 2e15 would be clipped to the ceiling 2**15, and nobody would notice that Cerebras' page
            # means another number.
            if is_number(given) and given in CEREBRAS_MISPRINTS:
                printed, meant = CEREBRAS_MISPRINTS[given]
                raise ValueError(
                    f"{name}={printed} makes no rule {self.system!r}: Cerebras' page prints {printed} and means "
                    f"{meant}. Give {name}={meant}."
                )
        super().__post_init__()

    def _start(self) -> float:
        return min(self.initial_loss_scale, self.max_loss_scale)

    def adjust(self, ok: bool, largest: float | None = None) -> Self:
        scale, steps, overflows = self.scale, self.steps + 1, self.overflows + (not ok)
        if overflows / steps > self.overflow_tolerance:
            scale, steps, overflows = float32(scale / 2), 0, 0
        if self._due(steps):
            scale, steps, overflows = float32(scale * 2), 0, 0
        scale = max(min(scale, float32(self.max_loss_scale)), float32(self.min_loss_scale))
        return self.evolve(scale=scale, steps=steps, overflows=overflows)

    def _due(self, steps: int) -> bool:
        """Return True if the scale doubles this many steps after its last change."""
        raise NotImplementedError


@dataclass(frozen=True)
class Cerebras(_CerebrasRule):
    """Cerebras `amp.GradScaler`: doubles after more than `steps_per_increase` steps since the last change.

    For cb16, whose range is wider, Cerebras sets the initial and the largest scale to 2.0**31. `max_gradient_norm` is
    an argument of `GradScaler`, for every rule.

    >>> from ada_loss import trajectory
    >>> trajectory(Cerebras(initial_loss_scale=256.0, steps_per_increase=2), [True, True, True, False])
    [256.0, 256.0, 256.0, 512.0, 256.0]
    """

    system: ClassVar[str] = "cerebras"
    fixed_by: ClassVar[str | None] = "loss_scale"

    steps_per_increase: int = param(2000, STEPS)

    def _due(self, steps: int) -> bool:
        return steps > self.steps_per_increase


@dataclass(frozen=True)
class CerebrasTensorflow(_CerebrasRule):
    """Cerebras `CSDynamicLossScale`, for TensorFlow: doubles after `increment_period` steps.

    >>> from ada_loss import trajectory
    >>> trajectory(CerebrasTensorflow(initial_loss_scale=256.0, increment_period=2), [True, True, False])
    [256.0, 256.0, 512.0, 256.0]
    """

    system: ClassVar[str] = "cerebras_tf"

    increment_period: int = param(2000, STEPS)
    multiplier: float = param(2.0, TWO)
    overflow_tolerance: float = param(0.05, NOT_NEGATIVE)

    def _due(self, steps: int) -> bool:
        return steps >= self.increment_period
