"""Rows of numbers: dictionaries that print as a table and become a DataFrame."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fpsim.checks import pip_install

__all__ = ["Rows", "largest_of", "number", "text_table"]


class Rows(list[dict[str, Any]]):
    """Rows with the same keys."""

    def to_frame(self) -> Any:
        """Return a pandas.DataFrame. Raises ImportError without pandas."""
        # pandas is imported only here: it belongs to the extra `lab`, and rows print without it.
        try:
            import pandas as pd
        except ImportError:
            raise ImportError(f"to_frame() needs pandas, which is not installed: {pip_install('lab')}.") from None
        return pd.DataFrame(list(self))

    def __str__(self) -> str:
        return text_table([*self[0]], [[number(v) for v in row.values()] for row in self]) if self else "(no rows)"


def largest_of(rows: Iterable[Mapping[str, Any]], name: str) -> float | None:
    """Return the largest value of a column among the rows that have one; None if no row has one."""
    return max((row[name] for row in rows if row[name] is not None), default=None)


def number(value: object) -> str:
    """Format a value as a cell of a table."""
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def text_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format rows as columns below their heads.

    >>> print(text_table(["site", "amax"], [["fc", "3"]]))
    site  amax
    ----  ----
    fc    3
    """
    body = [tuple(row) for row in rows]
    widths = [max(len(row[i]) for row in (heads, *body)) for i in range(len(heads))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in (heads, *body)]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])
