"""Which tasks this user has run into which folder: what `resume` may import because its own user named it before.

It is kept with the user, not in the folder: whoever writes a folder must not choose what runs here.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ada_loss.files import strict_json, write_atomically

__all__ = ["is_trusted", "remember"]


def _file(out: Path) -> Path:
    """The file that has the tasks of a folder. XDG Base Directory 0.8: $XDG_STATE_HOME, or ~/.local/state."""
    given = os.environ.get("XDG_STATE_HOME", "")
    home = Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state"
    return home / "ada-loss" / f"{hashlib.sha256(os.fsencode(out.resolve())).hexdigest()[:32]}.json"


def _known(out: Path) -> list[str]:
    try:
        kept = json.loads(_file(out).read_text())
    except (OSError, ValueError, RuntimeError, RecursionError):  # RuntimeError: a user without a home
        return []
    is_ours = isinstance(kept, dict) and kept.get("folder") == str(out.resolve())
    return [task for task in kept.get("tasks", []) if isinstance(task, str)] if is_ours else []


def remember(out: Path, tasks: Iterable[str]) -> None:
    """The user runs these tasks into a folder. A state folder that cannot be written is left out."""
    together = [*dict.fromkeys([*_known(out), *tasks])]
    if together != _known(out):
        with suppress(OSError, RuntimeError):
            write_atomically(_file(out), strict_json({"folder": str(out.resolve()), "tasks": together}).encode())


def is_trusted(out: Path, task: str) -> bool:
    """Whether this user has run a task into this folder."""
    return task in _known(out)
