"""What quantize_optimizer returns goes wherever the optimizer went: qtorch's line is ported as it stands."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ada_loss
import fpsim
from fpsim import Update, quantize_optimizer

Made = tuple[nn.Parameter, torch.optim.Optimizer]


def made(kind: type[torch.optim.Optimizer] = torch.optim.Adam, **options: Any) -> Made:
    p = nn.Parameter(torch.linspace(1, 2, 7))
    return p, kind([p], lr=2.0**-7, **options)  # type: ignore[call-arg]


def train(p: nn.Parameter, optimizer: Any, steps: int = 5, schedule: bool = False) -> torch.Tensor:
    """A training loop that knows nothing of formats."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if schedule else None
    for _ in range(steps):
        optimizer.zero_grad()
        (p**3).sum().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return p.detach()


@pytest.mark.parametrize("schedule", [False, True], ids=["alone", "with a scheduler"])
def test_the_name_of_a_script_is_bound_again(schedule: bool) -> None:
    p, optimizer = made()
    expected, plain = made()
    quantize_optimizer(plain, Update(weight="bf16", states="bf16"))
    optimizer = quantize_optimizer(optimizer, Update(weight="bf16", states="bf16"))  # as OptimLP(optimizer, ...)
    gc.collect()  # nothing else holds the first one
    assert torch.equal(train(p, optimizer, schedule=schedule), train(expected, plain, schedule=schedule))
    assert optimizer.steps == 5
    assert torch.equal(p.detach(), p.detach().bfloat16().float())
    assert (optimizer.param_groups[0]["lr"] == 2.0**-7) != schedule
    assert p.grad is not None
    optimizer.zero_grad()
    assert p.grad is None


def test_a_run_goes_on_from_its_state_dict() -> None:
    p, first = made()
    optimizer = quantize_optimizer(first, Update(weight="bf16", master="fp32"))
    train(p, optimizer)
    state, value = optimizer.state_dict(), p.detach().clone()
    q, second = made()
    with torch.no_grad():
        q.copy_(value)
    again = quantize_optimizer(second, Update(weight="bf16", master="fp32"))
    again.load_state_dict(state)
    assert torch.equal(train(q, again), train(p, optimizer))
    assert again.steps == 10


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
@pytest.mark.parametrize("scaler", [lambda: torch.amp.GradScaler("cpu"), lambda: ada_loss.GradScaler("torch")])
def test_a_scaler_steps_it_and_skips_what_is_not_finite(scaler: Callable[[], Any], options: dict[str, bool]) -> None:
    p, first = made(**options)
    optimizer, scaler = quantize_optimizer(first, Update(weight="bf16")), scaler()
    before = p.detach().clone()
    for factor, moves in ((torch.inf, False), (1.0, True)):
        optimizer.zero_grad()
        scaler.scale((p**3).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(p.detach(), before.bfloat16().float()) != moves
    assert optimizer.steps == 1


def test_it_is_one_with_its_optimizer_for_every_tool() -> None:
    p, first = made()
    optimizer = quantize_optimizer(first, Update(weight="bf16"))
    assert isinstance(optimizer, torch.optim.Optimizer)
    with pytest.raises(ValueError, match="quantised already"):
        quantize_optimizer(optimizer, "bf16")
    model = nn.Linear(7, 1)
    inner = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    outer = quantize_optimizer(inner, Update(weight="bf16"), model)

    def step() -> None:
        outer.zero_grad()
        model(torch.ones(2, 7)).sum().backward()
        outer.step()

    for given in (inner, outer):
        assert "update" in str(fpsim.why(model, step, optimizer=given))
    with fpsim.lost_updates(outer) as lost:
        step()
    assert len(lost.rows()) == 2
    calls: list[int] = []
    handle = optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train(p, optimizer, 2)
    assert calls == [1, 1]
    handle.remove()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(first.param_groups) == len(optimizer.param_groups) == 2
    optimizer.detach()
    train(p, optimizer, 1)
    assert optimizer.steps == 2


def test_neither_keeps_the_other_alive_in_a_circle() -> None:
    gc.collect()
    gc.disable()
    try:
        p, first = made(torch.optim.SGD)
        optimizer = quantize_optimizer(first, Update(weight="bf16"))
        store = weakref.ref(optimizer.store)
        train(p, optimizer, 1)
        alive = weakref.ref(optimizer)
        del optimizer
        assert alive() is None  # what was returned may be dropped
        train(p, first, 1)
        assert store() is not None
        assert store().steps == 2  # type: ignore[union-attr]
    finally:
        gc.enable()


def test_a_name_that_neither_has_is_named() -> None:
    _, first = made()
    with pytest.raises(AttributeError, match="'Adam' object has no attribute 'setp'"):
        quantize_optimizer(first, "bf16").setp()
