"""Comparisons and verdicts, against SciPy's tests and arithmetic by hand on a ledger written by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from ada_loss.files import write_atomically
from ada_loss.lab.cells.ledger import Ledger
from ada_loss.lab.cells.telemetry import npz
from ada_loss.lab.results import Results
from ada_loss.lab.results.comparison import Comparison
from ada_loss.lab.results.report import overview
from ada_loss.lab.results.statements import Section, as_html, as_text
from ada_loss.lab.results.verdict import Verdict
from ada_loss.lab.sweep.driver import sweep

FLOAT32 = (0.900, 0.910, 0.905, 0.915, 0.895)
SAME = (0.901, 0.909, 0.906, 0.914, 0.897)
WORSE = (0.860, 0.870, 0.850, 0.880, 0.860)
NOISY = (0.840, 0.980, 0.800, 0.990, 0.930)


def written(
    out: Path,
    cells: dict[tuple[str, str], tuple[float, ...]],
    roundings: dict[tuple[str, str], str] | None = None,
    **result: Any,
) -> Results:
    """The metric by seed of each format and scaling; NaN for a training that diverged, None for one that failed."""
    with Ledger(out / "ledger.sqlite") as ledger:
        for (fmt, scaling), values in cells.items():
            for seed, value in enumerate(values):
                rounding = (roundings or {}).get((fmt, scaling), "up")
                words = {"task": "t", "format": fmt, "rounding": rounding, "scaling": scaling, "seed": seed}
                config = {**words, "options": {}}
                cell = f"{fmt}-{scaling}-{seed}"
                ledger.add([(cell, config)])
                ledger.start(cell)
                if value is None:
                    ledger.fail(cell, "no")
                else:
                    given = {"metrics": {"accuracy": value}, "skipped": 0, "diverged": math.isnan(value), **result}
                    ledger.finish(cell, given)
    return Results(out)


def outcomes(verdict: Verdict) -> dict[str, str]:
    return {one.name: one.outcome for one in verdict.combinations}


def test_a_comparison_is_scipys_paired_t_test(tmp_path: Path) -> None:
    results = written(tmp_path, {("fp32", "none"): FLOAT32, ("e5m2", "none"): WORSE, ("e5m2", "torch"): NOISY})
    for scaling, values in (("none", WORSE), ("torch", NOISY)):
        found = results.compare({"format": "e5m2", "scaling": scaling}, "fp32", level=0.1)
        expected = stats.ttest_rel(values, FLOAT32)
        assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
        assert found.interval == pytest.approx(tuple(expected.confidence_interval(0.9)), rel=1e-9)
        assert found.mean == pytest.approx(np.mean(np.subtract(values, FLOAT32)))
    assert "e5m2 none against fp32: accuracy -4.1 points, 95 % interval" in str(
        results.compare({"format": "e5m2", "scaling": "none"}, "fp32")
    )


def test_pairs_are_of_equal_seeds_whatever_their_order(tmp_path: Path) -> None:
    results = written(tmp_path, {("fp32", "none"): FLOAT32[:3], ("e5m2", "none"): WORSE})
    found = results.compare("e5m2", "fp32")
    assert [*found.differences] == [0, 1, 2]
    assert found.differences[2] == pytest.approx(0.850 - 0.905)


def test_equal_differences_and_single_seeds_have_no_division_by_zero(tmp_path: Path) -> None:
    results = written(tmp_path, {("fp32", "none"): (0.5, 0.25), ("a", "none"): (0.5, 0.25), ("b", "none"): (0.25, 0.0)})
    assert results.compare("a", "fp32").p == 1.0
    # fourths, that may be counted in fourths: a deviation of an eighth is taken
    assert results.compare("b", "fp32").p == pytest.approx(2 * stats.t.sf(0.25 / (0.125 / math.sqrt(2)), 1))
    assert Comparison("b", "fp32", "accuracy", {0: -0.25, 1: -0.25}).p == 0.0  # where no step is known
    one = written(tmp_path / "one", {("fp32", "none"): (0.5,), ("a", "none"): (0.25,)}).compare("a", "fp32")
    assert math.isnan(one.p)
    assert "1 seed in common are too few" in str(one)


def test_a_comparison_of_several_cells_for_a_seed_or_of_none_is_refused(tmp_path: Path) -> None:
    results = written(tmp_path, {("fp32", "none"): (0.5, 0.5), ("e5m2", "none"): (0.5,), ("e5m2", "torch"): (0.5,)})
    with pytest.raises(ValueError, match=r"e5m2 leaves the scaling open: none, torch\. Choose one"):
        results.compare("e5m2", "fp32")
    with pytest.raises(ValueError, match=r"No cell that is done has 'format'='e4m3"):
        results.compare("e4m3", "fp32")
    with pytest.raises(ValueError, match=r"have no seed in common: 1 and 0"):
        results.compare({"format": "fp32", "seed": 1}, {"format": "e5m2", "scaling": "none"})
    with pytest.raises(ValueError, match=r"level=5 is invalid"):
        results.compare({"format": "e5m2", "scaling": "none"}, "fp32", level=5)
    with pytest.raises(ValueError, match=r"The metric 'loss' has no number"):
        results.compare({"format": "e5m2", "scaling": "none"}, "fp32", "loss")
    with pytest.raises(TypeError, match=r"is 3\. Expected: a format"):
        results.compare(3, "fp32")  # type: ignore[arg-type]


CELLS: dict[tuple[str, str], Any] = {
    ("fp32", "none"): FLOAT32,
    ("bf16", "none"): SAME,
    ("bf16", "torch"): FLOAT32,
    ("e5m2", "none"): WORSE,
    ("e5m2", "torch"): NOISY,
    ("e4m3", "none"): (0.9, math.nan, 0.9, 0.9, 0.9),
    ("e4m3", "torch"): (None,) * 5,
    ("c", "none"): (0.900, 0.910, 0.905, 0.715, 0.895),
    ("c", "torch"): (0.900, 0.910, 0.905, None, None),
    ("d", "none"): tuple(value + 0.05 for value in SAME),
    ("d", "torch"): (0.900, 0.910, None, None, None),
}


def test_each_setting_stands_in_one_list_with_what_is_known_of_it(tmp_path: Path) -> None:
    results = written(tmp_path, CELLS, underflow=0.25)
    (verdict,) = results.verdicts()
    assert outcomes(verdict) == {
        "bf16 (none)": "match",
        "bf16 (torch)": "match",
        "e5m2 (none)": "short",
        "e5m2 (torch)": "undecided",
        "e4m3 (none)": "diverged",
        "e4m3 (torch)": "failed",
        "c (none)": "collapsed",
        "c (torch)": "match",
        "d (none)": "match",
        "d (torch)": "few",
    }
    lines = str(verdict).splitlines()
    assert lines[:-1] == [
        "float32 gives accuracy 90.5 ± 0.8 %.",
        "No more than 1 point below float32, 4 of 10:",
        "  bf16 (all 2) · c (torch, over 3 of 5 seeds, seeds 3, 4 failed) · d (none, 5.0 points better)",
        "Falls short by more than 1 point, 1 of 10:",
        "  e5m2  none: by 4.1 [2.5, 5.7], underflow 25 %",
        "Collapses with some seeds, 1 of 10:",
        "  c  none: collapses with 1 of 5 seeds (by 20.0 points), the other 4 differ by 0.0, underflow 25 %",
        "Counted, not tested, 1 of 10:",
        "  e4m3  none: diverges with 1 of 5 seeds, the other 4 differ by -1.5 to 0.5, underflow 25 %",
        "Open, 3 of 10:",
        "  e5m2  torch: 0.3 [-12.3, 12.9]; more than 100 seeds would probably decide it",
        "  d     torch: gave too few results, 2 of 5 seeds; 3 are needed, seeds 2, 3, 4 failed",
        "  e4m3  torch: gave no result: seeds 0, 1, 2, 3, 4 failed",
    ]
    assert lines[-1].startswith(
        "One test for each of 6 settings at 1 point below float32, over 3 to 5 seeds, Holm-corrected, variances "
        "shared where they are alike, and one for collapses: a wrong statement anywhere has a chance of at most 5 % if "
        "differences are normal"
    )
    assert "Differences with one long tail are not covered." in lines[-1]
    assert lines[-1].endswith("Where none of 5 seeds collapsed, rates of collapse above 45 % are excluded.")


def test_the_same_is_said_in_a_notebook_in_latex_in_the_report_and_by_compare(tmp_path: Path) -> None:
    results = written(tmp_path, CELLS, underflow=0.25)
    (verdict,) = results.verdicts()
    block, latex, page = verdict._repr_html_(), verdict.to_latex(), results.report().read_text()
    assert block in page
    assert "25\N{NO-BREAK SPACE}%" in block
    block = block.replace("\N{NO-BREAK SPACE}", " ")
    for section in verdict.sections:
        assert section.title in block
        assert rf"\item[{section.title}]" in latex
        for label, words in section.lines:
            assert label in block
            assert words in block
            assert f"{label}{': ' * bool(words)}{words}".replace("%", r"\%") in latex
    tested = [one for one in verdict.combinations if one.outcome in ("match", "short", "undecided", "collapsed")]
    assert len(tested) == 7
    for one in tested:
        compared = str(results.compare({"format": one.fmt, "scaling": one.rest}, "fp32"))
        assert compared.endswith(f"Among all settings: {verdict.statement(one)}")
    found = str(results.compare({"format": "e5m2", "scaling": "none"}, "fp32"))
    assert found.endswith("falls short by more than 1 point: by 4.1 [2.5, 5.7], underflow 25 %")
    assert results.compare("fp32", {"format": "bf16", "scaling": "none"}).statement == ""


def test_a_setting_that_is_worse_with_every_seed_is_counted_under_a_heading_that_claims_no_test(tmp_path: Path) -> None:
    cells = {("fp32", "none"): FLOAT32, ("a", "none"): (0.78, 0.28, 0.79, 0.71, 0.30), ("b", "none"): SAME}
    results = written(tmp_path, cells)
    (verdict,) = results.verdicts()
    assert outcomes(verdict) == {"a": "worse", "b": "match"}
    words = "more than 1 point below float32 with each of 5 seeds, by 11.5 to 63.0"
    assert f"Counted, not tested, 1 of 2:\n  a  {words}" in str(verdict)
    assert str(results.compare("a", "fp32")).endswith(f"Among all settings: {words}")
    losses = written(tmp_path / "losses", cells)
    for cell in losses.cells:
        cell["metrics"] = {"loss": 2 - cell["metrics"]["accuracy"]}
    (verdict,) = losses.verdicts(tolerance=0.01)
    assert "a  more than 0.01 above float32 with each of 5 seeds, by 0.115 to 0.63" in str(verdict)


def test_an_open_setting_names_the_seed_that_is_far_below_where_so_few_cannot_tell_a_collapse(tmp_path: Path) -> None:
    cells = {("fp32", "none"): FLOAT32[:3], ("a", "none"): (0.901, 0.709, 0.906), ("b", "none"): SAME[:3]}
    (verdict,) = written(tmp_path, cells).verdicts()
    assert outcomes(verdict)["a"] == "undecided"
    assert "; seed 1 is 20.2 points below the others, by a collapse or by chance: 5 seeds would tell" in str(verdict)


def test_a_collapse_alone_has_a_footer(tmp_path: Path) -> None:
    cells = {("fp32", "none"): FLOAT32, ("c", "none"): (0.900, 0.910, 0.905, 0.715, 0.895)}
    (verdict,) = written(tmp_path, cells).verdicts()
    assert outcomes(verdict) == {"c": "collapsed"}
    assert verdict.foot.startswith(
        "One test of each setting for collapses, over 5 seeds: a wrong statement anywhere has"
    )
    assert [*verdict.to_frame()["collapsed"]] == [1]


@pytest.mark.parametrize("mean", [0.0, 0.002, -0.002])
def test_a_metric_near_zero_has_no_tolerance_unless_one_is_given(tmp_path: Path, mean: float) -> None:
    """A hundredth of 0.002 says nothing where seeds differ by 0.004: noise was called a collapse."""
    wobble = np.array([0.004, -0.005, 0.001, 0.003, -0.003])
    cells = {("fp32", "none"): tuple(mean + wobble), ("a", "none"): tuple(mean + wobble[::-1])}
    results = written(tmp_path, cells)
    for cell in results.cells:
        cell["metrics"] = {"loss": cell["metrics"]["accuracy"]}
    (verdict,) = results.verdicts()
    assert verdict.head.startswith("No verdict: float32's loss ")
    assert "is so near 0 that no share of it is a tolerance. Give one in its units" in verdict.head
    assert verdict.foot == ""
    assert {*outcomes(verdict).values()} == {"undecided"}
    assert results.report().exists()
    (verdict,) = results.verdicts(tolerance=0.05)
    assert outcomes(verdict) == {"a": "match"}
    (verdict,) = results.verdicts(tolerance=0.0)
    assert "No verdict" not in verdict.head


def test_a_format_is_named_once_in_a_list_however_many_settings_it_has(tmp_path: Path) -> None:
    cells = {("fp32", "none"): FLOAT32, ("e5m2", "none"): WORSE, ("e5m2", "torch"): WORSE, ("bf16", "none"): SAME}
    (verdict,) = written(tmp_path, cells).verdicts()
    text = str(verdict)
    assert "  bf16\nFalls short by more than 1 point, 2 of 3:\n  e5m2  none: by 4.1 " in text
    assert "\n        torch: by 4.1 " in text
    assert text.count("e5m2") == text.count("bf16") == 1
    assert verdict.to_latex().count("e5m2") == verdict.to_html().count("e5m2") == 1


def test_a_tolerance_moves_what_is_judged(tmp_path: Path) -> None:
    results = written(tmp_path, CELLS)
    assert outcomes(results.verdicts(tolerance=0.2)[0])["e5m2 (none)"] == "match"
    assert outcomes(results.verdicts(tolerance=0.0)[0])["bf16 (none)"] == "undecided"
    strict = results.verdicts(level=1e-6)[0]
    assert outcomes(strict)["e5m2 (none)"] == "undecided"
    assert "at most 0.0001 %" in str(strict)
    assert "simulated" not in str(strict)


def test_equivalence_has_words_of_its_own(tmp_path: Path) -> None:
    (verdict,) = written(tmp_path, CELLS).verdicts(equivalence=True)
    assert outcomes(verdict)["d (none)"] == "above"
    text = str(verdict)
    assert "Matches float32 within 1 point, 3 of 10:" in text
    assert "Better by more than 1 point, 1 of 10:\n  d (none, 5.0 points better)" in text
    assert "at 1 point below and above float32" in text


def test_float32s_own_losses_are_said(tmp_path: Path) -> None:
    cells = {("fp32", "none"): (*FLOAT32[:3], math.nan, FLOAT32[4]), ("a", "none"): SAME, ("b", "none"): WORSE}
    (verdict,) = written(tmp_path, cells).verdicts()
    assert "float32 itself gave none with seed 3, and nothing is compared there." in str(verdict)
    assert "over 4 of 5 seeds" in str(verdict)


def test_a_verdict_pairs_by_seed(tmp_path: Path) -> None:
    """Seeds far apart, each lower by the same: the difference is certain, that of the means is not."""
    apart = (0.5, 0.9, 0.7)
    cells = {("fp32", "none"): apart, ("a", "none"): tuple(v - 0.002 for v in apart)}
    cells[("b", "none")] = tuple(v - k for v, k in zip(apart, (0.031, 0.030, 0.029)))
    assert stats.ttest_ind(cells["b", "none"], apart).pvalue > 0.5
    assert outcomes(written(tmp_path, cells).verdicts()[0]) == {"a": "match", "b": "short"}


def test_too_few_seeds_are_said(tmp_path: Path) -> None:
    for count in (1, 2):
        results = written(tmp_path / str(count), {("fp32", "none"): FLOAT32[:count], ("a", "none"): WORSE[:count]})
        assert f"No verdict: {count} seed" in str(results.verdicts()[0])
        assert "Give seeds=3, better 5." in str(results.verdicts()[0])
    (verdict,) = written(tmp_path / "none", {("a", "none"): WORSE}).verdicts()
    assert "there is no float32 to compare with" in str(verdict)


def test_of_many_formats_that_match_the_first_are_listed(tmp_path: Path) -> None:
    same = (0.512, 0.634, 0.701)  # of a thousand examples: with ten, so few seeds would leave all of them open
    cells = {("fp32", "none"): same} | {(f"e5m{m}", "none"): same for m in range(15)}
    text = str(written(tmp_path, cells).verdicts()[0])
    assert "No more than 1 point below float32, 15 of 15:\n  e5m0 · e5m1 · " in text
    assert "e5m11 · 3 formats more\nOne test" in text


@pytest.mark.parametrize("tolerance", [-0.01, math.inf, math.nan, 10**400, True, "1"], ids=str)
def test_what_is_no_tolerance_is_refused(tmp_path: Path, tolerance: Any) -> None:
    results = written(tmp_path, {("fp32", "none"): FLOAT32, ("e5m2", "none"): WORSE})
    with pytest.raises(ValueError, match=r"tolerance=.* is invalid\. Expected: 0 or more"):
        results.verdicts(tolerance=tolerance)


def test_a_tolerance_that_so_few_seeds_cannot_meet_is_told_apart_from_none(tmp_path: Path) -> None:
    results = written(tmp_path, {("fp32", "none"): FLOAT32, ("e5m2", "none"): (0.90, 0.92, 0.89, 0.93, 0.89)})
    words = "is likely found from a tolerance of"
    assert words in str(results.verdicts(tolerance=1e-6)[0])
    assert words not in str(results.verdicts(tolerance=0.0)[0])
    assert words not in str(results.verdicts(tolerance=0.9)[0])


def test_of_many_settings_that_fall_short_twenty_are_told_of(tmp_path: Path) -> None:
    worse = (0.112, 0.234, 0.301)
    cells = {("fp32", "none"): (0.512, 0.634, 0.701)} | {(f"e5m{m}", "none"): worse for m in range(22)}
    (verdict,) = written(tmp_path, cells).verdicts()
    (section,) = [section for section in verdict.sections if section.kind == "short"]
    assert [fmt for fmt, _ in section.named] == [f"e5m{m}" for m in range(20)]
    assert list(section.listed) == ["2 more"]


def test_how_often_simulated_sweeps_were_wrong_is_said_at_the_level_at_which_they_were_simulated(
    tmp_path: Path,
) -> None:
    cells = {("fp32", "none"): FLOAT32} | {(f"e5m{m}", "none"): tuple(v - m / 1e3 for v in SAME) for m in range(22)}
    results = written(tmp_path, cells)
    assert "of simulated sweeps" in str(results.verdicts()[0])
    assert "of simulated sweeps" in str(results.verdicts(level=0.05)[0])
    assert "of simulated sweeps" not in str(results.verdicts(level=0.1)[0])


def test_a_smaller_loss_is_better(tmp_path: Path) -> None:
    cells = {("fp32", "none"): FLOAT32, ("worse", "none"): tuple(2 * v for v in FLOAT32), ("better", "none"): WORSE}
    results = written(tmp_path, cells)
    for cell in results.cells:
        cell["metrics"] = {"loss": cell["metrics"]["accuracy"]}
    (verdict,) = results.verdicts()
    assert outcomes(verdict) == {"worse": "short", "better": "match"}
    assert "No more than 0.00905 above float32, 1 of 2:" in str(verdict)  # a hundredth of float32's mean
    assert ", lower is better." in str(verdict)


def test_what_was_lost_names_the_gradients_that_lost_more(tmp_path: Path) -> None:
    results = written(tmp_path, {("fp32", "none"): FLOAT32, ("e5m2", "none"): WORSE}, underflow=0.5, skipped=1)
    arrays = {
        "losses": np.ones(4),
        "sites.role": np.array(["error", "weight_grad", "activation"]),
        "sites.nonzero": np.array([100, 50, 10]),
        "sites.underflow": np.array([50, 0, 10]),
        "sites.overflow": np.array([1, 5, 10]),
    }
    for seed in range(5):
        write_atomically(tmp_path / "telemetry" / f"e5m2-none-{seed}.npz", npz(arrays))
    words = "e5m2  by 4.1 [3.0, 5.2], underflow 50 %, overflow of weight gradients 10 %, skipped steps 25 %"
    assert words in str(results.verdicts()[0])


def test_a_sweep_trains_float32_unless_told_not_to(tmp_path: Path) -> None:
    options: dict[str, Any] = {"task_options": {"epochs": 1}, "seeds": 3, "show_progress": False}
    results = sweep("sweep_tasks:tiny", ["e5m2"], ["none"], out=tmp_path / "with", **options)
    assert [row["format"] for row in results.rows()] == ["fp32"] * 3 + ["e5m2"] * 3
    results = sweep("sweep_tasks:tiny", ["e5m2", "fp32"], ["none"], out=tmp_path / "already", **options)
    assert [row["format"] for row in results.rows()] == ["e5m2"] * 3 + ["fp32"] * 3
    results = sweep("sweep_tasks:tiny", ["e5m2"], ["none"], out=tmp_path / "out", baseline=False, **options)
    assert [row["format"] for row in results.rows()] == ["e5m2"] * 3
    more = sweep("sweep_tasks:tiny", ["e5m2"], ["none"], out=tmp_path / "out", **options)
    assert more.counts["done"] == 6  # what was there keeps its ids
    assert {row["id"] for row in results.rows()} < {row["id"] for row in more.rows()}
    with pytest.raises(ValueError, match=r"baseline='no' is invalid\. Expected: true or false"):
        sweep("sweep_tasks:tiny", ["e5m2"], out=tmp_path / "no", baseline="no", **options)  # type: ignore[arg-type]


def test_tasks_and_options_have_verdicts_of_their_own(tmp_path: Path) -> None:
    options: dict[str, Any] = {"out": tmp_path, "seeds": 3, "show_progress": False}
    for epochs in (1, 2):
        results = sweep("sweep_tasks:tiny", ["e5m2"], ["none"], task_options={"epochs": epochs}, **options)
    assert [verdict.subject for verdict in results.verdicts()] == ["epochs 1", "epochs 2"]
    text = results.report().read_text()
    assert text.count('<div class="verdict"><p>epochs') == 2


def test_what_lies_within_the_spread_of_the_best_is_bold(tmp_path: Path) -> None:
    cells = {("a", "x"): (0.90, 0.92), ("a", "y"): (0.899, 0.905), ("a", "z"): (0.85, 0.86), ("b", "x"): (0.5, 0.5)}
    text = written(tmp_path, cells).report().read_text()
    bold = [part.split("<")[0] for part in text.split('<td class="best">')[1:]]
    assert bold == ["91.0 ± 1.4", "90.2 ± 0.4"]


def test_gradients_that_are_rounded_stochastically_are_named_where_they_are(tmp_path: Path) -> None:
    cells = {("fp32", "none"): FLOAT32, ("a", "adaptive"): WORSE, ("a", "none"): NOISY, ("b", "adaptive"): NOISY}
    results = written(tmp_path, cells, roundings={("a", "adaptive"): "stochastic_gradients"})
    (verdict,) = results.verdicts()
    assert {*outcomes(verdict)} == {"a (adaptive, gradients rounded stochastically)", "a (none)", "b (adaptive)"}
    assert len(results.tables()) == 1  # the rounding follows from format and scaling, and is not a table of its own
    assert results.table().mean("a", "adaptive") == pytest.approx(sum(WORSE) / 5)


def test_a_format_that_matches_is_said_with_its_difference(tmp_path: Path) -> None:
    (verdict,) = written(tmp_path, {("fp32", "none"): FLOAT32, ("fp16", "none"): SAME}).verdicts()
    (one,) = verdict.combinations
    points = round(100 * float(np.subtract(FLOAT32, SAME).mean()), 1) + 0.0
    assert verdict.statement(one).startswith(f"no more than 1 point below float32: {points} [")


def test_without_a_direction_no_setting_of_a_format_is_its_best(tmp_path: Path) -> None:
    cells = {("fp32", "none"): FLOAT32, ("fp16", "none"): SAME, ("fp16", "torch"): WORSE}
    results = written(tmp_path, cells, metrics={"thing": 0.5})
    (verdict,) = results.verdicts()
    row = overview(results, verdict)[-1]
    assert (row.format, row.best, row.metric, row.difference) == ("fp16", "-", "-", "-")


def test_a_list_of_names_is_wrapped_at_110_characters_behind_a_name() -> None:
    names = [f"format{i:02}" for i in range(27)]  # of 8 characters; nine and what stands between are 98, ten 109
    text = as_text("", [Section("match", "Matches", [(name, "") for name in names])], "")
    lines = [names[:9], names[9:18], names[18:]]
    assert text.splitlines()[1:] == [f"  {' · '.join(line)}{' ·' * (line is not lines[-1])}" for line in lines]


def test_what_is_said_in_one_line_stands_beside_its_name() -> None:
    html = as_html("", [Section("short", "Short", [("fp16", "by 1"), ("e5m2", "none: by 2\ntorch: by 3")])], "")
    assert "<li><b>fp16</b> by 1</li>" in html
    assert "<li><b>e5m2</b><br>none: by 2<br>torch: by 3</li>" in html


def test_where_no_training_reached_its_end_there_is_no_table_of_seconds_either(tmp_path: Path) -> None:
    assert written(tmp_path, {("fp16", "none"): (math.nan,)}, metrics={}, seconds=2.0).tables("seconds") == []
