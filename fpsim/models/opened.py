"""Objects that a compiled program gives back: opened into what a program knows, and rebuilt by it.

A program gives its caller tensors and numbers in containers that torch's pytrees know. A cache of keys is an object of
plain Python around them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fpsim.torch_internals import map_leaves, register_container

__all__ = ["open_objects"]

_COMPUTED = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_CONSTANTS = (int, float, bool, complex, str, type(None), torch.dtype, torch.device)  # of a program
# The types that objects have or keep. The compiler can give back a type only by the place where it stands.
_types: dict[str, type] = {}

_MAKING = ("__new__", "__setattr__")  # where a type has its own, attributes do not tell all of it


@dataclass(frozen=True)
class _Object:
    """An object in a form that a program can give back; it becomes the object again where it is unflattened.

    of: its type, by its place in `_types`.
    names, values: its attributes, with what is in them opened.
    """

    of: str
    names: tuple[str, ...]
    values: list[Any]


@dataclass(frozen=True)
class _Constant:
    value: Any


@dataclass(frozen=True)
class _Type:
    place: str


# The compiler reads these three line by line.


def _make_object(values: Any, context: Any) -> Any:
    """The object, made without its `__init__`."""
    of, names = context
    instance: Any = object.__new__(_types[of])
    for name, value in zip(names, values):
        setattr(instance, name, value)
    return instance


def _make_constant(values: Any, context: Any) -> Any:
    return context


def _make_type(values: Any, context: Any) -> Any:
    return _types[context]


register_container(_Object, lambda x: (x.values, (x.of, x.names)), _make_object)
register_container(_Constant, lambda x: ([], x.value), _make_constant)
register_container(_Type, lambda x: ([], x.place), _make_type)


def open_objects(out: Any) -> tuple[Any, str | None]:
    """`out` with every object of plain Python opened, and the first type in it, by name, that cannot be."""
    unknown: list[str] = []

    def opened(leaf: Any, outer: tuple[int, ...] = ()) -> Any:
        if isinstance(leaf, _COMPUTED):
            return leaf
        if isinstance(leaf, _CONSTANTS):
            return _Constant(leaf)
        if isinstance(leaf, type):
            return _Type(_place(leaf))
        if not _is_plain(leaf) or id(leaf) in outer:
            unknown.append(type(leaf).__name__)
            return leaf
        inside = (*outer, id(leaf))
        values = [map_leaves(lambda inner: opened(inner, inside), value) for value in vars(leaf).values()]
        return _Object(_place(type(leaf)), tuple(vars(leaf)), values)

    result = map_leaves(opened, out)
    return result, unknown[0] if unknown else None


def _place(of: type) -> str:
    place = f"{of.__module__}.{of.__qualname__} at {id(of)}"
    _types[place] = of
    return place


def _is_plain(x: Any) -> bool:
    """Whether all that `x` is stands in its `__dict__`."""
    of = type(x)
    has_slots = any(vars(c).get("__slots__") for c in of.__mro__)
    is_made_plainly = not has_slots and all(getattr(of, name) is getattr(object, name) for name in _MAKING)
    return hasattr(x, "__dict__") and is_made_plainly and not isinstance(x, nn.Module) and not callable(x)
