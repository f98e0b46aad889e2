"""Trackers (TensorBoard, MLflow, Weights & Biases), and the `Notifier` that reports each cell of a sweep to them."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ada_loss.files import content_of, remove_from, require_own, require_own_file, write_atomically
from ada_loss.lab.cells.cell_formats import label
from ada_loss.lab.cells.ledger import BESIDE, Ledger
from ada_loss.lab.cells.names import file_name, names_of, read_names, short_name
from ada_loss.lab.cells.telemetry import (
    MOST_BYTES,
    Curves,
    LiveReader,
    arrays_of,
    curves_of,
    live_path,
    read_telemetry,
    telemetry_path,
)
from ada_loss.lab.directions import MINIMIZE, Directions, read_directions
from fpsim.checks import did_you_mean, pip_install, shown

__all__ = [
    "TRACKERS", "About", "MLflow", "Notifier", "TensorBoard", "Tracker", "TrackerOfRuns", "WandB", "make_trackers",
]  # fmt: skip

# The largest number of metrics that MLflow takes in one call.
AT_ONCE = 1000
# The longest tag that Weights & Biases takes, in letters.
LONGEST_TAG = 64
LOWER = "lower is better"


class Tracker(Protocol):
    """A receiver of finished cells. The driver calls it once for each cell, after the ledger has the cell.

    A tracker with the methods of `TrackerOfRuns` also gets the curves of cells while they train.
    """

    def known(self) -> set[str]:
        """Return the ids of the cells that were reported to this tracker, also in earlier runs."""
        ...

    def log(self, cell: str, config: Mapping[str, Any], row: Mapping[str, Any], telemetry: Path) -> None:
        """Log a cell.

        cell: the id of the cell.
        config: the configuration of the cell.
        row: the result of the cell, with "metrics", "seconds", "skipped", "underflow" and "diverged".
        telemetry: the path of the cell's .npz file.
        """
        ...


@dataclass(frozen=True)
class About:
    """A cell in words, for lists of runs.

    format, scaling, seed: the format's name, the scaling method and the seed of the cell.
    rounding: the rounding; "" for rounding to nearest.
    description: the full description of the format.
    sweep: the name of the sweep.
    directions: the directions of metrics.
    """

    format: str
    scaling: str
    seed: int
    rounding: str = ""
    description: str = ""
    sweep: str = "sweep"
    directions: Directions = field(default_factory=Directions)

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        names: Mapping[str, str] = {},
        sweep: str = "sweep",
        directions: Directions | None = None,
    ) -> About:
        """Describe a cell by its configuration. names: the names of formats, by label; short names if not given."""
        words, rounding = label(config["format"]), str(config["rounding"])
        name = names.get(words) or short_name(config["format"])
        shown_rounding = "" if rounding == "nearest_even" else rounding.replace("_", " ")
        scaling, known = label(config["scaling"]), directions or Directions()
        return cls(name, scaling, config["seed"], shown_rounding, words, sweep, known)

    @property
    def group(self) -> str:
        """Return the name that the cells of all seeds share: "e4m3fn torch"."""
        return " ".join(filter(None, (self.format, self.rounding, self.scaling)))

    @property
    def name(self) -> str:
        """Return the name of the cell: "e4m3fn torch seed 0"."""
        return f"{self.group} seed {self.seed}"

    def lower(self, names: Sequence[str]) -> list[str]:
        """Return the metrics and curves whose lower values are better."""
        return [name for name in dict.fromkeys(names) if self.directions.of(name.split("/")[0]) == MINIMIZE]


def _parameters(config: Mapping[str, Any], about: About) -> dict[str, str]:
    axes = {name: label(value) for name, value in config.items() if name != "options"} | {"format": about.format}
    return axes | {"description": about.description} | {name: str(value) for name, value in config["options"].items()}


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    values = {**row["metrics"], **{name: row[name] for name in ("seconds", "skipped", "underflow", "diverged")}}
    return {name: float(value) for name, value in values.items() if value is not None}


class TrackerOfRuns:
    """A tracker that has a run for each cell, and gets the curves of the cell while it trains.

    A run that was begun but not finished is begun again the next time.
    """

    def known(self) -> set[str]:
        """Return the ids of the cells whose runs are finished."""
        raise NotImplementedError

    def begin(self, cell: str, config: Mapping[str, Any], about: About) -> None:
        """Begin the run of a cell that starts to train."""
        raise NotImplementedError

    def add(self, cell: str, curves: Curves) -> None:
        """Add the new points of a cell's curves, {name: (steps, values)}."""
        raise NotImplementedError

    def finish(self, cell: str, row: Mapping[str, Any], telemetry: Path) -> None:
        """Finish the run of a cell that is done, whose curves are complete; the arguments are those of `log`."""
        raise NotImplementedError

    def abandon(self, cell: str) -> None:
        """End the run of a cell that has failed, or was interrupted."""
        raise NotImplementedError

    def log(self, cell: str, config: Mapping[str, Any], row: Mapping[str, Any], telemetry: Path) -> None:
        """Log a finished cell as a whole."""
        curves = curves_of(arrays_of(content_of(telemetry, MOST_BYTES)))
        self.begin(cell, config, About.of(config))
        self.add(cell, curves)
        self.finish(cell, row, telemetry)


class TensorBoard(TrackerOfRuns):
    """A run for each cell: every curve, underflow by role, hyperparameters, and "lower is better" where this applies.

    Args:
        folder: the folder of the runs. A run is a folder with the cell's name. The file "cell" in it has the cell's id,
            once the run is finished.

    Raises:
        ImportError: without the package.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import FileWriter
        except ImportError:
            raise ImportError(f"TensorBoard is not installed: {pip_install('tensorboard')}.") from None
        self.folder, self._writer = Path(folder), FileWriter
        self._open: dict[str, tuple[Path, Any, Mapping[str, Any], About]] = {}

    def known(self) -> set[str]:
        return {_cell_in(path) for path in self.folder.glob("*/cell")}

    def begin(self, cell: str, config: Mapping[str, Any], about: About) -> None:
        # A killed driver may have left a run of this cell. This run is deleted, because its points would mix with new
        # points.
        for begun in self.folder.glob("*/begun"):
            if _cell_in(begun) == cell:
                shutil.rmtree(begun.parent)
        name = file_name(about.name)
        folder = self.folder / (f"{name} {cell[:6]}" if (self.folder / name).exists() else name)
        folder.mkdir(parents=True)
        write_atomically(folder / "begun", cell.encode())
        self._open[cell] = folder, self._writer(str(folder)), config, about

    def add(self, cell: str, curves: Curves) -> None:
        from torch.utils.tensorboard.summary import scalar

        _, writer, _, about = self._open[cell]
        lower = about.lower([*curves])
        for name, (steps, values) in curves.items():
            for step, value in zip(steps, values):
                summary = scalar(name, value)
                if name in lower:
                    summary.value[0].metadata.summary_description = LOWER
                    summary.value[0].metadata.plugin_data.plugin_name = "scalars"
                writer.add_summary(summary, int(step))
        writer.flush()

    def finish(self, cell: str, row: Mapping[str, Any], telemetry: Path) -> None:
        from torch.utils.tensorboard.summary import hparams, scalar

        folder, writer, config, about = self._open.pop(cell)
        metrics = {f"final/{name}": value for name, value in _numbers(row).items()}
        for summary in hparams(_parameters(config, about), metrics):
            writer.add_summary(summary)
        for name, value in metrics.items():
            writer.add_summary(scalar(name, value), 0)
        writer.close()
        (folder / "begun").rename(folder / "cell")

    def abandon(self, cell: str) -> None:
        self._open.pop(cell)[1].close()


class MLflow(TrackerOfRuns):
    """A run for each cell: parameters, every curve, underflow by role, and the telemetry file; the cell's id is a tag.

    Curves of layers are left out, because writing a row to MLflow's store takes long. `Results.telemetry` has them.

    Args:
        uri: the URI of the tracking store.
        experiment: the name of the experiment; it is created if it does not exist.
        artifacts: the location of a new experiment's artifacts; None for the store's default.

    Raises:
        ImportError: without the package.
    """

    def __init__(self, uri: str, experiment: str = "fpsim", artifacts: str | None = None) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise ImportError(f"MLflow is not installed: {pip_install('mlflow')}.") from None
        # alembic, with which MLflow creates its tables, would print a line for each table.
        logging.getLogger("alembic").setLevel(logging.WARNING)
        self._client = MlflowClient(uri)
        known = self._client.get_experiment_by_name(experiment)
        self._experiment = known.experiment_id if known else self._client.create_experiment(experiment, artifacts)
        # For each cell: the run, the cell in words, the last step of each curve, and the curves with an infinity.
        self._open: dict[str, tuple[str, About, dict[str, float], set[str]]] = {}

    def known(self) -> set[str]:
        return {cell for cell, _ in self._runs("attributes.status = 'FINISHED'")}

    def _runs(self, condition: str) -> list[tuple[str, str]]:
        """Return the cells and the ids of the runs that fulfil a condition."""
        runs: list[tuple[str, str]] = []
        token = None
        while True:
            page = self._client.search_runs([self._experiment], condition, page_token=token)
            runs += [(run.data.tags.get("cell", ""), run.info.run_id) for run in page]
            token = page.token
            if not token:
                return runs

    def begin(self, cell: str, config: Mapping[str, Any], about: About) -> None:
        from mlflow.entities import Param

        for _, left in self._runs(f"attributes.status != 'FINISHED' and tags.cell = '{cell}'"):
            self._client.delete_run(left)
        tags = {"cell": cell, "configuration": json.dumps(config), "format": about.format, "scaling": about.scaling}
        tags |= {"group": about.group, "seed": str(about.seed), "sweep": about.sweep}
        run = self._client.create_run(self._experiment, run_name=about.name, tags=tags).info.run_id
        parameters = [Param(name, value) for name, value in _parameters(config, about).items()]
        self._client.log_batch(run, [], parameters)
        self._open[cell] = run, about, {}, set()

    def add(self, cell: str, curves: Curves) -> None:
        from mlflow.entities import Metric

        run, _, last, infinite = self._open[cell]
        now = int(1000 * time.time())
        points = []
        for name, (steps, values) in curves.items():
            points += [Metric(_key(name), float(v), now, int(step)) for step, v in zip(steps, values)]
            last[name] = float(steps.max())
            if any(map(math.isinf, values)):
                infinite.add(name)
        for first in range(0, len(points), AT_ONCE):
            self._client.log_batch(run, points[first : first + AT_ONCE])

    def finish(self, cell: str, row: Mapping[str, Any], telemetry: Path) -> None:
        from mlflow.entities import Metric, RunTag

        run, about, last, infinite = self._open.pop(cell)
        now, numbers = int(1000 * time.time()), _numbers(row)
        end = int(max(last.values(), default=0))
        # Metrics come after the points of a curve with the same name: MLflow shows the last number of a run.
        metrics = [Metric(_key(name), value, now, max(end, int(last.get(name, 0)))) for name, value in numbers.items()]
        lower = about.lower([*numbers, *last])
        tags = [RunTag("mlflow.note.content", f"{LOWER.capitalize()}: {', '.join(lower)}.")] if lower else []
        infinite |= {name for name, value in numbers.items() if math.isinf(value)}
        # MLflow's databases store the largest float64 instead of an infinity. The tag names those curves.
        if infinite:
            tags.append(RunTag("infinite", ", ".join(sorted(infinite))))
        self._client.log_batch(run, metrics, [], tags)
        self._client.log_artifact(run, str(telemetry))
        self._client.set_terminated(run)

    def abandon(self, cell: str) -> None:
        self._client.set_terminated(self._open.pop(cell)[0], "KILLED")


def _key(name: str) -> str:
    """Return a name that MLflow accepts.

    >>> _key("hits@10"), _key("underflow/error")
    ('hits_10', 'underflow/error')
    """
    return re.sub(r"[^\w. :/-]", "_", name).replace("..", "__").strip("/ ")[:250] or "_"


class WandB(TrackerOfRuns):
    """A run of Weights & Biases for each cell: every curve, underflow by role, final metrics and parameters.

    Cells that differ only in the seed are a group, "e4m3fn torch"; the format and the scaling method are tags. By
    default nothing is sent: `wandb sync FOLDER/offline-run-*` uploads the runs.

    Args:
        folder: the folder of the runs.
        group: the name of the sweep, which is the type of the jobs.
        project: the name of the project.
        mode: "offline", or "online", which sends each number at once and needs a login.

    Raises:
        ImportError: without the package.
        ValueError: for another mode.
    """

    def __init__(
        self, folder: str | os.PathLike[str], group: str = "sweep", project: str = "fpsim", mode: str = "offline"
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise ImportError(f"Weights & Biases is not installed: {pip_install('wandb')}.") from None
        if mode not in ("offline", "online"):
            raise ValueError(f"Got mode={shown(mode)}. Use 'offline' or 'online'.")
        self.folder, self.group, self.project, self.mode, self._wandb = Path(folder), group, project, mode, wandb
        # For each cell: the run, the cell in words, and the names of its curves.
        self._open: dict[str, tuple[Any, About, set[str]]] = {}

    def known(self) -> set[str]:
        runs = {path.name.rpartition("-")[2] for path in self.folder.glob("*run-*/")}
        return runs - {path.name[1:] for path in self.folder.glob(".*")}

    def begin(self, cell: str, config: Mapping[str, Any], about: About) -> None:
        # This file exists as long as the run is not finished.
        begun = self.folder / f".{cell}"
        for path in self.folder.glob(f"*run-*-{cell}/") if begun.exists() else ():
            shutil.rmtree(path)
        write_atomically(begun, b"")
        settings = {"silent": True, "console": "off", "disable_git": True, "x_disable_stats": True}
        # wandb appends "wandb" to the folder that it gets.
        home = self.folder.parent if self.folder.name == "wandb" else self.folder
        run = self._wandb.init(
            project=self.project,
            group=about.group,
            job_type=about.sweep if about.sweep != "sweep" else self.group,
            name=about.name,
            id=cell,
            tags=[word[:LONGEST_TAG] for word in filter(None, (about.format, about.scaling, about.rounding))],
            mode=self.mode,  # type: ignore[arg-type]
            dir=str(home),
            config=_parameters(config, about),
            settings=self._wandb.Settings(**settings),
            reinit="create_new",
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        self._open[cell] = run, about, set()

    def add(self, cell: str, curves: Curves) -> None:
        run, _, seen = self._open[cell]
        seen.update(curves)
        # There is a separate column "step", because wandb drops numbers whose step is smaller than the last step.
        rows: dict[tuple[float, int], dict[str, float]] = {}
        for name, (steps, values) in curves.items():
            times: dict[float, int] = {}
            for step, value in zip(steps.tolist(), values.tolist()):
                # A value logged again at the same step gets another row; otherwise only the last value would remain.
                times[step] = times.get(step, -1) + 1
                rows.setdefault((step, times[step]), {})[name] = value
        for (step, _), numbers in sorted(rows.items()):
            run.log({"step": int(step), **numbers})

    def finish(self, cell: str, row: Mapping[str, Any], telemetry: Path) -> None:
        run, about, seen = self._open.pop(cell)
        lower = about.lower([*row["metrics"], *sorted(seen)])
        if lower:
            run.notes = f"{LOWER.capitalize()}: {', '.join(lower)}."
        run.summary.update({f"final/{name}": value for name, value in _numbers(row).items()})
        run.finish()
        (self.folder / f".{cell}").unlink(missing_ok=True)

    def abandon(self, cell: str) -> None:
        self._open.pop(cell)[0].finish(exit_code=1)


def _cell_in(path: Path) -> str:
    """Return the id that a file contains."""
    return content_of(path, 100).decode(errors="replace").strip()


TRACKERS = ("tensorboard", "mlflow", "wandb")


def make_trackers(wanted: Sequence[str | Tracker], out: Path) -> list[Tracker]:
    """Return the trackers of a sweep.

    wanted: tracker objects, and names of trackers, which write to the sweep's folder.
    out: the folder of the sweep.
    Raises ValueError for an unknown name, ImportError for a tracker whose package is not installed.
    """
    if isinstance(wanted, str | bytes | bytearray) or not isinstance(wanted, Sequence):
        raise ValueError(f"track={shown(wanted)} is invalid. Expected: a list of {', '.join(TRACKERS)}, or trackers.")
    made: list[Tracker] = []
    for tracker in wanted:
        if tracker in TRACKERS:
            # If the tracker's folder were a link, the tracker would delete runs in another folder.
            require_own(out / str(tracker))
        if tracker == "tensorboard":
            made.append(TensorBoard(out / "tensorboard"))
        elif tracker == "mlflow":
            folder = (out / "mlflow").absolute()
            folder.mkdir(parents=True, exist_ok=True)
            # If one of these files were a pipe or a folder, MLflow would wait or retry forever.
            for suffix in ("", *BESIDE):
                require_own_file(folder / f"mlflow.db{suffix}")
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
            made.append(MLflow(uri, out.absolute().name, artifacts))
        elif tracker == "wandb":
            made.append(WandB(out / "wandb", out.absolute().name))
        elif not (hasattr(tracker, "known") and hasattr(tracker, "log")):
            known = f"{did_you_mean(tracker, TRACKERS)} Known: {', '.join(TRACKERS)}"
            raise ValueError(f"Unknown tracker {shown(tracker)}.{known}, or an object of your own.")
        else:
            made.append(tracker)
    return made


READ_EVERY = 1.0  # seconds
METHODS = ("begin", "add", "finish", "abandon")


class Notifier:
    """Report each finished cell to trackers once. A tracker that fails is dropped, so that no result is lost.

    A `TrackerOfRuns` gets new points every second if driver and workers share the folder; otherwise it gets complete
    curves at the end.

    trackers: the receivers.
    out: the folder of the sweep.
    """

    def __init__(self, trackers: Sequence[Tracker], out: Path) -> None:
        self.trackers, self.out = [*trackers], out
        # The ids of reported cells by tracker. A cell that runs again, because its file was damaged, is not reported
        # twice.
        self._known: dict[int, set[str]] = {}
        self._training: dict[str, tuple[Mapping[str, Any], LiveReader]] = {}
        self._begun: dict[int, set[str]] = {}
        # Two threads call trackers: the thread that follows the files, and the driver's thread.
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._names: dict[str, str] = {}

    @property
    def is_live(self) -> bool:
        """True if a tracker follows running trainings."""
        return any(map(_is_live, self.trackers))

    def catch_up(self, ledger: Ledger) -> None:
        """Report cells that were finished before: by another run, or just before a crash."""
        rows = ledger.rows() if self.trackers else []
        self._names = names_of((row["config"].get("format") for row in rows), read_names(self.out))
        for tracker in [*self.trackers]:
            self._known[id(tracker)] = self._try(tracker, tracker.known) or set()
            self._begun[id(tracker)] = set()
            for row in rows:
                if row["state"] == "done":
                    self._log(tracker, row["id"], row["config"], row)

    def start(self, cell: str, config: Mapping[str, Any]) -> None:
        """Report that a cell starts to train."""
        if not self.is_live:
            return
        with self._lock:
            # A cell whose worker died keeps its reader, so that no point is reported twice.
            if cell not in self._training:
                self._training[cell] = config, LiveReader(live_path(self.out / "checkpoints" / f"{cell}.pt"))
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, daemon=True)
            self._thread.start()

    def tell(self, cell: str, config: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        """Report a finished cell; the arguments are those of `Tracker.log`."""
        with self._lock:
            for tracker in [*self.trackers]:
                self._log(tracker, cell, config, row)
            self._forget(cell)

    def stop(self, cell: str) -> None:
        """Report that a cell stopped training, perhaps because it failed."""
        with self._lock:
            for tracker in [*self.trackers]:
                if cell in self._begun[id(tracker)]:
                    self._begun[id(tracker)].discard(cell)
                    self._try(tracker, lambda told=tracker: told.abandon(cell))  # type: ignore[misc]
            self._forget(cell)

    def close(self) -> None:
        """End unfinished runs, which are begun again the next time."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        for cell in [*self._training]:
            self.stop(cell)

    def _forget(self, cell: str) -> None:
        training = self._training.pop(cell, None)
        if training is not None:
            path = training[1].path
            with suppress(OSError):
                remove_from(path.parent, path.name.__eq__)

    def _follow(self) -> None:
        while not self._over.wait(READ_EVERY):
            with self._lock:
                for cell, (config, reader) in [*self._training.items()]:
                    self._tell_what_is_new(cell, config, reader)

    def _tell_what_is_new(self, cell: str, config: Mapping[str, Any], reader: LiveReader) -> None:
        curves = reader.read()
        for tracker in [*self.trackers] if curves else ():
            if _is_live(tracker) and cell not in self._known[id(tracker)]:
                self._begin(tracker, cell, config)
                self._try(tracker, lambda told=tracker: told.add(cell, curves))  # type: ignore[misc]

    def _begin(self, tracker: Any, cell: str, config: Mapping[str, Any]) -> None:
        if cell not in self._begun[id(tracker)]:
            self._begun[id(tracker)].add(cell)
            about = About.of(config, self._names, self.out.absolute().name, Directions(read_directions(self.out)))
            self._try(tracker, lambda: tracker.begin(cell, config, about))

    def _log(self, tracker: Any, cell: str, config: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        if tracker not in self.trackers or cell in self._known[id(tracker)]:
            return
        self._known[id(tracker)].add(cell)
        complete = {**dict.fromkeys(("seconds", "skipped", "underflow", "diverged")), **row}
        path = telemetry_path(self.out, cell)
        if not _is_live(tracker):
            self._try(tracker, lambda: tracker.log(cell, config, complete, path))
            return
        was_begun = cell in self._begun[id(tracker)]
        self._begin(tracker, cell, config)
        self._begun[id(tracker)].discard(cell)
        reader = self._training[cell][1] if was_begun and cell in self._training else LiveReader(path)

        def finish() -> None:
            told = dict(reader.told)
            rest = reader.rest(curves_of(read_telemetry(self.out, cell)))
            # `rest` marks the points as reported. The mark is removed, because the next tracker still needs the points.
            reader.told = told
            tracker.add(cell, rest)
            tracker.finish(cell, complete, path)

        self._try(tracker, finish)

    def _try(self, tracker: Any, work: Callable[[], Any]) -> Any:
        if tracker not in self.trackers:
            return None
        try:
            return work()
        # A tracker may raise anything. The ledger has the cell, so nothing is lost.
        except Exception as error:
            self.trackers.remove(tracker)
            warnings.warn(
                f"{type(tracker).__name__} failed ({type(error).__name__}: {error}) and gets no more cells. The "
                f"results are in {self.out}. Repair it and run the same again: it gets the cells that it missed.",
                stacklevel=2,
            )
            return None


def _is_live(tracker: object) -> bool:
    return isinstance(tracker, TrackerOfRuns) or all(hasattr(tracker, name) for name in METHODS)
