"""Checks of arguments: the valid values of a parameter, in words and as a test, and a uniform error."""

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
    """The valid values of a parameter.

    words: their description in an error, after "it must be".
    allows: a function that returns whether a value is valid.
    """

    words: str
    allows: Callable[[Any], bool]

    def or_none(self) -> Possible:
        """Return a `Possible` that allows None as well as these values."""
        return Possible(f"{self.words}, or None", lambda v: v is None or self.allows(v))


def number(words: str, holds: Callable[[Any], bool]) -> Possible:
    """Return a `Possible` that allows the finite numbers for which `holds` is true, except ints beyond float64."""
    return Possible(words, lambda v: is_finite_number(v) and _is_in_float64(v) and bool(holds(v)))


def _is_in_float64(value: Any) -> bool:
    # Among Python's numbers only an int can be finite and exceed float64. Such an int would raise OverflowError later,
    # far from the code that took the argument.
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
    """Raise ValueError unless the value is valid.

    name: the parameter's name.
    value: the value given.
    possible: the valid values.
    owner: the object that takes the parameter, for the error: "GradScaler".
    default: the default of the parameter; if there is none, the error does not suggest omitting the parameter.

    >>> require("growth", 0.5, ABOVE_ONE, "rule", 2.0)
    Traceback (most recent call last):
    ValueError: growth=0.5 makes no rule: it must be a finite number above 1. Leave it out for 2.0.
    """
    if not possible.allows(value):
        remedy = "Give one" if default is MISSING else f"Leave it out for {default!r}"
        raise ValueError(f"{name}={shown(value)} makes no {owner}: it must be {possible.words}. {remedy}.")


def param(default: Any, possible: Possible) -> Any:
    """Declare a dataclass field that `check_fields` checks.

    default: the default of the field, or `dataclasses.MISSING`.
    possible: the valid values of the field.
    """
    return field(default=default, metadata={"possible": possible})


def check_fields(made: Any, owner: str) -> None:
    """Raise ValueError unless every field that declares its valid values (by `param`) has a valid value.

    made: an instance of the dataclass, which calls this in its `__post_init__`.
    owner: the description of the instance for the error: "rule 'torch'".
    """
    for f in fields(made):
        if "possible" in f.metadata:
            require(f.name, getattr(made, f.name), f.metadata["possible"], owner, f.default)
