"""The lock of a sweep's folder: one driver at a time, and whether there is one."""

from __future__ import annotations

import os
from pathlib import Path

from ada_loss.files import NO_LINK, NO_WAIT, require_own_file

try:
    import fcntl
except ImportError:  # there is none on Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["is_driven", "lock_path", "require_lockable"]


def lock_path(out: Path) -> Path:
    """The file that the driver of a folder locks. The system releases it when the process dies, however it dies."""
    return out / "ledger.lock"


def require_lockable(out: Path) -> None:
    """Raise ChangedFolder where something else than a file is in the place of the lock, such as a pipe or a link."""
    require_own_file(lock_path(out))


def is_driven(out: Path) -> bool:
    """Whether a driver runs in a folder, on this machine; nothing in the folder changes. True where it cannot be told.

    >>> is_driven(Path("nowhere"))
    False
    """
    path = lock_path(out)
    if not path.is_file() or path.is_symlink():  # no driver locks what is not a file; a pipe would be waited for
        return False
    try:
        file = os.open(path, os.O_RDONLY | NO_LINK | NO_WAIT)
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
