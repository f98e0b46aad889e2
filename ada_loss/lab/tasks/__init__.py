"""Tasks: functions from a seed to a model, data, a loss and metrics. All use real data; only CIFAR needs a network."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from ada_loss.lab.tasks.chars import chars
from ada_loss.lab.tasks.digits import deep_digits, digits
from ada_loss.lab.tasks.pictures import cifar10, cifar100, patches
from ada_loss.lab.tasks.task import Task, accuracy, trained_with
from fpsim.checks import did_you_mean

__all__ = [
    "TASKS",
    "Task",
    "accuracy",
    "chars",
    "cifar10",
    "cifar100",
    "deep_digits",
    "digits",
    "find_task",
    "patches",
    "trained_with",
]

TASKS: dict[str, Callable[[int], Task]] = {
    make_task.__name__: make_task for make_task in (digits, deep_digits, patches, chars, cifar10, cifar100)
}


def find_task(name: str) -> Callable[[int], Task]:
    """The function of a task.

    name: that of a task of the library, or an import path "package.module:function".
    Raises ValueError for an unknown name, and for a path that leads to no function.

    >>> find_task("digits") is digits
    True
    >>> find_task("digit")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: Unknown task 'digit'. Did you mean digits? Known: digits, deep_digits, patches, chars, ...
    """
    module, colon, function = name.partition(":")
    if not colon:
        if name in TASKS:
            return TASKS[name]
        hint = did_you_mean(name, TASKS)
        raise ValueError(f"Unknown task {name!r}.{hint} Known: {', '.join(TASKS)}, or your own as 'module:function'.")
    try:
        found = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"The task {name!r} cannot be imported: {error}. Possible: 'module:function', of a module on Python's path."
        ) from None
    if not callable(found):
        raise ValueError(f"The task {name!r} is a {type(found).__name__}. It must be a function from a seed to a Task.")
    return found  # type: ignore[no-any-return]
