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
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import fpsim

NATIVE = {"bf16": torch.bfloat16, "fp16": torch.float16}
SLACK = 1.15
CANCELLATION = 2**-20
MOST_NUMBERS = 20_000  # in a sample; a few of torch's are larger
REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError, AssertionError)


@dataclass(frozen=True)
class Sample:
    """The arguments of a call, in one dtype."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def in_dtype(self, dtype: torch.dtype, has_gradients: bool) -> Sample:
        """The same numbers in another dtype; those that had a gradient have one again."""

        def cast(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.dtype not in (*NATIVE.values(), torch.float32):
                return torch.float64 if x is torch.float32 and dtype is torch.float64 else x
            made = x.detach().to(dtype).clone(memory_format=torch.preserve_format)
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
    spelling: Spelling, sample: Sample, format: str, around: Any = None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The results of a call, and the gradients of its operands; those of the results are numbers of the format.

    around: the context of the call.
    """
    torch.manual_seed(0)
    with around or nullcontext():
        made = spelling(sample)
    results = tensors_of(made)
    ends = [x for x in results if x.requires_grad and x.is_floating_point()]
    leaves = sample.leaves()
    if not ends or not leaves:
        return [x.detach() for x in results], []
    given = [(7 * torch.linspace(-1, 1, x.numel())).sin().to(NATIVE[format]).view(x.shape).to(x.dtype) for x in ends]
    return [x.detach() for x in results], list(torch.autograd.grad(ends, leaves, given, allow_unused=True))


def half_ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Half a unit in the last place of each number, in float64."""
    limits = torch.finfo(dtype)
    return torch.exp2(torch.floor(torch.log2(x.abs().clamp(limits.tiny, limits.max)))) * limits.eps / 2


def fault(
    native: Tensor, emulated: Tensor, exact: Tensor | None, format: str, is_random: bool, largest: float
) -> str | None:
    """What is wrong with one emulated tensor. largest: the largest operand of the call."""
    dtype = NATIVE[format]
    if native.shape != emulated.shape:
        return f"the shape {tuple(emulated.shape)}, not {tuple(native.shape)}"
    if not native.is_floating_point() and not native.is_complex():
        return None if is_random or torch.equal(native, emulated) else "other whole numbers"
    if native.dtype is dtype and not torch.equal(
        emulated.to(dtype).double().nan_to_num(), emulated.double().nan_to_num()
    ):
        return "off the grid"
    if exact is None or is_random or native.is_complex() or not native.numel():
        return None
    n, e = ((x.double() - exact.double()) for x in (native, emulated))
    is_special = ~(n.isfinite() & exact.isfinite())
    if not torch.equal(native[is_special].double().nan_to_num(7), emulated[is_special].double().nan_to_num(7)):
        return "another infinity or NaN"
    n, e, rounding = (x[~is_special].norm().item() for x in (n, e, half_ulp(exact.double(), native.dtype)))
    bound = SLACK * n + rounding + CANCELLATION * largest
    return None if e <= bound else f"{e:.2g} from float64, native {n:.2g}, one rounding {rounding:.2g}"


def faults(op: Any, sample: Sample, format: str) -> tuple[int, dict[str, str]]:
    """How many spellings of a call native code takes, and what is wrong with the emulation, by spelling."""
    low, found, count = sample.in_dtype(NATIVE[format], True), {}, 0
    for name, spelling in spellings(op, low).items():
        try:
            native = run(spelling, low.in_dtype(NATIVE[format], True), format)
        except REFUSALS:
            continue
        count += 1
        try:
            torch.manual_seed(1)
            again = tensors_of(spelling(low.in_dtype(NATIVE[format], False)))
            is_random = any(
                not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(native[0], again, strict=True)
            )
        except REFUSALS:
            is_random = False
        try:
            exact = run(spelling, low.in_dtype(torch.float64, True), format)
        except REFUSALS:
            exact = ([], [])
        try:
            emulated = run(spelling, low.in_dtype(torch.float32, True), format, fpsim.emulate(format))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        for kind, n, e, x in zip(("result", "gradient"), native, emulated, exact, strict=True):
            wrong = compare(n, e, x, format, is_random, low)
            if wrong:
                found[f"{name}, {kind}"] = f"{wrong}, of {low}"
    return count, found


def compare(
    native: list[Any], emulated: list[Any], exact: list[Any], format: str, is_random: bool, sample: Sample
) -> str | None:
    if [x is None for x in native] != [x is None for x in emulated]:
        return "present or not"
    exact = exact if len(exact) == len(native) else [None] * len(native)
    sizes = (x.detach().double().abs().nan_to_num(0, 0, 0).max().item() for x in sample.leaves() if x.numel())
    largest = max(sizes, default=1.0)
    together = zip(native, emulated, exact, strict=True)
    wrong = [fault(n, e, x, format, is_random, largest) for n, e, x in together if n is not None]
    return next((text for text in wrong if text), None)


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
    parser.add_argument("--only", nargs="*", help="names of operations")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from torch.testing._internal.common_methods_invocations import op_db  # it takes seconds

    found: dict[str, dict[str, str]] = {}
    calls = operations = 0
    for op in op_db:
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        is_wanted = name in options.only if options.only else "empty" not in name and "jiterator" not in name
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
