"""Output of the command line: aligned tables with colour on a terminal, plain text in a pipe."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fpsim.checks import pip_install

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["is_terminal", "show", "show_lines", "show_table"]

# Styles for the lines of a verdict, by the first words of a line.
COLOURS = {
    "No more than": "green",
    "Above": "green",
    "Falls short": "red",
    "Collapse": "red",
    "Diverged": "red",
    "Worse": "red",
    "failed:": "red",
    "Open": "yellow",
    "Report:": "bold",
    "Every training:": "bold",
}
WIDEST = 10_000
# The least width of names, in letters, in a table that is wider than its terminal.
NARROWEST = 24
ROW = re.compile(r"\|(.*)\|")
RULE = re.compile(r"\|(?::?-+:?\|)+")


def show(text: object) -> None:
    """Print a text; on a terminal its Markdown tables are drawn and lines of verdicts are coloured."""
    if not is_terminal():
        print(text)
        return
    console = _console()
    lines, table = str(text).splitlines(), []
    # An empty line is added at the end, because an empty line ends a table.
    for i, line in enumerate([*lines, ""]):
        if ROW.fullmatch(line):
            table.append(line)
            continue
        if table:
            _draw(console, *_parsed(table))
            table = []
        if line or i < len(lines):
            colour = next((c for words, c in COLOURS.items() if line.startswith(words)), "")
            # The line is printed unchanged: rich would read the brackets of intervals as markup, and wrap paths.
            console.print(line, style=colour, markup=False, highlight=False, soft_wrap=True)


def show_table(table: Any) -> None:
    """Print a `Table` below its title; on a terminal the best mean of each row is bold."""
    if not is_terminal():
        print(f"{table.title}\n{table}")
        return
    console, sign = _console(), table.directions.sign(table.metric)
    console.print(table.title, style="bold", markup=False, highlight=False)
    rows, styles = [], []
    for row in table.down:
        means = [sign * table.mean(row, column) for column in table.across]
        best = max((mean for mean in means if mean == mean), default=None) if sign else None
        rows.append([row, *(table.text(row, column) for column in table.across)])
        # A single mean, or means that are all equal, are not marked as best.
        many = len({mean for mean in means if mean == mean}) > 1
        styles.append(["", *("bold green" if many and mean == best else "" for mean in means)])
    _draw(
        console, [f"{table.rows} \\ {table.columns}", *table.across], rows, [False] + [True] * len(table.across), styles
    )


def show_lines(lines: Sequence[Sequence[str]]) -> None:
    """Print aligned columns; the first line holds the headings."""
    if is_terminal():
        _draw(_console(), lines[0], lines[1:], [False] * len(lines[0]))
        return
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  ".join(word.ljust(width) for word, width in zip(line, widths)).rstrip())


def is_terminal() -> bool:
    """True if output goes to a terminal that can draw."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def _console(width: int | None = None) -> Console:
    try:
        from rich.console import Console
    except ImportError as error:
        raise ImportError(
            f"The command line needs {error.name}, which is not installed: {pip_install('lab')}."
        ) from None
    # rich itself respects NO_COLOR.
    return Console(width=width)


def _parsed(lines: Sequence[str]) -> tuple[list[str], list[list[str]], list[bool]]:
    """Return the headings of a Markdown table, its rows, and which columns are aligned to the right."""
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line[1:-1])] for line in lines]
    has_rule = len(lines) > 1 and RULE.fullmatch(lines[1]) is not None
    to_the_right = [rule.endswith(":") for rule in cells[1]] if has_rule else [False] * len(cells[0])
    return cells[0], cells[2:] if has_rule else cells[1:], to_the_right


def _draw(
    console: Console,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    to_the_right: Sequence[bool],
    styles: Sequence[Sequence[str]] | None = None,
) -> None:
    from rich import box
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold cyan", pad_edge=False, show_edge=False)
    for i, (head, is_right) in enumerate(zip(heads, to_the_right)):
        # The first column has the names, which may be broken over lines. Numbers must not be broken.
        table.add_column(Text(head), justify="right" if is_right else "left", overflow="fold", no_wrap=i > 0)
    for i, row in enumerate(rows):
        words = [Text(cell, style=styles[i][j] if styles else "") for j, cell in enumerate(row)]
        for cell in words:
            if cell.plain in ("-", "nan"):
                cell.style = "dim" if cell.plain == "-" else "red"
        table.add_row(*words)
    natural = Measurement.get(console, console.options.update(width=WIDEST), table).maximum
    longest = max(len(cells[0]) for cells in (heads, *rows))
    # The least width: names may be broken down to NARROWEST letters, and all other text stays whole.
    needed = natural - longest + min(longest, NARROWEST)
    # rich would cut off numbers that do not fit. If the table is drawn wider, the terminal breaks the lines instead.
    if needed > console.width:
        console = _console(needed)
    console.print(table)
