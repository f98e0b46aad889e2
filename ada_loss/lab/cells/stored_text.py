"""What a row of the ledger has as text: configurations and metrics as JSON, errors, and the digest of all of it."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["as_float64", "digest_of", "is_json_number", "json_object", "storable"]

MOST_TEXT = 20_000  # characters of an error or a traceback


def digest_of(values: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def json_object(text: str) -> dict[str, Any] | None:
    """The object of a JSON text; None for anything else."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def is_json_number(value: object) -> bool:
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
