"""Errors that the command line catches by class, and their text for a terminal; without torch, for a fast start."""

from __future__ import annotations

import unicodedata

__all__ = ["SweepStopped", "UnreadableLedger", "in_line", "printable"]


class SweepStopped(RuntimeError):
    """Raised if a sweep cannot continue. Finished cells are kept."""


class UnreadableLedger(ValueError):
    """Raised if the ledger of a sweep is damaged, or cannot be read for another reason."""


def printable(text: object) -> str:
    r"""Escape control characters, bidirectional marks and lone surrogates in a text for a terminal.

    A foreign ledger may hold any text as an error. Newlines and tabs stay.

    >>> print(printable("a\x1b]0;title\x07 \ud800 b"))
    a\x1b]0;title\x07 \ud800 b
    """
    words = str(text)
    # Most texts are printable, and this test is 50 times as fast as the loop.
    if words.isprintable():
        return words
    return "".join(c.encode("unicode_escape").decode() if _is_control(c) else c for c in words)


def in_line(text: object) -> str:
    r"""Escape a text for a single line, also its newlines and tabs, which could forge a line of a table.

    >>> print(in_line("a\n| forged |"))
    a\n| forged |
    """
    return printable(text).replace("\n", r"\n").replace("\t", r"\t")


def _is_control(letter: str) -> bool:
    is_bidi = "\u202a" <= letter <= "\u202e" or "\u2066" <= letter <= "\u2069"
    return letter not in "\n\t" and (is_bidi or unicodedata.category(letter) in ("Cc", "Cs"))
