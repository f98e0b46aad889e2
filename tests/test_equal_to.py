"""docs/equal-to.md says what benchmarks/equal_to.py finds, as far as the libraries are installed here."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "equal-to.md").read_text(encoding="utf-8")
sys.path.append(str(ROOT / "benchmarks"))
import equal_to  # noqa: E402  # a script, beside the packages


@pytest.mark.parametrize("name", ["torch", "ml_dtypes", "gfloat"])
def test_no_number_differs_where_the_page_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_to, "STEP", 65_537)
    rows = [*equal_to.LIBRARIES[name]()]
    assert [row.differ for row in rows] == [0] * len(rows)
    said = [line.split(" | ")[1:3] for line in PAGE.splitlines() if line.startswith(f"| {name} ")]
    assert said == [[f"`{row.theirs}`", f"`{row.ours}`"] for row in rows]


def test_a_difference_is_counted_and_written_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_to, "STEP", 65_537)
    x = equal_to.patterns()
    row = equal_to.counted("torch", "x", "bf16", x.bfloat16().float(), equal_to.rounded(x, "fp16"))
    assert row.differ > row.compared // 4
    page = equal_to.written(PAGE, [row])
    assert str(row) in page
    assert sum(line.startswith("| torch ") for line in page.splitlines()) == 1
    assert page.replace(str(row), "").count("\n") < PAGE.count("\n")
    assert equal_to.written(PAGE, []) == PAGE


def test_the_page_has_rows_of_each_library_and_names_tests_that_exist() -> None:
    assert {*re.findall(r"^\| ([\w-]+) [\d.]+", PAGE, re.MULTILINE)} == {*equal_to.LIBRARIES}
    assert all((ROOT / path).is_file() for path in re.findall(r"`(tests/[^`]+)`", PAGE))
