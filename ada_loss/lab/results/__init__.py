"""The results of a sweep: `Results`, with its rows, tables, pictures and report."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ada_loss.lab.results.results import StoredResults

__all__ = ["Results"]


class Results(StoredResults):
    """The results of a sweep: what its folder holds now, as rows and tables, with pictures and a report.

    `StoredResults` reads the folder, pictures and the report are made of it, and this class offers all of them. Opening
    a folder changes nothing in it.

    out: the folder.
    Raises FileNotFoundError where there is no ledger.
    """

    # pictures and the report are imported on use: a sweep without them needs neither matplotlib nor Jinja

    def plot_accuracy(self, metric: str | None = None, where: Mapping[str, Any] | None = None) -> Any:
        """A metric by format and scaling method: each seed, mean and standard deviation.

        With many constant scales among the methods: a line over the constants, beside the methods that choose a scale.

        metric: the task's first unless named.
        where: only cells with these values, such as {"rounding": "stochastic"}.
        """
        from ada_loss.lab.results.pictures import picture_metric

        return picture_metric(self, metric, where)

    def plot_underflow(self, cell: str | None = None, role: str = "error") -> Any:
        """Where one training lost gradients, by site and step.

        cell: its id; unless given, the cell that lost most.
        role: "weight", "activation", "error" or "weight_grad", or an operand such as "fprop.x". "error" has the
            operands "dgrad.dy" and "wgrad.dy" in it.
        Raises ValueError where nothing was recorded; give the sweep task_options={"record_every": n}.
        """
        from ada_loss.lab.results.pictures import picture_underflow

        return picture_underflow(self, cell, role)

    def plot_scales(self, where: Mapping[str, Any] | None = None) -> Any:
        """The loss scale over the steps: a line for each format and method, of the first seed.

        where: only cells with these values.
        Raises ValueError where no cell scaled its loss.
        """
        from ada_loss.lab.results.pictures import picture_scales

        return picture_scales(self, where)

    def plot_layer_scales(self, where: Mapping[str, Any] | None = None) -> Any:
        """The scale of each site's gradient, by site and step, of the first training with adaptive scaling.

        where: only cells with these values.
        Raises ValueError where no such training was recorded.
        """
        from ada_loss.lab.results.pictures import picture_layer_scales

        return picture_layer_scales(self, where)

    def report(self, path: str | os.PathLike[str] | None = None, question: str | None = None) -> Path:
        """Write one HTML file with the tables, the pictures and every cell; gives its path.

        path: report.html in the sweep's folder, unless given.
        question: the question that the sweep was to answer, for the head of the page.
        Raises ValueError for a ledger without cells.
        """
        from ada_loss.lab.results.report import write_report

        return write_report(self, Path(path) if path is not None else self.out / "report.html", question)
