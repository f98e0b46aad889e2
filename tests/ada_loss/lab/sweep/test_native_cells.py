"""Native cells of a sweep: one table, report and verdict with emulated ones; what they are called; what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import sweep_tasks
from typer.testing import CliRunner

import ada_loss
from ada_loss.__main__ import app
from ada_loss.lab.cells.cells import Cell, digest, plan, plan_all, stored_cell
from ada_loss.lab.training import train
from ada_loss.lab.training.job import Job

NATIVE = {"native": "fp16"}


def only(**changes: Any) -> Cell:
    (cell,) = plan("sweep_tasks:faint", [NATIVE], ["none"], **changes)
    return cell


# What a native cell is


def test_the_identity_says_native_and_no_other_id_changes() -> None:
    cell, (emulated,) = only(), plan("sweep_tasks:faint", ["fp16"], ["none"])
    assert cell.config == {**emulated.config, "format": {"native": "fp16"}}
    assert cell.id == digest(cell.config) != emulated.id
    assert str(cell) == "fp16 native nearest_even none seed 0"
    assert stored_cell(cell.id, json.loads(json.dumps(cell.config))) == cell


@pytest.mark.parametrize("entry", [{"native": "half"}, {"name": "real", "native": "fp16"}, {"native": "float16"}])
def test_other_words_for_it_are_the_same_cell(entry: dict[str, str]) -> None:
    (cell,) = plan("sweep_tasks:faint", [entry], ["none"])
    assert cell.id == only().id
    assert str(cell).startswith(entry.get("name", "fp16 native"))


def test_a_grid_has_it_with_each_method() -> None:
    cells = plan("digits", ["fp32", NATIVE], ["none", 1024, "torch", "adaptive", "adaptive normal"], seeds=2)
    assert [str(cell) for cell in cells[::2]] == [
        "fp32 nearest_even none seed 0",
        *(f"fp16 native nearest_even {word} seed 0" for word in ("none", "1024", "torch", "adaptive")),
        "fp16 native nearest_even adaptive normal seed 0",
    ]


@pytest.mark.parametrize(
    ("words", "grid"),
    [
        (
            "A format has native='bf16'. Expected: 'fp16', in which torch.autocast computes. A scale changes no "
            "gradient of bfloat16, which has float32's exponents. Write 'bf16' without 'native': it is emulated.",
            {"formats": [{"native": "bf16"}]},
        ),
        ("Write 'e5m2' without 'native': it is emulated.", {"formats": [{"native": "e5m2"}]}),
        ("Write 'mxfp8_e4m3' without", {"formats": [{"native": "mxfp8_e4m3"}]}),
        ("A format has native=True. Expected: 'fp16'", {"formats": [{"native": True}]}),
        ("A format has native={'error': 'fp16'}. Expected: 'fp16'", {"formats": [{"native": {"error": "fp16"}}]}),
        ("has 'error' besides 'native'. A native cell computes", {"formats": [{"native": "fp16", "error": "e5m2"}]}),
        ("has 'rounding' besides 'native'", {"formats": [{"native": "fp16", "rounding": "stochastic"}]}),
        ("has 'overrides' besides 'native'", {"formats": [{"native": "fp16", "overrides": {"0": None}}]}),
        ("A native cell is native in all its steps", {"formats": [{"schedule": {0: "fp16", 0.5: NATIVE}}]}),
        ("The update 'bf16_sr' was given with", {"updates": ["float32", "bf16_sr"]}),
        ("The update 'bf16_sr' was given with", {"formats": [{"format": NATIVE, "update": "bf16_sr"}]}),
        (
            "The rounding 'stochastic' was given with the format {'native': 'fp16'}. Hardware rounds float16 to the "
            "nearest, ties to even. Omit roundings, or use 'nearest_even'. Give {'native': 'fp16'} in a grid of its "
            "own, under `also`, if the other formats have several.",
            {"roundings": ["nearest_even", "stochastic"]},
        ),
        ("The rounding 'stochastic_gradients' was given", {"roundings": ["stochastic_gradients"]}),
        (
            "The scaling 'exact normal' was given with the format {'native': 'fp16'}. The rule 'exact' measures "
            "gradients before they are rounded",
            {"scaling": ["none", "exact normal"]},
        ),
        ("task_options.accumulation='float64' was given", {"options": {"accumulation": "float64"}}),
        ("task_options.master_weights='none' was given", {"options": {"master_weights": "none"}}),
        ("The lab's own loop trains natively", {"task": None, "train": "own_trainings:short"}),
    ],
)
def test_what_a_native_cell_cannot_have_is_refused_before_any_work(words: str, grid: dict[str, Any]) -> None:
    arguments = {"task": "sweep_tasks:faint", "formats": ["fp16", NATIVE], "scaling": ["none"], **grid}
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        plan(**arguments)
    assert str(caught.value).endswith(".")


def test_a_grid_under_also_has_what_the_others_cannot() -> None:
    grid = {"task": "sweep_tasks:faint", "formats": ["fp16"], "scaling": ["exact"], "task_options": {"epochs": 1}}
    also = [{"formats": [NATIVE], "scaling": ["adaptive"], "roundings": ["nearest_even"]}]
    cells = plan_all({**grid, "roundings": ["nearest_even", "stochastic"]}, also)
    assert [str(cell) for cell in cells] == [
        "fp16 nearest_even exact seed 0",
        "fp16 stochastic exact seed 0",
        "fp16 native nearest_even adaptive seed 0",
    ]


def test_a_job_of_ones_own_says_what_to_write() -> None:
    job = Job(NATIVE)
    with pytest.raises(ValueError, match=r"trains in real float16, and quantises no model\. Use torch\.autocast"):
        job.quantize(sweep_tasks.faint(0).model)


# What a sweep shows of it

GRID = """
task: sweep_tasks:faint
formats: [fp32, fp16, {native: fp16}]
scaling: [none, torch, adaptive]
seeds: 3
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("native")
    (folder / "mine.yaml").write_text(GRID)
    done = CliRunner().invoke(app, ["sweep", str(folder / "mine.yaml"), "--out", str(folder / "out")])
    assert done.exit_code == 0, done.output
    return folder / "out", done.output


def test_native_and_emulated_cells_are_in_one_table_and_verdict(swept: tuple[Path, str]) -> None:
    out, said = swept
    results = ada_loss.Results(out)
    assert results.counts == {"planned": 0, "running": 0, "done": 21, "failed": 0}
    table = str(results.tables()[0])
    rows = {line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:5]] for line in table.splitlines()[2:]}
    assert {*rows} == {"fp32", "fp16", "fp16 native"}
    assert all("±" in cell for name in ("fp16", "fp16 native") for cell in rows[name])
    assert table in said
    (verdict,) = results.verdicts()
    assert str(verdict) in said
    outcomes = {(one.fmt, one.rest): one.outcome for one in verdict.combinations}
    for fmt in ("fp16", "fp16 native"):  # where a scale is missing, both lose the gradients of the first layers
        assert outcomes[fmt, "torch"] == outcomes[fmt, "adaptive"] == "match" != outcomes[fmt, "none"], outcomes
    assert "fp16 native" in (out / "report.html").read_text()


def test_the_numbers_of_a_native_cell_are_those_of_train(swept: tuple[Path, str]) -> None:
    rows = [row for row in ada_loss.Results(swept[0]).rows() if row["format"] == "fp16 native"]
    assert len(rows) == 9
    options: dict[str, Any] = {"optimizer": "adam", "learning_rate": 0.01, "epochs": 4, "schedule": "constant"}
    for row in rows:
        if row["seed"] == 1:
            run = train(sweep_tasks.faint(1), NATIVE, scaling=row["scaling"], seed=1, **options)
            assert run.metrics == {name: row[name] for name in run.metrics}
