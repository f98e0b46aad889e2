"""Rounding as expressions over bit patterns, which a compiler fuses with the code that computes the numbers.

The kernels are opaque to a compiler. This module writes the same integer steps over whole tensors of bit patterns. The
same code serves torch and inductor, whose operations have torch's names. `tests/fpsim/tensors/test_expressions.py`
compares its results with the kernels bit for bit. Roundings without an expression are computed by the kernels, in an
operator that is not fused.
"""

from __future__ import annotations

import zlib
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fpsim.kernels import core
from fpsim.kernels.codebooks import any_plan
from fpsim.kernels.core import (
    BINARY32,
    CARRYING,
    DOWN,
    FIXED,
    FLAT,
    GAP,
    GRID,
    NEAREST_AWAY,
    NEAREST_EVEN,
    STOCHASTIC,
    STOCHASTIC_B,
    STOCHASTIC_C_TIES_TO_ODD,
    STOCHASTIC_C_TO_ODD,
    TO_ODD,
    UNSIGNED_ZERO_GRID,
    UP,
    Numbers,
    Plan,
    draws_noise,
)
from fpsim.kernels.round import Masks
from fpsim.tensors.autograd import apply_operator, words_of
from fpsim.tensors.launch import masks_of, round_memory_
from fpsim.tensors.noise import new_compiled_key
from fpsim.tensors.spec import RoundingSpec, container_width
from fpsim.torch_internals import fuse_in_inductor, is_traced

__all__ = ["round_by_expression", "round_here_", "round_traced"]

_SIGN = -(1 << 31)
_INFINITY = BINARY32.bits(float("inf"))
_FRACTION = (1 << BINARY32.mantissa_bits) - 1
_IMPLICIT = _FRACTION + 1


def _signed(bits: int) -> int:
    return bits - (1 << 32) if bits >= 1 << 31 else bits


class Patterns:
    """Rounding of float32 bit patterns, held as int32, in the steps of `core.make_round`.

    m: torch, or inductor's operations, which have the same names.
    constant: a function that turns an integer into an operand.
    as_float, as_bits: functions that view the same 32 bits as float32 and as int32.
    """

    def __init__(self, m: Any, constant: Any, as_float: Any, as_bits: Any) -> None:
        self.m, self.constant, self.as_float, self.as_bits = m, constant, as_float, as_bits

    def rounded(self, u: Any, noise: Any, rule: int, shape: int, numbers: list[int], masks: tuple[int, bool]) -> Any:
        """Return the rounded patterns.

        u: the patterns. noise: as many random patterns for a stochastic rule, else None.
        rule, shape, numbers: the fields of a Plan of 32 bits.
        masks: a magnitude that stays as it is (0 for none), and whether minus infinity stays.
        """
        m, c = self.m, self.constant
        n = Numbers._make(map(_signed, numbers))
        magnitude = u & c(~_SIGN)
        negative = u < c(0)
        # With this limit, no sum overflows int32. A NaN becomes infinity here, and is put back below.
        a = m.minimum(magnitude, c(_INFINITY))
        if draws_noise(rule):
            noise = self._drawn(noise, rule, n.used)
        # Rounding to nearest even has a faster path for subnormals than `_grid`, which computes the spacing of each
        # element.
        if rule == NEAREST_EVEN and shape in (GRID, UNSIGNED_ZERO_GRID):
            subnormal = a < c(n.origin + (n.ulp_shift << 23))
            flat = self._flat(a, negative, None, rule, n)
            r = m.where(subnormal, self._subnormal_nearest(a, n.smallest), flat)
        elif shape in (GRID, UNSIGNED_ZERO_GRID, FIXED):
            r = self._grid(a, negative, noise, rule, n)
        else:
            r = self._flat(a, negative, noise, rule, n)
            if shape == GAP:
                r = m.where(a < c(n.smallest), self._gap(a, negative, rule, n.smallest), r)
        r = self._limited(r, a, negative, rule, shape, n)
        sign = u & c(_SIGN)
        if shape in (GAP, UNSIGNED_ZERO_GRID, FIXED) and n.zero_sign == 0:
            sign = m.where(r == c(0), c(0), sign)
        r = m.where(magnitude > c(_INFINITY), magnitude, r) | sign
        if masks[0]:
            r = m.where(magnitude == c(masks[0]), u, r)
        return m.where(u == c(_signed(BINARY32.bits(-torch.inf))), u, r) if masks[1] else r

    # For AVX2, inductor of torch 2.13 compiles !=, <=, >= and logical_not of int32 to their negation: only <, > and ==
    # are right (`test_inductor_has_the_bits_of_the_kernels_on_other_processors`).

    def _differ(self, a: Any, b: Any) -> Any:
        """Return whether patterns differ, without !=."""
        return self.m.logical_or(a < b, a > b)

    def _not(self, mask: Any) -> Any:
        """Return the negation of a mask, without logical_not."""
        return self.m.where(mask, self.constant(0), self.constant(1)) > self.constant(0)

    def _drawn(self, noise: Any, rule: int, used: int) -> Any:
        m, c = self.m, self.constant
        bits = noise & c(used)
        if rule == STOCHASTIC:
            return bits
        last, half = -used, -used >> 1
        if rule == STOCHASTIC_B:
            return bits | c(half)
        odd = self._differ(bits & c(_signed(last)), c(0))
        if rule == STOCHASTIC_C_TO_ODD:
            return m.where(odd, bits | c(last - 1), bits)
        of_odd, of_even = (half, half - 1) if rule == STOCHASTIC_C_TIES_TO_ODD else (half - 1, half)
        return bits | m.where(odd, c(of_odd), c(of_even))

    def _limited(self, r: Any, a: Any, negative: Any, rule: int, shape: int, n: Numbers) -> Any:
        """Replace magnitudes beyond the largest value as the rule says."""
        m, c = self.m, self.constant
        if shape == FIXED:
            return m.minimum(r, m.where(negative, c(n.lowest), c(n.largest)))
        beyond = c(n.overflow)
        if rule not in (NEAREST_EVEN, NEAREST_AWAY) and not draws_noise(rule) and n.overflow != n.largest:
            away = a > c(_INFINITY - 1)
            if rule in (UP, DOWN):
                away = m.logical_or(away, negative if rule == DOWN else self._not(negative))
            beyond = m.where(away, c(n.overflow), c(n.largest))
        return m.where(r > c(n.largest), beyond, r)

    def _addend(self, ulp: Any, odd: Any, negative: Any, rule: int) -> Any:
        m, c = self.m, self.constant
        if rule == NEAREST_EVEN:
            half = m.bitwise_right_shift(ulp, c(1))
            return m.where(odd, half, half - c(1))
        if rule == NEAREST_AWAY:
            return m.bitwise_right_shift(ulp, c(1))
        if rule in (UP, DOWN):
            return m.where(negative, *((c(0), ulp - c(1)) if rule == UP else (ulp - c(1), c(0))))
        return m.where(odd, c(0), ulp - c(1)) if rule == TO_ODD else c(0)

    def _flat(self, a: Any, negative: Any, noise: Any, rule: int, n: Numbers) -> Any:
        m, c = self.m, self.constant
        ulp = 1 << (31 - n.ulp_shift)
        if draws_noise(rule):
            added = m.bitwise_right_shift(noise, c(n.ulp_shift + 1)) & c(ulp - 1)
        else:
            odd = c(1) == c(1) if n.odd else self._differ(a & c(ulp), c(0))
            added = self._addend(c(ulp), odd, negative, rule)
        return (a + added) & c(-ulp)

    def _subnormal_nearest(self, a: Any, smallest: int) -> Any:
        """Round to multiples of `smallest`, ties to even: add and subtract 2^23 * `smallest`, which has this ulp."""
        # The float32 addition of the processor rounds here. No compiler can fuse it, because a multiply-add needs a
        # product. A float32 subnormal that is flushed to zero would become zero anyway.
        shifter = self.as_float(self.constant(smallest + (23 << 23)))
        return self.as_bits((self.as_float(a) + shifter) - shifter)

    def _gap(self, a: Any, negative: Any, rule: int, smallest: int) -> Any:
        m, c = self.m, self.constant
        if rule == NEAREST_EVEN:
            up = a > c(smallest - _IMPLICIT)
        elif rule == NEAREST_AWAY:
            up = a > c(smallest - _IMPLICIT - 1)
        elif rule in (UP, DOWN, TO_ODD):
            up = self._differ(a, c(0))
            if rule != TO_ODD:
                up = m.logical_and(up, negative if rule == DOWN else self._not(negative))
        else:
            return c(0)
        return m.where(up, c(smallest), c(0))

    def _grid(self, a: Any, negative: Any, noise: Any, rule: int, n: Numbers) -> Any:
        m, c = self.m, self.constant
        significand = (a & c(_FRACTION)) | c(_IMPLICIT)
        discarded = c(31) - m.bitwise_right_shift(a - c(n.origin), c(23))
        discarded = m.maximum(discarded, c(31 - n.ulp_shift))
        # The spacing is limited to two bits above the significand's top bit: smaller magnitudes, whose spacing would be
        # larger, have the same result.
        ulp = m.bitwise_left_shift(c(1), m.minimum(discarded, c(25)))
        odd = self._differ(significand & ulp, c(0))
        if rule in CARRYING:
            kept = (significand + self._addend(ulp, odd, negative, rule)) & (c(0) - ulp)
            return m.where(kept == c(0), c(0), a + (kept - significand))
        low = significand & (ulp - c(1))
        if draws_noise(rule):
            left = m.minimum(m.maximum(c(32) - discarded, c(0)), c(31))
            right = m.minimum(m.maximum(discarded - c(32), c(0)), c(31))
            fraction = m.bitwise_right_shift(m.bitwise_left_shift(significand, left), right)
            # In variants other than A, the bits cut off from the fraction decide ties.
            if rule != STOCHASTIC:
                left_over = m.bitwise_left_shift(m.bitwise_right_shift(significand, right), right)
                cut = m.logical_and(self._differ(left_over, significand), self._differ(a, c(0)))
                fraction = fraction | m.where(cut, c(1), c(0))
            up = (noise ^ c(_SIGN)) > (fraction ^ c(~_SIGN))  # unsigned: noise > ~fraction
        else:
            up = m.logical_and(self._differ(self._addend(ulp, odd, negative, rule), c(0)), self._differ(low, c(0)))
            up = m.logical_and(up, self._differ(a, c(0)))
        below_smallest = ulp > c(_IMPLICIT)
        base, step = m.where(below_smallest, c(0), a - low), m.where(below_smallest, c(n.smallest), ulp)
        return m.where(up, base + step, base)


# The operator has no gradient, because the emulation rounds below autograd.

_library = torch.library.Library("fpsim", "FRAGMENT")
_library.define(
    "round_patterns(Tensor x, Tensor? noise, int rule, int shape, int[] numbers, int mask, bool keeps_infinity, "
    "int version) -> Tensor"
)


def _in_torch(
    x: Tensor, noise: Tensor | None, rule: int, shape: int, numbers: list[int], mask: int, keeps: bool, version: int
) -> Tensor:
    def constant(value: int) -> Tensor:
        return torch.full((), value, dtype=torch.int32, device=x.device)

    def as_float(bits: Tensor) -> Tensor:
        return bits.view(torch.float32)

    def as_bits(numbers: Tensor) -> Tensor:
        return numbers.view(torch.int32)

    bits = as_bits(x.to(torch.float32))
    result = Patterns(torch, constant, as_float, as_bits).rounded(bits, noise, rule, shape, numbers, (mask, keeps))
    return as_float(result).to(x.dtype)


def _fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


_library.impl("round_patterns", _in_torch, "CompositeExplicitAutograd")
torch.library.register_fake("fpsim::round_patterns", _fake, lib=_library)


def _in_inductor(ops: Any, dtype: torch.dtype, x: Any, noise: Any, *words: Any) -> Any:
    rule, shape, numbers, mask, keeps, _ = words

    def constant(value: int) -> Any:
        return ops.constant(value, torch.int32)

    def as_float(bits: Any) -> Any:
        return ops.to_dtype_bitcast(bits, torch.float32, torch.int32)

    def as_bits(values: Any) -> Any:
        return ops.to_dtype_bitcast(values, torch.int32, torch.float32)

    bits = as_bits(x if dtype is torch.float32 else ops.to_dtype(x, torch.float32, src_dtype=dtype))
    result = Patterns(ops, constant, as_float, as_bits).rounded(bits, noise, rule, shape, numbers, (mask, keeps))
    out = as_float(result)
    return out if dtype is torch.float32 else ops.to_dtype(out, dtype, src_dtype=torch.float32)


# Rounding to the nearest float16 value is a cast to float16 and back. The casts take two instructions for eight
# numbers; the steps above take twenty, and pass through memory twice. Measured on one thread of an EPYC, the casts take
# 0.25 ns a number instead of 0.80 ns, and a step of a GPT-2 takes 0.88 of the time. bfloat16 has no such gain: there is
# no instruction for its cast, which takes as many steps (0.52 and 0.61 ns), and no model's step was faster.

_library.define("round_by_cast(Tensor x, ScalarType narrow, float limit, int version) -> Tensor")


def _cast_in_torch(x: Tensor, narrow: torch.dtype, limit: float, version: int) -> Tensor:
    return torch.where(x.abs() < limit, x.to(narrow).to(x.dtype), x)


_library.impl("round_by_cast", _cast_in_torch, "CompositeExplicitAutograd")
torch.library.register_fake("fpsim::round_by_cast", _fake, lib=_library)


def _cast_in_inductor(ops: Any, dtype: torch.dtype, x: Any, narrow: torch.dtype, limit: float, version: int) -> Any:
    is_number = ops.lt(ops.abs(x), ops.constant(limit, dtype))
    # `own` is a separate value, which nothing else casts: if the program casts x elsewhere, inductor replaces the cast
    # back by x. use_compute_types=True would let inductor compute in float32 instead of `narrow`, and drop both casts.
    own = ops.where(is_number, x, ops.constant(0.0, dtype))
    cast = ops.to_dtype(own, narrow, src_dtype=dtype, use_compute_types=False)
    return ops.where(is_number, ops.to_dtype(cast, dtype, src_dtype=narrow), x)


def _is_a_cast(x: Tensor, spec: RoundingSpec) -> bool:
    """Return whether a cast to float16 gives the bits of the rounding, except for masks and for the payload of NaN."""
    # A card is excluded: memory bounds the time of a rounding there, and Triton's code for two casts was not examined.
    is_native = spec.dtype is torch.float16 and spec.rounding == "nearest_even" and spec.overflow == "inf"
    return is_native and x.dtype is torch.float32 and x.device.type == "cpu"


def _round_by_cast(x: Tensor, keep_masks: bool) -> Tensor:
    """Round float32 to float16 and back; infinity, NaN and masks stay as they are."""
    fuse_in_inductor(torch.ops.fpsim.round_by_cast.default, _cast_in_inductor)
    limit = torch.finfo(torch.float32).max if keep_masks else torch.inf
    return torch.ops.fpsim.round_by_cast(x, torch.float16, limit, _version())  # type: ignore[no-any-return]


@cache
def _version() -> int:
    """Return a digest of this file and of `core`, which defines the integers that the operators take."""
    # The digest is an argument of each operator, because compilers cache programs by an operator's arguments, not by
    # its code.
    return zlib.crc32(Path(__file__).read_bytes() + Path(core.__file__).read_bytes())


def round_traced(x: Tensor, spec: RoundingSpec, keep_masks: bool = False, keep_infinity: bool = True) -> Tensor:
    """Return a rounded copy of a tensor that a compiler traces, below autograd. Arguments as in `launch.round_memory_`.

    On the CPU, stochastic rounding has the kernels' noise, from keys that are drawn as without a compiler. On a card it
    has the compiler's noise, which is equally uniform, but has different bits.
    """
    width = container_width(spec, x.dtype)
    if width == 0:
        return x.clone()
    plan = any_plan(spec.fmt, spec.rounding, spec.overflow, spec.random_bits, width, spec.variant)
    is_stochastic = draws_noise(plan.rule)
    # Inductor draws 64 bits for each element, which takes 16 ns, while a kernel takes 0.5 ns.
    if is_stochastic and x.device.type == "cpu":
        return _by_kernel(x, spec, keep_masks, keep_infinity, new_compiled_key())
    if (
        width != 32
        or plan.shape not in (FLAT, GRID, UNSIGNED_ZERO_GRID, FIXED, GAP)
        or (plan.shape == GAP and is_stochastic)
    ):
        return _by_kernel(x, spec, keep_masks, keep_infinity, None)
    if _is_a_cast(x, spec):
        return _round_by_cast(x, keep_masks)
    return round_by_expression(x, plan, masks_of(spec, x.dtype, 32, keep_infinity) if keep_masks else None)


def round_by_expression(x: Tensor, plan: Plan, masks: Masks | None) -> Tensor:
    """Round by a `Plan` for patterns of 32 bits, in operations that a compiler fuses."""
    fuse_in_inductor(torch.ops.fpsim.round_patterns.default, _in_inductor)
    is_stochastic = draws_noise(plan.rule)
    noise = torch.randint(-(1 << 31), 1 << 31, x.shape, device=x.device).int() if is_stochastic else None
    mask, keeps = (0, False) if masks is None else masks
    return torch.ops.fpsim.round_patterns(  # type: ignore[no-any-return]
        x, noise, plan.rule, plan.shape, list(plan.numbers), mask, keeps, _version()
    )


def _by_kernel(x: Tensor, spec: RoundingSpec, keep_masks: bool, keep_infinity: bool, key: Tensor | None) -> Tensor:
    rounded = apply_operator(x, words_of(spec), key)
    if not keep_masks or x.dtype not in (torch.float32, torch.float64):
        return rounded
    is_mask = x.abs() == torch.finfo(x.dtype).max
    if keep_infinity and spec.saturates:
        is_mask = is_mask | (x == -torch.inf)
    return torch.where(is_mask, x, rounded)


def round_here_(x: Tensor, spec: RoundingSpec, keep_masks: bool = False, keep_infinity: bool = True) -> None:
    """Round the memory of `x` as `launch.round_memory_` does, also while a compiler traces."""
    if not is_traced(x):
        round_memory_(x, spec, keep_masks=keep_masks, keep_infinity=keep_infinity)
        return
    # The copy writes to the memory of `x`, so that a tensor that autograd saved, and that shares this memory, has the
    # rounded values too.
    with torch.no_grad():
        x.data.copy_(round_traced(x.detach(), spec, keep_masks, keep_infinity))
