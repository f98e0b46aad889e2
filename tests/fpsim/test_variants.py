"""The variants of stochastic rounding with few random bits: by the specification's formulas, every random word."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache

import gfloat
import numpy as np
import oracle
import pytest
import torch
from accumulator_oracle import Summing
from format_cases import GFLOAT, oracle_format

import fpsim
from fpsim import Accumulator, FloatFormat, Operand, Policy, Products, as_accumulator, as_format, round_to
from fpsim.expressions import round_traced
from fpsim.fixed_point import FixedPoint
from fpsim.gemm import accumulate
from fpsim.launch import rounded
from fpsim.reference import rounded_in_float64
from fpsim.rounding import make_plan, make_round
from fpsim.spec import RoundingSpec, any_spec, rounding_spec
from fpsim.torch_internals import fuse_in_inductor
from fpsim.variants import VARIANTS
from fpsim.verify import patterns

NAMES = ["fp16", "e4m3fn", "e5m2", "e2m1fn", "bf16", "cb16", "e4m3fnuz", "dlfloat16", "e8m0fnu"]
FORMATS = [
    *map(as_format, NAMES),
    FloatFormat(4, 3, subnormals=False),
    FloatFormat(5, 2, 93),  # spacing 2**-94: the last that float32 rounds for itself
]
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
    p = plan.parameters
    arguments = (uint(v % 2**64) for v in (p[2], p[3], p[4], p[5], p[6] << (width - 32), p[7]))
    bits = np.array([x], floating).view(uint)[0]
    core = _core(plan.rule, plan.shape, width)
    result = core(bits, uint(noise << (width - 32)), sint(p[0]), sint(p[1]), *arguments)
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
@pytest.mark.parametrize("f", FORMATS, ids=str)
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
@pytest.mark.parametrize("f", FORMATS, ids=str)
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
@pytest.mark.parametrize("f", FORMATS, ids=str)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
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


# Under a compiler


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(77.0).view(torch.int32)


def by_the_reference(x: torch.Tensor, noise: torch.Tensor, spec: RoundingSpec) -> torch.Tensor:
    words = noise.numpy().view(np.uint32)
    assert isinstance(spec.fmt, FloatFormat)
    return torch.from_numpy(
        rounded_in_float64(x.numpy(), spec.fmt, "stochastic", words, spec.random_bits, spec.variant)
    ).float()


def traced(x: torch.Tensor, noise: torch.Tensor, spec: RoundingSpec) -> torch.Tensor:
    plan = make_plan(spec.fmt, "stochastic", spec.overflow, spec.random_bits, 32, spec.variant)
    words = plan.rule, plan.shape, list(plan.parameters), 0, False, 0
    return torch.ops.fpsim.round_patterns(x, noise, *words)  # type: ignore[no-any-return]


@pytest.mark.parametrize("r", [1, 7, 30])
@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3fnuz", "e2m1fn", "e5m2"])
def test_a_traced_rounding_gives_the_reference_s_bits_for_each_noise(name: str, r: int) -> None:
    x = patterns()[::7]
    noise = torch.randint(-(1 << 31), 1 << 31, x.shape, generator=torch.Generator().manual_seed(r)).int()
    for variant in VARIANTS:
        spec = rounding_spec(name, "stochastic", None, r, variant)
        assert torch.equal(bits_of(traced(x, noise, spec)), bits_of(by_the_reference(x, noise, spec))), variant


def test_inductor_writes_the_same_bits() -> None:
    from fpsim.expressions import _in_inductor

    fuse_in_inductor(torch.ops.fpsim.round_patterns.default, _in_inductor)
    specs = [
        rounding_spec(name, "stochastic", None, 3, v)
        for v in VARIANTS
        for name in (("fp16", "bf16"), ("e4m3fnuz",))[v == "C"]
    ]
    x = patterns()[::7]
    noise = torch.randint(-(1 << 31), 1 << 31, x.shape, generator=torch.Generator().manual_seed(0)).int()
    torch._dynamo.reset()
    program = torch.compile(lambda x, n: [traced(x, n, spec) for spec in specs], fullgraph=True, dynamic=False)
    for spec, found in zip(specs, program(x, noise), strict=True):
        assert torch.equal(bits_of(found), bits_of(by_the_reference(x, noise, spec))), spec


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_compiled_model_rounds_up_as_often_as_the_variant_says(variant: str) -> None:
    """1 + 3/8 of a spacing: with one random bit A never goes up, and the others one time in two."""
    policy = Policy(activation="e4m3fn", rounding="stochastic", random_bits=1, variant=variant)
    model = fpsim.quantize(torch.nn.Identity(), policy)
    torch._dynamo.reset()
    n = 1 << 14
    x = torch.full((n,), 1 + 3 / 64)

    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 1.0

    model = torch.compile(fpsim.quantize(Twice(), policy), backend="aot_eager")
    torch.manual_seed(0)
    found = model(x)
    assert set(found.tolist()) <= {1.0, 1.125}
    share = float((found > 1).double().mean())
    assert share == 0.0 if variant == "A" else abs(share - 0.5) < 5 * 0.5 / math.sqrt(n)  # five standard deviations


def test_a_compiled_call_gives_the_bits_of_the_kernels_where_it_calls_them() -> None:
    """The operator, whose key a compiled program draws from torch's stream, and the traced rounding of a gap."""
    x = torch.randn(500, generator=torch.Generator().manual_seed(0))
    for variant in VARIANTS:
        for name in ("fp16", "mxfp4"):
            torch._dynamo.reset()
            compiled = torch.compile(
                lambda x, name=name, v=variant: round_to(x, name, "stochastic", random_bits=2, variant=v),
                fullgraph=True,
                backend="aot_eager",
            )
            torch.manual_seed(3)
            found = compiled(x)
            torch.manual_seed(3)
            key = torch.randint(0, 2**63 - 1, (), dtype=torch.int64)
            spec = any_spec(name, "stochastic", None, 2, variant)
            if isinstance(spec, RoundingSpec):
                expected = rounded(x, spec, key)
            else:
                words = repr(spec.fmt), "stochastic", spec.overflow, 2, -1, None, key, variant
                expected = torch.ops.fpsim.round_blocks(x, *words)
            assert torch.equal(found, expected), (variant, name)
        torch.manual_seed(3)
        found = round_traced(x, rounding_spec("dlfloat16", "stochastic", None, 2, variant))
        torch.manual_seed(3)
        fpsim.manual_seed(None)
        assert torch.equal(found, round_to_with_traced_key(x, variant))


def round_to_with_traced_key(x: torch.Tensor, variant: str) -> torch.Tensor:
    key = torch.randint(0, 2**63 - 1, (), dtype=torch.int64)
    return rounded(x, rounding_spec("dlfloat16", "stochastic", None, 2, variant), key)


# Blocks, transforms, places where the word is given


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("variant", VARIANTS)
def test_elements_of_blocks_round_as_single_numbers_at_the_scale(variant: str, axis: int) -> None:
    """mxfp4 of blocks whose largest number is 4: the scale is 1, and elements are e2m1fn's."""
    x = torch.rand(32, 32, generator=torch.Generator().manual_seed(0)) * 3
    x[0], x[:, 0] = 4.0, 4.0
    found = torch.ops.fpsim.round_blocks(
        x, repr(as_format("mxfp4")), "stochastic", "saturate", 2, axis, None, torch.tensor(KEY), variant
    )
    assert torch.equal(found, words_op(x, rounding_spec("e2m1fn", "stochastic", "saturate", 2, variant)))


def test_far_scales_too() -> None:
    """The same 2**-130 times: elements are rounded in 64 bits."""
    x = torch.rand(4, 32, generator=torch.Generator().manual_seed(0)) * 3
    x[:, 0] = 4.0
    for variant in VARIANTS:
        words = repr(as_format("mxfp4")), "stochastic", "saturate", 2, 1, None, torch.tensor(KEY), variant
        near, far = (torch.ops.fpsim.round_blocks(x * 2.0**-k, *words) for k in (0, 120))
        assert torch.equal(near * 2.0**-120, far)


def test_vmap_and_gradients_pass() -> None:
    x = torch.full((4, 600), 1 + 3 / 64)
    for name in ("e4m3fn", "mxfp8_e4m3"):
        torch.manual_seed(0)
        found = torch.func.vmap(
            lambda v, name=name: round_to(v, name, "stochastic", random_bits=1, variant="C"), randomness="different"
        )(x)
        assert set(found.unique().tolist()) == {1.0, 1.125}  # A would give 1.0 alone
        leaf = x.clone().requires_grad_()
        round_to(leaf, name, "stochastic", random_bits=1, variant="C").sum().backward()
        assert torch.equal(leaf.grad, torch.ones_like(x))
    slope = torch.func.grad(lambda v: round_to(v, "e4m3fn", "stochastic", random_bits=1, variant="B").sum())(x)
    assert torch.equal(slope, torch.ones_like(x))


@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_a_variant_is_part_of_what_a_rounding_is(variant: str) -> None:
    spec = any_spec("e4m3fn", "stochastic", None, 4, variant)
    assert str(spec) == f"e4m3fn stochastic 4 random bits variant {variant}"
    assert spec != any_spec("e4m3fn", "stochastic", None, 4)
    assert str(any_spec("mxfp4", "stochastic", None, 4, variant)) == f"mxfp4 stochastic 4 random bits variant {variant}"
    operand = Operand("e4m3fn", "stochastic", random_bits=4, variant=variant)
    accumulator = Accumulator("bf16", "stochastic", random_bits=4, variant=variant)
    policy = Policy("fp16", "fp16", rounding="stochastic", random_bits=4, variant={"weight": variant})
    for value in (spec, operand, accumulator, policy):
        assert pickle.loads(pickle.dumps(value)) == value
    assert f"variant='{variant}'" in repr(operand)
    assert as_accumulator(repr(accumulator)) == accumulator
    assert policy.specs().weight == any_spec("fp16", "stochastic", None, 4, variant)
    assert policy.specs().activation == any_spec("fp16", "stochastic", None, 4)
    model = fpsim.quantize(torch.nn.Sequential(torch.nn.Linear(2, 2)), policy)
    assert f"fp16 stochastic 4 random bits variant {variant}" in str(fpsim.summary(model))
    overridden = Policy("fp16", rounding="stochastic", random_bits=4, variant=variant, overrides={"0": "bf16"})
    inner = overridden.for_modules(torch.nn.Sequential(torch.nn.Linear(2, 2)))["0"]
    assert inner.specs().error == any_spec("bf16", "stochastic", None, 4, variant)


def test_what_was_pickled_before_there_were_variants_is_variant_a() -> None:
    for value in (
        any_spec("e4m3fn", "stochastic", None, 4),
        Operand("e4m3fn", "stochastic", random_bits=4),
        Accumulator("bf16", "stochastic", random_bits=4),
        Policy("fp16"),
    ):
        older = object.__new__(type(value))
        older.__dict__.update({k: v for k, v in value.__dict__.items() if k != "variant"})
        assert pickle.loads(pickle.dumps(older)) == value


def test_a_recording_goes_on_with_its_variant_and_without_one_as_before() -> None:
    policy = Policy(activation="e4m3fn", rounding="stochastic", random_bits=2, variant="C")
    model = fpsim.quantize(torch.nn.Sequential(torch.nn.ReLU()), policy)
    with fpsim.record(model) as recording:
        model(torch.rand(10))
    state = recording.state_dict()
    again = fpsim.Recording()
    again.load_state_dict(state)
    assert [*again.tallies()] == [*recording.tallies()]
    assert [words for _, _, words in again.tallies()] == ["e4m3fn stochastic 2 random bits variant C"]
    for saved in state["sums"]:
        del saved["variant"]  # as a state of before
    again.load_state_dict(state)
    assert [words for _, _, words in again.tallies()] == ["e4m3fn stochastic 2 random bits"]


def test_products_take_it_and_another_rounding_leaves_it_behind() -> None:
    products = Products.all("mxfp4", "stochastic", random_bits=2, variant="C")
    assert str(products) == "mxfp4 stochastic 2 random bits variant C"
    assert str(products.with_rounding("nearest_even")) == "mxfp4 nearest_even"
    assert Policy(products=products).products == products


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (
            lambda: round_to(torch.ones(1), "fp16", "stochastic", random_bits=4, variant="D"),
            "Unknown variant 'D'. Known: A",
        ),
        (lambda: round_to(torch.ones(1), "fp16", variant="C_odd"), r"Unknown variant 'C_odd'. Did you mean C_to_odd"),
        (lambda: round_to(torch.ones(1), "fp16", variant=3), "Unknown variant 3"),  # type: ignore[call-overload]
        (lambda: round_to(torch.ones(1), "fp16", variant="C"), "Got variant='C' without a 'stochastic' rounding"),
        (lambda: round_to(torch.ones(1), "fp16", "stochastic", variant="B"), "without random_bits.*Use random_bits=8"),
        (
            lambda: round_to(torch.ones(1), "fp16", "stochastic", random_bits=31, variant="B"),
            "Got random_bits=31 with variant='B'.*from 1 to 30, or variant='A'",
        ),
        (lambda: Operand("mxfp4", "stochastic", variant="B"), "without random_bits"),
        (lambda: Accumulator("fp16", variant="B"), "without a 'stochastic' rounding"),
        (lambda: Accumulator("fp32", "stochastic", random_bits=28, variant="C"), "from 1 to 27"),
        (lambda: Accumulator("fp16", "stochastic", variant="C"), "without random_bits"),
        (lambda: Policy("fp16", rounding="stochastic", variant="C"), "without random_bits"),
        (lambda: Policy("fp16", variant={"weigth": "C"}), "variant names 'weigth'"),
        (lambda: Policy("fp16", variant="Z"), "Unknown variant 'Z'"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_remedy(call: Callable[[], object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        call()


# Sums, and numbers with a fixed point


@pytest.mark.parametrize("variant", VARIANTS)
def test_sums_are_exact_and_rounded_once_by_the_variant(variant: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(1, 3, 11, generator=generator), torch.randn(1, 11, 3, generator=generator)
    for accumulator in (
        Accumulator("fp16", "stochastic", random_bits=2, variant=variant),
        Accumulator("fp32", "stochastic", random_bits=27, variant=variant),
        Accumulator(
            *("bf16", "stochastic"),
            random_bits=3,
            variant=variant,
            product="e4m3fn",
            product_rounding="stochastic",
            chunk=4,
            outer="fp32",
        ),
        *([Accumulator("bf16", "stochastic", random_bits=1, variant="C", group=4, group_bits=9)] * (variant == "C")),
    ):
        found = accumulate(a, b, accumulator, None, torch.tensor(KEY))
        for element, (i, j) in enumerate(itertools.product(range(3), range(3))):
            wanted = Summing(accumulator, element, KEY).total(a[0, i].tolist(), b[0, :, j].tolist())
            assert float(found[0, i, j]) == wanted, (accumulator, i, j)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sum_beside_a_tie_by_less_than_a_float64_shows_is_no_tie(variant: str) -> None:
    """1 + 1/4 of the spacing, which one random bit has no half for; a little less, exactly, and a little more."""
    eps, near, columns = 2.0**-10, 2.0**-22, 40
    a = torch.tensor([[[1.0, eps / 4 * (1 + near)], [1.0, eps / 4], [1 + eps, -0.75 * eps * (1 + near)]]])
    b = torch.ones(1, 2, columns)
    accumulator = Accumulator("fp16", "stochastic", random_bits=1, variant=variant)
    ups = []
    for row, last in enumerate((1 - near, 1.0, 1 - near)):
        b[0, 1] = last
        found = accumulate(a[:, row : row + 1], b, accumulator, None, torch.tensor(KEY)).flatten().tolist()
        terms = a[0, row].tolist()
        assert float(np.float64(terms[0]) + np.float64(terms[1]) * last) == 1 + eps / 4  # in float64 they are one
        sums = [Summing(accumulator, element, KEY).total(terms, [1.0, last]) for element in range(columns)]
        assert found == sums
        ups.append(any(value > 1 for value in found))
    never, half = False, True
    wanted = {
        "A": [never] * 3,
        "B": [never, half, half],
        "C": [never, never, half],
        "C_ties_to_odd": [never, half, half],
    }
    assert ups == wanted.get(variant, [half] * 3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_fixed_point_and_integers_round_as_the_specification_says(variant: str) -> None:
    int4, uint8 = as_format("int4"), as_format("uint8")
    for f, low in ((int4, 1.0), (int4, -4.0), (uint8, 100.0), (int4, 0.0)):
        for k in range(16):
            x = low + math.copysign(k / 16, low)
            for random in range(4):
                goes = oracle.goes_up(Fraction(k, 16), 2, random, variant)
                assert decided(f, x, 2, random, variant, 32) == low + math.copysign(goes, low), (x, random)
