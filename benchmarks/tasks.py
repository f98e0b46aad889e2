"""What each task can decide: trainings in float32 and in two other settings, and the tables that follow from them.

    python benchmarks/tasks.py run digits --seeds 30    # adds to docs/tasks.csv what is not in it yet
    python benchmarks/tasks.py tables                   # docs/tasks.md, and what `ada-loss tasks` shows

Seeds begin at 300, which nobody has looked at while a task was made. Runs of several tasks at once may share the file.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ada_loss.files import write_atomically
from ada_loss.lab.directions import by_name
from ada_loss.lab.results.deciding import FILE, PAIRED, Spread, spreads
from ada_loss.lab.results.judgement import LEAST_SEEDS, judge_sweep, smallest_tolerance
from ada_loss.lab.results.table import is_share
from ada_loss.lab.tasks import find_task
from ada_loss.lab.training import train
from ada_loss.lab.training.run import Stopped
from fpsim import Policy, Products

DOCS = Path(__file__).parents[1] / "docs"
DATA, PAGE = DOCS / "tasks.csv", DOCS / "tasks.md"
FIELDS = ("task", "setting", "seed", "metric", "value")
FIRST = 300
COUNTS = (3, 5, 10)  # of seeds, in the table
FLOAT32 = "float32"
# These lie far below float32, and learn.
COARSE = ("x and w in int3", "e2m1fn per tensor", "x in int2", "dy in e4m3fn, unscaled")
TABLES = ("spread", "heads")  # what stands between <!-- spread --> and <!-- end of spread -->


def gradients(fmt: str) -> Policy:
    """A format of the gradients; all else is float32."""
    return Policy(error=fmt, weight_grad=fmt)


def operands(x: str, w: str | None) -> Policy:
    """Formats of x and w in the three products of a layer; all else is float32."""
    return Policy(products=Products(fprop=(x, w), dgrad=(None, w), wgrad=(None, x)))


SETTINGS: dict[str, tuple[Any, Any]] = {
    FLOAT32: (None, "none"),
    PAIRED: (gradients("e5m2"), "adaptive"),
    "x and w in int3": (operands("int3 per tensor fp32", "int3 per tensor fp32"), "none"),
    "e2m1fn per tensor": ("e2m1fn per tensor fp32", "none"),
    "x in int2": (operands("int2 per tensor fp32", None), "none"),
    "dy in e4m3fn, unscaled": (gradients("e4m3fn"), "none"),
    **{
        f"gradients in {fmt}, {words}": (gradients(fmt), scaling)
        for fmt in ("fp16", "e5m2")
        for words, scaling in (("none", "none"), ("2^10", 1024.0), ("adaptive", "adaptive"))
    },
}
LEAST_APART = 3.0  # standard deviations
HEADS = [name for name in SETTINGS if name.startswith("gradients")]  # of `detection` and `segmentation`
MORE = {"detection": HEADS, "segmentation": HEADS}


def rows() -> list[dict[str, str]]:
    """What was measured so far."""
    if not DATA.exists():
        return []
    with open(DATA, newline="") as file:
        return [*csv.DictReader(file, FIELDS)]


def run(task: str, seeds: int, settings: Sequence[str]) -> None:
    """Train a task in these settings, with seeds that are not measured yet; each training is written at once."""
    torch.set_num_threads(1)
    for seed in range(FIRST, FIRST + seeds):
        for setting in settings:
            if any((row["task"], row["setting"], row["seed"]) == (task, setting, str(seed)) for row in rows()):
                continue
            fmt, scaling = SETTINGS[setting]
            make_task = find_task(task)
            made, options = make_task(seed), getattr(make_task, "options", {})
            try:
                metrics = train(made, fmt, scaling=scaling, seed=seed, record_every=0, **options).metrics
            except Stopped:
                metrics = dict.fromkeys(made.metrics, math.nan)
            lines = [f'{task},"{setting}",{seed},{metric},{value:.6g}\n' for metric, value in metrics.items()]
            with open(DATA, "a") as file:  # one write: other processes add to the file, too
                file.write("".join(lines))
            print("".join(lines), end="", flush=True)


def measured() -> dict[str, dict[str, dict[int, float]]]:
    """{task: {setting: {seed: value}}} of the metric that is judged, the first of a task."""
    by_task: dict[str, dict[str, dict[int, float]]] = {}
    first: dict[str, str] = {}
    for row in rows():
        first.setdefault(row["task"], row["metric"])
        if row["metric"] == first[row["task"]]:
            values = by_task.setdefault(row["task"], {}).setdefault(row["setting"], {})
            values[int(row["seed"])] = float(row["value"])
    return by_task


def spread_of(task: str, settings: Mapping[str, Mapping[int, float]]) -> Spread:
    """The spread of a task."""
    values, paired = settings[FLOAT32], settings.get(PAIRED, {})
    metric = next(row["metric"] for row in rows() if row["task"] == task)
    differences = [value - values[seed] for seed, value in paired.items() if seed in values]
    return Spread(
        metric,
        len(values),
        statistics.fmean(values.values()),
        statistics.stdev(values.values()) if len(values) > 1 else math.nan,
        len(differences),
        statistics.stdev(differences) if len(differences) > 1 else math.nan,
    )


def separation(near: Iterable[float], far: Iterable[float]) -> float:
    """How many standard deviations two settings are apart; NaN where one was not measured twice."""
    near, far = sorted(near), sorted(far)
    if min(len(near), len(far)) < 2:
        return math.nan
    deviation = math.sqrt((statistics.variance(near) + statistics.variance(far)) / 2)
    return abs(statistics.fmean(near) - statistics.fmean(far)) / deviation if deviation else math.inf


def coarse_of(settings: Mapping[str, Mapping[int, float]]) -> tuple[str, list[float], float]:
    """The first coarse setting far from PAIRED, or else the last that was measured: name, values, how far apart."""
    name, far, apart = "-", [], math.nan
    for name in [name for name in COARSE if name in settings]:
        far = [*settings[name].values()]
        if (apart := separation(settings.get(PAIRED, {}).values(), far)) > LEAST_APART:
            break
    return name, far, apart


def shown(metric: str, value: float) -> str:
    """A number of a metric for a table."""
    if math.isnan(value):
        return "-"
    return f"{100 * value:.2f}" if is_share(metric) else f"{value:.4f}"


def _tolerance(one: Spread, count: int) -> float:
    """The smallest tolerance that so many seeds decide; NaN where too few differences were measured."""
    return smallest_tolerance(one.paired, count) if one.paired_seeds >= LEAST_SEEDS else math.nan


def spread_table() -> Iterator[str]:
    """The table of all tasks."""
    by_task = measured()
    tolerances = " | ".join(f"{count} seeds" for count in COUNTS)
    coarse_columns = "coarse setting | its value | its seeds | apart by"
    yield f"| task | metric | float32 | its seeds | paired difference | its seeds | {tolerances} | {coarse_columns} |"
    yield "| --- | --- |" + " ---: |" * (len(COUNTS) + 4) + " --- |" + " ---: |" * 3
    for task, settings in by_task.items():
        one = spread_of(task, settings)
        coarse, far, apart = coarse_of(settings)
        cells = [
            task,
            one.metric,
            f"{shown(one.metric, one.mean)} ± {shown(one.metric, one.deviation)}",
            one.seeds,
            shown(one.metric, one.paired),
            one.paired_seeds,
            *(shown(one.metric, _tolerance(one, count)) for count in COUNTS),
            coarse,
            shown(one.metric, statistics.fmean(far)) if far else "-",
            len(far),
            f"{apart:.1f}" if not math.isnan(apart) else "-",
        ]
        yield "| " + " | ".join(map(str, cells)) + " |"


def heads_table() -> Iterator[str]:
    """The verdict on scaling for tasks with heads: one test for each setting, as a sweep's verdict has it."""
    yield "| task | setting | value | difference | statement |"
    yield "| --- | --- | ---: | ---: | --- |"
    for task, settings in measured().items():
        if task not in MORE or FLOAT32 not in settings:
            continue
        compared = {seed for name in MORE[task] for seed in settings.get(name, {})}
        base = {seed: value for seed, value in settings[FLOAT32].items() if seed in compared}
        metric = spread_of(task, settings).metric
        sign = 1 if by_name(metric) == "maximize" else -1
        yield f"| {task} | float32 | {shown(metric, statistics.fmean(base.values()))} | | {len(base)} seeds |"
        tolerance = 0.01 * abs(statistics.fmean(base.values()))
        differences = {
            name: [sign * (value - base[seed]) for seed, value in settings[name].items() if seed in base]
            for name in MORE[task]
            if name in settings
        }
        tested = {
            name: values
            for name, values in differences.items()
            if len(values) >= LEAST_SEEDS and all(map(math.isfinite, values))
        }
        judged = dict(zip(tested, judge_sweep([*tested.values()], [*base.values()], tolerance), strict=True))
        for name, values in differences.items():
            one = judged.get(name)
            count = f"{len(values)} seed{'s' * (len(values) != 1)}"
            if one is None:
                lost = sum(not math.isfinite(value) for value in values)
                words = f"diverges with {lost}" if lost else "too few results"
            elif one.outcome == "collapsed":
                words = f"collapses with {len(one.low)}"
            else:
                words = {
                    "match": f"no more than {tolerance:.4f} below float32",
                    "short": f"falls short by more than {tolerance:.4f}",
                    "worse": f"more than {tolerance:.4f} below with each seed",
                    "undecided": "open",
                }[one.outcome]
                words += f" [{one.interval[0]:+.4f}, {one.interval[1]:+.4f}]"
            mean = statistics.fmean(settings[name].values())
            yield f"| | {name} | {shown(metric, mean)} | {statistics.fmean(values):+.4f} | {words}, {count} |"


def tables() -> None:
    """Write the tables into docs/tasks.md, the sorted data, and the file that the package reads."""
    order: dict[tuple[str, str], int] = {}  # the metric that is judged stays first
    for row in rows():
        order.setdefault((row["task"], row["metric"]), len(order))
    chosen = sorted(
        {tuple(row[name] for name in FIELDS) for row in rows()},
        key=lambda row: (row[0], row[1], int(row[2]), order[row[0], row[3]]),
    )
    lines = [f'{task},"{setting}",{seed},{metric},{value}\n' for task, setting, seed, metric, value in chosen]
    write_atomically(DATA, "".join(lines).encode())
    text = PAGE.read_text()
    for name, table in zip(TABLES, (spread_table(), heads_table()), strict=True):
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        text = f"{before}<!-- {name} -->\n" + "\n".join(table) + f"\n{end}{after}"
    write_atomically(PAGE, text.encode())
    write_atomically(FILE, spreads({task: spread_of(task, settings) for task, settings in measured().items()}))


def main() -> None:
    """Run trainings, or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("tasks", nargs="+")
    runs.add_argument("--seeds", type=int, default=30)
    runs.add_argument("--settings", nargs="+", choices=SETTINGS, default=None)
    commands.add_parser("tables")
    options = parser.parse_args()
    if options.command == "tables":
        tables()
        return
    for task in options.tasks:
        run(task, options.seeds, options.settings or [FLOAT32, PAIRED, COARSE[0], *MORE.get(task, [])])


if __name__ == "__main__":
    main()
