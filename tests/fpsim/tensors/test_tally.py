"""What a tally counts, against counting by hand in plain Python."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import fpsim
from fpsim.tensors.tally import UpdateCounts, lost_between, wanted_and_lost

FORMATS = ("fp16", "bf16", "e4m3fn", "e5m2", "e2m1fn", "dlfloat16", "e4m3fnuz")


def samples(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    spread = torch.randn(5000, generator=generator) * torch.exp2(torch.randint(-45, 20, (5000,), generator=generator))
    corners = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 3e38, 1.0, -65504.0, 65520.0, 464.0]
    return torch.cat([spread, torch.tensor(corners)]).to(dtype)


def counted_by_hand(x: torch.Tensor, rounded: torch.Tensor, fmt: fpsim.FloatFormat) -> dict[str, Any]:
    top = math.ldexp(1.0, math.frexp(fmt.largest)[1] - 1 - fmt.mantissa_bits)
    found: Counter[str] = Counter()
    exponents: Counter[int] = Counter()
    squares: list[float] = []
    changes: list[float] = []
    dead: list[float] = []
    along: list[float] = []
    for v, r in zip(x.double().tolist(), rounded.double().tolist(), strict=True):
        found["count"] += 1
        if not math.isfinite(v):
            found["nonfinite"] += 1
            continue
        if v != 0:
            found["nonzero"] += 1
            exponents[math.frexp(v)[1] - 1] += 1
            found["underflow"] += r == 0
        found["subnormal"] += 0 < abs(r) < fmt.smallest_normal
        found["overflow"] += not math.isfinite(r) or (abs(r) == fmt.largest and abs(v) >= fmt.largest + top / 2)
        found["exact"] += r == v
        if math.isfinite(r):
            squares.append(v * v)
            changes.append((r - v) ** 2)
            dead.append(v * v if r == 0 else 0.0)
            along.append(v * (r - v))
    amax = max(abs(v) for v in x.double().tolist() if math.isfinite(v))
    sums = {"amax": amax, "signal": math.fsum(squares), "noise": math.fsum(changes)}
    sums |= {"dead_zone": math.fsum(dead), "along": math.fsum(along), "along_magnitudes": math.fsum(map(abs, along))}
    return {**found, **sums, "exponents": dict(exponents)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_a_tally_counts_what_a_loop_in_python_counts(name: str, dtype: torch.dtype) -> None:
    x, fmt = samples(dtype), fpsim.as_format(name)
    tally = fpsim.tally(x, name)
    expected = counted_by_hand(x, fpsim.round_to(x, name), fmt)
    for key in ("count", "nonzero", "underflow", "subnormal", "overflow", "nonfinite", "exact"):
        assert getattr(tally, key) == expected.get(key, 0), key
    assert tally.exponents == expected["exponents"]
    assert tally.amax == expected["amax"]
    # 5,000 positive float64 terms added in order: relative error at most 5,000 * 2**-53 = 6e-13
    assert tally.signal == pytest.approx(expected["signal"], rel=6e-13)
    assert tally.noise == pytest.approx(expected["noise"], rel=6e-13)
    assert tally.dead_zone == pytest.approx(expected["dead_zone"], rel=6e-13)
    assert tally.along == pytest.approx(expected["along"], abs=6e-13 * expected["along_magnitudes"])  # of both signs


def test_the_counts_of_a_small_example_are_those_of_a_reader() -> None:
    # fp16: 2**-25 is a tie that goes to zero, 2**-24 is subnormal and exact, 65519 rounds to 65504, 65520 to inf
    x = torch.tensor([0.0, 2.0**-25, 2.0**-24, 65519.0, 65520.0, math.nan])
    t = fpsim.tally(x, "fp16")
    assert (t.count, t.nonzero, t.underflow, t.subnormal, t.overflow, t.nonfinite, t.exact) == (6, 4, 1, 1, 1, 1, 2)
    assert (t.underflow_fraction, t.overflow_fraction) == (1 / 4, 1 / 6)
    assert t.exponents == {-25: 1, -24: 1, 15: 2}


def test_saturation_is_counted_from_half_an_ulp_beyond_the_largest_value() -> None:
    # e4m3fn: largest 448, the next code would be 480; 463 still rounds to 448 as if unbounded, 464 does not
    t = fpsim.tally(torch.tensor([448.0, 463.0, 464.0, -1e6]), "e4m3fn")
    assert (t.overflow, t.exact) == (2, 1)


def test_a_scale_moves_the_numbers_before_they_are_rounded() -> None:
    x = samples()
    for log2_scale in (-7, 3, 20):
        assert fpsim.tally(x, "fp16", log2_scale) == fpsim.tally(x.double() * 2.0**log2_scale, "fp16")
    assert fpsim.tally(torch.tensor([2.0**-30]), "fp16").underflow == 1
    assert fpsim.tally(torch.tensor([2.0**-30]), "fp16", log2_scale=6).underflow == 0


def test_sqnr_is_the_ratio_of_energies_in_decibels() -> None:
    x = torch.tensor([1.0 + 2.0**-11, 1.0])  # the first is a tie of fp16 and goes down by 2**-11
    expected = 10 * math.log10(((1 + 2.0**-11) ** 2 + 1) / 2.0**-22)
    assert fpsim.tally(x, "fp16").sqnr_db == pytest.approx(expected, rel=4e-16)  # one rounding of a float64
    assert fpsim.tally(torch.ones(3), "fp16").sqnr_db == math.inf
    assert math.isnan(fpsim.tally(torch.zeros(3), "fp16").sqnr_db)


@pytest.mark.parametrize(
    ("fmt", "rounding"),
    [
        ("fp16", "nearest_even"),
        ("e4m3fn", "stochastic"),
        ("e2m1fn", "toward_zero"),
        ("mxfp4", "nearest_even"),
        ("nvfp4", "stochastic"),
    ],
)
def test_the_parts_of_an_error_are_those_of_exact_fractions(fmt: str, rounding: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(16, 64, generator=generator) * torch.exp2(torch.randint(-9, 3, (16, 64), generator=generator))
    torch.manual_seed(1)
    r = fpsim.round_to(x, fmt, rounding)
    torch.manual_seed(1)
    tally = fpsim.tally(x, fmt, rounding=rounding)
    pairs = [(Fraction(v), Fraction(w)) for v, w in zip(x.flatten().tolist(), r.flatten().tolist(), strict=True)]
    bias = sum(v * (w - v) for v, w in pairs) / sum(v * v for v, _ in pairs)
    parts = [
        sum((bias * v) ** 2 for v, _ in pairs),
        sum((w - (1 + bias) * v) ** 2 for v, w in pairs if w == 0),
        sum((w - (1 + bias) * v) ** 2 for v, w in pairs if w != 0),
    ]
    noise = sum((w - v) ** 2 for v, w in pairs)
    assert sum(parts) == noise > 0  # exactly: the first part is orthogonal to the others
    assert tally.scale_bias == pytest.approx(float(bias), rel=1e-9, abs=1e-12)
    assert [*tally.error_shares] == pytest.approx([float(part / noise) for part in parts], abs=1e-11)


def test_a_scale_that_lets_the_largest_saturate_is_seen_as_its_bias() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    floor, ceil, stochastic = (
        fpsim.tally(x, f"e2m1fn per 32 {rule}", rounding=rounding)
        for rule, rounding in (("floor", "nearest_even"), ("ceil", "nearest_even"), ("ceil", "stochastic"))
    )
    assert floor.scale_bias < -0.01
    assert floor.error_shares.scale > 3 * ceil.error_shares.scale
    assert abs(stochastic.scale_bias) < 2e-3  # unbiased where nothing saturates
    assert ceil.underflow_fraction > floor.underflow_fraction
    assert ceil.error_shares.dead_zone > floor.error_shares.dead_zone


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4_row", "e4m3fn"])
def test_masks_are_no_part_of_an_error(fmt: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    masked = torch.where(torch.rand(64, 64) < 0.3, -torch.finfo(torch.float32).max, x)
    found, zeros = fpsim.tally(masked, fmt), fpsim.tally(torch.where(masked < -1e38, 0.0, masked), fmt)
    assert (found.signal, found.noise) == pytest.approx((zeros.signal, zeros.noise))
    assert found.scale_bias == pytest.approx(zeros.scale_bias)
    assert [*found.error_shares] == pytest.approx([*zeros.error_shares])


def test_the_parts_of_no_error_are_none() -> None:
    for x in (torch.ones(3), torch.zeros(3), torch.empty(0), torch.full((2,), math.nan)):
        tally = fpsim.tally(x, "fp16")
        assert (tally.scale_bias, [*tally.error_shares]) == (0, [0, 0, 0])
    tally = fpsim.tally(torch.tensor([1e-9]), "fp16")
    assert tally.scale_bias == -1  # all is gone
    far = fpsim.tally(torch.full((4,), 2e-154, dtype=torch.float64), fpsim.FixedPoint(8, -4), rounding="up")
    assert far.error_shares.scale == pytest.approx(1)  # a bias whose square no float64 holds
    assert tally.error_shares.scale == pytest.approx(1)


def test_empty_scalar_strided_half_and_numpy_inputs_are_counted() -> None:
    assert fpsim.tally(torch.empty(0), "fp16").count == 0
    assert fpsim.tally(torch.tensor(1e-9), "fp16").underflow == 1
    x = samples()[:5000].reshape(50, 100)
    assert fpsim.tally(x.T[::2], "e5m2") == fpsim.tally(x.T[::2].contiguous(), "e5m2")
    assert fpsim.tally(x.numpy(), "e5m2") == fpsim.tally(x, "e5m2")
    half = x.clamp(-100, 100).half()
    assert fpsim.tally(half, "e4m3fn") == fpsim.tally(half.float(), "e4m3fn")
    assert fpsim.tally(np.array([2.0**-1070]), "fp16").exponents == {-1023: 1}  # float64's subnormals share a bin


@pytest.mark.parametrize("scale", [1.5, "2", True, None])
def test_a_scale_that_is_no_integer_is_refused(scale: object) -> None:
    with pytest.raises(TypeError, match="exponent of a power of two"):
        fpsim.tally(torch.ones(1), "fp16", log2_scale=scale)  # type: ignore[arg-type]


def test_scales_are_those_with_which_float64_loses_nothing() -> None:
    x = torch.tensor([1.0])
    assert fpsim.tally(x, "fp32", log2_scale=1022).exponents == {1022: 1}
    assert fpsim.tally(x, "fp32", log2_scale=-1022).exponents == {-1022: 1}
    for scale in (1023, -1023):
        with pytest.raises(ValueError, match="-1022 to 1022"):
            fpsim.tally(x, "fp32", log2_scale=scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_lost_at_a_scale_is_counted_as_by_hand(fmt: str, dtype: torch.dtype) -> None:
    f, x = fpsim.as_format(fmt), samples(dtype)
    for k in (-9, 0, 6):
        scaled = torch.ldexp(x.double(), torch.tensor(k))
        rounded = torch.ldexp(fpsim.round_to(scaled, fmt), torch.tensor(-k)).to(dtype)
        expected = [0, 0, 0]
        for before, after in zip(x.double().tolist(), rounded.double().tolist(), strict=True):
            expected[0] += before == 0
            expected[1] += before != 0 and after == 0
            above = abs(before) > math.ldexp(f.largest, -k)
            expected[2] += math.isfinite(before) and (above or not math.isfinite(after))
        assert lost_between(x, rounded, f.largest, torch.tensor([k])).tolist() == expected
    assert expected[1] > 0 or f.exponent_bits == 8
    assert expected[2] > 0


def test_what_is_lost_between_threads_and_strides_is_the_same() -> None:
    x = torch.randn(1500, 1400, generator=torch.Generator().manual_seed(0)) * 1e-4
    rounded, scale = fpsim.round_to(x, "e5m2"), torch.tensor([0])
    expected = [int((x == 0).sum()), int(((x != 0) & (rounded == 0)).sum()), 0]
    assert lost_between(x, rounded, 57344.0, scale).tolist() == expected
    assert lost_between(x.T, rounded.T, 57344.0, scale).tolist() == expected
    assert lost_between(x[:0], rounded[:0], 57344.0, scale).tolist() == [0, 0, 0]


def test_updates_are_counted_as_by_hand_an_infinity_that_stays_is_lost_and_a_nan_is_a_change() -> None:
    before = torch.tensor([1.0, 1.0, 2.0, -4.0, math.inf, math.nan, 0.0])
    after = torch.tensor([1.0, 1.5, 1.0, -4.0, math.inf, math.nan, -0.0])
    intended = torch.tensor([0.25, 0.5, -2.0, 0.0, 1.0, 1.0, 1.0])
    assert wanted_and_lost(before, after, intended) == (6, 3)
    signs = torch.tensor([1, -1, -1, 1, 0, 0, 0], dtype=torch.int8)
    finite = slice(0, 4)
    counts = UpdateCounts.of(before[finite], after[finite], intended[finite], signs[finite])
    # inner: 0.25 * 0 + 0.5 * 0.5 + 2 * 1; norm: 1/16 + 1/4 + 4
    assert counts == UpdateCounts(wanted=3, lost=1, changes=2, flips=1, inner=2.25, norm=4.3125)
    assert (counts.share, counts.edq) == (1 / 3, 2.25 / 4.3125)
    assert signs.tolist() == [1, 1, -1, 1, 0, 0, 0]
    counts.add(counts)
    assert (counts.wanted, counts.norm, counts.share) == (6, 8.625, 1 / 3)
    assert (UpdateCounts().share, UpdateCounts().edq) == (None, None)
