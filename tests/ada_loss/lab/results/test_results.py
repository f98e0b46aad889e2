"""What a sweep's results say, against arithmetic by hand on a ledger written by hand."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiers

from ada_loss.files import write_atomically
from ada_loss.lab.cells.ledger import Ledger
from ada_loss.lab.results import Results
from ada_loss.lab.results.figures import figure_bytes, plot_heat, plot_scales, plot_table
from ada_loss.lab.results.results import telling_axes
from ada_loss.lab.sweep.driver import sweep

ACCURACIES = {
    ("fp32", "none"): (0.9, 0.8),
    ("fp16", "none"): (0.9, 0.7),
    ("fp16", "torch"): (0.5, 0.5),
    ("e5m2", "none"): (0.25, math.nan),
    ("e5m2", "torch"): (0.75, 0.7),
}


def npz(**arrays: Any) -> bytes:
    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()


def written(
    out: Path, cells: dict[tuple[str, str], tuple[float, ...]], roundings: tuple[str, ...] = ("nearest_even",)
) -> Results:
    with Ledger(out / "ledger.sqlite") as ledger:
        for rounding in roundings:
            for (fmt, scaling), values in cells.items():
                for seed, value in enumerate(values):
                    config = {"task": "digits", "format": fmt, "rounding": rounding, "scaling": scaling, "seed": seed}
                    cell = f"{fmt}-{scaling}-{rounding}-{seed}"
                    ledger.add([(cell, {**config, "options": {"epochs": 3}})])
                    ledger.start(cell)
                    scales = np.array([4.0, 2.0, 2.0]) if scaling == "torch" else np.ones(3)
                    telemetry = npz(losses=np.array([3.0, 2.0, 1.0]), scales=scales)
                    write_atomically(out / "telemetry" / f"{cell}.npz", telemetry)
                    result = {"metrics": {"accuracy": value}, "seconds": 2.0, "skipped": seed, "underflow": 0.25}
                    result |= {"diverged": math.isnan(value), "telemetry_bytes": len(telemetry)}
                    ledger.finish(cell, result)
    return Results(out)


def test_a_table_holds_means_and_deviations_of_the_sample(tmp_path: Path) -> None:
    table = written(tmp_path, ACCURACIES).table()
    assert table.down == ["fp32", "fp16", "e5m2"]
    assert table.across == ["none", "torch"]
    assert table.mean("fp16", "none") == pytest.approx((0.9 + 0.7) / 2)
    assert table.deviation("fp16", "none") == pytest.approx(math.sqrt(2 * 0.1**2))
    assert table.text("fp16", "none") == "80.0 ± 14.1"
    assert table.text("e5m2", "none") == "nan"
    assert table.text("fp32", "torch") == "-"
    assert table.title == "accuracy in %"


def test_a_table_goes_to_markdown_latex_csv_and_json(tmp_path: Path) -> None:
    table = written(tmp_path, {("fp_16", "none"): (0.5,)}).table()
    assert table.to("markdown") == "| format \\ scaling | none |\n|---|---:|\n| fp_16 | 50.0 |\n"
    assert table.to("latex").splitlines() == [
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        r"\caption{accuracy in \%: of 1 training each}",
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"format \textbackslash{} scaling & none \\",
        r"\midrule",
        r"fp\_16 & 50.0 \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    (line,) = csv.DictReader(table.to("csv").splitlines())
    assert (line["format"], line["accuracy mean"], line["cells"]) == ("fp_16", "0.5", "1")
    assert json.loads(table.to("json")) == [
        {"format": "fp_16", "scaling": "none", "accuracy mean": 0.5, "accuracy deviation": None, "cells": 1}
    ]
    table.places["fp_16", "none"] = [math.inf]
    assert json.loads(table.to("json"), parse_constant=pytest.fail)[0]["accuracy mean"] is None
    with pytest.raises(ValueError, match=r"'word'\. Known: markdown, latex, csv, json"):
        table.to("word")


def test_the_caption_of_a_table_in_latex_says_what_its_numbers_are(tmp_path: Path) -> None:
    for name, places, words in (
        ("one", {("fp16", "none"): (0.5, 0.6, 0.7)}, "mean and standard deviation of 3 trainings"),
        (
            "two",
            {("fp16", "none"): (0.5, 0.6, 0.7), ("e5m2", "none"): (0.5,)},
            "mean and standard deviation of 1 to 3 trainings",
        ),
    ):
        assert (
            rf"\caption{{accuracy in \%: {words}}}" in written(tmp_path / name, places).table().to("latex").splitlines()
        )


def test_options_that_follow_from_the_task_are_in_no_title(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        for task, rounding, epochs in (("a", "up", 1), ("a", "down", 1), ("b", "up", 2), ("b", "up", 3)):
            config = {"task": task, "format": "fp16", "rounding": rounding, "scaling": "none", "seed": 0}
            cell = f"{task}-{rounding}-{epochs}"
            ledger.add([(cell, {**config, "options": {"momentum": 0.9 if task == "a" else 0.8, "epochs": epochs}})])
            ledger.start(cell)
            result = {"metrics": {"accuracy": 0.5}, "seconds": 2.0, "skipped": 0, "underflow": 0.0, "diverged": False}
            ledger.finish(cell, {**result, "telemetry_bytes": 0})
    assert [table.title for table in Results(tmp_path).tables()] == [
        "accuracy in %, task a, rounding up, epochs 1",
        "accuracy in %, task a, rounding down, epochs 1",
        "accuracy in %, task b, rounding up, epochs 2",
        "accuracy in %, task b, rounding up, epochs 3",
    ]


def test_a_policy_with_overrides_is_shown_in_latex_as_it_is(tmp_path: Path) -> None:
    table = written(tmp_path, {("overrides={'a_b': 50%} \\ ~ ^ $&#", "none"): (0.5,)}).table()
    safe = r"overrides=\{'a\_b': 50\%\} \textbackslash{} \textasciitilde{} \textasciicircum{} \$\&\#"
    assert table.to("latex").splitlines()[8] == rf"{safe} & 50.0 \\"


def test_what_else_differs_makes_tables_of_its_own_and_is_never_averaged(tmp_path: Path) -> None:
    results = written(tmp_path, {("fp16", "none"): (0.5,)}, ("nearest_even", "stochastic"))
    assert [table.title for table in results.tables()] == [
        "accuracy in %, rounding nearest_even",
        "accuracy in %, rounding stochastic",
    ]
    with pytest.raises(ValueError, match=r"differ in rounding .* Choose one with where=\{'rounding': 'nearest_even'\}"):
        results.table()
    assert results.table(where={"rounding": "stochastic"}).mean("fp16", "none") == 0.5
    with pytest.raises(ValueError, match="Unknown column 'colour'"):
        results.table("colour")


def test_the_best_cell_is_never_not_a_number(tmp_path: Path) -> None:
    results = written(tmp_path, ACCURACIES)
    assert (results.best()["format"], results.best()["seed"]) == ("fp32", 0)
    assert results.best("skipped", largest=False)["seed"] == 0
    with pytest.raises(ValueError, match=r"No cell .* has a number for the metric 'loss'"):
        results.best("loss")


def test_a_frame_holds_a_row_for_each_cell_that_is_done(tmp_path: Path) -> None:
    frame = written(tmp_path, ACCURACIES).to_frame()
    assert len(frame) == 10
    assert frame[(frame.format == "fp16") & (frame.scaling == "torch")].accuracy.tolist() == [0.5, 0.5]
    assert frame.diverged.sum() == 1


def test_the_accuracy_picture_has_a_panel_for_each_format_and_a_dot_for_each_seed(tmp_path: Path) -> None:
    figure = written(tmp_path, ACCURACIES).plot_accuracy()
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == ["fp16", "e5m2"]
    assert [text.get_text() for text in panels[0].get_yticklabels()] == ["none", "torch"]
    lines = [line.get_xydata().tolist() for line in panels[0].lines]
    assert [[85.0, 0.0], [85.0, 1.0]] in [[[round(x, 9), y] for x, y in line] for line in lines]  # float32's mean
    assert [[90.0, 0.0], [70.0, 0.0]] in lines
    assert [[50.0, 1.0], [50.0, 1.0]] in lines
    labels = panels[0].texts  # with three digits, on a ground that hides the line of float32
    assert [label.get_text() for label in labels] == ["80.0", "50.0"]
    assert {label.get_bbox_patch().get_facecolor() for label in labels} == {panels[0].get_facecolor()}
    diverged = [line for line in panels[1].lines if line.get_label() == "diverged"]
    assert [line.get_ydata().tolist() for line in diverged] == [[0]]
    for kind, head in (("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")):
        assert figure_bytes(figure, kind).startswith(head)


def test_one_method_alone_puts_the_formats_into_one_panel(tmp_path: Path) -> None:
    figure = written(tmp_path, {("fp16", "none"): (0.5, 0.6), ("bf16", "none"): (0.7, 0.8)}).plot_accuracy()
    (panel,) = figure.axes
    assert [text.get_text() for text in panel.get_yticklabels()] == ["fp16", "bf16"]


def test_where_most_formats_have_one_method_all_go_into_one_panel(tmp_path: Path) -> None:
    cells = {("fp32", "none"): (0.9,), ("e5m2", "none"): (0.5,), ("e5m2", "1024"): (0.6,), ("e5m2", "torch"): (0.7,)}
    cells |= {("mxfp4", "none"): (0.8,), ("e2m1fn per tensor fp32 or another long name", "none"): (0.85,)}
    cells |= {("nvfp4", "none"): (0.875,)}
    figure = written(tmp_path, cells).plot_accuracy()
    (panel,) = figure.axes
    spoken = "FP4, a scale per tensor (or another long name)"
    names = ["e5m2, none", "e5m2, 2^10", "e5m2, torch", "MXFP4", spoken, "NVFP4"]
    assert [text.get_text() for text in panel.get_yticklabels()] == names
    drawn = {tuple(line.get_xydata().tolist()[0]) for line in panel.lines if line.get_marker() == "D"}
    assert {(round(x, 9), y) for x, y in drawn} == set(zip((50.0, 60.0, 70.0, 80.0, 85.0, 87.5), range(6)))
    figure.draw_without_rendering()
    assert panel.get_window_extent().width > 2 * figure.dpi  # inches that are left beside the names


def test_gradients_that_underflow_as_operands_are_counted_and_drawn(tmp_path: Path) -> None:
    options: Any = {"task_options": {"epochs": 1, "record_every": 1}, "out": tmp_path, "show_progress": False}
    formats = [{"products": {"dy": "e2m1fn"}}, {"products": {"x": "e2m1fn"}}]
    results = sweep("sweep_tasks:tiny", formats, baseline=False, **options)
    # the loss is a mean of 8, so dy is at most 1/8: less than half of e2m1fn's smallest number, 0.5
    assert [row["underflow"] for row in results.rows()] == [1.0, 0.0]
    axes, _ = results.plot_underflow().axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [":linear wgrad.dy"]
    assert axes.collections[0].get_array().tolist() == [[100.0]]


def test_underflow_is_shown_between_two_points_of_time_and_not_summed(tmp_path: Path) -> None:
    results = written(tmp_path, {("e5m2", "none"): (0.5,)})
    telemetry = {
        "losses": np.ones(3),
        "scales": np.ones(3),
        "sites.site": np.array(["a:x", "b:x", "a:x"]),
        "sites.role": np.array(["activation", "error", "error"]),
        "history.steps": np.array([2, 4]),
        "history.nonzero": np.array([[9, 10, 10], [9, 20, 10]]),
        "history.underflow": np.array([[9, 1, 5], [9, 6, 5]]),
    }
    write_atomically(tmp_path / "telemetry" / "e5m2-none-nearest_even-0.npz", npz(**telemetry))
    axes, _ = results.plot_underflow("e5m2-none-nearest_even-0").axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a:x", "b:x"]  # from input to output
    shares = axes.collections[0].get_array().filled(math.nan).tolist()
    assert shares[0][0] == 50
    assert math.isnan(shares[0][1])  # nothing came, so nothing could be lost
    assert shares[1] == [10, 50]


def test_pictures_of_what_was_not_recorded_are_refused(tmp_path: Path) -> None:
    results = written(tmp_path, {("e5m2", "none"): (0.5,)})
    with pytest.raises(ValueError, match=r"recorded no sites.*record_every"):
        results.plot_underflow()
    with pytest.raises(ValueError, match="There is no cell 'e4'"):
        results.plot_underflow("e4")
    with pytest.raises(ValueError, match="scaled its loss"):
        results.plot_scales()


def test_scales_are_drawn_for_the_methods_that_scale(tmp_path: Path) -> None:
    figure = written(tmp_path, ACCURACIES).plot_scales({"format": "fp16"})
    (line,) = figure.axes[0].lines
    assert line.get_label() == "fp16 torch"
    assert line.get_ydata().tolist() == [4.0, 2.0, 2.0]


def test_lines_can_be_told_apart_without_colour(tmp_path: Path) -> None:
    figure = plot_scales({f"method {i}": [1.0, 2.0] for i in range(11)})
    styles = [(line.get_marker(), line.get_linestyle()) for line in figure.axes[0].lines]
    assert len(set(styles)) == 11


def test_a_long_label_stays_inside_of_its_picture() -> None:
    figure = plot_table({("fp16", "none"): [0.5]}, "accuracy in %" + ", some_long_option 12" * 4)
    figure.draw_without_rendering()
    label = figure.findobj(lambda part: getattr(part, "get_text", str)().startswith("accuracy"))[0]
    assert label.get_window_extent().width <= figure.bbox.width


def test_settings_far_off_float32_are_arrows_at_the_edge_and_leave_the_axis_to_the_others() -> None:
    bits = {"a": [3.57, 3.58], "b": [3.6, 3.61], "c": [3.66, 3.67], "d": [7.0, 6.8], "e": [3.58, 3.6]}
    figure = plot_table({(fmt, "none"): v for fmt, v in bits.items()}, "bits", baseline=[3.57])
    (axes,) = figure.axes
    low, high = axes.get_xlim()
    assert low > 3.5
    assert high < 3.75
    (arrow,) = [line for line in axes.lines if line.get_marker() == ">"]
    assert (arrow.get_xdata()[0], arrow.get_ydata()[0]) == (high, 3)
    assert "6.90" in [text.get_text() for text in axes.texts]
    assert "arrows: means off the axis" in figure.get_supxlabel()


def test_a_share_has_ends_and_all_of_it_is_on_the_axis() -> None:
    shares = {"a": [0.95], "b": [0.949], "c": [0.94], "d": [0.1], "e": [0.951]}
    figure = plot_table({(fmt, "none"): v for fmt, v in shares.items()}, "accuracy in %", 100, [0.95])
    assert figure.axes[0].get_xlim()[0] < 10
    assert "off the axis" not in figure.get_supxlabel()


def test_the_scales_of_layers_are_drawn_by_site_and_step(tmp_path: Path) -> None:
    results = written(tmp_path, {("e5m2", "adaptive"): (0.5,), ("fp16", "adaptive"): (0.5,)})
    with pytest.raises(ValueError, match=r"scaled layer by layer.*'adaptive'.*record_every"):
        results.plot_layer_scales()
    for fmt, offset in (("e5m2", 0.0), ("fp16", 5.0)):
        grid = np.array([[3.0, 9.0], [math.nan, 8.0]]) + offset
        layers = {"layers.steps": np.array([2, 4]), "layers.site": np.array(["a:x", "b:x"]), "layers.log2_scale": grid}
        (tmp_path / f"telemetry/{fmt}-adaptive-nearest_even-0.npz").write_bytes(npz(**layers))
    (axes, _) = results.plot_layer_scales({"format": "fp16"}).axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a:x", "b:x"]
    shown = axes.collections[0].get_array().filled(math.nan).tolist()
    assert shown[1] == [14, 13]
    assert shown[0][0] == 8
    assert math.isnan(shown[0][1])
    assert "fp16" in axes.get_title()


@tiers.parametrize("content", [None, b"", b"PK\x03\x04", b"no archive at all", "half"], keep=[None, "half"])
def test_telemetry_that_cannot_be_read_is_named_and_passed_over_in_pictures(tmp_path: Path, content: Any) -> None:
    results = written(tmp_path, {("fp16", "torch"): (0.5, 0.6)})
    cell = "fp16-torch-nearest_even-0"
    path = tmp_path / "telemetry" / f"{cell}.npz"
    whole = path.read_bytes()
    if content is None:
        path.unlink()
    else:
        path.write_bytes(whole[: len(whole) // 2] if content == "half" else content)
    with pytest.raises(ValueError, match=rf"telemetry .*{cell}.npz is missing or damaged.*Run the sweep again"):
        results.telemetry(cell)
    (line,) = results.plot_scales().axes[0].lines  # of the other seed
    assert line.get_ydata().tolist() == [4.0, 2.0, 2.0]
    text = results.report().read_text()
    assert '<b class="failed">telemetry lost</b>' in text
    assert f'<a href="#cell-{cell}">1</a>' in text.split("What went wrong")[1].split("</ul>")[0]


def test_trainings_that_all_diverged_have_a_report_and_no_tables(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "task_options": {"epochs": 40},
        "out": tmp_path,
        "baseline": False,
        "show_progress": False,
    }
    results = sweep("sweep_tasks:diverges", ["e5m2"], ["fairseq"], **options)  # its scale can fall no further
    assert results.rows()[0]["diverged"]
    assert results.tables() == []
    assert results.report().exists()
    with pytest.raises(ValueError, match="holds no metric: no training reached its end"):
        results.table()


@pytest.mark.parametrize("epochs", [3, 3.0, "3", "3.0"], ids=repr)
def test_a_number_chooses_cells_however_it_is_written(tmp_path: Path, epochs: Any) -> None:
    results = written(tmp_path, {("fp16", "none"): (0.5,)})
    assert results.table(where={"epochs": epochs, "diverged": False}).mean("fp16", "none") == 0.5


def test_a_choice_that_no_cell_meets_is_said(tmp_path: Path) -> None:
    results = written(tmp_path, {("fp16", "none"): (0.5,), ("bf16", "torch"): (0.5,)})
    for look in (results.table, results.plot_scales):
        with pytest.raises(ValueError, match=r"has 'format'='half'\. Its values: fp16, bf16\."):
            look(where={"format": "half"})
        with pytest.raises(ValueError, match=r"has 'scaling'='torch'\. Its values: none\."):
            look(where={"format": "fp16", "scaling": "torch"})
        with pytest.raises(ValueError, match=r"has 'colour'='1'\. Known columns: id, task, format"):
            look(where={"colour": 1})


def test_of_names_that_differ_in_case_alone_each_chooses_its_own(tmp_path: Path) -> None:
    results = written(tmp_path, {("e4m3fn", "none"): (0.5,), ("e5m2", "none"): (0.25,)})
    results.names = {"e4m3fn": "FP8", "e5m2": "fp8"}
    assert [row["accuracy"] for row in results.chosen_rows({"format": "FP8"})] == [0.5]
    assert [row["accuracy"] for row in results.chosen_rows({"format": "fp8"})] == [0.25]


def test_only_numbers_have_a_mean_and_a_best(tmp_path: Path) -> None:
    results = written(tmp_path, {("fp16", "none"): (0.5,)})
    results.cells[0]["underflow"] = None  # nothing was recorded
    for look in (results.best, lambda name: results.table(metric=name)):
        with pytest.raises(ValueError, match=r"The column 'format' holds words: 'fp16'\. Name one of numbers"):
            look("format")
    with pytest.raises(ValueError, match="has a number for the metric 'underflow'"):
        results.best("underflow")


def test_a_damaged_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    results = written(tmp_path, {("fp16", "none"): (0.5,)})
    cell = results.cells[0]["id"]
    path = tmp_path / "telemetry" / f"{cell}.npz"
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=f"{cell}.npz is missing or damaged .* Run the sweep again"):
            results.telemetry(cell)
    path.unlink()
    with pytest.raises(ValueError, match="missing or damaged"):
        results.telemetry(cell)


def test_any_sets_of_options_in_one_folder_have_a_table_each(tmp_path: Path) -> None:
    """Also where no two sets have an option in common: the options of a training function are its own."""
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        for number, options in enumerate(({"a": 1}, {"b": 2}, {"c": 3}, {"b": 2, "c": 3})):
            for fmt, value in (("fp32", 0.5), ("e5m2", 0.25)):
                config = {"task": "t", "format": fmt, "rounding": "up", "scaling": "none", "seed": 0}
                ledger.add([(f"{fmt}{number}", config | {"options": options})])
                ledger.start(f"{fmt}{number}")
                ledger.finish(f"{fmt}{number}", {"metrics": {"accuracy": value + number / 8}, "diverged": False})
    results = Results(tmp_path)
    tables = results.tables()
    assert [table.mean("e5m2", "none") for table in tables] == [0.25, 0.375, 0.5, 0.625]
    told = [{name: value for name, value in table.where.items() if value != "None"} for table in tables]
    assert told == [{"a": "1"}, {"b": "2"}, {"c": "3"}, {"b": "2", "c": "3"}]
    assert str(results).count("| e5m2 |") == 4
    page = results.report().read_text()
    assert all(table.title in page for table in tables)
    with pytest.raises(ValueError, match=r"has 'd'='None'\. Known columns: .*a, .*b, c\."):
        results.table(where={"d": None})


def test_options_that_follow_from_the_task_tell_nothing() -> None:
    axes = ("task", "format", "scaling", "steps", "momentum", "warmup")
    rows = [
        {"task": task, "format": fmt, "scaling": "none", "steps": steps, "momentum": momentum, "warmup": task}
        for task, steps in (("a", 10), ("b", 20))
        for fmt in ("fp16", "bf16")
        for momentum in (0.0, 0.9)
    ]
    assert telling_axes(axes, rows) == ["task", "format", "momentum"]
    assert telling_axes(axes, [row for row in rows if row["task"] == "a"]) == ["format", "momentum"]
    one_each = [row for row in rows if (row["task"], row["format"]) in (("a", "fp16"), ("b", "bf16"))]
    assert telling_axes(axes, one_each) == ["task", "format", "momentum"]


def test_where_nothing_arrives_a_heat_map_is_hatched_and_says_so() -> None:
    values = np.array([[1.0, np.nan], [2.0, 3.0]])
    (axes, _) = plot_heat([1, 2], ["a", "b"], values, "title", "lost").axes
    assert axes.patch.get_hatch() == "////"
    assert "hatched: nothing arrives here" in axes.get_xlabel()
    (axes, _) = plot_heat([1, 2], ["a", "b"], np.ones((2, 2)), "title", "lost").axes
    assert axes.patch.get_hatch() is None
    assert axes.get_xlabel() == "step"


def test_loss_scales_are_drawn_in_the_report_where_one_moves(tmp_path: Path) -> None:
    for name, scales in (("constant", [4.0, 4.0]), ("moving", [4.0, 2.0])):
        results = written(tmp_path / name, {("fp16", "torch"): (0.5,)})
        for row in results.rows():
            arrays = npz(losses=np.ones(2), scales=np.array(scales))
            write_atomically(tmp_path / name / "telemetry" / f"{row['id']}.npz", arrays)
        assert ("Loss scales in fp16" in results.report().read_text()) == (name == "moving")


@pytest.mark.parametrize(
    ("metric", "factor", "shown"),
    [
        ("acc", 1.0, "90.0 ± 0.0"),
        ("val_acc", 1.0, "90.0 ± 0.0"),
        ("acc", 100.0, "90.0000 ± 0.0000"),
        ("f1", 1.0, "0.9000"),
    ],
)
def test_an_accuracy_is_shown_in_per_cent_where_it_is_a_share(
    tmp_path: Path, metric: str, factor: float, shown: str
) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        for fmt, value in (("fp32", 0.9), ("e5m2", 0.8)):
            for seed in range(3):
                config = {"task": "t", "format": fmt, "rounding": "up", "scaling": "none", "seed": seed, "options": {}}
                ledger.add([(f"{fmt}{seed}", config)])
                ledger.start(f"{fmt}{seed}")
                ledger.finish(f"{fmt}{seed}", {"metrics": {metric: factor * value}, "diverged": False})
    results = Results(tmp_path)
    assert results.table().text("fp32", "none").startswith(shown)
    is_share = shown == "90.0 ± 0.0"
    (verdict,) = results.verdicts()
    assert results.table().title == (f"{metric} in %" if is_share else metric)
    assert ("1 point" in str(verdict)) == is_share
