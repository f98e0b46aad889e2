"""The tensors among the arguments and results of a call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fpsim.emulation.marks import is_roundable

__all__ = ["are_integers", "roundable_in", "tensors_in", "typed_in"]


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
    found: list[Tensor] = []
    for x in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(x, Tensor):
            if is_roundable(x) or x.is_complex():
                found.append(x)
        elif isinstance(x, tuple | list):
            found += typed_in(tuple(x), {})
    return found


def are_integers(args: tuple[Any, ...]) -> bool:
    tensors = [*tensors_in(args)]
    return bool(tensors) and not any(x.is_floating_point() or x.is_complex() for x in tensors)
