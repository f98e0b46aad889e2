"""A cache of the small tensors that kernels take and return, created once per device.

A lookup costs less than a new tensor, and equal scales can be compared by identity.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ada_loss.layerwise.scale_kernels import Limits
from fpsim.scaling import RoundingSpec, keep_memory_of, log2_scale_limits, memory_of, rounded

__all__ = ["Constants"]

# Roundings that turn numbers up to half of the smallest magnitude into zero; stochastic rounding does so on average.
TO_NEAREST = ("nearest_even", "nearest_away", "stochastic")


class Constants:
    """Cache of constant tensors by device, and the buffer to which kernels on the CPU write a scale.

    u_min: the lower limit of gradients: "smallest", "flush", "normal" or a number.
    u_max: the upper limit; None for the format's largest magnitude.
    factor_bound: the largest factor of one product, or None.
    scale_bound: the largest scale, or None.
    """

    def __init__(
        self, u_min: str | float, u_max: float | None, factor_bound: float | None, scale_bound: float | None
    ) -> None:
        self._u_min, self._u_max = u_min, u_max
        self._factor_bound = math.inf if factor_bound is None else float(factor_bound)
        self._scale_bound = math.inf if scale_bound is None else float(scale_bound)
        self._found: dict[Any, Tensor] = {}
        self._loses_ties: dict[RoundingSpec, bool] = {}
        self._buffer = keep_memory_of(torch.zeros(1, dtype=torch.int64, device="cpu"))

    def __len__(self) -> int:
        return len(self._found)

    def tensor(self, dtype: torch.dtype, device: torch.device, *values: float) -> Tensor:
        """Return a one-dimensional tensor of these values. The tensor is shared: never write to it."""
        key = (dtype, device, values)
        tensor = self._found.get(key)
        if tensor is None:
            tensor = self._found[key] = keep_memory_of(torch.tensor(values, dtype=dtype, device=device))
        return tensor

    def limits_of(self, spec: RoundingSpec, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the `Limits` of gradients of this dtype and rounding."""
        key = (spec, dtype, device)
        limits = self._found.get(key)
        if limits is None:
            values = self._make_limits(spec, dtype)
            limits = keep_memory_of(torch.tensor(values, dtype=torch.float64, device=device))
            self._found[key] = limits
        return limits

    def _make_limits(self, spec: RoundingSpec, dtype: torch.dtype) -> Limits:
        fmt = spec.fmt
        lowest, highest = log2_scale_limits(spec, dtype)
        words = {"smallest": fmt.smallest, "flush": fmt.smallest / 2, "normal": fmt.smallest_normal}
        return Limits(
            u_min=words[self._u_min] if isinstance(self._u_min, str) else self._u_min,
            u_max=fmt.largest if self._u_max is None else self._u_max,
            lowest=lowest,
            highest=highest,
            factor_bound=self._factor_bound,
            scale_bound=self._scale_bound,
            lost_exponent=self._lost_exponent(spec),
        )

    def _lost_exponent(self, spec: RoundingSpec) -> int:
        """Return the exponent of the power of two below which magnitudes are lost; see `loses_ties` for the power."""
        if not isinstance(self._u_min, str):
            # The histogram counts by powers of two, so u_min is rounded up to a power of two.
            mantissa, exponent = math.frexp(self._u_min)
            return exponent - 1 if mantissa == 0.5 else exponent
        lost_below = spec.fmt.smallest_normal if self._u_min == "normal" else spec.fmt.smallest
        flushed = 1 if self._u_min != "normal" and spec.rounding in TO_NEAREST else 0
        return math.floor(math.log2(lost_below)) - flushed

    def loses_ties(self, spec: RoundingSpec) -> bool:
        """Return True if a magnitude of exactly 2**lost_exponent is lost, and not only smaller magnitudes.

        "Lost" means rounded to zero; with u_min="normal", below the smallest normal number; with a number for u_min,
        below that number. Stochastic rounding keeps, on average, every second element whose size is half of the
        smallest magnitude; all such elements count as lost.
        """
        loses = self._loses_ties.get(spec)
        if loses is None:
            magnitude = 2.0 ** self._lost_exponent(spec)
            if not isinstance(self._u_min, str):
                loses = False
            elif self._u_min == "normal":
                loses = magnitude < spec.fmt.smallest_normal
            elif spec.rounding == "stochastic":
                loses = True
            else:
                loses = float(rounded(torch.tensor([magnitude], dtype=torch.float64, device="cpu"), spec)) == 0.0
            self._loses_ties[spec] = loses
        return loses

    def new_scale(self, device: torch.device) -> Tensor:
        """Return a tensor for a kernel's scale. On the CPU the tensor is shared: read it with `written` at once."""
        return self._buffer if device.type == "cpu" else torch.empty(1, dtype=torch.int64, device=device)

    def written(self, log2_scale: Tensor) -> Tensor:
        """Return the scale that was written to the tensor of `new_scale`. On the CPU equal scales are one tensor."""
        if log2_scale is not self._buffer:
            return log2_scale
        return self.tensor(torch.int64, log2_scale.device, memory_of(log2_scale)[0])
