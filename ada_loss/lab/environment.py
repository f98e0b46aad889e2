"""The environment of a run: versions, machine, git commit, command."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fpsim.checks import DISTRIBUTION

__all__ = ["environment", "versions"]

PACKAGES = (DISTRIBUTION, "torch", "numpy", "numba", "distributed")


def environment() -> dict[str, Any]:
    """The environment in strings, ready for JSON; None for what is not known.

    >>> environment()["python"] == platform.python_version()
    True
    """
    words = {"command": " ".join(sys.argv), "python": platform.python_version(), "system": platform.platform()}
    return {**words, "processor": _processor(), "git": _commit(), "versions": versions()}


def versions() -> dict[str, str | None]:
    """The versions of the packages on which results depend; None for one that is not installed.

    >>> versions()["torch"] == version("torch")
    True
    """
    return {package: _version(package) for package in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the current folder, with "+" where files were changed; None outside of a repository."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
