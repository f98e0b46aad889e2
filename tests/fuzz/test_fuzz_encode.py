"""`encode` and `decode` under drawn arguments: the codes that the oracle's fields give, or a documented error."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import fuzz_inputs
import numpy as np
import oracle
import torch
from fuzzing import documented, fuzz
from hypothesis import strategies as st

import fpsim

DETERMINISTIC = st.sampled_from([r for r in fuzz_inputs.ROUNDINGS if r != "stochastic"])


def meaning(fmt: oracle.Format, code: int) -> float:
    """The number of a code, from its fields; NaN and inf are both None of the oracle, so that they are told apart."""
    sign_bit = 1 << (fmt.exponent_bits + fmt.mantissa_bits)
    magnitude, negative = code % sign_bit, code >= sign_bit
    if fmt.specials in ("fnuz", "p3109") and code == sign_bit:
        return math.nan
    field, mantissa = divmod(magnitude, 1 << fmt.mantissa_bits)
    found = fmt.value(field, mantissa)
    if found is not None:
        return math.copysign(float(found[0]), -1 if negative else 1)
    infinite = fmt.specials == "p3109" or (fmt.specials == "ieee" and mantissa == 0)
    return math.copysign(math.inf, -1 if negative else 1) if infinite else math.nan


@fuzz(
    300,
    x=fuzz_inputs.tensors(),
    f=fuzz_inputs.formats().filter(lambda f: f.bits <= 11 or f.bits == 17),  # a table of 2**16 codes takes a second
    rounding=DETERMINISTIC,
    overflow=st.sampled_from([None, "inf", "nan", "saturate"]),
)
def test_fuzz_codes_mean_what_the_oracle_rounds_to(
    x: torch.Tensor, f: fpsim.FloatFormat, rounding: str, overflow: str | None
) -> None:
    with documented(ValueError, TypeError) as outcome:
        codes = fpsim.encode(x, f, rounding, overflow)
    if outcome.error is not None:
        return
    fmt = fuzz_inputs.naive(f)
    assert codes.shape == x.shape
    overflow = ("inf" if f.specials in ("ieee", "p3109", "dlfloat") else "saturate") if overflow is None else overflow
    decoded = fuzz_inputs.numbers(fpsim.decode(codes, f))
    for value, code, back in zip(fuzz_inputs.numbers(x), codes.flatten().tolist(), decoded, strict=True):
        expected = oracle.round_to(fmt, value, rounding, overflow)
        if f.specials == "dlfloat" and math.isinf(expected):
            expected = math.nan  # one code for both
        assert fuzz_inputs.is_same(meaning(fmt, code), expected), (value, code)
        assert fuzz_inputs.is_same(back, expected), (value, back)


THINGS = st.sampled_from(
    [
        torch.ones(2, device="meta"),
        torch.ones(2).to_sparse(),
        torch.ones(2, dtype=torch.complex128),
        torch.ones(2, dtype=torch.int64),
        torch.ones(2, dtype=torch.bool),
        torch.tensor([-1, 3]),
        torch.tensor([2**62]),
        torch.zeros(0, dtype=torch.uint8),
        torch.tensor([1, 2], device="meta"),
        torch.eye(2, dtype=torch.int64).to_sparse(),
        np.ones(3, np.int64),
        np.ones(3, np.float32),
        Fraction(1, 2),
    ]
)


@fuzz(
    500,
    x=THINGS | fuzz_inputs.JUNK | fuzz_inputs.tensors(),
    words=st.tuples(*[fuzz_inputs.JUNK | fuzz_inputs.formats() | st.sampled_from(["fp16", "up", "inf", None])] * 3),
    function=st.sampled_from([fpsim.encode, lambda x, fmt, *_: fpsim.decode(x, fmt)]),
)
def test_fuzz_what_has_no_codes_is_refused_in_words(x: Any, words: Any, function: Any) -> None:
    with documented(ValueError, TypeError) as outcome:
        got = function(x, *words)
    if outcome.error is None:
        assert got.shape == x.shape
