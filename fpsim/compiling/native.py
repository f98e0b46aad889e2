"""CPU loops as machine code: cached on disk, loaded by LLVM, called from Python. Only compiling a loop imports Numba.

A loop's code has an entry that Python calls like one of its own functions written in C, without a tuple of arguments or
a matching of types. A call through Numba's dispatcher takes four times as long.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import stat
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from importlib.metadata import version
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

import llvmlite
from llvmlite import binding

from fpsim.compiling.compile import ENTRY, FUNCTIONS, llvm_text, machine_code
from fpsim.compiling.kept import OTHERS_WRITE, keep, one_process_for, read_kept, source_digest
from fpsim.compiling.sources import digest_of_imported

# Environment variables, NUMBA_..., that Numba reads when it is imported and that change its machine code.
_SETTINGS = ("OPT", "CPU_NAME", "CPU_FEATURES", "ENABLE_AVX", "LOOP_VECTORIZE", "SLP_VECTORIZE", "DISABLE_INTEL_SVML")

# Loops that a wheel ships as LLVM IR, so that a first call waits for LLVM alone: Numba takes seconds to read a loop's
# Python, and LLVM a fraction of one to compile the IR. The IR names no processor: LLVM makes code for the processor
# that it runs on, as it does for IR from Numba. `.ci/loops` writes the file; a checkout has none and compiles.
SHIPPED = Path(__file__).with_name("loops.zip")
MAX_BYTES = 1 << 24  # of a loop's IR; the longest takes a tenth of that
_ABOUT, _SUFFIX = "about.json", ".ll"


@cache
def _toolchain() -> str:
    """Describe all that the machine code depends on in addition to the sources."""
    settings = [os.environ.get(f"NUMBA_{name}") for name in _SETTINGS]
    cpu = binding.get_process_triple(), binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    return repr((sys.implementation.cache_tag, version("numba"), llvmlite.__version__, cpu, settings))


class _MethodDefinition(ctypes.Structure):
    """Python's PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("documentation", ctypes.c_char_p),
    )


_METH_FASTCALL = 0x80
_numbers, _lock = count(), Lock()
# Loops are never unloaded: a thread may be running a loop when the interpreter ends.
_loaded: list[Any] = []


@cache
def _jit() -> Any:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.create_lljit_compiler(suppress_errors=True)


def loaded(code: bytes) -> Callable[..., Any]:
    """Link object code into this process and return its function. Raises RuntimeError if it cannot be linked here."""
    library = binding.JITLibraryBuilder().add_object_img(code).export_symbol(ENTRY).add_current_process()
    for name in FUNCTIONS:
        address = ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value
        library.import_symbol(name, address)
    with _lock:
        tracker = library.link(_jit(), f"fpsim-{next(_numbers)}")
    # The function is a builtin: METH_FASTCALL passes the arguments as a C array, and `self` is the class of the error
    # that the entry raises.
    definition = _MethodDefinition(b"loop", tracker[ENTRY], _METH_FASTCALL, None)
    _loaded.append((tracker, definition))
    kinds = ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p
    make = ctypes.PYFUNCTYPE(*kinds)(("PyCFunction_NewEx", ctypes.pythonapi))
    return make(ctypes.addressof(definition), RuntimeError, None)  # type: ignore[no-any-return]


class Loop:
    """A CPU loop that Python calls. It takes integers and, where annotated, floats; it returns a number, 0 for None.

    function: the source, which Numba compiles if the machine code is not on disk.
    key: distinguishes the loop from other closures of the same source.
    name: the name of the loop's code, on disk and in a wheel.
    was_compiled: whether this process had to compile it; None before its first call.
    """

    def __init__(self, function: Callable[..., Any], key: tuple[int, ...], **options: Any) -> None:
        self.py_func, self._options = function, options
        self.was_compiled: bool | None = None
        place = f"{function.__module__}.{function.__qualname__}:{function.__code__.co_firstlineno}"
        names = function.__module__.rpartition(".")[2], function.__qualname__.partition(".")[0], *map(int, key)
        self.name = "-".join((*map(str, names), hashlib.sha256(place.encode()).hexdigest()[:8]))

    @cached_property
    def file_name(self) -> str:
        """Name of the loop's machine code in the cache."""
        return f"{self.name}-{source_digest(_toolchain())}.o"

    @cached_property
    def native(self) -> Callable[..., Any]:
        """The compiled function itself, for calls without the overhead of this object."""
        function = self._from_disk()
        if function is None:
            with one_process_for(self.file_name):
                function = self._from_disk() or self._compiled()
        return function

    def _from_disk(self) -> Callable[..., Any] | None:
        code = read_kept(self.file_name)
        if code is None:
            return None
        try:
            function = loaded(code)
        # The file is whole, but was linked for libraries that this process lacks: compile again.
        except RuntimeError:
            return None
        self.was_compiled = False
        return function

    def _compiled(self) -> Callable[..., Any]:
        code = machine_code(shipped_text(self.name) or llvm_text(self.py_func, **self._options))
        function, self.was_compiled = loaded(code), True
        keep(self.file_name, code)
        return function

    def __call__(self, *arguments: float) -> Any:
        return self.native(*arguments)


def compiled_loop(*key: int, fastmath: Any = False, error_model: str = "python") -> Callable[..., Loop]:
    """Return a decorator that makes a Loop, which runs without the GIL, and is cached on disk if that is possible.

    key: distinguishes the loop from other closures of the same source.
    error_model: "numpy" divides by zero as IEEE 754 says; "python" branches, to raise an error.
    """
    return lambda function: Loop(function, key, fastmath=fastmath, error_model=error_model)


def _about() -> dict[str, str]:
    """Describe the sources of the IR and where it can run: LLVM changes the syntax with its major versions."""
    major, *_ = binding.llvm_version_info
    return {"sources": digest_of_imported().hex(), "llvm": str(major), "system": binding.get_process_triple()}


def write_shipped(file: Path, texts: Mapping[str, str]) -> None:
    """Write the IR of loops by name. Equal loops make equal bytes."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in [(_ABOUT, json.dumps(_about(), indent=1)), *sorted(texts.items())]:
            # ZipInfo without a date has one of 1980. With the time of writing, equal loops would make different bytes.
            entry = zipfile.ZipInfo(name if name == _ABOUT else name + _SUFFIX)
            archive.writestr(entry, text, zipfile.ZIP_DEFLATED, compresslevel=9)


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    """Read an entry. Raises ValueError if it is larger than any loop, as two megabytes may unpack to two gigabytes."""
    if archive.getinfo(name).file_size > MAX_BYTES:
        raise ValueError(f"{name} unpacks to more than {MAX_BYTES} bytes")
    return archive.read(name)  # no more than the size that was checked


@cache
def _opened(file: Path) -> zipfile.ZipFile | None:
    """Open the file; None unless it is as trustworthy as this code, and made for this version, system and LLVM."""
    try:
        # Owner and mode are compared with those of this source file: who can write the IR can then change this code.
        mine, theirs = os.stat(__file__), os.lstat(file)
        if not stat.S_ISREG(theirs.st_mode) or theirs.st_uid != mine.st_uid:
            return None
        if theirs.st_mode & OTHERS_WRITE & ~mine.st_mode:
            return None
        archive = zipfile.ZipFile(file)
        return archive if json.loads(_read(archive, _ABOUT)) == _about() else None
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        return None


def ships_loops() -> bool:
    """True if this installation ships loops that it can use."""
    return _opened(SHIPPED) is not None


def shipped_text(name: str) -> str | None:
    """Return the IR of a loop; None if this installation has none that is whole."""
    archive = _opened(SHIPPED)
    try:
        return None if archive is None else _read(archive, name + _SUFFIX).decode()
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, zlib.error):
        return None
