"""On a terminal tables are aligned and have colours; in a pipe the text is what it was. Nothing is left out."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from children import environment

from ada_loss.lab.directions import Directions
from ada_loss.lab.printed import show, show_lines, show_table
from ada_loss.lab.results.table import Table

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
NAMES = ["fp32", "FP8, gradients unscaled", "a | b", "[red]not markup[/red]"]
PLACES = {
    **{(name, "none"): [0.5 + i / 10, 0.6 + i / 10] for i, name in enumerate(NAMES)},
    ("FP8, gradients unscaled", "torch"): [0.9, 0.9],
    ("a | b", "torch"): [float("nan")],
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[], object], columns: int = 80, term: str = "xterm-256color"
) -> str:
    out = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        for name, value in (("COLUMNS", str(columns)), ("TERM", term)):
            patch.setenv(name, value)
        patch.delenv("NO_COLOR", raising=False)
        work()
    return out.getvalue()


def table(metric: str = "accuracy") -> Table:
    return Table("format", "scaling", metric, NAMES, ["none", "torch"], dict(PLACES), directions=Directions())


def test_a_table_on_a_terminal_has_every_cell_aligned_and_the_best_in_bold(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = on_a_terminal(monkeypatch, lambda: show_table(table()))
    plain = ESCAPES.sub("", drawn).splitlines()
    assert plain[0].strip() == "accuracy in %"
    for row in NAMES:
        (line,) = [line for line in plain if line.startswith(f"{row} ")]
        assert re.split(r" {2,}", line.strip())[1:] == [table().text(row, column) for column in ("none", "torch")]
    assert len({line.index("±") for line in plain if "±" in line and not line.startswith("FP8")}) == 1
    assert re.search(r"\x1b\[1;32m *90\.0 ± 0\.0", drawn)  # 90 beside 65
    assert not re.search(r"\x1b\[1;32m *75\.0", drawn)  # alone, beside nan
    assert "|" not in "".join(plain).replace("a | b", "")
    nobody_knows = on_a_terminal(monkeypatch, lambda: show_table(table("speed")))
    assert "\x1b[1;32m" not in nobody_knows


def test_a_narrow_terminal_cuts_nothing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ESCAPES.sub("", on_a_terminal(monkeypatch, lambda: show_table(table()), columns=20))
    for row, column in PLACES:
        assert table().text(row, column) in plain
    head = [f"column{i}" for i in range(12)]
    wide = ESCAPES.sub("", on_a_terminal(monkeypatch, lambda: show_lines([head, [f"{i}.00012345" for i in range(12)]])))
    assert all(word in wide for word in [*head, *(f"{i}.00012345" for i in range(12))])


@pytest.mark.parametrize("where", ["pipe", "dumb terminal"])
def test_elsewhere_the_text_is_as_it_is(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"before [x]\n{table()}after"
    expected = f"{table().title}\n{table()}\n{text}\n"

    def work() -> None:
        show_table(table())
        show(text)

    if where == "pipe":
        work()
        assert capsys.readouterr().out == expected
    else:
        assert on_a_terminal(monkeypatch, work, term="dumb") == expected


def test_a_text_keeps_every_word_and_its_markdown_tables_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "| bits | a |\n|---:|---|\n| 6 | e2m3 |\n\nOpen, 1 of 2:\n  fp16 [-0.1, 0.2]\nReport: /tmp/" + "x" * 100
    drawn = on_a_terminal(monkeypatch, lambda: show(text))
    plain = ESCAPES.sub("", drawn)
    assert [line.split() for line in plain.splitlines()[:3:2]] == [["bits", "a"], ["6", "e2m3"]]
    assert plain.splitlines()[3:] == text.splitlines()[3:]
    assert "\x1b[33mOpen, 1 of 2:" in drawn


def test_no_color_is_heeded_and_columns_stay_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    show_table(table())
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", out.getvalue())


def test_a_command_draws_on_a_real_terminal_and_prints_plain_lines_into_a_pipe() -> None:
    command = [sys.executable, "-m", "ada_loss", "formats"]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, stdout=theirs, env={**environment(), "TERM": "xterm-256color", "COLUMNS": "120"}
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        said += part
    os.close(ours)
    assert process.wait() == 0
    drawn = said.decode()
    piped = subprocess.run(command, capture_output=True, text=True, check=True, env=environment()).stdout
    assert "\x1b" in drawn
    assert "\x1b" not in piped
    words = [line.split() for line in ESCAPES.sub("", drawn).splitlines() if "─" not in line]
    assert words == [line.split() for line in piped.splitlines()]
