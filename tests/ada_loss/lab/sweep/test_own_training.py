"""A sweep over a training function of the user's own: a loop like nanoGPT's, against the same loop by hand."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import own_trainings
import pytest
import torch

import ada_loss
import fpsim
from ada_loss.lab.cells.cells import plan
from ada_loss.lab.results import Results
from ada_loss.lab.sweep.config import read_sweep
from ada_loss.lab.training import Job, checkpoints
from ada_loss.lab.training.job import run_job


def swept(out: Path, train: Any = "own_trainings:nanogpt", formats: Any = ("e5m2",), **options: Any) -> Results:
    return ada_loss.sweep(train=train, formats=[*formats], out=out, show_progress=False, **options)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return swept(tmp_path_factory.mktemp("own"), scaling=["none", "torch", "adaptive"], seeds=2)


def by_hand(fmt: Any, scale: float | None, seed: int, steps: int = 12) -> list[float]:
    """nanoGPT's loop with nothing of the lab: the losses."""
    letters = sorted(set(own_trainings.TEXT))
    data = torch.tensor([letters.index(letter) for letter in own_trainings.TEXT])
    torch.manual_seed(seed)
    model = fpsim.quantize(own_trainings.GPT(len(letters), 16), fmt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1)
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * (0.55 + 0.45 * np.cos(np.pi * step / steps))
        for _ in range(2):
            starts = torch.randint(len(data) - 16, (8,)).tolist()
            x, y = (torch.stack([data[i + k : i + k + 16] for i in starts]) for k in (0, 1))
            loss = model(x, y)[1]
            (loss / 2 * (scale or 1)).backward()
        for parameter in model.parameters():
            parameter.grad /= scale or 1
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_cell_trains_what_the_loop_trains_by_hand(results: Results) -> None:
    rows = {(row["format"], row["scaling"], row["seed"]): row for row in results.rows()}
    assert len(rows) == 2 + 3 * 2  # and float32
    for fmt, scaling, policy, scale in (("fp32", "none", None, None), ("e5m2", "none", "e5m2", None)):
        losses = results.telemetry(rows[fmt, scaling, 1]["id"])["losses"].tolist()
        assert losses == pytest.approx(by_hand(policy, scale, 1), rel=1e-6)
    assert rows["fp32", "none", 0]["loss"] < 4.0


def test_scales_skips_curves_and_sites_are_known_of_it(results: Results) -> None:
    (row,) = (row for row in results.rows() if row["scaling"] == "torch" and row["seed"] == 0)
    arrays = results.telemetry(row["id"])
    assert len(arrays["scales"]) == 12
    assert row["skipped"] == len(arrays["skipped"])
    assert arrays["scales"][0] == 65536
    assert arrays["scales"][-1] == 65536 * 0.5 ** (arrays["skipped"] < 11).sum()
    assert "lm_head:linear" in arrays["sites.site"].tolist()
    assert row["underflow"] is not None
    assert {curve.name for curve in results.curves("lr")} == {"fp32 none", "e5m2 none", "e5m2 torch", "e5m2 adaptive"}
    assert results.curves("lr")[0].steps.tolist() == [*range(12)]
    (row,) = (row for row in results.rows() if row["scaling"] == "adaptive" and row["seed"] == 0)
    assert "layers.log2_scale" in results.telemetry(row["id"])
    assert results.report().read_text().count("cannot be drawn") == 0


def test_an_interrupted_cell_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"steps": 6}
    whole = Job("e5m2", scaling="torch", seed=3, options=options)
    expected = own_trainings_run(whole)
    seen: list[int] = []

    class Interrupted(Exception):
        pass

    def die(job: Job, step: int) -> None:
        seen.append(step)
        if step == 3 and len(seen) == 4:
            raise Interrupted

    monkeypatch.setattr(own_trainings, "die_once", die)
    monkeypatch.setattr(checkpoints.Checkpoints, "is_due", lambda self: True)
    first, second = (
        Job("e5m2", scaling="torch", seed=3, options=options, checkpoint=tmp_path / "c.pt") for _ in range(2)
    )
    with pytest.raises(Interrupted):
        own_trainings_run(first)
    assert own_trainings_run(second) == expected
    assert seen == [0, 1, 2, 3, 4, 5]  # nothing twice
    assert not (tmp_path / "c.pt").exists()


def own_trainings_run(job: Job) -> Any:
    from ada_loss.lab.training.job import run_job

    run, error = run_job(job, own_trainings.nanogpt)
    return run.losses, run.metrics, run.scales, run.skipped_steps, error


def test_failures_are_those_of_the_cell(tmp_path: Path) -> None:
    results = swept(tmp_path / "a", "own_trainings:raises_for_seed_1", seeds=3)
    assert [cell["error"] for cell in results.failures()] == ["RuntimeError: not with this seed"] * 2
    results = swept(tmp_path / "b", own_trainings.returns_nothing, baseline=False)
    assert "The training function returned None. Expected: its metrics" in results.failures()[0]["error"]
    results = swept(tmp_path / "c", own_trainings.diverges, baseline=False)
    assert results.rows()[0]["diverged"]


def test_a_function_of_a_script_is_known_by_its_source_and_options_by_their_values(tmp_path: Path) -> None:
    def mine(job: Job) -> dict[str, float]:
        return {"accuracy": job.options.get("rate", 0.0)}

    results = swept(tmp_path, mine, task_options={"rate": 0.5}, baseline=False)
    assert results.rows()[0]["accuracy"] == results.rows()[0]["rate"] == 0.5
    assert len(swept(tmp_path, mine, task_options={"rate": 0.25}, baseline=False).rows()) == 2
    one = plan(None, ["fp16"], ["none"], train=mine)[0].id

    def mine(job: Job) -> dict[str, float]:  # type: ignore[no-redef]
        return {"accuracy": 1.0}

    assert plan(None, ["fp16"], ["none"], train=mine)[0].id != one
    with pytest.raises(ValueError, match=r"Call sweep\(\.\.\.\) again"):
        ada_loss.resume(tmp_path, trust=True)


def test_a_sweep_of_a_training_function_is_resumed_where_it_is_trusted(tmp_path: Path) -> None:
    swept(tmp_path / "mine", "own_trainings:diverges", seeds=2)
    assert ada_loss.resume(tmp_path / "mine", show_progress=False).counts["done"] == 4  # this user has run it
    theirs = tmp_path / "theirs"
    shutil.copytree(tmp_path / "mine", theirs)
    with pytest.raises(ValueError, match="which is code from outside of this library"):
        ada_loss.resume(theirs)
    assert ada_loss.resume(theirs, trust=True, show_progress=False).counts["done"] == 4
    assert ada_loss.resume(theirs, show_progress=False).counts["done"] == 4  # it was trusted
    (tmp_path / "mine.yaml").write_text("train: own_trainings:diverges\nformats: [fp16]\ntask_options: {a: [1, x]}\n")
    read = read_sweep(tmp_path / "mine.yaml")
    assert plan(None, read["formats"], ["none"], options=read["task_options"], train=read["train"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"task": "digits", "train": "own_trainings:diverges"}, "Give a task, or a training function .* not both"),
        ({"task": None, "train": "nanogpt"}, "train='nanogpt' is invalid. Expected: a function, or 'module:"),
        ({"task": None, "train": "own_trainings:none"}, "cannot be imported"),
        ({"task": None, "train": own_trainings.diverges, "options": {"seed": 3}}, "which the sweep sets"),
        ({"task": None, "train": own_trainings.diverges, "options": {"a": object()}}, "Expected for a training"),
    ],
)
def test_what_is_no_training_function_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(**{"formats": ["fp16"], "scaling": ["none"], **arguments})


def test_a_job_refuses_what_it_cannot_do() -> None:
    job = Job("fp16")
    with pytest.raises(ValueError, match=r"Call job\.quantize\(model\) first"):
        job.scaler()
    with pytest.raises(ValueError, match=r"Name it once, before the loop"):
        job.checkpoint(3)
    with pytest.raises(TypeError, match="loss is 'x'"):
        job.log(0, loss="x")
    for call in (lambda: job.log(0, **{"loss\udcff": 1.0}), lambda: job.result({"a\ud800": 1.0}, 0.0)):
        with pytest.raises(ValueError, match=r"is not Unicode: surrogates not allowed\. Use text that"):
            call()
    job.quantize(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="has a quantised model already"):
        job.quantize(torch.nn.Linear(1, 1))
    job.close()


@pytest.mark.parametrize("fails", [False, True], ids=["", "stopped"])
def test_after_a_training_its_model_is_recorded_and_scaled_no_more(fails: bool) -> None:
    models = []

    def train(job: Job) -> dict[str, float]:
        models.append(job.quantize(torch.nn.Linear(2, 1)))
        models[0](torch.ones(1, 2)).sum().backward()
        if fails:
            raise FloatingPointError("planted")
        return {}

    job = Job("e5m2", scaling="adaptive")
    assert run_job(job, train)[1] == ("planted" if fails else None)
    with fpsim.record(models[0]) as recording, ada_loss.AdaLossScaled(models[0]):
        models[0](torch.ones(1, 2)).sum().backward()
    assert len(recording.rows()) > 0


def test_points_are_recorded_from_the_tenth_step_on_a_quarter_apart() -> None:
    job = Job("e5m2")
    model = job.quantize(torch.nn.Linear(2, 1))
    for step in range(20):
        model(torch.ones(1, 2))
        job.log(step, loss=0.0)
    job.close()
    assert [done for done, _ in job.history] == [10, 13, 17]  # each the next integer from 1.25 times the last on


def test_a_job_takes_names_and_numbers_as_scaling_and_logs_what_a_float_holds() -> None:
    with pytest.raises(TypeError, match=r"scaling=None is not a scaling method\. Expected: a name or a number"):
        Job("fp16", scaling=None)  # type: ignore[arg-type]
    job = Job("fp16")
    with pytest.raises(TypeError, match=r"loss is 1000.*Expected: a number"):
        job.log(0, loss=10**400)
    job.log(0, loss=10**300)
    assert job.curves == {"loss": [(0, 1e300)]}
