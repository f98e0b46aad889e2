"""Numba's machinery: the cache of compiled loops on disk, and the way to numba-cuda."""

from __future__ import annotations

import hashlib
import types as types_module
import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.registry import cpu_target
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

    Each key, processor and state of the sources has files of its own. Numba's way, one index for all closures of a
    function, is written without a lock: two processes that compile at once could leave one rule's code under another's
    key.
    """

    def __init__(self, function: Callable[..., None], key: tuple[int, ...]) -> None:
        super().__init__(function)
        machine = repr((numba.__version__, cpu_target.target_context.codegen().magic_tuple()))
        digest = hashlib.sha256(_sources() + machine.encode()).hexdigest()[:16]
        self._cache_file = IndexDataCacheFile(
            cache_path=self._cache_path,
            filename_base="-".join((self._impl.filename_base, *map(str, key), digest)),
            source_stamp=self._impl.locator.get_source_stamp(),
        )

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        return signature


def compiled_loop(
    *key: int, fastmath: Any = False, error_model: str = "python"
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a loop of the CPU, which holds no lock while it runs, and keep its code on disk.

    key: what tells it apart from the other closures of the same source.
    error_model: "numpy" divides by zero as IEEE 754 says; "python" branches, to raise an error.
    """

    def compile_loop(function: Callable[..., Any]) -> Callable[..., Any]:
        loop = njit(nogil=True, fastmath=fastmath, error_model=error_model)(function)
        loop._cache = DiskCache(loop.py_func, key)
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


@lru_cache(maxsize=64)
def cuda_stream(pointer: int) -> Any:
    """numba's face of a stream that torch owns."""
    return cuda_module().external_stream(pointer)


def cuda_array(tensor: Any) -> Any:
    """numba's face of a CUDA tensor, no copy and no synchronisation."""
    return cuda_module().as_cuda_array(tensor)


@cache
def cuda_scalar(function: types_module.FunctionType) -> Callable[..., None]:
    """A Python function over small arrays as a kernel of one thread: (stream, *arrays). Decisions stay on the card."""
    # the simulator runs Python over arrays of its own kind, which nothing compiled can take
    compiled = cuda_module().jit(function if numba.config.ENABLE_CUDASIM else for_device(function))

    def launch(stream: Any, *arrays: Any) -> None:
        compiled[1, 1, stream](*arrays)

    return launch


def for_device(function: types_module.FunctionType) -> types_module.FunctionType:
    """A copy of a Python function in which those that it calls are inlined."""

    def of(value: Any) -> Any:
        return njit(inline="always")(for_device(value)) if isinstance(value, types_module.FunctionType) else value

    code = function.__code__
    used = {name: of(value) for name, value in function.__globals__.items() if name in code.co_names}
    cells = tuple(types_module.CellType(of(cell.cell_contents)) for cell in function.__closure__ or ())
    inside = {**function.__globals__, **used}
    return types_module.FunctionType(code, inside, function.__name__, function.__defaults__, cells)
