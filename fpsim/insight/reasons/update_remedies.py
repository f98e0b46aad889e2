"""Remedies for an optimizer's step and for sums of gradients, tried."""

from __future__ import annotations

import torch

from fpsim.insight.reasons.attempts import EPS, Remedy
from fpsim.insight.reasons.event import Event
from fpsim.insight.reasons.timeline import Timeline
from fpsim.insight.reasons.trials import Change, Outcome, Trials
from fpsim.insight.reasons.updates import Updates
from fpsim.tensors.noise import keep_random_numbers
from fpsim.tensors.ops import round_to
from fpsim.undoing import Undo, undone

__all__ = ["update_remedies"]

RATES = (0.5, 0.1, 0.01, 1e-3, 1e-4, 1e-6)


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
