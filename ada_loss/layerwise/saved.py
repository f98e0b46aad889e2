"""Checks of a saved state of adaptive scaling, before any of it is loaded."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fpsim.checks import few, is_number, is_whole, shown

__all__ = ["check_progress", "check_sites"]

MOST_LOG2_SCALE = 2100  # float64's numbers span 2**-1074 to 2**1024
MOST_STEPS = 2**63 - 1
ROLES = ("error", "weight_grad", "wgrad.dy")
KEYS = ("site", "role", "factors", "kept", "amax", "ceiling", "reached", "history")


def check_progress(state: Mapping[str, Any]) -> None:
    """Raise ValueError unless the step and the step of the last update are counts, the second at most the first."""
    for name in ("step", "updated"):
        if not is_whole(state[name], 0) or state[name] > MOST_STEPS:
            raise ValueError(f"The state has {name}={shown(state[name])}. Expected: a whole number, 0 or more.")
    if state["updated"] > state["step"]:
        raise ValueError(f"The state has updated={state['updated']}, after its step={state['step']}.")


def check_sites(sites: Any, step: int, modules: Collection[str], length: int | None) -> None:
    """Raise ValueError unless these are complete sites of the model.

    sites: those of a state. step: the state's.
    modules: the names of the model's modules; "" is the model.
    length: of the history that the rule keeps; None for a rule without.
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
    return value is None or (is_whole(value) and abs(value) <= MOST_LOG2_SCALE)


def _is_magnitude(value: Any) -> bool:
    """True for a number from 0 to inf that float64 holds."""
    return is_number(value) and (value == math.inf or 0 <= value <= 2**1023)
