"""Schedules of formats: the format in which a training computes, by step."""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

from torch import nn

import fpsim
from ada_loss.lab.training.native import is_native
from fpsim import FormatLike
from fpsim.checks import is_finite_number, is_whole, shown

__all__ = ["SCHEDULE", "FormatSchedule", "FormatSwitch", "Stage", "Start", "as_schedule", "quantized", "step_of"]

SCHEDULE = "schedule"  # the key in a mapping that takes the place of a format
POSSIBLE = "{'schedule': {0: 'fp16', 0.8: 'bf16'}}"

Model = TypeVar("Model", bound=nn.Module)
Start = int | float


class Stage(NamedTuple):
    """A format of a training, with its first step and its rounding.

    start: a step, counted from 0 (an integer), or a fraction of all steps (a float below 1).
    fmt, rounding: the format and the rounding, as `fpsim.quantize` takes them.
    """

    start: Start
    fmt: FormatLike
    rounding: str | None = None

    def __str__(self) -> str:
        words = f"{self.fmt} {self.rounding}" if self.rounding else str(self.fmt)
        return f"{words} from {_named(self.start)}" if self.start else words


@dataclass(frozen=True)
class FormatSchedule:
    """Formats of one training, one after the other. `as_schedule` makes and checks a schedule from a user's notation.

    stages: the stages in order. The first starts at 0; the others start either all at steps or all at fractions.

    >>> print(FormatSchedule((Stage(0, "fp16"), Stage(0.8, "bf16", "stochastic"))))
    fp16 then bf16 stochastic from 0.8
    """

    stages: tuple[Stage, ...]

    def __str__(self) -> str:
        return " then ".join(map(str, self.stages))

    def steps(self, total: int) -> tuple[int, ...]:
        """Return the first step of each format, counted from 0, in a training of `total` steps.

        Raises ValueError if a format would have no step.

        >>> FormatSchedule((Stage(0, "fp16"), Stage(0.8, "bf16"))).steps(15)
        (0, 12)
        """
        if len(self.stages) == 1:
            return (0,)
        starts = [step_of(stage.start, total) for stage in self.stages]
        for stage, begin, end in zip(self.stages, starts, [*starts[1:], total], strict=True):
            if begin >= end:
                raise ValueError(
                    f"The schedule has {shown(str(stage))}, and no step for it: the training has {total}. Expected: "
                    f"starts between which there are steps, or more steps."
                )
        return tuple(starts)

    def before(self, start: Start) -> FormatSchedule:
        """Return a schedule of the stages that begin before a start.

        >>> print(as_schedule({"schedule": {0: "fp16", 0.5: "e5m2", 0.8: "bf16"}}).before(0.8))
        fp16 then e5m2 from 0.5
        """
        return FormatSchedule(tuple(stage for stage in self.stages if stage.start < start))


def step_of(start: Start, total: int) -> int:
    """Return the step of a start, in a training of `total` steps.

    A fraction stands for the first step before which at least this share of all steps lies.

    >>> step_of(0.8, 15), step_of(0.5, 15), step_of(12, 15)
    (12, 8, 12)
    """
    # repr yields the decimal that the user wrote. The float 0.8 is slightly more than 0.8, and ceil would add a step.
    return start if isinstance(start, int) else math.ceil(Fraction(repr(start)) * total)


def as_schedule(fmt: Any, rounding: str | None = None) -> FormatSchedule:
    """Return the schedule that a user wrote. A format alone is a schedule with one stage.

    fmt: {"schedule": {start: format}}, or anything else, which is taken as a format and is not checked here. The first
        start is 0; the others are either steps (integers) or fractions of all steps (floats below 1). A list of pairs
        (start, format) may replace the inner mapping.
    rounding: the rounding of every format; None leaves the rounding to each format.
    Raises ValueError and TypeError for an invalid schedule.

    >>> print(as_schedule({"schedule": {0: "fp16", 0.8: "recipe:bf16"}}), "|", as_schedule("fp16"))
    fp16 then recipe:bf16 from 0.8 | fp16
    """
    if isinstance(fmt, FormatSchedule):
        return fmt if rounding is None else FormatSchedule(tuple(s._replace(rounding=rounding) for s in fmt.stages))
    if not isinstance(fmt, Mapping):
        return FormatSchedule((Stage(0, fmt, rounding),))
    if SCHEDULE not in fmt:
        if fmt and not any(isinstance(key, str) for key in fmt):
            raise TypeError(f"A format is {shown(dict(fmt))}. Expected for formats in turn: {POSSIBLE}.")
        return FormatSchedule((Stage(0, fmt, rounding),))  # type: ignore[arg-type]  # checked by `quantize`
    others = [key for key in fmt if key != SCHEDULE]
    if others:
        raise ValueError(
            f"A schedule has {', '.join(map(shown, others))} besides its key. Expected: {POSSIBLE}; each of its "
            f"formats may be a policy."
        )
    given = [Stage(_start(start), inner, rounding) for start, inner in _pairs(fmt[SCHEDULE])]
    stages = sorted(given, key=lambda stage: stage.start)
    starts = [stage.start for stage in stages]
    if len({*starts}) < len(starts):
        raise ValueError(f"The schedule {shown(fmt[SCHEDULE])} has two formats for one start. Leave one out.")
    if starts[0] != 0:
        raise ValueError(f"The schedule {shown(fmt[SCHEDULE])} has no first format. Expected: {POSSIBLE}, with a 0.")
    if len({type(start) for start in starts[1:]}) > 1:
        raise ValueError(
            f"The schedule {shown(fmt[SCHEDULE])} has both steps and fractions, whose order depends on the number of "
            f"steps. Expected: either integers, or floats below 1, besides the 0."
        )
    return FormatSchedule(tuple(stages))


def _pairs(given: Any) -> list[tuple[Any, Any]]:
    pairs = [*given.items()] if isinstance(given, Mapping) else given
    is_list = isinstance(pairs, list | tuple) and all(isinstance(p, list | tuple) and len(p) == 2 for p in pairs)
    if not is_list or not pairs:
        raise TypeError(f"A schedule is {shown(given)}. Expected: {POSSIBLE}.")
    for _, inner in pairs:
        if isinstance(inner, FormatSchedule) or (isinstance(inner, Mapping) and SCHEDULE in inner):
            raise ValueError(f"A schedule is inside another: {shown(inner)}. Put all starts into one.")
        if is_native(inner):
            raise ValueError(
                f"A schedule has {shown(dict(inner))} among its formats. A native cell is native in all its steps: "
                f"give that as a format of its own, without a schedule."
            )
    return [(start, inner) for start, inner in pairs]


def _start(start: Any) -> Start:
    if is_whole(start, least=0) or (is_finite_number(start) and start == 0):
        return int(start)
    if not is_whole(start) and is_finite_number(start) and 0 < start < 1:
        return float(start)
    raise ValueError(
        f"A schedule has the start {shown(start)}. Expected: 0; a step, which is an integer; or a fraction of all "
        f"steps, which is a float below 1."
    )


def _named(start: Start) -> str:
    return f"step {start}" if isinstance(start, int) else str(start)


def quantized(model: Model, schedule: FormatSchedule, *, inplace: bool = False) -> Model:
    """Quantise a model to the first format of a schedule, by `fpsim.quantize`.

    Raises the errors of `quantize` for every format of the schedule.
    """
    first, *others = schedule.stages
    if is_native(first.fmt):
        raise ValueError(
            f"The format {shown(first.fmt)} trains in real float16, and quantises no model. Use "
            f"torch.autocast(device, dtype=torch.float16) and ada_loss.GradScaler(layers=model) in a loop of your own."
        )
    # The warning about a last layer in 4 bits is suppressed, because this training measures what such a layer costs.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The gradient of .* is rounded to nearest", UserWarning)
        emulated = fpsim.quantize(model, first.fmt, rounding=first.rounding, inplace=inplace)
    # Every format is set once here, so that its errors are raised now and not after hours of training. The first format
    # is set last, because the training begins with it.
    for stage in (*others, first) if others else ():
        fpsim.set_policy(emulated, stage.fmt, rounding=stage.rounding)
    return emulated


class FormatSwitch:
    """Switch a quantised model to the format that a schedule has for a step.

    model: a model from `quantized`, in the first format.
    schedule: the same schedule as for `quantized`.
    """

    def __init__(self, model: nn.Module, schedule: FormatSchedule) -> None:
        self.model, self.schedule, self.stage = model, schedule, 0

    def enter(self, step: int, total: int) -> None:
        """Switch to the format of a step, counted from 0, of `total` steps, unless the model already has it."""
        if len(self.schedule.stages) > 1:
            self.enter_stage(bisect_right(self.schedule.steps(total), step) - 1)

    def enter_stage(self, stage: int) -> None:
        """Switch to a format by its index in the schedule, unless the model already has it."""
        if stage != self.stage:
            _, fmt, rounding = self.schedule.stages[stage]
            fpsim.set_policy(self.model, fmt, rounding=rounding)
            self.stage = stage
