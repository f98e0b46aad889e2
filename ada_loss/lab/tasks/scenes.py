"""Scenes: drawn shapes on a noisy background, with the box of each shape and the class of each pixel."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["MOST_SHAPES", "SHAPES", "SIDE", "Scenes", "drawn_scenes"]

SIDE = 32  # pixels
SHAPES = ("ellipse", "rectangle", "triangle")  # classes 1, 2 and 3; 0 is the background
MOST_SHAPES = 3
LEAST_EXTENT, MOST_EXTENT = 8, 18  # the least and the largest side of a shape, in pixels
NOISE = 0.1  # the standard deviation of the noise; colours are between 0 and 1
TRIES = 20  # the largest number of tries to find a free place


class Scenes(NamedTuple):
    """Drawn scenes.

    images: (n, 3, 32, 32) float32, centred at 0.
    pixels: (n, 32, 32) int64, the class of each pixel.
    boxes: (n, 3, 4) float32, left, top, right and bottom in pixels; 0 if there is no shape.
    classes: (n, 3) int64, the classes of the boxes; 0 if there is no shape.
    """

    images: Tensor
    pixels: Tensor
    boxes: Tensor
    classes: Tensor


@lru_cache(maxsize=4)
def drawn_scenes(count: int, seed: int) -> Scenes:
    """Draw scenes of one to three shapes whose boxes do not overlap; the same scenes for the same seed.

    >>> scenes = drawn_scenes(2, seed=0)
    >>> scenes.images.shape, sorted(set(scenes.pixels[0].flatten().tolist()) - {0}) == sorted(
    ...     set(scenes.classes[0].tolist()) - {0}
    ... )
    (torch.Size([2, 3, 32, 32]), True)
    """
    rng = np.random.default_rng(seed)
    images = rng.uniform(0.0, 0.6, (count, 3, 1, 1)) + rng.normal(0.0, NOISE, (count, 3, SIDE, SIDE))
    pixels = np.zeros((count, SIDE, SIDE), np.int64)
    boxes, classes = np.zeros((count, MOST_SHAPES, 4), np.float32), np.zeros((count, MOST_SHAPES), np.int64)
    for i in range(count):
        taken = np.zeros((SIDE, SIDE), bool)
        for place in range(rng.integers(1, MOST_SHAPES + 1)):
            box = _free_box(rng, taken)
            # A full scene keeps fewer shapes: no shape is drawn over another, because each pixel has one class.
            if box is None:
                continue
            taken[box[1] : box[3], box[0] : box[2]] = True
            shape = int(rng.integers(len(SHAPES)))
            inside = _inside(SHAPES[shape], box)
            pixels[i][inside] = shape + 1
            # The colour is added, so that every shape is brighter than the background.
            images[i][:, inside] += rng.uniform(0.2, 0.8, (3, 1))
            boxes[i, place], classes[i, place] = box, shape + 1
    images = (images - 0.45) / 0.35
    return Scenes(*map(torch.from_numpy, (images.astype(np.float32), pixels, boxes, classes)))


def _free_box(rng: np.random.Generator, taken: NDArray[np.bool_]) -> tuple[int, int, int, int] | None:
    """Return a box that overlaps no other box; None if no free position was found."""
    for _ in range(TRIES):
        width, height = rng.integers(LEAST_EXTENT, MOST_EXTENT + 1, 2)
        left, top = rng.integers(0, SIDE - width + 1), rng.integers(0, SIDE - height + 1)
        if not taken[top : top + height, left : left + width].any():
            return int(left), int(top), int(left + width), int(top + height)
    return None


def _inside(shape: str, box: tuple[int, int, int, int]) -> NDArray[np.bool_]:
    """Return the mask of the pixels in the shape that fills a box."""
    left, top, right, bottom = box
    y, x = np.mgrid[:SIDE, :SIDE] + 0.5
    across, down = (x - left) / (right - left), (y - top) / (bottom - top)  # 0 to 1 inside of the box
    in_box = (across > 0) & (across < 1) & (down > 0) & (down < 1)
    if shape == "ellipse":
        return np.asarray((2 * across - 1) ** 2 + (2 * down - 1) ** 2 < 1)
    return np.asarray(in_box & (np.abs(2 * across - 1) < down) if shape == "triangle" else in_box)
