"""Formats that share a scale, and fixed point, as values."""

from __future__ import annotations

import pytest
import tiers
import torch
from gfloat.formats import all_block_formats

from fpsim import BLOCKS, BlockFormat, Codebook, Delayed, FixedPoint, Policy, as_format, encode, round_to


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_format_is_a_value_with_a_name(name: str) -> None:
    f = as_format(name)
    assert f is BLOCKS[name]
    assert str(f) == name
    assert as_format(repr(f)) == f
    assert hash(as_format(repr(f))) == hash(f)


@pytest.mark.parametrize("info", all_block_formats, ids=lambda info: info.name)
def test_ocp_formats_have_the_numbers_of_gfloat(info: object) -> None:
    ours = {"mxfp4_e2m1": "mxfp4"}.get(info.name, info.name)  # type: ignore[attr-defined]
    f = as_format(ours)
    assert isinstance(f, BlockFormat)
    assert (f.block, f.scale.bits) == (info.k, info.stype.k)  # type: ignore[attr-defined]
    assert f.element.bits == info.etype.k  # type: ignore[attr-defined]
    if ours != "mxint8":  # gfloat's int8 has a -128/64, which OCP MX v1.0, 5.3.3 leaves out
        assert f.element.largest == info.etype.max  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "name",
    [
        "e4m3fn per tensor fp32",
        "e5m2 per tensor fp32 delayed",
        "int8 per row fp32",
        "e4m3fn per 128x128 ceil",
        "int4 per 32",
        "e3m2 per 16 e4m3fn",
        "e2m1fn per 16x16 e4m3fn fp32",
        "e2m1fn per 32 at 0.75",
        "e2m1fn per 32 ceil at 1e-05",
        "fp16 per 8 even",
    ],
)
def test_a_systematic_name_says_all(name: str) -> None:
    f = as_format(name)
    assert str(f) == name
    assert as_format(str(f)) == as_format(repr(f)) == f


def test_what_the_words_mean() -> None:
    assert as_format("e4m3fn per 1x128 ceil").tile == (1, 128)  # type: ignore[union-attr]
    assert as_format("e5m2 per tensor delayed") == BlockFormat("e5m2", "tensor", "fp32", Delayed())  # type: ignore[arg-type]
    assert as_format("mxint8").element.values()[:2] == (-127 / 64, -126 / 64)  # type: ignore[union-attr]
    assert as_format("nvfp4").bits_per_value == 4.5  # type: ignore[union-attr]


BAD = [
    ({"element": "e4m3fn", "block": 0}, "block=0 is not a block"),
    ({"element": "e4m3fn", "block": (2, 3, 4)}, "is not a block"),
    ({"element": "e4m3fn", "block": "column"}, "is not a block"),
    ({"element": "e4m3fn", "block": 32, "scale_rule": "flor"}, "Did you mean 'floor"),
    ({"element": "e4m3fn", "block": 32, "scale_rule": "amax"}, "Expected: floor, ceil, even, nearest"),
    ({"element": "e4m3fn", "block": 32, "scale": "fp32", "scale_rule": "floor"}, "Expected: amax"),
    ({"element": "e4m3fn", "block": 32, "scale": "fp32", "scale_rule": Delayed()}, "block='tensor'"),
    ({"element": "e4m3fn", "block": 32, "tensor_scale": True}, "needs no second scale"),
    ({"element": "e4m3fn", "block": 32, "gain": 2}, "gain=2"),
    ({"element": "uint4", "block": 32}, "no negative values"),
    ({"element": "e8m0fnu", "block": 32}, "no zero and no sign"),
    ({"element": "bf16", "block": 32}, "no room for a scale"),
    ({"element": Codebook([-(2.0**-95), 0.0, 2.0**-95]), "block": 32}, r"2\*\*-95, which leaves no room"),
    ({"element": "mxfp4", "block": 32}, "format of single numbers is expected"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[m for _, m in BAD])
def test_what_makes_no_format_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockFormat(**fields)  # type: ignore[arg-type]


def test_a_book_whose_values_leave_room_for_a_power_of_two_is_an_element() -> None:
    assert BlockFormat(Codebook([-(2.0**-94), 0.0, 2.0**-94]), 32).block == 32


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("word_length", ["8", 0, 1, 25, 26, 8.0])
def test_word_lengths_are_those_that_a_float32_holds(word_length: object, signed: bool) -> None:
    least, most = (2, 25) if signed else (1, 24)  # a float32 has 24 bits and a sign
    if word_length in range(least, most + 1) and isinstance(word_length, int):
        FixedPoint(word_length, 0, signed=signed)
    else:
        with pytest.raises(
            ValueError, match=rf"makes no format that a float32.*Expected: the integers {least} to {most}"
        ):
            FixedPoint(word_length, 0, signed=signed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    ["mxfp5", "e4m3fn per banana", "BlockFormat(print('x'), 3)", "BlockFormat(" * 3000, "FixedPoint(99)"],
)
def test_what_is_no_format_is_refused_and_nothing_is_run(text: str) -> None:
    with pytest.raises(ValueError, match=r"Unknown format|word_length"):
        as_format(text)


def test_a_block_format_where_single_numbers_are_wanted_says_so() -> None:
    with pytest.raises(ValueError, match="numbers share scales"):
        Policy(activation="mxfp4")
    with pytest.raises(ValueError, match="has no codes here"):
        encode(torch.ones(2), "int8")  # type: ignore[arg-type]


# Fixed point


@tiers.parametrize(
    "rounding", ["nearest_even", "toward_zero", "up", "down", "nearest_away"], keep={"nearest_even", "up"}
)
@tiers.parametrize(
    "f",
    [FixedPoint(8, 0), FixedPoint(4, 2), FixedPoint(6, -1), FixedPoint(5, 3, signed=False)],
    keep=[FixedPoint(5, 3, signed=False)],
    ids=str,
)
def test_fixed_point_is_integers_times_a_power_of_two(f: FixedPoint, rounding: str) -> None:
    step = 2.0**-f.fraction_length
    x = torch.linspace(1.2 * f.lowest - step, 1.2 * f.largest + step, 1601, dtype=torch.float64)
    x = torch.cat([x, torch.arange(f.lowest / step - 2, f.largest / step + 2, 0.25, dtype=torch.float64) * step])
    x = x.float().double()  # numbers that both dtypes have
    units = x / step
    integers = {
        "nearest_even": torch.round(units),
        "toward_zero": torch.trunc(units),
        "up": torch.ceil(units),
        "down": torch.floor(units),
        "nearest_away": torch.sign(units) * torch.floor(units.abs() + 0.5),
    }[rounding]
    expected = (integers * step).clamp(f.lowest, f.largest)
    for dtype in (torch.float64, torch.float32):
        got = round_to(x.to(dtype), f, rounding)
        assert torch.equal(got.double(), expected)
        assert not torch.signbit(got[got == 0]).any()


def test_the_lowest_value_of_fixed_point_is_that_of_twos_complement() -> None:
    assert FixedPoint(5, 3, signed=False).lowest == 0.0
    assert FixedPoint(5, 3).lowest == -16 / 8
    assert FixedPoint(5, 3, symmetric=True).lowest == -15 / 8


def test_fixed_point_saturates_and_keeps_nan() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30, -1e30, -127.5, -128.5])
    assert str(round_to(x, "int8").tolist()) == "[127.0, -128.0, nan, 127.0, -128.0, -128.0, -128.0]"
    assert round_to(x[:2], FixedPoint(8, symmetric=True)).tolist() == [127.0, -127.0]


def test_fixed_point_rounds_stochastically_between_neighbours() -> None:
    x = torch.full((200_000,), -2.3)
    got = round_to(x, "int4", "stochastic")
    assert set(got.tolist()) == {-3.0, -2.0}
    # 200,000 draws of a coin of 0.3: five standard deviations are 0.0051
    assert abs((got == -3).double().mean().item() - 0.3) < 0.0052
