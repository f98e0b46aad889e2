"""Which parameter gets which update: the patterns of `Update.overrides`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from fpsim.checks import nearest, shown
from fpsim.policies.update import Update, as_update

__all__ = ["updates_of"]


def updates_of(update: Update, names: list[str], classes: Mapping[str, list[type]]) -> list[Update]:
    """The update of each parameter by its name, overrides resolved.

    Args:
        update: of the optimizer.
        names: of the parameters, "blocks.0.norm.weight".
        classes: the classes of the modules by name; empty where there is no model.

    Raises:
        ValueError: for a pattern that matches none.
    """
    updates = [replace(update, overrides={})] * len(names)
    for pattern, inner in update.overrides.items():
        matched = [i for i, name in enumerate(names) if _matches(pattern, name, classes)]
        if not matched:
            raise ValueError(_no_match(pattern, names, classes))
        for i in matched:
            updates[i] = as_update(inner)
    return updates


def _matches(pattern: str | type[nn.Module], name: str, classes: Mapping[str, list[type]]) -> bool:
    parts = name.split(".")
    if not isinstance(pattern, str):
        places = [".".join(parts[:i]) for i in range(len(parts))]
        return any(issubclass(kind, pattern) for place in places for kind in classes.get(place, ()))
    wanted = pattern.split(".")
    return len(wanted) <= len(parts) and all(map(fnmatchcase, parts, wanted))


def _no_match(pattern: str | type[nn.Module], names: list[str], classes: Mapping[str, list[type]]) -> str:
    if not isinstance(pattern, str):
        kinds = sorted({kind.__name__ for of_module in classes.values() for kind in of_module})
        remedy = f"Classes that have parameters: {', '.join(kinds)}." if kinds else "Classes need model=model."
        return f"The pattern {pattern.__name__} matches no parameter. {remedy}"
    near = nearest(pattern, names, most=3, cutoff=0.4) or names[:5]
    if not classes and all(name.replace(".", "").isdecimal() for name in names):
        return f"The pattern {shown(pattern)} matches no parameter, for they have no names. Give model=model."
    return (
        f"The pattern {shown(pattern)} matches no parameter. Names are those of model.named_parameters(), for instance "
        f"{', '.join(near)}; * stands for one part of a name."
    )
