"""Recorder: rows with the scale of every gradient of a scaled model, and what rounding at that scale loses."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ada_loss.files import csv_bytes, data_frame, write_atomically
from fpsim.checks import is_whole, refuse, shown
from fpsim.insight.rows import Rows
from fpsim.scaling import RoundingSpec, lost_between, rounded

__all__ = ["COLUMNS", "Recorder"]


class Label(NamedTuple):
    """Columns of a row that are known on the host."""

    step: int
    site: str
    role: str
    format: str
    elements: int


SCALES = ("unbound", "bound", "log2_power_of_two", "log2_wanted", "log2_scale")  # the order in which they come
SHARES = ("zeros", "underflow", "underflow_unscaled", "overflow")
COLUMNS = (*Label._fields, *SCALES, "limited", *SHARES)
SHOWN = 12  # sites of a printed Recorder
CURVES = ("log2_scale", "underflow", "underflow_unscaled", "overflow")


class Recorder:
    """Record the gradients of an `AdaLossScaled`: `scaled.observer = Recorder(every=100)`; None ends the recording.

    Each sampled step adds a row for each site where a gradient is rounded. Rows stay on the device until they are
    requested. Recording changes no result, and computes nothing in other steps.

    The columns of a row:

    step: the number of the step.
    site: the name of the site.
    role: the role of the tensor, "error" or "weight_grad".
    format: the format and the rounding.
    elements: the size of the gradient.
    unbound: the factor that the rule computed at the last product of this site.
    bound: this factor within its bounds.
    log2_power_of_two: log2 of the bound factor, rounded down to a power of two. Between updates these three columns
        keep their last values; they are NaN if the site chose no factor.
    log2_wanted: log2 of the wanted scale: the scale with which the gradient arrived, or that was measured, or that was
        held from an earlier step.
    log2_scale: log2 of the scale at which the gradient was rounded.
    limited: whether this scale is lower than the wanted scale, because the gradient or the container would have
        overflowed.
    zeros: the share of the elements that are zero before rounding.
    underflow: the share of the other elements that become zero when rounded at the scale.
    underflow_unscaled: the share of the other elements that become zero when rounded at scale 1.
    overflow: the share of all elements that are finite and, when rounded at the scale, become inf or NaN or saturate.

    Args:
        every: the interval of the sampled steps; the first step is sampled.
    """

    def __init__(self, every: int = 1) -> None:
        if not is_whole(every, 1):
            raise ValueError(f"every={shown(every)} is invalid. Expected: 1 for every step, n for each n-th.")
        self.every = every
        self._labels: list[Label] = []
        self._numbers: list[Tensor] = []  # the SCALES and SHARES of each label

    def wants(self, step: int) -> bool:
        """Return True if this step is sampled."""
        return (step - 1) % self.every == 0

    def __call__(
        self, step: int, site: str, role: str, spec: RoundingSpec, gradient: Tensor, log2_scale: Tensor, chosen: Tensor
    ) -> None:
        """Record a gradient before it is rounded. `AdaLossScaled` calls this.

        step: the number of the step.
        site: the name of the site.
        role: the role of the tensor.
        spec: how the gradient is rounded.
        gradient: the gradient in its true size.
        log2_scale: log2 of the scale at which the gradient is rounded, an integer on the gradient's device.
        chosen: the five SCALES, float64 on the gradient's device.
        """
        # The recorder draws noise with a separate key, because it must not change the noise that the training draws.
        key = torch.tensor(step, device="cpu")
        count = gradient.numel()
        lost = lost_between(gradient, rounded(gradient, spec, key, log2_scale), spec.fmt.largest, log2_scale)
        zeros, underflow, overflow = lost.double()
        unscaled = rounded(gradient, spec, key, None)
        # At scale 1 only the underflow is measured, so there is no limit for overflows.
        _, underflow_unscaled, _ = lost_between(gradient, unscaled, math.inf, log2_scale).double()
        nonzero = (count - zeros).clamp(min=1)  # a gradient of zeros loses nothing, and 0 / 1 is 0
        shares = {
            "zeros": zeros / max(count, 1),
            "underflow": underflow / nonzero,
            "underflow_unscaled": underflow_unscaled / nonzero,
            "overflow": overflow / max(count, 1),
        }
        # Numbers stay on the device until the rows are read, because a copy here would make every site wait.
        self._labels.append(Label(step, site, role, str(spec), count))
        self._numbers.append(torch.cat([chosen, torch.stack([shares[name] for name in SHARES])]))

    def __len__(self) -> int:
        return len(self._labels)

    def __str__(self) -> str:
        """Return a table of the sites that lose most, each in its worst sample."""
        rows = self.rows()
        if not rows:
            return f"Recorder(every={self.every}), without rows so far: `scaled.observer = recorder` records."
        worst: dict[tuple[str, str], dict[str, Any]] = {}
        for row in rows:
            key = row["site"], row["role"]
            if key not in worst or max(row["underflow"], row["overflow"]) > max(
                worst[key]["underflow"], worst[key]["overflow"]
            ):
                worst[key] = row
        lossiest = sorted(worst.values(), key=lambda row: -max(row["underflow"], row["overflow"]))[:SHOWN]
        wide = max(len(row["site"]) for row in (*lossiest, {"site": "site"}))
        lines = [
            f"Recorder(every={self.every}): {len(rows)} rows of steps {rows[0]['step']} to {rows[-1]['step']}, "
            f"{len(worst)} sites; those of which most was lost, at their worst:",
            f"{'site':<{wide}}  {'role':<11}  step  log2_scale  underflow  overflow",
        ]
        lines += [
            f"{row['site']:<{wide}}  {row['role']:<11}  {row['step']:>4}  {row['log2_scale']:>10.0f}  "
            f"{row['underflow']:>9.3g}  {row['overflow']:>8.3g}"
            for row in lossiest
        ]
        return "\n".join(lines)

    __repr__ = __str__

    def clear(self) -> None:
        """Delete the rows."""
        self._labels.clear()
        self._numbers.clear()

    def rows(self) -> Rows:
        """Return the rows, copied to the host, as dictionaries of `COLUMNS`, in the order of the backward passes."""
        numbers = torch.stack([n.cpu() for n in self._numbers]).tolist() if self._numbers else []
        rows = Rows()
        for label, values in zip(self._labels, numbers, strict=True):
            row = label._asdict() | dict(zip((*SCALES, *SHARES), values, strict=True))
            row["limited"] = row["log2_scale"] < row["log2_wanted"]
            rows.append({column: row[column] for column in COLUMNS})
        return rows

    def to_frame(self) -> Any:
        """Return the rows as a pandas.DataFrame."""
        return data_frame(self.rows(), COLUMNS)

    def table(self) -> Rows:
        """Return a row for each site and role: the number of samples, the last scale, and the means of the shares."""
        places: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
        for row in self.rows():
            places.setdefault((row["site"], row["role"], row["format"]), []).append(row)
        table = Rows()
        for (site, role, fmt), rows in places.items():
            means = {name: sum(row[name] for row in rows) / len(rows) for name in CURVES[1:]}
            words = {"site": site, "role": role, "format": fmt, "steps": len(rows)}
            table.append({**words, "log2_scale": rows[-1]["log2_scale"], **means})
        return table

    def __bool__(self) -> bool:
        return True  # len() would make an empty recorder false

    def plot(self, role: str = "error", value: str = "log2_scale") -> Any:
        """Plot a value of the rows by site and step, as colours; needs matplotlib.

        role: "error" or "weight_grad".
        value: a column of numbers.
        Raises ValueError if no row has the role or the column.
        """
        all_rows = self.rows()
        rows = [row for row in all_rows if row["role"] == role]
        if not rows:
            known = ", ".join(dict.fromkeys(row["role"] for row in all_rows)) or "none yet"
            raise ValueError(f"No row has the role {shown(role)}. Known: {known}.")
        numbers = [name for name, known in rows[0].items() if not isinstance(known, str)]
        if value not in numbers:
            raise ValueError(refuse(f"Unknown column {shown(value)}", numbers, word=value))
        from fpsim.insight.pictures import plot_watch

        # The plot goes from input to output, but rows are in the order of the backward passes.
        return plot_watch(rows[::-1], value, f"{value}, role {role}")

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the rows to a CSV file, atomically. Missing folders are created."""
        write_atomically(Path(path), csv_bytes(self.rows(), COLUMNS))

    def to_tensorboard(self, writer: Any, prefix: str = "ada_loss") -> None:
        """Add a curve of scale, underflow and overflow for each site.

        writer: a `torch.utils.tensorboard.SummaryWriter`.
        prefix: the first part of the curves' names.
        """
        for row in self.rows():
            for name in CURVES:
                writer.add_scalar(f"{prefix}/{name}/{row['role']}/{row['site']}", row[name], row["step"])
