"""Name how the own code of two modules differs: formula, rounding point, format, accumulator, state or weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fpsim.formats.blocks import BlockFormat
from fpsim.insight.engines.places import MARGIN, PRODUCTS_OF_TORCH, TINY, Place, floats_of, relative_of
from fpsim.insight.engines.remedies import changed_policies
from fpsim.insight.engines.sides import Pair, cloned
from fpsim.models.installed import emulated_forward, emulated_forwards
from fpsim.models.quantize import dequantize
from fpsim.policies.policy import Policy, describe_cached
from fpsim.policies.products import PRODUCTS, Products
from fpsim.tensors.spec import OwnFormat
from fpsim.torch_internals import map_leaves
from fpsim.torch_modes import without_torch_function

__all__ = ["KINDS", "STATE", "described", "has_scales_of_tensors", "kind_of", "policies_of"]

# Functions that return existing numbers in another shape.
_VIEWS = frozenset(
    "__get__ __getitem__ chunk clone contiguous detach expand expand_as flatten narrow permute repeat "
    "repeat_interleave reshape select split squeeze t transpose unbind unflatten unsqueeze view view_as".split()
)


class _Step(NamedTuple):
    name: str
    results: list[Tensor]


class _Steps(TorchFunctionMode):
    """Keeps the results of each torch function, except views, that is called while `is_asked()` is true."""

    def __init__(self, is_asked: Callable[[], bool]) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self._is_asked = is_asked

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if self._is_asked() and name not in _VIEWS and (results := floats_of(out)):
            self.steps.append(_Step(name.strip("_"), [x.detach().clone() for x in results]))
        return out


def first_step_apart(pair: Pair, place: Place, valid: Tensor) -> str:
    """Describe the first function of a place whose results differ between the sides; "" if none is found."""
    steps = []
    for side in "ab":
        mode = _Steps(lambda: pair.running == place.name)
        choice = (lambda n: "b" if n == place.name else "a") if side == "b" else (lambda n: "a")
        torch.manual_seed(pair.seed)
        pair.quietly(pair.doors[side][place.name], choice, cloned(place.inputs), lambda mode=mode: mode)
        steps.append(mode.steps)
    margin = max(MARGIN * place.floor, TINY)
    here, there = (_unknown(one, other, valid, margin) for one, other in (steps, steps[::-1]))
    if here and there and here[0].name == there[0].name:
        return f"first apart at {here[0].name}"
    words = [", ".join(step.name for step in some[:3]) for some in (here, there)]
    alone = [f"{side} alone computes {of}" for side, of in zip("ab", words, strict=True) if of]
    return "first apart: " + " and ".join(alone) if alone else ""


def _unknown(steps: list[_Step], others: list[_Step], valid: Tensor, margin: float) -> list[_Step]:
    """Return, in order, the steps with a result that is not among the results of the other side's steps."""

    def is_there(x: Tensor) -> bool:
        same = (y for step in others for y in step.results if y.shape == x.shape)
        return any(relative_of([x], [y], valid) <= margin for y in same)

    return [step for step in steps if not all(map(is_there, step.results))]


FORMULA, ROUNDING, FORMAT = "formula", "rounding point", "format or scale of an operand"
ORDER, STATE, WEIGHTS = "accumulator or order", "cache or state", "weights"
KINDS = (FORMULA, ROUNDING, FORMAT, ORDER, STATE, WEIGHTS)
# Two computations in a dtype count as the same formula if their relative difference is at most this number.
EXACT = {torch.float64: 1e-9, torch.float32: 2.0**-16}
FEW_BITS = 0.005  # a larger error than one rounding to 8 bits of significand makes
COARSE = 2.0**-6  # from this error on, something is rounded to few bits
NATIVE = {  # the policy that stands for a module without emulation, by the dtype of its parameters
    dtype: Policy(weight=word, activation=word) for dtype, word in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"))
}
ALIKE = 0.6  # above this correlation a difference follows its input smoothly, as that of two formulas does


def kind_of(pair: Pair, place: Place, valid: Tensor) -> tuple[str, str]:
    """Return the kind of a place's difference, and a line that says how it was found."""
    a, b = (pair.doors[side][place.name].module for side in "ab")
    found = _of_tensors(pair, place, valid, a, b)
    if found is not None:
        return found
    found = _of_policies(pair, place, valid)
    if found is not None:
        return found
    kind, words = _of_code(pair, place, valid)
    apart = first_step_apart(pair, place, valid)
    words += f"; {apart}" if apart else ""
    both = policies_of(pair, place.name)
    if kind is ROUNDING and both is not None and any(both[0].products.fprop if both[0].products else ()):
        return FORMAT, f"the same formats, whose scales see other numbers in other calls: {place.local:.2g}"
    return kind, words


def _of_tensors(pair: Pair, place: Place, valid: Tensor, a: nn.Module, b: nn.Module) -> tuple[str, str] | None:
    """Return the kind, weights or state, with details, if the difference vanishes once b has a's tensors; else None."""
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
    """Describe a tie: only one of the models shares this weight with another module; "" otherwise."""
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
    """Return the relative difference between the results of a's and b's own code, with both modules as they are now."""
    results = []
    for side in "ab":
        torch.manual_seed(pair.seed)
        choice = (lambda n: "b" if n == place.name else "a") if side == "b" else (lambda n: "a")
        results.append(floats_of(pair.quietly(pair.doors[side][place.name], choice, cloned(place.inputs))))
    return relative_of(results[0], results[1], valid)


def policies_of(pair: Pair, name: str) -> tuple[Policy, Policy] | None:
    """Return the policies of a module on both sides; None if neither is emulated.

    If one side is emulated and the other is native bfloat16 or float16, the native one has the policy of its dtype.
    """
    modules = [pair.doors[side][name].module for side in "ab"]
    found = [emulated_forward(module) for module in modules]
    if found == [None, None]:
        return None
    policies = []
    for side, module, emulated in zip("ab", modules, found, strict=True):
        dtype = next((p.dtype for p in module.parameters(recurse=False)), pair.dtypes[side])
        native = NATIVE.get(dtype, Policy()) if emulated is None else Policy()
        policies.append(native if emulated is None or emulated.policy is None else emulated.policy)
    return policies[0], policies[1]


def _of_policies(pair: Pair, place: Place, valid: Tensor) -> tuple[str, str] | None:
    both = policies_of(pair, place.name)
    if both is None:
        return None
    parts = differences(*both)
    others = [part for part in parts if part[0] is not STATE]
    if others and others != parts and not _stores(pair, place, valid, both[0]):
        parts = others
    if not parts:
        return None
    kinds = [kind for kind, _ in parts]
    first = min(kinds, key=(STATE, ORDER, FORMAT, ROUNDING).index)
    return first, "; ".join(words for _, words in parts)


def _stores(pair: Pair, place: Place, valid: Tensor, of_a: Policy) -> bool:
    """Return True if b's own code computes other results here once its policy has the cache format of a's policy.

    All modules have the policy's cache, but only a few of them store keys and values.
    """
    wanted = emulated_forward(pair.doors["b"][place.name].module)
    if wanted is None:
        return False
    with changed_policies(
        pair.models["b"], lambda name, own: replace(own, cache=of_a.cache) if name == wanted.name else own
    ):
        return _again(pair, place, valid) != place.local


def differences(a: Policy, b: Policy) -> list[tuple[str, str]]:
    """Return the fields in which two policies of a module differ, each with its kind."""
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
    if a.cached != b.cached:
        mine, other = (describe_cached(p.cached) if p.cached else "as it is" for p in (a, b))
        found.append((STATE, f"cache: {mine} in a, {other} in b"))
    if set(a.float32) != set(b.float32):
        found.append((ROUNDING, f"float32 operations: {', '.join(a.float32)} in a, {', '.join(b.float32)} in b"))
    if a.fused != b.fused:
        found.append((ROUNDING, f"the module rounds once in {'a' if a.fused else 'b'} alone"))
    for name in sorted(n for n in {**a.kernels, **b.kernels} if a.kernels.get(n) != b.kernels.get(n)):
        found.append((ROUNDING, f"{name} has another kernel"))
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


# Code that differs: run in float64, without the functions that round


_ROUND = ("round", "floor", "ceil", "trunc", "fix", "rint")
_CLAMP = ("clamp", "clip", "hardtanh", "clamp_", "clip_")
_TO_FLOAT = ("half", "bfloat16", "float")
_TO_CODES = ("char", "byte")


class _Exact(TorchFunctionMode):
    """Runs code in one wide dtype, without rounding: casts to other floats or to codes of few bits return this dtype.

    clamps: whether upper bounds of clamps are applied. Quantisers have upper bounds, and some formulas do too.
    rounds: whether the code rounds to few bits, by a cast to float8 or to bytes, or a function such as torch.round.
    products: the number of matrix products. has_operands: whether any product came after a rounding to few bits.
    """

    def __init__(self, wide: torch.dtype, clamps: bool = True) -> None:
        super().__init__()
        self.wide, self.clamps, self.rounds, self.products, self.has_operands = wide, clamps, False, 0, False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func in PRODUCTS_OF_TORCH or func is F.scaled_dot_product_attention:
            self.products += 1
            self.has_operands |= self.rounds
        x = args[0] if args and isinstance(args[0], Tensor) else None
        is_float = x is not None and x.is_floating_point()
        if x is not None and name in (*_TO_FLOAT, *_TO_CODES) and (is_float or name in _TO_FLOAT):
            self.rounds |= name in _TO_CODES
            return x.to(self.wide)
        if is_float and name.rstrip("_") in _ROUND:
            self.rounds = True
            return x
        if is_float and name in _CLAMP and not self.clamps and (len(args) > 2 or "max" in kwargs):
            return x  # a clamp with only a lower bound stays: it keeps a scale from being zero
        if name in ("type_as", "to") and len(args) > 1 and isinstance(args[1], Tensor):
            return x.to(self.wide) if args[1].is_floating_point() else func(*args, **kwargs)  # type: ignore[union-attr]
        changed = tuple(self._widened(y, is_float) for y in args)
        if isinstance(kwargs.get("dtype"), torch.dtype):
            kwargs["dtype"] = self._widened(kwargs["dtype"], is_float)
        out = func(*changed, **kwargs)
        is_narrow = isinstance(out, Tensor) and out.is_floating_point() and out.dtype is not self.wide
        return out.to(self.wide) if is_narrow and name != "__get__" else out

    def _widened(self, x: Any, is_float: bool) -> Any:
        """Replace a dtype of floats, or of codes of floats, by the wide dtype; return any other value as it is."""
        if not isinstance(x, torch.dtype):
            return x
        is_codes = is_float and x in (torch.int8, torch.uint8)
        self.rounds |= is_codes or (x.is_floating_point and x.itemsize == 1)
        return self.wide if x.is_floating_point or is_codes else x


def _widened(module: nn.Module, wide: torch.dtype) -> nn.Module:
    plain = dequantize(module) if any(True for _ in emulated_forwards(module)) else copy.deepcopy(module)
    for inner in plain.modules():
        vars(inner).pop("_compiled_call_impl", None)
    return plain.to(wide)


class _Codes:
    """The own code of both sides in a wide dtype; both have a's inner modules and a's tensors."""

    def __init__(self, pair: Pair, place: Place, valid: Tensor, wide: torch.dtype) -> None:
        self._pair, self._place, self._valid, self.wide = pair, place, valid, wide
        mine, other = (_widened(pair.doors[side][place.name].module, wide) for side in "ab")
        for name, child in mine.named_children():
            if name in dict(other.named_children()):
                other.add_module(name, child)
        with torch.no_grad():
            for name, x in chain(mine.named_parameters(recurse=False), mine.named_buffers(recurse=False)):
                own = getattr(other, name, None)
                if isinstance(own, Tensor) and own.shape == x.shape:
                    own.copy_(x)  # `_of_tensors` has asked before whether the tensors make the difference
        self._modules = mine, other
        self.rounds = self.has_operands = False  # whether either side's code rounds to few bits, also before a product
        self.products: list[int] = []  # the number of matrix products of each side

    def outputs(self, inputs: Any, clamps: bool = True) -> tuple[list[Tensor], list[Tensor]]:
        found = []
        self.products = []
        for module in self._modules:
            args, kwargs = map_leaves(self._wide, cloned(inputs))
            torch.manual_seed(self._pair.seed)
            mode = _Exact(self.wide, clamps)
            with torch.no_grad(), mode:
                found.append(floats_of(module(*args, **kwargs)))
            self.rounds |= mode.rounds
            self.has_operands |= mode.has_operands
            self.products.append(mode.products)
        return found[0], found[1]

    def difference(self, clamps: bool = True) -> float:
        return relative_of(*self.outputs(self._place.inputs, clamps), self._valid)

    def _wide(self, x: Any) -> Any:
        return x.to(self.wide) if isinstance(x, Tensor) and x.is_floating_point() else x

    def follows(self, size: float) -> float:
        """Return the correlation of the two sides' difference at the inputs with their difference at inputs near these.

        It is near 1 if the formulas differ, and near 0 if only roundings differ.
        """
        generator = torch.Generator().manual_seed(0)

        def off(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.is_floating_point() or x.abs().max() > 1e30:
                return x
            return x * (1 + size * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device))

        with without_torch_function():
            inputs = map_leaves(off, cloned(self._place.inputs))
        valid = self._valid
        products = squares = others = 0.0
        for a0, b0, a1, b1 in zip(*self.outputs(self._place.inputs), *self.outputs(inputs), strict=True):
            d0, d1 = b0 - a0, b1 - a1
            if d0.shape[: valid.dim()] == valid.shape:
                d0, d1 = d0[valid], d1[valid]
            known = d0.isfinite() & d1.isfinite()
            d0, d1 = d0[known], d1[known]
            products += float((d0 * d1).sum())
            squares += float((d0**2).sum())
            others += float((d1**2).sum())
        return products / math.sqrt(squares * others) if squares and others else 0.0


def _of_code(pair: Pair, place: Place, valid: Tensor) -> tuple[str, str]:
    for wide, least in EXACT.items():
        with suppress(Exception):  # some code does not run in float64, such as grouped products of experts
            return _of_codes(_Codes(pair, place, valid, wide), place, least)
    kind = FORMULA if place.local > COARSE else ROUNDING
    return kind, f"its own code differs by {place.local:.2g}, and ran in no wider dtype"


def _of_codes(codes: _Codes, place: Place, least: float) -> tuple[str, str]:
    where = f"in {str(codes.wide).removeprefix('torch.')} without casts"
    far = codes.difference()
    if far <= least:
        if codes.has_operands and place.local > FEW_BITS:
            return FORMAT, f"equal {where} and roundings; {place.local:.2g} with them, to few bits"
        if codes.products[0] != codes.products[1]:
            return ORDER, f"equal {where}, in {codes.products[0]} products in a and {codes.products[1]} in b"
        if place.local <= 2.0**-18:
            return ORDER, f"equal {where}; {place.local:.2g} is that of sums in float32"
        return ROUNDING, f"equal {where}; {place.local:.2g} with them"
    if codes.rounds and codes.difference(clamps=False) <= least:
        return FORMAT, f"equal {where}, roundings and bounds; {place.local:.2g} with them, to few bits"
    # A mode cannot see a rounding inside of a kernel, but the error of the rounding does not follow the input smoothly.
    if not codes.rounds and math.isfinite(far) and codes.follows(min(4 * far, 0.1)) <= ALIKE:
        kind = FORMAT if far >= COARSE else ROUNDING
        return kind, f"its code rounds: {far:.2g} {where} too, which does not follow the input smoothly"
    return FORMULA, f"they differ by {far:.2g} {where} too"


def described(model: nn.Module) -> str:
    """Return the class of a model with its policy, or with its dtype if it has none."""
    policies = [emulated.policy for _, emulated in emulated_forwards(model)]
    if policies:
        words = str(policies[0])
        return f"{type(model).__name__}, {words if len(words) < 100 else words[:97] + '...'}"
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    return f"{type(model).__name__}, {str(dtype).removeprefix('torch.')}"


def has_scales_of_tensors(model: nn.Module) -> bool:
    """Return True if the scale of any operand of a product depends on the whole batch."""
    for _, emulated in emulated_forwards(model):
        products = None if emulated.policy is None else emulated.policy.products
        for operand in () if products is None else products.fprop:
            fmt = None if operand is None else operand.fmt  # type: ignore[union-attr]
            if isinstance(fmt, OwnFormat):
                return True
            if not isinstance(fmt, BlockFormat):
                continue
            if fmt.block == "tensor" or fmt.tensor_scale is not None or fmt.tile[0] != 1:
                return True
    return False
