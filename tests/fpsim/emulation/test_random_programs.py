"""Random forwards compute in the emulation what they compute natively: numbers, dtypes, what they write, gradients.

RANDOM_PROGRAMS=1000000 pytest -n 0 -s -m slow tests/fpsim/emulation/test_random_programs.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import programs
import pytest
from children import environment
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st
from programs import GENES, LENGTHS, NATIVE, NOT_OWN, Genes, draw, execute
from tiers import parametrize

MANY = int(os.environ.get("RANDOM_PROGRAMS", "1000000"))
FEW = {"bf16": 1200, "fp16": 600}
CHUNK = 5000  # examples of one seed, after which hypothesis begins again
STATEMENT = st.tuples(*[st.integers(0, 255)] * GENES)
PROGRAMS = st.lists(STATEMENT, min_size=LENGTHS[0] + 1, max_size=LENGTHS[1] + 1).map(tuple)
FORMATS = pytest.mark.parametrize("fmt", NATIVE)


def is_short(fmt: str, count: int) -> bool:
    return count < FEW[fmt]


def hold(
    fmt: str, examples: int, number: int, without: frozenset[str] = frozenset(), length: int | None = None
) -> None:
    """Draw programs from a seed, and print the shortest one that differs, if there is one.

    length: of programs with gradients; in a short one no tensor is used twice, and gradients are compared exactly.
    """

    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(PROGRAMS)
    def equals_native(genes: Genes) -> None:
        genes = genes if length is None else ((1, *genes[0][1:]), *genes[1 : length + 1])
        result = execute(draw(genes, fmt, without), fmt)
        assume(result.native is not None)
        assert not result.differences, f"hypothesis seed {number}, {fmt}:\n{result}"

    equals_native()


@parametrize(("fmt", "count"), [*FEW.items(), *[(fmt, count // 8) for fmt, count in FEW.items()]], keep=is_short)
def test_random_programs_equal_native_ones(fmt: str, count: int) -> None:
    print(f"{count} programs from seed 0")
    hold(fmt, count, number=0)


@parametrize(("fmt", "count"), [("bf16", 40), ("fp16", 150)], keep=lambda _, count: count <= 40)
def test_random_functions_and_hooks_have_the_gradients_of_native_ones(fmt: str, count: int) -> None:
    """Of two to six operations, in one another, in checkpoints, in vmap, with gradients that are missing or turned."""
    hold(fmt, count, number=0, without=NOT_OWN, length=3)


MANY_COMPILED = pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(10**5)])


@pytest.mark.full
@pytest.mark.parametrize("count", [12, MANY_COMPILED])
def test_compiled_programs_compute_what_they_compute_without_a_compiler(count: int) -> None:
    command = [sys.executable, str(Path(programs.__file__)), "--compiled", "--count", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"0 of {count} programs differ" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(10**6)
@FORMATS
def test_many_random_programs_equal_native_ones(fmt: str) -> None:
    for number in range(1, 1 + MANY // CHUNK):
        hold(fmt, CHUNK, number)
        print(f"{fmt}: {number * CHUNK} programs", flush=True)
