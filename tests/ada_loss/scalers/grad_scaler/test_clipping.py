"""Clipping to a norm as the scaler unscales."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from grad_scaler_cases import batches, gradients, model_and_optimizer, ours, ready, sparse
from torch import nn

from ada_loss import GradScaler


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("limit", [0.05, 1e6])
def test_max_gradient_norm_clips_as_torchs_clipping_does(limit: float, fused: bool) -> None:
    (model, _), (plain, _) = model_and_optimizer(), model_and_optimizer()
    optimizer, plain_optimizer = (torch.optim.SGD(m.parameters(), 0.5, fused=fused) for m in (model, plain))
    scaler = GradScaler("cerebras", max_gradient_norm=limit)
    for x, y in batches():
        optimizer.zero_grad()
        scaler(nn.functional.mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        plain_optimizer.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), limit)
        plain_optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))


def test_the_clipping_coefficient_is_that_of_the_specification() -> None:
    weights = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2, 3))]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    scaler = GradScaler(8.0, max_gradient_norm=2.0)
    scaler.scale(torch.ones(()))
    weights[0].grad = torch.tensor([8.0 * 6.0])
    weights[1].grad = sparse([8.0 * 5.0, 0.0, 8.0 * 3.0])  # one value of 8: the norm is 10
    scaler.step(optimizer)
    coefficient = torch.tensor(2.0) / (torch.tensor(10.0) + 1e-6)
    assert torch.equal(weights[0].detach(), -6.0 * coefficient.reshape(1))
    assert torch.equal(weights[1].detach()[0, 2], -8.0 * coefficient)


def test_a_norm_that_overflows_is_an_overflow() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("cerebras", initial_loss_scale=4.0, max_gradient_norm=1.0)
    assert gradients(scaler, weight, optimizer, 3e38) == [4.0, 2.0]  # 3e38 is finite, its square is not
    assert torch.equal(weight.detach(), torch.zeros(2))


def test_a_norm_that_overflows_is_told_of_though_the_gradients_were_asked_for_before() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("torch", init_scale=4.0)
    scaler.scale(torch.ones(()))
    weight.grad = torch.full((2,), 3e38)
    scaler.unscale_(optimizer)
    assert not scaler.overflowed(optimizer)
    scaler.clip_(optimizer, 1.0)
    assert scaler.overflowed(optimizer)
    scaler.step(optimizer)
    assert torch.equal(weight.detach(), torch.zeros(2))


def test_clipping_before_unscaling_is_refused() -> None:
    scaler, _, optimizer = ready(ours)
    with pytest.raises(RuntimeError, match=r"clip_\(\).*not unscaled.*Call unscale_\(optimizer\) first"):
        scaler.clip_(optimizer, 1.0)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan, math.inf, "1"])
def test_an_impossible_norm_is_refused(limit: Any) -> None:
    with pytest.raises(ValueError, match=r"max_gradient_norm.*must be a finite number above 0.*Leave it out"):
        GradScaler("torch", max_gradient_norm=limit)


def test_a_disabled_scaler_still_clips() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.tensor([4.0])
    GradScaler(enabled=False, max_gradient_norm=1.0).step(optimizer)
    assert torch.equal(weight.detach(), -4.0 * (torch.ones(1) / (torch.tensor([4.0]) + 1e-6)))
