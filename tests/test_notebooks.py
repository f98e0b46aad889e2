"""Every notebook runs from top to bottom, and is committed without outputs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_the_notebook_runs_and_shows_its_pictures(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    options = [
        "--nbmake",
        "--nbmake-timeout=600",
        "--overwrite",
        "-q",
        "-n",
        "0",
        "-W",
        "default",
        "--rootdir",
        str(tmp_path),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", *options, str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "1 passed" in done.stdout
    for cell in json.loads(copy.read_text())["cells"]:
        shown = [output.get("data", {}) for output in cell.get("outputs", [])]
        last = "".join(cell["source"]).splitlines()[-1]
        is_picture = re.match(r"(\w+\.)?plot_", last) is not None
        assert any("image/png" in data for data in shown) == is_picture, last


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_the_notebook_is_kept_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    assert all(cell.get("outputs", []) == [] and cell.get("execution_count") is None for cell in cells)
