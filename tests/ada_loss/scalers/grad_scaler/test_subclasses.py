"""Subclasses of the scaler as users write them, enabled and disabled."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from grad_scaler_cases import model_and_optimizer, spoil, torchs
from torch import nn

from ada_loss import GradScaler, loss_rule
from ada_loss.scalers import NoScaler


def counting(base: Any) -> Any:
    class Counting(base):  # as users write one: it passes on what it is given, and adds to a method
        def __init__(self, owner: str, growth: float, **params: Any) -> None:
            super().__init__("cpu", growth_factor=growth, **params)
            self.owner, self.steps = owner, 0

        def step(self, optimizer: torch.optim.Optimizer) -> Any:
            self.steps += 1
            return super().step(optimizer)

    Counting.__qualname__ = f"{base.__module__.partition('.')[0]}_counting"
    return Counting


torch_counting, ada_loss_counting = counting(torch.amp.GradScaler), counting(GradScaler)  # pickle finds them here
COUNTING = pytest.mark.parametrize("counting", [torch_counting, ada_loss_counting], ids=["torch", "ours"])


@COUNTING
def test_a_disabled_scaler_of_a_subclass_does_nothing_but_what_that_adds(counting: Any) -> None:
    model, optimizer = model_and_optimizer()
    scaler = counting("me", 2.0, enabled=False)
    assert isinstance(scaler, counting)
    loss = model(torch.ones(1, 8)).sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    spoil(model)
    expected = model[1].weight - model[1].weight.grad
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.step(optimizer)  # without update() between
    scaler.update()
    assert torch.equal(model[1].weight, expected)  # nothing is checked, and nothing skipped
    assert (scaler.is_enabled(), scaler.get_scale(), scaler.state_dict()) == (False, 1.0, {})
    for again in (scaler, copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert isinstance(again, counting)
        assert (again.owner, again.steps, again.is_enabled()) == ("me", 2, False)


@COUNTING
def test_an_enabled_scaler_of_a_subclass_scales(counting: Any) -> None:
    scaler = counting("me", 4.0, init_scale=8.0)
    assert (scaler.is_enabled(), scaler.get_growth_factor()) == (True, 4.0)
    assert scaler.scale(torch.ones(())).item() == 8.0
    assert counting("me", 4.0).is_enabled()  # and another that is disabled changes nothing of it


@pytest.mark.parametrize("rule", ["off", loss_rule("off")], ids=["name", "rule"])
def test_off_is_a_value_for_a_subclass_that_chooses_it_by_itself(rule: Any) -> None:
    class Mine(GradScaler):
        def __init__(self) -> None:
            super().__init__(rule)

    assert isinstance(Mine(), Mine)
    assert isinstance(Mine(), NoScaler)
    assert not Mine().is_enabled()


def test_a_scaler_that_is_off_keeps_its_class() -> None:
    class Mine(NoScaler):
        pass

    assert type(GradScaler("off")) is GradScaler
    assert type(ada_loss_counting("me", 2.0, enabled=False)) is ada_loss_counting
    assert not isinstance(GradScaler("torch"), NoScaler)
    assert not isinstance(torchs(enabled=False), NoScaler)
    assert isinstance(Mine(), Mine)
    assert isinstance(Mine(), NoScaler)
    assert not isinstance(NoScaler(), Mine)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_verb_that_a_subclass_overrides_is_seen_by_the_others(enabled: bool) -> None:
    class Watched(GradScaler):
        def __init__(self, **params: Any) -> None:
            super().__init__("nnabla", max_gradient_norm=1.0, **params)
            self.seen: list[str] = []

        def scale(self, outputs: Any) -> Any:
            self.seen.append("scale")
            return super().scale(outputs)

        def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
            self.seen.append("unscale_")
            super().unscale_(optimizer)

        def clip_(self, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
            self.seen.append("clip_")
            super().clip_(optimizer, max_norm)

    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = Watched(enabled=enabled)
    scaler([weight.sum()])[0].backward()
    scaler.step(optimizer)
    # one that is off passes a nest on as it is, and unscales nothing
    assert scaler.seen == (["scale", "scale", "unscale_", "clip_"] if enabled else ["scale", "clip_"])
