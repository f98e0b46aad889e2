"""The environment of a run: versions, machine, git commit, command."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fpsim.checks import DISTRIBUTION

__all__ = ["environment", "versions"]

# git runs the filters of a repository to see whether a file was changed. `required` is switched off too; otherwise git
# would fail without the filters.
FILTER_OFF = {"clean": "", "process": "", "required": "false"}
PACKAGES = (DISTRIBUTION, "torch", "numpy", "numba", "distributed")


def environment() -> dict[str, Any]:
    """Return the environment as strings, ready for JSON; None for unknown parts.

    >>> environment()["python"] == platform.python_version()
    True
    """
    words = {"command": " ".join(sys.argv), "python": platform.python_version(), "system": platform.platform()}
    return {**words, "processor": _processor(), "git": _commit(), "versions": versions()}


def versions() -> dict[str, str | None]:
    """Return the versions of the packages on which results depend; None for a package that is not installed.

    >>> versions()["torch"] == version("torch")
    True
    """
    return {package: _version(package) for package in PACKAGES}


# The result is cached, because each cell asks for it, and reading a package's metadata takes milliseconds.
@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the current folder, with "+" if files were changed; None outside of a repository.

    No program that the repository configures is run, because a downloaded folder may contain a foreign .git.
    """
    # Only the repository's own filters are switched off: the filters of the user and of the system are trusted.
    listed = _git("config", "-z", "--show-scope", "--includes", "--name-only", "--get-regexp", r"^filter\.").split("\0")
    own = {name.rpartition(".")[0] for scope, name in zip(listed[::2], listed[1::2]) if scope in ("local", "worktree")}
    off = {f"{name}.{key}": value for name in own for key, value in FILTER_OFF.items()}
    return _git("describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*", config=off) or None


def _git(*words: str, config: Mapping[str, str] | None = None) -> str:
    """Return the output of git; "" if git fails. config: settings that override the repository's."""
    command = ["git", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", *words]
    # Without this setting `git describe --dirty` would refresh the index, a file of the user's repository.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    for i, (name, value) in enumerate((config or {}).items()):
        environment |= {f"GIT_CONFIG_KEY_{i}": name, f"GIT_CONFIG_VALUE_{i}": value, "GIT_CONFIG_COUNT": str(i + 1)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
