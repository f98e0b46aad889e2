"""Files that are written whole or not at all, and the forms that rows take in them and in a DataFrame."""

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

MOST_BYTES = 1 << 25  # of a file with names, reasons or the like: 300 bytes for each of 100,000 cells
LONGEST_NAME = 40  # letters of a target's name in that of the file beside it: 255 bytes are possible
# Absent on Windows, whose O_EXCL refuses a link as well. O_NONBLOCK: opening a pipe must not wait for its other end.
NO_LINK, NO_WAIT = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_NONBLOCK", 0)
BINARY = getattr(os, "O_BINARY", 0)  # on Windows alone
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK | BINARY


def write_atomically(path: Path, content: bytes, *, is_kept: bool = True, is_own: bool = False) -> None:
    """Write a file beside the target and rename it, so that a reader finds the old file or the whole new one.

    Nothing else is written to: a link in the place of the target is replaced, and what it leads to stays. The file
    beside it has a random name and is made anew, or somebody who can guess the name would choose by a link what is
    overwritten.

    path: the target. Folders that are missing are made.
    content: the bytes of the new file.
    is_kept: whether the file has to survive a crash of the machine. False is quicker.
    is_own: whether its folder is one that a sweep makes, and so is no link; ChangedFolder is raised for one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _held(path.parent, is_own) as (folder, at):
        temporary, target = at(f".{path.name[:LONGEST_NAME]}.{secrets.token_hex(8)}.tmp"), at(path.name)
        try:
            with open(os.open(temporary, NEW, 0o666, dir_fd=folder), "wb") as file:
                file.write(content)
                file.flush()
                if is_kept:
                    os.fsync(file.fileno())  # or a crash of the machine could leave the new name on an empty file
            os.replace(temporary, target, src_dir_fd=folder, dst_dir_fd=folder)
            if is_kept and folder is not None:
                with suppress(OSError):  # some network file systems cannot
                    os.fsync(folder)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)


@contextmanager
def _held(folder: Path, is_own: bool) -> Iterator[tuple[int | None, Callable[[str], str]]]:
    """A folder, open, and how files in it are named: what takes its place meanwhile is not written to.

    On Windows, which opens no folder: None, and whole paths.
    """
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
    """Append to a file in a folder that a sweep makes; it is made where it is missing.

    Raises OSError for a link, ValueError for what is no file.
    """
    with _held(path.parent, is_own=True) as (folder, at):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_LINK
        with _regular(path, os.open(at(path.name), flags | NO_WAIT | BINARY, 0o666, dir_fd=folder), "ab") as file:
            file.write(content)


def remove_from(folder: Path, is_left: Callable[[str], bool], *, is_own: bool = True) -> None:
    """Delete files of a folder by their names, if there is such a folder.

    is_own: as in `write_atomically`.
    """
    if not folder.is_dir():
        return
    with _held(folder, is_own) as (handle, at):
        for name in filter(is_left, os.listdir(folder if handle is None else handle)):
            with suppress(FileNotFoundError):
                os.unlink(at(name), dir_fd=handle)


def is_leftover(name: str) -> bool:
    """Whether this is the name of a file that `write_atomically` has begun."""
    return re.fullmatch(r"\..+\.[0-9a-f]{16}\.tmp", name) is not None


class ChangedFolder(OSError):
    """In a folder that a sweep writes to is something that no sweep makes, or what it made is gone."""


def require_own(path: Path) -> None:
    """Raise ChangedFolder for a link in the place of a file or folder that a sweep makes: what is there is not its own.

    On Windows a junction is a link, too.
    """
    if path.is_symlink() or getattr(path, "is_junction", bool)():
        raise ChangedFolder(
            f"{path} is a link, through which this would write and delete elsewhere. Remove it, or put what it leads "
            f"to in its place."
        )


def require_own_file(path: Path) -> None:
    """Raise ChangedFolder where something else than a file is in the place of one that a sweep makes, or a link.

    A pipe there would be waited for.
    """
    require_own(path)
    if path.exists() and not path.is_file():
        raise ChangedFolder(f"{path} is not a file. Remove it: a sweep makes it again.")


def csv_bytes(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> bytes:
    """Rows as the content of a CSV file.

    rows: dictionaries of a value for each column. Values of other names are left out.
    columns: the names of the columns, in order.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def data_frame(rows: Sequence[dict[str, Any]], columns: Sequence[str] | None = None) -> Any:
    """Rows as a pandas.DataFrame. Raises ImportError without pandas.

    rows: dictionaries of a value for each column.
    columns: the names of the columns, in order; None for those of the rows.
    """
    try:
        import pandas
    except ImportError:
        from fpsim.checks import pip_install

        raise ImportError(f"A DataFrame needs pandas: {pip_install('lab')}. Or take the rows as they are.") from None
    return pandas.DataFrame(rows, columns=None if columns is None else list(columns))


def strict_json(content: Any) -> str:
    """The content as JSON, with null for inf and NaN, which JSON does not have.

    >>> strict_json({"sqnr": [1.5, float("-inf"), float("nan")]})
    '{"sqnr": [1.5, null, null]}'
    """
    return json.dumps(json.loads(json.dumps(content), parse_constant=lambda _: None))


def opened(path: Path) -> io.BufferedReader:
    """A file of a folder that came from someone else, opened for reading.

    Raises OSError for one that cannot be opened, ValueError for a pipe or a device, which might never end.
    """
    file: io.BufferedReader = _regular(path, os.open(path, os.O_RDONLY | NO_WAIT | BINARY), "rb")
    return file


def content_of(path: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a file in a folder that came from someone else.

    most: bytes that it may have.
    Raises OSError and ValueError as `opened` does, and ValueError for a larger one.
    """
    with opened(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has more than {most:,} bytes")
    return content


def _regular(path: Path, handle: int, mode: str) -> Any:
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError(f"{path} is not a regular file")
    return open(handle, mode)


def mapping_in(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file; {} for a file that is missing, damaged or holds something else."""
    try:
        content = json.loads(content_of(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def folder_at(out: object) -> Path:
    """The path of a folder. Raises ValueError for what is not one.

    >>> folder_at("")
    Traceback (most recent call last):
    ValueError: out='' is not a folder. Expected: the path of a folder, such as 'runs/sweep'.
    """
    if not isinstance(out, str | os.PathLike) or not str(out).strip() or "\0" in str(out):
        from fpsim.checks import shown  # it comes with torch, and the ledger is read without

        raise ValueError(f"out={shown(out)} is not a folder. Expected: the path of a folder, such as 'runs/sweep'.")
    return Path(out)
