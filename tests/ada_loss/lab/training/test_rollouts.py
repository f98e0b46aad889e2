"""Trainings from rollouts: another format draws, its gap is measured, weights are followed, and all of it resumes."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ada_loss
import fpsim
from ada_loss.lab.cells.cell_formats import canonical_format, label, rollout_of
from ada_loss.lab.cells.cells import plan
from ada_loss.lab.cells.names import names_of
from ada_loss.lab.tasks import rl as task_of_sums
from ada_loss.lab.tasks.policy_gradient import CURVES, expected_reward, play, policy_gradient
from ada_loss.lab.tasks.rl import is_right
from ada_loss.lab.tasks.task import Task, trained_with
from ada_loss.lab.training.loop import Training, train
from ada_loss.lab.training.options import TrainOptions
from ada_loss.lab.training.rollouts import Rollout, as_rollout

SYMBOLS = 6
OPTIONS: dict[str, Any] = {"optimizer": "adam", "learning_rate": 0.03, "batch_size": 12, "schedule": "constant"}


@trained_with(**OPTIONS)
def successors(seed: int = 0) -> Task:
    """After each of six symbols comes the next one, twice: a table of logits learns it from its own samples."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(SYMBOLS, 16), nn.Linear(16, SYMBOLS))
    prompts = torch.arange(SYMBOLS).repeat(4)[:, None]
    answers = torch.cat([(prompts + 1) % SYMBOLS, (prompts + 2) % SYMBOLS], dim=1)
    test = (torch.cat([prompts, answers[:, :-1]], dim=1), answers)
    own = partial(play, reward=is_right, group=16)
    metrics = {"reward": expected_reward}
    goal = {"reward": "maximize"}
    return Task(
        "successors", model, (prompts, answers), test, policy_gradient, metrics, goal=goal, play=own, curves=CURVES
    )


successors.plays = True  # type: ignore[attr-defined]


def test_a_policy_learns_from_its_samples() -> None:
    before = train(successors(), steps=1, **{**OPTIONS, "learning_rate": 0.0}).metrics["reward"]
    run = train(successors(), steps=60, **OPTIONS)
    assert before < 0.1  # 1 in 36 by chance
    assert run.metrics["reward"] > 0.5
    rewards = [value for _, value in run.curves["sampled_reward"]]
    assert [step for step, _ in run.curves["sampled_reward"]] == [*range(60)]
    assert run.metrics["sampled_reward"] == pytest.approx(sum(rewards) / 60)
    assert sum(rewards[-10:]) > sum(rewards[:10]) + 3


def test_an_engine_of_float32_stays_with_its_trainer_and_one_of_few_bits_parts_from_it() -> None:
    same = train(successors(), steps=20, **OPTIONS)
    near, far = (train(successors(), steps=20, rollout=fmt, **OPTIONS) for fmt in ("bf16", "e2m1fn"))
    # from one set of weights, in each step: float32 of a log-probability is 2^-24, and its square the KL's
    assert max(value for _, value in same.curves["dlogp"]) < 1e-6
    for name in ("dlogp", "kl"):
        assert same.metrics[name] < near.metrics[name] < far.metrics[name]
    assert far.metrics["dlogp"] > 10 * near.metrics["dlogp"]
    assert same.metrics["outside_0.01"] == 0.0
    assert far.metrics["outside_0.2"] > 0.1


def test_the_engine_draws_in_its_format_from_the_weights_of_the_step() -> None:
    seen: list[Tensor] = []

    def spy(forward: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(forward(torch.arange(SYMBOLS)[:, None]))
        return play(forward, x, y, is_right, 16)

    task = successors()
    task = Task(task.name, task.model, task.train, task.test, policy_gradient, task.metrics, play=spy)
    training = Training(task, None, None, TrainOptions(**OPTIONS, steps=3), None, Rollout("e2m1fn"))
    weights = []
    training.before_step = lambda x, y: weights.append([p.detach().clone() for p in training.model.parameters()])
    training.run()
    assert len(seen) == 3
    for given, (table, weight, bias) in zip(seen, weights, strict=True):
        model = fpsim.quantize(successors().model, "e2m1fn")
        with torch.no_grad():
            for p, value in zip(model.parameters(), (table, weight, bias), strict=True):
                p.copy_(value)
            assert torch.equal(model(torch.arange(SYMBOLS)[:, None]), given)
    assert not torch.equal(weights[0][1], weights[2][1])


@pytest.mark.parametrize("weights", ["token", "truncated"])
def test_importance_weights_change_what_is_learnt_only_where_the_engines_part(weights: str) -> None:
    far = [
        train(successors(), steps=5, rollout={"format": "e2m1fn", "weights": w}, **OPTIONS) for w in ("none", weights)
    ]
    assert far[0].losses[0] != far[1].losses[0]
    near = [
        train(successors(), steps=5, rollout={"weights": w}, **OPTIONS).metrics["reward"] for w in ("none", weights)
    ]
    assert near[0] == pytest.approx(near[1], rel=1e-4)  # ratios of 1 to float32's last digits


@pytest.mark.parametrize("rollout", [None, {"format": "recipe:fp8_delayed", "weights": "token"}], ids=["same", "fp8"])
def test_a_seed_is_a_training_and_an_interrupted_one_goes_on_to_the_same_bits(tmp_path: Path, rollout: Any) -> None:
    runs = [train(successors(1), steps=9, seed=seed, rollout=rollout, **OPTIONS) for seed in (4, 4, 5)]
    assert (runs[0].losses, runs[0].curves, runs[0].metrics) == (runs[1].losses, runs[1].curves, runs[1].metrics)
    assert runs[0].losses != runs[2].losses
    done: list[int] = []

    def stop(steps: int) -> None:
        done.append(steps)
        if sum(done) == 5:
            raise KeyboardInterrupt

    path = tmp_path / "checkpoint"
    options = {"checkpoint": path, "checkpoint_seconds": 0.0, "seed": 4, "rollout": rollout, **OPTIONS}
    with pytest.raises(KeyboardInterrupt):
        train(successors(1), steps=9, progress=stop, **options)
    again: list[int] = []
    run = train(successors(1), steps=9, progress=again.append, **options)
    assert again[0] == 4  # it went on behind the fourth step, whose checkpoint is whole
    assert (run.losses, run.curves, run.metrics) == (runs[0].losses, runs[0].curves, runs[0].metrics)


def test_a_sweep_judges_engines_against_float32_with_float32(tmp_path: Path) -> None:
    formats = ["bf16", {"name": "bf16 / FP4", "format": "bf16", "rollout": {"format": "e2m1fn", "weights": "token"}}]
    results = ada_loss.sweep(
        successors, formats, seeds=3, out=tmp_path, task_options={"steps": 40}, show_progress=False, minimize=["kl"]
    )
    assert results.counts["done"] == 9
    rows = {row["format"]: row for row in results.rows()}
    assert {*rows} == {"float32", "bf16", "bf16 / FP4"} or {*rows} == {"fp32", "bf16", "bf16 / FP4"}
    assert rows["bf16"]["kl"] < 1e-9 < rows["bf16 / FP4"]["kl"]
    (verdict,) = results.verdicts()
    assert (verdict.metric, verdict.sign) == ("reward", 1)
    assert {one.fmt for one in verdict.combinations} == {"bf16", "bf16 / FP4"}
    (kl,) = results.verdicts(metric="kl", tolerance=1e-6)
    assert kl.sign == -1
    curve = results.curves("sampled_reward", points=2)
    assert all(one.mean[1] > one.mean[0] for one in curve)


def test_a_rollout_is_one_however_it_is_written() -> None:
    written = [
        {"format": "half", "rollout": "bfloat16"},
        {"format": "fp16", "rollout": {"format": "bf16"}},
        {"format": "fp16", "rollout": {"format": "bf16", "weights": "none"}},
        {"format": "fp16", "rollout": {"format": "bf16"}, "update": "float32"},
    ]
    assert [canonical_format(fmt) for fmt in written] == [{"format": "fp16", "rollout": {"format": "bf16"}}] * 4
    for as_none in ({"format": "fp16", "rollout": "half"}, {"format": "fp16", "rollout": {"weights": "none"}}):
        assert canonical_format(as_none) == "fp16"  # the trainer's own engine
    both = canonical_format({"format": "fp32", "update": "bf16_sr", "rollout": {"weights": "token"}})
    assert both == {"format": "fp32", "update": "bf16_sr", "rollout": {"weights": "token"}}
    assert label(both) == "fp32, update bf16_sr, weights token"
    policy = canonical_format({"format": "bf16", "rollout": {"products": {"x": "bf16", "w": "bf16"}}})
    assert names_of([policy]) == {label(policy): "bf16, rollouts x,w=bf16"}
    assert rollout_of(both) == Rollout(None, "token")
    assert rollout_of("fp16") is None
    cells = plan("rl", [{"format": "bf16", "rollout": "recipe:nvfp4"}], [1024], seeds=2)
    assert [str(cell) for cell in cells] == [
        f"bf16, rollouts nvfp4 recipe nearest_even 1024 seed {seed}" for seed in range(2)
    ]


def test_the_format_and_the_weights_of_rollouts_are_of_a_cells_identity() -> None:
    formats = [
        "bf16",
        {"format": "bf16", "rollout": "fp16"},
        {"format": "bf16", "rollout": "e4m3fn"},
        {"format": "fp16", "rollout": "e4m3fn"},
        *({"format": "bf16", "rollout": {"format": "fp16", "weights": weights}} for weights in ("token", "truncated")),
    ]
    ids = [cell.id for cell in plan("rl", formats, ["none"])]
    assert len({*ids}) == len(formats)
    again = {"rollout": {"weights": "truncated", "format": "half"}, "format": "bfloat16"}
    assert [cell.id for cell in plan("rl", [again], ["none"])] == ids[-1:]


@pytest.mark.parametrize(
    ("task", "fmt", "message"),
    [
        (
            "digits",
            {"format": "bf16", "rollout": "fp16"},
            r"has a rollout, and the task 'digits' draws none\. Use 'rl'",
        ),
        ("rl", {"format": "bf16", "rollout": {"weights": "tokens"}}, "Unknown weights 'tokens'.*Did you mean 'token'"),
        ("rl", {"format": "bf16", "rollout": {"weights": "token", "eps": 1}}, "A rollout has 'eps' in addition"),
        ("rl", {"format": "bf16", "rollout": "fp9"}, "fp9"),
        ("rl", {"format": "bf16", "rollouts": "fp16"}, "rollouts"),
        ("rl", {"format": "bf16", "rollout": "fp16", "weight": "fp16"}, "A format with a rollout has 'weight', too"),
        ("rl", {"format": {"native": "fp16"}, "rollout": "fp16"}, "which emulates nothing"),
        ("rl", {"rollout": {"format": {"format": "fp16", "rollout": "bf16"}}}, "Expected: a format alone"),
    ],
)
def test_a_rollout_that_cannot_be_is_refused_before_any_work(task: str, fmt: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        plan(task, [fmt], ["none"])


def test_a_training_function_draws_its_own_rollouts() -> None:
    with pytest.raises(ValueError, match="a training function draws its own"):
        plan(None, [{"format": "bf16", "rollout": "fp16"}], ["none"], train="own_trainings:nanogpt")


def test_a_task_that_draws_nothing_or_whose_loss_takes_no_weights_says_so() -> None:
    plain = Task("plain", nn.Linear(1, 1), *[(torch.zeros(1, 1),) * 2] * 2, nn.functional.mse_loss, {})
    with pytest.raises(ValueError, match=r"The task 'plain' draws no samples"):
        train(plain, steps=1, rollout="fp16")
    own = Task("own", nn.Linear(1, 1), plain.train, plain.test, nn.functional.mse_loss, {}, play=lambda f, x, y: (x, y))
    with pytest.raises(ValueError, match=r"The loss of the task 'own' takes no weights"):
        train(own, steps=1, rollout={"weights": "token"})
    assert as_rollout(as_rollout({"weights": "token"})) == Rollout(None, "token")


def test_a_curve_and_a_metric_have_names_of_their_own() -> None:
    with pytest.raises(ValueError, match=re.escape("'loss' is a metric and a curve of the task 'plain'")):
        Task(
            *("plain", nn.Linear(1, 1), *[(torch.zeros(1, 1),) * 2] * 2, nn.functional.mse_loss),
            {"loss": lambda x, y: 0.0},
            curves={"loss": lambda x, y: 0.0},
        )


def test_the_task_of_sums_is_drawn_by_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[task_of_sums.__module__], "TAUGHT", 20)  # of 300: five seconds less
    far = train(task_of_sums(0), "bf16", steps=3, rollout="e2m1fn", **task_of_sums.options)
    same = train(task_of_sums(0), "bf16", steps=3, **task_of_sums.options)
    assert [step for step, _ in far.curves["dlogp"]] == [0, 1, 2]
    assert far.metrics["dlogp"] > 1e-3 > 1e-5 > same.metrics["dlogp"]
    assert 0 < far.metrics["reward"] < 0.1  # four answers of 10,000 by chance, and a little more
