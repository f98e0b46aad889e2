"""SSD on VOC's layout and SegNet-Basic on CamVid's: networks of their papers' sizes, and folders that are made here."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import fpsim
from ada_loss import AdaLossScaled
from ada_loss.lab.tasks import find_task
from ada_loss.lab.tasks.boxes import Anchors, corners
from ada_loss.lab.tasks.camvid import SegNetBasic, _median_frequencies
from ada_loss.lab.tasks.segmentation import accuracy, mean_iou
from ada_loss.lab.tasks.voc import NAMES, SSD, Voc, anchors_of
from ada_loss.lab.training.loop import train

OBJECT = "<object><name>{}</name><difficult>{}</difficult><bndbox>{}</bndbox></object>"


def annotation(width: int, height: int, *objects: tuple[str, int, tuple[int, int, int, int]]) -> str:
    inner = "".join(
        OBJECT.format(
            name, difficult, "".join(f"<{n}>{v}</{n}>" for n, v in zip(("xmin", "ymin", "xmax", "ymax"), box))
        )
        for name, difficult, box in objects
    )
    size = f"<size><width>{width}</width><height>{height}</height></size>"
    return f"<annotation>{size}{inner}</annotation>"


@pytest.fixture
def devkit(tmp_path: Path) -> Path:
    """Two years of VOC with a few pictures of 100 x 50 pixels, in which a cat is red and a dog blue."""
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for year, part, names in (
        ("VOC2007", "trainval", ("000001", "000002")),
        ("VOC2007", "test", ("000003",)),
        ("VOC2012", "trainval", ("2012_000001",)),
    ):
        folder = tmp_path / "VOCdevkit" / year
        for inner in ("JPEGImages", "Annotations", "ImageSets/Main"):
            (folder / inner).mkdir(parents=True, exist_ok=True)
        (folder / "ImageSets" / "Main" / f"{part}.txt").write_text("".join(f"{name}\n" for name in names))
        for name in names:
            pixels = rng.integers(0, 60, (50, 100, 3)).astype(np.uint8)
            pixels[10:40, 0:50, 0] = 250
            pixels[20:50, 60:100, 2] = 250
            image.fromarray(pixels).save(folder / "JPEGImages" / f"{name}.jpg", quality=95)
            cat, dog = ("cat", 0, (1, 11, 50, 40)), ("dog", 1, (61, 21, 100, 50))
            (folder / "Annotations" / f"{name}.xml").write_text(annotation(100, 50, cat, dog))
    return tmp_path / "VOCdevkit"


def test_ssd_and_segnet_basic_have_the_parameters_and_anchors_of_their_papers() -> None:
    # 26,285,486: SSD300 for VOC in ssd.pytorch and others. 8,732 and 24,564 boxes: Liu et al. 2016, table 7 and 3.5
    with torch.device("meta"):
        networks = [SSD(300), SSD(512), SegNetBasic()]
    counts = [sum(p.numel() for p in network.parameters()) for network in networks]
    assert counts[0] == 26_285_486
    # one more pair of convolutions behind, and heads with 6 boxes for 4 at conv10
    pair = (256 * 128 + 128) + (128 * 256 * 16 + 256)
    heads = (256 * 9 * 4 * 25 + 4 * 25) + (256 * 9 * 2 * 25 + 2 * 25)
    assert counts[1] == counts[0] + pair + heads
    # eight convolutions of 7 x 7, their normalisations, and a classifier
    assert counts[2] == 49 * 64 * (3 + 7 * 64) + 8 * 2 * 64 + 64 * 11 + 11
    assert [len(anchors_of(size).boxes) for size in (300, 512)] == [8732, 24564]
    first, last = anchors_of(300).boxes[[0, -1]]
    assert first.tolist() == [4.0, 4.0, 30.0, 30.0]
    assert last.tolist() == pytest.approx([150.0, 150.0, 264 / math.sqrt(2), 264 * math.sqrt(2)])


def test_a_picture_of_voc_has_its_boxes_in_its_new_size_and_difficult_objects_train_nothing(devkit: Path) -> None:
    made = Voc([(devkit / "VOC2007", "000001")], 300, flips=False)
    x, y = made[0]
    anchors = len(made.anchors.boxes)
    truth = y[5 * anchors :].view(-1, 5)
    cat, dog = NAMES.index("cat") + 1, NAMES.index("dog") + 1
    torch.testing.assert_close(truth[0], torch.tensor([cat, 0.0, 60, 150, 240]))
    torch.testing.assert_close(truth[1], torch.tensor([-dog, 180.0, 120, 300, 300]))
    assert not truth[2:].any()
    wanted = y[: 5 * anchors].view(-1, 5)
    assert set(wanted[:, 0].tolist()) == {0.0, float(cat)}
    red = x[0] + 123.0
    assert red[70:230, 10:140].mean() > 240  # red, green and blue without VGG's means
    assert (x[2] + 104.0)[140:290, 190:290].mean() > 240


def test_a_flipped_picture_has_its_boxes_flipped(devkit: Path) -> None:
    plain, flipping = (Voc([(devkit / "VOC2007", "000001")], 300, flips=flips) for flips in (False, True))
    x, y = plain[0]
    torch.manual_seed(0)
    drawn = [flipping[0] for _ in range(12)]
    flipped = [i for i, (a, _) in enumerate(drawn) if torch.equal(a, x.flip(2))]
    assert 0 < len(flipped) < 12
    assert all(torch.equal(a, x) for i, (a, _) in enumerate(drawn) if i not in flipped)
    truth = drawn[flipped[0]][1][5 * 8732 :].view(-1, 5)
    torch.testing.assert_close(truth[0, 1:], torch.tensor([150.0, 60, 300, 240]))
    assert torch.equal(drawn[flipped[0]][1][5 * 8732 :].view(-1, 5)[:, 0], y[5 * 8732 :].view(-1, 5)[:, 0])


def test_trainval_of_every_year_is_trained_and_test_is_tested(devkit: Path) -> None:
    task = find_task(f"detection={devkit}")(0)
    ((x, y),) = list(task.train)
    assert x.shape == (3, 3, 300, 300)  # two of 2007 and one of 2012
    assert y.shape == (3, 5 * 8732 + 5 * 64)
    assert [len(a) for a, _ in task.test] == [1]
    assert task.goals == {"mean_average_precision": "maximize", "voc07": "maximize"}
    one_year = find_task(f"detection={devkit / 'VOC2007'},size=512")(0)
    assert next(iter(one_year.train))[0].shape == (2, 3, 512, 512)
    (devkit / "VOC2007" / "ImageSets" / "Main" / "test.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no test\.txt in VOC2007/ImageSets/Main.*'detection=VOCdevkit'"):
        find_task(f"detection={devkit}")(0)
    with pytest.raises(ValueError, match=r"size=400 is not one of SSD\. Expected: 300 or 512"):
        find_task(f"detection={devkit},size=400")(0)


@pytest.mark.parametrize("content", ["", "<annotation></annotation>", annotation(9, 9, ("unicorn", 0, (1, 1, 2, 2)))])
def test_an_annotation_that_is_damaged_is_named(content: str, devkit: Path) -> None:
    (devkit / "VOC2007" / "Annotations" / "000001.xml").write_text(content)
    made = Voc([(devkit / "VOC2007", "000001")], 300, flips=False)
    with pytest.raises(ValueError, match=r"000001\.xml is not an annotation of VOC .*Remove its picture"):
        made[0]


def test_difficult_objects_count_for_nothing_and_voc07_is_the_mean_at_eleven_recalls() -> None:
    boxes = torch.tensor([[10.0 * i + 5, 5.0, 8.0, 8.0] for i in range(4)])
    anchors = Anchors(boxes, 2, 3)
    truth = torch.zeros(1, 3, 5)
    truth[0, :, 1:] = corners(boxes[:3])
    truth[0, :, 0] = torch.tensor([1.0, -1.0, 1.0])
    targets = torch.cat([torch.zeros(1, 20), truth.flatten(1)], dim=1)
    outputs = torch.zeros(1, 4, 6)
    outputs[0, :, 0] = 5.0
    outputs[0, :, 1] = torch.tensor([9.0, 10.0, 0.0, 8.0])  # the difficult one first, a right one, a wrong one
    # precision 1 as far as recall 1/2, 0 beyond: six of eleven levels, 0 to 0.5
    assert anchors.mean_average_precision(outputs, targets) == pytest.approx(0.5)
    assert anchors.voc07_average_precision(outputs, targets) == pytest.approx(6 / 11)
    outputs[0, 2, 1] = 7.0  # the other right one after the wrong one: precision 2/3 from there on
    assert anchors.mean_average_precision(outputs, targets) == pytest.approx(0.5 + 0.5 * 2 / 3)
    assert anchors.voc07_average_precision(outputs, targets) == pytest.approx((6 + 5 * 2 / 3) / 11)


@pytest.mark.full
def test_ssd300_takes_a_step_with_a_scale_for_each_layer(devkit: Path) -> None:
    task = find_task(f"detection={devkit}")(0)
    x, y = next(iter(task.train))
    model = fpsim.quantize(task.model, "fp16")
    with AdaLossScaled(model) as scaled:
        loss = task.loss(model(x[:1]), y[:1])
        loss.backward()
        scales = scaled.log2_scales()
    assert loss.isfinite()
    assert len({site for site in scales if "conv2d" in site}) == 15 + 8 + 12  # of VGG, behind it, and heads
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.fixture
def streets(tmp_path: Path) -> Path:
    """CamVid's folders with pictures of 44 x 60 pixels: sky above, road below, and a strip of no class."""
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for part, count in (("train", 5), ("val", 2)):
        for folder in (part, f"{part}annot"):
            (tmp_path / folder).mkdir()
        for i in range(count):
            pixels = rng.integers(0, 60, (44, 60, 3)).astype(np.uint8)
            labels = np.full((44, 60), 3, np.uint8)
            pixels[:20] += 120
            labels[:11] = 0
            labels[40:] = 11
            image.fromarray(pixels).save(tmp_path / part / f"{i}.png")
            image.fromarray(labels).save(tmp_path / f"{part}annot" / f"{i}.png")
    return tmp_path


def test_camvid_is_read_with_its_void_and_its_weights(streets: Path) -> None:
    task = find_task(f"segmentation={streets}")(0)
    x, y = next(iter(task.train))
    assert (x.shape, y.shape, y.dtype) == ((5, 3, 44, 60), (5, 44, 60), torch.int64)
    assert (y[:, :11] == 0).all()
    assert (y[:, 11:40] == 3).all()
    assert (y[:, 40:] == -1).all()
    assert [len(a) for a, _ in task.test] == [2]
    weight = _median_frequencies(sorted((streets / "trainannot").iterdir()))
    shares = 11 / 44, 29 / 44
    median = sum(shares) / 2
    assert weight[[0, 3]].tolist() == pytest.approx([median / share for share in shares])
    assert not weight[[1, 2, 4, 5, 6, 7, 8, 9, 10]].any()


def test_pixels_of_no_class_count_in_no_metric_and_absent_classes_neither() -> None:
    targets = torch.tensor([[[0, 1], [-1, -1]]])
    outputs = 9.0 * torch.nn.functional.one_hot(torch.tensor([[[0, 0], [1, 2]]]), 4).permute(0, 3, 1, 2)
    assert mean_iou(outputs, targets) == pytest.approx((1 / 2 + 0) / 2)
    assert accuracy(outputs, targets) == 0.5


def test_segnet_basic_trains_with_a_scale_for_each_layer(streets: Path) -> None:
    task = find_task(f"segmentation={streets}")(0)
    assert sum(p.numel() for p in task.model.parameters()) == 1_416_075
    run = train(task, "fp16", scaling="adaptive", optimizer="sgd", learning_rate=0.05, steps=2)
    assert all(math.isfinite(loss) for loss in run.losses)
    assert set(run.metrics) == {"mean_iou", "accuracy"}


def test_folders_that_are_not_camvids_are_refused(streets: Path) -> None:
    (streets / "valannot" / "1.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"valannot/1\.png is missing, the labels of val/1\. Put it there"):
        find_task(f"segmentation={streets}")(0)
    with pytest.raises(FileNotFoundError, match=r"has no pictures in train\. Expected: CamVid.*'segmentation=CamVid'"):
        find_task(f"segmentation={streets / 'train'}")(0)
