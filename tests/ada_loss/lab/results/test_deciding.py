"""What a task can decide: the line before a sweep, the list of tasks, and the tolerance in simulated sweeps."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ada_loss.lab.results import deciding
from ada_loss.lab.results.deciding import Spread, decidable, spread_of, spreads, task_rows
from ada_loss.lab.results.judgement import LEVEL, decide, level_of_tests, smallest_tolerance
from ada_loss.lab.sweep import driver
from ada_loss.lab.sweep.driver import sweep
from ada_loss.lab.tasks import TASKS


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_a_setting_that_equals_float32_is_found_at_that_tolerance_in_four_of_five_sweeps(seeds: int) -> None:
    differences = 0.3 * np.random.default_rng(seeds).standard_normal((20_000, 1, seeds))
    tolerance = smallest_tolerance(0.3, seeds)
    level = level_of_tests(LEVEL, 1, seeds)
    said = decide(differences.mean(2), differences.var(2, ddof=1), np.array([seeds]), tolerance, level).outcomes
    # a t-test's power by the sum of two quantiles is an approximation, good to some points with three seeds
    assert (said == "match").mean() == pytest.approx(0.8, abs=0.06)


def test_the_tolerance_grows_with_the_spread_and_the_settings_and_falls_with_the_seeds() -> None:
    assert smallest_tolerance(0.6, 5) == pytest.approx(2 * smallest_tolerance(0.3, 5))
    by_seeds = [smallest_tolerance(1.0, n) for n in (3, 5, 10, 30)]
    assert by_seeds == sorted(by_seeds, reverse=True)
    by_settings = [smallest_tolerance(1.0, 10, settings) for settings in (1, 2, 5, 15)]
    assert by_settings == sorted(by_settings)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        "digits": Spread("accuracy", 30, 0.97, 0.005, 30, 0.006),
        "chars": Spread("bits_per_character", 1, 3.5, math.nan, 0, math.nan),
    }
    monkeypatch.setattr(deciding, "spread_of", known.get)


@pytest.mark.usefixtures("measured")
def test_what_seeds_and_settings_can_decide_is_said_in_the_metrics_units() -> None:
    # 0.6 points, 5 seeds, at a level of 4.5 %: (2.880 + 0.941) / sqrt(5) deviations
    words = decidable("digits", 5)
    assert words.startswith(
        "digits: with 5 seeds and 1 setting, one that equals float32 is likely found from a tolerance of 1.03 % in acc"
    )
    assert "over 30 seeds" in words
    assert "4 settings" in decidable("digits", 5, 4)
    assert decidable("digits", 2) == "digits: 2 seeds cannot decide anything. Give seeds=3, better 5."
    assert decidable("chars", 5) == decidable("mine:task", 5) == decidable("digits", 5, 0) == ""


@pytest.mark.usefixtures("measured")
def test_every_task_has_a_row_and_those_that_were_not_measured_say_so() -> None:
    rows = {row["task"]: row for row in task_rows()}
    assert [*rows] == [*TASKS]
    assert rows["digits"]["float32"] == "97.00 % ± 0.50 %"
    assert (rows["digits"]["3 seeds"], rows["digits"]["5 seeds"]) == ("1.94 %", "1.03 %")
    assert (rows["chars"]["float32"], rows["chars"]["5 seeds"]) == ("3.5", "")
    assert rows["cifar10"]["metric"] == "not measured"


@pytest.mark.usefixtures("measured")
def test_a_sweep_says_it_before_it_starts_unless_the_task_has_other_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver, "run_cells", lambda *_, **__: SimpleNamespace(counts=Counter()))
    sweep("digits", ["fp16", "bf16"], ["none", 8], seeds=3, out=tmp_path)
    assert "digits: with 3 seeds and 4 settings, one that equals" in capsys.readouterr().err
    sweep("digits", ["fp16"], ["none"], seeds=3, out=tmp_path, task_options={"epochs": 1})
    sweep("digits", ["fp16"], ["none"], seeds=3, out=tmp_path, show_progress=False)
    assert "equals float32" not in capsys.readouterr().err


def test_the_file_of_spreads_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        "digits": Spread("accuracy", 30, 0.97, 0.005, 30, 0.006),
        "chars": Spread("bits_per_character", 1, 3.5, math.nan, 0, math.nan),
    }
    file = tmp_path / "spread.json"
    file.write_bytes(spreads(known))
    assert json.loads(file.read_text())["chars"]["paired"] is None
    monkeypatch.setattr(deciding, "FILE", file)
    assert spread_of("digits") == known["digits"]
    found = spread_of("chars")
    assert found is not None
    assert math.isnan(found.paired)
    assert spread_of("mine:task") is None
