"""The search for the smallest format: a local minimum, found again after a crash, and honest about noise."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiers
import torch
from sweep_tasks import wines
from torch import nn

import fpsim
from ada_loss import Job
from ada_loss.lab.cells.cells import plan
from ada_loss.lab.studies.search import SearchResult, search
from ada_loss.lab.studies.space import Point, Space
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


@pytest.mark.full
def test_the_states_of_the_optimizer_are_searched_as_a_role_is(tmp_path: Path) -> None:
    options: Any = {
        "exponent_bits": (4, 5),
        "mantissa_bits": (0, 3),
        "task_options": {"optimizer": "adam", "steps": 40},
    }
    found = search(
        "sweep_tasks:wines", roles=["error", "states"], seeds=1, trials=4, tolerance=0.05, out=tmp_path,
        show_progress=False, **options,
    )  # fmt: skip
    name = found.formats["states"]
    assert name.endswith(" per tensor")
    assert found.update == fpsim.Update(states=name, scale="power_of_two")
    assert found.policy == fpsim.Policy(error=found.formats["error"])
    assert found.bits == sum(fpsim.as_format(word.split()[0]).bits for word in found.formats.values())
    trained = [cell["config"]["format"] for cell in found.results.cells]
    assert {"format": {"error": found.formats["error"]}, "update": {"states": name, "scale": "power_of_two"}} in trained
    alone = Space(["states"], (4, 8), (3, 10))
    for point in (alone.widest()[0], Point(((7, 10),)), Point(((4, 3),))):
        plan("sweep_tasks:wines", [alone.fields(point)], ["none"])  # each is a valid format
    assert alone.fields(Point(((4, 3),)))["format"] == "fp32"
    with pytest.raises(ValueError, match="Search one after the other"):
        Space(["states"], (4, 4), (3, 3), ["head"])
    without: Any = {"optimizer": "sgd", "momentum": 0.0}
    with pytest.raises(ValueError, match="SGD without momentum has none"):
        search("sweep_tasks:wines", roles=["states"], task_options=without, out=tmp_path / "none")


def test_a_search_is_the_same_for_a_seed_and_trains_nothing_twice(tmp_path: Path) -> None:
    first = small(tmp_path)
    again = small(tmp_path)
    assert (again.formats, again.rows) == (first.formats, first.rows)
    assert all(cell["attempts"] == 1 for cell in again.results.cells)


def killed(out: Path) -> None:
    search("sweep_tasks:slow", roles=["error"], seeds=2, trials=8, tolerance=0.5, out=out, show_progress=False)


@pytest.mark.full
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


@pytest.mark.full
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


def noisy(job: Job) -> dict[str, float]:
    """As good as float32 with a mantissa of two bits or more, but for what a seed gives: 0.3 points, or 7."""
    fmt = fpsim.as_format(job.fmt.activation if isinstance(job.fmt, fpsim.Policy) else job.fmt or "fp32")
    size = job.options["size"] * (-1) ** fmt.mantissa_bits  # so that a difference does not vanish
    return {"accuracy": (0.8 if fmt.mantissa_bits >= 2 else 0.4) + size * (0.0, 1.0, -0.9, 0.4, -0.5)[job.seed]}


def searched(out: Path, size: float, seeds: int) -> SearchResult:
    options: Any = {"roles": ["activation"], "exponent_bits": (5, 5), "mantissa_bits": (0, 4), "show_progress": False}
    return search(train=noisy, seeds=seeds, trials=4, task_options={"size": size}, tolerance=0.01, out=out, **options)


def test_the_answer_says_whether_the_seeds_decide_as_the_verdict_does(tmp_path: Path) -> None:
    sure = searched(tmp_path / "sure", 0.001, 5)
    assert sure.outcome == "match"
    assert "; no more than 1 point below float32: 0" in str(sure).splitlines()[-1]
    open_ = searched(tmp_path / "open", 0.07, 3)
    last = str(open_).splitlines()[-1]
    assert "% ± " not in last
    assert " ± " in last.partition("; float32's is")[0]
    assert "; not decided at a tolerance of 1 point: " in last
    few = searched(tmp_path / "few", 0.001, 2)
    assert (few.outcome, "; not decided at a tolerance of 1 point: 2 seeds of float32" in str(few)) == ("few", True)
    for found in (sure, open_):
        (verdict,) = found.results.verdicts(found.metric, found.tolerance)
        (one,) = [one for one in verdict.combinations if one.fmt == f"activation={found.formats['activation']}"]
        assert one.outcome == found.outcome
        assert verdict.statement(one).removeprefix("open: ") in found.statement


def test_what_cannot_be_kept_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Unknown metric 'f1'\. Known: accuracy\."):
        small(tmp_path, metric="f1")
    with pytest.raises(ValueError, match=r"Even \{'activation': 'e2m0'\} is below float32 .* by more than the toler"):
        small(tmp_path, exponent_bits=(2, 2), mantissa_bits=(0, 0))


MODULES = ["0", "1", "3", "5", "7"]


def ranking_of_wines() -> fpsim.Sensitivity:
    """What a network that was trained in float32 tells about its layers."""
    task = wines(0)
    inputs, targets = task.train
    assert isinstance(inputs, torch.Tensor)
    optimizer = torch.optim.Adam(task.model.parameters(), 0.02)
    for _ in range(40):
        optimizer.zero_grad()
        task.loss(task.model(inputs), targets).backward()
        optimizer.step()
    return fpsim.sensitivity(task.model.eval(), lambda model: task.loss(model(inputs), targets), "e4m3")


def of_wines(out: Path, modules: Any, seed: int, mantissa_bits: tuple[int, int] = (2, 4)) -> SearchResult:
    return search(
        "sweep_tasks:wines",
        roles=["activation", "error"],
        exponent_bits=(4, 4),
        mantissa_bits=mantissa_bits,
        modules=modules,
        seeds=2,
        trials=8,
        tolerance=0.02,
        out=out,
        seed=seed,
        show_progress=False,
    )


def neighbours(found: SearchResult) -> set[tuple[str, str, str]]:
    """The formats and modules of an answer with a mantissa bit or a module less."""
    formats = [found.formats[role] for role in ("activation", "error")]
    wide = ", ".join(found.wide)
    less = set()
    for i, name in enumerate(formats):
        bits = fpsim.as_format(name).mantissa_bits
        if bits > 2:
            less.add((*formats[:i], f"e4m{bits - 1}", *formats[i + 1 :], wide))
    return less | {(*formats, ", ".join(n for n in found.wide if n != name)) for name in found.wide}  # type: ignore[arg-type]


@pytest.mark.full
@tiers.parametrize(("seed", "bits"), [(0, (3, 3)), (3, (2, 4))], keep={0})
def test_a_search_from_a_ranking_takes_fewer_trials_and_its_answer_is_as_small_and_as_proven(
    tmp_path: Path, seed: int, bits: tuple[int, int]
) -> None:
    ranking = ranking_of_wines()
    assert ranking[0]["module"] == "0"  # it reads what e4m3 cannot hold
    by_name = of_wines(tmp_path / "names", MODULES, seed, bits)
    ranked = of_wines(tmp_path / "ranked", ranking, seed, bits)
    assert len(ranked.rows) < len(by_name.rows)
    assert ranked.results.counts["done"] < by_name.results.counts["done"]
    assert ranked.bits <= by_name.bits
    for found in (ranked, by_name):
        tried = {(row["activation"], row["error"], row["float32"]): row for row in found.rows}
        own = tried[found.formats["activation"], found.formats["error"], ", ".join(found.wide)]
        assert own["seeds"] == 2
        assert found.accuracy == own["accuracy"] >= found.baseline - 0.02
        if bits == (2, 4):
            assert neighbours(found) <= tried.keys()
            assert not any(tried[less]["kept"] for less in neighbours(found))
        assert "0" in found.wide
    assert ranked.policy.overrides["0"] is None
    assert "with 0 in float32" in str(ranked)
    if bits == (2, 4):
        assert ranked.policy == fpsim.Policy(**ranked.formats, overrides={"0": None})  # type: ignore[arg-type]


def test_the_size_is_a_mean_over_the_modules() -> None:
    space = Space(["weight", "error"], (4, 5), (2, 3), ["a", "b", "c", "d"])
    bits = ((4, 3), (5, 2))
    assert space.size(Point(bits)) == 8 + 8
    assert space.size(Point(bits, ("a",))) == (3 * 16 + 64) / 4
    assert space.size(Point(bits, ("a", "b", "c", "d"))) == 64


def test_of_a_ranking_the_cheapest_module_is_taken_back_first_and_no_other_is_left_out() -> None:
    point = Point(((4, 3),), ("a", "b", "c"))
    bit = Point(((4, 2),), ("a", "b", "c"))
    without = {name: Point(((4, 3),), tuple(n for n in "abc" if n != name)) for name in "abc"}
    ranked = Space(["weight"], (4, 4), (2, 3), ["a", "b", "c", "d"], ranked=True)
    assert ranked.smaller(point) == [[bit, without["c"]], [without["a"], without["b"]]]
    named = Space(["weight"], (4, 4), (2, 3), ["a", "b", "c", "d"])
    assert named.smaller(point) == [[bit, without["a"], without["b"], without["c"]]]
    assert [len(start.wide) for start in ranked.widest()] == [0, 1, 2, 4]
    assert [len(start.wide) for start in named.widest()] == [0, 4]


@pytest.mark.parametrize(("ranked", "wide"), [(True, ("a", "b")), (False, ("b", "d"))])
def test_a_proposal_widens_the_first_of_a_ranking_and_any_of_a_list(ranked: bool, wide: tuple[str, ...]) -> None:
    class Trial:
        def suggest_int(self, name: str, least: int, most: int) -> int:
            assert name != "modules in float32" or (least, most) == (0, 3)
            return 2 if name == "modules in float32" else most

        def suggest_categorical(self, name: str, values: list[bool]) -> bool:
            return name in ("b in float32", "d in float32")

    space = Space(["weight"], (4, 4), (2, 3), ["a", "b", "c", "d"], ranked=ranked)
    assert space.proposal(Trial(), 3) == Point(((4, 3),), wide)


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        ("stem", "modules is 'stem'. Expected: a list of the names"),
        ([3], "modules is"),
        (["threshold"], "The pattern 'threshold' matches no module"),
        (["0", "*"], "modules names '0' and '\\*', and '0' is in both"),
    ],
)
def test_modules_that_are_none_are_refused_before_any_work(tmp_path: Path, modules: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        of_wines(tmp_path / "out", modules, 0)
    assert not (tmp_path / "out").exists()


def test_a_ranking_of_another_model_is_refused(tmp_path: Path) -> None:
    other = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    ranking = fpsim.sensitivity(other, lambda model: model(torch.ones(1, 2)).sum(), "fp16")
    with pytest.raises(ValueError, match=r"The pattern '1\.0' matches no module"):
        of_wines(tmp_path / "out", ranking, 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"roles": ["weights"]}, r"roles=\['weights'\] is invalid"),
        ({"roles": []}, "each once"),
        ({"roles": None}, "each once"),
        ({"exponent_bits": 5}, "exponent_bits=5 is invalid"),
        ({"roles": ["error", "error"]}, "each once"),
        ({"tolerance": 2}, "tolerance=2 is invalid"),
        ({"trials": 0}, "trials=0 is invalid"),
        ({"exponent_bits": (5, 4)}, "Expected: least and most, within 1 and 8"),
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


def trains(job: Job) -> dict[str, float]:
    """As good as float32 with a mantissa of two bits or more."""
    fmt = fpsim.as_format(job.fmt.activation if isinstance(job.fmt, fpsim.Policy) else job.fmt or "fp32")
    return {"val_loss": 0.5 if fmt.mantissa_bits >= 2 else 0.9}


def test_a_training_function_is_searched_and_its_study_can_be_opened(tmp_path: Path) -> None:
    import optuna

    options: Any = {"roles": ["activation"], "exponent_bits": (5, 5), "mantissa_bits": (0, 4), "show_progress": False}
    found = search(train=trains, seeds=1, trials=4, out=tmp_path / "bits", **options)
    assert found.formats == {"activation": "e5m2"}
    assert "optuna.db" not in {file.path.rpartition("/")[2] for file in psutil.Process().open_files()}
    study = optuna.load_study(study_name="bits", storage=f"sqlite:///{tmp_path / 'bits' / 'optuna.db'}")
    assert [direction.name for direction in study.directions] == ["MINIMIZE", "MINIMIZE"]
    kept = {(row["bits"], row["accuracy"]) for row in found.rows if row["complete"]}
    assert {tuple(trial.values) for trial in study.trials} == kept
    assert {tuple(trial.values) for trial in study.best_trials} == {(r["bits"], r["accuracy"]) for r in found.front()}
    (axes,) = found.plot().axes
    (front,) = (line for line in axes.lines if line.get_label() == "front")
    assert [*zip(front.get_xdata(), front.get_ydata())] == [(r["bits"], r["accuracy"]) for r in found.front()]
    again = search(train=trains, seeds=1, trials=4, out=tmp_path / "bits", **options)
    assert again.rows == found.rows
    with pytest.raises(TypeError, match=r"trains takes a job: it is a training function\. Give it as train=trains"):
        search(trains, out=tmp_path / "other")
