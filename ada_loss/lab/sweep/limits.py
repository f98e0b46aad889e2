"""A time limit for one piece of work: an exception first, the end of its process where that does not help."""

from __future__ import annotations

import ctypes
import faulthandler
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["GRACE", "TimeLimit", "within_time"]

GRACE = 10.0
Result = TypeVar("Result")


class TimeLimit(Exception):
    """A cell ran for longer than it may."""


def within_time(
    seconds: float | None, work: Callable[[], Result], *, end_process: bool = False, grace: float = GRACE
) -> Result:
    """What `work` gives; TimeLimit is raised in it if it runs for longer, between two instructions of its Python code.

    end_process: a call into C that never returns sees no exception, so the process ends `grace` seconds later.

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
    # one frame, and no context manager: an exception that comes at any line must find its handler
    try:
        if end_process:
            faulthandler.dump_traceback_later(seconds + grace, exit=True, file=2)
        timer.start()
        try:
            return work()
        finally:
            with lock:
                over[0] = True
            if fired[0]:  # it may be on its way still, and would come out of some later line
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)
    except TimeLimit:
        raise TimeLimit(f"It ran for longer than its time limit of {seconds:g} s.") from None
    finally:
        timer.cancel()
        if end_process:
            faulthandler.cancel_dump_traceback_later()
