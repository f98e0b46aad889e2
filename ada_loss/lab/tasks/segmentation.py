"""Predict the class of each pixel: of drawn scenes with a small SegNet, of CamVid's pictures with SegNet-Basic."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ada_loss.lab.tasks.camvid import camvid
from ada_loss.lab.tasks.scenes import SHAPES, drawn_scenes
from ada_loss.lab.tasks.task import Task, made_of, seeded, trained_with

__all__ = ["segmentation"]

TRAINED, TESTED = 768, 256  # numbers of scenes
CLASSES = len(SHAPES) + 1
# The weight of the background's pixels. For each pixel of a shape, there are three or four pixels of the background.
BACKGROUND = 0.3


class SmallSegNet(nn.Module):
    """SegNet (Badrinarayanan et al. 2017), with three levels: the decoder unpools to the positions of the maxima.

    (batch, 3, 32, 32) -> (batch, classes, 32, 32) logits.
    """

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width)
        self.encoder = nn.ModuleList(_block(a, b) for a, b in zip((3, *widths), widths))
        self.decoder = nn.ModuleList(_block(a, b) for a, b in zip(widths[::-1], (*widths[-2::-1], width)))
        self.head = nn.Conv2d(width, CLASSES, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        places = []
        for block in self.encoder:
            x, place = F.max_pool2d(block(x), 2, return_indices=True)
            places.append(place)
        for block, place in zip(self.decoder, reversed(places)):
            x = block(F.max_unpool2d(x, place, [2, 2]))
        return self.head(x)  # type: ignore[no-any-return]


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


def balanced_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over the pixels. As in SegNet's class balancing, the background weighs less."""
    weight = torch.ones(CLASSES, device=outputs.device, dtype=outputs.dtype)
    weight[0] = BACKGROUND
    return F.cross_entropy(outputs, targets, weight)


def mean_iou(outputs: Tensor, targets: Tensor) -> float:
    """Return the mean intersection over union of the classes that occur among the predicted or the true pixels.

    A pixel with NaN outputs has no predicted class. Pixels with targets below 0 do not count.
    """
    predicted = torch.where(outputs.isnan().any(dim=1), -1, outputs.argmax(dim=1))
    predicted = torch.where(targets < 0, -1, predicted)
    shares = []
    for k in range(outputs.shape[1]):
        union = int(((predicted == k) | (targets == k)).sum())
        # A class that occurs in neither would be 0 / 0. The mean leaves it out.
        if union:
            shares.append(int(((predicted == k) & (targets == k)).sum()) / union)
    return sum(shares) / max(len(shares), 1)


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the share of the labelled pixels whose class is right; a pixel with NaN outputs is wrong."""
    right = (outputs.argmax(dim=1) == targets) & ~outputs.isnan().any(dim=1)
    return float(right.sum() / (targets >= 0).sum().clamp(min=1))


METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {"mean_iou": mean_iou, "accuracy": accuracy}


@made_of("path")
@trained_with(optimizer="adam", learning_rate=0.01, warmup=30, epochs=6, batch_size=16)
def segmentation(seed: int = 0, path: str | os.PathLike[str] | None = None) -> Task:
    """Classify the pixels of 768 drawn scenes with a small SegNet; the metric is the mean IoU on 256 others.

    The loss is the mean over all pixels of a batch, as SegNet's is. The gradient of each pixel is therefore divided by
    about 10,000, and small formats lose it without scaling.

    Args:
        seed: the seed of the weights.
        path: the folder of CamVid, for SegNet-Basic in the size of its paper. In a sweep: "segmentation=CamVid".

    >>> task = segmentation()
    >>> task.model(task.train[0][:2]).shape, task.train[1][:2].shape
    (torch.Size([2, 4, 32, 32]), torch.Size([2, 32, 32]))
    """
    if path is not None:
        return camvid(seed, path, METRICS)
    train, test = drawn_scenes(TRAINED, 0), drawn_scenes(TESTED, 1)
    data = (train.images, train.pixels), (test.images, test.pixels)
    return Task("segmentation", seeded(seed, SmallSegNet), *data, balanced_cross_entropy, METRICS)
