"""Tasks by name: functions from a seed to a model, data, a loss and metrics. Only CIFAR downloads its data.

A name may contain the path of the user's own file or folder, its hash, and settings: "chars=book.txt",
"cifar10,depth=56", "pictures=FOLDER#0a1b2c3d,model=resnet18".
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ada_loss.lab.tasks.chars import chars
from ada_loss.lab.tasks.detection import detection
from ada_loss.lab.tasks.digits import deep_digits, digits
from ada_loss.lab.tasks.image_files import fashion, mnist5k, pictures
from ada_loss.lab.tasks.images import cifar10, cifar100, patches
from ada_loss.lab.tasks.phonemes import phonemes
from ada_loss.lab.tasks.rl import rl
from ada_loss.lab.tasks.segmentation import segmentation
from ada_loss.lab.tasks.task import Task, accuracy, trained_with
from fpsim.checks import did_you_mean, shown

__all__ = [
    "TASKS",
    "Task",
    "accuracy",
    "add_to_path",
    "chars",
    "cifar10",
    "cifar100",
    "deep_digits",
    "detection",
    "digits",
    "fashion",
    "find_task",
    "folder_of",
    "imported",
    "is_of_library",
    "is_of_own_data",
    "mnist5k",
    "patches",
    "phonemes",
    "pictures",
    "rl",
    "segmentation",
    "trained_with",
    "with_hash",
]

TASKS: dict[str, Callable[[int], Task]] = {
    make_task.__name__: make_task
    for make_task in (
        *(digits, deep_digits, mnist5k, fashion, patches, chars, phonemes, detection, segmentation, rl),
        *(cifar10, cifar100, pictures),
    )
}


# Settings follow at the end of a name. Only these words are settings, because a path may contain commas.
SETTING = re.compile(r",\s*(depth|version|model|size)=([\w.-]+)$")
HASH_DIGITS = 8
CHUNK = 1 << 20  # the number of bytes that are read at once


def find_task(name: str) -> Callable[[int], Task]:
    """Return the function of a task.

    name: the name of a task of the library, or an import path "package.module:function". A task may be given the user's
        own data, "chars=book.txt", or settings, "cifar10,depth=56".
    Raises ValueError for an unknown name, and for an import path without a function; TypeError for another type.

    >>> find_task("digits") is digits
    True
    >>> find_task("digit")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: Unknown task 'digit'. Did you mean 'digits'? Known: digits, deep_digits, mnist5k, ...
    """
    if not isinstance(name, str):
        raise TypeError(f"The task is {shown(name)}. Expected: {', '.join(TASKS)}, or your own as 'module:function'.")
    base, settings = _parted(name)
    if settings:
        return _settled(find_task(base), name, settings)
    if is_of_own_data(name):
        return _on_data(find_task(name.partition("=")[0]), name)
    module, colon, function = name.partition(":")
    if not colon:
        if name in TASKS:
            return TASKS[name]
        hint = did_you_mean(name, TASKS)
        raise ValueError(
            f"Unknown task {shown(name)}.{hint} Known: {', '.join(TASKS)}, or your own as 'module:function'."
        )
    if not all(word.isidentifier() for word in (*module.split("."), function)):
        raise ValueError(
            f"The task {shown(name)} is not an import path. Expected: 'module:function', of a module on Python's path."
        )
    make_task = imported("task", name)
    if not callable(make_task):
        raise ValueError(
            f"The task {shown(name)} is a {type(make_task).__name__}. It must be a function from a seed to a Task."
        )
    return make_task  # type: ignore[no-any-return]


def imported(kind: str, path: str) -> Any:
    """Import the object at a path "module:name". kind: the object's description, for the error message.

    Raises ValueError for a path at which there is no object.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        # If the module exists and only the function is misspelt, the hint names one of the module's functions.
        there = vars(sys.modules[module]) if module in sys.modules else {}
        hint = did_you_mean(name, [word for word, value in there.items() if callable(value)])
        raise ValueError(
            f"The {kind} {shown(path)} cannot be imported: {error}.{hint} "
            f"Expected: 'module:function', of a module on Python's path."
        ) from None


def is_of_library(name: str) -> bool:
    """Return True if a name belongs to a task of this library, with or without the user's own data.

    >>> is_of_library("chars"), is_of_library("chars=book.txt"), is_of_library("mine:task")
    (True, True, False)
    """
    base, _ = _parted(name)
    return (base.partition("=")[0] if is_of_own_data(name) else base) in TASKS


def add_to_path(folder: str | os.PathLike[str]) -> None:
    """Append a folder to the path of imports, after the folders that are already there."""
    place = str(Path(folder).absolute())
    if place not in sys.path:
        # It is appended at the end, because a file next to a user's task must not hide an installed module.
        sys.path.append(place)


def folder_of(name: str) -> str | None:
    """Return the folder from which the module of a task was imported; None for a task of the library.

    name: the name of a task that `find_task` has found.

    >>> folder_of("digits") is None, folder_of("ada_loss.lab.tasks:digits") == str(Path(__file__).parents[3])
    (True, True)
    """
    if is_of_own_data(name):
        return None
    module = sys.modules.get(name.partition(":")[0])
    file = getattr(module, "__file__", None)
    if ":" not in name or file is None:
        return None
    # The file of a package is its __init__.py, which lies one level deeper than the file of a module.
    is_package = hasattr(module, "__path__")
    return str(Path(file).absolute().parents[name.partition(":")[0].count(".") + is_package])


def _parted(name: str) -> tuple[str, dict[str, str]]:
    """Split the name of a task into the name without settings, and the settings.

    >>> _parted("pictures=my, own,model=resnet18,size=64")
    ('pictures=my, own', {'model': 'resnet18', 'size': '64'})
    """
    settings: dict[str, str] = {}
    while (found := SETTING.search(name)) is not None:
        name, settings = name[: found.start()], {found[1]: found[2], **settings}
    return name, settings


def _settled(make_task: Callable[..., Task], name: str, settings: Mapping[str, str]) -> Callable[[int], Task]:
    """Return the function of a task, bound to the settings in its name. Raises ValueError for unknown settings."""
    kinds: dict[str, type] = getattr(make_task, "settings", {})
    values = {}
    for word, text in settings.items():
        if word not in kinds:
            known = f"It has: {', '.join(kinds)}" if kinds else "It has none"
            raise ValueError(f"The task {shown(name)} names {word}={text}, which is not one of its settings. {known}.")
        try:
            values[word] = kinds[word](text)
        except ValueError:
            raise ValueError(f"The task {shown(name)} has {word}={text}. Expected: a whole number.") from None
    bound: Any = partial(make_task, **values)
    bound.options, bound.plays = getattr(make_task, "options", {}), getattr(make_task, "plays", False)
    return bound  # type: ignore[no-any-return]


def is_of_own_data(name: str) -> bool:
    """Return True if the name of a task contains a path.

    >>> is_of_own_data("chars=book.txt"), is_of_own_data("chars"), is_of_own_data("mine:task")
    (True, False, False)
    """
    base, _ = _parted(name)
    return ":" not in base.partition("=")[0] and "=" in base


def _on_data(make_task: Callable[..., Task], name: str) -> Callable[[int], Task]:
    """Return the function of a task, bound to the path in its name.

    make_task: the function of the task without a path.
    name: a name such as "chars=book.txt", or "chars=book.txt#0a1b2c3d" with the hash of the content.
    Raises ValueError for a task that takes no path, and for content with another hash; FileNotFoundError if the path
    does not exist.
    """
    argument = getattr(make_task, "made_of", None)
    task, _, rest = name.partition("=")
    path, known = _parts(rest)
    if argument is None:
        raise ValueError(f"The task {task} takes no data of your own. Got {shown(name)}. Use {task!r}.")
    if not path:
        raise ValueError(f"The task {shown(name)} has no path behind '='. Use '{task}=PATH', or {task!r}.")
    # A sweep that is resumed with other data would mix the results of two data sets in one table.
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
    """Return a task's name with the hash of the user's own data. Changed data result in another name and other cells.

    Raises FileNotFoundError if the path does not exist.
    """
    base, _ = _parted(name)
    task, _, rest = base.partition("=")
    path, known = _parts(rest)
    return name if known else f"{task}={path}#{_digest(path)}{name[len(base) :]}"


def _parts(rest: str) -> tuple[str, str]:
    """Split text into a path and the hash after the path; the hash is "" if there is none."""
    path, sign, known = rest.rpartition("#")
    is_hash = sign and len(known) == HASH_DIGITS and not set(known) - set("0123456789abcdef")
    return (path, known) if is_hash else (rest, "")


def _digest(path: str) -> str:
    """Return the hash of a file, or of all files in a folder, including their names."""
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(f"There is no {shown(path)}. Give the path of an existing file or folder.")
    digest = hashlib.sha256()
    for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
        if file.is_file():
            # Names are hashed too, because the folder of a picture is its class.
            digest.update(f"{file.relative_to(place).as_posix()}\0".encode())
            with open(file, "rb") as content:
                while chunk := content.read(CHUNK):
                    digest.update(chunk)
    return digest.hexdigest()[:HASH_DIGITS]
