"""The same sums in another order: what no engine can be blamed for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["PRODUCTS_OF_TORCH", "Permuted", "Split"]

PRODUCTS_OF_TORCH: dict[Any, tuple[int, int, int, int]] = {  # positions of a and b, and along which axis each is summed
    F.linear: (0, 1, -1, -1),
    torch.matmul: (0, 1, -1, -2),
    Tensor.matmul: (0, 1, -1, -2),
    Tensor.__matmul__: (0, 1, -1, -2),
    torch.mm: (0, 1, -1, -2),
    Tensor.mm: (0, 1, -1, -2),
    torch.bmm: (0, 1, -1, -2),
    Tensor.bmm: (0, 1, -1, -2),
    torch.addmm: (1, 2, -1, -2),
    torch.baddbmm: (1, 2, -1, -2),
}


class _Products(TorchFunctionMode):
    """Runs products of matrices in another way; it is around an emulation, which has brought operands into formats."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        places = PRODUCTS_OF_TORCH.get(func)
        if places is None or len(args) <= places[1]:
            return func(*args, **named)
        a, b = args[places[0]], args[places[1]]
        is_usual = all(type(x) in (Tensor, torch.nn.Parameter) and x.dim() > 1 for x in (a, b))
        if not is_usual or a.shape[places[2]] != b.shape[places[3]]:
            return func(*args, **named)
        return self.product(func, args, named, places)

    def product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], places: Any) -> Any:
        raise NotImplementedError


def _with(args: tuple[Any, ...], places: tuple[int, int, int, int], move: Callable[[Tensor, int], Tensor]) -> Any:
    changed = [*args]
    for i, axis in ((places[0], places[2]), (places[1], places[3])):
        changed[i] = move(args[i], axis)
    return changed


class Permuted(_Products):
    """The terms of each sum in an order of their own.

    is_asked: whether what runs now is of interest; changed: how many products were while it was.
    """

    def __init__(self, is_asked: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self.changed = 0
        self._is_asked = is_asked

    def product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], places: Any) -> Any:
        self.changed += self._is_asked()
        length = args[places[0]].shape[places[2]]
        order = torch.randperm(length, generator=torch.Generator().manual_seed(length))

        def move(x: Tensor, axis: int) -> Tensor:
            return x.index_select(axis, order.to(x.device))

        return func(*_with(args, places, move), **kwargs)


class Split(_Products):
    """Each sum as that of two halves, which are added in float32: what another split of K does."""

    def product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], places: Any) -> Any:
        length = args[places[0]].shape[places[2]]
        if length < 2 or func in (torch.addmm, torch.baddbmm) or kwargs or len(args) > 2:
            return func(*args, **kwargs)
        parts = []
        for first, n in ((0, length // 2), (length // 2, length - length // 2)):

            def move(x: Tensor, axis: int, first: int = first, n: int = n) -> Tensor:
                return x.narrow(axis, first, n).contiguous().float()

            parts.append(func(*_with(args, places, move)))
        return (parts[0] + parts[1]).to(args[places[0]].dtype)
