"""The scaler with any rule: the traces of every system, and the rule's own parameters."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from grad_scaler_cases import gradients, model_and_optimizer, ours, ready
from torch import nn

from ada_loss import GradScaler, loss_rule
from ada_loss.rules.loss import SYSTEMS
from ada_loss.scalers import NoScaler

TRACES = json.loads((Path(__file__).parents[3] / "data" / "golden_traces.json").read_text())


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("trace", [t for t in TRACES if t["note"].startswith(("mixed", "random, p"))])
def test_the_scaler_walks_through_the_traces_of_every_system(trace: dict[str, Any], fused: bool) -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scaler = GradScaler(trace["system"], **trace["params"])
    values = [math.nan if overflow else 0.0 for overflow in trace["overflow"]]
    if trace["scale_after"] == "error":
        with pytest.raises(FloatingPointError):
            gradients(scaler, weight, optimizer, *values)
        assert scaler.get_scale() == trace["scale_before"][-1]
    else:
        found = gradients(scaler, weight, optimizer, *values)
        assert found == [*trace["scale_before"], trace["scale_after"]]


def test_a_scaler_takes_a_rule_a_name_or_a_number() -> None:
    rule = loss_rule("fairseq", tolerance=0.25)
    assert GradScaler(rule).rule is rule
    assert GradScaler("fairseq", tolerance=0.25).rule == rule
    assert GradScaler(64).rule == loss_rule("static", scale=64.0)
    assert GradScaler("cuda", init_scale=2.0).rule == GradScaler(device="cuda", init_scale=2.0).rule
    assert GradScaler().rule == loss_rule("torch")


@pytest.mark.parametrize("device", ["cpu", "cuda:1", torch.device("cpu"), torch.device("cuda", 0)], ids=str)
def test_a_device_in_the_place_of_the_rule_means_torchs_rule(device: Any) -> None:
    assert GradScaler(device, init_scale=2.0).rule == loss_rule("torch", init_scale=2.0)
    assert isinstance(GradScaler(device, enabled=False), NoScaler)


@pytest.mark.parametrize("scaler", [GradScaler("off"), GradScaler("none"), GradScaler(loss_rule("off"))])
def test_off_is_a_value(scaler: GradScaler) -> None:
    assert isinstance(scaler, NoScaler)
    assert not scaler.is_enabled()


def test_a_scale_that_left_float32_overflows_and_comes_back() -> None:
    # NNabla keeps a Python float and has no ceiling
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("nnabla", scale=2.0**128)
    scaler(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**127
    optimizer.zero_grad()
    scaler(weight.sum()).backward()
    scaler.step(optimizer)
    assert weight.item() == -1.0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("system", [s for s in SYSTEMS if s not in ("off", "none", "static")])
def test_no_gradient_that_is_not_finite_changes_a_parameter(system: str, fused: bool, value: float) -> None:
    model, _ = model_and_optimizer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, fused=fused)
    scaler = GradScaler(system, **({"loss_scale": 2.0} if system == "jmp" else {}))
    before = copy.deepcopy(model.state_dict())
    scaler.scale(model(torch.ones(1, 8)).sum()).backward()
    model[0].bias.grad[3] = value
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_a_static_scale_skips_only_if_told_to(fused: bool) -> None:
    for skip in (False, True):
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
        scaler = GradScaler("static", scale=8.0, skip_overflow=skip)
        assert gradients(scaler, weight, optimizer, 16.0, math.inf) == [8.0] * 3
        assert weight.item() == (-2.0 if skip else -math.inf)


def test_log_max_sees_the_largest_unscaled_gradient_of_all_optimizers() -> None:
    for fused in (True, False):
        weights = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(2))]
        first = torch.optim.SGD(weights[:2], lr=0.0, fused=fused)
        second = torch.optim.SGD(weights[2:], lr=0.0)
        scaler, rule = GradScaler("logmax"), loss_rule("logmax")
        for largest in (2.0**3, 0.5, 2.0**-7, math.nan, 0.0):
            scaler.scale(torch.ones(()))
            scale = scaler.get_scale()
            weights[0].grad = torch.tensor([0.0, -largest, largest / 2]) * scale
            weights[1].grad = torch.zeros(0)
            weights[2].grad = torch.full((2,), 4 * largest) * scale
            scaler.step(first)
            scaler.step(second)
            scaler.update()
            rule = rule.adjust(not math.isnan(largest), 4 * largest)
            assert scaler.get_scale() == rule.scale


def test_a_rule_is_asked_for_its_own_parameters_only() -> None:
    assert GradScaler("megatron").get_growth_interval() == 1000
    with pytest.raises(AttributeError, match=r"'nnabla' has no 'growth_factor'.*scaling_factor.*Read"):
        GradScaler("nnabla").get_growth_factor()
    with pytest.raises(AttributeError, match="'keras' has no 'growth_interval'"):
        GradScaler("keras").set_growth_interval(3)


def test_setting_an_impossible_parameter_is_refused() -> None:
    scaler = GradScaler("torch")
    with pytest.raises(ValueError, match=r"growth_factor=0\.5"):
        scaler.set_growth_factor(0.5)
    assert scaler.get_growth_factor() == 2.0


@pytest.mark.parametrize("new", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_new_scale_is_refused(new: float) -> None:
    scaler, _, _ = ready(ours)
    with pytest.raises(ValueError, match="scale"):
        scaler.update(new)
    assert scaler.get_scale() == 4.0


def test_parameters_beside_a_rule_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Parameters were given besides the rule.*init_scale.*Give the name"):
        GradScaler(loss_rule("torch"), init_scale=3.0)
