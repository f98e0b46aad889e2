"""A format for every role and one for weights alone are told apart, and overflow is said for all roles at once."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import fpsim
from fpsim import Policy, as_policy, quantize

BEYOND = torch.tensor([[100.0, -100.0, 15.5, 1.0]])  # e3m4, of ml_dtypes: 15.5 is the largest, and there is an inf


def test_one_format_without_a_name_warns_with_both_spellings_at_the_callers_line() -> None:
    with pytest.warns(DeprecationWarning, match="weights alone") as caught:
        policy = Policy("e3m4", rounding="stochastic")
    assert str(caught[0].message) == (
        "Policy('e3m4') is a format for weights alone, and an error from 1.0 on. Expected: Policy(weight='e3m4') for "
        "weights alone, or fpsim.as_policy('e3m4') for every role."
    )
    assert caught[0].filename == __file__
    assert policy == Policy(weight="e3m4", rounding="stochastic")


def test_named_and_listed_roles_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Policy("fp16", "fp16").activation == "fp16"
        assert Policy(weight="fp16").with_rounding("stochastic").weight == "fp16"
        assert Policy() == as_policy(None)


def test_overflow_of_quantize_is_that_of_every_role() -> None:
    assert as_policy("e3m4", overflow="saturate") == Policy(*["e3m4"] * 4, overflow="saturate")
    for overflow, end in (("saturate", 15.5), (None, torch.inf)):
        x = BEYOND.clone().requires_grad_()
        y = quantize(nn.Identity(), "e3m4", overflow=overflow)(x)
        y.backward(BEYOND)
        assert x.grad is not None
        assert y.tolist() == x.grad.tolist() == [[end, -end, 15.5, 1.0]]  # activations, and their gradients


def test_overflow_of_set_policy_and_by_role() -> None:
    model = quantize(nn.Linear(2, 2), "e3m4")
    fpsim.set_policy(model, "e3m4", overflow={"error": "saturate"})
    assert "error=e3m4 nearest_even saturate" in str(model)
    assert "weight=e3m4 nearest_even," in str(model)
    fpsim.set_policy(model, Policy(error="e3m4", overflow="inf"), overflow="saturate")
    assert "error=e3m4 nearest_even saturate" in str(model)


def test_overflow_without_a_role_is_refused_in_words() -> None:
    for fmt in ("mxfp8_e4m3", None):
        with pytest.raises(
            ValueError, match=r"overflow='saturate' was given with .*every role is float32\. Expected: a form"
        ):
            quantize(nn.Linear(32, 32), fmt, overflow="saturate")
    with pytest.raises(ValueError, match="overflow"):
        quantize(nn.Linear(2, 2), "e3m4", overflow="clamp")
