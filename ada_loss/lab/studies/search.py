"""The search for the smallest formats that keep a metric: exponent and mantissa bits by role, by sweeps in a folder."""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import fpsim
from ada_loss.files import data_frame
from ada_loss.lab.results import Results
from ada_loss.lab.results.table import SHARES, heading, mean_and_deviation
from ada_loss.lab.sweep.cells import OPTIONS, plan
from ada_loss.lab.sweep.driver import run_cells
from ada_loss.lab.sweep.engines import open_engine
from ada_loss.lab.sweep.execution import Execution
from ada_loss.lab.sweep.identity import MakeTask
from fpsim import ROLES, Policy
from fpsim.checks import did_you_mean, is_number, is_whole, pip_install

__all__ = ["SearchResult", "search"]

HOPELESS = 5.0  # tolerances below float32 at which one seed is enough to reject a format

Bits = tuple[tuple[int, int], ...]  # exponent and mantissa bits of each role


@dataclass(frozen=True)
class SearchResult:
    """What a search found. Its `str` is the front as a Markdown table, and the answer in words.

    formats: those of the smallest policy found, by role.
    bits: of one number, added over the roles.
    accuracy: the mean of the metric over the seeds, of that policy; the name stands for any metric.
    baseline: that of float32.
    rows: what was tried, in order: a format for each role, "bits", "accuracy" (the mean of the metric), "deviation",
        "seeds", "complete" (all seeds were trained) and "kept".
    results: all cells.
    metric: the name of the metric.
    """

    formats: dict[str, str]
    bits: int
    accuracy: float
    baseline: float
    rows: list[dict[str, Any]] = field(repr=False)
    results: Results
    metric: str = "accuracy"

    def __str__(self) -> str:
        lines = [f"| bits | {' | '.join(self.formats)} | {heading(self.metric)} |"]
        lines.append("|---:" + "|---" * len(self.formats) + "|---:|")
        for row in self.front():
            formats = " | ".join(row[role] for role in self.formats)
            value = mean_and_deviation(self.metric, row["accuracy"], row["deviation"])
            lines.append(f"| {row['bits']} | {formats} | {value} |")
        formats = ", ".join(f"{role} {name}" for role, name in self.formats.items())
        unit = " %" if self.metric in SHARES else ""
        here, there = (mean_and_deviation(self.metric, value) + unit for value in (self.accuracy, self.baseline))
        lines.append(f"Smallest found: {formats}. {self.bits} bits, {self.metric} {here}; float32's is {there}.")
        return "\n".join(lines)

    @property
    def policy(self) -> Policy:
        """The formats as `fpsim.quantize` takes them."""
        formats: dict[str, Any] = dict(self.formats)
        return Policy(**formats)

    def front(self) -> list[dict[str, Any]]:
        """The rows that no other beats in both bits and metric, the smallest first."""
        complete = [row for row in self.rows if row["complete"] and not math.isnan(row["accuracy"])]
        complete.sort(key=lambda row: (row["bits"], -row["accuracy"]))
        found: list[dict[str, Any]] = []
        for row in complete:
            if not found or row["accuracy"] > found[-1]["accuracy"]:
                found.append(row)
        return found

    def to_frame(self) -> Any:
        """`rows` as a pandas.DataFrame."""
        return data_frame(self.rows)


def search(
    task: str | MakeTask,
    *,
    roles: Sequence[str] = ROLES,
    exponent_bits: tuple[int, int] = (2, 8),
    mantissa_bits: tuple[int, int] = (0, 10),
    tolerance: float = 0.01,
    scaling: str | float = "none",
    rounding: str = "nearest_even",
    seeds: int | Sequence[int] = 3,
    trials: int = 30,
    metric: str | None = None,
    task_options: Mapping[str, Any] | None = None,
    workers: int = 1,
    engine: str | Executor | None = None,
    out: str | os.PathLike[str] = "runs/search",
    seed: int = 0,
    show_progress: bool = True,
    **options: Any,
) -> SearchResult:
    """Find the smallest formats, a number of exponent and mantissa bits for each role, that keep the metric of float32.

    A policy keeps it if the mean of the metric over the seeds is at least float32's, over the same seeds, less
    `tolerance`. With few seeds that mean is itself uncertain by some deviation / sqrt(seeds): choose a tolerance above
    it, or more seeds. The size of a policy is the number of bits of one number, added over the roles: each role counts
    the same.

    First, Optuna's TPE sampler proposes `trials` policies; one that diverges with the first seed, or is five tolerances
    below float32, gets no other seeds. Then, from the smallest that keeps the metric (the widest, if none does), one
    bit at a time is taken from a role while some removal keeps it: the answer is a local minimum, and a smaller one may
    exist elsewhere. Every trial is cells of a sweep in `out`: run again after a crash, it goes the same way over them.

    task, task_options, engine, out, show_progress: as in `sweep`.
    roles: those that are searched; the others stay in float32.
    exponent_bits, mantissa_bits: the least and the largest number.
    tolerance: how far the mean may be below float32's, in the units of the metric.
    scaling, rounding: the scaling method and the rounding of all trials.
    seeds: how many, or which.
    trials: how many policies the sampler proposes.
    metric: the task's first unless named; larger is better.
    workers: processes of this machine, and how many policies are proposed at once.
    seed: of the sampler.
    options: the other arguments of `sweep`: device, limits, resources, engine_timeout, retry_failed, track.
    Raises ValueError for an impossible search, and where even the widest formats do not keep the metric; ImportError
    without Optuna.
    """
    _check(roles, exponent_bits, mantissa_bits, tolerance, trials)
    optuna = _optuna()
    grid: dict[str, Any] = {"roundings": [rounding], "options": task_options}
    widest = tuple((exponent_bits[1], mantissa_bits[1]) for _ in roles)
    plan(task, [_formats(roles, widest)], [scaling], seeds=seeds, **grid)  # invalid cells are rejected before any work
    track = options.pop("track", ())
    _require_options(options)
    execution = Execution(workers=workers, engine=engine, **options)
    with _kept_open(execution) as opened:

        def run(
            formats: Sequence[Any], method: str | float, chosen: Sequence[int], title: str
        ) -> list[list[dict[str, float]]]:
            """The metrics of each format with each seed; empty where a training failed."""
            cells = plan(task, formats, [method], seeds=[*chosen], **grid)
            function = None if isinstance(task, str) else task
            done = run_cells(cells, Path(out), opened, function, track=track, show_progress=show_progress, title=title)
            metrics = {cell["id"]: cell["metrics"] for cell in done.cells if cell["state"] == "done"}
            found = [metrics.get(cell.id, {}) for cell in cells]
            return [found[i : i + len(chosen)] for i in range(0, len(found), len(chosen))]

        trials_done = _Trials(run, roles, scaling, range(seeds) if isinstance(seeds, int) else seeds, metric, tolerance)
        _sample(optuna, trials_done, roles, exponent_bits, mantissa_bits, trials, workers, seed)
        best = trials_done.descend(trials_done.smallest(widest), exponent_bits[0], mantissa_bits[0])
    rows = [trials_done.row(bits) for bits in trials_done.tried]
    answer = trials_done.formats(best), trials_done.size(best), trials_done.mean(best), trials_done.baseline
    return SearchResult(*answer, rows, Results(out), trials_done.metric)


def _require_options(options: Mapping[str, Any]) -> None:
    known = [f.name for f in fields(Execution) if f.name not in ("workers", "engine")]
    for name in options:
        if name not in known:
            where = f" It is an option of the training: task_options={{{name!r}: ...}}." if name in OPTIONS else ""
            raise TypeError(
                f"search() has no argument {name!r}.{where or did_you_mean(name, known)} "
                f"Possible beside its own: {', '.join(known)}, track."
            )


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ImportError(f"A search needs Optuna, which is not installed: {pip_install('search')}.") from None
    return optuna


def _sample(
    optuna: Any,
    trials_done: _Trials,
    roles: Sequence[str],
    exponent_bits: tuple[int, int],
    mantissa_bits: tuple[int, int],
    count: int,
    at_once: int,
    seed: int,
) -> None:
    """The first stage: Optuna proposes `count` policies, some at once, and each is tried."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True))
    for first in range(0, count, at_once):
        asked = [study.ask() for _ in range(min(at_once, count - first))]
        proposed = [_proposal(trial, roles, exponent_bits, mantissa_bits) for trial in asked]
        trials_done.phase = f"trials, {count - first} left at most"
        trials_done.evaluate(proposed)
        for trial, bits in zip(asked, proposed):
            trial.set_constraint("tolerance", trials_done.violation(bits))
            study.tell(trial, trials_done.size(bits))


def _check(roles: Any, exponent_bits: Any, mantissa_bits: Any, tolerance: Any, trials: Any) -> None:
    fits = isinstance(roles, Sequence) and not isinstance(roles, str) and all(role in ROLES for role in roles)
    if not fits or not roles or len(set(roles)) < len(roles):
        raise ValueError(f"roles={roles!r} is impossible. Possible: some of {', '.join(ROLES)}, each once.")
    for name, span, least, most in (("exponent_bits", exponent_bits, 1, 8), ("mantissa_bits", mantissa_bits, 0, 23)):
        fits = isinstance(span, Sequence) and len(span) == 2 and all(map(is_whole, span))
        if not fits or not least <= span[0] <= span[1] <= most:
            raise ValueError(f"{name}={span!r} is impossible. Possible: least and most, within {least} and {most}.")
    for e, m in itertools.product(exponent_bits, mantissa_bits):
        fpsim.as_format(f"e{e}m{m}")  # raises for what a float32 cannot hold
    if not is_number(tolerance) or not 0 <= tolerance <= 1:
        raise ValueError(f"tolerance={tolerance!r} is impossible. Possible: 0 to 1, in the units of the metric.")
    if not is_whole(trials, least=1):
        raise ValueError(f"trials={trials!r} is impossible. Possible: 1 or more.")


@contextmanager
def _kept_open(execution: Execution) -> Iterator[Execution]:
    """The same execution for many sweeps: a local cluster is started once, and used by its address."""
    if execution.chosen_engine == "local":
        with open_engine(execution) as opened:
            yield replace(execution, engine=opened.name)
    else:
        yield execution


def _proposal(trial: Any, roles: Sequence[str], exponents: tuple[int, int], mantissas: tuple[int, int]) -> Bits:
    return tuple(
        (trial.suggest_int(f"{role} exponent", *exponents), trial.suggest_int(f"{role} mantissa", *mantissas))
        for role in roles
    )


def _formats(roles: Sequence[str], bits: Bits) -> dict[str, str]:
    return {role: f"e{e}m{m}" for role, (e, m) in zip(roles, bits)}


class _Trials:
    """The policies that were tried, with their metric by seed.

    run: trains formats with a scaling method and seeds; gives the metrics of each format with each seed.
    The others are those of `search`.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Any], str | float, Sequence[int], str], list[list[dict[str, float]]]],
        roles: Sequence[str],
        scaling: str | float,
        seeds: Sequence[int],
        metric: str | None,
        tolerance: float,
    ) -> None:
        self.run, self.roles, self.scaling, self.seeds, self.tolerance = run, roles, scaling, [*seeds], tolerance
        self.phase = "float32"  # what is going on, in words
        self.tried: dict[Bits, list[float]] = {}
        (found,) = run(["fp32"], "none", self.seeds, self.phase)
        if not found[0]:
            raise ValueError("float32 itself gives no metric: its training failed or was stopped. Mend the task first.")
        self.metric = metric or next(iter(found[0]))
        if self.metric not in found[0]:
            hint = did_you_mean(metric, found[0])
            raise ValueError(f"Unknown metric {metric!r}.{hint} Known: {', '.join(found[0])}.")
        self.baseline = statistics.fmean(self._values(found))
        if not math.isfinite(self.baseline):
            raise ValueError(f"float32 itself gives {self.baseline} for {self.metric}. Mend the task first.")

    def formats(self, bits: Bits) -> dict[str, str]:
        return _formats(self.roles, bits)

    def size(self, bits: Bits) -> int:
        return sum(1 + e + m for e, m in bits)

    def mean(self, bits: Bits) -> float:
        return statistics.fmean(self.tried[bits])

    def is_complete(self, bits: Bits) -> bool:
        return len(self.tried[bits]) == len(self.seeds)

    def violation(self, bits: Bits) -> float:
        """How far the mean is below what is to be kept; 0 or less where it is kept."""
        mean = self.mean(bits)
        return self.baseline - self.tolerance - mean if math.isfinite(mean) else 1e9

    def keeps(self, bits: Bits) -> bool:
        return self.is_complete(bits) and self.violation(bits) <= 0

    def row(self, bits: Bits) -> dict[str, Any]:
        values = self.tried[bits]
        deviation = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan
        words = {"bits": self.size(bits), "accuracy": self.mean(bits), "deviation": deviation, "seeds": len(values)}
        return {**self.formats(bits), **words, "complete": self.is_complete(bits), "kept": self.keeps(bits)}

    def evaluate(self, wanted: Sequence[Bits]) -> None:
        """Train the new policies with the first seed, and with the others unless the first already rejects them."""
        new = [bits for bits in dict.fromkeys(wanted) if bits not in self.tried]
        self._train(new, self.seeds[:1])
        hopeful = [b for b in new if self.violation(b) <= (HOPELESS - 1) * self.tolerance + 1e-12]
        if len(self.seeds) > 1:
            self._train(hopeful, self.seeds)

    def smallest(self, widest: Bits) -> Bits:
        """The smallest policy that keeps the metric, or the widest. Raises ValueError where that does not keep it."""
        kept = [bits for bits in self.tried if self.keeps(bits)]
        if kept:
            return min(kept, key=lambda bits: (self.size(bits), -self.mean(bits)))
        self.evaluate([widest])
        if not self.keeps(widest):
            raise ValueError(
                f"Even {self.formats(widest)} is below float32 ({self.mean(widest):.4g} and {self.baseline:.4g}) by "
                f"more than the tolerance of {self.tolerance:g}. Allow more bits, a larger tolerance, or another "
                f"scaling method."
            )
        return widest

    def _train(self, wanted: Sequence[Bits], seeds: Sequence[int]) -> None:
        if wanted:
            kept = [bits for bits in self.tried if self.keeps(bits)]
            best = f", best so far {min(map(self.size, kept))} bits" if kept else ""
            found = self.run([self.formats(bits) for bits in wanted], self.scaling, seeds, self.phase + best)
            self.tried |= {bits: self._values(metrics) for bits, metrics in zip(wanted, found)}

    def _values(self, metrics: Sequence[Mapping[str, float]]) -> list[float]:
        """The metric by seed; NaN where a training failed or diverged."""
        return [found.get(self.metric, math.nan) for found in metrics]

    def descend(self, best: Bits, least_exponent: int, least_mantissa: int) -> Bits:
        """The second stage: take one bit at a time away while some removal keeps the metric."""
        while True:
            smaller = []
            for i, (e, m) in enumerate(best):
                for e2, m2 in ((e, m - 1), (e - 1, m)):
                    if e2 >= least_exponent and m2 >= least_mantissa and (e2, m2) != (1, 0):
                        smaller.append((*best[:i], (e2, m2), *best[i + 1 :]))
            left = sum(e - least_exponent + m - least_mantissa for e, m in best) * 2 * len(best)
            self.phase = f"taking bits away, {left} trials left at most"
            self.evaluate(smaller)
            kept = [bits for bits in smaller if self.keeps(bits)]
            if not kept:
                return best
            best = max(kept, key=self.mean)
