"""Formats in turn: the rule for their starts, each switch against torch's own loop, and interruptions around them."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiers
import torch
from torch import nn

import fpsim
from ada_loss.lab.cells.telemetry import telemetry
from ada_loss.lab.tasks import Task, accuracy, digits
from ada_loss.lab.training import Run, checkpoints, train
from ada_loss.lab.training.checkpoints import DIGEST
from ada_loss.lab.training.format_schedule import as_schedule
from ada_loss.lab.training.loop import Training
from ada_loss.lab.training.options import TrainOptions

BATCHES = 3  # of 32 in an epoch of 96 images


def small(seed: int = 0) -> Task:
    """96 digits and two layers."""
    x, y = digits(seed).train
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    return Task("small", model, (x[:96], y[:96]), (x[96:160], y[96:160]), nn.functional.cross_entropy, {"a": accuracy})


OPTIONS: dict[str, Any] = {"batch_size": 32, "schedule": "constant", "record_every": 0}


# The starts


@pytest.mark.parametrize("total", [*range(1, 60), 100, 264, 999])
def test_a_fraction_begins_with_the_first_step_before_which_its_share_lies(total: int) -> None:
    for percent in range(1, 100):
        expected = next((s for s in range(total) if Fraction(s, total) >= Fraction(percent, 100)), None)
        schedule = as_schedule({"schedule": {0: "fp16", percent / 100: "bf16"}})
        if expected is None:
            with pytest.raises(ValueError, match=r"no step for it: the training has \d+\. Expected: starts between"):
                schedule.steps(total)
        else:
            assert schedule.steps(total) == (0, expected)


def test_starts_may_come_in_any_order_and_as_numpys_numbers() -> None:
    found = as_schedule({"schedule": {np.float64(0.8): "bf16", 0.0: "fp16", np.float64(0.5): "e5m2"}})
    assert str(found) == "fp16 then e5m2 from 0.5 then bf16 from 0.8"
    assert found == as_schedule({"schedule": [[0, "fp16"], [0.5, "e5m2"], [0.8, "bf16"]]})
    assert as_schedule({"schedule": {0: "fp16", np.int64(7): "bf16"}}).steps(10) == (0, 7)
    assert str(as_schedule({"schedule": {0: "fp16", 7: "bf16"}}, "up")) == "fp16 up then bf16 up from step 7"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"schedule": {}}, "A schedule is {}. Expected: {'schedule': {0: 'fp16', 0.8: 'bf16'}}"),
        ({"schedule": "fp16"}, "A schedule is 'fp16'"),
        ({"schedule": ["fp16", "bf16"]}, "A schedule is ['fp16', 'bf16']"),
        ({"schedule": {0.5: "fp16"}}, "has no first format"),
        ({"schedule": {0: "fp16", 1.0: "bf16"}}, "has the start 1.0. Expected: 0; a step, which is an integer"),
        ({"schedule": {0: "fp16", -1: "bf16"}}, "has the start -1"),
        ({"schedule": {0: "fp16", 80.0: "bf16"}}, "has the start 80.0"),
        ({"schedule": {0: "fp16", float("nan"): "bf16"}}, "has the start nan"),
        ({"schedule": {0: "fp16", True: "bf16"}}, "has the start True"),
        ({"schedule": {0: "fp16", "0.8": "bf16"}}, "has the start '0.8'"),
        ({"schedule": {0: "fp16", 0.5: "e5m2", 100: "bf16"}}, "has both steps and fractions"),
        ({"schedule": [[0, "fp16"], [0.0, "bf16"]]}, "has two formats for one start"),
        ({"schedule": {0: "fp16", 0.5: {"schedule": {0: "bf16"}}}}, "A schedule is inside another"),
        ({"schedule": {0: "fp16"}, "error": "e5m2"}, "A schedule has 'error' besides its key"),
        ({0: "fp16", 0.8: "bf16"}, "Expected for formats in turn: {'schedule': {0: 'fp16', 0.8: 'bf16'}}"),
    ],
)
def test_what_is_no_schedule_is_refused_in_words(given: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        train(small(), given)
    assert words in str(caught.value)


def test_every_format_is_checked_before_the_first_step() -> None:
    seen: list[int] = []
    for wrong, words in (
        (fpsim.Policy(overrides={"nowhere": None}), "nowhere"),
        ("fp61", "Unknown format 'fp61'"),
        ("recipe:nvfp5", "Unknown recipe 'nvfp5'"),
    ):
        with pytest.raises(ValueError, match=words):
            train(small(), {"schedule": {0: "fp16", 0.5: wrong}}, steps=4, progress=seen.append)
    for starts in ({2: "bf16", 4: "e5m2"}, {0.7: "bf16", 0.72: "e5m2"}):
        with pytest.raises(ValueError, match=r"no step for it: the training has 4\."):
            train(small(), {"schedule": {0: "fp16", **starts}}, steps=4, progress=seen.append)
    assert seen == []


def test_the_learning_rates_schedule_is_told_from_this_one() -> None:
    with pytest.raises(ValueError, match=r"It is that of the learning rate\. Formats in turn stand where"):
        train(small(), "fp16", schedule={0: "fp16", 0.8: "bf16"})  # type: ignore[arg-type]


# The switches


def state_at(step: int, path: Path, fmt: Any, rounding: str | None, **options: Any) -> tuple[Run, dict[str, Any], Any]:
    """A training, and of the moment before a step: the states of its objects, and that of the random numbers."""
    run = Training(small(), fmt, rounding, TrainOptions(**OPTIONS, **options)).run(branches={step: path})
    with path.open("rb") as file:
        file.seek(DIGEST)
        saved = torch.load(file, weights_only=True)
    return run, saved["states"], saved["noise"][0]


def batches_before(step: int) -> list[torch.Tensor]:
    """The samples of each step, at least up to this one."""
    generator = torch.Generator().manual_seed(0)
    epochs = [torch.randperm(96, generator=generator) for _ in range(step // BATCHES + 1)]
    return [batch for epoch in epochs for batch in epoch.split(32)]


def continued(
    states: dict[str, Any], steps: range, model: nn.Module, optimizer: torch.optim.Optimizer, scale: float = 1.0
) -> list[float]:
    """torch's own loop over the batches of these steps, from saved states."""
    x, y = small().train
    batches = batches_before(steps.stop)
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[batches[step]]), y[batches[step]])
        (loss * scale).backward()
        for parameter in model.parameters():
            parameter.grad /= scale  # type: ignore[operator]
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("scaling", ["none", 1024.0])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_after_the_switch_to_float32_a_training_is_plain_torch_to_the_bit(
    tmp_path: Path, scaling: Any, optimizer: str
) -> None:
    options: dict[str, Any] = {"steps": 13, "scaling": scaling, "optimizer": optimizer, "learning_rate": 0.01}
    run, states, _ = state_at(7, tmp_path / "s", {"schedule": {0: "fp16", 0.5: "fp32"}}, None, **options)
    assert run.losses[:7] == train(small(), "fp16", **OPTIONS, **options).losses[:7]
    model = small().model
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
    scale = 1.0 if scaling == "none" else scaling
    assert run.losses[7:] == continued(states, range(7, 13), model, kind(model.parameters(), lr=0.01), scale)
    with torch.no_grad():
        assert run.metrics["a"] == accuracy(model(small().test[0]), small().test[1])


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_after_the_switch_operands_and_results_are_torchs_casts(tmp_path: Path, name: str) -> None:
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[name]
    policy = fpsim.Policy(weight=name, activation=name)
    run, states, _ = state_at(4, tmp_path / "s", {"schedule": {0: "recipe:mxfp8", 4: policy}}, None, steps=5)
    x, y = small().train
    batch = batches_before(5)[4]

    def cast(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype).float()

    w1, b1, w2, b2 = (cast(states["model"][key]) for key in ("1.weight", "1.bias", "3.weight", "3.bias"))
    hidden = cast(nn.functional.linear(cast(x[batch].flatten(1)), w1, b1)).relu()
    expected = nn.functional.cross_entropy(cast(nn.functional.linear(hidden, w2, b2)), y[batch])
    assert run.losses[4] == expected.item()


@tiers.parametrize(
    ("fmt", "rounding"),
    [("recipe:fp8_delayed", None), ("mxfp4", "stochastic"), ("recipe:mxfp4_sr", None)],
    keep={"recipe:fp8_delayed", "mxfp4"},
)
def test_a_format_that_begins_later_is_as_one_in_which_a_model_with_these_parameters_begins(
    tmp_path: Path, fmt: str, rounding: str | None
) -> None:
    schedule = {"schedule": {0: "fp32", 5: fmt}}
    run, states, noise = state_at(5, tmp_path / "s", schedule, rounding, steps=12, momentum=0.0)
    assert states["delayed scaling"] == {}
    model = fpsim.quantize(small().model, fmt, rounding=rounding)
    with torch.random.fork_rng(devices=[]), fpsim.noise_of_torch():
        torch.set_rng_state(noise)
        assert run.losses[5:] == continued(states, range(5, 12), model, torch.optim.SGD(model.parameters(), lr=0.05))


def test_each_format_is_recorded_for_its_steps() -> None:
    schedule = {"schedule": {0: "e5m2", 0.5: "fp32", 0.75: "mxfp8_e4m3"}}
    run = train(small(), schedule, **{**OPTIONS, "record_every": 1}, steps=8)
    calls = {(row["format"], row["role"]): row["calls"] for row in run.rows if row["site"] == "3:linear"}
    assert {fmt: n for (fmt, role), n in calls.items() if role == "error"} == {"e5m2": 4, "fp32": 2}
    assert calls["mxfp8_e4m3", "wgrad.dy"] == 2


# Interruptions

TURNS: dict[str, tuple[Any, str | None, dict[str, Any]]] = {
    "stochastic": ({0: "e5m2", 4: "bf16", 9: "e4m3fn"}, "stochastic", {"scaling": "torch", "optimizer": "adamw"}),
    "delayed": ({0: "recipe:fp8_delayed", 4: "recipe:fp8_current", 9: "recipe:fp8_delayed"}, None, {}),
    "structures": ({0: "fp32", 0.3: "recipe:mxfp4_sr", 0.75: "fp16"}, None, {"scaling": "adaptive"}),
    "at an epoch's end": ({0: "e3m2", 3: "fp32", 9: "e3m2"}, "stochastic", {"master_weights": "none"}),
}


class Interrupted(Exception):
    pass


def all_of(run: Run) -> dict[str, Any]:
    """Everything that a run gave, but for its time."""
    arrays = {name: (x.dtype, x.shape, x.tobytes()) for name, x in telemetry(run).items()}
    return {**arrays, "metrics": run.metrics, "evaluations": run.evaluations, "skipped": run.skipped_steps}


@tiers.parametrize("case", TURNS, keep=tiers.every(len(TURNS)))
def test_a_training_that_is_interrupted_around_its_switches_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(checkpoints.Checkpoints, "is_due", lambda self: True)
    turns, rounding, changes = TURNS[case]
    options = TrainOptions(**{**OPTIONS, "record_every": 1, "evaluate_every": 1, "seed": 3, "epochs": 4, **changes})

    def run(path: Path | None = None, stop_before: int = 100) -> Run:
        done = [0]

        def progress(steps: int) -> None:
            done[0] += steps
            if done[0] > stop_before:
                raise Interrupted

        return Training(small(3), {"schedule": turns}, rounding, options).run(path, progress=progress)

    expected = all_of(run())
    for saved in (2, 3, 4, 5, 9, 12):  # the steps that the checkpoint has: before, at, between and after the switches
        with pytest.raises(Interrupted):
            run(tmp_path / "c", saved if saved < 12 else 11)
    assert all_of(run(tmp_path / "c")) == expected


def test_a_checkpoint_of_other_formats_in_turn_is_left_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints.Checkpoints, "is_due", lambda self: True)
    path = tmp_path / "c"

    def stop(_: int) -> None:
        if path.exists():
            raise Interrupted

    with pytest.raises(Interrupted):
        train(small(), {"schedule": {0: "fp16", 4: "bf16"}}, **OPTIONS, steps=6, checkpoint=path, progress=stop)
    for other in ("fp16", {"schedule": {0: "fp16", 5: "bf16"}}, {"schedule": {0: "fp16", 4: "e5m2"}}):
        content = path.read_bytes()
        with pytest.warns(UserWarning, match="is of another training"):
            found = train(small(), other, **OPTIONS, steps=6, checkpoint=path)
        assert found.losses == train(small(), other, **OPTIONS, steps=6).losses
        path.write_bytes(content)
