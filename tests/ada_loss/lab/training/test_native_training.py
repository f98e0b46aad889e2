"""Trainings in real float16: the loop by hand, with torch.autocast, gives the same bits; what is refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sweep_tasks
import tiers
import torch
from torch import Tensor, nn

import ada_loss
import fpsim
from ada_loss.lab.training import train
from ada_loss.lab.training.methods import make_native_scaling
from ada_loss.layerwise.native import NativeScaling

NATIVE = {"native": "fp16"}
OPTIONS: dict[str, Any] = {"optimizer": "adam", "learning_rate": 0.01, "epochs": 4, "schedule": "constant"}

# By the words of a sweep, the scaler of a script; None for none.
SCALERS: dict[str | float, Callable[[nn.Module], Any]] = {
    "none": lambda model: None,
    4096.0: lambda model: torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=10**6),
    "torch": lambda model: torch.amp.GradScaler("cpu"),
    "adaptive": lambda model: ada_loss.GradScaler(layers=NativeScaling(model, u_min="smallest")),
    "adaptive normal": lambda model: ada_loss.GradScaler(layers=model),
    "abs_range normal": lambda model: ada_loss.GradScaler(layers=NativeScaling(model, rule="abs_range")),
}


def by_hand(make_scaler: Callable[[nn.Module], Any], device: str = "cpu", clip: float = 0.0) -> dict[str, Any]:
    """A script as its author writes it, with the loss under autocast too."""
    task = sweep_tasks.faint(0)
    model = copy.deepcopy(task.model).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler, losses, zeros = make_scaler(model), [], []
    for _ in range(4):
        for x, y in task.train:
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.float16):
                loss = task.loss(model(x.to(device)), y.to(device))
            losses.append(loss.item())
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                if clip:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                scaler.step(optimizer)
                scaler.update()
            zeros.append(float((model[0].weight.grad == 0).float().mean()))
    model.eval()
    with torch.no_grad(), torch.autocast(device, dtype=torch.float16):
        outputs = torch.cat([model(x.to(device)) for x, _ in task.test]).float()
    targets = torch.cat([y for _, y in task.test]).to(device)
    metrics = {name: float(metric(outputs, targets)) for name, metric in task.metrics.items()}
    return {"losses": losses, "metrics": metrics, "zeros": zeros}


@tiers.parametrize("method", SCALERS, keep={"none", "torch", "adaptive", "adaptive normal"})
def test_a_native_training_has_the_bits_of_a_script_with_autocast(method: str | float) -> None:
    expected = by_hand(SCALERS[method])
    run = train(sweep_tasks.faint(0), NATIVE, scaling=method, **OPTIONS)
    assert (run.losses, run.metrics) == (expected["losses"], expected["metrics"])
    # the task tells the methods apart: without a scale the first layer has no gradient
    assert all((share > 0.99) == (method == "none") for share in expected["zeros"])


def test_gradients_are_clipped_in_their_true_size() -> None:
    expected = by_hand(SCALERS["torch"], clip=2.0**-22)
    run = train(sweep_tasks.faint(0), NATIVE, scaling="torch", **OPTIONS, max_gradient_norm=2.0**-22)
    assert (run.losses, run.metrics) == (expected["losses"], expected["metrics"])
    assert run.losses != by_hand(SCALERS["torch"])["losses"]


def test_the_task_keeps_its_model() -> None:
    task = sweep_tasks.faint(0)
    before = copy.deepcopy(task.model.state_dict())
    train(task, NATIVE, **OPTIONS)
    assert all(torch.equal(value, before[name]) for name, value in task.model.state_dict().items())
    assert not any(module._forward_hooks for module in task.model.modules())


def test_micro_batches_add_up_to_a_batch() -> None:
    """Powers of two alone differ between a batch of 16 and four of 4, but for the sums of float16."""
    parts = train(sweep_tasks.faint(0), NATIVE, scaling="adaptive", **OPTIONS, micro_batches=4)
    whole = train(sweep_tasks.faint(0), NATIVE, scaling="adaptive", **OPTIONS)
    # 12 steps of Adam move weights by at most 0.12; a wrong weight of the parts would move losses by some 10 %
    assert parts.losses == pytest.approx(whole.losses, rel=0.01)


@tiers.parametrize("method", ["none", "adaptive"], keep={"adaptive"})
def test_native_and_emulated_float16_learn_the_same(method: str) -> None:
    """Within 1 %: both round to 11 bits, at other places of a step."""
    native = train(sweep_tasks.faint(0), NATIVE, scaling=method, **OPTIONS)
    emulated = train(sweep_tasks.faint(0), "fp16", scaling=method, **OPTIONS)
    assert native.losses == pytest.approx(emulated.losses, rel=0.01)
    plain = train(sweep_tasks.faint(0), None, **OPTIONS)
    assert (native.losses == pytest.approx(plain.losses, rel=0.01)) == (method == "adaptive")


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("rounding 'stochastic' was given with the format {'native': 'fp16'}. Hardware", {"rounding": "stochastic"}),
        ("accumulation='float64' was given with the format", {"accumulation": "float64"}),
        ("master_weights='none' was given with the format", {"master_weights": "none"}),
        ("The update 'bf16_sr' was given with the format", {"update": "bf16_sr"}),
        ("The scaling 'exact' was given with the format", {"scaling": "exact"}),
        ("A format has native='bf16'. Expected: 'fp16'", {"fmt": {"native": "bf16"}}),
        ("among its formats. A native cell is native", {"fmt": {"schedule": {0: "fp16", 0.5: NATIVE}}}),
    ],
)
def test_what_is_of_the_emulation_is_refused_by_a_training(words: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        train(sweep_tasks.faint(0), **{"fmt": NATIVE, **changes})


def test_a_quantised_model_is_refused() -> None:
    task = sweep_tasks.faint(0)
    object.__setattr__(task, "model", fpsim.quantize(task.model, "e5m2"))
    with pytest.raises(ValueError, match=r"model, \w+, is quantised: it would be emulated in a native cell\. Give"):
        train(task, NATIVE)


# What is recorded of one


@tiers.parametrize("method", ["none", "torch", "adaptive"], keep={"none", "adaptive"})
def test_recording_changes_no_bit(method: str) -> None:
    """Two branches meet in each block, of which the sum is rounded once more where layers have scales."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, 8, 8, generator=generator)

    class Block(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Conv2d(channels, 8, 3, padding=1) for _ in range(3))
            self.gate = nn.Parameter(torch.ones(8, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            a, b, c = (part(x) for part in self.parts)
            return (a + b.relu() + c.tanh()) * self.gate

    torch.manual_seed(0)
    model = nn.Sequential(Block(3), Block(8), nn.Flatten(), nn.Linear(512, 4))
    batches = [(x, torch.arange(4))]
    task = replace(sweep_tasks.faint(0), model=model, train=batches, test=batches)
    runs = [train(task, NATIVE, scaling=method, steps=5, record_every=every) for every in (0, 1, 2)]
    assert runs[0].losses == runs[1].losses == runs[2].losses
    assert runs[0].metrics == runs[1].metrics == runs[2].metrics
    assert not runs[0].rows
    assert {row["calls"] for row in runs[1].rows} == {5}
    assert {row["calls"] for row in runs[2].rows} == {3}
    assert [(row["site"], row["calls"]) for row in runs[1].rows if "1.parts" in row["site"]] == [
        *((f"1.parts.{i}:convolution", 5) for i in (2, 1, 0)),
    ]


@pytest.mark.parametrize("method", ["none", "torch", 4096.0])
def test_what_is_recorded_is_what_the_emulation_records_to_the_last_digit(method: str | float) -> None:
    """In the first step, whose parameters are equal. What layer 6 sends on arrives at the GELU in place 5."""
    options = {**OPTIONS, "steps": 1, "record_every": 1, "scaling": method}
    native = {row["site"]: row for row in train(sweep_tasks.faint(0), NATIVE, **options).rows}
    rows = train(sweep_tasks.faint(0), "fp16", **options).rows
    emulated = {row["site"]: row for row in rows if row["role"] == "error"}
    arrives = {":ToCopy": "6:linear", "6:linear": "5:gelu", "4:linear": "3:gelu", "2:linear": "1:gelu"}
    assert {*native} == {*arrives}
    for sender, receiver in arrives.items():
        assert native[sender] == {**emulated[receiver], "site": sender}
    if method == "none":
        assert native["4:linear"]["underflow"] > 0.9


@pytest.mark.parametrize(("log2", "lost"), [(138, 0), (116, 0), (115, 3), (0, 3)])
def test_a_scale_beyond_the_exponents_of_float32_is_tallied(log2: int, lost: int) -> None:
    """2**-140 at a scale: half of float16's smallest number, 2**-25, ties to 0."""
    model, recording = nn.Linear(1, 1), fpsim.Recording()
    scaler = make_native_scaling("adaptive", model)
    scaler.record(recording, model)
    assert scaler.layers is not None
    assert scaler.layers.observer is not None
    spec = fpsim.as_policy("fp16").specs().error
    gradient = torch.full((3,), 2.0**-140)
    scaler.layers.observer(1, "x", "error", spec, gradient, torch.tensor([log2]), torch.zeros(5))
    (row,) = recording.rows()
    assert (row["amax"], row["nonzero"], row["underflow_count"]) == (2.0 ** (log2 - 140), 3, lost)


def test_the_scales_of_layers_are_those_of_the_script() -> None:
    scaler = None

    def make(model: nn.Module) -> Any:
        nonlocal scaler
        scaler = SCALERS["adaptive"](model)
        return scaler

    by_hand(make)
    assert scaler is not None
    run = train(sweep_tasks.faint(0), NATIVE, scaling="adaptive", **OPTIONS, record_every=1)
    assert run.layer_scales[-1] == (12, scaler.layers.log2_scales())
    assert len(run.layer_scales) == 3
    # and those of the emulation, where both have a site
    emulated = train(sweep_tasks.faint(0), "fp16", scaling="adaptive", **OPTIONS, record_every=1).layer_scales[-1][1]
    assert {site: k for site, k in run.layer_scales[-1][1].items() if site in emulated} == {
        site: k for site, k in emulated.items() if "linear" in site
    }


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["none", "torch", "adaptive normal"])
def test_on_a_card_a_native_training_has_the_bits_of_a_script(method: str) -> None:
    expected = by_hand(SCALERS[method], "cuda")
    run = train(sweep_tasks.faint(0), NATIVE, scaling=method, **OPTIONS, device="cuda")
    assert (run.losses, run.metrics) == (expected["losses"], expected["metrics"])
