"""Each picture of the docs has a committed command, and the commands run in small."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import ada_loss

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "docs"), str(ROOT / "benchmarks")]

import pictures  # noqa: E402
import updates  # noqa: E402

PNG = b"\x89PNG"


def test_every_picture_has_its_command() -> None:
    assert {*pictures.COMMANDS} == {path.name for path in (ROOT / "docs").glob("*.png")}


def test_pictures_of_sweeps_are_drawn_from_a_small_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "sweep"
    options = {"epochs": 1, "record_every": 10}
    words = {"task_options": options, "show_progress": False}
    ada_loss.sweep("digits", ["e4m3fn"], ["none"], seeds=1, baseline=False, out=sweep, **words)
    for name in pictures.SWEEPS:
        assert pictures.main([name, "--sweep", str(sweep), "--out", str(tmp_path)]) == 0
        assert (tmp_path / name).read_bytes()[:4] == PNG
    assert pictures.main(["operands.png"]) == 2
    assert "ada-loss sweep operands" in capsys.readouterr().err


def test_examples_of_a_page_give_their_pictures_in_order(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    head = "class Drawn:\n    def plot(self, what=1):\n        return what"
    page.write_text(
        f"```python\n{head}\n\n\nfound = Drawn()\nfound.plot()  # the first\nfound.plot(2)\n```\n\n```\n```\n"
        "```python\nprint(3)\n```\n\n```\n3\n```\n"
    )
    assert pictures.figures_of(page) == [1, 2]
    text = (ROOT / "docs" / "diagnose.md").read_text()
    assert [text.index(f"]({name})") for name in pictures.DIAGNOSE] == sorted(
        text.index(f"]({name})") for name in pictures.DIAGNOSE
    )


def test_the_picture_of_updates_is_drawn_from_a_few_steps() -> None:
    trainings = {"bf16 nearest": updates.train(updates.UPDATES["bf16 nearest"], 3e-4, 0, steps=10)}
    assert updates.figure_bytes(updates.figure_of(trainings, 3e-4))[:4] == PNG
