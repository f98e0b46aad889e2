"""Cells of a report: settings, results, curves, and gradients lost by site."""

from __future__ import annotations

import base64
import json
import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fpsim
from ada_loss.lab.cells.telemetry import Curves, curves_of
from ada_loss.lab.results.figures import heat_png
from ada_loss.lab.results.results import StoredResults
from ada_loss.lab.training.run import is_of_role

__all__ = ["cell_page", "error_rows", "gradient_rows", "lost_by_site", "parameter_rows"]

ALL = "100.0 %"
POINTS = 120
MOST_SITES = 40
# The largest number of tensors whose error is shown. The tensors with the lowest SQNR are chosen.
MOST_ERRORS = 20
MOST_NAMES = 8  # the largest number of curves of a cell on the page


def cell_page(
    results: StoredResults, place: int, cell: dict[str, Any], row: dict[str, Any] | None, with_curves: bool
) -> dict[str, Any]:
    """Return the data of a cell for the page.

    place: the index of the cell among all cells of the sweep, counted from 0.
    row: the cell's row in `Results.rows`; None for a cell that is not done.
    with_curves: whether the curves and the heat map are read.
    """
    settings = {name: value for name, value in results.settings_of(cell).items() if name != "id"}
    curves: Curves = {}
    heat: dict[str, Any] | None = None
    gradients: list[tuple[str, ...]] = []
    parameters: list[tuple[str, ...]] = []
    errors: list[tuple[str, ...]] = []
    damage = ""
    if row is not None and with_curves:
        try:
            arrays = results.telemetry(cell["id"])
            curves, heat, gradients = _shown(curves_of(arrays)), _heat(arrays), gradient_rows(arrays)
            parameters, errors = parameter_rows(arrays), error_rows(arrays)
        # Foreign telemetry may hold any arrays. The page reports the damage, and still shows the other cells.
        except Exception as error:
            damage = str(error)
    return {
        "number": place + 1,
        "id": cell["id"],
        "state": "diverged" if row is not None and row["diverged"] else cell["state"],
        "values": {name: _value(value) for name, value in {**settings, **(row or {})}.items() if name != "id"},
        "config": json.dumps(cell["config"], indent=1),
        "old": f"numbers of version {cell['bits']}" if row is not None and cell["bits"] != fpsim.BITS else "",
        "error": cell["error"],
        "traceback": cell["traceback"],
        "attempts": cell["attempts"],
        "points": {name: _points(*curve) for name, curve in curves.items()},
        "heat": heat,
        "gradients": gradients,
        "parameters": parameters,
        "errors": errors,
        "still": [name for name, _, at_first in parameters if at_first == ALL],
        "damage": damage,
    }


def _shown(curves: Curves) -> Curves:
    """Return the curves worth drawing: those with at least two points, except constant scales."""
    telling = {
        name: points
        for name, points in curves.items()
        if len(points[0]) > 1 and np.isfinite(points[1]).any() and not (name == "scale" and np.ptp(points[1]) == 0)
    }
    return dict([*telling.items()][:MOST_NAMES])


def _points(steps: NDArray[np.float64], values: NDArray[np.float64]) -> tuple[list[float], list[float | None]]:
    """Return steps and means of at most POINTS intervals, with four digits; None for an interval without a number."""
    xs, ys = [], []
    for part in np.array_split(np.arange(len(steps)), min(POINTS, len(steps))):
        known = values[part][np.isfinite(values[part])]
        xs.append(float(f"{steps[part].mean():.6g}"))
        ys.append(float(f"{known.mean():.4g}") if len(known) else None)
    return xs, ys


def lost_by_site(
    arrays: Mapping[str, NDArray[Any]], role: str = "error"
) -> tuple[list[int], list[str], NDArray[np.float64]] | None:
    """Return steps, sites, and the lost shares of a role's numbers, (steps, sites); NaN where there were no numbers.

    Returns None if there is no recording. Gradients are listed from input to output.
    """
    if "history.steps" not in arrays:
        return None
    roles = [str(name) for name in arrays["sites.role"]]
    chosen = np.array([i for i, name in enumerate(roles) if is_of_role(name, role)], dtype=int)
    if role in ("error", "weight_grad"):
        chosen = chosen[::-1]  # gradients are recorded from output to input
    lost, nonzero = (
        # The history holds cumulative counts, so differences count the losses between two points.
        np.diff(arrays[f"history.{name}"][:, chosen], axis=0, prepend=0)
        for name in ("underflow", "nonzero")
    )
    with np.errstate(invalid="ignore"):
        shares = np.where(nonzero > 0, lost / nonzero, np.nan)
    sites = [f"{arrays['sites.site'][i]} {roles[i] if roles[i] != role else ''}".rstrip() for i in chosen]
    return arrays["history.steps"].tolist(), sites, shares


def gradient_rows(arrays: Mapping[str, NDArray[Any]]) -> list[tuple[str, ...]]:
    """Return a row for each gradient, from input to output: site, lost share, bias of the row sums, kurtosis.

    The list is empty if there is no recording, or if it comes from a version without the bias. Gradients that are not
    rounded, or that are all zero, are left out.
    """
    names = [f"sites.{name}" for name in ("site", "role", "underflow", "nonzero", "row_bias", "kurtosis")]
    if not arrays.keys() >= set(names):
        return []
    rows: list[tuple[str, ...]] = []
    for site, role, lost, nonzero, row_bias, kurtosis in zip(*(arrays[name] for name in names), strict=True):
        if is_of_role(str(role), "error") and nonzero and math.isfinite(kurtosis):
            words = f"{site} {role if role != 'error' else ''}".rstrip()
            rows.append((words, f"{100 * lost / nonzero:.1f} %", f"{row_bias:.3f}", f"{kurtosis:.0f}"))
    return rows[::-1]  # gradients are recorded from the output to the input


def error_rows(arrays: Mapping[str, NDArray[Any]]) -> list[tuple[str, ...]]:
    """Return the components of each rounded tensor's error, largest error first, as in `fpsim.Tally.error_shares`.

    A row has site and role, format, SQNR, the shares of scale, dead zone and grid, and the bias of the scale. The list
    is empty if there is no recording, or if it comes from a version without the shares. Tensors without an error are
    left out.
    """
    # The names of the columns in the file; a file of an earlier version lacks some.
    shares = [f"{part}_share" for part in ("scale", "dead_zone", "grid")]
    names = [f"sites.{name}" for name in ("site", "role", "format", "sqnr_db", *shares, "scale_bias")]
    if not arrays.keys() >= set(names):
        return []
    rows = [row for row in zip(*(arrays[name] for name in names), strict=True) if np.isfinite(row[3:]).all()]
    return [
        (f"{site} {role}", str(fmt), f"{sqnr_db:.1f} dB", *map(_percent, parts), f"{100 * bias:+.2f} %")
        for site, role, fmt, sqnr_db, *parts, bias in sorted(rows, key=lambda row: row[3])[:MOST_ERRORS]
    ]


def parameter_rows(arrays: Mapping[str, NDArray[Any]]) -> list[tuple[str, ...]]:
    """Return name, lost updates and share of unchanged weights for each parameter that is stored in few bits.

    The list is empty if the optimizer stores float32. Parameters that lost most come first.
    """
    names = [f"parameters.{name}" for name in ("name", "lost", "at_first")]
    if not arrays.keys() >= set(names):
        return []
    rows = zip(*(arrays[name] for name in names), strict=True)
    return [(str(name), _percent(lost), _percent(at_first)) for name, lost, at_first in rows]


def _percent(share: float) -> str:
    if not math.isfinite(share):
        return "-"
    # Only a share of exactly 1 is shown as 100 %. Therefore 99.96 % is shown as 99.9 %.
    return ALL if share == 1 else f"{min(100 * share, 99.9):.1f} %"


def _heat(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any] | None:
    """Return the heat map of a cell's gradients; None if nothing was recorded or rounded."""
    lost = lost_by_site(arrays)
    if lost is None or not lost[1] or not len(lost[0]):
        return None
    steps, sites, shares = lost
    more = len(sites) - MOST_SITES
    if more > 0:
        # The sites are evenly spaced, so that the whole depth of the network is shown.
        chosen = np.linspace(0, len(sites) - 1, MOST_SITES).round().astype(int)
        sites, shares = [sites[i] for i in chosen], shares[:, chosen]
    address = f"data:image/png;base64,{base64.b64encode(heat_png(shares.T)).decode()}"
    return {"address": address, "sites": sites, "last": steps[-1], "more": max(more, 0), "none": np.isnan(shares).any()}


def _value(value: Any) -> tuple[str, str]:
    """Return the text that is shown, and the key by which the page sorts: "" comes last."""
    if isinstance(value, bool):
        return ("yes" if value else "no"), str(int(value))
    if isinstance(value, int | float):
        # An option may be any integer, and an integer beyond float64 cannot be a key for sorting.
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            return str(value), ""
        if not math.isfinite(value):
            return str(value), ""
        return (str(value) if isinstance(value, int) else f"{value:.4g}"), repr(float(value))
    return ("-", "") if value is None else (str(value), str(value))
