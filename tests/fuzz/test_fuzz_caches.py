"""Files of compiled loops, damaged in any way: the loop is compiled again, computes the same, and mends its file."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from fuzzing import fuzz
from hypothesis import assume
from hypothesis import strategies as st

from fpsim.compiling.kept import read_whole
from fpsim.compiling.native import compiled_loop


@contextmanager
def cached_in(folder: Path) -> Iterator[None]:
    with mock.patch.dict(os.environ, NUMBA_CACHE_DIR=str(folder)):
        yield


def loop_in(folder: Path) -> Any:
    """The same loop as in another process: nothing of it is kept in memory."""
    with cached_in(folder):

        @compiled_loop(7)
        def loop(a, b):  # type: ignore[no-untyped-def]
            return a * 3 + b

        assert loop(0, 1) == 1  # it is loaded from there
        return loop


@cache
def whole() -> tuple[str, bytes]:
    """The file that the loop leaves: its path below the folder, and its bytes."""
    with tempfile.TemporaryDirectory() as name:
        assert loop_in(Path(name))(2, 3) == 9
        (file,) = (f for f in Path(name).rglob("*") if f.is_file())
        return str(file.relative_to(name)), file.read_bytes()


@st.composite
def damaged(draw: st.DrawFn) -> bytes | str:
    """The bytes of the file after some accident, or what else stands in its place."""
    content = whole()[1]
    kind = draw(st.sampled_from(["flipped", "cut", "zeroed", "grown", "junk", "pickle", "link", "nothing"]))
    if kind == "flipped":
        changed = bytearray(content)
        for bit in draw(st.lists(st.integers(0, 8 * len(content) - 1), min_size=1, max_size=4, unique=True)):
            changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)
    if kind == "cut":
        return content[: draw(st.integers(0, len(content) - 1))]
    if kind == "zeroed":  # as a file system leaves it after a power cut
        at = draw(st.integers(0, len(content) - 1))
        return content[:at] + bytes(len(content) - at)
    if kind == "grown":
        return content + draw(st.binary(min_size=1, max_size=100))
    if kind == "junk":
        return draw(st.binary(max_size=200))
    if kind == "pickle":  # of an object without the digest, as Numba writes it
        return content[32:]
    return kind


@fuzz(40, accident=damaged())
def test_fuzz_a_damaged_file_is_compiled_anew_and_mended(accident: bytes | str) -> None:
    path, content = whole()
    assume(accident != content)
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / path
        file.parent.mkdir(parents=True)
        if isinstance(accident, bytes):
            file.write_bytes(accident)
        elif accident == "link":
            file.symlink_to(Path(name) / "nowhere")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* is a link. Remove it", RuntimeWarning)  # once, of the first one
            loop = loop_in(Path(name))
        assert loop(2, 3) == 9
        assert loop.was_compiled
        assert read_whole(file) is not None
        again = loop_in(Path(name))
        assert again(4, 1) == 13
        assert not again.was_compiled
        assert [f for f in file.parent.iterdir() if f != file] == []
