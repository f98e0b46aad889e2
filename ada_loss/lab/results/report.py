"""The report of a sweep: one self-contained HTML file, for a browser without a network."""

from __future__ import annotations

import base64
import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ada_loss.files import strict_json, write_atomically
from ada_loss.lab.cells.cells import AXES
from ada_loss.lab.results.cell_pages import cell_page
from ada_loss.lab.results.comparison import in_units, per_cent
from ada_loss.lab.results.curves import CurveReader
from ada_loss.lab.results.drawings import curve_panels, difference_panels
from ada_loss.lab.results.figures import figure_bytes, in_the_dark
from ada_loss.lab.results.judgement import LEAST_SEEDS
from ada_loss.lab.results.pictures import (
    NothingToShow,
    picture_layer_scales,
    picture_metric,
    picture_scales,
    picture_underflow,
)
from ada_loss.lab.results.results import StoredResults, telling_axes
from ada_loss.lab.results.statements import SECTIONS, WORSE, Combination, Verdict
from ada_loss.lab.results.table import Table, is_share, mean_and_deviation, mean_of
from ada_loss.lab.results.verdict import verdicts
from fpsim.checks import is_finite_number, is_number, pip_install
from fpsim.insight.pictures import apart_from_pyplot

try:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup
except ImportError as error:
    raise ImportError(f"A report needs {error.name}, which is not installed: {pip_install('lab')}.") from None

__all__ = ["OverviewRow", "overview", "write_report"]

# The largest number of cells that the page lists: each takes 2 kB and a millisecond.
MOST_CELLS = 5000
# The largest number of files that are read for the curves of one name.
MOST_READ = 2000
# The largest number of failures that are listed separately, and of links to the cells of each failure.
MOST_FAILURES, MOST_LINKS = 200, 30
# The largest number of cells whose curves are drawn: a curve takes 2 kB.
MOST_CURVES = 500
MOST_NAMES = 8  # the largest number of names whose curves are drawn
MANY = 5  # if there are at least this many formats, they are counted, not named
PHONE = 4.4  # the width of a figure on a phone, in inches
PARTS = {"style": "css", "script": "js"}  # files next to the template


def write_report(results: StoredResults, path: Path, question: str | None = None) -> Path:
    """Write the report of a sweep atomically; return its path.

    results: the results of the sweep.
    path: the path of the HTML file.
    question: the question that the sweep should answer; by default derived from the configurations.
    Raises ValueError if the ledger holds no cell.
    """
    if not results.cells:
        raise ValueError(f"{results.words} has nothing to report. Run the sweep first.")
    environment = Environment(
        loader=PackageLoader("ada_loss.lab.results", "."),
        # Names and errors may come from a foreign task or ledger.
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    rows = {row["id"]: row for row in results.chosen_rows(None)}
    chosen = _listed(results, rows)
    pages = enumerate(chosen)
    cells = [
        cell_page(results, n, results.cells[n], rows.get(results.cells[n]["id"]), i < MOST_CURVES) for i, n in pages
    ]
    listed = {cell["id"] for cell in cells}
    answers = verdicts(results)
    drawn = (difference_panels(answer, listed) for answer in answers)
    differences = [panels for panels in drawn if panels is not None]
    parts = {name: (Path(__file__).parent / f"report.{kind}").read_text() for name, kind in PARTS.items()}
    content = environment.get_template("report.html.j2").render(
        **{name: Markup(text) for name, text in parts.items()},
        security=_security(**parts),
        title=results.out.resolve().name,
        tasks=", ".join(dict.fromkeys(str(cell["config"]["task"]) for cell in results.cells)),
        question=question or _question(results),
        verdicts=[Markup(verdict.to_html()) for verdict in answers],
        differences=differences,
        overviews=[
            (verdict, [_of_listed(row, listed) for row in overview(results, verdict)])
            for verdict in answers
            if verdict.combinations
        ],
        legend=results.legend,
        curves=_curves(results, cells),
        data=Markup(_data(cells)),
        lower=strict_json([name for name in _names(cells) if results.directions.words(name.split("/")[0])]),
        counts=results.counts,
        old=results.old,
        to_come=results.counts["planned"] + results.counts["running"],
        diverged=sum(row["diverged"] for row in rows.values()),
        seconds=sum(row["seconds"] or 0 for row in rows.values()),
        shared=_shared(results),
        tables=_tables(results),
        pictures=_pictures(results, with_metrics=not differences),
        failures=_failures(results, rows, cells),
        columns=_columns(rows.values()),
        cells=cells,
        without_curves=max(len(cells) - MOST_CURVES, 0),
        unlisted=len(results.cells) - len(cells),
        sessions=[_session(session) for session in results.sessions],
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    write_atomically(path, content.encode())
    return path


def _listed(results: StoredResults, rows: Mapping[str, Mapping[str, Any]]) -> list[int]:
    """Return the indices of the cells that the page lists, in order: at most `MOST_CELLS`.

    Failed and diverged cells are chosen first, then the first of the other cells.
    """
    if len(results.cells) <= MOST_CELLS:
        return [*range(len(results.cells))]
    went_wrong = [_is_wrong(cell, rows) for cell in results.cells]
    places = sorted(range(len(results.cells)), key=lambda place: not went_wrong[place])[:MOST_CELLS]
    return sorted(places)


def _is_wrong(cell: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> bool:
    return cell["state"] == "failed" or bool(cell["id"] in rows and rows[cell["id"]]["diverged"])


def _of_listed(row: OverviewRow, listed: Collection[str]) -> OverviewRow:
    return row._replace(cells=tuple(cell for cell in row.cells if cell in listed))


def _security(style: str, script: str) -> str:
    """Return the page's Content-Security-Policy: only its own style and script, by their hashes, and its pictures.

    W3C CSP Level 3, 2.3.1: 'sha256-...' allows the inline element with that content.
    """
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    allowed = {"default-src": "'none'", "style-src": f"'sha256-{hashes[0]}'", "script-src": f"'sha256-{hashes[1]}'"}
    allowed |= {"img-src": "data:", "base-uri": "'none'", "form-action": "'none'"}
    return "; ".join(f"{name} {source}" for name, source in allowed.items())


def _question(results: StoredResults) -> str:
    """Return the question that the configurations answer, in words."""
    rows = [results.settings_of(cell) for cell in results.cells]
    values = {axis: [*dict.fromkeys(str(row[axis]) for row in rows)] for axis in AXES}
    words = f"What do {_counted(values['format'], 'format')} do to the training of {_list(values['task'])}"
    if values["scaling"] != ["none"]:
        words += f" under {_counted(values['scaling'], 'scaling method')}"
    words += f"? Rounded {_list([r.replace('_', ' ') for r in values['rounding']])}; "
    return words + f"{len(rows)} trainings with {len(values['seed'])} seed{'s' * (len(values['seed']) > 1)}."


def _counted(words: Sequence[str], kind: str) -> str:
    """Return the names of formats or methods; if there are many, only their number, because the page lists them."""
    return f"the {kind}s {_list(words)}" if len(words) < MANY else f"{len(words)} {kind}s"


def _list(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _tables(results: StoredResults) -> list[dict[str, Any]]:
    """Return the tables of the task's first metric, and of the underflow if there is any."""
    if not any(cell["metrics"] for cell in results.cells):
        return []
    metrics = [None, *(["underflow"] if any(row["underflow"] for row in results.rows()) else [])]
    tables = [table for metric in metrics for table in results.tables(metric)]
    return [
        {
            "title": table.title,
            "corner": f"{table.rows} \\ {table.columns}",
            "across": table.across,
            "lines": _lines(table),
        }
        for table in tables
    ]


def _lines(table: Table) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Return the rows of a table: (name, [(text, whether it is within a standard deviation of the row's best)]).

    Only an entry with the largest number of seeds in its row can be the best: fewer seeds may be the easier ones.
    """
    lines = []
    for row in table.down:
        counts = {column: table.count(row, column) for column in table.across}
        means = {column: table.mean(row, column) for column in counts if counts[column] == max(counts.values())}
        sign = table.directions.sign(table.metric)
        known = {column: sign * mean for column, mean in means.items() if sign and math.isfinite(mean)}
        best = max(known, key=lambda column: known[column], default="")
        spread = table.deviation(row, best) if len(known) > 1 else math.nan
        # `least` is NaN for a single entry or seed: no comparison with NaN is true, so nothing is bold.
        least = known.get(best, math.nan) - spread
        texts = [(table.text(row, column), known.get(column, math.nan) >= least) for column in table.across]
        lines.append((row, texts))
    return lines


def _pictures(results: StoredResults, with_metrics: bool) -> list[dict[str, Any]]:
    """Return the pictures for which there is data, each for a light and a dark page, or with the reason of a failure.

    with_metrics: whether the metrics are drawn too, because the page has no drawing of differences from float32.
    """
    wanted: list[tuple[str, Callable[[], Any]]] = []
    for table in results.tables() if with_metrics else []:
        words = f"{table.title}: each seed a dot, mean and standard deviation"
        wanted.append((words, partial(picture_metric, results, where=table.where)))
    moved = [row["format"] for row in results.rows() if row["scaling"] != "none"]
    last = {"format": moved[-1]} if moved else None
    wanted.append(("Where the training that lost most lost its gradients", partial(picture_underflow, results)))
    if last is not None and _has_a_moving_scale(results, moved[-1]):
        wanted.append((f"Loss scales in {moved[-1]}, first seed", partial(picture_scales, results, last)))
    wanted.append(("The scale of each layer's gradient", partial(picture_layer_scales, results, last)))
    drawn = []
    for words, plot in wanted:
        try:
            variants = {"light": _addresses(plot)}
            with in_the_dark():
                variants["dark"] = _addresses(plot)
        except NothingToShow:
            continue
        # The cause may be foreign telemetry, or names that cannot be drawn. The rest of the report is still shown.
        except Exception as error:
            drawn.append({"words": words, "variants": {}, "problem": f"{type(error).__name__}: {error}"})
        else:
            drawn.append({"words": words, "variants": variants, "problem": ""})
    return drawn


def _has_a_moving_scale(results: StoredResults, fmt: str) -> bool:
    """True if a loss scale of a format's trainings changes: a picture of constants would tell nothing."""
    rows = [row for row in results.chosen_rows(None) if row["format"] == fmt and row["scaling"] != "none"]
    for row in rows[:MOST_CURVES]:
        scales = results.readable_telemetry(row["id"], {"scales"}.__contains__).get("scales", np.empty(0))
        if len(scales) and (scales != scales[0]).any():
            return True
    return False


def _addresses(plot: Callable[[], Any]) -> tuple[str, str]:
    """Return a figure as two data URLs, wide and narrow."""
    with apart_from_pyplot():
        figure = plot()
    return _address(figure, None), _address(figure, PHONE)


def _address(figure: Any, width: float | None) -> str:
    """Return a figure as a data URL. width: the largest width in inches; None to leave the figure's width unchanged."""
    if width is not None:
        figure.set_size_inches(min(width, figure.get_figwidth()), figure.get_figheight())
    return f"data:image/svg+xml;base64,{base64.b64encode(figure_bytes(figure, 'svg')).decode()}"


def _shared(results: StoredResults) -> dict[str, str]:
    """Return the settings that all trainings share."""
    rows = [{k: v for k, v in results.settings_of(cell).items() if k != "id"} for cell in results.cells]
    return {name: str(value) for name, value in rows[0].items() if all(row.get(name) == value for row in rows)}


def _data(cells: Sequence[dict[str, Any]]) -> str:
    """Return the curves of the cells for the page's script, as JSON that cannot end an HTML element."""
    points = {cell["id"]: cell["points"] for cell in cells if cell["points"]}
    # "</script>" in a curve's name would end the element; "\u003c" is the same character in JSON.
    return strict_json(points).replace("<", "\\u003c")


def _names(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the curves that cells have."""
    return [*dict.fromkeys(name for cell in cells for name in cell["points"])]


def _curves(results: StoredResults, cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the panels for each name of a curve that a cell has, the loss first."""
    names = _names(cells)
    names.sort(key=lambda name: name != "loss")
    wanted = (names or ["loss"])[:MOST_NAMES]
    rows, listed = results.chosen_rows(None), {cell["id"] for cell in cells}
    axes = telling_axes(results.settings, rows)
    settings = Counter(tuple(str(row.get(axis)) for axis in axes) for row in rows)
    seeds = max(MOST_READ // max(len(settings), 1), 1)  # for each setting
    most_seeds = seeds if max(settings.values(), default=0) > seeds else None
    read = CurveReader(results)
    drawn = (curve_panels(results, name, read, most_seeds, listed) for name in wanted)
    return [panels for panels in drawn if panels is not None]


def _failures(
    results: StoredResults, rows: Mapping[str, Mapping[str, Any]], cells: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return each kind of failure with its cells: failed cells, diverged cells, and cells whose telemetry is lost.

    cells: the cells that the page lists and can link to, with "damage" if their telemetry was read and is lost.
    """
    listed = {cell["id"]: cell for cell in cells}
    failures: dict[str, dict[str, Any]] = {}
    for number, cell in enumerate(results.cells, 1):
        words = []
        if _is_wrong(cell, rows):
            state = "failed" if cell["state"] == "failed" else "diverged"
            words.append((state, cell["error"] or "a loss or a metric is not finite in the end"))
        if cell["id"] in listed and listed[cell["id"]]["damage"]:
            words.append(("telemetry lost", "its file is missing or damaged; run the sweep again: it repeats the cell"))
        for state, error in words:
            # Every message may differ, by an address or a number. Beyond the limit messages share one entry.
            if f"{state}: {error}" not in failures and len(failures) == MOST_FAILURES:
                state, error = "failed", "for other reasons"
            failure = failures.setdefault(
                f"{state}: {error}", {"state": state, "error": error, "count": 0, "cells": []}
            )
            failure["count"] += 1
            if cell["id"] in listed and len(failure["cells"]) < MOST_LINKS:
                failure["cells"].append((number, cell["id"]))
    return [*failures.values()]


def _columns(rows: Any) -> list[str]:
    """Return the columns of the table of cells: the columns in which cells differ, and format, scaling and seed."""
    rows = list(rows)
    if not rows:
        return ["format", "rounding", "scaling", "seed"]
    names = [*dict.fromkeys(name for row in rows for name in row)]
    varying = {name for name in names if len({str(row.get(name)) for row in rows}) > 1}
    return [name for name in names if (name in varying and name != "id") or name in ("format", "scaling", "seed")]


def _session(session: dict[str, Any]) -> dict[str, str]:
    """Return the environment of a driver's session, with a string for each entry."""
    try:
        started = datetime.fromtimestamp(session["started"], UTC).strftime("%Y-%m-%d %H:%M UTC")
    # A damaged row of the ledger may hold any number.
    except (OverflowError, OSError, ValueError):
        started = str(session["started"])
    known = session.get("versions")
    versions = ", ".join(f"{name} {v}" for name, v in known.items() if v) if isinstance(known, dict) else ""
    others = {k: str(v) for k, v in session.items() if k not in ("started", "versions") and v is not None}
    return {"started": started, **others, "versions": versions}


class OverviewRow(NamedTuple):
    """The row of a format, as text: name, best setting, and this setting's metric, difference and lost gradients.

    kind: "match", "above", "short" or "open", as in the verdict; "" for float32, and if nothing is judged.
    cells: the ids of the format's cells, under every setting.
    """

    format: str
    best: str
    metric: str
    difference: str
    lost: str
    kind: str
    cells: tuple[str, ...]


def overview(results: StoredResults, verdict: Verdict) -> list[OverviewRow]:
    """Return a row for float32 and a row for each format of a verdict, in the order of the sweep.

    The best setting of a format has the best mean difference from float32, paired by seed, among the settings with the
    fewest diverged seeds. Failed seeds count as diverged if fewer than three seeds have a number. Without float32, the
    best setting has the best mean. If the metric's direction is unknown, or no seed has a number, the row has "-".
    """
    rows = {row["id"]: row for row in results.rows()}
    values = [*verdict.baseline.values()]
    of_float32 = []
    if values:
        baseline = tuple(row["id"] for row in rows.values() if row["format"] == results.float32)
        of_float32.append(OverviewRow("float32", "", _metric(verdict.metric, values), "", "", "", baseline))
    settings: dict[str, list[Combination]] = {}
    for one in verdict.combinations:
        settings.setdefault(one.fmt, []).append(one)
    return of_float32 + [_row(fmt, chosen, verdict, rows) for fmt, chosen in settings.items()]


def _row(
    fmt: str, chosen: Sequence[Combination], verdict: Verdict, rows: Mapping[str, Mapping[str, Any]]
) -> OverviewRow:
    def numbers(one: Combination) -> list[float]:
        known = [rows[cell] for cell in one.cells if cell in rows and not rows[cell]["diverged"]]
        return [float(row[verdict.metric]) for row in known if is_finite_number(row.get(verdict.metric))]

    def differences(one: Combination) -> list[float]:
        return [value for value in one.comparison.differences.values() if math.isfinite(value)]

    # If a setting has no differences from float32, the means of the metric are compared instead.
    are_paired = all(differences(one) for one in chosen if numbers(one))

    # The share of seeds with a number comes first: otherwise the mean of the remaining seeds would flatter a setting
    # that diverges.
    def worth(one: Combination) -> tuple[float, float]:
        values = differences(one) if are_paired else numbers(one)
        seeds = one.seeds - len(one.silent) if len(numbers(one)) >= LEAST_SEEDS else one.asked
        return len(numbers(one)) / seeds, verdict.sign * mean_of(values) if values else -math.inf

    cells = tuple(cell for one in chosen for cell in one.cells)
    diverged, seeds = sum(one.comparison.diverged for one in chosen), sum(one.seeds for one in chosen)
    if len(chosen) > 1 and not any(map(numbers, chosen)):
        kind = "" if verdict.problem else "short" if diverged else "open"
        return OverviewRow(fmt, "-", "-", f"{diverged} of {seeds} diverged" if diverged else "-", "-", kind, cells)
    if not verdict.sign and len(chosen) > 1:
        return OverviewRow(fmt, "-", "-", "-", "-", "", cells)
    best = max(chosen, key=worth)
    mean = best.comparison.mean
    difference = in_units(verdict.metric, mean, unit=False, tolerance=verdict.tolerance) if math.isfinite(mean) else "-"
    if (known := len(numbers(best))) < best.asked and difference != "-":
        difference += f", {known} of {best.asked} seeds"
    if best.comparison.diverged:
        difference = f"{best.comparison.diverged} of {best.seeds} diverged"
    lost = [rows[cell]["underflow"] for cell in best.cells if cell in rows and is_number(rows[cell]["underflow"])]
    kind = next((kind for kind, outcomes in SECTIONS.items() if best.outcome in outcomes), "")
    kind = "short" if best.outcome in WORSE else kind
    return OverviewRow(
        fmt,
        best.rest,
        _metric(verdict.metric, numbers(best)),
        difference,
        per_cent(round(mean_of(lost), 3)) if lost else "-",
        "" if verdict.problem else kind,
        cells,
    )


def _metric(name: str, values: Sequence[float]) -> str:
    """Return mean and deviation as text, in % for shares."""
    if not values:
        return "-"
    is_finite = len(values) > 1 and all(map(math.isfinite, values))
    words = mean_and_deviation(name, mean_of(values), statistics.stdev(values) if is_finite else math.nan)
    return f"{words} %" if is_share(name) else words
