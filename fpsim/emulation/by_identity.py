"""A dictionary whose keys are tensors, which are told apart by identity and not kept alive.

`torch.utils.weak.WeakTensorKeyDictionary` enters four functions of Python for a look-up; each operand needs one.
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

from torch import Tensor

__all__ = ["ByIdentity"]

Value = TypeVar("Value")


class ByIdentity(Generic[Value]):
    """What is known of tensors, each for as long as the tensor is there.

    held: {the tensor's id: (a reference to it, what is known of it)}. Empty while nothing is known.
    """

    __slots__ = ("__weakref__", "held")

    def __init__(self) -> None:
        self.held: dict[int, tuple[weakref.ref[Tensor], Value]] = {}

    def get(self, x: Tensor) -> Value | None:
        """What is known of a tensor; None for nothing."""
        found = self.held.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def setdefault(self, x: Tensor, value: Value) -> Value:
        """What is known of a tensor: `value` from now on, where that was nothing."""
        key = id(x)
        found = self.held.get(key)
        if found is not None and found[0]() is x:
            return found[1]
        own = weakref.ref(self)  # weak: with a cycle, all of this would wait for a collection

        def forget(_: object) -> None:
            found = own()
            if found is not None:
                found.held.pop(key, None)

        self.held[key] = weakref.ref(x, forget), value
        return value

    def __setitem__(self, x: Tensor, value: Value) -> None:
        self.held.pop(id(x), None)
        self.setdefault(x, value)

    def items(self) -> list[tuple[Tensor, Value]]:
        """The tensors that are there, with what is known of them."""
        return [(x, value) for reference, value in [*self.held.values()] if (x := reference()) is not None]
