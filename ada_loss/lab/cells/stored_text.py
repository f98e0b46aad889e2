"""Text in the rows of the ledger: configurations and metrics as JSON, errors, and the digest of a row."""

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

MOST_TEXT = 20_000  # the number of characters that are kept of an error or a traceback
# These methods are faster than json.dumps and json.loads, which check their options in each call.
ENCODE, DECODE = json.JSONEncoder().encode, json.JSONDecoder().decode
SEED = re.compile(r'"seed": (-?[0-9]{1,18})(?=[,}])')  # the seed in a configuration's JSON


def digest_of(values: Sequence[Any]) -> str:
    """Return the SHA-256 of SQLite values, in the JSON text that json.dumps would write.

    >>> values = [1, None, "\\u00e9", 0.5, math.inf]
    >>> digest_of(values) == hashlib.sha256(json.dumps(values).encode()).hexdigest()
    True
    """
    words = [WRITTEN[type(value)](value) for value in values]
    return hashlib.sha256(f"[{', '.join(words)}]".encode()).hexdigest()


def _float(value: float) -> str:
    return repr(value) if math.isfinite(value) else ENCODE(value)


# Functions that write each SQLite type as json.dumps does. One call of json.dumps would take longer than these
# functions take for a whole row.
WRITTEN: dict[type, Callable[[Any], str]] = {
    str: json.encoder.encode_basestring_ascii,
    int: repr,
    float: _float,
    NoneType: lambda _: "null",
}


class Configs:
    """Decode the configurations of a sweep. Configurations that differ only in the seed share everything else.

    In a sweep of 100,000 cells, most differ only in the seed. If each cell were decoded separately, this would take
    seconds, and a kilobyte per cell.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}

    def decoded(self, text: str) -> dict[str, Any] | None:
        """Return the configuration in a text; None for anything but a JSON object."""
        parts = SEED.split(text, 2)
        # A text without a seed, or with an option of the same name, is decoded as a whole.
        if len(parts) != 3:
            return json_object(text)
        before, seed, after = parts
        known = self._known.get(before + after)
        if known is None:
            known = json_object(text)
            # Nothing is shared if the number that was found belongs to another "seed", at a deeper level.
            if known is None or known.get("seed") != int(seed):
                return known
            self._known[before + after] = known
        return {**known, "seed": int(seed)}


def json_object(text: str) -> dict[str, Any] | None:
    """Return the object in a JSON text; None for anything else."""
    try:
        content = DECODE(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def is_json_number(value: object) -> bool:
    """True for a number or a boolean of JSON."""
    return isinstance(value, int | float)


def as_float64(value: Any) -> Any:
    """Replace an integer beyond the range of float64 by inf or -inf, as JSON reads a decimal of this size.

    >>> as_float64(10**400), as_float64(-(10**400)), as_float64(3)
    (inf, -inf, 3)
    """
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        # Statistics would raise OverflowError on such an integer.
        return math.inf if value > 0 else -math.inf
    return value


def storable(text: str) -> str:
    """Return a text that UTF-8 can encode; the middle of a long text is left out.

    >>> storable("file \\udcff"), len(storable("x" * 5_000_000)) < 1.01 * MOST_TEXT
    ('file \\\\udcff', True)
    """
    half = MOST_TEXT // 2
    if len(text) > MOST_TEXT:
        text = f"{text[:half]}\n... {len(text) - MOST_TEXT:,} characters are left out ...\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()
