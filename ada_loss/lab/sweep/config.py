"""A sweep in a YAML file, whose keys are the arguments of `sweep`."""

from __future__ import annotations

import copy
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ada_loss.files import content_of
from ada_loss.lab.cells.cells import OPTIONS
from ada_loss.lab.sweep.driver import sweep
from ada_loss.lab.tasks import add_to_path
from fpsim.checks import SHOWN, did_you_mean, pip_install, shown

try:
    from ruamel.yaml import YAML
    from ruamel.yaml.constructor import DuplicateKeyError
    from ruamel.yaml.error import MarkedYAMLError
except ImportError as error:
    raise ImportError(f"A sweep in a file needs {error.name}, which is not installed: {pip_install('lab')}.") from None

__all__ = ["SHIPPED", "read_sweep", "text_of", "with_settings"]

SHIPPED = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}
KEYS = [name for name in inspect.signature(sweep).parameters if name != "show_progress"]
MOST_BYTES = 1 << 24
# The deepest nesting and the largest number of values of a sweep's file.
DEEPEST, MOST_VALUES = 20, 100_000
# A file must have at least one key of each group.
REQUIRED = (("task", "train"), ("formats",))


def text_of(name: str | Path) -> str:
    """Return the text of a sweep's file: your file, or a file of the library, which you can copy and edit.

    >>> text_of("digits").splitlines()[2]
    'task: digits'
    """
    return content_of(_path_of(name), MOST_BYTES).decode("utf-8")


def read_sweep(name: str | Path) -> dict[str, Any]:
    """Read the arguments for `sweep` from a file. `sweep` itself checks the values.

    The file is YAML 1.2: `1e-3` is a number, `off` and `none` are words, a duplicate key is an error. If the task is
    "module:function", the module may lie next to the file: the file's folder is appended to Python's path.

    name: the path of a YAML file, or the name of a sweep that comes with the library.
    Raises FileNotFoundError if there is no such file; ValueError for a file that is not YAML or is nested too deeply,
    and for an unknown or a missing key.

    >>> read_sweep("digits")["task"]
    'digits'
    """
    path = _path_of(name)
    written = content_of(path, MOST_BYTES)
    try:
        content = YAML(typ="safe", pure=True).load(written.decode("utf-8"))
        _require_small(content)
    except RecursionError:
        raise ValueError(f"{path} is nested too deep. {DEEPEST} levels are possible.") from None
    # All exceptions are caught: the parser raises TypeError, IndexError and others for text that is not YAML.
    except Exception as error:
        raise ValueError(f"{path} is not YAML: {_one_line(error)}. Write `key: value` lines.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {_kind(content)}. It must hold `key: value` lines: {', '.join(KEYS)}.")
    for key in content:
        if key not in KEYS:
            is_option = key in OPTIONS
            hint = f" Did you mean task_options: {{{key}: ...}}?" if is_option else did_you_mean(key, KEYS)
            raise ValueError(f"{path}: unknown key {str(key)[:SHOWN]}.{hint} Known: {', '.join(KEYS)}.")
    for keys in REQUIRED:
        if not any(key in content for key in keys):
            needed = " and ".join(" or ".join(keys) for keys in REQUIRED)
            raise ValueError(f"{path}: the key {' or '.join(keys)} is missing. A sweep needs {needed}.")
    # The module of a task may lie next to the file. The folder is put at the end of the path, so that it hides no other
    # module.
    if ":" in str(content.get("task")) or "train" in content:
        add_to_path(path.parent)
    if isinstance(content.get("out"), str):
        # A shell expands ~ in arguments, but not in a file.
        content["out"] = os.path.expanduser(content["out"])
    return content


def _path_of(name: str | Path) -> Path:
    path = Path(name)
    if not path.is_file():
        if re.fullmatch(r"[\w.]+:\w+", str(name)):
            raise FileNotFoundError(
                f"{str(name)!r} is a task or a training function, not a file. Write a YAML file with `task: {name}` "
                f"(or `train: {name}`) and `formats: [...]` in it, and give its path."
            )
        if str(name) not in SHIPPED:
            raise FileNotFoundError(
                f"There is no file {str(name)!r}.{did_you_mean(name, SHIPPED)} Expected: the path of a YAML file, or "
                f"one of the sweeps that come with the library: {', '.join(SHIPPED)}."
            )
        path = SHIPPED[str(name)]
    return path


def with_settings(arguments: Mapping[str, Any], settings: Sequence[str], keys: Sequence[str] = KEYS) -> dict[str, Any]:
    """Return a copy of the arguments with changed settings. `sweep` itself checks the values.

    settings: "key=value" or "key.inner=value"; the value is YAML, as in a file.
    keys: the known keys.
    Raises ValueError for text that is not a setting, for an unknown key, and for a value that is not YAML.

    >>> with_settings({"task": "digits", "task_options": {"epochs": 6}}, ["task_options.epochs=3", "seeds=[1, 2]"])
    {'task': 'digits', 'task_options': {'epochs': 3}, 'seeds': [1, 2]}
    """
    changed = copy.deepcopy(dict(arguments))
    for setting in settings:
        path, equals, text = setting.partition("=")
        key, *inner = path.strip().split(".")
        if not equals or not all((key, *inner)):
            raise ValueError(
                f"--set is {shown(setting)}. Expected: key=value. Take task_options.epochs=3, for instance."
            )
        if key not in keys:
            where = f" Did you mean task_options.{key}?" if key in OPTIONS else did_you_mean(key, keys)
            raise ValueError(f"--set: unknown key {shown(key)}.{where} Known: {', '.join(keys)}.")
        try:
            value = YAML(typ="safe", pure=True).load(text)
            _require_small(value)
        except Exception as error:
            raise ValueError(f"--set: the value of {shown(setting)} is not YAML: {_one_line(error)}.") from None
        place = changed
        for name, below in zip((key, *inner), inner):
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise ValueError(f"--set: {name} is {shown(place)}, and has no {below}. Set {name} itself.")
        place[(key, *inner)[-1]] = value
    return changed


def _require_small(content: Any) -> None:
    """Raise RecursionError for deep or endless nesting, ValueError for too many values."""
    parts = [(content, 0)]
    # The list grows during the loop, which needs no recursion. Aliases multiply values: a few lines can mean billions
    # of values.
    for part, depth in parts:
        if depth > DEEPEST:
            raise RecursionError
        if len(parts) > MOST_VALUES:
            raise ValueError(f"it holds more than {MOST_VALUES:,} values")
        inner = [*part.keys(), *part.values()] if isinstance(part, dict) else part if isinstance(part, list) else ()
        parts += [(value, depth + 1) for value in inner]


def _one_line(error: Exception) -> str:
    if isinstance(error, MarkedYAMLError):
        where = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        # DuplicateKeyError shows lists and mappings as if they were empty, so its text is cut off before the value.
        if isinstance(error, DuplicateKeyError):
            return f"{str(error.problem).partition(' with value')[0][: 5 * SHOWN]}{where}"
        return f"{str(error.problem)[: 5 * SHOWN]}{where}"
    return " ".join(str(error).split())[: 5 * SHOWN]


def _kind(content: Any) -> str:
    return "nothing" if content is None else f"a {type(content).__name__}"
