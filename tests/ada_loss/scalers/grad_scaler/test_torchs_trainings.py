"""torch's own tests of whole trainings, of both classes and by torch's names: bit for bit as without scaling."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from grad_scaler_cases import Make, batches, model_and_optimizer, spoil
from torch import nn


def stepped(make: Make, run: Callable[..., None], control: Callable[..., None], **scaler: Any) -> None:
    """Run with a scaler, skipping the third of four steps, and without: same parameters, and the scale."""
    for enabled in (True, False):
        (model, optimizer), (plain, plain_optimizer) = model_and_optimizer(), model_and_optimizer()
        params = {"init_scale": 128.0, "growth_interval": 1, **scaler}
        amp = make(enabled=enabled, **params)
        for i, (x, y) in enumerate(batches()):
            optimizer.zero_grad()
            run(amp, model, optimizer, x, y, i == 2 and enabled)
            plain_optimizer.zero_grad()
            control(plain, plain_optimizer, x, y, i == 2 and enabled)
        assert amp.get_scale() == (128.0 * 2.0**3 * 0.5 if enabled else 1.0)
        for p, q in zip(model.parameters(), plain.parameters()):
            assert torch.equal(p, q)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any, skip: bool) -> None:
    nn.functional.mse_loss(model(x), y).backward()
    if not skip:
        optimizer.step()


def test_grad_scaling_autocast(make: Make) -> None:
    def run(scaler: Any, model: Any, optimizer: Any, x: Any, y: Any, skip: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        if skip:
            spoil(model)
        scaler.step(optimizer)
        scaler.update()

    def control(model: Any, optimizer: Any, x: Any, y: Any, skip: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        if not skip:
            optimizer.step()

    stepped(make, run, control)


def test_grad_scaling_clipping(make: Make) -> None:
    def run(scaler: Any, model: Any, optimizer: Any, x: Any, y: Any, skip: bool) -> None:
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        nn.utils.clip_grad_value_(model.parameters(), 2.0**-5 * scaler.get_scale())
        if skip:
            spoil(model)
        scaler.step(optimizer)
        scaler.update()

    def control(model: Any, optimizer: Any, x: Any, y: Any, skip: bool) -> None:
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_value_(model.parameters(), 2.0**-5)
        if not skip:
            optimizer.step()

    stepped(make, run, control)


def test_grad_scaling_clipping_separate_unscale(make: Make) -> None:
    def run(scaler: Any, model: Any, optimizer: Any, x: Any, y: Any, skip: bool) -> None:
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        if skip:
            spoil(model)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        scaler.step(optimizer)
        scaler.update()

    def control(model: Any, optimizer: Any, x: Any, y: Any, skip: bool) -> None:
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        if not skip:
            optimizer.step()

    stepped(make, run, control)


@pytest.mark.filterwarnings("ignore:.*create_graph=True.*")
def test_grad_scaling_penalty(make: Make) -> None:
    def penalised(model: Any, loss: torch.Tensor, scaled: torch.Tensor, inverse: float) -> torch.Tensor:
        grads = torch.autograd.grad(scaled, model.parameters(), create_graph=True)
        return loss + sum((g * inverse).pow(2).sum() for g in grads).sqrt()

    def run(scaler: Any, model: Any, optimizer: Any, x: Any, y: Any, skip: bool) -> None:
        loss = nn.functional.mse_loss(model(x), y)
        loss = penalised(model, loss, scaler.scale(loss), 1 / scaler.get_scale())
        scaler.scale(loss).backward()
        if skip:
            spoil(model)
        scaler.step(optimizer)
        scaler.update()

    def control(model: Any, optimizer: Any, x: Any, y: Any, skip: bool) -> None:
        loss = nn.functional.mse_loss(model(x), y)
        penalised(model, loss, loss, 1.0).backward()
        if not skip:
            optimizer.step()

    stepped(make, run, control)


def test_grad_scaling_accumulation(make: Make) -> None:
    scaler = make(init_scale=128.0, growth_interval=1)
    (model, optimizer), (plain, plain_optimizer) = model_and_optimizer(), model_and_optimizer()
    for i, (x, y) in enumerate(batches(6)):
        scaler.scale(nn.functional.mse_loss(model(x), y) / 2).backward()
        (nn.functional.mse_loss(plain(x), y) / 2).backward()
        if i % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
    assert scaler.get_scale() == 128.0 * 2.0**3
    for p, q in zip(model.parameters(), plain.parameters()):
        assert torch.equal(p, q)


@pytest.mark.parametrize("skipped", [0, 1])
def test_grad_scaling_multiple(make: Make, skipped: int) -> None:
    """Two models, two losses that mix them, two optimizers: an overflow skips its own optimizer only."""

    def train(scaler: Any) -> list[torch.Tensor]:
        models, optimizers = zip(model_and_optimizer(0), model_and_optimizer(1, lr=0.5))
        for i, (x, y) in enumerate(batches()):
            for optimizer in optimizers:
                optimizer.zero_grad()
            out = [model(x) for model in models]
            losses = [nn.functional.mse_loss(0.3 * out[0] + 0.7 * out[1], y)]
            losses.append(nn.functional.mse_loss(0.6 * out[0] - 0.4 * out[1], y))
            for loss in losses if scaler is None else scaler.scale(losses):
                loss.backward(retain_graph=True)
            if scaler is not None:
                if i == 2:
                    spoil(models[skipped])
                scaler.unscale_(optimizers[0])
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
            else:
                for j, optimizer in enumerate(optimizers):
                    if i != 2 or j != skipped:
                        optimizer.step()
        return [p.detach() for model in models for p in model.parameters()]

    scaler = make(init_scale=128.0, growth_interval=1)
    for p, q in zip(train(scaler), train(None)):
        assert torch.equal(p, q)
    assert scaler.get_scale() == 128.0 * 2.0**3 * 0.5


@pytest.mark.parametrize("unscale_first", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_grad_scaling_fused_optimizers(make: Make, kind: Any, unscale_first: bool) -> None:
    scaler = make(init_scale=128.0, growth_interval=1)
    model, _ = model_and_optimizer()
    plain, _ = model_and_optimizer()
    optimizer, plain_optimizer = (kind(m.parameters(), lr=0.25, fused=True) for m in (model, plain))
    for i, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        if i == 2:
            spoil(model)
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        plain_optimizer.zero_grad()
        plain_step(plain, plain_optimizer, x, y, skip=i == 2)
    assert scaler.get_scale() == 128.0 * 2.0**3 * 0.5
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    for p, q in zip(model.parameters(), plain.parameters()):
        assert torch.equal(p, q)


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
def test_grad_scaler_pass_itself(make: Make) -> None:
    class Asks(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:  # type: ignore[override]
            grad_scaler.unscale_(self)
            super().step(closure)

    weight = nn.Parameter(torch.zeros(1))
    optimizer = Asks([weight], lr=1.0)
    scaler = make(init_scale=4.0, growth_interval=1)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight.detach(), torch.tensor([-1.0]))
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("fused", [True, False])
def test_params_invalidated_with_grads_invalidated_between_unscale_and_step(make: Make, fused: bool) -> None:
    # gradients are looked at once: what is done to them after unscale_ is the caller's
    model, _ = model_and_optimizer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, fused=fused)
    scaler = make(init_scale=128.0)
    x, y = batches(1)[0]
    scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
    scaler.unscale_(optimizer)
    for p in model.parameters():
        p.grad.fill_(math.nan)
    scaler.step(optimizer)
    scaler.update()
    assert all(p.isnan().all() for p in model.parameters())


def test_step_gives_what_the_optimizer_gives(make: Make) -> None:
    class Tells(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            return args, kwargs

    weight = nn.Parameter(torch.zeros(1))
    optimizer, scaler = Tells([weight]), make(init_scale=4.0)
    for gradient, expected in ((1.0, ((3,), {"b": 4})), (math.inf, None)):
        scaler.scale(torch.ones(()))
        weight.grad = torch.tensor([gradient])
        assert scaler.step(optimizer, 3, b=4) == expected
        scaler.update()


def test_a_disabled_scaler_does_nothing(make: Make) -> None:
    scaler = make(enabled=False)
    loss, (_, optimizer) = torch.ones(()), model_and_optimizer()
    assert scaler.scale(loss) is loss
    assert not scaler.is_enabled()
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    scaler.load_state_dict({"anything": 1})
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(7)
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    scaler.update()
    scaler.update(3.0)
    assert scaler.step(optimizer, closure=lambda: 5.0) == 5.0
    assert pickle.loads(pickle.dumps(scaler)).scale(loss) is loss
