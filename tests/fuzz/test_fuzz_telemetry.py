"""Telemetry that was damaged: it is found, by its digest or by the reader, and costs its own pictures only."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from damage import accidents, damaged
from fuzzing import documented, fuzz
from hypothesis import strategies as st

from ada_loss.lab.cells.telemetry import read_telemetry, telemetry_path
from ada_loss.lab.results import Results
from ada_loss.lab.sweep.driver import sweep


@cache
def finished() -> tempfile.TemporaryDirectory[str]:
    """The folder of a sweep that is done and recorded everything."""
    folder = tempfile.TemporaryDirectory()
    options: Any = {"task_options": {"epochs": 2, "record_every": 1, "evaluate_every": 1}, "baseline": False}
    sweep("sweep_tasks:tiny", ["e5m2"], ["adaptive", "torch"], seeds=2, out=folder.name, show_progress=False, **options)
    return folder


@pytest.mark.full
@fuzz(10, happened=accidents(), which=st.integers(0, 3))
def test_fuzz_damaged_telemetry_is_found_and_the_report_written(happened: Any, which: int) -> None:
    source = finished()
    whole = Results(source.name)
    cell = whole.cells[which]["id"]
    content = telemetry_path(Path(source.name), cell).read_bytes()
    changed = damaged(content, happened)
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out"
        shutil.copytree(source.name, out)
        telemetry_path(out, cell).write_bytes(changed)
        results = Results(out)
        with documented(ValueError) as outcome:
            results.telemetry(cell)
        assert (outcome.error is None) == (changed == content)
        with documented(ValueError):
            read_telemetry(out, cell)
        text = results.report(out / "report.html").read_text()
        assert "4</b> of 4 trainings done" in text
        assert text.count("<details id=") == 4
