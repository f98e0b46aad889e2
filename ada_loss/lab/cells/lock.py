"""Lock of a sweep's folder, for one driver at a time."""

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
    """The file that a folder's driver locks. The system releases it whenever the process dies."""
    return out / "ledger.lock"


def require_lockable(out: Path) -> None:
    """Raise ChangedFolder if the lock is not a file, but a pipe or a link, for example."""
    require_own_file(lock_path(out))


def is_driven(out: Path) -> bool:
    """True if a driver on this machine runs in a folder, or if that is unknown. The folder does not change.

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
