"""A time limit for a piece of work: first an exception, then the end of the process."""

from __future__ import annotations

import ctypes
import faulthandler
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["GRACE", "TimeLimit", "within_time"]

GRACE = 10.0  # seconds from the exception to the end of the process
Result = TypeVar("Result")


class TimeLimit(Exception):
    """A cell ran for longer than its time limit."""


def within_time(
    seconds: float | None, work: Callable[[], Result], *, end_process: bool = False, grace: float = GRACE
) -> Result:
    """Call `work` and give its result. After `seconds` it raises TimeLimit, between two instructions of Python code.

    seconds: the time limit; None for no limit.
    end_process: end the process where the exception does not help: a call into C that never returns does not see it.
    grace: the seconds from the exception to the end of the process.
    Raises TimeLimit.

    >>> within_time(60, lambda: 1 + 1)
    2
    """
    if seconds is None:
        return work()
    thread, lock, over, fired = ctypes.c_ulong(threading.get_ident()), threading.Lock(), [False], [False]

    def interrupt() -> None:
        with lock:
            if not over[0]:
                fired[0] = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TimeLimit))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    # one frame and no context manager: the exception may come at any line, and must find its handler
    try:
        if end_process:
            faulthandler.dump_traceback_later(seconds + grace, exit=True, file=2)
        timer.start()
        try:
            return work()
        finally:
            with lock:
                over[0] = True
            if fired[0]:  # the exception may still be pending, and would be raised in some later line
                _let_come()
    except TimeLimit:
        raise TimeLimit(f"It ran for longer than its time limit of {seconds:g} s.") from None
    finally:
        timer.cancel()
        if end_process:
            faulthandler.cancel_dump_traceback_later()


def _let_come() -> None:
    """Let an exception that is pending for this thread be raised here, where it ends.

    Python would forget it if the thread were given None in its place, but would look for it at every call from then on
    (https://github.com/python/cpython/blob/v3.11.7/Python/ceval.c, `_PyEval_SignalAsyncExc`): it is slower, and in
    Python 3.11 a debugger or a trace of opcodes never ends.
    """
    try:
        for _ in range(3):  # each turn looks for it
            pass
    except TimeLimit:
        pass
