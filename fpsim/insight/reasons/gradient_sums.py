"""Find gradients that are added up in few bits: in `.grad`, and where many operations read one tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fpsim.emulation.calls import NARROWING, Action, Call
from fpsim.emulation.operations import canonical
from fpsim.emulation.tracing import Operation
from fpsim.insight.ranges import Ends
from fpsim.insight.reasons.event import Event
from fpsim.insight.reasons.swamping import HALF_ULP, WRONG, Swamped, swamped
from fpsim.insight.reasons.widening import LOW
from fpsim.torch_internals import map_leaves, version_of

__all__ = ["GradientSum", "WideReads", "gradient_sum_event", "read_often", "reads_event"]

MISSED = 0.25  # the least relative error of an event, for a tensor that is read often: below it the direction is right
LOOK_UPS = frozenset("embedding index_select gather take take_along_dim getitem".split())


class GradientSum:
    """Sum of a parameter's gradients as they arrive one after another, both as in `.grad` and exact.

    wrong: the error of `.grad` after the last gradient; None if it is right.
    """

    def __init__(self) -> None:
        self.exact: Tensor | None = None
        self.wrong: Swamped | None = None
        self._held: Tensor | None = None  # the expected .grad when the next gradient arrives
        self._added = torch.zeros((), dtype=torch.float64)  # the magnitudes of numbers added to larger ones
        self._terms = 0

    @torch.no_grad()
    def add(self, grad: Tensor | None, gradient: Tensor) -> None:
        """Add a gradient that arrives. grad: the parameter's `.grad` before the addition."""
        if gradient.layout is not torch.strided or (grad is not None and grad.layout is not torch.strided):
            return
        # The sum starts again if `.grad` was cleared, clipped or written to in the meantime.
        if grad is None or self._held is None or self.exact is None or not torch.equal(grad, self._held):
            self.exact = torch.zeros_like(gradient, dtype=torch.float64) if grad is None else grad.double()
            self._terms, self._added = int(grad is not None), torch.zeros_like(self.exact)
        self._added = self._added + torch.minimum(self.exact.abs(), gradient.double().abs())
        self.exact = self.exact + gradient.double()
        self._terms += 1
        self._held = gradient.clone() if grad is None else grad + gradient
        ends = Ends.of_dtype(self._held.dtype)
        slack = self._terms * HALF_ULP * self.exact.abs()
        self.wrong = swamped(self._held, self.exact, self.exact.abs(), slack, ends, self._terms, self._added)


def gradient_sum_event(name: str, sums: GradientSum) -> Event:
    """Return the event of a `.grad` to which many gradients were added one by one."""
    assert sums.wrong is not None
    assert sums.exact is not None
    count = sums.exact.numel()
    event = Event("accumulation", "swamping", name, "gradient", count, count, [str(sums.wrong)])
    event.fmt, event.ends = sums.wrong.ends.name, sums.wrong.ends
    return event


class _Given:
    """Sum of the gradients from the readers of one tensor: in their dtype, as autograd adds them, and exact.

    largest: the largest magnitude of any partial sum.
    """

    def __init__(self) -> None:
        self.low: Tensor | None = None
        self.exact = self.largest = torch.zeros((), dtype=torch.float64)
        self.terms = 0

    @torch.no_grad()
    def add(self, gradient: Tensor) -> None:
        self.low = gradient if self.low is None else self.low + gradient
        self.exact = self.exact + gradient.double()
        self.largest = torch.maximum(self.largest, self.exact.abs())
        self.terms += 1

    def wrong(self) -> Swamped | None:
        if self.low is None or self.low.dtype not in LOW:
            return None
        slack = self.terms * HALF_ULP * self.largest
        found = swamped(self.low, self.exact, self.largest, slack, Ends.of_dtype(self.low.dtype), self.terms)
        return None if found is None or found.error < MISSED else found


class WideReads:
    """An `edit` of a trace that adds up in float32 the gradients of tensors that are read often.

    hubs: the indices of the operations whose results are read often.
    parameters: the ids of the parameters that are read often.
    """

    def __init__(self, hubs: Collection[int], parameters: Collection[int]) -> None:
        self._hubs, self._parameters = hubs, parameters
        self._wide = WeakTensorKeyDictionary()  # {the result of a hub: its copy}
        self._indices = WeakTensorKeyDictionary()
        self._copies: dict[tuple[int, int, bool], Tensor] = {}  # of parameters
        self.sums: dict[int, _Given] = {}  # of tensors that are read often, by the index of the operation or by id

    def __call__(
        self, index: int, kind: Call, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if kind.action is not Action.PASS and not kind.in_place:
            looks_up, lows = canonical(kind.name) in LOOK_UPS, []

            def read(x: Any) -> Any:
                wide = self._copy_of(x, kind)
                if wide is None:
                    return x
                low = x.dtype if x.dtype in LOW else torch.get_autocast_dtype(x.device.type)
                lows.append(low)
                # A look-up adds up the gradients of all its rows in one call, so it must read the copy itself.
                if looks_up:
                    return wide
                # Any other call reads a separate cast, so its numbers are unchanged, and autograd adds up the gradients
                # of all casts in the copy.
                cast = wide.to(low)
                if cast.requires_grad:
                    key = id(x) if id(x) in self._parameters else self._indices[x]
                    cast.register_hook(self.sums.setdefault(key, _Given()).add)
                return cast

            args, kwargs = map_leaves(read, (args, kwargs))
            out = func(*args, **kwargs)
            if looks_up and lows and isinstance(out, Tensor) and out.is_floating_point():
                out = out.to(lows[0])
        else:
            out = func(*args, **kwargs)
        if index in self._hubs and isinstance(out, Tensor) and out.dtype in LOW:
            self._wide[out], self._indices[out] = out.float(), index
        return out

    def _copy_of(self, x: Any, kind: Call) -> Tensor | None:
        """Return the float32 copy of a tensor that is read often; None for any other."""
        if not isinstance(x, Tensor) or not (id(x) in self._parameters or x in self._wide):
            return None
        if x.dtype in LOW and id(x) not in self._parameters:
            return self._wide[x]  # type: ignore[no-any-return]
        if x.dtype in LOW:
            # A copy made under no_grad passes no gradient to the parameter, and a copy made before a write is stale.
            key = id(x), version_of(x), torch.is_grad_enabled()
            if key not in self._copies:
                self._copies[key] = x.float()
            return self._copies[key]
        # Autocast caches the cast of a float32 parameter. The gradients of all readers would be added up in that cast.
        casts = x.dtype is torch.float32 and torch.is_autocast_enabled(x.device.type) and kind.name in NARROWING
        return x if casts else None


def read_often(operations: list[Operation]) -> tuple[list[Operation], list[Operation]]:
    """Return the operations whose results many operations read, and the parameters that many operations read."""
    parameters = {id(s): s for o in operations for s in o.parents if s.name == "parameter"}

    def is_often(o: Operation) -> bool:
        # A single look-up call may read the same row many times.
        looks_up = o.name == "parameter" and any(canonical(c.name) in LOOK_UPS for c in o.children)
        return "gradient" in o.notes and (len(o.children) > WRONG or looks_up)

    hubs = [o for o in operations if is_often(o) and o.notes.get("dtype") in LOW]
    return hubs, [o for o in parameters.values() if is_often(o)]


def reads_event(
    often: tuple[list[Operation], list[Operation]],
    edit: WideReads,
    ids: Mapping[str, int],
    mine: Mapping[str, Tensor],
    true: Mapping[str, Tensor],
) -> Event | None:
    """Return the event of a tensor that is read often, and whose gradient is wrong unless it is added up in float32.

    edit: the edit of a run that added up in float32. ids: the ids of parameters, by name.
    mine, true: the parameters' gradients in the step, and in that run.
    """
    wrong: list[tuple[Operation, Swamped]] = []
    for operation in (*often[1], *often[0]):
        key = ids.get(operation.site, -1) if operation.name == "parameter" else operation.index
        found = edit.sums[key].wrong() if key in edit.sums else None
        g, h = mine.get(operation.site), true.get(operation.site)
        # No hook sees the gradients of single looked-up rows, so the sums of both runs are compared.
        if key not in edit.sums and g is not None and h is not None and g.dtype in LOW and g.shape == h.shape:
            exact = h.double()
            found = swamped(g, exact, exact.abs(), torch.zeros_like(exact), Ends.of_dtype(g.dtype), 0)
        if found is not None:
            wrong.append((operation, found))
    if not wrong:
        return None
    at, found = max(wrong, key=lambda pair: pair[1].error)
    role = "weight_grad" if at.name == "parameter" else "error"
    count = at.notes["result"].count
    event = Event("float32", "swamping", at.site, role, count, count, operation=at, origin=at)
    event.fmt, event.ends, event.remedy = found.ends.name, found.ends, "gradient sum"
    how = f"{found.terms} operations read it" if found.terms else "Rows of it are looked up again and again"
    event.why.append(
        f"{how}, and its gradient, added up in {found.ends.name}, is {found.mine}, and {found.true} if it is added up "
        f"in float32: {found.half_ulps:.3g} times half an ulp, a relative error of {found.error:.3g}."
    )
    return event
