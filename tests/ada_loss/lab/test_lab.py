"""The digits task, the training loop, and files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import fpsim
from ada_loss.files import write_atomically
from ada_loss.lab.tasks import digits
from ada_loss.lab.training.loop import train
from ada_loss.lab.training.run import underflow_share


def test_a_seed_gives_the_same_training_bit_for_bit() -> None:
    for rounding in ("nearest_even", "stochastic"):
        first, second = (train(digits(3), "e5m2", rounding, epochs=1, seed=3) for _ in range(2))
        assert first.losses == second.losses
        assert first.metrics == second.metrics


def test_a_seed_gives_the_same_training_beside_a_stream_of_noise_of_its_own() -> None:
    expected = train(digits(3), "e5m2", "stochastic", steps=3, seed=3)
    x = torch.full((64,), 1.5)
    fpsim.manual_seed(7)
    try:
        undisturbed = [fpsim.round_to(x, "e5m0", "stochastic") for _ in range(2)]
        fpsim.manual_seed(7)
        before = fpsim.round_to(x, "e5m0", "stochastic")
        run = train(digits(3), "e5m2", "stochastic", steps=3, seed=3)
        after = fpsim.round_to(x, "e5m0", "stochastic")
    finally:
        fpsim.manual_seed(None)
    assert (run.losses, run.metrics) == (expected.losses, expected.metrics)
    assert torch.equal(before, undisturbed[0])
    assert torch.equal(after, undisturbed[1])


def test_training_leaves_the_task_and_torchs_randomness_alone() -> None:
    task = digits()
    before = [p.clone() for p in task.model.parameters()]
    state = torch.get_rng_state()
    train(task, "fp16", "stochastic", epochs=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, task.model.parameters(), strict=True))


def test_plain_float32_is_what_torch_computes() -> None:
    task = digits(1)
    run = train(task, None, epochs=1, seed=1)
    model = task.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 22)
    losses = []
    for batch in torch.randperm(1347, generator=torch.Generator().manual_seed(1)).split(64):
        optimizer.zero_grad()
        loss = task.loss(model(task.train[0][batch]), task.train[1][batch])
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert run.losses == losses


def test_training_learns_in_float32_and_recording_changes_nothing() -> None:
    task = digits()
    run = train(task, "fp16", epochs=3)
    assert run.metrics["accuracy"] > 0.9
    recorded = train(task, "fp16", epochs=3, record_every=2)
    assert recorded.losses == run.losses
    assert underflow_share(recorded.rows) > underflow_share(train(task, "bf16", epochs=3, record_every=2).rows) == 0


def test_underflow_is_the_share_of_lost_nonzero_gradients() -> None:
    rows = [
        {"role": "error", "nonzero": 6, "underflow_count": 1},
        {"role": "error", "nonzero": 2, "underflow_count": 1},
        {"role": "activation", "nonzero": 100, "underflow_count": 100},
    ]
    assert underflow_share(rows) == 2 / 8
    assert underflow_share([]) == 0


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "table.csv"
    write_atomically(target, b"old")
    with pytest.raises(TypeError):
        write_atomically(target, "not bytes")  # type: ignore[arg-type]
    assert target.read_bytes() == b"old"
    write_atomically(target, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["table.csv"]
    assert target.read_bytes() == b"new"


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened = []

    def noting(name: str, original: Any) -> Any:
        def noted(*arguments: Any, **options: Any) -> Any:
            happened.append(name)
            return original(*arguments, **options)

        return noted

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, noting(name, getattr(os, name)))
    write_atomically(tmp_path / "table.csv", b"new")
    assert happened == ["fsync", "replace", "fsync"]  # the content, the name, the folder that holds the name


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not list what a process has open")
def test_a_file_that_is_written_leaves_nothing_open(tmp_path: Path) -> None:
    write_atomically(tmp_path / "table.csv", b"new")
    assert str(tmp_path) not in {str(path.resolve()) for path in Path("/proc/self/fd").iterdir()}
