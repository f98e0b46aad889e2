"""Detect objects: in drawn scenes with a small single-shot detector, in VOC's pictures with SSD in its paper's size."""

from __future__ import annotations

import os
from functools import lru_cache

import torch
from torch import Tensor, nn

from ada_loss.lab.tasks.boxes import Anchors, anchors_on, predictions, with_glorot_weights
from ada_loss.lab.tasks.scenes import MOST_SHAPES, SHAPES, SIDE, drawn_scenes
from ada_loss.lab.tasks.task import Task, made_of, seeded, settled_by, trained_with
from ada_loss.lab.tasks.voc import voc

__all__ = ["detection"]

TRAINED, TESTED = 1024, 256  # numbers of scenes
CLASSES = len(SHAPES) + 1  # class 0 is the background
# Widths and heights of the anchors in each cell, by the number of cells along the grid's side.
ANCHORS = {8: ((8, 8), (12, 12)), 4: ((17, 11), (11, 17), (16, 16))}


class SmallSSD(nn.Module):
    """A small SSD (Liu et al. 2016) with two scales; like the original, it has no normalisation.

    (batch, 3, 32, 32) -> (batch, anchors, classes + 4): the logits of each anchor, and the offsets of its box.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(2 * width, 4 * width, 3, padding=1), nn.ReLU()),
        )
        self.extra = nn.Sequential(nn.Conv2d(4 * width, 4 * width, 3, stride=2, padding=1), nn.ReLU())
        counts = [len(anchors) for anchors in ANCHORS.values()]
        self.classes = nn.ModuleList(nn.Conv2d(4 * width, n * CLASSES, 3, padding=1) for n in counts)
        self.boxes = nn.ModuleList(nn.Conv2d(4 * width, n * 4, 3, padding=1) for n in counts)
        # With torch's default initial weights the training would take 1.7 times as long.
        with_glorot_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.body(x)
        return predictions((fine, self.extra(fine)), self.classes, self.boxes, CLASSES)


@lru_cache(maxsize=1)
def scene_anchors() -> Anchors:
    """Return the anchors for drawn scenes."""
    anchors = [anchor for grid, extents in ANCHORS.items() for anchor in anchors_on(grid, SIDE / grid, extents)]
    return Anchors(torch.tensor(anchors), CLASSES, MOST_SHAPES)


def _with_targets(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images and their targets: the targets of the anchors, followed by the true classes and boxes."""
    scenes = drawn_scenes(count, seed)
    # The loss needs the targets of anchors, and the metrics need the true boxes. A batch has one tensor for both.
    truths = torch.cat([scenes.classes[..., None].float(), scenes.boxes], dim=2)
    targets = torch.stack(
        [scene_anchors().matched(boxes, classes) for boxes, classes in zip(scenes.boxes, scenes.classes)]
    )
    return scenes.images, torch.cat([targets.flatten(1), truths.flatten(1)], dim=1)


@settled_by(size=int)
@made_of("path")
@trained_with(optimizer="sgd", learning_rate=0.01, epochs=8, batch_size=32, warmup=32, weight_decay=5e-4)
def detection(seed: int = 0, path: str | os.PathLike[str] | None = None, size: int = 300) -> Task:
    """Detect the shapes of 1,024 drawn scenes with a small SSD; the metric is mean average precision on 256 others.

    The loss is the sum of a loss of the classes and a loss of the boxes, and the network has four heads. Gradients of
    different sizes therefore meet in one network.

    Args:
        seed: the seed of the weights.
        path: the folder of PASCAL VOC, for SSD300 or SSD512 in the size of the paper. In a sweep:
            "detection=VOCdevkit,size=512".
        size: the input size of SSD: 300 or 512.

    >>> task = detection()
    >>> task.model(task.train[0][:2]).shape
    torch.Size([2, 176, 8])
    """
    if path is not None:
        return voc(seed, path, size)
    model = seeded(seed, SmallSSD)
    anchors, data = scene_anchors(), (_with_targets(TRAINED, 0), _with_targets(TESTED, 1))
    return Task("detection", model, *data, anchors.loss, {"mean_average_precision": anchors.mean_average_precision})
