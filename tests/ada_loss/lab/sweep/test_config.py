"""Sweeps in YAML files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ada_loss.lab.cells.cells import plan, plan_all
from ada_loss.lab.sweep.config import SHIPPED, read_sweep


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


def test_a_file_holds_the_arguments_of_sweep(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        task: digits
        formats: [fp16, {error: e5m2, weight_grad: fp16}]
        scaling: [none, off, 1024, 1e3]   # words and numbers of YAML 1.2
        seeds: [0, 7]
        task_options: {epochs: 1, learning_rate: 1e-3}
        time_limit: null
        """,
    )
    assert read_sweep(path) == {
        "task": "digits",
        "formats": ["fp16", {"error": "e5m2", "weight_grad": "fp16"}],
        "scaling": ["none", "off", 1024, 1000.0],
        "seeds": [0, 7],
        "task_options": {"epochs": 1, "learning_rate": 0.001},
        "time_limit": None,
    }


def test_the_home_folder_is_meant_by_a_tilde(tmp_path: Path) -> None:
    path = written(tmp_path, "task: digits\nformats: [fp16]\nout: ~/runs/mine")
    assert read_sweep(path)["out"] == str(Path.home() / "runs" / "mine")


@pytest.mark.parametrize("name", SHIPPED)
def test_a_sweep_that_comes_along_can_be_planned(name: str) -> None:
    read = read_sweep(name)
    grid = {"task": read["task"], "formats": read["formats"], "scaling": read.get("scaling", ["none"])}
    grid |= {"roundings": read.get("roundings", ["nearest_even"]), "seeds": read.get("seeds", 1)}
    grid["updates"] = read.get("updates")
    cells = plan_all({**grid, "task_options": read.get("task_options")}, read.get("also", ()))
    assert len(cells) > 1


def test_the_first_command_of_the_readme_is_a_part_of_the_whole_comparison() -> None:
    ids = []
    for name in ("operands", "granularity"):
        read = read_sweep(name)
        grid = {"scaling": ["none"], "roundings": ["nearest_even"]}
        grid |= {key: read[key] for key in ("task", "formats", "task_options")}
        grid["seeds"] = 3  # the first of the one command's, and those of the other
        ids.append({cell.id for cell in plan_all(grid, read["also"])})
    assert ids[0] < ids[1]


BOMB = "task: digits\na: &a [" + ", ".join("0" * 20) + "]\n"
BOMB += "\n".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 20)}]" for a, b in zip("abcd", "bcde"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("task: digits\nformats: " + "[" * 3000 + "]" * 3000, r"is nested too deep\. 20 levels are possible"),
        ("task: digits\nformats: " + "{a: " * 3000 + "}" * 3000, r"is nested too deep"),
        ("task: digits\nformats: &a [*a]", r"is nested too deep"),
        (BOMB, r"is not YAML: it holds more than 100,000 values"),
        ("task: digits\nformats: [fp16]\nseeds: 2001-13-45", r"is not YAML: month must be in 1\.\.12"),
        ("task: digits\n? [1]\n: 2", r"is not YAML|unknown key"),
        ("task: digits\nformats: [fp16]\nscalings: [none]", r"unknown key scalings\. Did you mean 'scaling'\?"),
        ("task: digits\nformats: [fp16]\nformats: [bf16]", r"is not YAML: found duplicate key .*formats.* in line 3"),
        ("task: digits\nformats: [fp16]\nformats: [x]", r'found duplicate key "formats" in line 3\. Write'),
        ("task: digits\nformats: [fp16", r"is not YAML: .* in line"),
        ("task: digits\x07", r"is not YAML: .*special characters are not allowed"),
        ("task: digits", r"the key formats is missing"),
        ("formats: [fp16]", r"the key task or train is missing"),
        ("", r"holds nothing\. It must hold"),
        ("- fp16", r"holds a list"),
        ("task: !!python/object/apply:os.system ['true']\nformats: [fp16]", r"is not YAML: could not determine"),
        (
            "task: digits\nformats: [fp16]\nepochs: 3",
            r"unknown key epochs\. Did you mean task_options: \{epochs: \.\.\.\}\?",
        ),
        ("task: digits\nformats: [fp16]\nshow_progress: false", r"unknown key show_progress"),
    ],
)
def test_what_is_no_sweep_is_refused_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        read_sweep(written(tmp_path, text))
    assert "mine.yaml" in str(error.value)
    assert "\n" not in str(error.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"task: \xff\xfe")
    with pytest.raises(ValueError, match=r"mine\.yaml is not YAML"):
        read_sweep(path)


def test_a_file_that_is_not_there_is_named_with_what_is() -> None:
    with pytest.raises(FileNotFoundError, match=r"'digit'\. Did you mean 'digits'\?"):
        read_sweep("digit")


def test_the_folder_of_a_file_is_searched_behind_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = [*sys.path]
    read_sweep(written(tmp_path, "task: digits\nformats: [fp16]"))
    assert sys.path == known  # nothing of it is wanted
    read_sweep(written(tmp_path, "task: mine:task\nformats: [fp16]"))
    assert sys.path == [*known, str(tmp_path)]
    read_sweep(written(tmp_path, "task: mine:task\nformats: [fp16]"))
    assert sys.path == [*known, str(tmp_path)]


@pytest.mark.parametrize("task", [None, 5, ["digits"], {"a": 1}], ids=repr)
def test_a_task_that_is_no_word_is_refused_in_words(task: object) -> None:
    with pytest.raises(TypeError, match=r"The task is .*\. Expected: digits, .*'module:function'"):
        plan(task, ["fp16"], ["none"])  # type: ignore[arg-type]


@pytest.mark.parametrize("task", [":f", "..x:f", "x:", ":", "a b:f", "x:f:g", "\0:f", ".:f", "os..path:join"], ids=repr)
def test_a_task_that_is_no_import_path_is_refused_in_words(task: str) -> None:
    with pytest.raises(ValueError, match=r"The task .* is not an import path\. Expected: 'module:function'"):
        plan(task, ["fp16"], ["none"])
