"""Tasks of a file or a folder of the user's own: how they are named, and what tells one content from another."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from ada_loss.lab.cells.cells import plan
from ada_loss.lab.studies.describe import describe
from ada_loss.lab.sweep.driver import resume, sweep
from ada_loss.lab.tasks import chars, find_task, folder_of
from ada_loss.lab.training.loop import train


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A text whose next letters can be guessed, with its own characters."""
    words = random.Random(0).choices(["äpfel ", "birnen ", "und ", "zwölf "], k=3000)
    path = tmp_path / "book=1@home.txt"
    path.write_text("".join(words), encoding="utf-8")
    return path


def test_a_text_of_ones_own_is_read_as_it_is_and_can_be_learned(book: Path) -> None:
    task = find_task(f"chars={book}")(0)
    known = sorted(set(book.read_text(encoding="utf-8")))
    assert (
        "".join(known[i] for i in task.train[0].flatten().tolist())
        == book.read_text(encoding="utf-8")[: task.train[0].numel()]
    )
    run = train(task, steps=60, optimizer="adamw", learning_rate=3e-3, batch_size=32)
    assert run.metrics["bits_per_character"] < 1.5  # log2 of its 14 characters is 3.8
    assert torch.equal(chars(0, book).train[0], task.train[0])


def test_its_cells_are_told_by_what_is_in_the_file(book: Path) -> None:
    name = f"chars={book}"
    (cell,) = plan(name, ["fp16"], ["none"])
    task, sign, digits = cell.config["task"].rpartition("#")
    assert (task, sign, len(digits)) == (name, "#", 8)
    assert cell.config["options"]["optimizer"] == "adamw"  # chars' own options
    book.write_text(book.read_text(encoding="utf-8") + "!", encoding="utf-8")
    (other,) = plan(name, ["fp16"], ["none"])
    assert other.id != cell.id
    with pytest.raises(ValueError, match=rf"has changed since the sweep began: its hash is .* is {digits}\. Put"):
        find_task(cell.config["task"])


def test_a_sweep_of_ones_own_text_is_judged_by_bits_and_resumes_without_trust(book: Path, tmp_path: Path) -> None:
    out, name = tmp_path / "out", f"chars={book}"
    options = {"steps": 2}
    results = sweep(name, ["fp32", "bf16"], ["none"], task_options=options, out=out, show_progress=False)
    assert results.metric == "bits_per_character"
    assert results.counts["done"] == 2
    assert folder_of(name) is None
    assert resume(out, show_progress=False).counts["done"] == 2
    assert describe(name, "fp16").sites


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    latin, short = tmp_path / "latin.txt", tmp_path / "short.txt"
    latin.write_bytes(b"\xe4" * 1000)
    short.write_text("a" * 640)
    for path, error, words in (
        (tmp_path / "nowhere.txt", FileNotFoundError, r"nowhere\.txt' of the task chars is not there\. Give the path"),
        (latin, ValueError, r"latin\.txt' is not UTF-8 .*Convert"),
        (short, ValueError, r"short\.txt' has 640 characters\. Expected 641 or more"),
    ):
        with pytest.raises(error, match=words):
            chars(0, path)
    short.write_text("ab" * 320 + "a")
    assert [len(part[0]) for part in (chars(0, short).train, chars(0, short).test)] == [9, 1]


def test_names_with_paths_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"The task digits takes no data of your own\. Got 'digits=x'\. Use 'digits'"):
        find_task("digits=x")
    with pytest.raises(ValueError, match=r"'chars=' has no path behind '='\. Use 'chars=PATH'"):
        find_task("chars=")
    with pytest.raises(ValueError, match=r"Unknown task 'char'\. Did you mean 'chars"):
        find_task("char=x")
    with pytest.raises(FileNotFoundError, match=r"There is no '.*nothing'\. Give the path"):
        plan(f"chars={tmp_path / 'nothing'}", ["fp16"], ["none"])
