"""Find masks, such as -inf before a softmax, that hide positions, and softmaxes that give these positions weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fpsim.emulation.operations import Kind, row_of, spelling_of
from fpsim.emulation.tracing import Operation
from fpsim.insight.ranges import Ends, first_index
from fpsim.insight.reasons.event import Event

__all__ = ["LEAKS", "fills", "is_mask_like", "leak", "leaking", "masked_in", "number_in"]

_FAR = -1e3  # finite constants up to this one are masks
LEAKS = 1e-5  # a mask leaks if a masked position has at least this weight


def fills(operation: Operation) -> bool:
    """True if an operation writes infinities into its result on purpose."""
    return row_of(operation.name).kind is Kind.FILL


def is_mask_like(x: Tensor) -> bool:
    """True if the minus infinities of a tensor may be a mask: no number in it is above zero, and none is NaN."""
    return not bool((x > 0).any()) and not bool(x.isnan().any())


def masked_in(
    operation: Operation, operands: list[Tensor], arguments: tuple[Any, ...], result: Tensor
) -> Tensor | None:
    """Return the positions of a result that a finite constant, or a tensor of such constants, masks; None if none."""
    spelling = spelling_of(operation.name)
    name, kind = spelling.row.name, spelling.row.kind
    if name in ("masked_fill", "where"):
        masks = [a for a in arguments if isinstance(a, Tensor) and a.dtype is torch.bool]
        # The constant may also be a tensor of one number, such as torch.tensor(-1e9).
        fills = [*number_in(arguments), *(float(x) for x in operands if x.numel() == 1)]
        if not masks or not any(c <= _FAR for c in fills):
            return None
        where = masks[0] if name != "where" else _side_of(masks[0], arguments)
        return _shaped(where, result)
    # Attention masks are often computed as (1 - mask) * -1e9 from a mask of zeros and ones.
    if name == "mul" and any(c <= _FAR for c in number_in(arguments)) and operands:
        x = operands[0]
        return _shaped(x != 0, result) if bool(((x == 0) | (x == 1)).all()) else None
    # A subtracted constant changes its sign, and masks nothing: the second operand of `sub`, the first one of `rsub`.
    if kind is Kind.ADDITION and not spelling.is_swapped:
        added = 1 if name == "sub" else len(operands)
        for source, x in zip(operation.sources, operands[:added], strict=False):
            known = None if source is None else source.notes.get("masked")
            if known is not None and known.shape == x.shape:
                return _shaped(known, result)
            if _masks(source, x):
                return _shaped(x <= _FAR, result)
    # The mask is passed on through views and operations that keep it, up to the softmax.
    for source in operation.sources[:1]:
        known = None if source is None else source.notes.get("masked")
        if known is not None and known.shape == result.shape and spelling.row.keeps_mask and not spelling.is_swapped:
            return known  # type: ignore[no-any-return]
        if known is not None and kind is Kind.VIEW and known.numel() == result.numel():
            return known.reshape(result.shape)  # type: ignore[no-any-return]
    return None


def _masks(source: Operation | None, x: Tensor) -> bool:
    """True if an addend is a mask: it holds constants far below zero."""
    x = x.detach()
    if not x.numel() or not float(x.amin()) <= _FAR:
        return False
    # A mask from outside may also hold a bias for positions, which is not above zero. A result of the model may be
    # scores, and some scores may be as far below zero as a mask's constants. So a result is a mask only if all its
    # other numbers are zero.
    return not bool((x > 0).any() if source is None else ((x > _FAR) & (x != 0)).any())


def _side_of(condition: Tensor, arguments: tuple[Any, ...]) -> Tensor:
    """Return the condition under which `where` takes the constant, which may be either of its two values."""
    first = arguments[1] if len(arguments) > 1 else None
    is_one = isinstance(first, int | float) or (isinstance(first, Tensor) and first.numel() == 1)
    is_first = is_one and float(first.detach() if isinstance(first, Tensor) else first) <= _FAR  # type: ignore[arg-type]
    return condition if is_first else ~condition


def _shaped(mask: Tensor, like: Tensor) -> Tensor | None:
    """Broadcast a mask to the shape of a result; None if that is impossible."""
    try:
        return mask.broadcast_to(like.shape)
    except RuntimeError:
        return None


def leaking(operation: Operation, result: Tensor) -> Tensor | None:
    """Return the weights of masked positions in a softmax, zero elsewhere; None if they are negligible."""
    source = operation.sources[0] if operation.sources else None
    masked = None if source is None else source.notes.get("masked")
    if operation.name not in ("softmax", "log_softmax") or masked is None or masked.shape != result.shape:
        return None
    weights = result if operation.name == "softmax" else result.exp()
    # Weights are compared rather than scores, because a mask leaks only if its positions have weight. A fully masked
    # row is uniform on purpose, and does not count.
    partly = torch.where(masked & ~masked.all(-1, keepdim=True), weights, torch.zeros((), dtype=result.dtype))
    return partly if bool((partly >= LEAKS).any()) else None


def number_in(arguments: tuple[Any, ...]) -> list[float]:
    """Return the Python numbers among the arguments of a call."""
    # A bool is an int in Python, but `keepdim=True` is not a number.
    return [float(a) for a in arguments if isinstance(a, int | float) and not isinstance(a, bool)]


def leak(operation: Operation, operands: list[Tensor], result: Tensor, ends: Ends) -> Event | None:
    """Return the event of a softmax that gives weight to positions masked by a constant."""
    weights = leaking(operation, result)
    if weights is None:
        return None
    source = operation.sources[0]
    assert source is not None
    masked, x = source.notes["masked"], operands[0]
    event = Event("forward", "mask leaks", operation.site, "activation", operation=operation, origin=source, ends=ends)
    event.count, event.of, event.fmt, event.remedy = int((weights >= LEAKS).sum()), result.numel(), ends.name, "fill"
    partly = masked & ~masked.all(-1, keepdim=True)
    fills, scores = x[partly], x[~masked]
    event.why.append(
        f"{event.count} masked positions get a weight, up to {float(weights.max()):.3g} (first at "
        f"{first_index(weights >= LEAKS)}): the mask is {float(fills.max()):g} in {ends.name}, scores reach "
        f"{float(scores.min()):.3g} to {float(scores.max()):.3g}."
    )
    event.read = [(source.site, f"{float(x.min()):.3g} to {float(x.max()):.3g}")]
    return event
