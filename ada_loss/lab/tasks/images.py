"""ResNets on colour images of 32x32 pixels: CIFAR, and patches of photographs that are part of Python packages."""

from __future__ import annotations

import hashlib
import os
import pickle
import tarfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ada_loss.files import write_atomically
from ada_loss.lab.tasks.networks import network, resnet
from ada_loss.lab.tasks.task import Task, accuracy, seeded, settled_by, trained_with
from fpsim.checks import pip_install, shown

__all__ = ["CIFAR", "Cifar", "cifar10", "cifar100", "patches"]

PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "hubble_deep_field", "immunohistochemistry", "retina", "rocket")
SIDE, STRIDE = 32, 12
# The default depth of the ResNet.
DEPTH = 20
TRAINING_SHARE = 0.7  # the share of an image's width for the training, from the left
# The largest range of pixels, out of 255, in a plain patch. Plain patches are left out, because a plain background
# looks the same in every photograph.
MOST_PLAIN = 8
TRAINED, TESTED = 200, 60  # the numbers of patches of each photograph


def _task(
    name: str,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    classes: int,
    seed: int,
    depth: int | None = None,
    version: int | None = None,
    model: str | None = None,
) -> Task:
    """Return a task of uint8 images, (n, 3, 32, 32), normalised by the training images' mean and deviation."""
    if model is not None and (depth is not None or version is not None):
        raise ValueError(f"model={shown(model)} was given with the depth or version of a ResNet. Give one of them.")
    x = train[0].float()
    mean, deviation = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)

    def make() -> nn.Module:
        return resnet(depth or DEPTH, classes, version or 1) if model is None else network(model, classes)

    data = tuple(((images.float() - mean) / deviation, labels) for images, labels in (train, test))
    return Task(name, seeded(seed, make), data[0], data[1], F.cross_entropy, {"accuracy": accuracy})


@settled_by(depth=int, version=int, model=str)
@trained_with(epochs=8, learning_rate=0.1, weight_decay=1e-4)
def patches(seed: int = 0, depth: int | None = None, version: int | None = None, model: str | None = None) -> Task:
    """Tell from which of nine photographs in scikit-image and scikit-learn a 32x32 patch comes.

    Training patches come from the left 70 % of a photograph and test patches from the rest, so that they do not
    overlap: the network has to learn the subject, not the position. Float32 reaches 0.77 (seed 0), in a minute on a
    slow core.

    depth, version: depth and version of the ResNet; by default 20 and 1. In a sweep: "patches,depth=56,version=2".
    model: the name of another network, "vgg16", "mobilenet", "wrn28_10", "fixup20"; see `networks`. In a sweep:
        "patches,model=vgg16".

    >>> task = patches()
    >>> task.train[0].shape, task.test[0].shape
    (torch.Size([1800, 3, 32, 32]), torch.Size([540, 3, 32, 32]))
    """
    try:
        from skimage import data
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise ImportError(f"The task patches needs photographs of {error.name}: {pip_install('lab')}.") from None
    photographs = [getattr(data, name)() for name in PHOTOGRAPHS] + list(load_sample_images().images)
    chosen: dict[str, list[Any]] = {"train": [], "test": []}
    # All seeds have the same patches.
    draw = np.random.default_rng(0)
    for photograph in photographs:
        height, width = photograph.shape[:2]
        border = int(TRAINING_SHARE * width)
        for part, left, right, count in (("train", 0, border, TRAINED), ("test", border, width, TESTED)):
            cut = [
                photograph[y : y + SIDE, x : x + SIDE, :3]
                for y in range(0, height - SIDE + 1, STRIDE)
                for x in range(left, right - SIDE + 1, STRIDE)
            ]
            cut = [image for image in cut if np.ptp(image) > MOST_PLAIN]
            chosen[part].append([cut[i] for i in draw.choice(len(cut), count, replace=False)])
    splits = []
    for part in ("train", "test"):
        images = torch.from_numpy(np.stack([image for images in chosen[part] for image in images])).permute(0, 3, 1, 2)
        labels = torch.arange(len(photographs)).repeat_interleave(len(chosen[part][0]))
        splits.append((images, labels))
    return _task("patches", splits[0], splits[1], len(photographs), seed, depth, version, model)


class Cifar:
    """The files of a CIFAR data set, Krizhevsky 2009, in the version for Python.

    name: the name of the archive.
    folder: the folder in the archive.
    md5: the MD5 sum of the archive.
    train, test: the files with the images.
    labels: the key of the labels in a file.
    """

    def __init__(self, name: str, folder: str, md5: str, train: tuple[str, ...], test: str, labels: bytes) -> None:
        self.name, self.folder, self.md5, self.labels = name, folder, md5, labels
        self.train, self.test = train, test

    @property
    def archive(self) -> str:
        return f"{self.name}-python.tar.gz"

    def read(self, root: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return training and test images, (n, 3, 32, 32) uint8, with labels. Missing files are downloaded to `root`.

        The files are pickles: this is the form in which CIFAR is distributed.

        Raises FileNotFoundError if the files can be neither found nor downloaded, ValueError if their content is not
        CIFAR's.
        """
        if not (root / self.folder).is_dir():
            self._unpack(root)
        return self._images(root, self.train), self._images(root, (self.test,))

    def _unpack(self, root: Path) -> None:
        archive = root / self.archive
        if not archive.exists():
            address = f"https://www.cs.toronto.edu/~kriz/{self.archive}"
            try:
                with urllib.request.urlopen(address, timeout=30) as answer:
                    content = answer.read()
            except (urllib.error.URLError, OSError) as error:
                raise FileNotFoundError(
                    f"{self.name} is not in {root.absolute()}, and {address} could not be fetched ({error}). "
                    f"Put {self.archive} there, or name its folder in the environment variable ADA_LOSS_DATA."
                ) from None
            # The authors of CIFAR publish MD5 sums.
            if hashlib.md5(content, usedforsecurity=False).hexdigest() != self.md5:
                raise ValueError(f"The file at {address} is not {self.name}: its MD5 sum differs. Try it again.")
            write_atomically(archive, content)
        try:
            with tarfile.open(archive) as packed:
                # The filter refuses devices, and also paths and links that lead out of the folder.
                packed.extractall(root, filter="data")
        except (tarfile.TarError, EOFError, OSError) as error:
            raise ValueError(f"{archive} cannot be unpacked ({error}). Remove it: it is downloaded again.") from None
        if not (root / self.folder).is_dir():
            raise ValueError(f"{archive} holds no {self.folder}. Remove it: it is downloaded again.")

    def _images(self, root: Path, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        images, labels = [], []
        for name in names:
            path = root / self.folder / name
            try:
                # A pickle can run code. This pickle comes from an archive with a known digest, or from the user's own
                # folder.
                batch = pickle.loads(path.read_bytes(), encoding="bytes")
                images.append(np.asarray(batch[b"data"], dtype=np.uint8).reshape(-1, 3, SIDE, SIDE))
                labels.extend(batch[self.labels])
            except FileNotFoundError:
                raise FileNotFoundError(f"{path} is missing. Remove its folder: it is unpacked again.") from None
            except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path} is not a file of {self.name} ({error!r}). Remove its folder.") from None
        pixels = torch.from_numpy(np.concatenate(images))
        if len(pixels) != len(labels):
            raise ValueError(f"{root / self.folder} holds {len(pixels)} images and {len(labels)} labels. Remove it.")
        return pixels, torch.tensor(labels)


CIFAR = {
    10: Cifar(
        "cifar-10",
        "cifar-10-batches-py",
        "c58f30108f718f92721af3b95e74349a",
        tuple(f"data_batch_{i}" for i in range(1, 6)),
        "test_batch",
        b"labels",
    ),
    100: Cifar("cifar-100", "cifar-100-python", "eb9058c3a382ffc7106e4002c42a8d85", ("train",), "test", b"fine_labels"),
}


def _cifar(classes: int, seed: int, depth: int | None, version: int | None, model: str | None) -> Task:
    train, test = CIFAR[classes].read(Path(os.environ.get("ADA_LOSS_DATA", "data")))
    return _task(f"cifar{classes}", train, test, classes, seed, depth, version, model)


@settled_by(depth=int, version=int, model=str)
@trained_with(epochs=30, batch_size=128, learning_rate=0.1, weight_decay=1e-4)
def cifar10(seed: int = 0, depth: int | None = None, version: int | None = None, model: str | None = None) -> Task:
    """Classify CIFAR-10's 60,000 images, without augmentation.

    The images are read from the folder that the environment variable ADA_LOSS_DATA names ("data" by default). Missing
    images are downloaded.

    depth, version: depth of the ResNet, 20, 56, 110 and others, and its version; version 2 is the ResNet of the second
        paper. In a sweep: "cifar10,depth=56".
    model: the name of another network, as in `patches`. In a sweep: "cifar10,model=wrn28_10".
    """
    return _cifar(10, seed, depth, version, model)


@settled_by(depth=int, version=int, model=str)
@trained_with(epochs=30, batch_size=128, learning_rate=0.1, weight_decay=1e-4)
def cifar100(seed: int = 0, depth: int | None = None, version: int | None = None, model: str | None = None) -> Task:
    """Classify CIFAR-100's 60,000 images with the hundred fine labels; arguments as for `cifar10`."""
    return _cifar(100, seed, depth, version, model)
