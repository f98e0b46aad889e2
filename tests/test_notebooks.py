"""Every notebook is stored with its outputs, and shows the same when it is executed again."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


def test_a_notebook_is_stored_and_another_output_is_told(tmp_path: Path) -> None:
    path = small_notebook(
        tmp_path / "a.ipynb",
        "import fpsim, tempfile\nprint(1 + 1)\nprint(fpsim.Policy(error='fp16').error)",
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
    near = path.read_bytes()
    path.write_bytes(near.replace(b"2\\n", b"2.1\\n"))  # as another processor may compute it
    assert store("--check", path).returncode == 0
    before = near.replace(b"2\\n", b"3\\n").replace(b"image/png", b"image/gif")
    path.write_bytes(before)
    other = store("--check", path)
    assert other.returncode == 1
    assert "-3\n+2\n fp16" in other.stdout
    assert "-image/gif\n+image/png" in other.stdout
    assert path.read_bytes() == before  # a check writes nothing


def test_a_cell_that_raises_stores_nothing(tmp_path: Path) -> None:
    path = small_notebook(tmp_path / "a.ipynb", "1 / 0")
    before = path.read_bytes()
    done = store(path)
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stderr
    assert path.read_bytes() == before
