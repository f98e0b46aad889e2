"""Every notebook is stored with its outputs, and shows the same when it is executed again."""

from __future__ import annotations

import ast
import base64
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from public_names import names_in, private_names_in

nbformat = pytest.importorskip("nbformat", reason="the extra `test` brings nbformat")
pytest.importorskip("nbclient", reason="the extra `test` brings nbclient")

ROOT = Path(__file__).parents[1]
STORE = ROOT / "notebooks" / "store.py"
NOTEBOOKS = sorted(STORE.parent.glob("*.ipynb"))


def store(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, STORE, *arguments], capture_output=True, text=True)


def outputs_of(path: Path) -> list[tuple[str, list[Any]]]:
    cells = nbformat.read(path, as_version=4).cells
    return [(cell.source, cell.outputs) for cell in cells if cell.cell_type == "code"]


def pictures_of(path: Path) -> list[bytes]:
    shown = [output.get("data", {}) for _, outputs in outputs_of(path) for output in outputs]
    return [base64.b64decode(data["image/png"]) for data in shown if "image/png" in data]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_reads_names_of_all_only_and_no_underscores(path: Path) -> None:
    """Whoever learns from a notebook copies its imports: what they name is promised."""
    code = "\n".join(code for code, _ in outputs_of(path))
    assert private_names_in(code) == []
    attributes = {node.attr for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)}
    assert [name for name in attributes if name.startswith("_")] == []
    assert {"fpsim", "ada_loss"} & {*names_in(code)}


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_notebook_shows_what_it_stores(path: Path) -> None:
    done = store("--check", path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-6000:]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_notebook_is_stored_whole_and_without_complaints(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    kinds = {output.get("name", output.output_type) for cell in cells for output in cell.outputs}
    assert kinds <= {"stdout", "display_data", "execute_result"}  # no stderr, no error
    assert len(pictures_of(path)) >= 2


def test_the_stored_pictures_are_below_2_mb_in_all() -> None:
    pictures = [picture for path in NOTEBOOKS for picture in pictures_of(path)]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert sum(map(len, pictures)) < 2e6


def test_a_notebook_asks_why_then_watches_then_compares_a_model_of_transformers() -> None:
    (path,) = [path for path in NOTEBOOKS if "import transformers" in path.read_text()]
    calls = re.findall(r"fpsim\.(why|watch|compare)\(", "".join(source for source, _ in outputs_of(path)))
    assert calls == ["why", "watch", "compare"]


def small_notebook(path: Path, *sources: str) -> Path:
    cells = [nbformat.v4.new_code_cell(source, id=str(i)) for i, source in enumerate(sources)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


@pytest.mark.full
def test_a_notebook_is_stored_and_another_output_is_told(tmp_path: Path) -> None:
    path = small_notebook(
        tmp_path / "a.ipynb",
        "import tempfile\nprint(1 + 1)\nprint('fp16')",
        "tempfile.mkdtemp(), 7",
        "from IPython.display import Image\nImage(b'\\x89PNG')",
    )
    assert store(path).returncode == 0
    (_, (words,)), (_, (value,)), (_, (picture,)) = outputs_of(path)
    assert words.text == "2\nfp16\n"  # of two prints one output
    assert value.data["text/plain"].endswith(", 7)")
    assert {*picture.data} == {"image/png", "text/plain"}
    assert nbformat.read(path, as_version=4).metadata == {"language_info": {"name": "python"}}
    same = store("--check", path)  # in another folder of tempfile
    assert (same.returncode, same.stdout) == (0, "")
    before = path.read_bytes().replace(b"2\\n", b"3\\n").replace(b"image/png", b"image/gif")
    path.write_bytes(before)
    other = store("--check", path)
    assert other.returncode == 1
    assert "-3\n+2\n fp16" in other.stdout
    assert "-image/gif\n+image/png" in other.stdout
    assert path.read_bytes() == before  # a check writes nothing


# Deviations of 1.4 and 2.0 on both sides: s = 1.73 with 4 degrees of freedom. Of two means, at 0.1 % in all, t is 10.3:
# they differ by 17.8 at most, and by 0.1 more, since they are rounded to it.
MEANS = "| fp32 | 91.2 ± 1.4 |\n| fp16 | 50.0 ± 2.0 |"
ALIKE_AND_NOT = [
    ("", "accuracy 0.5", "accuracy 0.5", "accuracy 0.51"),
    ("sums", "fp16: 2750 of 16384, loss 4.17", "fp16: 2500 of 16384, loss 4.5", "fp16: 2750 of 16384, loss 4.7"),
    ("sums", "e4m3fn 0.5", "e4m3fn 0.58", "e4m2fn 0.5"),
    ("sums", "loss 0.5", "loss 0.5", "loss nan"),
    ("factor=2", "fp16 48 28 0.944 787", "fp16 48 27 0.85 537", "fp16 48 28 0.944 393"),
    ("factor=2", "0.05 -3.0", "0.14 -1.6", "0.05 3.0"),
    ("errors", "(0.0158 -> 5.39e+05)", "(0.15 -> 4.07)", "(0.0158 -> 0.05)"),
    ("errors", "KL 1.7e-06 nats", "KL 6e-06 nats", "KL 1.8e-05 nats"),
    ("errors", "grows at add (0.01 -> 2)", "grows at add (0.01 -> 2)", "grows at softmax (0.01 -> 2)"),
    # two numbers at 0.1 % in all: 3.48 deviations of a difference, 0.049, and a digit
    ("deviation=0.01", "e5m2 0.971, 0.375", "e5m2 0.922, 0.424", "e5m2 0.92, 0.375"),
    ("deviation=0.01", "skipped 2, 0.971", "skipped 2, 0.971", "skipped 3, 0.971"),
    ("seeds=2", MEANS, MEANS.replace("91.2", "73.5"), MEANS.replace("91.2", "73.2")),
    ("seeds=2", MEANS, MEANS.replace("91.2 ± 1.4", "91.0 ± 0.0"), MEANS.replace("91.2 ± 1.4", "nan ± nan")),
    ("seeds=2", MEANS, MEANS, MEANS.replace("fp32", "bf16")),
]


@pytest.mark.parametrize(("tag", "stored", "near", "far"), ALIKE_AND_NOT, ids=lambda case: case.replace("\n", " "))
def test_a_tag_says_how_the_numbers_of_a_cell_are_compared(tag: str, stored: str, near: str, far: str) -> None:
    alike = runpy.run_path(str(STORE))["alike"]
    tags = [tag] if tag else []
    assert all(alike(stored.splitlines(), near.splitlines(), tags))
    assert not all(alike(stored.splitlines(), far.splitlines(), tags))


# Two processes with six trainings each: half a minute.
TRAININGS = """
import json, statistics
from ada_loss.lab.tasks import digits
from ada_loss.lab.training import train
last, lines = {}, []
for name in ("fp32", "e5m2"):
    runs = [train(digits(seed), None if name == "fp32" else name, epochs=3) for seed in range(3)]
    points = [100 * run.metrics["accuracy"] for run in runs]
    lines.append(f"| {name} | {statistics.mean(points):.1f} ± {statistics.stdev(points):.1f} |")
    last[name] = [run.losses[-1] for run in runs]
print(json.dumps([last, lines]))
"""
OTHER_PROCESSOR = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}


@pytest.mark.full
def test_a_training_on_another_processor_has_other_digits_and_shows_the_same() -> None:
    alike = runpy.run_path(str(STORE))["alike"]
    shown = []
    for settings in ({}, OTHER_PROCESSOR):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **settings}
        command = [sys.executable, "-c", TRAININGS]
        shown.append(json.loads(subprocess.run(command, capture_output=True, check=True, env=environment).stdout))
    (losses, stored), (other_losses, executed) = shown
    if losses == other_losses:
        pytest.skip(f"{OTHER_PROCESSOR} changes no digit of a training here")
    assert all(alike(stored, executed, ["seeds=3"]))
    worse = [re.sub(r"\d+\.\d ±", "10.0 ±", line) for line in executed]  # as by guessing one of ten digits
    assert not any(alike(stored, worse, ["seeds=3"]))


@pytest.mark.full
def test_a_cell_that_raises_stores_nothing(tmp_path: Path) -> None:
    path = small_notebook(tmp_path / "a.ipynb", "1 / 0")
    before = path.read_bytes()
    done = store(path)
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stderr
    assert path.read_bytes() == before
