"""Try remedies that change the arguments of one call in the step, or of all calls with the same name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fpsim.emulation.arguments import tensors_in
from fpsim.emulation.calls import Call
from fpsim.emulation.operations import Kind, Row, canonical, row_of, spelling_of
from fpsim.emulation.tracing import Edit, Operation
from fpsim.insight.ranges import Ends
from fpsim.insight.reasons.event import Event
from fpsim.insight.reasons.explaining_losses import classes_of
from fpsim.insight.reasons.timeline import Timeline
from fpsim.insight.reasons.trials import EPS, Attempts, Change, Remedy

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


def _at(operation: Operation, change: Callable[[Call, tuple[Any, ...], dict[str, Any]], tuple[Any, Any]]) -> Any:
    """Return an edit that changes the arguments of one call."""

    def edit(index: int, kind: Call, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if index == operation.index:
            args, kwargs = change(kind, args, kwargs)
        return func(*args, **kwargs)

    return edit


def _with(
    kind: Call, position: int, change: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, with `change` applied to the operand at this position in the operation's row."""
    key = spelling_of(kind.name).find(position, args, kwargs)
    if key is None:
        return args, kwargs
    given = args[key] if isinstance(key, int) else kwargs[key]
    # The target of an in-place call is changed in place: the step may read the target rather than the returned tensor.
    # `change` gets a copy, because autograd may save the operand of `change`.
    if key in (0, "input") and kind.writes_to_first(args, kwargs):
        for x in tensors_in(given):
            x.copy_(change(x.clone()))
        return args, kwargs
    # torch._foreach_* take lists of tensors.
    changed = [*map(change, given)] if isinstance(given, list | tuple) else change(given)
    if isinstance(key, str):
        return args, {**kwargs, key: changed}
    return (*args[:key], changed, *args[key + 1 :]), kwargs


def _tried(
    attempts: Attempts, edit: Edit, what: str, name: str, value: float | None, sites: list[str]
) -> Remedy | None:
    """Run the step under an edit, and return the remedy if it works."""
    outcome = attempts.works(Change(edit=edit))
    return None if outcome is None else Remedy(what, name, value, sites, outcome.loss)


def _border(row: Row) -> tuple[float, float] | None:
    """Return the borders of an operation's domain; None without a domain, or if it is the positive numbers."""
    domain = row.domain
    return None if domain is None or (domain.low, domain.high) == (0.0, math.inf) else (domain.low, domain.high)


def lost_eps(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    """Try larger constants instead of an eps that the format rounds to 0."""
    origin, lost = event.origin, event.constant
    if origin is None or lost is None:
        return None
    # Other calls with this name lose the same constant.
    sites = [o for o in seen.operations if o.name == origin.name and lost in o.notes["numbers"]]
    indices = {o.index for o in sites} | {origin.index}
    for eps in (e for e in EPS if e > lost and event.ends.holds(e)):

        def edit(index: int, kind: Call, func: Any, args: Any, kwargs: Any, eps: float = eps) -> Any:
            if index in indices:
                # An eps of 0 is found only by its name, because other arguments may be 0 as well.
                args = tuple(eps if lost and isinstance(a, float) and a == lost else a for a in args)
                kwargs = {
                    k: eps if isinstance(a, float) and a == lost and (lost or k == "eps") else a
                    for k, a in kwargs.items()
                }
                given = [a for a in (*args, *kwargs.values()) if isinstance(a, float)]
                # These operations have a default eps, which is not among the arguments of the call.
                if kind.name in ("normalize", "cosine_similarity") and eps not in given:
                    kwargs = {**kwargs, "eps": eps}
            return func(*args, **kwargs)

        remedy = _tried(attempts, edit, f"eps {eps:g} at {origin.site}", "eps", eps, [origin.site])
        if remedy is not None:
            return remedy
    return None


def clamped_count(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    """Try a clamp to at least 1 of a divisor that is a count, and is 0."""
    operation = event.operation
    assert operation is not None
    # All divisions by 0 with this name are changed together: a change of only one would leave the step broken.
    name = canonical(operation.name)
    others = [o for o in seen.operations if o is not operation and canonical(o.name) == name and _is_by_zero(o)]
    indices = {o.index for o in (operation, *others)}

    def at_least_1(divisor: Any) -> Any:
        return divisor.clamp(min=1) if isinstance(divisor, Tensor) else max(divisor, 1)

    def edit(index: int, kind: Call, func: Any, args: Any, kwargs: Any) -> Any:
        divides = row_of(kind.name).divides
        if index in indices and divides is not None:
            args, kwargs = _with(kind, divides, at_least_1, args, kwargs)
        return func(*args, **kwargs)

    sites = [*dict.fromkeys(o.site for o in (operation, *others))]
    words = "the divisor clamped to at least 1" + (f" at {', '.join(sites[:4])}" if others else "")
    return _tried(attempts, edit, words, "clamp", 1.0, sites)


def _is_by_zero(operation: Operation) -> bool:
    """True if a division has a divisor with zeros and without negative numbers, and a result that is not finite."""
    spelling = spelling_of(operation.name)
    at = -1 if spelling.row.divides is None else spelling.place(spelling.row.divides)
    source = operation.sources[at] if 0 <= at < len(operation.sources) else None
    divisor = None if source is None else source.notes["result"]
    return divisor is not None and divisor.has_zeros and divisor.low >= 0 and bool(operation.notes["result"].kinds)


def infinite_fill(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    """Try minus infinity instead of the constant of a mask that leaks."""
    operation = event.operation
    assert operation is not None
    source = operation.sources[0]
    assert source is not None
    masked = source.notes["masked"]

    def change(kind: Call, args: Any, kwargs: Any) -> Any:
        x = args[0]
        # A fully masked row would become NaN.
        return (x.masked_fill(masked & ~masked.all(-1, keepdim=True), -torch.inf), *args[1:]), kwargs

    words = "-inf instead of the mask's constant"
    return _tried(attempts, _at(operation, change), words, "fill", -math.inf, [source.site])


def unmasked(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    """Try to remove the mask from fully masked rows."""
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
            # True hides a position here; in scaled_dot_product_attention True shows it.
            for name, mask in masks.items():
                empty = (mask if mask.dtype is torch.bool else mask == -torch.inf).all(-1, keepdim=True)
                masks[name] = mask.masked_fill(empty, 0)
            return args, {**kwargs, **masks}
        x = args[0]
        empty = (x == -torch.inf).all(classes_of(kind.name, x, args, kwargs), keepdim=True)
        return (x.masked_fill(empty, 0.0), *args[1:]), kwargs

    return _tried(attempts, _at(operation, change), "0 in rows that are masked wholly", "mask", 0.0, [operation.site])


def steep(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    """Try to move operands slightly away from the numbers at which a slope is infinite."""
    operation = event.operation
    assert operation is not None
    row = row_of(operation.name)
    # Eigenvectors of equal eigenvalues have no slope. If one number is added to the diagonal, the eigenvalues stay
    # equal; if a ramp is added, they do not.
    border, turns = _border(row), row.kind is Kind.DECOMPOSITION
    ends: Ends = operation.notes["ends"]
    # In bfloat16 1 - 1e-3 is 1, which is still the border.
    inside = (*EPS, 1e-2) if border is not None else EPS
    for eps in (e for e in inside if ends.holds(e)):

        def change(kind: Call, args: Any, kwargs: Any, eps: float = eps) -> Any:
            def moved(x: Any) -> Any:
                if turns:
                    return x + _ramp(x, eps)
                return x + eps if border is None else _inside(x, border, eps)

            at = row.divides if row.divides is not None else 0 if row.domain is None else row.domain.at
            return _with(kind, at, moved, args, kwargs)

        words = f"{eps:g} added to what it reads"
        if turns:
            words = f"{eps:g} times 1, 2, 3, ... added to the diagonal of what it reads"
        elif border is not None:
            words = f"its input moved {eps:g} inside its domain"
        words = f"{operation.site} with {words}"
        remedy = _tried(attempts, _at(operation, change), words, "slope", eps, [operation.site])
        if remedy is not None:
            return remedy
    return None


def _inside(x: Any, border: tuple[float, float], eps: float) -> Any:
    """Move numbers on a border to the inside of the domain."""
    low, high = border
    x = x.clamp(low, high)
    if math.isinf(high):
        return x + eps
    # clamp(low + eps, high - eps) would leave numbers on the border without a gradient.
    return low + eps + (x - low) * (1 - 2 * eps / (high - low))


def _ramp(x: Tensor, eps: float) -> Tensor:
    """Return a diagonal matrix with eps, 2 eps, 3 eps, ..., of the size of the matrices in `x`."""
    rows, columns = x.shape[-2:]
    ramp = x.new_zeros(rows, columns)
    ramp.diagonal().copy_(torch.arange(1, min(rows, columns) + 1) * eps)
    return ramp


def finite_floor(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    """Try a finite number instead of minus infinity in all operands of operations with this name."""
    operation = event.operation
    assert operation is not None
    ends: Ends = operation.notes["ends"]
    # The number is far below any score, and in the range of the format: float16 ends at 65504.
    floor = -1e30 if ends.largest > 1e30 else -1e4
    same = [o for o in seen.operations if o.name == operation.name]
    indices = {o.index for o in same}

    def edit(index: int, kind: Call, func: Any, args: Any, kwargs: Any) -> Any:
        if index in indices:
            args = tuple(a.clamp(min=floor) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
        return func(*args, **kwargs)

    sites = [*dict.fromkeys(o.site for o in same)]
    shown = ", ".join(sites[:2]) + (f" and {len(sites) - 2} more" if len(sites) > 2 else "")
    return _tried(attempts, edit, f"{floor:g} instead of -inf that {shown} read", "fill", floor, sites)


def zero_infinity(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    """Try a CTC loss in which samples without an alignment count as 0."""
    operation = event.operation
    assert operation is not None

    def change(kind: Call, args: Any, kwargs: Any) -> Any:
        # `zero_infinity` is the seventh argument of ctc_loss, and may have been given by position.
        return args[:6], {**kwargs, "zero_infinity": True}

    return _tried(attempts, _at(operation, change), "zero_infinity=True", "infinity", None, [operation.site])


def in_domain(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    """Try arguments that are clamped into the domain of a logarithm, a root or another function."""
    operation = event.operation
    if operation is None or event.kind not in (
        "logarithm of zero",
        "root of a negative number",
        "logarithm of a negative number",
    ):
        return None
    row = row_of(operation.name)
    if row.domain is None and row.kind is not Kind.POWER:
        return None
    border, at = _border(row), 0 if row.domain is None else row.domain.at
    for eps in _steps(operation, border):

        def change(kind: Call, args: Any, kwargs: Any, eps: float = eps) -> Any:
            def inside(x: Any) -> Any:
                if not isinstance(x, Tensor):
                    return x
                return x.clamp(min=eps) if border is None else x.clamp(border[0] + eps, border[1] - eps)

            return _with(kind, at, inside, args, kwargs)

        words = f"clamp(min={eps:g})" if border is None else f"its input clamped {eps:g} inside its domain"
        words = f"{operation.site} with {words}"
        remedy = _tried(attempts, _at(operation, change), words, "clamp", eps, [operation.site])
        if remedy is not None:
            return remedy
    return None


def _steps(operation: Operation, border: tuple[float, float] | None) -> Iterator[float]:
    """Yield small numbers by which a number of the format can be moved away from a border of the domain."""
    ends: Ends = operation.notes["ends"]
    # In bfloat16 1 - 1e-3 is 1, so this step would leave a number on the border.
    sides = [] if border is None else [(b, sign) for b, sign in zip(border, (1, -1), strict=True) if math.isfinite(b)]
    for eps in EPS if border is None else (*EPS, 1e-2):
        if ends.holds(eps) and all(ends.rounded(b + sign * eps) != b for b, sign in sides):
            yield eps


def other_divisor(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    """Try a small number instead of a divisor that is zero."""
    operation = event.operation
    if operation is None or event.kind != "division by zero":
        return None
    row = row_of(operation.name)
    if row.divides is None and row.kind is not Kind.POWER:
        return None
    at = row.divides or 0
    ends: Ends = operation.notes["ends"]
    for eps in (e for e in EPS if ends.holds(e)):

        def change(kind: Call, args: Any, kwargs: Any, eps: float = eps) -> Any:
            def other(x: Any) -> Any:
                return torch.where(x == 0, eps, x).to(x.dtype) if isinstance(x, Tensor) else x

            return _with(kind, at, other, args, kwargs)

        what = f"{operation.site} with {eps:g} instead of a divisor of 0"
        remedy = _tried(attempts, _at(operation, change), what, "divisor", eps, [operation.site])
        if remedy is not None:
            return remedy
    return None
