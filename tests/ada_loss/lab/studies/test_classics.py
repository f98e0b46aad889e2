"""Classics: what they say is true of rows whose truth is planted, the effects are there, and a killed run goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from ada_loss.lab.studies.classics import CLASSICS, Paper, reproduce_classic
from ada_loss.lab.studies.classics.frame import Classic, reproduce
from ada_loss.lab.studies.classics.swamping import STALL
from ada_loss.lab.studies.classics.telling import Row, Rows
from fpsim.insight.pictures import new_picture

FRESH = (7301, 7302)  # of nothing that was looked at while thresholds were chosen


def classic(name: str) -> Classic:
    module = import_module(f"ada_loss.lab.studies.classics.{name.replace('-', '_')}")
    assert isinstance(module.CLASSIC, Classic)
    return module.CLASSIC


def swamping(setting: dict[str, Any], is_there: bool) -> list[Row]:
    value = min(setting["length"], 4096) if is_there and setting["sum"] == "term by term" else setting["length"]
    return [{"value": float(value), "exact": setting["length"], "error": value / setting["length"] - 1}]


def bf16_updates(setting: dict[str, Any], is_there: bool) -> list[Row]:
    bits = 4.0 + 0.25 * (is_there and setting["update"] == "nearest")
    rows: list[Row] = [{"what": what, "step": step, "value": 0.5} for what in ("loss", "lost") for step in (0, 10)]
    return [
        *rows,
        {"what": "bits", "step": 20, "value": bits},
        {"what": "all lost", "step": 20, "value": 0.75},
        {"what": "norm weights still 1", "step": 20, "value": 0.125},
    ]


def fixed_point(setting: dict[str, Any], is_there: bool) -> list[Row]:
    wrong = 90.0 if is_there and setting["rounding"] == "to nearest" else 7.0
    return [{"epoch": 1, "wrong": 12.5}, {"epoch": 2, "wrong": wrong}]


def underflow(setting: dict[str, Any], is_there: bool) -> list[Row]:
    scale = setting["log2_scale"]
    is_lost, is_over = (is_there and scale != "float32" and bound * scale >= 20 for bound in (-1, 1))
    return [
        {
            "metric": 10.0 if is_lost or is_over else 94.0,
            "underflow": 0.875 if is_lost else 0.0,
            "skipped": float(is_over),
        }
    ]


def depth_scales(setting: dict[str, Any], is_there: bool) -> list[Row]:
    scale, fmt = setting["scale"], setting.get("format")
    if setting["what"] == "accuracy":
        return [{"value": 10.0 if scale == 0 else 94.0}]
    return [{"value": 1.0 if is_there and fmt != "e5m2" and scale != "per layer" else 0.125}]


def rollouts(setting: dict[str, Any], is_there: bool) -> list[Row]:
    factor = 8 if is_there and setting["format"] == "bf16" else 1
    return [{"difference": 6e-4 * factor, "largest": 0.1, "sequence": 0.01 * factor, "kl": 3e-7 * factor**2}]


# Of each classic: planted rows, and what its words say of them if the effect is there, and if it is not.
PLANTED: dict[str, tuple[Callable[[dict[str, Any], bool], list[Row]], str, str]] = {
    "swamping": (swamping, "give 4,096, an error of -75.0", "give 16,384, an error of +0.0"),
    "bf16-updates": (bf16_updates, "nearest is +0.250 ± 0.000 bits", "nearest is +0.000 ± 0.000 bits"),
    "fixed-point": (
        fixed_point,
        "to nearest is wrong for 90.0 ± 0.0 % (at its best epoch 12.5 %)",
        "to nearest is wrong for 7.0 ± 0.0 %",
    ),
    "underflow": (underflow, "Scales from 2^-8 to 2^8 reach", "Scales from 2^-28 to 2^28 reach"),
    "depth-scales": (
        depth_scales,
        "in e4m3fn: the error of the worst layer's weight gradient is 1 of its norm",
        "in e4m3fn: the error of the worst layer's weight gradient is 0.12 of its norm",
    ),
    "rollouts": (rollouts, "8.0 times less; the KL", "1.0 times less; the KL"),
}


def planted(name: str, truths: dict[int, bool]) -> Rows:
    """Rows of a quick run, each seed with the effect or without."""
    make = PLANTED[name][0]
    return Rows(
        {**setting, "seed": seed, **row}
        for setting in classic(name).settings(True)
        for seed, is_there in truths.items()
        for row in make(setting, is_there)
    )


def seen(name: str, rows: Rows) -> str:
    """What a classic says of rows, on one line."""
    return " ".join(" ".join(classic(name).says(rows)).split())


@pytest.mark.parametrize("name", CLASSICS)
def test_the_words_are_true_of_planted_rows(name: str) -> None:
    one, (_, present, absent) = classic(name), PLANTED[name]
    there, not_there = planted(name, {3: True, 4: True}), planted(name, {3: False, 4: False})
    assert one.verdict(there) == "The effect is there in all of 2 seeds."
    assert one.verdict(not_there) == "The effect is not there in any of 2 seeds."
    mixed = planted(name, {3: True, 4: False, 5: True})
    assert one.verdict(mixed) == "One cannot tell whether the effect is there: it is in 2 of 3 seeds."
    assert present in seen(name, there)
    assert absent not in seen(name, there)
    assert absent in seen(name, not_there)


# Near misses of the size, in the right direction: (classic, values to change, of which rows).
TOO_SMALL: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("swamping", {"sum": "term by term", "length": 2**14}, {"value": 16000.0, "error": -0.02}),
    ("bf16-updates", {"update": "nearest", "what": "bits"}, {"value": 4.04}),
    ("bf16-updates", {"update": "Kahan", "what": "bits"}, {"value": 4.2}),
    ("fixed-point", {"rounding": "to nearest"}, {"wrong": 20.0}),
    ("fixed-point", {"rounding": "stochastic"}, {"wrong": 30.0}),
    ("underflow", {"log2_scale": -28}, {"metric": 90.0}),
    ("underflow", {"log2_scale": 28}, {"metric": 90.0}),
    ("depth-scales", {"scale": 20, "format": "fp16"}, {"value": 0.2}),
    ("depth-scales", {"scale": "per layer", "format": "fp16"}, {"value": 0.5}),
    ("depth-scales", {"scale": "per layer", "what": "accuracy"}, {"value": 80.0}),
    ("rollouts", {"format": "bf16"}, {"difference": 1.2e-3}),
]


@pytest.mark.parametrize(("name", "which", "change"), TOO_SMALL)
def test_an_effect_that_is_too_small_is_none(name: str, which: dict[str, Any], change: dict[str, Any]) -> None:
    rows = planted(name, {3: True})
    assert classic(name).holds(rows)
    changed = Rows({**row, **change} if which.items() <= row.items() else row for row in rows)
    assert changed != rows
    assert not classic(name).holds(changed)


def significand_of_ten_bits(x: Fraction) -> Fraction:
    """The nearest number of ten significant bits, ties to even, of a positive one."""
    unit = Fraction(1, 2**60)
    while x / unit >= 2**10:
        unit *= 2
    return round(x / unit) * unit


def test_the_sum_that_swamps_is_that_of_fractions() -> None:
    (row,) = classic("swamping").measure({"length": 6000, "sum": "term by term"}, FRESH[0], "cpu")
    generator = torch.Generator().manual_seed(FRESH[0])
    total = Fraction(0)
    for x in (1 + 3**0.5 * (2 * torch.rand(6000, 1, generator=generator) - 1)).flatten().tolist():
        exact = total + Fraction(x)
        total = significand_of_ten_bits(exact) if exact > 0 else exact
    assert row["value"] == float(total) == STALL == 4096


# What is shorter than in a quick run; the trainings of depth-scales are left to that.
SMALL: dict[str, dict[str, Any]] = {"swamping": {}, "depth-scales": {}, "rollouts": {"steps": 20, "rollouts": 4}}


@pytest.mark.parametrize("name", SMALL)
def test_the_effect_is_there_at_a_small_size(name: str) -> None:
    one = classic(name)
    rows = Rows()
    for setting in one.settings(True):
        if setting.get("what") == "accuracy":
            found = depth_scales(setting, True)
        else:
            torch.manual_seed(FRESH[0])
            found = one.measure({**setting, **SMALL[name]}, FRESH[0], "cpu")
        rows += [{**setting, "seed": FRESH[0], **row} for row in found]
    assert one.holds(rows), seen(name, rows)


@pytest.mark.full
@pytest.mark.parametrize("name", CLASSICS)
def test_a_quick_run_shows_the_effect_with_seeds_that_nobody_looked_at(name: str, tmp_path: Path) -> None:
    found = reproduce_classic(name, seeds=FRESH, out=tmp_path, quick=True)
    assert "The effect is there in all of 2 seeds." in found.text, found.text
    assert [path.name for path in found.files] == [f"{name}-quick.{kind}" for kind in ("png", "csv", "md")]
    assert found.seconds < 120


PAPER = Paper("title", "claimed", "limited")


def counted(calls: list[tuple[int, int]], stop_at: int | None = None) -> Classic:
    """A classic whose measurements are counted, and of which one may be interrupted."""

    def measure(setting: dict[str, Any], seed: int, device: str) -> list[Row]:
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        calls.append((setting["size"], seed))
        return [{"drawn": float(torch.rand(())), "size twice": 2 * setting["size"]}]

    return Classic(
        settings=lambda quick: [{"size": size} for size in ((1,) if quick else (1, 2, 3))],
        measure=measure,
        holds=lambda rows: True,
        says=lambda rows: [f"{len(rows)}\n    rows."],
        draw=lambda rows: new_picture(2, 2),
    )


def test_a_run_that_was_stopped_goes_on_and_gives_what_one_without_a_stop_gives(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    with pytest.raises(KeyboardInterrupt):
        reproduce("one", counted(calls, 4), PAPER, seeds=2, out=tmp_path)
    assert len(calls) == 4
    assert not (tmp_path / "one.csv").exists()
    lines: list[str] = []
    reproduce("one", counted(calls), PAPER, seeds=2, out=tmp_path, progress=lines.append)
    assert calls == [(size, seed) for size in (1, 2, 3) for seed in (0, 1)]
    assert len(lines) == 6
    elsewhere = reproduce("one", counted([]), PAPER, seeds=2, out=tmp_path / "other")
    assert (tmp_path / "one.csv").read_bytes() == (tmp_path / "other/one.csv").read_bytes()
    assert (tmp_path / "one.md").read_text().startswith("# title\n\n**Claim.** claimed\n\n**What you see.** The effect")
    assert "6 rows." in elsewhere.text
    assert (tmp_path / "one.png").read_bytes()[:4] == b"\x89PNG"
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]


def test_more_seeds_measure_what_is_new_and_what_is_damaged_or_of_another_version_is_measured_again(
    tmp_path: Path,
) -> None:
    calls: list[tuple[int, int]] = []
    reproduce("one", counted(calls), PAPER, seeds=1, out=tmp_path, quick=True)
    reproduce("one", counted(calls), PAPER, seeds=[0, 9], out=tmp_path, quick=True)
    assert calls == [(1, 0), (1, 9)]
    first, second = (tmp_path / "one").iterdir()
    first.write_bytes(first.read_bytes()[:-7])
    kept = json.loads(second.read_text())
    second.write_text(json.dumps({**kept, "asked": kept["asked"].replace('"torch": "', '"torch": "0.')}))
    reproduce("one", counted(calls), PAPER, seeds=[0, 9], out=tmp_path, quick=True)
    assert calls == [(1, 0), (1, 9), (1, 0), (1, 9)]


def test_nothing_of_the_process_is_changed(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    reproduce("one", counted([]), PAPER, seeds=1, out=tmp_path)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("seeds", [0, -1, 1001, True, 1.5, "2", [], [1, 1], [-1], [2**32], [0.5]])
def test_seeds_that_cannot_be_are_refused(seeds: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither how many nor which"):
        reproduce("one", counted([]), PAPER, seeds=seeds, out=tmp_path)
    assert not [*tmp_path.iterdir()]


def test_devices_and_folders_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device='gpu' is invalid"):
        reproduce("one", counted([]), PAPER, device="gpu", out=tmp_path)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="needs a GPU"):
            reproduce("one", counted([]), PAPER, device="cuda", out=tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        reproduce("one", counted([]), PAPER, out="")


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ada_loss", "reproduce", *words], capture_output=True, text=True, timeout=120
    )


def test_the_command_lists_reproduces_and_refuses(tmp_path: Path) -> None:
    listed = command("--list")
    assert listed.returncode == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()] == [*CLASSICS]
    done = command("swamping", "--quick", "--seeds", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"# {CLASSICS['swamping'].title}")
    assert {path.name for path in tmp_path.glob("*.*")} == {f"swamping-quick.{kind}" for kind in ("png", "csv", "md")}
    wrong = command("swampin")
    assert wrong.returncode == 2
    assert "Did you mean 'swamping'?" in wrong.stderr


@pytest.mark.parametrize("name", CLASSICS)
def test_the_page_has_the_claim_and_the_limits_of_each(name: str) -> None:
    page = " ".join((Path(__file__).parents[4] / "docs" / "classics.md").read_text(encoding="utf-8").split())
    assert f"## {name} {CLASSICS[name].title}." in page
    assert CLASSICS[name].claim in page
    assert CLASSICS[name].limits in page
