"""The benchmark of first calls."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from first_call import KINDS, first_and_second


@pytest.mark.timeout(300)
@pytest.mark.full
def test_a_second_process_finds_what_the_first_has_compiled() -> None:
    first, second = first_and_second(KINDS['round_to(x, "e4m3fn")'])
    assert second < first
