"""Figures of what is returned: differences from float32, curves, what a search tried, heat maps by site and step."""

from __future__ import annotations

import io
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from numpy.typing import NDArray
from PIL import Image

from ada_loss.lab.results.figures import COLOURS, DASHES, LETTERS_AN_INCH, colour, ink, plain
from fpsim.insight.pictures import new_axes, new_picture

__all__ = ["heat_png", "plot_curves", "plot_differences", "plot_front", "plot_heat"]

FACTOR = 8.0  # between the largest and the smallest number from which an axis is logarithmic
HEAT = "cividis"  # colours of heat maps
SHOWN_SITES = 60
STEPS = 255  # of the colours; the last entry of the palette is transparent


def plot_differences(rows: Sequence[Mapping[str, Any]], title: str, tolerance: float = 0.0, factor: float = 1.0) -> Any:
    """Plot differences from float32: a dot for each seed, the mean and its interval, and the tolerance as a band.

    rows: for each setting "name", "differences" and the "interval" of their mean, NaN for none.
    """
    figure, axes = new_axes(7.2, 1.0 + 0.3 * len(rows))
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
    axes.spines["left"].set_visible(False)
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
    figure, axes = new_axes(7.2, 4.0, grid="both")
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
    axes.legend(fontsize=8, frameon=False)
    return figure


def plot_curves(
    lines: Sequence[tuple[str, NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]], title: str
) -> Any:
    """Plot curves over the steps, each with its standard deviation as a band.

    lines: name, steps, means, deviations (NaN where there is none) of each.
    title: the label of the axis.
    """
    figure, axes = new_axes(7.2, 3.8, grid="both")
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
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def heat_png(shares: NDArray[np.float64]) -> bytes:
    """The content of a PNG of shares between 0 and 1.

    shares: (rows, columns), at least one of each; NaN is transparent.

    >>> content = heat_png(np.array([[0.0, np.nan], [0.5, 1.0]]))
    >>> content[:8], len(content) < 1200
    (b'\\x89PNG\\r\\n\\x1a\\n', True)
    """
    known = np.isfinite(shares)
    indices = np.full(shares.shape, STEPS, dtype=np.uint8)
    indices[known] = np.round(np.clip(shares[known], 0, 1) * (STEPS - 1)).astype(np.uint8)
    palette = (colormaps[HEAT](np.linspace(0, 1, STEPS))[:, :3] * 255).round().astype(np.uint8)
    picture, content = Image.fromarray(indices, "P"), io.BytesIO()
    picture.putpalette(palette.tobytes() + bytes(3))
    picture.save(content, "png", transparency=STEPS, optimize=True)
    return content.getvalue()


def plot_heat(
    steps: Sequence[int],
    sites: Sequence[str],
    values: NDArray[np.float64],
    title: str,
    words: str,
    limits: tuple[float | None, float | None] = (None, None),
) -> Any:
    """Plot values by site and step, as colours.

    steps: the steps at which a column ends.
    sites: from input to output.
    values: (steps, sites); NaN is hatched.
    title: of the figure.
    words: the label of the colour bar.
    limits: the values of the first and the last colour.
    """
    if len(sites) > SHOWN_SITES:
        title += f"; {SHOWN_SITES} of {len(sites)} sites"
        chosen = np.linspace(0, len(sites) - 1, SHOWN_SITES).round().astype(int)
        sites, values = [sites[i] for i in chosen], values[:, chosen]
    figure = new_picture(7.2, 1.1 + 0.19 * len(sites))
    axes = figure.subplots()
    edges = [0, *steps]
    low, high = limits
    mesh = axes.pcolormesh(edges, range(len(sites) + 1), values.T, cmap=HEAT, vmin=low, vmax=high)
    mesh.set(edgecolor="face", linewidth=0.2)  # no hairlines between the cells of a vector picture
    axes.set_facecolor("0.85" if ink() == "black" else "0.3")
    is_empty = bool(np.isnan(values).any())
    axes.patch.set(hatch="////" if is_empty else None, edgecolor=ink())
    axes.set_yticks([i + 0.5 for i in range(len(sites))], [*map(plain, sites)], fontsize=7)
    axes.tick_params(axis="x", labelsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("step (hatched: nothing arrives here)" if is_empty else "step", fontsize=9)
    axes.set_title(textwrap.fill(plain(title), round(LETTERS_AN_INCH * figure.get_figwidth())), fontsize=9)
    bar = figure.colorbar(mesh, ax=axes, pad=0.02)
    bar.set_label(words, fontsize=9)
    bar.ax.tick_params(labelsize=8)
    return figure
