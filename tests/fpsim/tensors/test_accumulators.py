"""Accumulators: what they are by name, field and repr, and what `matmul` adds up in them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tiers
import torch
from accumulator_oracle import Summing
from format_cases import same

import fpsim
from fpsim import Accumulator, FloatFormat, as_accumulator, matmul
from fpsim.kernels.core import ROUNDINGS
from fpsim.tensors.accumulators import ACCUMULATORS
from fpsim.tensors.gemm import accumulate

KEY = 0x123456789ABCDEF
FORMATS = {
    "fp16": "fp16",
    "bf16": "bf16",
    "cb16": "cb16",
    "fp32": "fp32",
    "e4m3fn": "e4m3fn",
    "e5m2fnuz": "e5m2fnuz",  # no -0
    "e2m1fn": "e2m1fn",
    "dlfloat16": "dlfloat16",  # no subnormals
    "e5m0": "e5m0",
    "gap": FloatFormat(4, 3, subnormals=False),
    "tiny": FloatFormat(5, 2, 140),  # among float32's subnormals
}


def numbers(*shape: int, seed: int = 0, spread: int = 6) -> torch.Tensor:
    """Numbers of 24 significant bits over some binades, with both zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(
        torch.randint(-spread, spread + 1, shape, generator=generator)
    )
    x.view(-1)[::13], x.view(-1)[5::17] = 0.0, -0.0
    return x


def at_scale_of(fmt: str | FloatFormat, a: torch.Tensor) -> torch.Tensor:
    """`a` around the format's spacing at its small end in half of the rows, and close to its top in the others."""
    f, half = fpsim.as_format(fmt), a.shape[-2] // 2
    low, high = math.frexp(f.smallest)[1] + 1, math.frexp(f.largest)[1] - 4
    exponents = torch.tensor([low] * half + [high] * (a.shape[-2] - half))
    return (a.double() * torch.exp2(exponents.double())[:, None]).float()


def expected(
    accumulator: Accumulator, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, key: int = KEY
) -> torch.Tensor:
    """By the oracle, for (batch, rows, terms) and (batch, terms, columns)."""
    batches, rows, columns = a.shape[0], a.shape[1], b.shape[2]
    result = torch.empty(batches, rows, columns)
    for element, (n, i, j) in enumerate(itertools.product(range(batches), range(rows), range(columns))):
        c = None if bias is None else float(bias[n, i, j])
        result[n, i, j] = Summing(accumulator, element, key).total(a[n, i].tolist(), b[n, :, j].tolist(), c)
    return result


def check(accumulator: Accumulator, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    got = accumulate(a, b, accumulator, bias, torch.tensor(KEY))
    assert same(got, expected(accumulator, a, b, bias))


# What it is


@pytest.mark.parametrize(
    "accumulator",
    [
        *ACCUMULATORS.values(),
        Accumulator("bf16", rounding="stochastic", random_bits=8),
        Accumulator("e4m3fn", overflow="nan", product="e4m3fn", product_rounding="up"),
        Accumulator(FloatFormat(4, 3, 11, "none", subnormals=False), chunk=7, outer="bf16", outer_rounding="down"),
        Accumulator("fp32"),
        Accumulator("fp32", group=4, group_bits=9, operands=(None, FloatFormat(4, 3, 11, "none"))),
    ],
    ids=str,
)
def test_an_accumulator_is_a_value_that_its_text_stands_for(accumulator: Accumulator) -> None:
    assert as_accumulator(repr(accumulator)) == accumulator
    assert as_accumulator(str(accumulator)) == accumulator
    assert hash(as_accumulator(repr(accumulator))) == hash(accumulator)
    assert pickle.loads(pickle.dumps(accumulator)) == accumulator
    assert dataclasses.replace(accumulator) == accumulator
    assert as_accumulator(accumulator) is accumulator


def test_fields_that_say_the_default_are_the_default() -> None:
    assert Accumulator("fp16", overflow="inf") == Accumulator("half")
    assert Accumulator("fp16", chunk=8, outer="fp16", outer_rounding="nearest_even") == Accumulator("fp16", chunk=8)
    of_groups = Accumulator("fp16", group=4, group_bits=9)
    assert dataclasses.replace(of_groups, operands=(None, None)) == of_groups
    both = dataclasses.replace(of_groups, operands=("half", "fp16"))
    assert both == dataclasses.replace(of_groups, operands="fp16") != of_groups


def test_random_bits_end_above_the_last_of_a_sum_that_is_rounded_to_odd() -> None:
    for mantissa_bits in range(1, 24):
        f = FloatFormat(8, mantissa_bits)
        bits = Accumulator(f, "stochastic").random_bits_of(f) or 32
        # 1 + mantissa_bits + bits + 1 for what is odd: the width of a float64's significand, or less
        assert bits == min(32, 53 - 1 - (1 + mantissa_bits))
    assert Accumulator("fp32", "stochastic", random_bits=5).random_bits_of(fpsim.as_format("fp32")) == 5


def test_names() -> None:
    assert as_accumulator("fp16") == Accumulator("fp16")
    assert as_accumulator("bfloat16_chunk16") == Accumulator("bf16", chunk=16)
    assert as_accumulator(FloatFormat(4, 4)) == Accumulator("e4m4")
    assert as_accumulator("wang2018") == Accumulator(FloatFormat(6, 9), chunk=64)
    assert as_accumulator("fp32").order == "torch"
    assert as_accumulator(fpsim.as_format("fp32")) == as_accumulator("float32") == as_accumulator("fp32")
    assert Accumulator("fp32").order == "ascending"
    assert as_accumulator("fp32_chunk8") == Accumulator("fp32", chunk=8)
    assert as_accumulator("turing_fp16") == as_accumulator("ada_fp16") == as_accumulator("ampere_fp16")
    assert as_accumulator("blackwell_bf16") == as_accumulator("hopper_bf16") != as_accumulator("hopper_fp16")


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"format": "fp17"}, r"Unknown format 'fp17'. Did you mean 'fp16"),
        ({"format": "e8m0fnu"}, r"format=e8m0fnu cannot accumulate: it has no zero"),
        ({"rounding": "nearest"}, r"Unknown rounding 'nearest'. Did you mean 'nearest_even'\? Known: nearest_even, "),
        ({"product": "fp16", "product_rounding": "stochastc"}, r"Unknown product_rounding.*Did you mean 'stochastic"),
        ({"chunk": 4, "outer_rounding": "upp"}, r"Unknown outer_rounding 'upp'. Did you mean 'up"),
        ({"overflow": "infinite"}, r"Unknown overflow 'infinite'"),
        ({"format": "e4m3fn", "overflow": "inf"}, r"overflow='inf' is invalid"),
        ({"random_bits": 4}, r"random_bits=4 was given without a 'stochastic' rounding"),
        ({"rounding": "stochastic", "random_bits": 33}, r"random_bits=33 is invalid. Expected: 1 to 32"),
        ({"format": "fp32", "rounding": "stochastic", "random_bits": 29}, r"random_bits=29 .* Expected: 1 to 28"),
        ({"product_rounding": "up"}, r"was given without a product format"),
        ({"product": "bf16"}, r"An accumulator in fp16 is narrower than one product in bf16"),
        ({"format": "bf16", "product": "fp16"}, r"An accumulator in bf16 is narrower than one product in fp16"),
        ({"format": "e4m3fn", "product": "e5m2"}, r"narrower than one product in e5m2.*or product=None"),
        ({"chunk": 0}, r"chunk=0 is not a number of terms"),
        ({"chunk": 2.5}, r"chunk=2.5 is not a number of terms"),
        ({"chunk": True}, r"chunk=True is not a number of terms"),
        ({"outer": "fp32"}, r"outer=fp32 was given without a chunk"),
        ({"outer_rounding": "up"}, r"outer_rounding=up was given without a chunk"),
        ({"group": 32}, r"group=32 was given with group_bits=None. Give both"),
        ({"group_bits": 14}, r"group=None was given with group_bits=14. Give both"),
        ({"group": 2000, "group_bits": 4}, r"group=2000 is not a number of products. Expected: the integers 1 to 1024"),
        ({"group": 32, "group_bits": 47}, r"group_bits=47 is invalid. Expected: 1 to 46 for groups of 32"),
        ({"group": 32, "group_bits": 14, "product": "fp16"}, r"Omit one of the two"),
        ({"sum_bits": 32}, r"sum_bits=32 was given without a group"),
        ({"group": 8, "group_bits": 25, "sum_bits": 24}, r"sum_bits=24 is invalid. Expected: 25, .* to 45 for groups"),
        ({"group": 8, "group_bits": 25, "sum_bits": 46}, r"sum_bits=46 is invalid"),
        (
            {"group": 8, "group_bits": 9, "sum_bits": 9, "zero_exponent": 0},
            r"zero_exponent=0 was given with sum_bits=9",
        ),
        ({"operands": "fp16"}, r"operands='fp16' was given without a group.*Give group=8"),
        ({"zero_exponent": -9}, r"zero_exponent=-9 was given without a group"),
        ({"group": 8, "group_bits": 9, "operands": ("fp16",)}, r"operands=\('fp16',\) has 1. Expected: .* a pair"),
        ({"group": 8, "group_bits": 9, "operands": "mxfp4"}, r"operands='mxfp4' is not a format of an operand"),
        ({"group": 8, "group_bits": 9, "operands": ("fp16", "fp17")}, r"operands='fp17' .* Did you mean 'fp16"),
        ({"group": 8, "group_bits": 9, "zero_exponent": -299}, r"zero_exponent=-299 .* from -298 to 255"),
        ({"format": "fp32", "order": "torch", "operands": "fp16"}, r"operands='fp16' was given without a group"),
        ({"order": "torhc"}, r"Unknown order 'torhc'. Did you mean 'torch"),
        ({"order": "torch"}, r"order='torch' was given with format=fp16"),
        ({"format": "fp32", "order": "torch", "chunk": 4}, r"order='torch' was given with chunk=4"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Accumulator(**{"format": "fp16", **fields})


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("fp166", r"Unknown accumulator 'fp166'. Did you mean 'fp16"),
        ("hoper_fp8", r"Unknown accumulator 'hoper_fp8'. Did you mean 'hopper_fp8"),
        ("cb16_chunk", r"Did you mean 'cb16_chunk64"),
        ("fp16_chunk0", r"chunk=0 is not a number of terms"),
        ("Accumulator('fp16', chunks=4)", r"Unknown accumulator.*chunks"),
        ("Accumulator(open('x'))", r"Unknown accumulator"),
    ],
)
def test_an_unknown_name_is_refused_with_near_matches(name: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        as_accumulator(name)


def test_what_is_no_name_is_refused() -> None:
    with pytest.raises(TypeError, match="Expected an accumulator, got 16 of type int"):
        as_accumulator(16)  # type: ignore[arg-type]


# What it adds up, against fractions


@tiers.parametrize("rounding", ROUNDINGS, keep={"nearest_even", "stochastic"})  # each compiles a loop
@tiers.parametrize("name", FORMATS, keep=tiers.every(6))
def test_sums_are_exact_and_rounded_once(name: str, rounding: str) -> None:
    a, b = at_scale_of(FORMATS[name], numbers(1, 4, 21)), numbers(1, 21, 3, seed=1)
    check(Accumulator(FORMATS[name], rounding), a, b)


@tiers.parametrize("name", ["fp16", "fp32", "dlfloat16"], keep={"fp16"})
def test_a_sum_beside_a_tie_by_less_than_a_float64_shows_is_no_tie(name: str) -> None:
    f = fpsim.as_format(name)
    odd, half = 1 + f.epsilon, f.epsilon / 2
    # (1 + 2**-23) (1 - 2**-23) is 1 - 2**-46: a term of almost half a spacing
    term = half * (1 + 2.0**-23)
    a = torch.tensor([[[odd, term], [odd, -term], [-odd, term], [-odd, -term], [odd, 2 * term]]])
    b = torch.tensor([[[1.0], [1 - 2.0**-23]]])
    assert float(a[0, 0, 1].double() * b[0, 1, 0].double()) + odd == odd + half  # a float64 rounds it to the tie
    for rounding in ROUNDINGS if name != "fp16" else ("nearest_even", "stochastic"):  # each compiles a loop
        check(Accumulator(f, rounding), a, b)
    assert accumulate(a, b, Accumulator(f)).flatten()[:4].tolist() == [odd, odd, -odd, -odd]


@pytest.mark.parametrize("overflow", ["inf", "nan", "saturate"])
@tiers.parametrize("rounding", ROUNDINGS, keep={"nearest_even", "stochastic"})
def test_what_is_not_finite_and_what_overflows(rounding: str, overflow: str) -> None:
    inf, nan, big = math.inf, math.nan, 65504.0
    rows = [[inf, 1.0, 2.0], [inf, -inf, 1.0], [nan, 1.0, 0.0], [0.0, 0.0, 1.0], [big, big, -big], [-big, -big, big]]
    rows += [[big, 15.999, 1.0], [big, 16.0, 1.0], [-big, -20.0, -20.0], [1e30, -1e30, 1.0], [-0.0, -0.0, -0.0]]
    columns = torch.tensor([[1.0, -1.0, inf], [1.0, 1.0, 0.0], [1.0, 0.5, -0.0]])
    check(Accumulator("fp16", rounding, overflow), torch.tensor([rows]), columns[None])


PRODUCT_CASES = [
    Accumulator("fp16", product="fp16"),
    Accumulator("fp16", product="e5m2", product_rounding="toward_zero"),
    Accumulator("bf16", product="bf16", rounding="stochastic", product_rounding="stochastic"),
    Accumulator("fp32", "up", product="e5m7", product_rounding="down"),
    Accumulator("dlfloat16", product="e5m2", product_rounding="nearest_away"),
]
CHUNK_CASES = [
    Accumulator("fp16", chunk=1),
    Accumulator("e4m3fn", chunk=5, outer="bf16"),
    Accumulator("bf16", "stochastic", chunk=7),
    Accumulator("bf16", "toward_zero", chunk=4, outer="fp32", outer_rounding="stochastic"),
    Accumulator("cb16", chunk=64, product="e5m7"),
    Accumulator("fp16", chunk=32),  # a border of chunks where the terms are cut into blocks
    Accumulator("fp16", "down", "saturate", chunk=33),
]
GROUP_CASES = [
    as_accumulator("hopper_fp8"),
    dataclasses.replace(as_accumulator("hopper_fp8_chunk128"), chunk=48),
    Accumulator("fp32", "toward_zero", group=16, group_bits=25),
    Accumulator("fp16", group=4, group_bits=11),
    Accumulator("bf16", "stochastic", group=3, group_bits=12),
    Accumulator("bf16", "stochastic", group=5, group_bits=12, chunk=13, outer="fp32"),
    Accumulator("fp32", group=100, group_bits=40),
    Accumulator("e4m3fn", group=1, group_bits=2),
    as_accumulator("volta_fp16"),
    as_accumulator("hopper_bf16"),
    dataclasses.replace(as_accumulator("hopper_fp8"), operands=("e4m3fn", "e5m2")),
    Accumulator("fp16", group=4, group_bits=14, operands=(None, "e4m3fn"), zero_exponent=-8, chunk=8, outer="fp32"),
    as_accumulator("cdna3_fp16"),
    Accumulator("bf16", "stochastic", group=3, group_bits=9, sum_bits=12),
]


KEPT = [PRODUCT_CASES[0], GROUP_CASES[5], GROUP_CASES[9]]  # each compiles a loop


@tiers.parametrize("accumulator", [*PRODUCT_CASES, *CHUNK_CASES, *GROUP_CASES], keep=KEPT, ids=repr)
def test_products_chunks_and_groups(accumulator: Accumulator) -> None:
    a, b = numbers(2, 2, 131, spread=3), numbers(2, 131, 3, seed=1, spread=3)
    check(accumulator, a, b, numbers(2, 2, 3, seed=2))
    check(accumulator, a[..., :9], b[:, :9])


@tiers.parametrize("accumulator", GROUP_CASES, keep=KEPT, ids=repr)
def test_groups_of_what_is_not_finite_or_zero(accumulator: Accumulator) -> None:
    inf, nan = math.inf, math.nan
    rows = [[inf, 1.0, 2.0, 0.0], [inf, 1.0, 0.0, -inf], [nan, 1.0, 0.0, 0.0], [0.0, -0.0, 0.0, 0.0]]
    rows += [[1.0, 2.0**-40, -1.0, 2.0**-41], [-3.0, -(2.0**-13), 2.0**-12, 0.0], [1e-45, 1e-45, 0.0, 0.0]]
    check(accumulator, torch.tensor([rows]), torch.tensor([[1.0, 0.0], [1.0, 1.5], [-1.0, 1.0], [1.0, 1.0]])[None])


def among_subnormals(shape: tuple[int, ...], fmt: str | FloatFormat, share: float, seed: int) -> torch.Tensor:
    """Numbers of a format, and a share of its subnormals, zeros among them."""
    f, generator = fpsim.as_format(fmt), torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(max(f.min_exponent, -130), 1, shape, generator=generator).double()).float()
    most = 2**f.mantissa_bits - 1
    steps = torch.randint(-most, most + 1, shape, generator=generator) * f.smallest_subnormal
    return fpsim.round_to(torch.where(torch.rand(shape, generator=generator) < share, steps, x), fmt)


CORES = sorted(set(ACCUMULATORS) - {"fp32", "fp16", "cb16_chunk64", "wang2018"})


@tiers.parametrize("name", CORES, keep={"ampere_fp16", "hopper_bf16", "cdna3_fp16"})
def test_subnormal_operands_of_tensor_cores(name: str) -> None:
    accumulator, parted = as_accumulator(name), 0
    for seed, share in enumerate((0.17, 0.5, 0.84, 1.0)):
        pair = (among_subnormals(shape, accumulator.operands, share, seed) for shape in ((1, 8, 64), (1, 64, 6)))
        a, b = pair
        check(accumulator, a, b)
        check(accumulator, b.mT, a.mT)
        bare = dataclasses.replace(accumulator, operands=None, zero_exponent=None)
        parted += int((accumulate(a, b, bare) != accumulate(a, b, accumulator)).sum())
    # few bits are lost of e4m3fn's subnormals, and few groups of CDNA3 hold nothing but those of 8 exponent bits
    assert parted > 0 or accumulator.operands == fpsim.as_format("e4m3fn") or name in ("cdna3_bf16", "cdna3_xf32")


def test_matrix_cores_of_amd_cut_off_toward_minus_infinity_where_products_meet_the_accumulator() -> None:
    ones = torch.ones(1, 16, 1)
    terms = torch.zeros(1, 4, 16)
    terms[0, :2, 0], terms[0, 2:, 0] = torch.tensor([1.0, -1.0]), torch.tensor([1.0, -1.0])
    terms[0, :2, 8], terms[0, 2:, 8] = 2.0**-33, -(2.0**-33)  # below 31 bits behind the larger exponent
    sums = accumulate(terms, ones, as_accumulator("cdna3_bf16"))
    assert sums[0, :, 0].tolist() == [1.0, -1.0, 1.0, -1.0]
    terms[0, :, 0] *= 2.0**-40  # an accumulator that is cut off below 2**-24, the negative one to -2**-24
    terms[0, :, 8] = 1.0
    sums = accumulate(terms, ones, as_accumulator("cdna3_bf16"))
    assert sums[0, :, 0].tolist() == [1.0, 1.0 - 2.0**-24, 1.0, 1.0 - 2.0**-24]


def test_sums_that_meet_the_accumulator_later_are_cut_off_twice_among_subnormals_too() -> None:
    accumulator = Accumulator("fp16", group=2, group_bits=6, sum_bits=8)
    a, b = numbers(1, 6, 20, spread=2), numbers(1, 20, 5, seed=1, spread=2)
    for log2_scale in (0, -6, -9):  # of both: the last sums lie among fp16's subnormals
        check(accumulator, a * 2.0**log2_scale, b * 2.0**log2_scale)


def test_a_pair_of_formats_is_of_a_and_b_however_they_are_multiplied() -> None:
    accumulator = Accumulator("fp32", "toward_zero", group=8, group_bits=12, operands=("e4m3fn", "fp16"))
    for rows, columns in ((40, 3), (3, 40)):  # one of them is computed as its transpose
        a = among_subnormals((1, rows, 24), "e4m3fn", 0.5, 0)
        b = among_subnormals((1, 24, columns), "fp16", 0.5, 1)
        check(accumulator, a, b)
        check(accumulator.turned, b.mT, a.mT)
    assert accumulator.turned.turned == accumulator != accumulator.turned


def test_gradients_count_with_the_formats_that_are_known() -> None:
    accumulator = Accumulator("fp32", "toward_zero", group=8, group_bits=10, operands=("e4m3fn", "e3m2fn"))
    a = among_subnormals((9, 40), "e4m3fn", 0.7, 0).requires_grad_()
    b = among_subnormals((40, 7), "e3m2fn", 0.7, 1).requires_grad_()
    dy = torch.randn(9, 7) * torch.exp2(torch.randint(-20, 1, (9, 7)).float())
    matmul(a, b, accumulator).backward(dy)
    first, second = (dataclasses.replace(accumulator, operands=pair) for pair in ((None, "e3m2fn"), ("e4m3fn", None)))
    assert same(a.grad, expected(first, dy[None], b.detach().T[None])[0])
    assert same(b.grad, expected(second, a.detach().T[None], dy[None])[0])


@tiers.parametrize("rounding", ROUNDINGS, keep={"toward_zero"})
@pytest.mark.parametrize(("fmt", "overflow"), [("fp32", None), ("fp32", "saturate"), ("e4m3fn", "nan"), ("e5m2", None)])
def test_a_group_overflows_where_the_exponent_is_too_large(fmt: str, overflow: str | None, rounding: str) -> None:
    """Toward zero as well, where IEEE 754 has the largest number: hardware cuts off bits, and the exponent grows."""
    largest, ulp = fpsim.as_format(fmt).largest, 2.0**104 if fmt == "fp32" else 32.0 if fmt == "e4m3fn" else 2.0**13
    accumulator = Accumulator(fmt, rounding, overflow, group=4, group_bits=30)
    half = torch.tensor([largest / 2, largest / 2, 0.0, 0.0, 0.0])
    rows = [half.clone() for _ in range(6)]
    for row, rest in zip(rows, (0.0, ulp / 2, ulp * 0.99, ulp, ulp * 1.5, largest / 2), strict=True):
        row[2] = rest
    rows[5][4] = -largest / 2
    a = torch.stack([*rows, *(-row for row in rows)])[None]
    check(accumulator, a, torch.ones(1, 5, 2))
    check(dataclasses.replace(accumulator, sum_bits=32), a, torch.tensor([1.0, 1.5, 1.0, 1.0, 3.0]).view(1, 5, 1))
    if rounding == "toward_zero":
        sums = accumulate(a, torch.ones(1, 5, 1), accumulator)[0, :6, 0]
        beyond = {None: math.inf, "saturate": largest, "nan": math.nan}[overflow]
        assert same(sums[:5], torch.tensor([largest] * 3 + [beyond] * 2))


@pytest.mark.parametrize("accumulator", [Accumulator("fp16"), Accumulator("bf16", "stochastic"), GROUP_CASES[5]])
@pytest.mark.parametrize(("rows", "terms", "columns"), [(1, 33, 1), (35, 5, 2), (3, 6, 70), (33, 3, 65), (2, 0, 3)])
def test_every_size_of_tile(accumulator: Accumulator, rows: int, terms: int, columns: int) -> None:
    check(accumulator, numbers(1, rows, terms + 1)[..., 1:], numbers(1, terms + 1, columns, seed=1)[:, 1:])


@tiers.parametrize("accumulator", [*PRODUCT_CASES, *CHUNK_CASES[:4], GROUP_CASES[0]], keep=KEPT, ids=repr)
def test_a_bias_comes_last_in_the_outer_accumulator(accumulator: Accumulator) -> None:
    for rows, columns in ((5, 3), (2, 9)):  # one of them is computed as its transpose
        check(accumulator, numbers(1, rows, 6), numbers(1, 6, columns), numbers(1, rows, columns, seed=3))


# What it adds up, against others


@pytest.mark.parametrize("shape", [(3, 200, 40), (70, 64, 5), (1, 300, 1)])
@pytest.mark.parametrize(("name", "dtype"), [("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_running_sums_are_numpys(name: str, dtype: Any, shape: tuple[int, int, int]) -> None:
    rows, terms, columns = shape
    a = torch.randn(rows, terms).numpy().astype(dtype)
    b = torch.randn(terms, columns).numpy().astype(dtype)
    total = np.zeros((rows, columns), dtype)
    for k in range(terms):
        total = total + a[:, k : k + 1] * b[k]
    assert total.dtype == dtype
    got = matmul(
        torch.from_numpy(a.astype(np.float32)),
        torch.from_numpy(b.astype(np.float32)),
        Accumulator(name, product=name),
    )
    assert same(got, torch.from_numpy(total.astype(np.float32)))


@pytest.mark.parametrize(
    ("accumulator", "stall"),
    [("bf16", 256), ("cb16", 1024), ("wang2018", None), ("fp16", 2048), ("e8m13", 16384), ("hopper_fp8", 16384)],
)
def test_where_a_sum_of_ones_stalls(accumulator: str, stall: int | None) -> None:
    n = 40_000
    ones = torch.ones(n)
    assert matmul(ones, ones, accumulator) == (stall or n // 64 * 64)


# in 1-6-9 the outer accumulator takes 64 at a time and stalls after 1024 chunks, where 64 is half a spacing
@tiers.parametrize(("name", "total"), [("wang2018", 64 * 1024), ("hopper_fp8_chunk128", 2**18)], keep={"wang2018"})
def test_chunks_of_a_sum_of_ones(name: str, total: int) -> None:
    ones = torch.ones(2**18)
    assert matmul(ones, ones, name) == total


def test_a_small_term_is_lost_to_nearest_and_kept_on_average_stochastically() -> None:
    terms = torch.full((1001,), 0.001)
    terms[0] = 1.0
    ones = torch.ones(1001, 4096)
    assert matmul(terms, ones, "bf16").unique().tolist() == [1.0]
    sums = matmul(terms, ones, Accumulator("bf16", "stochastic"))
    assert abs(sums.mean().item() - 2.0) < 5 * sums.std().item() / 4096**0.5
    assert 0.05 < sums.std().item() < 0.15
    assert len(sums.unique()) > 30


def test_the_preset_fp32_is_torchs_product() -> None:
    a, b, bias = torch.randn(40, 300), torch.randn(300, 20), torch.randn(20)
    assert torch.equal(matmul(a, b), a @ b)
    assert torch.equal(matmul(a, b, bias=bias), a @ b + bias)
    assert torch.equal(accumulate(a[None], b[None], as_accumulator("fp32"), bias.expand(1, 40, 20))[0], a @ b + bias)
    assert torch.allclose(matmul(a, b, Accumulator("fp32")), a @ b, atol=1e-4)


# Shapes, memory and threads

SHAPES = [
    ((5,), (5,)),
    ((5,), (5, 3)),
    ((2, 5), (5,)),
    ((2, 5), (5, 3)),
    ((4, 2, 5), (5, 3)),
    ((4, 2, 5), (5,)),
    ((5,), (4, 5, 3)),
    ((2, 5), (4, 5, 3)),
    ((3, 1, 2, 5), (4, 5, 2)),
    ((1, 4, 2, 5), (3, 1, 5, 2)),
    ((0, 5), (5, 3)),
    ((2, 0), (0, 3)),
    ((0,), (0,)),
    ((3, 2, 0), (3, 0, 2)),
    ((0, 2, 5), (1, 5, 2)),
]


def whole(*shape: int) -> torch.Tensor:
    """Numbers whose products every accumulator here holds exactly."""
    return torch.randint(-4, 5, shape).float()


@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_shapes_are_those_of_torch(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = whole(*left), whole(*right)
    wanted = torch.matmul(a, b)
    for accumulator in ("fp16", "cb16_chunk64", "hopper_fp8"):
        got = matmul(a, b, accumulator)
        assert got.shape == wanted.shape
        assert torch.equal(got, wanted)
        assert got.dtype is torch.float32
        bias = whole(*wanted.shape)
        assert torch.equal(matmul(a, b, accumulator, bias), wanted + bias)
    assert not matmul(a, b, "fp16").signbit()[wanted == 0].any()


def test_strides_change_nothing() -> None:
    a, b = torch.randn(3, 70, 40), torch.randn(3, 40, 50)
    bias = torch.randn(50)
    for accumulator in (Accumulator("fp16"), Accumulator("bf16", "stochastic"), as_accumulator("hopper_fp8")):
        key = torch.tensor(KEY)
        wanted = accumulate(a, b, accumulator, bias.expand(3, 70, 50), key)
        for x, y in (
            (a.mT.contiguous().mT, b),
            (a, b.mT.contiguous().mT),
            (a.permute(1, 2, 0).contiguous().permute(2, 0, 1), torch.randn(6, 80, 100)[::2, ::2, ::2].copy_(b)),
        ):
            assert torch.equal(accumulate(x, y, accumulator, bias.expand(3, 70, 50), key), wanted)
        one = accumulate(a[:1].expand(3, 70, 40), b, accumulator, None, key)
        assert torch.equal(one, accumulate(a[:1].repeat(3, 1, 1), b, accumulator, None, key))


def test_threads_change_nothing() -> None:
    a, b = torch.randn(2, 130, 70), torch.randn(2, 70, 150)
    for accumulator in (Accumulator("fp16"), Accumulator("bf16", "stochastic"), as_accumulator("hopper_fp8")):
        torch.set_num_threads(1)
        wanted = accumulate(a, b, accumulator, None, torch.tensor(KEY))
        torch.set_num_threads(3)
        assert torch.equal(accumulate(a, b, accumulator, None, torch.tensor(KEY)), wanted)


def test_subnormals_count_in_a_process_that_flushes_them() -> None:
    a, b = torch.full((2, 3), 2.0**-130), torch.full((3, 2), 1.0)
    accumulator = Accumulator("fp32")
    try:
        assert torch.set_flush_denormal(True)
        got = accumulate(a[None], b[None], accumulator)
    finally:
        torch.set_flush_denormal(False)
    assert got.tolist() == [[[3 * 2.0**-130] * 2] * 2]


def test_the_noise_follows_the_seed() -> None:
    a, b, accumulator = torch.randn(4, 50), torch.randn(50, 6), Accumulator("e4m3fn", "stochastic")
    fpsim.manual_seed(3)
    first, second = matmul(a, b, accumulator), matmul(a, b, accumulator)
    fpsim.manual_seed(3)
    assert torch.equal(matmul(a, b, accumulator), first)
    assert not torch.equal(first, second)


# Gradients and transforms


@pytest.mark.parametrize("accumulator", ["bf16", "cb16_chunk64", "hopper_fp8"])
def test_gradients_are_products_in_the_same_accumulator(accumulator: str) -> None:
    a, b = (fpsim.round_to(torch.randn(*shape), "e4m3fn").requires_grad_() for shape in ((2, 7, 40), (40, 9)))
    bias = torch.randn(9, requires_grad=True)
    dy = fpsim.round_to(torch.randn(2, 7, 9), "e4m3fn")
    matmul(a, b, accumulator, bias).backward(dy)
    flat, tokens = dy.reshape(14, 9), a.detach().reshape(14, 40)
    assert torch.equal(a.grad, matmul(flat, b.detach().T, accumulator).reshape(2, 7, 40))
    assert torch.equal(b.grad, matmul(tokens.T, flat, accumulator))
    assert torch.allclose(bias.grad, flat.sum(0))
    assert not torch.equal(a.grad, (flat @ b.detach().T).reshape(2, 7, 40))


def test_gradients_of_batches_that_were_broadcast() -> None:
    a, b = whole(2, 5).requires_grad_(), whole(4, 5, 3).requires_grad_()
    c, d = a.detach().clone().requires_grad_(), b.detach().clone().requires_grad_()
    dy = whole(4, 2, 3)
    matmul(a, b, "fp16").backward(dy)
    torch.matmul(c, d).backward(dy)
    assert torch.equal(a.grad, c.grad)
    assert torch.equal(b.grad, d.grad)


def test_gradients_of_gradients() -> None:
    a, b = whole(3, 4).requires_grad_(), whole(4, 2).requires_grad_()

    def second(product: Any) -> torch.Tensor:
        y = product(a, b)
        (da,) = torch.autograd.grad((y * y).sum(), a, create_graph=True)
        return torch.autograd.grad((da * da).sum(), b)[0]

    assert torch.equal(second(lambda x, y: matmul(x, y, Accumulator("fp32"))), second(torch.matmul))


def test_a_gradient_that_nobody_wants_is_not_computed() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 2, requires_grad=True)
    matmul(a, b, "fp16").sum().backward()
    assert a.grad is None
    assert torch.equal(b.grad, matmul(a.T, torch.ones(3, 2), "fp16"))


def test_a_layer_learns_in_a_narrow_accumulator() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(64, 10), torch.zeros(10, 1, requires_grad=True)
    y = x @ torch.arange(10.0)[:, None]
    for _ in range(200):
        loss = (matmul(x, w, "bf16") - y).square().mean()
        (gradient,) = torch.autograd.grad(loss, w)
        w.data -= 0.1 * gradient
    assert loss.item() < 0.1


def test_vmap_is_a_batch() -> None:
    a, b = torch.randn(5, 3, 8), torch.randn(8, 4)
    assert torch.equal(torch.vmap(lambda x: matmul(x, b, "bf16"))(a), matmul(a, b, "bf16"))
    c, bias = torch.randn(8, 5, 4), torch.randn(5, 4)
    wanted = torch.stack([matmul(x, c[:, i], "bf16", bias[i]) for i, x in enumerate(a)])
    assert torch.equal(torch.vmap(lambda x, y, z: matmul(x, y, "bf16", z), (0, 1, 0))(a, c, bias), wanted)
    gradient = torch.func.vmap(torch.func.grad(lambda w, x: matmul(x, w, "bf16").sum()), (None, 0))(b, a)
    wanted = torch.stack([matmul(x.T, torch.ones(3, 4), "bf16") for x in a])
    assert torch.equal(gradient, wanted)


def test_vmap_draws_noise_as_it_is_told() -> None:
    a, b, accumulator = torch.randn(1, 40).expand(6, 1, 40), torch.randn(40, 4), Accumulator("e5m2", "stochastic")

    def product(x: torch.Tensor) -> torch.Tensor:
        return matmul(x, b, accumulator)

    same_noise = torch.vmap(product, randomness="same")(a)
    assert all(torch.equal(sample, same_noise[0]) for sample in same_noise)
    assert len(torch.vmap(product, randomness="different")(a).unique(dim=0)) > 1
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(product)(a)


@pytest.mark.parametrize("accumulator", [as_accumulator("bf16_chunk8"), Accumulator("bf16", "stochastic")])
def test_compiled_code_computes_the_same(accumulator: Accumulator) -> None:
    a, b = torch.randn(6, 20, requires_grad=True), torch.randn(20, 5, requires_grad=True)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return matmul(x, y, accumulator).square().sum()

    torch.manual_seed(1)
    wanted = loss(a, b)
    torch.manual_seed(1)
    got = torch.compile(loss, fullgraph=True, backend="aot_eager")(a, b)
    assert torch.equal(got, wanted)
    got.backward()
    assert a.grad is not None


def test_forward_mode_is_refused() -> None:
    a, b = torch.randn(2, 3), torch.randn(3, 2)
    with pytest.raises(NotImplementedError, match=r"tangent of forward-mode.*torch\.func\.vjp"):
        torch.func.jvp(lambda x: matmul(x, b, "fp16"), (a,), (a,))


# Bad input


@pytest.mark.parametrize(
    ("a", "b", "error", "words"),
    [
        (torch.ones(2, 3), torch.ones(2, 3), ValueError, r"a has shape \(2, 3\) and b \(2, 3\): 3 terms do not meet 2"),
        (torch.ones(3), torch.ones(2), ValueError, r"3 terms do not meet 2"),
        (torch.ones(()), torch.ones(2), ValueError, r"a is 0-d.*use a \* b"),
        (torch.ones(2), torch.ones(()), ValueError, r"b is 0-d"),
        (torch.ones(2, 2, 3), torch.ones(4, 3, 2), ValueError, r"batches \(2,\) and b \(4,\), which do not broadcast"),
        (torch.ones(2).double(), torch.ones(2), TypeError, r"a has dtype float64. Expected: float32.*a.float\(\)"),
        (torch.ones(2), torch.ones(2).half(), TypeError, r"b has dtype float16"),
        (torch.ones(2), [1.0, 2.0], TypeError, r"b is list"),
        (torch.ones(2, 2).to_sparse(), torch.ones(2), TypeError, r"a has layout sparse"),
        (torch.ones(2), torch.ones(2, device="meta"), ValueError, r"a is on cpu, b on meta"),
    ],
)
def test_operands_that_do_not_fit_are_refused(a: Any, b: Any, error: type[Exception], words: str) -> None:
    for accumulator in ("fp16", "fp32"):
        with pytest.raises(error, match=words):
            matmul(a, b, accumulator)


def test_a_bias_that_does_not_fit_is_refused() -> None:
    a, b = torch.ones(2, 3), torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"bias has shape \(3,\), .* result's \(2, 4\).*a vector of 4"):
        matmul(a, b, "fp16", torch.ones(3))
    with pytest.raises(TypeError, match=r"bias is float16 on cpu. Expected: float32 on cpu"):
        matmul(a, b, "fp16", torch.ones(4).half())


def test_operands_between_the_subnormals_of_an_accumulators_format_are_refused() -> None:
    x, w = torch.full((1, 4), 2.0**-10), torch.ones(4, 1)  # the least of e4m3fn is 2^-9
    with pytest.raises(ValueError, match=r"a holds numbers between the subnormals of e4m3fn.*Expected: a rounded to"):
        matmul(x, w, "hopper_fp8")
    with pytest.raises(ValueError, match="b holds numbers"):
        matmul(w.T, x.T, "hopper_fp8")
    assert (
        matmul(x, w, dataclasses.replace(as_accumulator("hopper_fp8"), operands=("e5m2", "e4m3fn"))).item() == 2.0**-8
    )
    assert matmul(2 * x, w, "hopper_fp8").item() == 2.0**-7
