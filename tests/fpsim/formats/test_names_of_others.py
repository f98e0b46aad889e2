"""The words of other libraries lead to the names here, in the error; each name that is suggested exists."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
import torch

import fpsim
from fpsim.formats.floats import NAMES_OF_OTHERS, ROUNDINGS_OF_OTHERS

X = torch.ones(2)


def suggested(error: pytest.ExceptionInfo[ValueError]) -> list[str]:
    found = re.search(r"Did you mean (.*?)\?", str(error.value))
    return re.findall(r"'([^']*)'", found[1]) if found else []


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("fp4_e2m1", "e2m1fn"),
        ("fp6_e3m2", "e3m2fn"),
        ("FP6-E2M3", "e2m3fn"),
        ("fp8", "e4m3fn"),
        ("bfp8", "mxint8"),
        ("fp8_e4m3fnuz", "e4m3fnuz"),
        ("fp88_e4m3", "fp8_e4m3"),  # a typing error is still one
    ],
)
def test_a_format_of_others_is_named_in_our_words(theirs: str, ours: str) -> None:
    for asked in (fpsim.as_format, lambda fmt: fpsim.round_to(X, fmt), fpsim.as_policy):
        with pytest.raises(ValueError, match="Unknown format") as error:
            asked(theirs)
        assert suggested(error)[0] == ours


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("rne", "nearest_even"),
        ("RN", "nearest_even"),
        ("TiesToAway", "nearest_away"),
        ("rtz", "toward_zero"),
        ("sr", "stochastic"),
        ("stoch", "stochastic"),
        ("stochastic rounding", "stochastic"),
        ("rto", "to_odd"),
        ("nearest_evn", "nearest_even"),
    ],
)
def test_a_rounding_of_others_is_named_in_our_words(theirs: str, ours: str) -> None:
    for asked in (lambda: fpsim.round_to(X, "fp16", theirs), lambda: fpsim.Accumulator("fp16", theirs)):
        with pytest.raises(ValueError, match="Unknown rounding") as error:
            asked()
        assert suggested(error)[:1] == [ours]


def test_every_name_that_is_suggested_exists_and_no_known_word_is_among_those_of_others() -> None:
    for theirs, ours in NAMES_OF_OTHERS.items():
        with pytest.raises(ValueError, match="Unknown format"):
            fpsim.as_format(theirs)
        assert all(fpsim.as_format(name) for name in ours)
    for theirs, ours in ROUNDINGS_OF_OTHERS.items():
        with pytest.raises(ValueError, match="Unknown rounding"):
            fpsim.round_to(X, "fp16", theirs)
        assert all(torch.equal(fpsim.round_to(X, "fp16", name), X) for name in ours)


@pytest.mark.parametrize(
    ("theirs", "dtype"),
    [
        ("fp4_e2m1", ml_dtypes.float4_e2m1fn),
        ("fp6_e3m2", ml_dtypes.float6_e3m2fn),
        ("fp6_e2m3", ml_dtypes.float6_e2m3fn),
    ],
)
def test_the_first_format_has_the_values_that_ml_dtypes_has_of_it(theirs: str, dtype: type) -> None:
    fmt = fpsim.as_format(NAMES_OF_OTHERS[theirs][0])
    values = np.arange(2**fmt.bits, dtype=np.uint8).view(dtype).astype(np.float32)
    assert torch.equal(fpsim.round_to(torch.from_numpy(values), fmt), torch.from_numpy(values))
    assert fmt.largest == values.max()
