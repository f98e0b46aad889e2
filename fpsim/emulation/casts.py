"""Casts: the dtype that a call asks for, where one dtype of torch stands for both float32 and the format.

`x.to(torch.float32)` asks for float32. `x.to(y.dtype)` asks for the dtype of y, and `y.dtype` is float32 whether y is
in the format or not. Both calls give torch the same argument: only the calling code tells them apart.
"""

from __future__ import annotations

import dis
import inspect
import operator
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from fpsim.emulation.operations import TABLE, Kind

__all__ = [
    "CAST_NAMES",
    "FACTORIES",
    "FACTORIES_LIKE",
    "WIDE_DTYPES",
    "asks_for_float32",
    "autocast_depth",
    "autocast_here",
    "dtype_in",
    "has_process_group",
    "is_called_by_sharding",
    "is_float32_island",
    "is_of_machinery",
]

CAST_NAMES = frozenset(row.name for row in TABLE.values() if row.kind is Kind.CAST)
# Functions that make a tensor from nothing but sizes and numbers, and functions that make one like another tensor.
# histc is among the latter: its counts have the dtype of the counted values.
FACTORIES = frozenset(
    """
    zeros ones full empty eye arange linspace logspace range rand randn normal tensor as_tensor asarray scalar_tensor
    empty_strided empty_permuted fft_fftfreq fft_rfftfreq
    hann_window hamming_window blackman_window bartlett_window kaiser_window
    """.split()
)
FACTORIES_LIKE = frozenset(
    """
    zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty
    new_empty_strided new_tensor histc
    """.split()
)
WIDE_DTYPES = (torch.float32, torch.float64)
_WIDE_TYPES = ("FloatTensor", "DoubleTensor")  # the names of dtypes before torch had dtypes
_HOME = os.path.join(Path(torch.__file__).parent, "")  # with the separator: not the folder of torchvision
# The package of the modes, and not all of fpsim: `models.forwards` calls modules, and torch's sharding may call it.
_MODES = os.path.join(sys.modules[__package__].__path__[0], "")
_MACHINERY = ("autograd", "distributed", "export", "fx", "func", "optim", "overrides.py", "utils")
_SHARDING = os.path.join(_HOME, "distributed", "")


def dtype_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype among the arguments of a call."""
    dtype = kwargs.get("dtype")
    if dtype is None:
        dtype = next((x for x in args if isinstance(x, torch.dtype)), None)
    return dtype


def asks_for_float32(function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the code that called `function` asks for float32 (or float64) by name.

    `x.float()` does, and so does `softmax(x, dtype=torch.float32)`, also through a variable that was set to
    torch.float32. `y.dtype` does not.
    """
    if name in ("float", "double"):
        return True
    dtype, frame = dtype_in(args, kwargs), _caller_of(inspect.currentframe())
    if name == "type" and dtype is None:
        kind = args[1] if len(args) > 1 else kwargs.get("dtype")
        # `y.type()` returns such a string too, so that the string has to be a constant of the calling code.
        if isinstance(kind, str):
            return kind.endswith(_WIDE_TYPES) and frame is not None and kind in frame.f_code.co_consts
        return getattr(kind, "__name__", "") in _WIDE_TYPES
    if dtype not in WIDE_DTYPES:
        return False
    return frame is not None and _names_float32(frame, getattr(function, "__name__", name))


def _caller_of(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the calling code, past the frames of torch and of this package."""
    frame = frame and frame.f_back
    while frame is not None and _is_between(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


has_process_group: Callable[[], bool] = (  # bool() is False
    torch.distributed.is_initialized if torch.distributed.is_available() else bool
)


def is_called_by_sharding() -> bool:
    """True if torch.distributed itself calls: it gathers and frees parameters between modules, and computes nothing."""
    # Walking the stack is slow: callers call this only if there is a process group.
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
    """True if a file of torch runs models, and is not part of a model: checkpoints, sharding, tracers, autograd."""
    if not file.startswith(_HOME):
        return False
    folder = Path(file).relative_to(_HOME).parts[0]
    return folder.startswith("_") or folder in _MACHINERY


@cache
def _is_between(file: str) -> bool:
    """True if a frame's file is one of torch or of this package: such frames lie between the user's call and a mode."""
    return file.startswith((_HOME, _MODES))


# torch returns the depth only from functions that change it. The depth is therefore raised, and lowered again.
_LOOK: Any = (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)


def autocast_here() -> list[Callable[[], AbstractContextManager[Any]]]:
    """Return makers of contexts that enter this thread's autocast in another thread."""
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return [partial(torch.autocast, device, torch.get_autocast_dtype(device)) for device in devices]


def autocast_depth() -> int:
    """Return the number of `torch.autocast` blocks around the running code, whether they switch it on or off."""
    # `map` makes both calls within one instruction. A Ctrl-C between them would leave torch in a block for ever.
    # Autocast drops its cached casts of weights at the end of the outermost block, and would compute with old weights.
    _, depth = map(operator.call, _LOOK)
    return depth  # type: ignore[no-any-return]


def is_float32_island(outer_depth: int) -> bool:
    """True if a block `torch.autocast(..., enabled=False)` was entered since the depth was `outer_depth`."""
    # The depth is compared, because a checkpoint opens such blocks itself when it recomputes.
    _, depth = map(operator.call, _LOOK)  # as autocast_depth
    if depth <= outer_depth:
        return False
    return not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"))


# The dtype in the calling code: `torch.float32` written literally, or taken from the model


_LITERALS = ("float32", "float", "float64", "double")  # of the module torch
_CAST_METHODS = ("float", "double")  # of a tensor
_BOUNDARIES = ("STORE_", "POP_TOP", "RETURN_", "RESUME")
_BOUND = ("self", "cls")  # parameters that no call passes in words


class _Words(NamedTuple):
    """Parts of a source expression that may name a dtype.

    is_literal: whether it contains torch.float32 or the like.
    is_own: whether it contains the dtype of an object, as `x.dtype`.
    variables: the local variables in it.
    """

    is_literal: bool
    is_own: bool
    variables: tuple[str, ...]


def _names_float32(frame: FrameType, function: str) -> bool:
    """True if the code that calls `function` in `frame` names float32 or float64."""
    if _calls_by_name(frame.f_code, frame.f_lasti):
        return True
    words = _words_of_call(frame.f_code, frame.f_lasti, function)
    return words.is_literal or (not words.is_own and _any_variable_does(frame, words.variables))


def _any_variable_does(frame: FrameType, variables: tuple[str, ...]) -> bool:
    return any(_variable_does(frame, name) for name in variables if isinstance(frame.f_locals.get(name), torch.dtype))


def _variable_does(frame: FrameType, name: str) -> bool:
    """True if a local variable that holds a dtype was set to float32 by name."""
    code = frame.f_code
    set_to = _words_of_assignments(code, name)
    if name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        caller = _caller_of(frame)
        passed = None if caller is None else _words_of_passed(caller.f_code, caller.f_lasti, code, name)
        if passed is None or caller is None:
            return False
        if passed != _NOT_PASSED:
            return passed.is_literal or (not passed.is_own and _any_variable_does(caller, passed.variables))
        # The argument was not passed: its value is the default, float32, or a value that the function assigns for None.
        return set_to is None or (set_to.is_literal and not set_to.is_own)
    if set_to is None:
        # Before Python 3.12 a comprehension has a frame of its own, and the variable belongs to the function around it.
        outer = frame.f_back if name in code.co_freevars else None
        return outer is not None and name in outer.f_code.co_cellvars and _variable_does(outer, name)
    if set_to.is_literal or set_to.is_own:
        return not set_to.is_own
    others = tuple(other for other in set_to.variables if other != name)
    return _any_variable_does(frame, others)


_NOT_PASSED = _Words(False, False, ("",))


@cache
def _calls_by_name(code: CodeType, last: int) -> bool:
    """True if the call at offset `last` is `x.float()` or `x.double()`."""
    # Read from the bytecode, because a compiler's stand-in for x turns the call into `to`.
    loads = [x for x in _arguments(code, last) if x.opname.startswith("LOAD")]
    return bool(loads) and loads[-1].argval in _CAST_METHODS and not loads[-1].opname.startswith("LOAD_CONST")


@cache
def _words_of_call(code: CodeType, last: int, function: str) -> _Words:
    """Read the expressions among the arguments of the call at offset `last`, outside of nested calls."""
    arguments = _arguments(code, last)
    named = [i for i, x in enumerate(arguments) if x.argval == function and x.opname.startswith("LOAD")]
    # Only what follows the function's name is read: the tensor before it may be an expression that names a dtype.
    return _words_of(_outside_of_calls(arguments[named[-1] + 1 :] if named else arguments))


@cache
def _words_of_passed(code: CodeType, last: int, callee: CodeType, name: str) -> _Words | None:
    """Read the expression that the call of `callee` at offset `last` passes as `name`; None if it cannot be read."""
    instructions, call = _arguments(code, last), _at(code, last)
    is_of_callee = callee.co_name == "forward" or any(x.argval == callee.co_name for x in instructions)
    # Any other call comes from a wrapper, which passes its arguments on as *args.
    if not is_of_callee or call.opname not in ("CALL", "CALL_KW", "PRECALL") or call.arg is None:
        return None
    keywords: tuple[str, ...] = ()
    for x in instructions[-3:]:
        is_names = x.opname == "KW_NAMES" or (call.opname == "CALL_KW" and x.opname.startswith("LOAD_CONST"))
        if is_names and isinstance(x.argval, tuple):
            keywords = x.argval
    parameters = [x for x in callee.co_varnames if x not in _BOUND]
    if name not in keywords and call.arg - len(keywords) <= parameters.index(name):
        return _NOT_PASSED
    return _words_of(_outside_of_calls(instructions))


@cache
def _words_of_assignments(code: CodeType, name: str) -> _Words | None:
    """Read the expressions that the code assigns to a variable; None if it assigns none."""
    instructions, assigned = _instructions(code), []
    for end, x in enumerate(instructions):
        if name in _stored_by(x):
            start = end
            while start and not instructions[start - 1].opname.startswith(_BOUNDARIES):
                start -= 1
            assigned.append(_words_of(instructions[start:end]))
    if not assigned:
        return None
    variables = tuple(variable for words in assigned for variable in words.variables)
    return _Words(any(x.is_literal for x in assigned), any(x.is_own for x in assigned), variables)


def _stored_by(x: dis.Instruction) -> tuple[str, ...]:
    """Return the local variables that an instruction sets."""
    if not x.opname.startswith(("STORE_FAST", "STORE_DEREF")):
        return ()
    # Since Python 3.13 one instruction may store two variables, or store one and load another.
    names = x.argval if isinstance(x.argval, tuple) else (x.argval,)
    return names[:1] if x.opname.endswith("LOAD_FAST") else names


def _words_of(instructions: list[dis.Instruction]) -> _Words:
    is_literal = any(
        later.argval in _LITERALS and earlier.argval == "torch" and earlier.opname.startswith("LOAD")
        for earlier, later in pairwise(instructions)
    )
    is_own = any(x.argval == "dtype" and x.opname == "LOAD_ATTR" for x in instructions)
    loads = (x.argval for x in instructions if x.opname.startswith(("LOAD_FAST", "LOAD_DEREF")))
    names = (name for names in loads for name in (names if isinstance(names, tuple) else (names,)))
    return _Words(is_literal, is_own, tuple(dict.fromkeys(str(name) for name in names)))


@cache
def _instructions(code: CodeType) -> list[dis.Instruction]:
    return [*dis.get_instructions(code)]


def _at(code: CodeType, last: int) -> dis.Instruction:
    return [x for x in _instructions(code) if x.offset <= last][-1]


def _arguments(code: CodeType, last: int) -> list[dis.Instruction]:
    """Return the instructions that make the callee and the arguments of the call at offset `last`."""
    call = _at(code, last)
    return [x for x in _instructions(code) if x.offset < call.offset and _lies_in(x, call)]


def _outside_of_calls(instructions: list[dis.Instruction]) -> list[dis.Instruction]:
    calls = [x for x in instructions if x.opname.startswith("CALL")]
    return [x for x in instructions if not any(x is not call and _lies_in(x, call) for call in calls)]


def _lies_in(x: dis.Instruction, outer: dis.Instruction) -> bool:
    """True if an instruction comes from inside of the source of another one."""
    own, around = x.positions, outer.positions
    # Without positions (python -X no_debug_ranges) every instruction counts.
    if own is None or around is None or None in own or None in around:
        return True
    starts = (around.lineno, around.col_offset) <= (own.lineno, own.col_offset)  # type: ignore[operator]
    return starts and (own.end_lineno, own.end_col_offset) <= (around.end_lineno, around.end_col_offset)  # type: ignore[operator]
