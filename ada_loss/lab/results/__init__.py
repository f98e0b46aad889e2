"""The results of a sweep: `Results`, with its rows, tables, pictures and report."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ada_loss.lab.results.results import StoredResults
from fpsim.checks import require_flag

if TYPE_CHECKING:
    from ada_loss.lab.results.comparison import Comparison
    from ada_loss.lab.results.curves import Curves
    from ada_loss.lab.results.verdict import Verdict

__all__ = ["Results"]


class Results(StoredResults):
    """Results of a sweep: the current content of its folder as rows and tables, with pictures and a report.

    This class is a facade: `StoredResults` reads the folder, and other modules make the pictures and the report.
    Opening a folder changes nothing in it.

    out: the folder.

    Raises:
        FileNotFoundError: if the folder has no ledger.
    """

    # Modules that need more than NumPy are imported when used, because a sweep needs neither SciPy nor matplotlib nor
    # Jinja.

    def compare(
        self, a: str | Mapping[str, Any], b: str | Mapping[str, Any], metric: str | None = None, level: float = 0.05
    ) -> Comparison:
        """Compare a metric between two settings, a minus b, paired by seed, with a t-test.

        If b is float32, the comparison includes the verdict on a.

        a, b: the settings: a format, or values that select one cell for each seed, such as {"format": "e5m2",
            "scaling": "torch"}.
        metric: the metric, or "underflow", "skipped" or "seconds"; None for the task's first metric.
        level: the level of the test, and 1 minus the confidence of the interval.
        Raises ValueError if a side has no cell or several cells for a seed, and if the sides have no seed in common.
        """
        from ada_loss.lab.results.verdict import compare

        return compare(self, a, b, metric, level)

    def curves(self, name: str = "loss", where: Mapping[str, Any] | None = None, points: int = 200) -> Curves:
        """Return a `Curve` over the steps for each combination, with the values of every seed, mean and deviation.

        name: "loss", "scale", a metric computed during training (task_options={"evaluate_every": 1}), or a name that
            the user's own training logged.
        where: only cells with these values.
        points: the largest number of intervals over which means are taken.
        Raises ValueError if no cell has such a curve.
        """
        from ada_loss.lab.results.curves import curves

        return curves(self, name, where, points)

    def verdicts(
        self,
        metric: str | None = None,
        tolerance: float | None = None,
        level: float = 0.05,
        equivalence: bool = False,
    ) -> list[Verdict]:
        """Test which settings are at most a tolerance below float32, which fall short, and which are undecided.

        There is a verdict for each task, and for each combination of options in which the cells differ. A verdict is
        printed as a few lists.

        metric: the metric; by default the first metric of each task.
        tolerance: how far below float32 is good enough, in the units of the metric; by default one percentage point for
            a share, and a hundredth of float32's mean for any other metric.
        level: the bound for the probability of any wrong statement in a verdict, if differences are normal.
        equivalence: whether a setting must be within the tolerance of float32 on both sides to match it.
        """
        from ada_loss.lab.results.verdict import verdicts

        require_flag("equivalence", equivalence)
        return verdicts(self, metric, tolerance, level, equivalence)

    def plot(self, metric: str | None = None, where: Mapping[str, Any] | None = None) -> Any:
        """Plot a metric by format and scaling method; see `plot_accuracy`."""
        return self.plot_accuracy(metric, where)

    def plot_accuracy(self, metric: str | None = None, where: Mapping[str, Any] | None = None) -> Any:
        """Plot a metric by format and scaling method: each seed, mean and standard deviation.

        If there are many constant scales among the methods, they are drawn as a line, next to the methods that choose a
        scale.

        metric: the metric; by default the task's first metric.
        where: only cells with these values, such as {"rounding": "stochastic"}.
        """
        from ada_loss.lab.results.pictures import picture_metric

        return picture_metric(self, metric, where)

    def plot_underflow(self, cell: str | None = None, role: str = "error") -> Any:
        """Plot where one training lost gradients, by site and step.

        cell: the id of the training's cell; by default the cell that lost most.
        role: "weight", "activation", "error" or "weight_grad", or an operand such as "fprop.x". "error" includes the
            operands "dgrad.dy" and "wgrad.dy".
        Raises ValueError if nothing was recorded; give the sweep task_options={"record_every": n}.
        """
        from ada_loss.lab.results.pictures import picture_underflow

        return picture_underflow(self, cell, role)

    def plot_scales(self, where: Mapping[str, Any] | None = None) -> Any:
        """Plot the loss scale over the steps: a line for each format and method, from the first seed.

        where: only cells with these values.
        Raises ValueError if no cell scaled its loss.
        """
        from ada_loss.lab.results.pictures import picture_scales

        return picture_scales(self, where)

    def plot_layer_scales(self, where: Mapping[str, Any] | None = None) -> Any:
        """Plot the scale of each site's gradient, by site and step, from the first training with adaptive scaling.

        where: only cells with these values.
        Raises ValueError if no such training was recorded.
        """
        from ada_loss.lab.results.pictures import picture_layer_scales

        return picture_layer_scales(self, where)

    def report(self, path: str | os.PathLike[str] | None = None, question: str | None = None) -> Path:
        """Write one HTML file with the tables, the pictures and every cell; return its path.

        path: the path of the file; by default report.html in the sweep's folder.
        question: the question that the sweep should answer, for the head of the page.
        Raises ValueError for a ledger without cells.
        """
        from ada_loss.lab.results.report import write_report

        return write_report(self, Path(path) if path is not None else self.out / "report.html", question)
