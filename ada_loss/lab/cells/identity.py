"""Names of tasks in configurations. The name of a notebook's function includes a hash of its source and data."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ada_loss.lab.tasks import Task, find_task, is_of_own_data, with_hash
from ada_loss.lab.training.job import Job
from fpsim.checks import shown

__all__ = ["MakeTask", "TrainFunction", "is_local", "is_own", "own_training", "path_of", "task_of"]

MakeTask = Callable[[int], Task]
TrainFunction = Callable[[Job], Mapping[str, Any]]
# The prefix of a training function's name in a configuration, where the name replaces the task's name.
OWN = "train "


def own_training(train: str | TrainFunction) -> str:
    """Return the name of a training function for a configuration. Raises TypeError and ValueError like `task_of`."""
    if isinstance(train, str) and ":" not in train:
        raise ValueError(f"train={shown(train)} is invalid. Expected: a function, or 'module:function'.")
    if isinstance(train, str) or callable(train):
        return OWN + task_of(train)  # type: ignore[arg-type]
    raise TypeError(f"train is {shown(train)}. Expected: a function, or 'module:function'.")


def is_own(name: str) -> bool:
    """True if a task's name is the name of a training function."""
    return name.startswith(OWN)


def path_of(name: str) -> str:
    """Return the import path of a training function, or a task's name unchanged.

    >>> path_of("train mine:fit"), path_of("digits")
    ('mine:fit', 'digits')
    """
    return name.removeprefix(OWN)


def is_local(name: str) -> bool:
    """True if the name belongs to a function of a notebook or a script, which cannot be imported.

    >>> is_local("__main__:mine@0a1b2c3d"), is_local("mine:task"), is_local("chars=a@b.txt")
    (True, False, False)
    """
    return "@" in name.partition("=")[0]


def task_of(task: str | MakeTask) -> str:
    """Return the name of a task in a configuration; the name of a function that cannot be imported ends with a hash.

    The name of a task with the user's own data ends with a hash of the file or folder: "chars=book.txt#0a1b2c3d".

    The hash of a function covers its source, its defaults, and the globals and closed-over variables that it uses:
    numbers, strings, tensors, arrays, lists, tuples and mappings of them, and functions and classes of the same
    notebook or script. It does not cover other objects, such as a module that was trained there.

    task: a name, "module:function", or a function from a seed to a Task.
    Raises ValueError for an unknown name, TypeError for anything but a name or a function.
    """
    if isinstance(task, str) or not callable(task):
        find_task(task)
        return with_hash(task) if is_of_own_data(task) else task
    name = f"{getattr(task, '__module__', '')}:{getattr(task, '__qualname__', '')}"
    module = sys.modules.get(name.partition(":")[0])
    if not name.startswith("__main__:") and getattr(module, name.partition(":")[2], None) is task:
        return name
    # A name cannot contain the arguments of a partial, or the object of a method.
    if not inspect.isfunction(task):
        raise TypeError(
            f"task is {type(task).__name__}. Expected: a name, 'module:function', or a function. "
            f"Write one around it: def mine(seed): return make(seed, ...)."
        )
    # A notebook's function keeps its name when it is edited. The hash changes, so that its cells are new cells.
    return name + "@" + hashlib.sha256("\n".join(_sources(task, task.__module__, set())).encode()).hexdigest()[:8]


def _sources(thing: Any, module: str, seen: set[int]) -> Iterator[str]:
    """Yield the source of a function or class, then of everything that it uses."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    try:
        yield inspect.getsource(thing)
    except (OSError, TypeError):
        # If there is no source (typed into a REPL, built by `type`), the byte code takes its place.
        yield repr(getattr(getattr(thing, "__code__", None), "co_code", thing.__qualname__))
    for name, value in sorted((_used(thing) if inspect.isfunction(thing) else _members(thing)).items()):
        yield from _values(name, value, module, seen)


def _used(function: Any) -> dict[str, Any]:
    """Return the globals and closed-over variables that a function and its inner functions use, and its defaults."""
    codes, names = [function.__code__], set()
    # The list grows during the loop: the code of an inner function is a constant of the outer function.
    for code in codes:
        names |= {*code.co_names}
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    # The signature is that of the function itself, not of a function that it wraps as a decorator.
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    return {
        **{name: value for name, value in function.__globals__.items() if name in names},
        **inspect.getclosurevars(function).nonlocals,
        **{f"{p.name}=": p.default for p in parameters if p.default is not p.empty},
    }


def _members(cls: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if inspect.isfunction(value) or not name.startswith("__")}


def _values(name: str, value: Any, module: str, seen: set[int]) -> Iterator[str]:
    """Yield a value as text that is the same in every process; yield nothing for objects that are not covered."""
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        # The bytes of an array of Python objects are addresses, which differ between processes.
        value = value.tolist()
    elif isinstance(value, torch.Tensor) and value.is_nested:
        # A nested tensor has no shape.
        value = value.unbind()
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        yield f"{name} = {_digest(value)}"
    elif _is_plain(value):
        yield f"{name} = {value!r}"
    elif isinstance(value, list | tuple | dict):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            place = repr(key) if _is_plain(key) else type(key).__name__
            yield from _values(f"{name}[{place}]", part, module, seen)
    elif (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module:
        yield from _sources(value, module, seen)


def _digest(data: Any) -> str:
    """Return dtype, shape and a hash of the values of an array or a tensor; strides and device do not matter."""
    words = f"{data.dtype} {tuple(data.shape)}"
    if isinstance(data, torch.Tensor):
        if data.is_meta:
            return words
        flat = data.detach().to_dense().cpu().resolve_conj().resolve_neg().flatten().contiguous()
        # The tensor is viewed as bytes, because NumPy has no bfloat16.
        data = flat.view(torch.uint8).numpy()
    return f"{words} {hashlib.sha256(data.tobytes()).hexdigest()}"


def _is_plain(value: Any) -> bool:
    """True if the repr of a value is the same in every process."""
    if isinstance(value, dict):
        value = [*value.items()]
    return (
        all(map(_is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, int | float | str | None)
    )
