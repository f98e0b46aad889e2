"""Ctrl-C at each instant at which Python can handle it, one after the other, without a clock.

Python handles a signal where a function or a generator begins to run, behind a call, and where a loop goes back. A
trace function raises there.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

_BEHIND = frozenset(name for name in dis.opmap if name.startswith(("CALL", "JUMP_BACKWARD")))


class _Instants:
    """Counts instants, and raises KeyboardInterrupt at one of them. The trace function of new frames."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        self.come()
        frame.f_trace = _Frame(self)  # Python 3.13 looks at f_trace_opcodes where f_trace is set
        frame.f_trace_opcodes = True
        return frame.f_trace

    def come(self) -> None:
        self.count += 1
        if self.count == self.at:
            sys.settrace(None)
            raise KeyboardInterrupt


class _Frame:
    """The trace function of one frame. It holds no frame: what a frame holds is to be lost with it."""

    def __init__(self, instants: _Instants) -> None:
        self.instants, self.before = instants, ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            if self.before in _BEHIND:
                self.instants.come()
            self.before = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        return self


def interrupted(function: Callable[[], object], at: int) -> tuple[int, BaseException | None]:
    """Call, with Ctrl-C at an instant, counted from 1; 0 for none. Returns how many came, and what was raised.

    The error holds its traceback, and this the frames that were interrupted, as `sys.last_traceback` does.
    """
    instants = _Instants(at)
    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks at it only when a trace function is set
    try:
        sys.settrace(instants)
        function()
    except KeyboardInterrupt as error:
        return instants.count, error
    finally:
        sys.settrace(before)
    return instants.count, None
