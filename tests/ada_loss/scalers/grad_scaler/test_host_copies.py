"""What a step copies from the device to the host."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from grad_scaler_cases import gradients
from torch import nn

from ada_loss import GradScaler, loss_rule, trajectory


@pytest.fixture
def host_copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every copy of a number to the host, by the method that made it."""
    copies: list[str] = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        original = getattr(torch.Tensor, name)

        def counted(self: torch.Tensor, original: Any = original, name: str = name) -> Any:
            copies.append(name)
            return original(self)

        monkeypatch.setattr(torch.Tensor, name, counted)
    return copies


def one_iteration(scaler: Any, optimizer: torch.optim.Optimizer, gradient: torch.Tensor) -> None:
    scaler.scale(torch.ones(()))
    optimizer.param_groups[0]["params"][0].grad = gradient
    scaler.step(optimizer)
    scaler.update()


def test_torchs_rule_on_a_fused_optimizer_copies_nothing_to_the_host(host_copies: list[str]) -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    scaler = GradScaler("torch", init_scale=4.0, growth_interval=1)
    scaled = []
    for value in (8.0, math.inf, 8.0):
        scaled.append(scaler.scale(torch.ones(())))
        one_iteration(scaler, optimizer, torch.full((3,), value))
    assert host_copies == []
    assert [s.item() for s in scaled] == [4.0, 8.0, 4.0]
    assert torch.equal(weight.detach(), torch.full((3,), -8.0 / 4 - 8.0 / 4))
    assert scaler.rule == loss_rule("torch", init_scale=4.0, growth_interval=1, scale=8.0)


@pytest.mark.parametrize("system", ["nnabla", "torch", "cerebras"])
def test_a_plain_optimizer_costs_one_copy_a_step(host_copies: list[str], system: str) -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler(system, max_gradient_norm=1.0)
    one_iteration(scaler, optimizer, torch.ones(3))
    assert host_copies == ["item"]


def test_a_static_scale_costs_no_copy(host_copies: list[str]) -> None:
    weight = nn.Parameter(torch.zeros(3))
    one_iteration(GradScaler(4.0), torch.optim.SGD([weight], lr=1.0), torch.ones(3))
    assert host_copies == []


def test_device_and_host_adjust_torchs_rule_alike() -> None:
    generator = torch.Generator().manual_seed(1)
    oks = (torch.rand(300, generator=generator) > 0.2).tolist()
    rule = loss_rule("torch", init_scale=3.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=3)
    for fused in (True, False):
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
        scaler = GradScaler(rule)
        values = [0.0 if ok else math.nan for ok in oks]
        assert gradients(scaler, weight, optimizer, *values) == trajectory(rule, oks)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_step_on_the_gpu_does_not_wait_for_it(kind: Any) -> None:
    model = nn.Linear(8, 8).cuda()
    optimizer = kind(model.parameters(), lr=0.1, fused=True)
    scaler = GradScaler("torch", growth_interval=1, init_scale=4.0)
    x = torch.ones(2, 8, device="cuda")
    for synced in (False, True):  # the first step makes buffers
        torch.cuda.set_sync_debug_mode("error" if synced else "default")
        try:
            optimizer.zero_grad()
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert scaler.get_scale() == 16.0


@pytest.mark.parametrize("rule", ["torch", "nnabla", 2.0])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_skipped_steps_are_counted_and_the_host_waits_only_when_asked(
    host_copies: list[str], fused: bool, rule: str | float
) -> None:
    weight, other = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizers = torch.optim.SGD([weight], 0.5, fused=fused), torch.optim.SGD([other], 0.5, fused=fused)
    scaler, moved = GradScaler(rule), 0
    assert scaler.skipped == 0
    for size in (1.0, math.inf, 1.0, math.nan, 1.0):
        before = weight.detach().clone()
        scaler.scale((weight * size + other).sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        moved += not torch.equal(weight, before)
        scaler.update()
    assert not (fused and rule == "torch" and host_copies)
    assert scaler.skipped == pickle.loads(pickle.dumps(scaler)).skipped == (0 if rule == 2.0 else 2)
    assert rule == 2.0 or moved == 3
