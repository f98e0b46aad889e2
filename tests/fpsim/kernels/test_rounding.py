"""What a number becomes: every format and rule against the naive oracle and the field's other implementations."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from functools import cache

import gfloat
import hypothesis
import numpy as np
import oracle
import pytest
import torch
from format_cases import ALL, GFLOAT, ML_DTYPES, family, fits, oracle_format, same
from hypothesis import strategies as st
from tiers import every, one_of_each, parametrize

import fpsim
from fpsim import FloatFormat, as_format, round_to
from fpsim.kernels.core import ROUNDINGS
from fpsim.tensors.launch import PARALLEL_FROM, round_fitting_, round_memory_, rounded
from fpsim.tensors.spec import log2_scale_limits, rounding_spec

DETERMINISTIC = [r for r in ROUNDINGS if r != "stochastic"]
DTYPES = [torch.float32, torch.float64]
SMALL = [f for f in ALL if f.bits <= 12]
WIDE = [f for f in ALL if 12 < f.bits <= 19]
# with nearly all bits of a float32, and more values than can be listed
WIDEST = [as_format("fp32"), *(FloatFormat(e, m) for e, m in ((8, 22), (8, 17), (7, 23), (5, 23), (6, 20)))]
WIDEST += [FloatFormat(7, 22, subnormals=False), FloatFormat(8, 16, 129, "fnuz"), FloatFormat(6, 22, 31, "dlfloat")]
OVERFLOWS = ("inf", "nan", "saturate")
FLOAT32_MAX = 3.4028234663852886e38


def differing(x: torch.Tensor, got: torch.Tensor, expected: torch.Tensor) -> list[tuple[float, float, float]]:
    nan = got.isnan() & expected.isnan()
    wrong = ~(nan | ((got == expected) & (got.signbit() == expected.signbit())))
    return list(zip(x[wrong].tolist()[:5], got[wrong].tolist()[:5], expected[wrong].tolist()[:5], strict=True))


@cache
def corners(f: FloatFormat, dtype: torch.dtype, stride: int = 1) -> torch.Tensor:
    """Values, midpoints and third points of neighbours, each with its neighbours in the container; and the borders."""
    magnitudes = oracle_format(f).magnitudes
    ends = [*magnitudes[:3], *magnitudes[3:-3:stride], *magnitudes[-3:], oracle_format(f).next_magnitude]
    points = {float(v) for v in ends}
    points |= {float((a + b) / 2) for a, b in itertools.pairwise(ends)}
    points |= {float((2 * a + b) / 3) for a, b in itertools.pairwise(ends)}
    points |= {float(ends[-1] * 2), float(ends[-1] + (ends[-1] - magnitudes[-1]) / 2), float(ends[0] / 3)}
    points |= {f.smallest / 2, f.smallest / 4, 3 * f.smallest / 4, f.smallest * 2.0**-30}
    x = torch.tensor(sorted(p for p in points if p <= FLOAT32_MAX), dtype=torch.float64).to(dtype)
    x = torch.cat([x, x.nextafter(torch.tensor(math.inf, dtype=dtype)), x.nextafter(torch.tensor(0.0, dtype=dtype))])
    borders = [0.0, math.inf, math.nan, 2.0**-149, 2.0**-126, FLOAT32_MAX]
    x = torch.cat([x, torch.tensor(borders, dtype=dtype)]).unique()
    return torch.cat([x, -x])


def expected_by_oracle(f: FloatFormat, x: torch.Tensor, rounding: str, overflow: str | None) -> torch.Tensor:
    resolved = f.resolve_overflow(overflow)
    values = [oracle.round_to(oracle_format(f), v, rounding, resolved) for v in x.tolist()]
    return torch.tensor(values, dtype=torch.float64).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rounding", DETERMINISTIC)
@parametrize("f", SMALL, keep=one_of_each(lambda f: f.specials), ids=str)
def test_all_values_midpoints_and_borders_round_as_the_oracle_says(
    f: FloatFormat, rounding: str, dtype: torch.dtype
) -> None:
    x = corners(f, dtype)
    assert differing(x, round_to(x, f, rounding), expected_by_oracle(f, x, rounding, None)) == []


@parametrize("rounding", DETERMINISTIC, keep={"nearest_even"})
@parametrize("f", WIDE, keep=one_of_each(lambda f: f.specials), ids=str)
@parametrize("dtype", DTYPES, keep={torch.float32}, ids=str)
def test_wide_formats_round_as_the_oracle_says(f: FloatFormat, rounding: str, dtype: torch.dtype) -> None:
    x = corners(f, dtype, stride=max(1, len(oracle_format(f).magnitudes) // 400))
    assert differing(x, round_to(x, f, rounding), expected_by_oracle(f, x, rounding, None)) == []


@parametrize("rounding", DETERMINISTIC, keep={"nearest_even", "to_odd"})
@parametrize("dtype", DTYPES, keep={torch.float32}, ids=str)
@parametrize("f", WIDEST, keep=every(len(WIDEST)), ids=str)
def test_formats_almost_as_wide_as_float32_round_as_the_oracle_says(
    f: FloatFormat, dtype: torch.dtype, rounding: str
) -> None:
    fmt = oracle_format(f)
    generator = torch.Generator().manual_seed(7)
    exponents = torch.randint(-150, 128, (150,), generator=generator)
    x = torch.rand(150, generator=generator, dtype=torch.float64).add(1) * torch.exp2(exponents.double())
    x = x[x <= FLOAT32_MAX].float().double()
    largest, smallest = float(fmt.largest), float(fmt.smallest)
    lows = [fmt.neighbours(Fraction(v))[0] for v in x.tolist() if v < largest]
    highs = [fmt.neighbours(Fraction(v))[1] for v in x.tolist() if v < largest]
    ties = [float((a + b) / 2) for a, b in zip(lows, highs, strict=True)]
    ends = [largest, float(fmt.next_magnitude), (largest + float(fmt.next_magnitude)) / 2, smallest, smallest / 2]
    x = torch.cat([x, torch.tensor([*ties, *map(float, highs), *ends, 0.0, math.inf, math.nan], dtype=torch.float64)])
    y = x.to(dtype)
    y = torch.cat([y, y.nextafter(torch.tensor(math.inf, dtype=dtype)), y.nextafter(torch.tensor(0.0, dtype=dtype))])
    y = torch.cat([y, -y])
    assert differing(y, round_to(y, f, rounding), expected_by_oracle(f, y, rounding, None)) == []


def test_the_two_ways_of_the_oracle_to_find_neighbours_agree() -> None:
    for f in SMALL:
        fmt = oracle_format(f)
        assert (fmt.magnitudes[-1], fmt.smallest) == (fmt.largest, next(v for v in fmt.magnitudes if v))
        for v in fmt.magnitudes[:-1]:
            for x in (v, v + (fmt.neighbours(v)[1] - v) / 3):
                assert fmt.neighbours(x) == fmt.neighbours_by_spacing(x) or x == 0 or not f.is_signed


@st.composite
def formats(draw: st.DrawFn) -> FloatFormat:
    e, m = draw(st.integers(1, 8)), draw(st.integers(0, 9))
    specials = draw(st.sampled_from(["ieee", "fn", "fnuz", "none", "p3109", "dlfloat", "scale"]))
    if specials == "scale":
        m = 0
    bias = draw(st.one_of(st.none(), st.integers(-130, 150)))
    try:
        return FloatFormat(e, m, bias, specials, draw(st.booleans()))  # type: ignore[arg-type]
    except ValueError:  # no such format
        hypothesis.reject()


@parametrize("count", [3, 150], keep={3})  # most formats compile a loop
def test_any_format_rounds_as_the_oracle_says(count: int) -> None:
    @hypothesis.settings(max_examples=count, deadline=None, derandomize=True)
    @hypothesis.given(
        formats(), st.sampled_from(DETERMINISTIC), st.sampled_from([None, *OVERFLOWS]), st.sampled_from(DTYPES)
    )
    def rounds_as_the_oracle_says(f: FloatFormat, rounding: str, overflow: str | None, dtype: torch.dtype) -> None:
        hypothesis.assume(overflow is None or has(f, overflow))
        x = corners.__wrapped__(f, dtype, stride=max(1, len(oracle_format(f).magnitudes) // 30))
        assert differing(x, round_to(x, f, rounding, overflow), expected_by_oracle(f, x, rounding, overflow)) == []

    rounds_as_the_oracle_says()


@pytest.mark.parametrize("overflow", OVERFLOWS)
@parametrize("f", ALL, keep=one_of_each(family), ids=str)
def test_overflow_gives_what_was_asked_for(f: FloatFormat, overflow: str) -> None:
    if not has(f, overflow):
        with pytest.raises(ValueError, match="is invalid"):
            round_to(torch.ones(1), f, overflow=overflow)
        return
    top = f.largest
    x = torch.tensor([top, top * (1 + 2.0**-24), math.inf, math.nan, min(top * 4, 2.0**130)], dtype=torch.float64)
    x = torch.cat([x, -x])
    beyond = {"inf": math.inf, "nan": math.nan, "saturate": top}[overflow]
    expected = torch.tensor([top, top, beyond, math.nan, beyond], dtype=torch.float64)
    if f.mantissa_bits == 23:  # the second is half an ulp beyond and overflows, in a float64
        expected[1] = beyond
    expected = torch.cat([expected, -expected if f.is_signed else torch.full((5,), math.nan, dtype=torch.float64)])
    assert differing(x, round_to(x, f, overflow=overflow), expected) == []


def has(f: FloatFormat, overflow: str) -> bool:
    return {"inf": f.has_inf, "nan": f.has_nan, "saturate": True}[overflow]


@parametrize("rounding", ["toward_zero", "up", "down", "to_odd"], keep={"toward_zero", "up"})  # each compiles a loop
@parametrize(
    ("f", "overflow"),
    [(f, overflow) for f in SMALL for overflow in OVERFLOWS if has(f, overflow)],
    keep=one_of_each(lambda f, overflow: overflow),
    ids=str,
)
def test_overflow_is_that_of_each_rule(f: FloatFormat, overflow: str, rounding: str) -> None:
    x = corners(f, torch.float32)
    assert differing(x, round_to(x, f, rounding, overflow), expected_by_oracle(f, x, rounding, overflow)) == []


def casts_that_differ_from_ml_dtypes(name: str, x: torch.Tensor) -> list[object]:
    f = as_format(name)
    if name == "e8m0fnu":
        x = x[x.abs() >= 2.0**-126]  # ml_dtypes misrounds 22 float32 subnormals, see the oracle instead
    overflow = "nan" if f.has_nan and not f.has_inf else None  # what those dtypes do
    if not f.has_nan:
        x = x[x.isfinite()]
    with np.errstate(all="ignore"):
        theirs = torch.from_numpy(x.numpy().astype(ML_DTYPES[name]).astype(np.float32))
    return differing(x, round_to(x, name, overflow=overflow), theirs)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_casts_agree_with_ml_dtypes(name: str) -> None:
    f = as_format(name)
    x = torch.cat([corners(f, torch.float32, stride=1 if f.bits < 16 else 37), torch.randn(20000) * f.smallest_normal])
    assert casts_that_differ_from_ml_dtypes(name, x) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ML_DTYPES)
def test_all_float32_agree_with_ml_dtypes(name: str) -> None:
    step = 2**24
    for start in range(-(2**31), 2**31, step):
        x = torch.arange(start, start + step, dtype=torch.int64).to(torch.int32).view(torch.float32)
        assert casts_that_differ_from_ml_dtypes(name, x) == [], start


GFLOAT_MODES = {
    "nearest_even": gfloat.RoundMode.TiesToEven,
    "nearest_away": gfloat.RoundMode.TiesToAway,
    "toward_zero": gfloat.RoundMode.TowardZero,
    "up": gfloat.RoundMode.TowardPositive,
    "down": gfloat.RoundMode.TowardNegative,
}


@parametrize("rounding", GFLOAT_MODES, keep={"nearest_even", "down"})  # each compiles loops
@pytest.mark.parametrize("name", GFLOAT)
def test_every_rule_agrees_with_gfloat(name: str, rounding: str) -> None:
    f = as_format(name)
    x = corners(f, torch.float64, stride=1 if f.bits < 16 else 97)
    if not f.has_inf:  # gfloat raises for directed overflow in formats without inf
        x = x[x.abs() <= f.largest]
    theirs = gfloat.round_ndarray(GFLOAT[name], x.numpy(), GFLOAT_MODES[rounding])
    assert differing(x, round_to(x, f, rounding), torch.from_numpy(theirs)) == []


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_float64_is_rounded_once(name: str) -> None:
    # just beside a tie of the format, closer than a float32 can tell: through float32 it would become the tie
    f = as_format(name)
    tie = 1 + 3 * f.epsilon / 2  # between an odd value and an even one above
    x = torch.tensor([tie - 2.0**-50, tie, tie + 2.0**-50, tie - f.epsilon + 2.0**-50], dtype=torch.float64)
    expected = torch.tensor([1 + f.epsilon, 1 + 2 * f.epsilon, 1 + 2 * f.epsilon, 1 + f.epsilon], dtype=torch.float64)
    assert torch.equal(round_to(x, f), expected)


@parametrize("rounding", DETERMINISTIC, keep={"nearest_even"})
@pytest.mark.parametrize("container", [torch.float16, torch.bfloat16], ids=str)
def test_all_half_precision_numbers_are_rounded_as_their_float32_values(container: torch.dtype, rounding: str) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(container)
    fitting = [f for f in ALL if fits(f, container)]
    assert len(fitting) > 20
    for f in fitting:
        got = round_to(x, f, rounding)
        assert got.dtype is container
        assert differing(x.float(), got.float(), round_to(x.float(), f, rounding)) == [], str(f)


@pytest.mark.parametrize("container", [torch.float16, torch.bfloat16], ids=str)
def test_a_container_that_cannot_hold_the_format_is_refused(container: torch.dtype) -> None:
    refused = [f for f in (*ALL, *WIDEST) if not fits(f, container)]
    assert len(refused) > 15
    for f in refused:
        with pytest.raises(TypeError, match=r"cannot hold every value.*Expected here.*x\.float\(\)"):
            round_to(torch.ones(2, dtype=container), f)


def test_nan_keeps_its_payload() -> None:
    bits = torch.tensor([0x7FC01234, 0x7F800001, -0x00345678], dtype=torch.int32)
    x = bits.view(torch.float32)
    for name in ("fp16", "bf16", "e4m3fn", "e2m1fn", "dlfloat16"):
        assert torch.equal(round_to(x, name).view(torch.int32), bits)


def torch_cast(name: str) -> torch.dtype:
    return {"fp16": torch.float16, "bf16": torch.bfloat16}[name]


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_a_stride_through_all_float32_agrees_with_torch(name: str) -> None:
    # 2**32 / 1009, a prime: every exponent and, over the exponents, every low bit pattern
    bits = torch.arange(-(2**31), 2**31, 1009, dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    assert differing(x, round_to(x, name), x.to(torch_cast(name)).float()) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_all_float32_agree_with_torch(name: str) -> None:
    step = 2**26
    for start in range(-(2**31), 2**31, step):
        x = torch.arange(start, start + step, dtype=torch.int64).to(torch.int32).view(torch.float32)
        expected, got = x.to(torch_cast(name)).float(), round_to(x, name)
        assert bool(((got == expected) | (got.isnan() & expected.isnan())).all()), start
        # torch's vectorised cast to bf16 turns every NaN negative; ours keeps its sign
        signs = torch.where(x.isnan(), x, expected).signbit()
        assert torch.equal(got.signbit(), signs), start


@pytest.mark.parametrize("operation", ["add", "subtract", "multiply", "divide", "sqrt"])
def test_float32_arithmetic_rounded_once_is_float16_arithmetic(operation: str) -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**15), 2**15, (2, 200_000), generator=generator).to(torch.int16)
    a, b = bits.view(torch.float16).numpy()
    with np.errstate(all="ignore"):
        arguments = (a,) if operation == "sqrt" else (a, b)
        expected = torch.from_numpy(getattr(np, operation)(*arguments)).float()
        exact = getattr(np, operation)(*(v.astype(np.float32) for v in arguments))
    assert same(round_to(torch.from_numpy(exact), "fp16"), expected)


# At a scale


def scaled_specs() -> list[FloatFormat]:
    names = ("fp16", "e5m2", "e4m3fn", "e5m2fnuz", "dlfloat16", "cb16", "e2m1fn", "e4m3")
    return [*(as_format(name) for name in names), FloatFormat(4, 3, subnormals=False)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("f", scaled_specs(), ids=str)
def test_to_round_at_a_scale_is_to_round_to_values_that_are_so_much_smaller(
    f: FloatFormat, rounding: str, dtype: torch.dtype
) -> None:
    spec = rounding_spec(f, rounding)
    low, high = log2_scale_limits(spec, dtype)
    assert low < -50
    assert high > 50
    for log2_scale in (low, 1, high) if dtype is torch.float32 else (-1, 20):
        unscaled = corners(f, torch.float64, 1 if f.bits < 10 else 997)
        x = (unscaled * 2.0**-log2_scale).to(dtype)
        key = torch.tensor(12345)
        got = rounded(x, spec, key, torch.tensor(log2_scale))
        if rounding == "stochastic":  # the noise goes by the element
            expected = rounded(x.double() * 2.0**log2_scale, spec, key) * 2.0**-log2_scale
        else:
            expected = expected_by_oracle(f, x.double() * 2.0**log2_scale, rounding, None) * 2.0**-log2_scale
        assert differing(x.double(), got.double(), expected) == []
        inside = x.clone()
        round_memory_(inside, spec, key, torch.tensor(log2_scale))
        assert same(inside, got)


FIT_BFLOAT16 = ("e5m2", "e4m3fn", "e2m1fn", "e3m2fn", "e4m3", "e5m2fnuz")


@parametrize("rounding", ROUNDINGS, keep={"nearest_even", "stochastic"})
@parametrize("name", FIT_BFLOAT16, keep={"e5m2"})
def test_every_bfloat16_rounds_at_a_scale_as_its_float32_does(name: str, rounding: str) -> None:
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()]
    spec, key = rounding_spec(name, rounding), torch.tensor(12345)
    low, high = log2_scale_limits(spec, torch.bfloat16)
    assert low < -100
    assert high > 70
    for log2_scale in (low, -1, 1, 20, high):
        scale = torch.tensor(log2_scale)
        expected = rounded(x.float(), spec, key, scale)
        assert expected.unique().numel() > 10
        inside = x.clone()
        round_memory_(inside, spec, key, scale)
        for got in (rounded(x, spec, key, scale), inside):
            assert got.dtype is torch.bfloat16
            assert torch.equal(got.float().view(torch.int32), expected.view(torch.int32)), log2_scale


def test_formats_with_the_containers_exponents_cannot_be_scaled() -> None:
    for name in ("bf16", "fp32", "tf32", "e8m0fnu"):
        assert log2_scale_limits(rounding_spec(name), torch.float32) == (0, 0)
        assert log2_scale_limits(rounding_spec(name), torch.bfloat16) == (0, 0)
    assert log2_scale_limits(rounding_spec("fp16"), torch.float16) == (0, 0)
    assert log2_scale_limits(rounding_spec("bf16"), torch.float64)[1] > 100


def test_threads_round_at_one_scale() -> None:
    x = torch.randn(PARALLEL_FROM + 1000) * 2.0**-30
    whole = rounded(x, rounding_spec("e5m2"), None, torch.tensor(30))
    assert same(whole, round_to(x * 2.0**30, "e5m2") * 2.0**-30)


@parametrize(
    ("name", "rounding"),
    itertools.product(["fp16", "bf16", "e4m3fn", "e5m2fnuz"], ROUNDINGS),
    keep=lambda *case: case in (("fp16", "nearest_even"), ("e5m2fnuz", "stochastic")),  # each compiles a loop
)
@parametrize("dtype", DTYPES, keep={torch.float32}, ids=str)
def test_to_round_what_fits_is_to_round_and_to_look_in_one_pass(name: str, rounding: str, dtype: torch.dtype) -> None:
    spec = rounding_spec(name, rounding)
    scale = torch.tensor([0 if name == "bf16" else 3])
    threads = torch.get_num_threads()
    for n in (1, 130, PARALLEL_FROM + 77):
        torch.set_num_threads(2 if n > 130 else threads)
        x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
        largest, expected, got = float(x.abs().max()), x.clone(), x.clone()
        fpsim.manual_seed(1)
        round_memory_(expected, spec, log2_scale=scale)
        fpsim.manual_seed(1)
        assert round_fitting_(got, spec, scale, largest) == largest  # at the ceiling it fits
        assert torch.equal(got, expected)
        ceiling = largest * 0.75
        got = x.clone()
        fpsim.manual_seed(1)
        assert round_fitting_(got, spec, scale, ceiling) == largest
        assert torch.equal(got, torch.where(x.abs() <= ceiling, expected, x))
        for value in (math.inf, -math.nan):
            got = x.clone()
            got[n // 2] = value
            assert round_fitting_(got, spec, scale, math.inf) == math.inf
            assert not math.isfinite(got[n // 2])
    fpsim.manual_seed(None)
    torch.set_num_threads(threads)


def test_to_round_what_fits_leaves_alone_what_it_has_no_loop_for() -> None:
    spec, scale = rounding_spec("fp16"), torch.tensor([0])
    assert round_fitting_(torch.empty(0), spec, scale, 1.0) == 0.0
    transposed = torch.randn(6, 4).t()
    largest = float(transposed.abs().max())
    assert round_fitting_(transposed, spec, scale, 9.0) == largest
    for x in (torch.randn(6, 4)[:, ::2], torch.randn(4).half(), torch.randn(4).bfloat16()):
        before = x.clone()
        fmt = "e4m3fn" if x.dtype is not torch.float32 else "fp16"
        assert round_fitting_(x, rounding_spec(fmt), scale, 9.0) is None
        assert torch.equal(x, before)
    assert round_fitting_(torch.randn(6, 4).t(), rounding_spec("fp16", "stochastic"), scale, 9.0) is None
    large = torch.tensor([1.7e38, math.inf])
    assert round_fitting_(large, spec, torch.tensor([-112]), 1e39) == math.inf  # a ceiling that float32 has not
    assert large.tolist() == [round(1.7e38 / 2.0**117) * 2.0**117, math.inf]
    above = torch.tensor([1.0 + 2.0**-23])  # a ceiling between two numbers of float32
    assert round_fitting_(above, spec, scale, 1.0 + 2.0**-30) == above.item() == 1.0 + 2.0**-23
