"""The pictures of a sweep: a metric by format and method, underflow and scales by site and step."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from ada_loss.lab.plots import COLOURS, Picture, method_words

__all__ = ["plot_heat", "plot_table"]

PANELS_A_ROW = 4
SHOWN_SITES = 60
LETTERS_AN_INCH = 13  # of the label below


def plot_table(
    places: Mapping[tuple[str, str], Sequence[float]],
    title: str,
    factor: float = 1.0,
    baseline: Sequence[float] = (),
) -> Figure:
    """A dot for each seed, a diamond and a bar for mean and standard deviation: methods down, a panel for each format.

    places: {(format, method): values}; with one method alone, the formats go down. factor: 100 for values shown in %.
    baseline: the values of float32, a line through all panels. Values that are not finite are marked at the left edge.
    """
    places = {place: [factor * v for v in values] for place, values in places.items()}
    formats, methods = ([*dict.fromkeys(place[i] for place in places)] for i in (0, 1))
    if len(methods) == 1:
        places = {(title, fmt): values for (fmt, _), values in places.items()}
        formats, methods = [title], formats
    columns = min(len(formats), PANELS_A_ROW)
    rows = -(-len(formats) // columns)
    size = (1.4 + 2.1 * columns + 0.6 * (columns == 1), (0.75 + 0.3 * len(methods)) * rows + 0.35)
    figure = Picture(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    finite = [v for values in places.values() for v in _spread(values)]
    lowest, highest = (min(finite), max(finite)) if finite else (0.0, 1.0)
    margin = 0.06 * (highest - lowest) or max(0.01 * abs(highest), 1e-3)
    for i, axes in enumerate(panels.flat):
        if i >= len(formats):
            axes.set_visible(False)
            continue
        if baseline:
            axes.axvline(factor * statistics.fmean(baseline), color="black", linewidth=0.8, linestyle=(0, (4, 2)))
        for y, method in enumerate(methods):
            _draw(axes, y, places.get((formats[i], method), []), lowest - margin / 2)
        axes.set_title(formats[i] if len(formats) > 1 else "", fontsize=9)
        axes.set_yticks(range(len(methods)), [_words(method) for method in methods], fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        axes.grid(axis="x", linewidth=0.4, alpha=0.6)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_axisbelow(True)
    panels[0, 0].set_ylim(len(methods) - 0.5, -0.5)
    panels[0, 0].set_xlim(lowest - margin, highest + margin)
    words = title + ("; dashed: float32" if baseline else "")
    figure.supxlabel(textwrap.fill(words, round(LETTERS_AN_INCH * size[0])), fontsize=9)
    return figure


def _draw(axes: object, y: int, values: Sequence[float], edge: float) -> None:
    finite = [v for v in values if math.isfinite(v)]
    plot = axes.plot  # type: ignore[attr-defined]
    if len(finite) < len(values):
        plot([edge], [y], marker="x", color=COLOURS[5], markersize=7, clip_on=False, label="diverged")
    if not finite:
        return
    plot(finite, [y] * len(finite), linestyle="", marker="o", markersize=3, color=COLOURS[4], alpha=0.9, zorder=2)
    mean = statistics.fmean(finite)
    if len(finite) > 1:
        deviation = statistics.stdev(finite)
        plot([mean - deviation, mean + deviation], [y, y], color=COLOURS[0], linewidth=1.4, zorder=3)
    plot([mean], [y], marker="D", markersize=5, color=COLOURS[0], zorder=4)
    axes.annotate(f"{mean:.3g}", (mean, y), (0, 5), textcoords="offset points", ha="center", fontsize=6.5)  # type: ignore[attr-defined]


def _words(method: str) -> str:
    words = method_words(method)
    return f"${words[:2]}{{{words[2:]}}}$" if words.startswith("2^") else words


def _spread(values: Sequence[float]) -> list[float]:
    """The finite values, and mean plus and minus deviation, which is drawn too."""
    finite = [v for v in values if math.isfinite(v)]
    if len(finite) < 2:
        return finite
    mean, deviation = statistics.fmean(finite), statistics.stdev(finite)
    return [*finite, mean - deviation, mean + deviation]


def plot_heat(
    steps: Sequence[int],
    sites: Sequence[str],
    values: np.ndarray,  # type: ignore[type-arg]
    title: str,
    words: str,
    limits: tuple[float | None, float | None] = (None, None),
) -> Figure:
    """A number by site, from input to output, and step. values: (steps, sites), NaN where there is none."""
    if len(sites) > SHOWN_SITES:
        title += f"; {SHOWN_SITES} of {len(sites)} sites"
        chosen = np.linspace(0, len(sites) - 1, SHOWN_SITES).round().astype(int)
        sites, values = [sites[i] for i in chosen], values[:, chosen]
    figure = Picture(figsize=(7.2, 1.1 + 0.19 * len(sites)), layout="constrained")
    axes = figure.subplots()
    edges = [0, *steps]
    low, high = limits
    mesh = axes.pcolormesh(edges, range(len(sites) + 1), values.T, cmap="cividis", vmin=low, vmax=high)
    mesh.set(edgecolor="face", linewidth=0.2)  # no hairlines between the cells of a vector picture
    axes.set_facecolor("0.85")
    axes.set_yticks([i + 0.5 for i in range(len(sites))], sites, fontsize=7)
    axes.tick_params(axis="x", labelsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("step", fontsize=9)
    axes.set_title(title, fontsize=9)
    bar = figure.colorbar(mesh, ax=axes, pad=0.02)
    bar.set_label(words, fontsize=9)
    bar.ax.tick_params(labelsize=8)
    return figure
