"""Tasks of a file or a folder of the user's own: "chars=book.txt", and the hash that tells one content from another."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ada_loss.lab.tasks.task import Task
from fpsim.checks import shown

__all__ = ["is_of_own_data", "on_data", "with_hash"]

DIGITS = 8  # of a hash
CHUNK = 1 << 20  # bytes that are read at once


def is_of_own_data(name: str) -> bool:
    """Whether the name of a task has a path.

    >>> is_of_own_data("chars=book.txt"), is_of_own_data("chars"), is_of_own_data("mine:task")
    (True, False, False)
    """
    return ":" not in name.partition("=")[0] and "=" in name


def on_data(make_task: Callable[..., Task], name: str) -> Callable[[int], Task]:
    """The function of a task, bound to the path in its name.

    make_task: the function of the task without a path.
    name: such as "chars=book.txt", or "chars=book.txt#0a1b2c3d" with the hash of the content.
    Raises ValueError for a task that takes no path, and for a content with another hash; FileNotFoundError where there
    is nothing.
    """
    argument = getattr(make_task, "made_of", None)
    task, _, rest = name.partition("=")
    path, known = _parts(rest)
    if argument is None:
        raise ValueError(f"The task {task} takes no data of your own. Got {shown(name)}. Use {task!r}.")
    if not path:
        raise ValueError(f"The task {shown(name)} has no path behind '='. Use '{task}=PATH', or {task!r}.")
    if known and (digest := _digest(path)) != known:
        raise ValueError(
            f"What is in {shown(path)} has changed since the sweep began: its hash is {digest}, and that of the cells "
            f"is {known}. Put the old content back, or begin another sweep with '{task}={path}'."
        )
    bound: Any = partial(make_task, **{argument: path})
    bound.options = getattr(make_task, "options", {})
    return bound  # type: ignore[no-any-return]


def with_hash(name: str) -> str:
    """The name of such a task with the hash of its content, so that another content gives other cells.

    Raises FileNotFoundError where there is nothing.
    """
    task, _, rest = name.partition("=")
    path, known = _parts(rest)
    return name if known else f"{task}={path}#{_digest(path)}"


def _parts(rest: str) -> tuple[str, str]:
    """A path, and the hash behind it or ""."""
    path, sign, known = rest.rpartition("#")
    is_hash = sign and len(known) == DIGITS and not set(known) - set("0123456789abcdef")
    return (path, known) if is_hash else (rest, "")


def _digest(path: str) -> str:
    """The hash of a file, or of the files of a folder with their names."""
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(f"There is no {shown(path)}. Give the path of an existing file or folder.")
    digest = hashlib.sha256()
    for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
        if file.is_file():
            digest.update(f"{file.relative_to(place).as_posix()}\0".encode())
            with open(file, "rb") as content:
                while chunk := content.read(CHUNK):
                    digest.update(chunk)
    return digest.hexdigest()[:DIGITS]
