"""Folders of many cells: what a report lists, reads and draws of them is bounded, and what it leaves out is said."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sweep_tasks import tiny

from ada_loss.files import write_atomically
from ada_loss.lab.cells import telemetry as telemetry_file
from ada_loss.lab.cells.ledger import Ledger
from ada_loss.lab.cells.telemetry import arrays_of, curves_of, is_of_curve, npz, telemetry
from ada_loss.lab.results import Results, curves, drawings, figures, report, verdict
from ada_loss.lab.training import train

SEEDS = 10


def written(out: Path, formats: tuple[str, ...] = ("fp32", "fp16", "e5m2"), seeds: int = SEEDS) -> Results:
    """A sweep whose losses fall from the seed to a tenth of it; of e5m2 the accuracy is far below."""
    with Ledger(out / "ledger.sqlite") as ledger:
        for fmt in formats:
            for seed in range(seeds):
                config = {"task": "t", "format": fmt, "rounding": "up", "scaling": "none", "seed": seed, "options": {}}
                cell = f"{formats.index(fmt):08x}{seed:08x}"
                ledger.add([(cell, config)])
                ledger.start(cell)
                content = npz({"losses": np.linspace(seed + 1.0, (seed + 1) / 10, 5), "scales": np.ones(5)})
                write_atomically(out / "telemetry" / f"{cell}.npz", content, is_kept=False)
                value = 0.5 if fmt == "e5m2" else 0.9 + 0.001 * seed
                result = {"metrics": {"accuracy": value}, "diverged": False, "seconds": 1.0, "skipped": 0}
                ledger.finish(cell, {**result, "telemetry_bytes": len(content)})
    return Results(out)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file of telemetry is read."""
    counted = Counter[str]()
    content = telemetry_file.telemetry_content

    def read(out: Path, cell: str) -> bytes:
        counted[cell] += 1
        return content(out, cell)

    monkeypatch.setattr(telemetry_file, "telemetry_content", read)
    return counted


def test_a_report_lists_what_went_wrong_first_and_says_how_many_it_does_not_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = written(tmp_path)
    failed, diverged = results.cells[17], results.cells[29]
    failed |= {"state": "failed", "error": "MemoryError: none left"}
    diverged["diverged"] = 1
    monkeypatch.setattr(report, "MOST_CELLS", 5)
    page = results.report().read_text()
    listed = [*range(3), 17, 29]
    assert page.count("<details id=") == len(listed)
    for place, cell in enumerate(results.cells):
        assert (f'<details id="cell-{cell["id"]}">' in page) == (place in listed)
        assert (f'<a href="#cell-{cell["id"]}">{place + 1}</a>' in page) == (place in listed)
    assert "25 cells are not listed" in page
    assert "<b>30</b> of 30 trainings done" in page  # all count, listed or not
    assert page.count(results.cells[8]["id"]) == 0  # nor is one named by what is drawn


def test_a_report_draws_the_curves_of_the_first_seeds_of_each_setting_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: Counter[str]
) -> None:
    results = written(tmp_path)
    monkeypatch.setattr(report, "MOST_CURVES", 4)
    monkeypatch.setattr(report, "MOST_READ", 7)
    monkeypatch.setattr(verdict, "MOST_READ", 3)
    page = results.report().read_text()
    assert "loss, lower is better: mean over the first 2 seeds, and deviation" in page
    assert len(reads) <= 4 + 2 * 3 + 3
    monkeypatch.setattr(report, "MOST_READ", 30)
    assert "loss, lower is better: mean over the seeds, and deviation" in results.report().read_text()
    two = {curve.settings["format"]: curve for curve in curves.curves(results, "loss", None, 5, most_seeds=2)}
    assert two["fp16"].seeds == (0, 1)
    assert two["fp16"].mean == pytest.approx(np.linspace(1.5, 0.15, 5))


def test_a_file_is_read_once_for_all_curves_or_again_where_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: Counter[str]
) -> None:
    results = written(tmp_path)
    first = {}
    for room, most in ((curves.MOST_BYTES, 1), (0, 2)):
        monkeypatch.setattr(curves, "MOST_BYTES", room)
        reads.clear()
        read = curves.CurveReader(results)
        for name in ("loss", "scale"):
            means = [curve.mean for curve in curves.curves(results, name, None, 5, read)]
            assert np.array_equal(means, first.setdefault(name, means))
        assert {*reads.values()} == {most}


def test_the_arrays_of_curves_are_all_that_curves_need() -> None:
    run = train(tiny(0), "e5m2", scaling="adaptive", epochs=2, record_every=1, evaluate_every=1)
    content = npz(telemetry(run))
    whole, some = arrays_of(content), arrays_of(content, is_of_curve)
    assert 0 < len(some) < len(whole)
    curves_of_all, curves_of_some = curves_of(whole), curves_of(some)
    assert [*curves_of_all] == [*curves_of_some]
    assert {"loss", "accuracy", "underflow/error"} <= {*curves_of_all}
    for name, points in curves_of_all.items():
        assert np.array_equal(points, curves_of_some[name])


def test_many_seeds_are_drawn_as_few_dots_from_the_least_to_the_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (judged,) = written(tmp_path).verdicts()
    for most, count in ((SEEDS, SEEDS), (4, 4)):
        monkeypatch.setattr(drawings, "MOST_DOTS", most)
        (panel,) = drawings.difference_panels(judged)["panels"]  # type: ignore[index]
        assert [len(line["dots"]) for line in panel["lines"]] == [count, count]
    values = np.random.default_rng(0).normal(size=1000)
    few = figures.evenly(values.tolist(), 5)
    assert few == [np.sort(values)[round(place)] for place in (0, 999 / 4, 999 / 2, 3 * 999 / 4, 999)]


CONFIGURATIONS: list[dict[str, Any]] = [
    *({"task": "t", "seed": seed, "options": {"a": 1, "b": [2]}} for seed in (0, 7, -3, 10**17, 10**30)),
    *({"task": "t", "seed": 3, "options": {"seed": seed}} for seed in (3, 4)),
    *({"task": '"seed": 5, "é\\', "seed": seed, "options": {}} for seed in (5, 6)),
    *({"task": "t", "seed": seed, "options": {}} for seed in (1.0, 1e300, True, None, "2")),
]


def test_configurations_that_differ_in_the_seed_are_decoded_as_each_alone(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.add((str(i), config) for i, config in enumerate(CONFIGURATIONS))
        rows = ledger.rows()
    assert [repr(row["config"]) for row in rows] == [repr(json.loads(json.dumps(one))) for one in CONFIGURATIONS]
    assert not any(row["damaged"] for row in rows)
