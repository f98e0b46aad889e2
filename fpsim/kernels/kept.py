"""Machine code that is kept on disk: where, under which name, and whether it is whole."""

from __future__ import annotations

import hashlib
import os
import uuid
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

from fpsim import deferred, rounding, statistics

# Every file whose code or constants are compiled in.
SOURCES = (
    *sorted(Path(__file__).parent.glob("*.py")),
    *(Path(module.__file__ or "") for module in (deferred, rounding, statistics)),
)


@cache
def source_digest(toolchain: str) -> str:
    """The name of a state of the sources, compiled by these tools."""
    sources = b"".join(path.read_bytes() for path in SOURCES)
    return hashlib.sha256(sources + toolchain.encode()).hexdigest()[:16]


def _digest(file: Path, payload: bytes) -> bytes:
    return hashlib.sha256(file.name.encode() + payload).digest()  # the name: a file is not to stand in for another


def write_whole(file: Path, payload: bytes) -> None:
    """Write a file that `read_whole` knows to be whole; others see all of it or nothing. Raises OSError."""
    temporary = file.with_name(f"{file.name}.{uuid.uuid4().hex[:16]}.tmp")
    try:
        temporary.write_bytes(_digest(file, payload) + payload)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def read_whole(file: Path) -> bytes | None:
    """What `write_whole` wrote under this name; None where there is nothing, or a single bit of it has changed."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    size = hashlib.sha256().digest_size
    digest, payload = content[:size], content[size:]
    return payload if digest == _digest(file, payload) else None


@cache
def _folder_of(chosen: str) -> Path:
    """The first of the folders for machine code that can be written. Raises OSError where none can be."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    folders = [Path(chosen, "fpsim")] if chosen else []
    error: OSError | None = None
    for folder in (*folders, Path(__file__).parent / "__pycache__", caches / "fpsim"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as reason:
            error = error or reason
            continue
        if os.access(folder, os.W_OK):
            return folder
        error = error or PermissionError(f"{folder} cannot be written")
    raise error or AssertionError("there is a folder to try")


def folder_of_code() -> Path:
    """Where machine code is kept: in NUMBA_CACHE_DIR, beside the sources, or in the user's cache. Raises OSError."""
    return _folder_of(os.environ.get("NUMBA_CACHE_DIR", ""))


def read_kept(name: str) -> bytes | None:
    """What is kept under this name; None where there is nothing whole."""
    try:
        return read_whole(folder_of_code() / name)
    except OSError:
        return None


def keep(name: str, code: bytes) -> None:
    """Keep code on disk under this name, if that can be done."""
    try:
        write_whole(folder_of_code() / name, code)
    except OSError as error:
        _warn_that_nothing_is_kept(error)


def kept_code(name: str, make: Callable[[], bytes]) -> bytes:
    """What is kept on disk under this name. Where there is nothing whole, it is made."""
    code = read_kept(name)
    if code is None:
        code = make()
        keep(name, code)
    return code


_is_warned = False


def _warn_that_nothing_is_kept(error: Exception) -> None:
    global _is_warned
    if not _is_warned:  # once for all loops
        _is_warned = True
        warnings.warn(
            f"Compiled loops cannot be kept on disk ({error}): each process will compile its own, which takes seconds. "
            f"Set NUMBA_CACHE_DIR to a folder that can be written.",
            RuntimeWarning,
            stacklevel=2,
        )
