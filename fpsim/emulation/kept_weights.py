"""Cache of rounded copies of weights, which are used from call to call while the weights are frozen."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fpsim.emulation.marks import ByIdentity, writes_to
from fpsim.policies.operand import ProductSpecs
from fpsim.torch_modes import plain_tensors

__all__ = ["KeptWeights", "key_of_product"]

_PATTERNS = {8: torch.int64, 4: torch.int32, 2: torch.int16}  # by the size of a number in bytes


class _Kept(NamedTuple):
    """A rounded copy of a weight.

    writes: how often the weight had been written to when the copy was made.
    make: function that makes the copy again from the weight.
    is_by_number: whether each number is rounded alone: a part of the weight then rounds to the same part of the copy.
    """

    writes: int
    copy: Tensor
    make: Callable[[Tensor], Tensor]
    is_by_number: bool


class KeptWeights:
    """Cache of the rounded weights of one model; the first call that uses a weight fills its entry.

    name_of: function that returns the name of a weight, for an error.
    """

    def __init__(self, name_of: Callable[[Tensor], str]) -> None:
        self._name_of = name_of
        self._kept: ByIdentity[dict[Hashable, _Kept]] = ByIdentity()  # of a weight, by its spec
        self._copies: ByIdentity[bool] = ByIdentity()  # True for each copy: a product quantises it once more

    def is_kept(self, x: Tensor) -> bool:
        """True if `x` is a parameter, or the cached copy of a parameter."""
        return type(x) is nn.Parameter or self._copies.get(x) is not None

    def find(self, x: Tensor, key: Hashable) -> Tensor | None:
        """Return the cached copy, or None. Raises RuntimeError if the weight was written to after it was copied."""
        copies = self._kept.get(x)
        kept = None if copies is None else copies.get(key)
        if kept is None:
            return None
        if kept.writes != writes_to(x):
            raise self._written(x)
        return kept.copy

    def copy_of(self, x: Tensor, key: Hashable, make: Callable[[Tensor], Tensor], is_by_number: bool = False) -> Tensor:
        """Return the cached copy of a weight, or make it by `make(x)`. Raises RuntimeError as `find` does.

        is_by_number: whether `make` rounds each number on its own.
        """
        found = self.find(x, key)
        if found is not None:
            return found
        copies = self._kept.get(x)
        if copies is None:
            copies = self._kept[x] = {}
        # The copy is made outside of inference mode, because a later call may need a gradient, and autograd cannot save
        # inference tensors.
        with plain_tensors():
            kept = copies[key] = _Kept(writes_to(x), make(x), make, is_by_number)
        self._copies[kept.copy] = True
        return kept.copy

    def require_unchanged(self) -> None:
        """Raise RuntimeError for a weight that has changed since it was rounded, by any kind of write."""
        for x, copies in self._kept.items():
            # Each copy is made again and compared, because writes through `w.data` and NumPy do not raise the version
            # counter. A copy of a copy needs no comparison, because no other code can write to the first copy.
            is_weight = self._copies.get(x) is None
            for kept in copies.values():
                if kept.writes != writes_to(x) or (is_weight and not _is_still(kept, x)):
                    raise self._written(x)

    def _written(self, x: Tensor) -> RuntimeError:
        return RuntimeError(
            f"{self._name_of(x)} was written to inside of fpsim.frozen(model), which rounds each weight once. What was "
            f"computed since may be of the old numbers. Write to weights outside of the block, and begin it again."
        )


def key_of_product(specs: ProductSpecs, side: Hashable) -> Hashable | None:
    """Return the cache key of a forward product's second operand; None if each call has to quantise it.

    side: the layout of this operand in the product.
    """
    first, operand = specs.fprop
    if operand is None or operand.rounding == "stochastic" or operand.is_delayed or operand.is_own:
        return None
    # With clipping, each call records which numbers saturate. A Hadamard transform of x is applied to w as well.
    is_changed = operand.ste == "clip" or (first is not None and first.hadamard is not None)
    return None if is_changed else (str(operand), side)


_AT_ONCE = 1 << 16  # the most numbers that are made again at once: they fit the processor's cache, and memory is reused


def _is_still(kept: _Kept, x: Tensor) -> bool:
    """True if rounding the weight `x` now gives the cached copy again."""
    if not (kept.is_by_number and x.is_contiguous() and kept.copy.is_contiguous()):
        return _same_bits(kept.copy, kept.make(x))
    parts = zip(*(y.detach().view(-1).split(_AT_ONCE) for y in (kept.copy, x)), strict=True)
    return all(_same_bits(copied, kept.make(part)) for copied, part in parts)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    pattern = _PATTERNS[a.element_size()]
    a, b = (x.detach().contiguous().view(pattern) for x in (a, b))
    # NumPy takes a fifth of torch's time: it compares several numbers at once.
    return np.array_equal(a.numpy(), b.numpy()) if a.is_cpu else torch.equal(a, b)
