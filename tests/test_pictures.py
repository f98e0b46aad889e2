"""Each picture of the docs has a committed command, and the commands run in small."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import ada_loss
from ada_loss.lab.tasks.policy_gradient import CURVES, expected_reward, play, policy_gradient
from ada_loss.lab.tasks.rl import is_right

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "docs"), str(ROOT / "benchmarks")]

import pictures  # noqa: E402
import updates  # noqa: E402

PNG = b"\x89PNG"


def test_every_picture_has_its_command() -> None:
    assert {*pictures.COMMANDS} == {path.name for path in (ROOT / "docs").glob("*.png")}


def test_pictures_of_sweeps_are_drawn_from_a_small_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "sweep"
    options = {"epochs": 1, "record_every": 10}
    words = {"task_options": options, "show_progress": False}
    ada_loss.sweep("digits", ["e4m3fn"], ["none"], seeds=1, baseline=False, out=sweep, **words)
    for name in pictures.SWEEPS:
        assert pictures.main([name, "--sweep", str(sweep), "--out", str(tmp_path)]) == 0
        assert (tmp_path / name).read_bytes()[:4] == PNG
    assert pictures.main(["operands.png"]) == 2
    assert "ada-loss sweep operands" in capsys.readouterr().err


def copying(seed: int) -> ada_loss.Task:
    """One of three symbols is to be written again: what `rl` is, in small."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(3, 8), nn.Linear(8, 3))
    symbols = torch.arange(3).repeat(8)[:, None]
    own = partial(play, reward=is_right, group=4)
    metrics = {"reward": expected_reward}
    return ada_loss.Task(
        "copying", model, (symbols, symbols), (symbols, symbols), policy_gradient, metrics, play=own, curves=CURVES
    )


def test_the_picture_of_rewards_has_a_panel_for_each_pair_of_engines(tmp_path: Path) -> None:
    far = {"format": "bf16", "rollout": {"format": {"products": {"x": "mxfp4", "w": "mxfp4"}}}}
    formats = [{"name": "bf16 / FP4", **far}, {"name": "fp16 / fp16", "format": "fp16"}]
    words = {"task_options": {"steps": 16, "batch_size": 8, "record_every": 0}, "show_progress": False}
    results = ada_loss.sweep(copying, formats, ["none"], seeds=2, out=tmp_path, **words)
    figure = pictures.rewards(results)
    lines = {axes.get_title(): {line.get_label(): line for line in axes.lines} for axes in figure.axes}
    shown = {title: [name for name in names if name[0] != "_"] for title, names in lines.items()}
    both, alone = ["float32 / float32", "no weights"], ["float32 / float32"]
    assert shown == {"bf16 / bf16": alone, "fp16 / fp16": both, "bf16 / FP8": alone, "bf16 / FP4": both}
    frame = results.curves("sampled_reward", points=16).to_frame()
    means = frame[frame["format"] == "bf16 / FP4"].groupby("step")["sampled_reward"].mean().to_numpy()
    drawn = lines["bf16 / FP4"]["no weights"].get_ydata()
    assert drawn == pytest.approx(means.reshape(8, 2).mean(1))
    (dot,) = lines["bf16 / FP4"]["_no weights, tested"].get_ydata()
    of_seeds = [row["reward"] for row in results.to_frame().to_dict("records") if row["format"] == "bf16 / FP4"]
    assert (len(of_seeds), dot) == (2, pytest.approx(sum(of_seeds) / 2))


def test_examples_of_a_page_give_their_pictures_in_order(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    head = "class Drawn:\n    def plot(self, what=1):\n        return what"
    page.write_text(
        f"```python\n{head}\n\n\nfound = Drawn()\nfound.plot()  # the first\nfound.plot(2)\n```\n\n```\n```\n"
        "```python\nprint(3)\n```\n\n```\n3\n```\n"
    )
    assert pictures.figures_of(page) == [1, 2]
    text = (ROOT / "docs" / "diagnose.md").read_text()
    assert [text.index(f"]({name})") for name in pictures.DIAGNOSE] == sorted(
        text.index(f"]({name})") for name in pictures.DIAGNOSE
    )


def test_the_picture_of_updates_is_drawn_from_a_few_steps() -> None:
    trainings = {"bf16 nearest": updates.train(updates.UPDATES["bf16 nearest"], 3e-4, 0, steps=10)}
    assert updates.figure_bytes(updates.figure_of(trainings, 3e-4))[:4] == PNG
