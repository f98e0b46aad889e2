"""Calls of the table's operations, each with one operand of another kind, emulated beside native code.

    python tests/operand_kinds.py --format bf16 --only mul maximum

prints what does not hold, by operation. The operations are all rows of `fpsim.emulation.operations.TABLE` and of
`OTHERS`. How many tensors each takes is found by calling torch. One of them is replaced by an int, a bool, a float, a
tensor of integers, of float32 made on purpose, or of float64, with dimensions and without. A call is written as a
function, by name, as a method, as an operator in both orders, in place, and with `out=`.

What must hold of each result:

- its dtype is native's, where that is low precision, float32 and float64;
- its numbers are native's, or those of the exact operation rounded once, with the operand cast wherever native code
  casts it. Native code casts it if a cast before the call changes nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fpsim
from fpsim.emulation.operations import TABLE

NATIVE = {"bf16": torch.bfloat16, "fp16": torch.float16}
REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError, AssertionError)
# Operations without a row that take several operands.
OTHERS = """
    cat stack hstack vstack dstack column_stack block_diag outer ger kron diff mse_loss l1_loss smooth_l1_loss
    huber_loss poisson_nll_loss gaussian_nll_loss soft_margin_loss margin_ranking_loss trapezoid cumulative_trapezoid
    einsum inner
    _foreach_add _foreach_sub _foreach_mul _foreach_div _foreach_maximum _foreach_minimum _foreach_clamp_min
    _foreach_clamp_max _foreach_pow _foreach_addcmul _foreach_addcdiv masked_fill index_put getitem setitem copy_
    """.split()
IN_LISTS = frozenset("cat stack hstack vstack dstack column_stack block_diag".split())
SPACES: tuple[Any, ...] = (torch, F, torch.special, torch.linalg)
OPERATORS = frozenset("add sub mul truediv floordiv mod pow eq ne lt le gt ge".split())
NAMES = (("input", "other"), ("input", "target"), ("input", "exponent"), ("input", "tensor1", "tensor2"))
NAMES += (("input", "min", "max"), ("input", "min"), ("input", "max"), ("input", "vec2"), ("input", "end", "weight"))

# Numbers of both formats, all of a domain that most operations have.
MAIN = [0.5, 0.75, 0.25, 0.875]
KINDS: dict[str, Callable[[], Any]] = {
    "int": lambda: 257,
    "bool": lambda: True,
    "float": lambda: 0.3,
    "int8": lambda: torch.tensor([[100, -3], [7, 1]], dtype=torch.int8),
    "int64": lambda: torch.tensor([[257, 1001], [2049, 70001]]),
    "bool tensor": lambda: torch.tensor([[True, False], [True, True]]),
    "one integer": lambda: torch.tensor([257]),
    "0-d integer": lambda: torch.tensor(257),
    "0-d float32": lambda: torch.tensor(0.3),
    "float32": lambda: torch.tensor([[0.3, 0.7], [0.1, 0.9]]),
    "float64": lambda: torch.tensor([[0.3, 0.7], [0.1, 0.9]], dtype=torch.float64),
}
INTEGERS = ("int", "int8", "int64", "one integer", "0-d integer")


class Form(NamedTuple):
    """One way to write a call. run: takes the operands, the first of which it may write to."""

    name: str
    run: Callable[..., Any]


def functions_of(name: str, spellings: tuple[str, ...] = ()) -> Iterator[tuple[str, Callable[..., Any]]]:
    for each in (name, *spellings):
        found = next((getattr(space, each) for space in SPACES if callable(getattr(space, each, None))), None)
        if found is not None:
            yield each, found


def forms_of(name: str, spellings: tuple[str, ...] = ()) -> list[Form]:
    """Every way to write an operation that torch has."""
    if name == "setitem":
        return [Form("item", _set), Form("part", _set_part)]
    if name == "getitem":
        return []
    if name == "einsum":
        return [Form(each, lambda *xs, each=each: torch.einsum(each, *xs)) for each in ("ij,ij->ij", "ij,kl->ijkl")]
    if name == "block_diag":
        return [Form("function", torch.block_diag)]
    if name in IN_LISTS:
        return [Form("function", lambda *xs: getattr(torch, name)(xs))]
    if name.startswith("_foreach_"):
        forms = [Form("function", lambda *xs: getattr(torch, name)(*([x] for x in xs))[0])]
        if all_methods := getattr(torch, f"{name}_", None):
            forms.append(Form("in place", lambda x, *xs: (all_methods([x], *([y] for y in xs)), x)[1]))
        return forms
    forms = []
    for each, function in functions_of(name, spellings):
        forms.append(Form(each, function))
        for names in NAMES:

            def by_name(*xs: Any, function: Any = function, names: Any = names) -> Any:
                if len(xs) != len(names):
                    raise TypeError
                return function(**dict(zip(names, xs)))

            forms.append(Form(f"{each} by {names[-1]}", by_name))

        def with_out(*xs: Any, function: Any = function) -> Any:
            shapes = [x.shape for x in xs if isinstance(x, Tensor)]
            main = next((x for x in xs if isinstance(x, Tensor) and x.is_floating_point() and x.dim()), None)
            if main is None:
                raise TypeError
            into = main.new_zeros(torch.broadcast_shapes(*shapes))
            return function(*xs, out=into)

        forms.append(Form(f"{each} into out", with_out))
    for each in (name, *spellings):
        for method in (each, f"__{each}__", f"__r{each}__"):
            if (method != each and each not in OPERATORS) or not hasattr(Tensor, method):
                continue
            forms.append(Form(f"method {method}", lambda x, *xs, method=method: getattr(Tensor, method)(x, *xs)))
        for method in (f"{each}_", f"__i{each}__"):
            if hasattr(Tensor, method):
                forms.append(Form(f"method {method}", lambda x, *xs, method=method: getattr(Tensor, method)(x, *xs)))
    return forms


def _set(x: Any, y: Any) -> Any:
    x[1] = y[1] if isinstance(y, Tensor) and y.dim() == 2 else y
    return x


def _set_part(x: Any, y: Any) -> Any:
    x[:, 1:] = y[:, 1:] if isinstance(y, Tensor) and y.dim() == 2 else y
    return x


def operands(count: int, dtype: torch.dtype, shape: tuple[int, ...] = (2, 2)) -> list[Tensor]:
    main = torch.tensor(MAIN).view(shape)
    return [(main if i == 0 else main.flip(0) * (1 + i)).to(dtype) for i in range(count)]


def tensors_of(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [x for y in result for x in tensors_of(y)] if isinstance(result, tuple | list) else []


def attempt(run: Callable[..., Any], xs: list[Any]) -> list[Tensor] | None:
    """The results of a call; None where torch refuses it, or it gives no tensor."""
    try:
        torch.manual_seed(0)
        return tensors_of(run(*[x.clone() if isinstance(x, Tensor) else x for x in xs])) or None
    except REFUSALS:
        return None


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    pairs = [*zip(a, b, strict=False)]
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.equal(x.double().nan_to_num(0.125), y.double().nan_to_num(0.125)) for x, y in pairs
    )


def rounded_to(results: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    return [x.to(y.dtype) for x, y in zip(results, like, strict=True)]


def is_near(ours: list[Tensor], native: list[Tensor], exact: list[Tensor]) -> bool:
    """Whether the emulation is no further from float64 than native code, which rounds inside, and one rounding."""
    for x, n, e in zip(ours, native, exact, strict=True):
        if not n.dtype.is_floating_point:
            return False
        x, n, e, eps = x.double(), n.double(), e.double(), torch.finfo(n.dtype).eps
        is_number = x.isfinite() & n.isfinite() & e.isfinite()
        if not torch.equal(x.isfinite(), n.isfinite()):
            return False
        error, allowed = ((y - e)[is_number].norm() for y in (x, n))
        if error > allowed + (e[is_number] * eps / 2).norm():
            return False
    return True


def fault(form: Form, count: int, position: int, kind: str, fmt: str) -> str | None:
    """What is wrong with one call; "" for nothing, None where native code refuses it."""
    dtype, make = NATIVE[fmt], KINDS[kind]
    low, full = operands(count, dtype), operands(count, dtype)
    low[position] = make()
    native = attempt(form.run, low)
    if native is None or any(x.is_complex() for x in native):
        return None
    again = attempt(form.run, low)
    if again is None or not same(native, again):
        return None
    given = [x.float() for x in operands(count, dtype)]
    try:
        with fpsim.emulate(fmt):
            # every second one comes from outside
            is_made = "_" in form.name or form.name in ("item", "part", "in place") or (position + len(kind)) % 2
            xs: list[Any] = [x * 1 if is_made else x for x in given]
            xs[position] = make()
            torch.manual_seed(0)
            ours = tensors_of(form.run(*xs))
            dtypes = [x.dtype for x in ours]
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    if dtypes != [x.dtype for x in native]:
        return f"is of {dtypes}, not {[x.dtype for x in native]}"
    if same(ours, native):
        return ""
    cast = make()
    cast = cast.to(dtype) if isinstance(cast, Tensor) else torch.tensor(cast).to(dtype).item()
    full[position] = cast
    also = attempt(form.run, full)
    casts = also is not None and same(rounded_to(also, native), native) if also and len(also) == len(native) else False
    for wide in (torch.float32, torch.float64):
        xs = [x.to(wide) for x in operands(count, dtype)]
        xs[position] = cast if casts else make()
        if isinstance(xs[position], Tensor) and xs[position].is_floating_point():
            xs[position] = xs[position].to(wide)
        exact = attempt(form.run, xs)
        if exact is None or len(exact) != len(native):
            continue
        if same(ours, rounded_to(exact, native)):
            return ""
        if wide is torch.float64 and is_near(ours, native, exact):
            return ""
    shown = [[x.flatten()[:4].tolist() for x in y] for y in (native, ours)]
    return f"native {shown[0]}, emulated {shown[1]}"


def rows() -> dict[str, tuple[str, ...]]:
    return {row.name: row.spellings for row in TABLE.values()} | dict.fromkeys(OTHERS, ())


def faults(name: str, fmt: str) -> tuple[int, dict[tuple[str, int, str], str]]:
    """How many calls of an operation native code takes, and what is wrong, by form, position and kind."""
    found, calls = {}, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for form in forms_of(name, rows()[name]):
            for count in (1, 2, 3):
                if attempt(form.run, operands(count, torch.float32)) is None:
                    continue
                for position, kind in itertools.product(range(count), KINDS):
                    wrong = fault(form, count, position, kind, fmt)
                    calls += wrong is not None
                    if wrong:
                        found[(form.name, position, kind)] = wrong
    return calls, found


def EXCEPTIONS(name: str, form: str, position: int, kind: str) -> bool:
    """Whether a call is known to differ from native code, for a reason that docs/parity.md gives.

    A number of Python is taken as it is by `pow`, and before a tensor, as in `torch.mul(257, x)`; a loss of several
    steps is rounded at its border.
    """
    if name in ("pow", "_foreach_pow"):
        return kind in ("int", "float")
    if name == "mul":
        return position == 0 and kind in ("int", "float")
    return name == "margin_ranking_loss" and kind == "0-d float32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=NATIVE, default="bf16")
    parser.add_argument("--only", nargs="*", help="names of operations")
    options = parser.parse_args()
    torch.set_num_threads(1)
    calls, wrong, without = 0, {}, []
    for name in options.only or rows():
        count, found = faults(name, options.format)
        calls += count
        if not count:
            without.append(name)
        if found:
            wrong[name] = {" | ".join(map(str, key)): text for key, text in found.items()}
    print(json.dumps({"calls": calls, "without a call": without, "faults": wrong}, indent=1))


if __name__ == "__main__":
    main()
