"""Stochastic rounding: exact for every noise value, unbiased, and the same however the work is cut."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache

import numpy as np
import oracle
import pytest
import torch
from numba import njit

import fpsim
from fpsim import FloatFormat, as_format, round_to
from fpsim.rounding import NOISE_BLOCK, STOCHASTIC, make_plan, make_round, threefry

FORMATS = ["fp16", "bf16", "cb16", "e4m3fn", "e5m2", "e2m1fn", "e4m3fnuz", "p3109_p3", "dlfloat16", "tf32"]
CUSTOM = [FloatFormat(4, 3, subnormals=False), as_format("e5m0"), as_format("e3m3")]
ALL = [*map(as_format, FORMATS), *CUSTOM]


def rounded_with(f: FloatFormat, x: float, noise: int, random_bits: int | None, width: int) -> float:
    """The compiled core on one value and one chosen 32-bit noise word."""
    plan = make_plan(f, "stochastic", None, random_bits, width)
    uint, sint, floating = ((np.uint32, np.int32, np.float32), (np.uint64, np.int64, np.float64))[width == 64]
    p = plan.parameters
    arguments = (uint(v % 2**64) for v in (p[2], p[3], p[4], p[5], p[6] << (width - 32), p[7]))
    bits = np.array([x], floating).view(uint)[0]
    result = _core(plan.shape, width)(bits, uint(noise << (width - 32)), sint(p[0]), sint(p[1]), *arguments)
    return float(np.array([result], uint).view(floating)[0])


@cache
def _core(shape: int, width: int) -> Callable[..., int]:
    return make_round(STOCHASTIC, shape, width)


def points(f: FloatFormat, width: int) -> list[float]:
    values = oracle.make(f.exponent_bits, f.mantissa_bits, f.bias, f.specials, f.subnormals).magnitudes
    pairs = [(0, 1), (1, 2), (len(values) // 2, len(values) // 2 + 1), (len(values) - 2, len(values) - 1)]
    shares = (Fraction(1, 3), Fraction(1, 2), Fraction(1, 1000), Fraction(999, 1000))
    found = [float(values[a] + (values[b] - values[a]) * share) for a, b in pairs for share in shares]
    found += [f.smallest * 2.0**-20, f.smallest * 1.25 * 2.0**-9]
    return [float(np.float32(v)) if width == 32 else v for v in found]


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("random_bits", [None, 1, 8, 23])
@pytest.mark.parametrize("f", ALL, ids=str)
def test_the_share_of_noise_words_that_round_up_is_the_distance(
    f: FloatFormat, random_bits: int | None, width: int
) -> None:
    fmt = oracle.make(f.exponent_bits, f.mantissa_bits, f.bias, f.specials, f.subnormals)
    for x in points(f, width):
        below, above, _ = oracle.neighbours(fmt, Fraction(x))
        expected = oracle.round_up_probability(fmt, x, random_bits or 32)
        # rounding up is monotone in the noise: find the first word that does, by bisection over all 2**32
        low, high = 0, 2**32
        while low < high:
            middle = (low + high) // 2
            up = rounded_with(f, x, middle, random_bits, width)
            assert up in (float(below), float(above))
            low, high = (low, middle) if up == float(above) and above != below else (middle + 1, high)
        assert Fraction(2**32 - low, 2**32) == expected, (x, random_bits)


def test_values_of_the_format_stay_whatever_the_noise() -> None:
    for f in ALL:
        for x in (f.smallest, f.largest, -f.largest, 1.0 if f.largest >= 1 else f.smallest):
            for noise in (0, 1, 2**31, 2**32 - 1):
                assert rounded_with(f, x, noise, None, 32) == x


def test_threefry_gives_the_known_answers() -> None:
    # Random123, kat_vectors: threefry4x32, 20 rounds, counter 0, key 0
    zero = np.uint32(0)
    words = njit(lambda a, b, c, d: threefry(a, b, c, d, 20))(zero, zero, zero, zero)
    assert [int(w) for w in words] == [0x9C6CA96A, 0xE17EAE66, 0xFC10ECD4, 0x5256A7D8]


@pytest.mark.parametrize("name", ["fp16", "e4m3fn", "bf16", "dlfloat16"])
def test_the_mean_is_the_number_itself(name: str) -> None:
    f = as_format(name)
    n = 2**20
    for x in (1 + f.epsilon / 3, -(1.5 + f.epsilon / 7), f.smallest / 5):
        exact = float(np.float32(x))
        values = round_to(torch.full((n,), exact), name, "stochastic").double()
        gap = float(values.max() - values.min())
        share = abs(float(values.mean()) - exact) / gap
        assert share < 5 * 0.5 / math.sqrt(n)  # five standard deviations of a mean of n coins


def noisy(x: torch.Tensor, seed: int = 7) -> torch.Tensor:
    fpsim.manual_seed(seed)
    return round_to(x, "e4m3fn", "stochastic")


def test_the_result_does_not_depend_on_threads_strides_or_place() -> None:
    x = torch.randn(2**19 + 77)
    one = noisy(x)
    torch.set_num_threads(2)
    assert torch.equal(noisy(x), one)
    torch.set_num_threads(3)
    assert torch.equal(noisy(x), one)
    torch.set_num_threads(1)
    fpsim.manual_seed(7)
    assert torch.equal(round_to(x, "e4m3fn", "stochastic", out=torch.empty_like(x)), one)
    fpsim.manual_seed(7)
    assert torch.equal(fpsim.round_to_(x.clone(), "e4m3fn", "stochastic"), one)
    square = x[: 2**18].reshape(2, 2**11, 8, 8)
    for other in (square.to(memory_format=torch.channels_last), square.transpose(1, 2).contiguous().transpose(1, 2)):
        assert torch.equal(noisy(other), noisy(square))
        fpsim.manual_seed(7)
        assert torch.equal(fpsim.round_to_(other.clone(), "e4m3fn", "stochastic"), noisy(square))
    assert torch.equal(noisy(x[::3]), noisy(x[::3].clone()))


def test_a_longer_tensor_begins_with_the_same_noise() -> None:
    x = torch.randn(1000)
    for n in (1, 15, 16, 127, 128, 129, 999):
        assert torch.equal(noisy(x[:n]), noisy(x)[:n])


def test_seeds_reproduce_and_calls_differ() -> None:
    x = torch.full((4096,), 1.05)
    torch.manual_seed(1)
    first, second = (round_to(x, "e5m2", "stochastic") for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(round_to(x, "e5m2", "stochastic"), first)
    fpsim.manual_seed(1)
    own = round_to(x, "e5m2", "stochastic")
    torch.manual_seed(5)
    fpsim.manual_seed(1)
    assert torch.equal(round_to(x, "e5m2", "stochastic"), own)
    assert not torch.equal(noisy(x, 1), noisy(x, 2))


def test_saving_and_forking_torchs_generator_reaches_the_noise() -> None:
    x = torch.full((512,), 1.05)
    state = torch.get_rng_state()
    first = round_to(x, "e5m2", "stochastic")
    torch.set_rng_state(state)
    with torch.random.fork_rng():
        assert torch.equal(round_to(x, "e5m2", "stochastic"), first)
    assert torch.equal(round_to(x, "e5m2", "stochastic"), first)


def test_decisions_of_neighbours_and_of_calls_are_uncorrelated() -> None:
    n = 2**18
    x = torch.full((n,), 1.125)  # half way between two values of e5m2
    a, b = ((round_to(x, "e5m2", "stochastic").double() - 1.125) * 8 for _ in range(2))  # each -1 or 1
    bound = 5 / math.sqrt(n)  # five standard deviations of a mean of n products of coins
    assert abs(float(a.mean())) < bound
    assert abs(float((a * b).mean())) < bound
    for lag in (1, 2, 15, 16, 17, 32, 64, NOISE_BLOCK, 2048):
        assert abs(float((a[lag:] * a[:-lag]).mean())) < bound * math.sqrt(n / (n - lag))


@pytest.mark.parametrize("bits", [0, 33, 2.5, True])
def test_impossible_numbers_of_random_bits_are_refused(bits: object) -> None:
    with pytest.raises(ValueError, match="1 to 32"):
        round_to(torch.ones(1), "fp16", "stochastic", random_bits=bits)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only 'stochastic' uses it"):
        round_to(torch.ones(1), "fp16", random_bits=4)
