"""What adaptive scaling is told, validated once."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass, fields
from typing import Any

from ada_loss.rules.layer import LayerRule
from fpsim.checks import is_finite_number, is_whole, shown

__all__ = ["Options"]

BRANCHES = ("exact", "original")
U_MINS = ("smallest", "flush", "normal")


def _is_scale(value: Any) -> bool:
    """Whether this is a number above 0 that float64 holds."""
    return is_finite_number(value) and 0 < value <= sys.float_info.max


@dataclass(frozen=True)
class Options:
    """The settings of `AdaLossScaled`, which documents them. Raises ValueError for an invalid one.

    modules: names of the modules whose products are scaled; None for all.
    scales_casts: whether gradients that enter the format from float32 get a factor.
    """

    rule: LayerRule
    init_scale: float
    update_every: int
    scale_upper_bound: float | None
    accum_upper_bound: float | None
    branches: str
    u_min: str
    modules: frozenset[str] | None
    scales_casts: bool

    def __post_init__(self) -> None:
        scale = self.init_scale
        if not (_is_scale(scale) and math.frexp(scale)[0] == 0.5):
            raise ValueError(f"init_scale={shown(scale)} is invalid. Expected: a power of two, such as 1.0 or 2.0**15.")
        if not is_whole(self.update_every, 1):
            raise ValueError(
                f"update_every={shown(self.update_every)} is invalid. Expected: 1 for every step, or more."
            )
        for name in ("scale_upper_bound", "accum_upper_bound"):
            bound = getattr(self, name)
            if bound is not None and not _is_scale(bound):
                raise ValueError(f"{name}={shown(bound)} is invalid. Expected: a finite number above 0, or None.")
        if not isinstance(self.branches, str) or self.branches not in BRANCHES:
            raise ValueError(f"branches={shown(self.branches)} is invalid. Expected: 'exact' or 'original'.")
        if not self.predicts:
            self._check_what_is_measured()
        if not isinstance(self.u_min, str) or self.u_min not in U_MINS:
            raise ValueError(f"u_min={shown(self.u_min)} is invalid. Expected: 'smallest', 'flush' or 'normal'.")

    def _check_what_is_measured(self) -> None:
        """Refuse what says nothing to a rule that measures each gradient: it has no factors, and nothing to hold."""
        ahead = "a rule that predicts: approx_range, abs_range, element_wise_range, fixed"
        if self.branches == "original":
            raise ValueError(
                f"branches='original' was given with the rule {self.rule.name!r}, which measures the sum of the "
                f"branches. Expected: branches='exact', or {ahead}."
            )
        if self.init_scale != 1 and self.modules is None:
            raise ValueError(
                f"init_scale={self.init_scale} was given with the rule {self.rule.name!r}, which measures every "
                f"gradient, whatever scale it comes with. Expected: init_scale=1.0; transforms=, for modules that are "
                f"not measured and pass it on; or {ahead}."
            )
        if self.update_every != 1:
            raise ValueError(
                f"update_every={self.update_every} was given with the rule {self.rule.name!r}, which measures every "
                f"gradient in every step. Expected: update_every=1, or {ahead}."
            )
        if self.scale_upper_bound is not None:
            raise ValueError(
                f"scale_upper_bound={self.scale_upper_bound} was given with the rule {self.rule.name!r}. It bounds the "
                f"factor of a product, and this rule measures scales. Expected: accum_upper_bound, which "
                f"bounds the scale itself, or {ahead}."
            )

    @property
    def predicts(self) -> bool:
        """Whether the rule predicts what a product gives from its operands; else it measures what arrives."""
        return self.rule.predicts

    def as_plain(self) -> dict[str, Any]:
        """All of them as plain values, the rule by its name and parameters."""
        modules = None if self.modules is None else sorted(self.modules)
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**plain, "rule": self.rule.name, "params": asdict(self.rule), "modules": modules}

    @property
    def init_log2_scale(self) -> int:
        return math.frexp(self.init_scale)[1] - 1

    @property
    def holds_scales(self) -> bool:
        """Whether scales are held between updates; "original" reuses factors."""
        return self.branches == "exact" and self.update_every > 1
