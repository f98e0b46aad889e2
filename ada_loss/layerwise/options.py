"""What adaptive scaling is told, validated once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ada_loss.rules.layer import LayerRule
from fpsim.checks import is_finite_number, is_whole

__all__ = ["Options"]

BRANCHES = ("exact", "original")
U_MINS = ("smallest", "flush", "normal")


@dataclass(frozen=True)
class Options:
    """The settings of `AdaLossScaled`, which documents them. Raises ValueError for an invalid one."""

    rule: LayerRule
    init_scale: float
    update_every: int
    scale_upper_bound: float | None
    accum_upper_bound: float | None
    branches: str
    u_min: str

    def __post_init__(self) -> None:
        scale = self.init_scale
        if not (is_finite_number(scale) and scale > 0 and math.frexp(scale)[0] == 0.5):
            raise ValueError(f"init_scale={scale!r} is impossible. Possible: a power of two, such as 1.0 or 2.0**15.")
        if not is_whole(self.update_every, 1):
            raise ValueError(f"update_every={self.update_every!r} is impossible. Possible: 1 for every step, or more.")
        for name in ("scale_upper_bound", "accum_upper_bound"):
            bound = getattr(self, name)
            if bound is not None and not (is_finite_number(bound) and bound > 0):
                raise ValueError(f"{name}={bound!r} is impossible. Possible: a finite number above 0, or None.")
        if self.branches not in BRANCHES:
            raise ValueError(f"branches={self.branches!r} is impossible. Possible: 'exact' or 'original'.")
        if self.branches == "original" and not self.predicts:
            raise ValueError(
                f"branches='original' came with the rule {self.rule.name!r}, which measures the sum of the branches. "
                f"Possible: branches='exact', or a rule that predicts: approx_range, abs_range, element_wise_range, "
                f"fixed."
            )
        if self.u_min not in U_MINS:
            raise ValueError(f"u_min={self.u_min!r} is impossible. Possible: 'smallest', 'flush' or 'normal'.")

    @property
    def predicts(self) -> bool:
        """Whether the rule predicts what a product gives from its operands; else it measures what arrives."""
        return self.rule.predicts

    @property
    def init_log2_scale(self) -> int:
        return math.frexp(self.init_scale)[1] - 1

    @property
    def holds_scales(self) -> bool:
        """Whether scales are held between updates. What is measured needs no update, and "original" reuses factors."""
        return self.predicts and self.branches == "exact" and self.update_every > 1
