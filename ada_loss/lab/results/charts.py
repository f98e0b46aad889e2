"""Figures of differences from float32, of curves over the steps, and of a search."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ada_loss.lab.results.figures import COLOURS, DASHES, colour, ink, plain
from fpsim.insight.pictures import new_picture

__all__ = ["plot_curves", "plot_differences", "plot_front"]

FACTOR = 8.0  # between the largest and the smallest number from which an axis is logarithmic


def plot_differences(rows: Sequence[Mapping[str, Any]], title: str, tolerance: float = 0.0, factor: float = 1.0) -> Any:
    """Plot differences from float32: a dot for each seed, the mean and its interval, and the tolerance as a band.

    rows: for each setting "name", "differences" and the "interval" of their mean, NaN for none.
    """
    figure = new_picture(7.2, 1.0 + 0.3 * len(rows))
    axes = figure.subplots()
    axes.axvspan(-factor * tolerance, factor * tolerance, color=COLOURS[2], alpha=0.15, linewidth=0)
    axes.axvline(0, color=ink(), linewidth=0.8)
    for y, row in enumerate(rows):
        dots = [factor * value for value in row["differences"] if math.isfinite(value)]
        axes.plot(dots, [y] * len(dots), "o", markersize=3, color=COLOURS[4])
        if dots:
            axes.plot([statistics.fmean(dots)], [y], "D", markersize=5, color=COLOURS[0])
        if all(map(math.isfinite, row["interval"])):
            axes.plot([factor * bound for bound in row["interval"]], [y, y], color=COLOURS[0], linewidth=1.4)
    axes.set_yticks(range(len(rows)), [plain(str(row["name"])) for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(plain(title), fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def plot_front(
    rows: Sequence[Mapping[str, Any]],
    front: Sequence[Mapping[str, Any]],
    baseline: float,
    bits: float,
    title: str,
    factor: float = 1.0,
) -> Any:
    """Plot the metric by bits of a search: a dot for each try, a line through the front, float32 dashed.

    rows, front: of a `SearchResult`.
    baseline: float32's metric.
    bits: of the answer, to mark it.
    title: of the metric, with its unit.
    factor: 100 for values shown in %.
    """
    figure = new_picture(7.2, 4.0)
    axes = figure.subplots()
    for chosen, style in (
        (rows, {"marker": "o", "markersize": 4, "linestyle": "", "color": COLOURS[4], "label": "tried"}),
        (front, {"marker": "o", "drawstyle": "steps-post", "color": COLOURS[0], "label": "front"}),
    ):
        known = [row for row in chosen if math.isfinite(row["accuracy"])]
        axes.plot([row["bits"] for row in known], [factor * row["accuracy"] for row in known], **style)
    axes.axhline(factor * baseline, color=ink(), linewidth=0.8, linestyle=(0, (4, 2)), label="float32")
    axes.axvline(bits, color=COLOURS[5], linewidth=0.8, linestyle=":", label="smallest found")
    axes.set_xlabel("bits")
    axes.set_ylabel(plain(title))
    axes.set_title("what was tried, and what no other beats in both", fontsize=9)
    axes.grid(linewidth=0.4, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    return figure


def plot_curves(
    lines: Sequence[tuple[str, NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]], title: str
) -> Any:
    """Plot curves over the steps, each with its standard deviation as a band.

    lines: name, steps, means, deviations (NaN where there is none) of each.
    title: the label of the axis.
    """
    figure = new_picture(7.2, 3.8)
    axes = figure.subplots()
    for i, (name, steps, mean, deviation) in enumerate(lines):
        spread = np.where(np.isfinite(deviation), deviation, 0.0)
        dashes = DASHES[i // (len(COLOURS) + 1) % len(DASHES)]
        axes.plot(steps, mean, color=colour(i), linestyle=dashes, linewidth=1.3, label=plain(name))
        axes.fill_between(steps, mean - spread, mean + spread, color=colour(i), alpha=0.15, linewidth=0)
    known = np.concatenate([mean[np.isfinite(mean)] for _, _, mean, _ in lines] or [np.empty(0)])
    if len(known) and known.min() > 0 and known.max() / known.min() > FACTOR:
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel(plain(title))
    axes.set_title("mean over the seeds, and standard deviation", fontsize=9)
    axes.grid(linewidth=0.4, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
