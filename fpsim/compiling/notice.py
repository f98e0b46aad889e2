"""Print one line to stderr if compilation takes longer than a second, so that a first call does not look hung."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock, Timer

AFTER = 1.0  # seconds without machine code, after which the line is written
_RANKS = "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"  # set by launchers of many processes

_lock = Lock()
_waited = 0.0  # seconds, of all loops so far: a step needs several, each of which may take less than a second
_is_said = False


def _is_one_of_many() -> bool:
    """True if another process writes the line: the parent of this one, or the first rank."""
    return multiprocessing.parent_process() is not None or any(os.environ.get(name, "0") != "0" for name in _RANKS)


def silence() -> None:
    """Suppress the line in this process, which shows the progress of compilation in another way."""
    global _is_said
    _is_said = True


def _say(name: str) -> None:
    global _is_said
    with _lock:
        if _is_said or sys.stderr is None:
            return
        _is_said = True
        print(
            f"fpsim compiles its loops for this processor (now: {name}). A first step takes 3 to 20 seconds; later "
            f"steps and processes find the machine code on disk. To compile in advance: python -m fpsim warm",
            file=sys.stderr,
            flush=True,
        )


@contextmanager
def announced(name: str) -> Iterator[None]:
    """Announce that this process compiles a loop, or waits for another process that does.

    Once a process has spent a second in such blocks, it writes a line on stderr, one for all its loops. Workers write
    none.
    """
    global _waited
    if _is_said or _is_one_of_many():
        yield
        return
    # A thread of its own, for this one is busy. Numba is Python, and LLVM is called without the interpreter's lock.
    timer = Timer(max(0.0, AFTER - _waited), _say, (name,))
    timer.daemon = True
    begin = time.monotonic()
    with suppress(RuntimeError):  # the interpreter ends, or the system gives no thread: then without the line
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with _lock:
            _waited += time.monotonic() - begin
