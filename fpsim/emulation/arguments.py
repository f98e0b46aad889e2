"""The tensors among the arguments and results of a call, and their properties that decide how it is emulated."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fpsim.emulation.casts import WIDE_DTYPES
from fpsim.emulation.marks import format_of, is_marked_wide, is_roundable
from fpsim.kernels.statistics import AMAX
from fpsim.tensors.moments import amax_of
from fpsim.tensors.spec import RoundingSpec
from fpsim.torch_internals import base_of, has_history, is_traced
from fpsim.torch_modes import is_plain

__all__ = [
    "are_integers",
    "as_numbers",
    "has_lazy",
    "keep_masks",
    "mask_among",
    "masks_to_scale",
    "renormalised",
    "roundable_in",
    "tensors_in",
    "typed_in",
]


def tensors_in(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, tuple | list):
        for item in out:
            yield from tensors_in(item)


def roundable_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return [x for x in (*tensors_in(args), *tensors_in(tuple(kwargs.values()))) if is_roundable(x)]


def typed_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that may be float32 on purpose: roundable ones, complex ones, and sparse ones marked so."""
    # The generators of `tensors_in` are avoided, because every call runs this function.
    tensors: list[Tensor] = []
    for x in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(x, Tensor):
            if is_roundable(x) or x.is_complex() or (x.layout is not torch.strided and is_marked_wide(x)):
                tensors.append(x)
        elif isinstance(x, tuple | list):
            tensors += typed_in(tuple(x), {})
    return tensors


def are_integers(args: tuple[Any, ...]) -> bool:
    tensors = [*tensors_in(args)]
    return bool(tensors) and not any(x.is_floating_point() or x.is_complex() for x in tensors)


@cache
def has_lazy(types: tuple[type, ...]) -> bool:
    """True if an uninitialised parameter or buffer is among the arguments of these types."""
    return any(issubclass(kind, UninitializedParameter | UninitializedBuffer) for kind in types)


@cache
def mask_among(types: tuple[type, ...]) -> Any:
    """Return the type among these that is an attention mask, of torch.nn.attention.bias; None without one."""
    # Such a mask holds no numbers to round, and a copy of it would be a plain tensor.
    return next((kind for kind in types if kind.__module__ == "torch.nn.attention.bias"), None)


def renormalised(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Renormalise the weight of an embedding, and return the arguments without `max_norm`."""
    # The weight itself is renormalised here: with `max_norm`, the call would renormalise only the rounded copy.
    torch.embedding_renorm_(args[1].detach(), args[0].contiguous(), kwargs["max_norm"], kwargs["norm_type"])
    return {**kwargs, "max_norm": None}


def as_numbers(x: Any) -> Any:
    """Return an argument to be read; detach a view whose `grad_fn` torch refuses after a write to its base."""
    if not isinstance(x, Tensor) or not x.requires_grad or base_of(x) is None or format_of(x) is not None:
        return x
    return x if has_history(x) else x.detach()


# Masks: float32's extremes at positions hidden from attention. Code uses them if torch has no dtype for the format.


def masks_to_scale(spec: RoundingSpec | None, args: tuple[Any, ...]) -> Tensor | None:
    """Return where a tensor that a call scales by a number has masks; None if no mask can be lost.

    A scaled mask would be an ordinary number, which becomes infinite or saturates.
    """
    # Where torch has a dtype for the format, masks are this dtype's extremes, and may be scaled as torch does. In
    # a format that reaches beyond 2**100, a scaled extreme of float32 still hides every position.
    if spec is None or spec.dtype is not None or float(spec.fmt.largest) > 2.0**100:
        return None
    tensors = [x for x in args if isinstance(x, Tensor)]
    if len(tensors) != 1 or not is_roundable(tensors[0]) or tensors[0].dtype not in WIDE_DTYPES:
        return None
    x = tensors[0].detach()
    largest, is_now = torch.finfo(x.dtype).max, is_plain(x)
    # Tensors of a transform have no memory to read.
    if not (is_now or is_traced(x)):
        return None
    # One pass over the memory often saves the comparison and the `where`. On a card, the CPU would wait for this pass.
    if is_now and x.is_cpu and float(amax_of(x)[AMAX]) < largest:
        return None
    return x.abs() == largest


def keep_masks(out: Any, masks: Tensor | None) -> Any:
    """Turn the results of masks into masks again, in the memory of `out` and below autograd."""
    # `(scores + mask) / 8` then has a row of equal masks, where native code has a row of equal numbers.
    if masks is not None and out.dtype in WIDE_DTYPES and out.shape == masks.shape:
        with torch.no_grad():
            largest = torch.finfo(out.dtype).max
            out.data.copy_(torch.where(masks & out.isfinite(), out.sign() * largest, out))
    return out
