"""Search for the smallest formats that keep a metric: bits by role, and modules in float32, by sweeps in a folder."""

from __future__ import annotations

import html
import inspect
import math
import os
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import fpsim
from ada_loss.files import data_frame, folder_at
from ada_loss.lab.cells.cells import OPTIONS, plan
from ada_loss.lab.cells.identity import MakeTask, TrainFunction
from ada_loss.lab.cells.ledger import BESIDE
from ada_loss.lab.directions import hint_for, stated
from ada_loss.lab.results import Results
from ada_loss.lab.results.table import heading, is_share, mean_and_deviation, mean_of
from ada_loss.lab.studies.space import STATES, Point, Space, update_of
from ada_loss.lab.sweep.driver import run_cells
from ada_loss.lab.sweep.engines import open_engine
from ada_loss.lab.sweep.execution import Execution
from ada_loss.lab.tasks import find_task
from fpsim import ROLES, Policy, Update
from fpsim.checks import did_you_mean, is_number, is_whole, pip_install, refuse, require_flag, require_whole, shown

__all__ = ["SETTABLE", "SearchResult", "StoredStudy", "require_optuna", "search"]

# If a format is this many tolerances below float32, one seed is enough to reject it.
HOPELESS = 5.0


@dataclass(frozen=True)
class SearchResult:
    """Result of a search. `str` returns the Pareto front as a Markdown table, and the answer in words.

    formats: the formats of the smallest policy found, by role.
    bits: bits per number, summed over the roles; with `modules`, the mean over the modules, 32 for each role in
        float32.
    accuracy: the mean of the metric over the seeds for that policy, also if the metric is not accuracy.
    baseline: the mean of the metric in float32.
    rows: the settings that were tried, in order: a format for each role, "bits", "accuracy" (the mean of the metric),
        "deviation", "seeds", "complete" (all seeds were trained) and "kept"; with `modules` also "float32", the modules
        that stay in float32.
    results: the results of all cells.
    metric: the name of the metric.
    wide: the candidate modules that stay in float32.
    sign: 1 if a larger metric is better, -1 if a smaller metric is better.
    deviation: the standard deviation of the metric over the seeds, for that policy; NaN for one seed.
    tolerance: the tolerance of the search.
    outcome: the outcome for that policy in the verdict on all settings, at the tolerance: "match", "undecided", "few"
        and so on, as in `results.verdicts(tolerance=)`.
    statement: the outcome in words.
    """

    formats: dict[str, str]
    bits: float
    accuracy: float
    baseline: float
    rows: list[dict[str, Any]] = field(repr=False)
    results: Results
    metric: str = "accuracy"
    wide: tuple[str, ...] = ()
    sign: int = 1
    deviation: float = math.nan
    tolerance: float = 0.0
    outcome: str = "few"
    statement: str = ""

    def __str__(self) -> str:
        columns = [name for name in (*self.formats, "float32") if name in self.rows[0]]
        lines = [f"| bits | {' | '.join(columns)} | {heading(self.metric)} |"]
        lines.append("|---:" + "|---" * len(columns) + "|---:|")
        for row in self.front():
            words = " | ".join(row[name] or "-" for name in columns)
            value = mean_and_deviation(self.metric, row["accuracy"], row["deviation"])
            lines.append(f"| {row['bits']:g} | {words} | {value} |")
        formats = ", ".join(f"{role} {name}" for role, name in self.formats.items())
        formats += f", with {', '.join(self.wide)} in float32" if self.wide else ""
        unit = " %" if is_share(self.metric) else ""
        here = mean_and_deviation(self.metric, self.accuracy, self.deviation) + unit
        there = mean_and_deviation(self.metric, self.baseline) + unit
        said = f"; {self.statement}" if self.statement else ""
        lines.append(
            f"Smallest found: {formats}. {self.bits:g} bits, {self.metric} {here}; float32's is {there}{said}."
        )
        return "\n".join(lines)

    @property
    def policy(self) -> Policy:
        """Return the formats as `fpsim.quantize` takes them."""
        fields: dict[str, Any] = {**self.formats, "overrides": dict.fromkeys(self.wide)}
        fields.pop(STATES, None)
        return Policy(**fields)

    @property
    def update(self) -> Update | None:
        """Return the states' format as `fpsim.quantize_optimizer` takes it; None if states were not searched."""
        states = self.formats.get(STATES)
        return None if states is None else Update(**update_of(states))

    def front(self) -> list[dict[str, Any]]:
        """Return the rows that no other row beats in both bits and metric, the smallest first."""
        complete = [row for row in self.rows if row["complete"] and not math.isnan(row["accuracy"])]
        complete.sort(key=lambda row: (row["bits"], -self.sign * row["accuracy"]))
        front: list[dict[str, Any]] = []
        for row in complete:
            if not front or self.sign * row["accuracy"] > self.sign * front[-1]["accuracy"]:
                front.append(row)
        return front

    def __len__(self) -> int:
        return len(self.rows)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_frame(self) -> Any:
        """Return `rows` as a pandas.DataFrame."""
        return data_frame(self.rows)

    def plot(self) -> Any:
        """Return a figure: metric by bits of all tried settings, with the front and float32; needs matplotlib."""
        from ada_loss.lab.results.figures import plot_front

        factor = 100.0 if is_share(self.metric) else 1.0
        title = heading(self.metric) + (", lower is better" if self.sign < 0 else "")
        return plot_front(self.rows, self.front(), self.baseline, self.bits, title, factor)


def search(
    task: str | MakeTask | None = None,
    *,
    train: str | TrainFunction | None = None,
    roles: Sequence[str] = ROLES,
    exponent_bits: tuple[int, int] = (2, 8),
    mantissa_bits: tuple[int, int] = (0, 10),
    modules: Sequence[str] | fpsim.Sensitivity = (),
    tolerance: float = 0.01,
    scaling: str | float = "none",
    rounding: str | None = None,
    seeds: int | Sequence[int] = 3,
    trials: int = 30,
    metric: str | None = None,
    minimize: Sequence[str] = (),
    maximize: Sequence[str] = (),
    task_options: Mapping[str, Any] | None = None,
    workers: int = 1,
    engine: str | Executor | None = None,
    out: str | os.PathLike[str] = "runs/search",
    seed: int = 0,
    show_progress: bool = True,
    **options: Any,
) -> SearchResult:
    """Find the smallest formats (exponent and mantissa bits for each role) that keep the metric of float32.

    A policy keeps the metric unless the mean over the seeds is worse than float32's mean, over the same seeds, by more
    than `tolerance`. With few seeds this mean is itself uncertain, by about deviation / sqrt(seeds), and among many
    policies some have a good mean by chance. The answer says whether the seeds decide: it contains its statement in the
    verdict on all tried policies, `results.verdicts(tolerance=)`. If they do not decide, choose a larger tolerance, or
    more seeds.
    The size of a policy is the number of bits per number, summed over the roles: all roles have the same weight.

    First, Optuna's TPE sampler proposes `trials` policies. A policy that diverges with the first seed, or is five
    tolerances below float32, is not trained with the other seeds. The second stage starts from the smallest policy that
    keeps the metric, or from the widest policy if none does. It takes away one bit of a role at a time, as long as some
    removal keeps the metric. The answer is a local minimum, and a smaller policy may exist elsewhere. Every trial
    consists of cells of a sweep in `out`. A search that is run again after a crash takes the same steps, and finds the
    finished cells there.

    With `modules` the search also decides which modules stay in float32. If `modules` are names, the search proposes
    any set of them. Later it moves modules back into the formats, one at a time, just as it takes away bits. If
    `modules` is a result of `fpsim.sensitivity`, the search first finds how many of the costliest modules have to stay
    in float32 with the widest formats (0, 1, 2, 4 and so on). It proposes this number or fewer. Later it first moves
    back the module that costs least, and tries another module only if the metric is not kept. In both cases the answer
    is a local minimum: each of its modules in float32 was tried in the formats.

    All tried policies are also stored as a study of Optuna in `out`: `optuna-dashboard sqlite:///runs/search/optuna.db`
    shows it.

    Args:
        task, train, task_options, engine, out, show_progress: as in `sweep`.
        roles: the roles whose formats are searched; the others stay in float32. "states" are the optimizer's states:
            each is stored in the format, scaled by the largest power of two with which nothing saturates. If the format
            has float32's exponents, states are not scaled.
        exponent_bits, mantissa_bits: the least and the largest number of bits.
        modules: the modules that may stay in float32: names, or patterns as in `fpsim.Policy`; or the result of
            `fpsim.sensitivity` on the model. All other modules are in the formats.
        tolerance: how much worse than float32's the mean may be, in the units of the metric.
        scaling: the scaling method of all trials.
        rounding: the rounding of all trials; None as in `sweep`.
        seeds: the number of seeds, or the seeds.
        trials: the number of policies that the sampler proposes.
        metric: the metric to keep; None for the task's first metric.
        minimize, maximize: the metrics whose smaller, or larger, values are better, as in `sweep`.
        workers: the number of processes on this machine, and of policies that are proposed at once.
        seed: the seed of the sampler.
        options: the other arguments of `sweep`: device, limits, resources, engine_timeout, retry_failed,
            keep_old, track.

    Raises:
        ValueError: for invalid arguments, if nothing tells whether a larger metric is better, and if even the widest
            formats do not keep the metric.
        ImportError: without Optuna.
    """
    is_ranking, names = isinstance(modules, fpsim.Sensitivity), _names_in(modules)
    space = Space(roles, exponent_bits, mantissa_bits, names, is_ranking)
    _check(tolerance, trials)
    require_flag("show_progress", show_progress)
    require_whole("seed", seed, 0, 2**32 - 1)
    folder = folder_at(out)
    if metric is not None and not isinstance(metric, str):
        raise TypeError(f"metric={shown(metric)} is not a string. Expected: the name of a metric, or None.")
    said = stated(minimize, maximize)
    optuna = require_optuna()
    _require_verdicts()
    roundings = None if rounding is None else [rounding]
    grid: dict[str, Any] = {"roundings": roundings, "options": task_options, "train": train}
    formats = [space.fields(point) for point in space.widest()]
    # This call is only to reject invalid cells before any work.
    (first, *_) = plan(task, formats, [scaling], seeds=seeds, **grid)
    _require_states(roles, first.config["options"])
    if names:
        if train is not None:
            raise ValueError("Got modules with train=. They are those of a task's model: use a task, or no modules.")
        space.require_modules(_task_of(task)(first.config["seed"]).model)
    told: dict[str, Any] = {"track": options.pop("track", ()), "show_progress": show_progress, "goals": said}
    given = task if train is None else train
    function = None if isinstance(given, str) else given
    _require_options(options)
    execution = Execution(workers=workers, engine=engine, **options)
    with _kept_open(execution) as opened:

        def run(
            formats: Sequence[Any], method: str | float, chosen: Sequence[int], title: str
        ) -> list[list[dict[str, float]]]:
            """Return the metrics of each format with each seed; empty if a training failed or diverged."""
            cells = plan(task, formats, [method], seeds=[*chosen], **grid)
            done = run_cells(cells, folder, opened, function, title=title, **told)
            metrics = {c["id"]: c["metrics"] for c in done.cells if c["state"] == "done" and not c["diverged"]}
            by_cell = [metrics.get(cell.id, {}) for cell in cells]
            return [by_cell[i : i + len(chosen)] for i in range(0, len(by_cell), len(chosen))]

        chosen = range(seeds) if isinstance(seeds, int) else seeds
        trials_done = _Trials(run, space, scaling, chosen, metric, tolerance, lambda: Results(out))
        with closing(StoredStudy(folder, space, trials_done.metric, trials_done.sign)) as trials_done.stored:
            most = len(trials_done.widest().wide) if is_ranking else len(names)
            _sample(optuna, trials_done, most, trials, workers, seed)
            best = trials_done.descend(trials_done.smallest())
    cells = {cell.id for cell in plan(task, [space.fields(best)], [scaling], seeds=[*chosen], **grid)}
    return _answer(trials_done, best, Results(folder), cells)


def _answer(trials_done: _Trials, best: Point, results: Results, cells: Collection[str]) -> SearchResult:
    """Return the result, with the verdict on the best policy. cells: the ids of that policy's cells."""
    space, metric, tolerance = trials_done.space, trials_done.metric, trials_done.tolerance
    rows = [trials_done.row(point) for point in trials_done.tried]
    answer = space.formats(best), space.size(best), trials_done.mean(best), trials_done.baseline, rows, results
    deviation = trials_done.row(best)["deviation"]
    judged = _judged(results, metric, tolerance, cells)
    return SearchResult(*answer, metric, best.wide, trials_done.sign, deviation, tolerance, *judged)


def _require_verdicts() -> None:
    """Raise ImportError if a verdict lacks a package, before the first training and not after the last."""
    import ada_loss.lab.results.verdict  # noqa: F401


def _judged(results: Results, metric: str, tolerance: float, cells: Collection[str]) -> tuple[str, str]:
    """Return outcome and statement of the verdict on the setting with these cells; ("few", "") if there is none."""
    for verdict in results.verdicts(metric, tolerance):
        for one in verdict.combinations:
            if not {*cells} & {*one.cells}:
                continue
            words = verdict.problem.removeprefix("No verdict: ").rstrip(".") or verdict.statement(one)
            if verdict.problem or words.startswith("open: "):
                words = f"not decided at a tolerance of {verdict.amount}: {words.removeprefix('open: ')}"
            return "few" if verdict.problem else one.outcome, words
    return "few", ""


def _names_in(modules: Sequence[str] | fpsim.Sensitivity) -> Sequence[str]:
    # Only whole modules are candidates: an override of a module applies to all modules inside it.
    if isinstance(modules, fpsim.Sensitivity):
        return [row["module"] for row in modules if not row["own"]]
    return modules


def _require_states(roles: Sequence[str], trained: Mapping[str, Any]) -> None:
    """Raise ValueError if states are searched and the optimizer has no states. trained: the training's options."""
    if STATES in roles and trained.get("optimizer") == "sgd" and trained.get("momentum") == 0:
        raise ValueError(
            "Got 'states' among the roles, and SGD without momentum has none. Use task_options={'momentum': 0.9}, or "
            "another optimizer."
        )


# The arguments of `search` that the command line may set, including those that it passes on to the execution.
SETTABLE = [name for name in inspect.signature(search).parameters if name not in ("show_progress", "options")]
SETTABLE += [f.name for f in fields(Execution) if f.name not in SETTABLE]


def _require_options(options: Mapping[str, Any]) -> None:
    known = [f.name for f in fields(Execution) if f.name not in ("workers", "engine")]
    for name in options:
        if name not in known:
            where = f" It is an option of the training: task_options={{{name!r}: ...}}." if name in OPTIONS else ""
            raise TypeError(
                f"search() has no argument {name!r}.{where or did_you_mean(name, known)} "
                f"Expected besides its own: {', '.join(known)}, track."
            )


def _task_of(task: str | MakeTask | None) -> Any:
    return find_task(task) if isinstance(task, str) else task


def _sample(optuna: Any, trials_done: _Trials, most_wide: int, count: int, at_once: int, seed: int) -> None:
    """Run the first stage: Optuna proposes `count` policies, several at once, and each is tried."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # The study is in memory, so that a resumed search proposes the same policies again for a seed. With a stored study
    # the sampler would continue after the stored policies, with other proposals. With constant_liar, the proposals of
    # one round differ.
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True))
    for first in range(0, count, at_once):
        asked = [study.ask() for _ in range(min(at_once, count - first))]
        proposed = [trials_done.space.proposal(trial, most_wide) for trial in asked]
        trials_done.phase = f"trials, {count - first} left at most"
        trials_done.evaluate(proposed)
        for trial, point in zip(asked, proposed):
            # The tolerance is a constraint, not a penalty in the value. The constraint tells the sampler how far a
            # policy is from keeping the metric.
            trial.set_constraint("tolerance", trials_done.violation(point))
            study.tell(trial, trials_done.space.size(point))


def _check(tolerance: Any, trials: Any) -> None:
    if not is_number(tolerance) or not 0 <= tolerance <= 1:
        raise ValueError(f"tolerance={shown(tolerance)} is invalid. Expected: 0 to 1, in the units of the metric.")
    if not is_whole(trials, least=1):
        raise ValueError(f"trials={shown(trials)} is invalid. Expected: 1 or more.")


@contextmanager
def _kept_open(execution: Execution) -> Iterator[Execution]:
    """Yield an execution for many sweeps: a local cluster is started only once, and reached by its address."""
    if execution.chosen_engine == "local":
        with open_engine(execution) as opened:
            yield replace(execution, engine=opened.name)
    else:
        yield execution


class _Trials:
    """The policies that were tried, with their metric by seed.

    run: a function that trains formats with a scaling method and seeds, and returns the metrics of each format with
        each seed.
    results: a function that returns the current results of the folder.
    The other arguments are those of `search`.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Any], str | float, Sequence[int], str], list[list[dict[str, float]]]],
        space: Space,
        scaling: str | float,
        seeds: Sequence[int],
        metric: str | None,
        tolerance: float,
        results: Callable[[], Results],
    ) -> None:
        self.run, self.space, self.scaling, self.seeds, self.tolerance = run, space, scaling, [*seeds], tolerance
        # The current phase in words.
        self.phase = "float32"
        self.tried: dict[Point, list[float]] = {}
        self.stored: StoredStudy | None = None
        (metrics,) = run(["fp32"], "none", self.seeds, self.phase)
        if not metrics[0]:
            raise ValueError(
                "float32 itself gives no metric: its training failed, diverged or was stopped. Repair the task first."
            )
        self.metric = metric or next(iter(metrics[0]))
        if self.metric not in metrics[0]:
            raise ValueError(refuse(f"Unknown metric {metric!r}", metrics[0], word=metric))
        self.metric = results().shown(self.metric)
        # The direction is known only after float32 was trained, because its task may state a goal.
        self.sign = results().directions.sign(self.metric)
        if not self.sign:
            raise ValueError(
                f"Nothing tells whether a larger or a smaller {self.metric} is better. {hint_for(self.metric)}"
            )
        self.baseline = mean_of(self._values(metrics))
        if not math.isfinite(self.baseline):
            raise ValueError(f"float32 itself gives {self.baseline} for {self.metric}. Repair the task first.")

    def mean(self, point: Point) -> float:
        return mean_of(self.tried[point])

    def is_complete(self, point: Point) -> bool:
        return len(self.tried[point]) == len(self.seeds)

    def violation(self, point: Point) -> float:
        """Return by how much the mean is beyond the tolerance; 0 or less if the metric is kept."""
        mean = self.mean(point)
        return self.sign * (self.baseline - mean) - self.tolerance if math.isfinite(mean) else 1e9

    def keeps(self, point: Point) -> bool:
        return self.is_complete(point) and self.violation(point) <= 0

    def row(self, point: Point) -> dict[str, Any]:
        values = self.tried[point]
        deviation = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan
        words = {
            "bits": self.space.size(point),
            "accuracy": self.mean(point),
            "deviation": deviation,
            "seeds": len(values),
        }
        wide = {"float32": ", ".join(point.wide)} if self.space.modules else {}
        settled = {"complete": self.is_complete(point), "kept": self.keeps(point)}
        return {**self.space.formats(point), **wide, **words, **settled}

    def evaluate(self, wanted: Sequence[Point]) -> None:
        """Train new policies with the first seed, and with the other seeds unless the first already rejects them."""
        new = [point for point in dict.fromkeys(wanted) if point not in self.tried]
        self._train(new, self.seeds[:1])
        # A rounding error of the difference must not reject a policy whose metric is exactly at the limit.
        hopeful = [p for p in new if self.violation(p) <= (HOPELESS - 1) * self.tolerance + 1e-12]
        if len(self.seeds) > 1:
            self._train(hopeful, self.seeds)
        for point in new if self.stored is not None else ():
            self.stored.add(point, self.row(point))  # type: ignore[union-attr]

    def smallest(self) -> Point:
        """Return the smallest tried policy that keeps the metric; if no policy keeps it, the widest formats."""
        kept = [point for point in self.tried if self.keeps(point)] or [self.widest()]
        return min(kept, key=lambda point: (self.space.size(point), -self.sign * self.mean(point)))

    def widest(self) -> Point:
        """Return the widest formats with the fewest modules in float32 that keep the metric, or raise ValueError."""
        self.phase = "the widest formats"
        for widest in self.space.widest():
            self.evaluate([widest])
            if self.keeps(widest):
                return widest
        side = "below" if self.sign > 0 else "above"
        raise ValueError(
            f"Even {self.space.fields(widest)} is {side} float32 ({self.mean(widest):.4g} and {self.baseline:.4g}) "
            f"by more than the tolerance of {self.tolerance:g}. Allow more bits, a larger tolerance, or another "
            f"scaling method."
        )

    def _train(self, wanted: Sequence[Point], seeds: Sequence[int]) -> None:
        if wanted:
            kept = [point for point in self.tried if self.keeps(point)]
            best = f", best so far {min(map(self.space.size, kept)):g} bits" if kept else ""
            trained = self.run([self.space.fields(point) for point in wanted], self.scaling, seeds, self.phase + best)
            self.tried |= {point: self._values(metrics) for point, metrics in zip(wanted, trained)}

    def _values(self, metrics: Sequence[Mapping[str, float]]) -> list[float]:
        """Return the metric by seed; NaN if a training failed or diverged."""
        return [of_seed.get(self.metric, math.nan) for of_seed in metrics]

    def descend(self, best: Point) -> Point:
        """Run the second stage: remove one bit, or one module from float32, as long as a removal keeps the metric."""
        while True:
            self.phase = f"taking away, {self.space.most_trials(best)} trials left at most"
            for smaller in self.space.smaller(best):
                self.evaluate(smaller)
                kept = [point for point in smaller if self.keeps(point)]
                if kept:
                    best = max(kept, key=lambda point: self.sign * self.mean(point))
                    break
            else:
                return best


FILE = "optuna.db"


def require_optuna() -> Any:
    """Return the package optuna. Raises ImportError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise ImportError(f"A search needs Optuna, which is not installed: {pip_install('search')}.") from None
    return optuna


class StoredStudy:
    """A study of Optuna in a file: every policy that a search tried, with two values, its bits and its metric.

    A resumed search tries the same policies again, and writes the study again.

    The study keeps a connection to its file until `close`.

    folder: the folder of the search.
    metric, sign: the metric, and 1 if larger is better, -1 if smaller is better.
    """

    def __init__(self, folder: Path, space: Space, metric: str, sign: int) -> None:
        self._optuna, self.space, self.metric = require_optuna(), space, metric
        path = folder / FILE
        # The file and SQLite's files next to it are deleted first. Otherwise SQLite would wait for the other end of a
        # pipe next to the file, or apply a journal of the old file to the new file.
        for suffix in ("", *BESIDE):
            path.with_name(FILE + suffix).unlink(missing_ok=True)
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        self._storage = self._optuna.storages.RDBStorage(f"sqlite:///{path.absolute()}")
        self.study = self._optuna.create_study(
            storage=self._storage,
            study_name=folder.absolute().name,
            directions=["minimize", "maximize" if sign > 0 else "minimize"],
        )
        self.study.set_user_attr("values", ["bits", metric])

    def close(self) -> None:
        """Close the file. Optuna does not close it, and Python 3.13 warns of connections that are never closed."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    def add(self, point: Point, row: Mapping[str, Any]) -> None:
        """Store a policy that was tried; a policy whose metric is NaN is stored as failed.

        row: a mapping with "bits", "accuracy", "deviation", "seeds" and "kept".
        """
        trials, ranges = self._optuna.trial, self._optuna.distributions
        numbers = self.space.numbers(point)
        spans = self.space.spans(point)
        has_failed = math.isnan(row["accuracy"])
        self.study.add_trial(
            trials.create_trial(
                state=trials.TrialState.FAIL if has_failed else trials.TrialState.COMPLETE,
                values=None if has_failed else [row["bits"], row["accuracy"]],
                params=numbers,
                distributions={name: ranges.IntDistribution(*spans[name]) for name in numbers},
                user_attrs={
                    **self.space.formats(point),
                    "float32": ", ".join(point.wide),
                    "seeds": row["seeds"],
                    "kept": row["kept"],
                },
            )
        )
