"""Training on iterables of batches: DataLoaders of torch, with shuffling, workers and augmentation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import ada_loss
from ada_loss import Task
from ada_loss.lab.tasks import deep_digits, digits
from ada_loss.lab.training import checkpoints, train
from ada_loss.lab.training.loop import Training
from ada_loss.lab.training.options import TrainOptions


def small(count: int = 96, make_task: Any = digits) -> Task:
    task: Task = make_task()
    x, y = task.train
    return dataclasses.replace(task, train=(x[:count], y[:count]), test=(x[-64:], y[-64:]))


def loaded(task: Task, **options: Any) -> Task:
    train_set, test_set = TensorDataset(*task.train), TensorDataset(*task.test)
    return dataclasses.replace(
        task, train=DataLoader(train_set, batch_size=32, **options), test=DataLoader(test_set, batch_size=50)
    )


def test_a_loader_of_the_same_batches_trains_the_same_bits() -> None:
    task = small()
    order = [torch.randperm(96, generator=torch.Generator().manual_seed(3)).tolist()]
    by_tensors = train(task, "e5m2", batch_size=32, epochs=1, seed=3)
    by_loader = train(loaded(task, sampler=order[0]), "e5m2", epochs=1, seed=3)
    batches = [(task.train[0][i], task.train[1][i]) for i in torch.tensor(order[0]).split(32)]
    by_list = train(dataclasses.replace(task, train=batches), "e5m2", epochs=1, seed=3)
    assert by_tensors.losses == by_loader.losses == by_list.losses
    assert by_tensors.metrics == by_loader.metrics == by_list.metrics


def test_the_parts_of_a_loaders_batch_add_up_to_it() -> None:
    task = loaded(small(make_task=deep_digits))  # without batch normalisation
    whole, parts = (train(task, epochs=1, micro_batches=n).losses[0] for n in (1, 4))
    assert parts == pytest.approx(whole, rel=1e-5)


def flipped(x: Tensor) -> Tensor:
    return torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(-1), x)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupted_epoch_goes_on_with_the_next_batch_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(checkpoints.Checkpoints, "is_due", lambda self: True)
    task = dataclasses.replace(loaded(small(), shuffle=True, num_workers=workers), augment=flipped)
    options = TrainOptions(epochs=2, seed=5)

    class Interrupted(Exception):
        pass

    def stop_at(last: int) -> Any:
        done = [0]

        def progress(steps: int) -> None:
            done[0] += steps
            if done[0] == last:
                raise Interrupted

        return progress

    expected = Training(task, "e5m2", "stochastic", options).run()
    assert len(expected.losses) == 6
    path = tmp_path / "c.pt"
    for last in (3, 6):  # in both epochs; the step that the interruption meets is not yet saved
        with pytest.raises(Interrupted):
            Training(task, "e5m2", "stochastic", options).run(path, progress=stop_at(last))
    again = Training(task, "e5m2", "stochastic", options).run(path)
    assert (again.losses, again.metrics) == (expected.losses, expected.metrics)


class Endless:
    """Batches without a length or an end."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield small().train[0][:8], small().train[1][:8]  # type: ignore[index]


class Empty:
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_data_without_a_length_are_trained_on_for_so_many_steps() -> None:
    task = dataclasses.replace(small(), train=Endless())
    assert len(train(task, "fp16", steps=3, record_every=0).losses) == 3
    with pytest.raises(ValueError, match=r"epochs counts passes over the training data, .* has no length\. Give steps"):
        train(task, "fp16")


def test_data_that_give_nothing_or_no_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gave no batch\. Expected: what begins again each time"):
        train(dataclasses.replace(small(), train=Empty()), steps=1)
    with pytest.raises(TypeError, match=r"A batch is dict\. Expected: two tensors"):
        train(dataclasses.replace(small(), train=DataLoader([{"x": torch.ones(1)}])), steps=1)


def with_generators(where: str) -> Task:
    """A task whose loader draws its order from a generator of its own."""
    own = torch.Generator().manual_seed(7)
    if where == "loader":
        return loaded(small(), shuffle=True, generator=own)
    return loaded(small(), sampler=RandomSampler(range(96), generator=own))


@pytest.mark.parametrize("where", ["loader", "sampler"])
@pytest.mark.parametrize("start", [4, 6])  # within an epoch, and between two
def test_a_branch_goes_on_with_the_generators_of_a_loader(tmp_path: Path, where: str, start: int) -> None:
    options, formats = TrainOptions(epochs=3), {"schedule": {0: "fp16", start: "e5m2"}}
    alone = train(with_generators(where), formats, epochs=3)
    branches = {start: tmp_path / "state"}
    Training(with_generators(where), "fp16", None, options).run(branches=branches)
    assert branches[start].exists()
    assert Training(with_generators(where), formats, None, options).run(branches=branches).losses == alone.losses


def from_a_loader(seed: int) -> Task:
    return loaded(small(), shuffle=True)


def test_a_sweep_trains_on_loaders(tmp_path: Path) -> None:
    options: dict[str, Any] = {"task_options": {"epochs": 1}, "out": tmp_path, "show_progress": False}
    results = ada_loss.sweep(from_a_loader, ["e5m2"], ["torch"], seeds=2, **options)
    assert results.counts["done"] == 4
    assert {row["accuracy"] > 0 for row in results.rows()} == {True}
