"""A time limit for one piece of work: an exception first, the end of its process where that does not help."""

from __future__ import annotations

import ctypes
import faulthandler
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["TimeLimit", "time_limit"]

GRACE = 10.0


class TimeLimit(Exception):
    """A cell ran for longer than it may."""


@contextmanager
def time_limit(seconds: float | None, *, end_process: bool = False, grace: float = GRACE) -> Iterator[None]:
    """Raise TimeLimit in a block that runs for longer, between two instructions of its Python code.

    end_process: a call into C that never returns sees no exception, so the process ends `grace` seconds later.

    >>> with time_limit(60):
    ...     pass
    """
    if seconds is None:
        yield
        return
    thread, lock, over = threading.get_ident(), threading.Lock(), [False]

    def interrupt() -> None:
        with lock:
            if not over[0]:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeLimit))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    if end_process:
        faulthandler.dump_traceback_later(seconds + grace, exit=True, file=2)
    timer.start()
    try:
        yield
    except TimeLimit:
        raise TimeLimit(f"It ran for longer than its time limit of {seconds:g} s.") from None
    finally:
        with lock:
            over[0] = True
        timer.cancel()
        if end_process:
            faulthandler.cancel_dump_traceback_later()
