"""A training that is killed and resumed gives what one in a stretch gives, in every field. Every kill is a SIGKILL."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import random
import signal
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import own_trainings
import pytest
import sweep_tasks
import tiers
import torch

from ada_loss.lab.cells.cells import Cell, plan
from ada_loss.lab.sweep.work import run_cell
from ada_loss.lab.training.checkpoints import Checkpoints

STEPS = 13  # with points of the history at 10 and 13: one that is shifted is at 11 or 12


def cell_of(method: str, task: str | None = None) -> Cell:
    """A cell of the own training `short`, or of a task, with noise in every rounding."""
    options = {"steps": STEPS} | ({"record_every": 1} if task else {})
    train = None if task else "own_trainings:short"
    return plan(task, ["e5m2"], [method], roundings=["stochastic"], train=train, options=options)[0]


def outcome(cell: Cell, checkpoint: Path) -> dict[str, Any]:
    """The result of a cell, but for its time, and the bytes of each array of its telemetry."""
    result, telemetry = run_cell(cell.config, checkpoint=checkpoint)
    del result["seconds"]
    with np.load(io.BytesIO(telemetry)) as arrays:
        return result | {name: (x.dtype.str, x.shape, x.tobytes()) for name, x in arrays.items()}


class Reaper:
    """Kills its process at a moment: a step has several, before and behind what it does and what it saves.

    moment: which one, counted from 1; 0 for none.
    every: each n-th checkpoint that a step offers is written, so that steps are lost and done again.
    """

    def __init__(self, moment: int, every: int) -> None:
        self.moment, self.every, self.moments, self.offered = moment, every, 0, 0
        self._save = Checkpoints.save

    def install(self) -> None:
        own_trainings.moment = sweep_tasks.moment = self.come
        Checkpoints.is_due, Checkpoints.save = (lambda _: self.is_due()), (lambda own: self.save(own))  # type: ignore[method-assign]

    def come(self) -> None:
        self.moments += 1
        if self.moments == self.moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def is_due(self) -> bool:
        self.offered += 1
        return self.offered % self.every == 0

    def save(self, checkpoints: Checkpoints) -> None:
        self.come()
        self._save(checkpoints)
        self.come()


def dies(cell: Cell, checkpoint: Path, moment: int, every: int = 1) -> bool:
    """Whether a process that trains the cell comes to that moment, where it is killed; else it comes to the end."""
    child = os.fork()
    if child == 0:
        try:
            reaper = Reaper(moment, every)
            reaper.install()
            checkpoint.with_suffix(".outcome").write_bytes(pickle.dumps(outcome(cell, checkpoint)))
            checkpoint.with_suffix(".moments").write_text(str(reaper.moments))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), "the training raised"
    return status == signal.SIGKILL


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "every"),
    [
        ("torch", 1),
        pytest.param("torch", 3, marks=pytest.mark.slow),
        pytest.param("adaptive", 1, marks=pytest.mark.slow),
        pytest.param("adaptive", 3, marks=pytest.mark.slow),
    ],
)
def test_a_training_killed_at_any_moment_gives_every_field_of_one_in_a_stretch(
    tmp_path: Path, method: str, every: int
) -> None:
    cell = cell_of(method)
    expected = outcome(cell, tmp_path / "whole.pt")
    assert np.frombuffer(expected["history.steps"][2], dtype=int).tolist() == [10, 13]
    assert not dies(cell, tmp_path / "count.pt", 0, every)
    moments = int((tmp_path / "count.moments").read_text())
    assert moments >= 4 * STEPS + 2 * STEPS // every
    for moment in range(1, moments + 1):
        checkpoint = tmp_path / f"{moment}.pt"
        assert dies(cell, checkpoint, moment, every)
        assert outcome(cell, checkpoint) == expected, f"killed at moment {moment} of {moments}"
        assert not checkpoint.exists()


@tiers.parametrize("method", ["torch", "adaptive"], keep={"adaptive"})
def test_a_training_killed_in_every_step_gives_every_field_of_one_in_a_stretch(tmp_path: Path, method: str) -> None:
    cell, moments, kills = cell_of(method), random.Random(0), 0
    while dies(cell, tmp_path / "c.pt", moments.randint(6, 11)):  # of which a step has six
        kills += 1
    assert kills >= STEPS // 2
    assert pickle.loads((tmp_path / "c.outcome").read_bytes()) == outcome(cell, tmp_path / "whole.pt")


def test_a_task_whose_data_draw_from_every_generator_is_resumed_to_every_field(tmp_path: Path) -> None:
    cell = cell_of("torch", "sweep_tasks:noisy")
    expected = outcome(cell, tmp_path / "whole.pt")
    assert not dies(cell, tmp_path / "count.pt", 0)
    moments = int((tmp_path / "count.moments").read_text())
    assert moments >= (3 + 2) * STEPS  # three samples and a checkpoint
    for moment in range(5, moments + 1, 7):  # in the first, second and third epoch
        assert dies(cell, tmp_path / f"{moment}.pt", moment)
        assert outcome(cell, tmp_path / f"{moment}.pt") == expected, f"killed at moment {moment} of {moments}"


def native_cell(method: str) -> Cell:
    options = {"steps": STEPS, "record_every": 2}
    return plan("sweep_tasks:noisy", [{"native": "fp16"}], [method], options=options)[0]


@tiers.parametrize("method", ["none", "torch", "adaptive"], keep={"adaptive"})
def test_a_native_training_is_resumed_to_every_field(tmp_path: Path, method: str) -> None:
    """Every second pass is recorded: one that is counted anew after a kill would be another."""
    cell = native_cell(method)
    expected = outcome(cell, tmp_path / "whole.pt")
    assert {"sites.underflow", "history.underflow"} <= expected.keys()
    assert ("layers.log2_scale" in expected) == (method == "adaptive")
    for moment in (14, 27, 42):  # with five in a step
        assert dies(cell, tmp_path / f"{moment}.pt", moment)
        assert outcome(cell, tmp_path / f"{moment}.pt") == expected, f"killed at moment {moment}"


def test_a_checkpoint_without_the_scales_of_layers_is_refused_in_words(tmp_path: Path) -> None:
    cell, checkpoint = native_cell("adaptive"), tmp_path / "c.pt"
    assert dies(cell, checkpoint, 27)
    saved = torch.load(io.BytesIO(checkpoint.read_bytes()[32:]), weights_only=True)
    del saved["states"]["scaler"]["layers"]
    packed = io.BytesIO()
    torch.save(saved, packed)
    checkpoint.write_bytes(hashlib.sha256(packed.getvalue()).digest() + packed.getvalue())
    with pytest.raises(ValueError, match=r"has no scales of layers, and this training has some.*Remove it: training"):
        outcome(cell, checkpoint)


def test_a_training_that_fails_behind_its_last_checkpoint_is_trained_again_by_a_retry(tmp_path: Path) -> None:
    cell = plan(None, ["e5m2"], ["torch"], train="own_trainings:fails_behind_the_last_step")[0]
    expected = outcome(cell, tmp_path / "whole.pt")
    checkpoint = tmp_path / "c.pt"
    assert dies(cell, checkpoint, 7)  # two moments for each of three checkpoints; then behind the loop
    with pytest.raises(UnboundLocalError) as caught:
        outcome(cell, checkpoint)
    assert caught.value.__notes__ == [
        "It failed in the first step behind its checkpoint, which is deleted: a retry starts over."
    ]
    assert outcome(cell, checkpoint) == expected


def test_a_checkpoint_from_which_nothing_has_failed_yet_is_kept_for_a_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, checkpoint, steps = cell_of("torch"), tmp_path / "c.pt", []
    expected = outcome(cell, tmp_path / "whole.pt")

    def fails_once() -> None:
        steps.append(None)
        if len(steps) == 30:
            raise RuntimeError("the card fell out")

    monkeypatch.setattr(Checkpoints, "is_due", lambda _: True)
    monkeypatch.setattr(own_trainings, "moment", fails_once)
    with pytest.raises(RuntimeError, match="the card"):
        outcome(cell, checkpoint)
    assert checkpoint.exists()
    assert outcome(cell, checkpoint) == expected
    assert len(steps) < 30 + 4 * STEPS  # it went on, and did not start over
