"""What every test shares: one thread, a seed, and the reason why a GPU test is skipped."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator

# Processes that tests start have one thread too: with as many as there are cores, those of two workers spin against one
# another, and a notebook takes six minutes instead of twenty seconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="state-")  # what `resume` trusts is kept there

import pytest
import torch

import fpsim

# Longest first, so that no worker is left alone with a long file while the other has nothing to do. Tests of one file
# stay on one worker: they share clusters, sweeps and what is compiled.
LONG = (
    "test_sweep.py",
    "test_cuda.py",
    "test_executed.py",
    "test_executed_others.py",
    "test_notebooks.py",
    "test_search.py",
    "test_rounding.py",
    "test_command_line.py",
    "test_train.py",
    "test_ops.py",
    "test_tasks.py",
)
LAST = "test_compiled_models.py"  # after an error under fullgraph=True, torch reports one more reference in every call

# There is one in several folders, and --doctest-modules would import them all under the one name "conftest".
collect_ignore_glob = ["*conftest.py"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONG) + (item.path.name == LAST)))
    tier = config.getoption("-m")
    exhaustive = "slow" in tier
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("slow") and not exhaustive:
            item.add_marker(pytest.mark.skip(reason="exhaustive: run with -m slow"))
    if not tier and not any("::" in argument for argument in config.args):  # a test that is named runs whole
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture(autouse=True)
def _own_randomness() -> Iterator[None]:
    """Each test starts from seed 0 and torch's stream, on one thread: a worker process has one core.

    Reset before as well as after: doctests in the packages may seed, and no fixture of this file reaches them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fpsim.manual_seed(None)
    yield
    if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
        pyplot.close("all")  # what a test has plotted stays with pyplot otherwise
    fpsim.manual_seed(None)
    torch.set_num_threads(threads)
