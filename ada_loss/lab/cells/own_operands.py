"""Operands of products given as functions of the user: "module:function", imported when called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ada_loss.lab.tasks import imported
from fpsim import Operand
from fpsim.checks import shown

__all__ = ["ImportedOperand", "as_operand", "is_path", "operand_functions", "operand_word"]

EXPECTED = "Expected: a function of a module on Python's path, as 'module:function'."


@dataclass(frozen=True)
class ImportedOperand:
    """A function of a tensor and an axis by its import path. No policy imports it: reading a ledger runs nothing.

    A call raises ValueError for a path that leads to no function.
    """

    path: str

    def __call__(self, x: Tensor, axis: int) -> Any:
        return self.function(x, axis)

    @property
    def function(self) -> Callable[[Tensor, int], Any]:
        """The function itself, imported."""
        found = imported("operand", self.path)
        if not callable(found):
            raise ValueError(f"The operand {shown(self.path)} is a {type(found).__name__}. {EXPECTED}")
        return found  # type: ignore[no-any-return]


def is_path(value: object) -> bool:
    """True if a value has the form of a function's import path.

    >>> is_path("mine:rounded"), is_path("recipe:"), is_path("e5m2 per tensor")
    (True, False, False)
    """
    module, colon, name = value.partition(":") if isinstance(value, str) else ("", "", "")
    return bool(colon) and all(word.isidentifier() for word in (*module.split("."), name))


def operand_word(value: Any) -> Any:
    """An operand for a configuration: the import path of a function; anything else unchanged.

    Raises ValueError for a function that cannot be imported by its name.
    """
    if not callable(value) or isinstance(value, type | Operand):
        return value
    path = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
    module = sys.modules.get(path.partition(":")[0])
    if path.startswith("__main__:") or not is_path(path) or getattr(module, path.partition(":")[2], None) is not value:
        raise ValueError(
            f"The operand {shown(value)} is a function that a worker cannot import: a lambda, one of a notebook or a "
            f"script, or one inside of another. {EXPECTED}"
        )
    return path


def as_operand(value: Any) -> Any:
    """An operand of a configuration as `Products` takes it."""
    if isinstance(value, list | tuple):
        return tuple(map(as_operand, value))
    word = operand_word(value)
    return Operand(ImportedOperand(word), name=word) if is_path(word) else value


def operand_functions(fmt: Any) -> Iterator[str]:
    """The import paths of operands anywhere in a format of a cell."""
    if isinstance(fmt, Mapping):
        for key, value in fmt.items():
            if key in ("products", "cache"):
                yield from _paths([*value.values()] if isinstance(value, Mapping) else value)
            else:
                yield from operand_functions(value)
    elif isinstance(fmt, list | tuple):
        for value in fmt:
            yield from operand_functions(value)


def _paths(value: Any) -> Iterator[str]:
    value = [*value.values()] if isinstance(value, Mapping) else value
    for each in value if isinstance(value, list | tuple) else (value,):
        if isinstance(each, list | tuple | Mapping):
            yield from _paths(each)
        elif is_path(each):
            yield each
