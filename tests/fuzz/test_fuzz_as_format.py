"""`as_format` under drawn texts: a format that Python would read there too, or an error that is documented."""

from __future__ import annotations

import re
from typing import Any

import fuzz_inputs
from fuzzing import documented, fuzz
from hypothesis import strategies as st

import fpsim

PIECES = st.sampled_from(
    [
        *"FloatFormat( ) , = exponent_bits mantissa_bits bias specials subnormals None True False".split(),
        *"'fn' \"none\" '' ' \"".split(),
        *"5 3 -1 +7 007 1_0 0x5 1e3 99999999999 - -- ( [ ] { } * ** lambda __import__ # \\ é \u0663".split(),
        *"e4 m3 fn fnuz fp16 float8_ E5M2".split(),
        *" \n\t",
        *"BlockFormat( FixedPoint( Delayed( per 32 16x16 row tensor int8 uint4 int99 mxfp4 gain= element=".split(),
    ]
)


BLOCKS = (
    "int8",
    "int4 per 32",
    "e4m3fn per 128x128 ceil",
    "e4m3fn per tensor delayed",
    repr(fpsim.as_format("nvfp4")),
    repr(fpsim.as_format("mxint8")),
    "FixedPoint(8, fraction_length=3)",
)


@st.composite
def texts(draw: st.DrawFn) -> str:
    """A name or a repr with a few characters changed, or pieces of them in any order."""
    if draw(st.booleans()):
        return "".join(draw(st.lists(PIECES, max_size=14)))
    f = draw(fuzz_inputs.formats())
    text = draw(st.sampled_from([str(f), repr(f), f"FloatFormat({f.exponent_bits}, {f.mantissa_bits})", *BLOCKS]))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(PIECES | st.text(max_size=2)) + text[at + draw(st.integers(0, 3)) :]
    return text


@fuzz(1500, text=texts() | fuzz_inputs.JUNK)
def test_fuzz_a_text_is_a_format_or_refused_in_words(text: Any) -> None:
    with documented(ValueError, TypeError) as outcome:
        f = fpsim.as_format(text)
    if outcome.error is not None:
        return
    assert fpsim.as_format(repr(f)) == fpsim.as_format(str(f)) == f
    if not isinstance(f, fpsim.FloatFormat) or not isinstance(text, str):  # a dtype; see test_foreign.py
        return
    name = text.strip().lower()
    if "(" in name:
        # what was accepted has nothing in it but numbers, names and words: let Python read it
        assert re.fullmatch(r"floatformat\([\w\s=,'\"+-]*\)", name)
        # Python wants no leading zeros and no space but its own
        source = re.sub(r"(?<!\w)([-+]?)0+(?=\d)", r"\1", re.sub(r"\s+", " ", text.strip()))
        assert eval(source, {"FloatFormat": fpsim.FloatFormat}) == f
    elif match := re.fullmatch(r"(?:float\d+_)?e(\d)m(\d+)(fn|fnuz)?", name):
        if name not in {"e2m3fn", "e3m2fn", "e2m1fn"}:  # of the OCP, without NaN
            assert (f.exponent_bits, f.mantissa_bits) == (int(match[1]), int(match[2]))


@fuzz(1500, fields=st.tuples(*[fuzz_inputs.JUNK | st.integers(-3, 30)] * 5), count=st.integers(0, 5))
def test_fuzz_fields_make_a_format_or_are_refused_in_words(fields: tuple[Any, ...], count: int) -> None:
    if count < 2:
        return
    with documented(ValueError, TypeError) as outcome:
        f = fpsim.FloatFormat(*fields[:count])
    if outcome.error is None:
        assert fpsim.as_format(repr(f)) == f
        assert hash(f) == hash(fpsim.as_format(repr(f)))
        assert 0 < f.smallest <= f.largest
