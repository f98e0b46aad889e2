"""What a sweep gave: its ledger as tables, over seeds."""

from __future__ import annotations

import io
import math
import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ada_loss.lab.results.table import Table
from ada_loss.lab.sweep.cells import label
from ada_loss.lab.sweep.ledger import Ledger
from ada_loss.lab.training.methods import scales_by_layer

__all__ = ["Results"]

MANY_CONSTANTS = 6  # scales that make a line
AXES = ("task", "format", "rounding", "scaling", "seed")


class Results:
    """The cells of a sweep's folder as they are now; opening it changes nothing.

    Raises FileNotFoundError where there is no ledger.
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.out = Path(out)
        with Ledger(self.out / "ledger.sqlite", readonly=True) as ledger:
            self.cells, self.sessions, self.counts = ledger.rows(), ledger.sessions(), ledger.counts()

    def __repr__(self) -> str:
        words = ", ".join(f"{count} {state}" for state, count in self.counts.items() if count)
        return f"Results({str(self.out)!r}: {words or 'no cells'})"

    def rows(self) -> list[dict[str, Any]]:
        """A flat row for each cell that is done: its configuration, its metrics, seconds, skipped, underflow."""
        found = []
        for cell in self.cells:
            if cell["state"] == "done":
                config = cell["config"]
                row = {"id": cell["id"], **{axis: label(config[axis]) for axis in AXES if axis != "seed"}}
                row |= {"seed": config["seed"], **config["options"], **cell["metrics"]}
                row |= {"diverged": bool(cell["diverged"])}
                found.append(row | {name: cell[name] for name in ("skipped", "underflow", "seconds")})
        return found

    def _chosen(self, where: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The rows with these values. Raises ValueError for a value that no row has."""
        found = self.rows()
        for name, value in where.items():
            rows, found = found, [row for row in found if name in row and _word(row[name]) == _word(value)]
            if rows and not found:
                known = ", ".join(dict.fromkeys(str(row[name]) for row in rows if name in row))
                known = f"Its values: {known}" if known else f"Known columns: {', '.join(rows[0])}"
                raise ValueError(f"No cell that is done has {name}={label(value)}. {known}.")
        return found

    def failures(self) -> list[dict[str, Any]]:
        """The cells that failed, with "error" and "traceback"."""
        return [cell for cell in self.cells if cell["state"] == "failed"]

    def to_frame(self) -> Any:
        """`rows` as a pandas.DataFrame."""
        import pandas

        return pandas.DataFrame(self.rows())

    @property
    def metric(self) -> str:
        """The first metric of the task: what tables show unless told otherwise."""
        for cell in self.cells:
            if cell["metrics"]:
                return next(iter(cell["metrics"]))
        raise ValueError(f"{self!r} holds no metric: no training came to its end. Run more cells, or see to the task.")

    def best(self, metric: str | None = None, *, largest: bool = True) -> dict[str, Any]:
        """The row with the best value of a metric; not-a-number is never best."""
        name = metric or self.metric
        rows = [row for row in self.rows() if not math.isnan(_number(row, name))]
        if not rows:
            raise ValueError(f"No cell of {self!r} has a number for the metric {name!r}. Known: {self.metric}.")
        return (max if largest else min)(rows, key=lambda row: row[name])

    def table(
        self,
        rows: str = "format",
        columns: str = "scaling",
        metric: str | None = None,
        where: Mapping[str, Any] | None = None,
    ) -> Table:
        """Mean and standard deviation of a metric over the seeds.

        rows, columns: "task", "format", "rounding", "scaling", "seed", or an option of the training. where: only cells
        with these values, {"rounding": "stochastic"}. Raises ValueError for what no cell has, and where cells that
        differ in something else would be averaged.
        """
        where = where or {}
        found = self._chosen(where)
        name = metric or self.metric
        for axis in (rows, columns, name):
            if found and axis not in set().union(*found):
                known = ", ".join(dict.fromkeys(key for row in found for key in row))
                raise ValueError(f"Unknown column {axis!r}. Known: {known}.")
        for axis in (*AXES[:-1], *dict.fromkeys(key for cell in self.cells for key in cell["config"]["options"])):
            values = list(dict.fromkeys(str(row.get(axis)) for row in found))
            if axis not in (rows, columns) and len(values) > 1:
                raise ValueError(
                    f"The cells differ in {axis} ({', '.join(values)}) too, and a mean over those says nothing. "
                    f"Choose one with where={{{axis!r}: {values[0]!r}}}, or make it the rows or the columns."
                )
        places: dict[tuple[str, str], list[float]] = {}
        for row in found:
            places.setdefault((str(row[rows]), str(row[columns])), []).append(_number(row, name))
        down, across = ([*dict.fromkeys(place[i] for place in places)] for i in (0, 1))
        return Table(rows, columns, name, down, across, places, {k: label(v) for k, v in where.items()})

    def tables(self, metric: str | None = None) -> list[Table]:
        """`table` of formats and scaling methods, one for each combination of what else the cells differ in.

        None where no training came to its end.
        """
        found = self.rows()
        if not any(cell["metrics"] for cell in self.cells):
            return []
        others = [*AXES[:1], "rounding", *dict.fromkeys(k for cell in self.cells for k in cell["config"]["options"])]
        varying = [axis for axis in others if len({str(row.get(axis)) for row in found}) > 1]
        groups = dict.fromkeys(tuple((axis, str(row.get(axis))) for axis in varying) for row in found)
        return [self.table(metric=metric, where=dict(group)) for group in groups]

    def plot_accuracy(self, metric: str | None = None, where: Mapping[str, Any] | None = None) -> Any:
        """A metric, the task's first unless named, by format and scaling method: each seed, mean and deviation.

        With many constants among the methods, a line over them, beside the methods that choose their scale.
        """
        from ada_loss.lab.results.figures import plot_table

        table = self.table(metric=metric, where=where)
        constants = [column for column in table.across if _is_number(column)]
        if table.is_share and len(constants) >= MANY_CONSTANTS:
            from ada_loss.lab.results.figures import plot_methods

            flat = ((place, value) for place, values in table.places.items() for value in values)
            return plot_methods([{"format": f, "method": m, "accuracy": value} for (f, m), value in flat])
        baseline = [v for (fmt, _), values in table.places.items() if fmt == "fp32" for v in values]
        places = {place: values for place, values in table.places.items() if place[0] != "fp32"}
        factor = 100.0 if table.is_share else 1.0
        return plot_table(places or table.places, table.title, factor, baseline if places else ())

    def plot_underflow(self, cell: str | None = None, role: str = "error") -> Any:
        """Where one training lost gradients, by site and step. cell: its id; the one that lost most, unless named.

        Raises ValueError where nothing was recorded; give the sweep task_options={"record_every": n}.
        """
        from ada_loss.lab.results.figures import plot_heat

        known = {row["id"]: row for row in self.rows()}
        if cell is None:
            lossy = sorted((row for row in known.values() if row["underflow"]), key=lambda row: -row["underflow"])
            ids = [row["id"] for row in lossy]
            recorded = (id for id in ids if "history.steps" in self._arrays(id))
            cell = next(recorded, ids[0] if ids else "with underflow")
        if cell not in known:
            raise ValueError(f"There is no cell {cell!r}. Known: {', '.join(known) or 'none yet'}.")
        arrays = self.telemetry(cell)
        if "history.steps" not in arrays:
            raise ValueError(f"The cell {cell} recorded no sites. Give the sweep task_options={{'record_every': 4}}.")
        chosen = np.flatnonzero(arrays["sites.role"] == role)[:: -1 if role in ("error", "weight_grad") else 1]
        lost, nonzero = (
            np.diff(arrays[f"history.{name}"][:, chosen], axis=0, prepend=0) for name in ("underflow", "nonzero")
        )
        with np.errstate(invalid="ignore"):
            shares = np.where(nonzero > 0, lost / nonzero, np.nan)
        sites = [str(site) for site in arrays["sites.site"][chosen]]
        steps = arrays["history.steps"].tolist()
        return plot_heat(steps, sites, 100 * shares, _words(known[cell]), "gradients lost in %", (0, 100))

    def plot_scales(self, where: Mapping[str, Any] | None = None) -> Any:
        """The loss scale over the steps, a line for each format and method, of the first seed."""
        from ada_loss.lab.results.figures import plot_scales

        first: dict[str, Any] = {}
        for row in self._chosen(where or {}):
            name = f"{row['format']} {row['scaling']}"
            if name not in first and "scales" in (arrays := self._arrays(row["id"])):
                first[name] = arrays["scales"]
        scaled = {name: scales for name, scales in first.items() if len(scales) and (scales != 1).any()}
        if not scaled:
            raise ValueError(f"No cell of {self!r} scaled its loss. Give the sweep a method that does: 'torch'.")
        return plot_scales(scaled)

    def plot_layer_scales(self, where: Mapping[str, Any] | None = None) -> Any:
        """The scale of each site's gradient, by site and step, of the first training with adaptive scaling.

        where: only cells with these values. Raises ValueError where no such training was recorded.
        """
        from ada_loss.lab.results.figures import plot_heat

        for row in self._chosen(where or {}):
            if not scales_by_layer(row["scaling"]):
                continue  # its file need not be read
            arrays = self._arrays(row["id"])
            if "layers.steps" in arrays:
                sites = [str(site) for site in arrays["layers.site"]]
                steps, scales = arrays["layers.steps"].tolist(), arrays["layers.log2_scale"]
                return plot_heat(steps, sites, scales, _words(row), "log2 of the scale")
        raise ValueError(
            f"No recorded cell of {self!r} scaled layer by layer. Give the sweep the method 'adaptive', and "
            f"task_options={{'record_every': 4}}."
        )

    def report(self, path: str | os.PathLike[str] | None = None, question: str | None = None) -> Path:
        """Write one HTML file with the tables, the pictures and every cell; gives its path.

        path: report.html in the sweep's folder, unless named. question: what the sweep was to answer, for the head.
        Raises ValueError for a ledger without cells.
        """
        from ada_loss.lab.results.report import write_report

        return write_report(self, Path(path) if path is not None else self.out / "report.html", question)

    def telemetry(self, cell: str) -> dict[str, np.ndarray[Any, Any]]:
        """The arrays of a cell's file; see `ada_loss.lab.sweep.cells.telemetry`.

        Raises ValueError for a file that is missing or damaged.
        """
        path = self.out / "telemetry" / f"{cell}.npz"
        try:
            with np.load(io.BytesIO(path.read_bytes())) as arrays:
                return dict(arrays)
        except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(
                f"The telemetry {path} is missing or damaged ({error}). Run the sweep again: it repeats that cell."
            ) from None

    def _arrays(self, cell: str) -> dict[str, np.ndarray[Any, Any]]:
        """`telemetry`, for a choice among cells: none where the file cannot be read."""
        try:
            return self.telemetry(cell)
        except ValueError:
            return {}


def _words(row: Mapping[str, Any]) -> str:
    return f"{row['format']} {row['rounding'].replace('_', ' ')}, {row['scaling']}, seed {row['seed']}"


def _number(row: Mapping[str, Any], name: str) -> float:
    """NaN where a training came to none."""
    value = row.get(name)
    if isinstance(value, str):
        raise ValueError(f"The column {name!r} holds words: {value!r}. Name one of numbers, a metric or 'underflow'.")
    return math.nan if value is None else value


def _word(value: Any) -> str:
    """One word for a value, however it was written: 0, 0.0 and "0.0" are one number."""
    try:
        return label(value if isinstance(value, bool) else float(value))
    except (TypeError, ValueError):
        return label(value)


def _is_number(word: str) -> bool:
    try:
        return float(word) > 0
    except ValueError:
        return False
