"""Files that are written whole or not at all, and the forms that rows take in them and in a DataFrame."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fpsim.checks import pip_install

__all__ = ["csv_bytes", "data_frame", "strict_json", "write_atomically"]


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file beside the target and rename it, so that a reader finds the old file or the whole new one.

    path: the target. Folders that are missing are made.
    content: the bytes of the new file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
