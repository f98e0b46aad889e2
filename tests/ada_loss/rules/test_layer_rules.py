"""Rules of one layer against the golden vectors of the study, NumPy in float64, fractions, and Monte Carlo."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import fpsim
from ada_loss.rules import LAYER_RULES, LayerRule, as_layer_rule, layer_rule
from ada_loss.rules.formulas import bounded, branch_log2_scale, exact, fitting_log2_scale, floor_log2
from ada_loss.rules.layer import AbsRange, ApproxRange, Exact
from fpsim.tensors.moments import Moments, binades, moments_of

FP16 = (6.0e-8, 65504.0)
NONE = Moments(*[0.0] * 10)


def moments(x: torch.Tensor | np.ndarray, logs: bool = False) -> Moments:  # type: ignore[type-arg]
    return Moments(*moments_of(torch.as_tensor(x), logs).tolist())


def alternating(size: float, *shape: int) -> torch.Tensor:
    n = math.prod(shape)
    return (torch.arange(n) % 2 * -2.0 + 1.0).double().reshape(shape) * size


# Golden vectors of the study: computed there by code of its own in float64.


@pytest.mark.parametrize(
    ("share", "half_width", "least_deviation", "quantile"),
    [
        (1e-2, 1.253346951e-2, 4.787182e-6, -2.326348),
        (1e-3, 1.253314465e-3, 4.787306e-5, -3.090232),
        (1e-4, 1.253314141e-4, 4.787307e-4, -3.719016),
        (1e-5, 1.253314137e-5, 4.787307e-3, -4.264891),
    ],
)
def test_the_half_width_is_that_of_a_normals_middle_share(
    share: float, half_width: float, least_deviation: float, quantile: float
) -> None:
    z, _, _, q, _ = ApproxRange(share).parameters()
    assert z == pytest.approx(half_width, rel=1e-9)
    assert 6e-8 / z == pytest.approx(least_deviation, rel=2e-7)
    assert q == pytest.approx(quantile, abs=1e-6)
    assert z == pytest.approx(
        math.sqrt(2) * float(torch.special.erfinv(torch.tensor(share, dtype=torch.float64))), rel=1e-9
    )


A2 = [
    (2.0**-20, 2.0**-6, 32, (3212.71, 50.1985, 803.177), (16, 512, 2)),
    (2.0**-14, 2.0**-6, 32, (50.1985, 1, 12.5496), (8, 8, 2)),
    (2.0**-10, 2.0**-2, 64, (1, 1, 1), (1, 1, 1)),
    (2.0**-24, 2.0**-8, 128, (205613, 803.177, 25701.7), (16, 16384, 2)),
    (2.0**8, 2.0**4, 64, (0.249878, 1, 0.249878), (0.125, 0.125, 0.125)),
]


@pytest.mark.parametrize(("s", "w", "k", "raw", "final"), A2)
def test_approx_range_gives_the_factors_of_its_three_generations(
    s: float, w: float, k: int, raw: tuple[float, ...], final: tuple[float, ...]
) -> None:
    gradient, weight = moments(alternating(s, 8, k)), moments(alternating(w, k, k))
    for stats, expected in zip(("product", "grad", "grad+weight"), raw, strict=True):
        got = ApproxRange(stats=stats, bound="worst_case").factor(gradient, weight, k, *FP16)
        assert got == pytest.approx(expected, rel=4e-6)  # six digits
        unbound = ApproxRange(stats=stats).factor(gradient, weight, k, *FP16)
        assert unbound == pytest.approx(max(expected, 1.0), rel=4e-6)  # the limit binds in the last row, below 1
    # the gradient carries the scale 1; for the third column everything carried is 512 times larger
    factor = ApproxRange(bound="worst_case").factor(gradient, weight, k, *FP16)
    assert 2.0 ** floor_log2(bounded(factor, 0, 16.0, 1024.0)) == final[0]
    assert 2.0 ** floor_log2(bounded(factor, 0, 65504.0, 65504.0)) == final[1]
    assert 2.0 ** floor_log2(bounded(factor, 9, 16.0, 1024.0)) == final[2]


@pytest.mark.parametrize("share", [1e-6, 1e-10, 1e-14, 1e-17, 1e-300])
def test_a_share_however_small_has_its_half_width(share: float) -> None:
    # erf(x) = 2 x / sqrt(pi) to the first order; the next is smaller by x**2 / 3, some 5e-13 at the largest of these
    assert ApproxRange(share).parameters()[0] == pytest.approx(share * math.sqrt(math.pi / 2), rel=1e-12, abs=0)
    g = moments(alternating(1e-6, 4, 4))
    assert ApproxRange(share).factor(g, NONE, 1, 2.0**-24, 65504.0) == pytest.approx(
        min(2.0**-24 / (share * math.sqrt(math.pi / 2)) / 1e-6, 65504.0 / 1e-6), rel=1e-12
    )


def test_the_lognormal_form_gives_its_golden_factors() -> None:
    g = moments(torch.tensor([2.0**-30, -(2.0**-26), 2.0**-34, 0.0]).double(), logs=True)
    assert g.log_mean == pytest.approx(-20.794415417, rel=1e-10)
    assert math.sqrt(g.log_mean_square - g.log_mean**2) == pytest.approx(2.263809212, rel=1e-9)
    assert ApproxRange(1e-3, lognormal=True).factor(g, NONE, 1, *FP16) == pytest.approx(70346.654, rel=1e-7)
    assert ApproxRange(1e-5, lognormal=True).factor(g, NONE, 1, *FP16) == pytest.approx(1004894.591, rel=1e-7)
    # the original takes the standard deviation; the raw second moment is what a constant gradient needs
    assert ApproxRange(stats="grad").factor(g, NONE, 1, *FP16) == pytest.approx(7247.424, rel=1e-6)
    assert math.sqrt(g.variance) == pytest.approx(6.605528e-9, rel=1e-6)
    root = math.sqrt(g.mean_square)
    assert ApproxRange().factor(g, NONE, 1, *FP16) == pytest.approx(7247.424 * 6.605528e-9 / root, rel=1e-6)
    assert ApproxRange().factor(g, NONE, 1, 6e-8, 1e-6) == pytest.approx(1e-6 / 2**-26)  # the limit binds


def test_element_wise_range_gives_its_golden_factor() -> None:
    product = np.float64(np.float16(1e-5)) * np.float64(np.float16(1e-4))
    factor = layer_rule("element_wise_range").factor(moments(np.array([product])), NONE, 1, *FP16)
    assert factor == pytest.approx(59.90869, rel=1e-6)
    assert 2.0 ** floor_log2(factor) == 32


def test_abs_range_gives_its_golden_factors() -> None:
    g, w = moments(torch.tensor([2.0**-20, -(2.0**-10)])), moments(torch.tensor([2.0**-8, 2.0**-2]))
    assert layer_rule("abs_range").factor(g, w, 8, *FP16) == pytest.approx(2.013266, rel=1e-6)
    g, w = moments(torch.tensor([2.0**-28, -(2.0**-10)])), moments(torch.tensor([2.0**-10, 2.0**-2]))
    assert layer_rule("abs_range").factor(g, w, 8, *FP16) == pytest.approx(2061.584, rel=1e-6)


@pytest.mark.parametrize(
    ("carried", "tags", "target"),
    [
        ((100, 50), (64, 16), 64),
        ((60000, 1000), (8, 1024), 8),
        ((60000, 60000), (1, 64), 1),
        ((65504, 1), (1, 2), 0.5),
        ((1e6, 1), (1, 1), 0.0625),
    ],
)
def test_branches_meet_at_the_golden_scales(carried: tuple[float], tags: tuple[int], target: float) -> None:
    true = [c / t for c, t in zip(carried, tags, strict=True)]
    assert 2.0 ** branch_log2_scale(true, [int(math.log2(t)) for t in tags], 65504.0) == target


def test_branches_that_fit_nowhere_are_an_error() -> None:
    with pytest.raises(OverflowError, match=r"3e\+06 does not fit below 65504 even at the scale 2\*\*-4"):
        branch_log2_scale([3e6, 1.0], [0, 0], 65504.0)


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ((16.0, 1024.0), {1: 16, 256: 4, 512: 2, 1024: 1, 2048: 0.5, 32768: 0.03125}),
        ((65504.0, 65504.0), {1: 2**15, 256: 128, 512: 64, 1024: 32, 2048: 16, 32768: 1}),
    ],
)
def test_caps_are_the_golden_ones(bounds: tuple[float, float], expected: dict[int, float]) -> None:
    for tag, cap in expected.items():
        assert 2.0 ** floor_log2(bounded(math.inf, int(math.log2(tag)), *bounds)) == cap


@pytest.mark.parametrize(
    ("name", "least_deviation"), [("fp16", 4.756e-5), ("bf16", 7.3e-38), ("e5m2", 1.217e-2), ("e4m3fn", 1.558)]
)
def test_each_formats_least_deviation_is_the_golden_one(name: str, least_deviation: float) -> None:
    fmt = fpsim.as_format(name)
    z = ApproxRange().parameters()[0]
    assert fmt.smallest / z == pytest.approx(least_deviation, rel=2e-3)
    rms = fmt.smallest / z / 1.0001
    g = Moments(10, 10, 0.0, rms**2, -rms, rms, rms, rms)
    assert ApproxRange().factor(g, NONE, 1, fmt.smallest, fmt.largest) == pytest.approx(1.0001, rel=1e-6)


# The formulas, slowly.


def slowly(g: np.ndarray, w: np.ndarray, k: int, u_min: float, u_max: float, share: float) -> float:  # type: ignore[type-arg]
    square = np.mean(g.astype(np.float64) ** 2) * np.mean(w.astype(np.float64) ** 2)
    z = math.sqrt(2) * float(torch.special.erfinv(torch.tensor(share, dtype=torch.float64)))
    limit = u_max / (float(np.abs(g).max()) * max(1.0, k * float(np.abs(w).max())))
    return min(max(u_min / (z * math.sqrt(square * k / 2)), 1.0), limit)


@pytest.mark.parametrize("share", [1e-2, 1e-3, 1e-5])
@pytest.mark.parametrize("name", ["fp16", "e5m2", "e4m3fn", "cb16"])
def test_approx_range_is_its_formula_in_float64(name: str, share: float) -> None:
    fmt, rng = fpsim.as_format(name), np.random.default_rng(0)
    for exponent in (-60, -30, -12, 0, 9):
        g = (rng.standard_normal((16, 64)) * 2.0**exponent).astype(np.float32)
        w = (rng.standard_normal((64, 32)) * 0.1 + 0.02).astype(np.float32)
        got = ApproxRange(share, bound="worst_case").factor(moments(g), moments(w), 64, fmt.smallest, fmt.largest)
        assert got == pytest.approx(slowly(g, w, 64, fmt.smallest, fmt.largest, share), rel=1e-9)
        measured = ApproxRange(share).factor(moments(g), moments(w), 64, fmt.smallest, fmt.largest)
        assert measured == pytest.approx(slowly(g, w, 64, fmt.smallest, math.inf, share), rel=1e-9)


def test_a_gradient_with_one_number_has_a_factor_and_one_of_zeros_has_none() -> None:
    fmt, w = fpsim.as_format("fp16"), np.full((64, 32), 0.5, np.float32)
    g = np.zeros((16, 64), np.float32)
    assert ApproxRange().factor(moments(g), moments(w), 64, fmt.smallest, fmt.largest) == 1.0
    g[3, 5] = 2.0**-20
    got = ApproxRange().factor(moments(g), moments(w), 64, fmt.smallest, fmt.largest)
    assert got == pytest.approx(slowly(g, w, 64, fmt.smallest, math.inf, 1e-3), rel=1e-9)


@pytest.mark.parametrize("deviation", [1e-8, 1e-7, 1e-6, 1e-5])
def test_a_tolerated_share_of_a_thousandth_gives_half_of_it_in_fp16(deviation: float) -> None:
    torch.manual_seed(0)
    g = torch.randn(512, 512) * deviation
    g[torch.rand(512, 512) < 0.5] = 0
    w = torch.randn(512, 512) * math.sqrt(2 / 512)
    fmt = fpsim.as_format("fp16")
    factor = ApproxRange().factor(moments(g), moments(w), 512, fmt.smallest, fmt.largest)
    product = g @ w

    def share(scale: float) -> float:
        return float((fpsim.round_to(product * scale, "fp16") == 0).double().mean())

    # fp16 flushes at 2**-25, half of its smallest magnitude, which halves the share; the zeros of the gradient count
    # twice, in its second moment and as half of the terms, which makes the factor sqrt(2) larger than it need be
    assert share(factor) == pytest.approx(1e-3 / 2 / math.sqrt(2), rel=0.15)  # 5 deviations of 92 in 262144
    assert share(2.0 ** floor_log2(factor)) == pytest.approx(5e-4, rel=0.45)  # a power of two between 1 and 2 lower
    assert share(1.0) > 1.4e-3


@pytest.mark.parametrize("share", [0.0, 1e-3, 0.1, 0.5])
def test_exact_finds_the_smallest_scale_that_keeps_the_share(share: float) -> None:
    rng = np.random.default_rng(1)
    for fmt in ("fp16", "e4m3fn"):
        f = fpsim.as_format(fmt)
        for case in range(20):
            x = rng.standard_normal(200) * 2.0 ** rng.integers(-40, -5, 200)
            x[rng.random(200) < 0.3] = 0
            if case % 2:
                x = 2.0 ** np.round(np.log2(np.abs(x) + 1e-30)) * (x != 0)  # ties
            counts, first = binades(torch.tensor(x, dtype=torch.float32))
            k = exact(counts.tolist(), first, math.floor(math.log2(f.smallest)) - 1, share)

            def lost(k: int, x: np.ndarray = x, f: fpsim.FloatFormat = f) -> Fraction:  # type: ignore[type-arg]
                # IEEE 754-2019, 4.3.1: half of the smallest magnitude is a tie, and zero is even
                half = Fraction(f.smallest) / 2
                values = [Fraction(v) for v in np.float32(x).tolist() if v]
                return Fraction(sum(abs(v) * Fraction(2) ** k <= half for v in values), len(values))

            assert lost(k) <= share
            assert lost(k - 1) > share


def test_of_zeros_exact_asks_nothing() -> None:
    assert exact([0] * 256, -127, -25, 0.0) == 0


# Powers of two, limits, invariants.


def test_a_factor_just_below_a_power_of_two_rounds_down() -> None:
    for k in range(-30, 31):
        for dtype in (np.float32, np.float64):
            below = float(np.nextafter(dtype(2.0**k), dtype(0)))
            assert (floor_log2(below), floor_log2(2.0**k)) == (k - 1, k)
    assert [floor_log2(x) for x in (0.0, -1.0, math.inf, math.nan)] == [0, 0, 0, 0]


@pytest.mark.parametrize("name", ["fp16", "e5m2", "e4m3fn", "cb16", "dlfloat16"])
def test_the_largest_scale_that_fits_fits_and_the_next_does_not(name: str) -> None:
    fmt = fpsim.as_format(name)
    rng = np.random.default_rng(2)
    values = [*(rng.standard_normal(300) * 2.0 ** rng.integers(-60, 60, 300)), fmt.largest, fmt.smallest, 1.0]
    for amax in map(abs, values):
        k = fitting_log2_scale(float(amax), fmt.largest)
        assert Fraction(float(amax)) * Fraction(2) ** k <= Fraction(fmt.largest)
        assert Fraction(float(amax)) * Fraction(2) ** (k + 1) > Fraction(fmt.largest)


def test_the_factor_depends_on_the_weight() -> None:
    g = moments(alternating(2.0**-20, 8, 8))
    small, large = (ApproxRange().factor(g, moments(alternating(w, 8, 8)), 8, *FP16) for w in (0.01, 0.1))
    assert small == pytest.approx(10 * large)


def test_a_gradient_that_carries_more_asks_for_less() -> None:
    g, w = alternating(2.0**-30, 8, 32), moments(alternating(2.0**-6, 32, 32))
    for name in ("approx_range", "abs_range"):
        one, four = (layer_rule(name).factor(moments(g * c), w, 32, *FP16) for c in (1, 16))
        assert one == 16 * four


def test_factors_are_monotone() -> None:
    g, w = moments(alternating(2.0**-20, 8, 32)), moments(alternating(2.0**-6, 32, 32))
    of = ApproxRange().factor
    assert ApproxRange(1e-4).factor(g, w, 32, *FP16) > of(g, w, 32, *FP16)
    assert of(g, w, 32, 1e-7, 65504.0) > of(g, w, 32, *FP16)
    assert of(g, w, 64, *FP16) < of(g, w, 32, *FP16)


@pytest.mark.parametrize("rule", [ApproxRange(bound="worst_case"), AbsRange()])
def test_the_scaled_gradient_itself_never_overflows(rule: LayerRule) -> None:
    # K max|W| < 1: without the max(1, .) of the limit the gradient would leave the range before the product
    g, w = moments(torch.tensor([1e-12, 10.0])), moments(torch.tensor([1e-9, 1e-6]))
    assert rule.factor(g, w, 4, 1.0, 448.0) <= 44.8


@pytest.mark.parametrize("name", ["approx_range", "abs_range", "element_wise_range", "fixed"])
def test_zeros_and_what_is_not_finite_get_the_factor_one(name: str) -> None:
    rule, w = layer_rule(name), moments(torch.ones(4))
    for g in (torch.zeros(4), torch.tensor([1.0, math.inf]), torch.tensor([math.nan, 1.0]), torch.empty(0)):
        assert rule.factor(moments(g), w, 4, *FP16) == 1
    if name in ("approx_range", "abs_range"):
        assert rule.factor(moments(torch.full((4,), 1e-9)), moments(torch.zeros(4)), 4, *FP16) == 1


@pytest.mark.parametrize("stats", ["grad+weight", "product", "grad"])
def test_a_constant_gradient_has_a_size_though_no_deviation(stats: str) -> None:
    for n, size in ((4, 2.0**-30), (2**20 - 3, 0.1 * 2.0**-30)):  # of the second the sums are rounded
        got = ApproxRange(stats=stats).factor(moments(torch.full((n,), size)), NONE, 1, *FP16)
        assert got == 1 if stats == "grad" else got > 1000  # the original's deviation of a constant is 0


def test_the_originals_second_generation_takes_the_deviation_and_no_weight() -> None:
    rng = np.random.default_rng(0)
    g, w = (rng.standard_normal((16, 64)) * 1e-8 + 3e-8).astype(np.float32), moments(rng.standard_normal((64, 8)) * 1e3)
    z = math.sqrt(2) * float(torch.special.erfinv(torch.tensor(1e-3, dtype=torch.float64)))
    needed, limit = 6e-8 / (z * float(np.std(g.astype(np.float64)))), 65504.0 / float(np.abs(g).max())
    assert ApproxRange(stats="grad").factor(moments(g), w, 64, *FP16) == pytest.approx(min(needed, limit), rel=1e-6)
    bounded_rule = ApproxRange(stats="grad", bound="worst_case")
    assert bounded_rule.factor(moments(g), w, 64, 6e-8, 1e-6) == pytest.approx(1e-6 / np.abs(g).max())


def test_a_wide_spread_overflows_no_exponential() -> None:
    g = moments(torch.tensor([1e-300, 1e300], dtype=torch.float64), logs=True)
    assert 0 < ApproxRange(lognormal=True).factor(g, NONE, 1, *FP16) < 1


# The door.


@pytest.mark.parametrize("name", LAYER_RULES)
def test_every_rule_has_its_name(name: str) -> None:
    rule = as_layer_rule(name)
    assert isinstance(rule, LayerRule)
    assert rule.name == name
    assert as_layer_rule(rule) is rule


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("approx_range", {"n_uf_threshold": 0}, r"n_uf_threshold=0 makes no approx_range rule: .* between 0 and 1"),
        ("approx_range", {"n_uf_threshold": math.nan}, "n_uf_threshold=nan"),
        ("approx_range", {"stats": "mean"}, "stats='mean'"),
        ("approx_range", {"lognormal": 1}, "lognormal=1"),
        ("approx_range", {"bound": "worst"}, "bound='worst'"),
        ("element_wise_range", {"max_rescue_ratio": 0.0}, "max_rescue_ratio=0.0"),
        ("fixed", {"fixed_loss_scale": -1.0}, "fixed_loss_scale=-1.0"),
        ("fixed", {"fixed_loss_scale": math.inf}, "fixed_loss_scale=inf"),
        ("exact", {"n_uf_threshold": 1.0}, "n_uf_threshold=1.0"),
        ("current", {"margin": -1}, "margin=-1 makes no current rule: it must be a whole number, 0 or more"),
        ("amax_history", {"length": 0}, "length=0"),
        ("amax_history", {"margin": 0.5}, "margin=0.5"),
    ],
)
def test_impossible_parameters_are_refused(name: str, params: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_rule(name, **params)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"Unknown layer rule 'aprox_range'\. Did you mean 'approx_range'\? Known: approx"
    ):
        layer_rule("aprox_range")
    with pytest.raises(TypeError, match=r"'exact' has no parameter 'threshold'\. It has: n_uf_threshold\."):
        layer_rule("exact", threshold=1)
    with pytest.raises(TypeError, match=r"It has: none\."):
        layer_rule("abs_range", x=1)


def test_rules_are_values() -> None:
    assert Exact(1e-3) == layer_rule("exact")
    assert len({Exact(), Exact(), Exact(1e-2)}) == 2
