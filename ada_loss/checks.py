"""Checks of arguments: which values a parameter may have, in words and as a test, and one error for all others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from typing import Any, NamedTuple

from fpsim.checks import is_finite_number, is_whole, shown

__all__ = [
    "ABOVE_ONE",
    "AT_LEAST_ONE",
    "BELOW_ONE",
    "COUNT",
    "FINITE",
    "FLAG",
    "NOT_NEGATIVE",
    "POSITIVE",
    "STEPS",
    "Possible",
    "check_fields",
    "number",
    "param",
    "require",
]

FLOAT64_MAX = sys.float_info.max


class Possible(NamedTuple):
    """The values that a parameter may have.

    words: what an error says of them, after "it must be".
    allows: whether a value is one of them.
    """

    words: str
    allows: Callable[[Any], bool]

    def or_none(self) -> Possible:
        """These values, and None."""
        return Possible(f"{self.words}, or None", lambda v: v is None or self.allows(v))


def number(words: str, holds: Callable[[Any], bool]) -> Possible:
    """The finite numbers for which `holds` is true. An int beyond the largest float64 is not one of them."""
    return Possible(words, lambda v: is_finite_number(v) and _is_in_float64(v) and bool(holds(v)))


def _is_in_float64(value: Any) -> bool:
    return not isinstance(value, int) or abs(value) <= FLOAT64_MAX


POSITIVE = number("a finite number above 0", lambda v: v > 0)
NOT_NEGATIVE = number("a finite number, 0 or more", lambda v: v >= 0)
ABOVE_ONE = number("a finite number above 1", lambda v: v > 1)
AT_LEAST_ONE = number("a finite number, 1 or more", lambda v: v >= 1)
BELOW_ONE = number("a number between 0 and 1, both excluded", lambda v: 0 < v < 1)
FINITE = number("a finite number", lambda v: True)
STEPS = Possible("a whole number, 1 or more", lambda v: is_whole(v, 1))
COUNT = Possible("a whole number, 0 or more", lambda v: is_whole(v, 0))
FLAG = Possible("True or False", lambda v: isinstance(v, bool))


def require(name: str, value: object, possible: Possible, owner: str, default: object = MISSING) -> None:
    """Raise ValueError unless the value is possible.

    name: the parameter's name.
    value: what was given for it.
    possible: the values that it may have.
    owner: what would be made with it, for the error: "GradScaler".
    default: what it is when it is left out; without one the error does not suggest that.

    >>> require("growth", 0.5, ABOVE_ONE, "rule", 2.0)
    Traceback (most recent call last):
    ValueError: growth=0.5 makes no rule: it must be a finite number above 1. Leave it out for 2.0.
    """
    if not possible.allows(value):
        remedy = "Give one" if default is MISSING else f"Leave it out for {default!r}"
        raise ValueError(f"{name}={shown(value)} makes no {owner}: it must be {possible.words}. {remedy}.")


def param(default: Any, possible: Possible) -> Any:
    """A dataclass field for a parameter that `check_fields` checks.

    default: its default, or `dataclasses.MISSING` where there is none.
    possible: the values that it may have.
    """
    return field(default=default, metadata={"possible": possible})


def check_fields(made: Any, owner: str) -> None:
    """Raise ValueError unless every field of a dataclass that says what is possible has such a value.

    made: an instance, as it arrives in `__post_init__`.
    owner: what it is, for the error: "rule 'torch'".
    """
    for f in fields(made):
        if "possible" in f.metadata:
            require(f.name, getattr(made, f.name), f.metadata["possible"], owner, f.default)
