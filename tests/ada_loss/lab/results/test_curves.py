"""Learning curves, against NumPy on arrays written by hand."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ada_loss.files import write_atomically
from ada_loss.lab.cells.ledger import Ledger
from ada_loss.lab.results import Results
from ada_loss.lab.sweep.driver import sweep


def written(out: Path, cells: dict[tuple[str, int], dict[str, Any]]) -> Results:
    """Cells {(format, seed): arrays}."""
    with Ledger(out / "ledger.sqlite") as ledger:
        for (fmt, seed), arrays in cells.items():
            config = {"task": "t", "format": fmt, "rounding": "up", "scaling": "none", "seed": seed, "options": {}}
            ledger.add([(f"{fmt}-{seed}", config)])
            ledger.start(f"{fmt}-{seed}")
            ledger.finish(f"{fmt}-{seed}", {"metrics": {"accuracy": 0.5}})
            content = io.BytesIO()
            np.savez(content, **{name: np.array(values) for name, values in arrays.items()})
            write_atomically(out / "telemetry" / f"{fmt}-{seed}.npz", content.getvalue())
    return Results(out)


def test_a_curve_has_mean_and_deviation_over_the_seeds(tmp_path: Path) -> None:
    first, second = [4.0, 3.0, 2.0, 1.0], [8.0, 4.0, 2.0, 0.0]
    results = written(tmp_path, {("a", 1): {"losses": second}, ("a", 0): {"losses": first}, ("b", 0): {"losses": [1]}})
    a, b = results.curves()
    assert (a.name, a.seeds, b.name) == ("a", (0, 1), "b")
    assert a.steps.tolist() == [0, 1, 2, 3]
    assert a.mean.tolist() == np.mean([first, second], axis=0).tolist()
    assert a.deviation == pytest.approx(np.std([first, second], axis=0, ddof=1))
    assert np.isnan(b.deviation).all()
    (halves,) = results.curves(where={"format": "a"}, points=2)
    assert halves.steps.tolist() == [0.5, 2.5]
    assert halves.values.tolist() == [[3.5, 1.5], [6.0, 1.0]]


def test_a_training_that_ended_or_diverged_leaves_the_mean_to_the_others(tmp_path: Path) -> None:
    cells = {
        ("a", 0): {"losses": [4.0, np.inf, np.nan]},
        ("a", 1): {"losses": [2.0, 1.0, 3.0]},
        ("a", 2): {"losses": [3.0]},
    }
    (curve,) = written(tmp_path, cells).curves()
    assert curve.mean.tolist() == [3.0, 1.0, 3.0]
    assert curve.deviation[0] == 1.0
    assert np.isnan(curve.deviation[1:]).all()


def test_a_metric_that_was_computed_on_the_way_is_a_curve(tmp_path: Path) -> None:
    options: Any = {"task_options": {"epochs": 4, "evaluate_every": 2}, "out": tmp_path, "show_progress": False}
    results = sweep("sweep_tasks:tiny", ["e5m2"], ["none", "torch"], seeds=2, **options)
    found = {curve.name: curve for curve in results.curves("accuracy")}
    assert [*found] == ["fp32 none", "e5m2 none", "e5m2 torch"]
    assert found["e5m2 torch"].steps.tolist() == [2, 4]
    for row in results.rows():
        curve = found[f"{row['format']} {row['scaling']}"]
        assert curve.values[row["seed"], -1] == row["accuracy"]


def test_a_curve_that_is_not_there_is_said_with_those_that_are(tmp_path: Path) -> None:
    results = written(tmp_path, {("a", 0): {"losses": [1.0], "evaluations.steps": [1], "evaluations.accuracy": [0.5]}})
    with pytest.raises(
        ValueError, match=r"No cell has a curve 'acuracy'\. Did you mean 'accuracy'\? Known: loss, accuracy"
    ):
        results.curves("acuracy")
    with pytest.raises(ValueError, match="points=0 is invalid"):
        results.curves(points=0)


@pytest.mark.parametrize("losses", [["a"], [[1.0]], []])
def test_arrays_of_another_kind_are_no_curve(tmp_path: Path, losses: Any) -> None:
    with pytest.raises(ValueError, match="No cell has a curve 'loss'"):
        written(tmp_path, {("a", 0): {"losses": losses}}).curves()


def test_a_curve_has_200_points_unless_told_otherwise(tmp_path: Path) -> None:
    (curve,) = written(tmp_path, {("a", 0): {"losses": np.arange(400.0)}}).curves()
    assert curve.mean.tolist() == np.arange(400.0).reshape(200, 2).mean(1).tolist()
