"""What happened at each place of a scaled model: scales, underflow with and without them, overflow; as rows."""

from __future__ import annotations

import csv
import io
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fpsim.scaling import RoundingSpec, lost_between, rounded

__all__ = ["COLUMNS", "Recorder"]

SCALES = ("unbound", "bound", "log2_power_of_two", "log2_wanted", "log2_scale")
SHARES = ("zeros", "underflow", "underflow_unscaled", "overflow")
COLUMNS = ("step", "site", "role", "format", "elements", *SCALES, "limited", *SHARES)


class Recorder:
    """Rows of an `AdaLossScaled`: `scaled.observer = Recorder(every=100)`; None ends it.

    One row for each step that is sampled and each place where a gradient is rounded. The columns: unbound, the factor
    that the rule asked for at the place's last product; bound, what its bounds left of it; log2_power_of_two, of the
    factor (between updates they are the last ones, and NaN where the place chose none); log2_wanted, the scale with
    which the gradient came or that was measured or kept; log2_scale, the one at which it was rounded; limited, whether
    the overflow limit or the container lowered it.
    zeros: share of the elements that are zero in float32 already; underflow, underflow_unscaled: shares of the others
    that become zero when they are rounded at the scale, and at scale 1; overflow: share of all elements that are
    finite and lost to inf, NaN or saturation at the scale.

    every: the first step and each n-th after it. Rows stay on the device until they are asked for. Recording changes
    no result; nothing is computed in a step that is not sampled.
    """

    def __init__(self, every: int = 1) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r} is impossible. Possible: 1 for every step, n for each n-th.")
        self.every = every
        self._labels: list[tuple[int, str, str, str, int]] = []
        self._numbers: list[Tensor] = []

    def wants(self, step: int) -> bool:
        """Whether this step is sampled."""
        return (step - 1) % self.every == 0

    def __call__(
        self, step: int, site: str, role: str, spec: RoundingSpec, gradient: Tensor, log2_scale: Tensor, chosen: Tensor
    ) -> None:
        """What `AdaLossScaled` calls, before the gradient is rounded."""
        key = torch.tensor(step, device="cpu")  # noise of its own, so that the training's stays as it is
        at_scale, unscaled = (rounded(gradient, spec, key, scale) for scale in (log2_scale, None))
        count = gradient.numel()
        zeros, underflow, overflow = lost_between(gradient, at_scale, spec.fmt.largest, log2_scale).double()
        underflow_unscaled = lost_between(gradient, unscaled, math.inf, log2_scale)[1].double()
        alive = (count - zeros).clamp(min=1)
        shares = [zeros / max(count, 1), underflow / alive, underflow_unscaled / alive, overflow / max(count, 1)]
        self._labels.append((step, site, role, str(spec), count))
        self._numbers.append(torch.cat([chosen, torch.stack(shares)]))

    def __len__(self) -> int:
        return len(self._labels)

    def clear(self) -> None:
        """Forget the rows."""
        self._labels.clear()
        self._numbers.clear()

    def rows(self) -> list[dict[str, Any]]:
        """The rows as dictionaries of `COLUMNS`, in the order of the backward passes; copies them to the host."""
        numbers = torch.stack([n.cpu() for n in self._numbers]).tolist() if self._numbers else []
        found = []
        for labels, values in zip(self._labels, numbers, strict=True):
            scales, shares = values[: len(SCALES)], values[len(SCALES) :]
            found.append(dict(zip(COLUMNS, (*labels, *scales, scales[4] < scales[3], *shares), strict=True)))
        return found

    def to_frame(self) -> Any:
        """The rows as a pandas.DataFrame."""
        try:
            import pandas
        except ImportError:
            raise ImportError("to_frame() needs pandas: pip install pandas. Or take rows(), or to_csv(path).") from None
        return pandas.DataFrame(self.rows(), columns=list(COLUMNS))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the rows to a file, whole or not at all."""
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows())
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(text.getvalue())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def to_tensorboard(self, writer: Any, prefix: str = "ada_loss") -> None:
        """Add scale and underflow of every row to a `torch.utils.tensorboard.SummaryWriter`, one curve for a place."""
        for row in self.rows():
            for name in ("log2_scale", "underflow", "underflow_unscaled", "overflow"):
                writer.add_scalar(f"{prefix}/{name}/{row['role']}/{row['site']}", row[name], row["step"])
