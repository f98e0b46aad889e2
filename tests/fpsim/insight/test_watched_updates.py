"""What watch says of an optimizer: which weights did not move, what was lost, and which Update it suggests."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fpsim
from fpsim import Update, quantize_optimizer


def norm_and_linear(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for i in range(steps):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(i)).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        (model(x).float() - x.float().sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()


def test_norm_weights_of_a_bfloat16_model_that_stay_at_one_are_named():
    """A step of 2**-12 on weights of 1, whose neighbours are 2**-8 and 2**-7 away; biases begin at 0 and move."""
    model = norm_and_linear(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-12, weight_decay=0.0)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    with fpsim.watch(model, ["bf16"], every=1, optimizer=optimizer) as watching:
        train(model, optimizer, 3)
    still = [name for name, p in model.named_parameters() if torch.equal(p, first[name])]
    assert 0 < len(still) < len(first)
    assert "1.weight" in still
    assert watching.never_moved() == still
    assert f"No watched step has changed {', '.join(still)}." in str(watching)
    assert "Step 1 left " in str(watching)
    assert "% of the weights that had a gradient as they were." in str(watching)


def test_a_float32_model_moves_and_nothing_is_said_of_it():
    model = norm_and_linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with fpsim.watch(model, ["bf16"], every=1, optimizer=optimizer) as watching:
        train(model, optimizer, 2)
    assert watching.never_moved() == []
    assert "as they were" not in str(watching)
    assert watching.updates == []


@pytest.mark.parametrize("name", ["bf16", "te_fp16_master", "bf16_collage"])
def test_of_a_quantised_optimizer_the_weights_are_those_that_the_model_sees(name):
    model = norm_and_linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-12, weight_decay=0.0)
    quantized = quantize_optimizer(optimizer, name, model)
    with fpsim.watch(model, ["bf16"], every=1, optimizer=optimizer) as watching:
        train(model, optimizer, 1)
    assert "1.weight" in watching.never_moved()
    (lost,) = watching.updates
    assert lost.rows()
    assert "% of the updates were lost, stored as" in str(watching)
    assert quantized.observers == []


def test_the_update_that_is_suggested_does_what_was_tried():
    """AdamW at a rate that bfloat16 weights follow only with stochastic rounding."""
    model = norm_and_linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    train(model, optimizer, 3)
    before = [p.detach().clone() for p in model.parameters()]
    with fpsim.watch(model, ["e4m3fn", "bf16"], every=1, optimizer=optimizer) as watching:
        train(model, optimizer, 1)
        found = watching.suggest_update()
    assert found.is_tried
    assert found.words.startswith("tried on the step after call 1: ")
    assert found.update.weight == fpsim.as_format("bf16")
    assert found.update.rounding == "stochastic"
    assert {*found.update.states} == {"exp_avg", "exp_avg_sq"}
    assert f"  {found.update}" in str(watching)
    assert not any(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))  # the run's own step
    plain = [p.detach().clone() for p in model.parameters()]
    watching.suggest_update()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), plain, strict=True))
    quantize_optimizer(optimizer, found.update, model)  # which checks names


def test_second_moments_that_become_zero_are_not_suggested():
    """v between 1e-8 and 1e-24: zero in e4m3fn, and a step of m / eps. bfloat16 has them."""
    p = nn.Parameter(torch.ones(512))
    model = nn.Module()
    model.p = p
    model.forward = lambda: model.p  # type: ignore[method-assign]
    optimizer = torch.optim.Adam([p], lr=1e-3, eps=1e-16)
    scale = 10.0 ** -torch.linspace(4, 12, 512)
    with fpsim.watch(model, ["e4m3fn", "bf16"], every=1, optimizer=optimizer) as watching:
        for _ in range(2):
            optimizer.zero_grad()
            (model() * scale).sum().backward()
            optimizer.step()
    found = watching.suggest_update()
    assert found.is_tried
    assert str(found.update.states["exp_avg_sq"]) == "bf16"


def test_what_cannot_be_tried_is_said():
    model = norm_and_linear()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    with fpsim.watch(model, ["bf16"], every=1, optimizer=optimizer) as watching:
        assert watching.suggest_update().words == "not tried: no step of the optimizer was watched"

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 8)).square().mean()
            loss.backward()
            return loss

        model(torch.ones(2, 8)).sum().backward()
        optimizer.step(closure)
    found = watching.suggest_update()
    assert not found.is_tried
    assert found.words.startswith("not tried: TypeError: ")
    assert found.update == Update()
