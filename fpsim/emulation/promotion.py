"""Numbers next to tensors in the format: round those numbers that torch would cast to the tensors' dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fpsim.emulation.calls import NARROWING, NO_OPERANDS, Action, Call, in_order, only_multiplies
from fpsim.emulation.marks import is_marked_wide, is_roundable
from fpsim.emulation.operands import Rounds
from fpsim.emulation.operations import Number
from fpsim.formats.blocks import Element
from fpsim.tensors.expressions import round_here_
from fpsim.tensors.launch import rounded_number
from fpsim.tensors.spec import RoundingSpec, rounding_spec

__all__ = [
    "NUMBERS",
    "integers_in_format",
    "number_in_format",
    "numbers_in_format",
    "scalars_in_format",
    "scalars_of_call",
    "step_in_format",
]

NUMBERS = (float, int, np.floating, np.integer)  # of Python and NumPy
_BEYOND_INT64 = 2**63


def scalars_in_format(
    spec: RoundingSpec | None, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], is_wide: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments, with Python numbers next to a tensor of the format rounded to the format."""
    # Arithmetic uses a Python number uncast, in torch's opmath type. Comparisons and writes first cast it to the dtype.
    is_read = call.is_comparison or call.action is Action.SET_ITEM
    if is_wide or spec is None or not (is_read or call.has_threshold):
        return args, kwargs
    beside = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and is_roundable(x)]
    if not beside or (call.threshold == "on card" and not any(x.is_cuda for x in beside)):
        return args, kwargs
    # The target and the index of a write come before its values, and stay as they are.
    before = 2 if call.action is Action.SET_ITEM else 0
    args = (*args[:before], *[numbers_in_format(x, spec.fmt, NUMBERS) for x in args[before:]])
    if kwargs:
        kwargs = {name: numbers_in_format(x, spec.fmt, NUMBERS) for name, x in kwargs.items()}
    return args, kwargs


def scalars_of_call(
    emulation: Any, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], is_wide: bool, keeps_first: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments, with Python numbers and 0-dimensional tensors in the format where torch casts them."""
    # A 0-dimensional float32 tensor does not decide the result's dtype: torch casts the tensor before it computes, with
    # two exceptions. On the CPU, torch multiplies and divides by such a tensor in float32. On a card, torch computes
    # sums and products in float32 if such a tensor lies on the CPU.
    if call.has_threshold:
        args, kwargs = scalars_in_format(emulation.scope.specs.activation, call, args, kwargs, is_wide)
    if is_wide or not emulation.has_wide or call.number is Number.EXACT:
        return args, kwargs
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    is_on_card = any(x.is_cuda for x in given)
    # Without a tensor that has dimensions, torch promotes to float32 as usual.
    if not any(x.dim() for x in given):
        return args, kwargs

    def narrow(place: int | str, x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.dim() == 0 and is_roundable(x) and is_marked_wide(x)):
            return x
        if (place == 0 and keeps_first) or place in NO_OPERANDS or _is_taken_as_it_is(call, place, x, is_on_card):
            return x
        return emulation.operand(x, Rounds.ALL)

    args = tuple(narrow(i, x) for i, x in enumerate(args))
    return args, {name: narrow(name, x) for name, x in kwargs.items()}


def _is_taken_as_it_is(call: Call, place: int | str, x: Tensor, is_on_card: bool) -> bool:
    """True if torch does not cast a one-element tensor that is next to tensors of low precision."""
    is_second = place == 1 or place == "other"
    is_number = call.number is not Number.CAST if is_on_card else call.number is Number.SECOND and is_second
    return is_number and x.is_cpu


def integers_in_format(
    emulation: Any, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], keeps_first: bool, floats: list[Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments, with integer tensors cast to the format if they are next to tensors in the format.

    floats: the operands in their formats; the cast integers are appended.
    """
    spec = emulation.scope.specs.activation
    target = args[0] if keeps_first and args else None
    is_beside = bool(floats) or (isinstance(target, Tensor) and is_roundable(target))
    # In float32 torch promotes integers by itself, and integers alone have no format.
    if spec is None or spec.is_float32 or not is_beside:
        return args, kwargs
    # torch raises its own error: the operands of a matrix product must have one dtype.
    if call.name in NARROWING and not only_multiplies(call.name, args, kwargs):
        return args, kwargs
    # The target of a write, and an index, keep their dtypes.
    before = 2 if call.action is Action.SET_ITEM else int(keeps_first)
    is_on_card = any(x.is_cuda for x in floats)
    cast = partial(_integer_in_format, emulation, call, is_on_card, floats)
    args = (*args[:before], *[cast(i, x) for i, x in enumerate(args[before:], before)])
    return args, {name: x if name in NO_OPERANDS else cast(name, x) for name, x in kwargs.items()}


def _integer_in_format(
    emulation: Any, call: Call, is_on_card: bool, floats: list[Tensor], place: int | str, x: Any
) -> Any:
    if type(x) in (list, tuple):
        return type(x)([_integer_in_format(emulation, call, is_on_card, floats, place, item) for item in x])
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex():
        return x
    # Truth values are exact in every format. Only calls that move them need them cast, because the result has a format.
    if x.dtype is torch.bool and call.action not in (Action.MOVE, Action.SET_ITEM):
        return x
    if x.numel() == 1 and _is_taken_as_it_is(call, place, x, is_on_card):
        return x
    made = emulation.integer_operand(x)
    floats.append(made)
    return made


def numbers_in_format(x: Any, fmt: Element, kinds: tuple[type, ...] = (float,)) -> Any:
    """Round a number, or each number of a list, to the format; return anything else as it is.

    kinds: types of the numbers that are rounded. int is not among them by default: it may be a size or a position.
    """
    if type(x) in (list, tuple) and all(type(item) is not bool and isinstance(item, kinds) for item in x):
        return type(x)(number_in_format(item, fmt) for item in x)
    return number_in_format(x, fmt) if isinstance(x, kinds) and type(x) is not bool else x


@lru_cache(1 << 12, typed=True)
def number_in_format(number: float, fmt: Element) -> float:
    """Round a Python number to the value that a tensor in the format would hold."""
    # The number stays as it is, so that torch raises its error about too large numbers.
    if isinstance(number, int) and abs(number) >= _BEYOND_INT64:
        return number
    # A number of at least float32's largest magnitude is a mask, which no format changes.
    if not math.isfinite(number) or abs(number) >= torch.finfo(torch.float32).max:
        return number
    return rounded_number(float(number), rounding_spec(fmt))


def step_in_format(
    emulation: Any, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Any
) -> Any:
    """Compute `torch.nextafter` with steps of the format."""
    spec = emulation.scope.specs.activation
    if spec is not None and not spec.is_float32:
        func = partial(_step, func, spec.fmt)
    return emulation.compute(func, call, args, kwargs, asked)


def _step(func: Callable[..., Any], fmt: Element, *args: Any, **kwargs: Any) -> Tensor:
    """Return the number of the format next to x, found by directed rounding of float32's next number."""
    operands = [*args, *in_order({name: x for name, x in kwargs.items() if name != "out"})]
    wide = [is_marked_wide(x) for x in operands]
    if all(wide) or any(known and x.dim() for known, x in zip(wide, operands, strict=True)):
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    # The operands are copied, because the call may write to one of them.
    x, toward = (y.detach().clone() for y in operands)
    out: Tensor = func(*args, **kwargs)
    above, below = (out.detach().clone() for _ in range(2))
    round_here_(above, rounding_spec(fmt, "up"))
    round_here_(below, rounding_spec(fmt, "down"))
    with torch.no_grad():
        out.data.copy_(torch.where(toward > x, above, torch.where(toward < x, below, out)))
    return out
