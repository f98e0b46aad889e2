"""The settings of adaptive scaling, validated once."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass, fields
from typing import Any

from ada_loss.rules.layer import LayerRule
from fpsim.checks import is_finite_number, is_whole, shown
from fpsim.scaling import RoundingSpec

__all__ = ["Options"]

BRANCHES = ("exact", "original")
U_MINS = ("smallest", "flush", "normal")


def _is_scale(value: Any) -> bool:
    """True for a number above 0 that float64 holds."""
    return is_finite_number(value) and value > 0 and (not isinstance(value, int) or value <= sys.float_info.max)


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
    u_min: str | float
    u_max: float | None
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
        self._check_range()

    def _check_range(self) -> None:
        u_min, u_max = self.u_min, self.u_max
        if not (_is_scale(u_min) or (isinstance(u_min, str) and u_min in U_MINS)):
            raise ValueError(
                f"u_min={shown(u_min)} is invalid. Expected: 'smallest', 'flush' or 'normal', or a finite number above "
                f"0, which the format holds, such as 6e-8."
            )
        if not (u_max is None or _is_scale(u_max)):
            raise ValueError(
                f"u_max={shown(u_max)} is invalid. Expected: a finite number above 0, which the format holds, or None "
                f"for its largest."
            )
        for name, given in (("u_min", u_min), ("u_max", u_max)):
            if not (given is None or isinstance(given, str)):
                object.__setattr__(self, name, float(given))  # as the JSON of a state has it
        if not isinstance(u_min, str) and u_max is not None and not u_min < u_max:
            raise ValueError(f"u_min={u_min!r} is not below u_max={u_max!r}. Expected: a range. Exchange the two.")

    def _check_what_is_measured(self) -> None:
        """Refuse settings that do not apply to a rule that measures: it has no factors, and holds no scales."""
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
        """True if the rule predicts a product's result from its operands; otherwise it measures gradients."""
        return self.rule.predicts

    def as_plain(self) -> dict[str, Any]:
        """All settings as plain values, the rule by its name and parameters."""
        modules = None if self.modules is None else sorted(self.modules)
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**plain, "rule": self.rule.name, "params": asdict(self.rule), "modules": modules}

    @property
    def has_range(self) -> bool:
        """True if a limit of the format is given as a number, which not every format holds."""
        return self.u_max is not None or not isinstance(self.u_min, str)

    def require_range_of(self, spec: RoundingSpec, place: str) -> None:
        """Raise ValueError if a numeric u_min or u_max is outside the range of a format.

        spec: how gradients are rounded.
        place: the place, for the error.
        """
        fmt = spec.fmt
        u_min = self.u_min if isinstance(self.u_min, float) else fmt.smallest
        u_max = fmt.largest if self.u_max is None else self.u_max
        # up to half of the smallest magnitude rounding gives 0, so a rule would keep gradients above nothing
        if not fmt.smallest / 2 <= u_min < u_max <= fmt.largest:
            given = [
                f"{name}={getattr(self, name)!r}" for name in ("u_min", "u_max") if getattr(self, name) is not None
            ]
            raise ValueError(
                f"{' and '.join(given)} was given, and {place} is rounded to {fmt}, whose magnitudes are "
                f"{fmt.smallest!r} to {fmt.largest!r}. Expected: numbers of that range, u_min from half the smallest "
                f"on. Use u_min='smallest' and u_max=None, which follow each format."
            )

    @property
    def init_log2_scale(self) -> int:
        return math.frexp(self.init_scale)[1] - 1

    @property
    def holds_scales(self) -> bool:
        """True if scales are held between updates; "original" reuses factors."""
        return self.branches == "exact" and self.update_every > 1
