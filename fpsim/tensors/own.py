"""User-defined roundings: a function of a tensor and an axis that replaces a format of an operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fpsim.tensors.spec import OwnFormat, RoundingSpec
from fpsim.torch_internals import is_traced
from fpsim.torch_modes import without_torch_function

__all__ = ["own_format", "own_spec", "rounded_by_function"]


def own_format(function: Callable[[Tensor, int], Tensor], label: str) -> OwnFormat:
    """Return the format that represents a function."""
    return OwnFormat(8, 23, function=function, label=label)


def own_spec(fmt: OwnFormat) -> RoundingSpec:
    """Return the rounding of an operand by a function."""
    return RoundingSpec(fmt, "own", "inf")


def rounded_by_function(
    x: Tensor, fmt: OwnFormat, axis: int, site: str, clips: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return an operand rounded by the function and, if it clips, a mask of the elements whose gradient passes.

    x: a float32, or a float64 of a float64 model, which the function receives as float32.
    axis: the axis that the product sums over, 0 or more.
    site: the site of the product, for errors.
    clips: whether the function returns a pair.

    Raises TypeError for a result of another type, shape, dtype or device, and ValueError if the function returns NaN
    for numbers.
    """
    if is_traced(x):
        rounded, passes = torch.ops.fpsim.own_operand(x, _key_of(fmt), axis, site, clips)
        return rounded, passes if clips else None
    # Enclosing torch modes are off: the function replaces a rounding, and the operations inside it are not emulated.
    with torch.no_grad(), without_torch_function():
        kept = x.detach().to(torch.float32)
        # The function gets a copy, because it may write in place.
        given = kept.clone(memory_format=torch.contiguous_format)
        out: Any = fmt.function(given, axis % max(x.dim(), 1))
        where = f"The operand function {fmt.label} at {site}"
        passes = None
        if clips:
            is_pair = isinstance(out, tuple | list) and len(out) == 2
            out, passes = out if is_pair else (out, None)
            if not isinstance(passes, Tensor) or (passes.shape, passes.dtype) != (x.shape, torch.bool):
                got = [type(out).__name__] if not is_pair else [_said(each) for each in (out, passes)]
                raise TypeError(
                    f"{where} returned {' and '.join(got)}. Expected: with ste='clip' a pair, the numbers and a bool "
                    f"tensor of the shape {tuple(x.shape)}, True where the gradient passes."
                )
        if not isinstance(out, Tensor) or (out.shape, out.dtype, out.device) != (x.shape, torch.float32, x.device):
            raise TypeError(
                f"{where} returned {_said(out)}. Expected: a float32 tensor of the shape {tuple(x.shape)} that it was "
                f"given, on {x.device}."
            )
        if bool(out.isnan().any()) and bool(kept.isfinite().all()):
            raise ValueError(
                f"{where} made NaN of numbers. Expected: NaN where the operand has one, or an infinity beside it. Look "
                f"at blocks of zeros: 0 / 0."
            )
        return out.detach().to(x.dtype), passes


def _said(out: object) -> str:
    if not isinstance(out, Tensor):
        return type(out).__name__
    return f"a {str(out.dtype).removeprefix('torch.')} of shape {tuple(out.shape)} on {out.device}"


# The operator that torch.compile sees: the function itself is not traced, and runs in the middle of the program.

_by_key: dict[str, OwnFormat] = {}


def _key_of(fmt: OwnFormat) -> str:
    """Return the string that stands for a function in a program; functions of the same name get different strings."""
    base = f"{getattr(fmt.function, '__module__', '')}:{fmt.label}"
    key, number = base, 1
    while _by_key.setdefault(key, fmt) != fmt:
        number += 1
        key = f"{base}#{number}"
    return key


@torch.library.custom_op("fpsim::own_operand", mutates_args=())
def _own_operand(x: Tensor, key: str, axis: int, site: str, clips: bool) -> tuple[Tensor, Tensor]:
    rounded, passes = rounded_by_function(x, _by_key[key], axis, site, clips)
    return rounded.contiguous(), torch.empty(0, dtype=torch.bool, device=x.device) if passes is None else passes.clone()


@_own_operand.register_fake
def _(x: Tensor, key: str, axis: int, site: str, clips: bool) -> tuple[Tensor, Tensor]:
    rounded = torch.empty_like(x, memory_format=torch.contiguous_format)
    return rounded, rounded.new_empty(x.shape if clips else (0,), dtype=torch.bool)
