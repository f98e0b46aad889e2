"""`round_to` under drawn arguments: what the oracle says, or an error that is documented."""

from __future__ import annotations

import math
from typing import Any

import fuzz_inputs
import numpy as np
import oracle
import torch
from fuzzing import documented, fuzz
from hypothesis import strategies as st

import fpsim


def check(f: fpsim.FloatFormat, x: float, got: float, rounding: str, overflow: str) -> None:
    """What became of one number is what the oracle allows."""
    fmt = fuzz_inputs.naive(f)
    if rounding != "stochastic":
        expected = [oracle.round_to(fmt, x, rounding, overflow)]
    elif math.isfinite(x) and abs(x) < float(fmt.next_magnitude):
        expected = [oracle.round_to(fmt, x, rule, overflow) for rule in ("up", "down")]
    else:
        expected = [oracle.round_to(fmt, x, "nearest_even", overflow)]
    assert any(fuzz_inputs.is_same(got, e) for e in expected), (f, x, got, expected)


@fuzz(
    300,
    x=fuzz_inputs.tensors(),
    f=fuzz_inputs.formats(),
    rounding=st.sampled_from(fuzz_inputs.ROUNDINGS),
    overflow=st.sampled_from([None, "inf", "nan", "saturate"]),
    form=st.sampled_from(["tensor", "array", "in place", "out", "out of itself"]),
)
def test_fuzz_numbers_round_to_what_the_oracle_says(
    x: torch.Tensor, f: fpsim.FloatFormat, rounding: str, overflow: str | None, form: str
) -> None:
    before = fuzz_inputs.numbers(x)
    got: Any = None
    with documented(ValueError, TypeError, RuntimeError):
        if form == "array" and x.dtype is not torch.bfloat16:
            got = fpsim.round_to(x.detach().resolve_neg().numpy(), f, rounding, overflow)
        elif form == "in place":
            got = fpsim.round_to_(x.detach().clone(), f, rounding, overflow)
        elif form == "out":
            out = torch.empty(x.shape, dtype=x.dtype)
            got = fpsim.round_to(x.detach(), f, rounding, overflow, out=out)
            assert got is out
        elif form == "out of itself":
            own = x.detach().clone(memory_format=torch.contiguous_format)
            got = fpsim.round_to(own, f, rounding, overflow, out=own)
        else:
            got = fpsim.round_to(x, f, rounding, overflow)
    if got is None:
        return
    assert got.shape == tuple(x.shape)
    overflow = ("inf" if f.specials in ("ieee", "p3109", "dlfloat") else "saturate") if overflow is None else overflow
    for value, result in zip(before, fuzz_inputs.numbers(got), strict=True):
        check(f, value, result, rounding, overflow)


WORDS = st.sampled_from([*fpsim.CATALOGUE, "e5m7", "e4m3fnuz", "inf", "saturate", *fuzz_inputs.ROUNDINGS, 8, None])
ARRAYS = st.sampled_from(
    [
        np.ones(3, np.float32),
        np.ones(3, ">f4"),
        np.ones(3, np.longdouble),
        np.ones((2, 2), np.int64),
        np.array(["a", None], object),
        np.array(1.5),
        np.ma.array([1.0, 2.0], mask=[True, False]),
        np.ones(4, np.float32)[::-2],
        np.zeros(2, [("a", "f4")]),
        np.array(["2020-01-01"], "datetime64[D]"),
        torch.ones(3).to_sparse(),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3, dtype=torch.float8_e5m2),
        torch.ones(3, dtype=torch.int32),
        torch.ones(2, 2, device="meta"),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(()),
    ]
)


@fuzz(
    400,
    x=ARRAYS | fuzz_inputs.JUNK | fuzz_inputs.tensors(),
    words=st.tuples(*[WORDS | fuzz_inputs.JUNK | fuzz_inputs.formats()] * 4),
    out=st.none() | ARRAYS | fuzz_inputs.JUNK,
    function=st.sampled_from([fpsim.round_to, fpsim.round_to_]),
)
def test_fuzz_what_cannot_be_rounded_is_refused_in_words(x: Any, words: Any, out: Any, function: Any) -> None:
    more = {} if out is None or function is fpsim.round_to_ else {"out": out}
    x = x.clone() if isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.requires_grad else x
    with documented(ValueError, TypeError, RuntimeError) as outcome:
        got = function(x, *words, **more)
    if outcome.error is None:
        assert isinstance(got, torch.Tensor | np.ndarray)
        assert got.shape == x.shape
