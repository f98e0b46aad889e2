"""Tasks: functions from a seed to a model, data, a loss and metrics. Only CIFAR needs a network for its data."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from ada_loss.lab.tasks.chars import chars
from ada_loss.lab.tasks.detection import detection
from ada_loss.lab.tasks.digits import deep_digits, digits
from ada_loss.lab.tasks.image_files import fashion, mnist5k, pictures
from ada_loss.lab.tasks.images import cifar10, cifar100, patches
from ada_loss.lab.tasks.own_data import is_of_own_data, on_data, parted, settled
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
    "mnist5k",
    "patches",
    "phonemes",
    "pictures",
    "rl",
    "segmentation",
    "trained_with",
]

TASKS: dict[str, Callable[[int], Task]] = {
    make_task.__name__: make_task
    for make_task in (
        *(digits, deep_digits, mnist5k, fashion, patches, chars, phonemes, detection, segmentation, rl),
        *(cifar10, cifar100, pictures),
    )
}


def find_task(name: str) -> Callable[[int], Task]:
    """The function of a task.

    name: that of a task of the library, or an import path "package.module:function". A task that takes data of the
        user's own is "chars=book.txt"; one with settings, "cifar10,depth=56".
    Raises ValueError for an unknown name, and for a path that leads to no function; TypeError for another type.

    >>> find_task("digits") is digits
    True
    >>> find_task("digit")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: Unknown task 'digit'. Did you mean 'digits'? Known: digits, deep_digits, mnist5k, ...
    """
    if not isinstance(name, str):
        raise TypeError(f"The task is {shown(name)}. Expected: {', '.join(TASKS)}, or your own as 'module:function'.")
    base, settings = parted(name)
    if settings:
        return settled(find_task(base), name, settings)
    if is_of_own_data(name):
        return on_data(find_task(name.partition("=")[0]), name)
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
    """Import the object of a path "module:name". kind: its description, for the error.

    Raises ValueError for a path that leads nowhere.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        # The module itself may be fine, with a misspelt function: then its functions make the hint.
        there = vars(sys.modules[module]) if module in sys.modules else {}
        hint = did_you_mean(name, [word for word, value in there.items() if callable(value)])
        raise ValueError(
            f"The {kind} {shown(path)} cannot be imported: {error}.{hint} "
            f"Expected: 'module:function', of a module on Python's path."
        ) from None


def is_of_library(name: str) -> bool:
    """True if the name of a task is one of this library's, with data of the user's own or without.

    >>> is_of_library("chars"), is_of_library("chars=book.txt"), is_of_library("mine:task")
    (True, True, False)
    """
    base, _ = parted(name)
    return (base.partition("=")[0] if is_of_own_data(name) else base) in TASKS


def add_to_path(folder: str | os.PathLike[str]) -> None:
    """Let modules of a folder be imported, behind those that can be imported already."""
    place = str(Path(folder).absolute())
    if place not in sys.path:
        # At the end: a file beside a user's task must not hide an installed module.
        sys.path.append(place)


def folder_of(name: str) -> str | None:
    """The folder from which the module of a task was imported; None for a task of the library.

    name: that of a task that was found.

    >>> folder_of("digits") is None, folder_of("ada_loss.lab.tasks:digits") == str(Path(__file__).parents[3])
    (True, True)
    """
    if is_of_own_data(name):
        return None
    module = sys.modules.get(name.partition(":")[0])
    file = getattr(module, "__file__", None)
    if ":" not in name or file is None:
        return None
    # The file of a package is its __init__.py, one level deeper than that of a module.
    is_package = hasattr(module, "__path__")
    return str(Path(file).absolute().parents[name.partition(":")[0].count(".") + is_package])
