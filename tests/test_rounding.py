"""What a number becomes: every format and rule against the naive oracle and the field's other implementations."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import gfloat
import numpy as np
import oracle
import pytest
import torch
from test_formats import CUSTOM, GFLOAT, ML_DTYPES

import fpsim
from fpsim import FloatFormat, as_format, round_to
from fpsim.rounding import ROUNDINGS

DETERMINISTIC = [r for r in ROUNDINGS if r != "stochastic"]
ALL = [*fpsim.CATALOGUE.values(), *CUSTOM]
SMALL = [f for f in ALL if f.bits <= 12]
WIDE = [f for f in ALL if f.bits > 12 and f.bits <= 19]
OVERFLOWS = ("inf", "nan", "saturate")
FLOAT32_MAX = 3.4028234663852886e38


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, any NaN equal to any NaN."""
    nan = a.isnan() & b.isnan()
    return bool((nan | ((a == b) & (a.signbit() == b.signbit()))).all())


def differing(x: torch.Tensor, got: torch.Tensor, expected: torch.Tensor) -> list[tuple[float, float, float]]:
    nan = got.isnan() & expected.isnan()
    wrong = ~(nan | ((got == expected) & (got.signbit() == expected.signbit())))
    return list(zip(x[wrong].tolist()[:5], got[wrong].tolist()[:5], expected[wrong].tolist()[:5], strict=True))


def oracle_format(f: FloatFormat) -> oracle.Format:
    return oracle.make(f.exponent_bits, f.mantissa_bits, f.bias, f.specials, f.subnormals)


@cache
def corners(f: FloatFormat, dtype: torch.dtype, stride: int = 1) -> torch.Tensor:
    """Values, midpoints and third points of neighbours, each with its neighbours in the container; and the borders."""
    magnitudes = oracle_format(f).magnitudes
    ends = [*magnitudes[:3], *magnitudes[3:-3:stride], *magnitudes[-3:], oracle_format(f).next_magnitude]
    points = {float(v) for v in ends}
    points |= {float((a + b) / 2) for a, b in pairwise(ends)}
    points |= {float((2 * a + b) / 3) for a, b in pairwise(ends)}
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


@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("f", SMALL, ids=str)
def test_all_values_midpoints_and_borders_round_as_the_oracle_says(f: FloatFormat, rounding: str) -> None:
    for dtype in (torch.float32, torch.float64):
        x = corners(f, dtype)
        expected = expected_by_oracle(f, x, rounding, None)
        assert differing(x, round_to(x, f, rounding), expected) == []


@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("f", WIDE, ids=str)
def test_wide_formats_round_as_the_oracle_says(f: FloatFormat, rounding: str) -> None:
    for dtype in (torch.float32, torch.float64):
        x = corners(f, dtype, stride=max(1, len(oracle_format(f).magnitudes) // 400))
        assert differing(x, round_to(x, f, rounding), expected_by_oracle(f, x, rounding, None)) == []


@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("f", ALL, ids=str)
def test_overflow_gives_what_was_asked_for(f: FloatFormat, overflow: str) -> None:
    if (overflow == "inf" and not f.has_inf) or (overflow == "nan" and not f.has_nan):
        with pytest.raises(ValueError, match="is impossible"):
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
    for rounding in ("toward_zero", "up", "down", "to_odd"):
        if f.bits <= 12:
            y = corners(f, torch.float32)
            assert differing(y, round_to(y, f, rounding, overflow), expected_by_oracle(f, y, rounding, overflow)) == []


@pytest.mark.parametrize("name", ML_DTYPES)
def test_casts_agree_with_ml_dtypes(name: str) -> None:
    f = as_format(name)
    x = torch.cat([corners(f, torch.float32, stride=1 if f.bits < 16 else 37), torch.randn(20000) * f.smallest_normal])
    if name == "e8m0fnu":
        x = x[x.abs() >= 2.0**-126]  # ml_dtypes misrounds 22 float32 subnormals, see the oracle instead
    overflow = "nan" if f.has_nan and not f.has_inf else None  # what those dtypes do
    if not f.has_nan:
        x = x[x.isfinite()]
    with np.errstate(all="ignore"):
        theirs = torch.from_numpy(x.numpy().astype(ML_DTYPES[name]).astype(np.float32))
    assert differing(x, round_to(x, name, overflow=overflow), theirs) == []


GFLOAT_MODES = {
    "nearest_even": gfloat.RoundMode.TiesToEven,
    "nearest_away": gfloat.RoundMode.TiesToAway,
    "toward_zero": gfloat.RoundMode.TowardZero,
    "up": gfloat.RoundMode.TowardPositive,
    "down": gfloat.RoundMode.TowardNegative,
}


@pytest.mark.parametrize("rounding", GFLOAT_MODES)
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


@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize(("container", "name"), [("float16", "e5m2"), ("float16", "fp16"), ("bfloat16", "e4m3fn")])
def test_half_precision_tensors_are_rounded_as_their_float32_values(container: str, name: str, rounding: str) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(getattr(torch, container))
    got = round_to(x, name, rounding)
    assert got.dtype is x.dtype
    assert same(got.float(), round_to(x.float(), name, rounding))


def test_a_container_that_cannot_hold_the_format_is_refused() -> None:
    for dtype, name in ((torch.bfloat16, "fp16"), (torch.float16, "bf16"), (torch.float16, "cb16")):
        with pytest.raises(TypeError, match=r"cannot hold every value.*x\.float\(\)"):
            round_to(torch.ones(2, dtype=dtype), name)


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
        assert torch.equal(got.signbit(), expected.signbit()), start


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
