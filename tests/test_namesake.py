"""The package index has another project called fpsim. Where both are installed, that is said."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ANSWER = "`pip uninstall fpsim` and `pip install --force-reinstall --no-deps ada-loss`"


def run(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a new process, in which these folders come first on the path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT)))}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT / "docs"
    )


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder into which pip has installed a distribution fpsim with a package fpsim."""
    wheel = tmp_path / "fpsim-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("fpsim/__init__.py", "from .version import __version__\n")
        archive.writestr("fpsim/version.py", "__version__ = '1.0'\n")
        archive.writestr("fpsim-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: fpsim\nVersion: 1.0\n")
        archive.writestr("fpsim-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("fpsim-1.0.dist-info/RECORD", "")
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", target, wheel]
    subprocess.run(command, check=True, capture_output=True)
    return target


def test_ada_loss_refuses_the_other_fpsim_and_says_what_to_type(theirs: Path) -> None:
    done = run("import ada_loss", theirs)
    assert done.returncode == 1
    assert ANSWER in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("ImportError: Got a package fpsim that is not the one of ada-loss.")


@pytest.mark.parametrize("imported", ["fpsim, ada_loss", "ada_loss"], ids=["imported before", "compiled, no source"])
def test_ada_loss_refuses_it_however_it_is_found(theirs: Path, imported: str) -> None:
    if imported == "ada_loss":
        subprocess.run([sys.executable, "-m", "compileall", "-q", "-b", theirs / "fpsim"], check=True)
        for source in theirs.glob("fpsim/*.py"):
            source.unlink()
    done = run(f"import {imported}", theirs)
    assert ANSWER in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("left", [[], ["checks.py"]], ids=["nothing", "a namespace"])
def test_ada_loss_refuses_what_is_left_after_the_other_was_uninstalled(tmp_path: Path, left: list[str]) -> None:
    (tmp_path / "ada_loss").symlink_to(ROOT / "ada_loss")
    for name in left:
        (tmp_path / "fpsim").mkdir()
        (tmp_path / "fpsim" / name).write_text("")
    # without the folders of the path in which the library is installed
    code = "import os, sys; sys.path[:] = "
    code += f"[p for p in sys.path if p == {str(tmp_path)!r} or not os.path.exists(p + '/fpsim')]"
    done = run(f"{code}; import ada_loss", tmp_path)
    assert ANSWER in done.stderr.splitlines()[-1]


def test_fpsim_warns_where_the_other_distribution_is_installed(theirs: Path) -> None:
    (theirs / "fpsim").rename(theirs / "replaced")
    done = run("import fpsim, ada_loss; print(fpsim.__file__)", theirs)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "fpsim" / "__init__.py"
    assert "<string>:1: UserWarning: The distribution fpsim 1.0 is installed. It is another project" in done.stderr


@pytest.mark.full
def test_neither_says_anything_where_ours_is_alone() -> None:
    done = run("import ada_loss, sys; assert 'torch' not in sys.modules; import fpsim")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
