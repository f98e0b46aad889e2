"""The layout of a verdict: a sentence, lists with titles, a note, as text, HTML and LaTeX."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from ada_loss.lab.results.table import latex

__all__ = ["Section", "as_html", "as_latex", "as_text"]

WIDTH = 110
WIDEST_LABEL = 44
APART = " · "  # between names, which have commas of their own


@dataclass(frozen=True)
class Section:
    """A list with a title.

    kind: "match", "short" or "open", which chooses the mark and the colour.
    title: without a full stop.
    lines: (label, what is said of it, in lines); all labels of which nothing is said are printed in a row.
    """

    kind: str
    title: str
    lines: Sequence[tuple[str, str]]

    @property
    def named(self) -> list[tuple[str, str]]:
        """The lines in which something is said of the label."""
        return [line for line in self.lines if line[1]]

    @property
    def listed(self) -> list[str]:
        """The other labels."""
        return [label for label, words in self.lines if not words]


def as_text(head: str, sections: Sequence[Section], foot: str) -> str:
    """Lines for a terminal; without a newline in the end."""
    lines = [head] if head else []
    for section in sections:
        lines.append(f"{section.title}:")
        if section.listed:
            # no break before the dot: a line does not begin with it
            names = APART.replace(" ", "\N{NO-BREAK SPACE}", 1).join(section.listed)
            wrapped = textwrap.wrap(names, WIDTH, initial_indent="  ", subsequent_indent="  ", break_long_words=False)
            lines += [line.replace("\N{NO-BREAK SPACE}", " ") for line in wrapped]
        width = min(max((len(label) for label, _ in section.named), default=0), WIDEST_LABEL)
        for label, words in section.named:
            first, *others = words.splitlines()
            is_long = len(label) > width
            lines += [f"  {label}", f"  {'':<{width}}  {first}"] if is_long else [f"  {label:<{width}}  {first}"]
            lines += [f"  {'':<{width}}  {line}" for line in others]
    return "\n".join([*lines, *([foot] if foot else [])])


def as_html(head: str, sections: Sequence[Section], foot: str) -> str:
    """A block of HTML, for a notebook and for the report; the report brings the style. No line ends before a %."""
    parts = [f"<p>{html.escape(head)}</p>"] if head else []
    for section in sections:
        parts.append(f'<div class="{section.kind}"><b>{html.escape(section.title)}</b><ul>')
        if section.listed:
            parts.append(f"<li>{APART.join(map(html.escape, section.listed))}</li>")
        for label, words in section.named:
            name, lines = f"<b>{html.escape(label)}</b>", [html.escape(line) for line in words.splitlines()]
            said = [f"{name} {lines[0]}"] if len(lines) == 1 else [name, *lines]
            parts.append(f"<li>{'<br>'.join(said)}</li>")
        parts.append("</ul></div>")
    parts += [f"<p><small>{html.escape(foot)}</small></p>"] if foot else []
    return f'<div class="verdict">{"".join(parts)}</div>'.replace(" %", "\N{NO-BREAK SPACE}%")


def as_latex(head: str, sections: Sequence[Section], foot: str) -> str:
    """A description list, with a newline in the end."""
    lines = [latex(head), r"\begin{description}"]
    for section in sections:
        said = [latex("; ".join(section.listed))] if section.listed else []
        said += [f"{latex(label)}: {latex('; '.join(words.splitlines()))}" for label, words in section.named]
        lines.append(rf"\item[{latex(section.title)}] {'; '.join(said)}.")
    return "\n".join([*lines, r"\end{description}", latex(foot)]) + "\n"
