"""Numbers beside tensors of the format: where torch casts them to the dtype of the tensors, and where it does not."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fpsim.emulation.calls import NO_OPERANDS, Action, Call
from fpsim.emulation.marks import is_marked_wide, is_roundable
from fpsim.emulation.operands import Rounds
from fpsim.emulation.operations import Number
from fpsim.formats.blocks import Element
from fpsim.tensors.launch import rounded_number
from fpsim.tensors.spec import RoundingSpec, rounding_spec

__all__ = ["number_in_format", "numbers_in_format", "scalars_in_format", "scalars_of_call"]


def scalars_in_format(spec: RoundingSpec | None, call: Call, args: tuple[Any, ...], is_wide: bool) -> tuple[Any, ...]:
    """The arguments with numbers of Python as the format has them, beside a tensor of the format."""
    is_read = call.is_comparison or call.action is Action.SET_ITEM
    if is_wide or spec is None or not (is_read or call.has_threshold):
        return args
    beside = [x for x in args if isinstance(x, Tensor) and is_roundable(x)]
    if not beside or (call.threshold == "on card" and not any(x.is_cuda for x in beside)):
        return args
    return tuple(numbers_in_format(x, spec.fmt) for x in args)


def scalars_of_call(
    emulation: Any, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], is_wide: bool, keeps_first: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with numbers, and tensors without dimensions, in the format where torch casts them to it.

    A float32 tensor without dimensions gives no result its dtype, and torch casts it before it computes. On the CPU it
    multiplies and divides by one in float32, and so does a card with all sums and products of one that is on the CPU.
    """
    if call.has_threshold:
        converted = scalars_in_format(emulation.scope.specs.activation, call, (*args, *kwargs.values()), is_wide)
        args, kwargs = converted[: len(args)], dict(zip(kwargs, converted[len(args) :], strict=True))
    if is_wide or not emulation.has_wide or call.number is Number.EXACT:
        return args, kwargs
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    is_on_card = any(x.is_cuda for x in given)
    if not any(x.dim() for x in given):  # then what is written to is computed in float32
        return args, kwargs

    def narrow(place: int | str, x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.dim() == 0 and is_roundable(x) and is_marked_wide(x)):
            return x
        if (place == 0 and keeps_first) or place in NO_OPERANDS:
            return x
        is_second = place == 1 or place == "other"
        is_number = call.number is not Number.CAST if is_on_card else call.number is Number.SECOND and is_second
        return x if is_number and x.is_cpu else emulation.operand(x, Rounds.ALL)

    args = tuple(narrow(i, x) for i, x in enumerate(args))
    return args, {name: narrow(name, x) for name, x in kwargs.items()}


def numbers_in_format(x: Any, fmt: Element) -> Any:
    """A number of the format in the place of a number, and of each in a list of numbers; anything else as it is."""
    if type(x) in (list, tuple) and all(isinstance(item, float) for item in x):
        return type(x)(number_in_format(float(item), fmt) for item in x)
    return number_in_format(float(x), fmt) if isinstance(x, float) else x


@lru_cache(1 << 12)
def number_in_format(number: float, fmt: Element) -> float:
    """A number of Python as a tensor of the format holds it."""
    if not math.isfinite(number) or abs(number) >= torch.finfo(torch.float32).max:
        return number
    return rounded_number(number, rounding_spec(fmt))
