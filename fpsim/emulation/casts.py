"""Casts: what a call asks a tensor to become, where one dtype of torch stands for both float32 and the format.

`x.to(torch.float32)` asks for float32. `x.to(y.dtype)` asks for what y is, and `y.dtype` says float32 whether y is in
the format or not. Both calls give torch the same argument; only the code that called tells them apart.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fpsim.emulation.callers import names_float32

__all__ = [
    "CAST_NAMES",
    "FACTORIES",
    "FACTORIES_LIKE",
    "WIDE_DTYPES",
    "asks_for_float32",
    "autocast_depth",
    "dtype_in",
    "has_process_group",
    "is_called_by_sharding",
    "is_float32_island",
    "is_of_machinery",
]

CAST_NAMES = frozenset("to type type_as float double half bfloat16".split())
# Functions that make a tensor of nothing but sizes and numbers, and those that make one like another; counts are in the
# dtype of what is counted.
FACTORIES = frozenset(
    """
    zeros ones full empty eye arange linspace logspace range rand randn normal tensor as_tensor asarray scalar_tensor
    empty_strided empty_permuted
    """.split()
)
FACTORIES_LIKE = frozenset(
    """
    zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty
    new_empty_strided new_tensor histc
    """.split()
)
WIDE_DTYPES = (torch.float32, torch.float64)
_WIDE_TYPES = ("FloatTensor", "DoubleTensor")  # what a dtype was called before there were dtypes
_HOME = os.path.join(Path(torch.__file__).parent, "")  # not torchvision's, nor torch_geometric's
# The package of the modes. Not all of fpsim: `forwards` calls modules, and what calls it may be torch's sharding.
_MODES = os.path.join(sys.modules[__package__].__path__[0], "")
_MACHINERY = ("autograd", "distributed", "export", "fx", "func", "optim", "overrides.py", "utils")
_SHARDING = os.path.join(_HOME, "distributed", "")


def dtype_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype among the arguments of a call."""
    dtype = kwargs.get("dtype")
    if dtype is None:
        dtype = next((x for x in args if isinstance(x, torch.dtype)), None)
    return dtype


def asks_for_float32(function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the code that called `function` asks for float32 (or float64) in words.

    `x.float()` does, and `softmax(x, dtype=torch.float32)`, also by a variable that was set so; `y.dtype` does not.
    """
    if name in ("float", "double"):
        return True
    dtype, frame = dtype_in(args, kwargs), _caller_of(inspect.currentframe())
    if name == "type" and dtype is None:
        kind = args[1] if len(args) > 1 else kwargs.get("dtype")
        if isinstance(kind, str):  # x.type() gives such a string too
            return kind.endswith(_WIDE_TYPES) and frame is not None and kind in frame.f_code.co_consts
        return getattr(kind, "__name__", "") in _WIDE_TYPES
    if dtype not in WIDE_DTYPES:
        return False
    return frame is not None and names_float32(frame, getattr(function, "__name__", name), _caller_of)


def _caller_of(frame: FrameType | None) -> FrameType | None:
    """The frame of the code that called, past torch's own wrapping and ours."""
    frame = frame and frame.f_back
    while frame is not None and _is_between(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


has_process_group: Callable[[], bool] = (  # bool() is False
    torch.distributed.is_initialized if torch.distributed.is_available() else bool
)


def is_called_by_sharding() -> bool:
    """Whether torch.distributed itself calls: it gathers and frees parameters between modules, and computes nothing.

    Asked only where there is a process group.
    """
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and _is_between(frame.f_code.co_filename):
        if _is_of_sharding(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


@cache
def _is_of_sharding(file: str) -> bool:
    return file.startswith(_SHARDING)


@cache
def is_of_machinery(file: str) -> bool:
    """Whether a file of torch's runs models, and is not part of one: checkpoints, sharding, tracers, autograd."""
    if not file.startswith(_HOME):
        return False
    folder = Path(file).relative_to(_HOME).parts[0]
    return folder.startswith("_") or folder in _MACHINERY


@cache
def _is_between(file: str) -> bool:
    """Whether a frame lies between the user's call and the mode: that of a mode of ours, or torch's own wrapping."""
    return file.startswith((_HOME, _MODES))


def autocast_depth() -> int:
    """In how many `with torch.autocast(...)` blocks the code runs, of those that switch it on and those that do not."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def is_float32_island(outer_depth: int) -> bool:
    """Whether autocast was switched off since the depth was `outer_depth`: `with torch.autocast(..., enabled=False)`.

    A checkpoint runs its forward again inside of such blocks of its own, which say nothing.
    """
    depth = torch.autocast_increment_nesting() - 1  # as autocast_depth
    torch.autocast_decrement_nesting()
    if depth <= outer_depth:
        return False
    return not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"))
