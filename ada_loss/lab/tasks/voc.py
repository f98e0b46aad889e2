"""PASCAL VOC's pictures, and SSD300 and SSD512 in the size of their paper (Liu et al. 2016)."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from ada_loss.lab.tasks.boxes import Anchors, anchors_on, predictions, with_glorot_weights
from ada_loss.lab.tasks.image_files import read_picture
from ada_loss.lab.tasks.task import Task, seeded
from fpsim.checks import shown

__all__ = ["SSD", "anchors_of", "voc"]

NAMES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog"),
    *("horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
CLASSES = len(NAMES) + 1  # class 0 is the background
MOST = 64  # the largest number of objects in one picture: VOC has at most 56
# Means of red, green and blue, which are subtracted for VGG-16 (Simonyan and Zisserman 2015).
MEANS = (123.0, 117.0, 104.0)
BATCH = 8  # the number of pictures: the originals use two batch sizes, and this is the smaller one
# The initial scale of the features of conv4_3 after their normalisation (Liu et al. 2016, 3.1).
SCALE = 20.0

# For each size: the grid, the step between centres, the aspect ratios, and the extents of the boxes of each feature
# map, as in the authors' code. A map's second square box also needs the extent of the next map, so EXTENTS has one
# number more than there are maps.
GRIDS = {300: (38, 19, 10, 5, 3, 1), 512: (64, 32, 16, 8, 4, 2, 1)}
STEPS = {300: (8, 16, 32, 64, 100, 300), 512: (8, 16, 32, 64, 128, 256, 512)}
RATIOS = {300: ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,)), 512: ((2,), (2, 3), (2, 3), (2, 3), (2, 3), (2,), (2,))}
EXTENTS = {
    300: (30.0, 60.0, 111.0, 162.0, 213.0, 264.0, 315.0),
    512: (35.84, 76.8, 153.6, 230.4, 307.2, 384.0, 460.8, 537.6),
}
# For each size: inner channels, channels, kernel, stride and padding of the pairs of convolutions after VGG-16.
EXTRAS = {
    300: ((256, 512, 3, 2, 1), (128, 256, 3, 2, 1), (128, 256, 3, 1, 0), (128, 256, 3, 1, 0)),
    512: ((256, 512, 3, 2, 1), *((128, 256, 3, 2, 1),) * 3, (128, 256, 4, 1, 1)),
}


def anchors_of(size: int) -> Anchors:
    """Return the default boxes of SSD: 8,732 for 300 pixels, 24,564 for 512.

    >>> [len(anchors_of(size).boxes) for size in (300, 512)]
    [8732, 24564]
    """
    boxes = []
    for grid, step, ratios, extent, following in zip(
        GRIDS[size], STEPS[size], RATIOS[size], EXTENTS[size], EXTENTS[size][1:]
    ):
        kinds = [(extent, extent), (math.sqrt(extent * following),) * 2]
        for ratio in ratios:
            root = math.sqrt(ratio)
            kinds += [(extent * root, extent / root), (extent / root, extent * root)]
        boxes += anchors_on(grid, step, kinds)
    return Anchors(torch.tensor(boxes), CLASSES, MOST)


class SSD(nn.Module):
    """SSD on VGG-16: (batch, 3, size, size) -> (batch, anchors, 21 + 4). Its weights are random, not downloaded."""

    def __init__(self, size: int) -> None:
        super().__init__()
        layers = _vgg16()
        # The first part ends with the ReLU of conv4_3.
        self.conv4 = nn.Sequential(*layers[:23])
        self.scale = nn.Parameter(torch.full((512,), SCALE))
        self.conv7 = nn.Sequential(
            *layers[23:],
            nn.MaxPool2d(3, stride=1, padding=1),
            *(nn.Conv2d(512, 1024, 3, padding=6, dilation=6), nn.ReLU(), nn.Conv2d(1024, 1024, 1), nn.ReLU()),
        )
        self.extras, channels, inputs = nn.ModuleList(), [512, 1024], 1024
        for inner, outputs, kernel, stride, padding in EXTRAS[size]:
            pair = nn.Conv2d(inputs, inner, 1), nn.ReLU(), nn.Conv2d(inner, outputs, kernel, stride, padding), nn.ReLU()
            self.extras.append(nn.Sequential(*pair))
            channels.append(outputs)
            inputs = outputs
        counts = [2 + 2 * len(ratios) for ratios in RATIOS[size]]
        self.classes = nn.ModuleList(nn.Conv2d(c, n * CLASSES, 3, padding=1) for c, n in zip(channels, counts))
        self.boxes = nn.ModuleList(nn.Conv2d(c, n * 4, 3, padding=1) for c, n in zip(channels, counts))
        with_glorot_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv4(x)
        maps = [F.normalize(x, dim=1) * self.scale[:, None, None]]
        x = self.conv7(x)
        maps.append(x)
        for extra in self.extras:
            x = extra(x)
            maps.append(x)
        return predictions(maps, self.classes, self.boxes, CLASSES)


def _vgg16() -> list[nn.Module]:
    """Return the thirteen convolutions of VGG-16. Pooling rounds sides up: 75 pixels become 38."""
    layers: list[nn.Module] = []
    inputs = 3
    for stage, (channels, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
        if stage:
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        for _ in range(count):
            layers += [nn.Conv2d(inputs, channels, 3, padding=1), nn.ReLU()]
            inputs = channels
    return layers


class Voc(Dataset[tuple[Tensor, Tensor]]):
    """Pictures and the targets of the anchors, read when they are needed.

    names: pairs of a year's folder and the name of a picture.
    flips: whether to flip pictures with probability 1/2, by torch's random numbers, as the originals do.
    """

    def __init__(self, names: list[tuple[Path, str]], size: int, flips: bool) -> None:
        self._names, self._size, self._flips = names, size, flips
        self.anchors = anchors_of(size)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        folder, name = self._names[i]
        pixels = torch.from_numpy(read_picture(folder / "JPEGImages" / f"{name}.jpg", (self._size, self._size)))
        x = pixels.float() - torch.tensor(MEANS)[:, None, None]
        classes, boxes = _objects(folder / "Annotations" / f"{name}.xml", self._size)
        if self._flips and bool(torch.rand(()) < 0.5):
            x, boxes = (
                x.flip(2),
                torch.stack([self._size - boxes[:, 2], boxes[:, 1], self._size - boxes[:, 0], boxes[:, 3]], dim=1),
            )
        truth = torch.zeros(MOST, 5)
        truth[: len(classes), 0], truth[: len(classes), 1:] = classes, boxes
        return x, torch.cat([self.anchors.matched(boxes, classes.long()).flatten(), truth.flatten()])


def _objects(file: Path, size: int) -> tuple[Tensor, Tensor]:
    """Return the classes and the corners of a picture's objects; the classes of difficult objects are negative.

    The picture is scaled to `size` x `size` pixels, and so are the corners.
    """
    try:
        root = ElementTree.fromstring(file.read_bytes())
        width, height = (float(root.findtext(f"size/{name}", "")) for name in ("width", "height"))
        classes, boxes = [], []
        for found in root.iter("object"):
            label = 1 + NAMES.index(found.findtext("name", "").strip())
            left, top, right, bottom = (
                float(found.findtext(f"bndbox/{name}", "")) for name in ("xmin", "ymin", "xmax", "ymax")
            )
            classes.append(-label if found.findtext("difficult", "0").strip() == "1" else label)
            # VOC counts pixels from 1, and a box includes its last pixel.
            boxes.append(((left - 1) / width, (top - 1) / height, right / width, bottom / height))
    except (ElementTree.ParseError, OSError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{file} is not an annotation of VOC ({error}). Remove its picture from ImageSets.") from None
    if len(classes) > MOST:
        raise ValueError(f"{file} has {len(classes)} objects. Expected: {MOST} at most.")
    return torch.tensor(classes, dtype=torch.float32), size * torch.tensor(boxes, dtype=torch.float32).view(-1, 4)


def voc(seed: int, path: str | os.PathLike[str], size: int = 300) -> Task:
    """Return PASCAL VOC with SSD in the size of its paper, trained on trainval of every year, tested on test.

    The weights are initially random, while the paper starts with VGG-16 trained on ImageNet. Pictures are flipped, but
    not cropped.

    seed: the seed of the weights, and of the order of the pictures.
    path: the folder "VOCdevkit", which contains VOC2007 and perhaps VOC2012; or the folder of one year.
    size: the input size of SSD, 300 or 512.
    Raises FileNotFoundError for a folder that is not VOC's, ValueError for another size and for damaged files.
    """
    if size not in GRIDS or isinstance(size, bool):
        raise ValueError(f"size={shown(size)} is not one of SSD. Expected: 300 or 512.")
    parts = {part: _names_of(Path(path), part) for part in ("trainval", "test")}
    train, test = Voc(parts["trainval"], size, True), Voc(parts["test"], size, False)
    model = seeded(seed, lambda: SSD(size))
    anchors = train.anchors
    batch = min(BATCH, len(train))
    loader: Any = DataLoader(train, batch, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(seed))
    metrics: dict[str, Any] = {
        "mean_average_precision": anchors.mean_average_precision,
        "voc07": anchors.voc07_average_precision,
    }
    goal = {"mean_average_precision": "maximize", "voc07": "maximize"}
    return Task("detection", model, loader, DataLoader(test, BATCH), anchors.loss, metrics, goal=goal)


def _names_of(path: Path, part: str) -> list[tuple[Path, str]]:
    """Return the pictures of a part, from every year that has this part."""
    years = sorted(path.glob("VOC[0-9][0-9][0-9][0-9]")) or [path]
    lists = [year / "ImageSets" / "Main" / f"{part}.txt" for year in years]
    names = [
        (file.parents[2], line.split()[0])
        for file in lists
        if file.is_file()
        for line in file.read_text().splitlines()
        if line.strip()
    ]
    if not names:
        raise FileNotFoundError(
            f"{shown(str(path))} has no {part}.txt in VOC2007/ImageSets/Main, or an empty one. Expected: VOC's "
            f"folders JPEGImages, Annotations and ImageSets; name VOCdevkit or the folder of a year: "
            f"'detection=VOCdevkit'."
        )
    return names
