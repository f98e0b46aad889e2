"""Atomic writes of files, safe reads of foreign ones, and rows as CSV, JSON and DataFrame."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = [
    "ChangedFolder",
    "append_to",
    "content_of",
    "csv_bytes",
    "data_frame",
    "folder_at",
    "is_leftover",
    "mapping_in",
    "opened",
    "remove_from",
    "require_own",
    "require_own_file",
    "strict_json",
    "write_atomically",
]

MOST_BYTES = 1 << 25  # the largest file with names, reasons or the like: 300 bytes for each of 100,000 cells
LONGEST_NAME = 40  # letters of the target's name in the temporary file's name; file systems allow 255 bytes
# Both flags are absent on Windows, where O_EXCL alone refuses a link. With O_NONBLOCK, opening a pipe does not wait for
# its other end.
NO_LINK, NO_WAIT = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_NONBLOCK", 0)
BINARY = getattr(os, "O_BINARY", 0)  # exists only on Windows
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK | BINARY


def write_atomically(path: Path, content: bytes, *, is_kept: bool = True, is_own: bool = False) -> None:
    """Write a temporary file and rename it, so that a reader finds either the old file or the whole new file.

    No other file is changed: a link at the target is replaced, and the file that it points to stays.

    path: the target. Missing folders are created.
    content: the bytes of the new file.
    is_kept: whether the new file has to survive a crash of the machine. False is faster.
    is_own: whether a sweep creates the file's folder. Such a folder must not be a link: ChangedFolder is raised for a
        link.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name is random and the file must be new; otherwise a planted link could redirect the write.
    with _held(path.parent, is_own) as (folder, at):
        temporary, target = at(f".{path.name[:LONGEST_NAME]}.{secrets.token_hex(8)}.tmp"), at(path.name)
        try:
            with open(os.open(temporary, NEW, 0o666, dir_fd=folder), "wb") as file:
                file.write(content)
                file.flush()
                if is_kept:
                    os.fsync(file.fileno())  # otherwise an empty file could have the new name after a crash
            os.replace(temporary, target, src_dir_fd=folder, dst_dir_fd=folder)
            # The new name is an entry of the folder, and the folder has to reach the disk too.
            if is_kept and folder is not None:
                with suppress(OSError):  # some network file systems cannot sync a folder
                    os.fsync(folder)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)


@contextmanager
def _held(folder: Path, is_own: bool) -> Iterator[tuple[int | None, Callable[[str], str]]]:
    """Hold a folder open and name files relative to it, so that nothing is written to a folder that replaces it.

    Yields a handle of the folder, and a function from a name to a path. Windows cannot open folders: there the handle
    is None, and the paths are complete.
    """
    # On Windows, where no folder is held open, this check is the only protection; elsewhere O_NOFOLLOW decides.
    if is_own:
        require_own(folder)
    if os.unlink not in os.supports_dir_fd:
        yield None, lambda name: str(folder / name)
        return
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | (NO_LINK if is_own else 0))
    except OSError:
        if is_own:
            require_own(folder)
        raise
    try:
        yield handle, lambda name: name
    finally:
        os.close(handle)


def append_to(path: Path, content: bytes) -> None:
    """Append to a file in a folder that a sweep creates; create the file if it is missing.

    Raises OSError for a link, ValueError for anything but a file.
    """
    with _held(path.parent, is_own=True) as (folder, at):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_LINK
        with _regular(path, os.open(at(path.name), flags | NO_WAIT | BINARY, 0o666, dir_fd=folder), "ab") as file:
            file.write(content)


def remove_from(folder: Path, is_left: Callable[[str], bool], *, is_own: bool = True) -> None:
    """Delete files of a folder by name, if the folder exists.

    is_own: as in `write_atomically`.
    """
    if not folder.is_dir():
        return
    with _held(folder, is_own) as (handle, at):
        for name in filter(is_left, os.listdir(folder if handle is None else handle)):
            with suppress(FileNotFoundError):
                os.unlink(at(name), dir_fd=handle)


def is_leftover(name: str) -> bool:
    """Return True for the name of a temporary file of `write_atomically`."""
    return re.fullmatch(r"\..+\.[0-9a-f]{16}\.tmp", name) is not None


class ChangedFolder(OSError):
    """Raised if a sweep's folder holds something that no sweep creates, or lacks something that its sweep created."""


def require_own(path: Path) -> None:
    """Raise ChangedFolder if a file or folder of a sweep is a link, because its content is then not the sweep's.

    On Windows a junction is a link, too.
    """
    if path.is_symlink() or getattr(path, "is_junction", bool)():
        raise ChangedFolder(
            f"{path} is a link, through which this would write and delete elsewhere. Remove it, or put what it leads "
            f"to in its place."
        )


def require_own_file(path: Path) -> None:
    """Raise ChangedFolder if a file of a sweep is a link, or anything else that is not a file.

    If a pipe had replaced the file, reading it would block.
    """
    require_own(path)
    if path.exists() and not path.is_file():
        raise ChangedFolder(f"{path} is not a file. Remove it: a sweep makes it again.")


def csv_bytes(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> bytes:
    """Return rows as the content of a CSV file.

    rows: dictionaries with a value for each column. Other keys are ignored.
    columns: the names of the columns, in order.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def data_frame(rows: Sequence[dict[str, Any]], columns: Sequence[str] | None = None) -> Any:
    """Return rows as a pandas.DataFrame. Raises ImportError without pandas.

    rows: dictionaries with a value for each column.
    columns: the names of the columns, in order; None for the keys of the rows.
    """
    try:
        import pandas
    except ImportError:
        from fpsim.checks import pip_install

        raise ImportError(f"A DataFrame needs pandas: {pip_install('lab')}. Or take the rows as they are.") from None
    return pandas.DataFrame(rows, columns=None if columns is None else list(columns))


def strict_json(content: Any) -> str:
    """Return the content as JSON, with null for inf and NaN, which JSON lacks.

    >>> strict_json({"sqnr": [1.5, float("-inf"), float("nan")]})
    '{"sqnr": [1.5, null, null]}'
    """
    return json.dumps(json.loads(json.dumps(content), parse_constant=lambda _: None))


def opened(path: Path) -> io.BufferedReader:
    """Open a file of an untrusted folder for reading.

    Raises OSError if it cannot be opened, ValueError for a pipe or a device, which might never end.
    """
    file: io.BufferedReader = _regular(path, os.open(path, os.O_RDONLY | NO_WAIT | BINARY), "rb")
    return file


def content_of(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the bytes of a file in an untrusted folder.

    most: the largest size.
    Raises OSError and ValueError as `opened` does, and ValueError for a larger file.
    """
    with opened(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has more than {most:,} bytes")
    return content


def _regular(path: Path, handle: int, mode: str) -> Any:
    # The handle is checked, not the path: the file could be replaced by a pipe between a check of the path and the
    # opening.
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError(f"{path} is not a regular file")
    return open(handle, mode)


def mapping_in(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file; {} if the file is missing, damaged or holds no mapping."""
    # Such files hold names and reasons, which only add words to results. Results are shown without these words too.
    try:
        content = json.loads(content_of(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def folder_at(out: object) -> Path:
    """Return the path of a folder. Raises ValueError for anything else.

    >>> folder_at("")
    Traceback (most recent call last):
    ValueError: out='' is not a folder. Expected: the path of a folder, such as 'runs/sweep'.
    """
    if not isinstance(out, str | os.PathLike) or not str(out).strip() or "\0" in str(out):
        from fpsim.checks import shown  # imported late, because it imports torch, and the ledger is read without torch

        raise ValueError(f"out={shown(out)} is not a folder. Expected: the path of a folder, such as 'runs/sweep'.")
    return Path(out)
