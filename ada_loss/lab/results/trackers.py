"""Trackers: they are told of finished cells. TensorBoard, MLflow and Weights & Biases are optional extras."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ada_loss.lab.sweep.cell_formats import label
from ada_loss.lab.sweep.ledger import Ledger
from ada_loss.lab.sweep.telemetry import telemetry_path
from fpsim.checks import did_you_mean, pip_install, shown

__all__ = ["TRACKERS", "MLflow", "Notifier", "TensorBoard", "Tracker", "WandB", "make_trackers"]


class Tracker(Protocol):
    """The driver tells it of each cell that is done, once the ledger has the cell."""

    def known(self) -> set[str]:
        """The ids of the cells that it was told of, in earlier runs too."""
        ...

    def log(self, cell: str, config: Mapping[str, Any], row: Mapping[str, Any], telemetry: Path) -> None:
        """Take in a cell.

        cell: its id.
        config: its configuration.
        row: its result, with "metrics", "seconds", "skipped", "underflow" and "diverged".
        telemetry: its .npz file.
        """
        ...


def _parameters(config: Mapping[str, Any]) -> dict[str, str]:
    axes = {name: label(value) for name, value in config.items() if name != "options"}
    return axes | {name: str(value) for name, value in config["options"].items()}


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    found = {**row["metrics"], **{name: row[name] for name in ("seconds", "skipped", "underflow", "diverged")}}
    return {name: float(value) for name, value in found.items() if value is not None}


class TensorBoard:
    """A run for each cell: loss and loss scale over the steps, underflow by role, and the hyperparameters.

    folder: of the runs.
    Raises ImportError without the package.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ImportError(f"TensorBoard is not installed: {pip_install('tensorboard')}.") from None
        self.folder, self._writer = Path(folder), SummaryWriter

    def known(self) -> set[str]:
        return {path.name for path in self.folder.glob("*") if not path.name.startswith(".")}

    def log(self, cell: str, config: Mapping[str, Any], row: Mapping[str, Any], telemetry: Path) -> None:
        unfinished = self.folder / f".{cell}.{os.getpid()}"
        with self._writer(str(unfinished)) as writer:
            with np.load(telemetry) as arrays:
                for name, word in (("losses", "loss"), ("scales", "scale")):
                    for step, value in enumerate(arrays.get(name, ())):
                        writer.add_scalar(word, value, step)
                if "history.steps" in arrays:
                    for role in dict.fromkeys(arrays["sites.role"].tolist()):
                        chosen = arrays["sites.role"] == role
                        lost, nonzero = (arrays[f"history.{n}"][:, chosen].sum(1) for n in ("underflow", "nonzero"))
                        for step, share in zip(arrays["history.steps"], lost / np.maximum(nonzero, 1)):
                            writer.add_scalar(f"underflow/{role}", share, int(step))
            metrics = {f"final/{name}": value for name, value in _numbers(row).items()}
            writer.add_hparams(_parameters(config), metrics, run_name=".")
        unfinished.rename(self.folder / cell)  # whole or not at all


class MLflow:
    """A run for each cell: parameters, final metrics, and the telemetry file as an artifact; the cell's id is a tag.

    It has no curves: a row in MLflow's store for each step takes longer than the training.

    uri: of the tracking store.
    experiment: the name of the experiment, made if need be.
    artifacts: where a new experiment keeps its artifacts; None leaves it to the store.
    Raises ImportError without the package.
    """

    def __init__(self, uri: str, experiment: str = "fpsim", artifacts: str | None = None) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise ImportError(f"MLflow is not installed: {pip_install('mlflow')}.") from None
        logging.getLogger("alembic").setLevel(logging.WARNING)  # it would print a line for each table
        self._client = MlflowClient(uri)
        found = self._client.get_experiment_by_name(experiment)
        self._experiment = (
            found.experiment_id if found else self._client.create_experiment(experiment, artifact_location=artifacts)
        )

    def known(self) -> set[str]:
        found: set[str] = set()
        token = None
        while True:
            page = self._client.search_runs([self._experiment], "attributes.status = 'FINISHED'", page_token=token)
            found |= {run.data.tags.get("cell", "") for run in page}
            token = page.token
            if not token:
                return found

    def log(self, cell: str, config: Mapping[str, Any], row: Mapping[str, Any], telemetry: Path) -> None:
        from mlflow.entities import Metric, Param, RunTag

        run = self._client.create_run(self._experiment, run_name=cell).info.run_id
        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, 0) for name, value in _numbers(row).items()]
        parameters = [Param(name, value) for name, value in _parameters(config).items()]
        tags = [RunTag("cell", cell), RunTag("configuration", json.dumps(config))]
        self._client.log_batch(run, metrics, parameters, tags)
        self._client.log_artifact(run, str(telemetry))
        self._client.set_terminated(run)


class WandB:
    """An offline run of Weights & Biases for each cell: curves, final metrics and parameters; the sweep is their group.

    Nothing is sent: `wandb sync FOLDER/*` uploads what is there.

    folder: of the runs.
    group: the name of the sweep.
    project: the name of the project.
    Raises ImportError without the package.
    """

    def __init__(self, folder: str | os.PathLike[str], group: str, project: str = "fpsim") -> None:
        try:
            import wandb
        except ImportError:
            raise ImportError(f"Weights & Biases is not installed: {pip_install('wandb')}.") from None
        self.folder, self.group, self.project, self._wandb = Path(folder), group, project, wandb

    def known(self) -> set[str]:
        return {path.name.rpartition("-")[2] for path in self.folder.glob("offline-run-*")}

    def log(self, cell: str, config: Mapping[str, Any], row: Mapping[str, Any], telemetry: Path) -> None:
        unfinished = self.folder / f".{cell}.{os.getpid()}"
        unfinished.mkdir(parents=True, exist_ok=True)
        settings = self._wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True)
        run = self._wandb.init(
            project=self.project,
            group=self.group,
            name=cell,
            id=cell,
            mode="offline",
            dir=str(unfinished),
            config=_parameters(config),
            settings=settings,
            reinit="create_new",
        )
        with np.load(telemetry) as arrays:
            curves = {word: arrays[name] for name, word in (("losses", "loss"), ("scales", "scale")) if name in arrays}
            for step in range(max(map(len, curves.values()), default=0)):
                run.log({word: float(values[step]) for word, values in curves.items() if step < len(values)}, step=step)
        run.summary.update({f"final/{name}": value for name, value in _numbers(row).items()})
        run.finish()
        for found in unfinished.glob("wandb/offline-run-*"):
            found.rename(self.folder / found.name)  # whole or not at all
        shutil.rmtree(unfinished)


TRACKERS = ("tensorboard", "mlflow", "wandb")


def make_trackers(wanted: Sequence[str | Tracker], out: Path) -> list[Tracker]:
    """The trackers of a sweep.

    wanted: names, whose trackers write to the sweep's folder, and trackers.
    out: the folder.
    Raises ValueError for an unknown name, ImportError for one whose package is not installed.
    """
    if isinstance(wanted, str | bytes | bytearray) or not isinstance(wanted, Sequence):
        raise ValueError(
            f"track={shown(wanted)} is impossible. Possible: a list of {', '.join(TRACKERS)}, or trackers."
        )
    made: list[Tracker] = []
    for tracker in wanted:
        if tracker == "tensorboard":
            made.append(TensorBoard(out / "tensorboard"))
        elif tracker == "mlflow":
            folder = (out / "mlflow").absolute()
            folder.mkdir(parents=True, exist_ok=True)
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
            made.append(MLflow(uri, out.absolute().name, artifacts))
        elif tracker == "wandb":
            made.append(WandB(out / "wandb", out.absolute().name))
        elif not (hasattr(tracker, "known") and hasattr(tracker, "log")):
            hint = did_you_mean(tracker, TRACKERS)
            known = ", ".join(TRACKERS)
            raise ValueError(f"Unknown tracker {shown(tracker)}.{hint} Known: {known}, or an object of your own.")
        else:
            made.append(tracker)
    return made


class Notifier:
    """Tells trackers of each cell that is done, once. A tracker that fails is dropped: no result is lost for it.

    trackers: who is told.
    out: the folder of the sweep.
    """

    def __init__(self, trackers: Sequence[Tracker], out: Path) -> None:
        self.trackers, self.out = [*trackers], out
        self._known: dict[int, set[str]] = {}  # by tracker: a cell whose file was damaged runs again, and is known

    def catch_up(self, ledger: Ledger) -> None:
        """Tell of the cells that were done before: by another run, or just before a crash."""
        for tracker in [*self.trackers]:
            self._known[id(tracker)] = self._try(tracker, tracker.known) or set()
            for row in ledger.rows("done"):
                self._log(tracker, row["id"], row["config"], row)

    def tell(self, cell: str, config: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        """Tell of a cell that is done; the arguments are those of `Tracker.log`."""
        for tracker in [*self.trackers]:
            self._log(tracker, cell, config, row)

    def _log(self, tracker: Tracker, cell: str, config: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        if tracker not in self.trackers or cell in self._known[id(tracker)]:
            return
        self._known[id(tracker)].add(cell)
        complete = {**dict.fromkeys(("seconds", "skipped", "underflow", "diverged")), **row}
        self._try(tracker, lambda: tracker.log(cell, config, complete, telemetry_path(self.out, cell)))

    def _try(self, tracker: Tracker, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:  # a store may raise anything; the ledger has the cell
            self.trackers.remove(tracker)
            warnings.warn(
                f"{type(tracker).__name__} failed ({type(error).__name__}: {error}) and is told no more. The results "
                f"are in {self.out}. Repair it and run the same again: it is told of what it missed.",
                stacklevel=2,
            )
            return None
