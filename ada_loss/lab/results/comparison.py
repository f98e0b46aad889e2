"""Comparison of two settings of a sweep, paired by seed: the difference, its interval, and a t-test."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ada_loss.files import data_frame
from ada_loss.lab.cells.cell_formats import label
from ada_loss.lab.results.judgement import LEVEL, PART_OF_STEP, smallest_step
from ada_loss.lab.results.results import StoredResults
from ada_loss.lab.results.table import is_share, mean_of
from fpsim.checks import is_finite_number, is_number, pip_install, shown

try:
    from scipy.special import stdtr, stdtrit
except ImportError as error:
    raise ImportError(f"A comparison needs {error.name}, which is not installed: {pip_install('lab')}.") from None

__all__ = ["Comparison", "compare", "in_units", "per_cent", "require_level", "rows_of_side"]


MOST_DIGITS = 12  # the largest number of decimals of percentage points


@dataclass(frozen=True)
class Comparison:
    """Differences of a metric between two settings, a minus b, by seed.

    Student's paired t-test (Student 1908) assumes normal differences. With two seeds its power is low; with one seed it
    has none.

    a, b: the settings, in words.
    metric: the name of the metric.
    differences: {seed: the metric of a minus the metric of b}, for the seeds that both have.
    level: the level of the test, and 1 minus the confidence of `interval`.
    diverged, diverged_too: the number of seeds of a that diverged, and the number of seeds of b that diverged.
    note: a note on the metric, "lower is better".
    statement: the sweep's verdict on a, if b is float32: the result of one test among all settings, at the tolerance.
    step: the step in which the metric is counted: a deviation is taken to be at least half a step, as in the verdict.

    >>> c = Comparison("e5m2", "fp32", "accuracy", {0: -0.02, 1: -0.01, 2: -0.03})
    >>> print(c)
    e5m2 against fp32: accuracy -2.0 points, 95 % interval -4.5 to 0.5, p = 0.074, paired t-test over 3 seeds
    """

    a: str
    b: str
    metric: str
    differences: Mapping[int, float]
    level: float = LEVEL
    diverged: int = field(default=0)
    note: str = ""
    statement: str = ""
    diverged_too: int = 0
    step: float = 0.0

    @property
    def mean(self) -> float:
        """Return the mean difference; NaN if there are no differences, or if one of them is NaN."""
        return mean_of(self.differences.values()) if self.differences else math.nan

    @property
    def error(self) -> float:
        """Return the standard error of the mean; NaN for fewer than two seeds, or if a difference is not finite."""
        values = [*self.differences.values()]
        if len(values) < 2 or not all(map(math.isfinite, values)):
            return math.nan
        # Differences of a counted metric can be equal by chance. A deviation of 0 would make any difference
        # significant.
        return max(statistics.stdev(values), PART_OF_STEP * self.step) / math.sqrt(len(values))

    @property
    def interval(self) -> tuple[float, float]:
        """Return the confidence interval of the mean difference; NaN for fewer than two seeds."""
        width = float(stdtrit(len(self.differences) - 1, 1 - self.level / 2)) * self.error
        return self.mean - width, self.mean + width

    @property
    def p(self) -> float:
        """Return the two-sided p-value. If the standard error is 0, p is 1 for a mean of 0, and 0 otherwise."""
        if math.isnan(self.error):
            return math.nan
        if self.error == 0:
            return 0.0 if self.mean else 1.0
        return 2 * float(stdtr(len(self.differences) - 1, -abs(self.mean / self.error)))

    def __len__(self) -> int:
        return len(self.differences)

    def __bool__(self) -> bool:
        return True

    def to_frame(self) -> Any:
        """Return a pandas.DataFrame with a row for each seed."""
        return data_frame([{"seed": seed, "difference": value} for seed, value in self.differences.items()])

    def plot(self) -> Any:
        """Plot the difference of each seed, and the mean with its interval; needs matplotlib."""
        from ada_loss.lab.results.figures import plot_differences

        row = {"name": self.a, "differences": [*self.differences.values()], "interval": self.interval}
        words = f"{self.metric}: difference from {self.b}" + (f", {self.note}" if self.note else "")
        return plot_differences([row], words, 0.0, 100.0 if is_share(self.metric) else 1.0)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        count = len(self.differences)
        width = self.interval[1] - self.mean
        seen = 10 * width if width > 0 else abs(self.mean)
        words = f"{self.a} against {self.b}: {self.metric} {in_units(self.metric, self.mean, seen=seen)}"
        words += f" ({self.note})" if self.note else ""
        lost = ((self.a, self.diverged), (self.b, self.diverged_too))
        diverged = "".join(f"; {number} of {count} seeds of {side} diverged" for side, number in lost if number)
        if math.isnan(self.error):
            words += f"; {count} seed{'s' * (count != 1)} in common are too few for a test, or not all finite"
            return f"{words}{diverged}"
        low, high = (in_units(self.metric, bound, unit=False, seen=seen) for bound in self.interval)
        words += f", {per_cent(1 - self.level)} interval {low} to {high}, p = {self.p:.2g}"
        words += f", paired t-test over {count} seeds{diverged}"
        return f"{words}. Among all settings: {self.statement}" if self.statement else words


def in_units(metric: str, value: float, unit: bool = True, tolerance: float | None = None, seen: float = 0.0) -> str:
    """Format a difference of a metric: in percentage points if the metric is a share.

    tolerance: the tolerance of the metric; decimals that are small compared to it are omitted.
    seen: an amount of which a tenth must be visible; points get more than one decimal if this amount is less than one
        point.

    >>> in_units("accuracy", -0.015), in_units("accuracy", -0.0002), in_units("loss", 0.0213)
    ('-1.5 points', '0.0 points', '0.0213')
    >>> in_units("accuracy", -0.0002, seen=0.002), in_units("accuracy", -0.0002, seen=0.01)
    ('-0.02 points', '0.0 points')
    >>> in_units("loss", -9.63e-06), in_units("loss", -9.63e-06, tolerance=0.036)
    ('-9.63e-06', '0')
    """
    if is_share(metric):
        seen = seen or tolerance or 0.0
        digits = max(1, 1 - math.floor(math.log10(100 * seen))) if seen > 0 and math.isfinite(seen) else 1
        # "z" prints -0.0 as 0.0.
        return f"{100 * value:z.{min(digits, MOST_DIGITS)}f}{' points' * unit}"
    if tolerance is not None and tolerance > 0 and math.isfinite(value):
        # Two digits after the tolerance's first digit are kept. Further digits have no influence on a decision.
        value = round(value, 2 - math.floor(math.log10(tolerance)))
    return f"{value:z.3g}"


def per_cent(share: float) -> str:
    """Format a share in per cent.

    >>> per_cent(0.05), per_cent(0.999)
    ('5 %', '99.9 %')
    """
    return f"{100 * share:.3g} %"


def require_level(level: object) -> None:
    """Raise ValueError for an invalid level of a test."""
    if not is_number(level) or not 0 < level < 1:  # type: ignore[operator]
        raise ValueError(f"level={shown(level)} is invalid. Expected: between 0 and 1; 0.05 is usual.")


def compare(
    results: StoredResults,
    a: str | Mapping[str, Any],
    b: str | Mapping[str, Any],
    metric: str | None = None,
    level: float = LEVEL,
) -> Comparison:
    """See `Results.compare`."""
    require_level(level)
    name = results.named(metric)
    # Each side has one cell for each seed: only then are the differences paired.
    left, right = (_by_seed(results, chosen) for chosen in (a, b))
    for row in (*left.values(), *right.values()):
        if not is_number(row.get(name)):
            known = ", ".join(key for key, value in row.items() if is_number(value))
            raise ValueError(f"The metric {shown(name)} has no number in the cell {row['id']}. Known: {known}.")
    common = [seed for seed in left if seed in right]
    if not common:
        raise ValueError(
            f"{_words(a)} and {_words(b)} have no seed in common: {_list(left)} and {_list(right)}. "
            f"Run both with the same seeds."
        )
    differences = {seed: left[seed][name] - right[seed][name] for seed in common}
    diverged, diverged_too = (sum(side[seed]["diverged"] for seed in common) for side in (left, right))
    note = results.directions.words(name)
    tasks = {side[seed]["task"] for side in (left, right) for seed in common}
    # As in the verdict, the step is estimated from all cells of the task, because a few cells do not reveal the step.
    counted = [row[name] for row in results.rows() if row["task"] in tasks and is_finite_number(row.get(name))]
    size = max((abs(side[seed][name]) for side in (left, right) for seed in common), default=0.0)
    step = smallest_step(counted, size if math.isfinite(size) else None)
    words = _words(a), _words(b)
    return Comparison(*words, name, differences, level, diverged, note, diverged_too=diverged_too, step=step)


def rows_of_side(results: StoredResults, chosen: str | Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of one side of a comparison, one row for each seed."""
    return [*_by_seed(results, chosen).values()]


def _by_seed(results: StoredResults, chosen: str | Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    where = {"format": chosen} if isinstance(chosen, str) else chosen
    if not isinstance(where, Mapping):
        raise TypeError(
            f"A side of the comparison is {shown(chosen)}. Expected: a format, or the columns that choose cells. "
            f"Use {{'format': 'e5m2', 'scaling': 'torch'}}, for instance."
        )
    rows = results.chosen_rows(where)
    for axis in results.settings:
        values = [*dict.fromkeys(str(row.get(axis)) for row in rows)]
        if axis not in where and len(values) > 1:
            raise ValueError(
                f"{_words(chosen) or shown(chosen)} leaves the {axis} open: {', '.join(values)}. Choose one, "
                f"{{..., {axis!r}: {values[0]!r}}}: a comparison has one cell for each seed on each side."
            )
    return {row["seed"]: row for row in rows}


def _words(chosen: str | Mapping[str, Any]) -> str:
    return chosen if isinstance(chosen, str) else " ".join(label(value) for value in chosen.values())


def _list(seeds: Sequence[int] | Mapping[int, Any]) -> str:
    return ", ".join(map(str, seeds)) or "none"
