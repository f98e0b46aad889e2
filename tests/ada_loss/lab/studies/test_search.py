"""The search for the smallest format: a local minimum, found again after a crash, and honest about noise."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

import fpsim
from ada_loss.lab.studies.search import SearchResult, search
from ada_loss.lab.sweep.driver import sweep

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["ada_loss.lab.studies.search"])


def small(out: Path, **options: Any) -> SearchResult:
    arguments: dict[str, Any] = {
        "roles": ["activation"],
        "seeds": 1,
        "trials": 6,
        "tolerance": 0.0,
        "show_progress": False,
    }
    return search("sweep_tasks:sorts", **{**arguments, **options}, out=out)


def accuracy_of(out: Path, name: str) -> float:
    results = sweep("sweep_tasks:sorts", [{"activation": name}], ["none"], out=out, baseline=False, show_progress=False)
    return float(results.rows()[0]["accuracy"])


def test_the_answer_keeps_the_accuracy_and_no_bit_can_be_taken_from_it(tmp_path: Path) -> None:
    found = small(tmp_path / "search")
    name = found.formats["activation"]
    fmt = fpsim.as_format(name)
    assert found.accuracy == found.baseline == accuracy_of(tmp_path / "itself", name)
    assert found.bits == fmt.bits
    assert found.policy == fpsim.Policy(activation=name)
    for e, m in ((fmt.exponent_bits - 1, fmt.mantissa_bits), (fmt.exponent_bits, fmt.mantissa_bits - 1)):
        if e >= 2 and m >= 0:
            assert accuracy_of(tmp_path / f"{e}{m}", f"e{e}m{m}") < found.baseline


def test_a_search_is_the_same_for_a_seed_and_trains_nothing_twice(tmp_path: Path) -> None:
    first = small(tmp_path)
    again = small(tmp_path)
    assert (again.formats, again.rows) == (first.formats, first.rows)
    assert all(cell["attempts"] == 1 for cell in again.results.cells)


def killed(out: Path) -> None:
    search("sweep_tasks:slow", roles=["error"], seeds=2, trials=8, tolerance=0.5, out=out, show_progress=False)


def test_a_search_that_is_killed_goes_the_same_way_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"roles": ["error"], "seeds": 2, "trials": 8, "tolerance": 0.5, "show_progress": False}
    expected = search("sweep_tasks:slow", out=tmp_path / "undisturbed", **options)
    out = tmp_path / "killed"
    for wait in (3.0, 2.5):
        process = PROCESSES.Process(target=killed, args=(out,))
        process.start()
        time.sleep(wait)
        process.kill()
        process.join()
    found = search("sweep_tasks:slow", out=out, **options)
    assert (found.formats, found.rows) == (expected.formats, expected.rows)


def test_workers_try_several_at_once_on_one_cluster(tmp_path: Path) -> None:
    found = small(tmp_path, workers=2, trials=4)
    assert found.accuracy == found.baseline
    assert len({session["engine"] for session in found.results.sessions}) == 1


def test_hopeless_policies_get_one_seed_and_are_never_kept(tmp_path: Path) -> None:
    found = small(tmp_path, seeds=3, tolerance=0.01, trials=10)
    hopeless = [row for row in found.rows if row["accuracy"] < found.baseline - 0.05]
    assert hopeless
    assert all(row["seeds"] == 1 and not row["kept"] for row in hopeless)
    assert all(row["seeds"] == 3 for row in found.rows if row["kept"])


def test_the_front_holds_what_nothing_beats_in_bits_and_accuracy(tmp_path: Path) -> None:
    found = small(tmp_path)
    front = found.front()
    for row in found.rows:
        if row["complete"]:
            assert any(f["bits"] <= row["bits"] and f["accuracy"] >= row["accuracy"] for f in front)
    assert [row["bits"] for row in front] == sorted({row["bits"] for row in front})
    assert len(found.to_frame()) == len(found.rows)


def test_a_trial_that_diverged_hides_nothing_of_the_front(tmp_path: Path) -> None:
    rows = [{"bits": b, "accuracy": a, "complete": True} for b, a in ((4, math.nan), (6, 0.9), (8, 0.8), (9, 0.95))]
    result = dataclasses.replace(small(tmp_path), rows=rows)
    assert [row["bits"] for row in result.front()] == [6, 9]


def test_what_cannot_be_kept_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Unknown metric 'f1'\. Known: accuracy\."):
        small(tmp_path, metric="f1")
    with pytest.raises(ValueError, match=r"Even \{'activation': 'e2m0'\} is below float32 .* by more than the toler"):
        small(tmp_path, exponent_bits=(2, 2), mantissa_bits=(0, 0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"roles": ["weights"]}, r"roles=\['weights'\] is impossible"),
        ({"roles": []}, "each once"),
        ({"roles": None}, "each once"),
        ({"exponent_bits": 5}, "exponent_bits=5 is impossible"),
        ({"roles": ["error", "error"]}, "each once"),
        ({"tolerance": 2}, "tolerance=2 is impossible"),
        ({"trials": 0}, "trials=0 is impossible"),
        ({"exponent_bits": (5, 4)}, "Possible: least and most, within 1 and 8"),
        ({"mantissa_bits": (0, 30)}, "within 0 and 23"),
        ({"exponent_bits": (1, 8)}, "A float32 cannot hold"),
        ({"scaling": "torchh"}, "Unknown scaling method 'torchh'"),
        ({"rounding": "neerest"}, "neerest"),
        ({"seeds": 0}, "seeds is empty"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_any_work(tmp_path: Path, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        small(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
