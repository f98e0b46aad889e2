"""The sweep: what it gives, and the faults it survives. Every process here is a real one."""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import math
import multiprocessing
import os
import random
import re
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import distributed
import psutil
import pytest
import sweep_tasks
import tiers
from children import environment, heed_ctrl_c

from ada_loss.lab.cells.cells import Cell, plan
from ada_loss.lab.cells.ledger import Ledger
from ada_loss.lab.errors import SweepStopped
from ada_loss.lab.results import Results
from ada_loss.lab.sweep.config import read_sweep
from ada_loss.lab.sweep.driver import resume, sweep
from ada_loss.lab.sweep.engines import open_engine
from ada_loss.lab.sweep.execution import Execution
from ada_loss.lab.sweep.work import TimeLimit, within_time

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["ada_loss.lab.sweep.driver"])


def small(out: Path, task: Any = "sweep_tasks:tiny", **options: Any) -> Results:
    arguments = {"formats": ["e5m2"], "scaling": ["none"], "seeds": 4, "task_options": {"epochs": 1}, "baseline": False}
    return sweep(task, **{**arguments, **options}, out=out, show_progress=False)  # type: ignore[arg-type]


def in_a_process(out: Path, **options: Any) -> Any:
    process = PROCESSES.Process(target=small, args=(out,), kwargs=options)
    process.start()
    return process


def wait_until(holds: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def done(out: Path) -> dict[str, float]:
    """{id: when it was finished} of the cells that are done."""
    try:
        with Ledger(out / "ledger.sqlite", readonly=True) as ledger:
            return {row["id"]: row["finished"] for row in ledger.rows("done")}
    except (FileNotFoundError, ValueError, sqlite3.OperationalError):  # not yet there, or not yet complete
        return {}


def outcomes(results: Results) -> dict[str, Any]:
    return {row["id"]: (row["accuracy"], results.telemetry(row["id"])["losses"].tolist()) for row in results.rows()}


@pytest.fixture(scope="module")
def local() -> Iterator[str]:
    """The address of two workers, for all tests that need no cluster of their own."""
    with open_engine(Execution(engine="local", workers=2)) as engine:
        yield engine.name


def test_a_sweep_gives_a_row_for_each_cell_and_runs_none_twice(tmp_path: Path) -> None:
    results = small(tmp_path, formats=["fp16", "e5m2"], scaling=["none", 8])
    assert len(results.rows()) == 2 * 2 * 4
    before = done(tmp_path)
    assert outcomes(small(tmp_path, formats=["fp16", "e5m2"], scaling=["none", 8])) == outcomes(results)
    assert done(tmp_path) == before
    more = small(tmp_path, formats=["fp16", "e5m2"], scaling=["none", 8], task_options={"epochs": 2})
    assert len(more.rows()) == 32
    assert before.items() < done(tmp_path).items()


@tiers.parametrize("kind", ["cluster", "threads", "processes"], keep={"threads"})
def test_every_engine_gives_equal_results(tmp_path: Path, local: str, kind: str) -> None:
    expected = outcomes(small(tmp_path / "here", "digits", seeds=2))
    with contextlib.ExitStack() as stack:
        engine: Any = local
        if kind == "threads":
            engine = stack.enter_context(ThreadPoolExecutor(2))
        elif kind == "processes":
            engine = stack.enter_context(ProcessPoolExecutor(2, mp_context=PROCESSES))
        assert outcomes(small(tmp_path / kind, "digits", seeds=2, engine=engine)) == expected


YAML = """
task: digits
formats:
  - e4m3fn
  - {weight: e4m3fn, activation: e4m3fn, error: e5m2}
roundings: [nearest_even, stochastic]
scaling: [torch, adaptive]
seeds: 2
task_options: {steps: 4, record_every: 2}
"""


@pytest.mark.full
def test_one_yaml_gives_equal_results_here_on_a_local_cluster_and_on_a_scheduler_started_by_hand(
    tmp_path: Path,
) -> None:
    (tmp_path / "sweep.yaml").write_text(YAML)

    def swept(name: str, **options: Any) -> dict[str, Any]:
        """Every cell's row, but for its time, and every byte of its telemetry."""
        arguments = read_sweep(tmp_path / "sweep.yaml") | {
            "out": tmp_path / name,
            "baseline": False,
            "show_progress": False,
        }
        results, found = sweep(**arguments, **options), {}
        for row in results.rows():
            del row["seconds"]
            arrays = results.telemetry(row["id"])
            found[row["id"]] = row, {key: (x.dtype, x.shape, x.tobytes()) for key, x in arrays.items()}
        return found

    expected = swept("here", engine="here")
    assert len(expected) == 2 * 2 * 2 * 2
    assert swept("local", workers=2) == expected
    file = tmp_path / "scheduler.json"
    common = ["--scheduler-file", str(file), "--no-dashboard"]
    scheduler = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0", *common]
    workers = [sys.executable, "-m", "distributed.cli.dask_worker", "--nworkers", "2", "--nthreads", "1", *common]
    with contextlib.ExitStack() as stack:
        for line in (scheduler, workers):
            process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())
            stack.callback(process.wait)
            stack.callback(process.terminate)
            wait_until(file.exists)
        assert swept("cluster", engine=json.loads(file.read_text())["address"]) == expected


def test_a_function_of_a_notebook_is_a_task(tmp_path: Path, local: str) -> None:
    def mine(seed: int) -> Any:
        import sweep_tasks

        return sweep_tasks.tiny(seed)

    results = small(tmp_path, mine, engine=local)
    assert len(results.rows()) == 4
    assert small(tmp_path, mine).counts["done"] == 4
    with pytest.raises(ValueError, match=r"Call sweep\(\.\.\.\) again"):
        resume(tmp_path, trust=True)


@pytest.mark.parametrize("where", ["here", "cluster"])
def test_a_cell_that_raises_is_reported_and_the_others_go_on(tmp_path: Path, where: str, local: str) -> None:
    engine = {"here": "here", "cluster": local}[where]
    results = small(tmp_path, "sweep_tasks:raises", engine=engine)
    assert results.counts == {"planned": 0, "running": 0, "done": 3, "failed": 1}
    (failure,) = results.failures()
    assert failure["error"] == "RuntimeError: seed 1 is not to be had."
    assert "sweep_tasks.py" in failure["traceback"]
    again = small(tmp_path, "sweep_tasks:raises", engine=engine)
    assert again.failures()[0]["attempts"] == 1
    again = small(tmp_path, "sweep_tasks:raises", engine=engine, retry_failed=True)
    assert again.failures()[0]["attempts"] == 2
    assert again.counts["done"] == 3


def test_a_task_that_autocasts_to_bfloat16_is_scaled_and_one_to_float16_says_why_not(tmp_path: Path) -> None:
    options: dict[str, Any] = {"scaling": ["none", "adaptive"], "seeds": 1, "task_options": {"epochs": 8}}
    results = small(tmp_path / "bfloat16", "sweep_tasks:in_bfloat16", **options)
    losses = {row["scaling"]: results.telemetry(row["id"])["losses"] for row in results.rows()}
    assert min(losses["adaptive"]) < 0.9 * losses["adaptive"][0]
    # every gradient is zero: the losses are the first one, but for the order in which float32 adds up 8 points
    assert losses["none"] == pytest.approx(losses["none"][0], rel=8 * 2.0**-24)
    results = small(tmp_path / "float16", "sweep_tasks:in_float16", **options)
    (failure,) = results.failures()
    assert failure["config"]["scaling"] == "adaptive"
    assert re.search(r"The gradient at 0:\w+ is to be scaled, and is float16", failure["error"])
    assert "1 failed" in str(results)


def test_a_task_that_exits_ends_its_cell_alone(tmp_path: Path) -> None:
    def exits(seed: int) -> Any:
        return sys.exit(0) if seed == 1 else sweep_tasks.tiny(seed)

    results = small(tmp_path, exits)
    assert results.counts == {"planned": 0, "running": 0, "done": 3, "failed": 1}
    assert results.failures()[0]["error"] == "SystemExit: 0"


def test_a_metric_may_be_a_tensor_of_one_number_and_fails_its_cell_otherwise(tmp_path: Path) -> None:
    results = small(tmp_path / "tensors", "sweep_tasks:measured_in_tensors")
    assert results.counts == {"planned": 0, "running": 0, "done": 3, "failed": 1}
    assert "only one element tensors" in results.failures()[0]["error"]
    expected = {row["seed"]: row["accuracy"] for row in small(tmp_path / "floats").rows()}
    assert {row["seed"]: row["accuracy"] for row in results.rows()} == {s: expected[s] for s in (0, 2, 3)}


def test_a_diverged_run_is_a_result(tmp_path: Path) -> None:
    results = small(tmp_path, "sweep_tasks:diverges")
    assert results.counts["done"] == 4
    assert all(row["diverged"] for row in results.rows())


@pytest.mark.full
def test_a_driver_that_is_killed_twenty_times_loses_and_doubles_nothing(tmp_path: Path) -> None:
    moments = random.Random(0)
    options = {"task": "sweep_tasks:slow", "seeds": 60}
    expected = outcomes(small(tmp_path / "undisturbed", "sweep_tasks:tiny", seeds=60))
    out, known = tmp_path / "killed", {}
    start = time.monotonic()
    first = in_a_process(out, **options)
    wait_until(lambda: done(out))
    warm = time.monotonic() - start  # some 1.5 s until the first cell is done, more on a busy machine; then 0.15 s each
    for i in range(20):
        process = in_a_process(out, **options) if i else first
        end = time.monotonic() + (moments.uniform(0, warm + 1) if i else 0)
        while time.monotonic() < end and len(done(out)) < 40:  # a busy machine's `warm` is long enough for all 60
            time.sleep(0.02)
        process.kill()
        process.join()
        now = done(out)
        assert known.items() <= now.items()  # what was done stays, and is not done again
        known = now
    assert 0 < len(known) < 60
    results = small(out, **options)
    assert known.items() <= done(out).items()
    assert results.counts == {"planned": 0, "running": 0, "done": 60, "failed": 0}
    by_seed = [sorted(o.values(), key=str) for o in (outcomes(results), expected)]
    assert by_seed[0] == by_seed[1]
    assert len(list((out / "telemetry").iterdir())) == 60  # with dotfiles: nothing half-written is left


def test_killing_a_driver_ends_its_workers_and_its_cells_are_run_again(tmp_path: Path) -> None:
    options = {"task": "sweep_tasks:slow", "seeds": 8, "workers": 2}
    process = in_a_process(tmp_path, **options)
    wait_until(lambda: len(done(tmp_path)) >= 3)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.join()
    wait_until(lambda: not any(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in workers))
    known = done(tmp_path)
    assert 3 <= len(known) < 8
    results = small(tmp_path, **{**options, "workers": 1})
    assert results.counts["done"] == 8
    assert known.items() <= done(tmp_path).items()


@pytest.mark.full
def test_a_worker_that_is_killed_is_replaced(tmp_path: Path) -> None:
    process = in_a_process(tmp_path, task="sweep_tasks:slow", seeds=40, workers=2)
    wait_until(lambda: len(done(tmp_path)) >= 3)
    workers = [c for c in psutil.Process(process.pid).children(True) if "spawn_main" in " ".join(c.cmdline())]
    assert len(workers) == 2
    workers[0].kill()
    process.join(120)
    assert process.exitcode == 0
    results = Results(tmp_path)
    assert results.counts == {"planned": 0, "running": 0, "done": 40, "failed": 0}
    assert sorted(cell["attempts"] for cell in results.cells)[-2:] in ([1, 1], [1, 2])


@pytest.mark.full
def test_a_cell_that_kills_its_worker_is_isolated(tmp_path: Path, local: str) -> None:
    results = small(tmp_path, "sweep_tasks:kills_its_worker", engine=local)
    assert results.counts == {"planned": 0, "running": 0, "done": 3, "failed": 1}
    (failure,) = results.failures()
    assert failure["config"]["seed"] == 1
    assert failure["attempts"] == 3
    assert "died 3 times" in failure["error"]


def test_an_executor_whose_worker_died_is_named_and_the_cell_may_run_again(tmp_path: Path) -> None:
    with (
        ProcessPoolExecutor(1, mp_context=PROCESSES) as processes,
        pytest.raises(SweepStopped, match=r"takes no more work: .* terminated abruptly.* engine='local' replaces"),
    ):
        small(tmp_path, "sweep_tasks:kills_its_worker", engine=processes)
    assert Results(tmp_path).counts["running"] == 0


def test_a_task_that_cannot_travel_fails_its_cells_with_the_reason(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=PROCESSES) as processes:
        results = small(tmp_path, lambda seed: sweep_tasks.tiny(seed), engine=processes, seeds=1)
    assert "Can't pickle" in results.failures()[0]["error"]


@pytest.mark.full
def test_a_cell_whose_worker_died_once_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWEEP_TEST_MARK", str(tmp_path))
    results = small(tmp_path / "out", "sweep_tasks:kills_its_worker_once", workers=2)
    assert results.counts["done"] == 4
    assert [cell["attempts"] for cell in results.cells] == [1, 2, 1, 1]


@tiers.parametrize(("task", "limit"), [("hangs_in_python", 4), ("hangs_in_c", 8)], keep={"hangs_in_python"})
def test_a_cell_that_hangs_ends_by_its_time_limit(tmp_path: Path, local: str, task: str, limit: int) -> None:
    results = small(tmp_path, f"sweep_tasks:{task}", engine=local, time_limit=limit)
    assert results.counts == {"planned": 0, "running": 0, "done": 3, "failed": 1}
    assert f"time limit of {limit} s" in results.failures()[0]["error"]


def test_a_time_limit_interrupts_and_leaves_what_ends_in_time_alone() -> None:
    with pytest.raises(TimeLimit, match=r"time limit of 0\.05 s"):
        within_time(0.05, lambda: sweep_tasks.hangs_in_python(1))
    words = []
    for _ in range(300):
        try:
            # about as long as the limit: the interruption comes at every place
            assert within_time(0.001, lambda: sum(range(10_000))) == 49_995_000
        except TimeLimit as error:
            words.append(str(error))
        sum(range(1000))  # never here
    assert len(words) < 300
    assert set(words) <= {"It ran for longer than its time limit of 0.001 s."}


TRACED = """
import sys
from ada_loss.lab.sweep.work import TimeLimit, within_time

def hangs():
    while True:
        pass

def trace(frame, event, arg):
    frame.f_trace_opcodes = True
    return trace

try:
    within_time(0.05, hangs)
except TimeLimit:
    sys.settrace(trace)
    (lambda: 1 + 1)()
    sys.settrace(None)
    print("over")
"""


def test_a_process_whose_time_limit_was_over_can_be_debugged() -> None:
    done = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, text=True, timeout=60)
    assert done.stdout == "over\n", done.stderr


@pytest.mark.full
def test_a_cell_that_eats_memory_is_isolated(tmp_path: Path) -> None:
    results = small(tmp_path, "sweep_tasks:eats_memory", workers=2, memory_limit="1200 MiB", time_limit=100)
    assert results.counts == {"planned": 0, "running": 0, "done": 3, "failed": 1}
    assert "lack of memory" in results.failures()[0]["error"]


def test_a_second_driver_is_refused(tmp_path: Path) -> None:
    process = in_a_process(tmp_path, task="sweep_tasks:slow", seeds=40)
    wait_until(lambda: done(tmp_path))
    with pytest.raises(SweepStopped, match="Another process is sweeping into"):
        small(tmp_path, "sweep_tasks:slow", seeds=40)
    process.kill()
    process.join()
    assert small(tmp_path, "sweep_tasks:slow", seeds=4).counts["done"] >= 4


def with_small_files(limit: int, out: Path, **options: Any) -> None:
    """A disk that is full beyond a size of each file: what a write there says is like ENOSPC, and real."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        small(out, **options)
    except SweepStopped as error:
        (out.parent / "says").write_text(str(error))
        sys.exit(7)


@tiers.parametrize("limit", [600, 40_000, 70_000, 90_000], keep={40_000}, ids=str)
def test_a_full_disk_is_a_clear_error_and_the_ledger_opens(tmp_path: Path, limit: int) -> None:
    out = tmp_path / "out"
    process = PROCESSES.Process(target=with_small_files, args=(limit, out), kwargs={"seeds": 60})
    process.start()
    process.join()
    assert process.exitcode == 7
    assert "cannot be written" in (tmp_path / "says").read_text()
    known = done(out)
    assert small(out, seeds=60).counts["done"] == 60
    assert known.items() <= done(out).items()


def test_a_truncated_file_is_reported_and_its_cell_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = outcomes(small(tmp_path))
    first, second, *_ = (tmp_path / "telemetry").iterdir()
    first.write_bytes(first.read_bytes()[:-5])
    second.unlink()
    results = small(tmp_path)
    assert outcomes(results) == expected
    said = capsys.readouterr()
    for path in (first, second):
        assert f"The telemetry of cell {path.stem} is missing or damaged" in said.err
    assert not said.out  # which is JSON, where it was asked for
    assert sorted(cell["attempts"] for cell in results.cells) == [1, 1, 2, 2]


def test_a_second_sweep_into_a_folder_takes_nothing_from_the_first(tmp_path: Path) -> None:
    small(tmp_path, "sweep_tasks:raises")
    small(tmp_path, retry_failed=True)  # which has not failed
    results = small(tmp_path, formats=["fp16"], retry_failed=True)
    assert results.counts == {"planned": 0, "running": 0, "done": 11, "failed": 1}
    damaged = results.rows()[0]["id"]
    (tmp_path / "telemetry" / f"{damaged}.npz").unlink()
    assert small(tmp_path, formats=["fp16"]).counts["planned"] == 0
    assert damaged in [row["id"] for row in Results(tmp_path).rows()]


def test_grids_of_two_tasks_are_one_sweep_with_a_table_for_each(tmp_path: Path) -> None:
    also = [{"formats": ["fp16", "bf16"]}, {"task": "sweep_tasks:oddly_measured", "task_options": {"epochs": 1}}]
    results = small(tmp_path, also=also, seeds=1, roundings=["nearest_even", "up"])
    assert results.counts["done"] == 8
    titles = [f"accuracy in %, task sweep_tasks:tiny, rounding {rounding}" for rounding in ("nearest_even", "up")]
    assert [table.title for table in results.tables()][:2] == titles
    assert results.tables()[1].down == ["e5m2", "fp16", "bf16"]


@pytest.mark.full
def test_ctrl_c_ends_cleanly_and_says_how_to_go_on(tmp_path: Path) -> None:
    code = f"import test_sweep; test_sweep.small({str(tmp_path)!r}, 'sweep_tasks:slow', seeds=60, workers=2)"
    command = [sys.executable, "-c", f"if __name__ == '__main__':\n    {code}"]
    started: Any = {"env": environment(), "start_new_session": True, "preexec_fn": heed_ctrl_c}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **started)
    wait_until(lambda: len(done(tmp_path)) >= 3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the driver and to its workers
    said = process.communicate(timeout=60)[1]
    # 1 where tabulate is installed: torch imports it at exit, which evaluates text, and Python forgets the interrupt
    assert process.returncode in (130, -signal.SIGINT, 1)
    assert said.count("Traceback") == 1  # the script's own
    assert said.strip().endswith(f"Interrupted. What was done is kept in {tmp_path}: run the same again to go on.")
    with Ledger(tmp_path / "ledger.sqlite", readonly=True) as ledger:
        assert ledger.counts()["running"] == 0
    assert small(tmp_path, "sweep_tasks:slow", seeds=60).counts["done"] == 60


def test_a_cell_that_is_interrupted_in_this_very_process_does_not_run_on_in_the_ledger(tmp_path: Path) -> None:
    def interrupted(seed: int) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="run the same again to go on"):
        small(tmp_path, interrupted)
    assert Results(tmp_path).counts == {"planned": 4, "running": 0, "done": 0, "failed": 0}


def test_a_scheduler_that_does_not_answer_is_said_with_how_long_it_was_waited_for(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match=r"No Dask scheduler answered at tcp://127.0.0.1:9 within 2 s"):
        small(tmp_path, engine="tcp://127.0.0.1:9", engine_timeout=2)
    assert small(tmp_path).counts["done"] == 4


def test_a_port_that_is_no_scheduler_s_is_waited_for_no_longer(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:  # takes the connection, and says nothing
        address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=f"No Dask scheduler answered at {address} within 1 s"):
            small(tmp_path, engine=address, engine_timeout=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"engine": "tcp://host:x"},
            r"'tcp://host:x' is not an address\. Expected: tcp://HOST:PORT or .* from 1 to 65535\.",
        ),
        (
            {"workers": 2, "memory_limit": "lots"},
            r"memory_limit='lots' is invalid\. Expected: 'auto', .*'4 GiB' .* or 0 for no limit",
        ),
    ],
    ids=["port", "memory"],
)
def test_what_dask_would_refuse_later_is_refused_in_words(tmp_path: Path, options: Any, words: str) -> None:
    small(tmp_path)
    for call in (partial(small, tmp_path), partial(resume, tmp_path)):
        with pytest.raises(ValueError, match=words):
            call(**options)
    with pytest.raises(ValueError, match=words), open_engine(Execution(**{"engine": "local", **options})):
        pytest.fail("an engine was opened")


@pytest.mark.parametrize("memory_limit", ["auto", "4 GiB", "1.5e3MB", 0, "0", 0.5, 2**30, None])
def test_what_dask_takes_for_memory_is_taken(memory_limit: Any) -> None:
    assert Execution(memory_limit=memory_limit).memory_limit == memory_limit


@pytest.mark.parametrize("engine", ["tcp://127.0.0.1:8786", "tls://scheduler.example:1", "tcp://[::1]:65535"])
def test_what_is_an_address_is_taken(engine: str) -> None:
    assert Execution(engine=engine).chosen_engine == engine


@pytest.mark.full
def test_cells_run_where_their_resources_are(tmp_path: Path, local: str) -> None:
    with open_engine(Execution(engine="local", resources={"GPU": 1})) as engine:
        results = small(tmp_path / "slots", engine=engine.name, resources={"GPU": 1})
        assert results.counts["done"] == 4
        with pytest.raises(ConnectionError, match=r"offered \{'GPU': 2\} within 1 s.*--resources GPU=2"):
            small(tmp_path / "more", engine=engine.name, resources={"GPU": 2}, engine_timeout=1)
    with pytest.raises(ConnectionError, match=r"No worker of .* offered \{'GPU': 1\} within 1 s"):
        small(tmp_path / "none", engine=local, resources={"GPU": 1}, engine_timeout=1)


@pytest.mark.parametrize("call", [sweep, resume])
def test_every_field_of_an_execution_is_an_argument_with_its_default(call: Any) -> None:
    defaults = {name: parameter.default for name, parameter in inspect.signature(call).parameters.items()}
    assert {field.name: defaults[field.name] for field in fields(Execution)} == vars(Execution())


def test_the_default_engine_is_here_for_one_worker_without_a_time_limit() -> None:
    chosen = [Execution(**options).chosen_engine for options in ({}, {"workers": 2}, {"time_limit": 5})]  # type: ignore[arg-type]
    assert chosen == ["here", "local", "local"]
    assert Execution(workers=2, engine="here").chosen_engine == "here"


def test_bad_arguments_are_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    for options in (
        {"workers": 0},
        {"workers": True},
        {"workers": 1_000_000_000},
        {"time_limit": 0},
        {"time_limit": "1 min"},
        {"engine_timeout": None},
        {"resources": ["GPU"]},
        {"formats": ["fp61"]},
        {"seeds": 0},
        {"task_options": {"epoch": 1}},
        {"also": [{"seed": 1}]},
        {"engine": "slurm"},
        {"device": "tpu"},
        {"device": "cuda:"},
        {"device": "cuda:x"},
        {"device": None},
        {"device": "cpu\n"},
        {"engine": "tcp://host:x"},
        {"engine": "tcp://host"},
        {"engine": "tls://host:99999"},
        {"engine": "tcp://host:8786/status"},
        {"memory_limit": "lots"},
        {"memory_limit": "MB"},
        {"memory_limit": "1e400 B"},
        {"memory_limit": -1},
        {"memory_limit": math.nan},
        {"memory_limit": [1]},
        {"memory_limit": True},
        {"retry_failed": "no"},
        {"keep_states": "no"},
        {"keep_old": "no"},
    ):
        with pytest.raises(ValueError, match=r"Expected|Known|Give"):
            small(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    for folder, shown in ((None, "None"), ("", "''"), ("a\0b", r"'a\\x00b'")):
        with pytest.raises((TypeError, ValueError), match=rf"out={shown} .*Expected: the path of a folder"):
            small(folder)  # type: ignore[arg-type]


def test_resume_goes_on_with_every_cell_of_the_ledger(tmp_path: Path) -> None:
    results = small(tmp_path)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.release([results.cells[2]["id"]])
    assert outcomes(resume(tmp_path, show_progress=False, trust=True)) == outcomes(results)
    with pytest.raises(FileNotFoundError, match="There is no ledger"):
        resume(tmp_path / "elsewhere")


def test_threads_of_one_process_do_not_disturb_each_other(tmp_path: Path) -> None:
    options = {"roundings": ["stochastic"], "seeds": 12, "task_options": {"epochs": 20}}
    expected = outcomes(small(tmp_path / "here", **options))
    with ThreadPoolExecutor(4) as threads:
        assert outcomes(small(tmp_path / "threads", engine=threads, **options)) == expected


@pytest.mark.full
def test_a_script_without_a_main_guard_is_told_what_to_do(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "from ada_loss.lab.sweep.driver import sweep\n"
        f"sweep('sweep_tasks:tiny', ['fp16'], workers=2, out={str(tmp_path / 'out')!r}, show_progress=False)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 1
    assert "A worker that is starting reached sweep()" in done.stderr
    assert len(done.stderr.splitlines()) < 40
    assert "below `if __name__ == '__main__':`; from standard input, give workers=1." in done.stderr.splitlines()[-1]


# Exceptions of a cell


def test_no_exception_of_a_cell_stops_the_others(tmp_path: Path, local: str) -> None:
    for name, engine in (("here", "here"), ("cluster", local)):
        results = small(tmp_path / name, "sweep_tasks:raises_oddly", seeds=8, engine=engine)
        assert results.counts == {"planned": 0, "running": 0, "done": 2, "failed": 6}
        text, long, closed, cancelled, unreadable, group = (cell["error"] for cell in results.failures())
        assert text == r"ValueError: file \udcff"
        assert long.startswith("ValueError: xxx")
        assert long.endswith("xxxthe end")
        assert "characters are left out" in long
        assert len(long) < 30_000
        assert (closed, cancelled) == ("GeneratorExit: closed", "CancelledError: gone")
        assert unreadable == "Unreadable: an exception without a readable text"
        assert group == "BaseExceptionGroup: many (1 sub-exception)"
        assert all(len(cell["traceback"]) < 30_000 for cell in results.failures())
        assert results.report().exists()


def test_a_metric_without_a_name_is_its_cells_failure(tmp_path: Path) -> None:
    results = small(tmp_path, "sweep_tasks:measured_without_a_name", seeds=2)
    assert results.counts == {"planned": 0, "running": 0, "done": 1, "failed": 1}
    assert results.failures()[0]["error"].startswith("TypeError: metrics has 3: <function accuracy")


# Damage


def test_a_flipped_bit_of_telemetry_is_found_and_its_cell_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = outcomes(small(tmp_path))
    path = next((tmp_path / "telemetry").iterdir())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"missing or damaged .*digest.* Run the sweep again: it repeats that cell"):
        Results(tmp_path).telemetry(path.stem)
    assert outcomes(small(tmp_path)) == expected
    assert f"The telemetry of cell {path.stem} is missing or damaged" in capsys.readouterr().err


CHANGES = {
    "result": ("UPDATE cells SET metrics = '{\"accuracy\": 0.99}' WHERE id = ?", 0),
    "state": ("UPDATE cells SET state = 'planned' WHERE id = ?", 0),
    "configuration": ("UPDATE cells SET config = replace(config, 'e5m2', 'e4m3fn') WHERE id = ?", 0),
    "no configuration": ("UPDATE cells SET config = '[[[' WHERE id = ?", 0),
    "no text": ("UPDATE cells SET metrics = CAST(x'7bff7d' AS TEXT) WHERE id = ?", 0),
    "id": ("UPDATE cells SET id = 'another' WHERE id = ?", 1),
    "id that is not a text": ("UPDATE cells SET id = CAST(x'616e6f74686572ff' AS TEXT) WHERE id = ?", 1),
}


@tiers.parametrize("change", CHANGES, keep={"configuration", "id"})
def test_a_row_that_was_changed_is_reported_with_its_id_and_its_cell_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    expected = outcomes(small(tmp_path))
    first, statement = next(iter(expected)), CHANGES[change][0]
    with sqlite3.connect(tmp_path / "ledger.sqlite") as sql:
        assert sql.execute(statement, (first,)).rowcount == 1
    sql.close()
    shown = {"id": "another", "id that is not a text": r"another\xff"}.get(change, first)
    results = Results(tmp_path)
    assert outcomes(results) == {cell: expected[cell] for cell in expected if cell != first}
    assert [cell["id"] for cell in results.failures()] == [shown]
    assert "was changed by something else than a sweep; run the sweep again" in results.failures()[0]["error"]
    assert shown in results.report().read_text()
    again = small(tmp_path)
    assert outcomes(again) == expected
    assert f"The row of cell {shown} in the ledger was changed" in capsys.readouterr().err
    assert again.counts == {"planned": 0, "running": 0, "done": 4, "failed": 0}


def test_what_a_dead_driver_left_behind_is_removed(tmp_path: Path) -> None:
    results = small(tmp_path, "sweep_tasks:raises")
    done_cell, failed = results.rows()[0]["id"], results.failures()[0]["id"]
    other = tmp_path / "telemetry" / "mine.npz"
    begun = (".report.html", "telemetry/.a.npz", "checkpoints/.a.pt")
    stale = [tmp_path / f"{name}.0123456789abcdef.tmp" for name in begun]
    stale += [tmp_path / "checkpoints" / f"{done_cell}.pt", tmp_path / "telemetry" / f"{failed}.npz"]
    kept = [other, tmp_path / "checkpoints" / f"{failed}.pt"]  # from which a retry goes on
    for path in (*stale, *kept):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    small(tmp_path, "sweep_tasks:raises")
    assert [path for path in stale if path.exists()] == []
    assert all(path.exists() for path in kept)


# Trust


def with_the_task(out: Path, task: str, seed: Any = 0, **changes: Any) -> None:
    """Plan a cell of a task as someone would who writes a ledger for others to open."""
    (cell,) = plan("digits", ["fp16"], ["none"])
    config = {**cell.config, "task": task, "seed": seed, **changes}
    with Ledger(out / "ledger.sqlite") as ledger:
        ledger.add([(Cell(config).id, config)])


def test_a_ledger_does_not_choose_what_runs(tmp_path: Path) -> None:
    mark = tmp_path / "touched"
    with_the_task(tmp_path, "sweep_tasks:writes_a_mark")
    with pytest.raises(ValueError, match=r"names the task 'sweep_tasks:writes_a_mark', which is code from outside"):
        resume(tmp_path)
    with_the_task(tmp_path / "os", "os:system", f"touch {mark}")
    for trust in (False, True):
        with pytest.raises(ValueError, match="its configuration is not the one of which the id was made"):
            resume(tmp_path / "os", trust=trust)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "fp61"}, "Unknown format 'fp61'"),
        ({"rounding": "neerest"}, "neerest"),
        ({"scaling": "torchh"}, "Unknown scaling method 'torchh'"),
        ({"options": {"epochs": 0}}, "task_options.epochs is 0"),
        ({"options": {"epoch": 1}}, "Unknown key task_options.epoch"),
        ({"seed": 0.5}, "its configuration is not the one"),
        ({"extra": 1}, "its configuration is not the one"),
    ],
    ids=str,
)
def test_a_cell_of_a_ledger_is_checked_as_one_of_a_yaml_file(tmp_path: Path, changes: Any, words: str) -> None:
    with_the_task(tmp_path, "digits", **changes)
    with pytest.raises(
        ValueError, match=r"The cell '[0-9a-f]{16}' of the ledger is damaged, .*sweep\(\.\.\.\)"
    ) as caught:
        resume(tmp_path)
    assert words in str(caught.value)


@pytest.mark.full
def test_nobody_else_connects_to_a_local_cluster(local: str) -> None:
    assert local.startswith("tls://127.0.0.1:")
    plain = local.replace("tls://", "tcp://")
    for address, options, error, words in (
        (local, {"security": distributed.Security.temporary()}, OSError, r"Timed out|handshake|CERTIFICATE|TLS"),
        (local, {}, TypeError, "TLS expects a `ssl_context` argument"),
        (plain, {}, OSError, r"Timed out|reset by peer"),
    ):
        with pytest.raises(error, match=words):
            distributed.Client(address, timeout=1, **options)
        # A client that failed takes the lock of all loops when it is collected. Within the next constructor, which
        # holds that lock, it would wait for ever.
        gc.collect()


@pytest.mark.full
def test_a_local_cluster_listens_on_the_loopback_alone(local: str) -> None:
    driver = psutil.Process()
    listening = [
        connection.laddr.ip
        for process in (driver, *driver.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 3  # the scheduler and two workers
    assert set(listening) == {"127.0.0.1"}
