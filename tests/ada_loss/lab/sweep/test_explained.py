"""A sweep that is asked why: the reason is a column of its own, no row's digest changes, and the verdict says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ada_loss.lab.cells.ledger import Ledger
from ada_loss.lab.results import Results
from ada_loss.lab.sweep.driver import sweep
from ada_loss.lab.sweep.work import TimeLimit
from ada_loss.lab.tasks import Task

STEPS = {"epochs": 1, "batch_size": 16, "learning_rate": 0.1}


def lossy(seed: int) -> Task:
    """A head whose gradients are below every number of e5m2: the branch before it never learns there."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(96, 8, generator=generator)
    y = (x[:, 0] > 0).long()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out.float(), target) * 1e-6

    def accuracy(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (out.argmax(-1) == target).float().mean()

    return Task("lossy", model, (x, y), (x, y), loss, {"accuracy": accuracy})


def overflowing(seed: int) -> Task:
    """A square of what does not fit fp16."""
    task = lossy(seed)

    class Squared(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 4000).square() / 1e6

    task.model.append(Squared())
    return task


def digests(out: Path) -> list[tuple[object, ...]]:
    with Ledger(out / "ledger.sqlite", readonly=True) as ledger:
        return [(row["id"], json.dumps(row["metrics"]), row["telemetry_sha256"]) for row in ledger.rows()]


def test_the_reason_of_a_diverged_cell_is_a_column_and_in_the_verdict(tmp_path: Path) -> None:
    arguments = {"task": overflowing, "formats": ["fp16"], "seeds": 3, "task_options": STEPS, "out": tmp_path}
    plain = sweep(**arguments, show_progress=False)
    before = digests(tmp_path)
    assert "reason" not in plain.rows()[0]
    found = sweep(**arguments, why=True, show_progress=False)
    assert digests(tmp_path) == before
    rows = {(row["format"], row["seed"]): row for row in found.rows()}
    for seed in range(3):
        assert rows["fp16", seed]["diverged"]
        assert rows["fp16", seed]["reason"].startswith(
            "Overflow at 3:square, activation, in fp16; float32 for 3:square"
        )
        assert rows["fp32", seed]["reason"] == ""
    text = str(found.verdicts()[0])
    assert "diverges with 3 of 3 seeds" in text
    assert f": {rows['fp16', 0]['reason']}" in text
    assert [row["reason"] for row in Results(tmp_path).rows()] == [row["reason"] for row in found.rows()]


def test_a_native_cell_says_why_it_is_not_asked(tmp_path: Path) -> None:
    native = {"native": "fp16"}
    found = sweep(
        overflowing, ["fp16", native], seeds=3, task_options=STEPS, out=tmp_path, why=True, show_progress=False
    )
    rows = {(row["format"], row["seed"]): row for row in found.rows()}
    for seed in range(3):
        assert rows["fp16", seed]["reason"].startswith("Overflow at 3:square")
        assert rows["fp16 native", seed]["diverged"]
        assert rows["fp16 native", seed]["reason"] == (
            "not asked: fpsim.why tries formats on an emulated model; it explains cells of the format fp16"
        )
    assert ": not asked: fpsim.why tries" in str(found.verdicts()[0])


def test_a_setting_that_falls_short_is_asked_with_one_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**STEPS, "epochs": 10, "learning_rate": 2e5}
    found = sweep(lossy, ["e5m2"], seeds=3, task_options=options, out=tmp_path, why=True, show_progress=False)
    rows = [row for row in found.rows() if row["format"] == "e5m2"]
    assert not any(row["diverged"] for row in rows)
    reasons = [row["reason"] for row in rows if row["reason"]]
    assert len(reasons) == 1
    assert reasons[0].startswith("Gradient lost at "), reasons
    assert f": {reasons[0]}" in str(found.verdicts()[0])

    def fails(*_: object) -> None:
        raise AssertionError("what is known is not asked again")

    monkeypatch.setattr("fpsim.why", fails)
    sweep(lossy, ["e5m2"], seeds=3, task_options=options, out=tmp_path, why=True, show_progress=False)


@pytest.mark.full
@pytest.mark.parametrize("options", [{"epochs": 3}, {"epochs": 4}, {}], ids=str)  # {}: at the end no gradient is left
def test_the_deep_network_of_the_lab_is_explained(tmp_path: Path, options: dict[str, Any]) -> None:
    """Its gradients underflow little by little, and the verdict said that nothing was wrong with the step."""
    policy = {"error": "e4m3fn", "weight_grad": "e4m3fn"}
    arguments = {"seeds": 3, "task_options": options, "out": tmp_path, "engine": "here"}
    found = sweep("deep_digits", [policy], **arguments, why=True, show_progress=False)
    reasons = [row["reason"] for row in found.rows() if row["reason"]]
    assert len(reasons) == 1
    assert reasons[0].startswith("Gradient lost at "), reasons
    assert reasons[0].endswith(" is enough"), reasons
    assert f": {reasons[0]}" in str(found.verdicts()[0])


def test_a_sweep_returns_its_results_where_why_fails_and_asks_again_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("planted")

    arguments = {"task": overflowing, "formats": ["fp16"], "seeds": 2, "task_options": STEPS, "out": tmp_path}
    with monkeypatch.context() as patch:
        patch.setattr("fpsim.why", fails)
        with pytest.warns(UserWarning, match=r"about fp16, none, seed \d: ValueError: planted"):
            found = sweep(**arguments, why=True, show_progress=False)
    assert [row["diverged"] for row in found.rows() if row["format"] == "fp16"] == [True, True]
    before = digests(tmp_path)
    again = sweep(**arguments, why=True, show_progress=False)
    assert all(row["reason"] for row in again.rows() if row["format"] == "fp16")
    assert digests(tmp_path) == before


@pytest.mark.full
def test_workers_are_asked_where_a_sweep_has_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver trains nothing itself: a cell that hangs or runs out of memory there would end the sweep."""

    def fails(*_: object) -> None:
        raise AssertionError("asked in the process of the driver")

    monkeypatch.setattr("fpsim.why", fails)
    arguments = {"task": overflowing, "formats": ["fp16"], "seeds": 2, "task_options": STEPS, "out": tmp_path}
    found = sweep(**arguments, workers=2, why=True, show_progress=False)
    reasons = {row["reason"] for row in found.rows() if row["format"] == "fp16"}
    assert len(reasons) == 1
    assert next(iter(reasons)).startswith("Overflow at 3:square, activation, in fp16; float32 for 3:square")


def test_a_reason_has_the_time_limit_of_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float | None] = []

    def over(seconds: float | None, *_: object, **__: object) -> None:
        given.append(seconds)
        raise TimeLimit("planted")

    arguments = {"task": overflowing, "formats": ["fp16"], "seeds": 1, "task_options": STEPS, "out": tmp_path}
    sweep(**arguments, show_progress=False)
    monkeypatch.setattr("ada_loss.lab.sweep.work.within_time", over)
    with pytest.warns(UserWarning, match=r"about fp16, none, seed 0: planted"):
        found = sweep(**arguments, engine="here", time_limit=70, why=True, show_progress=False)
    assert given == [70]
    assert not any(row.get("reason") for row in found.rows())


def test_damaged_reasons_are_told(tmp_path: Path) -> None:
    sweep(lossy, ["fp32"], seeds=1, task_options=STEPS, out=tmp_path, show_progress=False)
    (tmp_path / "reasons.json").write_text("{")
    with pytest.raises(ValueError, match=r"is damaged.*Delete it; `--why` writes it again"):
        Results(tmp_path)
