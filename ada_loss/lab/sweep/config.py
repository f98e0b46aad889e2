"""A sweep in a YAML file, whose keys are the arguments of `sweep`."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

from ada_loss.lab.sweep.driver import sweep
from fpsim.checks import did_you_mean, pip_install

try:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
except ImportError as error:
    raise ImportError(f"A sweep in a file needs {error.name}, which is not installed: {pip_install('lab')}.") from None

__all__ = ["SHIPPED", "read_sweep"]

SHIPPED = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}
KEYS = [name for name in inspect.signature(sweep).parameters if name != "show_progress"]
REQUIRED = ("task", "formats")


def read_sweep(name: str | Path) -> dict[str, Any]:
    """The arguments for `sweep` from a file. `sweep` itself checks the values.

    The file is YAML 1.2: `1e-3` is a number, `off` and `none` are words, a duplicate key is an error.

    name: the path of a YAML file, or the name of a sweep that comes with the library.
    Raises FileNotFoundError without such a file; ValueError for a file that is no YAML, an unknown or a missing key.

    >>> read_sweep("digits")["task"]
    'digits'
    """
    path = Path(name)
    if not path.is_file():
        if str(name) not in SHIPPED:
            raise FileNotFoundError(
                f"There is no file {str(name)!r}.{did_you_mean(name, SHIPPED)} Possible: the path of a YAML file, or "
                f"one of the sweeps that come with the library: {', '.join(SHIPPED)}."
            )
        path = SHIPPED[str(name)]
    try:
        content = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except (YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {_one_line(error)}. Write `key: value` lines.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {_kind(content)}. It must hold `key: value` lines: {', '.join(KEYS)}.")
    for key in content:
        if key not in KEYS:
            raise ValueError(f"{path}: unknown key {key}.{did_you_mean(key, KEYS)} Known: {', '.join(KEYS)}.")
    for key in REQUIRED:
        if key not in content:
            raise ValueError(f"{path}: the key {key} is missing. A sweep needs {' and '.join(REQUIRED)}.")
    if isinstance(content.get("out"), str):
        content["out"] = os.path.expanduser(content["out"])  # no shell has done it
    return content


def _one_line(error: Exception) -> str:
    if isinstance(error, MarkedYAMLError):
        where = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        return f"{error.problem}{where}"
    return " ".join(str(error).split())


def _kind(content: Any) -> str:
    return "nothing" if content is None else f"a {type(content).__name__}"
