"""What an optimizer's step did: numbers that became inf or NaN, and updates that changed nothing."""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fpsim.insight.ranges import Ends, epsilon_of, first_index, glance
from fpsim.insight.reasons.event import Event
from fpsim.models.installed import emulated_forwards
from fpsim.models.optimizers import quantized_optimizer_of
from fpsim.models.parameter_store import ParameterStore
from fpsim.models.storing import local_part, states_in
from fpsim.tensors.noise import keep_random_numbers
from fpsim.tensors.ops import round_to
from fpsim.tensors.tally import wanted_and_lost
from fpsim.undoing import Undo, undone

__all__ = ["MOVED", "Updates"]

MOVED = 0.1  # the share of the wanted updates, below which they count as lost
STEPS = 4096  # at most, of an optimizer of one's own that may keep what its parameters lose
STILL = 0.5  # the share of the numbers in tensors of which none moved, from which on they count as lost


class Updates:
    """Looks at parameters, gradients and states around the steps of optimizers.

    wanted: how many updates a step with float32 parameters and states makes; moved: how many were made.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.events: list[Event] = []
        self.gradients: dict[str, Any] = {}  # glances before the step
        self.masters: dict[str, Tensor] = {}
        self.steps = 0
        self._before: dict[str, Tensor] = {}
        self.first: dict[str, Tensor] = {}
        self._bad_states: set[tuple[str, str]] = set()
        self._optimizer: Any = None
        self.rows: list[dict[str, Any]] = []
        self._stored: set[str] = set()  # parameters that a quantised optimizer stores in a format, which tells of them
        self._wide_states: dict[str, dict[str, Tensor]] = {}  # after a step in more bits
        self._twins: list[_Twin] = []  # of an optimizer of one's own: as it is; in more bits, a step ahead

    def before(self, optimizer: Any) -> None:
        self.steps += 1
        self._optimizer = optimizer
        if (quantized := quantized_optimizer_of(optimizer)) is not None:
            quantized.observers.append(self)  # `Kept` puts back who was told before
        own = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self.names]
        self._before = {self.names[id(p)]: p.detach().clone() for p in own}
        for p in own:
            self.first.setdefault(self.names[id(p)], self._before[self.names[id(p)]])
            if p.grad is not None:
                self.gradients.setdefault(self.names[id(p)], glance(p.grad))
        self._bad_states = {
            (self.names[id(p)], key) for p in own for key, x in _states(optimizer, p) if not bool(x.isfinite().all())
        }
        if self.steps == 1:
            self.masters = self._stepped_with_masters(optimizer, own)

    # As an observer of a quantised optimizer, which has stored the update of a parameter

    def is_due(self, step: int) -> bool:
        return self.steps == 1

    def saw(self, step: int, store: ParameterStore, before: Tensor, intended: Tensor, group: Mapping[str, Any]) -> None:
        name, storage = self.names.get(id(store.parameter)), store.storage
        if name is None or not bool(intended.isfinite().all()):
            return
        self._stored.add(name)
        fmt, epsilon = "float32", torch.finfo(torch.float32).eps
        if storage is not None:
            fmt, epsilon = str(storage.spec.fmt), epsilon_of(storage.spec) ** (2 if store.is_compensated else 1)
        self._add(name, before, intended, local_part(store.value), fmt, epsilon)
        self.rows[-1]["is drawn"] = storage is not None and storage.spec.rounding == "stochastic"

    def _add(self, name: str, first: Tensor, change: Tensor, now: Tensor, fmt: str, epsilon: float) -> None:
        """Count the updates of a parameter that were made, of those that a step in more bits makes."""
        wanted, lost = wanted_and_lost(first, now, change)
        row = {"parameter": name, "wanted": wanted, "moved": wanted - lost, "dtype": fmt, "epsilon": epsilon}
        magnitudes = first[first != 0].abs().double()
        row["median"] = float(magnitudes.median()) if magnitudes.numel() else 0.0
        row["largest"] = float(change.abs().max()) if change.numel() else 0.0
        self.rows.append(row)

    def _stepped_with_masters(self, optimizer: Any, own: list[Tensor]) -> dict[str, Tensor]:
        """The parameters after this step with parameters, gradients and states in more bits; {} where it cannot be."""
        wide = _twin(optimizer, is_wide=True)
        if wide is None or not wide.step():
            return {}
        masters = {self.names[id(p)]: wide.parameters[id(p)] for p in own}
        masters = {name: m.detach() for name, m in masters.items() if m.grad is not None}
        self._wide_states = {self.names[id(p)]: dict(_states(wide.optimizer, wide.parameters[id(p)])) for p in own}
        if not type(optimizer).__module__.startswith("torch.optim"):
            narrow = _twin(optimizer, is_wide=False)
            self._twins = [] if narrow is None else [narrow, wide]
            return {name: m.clone() for name, m in masters.items()}  # the twin goes on
        return masters

    def after(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                name = self.names.get(id(p))
                if name is None:
                    continue
                for key, x in _states(optimizer, p):
                    if (name, key) not in self._bad_states and not bool(x.isfinite().all()):
                        self.events.append(self._state_event(name, key, x, p))
                if bool(self._before[name].isfinite().all()) and not bool(p.isfinite().all()):
                    self.events.append(self._parameter_event(optimizer, group, name, p))

    def _state_event(self, name: str, key: str, x: Tensor, p: Tensor) -> Event:
        ends, bad = Ends.of_dtype(x.dtype), ~x.isfinite()
        event = Event("optimizer", "overflow", f"{name} {key}", "optimizer state", int(bad.sum()), x.numel())
        event.fmt, event.ends, event.remedy = ends.name, ends, "master"
        words = event.beyond(ends.name, ends.largest, first_index(bad))
        event.why.append(f"{words}; the gradient is {self.gradients.get(name, 'not known')}.")
        event.read = [(f"gradient of {name}", str(self.gradients.get(name)))]
        return event

    def _parameter_event(self, optimizer: Any, group: dict[str, Any], name: str, p: Tensor) -> Event:
        ends, bad = Ends.of_dtype(p.dtype), ~p.detach().isfinite()
        event = Event("optimizer", "overflow", name, "update", int(bad.sum()), p.numel(), fmt=ends.name, ends=ends)
        event.read = [(f"gradient of {name}", str(self.gradients.get(name)))]
        event.read += [(f"{name} {key}", str(glance(x))) for key, x in _states(optimizer, p)]
        rate, title = group.get("lr"), type(optimizer).__name__
        if isinstance(rate, float | int | Tensor) and not math.isfinite(float(rate)):
            event.kind, event.remedy = f"rate is {'NaN' if math.isnan(float(rate)) else 'infinite'}", ""
            event.why.append(
                f"{event.count} of {event.of} became inf or NaN: lr of {type(optimizer).__name__} is {rate}."
            )
            return event
        squares = dict(_states(optimizer, p)).get("exp_avg_sq", dict(_states(optimizer, p)).get("square_avg"))
        squares = squares if squares is not None else dict(_states(optimizer, p)).get("sum")
        eps = group.get("eps")
        if squares is not None and squares.shape == bad.shape and eps is not None:
            zeros = int((squares[bad] == 0).sum())
            if zeros and not ends.holds(eps):
                event.kind, event.remedy, event.constant = "division by zero", "optimizer eps", eps
                event.why.append(
                    f"{zeros} of its squared gradients are 0 in {ends.name} (gradients below "
                    f"{math.sqrt(ends.smallest):.3g} are), and eps {eps:g} is 0 too (least number {ends.smallest:.3g})."
                )
                event.why.append(f"So {title} divides by 0, first at {first_index(bad) or '0'}.")
                return event
        lost = self._lost_state(optimizer, name, p, bad)
        if lost is not None:
            event.kind = "division by zero"
            event.why.append(
                f"{event.count} of {event.of} became inf or NaN in the step of {title} (first at "
                f"{first_index(bad) or '0'}), where its {lost} is 0 in {ends.name} and not in more bits."
            )
            return event
        event.remedy = "rate"
        gradient = self.gradients.get(name)
        if bool(p.detach()[bad].isnan().all()) and (gradient is None or gradient.amax**2 < ends.largest):
            event.kind = "NaN"  # of no large number
        event.why.append(
            f"{event.count} of {event.of} became inf or NaN in the step of {title} (first at "
            f"{first_index(bad) or '0'}): rate {group.get('lr')}, gradient {self.gradients.get(name)}."
        )
        return event

    def _lost_state(self, optimizer: Any, name: str, p: Tensor, bad: Tensor) -> str | None:
        """The state that is 0 wherever a parameter became inf or NaN, and is not in more bits."""
        for key, x in _states(optimizer, p):
            wide = self._wide_states.get(name, {}).get(key)
            if wide is None or not x.shape == bad.shape == wide.shape:
                continue
            if not bool(x[bad].any()) and bool(wide[bad].all()):
                return key
        return None

    def at_end(self) -> None:
        """Count which updates were made; called before anything is put back."""
        specs = {
            f"{n}.{k}" if n else k: f
            for m, f in emulated_forwards(self.model)
            for n in [f.name]
            for k, _ in m.named_parameters(recurse=False)
        }
        for name, p in self.model.named_parameters():
            master, first = self.masters.get(name), self.first.get(name)
            if master is None or first is None or name in self._stored or not bool(p.isfinite().all()):
                continue
            change, forward = master - first.to(master.dtype), specs.get(name)
            fmt, epsilon = str(p.dtype).removeprefix("torch."), float(torch.finfo(p.dtype).eps)
            spec = forward.specs.weight if forward is not None else None
            is_rounded = (
                spec is not None and bool((round_to(first, spec.fmt) == first).all()) and p.dtype is torch.float32
            )
            if spec is not None and is_rounded and epsilon_of(spec):
                fmt, epsilon = str(spec.fmt), epsilon_of(spec)
            self._add(name, first, change, p.detach(), fmt, epsilon)
        if not self._seem_lost():
            self._twins = []

    @property
    def _nearest(self) -> list[dict[str, Any]]:
        """The rows of what is not rounded stochastically: that loses single updates, and is right on average."""
        return [row for row in self.rows if not row.get("is drawn")]

    def _seem_lost(self) -> bool:
        wanted, moved = sum(r["wanted"] for r in self._nearest), sum(r["moved"] for r in self._nearest)
        in_still = sum(r["wanted"] for r in self._nearest if not r["moved"])
        return bool(wanted) and (moved < MOVED * wanted or in_still >= STILL * wanted)

    def lost(self) -> Event | None:
        """The event of updates nearly all of which changed nothing, or that left most numbers in tensors unmoved."""
        if not self._seem_lost():
            return None
        rows = self._nearest
        wanted, moved = sum(r["wanted"] for r in rows), sum(r["moved"] for r in rows)
        still = [r for r in rows if r["wanted"] and not r["moved"]]
        worst = max(rows, key=lambda r: r["wanted"] - r["moved"])
        if self._moves_later(worst):
            return None
        half_ulp = 0.5 * worst["epsilon"] * 2.0 ** math.floor(math.log2(worst["median"])) if worst["median"] else 0.0
        event = Event("optimizer", "update lost", worst["parameter"], "update", wanted - moved, wanted)
        event.fmt, event.remedy = worst["dtype"], "master"
        event.why.append(
            f"{100 * (wanted - moved) / wanted:.3g} % of {wanted} updates changed nothing: the step of "
            f"{type(self._optimizer).__name__} is below half an ulp in {event.fmt}."
        )
        event.why.append(
            f"Here the largest update is {worst['largest']:.3g}, half an ulp of its median number {half_ulp:.3g}; "
            f"{len(still)} of {len(rows)} tensors did not move at all."
        )
        return event

    def _moves_later(self, worst: dict[str, Any]) -> bool:
        """Whether an optimizer of one's own keeps what a parameter loses, and moves it in a later step.

        It has the same gradient again and again, and so has one with more bits. What the first step left where it was
        must go half as far, along the same way: one that rounds stochastically strays from it.
        """
        if not self._twins:
            return False
        key = next(key for key, name in self.names.items() if name == worst["parameter"])
        first, master = self.first[worst["parameter"]].double(), self.masters[worst["parameter"]].double()
        narrow, wide = (twin.only(key) for twin in self._twins)
        if not narrow.step():
            return False
        still = (narrow.parameters[key].double() == first) & (master != first)
        if not bool(still.any()):
            return False
        ulp, largest = worst["epsilon"] * float(first[still].abs().max()), float((master - first)[still].abs().max())
        steps = min(math.ceil(4 * ulp / largest), max(16, min(STEPS, 2**28 // first.numel())))
        if not narrow.step(steps - 1) or bool((narrow.parameters[key].double() == first)[still].all()):
            return False
        if not wide.step(steps - 1):
            return False
        own, true = ((twin.parameters[key].detach().double() - first)[still] for twin in (narrow, wide))
        return float((own * true).sum()) > 0.5 * float((true * true).sum())

    def moved_with_masters(self, dtype: torch.dtype) -> tuple[int, int]:
        """How many numbers move where the parameters are kept in a dtype of more bits, of how many with a gradient."""
        moved = sum(int((m.to(dtype) != self.first[n].to(dtype)).sum()) for n, m in self.masters.items())
        return moved, max(moved, sum(self.gradients[n].nonzero for n in self.masters if n in self.gradients))

    def masters_are_finite(self) -> bool:
        return bool(self.masters) and all(bool(m.isfinite().all()) for m in self.masters.values())


@dataclass
class _Twin:
    """A copy of an optimizer, with copies of its parameters by the ids of these."""

    optimizer: Any
    parameters: dict[int, Tensor]

    def only(self, key: int) -> _Twin:
        """With one parameter from now on."""
        for group in self.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p is self.parameters[key]]
        return self

    def step(self, times: int = 1) -> bool:
        """Step, with the random numbers put back, and no hook of others called; False where that is refused."""
        step = type(self.optimizer).step
        if getattr(step, "hooked", False):  # by torch, which calls the hooks of all optimizers around it
            step = step.__wrapped__

        def start(undo: Undo) -> bool:
            keep_random_numbers(undo)
            try:
                for _ in range(times):
                    step(self.optimizer)
            except Exception:  # one that needs a closure, or that keeps what is not copied
                return False
            return True

        return undone(start)


def _twin(optimizer: Any, is_wide: bool) -> _Twin | None:
    """A copy of an optimizer and of its parameters; None where it cannot be copied.

    is_wide: in more bits, its states too.
    """
    memo: dict[int, Any] = {}
    parameters: dict[int, Tensor] = {}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        is_real = is_wide and p.is_floating_point()
        dtype = (torch.float64 if p.dtype.itemsize >= 4 else torch.float32) if is_real else p.dtype
        parameters[id(p)] = memo[id(p)] = copied = p.detach().to(dtype, copy=True).requires_grad_(p.requires_grad)
        if p.grad is not None:
            if p.grad.layout is not torch.strided:
                return None
            copied.grad = p.grad.detach().to(dtype, copy=True)
    try:
        twin = copy.deepcopy(optimizer, memo)
    except Exception:  # an optimizer of one's own may not be copied
        return None
    for p, state in twin.state.items():
        for found in [*states_in(state)] if is_wide else ():
            *outer, key = found.path
            inner = functools.reduce(operator.getitem, outer, state)
            if found.x.is_floating_point() and found.x.dim() and not isinstance(inner, tuple):
                inner[key] = found.x.to(p.dtype)
    return _Twin(twin, parameters)


def _states(optimizer: Any, p: Tensor) -> list[tuple[str, Tensor]]:
    states = states_in(optimizer.state.get(p, {}))
    return [(state.text, state.x) for state in states if state.x.is_floating_point() and state.x.dim()]
