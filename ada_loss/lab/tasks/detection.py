"""The boxes of drawn scenes, by a small single-shot detector."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ada_loss.lab.tasks.scenes import MOST_SHAPES, SHAPES, SIDE, drawn_scenes
from ada_loss.lab.tasks.task import Task, trained_with

__all__ = ["detection"]

TRAINED, TESTED = 1024, 256  # scenes
CLASSES = len(SHAPES) + 1  # 0 is the background
ANCHORS = {8: ((8, 8), (12, 12)), 4: ((17, 11), (11, 17), (16, 16))}  # of each cell of a grid: widths, heights
MATCHED = 0.5  # IoU from which on an anchor is a shape's
NEGATIVES = 3  # for each positive
VARIANCES = (0.1, 0.2)  # of offsets and of logarithms of extents, as in SSD
LEAST_SCORE, LARGEST_OVERLAP = 0.05, 0.45  # of what is found, and of two that are not the same
RIGHT = 0.5  # IoU from which on a box is right


class SmallSSD(nn.Module):
    """Liu et al. 2016, at two scales, without normalisation as there.

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
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):  # torch's own initial weights would take 1.7 times as long
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        fine = self.body(x)
        maps = (fine, self.extra(fine))
        logits = [_by_anchor(head(y), CLASSES) for head, y in zip(self.classes, maps)]
        offsets = [_by_anchor(head(y), 4) for head, y in zip(self.boxes, maps)]
        return torch.cat([torch.cat(logits, dim=1), torch.cat(offsets, dim=1)], dim=2)


def _by_anchor(x: Tensor, numbers: int) -> Tensor:
    """(batch, anchors of a cell * numbers, height, width) -> (batch, anchors, numbers)."""
    return x.permute(0, 2, 3, 1).reshape(len(x), -1, numbers)


@lru_cache(maxsize=1)
def _anchors() -> Tensor:
    """(anchors, 4): centre, width and height in pixels, in the order of the network's outputs."""
    anchors = []
    for grid, extents in ANCHORS.items():
        step = SIDE / grid
        anchors += [
            (step * (column + 0.5), step * (row + 0.5), width, height)
            for row in range(grid)
            for column in range(grid)
            for width, height in extents
        ]
    return torch.tensor(anchors)


def _corners(boxes: Tensor) -> Tensor:
    """Boxes (..., 4) by centre and extents -> by left, top, right and bottom."""
    return torch.cat([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], dim=-1)


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of boxes by their corners, (m, 4) and (n, 4) -> (m, n).

    >>> iou(torch.tensor([[0.0, 0, 2, 2]]), torch.tensor([[0.0, 0, 2, 2], [1, 0, 3, 2], [5, 5, 6, 6]]))
    tensor([[1.0000, 0.3333, 0.0000]])
    """
    least, most = torch.maximum(a[:, None, :2], b[None, :, :2]), torch.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = (most - least).clamp(min=0).prod(dim=2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(dim=1) for boxes in (a, b)]
    return shared / (areas[0][:, None] + areas[1][None, :] - shared).clamp(min=1e-9)


def matched(boxes: Tensor, classes: Tensor) -> Tensor:
    """What the anchors are to say of a scene, (anchors, 5): the class, and the offsets of the box.

    An anchor is the shape's with which its IoU is largest, if it is 0.5 or more, or if it is that shape's best one.
    """
    anchors, there = _anchors(), classes > 0
    boxes, classes = boxes[there], classes[there]
    overlaps = iou(_corners(anchors), boxes)
    largest, owner = overlaps.max(dim=1)
    best = overlaps.argmax(dim=0)
    owner[best], largest[best] = torch.arange(len(boxes)), 1.0
    own = boxes[owner]
    offsets = ((own[:, :2] + own[:, 2:]) / 2 - anchors[:, :2]) / anchors[:, 2:] / VARIANCES[0]
    extents = torch.log((own[:, 2:] - own[:, :2]) / anchors[:, 2:]) / VARIANCES[1]
    labels = torch.where(largest >= MATCHED, classes[owner], 0)
    return torch.cat([labels[:, None].float(), offsets, extents], dim=1)


def multibox_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of the classes and smooth L1 of the boxes, over the number of positive anchors (Liu et al., eq. 1).

    Of the negative anchors of a scene three times as many as it has positive ones count: the worst.
    """
    anchors = outputs.shape[1]
    targets = targets[:, : 5 * anchors].view(-1, anchors, 5)
    classes = targets[..., 0].long()
    positive = classes > 0
    each = F.cross_entropy(outputs[..., :CLASSES].flatten(0, 1), classes.flatten(), reduction="none")
    each = each.view(-1, anchors)
    hard = each.detach().masked_fill(positive, -torch.inf).argsort(dim=1, descending=True).argsort(dim=1)
    counts = positive | (hard < NEGATIVES * positive.sum(dim=1, keepdim=True))
    box = F.smooth_l1_loss(outputs[..., CLASSES:], targets[..., 1:], reduction="none").sum(dim=2)
    return ((each * counts).sum() + (box * positive).sum()) / positive.sum().clamp(min=1)


def mean_average_precision(outputs: Tensor, targets: Tensor) -> float:
    """Mean over the classes of the area under precision by recall, where a box is right from an IoU of 0.5 on.

    NaN outputs find nothing.
    """
    outputs, targets = outputs.float().cpu(), targets.float().cpu()
    truths = targets[:, 5 * outputs.shape[1] :].view(len(targets), MOST_SHAPES, 5)
    scores = outputs[..., :CLASSES].softmax(dim=2)
    anchors = _anchors()
    centres = anchors[:, :2] + VARIANCES[0] * outputs[..., CLASSES : CLASSES + 2] * anchors[:, 2:]
    extents = anchors[:, 2:] * torch.exp((VARIANCES[1] * outputs[..., CLASSES + 2 :]).clamp(max=8))
    boxes = _corners(torch.cat([centres, extents], dim=2))
    return sum(_average_precision(scores[..., k], boxes, truths, k) for k in range(1, CLASSES)) / len(SHAPES)


def _average_precision(scores: Tensor, boxes: Tensor, truths: Tensor, label: int) -> float:
    """The area of one class, with every found box that is not a double, in the order of their scores."""
    detections: list[tuple[float, bool]] = []
    total = int((truths[..., 0] == label).sum())
    for score, box, truth in zip(scores, boxes, truths):
        chosen = (score > LEAST_SCORE).nonzero().flatten()  # NaN is not
        order = chosen[score[chosen].argsort(descending=True)]
        own = truth[truth[:, 0] == label, 1:]
        doubles, rights = iou(box[order], box[order]), iou(box[order], own)
        kept: list[int] = []
        free = torch.ones(len(own), dtype=torch.bool)
        for i in range(len(order)):
            if kept and float(doubles[i, kept].max()) > LARGEST_OVERLAP:
                continue
            kept.append(i)
            is_right = False
            if len(own):
                best = int(rights[i].argmax())
                is_right = bool(rights[i, best] >= RIGHT and free[best])
                free[best] &= not is_right
            detections.append((float(score[order[i]]), is_right))
    if not total or not detections:
        return 0.0
    detections.sort(key=lambda one: -one[0])
    right = torch.tensor([float(is_right) for _, is_right in detections]).cumsum(dim=0)
    precision = right / torch.arange(1, len(detections) + 1)
    precision = precision.flip(0).cummax(dim=0).values.flip(0)  # the largest at this recall or a larger one
    recall = torch.cat([torch.zeros(1), right / total])
    return float((recall.diff() * precision).sum())


def _with_targets(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images, and for each what its anchors are to say, with the true classes and boxes behind it."""
    scenes = drawn_scenes(count, seed)
    truths = torch.cat([scenes.classes[..., None].float(), scenes.boxes], dim=2)
    targets = torch.stack([matched(boxes, classes) for boxes, classes in zip(scenes.boxes, scenes.classes)])
    return scenes.images, torch.cat([targets.flatten(1), truths.flatten(1)], dim=1)


@trained_with(optimizer="sgd", learning_rate=0.01, epochs=8, batch_size=32, warmup=32, weight_decay=5e-4)
def detection(seed: int = 0) -> Task:
    """The boxes of 1,024 drawn scenes, by a small SSD, tested on 256 others; judged by mean average precision.

    Its loss is the sum of two, of the classes and of the boxes, and it has four heads: gradients of unlike size meet
    in one network.

    >>> task = detection()
    >>> task.model(task.train[0][:2]).shape
    torch.Size([2, 176, 8])
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SmallSSD()
    data = _with_targets(TRAINED, 0), _with_targets(TESTED, 1)
    return Task("detection", model, *data, multibox_loss, {"mean_average_precision": mean_average_precision})
