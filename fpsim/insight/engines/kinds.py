"""What kind of difference a module's own code has: formula, rounding point, format, accumulator, state or weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fpsim.insight.engines.places import MARGIN, TINY, Place, floats_of, relative_of
from fpsim.insight.engines.sides import Pair, cloned
from fpsim.models.installed import emulated_forward, emulated_forwards
from fpsim.models.quantize import dequantize
from fpsim.policies.policy import Policy
from fpsim.policies.products import PRODUCTS, Products
from fpsim.torch_internals import map_leaves
from fpsim.torch_modes import without_torch_function

__all__ = ["KINDS", "kind_of"]

FORMULA, ROUNDING, FORMAT = "formula", "rounding point", "format or scale of an operand"
ORDER, STATE, WEIGHTS = "accumulator or order", "cache or state", "weights"
KINDS = (FORMULA, ROUNDING, FORMAT, ORDER, STATE, WEIGHTS)
OF_FLOAT64 = 1e-9  # a relative difference from which on two computations in float64 are not the same formula
COARSE = 2.0**-6  # an error from which on something has few bits
ALIKE = 0.6  # the correlation from which on a difference follows its input smoothly, as a formula's does


def kind_of(pair: Pair, place: Place, valid: Tensor) -> tuple[str, str]:
    """The kind of a place's difference, and a line that says what was found."""
    a, b = (pair.doors[side][place.name].module for side in "ab")
    found = _of_tensors(pair, place, valid, a, b)
    if found is not None:
        return found
    found = _of_policies(a, b)
    if found is not None:
        return found
    return _of_code(pair, place, valid)


def _of_tensors(pair: Pair, place: Place, valid: Tensor, a: nn.Module, b: nn.Module) -> tuple[str, str] | None:
    """Weights or state, where the difference vanishes with a's."""
    for kind, tensors in ((WEIGHTS, nn.Module.named_parameters), (STATE, nn.Module.named_buffers)):
        mine, others = (dict(tensors(m, recurse=False)) for m in (a, b))
        changed = [
            n for n, x in mine.items() if n in others and x.shape == others[n].shape and not _equal(x, others[n])
        ]
        if not changed:
            continue
        kept = {n: others[n].detach().clone() for n in changed}
        with torch.no_grad():
            try:
                for n in changed:
                    others[n].data.copy_(mine[n].data)
                left = _again(pair, place, valid)
            finally:
                for n, x in kept.items():
                    others[n].data.copy_(x)
        if left < max(place.local / 4, MARGIN * place.floor, TINY):
            far = max(
                float((mine[n].detach().double() - kept[n].double()).norm() / mine[n].detach().double().norm())
                for n in changed
            )
            words = f"{', '.join(changed)} {'differ' if len(changed) > 1 else 'differs'} by {far:.2g}"
            return kind, words + (_tied(pair, place, changed) if kind is WEIGHTS else "")
    return None


def _equal(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.double().nan_to_num(), y.double().nan_to_num())


def _tied(pair: Pair, place: Place, changed: list[str]) -> str:
    """Whether a weight is that of another module in one of the models alone."""
    shared = {}
    for side in "ab":
        mine = dict(pair.doors[side][place.name].module.named_parameters(recurse=False))
        shared[side] = [
            name
            for name, door in pair.doors[side].items()
            if name != place.name
            for p in door.module.parameters(recurse=False)
            if any(p is mine.get(n) for n in changed)
        ]
    for side, other in ("ab", "ba"):
        if shared[side] and not shared[other]:
            return f"; {side} ties it to {shared[side][0]}, {other} does not"
    return ""


def _again(pair: Pair, place: Place, valid: Tensor) -> float:
    """The difference of b's own code, as it is now."""
    results = []
    for side in "ab":
        torch.manual_seed(pair.seed)
        choice = (lambda n: "b" if n == place.name else "a") if side == "b" else (lambda n: "a")
        results.append(floats_of(pair.quietly(pair.doors[side][place.name], choice, cloned(place.inputs))))
    return relative_of(results[0], results[1], valid)


def policies_of(a: nn.Module, b: nn.Module) -> tuple[Policy, Policy] | None:
    """The policies of a module on both sides; None where neither is emulated."""
    mine, other = emulated_forward(a), emulated_forward(b)
    if mine is None and other is None:
        return None
    return tuple(Policy() if x is None or x.policy is None else x.policy for x in (mine, other))  # type: ignore[return-value]


def _of_policies(a: nn.Module, b: nn.Module) -> tuple[str, str] | None:
    both = policies_of(a, b)
    if both is None:
        return None
    parts = differences(*both)
    if not parts:
        return None
    kinds = [kind for kind, _ in parts]
    first = min(kinds, key=(STATE, ORDER, FORMAT, ROUNDING).index)
    return first, "; ".join(words for _, words in parts)


def differences(a: Policy, b: Policy) -> list[tuple[str, str]]:
    """The fields in which two policies of a module differ, each with its kind."""
    found = []
    for role, x, y in zip(("weight", "activation"), a.specs(), b.specs()):
        if x != y:
            kind = FORMAT if x is not None and y is not None else ROUNDING
            found.append((kind, f"{role}: {x or 'float32'} in a, {y or 'float32'} in b"))
    p, q = a.products or Products(), b.products or Products()
    for i, name in enumerate(PRODUCTS["fprop"]):
        of_a, of_b = p.fprop[i], q.fprop[i]
        if of_a != of_b:
            found.append((FORMAT, f"operand {name}: {of_a or 'as it is'} in a, {of_b or 'as it is'} in b"))
    if p.output != q.output:
        found.append((ROUNDING, f"output of products: {p.output or 'float32'} in a, {q.output or 'float32'} in b"))
    if p.specs.accumulators != q.specs.accumulators:
        found.append((ORDER, f"accumulator: {p.accumulator or 'fp32'} in a, {q.accumulator or 'fp32'} in b"))
    if p.attention != q.attention:
        found += _of_attention(p, q)
    if getattr(a, "cache", None) != getattr(b, "cache", None):
        found.append((STATE, f"cache: {a.cache or 'as it is'} in a, {b.cache or 'as it is'} in b"))
    if set(a.float32) != set(b.float32):
        found.append((ROUNDING, f"float32 operations: {', '.join(a.float32)} in a, {', '.join(b.float32)} in b"))
    return found


def _of_attention(p: Products, q: Products) -> list[tuple[str, str]]:
    if p.points is None or q.points is None:
        return [(FORMAT, f"attention: {p.attention or 'as it is'} in a, {q.attention or 'as it is'} in b")]
    found = []
    for f in fields(p.points):
        x, y = getattr(p.points, f.name), getattr(q.points, f.name)
        if x != y:
            is_order, is_operand = f.name in ("block_kv", "accumulator"), f.name in ("q", "k", "v", "p", "p_scale")
            kind = ORDER if is_order else FORMAT if is_operand else ROUNDING
            found.append((kind, f"attention's {f.name}: {x} in a, {y} in b"))
    return found


# Code that differs: in float64, and without casts


class _WithoutCasts(TorchFunctionMode):
    """Casts to floating dtypes give float64."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("half", "bfloat16", "float") and args and isinstance(args[0], Tensor):
            return args[0].double() if args[0].is_floating_point() else func(*args, **kwargs).double()
        changed = tuple(_wide(x) for x in args)
        if isinstance(kwargs.get("dtype"), torch.dtype):
            kwargs["dtype"] = _wide(kwargs["dtype"])
        if name in ("type_as", "to") and len(args) > 1 and isinstance(args[1], Tensor):
            is_float = args[1].is_floating_point()
            return args[0].double() if is_float else func(*args, **kwargs)
        out = func(*changed, **kwargs)
        return out.double() if isinstance(out, Tensor) and out.dtype in _NARROW and name not in _READS else out


_NARROW = (torch.float16, torch.bfloat16, torch.float32)
_READS = ("__get__",)


def _wide(x: Any) -> Any:
    return torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x


def _doubled(module: nn.Module) -> nn.Module:
    plain = dequantize(module) if any(True for _ in emulated_forwards(module)) else copy.deepcopy(module)
    for inner in plain.modules():
        vars(inner).pop("_compiled_call_impl", None)
    return plain.double()


def _of_code(pair: Pair, place: Place, valid: Tensor) -> tuple[str, str]:
    a, b = (pair.doors[side][place.name].module for side in "ab")
    far = corr = None
    with suppress(Exception):  # code that computes in no float64: then the size of the difference decides
        mine, other = _doubled(a), _doubled(b)
        for name, child in mine.named_children():
            if name in dict(other.named_children()):
                other.add_module(name, child)
        with torch.no_grad():
            for name, x in chain(mine.named_parameters(recurse=False), mine.named_buffers(recurse=False)):
                own = getattr(other, name, None)
                if isinstance(own, Tensor) and own.shape == x.shape:
                    own.copy_(x)  # that tensors differ was asked before

        def run(module: nn.Module, inputs: Any) -> list[Tensor]:
            args, kwargs = map_leaves(_as_double, cloned(inputs))
            torch.manual_seed(pair.seed)
            with torch.no_grad(), _WithoutCasts():
                return floats_of(module(*args, **kwargs))

        at = run(mine, place.inputs), run(other, place.inputs)
        far = relative_of(at[0], at[1], valid)
        if OF_FLOAT64 < far < math.inf:
            corr = _correlation(run, mine, other, place, at, min(4 * far, 0.3), valid)
    if far is not None and far > OF_FLOAT64:
        if corr is None or corr > ALIKE:
            return FORMULA, f"in float64 without casts they differ by {far:.2g} too"
        kind = FORMAT if far >= COARSE else ROUNDING
        return kind, f"its code rounds to few bits: {far:.2g} in float64 too, which does not follow the input smoothly"
    if far is None and place.local > 0.05:
        return FORMULA, f"its own code differs by {place.local:.2g}; it did not run in float64"
    if place.local <= 2.0**-18:
        return ORDER, f"equal in float64; {place.local:.2g} is that of sums in float32"
    return ROUNDING, f"equal in float64 without casts; {place.local:.2g} with them"


def _as_double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _correlation(
    run: Callable[[nn.Module, Any], list[Tensor]], a: nn.Module, b: nn.Module, place: Place, at: Any, size: float,
    valid: Tensor,
) -> float:  # fmt: skip
    """How alike the difference is at inputs that are a little off: a formula's stays, that of rounding does not."""
    generator = torch.Generator().manual_seed(0)

    def off(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.abs().max() > 1e30:
            return x
        return x * (1 + size * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device))

    with without_torch_function():
        inputs = map_leaves(off, cloned(place.inputs))
    near = run(a, inputs), run(b, inputs)
    pairs = zip(*at, *near, strict=True)
    products = squares = others = 0.0
    for a0, b0, a1, b1 in pairs:
        d0, d1 = b0 - a0, b1 - a1
        if d0.shape[: valid.dim()] == valid.shape:
            d0, d1 = d0[valid], d1[valid]
        known = d0.isfinite() & d1.isfinite()
        d0, d1 = d0[known], d1[known]
        products += float((d0 * d1).sum())
        squares += float((d0**2).sum())
        others += float((d1**2).sum())
    return products / math.sqrt(squares * others) if squares and others else 0.0
