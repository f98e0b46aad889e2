"""Counting rules with hysteresis: some overflows do not change the scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ada_loss.checks import ABOVE_ONE, AT_LEAST_ONE, BELOW_ONE, COUNT, FLAG, POSITIVE, STEPS, param
from ada_loss.rules.loss.base import float32, state, stopped
from ada_loss.rules.loss.counting import CountingRule, Torch

if TYPE_CHECKING:
    from typing import Self

__all__ = ["ApexHysteresis", "DeepSpeed", "HystereticRule", "Megatron"]


@dataclass(frozen=True)
class HystereticRule(CountingRule):
    """Back off only after `spare` other overflows; a good step restores `spare` if `_refills` is true."""

    spare: int = state(None, COUNT.or_none())  # overflows that still leave the scale unchanged

    def _initial_state(self) -> dict[str, Any]:
        return {**super()._initial_state(), "spare": self._reserve()}

    def _good_step(self) -> Self:
        after = super()._good_step()
        return after.evolve(spare=self._reserve()) if self._refills() else after

    def _overflow(self) -> Self:
        return self.evolve(good=0, spare=self.spare - 1) if self.spare else super()._overflow()

    def _reserve(self) -> int:
        """The value to which `spare` is restored."""
        raise NotImplementedError

    def _refills(self) -> bool:
        """True if a good step restores `spare`."""
        return self._due()


@dataclass(frozen=True)
class ApexHysteresis(HystereticRule, Torch):
    """apex `update_scale_hysteresis`: torch's rule, backing off from the `hysteresis`-th overflow in a row.

    >>> from ada_loss import trajectory
    >>> trajectory(ApexHysteresis(init_scale=8.0, hysteresis=2), [False, True, False, False])
    [8.0, 8.0, 8.0, 8.0, 4.0]
    """

    system: ClassVar[str] = "apex_hysteresis"

    growth_factor: float = param(2.0, AT_LEAST_ONE)  # 1 is possible: apex tests with it
    hysteresis: int = param(1, STEPS)

    def _reserve(self) -> int:
        return self.hysteresis - 1

    def _refills(self) -> bool:
        return True


@dataclass(frozen=True)
class Megatron(HystereticRule):
    """Megatron-LM `DynamicGradScaler`: backs off from the `hysteresis`-th overflow since the last growth.

    growth_interval: good steps before the scale grows; a fraction is possible, and means never.

    >>> from ada_loss import trajectory
    >>> trajectory(Megatron(initial_scale=8.0), [False, True, False, False])
    [8.0, 8.0, 8.0, 4.0, 2.0]
    """

    system: ClassVar[str] = "megatron"
    single: ClassVar[bool] = True
    floor_and_ceiling: ClassVar[tuple[str, str] | None] = ("min_scale", "initial_scale")

    initial_scale: float = param(2.0**32, POSITIVE)
    min_scale: float = param(1.0, POSITIVE)
    growth_factor: float = param(2.0, ABOVE_ONE)
    backoff_factor: float = param(0.5, BELOW_ONE)
    growth_interval: float = param(1000, POSITIVE)
    hysteresis: int = param(2, STEPS)

    def _start(self) -> float:
        return self.initial_scale

    def _due(self) -> bool:
        return self.good + 1 == self.growth_interval

    def _grown(self) -> float:
        return float32(self.scale * float32(self.growth_factor))

    def _backed_off(self) -> float:
        return max(float32(self.scale * float32(self.backoff_factor)), float32(self.min_scale))

    def _reserve(self) -> int:
        return self.hysteresis - 1


@dataclass(frozen=True)
class DeepSpeed(HystereticRule):
    """DeepSpeed `DynamicLossScaler`: grows when the number of good steps before this one fills a window.

    scale_window: that number of good steps; the count continues after a growth.
    min_scale: the smallest scale.
    delayed_shift: the scale backs off from this overflow on, counted since the last growth.
    consecutive_hysteresis: count overflows since the last good step instead.
    raise_error_at_min_scale: stop the training at an overflow with the smallest scale.

    >>> from ada_loss import trajectory
    >>> trajectory(DeepSpeed(init_scale=8.0, scale_window=2), [True, True, True, False])
    [8.0, 8.0, 8.0, 16.0, 8.0]
    """

    system: ClassVar[str] = "deepspeed"
    after_growth: ClassVar[int | None] = None

    init_scale: float = param(2.0**16, POSITIVE)
    scale_factor: float = param(2.0, ABOVE_ONE)
    scale_window: int = param(1000, STEPS)
    min_scale: float = param(1.0, POSITIVE)
    delayed_shift: int = param(1, STEPS)
    consecutive_hysteresis: bool = param(False, FLAG)
    raise_error_at_min_scale: bool = param(True, FLAG)

    def _start(self) -> float:
        return self.init_scale

    def _due(self) -> bool:
        return self.good > 0 and self.good % self.scale_window == 0

    def _grown(self) -> float:
        return self.scale * self.scale_factor

    def _backed_off(self) -> float:
        if self.scale == self.min_scale and self.raise_error_at_min_scale:
            raise stopped(self.system, self.scale, "min_scale", self.min_scale)
        return max(self.scale / self.scale_factor, self.min_scale)

    def _reserve(self) -> int:
        return self.delayed_shift - 1

    def _refills(self) -> bool:
        return self.consecutive_hysteresis or self._due()
