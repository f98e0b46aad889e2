"""When a loss scale grows and when it backs off: each system's rule as a frozen value, pure arithmetic.

`rule.scale` is the scale of the coming step, `rule.adjust(ok)` the rule after it; no rule changes in place.
Parameters bear the names their system gives them, with its defaults.
"""

from __future__ import annotations

import ctypes
import difflib
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from typing import Self

__all__ = ["SYSTEMS", "LossRule", "as_loss_rule", "loss_rule", "trajectory"]

FLOAT64_MAX = sys.float_info.max
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
FLOAT32_SMALLEST_NORMAL = 2.0**-126
FLOAT32_SMALLEST = 2.0**-149


def loss_rule(system: str, **params: Any) -> LossRule:
    """The loss-scale rule of a system ("torch", "nnabla", ..., "static", "off"), by its own parameter names.

    `loss_scale=` of cerebras and apex, `scale=` of chainer may be numbers, as there: the scale is then fixed.
    Raises ValueError for an unknown system or impossible value, TypeError for an unknown or missing name.

    >>> loss_rule("torch", init_scale=4.0, growth_interval=1).adjust(ok=True).scale
    8.0
    >>> loss_rule("torch", growth=2.0)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    TypeError: The rule 'torch' has no parameter 'growth'. Did you mean growth_factor? It has: ...
    """
    rule = SYSTEMS.get(system)
    if rule is None:
        near = _near(str(system), SYSTEMS)
        raise ValueError(f"Unknown system {system!r}.{near} Known: {', '.join(SYSTEMS)}.")
    fixed = params.pop(rule.fixed_by, None) if rule.fixed_by else None
    known = {f.name: f.default for f in sorted(fields(rule), key=lambda f: bool(f.kw_only))}
    for name in params:
        if name not in known:
            near = _near(name, known)
            its = ", ".join([*known, rule.fixed_by or ""]).rstrip(", ")
            raise TypeError(f"The rule {system!r} has no parameter {name!r}.{near} It has: {its}.")
    for name, default in known.items():
        if default is MISSING and name not in params:
            raise TypeError(
                f"The rule {system!r} came without {name!r}, which has no default. "
                f"It is a scale, a finite number above 0. Give it: loss_rule({system!r}, {name}=2.0**15)."
            )
    dynamic = rule(**params)
    return dynamic if fixed is None or fixed == "dynamic" else Static(fixed)


def as_loss_rule(rule: LossRule | str | float) -> LossRule:
    """A rule from a rule, a system's name, or a number (a fixed scale).

    >>> as_loss_rule(128)
    Static(scale=128.0, skip_overflow=False)
    """
    if isinstance(rule, LossRule):
        return rule
    return Static(rule) if _is_number(rule) else loss_rule(rule)  # type: ignore[arg-type]


def trajectory(rule: LossRule, oks: Iterable[bool]) -> list[float]:
    """The scale before each step and after the last, where `oks` says which steps had finite gradients.

    >>> trajectory(Torch(init_scale=8.0, growth_interval=2), [True, True, True, False])
    [8.0, 8.0, 16.0, 16.0, 8.0]
    """
    scales = [rule.scale]
    for ok in oks:
        rule = rule.adjust(ok)
        scales.append(rule.scale)
    return scales


class Possible(NamedTuple):
    """What a parameter may be: in words, and as a test."""

    words: str
    allows: Callable[[Any], bool]

    def or_none(self) -> Possible:
        return Possible(f"{self.words}, or None", lambda v: v is None or self.allows(v))


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    # math.isfinite raises for an int beyond the largest float
    return abs(value) <= FLOAT64_MAX if isinstance(value, int) else math.isfinite(value)


def _number(words: str, holds: Callable[[Any], bool]) -> Possible:
    return Possible(words, lambda v: _is_number(v) and _is_finite(v) and bool(holds(v)))


def _whole(words: str, holds: Callable[[Any], bool]) -> Possible:
    return Possible(words, lambda v: isinstance(v, Integral) and not isinstance(v, bool) and bool(holds(v)))


POSITIVE = _number("a finite number above 0", lambda v: v > 0)
NOT_NEGATIVE = _number("a finite number, 0 or more", lambda v: v >= 0)
ABOVE_ONE = _number("a finite number above 1", lambda v: v > 1)
AT_LEAST_ONE = _number("a finite number, 1 or more", lambda v: v >= 1)
BELOW_ONE = _number("a number between 0 and 1, both excluded", lambda v: 0 < v < 1)
FINITE = _number("a finite number", lambda v: True)
ONE = _number("1, for it does not scale", lambda v: v == 1)
TWO = _number("2, the one multiplier of this system", lambda v: v == 2)
CEREBRAS_FLOOR = _number("a finite number, 2**-14 or more", lambda v: v >= 2.0**-14)
FLOAT32 = _number("a number above 0 that float32 holds", lambda v: 0 < v <= FLOAT32_MAX)
REACHED = Possible("a number, 0 or more", lambda v: _is_number(v) and v >= 0)
STEPS = _whole("a whole number, 1 or more", lambda v: v >= 1)
COUNT = _whole("a whole number, 0 or more", lambda v: v >= 0)
FLAG = Possible("True or False", lambda v: isinstance(v, bool))


def require(name: str, value: object, possible: Possible, owner: str, default: object = MISSING) -> None:
    """Refuse a parameter that is not possible.

    >>> require("growth", 0.5, ABOVE_ONE, "rule", 2.0)
    Traceback (most recent call last):
    ValueError: growth=0.5 makes no rule: it must be a finite number above 1. Leave it out for 2.0.
    """
    if not possible.allows(value):
        remedy = "Give one" if default is MISSING else f"Leave it out for {default!r}"
        raise ValueError(f"{name}={value!r} makes no {owner}: it must be {possible.words}. {remedy}.")


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


# No scaling, and a scale that stays.


@dataclass(frozen=True)
class Off(LossRule):
    """No scaling, no check, nothing skipped.

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
    """One scale for ever. By itself it skips nothing: overflows reach the parameters, unless `skip_overflow`.

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


# Rules that count good steps in a row, and start again at every overflow.


@dataclass(frozen=True)
class CountingRule(LossRule):
    """Grows when the count of good steps asks for it; an overflow backs off and starts the count again.

    A system says when growth is due, and what is above and below: `_due`, `_grown`, `_backed_off`.
    """

    after_growth: ClassVar[int | None] = 0  # the count after a growth; None: the count goes on

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
        raise NotImplementedError

    def _grown(self) -> float:
        raise NotImplementedError

    def _backed_off(self) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class Torch(CountingRule):
    """`torch.amp.GradScaler`: growth beyond float32 is refused, nothing stops the fall.

    Factors stay double: the product is rounded once (ATen/native/cpu/AmpGradScalerKernels.cpp).

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
        return finite_or(float32(self.scale * self.growth_factor), self.scale)

    def _backed_off(self) -> float:
        return float32(self.scale * self.backoff_factor)


@dataclass(frozen=True)
class Nnabla(CountingRule):
    """NNabla `DynamicLossScalingUpdater`: grows after good step N + 2, and every N + 1 from then on.

    The count is tested before the step is counted, and the step that grows counts. No floor, no ceiling.

    >>> trajectory(Nnabla(scale=8.0, N=1), [True] * 5)
    [8.0, 8.0, 8.0, 16.0, 16.0, 32.0]
    """

    system: ClassVar[str] = "nnabla"
    after_growth: ClassVar[int | None] = 1

    scale: float = param(8.0, POSITIVE)
    scaling_factor: float = param(2.0, ABOVE_ONE)
    N: int = param(2000, STEPS)

    def _due(self) -> bool:
        return self.good > self.N

    def _grown(self) -> float:
        return self.scale * self.scaling_factor

    def _backed_off(self) -> float:
        return self.scale / self.scaling_factor


@dataclass(frozen=True)
class Jmp(CountingRule):
    """`jmp.DynamicLossScale`: growth beyond float32 is refused.

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
    """Keras 3 `LossScaleOptimizer`: doubles and halves with no guard at either end.

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
    """TensorFlow `DynamicLossScale`: never below 1, growth beyond float32 is refused.

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
    """flax `DynamicScale`: growth is tested before the step is counted, so the period is growth_interval + 1.

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
    """apex `LossScaler`: a ceiling from the start, a floor if one is given.

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
    """OpenSeq2Seq `BackoffScaler`: starts at its ceiling; grows at multiples of the window since an overflow.

    increment_first: the step is counted before the test, so the very first growth comes one step sooner.

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

    def _memories(self) -> dict[str, Any]:
        return {**super()._memories(), "good": int(self.increment_first)}

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


# Counting rules with hysteresis: some overflows are free.


@dataclass(frozen=True)
class HystereticRule(CountingRule):
    """An overflow first spends what is spare and backs off once nothing is; `_refills` brings it back."""

    spare: int = state(None, COUNT.or_none())  # overflows that are still free

    def _memories(self) -> dict[str, Any]:
        return {**super()._memories(), "spare": self._reserve()}

    def _good_step(self) -> Self:
        after = super()._good_step()
        return after.evolve(spare=self._reserve()) if self._refills() else after

    def _overflow(self) -> Self:
        return self.evolve(good=0, spare=self.spare - 1) if self.spare else super()._overflow()

    def _reserve(self) -> int:
        """Overflows that are free after a refill."""
        raise NotImplementedError

    def _refills(self) -> bool:
        """Whether this good step refills."""
        return self._due()


@dataclass(frozen=True)
class ApexHysteresis(HystereticRule, Torch):
    """apex `update_scale_hysteresis`: torch's rule, with `hysteresis - 1` overflows free after a good step.

    >>> trajectory(ApexHysteresis(init_scale=8.0, hysteresis=2), [False, True, False, False])
    [8.0, 8.0, 8.0, 8.0, 4.0]
    """

    system: ClassVar[str] = "apex_hysteresis"

    growth_factor: float = param(2.0, AT_LEAST_ONE)  # its own test runs with 1
    hysteresis: int = param(1, STEPS)

    def _reserve(self) -> int:
        return self.hysteresis - 1

    def _refills(self) -> bool:
        return True


@dataclass(frozen=True)
class Megatron(HystereticRule):
    """Megatron-LM `DynamicGradScaler`: `hysteresis - 1` free overflows, refilled by growth alone.

    growth_interval: a fraction is possible, and never reached.

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
    """DeepSpeed `DynamicLossScaler`: grows when the good steps before this one are a multiple of the window.

    `delayed_shift - 1` overflows are free; they come back with growth or, with `consecutive_hysteresis`, with
    every good step. An overflow at the floor stops the training, unless `raise_error_at_min_scale` is False.

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
            raise _stopped(self.system, self.scale, "min_scale", self.min_scale)
        return max(self.scale / self.scale_factor, self.min_scale)

    def _reserve(self) -> int:
        return self.delayed_shift - 1

    def _refills(self) -> bool:
        return self.consecutive_hysteresis or self._due()


# Rules with a tolerance: they back off when the share of overflows since the last change is too large.


@dataclass(frozen=True)
class Fairseq(CountingRule):
    """fairseq `DynamicLossScaler`: backs off when the share of overflows since a change reaches `tolerance`.

    Growth restarts the steps of that share but keeps its overflows. `threshold` is a soft floor; a scale that
    an overflow finds or leaves at `min_loss_scale` or below stops the training.

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
    overflows: int = state(0, COUNT)

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
        seen = self.evolve(good=0, steps=self.steps + 1, overflows=self.overflows + 1)
        if seen.overflows / seen.steps >= self.tolerance:
            seen = self.evolve(good=0, steps=0, overflows=0, scale=self._backed_off())
        return seen._at_floor(self.scale)

    def _at_floor(self, scale_before: float) -> Self:
        if self.scale <= self.min_loss_scale:
            raise _stopped(self.system, scale_before, "min_loss_scale", self.min_loss_scale)
        return self


@dataclass(frozen=True)
class Metaseq(Fairseq):
    """metaseq `DynamicLossScaler`: as fairseq, but the window grows and shrinks together with the scale.

    A scale that would fall below `min_loss_scale` is put back; the window has shrunk all the same.

    >>> trajectory(Metaseq(init_scale=8.0, scale_window=1), [True, True, True, True])
    [8.0, 16.0, 32.0, 32.0, 64.0]
    """

    system: ClassVar[str] = "metaseq"

    init_scale: float = param(4.0, POSITIVE)
    scale_window: int = param(256, STEPS)
    min_loss_scale: float = param(2.0**-5, NOT_NEGATIVE)
    window: float = state(None, AT_LEAST_ONE.or_none())

    def _memories(self) -> dict[str, Any]:
        return {**super()._memories(), "window": self.scale_window}

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
    """Halves when the share of overflows since the last change exceeds a tolerance, doubles after some steps.

    Overflows within the tolerance count as steps towards growth.
    """

    single: ClassVar[bool] = True
    floor_and_ceiling: ClassVar[tuple[str, str] | None] = ("min_loss_scale", "max_loss_scale")

    initial_loss_scale: float = param(2.0**15, POSITIVE)
    min_loss_scale: float = param(2.0**-14, CEREBRAS_FLOOR)
    max_loss_scale: float = param(2.0**15, FLOAT32)
    overflow_tolerance: float = param(0.0, NOT_NEGATIVE)
    steps: int = state(0, COUNT)  # since the last change of the scale
    overflows: int = state(0, COUNT)

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
        raise NotImplementedError


@dataclass(frozen=True)
class Cerebras(_CerebrasRule):
    """Cerebras `amp.GradScaler`: doubles after more than `steps_per_increase` steps since the last change.

    For cb16, whose range is wider, its start and its ceiling are 2.0**31. Its `max_gradient_norm` belongs to
    `GradScaler`, for every rule.

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
    """Cerebras `CSDynamicLossScale`, for TensorFlow: doubles after `increment_period` steps, tolerates 5 %.

    >>> trajectory(CerebrasTensorflow(initial_loss_scale=256.0, increment_period=2), [True, True, False])
    [256.0, 256.0, 512.0, 256.0]
    """

    system: ClassVar[str] = "cerebras_tf"

    increment_period: int = param(2000, STEPS)
    multiplier: float = param(2.0, TWO)
    overflow_tolerance: float = param(0.05, NOT_NEGATIVE)

    def _due(self, steps: int) -> bool:
        return steps >= self.increment_period


# Rules of their own.


@dataclass(frozen=True)
class Chainer(LossRule):
    """Chainer's dynamic scale: every step doubles it until the first overflow ever, then `interval` steps do.

    An overflow halves; all within 1 and `loss_scale_max`. The papers on adaptive scaling use interval=10.

    >>> trajectory(Chainer(interval=1), [True, True, False, True])
    [1.0, 2.0, 4.0, 2.0, 4.0]
    """

    system: ClassVar[str] = "chainer"
    fixed_by: ClassVar[str | None] = "scale"

    interval: int = param(1000, STEPS)
    loss_scale_max: float = param(65504.0, AT_LEAST_ONE)
    overflowed: bool = state(False, FLAG)  # ever

    def _start(self) -> float:
        return 1.0

    def adjust(self, ok: bool, largest: float | None = None) -> Self:
        overflowed = self.overflowed or not ok
        factor = 0.5 if not ok else 2.0 ** (1.0 / self.interval) if overflowed else 2.0
        scale = max(1.0, min(self.loss_scale_max, self.scale * factor))
        return self.evolve(scale=scale, overflowed=overflowed)


@dataclass(frozen=True)
class LogMax(LossRule):
    """OpenSeq2Seq `LogMaxScaler`: keeps the largest gradient, taken as log-normal, below 2^log_max.

    scale = 2^(log_max - (m + overflow_std_dev * s)), clipped, where m is the running mean (beta1) and s the
    standard deviation (beta2), bias-corrected, of log2 of the largest unscaled gradient, or `log_max` where
    that is not finite. log_max is log2 of the format's top, 16 for fp16. Gradients that are all zero change
    nothing. The moments are float64; TensorFlow's are float32, and lose digits in a difference of squares.

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
    mean: float = state(0.0, FINITE)  # of log2 of the largest gradient
    slow_mean: float = state(0.0, FINITE)
    variance: float = state(0.0, NOT_NEGATIVE)
    seen: int = state(0, COUNT)  # gradients that were not all zero

    def _start(self) -> float:
        return 1.0

    def adjust(self, ok: bool, largest: float | None = None) -> Self:
        if ok and largest is None:
            raise ValueError(
                "The rule 'logmax' came to adjust(ok=True) without the largest gradient. "
                "That is a number, 0 or more. Give it, adjust(ok, largest), or let GradScaler do so."
            )
        if ok and largest == 0:
            return self
        finite = ok and largest is not None and math.isfinite(largest)
        x = math.log2(largest) if finite else self.log_max  # type: ignore[arg-type]
        seen = self.seen + 1
        # The newest value of a bias-corrected running mean weighs (1 - beta) / (1 - beta^seen), in a variance
        # too (West 1979): no difference of squares, which cancels
        newest1, newest2 = ((1 - beta) / (1 - beta**seen) for beta in (self.beta1, self.beta2))
        mean = self.mean + newest1 * (x - self.mean)
        shift = newest2 * (x - self.slow_mean)
        variance = (1 - newest2) * (self.variance + (x - self.slow_mean) * shift)
        exponent = self.log_max - (mean + self.overflow_std_dev * math.sqrt(variance))
        scale = float32(2.0 ** min(exponent, 1023.0))  # beyond, 2.0**x raises
        scale = max(min(scale, float32(self.scale_max)), float32(self.scale_min))
        after = self.evolve(scale=scale, mean=mean, variance=variance, seen=seen)
        return after.evolve(slow_mean=self.slow_mean + shift)


SYSTEMS: dict[str, type[LossRule]] = {
    rule.system: rule
    for rule in (
        Off,
        Static,
        Torch,
        Nnabla,
        Cerebras,
        CerebrasTensorflow,
        DeepSpeed,
        Megatron,
        Apex,
        ApexHysteresis,
        Fairseq,
        Metaseq,
        Jmp,
        Keras,
        Tensorflow,
        Flax,
        Chainer,
        OpenSeq2Seq,
        LogMax,
    )
}
SYSTEMS["none"] = Off


def _stopped(system: str, scale: float, floor: str, value: float) -> FloatingPointError:
    return FloatingPointError(
        f"The rule {system!r} stops: gradients overflowed at a scale of {scale!r}, and {floor} is {value!r}. "
        f"The loss is probably exploding: lower the learning rate, clip the gradients, or lower {floor}."
    )


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3)
    return f" Did you mean {' or '.join(near)}?" if near else ""
