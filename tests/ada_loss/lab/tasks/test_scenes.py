"""Drawn scenes, and the two tasks that are made of them: what they hold, and that their parts do what papers say."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import fpsim
from ada_loss.lab.tasks import detection, segmentation
from ada_loss.lab.tasks.boxes import corners, iou
from ada_loss.lab.tasks.detection import scene_anchors
from ada_loss.lab.tasks.scenes import SHAPES, drawn_scenes
from ada_loss.lab.tasks.segmentation import mean_iou
from ada_loss.lab.training.loop import train

ANCHORS = scene_anchors()
matched, mean_average_precision, multibox_loss = ANCHORS.matched, ANCHORS.mean_average_precision, ANCHORS.loss


def test_a_box_is_the_smallest_around_its_pixels_and_shapes_do_not_overlap() -> None:
    scenes = drawn_scenes(60, seed=5)
    counts = (scenes.classes > 0).sum(dim=1)
    assert set(counts.tolist()) == {1, 2, 3}
    for pixels, boxes, classes in zip(scenes.pixels.numpy(), scenes.boxes.numpy(), scenes.classes.numpy()):
        known = np.zeros(pixels.shape, bool)
        for box, label in zip(boxes[classes > 0].astype(int), classes[classes > 0]):
            left, top, right, bottom = box
            inner = pixels[top:bottom, left:right]
            assert set(np.unique(inner)) <= {0, label}  # nobody else is in its box
            rows, columns = np.nonzero(inner)
            # a pixel belongs to a shape that covers its centre: the tip of a triangle, 18 high and 8 wide, has none
            assert rows.min() <= 2
            assert columns.min() <= 1
            assert rows.max() >= bottom - top - 2
            assert columns.max() >= right - left - 2
            share = (inner == label).mean()
            expected = {"ellipse": np.pi / 4, "rectangle": 1.0, "triangle": 0.5}[SHAPES[label - 1]]
            assert share == pytest.approx(expected, abs=1 / (right - left))  # each row is within a pixel of its length
            known[top:bottom, left:right] = True
        assert not pixels[~known].any()


def test_scenes_are_those_of_their_seed() -> None:
    first = drawn_scenes(3, seed=7)
    drawn_scenes.cache_clear()
    again, other = drawn_scenes(3, seed=7), drawn_scenes(3, seed=8)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not torch.equal(first.images, other.images)


def test_the_iou_of_boxes_is_that_of_counted_cells() -> None:
    boxes = [(x, y, x + w, y + h) for x, y, w, h in itertools.product((0, 2), (0, 3), (1, 4), (2, 3))]
    cells = [{(i, j) for i in range(a, c) for j in range(b, d)} for a, b, c, d in boxes]
    counted = [[len(one & two) / len(one | two) for two in cells] for one in cells]
    assert torch.allclose(iou(torch.tensor(boxes).float(), torch.tensor(boxes).float()), torch.tensor(counted))


def test_every_shape_is_some_anchors_and_an_anchor_is_the_shape_it_covers_most() -> None:
    scenes = drawn_scenes(40, seed=3)
    for boxes, classes in zip(scenes.boxes, scenes.classes):
        found, there = matched(boxes, classes), classes > 0
        overlaps = iou(corners(ANCHORS.boxes), boxes[there])
        own = classes[there]
        assert set(found[:, 0].tolist()) == {0.0, *own.float().tolist()}
        for k in range(len(own)):
            assert found[overlaps[:, k].argmax(), 0] == own[k]
        clear = (overlaps.max(dim=1).values < 0.5).nonzero().flatten().tolist()
        best = set(overlaps.argmax(dim=0).tolist())
        assert all(found[i, 0] == 0 for i in clear if i not in best)


def perfect(targets: torch.Tensor, scale: float = 20.0) -> torch.Tensor:
    """Outputs that say what the targets want."""
    wanted = targets[:, : 5 * len(ANCHORS.boxes)].view(len(targets), -1, 5)
    return torch.cat([scale * torch.nn.functional.one_hot(wanted[..., 0].long(), 4), wanted[..., 1:]], dim=2)


def test_perfect_outputs_have_no_loss_and_find_every_box_and_others_find_fewer() -> None:
    targets = detection().test[1][:60]
    outputs = perfect(targets)
    assert multibox_loss(outputs, targets) < 1e-6
    assert mean_average_precision(outputs, targets) == pytest.approx(1.0)
    silent = outputs.clone()
    silent[len(silent) // 2 :, :, 0] += 100  # of half the scenes nothing is found
    labels = targets[:, -15::5]
    share = [float((labels[: len(labels) // 2] == k).sum() / (labels == k).sum()) for k in (1, 2, 3)]
    assert mean_average_precision(silent, targets) == pytest.approx(sum(share) / 3)
    moved = outputs.clone()
    moved[..., 4] += 100.0  # ten widths of an anchor to the right
    assert mean_average_precision(moved, targets) == 0
    assert mean_average_precision(outputs * torch.nan, targets) == 0


def test_a_wrong_box_that_is_surer_costs_precision_and_a_double_does_too() -> None:
    truth = torch.zeros(1, 15)
    truth[0, :5] = torch.tensor([1.0, 2, 2, 10, 10])
    anchors = len(ANCHORS.boxes)
    targets = torch.cat([torch.zeros(1, 5 * anchors), truth], dim=1)
    outputs = torch.zeros(1, anchors, 8)
    outputs[..., 0] = 50.0
    at = {name: int((ANCHORS.boxes == torch.tensor(box)).all(dim=1).nonzero()) for name, box in BOXES.items()}
    outputs[0, at["right"], 1] = 55.0
    assert mean_average_precision(outputs, targets) == pytest.approx(1 / 3, abs=1e-5)  # one class of three is there
    outputs[0, at["wrong"], 1] = 60.0
    assert mean_average_precision(outputs, targets) == pytest.approx(1 / 6, abs=1e-5)


# two anchors: that around (6, 6) is the truth's box, the other is far from it
BOXES = {"right": (6.0, 6.0, 8.0, 8.0), "wrong": (26.0, 26.0, 8.0, 8.0)}


def test_the_loss_counts_three_negatives_for_each_positive_the_worst_ones() -> None:
    anchors = len(ANCHORS.boxes)
    targets = torch.zeros(1, 5 * anchors + 15)
    targets[0, 0] = 2.0  # one positive anchor, of class 2, without an offset
    outputs = torch.zeros(1, anchors, 8)
    outputs[0, 5:9, 3] = torch.tensor([5.0, 4.0, 3.0, 2.0])  # the surest wrong ones
    each = torch.nn.functional.cross_entropy(outputs[0, [0, 5, 6, 7], :4], torch.tensor([2, 0, 0, 0]), reduction="sum")
    assert multibox_loss(outputs, targets).item() == pytest.approx(each.item())
    outputs[0, 0, 4:] = torch.tensor([0.5, -2.0, 0.0, 0.0])  # smooth L1: 0.125 and 1.5
    assert multibox_loss(outputs, targets).item() == pytest.approx(each.item() + 1.625)


def test_the_mean_iou_is_that_of_counted_pixels() -> None:
    targets = torch.tensor([[[0, 1], [2, 3]], [[0, 0], [1, 1]]])
    outputs = 9.0 * torch.nn.functional.one_hot(torch.tensor([[[0, 1], [2, 2]], [[0, 1], [1, 1]]]), 4)
    outputs = outputs.permute(0, 3, 1, 2).clone()
    assert mean_iou(outputs, targets) == pytest.approx((2 / 3 + 3 / 4 + 1 / 2 + 0) / 4)
    outputs[0, 2, 0, 0] = torch.nan  # a right pixel of class 0 becomes nobody's
    assert mean_iou(outputs, targets) == pytest.approx((1 / 3 + 3 / 4 + 1 / 2 + 0) / 4)


@pytest.mark.full
def test_scenes_are_learned_in_a_few_steps() -> None:
    run = train(detection(), steps=60, learning_rate=0.01, batch_size=32, warmup=10)
    assert run.losses[-1] < run.losses[0] / 2
    run = train(segmentation(), steps=60, optimizer="adam", learning_rate=0.01, batch_size=16, warmup=10)
    assert run.metrics["mean_iou"] > 0.3  # all background is 0.2


@pytest.mark.parametrize("task", [detection, segmentation])
def test_their_models_run_in_every_role_of_a_small_format(task: object) -> None:
    made = task()  # type: ignore[operator]
    model = fpsim.quantize(made.model, "fp16")
    x, y = made.train[0][:4], made.train[1][:4]
    loss = made.loss(model(x), y)
    loss.backward()
    assert loss.item() == pytest.approx(made.loss(made.model(x), y).item(), rel=0.01)  # 4 roundings of 2**-11 a layer
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
