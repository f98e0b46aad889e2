"""The loops of a wheel: taken where they are of this version and can be trusted, and compiled from Python elsewhere."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fpsim.compiling import native
from fpsim.compiling.compile import llvm_text
from fpsim.compiling.native import Loop, compiled_loop, shipped_text, write_shipped


def new_loop() -> Loop:
    @compiled_loop(7)
    def loop(x, y: float):  # type: ignore[no-untyped-def]
        return x * 2 + y

    return loop


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file with one loop, and nothing kept on disk."""
    loop, file = new_loop(), tmp_path / "loops.zip"
    write_shipped(file, {loop.name: llvm_text(loop.py_func, False, "python")})
    monkeypatch.setattr(native, "SHIPPED", file)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    native._opened.cache_clear()
    yield file
    native._opened.cache_clear()


def forbidden(*_: Any) -> str:
    raise AssertionError("the loop was read from Python")


def test_a_loop_of_the_wheel_is_not_read_from_python(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "llvm_text", forbidden)
    assert new_loop()(20, 1.5) == 41.5


def test_a_loop_that_the_wheel_does_not_have_is_compiled(archive: Path) -> None:
    @compiled_loop(8)
    def other(x):  # type: ignore[no-untyped-def]
        return x * 3

    assert shipped_text(other.name) is None
    assert other(14) == 42


def changed(file: Path, change: Callable[[dict[str, str]], None]) -> None:
    with zipfile.ZipFile(file) as source:
        entries = {name: source.read(name) for name in source.namelist()}
    about = json.loads(entries["about.json"])
    change(about)
    with zipfile.ZipFile(file, "w") as target:
        for name, content in (entries | {"about.json": json.dumps(about).encode()}).items():
            target.writestr(name, content)


@pytest.mark.parametrize("key", ["sources", "llvm", "system"])
def test_instructions_of_other_sources_another_llvm_or_system_are_not_taken(archive: Path, key: str) -> None:
    name = new_loop().name
    assert shipped_text(name) is not None
    changed(archive, lambda about: about.update({key: "another"}))
    native._opened.cache_clear()
    assert shipped_text(name) is None
    assert new_loop()(20, 1.5) == 41.5


def test_a_file_that_others_can_write_that_is_a_link_or_broken_is_not_taken(archive: Path, tmp_path: Path) -> None:
    name = new_loop().name

    def taken() -> bool:
        native._opened.cache_clear()
        return shipped_text(name) is not None

    assert taken()
    os.chmod(archive, 0o666)
    assert not taken()
    os.chmod(archive, 0o644)
    assert taken()
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    assert not taken()
    archive.unlink()
    assert not taken()
    (tmp_path / "elsewhere.zip").write_bytes(whole)
    archive.symlink_to(tmp_path / "elsewhere.zip")
    assert not taken()


def test_a_damaged_entry_is_as_good_as_none(archive: Path) -> None:
    content = bytearray(archive.read_bytes())
    with zipfile.ZipFile(archive) as opened:
        entry = next(entry for entry in opened.infolist() if entry.filename.endswith(".ll"))
    begin = entry.header_offset + 30 + len(entry.filename)
    content[begin + entry.compress_size // 2] ^= 0xFF
    archive.write_bytes(bytes(content))
    native._opened.cache_clear()
    assert shipped_text(new_loop().name) is None
    assert new_loop()(20, 1.5) == 41.5


def test_an_entry_that_unpacks_to_more_than_a_loop_is_as_good_as_none(tmp_path: Path) -> None:
    file = tmp_path / "loops.zip"
    write_shipped(file, {"loop": "x" * (native.MAX_BYTES + 1)})
    assert file.stat().st_size < native.MAX_BYTES // 100
    with zipfile.ZipFile(file) as opened, pytest.raises(ValueError, match="unpacks to more than"):
        native._read(opened, "loop.ll")


def test_the_same_loops_give_the_same_bytes(tmp_path: Path) -> None:
    texts = {"b": "two", "a": "one"}
    write_shipped(tmp_path / "1.zip", texts)
    write_shipped(tmp_path / "2.zip", dict(reversed(texts.items())))
    assert np.array_equal(*(np.frombuffer((tmp_path / f"{i}.zip").read_bytes(), np.uint8) for i in (1, 2)))
