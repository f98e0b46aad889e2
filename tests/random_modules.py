"""Random modules take training steps, plain and emulated, called in several ways: where do they differ?

    python tests/random_modules.py --count 200 --seed 0 [--ways compiled vmap] [--no-shrink]

prints each model that differs, with its seed, and the smallest model that still differs as it does.

A model is drawn from the tables of `module_blocks` and `module_functions`, and takes `STEPS` steps. What a step gives
is compared: the output, the gradients of the input and of every parameter, and in the end parameters and buffers.

- `fmt="fp32"` equals the plain model, bit for bit, in each way to call it.
- In any format a tensor has a gradient where it has one in the plain model, and no parameter is written to.
- In any format the other ways equal the eager one, bit for bit, where they do for the plain model.
- In any format the model whose parameters and buffers are all their block's own computes the same.
- In bf16 and fp16 the error against float64 is at most `FARTHER` times that of native code, in the sum over inputs
  drawn again or for half of them, and the output is on the grid where native code gives a tensor of the format.

Where the plain model raises, or the emulated one refuses in words that `REFUSED` lists, nothing is compared.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

if __package__:  # python -m tests.random_modules
    sys.path.insert(0, str(Path(__file__).parent))

import torch
from module_blocks import AROUND, LAYERS, Function, InSequence
from module_functions import DETOURS, FORMS, FUNCTIONS, RANDOM, WIDTH
from module_places import BUFFER_USES, PLACES, USES
from module_ways import SHAPE, WAYS, WRITTEN, Trace, equal, has, named, step
from torch import Tensor, nn

import fpsim

STEPS = 2
LENGTHS = (1, 4)  # blocks of a model
FORMATS: dict[str, Any] = {
    "bf16": "bf16",
    "fp16": "fp16",
    "e4m3fn": "e4m3fn",
    "mxfp8_e4m3": "mxfp8_e4m3",
    "recipe:mxfp8": "recipe:mxfp8",
    "recipe:fp8_current": "recipe:fp8_current",
    "weights in e4m3fn": fpsim.Policy(weight="e4m3fn"),
    "weights and gradients in bf16": fpsim.Policy(weight="bf16", weight_grad="bf16"),
    "e4m3fn, stochastically": fpsim.as_policy("e4m3fn", "stochastic"),
    "activations in e5m2": fpsim.Policy(activation="e5m2", error="bf16"),
}
NATIVE = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Rows that use a part of what they compute; and Functions whose backward computes what it returns: that is rounded
# where it arrives, and how it was rounded before is of no use.
LEAVING_OUT = {"inner_gradient", "with_grad", "first_of_itself_twice", "one_half", "same", "itself_and_same"}
LEAVING_OUT |= {"first_of_two", "square", "kept_output", "unsaved", "with_indices"}
LEAVING_OUT |= {"through_same", "through_same_of_a_view", "through_square"}
FARTHER = 1.25
FEW, MANY = 4, 60  # inputs of the comparison with native code: at first, and where it seems to be better
# Ways with other numbers than the eager one: a transform calls other kernels, and adds gradients in another order, of
# which each sum is rounded.
UNLIKE_EAGER = ("eager", "vmap", "func.grad")
# Under a transform, "fp32" copies a gradient that is expanded, as that of a sum is, and torch's kernels add what is
# contiguous in another order: up to 48 terms, so 48 * 2**-24 of the sum of their magnitudes, in each of a few layers.
LAST_BITS = {"vmap": 2**-16, "func.grad": 2**-16}
# What may be refused, by what the error says, and why.
REFUSED = {
    "torch.func": "products, second derivatives and scaling under transforms, as the error says",
    "forward-mode": "as the error says",
    "second derivative": "of products, as the error says",
    "UninitializedParameter": "compiled before the first call: where plain compile breaks the graph",
}

NOISE_IN_PLACE = ("modified by an inplace operation", "Cannot access data pointer")


@dataclass(frozen=True)
class Block:
    """A row of one of the tables, and the blocks inside of it.

    table: use, buffer, function, layer or around. place: where the tensor of a use lies.
    """

    table: str
    name: str
    place: str = ""
    inside: tuple[Block, ...] = ()

    def __str__(self) -> str:
        if self.inside:
            return f"{self.name}({', '.join(map(str, self.inside))})"
        return f"{self.name} of {self.place}" if self.place else self.name

    @property
    def names(self) -> set[str]:
        return {self.name, self.place}.union(*(block.names for block in self.inside))


Blocks = tuple[Block, ...]
PLAIN_FUNCTIONS = {**FUNCTIONS, **DETOURS, **FORMS, **RANDOM}
WEIGHTS = {"use": 30, "buffer": 12, "functions": 20, "detours": 8, "forms": 14, "random": 4, "layer": 8, "around": 24}
DEPTH = 2  # of blocks around blocks


class Draws:
    """Draws blocks that the plain model runs in each of these ways."""

    def __init__(self, ways: list[str], source: random.Random) -> None:
        self.ways, self.source = ways, source

    def model(self) -> Blocks:
        return tuple(self.block() for _ in range(self.source.randint(*LENGTHS)))

    def block(self, depth: int = 0) -> Block:
        tables = [table for table in WEIGHTS if table != "around" or depth < DEPTH]
        while True:
            (table,) = self.source.choices(tables, [WEIGHTS[table] for table in tables])
            block = self._row(table)
            if all(runs(block, way) for way in self.ways):
                break
        if table == "around":
            inside = tuple(self.block(depth + 1) for _ in range(self.source.randint(1, 2)))
            return replace(block, inside=inside)
        return block

    def _row(self, table: str) -> Block:
        choose = self.source.choice
        if table == "use":
            return Block("use", choose([*USES]), choose([*PLACES]))
        if table == "buffer":
            return Block("buffer", choose([*BUFFER_USES]), choose([n for n, p in PLACES.items() if p.takes_buffers]))
        if table == "layer":
            return Block("layer", choose([*LAYERS]))
        if table == "around":
            return Block("around", choose([*AROUND]), inside=(SIMPLE,))
        rows = {"functions": FUNCTIONS, "detours": DETOURS, "forms": FORMS, "random": RANDOM}[table]
        return Block("function", choose([*rows]))


SIMPLE = Block("use", "matmul", "Own")


@cache
def runs(block: Block, way: str) -> bool:
    """Whether torch runs this row so: few autograd Functions are taken by transforms, for instance."""
    if way == "compiled":
        return True  # it breaks the graph
    if way == "threads" and (block.name in RANDOM or block.name == "LateLinear"):
        return False  # they share the generator
    parts = [block] if block.table != "use" else [replace(block, place="Own"), replace(block, name="matmul")]
    return not any(isinstance(Examined((part,), "fp32").trace("", way), Exception) for part in parts)


def build(blocks: Blocks, is_flat: bool = False, seed: int = 0) -> nn.Module:
    """The model, with the same numbers each time for a seed. is_flat: each block holds its tensor itself."""
    numbers = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)

    def make(block: Block) -> nn.Module:
        if block.table == "function":
            return Function(PLAIN_FUNCTIONS[block.name])
        if block.table == "layer":
            torch.manual_seed(int(torch.randint(2**31, (), generator=numbers)))
            return LAYERS[block.name]()
        if block.table == "around":
            return AROUND[block.name]([make(inner) for inner in block.inside])
        matrix = torch.randn(WIDTH, WIDTH, generator=numbers) * 0.4
        place = PLACES[block.place]
        place = place.flat if is_flat else place
        if block.table == "buffer":
            return place(BUFFER_USES[block.name], matrix)
        return place(USES[block.name], nn.Parameter(matrix))

    return InSequence([make(block) for block in blocks])


def inputs(seed: int, count: int) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, generator=numbers) for _ in range(count)]


# Comparing


@dataclass(frozen=True)
class Difference:
    """check: which claim does not hold. names: of what differs."""

    check: str
    way: str
    format: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.check} ({self.way}, {self.format}): {'; '.join(self.names[:4])}{' ...' * (len(self.names) > 4)}"


def is_refused(words: str, format: str) -> bool:
    """Whether an error is one of those in `REFUSED`, or torch's where noise is written in place under a transform."""
    said = (*REFUSED, *(NOISE_IN_PLACE if "stochastically" in format else ()))
    return any(one in words for one in said)


class Examined:
    """A model, with the traces that were taken of it."""

    def __init__(self, blocks: Blocks, format: str, seed: int = 0) -> None:
        self.blocks, self.format = blocks, format
        self.xs = inputs(seed, STEPS)
        self._traces: dict[tuple[str, str, bool], Trace | Exception] = {}

    def trace(self, format: str, way: str = "eager", is_flat: bool = False) -> Trace | Exception:
        """What steps give, or what they raise. format: "" for the plain model."""
        key = format, way, is_flat
        if key not in self._traces:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    model = build(self.blocks, is_flat)
                    if format:
                        model = fpsim.quantize(model, FORMATS.get(format, format))
                    self._traces[key] = WAYS[way](model, self.xs)
                except Exception as error:  # whatever a model raises
                    self._traces[key] = error
        return self._traces[key]

    def differences(self, way: str) -> list[Difference]:
        found: list[Difference] = []
        for format in ("fp32", self.format):
            emulated = self.trace(format, way)
            if isinstance(emulated, Exception):
                plain = self.trace("", way)
                words = " ".join(str(emulated).split())
                if not isinstance(plain, Exception) and not is_refused(words, format):
                    found.append(Difference("raises", way, format, (f"{type(emulated).__name__}: {words[:200]}",)))
                continue
            if format == "fp32":
                found += self._unlike_plain(emulated, way)
            else:
                found += self._without_gradient(emulated, way, format)
                found += self._writes_to_parameters(emulated, way, format)
                found += self._unlike_eager(emulated, way, format)
        if way == "eager":
            found += self._unlike_flat(self.format)
        return found

    def _unlike_plain(self, emulated: Trace, way: str) -> list[Difference]:
        plain = self.trace("", way)
        if isinstance(plain, Exception):
            return []
        names = unequal(plain, emulated, LAST_BITS.get(way, 0.0))
        if not names or (way == "compiled" and self._differs_when_plain(way)):
            return []
        return [Difference("fp32 is not plain", way, "fp32", names)]

    def _differs_when_plain(self, way: str) -> bool:
        """Whether torch alone computes something else in this way than eagerly."""
        eager, plain = self.trace(""), self.trace("", way)
        return isinstance(eager, Exception) or isinstance(plain, Exception) or bool(unequal(eager, plain))

    def _without_gradient(self, emulated: Trace, way: str, format: str) -> list[Difference]:
        plain = self.trace("", way)
        if isinstance(plain, Exception):
            return []
        both = [n for n in plain if ": gradient of" in n and n in emulated]
        names = [n for n in both if (plain[n] is None) != (emulated[n] is None)]
        if way in ("compiled", "func.grad"):
            names = [n for n in both if has(plain[n]) and emulated[n] is None]
        return [Difference("a gradient is lost", way, format, tuple(names))] if names else []

    def _writes_to_parameters(self, emulated: Trace, way: str, format: str) -> list[Difference]:
        plain = self.trace("", way)
        names = tuple(name for name in emulated if WRITTEN in name and name not in plain)
        known = isinstance(plain, Exception) or not names
        return [] if known else [Difference("a parameter is written to", way, format, names)]

    def _unlike_eager(self, emulated: Trace, way: str, format: str) -> list[Difference]:
        eager = self.trace(format)
        # what a copy remembers is of outside, and draws noise once more
        names = set[str]().union(*(block.names for block in self.blocks))
        remembers = "Remembering" in names
        if remembers and "WithoutAutocast" in names:  # where what is of outside stays float32
            return []
        # and what nobody uses, such as the value whose slope is taken, draws none in a program, as in torch's own
        leaves_out = way == "compiled" and any(LEAVING_OUT & block.names for block in self.blocks)
        shares_noise = "stochastically" in format and (way == "threads" or remembers or leaves_out)
        if way in UNLIKE_EAGER or shares_noise or isinstance(eager, Exception):
            return []
        names = unequal(eager, emulated)
        if not names or self._differs_when_plain(way):
            return []
        return [Difference("unlike eager", way, format, names)]

    def _unlike_flat(self, format: str) -> list[Difference]:
        deep, flat = self.trace(format), self.trace(format, is_flat=True)
        if "recipe" in format or isinstance(deep, Exception) or isinstance(flat, Exception):
            return []  # a recipe knows modules by their names
        names = [a for (a, x), y in zip(deep.items(), flat.values(), strict=True) if not equal(x, y)]
        return [Difference("the place in the tree counts", "eager", format, tuple(names))] if names else []


def unequal(first: Trace, second: Trace, bound: float = 0.0) -> tuple[str, ...]:
    """The names of what both have and differs, and of what only the second one has, as a second thread.

    bound: how far it may differ, as a part of the largest number of all.
    """
    largest = max((x.abs().max().item() for x in first.values() if x is not None and x.numel()), default=0.0)

    def same(x: Tensor | None, y: Tensor | None) -> bool:
        if x is not None and y is not None and bound and x.dtype is y.dtype:
            return bool(torch.isclose(x, y, 0.0, bound * largest, equal_nan=True).all())
        return equal(x, y) or (not has(x) and not has(y))

    found = [name for name, x in first.items() if name in second and not same(x, second[name])]
    return (*found, *[name for name in second if name.startswith("thread 2") and name not in first])


# Beside native code


def native_difference(blocks: Blocks, format: str) -> list[Difference]:
    """Where the emulation is farther from float64 than native code is, over inputs drawn again, or off the grid."""
    if any("WithoutAutocast" in block.names for block in blocks):
        return []  # parameters are float32 in there, as under autocast: native code has no master weights
    names = set[str]().union(*(block.names for block in blocks))
    if {"Remembering", "LateLinear"} <= names:
        return []  # the call that makes its parameters is remembered, in float32
    if any(keeps_a_buffer(block) for block in blocks):
        return []  # model.to(dtype) makes new buffers, and what keeps the old ones computes in float32
    farther, off = _farther(blocks, format, FEW)
    if farther:
        farther, off = _farther(blocks, format, MANY)
    checks = {"farther than native": farther, "off the grid": off}
    return [Difference(check, "eager", format, names) for check, names in checks.items() if names]


def keeps_a_buffer(block: Block) -> bool:
    """Whether anything but its module holds a buffer."""
    is_kept = block.table == "buffer" and block.place in ("InAPlainList", "KeptByAChild")
    return is_kept or any(map(keeps_a_buffer, block.inside))


def _farther(blocks: Blocks, format: str, count: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of what is farther from float64 than in native code, and of what is not in the format."""
    dtype = NATIVE[format]
    off: dict[str, None] = {}
    errors: dict[str, list[tuple[float, float]]] = {}  # of the emulation and of native code, for each input
    wanted_of: dict[str, set[bytes]] = {}  # of a gradient that knows no input there is one sample
    missing: dict[str, None] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed, x in enumerate(inputs(1, count)):  # and parameters: a bias behind no activation knows no input
            x = x.to(dtype).float()
            try:
                native = _one_step(_in_numbers_of(dtype, blocks, x, seed).to(dtype), x.to(dtype), seed)
                exact = _one_step(_in_numbers_of(dtype, blocks, x, seed).double(), x.double(), seed)
            except Exception:  # mixed dtypes, mostly
                return (), ()
            try:
                emulated = _one_step(fpsim.quantize(_in_numbers_of(dtype, blocks, x, seed), format), x, seed)
            except Exception:  # as `Examined` has found
                return (), ()
            for name, wanted in exact.items():
                mine, theirs = emulated[name], native[name]
                if name.endswith("output") and mine is not None and theirs is not None and theirs.dtype is dtype:
                    if not bool(((mine == mine.to(dtype)) | mine.isnan()).all()):
                        off[name] = None
                if (mine is None) != (theirs is None):
                    missing[f"{name} is None"] = None
                elif wanted is not None and mine is not None and theirs is not None and _varies(wanted):
                    wanted_of.setdefault(name, set()).add(wanted.numpy().tobytes())
                    ours, natives = ((got.double() - wanted).norm().item() for got in (mine, theirs))
                    errors.setdefault(name, []).append((ours, natives))
    farther = [name for name, pairs in errors.items() if len(wanted_of[name]) > 1 and _is_farther(pairs)]
    return (*missing, *farther), tuple(off)


def _varies(x: Tensor) -> bool:
    """Whether the numbers of a tensor are several: of one for all inputs, rounding is luck."""
    return x.numel() < 2 or (x.max() - x.min()).item() > 0.25 * x.abs().max().item()


def _is_farther(errors: list[tuple[float, float]]) -> bool:
    """Whether errors are larger than native ones in all, and for most inputs too.

    One input may decide the sum: where a ReLU is within rounding of 0, one of the two takes the other branch.
    """
    mine, theirs = (math.hypot(*column) for column in zip(*errors, strict=True))
    if mine <= FARTHER * theirs + 1e-6:
        return False
    return statistics.median(a / b if b else math.inf if a else 1.0 for a, b in errors) > FARTHER


def _in_numbers_of(dtype: torch.dtype, blocks: Blocks, x: Tensor, seed: int) -> nn.Module:
    """The model, whose parameters and buffers are numbers of this dtype."""
    model = build(blocks, seed=seed)  # not a copy: torch's lack the hooks of parameters
    if any(map(nn.parameter.is_lazy, model.parameters())):
        model(x)
    return model.to(dtype).float()


def _one_step(model: nn.Module, x: Tensor, seed: int) -> Trace:
    """A step with a gradient of its own: one for all inputs may lie where one of the two has luck."""
    trace: Trace = {}
    step(model, named(model), x, 0, trace, torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)))
    return trace


# The smallest model that differs


def smaller(blocks: Blocks) -> Iterator[Blocks]:
    """Models with one block less, or a simpler one."""
    for i, block in enumerate(blocks):
        before, after = blocks[:i], blocks[i + 1 :]
        if len(blocks) > 1:
            yield before + after
        if block.inside:
            yield before + block.inside + after
            for inside in smaller(block.inside):
                yield (*before, replace(block, inside=inside), *after)
        if block.place not in ("", "Own"):
            yield (*before, replace(block, place="Own"), *after)
        if block.table == "use" and block.name != "matmul":
            yield (*before, replace(block, name="matmul"), *after)


def shrink(blocks: Blocks, differs: Callable[[Blocks], bool]) -> Blocks:
    while True:
        less = next((candidate for candidate in smaller(blocks) if differs(candidate)), None)
        if less is None:
            return blocks
        blocks = less


@dataclass(frozen=True)
class Failure:
    seed: int
    blocks: Blocks
    difference: Difference

    def __str__(self) -> str:
        return f"seed {self.seed}: {', '.join(map(str, self.blocks))}\n    {self.difference}"

    def shrunk(self) -> Failure:
        wanted = self.difference

        def differences(blocks: Blocks) -> list[Difference]:
            if wanted.check in ("farther than native", "off the grid"):
                return native_difference(blocks, wanted.format)
            return Examined(blocks, wanted.format, self.seed).differences(wanted.way)

        def fitting(blocks: Blocks) -> Difference | None:
            return next((d for d in differences(blocks) if (d.check, d.way, d.format) == key), None)

        key = wanted.check, wanted.way, wanted.format
        blocks = shrink(self.blocks, lambda candidate: fitting(candidate) is not None)
        return replace(self, blocks=blocks, difference=fitting(blocks) or wanted)


def examine(seed: int, ways: list[str] | None = None) -> list[Failure]:
    """What differs in the model of this seed, called in the eager way and in one or two others."""
    source = random.Random(seed)
    if ways is not None:
        chosen = ways
    elif seed % 10 == 0:
        chosen = ["compiled"]  # takes as long as ten of the others
    else:
        chosen = source.sample([way for way in WAYS if way not in ("eager", "compiled")], 2)
    blocks, format = Draws(chosen, source).model(), source.choice([*FORMATS])
    examined = Examined(blocks, format, seed)
    if isinstance(examined.trace(""), Exception):
        return []
    found = examined.differences("eager")
    known = {(difference.check, difference.format) for difference in found}
    for way in chosen:
        found += [d for d in examined.differences(way) if (d.check, d.format) not in known]
    if ways is None and source.random() < 0.5:
        found += native_difference(blocks, source.choice([*NATIVE]))
    return [Failure(seed, blocks, difference) for difference in found]


class Causes:
    """The smallest models that differ, by what differs, and the seeds of the models that have their blocks."""

    def __init__(self) -> None:
        self.seeds: dict[tuple[str, str, Blocks], list[int]] = {}

    def known(self, failure: Failure) -> Blocks | None:
        """A cause that was found before and whose blocks are all in this model."""
        names = set[str]().union(*(block.names for block in failure.blocks)) | SIMPLE.names
        for check, way, blocks in self.seeds:
            if (check, way) == (failure.difference.check, failure.difference.way):
                if all(block.names <= names for block in blocks):
                    return blocks
        return None

    def add(self, failure: Failure) -> None:
        key = failure.difference.check, failure.difference.way, failure.blocks
        self.seeds.setdefault(key, []).append(failure.seed)

    def __str__(self) -> str:
        rows = sorted(self.seeds.items(), key=lambda pair: -len(pair[1]))
        return "\n".join(
            f"{len(seeds):4}  {check} ({way}): {', '.join(map(str, blocks))}; seeds {str(seeds[:4])[1:-1]}"
            for (check, way, blocks), seeds in rows
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first model; the next one has the next seed")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of the processor, after which it stops")
    parser.add_argument("--ways", nargs="*", choices=WAYS, help="to call each model; by default two that are drawn")
    parser.add_argument("--no-shrink", action="store_true", help="print the model as it was drawn alone")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # what torch says of models that it does not compile
    causes, failed, taken = Causes(), 0, 0
    for seed in range(options.seed, options.seed + options.count):
        if time.process_time() > options.seconds:
            break
        taken += 1
        if sys.stderr.isatty():
            print(f"seed {seed}", end="\r", file=sys.stderr, flush=True)
        failures = examine(seed, options.ways)
        failed += bool(failures)
        for failure in failures:
            known = causes.known(failure)
            if known is not None:
                causes.add(replace(failure, blocks=known))
                continue
            print(failure, flush=True)
            if not options.no_shrink:
                failure = failure.shrunk()
                print(f"  smallest: {', '.join(map(str, failure.blocks))}\n    {failure.difference}", flush=True)
            causes.add(failure)
    print(f"{failed} of {taken} models differ, in {time.process_time():.0f} processor seconds\n{causes}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
