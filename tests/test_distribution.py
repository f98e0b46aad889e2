"""The distribution: its name, and its wheel in an environment that holds nothing but what it asks for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from fpsim.checks import DISTRIBUTION, pip_install

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
TEXTS += sorted(path for package in ("fpsim", "ada_loss") for path in (ROOT / package).rglob("*.py"))


def test_the_distribution_is_called_as_the_constant_says() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert f"{DISTRIBUTION}[lab,mlflow,search,tensorboard]" in PROJECT["optional-dependencies"]["test"]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_text_says_to_install_another_projects_package(path: Path) -> None:
    assert not re.search(r"pip install '?(fpsim|ada_loss)\b", path.read_text())
    assert "fpsim[" not in path.read_text().replace('subgraph fpsim["', "")


def test_a_hint_names_extras_that_there_are() -> None:
    asked = {
        name
        for path in TEXTS
        for words in re.findall(r"pip_install\(([^)]*)\)", path.read_text())
        for name in re.findall(r"['\"](\w+)['\"]", words)
    }
    assert asked >= {"lab", "search", "tensorboard", "mlflow", "cuda12", "cuda13"}
    assert asked <= PROJECT["optional-dependencies"].keys()
    assert pip_install("lab") == "pip install 'ada-loss[lab]'"
