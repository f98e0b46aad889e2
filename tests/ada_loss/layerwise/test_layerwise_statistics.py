"""Which numbers adaptive scaling looks at: single claims, each with its scale computed by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fpsim
from ada_loss import AdaLossScaled, AdaLossTransformLinear

Array = np.ndarray[Any, np.dtype[np.float64]]


def two_layers(g: Array, weight: Array, **settings: Any) -> dict[str, int]:
    """The scales of two 16 x 16 layers without bias in e4m3fn whose second one is given this output gradient."""
    net = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    for parameter in net.parameters():
        parameter.data = torch.tensor(weight, dtype=torch.float32)
    model = fpsim.quantize(net, fpsim.Policy(error="e4m3fn"))
    with AdaLossScaled(model, [AdaLossTransformLinear()], **settings) as handle:
        given = torch.tensor(g, dtype=torch.float32)
        model(torch.ones(16, 16)).backward(given)
        np.testing.assert_array_equal(given.numpy(), g.astype(np.float32))  # it is ours, and stays as it was
        return handle.log2_scales()


def alternating(size: float) -> Array:
    return np.where(np.arange(256) % 2, -size, size).reshape(16, 16)


@pytest.mark.parametrize("branches", ["exact", "original"])
@pytest.mark.parametrize("rule", ["abs_range", "element_wise_range"])
def test_what_the_format_flushes_asks_for_no_scale(rule: str, branches: str) -> None:
    g = alternating(2.0**-6)
    g[0, 0] = (
        2.0**-40
    )  # zero in e4m3fn, and 2**13 if it were the smallest magnitude: 2**-9 / (16 * 2**-40 * 2**-3) > 2**30
    assert two_layers(g, alternating(2.0**-3), rule=rule, branches=branches) == {"0:linear": 0, "1:linear": 0}


@pytest.mark.parametrize("value", [math.inf, math.nan], ids=str)
def test_what_is_not_finite_chooses_no_factor_also_where_the_format_saturates(value: float) -> None:
    g = alternating(2.0**-9)
    g[0, 0] = value  # inf is 448 in the format, which would allow a factor of 448 / (448 * 16 * 2**-2)
    assert two_layers(g, alternating(2.0**-2), rule="abs_range") == {"0:linear": 0, "1:linear": 0}


@pytest.mark.parametrize(
    ("rounding", "u_min", "size", "log2_scale"),
    [
        ("nearest_even", "normal", 2.0**-6, 0),  # the smallest normal number has all its digits
        ("nearest_even", "normal", 2.0**-7, 1),
        ("toward_zero", "smallest", 2.0**-9, 0),  # the smallest number is kept
        ("toward_zero", "smallest", 2.0**-9 * 0.875, 1),
        ("nearest_even", "smallest", 2.0**-10, 1),  # a tie goes to zero, which is even
        ("nearest_away", "smallest", 2.0**-10, 0),  # a tie goes to the smallest number
        ("nearest_away", "smallest", 2.0**-11, 1),
        ("stochastic", "smallest", 2.0**-10, 1),  # half of them go to zero
        ("stochastic", "normal", 2.0**-6, 0),
    ],
)
def test_exact_loses_a_tie_where_the_rounding_does(rounding: str, u_min: str, size: float, log2_scale: int) -> None:
    layer = fpsim.quantize(nn.Linear(4, 4, bias=False), fpsim.Policy(error="e4m3fn"), rounding=rounding)
    with AdaLossScaled(layer, rule="exact", u_min=u_min) as handle:
        layer(torch.ones(2, 4)).backward(torch.full((2, 4), size))
        assert handle.last_log2_scale(":linear") == log2_scale


def test_delayed_scaling_has_every_layers_scale_from_the_first_step_on() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(6)])
    model = fpsim.quantize(net, fpsim.Policy(error="e4m3fn"))
    x, g = torch.randn(4, 16), torch.randn(4, 16) * 2.0**-30
    found = {}
    for rule in ("current", "amax_history"):
        with AdaLossScaled(model, rule=rule) as handle:
            model(x).backward(g)
            found[rule] = handle.log2_scales()
    assert found["amax_history"] == found["current"]
    assert min(found["current"].values()) > 30
