"""What errors at the border have in common: near matches of a word, what counts as a number, what to install."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable
from functools import wraps
from numbers import Integral, Real
from typing import Any, TypeVar

__all__ = [
    "DISTRIBUTION",
    "did_you_mean",
    "is_finite_number",
    "is_number",
    "is_whole",
    "known_arguments",
    "nearest",
    "pip_install",
    "shown",
]

DISTRIBUTION = "ada-loss"  # the name on the package index, where `fpsim` is another project


def pip_install(extra: str, *others: str) -> str:
    """The command that installs an extra of this library, for an error; `others` are extras that would do as well.

    >>> pip_install("lab"), pip_install("cuda12", "cuda13")
    ("pip install 'ada-loss[lab]'", "pip install 'ada-loss[cuda12]' or 'ada-loss[cuda13]'")
    """
    return "pip install " + " or ".join(f"'{DISTRIBUTION}[{name}]'" for name in (extra, *others))


SHOWN = 100  # characters of a value in an error: more hide the sentence


def shown(value: object) -> str:
    """The `repr` of what came, for an error; the middle of a long one is left out.

    >>> shown("fp9"), len(shown("-" * 1000))
    ("'fp9'", 103)
    """
    try:
        text = repr(value)
    except Exception:  # an integer of 5,000 digits has none, and a stranger's may be broken
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]}...{text[-SHOWN // 2 :]}"


def did_you_mean(word: object, known: Iterable[str], most: int = 1) -> str:
    """A hint with the nearest of the known words, to be put behind the sentence that says what came; "" without one.

    >>> did_you_mean("nearest", ["nearest_even", "stochastic"])
    ' Did you mean nearest_even?'
    >>> did_you_mean("xyz", ["nearest_even", "stochastic"])
    ''
    """
    near = nearest(word, known, most)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def nearest(word: object, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> list[str]:
    """The known words nearest to a mistyped one, at most `most` of them, the nearest first.

    cutoff: how alike they have to be, from 0 to 1.
    """
    return difflib.get_close_matches(str(word), list(known), n=most, cutoff=cutoff)


def is_number(value: object) -> bool:
    """Whether this is a real number; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_finite_number(value: object) -> bool:
    """Whether this is a real number that is neither inf nor NaN.

    >>> is_finite_number(10**400), is_finite_number(float("nan")), is_finite_number(True)
    (True, False, False)
    """
    # math.isfinite raises OverflowError for an int beyond the largest float
    return is_number(value) and (isinstance(value, Integral) or math.isfinite(value))  # type: ignore[arg-type]


def is_whole(value: object, least: int | None = None) -> bool:
    """Whether this is an integer, and at least `least`; True and False are none."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    return whole and (least is None or value >= least)  # type: ignore[operator]


Called = TypeVar("Called", bound=Callable[..., Any])


def known_arguments(elsewhere: Callable[[str], str] | None = None) -> Callable[[Called], Called]:
    """Let a function, or a class by its `__init__`, meet an unknown keyword argument with the nearest known one.

    elsewhere: gives for a name the sentence that says where it belongs instead, or "".

    >>> @known_arguments()
    ... def paint(colour, *, thick=False):
    ...     return colour
    >>> paint("red", color="blue")
    Traceback (most recent call last):
    TypeError: paint() has no argument 'color'. Did you mean colour? Possible: colour, thick.
    """

    def with_known_arguments(called: Called) -> Called:
        is_class = isinstance(called, type)
        function: Any = called.__init__ if is_class else called  # type: ignore[misc]
        names = [*inspect.signature(function).parameters][is_class:]

        @wraps(function)
        def checked(*arguments: Any, **options: Any) -> Any:
            for name in options:
                if name not in names:
                    hint = (elsewhere and elsewhere(name)) or did_you_mean(name, names)
                    possible = f"Possible: {', '.join(names)}."
                    raise TypeError(f"{called.__name__}() has no argument {shown(name)}.{hint} {possible}")
            return function(*arguments, **options)

        if not is_class:
            return checked  # type: ignore[return-value]
        called.__init__ = checked  # type: ignore[misc, method-assign]
        return called

    return with_known_arguments
