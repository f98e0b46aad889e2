"""The variants of stochastic rounding with few random bits: by the specification's formulas, every random word."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache

import gfloat
import numpy as np
import oracle
import pytest
import tiers
import torch
from format_cases import GFLOAT, oracle_format

from fpsim import FloatFormat, as_format
from fpsim.formats.fixed_point import FixedPoint
from fpsim.kernels.core import VARIANTS, Numbers, make_plan, make_round
from fpsim.tensors.launch import rounded
from fpsim.tensors.reference import rounded_in_float64
from fpsim.tensors.spec import RoundingSpec, rounding_spec
from fpsim.tensors.verify import patterns

NAMES = ["fp16", "e4m3fn", "e5m2", "e2m1fn", "bf16", "cb16", "e4m3fnuz", "dlfloat16", "e8m0fnu"]
FORMATS = [
    *map(as_format, NAMES),
    FloatFormat(4, 3, subnormals=False),
    FloatFormat(5, 2, 93),  # spacing 2**-94: the last that float32 rounds for itself
]
FEW = {FORMATS[0]}  # each compiles a core for each variant
KEY = 0x7EDCBA9876543210


@cache
def _core(rule: int, shape: int, width: int) -> Callable[..., int]:
    return make_round(rule, shape, width)


def decided(
    f: FloatFormat | FixedPoint, x: float, r: int, random: int, variant: str, width: int, rest: int = 0
) -> float:
    """The compiled core on one value and chosen random bits. rest: what stands below them, all ones or 0."""
    plan = make_plan(f, "stochastic", None, r, width, variant)
    noise = random << (32 - r) | rest * (2 ** (32 - r) - 1)
    uint, sint, floating = ((np.uint32, np.int32, np.float32), (np.uint64, np.int64, np.float64))[width == 64]
    kinds = sint, sint, *[uint] * 7
    words = plan.numbers._replace(used=plan.numbers.used << (width - 32))
    numbers = Numbers._make(kind(n % 2**64 if kind is uint else n) for kind, n in zip(kinds, words, strict=True))
    bits = np.array([x], floating).view(uint)[0]
    core = _core(plan.rule, plan.shape, width)
    result = core(bits, uint(noise << (width - 32)), numbers)
    return float(np.array([result], uint).view(floating)[0])


def points(f: FloatFormat, width: int) -> Iterator[float]:
    """In the lowest binades, in the middle and below the largest value: thirds, ties, and what lies beside them."""
    fmt = oracle_format(f)
    values = fmt.magnitudes
    shares = [Fraction(1, 3), *(Fraction(k, 32) for k in (1, 3, 6, 12, 13, 20, 24, 29, 31)), Fraction(1, 2)]
    shares += [Fraction(k, 16) + d * Fraction(1, 2**11) for k in (1, 5, 12) for d in (-1, 1)]
    for low in {0, 1, len(values) // 2, len(values) - 2}:
        for share in shares:
            x = float(values[low] + (values[low + 1] - values[low]) * share)
            yield float(np.float32(x)) if width == 32 else x


# What the words mean


def test_the_page_of_literal_cases() -> None:
    """The share of the 2**r random words that round 1 + d / 1024 up in float16."""
    shares = {
        1: {  # d in eighths: 0, 1, ... 7; with one random bit, in halves
            "A": [0, 0, 0, 0, 1, 1, 1, 1],
            "B": [0, 0, 1, 1, 1, 1, 2, 2],
            "C": [0, 0, 0, 1, 1, 1, 2, 2],
            "C_ties_to_odd": [0, 0, 1, 1, 1, 1, 1, 2],
            "C_to_odd": [0, 1, 1, 1, 1, 1, 1, 1],
        },
        2: {  # in quarters
            "A": [0, 0, 1, 1, 2, 2, 3, 3],
            "B": [0, 1, 1, 2, 2, 3, 3, 4],
            "C": [0, 0, 1, 2, 2, 2, 3, 4],
            "C_ties_to_odd": [0, 1, 1, 1, 2, 3, 3, 3],
            "C_to_odd": [0, 1, 1, 1, 2, 3, 3, 3],
        },
    }
    fp16 = as_format("fp16")
    for r, of_variants in shares.items():
        for variant, expected in of_variants.items():
            found = [
                sum(decided(fp16, 1 + k / 8192, r, random, variant, 32) > 1 for random in range(2**r)) for k in range(8)
            ]
            assert found == expected, (r, variant)


@pytest.mark.parametrize("width", [32, 64])
@tiers.parametrize("f", FORMATS, keep=FEW, ids=str)
def test_every_random_word_decides_as_the_specification_says(f: FloatFormat, width: int) -> None:
    fmt = oracle_format(f)
    for i, x in enumerate(points(f, width)):
        below, above, _ = fmt.neighbours(Fraction(x))
        if not f.has_zero:
            below = max(below, fmt.smallest)
        share = oracle.distance(fmt, x)
        x = -x if i % 3 == 0 and f.is_signed else x
        for variant in VARIANTS:
            r = 1 + (i + len(variant)) % 4
            for random in range(2**r):
                wanted = above if oracle.goes_up(share, r, random, variant) else below
                got = decided(f, x, r, random, variant, width, rest=random % 2)
                assert got == math.copysign(float(wanted), x), (x, variant, r, random)


@pytest.mark.parametrize("width", [32, 64])
@tiers.parametrize("f", FORMATS, keep=FEW, ids=str)
def test_of_many_random_words_as_many_go_up_as_the_specification_says(f: FloatFormat, width: int) -> None:
    """Going up is monotone in R, in the formulas as in the kernel: the first word that does is found by bisection."""
    fmt = oracle_format(f)
    xs = [x for x in points(f, width) if x < f.largest]
    xs = xs[:: max(len(xs) // 9, 1)]
    if f.has_zero:  # what lies so far below the smallest value that a word of 32 bits does not hold its significand
        odd = 1 + 2.0**-23 if width == 32 else 1 + 2.0**-52
        xs += [f.smallest * factor * 2.0**-k for k in (8, 24, 31, 32, 40) for factor in (1.0, odd, 1.5)]
    for i, x in enumerate(sorted({float(np.float32(v)) if width == 32 else v for v in xs})):
        share, above = oracle.distance(fmt, x), float(fmt.neighbours(Fraction(x))[1])
        for j, variant in enumerate(VARIANTS):
            r = (8, 23, 30)[(i + j) % 3]
            low, high = 0, 2**r
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if decided(f, x, r, middle, variant, width) == above else (middle + 1, high)
            assert low == 2**r or oracle.goes_up(share, r, low, variant), (x, variant, r)
            assert low == 0 or not oracle.goes_up(share, r, low - 1, variant), (x, variant, r)


@pytest.mark.parametrize("width", [32, 64])
@tiers.parametrize("f", FORMATS, keep=FEW, ids=str)
def test_values_of_the_format_stay_whatever_the_random_bits(f: FloatFormat, width: int) -> None:
    numbers = [0.0, f.smallest, f.largest, f.smallest_normal] if f.has_zero else [f.smallest, f.largest]
    for x in [*numbers, *(-v for v in numbers if f.is_signed)]:
        for variant in VARIANTS:
            for r in (1, 4, 30):
                for random in (0, 1, 2**r - 1):
                    got = decided(f, x, r, random, variant, width)
                    assert got == x, (variant, r, random)


@pytest.mark.parametrize("overflow", ["inf", "nan", "saturate"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_beyond_the_largest_the_rounded_value_decides(variant: str, overflow: str) -> None:
    """fp16 between 65504 and 65536, where the next value would be; infinity and NaN as in every rounding."""
    beyond = {"inf": math.inf, "nan": math.nan, "saturate": 65504.0}[overflow]
    x = torch.tensor([65504.0 + 32 * k / 16 for k in range(16)] + [65536.0, 1e30, math.inf]).repeat(2)
    x[len(x) // 2 :] *= -1
    found = words_op(x, rounding_spec("fp16", "stochastic", overflow, 3, variant))
    for i, (value, result) in enumerate(zip(x.tolist(), found.tolist(), strict=True)):
        share = min((abs(value) - 65504) / 32, 1)
        goes = share == 1 or oracle.goes_up(Fraction(share), 3, oracle.noise_word(i, KEY) >> 29, variant)
        wanted = math.copysign(beyond if goes else 65504.0, value)
        assert result == wanted or (math.isnan(result) and math.isnan(wanted)), (value, result)


def words_op(x: torch.Tensor, spec: RoundingSpec) -> torch.Tensor:
    return rounded(x, spec, torch.tensor(KEY))


@tiers.parametrize("dtype", [torch.float32, torch.float64], keep={torch.float32}, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_element_of_a_tensor_rounds_by_its_own_noise(variant: str, dtype: torch.dtype) -> None:
    f = as_format("e4m3fn")
    fmt = oracle_format(f)
    x = torch.randn(300, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype) * 2
    got = words_op(x, rounding_spec(f, "stochastic", None, 2, variant))
    for i, (value, result) in enumerate(zip(x.tolist(), got.tolist(), strict=True)):
        below, above, _ = fmt.neighbours(abs(Fraction(value)))
        goes = oracle.goes_up(oracle.distance(fmt, value), 2, oracle.noise_word(i, KEY) >> 30, variant)
        assert result == math.copysign(float(above if goes else below), value), i


# How far it is from the mean


@pytest.mark.parametrize("r", [1, 2, 3])
def test_the_bias_is_the_one_that_the_docs_state(r: int) -> None:
    """The mean error over all distances of D = 5 discarded bits and all random words, in units of the spacing."""
    fp16, discarded = as_format("fp16"), 5
    exact = {
        "A": -(Fraction(1, 2**r) - Fraction(1, 2**discarded)) / 2,
        "B": Fraction(1, 2 ** (discarded + 1)),
        "C": 0,
        "C_ties_to_odd": 0,
        "C_to_odd": 0,
    }
    for variant in VARIANTS:
        errors = []
        for low in (1.0, 1 + 2.0**-10):  # what is even, and what is odd
            for k in range(2**discarded):
                x = low + k * 2.0 ** -(10 + discarded)
                found = (decided(fp16, x, r, random, variant, 32) for random in range(2**r))
                errors += [(Fraction(v) - Fraction(x)) * 2**10 for v in found]
        assert sum(errors) / len(errors) == exact[variant], variant


def test_rounded_to_odd_every_number_that_is_no_value_can_go_both_ways() -> None:
    fp16 = as_format("fp16")
    for x in (1 + 2.0**-23, 1 + 2.0**-10 - 2.0**-23, 1 + 2.0**-11):
        found = {decided(fp16, x, 2, random, "C_to_odd", 32) for random in range(4)}
        assert found == {1.0, 1 + 2.0**-10}
    assert {decided(fp16, 1 + 2.0**-23, 2, random, "C", 32) for random in range(4)} == {1.0}


# Others


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3fn", "e5m2", "e2m1fn"])
def test_gfloats_modes_are_these(name: str) -> None:
    modes = {
        "A": gfloat.RoundMode.StochasticFastest,
        "B": gfloat.RoundMode.StochasticFast,
        "C": gfloat.RoundMode.Stochastic,
        "C_ties_to_odd": gfloat.RoundMode.StochasticOdd,
    }
    f = as_format(name)
    xs = [*points(f, 32), f.largest * (1 + f.epsilon / 8), f.largest * (1 + f.epsilon / 3)]
    for i, x in enumerate(map(float, np.array(xs, np.float32))):
        x = x if i % 2 else -x
        for variant, mode in modes.items():
            r = 1 + i % 3
            for random in range(2**r):
                wanted = gfloat.round_float(GFLOAT[name], x, mode, sat=True, srbits=random, srnumbits=r)
                plan_of = decided(f, x, r, random, variant, 32)
                got = math.copysign(f.largest, x) if math.isinf(plan_of) else plan_of
                assert (got, math.copysign(1, got)) == (wanted, math.copysign(1, wanted)), (x, variant, r, random)


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3fnuz", "dlfloat16", "e8m0fnu", "e2m1fn"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_reference_of_verify_is_the_oracle(name: str, variant: str) -> None:
    f = as_format(name)
    fmt, r = oracle_format(f), 3
    x = patterns()[::997]
    x = x[(x.abs() <= f.largest) & (x.abs() >= f.smallest * (0.0 if f.has_zero else 1.0))]
    x = x[x > 0] if not f.has_zero else x
    noise = np.random.default_rng(0).integers(0, 2**32, len(x), dtype=np.uint32)
    found = rounded_in_float64(x.numpy(), f, "stochastic", noise, r, variant)
    for value, word, result in zip(x.tolist(), noise.tolist(), found.tolist(), strict=True):
        below, above, _ = fmt.neighbours(abs(Fraction(value)))
        goes = oracle.goes_up(oracle.distance(fmt, value), r, word >> (32 - r), variant)
        assert abs(result) == float(above if goes else below), value
