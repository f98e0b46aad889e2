"""The claims of README and docs: rows and pages do not drift apart, and a few rows are run in small."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import claims as checked  # noqa: E402
import tasks as measured_tasks  # noqa: E402
from claim_rows import CLAIMS  # noqa: E402
from claims import SEEDS, Claim, Computed, Measured, Trained, judge, run, verdict_on  # noqa: E402

NAMES = [claim.name for claim in CLAIMS]
PAGES = [
    f"docs/{name}.md"
    for name in ("first-sweep", "scaling", "granularity", "accumulators", "verdict", "mixed-precision")
]


@pytest.mark.parametrize("claim", CLAIMS, ids=NAMES)
def test_the_sentence_of_a_row_stands_in_its_page(claim: Claim) -> None:
    assert claim.stands(), f"{claim.page} has not: {claim.sentence}"


@pytest.mark.parametrize("claim", CLAIMS, ids=NAMES)
def test_the_trainings_of_a_row_can_be_planned_and_its_band_is_one(claim: Claim) -> None:
    if isinstance(claim.quantity, Trained):
        assert all(cell.config["seed"] == 1000 for cell in claim.quantity.cells(1000))
    assert claim.low < claim.high
    assert claim.seeds >= 5


def test_the_lists_of_seeds_are_disjoint_long_enough_and_were_not_looked_at_before() -> None:
    first, second = SEEDS
    assert not {*first} & {*second}
    assert min(*first, *second) >= 1000  # tables and reviews before had those below 200
    assert min(len(first), len(second)) >= max(claim.seeds for claim in CLAIMS)


def test_rows_have_different_names_and_each_page_has_rows() -> None:
    assert len({*NAMES}) == len(NAMES)
    assert {"README.md", *PAGES} <= {claim.page for claim in CLAIMS}


def test_the_page_of_results_is_that_of_the_rows_and_of_the_numbers() -> None:
    numbers = json.loads((ROOT / "docs/claims.json").read_text(encoding="utf-8"))
    assert [*numbers] == NAMES
    found = [
        (claim, [Measured(claim, {int(k): v for k, v in values.items()}) for values in numbers[claim.name]])
        for claim in CLAIMS
    ]
    for _, ones in found:
        assert all({*one.values} <= {*seeds} for one, seeds in zip(ones, SEEDS, strict=True))
    page = (ROOT / "docs/claims.md").read_text(encoding="utf-8")
    assert page == f"{checked.HEAD}{checked.table(found)}\n\n{checked.count(found)}\n"
    assert not [claim.name for claim, ones in found if verdict_on(ones) == "fails"]


def row(low: float, high: float, seeds: int = 2) -> Claim:
    return Claim("one", "README.md", "", Computed(math.sqrt), "", low, high, seeds)


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(2.0, 3.0, "holds"), (2.6, 3.0, "fails"), (-math.inf, math.inf, "reported")]
)
def test_a_row_holds_where_the_mean_of_each_list_is_in_its_band(low: float, high: float, expected: str) -> None:
    claim = row(low, high)
    ones = [Measured(claim, {4: 2.0, 9: 3.0}), Measured(claim, {9: 3.0, 8: 2.9})]  # means of 2.5 and 2.95
    assert verdict_on(ones) == expected
    assert verdict_on([Measured(claim, {4: 2.0, 9: math.nan}), ones[1]]) == "fails"
    assert verdict_on([Measured(claim, {4: 2.0}), ones[1]]) == "1 to run"


def test_the_interval_is_students_of_the_mean() -> None:
    one = Measured(row(0.0, 9.0), {0: 1.0, 1: 2.0, 2: 3.0})
    assert one.half_width == pytest.approx(4.302652729911275 / math.sqrt(3))  # t of 2 degrees at 97.5 %, deviation 1


def test_a_few_rows_hold_in_small_and_what_is_done_is_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_name = {claim.name: claim for claim in CLAIMS}
    names = ("digits.e4m3fn.none.lost", "variants.A", "variants.C", "depth.e4m3fn.0.2.approx_range")
    chosen = [replace(by_name[name], seeds=1) for name in names]
    lists = [[1000], [2000]]
    store = run(chosen, lists, tmp_path, small=True)
    assert [verdict_on(ones) for _, ones in judge(chosen, lists, store, small=True)] == ["holds"] * 4
    assert "2 cells" in capsys.readouterr().err
    numbers = (tmp_path / "computed.json").read_bytes()
    again = run(chosen, lists, tmp_path, small=True)
    assert "at step" not in capsys.readouterr().err
    assert (tmp_path / "computed.json").read_bytes() == numbers
    assert again.rows == store.rows
    elsewhere = run(chosen[:1], lists, tmp_path / "other", known=[tmp_path], small=True)
    assert not (tmp_path / "other" / "ledger.sqlite").exists()
    assert [verdict_on(ones) for _, ones in judge(chosen[:1], lists, elsewhere, small=True)] == ["holds"]


def test_the_numbers_of_a_page_are_not_measured_again(tmp_path: Path) -> None:
    by_name = {claim.name: claim for claim in CLAIMS}
    claims = [replace(by_name[name], seeds=1) for name in ("digits.e4m3fn.none.lost", "variants.A")]
    (tmp_path / "claims.json").write_text(
        '{"digits.e4m3fn.none.lost": [{"1000": 99.0}, {}], "variants.A": [{"1000": 1.0}, {}]}', encoding="utf-8"
    )
    out = tmp_path / "out"
    store = run(claims, [[1000]], out, known=[tmp_path])
    assert not out.exists()
    assert [ones[0].values for _, ones in judge(claims, [[1000]], store)] == [{1000: 99.0}, {1000: 1.0}]


def test_the_command_lists_rows_and_fails_where_one_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked.main(["--only", "variants."]) == 0
    assert capsys.readouterr().out.count("docs/stochastic-rounding.md") == 3
    out = ["--out", str(tmp_path), "--only", "variants.A", "--seeds", "1"]
    assert checked.main([*out, "--judge"]) == 0
    assert "2 to run" in capsys.readouterr().out
    (tmp_path / "computed.json").write_text('{"mean_error_of(\'A\')": {"1000": -0.25, "2000": -0.2}}')
    assert checked.main([*out, "--judge"]) == 1
    assert "0 hold, 1 fail, 0 are reported, of 1" in capsys.readouterr().out


def test_two_settings_of_a_task_are_apart_by_standard_deviations() -> None:
    near, far = {300: 1.0, 301: 3.0}, {300: -5.0, 301: -3.0}  # means of 2 and -4, both with a deviation of sqrt(2)
    assert measured_tasks.separation(near.values(), far.values()) == pytest.approx(6 / math.sqrt(2))
    assert math.isnan(measured_tasks.separation(near.values(), [-5.0]))
    first, second, *_ = measured_tasks.COARSE
    beside = {300: 1.5, 301: 3.5}  # no more than a deviation away
    for settings, name in (({first: far, second: beside}, first), ({first: beside, second: far}, second)):
        chosen, values, apart = measured_tasks.coarse_of({measured_tasks.PAIRED: near, **settings})
        assert (chosen, values, apart) == (name, [-5.0, -3.0], pytest.approx(6 / math.sqrt(2)))
    assert measured_tasks.coarse_of({measured_tasks.PAIRED: near})[:2] == ("-", [])
