"""Saved tensors: what an operation saves for its backward pass is packed once the operation's result is rounded.

A checkpoint and an offloading hook take a tensor in the moment in which an operation saves it. The emulation rounds the
result after that, in the same memory. So the hooks are asked after the rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["Hooks", "packed_afterwards"]

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class _Saved:
    """A saved tensor: the tensor itself, then what the hook makes of it."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


@contextmanager
def packed_afterwards(hooks: Hooks) -> Iterator[None]:
    """A block in which tensors are saved as they are; `hooks` pack them when it ends."""
    pack, unpack = hooks
    waiting: list[_Saved] = []

    def keep(x: Tensor) -> _Saved:
        saved = _Saved(x)
        waiting.append(saved)
        return saved

    with saved_tensors_hooks(keep, lambda saved: unpack(saved.value)):
        yield
    for saved in waiting:
        saved.value = pack(saved.value)
