"""Running the step of a user, and putting back all that it changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
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
