"""What a row of the ledger has as text: configurations and metrics as JSON, errors, and the digest of all of it."""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any

__all__ = ["Configs", "as_float64", "digest_of", "is_json_number", "json_object", "storable"]

MOST_TEXT = 20_000  # characters of an error or a traceback
ENCODE, DECODE = json.JSONEncoder().encode, json.JSONDecoder().decode  # json.dumps and loads ask more of each call
SEED = re.compile(r'"seed": (-?[0-9]{1,18})(?=[,}])')  # in a configuration


def digest_of(values: Sequence[Any]) -> str:
    """The SHA-256 of values of SQLite as the JSON that json.dumps writes.

    >>> values = [1, None, "\\u00e9", 0.5, math.inf]
    >>> digest_of(values) == hashlib.sha256(json.dumps(values).encode()).hexdigest()
    True
    """
    words = [WRITTEN[type(value)](value) for value in values]
    return hashlib.sha256(f"[{', '.join(words)}]".encode()).hexdigest()


def _float(value: float) -> str:
    return repr(value) if math.isfinite(value) else ENCODE(value)


# What json.dumps writes for each type of SQLite; a call of it takes longer than all values of a row
WRITTEN: dict[type, Callable[[Any], str]] = {
    str: json.encoder.encode_basestring_ascii,
    int: repr,
    float: _float,
    NoneType: lambda _: "null",
}


class Configs:
    """Decodes the configurations of a sweep: those that differ in the seed alone share what else they hold.

    Of 100,000 cells few are different but for the seed, and to decode each takes seconds and a kilobyte.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}

    def decoded(self, text: str) -> dict[str, Any] | None:
        """The configuration in a text; None for what is no JSON object."""
        parts = SEED.split(text, 2)
        if len(parts) != 3:  # there is no seed, or an option has one too
            return json_object(text)
        before, seed, after = parts
        known = self._known.get(before + after)
        if known is None:
            known = json_object(text)
            if known is None or known.get("seed") != int(seed):
                return known
            self._known[before + after] = known
        return {**known, "seed": int(seed)}


def json_object(text: str) -> dict[str, Any] | None:
    """The object of a JSON text; None for anything else."""
    try:
        content = DECODE(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def is_json_number(value: object) -> bool:
    """Whether JSON has a number, or a truth value, there."""
    return isinstance(value, int | float)


def as_float64(value: Any) -> Any:
    """A value, and for an integer beyond float64 what JSON has for a decimal beyond it.

    >>> as_float64(10**400), as_float64(-(10**400)), as_float64(3)
    (inf, -inf, 3)
    """
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return math.inf if value > 0 else -math.inf  # nothing can be computed with an integer that is no float
    return value


def storable(text: str) -> str:
    """A text as UTF-8 holds it, and of a long one the ends.

    >>> storable("file \\udcff"), len(storable("x" * 5_000_000)) < 1.01 * MOST_TEXT
    ('file \\\\udcff', True)
    """
    half = MOST_TEXT // 2
    if len(text) > MOST_TEXT:
        text = f"{text[:half]}\n... {len(text) - MOST_TEXT:,} characters are left out ...\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()
