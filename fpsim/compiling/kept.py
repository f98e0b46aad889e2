"""Cache of machine code on disk: its folder, file names and locks, and the checks of ownership and integrity.

A process that compiles for longer than a second writes one line on stderr, so that a first call does not look hung.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import stat
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Lock, Timer

from fpsim.compiling.sources import digest_of_imported, have_changed

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None  # type: ignore[assignment]

MAX_BYTES = 1 << 26  # of a file; the largest kernels take a few hundred thousand
# Seconds that a process waits for another one that compiles the same loop; the largest loop alone takes 6 seconds.
LONGEST_WAIT, BETWEEN_TRIES = 60.0, 0.02
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# Both are absent on Windows. O_NONBLOCK: opening a pipe must not wait for its writer.
_NO_LINK, _NO_WAIT = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_NONBLOCK", 0)
_BINARY = getattr(os, "O_BINARY", 0)  # on Windows alone


class UntrustedError(Exception):
    """Raised for machine code that another user may have written. The message gives the reason and a remedy."""


@cache
def source_digest(toolchain: str) -> str:
    """Return a digest of the sources that this process imported and of the tools that compile them."""
    return hashlib.sha256(digest_of_imported() + toolchain.encode()).hexdigest()[:16]


def _digest(file: Path, payload: bytes) -> bytes:
    # The digest includes the file's name, so that no file can be copied over another.
    return hashlib.sha256(file.name.encode() + payload).digest()


def write_whole(file: Path, payload: bytes) -> None:
    """Write a file whose integrity `read_whole` checks; other processes see all of it or nothing. Raises OSError."""
    # A temporary file is written and renamed: a reader never sees a part, even if this process is killed.
    temporary = file.with_name(f"{file.name}.{uuid.uuid4().hex[:16]}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o600)
        with open(descriptor, "wb") as target:
            target.write(_digest(file, payload) + payload)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def read_whole(file: Path) -> bytes | None:
    """Return the bytes that `write_whole` wrote under this name; None if there are none, or if a bit has changed.

    Raises UntrustedError if another user may have written the file, and if it is not a regular file.
    """
    try:
        # The folder is checked too: a user who can write to it can replace the file.
        _require_trusted(file.parent, os.stat(file.parent))
        descriptor = os.open(file, os.O_RDONLY | _BINARY | _NO_LINK | _NO_WAIT)
    except OSError:
        if file.is_symlink():
            raise UntrustedError(f"{file} is a link. Remove it: rm {file}") from None
        return None
    with open(descriptor, "rb") as source:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
            raise UntrustedError(f"{file} is not a regular file of at most {MAX_BYTES} bytes. Remove it: rm -r {file}")
        _require_trusted(file, found)
        content = source.read(MAX_BYTES)
    size = hashlib.sha256().digest_size
    digest, payload = content[:size], content[size:]
    return payload if digest == _digest(file, payload) else None


def _require_trusted(path: Path, found: os.stat_result) -> None:
    """Raise UntrustedError if a user other than this one and root may have written a file or folder."""
    if not hasattr(os, "geteuid"):  # Windows: the mode says nothing there
        return
    user = os.geteuid()
    if found.st_uid not in (user, 0):
        raise UntrustedError(
            f"{path} belongs to user {found.st_uid}, and this process runs as user {user}. "
            "Set NUMBA_CACHE_DIR to a folder of your own"
        )
    if found.st_mode & OTHERS_WRITE:
        mode = stat.S_IMODE(found.st_mode)
        raise UntrustedError(f"{path} can be written by other users (mode {mode:o}). Type: chmod go-w {path}")


@cache
def _folder_of(chosen: str) -> Path:
    """Return the first cache folder that can be written. Raises OSError if none can be."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    folders = [Path(chosen, "fpsim")] if chosen else []
    error: OSError | None = None
    # Not in __pycache__ itself, which Python makes with the permissions that the umask leaves: others may write to it.
    for folder in (*folders, Path(__file__).parent / "__pycache__" / "fpsim", caches / "fpsim"):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as reason:
            error = error or reason
            continue
        if os.access(folder, os.W_OK):
            return folder
        error = error or PermissionError(f"{folder} cannot be written")
    raise error or AssertionError("there is a folder to try")


def folder_of_code() -> Path:
    """Return the cache folder: in NUMBA_CACHE_DIR, beside the sources, or in the user's cache. Raises OSError."""
    return _folder_of(os.environ.get("NUMBA_CACHE_DIR", ""))


def read_kept(name: str) -> bytes | None:
    """Return the code cached under this name, if it is whole and trusted; else None."""
    try:
        return read_whole(folder_of_code() / name)
    except OSError:
        return None
    except UntrustedError as error:
        _warn_once(f"Machine code on disk is not loaded, and compiled again: {error}.")
        return None


def keep(name: str, code: bytes) -> None:
    """Cache code on disk under this name, if that is possible and the imported sources are still the same."""
    # This process may have imported some files before an update and others after it.
    if have_changed():
        return
    try:
        folder = folder_of_code()
        _require_trusted(folder, folder.stat())
        write_whole(folder / name, code)
    except UntrustedError as error:
        _warn_once(f"Machine code on disk is not loaded, and compiled again: {error}.")
    except OSError as error:
        _warn_once(
            f"Compiled loops cannot be kept on disk ({error}): each process will compile its own, which takes seconds. "
            f"Set NUMBA_CACHE_DIR to a folder that can be written."
        )


@contextmanager
def one_process_for(name: str) -> Iterator[None]:
    """Keep other processes from making the same code inside of the block; announce a long compilation or wait.

    Without locks, or if another process takes longer than LONGEST_WAIT, several processes make the same code. This
    costs only time, because each file is replaced as a whole.
    """
    with announced(name.partition("-")[0]), _locked(name):
        yield


@contextmanager
def _locked(name: str) -> Iterator[None]:
    descriptor = -1
    try:
        if fcntl is not None:
            lock = folder_of_code() / f"{name}.lock"
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | _NO_LINK | _NO_WAIT, 0o600)
            _try_to_lock(descriptor)
    except OSError:
        # Not an error here: `keep` will warn that the folder cannot be written.
        pass
    try:
        yield
    finally:
        if descriptor >= 0:
            # A process that waits for this lock will find the code; a later process creates a new lock file.
            with suppress(OSError):
                lock.unlink(missing_ok=True)
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked process may hold the descriptor too
            os.close(descriptor)


def _try_to_lock(descriptor: int) -> None:
    end = time.monotonic() + LONGEST_WAIT
    # The lock is polled: a blocking flock has no timeout, and a process that hangs must not hang all others.
    while time.monotonic() < end:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(BETWEEN_TRIES)


def kept_code(name: str, make: Callable[[], bytes]) -> bytes:
    """Return the code cached under this name, or make and cache it."""
    code = read_kept(name)
    if code is None:
        with one_process_for(name):
            # Another process may have made the code while this one waited for the lock.
            code = read_kept(name)
            if code is None:
                code = make()
                keep(name, code)
    return code


AFTER = 1.0  # seconds without machine code, after which the line on stderr is written
_RANKS = "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"  # set by launchers of many processes

_lock = Lock()
_waited = 0.0  # seconds, of all loops so far: a step needs several, each of which may take less than a second
_is_said = False


@contextmanager
def announced(name: str) -> Iterator[None]:
    """Announce that this process compiles a loop, or waits for another process that does.

    Once a process has spent a second in such blocks, it writes one line on stderr for all its loops. Workers write
    none.
    """
    global _waited
    if _is_said or _is_one_of_many():
        yield
        return
    # A second thread prints the line while this one compiles: Numba is Python, and LLVM is called without the GIL.
    timer = Timer(max(0.0, AFTER - _waited), _say, (name,))
    timer.daemon = True
    begin = time.monotonic()
    # There is no line if the interpreter shuts down, or if the system starts no thread.
    with suppress(RuntimeError):
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with _lock:
            _waited += time.monotonic() - begin


def silence() -> None:
    """Suppress the line in this process, which shows the progress of compilation in another way."""
    global _is_said
    _is_said = True


def _is_one_of_many() -> bool:
    """True if another process writes the line: the parent of this one, or the first rank."""
    return multiprocessing.parent_process() is not None or any(os.environ.get(name, "0") != "0" for name in _RANKS)


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


_warned: set[str] = set()


def _warn_once(text: str) -> None:
    """Warn once for all loops of a process, not once for each loop."""
    # Texts are distinguished by their beginnings: the rest names a file or an error, which differs from loop to loop.
    kind = text[:20]
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(text, RuntimeWarning, stacklevel=2)
