"""summary(model): list the formats of each module of a quantised model, and print large models in few lines."""

from __future__ import annotations

import math
import string
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, overload

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from fpsim.border import require_module
from fpsim.emulation.scope import NO_SPECS
from fpsim.formats.blocks import BlockFormat
from fpsim.insight.rows import Rows, text_table
from fpsim.models.installed import emulated_forward
from fpsim.models.optimizers import QuantizedOptimizer
from fpsim.models.parameter_store import COMPENSATION, MASTER, SECOND, ParameterStore
from fpsim.models.storing import states_in
from fpsim.policies.policy import RoleSpecs, describe_cached
from fpsim.policies.products import Products
from fpsim.policies.recipes import is_layer
from fpsim.policies.update import Storage
from fpsim.torch_internals import is_compiled_wrapper

__all__ = ["Summary", "SummaryRow", "grouped", "summary"]

FLOAT32, REMAINDER = 32, 16  # bits
SHORT = 20  # up to this many rows print one by one
WIDTH = 100  # columns of the printed table
DEFAULT = " nearest_even"
SIZES = ("weight", "copies", "states", "scales")


class SummaryRow(NamedTuple):
    """Formats of one module."""

    module: str
    type: str
    weight: str
    activation: str
    error: str
    weight_grad: str
    products: str = ""
    wide: str = ""
    cache: str = ""


class Summary(list[SummaryRow]):
    """Rows with the formats of each module; prints as a table of 100 columns, with one line for equal modules."""

    def __init__(self, rows: Iterable[SummaryRow] = (), without_products: Iterable[str] = ()) -> None:
        super().__init__(rows)
        # Modules that multiply by no weight have the products of the module around them, which are not repeated.
        self._without = set(without_products)

    def to_frame(self) -> Any:
        """Return a pandas.DataFrame. Raises ImportError without pandas."""
        return Rows(row._asdict() for row in self).to_frame()

    def __str__(self) -> str:
        roles = SummaryRow._fields[2:6]
        lines = []
        for row in self:
            products = "" if row.module in self._without else row.products
            lines.append(Line(row.module, 1, row.type, row[2:6], products, row.wide, row.cache))
        return shown_in(grouped(lines) if len(lines) > SHORT else lines, roles)

    __repr__ = __str__


@overload
def summary(model: nn.Module) -> Summary: ...


@overload
def summary(model: QuantizedOptimizer) -> Rows: ...


def summary(model: nn.Module | QuantizedOptimizer) -> Summary | Rows:
    """Return the formats of each module of a quantised model, by role; the result prints as a table.

    Modules without operations of their own pass their formats on to the modules inside. Modules that were added later
    run under the formats of the module around them. Parametrizations, which compute weights, run in float32. Three more
    columns appear if they have entries: the quantised operands of products, for modules that multiply by a weight; the
    operations that ran in float32 on purpose in the last call of the model, such as `x.float().pow(2)`; and the
    rounding of stored keys and values.

    A table of more than 20 rows has one line for modules whose names differ only in their numbers, `blocks.0-11.fc`.
    Words that would make the table wider than 100 columns are printed below it. The result itself has a row for each
    module.

    For a quantised optimizer, the rows have the bytes of each parameter in its formats, for the weight, its copies, its
    states and their scales, and the bytes in float32.

    Args:
        model: a model that `quantize` returned, or the object that `quantize_optimizer` returned.

    Raises:
        ValueError: for a model that is not quantised.

    >>> from fpsim import quantize
    >>> print(summary(quantize(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "bf16")))
    module   type        weight             activation         error              weight_grad
    -------  ----------  -----------------  -----------------  -----------------  -----------------
    (model)  Sequential  bf16 nearest_even  bf16 nearest_even  bf16 nearest_even  bf16 nearest_even
    0        Linear      bf16 nearest_even  bf16 nearest_even  bf16 nearest_even  bf16 nearest_even
    1        ReLU        bf16 nearest_even  bf16 nearest_even  bf16 nearest_even  bf16 nearest_even
    >>> import torch
    >>> from fpsim import quantize_optimizer
    >>> layer = nn.Linear(64, 64, bias=False)
    >>> optimizer = torch.optim.AdamW(layer.parameters())
    >>> quantized = quantize_optimizer(optimizer, "adam8bit", layer)
    >>> layer(torch.ones(1, 64)).sum().backward()
    >>> optimizer.step()
    >>> print(summary(quantized))
    parameter  elements  weight  copies  states  scales  bytes  float32
    ---------  --------  ------  ------  ------  ------  -----  -------
    weight     4096      16384   0       8192    128     24704  49152
    (all)      4096      16384   0       8192    128     24704  49152
    """
    if isinstance(model, QuantizedOptimizer):
        return _stored_bytes(model)
    require_module(model)
    rows, without = [], []
    for name, module, specs, products in _under(model, "", None, None, set()):
        words = [str(spec) if spec else "float32" for spec in specs]
        forward = emulated_forward(module)
        wide = "" if forward is None else ", ".join(forward.wide)
        operands = "" if products is None else str(products)
        stored = describe_cached((forward and forward.stored) or {})
        if products is not None and not (products.attention or is_layer(module)):
            without.append(name or "(model)")
        row = SummaryRow(name or "(model)", type(module).__name__, *words, products=operands, wide=wide)  # type: ignore[misc]
        rows.append(row._replace(cache=stored))
    if not rows:
        raise ValueError(f"{type(model).__name__} is not quantised. Call fpsim.quantize(model, fmt) first.")
    return Summary(rows, without)


def _under(
    module: nn.Module, name: str, around: RoleSpecs | None, products: Products | None, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module, RoleSpecs, Products | None]]:
    """Yield the name, the module, the formats and the products of each module that runs emulated.

    name: the module's name in sites, even if another library has moved the module.
    around: the formats of the module around; None if the module around is not quantised.
    products: the products of the module around.
    """
    # A module that is registered under two names runs under one policy, and has only one row.
    if module in seen:
        return
    seen.add(module)
    forward = emulated_forward(module)
    if forward is not None:
        name, around, products = forward.name, forward.specs, forward.products
    elif isinstance(module, ParametrizationList):
        around, products = around and NO_SPECS, None
    # The wrapper of torch.compile is not a module of the user; the wrapped module has a row.
    if around is not None and not is_compiled_wrapper(module):
        yield name, module, around, products
    for child_name, child in module.named_children():
        yield from _under(child, f"{name}.{child_name}" if name else child_name, around, products, seen)


def _stored_bytes(quantized: QuantizedOptimizer) -> Rows:
    """Return rows of bytes in the formats and in float32: one for each parameter, and one for all.

    Before its first step an optimizer has no states.
    """
    rows = Rows({"parameter": store.name, **_sizes(store, states)} for store, states in quantized.stored())
    names = ("elements", *SIZES, "bytes", "float32")
    rows.append({"parameter": "(all)", **{name: sum(row[name] for row in rows) for name in names}})
    return rows


def _sizes(store: ParameterStore, states: dict[str, Any]) -> dict[str, int]:
    """Count the bytes of one parameter's tensors; the bits of each tensor are rounded up to bytes."""
    x = store.parameter
    parts: list[tuple[str, tuple[int, int]]] = [("weight", _bits(x, store.weight))]
    parts += [("copies", bits) for bits in _copies(store)]
    wide = 0
    for state in states_in(states):
        # Scalars, such as the number of the step, are not stored in a format.
        if state.x.is_floating_point() and state.x.dim():
            storage = store.weight if store.update.is_in_format else store.state_storage(state)
            parts.append(("states", _bits(state.x, storage)))
            wide += state.x.numel()
    sizes = {name: sum(math.ceil(own / 8) for kind, (own, _) in parts if kind == name) for name in SIZES[:3]}
    sizes["scales"] = sum(math.ceil(shared / 8) for _, (_, shared) in parts)
    total = sum(sizes.values())
    return {"elements": x.numel(), **sizes, "bytes": total, "float32": FLOAT32 // 8 * (x.numel() + wide)}


def _copies(store: ParameterStore) -> Iterator[tuple[int, int]]:
    """Yield the bits of the numbers and of the scales of each copy of a weight."""
    for name, x in store.kept.items():
        # If the weight is the upper half of the master copy, only the lower 16 bits are stored.
        if name == MASTER and store.update.compensation == "remainder16":
            yield REMAINDER * x.numel(), 0
        elif name == MASTER:
            yield _bits(x, store.update.master_storage)
        elif name in (SECOND, COMPENSATION):
            yield _bits(x, store.weight)


def _bits(x: Tensor, storage: Storage | None) -> tuple[int, int]:
    """Count the bits of a tensor's numbers, and of their scales."""
    if storage is None:
        return FLOAT32 * x.numel(), 0
    fmt = storage.spec.fmt
    if not isinstance(fmt, BlockFormat):
        return int(fmt.bits) * x.numel(), 0
    # The second scale is float32. There is one for the whole tensor, or one for each n elements.
    n = fmt.tensor_scale
    seconds = int(n) if isinstance(n, bool) else _blocks(x, replace(fmt, block=n, tensor_scale=False))
    return int(fmt.element.bits) * x.numel(), _blocks(x, fmt) * fmt.scale.bits + FLOAT32 * seconds


def _blocks(x: Tensor, fmt: BlockFormat) -> int:
    """Count the scales of a tensor."""
    # A block of n elements is contiguous in memory, whatever the shape of the tensor.
    if isinstance(fmt.block, int):
        return math.ceil(x.numel() / fmt.block)
    if fmt.block == "tensor" or x.dim() < 2:
        return min(x.numel(), 1)
    if fmt.block == "row":
        return x.numel() // x.shape[-1] if x.numel() else 0
    rows, columns = fmt.tile
    matrices = math.prod(x.shape[:-2])
    return matrices * math.ceil(x.shape[-2] / rows) * math.ceil(x.shape[-1] / columns)


class Line(NamedTuple):
    """A line of a summary: the modules, their number, and their formats, as in `SummaryRow`."""

    module: str
    modules: int
    type: str
    roles: tuple[str, ...]
    products: str
    wide: str
    cache: str = ""


def grouped(lines: Iterable[Line]) -> list[Line]:
    """Put modules that differ only in the numbers of their names on one line: "layers.0-31.mlp".

    >>> [line.module for line in grouped(Line(f"blocks.{i}.fc", 1, "Linear", (), "", "") for i in range(12))]
    ['blocks.0-11.fc']
    """
    numbers: dict[Line, list[tuple[int, ...]]] = {}
    for line in lines:
        parts = line.module.split(".")
        pattern = ".".join("*" if part.isdecimal() else part for part in parts)
        places = tuple(int(part) for part in parts if part.isdecimal())
        numbers.setdefault(line._replace(module=pattern), []).append(places)
    result = []
    for line, found in numbers.items():
        for sets in _boxes(found):
            names = iter(sets)
            parts = [_runs(next(names)) if part == "*" else part for part in line.module.split(".")]
            result.append(line._replace(module=".".join(parts), modules=math.prod(map(len, sets))))
    return result


def _boxes(places: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Split tuples into Cartesian products of sets."""
    # A line with two ranges stands for all pairs of numbers. So first numbers share a line only if they occur with the
    # same remaining numbers.
    if not places[0]:
        return [()]
    behind: dict[int, list[tuple[int, ...]]] = {}
    for first, *rest in places:
        behind.setdefault(first, []).append(tuple(rest))
    firsts: dict[tuple[tuple[tuple[int, ...], ...], ...], list[int]] = {}
    for first, rests in behind.items():
        firsts.setdefault(tuple(_boxes(rests)), []).append(first)
    return [(tuple(values), *box) for boxes, values in firsts.items() for box in boxes]


def _runs(values: Sequence[int]) -> str:
    """Write numbers as ranges: "0-3,7"."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def shown_in(lines: Sequence[Line], roles: Sequence[str]) -> str:
    """Return the table, in at most WIDTH columns if possible: long words are moved below it."""
    notes: list[str] = []
    # Each step shortens the table further, and is applied only if the table is still too wide.
    text = _table(lines, roles)
    if _width(text) > WIDTH:
        lines, below = _lettered(lines, "products", string.ascii_uppercase)
        notes += below
        text = _table(lines, roles)
    if _width(text) > WIDTH:
        lines = [line._replace(roles=tuple(word.removesuffix(DEFAULT) for word in line.roles)) for line in lines]
        notes.append(f"Rounding is{DEFAULT} where none is named.")
        text = _table(lines, roles)
    if _width(text) > WIDTH:
        lines, below = _lettered(lines, "wide", string.ascii_lowercase)
        notes += below
        text = _table(lines, roles)
    if _width(text) > WIDTH:
        sets = {line.roles: ", ".join(f"{r}={w}" for r, w in zip(roles, line.roles)) for line in lines}
        together = [
            line._replace(roles=(sets[line.roles] if len({*line.roles}) > 1 else line.roles[0],)) for line in lines
        ]
        numbers = {words: str(n) for n, words in enumerate(dict.fromkeys(line.roles[0] for line in together), 1)}
        lines = [line._replace(roles=(numbers[line.roles[0]],)) for line in together]
        notes = [_note(letter, words) for words, letter in numbers.items()] + notes
        roles = ("formats",)
        text = _table(lines, roles)
    if (excess := _width(text) - WIDTH) > 0:
        longest = max(len(line.module) for line in lines) - excess
        lines = [line._replace(module=_cut(line.module, max(longest, 20))) for line in lines]
        text = _table(lines, roles)
    return "\n\n".join([text, "\n".join(notes)]) if notes else text


def _width(text: str) -> int:
    return max(map(len, text.splitlines()))


def _table(lines: Sequence[Line], roles: Sequence[str]) -> str:
    heads = ["module", "count", "type", *roles, "products", "float32 on purpose", "cache"]
    rows = [
        [line.module, str(line.modules), line.type, *line.roles, line.products, line.wide, line.cache] for line in lines
    ]
    used = {
        "count": any(line.modules > 1 for line in lines),
        "products": any(line.products for line in lines),
        "float32 on purpose": any(line.wide for line in lines),
        "cache": any(line.cache for line in lines),
    }
    keep = [i for i, head in enumerate(heads) if used.get(head, True)]
    return text_table([heads[i] for i in keep], [[row[i] for i in keep] for row in rows])


def _lettered(lines: Sequence[Line], field: str, letters: str) -> tuple[list[Line], list[str]]:
    """Replace the words of a column by letters; return the lines, and the words, each after its letter."""
    words = [word for word in dict.fromkeys(getattr(line, field) for line in lines) if word]
    named = {word: letters[i] if i < len(letters) else f"{letters[i % 26]}{i // 26}" for i, word in enumerate(words)}
    kept = [Line(**line._asdict() | {field: named.get(getattr(line, field), "")}) for line in lines]
    return kept, [_note(letter, word) for word, letter in named.items()]


def _note(letter: str, words: str) -> str:
    # Long words are names of operations and formats. A text search would not find a name that is broken across lines.
    return textwrap.fill(f"{letter}: {words}", WIDTH, subsequent_indent=" " * (len(letter) + 2), break_long_words=False)


def _cut(name: str, length: int) -> str:
    # The middle is left out: the beginning tells the part of the model, and the end tells the layer.
    if len(name) <= length:
        return name
    head = (length - 3) // 2
    return f"{name[:head]}...{name[len(name) - (length - 3 - head) :]}"
