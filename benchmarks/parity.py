"""Native code in bfloat16 and float16 beside the emulation: how far is each from float32, and where do they differ?

    python benchmarks/parity.py [--tokens 1024] [--only errors operations training] [--write]

prints the tables of docs/parity.md, and with --write puts them there. For small models with random weights:
errors: the relative error of the outputs against float32, natively (`model.to(torch.bfloat16)`) and emulated
(`fpsim.quantize(model, "bf16")`), and the first module whose output differs between the two.
operations: each operation of the native run is repeated by the emulation, and in float64, with the same operands.
training: losses over 100 steps.
Needs pip install -e '.[compare]', and for the UNet pip install diffusers.
"""

from __future__ import annotations

import argparse
import copy
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from parity_models import Subject, subjects
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

import fpsim

PAGE = Path(__file__).parent.parent / "docs" / "parity.md"
NATIVE = {"bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 100
SHOWN = (1, 10, 30, 100)
TRAINED_TOKENS = 64
# One rounding is at most half a unit away; float32 inside adds to it what its own sum loses.
ONE_ROUNDING = 0.55
# What draws numbers, or is asked for a dtype: repeated with float64 operands it would be something else.
LEFT_OUT = ("to", "type", "type_as", "float", "dropout", "__get__", "__set__", "empty_like", "__setitem__")

NOT_INSTALLED = "not measured: diffusers is not installed"

Table = list[tuple[str, ...]]


def units(reference: Tensor, fmt: str) -> Tensor:
    """The unit in the last place of each element of `reference`; of small ones, that of 1/16 of the largest.

    Below that a sum has lost digits of its terms, and its unit says nothing of the rounding. Masks are not counted.
    """
    is_number = reference.abs() < fpsim.as_format(fmt).largest / 2
    largest = reference.where(is_number, 0).abs().amax() if reference.numel() else reference.sum()
    exponent = torch.frexp(torch.maximum(reference.abs(), largest / 16)).exponent - 1
    digits = fpsim.as_format(fmt).mantissa_bits
    return torch.exp2((exponent - digits).double()).clamp(fpsim.as_format(fmt).smallest)


def distance(x: Tensor, reference: Tensor, fmt: str) -> float:
    """The largest distance of finite numbers, in units in the last place."""
    x, reference = x.double(), reference.double()
    far = ((x - reference) / units(reference, fmt)).abs()
    return float(far.where(far.isfinite(), 0).amax()) if far.numel() else 0.0


# errors


def outputs_of(subject: Subject, model: nn.Module, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """The model's output, and the first tensor that each leaf module gives, in the order in which they ran."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, args: Any, out: Any) -> None:
        first = out[0] if isinstance(out, tuple) else out
        if isinstance(first, Tensor) and first.is_floating_point():
            outputs.setdefault(name, first.float())

    leaves = ((name, m) for name, m in model.named_modules() if next(m.children(), None) is None)
    handles = [m.register_forward_hook(functools.partial(keep, name)) for name, m in leaves]
    out = output_of(subject, model, dtype).float()
    for handle in handles:
        handle.remove()
    return out, outputs


def output_of(subject: Subject, model: nn.Module, dtype: torch.dtype) -> Tensor:
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in subject.inputs.items()}
    out = model(**inputs)
    return out.logits if "logits" in out else out.sample  # type: ignore[no-any-return]


@torch.no_grad()
def errors(tokens: int) -> Iterator[Table]:
    rows: Table = [("model", "format", "native", "emulated", "ratio", "first module that differs", "ulps")]
    for subject in subjects(tokens):
        if isinstance(subject, str):
            rows.append((subject, NOT_INSTALLED, *[""] * 5))
            continue
        model = subject.model.eval()
        exact, _ = outputs_of(subject, model, torch.float32)
        for fmt, dtype in NATIVE.items():
            native, of_native = outputs_of(subject, copy.deepcopy(model).to(dtype), dtype)
            emulated, of_emulated = outputs_of(subject, fpsim.quantize(model, fmt), torch.float32)
            far = [float((x - exact).norm() / exact.norm()) for x in (native, emulated)]
            name = next((k for k in of_native if not torch.equal(of_native[k], of_emulated[k])), None)
            by = "" if name is None else f"{distance(of_emulated[name], of_native[name], fmt):.2g}"
            first = "none" if name is None else name + rounded_buffers(model.get_submodule(name), dtype)
            ratio = f"{far[1] / far[0]:.2f}"
            rows.append((subject.name, fmt, f"{far[0]:.5f}", f"{far[1]:.5f}", ratio, first, by))
    yield rows


def rounded_buffers(module: nn.Module, dtype: torch.dtype) -> str:
    """The buffers of a module that `module.to(dtype)` changes, in words."""
    names = [k for k, b in module.named_buffers() if b.is_floating_point() and not torch.equal(b, b.to(dtype).float())]
    return f" (its {', '.join(names)} rounded)" if names else ""


# operations


class Difference(NamedTuple):
    """An operation that gave native code something else than the emulation, with the same operands."""

    name: str
    module: str
    elements: int
    differing: int
    apart: float
    native: float
    emulated: float

    @property
    def why(self) -> str:
        if self.native > ONE_ROUNDING >= self.emulated:
            return "the native kernel rounds inside"
        if self.emulated > ONE_ROUNDING:
            return "the emulation rounds inside" if self.native <= ONE_ROUNDING else "both round inside"
        return "one rounding each, of float32 results that differ in the last bits"


class Operations(TorchFunctionMode):
    """Repeats each operation of native code with the same operands: emulated, and in float64."""

    def __init__(self, fmt: str, modules: list[str]) -> None:
        super().__init__()
        self.fmt, self.dtype, self.modules = fmt, NATIVE[fmt], modules
        self.elements: dict[str, int] = {}
        self.differences: list[Difference] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in LEFT_OUT or kwargs.get("dtype") is not None:
            return func(*args, **kwargs)
        in_float64, in_float32 = (self._copies(kind, (args, kwargs)) for kind in (torch.float64, torch.float32))
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and out.dtype is self.dtype:
            exact = func(*in_float64[0], **in_float64[1])
            with fpsim.emulate(self.fmt):
                wide = tree_map_only(_Wide, lambda x: x.values.float(), in_float32)
                emulated = func(*wide[0], **wide[1])
            self._compare(name.strip("_"), out, emulated.detach(), exact)
        return out

    def _copies(self, dtype: torch.dtype, tree: Any) -> Any:
        """The arguments with copies of their tensors, since the operation may write to them."""

        def of(x: Tensor) -> Any:
            if not x.is_floating_point():
                return x.clone()
            is_wide = dtype is torch.float32 and x.dtype is torch.float32
            made = x.detach().to(dtype, copy=True)
            return _Wide(made) if is_wide else made

        return tree_map_only(Tensor, of, tree)

    def _compare(self, name: str, native: Tensor, emulated: Tensor, exact: Tensor) -> None:
        self.elements[name] = self.elements.get(name, 0) + native.numel()
        if not torch.equal(emulated.to(self.dtype).float(), emulated):
            raise ArithmeticError(f"The emulated {name} gave numbers that are not in {self.fmt}.")
        differing = int((native.float() != emulated).sum())
        if differing:
            apart = distance(emulated, native, self.fmt)
            far = [distance(x, exact, self.fmt) for x in (native, emulated)]
            self.differences.append(Difference(name, self.modules[-1], native.numel(), differing, apart, *far))


@dataclass
class _Wide:
    """A tensor that is float32 in native code too."""

    values: Tensor


@torch.no_grad()
def repeated_operations(subject: Subject, fmt: str) -> Operations:
    """The operations of one native run, each repeated with its own operands."""
    model, modules = copy.deepcopy(subject.model).eval().to(NATIVE[fmt]), ["the top level"]

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        modules.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, args, name=name: modules.append(name or "the top level"))
        module.register_forward_hook(leave)
    with Operations(fmt, modules) as operations:
        output_of(subject, model, NATIVE[fmt])
    return operations


def operations(tokens: int) -> Iterator[Table]:
    """The first operation of each model that differs; all that differ; all that do not."""
    firsts: Table = [("model", "format", "module", "operation", "numbers that differ", "ulps", "why")]
    elements: Counter[tuple[str, str]] = Counter()
    differences: dict[tuple[str, str], list[tuple[str, Difference]]] = {}
    for subject in subjects(tokens):
        if isinstance(subject, str):
            firsts.append((subject, NOT_INSTALLED, *[""] * 5))
            continue
        for fmt in NATIVE:
            repeated = repeated_operations(subject, fmt)
            elements.update({(fmt, name): n for name, n in repeated.elements.items()})
            for d in repeated.differences:
                differences.setdefault((fmt, d.name), []).append((subject.name, d))
            if not repeated.differences:
                firsts.append((subject.name, fmt, "none", *[""] * 4))
                continue
            d = repeated.differences[0]
            firsts.append(
                (subject.name, fmt, d.module, d.name, f"{d.differing} of {d.elements}", f"{d.apart:.2g}", d.why)
            )
    yield firsts
    yield differing_operations(differences, elements)
    same: Table = [("format", "operations that never differ")]
    for fmt in NATIVE:
        same.append((fmt, ", ".join(sorted(name for f, name in elements if f == fmt and (f, name) not in differences))))
    yield same


def differing_operations(
    differences: dict[tuple[str, str], list[tuple[str, Difference]]], elements: Counter[tuple[str, str]]
) -> Table:
    rows: Table = [("operation", "format", "models", "share", "ulps", "native, exact", "emulated, exact", "why")]
    for (fmt, name), by_model in sorted(differences.items(), key=lambda item: item[0][::-1]):
        models = ", ".join(dict.fromkeys(model for model, _ in by_model))
        share = sum(d.differing for _, d in by_model) / elements[fmt, name]
        worst = max((d for _, d in by_model), key=lambda d: max(d.native, d.emulated))
        apart = max(d.apart for _, d in by_model)
        numbers = (f"{share:.1e}", f"{apart:.2g}", f"{worst.native:.3f}", f"{worst.emulated:.3f}")
        rows.append((name, fmt, models, *numbers, worst.why))
    return rows


# training


def training(tokens: int) -> Iterator[Table]:
    rows: Table = [("model", "run", *(f"step {n}" for n in SHOWN), "largest distance from native")]
    for subject in subjects(min(tokens, TRAINED_TOKENS)):
        if isinstance(subject, str):
            rows.append((subject, NOT_INSTALLED, *[""] * (len(SHOWN) + 1)))
            continue
        exact = losses(subject, copy.deepcopy(subject.model), torch.float32)
        rows.append((subject.name, "float32", *shown(exact), ""))
        for fmt, dtype in NATIVE.items():
            native = losses(subject, copy.deepcopy(subject.model), dtype)
            emulated = losses(subject, fpsim.quantize(subject.model, fmt), torch.float32)
            rows.append((subject.name, f"{fmt}, native", *shown(native), f"float32 {apart(exact, native)}"))
            rows.append((subject.name, f"{fmt}, emulated", *shown(emulated), apart(emulated, native)))
    yield rows


def shown(values: list[float]) -> list[str]:
    return [f"{values[n - 1]:.4f}" for n in SHOWN]


def apart(a: list[float], b: list[float]) -> str:
    """The largest distance of two losses at one step."""
    return f"{max(abs(x - y) for x, y in zip(a, b, strict=True)):.4f}"


def losses(subject: Subject, model: nn.Module, dtype: torch.dtype) -> list[float]:
    """The losses of steps of AdamW on one batch, without dropout, and with the weights kept in float32.

    In another dtype the model is cast from them before each step, and its gradients are cast back.
    """
    computing = model.eval() if dtype is torch.float32 else copy.deepcopy(model).eval().to(dtype)
    kept, used = list(model.parameters()), list(computing.parameters())
    optimizer, losses = torch.optim.AdamW(kept, lr=3e-3), []
    for _ in range(STEPS):
        out = output_of(subject, computing, dtype).float()
        if subject.target.is_floating_point():
            loss = F.mse_loss(out, subject.target)
        else:
            loss = F.cross_entropy(out.flatten(0, -2), subject.target.flatten())
        loss.backward()
        losses.append(loss.item())
        if computing is not model:
            for p, q in zip(kept, used, strict=True):
                p.grad, q.grad = None if q.grad is None else q.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        if computing is not model:
            with torch.no_grad():
                for p, q in zip(kept, used, strict=True):
                    q.copy_(p)
    return losses


# the page

SECTIONS: dict[str, Callable[[int], Iterator[Table]]] = {f.__name__: f for f in (errors, operations, training)}


def as_markdown(rows: Table) -> str:
    """A table, with columns of numbers to the right."""
    head, *body = rows
    is_number = [all(re.fullmatch(r"[-+.e\d]*", cell) for cell in column) for column in zip(*body, strict=True)]
    rule = ["---:" if it_is else "---" for it_is in is_number]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *body))


def write(section: str, text: str) -> None:
    """Put the tables of a section into the page, between its marks."""
    pattern = rf"(<!-- {section} -->\n).*?(<!-- end of {section} -->)"
    page, count = re.subn(pattern, lambda m: f"{m[1]}\n{text}\n\n{m[2]}", PAGE.read_text(), flags=re.DOTALL)
    if count != 1:
        raise ValueError(
            f"{PAGE} has no place for {section}. Put <!-- {section} --> and <!-- end of {section} --> there."
        )
    PAGE.write_text(page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the text models (default 1024)")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=[*SECTIONS], help="sections (default all)")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/parity.md")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # the order of sums is that of one thread
    for section in options.only:
        text = "\n\n".join(as_markdown(table) for table in SECTIONS[section](options.tokens))
        print(f"{text}\n", flush=True)
        if options.write:
            write(section, text)


if __name__ == "__main__":
    main()
