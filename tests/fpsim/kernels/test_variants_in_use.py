"""The variants of stochastic rounding wherever they are given: compilers, blocks, sums, policies, states and errors."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import oracle
import pytest
import tiers
import torch
from accumulator_oracle import Summing
from inductor import needs_inductor
from test_variants import KEY, decided, words_op

import fpsim
from fpsim import Accumulator, FloatFormat, Operand, Policy, Products, as_accumulator, as_format, round_to
from fpsim.kernels.core import VARIANTS, make_plan
from fpsim.tensors.expressions import _in_inductor, round_traced
from fpsim.tensors.gemm import accumulate
from fpsim.tensors.launch import rounded
from fpsim.tensors.reference import rounded_in_float64
from fpsim.tensors.spec import RoundingSpec, any_spec, rounding_spec
from fpsim.tensors.verify import patterns
from fpsim.torch_internals import fuse_in_inductor

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
    words = plan.rule, plan.shape, list(plan.numbers), 0, False, 0
    return torch.ops.fpsim.round_patterns(x, noise, *words)  # type: ignore[no-any-return]


@pytest.mark.parametrize("r", [1, 7, 30])
@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3fnuz", "e2m1fn", "e5m2"])
def test_a_traced_rounding_gives_the_reference_s_bits_for_each_noise(name: str, r: int) -> None:
    x = patterns()[::7]
    noise = torch.randint(-(1 << 31), 1 << 31, x.shape, generator=torch.Generator().manual_seed(r)).int()
    for variant in VARIANTS:
        spec = rounding_spec(name, "stochastic", None, r, variant)
        assert torch.equal(bits_of(traced(x, noise, spec)), bits_of(by_the_reference(x, noise, spec))), variant


@needs_inductor
def test_inductor_writes_the_same_bits() -> None:
    fuse_in_inductor(torch.ops.fpsim.round_patterns.default, _in_inductor)
    specs = [
        rounding_spec(name, "stochastic", None, 3, v)
        for v in VARIANTS
        for name in (("fp16", "bf16"), ("e4m3fnuz",))[v == "C"]
    ]
    x = patterns()[::7]
    noise = torch.randint(-(1 << 31), 1 << 31, x.shape, generator=torch.Generator().manual_seed(0)).int()
    program = torch.compile(lambda x, n: [traced(x, n, spec) for spec in specs], fullgraph=True, dynamic=False)
    for spec, found in zip(specs, program(x, noise), strict=True):
        assert torch.equal(bits_of(found), bits_of(by_the_reference(x, noise, spec))), spec


@tiers.parametrize("variant", VARIANTS, keep={"A", "C_to_odd"})
def test_a_compiled_model_rounds_up_as_often_as_the_variant_says(variant: str) -> None:
    """1 + 3/8 of a spacing: with one random bit A never goes up, and the others one time in two."""
    policy = Policy(activation="e4m3fn", rounding="stochastic", random_bits=1, variant=variant)
    model = fpsim.quantize(torch.nn.Identity(), policy)
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


@tiers.parametrize(
    ("variant", "name"), itertools.product(VARIANTS, ("fp16", "mxfp4")), keep=lambda *case: case == ("B", "mxfp4")
)
def test_a_compiled_call_gives_the_bits_of_the_kernels_where_it_calls_them(variant: str, name: str) -> None:
    """The operator, whose key a compiled program draws from torch's stream."""
    x = torch.randn(500, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(
        lambda x: round_to(x, name, "stochastic", random_bits=2, variant=variant), fullgraph=True, backend="aot_eager"
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
    assert torch.equal(found, expected)


@tiers.parametrize("variant", VARIANTS, keep={"C_to_odd"})
def test_a_traced_rounding_draws_the_key_that_eager_code_draws(variant: str) -> None:
    x = torch.randn(500, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(3)
    found = round_traced(x, rounding_spec("dlfloat16", "stochastic", None, 2, variant))
    torch.manual_seed(3)
    fpsim.manual_seed(None)
    assert torch.equal(found, round_to(x, "dlfloat16", "stochastic", random_bits=2, variant=variant))


# Blocks, transforms, places where the word is given


@pytest.mark.parametrize("axis", [0, 1])
@tiers.parametrize("variant", VARIANTS, keep={"B"})  # each compiles a loop of its own
def test_elements_of_blocks_round_as_single_numbers_at_the_scale(variant: str, axis: int) -> None:
    """mxfp4 of blocks whose largest number is 4: the scale is 1, and elements are e2m1fn's."""
    x = torch.rand(32, 32, generator=torch.Generator().manual_seed(0)) * 3
    x[0], x[:, 0] = 4.0, 4.0
    found = torch.ops.fpsim.round_blocks(
        x, repr(as_format("mxfp4")), "stochastic", "saturate", 2, axis, None, torch.tensor(KEY), variant
    )
    assert torch.equal(found, words_op(x, rounding_spec("e2m1fn", "stochastic", "saturate", 2, variant)))


@tiers.parametrize("variant", VARIANTS, keep={"B"})
def test_far_scales_too(variant: str) -> None:
    """The same 2**-130 times: elements are rounded in 64 bits."""
    x = torch.rand(4, 32, generator=torch.Generator().manual_seed(0)) * 3
    x[:, 0] = 4.0
    words = repr(as_format("mxfp4")), "stochastic", "saturate", 2, 1, None, torch.tensor(KEY), variant
    near, far = (torch.ops.fpsim.round_blocks(x * 2.0**-k, *words) for k in (0, 120))
    assert torch.equal(near * 2.0**-120, far)


@pytest.mark.full
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
    overridden = Policy(weight="fp16", rounding="stochastic", random_bits=4, variant=variant, overrides={"0": "bf16"})
    inner = overridden.for_modules(torch.nn.Sequential(torch.nn.Linear(2, 2)))["0"]
    assert inner.specs().error == any_spec("bf16", "stochastic", None, 4, variant)


def test_what_was_pickled_before_there_were_variants_is_variant_a() -> None:
    for value in (
        any_spec("e4m3fn", "stochastic", None, 4),
        Operand("e4m3fn", "stochastic", random_bits=4),
        Accumulator("bf16", "stochastic", random_bits=4),
        Policy(weight="fp16"),
    ):
        older = object.__new__(type(value))
        older.__dict__.update({k: v for k, v in value.__dict__.items() if k != "variant"})
        assert pickle.loads(pickle.dumps(older)) == value


def test_a_recording_resumes_with_its_variant_and_refuses_a_state_without_one() -> None:
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
        del saved["variant"]
    with pytest.raises(ValueError, match="which is not the state of a Recording"):
        again.load_state_dict(state)
    assert [words for _, _, words in again.tallies()] == ["e4m3fn stochastic 2 random bits variant C"]


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
        (lambda: round_to(torch.ones(1), "fp16", variant="C_odd"), r"Unknown variant 'C_odd'. Did you mean 'C_to_odd"),
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
        (lambda: Policy(weight="fp16", rounding="stochastic", variant="C"), "without random_bits"),
        (lambda: Policy(weight="fp16", variant={"weigth": "C"}), "variant names 'weigth'"),
        (lambda: Policy(weight="fp16", variant="Z"), "Unknown variant 'Z'"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_remedy(call: Callable[[], object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        call()


# Sums, and numbers with a fixed point


@pytest.mark.full
@tiers.parametrize("variant", VARIANTS, keep={"C_ties_to_odd"})  # each compiles a loop of its own
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


@tiers.parametrize("variant", VARIANTS, keep={"C_ties_to_odd"})
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
