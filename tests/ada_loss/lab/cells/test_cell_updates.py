"""Updates of an optimizer as an axis of a sweep: identities, names, what is refused, and what is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ada_loss
import fpsim
from ada_loss.lab.cells.cell_formats import canonical_format
from ada_loss.lab.cells.cells import Cell, plan, plan_all, stored_cell
from ada_loss.lab.cells.telemetry import curves_of, telemetry
from ada_loss.lab.sweep.config import read_sweep, with_settings
from ada_loss.lab.tasks import chars, digits
from ada_loss.lab.training.job import Job
from ada_loss.lab.training.loop import train
from ada_loss.lab.training.stored_weights import every_of
from fpsim import Update

ADAMW = {"optimizer": "adamw", "learning_rate": 1e-4}


def updated(updates: Any, **options: Any) -> list[Cell]:
    return plan("digits", ["fp32"], ["none"], updates=updates, options={**ADAMW, **options})


def test_the_cells_of_a_sweep_without_updates_are_those_of_before() -> None:
    """The ids of the version that had no updates."""
    formats = ["fp16", {"error": "e5m2"}, {"schedule": {0: "fp16", 0.5: "bf16"}}]
    known = ["ba1702a43df68dab", "3858dec8eea6d960", "8dd135458bc98cfb"]
    for updates in (None, ["float32"], [None], [{"weight": None}], [Update(weight="fp32")]):
        assert [cell.id for cell in plan("digits", formats, [1024], updates=updates)] == known


def test_equal_updates_are_one_cell_however_they_are_written() -> None:
    ways = [
        ["bf16_sr"],
        [{"weight": "bfloat16", "rounding": "stochastic", "states": "bf16"}],
        [fpsim.UPDATES["bf16_sr"]],
        [{"name": "mine", "update": "bf16_sr"}],
        [{"states": {"*": "bf16"}, "weight": "bf16", "rounding": "stochastic", "min_size": 0}],
    ]
    assert len({cell.id for way in ways for cell in updated(way)}) == 1
    (entry,) = plan("digits", [{"format": "fp32", "update": "bf16_sr"}], ["none"], options=ADAMW)
    assert entry.id == updated(["bf16_sr"])[0].id
    with pytest.raises(ValueError, match="was given twice"):
        updated(["bf16_sr", fpsim.UPDATES["bf16_sr"]])


@pytest.mark.parametrize("name", fpsim.UPDATES)
def test_each_update_by_name_is_read_as_itself(name: str) -> None:
    assert canonical_format({"format": "half", "update": fpsim.UPDATES[name]}) == {"format": "fp16", "update": name}


def test_overrides_and_code_books_survive_the_ledger() -> None:
    book = fpsim.Codebook([-1.0, 0.0, 0.25, 1.0])
    update = Update(
        weight="bf16",
        states={"exp_avg": fpsim.BlockFormat(book, 64, "fp32", "absmax"), "exp_avg_sq": "bf16"},
        overrides={"norm.*": None, "head": "bf16_kahan"},
    )
    (cell,) = updated([update])
    again = stored_cell(cell.id, cell.config)
    assert again.id == cell.id
    assert cell.config["format"]["update"]["overrides"] == {"norm.*": None, "head": "bf16_kahan"}
    with pytest.raises(ValueError, match="the class LayerNorm, which no ledger keeps"):
        updated([Update(weight="bf16", overrides={nn.LayerNorm: None})])


@pytest.mark.parametrize(
    ("updates", "error", "words"),
    [
        ("bf16_sr", TypeError, r"updates is 'bf16_sr'\. Expected: a list"),
        ([], ValueError, "updates is empty"),
        (["bf16_st"], ValueError, r"Unknown update 'bf16_st'\. Did you mean 'bf16_sr'\? Known: float32, bf16, "),
        ([{"weights": "bf16"}], ValueError, r"has 'weights'\. Did you mean 'weight'\? Known: weight, rounding"),
        ([{"weight": "bf61"}], ValueError, "bf61"),
        ([3], TypeError, r"One of the updates is 3\. Expected: a name"),
        ([{"name": "", "weight": "bf16"}], ValueError, "Got the name '' of an update"),
        (
            [{"states": {"momentum_buffer": "bf16"}}],
            ValueError,
            "the state 'momentum_buffer', which AdamW does not have",
        ),
    ],
)
def test_what_is_no_update_is_refused_before_any_work(updates: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        updated(updates)


def test_options_that_an_update_contradicts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"master_weights='none' was given with the update bf16_sr"):
        updated(["bf16_sr"], master_weights="none")
    with pytest.raises(ValueError, match=r"accumulation='float64' was given with the update bf16_sr"):
        updated(["bf16_sr"], accumulation="float64")
    with pytest.raises(ValueError, match="has an update of its own"):
        plan("digits", [{"format": "fp32", "update": "bf16"}], ["none"], updates=["bf16_sr"])
    with pytest.raises(ValueError, match="A format with an update has 'error', too"):
        plan("digits", [{"format": "fp32", "update": "bf16", "error": "e5m2"}], ["none"])


def test_a_command_line_and_a_file_name_updates() -> None:
    read = with_settings(read_sweep("updates"), ["updates=[float32, {weight: bf16}]", "seeds=1"])
    grid = {name: read.get(name) for name in ("task", "formats", "seeds", "task_options", "updates")}
    cells = plan_all({"scaling": ["none"], "roundings": None, **grid}, read["also"], baseline=True)
    assert [str(cell) for cell in cells] == 2 * [
        "fp32 nearest_even none seed 0",
        "weight=bf16 nearest_even none seed 0",
    ]


def test_a_sweep_names_updates_in_tables_and_verdicts_and_records_what_was_lost(tmp_path: Path) -> None:
    """The norm weights of `digits` begin at 1, and at this rate stay there to nearest."""
    results = ada_loss.sweep(
        "digits",
        ["fp32"],
        updates=["float32", {"name": "nearest", "weight": "bf16"}, "bf16_sr"],
        seeds=2,
        task_options={**ADAMW, "steps": 22},
        out=tmp_path,
        show_progress=False,
    )
    assert [row["format"] for row in results.rows()] == ["fp32", "fp32", "nearest", "nearest", "bf16_sr", "bf16_sr"]
    (verdict,) = results.verdicts()
    assert "nearest" in str(verdict)
    assert "bf16_sr" in str(verdict)
    (table,) = results.tables()
    assert table.down == ["fp32", "nearest", "bf16_sr"]
    for row in results.rows():
        arrays = results.telemetry(row["id"])
        curves = curves_of(arrays)
        if row["format"] == "fp32":
            assert not any(name.startswith(("updates", "parameters")) for name in arrays)
            continue
        steps, lost = curves["updates/lost"]
        assert list(steps) == [0, 10, 20]
        assert ((lost > 0) & (lost < 1)).all()
        at_first = dict(zip(arrays["parameters.name"], arrays["parameters.at_first"], strict=True))
        assert (at_first["bn.weight"] == 1) == (row["format"] == "nearest")
    page = results.report().read_text()
    assert "updates/lost" in page
    assert page.count("As they were at the beginning: ") == 2
    assert "bn.weight" in page


def test_an_interrupted_training_with_an_update_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    options = {"optimizer": "adamw", "learning_rate": 1e-3, "steps": 24, "update": "bf16_sr"}
    whole = train(digits(), None, **options)

    class Interrupted(Exception):
        pass

    done = 0

    def stop(count: int) -> None:
        nonlocal done
        done += count
        if done == 13:
            raise Interrupted

    path = tmp_path / "cell.pt"
    with pytest.raises(Interrupted):
        train(digits(), None, **options, checkpoint=path, checkpoint_seconds=0.0, progress=stop)
    again = train(digits(), None, **options, checkpoint=path, checkpoint_seconds=0.0)
    assert again.losses == whole.losses
    assert again.updates == whole.updates
    assert again.parameters == whole.parameters
    assert len(whole.updates) == 3


def test_weights_that_are_rounded_after_each_step_are_recorded_too() -> None:
    """master_weights="none" is bfloat16 to nearest: the shares are those of the update that says the same."""
    options = {"optimizer": "adamw", "learning_rate": 1e-4, "steps": 11}
    rounded = train(digits(), fpsim.Policy(weight="bf16"), master_weights="none", **options)
    stored = train(digits(), fpsim.Policy(weight="bf16"), update=Update(weight="bf16"), **options)
    assert [row["step"] for row in rounded.updates] == [0, 10]
    assert rounded.updates[1]["lost"] == pytest.approx(stored.updates[1]["lost"], abs=0.05)  # of other first weights
    assert "updates.lost" in telemetry(rounded)


def test_a_job_gives_its_optimizer_the_update_of_the_cell() -> None:
    job = Job(update="bf16_sr")
    model = job.quantize(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert job.optimizer(optimizer) is optimizer
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, model.weight.bfloat16().float())
    run = job.result({"loss": 1.0}, 0.0)
    assert [row["step"] for row in run.updates] == [0]
    assert {row["parameter"] for row in run.parameters} == {"weight", "bias"}


def test_a_job_without_an_update_leaves_the_optimizer_alone() -> None:
    job = Job()
    model = nn.Linear(4, 4)
    optimizer = job.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    fpsim.quantize_optimizer(optimizer, "bf16").detach()  # which refuses one that is quantised already
    assert job.result({}, 0.0).updates == []


def test_a_training_function_that_does_not_follow_the_update_is_told() -> None:
    job = Job(update="bf16_sr")
    with pytest.raises(ValueError, match=r"does not follow it\. Give each optimizer to job\.optimizer"):
        job.result({"loss": 1.0}, 0.0)


def own(job: Job) -> dict[str, float]:
    model = job.quantize(nn.Linear(8, 1))
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=2.0**-10, momentum=0.9))
    for step in range(12):
        optimizer.zero_grad()
        loss = (model(torch.randn(4, 8)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        job.log(step, loss=loss)
    return {"loss": loss.item()}


def test_a_sweep_of_ones_own_training_has_updates(tmp_path: Path) -> None:
    updates = ["float32", {"weight": "bf16", "states": {"momentum_buffer": "bf16"}}]
    results = ada_loss.sweep(
        train=own, formats=["fp16"], updates=updates, out=tmp_path, show_progress=False, minimize=["loss"]
    )
    assert [row["format"] for row in results.rows()] == ["fp32", "fp16", "fp16, weight=bf16 momentum_buffer=bf16"]
    *_, last = results.rows()
    assert list(curves_of(results.telemetry(last["id"]))["updates/lost"][0]) == [0, 10]


@pytest.mark.full
def test_the_shipped_sweep_shows_what_to_nearest_loses(tmp_path: Path) -> None:
    """`ada-loss sweep updates` with one seed, one rate and 12 steps."""
    read = with_settings(read_sweep("updates"), ["seeds=1", "task_options.steps=12", "also=[]"])
    results = ada_loss.sweep(**{**read, "out": tmp_path}, show_progress=False)
    assert results.counts["done"] == 6
    lost = {
        row["format"]: float(np.nanmean(results.telemetry(row["id"])["updates.lost"]))
        for row in results.rows()
        if row["format"] != "fp32"
    }
    assert lost["bf16 nearest"] > 0.5
    assert lost["bf16 Kahan"] < 0.05
    assert lost["8-bit states"] < 0.01
    model = chars(0).model
    assert any("norm" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize(("steps", "every"), [(1, 10), (1099, 10), (1100, 11), (10_000, 100)])
def test_of_a_training_a_hundred_steps_are_recorded_and_of_a_short_one_every_tenth(steps: int, every: int) -> None:
    assert every_of(steps) == every


def test_a_state_that_stays_float32_survives_the_ledger() -> None:
    (cell,) = updated([{"weight": "bf16", "states": {"exp_avg": None, "*": "bf16"}}])
    assert stored_cell(cell.id, json.loads(json.dumps(cell.config))) == cell
    assert cell.id != updated([{"weight": "bf16", "states": "bf16"}])[0].id
