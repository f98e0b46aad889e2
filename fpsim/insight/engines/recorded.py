"""Assign the tensors of a dump to a model's modules, and their rows to tokens, in the shapes of the model's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpsim.checks import few, shown
from fpsim.insight.engines.sides import is_beginning, renamed

__all__ = [
    "Entry", "Recorded", "Source", "Steps", "Value", "batched_steps", "flat_steps", "inputs_of", "mapped", "outputs_of",
    "require_dump_names",
]  # fmt: skip

# The modules that vLLM and SGLang fuse along the last axis, and the module that computes their logits. These names are
# used only if the model has no module of the fused name itself; Phi-3 of transformers has one.
FUSED: dict[str, str | tuple[str, ...]] = {
    "*.qkv_proj": ("*.q_proj", "*.k_proj", "*.v_proj"),
    "*.gate_up_proj": ("*.gate_proj", "*.up_proj"),
    "logits_processor": "lm_head",
}
ENGINES = ("vllm", "sglang")


class Entry(NamedTuple):
    """A tensor of a dump. read: a function that returns the tensor; None if the dump has only its `statistics`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor] | None
    statistics: dict[str, float] | None = None


def leaves_of(tree: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in tuples, lists and mappings, each with its path."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves_of(value, f"{path}.{key}")
    elif isinstance(tree, tuple | list):
        for i, value in enumerate(tree):
            yield from leaves_of(value, f"{path}.{i}")


def inputs_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among the arguments of a call, each with its path: "in0", "in.mask"."""
    for i, value in enumerate(args):
        yield from leaves_of(value, f"in{i}")
    yield from leaves_of(kwargs, "in")


def outputs_of(output: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a call returns, each with its path: "out0", or "out.logits" for an object with fields."""
    if isinstance(output, Tensor):
        yield "out0", output
    elif isinstance(output, Mapping):
        yield from leaves_of(output, "out")
    elif isinstance(output, tuple | list):
        for i, value in enumerate(output):
            yield from leaves_of(value, f"out{i}")
    elif is_dataclass(output) or type(output).__name__ == "SimpleNamespace":
        yield from ((f"out.{key}", x) for key, x in vars(output).items() if isinstance(x, Tensor))


# Tokens


class Step(NamedTuple):
    """The tokens of one call of a model.

    places: the place of each token in the batch, sequence * length + position.
    ends: the places of the last token of each sequence.
    shape: (batch, time) of the call; None for tokens in one row.
    """

    places: Tensor
    ends: Tensor
    shape: tuple[int, int] | None


class Steps(NamedTuple):
    """The tokens of a run. tokens, mask: (batch, time). positions: the engine's numbers of the tokens, or None."""

    tokens: Tensor
    mask: Tensor
    steps: list[Step]
    positions: Tensor | None


def batched_steps(ids: Sequence[Tensor], mask: Tensor | None = None, positions: Sequence[Tensor | None] = ()) -> Steps:
    """Return the tokens of calls with ids (batch, time) each, where each call continues the one before it."""
    tokens = torch.cat([*ids], 1)
    batch, length = tokens.shape
    steps, begin = [], 0
    for x in ids:
        time = x.shape[1]
        places = torch.arange(batch)[:, None] * length + torch.arange(begin, begin + time)
        steps.append(Step(places.reshape(-1), places[:, -1], (batch, time)))
        begin += time
    kept = torch.ones_like(tokens, dtype=torch.bool)
    if mask is not None and mask.dim() == 2 and len(mask) == batch:
        # The last mask of `generate` ends at the last call's tokens, or one token later.
        n = min(mask.shape[1], length)
        kept[:, :n] = mask[:, :n].bool()
    known = [x.expand(batch, -1) for x in positions if x is not None and x.dim() == 2]
    whole = torch.cat(known, 1) if known else None
    return Steps(tokens, kept, steps, whole if whole is not None and whole.shape == tokens.shape else None)


def flat_steps(ids: Sequence[Tensor], positions: Sequence[Tensor | None]) -> Steps | None:
    """Return the tokens of calls with all sequences in one row, as in vLLM and SGLang; positions separate sequences.

    Position 0 begins a sequence. Any other position that does not continue the current sequence continues the first
    sequence of this length that the call has not used yet. Returns None if a position fits no sequence, as with a
    prefix cache that an earlier request filled.
    """
    sequences: list[list[int]] = []
    calls: list[list[tuple[int, int]]] = []
    for x, where in zip(ids, positions, strict=True):
        seen = sum(map(len, sequences))
        rows: list[tuple[int, int]] = []
        used: set[int] = set()
        current = -1
        for token, position in zip(x.tolist(), range(seen, seen + len(x)) if where is None else where.tolist()):
            if position == 0:
                sequences.append([])
                current = len(sequences) - 1
            elif current < 0 or len(sequences[current]) != position:
                fitting = [i for i, s in enumerate(sequences) if len(s) == position and i not in used]
                if not fitting:
                    return None
                current = fitting[0]
            used.add(current)
            sequences[current].append(token)
            rows.append((current, position))
        calls.append(rows)
    length = max(map(len, sequences), default=0)
    if not length:
        return None
    tokens = torch.tensor([s + [0] * (length - len(s)) for s in sequences])
    mask = torch.tensor([[True] * len(s) + [False] * (length - len(s)) for s in sequences])
    steps = []
    for rows in calls:
        places = torch.tensor([s * length + t for s, t in rows])
        last = [i for i, (s, _) in enumerate(rows) if i + 1 == len(rows) or rows[i + 1][0] != s]
        steps.append(Step(places, places[last], None))
    return Steps(tokens, mask, steps, torch.arange(length).expand(len(sequences), -1))


# Rows


@dataclass
class Value:
    """A recorded tensor, with a row for each token.

    rows: (batch * time, ...). present: which rows were recorded.
    raw: the tensor in its recorded shape, if there was only one call; else None.
    is_short: whether it has fewer tokens than its call had ids. Its tokens are taken to be the last of the call.
    """

    name: str
    rows: Tensor | None
    present: Tensor | None
    raw: Tensor | None
    is_short: bool = False

    def like(self, x: Tensor, tokens: tuple[int, ...]) -> tuple[Tensor, Tensor | None] | None:
        """Return the recorded numbers in the shape of a model's tensor, and the recorded rows; None if they do not fit.

        The rows are None for a tensor without rows of tokens, which is compared as a whole.
        """
        if self.rows is not None and is_of_rows(x, tokens):
            rest = x.shape[2:] if x.shape[:2] == tokens else x.shape[1:]
            if self.rows[0].numel() == rest.numel():  # heads may have an axis of their own, or not
                return self.rows.reshape(x.shape), self.present
        if self.raw is not None and self.raw.shape == x.shape:
            return self.raw, None
        return None

    @property
    def words(self) -> str:
        """The shape in words, for a report."""
        if self.rows is not None:
            return f"{tuple(self.rows.shape[1:])} for each token"
        return "other shapes in each step" if self.raw is None else f"{tuple(self.raw.shape)}"


def is_of_rows(x: Tensor, tokens: tuple[int, ...]) -> bool:
    """Return True if a model's tensor has a row for each token."""
    return x.shape[:2] == tokens or x.shape[:1] == (tokens[0] * tokens[1],)


def placed(name: str, calls: Sequence[tuple[Step, Tensor]], steps: Steps) -> Value:
    """Join the tensors of one path of a module, one for each step, and put each row at the place of its token."""
    raw = calls[0][1] if len(calls) == 1 else None
    # torch cannot assign to rows of a tensor of float8_e8m0fnu.
    wide = ((step, x.float() if x.dtype is torch.float8_e8m0fnu else x) for step, x in calls)
    parts = [part for step, x in wide if (part := _rows(step, x, steps)) is not None]
    if len(parts) < len(calls) or any(x.shape[1:] != parts[0][1].shape[1:] for _, x in parts):
        return Value(name, None, None, raw)
    n = steps.tokens.numel()
    rows, present = parts[0][1].new_zeros((n, *parts[0][1].shape[1:])), torch.zeros(n, dtype=torch.bool)
    for places, x in parts:
        rows[places] = x
        present[places] = True
    is_short = any(len(where) < len(step.places) for (step, _), (where, _) in zip(calls, parts, strict=True))
    return Value(name, rows, present, raw, is_short)


def _rows(step: Step, x: Tensor, steps: Steps) -> tuple[Tensor, Tensor] | None:
    """Return the places and the rows of a tensor of one call; None if the tensor has no axis of tokens."""
    n, shape = len(step.places), step.shape
    if shape is not None and x.dim() >= 2:
        if tuple(x.shape[:2]) == shape:
            return step.places, x.reshape(n, *x.shape[2:])
        if x.shape[0] == shape[0] and x.shape[1] < shape[1] and x.dim() == 3:  # only the last tokens
            return step.places.view(shape)[:, -x.shape[1] :].reshape(-1), x.reshape(-1, *x.shape[2:])
        if x.shape[0] == 1 and x.shape[1] == shape[1]:  # all sequences share it, as rotary angles
            return step.places, x.expand(*shape, *x.shape[2:]).reshape(n, *x.shape[2:])
    if x.shape[:1] == (n,):
        return step.places, x
    if x.dim() >= 2 and x.shape[:2] == (1, n) and shape is None:
        return step.places, x[0]
    valid = steps.mask.reshape(-1)
    if len(steps.steps) == 1 and x.shape[:1] == (int(valid.sum()),):  # flattened, without padding
        return valid.nonzero().squeeze(1), x
    return (step.ends, x) if x.shape[:1] == (len(step.ends),) and x.dim() == 2 else None


# Names


class Source(NamedTuple):
    """Source of a module's tensors: a module of the dump, and a part of the last axis of its results.

    before: the modules whose results come before this part on that axis.
    """

    module: str
    before: tuple[str, ...] = ()
    is_part: bool = False


def require_dump_names(names: Any) -> dict[str, str | tuple[str, ...]]:
    """Return the mapping of a dump's names. Raises TypeError for anything else.

    >>> require_dump_names({"*.qkv_proj": ["*.q_proj", "*.k_proj", "*.v_proj"]})
    {'*.qkv_proj': ('*.q_proj', '*.k_proj', '*.v_proj')}
    """
    found: dict[str, str | tuple[str, ...]] = {}
    for key, value in names.items() if isinstance(names, Mapping) else [] if names is None else [(names, None)]:
        parts = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not isinstance(key, str) or not parts or not all(isinstance(part, str) for part in parts):
            raise TypeError(
                f"names={shown(names)}. Expected for a dump: a mapping from its names, their beginnings or endings, to "
                f"the model's: {{'transformer.h': 'model.layers', '*.qkv_proj': ('*.q_proj', '*.k_proj', '*.v_proj')}}."
            )
        found[key] = value if isinstance(value, str) else parts
    return found


def mapped(
    modules: Iterable[str], known: Iterable[str], names: Mapping[str, str | tuple[str, ...]], engine: str | None
) -> tuple[dict[str, Source], list[str]]:
    """Return the source of each module that model and dump have, and the names of modules that only the dump has.

    modules: the dump's names. known: the model's names.
    """
    modules, there = [*modules], {*known}
    for key in names:
        if not any(m.endswith(key[1:]) if key.startswith("*.") else is_beginning(key, m) for m in modules):
            raise ValueError(
                f"names has {shown(key)}, and no module of the dump fits it. Expected: names, beginnings or endings "
                f"('*.qkv_proj') of {few([m for m in modules if m], 3)}."
            )
    is_known_engine = engine is not None and any(word in engine.lower() for word in ENGINES)
    found: dict[str, Source] = {}
    alone: list[str] = []
    for module in modules:
        targets = _targets(module, names)
        if not there.issuperset(targets) and is_known_engine and len(targets) == 1:
            targets = _targets(targets[0], FUSED)
        if not there.issuperset(targets):
            alone.append(module)
            continue
        for i, target in enumerate(targets):
            found[target] = Source(module, targets[:i], len(targets) > 1)
    return found, alone


def _targets(module: str, names: Mapping[str, str | tuple[str, ...]]) -> tuple[str, ...]:
    """Return the model's names for a module of the dump: by its whole name or an ending, else by the longest prefix."""
    beginnings = {key: value for key, value in names.items() if isinstance(value, str) and not key.startswith("*.")}
    for key, value in names.items():
        parts = (value,) if isinstance(value, str) else value
        if key == module:
            return parts
        if key.startswith("*.") and module.endswith(key[1:]):
            before = renamed(module[: -len(key[1:])], beginnings)
            return tuple(f"{before}{part[1:]}" if part.startswith("*.") else part for part in parts)
    return (renamed(module, beginnings),)


class Recorded:
    """The tensors of a dump by the model's names, with their rows at the places of the model's tokens.

    shapes: the shapes of the floating-point results of each of the model's modules.
    leaves: the model's modules without modules inside.
    unlike: the modules that cannot be compared, each with the reason. short: tensors with fewer tokens than their call.
    """

    def __init__(
        self, dump: Any, steps: Steps, sources: Mapping[str, Source], shapes: Mapping[str, list[tuple[int, ...]]],
        leaves: set[str],
    ) -> None:  # fmt: skip
        self.dump, self.steps, self.sources = dump, steps, sources
        self.tokens = tuple(steps.tokens.shape)
        self.valid = steps.mask.reshape(-1)
        self.unlike: dict[str, str] = {}
        self.short: dict[str, None] = {}
        self._shapes, self._leaves = shapes, leaves

    def values(self, name: str, call: int) -> dict[str, Value]:
        """Return the recorded tensors of a call of a module, by path."""
        source = self.sources.get(name)
        if source is None:
            return {}
        calls: dict[str, dict[int, Entry]] = {}
        for key, entry in self.dump.of(source.module).items():
            if entry.read is not None:
                calls.setdefault(key.path, {})[key.call] = entry
        found: dict[str, Value] = {}
        n = len(self.steps.steps)
        for path, of in calls.items():
            count = max(of) + 1
            # A module may run several times in a step, as a shared one does, but it must run equally often in each.
            if count % n:
                self.unlike.setdefault(name, f"the dump has {count} calls of it in {n} steps")
                return {}
            wanted = [(step, of.get(i * (count // n) + call)) for i, step in enumerate(self.steps.steps)]
            there = [(step, entry.read()) for step, entry in wanted if entry is not None and entry.read is not None]
            if there:
                value = found[path] = placed(f"{source.module}.{path}".lstrip("."), there, self.steps)
                if value.is_short and value.rows is not None and value.rows.is_floating_point():
                    self.short[value.name] = None
        self._require_numbers(found)
        return self._as_model(name, source, found)

    def _require_numbers(self, found: dict[str, Value]) -> None:
        for value in found.values():
            if value.rows is None or value.present is None or not value.rows.is_floating_point():
                continue
            rows = value.rows[self.valid & value.present]
            if bool((rows if rows.element_size() > 1 else rows.float()).isnan().any()):
                raise ValueError(
                    f"{value.name} of {self.dump.path.name} has NaN at tokens that are no padding. Expected: numbers. "
                    f"The engine's run is broken there, or before: look at the first module whose result has NaN."
                )

    def _as_model(self, name: str, source: Source, found: dict[str, Value]) -> dict[str, Value]:
        """Return recorded values in the form of the model's module: the engine may add residuals, or fuse modules."""
        floats = {p: v.rows for p, v in found.items() if v.rows is not None and v.rows.is_floating_point()}
        ins, outs = ([p for p in floats if p.startswith(side)] for side in ("in", "out"))
        shapes = self._shapes.get(name) or [(0,)]
        own = sum(shape[:2] == self.tokens or shape[:1] == (len(self.valid),) for shape in shapes)
        if len(outs) == 2 and own == 1 and len({floats[p].shape for p in (*ins, *outs)}) == 1 and len(ins) <= 2:
            # Fused norms, and the layers around them, map (x, residual) to (y, x + residual) in vLLM and SGLang.
            first, second = (found[p] for p in outs)
            if name in self._leaves:
                return {"in0": second, "out0": first}
            return {"out0": _sum(first, second), **({"in0": _sum(*(found[p] for p in ins))} if ins else {})}
        if source.is_part:
            begin = sum((self._shapes.get(other) or [(0,)])[0][-1] for other in source.before)
            for path in outs:
                part = floats[path][..., begin : begin + shapes[0][-1]]
                found[path] = Value(found[path].name, part, found[path].present, None)
        return found


def _sum(*values: Value) -> Value:
    """Return the sum, rounded to the dump's dtype as the engine rounds it."""
    if len(values) == 1:
        return values[0]
    first, second = values
    assert first.rows is not None
    assert second.rows is not None
    wide = first.rows.float() + second.rows.float()
    return Value(f"{first.name} + {second.name}", wide.to(first.rows.dtype), first.present, None)
