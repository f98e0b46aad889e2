"""Rules that count good steps in a row: a full count grows the scale, every overflow shrinks it.

With hysteresis, some overflows leave the scale unchanged.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ada_loss.checks import ABOVE_ONE, AT_LEAST_ONE, BELOW_ONE, COUNT, FLAG, POSITIVE, STEPS, param
from ada_loss.rules.loss.base import FLOAT32_MAX, FLOAT32_SMALLEST_NORMAL, LossRule, finite_or, float32, state, stopped

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "Apex",
    "ApexHysteresis",
    "CountingRule",
    "DeepSpeed",
    "Flax",
    "HystereticRule",
    "Jmp",
    "Keras",
    "Megatron",
    "Nnabla",
    "OpenSeq2Seq",
    "Tensorflow",
    "Torch",
]


@dataclass(frozen=True)
class CountingRule(LossRule):
    """Grow after a number of good steps. An overflow backs off and resets the count of good steps.

    A subclass defines when the scale grows (`_due`) and the next scale (`_grown`, `_backed_off`).
    """

    after_growth: ClassVar[int | None] = 0  # the count after a growth, or None if it continues

    good: int = state(0, COUNT)  # good steps before this one, as the system counts them

    def adjust(self, ok: bool, largest: float | None = None) -> Self:
        return self._good_step() if ok else self._overflow()

    def _good_step(self) -> Self:
        if not self._due():
            return self.evolve(good=self.good + 1)
        good = self.good + 1 if self.after_growth is None else self.after_growth
        return self.evolve(scale=self._grown(), good=good)

    def _overflow(self) -> Self:
        return self.evolve(scale=self._backed_off(), good=0)

    def _due(self) -> bool:
        """Return True if the scale grows after a good step."""
        raise NotImplementedError

    def _grown(self) -> float:
        """Return the scale after growth."""
        raise NotImplementedError

    def _backed_off(self) -> float:
        """Return the scale after an overflow."""
        raise NotImplementedError


@dataclass(frozen=True)
class Torch(CountingRule):
    """`torch.amp.GradScaler`: the scale does not grow beyond float32, and may shrink to 0.

    Factors are float64, and the product is rounded once (ATen/native/cpu/AmpGradScalerKernels.cpp).

    >>> from ada_loss import trajectory
    >>> trajectory(Torch(init_scale=8.0, growth_interval=3), [True, True, True, False])
    [8.0, 8.0, 8.0, 16.0, 8.0]
    """

    system: ClassVar[str] = "torch"
    single: ClassVar[bool] = True

    init_scale: float = param(2.0**16, POSITIVE)
    growth_factor: float = param(2.0, ABOVE_ONE)
    backoff_factor: float = param(0.5, BELOW_ONE)
    growth_interval: int = param(2000, STEPS)

    def _start(self) -> float:
        return self.init_scale

    def _due(self) -> bool:
        return self.good + 1 == self.growth_interval

    def _grown(self) -> float:
        # Factors stay float64, unlike in other systems: torch's kernel multiplies by a double and rounds once.
        return finite_or(float32(self.scale * self.growth_factor), self.scale)

    def _backed_off(self) -> float:
        return float32(self.scale * self.backoff_factor)


@dataclass(frozen=True)
class Nnabla(CountingRule):
    """NNabla `DynamicLossScalingUpdater`: grows after N + 2 good steps, and then after every N + 1 good steps.

    The rule tests the count before it counts a step, and the step at which the scale grows counts towards the next
    growth. The scale has no bounds.

    scale: the initial scale.
    scaling_factor: the factor by which the scale grows and shrinks.
    N: the scale grows when the count of good steps exceeds this number; with 0 it grows at every good step but the
        first.

    >>> from ada_loss import trajectory
    >>> trajectory(Nnabla(scale=8.0, N=1), [True] * 5)
    [8.0, 8.0, 8.0, 16.0, 16.0, 32.0]
    """

    system: ClassVar[str] = "nnabla"
    after_growth: ClassVar[int | None] = 1

    scale: float = param(8.0, POSITIVE)
    scaling_factor: float = param(2.0, ABOVE_ONE)
    N: int = param(2000, COUNT)

    def _due(self) -> bool:
        return self.good > self.N

    def _grown(self) -> float:
        return self.scale * self.scaling_factor

    def _backed_off(self) -> float:
        return self.scale / self.scaling_factor


@dataclass(frozen=True)
class Jmp(CountingRule):
    """`jmp.DynamicLossScale`: the scale does not grow beyond float32, nor shrink below `min_loss_scale`.

    >>> from ada_loss import trajectory
    >>> trajectory(Jmp(loss_scale=2.0, period=2), [False, False, True, True])
    [2.0, 1.0, 1.0, 1.0, 2.0]
    """

    system: ClassVar[str] = "jmp"
    single: ClassVar[bool] = True

    loss_scale: float = param(MISSING, POSITIVE)
    period: int = param(2000, STEPS)
    factor: float = param(2, ABOVE_ONE)
    min_loss_scale: float = param(1.0, POSITIVE)

    def _start(self) -> float:
        return self.loss_scale

    def _due(self) -> bool:
        return self.good == self.period - 1

    def _grown(self) -> float:
        return finite_or(float32(self.scale * float32(self.factor)), self.scale)

    def _backed_off(self) -> float:
        return max(float32(self.min_loss_scale), float32(self.scale / float32(self.factor)))


@dataclass(frozen=True)
class Keras(CountingRule):
    """Keras 3 `LossScaleOptimizer`: doubles and halves without bounds.

    >>> from ada_loss import trajectory
    >>> trajectory(Keras(initial_scale=1.0, dynamic_growth_steps=2), [False, True, True])
    [1.0, 0.5, 0.5, 1.0]
    """

    system: ClassVar[str] = "keras"
    single: ClassVar[bool] = True

    initial_scale: float = param(2.0**15, POSITIVE)
    dynamic_growth_steps: int = param(2000, STEPS)

    def _start(self) -> float:
        return self.initial_scale

    def _due(self) -> bool:
        return self.good == self.dynamic_growth_steps - 1

    def _grown(self) -> float:
        return float32(self.scale * 2.0)

    def _backed_off(self) -> float:
        return float32(self.scale / 2.0)


@dataclass(frozen=True)
class Tensorflow(CountingRule):
    """TensorFlow `DynamicLossScale`: the scale does not grow beyond float32, nor shrink below 1.

    >>> from ada_loss import trajectory
    >>> trajectory(Tensorflow(initial_loss_scale=2.0, increment_period=1), [False, False, True])
    [2.0, 1.0, 1.0, 2.0]
    """

    system: ClassVar[str] = "tensorflow"
    single: ClassVar[bool] = True

    initial_loss_scale: float = param(2.0**15, POSITIVE)
    increment_period: int = param(2000, STEPS)
    multiplier: float = param(2.0, ABOVE_ONE)

    def _start(self) -> float:
        return self.initial_loss_scale

    def _due(self) -> bool:
        return self.good + 1 >= self.increment_period

    def _grown(self) -> float:
        return finite_or(float32(self.scale * float32(self.multiplier)), self.scale)

    def _backed_off(self) -> float:
        return max(float32(self.scale / float32(self.multiplier)), 1.0)


@dataclass(frozen=True)
class Flax(CountingRule):
    """flax `DynamicScale`: tests the count before it counts a step, so it grows every growth_interval + 1 good steps.

    >>> from ada_loss import trajectory
    >>> trajectory(Flax(scale=4.0, growth_interval=1), [True, True, True])
    [4.0, 4.0, 8.0, 8.0]
    """

    system: ClassVar[str] = "flax"
    single: ClassVar[bool] = True

    scale: float = param(2.0**16, POSITIVE)
    growth_factor: float = param(2.0, ABOVE_ONE)
    backoff_factor: float = param(0.5, BELOW_ONE)
    growth_interval: int = param(2000, STEPS)
    minimum_scale: float | None = param(FLOAT32_SMALLEST_NORMAL, POSITIVE.or_none())

    def _due(self) -> bool:
        return self.good == self.growth_interval

    def _grown(self) -> float:
        return min(float32(self.scale * float32(self.growth_factor)), FLOAT32_MAX)

    def _backed_off(self) -> float:
        return max(float32(self.scale * float32(self.backoff_factor)), float32(self.minimum_scale or 0.0))


@dataclass(frozen=True)
class Apex(CountingRule):
    """apex `LossScaler`: the scale is never above `max_loss_scale`, nor below `min_loss_scale` if there is one.

    >>> from ada_loss import trajectory
    >>> trajectory(Apex(init_scale=2.0, scale_window=1, max_loss_scale=4.0), [True, True, False])
    [2.0, 4.0, 4.0, 2.0]
    """

    system: ClassVar[str] = "apex"
    fixed_by: ClassVar[str | None] = "loss_scale"
    floor_and_ceiling: ClassVar[tuple[str, str] | None] = ("min_loss_scale", "max_loss_scale")

    init_scale: float = param(2.0**16, POSITIVE)
    scale_factor: float = param(2.0, ABOVE_ONE)
    scale_window: int = param(2000, STEPS)
    min_loss_scale: float | None = param(None, POSITIVE.or_none())
    max_loss_scale: float = param(2.0**24, POSITIVE)

    def _start(self) -> float:
        return min(self.max_loss_scale, self.init_scale)

    def _due(self) -> bool:
        return self.good + 1 == self.scale_window

    def _grown(self) -> float:
        return min(self.max_loss_scale, self.scale * self.scale_factor)

    def _backed_off(self) -> float:
        return max(self.min_loss_scale or 0.0, self.scale / self.scale_factor)


@dataclass(frozen=True)
class OpenSeq2Seq(CountingRule):
    """OpenSeq2Seq `BackoffScaler`: starts at `scale_max`; grows when the steps since an overflow fill a window.

    scale_min: the smallest scale.
    scale_max: the largest scale, and the initial one.
    step_factor: the factor by which the scale grows and shrinks.
    step_window: good steps before the scale grows; the count continues after a growth.
    increment_first: whether the step is counted before the test, so that the first growth comes one step earlier.

    >>> from ada_loss import trajectory
    >>> trajectory(OpenSeq2Seq(scale_max=4.0, step_window=2), [False, True, True, True, True])
    [4.0, 2.0, 2.0, 4.0, 4.0, 4.0]
    """

    system: ClassVar[str] = "openseq2seq"
    single: ClassVar[bool] = True
    floor_and_ceiling: ClassVar[tuple[str, str] | None] = ("scale_min", "scale_max")
    after_growth: ClassVar[int | None] = None

    scale_min: float = param(1.0, POSITIVE)
    scale_max: float = param(2.0**14, POSITIVE)
    step_factor: float = param(2.0, ABOVE_ONE)
    step_window: int = param(2000, STEPS)
    increment_first: bool = param(False, FLAG)
    good: int = state(None, COUNT.or_none())

    def _initial_state(self) -> dict[str, Any]:
        return {**super()._initial_state(), "good": int(self.increment_first)}

    def _start(self) -> float:
        return self.scale_max

    def _due(self) -> bool:
        return (self.good + 1) % self.step_window == 0

    def _grown(self) -> float:
        return self._clipped(float32(self.scale * float32(self.step_factor)))

    def _backed_off(self) -> float:
        return self._clipped(float32(self.scale / float32(self.step_factor)))

    def _clipped(self, scale: float) -> float:
        return max(min(scale, float32(self.scale_max)), float32(self.scale_min))


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
        # Once `spare` is 0, every overflow backs off; `spare` stays 0 until a good step restores it.
        return self.evolve(good=0, spare=self.spare - 1) if self.spare else super()._overflow()

    def _reserve(self) -> int:
        """Return the value to which `spare` is restored."""
        raise NotImplementedError

    def _refills(self) -> bool:
        """Return True if a good step restores `spare`."""
        return self._due()


@dataclass(frozen=True)
class ApexHysteresis(HystereticRule, Torch):
    """apex `update_scale_hysteresis`: torch's rule, but the first `hysteresis` - 1 overflows in a row change nothing.

    >>> from ada_loss import trajectory
    >>> trajectory(ApexHysteresis(init_scale=8.0, hysteresis=2), [False, True, False, False])
    [8.0, 8.0, 8.0, 8.0, 4.0]
    """

    system: ClassVar[str] = "apex_hysteresis"

    # A growth factor of 1 is allowed, unlike in torch, because apex's own tests use it.
    growth_factor: float = param(2.0, AT_LEAST_ONE)
    hysteresis: int = param(1, STEPS)

    def _reserve(self) -> int:
        return self.hysteresis - 1

    def _refills(self) -> bool:
        return True


@dataclass(frozen=True)
class Megatron(HystereticRule):
    """Megatron-LM `DynamicGradScaler`: shrinks at each overflow but the first `hysteresis` - 1 since the last growth.

    growth_interval: good steps before the scale grows; with a fractional value, which Megatron allows, it never grows.

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
    """DeepSpeed `DynamicLossScaler`: grows at a good step that follows a multiple of scale_window good steps.

    scale_window: the number of good steps between two growths; the count of good steps continues after a growth.
    min_scale: the smallest scale.
    delayed_shift: the number of the first overflow at which the scale backs off, counted since the last growth.
    consecutive_hysteresis: whether overflows are counted since the last good step instead.
    raise_error_at_min_scale: whether an overflow at the smallest scale stops the training.

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
        # As in DeepSpeed, an overflow is an error only if the scale was already at the floor. To back off to the floor
        # is no error.
        if self.scale == self.min_scale and self.raise_error_at_min_scale:
            raise stopped(self.system, self.scale, "min_scale", self.min_scale)
        return max(self.scale / self.scale_factor, self.min_scale)

    def _reserve(self) -> int:
        return self.delayed_shift - 1

    def _refills(self) -> bool:
        return self.consecutive_hysteresis or self._due()
