"""What verdicts, tables, comparisons and overviews say of sweeps whose truth was planted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from ada_loss.lab.cells.ledger import Ledger
from ada_loss.lab.cells.names import keep_names
from ada_loss.lab.results import Results
from ada_loss.lab.results.drawings import curve_panels
from ada_loss.lab.results.report import _lines as lines_of
from ada_loss.lab.results.report import overview
from ada_loss.lab.results.table import mean_and_deviation
from ada_loss.lab.results.verdict import Combination, Verdict
from ada_loss.lab.sweep.driver import sweep

FLOAT32 = (0.900, 0.910, 0.905, 0.915, 0.895)
DIVERGED = "diverged"  # beside a number that the training gave nevertheless


def sweep_of(
    out: Path,
    cells: Mapping[Any, Sequence[Any]],
    metric: str = "accuracy",
    options: Mapping[Any, Mapping[str, Any]] | None = None,
) -> Results:
    """A folder with a setting for each key: a format, (format, scaling) or (format, scaling, rounding).

    A value by seed: a number, (number, DIVERGED), a mapping of metrics, None where it failed, ... where it was not
    asked for.
    """
    with Ledger(out / "ledger.sqlite") as ledger:
        for key, values in cells.items():
            given = (key,) if isinstance(key, str) else key
            fmt, scaling, rounding = (*given, *("", "none", "nearest_even")[len(given) :])
            for seed, value in enumerate(values):
                if value is ...:
                    continue
                words = {"task": "t", "format": fmt, "rounding": rounding, "scaling": scaling, "seed": seed}
                config = {**words, "options": dict((options or {}).get(key, {}))}
                cell = f"{fmt}-{scaling}-{rounding}-{seed}"
                ledger.add([(cell, config)])
                ledger.start(cell)
                if value is None:
                    ledger.fail(cell, "no")
                    continue
                number, diverged = value if isinstance(value, tuple) else (value, "")
                metrics = number if isinstance(number, dict) else {metric: number}
                is_lost = bool(diverged) or not all(map(math.isfinite, metrics.values()))
                ledger.finish(cell, {"metrics": metrics, "skipped": 0, "diverged": is_lost, "underflow": None})
    return Results(out)


def said(verdict: Verdict) -> dict[str, str]:
    """The statement of each setting."""
    return {one.name: verdict.statement(one) for one in verdict.combinations}


def the(verdict: Verdict, name: str) -> Combination:
    (one,) = [one for one in verdict.combinations if one.name == name]
    return one


def test_what_a_diverged_training_measured_is_not_among_the_others(tmp_path: Path) -> None:
    lost = (0.1, DIVERGED)  # the loss is NaN, and argmax of NaN is a class
    results = sweep_of(tmp_path, {"fp32": FLOAT32, "e5m2": (0.902, 0.909, lost, 0.916, lost)})
    (verdict,) = results.verdicts()
    assert said(verdict) == {"e5m2": "diverges with 2 of 5 seeds, the other 3 differ by -0.1 to 0.2"}
    (_, row) = overview(results, verdict)
    assert (row.metric, row.difference) == ("90.9 ± 0.7 %", "2 of 5 diverged")


def test_a_diverged_float32_is_no_baseline(tmp_path: Path) -> None:
    cells = {"fp32": (0.900, (0.1, DIVERGED), 0.905, 0.915, 0.895), "bf16": FLOAT32}
    (verdict,) = sweep_of(tmp_path, cells).verdicts()
    assert verdict.head == (
        "float32 gives accuracy 90.4 ± 0.9 %. float32 itself gave none with seed 1, and nothing is compared there."
    )
    assert the(verdict, "bf16").outcome == "match"


def test_a_float32_that_gave_nothing_is_not_called_missing(tmp_path: Path) -> None:
    (verdict,) = sweep_of(tmp_path, {"fp32": (None, math.nan, (0.1, DIVERGED)), "bf16": FLOAT32[:3]}).verdicts()
    assert verdict.head.startswith("No verdict: float32 itself gave no finite accuracy, so there is nothing to compare")
    assert "there is no float32" not in verdict.head
    (verdict,) = sweep_of(tmp_path / "two", {"fp32": (0.9, 0.8, None), "bf16": FLOAT32[:3]}).verdicts()
    assert verdict.head.startswith(
        "No verdict: 2 seeds of float32 cannot tell a difference from chance. float32 itself"
    )


def test_a_metric_that_was_not_returned_is_no_divergence(tmp_path: Path) -> None:
    other = {"seconds_of_speech": 1.0}
    cells = {
        "fp32": FLOAT32,
        "a": (0.901, 0.909, other, 0.916, 0.895),
        "b": (other,) * 5,
        "c": (0.901, other, None, None, other),
    }
    results = sweep_of(tmp_path, cells)
    (verdict,) = results.verdicts()
    words = said(verdict)
    assert words["a"].endswith("over 4 of 5 seeds, seed 2 gave no accuracy")
    assert words["b"] == "open: gave no result: seeds 0, 1, 2, 3, 4 gave no accuracy"
    few = "open: gave too few results, 1 of 5 seeds; 3 are needed, seeds 2, 3 failed, seeds 1, 4 gave no accuracy"
    assert words["c"] == few
    assert not any("diverge" in word for word in words.values())


def test_the_metric_is_the_one_that_most_trainings_return_first(tmp_path: Path) -> None:
    other = {"seconds_of_speech": 1.0}
    results = sweep_of(tmp_path, {"fp32": (other, *FLOAT32[1:]), "a": FLOAT32, "b": (other, other, *FLOAT32[2:])})
    assert results.metric == "accuracy"
    assert [verdict.metric for verdict in results.verdicts()] == ["accuracy"]
    assert [table.metric for table in results.tables()] == ["accuracy"]


def test_a_training_that_returns_nothing_did_not_diverge(tmp_path: Path) -> None:
    def fit(job: Any) -> dict[str, float]:
        return {"loss": 1.0} if job.seed else {}

    results = sweep(train=fit, formats=["fp16"], seeds=4, out=tmp_path, show_progress=False)
    (verdict,) = results.verdicts()
    assert not any(row["diverged"] for row in results.rows())
    assert verdict.lost == (0,)
    assert said(verdict) == {
        "fp16": "no more than 0.01 above float32: 0 [0, 0], over 3 of 4 seeds, seed 0 gave no loss"
    }


def test_no_diverged_training_is_the_best(tmp_path: Path) -> None:
    cells = {"fp32": (2.0, 2.1), "e5m2": (2.2, (0.3, DIVERGED)), "e4m3fn": (-math.inf, math.nan)}
    results = sweep_of(tmp_path, cells, "loss")
    assert results.best()["loss"] == 2.0
    alone = sweep_of(tmp_path / "alone", {"e5m2": (math.inf, (0.3, DIVERGED))}, "loss")
    with pytest.raises(ValueError, match=r"has a number for the metric 'loss', of those that did not diverge"):
        alone.best()


def test_a_table_shows_no_mean_of_what_trainings_gave_that_diverged(tmp_path: Path) -> None:
    """Two of three diverged with a loss of 0.1 before: that was the best of the row, in bold."""
    lost = (0.1, DIVERGED)
    cells = {"fp32": (0.5, lost, 0.52), ("a", "none"): (0.4, lost, lost), ("a", "torch"): (0.45, 0.46, 0.45)}
    results = sweep_of(tmp_path, cells, "loss")
    (table,) = results.tables()
    assert [(table.text("a", scaling), table.count("a", scaling)) for scaling in table.across] == [
        ("nan", 3),
        ("0.4533 ± 0.0058", 3),
    ]
    assert "0.1" not in str(results)
    assert results.table(metric="skipped").mean("a", "none") == 0.0
    assert not any(bold for _, places in lines_of(table) for _, bold in places)  # alone in its row
    panel = results.plot_accuracy().axes[0]
    assert [line.get_label() for line in panel.lines].count("diverged") == 1
    (dashed,) = (line.get_xdata()[0] for line in panel.lines if line.get_linestyle() == "--")
    assert dashed == pytest.approx(0.51)  # of the float32 that did not diverge


def test_a_line_over_constants_has_a_gap_and_a_mark_where_a_training_diverged(tmp_path: Path) -> None:
    lost = (0.1, DIVERGED)
    constants = {("a", str(2.0**k)): (0.8, 0.9, lost if k == 3 else 0.85) for k in range(7)}
    results = sweep_of(tmp_path, {"fp32": (0.9, lost, 0.92), **constants, ("a", "torch"): (lost,) * 3})
    axes = results.plot_accuracy().axes[0]
    (line,) = (line for line in axes.lines if line.get_marker() == "o")
    assert [*line.get_ydata()] == pytest.approx([85.0] * 3 + [math.nan] + [85.0] * 3, nan_ok=True)
    marked = [[*line.get_xdata()] for line in axes.lines if line.get_label() == "diverged"]
    assert marked == [[3], [8]]
    assert axes.get_ylabel().endswith("; the band is float32")
    assert axes.lines[-1].get_ydata()[0] == pytest.approx(91.0)


def test_bold_is_the_best_of_what_has_all_seeds_of_its_row(tmp_path: Path) -> None:
    cells = {("a", "none"): (0.9, None, None), ("a", "torch"): (0.8, 0.5, 0.6), ("a", "fairseq"): (0.5, 0.3, 0.4)}
    (table,) = sweep_of(tmp_path, cells).tables()
    assert lines_of(table) == [("a", [("90.0", False), ("63.3 ± 15.3", True), ("40.0 ± 10.0", False)])]


def test_a_comparison_tells_of_trainings_that_diverged(tmp_path: Path) -> None:
    cells = {"fp32": FLOAT32, "a": (0.9, (0.1, DIVERGED), 0.9, 0.9, 0.9), "b": FLOAT32}
    results = sweep_of(tmp_path, cells)
    assert str(results.compare("a", "b")).endswith("paired t-test over 5 seeds; 1 of 5 seeds of a diverged")
    assert str(results.compare("b", "a")).endswith("paired t-test over 5 seeds; 1 of 5 seeds of a diverged")


def test_equal_differences_of_a_counted_metric_are_no_certainty_of_a_comparison(tmp_path: Path) -> None:
    """Three accuracies of 360 examples, each four examples lower: "-1.1 points, interval -1.1 to -1.1, p = 0"."""
    correct = np.array([350, 351, 352])
    found = sweep_of(tmp_path, {"fp32": correct / 360, "a": (correct - 4) / 360, "b": (correct - 1) / 360})
    width = stats.t.isf(0.025, 2) * 0.5 / 360 / math.sqrt(3)
    for pair, examples in ((("a", "fp32"), -4), (("a", "b"), -3), (("b", "fp32"), -1), (("a", "a"), 0)):
        comparison = found.compare(*pair)
        mean = examples / 360
        assert comparison.interval == pytest.approx((mean - width, mean + width))
        assert comparison.p == pytest.approx(2 * stats.t.sf(abs(examples) * 2 * math.sqrt(3), 2))
    assert str(found.compare("a", "b")).startswith("a against b: accuracy -0.8 points, 95 % interval -1.2 to -0.5, p =")


@pytest.mark.parametrize("tolerance", [0.01, 0.005, 0.0025, 1e-4, 3e-6])
def test_a_tolerance_and_what_is_beside_it_are_never_shown_as_zero(tmp_path: Path, tolerance: float) -> None:
    wobble = tolerance * np.array([0.01, -0.02, 0.0, 0.01, -0.01])
    cells = {"fp32": FLOAT32, "a": np.array(FLOAT32) - 4 * tolerance + wobble, "b": np.array(FLOAT32) + wobble}
    results = sweep_of(tmp_path, {name: [*map(float, values)] for name, values in cells.items()})
    (verdict,) = results.verdicts(tolerance=tolerance)
    amount = {0.01: "1 point", 0.005: "0.5 points", 0.0025: "0.25 points", 1e-4: "0.01 points", 3e-6: "0.0003 points"}
    by = {0.01: "4.0 [4", 0.005: "2.00 [1.9", 0.0025: "1.00 [1.0", 1e-4: "0.040 [0.03", 3e-6: "0.00120 [0.0011"}
    words = said(verdict)
    assert words["a"].startswith(f"falls short by more than {amount[tolerance]}: by {by[tolerance][:5]}")
    assert words["b"].startswith(f"no more than {amount[tolerance]} below float32: 0.0")


def test_at_a_tolerance_of_zero_differences_have_digits(tmp_path: Path) -> None:
    worse = [value - 0.0001 - 0.00001 * (seed % 2) for seed, value in enumerate(FLOAT32)]
    (verdict,) = sweep_of(tmp_path, {"fp32": FLOAT32, "a": worse}).verdicts(tolerance=0)
    assert said(verdict)["a"].startswith("falls short by more than 0.0 points: by 0.0104 [0.009")


@pytest.mark.parametrize("huge", [1e20, 1e30, 1e300])
def test_a_setting_of_huge_values_makes_no_other_uncertain(tmp_path: Path, huge: float) -> None:
    """A perplexity is exp of a loss; the others were open, with intervals of 1e5 and more."""
    float32 = (20.1, 20.2, 20.15)
    cells = {"fp32": float32, "a": (20.1, 20.21, 20.14), "b": (24.1, 24.2, 24.3), "c": (huge, 2 * huge, 3 * huge)}
    (verdict,) = sweep_of(tmp_path, cells, "perplexity").verdicts()
    assert [the(verdict, name).outcome for name in "ab"] == ["match", "short"]
    low, high = the(verdict, "a").judgement.interval  # type: ignore[union-attr]
    level = 0.9 * (0.05 / 2 if huge < 1e150 else 0.05)  # of Holm's procedure: "c" is open, or is decided too
    width = stats.t.isf(level / 2, 2) * 0.01 / math.sqrt(3)
    assert (low, high) == pytest.approx((-width, width))


def test_a_difference_of_shares_that_is_found_is_not_shown_as_zero(tmp_path: Path) -> None:
    better = [value + 0.0002 + 0.00001 * (seed % 2) for seed, value in enumerate(FLOAT32)]
    words = str(sweep_of(tmp_path, {"fp32": FLOAT32, "a": better, "b": FLOAT32}).compare("a", "b"))
    assert words.startswith("a against b: accuracy 0.0204 points, 95 % interval 0.0197 to 0.0211, p = ")


@pytest.mark.parametrize(
    ("mean", "deviation", "shown"),
    [
        (3.57161, 0.01052, "3.5716 ± 0.0105"),
        (0.0213, 0.0004, "0.02130 ± 0.00040"),
        (2.0367e-10, 6.125e-13, "2.037e-10 ± 6.1e-13"),
        (-4.2e-7, 0.0, "-4.200e-07 ± 0.0e+00"),
        (1.234e12, 5e9, "1.234e+12 ± 5.0e+09"),
        (123456.789, 1.0, "123456.7890 ± 1.0000"),
        (0.0, 0.0, "0.0000 ± 0.0000"),
        (0.0, 2e-9, "0.000e+00 ± 2.0e-09"),
        (math.nan, math.nan, "nan"),
        (math.inf, math.nan, "inf"),
    ],
)
def test_numbers_of_any_size_are_shown_with_digits(mean: float, deviation: float, shown: str) -> None:
    assert mean_and_deviation("mse", mean, deviation) == shown


def test_an_accuracy_that_counts_to_a_hundred_is_not_multiplied_by_a_hundred(tmp_path: Path) -> None:
    cells = {"fp32": [100 * value for value in FLOAT32], "a": [100 * value - 4 for value in FLOAT32]}
    results = sweep_of(tmp_path, cells)
    (verdict,) = results.verdicts()
    assert verdict.head == "float32 gives accuracy 90.5000 ± 0.7906."
    assert verdict.tolerance == pytest.approx(0.905)
    assert said(verdict)["a"] == "falls short by more than 0.905: by 4 [3.68, 4.32]"  # two hundred examples
    assert results.table().title == "accuracy"
    assert results.table().text("fp32", "none") == "90.5000 ± 0.7906"
    assert str(results.compare("a", "fp32")).startswith("a against fp32: accuracy -4, 95 % interval")


@pytest.mark.parametrize("whole", [1.0, 1 + 2.0**-52, 1 + 2.0**-23])
def test_an_accuracy_that_was_rounded_above_one_is_a_share(tmp_path: Path, whole: float) -> None:
    """A weighted mean of ones may be the number above 1."""
    results = sweep_of(tmp_path, {"fp32": (whole, 0.99, 0.98), "a": (whole, 0.99, 0.98)})
    assert results.verdicts()[0].head == "float32 gives accuracy 99.0 ± 1.0 %."


def test_options_that_some_cells_have_and_others_do_not_have_tables_and_a_report(tmp_path: Path) -> None:
    cells = {"fp32": FLOAT32[:3], "a": FLOAT32[:3], ("fp32", "x"): FLOAT32[2:], ("a", "x"): FLOAT32[2:]}
    results = sweep_of(tmp_path, cells, options={("fp32", "x"): {"lr": 0.1}, ("a", "x"): {"lr": 0.1}})
    assert [table.title for table in results.tables()] == ["accuracy in %, lr None", "accuracy in %, lr 0.1"]
    with pytest.raises(ValueError, match=r"Unknown column 'lr'"):
        results.table("format", "lr", where={"scaling": "none"})
    assert len(results.chosen_rows({"lr": None})) == 6
    assert results.table("scaling", "lr", where={"format": "a"}).across == ["None", "0.1"]
    assert str(results).count("| a |") == 2
    assert results.report().exists()
    with pytest.raises(ValueError, match=r"No cell that is done has 'lrr'='None'\. Known columns"):
        results.chosen_rows({"lrr": None})


def test_float32_is_found_by_whatever_name_the_sweep_gave_it(tmp_path: Path) -> None:
    sweep_of(tmp_path, {"fp32": FLOAT32, "a": FLOAT32})
    keep_names(tmp_path, {"fp32": "reference"})
    results = Results(tmp_path)
    (verdict,) = results.verdicts()
    assert verdict.head == "float32 gives accuracy 90.5 ± 0.8 %."
    assert "Among all settings: no more than 1 point" in str(results.compare("a", "reference"))
    assert [row.format for row in overview(results, verdict)] == ["float32", "a"]
    assert "dashed: float32" in results.plot().get_supxlabel()


def test_a_setting_beside_one_that_is_rounded_stochastically_has_a_name(tmp_path: Path) -> None:
    cells = {
        "fp32": FLOAT32,
        ("a", "none", "nearest_even"): FLOAT32,
        ("a", "none", "stochastic_gradients"): [value - 0.3 for value in FLOAT32],
        ("b", "none", "nearest_even"): FLOAT32,
    }
    (verdict,) = sweep_of(tmp_path, cells).verdicts()
    names = {one.name for one in verdict.combinations}
    assert names == {"a (nearest_even)", "a (gradients rounded stochastically)", "b"}
    assert "  a (nearest_even) · b" in str(verdict)


def test_the_best_setting_is_that_of_the_best_differences_and_not_of_easier_seeds(tmp_path: Path) -> None:
    hard = (0.90, 0.91, 0.92, 0.50, 0.51)
    better = [value + 0.02 for value in hard]
    results = sweep_of(tmp_path, {"fp32": hard, ("a", "none"): better, ("a", "torch"): hard[:3]})
    (verdict,) = results.verdicts()
    row = overview(results, verdict)[-1]
    assert (row.best, row.difference) == ("none", "2.0")


def test_a_setting_that_collapses_is_not_better_than_one_that_lost_a_seed_to_the_machine(tmp_path: Path) -> None:
    cells = {
        "fp32": FLOAT32,
        ("a", "none"): (*FLOAT32[:3], 0.3, 0.3),
        ("a", "torch"): (*FLOAT32[:4], None),
        ("b", "none"): (None, None, None, None, 0.99),
        ("b", "torch"): FLOAT32,
    }
    results = sweep_of(tmp_path, cells)
    (verdict,) = results.verdicts()
    rows = overview(results, verdict)
    assert rows[1][:4] == ("a", "torch", "90.8 ± 0.6 %", "0.0, 4 of 5 seeds")
    assert rows[2][:4] == ("b", "torch", "90.5 ± 0.8 %", "0.0")


def test_where_no_setting_is_whole_the_best_lost_fewest_seeds(tmp_path: Path) -> None:
    lost, nan = (0.1, DIVERGED), math.nan
    cells = {
        "fp32": FLOAT32,
        ("a", "none"): (nan, lost, lost, nan, 0.95),
        ("a", "torch"): (0.88, 0.88, 0.88, 0.88, lost),
        ("b", "none"): (nan, lost, lost, nan, lost),
        ("b", "torch"): (None, None, lost, lost, lost),
    }
    results = sweep_of(tmp_path, cells)
    (verdict,) = results.verdicts()
    rows = overview(results, verdict)
    assert rows[1][:4] == ("a", "torch", "88.0 ± 0.0 %", "1 of 5 diverged")
    assert rows[2][:4] == ("b", "-", "-", "8 of 8 diverged")


def test_the_foot_says_over_how_many_seeds_settings_were_tested(tmp_path: Path) -> None:
    cells = {"fp32": FLOAT32, "a": FLOAT32[:3], "b": FLOAT32[:4]}
    (verdict,) = sweep_of(tmp_path, cells).verdicts()
    assert "over 3 to 4 seeds, Holm-corrected" in verdict.foot
    assert "Where none of 4 seeds collapsed, rates of collapse above 53 % are excluded" in verdict.foot


def test_a_curve_of_float32_stands_beside_settings_of_its_own_options_alone(tmp_path: Path) -> None:
    def fit(job: Any) -> dict[str, float]:
        for step in range(4):
            job.log(step, loss=job.options["height"] + step)
        return {"loss": job.options["height"]}

    options: dict[str, Any] = {"seeds": 2, "out": tmp_path, "show_progress": False}
    results = sweep(train=fit, formats=["fp16"], task_options={"height": 1.0}, **options)
    one = curve_panels(results)
    assert one is not None
    assert one["float32"]
    results = sweep(train=fit, formats=["fp16"], task_options={"height": 100.0}, **options)
    both = curve_panels(results)
    assert both is not None
    assert not both["float32"]  # which of the two would it be?
    assert {panel["name"]: len(panel["lines"]) for panel in both["panels"]} == {"fp32": 2, "fp16": 2}


def test_inf_beside_minus_inf_and_the_largest_numbers_have_tables_and_comparisons(tmp_path: Path) -> None:
    big = 1.7e308
    cells = {"fp32": (1.0, 2.0), "a": (math.inf, -math.inf), "b": (big, big)}
    results = sweep_of(tmp_path, cells, "loss")
    assert [results.table().text(name, "none") for name in "ab"] == ["nan", "1.700e+308 ± 0.0e+00"]
    assert "a against fp32: loss nan" in str(results.compare("a", "fp32"))
    assert results.report().exists()


def test_no_number_of_seeds_decides_what_is_at_the_tolerance_itself(tmp_path: Path) -> None:
    (verdict,) = sweep_of(tmp_path, {"fp32": (0.0,) * 3, "a": (0.0,) * 3}, "loss").verdicts(tolerance=0)
    assert said(verdict)["a"] == "open: 0 [0, 0]; more than 100 seeds would probably decide it"


@pytest.mark.parametrize("option", ["seconds", "diverged", "underflow", "skipped", "id", "reason"])
def test_options_named_as_results_are_settings_nevertheless(tmp_path: Path, option: str) -> None:
    def fit(job: Any) -> dict[str, float]:
        return {"accuracy": 0.9 - job.options[option] / 100 + job.seed / 1000, "reason": 1.0}

    options: dict[str, Any] = {"seeds": 3, "out": tmp_path, "show_progress": False}
    sweep(train=fit, formats=["fp16"], task_options={option: 3}, **options)
    results = sweep(train=fit, formats=["fp16"], task_options={option: 4}, **options)
    heads = [verdict.head for verdict in results.verdicts()]
    assert heads == [f"option.{option} {n}: float32 gives accuracy {87.1 - n + 3} ± 0.1 %." for n in (3, 4)]
    assert [table.title for table in results.tables()] == [f"accuracy in %, option.{option} {n}" for n in (3, 4)]
    assert {row["metric.reason"] for row in results.rows()} == {1.0}
    assert results.report().exists()
