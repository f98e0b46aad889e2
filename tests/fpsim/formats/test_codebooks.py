"""Code books: the value, the named ones against their sources, rounding against neighbours in fractions."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction

import numpy as np
import oracle
import pytest
import tiers
import torch
from codebook_oracle import dynamic_map, hif8, nearest, posit, rounded_to_posit, share
from processors import NEEDS_VECTORS

import fpsim
from fpsim import CODEBOOKS, BlockFormat, Codebook, as_format, decode, encode, round_to
from fpsim.formats.codebook import TIES
from fpsim.kernels.codebooks import any_plan, make_round_in_book
from fpsim.kernels.core import BOOK, SEARCHED_BOOK, VARIANTS, Numbers
from fpsim.tensors.launch import rounded
from fpsim.tensors.reference import noise_of, rounded_to_codebook
from fpsim.tensors.shared_scales import block_scales
from fpsim.tensors.spec import any_spec, rounding_spec
from fpsim.tensors.verify import mismatches

# Books whose corners are of every kind
BOOKS = {
    **CODEBOOKS,
    "even": Codebook((-3.0, -1.0, 0.0, 0.5, 7.0)),
    "no zero": Codebook((-1.0, 1.0, 2.5, 3.0), "up"),
    "positive": Codebook((0.5, 0.75, 4.0), "down"),
    "negative": Codebook((-4.0, -0.75, -0.5), "away"),
    "negative zero": Codebook((0.0, 1.0, -0.0, -1.0), "away"),
    "unordered": Codebook((3.0, -2.0, 0.25), "zero"),
    "close": Codebook((1.0, 1.0 + 2.0**-23, 1.0 + 2.0**-22, 1.0 + 2.0**-21), "away"),
    "far": Codebook((-(2.0**127), -(2.0**-149), 0.0, 2.0**-149, 2.0**-126, 2.0**100), "even"),
    "midpoints beyond float64": Codebook((2.0**-100, 1.0, 2.0**60), "up"),
    "with inf": Codebook((-math.inf, -2.0, 0.0, 1.0, 2.0, math.inf, math.nan), "even"),
}
FINITE_ORACLE = [name for name in BOOKS if name not in ("posit8", "hif8", "with inf")]
BF16 = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)


def borders(book: Codebook, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values, what separates them, the numbers beside these in the container, and what is not a number."""
    points = torch.tensor([*book.finite, *book.midpoints, 0.0, torch.inf, 1e-45, 3e38], dtype=torch.float64).to(dtype)
    up, down = torch.tensor(torch.inf, dtype=dtype), torch.tensor(-torch.inf, dtype=dtype)
    x = torch.cat([points, points.nextafter(up), points.nextafter(down)])
    return torch.cat([x, -x, torch.tensor([torch.nan], dtype=dtype)])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = torch.int64 if a.dtype is torch.float64 else torch.int32
    return torch.equal(a.view(integer), b.view(integer))


def expected_nearest(book: Codebook, x: torch.Tensor) -> torch.Tensor:
    found = []
    for v in x.double().tolist():
        if not math.isfinite(v):
            found.append(v if math.isnan(v) else book.finite[-1 if v > 0 else 0])
            continue
        r = nearest(book.values, book.ties, v)
        found.append(-0.0 if r == 0 and math.copysign(1, v) < 0 and book.has_negative_zero else r)
    return torch.tensor(found, dtype=torch.float64).to(x.dtype)


# The value


def test_literal_cases_of_rounding() -> None:
    x = torch.tensor([-9.0, -0.5, -0.1, 0.0, 0.125, 0.6, 9.0, torch.inf, torch.nan])
    book = Codebook((-1.0, 0.0, 0.25, 1.0), ties="up")
    assert round_to(x, book).tolist()[:-1] == [-1.0, 0.0, 0.0, 0.0, 0.25, 0.25, 1.0, 1.0]
    assert round_to(x, book)[-1].isnan()
    assert round_to(torch.tensor([0.125]), Codebook(book.values, ties="down")).tolist() == [0.0]
    assert encode(x[:-1], book).tolist() == [0, 1, 1, 1, 2, 2, 3, 3]
    assert decode(torch.tensor([3, 0]), book).tolist() == [1.0, -1.0]


@pytest.mark.parametrize("name", BOOKS)
def test_a_book_is_a_value(name: str) -> None:
    book = BOOKS[name]
    again = Codebook(book.values, book.ties, book.borders)
    for other in (as_format(repr(book)), pickle.loads(pickle.dumps(book)), again):
        assert other == book
        assert hash(other) == hash(book)
        assert str(other) == str(book)
    assert as_format(book) is book
    if name in CODEBOOKS:
        assert as_format(name) == book
        assert str(book) == name


def test_books_that_differ_are_not_equal() -> None:
    book = Codebook((-1.0, 0.0, 1.0), "up")
    others = [
        Codebook((-1.0, 0.0, 1.0), "down"),
        Codebook((-1.0, 0.0, 2.0), "up"),
        Codebook((0.0, -1.0, 1.0), "up"),
        Codebook((-1.0, 0.0, 1.0), "up", (-0.5, 0.25)),
        Codebook((-1.0, 0.0, 1.0, -0.0), "up"),
    ]
    assert len({book, *others}) == len({str(b) for b in (book, *others)}) == 6
    assert book != "ternary"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((1.0,),), "has 1 numbers. Expected: 2 to 65536"),
        (((1.0, 1.0),), "holds 1.0 twice"),
        (((0.1, 0.1 + 1e-12),), "twice, as float32"),
        (((1.0, 2.0), "nearest"), "Unknown ties 'nearest'"),
        (((1.0, 2.0), "evne"), "even"),
        (((1.0, -0.0),), "-0 without 0"),
        (((1.0, math.inf),), "1 finite values"),
        (("nf4",), "is not a sequence of numbers"),
        (((1.0, 1e39),), "beyond float32"),
        (((1.0, 2.0, 3.0), "up", (1.5,)), "1 numbers for 3 values"),
        (((1.0, 2.0), "up", (2.5,)), "does not lie between"),
        (((1.0, 3.0, 2.0),), "ties='even' needs"),
    ],
)
def test_what_makes_no_book_is_refused(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        Codebook(*arguments)  # type: ignore[arg-type]


def test_roundings_and_overflows_that_a_book_does_not_have_are_refused() -> None:
    x = torch.ones(2)
    with pytest.raises(ValueError, match="to_odd"):
        round_to(x, "nf4", "to_odd")
    with pytest.raises(ValueError, match="Expected: saturate, or None"):
        round_to(x, "nf4", overflow="inf")
    with pytest.raises(ValueError, match="Expected: inf, saturate"):
        round_to(x, "hif8", overflow="nan")
    with pytest.raises(ValueError, match="no code for it"):
        encode(torch.tensor([torch.nan]), "nf4")


def test_the_numbers_that_follow_from_a_book() -> None:
    nf4, book = CODEBOOKS["nf4"], CODEBOOKS["posit8"]
    assert (nf4.bits, nf4.largest, nf4.lowest, nf4.has_nan, nf4.has_inf) == (4, 1.0, -1.0, False, False)
    assert (book.bits, book.largest, book.smallest, book.has_nan) == (8, 2.0**24, 2.0**-24, True)
    hif8_ = CODEBOOKS["hif8"]
    assert (hif8_.bits, hif8_.largest, hif8_.smallest, hif8_.has_inf) == (8, 2.0**15, 2.0**-22, True)
    assert (CODEBOOKS["ternary"].bits, CODEBOOKS["udynamic8"].is_signed) == (2, False)
    odd = Codebook((-1.0, 0.0, 0.75, 1.25), "up")
    assert (odd.precision, odd.mantissa_bits, odd.min_ulp_exponent) == (3, 2, -2)


# The named ones


@NEEDS_VECTORS
@pytest.mark.parametrize(
    ("name", "arguments"), [("dynamic8", (True,)), ("udynamic8", (False,)), ("dynamic4", (True, 3, 4))]
)
def test_dynamic_maps_are_bitsandbytes(name: str, arguments: tuple[object, ...]) -> None:
    assert [*CODEBOOKS[name].values] == dynamic_map(*arguments)  # type: ignore[arg-type]


def test_nf4_has_zero_both_ends_and_the_quantiles_of_its_paper() -> None:
    # QLoRA, appendix E, to its printed digits
    printed = [
        -1.0, -0.6961928, -0.5250730, -0.39491748, -0.28444138, -0.18477343, -0.09105003, 0.0, 0.07958029, 0.16093020,
        0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295683, 1.0,
    ]  # fmt: skip
    np.testing.assert_allclose(CODEBOOKS["nf4"].values, printed, rtol=0, atol=1e-7)  # of printed digits


def test_hif8_has_the_values_of_its_tables() -> None:
    wanted = [hif8(code) for code in range(256)]
    assert [*map(str, CODEBOOKS["hif8"].values)] == [*map(str, wanted)]
    # table 3 and section 3: the ends
    x = torch.tensor([2.0**15, 40959.99, 40960.0, 2.0**-23, 2.0**-23 * (1 - 2.0**-20), -torch.inf, -0.0])
    wanted = [2.0**15, 2.0**15, math.inf, 2.0**-22, 0.0, -math.inf, 0.0]
    assert same(round_to(x, "hif8"), torch.tensor(wanted))
    assert round_to(torch.tensor([1e9]), "hif8", overflow="saturate").tolist() == [2.0**15]
    assert encode(torch.tensor([torch.nan, torch.inf, -0.0]), "hif8").tolist() == [0x80, 0x6F, 0]


def test_posit8_has_the_values_of_the_standard() -> None:
    wanted = [posit(code, 8) for code in range(256)]
    assert [None if math.isnan(v) else Fraction(v) for v in CODEBOOKS["posit8"].values] == wanted


def test_posit8_rounds_as_the_standard_says() -> None:
    x = torch.cat([borders(CODEBOOKS["posit8"]), BF16[::7]])
    x = x[x.isfinite()]
    wanted = torch.tensor([float(rounded_to_posit(Fraction(v), 8)) for v in x.tolist()])
    assert same(round_to(x, "posit8"), wanted)
    assert round_to(torch.tensor([1e-30, -1e-30, torch.inf]), "posit8").tolist() == [2.0**-24, -(2.0**-24), 2.0**24]


# Rounding to nearest


@pytest.mark.parametrize("name", FINITE_ORACLE)
def test_every_bfloat16_becomes_its_nearest_value(name: str) -> None:
    book = BOOKS[name]
    assert same(round_to(BF16, book)[~BF16.isnan()], expected_nearest(book, BF16)[~BF16.isnan()])
    assert round_to(BF16, book).isnan().equal(BF16.isnan())


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("name", ["nf4", "even", "no zero", "negative", "ternary", "dynamic8"])
def test_ties_go_where_the_book_says(name: str, ties: str) -> None:
    book = Codebook(sorted(BOOKS[name].values), ties)
    for dtype in (torch.float32, torch.float64):
        x = borders(book, dtype)[:-1]
        assert same(round_to(x, book), expected_nearest(book, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", FINITE_ORACLE)
def test_borders_and_their_neighbours_become_the_nearest_value(name: str, dtype: torch.dtype) -> None:
    x = borders(BOOKS[name], dtype)
    if dtype is torch.float64:
        x = torch.cat([x, torch.randn(2000, dtype=dtype) * torch.exp2(torch.randint(-160, 130, (2000,)))])
    numbers = ~x.isnan()
    assert same(round_to(x, BOOKS[name])[numbers], expected_nearest(BOOKS[name], x)[numbers])


@pytest.mark.parametrize("count", [300_000, pytest.param(10**7, marks=pytest.mark.slow)])
@tiers.parametrize("name", ["nf4", "dynamic8", "udynamic8", "hif8", "many"], keep={"nf4", "many"})
def test_float32_patterns_become_the_nearest_value(name: str, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    if name == "many":  # 2**16 values, which are searched
        many = torch.randn(1 << 17, generator=generator).unique()[: 1 << 16]
        book = Codebook(many.tolist(), "up")
        assert any_plan(book, "nearest_even", None, None, 32).shape == SEARCHED_BOOK
    else:
        book = CODEBOOKS[name]
        assert any_plan(book, "nearest_even", None, None, 32).shape == BOOK
    x = torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator).int().view(torch.float32)
    x[: count // 2] = torch.randn(count // 2, generator=generator)
    x = x[x.abs() < 30000]  # where hif8 is finite
    # bisection in float64: sums of neighbours and doubled float32 numbers are exact there
    values = np.array(sorted(v for v in book.values if math.isfinite(v)))
    sums = values[1:] + values[:-1]
    assert all(Fraction(a) + Fraction(b) == Fraction(s) for a, b, s in zip(values, values[1:], sums, strict=False))
    doubled = 2 * x.double().numpy()
    low, high = np.searchsorted(sums, doubled, "left"), np.searchsorted(sums, doubled, "right")
    index = np.where((book.ties == "up") | (doubled > 0), high, low)  # of the rest, hif8 alone ties away
    assert same(round_to(x, book), torch.from_numpy(values[index]).float())


@pytest.mark.parametrize("rounding", ["nearest_away", "toward_zero", "up", "down"])
@pytest.mark.parametrize("name", ["nf4", "dynamic8", "positive", "negative", "far", "with inf"])
def test_other_roundings_take_the_neighbour_of_their_name(name: str, rounding: str) -> None:
    book = BOOKS[name]
    x = torch.cat([borders(book), BF16[::13]])
    x = x[~x.isnan()]
    wanted = []
    for v in x.tolist():
        values = sorted(w for w in book.values if not math.isnan(w))
        up = min((w for w in values if w >= v), default=values[-1])
        down = max((w for w in values if w <= v), default=values[0])
        if rounding == "nearest_away":
            if math.isinf(up) or math.isinf(down):  # half of the last spacing, which is 1 at the top and 2 below
                nearer = (up if v >= 2.5 else 2.0) if v > 0 else (-2.0 if v > -3.0 else down)
                wanted.append(v if math.isinf(v) else nearer)
                continue
            if math.isinf(v):
                wanted.append(up if v < 0 else down)
                continue
            ends = Fraction(v) - Fraction(down), Fraction(up) - Fraction(v)
            nearer = up if ends[1] < ends[0] else down
            wanted.append(max(up, down, key=abs) if ends[0] == ends[1] else nearer)
        else:
            wanted.append(up if rounding == "up" or (rounding == "toward_zero" and v < 0) else down)
    assert same(round_to(x, book, rounding) + 0.0, torch.tensor(wanted) + 0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_dtype_that_holds_all_values_is_rounded_in_place_of_float32(dtype: torch.dtype) -> None:
    x = BF16[BF16.abs() < 60000].to(dtype)
    for name in ("ternary", "even"):
        assert torch.equal(round_to(x, BOOKS[name]), round_to(x.float(), BOOKS[name]).to(dtype))
    with pytest.raises(TypeError, match="cannot hold every value"):
        round_to(x, "nf4")


def test_shapes_strides_and_arrays() -> None:
    x = torch.randn(7, 5)
    wanted = expected_nearest(CODEBOOKS["nf4"], x.flatten()).view(7, 5)
    assert torch.equal(round_to(x.T, "nf4"), wanted.T)
    assert torch.equal(torch.from_numpy(round_to(x.numpy(), "nf4")), wanted)
    assert round_to(torch.empty(0, 3), "nf4").shape == (0, 3)
    assert torch.equal(round_to(x[0, 0], "nf4"), wanted[0, 0])
    out = torch.empty_like(x)
    assert round_to(x, "nf4", out=out) is out
    assert torch.equal(out, wanted)
    y = x.clone()
    fpsim.round_to_(y.T, "nf4")
    assert torch.equal(y, wanted)


# Codes


@pytest.mark.parametrize("name", BOOKS)
def test_codes_are_places_in_the_list(name: str) -> None:
    book = BOOKS[name]
    codes = torch.arange(len(book.values))
    values = decode(codes, book)
    assert same(values[~values.isnan()], torch.tensor([v for v in book.values if not math.isnan(v)]))
    assert torch.equal(encode(values, book), codes.int())
    assert [book.encode(book.decode(code)) for code in codes.tolist()] == codes.tolist()
    x = borders(book)
    x = x[~x.isnan()]
    assert same(decode(encode(x, book), book), round_to(x, book))
    with pytest.raises(ValueError, match=f"0 to {len(book.values) - 1}"):
        decode(codes + 1, book)
    with pytest.raises(ValueError, match="is out of range"):
        book.decode(len(book.values))
    with pytest.raises(ValueError, match="is not a value of"):
        book.encode(0.123)


# Stochastic rounding


def decided(book: Codebook, x: float, noise: int, width: int, r: int | None = None, variant: str = "A") -> float:
    """The compiled core on one value and 32 chosen random bits."""
    plan = any_plan(book, "stochastic", "saturate", r, width, variant)
    uint, sint, floating = ((np.uint32, np.int32, np.float32), (np.uint64, np.int64, np.float64))[width == 64]
    kinds = sint, sint, *[uint] * 7
    words = plan.numbers._replace(used=plan.numbers.used << (width - 32))
    numbers = Numbers._make(kind(n) for kind, n in zip(kinds, words, strict=True))
    bits = np.array([x], floating).view(uint)[0]
    core = make_round_in_book(plan.rule, plan.shape, width)
    result = core(bits, uint(noise << (width - 32)), numbers)
    return float(np.array([result], uint).view(floating)[0])


def inside(book: Codebook, width: int) -> list[float]:
    """Values, and numbers between neighbours: thirds, ties, close to either end."""
    found = [*book.finite[:3], *book.finite[-3:]]
    pairs = [*zip(book.finite, book.finite[1:], strict=False)]
    for low, high in {*pairs[:2], *pairs[-2:], pairs[len(pairs) // 2], pairs[len(pairs) // 2 - 1]}:
        found += [low + (high - low) * share_ for share_ in (2**-30, 2**-20, 1 / 3, 1 / 2, 5 / 8, 1 - 2**-20)]
    found = [float(np.float32(v)) if width == 32 else v for v in found]
    return [v for v in found if book.finite[0] <= v <= book.finite[-1]]


EXACT = [name for name in BOOKS if name not in ("far", "midpoints beyond float64")]  # distances of up to 32 bits


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("name", EXACT)
def test_a_number_goes_to_a_neighbour_as_often_as_it_is_near(name: str, width: int) -> None:
    """floor(d * 2**32) + R >= 2**32 is the border, d the share of the distance: the random words on both its sides."""
    book = BOOKS[name]
    for x in inside(book, width):
        low, high, d = share(book.values, x)
        border = 2**32 - math.floor(d * 2**32)  # from this random word on it goes up
        for noise in {0, 1, border - 2, border - 1, border, border + 1, 2**32 - 1, 2**31}:
            if 0 <= noise < 2**32:
                assert decided(book, x, noise, width) == (high if noise >= border else low), (x, noise)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("name", ["nf4", "dynamic8", "no zero", "positive", "negative", "close"])
def test_few_random_bits_decide_as_their_variant_says(name: str, width: int, variant: str) -> None:
    book = BOOKS[name]
    for r in (1, 3):
        for x in inside(book, width):
            low, high, d = share(book.values, x)
            for word in range(2**r):
                wanted = high if oracle.goes_up(d, r, word, variant) else low
                assert decided(book, x, word << (32 - r), width, r, variant) == wanted, (x, r, word)


def test_distances_of_more_than_32_bits_are_rounded_to_32() -> None:
    book = BOOKS["midpoints beyond float64"]
    for x in (0.25, 0.5, 0.7265625, 2.0**30, 2.0**59):
        low, high, d = share(book.values, x)
        # the distance is off by at most 2**-32 of itself, so the border by at most 2**32 * 2**-32 = 1, and 1 by floor
        border = 2**32 - math.floor(d * 2**32)
        assert decided(book, x, border - 3, 32) == low
        assert decided(book, x, border + 2, 32) == high


def test_all_random_words_of_eight_bits_have_the_value_as_their_mean() -> None:
    for name in ("nf4", "dynamic8", "udynamic8"):
        book = BOOKS[name]
        for low, high in [*zip(book.finite, book.finite[1:], strict=False)][:: max(1, len(book.finite) // 16)]:
            x = (low + high) / 2 if name != "nf4" else float(np.float32((low + high) / 2))
            found = [decided(book, x, word << 24, 64, 8) for word in range(256)]
            # A cuts the distance to 8 bits: too close to zero by less than 2**-8 of the spacing
            assert 0 <= abs(x) - abs(sum(found) / 256) + 1e-15 < (high - low) / 256 + 1e-15
    assert {decided(BOOKS["ternary"], 0.25, word << 24, 32, 8) for word in range(256)} == {0.0, 1.0}
    assert sum(decided(BOOKS["ternary"], -0.25, word << 24, 32, 8) for word in range(256)) / 256 == -0.25


def test_stochastic_rounding_is_unbiased_in_the_book_and_saturates_beyond() -> None:
    fpsim.manual_seed(1)
    n = 200_000
    for x in (0.3, -0.3, 0.0123, -0.9):
        found = round_to(torch.full((n,), x), "nf4", "stochastic").double()
        low, high, d = share(BOOKS["nf4"].values, float(np.float32(x)))
        assert set(found.unique().tolist()) == {low, high}
        deviation = abs(high - low) * math.sqrt(float(d * (1 - d)) / n)
        assert abs(found.mean().item() - float(np.float32(x))) < 5 * deviation  # 5 sigma: once in 1.7 million
    ends = torch.tensor([-7.0, 7.0, -torch.inf, torch.inf, 1.0, -1.0, 0.0])
    for _ in range(20):
        assert round_to(ends, "nf4", "stochastic").tolist() == [-1.0, 1.0, -1.0, 1.0, 1.0, -1.0, 0.0]
    fpsim.manual_seed(None)


def test_beyond_the_largest_value_of_a_book_with_inf_the_last_spacing_goes_on() -> None:
    fpsim.manual_seed(2)
    x = torch.tensor([40960.0, 49152.0, 49151.0, -40960.0]).repeat(10_000, 1)
    found = round_to(x, "hif8", "stochastic")
    assert found.unique().tolist() == [-math.inf, -32768.0, 32768.0, math.inf]
    up = found.isinf().double().mean(0).tolist()
    assert abs(up[0] - 0.5) < 0.025  # 5 sigma of 10,000 draws
    assert up[1] == 1.0
    assert up[2] > 0.99
    assert abs(up[3] - 0.5) < 0.025
    assert (round_to(x, "hif8", "stochastic", "saturate").abs() == 32768.0).all()
    fpsim.manual_seed(None)


def test_beyond_its_ends_a_book_with_inf_goes_on_by_its_last_spacings() -> None:
    x = torch.tensor([-3.5, -3.0, -2.9, -2.0, 2.0, 2.4, 2.5, 2.6])  # half of a spacing of 2 below, and of 1 above
    wanted = [-math.inf, -math.inf, -2.0, -2.0, 2.0, 2.0, 2.0, math.inf]
    assert round_to(x, BOOKS["with inf"]).tolist() == wanted  # ties go to the even code


def test_a_book_reaches_to_the_largest_number_of_float32() -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([3e38, -3e38, 1e38, torch.inf, -torch.inf])
    assert round_to(x, Codebook((-largest, 0.0, largest))).tolist() == [largest, -largest, 0.0, largest, -largest]


def test_the_noise_is_that_of_the_library() -> None:
    key = torch.tensor(0x123456789ABCDEF)
    x = torch.randn(1000).clamp(-1, 1)
    found = rounded(x, rounding_spec("nf4", "stochastic"), key)
    noise = noise_of(1000, int(key))
    wanted = [decided(BOOKS["nf4"], v, int(w), 32) for v, w in zip(x.tolist(), noise, strict=True)]
    assert found.tolist() == wanted


# As elements of blocks


def absmax(x: np.ndarray, book: Codebook, size: int, least: float = 0.0) -> np.ndarray:
    """torchao's scale_tensor, quantize_8bit_with_qmap and dequant_with_qmap, its nearest value being exact."""
    blocks = x.reshape(-1, size)
    amax = np.maximum(np.abs(blocks).max(1, keepdims=True), np.float32(least))
    scale = (amax / np.float32(book.largest)).astype(np.float32)
    divided = np.divide(blocks, scale, where=scale != 0, out=np.zeros_like(blocks))
    codes = [nearest(book.values, book.ties, float(v)) for v in divided.flatten()]
    return (np.array(codes, np.float32).reshape(blocks.shape) * scale).reshape(x.shape)


@pytest.mark.parametrize("name", ["dynamic8", "udynamic8", "nf4", "ulinear4", "even"])
@pytest.mark.parametrize("least", [0.0, 1e-12])
def test_blocks_are_divided_by_their_absmax(name: str, least: float) -> None:
    book = BOOKS[name]
    fmt = BlockFormat(book, 64, "fp32", least_amax=least)
    assert fmt.scale_rule == "absmax"
    x = torch.randn(32, 128) * torch.exp2(torch.randint(-60, 30, (32, 1)).float())
    x[3, :64] = 0
    x = x if book.is_signed else x.abs()
    assert same(round_to(x, fmt) + 0.0, torch.from_numpy(absmax(x.numpy(), book, 64, least)) + 0.0)
    assert round_to(x, fmt)[3, :64].abs().max() <= least


def test_the_largest_magnitude_of_a_block_stays_and_zeros_too() -> None:
    fmt = as_format("dynamic8 per 256 fp32")
    assert str(fmt) == "dynamic8 per 256 fp32"
    assert fmt == BlockFormat("dynamic8", 256, "fp32", "absmax")
    x = torch.randn(4, 512).abs() * 1e-3
    r = round_to(x, fmt)
    assert torch.equal(r.view(4, 2, 256).amax(-1), x.view(4, 2, 256).amax(-1))
    for name in ("dynamic8 per 256 fp32", "ulinear4 per 128 fp32", "nf4 per tensor fp32"):
        assert torch.equal(round_to(torch.zeros(512), name), torch.zeros(512))


@pytest.mark.parametrize("rule", ["floor", "ceil", "nearest"])
@pytest.mark.parametrize("name", ["nf4", "dynamic8", "even", "no zero", "ternary"])
def test_powers_of_two_as_scales_move_nothing_but_exponents(name: str, rule: str) -> None:
    book = BOOKS[name]
    fmt = BlockFormat(book, 32, scale_rule=rule)
    exponents = torch.randint(-90, 90, (40, 1)).float()
    exponents[0] = 0
    x = torch.randn(40, 32) * torch.exp2(exponents)
    spec = any_spec(fmt)
    scales = block_scales(x, spec).double().view(40, 1)
    assert torch.equal(scales, torch.exp2(torch.log2(scales).round()))
    wanted = expected_nearest(book, (x.double() / scales).flatten()).view(40, 32) * scales
    assert same(round_to(x, fmt) + 0.0, wanted.float() + 0.0)


@pytest.mark.full
def test_a_scale_in_eight_bits_and_one_of_the_whole_tensor() -> None:
    x = torch.randn(16, 64)
    for fmt in ("nf4 per 16 e4m3fn fp32", "nf4 per tensor fp32", "nf4 per row fp32 amax", "nf4 per 4x4 fp32"):
        r = round_to(x, fmt)
        # the spacing of nf4 is at most 0.304 of its largest value, and half of it is the error; e4m3 adds 1/16
        assert (r - x).abs().max() <= x.abs().max() * (0.304 / 2 + 1 / 16)
        assert str(as_format(fmt)) == fmt
    unnamed = BlockFormat(BOOKS["even"], 64, "fp32")
    assert str(unnamed) == f"{BOOKS['even']} per 64 fp32"
    assert as_format(repr(unnamed)) == unnamed
    across = round_to(x, "dynamic8 per 16 fp32", axis=0)
    assert torch.equal(across, round_to(x.T.contiguous(), "dynamic8 per 16 fp32").T)


def test_block_formats_that_a_book_cannot_make_are_refused() -> None:
    with pytest.raises(ValueError, match="floor, ceil, nearest"):
        BlockFormat("nf4", 32, scale_rule="even")
    with pytest.raises(ValueError, match="scale='fp32'"):
        BlockFormat(BOOKS["far"], 32)
    with pytest.raises(ValueError, match="least_amax"):
        BlockFormat("nf4", 32, "fp32", "amax", least_amax=1e-12)
    with pytest.raises(ValueError, match="absmax"):
        BlockFormat("nf4", 32, "e4m3fn", "absmax")


@tiers.parametrize("fmt", ["dynamic8 per 256 fp32", "nf4 per 32"], keep={"nf4 per 32"})  # each compiles a loop
def test_stochastic_elements_stay_between_their_neighbours(fmt: str) -> None:
    x = torch.randn(64, 256)
    mean = torch.stack([round_to(x, fmt, "stochastic") for _ in range(400)]).double().mean(0)
    # 400 draws of two values at most 0.31 * 4 apart have a deviation below 0.031 each; 16,384 of them stay in 6
    limit = 6 * 0.0322 if "nf4" in fmt else 6 * 0.5 * 0.0139 * 5 / 20 + 1e-6
    within = x.abs() < 1
    assert (mean - x)[within].abs().max() < limit
    assert not torch.equal(round_to(x, fmt, "stochastic"), round_to(x, fmt))


# In models and programs


LEVELS = Codebook((-2.0, -1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0, 2.0), "away")


def small_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))


def test_a_model_computes_with_code_books_in_its_roles() -> None:
    model, x = small_model(), torch.randn(5, 8)
    found = fpsim.quantize(model, fpsim.Policy(weight="nf4", activation=LEVELS, error="hif8", weight_grad="posit8"))
    first, last = model[0], model[2]

    def layer(of: torch.nn.Linear, value: torch.Tensor) -> torch.Tensor:
        weight, bias = (round_to(p.detach(), "nf4") for p in (of.weight, of.bias))
        return round_to(torch.nn.functional.linear(value, weight, bias), LEVELS)

    wanted = layer(last, torch.relu(layer(first, round_to(x, LEVELS))))
    y = found(x)
    assert torch.equal(y, wanted)
    y.sum().backward()
    for parameter in found.parameters():
        assert parameter.grad is not None
        assert set(parameter.grad.flatten().tolist()) <= set(CODEBOOKS["posit8"].values)
    assert {row.activation for row in fpsim.summary(found)} == {f"{LEVELS} nearest_even"}
    assert torch.equal(fpsim.quantize(small_model(), LEVELS)(x), fpsim.quantize(small_model(), repr(LEVELS))(x))


def test_operands_of_products_are_code_books_in_blocks() -> None:
    model, x = torch.nn.Linear(16, 4, bias=False), torch.randn(3, 16)
    products = fpsim.Products.by_operand(x="dynamic8 per 8 fp32", w="nf4 per 8 fp32", dy="hif8 per 4 fp32")
    y = fpsim.quantize(model, fpsim.Policy(products=products))(x)
    wanted = round_to(x, "dynamic8 per 8 fp32") @ round_to(model.weight.detach(), "nf4 per 8 fp32").T
    assert torch.equal(y, wanted)
    y.sum().backward()


@pytest.mark.full
def test_gradients_transforms_and_compiled_programs() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    for fmt in ("nf4", LEVELS, "dynamic8 per 8 fp32"):
        (gradient,) = torch.autograd.grad(round_to(x, fmt).sum(), x)
        assert torch.equal(gradient, torch.ones_like(x))
        compiled = torch.compile(lambda t, f=fmt: round_to(t * 2, f) + 1, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x.detach()), round_to(x.detach() * 2, fmt) + 1)
        assert torch.equal(torch.func.vmap(lambda t, f=fmt: round_to(t, f))(x.detach()), round_to(x.detach(), fmt))
    model = fpsim.quantize(small_model(), LEVELS)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x.detach()), model(x.detach()))


def test_a_tally_counts_what_saturates_and_what_becomes_zero() -> None:
    book = Codebook((-1.0, 0.0, 0.5, 1.0), "up")
    found = fpsim.tally(torch.tensor([0.1, -0.1, 0.5, 1.2, 1.25, -3.0, torch.inf, 0.0]), book)
    # saturation counts from half of the last spacing, 0.5 between -1 and 0, beyond the largest magnitude
    assert (found.underflow, found.overflow, found.nonfinite, found.subnormal) == (2, 2, 1, 0)
    blocks = fpsim.tally(torch.randn(4, 512), "dynamic8 per 256 fp32")
    assert (blocks.blocks, blocks.zero_blocks, blocks.scale_underflow, blocks.overflow) == (8, 0, 0, 0)


def test_a_sweep_knows_code_books_by_words_that_are_read_again() -> None:
    from ada_loss.lab.cells.cell_formats import canonical_format, label

    blocks = BlockFormat(LEVELS, 16, "fp32")
    assert canonical_format("nf4") == "nf4"
    for fmt in (LEVELS, blocks):
        text = canonical_format(fmt)
        assert as_format(text) == fmt
        assert canonical_format(text) == text
        assert label(text) == str(fmt)
    policy = canonical_format({"weight": LEVELS, "products": {"x": blocks, "w": "nf4 per 16 fp32"}})
    assert as_format(policy["weight"]) == LEVELS
    assert as_format(policy["products"]["x"]) == blocks
    assert str(LEVELS) in label(policy)
    assert "values" not in label(policy)


def test_the_second_definition_of_verify_agrees_and_sees_a_wrong_value() -> None:
    x = borders(CODEBOOKS["dynamic8"])
    spec = rounding_spec("dynamic8")
    assert mismatches(x, spec, "cpu") == (0, "")
    moved = Codebook(CODEBOOKS["dynamic8"].values, "down")
    wanted = rounded_to_codebook(x.numpy(), moved, "nearest_even")
    assert (torch.from_numpy(wanted) != round_to(x, "dynamic8").double()).sum() > 100


@pytest.mark.parametrize("ties", ["even", "up", "down", "away", "zero"])
def test_a_value_of_the_book_at_a_border_stays(ties: str) -> None:
    values = (-1.0, 0.0, 1.0, 2.0)
    book = Codebook(values, ties=ties, borders=(-0.5, 0.0, 2.0))
    assert round_to(torch.tensor(values), book).tolist() == [*values]
    book = Codebook(values, ties=ties, borders=(0.0, 1.0, 1.5))
    assert round_to(torch.tensor(values), book).tolist() == [*values]
