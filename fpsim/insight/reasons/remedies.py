"""Remedies that are tried on a step: a constant, a scale, float32 for some operations, another optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fpsim.emulation.tracing import Operation
from fpsim.insight.reasons.edits import (
    clamped_count,
    finite_floor,
    in_domain,
    infinite_fill,
    lost_eps,
    other_divisor,
    steep,
    unmasked,
    zero_infinity,
)
from fpsim.insight.reasons.event import Event
from fpsim.insight.reasons.timeline import Timeline
from fpsim.insight.reasons.trials import EPS, Attempts, Change, Outcome, Remedy, Trials, descendants
from fpsim.insight.reasons.updates import Updates
from fpsim.insight.reasons.widening import Widening
from fpsim.policies.policy import Policy, policy_of_modules
from fpsim.tensors.noise import keep_random_numbers
from fpsim.tensors.ops import round_to
from fpsim.undoing import Undo, undone

__all__ = ["remedies", "update_remedies"]

FEW = 8  # operations that are tried in float32 before all of them are
RATES = (0.5, 0.1, 0.01, 1e-3, 1e-4, 1e-6)
Unit = tuple[str, str]  # of a quantised model: a module and the name of an operation in it; "" for all of it


def remedies(trials: Trials, event: Event, seen: Timeline, was: Outcome) -> list[Remedy]:
    """The remedies that work, the closest first; at most two."""
    attempts = Attempts(trials, event, was, seen)
    working: list[Remedy] = []
    for attempt in _in_order(event):
        if len(working) == 2 or (working and attempt is other_divisor):
            break
        remedy = attempt(attempts, event, seen)
        if remedy is not None:
            attempts.has_one = True
            working.append(remedy)
    return working


def _in_order(event: Event) -> list[Callable[[Attempts, Event, Timeline], Remedy | None]]:
    by_name: dict[str, list[Any]] = {
        "eps": [lost_eps, _float32],
        "clamp": [clamped_count, other_divisor],
        "fill": [infinite_fill],
        "mask": [unmasked],
        "slope": [steep],
        "alignment": [zero_infinity],
        "scale": [_scale, _float32_backward],
        "floor": [finite_floor],
        "target": [],
        "product": [],
        "unseen": [],
        "correction": [],
        "skip": [],
    }
    if event.remedy in by_name:
        return by_name[event.remedy]
    if event.stage in ("forward", "float32"):
        return [_float32, in_domain, other_divisor]
    return []


# Scales


def _scale(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    trials, now = attempts.trials, 1.0
    if trials.scaler is not None and hasattr(trials.scaler, "get_scale"):
        now = float(trials.scaler.get_scale())
    exponents = [*range(2, 41, 2)] if event.kind == "gradient lost" else [*range(-1, -41, -1)]

    def gone(timeline: Timeline) -> bool:
        if event.kind != "gradient lost":
            return True
        others = [o for o in timeline.gradients if (o.site, o.call) == (_site(event), _call(event))]
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


def _float32(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    start = event.origin
    if start is None:
        return None
    reached = descendants(start)
    candidates = [o for o in seen.operations if id(o) in reached]
    return _fewest(attempts, event, candidates)


def _float32_backward(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    start = event.operation
    if start is None:
        return None
    before = start.all_behind()
    readers = [o for o in seen.operations if o in start.children]
    candidates = [*readers, start, *(o for o in reversed(seen.operations) if id(o) in before and o is not start)]
    return _fewest(attempts, event, candidates)


def _fewest(attempts: Attempts, event: Event, candidates: Sequence[Operation]) -> Remedy | None:
    """The fewest of the candidates, from the first on, whose float32 is enough."""
    trials = attempts.trials
    if trials.emulated:
        computing = [o for o in candidates if o.computes and o.module in trials.policies and o.name != "parameter"]
        units: list[Any] = [(o.module, o.name) for o in computing]
        if event.role in ("weight", "fprop.w"):
            units.insert(0, (event.operation.module if event.operation else "", ""))
        units = [*dict.fromkeys(units)]
    else:
        units = [o for o in candidates if o.name != "parameter"]
    units = units[: FEW if attempts.has_one else 64]
    done: dict[frozenset[int], Outcome | None] = {}

    def works(chosen: Sequence[int]) -> Outcome | None:
        key = frozenset(chosen)
        if key not in done:
            done[key] = attempts.works(_widened(trials, [units[i] for i in chosen]))
        return done[key]

    chosen = _halved(len(units), works)
    if chosen is not None and attempts.is_visible and not trials.emulated:
        if attempts.looks_well(_widened(trials, [units[i] for i in chosen])) is None:  # such as a mask that leaks now
            done.clear()
            chosen = _halved(len(units), works)
    outcome = None if chosen is None else works(chosen)
    if chosen is None or outcome is None:
        return None
    if trials.emulated:
        names = [f"{module}:{name}" if name else (module or "the model") for module, name in (units[i] for i in chosen)]
    else:
        names = [units[i].site for i in chosen if units[i].computes or units[i] is event.origin]
        names = names or [units[i].site for i in chosen]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    remedy = Remedy(f"float32 for {shown}", "float32", None, [*dict.fromkeys(names)], outcome.loss)
    if trials.emulated:
        changed = _policies(trials, [units[i] for i in chosen])
        remedy.policy = policy_of_modules({**trials.policies, **changed})
    return remedy


def _halved(count: int, works: Callable[[Sequence[int]], Outcome | None]) -> list[int] | None:
    """The fewest of the first numbers that work, found by halving, then one by one; none of them can be left out."""
    length = 1
    while length < count and works(range(length)) is None:
        length *= 2
        if length == FEW and works(range(count)) is None:  # then more of them are not worth their time
            return None
    length = min(length, count)
    if not count or works(range(length)) is None:
        return None
    low, high = length // 2, length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if works(range(middle)) is not None else (middle, high)
    chosen = [*range(high)]
    is_changed = True
    while is_changed and len(chosen) > 1:  # until none can be left out
        is_changed = False
        for i in [*chosen]:
            rest = [c for c in chosen if c != i]
            if rest and works(rest) is not None:
                chosen, is_changed = rest, True
    return chosen


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


# Of an optimizer's step, and of sums of gradients


def update_remedies(trials: Trials, event: Event, updates: Updates, seen: Timeline) -> list[Remedy]:
    """The remedies that work, the closest first."""
    if event.remedy == "clear" or event.role == "gradient":
        return _cleared(trials) or _smaller(trials)
    if event.kind == "update lost":
        return _masters_move(updates, event)
    working = []
    if event.remedy == "optimizer eps":
        working += _eps(trials, event)
    if event.remedy == "rate":
        working += _rate(trials)
    if updates.masters_are_finite() and event.ends is not None and event.ends.holder is not torch.float32:
        detail = f"all {len(updates.masters)} parameters are finite"
        working.append(Remedy("float32 master parameters and states", "master", detail=detail))
    return working[:2]


def _works(trials: Trials, change: Change) -> Outcome | None:
    try:
        outcome = trials.run(change)
    except Exception:  # a refused option is not a remedy
        return None
    return outcome if outcome.is_finite else None


def _cleared(trials: Trials) -> list[Remedy]:
    outcome = _works(trials, Change(clear=True))
    if outcome is None:
        return []
    return [Remedy("zero_grad() before the step", "clear", loss=outcome.loss, detail="all gradients are finite")]


def _smaller(trials: Trials) -> list[Remedy]:
    """Backward passes of one step that together are too much."""
    for exponent in range(-1, -25, -1):
        outcome = _works(trials, Change(loss_scale=2.0**exponent))
        if outcome is not None:
            words = f"each backward pass from the loss times {2.0**exponent:g}"
            return [Remedy(words, "scale", 2.0**exponent, loss=outcome.loss, detail="all gradients are finite")]
    return []


def _eps(trials: Trials, event: Event) -> list[Remedy]:
    for eps in EPS:
        if event.constant is None or eps <= event.constant or not event.ends.holds(eps):
            continue
        outcome = _works(trials, Change(options={"eps": eps}))
        if outcome is not None:
            detail = "all parameters stay finite"
            return [Remedy(f"eps {eps:g} in the optimizer", "optimizer eps", eps, loss=outcome.loss, detail=detail)]
    return []


def _rate(trials: Trials) -> list[Remedy]:
    for rate in RATES:
        outcome = _works(trials, Change(rate=rate))
        if outcome is not None:
            detail = "all parameters stay finite"
            return [Remedy(f"a rate {rate:g} times as large", "rate", rate, loss=outcome.loss, detail=detail)]
    return []


def _masters_move(updates: Updates, event: Event) -> list[Remedy]:
    wide = torch.float64 if event.fmt == "float32" else torch.float32
    remedies, (moving, of) = [], updates.moved_with_masters(wide)
    if of and moving == of:
        name = str(wide).removeprefix("torch.")
        remedies.append(Remedy(f"{name} master parameters", "master", detail=f"{moving} of {of} tensors move"))
    fmt = {"bfloat16": "bf16", "float16": "fp16"}.get(event.fmt, event.fmt)
    if wide is torch.float32:
        masters, first = updates.masters, updates.first

        def start(undo: Undo) -> int:
            keep_random_numbers(undo)
            return sum(int((round_to(m, fmt, "stochastic") != first[n].float()).sum()) for n, m in masters.items())

        moved = undone(start)
        if moved > event.of - event.count:
            detail = f"{moved} numbers move rather than {event.of - event.count}"
            remedies.append(Remedy("stochastic rounding of the update", "stochastic", detail=detail))
    return remedies
