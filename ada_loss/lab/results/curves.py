"""Learning curves of a sweep: values over the steps for each combination and seed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ada_loss.files import data_frame
from ada_loss.lab.cells.telemetry import Curves as CurvesOfCell
from ada_loss.lab.cells.telemetry import curves_of, is_of_curve
from ada_loss.lab.results.results import StoredResults, telling_axes
from fpsim.checks import did_you_mean, is_whole, shown
from fpsim.insight.rows import Rows

__all__ = ["Curve", "CurveReader", "Curves", "curves"]

MOST_BYTES = 1 << 28  # the largest size of the curves in the cache


@dataclass(frozen=True)
class Curve:
    """The values of one combination over the steps.

    settings: the settings of the combination in which the cells differ.
    seeds: the seeds, in order.
    steps: (points,), the middles of the intervals of steps.
    values: (seeds, points), the mean of each interval; NaN after the end of a training, or if numbers are not finite.
    """

    settings: Mapping[str, str]
    seeds: tuple[int, ...]
    steps: NDArray[np.float64]
    values: NDArray[np.float64]

    @property
    def name(self) -> str:
        """Return the combination in words."""
        return " ".join(self.settings.values())

    @property
    def mean(self) -> NDArray[np.float64]:
        """Return the means, (points,), over the seeds that have a number at a point."""
        return _over_seeds(np.nanmean, self.values)

    @property
    def deviation(self) -> NDArray[np.float64]:
        """Return the sample standard deviations, (points,); NaN where fewer than two seeds have a number."""
        enough = np.isfinite(self.values).sum(axis=0) > 1
        return np.where(enough, _over_seeds(lambda x, axis: np.nanstd(x, axis=axis, ddof=1), self.values), np.nan)


class Curves(list[Curve]):
    """Curves of a sweep, one for each combination; see `Results.curves`.

    name: the name of the quantity.
    note: "lower is better" for a quantity to minimize, otherwise "".
    """

    def __init__(self, curves: Iterable[Curve], name: str, note: str = "") -> None:
        super().__init__(curves)
        self.curve, self.note = name, note

    def table(self) -> Rows:
        """Return a row for each combination: settings, number of seeds, and first and last mean."""
        ends = [{"seeds": len(one.seeds), "first": float(one.mean[0]), "last": float(one.mean[-1])} for one in self]
        return Rows({**one.settings, **row} for one, row in zip(self, ends))

    def __str__(self) -> str:
        return f"{self.curve}{f', {self.note}' * bool(self.note)}\n{self.table()}"

    __repr__ = __str__

    def to_frame(self) -> Any:
        """Return a pandas.DataFrame with a row for each combination, seed and point."""
        return data_frame(
            [
                {**one.settings, "seed": seed, "step": float(step), self.curve: float(value)}
                for one in self
                for seed, values in zip(one.seeds, one.values)
                for step, value in zip(one.steps, values)
            ]
        )

    def plot(self) -> Any:
        """Plot mean and standard deviation over the seeds, a line for each combination; needs matplotlib."""
        from ada_loss.lab.results.figures import plot_curves

        lines = [(one.name, one.steps, one.mean, one.deviation) for one in self]
        return plot_curves(lines, ", ".join(filter(None, (self.curve, self.note))))


def _over_seeds(reduce: Any, values: NDArray[np.float64]) -> NDArray[np.float64]:
    with warnings.catch_warnings():
        # NumPy warns of a point where no seed has a number. The result at this point is NaN, which is intended.
        warnings.simplefilter("ignore", RuntimeWarning)
        return reduce(values, axis=0)  # type: ignore[no-any-return]


class CurveReader:
    """A bounded cache of the curves of cells, by id. Curves beyond `MOST_BYTES` are read again from the files."""

    def __init__(self, results: StoredResults) -> None:
        self._results, self._known, self._left = results, dict[str, CurvesOfCell](), MOST_BYTES

    def __call__(self, cell: str) -> CurvesOfCell:
        if (known := self._known.get(cell)) is not None:
            return known
        found = curves_of(self._results.readable_telemetry(cell, is_of_curve))
        size = sum(part.nbytes for points in found.values() for part in points)
        if size <= self._left:
            self._left -= size
            self._known[cell] = found
        return found


def curves(
    results: StoredResults,
    name: str,
    where: Mapping[str, Any] | None,
    points: int,
    read: CurveReader | None = None,
    most_seeds: int | None = None,
) -> Curves:
    """See `Results.curves`.

    read: the reader of files; by default a new one.
    most_seeds: the largest number of seeds of a combination that are read, from the first on; None for all seeds.
    """
    read = read or CurveReader(results)
    if not is_whole(points, least=1):
        raise ValueError(f"points={shown(points)} is invalid. Expected: 1 or more.")
    if not isinstance(name, str):
        raise TypeError(f"name={shown(name)} is not a string. Expected: the name of a curve, such as 'loss'.")
    rows = results.chosen_rows(where)
    axes = telling_axes(results.settings, rows) or ["format"]
    groups: dict[tuple[str, ...], dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]]] = {}
    known: dict[str, None] = {}
    seen: dict[tuple[str, ...], int] = {}
    for row in rows:
        group = tuple(str(row.get(axis)) for axis in axes)
        seen[group] = seen.get(group, 0) + 1
        # The number is checked before the file is read, because reading takes most of the time.
        if most_seeds is not None and seen[group] > most_seeds:
            continue
        there = read(row["id"])
        known |= dict.fromkeys(there)
        curve = there.get(name)
        if curve is not None:
            groups.setdefault(group, {})[row["seed"]] = curve
    if not groups:
        hint = did_you_mean(name, known)
        others = f"Known: {', '.join(known)}." if known else "No training left a curve: no cell is done."
        raise ValueError(f"No cell has a curve {shown(name)}.{hint} {others}")
    curves = (_curve(dict(zip(axes, group)), series, points) for group, series in groups.items())
    return Curves(curves, name, results.directions.words(name.split("/")[0]))


def _curve(
    settings: dict[str, str], series: Mapping[int, tuple[NDArray[np.float64], NDArray[np.float64]]], points: int
) -> Curve:
    seeds = tuple(sorted(series))
    # A training that diverged ends early. The longest training determines the axis, and the others are NaN after their
    # end.
    longest = max((steps for steps, _ in series.values()), key=len)
    stretches = np.array_split(np.arange(len(longest)), min(points, len(longest)))
    values = np.full((len(seeds), len(stretches)), np.nan)
    for i, seed in enumerate(seeds):
        numbers = series[seed][1]
        for k, stretch in enumerate(stretches):
            part = numbers[stretch[stretch < len(numbers)]]
            if len(part) and np.isfinite(part).all():
                values[i, k] = part.mean()
    return Curve(settings, seeds, np.array([longest[stretch].mean() for stretch in stretches]), values)
