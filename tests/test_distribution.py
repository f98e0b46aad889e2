"""The distribution: its name, and its wheel in an environment that holds nothing but what it asks for."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
import venv
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from readme_blocks import examples

from fpsim.checks import DISTRIBUTION, _installed_from, pip_install

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
TEXTS += sorted(path for package in ("fpsim", "ada_loss") for path in (ROOT / package).rglob("*.py"))


def test_the_distribution_is_called_as_the_constant_says() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert (
        f"{DISTRIBUTION}[export,lab,mlflow,mnist,phonemes,search,tensorboard,wandb]"
        in PROJECT["optional-dependencies"]["test"]
    )


def test_no_text_says_to_install_another_projects_package() -> None:
    anothers = re.compile(r"pip install '?(fpsim|ada_loss)\b|(?<!subgraph )fpsim\[")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in TEXTS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if anothers.search(line)
    ]
    assert not found, "\n".join(["", *found])


def test_a_hint_names_extras_that_there_are() -> None:
    asked = {
        name
        for path in TEXTS
        for words in re.findall(r"pip_install\(([^)]*)\)", path.read_text())
        for name in re.findall(r"['\"](\w+)['\"]", words)
    }
    assert asked >= {"lab", "search", "tensorboard", "mlflow", "cuda12", "cuda13"}
    assert asked <= PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (None, "pip install 'ada-loss[cuda12]' or 'ada-loss[cuda13]'"),
        (
            {"url": "file:///home/me/my%20code", "dir_info": {"editable": True}},
            "pip install -e '/home/me/my code[cuda12]' or '/home/me/my code[cuda13]'",
        ),
        (
            {"url": "file:///tmp/a.whl", "archive_info": {}},
            "pip install 'ada-loss[cuda12] @ file:///tmp/a.whl' or 'ada-loss[cuda13] @ file:///tmp/a.whl'",
        ),
        (
            {"url": "https://example.org/a.git", "vcs_info": {"vcs": "git"}},
            "pip install 'ada-loss[cuda12] @ git+https://example.org/a.git' or "
            "'ada-loss[cuda13] @ git+https://example.org/a.git'",
        ),
        (
            {"url": "file:///srv/a.git", "vcs_info": {"vcs": "git"}},
            "pip install 'ada-loss[cuda12] @ git+file://localhost/srv/a.git' or "
            "'ada-loss[cuda13] @ git+file://localhost/srv/a.git'",
        ),
    ],
    ids=["index", "checkout", "wheel", "git", "git here"],
)
def test_a_hint_names_what_the_library_was_installed_from(
    record: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = None if record is None else json.dumps(record)  # PEP 610
    monkeypatch.setattr("importlib.metadata.distribution", lambda _: SimpleNamespace(read_text=lambda _: text))
    _installed_from.cache_clear()
    try:
        assert pip_install("cuda12", "cuda13") == words
    finally:
        _installed_from.cache_clear()


def test_the_constraints_pin_every_requirement_of_ci() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line and line[0] != "#"}
    extras = PROJECT["optional-dependencies"]
    asked, left = {*PROJECT["dependencies"]}, ["test", "dev", "docs"]
    while left:
        asked |= {*extras[left.pop()]}
        mine = {line for line in asked if Requirement(line).name == DISTRIBUTION}
        asked -= mine
        left += [extra for line in mine for extra in Requirement(line).extras]
    assert {canonicalize_name(Requirement(line).name) for line in asked} - pinned == set()


# What is packed, as hatchling lists it without building


def packed(target: str) -> dict[str, str]:
    """Where each file of a "wheel" or an "sdist" comes from, by the path that it has inside."""
    builders = pytest.importorskip(f"hatchling.builders.{target}", reason="pip install hatchling")
    builder = {"wheel": "WheelBuilder", "sdist": "SdistBuilder"}[target]
    files = getattr(builders, builder)(str(ROOT)).recurse_included_files()
    return {file.distribution_path: str(Path(file.path).relative_to(ROOT)) for file in files}


def tracked(*paths: str) -> set[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: git does not tell which files there are")
    listed = subprocess.run(["git", "ls-files", *paths], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {name for name in listed.splitlines() if (ROOT / name).is_file()}


def test_the_sdist_would_hold_every_file_of_the_repository() -> None:
    assert tracked() - packed("sdist").keys() == set()


def test_the_wheel_would_hold_both_packages_with_their_types_and_data_and_nothing_else() -> None:
    files = packed("wheel")
    assert tracked("fpsim", "ada_loss") - files.keys() == set()
    assert {"fpsim/py.typed", "ada_loss/py.typed", "ada_loss/lab/results/report.html.j2"} <= files.keys()
    assert {path.split("/")[0] for path in files} == {"fpsim", "ada_loss"}
    assert [inside for inside, path in files.items() if inside != path] == []


# The packages where only what they ask for is installed


def needed(requirements: list[str], found: dict[str, Any] | None = None) -> dict[str, Any]:
    """The installed distributions that requirements name here, without extras, and theirs."""
    found = {} if found is None else found
    for requirement in map(Requirement, requirements):
        if requirement.name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found[requirement.name] = distribution(requirement.name)
            needed(found[requirement.name].requires or [], found)
    return found


def environment_in(folder: Path, others: list[str] | None = None) -> tuple[Path, Path]:
    """A new environment with what the packages require and nothing else: its interpreter, and where packages are.

    others: requirements besides those.
    """
    venv.create(folder / "env", symlinks=True)
    (site,) = folder.glob("env/lib/python*/site-packages")
    # their files are linked: downloading torch would take minutes
    for installed in needed([*PROJECT["dependencies"], *(others or [])]).values():
        for name in {file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / name).exists():
                (site / name).symlink_to(Path(str(installed.locate_file(name))))
    return folder / "env" / "bin" / "python", site


def run(python: Path, code: str, cwd: Path) -> str:
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, cwd=cwd, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


ROUNDS = """
import ada_loss, fpsim, torch
print(fpsim.__file__)
print(fpsim.round_to(torch.tensor([0.1, 65520.0]), 'fp16').tolist(), ada_loss.GradScaler().get_scale())
"""
ROUNDED = "[0.0999755859375, inf] 65536.0"  # as IEEE 754 and torch.amp.GradScaler have them
PARTS_OF_THE_LAB = """
import importlib, pkgutil, ada_loss.lab
for name in ("sweep", "resume", "search"):
    try: getattr(ada_loss, name)
    except ImportError as error: print(error)
for module in pkgutil.walk_packages(ada_loss.lab.__path__, "ada_loss.lab."):
    try: importlib.import_module(module.name)
    except ImportError as error: print(error)
try: ada_loss.lab.tasks.digits()
except ImportError as error: print(error)
"""


def remedy(lines: list[str]) -> str:
    """What all errors of the parts of the lab say to type."""
    assert len(lines) > 6
    (words,) = {line.split(": ")[-1].removesuffix(".") for line in lines}
    return words


def test_without_extras_the_packages_round_and_every_part_of_the_lab_names_the_extra(tmp_path: Path) -> None:
    python, site = environment_in(tmp_path)
    for package in ("fpsim", "ada_loss"):
        (site / package).symlink_to(ROOT / package)
    place, numbers, *lines = run(python, ROUNDS + PARTS_OF_THE_LAB, tmp_path).splitlines()
    assert Path(place).is_relative_to(tmp_path)
    assert numbers == ROUNDED
    assert remedy(lines) == "pip install 'ada-loss[lab]'"


# The wheel


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel and what it requires, and nothing else."""
    pytest.importorskip("hatchling", reason="hatchling builds the wheel: pip install hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    quiet: Any = {"check": True, "capture_output": True}
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, **quiet)
    (wheel,) = folder.glob("*.whl")
    python, _ = environment_in(folder)
    pip = [sys.executable, "-m", "pip", "--python", python]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", wheel], **quiet)
    return python


@pytest.mark.full
def test_the_wheel_rounds_where_only_its_requirements_are(python: Path, tmp_path: Path) -> None:
    place, numbers = run(python, ROUNDS, tmp_path).splitlines()
    assert Path(place).is_relative_to(python.parents[1])
    assert numbers == ROUNDED


@pytest.mark.full
def test_the_wheel_prints_what_readme_says(python: Path, tmp_path: Path) -> None:
    for code, output in examples(ROOT / "README.md"):
        assert run(python, code, tmp_path) == output


@pytest.mark.full
def test_without_extras_every_part_of_the_lab_names_the_extra(python: Path, tmp_path: Path) -> None:
    words = remedy(run(python, PARTS_OF_THE_LAB, tmp_path).splitlines())
    assert re.fullmatch(r"pip install 'ada-loss\[lab\] @ file:///.*\.whl'", words)
    tried = [sys.executable, "-m", "pip", "--python", python, *shlex.split(words)[1:]]
    offline = subprocess.run([*tried, "--dry-run", "--no-deps", "--no-index"], capture_output=True, text=True)
    assert offline.returncode == 0, offline.stderr
    done = subprocess.run([python.with_name("ada-loss")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        1,
        f"The command line needs more than the library: {words}.\n",
    )


# From a repository


@pytest.fixture(scope="module")
def bare_clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare clone with the last commit: what stands on a forge."""
    tracked()  # which skips outside of a checkout
    folder = tmp_path_factory.mktemp("forge") / "ada-loss.git"
    subprocess.run(["git", "clone", "-q", "--bare", ROOT, folder], check=True)
    return folder


def offline(python: Path) -> dict[str, str]:
    """Variables under which pip of an environment builds and installs with what is there, from no index."""
    # pip reads the switch backwards: 0 is no isolation
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))},
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_CONFIG_FILE": os.devnull,
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "MPLBACKEND": "agg",
    }


BUILDS = ["pip", "hatchling"]


@pytest.mark.full
def test_a_bare_clone_is_installed_with_the_extra_and_errors_name_it(bare_clone: Path, tmp_path: Path) -> None:
    python, _ = environment_in(tmp_path, [*PROJECT["optional-dependencies"]["lab"], *BUILDS])
    source = f"ada-loss[lab] @ git+file://localhost{bare_clone}"  # without the host pip 24.1 or later takes it
    done = subprocess.run([python, "-m", "pip", "install", source], capture_output=True, text=True, env=offline(python))
    assert done.returncode == 0, done.stdout + done.stderr
    place, numbers = run(python, ROUNDS, tmp_path).splitlines()
    assert Path(place).is_relative_to(tmp_path / "env")
    assert numbers == ROUNDED
    said = subprocess.run([python.with_name("ada-loss"), "--version"], capture_output=True, text=True, cwd=tmp_path)
    assert said.stdout.startswith(f"ada-loss {PROJECT['version']}, ")
    words = run(python, "from fpsim.checks import pip_install; print(pip_install('search'))", tmp_path)
    assert words == f"pip install 'ada-loss[search] @ git+file://localhost{bare_clone}'\n"


@pytest.mark.full
def test_the_quickstart_installs_and_runs_in_an_environment_without_the_library(
    bare_clone: Path, tmp_path: Path
) -> None:
    cells = json.loads((ROOT / "notebooks" / "0-quickstart.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert "pip" in sources[0]
    assert not any("pip" in source for source in sources[1:])
    python, site = environment_in(tmp_path, [*PROJECT["optional-dependencies"]["lab"], *BUILDS])
    script = tmp_path / "elsewhere" / "cells.py"
    script.parent.mkdir()
    # as a kernel runs them: one after the other in one namespace
    script.write_text(
        "names = {}\nfor source in " + repr(sources) + ":\n    exec(source, names)\nprint(names['results'])\n"
    )
    assert not (site / "ada_loss").exists()
    variables = {**offline(python), "ADA_LOSS_SOURCE": f"git+file://localhost{bare_clone}"}
    done = subprocess.run(
        [python, script], capture_output=True, text=True, cwd=script.parent, env=variables, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert (site / "ada_loss").is_dir()
    assert "| e4m3fn gradients |" in done.stdout
    again = subprocess.run([python, "-c", sources[0]], capture_output=True, text=True, cwd=script.parent, env=variables)
    assert (again.returncode, again.stdout) == (0, "")  # nothing is installed twice


FIVE_LINES = """import torch
import ada_loss, fpsim
x: torch.Tensor = fpsim.round_to(torch.ones(2), "fp16")
scale: float = ada_loss.GradScaler().get_scale()
model: torch.nn.Module = fpsim.quantize(torch.nn.Linear(1, 1), "fp16")
"""


@pytest.mark.full
def test_the_wheel_brings_its_types(python: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    told = []
    for text in (FIVE_LINES, FIVE_LINES.replace("float =", "str =")):
        (tmp_path / "mine.py").write_text(text)
        command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "mine.py"]
        told.append(subprocess.run(command, capture_output=True, text=True, cwd=tmp_path).stdout)
    assert told[0].startswith("Success")
    assert 'mine.py:4: error: Incompatible types in assignment (expression has type "float"' in told[1]


# The source distribution


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the unpacked source distribution."""
    pytest.importorskip("hatchling", reason="hatchling builds the sdist: pip install hatchling")
    folder = tmp_path_factory.mktemp("sdist")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return archive.with_name(archive.name.removesuffix(".tar.gz"))


@pytest.mark.full
def test_the_sdist_holds_every_file_of_the_repository(unpacked: Path) -> None:
    assert tracked() - {str(path.relative_to(unpacked)) for path in unpacked.rglob("*")} == set()


@pytest.mark.full
def test_tests_of_the_sdist_run_where_it_was_unpacked(unpacked: Path) -> None:
    chosen = ["tests/test_law_of_imports.py", "tests/fpsim/formats", "tests/ada_loss/rules/test_layer_rules.py"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(command, cwd=unpacked, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout
