"""Weights that are rounded once: their rounded copies, kept from call to call while the weights are frozen."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fpsim.emulation.marks import ByIdentity, writes_to
from fpsim.torch_modes import plain_tensors

__all__ = ["KeptWeights"]

_PATTERNS = {8: torch.int64, 4: torch.int32, 2: torch.int16}  # by the size of a number in bytes


class _Kept(NamedTuple):
    """A rounded copy of a weight.

    writes: how often the weight had been written to.
    make: makes it again, from the weight.
    """

    writes: int
    copy: Tensor
    make: Callable[[Tensor], Tensor]


class KeptWeights:
    """The rounded copies of the weights of one model, from the first call that uses them on.

    name_of: what the error calls a weight.
    """

    def __init__(self, name_of: Callable[[Tensor], str]) -> None:
        self._name_of = name_of
        self._kept: ByIdentity[dict[Hashable, _Kept]] = ByIdentity()  # of a weight, by what it is rounded to
        self._copies: ByIdentity[bool] = ByIdentity()  # True of each copy: a product quantises it once more

    def is_kept(self, x: Tensor) -> bool:
        """Whether `x` is a parameter, or the kept copy of one."""
        return type(x) is nn.Parameter or self._copies.get(x) is not None

    def copy_of(self, x: Tensor, key: Hashable, make: Callable[[Tensor], Tensor]) -> Tensor:
        """The kept copy of a weight, which is `make(x)`. Raises RuntimeError where the weight was written to since."""
        copies = self._kept.get(x)
        if copies is None:
            copies = self._kept[x] = {}
        kept = copies.get(key)
        if kept is None:
            with plain_tensors():  # another call may need a gradient
                kept = copies[key] = _Kept(writes_to(x), make(x), make)
            self._copies[kept.copy] = True
        elif kept.writes != writes_to(x):
            raise self._written(x)
        return kept.copy

    def require_unchanged(self) -> None:
        """Raise RuntimeError for a weight that is not what it was when it was rounded, whoever wrote to it and how.

        Each copy is made again and compared: `w.data` and NumPy write where no counter sees it.
        """
        for x, copies in self._kept.items():
            for kept in copies.values():
                if kept.writes != writes_to(x) or not _same_bits(kept.copy, kept.make(x)):
                    raise self._written(x)

    def _written(self, x: Tensor) -> RuntimeError:
        return RuntimeError(
            f"{self._name_of(x)} was written to inside of fpsim.frozen(model), which rounds each weight once. What was "
            f"computed since may be of the old numbers. Write to weights outside of the block, and begin it again."
        )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    pattern = _PATTERNS[a.element_size()]
    return torch.equal(a.detach().contiguous().view(pattern), b.detach().contiguous().view(pattern))
