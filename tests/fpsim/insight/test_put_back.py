"""Running the step of a user, and putting back all that it changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import tiers
import torch
from torch import Tensor, nn

import fpsim

TOOLS: dict[str, Callable[[nn.Module, Callable[[], Tensor]], Any]] = {
    "why": fpsim.why,
    "diagnose": fpsim.diagnose,
    "watch": fpsim.watch,
    "last_layers": fpsim.last_layers,
    "compare": lambda model, step: fpsim.compare(model, step, None, "fp16"),
    "sensitivity": lambda model, step: fpsim.sensitivity(model, step, "fp16"),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_buffer_that_a_step_replaces_and_a_module_that_it_switches_to_eval_are_put_back(tool: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0), nn.Linear(4, 2))
    statistics, x = model[1].running_mean, torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def step() -> Tensor:
        model[2].eval()
        model[1].running_mean = model[1].running_mean + 1
        loss = model(x).square().mean()
        if loss.requires_grad:
            loss.backward()
        return loss

    TOOLS[tool](model, step)
    assert all(module.training for module in model.modules())
    assert model[1].running_mean is statistics
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("has_stepped", [True, False], ids=["a state", "no state yet"])
def test_the_states_of_an_optimizer_that_a_step_runs_are_put_back(tool: str, has_stepped: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = stepped(model, optimizer)
    if has_stepped:
        step()
        optimizer.zero_grad()
    parameters = [p.detach().clone() for p in model.parameters()]
    states = [(p, key, value, value.clone()) for p in model.parameters() for key, value in optimizer.state[p].items()]
    TOOLS[tool](model, step)
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), parameters, strict=True))
    assert all(optimizer.state[p][key] is value and torch.equal(value, before) for p, key, value, before in states)
    assert sum(len(optimizer.state[p]) for p in model.parameters()) == len(states)


@pytest.mark.parametrize("tool", ["why", "diagnose", "compare"])
def test_a_group_that_a_step_adds_to_its_optimizer_is_taken_out_again(tool: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.1)
    run = stepped(model, optimizer)

    def step() -> Tensor:
        loss = run()
        optimizer.add_param_group({"params": model[2].parameters()})
        return loss

    TOOLS[tool](model, step)
    (group,) = optimizer.param_groups
    assert group["params"] == [*model[0].parameters()]


@tiers.parametrize("tool", TOOLS, keep=["why", "diagnose"])
@tiers.parametrize("update", ["te_fp16_master", "bf16_kahan", "bf16_sr"], keep=["te_fp16_master"])
def test_a_quantised_optimizer_goes_on_as_if_nobody_had_looked(tool: str, update: str) -> None:
    """Its copies of weights, its random bits, and what is recorded of its training."""
    states, rows = [], []
    for looks in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        lost = fpsim.lost_updates(fpsim.quantize_optimizer(optimizer, update, model))
        step = stepped(model, optimizer)
        step()
        if looks:
            TOOLS[tool](model, step)
        step()
        states.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
        rows.append(lost.rows())
    assert repr(states[0]) == repr(states[1])
    assert tool != "why" or rows[0] == rows[1]


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        if loss.requires_grad:
            loss.backward()
            optimizer.step()
        return loss

    return step
