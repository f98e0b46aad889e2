"""The scale that a rule gives a gradient, against arithmetic by hand."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from layerwise_cases import AHEAD, RULES, backward, seeded
from torch import nn

import fpsim
from ada_loss import AdaLossScaled, AdaLossTransformCast, AdaLossTransformLinear, GradScaler, Recorder, layer_rule
from ada_loss.rules.formulas import floor_log2
from fpsim import Policy, quantize, round_to
from fpsim.scaling import log2_scale_limits
from fpsim.tensors.moments import Moments, moments_of
from fpsim.tensors.spec import rounding_spec


def test_a_linear_layers_scale_is_the_formulas() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 8, bias=False))
    model = quantize(model, Policy(error="fp16"))
    x, size = torch.randn(4, 16), 2.0**-22
    out_gradient = torch.randn(4, 8, generator=seeded(2)) * size
    with AdaLossScaled(model, [AdaLossTransformLinear()]) as handle:
        handle.observer = recorder = Recorder()
        model(x).backward(out_gradient)
    fp16 = fpsim.as_format("fp16")
    w = Moments(*moments_of(model[2].weight.detach()).tolist())
    gy = round_to(out_gradient, "fp16")
    g = Moments(*moments_of(gy).tolist())
    factor = layer_rule("approx_range").factor(g, w, 8, fp16.smallest, fp16.largest)
    k = floor_log2(factor)
    assert k > 4
    by_site = {row["site"]: row for row in recorder.rows()}
    assert by_site["2:linear"]["log2_scale"] == 0
    assert by_site["2:linear"]["unbound"] == pytest.approx(factor, rel=1e-12)
    assert by_site["0:linear"]["log2_wanted"] == by_site["0:linear"]["log2_scale"] == k
    gx = (gy @ model[2].weight.detach()) * (model[0](x) > 0)
    gx = round_to(gx * 2.0**k, "fp16") / 2.0**k
    assert torch.equal(model[0].weight.grad, gx.t() @ x)
    assert torch.equal(model[2].weight.grad, gy.t() @ torch.relu(model[0](x)))


def test_parameters_gradients_are_rounded_at_the_scale_of_their_layer() -> None:
    layer = quantize(nn.Linear(4, 2, bias=False), Policy(error="e5m2", weight_grad="e5m2"))
    x = torch.randn(3, 4, generator=seeded())
    g = torch.randn(3, 2, generator=seeded(1)) * 2.0**-12
    with AdaLossScaled(layer, rule="fixed", init_scale=2.0**9):
        layer(x).backward(g)
    gy = round_to(g * 2.0**9, "e5m2") / 2.0**9
    assert torch.equal(layer.weight.grad, round_to(gy.t() @ x * 2.0**9, "e5m2") / 2.0**9)


def test_parameters_gradients_that_would_vanish_in_the_format_do_not_vanish_in_float32() -> None:
    # divided by the scale in float32, and not in the format (where 1e-9 would become 0)
    layer = quantize(nn.Linear(1, 1, bias=False), "fp16")
    with AdaLossScaled(layer, rule="fixed", init_scale=2.0**15):
        layer(torch.ones(1, 1)).backward(torch.full((1, 1), 1e-9))
    assert layer.weight.grad.item() == pytest.approx(1e-9, rel=2.0**-11)


@pytest.mark.parametrize("fmt", ["fp16", "e4m3fn"])
def test_an_overflow_limit_binds_in_every_step_also_between_updates(fmt: str) -> None:
    model = quantize(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), Policy(error=fmt, weight_grad=fmt))
    x = torch.randn(4, 8, generator=seeded())
    for rule in RULES:
        with AdaLossScaled(model, rule=rule, update_every=100 if rule in AHEAD else 1) as handle:
            handle.observer = recorder = Recorder()
            backward(model, x, 1e-6)  # large factors
            backward(model, x, 1e4)  # used again, ten orders of magnitude larger
        rows = [row for row in recorder.rows() if row["step"] == 2]
        assert rows
        assert all(row["overflow"] == 0 for row in rows)
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
        if rule != "fixed":
            assert any(row["limited"] for row in rows) or rule in ("current", "amax_history", "exact", "mse")


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_what_is_not_finite_is_never_lost_and_stops_nothing(rule: str, value: float) -> None:
    model = quantize(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), "fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = GradScaler("torch", init_scale=1.0)
    with AdaLossScaled(model, rule=rule) as handle:
        handle.observer = recorder = Recorder()
        for size in (1.0, value, 1.0):
            optimizer.zero_grad()
            before = copy.deepcopy(model.state_dict())
            out = model(torch.ones(3, 4))
            scaler.scale((out * size).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            changed = any(not torch.equal(before[name], p) for name, p in model.state_dict().items())
            assert changed == math.isfinite(size)
    if layer_rule(rule).predicts:  # what is measured has a scale of its own, also where a ReLU made zeros of it
        assert all(row["log2_scale"] == 0 for row in recorder.rows() if row["step"] == 2)
    assert handle.step == 3


def test_a_gradient_of_zeros_has_the_scale_with_which_it_came() -> None:
    model = quantize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), "fp16")
    for rule in RULES:
        model.zero_grad()
        with AdaLossScaled(model, rule=rule) as handle:
            handle.observer = recorder = Recorder()
            (model(torch.ones(3, 4)) * 0.0).sum().backward()
        assert {row["log2_scale"] for row in recorder.rows()} == {0.0}
        assert all(bool((p.grad == 0).all()) for p in model.parameters())


def deep(width: int = 32, depth: int = 6) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width, bias=False), nn.ReLU()]
    for layer in layers[::2]:
        nn.init.normal_(layer.weight, std=math.sqrt(0.3 / width))  # gradients shrink by 2.6 a layer
    return nn.Sequential(*layers)


def test_the_originals_bounds_hold() -> None:
    model = quantize(deep(depth=12), Policy(error="fp16"))
    x = torch.randn(16, 32, generator=seeded())

    def scales(**bounds: Any) -> list[float]:
        with AdaLossScaled(model, [AdaLossTransformLinear()], **bounds) as handle:
            handle.observer = recorder = Recorder()
            backward(model, x, 1e-6)
        return [row["log2_scale"] for row in recorder.rows()]

    free = scales()
    assert max(free) > 10
    once = scales(scale_upper_bound=16.0, accum_upper_bound=1024.0)
    assert max(once) == 10
    assert max(b - a for a, b in itertools.pairwise(once)) <= 4
    slowly = scales(scale_upper_bound=2.0)
    assert max(b - a for a, b in itertools.pairwise(slowly)) == 1


def test_a_cast_raises_what_enters_the_model() -> None:
    model = quantize(nn.Linear(4, 4), Policy(error="fp16"))
    for transforms, raised in (([AdaLossTransformLinear()], False), ([AdaLossTransformCast()], True), (None, True)):
        with AdaLossScaled(model, transforms) as handle:
            handle.observer = recorder = Recorder()
            backward(model, torch.ones(2, 4), 1e-9)
        assert (recorder.rows()[0]["log2_scale"] > 0) == raised


def test_a_lognormal_cast_measures_logarithms() -> None:
    model = quantize(nn.Linear(64, 64), Policy(error="fp16"))
    g = torch.exp(torch.randn(32, 64, generator=seeded()) * 3 - 20)
    with AdaLossScaled(model, rule=layer_rule("approx_range", lognormal=True)) as handle:
        handle.observer = recorder = Recorder()
        model(torch.ones(32, 64)).backward(g)
    fp16 = fpsim.as_format("fp16")
    factor = layer_rule("approx_range", lognormal=True).factor(
        Moments(*moments_of(g, logs=True).tolist()), Moments(*[0.0] * 10), 1, fp16.smallest, fp16.largest
    )
    row = recorder.rows()[0]
    assert row["unbound"] == pytest.approx(factor, rel=1e-9)
    assert row["underflow"] <= 1.5e-3 < 0.1 < row["underflow_unscaled"]


def test_each_role_and_module_has_the_range_of_its_own_format() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    policy = Policy(error="e4m3fn", weight_grad="fp16", overrides={"0": Policy(error="fp16")})
    model = quantize(net, policy)
    x = torch.randn(4, 8, generator=seeded())
    with AdaLossScaled(model, rule="current") as handle:
        handle.observer = recorder = Recorder()
        backward(model, x)
    largest = {"fp16 nearest_even": 65504.0, "e4m3fn nearest_even": 448.0}
    assert {row["format"] for row in recorder.rows()} == set(largest)


def test_noise_of_stochastic_rounding_is_the_same_at_every_power_of_two() -> None:
    layer = quantize(nn.Linear(8, 8, bias=False), Policy(error="e5m2"), rounding="stochastic")
    g = torch.randn(4, 8, generator=seeded())
    results = []
    for log2_scale in (0, 6):
        torch.manual_seed(3)
        layer.zero_grad()
        with AdaLossScaled(layer, rule="fixed", init_scale=2.0**log2_scale):
            layer(torch.eye(8)[:4]).backward(g)
        results.append(layer.weight.grad.clone())
    assert torch.equal(*results)  # none of these is subnormal


@pytest.mark.parametrize("rule", ["abs_range", "exact"])
def test_gradients_may_be_kept_above_the_smallest_normal_number(rule: str) -> None:
    # all alike but for one: just above the flush point a constant has one digit, and every copy of it the same error
    fmt = fpsim.as_format("e4m3fn")
    gradient = torch.full((8, 4), 0.1 / 64)
    gradient[0, 0] = -0.9 / 64
    errors = {}
    for u_min in ("smallest", "normal"):
        layer = quantize(nn.Linear(4, 4), Policy(error=fmt))
        with AdaLossScaled(layer, rule=rule, u_min=u_min) as handle:
            layer(torch.ones(8, 4)).backward(gradient)
            k = handle.last_log2_scale(":linear")
        if u_min == "normal":
            lowest = fmt.smallest_normal / (2 if rule == "abs_range" else 1)  # its factor is rounded down
            assert lowest <= 0.1 / 64 * 2.0**k < 2 * lowest
        else:
            assert fmt.smallest / 2 < 0.1 / 64 * 2.0**k < 2 * fmt.smallest
        errors[u_min] = abs(layer.bias.grad[1].item() / gradient[:, 1].sum().item() - 1)
    assert errors["normal"] <= 2.0**-3 < errors["smallest"]


def test_weight_gradients_alone_are_raised_where_they_enter_the_format() -> None:
    layer = quantize(nn.Linear(4, 4), Policy(weight_grad="e4m3fn"))
    for rule in ("approx_range", "abs_range", "exact", "current"):
        layer.zero_grad()
        with AdaLossScaled(layer, rule=rule):
            layer(torch.randn(6, 4, generator=seeded())).backward(torch.randn(6, 4, generator=seeded(1)) * 1e-9)
        assert bool(layer.weight.grad.all()), rule


def test_limits_of_the_container_are_said() -> None:
    model = quantize(nn.Linear(4, 4), Policy(error="fp16"))
    high = log2_scale_limits(rounding_spec("fp16"), torch.float32)[1]
    with AdaLossScaled(model, rule="current") as handle:
        handle.observer = recorder = Recorder()
        backward(model, torch.ones(2, 4), 1e-30)
    row = recorder.rows()[0]
    assert (row["log2_scale"], row["limited"]) == (high, True)
    assert row["log2_wanted"] > high


def stack(fmt: str, **words: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(6)))
    return quantize(model, Policy(error=fmt, weight_grad=fmt, **words))


def roundings_of(model: nn.Module, **options: Any) -> dict[str, str]:
    x = torch.randn(16, 32, generator=seeded(1))
    with AdaLossScaled(model, **options), fpsim.record(model) as recording:
        model(x).square().mean().backward()
    return {f"{row['site']} {row['role']}": row["rounding"] for row in recording.rows()}


@pytest.mark.parametrize("rule", ["approx_range", "current"])
def test_gradients_of_few_bits_are_rounded_stochastically_where_their_scales_are_fitted(rule: str) -> None:
    for fmt, rounding in {"e2m1fn": "stochastic", "e3m2fn": "stochastic", "e4m3fn": "nearest_even"}.items():
        assert set(roundings_of(stack(fmt), rule=rule).values()) == {rounding}


def test_a_rounding_that_was_named_stays() -> None:
    assert set(roundings_of(stack("e2m1fn", rounding="nearest_even")).values()) == {"nearest_even"}
    some = roundings_of(stack("e2m1fn", rounding={"error": "toward_zero"}))
    assert {name.split()[1]: rounding for name, rounding in some.items()} == {
        "error": "toward_zero",
        "weight_grad": "stochastic",
    }


@pytest.mark.parametrize("rule", ["exact", "fixed", "abs_range", layer_rule("approx_range", bound="worst_case")])
def test_rules_that_do_not_fit_a_gradient_to_its_format_leave_its_rounding(rule: Any) -> None:
    assert set(roundings_of(stack("e2m1fn"), rule=rule).values()) == {"nearest_even"}


def test_after_the_scaling_everything_is_rounded_as_before() -> None:
    model, x = stack("e2m1fn"), torch.randn(16, 32, generator=seeded(1))
    words = str(model)
    with AdaLossScaled(model):
        assert "error=e2m1fn stochastic" in str(model)
        fpsim.set_policy(model, "e3m2fn")
        assert "activation=e3m2fn nearest_even, error=e3m2fn stochastic" in str(model)
        fpsim.set_policy(model, Policy(error="e2m1fn", weight_grad="e2m1fn"))
    assert str(model) == words
    assert "stochastic" not in str(copy.deepcopy(model))
    with fpsim.record(model) as recording:
        model(x).sum().backward()
    assert {row["rounding"] for row in recording.rows()} == {"nearest_even"}


@pytest.mark.parametrize("bound", ["measured", "worst_case"])
def test_without_the_worst_case_a_gradient_of_few_bits_fills_its_format(bound: str) -> None:
    model = stack("e2m1fn", rounding="nearest_even")
    x = torch.randn(16, 32, generator=seeded(1))
    with AdaLossScaled(model, rule=layer_rule("approx_range", bound=bound)), fpsim.record(model) as recording:
        (model(x).square().mean() * 2.0**-30).backward()
    lost = [row["underflow"] for row in recording.rows() if row["role"] == "error"]
    if bound == "measured":  # 6 / 0.25 above the flush point: of normal numbers some 13 % lie below
        assert max(lost) < 0.4
        assert sum(row["overflow_count"] for row in recording.rows()) == 0
    else:
        assert max(lost) > 0.9


def test_the_least_squared_error_with_stochastic_rounding_warns() -> None:
    model = stack("e2m1fn", rounding="stochastic")
    with pytest.warns(UserWarning, match="'mse' lets the largest elements of a gradient saturate.*rule='current'"):
        roundings_of(model, rule="mse")


@pytest.mark.parametrize(("small", "log2_scale"), [(2.0**-4, 3), (2.0**-5, 0)])
def test_mse_chooses_among_the_scale_of_the_largest_and_three_above(small: float, log2_scale: int) -> None:
    """In e2m1fn, 0 to 6 in steps of 1/2 below 2, ties to even: 2**-4 is a number from 2**3 on, 2**-5 from 2**4 on.

    At 2**3 the largest, 4, saturates at 6/8, which costs (4 - 6/8)**2 = 11, and 2**15 numbers that are kept save
    2**15 * 2**-8 = 128. At 2**4 it costs 13, and 2**15 * 2**-10 = 32 are saved, but that scale is not among the four.
    """
    gradient = torch.full((2**15,), small)
    gradient[0] = 4.0
    model = quantize(nn.Linear(1, 2**15, bias=False), Policy(error="e2m1fn"))
    with AdaLossScaled(model, rule="mse") as handle:
        (model(torch.ones(1, 1)) * gradient).sum().backward()
        assert handle.last_log2_scale(":linear") == log2_scale
