"""The loops that a wheel brings as LLVM's instructions, so that a first call waits for LLVM alone.

Numba takes seconds to read a loop's Python, and LLVM a fraction of one to make machine code of what it read. These
instructions name no processor: the machine code is that of the processor that runs, as after Numba. `.ci/loops` writes
the file; a checkout has none and compiles.
"""

from __future__ import annotations

import json
import os
import stat
import zipfile
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from llvmlite import binding

from fpsim.compiling.sources import digest_of_imported

MAX_BYTES = 1 << 24  # of a loop's instructions; the longest have a tenth of it
FILE = Path(__file__).with_name("loops.zip")
_ABOUT, _SUFFIX = "about.json", ".ll"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def _about() -> dict[str, str]:
    """Of which sources instructions are, and where they can run: LLVM changes their syntax with its major versions."""
    major, *_ = binding.llvm_version_info
    return {"sources": digest_of_imported().hex(), "llvm": str(major), "system": binding.get_process_triple()}


def write_shipped(file: Path, texts: Mapping[str, str]) -> None:
    """Write the instructions of loops by name. The same loops give the same bytes."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in [(_ABOUT, json.dumps(_about(), indent=1)), *sorted(texts.items())]:
            entry = zipfile.ZipInfo(name if name == _ABOUT else name + _SUFFIX)  # of 1980, whatever the time
            archive.writestr(entry, text, zipfile.ZIP_DEFLATED, compresslevel=9)


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    """An entry. Raises ValueError for a larger one than a loop is: two megabytes may unpack to two gigabytes."""
    if archive.getinfo(name).file_size > MAX_BYTES:
        raise ValueError(f"{name} unpacks to more than {MAX_BYTES} bytes")
    return archive.read(name)  # no more than the size that was asked


@cache
def _opened(file: Path) -> zipfile.ZipFile | None:
    """The file, if it is as trustworthy as the code that reads it, and of this version, system and LLVM."""
    try:
        mine, theirs = os.stat(__file__), os.lstat(file)
        if not stat.S_ISREG(theirs.st_mode) or theirs.st_uid != mine.st_uid:
            return None
        if theirs.st_mode & _OTHERS_WRITE & ~mine.st_mode:
            return None
        archive = zipfile.ZipFile(file)
        return archive if json.loads(_read(archive, _ABOUT)) == _about() else None
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        return None


def is_there() -> bool:
    """Whether this installation has loops that it can take."""
    return _opened(FILE) is not None


def shipped_text(name: str) -> str | None:
    """The instructions of a loop; None where this installation has none that are whole."""
    archive = _opened(FILE)
    try:
        return None if archive is None else _read(archive, name + _SUFFIX).decode()
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, zlib.error):
        return None
