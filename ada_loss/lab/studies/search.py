"""The smallest format that keeps the accuracy: exponent and mantissa bits by role, searched on a sweep's ledger."""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import fpsim
from ada_loss.lab.results.results import Results
from ada_loss.lab.results.table import SHARES, heading, mean_and_deviation
from ada_loss.lab.sweep.cells import plan
from ada_loss.lab.sweep.driver import sweep
from ada_loss.lab.sweep.engines import open_engine
from ada_loss.lab.sweep.identity import MakeTask
from fpsim import Policy

__all__ = ["ROLES", "SearchResult", "search"]

ROLES = ("weight", "activation", "error", "weight_grad")
HOPELESS = 5.0  # tolerances below float32, at which one seed is enough to reject a format

Bits = tuple[tuple[int, int], ...]  # exponent and mantissa bits of each role


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    formats: of the smallest policy that was found, by role. bits: of one number, added over the roles. accuracy,
    baseline: means over the seeds, of the policy and of float32. rows: what was tried, in that order: formats, bits,
    accuracy, deviation, seeds, kept. results: all cells. metric: what is called accuracy here. In words, with the
    front as a Markdown table, it is `str` of it.
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
        """For `fpsim.quantize`."""
        formats: dict[str, Any] = dict(self.formats)
        return Policy(**formats)

    def front(self) -> list[dict[str, Any]]:
        """The rows that no other beats in both bits and accuracy, the smallest first."""
        complete = [row for row in self.rows if row["complete"] and not math.isnan(row["accuracy"])]
        complete.sort(key=lambda row: (row["bits"], -row["accuracy"]))
        found: list[dict[str, Any]] = []
        for row in complete:
            if not found or row["accuracy"] > found[-1]["accuracy"]:
                found.append(row)
        return found

    def to_frame(self) -> Any:
        """`rows` as a pandas.DataFrame."""
        import pandas

        return pandas.DataFrame(self.rows)


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
    """Find the smallest formats, a number of exponent and mantissa bits for each role, that keep the accuracy.

    A policy keeps it if the mean of the metric over the seeds is at least float32's, over the same seeds, less
    `tolerance`. With few seeds that mean is itself uncertain by some deviation / sqrt(seeds): choose a tolerance above
    it, or more seeds. What is made small is the number of bits of one number, added over the roles: each role counts
    the same.

    Two stages. Optuna's TPE sampler proposes `trials` policies; one that diverges with the first seed, or is five
    tolerances below float32, gets no other seeds. Then, from the smallest that keeps the accuracy (the widest, if none
    does), one bit at a time is taken from a role while some removal keeps it, so that in the end none does: the answer
    is a local minimum, and a smaller one may exist elsewhere. Every trial is cells of a sweep in `out`: run it again
    after a crash, and it goes the same way over what is done.

    roles: which are searched; the others stay in float32. exponent_bits, mantissa_bits: least and most. metric: the
    task's first unless named; larger is better. seed: of the sampler. options: those of `sweep`.
    Raises ValueError for what cannot be searched, and where even the widest formats do not keep the accuracy;
    ImportError without Optuna.
    """
    _check(roles, exponent_bits, mantissa_bits, tolerance, trials)
    try:
        import optuna
    except ImportError:
        raise ImportError("A search needs Optuna, which is not installed: pip install 'fpsim[search]'.") from None
    widest = tuple((exponent_bits[1], mantissa_bits[1]) for _ in roles)
    # for what it refuses, before float32 is trained
    plan(task, [_formats(roles, widest)], [scaling], roundings=[rounding], seeds=seeds, options=task_options)
    with _kept_open(engine, workers, options) as where:

        def run(formats: Sequence[Any], methods: Sequence[Any], chosen: Sequence[int]) -> list[list[dict[str, float]]]:
            """The metrics of each format with each seed; none where a training failed."""
            words: dict[str, Any] = {"roundings": [rounding], "seeds": [*chosen]}
            cells = plan(task, formats, methods, **words, options=task_options)
            shown: dict[str, Any] = {
                "engine": where,
                "workers": workers,
                "show_progress": show_progress,
                "task_options": task_options,
            }
            done = sweep(task, formats, methods, **words, **shown, out=out, **options)
            metrics = {cell["id"]: cell["metrics"] for cell in done.cells if cell["state"] == "done"}
            found = [metrics.get(cell.id, {}) for cell in cells]
            return [found[i : i + len(chosen)] for i in range(0, len(found), len(chosen))]

        trying = _Trying(run, roles, scaling, range(seeds) if isinstance(seeds, int) else seeds, metric, tolerance)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        study = optuna.create_study(sampler=sampler)
        for first in range(0, trials, workers):
            asked = [study.ask() for _ in range(min(workers, trials - first))]
            proposed = [_proposal(trial, roles, exponent_bits, mantissa_bits) for trial in asked]
            trying.evaluate(proposed)
            for trial, bits in zip(asked, proposed):
                trial.set_constraint("accuracy", trying.violation(bits))
                study.tell(trial, trying.size(bits))
        kept = [bits for bits in trying.tried if trying.keeps(bits)]
        best = min(kept, key=lambda bits: (trying.size(bits), -trying.mean(bits)), default=widest)
        if not kept:
            trying.evaluate([widest])
            if not trying.keeps(widest):
                raise ValueError(
                    f"Even {trying.formats(widest)} is below float32 ({trying.mean(widest):.4g} and "
                    f"{trying.baseline:.4g}) by more than the tolerance of {tolerance:g}. Allow more bits, a larger "
                    f"tolerance, or another scaling method."
                )
        best = trying.descend(best, exponent_bits[0], mantissa_bits[0])
    rows = [trying.row(bits) for bits in trying.tried]
    answer = trying.formats(best), trying.size(best), trying.mean(best), trying.baseline
    return SearchResult(*answer, rows, Results(out), trying.metric)


def _check(roles: Any, exponent_bits: Any, mantissa_bits: Any, tolerance: Any, trials: Any) -> None:
    fits = isinstance(roles, Sequence) and not isinstance(roles, str) and all(role in ROLES for role in roles)
    if not fits or not roles or len(set(roles)) < len(roles):
        raise ValueError(f"roles={roles!r} is impossible. Possible: some of {', '.join(ROLES)}, each once.")
    for name, span, least, most in (("exponent_bits", exponent_bits, 1, 8), ("mantissa_bits", mantissa_bits, 0, 23)):
        fits = (
            isinstance(span, Sequence)
            and len(span) == 2
            and all(isinstance(b, int) and not isinstance(b, bool) for b in span)
        )
        if not fits or not least <= span[0] <= span[1] <= most:
            raise ValueError(f"{name}={span!r} is impossible. Possible: least and most, within {least} and {most}.")
    for e, m in itertools.product(exponent_bits, mantissa_bits):
        fpsim.as_format(f"e{e}m{m}")  # says what a float32 container cannot hold
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance <= 1:
        raise ValueError(f"tolerance={tolerance!r} is impossible. Possible: 0 to 1, in the units of the metric.")
    if isinstance(trials, bool) or not isinstance(trials, int) or trials < 1:
        raise ValueError(f"trials={trials!r} is impossible. Possible: 1 or more.")


@contextmanager
def _kept_open(engine: Any, workers: int, options: Mapping[str, Any]) -> Any:
    """The engine for many sweeps: a local cluster is started once."""
    if engine in (None, "local") and (workers > 1 or engine == "local"):
        known = {name: options[name] for name in ("resources", "memory_limit") if name in options}
        with open_engine("local", workers, **known) as opened:
            yield opened.name
    else:
        yield engine


def _proposal(trial: Any, roles: Sequence[str], exponents: tuple[int, int], mantissas: tuple[int, int]) -> Bits:
    return tuple(
        (trial.suggest_int(f"{role} exponent", *exponents), trial.suggest_int(f"{role} mantissa", *mantissas))
        for role in roles
    )


def _formats(roles: Sequence[str], bits: Bits) -> dict[str, str]:
    return {role: f"e{e}m{m}" for role, (e, m) in zip(roles, bits)}


class _Trying:
    """What is known of each policy that was tried."""

    def __init__(
        self,
        run: Callable[[Sequence[Any], Sequence[Any], Sequence[int]], list[list[dict[str, float]]]],
        roles: Sequence[str],
        scaling: str | float,
        seeds: Sequence[int],
        metric: str | None,
        tolerance: float,
    ) -> None:
        self.run, self.roles, self.scaling, self.seeds, self.tolerance = run, roles, scaling, [*seeds], tolerance
        (found,) = run(["fp32"], ["none"], self.seeds)
        self.metric = metric or next(iter(found[0]), "accuracy")
        if found[0] and self.metric not in found[0]:
            raise ValueError(f"Unknown metric {metric!r}. Known: {', '.join(found[0])}.")
        self.tried: dict[Bits, list[float]] = {}
        self.baseline = statistics.fmean(self._values(found))
        if not math.isfinite(self.baseline):
            raise ValueError(f"float32 itself gives {self.baseline} for {self.metric}. See to the task first.")

    def formats(self, bits: Bits) -> dict[str, str]:
        return _formats(self.roles, bits)

    def size(self, bits: Bits) -> int:
        return sum(1 + e + m for e, m in bits)

    def mean(self, bits: Bits) -> float:
        return statistics.fmean(self.tried[bits])

    def is_complete(self, bits: Bits) -> bool:
        return len(self.tried[bits]) == len(self.seeds)

    def violation(self, bits: Bits) -> float:
        """How far below what is to be kept; 0 or less where it is kept."""
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
        """Train what is not known, with the first seed, and with the others unless that one says enough."""
        new = [bits for bits in dict.fromkeys(wanted) if bits not in self.tried]
        self._train(new, self.seeds[:1])
        hopeful = [b for b in new if self.violation(b) <= (HOPELESS - 1) * self.tolerance + 1e-12]
        if len(self.seeds) > 1:
            self._train(hopeful, self.seeds)

    def _train(self, wanted: Sequence[Bits], seeds: Sequence[int]) -> None:
        if wanted:
            found = self.run([self.formats(bits) for bits in wanted], [self.scaling], seeds)
            self.tried |= {bits: self._values(metrics) for bits, metrics in zip(wanted, found)}

    def _values(self, metrics: Sequence[Mapping[str, float]]) -> list[float]:
        """The metric by seed; NaN where a training failed or diverged."""
        return [found.get(self.metric, math.nan) for found in metrics]

    def descend(self, best: Bits, least_exponent: int, least_mantissa: int) -> Bits:
        """Take one bit at a time away while some removal keeps the accuracy."""
        while True:
            smaller = []
            for i, (e, m) in enumerate(best):
                for e2, m2 in ((e, m - 1), (e - 1, m)):
                    if e2 >= least_exponent and m2 >= least_mantissa and (e2, m2) != (1, 0):
                        smaller.append((*best[:i], (e2, m2), *best[i + 1 :]))
            self.evaluate(smaller)
            kept = [bits for bits in smaller if self.keeps(bits)]
            if not kept:
                return best
            best = max(kept, key=self.mean)
