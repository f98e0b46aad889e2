"""Remedies, tried on the step: a constant, a scale, float32 for the operations that are enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fpsim.emulation.calls import Call
from fpsim.emulation.tracing import Operation
from fpsim.policy import Policy
from fpsim.reasons.event import Event
from fpsim.reasons.numbers import Ends
from fpsim.reasons.timeline import Timeline
from fpsim.reasons.trials import Change, Outcome, Trials
from fpsim.reasons.widening import Widening

__all__ = ["Remedy", "descendants", "remedies"]

EPS = (1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
Unit = tuple[str, str]  # of a quantised model: a module and the name of an operation in it; "" for all of it


@dataclass
class Remedy:
    """What was tried, and worked.

    what: in words. name: "eps", "scale", "float32", "clamp", "fill", "mask", "slope", "master", "clear", "rate".
    value: the number that was taken. sites: of the operations that ran in float32.
    loss: what the step then gave. policy: for a quantised model, where the remedy is one.
    """

    what: str
    name: str
    value: float | None = None
    sites: list[str] = field(default_factory=list)
    loss: float | None = None
    policy: Policy | None = None
    detail: str = ""

    def row(self) -> dict[str, Any]:
        return {"remedy": self.name, "what": self.what, "value": self.value, "sites": self.sites, "loss": self.loss}


class _Unbroken(Timeline):
    """Ends a run with the first event: a look at a whole step takes ten steps' time."""

    def _add(self, event: Event) -> None:
        raise _StillThereError(event.kind)


class _StillThereError(Exception):
    """Something breaks under the change that is tried."""


class _Attempts:
    """Tries changes, and knows whether the event is gone."""

    def __init__(self, trials: Trials, event: Event, was: Outcome) -> None:
        self.trials, self.event = trials, event
        self.is_visible = not was.is_finite  # whether inf or NaN at the end of the step shows the event

    def works(self, change: Change, gone: Callable[[Timeline], bool] | None = None) -> Outcome | None:
        """What a run under the change gave; None where it fails, or the event is still there."""
        seen = _Unbroken(self.trials.model)
        try:
            if self.is_visible and gone is None and not change.policies:
                outcome = self.trials.run(change)
                return outcome if outcome.is_finite else None
            outcome = self.trials.run(change, seen)
        except Exception:  # a step in other dtypes may be refused by torch: then this is no remedy
            return None
        if not outcome.is_finite or seen.events:
            return None
        if any((e.place, e.role) == (self.event.place, self.event.role) for e in seen.saturations):
            return None
        return outcome if gone is None or gone(seen) else None


def remedies(trials: Trials, event: Event, seen: Timeline, was: Outcome) -> list[Remedy]:
    """The remedies that work, the closest first; at most two."""
    attempts = _Attempts(trials, event, was)
    found: list[Remedy] = []
    for attempt in _in_order(event):
        remedy = attempt(attempts, event, seen)
        if remedy is not None:
            found.append(remedy)
        if len(found) == 2:
            break
    return found


def _in_order(event: Event) -> list[Callable[[_Attempts, Event, Timeline], Remedy | None]]:
    by_name: dict[str, list[Any]] = {
        "eps": [_eps, _float32],
        "clamp": [_clamp],
        "fill": [_fill],
        "mask": [_unmasked],
        "slope": [_slope],
        "scale": [_scale, _float32_backward],
        "correction": [],
        "skip": [],
    }
    if event.remedy in by_name:
        return by_name[event.remedy]
    if event.stage in ("forward", "float32"):
        return [_float32, _domain]
    return []


# Edits of one call


def _at(operation: Operation, change: Callable[[Call, tuple[Any, ...], dict[str, Any]], tuple[Any, Any]]) -> Any:
    """An edit that changes the arguments of one call."""

    def edit(index: int, kind: Call, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if index == operation.index:
            args, kwargs = change(kind, args, kwargs)
        return func(*args, **kwargs)

    return edit


def _eps(attempts: _Attempts, event: Event, seen: Timeline) -> Remedy | None:
    origin, lost = event.origin, event.constant
    if origin is None or lost is None:
        return None
    sites = [o for o in seen.operations if o.name == origin.name and lost in o.notes["numbers"]]
    indices = {o.index for o in sites} | {origin.index}
    for eps in (e for e in EPS if e > lost and event.ends.holds(e)):

        def edit(index: int, kind: Call, func: Any, args: Any, kwargs: Any, eps: float = eps) -> Any:
            if index in indices:
                args = tuple(eps if isinstance(a, float) and a == lost else a for a in args)
                kwargs = {k: eps if isinstance(a, float) and a == lost else a for k, a in kwargs.items()}
                if kind.name in ("normalize", "cosine_similarity") and eps not in (*args, *kwargs.values()):
                    kwargs = {**kwargs, "eps": eps}
            return func(*args, **kwargs)

        outcome = attempts.works(Change(edit=edit))
        if outcome is not None:
            return Remedy(f"eps {eps:g} at {origin.site}", "eps", eps, [origin.site], outcome.loss)
    return None


def _clamp(attempts: _Attempts, event: Event, seen: Timeline) -> Remedy | None:
    operation = event.operation
    assert operation is not None

    def change(kind: Call, args: Any, kwargs: Any) -> Any:
        if len(args) > 1:
            divisor = args[1]
            args = (args[0], divisor.clamp(min=1) if isinstance(divisor, Tensor) else max(divisor, 1), *args[2:])
        return args, kwargs

    outcome = attempts.works(Change(edit=_at(operation, change)))
    if outcome is None:
        return None
    return Remedy("the divisor clamped to at least 1", "clamp", 1.0, [operation.site], outcome.loss)


def _fill(attempts: _Attempts, event: Event, seen: Timeline) -> Remedy | None:
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


def _unmasked(attempts: _Attempts, event: Event, seen: Timeline) -> Remedy | None:
    operation = event.operation
    assert operation is not None

    def change(kind: Call, args: Any, kwargs: Any) -> Any:
        if kind.name == "scaled_dot_product_attention":
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            empty = (~mask if mask.dtype is torch.bool else mask == -torch.inf).all(-1, keepdim=True)
            mask = mask | empty if mask.dtype is torch.bool else mask.masked_fill(empty, 0.0)
            args, kwargs = args[:3], {**{k: v for k, v in kwargs.items() if k != "attn_mask"}, "attn_mask": mask}
            return args, kwargs
        x = args[0]
        return (x.masked_fill((x == -torch.inf).all(-1, keepdim=True), 0.0), *args[1:]), kwargs

    outcome = attempts.works(Change(edit=_at(operation, change)))
    if outcome is None:
        return None
    return Remedy("0 in rows that are masked wholly", "mask", 0.0, [operation.site], outcome.loss)


def _slope(attempts: _Attempts, event: Event, seen: Timeline) -> Remedy | None:
    operation = event.operation
    assert operation is not None
    is_border = operation.name in ("asin", "acos", "atanh", "acosh", "arccos", "arcsin", "erfinv", "logit")
    ends: Ends = operation.notes["ends"]
    for eps in (e for e in EPS if ends.holds(e)):

        def change(kind: Call, args: Any, kwargs: Any, eps: float = eps) -> Any:
            at = 1 if operation.name in ("div", "truediv", "true_divide", "divide") else 0
            x = args[at]
            x = x.clamp(-1 + max(eps, 1e-6), 1 - max(eps, 1e-6)) if is_border else x + eps
            return (*args[:at], x, *args[at + 1 :]), kwargs

        outcome = attempts.works(Change(edit=_at(operation, change)))
        if outcome is not None:
            words = f"clamped to within {eps:g} of its border" if is_border else f"{eps:g} added to what it reads"
            return Remedy(f"{operation.site} with {words}", "slope", eps, [operation.site], outcome.loss)
    return None


def _domain(attempts: _Attempts, event: Event, seen: Timeline) -> Remedy | None:
    operation = event.operation
    if operation is None or event.kind not in (
        "logarithm of zero",
        "root of a negative number",
        "logarithm of a negative number",
    ):
        return None
    ends: Ends = operation.notes["ends"]
    for eps in (e for e in EPS if ends.holds(e)):

        def change(kind: Call, args: Any, kwargs: Any, eps: float = eps) -> Any:
            return (args[0].clamp(min=eps), *args[1:]), kwargs

        outcome = attempts.works(Change(edit=_at(operation, change)))
        if outcome is not None:
            return Remedy(f"{operation.site} with clamp(min={eps:g})", "clamp", eps, [operation.site], outcome.loss)
    return None


# Scales


def _scale(attempts: _Attempts, event: Event, seen: Timeline) -> Remedy | None:
    trials, now = attempts.trials, 1.0
    if trials.scaler is not None and hasattr(trials.scaler, "get_scale"):
        now = float(trials.scaler.get_scale())
    exponents = [*range(2, 41, 2)] if event.kind == "gradient lost" else [*range(-1, -41, -1)]

    def gone(found: Timeline) -> bool:
        if event.kind != "gradient lost":
            return True
        others = [o for o in found.gradients if (o.site, o.call) == (_site(event), _call(event))]
        return any(o.notes["gradient"].nonzero >= 0.5 * event.of for o in others)

    for exponent in exponents:
        outcome = attempts.works(Change(loss_scale=2.0**exponent), gone)
        if outcome is not None:
            scale = now * 2.0**exponent
            return Remedy(f"loss scale {scale:g} (it is {now:g})", "scale", scale, [], outcome.loss)
    return None


def _site(event: Event) -> str:
    return event.place if event.role == "weight_grad" or event.operation is None else event.operation.site


def _call(event: Event) -> int:
    return event.operation.call if event.operation is not None and event.role != "weight_grad" else 0


# float32 for some operations


def _float32(attempts: _Attempts, event: Event, seen: Timeline) -> Remedy | None:
    start = event.origin
    if start is None:
        return None
    reached = descendants(start)
    candidates = [o for o in seen.operations if id(o) in reached]
    return _fewest(attempts, event, candidates)


def _float32_backward(attempts: _Attempts, event: Event, seen: Timeline) -> Remedy | None:
    start = event.operation
    if start is None:
        return None
    before = start.all_behind()
    readers = [o for o in seen.operations if o in start.children]
    candidates = [*readers, start, *(o for o in reversed(seen.operations) if id(o) in before and o is not start)]
    return _fewest(attempts, event, candidates)


def descendants(start: Operation) -> set[int]:
    """The ids of an operation and of all that read its result, near or far."""
    found, waiting = set(), [start]
    while waiting:
        at = waiting.pop()
        if id(at) not in found:
            found.add(id(at))
            waiting += at.children
    return found


def _fewest(attempts: _Attempts, event: Event, candidates: Sequence[Operation]) -> Remedy | None:
    """The fewest of the candidates, from the first on, whose float32 is enough: found by halving, then one by one."""
    trials = attempts.trials
    if trials.emulated:
        found = [o for o in candidates if (o.computes and o.module in trials.policies) or o.name == "parameter"]
        units: list[Any] = [*dict.fromkeys((o.module, o.name) for o in found if o.name != "parameter")]
        if event.role in ("weight", "fprop.w"):
            units.insert(0, (event.operation.module if event.operation else "", ""))
        units = [*dict.fromkeys(units)]
    else:
        units = [o for o in candidates if o.name != "parameter"]
    units = units[:64]
    done: dict[frozenset[int], Outcome | None] = {}

    def tried(chosen: Sequence[int]) -> Outcome | None:
        key = frozenset(chosen)
        if key not in done:
            done[key] = attempts.works(_widened(trials, [units[i] for i in chosen]))
        return done[key]

    length = 1
    while length < len(units) and tried(range(length)) is None:
        length *= 2
    length = min(length, len(units))
    if not units or tried(range(length)) is None:
        return None
    low, high = length // 2, length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if tried(range(middle)) is not None else (middle, high)
    chosen = [*range(high)]
    is_changed = True
    while is_changed and len(chosen) > 1:  # until none can be left out
        is_changed = False
        for i in [*chosen]:
            rest = [c for c in chosen if c != i]
            if rest and tried(rest) is not None:
                chosen, is_changed = rest, True
    outcome = tried(chosen)
    assert outcome is not None
    if trials.emulated:
        names = [f"{module}:{name}" if name else (module or "the model") for module, name in (units[i] for i in chosen)]
    else:
        names = [units[i].site for i in chosen if units[i].computes] or [units[i].site for i in chosen]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    remedy = Remedy(f"float32 for {shown}", "float32", None, [*dict.fromkeys(names)], outcome.loss)
    if trials.emulated:
        remedy.policy = _policy(trials, _policies(trials, [units[i] for i in chosen]))
    return remedy


def _widened(trials: Trials, units: Sequence[Any]) -> Change:
    if trials.emulated:
        return Change(policies=_policies(trials, units))
    return Change(edit=Widening({o.index for o in units}))


def _policies(trials: Trials, units: Sequence[Unit]) -> dict[str, Policy]:
    changed: dict[str, Policy] = {}
    for module, name in units:
        policy = changed.get(module, trials.policies[module])
        try:
            changed[module] = replace(policy, float32=(*policy.float32, name)) if name else Policy()
        except ValueError:  # not an operation that a policy knows by this name
            changed[module] = Policy()
    return changed


def _policy(trials: Trials, changed: dict[str, Policy]) -> Policy:
    """One policy that says the same: that of the model itself, and an override wherever a module differs."""
    wanted = {**trials.policies, **changed}
    base = replace(wanted.get("", Policy()), overrides={})
    overrides: dict[Any, Any] = {}
    for name, policy in wanted.items():
        around = max((n for n in overrides if name.startswith(f"{n}.")), key=len, default=None)
        inherited = base if around is None else overrides[around]
        own = replace(policy, overrides={})
        if name and own != inherited:
            overrides[name] = own
    return replace(base, overrides=overrides)
