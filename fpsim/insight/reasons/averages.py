"""Averages that a step keeps in few bits: what it would make of them in more, and whether they move at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fpsim.emulation.calls import Action, Call
from fpsim.emulation.operations import Kind, row_of
from fpsim.emulation.tracing import Operation
from fpsim.insight.ranges import Ends
from fpsim.insight.reasons.event import Event
from fpsim.insight.reasons.swamping import WRONG
from fpsim.insight.reasons.trials import Change, Remedy, Trials
from fpsim.insight.reasons.updates import MOVED
from fpsim.insight.reasons.widening import LOW
from fpsim.tensors.tally import wanted_and_lost
from fpsim.torch_internals import map_leaves, tensors_of, version_of
from fpsim.torch_modes import without_torch_function

__all__ = ["Averages"]

PROBE = 2.0**-6  # by how much a probe begins beside the average, of its size
ARITHMETIC = (Kind.ADDITION, Kind.MULTIPLICATION, Kind.DIVISION, Kind.CAST, Kind.VIEW, Kind.SELECTION)
NORMS = ("batch_norm", "instance_norm")


@dataclass
class _Average:
    """A tensor that a step writes to. name: of what is no parameter and no buffer, the place where it does."""

    x: Tensor
    name: str
    role: str
    first: Tensor


class Averages:
    """Finds the tensors of few bits that a step writes to, and runs it once more with float64 copies of them beside.

    It is told of a run by `see` and `written`, and is an `edit` of the other. Optimizers' parameters are left out:
    `Updates` looks at these.
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
        self._outside: dict[int, Tensor] = {}  # tensors of few bits that no operation gave, by their memory
        self._has_norm = False
        self.found: dict[int, _Average] = {}  # by id
        self._wide = WeakTensorKeyDictionary()  # {tensor: it and its probe in float64}
        self._moved: dict[str, int] = {}

    # The run in which they are found

    def see(self, operation: Operation, given: list[Tensor]) -> None:
        """An operation ran. given: its operands."""
        self._has_norm |= operation.name in NORMS
        for source, x in zip(operation.sources, given, strict=True):
            if source is None and x.dtype in LOW:
                self._outside.setdefault(x.untyped_storage().data_ptr(), x)

    def written(self, x: Tensor, is_outside: bool, place: str) -> None:
        """A tensor is about to be written to. is_outside: whether no operation gave it."""
        if x.dtype not in LOW or x.layout is not torch.strided:
            return
        memory = x.untyped_storage().data_ptr()
        x = x if is_outside else self._outside.get(memory, x)
        if (is_outside or memory in self._outside) and memory not in self._own and id(x) not in self.found:
            self.found[id(x)] = _Average(x, place, "state", x)

    def end(self, stepped: Iterable[Tensor]) -> None:
        """The end of that run. stepped: the parameters of optimizers."""
        left_out, now = {id(p) for p in stepped}, {id(x) for x in (*self.model.parameters(), *self.model.buffers())}
        for x, version, first in self._first:
            name, role = self._named[id(x)]
            is_norm = self._has_norm and name.endswith(("running_mean", "running_var"))
            if id(x) not in left_out and (version_of(x) != version or id(x) not in now or is_norm):
                self.found[id(x)] = _Average(x, name, role, first)

    # The run beside which they are computed in float32

    def event(self, trials: Trials) -> Event | None:
        """The event of averages that stay where they are."""
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
            # an average that keeps the share d of itself is on its way to change / (1 - d)
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
        with torch.no_grad(), without_torch_function():
            try:
                wides = []
                for widened in map(self._widened, (0, 1)):
                    values, options = map_leaves(widened, (args, kwargs))
                    wides.append(func(*values, **options))
            except Exception:  # torch refuses some mixtures of dtypes
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
        """float32 for what did not move there, which was run."""
        moved = self._moved.get(event.place, 0)
        words = "it" if event.role == "state" else event.place
        return [Remedy(f"float32 for {words}", "master", detail=f"{moved} of {event.of} numbers move")]
