"""A table of a sweep: mean and deviation of a metric over the cells, by two columns."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ada_loss.files import csv_bytes, data_frame, strict_json
from ada_loss.lab.directions import Directions
from fpsim.checks import refuse

__all__ = ["NoShare", "Share", "Table", "heading", "is_share", "is_share_by_name", "mean_and_deviation", "mean_of"]

# Metrics with these whole names are shown in %.
SHARES = ("accuracy", "underflow")
# A metric between these values is shown without a power of ten.
LEAST_PLAIN, MOST_PLAIN = 1e-4, 1e7
# A metric with one of these words in its name is shown in % if all its values are between 0 and 1.
SHARE_WORDS = {"acc", "accuracy"}


class Share(str):
    """The name of a metric that is a share and is shown in %."""


class NoShare(str):
    """The name of a metric that is not a share despite its name, such as an accuracy from 0 to 100."""


def is_share(metric: str) -> bool:
    """True if a metric is shown in %.

    >>> is_share("accuracy"), is_share("acc"), is_share(Share("acc")), is_share(NoShare("accuracy"))
    (True, False, True, False)
    """
    return isinstance(metric, Share) or (metric in SHARES and not isinstance(metric, NoShare))


def is_share_by_name(metric: str) -> bool:
    """True if a metric may be a share by its name. The values of the metric then decide.

    >>> [name for name in ("val_acc", "testAccuracy", "top5_acc", "accelerate", "loss") if is_share_by_name(name)]
    ['val_acc', 'testAccuracy', 'top5_acc']
    """
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", metric)
    return any(word.lower() in SHARE_WORDS for word in words)


class Table:
    """A metric by two columns: mean, standard deviation and number of cells for each pair of values.

    rows, columns: the names of the two columns.
    metric: the name of the metric.
    down, across: the values of the columns, in order.
    places: {(row, column): the values of its cells}.
    where: the values by which the cells were chosen, for the title.
    directions: the directions of metrics, larger or smaller is better; by the metric's name if not given.
    names: {description: name} of formats, so that an entry is found by its format's name or description.
    """

    def __init__(
        self,
        rows: str,
        columns: str,
        metric: str,
        down: Sequence[str],
        across: Sequence[str],
        places: dict[tuple[str, str], list[float]],
        where: Mapping[str, str] | None = None,
        directions: Directions | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._names = dict(names or {})
        self.directions = directions or Directions()
        self.rows, self.columns, self.metric, self.where = rows, columns, metric, dict(where or {})
        self.down, self.across, self.places = list(down), list(across), places

    def mean(self, row: str, column: str) -> float:
        """Return the mean of an entry; NaN if a value is NaN, or if there are no values."""
        values = self.places.get(self._place(row, column))
        return mean_of(values) if values else math.nan

    def count(self, row: str, column: str) -> int:
        """Return the number of cells in an entry."""
        return len(self.places.get(self._place(row, column), ()))

    def _place(self, row: str, column: str) -> tuple[str, str]:
        """Return the key of an entry in `places`; a format is found by its name or its description."""
        known = row in self.down, column in self.across
        return row if known[0] else self._names.get(row, row), column if known[1] else self._names.get(column, column)

    def deviation(self, row: str, column: str) -> float:
        """Return the standard deviation of the sample; NaN for fewer than two values, or if a value is not finite."""
        values = self.places.get(self._place(row, column), [])
        return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan

    def text(self, row: str, column: str, plus_minus: str = " ± ") -> str:
        """Return an entry as text: mean and deviation in the unit of `heading`, or "-" if the entry has no cells."""
        if self._place(row, column) not in self.places:
            return "-"
        return mean_and_deviation(self.metric, self.mean(row, column), self.deviation(row, column), plus_minus)

    @property
    def is_share(self) -> bool:
        """True if the metric is shown in %."""
        return is_share(self.metric)

    @property
    def title(self) -> str:
        """Return the metric with its unit, "lower is better" if this holds, and the values that selected the cells."""
        better = self.directions.words(self.metric)
        words = [
            heading(self.metric),
            *filter(None, [better]),
            *(f"{name} {value}" for name, value in self.where.items()),
        ]
        return ", ".join(words)

    def to(self, kind: str) -> str:
        """Return the table as text. kind: "markdown", "latex", "csv" or "json"."""
        writers = {"markdown": self.to_markdown, "latex": self.to_latex, "csv": self.to_csv, "json": self.to_json}
        if kind not in writers:
            raise ValueError(refuse(f"Unknown kind of table {kind!r}", writers, word=kind))
        return writers[kind]()

    def lines(self) -> list[dict[str, Any]]:
        """Return a dictionary for each entry: row, column, mean, deviation, number of cells; shares are not in %."""
        names = (self.rows, self.columns, f"{self.metric} mean", f"{self.metric} deviation", "cells")
        return [
            dict(zip(names, (row, column, self.mean(row, column), self.deviation(row, column), len(values))))
            for (row, column), values in self.places.items()
        ]

    def to_json(self) -> str:
        """Return `lines` as JSON; null for numbers that are not finite."""
        return strict_json(self.lines()) + "\n"

    def __str__(self) -> str:
        return self.to_markdown()

    __repr__ = __str__

    def __len__(self) -> int:
        return len(self.down)

    def __bool__(self) -> bool:
        return True

    def to_frame(self) -> Any:
        """Return `lines` as a pandas.DataFrame."""
        return data_frame(self.lines())

    def plot(self) -> Any:
        """Return a figure: a dot for each value, with mean and standard deviation; needs matplotlib."""
        from ada_loss.lab.results.figures import plot_table

        return plot_table(self.places, self.title, 100.0 if self.is_share else 1.0)

    def to_markdown(self) -> str:
        """Return a Markdown table."""
        lines = [f"| {self.rows} \\ {self.columns} | " + " | ".join(self.across) + " |"]
        lines.append("|---" + "|---:" * len(self.across) + "|")
        for row in self.down:
            lines.append(f"| {row} | " + " | ".join(self.text(row, column) for column in self.across) + " |")
        return "\n".join(lines) + "\n"

    def to_latex(self) -> str:
        """Return a LaTeX table with a caption; its rules are those of the package booktabs."""
        counts = sorted({len(values) for values in self.places.values()})
        seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}" if counts else "no"
        trainings = f"{seeds} training{'s' * (seeds != '1')}"
        what = f"mean and standard deviation of {trainings}" if counts[-1:] > [1] else f"of {trainings} each"
        lines = [r"% \usepackage{booktabs}", r"\begin{table}", r"\centering"]
        lines.append(rf"\caption{{{latex(self.title)}: {what}}}")
        lines += [rf"\begin{{tabular}}{{l{'r' * len(self.across)}}}", r"\toprule"]
        lines.append(" & ".join(map(latex, [f"{self.rows} \\ {self.columns}", *self.across])) + r" \\")
        lines.append(r"\midrule")
        for row in self.down:
            places = (self.text(row, column, r" $\pm$ ") for column in self.across)
            lines.append(" & ".join([latex(row), *places]) + r" \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"

    def to_csv(self) -> str:
        """Return `lines` as the content of a CSV file."""
        lines = self.lines()
        return csv_bytes(lines, list(lines[0]) if lines else []).decode()


def heading(metric: str) -> str:
    """Return a metric with its unit.

    >>> heading("accuracy"), heading("loss")
    ('accuracy in %', 'loss')
    """
    return f"{metric} in %" if is_share(metric) else metric


def mean_of(values: Collection[float]) -> float:
    """Return the mean of any numbers; NaN if one of them is NaN, or if both inf and -inf are among them.

    >>> mean_of([1.0, 2.0]), mean_of([1.0, math.inf]), mean_of([math.inf, -math.inf])
    (1.5, inf, nan)
    """
    if not all(map(math.isfinite, values)):
        # math.fsum would raise an error for inf together with -inf, where `sum` returns NaN.
        return sum(values) / len(values)
    try:
        return math.fsum(values) / len(values)
    # The sum exceeds float64, but the mean does not.
    except OverflowError:
        return math.fsum(value / len(values) for value in values)


def mean_and_deviation(metric: str, mean: float, deviation: float = math.nan, plus_minus: str = " ± ") -> str:
    """Return a mean with its deviation, in the unit of `heading`; the mean alone if the deviation is NaN.

    A metric that is not a share has four decimals, and more below 0.1. A tiny or huge metric has a power of ten.

    >>> mean_and_deviation("accuracy", 0.975, 0.004), mean_and_deviation("loss", 0.975)
    ('97.5 ± 0.4', '0.9750')
    >>> mean_and_deviation("mse", 0.00123, 0.00004), mean_and_deviation("mse", 1.23e-8, 4e-10)
    ('0.001230 ± 0.000040', '1.230e-08 ± 4.0e-10')
    """
    if is_share(metric):
        mean, deviation, form, small = 100 * mean, 100 * deviation, ".1f", ".1f"
    else:
        size = max(abs(value) for value in (mean, deviation, 0.0) if math.isfinite(value))
        # The larger of mean and deviation decides, so that both have the same number of decimals.
        is_plain = not size or LEAST_PLAIN <= size < MOST_PLAIN
        digits = max(4, 3 - math.floor(math.log10(size))) if size and is_plain else 4
        form, small = (f".{digits}f",) * 2 if is_plain else (".3e", ".1e")
    words = f"{mean:z{form}}" if math.isfinite(mean) else str(mean)
    return words if math.isnan(deviation) else f"{words}{plus_minus}{deviation:{small}}"


LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        **{c: f"\\{c}" for c in "_%&#${}"},
    }
)


def latex(text: str) -> str:
    return text.translate(LATEX)
