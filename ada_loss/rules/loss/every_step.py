"""Rules that may choose another scale at every step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ada_loss.checks import AT_LEAST_ONE, BELOW_ONE, COUNT, FINITE, FLAG, NOT_NEGATIVE, POSITIVE, STEPS, param
from ada_loss.rules.loss.base import FLOAT32, LossRule, float32, state

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Chainer", "LogMax"]


@dataclass(frozen=True)
class Chainer(LossRule):
    """Chainer's dynamic scale: doubled by each step until the first overflow, then by 2**(1 / interval) in each step.

    An overflow halves the scale. The scale stays between 1 and `loss_scale_max`. Zhao et al. 2020 use interval=10.

    interval: the number of good steps that together double the scale, each by the same factor.
    loss_scale_max: the largest scale.

    >>> from ada_loss import trajectory
    >>> trajectory(Chainer(interval=1), [True, True, False, True])
    [1.0, 2.0, 4.0, 2.0, 4.0]
    """

    system: ClassVar[str] = "chainer"
    fixed_by: ClassVar[str | None] = "scale"

    interval: int = param(1000, STEPS)
    loss_scale_max: float = param(65504.0, AT_LEAST_ONE)
    overflowed: bool = state(False, FLAG)  # whether any earlier step overflowed

    def _start(self) -> float:
        return 1.0

    def adjust(self, ok: bool, largest: float | None = None) -> Self:
        overflowed = self.overflowed or not ok
        factor = 0.5 if not ok else 2.0 ** (1.0 / self.interval) if overflowed else 2.0
        scale = max(1.0, min(self.loss_scale_max, self.scale * factor))
        return self.evolve(scale=scale, overflowed=overflowed)


@dataclass(frozen=True)
class LogMax(LossRule):
    """OpenSeq2Seq `LogMaxScaler`: a scale that keeps the largest gradient below 2^log_max, if it is log-normal.

    scale = 2^(log_max - (m + overflow_std_dev * s)), clipped to scale_min and scale_max. m and s are the running mean
    and standard deviation, bias-corrected, of log2 of the largest unscaled gradient. A gradient that is not finite
    counts as 2^log_max; a step whose gradients are all zero changes nothing. The moments are float64. TensorFlow's
    are float32, and lose digits in a difference of squares.

    scale_min: the smallest scale.
    scale_max: the largest scale.
    log_max: log2 of the value at which the format overflows, 16 for fp16.
    beta1: the decay of the running mean m.
    beta2: the decay of the running deviation s.
    overflow_std_dev: the number of deviations by which the largest gradient stays below 2^log_max.

    >>> LogMax().adjust(ok=True, largest=2.0**4).scale
    4096.0
    """

    system: ClassVar[str] = "logmax"
    single: ClassVar[bool] = True
    needs_largest: ClassVar[bool] = True
    floor_and_ceiling: ClassVar[tuple[str, str] | None] = ("scale_min", "scale_max")

    scale_min: float = param(1.0, POSITIVE)
    scale_max: float = param(2.0**14, FLOAT32)
    log_max: float = param(16.0, FINITE)
    beta1: float = param(0.99, BELOW_ONE)
    beta2: float = param(0.999, BELOW_ONE)
    overflow_std_dev: float = param(3.09, NOT_NEGATIVE)
    mean: float = state(0.0, FINITE)  # the running mean of log2 of the largest gradient
    slow_mean: float = state(0.0, FINITE)  # the same with beta2
    variance: float = state(0.0, NOT_NEGATIVE)  # the running variance, with beta2
    seen: int = state(0, COUNT)  # steps whose gradients were not all zero

    def _start(self) -> float:
        return 1.0

    def adjust(self, ok: bool, largest: float | None = None) -> Self:
        if ok and largest is None:
            raise ValueError(
                "The rule 'logmax' reached adjust(ok=True) without the largest gradient. "
                "That is a number, 0 or more. Give it, adjust(ok, largest), or let GradScaler do so."
            )
        if ok and largest == 0:
            return self
        finite = ok and largest is not None and math.isfinite(largest)
        x = math.log2(largest) if finite else self.log_max  # type: ignore[arg-type]
        seen = self.seen + 1
        # In a bias-corrected running mean the newest value has the weight (1 - beta) / (1 - beta^seen). The running
        # variance uses the same weight (West 1979), which avoids the cancellation in a difference of squares.
        newest1, newest2 = ((1 - beta) / (1 - beta**seen) for beta in (self.beta1, self.beta2))
        mean = self.mean + newest1 * (x - self.mean)
        shift = newest2 * (x - self.slow_mean)
        variance = (1 - newest2) * (self.variance + (x - self.slow_mean) * shift)
        exponent = self.log_max - (mean + self.overflow_std_dev * math.sqrt(variance))
        scale = float32(2.0 ** min(exponent, 1023.0))  # beyond 1023, 2.0**x raises OverflowError
        scale = max(min(scale, float32(self.scale_max)), float32(self.scale_min))
        after = self.evolve(scale=scale, mean=mean, variance=variance, seen=seen)
        return after.evolve(slow_mean=self.slow_mean + shift)
