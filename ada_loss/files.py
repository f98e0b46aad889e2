"""Files that are written whole or not at all, and the forms that rows take in them and in a DataFrame."""

from __future__ import annotations

import csv
import io
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fpsim.checks import pip_install, shown

__all__ = ["content_of", "csv_bytes", "data_frame", "folder_at", "mapping_in", "strict_json", "write_atomically"]


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file beside the target and rename it, so that a reader finds the old file or the whole new one.

    path: the target. Folders that are missing are made.
    content: the bytes of the new file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or a crash of the machine could leave the new name on an empty file
        os.replace(temporary, path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make a new name in a folder survive a crash, where the system can."""
    try:
        opened = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folder
        return
    try:
        os.fsync(opened)
    except OSError:  # some network file systems cannot
        return
    finally:
        os.close(opened)


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
        raise ImportError(f"A DataFrame needs pandas: {pip_install('lab')}. Or take the rows as they are.") from None
    return pandas.DataFrame(rows, columns=None if columns is None else list(columns))


def strict_json(content: Any) -> str:
    """The content as JSON, with null for inf and NaN, which JSON does not have.

    >>> strict_json({"sqnr": [1.5, float("-inf"), float("nan")]})
    '{"sqnr": [1.5, null, null]}'
    """
    return json.dumps(json.loads(json.dumps(content), parse_constant=lambda _: None))


def content_of(path: Path) -> bytes:
    """The bytes of a file in a folder that came from someone else.

    Raises OSError for one that cannot be opened, ValueError for a pipe or a device, which might never end.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError(f"{path} is not a regular file")
        return file.read()


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
        raise ValueError(f"out={shown(out)} is not a folder. Expected: the path of a folder, such as 'runs/sweep'.")
    return Path(out)
