"""The scaler's state: saved, loaded, exchanged with torch's class, and refused."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from grad_scaler_cases import gradients, ours, torchs
from torch import nn

from ada_loss import GradScaler, LossRule, loss_rule
from ada_loss.rules.loss import SYSTEMS


def unlike_the_default(rule: LossRule) -> LossRule:
    """The rule with every field at another value than its default's."""
    special = {"min_loss_scale": 2.0**-3, "max_loss_scale": 2.0**20, "scale_min": 2.0, "min_scale": 0.5}
    special |= {"initial_loss_scale": 2.0**9, "threshold": 0.25, "loss_scale_max": 2.0**12}
    special |= {"multiplier": 2.0} if rule.system == "cerebras_tf" else {}
    changed: dict[str, Any] = {}
    for f in fields(rule):
        value = getattr(rule, f.name)
        if f.name in special:
            changed[f.name] = special[f.name]
        elif isinstance(value, bool):
            changed[f.name] = not value
        elif isinstance(value, int):
            changed[f.name] = value + 3
        else:
            changed[f.name] = value * 0.875 if 0 < value < 1 or f.name == "scale" else value + 2.5
    return replace(rule, **changed)


@pytest.mark.parametrize("lazily", [True, False])
@pytest.mark.parametrize("system", [s for s in SYSTEMS if s not in ("off", "none")])
def test_a_state_brings_back_every_field(system: str, lazily: bool) -> None:
    required = {"static": {"scale": 8.0}, "jmp": {"loss_scale": 16.0}}.get(system, {})
    rule = unlike_the_default(loss_rule(system, **required))
    default = loss_rule(system, **required)
    same = [f.name for f in fields(rule) if getattr(rule, f.name) == getattr(default, f.name)]
    assert same == (["multiplier"] if system == "cerebras_tf" else [])  # which can only be 2
    source, target = GradScaler(rule, max_gradient_norm=3.0), GradScaler(system, **required)
    if not lazily:
        target.scale(torch.ones(()))
    target.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert target.rule == rule
    assert target.max_gradient_norm == 3.0
    assert target.scale(torch.ones(())).item() == torch.tensor(rule.scale).item()
    assert pickle.loads(pickle.dumps(source)).state_dict() == source.state_dict()


def test_states_pass_between_torchs_class_and_ours() -> None:
    theirs = torchs(init_scale=3.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=5)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    gradients(theirs, weight, optimizer, 1.0, 1.0)
    here = ours()
    here.load_state_dict(theirs.state_dict())
    back = torchs()
    back.load_state_dict(here.state_dict())
    assert back.state_dict() == theirs.state_dict()
    factors = {"growth_factor": 4.0, "backoff_factor": 0.25}
    assert here.rule == loss_rule("torch", scale=3.0, good=2, growth_interval=5, **factors)


@pytest.mark.parametrize("system", ["torch", "nnabla", "apex", "apex_hysteresis", "keras"])  # without a floor
def test_a_scale_that_fell_to_zero_can_be_saved_and_set_right(system: str) -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    fallen = GradScaler(system)
    gradients(fallen, weight, optimizer, *[math.nan] * 1100)  # 2**-1074 is the smallest float
    assert fallen.get_scale() == 0.0
    scaler = GradScaler(system)
    with pytest.warns(RuntimeWarning, match=r"scale=0\.0.*Call update\(new_scale=\.\.\.\)"):
        scaler.load_state_dict(fallen.state_dict())
    assert scaler.rule == fallen.rule
    if system == "torch":
        theirs = torchs()
        theirs.load_state_dict(scaler.state_dict())
        with pytest.warns(RuntimeWarning, match=r"scale=0\.0"):
            scaler.load_state_dict(theirs.state_dict())
        scaler.set_growth_factor(4.0)
        assert (scaler.get_growth_factor(), scaler.get_scale()) == (4.0, 0.0)
    scaler.load_state_dict(GradScaler(system).state_dict())
    assert scaler.rule == GradScaler(system).rule


def test_a_state_of_another_rule_is_refused() -> None:
    message = r"state is of the rule 'nnabla', and this scaler goes by 'fairseq'.*Make one, GradScaler\('nn"
    scaler = GradScaler("fairseq")
    with pytest.raises(RuntimeError, match=message):
        scaler.load_state_dict(GradScaler("nnabla").state_dict())
    with pytest.raises(RuntimeError, match="this scaler goes by 'fairseq'"):
        scaler.load_state_dict(torchs().state_dict())
    assert scaler.rule == loss_rule("fairseq")


@pytest.mark.parametrize("spoilt", ["missing", "unknown", "impossible", "no number"])
def test_a_spoilt_state_is_refused_and_changes_nothing(spoilt: str) -> None:
    scaler = GradScaler("nnabla")
    state = GradScaler("nnabla", scale=2.0).state_dict()
    if spoilt == "missing":
        del state["N"]
    elif spoilt == "no number":
        state["scale"] = math.nan
    else:
        state["M" if spoilt == "unknown" else "N"] = -1
    with pytest.raises((RuntimeError, ValueError), match=r"'N'|'M'|N=-1|scale=nan"):
        scaler.load_state_dict(state)
    assert scaler.rule == loss_rule("nnabla")


def test_a_crash_in_the_middle_of_a_step_leaves_a_state_that_can_be_loaded() -> None:
    class Crashes(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            raise MemoryError

    for fused in (False, True):
        weight = nn.Parameter(torch.zeros(1))
        optimizer = Crashes([weight], lr=1.0)
        optimizer._step_supports_amp_scaling = fused  # type: ignore[attr-defined]
        scaler = GradScaler("torch", init_scale=4.0)
        scaler.scale(weight.sum()).backward()
        with pytest.raises(MemoryError):
            scaler.step(optimizer)
        assert not hasattr(optimizer, "found_inf")
        for again in (GradScaler("torch"), scaler):
            again.load_state_dict(scaler.state_dict())
            assert again.get_scale() == 4.0
            weight.grad = None
            again.scale(weight.sum()).backward()
            again.unscale_(optimizer)  # and not: has already been called
            assert torch.equal(weight.grad, torch.ones(1))


def test_a_scaler_whose_system_stops_can_be_saved_and_goes_on() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("deepspeed", init_scale=1.0)
    with pytest.raises(FloatingPointError, match="'deepspeed' stops"):
        gradients(scaler, weight, optimizer, math.inf)
    assert scaler.state_dict()["scale"] == 1.0
    assert gradients(scaler, weight, optimizer, 3.0) == [1.0, 1.0]
    assert weight.item() == -3.0
