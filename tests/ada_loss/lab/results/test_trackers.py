"""Trackers, against the real libraries on local stores."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ada_loss.lab.results import Results
from ada_loss.lab.results.trackers import MLflow, TensorBoard
from ada_loss.lab.sweep.driver import sweep


def small(out: Path, **options: Any) -> Results:
    arguments = {
        "formats": ["e5m2"],
        "scaling": ["none", "torch"],
        "seeds": 2,
        "task_options": {"epochs": 3},
        "baseline": False,
    }
    return sweep("sweep_tasks:tiny", **{**arguments, **options}, out=out, show_progress=False)  # type: ignore[arg-type]


def test_tensorboard_gets_curves_and_hyperparameters_of_each_cell_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    results = small(tmp_path, track=["tensorboard"], task_options={"epochs": 3, "record_every": 1})
    folders = {path.name: path for path in (tmp_path / "tensorboard").iterdir()}
    assert folders.keys() == {row["id"] for row in results.rows()}
    for row in results.rows():
        events = EventAccumulator(str(folders[row["id"]])).Reload()
        arrays = results.telemetry(row["id"])
        assert [e.value for e in events.Scalars("loss")] == pytest.approx(arrays["losses"].tolist(), rel=1e-6)
        assert [e.value for e in events.Scalars("scale")] == arrays["scales"].tolist()
        assert events.Scalars("underflow/error")[-1].step == 3
        assert events.Scalars("final/accuracy")[0].value == pytest.approx(row["accuracy"])
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "tensorboard").rglob("*")}
    small(tmp_path, track=["tensorboard"], task_options={"epochs": 3, "record_every": 1})
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "tensorboard").rglob("*")} == times


def test_mlflow_gets_parameters_metrics_and_the_file_of_each_cell_once(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    results = small(tmp_path, track=["mlflow"])
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(tmp_path.name)
    runs = {run.data.tags["cell"]: run for run in client.search_runs([experiment.experiment_id])}
    assert runs.keys() == {row["id"] for row in results.rows()}
    for row in results.rows():
        run = runs[row["id"]]
        assert run.info.status == "FINISHED"
        assert run.data.metrics["accuracy"] == row["accuracy"]
        assert (run.data.params["format"], run.data.params["scaling"]) == ("e5m2", row["scaling"])
        assert run.data.params["epochs"] == "3"
        assert [file.path for file in client.list_artifacts(run.info.run_id)] == [f"{row['id']}.npz"]
    small(tmp_path, track=["mlflow"], seeds=3)
    assert len(client.search_runs([experiment.experiment_id])) == 6


def logged(file: Path) -> list[bytes]:
    """The records of a run's file: LevelDB's log format, behind a header of seven bytes."""
    content, at, found, parts = file.read_bytes(), 7, [], b""
    while at + 7 <= len(content):
        if -at % 2**15 < 7:  # a block's end has no room for a header
            at += -at % 2**15
        length, kind = struct.unpack_from("<HB", content, at + 4)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(parts)
            parts = b""
    return found


def test_wandb_gets_curves_metrics_and_parameters_of_each_cell_offline_in_the_group_of_the_sweep(
    tmp_path: Path,
) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    out = tmp_path / "mine"
    results = small(out, track=["wandb"], seeds=1)
    folders = {path.name.rpartition("-")[2]: path for path in (out / "wandb").iterdir()}
    assert folders.keys() == {row["id"] for row in results.rows()}
    for row in results.rows():
        (file,) = folders[row["id"]].glob("*.wandb")
        records = [Record.FromString(data) for data in logged(file)]
        (run,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
        assert (run.run_group, run.display_name, run.run_id) == ("mine", row["id"], row["id"])
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert (config["format"], config["scaling"], config["epochs"]) == ("e5m2", row["scaling"], "3")
        history = [record.history for record in records if record.WhichOneof("record_type") == "history"]
        losses = [
            json.loads(item.value_json)
            for one in history
            for item in one.item
            if "loss" in (item.key, *item.nested_key)
        ]
        assert losses == pytest.approx(results.telemetry(row["id"])["losses"].tolist())
        summary = {
            "/".join([item.key, *item.nested_key]).strip("/"): json.loads(item.value_json)
            for record in records
            if record.WhichOneof("record_type") == "summary"
            for item in record.summary.update
        }
        assert summary["final/accuracy"] == pytest.approx(row["accuracy"])
    small(out, track=["wandb"], seeds=1)
    assert {path.name.rpartition("-")[2]: path for path in (out / "wandb").iterdir()} == folders


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
    with pytest.warns(UserWarning, match="Fails failed .OSError: the store is full. and is told no more") as warned:
        results = small(tmp_path, track=[tracker])
    assert len(warned) == 1
    assert results.counts["done"] == 4
    assert len(tracker.told) == 1


def test_unknown_trackers_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"Unknown tracker 'wandbb'\. Did you mean wandb\? Known: tensorboard, mlflow, wandb"
    ):
        small(tmp_path / "out", track=["wandbb"])
    with pytest.raises(
        ValueError, match=r"Unknown tracker 3\. Known: tensorboard, mlflow, wandb, or an object of your own"
    ):
        small(tmp_path / "out", track=[3])
    with pytest.raises(ValueError, match="Possible: a list of"):
        small(tmp_path / "out", track="mlflow")
    assert not (tmp_path / "out" / "ledger.sqlite").exists()


def test_a_store_elsewhere_can_be_named(tmp_path: Path) -> None:
    tracker = MLflow(f"sqlite:///{tmp_path / 'other.db'}", "mine", (tmp_path / "art").as_uri())
    results = small(tmp_path / "out", track=[tracker])
    assert tracker.known() == {row["id"] for row in results.rows()}
