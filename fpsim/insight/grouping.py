"""How a summary of a large model prints: equal modules on one line, and long words below the table."""

from __future__ import annotations

import string
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fpsim.insight.rows import text_table

__all__ = ["Line", "grouped", "shown_in"]

WIDTH = 100  # columns
DEFAULT = " nearest_even"


class Line(NamedTuple):
    """A line of a summary: the modules, how many there are, and what they round, as `SummaryRow` has it."""

    module: str
    modules: int
    type: str
    roles: tuple[str, ...]
    products: str
    wide: str
    cache: str = ""


def grouped(lines: Iterable[Line]) -> list[Line]:
    """Modules that differ in the numbers of their names alone, on the line of the first: "layers.0-31.mlp".

    >>> [line.module for line in grouped(Line(f"blocks.{i}.fc", 1, "Linear", (), "", "") for i in range(12))]
    ['blocks.0-11.fc']
    """
    numbers: dict[Line, list[tuple[int, ...]]] = {}
    for line in lines:
        parts = line.module.split(".")
        pattern = ".".join("*" if part.isdecimal() else part for part in parts)
        places = tuple(int(part) for part in parts if part.isdecimal())
        numbers.setdefault(line._replace(module=pattern), []).append(places)
    result = []
    for line, found in numbers.items():
        for sets in _boxes(found):
            names = iter(sets)
            parts = [_runs(next(names)) if part == "*" else part for part in line.module.split(".")]
            count = 1
            for values in sets:
                count *= len(values)
            result.append(line._replace(module=".".join(parts), modules=count))
    return result


def _boxes(places: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Products of sets that are exactly these tuples: a line of a range in two places stands for all its pairs."""
    if not places[0]:
        return [()]
    behind: dict[int, list[tuple[int, ...]]] = {}
    for first, *rest in places:
        behind.setdefault(first, []).append(tuple(rest))
    firsts: dict[tuple[tuple[tuple[int, ...], ...], ...], list[int]] = {}
    for first, rests in behind.items():
        firsts.setdefault(tuple(_boxes(rests)), []).append(first)
    return [(tuple(values), *box) for boxes, values in firsts.items() for box in boxes]


def _runs(values: Sequence[int]) -> str:
    """Numbers as ranges, "0-3,7"."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def shown_in(lines: Sequence[Line], roles: Sequence[str], width: int = WIDTH) -> str:
    """The table, within so many columns where that can be: what is too long for it goes below, step by step."""
    notes: list[str] = []
    text = _table(lines, roles)
    if _width(text) > width:
        lines, below = _lettered(lines, "products", string.ascii_uppercase)
        notes += below
        text = _table(lines, roles)
    if _width(text) > width:
        lines = [line._replace(roles=tuple(word.removesuffix(DEFAULT) for word in line.roles)) for line in lines]
        notes.append(f"Rounding is{DEFAULT} where none is named.")
        text = _table(lines, roles)
    if _width(text) > width:
        lines, below = _lettered(lines, "wide", string.ascii_lowercase)
        notes += below
        text = _table(lines, roles)
    if _width(text) > width:
        sets = {line.roles: ", ".join(f"{r}={w}" for r, w in zip(roles, line.roles)) for line in lines}
        together = [
            line._replace(roles=(sets[line.roles] if len({*line.roles}) > 1 else line.roles[0],)) for line in lines
        ]
        numbers = {words: str(n) for n, words in enumerate(dict.fromkeys(line.roles[0] for line in together), 1)}
        lines = [line._replace(roles=(numbers[line.roles[0]],)) for line in together]
        notes = [_note(letter, words) for words, letter in numbers.items()] + notes
        roles = ("formats",)
        text = _table(lines, roles)
    if (excess := _width(text) - width) > 0:
        longest = max(len(line.module) for line in lines) - excess
        lines = [line._replace(module=_cut(line.module, max(longest, 20))) for line in lines]
        text = _table(lines, roles)
    return "\n\n".join([text, "\n".join(notes)]) if notes else text


def _width(text: str) -> int:
    return max(map(len, text.splitlines()))


def _table(lines: Sequence[Line], roles: Sequence[str]) -> str:
    heads = ["module", "count", "type", *roles, "products", "float32 on purpose", "cache"]
    rows = [
        [line.module, str(line.modules), line.type, *line.roles, line.products, line.wide, line.cache] for line in lines
    ]
    used = {
        "count": any(line.modules > 1 for line in lines),
        "products": any(line.products for line in lines),
        "float32 on purpose": any(line.wide for line in lines),
        "cache": any(line.cache for line in lines),
    }
    keep = [i for i, head in enumerate(heads) if used.get(head, True)]
    return text_table([heads[i] for i in keep], [[row[i] for i in keep] for row in rows])


def _lettered(lines: Sequence[Line], field: str, letters: str) -> tuple[list[Line], list[str]]:
    """Lines with a letter in the place of the words of a column, and the words, each behind its letter."""
    words = [word for word in dict.fromkeys(getattr(line, field) for line in lines) if word]
    named = {word: letters[i] if i < len(letters) else f"{letters[i % 26]}{i // 26}" for i, word in enumerate(words)}
    kept = [Line(**line._asdict() | {field: named.get(getattr(line, field), "")}) for line in lines]
    return kept, [_note(letter, word) for word, letter in named.items()]


def _note(letter: str, words: str) -> str:
    return textwrap.fill(f"{letter}: {words}", WIDTH, subsequent_indent=" " * (len(letter) + 2), break_long_words=False)


def _cut(name: str, length: int) -> str:
    if len(name) <= length:
        return name
    head = (length - 3) // 2
    return f"{name[:head]}...{name[len(name) - (length - 3 - head) :]}"
