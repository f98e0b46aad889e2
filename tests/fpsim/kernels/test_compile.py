"""The cache of compiled loops on disk: what its key covers."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fpsim
from fpsim.kernels.compile import SOURCES
from fpsim.kernels.moments import exponents_loop, moments_loop
from fpsim.kernels.round import cpu_fitting_loop, cpu_loop
from fpsim.kernels.tally import lost_loop, tally_loop
from fpsim.rounding import ROUNDINGS

HOUSE = Path(fpsim.__file__).parent

LOOPS = [
    *(cpu_loop(rule, shape, 32) for rule in range(len(ROUNDINGS)) for shape in range(5)),
    cpu_fitting_loop(0, 1, 32),
    tally_loop(4),
    lost_loop(4),
    moments_loop(4, False, True),
    exponents_loop(4),
]


def functions_behind(function: Any, seen: set[int]) -> Iterator[Any]:
    """A function and every one that it calls, compiled or not, that lies in the house."""
    if isinstance(function, type):
        return
    function = getattr(function, "py_func", None) or getattr(function, "_defn", function)  # an intrinsic's
    if not inspect.isfunction(function) or id(function) in seen or not function.__module__.startswith("fpsim"):
        return
    seen.add(id(function))
    yield function
    names = function.__code__.co_names
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    for value in (*(function.__globals__.get(name) for name in names), *cells):
        yield from functions_behind(value, seen)


def test_the_key_covers_every_file_that_is_compiled_in() -> None:
    files = {
        Path(inspect.getsourcefile(function) or "") for loop in LOOPS for function in functions_behind(loop, set())
    }
    assert {file.name for file in files} >= {"round.py", "tally.py", "moments.py", "compile.py", "rounding.py"}
    assert files <= {*SOURCES}
    # their constants come from files that these import
    assert HOUSE / "statistics.py" in SOURCES


@pytest.mark.parametrize("edited", ["rounding.py", "statistics.py", "kernels/compile.py"])
def test_an_edit_of_a_file_that_is_compiled_in_compiles_anew(edited: str, tmp_path: Path) -> None:
    shutil.copytree(HOUSE, tmp_path / "fpsim", ignore=shutil.ignore_patterns("__pycache__"))
    # the house without its front door, which imports torch
    script = (
        "import pathlib, sys, types\n"
        "house = types.ModuleType('fpsim')\n"
        "house.__path__ = [str(pathlib.Path.cwd() / 'fpsim')]\n"
        "sys.modules['fpsim'] = house\n"
        "from fpsim.kernels.moments import exponents_loop\n"
        "loop = exponents_loop(4)\n"
        "loop(0, 0, 0)\n"  # of no numbers
        "print('compiled' if loop.stats.cache_misses else 'loaded')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}

    def run() -> str:
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, env=environment
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert [run(), run()] == ["compiled", "loaded"]
    with (tmp_path / "fpsim" / edited).open("a") as file:
        file.write("# edited\n")
    assert run() == "compiled"
