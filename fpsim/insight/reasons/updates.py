"""Find the faults of an optimizer's step: inf and NaN, updates that changed nothing, averages that do not move."""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fpsim.emulation.calls import Action, Call
from fpsim.emulation.operations import Kind, row_of
from fpsim.emulation.tracing import Operation
from fpsim.insight.ranges import Ends, epsilon_of, first_index, glance
from fpsim.insight.reasons.event import Event
from fpsim.insight.reasons.swamping import WRONG
from fpsim.insight.reasons.trials import Change, Remedy, Trials
from fpsim.insight.reasons.widening import LOW
from fpsim.models.installed import emulated_forwards
from fpsim.models.optimizers import quantized_optimizer_of
from fpsim.models.parameter_store import ParameterStore
from fpsim.models.storing import local_part, states_in
from fpsim.tensors.noise import keep_random_numbers
from fpsim.tensors.ops import round_to
from fpsim.tensors.tally import wanted_and_lost
from fpsim.torch_internals import map_leaves, tensors_of, version_of
from fpsim.torch_modes import without_torch_function
from fpsim.undoing import Undo, undone

__all__ = ["Averages", "Updates"]

MOVED = 0.1  # updates count as lost if less than this share of the wanted ones is made
STEPS = 4096  # the most steps that are tried with a user's optimizer that may keep the rounding errors of parameters
STILL = 0.5  # updates count as lost if at least this share of the wanted ones is in tensors that did not move at all
PROBE = 2.0**-6  # the distance from the average, relative to it, at which a probe begins
ARITHMETIC = (Kind.ADDITION, Kind.MULTIPLICATION, Kind.DIVISION, Kind.CAST, Kind.VIEW, Kind.SELECTION)
NORMS = ("batch_norm", "instance_norm")


class Updates:
    """Parameters, gradients and states before and after the steps of optimizers.

    rows: a row for each parameter. `wanted` counts the updates of a step in more bits, `moved` those that changed a
        number.
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
        self._stored: set[str] = set()  # parameters that a quantised optimizer stores
        self._wide_states: dict[str, dict[str, Tensor]] = {}  # states after a step in more bits
        self._twins: list[_Twin] = []  # of a user's optimizer: as it is, and one step later in more bits

    def before(self, optimizer: Any) -> None:
        """Note the state before a step of an optimizer."""
        self.steps += 1
        self._optimizer = optimizer
        # `Kept` restores these observers.
        if (quantized := quantized_optimizer_of(optimizer)) is not None:
            quantized.observers.append(self)
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

    # As an observer of a quantised optimizer, called after it has stored the update of a parameter

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
        """Add a row: the updates that a step in more bits makes, and the updates that were made."""
        wanted, lost = wanted_and_lost(first, now, change)
        row = {"parameter": name, "wanted": wanted, "moved": wanted - lost, "dtype": fmt, "epsilon": epsilon}
        magnitudes = first[first != 0].abs().double()
        row["median"] = float(magnitudes.median()) if magnitudes.numel() else 0.0
        row["largest"] = float(change.abs().max()) if change.numel() else 0.0
        self.rows.append(row)

    def _stepped_with_masters(self, optimizer: Any, own: list[Tensor]) -> dict[str, Tensor]:
        """Return the parameters after this step in more bits; {} if the optimizer cannot be copied."""
        wide = _twin(optimizer, is_wide=True)
        if wide is None or not wide.step():
            return {}
        masters = {self.names[id(p)]: wide.parameters[id(p)] for p in own}
        masters = {name: m.detach() for name, m in masters.items() if m.grad is not None}
        self._wide_states = {self.names[id(p)]: dict(_states(wide.optimizer, wide.parameters[id(p)])) for p in own}
        # A user's optimizer may apply rounding errors in later steps, as with Kahan's sums; torch's optimizers do not.
        if not type(optimizer).__module__.startswith("torch.optim"):
            narrow = _twin(optimizer, is_wide=False)
            self._twins = [] if narrow is None else [narrow, wide]
            # Copies are returned, because the twin makes further steps in place.
            return {name: m.clone() for name, m in masters.items()}
        return masters

    def after(self, optimizer: Any) -> None:
        """Note events of states and parameters that a step has made inf or NaN."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                name = self.names.get(id(p))
                if name is None:
                    continue
                for key, x in _states(optimizer, p):
                    if (name, key) not in self._bad_states and not bool(x.isfinite().all()):
                        self.events.append(self._state_event(name, key, x))
                if bool(self._before[name].isfinite().all()) and not bool(p.isfinite().all()):
                    self.events.append(self._parameter_event(optimizer, group, name, p))

    def _state_event(self, name: str, key: str, x: Tensor) -> Event:
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
        states = dict(_states(optimizer, p))
        event.read += [(f"{name} {key}", str(glance(x))) for key, x in states.items()]
        # Causes are checked from the certain to the likely one: a learning rate that is not finite, a divisor that is
        # 0, and then a learning rate that is too large.
        rate, title = group.get("lr"), type(optimizer).__name__
        if isinstance(rate, float | int | Tensor) and not math.isfinite(float(rate)):
            event.kind, event.remedy = f"rate is {'NaN' if math.isnan(float(rate)) else 'infinite'}", ""
            event.why.append(f"{event.count} of {event.of} became inf or NaN: lr of {title} is {rate}.")
            return event
        # The squares have one name in Adam, one in RMSprop and Adadelta, and one in Adagrad.
        squares = next((states[key] for key in ("exp_avg_sq", "square_avg", "sum") if key in states), None)
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
        lost = self._lost_state(name, states, bad)
        if lost is not None:
            event.kind = "division by zero"
            event.why.append(
                f"{event.count} of {event.of} became inf or NaN in the step of {title} (first at "
                f"{first_index(bad) or '0'}), where its {lost} is 0 in {ends.name} and not in more bits."
            )
            return event
        event.remedy = "rate"
        gradient = self.gradients.get(name)
        # NaN without inf, from a gradient whose square is in the range of the format, is not an overflow.
        if bool(p.detach()[bad].isnan().all()) and (gradient is None or gradient.amax**2 < ends.largest):
            event.kind = "NaN"
        event.why.append(
            f"{event.count} of {event.of} became inf or NaN in the step of {title} (first at "
            f"{first_index(bad) or '0'}): rate {group.get('lr')}, gradient {self.gradients.get(name)}."
        )
        return event

    def _lost_state(self, name: str, states: Mapping[str, Tensor], bad: Tensor) -> str | None:
        """Return the state that is 0 wherever a parameter became inf or NaN, but is not 0 there in more bits."""
        for key, x in states.items():
            wide = self._wide_states.get(name, {}).get(key)
            if wide is None or not x.shape == bad.shape == wide.shape:
                continue
            if not bool(x[bad].any()) and bool(wide[bad].all()):
                return key
        return None

    def at_end(self) -> None:
        """Count the updates that were made; called before anything is restored."""
        specs = {
            f"{f.name}.{k}" if f.name else k: f
            for m, f in emulated_forwards(self.model)
            for k, _ in m.named_parameters(recurse=False)
        }
        for name, p in self.model.named_parameters():
            master, first = self.masters.get(name), self.first.get(name)
            if master is None or first is None or name in self._stored or not bool(p.isfinite().all()):
                continue
            change, forward = master - first.to(master.dtype), specs.get(name)
            fmt, epsilon = str(p.dtype).removeprefix("torch."), float(torch.finfo(p.dtype).eps)
            spec = forward.specs.weight if forward is not None else None
            # If float32 weights hold only numbers of the format, the user's code stores them in that format.
            is_rounded = (
                spec is not None and bool((round_to(first, spec.fmt) == first).all()) and p.dtype is torch.float32
            )
            if spec is not None and is_rounded and epsilon_of(spec):
                fmt, epsilon = str(spec.fmt), epsilon_of(spec)
            self._add(name, first, change, p.detach(), fmt, epsilon)
        # The twins are only needed for lost updates.
        if not self._seem_lost():
            self._twins = []

    @property
    def _nearest(self) -> list[dict[str, Any]]:
        """The rows of parameters that are not rounded stochastically."""
        # Stochastic rounding loses single updates, but it is right on average.
        return [row for row in self.rows if not row.get("is drawn")]

    def _seem_lost(self) -> bool:
        """True if few of the wanted updates changed a number, or many are in tensors that did not move at all."""
        wanted, moved = sum(r["wanted"] for r in self._nearest), sum(r["moved"] for r in self._nearest)
        in_still = sum(r["wanted"] for r in self._nearest if not r["moved"])
        return bool(wanted) and (moved < MOVED * wanted or in_still >= STILL * wanted)

    def lost(self) -> Event | None:
        """Return the event of lost updates: nearly all of them changed nothing, or they left whole tensors unmoved."""
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
        """True if a user's optimizer keeps the rounding error of a parameter, and applies it in a later step."""
        # The optimizer's twin, and its twin in more bits, make further steps with the same gradient.
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
        # Make four times as many steps as it takes to move by an ulp; fewer for a large parameter, which is slow.
        steps = min(math.ceil(4 * ulp / largest), max(16, min(STEPS, 2**28 // first.numel())))
        if not narrow.step(steps - 1) or bool((narrow.parameters[key].double() == first)[still].all()):
            return False
        if not wide.step(steps - 1):
            return False
        own, true = ((twin.parameters[key].detach().double() - first)[still] for twin in (narrow, wide))
        # Numbers that the first step did not change must move at least half as far as in more bits, in the same
        # direction. With stochastic rounding they move in other directions too.
        return float((own * true).sum()) > 0.5 * float((true * true).sum())

    def moved_with_masters(self, dtype: torch.dtype) -> tuple[int, int]:
        """Return how many numbers move if the parameters are kept in more bits, and how many have a gradient."""
        moved = sum(int((m.to(dtype) != self.first[n].to(dtype)).sum()) for n, m in self.masters.items())
        return moved, max(moved, sum(self.gradients[n].nonzero for n in self.masters if n in self.gradients))

    def masters_are_finite(self) -> bool:
        return bool(self.masters) and all(bool(m.isfinite().all()) for m in self.masters.values())


@dataclass
class _Twin:
    """A copy of an optimizer. parameters: copies of its parameters, by the ids of the originals."""

    optimizer: Any
    parameters: dict[int, Tensor]

    def only(self, key: int) -> _Twin:
        """Drop all parameters but one, and return the twin."""
        for group in self.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p is self.parameters[key]]
        return self

    def step(self, times: int = 1) -> bool:
        """Step without hooks, and restore the random numbers; return False if the optimizer raises an error."""
        step = type(self.optimizer).step
        # torch wraps `step`, and calls the hooks of all optimizers around it, including those of this tool.
        if getattr(step, "hooked", False):
            step = step.__wrapped__

        def start(undo: Undo) -> bool:
            keep_random_numbers(undo)
            # The optimizer may need a closure, or state that was not copied.
            try:
                for _ in range(times):
                    step(self.optimizer)
            except Exception:
                return False
            return True

        return undone(start)


def _twin(optimizer: Any, is_wide: bool) -> _Twin | None:
    """Copy an optimizer and its parameters; return None if it cannot be copied.

    is_wide: whether the copy has more bits, also for its states.
    """
    # deepcopy takes the copies of parameters from this memo, so groups and states refer to these copies.
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
    # A user's optimizer may hold objects that cannot be copied.
    try:
        twin = copy.deepcopy(optimizer, memo)
    except Exception:
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


# Averages that a step keeps in few bits: compute them in more bits, and find out whether they move at all


@dataclass
class _Average:
    """A tensor to which a step writes. name: the name of the parameter or buffer; else the place of the write."""

    x: Tensor
    name: str
    role: str
    first: Tensor


class Averages:
    """Tensors in few bits to which a step writes, and a second run of the step, with float64 copies of them.

    `see` and `written` visit the first run; the second run has this object as its `edit`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._named = {id(x): (name, "parameter") for name, x in model.named_parameters()}
        self._named |= {id(x): (name, "buffer") for name, x in model.named_buffers()}
        self._first = [
            (x, version_of(x), x.detach().clone())
            for x in (*model.parameters(), *model.buffers())
            if x.dtype in LOW and x.layout is torch.strided
        ]
        self._own = {x.untyped_storage().data_ptr() for x, _, _ in self._first}
        self._outside: dict[int, Tensor] = {}  # by memory: tensors of few bits that are no results
        self._has_norm = False
        self.found: dict[int, _Average] = {}  # by the tensor's id
        self._wide = WeakTensorKeyDictionary()  # {tensor: its float64 copy, and the probe}
        self._moved: dict[str, int] = {}

    # The run in which averages are found

    def see(self, operation: Operation, given: list[Tensor]) -> None:
        """Visit an operation. given: the operands."""
        self._has_norm |= operation.name in NORMS
        for source, x in zip(operation.sources, given, strict=True):
            if source is None and x.dtype in LOW:
                self._outside.setdefault(x.untyped_storage().data_ptr(), x)

    def written(self, x: Tensor, is_outside: bool, place: str) -> None:
        """Visit a tensor before a write to it. is_outside: whether it is not the result of an operation."""
        if x.dtype not in LOW or x.layout is not torch.strided:
            return
        # The target may be a view of an average that the step has made. Then both have the same memory.
        memory = x.untyped_storage().data_ptr()
        x = x if is_outside else self._outside.get(memory, x)
        if (is_outside or memory in self._outside) and memory not in self._own and id(x) not in self.found:
            self.found[id(x)] = _Average(x, place, "state", x)

    def end(self, stepped: Iterable[Tensor]) -> None:
        """End the first run. stepped: the parameters of optimizers, which `Updates` checks."""
        left_out, now = {id(p) for p in stepped}, {id(x) for x in (*self.model.parameters(), *self.model.buffers())}
        for x, version, first in self._first:
            name, role = self._named[id(x)]
            # The kernel of a batch norm writes to running statistics without raising their version.
            is_norm = self._has_norm and name.endswith(("running_mean", "running_var"))
            if id(x) not in left_out and (version_of(x) != version or id(x) not in now or is_norm):
                self.found[id(x)] = _Average(x, name, role, first)

    # The run during which averages are also computed in float64

    def event(self, trials: Trials) -> Event | None:
        """Return the event of averages that do not move."""
        if not self.found:
            return None
        for average in self.found.values():
            x = average.x.detach().double()
            self._wide[average.x] = x.clone(), x * (1 + PROBE) + PROBE * float(x.abs().mean() if x.numel() else 0.0)
            average.first = average.x.detach().clone()
        begun = {key: self._wide[average.x][1].clone() for key, average in self.found.items()}
        still: list[tuple[_Average, Tensor, Tensor]] = []
        trials.run(Change(edit=self), at_end=lambda: still.extend(self._compared(begun)))
        if not still:
            return None
        average, change, to_go = max(still, key=lambda found: found[1].numel())
        ends = Ends.of_dtype(average.x.dtype)
        event = Event("buffers", "update lost", average.name, average.role, len(change), average.first.numel())
        event.fmt, event.ends, event.remedy = ends.name, ends, "average"
        event.why.append(
            f"{event.count} of {event.of} numbers that the step moves in float32, by up to {float(change.max()):.3g}, "
            f"stay where they are in {ends.name}, where half an ulp of them is up to {float(to_go.max()):.3g}."
        )
        if len(still) > 1:
            event.why.append(f"So do those of {len(still) - 1} more tensors.")
        self._moved = {found.name: len(moved) for found, moved, _ in still}
        return event

    def _compared(self, begun: dict[int, Tensor]) -> Iterable[tuple[_Average, Tensor, Tensor]]:
        """Yield the averages that do not move, with the changes that they missed, and half an ulp of each number."""
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        for key, average in self.found.items():
            now = average.x if average.role == "state" else named.get(average.name, average.x)
            if now not in self._wide or now.shape != average.first.shape:
                continue
            wide, probe = self._wide[now]
            first = average.first.double()
            change = wide - first
            wanted, lost = wanted_and_lost(first, now.detach().double(), change)
            if not wanted or lost < (1 - MOVED) * wanted or not bool(wide.isfinite().all()):
                continue
            # An average that keeps the share d of itself in each step moves by change / (1 - d) in total. The probe,
            # which begins at other values, tells d.
            kept = (probe - wide) / (begun[key] - first)
            to_go = change.abs() / (1 - kept).clamp(min=1e-9)
            ends = Ends.of_dtype(now.dtype)
            half_ulp = torch.ldexp(
                torch.full_like(first, ends.epsilon / 2), torch.frexp(first.abs().clamp(min=ends.smallest))[1] - 1
            ).clamp(min=ends.smallest / 2)
            where = (change != 0) & (first == now.detach().double())
            if float((to_go > WRONG * half_ulp)[where].double().mean()) >= 0.5:
                yield average, change[where].abs(), half_ulp[where]

    def __call__(
        self, index: int, kind: Call, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        mine = [x for x in tensors_of((args, kwargs)) if x in self._wide]
        if not mine or kind.action is Action.PASS:
            return func(*args, **kwargs)
        writes = kind.in_place or kind.name in NORMS
        row = row_of(kind.name)
        if not writes and row.kind not in ARITHMETIC and row.name not in ("lerp", "detach", "data", "addcmul"):
            return func(*args, **kwargs)
        # torch refuses some mixtures of dtypes. Then the float64 copies of these tensors are dropped.
        with torch.no_grad(), without_torch_function():
            try:
                wides = []
                for widened in map(self._widened, (0, 1)):
                    values, options = map_leaves(widened, (args, kwargs))
                    wides.append(func(*values, **options))
            except Exception:
                for x in mine:
                    self._wide.pop(x, None)
                return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if kind.name not in NORMS:
            for x, *wide in zip(tensors_of(out), *map(tensors_of, wides), strict=False):
                if x.is_floating_point() and x not in self._wide:
                    self._wide[x] = tuple(wide)
        return out

    def _widened(self, which: int) -> Callable[[Any], Any]:
        def widened(x: Any) -> Any:
            if isinstance(x, torch.dtype):
                return torch.float64 if x.is_floating_point else x
            if not isinstance(x, Tensor):
                return x
            known = self._wide.get(x)
            if known is not None:
                return known[which]
            return x.detach().double() if x.is_floating_point() else x

        return widened

    def remedies(self, event: Event) -> list[Remedy]:
        """Return float32 as the remedy for the averages: the run in float64 has shown that they move there."""
        moved = self._moved.get(event.place, 0)
        words = "it" if event.role == "state" else event.place
        return [Remedy(f"float32 for {words}", "master", detail=f"{moved} of {event.of} numbers move")]
