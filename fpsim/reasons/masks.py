"""Which numbers of a result stand for "not to be looked at", and whether softmax looks at them all the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fpsim.emulation.tracing import Operation
from fpsim.reasons.event import Event
from fpsim.reasons.explaining import number_in
from fpsim.reasons.numbers import Ends, first_index

__all__ = ["leak", "masked_in"]

_FAR = -1e3  # a finite constant from which on down a score is a mask
_LEAKS = 1e-5  # the least weight on a masked position that counts
_FILLS = frozenset("masked_fill masked_fill_ where".split())
_ADDITIONS = frozenset("add sub iadd add_ radd masked_fill".split())


def masked_in(
    operation: Operation, operands: list[Tensor], arguments: tuple[Any, ...], result: Tensor
) -> Tensor | None:
    """Where a finite constant, or a tensor of such constants, masks the result; None where nothing does."""
    if operation.name in _FILLS:
        masks = [a for a in arguments if isinstance(a, Tensor) and a.dtype is torch.bool]
        fills = [*number_in(arguments), *(float(x) for x in operands if x.numel() == 1)]
        if not masks or not any(c <= _FAR for c in fills):
            return None
        where = masks[0] if operation.name != "where" else _side_of(masks[0], arguments)
        return _shaped(where, result)
    if operation.name in ("mul", "rmul", "masked_fill") and any(c <= _FAR for c in number_in(arguments)) and operands:
        x = operands[0]
        return _shaped(x != 0, result) if bool(((x == 0) | (x == 1)).all()) else None
    if operation.name in _ADDITIONS:
        for source, x in zip(operation.sources, operands, strict=False):
            known = None if source is None else source.notes.get("masked")
            if known is not None and known.shape == x.shape:
                return _shaped(known, result)
            if source is None and bool((x <= _FAR).any()) and not bool((x > 0).any()):
                return _shaped(x <= _FAR, result)
    for source in operation.sources[:1]:
        known = None if source is None else source.notes.get("masked")
        if known is not None and known.shape == result.shape and operation.name in _KEEP:
            return known  # type: ignore[no-any-return]
        if known is not None and operation.name in _VIEWS and known.numel() == result.numel():
            return known.reshape(result.shape)  # type: ignore[no-any-return]
    return None


_KEEP = frozenset(
    "div truediv mul to float half bfloat16 type contiguous clone idiv div_ add sub maximum max clamp".split()
)
_VIEWS = frozenset("view reshape unsqueeze squeeze flatten __getitem__ getitem".split())


def _side_of(condition: Tensor, arguments: tuple[Any, ...]) -> Tensor:
    """Where `where` takes the constant."""
    first = arguments[1] if len(arguments) > 1 else None
    is_first = isinstance(first, int | float) or (
        isinstance(first, Tensor) and first.numel() == 1 and float(first) <= _FAR
    )
    return condition if is_first else ~condition


def _shaped(mask: Tensor, like: Tensor) -> Tensor | None:
    try:
        return mask.broadcast_to(like.shape)
    except RuntimeError:
        return None


def leak(operation: Operation, operands: list[Tensor], result: Tensor, ends: Ends) -> Event | None:
    """The event of a softmax that gives weight to what a constant masks."""
    source = operation.sources[0] if operation.sources else None
    masked = None if source is None else source.notes.get("masked")
    if masked is None or masked.shape != result.shape:
        return None
    partly = masked & ~masked.all(-1, keepdim=True)  # a row that is masked as a whole is uniform on purpose
    if not bool(partly.any()):
        return None
    weights = torch.where(partly, result, torch.zeros((), dtype=result.dtype))
    largest = float(weights.max())
    if largest < _LEAKS:
        return None
    assert source is not None
    event = Event("forward", "mask leaks", operation.site, "activation", operation=operation, origin=source, ends=ends)
    event.count, event.of, event.fmt, event.remedy = int((weights >= _LEAKS).sum()), result.numel(), ends.name, "fill"
    x = operands[0]
    fills, scores = x[partly], x[~masked]
    event.why.append(
        f"{event.count} masked positions get a weight, up to {largest:.3g} (first at "
        f"{first_index(weights >= _LEAKS)}): the mask is {float(fills.max()):g} in {ends.name}, scores reach "
        f"{float(scores.min()):.3g} to {float(scores.max()):.3g}."
    )
    event.read = [(source.site, f"{float(x.min()):.3g} to {float(x.max()):.3g}")]
    return event
