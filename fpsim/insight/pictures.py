"""Draw pictures of the tools' results with matplotlib, without pyplot's global state."""

from __future__ import annotations

import base64
import io
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import numpy as np

from fpsim.checks import pip_install

try:
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError(f"A picture needs {error.name}, which is not installed: {pip_install('lab')}.") from None

__all__ = [
    "Picture",
    "apart_from_pyplot",
    "new_axes",
    "new_picture",
    "plot_costs",
    "plot_errors",
    "plot_lost",
    "plot_magnitudes",
    "plot_ranges",
    "plot_sites",
    "plot_watch",
]

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"  # Okabe and Ito 2008
LABELS = 72  # how many sites are named on an axis
MOST_NAMED_LINES = 10  # a legend of more lines hides the picture

_is_apart = ContextVar("_is_apart", default=False)


class Picture(Figure):
    """A figure that a notebook shows exactly once."""

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        self.savefig(content, format="png", dpi=150)
        return content.getvalue()

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display({"image/png": base64.b64encode(self._repr_png_()).decode(), "text/plain": repr(self)}, raw=True)
        # The inline backend shows all open figures at the end of a cell. It would show this figure a second time.
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is not None and "inline" in pyplot.get_backend():
            pyplot.close(self)


def new_picture(width: float, height: float) -> Picture:
    """Return an empty figure. If pyplot is in use, this becomes pyplot's current figure, which `plt.show` shows.

    width, height: in inches.
    """
    # pyplot is looked up rather than imported. It keeps its figures alive until they are closed, so only code that
    # uses pyplot should get such figures.
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None or _is_apart.get():
        return Picture(figsize=(width, height), layout="constrained")
    picture: Picture = pyplot.figure(FigureClass=Picture, figsize=(width, height), layout="constrained")
    return picture


def new_axes(width: float, height: float, grid: Literal["", "x", "y", "both"] = "") -> tuple[Picture, Any]:
    """Return a new picture and its only axes, without the upper and the right line of the frame.

    grid: the axes with lines across the picture.
    """
    picture = new_picture(width, height)
    axes = picture.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(axis=grid, linewidth=0.4, alpha=0.6)
    return picture, axes


@contextmanager
def apart_from_pyplot() -> Iterator[None]:
    """Keep the figures of this block out of pyplot, so that only the caller shows them."""
    token = _is_apart.set(True)
    try:
        yield
    finally:
        _is_apart.reset(token)


def _name_sites(axes: Any, sites: Sequence[str], marked: int | None = None) -> None:
    """Name the sites along the vertical axis, from the top. If there are many, name some of them and the marked one."""
    # Names closer than `every` to the marked name are left out, because they would be printed over it.
    every = max(-(-len(sites) // LABELS), 1)
    places = [i for i in range(0, len(sites), every) if marked is None or i == marked or abs(i - marked) >= every]
    if marked is not None and marked not in places:
        places = sorted([*places, marked])
    # matplotlib typesets text between two dollar signs as mathematics.
    axes.set_yticks(places, [sites[i].replace("$", r"\$") for i in places], fontsize=6.5)
    axes.set_ylim(len(sites) - 0.4, -0.6)
    if marked is not None:
        axes.get_yticklabels()[places.index(marked)].set(color=RED, fontweight="bold")


def _label(axes: Any, **options: Any) -> None:
    """Add a legend, if there is anything to name: matplotlib warns of an empty legend."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, **options)


def plot_errors(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot the relative error of a `Comparison` by site: results from input to output, and their gradients."""
    errors: dict[str, dict[str, float]] = {"activation": {}, "error": {}}
    for row in rows:
        if row["role"] in errors:
            label = f"{row['site']} #{row['call']}" if row["call"] else row["site"]
            errors[row["role"]][label] = row["relative"]
    sites = [*errors["activation"]]
    picture, axes = new_axes(7.2, 1.3 + 0.13 * min(len(sites), LABELS), grid="x")
    for role, colour, marker, words in (("activation", BLUE, "o", "result"), ("error", ORANGE, "s", "its gradient")):
        # A logarithmic axis has no place for 0; inf becomes an arrow at the right edge.
        points = [(v, sites.index(s)) for s, v in errors[role].items() if s in sites and 0 < v < math.inf]
        if points:
            axes.plot(*np.array(points).T, marker, color=colour, markersize=4, label=words)
    lost = [sites.index(s) for values in errors.values() for s, v in values.items() if v == math.inf and s in sites]
    if lost:
        right = axes.get_xlim()[1]
        axes.plot([right] * len(lost), lost, ">", color=RED, markersize=6, label="not finite", clip_on=False)
    axes.set_xscale("log")
    worst = max(((v, s) for values in errors.values() for s, v in values.items() if s in sites), default=(0.0, ""))[1]
    _name_sites(axes, sites, sites.index(worst) if len(sites) > LABELS else None)
    axes.set_title(f"largest error at {worst}".replace("$", r"\$") if worst else "", fontsize=9)
    axes.set_xlabel("relative error of b against a")
    _label(axes)
    return picture


def plot_ranges(rows: Sequence[Mapping[str, Any]], cause: Mapping[str, Any] | None) -> Figure:
    """Plot the amax of each result and gradient of a `Diagnosis` in the order of the forward pass.

    Crosses on the right show tensors that are not finite.

    cause: the row whose line is marked, with the end of its format; None if nothing broke.
    """
    picture, axes = new_axes(7.2, 1.3 + 0.13 * min(len(rows), LABELS), grid="x")
    for name, colour, marker, words in (("", BLUE, "o", "result"), ("gradient_", ORANGE, "s", "its gradient")):
        points = [(row[f"{name}amax"], i) for i, row in enumerate(rows) if row[f"{name}amax"]]
        if points:
            axes.plot(*np.array(points).T, marker, color=colour, markersize=4, label=words)
    axes.set_xscale("log")
    marked = None
    if cause is not None:
        axes.set_title(f"{cause['kind']} first appears at {cause['site']}".replace("$", r"\$"), fontsize=9)
        # A line at 3e38, where float32 and bfloat16 end, would push all points to the left edge.
        if math.isfinite(cause["largest"]) and cause["largest"] < 1e30:
            axes.axvline(cause["largest"], color="0.5", linewidth=0.8, label="the format ends")
        for i, row in enumerate(rows):
            if (row["site"], row["call"]) == (cause["site"], cause["call"]):
                marked = i
                axes.axhspan(i - 0.5, i + 0.5, color=RED, alpha=0.15, label=f"{cause['kind']} first appears")
    lost = [(name, i) for i, row in enumerate(rows) for name in ("", "gradient_") if row[f"{name}nonfinite"]]
    for name, words, offset in (("", "result not finite", -0.18), ("gradient_", "gradient not finite", 0.18)):
        places = [i + offset for n, i in lost if n == name]
        if places:
            colour = ORANGE if name else BLUE
            # Non-finite numbers have no magnitude. Here x is a fraction of the axes, just beyond the right edge.
            edge: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "clip_on": False}
            axes.plot([1.015] * len(places), places, "x", color=colour, markersize=5, label=words, **edge)
    _name_sites(axes, [row["site"] for row in rows], marked)
    axes.set_xlabel("largest finite magnitude")
    _label(axes, loc="upper left", bbox_to_anchor=(1.03, 1.0))
    return picture


def plot_watch(rows: Sequence[Mapping[str, Any]], value: str, title: str) -> Figure:
    """Plot a value of a `Watch` by site and step, as colours; grey if a site was not seen in a step.

    rows: the rows of one role and one format.
    """
    sites, steps = [*dict.fromkeys(row["site"] for row in rows)], sorted({row["step"] for row in rows})
    values = np.full((len(sites), len(steps)), np.nan)
    for row in rows:
        values[sites.index(row["site"]), steps.index(row["step"])] = np.nan if row[value] is None else row[value]
    picture = new_picture(7.2, 1.3 + 0.13 * min(len(sites), LABELS))
    axes = picture.subplots()
    is_share = value in ("underflow", "overflow", "nonfinite")
    limits: dict[str, Any] = {"vmin": 0.0, "vmax": 1.0} if is_share else {}
    if value == "amax":
        # A logarithmic scale has no colour for 0, and no limits if all values are 0.
        values[values == 0] = np.nan
        limits["norm"] = "linear" if np.isnan(values).all() else "log"
    axes.set_facecolor("0.85")
    # NaN is replaced before the maximum is taken, because NumPy warns of rows in which all values are NaN.
    hottest = int(np.nanargmax(np.nanmax(np.nan_to_num(values, nan=-np.inf), axis=1))) if len(sites) > LABELS else None
    drawn = axes.imshow(values, aspect="auto", cmap="cividis", interpolation="nearest", **limits)
    every = -(-len(steps) // 10)
    axes.set_xticks([*range(0, len(steps), every)], [str(step) for step in steps[::every]], fontsize=8)
    _name_sites(axes, sites, hottest)
    axes.set_xlabel("step")
    axes.set_title(title, fontsize=9)
    picture.colorbar(drawn, ax=axes, pad=0.02).set_label("share" if is_share else value)
    return picture


def plot_costs(rows: Sequence[Mapping[str, Any]], whole: float) -> Figure:
    """Plot the cost in loss of each module of a `Sensitivity`: alone in the small formats, and with all others.

    whole: the cost of all modules together; a line marks it if it is finite.
    """
    picture, axes = new_axes(7.2, 1.6 + 0.17 * min(len(rows), LABELS), grid="x")
    axes.axvline(0, color="0.5", linewidth=0.8)
    if math.isfinite(whole):
        axes.axvline(whole, color=GREEN, linewidth=1.0, linestyle="--", label="all modules together")
    kinds = (("alone", BLUE, "o", -0.12, "alone in the formats"), ("without", ORANGE, "s", 0.12, "beside all others"))
    for name, colour, marker, offset, words in kinds:
        points = [(row[name], i + offset) for i, row in enumerate(rows) if math.isfinite(row[name])]
        for value, y in points:
            axes.plot([0, value], [y, y], color=colour, linewidth=1.2, alpha=0.6)
        if points:
            axes.plot(*np.array(points).T, marker, color=colour, markersize=4, label=words)
    # Costs that are not finite become arrows at the edges. The limits are fixed, else the arrows would widen them.
    low, high = axes.get_xlim()
    for name, colour, _, offset, words in kinds:
        for end, edge, marker in ((math.inf, high, ">"), (-math.inf, low, "<")):
            places = [i + offset for i, row in enumerate(rows) if row[name] == end]
            if places:
                label = f"{words}: {end}"
                axes.plot([edge] * len(places), places, marker, color=colour, markersize=7, label=label, clip_on=False)
    axes.set_xlim(low, high)
    _name_sites(axes, [row["module"] for row in rows])
    axes.set_xlabel("what the module adds to the loss")
    axes.set_title("what each module costs", fontsize=9)
    picture.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    return picture


def plot_sites(rows: Sequence[Mapping[str, Any]], value: str, title: str) -> Figure:
    """Plot a value of a `Recording` by site, as bars, from the top.

    rows: the rows of one role, from input to output.
    """
    is_share = all(isinstance(row[value], float) and 0 <= row[value] <= 1 for row in rows) and value != "amax"
    picture, axes = new_axes(7.2, 1.1 + 0.17 * min(len(rows), LABELS))
    values = [row[value] if row[value] is not None and math.isfinite(row[value]) else 0.0 for row in rows]
    axes.barh(range(len(rows)), [100 * v if is_share else v for v in values], color=BLUE)
    # No bar can be infinitely long, as for an SQNR where nothing was lost: the value is written instead.
    for i, row in enumerate(rows):
        if row[value] is None or not math.isfinite(row[value]):
            axes.text(0, i, f" {'-' if row[value] is None else row[value]}", va="center", fontsize=8)
    several = len({row["role"] for row in rows}) > 1
    _name_sites(axes, [f"{row['site']} {row['role']}" if several else row["site"] for row in rows])
    axes.set_xlabel(f"{value.replace('_', ' ')}{' in %' * is_share}")
    # If all values are zero, matplotlib centres the axis, and would show shares below zero.
    if is_share and not any(values):
        axes.set_xlim(0, 1)
    axes.set_title(title, fontsize=9)
    return picture


def plot_magnitudes(
    counts: Mapping[int, int], lost: Mapping[int, int], limits: Mapping[str, float], title: str
) -> Figure:
    """Plot how many elements of a tensor have each exponent, and how many of these elements rounding made zero.

    counts, lost: by exponent, the number of elements, and the number of elements that rounding made zero.
    limits: {name: log2 of a magnitude}, drawn as lines.
    """
    picture, axes = new_axes(7.2, 3.2)
    exponents = range(min(counts), max(counts) + 1) if counts else range(0)
    axes.bar(exponents, [counts.get(k, 0) for k in exponents], width=0.9, align="edge", color=BLUE, label="elements")
    if lost:
        axes.bar(exponents, [lost.get(k, 0) for k in exponents], width=0.9, align="edge", color=RED, label="made zero")
        axes.legend(fontsize=7, frameon=False)
    for name, place in limits.items():
        axes.axvline(place, color=ORANGE, linewidth=1)
        axes.annotate(name, (place, 0.98), xycoords=("data", "axes fraction"), fontsize=7, rotation=90, va="top")
    axes.set_xlabel("log2 of the magnitude")
    axes.set_ylabel("elements")
    axes.set_title(title, fontsize=8)
    return picture


def plot_lost(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot the share of lost updates of each parameter against the step.

    rows: the rows of a `LostUpdates`.
    """
    picture, axes = new_axes(7.2, 3.2)
    names = list(dict.fromkeys(row["parameter"] for row in rows))
    for name in names:
        points = [
            (row["step"], 100 * row["lost"]) for row in rows if row["parameter"] == name and row["lost"] is not None
        ]
        # Markers are drawn, because a record of one step has no line.
        axes.plot(
            [x for x, _ in points], [y for _, y in points], label=name, linewidth=1, marker="." * (len(points) < 20)
        )
    axes.set_xlabel("step")
    axes.set_ylabel("lost updates in %")
    # The limits are a little beyond 0 and 100, else a line at 0 or 100 would lie under the frame.
    axes.set_ylim(-2, 102)
    if 0 < len(names) <= MOST_NAMED_LINES:
        axes.legend(fontsize=7, frameon=False)
    return picture
