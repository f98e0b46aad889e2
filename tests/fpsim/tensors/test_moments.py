"""Moments, range and binades of a tensor against NumPy in float64 and fractions."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch

from fpsim.tensors.moments import PARALLEL_FROM, Moments, amax_of, binades, join_rows, moments_of
from fpsim.tensors.tally import lost_between


def moments(x: torch.Tensor) -> Moments:
    return Moments(*moments_of(x, logs=True).tolist())


def by_numpy(x: torch.Tensor) -> Moments:
    v = x.double().numpy().ravel()
    nonzero = np.abs(v[v != 0])
    logs = np.log(nonzero) if len(nonzero) else np.zeros(1)
    smallest = nonzero.min() if len(nonzero) else 0.0
    whole = [len(v), len(nonzero), v.mean(), np.mean(v * v), v.min(), v.max(), np.abs(v).max(), smallest]
    return Moments(*map(float, [*whole, logs.mean(), np.mean(logs * logs)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 1000, PARALLEL_FROM[True] + 77])
def test_the_moments_are_numpys(n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n)
    x = (torch.randn(n) + 0.3).to(dtype)
    x[1 : n // 3] = 0
    got, expected = moments(x), by_numpy(x)
    assert got[:2] == expected[:2]
    assert got[4:8] == expected[4:8]
    # n additions of values of one magnitude in float64, in another order
    assert got[2:4] == pytest.approx(expected[2:4], rel=n * 2.0**-52, abs=n * 2.0**-52)
    assert got[8:] == pytest.approx(expected[8:], rel=n * 2.0**-52, abs=n * 2.0**-50)
    assert float(amax_of(x)[6]) == expected.amax


def test_sums_of_few_numbers_are_exact() -> None:
    values = [3.0, -0.5, 2.0**-60, -0.0, 1e-40]
    x = torch.tensor(values)
    exact = [Fraction(v) for v in x.tolist()]
    got = moments(x)
    assert got.mean == pytest.approx(float(sum(exact) / 5), rel=2.0**-51)
    assert got.mean_square == pytest.approx(float(sum(v * v for v in exact) / 5), rel=2.0**-51)
    assert got.variance == got.mean_square - got.mean**2
    assert (got.amin, got.minimum, got.maximum) == (float(exact[-1]), -0.5, 3.0)


def test_tiny_numbers_are_not_lost() -> None:
    x = torch.full((100,), 1e-40)
    tiny = x[0].item()
    got = moments(x)
    assert (got.mean, got.amax, got.amin) == (pytest.approx(tiny, rel=1e-14), tiny, tiny)
    assert got.mean_square == pytest.approx(tiny * tiny, rel=1e-14)
    assert got.log_mean == pytest.approx(math.log(tiny), rel=1e-14)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("n", [3, PARALLEL_FROM[True] + 5])
def test_what_is_not_finite_shows_in_amax(n: int, value: float) -> None:
    x = torch.ones(n)
    x[n // 2] = value
    assert moments(x).amax == float(amax_of(x)[6]) == math.inf


def test_nothing_and_zeros_give_zeros() -> None:
    assert moments(torch.empty(0)) == Moments(*[0.0] * 10)
    assert moments(torch.zeros(7)) == Moments(7.0, *[0.0] * 9)
    assert moments(-torch.zeros(7)).amax == 0


def test_every_stride_counts_the_same_elements() -> None:
    x = torch.arange(24.0).reshape(4, 6) - 7
    for view in (x, x.t(), x[:, ::2], x[1:, 1:4].t(), x.t().contiguous().t(), torch.tensor(2.5)):
        assert moments(view)[:8] == pytest.approx(by_numpy(view)[:8], rel=1e-15)


def test_the_result_goes_where_it_is_told() -> None:
    out = torch.full((10,), 5.0, dtype=torch.float64)
    assert amax_of(torch.tensor([-8.0]), out) is out
    assert out.tolist() == [5.0] * 6 + [8.0] + [5.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_power_of_two_ends_its_binade(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(2000, dtype=torch.float64) * torch.exp2(torch.randint(-140, 100, (2000,)))).to(dtype)
    x[:8] = torch.tensor([1.0, -2.0, 4.0, 0.0, math.inf, math.nan, 2.0**-126, -0.5], dtype=dtype)
    smallest_normal = Fraction(torch.finfo(dtype).smallest_normal)
    expected: Counter[int] = Counter()
    for v in x.tolist():
        if v and math.isfinite(v):
            mantissa, exponent = math.frexp(abs(v))
            above = Fraction(abs(v)) > smallest_normal
            expected[
                (exponent - 2 if mantissa == 0.5 else exponent - 1)
                if above
                else -127
                if dtype is torch.float32
                else -1023
            ] += 1
    counts, first = binades(x)
    assert {first + i: n for i, n in enumerate(counts.tolist()) if n} == expected


def test_parts_of_a_large_tensor_are_joined_whatever_the_default_device() -> None:
    x = torch.ones(PARALLEL_FROM[True])
    with torch.device("meta"):  # whose memory is nowhere
        assert float(amax_of(x)[6]) == float(moments_of(x)[6]) == 1.0
        assert lost_between(x, x, 0.5, torch.zeros(1, dtype=torch.int64, device="cpu")).tolist() == [0, 0, len(x)]


def test_parts_of_one_element_are_joined_as_parts_of_many() -> None:
    x = torch.tensor([3.0, 0.0, -1.0])
    rows = torch.stack([moments_of(part, logs=True) for part in x.split(1)])
    for count in (3, 1):
        out = torch.empty(rows.shape[1], dtype=torch.float64)
        join_rows(rows[:count].numpy(), [0], out.numpy())
        whole = moments_of(x[:count], logs=True)
        torch.testing.assert_close(out, whole, rtol=2.0**-50, atol=0)  # a quotient and a sum of three, in any order
