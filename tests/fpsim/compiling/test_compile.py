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
import tiers

import fpsim
from fpsim.compiling.sources import SOURCES
from fpsim.kernels import accumulate
from fpsim.kernels.core import ROUNDINGS
from fpsim.kernels.moments import exponents_loop, moments_loop
from fpsim.kernels.round import cpu_fitting_loop, cpu_loop
from fpsim.kernels.tally import lost_loop, tally_loop

HOUSE = Path(fpsim.__file__).parent

LOOPS = [
    *(cpu_loop(rule, shape, 32) for rule in range(len(ROUNDINGS)) for shape in range(5)),
    cpu_fitting_loop(0, 1, 32),
    tally_loop(4),
    lost_loop(4),
    moments_loop(4, False, True),
    exponents_loop(4),
    accumulate.cpu_loop(accumulate.Code(6, 1, 0, 1, 6, 1, 0)),
    accumulate.cpu_loop(accumulate.Code(2, 1, 7, 0, 0, 1, 1)),
]


def functions_behind(function: Any, seen: set[int]) -> Iterator[Any]:
    """A function and every one that it calls, compiled or not, that lies in the house."""
    if isinstance(function, type):
        return
    function = getattr(function, "py_func", None) or getattr(function, "generator", function)  # an intrinsic's
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
    assert {file.name for file in files} >= {
        "round.py",
        "tally.py",
        "moments.py",
        "compile.py",
        "core.py",
        "sums.py",
        "accumulate.py",
    }
    assert files <= {*SOURCES}
    # their constants come from files that these import
    assert HOUSE / "kernels" / "statistics.py" in SOURCES


# The house without its front door, which imports torch.
SCRIPT = """
import pathlib, sys, types
import numpy as np
house = types.ModuleType('fpsim')
house.__path__ = [str(pathlib.Path.cwd() / 'fpsim')]
sys.modules['fpsim'] = house
from fpsim.compiling.kept import silence
from fpsim.kernels.moments import exponents_loop
silence()  # of how long it takes, which depends on the machine
x, bins = np.array([1.0, 3.0, 4.0, 0.0], np.float32), np.zeros(256, np.int64)
for _ in range(2):
    for power_begins in (False, True):
        loop = exponents_loop(4, power_begins)
        bins[:] = 0
        loop(x.ctypes.data, len(x), bins.ctypes.data)
        # 1 ends the binade from 2**-1 or begins that from 2**0
        found = {int(i) - 127: int(bins[i]) for i in bins.nonzero()[0]}
        assert found == ({0: 1, 1: 1, 2: 1} if power_begins else {-1: 1, 1: 2}), found
        print('compiled' if loop.was_compiled else 'loaded')
    exponents_loop.cache_clear()
"""


@pytest.fixture
def house(tmp_path: Path) -> Path:
    shutil.copytree(HOUSE, tmp_path / "fpsim", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def run(folder: Path, **environment: str) -> tuple[list[str], str]:
    """Which of two loops were compiled and which were loaded, twice over; and what was said beside it."""
    inherited = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    command, environment = [sys.executable, "-c", SCRIPT], {**inherited, **environment}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr


NEW, KEPT = ["compiled", "compiled", "loaded", "loaded"], ["loaded"] * 4


@tiers.parametrize(
    "edited", ["kernels/core.py", "kernels/statistics.py", "compiling/compile.py"], keep={"kernels/statistics.py"}
)
def test_an_edit_of_a_file_that_is_compiled_in_compiles_anew(edited: str, house: Path) -> None:
    assert [run(house), run(house)] == [(NEW, ""), (KEPT, "")]
    with (house / "fpsim" / edited).open("a") as file:
        file.write("# edited\n")
    assert run(house) == (NEW, "")


def _flip(content: bytes) -> bytes:
    middle = len(content) // 2  # among the machine code
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGES = {
    "empty": lambda content: b"",
    "torn": lambda content: content[: len(content) // 2],
    "flipped": _flip,
    "zeros": lambda content: bytes(len(content)),
}


@pytest.mark.full
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_compiled_anew_and_replaced(damage: str, house: Path) -> None:
    assert run(house) == (NEW, "")
    files = sorted(house.rglob("*.o"))
    whole = [file.read_bytes() for file in files]
    assert len(files) == 2
    for file in files:
        file.write_bytes(DAMAGES[damage](file.read_bytes()))
    assert run(house) == (NEW, "")
    assert run(house) == (KEPT, "")
    assert sorted(house.rglob("*.o")) == files
    assert all(len(file.read_bytes()) == len(content) for file, content in zip(files, whole, strict=True))


@pytest.mark.full
def test_a_file_does_not_stand_in_for_another(house: Path) -> None:
    assert run(house) == (NEW, "")
    first, second = sorted(house.rglob("*.o"))
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    assert run(house) == (NEW, "")


def test_a_folder_that_cannot_be_written_costs_a_warning_and_nothing_else(house: Path) -> None:
    # files where folders are wanted: nobody can write there, not even root
    nowhere = str(house / "file")
    Path(nowhere).touch()
    (house / "fpsim" / "compiling" / "__pycache__").touch()
    for _ in range(2):
        found, said = run(house, HOME=nowhere, XDG_CACHE_HOME=nowhere, NUMBA_CACHE_DIR=nowhere)
        assert found == ["compiled"] * 4
        assert said.count("RuntimeWarning: Compiled loops cannot be kept on disk") == 1
        assert "Set NUMBA_CACHE_DIR to a folder that can be written" in said


@pytest.mark.full
def test_a_file_that_cannot_be_replaced_costs_a_warning_and_nothing_else(house: Path) -> None:
    assert run(house) == (NEW, "")
    for file in house.rglob("*.o"):
        file.unlink()
        file.mkdir()
    found, said = run(house)
    assert found == ["compiled"] * 4
    assert said.count("RuntimeWarning: Compiled loops cannot be kept on disk") == 1
    assert list(house.rglob("*.tmp")) == []
