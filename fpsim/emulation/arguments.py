"""The tensors among the arguments and results of a call, and what is asked of them before it is emulated."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fpsim.emulation.marks import format_of, is_roundable
from fpsim.torch_internals import base_of, has_history

__all__ = ["are_integers", "as_numbers", "has_lazy", "renormalised", "roundable_in", "tensors_in", "typed_in"]


def tensors_in(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, tuple | list):
        for item in out:
            yield from tensors_in(item)


def roundable_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return [x for x in (*tensors_in(args), *tensors_in(tuple(kwargs.values()))) if is_roundable(x)]


def typed_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that may be float32 on purpose: those that are rounded, and complex ones."""
    tensors: list[Tensor] = []
    for x in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(x, Tensor):
            if is_roundable(x) or x.is_complex():
                tensors.append(x)
        elif isinstance(x, tuple | list):
            tensors += typed_in(tuple(x), {})
    return tensors


def are_integers(args: tuple[Any, ...]) -> bool:
    tensors = [*tensors_in(args)]
    return bool(tensors) and not any(x.is_floating_point() or x.is_complex() for x in tensors)


@cache
def has_lazy(types: tuple[type, ...]) -> bool:
    """Whether a parameter or a buffer that has no memory yet is among the arguments."""
    return any(issubclass(kind, UninitializedParameter | UninitializedBuffer) for kind in types)


def renormalised(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an embedding after it has changed the weight itself, not the rounded copy."""
    torch.embedding_renorm_(args[1].detach(), args[0].contiguous(), kwargs["max_norm"], kwargs["norm_type"])
    return {**kwargs, "max_norm": None}


def as_numbers(x: Any) -> Any:
    """What is read, detached where torch refuses its gradient: another view of what it is a view of was written to."""
    if not isinstance(x, Tensor) or not x.requires_grad or base_of(x) is None or format_of(x) is not None:
        return x
    return x if has_history(x) else x.detach()
