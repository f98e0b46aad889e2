"""A model run through a dump: each module gets what the engine's module got, and answers what that answered.

A module's own code, what it computes beside the modules that it calls, is so judged on the engine's numbers: by what it
gives to the modules inside, and by what it makes of their recorded results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fpsim.insight.engines.dumped_names import Source
from fpsim.insight.engines.dumps import Dump, inputs_of, key_of, outputs_of
from fpsim.insight.engines.places import Kept, relative_of
from fpsim.insight.engines.recorded import Steps, Value, is_of_rows, placed
from fpsim.insight.engines.sides import Door
from fpsim.torch_internals import map_leaves
from fpsim.torch_modes import without_torch_function

__all__ = ["Forced", "Injected", "Judged", "Recorded", "Seen", "Target"]

EVERYTHING = torch.ones(0, dtype=torch.bool)  # the mask of rows that are chosen already


class Seen(Kept):
    """A visitor that keeps what each module gives, and the shapes of what goes in and comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[str, list[tuple[int, ...]]] = {}
        self.results: dict[str, list[tuple[int, ...]]] = {}

    def __call__(self, door: Door, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if door.name not in self.inputs:
            self.inputs[door.name] = [tuple(x.shape) for _, x in inputs_of(args, kwargs) if x.is_floating_point()]
        out = super().__call__(door, args, kwargs)
        if door.name not in self.results:
            self.results[door.name] = [tuple(x.shape) for _, x in outputs_of(out) if x.is_floating_point()]
        return out


class Recorded:
    """The tensors of a dump under a model's names, with their tokens where the model has them."""

    def __init__(self, dump: Dump, steps: Steps, sources: Mapping[str, Source], seen: Seen, leaves: set[str]) -> None:
        self.dump, self.steps, self.sources = dump, steps, sources
        self.tokens = tuple(steps.tokens.shape)
        self._seen, self._leaves = seen, leaves
        self.valid = steps.mask.reshape(-1)
        self.unlike: dict[str, str] = {}
        self.has_inputs = any((key := key_of(name)) and key.path.startswith("in") and key.module for name in dump)

    def values(self, name: str, call: int) -> dict[str, Value]:
        """What the dump has of a call of a module, by path."""
        source = self.sources.get(name)
        if source is None:
            return {}
        calls: dict[str, dict[int, Any]] = {}
        for key, entry in self.dump.of(source.module).items():
            if entry.read is not None and entry.dtype.is_floating_point:
                calls.setdefault(key.path, {})[key.call] = entry
        found: dict[str, Value] = {}
        n = len(self.steps.steps)
        for path, of in calls.items():
            count = max(of) + 1
            if count % n:
                self.unlike.setdefault(name, f"the dump has {count} calls of it in {n} steps")
                return {}
            per_step = count // n
            wanted = [(self.steps.steps[i], of.get(i * per_step + call)) for i in range(n)]
            there = [(step, entry.read()) for step, entry in wanted if entry is not None]
            if there:
                found[path] = placed(f"{source.module}.{path}".lstrip("."), there, self.steps)
        self._require_numbers(found)
        return self._as_model(name, source, found)

    def _require_numbers(self, found: dict[str, Value]) -> None:
        for value in found.values():
            if value.rows is None or value.present is None:
                continue
            rows = value.rows[self.valid & value.present]
            if bool((rows if rows.element_size() > 1 else rows.float()).isnan().any()):
                raise ValueError(
                    f"{value.name} of {self.dump.path.name} has NaN at tokens that are no padding. Expected: numbers. "
                    f"The engine's run is broken there, or before: look at the first module whose result has NaN."
                )

    def _as_model(self, name: str, source: Source, found: dict[str, Value]) -> dict[str, Value]:
        """The values of a module that adds a residual, or that fuses several, as the model's module has them."""
        ins = [p for p, v in found.items() if p.startswith("in") and v.rows is not None]
        outs = [p for p, v in found.items() if p.startswith("out") and v.rows is not None]
        shapes = {found[p].rows.shape for p in (*ins, *outs)}  # type: ignore[union-attr]
        own = sum(is_of(shape, self.tokens) for shape in self._seen.results.get(name, ()))
        if len(outs) == 2 and own == 1 and len(shapes) == 1 and len(ins) <= 2:
            # (x, residual) -> (y, x + residual), as fused norms and the layers around them have it in vLLM and SGLang
            first, second = (found[p] for p in outs)
            if name in self._leaves:
                return {"in0": second, "out0": first}
            found = {"out0": _sum(first, second), **({"in0": _sum(*(found[p] for p in ins))} if ins else {})}
        if source.is_part:
            widths = [self._width(other) for other in (*source.before, name)]
            for path in outs:
                if path in found and found[path].rows is not None:
                    found[path] = found[path].part(sum(widths[:-1]), widths[-1])
        return found

    def _width(self, name: str) -> int:
        shapes = self._seen.results.get(name) or [(0,)]
        return shapes[0][-1]


def is_of(shape: tuple[int, ...], tokens: tuple[int, ...]) -> bool:
    return shape[:2] == tokens or shape[:1] == (tokens[0] * tokens[1],)


def _sum(*values: Value) -> Value:
    """The sum in the dtype of the dump, as the engine rounds it when it is added."""
    if len(values) == 1:
        return values[0]
    first, second = values
    assert first.rows is not None
    assert second.rows is not None
    wide = first.rows.float() + second.rows.float()
    return Value(f"{first.name} + {second.name}", wide.to(first.rows.dtype), first.present, None)


@dataclass
class Target:
    """A place at which a module's own code is compared: its result, or what it gives to a module inside.

    module: whose own code it is. at: the module at whose door it is seen; call, path: of that one.
    delta: recorded minus own, in the shape of the model's tensor, zero where nothing was recorded.
    """

    module: str
    at: str
    call: int
    path: str
    local: float
    own: Tensor
    rows: Tensor | None
    delta: Tensor
    dtype: torch.dtype
    floor: float = 0.0

    @property
    def words(self) -> str:
        if self.path.startswith("out"):
            return "its result" if self.at == self.module else f"the result of {self.at}"
        return f"what it gives to {self.at}"


class Forced:
    """A visitor that brings the dump's numbers in before each module, and in the place of what it gives.

    Subclasses are told both by `compare`.
    """

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self._calls: dict[str, int] = {}
        self._stack: list[str] = [""]

    def __call__(self, door: Door, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = door.name
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        values = self.recorded.values(name, call)
        with without_torch_function():
            args, kwargs = self._exchanged(
                (args, kwargs), [*inputs_of(args, kwargs)], values, self._stack[-1], name, call
            )
        self._stack.append(name)
        try:
            out = door.run(*args, **kwargs)
        finally:
            self._stack.pop()
        with without_torch_function():
            return self._exchanged(out, [*outputs_of(out)], values, name, name, call)

    def _exchanged(
        self, tree: Any, leaves: list[tuple[str, Tensor]], values: dict[str, Value], owner: str, at: str, call: int
    ) -> Any:
        """A tree with the dump's numbers in it. Equal tensors stay: emulation knows of them what a copy would lose."""
        new: dict[int, Tensor] = {}
        for path, x, value in matched(leaves, values, self.recorded.tokens):
            if at == "" and path.startswith("in"):
                continue  # nothing of a model's comes before its own arguments
            there = value.like(x, self.recorded.tokens)
            if there is None:
                self.recorded.unlike.setdefault(
                    at, f"{value.name} has another shape: {_shape(value)}, not {tuple(x.shape)}"
                )
                continue
            known, rows = there
            known = known.to(x.device)
            self.compare(owner, at, call, path, x, known, rows)
            if known.dtype is x.dtype and rows is None and torch.equal(known, x):
                continue
            wide = known.to(x.dtype)
            if rows is not None and not bool(rows.all()):
                lead = rows.reshape(x.shape[:2] if x.shape[:2] == self.recorded.tokens else x.shape[:1]).to(x.device)
                wide = torch.where(lead.reshape(*lead.shape, *[1] * (x.dim() - lead.dim())), wide, x)
            if not torch.equal(wide, x):
                new[id(x)] = wide.clone()
        return map_leaves(lambda x: new.get(id(x), x), tree) if new else tree

    def compare(
        self, owner: str, at: str, call: int, path: str, own: Tensor, known: Tensor, rows: Tensor | None
    ) -> None:
        """Called with what the model computed and what was recorded."""


def matched(
    leaves: list[tuple[str, Tensor]], values: dict[str, Value], tokens: tuple[int, ...]
) -> Iterator[tuple[str, Tensor, Value]]:
    """The tensors of a call, each with the recorded one: by path, else where one of each is left."""
    floats = [(path, x) for path, x in leaves if x.is_floating_point()]
    side = "out" if any(path.startswith("out") for path, _ in leaves) else "in"
    there = {path: value for path, value in values.items() if path.startswith(side)}
    fits = {path: value for path, value in there.items() if value.rows is not None}
    left: list[tuple[str, Tensor]] = []
    for path, x in floats:
        value = there.get(path)
        if value is not None and (value.like(x, tokens) is not None or not fits):
            fits.pop(path, None)
            there.pop(path)
            yield path, x, value
        elif is_of_rows(x, tokens):  # type: ignore[arg-type]
            left.append((path, x))
    if len(left) == 1 and len(fits) == 1:  # by position on one side and by name on the other
        yield left[0][0], left[0][1], next(iter(fits.values()))
    else:
        yield from ((path, x, there[path]) for path, x in left if path in there)


class Judged(Forced):
    """Compares each module's own code with the dump, and keeps what is apart.

    known: the targets of an earlier run, whose floors this run measures: the same code with sums in another order.
    """

    def __init__(self, recorded: Recorded, known: dict[tuple[str, int, str], Target] | None = None) -> None:
        super().__init__(recorded)
        self._known = known
        self.targets: dict[tuple[str, int, str], Target] = {}
        self.judged: list[str] = []

    def compare(
        self, owner: str, at: str, call: int, path: str, own: Tensor, known: Tensor, rows: Tensor | None
    ) -> None:
        key = (at, call, path)
        if self._known is not None:
            if key in self._known:
                target = self._known[key]
                target.floor = max(target.floor, self._apart(target.own, own, target.rows))
            return
        if owner not in self.judged:
            self.judged.append(owner)
        local = self._apart(own, known, rows)
        if local:
            delta = torch.nan_to_num(known.float() - own.float(), 0.0, 0.0, 0.0)
            kept = self._rows(rows)
            if kept is not None:
                lead = kept.reshape(own.shape[:2] if own.shape[:2] == self.recorded.tokens else own.shape[:1])
                delta = delta * lead.to(own.device).reshape(*lead.shape, *[1] * (own.dim() - lead.dim()))
            wider = max((known.dtype, own.dtype), key=lambda dtype: torch.finfo(dtype).eps)
            self.targets[key] = Target(owner, at, call, path, local, own.detach().clone(), rows, delta, wider)

    def _rows(self, rows: Tensor | None) -> Tensor | None:
        return None if rows is None else rows & self.recorded.valid

    def _apart(self, a: Tensor, b: Tensor, rows: Tensor | None) -> float:
        kept = self._rows(rows)
        if kept is None:
            return relative_of([a], [b], EVERYTHING)
        n = len(kept)
        x, y = (t.reshape(n, -1)[kept.to(t.device)].double() for t in (a, b))
        return relative_of([x], [y], EVERYTHING) if len(x) else 0.0


@dataclass
class Injected:
    """A visitor that adds to a model what its own code differs by in some modules."""

    targets: list[Target]
    _calls: dict[str, int] = field(default_factory=dict)

    def __call__(self, door: Door, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = door.name
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        mine = {t.path: t for t in self.targets if t.at == name and t.call == call}
        if not mine:
            return door.run(*args, **kwargs)
        with without_torch_function():
            args, kwargs = _added((args, kwargs), inputs_of(args, kwargs), mine)
        out = door.run(*args, **kwargs)
        with without_torch_function():
            return _added(out, outputs_of(out), mine)


def _added(tree: Any, leaves: Iterator[tuple[str, Tensor]], mine: dict[str, Target]) -> Any:
    new = {
        id(x): (x.double() + mine[path].delta.double()).to(x.dtype)
        for path, x in leaves
        if path in mine and x.shape == mine[path].delta.shape
    }
    return map_leaves(lambda x: new.get(id(x), x), tree) if new else tree
