"""The files around the code: workflows and forms are valid, and say what pyproject.toml and .ci/run say."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

yaml = pytest.importorskip("ruamel.yaml", reason="the lab's extra brings it").YAML(typ="safe")

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
SCHEMAS = {  # those that check-jsonschema has with it
    **dict.fromkeys(WORKFLOWS, "github-workflows"),
    **{path: "github-issue-forms" for path in GITHUB.glob("ISSUE_TEMPLATE/*.yml") if path.name != "config.yml"},
    GITHUB / "ISSUE_TEMPLATE" / "config.yml": "github-issue-config",
    GITHUB / "dependabot.yml": "dependabot",
}


def schema_errors(path: Path, schema: str) -> str:
    pytest.importorskip("check_jsonschema", reason="the extra `test` brings check-jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", path]
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def lint_errors(folder: Path) -> str:
    zizmor = shutil.which("zizmor", path=str(Path(sys.executable).parent)) or shutil.which("zizmor")
    if zizmor is None:
        pytest.skip("zizmor is not installed: the extra `test` brings it")
    done = subprocess.run([zizmor, "--offline", "--no-progress", folder], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize(("path", "schema"), SCHEMAS.items(), ids=lambda value: getattr(value, "name", value))
def test_the_file_fits_its_schema(path: Path, schema: str) -> None:
    assert schema_errors(path, schema) == ""


def test_the_linter_finds_nothing_in_the_workflows() -> None:
    assert lint_errors(GITHUB) == ""


def test_schema_and_linter_find_what_was_broken(tmp_path: Path) -> None:
    broken = tmp_path / ".github" / "workflows" / "ci.yml"
    broken.parent.mkdir(parents=True)
    text = (GITHUB / "workflows" / "ci.yml").read_text()
    broken.write_text(text.replace("runs-on: ubuntu-latest", "runs_on: ubuntu-latest", 1))
    assert "runs_on" in schema_errors(broken, "github-workflows")
    broken.write_text(text.replace("11bd71901bbe5b1630ceea73d27597364c9af683", "main"))
    assert "unpinned" in lint_errors(broken)


def commands_of(workflow: str) -> list[str]:
    jobs = yaml.load((GITHUB / "workflows" / workflow).read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


def test_the_workflow_runs_what_a_contributor_runs_on_every_python() -> None:
    assert ".ci/run" in commands_of("ci.yml")
    jobs = yaml.load((GITHUB / "workflows" / "ci.yml").read_text())["jobs"]
    assert f">={jobs['lowest']['steps'][1]['with']['python-version']}" == PROJECT["requires-python"]
    tested = {name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)}
    assert {*jobs["newest"]["strategy"]["matrix"]["python"]} == tested


def test_files_that_workflows_and_hooks_run_exist() -> None:
    hooks = yaml.load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    commands = [hook["entry"] for hook in hooks] + [c for path in WORKFLOWS for c in commands_of(path.name)]
    named = {word for command in commands for word in re.findall(r"(?<![\w./-])(?:\.ci|docs|tests)/[\w./]+", command)}
    assert {".ci/run", "docs/build", "tests/test_law_of_imports.py"} <= named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_both_workflows_try_the_packages_before_they_are_used() -> None:
    assert ".ci/packages" in commands_of("ci.yml")
    release = yaml.load((GITHUB / "workflows" / "release.yml").read_text())["jobs"]
    assert ".ci/packages" in [step.get("run") for step in release["build"]["steps"]]
    assert release["publish"]["needs"] == "build"


def test_hooks_run_the_checks_of_ci() -> None:
    hooks = yaml.load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    names = {hook["name"] for hook in hooks}
    checks = re.findall(r"^\.venv/bin/(ruff \w+|mypy)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert len(checks) == 3
    assert {*checks} <= names


def test_the_citation_is_of_this_version_and_of_the_paper() -> None:
    citation = yaml.load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert citation["cff-version"] == "1.2.0"
    (paper,) = citation["references"]
    assert f"https://doi.org/{paper['doi']}" == PROJECT["urls"]["Paper"]
    assert [author["family-names"] for author in paper["authors"]] == ["Zhao", "Vogel", "Ahmed", "Luk"]
