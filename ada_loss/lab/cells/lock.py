"""The lock of a sweep's folder: one driver at a time, and whether there is one."""

from __future__ import annotations

import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # there is none on Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["is_driven", "lock_path"]


def lock_path(out: Path) -> Path:
    """The file that the driver of a folder locks. The system releases it when the process dies, however it dies."""
    return out / "ledger.lock"


def is_driven(out: Path) -> bool:
    """Whether a driver runs in a folder, on this machine; nothing in the folder changes. True where it cannot be told.

    >>> is_driven(Path("nowhere"))
    False
    """
    try:
        file = os.open(lock_path(out), os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for a moment: a driver that starts tries for longer
            return False
    except OSError:
        pass
    finally:
        os.close(file)
    return True
