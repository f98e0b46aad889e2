"""CamVid's pictures, and SegNet-Basic in the size of its paper (Badrinarayanan et al. 2017)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from ada_loss.lab.tasks.image_files import read_labels, read_picture
from ada_loss.lab.tasks.task import Task, seeded
from fpsim.checks import shown

__all__ = ["SegNetBasic", "camvid"]

CLASSES = 11  # sky to cyclist
# The label of pixels without a class, in SegNet's version of CamVid.
VOID = 11
IGNORED = -1  # the target of these pixels, which the loss ignores
BATCH = 12  # the number of pictures, as in the original
SUFFIXES = (".jpeg", ".jpg", ".png")


class SegNetBasic(nn.Module):
    """Four convolutions of 7 x 7 with pooling, and four after unpooling: (batch, 3, h, w) -> (batch, 11, h, w)."""

    def __init__(self, classes: int = CLASSES, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75)
        self.encoder = nn.ModuleList(_block(inputs, width) for inputs in (3, width, width, width))
        self.decoder = nn.ModuleList(_block(width, width) for _ in range(4))
        self.classifier = nn.Conv2d(width, classes, 1)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        x, places = self.norm(x), []
        for block in self.encoder:
            x = torch.relu(block(x))
            shape = x.shape[2:]
            # Pooling rounds up, because sizes may be odd: 45 rows become 23, and the stored shape makes them 45 again.
            x, place = F.max_pool2d(x, 2, ceil_mode=True, return_indices=True)
            places.append((place, shape))
        for block, (place, shape) in zip(self.decoder, reversed(places)):
            x = block(F.max_unpool2d(x, place, [2, 2], output_size=list(shape)))
        return self.classifier(x)  # type: ignore[no-any-return]


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 7, padding=3, bias=False), nn.BatchNorm2d(outputs))


class CamVid(Dataset[tuple[Tensor, Tensor]]):
    """Pictures and the classes of their pixels, read when they are needed.

    files: pairs of a picture and its labels.
    flips: whether to flip pictures with probability 1/2, by torch's random numbers, as the original does.
    """

    def __init__(self, files: list[tuple[Path, Path]], flips: bool) -> None:
        self._files, self._flips = files, flips

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        picture, labels = self._files[i]
        x, y = torch.from_numpy(read_picture(picture)).float(), torch.from_numpy(read_labels(labels)).long()
        if x.shape[1:] != y.shape:
            raise ValueError(
                f"{picture} is {tuple(x.shape[1:])}, and {labels} is {tuple(y.shape)}. Expected: one size."
            )
        if int(y.max()) > VOID:
            raise ValueError(f"{labels} has the class {int(y.max())}. Expected: 0 to 10, and 11 for no class.")
        y[y == VOID] = IGNORED
        flips = self._flips and bool(torch.rand(()) < 0.5)
        return (x.flip(2), y.flip(1)) if flips else (x, y)


def camvid(seed: int, path: str | os.PathLike[str], metrics: dict[str, Callable[[Tensor, Tensor], float]]) -> Task:
    """Return CamVid with SegNet-Basic in the size of its paper, trained on train and tested on val.

    The loss weights the classes by their frequencies, as `_median_frequencies` returns them.

    seed: the seed of the weights, and of the order of the pictures.
    path: the folder, in the layout of SegNet's authors: train, trainannot, val and valannot; a picture and its labels
        have the same file name.
    Raises FileNotFoundError for a folder that is not CamVid's, ValueError for damaged files.
    """
    parts = {part: _files_of(Path(path), part) for part in ("train", "val")}
    weight = _median_frequencies([labels for _, labels in parts["train"]])
    train = CamVid(parts["train"], True)
    batch = min(BATCH, len(train))
    loader: Any = DataLoader(train, batch, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(seed))
    test = DataLoader(CamVid(parts["val"], False), BATCH)
    return Task("segmentation", seeded(seed, SegNetBasic), loader, test, partial(_loss, weight), metrics)


def _loss(weight: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, weight.to(outputs.device, outputs.dtype), ignore_index=IGNORED)


def _median_frequencies(files: list[Path]) -> Tensor:
    """Return each class's weight, median frequency / frequency of the class (Eigen and Fergus 2015); 0 if absent.

    A class's frequency is its share of the pixels in the pictures where it occurs.
    """
    pixels, there = np.zeros(CLASSES), np.zeros(CLASSES)
    for file in files:
        counts = np.bincount(read_labels(file).ravel(), minlength=CLASSES)[:CLASSES]
        pixels += counts
        there += (counts > 0) * read_labels(file).size
    shares = np.divide(pixels, there, out=np.zeros(CLASSES), where=there > 0)
    median = np.median(shares[shares > 0]) if shares.any() else 0.0
    return torch.from_numpy(np.divide(median, shares, out=np.zeros(CLASSES), where=shares > 0).astype(np.float32))


def _files_of(path: Path, part: str) -> list[tuple[Path, Path]]:
    """Return the pictures of a part, each with the file of its labels."""
    inner, annotated = path / part, path / f"{part}annot"
    pictures = sorted(f for f in inner.glob("*") if f.suffix.lower() in SUFFIXES) if inner.is_dir() else []
    if not pictures:
        raise FileNotFoundError(
            f"{shown(str(path))} has no pictures in {part}. Expected: CamVid in the layout of SegNet's authors, with "
            f"the folders train, trainannot, val and valannot: 'segmentation=CamVid'."
        )
    files = [(picture, annotated / f"{picture.stem}.png") for picture in pictures]
    missing = [labels for _, labels in files if not labels.is_file()]
    if missing:
        raise FileNotFoundError(f"{missing[0]} is missing, the labels of {part}/{missing[0].stem}. Put it there.")
    return files
