"""Run a model on a dump: replace the arguments and the results of each module by those of the engine's module.

A module's own code is its computation without the modules that it calls. Such a run compares the own code on the
engine's numbers: by the arguments that it passes to inner modules, and by the result that it computes from the recorded
results of inner modules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fpsim.insight.engines.kinds import FORMAT, FORMULA, ROUNDING, STATE
from fpsim.insight.engines.places import Kept, relative_of
from fpsim.insight.engines.recorded import Recorded, Value, inputs_of, is_of_rows, outputs_of
from fpsim.insight.engines.remedies import changed_policies
from fpsim.insight.engines.sides import Door
from fpsim.models.installed import emulated_forwards
from fpsim.models.quantize import dequantize, quantize
from fpsim.policies.policy import Policy
from fpsim.policies.products import Products
from fpsim.torch_internals import map_leaves
from fpsim.torch_modes import without_torch_function

__all__ = ["Change", "Injected", "Judged", "Seen", "Target", "apart", "changes"]

EVERYTHING = torch.ones(0, dtype=torch.bool)  # the mask for tensors whose rows are selected already


class Seen(Kept):
    """A visitor that keeps each module's results, and the shapes of its floating-point ones."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[str, list[tuple[int, ...]]] = {}

    def seen(self, door: Door, call: int, out: Any) -> None:
        super().seen(door, call, out)
        floats = [tuple(x.shape) for _, x in outputs_of(out) if x.is_floating_point()]
        self.shapes.setdefault(door.name, floats)


@dataclass
class Target:
    """A tensor by which a module's own code is compared: its result, or an argument of a module inside.

    module: the module whose own code computes it. at: the module whose result or argument it is.
    call, path: the number of the call of `at`, and the tensor's path among its arguments or results.
    own, known: the model's tensor, and the recorded tensor in the same shape. rows: the rows that were recorded.
    floor: the relative difference that another order of sums makes in `own`.
    """

    module: str
    at: str
    call: int
    path: str
    local: float
    own: Tensor
    known: Tensor
    rows: Tensor | None
    dtype: torch.dtype
    floor: float = 0.0

    @property
    def words(self) -> str:
        if self.path.startswith("out"):
            return "its result" if self.at == self.module else f"the result of {self.at}"
        return f"what it gives to {self.at}"


class _Visitor:
    """Counts the calls of each module, and exchanges tensors among its arguments and results."""

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}
        self._stack: list[str] = [""]

    def __call__(self, door: Door, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = door.name
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        with without_torch_function():
            self.begin(name, call)
            args, kwargs = self._exchanged((args, kwargs), [*inputs_of(args, kwargs)], self._stack[-1], name, call)
        self._stack.append(name)
        try:
            out = door.run(*args, **kwargs)
        finally:
            self._stack.pop()
        with without_torch_function():
            return self._exchanged(out, [*outputs_of(out)], name, name, call)

    def begin(self, name: str, call: int) -> None:
        """Prepare for a call of a module."""

    def _exchanged(self, tree: Any, leaves: list[tuple[str, Tensor]], owner: str, at: str, call: int) -> Any:
        """Return a tree with exchanged tensors. A tensor equal to its replacement stays: copies have no format mark."""
        found = self.exchange(leaves, owner, at, call)
        new = {id(x): y for x, y in found if not torch.equal(x, y)}
        return map_leaves(lambda x: new.get(id(x), x), tree) if new else tree

    def exchange(
        self, leaves: list[tuple[str, Tensor]], owner: str, at: str, call: int
    ) -> Iterable[tuple[Tensor, Tensor]]:
        raise NotImplementedError


class Judged(_Visitor):
    """Replaces each module's arguments and results by the dump's, and keeps the tensors in which its own code differs.

    known: the targets of an earlier run. If they are given, this run adds in another order, and measures their floors.
    targets: by `at`, `call` and `path`. judged: the modules whose own code was compared.
    """

    def __init__(self, recorded: Recorded, known: dict[tuple[str, int, str], Target] | None = None) -> None:
        super().__init__()
        self.recorded, self._known = recorded, known
        self.targets: dict[tuple[str, int, str], Target] = {}
        self.judged: dict[str, None] = {}
        self._values: dict[tuple[str, int], dict[str, Value]] = {}

    def begin(self, name: str, call: int) -> None:
        self._values[name, call] = self.recorded.values(name, call)

    def exchange(
        self, leaves: list[tuple[str, Tensor]], owner: str, at: str, call: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        is_result = any(path.startswith("out") for path, _ in leaves)
        values = self._values.pop((at, call), {}) if is_result else self._values.get((at, call), {})
        if at == "" and not is_result:
            return  # no code of the model computes the model's own arguments
        for path, x, value in matched(leaves, values, self.recorded.tokens):
            there = value.like(x, self.recorded.tokens)
            if there is None:
                if x.is_floating_point():
                    words = f"{value.name} is {value.words} in the dump, and {tuple(x.shape)} in the model"
                    self.recorded.unlike.setdefault(at, words)
                continue
            known, rows = there
            wide = known.to(x.device, x.dtype)
            if rows is not None and not bool(rows.all()):
                lead = _lead(x, rows, self.recorded.tokens)
                wide, known = torch.where(lead, wide, x), torch.where(lead, known.to(x.device), x.to(known.dtype))
            self._compare(Target(owner, at, call, path, 0.0, x, known, rows, known.dtype))
            yield x, wide.clone()

    def _compare(self, target: Target) -> None:
        key = (target.at, target.call, target.path)
        own, known, valid = target.own, target.known, self.recorded.valid
        if self._known is not None:
            if key in self._known and own.is_floating_point():
                earlier = self._known[key]
                earlier.floor = max(earlier.floor, apart(earlier.own, own, target.rows, valid))
            return
        if own.is_floating_point():
            self.judged[target.module] = None
            target.local = apart(own, known, target.rows, valid)
        if target.local or not torch.equal(own, known.to(own.dtype)):
            target.own, target.known = own.detach().clone(), known.clone()
            target.dtype = max((known, own), key=_epsilon).dtype
            self.targets[key] = target


def _epsilon(x: Tensor) -> float:
    return float(torch.finfo(x.dtype).eps) if x.is_floating_point() else 0.0


def _lead(x: Tensor, rows: Tensor, tokens: tuple[int, ...]) -> Tensor:
    """Return a mask of rows in a shape that broadcasts over a model's tensor."""
    lead = rows.reshape(x.shape[:2] if x.shape[:2] == tokens else x.shape[:1]).to(x.device)
    return lead.reshape(*lead.shape, *[1] * (x.dim() - lead.dim()))


def apart(a: Tensor, b: Tensor, rows: Tensor | None, valid: Tensor) -> float:
    """Return |b - a| / |a| over the recorded rows that are not padding; over the whole tensor if `rows` is None."""
    if rows is None:
        return relative_of([a], [b], EVERYTHING)
    kept = rows & valid
    x, y = (t.reshape(len(kept), -1)[kept.to(t.device)].double().cpu() for t in (a, b))
    return relative_of([x], [y], EVERYTHING) if len(x) else 0.0


def matched(
    leaves: list[tuple[str, Tensor]], values: Mapping[str, Value], tokens: tuple[int, ...]
) -> Iterator[tuple[str, Tensor, Value]]:
    """Yield a call's tensors, each with the recorded tensor at its path, or with the only one left on both sides."""
    side = "out" if any(path.startswith("out") for path, _ in leaves) else "in"
    there = {path: value for path, value in values.items() if path.startswith(side)}
    left: list[tuple[str, Tensor]] = []
    for path, x in leaves:
        value = there.get(path)
        is_alike = value is not None and all(
            y is None or y.is_floating_point() == x.is_floating_point() for y in (value.rows, value.raw)
        )
        if value is not None and is_alike and (value.like(x, tokens) is not None or not is_of_rows(x, tokens)):
            del there[path]
            yield path, x, value
        elif x.is_floating_point() and is_of_rows(x, tokens):
            left.append((path, x))
    fits = {path: value for path, value in there.items() if value.rows is not None and value.rows.is_floating_point()}
    if len(left) == 1 and len(fits) == 1:  # one side may pass it by position, and the other by name
        yield left[0][0], left[0][1], next(iter(fits.values()))
    else:
        yield from ((path, x, fits[path]) for path, x in left if path in fits)


class Injected(_Visitor):
    """Adds the dump's differences to a model's tensors in some modules; replaces choices of experts by the dump's."""

    def __init__(self, targets: Iterable[Target], tokens: tuple[int, ...]) -> None:
        super().__init__()
        self._targets = {(t.at, t.call, t.path): t for t in targets}
        self._tokens = tokens

    def exchange(
        self, leaves: list[tuple[str, Tensor]], owner: str, at: str, call: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for path, x in leaves:
            target = self._targets.get((at, call, path))
            if target is None or x.shape != target.own.shape:
                continue
            if not x.is_floating_point():
                yield x, target.known.to(x.device, x.dtype).clone()
                continue
            # The dump's difference is added, and its number does not replace the model's: changes in earlier modules
            # have changed the model's numbers here, and this effect has to stay. Equal infinities, as in a mask, add 0.
            delta = torch.nan_to_num(target.known.double() - target.own.double(), 0.0, 0.0, 0.0)
            yield x, (x.double() + delta.to(x.device)).to(x.dtype)


# Changes of a model that may explain the recorded numbers

EPSILONS = (1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
NAMES_OF_EPSILONS = ("eps", "variance_epsilon", "epsilon", "layer_norm_eps", "layer_norm_epsilon")


class Change(NamedTuple):
    """A change of a model: its kind, its description in words, and a function that makes it.

    make: returns a context manager for the changed model, given names of modules. The model is a copy that is changed
        everywhere, or the model itself with other policies in the named modules; in all modules if none is named.
    """

    kind: str
    words: str
    make: Callable[[list[str]], AbstractContextManager[nn.Module]]


def _products(x: str | None, w: str | None) -> dict[str, Any]:
    return {"products": Products(fprop=(x, w))}


# From simple to complex: if two changes explain a place equally well, the first one is reported.
POLICIES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (ROUNDING, "results of products in bfloat16", {"products": Products(output="bf16")}),
    (ROUNDING, "bfloat16", {"weight": "bf16", "activation": "bf16"}),
    (ROUNDING, "float16", {"weight": "fp16", "activation": "fp16"}),
    (STATE, "keys and values in E4M3", {"cache": "e4m3fn"}),
    (STATE, "keys and values in E4M3, a scale for each token and head", {"cache": "e4m3fn per row fp32"}),
    (STATE, "keys and values in E5M2", {"cache": "e5m2"}),
    (STATE, "keys and values in INT8, a scale for each token and head", {"cache": "int8 per row fp32"}),
    (STATE, "keys and values in bfloat16", {"cache": "bf16"}),
    (FORMAT, "weights in E4M3, a scale for each tensor", _products(None, "e4m3fn per tensor fp32")),
    (FORMAT, "weights in E4M3, a scale for each channel", _products(None, "e4m3fn per row fp32")),
    (FORMAT, "weights in E4M3 without a scale", _products(None, "e4m3fn")),
    (FORMAT, "weights in INT8, a scale for each channel", _products(None, "int8 per row fp32")),
    (FORMAT, "weights in INT4, a scale for each 32", _products(None, "int4 per 32 fp32")),
    (FORMAT, "weights in NVFP4", _products(None, "nvfp4")),
    (FORMAT, "weights in MXFP4", _products(None, "mxfp4")),
    (FORMAT, "E4M3 without scales", _products("e4m3fn", "e4m3fn")),
    (FORMAT, "E4M3, a scale for each tensor", _products("e4m3fn per tensor fp32", "e4m3fn per tensor fp32")),
    (FORMAT, "E4M3, a scale for each token and channel", _products("e4m3fn per row fp32", "e4m3fn per row fp32")),
    (FORMAT, "E4M3 in tiles of 1 x 128 and 128 x 128", _products("e4m3fn per 1x128 fp32", "e4m3fn per 128x128 fp32")),
    (FORMAT, "INT8, a scale for each token and channel", _products("int8 per row fp32", "int8 per row fp32")),
    (FORMAT, "MXFP8", _products("mxfp8_e4m3", "mxfp8_e4m3")),
    (FORMAT, "NVFP4", _products("nvfp4", "nvfp4")),
    (FORMAT, "MXFP4", _products("mxfp4", "mxfp4")),
)


def changes(model: nn.Module, places: Iterable[str]) -> Iterator[Change]:
    """Yield changes of code, of dtype and of formats, from simple to complex."""
    is_emulated = any(True for _ in emulated_forwards(model))
    yield from _of_attention(model)
    if is_emulated:
        yield Change(ROUNDING, "float32", lambda _: nullcontext(dequantize(copy.deepcopy(model))))
    else:
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if dtype not in dtypes:
                word = str(dtype).removeprefix("torch.")
                yield Change(ROUNDING, word, partial(_in_dtype, model, dtype))
    known = dict(model.named_modules())
    norms = [(n, w) for n in places for w in NAMES_OF_EPSILONS if isinstance(vars(known[n]).get(w), float)]
    for eps in EPSILONS if norms else ():
        yield Change(FORMULA, f"an epsilon of {eps:g}", partial(_with_epsilon, model, norms, eps))
    for kind, words, fields in POLICIES:
        yield Change(kind, words, partial(_with_policy, model, fields, is_emulated))


def _of_attention(model: nn.Module) -> Iterator[Change]:
    """Yield a change to the other attention implementation of transformers."""
    own = getattr(getattr(model, "config", None), "_attn_implementation", None)
    for other in ("eager", "sdpa"):
        if own is None or other == own or not hasattr(model, "set_attn_implementation"):
            continue

        def changed(_: list[str], other: str = other) -> AbstractContextManager[nn.Module]:
            new = copy.deepcopy(model)
            new.set_attn_implementation(other)  # type: ignore[operator]
            return nullcontext(new)

        yield Change(ROUNDING, f"transformers' {other!r} attention", changed)


def _in_dtype(model: nn.Module, dtype: torch.dtype, _: list[str]) -> AbstractContextManager[nn.Module]:
    return nullcontext(copy.deepcopy(model).to(dtype))


def _with_epsilon(
    model: nn.Module, norms: list[tuple[str, str]], eps: float, _: list[str]
) -> AbstractContextManager[nn.Module]:
    changed = copy.deepcopy(model)
    inside = dict(changed.named_modules())
    for name, word in norms:
        setattr(inside[name], word, eps)
    return nullcontext(changed)


@contextmanager
def _with_policy(model: nn.Module, fields: dict[str, Any], is_emulated: bool, names: list[str]) -> Iterator[nn.Module]:
    if not is_emulated:
        yield quantize(model, Policy(**fields))
        return
    chosen = {*names}
    with changed_policies(model, lambda n, policy: replace(policy, **fields) if not chosen or n in chosen else policy):
        yield model
