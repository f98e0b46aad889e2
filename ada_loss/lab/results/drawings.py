"""What the report draws by itself, in places between 0 and 100: differences from float32, and learning curves.

The page scales them to its width and draws its own words, so that they can be read on a phone and in the dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ada_loss.lab.results.comparison import in_units
from ada_loss.lab.results.curves import Curve, curves
from ada_loss.lab.results.results import StoredResults
from ada_loss.lab.results.table import SHARES, heading
from ada_loss.lab.results.verdict import Combination, Verdict
from ada_loss.lab.sweep.cell_formats import BASELINE

__all__ = ["curve_panels", "difference_panels"]

BELOW, ABOVE = 6.0, 3.0  # tolerances that the axis of differences reaches to the worse and to the better
POINTS = 80
MOST_LINES = 7
MOST_PANELS = 24
CLOSE = 0.6  # of a panel's height of 100: closer curves cover one another
STRIPE = 7  # pixels of each of the curves that are drawn as one


def difference_panels(verdict: Verdict) -> dict[str, Any] | None:
    """A panel for each format, a line for each other setting: its differences from float32, with their interval.

    Formats that have one setting only share a panel, with a line for each. What lies beyond the axis stands at its
    edge, with its number. None where there is nothing to compare.
    """
    if not verdict.baseline or not verdict.combinations or not verdict.tolerance > 0 or not verdict.sign:
        return None
    sign = verdict.sign
    panels: dict[str, list[dict[str, Any]]] = {}
    for one in verdict.combinations[:500]:
        panels.setdefault(one.fmt, []).append(_line(one, verdict.tolerance, sign))
    alone = [fmt for fmt, lines in panels.items() if len(lines) == 1]
    shown = [{"name": fmt, "lines": lines, "of": "settings"} for fmt, lines in panels.items() if fmt not in alone]
    if alone:
        words = "formats with one setting" if shown else ""
        lines = [{**panels[fmt][0], "name": fmt} for fmt in alone]
        shown.insert(0, {"name": words, "lines": lines, "of": "formats"})
    ticks = [-4, -2, 0, 2] if sign > 0 else [-2, 0, 2, 4]
    return {
        "subject": verdict.subject,
        "title": f"{heading(verdict.metric)}{', lower is better' * (sign < 0)}: difference from float32",
        "panels": shown,
        "ticks": [
            (_place(sign * k * verdict.tolerance, verdict.tolerance, sign), _tick(verdict, k * verdict.tolerance))
            for k in ticks
            if -BELOW < sign * k < ABOVE
        ],
        "band": sorted(_place(k * verdict.tolerance, verdict.tolerance, sign) for k in (-1, 1)),
        "zero": _place(0.0, verdict.tolerance, sign),
    }


def _tick(verdict: Verdict, value: float) -> str:
    words = f"{100 * value:+.3g}" if verdict.metric in SHARES else f"{value:+.2g}"
    return words if value else "0"


def _place(worth: float, tolerance: float, sign: int) -> float:
    """Where a difference stands, 0 to 100 from left to right; the better side is that of larger values.

    worth: the difference, positive where it is better.
    """
    place = 100 * (worth / tolerance + BELOW) / (BELOW + ABOVE)
    return round(place if sign > 0 else 100 - place, 2)


def _line(one: Combination, tolerance: float, sign: int) -> dict[str, Any]:
    found = one.comparison
    low, high = (math.nan, math.nan) if one.judgement is None else (sign * b for b in one.judgement.interval)

    def at(value: float) -> float:
        return min(max(_place(sign * value, tolerance, sign), 0.0), 100.0)

    place = _place(sign * found.mean, tolerance, sign) if math.isfinite(found.mean) else None
    words = in_units(found.metric, found.mean, unit=False) if place is not None else one.outcome
    if found.diverged:
        words = f"{found.diverged} of {one.seeds} diverged"
    if one.collapsed:
        words = f"{len(one.collapsed)} of {one.seeds} collapsed"
    inside = [at(v) for v in found.differences.values() if math.isfinite(v)]
    return {
        "name": one.rest or one.fmt,
        "outcome": one.outcome,
        "dots": [x for x in inside if 0 < x < 100],
        "mean": place if place is not None and 0 <= place <= 100 else None,
        "edge": None if place is None or 0 <= place <= 100 else ("left" if place < 0 else "right"),
        "interval": None if math.isnan(low) else (at(low), at(high)),
        "words": words,
        "reasons": one.reasons,
    }


def curve_panels(results: StoredResults, name: str = "loss") -> dict[str, Any] | None:
    """A panel for each format, a line for each other setting: mean and deviation over the seeds, beside float32's.

    Curves that cover one another are drawn as the stripes of one line, and named: "torch = adaptive".
    """
    try:
        found = curves(results, name, points=POINTS)
    except ValueError:
        return None
    found = [curve for curve in found if len(curve.steps) > 1 and np.isfinite(curve.mean).any()]
    finite = np.concatenate([curve.mean[np.isfinite(curve.mean)] for curve in found] or [np.empty(0)])
    if not len(finite):
        return None
    is_log = bool(finite.min() > 0 and finite.max() / finite.min() > 8)
    low, high = float(finite.min()), float(finite.max())
    methods = [*dict.fromkeys(_rest(curve) for curve in found if curve.settings.get("format") != BASELINE)]
    float32 = [curve for curve in found if curve.settings.get("format") == BASELINE][:1]
    last = max(float(curve.steps[-1]) for curve in found)
    panels: dict[str, list[dict[str, Any]]] = {}
    for curve in found:
        if curve not in float32:
            panels.setdefault(curve.settings.get("format", ""), []).append(
                {
                    "name": _rest(curve) or curve.settings.get("format", ""),
                    "colour": f"c{methods.index(_rest(curve)) % MOST_LINES}",
                    **_paths(curve, low, high, last, is_log),
                }
            )
    panels = panels or {BASELINE: []}
    lines = [
        {"name": "float32", "colour": "float32", **_paths(curve, low, high, last, is_log), "band": ""}
        for curve in float32
    ]
    shown = [
        {"name": fmt, "more": max(len(found) - MOST_LINES, 0), **_striped([*lines, *found[:MOST_LINES]])}
        for fmt, found in [*panels.items()][:MOST_PANELS]
    ]
    return {
        "title": f"{name}: mean over the seeds, and standard deviation",
        "panels": shown,
        "legend": [(i, word or "all") for i, word in enumerate(methods[:MOST_LINES])],
        "float32": bool(float32),
        "low": f"{low:.3g}",
        "high": f"{high:.3g}",
        "last": f"{last:.0f}",
        "is_log": is_log,
    }


def _rest(curve: Curve) -> str:
    return " ".join(value for axis, value in curve.settings.items() if axis != "format")


def _striped(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The lines of a panel, with stripes for those that cover one another, and which these are in words."""
    groups: list[list[dict[str, Any]]] = []
    for line in lines:
        same = next((group for group in groups if _covers(group[0], line, ("mean",))), None)
        if same is None:
            groups.append([dict(line)])
        else:
            is_known = any(_covers(other, line, ("top", "bottom")) for other in same if other["band"])
            same.append({**line, "band": "" if is_known else line["band"]})
    found = []
    for group in groups:
        for i, line in enumerate(group):
            is_one = len(group) == 1
            line["dashes"] = "" if is_one else f"{STRIPE} {STRIPE * (len(group) - 1)}"
            line["offset"] = -STRIPE * i
            found.append(line)
    same_words = [" = ".join(line["name"] for line in group) for group in groups if len(group) > 1]
    return {"lines": found, "same": "; ".join(same_words)}


def _covers(a: dict[str, Any], b: dict[str, Any], names: Sequence[str]) -> bool:
    """Whether two curves are so close everywhere that one hides the other."""
    return all(
        a[name].shape == b[name].shape
        and bool((np.isnan(a[name]) == np.isnan(b[name])).all())
        and not bool((np.abs(a[name] - b[name]) > CLOSE).any())
        for name in names
    )


def _paths(curve: Curve, low: float, high: float, last: float, is_log: bool) -> dict[str, Any]:
    """The line of a curve and its band as paths of an SVG of 100 x 100; a gap where no seed has a number.

    Also their heights, 0 at the top: "mean", "top" and "bottom", (points,).
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
