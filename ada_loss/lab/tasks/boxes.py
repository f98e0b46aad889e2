"""Single-shot detection, Liu et al. 2016: targets of anchors, the loss, and mean average precision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["LARGEST_OVERLAP", "Anchors", "anchors_on", "corners", "iou", "predictions", "with_glorot_weights"]

# An anchor whose IoU with an object is at least this belongs to the object.
MATCHED = 0.5
NEGATIVES = 3  # the number of negative anchors for each positive anchor
VARIANCES = (0.1, 0.2)  # scales of offsets and of logarithms of extents, as in SSD
# The least score of a detection, and the largest IoU at which two detections count as different objects.
LEAST_SCORE, LARGEST_OVERLAP = 0.05, 0.45
RIGHT = 0.5  # the least IoU of a right box
LEVELS = 11  # the number of levels of recall in the metric of VOC 2007


def anchors_on(
    grid: int, step: float, extents: Iterable[tuple[float, float]]
) -> list[tuple[float, float, float, float]]:
    """Return the anchors of a grid as (centre x, centre y, width, height), in the order of `predictions`.

    Each cell of the grid has one anchor for each of the extents.
    """
    return [
        (step * (column + 0.5), step * (row + 0.5), width, height)
        for row in range(grid)
        for column in range(grid)
        for width, height in extents
    ]


def predictions(maps: Sequence[Tensor], classes: nn.ModuleList, boxes: nn.ModuleList, labels: int) -> Tensor:
    """Return a detector's outputs, (batch, anchors, labels + 4).

    Each feature map has two heads, one for the classes and one for the boxes.
    """
    logits, offsets = (
        [_by_anchor(head(x), numbers) for head, x in zip(heads, maps)]
        for heads, numbers in ((classes, labels), (boxes, 4))
    )
    return torch.cat([torch.cat(logits, dim=1), torch.cat(offsets, dim=1)], dim=2)


def _by_anchor(x: Tensor, numbers: int) -> Tensor:
    """Reshape (batch, anchors of a cell * numbers, height, width) to (batch, anchors, numbers)."""
    return x.permute(0, 2, 3, 1).reshape(len(x), -1, numbers)


def with_glorot_weights(model: nn.Module) -> None:
    """Initialise all convolutions as Glorot and Bengio 2010 do, with zero biases."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]


def corners(boxes: Tensor) -> Tensor:
    """Convert boxes (..., 4) from centre and extents to left, top, right and bottom."""
    return torch.cat([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], dim=-1)


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Return the intersections over unions, (m, n), of boxes (m, 4) and (n, 4), given by their corners.

    >>> iou(torch.tensor([[0.0, 0, 2, 2]]), torch.tensor([[0.0, 0, 2, 2], [1, 0, 3, 2], [5, 5, 6, 6]]))
    tensor([[1.0000, 0.3333, 0.0000]])
    """
    least, most = torch.maximum(a[:, None, :2], b[None, :, :2]), torch.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = (most - least).clamp(min=0).prod(dim=2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(dim=1) for boxes in (a, b)]
    return shared / (areas[0][:, None] + areas[1][None, :] - shared).clamp(min=1e-9)


class Anchors:
    """The anchors of a detector, with the targets, the loss and the metrics that they define.

    Outputs are (batch, anchors, classes + 4): logits and offsets. Targets are (batch, 5 * anchors + 5 * most): the
    class and the offsets that each anchor should predict, and the true classes and corners.

    boxes: (anchors, 4): centre, width and height in pixels, in the order of the network's outputs.
    classes: the number of classes, including the background, which is class 0.
    most: the largest number of objects in one image; the class of a missing object is 0.
    """

    def __init__(self, boxes: Tensor, classes: int, most: int) -> None:
        self.boxes, self.classes, self.most = boxes, classes, most

    def matched(self, boxes: Tensor, classes: Tensor) -> Tensor:
        """Return the targets of the anchors for one image, (anchors, 5): the class, and the offsets of the box.

        An anchor belongs to the object with which its IoU is largest, if this IoU is 0.5 or more, or if the anchor is
        the best anchor of the object.
        """
        anchors, there = self.boxes, classes > 0
        boxes, classes = boxes[there], classes[there]
        if not len(boxes):
            return torch.zeros(len(anchors), 5)
        overlaps = iou(corners(anchors), boxes)
        largest, owner = overlaps.max(dim=1)
        best = overlaps.argmax(dim=0)
        # Each object keeps its best anchor, even if the overlap is small: otherwise some objects would not be learnt at
        # all.
        owner[best], largest[best] = torch.arange(len(boxes)), 1.0
        own = boxes[owner]
        offsets = ((own[:, :2] + own[:, 2:]) / 2 - anchors[:, :2]) / anchors[:, 2:] / VARIANCES[0]
        extents = torch.log((own[:, 2:] - own[:, :2]) / anchors[:, 2:]) / VARIANCES[1]
        labels = torch.where(largest >= MATCHED, classes[owner], 0)
        return torch.cat([labels[:, None].float(), offsets, extents], dim=1)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return cross entropy of classes plus smooth L1 of boxes, divided by the number of positive anchors (eq. 1).

        Among an image's negative anchors, only those with the largest cross entropy count: at most three for each
        positive anchor of the image.
        """
        anchors = outputs.shape[1]
        targets = targets[:, : 5 * anchors].view(-1, anchors, 5)
        classes = targets[..., 0].long()
        positive = classes > 0
        each = F.cross_entropy(outputs[..., : self.classes].flatten(0, 1), classes.flatten(), reduction="none")
        each = each.view(-1, anchors)
        # The argsort of an argsort is the rank of each anchor. Positive anchors rank last, because they count anyway.
        hard = each.detach().masked_fill(positive, -torch.inf).argsort(dim=1, descending=True).argsort(dim=1)
        counts = positive | (hard < NEGATIVES * positive.sum(dim=1, keepdim=True))
        box = F.smooth_l1_loss(outputs[..., self.classes :], targets[..., 1:], reduction="none").sum(dim=2)
        return ((each * counts).sum() + (box * positive).sum()) / positive.sum().clamp(min=1)

    def mean_average_precision(self, outputs: Tensor, targets: Tensor) -> float:
        """Return the mean over the classes of the area under the precision-recall curve; a right box has an IoU >= 0.5.

        NaN outputs detect nothing.
        """
        curves = self._curves(outputs, targets)
        return sum(_area(*curve) for curve in curves) / len(curves)

    def voc07_average_precision(self, outputs: Tensor, targets: Tensor) -> float:
        """Return the mean average precision of VOC 2007, from the precisions at recalls of 0, 0.1, ... 1."""
        curves = self._curves(outputs, targets)
        return sum(_at_levels(*curve) for curve in curves) / len(curves)

    def _curves(self, outputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return recall and precision of each class, detection by detection."""
        outputs, targets = outputs.float().cpu(), targets.float().cpu()
        truths = targets[:, 5 * outputs.shape[1] :].view(len(targets), self.most, 5)
        scores = outputs[..., : self.classes].softmax(dim=2)
        anchors = self.boxes
        centres = anchors[:, :2] + VARIANCES[0] * outputs[..., self.classes : self.classes + 2] * anchors[:, 2:]
        # The outputs are clamped, because a network that diverges would predict boxes of infinite size.
        extents = anchors[:, 2:] * torch.exp((VARIANCES[1] * outputs[..., self.classes + 2 :]).clamp(max=8))
        boxes = corners(torch.cat([centres, extents], dim=2))
        return [_curve(scores[..., k], boxes, truths, k) for k in range(1, self.classes)]


def _curve(scores: Tensor, boxes: Tensor, truths: Tensor, label: int) -> tuple[Tensor, Tensor]:
    """Return recall and precision of one class after each detected box that is no duplicate, in the order of scores.

    A true object with the class -label is a difficult object: detecting it counts neither as right nor as wrong.
    """
    detections: list[tuple[float, bool]] = []
    total = int((truths[..., 0] == label).sum())
    for score, box, truth in zip(scores, boxes, truths):
        # Comparisons with NaN are false, so an anchor with NaN detects nothing.
        chosen = (score > LEAST_SCORE).nonzero().flatten()
        order = chosen[score[chosen].argsort(descending=True)]
        own = truth[truth[:, 0].abs() == label]
        doubles, rights = iou(box[order], box[order]), iou(box[order], own[:, 1:])
        kept: list[int] = []
        free = torch.ones(len(own), dtype=torch.bool)
        for i in range(len(order)):
            if kept and float(doubles[i, kept].max()) > LARGEST_OVERLAP:
                continue
            kept.append(i)
            is_right = False
            if len(own):
                best = int(rights[i].argmax())
                if rights[i, best] >= RIGHT and own[best, 0] < 0:
                    continue
                is_right = bool(rights[i, best] >= RIGHT and free[best])
                free[best] &= not is_right
            detections.append((float(score[order[i]]), is_right))
    if not total or not detections:
        return torch.zeros(0), torch.zeros(0)
    detections.sort(key=lambda one: -one[0])
    right = torch.tensor([float(is_right) for _, is_right in detections]).cumsum(dim=0)
    precision = right / torch.arange(1, len(detections) + 1)
    # VOC interpolates: the precision at a recall is the largest precision at this or any larger recall.
    precision = precision.flip(0).cummax(dim=0).values.flip(0)
    return right / total, precision


def _area(recall: Tensor, precision: Tensor) -> float:
    return float((torch.cat([torch.zeros(1), recall]).diff() * precision).sum())


def _at_levels(recall: Tensor, precision: Tensor) -> float:
    """Return the mean precision at the levels of recall; the precision is 0 at levels that are not reached."""
    # Each level is lowered slightly, because recalls are rounded: 3 of 10 objects must reach the recall 0.3.
    steps = [level / (LEVELS - 1) - 1e-6 for level in range(LEVELS)]
    return (
        sum(float(precision[recall >= step].max()) if bool((recall >= step).any()) else 0.0 for step in steps) / LEVELS
    )
