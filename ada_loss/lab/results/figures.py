"""Figures of results, drawn with matplotlib in colours that the colour-blind can tell apart."""

from __future__ import annotations

import io
import math
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpsim.checks import pip_install
from fpsim.insight.pictures import apart_from_pyplot, new_axes, new_picture

try:
    from matplotlib import colormaps, rc_context, rcParams
    from matplotlib.figure import Figure
    from PIL import Image
except ImportError as error:
    raise ImportError(f"A figure needs {error.name}, which is not installed: {pip_install('lab')}.") from None

__all__ = [
    "COLOURS",
    "DASHES",
    "FACTOR",
    "LETTERS_AN_INCH",
    "MOST_DOTS",
    "colour",
    "evenly",
    "far_off",
    "figure_bytes",
    "heat_png",
    "in_the_dark",
    "ink",
    "is_constant",
    "method_words",
    "plain",
    "plot_curves",
    "plot_depth",
    "plot_differences",
    "plot_front",
    "plot_heat",
    "plot_methods",
    "plot_scales",
    "plot_table",
]

# The palette of Okabe and Ito 2008.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")  # in addition to the ink
MARKERS = "osD^vP*X<>h"
# Lines also differ in their dashes, so that they can be told apart in a black-and-white print.
DASHES = ("-", "--", "-.", (0, (1, 1)), (0, (6, 1, 1, 1, 1, 1)))
# The mark of a training that diverged, at the edge of a panel.
CROSS = {"marker": "x", "markersize": 7, "color": COLOURS[5], "linestyle": "", "label": "diverged", "clip_on": False}
# If a setting's distance is this many times the next smaller distance, this and all farther settings are off the axis.
FAR = 5
MOST_DOTS = 200  # the largest number of seeds of a place that are drawn
PANELS_A_ROW = 4
LETTERS_AN_INCH = 13  # the number of letters per inch in the labels of plot_table
SHORT = 18  # the number of letters of a name that fit next to one panel
LETTERS = 28  # the largest number of letters in a line of a legend
# An axis is logarithmic if the largest number is at least this many times the smallest.
FACTOR = 8.0
HEAT = "cividis"  # the colour map of heat maps
SHOWN_SITES = 60
# The number of colours. The last entry of the palette is transparent, for NaN.
STEPS = 255
DARK = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#e6e9ed"),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor"), "none"),
    "grid.color": "#5a6470",
}


def plain(text: str) -> str:
    """Escape a user's text for matplotlib, where a dollar sign begins a formula."""
    return text.replace("$", r"\$")


@contextmanager
def in_the_dark() -> Iterator[None]:
    """Draw for a dark page: light text, the same hues, a transparent background."""
    with rc_context(DARK), apart_from_pyplot():
        yield


def colour(i: int) -> str:
    """Return the colour of the i-th of several lines; every seventh line has the colour of the text."""
    return (*COLOURS, ink())[i % (len(COLOURS) + 1)]


def ink() -> str:
    """Return the colour of the text, which is also the colour of lines without a hue."""
    return str(rcParams["text.color"])


def figure_bytes(figure: Figure, kind: str = "png") -> bytes:
    """Return a figure as the content of a file. kind: "png", "svg" or "pdf"."""
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=150)
    return content.getvalue()


def plot_depth(rows: Sequence[dict[str, Any]]) -> Figure:
    """Plot the error of the first layer's weight gradient by gain and method, with a panel for each format.

    rows: the rows of `depth_trial`.
    """
    formats = list(dict.fromkeys(row["format"] for row in rows))
    gains = list(dict.fromkeys(row["gain"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure = new_picture(3.6 * len(formats), 4.6)
    panels = figure.subplots(1, len(formats), sharey=True, squeeze=False)[0]
    for fmt, axes in zip(formats, panels, strict=True):
        for i, method in enumerate(methods):
            by_gain = {r["gain"]: r["error"] for r in rows if (r["format"], r["method"]) == (fmt, method)}
            # An infinite error cannot be drawn. It is replaced by a value at the top, as the label of the axis says.
            errors = [min(by_gain[g], 3.0) if math.isfinite(by_gain[g]) else 3.0 for g in gains]
            style = {"color": colour(i), "marker": MARKERS[i % len(MARKERS)], "linewidth": 1.3}
            dashes = "-" if i <= len(COLOURS) else "--"
            axes.plot(range(len(gains)), errors, dashes, markersize=5, label=method_words(method), **style)
        axes.set_xticks(range(len(gains)), [f"{g:g}" for g in gains])
        axes.set_xlabel("gain of a layer: gradients grow | shrink")
        axes.set_title(fmt, fontsize=10)
        axes.set_yscale("log")
        axes.axhline(1, color=ink(), linewidth=0.6, linestyle=":")
        axes.grid(axis="y", linewidth=0.4, alpha=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("error of the first layer's gradient; 1: all lost, top: inf")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False, fontsize=8
    )
    return figure


def plot_methods(places: Mapping[tuple[str, str], Sequence[float]], title: str, factor: float = 1.0) -> Figure:
    """Plot a line over the constant loss scales, next to the methods that choose a scale; a panel for each format.

    A setting with a value that is not finite is marked at the lower edge; for float32 the finite values are drawn.

    places: {(format, method): values}; the format "fp32" is the baseline, a band of mean and deviation.
    title: the name of the values, for the axis.
    factor: 100 for values shown in %.
    """
    formats = [fmt for fmt in dict.fromkeys(fmt for fmt, _ in places) if fmt != "fp32"]
    figure = new_picture(4.2 * len(formats), 4.0)
    panels = figure.subplots(1, len(formats), sharey=True, squeeze=False)[0]

    def spread(fmt: str, method: str) -> tuple[float, float]:
        values = [factor * v for v in places[fmt, method] if fmt != "fp32" or math.isfinite(v)]
        if not values or not all(map(math.isfinite, values)):
            return math.nan, math.nan
        return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0

    is_known = any(map(math.isfinite, places.get(("fp32", "none"), ())))
    for fmt, axes in zip(formats, panels, strict=True):
        methods = [method for f, method in places if f == fmt]
        constant = {
            0 if m == "none" else round(math.log2(float(m))): m for m in methods if m == "none" or is_constant(m)
        }
        chosen = [m for m in methods if m not in constant.values()]
        # The methods are to the right of the constants, with a gap of one position.
        positions = [max(constant, default=0) + 2 + i for i in range(len(chosen))]
        line = {"color": COLOURS[0], "marker": "o", "markersize": 3.5, "linewidth": 1.2}
        dots = {"color": COLOURS[5], "marker": "D", "markersize": 5, "linestyle": "", "capsize": 2}
        for x, drawn, style in (([*constant], [*constant.values()], line), (positions, chosen, dots)):
            # If a sweep has only constants, there are no other methods, and zip(*()) cannot be unpacked.
            if drawn:
                means, deviations = zip(*(spread(fmt, method) for method in drawn), strict=True)
                axes.errorbar(x, means, deviations, **style)
                lost = [place for place, mean in zip(x, means, strict=True) if math.isnan(mean)]
                axes.plot(lost, [0.0] * len(lost), transform=axes.get_xaxis_transform(), **CROSS)
        if is_known:
            mean, deviation = spread("fp32", "none")
            axes.axhspan(mean - deviation, mean + deviation, color=ink(), alpha=0.12, linewidth=0)
            axes.axhline(mean, color=ink(), linewidth=0.8)
        ticks = [k for k in constant if k % 4 == 0]
        axes.set_xticks(
            [*ticks, *positions],
            [*(f"$2^{{{k}}}$" for k in ticks), *map(plain, chosen)],
            rotation=60,
            ha="right",
            fontsize=8,
        )
        axes.set_title(plain(fmt), fontsize=10)
        axes.grid(axis="y", linewidth=0.4, alpha=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    panels[0].set_ylabel(plain(title) + ("; the band is float32" if is_known else ""))
    return figure


def plot_scales(scales: Mapping[str, Sequence[float]], overflows: Sequence[int] = ()) -> Figure:
    """Plot scales over the steps, with a line for each name.

    scales: {name: the scale of each step}.
    overflows: the steps to mark.
    """
    figure, axes = new_axes(9, 4, grid="both")
    for i, (name, values) in enumerate(scales.items()):
        marks = {"marker": MARKERS[i % len(MARKERS)], "markersize": 4.5, "markevery": (0.04 + 0.011 * i, 0.15)}
        style = {"color": colour(i), "linestyle": DASHES[i % len(DASHES)], **marks}
        axes.step(
            range(len(values)), values, where="post", label=textwrap.fill(plain(name), LETTERS), linewidth=1.3, **style
        )
    for step in overflows:
        axes.axvline(step, color=ink(), linewidth=0.5, linestyle=":")
    axes.set_yscale("log", base=2)
    axes.set_xlabel("step" + ("; dotted: a gradient overflowed" if overflows else ""))
    axes.set_ylabel("scale")
    axes.legend(ncols=1 + len(scales) // 20, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


def method_words(method: str) -> str:
    """Return the name of a scaling method; a constant scale is written as a power of two.

    >>> method_words("8.0"), method_words("torch")
    ('2^3', 'torch')
    """
    return f"2^{math.log2(float(method)):g}" if is_constant(method) else method


def is_constant(method: str) -> bool:
    """True if a scaling method is a constant scale.

    >>> is_constant("1024"), is_constant("torch"), is_constant("nan")
    (True, False, False)
    """
    try:
        return float(method) > 0
    except ValueError:
        return False


def plot_table(
    places: Mapping[tuple[str, str], Sequence[float]],
    title: str,
    factor: float = 1.0,
    baseline: Sequence[float] = (),
) -> Figure:
    """Plot a dot for each seed, mean and standard deviation: methods as rows, a panel for each format.

    Values that are not finite are marked at the left edge. Formats and methods share the rows of one panel if there is
    only one method, or if two fifths or more of the panels' rows would be empty. Only shares have limits: with any
    other metric, settings far from float32 are marked at the edge by an arrow and their mean, and the axis fits the
    other settings.

    places: {(format, method): values}.
    title: the name of the values, for the axis.
    factor: 100 for values shown in %.
    baseline: the values of float32, for a line through all panels.
    """
    places = {place: [factor * v for v in values] for place, values in places.items()}
    formats, methods = ([*dict.fromkeys(place[i] for place in places)] for i in (0, 1))
    if len(methods) == 1 or 5 * len(places) <= 3 * len(formats) * len(methods):
        alone = [fmt for fmt in formats if sum(fmt == other for other, _ in places) == 1]
        names = {(f, m): f if f in alone else f"{f}, {method_words(m)}" for f, m in places}
        places = {(title, names[place]): values for place, values in places.items()}
        formats, methods = [title], [*names.values()]
    columns = min(len(formats), PANELS_A_ROW)
    rows = -(-len(formats) // columns)
    longest = max(map(len, methods)) if columns == 1 else 0
    width = 1.4 + 2.1 * columns + 0.6 * (columns == 1) + max(longest - SHORT, 0) / LETTERS_AN_INCH
    size = (width, (0.75 + 0.3 * len(methods)) * rows + 0.35)
    figure = new_picture(*size)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    line = factor * statistics.fmean(baseline) if baseline else math.nan
    means = {place: statistics.fmean(values) for place, values in places.items() if values}
    # A factor of 100 means that the metric is a share. A share has limits, so no setting is far off.
    far = far_off({place: mean - line for place, mean in means.items()}) if factor == 1 else set()
    finite = [v for place, values in places.items() if place not in far for v in _spread(values)]
    lowest, highest = (min(finite), max(finite)) if finite else (0.0, 1.0)
    margin = 0.06 * (highest - lowest) or max(0.01 * abs(highest), 1e-3)
    for i, axes in enumerate(panels.flat):
        if i >= len(formats):
            axes.set_visible(False)
            continue
        if baseline:
            axes.axvline(line, color=ink(), linewidth=0.8, linestyle=(0, (4, 2)))
        for y, method in enumerate(methods):
            place, values = (formats[i], method), places.get((formats[i], method), [])
            if place in far:
                _point_to(axes, y, means[place], lowest - margin, highest + margin)
            else:
                _draw(axes, y, values, lowest - margin / 2)
        axes.set_title(plain(formats[i]) if len(formats) > 1 else "", fontsize=9)
        axes.set_yticks(range(len(methods)), [_words(method) for method in methods], fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        axes.grid(axis="x", linewidth=0.4, alpha=0.6)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_axisbelow(True)
    panels[0, 0].set_ylim(len(methods) - 0.5, -0.5)
    panels[0, 0].set_xlim(lowest - margin, highest + margin)
    words = title + ("; dashed: float32" if baseline else "") + ("; arrows: means off the axis" if far else "")
    figure.supxlabel(textwrap.fill(plain(words), round(LETTERS_AN_INCH * size[0])), fontsize=9)
    return figure


def far_off(distances: Mapping[Any, float]) -> set[Any]:
    """Return the settings that are so far from the baseline that they would squeeze the other settings on an axis.

    The outliers begin at the largest jump between neighbouring distances, by a factor of five or more, and are fewer
    than half of the settings.

    >>> sorted(far_off({"a": 0.0, "b": 0.01, "c": -0.1, "d": 1.0, "e": 3.4}))
    ['d', 'e']
    >>> far_off({"a": 0.1, "b": 0.3, "c": 1.0}), far_off({"a": 0.1, "b": 1.0, "c": 1.1, "d": math.nan})
    (set(), set())
    """
    ordered = sorted((abs(d), i, name) for i, (name, d) in enumerate(distances.items()) if math.isfinite(d))
    steps = [
        (ordered[i][0] / ordered[i - 1][0], i)
        for i in range(len(ordered) // 2 + 1, len(ordered))
        if ordered[i][0] >= FAR * ordered[i - 1][0] > 0
    ]
    return {name for _, _, name in ordered[max(steps)[1] :]} if steps else set()


def evenly(values: Sequence[float], most: int) -> list[float]:
    """Return all numbers; if there are more than `most`, that many of them, at even ranks from least to largest.

    >>> evenly([3, 1, 2], 3), evenly(range(100, -1, -1), 3)
    ([3, 1, 2], [0, 50, 100])
    """
    if len(values) <= most:
        return [*values]
    ordered = sorted(values)
    return [ordered[round(i * (len(ordered) - 1) / (most - 1))] for i in range(most)]


def plot_differences(rows: Sequence[Mapping[str, Any]], title: str, tolerance: float = 0.0, factor: float = 1.0) -> Any:
    """Plot differences from float32: a dot for each seed, the mean and its interval, and the tolerance as a band.

    rows: a row for each setting with "name", "differences" and the "interval" of their mean, NaN if there is none.
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
    """Plot a search's metric by bits: a dot for each tried setting, a line through the front, float32 dashed.

    rows, front: the rows and the front of a `SearchResult`.
    baseline: float32's metric.
    bits: the bits of the answer, to mark it.
    title: the title of the metric, with its unit.
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

    lines: for each curve its name, steps, means, and deviations (NaN if unknown).
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
    """Return the content of a PNG image of shares between 0 and 1.

    shares: (rows, columns), with at least one row and column; NaN is transparent.

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

    steps: the step at which each column ends.
    sites: the sites, from input to output.
    values: (steps, sites); NaN is hatched.
    title: the title of the figure.
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
    # The cells get edges, because viewers of vector pictures would otherwise draw hairlines between cells.
    mesh.set(edgecolor="face", linewidth=0.2)
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


def _draw(axes: Any, y: int, values: Sequence[float], edge: float) -> None:
    finite = [v for v in values if math.isfinite(v)]
    plot = axes.plot
    if len(finite) < len(values):
        plot([edge], [y], **CROSS)
    if not finite:
        return
    dots = evenly(finite, MOST_DOTS)
    plot(dots, [y] * len(dots), linestyle="", marker="o", markersize=3, color=COLOURS[4], alpha=0.9, zorder=2)
    mean = statistics.fmean(finite)
    if len(finite) > 1:
        deviation = statistics.stdev(finite)
        plot([mean - deviation, mean + deviation], [y, y], color=COLOURS[0], linewidth=1.4, zorder=3)
    plot([mean], [y], marker="D", markersize=5, color=COLOURS[0], zorder=4)
    # The number has a background, which hides the line of float32 behind it.
    behind = {"pad": 0.7, "facecolor": axes.get_facecolor(), "edgecolor": "none"}
    place = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center", "fontsize": 6.5}
    axes.annotate(f"{mean:#.3g}".rstrip("."), (mean, y), **place, bbox=behind, zorder=2.5)


def _point_to(axes: Any, y: int, mean: float, left: float, right: float) -> None:
    """Draw an arrow at the edge beyond which the mean of a setting lies, and write the mean next to the arrow."""
    is_right = mean > right
    at, towards = (right, -1) if is_right else (left, 1)
    axes.plot([at], [y], linestyle="", marker=">" if is_right else "<", markersize=6, color=COLOURS[5], clip_on=False)
    place = {"xytext": (7 * towards, 0), "textcoords": "offset points", "ha": "right" if is_right else "left"}
    axes.annotate(f"{mean:#.3g}".rstrip("."), (at, y), **place, va="center", fontsize=6.5)


def _words(method: str) -> str:
    words = method_words(method)
    return f"${words[:2]}{{{words[2:]}}}$" if words.startswith("2^") else plain(words)


def _spread(values: Sequence[float]) -> list[float]:
    """Return all numbers that are drawn: the finite values, and their mean plus and minus their deviation."""
    finite = [v for v in values if math.isfinite(v)]
    if len(finite) < 2:
        return finite
    mean, deviation = statistics.fmean(finite), statistics.stdev(finite)
    return [*finite, mean - deviation, mean + deviation]
