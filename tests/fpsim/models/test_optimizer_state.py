"""The state of a quantised optimizer: a run that is resumed equals one that went on, bit for bit."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from fpsim import Update, quantize_optimizer

UPDATES = {
    "stochastic": Update(weight="bf16", rounding="stochastic", random_bits=5, states="e4m3fn per 16 fp32"),
    "kahan": Update(weight="bf16", compensation="kahan", states="bf16"),
    "pair": Update(weight="bf16", compensation="pair"),
    "remainder16": Update(weight="bf16", compensation="remainder16"),
    "master": Update(weight="e4m3fn per tensor", master="fp16 per tensor fp32", scale="amax"),
    "stochastic master": Update(
        weight="e4m3fn", master="fp16", rounding={"weight": "stochastic", "master": "stochastic"}
    ),
    "overrides": Update(weight="bf16", compensation="pair", overrides={"2": None, "0.bias": Update(weight="fp16")}),
    "kahan in bf16": Update(weight="bf16", compensation="kahan", arithmetic="format"),
}
MAKERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def make(update, maker, seed: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 2))
    optimizer = maker(model.parameters())
    if update is not None:
        quantize_optimizer(optimizer, update, model, seed=seed)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = optimizer.state_dict()["state"].values()
    return [*model.state_dict().values(), *(x for state in states for x in state.values() if isinstance(x, Tensor))]


def saved(value: object) -> object:
    """What is left of it in a file."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)  # weights only: tensors, numbers and words


@pytest.mark.parametrize("maker", MAKERS.values(), ids=list(MAKERS))
@pytest.mark.parametrize("update", UPDATES.values(), ids=list(UPDATES))
def test_a_resumed_run_equals_one_that_went_on(update, maker):
    if not isinstance(update.states, str) or maker is not MAKERS["SGD"]:
        model, optimizer = make(update, maker)
        train(model, optimizer, 0, 4)
        parts = saved([model.state_dict(), optimizer.state_dict()])
        train(model, optimizer, 4, 8)
        for order in ((0, 1), (1, 0)):  # in either order
            other, resumed = make(update, maker, seed=99)
            for i in order:
                (other, resumed)[i].load_state_dict(copy.deepcopy(parts[i]))  # torch copies no states
            train(other, resumed, 4, 8)
            assert all(map(torch.equal, tensors(model, optimizer), tensors(other, resumed)))


@pytest.mark.parametrize("update", UPDATES.values(), ids=list(UPDATES))
def test_a_plain_optimizer_loads_the_state_and_its_state_is_loaded(update):
    model, optimizer = make(update, MAKERS["AdamW"])
    train(model, optimizer, 0, 2)
    other, plain = make(None, MAKERS["AdamW"])
    plain.load_state_dict(saved(optimizer.state_dict()))
    train(other, plain, 2, 4)
    optimizer.load_state_dict(plain.state_dict() if "fpsim_update" not in plain.param_groups[0] else clean(plain))
    train(model, optimizer, 4, 6)


def clean(optimizer: torch.optim.Optimizer) -> dict:
    """The state of an optimizer that was never quantised."""
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        for name in [name for name in group if name.startswith("fpsim")]:
            del group[name]
    for entry in state["state"].values():
        for name in [name for name in entry if name.startswith("fpsim")]:
            del entry[name]
    return state


def test_the_state_of_another_update_is_refused_and_nothing_is_loaded():
    model, optimizer = make(UPDATES["kahan"], MAKERS["AdamW"])
    train(model, optimizer, 0, 2)
    other, target = make(UPDATES["pair"], MAKERS["AdamW"])
    train(other, target, 0, 3)
    before = [x.clone() for x in tensors(other, target)]
    with pytest.raises(ValueError, match=r"stores .*compensation=kahan.*; this one stores .*compensation=pair"):
        target.load_state_dict(optimizer.state_dict())
    assert all(map(torch.equal, before, tensors(other, target)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda s: s["state"][0].pop("fpsim_master"),
            "The state has no copies for 0.weight, and fpsim_master is needed",
        ),
        (
            lambda s: s["state"][0].update(fpsim_master=torch.ones(2)),
            r"fpsim_master of 0.weight is \(2,\) in the state",
        ),
        (lambda s: s["state"][0].update(fpsim_master=3), "fpsim_master of 0.weight is 3 in the state"),
        (lambda s: s["param_groups"][0].update(fpsim_steps=-1), "fpsim_steps=-1"),
        (lambda s: s["param_groups"][0].pop("fpsim_seed"), "fpsim_seed=None"),
        (lambda s: s.pop("state"), "what optimizer.state_dict"),
    ],
)
def test_a_damaged_state_is_refused_and_nothing_is_loaded(damage, message):
    model, optimizer = make(UPDATES["remainder16"], MAKERS["AdamW"])
    train(model, optimizer, 0, 2)
    state = copy.deepcopy(optimizer.state_dict())
    damage(state)
    before = [x.clone() for x in tensors(model, optimizer)]
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert all(map(torch.equal, before, tensors(model, optimizer)))


def test_a_state_dict_shares_no_entry_with_the_optimizer_that_is_not_a_tensor():
    model, optimizer = make(UPDATES["remainder16"], MAKERS["SGD"])
    train(model, optimizer, 0, 1)
    state = optimizer.state_dict()
    assert [sorted(entry) for entry in state["state"].values()] == [["fpsim_master"]] * 4
    assert not any("fpsim_master" in entry for entry in optimizer.state.values())
    assert state["param_groups"][0]["fpsim_seed"] == 3
    assert state["param_groups"][0]["fpsim_steps"] == 1
    assert "fpsim_seed" not in optimizer.param_groups[0]
