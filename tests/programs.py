"""Random forwards, run natively in a low precision and emulated in float32: where do the two differ?

    python tests/programs.py --count 600 --format bf16 --seed 0 --show 20 [--compiled] [--device cuda]

prints how many of 600 programs differ, which kinds of statements the shortest ones need, and 20 of them.

A program is a list of numbers, so that hypothesis can draw and shrink it; `source_of` makes it the source of a module.
It runs as `module.to(torch.bfloat16)` and as `fpsim.quantize(module, "bf16")`, from the same numbers. Compared are

- each variable after the forward, by its numbers, and by those of `(v + 0.25) * 1.0123`, which show whether a format
  or float32 computes on: `(v + 0.25)` has no zeros, and 1.0123 more digits than either format;
- parameters, buffers and inputs after the forward, and what shares memory with them, rounded to the format: what
  emulates keeps them in float32. What the programs write to them commutes with that rounding (`COMMUTING`);
- gradients of parameters and inputs. They are equal bit for bit where no tensor is used twice. Otherwise native code
  rounds each term of a sum and emulated code the sum, and they differ by at most `FAN_OUT_ULPS` of the largest
  gradient that native code meets.

A program that native code refuses is left out.

With --compiled the emulated program is compared with itself under torch.compile(fullgraph=True), bit for bit but for
gradients of what is used twice; programs that torch does not compile are left out.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import linecache
import logging
import math
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__:  # python -m tests.programs
    sys.path.insert(0, str(Path(__file__).parent))

import torch
from program_forms import FURTHER_KINDS
from program_functions import OWN_KINDS
from program_statements import KINDS, Writer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fpsim

NATIVE = {"bf16": torch.bfloat16, "fp16": torch.float16}
GENES = 12  # numbers for one statement
LENGTHS = (3, 9)  # statements
EXPANDED = "more than one element of the written-to tensor"  # torch 2.12: the gradient of an expanded output
FAN_OUT_ULPS = 64
# Kinds of statements that neither write to their operands nor share memory with them.
NEW_MEMORY = {"scaling", "arithmetic", "selection", "checkpointed", "condition", "limits", "factory", "with_a_dtype"}
NEW_MEMORY |= {"promotion", "rearranged", "branch"}
Genes = tuple[tuple[int, ...], ...]
ALL_KINDS = (*KINDS, *FURTHER_KINDS, *FURTHER_KINDS, *OWN_KINDS, *OWN_KINDS)
# All but those that leave code to the backward pass, and one that uses no tensor twice: gradients are compared exactly.
NOT_OWN = frozenset(kind.__name__ for kind in ALL_KINDS) - {"own_function", "own_hook", "scaling"}

HEAD = """\
import copy
import math
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * a

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0] * 2


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(b)
        return a.float() * b.float() * 1.003

    @staticmethod
    def backward(ctx, gradient):
        b = ctx.saved_tensors[0]
        return (gradient * b).to(b.dtype), torch.zeros_like(b)


class Program(nn.Module):
    keeps_float32 = False

    def __init__(self):
        super().__init__()
        self.p, self.w = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.register_buffer("b", torch.randn(4, 4))

    def forward(self, x, y):
"""
_files = itertools.count()


@dataclass(frozen=True)
class Program:
    """A forward as statements of Python.

    stays: the variables that share memory with a parameter, a buffer or an input.
    is_tree: whether no tensor is used twice.
    """

    statements: tuple[tuple[str, ...], ...]
    kinds: tuple[str, ...]
    names: tuple[str, ...]
    stays: frozenset[str]
    has_gradients: bool
    is_tree: bool

    def source(self) -> str:
        lines = [f"        {line}" for statement in self.statements for line in statement]
        names = ", ".join(f'"{name}": {name}' for name in self.names)
        lines += [f"        found = {{{names}}}", "        with torch.no_grad():"]
        lines += [
            "            shown = {k: (v + 0.25) * 1.0123 for k, v in found.items()}",
            "        return found, shown",
        ]
        return HEAD + "\n".join(lines) + "\n"


def draw(genes: Genes, format: str, without: frozenset[str] = frozenset()) -> Program:
    """The program that these numbers stand for: the first ones say whether there are gradients.

    without: kinds of statements that are left out.
    """
    kinds = [kind for kind in ALL_KINDS if kind.__name__ not in without]
    writer = Writer(format, genes[0][0] % 2 == 1, kinds)
    for statement in genes[1:]:
        writer.write(statement)
    made = [v for v in writer.variables if v.name.startswith("v")]
    return Program(
        tuple(tuple(lines) for lines in writer.statements),
        tuple(writer.kinds),
        tuple(v.name for v in made),
        frozenset(v.name for v in made if v.memory.owner),
        writer.has_gradients,
        writer.is_tree,
    )


def random_genes(seed: int) -> Genes:
    source = random.Random(seed)
    count = source.randint(*LENGTHS) + 1
    return tuple(tuple(source.randrange(256) for _ in range(GENES)) for _ in range(count))


def space_of(source: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a source defines, with lines that `inspect` and tracebacks find. `names`: what it may use."""
    file = f"<program {next(_files)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space = {**(names or {}), "__name__": file}
    exec(compile(source, file, "exec"), space)
    return space


class Largest(TorchDispatchMode):
    """Remembers the largest number that a backward pass computes. (A hook on a view may crash torch 2.13.)"""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point() and out.numel():
            self.found = max(self.found, out.abs().nan_to_num(0.0, math.inf).max().item())
        return out


@dataclass
class Outcome:
    """What a run leaves: tensors by name, the variable whose gradient was given, and the largest gradient met."""

    variables: dict[str, Tensor]
    shown: dict[str, Tensor]
    stays: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    last: str | None = None
    largest: float = 0.0


def run(module: nn.Module, inputs: list[Tensor], program: Program, native: Outcome | None = None) -> Outcome:
    """One run of a program: the native one, or the other one, whose backward pass begins where the `native` one did."""
    torch.default_generator.manual_seed(1)
    x, y = (x.clone().requires_grad_(program.has_gradients) for x in inputs)
    with torch.set_grad_enabled(program.has_gradients):
        found, shown = module(x, y)
    stays = {"x": x, "y": y, **dict(module.named_parameters()), **dict(module.named_buffers())}
    largest = Largest()
    if native is None:
        last = next((n for n, v in reversed(found.items()) if v.requires_grad and not v.is_leaf), None)
    else:
        last = native.last
    if last is not None:
        gradient = torch.linspace(-1, 1, found[last].numel()).mul(64).round().div(64).view(found[last].shape)
        gradient = gradient.to(found[last].dtype)
        if (
            native is None and not program.is_tree
        ):  # a pass of its own: beside a mode, torch computes some gradients apart
            with largest:
                found[last].backward(gradient, retain_graph=True)
            for v in stays.values():
                v.grad = None
        found[last].backward(gradient)
    gradients = {name: v.grad for name, v in stays.items()}
    return Outcome(found, shown, {k: v.detach() for k, v in stays.items()}, gradients, last, largest.found)


def differs(native: Tensor, emulated: Tensor, format: str, is_rounded: bool) -> bool:
    if native.shape != emulated.shape or native.dtype.is_floating_point != emulated.dtype.is_floating_point:
        return True
    if not native.dtype.is_floating_point:
        return not torch.equal(native, emulated)
    if is_rounded and native.dtype is NATIVE[format]:
        emulated = emulated.to(native.dtype)
    wide = torch.float64
    return not bool(((native.to(wide) == emulated.to(wide)) | (native.isnan() & emulated.isnan())).all())


def compare(native: Outcome, emulated: Outcome, program: Program, format: str) -> list[str]:
    """What differs, by name."""
    found = [n for n, v in native.variables.items() if differs(v, emulated.variables[n], format, n in program.stays)]
    found += [f"{n} computing on" for n, v in native.shown.items() if differs(v, emulated.shown[n], format, False)]
    found += [f"{n} afterwards" for n, v in native.stays.items() if differs(v, emulated.stays[n], format, True)]
    info = torch.finfo(NATIVE[format])
    bound = 0.0 if program.is_tree else FAN_OUT_ULPS * info.eps * max(native.largest, info.smallest_normal)
    for name, gradient in native.gradients.items():
        other = emulated.gradients[name]
        if (gradient is None) != (other is None):
            found.append(f"{name}.grad is None")
        elif gradient is not None and other is not None and differs(gradient, other, format, False):
            is_near = bound == math.inf or bool(torch.isclose(other.double(), gradient.double(), 0, bound, True).all())
            if program.is_tree or not is_near:
                found.append(f"{name}.grad")
    return found


class Compiled(nn.Module):
    """A model whose forward is compiled as one program; its parameters and buffers have the names of before."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._parameters, self._buffers = model._parameters, model._buffers
        self._compiled = (torch.compile(model, backend="aot_eager", fullgraph=True),)  # in a tuple: no module inside

    def forward(self, *args: Tensor) -> Any:
        return self._compiled[0](*args)


def compare_compiled(eager: Outcome, compiled: Outcome, program: Program) -> list[str]:
    """What differs, by name. A compiled program gives zeros to what no gradient comes to."""
    found = [n for n, v in eager.variables.items() if not equal(v, compiled.variables[n])]
    found += [f"{n} computing on" for n, v in eager.shown.items() if not equal(v, compiled.shown[n])]
    found += [f"{n} afterwards" for n, v in eager.stays.items() if not equal(v, compiled.stays[n])]
    for name, x in eager.stays.items() if program.is_tree else ():
        both = (outcome.gradients[name] for outcome in (eager, compiled))
        gradients = (torch.zeros_like(x) if gradient is None else gradient for gradient in both)
        if not equal(*gradients):
            found.append(f"{name}.grad")
    return found


def equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype is b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


@dataclass
class Result:
    """What two interpreters made of a program. Without `native` it was refused."""

    program: Program
    native: Outcome | None = None
    emulated: Outcome | None = None
    differences: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = [self.program.source(), f"differ: {', '.join(self.differences)}"]
        for name in self.differences:
            for title, outcome in (("native", self.native), ("emulated", self.emulated)):
                if outcome is not None and name in outcome.variables:
                    text.append(f"{title} {name} = {outcome.variables[name]}")
        return "\n".join(text)


def execute(program: Program, format: str, is_compiled: bool = False) -> Result:
    """Run a program natively and emulated, or emulated and compiled."""
    space, dtype = space_of(program.source()), NATIVE[format]
    file = space["__name__"]
    torch.default_generator.manual_seed(0)
    module = space["Program"]().to(dtype)
    inputs = [torch.randn(4, 4).to(dtype) for _ in range(2)]
    masters = copy.deepcopy(module).float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            native = run(module, inputs, program)
        except (RuntimeError, TypeError, NameError, IndexError, ValueError):
            linecache.cache.pop(file, None)
            return Result(program)
        try:
            model, inputs = fpsim.quantize(masters, format), [x.float() for x in inputs]
            emulated = run(model, inputs, program, native)
            compiled = None
            if is_compiled:
                torch._dynamo.reset()
                try:
                    compiled = run(Compiled(fpsim.quantize(masters, format)), inputs, program, native)
                except torch._dynamo.exc.BackendCompilerFailed:  # it differentiates what the program does not
                    return Result(program)
                except RuntimeError as error:
                    if EXPANDED in str(error) and torch.__version__ < "2.13":  # so do plain programs, without fpsim
                        return Result(program)
                    raise
            with torch.no_grad():  # with gradients, torch refuses to look at some views whose base was written to
                if compiled is not None:
                    return Result(program, emulated, compiled, tuple(compare_compiled(emulated, compiled, program)))
                found = compare(native, emulated, program, format)
        except Exception as error:
            return Result(program, native, None, (f"{type(error).__name__}: {str(error)[:300]}",))
        finally:
            linecache.cache.pop(file, None)
    return Result(program, native, emulated, tuple(found))


def shorter(program: Program) -> Iterator[Program]:
    """The programs with one statement less; another variable stands for what it made."""
    for i in reversed(range(len(program.statements))):
        made = [n for n in program.names if any(n in _made_by(line) for line in program.statements[i])]
        rest = [*program.statements[:i], *program.statements[i + 1 :]]
        kinds = (*program.kinds[:i], *program.kinds[i + 1 :])
        names = tuple(n for n in program.names if n not in made)
        for stand_in in ("x", "y", *names) if made else ("",):
            lines = [tuple(_renamed(line, made, stand_in) for line in statement) for statement in rest]
            is_changed = [after != before for after, before in zip(lines, rest, strict=True)]
            if stand_in in ("x", "y", *program.stays) and not {*itertools.compress(kinds, is_changed)} <= NEW_MEMORY:
                continue  # what stays is written to by `COMMUTING` alone, and its variables are known by name
            is_tree = program.is_tree and not any(is_changed)  # the stand-in may be used elsewhere, too
            yield Program(tuple(lines), kinds, names, program.stays, program.has_gradients, is_tree)


def _made_by(line: str) -> list[str]:
    left, equals, _ = line.strip().partition(" = ")
    return left.split(", ") if equals else []


def _renamed(line: str, names: list[str], other: str) -> str:
    for name in names:
        for before, after in itertools.product(" ([,-*", " )].,;["):
            line = f" {line} ".replace(f"{before}{name}{after}", f"{before}{other}{after}")[1:-1]
    return line


def shrink(result: Result, format: str) -> Result:
    """The program without the statements that it differs without."""
    while True:
        for candidate in shorter(result.program):
            less = execute(candidate, format)
            if less.differences:
                result = less
                break
        else:
            return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=600, help="programs that native code runs")
    parser.add_argument("--format", choices=NATIVE, default="bf16")
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the next one has the next seed")
    parser.add_argument("--show", type=int, default=5, help="how many of the shortest differing programs are printed")
    parser.add_argument("--no-shrink", action="store_true", help="print the rate alone")
    parser.add_argument("--without", nargs="*", default=[], help="kinds of statements to leave out, as printed")
    parser.add_argument("--compiled", action="store_true", help="compare with torch.compile of the emulated program")
    parser.add_argument("--device", default="cpu", help="where all tensors are made: cpu, cuda")
    options = parser.parse_args()
    torch.set_default_device(options.device)
    logging.disable(logging.CRITICAL)  # what torch says of programs that it does not compile
    further = [kind.__name__ for kind in FURTHER_KINDS] if options.compiled else []  # torch compiles few of them
    without = frozenset([*options.without, *further])
    ran, found, refused, seed = 0, [], 0, options.seed
    while ran < options.count:
        result = execute(draw(random_genes(seed), options.format, without), options.format, options.compiled)
        seed += 1
        refused += result.native is None
        ran += result.native is not None
        if result.differences:
            found.append((seed - 1, result))
            print(f"seed {seed - 1} of {options.format} differs: {', '.join(result.differences)}", file=sys.stderr)
    print(f"{len(found)} of {ran} programs differ in {options.format}; torch refuses {refused} more")
    if options.no_shrink or options.compiled:
        sys.exit(bool(found))
    groups: dict[str, list[tuple[int, Result]]] = {}
    for number, result in found:
        small = shrink(result, options.format)
        groups.setdefault(" + ".join(sorted(set(small.program.kinds))), []).append((number, small))
    for cause, members in sorted(groups.items(), key=lambda x: -len(x[1])):
        print(f"{len(members):5}  {cause}")
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*sorted(groups.values(), key=len, reverse=True)))
    for number, small in itertools.islice((x for x in in_turn if x is not None), options.show):
        lines = [line for statement in small.program.statements for line in statement]
        print(f"\n# seed {number}, gradients: {small.program.has_gradients}, tree: {small.program.is_tree}")
        print("\n".join(lines))
        print("# differ:", ", ".join(small.differences))


if __name__ == "__main__":
    main()
