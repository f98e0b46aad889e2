"""Errors that the command line catches by class, and their text for a terminal; without torch, as it starts at once."""

from __future__ import annotations

import unicodedata

__all__ = ["SweepStopped", "UnreadableLedger", "printable"]


class SweepStopped(RuntimeError):
    """A sweep could not go on. The cells that are done are kept."""


class UnreadableLedger(ValueError):
    """The ledger of a sweep is damaged, or cannot be read for another reason."""


def printable(text: object) -> str:
    r"""A text for a terminal: control characters, signs that turn the direction of writing and halves of pairs escaped.

    A ledger may hold errors of someone else. Newlines and tabs stay.

    >>> print(printable("a\x1b]0;title\x07 \ud800 b"))
    a\x1b]0;title\x07 \ud800 b
    """
    return "".join(c.encode("unicode_escape").decode() if _is_control(c) else c for c in str(text))


def _is_control(letter: str) -> bool:
    is_bidi = "\u202a" <= letter <= "\u202e" or "\u2066" <= letter <= "\u2069"
    return letter not in "\n\t" and (is_bidi or unicodedata.category(letter) in ("Cc", "Cs"))
