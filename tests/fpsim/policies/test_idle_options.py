"""What changes nothing says so: options that no rounding uses, and a call that rounds no parameter."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import fpsim
from fpsim import Policy


def test_random_bits_beside_rounding_to_nearest_warn() -> None:
    with pytest.warns(UserWarning, match="random_bits=8 changes nothing: stochastic rounding alone uses random bits"):
        fpsim.quantize(nn.Linear(2, 2), Policy("bf16", "bf16", random_bits=8))
    model = fpsim.quantize(nn.Linear(2, 2), "bf16")
    with pytest.warns(UserWarning, match="random_bits=.*'error': 8.* changes nothing"):
        fpsim.set_policy(model, Policy(weight="bf16", random_bits={"error": 8}))


def test_random_bits_that_a_role_uses_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fpsim.quantize(nn.Linear(2, 2), Policy(weight="bf16", rounding="stochastic", random_bits=8))
        fpsim.quantize(
            nn.Linear(2, 2), Policy(weight="bf16", error="e5m2", rounding={"error": "stochastic"}, random_bits=8)
        )
        fpsim.quantize(nn.Linear(2, 2), Policy(weight="bf16", random_bits={"error": None}))
        inner = Policy(weight="e5m2", rounding="stochastic")
        fpsim.quantize(nn.Sequential(nn.Linear(2, 2)), Policy(random_bits=8, overrides={"0": inner}))


def test_rounding_parameters_that_are_used_in_float32_warns() -> None:
    for fmt in (Policy(activation="bf16"), "mxfp4"):
        model = fpsim.quantize(nn.Linear(2, 2), fmt)
        before = model.weight.detach().clone()
        with pytest.warns(UserWarning, match="round_parameters_ changed nothing: no parameter of Linear"):
            fpsim.round_parameters_(model)
        assert torch.equal(model.weight, before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fpsim.round_parameters_(fpsim.quantize(nn.Linear(2, 2), Policy(weight="bf16")))
        fpsim.round_parameters_(fpsim.quantize(nn.ReLU(), "bf16"))  # which has none
        fpsim.round_parameters_(fpsim.quantize(nn.Linear(2, 2), None))  # all of which is float32 on purpose
