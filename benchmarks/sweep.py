"""Measure the lab: `python benchmarks/sweep.py [--only SECTION ...]`. The result is JSON, like that of report.py."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from report import RESULTS, Report, machine, paired, save

import fpsim
from ada_loss.lab.cells.cells import plan
from ada_loss.lab.cells.ledger import Ledger
from ada_loss.lab.cells.telemetry import npz, telemetry_digest
from ada_loss.lab.cells.telemetry import telemetry as arrays_of_run
from ada_loss.lab.environment import environment
from ada_loss.lab.sweep.config import read_sweep
from ada_loss.lab.sweep.driver import sweep
from ada_loss.lab.sweep.engines import open_engine
from ada_loss.lab.sweep.execution import Execution
from ada_loss.lab.tasks import digits, find_task
from ada_loss.lab.training import TrainOptions, train

TESTS = str(Path(__file__).parents[1] / "tests")
TINY = "sweep_tasks:tiny"  # a logistic regression of 8 points
GRID = f"ada_loss.sweep({TINY!r}, out=out, show_progress=False, baseline=False"
# What is done with a large folder, and the seconds of a processor that it may take, with the start of Python
STEPS: dict[str, tuple[str, float | None]] = {
    "nothing but importing": ("", None),
    "Results": ("Results(out)", None),
    "table": ("Results(out).table()", None),
    "verdict": ("Results(out).verdicts()", None),
    "200 in a folder of their own": (
        "import tempfile; out = tempfile.mkdtemp(dir=out); "
        f"{GRID}, formats=['fp16', 'bf16'], scaling=['none'], seeds=range(100))",
        None,
    ),
    "200 more": (f"{GRID}, formats=['fp16', 'bf16'], scaling=['none'], seeds=range(seeds, seeds + 100))", None),
    "report": ("Results(out).report()", 120),
}
DONE = "state = ?, attempts = ?, finished = ?, seconds = ?, metrics = ?, diverged = ?, skipped = ?, underflow = ?, "
DONE += "telemetry_bytes = ?, telemetry_sha256 = ?, error = ?, traceback = ?, bits = ?, digest = ?"
LINKS = 50_000  # to a file; ext4 has 65,000
FORMATS, METHODS = ["fp16", "bf16", "e5m2", "e4m3fn"], ["none", 8, "torch", "nnabla", "adaptive"]


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def process(words: Sequence[str], repeats: int = 9) -> float:
    """Median seconds of an ada-loss command, with the start of its process."""
    command = [sys.executable, "-m", "ada_loss", *words]
    return statistics.median(
        seconds_of(lambda: subprocess.run(command, check=True, capture_output=True)) for _ in range(repeats)
    )


def command_line(report: Report) -> None:
    report.add("command", "ada-loss --help", process(["--help"]), "s", 0.3, at_least=False)


def ledger(report: Report) -> None:
    """A sweep of 10,000 cells that are all done, run again."""
    with TemporaryDirectory() as folder:
        out, cells = Path(folder), []

        def planned() -> None:
            cells.extend(plan(TINY, FORMATS, METHODS, seeds=500))
            with Ledger(out / "ledger.sqlite") as book:
                book.add((cell.id, cell.config) for cell in cells)

        first = seconds_of(planned)
        with Ledger(out / "ledger.sqlite") as book:
            for cell in cells:
                book.start(cell.id)
                book.finish(cell.id, {"metrics": {"accuracy": 0.5}, "seconds": 1.0, "telemetry_bytes": 1})
        (out / "telemetry").mkdir()
        for cell in cells:
            (out / "telemetry" / f"{cell.id}.npz").write_bytes(b"x")
        again = seconds_of(lambda: sweep(TINY, FORMATS, METHODS, seeds=500, out=out, show_progress=False))
        report.add("ledger", "10,000 cells planned, written and looked up", first + again, "s", 5, at_least=False)
        report.add("ledger", "status of 10,000 cells", process(["status", folder]), "s", 0.5, at_least=False)


def write_large(out: Path, seeds: int) -> None:
    """Write the folder of a sweep of so many seeds with 20 settings and float32, all done, as a sweep leaves it.

    The results are written at once: with two transactions for each, 100,000 would take an hour.
    """
    cells = [*plan(TINY, ["fp32"], ["none"], seeds=seeds), *plan(TINY, FORMATS, METHODS, seeds=seeds)]
    content = npz(arrays_of_run(train(find_task(TINY)(0), "e5m2", scaling="torch", epochs=20, record_every=1)))
    with Ledger(out / "ledger.sqlite") as book:
        book.add((cell.id, cell.config) for cell in cells)
        book.add_session({**environment(), "engine": "here"})
    originals = out / "originals"  # a file system has a most of links to a file
    for folder in (out / "telemetry", originals):
        folder.mkdir()
    digest = telemetry_digest(content)
    with closing(sqlite3.connect(out / "ledger.sqlite")) as sql, sql:
        for i, (cell, config) in enumerate(sql.execute("SELECT id, config FROM cells ORDER BY position").fetchall()):
            metrics = json.dumps({"accuracy": 0.8 + 0.1 * math.sin(7 * i)})
            done = ["done", 1, 1.7e9 + i, 0.25, metrics, 0, 0, 0.01, len(content), digest, None, None, fpsim.BITS]
            sealed = hashlib.sha256(json.dumps([cell, i, config, *done]).encode()).hexdigest()  # as `Ledger` does
            sql.execute(f"UPDATE cells SET {DONE} WHERE id = ?", [*done, sealed, cell])
            original = originals / str(i // LINKS)
            if not original.exists():
                original.write_bytes(content)
            os.link(original, out / "telemetry" / f"{cell}.npz")


def large(report: Report, cells: int = 100_000) -> None:
    """What is done with the folder of a large sweep: processor seconds and memory, each step in its own process."""
    with TemporaryDirectory() as folder:
        seeds = cells // (len(FORMATS) * len(METHODS) + 1)
        write_large(Path(folder), seeds)
        for name, (step, most) in STEPS.items():
            code = f"out, seeds = {folder!r}, {seeds}; import ada_loss; from ada_loss import Results; {step}"
            process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
            _, status, used = os.wait4(process.pid, 0)
            if status:
                raise RuntimeError(f"{name} of {cells:,} cells failed: {step}")
            words = f"{cells:,} cells: {name}"
            report.add("large", words, used.ru_utime + used.ru_stime, "s of processor", most, at_least=False)
            report.add("large", f"{words}, memory", used.ru_maxrss / 2**20, "GiB", 1, at_least=False)


def engine(report: Report, cells: int = 100) -> None:
    """The time of a cell on a warm local cluster of one worker, minus its time in this process."""
    with open_engine(Execution(engine="local")) as opened, TemporaryDirectory() as folder:

        def run(name: str, seeds: range, where: str | Executor) -> float:
            options: dict[str, Any] = {"task_options": {"epochs": 1}, "show_progress": False}
            return seconds_of(
                lambda: sweep(TINY, ["e5m2"], ["none"], seeds=seeds, engine=where, out=f"{folder}/{name}", **options)
            )

        run("warm", range(5), opened.name), run("warm here", range(5), "here")
        connect = min(run(f"connect {i}", range(1), opened.name) for i in range(3))
        there, here = run("cluster", range(cells), opened.name), run("here", range(cells), "here")
        report.add("engine", "a trivial cell in this process", 1e3 * here / cells, "ms")
        overhead = 1e3 * (there - connect - here) / (cells - 1)
        report.add("engine", "overhead of a cell on a warm cluster", overhead, "ms", 50, at_least=False)


def workers(report: Report) -> None:
    """README's sweep on two workers and on one, from an empty folder to the last cell."""
    arguments = read_sweep("digits")
    times = {}
    for count in (1, 2):
        with TemporaryDirectory() as folder:
            times[count] = seconds_of(lambda c=count, f=folder: sweep(**{**arguments, "out": f, "workers": c}))  # type: ignore[misc]
        report.add("workers", f"the sweep digits, {count} worker{'s' * (count > 1)}", times[count], "s")
    report.add("workers", "cells an hour, two workers / one", times[1] / times[2], "times", 1.7)


def telemetry(report: Report, repeats: int = 9) -> None:
    """The time of a training with the default telemetry over one without: the extra time of a sampled step, spread."""
    import torch

    torch.set_num_threads(1)
    task, default = digits(), TrainOptions.record_every
    for fmt, scaling in (("e5m2", "none"), ("e5m2", "adaptive")):

        def run(every: int, f: str = fmt, s: str = scaling) -> object:
            return train(task, f, scaling=s, epochs=4, record_every=every)

        _, _, ratio = paired(lambda: run(0), lambda: run(1), repeats)
        name = f"digits {fmt} {scaling}, with telemetry / without"
        report.add("telemetry", name, 1 + (1 / ratio - 1) / default, "times", 1.03, at_least=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="sections: command ledger large engine workers telemetry")
    parser.add_argument("--cells", type=int, default=100_000, help="of the section large")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, TESTS)
    os.environ["PYTHONPATH"] = os.pathsep.join([TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])
    report = Report()
    sections = {
        "command": command_line,
        "ledger": ledger,
        "large": lambda report: large(report, options.cells),
        "engine": engine,
        "workers": workers,
        "telemetry": telemetry,
    }
    for name, section in sections.items():
        if options.only is None or name in options.only:
            section(report)
    about = machine()
    save(report, options.out or RESULTS / f"{about['gpu'] or about['cpu']}-sweep.json".replace(" ", "-").lower())


if __name__ == "__main__":
    main()
