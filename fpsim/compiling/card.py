"""CUDA kernels: Python functions are compiled to machine code, cached on disk, and launched by the driver.

numba-cuda writes PTX, nvJitLink assembles it for a compute capability, and cuLaunchKernel of cuda.bindings runs it.
numba-cuda's own launch makes an object for each array and matches the types of all arguments in every call.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import struct
import sys
import types as types_module
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from importlib.metadata import version
from itertools import islice
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fpsim.checks import pip_install
from fpsim.compiling.compile import CUDA_THREADS, cuda_module, for_device, ptx_code
from fpsim.compiling.kept import kept_code, source_digest

IS_SIMULATED = bool(numba.config.ENABLE_CUDASIM)  # fixed when Numba is imported
VECTOR_BYTES = 16  # the most that a thread loads at once

WORDS32, WORDS64 = types.CPointer(types.uint32), types.CPointer(types.uint64)
FLOATS32, FLOATS64 = types.CPointer(types.float32), types.CPointer(types.float64)
INTEGERS, INTEGER = types.CPointer(types.int64), types.int64

_INVALID_CONTEXT, _INVALID_HANDLE = 201, 400  # of CUresult


def _require(result: tuple[Any, ...]) -> Any:
    """Return the result of a driver function. Raises RuntimeError if the function failed."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"The CUDA driver returned {getattr(error, 'name', error)}.")
    return values[0] if values else None


@cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        # This raises the error that names the remedy, if numba-cuda is missing too.
        cuda_module()
        raise
    _require(driver.cuInit(0))
    return driver


@cache
def _context(device: int) -> Any:
    """Return the device's primary context, which torch uses too."""
    return _require(_driver().cuDevicePrimaryCtxRetain(_require(_driver().cuDeviceGet(device))))


def compute_capability(device: int) -> tuple[int, int]:
    attribute, handle = _driver().CUdevice_attribute, _require(_driver().cuDeviceGet(device))
    major = attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    minor = attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    get = _driver().cuDeviceGetAttribute
    return int(_require(get(major, handle))), int(_require(get(minor, handle)))


def assembled(ptx: str, capability: tuple[int, int]) -> bytes:
    """Assemble PTX to a cubin with nvJitLink; return the PTX itself if the card is newer than nvJitLink.

    Raises nvJitLink's error if it refuses the PTX; RuntimeError if the PTX is of a newer release of CUDA.
    """
    from cuda.bindings import nvjitlink

    options = [f"-arch=sm_{capability[0]}{capability[1]}", "-O3"]
    text = ptx.encode() + b"\0"
    try:
        link = nvjitlink.create(len(options), options)
    except nvjitlink.nvJitLinkError as error:
        if error.status not in (nvjitlink.Result.ERROR_UNRECOGNIZED_ARCH, nvjitlink.Result.ERROR_UNSUPPORTED_ARCH):
            raise
        # The card is newer than nvJitLink: the card's driver assembles the PTX instead.
        return text
    try:
        nvjitlink.add_data(link, nvjitlink.InputType.PTX, text, len(text), "kernel")
        nvjitlink.complete(link)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(link))
        nvjitlink.get_linked_cubin(link, cubin)
        return bytes(cubin)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(link))
        nvjitlink.get_error_log(link, log)
        if found := re.search(rb"Unsupported \.version[^\n]*", log):
            raise RuntimeError(_too_new(found.group().decode())) from error
        raise
    finally:
        nvjitlink.destroy(link)


def _too_new(complaint: str) -> str:
    return (
        f"NVVM writes PTX that nvJitLink does not know: {complaint}. They are of two releases of CUDA. Expected: both "
        f"of one, as {pip_install('cuda12', 'cuda13')} installs, whichever CUDA your torch was built for; or "
        f"pip install --upgrade nvidia-nvjitlink, with -cu12 at its end for CUDA 12."
    )


@contextmanager
def _not_part_of_a_capture() -> Iterator[None]:
    """Allow this thread to allocate device memory while another thread captures a CUDA graph."""
    driver = _driver()
    mode = _require(driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    try:
        yield
    finally:
        _require(driver.cuThreadExchangeStreamCaptureMode(mode))


class _Packed:
    """Arguments of eight bytes side by side, and the table of their addresses that the driver reads."""

    def __init__(self, count: int) -> None:
        self.values = (ctypes.c_int64 * count)()
        first = ctypes.addressof(self.values)
        self._table = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))
        self.address = ctypes.addressof(self._table)


class CudaKernel:
    """A CUDA kernel, compiled once for a compute capability, cached on disk, and loaded once for a device.

    make_body: function that returns the Python function; called only if something has to be compiled.
    signature: the types of its arguments, each of eight bytes. A launch takes a number for each number and pointer, one
        for each element of a tuple, and `array_words` for each array.
    key: distinguishes the kernel from all other kernels of the same sources.
    threads: the maximal number of threads in a block. The assembler gets this bound, so that registers suffice.
    """

    def __init__(
        self, make_body: Callable[[], Any], signature: tuple[Any, ...], *key: Any, threads: int = CUDA_THREADS
    ) -> None:
        self._make_body, self._signature, self.name = make_body, signature, "-".join(map(str, key))
        self.threads = threads
        layout = struct.Struct("<" + "".join("d" if k is types.float64 else f"{_width(k)}q" for k in signature))
        self._pack, self._count = layout.pack_into, layout.size // 8
        self._free: list[_Packed] = []
        self._loaded: dict[int, tuple[Any, Any]] = {}
        self._modules: list[Any] = []

    def ptx(self, capability: tuple[int, int]) -> str:
        """Return the PTX for a compute capability; its entry is called `kernel`."""
        text = ptx_code(self._make_body(), self._signature, capability, self.threads)
        found = re.search(r"\.entry\s+([\w$]+)", text)
        assert found is not None
        # The entry gets a fixed name, so that loading needs no search for the mangled name.
        return text.replace(found.group(1), "kernel")

    def cubin(self, capability: tuple[int, int]) -> bytes:
        """Return the machine code for a compute capability, from the cache if it is there."""
        name = f"{self.name}-sm{capability[0]}{capability[1]}-{_toolchain()}.cubin"
        return kept_code(name, lambda: assembled(self.ptx(capability), capability))

    def load(self, device: int, stream: int = 0) -> None:
        """Make the kernel ready for a device. Raises RuntimeError while `stream` is captured for a CUDA graph."""
        driver = _driver()
        _require(driver.cuCtxPushCurrent(_context(device)))
        try:
            if int(_require(driver.cuStreamIsCapturing(stream))):
                raise RuntimeError(
                    "A kernel that is not loaded yet was asked for while a CUDA graph is captured, when nothing can be "
                    "compiled or loaded. Run the same code once before, or fpsim.warm_up(device, formats, roundings)."
                )
            code = self.cubin(compute_capability(device))
            # Both calls are in the block: CUDA loads lazily, and may allocate only when the function is requested.
            with _not_part_of_a_capture():
                module = _require(driver.cuModuleLoadData(code))
                function = _require(driver.cuModuleGetFunction(module, b"kernel"))
            self._modules.append(module)
            self.bind(device, driver.cuLaunchKernel, function)
        finally:
            _require(driver.cuCtxPopCurrent())

    def bind(self, device: int, launch: Callable[..., tuple[Any, ...]], function: Any) -> None:
        """Set the launcher for a device, which is the driver's cuLaunchKernel, and the function that it launches."""
        self._loaded[device] = launch, function

    @cached_property
    def _simulated(self) -> Any:
        return cuda_module().jit(self._make_body())

    def _grouped(self, arguments: tuple[Any, ...]) -> Iterator[Any]:
        """Yield the arguments as the Python function takes them: elements of a tuple together, integers as int64."""
        rest = (np.int64(a) if isinstance(a, int) else a for a in arguments)
        for kind in self._signature:
            yield tuple(islice(rest, kind.count)) if isinstance(kind, types.UniTuple) else next(rest)

    def __call__(self, device: int, stream: int, blocks: int, arguments: tuple[Any, ...]) -> None:
        """Launch the kernel on the stream with this handle. `device` has to be torch's current device.

        arguments: numbers, as the class describes. In the simulator, its arrays replace pointers and arrays.
        """
        if IS_SIMULATED:
            self._simulated[blocks, self.threads](*self._grouped(arguments))
            return
        loaded = self._loaded.get(device)
        if loaded is None:
            self.load(device, stream)
            loaded = self._loaded[device]
        launch, function = loaded
        # A free list instead of a lock: `pop` and `append` are atomic, and a launch does not wait for another thread's.
        # The driver copies the arguments within the call, so that the next launch may overwrite them.
        try:
            packed = self._free.pop()
        except IndexError:
            packed = _Packed(self._count)
        self._pack(packed.values, 0, *arguments)
        words = blocks, 1, 1, self.threads, 1, 1, 0, stream, packed.address, 0
        (error,) = launch(function, *words)
        if error:
            # The context is checked after the launch: both errors are rare, and a check before would slow each launch.
            if int(error) == _INVALID_CONTEXT:  # a thread in which torch has not used the device yet
                _require(_driver().cuCtxSetCurrent(_context(device)))
                (error,) = launch(function, *words)
            elif int(error) == _INVALID_HANDLE:  # another device's context is current, and stays so
                _require(_driver().cuCtxPushCurrent(_context(device)))
                try:
                    (error,) = launch(function, *words)
                finally:
                    _require(_driver().cuCtxPopCurrent())
            _require((error,))
        self._free.append(packed)


def _width(kind: Any) -> int:
    """Return the number of eight-byte arguments that a type takes in a kernel."""
    if isinstance(kind, types.UniTuple):
        return int(kind.count)
    return 5 + 2 * kind.ndim if isinstance(kind, types.Array) else 1


def array_words(address: int, shape: tuple[int, ...], item_size: int) -> tuple[int, ...]:
    """Describe a contiguous array by the words that a kernel takes: the fields of Numba's structure of an array."""
    strides, step = [], item_size
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    # The array's two owners are null, because torch owns the memory. The other fields are the number of items, the
    # bytes of an item, the address, the shape and the strides.
    return 0, 0, step // item_size, item_size, address, *shape, *reversed(strides)


@cache
def _toolchain() -> str:
    """Return a digest of the compilers that a kernel's machine code depends on."""
    from cuda.bindings import nvjitlink
    from cuda.pathfinder import load_nvidia_dynamic_lib

    try:
        assembler = nvjitlink.version()
        # The libraries' version numbers stay the same for many releases.
        sizes = [os.stat(load_nvidia_dynamic_lib(name).abs_path or "").st_size for name in ("nvvm", "nvJitLink")]
    except Exception as error:  # from the search for the libraries, or from the libraries
        raise RuntimeError(
            f"NVVM and nvJitLink, which compile CUDA kernels, cannot be used: {error} Expected: "
            f"{pip_install('cuda12', 'cuda13')}, whichever CUDA your torch was built for."
        ) from error
    words = sys.version, numba.__version__, version("numba-cuda"), version("llvmlite"), assembler, sizes
    return source_digest(repr(words))


def for_card(function: Any) -> Any:
    """Return the function with its callees inlined; in the simulator, return it as it is."""
    # Compiled code cannot take the simulator's arrays.
    return function if IS_SIMULATED else for_device(function)


@cache
def scalar_kernel(function: types_module.FunctionType, kinds: tuple[tuple[str, int], ...]) -> CudaKernel:
    """Make a kernel of one thread from a Python function over small arrays, so that decisions stay on the card.

    kinds: for each array, the name of its numbers' type and its number of dimensions.
    """
    signature = tuple(types.Array(getattr(types, name), dimensions, "C") for name, dimensions in kinds)
    words = ("x".join((name, str(dimensions))) for name, dimensions in kinds)
    code = hashlib.sha256("\n".join(_described(function)).encode()).hexdigest()[:16]
    return CudaKernel(lambda: for_card(function), signature, function.__name__, code, *words, threads=1)


def _described(function: types_module.FunctionType) -> list[str]:
    """Describe a Python function by text that is equal in every process: its bytecode, and the values that it uses."""
    code = function.__code__
    lines = [code.co_code.hex(), repr(code.co_names), repr([c for c in code.co_consts if not hasattr(c, "co_code")])]
    # Values of globals and closures count too: the cached code has to change its name when a constant changes.
    used = {name: function.__globals__[name] for name in sorted(code.co_names) if name in function.__globals__}
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    for name, value in (*used.items(), *((name, cell.cell_contents) for name, cell in cells)):
        called = getattr(value, "py_func", value)
        if isinstance(called, types_module.FunctionType):
            lines += [name, *_described(called)]
        elif isinstance(value, (int, float, str, tuple, np.generic)):
            lines.append(f"{name}={value!r}")
        else:
            lines.append(f"{name}: {getattr(value, '__name__', type(value).__name__)}")
    return lines


def _vector_intrinsics(width: int, lanes: int) -> tuple[Any, Any]:
    """Make a load and a store of `lanes` integers of `width` bits at once: (pointer, index of vector[, values])."""
    element = types.uint32 if width == 32 else types.uint64
    vector = ir.VectorType(ir.IntType(width), lanes)

    def address(builder: Any, pointer: Any, index: Any) -> Any:
        return builder.gep(builder.bitcast(pointer, vector.as_pointer()), [index])

    def load(typingctx: Any, pointer: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            loaded = builder.load(address(builder, *arguments), align=VECTOR_BYTES)
            values = [builder.extract_element(loaded, ir.IntType(32)(i)) for i in range(lanes)]
            return context.make_tuple(builder, signature.return_type, values)

        return types.UniTuple(element, lanes)(pointer, index), generate

    def store(typingctx: Any, pointer: Any, index: Any, values: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            *place, given = arguments
            stored: Any = ir.Constant(vector, ir.Undefined)
            for i in range(lanes):
                stored = builder.insert_element(stored, builder.extract_value(given, i), ir.IntType(32)(i))
            builder.store(stored, address(builder, *place), align=VECTOR_BYTES)
            return context.get_dummy_value()

        return types.void(pointer, index, values), generate

    return intrinsic(load), intrinsic(store)


@cache
def vector_access(width: int) -> tuple[Any, Any]:
    """Return functions that load and store 16 aligned bytes of integers at once: load(x, i) and store(x, i, tuple).

    i: the number of the vector. In the simulator, the functions are Python code over its arrays.
    """
    lanes = 8 * VECTOR_BYTES // width
    if not IS_SIMULATED:
        return _vector_intrinsics(width, lanes)

    def load(x: Any, i: int) -> tuple[Any, ...]:
        return tuple(x[lanes * i + j] for j in range(lanes))

    def store(x: Any, i: int, values: tuple[Any, ...]) -> None:
        for j in range(lanes):
            x[lanes * i + j] = values[j]

    return load, store
