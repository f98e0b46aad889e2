"""A processor that flushes subnormals to zero (`torch.set_flush_denormal`) changes no result."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import oracle
import pytest
import tiers
import torch
from format_cases import oracle_format
from numba import njit

import fpsim
from ada_loss import AdaLossScaled, Recorder
from fpsim import FloatFormat, as_format
from fpsim.kernels.containers import make_limit, narrowed, times_power, widened
from fpsim.kernels.core import BINARY32, BINARY64
from fpsim.models.quantize import listeners
from fpsim.tensors.launch import PARALLEL_FROM, kernel_for, ldexp, round_fitting_, to_float64
from fpsim.tensors.moments import Moments, amax_of, moments_of
from fpsim.tensors.spec import rounding_spec
from fpsim.tensors.tally import lost_between

FORMATS = [
    *map(as_format, ("bf16", "tf32", "fp16", "e8m0fnu", "e8m0")),
    FloatFormat(4, 3, 140),  # all its values among float32's subnormals
    FloatFormat(5, 2, 140),
    FloatFormat(4, 3, 145, subnormals=False),
    FloatFormat(5, 2, 140, "dlfloat"),
    FloatFormat(7, 0, 149, "scale"),
]


@contextmanager
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        assert float(torch.tensor([1e-40]) * 1.0) == 0.0  # it does
        kernel_for.cache_clear()  # what a plan holds is to be computed in this mode
        yield
    finally:
        torch.set_flush_denormal(False)
        kernel_for.cache_clear()


def samples() -> torch.Tensor:
    """float32 of all kinds, half of them subnormal, as patterns: no conversion touches them."""
    generator = torch.Generator().manual_seed(3)
    subnormal = torch.randint(0, 1 << 23, (400,), generator=generator)
    low = torch.randint(0, 60 << 23, (300,), generator=generator)
    every = torch.randint(0, 255 << 23, (100,), generator=generator)
    corners = torch.tensor([0, 1, 2, 3, (1 << 23) - 1, 1 << 23, (1 << 23) + 1, 0x7F7FFFFF, 0x7F800000, 0x7FC00000])
    magnitudes = torch.cat([subnormal, low, every, corners])
    return torch.cat([magnitudes, magnitudes - (1 << 31)]).to(torch.int32).view(torch.float32)


def patterns(x: torch.Tensor) -> list[int]:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.contiguous().view(integers).flatten().tolist()


@tiers.parametrize(
    ("f", "rounding"),
    itertools.product(FORMATS, ["nearest_even", "up", "toward_zero", "to_odd"]),
    keep=tiers.every(11),  # each compiles loops
    ids=str,
)
def test_numbers_round_as_the_oracle_says(f: FloatFormat, rounding: str) -> None:
    x, overflow = samples(), f.resolve_overflow()
    numbers = x.double().tolist()
    expected = [oracle.round_to(oracle_format(f), v, rounding, overflow) for v in numbers]
    wide = torch.tensor(numbers, dtype=torch.float64)
    with flushing():
        got = {
            "float32": fpsim.round_to(x, f, rounding),
            "float64": fpsim.round_to(wide, f, rounding),
            "transposed": fpsim.round_to(x.view(2, -1).t(), f, rounding).t().flatten(),
            "in place": fpsim.round_to_(x.clone(), f, rounding),
            "array": torch.from_numpy(fpsim.round_to(x.numpy(), f, rounding)),
        }
        kept = {way: patterns(y) for way, y in got.items()}
    want = torch.tensor(expected, dtype=torch.float64)
    for way, y in got.items():
        assert patterns(y) == kept[way]
        number = torch.tensor([math.nan if math.isnan(v) else v for v in y.double().tolist()], dtype=torch.float64)
        same = (number == want) & (number.signbit() == want.signbit()) | (number.isnan() & want.isnan())
        assert bool(same.all()), (way, [(numbers[i], expected[i]) for i in (~same).nonzero().flatten().tolist()[:3]])


def test_bfloat16_rounds_to_formats_among_its_subnormals() -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    f = FloatFormat(4, 2, 131)
    expected = patterns(fpsim.round_to(x, f))
    naive = [oracle.round_to(oracle_format(f), v, "nearest_even", "inf") for v in x[:300].double().tolist()]
    assert fpsim.round_to(x, f)[:300].double().tolist() == naive
    with flushing():
        assert patterns(fpsim.round_to(x, f)) == expected


def test_large_tensors_round_the_same_in_every_thread() -> None:
    x = samples().repeat(PARALLEL_FROM // 1000)
    assert x.numel() > PARALLEL_FROM
    expected = [patterns(fpsim.round_to(x, f)) for f in FORMATS[5:7]]
    torch.set_num_threads(3)
    with flushing():
        got = [patterns(fpsim.round_to(x, f)) for f in FORMATS[5:7]]
    assert got == expected


def both_ways(compute: Callable[[], Any]) -> Any:
    """What `compute` gives, which is the same where subnormals are flushed."""
    expected = compute()
    with flushing():
        got = compute()
    assert got == expected
    return expected


def test_six_underflows_are_six() -> None:
    x = torch.tensor([1e-40, -1e-45, 2e-39, 1e-38, 1e-41, -3e-44])
    t = both_ways(lambda: fpsim.tally(x, "fp16"))
    assert (t.nonzero, t.underflow, t.exact, t.amax) == (6, 6, 0, float(x[3]))
    assert t.exponents == {-133: 1, -149: 1, -129: 1, -127: 1, -137: 1, -145: 1}


@pytest.mark.parametrize("f", FORMATS, ids=repr)
def test_tallies_count_the_same(f: FloatFormat) -> None:
    x = samples()
    wide = x.double()
    for values in (x, wide):
        both_ways(lambda v=values: fpsim.tally(v, f))
    for scale in (-140, -30, 20, 150):
        t = both_ways(lambda s=scale: fpsim.tally(x, f, log2_scale=s))
        finite = [math.ldexp(abs(v), scale) for v in wide.tolist() if math.isfinite(v)]
        assert (t.nonzero, t.amax) == (sum(v > 0 for v in finite), max(finite))


def test_tallies_of_bfloat16_and_of_squares_that_vanish() -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    both_ways(lambda: fpsim.tally(x, "tf32"))
    both_ways(lambda: fpsim.tally(x, FloatFormat(4, 2, 131)))
    small = torch.tensor([1e-150, 3e-160, 2e-154, -1.5e-154, 1e-162], dtype=torch.float64)
    assert both_ways(lambda: fpsim.tally(small, "fp16")).signal == (1e-150) ** 2 + (2e-154) ** 2 + (1.5e-154) ** 2


def test_moments_range_and_losses_are_the_same() -> None:
    x = samples()
    x = x[x.isfinite()]
    subnormal = x[(x.abs() < 2.0**-126) & (x != 0)]
    for part in (x, subnormal, subnormal[:1], torch.cat([subnormal, torch.zeros(3)])):
        m = Moments(*both_ways(lambda p=part: moments_of(p, logs=True).tolist()))
        numbers = part.double()
        assert m.amax == float(numbers.abs().max())
        assert m.amin == float(numbers[numbers != 0].abs().min())
        assert (m.minimum, m.maximum) == (float(numbers.min()), float(numbers.max()))
        # sums in any order of a few hundred terms
        bound = 1e-12 * float(numbers.abs().mean())
        assert m.mean == pytest.approx(math.fsum(numbers.tolist()) / len(numbers), rel=0, abs=bound)
        both_ways(lambda p=part: amax_of(p).tolist())
    spec = rounding_spec("fp16")
    for k in (-10, 0, 100, 118):
        scale = torch.tensor([k])
        rounded = x.clone()
        for ceiling in (2.0**-130, 1e-42, 1.0):

            def fit(s: torch.Tensor = scale, c: float = ceiling) -> tuple[float | None, list[int]]:
                y = x.clone()
                return round_fitting_(y, spec, s, c), patterns(y)

            amax, _ = both_ways(fit)
            assert amax == float(x.abs().max())
        both_ways(lambda s=scale, r=rounded: lost_between(x, r * 0, 65504.0, s).tolist())
        both_ways(lambda s=scale: lost_between(x, x, math.ldexp(1.0, -20), s).tolist())


@pytest.mark.parametrize("f", [f for f in FORMATS if f.bits <= 16], ids=repr)
def test_codes_are_the_same(f: FloatFormat) -> None:
    x = samples()
    x = x[x > 0] if f.specials == "scale" else x[~x.isnan()]
    for values in (x, x.double()):
        codes = both_ways(lambda v=values: fpsim.encode(v, f, overflow="saturate").tolist())
        with flushing():
            decoded = fpsim.decode(torch.tensor(codes), f)
        naive = [oracle.round_to(oracle_format(f), v, "nearest_even", "saturate") for v in x.double().tolist()]
        assert decoded.double().tolist() == naive
        if f.specials == "dlfloat":
            break


# The conversions, against NumPy's and Python's where nothing is flushed


def words(width: int) -> np.ndarray[Any, Any]:
    """Patterns of all binades, with a few bits set and with many."""
    generator = np.random.default_rng(1)
    dtype, mantissa_bits = (np.uint32, 23) if width == 32 else (np.uint64, 52)
    top = 1 << (width - 1)
    heads = (np.arange(0, top >> mantissa_bits, dtype=np.uint64) << np.uint64(mantissa_bits)).astype(dtype)
    found = [heads, heads + dtype(1), heads - dtype(1)]
    found += [heads + generator.integers(0, 1 << mantissa_bits, len(heads), dtype=dtype) for _ in range(4)]
    found += [np.arange(200, dtype=dtype), dtype(1) << np.arange(mantissa_bits, dtype=dtype)]
    magnitudes = np.concatenate(found) & dtype(top - 1)
    return np.concatenate([magnitudes, magnitudes | dtype(top)])


def test_float32_becomes_float64_as_in_numpy() -> None:
    convert = njit(lambda u: widened(u))
    x = words(32)
    with flushing():
        got = np.array([convert(u) for u in x], np.uint64)
    with np.errstate(invalid="ignore"):  # of signalling NaN
        wide = x.view(np.float32).astype(np.float64)
    nan = np.isnan(wide)
    assert (got[~nan] == wide.view(np.uint64)[~nan]).all()
    assert np.isnan(got.view(np.float64)[nan]).all()
    back = njit(lambda u: narrowed(u))
    with flushing():
        again = np.array([back(u) for u in got], np.uint32)
    assert (again == x).all()  # NaN with its payload, too


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits_become_float64_as_in_normal_mode(dtype: torch.dtype) -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[~x.isnan()]
    expected = patterns(x.double())
    with flushing():
        assert patterns(to_float64(x)) == expected


@pytest.mark.parametrize("k", [0, -1, -40, 1023, 1024, -1022, -1075, 1500, -1500, 2098, -2098, 2100, 10**6, -(10**6)])
def test_ldexp_rounds_once_and_has_the_range_of_float64(k: int) -> None:
    x = [0.0, -0.0, math.inf, 2.0**-1074, -1.2345 * 2.0**-1010, 1.7 * 2.0**-1000, -1.1, 2.0**1000, sys.float_info.max]

    def expected(v: float) -> float:
        try:
            return math.ldexp(v, k)
        except OverflowError:
            return math.copysign(math.inf, v)

    got = ldexp(torch.tensor(x, dtype=torch.float64), torch.tensor(k)).tolist()
    assert [(g, math.copysign(1, g)) for g in got] == [(e, math.copysign(1, e)) for e in map(expected, x)]


def test_a_limit_is_the_next_number_down() -> None:
    x = words(64).view(np.float64)
    x = x[~np.signbit(x) & ~np.isnan(x)]
    limit = njit(lambda v: (make_limit_32(v), make_limit_64(v)))
    with flushing():
        got = [limit(v) for v in x]
    with np.errstate(over="ignore"):
        nearest = x.astype(np.float32)
    below = np.where(nearest > x, np.nextafter(nearest, np.float32(0)), nearest)
    below = np.minimum(below, np.finfo(np.float32).max)
    assert [g[0] for g in got] == below.astype(np.float32).view(np.uint32).tolist()
    assert [g[1] for g in got] == np.minimum(x, np.finfo(np.float64).max).view(np.uint64).tolist()


make_limit_32, make_limit_64 = make_limit(32), make_limit(64)


def test_a_power_of_two_multiplies_as_ldexp_does() -> None:
    multiply = njit(lambda u, k: times_power(u, k))
    x = words(64)[::7]
    for k in (0, 1, -1, 60, -60, 1023, -1022, -1074, 2098, -2098, 4400, -4400):

        def ldexp(v: float, k: int = k) -> float:
            try:
                return math.ldexp(v, k)
            except OverflowError:
                return math.copysign(math.inf, v)

        numbers = x.view(np.float64)
        expected = np.array([ldexp(float(v)) for v in numbers])
        with flushing():
            got = np.array([multiply(u, k) for u in x], np.uint64)
        nan = np.isnan(numbers)
        assert (got[~nan] == expected.view(np.uint64)[~nan]).all(), k
        assert (got[nan] == x[nan]).all()


def test_a_container_knows_its_patterns() -> None:
    x = words(32)
    with np.errstate(invalid="ignore"):  # of signalling NaN
        numbers = x.view(np.float32).astype(np.float64)
    known = ~np.isnan(numbers)
    with flushing():
        got = [BINARY32.bits(float(v)) for v in numbers[known]]
    assert got == x[known].tolist()
    assert BINARY32.bits(math.nan) == 0x7FC00000
    assert BINARY64.bits(-1.5) == 0xBFF8 << 48


def test_an_operand_of_a_product_is_recorded_with_its_subnormals() -> None:
    """At a scale of 2**20 an operand of 1e-41 is a number of e8m10, and is recorded as one."""

    gradient = torch.tensor([[7136]], dtype=torch.int32).view(torch.float32)  # 7136 * 2**-149 is 1e-41

    def at_a_scale(*_: Any) -> Callable[[torch.Tensor, bool], torch.Tensor]:
        return lambda gradient, is_alone: torch.tensor([20])

    def amaxes() -> dict[str, float]:
        policy = fpsim.Policy(products=fpsim.Products.all(FloatFormat(8, 10)))
        model = fpsim.quantize(torch.nn.Linear(2, 1, bias=False), policy)
        (listener,) = {id(m): m for m in listeners(model)}.values()
        listener.scaling = at_a_scale
        with fpsim.record(model) as recording:
            model(torch.ones(1, 2)).backward(gradient)
        return {row["role"]: row["amax"] for row in recording.rows() if row["role"].endswith("dy")}

    assert both_ways(amaxes) == {"wgrad.dy": math.ldexp(7136, 20 - 149)}


def recorded_gradients(of: torch.Tensor, fmt: str) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = fpsim.quantize(torch.nn.Linear(8, 4, bias=False), fmt)
    with fpsim.record(model) as recording:
        model(torch.randn(8, 8)).backward(of)
    return recording.rows()


@pytest.mark.parametrize("fmt", ["fp16", "mxfp8_e4m3"])
def test_statistics_of_recorded_gradients_are_the_same(fmt: str) -> None:
    patterns = torch.randint(-(1 << 23), 1 << 23, (8, 4), generator=torch.Generator().manual_seed(1)).int()
    subnormal = (patterns.abs() | ((patterns < 0).int() << 31)).view(torch.float32)
    usual = torch.randn(8, 4)
    usual[2] = subnormal[2]
    for of in (subnormal, usual):
        expected = recorded_gradients(of, fmt)
        with flushing():
            assert recorded_gradients(of, fmt) == expected
        (row,) = (row for row in expected if row["role"] in ("error", "wgrad.dy"))
        assert row["nonzero"] == 32
        assert row["kurtosis"] > 0.5


def recorded_at_scales(of: torch.Tensor, fmt: str, rule: str) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = fpsim.quantize(torch.nn.Linear(8, 4, bias=False), fmt)
    with AdaLossScaled(model, rule=rule) as scaled:
        scaled.observer = recorder = Recorder()
        model(torch.randn(8, 8)).backward(of)
        return recorder.rows()


@pytest.mark.parametrize("rule", ["abs_range", "exact", "current", "amax_history", "fixed"])
@pytest.mark.parametrize("fmt", ["fp16", "e5m2", "bf16"])
def test_a_recorder_of_scaled_gradients_has_the_same_rows(fmt: str, rule: str) -> None:
    """Of subnormal gradients in bf16, torch's own product with the inputs is flushed: the weight's row is left out."""
    patterns = torch.randint(1, 1 << 23, (8, 4), generator=torch.Generator().manual_seed(1)).int()
    subnormal, usual = patterns.view(torch.float32), torch.randn(8, 4, generator=torch.Generator().manual_seed(2))
    usual[2] = -subnormal[2]
    for of in (subnormal, usual):
        expected = recorded_at_scales(of, fmt, rule)
        with flushing():
            got = recorded_at_scales(of, fmt, rule)
        error, weight = expected
        assert (error["role"], error["elements"], error["zeros"]) == ("error", 32, 0.0)
        is_flushed = fmt == "bf16" and of is subnormal
        assert repr(got[:1] if is_flushed else got) == repr([error] if is_flushed else [error, weight])  # NaN is NaN
