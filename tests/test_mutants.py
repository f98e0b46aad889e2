"""Mutants: what is changed in a source, and what the table of a run says."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import mutants
import pytest

SOURCE = b'''"""A module: 1 + 1."""
LIMIT = 3

def f(x: int, y: int = 4) -> int:
    """Between 1 and 2."""
    if 0 < x <= LIMIT and not y:
        raise ValueError(f"{x + 1} of {y}", x - 2)
    return x + 10 if y is None else [x, y][-1]
'''


def test_each_comparison_constant_operator_and_branch_of_a_function_is_changed_and_nothing_else() -> None:
    found = {(m.before, m.after) for m in mutants.mutations_of("a.py", SOURCE)}
    condition = "0 < x <= LIMIT and not y"
    assert found == {
        (condition, "(0 < x <= LIMIT or not y)"),
        (condition, f"(not ({condition}))"),
        ("0 < x <= LIMIT", "(0 <= x <= LIMIT)"),
        ("0 < x <= LIMIT", "(0 < x < LIMIT)"),
        ("0", "(1)"),
        ("not y", "(y)"),
        ("x + 10", "(x - 10)"),
        ("10", "(11)"),
        ("y is None", "(y is not None)"),
        ("-1", "(1)"),
        ("1", "(2)"),
    }


def test_a_mutant_differs_from_the_source_in_that_place_alone() -> None:
    (mutation,) = [m for m in mutants.mutations_of("a.py", SOURCE) if m.before == "x + 10"]
    assert mutation.applied_to(SOURCE) == SOURCE.replace(b"x + 10", b"(x - 10)")


@pytest.mark.parametrize("file", ["fpsim/kernels/threefry.py", "ada_loss/rules/formulas.py"])
def test_every_mutant_of_a_real_file_is_python(file: str) -> None:
    source = (mutants.ROOT / file).read_bytes()
    of_file = mutants.mutations_of(file, source)
    assert len(of_file) > 10
    for mutation in of_file:
        ast.parse(mutation.applied_to(source))


def test_as_many_are_drawn_of_each_folder_by_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    for folder in mutants.FOLDERS:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("def f(x):\n" + "    x = x + 1\n" * 40)
    found = mutants.drawn(3, seed=5)
    assert [sum(m.file.startswith(folder) for m in found) for folder in mutants.FOLDERS] == [3] * 8
    assert mutants.drawn(3, seed=5) == found != mutants.drawn(3, seed=6)


def test_what_no_test_executes_is_run_against_the_tests_of_its_folder() -> None:
    mutation = mutants.Mutation("fpsim/tensors/jit/deep/a.py", 1, 0, 1, "1", "(2)")
    folder = ["tests/fpsim/tensors"]
    assert mutants.tests_against(mutation, []) == {"default": folder, "full": folder}
    against = mutants.tests_against(mutation, ["tests/test_readme.py::test_b[1]", "tests/test_readme.py::test_a"])
    assert against["default"] == ["tests/test_readme.py::test_b[1]", "tests/test_readme.py::test_a"]
    assert against["full"] == ["tests/test_readme.py"]


def test_the_table_counts_by_tier_and_names_what_the_default_tier_misses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found_by = ["default"] * 8 + ["full", None]
    outcomes = [{"name": f"ada_loss/a.py: {n} -> {n + 1}", "line": n, "found by": by} for n, by in enumerate(found_by)]
    (tmp_path / "results-1.jsonl").write_text("".join(json.dumps(outcome) + "\n" for outcome in outcomes))
    assert mutants.show(tmp_path) == 1  # 8 of 9
    shown = capsys.readouterr().out
    assert "| ada_loss | 10 | 8 | 1 | 1 |" in shown
    assert "full: ada_loss/a.py: 8 -> 9 (line 8)\nsurvived: ada_loss/a.py: 9 -> 10 (line 9)\n" in shown
    assert "finds 88.9% of what both tiers find" in shown


@pytest.mark.full
def test_a_changed_line_is_found_by_the_test_that_executes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout, folder = tmp_path / "checkout", tmp_path / "kept"
    (checkout / "ada_loss").mkdir(parents=True)
    folder.mkdir()
    source = b"def larger(a, b):\n    return a if a > b else b + 0\n"
    (checkout / "ada_loss" / "__init__.py").write_bytes(source)
    (checkout / "pytest.ini").write_text("[pytest]\nmarkers = full\n           slow\n")
    (checkout / "test_it.py").write_text(
        "import ada_loss, pytest\n"
        "def test_larger(): assert ada_loss.larger(2, 1) == 2\n"
        "@pytest.mark.full\ndef test_smaller(): assert ada_loss.larger(1, 2) == 2\n"
    )
    monkeypatch.setattr(mutants, "ROOT", checkout)
    found = {
        mutation.before: mutants.judged(mutation, ["test_it.py::test_larger"], folder)["found by"]
        for mutation in mutants.mutations_of(
            "ada_loss/__init__.py", (checkout / "ada_loss" / "__init__.py").read_bytes()
        )
    }
    assert found == {"a > b": None, "b + 0": None, "0": "full"}  # `a >= b` and `b - 0` are equivalent
    assert [*folder.iterdir()] == []
