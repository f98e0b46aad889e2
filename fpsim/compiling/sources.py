"""Digest of the sources of compiled code, read before the first of them is imported.

A running process keeps the functions that it has imported. An update may have changed the files since then, so a digest
of the files as they are now would be a wrong name for the code that this process compiles.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["SOURCES", "digest_of_imported", "have_changed"]

# Every file whose code or constants are compiled in, and the files that compile them.
SOURCES = tuple(
    path for room in ("compiling", "kernels") for path in sorted(Path(__file__).parents[1].joinpath(room).glob("*.py"))
)


def _digest() -> bytes:
    return hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).digest()


_IMPORTED = _digest()


def digest_of_imported() -> bytes:
    """Return the digest of the sources as they were when fpsim was imported."""
    return _IMPORTED


def have_changed() -> bool:
    """True if the files differ from those that were imported: a function may then come from either version."""
    try:
        return _digest() != _IMPORTED
    # A file is missing while an update runs.
    except OSError:
        return True
