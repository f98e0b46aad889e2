"""The event of a softmax that looks at what a mask hides."""

from __future__ import annotations

from torch import Tensor

from fpsim.emulation.tracing import Operation
from fpsim.insight.masks import LEAKS, leaking
from fpsim.insight.ranges import Ends, first_index
from fpsim.insight.reasons.event import Event

__all__ = ["leak"]


def leak(operation: Operation, operands: list[Tensor], result: Tensor, ends: Ends) -> Event | None:
    """The event of a softmax that gives weight to what a constant masks."""
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
