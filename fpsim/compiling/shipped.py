"""Loops that a wheel ships as LLVM IR, so that a first call waits for LLVM alone.

Numba takes seconds to read a loop's Python, and LLVM a fraction of one to make machine code of what it read. The IR
names no processor: the machine code is that of the processor that runs, as after Numba. `.ci/loops` writes the file; a
checkout has none and compiles.
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
    """Describe the sources of the IR and where it can run: LLVM changes the syntax with its major versions."""
    major, *_ = binding.llvm_version_info
    return {"sources": digest_of_imported().hex(), "llvm": str(major), "system": binding.get_process_triple()}


def write_shipped(file: Path, texts: Mapping[str, str]) -> None:
    """Write the IR of loops by name. Equal loops make equal bytes."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in [(_ABOUT, json.dumps(_about(), indent=1)), *sorted(texts.items())]:
            entry = zipfile.ZipInfo(name if name == _ABOUT else name + _SUFFIX)  # of 1980, whatever the time
            archive.writestr(entry, text, zipfile.ZIP_DEFLATED, compresslevel=9)


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    """Read an entry. Raises ValueError if it is larger than any loop: two megabytes may unpack to two gigabytes."""
    if archive.getinfo(name).file_size > MAX_BYTES:
        raise ValueError(f"{name} unpacks to more than {MAX_BYTES} bytes")
    return archive.read(name)  # no more than the size that was asked


@cache
def _opened(file: Path) -> zipfile.ZipFile | None:
    """Open the file, if it is as trustworthy as the code that reads it, and of this version, system and LLVM."""
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
    """True if this installation ships loops that it can use."""
    return _opened(FILE) is not None


def shipped_text(name: str) -> str | None:
    """Return the IR of a loop; None if this installation has none that is whole."""
    archive = _opened(FILE)
    try:
        return None if archive is None else _read(archive, name + _SUFFIX).decode()
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, zlib.error):
        return None
