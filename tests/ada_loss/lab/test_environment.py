"""The environment of a run: what it tells of a repository, and that nothing of the repository is run for it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from ada_loss.lab.environment import environment


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    quiet: Any = {"check": True, "capture_output": True, "text": True}
    return str(subprocess.run(["git", *identity, *words], cwd=folder, **quiet).stdout).strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "file").write_text("1")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    monkeypatch.chdir(folder)
    return folder


def test_the_commit_is_told_and_whether_files_were_changed(repository: Path) -> None:
    commit = git(repository, "rev-parse", "--short=12", "HEAD")
    assert environment()["git"] == commit
    (repository / "file").write_text("2")
    assert environment()["git"] == f"{commit}+"


def test_nothing_of_a_repository_is_run(repository: Path, tmp_path: Path) -> None:
    mark, program = tmp_path / "touched", tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {mark}\ncat\n")
    program.chmod(0o755)
    hooks = repository / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    for name in ("post-index-change", "fsmonitor-watchman", "reference-transaction"):
        (hooks / name).symlink_to(program)
    git(repository, "config", "core.fsmonitor", str(program))
    for name in ("mine", "with=sign", "with.point"):
        git(repository, "config", f"filter.{name}.clean", str(program))
        git(repository, "config", f"filter.{name}.process", str(program))
        git(repository, "config", f"filter.{name}.required", "true")
        (repository / ".git" / "info" / "attributes").write_text("* filter=mine\n")
    (repository / ".gitattributes").write_text("* filter=with=sign\nfile filter=with.point\n")
    commit = git(
        repository, "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "rev-parse", "--short=12", "HEAD"
    )
    (repository / "file").write_text("1")  # as it was, and with another time: git has to look into it
    mark.unlink(missing_ok=True)
    assert environment()["git"] in (commit, f"{commit}+")
    assert not mark.exists()
    subprocess.run(["git", "describe", "--always", "--dirty"], cwd=repository, capture_output=True)
    assert mark.exists()  # what git itself would do there


def test_outside_of_a_repository_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert environment()["git"] is None
