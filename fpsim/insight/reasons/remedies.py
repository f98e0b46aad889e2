"""Try remedies on a step: a constant, a scale, float32 for some operations, another optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fpsim.emulation.tracing import Edit, Operation
from fpsim.formats.blocks import BlockFormat, Format, as_format, has_room_for_scales
from fpsim.formats.floats import CATALOGUE, FloatFormat
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
from fpsim.insight.reasons.swamping import additions_behind
from fpsim.insight.reasons.timeline import Timeline
from fpsim.insight.reasons.trials import EPS, NEARER, Attempts, Change, Outcome, Reference, Remedy, Trials
from fpsim.insight.reasons.updates import Updates
from fpsim.insight.reasons.widening import Widening
from fpsim.policies.policy import Policy, policy_of_modules
from fpsim.policies.products import Products
from fpsim.tensors.noise import keep_random_numbers
from fpsim.tensors.ops import round_to
from fpsim.undoing import Undo, undone

__all__ = ["remedies", "update_remedies", "widened_reads"]

FEW = 8  # if a remedy is known already, only so many operations are tried in float32
MOST_EXPONENT = 64  # log2 of the most extreme loss scale that is tried
RATES = (0.5, 0.1, 0.01, 1e-3, 1e-4, 1e-6)
Unit = tuple[str, str]  # a module of a quantised model, and the name of an operation in it; "" for the whole module


def remedies(
    trials: Trials, event: Event, seen: Timeline, was: Outcome, reference: Reference
) -> tuple[list[Remedy], list[str]]:
    """Return up to two remedies that work, the closest first; and, if none does, the parameters without a gradient."""
    attempts = Attempts(trials, event, was, seen, reference)
    working: list[Remedy] = []
    for attempt in _in_order(event):
        # Another divisor hides the zero, so it is tried only if nothing else works.
        if len(working) == 2 or (working and attempt is other_divisor):
            break
        remedy = attempt(attempts, event, seen)
        if remedy is not None:
            attempts.has_one = True
            working.append(remedy)
    return working, [] if working else attempts.unfed


def _in_order(event: Event) -> list[Callable[[Attempts, Event, Timeline], Remedy | None]]:
    """Return the attempts for an event, the closest remedy first."""
    # If the list is empty, only another batch or other code helps, and `why` says so.
    by_name: dict[str, list[Any]] = {
        "eps": [lost_eps, _float32],
        "clamp": [clamped_count, other_divisor],
        "fill": [infinite_fill],
        "mask": [unmasked],
        "slope": [steep, _float32_if_none],
        "alignment": [zero_infinity],
        "scale": [_scale, _of_gradients, _float32_backward],
        "floor": [finite_floor],
        "sum": [_float32_sum, _float32_if_none],
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
    """Try other loss scales: larger ones for lost gradients, smaller ones for an overflow."""
    trials, now = attempts.trials, 1.0
    if trials.scaler is not None and hasattr(trials.scaler, "get_scale"):
        now = float(trials.scaler.get_scale())
    found = _raised(attempts, event) if event.kind == "gradient lost" else _lowered(attempts, event)
    if found is None:
        return None
    exponent, outcome = found
    scale = now * 2.0**exponent
    detail = attempts.lost_shares(outcome) if event.kind == "gradient lost" else ""
    return Remedy(f"loss scale {scale:g} (it is {now:g})", "scale", scale, [], outcome.loss, detail=detail)


def _raised(attempts: Attempts, event: Event) -> tuple[int, Outcome] | None:
    """Return the first scale at which enough gradients are left and nothing overflows."""
    # At a smaller scale than this one, even the largest gradient is rounded to 0.
    least = event.ends.smallest / 2 / event.largest if event.largest else 0.0
    first = max(2, 2 * math.ceil(math.log2(least) / 2)) if least > 1 else 2
    nearest, worse = 1.0, 0
    for exponent in range(first, 41, 2):
        change = Change(loss_scale=2.0**exponent)
        if (outcome := attempts.works(change, looks=False)) is not None and attempts.looks_well(change) is not None:
            return exponent, outcome
        worse = 0 if attempts.distance < nearest else worse + 1
        nearest = min(nearest, attempts.distance)
        # A format without an infinity saturates instead of overflowing. Only the growing distance shows that.
        if not attempts.was_finite or (nearest < 1 and worse > 1):
            return None
    return None


def _lowered(attempts: Attempts, event: Event) -> tuple[int, Outcome] | None:
    """Return the largest scale at which nothing overflows, because a smaller scale loses more gradients."""
    first = 1
    if event.ends is not None and event.ends.largest < event.largest < math.inf:
        first = math.ceil(math.log2(event.largest / event.ends.largest))
    high, low, step = first - 1, first, 1
    # Gallop to a scale that fits, then bisect the interval: each try is a run of the step.
    while not attempts.is_finite(Change(loss_scale=2.0**-low)):
        high, low, step = low, low + step, 2 * step
        if low > MOST_EXPONENT:
            return None
    while low - high > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if attempts.is_finite(Change(loss_scale=2.0**-middle)) else (low, middle)
    outcome = attempts.looks_well(Change(loss_scale=2.0**-low))
    return None if outcome is None else (-low, outcome)


def _of_gradients(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    """Try a scale for each tensor, or bf16, in all places at which gradients are in the format that loses them."""
    trials, fmt = attempts.trials, getattr(event.ends.holder, "fmt", None)
    if event.kind != "gradient lost" or not trials.emulated or not isinstance(fmt, FloatFormat):
        return None
    changes: dict[str, Products | FloatFormat] = {}
    if has_room_for_scales(fmt):
        scaled = BlockFormat(fmt, "tensor", CATALOGUE["fp32"])
        changes[f"gradients enter products in {scaled}"] = Products(dgrad=(scaled, None), wgrad=(scaled, None))
    if fmt != CATALOGUE["bf16"]:
        changes["gradients in bf16"] = CATALOGUE["bf16"]
    for words, other in changes.items():
        changed = {name: _with_gradients(policy, fmt, other) for name, policy in trials.policies.items()}
        outcome = attempts.works(Change(policies=changed))
        if outcome is not None:
            detail = attempts.lost_shares(outcome)
            return Remedy(words, "format", None, [], outcome.loss, policy_of_modules(changed), detail)
    return None


def _with_gradients(policy: Policy, fmt: Format, other: Products | FloatFormat) -> Policy:
    """Return a policy in which gradients in `fmt` get another format, or enter products as operands with scales."""
    given = {"error": policy.error, "weight_grad": policy.weight_grad}
    lossy = [role for role, its in given.items() if its is not None and as_format(its) == fmt]
    # A policy that has products has already chosen the formats of their operands.
    if not lossy or (isinstance(other, Products) and policy.products is not None):
        return policy
    changed: dict[str, Any] = dict.fromkeys(lossy, other)
    if isinstance(other, Products):
        changed = {**dict.fromkeys(lossy), "products": other}
    return replace(policy, **changed)


# float32 for some operations


def _float32(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    """Try float32, or float64, for the fewest operations around the origin of an event."""
    start = event.origin
    if start is None:
        return None
    # The widest dtype to which a policy can set an operation is float32.
    if attempts.wide is None or (attempts.wide is torch.float64 and attempts.trials.emulated):
        return None
    reached = start.all_ahead()
    following = [o for o in seen.operations if id(o) in reached]
    nearest, waiting = {id(start): start}, [start]
    for o in waiting:
        waiting += (further := [p for p in o.parents if id(p) not in nearest])
        nearest.update((id(p), p) for p in further)
    others = [o for o in reversed(seen.operations[: seen.operations.index(following[0])]) if id(o) not in nearest]
    # A result that differs from float32's was lost at the origin or before it. An overflow may also be cured by float32
    # for the operations that follow.
    if event.stage == "float32":
        return _fewest(attempts, event, [*nearest.values(), *others, *following[1:]])
    return _fewest(attempts, event, following) or _fewest(attempts, event, [*nearest.values(), *others, *following[1:]])


def _float32_sum(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    """Try float32 for all operations of a sum, or for all operations of all wrong sums."""
    # The fewest operations are not searched for: a sum in which any addition is still rounded stays wrong.
    trials, wrong = attempts.trials, [o for o in seen.operations if o.notes.get("swamped")]
    everywhere = [*dict.fromkeys(o for at in wrong for o in additions_behind(at))]
    for operations in (event.stretch, everywhere):
        units: list[Any] = [*operations]
        if trials.emulated:
            units = [*dict.fromkeys((o.module, o.name) for o in operations if o.module in trials.policies)]
        if attempts.wide is torch.float32 and units:
            outcome = attempts.works(_widened(attempts, units))
            if outcome is not None:
                return _widened_remedy(attempts, event, units, outcome)
    return None


def widened_reads(
    trials: Trials, event: Event, seen: Timeline, was: Outcome, reference: Reference, edit: Edit
) -> list[Remedy]:
    """Try to add up in float32 the gradients of tensors that are read often."""
    outcome = Attempts(trials, event, was, seen, reference).works(Change(edit=edit))
    words = f"gradients of {event.place} added up in float32"
    return [] if outcome is None else [Remedy(words, "sum", None, [event.place], outcome.loss)]


def _float32_if_none(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    return None if attempts.has_one else _float32(attempts, event, seen)


def _float32_backward(attempts: Attempts, event: Event, seen: Timeline) -> Remedy | None:
    """Try float32 for the fewest operations around a gradient that is lost or overflows."""
    start = event.operation
    if start is None:
        return None
    before = start.all_behind()
    readers = [o for o in seen.operations if o in start.children]
    behind = (o for o in reversed(seen.operations) if id(o) in before)
    return _fewest(attempts, event, [*dict.fromkeys((*readers, start, *reversed(event.stretch), *behind))])


def _fewest(attempts: Attempts, event: Event, candidates: Sequence[Operation]) -> Remedy | None:
    """Try float32 for as few of the candidates as possible, preferring the first; return the remedy, if it is one."""
    trials = attempts.trials
    if trials.emulated:
        computing = [o for o in candidates if o.computes and o.module in trials.policies and o.name != "parameter"]
        units: list[Any] = [(o.module, o.name) for o in computing]
        if event.role in ("weight", "fprop.w"):
            units.insert(0, (event.operation.module if event.operation else "", ""))
        # The gradient of a parameter is rounded by the module, not by one of the module's operations.
        if event.kind == "gradient lost":
            units += [(module, "") for module, _ in units]
        units = [*dict.fromkeys(units)]
    else:
        units = [o for o in candidates if o.name != "parameter"]
    units = units[: FEW if attempts.has_one else None]
    # The first search looks only at the end of each run, because observing a whole run takes ten times as long. A run
    # with the chosen set is then observed. If it fails, for example because a mask leaks now, a second search observes
    # each trial.
    chosen = _searched(attempts, units)
    outcome = None if chosen is None else attempts.looks_well(_widened(attempts, chosen))
    if chosen is not None and outcome is None:
        attempts.is_looking = True
        chosen = _searched(attempts, units)
        outcome = None if chosen is None else attempts.works(_widened(attempts, chosen))
    if chosen is None or outcome is None:
        return None
    return _widened_remedy(attempts, event, chosen, outcome)


def _widened_remedy(attempts: Attempts, event: Event, chosen: Sequence[Any], outcome: Outcome) -> Remedy:
    trials = attempts.trials
    if trials.emulated:
        names = [f"{module}:{name}" if name else (module or "the model") for module, name in chosen]
    else:
        names = [o.site for o in chosen]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    dtype = "float64" if attempts.wide is torch.float64 else "float32"
    remedy = Remedy(f"{dtype} for {shown}", dtype, None, [*dict.fromkeys(names)], outcome.loss)
    remedy.detail = attempts.lost_shares(outcome) if event.kind == "gradient lost" else ""
    if trials.emulated:
        remedy.policy = policy_of_modules({**trials.policies, **_policies(trials, chosen)})
    return remedy


def _searched(attempts: Attempts, units: Sequence[Any]) -> list[Any] | None:
    done: dict[frozenset[int], Outcome | None] = {}

    def works(chosen: Sequence[int]) -> Outcome | None:
        # The search asks for some sets twice, and each answer costs a run of the step.
        key = frozenset(chosen)
        if key not in done:
            change = _widened(attempts, [units[i] for i in chosen])
            done[key] = attempts.works(change, looks=False)
        return done[key]

    chosen = _halved(len(units), works)
    return None if chosen is None else [units[i] for i in chosen]


def _halved(count: int, works: Callable[[Sequence[int]], Outcome | None]) -> list[int] | None:
    """Return a set of numbers below `count` that works, and from which none can be left out; None if there is none."""
    length = 1
    while length < count and works(range(length)) is None:
        length *= 2
        # If all of them together do not work, nothing more is tried.
        if length == FEW and works(range(count)) is None:
            return None
    length = min(length, count)
    if not count or works(range(length)) is None:
        return None
    low, high = length // 2, length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if works(range(middle)) is not None else (middle, high)
    chosen = [*range(high)]
    # As in delta debugging: leave out halves, then smaller parts, until each remaining number is needed.
    size = len(chosen) // 2
    while size:
        parts = [chosen[i : i + size] for i in range(0, len(chosen), size)]
        is_changed = False
        for part in parts:
            rest = [c for c in chosen if c not in part]
            if rest and works(rest) is not None:
                chosen, is_changed = rest, True
        size = min(size, len(chosen) // 2) if is_changed else size // 2
    return chosen


def _widened(attempts: Attempts, units: Sequence[Any]) -> Change:
    if attempts.trials.emulated:
        return Change(policies=_policies(attempts.trials, units))
    return Change(edit=Widening({o.index for o in units}, attempts.wide or torch.float32, attempts.reference.given))


def _policies(trials: Trials, units: Sequence[Unit]) -> dict[str, Policy]:
    changed: dict[str, Policy] = {}
    for module, name in units:
        policy = changed.get(module, trials.policies[module])
        # A policy knows only some operations by name. For any other operation, the whole module is left in float32.
        try:
            changed[module] = replace(policy, float32=(*policy.float32, name)) if name else Policy()
        except ValueError:
            changed[module] = Policy()
    return changed


# Remedies for an optimizer's step, and for sums of gradients


def update_remedies(trials: Trials, event: Event, updates: Updates, seen: Timeline) -> list[Remedy]:
    """Return the remedies that work, the closest first."""
    if event.remedy == "clear" or event.role == "gradient":
        return _cleared(trials) or _smaller(trials, seen)
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


def _works(trials: Trials, change: Change, moves: bool = True) -> Outcome | None:
    """Return the outcome of a run under the change; None if it is not finite.

    moves: whether to return None also if too few of the weights that have a gradient change.
    """
    kept = {id(tensor): value for tensor, value in trials.kept.tensors}
    own = {id(p) for o in trials.kept.optimizers for group in o.param_groups for p in group["params"]}
    changed: dict[str, Tensor] = {}

    def compare() -> None:
        for name, p in trials.model.named_parameters():
            if id(p) in own and id(p) in kept:
                changed[name] = p.detach() != kept[id(p)]

    # An optimizer may refuse an option: then the change is not a remedy.
    try:
        outcome = trials.run(change, at_end=compare, keeps_gradients=True)
    except Exception:
        return None
    with_gradients = {name: g != 0 for name, g in outcome.gradients.items() if name in changed}
    wanted = sum(int(has.sum()) for has in with_gradients.values())
    moved = sum(int((has & changed[name]).sum()) for name, has in with_gradients.items())
    # With a very small learning rate all numbers are finite, but updates below half an ulp train nothing.
    return outcome if outcome.is_finite and (not moves or moved >= (1 - 1 / NEARER) * wanted) else None


def _cleared(trials: Trials) -> list[Remedy]:
    outcome = _works(trials, Change(clear=True), moves=False)
    if outcome is None:
        return []
    return [Remedy("zero_grad() before the step", "clear", loss=outcome.loss, detail="all gradients are finite")]


def _smaller(trials: Trials, seen: Timeline) -> list[Remedy]:
    """Try smaller gradients in each backward pass of a step in which the sum of the gradients overflows."""
    # A scale under which a parameter gets a gradient of zeros is not a remedy.
    fed = {name for name, arrived in seen.arrived.items() if any(g.nonzero for g in arrived)}
    for exponent in range(-1, -25, -1):
        outcome = _works(trials, Change(loss_scale=2.0**exponent), moves=False)
        if outcome is not None and all(bool(g.any()) for name, g in outcome.gradients.items() if name in fed):
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
    """Count the numbers that would move with master parameters, or with stochastic rounding."""
    wide = torch.float64 if event.fmt == "float32" else torch.float32
    remedies, (moving, of) = [], updates.moved_with_masters(wide)
    if moving >= max(NEARER * (event.of - event.count), of / 2):
        name = str(wide).removeprefix("torch.")
        remedies.append(Remedy(f"{name} master parameters", "master", detail=f"{moving} of {of} numbers move"))
    fmt = {"bfloat16": "bf16", "float16": "fp16"}.get(event.fmt, event.fmt)
    if wide is torch.float32:
        masters, first = updates.masters, updates.first

        def start(undo: Undo) -> int:
            keep_random_numbers(undo)
            return sum(int((round_to(m, fmt, "stochastic") != first[n].float()).sum()) for n, m in masters.items())

        moved = undone(start)
        # More moves than before are enough: stochastic rounding moves few numbers in a step, and is right on average.
        if moved > event.of - event.count:
            detail = f"{moved} numbers move rather than {event.of - event.count}"
            remedies.append(Remedy("stochastic rounding of the update", "stochastic", detail=detail))
    return remedies
