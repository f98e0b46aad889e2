"""Directions of metrics: names whose truth is known, statements, and sweeps whose best and worst were planted."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from ada_loss.lab.cells.ledger import Ledger
from ada_loss.lab.directions import Directions, by_name, stated
from ada_loss.lab.results import Results
from ada_loss.lab.studies.search import search
from ada_loss.lab.sweep.driver import sweep
from ada_loss.lab.sweep.progress import Progress
from ada_loss.lab.tasks import Task

sys.path.append(str(Path(__file__).parents[2] / "data"))
import published_directions as published

SIGNS = {"minimize": "-", "maximize": "+", None: "?"}
LOSSES = {"fp32": (0.188, 0.189, 0.190), "fine": (0.181, 0.182, 0.183), "dead": (1.61, 1.62, 1.60)}


# What torchmetrics publishes against the definitions: Davies and Bouldin 1979 and scikit-learn's davies_bouldin_score
# say that smaller is better, Morris et al. 2004 that all information preserved is 1. Keras' Dice is the loss, 1 - Dice.
# Alparone et al. 2008: a quality without reference is 1 - a spectral distortion, whose best value is 0.
CORRECTED = {
    "DaviesBouldinScore": "-",
    "WordInfoPreserved": "+",
    "Dice": "+",
    "dice": "+",
    "SpectralDistortionIndex": "-",
}


@pytest.mark.parametrize("names", [published.KNOWN, published.HELD_OUT], ids=["known", "held out"])
def test_no_name_has_the_direction_against_the_one_that_its_library_publishes(names: dict[str, str]) -> None:
    truths = {**names, **{name: sign for name, sign in CORRECTED.items() if name in names}}
    found = {name: SIGNS[by_name(name)] for name in truths}
    assert {name: sign for name, sign in found.items() if sign not in ("?", truths[name])} == {}
    assert sum(sign != "?" for sign in found.values()) >= 0.25 * len(found)  # the others are not judged


def test_metrics_of_the_tasks_of_the_library_are_judged_by_their_names() -> None:
    lower = "bits_per_character cross_entropy loss underflow skipped seconds".split()
    higher = "accuracy mean_iou mean_average_precision".split()
    assert {by_name(name) for name in lower} == {"minimize"}
    assert {by_name(name) for name in higher} == {"maximize"}


@pytest.mark.parametrize("metric", ["kappa", "wer", "rouge", "rmse", "elbo"])
def test_a_word_outside_of_the_fifteen_is_not_judged_and_the_verdict_names_the_options(
    tmp_path: Path, metric: str
) -> None:
    words = str(Results(written(tmp_path, metric)).verdicts()[0])
    assert f"nothing tells whether a larger or a smaller {metric} is better" in words
    assert f"--minimize or --maximize {metric}" in words
    assert outcomes(Results(tmp_path, minimize=[metric])) == {"fine": "match", "dead": "short"}


@pytest.mark.parametrize("name", ["val_loss", "VAL_LOSS", "val/loss", "val.loss", "valLoss", "val loss", "val-loss"])
def test_a_name_is_split_at_signs_and_case(name: str) -> None:
    assert by_name(name) == "minimize"


@pytest.mark.parametrize(
    "name",
    "accuracy_drop acc_gap loss_reduction loss_std explained_variance 1-accuracy -loss 1-shot_accuracy one_minus_f1 "
    "neg_log_loss d2_log_loss_score loss_scale scale precision_recall_curve".split()
    + ["1 - val_acc", ""],
)
def test_a_change_of_a_metric_has_not_the_metrics_direction(name: str) -> None:
    assert by_name(name) is None


def test_a_statement_goes_before_the_name() -> None:
    said = Directions({"loss": "maximize"})
    assert (said.of("loss"), said.of("metric.loss"), said.of("val_loss")) == ("maximize", "maximize", "minimize")
    assert (said.sign("loss"), said.sign("val_loss"), said.sign("lr")) == (1, -1, 0)


def written(out: Path, metric: str, values: dict[str, tuple[float, ...]] = LOSSES, sign: int = 1) -> Path:
    """A sweep's folder with the values of a metric by format and seed."""
    with Ledger(out / "ledger.sqlite") as ledger:
        for fmt, found in values.items():
            for seed, value in enumerate(found):
                config = {"task": "t", "format": fmt, "rounding": "up", "scaling": "none", "seed": seed, "options": {}}
                cell = f"{fmt}-{seed}"
                ledger.add([(cell, config)])
                ledger.start(cell)
                ledger.finish(cell, {"metrics": {metric: sign * value}, "skipped": 0, "diverged": False})
    return out


def outcomes(results: Results) -> dict[str, str]:
    (verdict,) = results.verdicts()
    return {one.name: one.outcome for one in verdict.combinations}


@pytest.mark.parametrize("metric", ["val_loss", "nll", "ppl", "bits_per_character"])
def test_the_worst_loss_is_not_the_best_training(tmp_path: Path, metric: str) -> None:
    results = Results(written(tmp_path, metric))
    assert results.best()["format"] == "fine"
    assert outcomes(results) == {"fine": "match", "dead": "short"}
    assert "lower is better" in str(results.verdicts()[0])
    assert "lower is better" in results.table().title
    assert "(lower is better)" in str(results.compare("dead", "fp32"))


def test_a_metric_and_its_opposite_have_the_same_verdict(tmp_path: Path) -> None:
    found = Results(written(tmp_path / "loss", "loss"))
    turned = Results(written(tmp_path / "acc", "acc", sign=-1))
    named = Results(written(tmp_path / "named", "speed", sign=-1), maximize=["speed"])
    assert outcomes(found) == outcomes(turned) == outcomes(named)
    assert found.best()["id"] == turned.best()["id"] == named.best()["id"]


def test_what_has_no_direction_is_not_judged_and_nothing_of_it_is_best(tmp_path: Path) -> None:
    results = Results(written(tmp_path, "speed"))
    words = "nothing tells whether a larger or a smaller speed is better"
    assert words in str(results.verdicts()[0])
    assert "minimize=['speed']" in str(results.verdicts()[0])
    with pytest.raises(ValueError, match=words.replace("nothing", "Nothing") + r".*minimize=\['speed'\]"):
        results.best()
    assert results.best(largest=False)["format"] == "fine"
    assert outcomes(Results(tmp_path, minimize=["speed"])) == {"fine": "match", "dead": "short"}


def test_bold_is_the_best_of_a_row_and_nothing_where_nobody_knows(tmp_path: Path) -> None:
    for metric, bold in (("loss", 1), ("speed", 0)):
        out = tmp_path / metric
        with Ledger(out / "ledger.sqlite") as ledger:
            for scaling, value in (("a", 0.2), ("b", 1.6)):
                for seed in range(2):
                    config = {"task": "t", "format": "f", "rounding": "up", "scaling": scaling, "seed": seed}
                    ledger.add([(f"{scaling}{seed}", {**config, "options": {}})])
                    ledger.start(f"{scaling}{seed}")
                    ledger.finish(f"{scaling}{seed}", {"metrics": {metric: value}, "skipped": 0, "diverged": False})
        text = Results(out).report().read_text()
        assert text.count('class="best">0.2000') == bold
        assert 'class="best">1.6' not in text


def test_progress_names_the_smallest_loss(tmp_path: Path) -> None:
    progress = Progress(2, 0, tmp_path, "", False)
    for cell, value in (("worse", 1.6), ("better", 0.2), ("worst", 8.0)):
        progress.compare(cell, {"metrics": {"val_loss": value}})
    assert progress.best == "best mean val_loss: better 0.2000 (1 seed)"
    silent = Progress(2, 0, tmp_path, "", False)
    silent.compare("any", {"metrics": {"speed": 1.0}})
    assert silent.best == ""


def test_a_sweep_says_once_that_it_does_not_judge_a_metric_and_how_to_state_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(2, 0, tmp_path, "", True)
    for _ in range(2):
        progress.compare("any", {"metrics": {"kappa": 1.0}})
    said = capsys.readouterr().err
    assert said.count("No verdict on kappa: nothing tells whether more of it is better.") == 1
    assert "--minimize or --maximize kappa" in said


def test_progress_calls_no_diverged_training_and_no_other_metric_the_best(tmp_path: Path) -> None:
    progress = Progress(4, 0, tmp_path, "", False)
    for cell, metrics, diverged in (
        ("first", {"loss": 2.0}, False),
        ("not a number", {"loss": math.nan}, True),
        ("lost", {"loss": -math.inf}, True),
        ("of another task", {"accuracy": 0.9}, False),
        ("worse", {"loss": 3.0}, False),
    ):
        progress.compare(cell, {"metrics": metrics, "diverged": diverged})
    assert progress.best == "best mean loss: first 2.0000 (1 seed)"


def test_progress_compares_means_over_seeds_of_one_setting_and_names_float32_beside_the_best(tmp_path: Path) -> None:
    progress = Progress(9, 0, tmp_path, "", False)

    def tell(cell: str, accuracy: float, setting: str, is_baseline: bool = False, diverged: bool = False) -> None:
        progress.compare(cell, {"metrics": {"accuracy": accuracy}, "diverged": diverged}, setting, is_baseline)

    tell("fp16 nearest_even none seed 0", 0.99, "a")  # the best seed of all, of a setting that is not the best
    tell("fp16 nearest_even none seed 1", 0.81, "a")
    tell("e5m2 nearest_even torch seed 0", 0.94, "b")
    tell("e5m2 nearest_even torch seed 1", 0.92, "b")
    tell("e5m2 nearest_even torch seed 0", 0.10, "c")  # with other options: a setting of its own
    tell("fp32 nearest_even none seed 0", 0.98, "d", is_baseline=True)
    assert progress.best == (
        "best mean accuracy: e5m2 nearest_even torch 93.0 ± 1.4 % (2 seeds), fp32 nearest_even none 98.0 % (1 seed)"
    )
    tell("e5m2 nearest_even torch seed 2", 0.99, "b", diverged=True)
    assert "accuracy: fp16 nearest_even none 90.0 ± 12.7 % (2 seeds), fp32" in progress.best


def test_a_sweep_states_directions_also_when_nothing_is_left_to_train(tmp_path: Path) -> None:
    def fit(job: Any) -> dict[str, float]:
        return {"speed": {"fp32": 1.0, "fp16": 2.0}.get(str(job.fmt), 1.0) + 0.01 * job.seed}

    options: dict[str, Any] = {"seeds": 3, "out": tmp_path, "show_progress": False}
    first = sweep(train=fit, formats=["fp16"], **options)
    assert first.directions.of("speed") is None
    again = sweep(train=fit, formats=["fp16"], minimize=["speed"], **options)
    assert again.directions.of("speed") == "minimize" == Results(tmp_path).directions.of("speed")
    with pytest.raises(ValueError, match=r"The metric 'speed' is in minimize and in maximize"):
        sweep(train=fit, formats=["fp16"], minimize=["speed"], maximize=["speed"], **options)
    with pytest.raises(TypeError, match=r"Got minimize='speed'\. Expected a list"):
        sweep(train=fit, formats=["fp16"], minimize="speed", **options)


def test_a_task_states_its_goal_and_the_sweep_overrules_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"task_options": {"epochs": 1}, "show_progress": False}
    results = sweep("sweep_tasks:with_a_goal", ["fp16"], out=tmp_path / "task", **options)
    assert results.directions.said == {"speed": "minimize"}
    results = sweep("sweep_tasks:with_a_goal", ["fp16"], out=tmp_path / "sweep", maximize=["speed"], **options)
    assert results.directions.said == {"speed": "maximize"}


def test_a_goal_of_an_unknown_metric_or_kind_is_refused() -> None:
    import sweep_tasks

    fields = {name: getattr(sweep_tasks.tiny(0), name) for name in ("model", "train", "test", "loss", "metrics")}
    with pytest.raises(ValueError, match=r"states a goal for 'acuracy'.*Did you mean 'accuracy"):
        Task("t", **fields, goal={"acuracy": "minimize"})
    with pytest.raises(ValueError, match=r"Got the goal 'min' of the metric 'accuracy'.*Use 'minimize' or 'maximize'"):
        Task("t", **fields, goal="min")
    with pytest.raises(TypeError, match=r"Got the goal 3"):
        Task("t", **fields, goal=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"speed": "up"}', '{"speed": ["minimize"]}', "\x00"])
def test_a_file_of_directions_that_is_damaged_states_nothing(tmp_path: Path, content: str) -> None:
    out = written(tmp_path, "speed")
    (out / "directions.json").write_text(content)
    assert Results(out).directions.said == {}


def test_a_search_keeps_a_loss_and_finds_no_dead_format(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    options: dict[str, Any] = {"roles": ["weight"], "exponent_bits": (5, 5), "mantissa_bits": (1, 6), "trials": 4}
    options |= {"seeds": 1, "task_options": {"epochs": 1}, "show_progress": False, "out": tmp_path}
    found = search("sweep_tasks:with_bits_in_its_loss", tolerance=0.15, **options)
    # the metric is the rounding error of 1 + 2^-4 and others in weights: more bits, less error
    assert found.accuracy - found.baseline <= 0.15
    assert all(row["accuracy"] - found.baseline <= 0.15 for row in found.rows if row["kept"])
    assert any(row["accuracy"] - found.baseline > 0.15 and not row["kept"] for row in found.rows)
    with pytest.raises(ValueError, match=r"Nothing tells whether a larger or a smaller speed is better"):
        search("sweep_tasks:without_a_goal", **{**options, "out": tmp_path / "none"})


def test_directions_are_kept_as_json(tmp_path: Path) -> None:
    from ada_loss.lab.directions import keep_directions, read_directions

    keep_directions(tmp_path, {"a": "minimize"})
    keep_directions(tmp_path, {"b": "maximize"})
    assert json.loads((tmp_path / "directions.json").read_text()) == read_directions(tmp_path)
    assert read_directions(tmp_path) == {"a": "minimize", "b": "maximize"}


@pytest.mark.parametrize("given", [[1], [None], [["wer"]]], ids=str)
@pytest.mark.parametrize("name", ["minimize", "maximize"])
def test_a_metric_that_is_not_a_name_is_refused(name: str, given: list[Any]) -> None:
    lists = {"minimize": [], "maximize": [], name: given}
    with pytest.raises(TypeError, match=rf"Got the metric .* in {name}\. Expected a name"):
        stated(lists["minimize"], lists["maximize"])
