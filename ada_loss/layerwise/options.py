"""Settings of adaptive scaling, which are validated once, and checks of a saved state before it is loaded."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ada_loss.rules.layer import LayerRule
from fpsim.checks import few, is_finite_number, is_number, is_whole, shown
from fpsim.scaling import RoundingSpec

__all__ = ["Options", "check_progress", "check_sites"]

BRANCHES = ("exact", "original")
U_MINS = ("smallest", "flush", "normal")
MOST_LOG2_SCALE = 2100  # float64's numbers span 2**-1074 to 2**1024, so no scale between two of them is larger
MOST_STEPS = 2**63 - 1
ROLES = ("error", "weight_grad", "wgrad.dy")
KEYS = ("site", "role", "factors", "kept", "amax", "ceiling", "reached", "history")


def _is_scale(value: Any) -> bool:
    """Return True for a number above 0 that float64 holds."""
    return is_finite_number(value) and value > 0 and (not isinstance(value, int) or value <= sys.float_info.max)


@dataclass(frozen=True)
class Options:
    """The settings of `AdaLossScaled`, which documents them. Raises ValueError for an invalid setting.

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
                # The number gets the type that it has in the JSON of a state, so that equal settings are equal after a
                # round trip.
                object.__setattr__(self, name, float(given))
        if not isinstance(u_min, str) and u_max is not None and not u_min < u_max:
            raise ValueError(f"u_min={u_min!r} is not below u_max={u_max!r}. Expected: a range. Exchange the two.")

    def _check_what_is_measured(self) -> None:
        """Refuse settings that do not apply to a rule that measures, because it has no factors and holds no scales."""
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
        """Return True if the rule predicts a product's result from its operands; other rules measure gradients."""
        return self.rule.predicts

    def as_plain(self) -> dict[str, Any]:
        """Return all settings as plain values, the rule by its name and parameters."""
        modules = None if self.modules is None else sorted(self.modules)
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**plain, "rule": self.rule.name, "params": asdict(self.rule), "modules": modules}

    @property
    def has_range(self) -> bool:
        """Return True if u_min or u_max is a number, which not every format holds."""
        return self.u_max is not None or not isinstance(self.u_min, str)

    def require_range_of(self, spec: RoundingSpec, place: str) -> None:
        """Raise ValueError if a numeric u_min or u_max is outside the range of a format.

        spec: how gradients are rounded.
        place: a description of the gradient, for the error message.
        """
        fmt = spec.fmt
        u_min = self.u_min if isinstance(self.u_min, float) else fmt.smallest
        u_max = fmt.largest if self.u_max is None else self.u_max
        # Rounding turns numbers up to half of the smallest magnitude into 0: with a lower u_min a rule would accept
        # gradients that become 0.
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
        """Return True if scales are held between updates; branches="original" reuses factors instead."""
        return self.branches == "exact" and self.update_every > 1


def check_progress(state: Mapping[str, Any]) -> None:
    """Raise ValueError unless the step and the last update's step are counts, and no update follows the step."""
    for name in ("step", "updated"):
        if not is_whole(state[name], 0) or state[name] > MOST_STEPS:
            raise ValueError(f"The state has {name}={shown(state[name])}. Expected: a whole number, 0 or more.")
    if state["updated"] > state["step"]:
        raise ValueError(f"The state has updated={state['updated']}, after its step={state['step']}.")


def check_sites(sites: Any, step: int, modules: Collection[str], length: int | None) -> None:
    """Raise ValueError unless these are complete sites of the model.

    sites: the sites of a state. step: the step of the state.
    modules: the names of the model's modules; "" is the model.
    length: the length of the history that the rule keeps; None for a rule without a history.
    """
    if not isinstance(sites, Sequence) or isinstance(sites, str) or not all(isinstance(s, Mapping) for s in sites):
        raise ValueError(f"The state has sites={shown(sites)}. Expected: a list of mappings, one for each site.")
    known: set[tuple[str, str]] = set()
    for saved in sites:
        missing = [name for name in KEYS if name not in saved]
        if missing:
            raise ValueError(f"A site of the state has {sorted(map(str, saved))}, and lacks {', '.join(missing)}.")
        site, role = saved["site"], saved["role"]
        if not isinstance(site, str) or not isinstance(role, str) or role not in ROLES or (site, role) in known:
            raise ValueError(
                f"The state has a site {shown(site)} with role {shown(role)}. Expected: names of sites, each once with "
                f"the role {' or '.join(ROLES)}."
            )
        known.add((site, role))
        _check_site(saved, step, length)
    strange = [site for site, _ in known if site.partition(":")[0] not in modules]
    if strange:
        raise ValueError(
            f"The state is of another model: it has the sites {few(sorted(strange))}, and the model "
            f"has no such modules. Load the state of a model with the same names."
        )


def _check_site(saved: Mapping[str, Any], step: int, length: int | None) -> None:
    """Raise ValueError if fields of a site are invalid, with all invalid fields in one message."""
    factors, history = saved["factors"], saved["history"]
    wrong = [name for name in ("kept", "log2_scale") if not _is_log2_scale(saved.get(name))]
    wrong += [name for name in ("amax", "ceiling") if not _is_magnitude(saved[name])]
    if not isinstance(factors, Mapping) or not all(
        (is_whole(index, -1) or (isinstance(index, str) and index.removeprefix("-").isdigit()))
        and _is_magnitude(factor)
        for index, factor in factors.items()
    ):
        wrong.append("factors")
    if not is_whole(saved["reached"], 0) or saved["reached"] > step:
        wrong.append("reached")
    if history is not None and not (
        isinstance(history, Sequence)
        and not isinstance(history, str)
        and len(history) == length
        and all(map(_is_magnitude, history))
    ):
        wrong.append("history")
    if wrong:
        given = ", ".join(f"{name}={shown(saved.get(name))}" for name in wrong)
        raise ValueError(
            f"The state of the site {shown(saved['site'])} has {given}. Expected: exponents of scales as whole "
            f"numbers, magnitudes of 0 or more, steps up to the state's, and a history as long as the rule's."
        )


def _is_log2_scale(value: Any) -> bool:
    """Return True for None, and for an exponent that a scale may have."""
    return value is None or (is_whole(value) and abs(value) <= MOST_LOG2_SCALE)


def _is_magnitude(value: Any) -> bool:
    """Return True for a number from 0 to inf that float64 holds."""
    return is_number(value) and (value == math.inf or 0 <= value <= 2**1023)
