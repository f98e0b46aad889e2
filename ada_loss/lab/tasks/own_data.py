"""Parts of a task's name: a file or a folder of the user's own, with its hash, and settings.

"chars=book.txt", "cifar10,depth=56", "pictures=FOLDER#0a1b2c3d,model=resnet18".
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ada_loss.lab.tasks.task import Task
from fpsim.checks import shown

__all__ = ["is_of_own_data", "on_data", "parted", "settled", "with_hash"]

# At the end of a name, and with these words only: a path may have commas.
SETTING = re.compile(r",\s*(depth|version|model|size)=([\w.-]+)$")
DIGITS = 8  # of a hash
CHUNK = 1 << 20  # bytes that are read at once


def parted(name: str) -> tuple[str, dict[str, str]]:
    """Split the name of a task into the name without settings, and the settings.

    >>> parted("pictures=my, own,model=resnet18,size=64")
    ('pictures=my, own', {'model': 'resnet18', 'size': '64'})
    """
    settings: dict[str, str] = {}
    while (found := SETTING.search(name)) is not None:
        name, settings = name[: found.start()], {found[1]: found[2], **settings}
    return name, settings


def settled(make_task: Callable[..., Task], name: str, settings: Mapping[str, str]) -> Callable[[int], Task]:
    """The function of a task, bound to the settings in its name. Raises ValueError for those that it does not have."""
    kinds: dict[str, type] = getattr(make_task, "settings", {})
    values = {}
    for word, text in settings.items():
        if word not in kinds:
            known = f"It has: {', '.join(kinds)}" if kinds else "It has none"
            raise ValueError(f"The task {shown(name)} names {word}={text}, which is no setting of it. {known}.")
        try:
            values[word] = kinds[word](text)
        except ValueError:
            raise ValueError(f"The task {shown(name)} has {word}={text}. Expected: a whole number.") from None
    bound: Any = partial(make_task, **values)
    bound.options, bound.plays = getattr(make_task, "options", {}), getattr(make_task, "plays", False)
    return bound  # type: ignore[no-any-return]


def is_of_own_data(name: str) -> bool:
    """True if the name of a task has a path.

    >>> is_of_own_data("chars=book.txt"), is_of_own_data("chars"), is_of_own_data("mine:task")
    (True, False, False)
    """
    base, _ = parted(name)
    return ":" not in base.partition("=")[0] and "=" in base


def on_data(make_task: Callable[..., Task], name: str) -> Callable[[int], Task]:
    """The function of a task, bound to the path in its name.

    make_task: the function of the task without a path.
    name: such as "chars=book.txt", or "chars=book.txt#0a1b2c3d" with the hash of the content.
    Raises ValueError for a task that takes no path, and for content with another hash; FileNotFoundError for a missing
    path.
    """
    argument = getattr(make_task, "made_of", None)
    task, _, rest = name.partition("=")
    path, known = _parts(rest)
    if argument is None:
        raise ValueError(f"The task {task} takes no data of your own. Got {shown(name)}. Use {task!r}.")
    if not path:
        raise ValueError(f"The task {shown(name)} has no path behind '='. Use '{task}=PATH', or {task!r}.")
    # A sweep that is resumed on other data would mix the results of both in one table.
    if known and (digest := _digest(path)) != known:
        raise ValueError(
            f"What is in {shown(path)} has changed since the sweep began: its hash is {digest}, and that of the cells "
            f"is {known}. Put the old content back, or begin another sweep with '{task}={path}'."
        )
    bound: Any = partial(make_task, **{argument: path})
    bound.options = getattr(make_task, "options", {})
    bound.settings = getattr(make_task, "settings", {})
    return bound  # type: ignore[no-any-return]


def with_hash(name: str) -> str:
    """The name of such a task with the hash of its content, so that another content gives other cells.

    Raises FileNotFoundError for a missing path.
    """
    base, _ = parted(name)
    task, _, rest = base.partition("=")
    path, known = _parts(rest)
    return name if known else f"{task}={path}#{_digest(path)}{name[len(base) :]}"


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
            # Names too: the folder of a picture is its class.
            digest.update(f"{file.relative_to(place).as_posix()}\0".encode())
            with open(file, "rb") as content:
                while chunk := content.read(CHUNK):
                    digest.update(chunk)
    return digest.hexdigest()[:DIGITS]
