"""Signals at random instants: what a real Ctrl-C within a call of fpsim leaves behind, each call in a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiers
from children import environment
from leftovers import ENTRIES

SCRIPT = Path(__file__).parents[1] / "interrupted.py"
# A signal that is handled while torch takes a mode off and puts it back (`_pop_mode_temporarily`) lets torch put it
# back after we have taken it off: 3 of 10,000 signals, in steps that do little else. It rounds nothing, and is taken
# off and told of at the next call.
LEFT_TO_THE_NEXT_CALL = 0.01
HALVES = [[*ENTRIES][::2], [*ENTRIES][1::2]]


def outcomes(entries: list[str], signals: int, seed: int, timeout: float) -> list[dict[str, object]]:
    command = [sys.executable, str(SCRIPT), str(signals), str(seed), *entries]
    found = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    return [json.loads(line) for line in found.stdout.splitlines()]


def check(entries: list[str], signals: int, seed: int, timeout: float) -> None:
    found = outcomes(entries, signals, seed, timeout)
    assert [(o["entry"], o["signals"]) for o in found] == [(entry, signals) for entry in entries]
    assert [o for o in found if o["still left"]] == []
    assert [o for o in found if o["left"] > max(LEFT_TO_THE_NEXT_CALL * signals, 3)] == []  # type: ignore[operator]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no interval timers")
@tiers.parametrize(
    ("entries", "signals"),
    [([*ENTRIES], 12), (HALVES[0], 130), (HALVES[1], 130)],
    ids=["all", "one half", "the other"],
    keep=lambda _, signals: signals == 12,
)
def test_an_interrupt_at_any_instant_leaves_nothing_beyond_the_next_call(entries: list[str], signals: int) -> None:
    check(entries, signals, seed=1, timeout=600)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no interval timers")
@pytest.mark.parametrize("entry", ENTRIES)
def test_nor_do_twenty_thousand(entry: str) -> None:
    check([entry], signals=20_000 // len(ENTRIES) + 1, seed=2, timeout=3600)
