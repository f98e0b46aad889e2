"""What stands in the place of a dtype in the code that called: `torch.float32` in words, or the model's own dtype.

`x.to(torch.float32)` and `x.to(y.dtype)` give torch the same argument. A variable is followed to where it was set, in
this function or, for a parameter, in the calls that led here. What cannot be followed counts as the model's own.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from types import CodeType, FrameType
from typing import NamedTuple

import torch

__all__ = ["names_float32"]

_LITERALS = ("float32", "float", "float64", "double")  # of the module torch
_CAST_METHODS = ("float", "double")  # of a tensor
_BOUNDARIES = ("STORE_", "POP_TOP", "RETURN_", "RESUME")
_BOUND = ("self", "cls")  # parameters that no call passes in words


class _Words(NamedTuple):
    """What is written in one place, as far as it may say a dtype.

    is_literal: torch.float32 or its like.
    is_own: the dtype of something, `x.dtype`.
    variables: local names.
    """

    is_literal: bool
    is_own: bool
    variables: tuple[str, ...]


def names_float32(frame: FrameType, function: str, caller_of: Callable[[FrameType], FrameType | None]) -> bool:
    """Whether the code that calls `function` in `frame` says float32 or float64 in words.

    caller_of: the frame of the code that called, past frames that do not count.
    """
    if _calls_by_name(frame.f_code, frame.f_lasti):
        return True
    words = _words_of_call(frame.f_code, frame.f_lasti, function)
    return words.is_literal or (not words.is_own and _any_variable_does(frame, words.variables, caller_of))


def _any_variable_does(
    frame: FrameType, variables: tuple[str, ...], caller_of: Callable[[FrameType], FrameType | None]
) -> bool:
    return any(
        _variable_does(frame, name, caller_of)
        for name in variables
        if isinstance(frame.f_locals.get(name), torch.dtype)
    )


def _variable_does(frame: FrameType, name: str, caller_of: Callable[[FrameType], FrameType | None]) -> bool:
    """Whether a local variable, which holds a dtype, was set to float32 in words."""
    code = frame.f_code
    set_to = _words_of_assignments(code, name)
    if name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        caller = caller_of(frame)
        passed = None if caller is None else _words_of_passed(caller.f_code, caller.f_lasti, code, name)
        if passed is None or caller is None:
            return False
        if passed != _NOT_PASSED:
            return passed.is_literal or (not passed.is_own and _any_variable_does(caller, passed.variables, caller_of))
        return set_to is None or (set_to.is_literal and not set_to.is_own)  # its default, or what stands in for None
    if set_to is None:
        outer = frame.f_back if name in code.co_freevars else None  # of a comprehension
        return outer is not None and name in outer.f_code.co_cellvars and _variable_does(outer, name, caller_of)
    if set_to.is_literal or set_to.is_own:
        return not set_to.is_own
    others = tuple(other for other in set_to.variables if other != name)
    return _any_variable_does(frame, others, caller_of)


_NOT_PASSED = _Words(False, False, ("",))


@cache
def _calls_by_name(code: CodeType, last: int) -> bool:
    """Whether the call at offset `last` is `x.float()` or its like: a compiler's stand-in for x calls `to` then."""
    loads = [x for x in _arguments(code, last) if x.opname.startswith("LOAD")]
    return bool(loads) and loads[-1].argval in _CAST_METHODS and not loads[-1].opname.startswith("LOAD_CONST")


@cache
def _words_of_call(code: CodeType, last: int, function: str) -> _Words:
    """What stands among the arguments of the call at offset `last`, not inside of calls among them."""
    arguments = _arguments(code, last)
    named = [i for i, x in enumerate(arguments) if x.argval == function and x.opname.startswith("LOAD")]
    return _words_of(_outside_of_calls(arguments[named[-1] + 1 :] if named else arguments))


@cache
def _words_of_passed(code: CodeType, last: int, callee: CodeType, name: str) -> _Words | None:
    """What the call at offset `last` of `callee` says for its parameter `name`; None where that cannot be read."""
    instructions, call = _arguments(code, last), _at(code, last)
    is_of_callee = callee.co_name == "forward" or any(x.argval == callee.co_name for x in instructions)
    if not is_of_callee or call.opname not in ("CALL", "CALL_KW", "PRECALL") or call.arg is None:
        return None  # a wrapper, which passes what it was given
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
    """What a variable is set to, wherever the code sets it; None where it does not."""
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
    """The local variables that an instruction sets."""
    if not x.opname.startswith(("STORE_FAST", "STORE_DEREF")):
        return ()
    names = x.argval if isinstance(x.argval, tuple) else (x.argval,)  # two in one, since Python 3.13
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
    """The instructions that make what is called at offset `last`, and its arguments."""
    call = _at(code, last)
    return [x for x in _instructions(code) if x.offset < call.offset and _lies_in(x, call)]


def _outside_of_calls(instructions: list[dis.Instruction]) -> list[dis.Instruction]:
    calls = [x for x in instructions if x.opname.startswith("CALL")]
    return [x for x in instructions if not any(x is not call and _lies_in(x, call) for call in calls)]


def _lies_in(x: dis.Instruction, outer: dis.Instruction) -> bool:
    """Whether an instruction comes from inside of the source of another one. True where positions were left out."""
    own, around = x.positions, outer.positions
    if own is None or around is None or None in own or None in around:
        return True
    starts = (around.lineno, around.col_offset) <= (own.lineno, own.col_offset)  # type: ignore[operator]
    return starts and (own.end_lineno, own.end_col_offset) <= (around.end_lineno, around.end_col_offset)  # type: ignore[operator]
