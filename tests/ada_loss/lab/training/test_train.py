"""The training loop: each choice against torch's own loop, and a training that is killed and goes on."""

from __future__ import annotations

import hashlib
import io
import math
import multiprocessing
import random
import time
from dataclasses import fields, make_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiers
import torch
from torch import nn

import fpsim
from ada_loss.lab.cells.telemetry import telemetry
from ada_loss.lab.tasks import Task, digits
from ada_loss.lab.training.checkpoints import DIGEST
from ada_loss.lab.training.loop import TrainingState, train
from ada_loss.lab.training.options import TrainOptions, is_allowed
from ada_loss.lab.training.run import Run, Stopped

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["ada_loss.lab.training.loop", "sklearn.datasets"])
BATCHES = 22  # of 64 in an epoch of 1,347 images


def by_hand(task: Task, optimizer: torch.optim.Optimizer, rates: list[float], double: bool = False) -> list[float]:
    """torch's own loop over the same batches."""
    x = task.train[0].double() if double else task.train[0]
    batches = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).split(64)
    losses = []
    for rate, batch in zip(rates, batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = task.loss(task.model(x[batch]), task.train[1][batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_adamw_decays_weights_as_torchs_does() -> None:
    task = digits()
    run = train(task, optimizer="adamw", learning_rate=1e-3, weight_decay=0.5, schedule="constant", steps=10)
    optimizer = torch.optim.AdamW(task.model.parameters(), weight_decay=0.5)
    assert run.losses == by_hand(task, optimizer, [1e-3] * 10)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 1, 3 / 4, 2 / 4, 1 / 4]),
        ("cosine", [1 / 3, 2 / 3, 1, 1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
    ],
)
def test_the_learning_rate_rises_and_falls_as_it_is_told(schedule: str, rates: list[float]) -> None:
    task = digits()
    run = train(task, schedule=schedule, warmup=3, steps=7, learning_rate=0.1, momentum=0.0)
    expected = by_hand(task, torch.optim.SGD(task.model.parameters(), lr=0.1), [0.1 * rate for rate in rates])
    # the rates differ in their last bit from those written here, and so may the losses after a few steps
    assert run.losses == pytest.approx(expected, rel=1e-5)


def test_accumulation_in_float64_is_a_training_in_float64() -> None:
    task = digits()
    run = train(task, accumulation="float64", schedule="constant", steps=10, momentum=0.0, learning_rate=0.1)
    task.model.double()
    assert run.losses == by_hand(task, torch.optim.SGD(task.model.parameters(), lr=0.1), [0.1] * 10, double=True)


def test_accumulation_in_float64_rounds_each_result_once() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight)

    x = torch.tensor([[2.0**24, 1.0, -(2.0**24)]])  # in float32 the sum is 0
    data = (x, torch.zeros(1, 1))
    task = Task("sum", Sum(), data, data, lambda out, y: out.sum(), {"sum": lambda out, y: float(out)})
    options: dict[str, Any] = {"steps": 1, "learning_rate": 0.0, "batch_size": 1}
    assert train(task, "bf16", accumulation="float64", **options).metrics == {"sum": 1.0}


def test_a_policy_keeps_its_own_rounding_unless_another_is_asked_for() -> None:
    own = fpsim.Policy(error="e3m2", rounding={"error": "toward_zero"})
    options: dict[str, Any] = {"steps": 3, "record_every": 1}
    assert {row["rounding"] for row in train(digits(), own, **options).rows} == {"toward_zero"}
    assert {row["rounding"] for row in train(digits(), own, "up", **options).rows} == {"up"}
    assert {row["rounding"] for row in train(digits(), "e5m2", **options).rows} == {"nearest_even"}


def test_a_trainings_noise_follows_its_seed_and_leaves_the_callers_stream_as_it_was() -> None:
    options: dict[str, Any] = {"steps": 2, "record_every": 0}
    plain = train(digits(), "e5m2", "stochastic", **options).losses
    x = torch.full((64,), 1.1)
    fpsim.manual_seed(7)
    first, second = (fpsim.round_to(x, "e5m2", "stochastic") for _ in range(2))
    fpsim.manual_seed(7)
    assert torch.equal(fpsim.round_to(x, "e5m2", "stochastic"), first)
    assert train(digits(), "e5m2", "stochastic", **options).losses == plain
    assert torch.equal(fpsim.round_to(x, "e5m2", "stochastic"), second)


def test_micro_batches_add_up_to_the_batch() -> None:
    # in float64 the order of a sum moves the 16th digit; batch normalisation sees parts, so a network without it
    task = Task(
        "linear", nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), *[digits().train] * 2, nn.functional.cross_entropy, {}
    )
    options: dict[str, Any] = {"accumulation": "float64", "steps": 12}
    assert train(task, micro_batches=5, **options).losses == pytest.approx(train(task, **options).losses, rel=1e-12)


def test_gradients_are_clipped_in_their_true_size() -> None:
    options: dict[str, Any] = {"steps": 5, "momentum": 0.0, "schedule": "constant"}
    task = digits()
    free = train(task, scaling=1024, max_gradient_norm=1e9, **options)
    assert free.losses == train(task, scaling=1024, **options).losses
    clipped = train(task, scaling=1024, max_gradient_norm=1e-3, **options)
    model, loss = task.model, task.loss
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = torch.randperm(1347, generator=torch.Generator().manual_seed(0)).split(64)[:5]
    expected = []
    for batch in batches:
        optimizer.zero_grad()
        value = loss(model(task.train[0][batch]), task.train[1][batch])
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        expected.append(value.item())
    assert clipped.losses == pytest.approx(expected, rel=1e-6)  # 1024 * loss / 1024 rounds the sum of a norm elsewhere


def test_without_master_weights_parameters_stay_in_their_format_and_lose_small_updates() -> None:
    seen: list[list[torch.Tensor]] = []
    task = digits()

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append([p.detach().clone() for p in models[0].parameters()])
        return nn.functional.cross_entropy(out, y)

    models: list[nn.Module] = []

    class Spy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = task.model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            models[:] = [self]
            return self.inner(x)  # type: ignore[no-any-return]

    spied = Task("spied", Spy(), task.train, task.test, loss, {})
    train(spied, "bf16", master_weights="none", steps=4, learning_rate=0.01)
    for parameters in seen[1:]:
        assert all(torch.equal(p, p.bfloat16().float()) for p in parameters)
    assert not all(torch.equal(a, b) for a, b in zip(seen[1], seen[3], strict=True))
    seen.clear()
    train(spied, "bf16", master_weights="none", steps=4, learning_rate=1e-7, momentum=0.0)
    for before, after in zip(seen[1], seen[3], strict=True):
        large = before.abs() > 1e-4  # biases that start at 0 have room for any update
        assert torch.equal(before[large], after[large])
    seen.clear()
    train(spied, "bf16", steps=4, learning_rate=1e-3)
    assert not all(torch.equal(p, p.bfloat16().float()) for p in seen[3])


def test_a_training_tells_what_happened_on_its_way() -> None:
    run = train(digits(), "e5m2", scaling="adaptive", epochs=3, record_every=4, evaluate_every=1)
    assert [step for step, _ in run.evaluations] == [BATCHES, 2 * BATCHES, 3 * BATCHES]
    assert run.evaluations[-1][1] == run.metrics
    assert [step for step, _ in run.layer_scales] == [20, 40, 60, 66] == [step for step, _ in run.history]
    arrays = telemetry(run)
    assert arrays["layers.site"][0] == "stem:conv2d"
    assert arrays["layers.log2_scale"].shape == (4, len(arrays["layers.site"]))
    assert arrays["history.overflow"].shape == arrays["history.underflow"].shape
    assert arrays["evaluations.accuracy"].tolist() == [metrics["accuracy"] for _, metrics in run.evaluations]
    plain = train(digits(), "e5m2", scaling="adaptive", epochs=3, record_every=0)
    assert plain.losses == run.losses
    assert plain.metrics == run.metrics


def test_a_metric_that_gives_a_tensor_becomes_a_number() -> None:
    task = digits()
    task.metrics["right"] = lambda out, y: (out.argmax(1) == y).float().mean()  # type: ignore[assignment,return-value]
    metrics = train(task, steps=1).metrics
    assert type(metrics["right"]) is float  # a sweep writes it as JSON
    assert metrics["right"] == metrics["accuracy"]


def test_skipped_steps_are_named() -> None:
    policy = fpsim.Policy(error="e5m2", weight_grad="e5m2")
    run = train(digits(), policy, scaling=2.0**30, steps=3)
    assert run.skipped_steps == [0, 1, 2]
    assert run.skipped == 3


@pytest.mark.parametrize("name", ["steps", "batch_size", "record_every"])
def test_numbers_of_steps_are_those_up_to_which_floats_count(name: str) -> None:
    assert is_allowed(name, 2**53)
    assert not is_allowed(name, 2**53 + 1)


@pytest.mark.parametrize("name", ["optimizer", "schedule", "master_weights", "accumulation"])
def test_unknown_words_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"Unknown {name} 'magic'. Known: "):
        train(digits(), **{name: "magic"})


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *[("epochs", 0), ("steps", -1), ("batch_size", 0), ("batch_size", -3), ("micro_batches", 0), ("warmup", -1)],
        *[("record_every", -1), ("evaluate_every", -1), ("learning_rate", math.nan), ("learning_rate", -0.1)],
        *[("momentum", -0.1), ("weight_decay", math.inf), ("max_gradient_norm", -1.0), ("warmup", 2.5)],
    ],
)
def test_impossible_numbers_are_refused(name: str, number: float) -> None:
    kind = "an integer" if type(getattr(TrainOptions(), name)) is int else "a finite number"
    with pytest.raises(ValueError, match=f"^{name} is {number}. Expected: {kind}, "):
        train(digits(), **{name: number})


def test_numbers_are_equal_options_however_they_are_written() -> None:
    assert TrainOptions(learning_rate=1, epochs=np.int64(3)) == TrainOptions(learning_rate=1.0, epochs=3)  # type: ignore[arg-type]
    assert type(TrainOptions(momentum=0).momentum) is float


# Checkpoints

OPTIONS: dict[str, Any] = {"epochs": 6, "record_every": 3, "evaluate_every": 2, "seed": 5, "micro_batches": 2}
CASES = {
    "stochastic": ("e5m2", "stochastic", {"scaling": "none", "optimizer": "adamw", "learning_rate": 1e-3}),
    "dynamic": (fpsim.Policy(error="e5m2", weight_grad="e5m2"), "nearest_even", {"scaling": "torch"}),
    "adaptive": ("e4m3fn", "stochastic", {"scaling": "adaptive", "master_weights": "none"}),
    "in turn": ({"schedule": {0: "e5m2", 0.2: "recipe:fp8_delayed", 0.5: "mxfp4"}}, "stochastic", {"scaling": "torch"}),
}


def checkpointed(path: Path, case: str) -> Run:
    torch.set_num_threads(1)
    fmt, rounding, options = CASES[case]
    return train(digits(5), fmt, rounding, **OPTIONS, **options, checkpoint=path, checkpoint_seconds=0.05)


@pytest.mark.full
@tiers.parametrize("case", CASES, keep={"dynamic"})
def test_a_training_that_is_killed_goes_on_to_the_same_bits(tmp_path: Path, case: str) -> None:
    moments, path = random.Random(case), tmp_path / "cell.pt"
    fmt, rounding, options = CASES[case]
    expected = train(digits(5), fmt, rounding, **OPTIONS, **options)
    for _ in range(2):
        process = PROCESSES.Process(target=checkpointed, args=(path, case))
        process.start()
        end = time.monotonic() + 60
        before = path.stat().st_mtime_ns if path.exists() else 0
        while process.is_alive() and (not path.exists() or path.stat().st_mtime_ns == before):
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.4))
        process.kill()
        process.join()
    assert path.exists()
    steps: list[int] = []
    fmt, rounding, options = CASES[case]
    run = train(
        digits(5), fmt, rounding, **OPTIONS, **options, checkpoint=path, checkpoint_seconds=1e9, progress=steps.append
    )
    assert steps[0] > 1  # it went on, and did not begin again
    assert sum(steps) == 6 * BATCHES
    assert run.losses == expected.losses
    assert run.metrics == expected.metrics
    ours, theirs = telemetry(run), telemetry(expected)
    assert ours.keys() == theirs.keys()
    for name in ours:
        # SQNR and others may be NaN on both sides
        assert all(a == b or (a != a and b != b) for a, b in zip(ours[name].flat, theirs[name].flat, strict=True)), name
    assert not path.exists()


def interrupted(path: Path, task: Task, **options: Any) -> None:
    """Leave the checkpoint of a training's first two steps behind."""

    def stop(_: int) -> None:
        if path.exists():
            kept.append(path.read_bytes())

    kept: list[bytes] = []
    train(task, steps=3, progress=stop, checkpoint=path, checkpoint_seconds=0.0, **options)
    path.write_bytes(kept[-1])


def test_a_foreign_or_damaged_checkpoint_is_left_aside_with_a_warning(tmp_path: Path) -> None:
    path, task = tmp_path / "cell.pt", digits()
    interrupted(path, task)
    whole, plain = path.read_bytes(), train(task, steps=3)
    with pytest.warns(UserWarning, match="is of another training"):
        assert train(task, steps=4, checkpoint=path).losses == train(task, steps=4).losses
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1  # in the numbers, beyond the pickle
    for damaged in (whole[:-100], b"", bytes(flipped), b"text"):
        path.write_bytes(damaged)
        with pytest.warns(UserWarning, match="cannot be read"):
            assert train(task, steps=3, checkpoint=path).losses == plain.losses
    path.write_bytes(whole)
    assert train(task, steps=3, checkpoint=path).losses == plain.losses


def test_a_checkpoint_with_what_this_version_does_not_know_is_left_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, task = tmp_path / "cell.pt", digits()
    with monkeypatch.context() as newer:
        state = make_dataclass("NewState", [("news", int, 3)], bases=(TrainingState,))
        newer.setattr("ada_loss.lab.training.loop.TrainingState", state)
        interrupted(path, task)
    with pytest.warns(UserWarning, match="is of another training"):
        assert train(task, steps=3, checkpoint=path).losses == train(task, steps=3).losses


class RunsCode:
    """Its pickle is a call, as that of whoever wants a file to run something."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    path, mark, task = tmp_path / "cell.pt", tmp_path / "touched", digits()
    interrupted(path, task)
    saved = torch.load(io.BytesIO(path.read_bytes()[DIGEST:]), weights_only=True)
    content = io.BytesIO()
    torch.save({**saved, "states": {**saved["states"], "training": RunsCode(mark)}}, content)
    path.write_bytes(hashlib.sha256(content.getvalue()).digest() + content.getvalue())
    with pytest.warns(UserWarning, match="cannot be read: it holds more than tensors, numbers and strings"):
        assert train(task, steps=3, checkpoint=path).losses == train(task, steps=3).losses
    assert not mark.exists()


def test_a_checkpoint_made_by_hand_that_does_not_fit_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    path, task = tmp_path / "cell.pt", digits()
    interrupted(path, task)
    saved = torch.load(io.BytesIO(path.read_bytes()[DIGEST:]), weights_only=True)
    content = io.BytesIO()
    torch.save({**saved, "states": {}}, content)
    path.write_bytes(hashlib.sha256(content.getvalue()).digest() + content.getvalue())
    with pytest.raises(ValueError, match=r"not as this library writes it \(KeyError.* Remove it: training starts over"):
        train(task, steps=3, checkpoint=path)


@pytest.mark.parametrize("what", ["weights", "model", "inputs", "targets", "version"])
def test_a_checkpoint_of_another_beginning_is_left_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    path, task = tmp_path / "cell.pt", digits()
    (x, y), model = task.train, task.model
    other = {
        "weights": replace(task, model=digits(1).model),
        "model": replace(task, model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10))),
        "inputs": replace(task, train=(1 - x, y)),
        "targets": replace(task, train=(x, 9 - y)),
        "version": replace(task, model=model),
    }[what]
    interrupted(path, task)
    if what == "version":
        monkeypatch.setattr("ada_loss.lab.training.loop.versions", lambda: {"torch": "9.0"})
    with pytest.warns(UserWarning, match="is of another training"):
        assert train(other, steps=3, checkpoint=path).losses == train(other, steps=3).losses


ANOTHER = {
    **{"scaling": 8.0, "optimizer": "adam", "epochs": 11, "steps": 4, "batch_size": 65, "micro_batches": 2},
    **{"learning_rate": 0.06, "schedule": "linear", "warmup": 1, "momentum": 0.8, "weight_decay": 0.1},
    **{"max_gradient_norm": 9.0, "master_weights": "none", "accumulation": "float64", "seed": 1},
    **{"record_every": 2, "evaluate_every": 1, "device": "cpu:0"},
}


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The checkpoint of an interrupted training of three steps."""
    path = tmp_path_factory.mktemp("checkpoint") / "cell.pt"
    interrupted(path, digits())
    return path.read_bytes()


@pytest.mark.parametrize("name", [option.name for option in fields(TrainOptions)])
def test_every_option_is_part_of_what_a_checkpoint_is_of(tmp_path: Path, left_behind: bytes, name: str) -> None:
    path, options = tmp_path / "cell.pt", {"steps": 3, name: ANOTHER[name]}
    path.write_bytes(left_behind)
    with pytest.warns(UserWarning, match="is of another training"):
        assert len(train(digits(), **options, checkpoint=path).losses) == options["steps"]


@pytest.mark.gpu
def test_on_a_card_dropout_is_the_same_with_evaluations_and_after_an_interruption(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    path, task = tmp_path / "cell.pt", replace(digits(), model=model)
    state = torch.cuda.get_rng_state()
    plain = train(task, steps=3, batch_size=1000, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert train(task, steps=3, batch_size=1000, device="cuda", evaluate_every=1).losses == plain.losses
    interrupted(path, task, batch_size=1000, device="cuda")
    torch.rand(5, device="cuda")
    assert train(task, steps=3, batch_size=1000, device="cuda", checkpoint=path).losses == plain.losses


def test_a_norm_that_overflows_skips_the_step_as_an_inf_does() -> None:
    task = digits(0)
    huge = replace(task, loss=lambda outputs, y: nn.functional.cross_entropy(outputs, y) * 1e36)
    run = train(huge, steps=3, max_gradient_norm=1.0)
    assert run.skipped_steps == [0, 1, 2]


def test_a_training_that_its_rule_stopped_leaves_no_checkpoint(tmp_path: Path) -> None:
    task = digits(0)
    lost = replace(task, loss=lambda outputs, y: outputs.sum() * math.inf)
    with pytest.raises(Stopped, match="deepspeed") as stopped:
        train(
            lost,
            "fp16",
            scaling="deepspeed",
            steps=100,
            record_every=1,
            checkpoint=tmp_path / "c",
            checkpoint_seconds=0,
        )
    assert len(stopped.value.run.losses) == len(stopped.value.run.scales) < 100
    assert stopped.value.run.rows
    assert not list(tmp_path.iterdir())
