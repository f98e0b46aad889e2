"""What every test shares: its threads, a seed, its tier, and the reason why a GPU test is skipped."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Processes that tests start have one thread too: with as many as there are cores, those of two workers spin against one
# another, and a notebook takes six minutes instead of twenty seconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="state-")  # what `resume` trusts is kept there
if "PTX_OF_RUN" not in os.environ:  # CUDA kernels that were compiled, for the workers of this run and their children
    os.environ["PTX_OF_RUN"] = tempfile.mkdtemp(prefix="ptx-")
    atexit.register(shutil.rmtree, os.environ["PTX_OF_RUN"], ignore_errors=True)

import pytest
import tiers
import torch

import fpsim

# There is one in several folders, and --doctest-modules would import them all under the one name "conftest".
collect_ignore_glob = ["*conftest.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--record", action="store_true", help="write what this tier takes to tests/durations.json")
    group.addoption("--write-tiers", metavar="FILE", help="write the tests of each tier to FILE, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[tiers.SPENT] = (Counter(), Counter())
    config.stash[tiers.LEFT_OUT] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.getoption("-m")
    tiers.leave_out_combinations(items)
    collected: dict[str, list[str]] = {"default": [], "full": [], "other": []}
    for item in items:
        collected[tiers.tier_of(item)].append(item.nodeid)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("slow") and "slow" not in tier:
            item.add_marker(pytest.mark.skip(reason="exhaustive: run with -m slow"))
    config.stash[tiers.COLLECTED] = collected
    if (path := config.getoption("--write-tiers")) is not None:
        Path(path).write_text(json.dumps(collected))
    if not tier and not any("::" in argument for argument in config.args):  # a test that is named runs whole
        # Thousands of skips would take half a minute.
        why = {id(item): reason for item in items if (reason := tiers.why_left_out(item)) is not None}
        config.hook.pytest_deselected(items=[item for item in items if id(item) in why])
        config.stash[tiers.LEFT_OUT] = dict(Counter(why.values()))
        items[:] = [item for item in items if id(item) not in why]
    files = tiers.in_order((tiers.file_of(item.nodeid) for item in items), tier or "default")
    place = {file: number for number, file in enumerate(files)}
    items.sort(key=lambda item: place[tiers.file_of(item.nodeid)])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    cases, seconds = item.config.stash[tiers.SPENT]
    before = tiers.processor_seconds()
    seconds.setdefault(tiers.COLLECTING, before)
    try:
        return (yield)
    finally:
        file = tiers.file_of(item.nodeid)
        cases[file] += tiers.tier_of(item) != "other"
        seconds[file] += tiers.processor_seconds() - before


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    cases, seconds = config.stash[tiers.SPENT]
    if hasattr(config, "workeroutput"):
        config.workeroutput["tiers"] = (dict(cases), dict(seconds), config.stash[tiers.LEFT_OUT])
    elif config.getoption("--record"):
        tiers.record(config.getoption("-m") or "default", cases, seconds)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add up what the workers tell: each leaves out the same cases, and its time for collecting is as long."""
    if (told := getattr(node, "workeroutput", {}).get("tiers")) is None:
        return  # it crashed
    cases, seconds = node.config.stash[tiers.SPENT]
    collecting = max(seconds[tiers.COLLECTING], told[1].get(tiers.COLLECTING, 0.0))
    cases.update(told[0])
    seconds.update(told[1])
    seconds[tiers.COLLECTING] = collecting
    node.config.stash[tiers.LEFT_OUT] = told[2]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    left_out = config.stash[tiers.LEFT_OUT]
    if left_out:
        # xdist does not count what its workers leave out
        terminalreporter.stats.setdefault("deselected", [SimpleNamespace() for _ in range(sum(left_out.values()))])
    for reason, count in left_out.items():
        terminalreporter.write_line(f"{count} cases {reason}")


def _forget() -> None:
    fpsim.manual_seed(None)
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        # Quantised models share a code object: the ninth that a process compiles meets torch's recompile limit, and
        # without fullgraph=True torch marks the code as one that it never compiles again.
        dynamo.reset()


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    """Each test starts from seed 0 and torch's stream, on one thread (or OMP_NUM_THREADS), with nothing compiled.

    Reset before as well as after: doctests in the packages may seed, and no fixture of this file reaches them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    _forget()
    yield
    if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
        pyplot.close("all")  # what a test has plotted stays with pyplot otherwise
    _forget()
    torch.set_num_threads(threads)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute on one thread, as a rank or a worker does: with more, a BLAS adds up in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
