"""Values that an argument may be given by mistake, and what became of a call with one."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from decimal import Decimal
from fractions import Fraction
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from fuzzing import PACKAGES
from torch import nn


class Unreadable:
    """An object of a stranger's, whose repr is broken."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Reached(Exception):
    """Raised by a test's stand-in for what comes behind the border."""


def wrong_values() -> dict[str, Any]:
    """New ones for each call: some can be exhausted or changed."""
    return {
        "None": None,
        "True": True,
        "False": False,
        "'yes'": "yes",
        "'no'": "no",
        "'True'": "True",
        "''": "",
        "' '": " ",
        "'x'": "x",
        "'1'": "1",
        "null byte": "a\0b",
        "surrogate": "\udcff",
        "long text": "fp16" * 10_000,
        "bytes": b"fp16",
        "0": 0,
        "1": 1,
        "-1": -1,
        "3": 3,
        "1.5": 1.5,
        "-0.5": -0.5,
        "nan": float("nan"),
        "inf": float("inf"),
        "-inf": float("-inf"),
        "2**70": 2**70,
        "-2**70": -(2**70),
        "5000 digits": 10**5000,
        "1e308": 1e308,
        "1j": 1j,
        "Decimal nan": Decimal("nan"),
        "Fraction": Fraction(1, 3),
        "float64 nan": np.float64("nan"),
        "object": object(),
        "unreadable": Unreadable(),
        "[]": [],
        "[1]": [1],
        "['fp16']": ["fp16"],
        "[None]": [None],
        "()": (),
        "(1, 2)": (1, 2),
        "{}": {},
        "{'a': 1}": {"a": 1},
        "{1: 'a'}": {1: "a"},
        "set": set(),
        "iterator": iter(()),
        "range": range(3),
        "function": lambda *_: None,
        "type": int,
        "module class": nn.Linear,
        "module": nn.ReLU(),
        "tensor": torch.tensor(1.0),
        "tensor nan": torch.tensor([float("nan"), 1.0]),
        "empty tensor": torch.empty(0),
        "int tensor": torch.tensor([1, 2]),
        "meta tensor": torch.empty(2, 2, device="meta"),
        "complex tensor": torch.tensor([1j]),
        "array": np.array([1.0, 2.0]),
        "array of words": np.array(["a"]),
        "dtype": torch.float16,
        "path": Path("nowhere"),
    }


def near_values(valid: Any) -> dict[str, Any]:
    """Values near to a valid one, when it is a word."""
    if not isinstance(valid, str) or len(valid) < 2:
        return {}
    return {
        f"'{valid}x'": valid + "x",
        f"' {valid}'": " " + valid,
        f"'{valid[:-1]}'": valid[:-1],
        f"b'{valid}'": valid.encode(),
        f"['{valid}', None]": [valid, None],
    }


class Outcome(NamedTuple):
    """What became of a call.

    kind: "accepted"; "clear", "vague" for an error of ours that does not name argument and value; "inner" for an error
        that something inside raised of its own.
    """

    kind: str
    error: BaseException | None = None

    @property
    def place(self) -> str:
        """Where the error was raised, from the packages' point of view."""
        found = [frame for frame in _frames(self.error) if _is_ours(frame[0])]
        return "nowhere" if not found else f"{Path(found[-1][0]).name}:{found[-1][1]}"


def outcome(call: Callable[[], object], name: str, value: object, words: tuple[str, ...] = ()) -> Outcome:
    """Call, and judge the error.

    name: of the argument. value: what it was given. words: what else an error may call the argument.
    """
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            call()
    except Reached:
        return Outcome("accepted")
    except Exception as error:  # any kind: which one is the question
        return Outcome(_kind(error, name, value, words), error)
    return Outcome("accepted")


def _kind(error: Exception, name: str, value: object, words: tuple[str, ...]) -> str:
    last = _frames(error)[-1]
    if not _is_ours(last[0]) or not last[2].startswith("raise ") or not isinstance(error, (TypeError, ValueError)):
        return "inner"
    text = str(error)
    if not 20 <= len(text) <= 2000:
        return "inner"
    said = any(re.search(rf"\b{re.escape(word)}", text, re.IGNORECASE) for word in (name, *words))
    return "clear" if said and any(word in text for word in _words_of(value)) else "vague"


def _words_of(value: object) -> Iterator[str]:
    """What of a value may stand in an error: its beginning, its type, or one of its items."""
    yield type(value).__name__
    if isinstance(value, torch.Tensor | np.ndarray):
        yield from ("tensor", "array", "shape", "dtype", "meta", "0-d", "np.")
    elif not isinstance(value, Unreadable) and not (isinstance(value, int) and abs(value) > 10**4000):
        for text in (repr(value), str(value)):
            yield text if len(text) < 30 else text[:30]
        if isinstance(value, int | Fraction):
            yield str(float(value))
        for items in (value.keys(), value.values()) if isinstance(value, dict) else (value,):
            if isinstance(items, list | tuple | bytes | range) or isinstance(value, dict):
                for item in items:
                    yield from _words_of(item)
        if not value and hasattr(value, "__len__"):
            yield from ("empty", "none", "()")


def _frames(error: BaseException | None) -> list[tuple[str, int, str]]:
    """File, line number and source line of each frame, the innermost last."""
    trace = None if error is None else error.__traceback__
    return [(f.filename, f.lineno or 0, f.line or "") for f in traceback.extract_tb(trace)]


def _is_ours(filename: str) -> bool:
    return any(Path(filename).is_relative_to(package) for package in PACKAGES)
