"""Trackers, against the real libraries on local stores."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiers
import torch
from torch import nn

from ada_loss import Job
from ada_loss.lab.cells.cells import plan
from ada_loss.lab.cells.ledger import Ledger
from ada_loss.lab.cells.telemetry import live_path
from ada_loss.lab.results import Results
from ada_loss.lab.results.trackers import About, MLflow, Notifier, TensorBoard, make_trackers
from ada_loss.lab.sweep.driver import sweep

MOST_WAITED = 2000


def small(out: Path, **options: Any) -> Results:
    arguments = {
        "formats": ["e5m2"],
        "scaling": ["none", "torch"],
        "seeds": 2,
        "task_options": {"epochs": 3},
        "baseline": False,
    }
    return sweep("sweep_tasks:tiny", **{**arguments, **options}, out=out, show_progress=False)  # type: ignore[arg-type]


def of_tensorboard(out: Path) -> dict[str, dict[str, Any]]:
    """What TensorBoard shows: the runs by their names, each with its cell and its curves."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for folder in sorted((out / "tensorboard").iterdir()):
        events = EventAccumulator(str(folder)).Reload()
        names, data = events.Tags()["scalars"], events.summary_metadata
        marks = [path.read_text() for path in (folder / "cell", folder / "begun") if path.exists()]
        found[folder.name] = {
            "cell": marks[0],
            "curves": {name: [(e.step, e.value) for e in events.Scalars(name)] for name in names},
            "lower": [name for name in data if data[name].summary_description == "lower is better"],
        }
    return found


def of_mlflow(out: Path) -> dict[str, dict[str, Any]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{out / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(out.name)
    found = {}
    for run in client.search_runs([experiment.experiment_id]):
        curves = {
            name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        }
        note = run.data.tags.get("mlflow.note.content", "")
        words = {"status": run.info.status, "params": run.data.params, "tags": run.data.tags, "last": run.data.metrics}
        words["artifacts"] = [file.path for file in client.list_artifacts(run.info.run_id)]
        lower = note.removeprefix("Lower is better: ").rstrip(".").split(", ")
        found[run.info.run_name] = {"cell": run.data.tags["cell"], "curves": curves, "lower": lower, **words}
    return found


def logged(file: Path) -> list[bytes]:
    """The records of a run's file: LevelDB's log format, behind a header of seven bytes."""
    content, at, found, parts = file.read_bytes(), 7, [], b""
    while at + 7 <= len(content):
        if -at % 2**15 < 7:  # a block's end has no room for a header
            at += -at % 2**15
        length, kind = struct.unpack_from("<HB", content, at + 4)
        if at + 7 + length > len(content):  # while it is written
            break
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(parts)
            parts = b""
    return found


def of_wandb(out: Path) -> dict[str, dict[str, Any]]:
    from wandb.proto.wandb_internal_pb2 import Record

    def key(item: Any) -> str:
        return "/".join(item.nested_key) or item.key

    found = {}
    for folder in sorted((out / "wandb").glob("offline-run-*")):
        (file,) = folder.glob("*.wandb")
        records = [Record.FromString(data) for data in logged(file)]
        runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
        if not runs:  # it has just begun
            continue
        run = runs[-1]
        curves: dict[str, list[tuple[int, float]]] = {}
        for record in records:
            if record.WhichOneof("record_type") == "history":
                row = {key(item): json.loads(item.value_json) for item in record.history.item}
                for name, value in row.items():
                    if name not in ("step", "_step", "_runtime", "_timestamp"):
                        curves.setdefault(name, []).append((row["step"], value))
        summary = {
            key(item): json.loads(item.value_json)
            for record in records
            if record.WhichOneof("record_type") == "summary"
            for item in record.summary.update
        }
        found[run.display_name] = {
            "cell": runs[0].run_id,
            "curves": curves,
            "lower": run.notes.removeprefix("Lower is better: ").rstrip(".").split(", "),
            "group": runs[0].run_group,
            "tags": sorted(runs[0].tags),
            "job_type": runs[0].job_type,
            "params": {item.key: json.loads(item.value_json) for item in runs[0].config.update},
            "last": summary,
        }
    return found


def maker(name: str) -> Any:
    return lambda out: make_trackers([name], out)[0]


MAKERS = {name: maker(name) for name in ("tensorboard", "mlflow", "wandb")}
READERS = {"tensorboard": of_tensorboard, "mlflow": of_mlflow, "wandb": of_wandb}
TRACKING = pytest.mark.parametrize("tracker", [*READERS])
STEPS = (1, 3, 5, 7, 9)


def logs_as_a_trainer_does(job: Job) -> dict[str, float]:
    """Losses at each other step, a learning rate, and an evaluation that is logged behind later steps."""
    model = job.quantize(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = job.scaler(optimizer)
    for step in range(10):
        loss = model(torch.ones(3, 4)).square().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step in STEPS:
            job.log(step, loss=1.0 / (step + 1), lr=0.1 * step)
    job.log(4, **{"eval/accuracy": 0.5})
    job.log(9, **{"eval/accuracy": 0.75})
    return {"val_loss": 0.125, "hits@10": 0.5}


def own(out: Path, **options: Any) -> Results:
    arguments = {"formats": ["e5m2"], "scaling": ["torch"], "seeds": 1, "baseline": False, "show_progress": False}
    return sweep(**{"train": logs_as_a_trainer_does, **arguments, **options}, out=out)


@pytest.mark.full
@tiers.parametrize("tracker", READERS, keep={"wandb"})
def test_trackers_get_every_number_at_the_step_it_was_logged_at(tmp_path: Path, tracker: str) -> None:
    out = tmp_path / "mine"
    results = own(out, track=[tracker])
    (row,) = results.rows()
    (run,) = READERS[tracker](out).values()
    assert run["cell"] == row["id"]
    curves = {name: sorted(points) for name, points in run["curves"].items()}
    assert curves["loss"] == [(step, pytest.approx(1 / (step + 1), rel=1e-6)) for step in STEPS]
    assert curves["lr"] == [(step, pytest.approx(0.1 * step, rel=1e-6)) for step in STEPS]
    assert curves["eval/accuracy"] == [(4, 0.5), (9, 0.75)]
    assert curves["scale"] == [*enumerate(results.telemetry(row["id"])["scales"])]
    assert len(curves["scale"]) == 10
    assert curves["underflow/error"][-1][0] == 10
    assert {"underflow/error", "underflow/activation", "underflow/weight"} <= curves.keys()
    assert not any("linear" in name for name in curves)  # no curves of layers


@tiers.parametrize("tracker", READERS, keep={"mlflow"})
def test_trackers_get_the_curves_and_the_metrics_of_a_task_of_each_cell_once(tmp_path: Path, tracker: str) -> None:
    out, options = tmp_path / "mine", {"epochs": 3, "record_every": 1, "evaluate_every": 1}
    results = small(out, track=[tracker], task_options=options)
    runs = READERS[tracker](out)
    assert {run["cell"]: name for name, run in runs.items()} == {
        row["id"]: f"e5m2 {row['scaling']} seed {row['seed']}" for row in results.rows()
    }
    for row in results.rows():
        run = runs[f"e5m2 {row['scaling']} seed {row['seed']}"]
        arrays = results.telemetry(row["id"])
        steps = range(len(arrays["losses"]))
        assert sorted(run["curves"]["loss"]) == [(k, pytest.approx(arrays["losses"][k], rel=1e-6)) for k in steps]
        assert [step for step, _ in sorted(run["curves"]["accuracy"])][:3] == [1, 2, 3]
        assert "loss" in run["lower"]
        assert "accuracy" not in run["lower"]
    small(out, track=[tracker], task_options=options)
    assert READERS[tracker](out).keys() == runs.keys()
    small(out, track=[tracker], task_options=options, seeds=3)
    assert len(READERS[tracker](out)) == 6


def log_an_end(tracker: MLflow, name: str, loss: float, file: Path) -> None:
    """A cell whose loss ends so, and whose metric is as large below zero."""
    config = {"format": "fp16", "rounding": "nearest_even", "scaling": "none", "seed": 0, "options": {}}
    steps = np.array([1.0, 2.0])
    tracker.begin(name, config, About(name, "none", 0))
    tracker.add(name, {"loss": (steps, np.array([1.0, loss])), "lr": (steps, steps)})
    row = {"metrics": {"val_loss": -loss}, "seconds": 1.0, "skipped": 0, "underflow": None, "diverged": True}
    tracker.finish(name, row, file)


@pytest.mark.full
def test_runs_of_mlflow_have_parameters_tags_and_the_file_and_name_what_was_infinite(tmp_path: Path) -> None:
    (row,) = own(tmp_path, track=["mlflow"]).rows()
    (run,) = of_mlflow(tmp_path).values()
    assert "infinite" not in run["tags"]
    tracker = MLflow(f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}", tmp_path.name)
    for name, loss in (("diverged", np.inf), ("undefined", np.nan)):
        log_an_end(tracker, name, loss, Path(__file__))
    diverged, undefined = (of_mlflow(tmp_path)[f"{name} none seed 0"] for name in ("diverged", "undefined"))
    assert diverged["tags"]["infinite"] == "loss, val_loss"
    assert diverged["last"]["loss"] == np.finfo(np.float64).max  # what its database has, MLflow's issue 22826
    assert "infinite" not in undefined["tags"]
    assert np.isnan(undefined["last"]["loss"])
    assert run["status"] == "FINISHED"
    assert run["last"]["val_loss"] == 0.125
    assert run["last"]["hits_10"] == 0.5
    assert "val_loss" in run["lower"]
    assert (run["params"]["format"], run["params"]["scaling"]) == ("e5m2", "torch")
    assert (run["tags"]["format"], run["tags"]["scaling"], run["tags"]["group"]) == ("e5m2", "torch", "e5m2 torch")
    assert run["artifacts"] == [f"{row['id']}.npz"]


def test_runs_of_wandb_are_grouped_and_tagged_by_format_and_scaling(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    own(out, track=["wandb"], formats=[{"name": "my fp8", "format": "e4m3fn"}], seeds=2)
    runs = of_wandb(out)
    assert [*runs] == ["my fp8 torch seed 0", "my fp8 torch seed 1"]
    for run in runs.values():
        assert (run["group"], run["job_type"], run["tags"]) == ("my fp8 torch", "mine", ["my fp8", "torch"])
        assert (run["params"]["format"], run["params"]["description"]) == ("my fp8", "e4m3fn")
        assert run["last"]["final/val_loss"] == 0.125
        assert "val_loss" in run["lower"]


def test_hyperparameters_of_tensorboard_have_the_final_metrics(tmp_path: Path) -> None:
    own(tmp_path, track=["tensorboard"])
    (run,) = of_tensorboard(tmp_path).values()
    assert run["curves"]["final/val_loss"] == [(0, 0.125)]
    assert "loss" in run["lower"]


@tiers.parametrize("tracker", READERS, keep={"tensorboard"})
def test_trackers_see_a_training_while_it_runs(tmp_path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ada_loss.lab.cells.telemetry.EVERY", 0.0)
    monkeypatch.setattr("ada_loss.lab.results.trackers.READ_EVERY", 0.01)
    seen: list[tuple[int, float]] = []

    def waits(job: Job) -> dict[str, float]:
        job.log(0, loss=0.5)
        for step in range(1, MOST_WAITED):  # until it is seen
            job.log(step, loss=0.25)
            runs = READERS[tracker](tmp_path) if (tmp_path / tracker).exists() else {}
            seen[:] = sorted(runs.get("fp32 none seed 0", {"curves": {}})["curves"].get("loss", []))[:1]
            if seen:
                break
            time.sleep(0.05)
        return {"val_loss": 0.125}

    results = own(tmp_path, train=waits, formats=["fp32"], scaling=["none"], track=[tracker])
    assert results.failures() == []
    assert seen == [(0, 0.5)]
    (run,) = READERS[tracker](tmp_path).values()
    steps = [step for step, _ in sorted(run["curves"]["loss"])]
    assert steps == [*range(len(steps))]  # each once, those that were told before too


def fails_while_a_file_is_there(job: Job) -> dict[str, float]:
    fails = Path(job.options["file"]).exists()
    for step in range(400):
        job.log(step, loss=1.0)
        if fails:
            time.sleep(0.01)
    if fails:
        raise RuntimeError("no")
    return {"val_loss": 0.125}


@tiers.parametrize("tracker", READERS, keep={"tensorboard"})
def test_a_run_that_was_interrupted_or_failed_is_begun_again(
    tmp_path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ada_loss.lab.cells.telemetry.EVERY", 0.0)
    monkeypatch.setattr("ada_loss.lab.results.trackers.READ_EVERY", 0.01)
    (tmp_path / "fail").touch()
    options = {
        "train": fails_while_a_file_is_there,
        "task_options": {"file": str(tmp_path / "fail")},
        "formats": ["fp32"],
        "scaling": ["none"],
        "track": [tracker],
    }
    assert own(tmp_path, **options).counts["failed"] == 1
    if tracker == "mlflow":
        assert of_mlflow(tmp_path)["fp32 none seed 0"]["status"] == "KILLED"
    assert MAKERS[tracker](tmp_path).known() == set()
    (tmp_path / "fail").unlink()
    (row,) = own(tmp_path, **options, retry_failed=True).rows()
    (run,) = READERS[tracker](tmp_path).values()
    assert (run["cell"], len(run["curves"]["loss"])) == (row["id"], 400)
    assert MAKERS[tracker](tmp_path).known() == {row["id"]}


def test_what_was_done_without_a_tracker_is_told_later(tmp_path: Path) -> None:
    results = small(tmp_path)
    assert TensorBoard(tmp_path / "tensorboard").known() == set()
    small(tmp_path, track=["tensorboard"])
    assert TensorBoard(tmp_path / "tensorboard").known() == {row["id"] for row in results.rows()}


@pytest.mark.parametrize("tracker", ["tensorboard", "mlflow"])
def test_a_cell_that_runs_again_for_its_damaged_file_is_not_told_twice(tmp_path: Path, tracker: str) -> None:
    results = small(tmp_path, track=[tracker])
    (tmp_path / "telemetry" / f"{results.rows()[0]['id']}.npz").unlink()
    assert small(tmp_path, track=[tracker]).cells[0]["attempts"] == 2
    if tracker == "mlflow":
        from mlflow.tracking import MlflowClient

        client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}")
        experiment = client.get_experiment_by_name(tmp_path.name)
        assert len(client.search_runs([experiment.experiment_id])) == 4
    else:
        assert TensorBoard(tmp_path / tracker).known() == {row["id"] for row in results.rows()}


class Fails:
    """A store that is full after one cell."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def known(self) -> set[str]:
        return set(self.told)

    def log(self, cell: str, config: Mapping[str, Any], row: Mapping[str, Any], telemetry: Path) -> None:
        assert telemetry.exists()
        if len(self.told) == 1:
            raise OSError("the store is full")
        self.told.append(cell)


def test_a_tracker_that_fails_loses_no_result_and_is_told_later_what_it_missed(tmp_path: Path) -> None:
    tracker = Fails()
    with pytest.warns(UserWarning, match="Fails failed .OSError: the store is full. and gets no more cells") as warned:
        results = small(tmp_path, track=[tracker])
    assert len(warned) == 1
    assert results.counts["done"] == 4
    assert len(tracker.told) == 1


def test_unknown_trackers_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"Unknown tracker 'wandbb'\. Did you mean 'wandb'\? Known: tensorboard, mlflow, wandb"
    ):
        small(tmp_path / "out", track=["wandbb"])
    with pytest.raises(
        ValueError, match=r"Unknown tracker 3\. Known: tensorboard, mlflow, wandb, or an object of your own"
    ):
        small(tmp_path / "out", track=[3])
    with pytest.raises(ValueError, match="Expected: a list of"):
        small(tmp_path / "out", track="mlflow")
    assert not (tmp_path / "out" / "ledger.sqlite").exists()


def test_a_store_elsewhere_can_be_named(tmp_path: Path) -> None:
    tracker = MLflow(f"sqlite:///{tmp_path / 'other.db'}", "mine", (tmp_path / "art").as_uri())
    results = small(tmp_path / "out", track=[tracker])
    assert tracker.known() == {row["id"] for row in results.rows()}


class Silent:
    """A tracker of trainings as they go, which knows no cell and keeps nothing."""

    is_live = True

    def known(self) -> set[str]:
        return set()

    def begin(self, *_: Any) -> None: ...

    def add(self, *_: Any) -> None: ...

    def finish(self, *_: Any) -> None: ...

    def log(self, *_: Any, **__: Any) -> None: ...

    def abandon(self, *_: Any) -> None: ...


@pytest.mark.parametrize("verb", ["tell", "stop"])
def test_what_a_worker_wrote_for_trackers_goes_with_the_end_of_its_cell(tmp_path: Path, verb: str) -> None:
    notifier = Notifier([Silent()], tmp_path)  # type: ignore[list-item]
    with Ledger(":memory:") as ledger:
        notifier.catch_up(ledger)
    config = plan("digits", ["fp16"], ["none"])[0].config
    notifier.start("a1", config)
    path = live_path(tmp_path / "checkpoints" / "a1.pt")
    path.parent.mkdir()
    path.touch()
    if verb == "tell":
        with pytest.warns(UserWarning, match="a1.npz is missing or damaged"):  # even where the tracker is told nothing
            notifier.tell("a1", config, {"accuracy": 0.5})
    else:
        notifier.stop("a1")
    is_gone = not path.exists()
    notifier.close()
    assert is_gone
