"""Every operation that torch has samples for, emulated beside native code, both against float64.

    python tests/every_operation.py --format bf16 --samples 2 --only maximum expand

prints, as JSON, how many calls were compared and what was found, by operation. The samples are those of torch's own
tests. This is a script, and runs in a process of its own: importing them switches off torch's global flags.

A call is spelled as a function, as a method, in place, with `out=`, with all arguments by name, and with as many as
possible by position. Native code runs it on the samples rounded to the format, the emulation on the same numbers in
float32. What must hold, for each result, and for the gradient of each operand:

- where native code has its low precision, the emulated numbers are in the format; whole numbers are the same;
- in the Euclidean norm the emulation is no further from float64 than `SLACK` times native code, plus half a unit in
  the last place of each exact number (one rounding), plus 2^-20 of the largest operand: sums that cancel leave what
  float32's order of addition leaves;
- the emulation raises nothing.

What is random, for a seed gives native code other numbers, is looked at for the format alone; what is not initialised
is left out.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import fpsim

NATIVE = {"bf16": torch.bfloat16, "fp16": torch.float16}
SLACK = 1.15
CANCELLATION = 2**-20
REPEATS = 6
SET_THEIR_SEED = ("normal", "normal.number_mean")  # torch's samples of random numbers that are the same in each call
MOST_NUMBERS = 20_000  # in a sample; a few of torch's are larger
REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError, AssertionError)


@dataclass(frozen=True)
class Sample:
    """The arguments of a call, in one dtype."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def in_dtype(self, dtype: torch.dtype, has_gradients: bool, factor: float = 1.0) -> Sample:
        """The same numbers, times a factor, in another dtype; those that had a gradient have one again."""

        def cast(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.dtype not in (*NATIVE.values(), torch.float32):
                return torch.float64 if x is torch.float32 and dtype is torch.float64 else x
            made = (
                (x.detach() * factor if x.requires_grad else x.detach())
                .to(dtype)
                .clone(memory_format=torch.preserve_format)
            )
            return made.requires_grad_(has_gradients and x.requires_grad)

        return Sample(*tree_map(cast, (self.args, self.kwargs)))

    def __str__(self) -> str:
        shapes = tree_map(lambda x: list(x.shape) if isinstance(x, Tensor) else x, (self.args, self.kwargs))
        return f"{shapes[0]} {shapes[1] or ''}"[:300]

    def leaves(self) -> list[Tensor]:
        found = [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)]
        return [x for x in found if x.requires_grad]


Spelling = Callable[[Sample], Any]


def names_of(op: Any, count: int) -> Iterator[list[str]]:
    """The names of an operation's arguments, as far as it takes them by position; torch writes `input` for `self`."""
    try:
        parameters = inspect.signature(op.op).parameters.values()
        yield [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        return
    except (ValueError, TypeError):
        pass
    packet = getattr(torch.ops.aten, op.name.rpartition(".")[2], None)
    for overload in packet.overloads() if packet is not None else ():
        arguments = [a for a in getattr(packet, overload)._schema.arguments if not a.kwarg_only]
        if len(arguments) >= count:
            yield ["input" if a.name == "self" else a.name for a in arguments]


def spellings(op: Any, sample: Sample) -> dict[str, Spelling]:
    """Every way to write a call; native code refuses those that there are not."""
    found: dict[str, Spelling] = {"function": lambda s: op.op(*s.args, **s.kwargs)}
    if op.method_variant is not None and isinstance(sample.args[0], Tensor):
        found["method"] = lambda s: op.method_variant(*s.args, **s.kwargs)
    if op.inplace_variant is not None and isinstance(sample.args[0], Tensor):
        found["in place"] = lambda s: op.inplace_variant(s.args[0].clone(), *s.args[1:], **s.kwargs)
    for i, names in enumerate(itertools.islice(names_of(op, len(sample.args)), 3)):

        def by_name(s: Sample, names: list[str] = names) -> Any:
            return op.op(**dict(zip(names, s.args)), **s.kwargs)

        def by_position(s: Sample, names: list[str] = names) -> Any:
            following = list(itertools.takewhile(s.kwargs.__contains__, names[len(s.args) :]))
            rest = {name: x for name, x in s.kwargs.items() if name not in following}
            return op.op(*s.args, *(s.kwargs[name] for name in following), **rest)

        found[f"by name {i}"] = by_name
        if any(name in sample.kwargs for name in names):
            found[f"by position {i}"] = by_position
    if op.supports_out:
        found["out="] = lambda s: with_out(op, s)
    return found


def with_out(op: Any, sample: Sample) -> Any:
    """A call that writes into what an earlier call gave, as large and of the same dtype."""
    made = op.op(*sample.args, **sample.kwargs)
    with torch.no_grad():
        into = tree_map(lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else x, made)
        plain = Sample(*tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, (sample.args, sample.kwargs)))
        op.op(*plain.args, **plain.kwargs, out=into)
    return into


def tensors_of(result: Any) -> list[Tensor]:
    return [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.layout is torch.strided]


def run(
    spelling: Spelling, sample: Sample, format: str, number: int, around: Any = None, seed: int = 0
) -> list[Tensor | None]:
    """The results of a call, and the gradients of its operands; those of the results are numbers of the format.

    around: the context of the call. What it writes to an operand stays in float32, and is rounded here.
    """
    torch.manual_seed(seed)
    with around or nullcontext():
        made = spelling(sample)
    results = tensors_of(made)
    operands = [id(x) for x in tree_leaves((sample.args, sample.kwargs)) if isinstance(x, Tensor)]
    shown = [x.to(NATIVE[format]).float() if around and id(x) in operands else x for x in results]
    ends = [x for x in results if x.requires_grad and x.is_floating_point()]
    leaves = sample.leaves()
    if not ends or not leaves:
        return [x.detach() for x in shown]
    given = [
        (torch.linspace(-7, 7, x.numel()) + number).sin().view(x.shape).to(NATIVE[format]).to(x.dtype) for x in ends
    ]
    return [*(x.detach() for x in shown), *torch.autograd.grad(ends, leaves, given, allow_unused=True)]


def half_ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Half a unit in the last place of each number, in float64."""
    limits = torch.finfo(dtype)
    return torch.exp2(torch.floor(torch.log2(x.abs().clamp(limits.tiny, limits.max)))) * limits.eps / 2


@dataclass(frozen=True)
class Distance:
    """How far both are from float64, and what one rounding and float32's order of addition allow: squares."""

    emulated: float = 0.0
    native: float = 0.0
    rounding: float = 0.0
    noise: float = 0.0

    def __add__(self, other: Distance) -> Distance:
        return Distance(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def is_too_far(self) -> bool:
        return not math.sqrt(self.emulated) <= sum(
            math.sqrt(x) for x in (SLACK**2 * self.native, self.rounding, self.noise)
        )

    def __str__(self) -> str:
        emulated, native, rounding, _ = (math.sqrt(x) for x in astuple(self))
        return f"{emulated:.2g} from float64, native {native:.2g}, one rounding {rounding:.2g}"


def distance(
    native: Tensor, emulated: Tensor, exact: Tensor | None, format: str, is_random: bool, largest: float
) -> Distance | str:
    """How far one emulated tensor is from float64, or what else is wrong. largest: the largest operand of the call."""
    dtype = NATIVE[format]
    if native.shape != emulated.shape:
        return f"the shape {tuple(emulated.shape)}, not {tuple(native.shape)}"
    if not native.is_floating_point() and not native.is_complex():
        return Distance() if is_random or torch.equal(native, emulated) else "other whole numbers"
    as_stored = emulated.to(dtype).double().nan_to_num()
    if native.dtype is dtype and not torch.equal(as_stored, emulated.double().nan_to_num()):
        return "off the grid"
    if exact is None or is_random or native.is_complex() or not native.numel():
        return Distance()
    native, emulated, exact = native.double(), emulated.double(), exact.double()
    is_finite = native.isfinite() & exact.isfinite()
    # native code may overflow inside, and make infinity or NaN of what is none: then anything is nearer
    overflows = ~is_finite & ~(exact.abs() <= torch.finfo(dtype).max)
    if emulated[overflows].isfinite().any():
        return "a number, not infinity or NaN"
    found = [x[is_finite] for x in (emulated - exact, native - exact, half_ulp(exact, dtype))]
    return Distance(*(x.square().sum().item() for x in found), (CANCELLATION * largest) ** 2)


def draw(spelling: Spelling, sample: Sample, format: str, number: int) -> list[Distance | str] | None:
    """What is known of each result and each gradient of a call; None where native code refuses it.

    number: 0 for the sample itself; others make operands a little larger, and give results other gradients.
    """
    low = sample.in_dtype(NATIVE[format], True, 1 + number / 16)
    try:
        native = run(spelling, low.in_dtype(NATIVE[format], True), format, number)
    except REFUSALS:
        return None
    try:
        again = run(spelling, low.in_dtype(NATIVE[format], False), format, number, seed=1)
        both = [(a, b) for a, b in zip(native, again) if a is not None and b is not None]
        is_random = any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in both)
    except REFUSALS:
        is_random = False
    try:
        exact: list[Any] = run(spelling, low.in_dtype(torch.float64, True), format, number)
    except REFUSALS:
        exact = []
    exact = exact if len(exact) == len(native) else [None] * len(native)
    try:
        emulated = run(spelling, low.in_dtype(torch.float32, True), format, number, fpsim.emulate(format))
    except Exception as error:
        return [f"{type(error).__name__}: {error}"[:200]]
    if [x is None for x in native] != [x is None for x in emulated]:
        return ["a gradient is there, or is not"]
    sizes = (x.detach().double().abs().nan_to_num(0, 0, 0).max().item() for x in low.leaves() if x.numel())
    largest = max(sizes, default=1.0)
    together = [x for x in zip(native, emulated, exact, strict=True) if x[0] is not None]
    return [distance(n, e, x, format, is_random, largest) for n, e, x in together]


def faults(op: Any, sample: Sample, format: str) -> tuple[int, dict[str, str]]:
    """How many spellings of a call native code takes, and what is wrong with the emulation, by spelling.

    Few numbers are near float64 by chance: where the emulation is further, more are drawn.
    """
    found, count = {}, 0
    for name, spelling in spellings(op, sample).items():
        drawn = draw(spelling, sample, format, 0)
        if drawn is None:
            continue
        count += 1
        if any(isinstance(x, Distance) and x.is_too_far() for x in drawn):
            more = [draw(spelling, sample, format, number) or [] for number in range(1, REPEATS)]
            for each in (each for each in more if len(each) == len(drawn)):
                drawn = [
                    a + b if isinstance(a, Distance) and isinstance(b, Distance) else a for a, b in zip(drawn, each)
                ]
        wrong = [str(x) for x in drawn if not isinstance(x, Distance) or x.is_too_far()]
        if wrong:
            found[name] = f"{wrong[0]}, of {sample}"
    return count, found


def samples_of(op: Any, most: int) -> list[Sample]:
    """At most so many samples, spread over those that torch has."""
    found = [
        Sample((sample.input, *sample.args), sample.kwargs)
        for sample in op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
    ]
    found = [s for s in found if is_dense_and_small(tree_leaves((s.args, s.kwargs)))]
    return found[:: max(1, -(-len(found) // most))] if most else found


def is_dense_and_small(leaves: list[Any]) -> bool:
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    return all(x.layout is torch.strided for x in tensors) and sum(x.numel() for x in tensors) <= MOST_NUMBERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=NATIVE, default="bf16")
    parser.add_argument("--samples", type=int, default=2, help="at most so many of each operation; 0 for all")
    parser.add_argument("--every", type=int, default=1, help="one in so many operations, in torch's order")
    parser.add_argument("--only", nargs="*", help="names of operations")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from torch.testing._internal.common_methods_invocations import op_db  # it takes seconds

    found: dict[str, dict[str, str]] = {}
    calls = operations = 0
    for op in op_db[:: options.every]:
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        is_wanted = "empty" not in name and "jiterator" not in name and name not in SET_THEIR_SEED
        is_wanted = name in options.only if options.only else is_wanted
        if not is_wanted or NATIVE[options.format] not in op.supported_dtypes("cpu"):
            continue
        torch.manual_seed(0)
        operations += 1
        for sample in samples_of(op, options.samples):
            count, wrong = faults(op, sample, options.format)
            calls += count
            found.setdefault(name, {}).update(wrong)
    wrong = {name: texts for name, texts in found.items() if texts}
    print(json.dumps({"operations": operations, "calls": calls, "faults": wrong}, indent=1))


if __name__ == "__main__":
    main()
