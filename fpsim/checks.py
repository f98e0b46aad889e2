"""Check arguments, and write the parts of error messages: nearest words, given values, the package to install."""

from __future__ import annotations

import difflib
import inspect
import json
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from numbers import Integral, Real
from typing import Any, TypeVar
from urllib.parse import unquote

__all__ = [
    "DISTRIBUTION",
    "did_you_mean",
    "few",
    "is_finite_number",
    "is_number",
    "is_whole",
    "known_arguments",
    "nearest",
    "number_of",
    "pip_install",
    "refuse",
    "require_callable",
    "require_flag",
    "require_iterable",
    "require_mapping",
    "require_number",
    "require_whole",
    "require_word",
    "required_arguments",
    "shown",
    "warn_of_namesake",
]

DISTRIBUTION = "ada-loss"  # the name on the package index, where `fpsim` is another project


def pip_install(extra: str, *others: str) -> str:
    """Return the command that installs an extra of this library, for an error; `others` are equally good extras.

    The command names the checkout or the file from which the library was installed, or the package if it came from an
    index: "pip install -e '/home/me/ada-loss[lab]'", "pip install 'ada-loss[lab]'".
    """
    form = _installed_from()
    return f"pip install {'-e ' * form.startswith('/')}" + " or ".join(
        f"'{form.replace('{extra}', name)}'" for name in (extra, *others)
    )


@cache
def _installed_from() -> str:
    """Return the requirement by which pip installed this library (PEP 610), with "{extra}" in place of an extra."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        record = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
        url, is_editable = record.get("url", ""), record.get("dir_info", {}).get("editable", False)
    except (PackageNotFoundError, OSError, ValueError, AttributeError):
        url, is_editable = "", False
    words = f"{DISTRIBUTION}[{{extra}}]"
    if is_editable and url.startswith("file:///"):
        return f"{unquote(url.removeprefix('file://'))}[{{extra}}]"
    if url and "vcs_info" in record:
        # pip before 24.1, which comes with Python 3.11 and 3.12, accepts git+file:// only with a host.
        url = url.replace("file:///", "file://localhost/", 1)
        return f"{words} @ {record['vcs_info'].get('vcs', 'git')}+{url}"
    return f"{words} @ {url}" if url else words


def warn_of_namesake() -> None:
    """Warn if the other `fpsim` of the package index is installed too: pip unpacks it into this package's folder."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        theirs = version("fpsim")
    except PackageNotFoundError:
        return
    warnings.warn(
        f"The distribution fpsim {theirs} is installed. It is another project, and its files replace those of "
        f"{DISTRIBUTION}'s package fpsim, or are replaced by them. Use an environment of its own for each: "
        f"`pip uninstall fpsim`, then `pip install --force-reinstall --no-deps {DISTRIBUTION}` (from a checkout: "
        "`-e FOLDER`).",
        stacklevel=3,
    )


LONGEST_WORD = 1000  # characters of a word whose near matches are searched: the search takes quadratic time
SHOWN = 100  # characters of a value in an error: more hide the sentence


def shown(value: object) -> str:
    """Return the `repr` of a value, for an error; the middle of a long one is left out.

    >>> shown("fp9"), len(shown("-" * 1000))
    ("'fp9'", 103)
    """
    # An integer of 5,000 digits has no `repr`, and the `repr` of a user's class may raise any error.
    try:
        text = repr(value)
    except Exception:
        text = f"a value of type {type(value).__name__}"
    # A tensor is printed on several lines.
    if "\n" in text:
        text = " ".join(line.strip() for line in text.splitlines())
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]}...{text[-SHOWN // 2 :]}"


def few(names: Sequence[str], most: int = 5) -> str:
    """Return the first of some names, for an error or a warning, and the number of the others.

    >>> few(["a", "b", "c"], most=2)
    "'a', 'b' and 1 more"
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(map(shown, names[:most]))}{more}"


def did_you_mean(
    word: object, known: Iterable[str], most: int = 1, others: Mapping[str, Sequence[str]] | None = None
) -> str:
    """Return a hint that names the nearest known word, to follow an error's first sentence; "" if no word is near.

    others: {word of another library, in lower case with underscores: the known words for it}.

    >>> did_you_mean("nearest", ["nearest_even", "stochastic"])
    " Did you mean 'nearest_even'?"
    >>> did_you_mean("xyz", ["nearest_even", "stochastic"])
    ''
    >>> did_you_mean("RNE", ["nearest_even", "stochastic"], others={"rne": ["nearest_even"]})
    " Did you mean 'nearest_even'?"
    """
    theirs = re.sub(r"[- ]", "_", word.strip().lower()) if isinstance(word, str) and others else ""
    near = list((others or {}).get(theirs, ())) or nearest(word, known, most)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def refuse(
    what: str,
    expected: str | Iterable[str],
    do: str = "",
    *,
    word: object = None,
    others: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Return the text of an error about an argument: the given value, the expected values, and the remedy.

    Args:
        what: the first sentence, without its full stop.
        expected: a description of valid values; or the known words, of which the nearest is named.
        do: sentences that follow, such as a remedy.
        word: the word that is not one of the known ones.
        others: as in `did_you_mean`.

    >>> refuse("workers=0 computes nothing", "1 or more")
    'workers=0 computes nothing. Expected: 1 or more.'
    >>> refuse("Unknown rounding 'nearest'", ["nearest_even", "up"], "Or omit it.", word="nearest")
    "Unknown rounding 'nearest'. Did you mean 'nearest_even'? Known: nearest_even, up. Or omit it."
    """
    if isinstance(expected, str):
        sentences = f"{what}. Expected: {expected}."
    else:
        known = list(expected)
        sentences = f"{what}.{did_you_mean(word, known, others=others)} Known: {', '.join(known)}."
    return f"{sentences} {do}".rstrip()


def nearest(word: object, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the known words nearest to a mistyped one, at most `most` of them, the nearest first.

    cutoff: the least similarity of a near word, from 0 to 1.
    """
    text = word if isinstance(word, str) else shown(word)
    return difflib.get_close_matches(text[:LONGEST_WORD], list(known), n=most, cutoff=cutoff)


def is_number(value: object) -> bool:
    """True if this is a real number; True and False do not count."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_finite_number(value: object) -> bool:
    """True if this is a real number that is neither inf nor NaN.

    >>> is_finite_number(10**400), is_finite_number(float("nan")), is_finite_number(True)
    (True, False, False)
    """
    # `math.isfinite` alone would not do: it raises OverflowError for an int beyond the largest float.
    return is_number(value) and (isinstance(value, Integral) or math.isfinite(value))  # type: ignore[arg-type]


def is_whole(value: object, least: int | None = None) -> bool:
    """True if this is an integer, and at least `least`; True and False do not count."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    return whole and (least is None or value >= least)  # type: ignore[operator]


# Checks of arguments. Each raises an error that names the argument, the given value, and the expected values.


def require_flag(name: str, value: object) -> None:
    """Raise ValueError for anything but True and False: Python would take the word "no" for true.

    >>> require_flag("inplace", "no")
    Traceback (most recent call last):
    ValueError: inplace='no' is not a flag. Expected: True or False.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)} is not a flag. Expected: True or False.")


def require_whole(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise TypeError for anything but an integer, ValueError for an integer out of range.

    >>> require_whole("every", 0, 1)
    Traceback (most recent call last):
    ValueError: every=0 is out of range. Expected: an integer, 1 or more.
    """
    expected = f"an integer, {least} or more" if most is None else f"an integer from {least} to {most}"
    if not is_whole(value):
        raise TypeError(f"{name}={shown(value)} is not an integer. Expected: {expected}.")
    if value < least or (most is not None and value > most):  # type: ignore[operator]
        raise ValueError(f"{name}={shown(value)} is out of range. Expected: {expected}.")


def require_number(name: str, value: object, least: float | None = None, most: float | None = None) -> None:
    """Raise TypeError for anything but a finite real number, ValueError for a number below `least` or above `most`.

    >>> require_number("level", "0.1", 0)
    Traceback (most recent call last):
    TypeError: level='0.1' is not a finite number. Expected: a number, 0 or more.
    """
    expected = "a number" if least is None else f"a number, {least} or more"
    if least is not None and most is not None:
        expected = f"a number from {least} to {most}"
    if not is_finite_number(value) or abs(value) > sys.float_info.max:  # type: ignore[arg-type]
        raise TypeError(f"{name}={shown(value)} is not a finite number. Expected: {expected}.")
    if (least is not None and value < least) or (most is not None and value > most):  # type: ignore[operator]
        raise ValueError(f"{name}={shown(value)} is out of range. Expected: {expected}.")


def number_of(name: str, value: Any) -> float:
    """Return a number, or a tensor or array of one number, as a float.

    Raises TypeError for any other value, and for a number that is too large for a float.

    >>> number_of("value", 2)
    2.0
    """
    try:
        if not isinstance(value, str | bytes | bool):
            return float(value)
    # torch raises RuntimeError for a tensor with several numbers.
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise TypeError(f"{name}={shown(value)} is not a number that float64 holds. Expected: a number, such as 1.5.")


def require_word(name: str, value: object, known: Iterable[str]) -> None:
    """Raise TypeError for anything but a string, ValueError for a string that is not known.

    >>> require_word("role", "eror", ["error", "weight"])
    Traceback (most recent call last):
    ValueError: Unknown role='eror'. Did you mean 'error'? Known: error, weight.
    """
    known = list(known)
    if not isinstance(value, str):
        raise TypeError(f"{name}={shown(value)} is not a string. Known: {', '.join(known)}.")
    if value not in known:
        raise ValueError(refuse(f"Unknown {name}={shown(value)}", known, word=value))


def require_callable(name: str, value: object, example: str) -> None:
    """Raise TypeError for a value that cannot be called.

    >>> require_callable("step", 3, "lambda: loss(model(x)).backward()")
    Traceback (most recent call last):
    TypeError: step is 3, which cannot be called. Expected: a function, such as lambda: loss(model(x)).backward().
    """
    # A class of torch.nn can be called, but makes a module instead of running one. torch is not imported for this.
    if isinstance(value, type) and hasattr(value, "named_parameters"):
        raise TypeError(f"{name} is {shown(value)}, a class. Expected: a function, or a module: {value.__name__}().")
    if not callable(value):
        raise TypeError(f"{name} is {shown(value)}, which cannot be called. Expected: a function, such as {example}.")


def require_mapping(name: str, value: object, example: str) -> None:
    """Raise TypeError for anything but a mapping.

    >>> require_mapping("where", "fp16", "{'format': 'fp16'}")
    Traceback (most recent call last):
    TypeError: where is 'fp16', which is not a mapping. Expected: such as {'format': 'fp16'}.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is {shown(value)}, which is not a mapping. Expected: such as {example}.")


def require_iterable(name: str, value: Any, example: str) -> list[Any]:
    """Return the items of an iterable. Raises TypeError for a string, a mapping, or a value that is not iterable.

    >>> require_iterable("formats", ("fp16", "bf16"), "['fp16']")
    ['fp16', 'bf16']
    >>> require_iterable("formats", "fp16", "['fp16']")
    Traceback (most recent call last):
    TypeError: formats is 'fp16', which is not a list. Expected: such as ['fp16'].
    """
    if not isinstance(value, str | bytes | Mapping):
        try:
            return list(value)
        except TypeError:  # not iterable, or a tensor without dimensions
            pass
    raise TypeError(f"{name} is {shown(value)}, which is not a list. Expected: such as {example}.")


Called = TypeVar("Called", bound=Callable[..., Any])


def required_arguments(function: Callable[..., object]) -> int:
    """Return the number of a function's positional arguments without a default; 0 if its signature is unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 0
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)


def known_arguments(elsewhere: Callable[[str], str] | None = None) -> Callable[[Called], Called]:
    """Decorate a function, or a class: the error for an unknown keyword argument names the nearest known one.

    elsewhere: a function from an unknown argument's name to a sentence that says where the argument belongs, or to "".

    >>> @known_arguments()
    ... def paint(colour, *, thick=False):
    ...     return colour
    >>> paint("red", color="blue")
    Traceback (most recent call last):
    TypeError: paint() has no argument 'color'. Did you mean 'colour'? Expected: colour, thick.
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
                    possible = f"Expected: {', '.join(names)}."
                    raise TypeError(f"{called.__name__}() has no argument {shown(name)}.{hint} {possible}")
            return function(*arguments, **options)

        if not is_class:
            return checked  # type: ignore[return-value]
        # The class itself is returned, and not a wrapper: isinstance, pickle and subclasses need the class.
        called.__init__ = checked  # type: ignore[misc, method-assign]
        return called

    return with_known_arguments
