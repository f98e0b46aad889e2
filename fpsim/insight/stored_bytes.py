"""The bytes that an optimizer stores for each parameter: the weight, its copies, states, and their scales."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fpsim.formats.blocks import BlockFormat
from fpsim.insight.rows import Rows
from fpsim.models.optimizers import QuantizedOptimizer
from fpsim.models.parameter_store import COMPENSATION, MASTER, SECOND, ParameterStore
from fpsim.policies.update import Storage

__all__ = ["stored_bytes"]

FLOAT32, REMAINDER = 32, 16  # bits
SIZES = ("weight", "copies", "states", "scales")


def stored_bytes(quantized: QuantizedOptimizer) -> Rows:
    """A row for each parameter, and one for all: how many bytes hardware would store, and how many float32 takes.

    Numbers are counted in the bits of their formats, and scales in those of theirs. States are those that the optimizer
    has: none before its first step. Scalars, such as the number of the step, are not counted.
    """
    rows = Rows({"parameter": store.name, **_sizes(store, states)} for store, states in quantized.stored())
    names = ("elements", *SIZES, "bytes", "float32")
    rows.append({"parameter": "(all)", **{name: sum(row[name] for row in rows) for name in names}})
    return rows


def _sizes(store: ParameterStore, states: dict[str, Any]) -> dict[str, int]:
    """The bytes of one parameter, each kind rounded up to whole ones."""
    x = store.parameter
    parts: list[tuple[str, tuple[int, int]]] = [("weight", _bits(x, store.weight))]
    parts += [("copies", bits) for bits in _copies(store)]
    wide = 0
    for name, state in states.items():
        if isinstance(state, Tensor) and state.is_floating_point() and state.dim():
            storage = store.weight if store.update.is_in_format else store.state_storage(name, state)
            parts.append(("states", _bits(state, storage)))
            wide += state.numel()
    sizes = {name: sum(math.ceil(own / 8) for kind, (own, _) in parts if kind == name) for name in SIZES[:3]}
    sizes["scales"] = sum(math.ceil(shared / 8) for _, (_, shared) in parts)
    total = sum(sizes.values())
    return {"elements": x.numel(), **sizes, "bytes": total, "float32": FLOAT32 // 8 * (x.numel() + wide)}


def _copies(store: ParameterStore) -> Iterator[tuple[int, int]]:
    for name, x in store.kept.items():
        if name == MASTER and store.update.compensation == "remainder16":
            yield REMAINDER * x.numel(), 0
        elif name == MASTER:
            yield _bits(x, store.update.master_storage)
        elif name in (SECOND, COMPENSATION):
            yield _bits(x, store.weight)


def _bits(x: Tensor, storage: Storage | None) -> tuple[int, int]:
    """The bits of a tensor's numbers, and of their scales."""
    if storage is None:
        return FLOAT32 * x.numel(), 0
    fmt = storage.spec.fmt
    if not isinstance(fmt, BlockFormat):
        return int(fmt.bits) * x.numel(), 0
    whole = FLOAT32 if fmt.tensor_scale else 0
    return int(fmt.element.bits) * x.numel(), _blocks(x, fmt) * fmt.scale.bits + whole


def _blocks(x: Tensor, fmt: BlockFormat) -> int:
    """How many scales a tensor has; blocks of a number of elements run through its memory."""
    if isinstance(fmt.block, int):
        return math.ceil(x.numel() / fmt.block)
    if fmt.block == "tensor" or x.dim() < 2:
        return min(x.numel(), 1)
    if fmt.block == "row":
        return x.numel() // x.shape[-1] if x.numel() else 0
    rows, columns = fmt.tile
    matrices = math.prod(x.shape[:-2])
    return matrices * math.ceil(x.shape[-2] / rows) * math.ceil(x.shape[-1] / columns)
