"""Formats in turn as cells of a sweep, and trainings that are one until their formats part."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import own_trainings
import pytest
import sweep_tasks
import torch

import ada_loss
from ada_loss.lab.cells.cell_formats import label
from ada_loss.lab.cells.cells import Cell, plan, plan_all, stored_cell
from ada_loss.lab.results import Results
from ada_loss.lab.sweep.config import read_sweep
from ada_loss.lab.sweep.driver import resume, sweep
from ada_loss.lab.sweep.prepare import Branches
from ada_loss.lab.training import checkpoints, train
from ada_loss.lab.training.job import Job, run_job


def turns(*formats: Any) -> dict[str, Any]:
    """Formats in turn: the first, then (start, format)."""
    first, *others = formats
    return {"schedule": {0: first, **dict(others)}}


# Cells


def test_equal_schedules_are_one_cell_and_any_change_makes_another() -> None:
    def id_of(fmt: Any, **changes: Any) -> str:
        return plan("digits", [fmt], ["none"], **changes)[0].id

    one = id_of({"schedule": {0: "fp16", 0.8: {"error": "half", "weight": None}}})
    assert one == id_of({"schedule": [[0.80, {"error": "fp16"}], [0.0, "half"]]})
    assert one == id_of({"schedule": {0: "fp16", 0.3: "half", 0.8: {"error": "fp16"}}})
    assert id_of({"schedule": {0: "half"}}) == id_of({"schedule": {0: "fp16", 0.5: "half"}}) == id_of("fp16")
    others = [
        {"schedule": {0: "fp16", 0.7: {"error": "fp16"}}},
        {"schedule": {0: "fp16", 8: {"error": "fp16"}}},
        {"schedule": {0: "bf16", 0.8: {"error": "fp16"}}},
        {"schedule": {0: "fp16", 0.8: {"error": "fp16"}, 0.9: "fp16"}},
    ]
    assert len({one, id_of("fp16"), id_of({"error": "fp16"}), *map(id_of, others)}) == 7
    assert id_of(others[0], seeds=[1]) != id_of(others[0])


def test_a_cell_of_formats_in_turn_comes_back_from_json_as_it_was() -> None:
    cells = plan("digits", [turns("mxfp4", (0.8, "recipe:bf16")), turns({"error": "e5m2"}, (300, "fp16"))], ["none"])
    for cell in cells:
        config = json.loads(json.dumps(cell.config))
        assert stored_cell(cell.id, config).config == cell.config == config
        assert plan("digits", [config["format"]], ["none"])[0].id == cell.id  # what it holds is what may be given
    assert [label(cell.config["format"]) for cell in cells] == [
        "mxfp4 then recipe:bf16 from 0.8",
        "error=e5m2 then fp16 from step 300",
    ]


def test_what_is_no_schedule_has_a_label_too() -> None:
    assert label({"schedule": 5}) == "schedule=5"
    assert label({"schedule": {0.5: "fp16"}}) == "0.5=fp16"


def test_scaling_and_roundings_are_left_out_where_no_format_has_use_for_them() -> None:
    def words(fmt: Any) -> list[str]:
        grid = {"scaling": ["torch", 8], "roundings": ["up", "stochastic"]}
        return [f"{c.config['scaling']} {c.config['rounding']}" for c in plan("digits", [fmt], **grid)]

    assert words(turns("mxfp4", (0.5, "fp32"))) == ["none up", "none stochastic"]
    assert words(turns("recipe:fp16", (0.5, "recipe:bf16"))) == words("recipe:fp16")
    assert words(turns("recipe:mxfp8", (0.5, "fp32"))) == words("recipe:mxfp8")
    assert words(turns("recipe:bf16", (0.5, "e5m2"))) == words("e5m2")
    assert len(words("e5m2")) == 4


@pytest.mark.parametrize(
    ("fmt", "options", "words"),
    [
        (turns("fp16", (1.5, "bf16")), {}, "has the start 1.5"),
        (turns("fp16", (0.5, "fp61")), {}, "Unknown format 'fp61'"),
        (turns("fp16", (0.5, {"eror": "fp16"})), {}, "'eror'"),
        (turns("fp16", (0.5, {"error": "fp16", "rounding": "up"})), {}, "give roundings="),
        (turns("fp16", (20, "bf16")), {"steps": 20}, "no step for it: the training has 20"),
        ({0: "fp16", 0.8: "bf16"}, {}, "Expected for formats in turn: {'schedule': {0: 'fp16', 0.8: 'bf16'}}"),
        ({**turns("fp16", (0.5, "bf16")), "error": "e5m2"}, {}, "has 'error' besides its key"),
        ("fp16", {"schedule": {0: "fp16", 0.8: "bf16"}}, "It is that of the learning rate."),
    ],
)
def test_what_is_no_schedule_is_refused_before_any_work(fmt: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        plan("digits", [fmt], ["none"], options=options)
    assert words in str(caught.value)


def test_a_file_says_formats_in_turn_as_python_does(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "task: digits\nformats:\n"
        "  - schedule: {0: mxfp4, 0.8: 'recipe:bf16'}\n"
        "  - schedule: {0: fp16, 200: {error: e5m2}}\n"
    )
    read = read_sweep(tmp_path / "mine.yaml")["formats"]
    assert read == [turns("mxfp4", (0.8, "recipe:bf16")), turns("fp16", (200, {"error": "e5m2"}))]
    assert len(plan("digits", read, ["none"])) == 2


# Sweeps

STEPS = 20
TREE = [
    "e5m2",
    turns("e5m2", (0.5, "bf16")),
    turns("e5m2", (0.5, "bf16"), (0.8, "fp32")),
    turns("e5m2", (0.5, "bf16"), (0.8, "e3m4")),
    turns("e5m2", (0.5, "mxfp4")),
    turns("e5m2", (0.8, "fp32")),
    turns("fp16", (0.5, "bf16")),
]
TRAINED_ONCE = 20 + 10 + 4 + 4 + 10 + 4 + 20  # of 7 * 20: what is left of each behind the last state that it shares


def swept(out: Path, task: Any = "sweep_tasks:counted", formats: Any = TREE, **changes: Any) -> Results:
    options = {"steps": STEPS, "record_every": 1, "batch_size": 4}
    arguments = {"scaling": ["torch"], "roundings": ["stochastic"], "baseline": False, "show_progress": False}
    return sweep(task, formats, **{**arguments, "task_options": options, **changes}, out=out)


def outcomes(results: Results) -> dict[str, Any]:
    """Every cell's row, but for its time, and every byte of its telemetry."""
    found = {}
    for row in results.rows():
        del row["seconds"]
        arrays = results.telemetry(row["id"])
        found[row["id"]] = row, {key: (x.dtype, x.shape, x.tobytes()) for key, x in arrays.items()}
    return found


@pytest.fixture
def steps_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """How many steps all trainings together have taken, in all processes."""
    file = tmp_path / "steps"
    monkeypatch.setenv("SWEEP_TEST_STEPS", str(file))
    return lambda: len(file.read_bytes())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Each cell alone in a sweep of its own, with nothing to share."""
    with pytest.MonkeyPatch.context() as patched:
        folder = tmp_path_factory.mktemp("alone")
        patched.setenv("SWEEP_TEST_STEPS", str(folder / "steps"))
        found: dict[str, Any] = {}
        for i, fmt in enumerate(TREE):
            found |= outcomes(swept(folder / str(i), formats=[fmt]))
        assert len((folder / "steps").read_bytes()) == len(TREE) * STEPS
        yield found


def test_trainings_that_begin_alike_are_trained_once_to_the_same_bits(
    tmp_path: Path, steps_taken: Any, expected: dict[str, Any]
) -> None:
    results = swept(tmp_path / "here")
    assert outcomes(results) == expected
    assert steps_taken() == TRAINED_ONCE
    assert [*(tmp_path / "here" / "checkpoints").iterdir()] == []


@pytest.mark.full
def test_workers_wait_for_what_they_share(tmp_path: Path, steps_taken: Any, expected: dict[str, Any]) -> None:
    assert outcomes(swept(tmp_path / "two", workers=2, seeds=1)) == expected
    assert steps_taken() == TRAINED_ONCE


@pytest.mark.full
def test_a_first_training_that_is_killed_behind_the_branch_is_not_needed_again(
    tmp_path: Path, steps_taken: Any, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_TEST_DIES_AFTER", "13")
    results = swept(tmp_path / "killed", formats=TREE[:-1], workers=2)
    assert outcomes(results).items() < expected.items()
    assert (tmp_path / "died").exists()
    assert steps_taken() == TRAINED_ONCE - STEPS + 3  # it goes on from the state at 10


def test_an_interrupted_sweep_goes_on_from_what_was_shared(
    tmp_path: Path, steps_taken: Any, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sweep_tasks, "INTERRUPTED_AFTER", 13)
        with pytest.raises(KeyboardInterrupt):
            swept(tmp_path / "s")
    assert len([*(tmp_path / "s" / "checkpoints").glob("*.branch")]) == 1
    assert outcomes(resume(tmp_path / "s", trust=True, show_progress=False)) == expected
    assert steps_taken() == TRAINED_ONCE + 3


def test_cells_that_are_added_later_begin_from_states_that_were_kept(
    tmp_path: Path, steps_taken: Any, expected: dict[str, Any]
) -> None:
    alone = turns("e5m2", (0.5, "bf16"))
    first = swept(tmp_path / "s", formats=[alone], keep_states=True)
    assert (len(first.rows()), steps_taken()) == (1, STEPS)
    results = swept(tmp_path / "s", formats=[alone, turns("e5m2", (0.5, "mxfp4"))], keep_states=True)
    assert (len(results.rows()), steps_taken()) == (2, STEPS + STEPS // 2)
    assert outcomes(results).items() < expected.items()
    assert len([*(tmp_path / "s" / "checkpoints").iterdir()]) == 1
    swept(tmp_path / "s", formats=[alone, turns("e5m2", (0.5, "mxfp4")), "fp16"])
    assert [*(tmp_path / "s" / "checkpoints").iterdir()] == []


def test_a_damaged_state_is_left_aside(tmp_path: Path, steps_taken: Any, expected: dict[str, Any]) -> None:
    cells = plan_all({"task": "sweep_tasks:counted", "formats": TREE, "scaling": ["torch"], **SETTINGS})
    folder = tmp_path / "s" / "checkpoints"
    files = {path for cell in cells for path in Branches(cells, folder).of(cell.id).values()}
    folder.mkdir(parents=True)
    for path in files:
        path.write_bytes(b"not a state")
    with pytest.warns(UserWarning, match=r"\.branch cannot be read .* Training starts over"):
        assert outcomes(swept(tmp_path / "s")) == expected
    assert steps_taken() == len(TREE) * STEPS
    assert len(files) == 3


SETTINGS: dict[str, Any] = {
    "roundings": ["stochastic"],
    "task_options": {"steps": STEPS, "record_every": 1, "batch_size": 4},
}


def test_seeds_share_nothing_with_each_other(tmp_path: Path, steps_taken: Any) -> None:
    formats = [turns("e5m2", (0.5, "bf16")), turns("e5m2", (0.5, "fp32"))]
    results = swept(tmp_path / "s", formats=formats, seeds=3)
    assert steps_taken() == 3 * (20 + 10)
    beginnings = {results.telemetry(row["id"])["losses"][:10].tobytes() for row in results.rows()}
    assert len(beginnings) == 3
    for row in results.rows():
        fmt = formats[0] if "bf16" in row["format"] else formats[1]
        options: dict[str, Any] = {"seed": row["seed"], "scaling": "torch", "steps": STEPS, "batch_size": 4}
        alone = train(sweep_tasks.counted(row["seed"]), fmt, "stochastic", **options)
        assert results.telemetry(row["id"])["losses"].tolist() == pytest.approx(alone.losses, abs=0)


def test_tables_and_the_report_show_formats_in_turn(tmp_path: Path, steps_taken: Any) -> None:
    results = swept(tmp_path / "s", formats=["e5m2", turns("e5m2", (0.5, {"error": "e4m3fn"}))], baseline=True, seeds=3)
    name = "e5m2 then error=e4m3fn from 0.5"
    assert [row["format"] for row in results.rows()] == ["fp32"] * 3 + ["e5m2"] * 3 + [name] * 3
    assert name in str(results.table())
    assert name in results.report().read_text()
    assert name in str(results.verdicts()[0])
    assert len(results.chosen_rows({"format": turns("e5m2", (0.5, {"error": "e4m3fn"}))})) == 3
    assert results.compare(name, "e5m2").metric == "accuracy"


# Which states are shared


def ids_of(*formats: Any, **changes: Any) -> tuple[list[Cell], list[str]]:
    cells = plan("digits", formats, ["none"], **changes)
    return cells, [cell.id for cell in cells]


def test_cells_share_what_is_the_same_up_to_where_their_formats_part(tmp_path: Path) -> None:
    cells, (a, b, c, d, e) = ids_of(
        turns("fp16", (0.5, "bf16"), (0.8, "fp32")),
        turns("fp16", (0.5, "bf16"), (0.8, "e5m2")),
        turns("fp16", (0.5, "e5m2")),
        turns("bf16", (0.5, "e5m2")),
        turns("fp16", (100, "bf16")),  # which of 100 and 0.5 comes first is known to the training only
    )
    found = Branches(cells, tmp_path)
    assert [[*found.of(cell)] for cell in (a, b, c, d, e)] == [[0.5, 0.8], [0.5, 0.8], [0.5], [], []]
    assert found.of(a) == found.of(b)
    assert found.of(c)[0.5] == found.of(a)[0.5]
    cells, (a, b) = ids_of(turns("fp16", (0.5, "bf16"), (0.8, "fp32")), turns("fp16", (0.5, "bf16"), (0.8, "e5m2")))
    assert [[*Branches(cells, tmp_path).of(cell)] for cell in (a, b)] == [[0.8], [0.8]]  # at 0.5 they do not part
    for others in ({"seeds": [0, 1]}, {"roundings": ["up", "down"]}):
        cells, ids = ids_of(turns("fp16", (0.5, "bf16")), **others)
        assert [Branches(cells, tmp_path).of(cell) for cell in ids] == [{}, {}]


def test_a_cell_waits_only_for_a_state_that_another_is_about_to_write(tmp_path: Path) -> None:
    cells, (a, b, c) = ids_of("fp16", turns("fp16", (0.5, "bf16")), turns("fp16", (0.5, "bf16"), (0.8, "e5m2")))
    found = Branches(cells, tmp_path)
    early, late = found.of(c)[0.5], found.of(c)[0.8]
    assert [found.is_held(cell, []) for cell in (a, b, c)] == [False] * 3
    assert [found.is_held(cell, [a]) for cell in (b, c)] == [True, True]
    early.touch()
    assert [found.is_held(cell, [a]) for cell in (b, c)] == [False, False]
    assert found.is_held(c, [a, b])  # b is on its way to 0.8
    late.touch()
    assert not found.is_held(c, [a, b])
    found.finish(a, [b, c])
    assert early.exists()
    found.finish(b, [c])
    assert late.exists()
    found.finish(c, [])
    assert [*tmp_path.iterdir()] == []


def test_nobody_waits_again_for_what_a_cell_that_is_over_has_not_written(tmp_path: Path) -> None:
    cells, (a, b, c) = ids_of("fp16", turns("fp16", (0.5, "bf16")), turns("fp16", (0.5, "e5m2")))
    found = Branches(cells, tmp_path)
    assert found.is_held(c, [a])
    found.finish(a, [b, c])  # its worker sees another folder, or it has failed
    assert not found.is_held(c, [b])


def test_states_that_no_cell_needs_are_deleted_and_others_are_used(tmp_path: Path) -> None:
    cells, (a, b) = ids_of(turns("fp16", (0.5, "bf16")), turns("fp16", (0.5, "e5m2")))
    (path,) = Branches(cells, tmp_path).of(a).values()
    path.touch()
    old = tmp_path / "0123456789abcdef.branch"
    old.touch()
    assert [*Branches(cells[1:], tmp_path).of(b).values()] == [path]  # the other is done
    assert not old.exists()


# A training function of the user's own


def in_turn(job: Job) -> dict[str, float]:
    torch.manual_seed(job.seed)
    model = job.quantize(torch.nn.Linear(4, 2), record_every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, x = job.scaler(optimizer), torch.randn(8, 4)
    for step in range(job.checkpoint(model=model, optimizer=optimizer), 6):
        job.begin_step(step, 6)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        job.log(step, loss=loss)
        job.checkpoint(step + 1)
        own_trainings.die_once(job, step)
    with torch.no_grad():
        return {"loss": model(x).square().mean().item()}


def test_a_training_function_follows_its_schedule_also_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = turns("fp16", (0.5, "recipe:fp8_delayed"))
    results = sweep(train=in_turn, formats=[schedule], out=tmp_path / "s", baseline=False, show_progress=False)
    arrays = results.telemetry(results.rows()[0]["id"])
    assert {name.split(" per ")[0] for name in arrays["sites.format"].tolist()} == {"fp16", "bf16", "e4m3fn", "e5m2"}
    whole, _ = run_job(Job(schedule), in_turn)

    class Interrupted(Exception):
        pass

    def interrupt(job: Job, step: int) -> None:
        if step == stop:
            raise Interrupted

    monkeypatch.setattr(checkpoints.Checkpoints, "is_due", lambda self: True)
    monkeypatch.setattr(own_trainings, "die_once", interrupt)
    for last in (2, 3, 4, 5):  # saved are 3 and more steps: at the switch, behind it, at the end
        stop = last
        with pytest.raises(Interrupted):
            run_job(Job(schedule, checkpoint=tmp_path / "c"), in_turn)
    stop = -1
    again, _ = run_job(Job(schedule, checkpoint=tmp_path / "c"), in_turn)
    assert (again.losses, again.metrics) == (whole.losses, whole.metrics)


def test_a_training_function_that_does_not_follow_its_schedule_fails(tmp_path: Path) -> None:
    results = ada_loss.sweep(
        train=own_trainings.nanogpt,
        formats=[turns("fp16", (0.5, "bf16"))],
        task_options={"steps": 2},
        out=tmp_path,
        baseline=False,
        show_progress=False,
    )
    (failed,) = results.failures()
    assert "does not follow it. Call job.begin_step(step, steps) before each step." in failed["error"]
    with pytest.raises(ValueError, match=r"Call job\.quantize\(model\) first"):
        Job("fp16").begin_step(0, 3)
    for step, steps in ((-1, 3), (0, 0), (0.5, 3)):
        with pytest.raises(TypeError, match=r"is not a count\. Expected: an integer"):
            Job("fp16").begin_step(step, steps)  # type: ignore[arg-type]
