"""The results of a sweep as rows, and as tables of means over seeds."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import fpsim
from ada_loss.files import content_of, data_frame, folder_at
from ada_loss.lab.cells.cell_formats import BASELINE, label
from ada_loss.lab.cells.cells import AXES, is_configuration
from ada_loss.lab.cells.ledger import DAMAGED, Ledger, counted
from ada_loss.lab.cells.missing import read_snapshot
from ada_loss.lab.cells.names import names_of, read_names
from ada_loss.lab.cells.telemetry import read_telemetry
from ada_loss.lab.directions import Directions, hint_for, read_directions, stated
from ada_loss.lab.errors import in_line, printable
from ada_loss.lab.results.table import NoShare, Share, Table, is_share_by_name
from fpsim.checks import is_finite_number, refuse, require_flag, require_mapping, shown
from fpsim.insight.rows import Rows

__all__ = ["REASONS", "StoredResults", "first_metric", "read_reasons", "since", "telling_axes"]

# The column with the version of a cell's numbers, in a folder with several versions.
BITS = "bits_version"
# The file of the reasons why cells diverged or fell short, by id. It is next to the ledger, so that the ledger's rows
# and digests do not change.
REASONS = "reasons.json"
OF_A_CELL = ("skipped", "underflow", "seconds")  # columns of a row in addition to its settings and metrics
# A mean of shares, computed in float32, may exceed 1 by this much.
ROUNDED = 1e-5
RESULTS = ("id", "diverged", "reason", BITS, *OF_A_CELL)  # columns that no option and no metric may have


class StoredResults:
    """The current cells of a sweep's folder; opening it changes nothing.

    A metric with the name of another column, such as "format", is the column "metric.format", and an option with the
    name of a result, such as "seconds", is "option.seconds".

    A format has the name that the sweep gave it, or a short name; `names` maps descriptions to names.

    `missing` lists lost data of the folder, such as planned cells without a row. If data are lost, opening the folder
    warns.

    Control characters and newlines in names and settings are escaped, because they would reach a terminal. `cells` has
    them unescaped.

    out: the folder.
    minimize, maximize: metrics whose smaller, or larger, values are better; they override the sweep's statement, and
        the direction that a name implies.
    Raises FileNotFoundError if there is no ledger, ValueError if it cannot be read.
    """

    def __init__(
        self, out: str | os.PathLike[str], *, minimize: Sequence[str] = (), maximize: Sequence[str] = ()
    ) -> None:
        self.out = folder_at(out)
        self.directions = Directions(read_directions(self.out)) | stated(minimize, maximize)
        with Ledger(self.out / "ledger.sqlite", readonly=True) as ledger:
            self.cells, self.sessions, self.missing = read_snapshot(ledger, self.out)
        if self.missing:
            warnings.warn(f"{self.out}: {self.missing}", stacklevel=2)
        for cell in self.cells:
            # A damaged row may have no configuration, and a row with a valid digest may hold another object. Both are
            # shown as failures.
            if not is_configuration(cell["config"]):
                cell |= {"state": "failed", "metrics": {}, "error": DAMAGED, "damaged": 1}
                cell["config"] = {**dict.fromkeys(AXES, "?"), "options": {}}
        self._label, self._options = _OnceEach(lambda value: in_line(label(value))), _OnceEach(_columns_of)
        # Names of columns are decided once for all cells: a metric named "format" must not replace the format.
        columns = {*AXES, *RESULTS, *self._option_names()}
        named: dict[str, str] = {}
        for cell in self.cells:
            for name in cell["metrics"].keys() - named.keys():
                named[name] = _column(in_line(name), columns)
            cell["metrics"] = {named[name]: value for name, value in cell["metrics"].items()}
        self.counts = counted(self.cells)
        self.reasons = read_reasons(self.out)
        formats = {self._label(fmt): fmt for fmt in (cell["config"]["format"] for cell in self.cells)}
        names = names_of(formats.values(), read_names(self.out))
        # Names are escaped here, once, because they reach terminals, tables and the report.
        self.names = {in_line(words): in_line(name) for words, name in names.items()}

    @property
    def words(self) -> str:
        """Return the folder and the number of cells in each state, in words."""
        counts = {**self.counts, "missing": len(self.missing.cells)}
        words = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        return f"Results({str(self.out)!r}: {words or 'no cells'})"

    @property
    def old(self) -> str:
        """Return the number of results with another version of the numbers, and the changes; "" if there are none."""
        done = [cell["bits"] for cell in self.cells if cell["state"] == "done"]
        others = Counter(bits for bits in done if bits != fpsim.BITS)
        if not others:
            return ""
        counts = " and ".join(f"{count} of version {bits}" for bits, count in sorted(others.items()))
        return f"Of {len(done)} results, the numbers are {counts}; {since(others)}."

    def __str__(self) -> str:
        return "\n".join(
            [self.words, *filter(None, [self.old]), *(f"{table.title}\n{table}" for table in self.tables())]
        ).rstrip()

    __repr__ = __str__

    def __len__(self) -> int:
        return len(self.cells)

    def __bool__(self) -> bool:
        return True

    def rows(self) -> Rows:
        """Return a flat row for each finished cell: configuration, metrics, diverged, skipped, underflow, seconds.

        After a sweep with `why=True`, "reason" explains why the cell diverged or fell short; it is "" for other cells.
        If some cells have the numbers of another version of the library, "bits_version" is that version; see `old`.
        """
        return Rows(map(dict, self._rows))

    @cached_property
    def _rows(self) -> Rows:
        rows, is_mixed = Rows(), bool(self.old)
        for cell in self.cells:
            if cell["state"] == "done":
                row = {**self.settings_of(cell), **cell["metrics"], "diverged": bool(cell["diverged"])}
                row |= {name: cell[name] for name in OF_A_CELL}
                row |= {"reason": self.reasons.get(cell["id"], "")} if self.reasons else {}
                rows.append(row | ({BITS: cell["bits"]} if is_mixed else {}))
        return rows

    def settings_of(self, cell: Mapping[str, Any]) -> dict[str, Any]:
        """Return a cell's id and flat configuration: names of format and method, seed, options."""
        config = cell["config"]
        words = {axis: self._label(config[axis]) for axis in AXES if axis != "seed"}
        words["format"] = self.names[words["format"]]
        return {"id": cell["id"], **words, "seed": config["seed"], **self._options(config["options"])}

    def _option_names(self) -> list[str]:
        """Return the columns of options, in the order of the cells."""
        different = {id(options): options for options in (cell["config"]["options"] for cell in self.cells)}
        return [*dict.fromkeys(name for options in different.values() for name in self._options(options))]

    @property
    def float32(self) -> str:
        """Return the name of the baseline float32: "fp32", unless the sweep gave it another name."""
        return self.names.get(BASELINE, BASELINE)

    @property
    def legend(self) -> dict[str, str]:
        """Return descriptions of formats, {name: description}, without names that are their own description."""
        return {name: words for words, name in self.names.items() if name != words}

    def chosen_rows(self, where: Mapping[str, Any] | None) -> Rows:
        """Return the rows with these values, {column: value}; None for all. Raises ValueError for an unknown value."""
        if where is not None:
            require_mapping("where", where, "{'format': 'fp16'}")
        chosen = every = self._rows
        for name, value in (where or {}).items():
            value = self._named_format(value) if name == "format" else value
            rows = chosen
            # If a cell lacks an option of other cells, the value of this option is None for the cell.
            is_known = any(name in row for row in every)
            chosen = Rows(row for row in rows if is_known and _word(row.get(name)) == _word(value))
            if rows and not chosen:
                known = ", ".join(dict.fromkeys(str(row.get(name)) for row in rows if is_known))
                known = (
                    f"Its values: {known}"
                    if known
                    else f"Known columns: {', '.join(dict.fromkeys(key for row in every for key in row))}"
                )
                raise ValueError(f"No cell that is done has {shown(name)}={shown(label(value))}. {known}.")
        return chosen

    def _named_format(self, value: Any) -> Any:
        """Return the name of a format that is given by its description, or by its name in another case."""
        words = label(value)
        if words in self.names.values():
            return words
        return self.names.get(words) or next((n for n in self.names.values() if n.lower() == words.lower()), words)

    @property
    def settings(self) -> list[str]:
        """Return the columns that identify a training, without the seed: task, format, rounding, scaling, options."""
        return [*AXES[:-1], *self._option_names()]

    def failures(self) -> list[dict[str, Any]]:
        """Return the failed cells, with "error" and "traceback"."""
        return [cell for cell in self.cells if cell["state"] == "failed"]

    def to_frame(self) -> Any:
        """Return `rows` as a pandas.DataFrame."""
        return data_frame(self.rows())

    @property
    def metric(self) -> str:
        """Return the first metric of the task, which is the default of tables."""
        tasks = [cell["config"]["task"] for cell in self.cells if cell["metrics"]]
        if tasks:
            name = first_metric(self, [c["id"] for c in self.cells if c["config"]["task"] == tasks[0]])
            return self.shown(str(name))
        raise ValueError(
            f"{self.words} holds no metric: no training reached its end. Run more cells, or mend the task."
        )

    def named(self, metric: str | None) -> str:
        """Return the given metric; for None, the task's first metric. Raises TypeError for anything but a name."""
        if metric is not None and not isinstance(metric, str):
            raise TypeError(f"metric={shown(metric)} is not a string. Expected: the name of a metric, or None.")
        return self.metric if metric is None else self.shown(metric)

    def require_metric(self, metric: str) -> None:
        """Raise TypeError for anything but a string, ValueError for a metric that no finished cell has."""
        self.named(metric)
        known = dict.fromkeys(name for cell in self.cells for name in cell["metrics"])
        if known and not any(metric in row for row in self.rows()):
            raise ValueError(refuse(f"Unknown metric {shown(metric)}", known, word=metric))

    def shown(self, metric: str) -> str:
        """Return a metric's name. An accuracy's name is marked as `Share` or `NoShare`, depending on its values."""
        if not is_share_by_name(metric):
            return metric
        values = [v for cell in self.cells if is_finite_number(v := cell["metrics"].get(metric))]
        if not values:
            return metric
        return Share(metric) if all(-ROUNDED <= v <= 1 + ROUNDED for v in values) else NoShare(metric)

    def best(self, metric: str | None = None, *, largest: bool | None = None) -> dict[str, Any]:
        """Return the row with the best value of a metric, without NaN and diverged trainings.

        metric: by default the task's first.
        largest: whether a larger value is better; None for the metric's stated direction, or the direction of its name.
        Raises ValueError if no cell has a number, and if the metric's direction is unknown.
        """
        if largest is not None:
            require_flag("largest", largest)
        name = self.named(metric)
        rows = [row for row in self.rows() if not row["diverged"] and not math.isnan(_number(row, name))]
        if not rows:
            raise ValueError(
                f"No cell of {self.words} has a number for the metric {shown(name)}, of those that did not diverge. "
                f"Known: {self.metric}."
            )
        sign = self.directions.sign(name) if largest is None else (1 if largest else -1)
        if not sign:
            raise ValueError(f"Nothing tells whether a larger or a smaller {name} is better. {hint_for(name)}")
        return max(rows, key=lambda row: sign * row[name])

    def table(
        self,
        rows: str = "format",
        columns: str = "scaling",
        metric: str | None = None,
        where: Mapping[str, Any] | None = None,
    ) -> Table:
        """Return a table with mean and standard deviation of a metric over the seeds.

        As in the verdict, a metric of a diverged training is NaN, whatever its value is; other columns keep their
        values.

        rows, columns: "task", "format", "rounding", "scaling", "seed", or an option of the training.
        metric: by default the task's first; also "underflow", "skipped" or "seconds".
        where: only cells with these values, such as {"rounding": "stochastic"}.
        Raises ValueError for a column or value that no cell has, and if the mean would be over cells that differ in
        more than the seed.
        """
        selected = self.chosen_rows(where)
        name = self.named(metric)
        for axis in (rows, columns, name):
            known = ", ".join(dict.fromkeys(key for row in selected for key in row))
            if not isinstance(axis, str):
                raise TypeError(f"The column {shown(axis)} is not a string. Known: {known}.")
            if selected and axis not in set().union(*selected):
                raise ValueError(f"Unknown column {shown(axis)}. Known: {known}.")
        places_asked = _count(selected, [rows, columns])
        for axis in self.settings:
            values = list(dict.fromkeys(str(row.get(axis)) for row in selected))
            if len(values) > 1 and _count(selected, [rows, columns, axis]) > places_asked:
                raise ValueError(
                    f"The cells differ in {axis} ({', '.join(values)}) too, and a mean over those says nothing. "
                    f"Choose one with where={{{axis!r}: {values[0]!r}}} (--where {axis}={values[0]}), or make it the "
                    f"rows or the columns."
                )
        places: dict[tuple[str, str], list[float]] = {}
        for row in selected:
            is_lost = row["diverged"] and name not in OF_A_CELL
            value = math.nan if is_lost else _number(row, name)
            places.setdefault((str(row.get(rows)), str(row.get(columns))), []).append(value)
        down, across = ([*dict.fromkeys(place[i] for place in places)] for i in (0, 1))
        chosen = {k: label(v) for k, v in (where or {}).items()}
        return Table(rows, columns, name, down, across, places, chosen, self.directions, self.names)

    def tables(self, metric: str | None = None) -> list[Table]:
        """Return a `table` of formats and scaling methods for each combination of other columns in which cells differ.

        A column that earlier columns determine is omitted, such as options that follow from the task. The list is empty
        if no training finished.

        metric: by default the first of each task.
        """
        all_rows = self._rows
        if metric is not None:
            self.require_metric(metric)
        if not any(cell["metrics"] for cell in self.cells):
            return []
        others = [*AXES[:1], "rounding", *self._option_names()]
        varying: list[str] = []
        for axis in others:
            # The default rounding follows from format and scaling, so it distinguishes no further tables.
            before = [*varying, "format", "scaling"] if axis == "rounding" else varying
            if _count(all_rows, [*before, axis]) > max(_count(all_rows, before), 1):
                varying.append(axis)
        groups = dict.fromkeys(tuple((axis, str(row.get(axis))) for axis in varying) for row in all_rows)
        tables = []
        for group in groups:
            rows = self.chosen_rows(dict(group))
            first = metric or first_metric(self, [row["id"] for row in rows])
            if first and any(first in row for row in rows):
                tables.append(self.table(metric=first, where=dict(group)))
        return tables

    def cell(self, cell: str) -> dict[str, Any]:
        """Return the cell with an id, as in `cells`. Raises ValueError for an unknown id."""
        if not isinstance(cell, str):
            raise TypeError(f"cell={shown(cell)} is not a string. Expected: the id of a cell.")
        if cell not in self._by_id:
            raise ValueError(f"cell={shown(cell)} is not in {shown(str(self.out))}. Expected: the id of a cell.")
        return self._by_id[cell]

    @cached_property
    def _by_id(self) -> dict[str, dict[str, Any]]:
        return {cell["id"]: cell for cell in self.cells}

    def telemetry(self, cell: str) -> dict[str, np.ndarray[Any, Any]]:
        """Return the arrays of a cell's file: "losses" and "scales" of each step, "skipped", and recordings.

        With `record_every`, "history.underflow" and similar arrays have a row for each step of "history.steps", and a
        column for each entry of "sites.site" and "sites.role". If each layer has a scale, "layers.log2_scale" has a row
        for each entry of "layers.steps", and a column for each entry of "layers.site".

        cell: the id of the cell.
        Raises ValueError for a file that is missing or damaged.
        """
        return read_telemetry(self.out, cell, self.cell(cell)["telemetry_sha256"])

    def readable_telemetry(
        self, cell: str, is_wanted: Callable[[str], bool] | None = None
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Return `telemetry`, or {} if the file cannot be read, so that callers can choose another cell."""
        try:
            return read_telemetry(self.out, cell, self.cell(cell)["telemetry_sha256"], is_wanted)
        except ValueError:
            return {}


def read_reasons(out: Path) -> dict[str, str]:
    """Return the reasons why cells diverged or fell short, by id; {} without a file. Raises ValueError for damage."""
    try:
        reasons = json.loads(content_of(out / REASONS))
        if not isinstance(reasons, dict):
            raise ValueError("it is not a mapping")
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{out / REASONS} is damaged: {error}. Delete it; `--why` writes it again.") from None
    return {str(cell): printable(reason) for cell, reason in reasons.items()}


def since(versions: Iterable[int]) -> str:
    """Return the changes of numbers since some versions, in words.

    >>> since([fpsim.BITS + 1])
    'a newer release than this one computed them'
    """
    if max(versions) > fpsim.BITS:
        return "a newer release than this one computed them"
    return f"this release computes version {fpsim.BITS}, with other numbers of {fpsim.changes_since(min(versions))}"


def _count(rows: list[dict[str, Any]], axes: list[str]) -> int:
    """Return the number of combinations of values that the rows have in some columns."""
    return len({tuple(map(str, map(row.get, axes))) for row in rows})


def first_metric(results: StoredResults, cells: Iterable[str]) -> str | None:
    """Return the most frequent first metric of the cells with these ids; None if no cell has a metric."""
    firsts = Counter(next(iter(metrics)) for cell in cells if (metrics := results.cell(cell)["metrics"]))
    return max(firsts, key=lambda name: firsts[name], default=None)


def telling_axes(axes: Iterable[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings in which rows differ, except options that the task determines."""
    telling = [axis for axis in axes if len({str(row.get(axis)) for row in rows}) > 1]
    if "task" not in telling:
        return telling
    pairs = {axis: {(str(row.get("task")), str(row.get(axis))) for row in rows} for axis in telling}
    return [axis for axis in telling if axis in AXES or len(pairs[axis]) > len(pairs["task"])]


class _OnceEach:
    """Call a function once for each object: many cells share the objects of their settings, see `Configs`."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self._known: dict[str | int, tuple[Any, Any]] = {}

    def __call__(self, value: Any) -> Any:
        key = value if isinstance(value, str) else id(value)
        if key not in self._known:
            # The object is stored too. If it were deleted, another object could get its id.
            self._known[key] = value, self._function(value)
        return self._known[key][1]


def _columns_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as {column: value}."""
    return {_option(name): in_line(value) if isinstance(value, str) else value for name, value in options.items()}


def _option(name: str) -> str:
    return f"option.{name}" if name in RESULTS else in_line(name)


def _column(metric: str, columns: set[str]) -> str:
    """Return the column of a metric that is added to these columns."""
    while metric in columns:
        metric = f"metric.{metric}"
    return metric


def _number(row: Mapping[str, Any], name: str) -> float:
    """Return a number of a row; NaN if its training returned none."""
    value = row.get(name)
    if isinstance(value, str):
        raise ValueError(f"The column {name!r} holds words: {value!r}. Name one of numbers, a metric or 'underflow'.")
    return math.nan if value is None else value


def _word(value: Any) -> str:
    """Return a value as a word that does not depend on its spelling: 0, 0.0 and "0.0" are equal; None is "None"."""
    try:
        return label(value if isinstance(value, bool) else float(value))
    # OverflowError is raised for an integer beyond float64.
    except (TypeError, ValueError, OverflowError):
        return in_line(label(value))
