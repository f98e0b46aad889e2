"""Pictures of a sweep's results: select the data and pass it to a figure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ada_loss.lab.cells.cell_formats import BASELINE
from ada_loss.lab.results import figures
from ada_loss.lab.results.cell_pages import lost_by_site
from ada_loss.lab.results.results import StoredResults
from ada_loss.lab.training.methods import scales_by_layer

__all__ = ["NothingToShow", "picture_layer_scales", "picture_metric", "picture_scales", "picture_underflow"]

# The largest number of files that are opened to find data for a picture.
MOST_READ = 500
MANY_CONSTANTS = 6  # if there are at least this many constant scales, they are drawn as a line


class NothingToShow(ValueError):
    """Raised if no cell has the data of a picture."""


def picture_metric(results: StoredResults, metric: str | None = None, where: Mapping[str, Any] | None = None) -> Any:
    """See `Results.plot_accuracy`."""
    table = results.table(metric=metric, where=where)
    own = results.float32
    # The figures get float32 under its usual name, even if the sweep gave it another name.
    table.places = {(BASELINE if fmt == own else fmt, method): v for (fmt, method), v in table.places.items()}
    factor = 100.0 if table.is_share else 1.0
    constants = [column for column in table.across if figures.is_constant(column)]
    if table.is_share and len(constants) >= MANY_CONSTANTS:
        return figures.plot_methods(table.places, table.title, factor)
    of_float32 = (v for (fmt, _), values in table.places.items() if fmt == BASELINE for v in values)
    baseline = [value for value in of_float32 if math.isfinite(value)]
    places = {place: values for place, values in table.places.items() if place[0] != BASELINE}
    return figures.plot_table(places or table.places, table.title, factor, baseline if places else ())


def picture_underflow(results: StoredResults, cell: str | None = None, role: str = "error") -> Any:
    """See `Results.plot_underflow`."""
    known = {row["id"]: row for row in results.rows()}
    if cell is None:
        cell = _lossiest(results, known)
    if cell not in known:
        raise NothingToShow(f"There is no cell {cell!r}. Known: {', '.join(known) or 'none yet'}.")
    arrays = results.telemetry(cell)
    lost = lost_by_site(arrays, role)
    if lost is None:
        raise NothingToShow(f"The cell {cell} recorded no sites. Give the sweep task_options={{'record_every': 4}}.")
    steps, sites, shares = lost
    return figures.plot_heat(steps, sites, 100 * shares, _words(known[cell]), "gradients lost in %", (0, 100))


def _lossiest(results: StoredResults, known: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the id of the recorded cell that lost the largest share of its gradients."""
    lossy = sorted((row for row in known.values() if row["underflow"]), key=lambda row: -row["underflow"])
    ids = [str(row["id"]) for row in lossy]
    # The search is lazy: files are opened one by one until one of them has a recording.
    recorded = (cell for cell in ids[:MOST_READ] if has_array(results, cell, "history.steps"))
    return next(recorded, ids[0] if ids else "with underflow")


def picture_scales(results: StoredResults, where: Mapping[str, Any] | None = None) -> Any:
    """See `Results.plot_scales`."""
    first: dict[str, Any] = {}
    tried = Counter[str]()
    for row in results.chosen_rows(where):
        name = f"{row['format']} {row['scaling']}"
        tried[name] += name not in first
        if name not in first and tried[name] <= MOST_READ:
            if "scales" in (arrays := results.readable_telemetry(row["id"], {"scales"}.__contains__)):
                first[name] = arrays["scales"]
    scaled = {name: scales for name, scales in first.items() if len(scales) and (scales != 1).any()}
    if not scaled:
        raise NothingToShow(f"No cell of {results.words} scaled its loss. Give the sweep a method that does: 'torch'.")
    return figures.plot_scales(scaled)


def picture_layer_scales(results: StoredResults, where: Mapping[str, Any] | None = None) -> Any:
    """See `Results.plot_layer_scales`."""
    # Other methods have no scales of layers, so their files are not opened.
    rows = [row for row in results.chosen_rows(where) if scales_by_layer(row["scaling"])]
    for row in rows[:MOST_READ]:
        arrays = results.readable_telemetry(row["id"])
        if "layers.steps" in arrays:
            sites = [str(site) for site in arrays["layers.site"]]
            steps, scales = arrays["layers.steps"].tolist(), arrays["layers.log2_scale"]
            return figures.plot_heat(steps, sites, scales, _words(row), "log2 of the scale")
    raise NothingToShow(
        f"No recorded cell of {results.words} scaled layer by layer. Give the sweep the method 'adaptive', and "
        f"task_options={{'record_every': 4}}."
    )


def has_array(results: StoredResults, cell: str, name: str) -> bool:
    """True if the telemetry of a cell can be read, and has an array of this name."""
    return name in results.readable_telemetry(cell, {name}.__contains__)


def _words(row: Mapping[str, Any]) -> str:
    return f"{row['format']} {row['rounding'].replace('_', ' ')}, {row['scaling']}, seed {row['seed']}"
