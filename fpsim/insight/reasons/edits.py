"""Remedies that change the arguments of one call, or of all calls alike, tried on the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fpsim.emulation.calls import Call
from fpsim.emulation.tracing import Operation
from fpsim.insight.ranges import Ends
from fpsim.insight.reasons.attempts import EPS, Attempts, Remedy
from fpsim.insight.reasons.event import Event
from fpsim.insight.reasons.explaining_losses import classes_of
from fpsim.insight.reasons.timeline import Timeline
from fpsim.insight.reasons.trials import Change

__all__ = [
    "clamped_count",
    "finite_floor",
    "in_domain",
    "infinite_fill",
    "lost_eps",
    "other_divisor",
    "steep",
    "unmasked",
    "zero_infinity",
]

LOGARITHMS = ("log", "log2", "log10", "log_")
ROOTS = ("sqrt", "rsqrt", "sqrt_", "rsqrt_", "pow", "pow_", "float_power")
DECOMPOSITIONS = ("linalg_eigh", "linalg_svd", "svd", "linalg_eig")
DIVISIONS = ("div", "truediv", "true_divide", "divide")
INVERSES = ("reciprocal", "rsqrt", "rtruediv", "rdiv", "reciprocal_", "rsqrt_", "pow", "pow_")
# Where the slope of a function has no end: the borders of its domain.
BORDERS = {
    **dict.fromkeys(("asin", "acos", "atanh", "arcsin", "arccos", "arctanh", "erfinv"), (-1.0, 1.0)),
    **dict.fromkeys(("acosh", "arccosh"), (1.0, math.inf)),
    "log1p": (-1.0, math.inf),
    "logit": (0.0, 1.0),
}


def _at(operation: Operation, change: Callable[[Call, tuple[Any, ...], dict[str, Any]], tuple[Any, Any]]) -> Any:
    """An edit that changes the arguments of one call."""

    def edit(index: int, kind: Call, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if index == operation.index:
            args, kwargs = change(kind, args, kwargs)
        return func(*args, **kwargs)

    return edit


def lost_eps(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    origin, lost = event.origin, event.constant
    if origin is None or lost is None:
        return None
    sites = [o for o in seen.operations if o.name == origin.name and lost in o.notes["numbers"]]
    indices = {o.index for o in sites} | {origin.index}
    for eps in (e for e in EPS if e > lost and event.ends.holds(e)):

        def edit(index: int, kind: Call, func: Any, args: Any, kwargs: Any, eps: float = eps) -> Any:
            if index in indices:
                args = tuple(eps if lost and isinstance(a, float) and a == lost else a for a in args)
                kwargs = {
                    k: eps if isinstance(a, float) and a == lost and (lost or k == "eps") else a
                    for k, a in kwargs.items()
                }
                given = [a for a in (*args, *kwargs.values()) if isinstance(a, float)]
                if kind.name in ("normalize", "cosine_similarity") and eps not in given:
                    kwargs = {**kwargs, "eps": eps}
            return func(*args, **kwargs)

        outcome = attempts.works(Change(edit=edit))
        if outcome is not None:
            return Remedy(f"eps {eps:g} at {origin.site}", "eps", eps, [origin.site], outcome.loss)
    return None


def clamped_count(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    operation = event.operation
    assert operation is not None
    others = [o for o in seen.operations if o is not operation and o.name == operation.name and _is_by_zero(o)]
    indices = {o.index for o in (operation, *others)}

    def edit(index: int, kind: Call, func: Any, args: Any, kwargs: Any) -> Any:
        if index in indices and len(args) > 1:
            divisor = args[1]
            args = (args[0], divisor.clamp(min=1) if isinstance(divisor, Tensor) else max(divisor, 1), *args[2:])
        return func(*args, **kwargs)

    outcome = attempts.works(Change(edit=edit))
    if outcome is None:
        return None
    sites = [*dict.fromkeys(o.site for o in (operation, *others))]
    words = "the divisor clamped to at least 1" + (f" at {', '.join(sites[:4])}" if others else "")
    return Remedy(words, "clamp", 1.0, sites, outcome.loss)


def _is_by_zero(operation: Operation) -> bool:
    """Whether a division reads a divisor that has zeros and nothing negative, and gives what is not finite."""
    divisor = operation.sources[1].notes["result"] if len(operation.sources) > 1 and operation.sources[1] else None
    return divisor is not None and divisor.has_zeros and divisor.low >= 0 and bool(operation.notes["result"].kinds)


def infinite_fill(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    operation = event.operation
    assert operation is not None
    source = operation.sources[0]
    assert source is not None
    masked = source.notes["masked"]

    def change(kind: Call, args: Any, kwargs: Any) -> Any:
        x = args[0]
        return (x.masked_fill(masked & ~masked.all(-1, keepdim=True), -torch.inf), *args[1:]), kwargs

    outcome = attempts.works(Change(edit=_at(operation, change)))
    if outcome is None:
        return None
    return Remedy("-inf in the place of the mask's constant", "fill", -math.inf, [source.site], outcome.loss)


def unmasked(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    operation = event.operation
    assert operation is not None

    def change(kind: Call, args: Any, kwargs: Any) -> Any:
        if kind.name == "scaled_dot_product_attention":
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            empty = (~mask if mask.dtype is torch.bool else mask == -torch.inf).all(-1, keepdim=True)
            mask = mask | empty if mask.dtype is torch.bool else mask.masked_fill(empty, 0.0)
            args, kwargs = args[:3], {**{k: v for k, v in kwargs.items() if k != "attn_mask"}, "attn_mask": mask}
            return args, kwargs
        if kind.name == "multi_head_attention_forward":
            masks = {k: kwargs[k] for k in ("key_padding_mask", "attn_mask") if isinstance(kwargs.get(k), Tensor)}
            for name, mask in masks.items():
                empty = (mask if mask.dtype is torch.bool else mask == -torch.inf).all(-1, keepdim=True)
                masks[name] = mask.masked_fill(empty, 0)
            return args, {**kwargs, **masks}
        x = args[0]
        empty = (x == -torch.inf).all(classes_of(kind.name, x, args, kwargs), keepdim=True)
        return (x.masked_fill(empty, 0.0), *args[1:]), kwargs

    outcome = attempts.works(Change(edit=_at(operation, change)))
    if outcome is None:
        return None
    return Remedy("0 in rows that are masked wholly", "mask", 0.0, [operation.site], outcome.loss)


def steep(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    operation = event.operation
    assert operation is not None
    border = BORDERS.get(operation.name)
    ends: Ends = operation.notes["ends"]
    inside = (*EPS, 1e-2) if border is not None else EPS  # in bfloat16 1 - 1e-3 is 1
    for eps in (e for e in inside if ends.holds(e)):

        def change(kind: Call, args: Any, kwargs: Any, eps: float = eps) -> Any:
            at = 1 if operation.name in DIVISIONS else 0
            x = args[at]
            if operation.name in DECOMPOSITIONS:
                return (x + _ramp(x, eps), *args[1:]), kwargs
            x = x + eps if border is None else x.clamp(border[0] + eps, border[1] - eps)
            return (*args[:at], x, *args[at + 1 :]), kwargs

        outcome = attempts.works(Change(edit=_at(operation, change)))
        if outcome is not None:
            words = f"{eps:g} added to what it reads"
            if operation.name in DECOMPOSITIONS:
                words = f"{eps:g} times 1, 2, 3, ... added to the diagonal of what it reads"
            elif border is not None:
                words = f"its input clamped {eps:g} inside its domain"
            return Remedy(f"{operation.site} with {words}", "slope", eps, [operation.site], outcome.loss)
    return None


def _ramp(x: Tensor, eps: float) -> Tensor:
    """A matrix like `x` whose diagonal is eps, 2 eps, 3 eps, ..."""
    rows, columns = x.shape[-2:]
    ramp = x.new_zeros(rows, columns)
    ramp.diagonal().copy_(torch.arange(1, min(rows, columns) + 1) * eps)
    return ramp


def finite_floor(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    """A finite number in the place of minus infinity, wherever operations of this name read it."""
    operation = event.operation
    assert operation is not None
    ends: Ends = operation.notes["ends"]
    floor = -1e30 if ends.largest > 1e30 else -1e4
    same = [o for o in seen.operations if o.name == operation.name]
    indices = {o.index for o in same}

    def edit(index: int, kind: Call, func: Any, args: Any, kwargs: Any) -> Any:
        if index in indices:
            args = tuple(a.clamp(min=floor) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
        return func(*args, **kwargs)

    outcome = attempts.works(Change(edit=edit))
    if outcome is None:
        return None
    sites = [*dict.fromkeys(o.site for o in same)]
    shown = ", ".join(sites[:2]) + (f" and {len(sites) - 2} more" if len(sites) > 2 else "")
    return Remedy(f"{floor:g} in the place of -inf that {shown} read", "fill", floor, sites, outcome.loss)


def zero_infinity(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    operation = event.operation
    assert operation is not None

    def change(kind: Call, args: Any, kwargs: Any) -> Any:
        return args[:6], {**kwargs, "zero_infinity": True}  # the seventh argument

    outcome = attempts.works(Change(edit=_at(operation, change)))
    if outcome is None:
        return None
    return Remedy("zero_infinity=True", "infinity", None, [operation.site], outcome.loss)


def in_domain(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    operation = event.operation
    if operation is None or event.kind not in (
        "logarithm of zero",
        "root of a negative number",
        "logarithm of a negative number",
    ):
        return None
    if operation.name not in (*LOGARITHMS, *ROOTS, *BORDERS):
        return None
    border = BORDERS.get(operation.name)
    for eps in _steps(operation, border):

        def change(kind: Call, args: Any, kwargs: Any, eps: float = eps) -> Any:
            x = args[0].clamp(min=eps) if border is None else args[0].clamp(border[0] + eps, border[1] - eps)
            return (x, *args[1:]), kwargs

        outcome = attempts.works(Change(edit=_at(operation, change)))
        if outcome is not None:
            words = f"clamp(min={eps:g})" if border is None else f"its input clamped {eps:g} inside its domain"
            return Remedy(f"{operation.site} with {words}", "clamp", eps, [operation.site], outcome.loss)
    return None


def _steps(operation: Operation, border: tuple[float, float] | None) -> Iterator[float]:
    """Small numbers that the format holds, away from a border of its domain too: in bfloat16 1 - 1e-3 is 1."""
    ends: Ends = operation.notes["ends"]
    sides = [] if border is None else [(b, sign) for b, sign in zip(border, (1, -1), strict=True) if math.isfinite(b)]
    for eps in EPS if border is None else (*EPS, 1e-2):
        if ends.holds(eps) and all(ends.rounded(b + sign * eps) != b for b, sign in sides):
            yield eps


def other_divisor(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    """A small number in the place of a divisor that is zero."""
    operation = event.operation
    if operation is None or event.kind != "division by zero" or operation.name not in (*DIVISIONS, *INVERSES):
        return None
    at = 1 if operation.name in DIVISIONS else 0
    ends: Ends = operation.notes["ends"]
    for eps in (e for e in EPS if ends.holds(e)):

        def change(kind: Call, args: Any, kwargs: Any, eps: float = eps) -> Any:
            divisor = args[at] if len(args) > at else None
            if not isinstance(divisor, Tensor):
                return args, kwargs
            return (*args[:at], torch.where(divisor == 0, eps, divisor).to(divisor.dtype), *args[at + 1 :]), kwargs

        outcome = attempts.works(Change(edit=_at(operation, change)))
        if outcome is not None:
            what = f"{operation.site} with {eps:g} in the place of a divisor of 0"
            return Remedy(what, "divisor", eps, [operation.site], outcome.loss)
    return None
