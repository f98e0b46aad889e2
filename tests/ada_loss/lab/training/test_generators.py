"""Random numbers at the border of a training: a sweep draws nothing of the caller's, and a seed gives them all."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fpsim
from ada_loss.lab.cells.cells import plan
from ada_loss.lab.cells.ledger import Ledger
from ada_loss.lab.results import Results
from ada_loss.lab.sweep.driver import resume, sweep
from ada_loss.lab.tasks import Task, accuracy
from ada_loss.lab.training import Job, train
from ada_loss.lab.training.generators import kept_generators, seed_generators


def states() -> bytes:
    """Where all global generators are, with the noise of fpsim."""
    numpy: Any = np.random.get_state()  # noqa: NPY002
    noise = [fpsim.round_to(torch.full((64,), 1.5), "e5m0", "stochastic").tolist() for _ in range(2)]
    return pickle.dumps(
        (torch.get_rng_state().tolist(), numpy[0], numpy[1].tolist(), *numpy[2:], random.getstate(), noise)
    )


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()  # noqa: NPY002


def disturbing(job: Job) -> dict[str, float]:
    """A training function that seeds and draws from everything."""
    first = draws()
    for seed in (torch.manual_seed, np.random.seed, random.seed, fpsim.manual_seed):
        seed(123)
    draws()
    return {"torch": first[0], "numpy": first[1], "python": first[2]}


def unseeded(seed: int) -> Task:
    """A task that forgets its seed."""
    x = torch.randn(16, 2) + np.random.rand() + random.random()  # noqa: NPY002
    y = (x[:, 0] > x.mean()).long()
    return Task("unseeded", torch.nn.Linear(2, 2), (x, y), (x, y), torch.nn.functional.cross_entropy, {"a": accuracy})


def swept(out: Path, **options: Any) -> Results:
    arguments = {"formats": ["e5m2"], "baseline": False, "show_progress": False, "out": out}
    return sweep(**{**arguments, **options})  # type: ignore[arg-type]


def resumed(out: Path) -> None:
    swept(out, task="digits", task_options={"steps": 1})
    with Ledger(out / "ledger.sqlite") as ledger:
        ledger.release([*ledger.states()])
    resume(out, show_progress=False)


CALLS: dict[str, Callable[[Path], object]] = {
    "plan": lambda out: plan("digits", ["fp16", "recipe:fp8_current", {"error": "e5m2"}], ["none", "adaptive"]),
    "task": lambda out: swept(out, task=unseeded, task_options={"steps": 2}, roundings=["stochastic"]),
    "function": lambda out: swept(out, train=disturbing),
    "resume": resumed,
    "train": lambda out: train(unseeded(0), "e5m2", "stochastic", steps=2, checkpoint=out / "c.pt"),
}


@pytest.mark.parametrize("own_noise", [False, True], ids=["noise-of-torch", "own-noise"])
@pytest.mark.parametrize("call", CALLS)
def test_the_callers_generators_are_where_they_were(tmp_path: Path, call: str, own_noise: bool) -> None:
    def seeded() -> None:
        seed_generators(7)
        fpsim.manual_seed(8 if own_noise else None)
        if call == "train":
            unseeded(0)

    def called() -> None:
        seed_generators(7)
        fpsim.manual_seed(8 if own_noise else None)
        CALLS[call](tmp_path)

    seeded()
    expected = states()
    called()
    assert states() == expected


def test_a_task_that_seeds_nothing_is_seeded_by_its_cell(tmp_path: Path) -> None:
    losses = []
    for seed in (1, 2):
        seed_generators(seed)
        results = swept(
            tmp_path / str(seed), task=unseeded, formats=["fp32", "e5m2"], seeds=2, task_options={"steps": 3}
        )
        losses.append({row["id"]: results.telemetry(row["id"])["losses"].tolist() for row in results.rows()})
    assert losses[0] == losses[1]
    by_format = {(row["format"], row["seed"]): losses[0][row["id"]] for row in results.rows()}
    assert by_format["fp32", 0][0] == pytest.approx(by_format["e5m2", 0][0], rel=0.2)  # one beginning
    assert by_format["fp32", 0] != by_format["fp32", 1]


def test_a_training_function_draws_what_its_seed_gives(tmp_path: Path) -> None:
    (row,) = swept(tmp_path, train=disturbing, seeds=[5]).rows()
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    random.seed(5)
    assert (row["torch"], row["numpy"], row["python"]) == draws()


def test_a_seed_of_any_size_seeds_numpy() -> None:
    for seed in (-1, 2**40, np.int64(3)):
        with kept_generators():
            seed_generators(seed)  # type: ignore[arg-type]
            first = draws()
            seed_generators(seed)  # type: ignore[arg-type]
            assert draws() == first
