"""Drawings that the page itself renders, in coordinates from 0 to 100: differences from float32, learning curves.

The page scales the drawings to its width and adds the text, so that both are readable on a phone and in dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ada_loss.lab.cells.cell_formats import BASELINE
from ada_loss.lab.results.comparison import in_units
from ada_loss.lab.results.curves import Curve, CurveReader, curves
from ada_loss.lab.results.figures import FACTOR, MOST_DOTS, evenly
from ada_loss.lab.results.results import StoredResults
from ada_loss.lab.results.table import heading, is_share
from ada_loss.lab.results.verdict import Combination, Verdict

__all__ = ["curve_panels", "difference_panels"]

# The number of tolerances, on both sides of float32, up to which the axis is linear; beyond, it is logarithmic.
EVEN = 2.0
LEAST = 3.0  # the number of tolerances that the axis covers at least
MARGIN = 0.5  # the margin at both ends of the axis, in its own units
APART = 11.0  # the least distance between two numbers of the axis, in per cent of its width
# Widths on a phone, in per cent of an axis of 170 pixels: a letter of 6.2 pixels, and the space between two numbers.
LETTER, GAP = 3.7, 4.0
POINTS = 80
MOST_LINES = 7
MOST_PANELS = 24
CLOSE = 0.6  # curves that are closer cover one another; in units of a panel's height of 100
STRIPE = 7  # the length, in pixels, of each curve's stripe in a striped line


def difference_panels(verdict: Verdict, listed: Collection[str] | None = None) -> dict[str, Any] | None:
    """Return a panel for each format, with a line for each other setting: differences from float32 and their interval.

    Formats with only one setting share a panel, with a line for each format. Returns None if there is nothing to
    compare.

    listed: the ids of the cells on the page; None for all cells.
    """
    if not verdict.baseline or not verdict.combinations or not verdict.tolerance > 0 or not verdict.sign:
        return None
    axis = _Axis(verdict)
    panels: dict[str, list[dict[str, Any]]] = {}
    for one in verdict.combinations[:500]:
        panels.setdefault(one.fmt, []).append(_line(one, axis, listed))
    alone = [fmt for fmt, lines in panels.items() if len(lines) == 1]
    shown = [{"name": fmt, "lines": lines, "of": "settings"} for fmt, lines in panels.items() if fmt not in alone]
    if alone:
        words = "formats with one setting" if shown else ""
        lines = [{**panels[fmt][0], "name": fmt} for fmt in alone]
        shown.insert(0, {"name": words, "lines": lines, "of": "formats"})
    return {
        "subject": verdict.subject,
        "title": f"{heading(verdict.metric)}{', lower is better' * (verdict.sign < 0)}: difference from float32",
        "panels": shown,
        "ticks": axis.ticks,
        "band": sorted(axis.place(k * verdict.tolerance) for k in (-1, 1)),
        "zero": axis.place(0.0),
    }


class _Axis:
    """The axis of differences from float32. Positions go from 0 (left) to 100 (right), in the order of values.

    The axis is linear up to `EVEN` tolerances on both sides; beyond, a factor of two is as long as a tolerance. The
    axis reaches from the smallest to the largest difference of a seed, plus a margin, so that no dot lies at an edge.
    """

    def __init__(self, verdict: Verdict) -> None:
        self.tolerance, self.verdict = verdict.tolerance, verdict
        values = [v / self.tolerance for one in verdict.combinations for v in one.comparison.differences.values()]
        values = [value for value in values if math.isfinite(value)]
        self.low = _bent(min([*values, -LEAST])) - MARGIN
        self.high = _bent(max([*values, LEAST])) + MARGIN

    def place(self, difference: float) -> float:
        """Return the position of a difference on the axis. difference: in the units of the metric."""
        place = 100 * (_bent(difference / self.tolerance) - self.low) / (self.high - self.low)
        return round(min(max(place, 0.0), 100.0), 2)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Return positions and numbers: 0, the tolerance, and 2, 5, 10, 20, 50 ... tolerances if there is room."""
        # The numbers are in order of importance: a number that would overlap an earlier one is left out.
        sizes = [1.0, *(k * 10.0**n for n in range(6) for k in (2, 5, 10))]
        values = [0.0, *(sign * size for size in sizes for sign in (-1, 1))]
        ticks: list[tuple[float, str]] = []
        for value in values:
            if self.low + MARGIN / 2 <= _bent(value) <= self.high - MARGIN / 2:
                place, words = self.place(value * self.tolerance), _tick(self.verdict, value * self.tolerance)
                half = LETTER * len(words) / 2
                is_whole = half <= place <= 100 - half
                if is_whole and all(abs(place - other) >= _apart(words, others) for other, others in ticks):
                    ticks.append((place, words))
        return sorted(ticks)


def _apart(*words: str) -> float:
    """Return the least distance between the middles of two numbers, in per cent of the axis on a phone."""
    return max(APART, GAP + LETTER * sum(map(len, words)) / 2)


def _bent(tolerances: float) -> float:
    """Return a difference, given in tolerances, as a length on the axis.

    >>> _bent(-1.5), _bent(2.0), _bent(4.0), _bent(-16.0)
    (-1.5, 2.0, 3.0, -5.0)
    """
    size = abs(tolerances)
    return math.copysign(size if size <= EVEN else EVEN + math.log2(size / EVEN), tolerances)


def _tick(verdict: Verdict, value: float) -> str:
    words = f"{100 * value:+.3g}" if is_share(verdict.metric) else f"{value:+.2g}"
    return words if value else "0"


def _line(one: Combination, axis: _Axis, listed: Collection[str] | None) -> dict[str, Any]:
    comparison, sign = one.comparison, axis.verdict.sign
    # Judgements are positive if the setting is better; the drawing uses the direction of the metric.
    low, high = (math.nan, math.nan) if one.judgement is None else sorted(sign * b for b in one.judgement.interval)
    words = (
        in_units(comparison.metric, comparison.mean, False, axis.tolerance)
        if math.isfinite(comparison.mean)
        else one.outcome
    )
    if comparison.diverged:
        words = f"{comparison.diverged} of {one.seeds} diverged"
    if one.collapsed:
        words = f"{len(one.collapsed)} of {one.seeds} collapsed"
    return {
        "name": one.rest or one.fmt,
        "outcome": one.outcome,
        "dots": [axis.place(v) for v in evenly([*filter(math.isfinite, comparison.differences.values())], MOST_DOTS)],
        "mean": axis.place(comparison.mean) if math.isfinite(comparison.mean) else None,
        "interval": None if math.isnan(low) else (axis.place(low), axis.place(high)),
        "words": words,
        "reasons": one.reasons,
        "cells": " ".join(cell for cell in one.cells if listed is None or cell in listed),
    }


def curve_panels(
    results: StoredResults,
    name: str = "loss",
    read: CurveReader | None = None,
    most_seeds: int | None = None,
    listed: Collection[str] | None = None,
) -> dict[str, Any] | None:
    """Return a panel for each format, with a line for each other setting, and float32: mean and deviation over seeds.

    Curves that coincide are drawn as one striped line, named "torch = adaptive". Returns None if no cell has such a
    curve with at least two points.

    read, most_seeds: as in `curves`.
    listed: the ids of the cells on the page; None for all cells.
    """
    try:
        drawn = [*curves(results, name, None, POINTS, read, most_seeds)]
    except ValueError:
        return None
    drawn = [curve for curve in drawn if len(curve.steps) > 1 and np.isfinite(curve.mean).any()]
    finite = np.concatenate([curve.mean[np.isfinite(curve.mean)] for curve in drawn] or [np.empty(0)])
    if not len(finite):
        return None
    is_log = bool(finite.min() > 0 and finite.max() / finite.min() > FACTOR)
    low, high = float(finite.min()), float(finite.max())
    float32 = [curve for curve in drawn if curve.settings.get("format") == results.float32]
    # With several tasks or options, there are several curves of float32, and none of them is the baseline of all other
    # curves.
    if len({_task_and_options(curve) for curve in float32}) > 1:
        float32 = []
    others = [curve for curve in drawn if not any(curve is one for one in float32)]
    methods = [*dict.fromkeys(map(_rest, others))]
    last = max(float(curve.steps[-1]) for curve in drawn)
    panels: dict[str, list[dict[str, Any]]] = {}
    cells = _cells(results, drawn, listed)
    for curve in others:
        panels.setdefault(curve.settings.get("format", ""), []).append(
            {
                "name": _rest(curve) or curve.settings.get("format", ""),
                "colour": f"c{methods.index(_rest(curve)) % MOST_LINES}",
                "cells": " ".join(cells(curve)),
                **_paths(curve, low, high, last, is_log),
            }
        )
    panels = panels or {BASELINE: []}
    better = results.directions.words(name.split("/")[0])
    seeds = "the seeds" if most_seeds is None else f"the first {most_seeds} seeds"
    # float32 is drawn as one line, even if several grids trained it.
    lines = [
        {"name": "float32", "colour": "float32", "cells": "", **_paths(curve, low, high, last, is_log), "band": ""}
        for curve in float32[:1]
    ]
    shown = [
        {"name": fmt, "more": max(len(of_format) - MOST_LINES, 0), **_striped([*lines, *of_format[:MOST_LINES]])}
        for fmt, of_format in [*panels.items()][:MOST_PANELS]
    ]
    return {
        "name": name,
        "title": f"{', '.join(filter(None, (name, better)))}: mean over {seeds}, and deviation",
        "panels": shown,
        "legend": [(i, word or "all") for i, word in enumerate(methods[:MOST_LINES])],
        "float32": bool(float32),
        "low": f"{low:.3g}",
        "high": f"{high:.3g}",
        "last": f"{last:.0f}",
        "is_log": is_log,
    }


def _cells(
    results: StoredResults, drawn: Sequence[Curve], listed: Collection[str] | None
) -> Callable[[Curve], list[str]]:
    """Return a function that finds the ids of a curve's cells, among the cells on the page."""
    # All curves have the same axes, so the first curve is enough.
    axes = [axis for axis in drawn[0].settings if axis in results.settings]
    found: dict[tuple[str, ...], list[str]] = {}
    for row in results.chosen_rows(None):
        if listed is None or row["id"] in listed:
            found.setdefault(tuple(str(row.get(axis)) for axis in axes), []).append(row["id"])
    return lambda curve: found.get(tuple(curve.settings[axis] for axis in axes), [])


def _task_and_options(curve: Curve) -> tuple[str, ...]:
    return tuple(value for axis, value in curve.settings.items() if axis not in ("format", "rounding", "scaling"))


def _rest(curve: Curve) -> str:
    return " ".join(value for axis, value in curve.settings.items() if axis != "format")


def _striped(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the lines of a panel, with stripes for curves that cover one another, and the names of these curves."""
    groups: list[list[dict[str, Any]]] = []
    for line in lines:
        same = next((group for group in groups if _covers(group[0], line, ("mean",))), None)
        if same is None:
            groups.append([dict(line)])
        else:
            is_known = any(_covers(other, line, ("top", "bottom")) for other in same if other["band"])
            same.append({**line, "band": "" if is_known else line["band"]})
    striped = []
    for group in groups:
        for i, line in enumerate(group):
            is_one = len(group) == 1
            # The curves of a group show a stripe in turn: a dash is as long as one stripe, and a gap as long as all
            # others.
            line["dashes"] = "" if is_one else f"{STRIPE} {STRIPE * (len(group) - 1)}"
            line["offset"] = -STRIPE * i
            striped.append(line)
    same_words = [" = ".join(line["name"] for line in group) for group in groups if len(group) > 1]
    return {"lines": striped, "same": "; ".join(same_words)}


def _covers(a: dict[str, Any], b: dict[str, Any], names: Sequence[str]) -> bool:
    """True if two curves are so close everywhere that one hides the other."""
    return all(
        a[name].shape == b[name].shape
        and bool((np.isnan(a[name]) == np.isnan(b[name])).all())
        and not bool((np.abs(a[name] - b[name]) > CLOSE).any())
        for name in names
    )


def _paths(curve: Curve, low: float, high: float, last: float, is_log: bool) -> dict[str, Any]:
    """Return the line of a curve and its band as paths of an SVG of 100 x 100, with gaps where no seed has a number.

    The result also has the heights of the line and of the band's edges, 0 at the top: "mean", "top" and "bottom", each
    (points,).
    """
    spread = np.where(np.isfinite(curve.deviation), curve.deviation, 0.0)

    def heights(values: NDArray[np.float64]) -> NDArray[np.float64]:
        clipped = np.clip(values, low, high)
        ends = (low, high)
        if is_log:
            clipped, ends = np.log(clipped), (math.log(low), math.log(high))
        return 100 * (1 - (clipped - ends[0]) / ((ends[1] - ends[0]) or 1.0))

    xs = 100 * curve.steps / (last or 1.0)
    known = np.isfinite(curve.mean)
    top, bottom = heights(curve.mean + spread), heights(curve.mean - spread)
    band = [*zip(xs[known], top[known]), *zip(xs[known][::-1], bottom[known][::-1])]
    mean = heights(curve.mean)
    paths = {"line": _path(xs, mean, known), "band": _path(*map(np.array, zip(*band)))}
    return {**paths, "mean": mean, "top": top, "bottom": bottom}


def _path(
    xs: NDArray[np.float64], ys: NDArray[np.float64], known: Sequence[bool] | NDArray[np.bool_] | None = None
) -> str:
    points, pen = [], "M"
    for i, (x, y) in enumerate(zip(xs, ys)):
        if known is not None and not known[i]:
            pen = "M"
            continue
        points.append(f"{pen}{x:.1f} {y:.1f}")
        pen = "L"
    return " ".join(points)
