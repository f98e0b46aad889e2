"""What a format is: the table of the specification, all codes, names and refusals."""

from __future__ import annotations

import math
import pickle

import gfloat.formats
import numpy as np
import oracle
import pytest
import tiers
from format_cases import CUSTOM, GFLOAT, ML_DTYPES

import fpsim
from fpsim import FloatFormat, as_format
from fpsim.formats.floats import as_float_format

# name: exponent bits, mantissa bits, bias, largest, smallest normal, smallest subnormal; from the formats' sources
TABLE = {
    "fp32": (8, 23, 127, (2 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-149),
    "tf32": (8, 10, 127, (2 - 2.0**-10) * 2.0**127, 2.0**-126, 2.0**-136),
    "fp16": (5, 10, 15, 65504.0, 2.0**-14, 2.0**-24),
    "bf16": (8, 7, 127, (2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-133),
    "cb16": (6, 9, 31, 4290772992.0, 2.0**-30, 2.0**-39),
    "dlfloat16": (6, 9, 31, (2 - 2.0**-8) * 2.0**32, 2.0**-31 * (1 + 2.0**-9), None),
    "e4m3": (4, 3, 7, 240.0, 2.0**-6, 2.0**-9),
    "e4m3fn": (4, 3, 7, 448.0, 2.0**-6, 2.0**-9),
    "e4m3fnuz": (4, 3, 8, 240.0, 2.0**-7, 2.0**-10),
    "e4m3b11fnuz": (4, 3, 11, 30.0, 2.0**-10, 2.0**-13),
    "e5m2": (5, 2, 15, 57344.0, 2.0**-14, 2.0**-16),
    "e5m2fnuz": (5, 2, 16, 57344.0, 2.0**-15, 2.0**-17),
    "e3m4": (3, 4, 3, 15.5, 2.0**-2, 2.0**-6),
    "p3109_p3": (5, 2, 16, 49152.0, 2.0**-15, 2.0**-17),
    "p3109_p4": (4, 3, 8, 224.0, 2.0**-7, 2.0**-10),
    "hfp8_143": (4, 3, 11, 30.0, 2.0**-10, 2.0**-13),
    "e8m0fnu": (8, 0, 127, 2.0**127, 2.0**-127, None),
    "e2m3fn": (2, 3, 1, 7.5, 1.0, 0.125),
    "e3m2fn": (3, 2, 3, 28.0, 0.25, 0.0625),
    "e2m1fn": (2, 1, 1, 6.0, 1.0, 0.5),
}


def test_the_catalogue_is_the_table_of_the_specification() -> None:
    assert set(TABLE) == set(fpsim.CATALOGUE)


@pytest.mark.parametrize("name", TABLE)
def test_derived_numbers_are_those_of_the_sources(name: str) -> None:
    f, (e, m, bias, largest, normal, subnormal) = as_format(name), TABLE[name]
    assert (f.exponent_bits, f.mantissa_bits, f.bias) == (e, m, bias)
    assert (f.largest, f.smallest_normal, f.smallest_subnormal) == (largest, normal, subnormal)
    assert f.smallest == (subnormal or normal)
    assert f.epsilon == 2.0**-m


@tiers.parametrize(
    "f",
    [f for f in (*fpsim.CATALOGUE.values(), *CUSTOM) if f.bits <= 16],
    keep=tiers.one_of_each(lambda f: (f.specials, f.subnormals)),
    ids=str,
)
def test_every_code_has_its_value_and_every_value_its_code(f: FloatFormat) -> None:
    fmt = oracle.make(f.exponent_bits, f.mantissa_bits, f.bias, f.specials, f.subnormals)
    sign_bit = 2 ** (f.exponent_bits + f.mantissa_bits)
    for code in range(2**f.bits):
        value, found = f.decode(code), fmt.value(*divmod(code % sign_bit, 2**f.mantissa_bits))
        negative = -1 if code >= sign_bit and f.is_signed else 1
        if f.specials in ("fnuz", "p3109") and code == sign_bit:
            assert math.isnan(value)
        elif f.specials == "p3109" and code % sign_bit == sign_bit - 1:
            assert value == negative * math.inf
        elif found is None:
            first = code % 2**f.mantissa_bits == 0
            assert value == negative * math.inf if f.specials == "ieee" and first else math.isnan(value)
        else:
            assert (value, math.copysign(1, value)) == (negative * found[0], negative)
        if not math.isnan(value) and (value or code in (0, sign_bit)):  # without subnormals zero has many codes
            assert f.encode(value) == code


@tiers.parametrize(
    "f", [f for f in (*fpsim.CATALOGUE.values(), *CUSTOM) if f.bits <= 19], keep=lambda f: f.bits <= 12, ids=str
)
def test_values_are_those_of_the_definition(f: FloatFormat) -> None:
    expected = oracle.make(f.exponent_bits, f.mantissa_bits, f.bias, f.specials, f.subnormals).magnitudes
    assert [f.largest, f.smallest] == [float(expected[-1]), float(next(v for v in expected if v))]
    signed = 2 * len(expected) - 1 if f.is_signed else len(expected)
    assert f.finite_count == signed
    if f.bits <= 16:
        assert [v for v in f.values() if v >= 0] == [float(v) for v in expected]
        assert f.is_signed == (f.values()[0] == -f.largest)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_every_code_decodes_as_in_ml_dtypes_and_encodes_back(name: str) -> None:
    f = as_format(name)
    codes = np.arange(2**f.bits, dtype=np.uint16 if f.bits == 16 else np.uint8)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        theirs = codes.view(ML_DTYPES[name]).astype(np.float64)
    for code, value in zip(codes.tolist(), theirs.tolist(), strict=True):
        mine = f.decode(code)
        assert mine == value or (math.isnan(mine) and math.isnan(value))
        assert math.isnan(value) or math.copysign(1, mine) == math.copysign(1, value)
        if not math.isnan(value):
            assert f.encode(value) == code
    if f.has_nan:
        assert math.isnan(theirs[f.encode(math.nan)])


@pytest.mark.parametrize("name", GFLOAT)
def test_every_code_decodes_as_in_gfloat(name: str) -> None:
    f = as_format(name)
    for code in range(0, 2**f.bits, 1 if f.bits < 16 else 7):
        theirs = gfloat.decode_float(GFLOAT[name], code).fval
        mine = f.decode(code)
        assert mine == theirs or (math.isnan(mine) and math.isnan(theirs)), hex(code)


def test_dlfloat_has_one_code_for_nan_and_inf() -> None:
    f = as_format("dlfloat16")
    assert f.encode(math.inf) == f.encode(math.nan) == 0x7FFF
    assert f.encode(-math.inf) == 0xFFFF
    assert math.isnan(f.decode(0x7FFF))
    assert (f.decode(0), f.decode(1)) == (0.0, 2.0**-31 * (1 + 2.0**-9))


@pytest.mark.parametrize("f", [*fpsim.CATALOGUE.values(), *CUSTOM], ids=repr)
def test_a_format_survives_its_names_and_a_pickle(f: FloatFormat) -> None:
    assert as_format(repr(f)) == as_format(str(f)) == pickle.loads(pickle.dumps(f)) == f
    assert hash(as_format(repr(f))) == hash(f)


def test_aliases_name_the_same_format() -> None:
    for names in (
        ("fp16", "float16", "half", "e5m10", "FP16"),
        ("bf16", "bfloat16", "e8m7"),
        ("cb16", "cbfloat16", "e6m9"),
        ("e4m3fn", "fp8_e4m3", "float8_e4m3fn"),
        ("e5m2", "fp8_e5m2"),
        ("fp32", "float32", "e8m23"),
    ):
        assert len({as_format(name) for name in names}) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"exponent_bits": 9, "mantissa_bits": 2}, "exponent_bits=9"),
        ({"exponent_bits": 0, "mantissa_bits": 2}, "integers 1 to 8"),
        ({"exponent_bits": 4, "mantissa_bits": 24}, "mantissa_bits=24"),
        ({"exponent_bits": 4.0, "mantissa_bits": 2}, "exponent_bits=4.0"),
        ({"exponent_bits": 4, "mantissa_bits": 2, "bias": 1.5}, "bias=1.5"),
        ({"exponent_bits": 4, "mantissa_bits": 3, "bias": 150}, r"multiples of 2\*\*-152"),
        ({"exponent_bits": 4, "mantissa_bits": 3, "bias": 149, "subnormals": False}, r"multiples of 2\*\*-151"),
        ({"exponent_bits": 1, "mantissa_bits": 3, "subnormals": False}, "its largest value is 0"),
        ({"exponent_bits": 8, "mantissa_bits": 3, "specials": "fn"}, "its largest value"),
        ({"exponent_bits": 4, "mantissa_bits": 3, "bias": -10000}, "its largest value"),
        ({"exponent_bits": 4, "mantissa_bits": 3, "specials": "fancy"}, "Unknown specials"),
        ({"exponent_bits": 1, "mantissa_bits": 0}, "its largest value"),
        ({"exponent_bits": 4, "mantissa_bits": 3, "subnormals": 1}, "subnormals=1"),
        ({"exponent_bits": 8, "mantissa_bits": 1, "specials": "scale"}, "mantissa_bits must be 0"),
        ({"exponent_bits": 5, "mantissa_bits": 0, "specials": "dlfloat"}, "'dlfloat' needs at least one mantissa bit"),
        ({"exponent_bits": 5, "mantissa_bits": 0, "specials": "p3109"}, "'p3109' needs at least one mantissa bit"),
    ],
)
def test_impossible_fields_are_refused_with_the_reason(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FloatFormat(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["fp9", "e9m3", "e4m24", "", "FloatFormat(5)", "FloatFormat(x=1)", "FloatFormat(5, q)"]
)
def test_unknown_names_are_refused_with_what_is_known(name: str) -> None:
    with pytest.raises(ValueError, match=r"Unknown format|makes no format"):
        as_format(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FloatFormat(5), (3)", r"Unknown format 'FloatFormat\(5\), \(3\)'\. Blocks: .* Known: fp32"),
        (
            "FloatFormat(" + "-" * 1000 + "1, 3)",
            r"Unknown format 'FloatFormat\(---.*\.\.\.---.*1, 3\)': .* is not a field",
        ),
        ("-" * 1000, r"Unknown format '-{49}\.\.\.-{49}'\."),
        ("FloatFormat(" * 200, "Unknown format"),
        ("FloatFormat(5, (3))", "Unknown format"),
        ("FloatFormat(2**3, 3)", "'2\\*\\*3' is not a field. Expected: integers"),
        ("FloatFormat(5, mantissa_bits=3, mantissa_bits=3)", "mantissa_bits comes twice"),
        ("FloatFormat(exponent_bits=5, 3)", "a field without a name follows one with a name"),
        ("FloatFormat(5, 3, 99999999999)", "'99999999999' is not a field"),
        ("FloatFormat(5, 3, specials='no')", "Unknown specials 'no'"),
    ],
)
def test_what_is_wrong_with_a_text_is_said(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        as_format(text)
    assert len(str(caught.value)) < 640


def test_fields_of_a_text_are_read_as_python_reads_them() -> None:
    for text in (
        "FloatFormat(5,10)",
        " FloatFormat( exponent_bits = 5,\nmantissa_bits=+10, ) ",
        "FloatFormat(5, 10, None)",
    ):
        assert as_format(text) == FloatFormat(5, 10)
    assert as_format('FloatFormat(4, 3, -2, "fn", subnormals=False)') == FloatFormat(4, 3, -2, "fn", False)


def test_fields_from_numpy_are_pythons_integers() -> None:
    f = FloatFormat(np.int64(8), np.int8(3), np.int32(130), "fn")
    assert repr(f) == "FloatFormat(exponent_bits=8, mantissa_bits=3, bias=130, specials='fn', subnormals=True)"
    assert as_format(repr(f)) == f == FloatFormat(8, 3, 130, "fn")
    assert f.largest == FloatFormat(8, 3, 130, "fn").largest


def test_near_names_are_suggested_and_other_types_refused() -> None:
    with pytest.raises(ValueError, match="Did you mean 'fp16"):
        as_format("fp61")
    with pytest.raises(TypeError, match="Expected a format, got 16 of type int"):
        as_format(16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Expected a format, got 16 of type int"):
        as_float_format(16)  # type: ignore[arg-type]


def test_overflow_that_a_format_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="has no inf"):
        as_format("e4m3fn").resolve_overflow("inf")
    for name in ("e2m1fn", "e5m0"):
        with pytest.raises(ValueError, match="has no nan"):
            as_format(name).resolve_overflow("nan")
    with pytest.raises(ValueError, match="Known: inf, nan, saturate"):
        as_format("fp16").resolve_overflow("wrap")


def test_values_and_codes_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="16 bits"):
        as_format("fp32").values()
    with pytest.raises(ValueError, match="0 to 255"):
        as_format("e5m2").decode(256)
    for value in (0.3, 1e6, 2.0**-20):
        with pytest.raises(ValueError, match="Round it"):
            as_format("e4m3fn").encode(value)
    with pytest.raises(ValueError, match="no code for inf"):
        as_format("e4m3fn").encode(math.inf)
    for name in ("e2m1fn", "e5m0"):  # IEEE's top exponent without a mantissa holds inf alone
        with pytest.raises(ValueError, match="no code for nan"):
            as_format(name).encode(math.nan)
    with pytest.raises(ValueError, match="is not a value of"):
        as_format("e8m0fnu").encode(0.0)


@pytest.mark.parametrize("specials", [[], {}, None, 3, "ieeee"], ids=str)
def test_what_is_no_kind_of_specials_is_refused(specials: object) -> None:
    with pytest.raises(ValueError, match="Unknown specials"):
        FloatFormat(4, 3, specials=specials)  # type: ignore[arg-type]
