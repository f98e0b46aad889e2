"""Tools for the classics: statistics of rows over seeds, and panels whose lines have one style."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import sub, truediv
from statistics import mean, stdev
from typing import Any

from ada_loss.lab.results.figures import DASHES, colour
from fpsim.insight.pictures import new_picture

__all__ = [
    "Picture",
    "Row",
    "Rows",
    "Sentences",
    "below",
    "dots",
    "label",
    "level",
    "levels",
    "lines",
    "panels",
    "spread",
]

Row = dict[str, Any]
Sentences = Iterator[str]
Picture = Any  # a matplotlib figure


class Rows(list[Row]):
    """Rows of measurements, each with its setting and its seed.

    >>> rows = Rows({"rate": rate, "seed": seed, "loss": rate + seed} for rate in (1, 2) for seed in (0, 1))
    >>> rows.of(seed=1)
    [{'rate': 1, 'seed': 1, 'loss': 2}, {'rate': 2, 'seed': 1, 'loss': 3}]
    >>> rows.column("loss", rate=2), rows.distinct("rate")
    ([2, 3], [1, 2])
    >>> rows.averages("rate", "loss")
    {1: 1.5, 2: 2.5}
    >>> rows.told("rate", "loss", ".1f")
    {1: '1.5 ± 0.7', 2: '2.5 ± 0.7'}
    """

    def of(self, **wanted: Any) -> Rows:
        """Return the rows that have these values."""
        return Rows(row for row in self if all(row.get(name) == value for name, value in wanted.items()))

    def with_numbers(self, name: str) -> Rows:
        """Return the rows whose value in a column is a number, not a word."""
        return Rows(row for row in self if not isinstance(row[name], str))

    def column(self, name: str, **wanted: Any) -> list[Any]:
        """Return the values of a column, from the rows that have the wanted values."""
        return [row[name] for row in self.of(**wanted)]

    def distinct(self, name: str) -> list[Any]:
        """Return the distinct values of a column, in the order in which they first occur."""
        return [*dict.fromkeys(row[name] for row in self)]

    def averages(self, by: str, name: str, factor: float = 1, **wanted: Any) -> dict[Any, float]:
        """Return the mean of the column `name` over the seeds, for each value of the column `by`."""
        return {value: mean(numbers) for value, numbers in self._by(by, name, factor, **wanted).items()}

    def apart(self, by: str, name: str, **wanted: Any) -> tuple[dict[int, float], dict[str, float]]:
        """Return the averages where `by` is a number, and the averages where `by` is a word.

        >>> Rows([{"scale": 8, "loss": 2}, {"scale": "per layer", "loss": 1}]).apart("scale", "loss")
        ({8: 2}, {'per layer': 1})
        """
        found = self.averages(by, name, **wanted)
        words = {value: found.pop(value) for value in [*found] if isinstance(value, str)}
        return found, words

    def told(self, by: str, name: str, form: str, factor: float = 1, **wanted: Any) -> dict[Any, str]:
        """Return mean and standard deviation of the column `name` over the seeds, as text, for each value of `by`."""
        return {value: spread(numbers, form) for value, numbers in self._by(by, name, factor, **wanted).items()}

    def _by(self, by: str, name: str, factor: float, **wanted: Any) -> dict[Any, list[float]]:
        found: dict[Any, list[float]] = {}
        for row in self.of(**wanted):
            found.setdefault(row[by], []).append(factor * row[name])
        return found

    def against(self, by: str, name: str, plain: Any, **wanted: Any) -> dict[Any, list[float]]:
        """Return a column minus its value where `by` is `plain`: for each value of `by`, a list by seed.

        >>> rows = Rows([{"format": "fp32", "loss": 4}, {"format": "bf16", "loss": 6}])
        >>> rows.against("format", "loss", "fp32"), rows.times("format", "loss", "fp32")
        ({'fp32': [0], 'bf16': [2]}, {'fp32': [1.0], 'bf16': [1.5]})
        """
        return self._pairs(sub, plain, self._by(by, name, 1, **wanted))

    def times(self, by: str, name: str, plain: Any, **wanted: Any) -> dict[Any, list[float]]:
        """Return a column divided by its value where `by` is `plain`: for each value of `by`, a list by seed."""
        return self._pairs(truediv, plain, self._by(by, name, 1, **wanted))

    @staticmethod
    def _pairs(how: Callable[[Any, Any], float], plain: Any, found: dict[Any, list[float]]) -> dict[Any, list[float]]:
        # Values are paired by position, because all settings have the same seeds in the same order. If a seed is
        # missing, zip raises.
        return {value: [how(b, a) for a, b in zip(found[plain], own, strict=True)] for value, own in found.items()}


def spread(values: Sequence[float], form: str = ".3g") -> str:
    """Return the mean and the standard deviation over seeds, as text.

    >>> spread([1.0, 2.0, 3.0]), spread([1.0])
    ('2 ± 1', '1')
    """
    deviation = f" ± {stdev(values):{form.removeprefix('+')}}" if len(values) > 1 else ""
    return f"{mean(values):{form}}{deviation}"


def panels(count: int, width: float, height: float, **options: Any) -> tuple[Picture, list[Any]]:
    """Return a figure with panels side by side, and the panels.

    width, height: the size of the figure, in inches. options: arguments of matplotlib's `subplots`.
    """
    picture = new_picture(width, height)
    row = [*picture.subplots(1, count, squeeze=False, **options)[0]]
    for axes in row:
        axes.spines[["top", "right"]].set_visible(False)
    return picture, row


def lines(
    axes: Any,
    rows: Rows,
    by: str,
    x: str,
    y: str,
    *,
    factor: float = 1,
    last: int = 1,
    first: int = 0,
    names: Mapping[str, str] | None = None,
    **look: Any,
) -> None:
    """Draw a line for each value of the column `by`, with the means of y over the seeds.

    last: the number of points of a running mean: each point and the points before it.
    first: the index of the first line, from which its colour and dash follow.
    names: {value: the line's name}; None to use the values as names.
    look: arguments of matplotlib's `plot`, which override the colour, the dash and the width of the i-th line.
    """
    for i, value in enumerate(rows.distinct(by), first):
        points = rows.averages(x, y, factor, **{by: value})
        numbers = [*points.values()]
        # At the beginning the mean is over fewer points, so that the line starts at the first point.
        smooth = [mean(numbers[max(j + 1 - last, 0) : j + 1]) for j in range(len(numbers))]
        own = {"color": colour(i), "linestyle": DASHES[i], "linewidth": 1.3, "label": names[value] if names else value}
        axes.plot([*points], smooth, **own | look)


def dots(axes: Any, rows: Rows, by: str, x: str, y: str) -> None:
    """Draw a dot for each seed. Each value of x has a position on the axis, with the values of `by` side by side."""
    places = rows.distinct(x)
    for i, value in enumerate(rows.distinct(by)):
        for j, place in enumerate(places):
            numbers = rows.column(y, **{by: value, x: place})
            look = {"color": colour(i), "markersize": 5, "label": None if j else value}
            # The two values of `by` are drawn left and right of the position.
            axes.plot([j + 0.25 * (i - 0.5)] * len(numbers), numbers, "os"[i], **look)
    axes.set_xticks(range(len(places)), [place.replace(" / ", "\n/ ") for place in places], fontsize=8)
    axes.set_xlim(-0.5, len(places) - 0.5)
    axes.grid(axis="y", linewidth=0.4, alpha=0.6)


def level(axes: Any, y: float, i: int | None = None, **look: Any) -> None:
    """Draw a horizontal line: dashed in the colour of the i-th line, or dotted and grey if i is None."""
    own = {"color": "0.5", "linestyle": ":", "linewidth": 0.8}
    own = own if i is None else {"color": colour(i), "linestyle": DASHES[1], "linewidth": 1.1}
    axes.axhline(y, **own | look)


def levels(axes: Any, rows: Rows, by: str, y: str, **look: Any) -> None:
    """Draw a dashed horizontal line for each value of the column `by`, at the mean of y over the seeds."""
    for i, value in enumerate(rows.averages(by, y).values()):
        level(axes, value, i, **look)


def below(picture: Picture, row: Sequence[Any]) -> None:
    """Draw one legend for all panels, below the panels."""
    # The panel with the most lines also has the lines of all other panels.
    most = max(row, key=lambda axes: len(axes.lines))
    picture.legend(*most.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8, frameon=False)


def label(axes: Any, x: str, y: str = "", title: str = "", legend: Any = None, **limits: Any) -> None:
    """Label a panel. legend: the legend's location, None for no legend. limits: arguments of matplotlib's `set`."""
    axes.set(xlabel=x, ylabel=y, **limits)
    axes.set_title(title, fontsize=9)
    if legend is not None:
        axes.legend(fontsize=8, frameon=False, loc=legend)
