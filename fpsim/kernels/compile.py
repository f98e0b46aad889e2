"""Numba's machinery: the cache of compiled loops on disk, and the way to numba-cuda."""

from __future__ import annotations

import glob
import hashlib
import os
import pickle
import types as types_module
import uuid
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.caching import FunctionCache
from numba.core.registry import cpu_target
from numba.core.serialize import dumps
from numba.extending import intrinsic

from fpsim import rounding, statistics
from fpsim.checks import pip_install

# Every file whose code or constants are compiled in.
SOURCES = (*sorted(Path(__file__).parent.glob("*.py")), Path(rounding.__file__), Path(statistics.__file__))


@cache
def _sources() -> bytes:
    return b"".join(path.read_bytes() for path in SOURCES)


class DiskCache(FunctionCache):
    """Numba's cache on disk, keyed by what is compiled in: its own key changes with every process for closures.

    Each key, signature, processor and state of the sources has a file of its own, which begins with its digest. What is
    torn, empty or changed is compiled anew and replaced: nobody runs machine code in which a bit has flipped. Numba's
    way, one index for all closures of a function, is written without a lock: two processes that compile at once could
    leave one rule's code under another's key.

    Raises OSError or RuntimeError where there is no place for files.
    """

    def __init__(self, function: Callable[..., None], key: tuple[int, ...]) -> None:
        super().__init__(function)
        machine = repr((numba.__version__, cpu_target.target_context.codegen().magic_tuple()))
        digest = hashlib.sha256(_sources() + machine.encode()).hexdigest()[:16]
        self._folder = Path(self._cache_path)
        self._name = "-".join((self._impl.filename_base, *map(str, key), digest))

    def _file_of(self, signature: Any) -> Path:
        return self._folder / f"{self._name}-{hashlib.sha256(str(signature).encode()).hexdigest()[:8]}.nbc"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        payload = read_whole(self._file_of(sig)) if self._enabled else None
        if payload is None:
            return None
        try:
            return self._impl.rebuild(target_context, pickle.loads(payload))
        except Exception:  # whole, and of libraries that have changed since: as good as none
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        if not self._enabled or not self._impl.check_cachable(data):
            return
        try:
            self._impl.locator.ensure_cache_path()
            write_whole(self._file_of(sig), dumps(self._impl.reduce(data)))
        except OSError as error:
            _warn_that_nothing_is_kept(error)

    def flush(self) -> None:
        for file in self._folder.glob(f"{glob.escape(self._name)}-*"):
            file.unlink(missing_ok=True)


def _digest(file: Path, payload: bytes) -> bytes:
    return hashlib.sha256(file.name.encode() + payload).digest()  # the name: a file is not to stand in for another


def write_whole(file: Path, payload: bytes) -> None:
    """Write a file that `read_whole` knows to be whole; others see all of it or nothing. Raises OSError."""
    temporary = file.with_name(f"{file.name}.{uuid.uuid4().hex[:16]}.tmp")
    try:
        temporary.write_bytes(_digest(file, payload) + payload)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def read_whole(file: Path) -> bytes | None:
    """What `write_whole` wrote under this name; None where there is nothing, or a single bit of it has changed."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    size = hashlib.sha256().digest_size
    digest, payload = content[:size], content[size:]
    return payload if digest == _digest(file, payload) else None


def source_digest(toolchain: str) -> str:
    """The name of a state of the sources, compiled by these tools."""
    return hashlib.sha256(_sources() + toolchain.encode()).hexdigest()[:16]


def kept_code(name: str, make: Callable[[], bytes]) -> bytes:
    """What is kept on disk under this name, beside the compiled loops. Where there is nothing whole, it is made."""
    try:
        cache = FunctionCache(kept_code)
    except (OSError, RuntimeError) as error:  # Numba's error where no folder can be written is a RuntimeError
        _warn_that_nothing_is_kept(error)
        return make()
    file = Path(cache._cache_path) / name
    code = read_whole(file)
    if code is None:
        code = make()
        try:
            cache._impl.locator.ensure_cache_path()
            write_whole(file, code)
        except OSError as error:
            _warn_that_nothing_is_kept(error)
    return code


_is_warned = False


def _warn_that_nothing_is_kept(error: Exception) -> None:
    global _is_warned
    if not _is_warned:  # once for all loops
        _is_warned = True
        warnings.warn(
            f"Compiled loops cannot be kept on disk ({error}): each process will compile its own, which takes seconds. "
            f"Set NUMBA_CACHE_DIR to a folder that can be written.",
            RuntimeWarning,
            stacklevel=2,
        )


def compiled_loop(
    *key: int, fastmath: Any = False, error_model: str = "python"
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a loop of the CPU, which holds no lock while it runs, and keep its code on disk if that can be done.

    key: what tells it apart from the other closures of the same source.
    error_model: "numpy" divides by zero as IEEE 754 says; "python" branches, to raise an error.
    """

    def compile_loop(function: Callable[..., Any]) -> Callable[..., Any]:
        loop = njit(nogil=True, fastmath=fastmath, error_model=error_model)(function)
        try:
            loop._cache = DiskCache(loop.py_func, key)
        except (OSError, RuntimeError) as error:  # Numba's error where no folder can be written is a RuntimeError
            _warn_that_nothing_is_kept(error)
        return loop  # type: ignore[no-any-return]

    return compile_loop


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.uintp), generate


@intrinsic
def float64_bits(typingctx: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.int64(types.float64), generate


@intrinsic
def float64_of_bits(typingctx: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.uint64), generate


def _bitcast(source: Any, target: Any, kind: Any) -> Any:
    def bitcast(typingctx: Any, x: Any) -> Any:
        if x != source:
            return None

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], kind)

        return target(source), generate

    return intrinsic(bitcast)


_to_bits = _bitcast(types.float32, types.uint32, ir.IntType(32))
_to_float = _bitcast(types.uint32, types.float32, ir.FloatType())


@njit(inline="always")
def float32_bits(x):  # type: ignore[no-untyped-def]
    return _to_bits(np.float32(x))


@njit(inline="always")
def float32_of(bits):  # type: ignore[no-untyped-def]
    return _to_float(np.uint32(bits))


def integers(width: int) -> tuple[Any, Any]:
    return (np.uint32, np.int32) if width == 32 else (np.uint64, np.int64)


CUDA_THREADS = 256  # in a block


@cache
def cuda_module() -> Any:
    """numba-cuda's module. Raises RuntimeError, with what to install, where it is missing."""
    try:
        import numba_cuda  # noqa: F401  numba's own target is deprecated; importing this replaces it
        from numba import cuda
    except ImportError:
        raise RuntimeError(
            "A CUDA tensor came, and numba-cuda is not installed. Its kernels round on the GPU: "
            f"{pip_install('cuda12', 'cuda13')}, whichever CUDA your torch was built for; "
            "or move the tensor to the CPU with .cpu()."
        ) from None
    # a small tensor makes a small grid, and its owner cannot help it
    warnings.filterwarnings("ignore", message=r"Grid size \d+ will likely result in GPU under-utilization")
    return cuda


def for_device(function: types_module.FunctionType) -> types_module.FunctionType:
    """A copy of a Python function in which those that it calls, compiled for the CPU or not, are inlined."""

    def of(value: Any) -> Any:
        called = getattr(value, "py_func", value)
        return njit(inline="always")(for_device(called)) if isinstance(called, types_module.FunctionType) else value

    code = function.__code__
    used = {name: of(value) for name, value in function.__globals__.items() if name in code.co_names}
    cells = tuple(types_module.CellType(of(cell.cell_contents)) for cell in function.__closure__ or ())
    inside = {**function.__globals__, **used}
    return types_module.FunctionType(code, inside, function.__name__, function.__defaults__, cells)
