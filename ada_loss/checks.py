"""Errors at the border in one voice: what a parameter may be, and the refusal of one that is something else."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import MISSING
from numbers import Integral, Real
from typing import Any, NamedTuple

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
    "number",
    "require",
    "whole",
]

FLOAT64_MAX = sys.float_info.max


class Possible(NamedTuple):
    """What a parameter may be: in words, and as a test."""

    words: str
    allows: Callable[[Any], bool]

    def or_none(self) -> Possible:
        return Possible(f"{self.words}, or None", lambda v: v is None or self.allows(v))


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    # math.isfinite raises for an int beyond the largest float
    return abs(value) <= FLOAT64_MAX if isinstance(value, int) else math.isfinite(value)


def number(words: str, holds: Callable[[Any], bool]) -> Possible:
    return Possible(words, lambda v: _is_number(v) and _is_finite(v) and bool(holds(v)))


def whole(words: str, holds: Callable[[Any], bool]) -> Possible:
    return Possible(words, lambda v: isinstance(v, Integral) and not isinstance(v, bool) and bool(holds(v)))


POSITIVE = number("a finite number above 0", lambda v: v > 0)
NOT_NEGATIVE = number("a finite number, 0 or more", lambda v: v >= 0)
ABOVE_ONE = number("a finite number above 1", lambda v: v > 1)
AT_LEAST_ONE = number("a finite number, 1 or more", lambda v: v >= 1)
BELOW_ONE = number("a number between 0 and 1, both excluded", lambda v: 0 < v < 1)
FINITE = number("a finite number", lambda v: True)
STEPS = whole("a whole number, 1 or more", lambda v: v >= 1)
COUNT = whole("a whole number, 0 or more", lambda v: v >= 0)
FLAG = Possible("True or False", lambda v: isinstance(v, bool))


def require(name: str, value: object, possible: Possible, owner: str, default: object = MISSING) -> None:
    """Refuse a parameter that is not possible.

    >>> require("growth", 0.5, ABOVE_ONE, "rule", 2.0)
    Traceback (most recent call last):
    ValueError: growth=0.5 makes no rule: it must be a finite number above 1. Leave it out for 2.0.
    """
    if not possible.allows(value):
        remedy = "Give one" if default is MISSING else f"Leave it out for {default!r}"
        raise ValueError(f"{name}={value!r} makes no {owner}: it must be {possible.words}. {remedy}.")
