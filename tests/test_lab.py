"""The digits task, the training loop, the comparison and its command."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fpsim
from ada_loss.__main__ import main
from ada_loss.lab.compare import compare, format_table, underflow_share
from ada_loss.lab.files import write_atomically
from ada_loss.lab.plots import figure_bytes, plot_comparison
from ada_loss.lab.tasks import digits
from ada_loss.lab.train import train


def test_a_seed_gives_the_same_training_bit_for_bit() -> None:
    for rounding in ("nearest_even", "stochastic"):
        first, second = (train(digits(3), "e5m2", rounding, epochs=1, seed=3) for _ in range(2))
        assert first.losses == second.losses
        assert first.metrics == second.metrics


def test_training_leaves_the_task_and_torchs_randomness_alone() -> None:
    task = digits()
    before = [p.clone() for p in task.model.parameters()]
    state = torch.get_rng_state()
    train(task, "fp16", "stochastic", epochs=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, task.model.parameters(), strict=True))


def test_plain_float32_is_what_torch_computes() -> None:
    task = digits(1)
    run = train(task, None, epochs=1, seed=1)
    model = task.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 22)
    losses = []
    for batch in torch.randperm(1347, generator=torch.Generator().manual_seed(1)).split(64):
        optimizer.zero_grad()
        loss = task.loss(model(task.train[0][batch]), task.train[1][batch])
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert run.losses == losses


def test_training_learns_in_float32_and_recording_changes_nothing() -> None:
    task = digits()
    run = train(task, "fp16", epochs=3)
    assert run.metrics["accuracy"] > 0.9
    recorded = train(task, "fp16", epochs=3, record_every=2)
    assert recorded.losses == run.losses
    assert underflow_share(recorded.rows) > underflow_share(train(task, "bf16", epochs=3, record_every=2).rows) == 0


def test_underflow_is_the_share_of_lost_nonzero_gradients() -> None:
    rows = [
        {"role": "error", "nonzero": 6, "underflow": 1},
        {"role": "error", "nonzero": 2, "underflow": 1},
        {"role": "activation", "nonzero": 100, "underflow": 100},
    ]
    assert underflow_share(rows) == 2 / 8
    assert underflow_share([]) == 0


def test_fp32_is_trained_once_and_unknown_formats_stop_everything_before_it_starts() -> None:
    results = compare(digits, ["fp32", "bf16"], epochs=1, show_progress=False)
    assert [(r["format"], r["rounding"]) for r in results] == [
        ("fp32", "nearest_even"),
        ("bf16", "nearest_even"),
        ("bf16", "stochastic"),
    ]
    assert len(format_table(results).splitlines()) == 4
    assert figure_bytes(plot_comparison(results))[:4] == b"\x89PNG"

    def no_task(seed: int) -> object:
        raise AssertionError("started")

    with pytest.raises(ValueError, match="Unknown format 'fp61'"):
        compare(no_task, ["fp16", "fp61"])  # type: ignore[arg-type]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "table.csv"
    write_atomically(target, b"old")
    with pytest.raises(TypeError):
        write_atomically(target, "not bytes")  # type: ignore[arg-type]
    assert target.read_bytes() == b"old"
    write_atomically(target, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["table.csv"]
    assert target.read_bytes() == b"new"


def test_the_command_prints_its_table_and_writes_its_files(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "ada_loss",
        "digits",
        "--formats",
        "e5m2",
        "--epochs",
        "1",
        "--out",
        str(tmp_path / "a/b"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "e5m2     nearest_even" in done.stdout
    assert "100%" in done.stderr  # the progress bar
    rows = list(csv.DictReader((tmp_path / "a/b/digits.csv").read_text().splitlines()))
    assert [row["rounding"] for row in rows] == ["nearest_even", "stochastic"]
    assert 0 <= float(rows[0]["accuracy"]) <= 1
    assert (tmp_path / "a/b/digits.png").read_bytes()[:4] == b"\x89PNG"
    assert b"<svg" in (tmp_path / "a/b/digits.svg").read_bytes()


def test_bad_options_are_refused_before_anything_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["digits", "--formats", "fp61", "--out", str(tmp_path / "x")]) == 2
    assert "Did you mean fp16" in capsys.readouterr().err
    assert main(["digits", "--epochs", "0"]) == 2
    assert "Possible: 1 or more" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_help_answers_without_importing_torch() -> None:
    code = "import sys; sys.argv = ['x', 'digits', '--help']\nfrom ada_loss.__main__ import parser\n"
    code += "try: parser().parse_args()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_catalogue_defaults_exist() -> None:
    from ada_loss.__main__ import DEFAULT_FORMATS

    assert all(fpsim.as_format(name) for name in DEFAULT_FORMATS.split())
