"""Wrap Numba's compilers: loops as object code that Python can call, arrays on the stack, and PTX by numba-cuda.

Numba is imported when one of these functions is called.
"""

from __future__ import annotations

import math
import types as types_module
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
from llvmlite import binding

from fpsim.checks import pip_install
from fpsim.compiling.deferred import (
    Deferred,
    callees_of,
    carray,
    compiled_library,
    intrinsic,
    linked_libraries,
    njit,
)

ENTRY = "fpsim_entry"  # the name of a loop in its object code: a function (self, arguments, count) as Python calls it
# C functions of Python that the entry calls, each with its return type and then its argument types.
FUNCTIONS = {
    "PyLong_AsLongLong": "integer object",
    "PyFloat_AsDouble": "float object",
    "PyErr_Occurred": "object",
    "PyErr_SetString": "nothing object object",
    "PyEval_SaveThread": "object",
    "PyEval_RestoreThread": "nothing object",
    "PyLong_FromLongLong": "object integer",
    "PyFloat_FromDouble": "object float",
}


def llvm_text(function: Callable[..., Any], fastmath: Any, error_model: str) -> str:
    """Compile a loop, its entry and its callees to LLVM IR, for any processor of this system.

    function: takes integers and, where annotated, floats. It allocates nothing: see `stack_array`.
    """
    from numba import types
    from numba.core import ir
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    kinds = [types.float64 if function.__annotations__.get(name) == "float" else types.int64 for name in names]
    options = {"fastmath": fastmath, "error_model": error_model}
    with global_compiler_lock, _shared_scopes(ir), callees_of(options):
        # Numba learns here of intrinsics that were defined since the last compilation.
        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()
        done = compiled_library(function, tuple(kinds), options)
        done.library.add_ir_module(_entry_module(done, names))
        module = done.library._final_module
        for other in linked_libraries(done.library):
            module.link_in(other._get_module_for_linking(), preserve=True)
        return str(module)


def machine_code(text: str) -> bytes:
    """Compile the IR of `llvm_text` to object code for this processor. It links to FUNCTIONS and the C library only."""
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

    with global_compiler_lock:
        codegen = cpu_target.target_context.codegen()
        library = codegen.create_library("loop")
        # These are parts of `finalize`, which itself would also load the code into Numba's own engine.
        library._final_module = binding.parse_assembly(text)
        library._optimize_final_module()
        library._final_module.verify()
        return bytes(codegen._tm.emit_object(library._final_module))


@contextmanager
def _shared_scopes(ir: Any) -> Iterator[None]:
    """Make Numba share a function's scope among the blocks that it copies for inlining, without copying the scope.

    ir: the module `ir` of Numba, or of numba-cuda. The caller holds Numba's lock.
    """
    # Copies of scopes take a third of the compile time.
    ir.Scope.__deepcopy__ = lambda self, memo: self
    try:
        yield
    finally:
        del ir.Scope.__deepcopy__


def _entry_module(done: Any, names: tuple[str, ...]) -> Any:
    """Build a compiled function's entry, which converts objects to numbers, calls without the GIL and converts back."""
    from llvmlite import ir
    from numba import types

    integer, floating, small = ir.IntType(64), ir.DoubleType(), ir.IntType(32)
    object_, nothing = ir.IntType(8).as_pointer(), ir.VoidType()
    kinds = {"integer": integer, "float": floating, "object": object_, "nothing": nothing}
    context, returned = done.target_context, done.signature.return_type
    module = done.library.create_ir_module("entry")
    python = {}
    for name, words in FUNCTIONS.items():
        gives, *takes = (kinds[word] for word in words.split())
        python[name] = ir.Function(module, ir.FunctionType(gives, takes), name)
    entry = ir.Function(module, ir.FunctionType(object_, [object_, object_.as_pointer(), integer]), ENTRY)
    builder = ir.IRBuilder(entry.append_basic_block())
    # Numba counts references to arrays. Arrays of loops own no memory, so that the destructor is never called. But
    # the object code links to nothing of Numba's runtime, and therefore needs a definition of the destructor.
    free = ir.Function(module, ir.FunctionType(nothing, [object_]), "NRT_MemInfo_call_dtor")
    ir.IRBuilder(free.append_basic_block()).unreachable()
    error, arguments, given = entry.args
    null = ir.Constant(object_, None)

    def fail(what: str) -> None:
        """Emit code that raises an error with this message; its class is the entry's `self`."""
        text = bytearray(what.encode() + b"\0")
        message = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), len(text)), module.get_unique_name("message"))
        message.linkage, message.global_constant = "internal", True
        message.initializer = ir.Constant(message.value_type, text)
        builder.call(python["PyErr_SetString"], [error, builder.bitcast(message, object_)])
        builder.ret(null)

    with builder.if_then(builder.icmp_signed("!=", given, integer(len(names))), likely=False):
        fail(f"This loop takes {len(names)} numbers: {', '.join(names)}.")
    values = []
    for i, kind in enumerate(done.signature.args):
        convert = python["PyFloat_AsDouble" if kind is types.float64 else "PyLong_AsLongLong"]
        values.append(builder.call(convert, [builder.load(builder.gep(arguments, [small(i)]))]))
    with builder.if_then(builder.icmp_unsigned("!=", builder.call(python["PyErr_Occurred"], []), null), likely=False):
        builder.ret(null)
    # The GIL is released around the call, so that loops of several Python threads run at the same time.
    thread = builder.call(python["PyEval_SaveThread"], [])
    callee = context.declare_function(module, done.fndesc)
    status, result = context.call_conv.call_function(builder, callee, returned, done.signature.args, values)
    builder.call(python["PyEval_RestoreThread"], [thread])
    with builder.if_then(status.is_error, likely=False):
        fail("A compiled loop failed: a division by zero, or arrays of different lengths. This is a bug of fpsim.")
    if isinstance(returned, types.Float):
        wide = context.cast(builder, result, returned, types.float64)
        builder.ret(builder.call(python["PyFloat_FromDouble"], [wide]))
    else:
        wide = integer(0) if returned == types.none else context.cast(builder, result, returned, types.int64)
        builder.ret(builder.call(python["PyLong_FromLongLong"], [wide]))
    return module


@cache
def stack_array(shape: int | tuple[int, ...], kind: Any) -> Callable[[], Any]:
    """Return a function for loops that allocates an uninitialised array of this shape and type on the loop's stack."""
    extents = shape if isinstance(shape, tuple) else (shape,)
    size = math.prod(extents) * np.dtype(kind).itemsize

    @intrinsic
    def memory(typingctx: Any) -> Any:
        from llvmlite import ir
        from numba import types

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            # Allocated in the entry block: an alloca within a loop takes more of the stack in every iteration.
            with builder.goto_entry_block():
                place = builder.alloca(ir.ArrayType(ir.IntType(8), size))
                place.align = 64
            return builder.bitcast(place, ir.IntType(8).as_pointer())

        return types.voidptr(), generate

    @njit(inline="always")
    def array():
        return carray(memory(), extents, kind)

    return array  # type: ignore[no-any-return]


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    from llvmlite import ir
    from numba import types

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.uintp), generate


def _loaded(width: int) -> Any:
    def load(typingctx: Any, address: Any, index: Any) -> Any:
        """Load the unsigned integer at an index of an array, given by its address on the CPU or on a card."""
        from llvmlite import ir
        from numba import types

        if address != types.uint64 or index != types.int64:
            return None
        kind = ir.IntType(width)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            base = builder.inttoptr(arguments[0], kind.as_pointer())
            return builder.load(builder.gep(base, [arguments[1]]))

        return (types.uint32 if width == 32 else types.uint64)(address, index), generate

    return intrinsic(load)


load32, load64 = _loaded(32), _loaded(64)


@intrinsic
def float64_bits(typingctx: Any, x: Any) -> Any:
    from llvmlite import ir
    from numba import types

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.int64(types.float64), generate


@intrinsic
def float64_of_bits(typingctx: Any, bits: Any) -> Any:
    from llvmlite import ir
    from numba import types

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.uint64), generate


@intrinsic
def _to_bits(typingctx: Any, x: Any) -> Any:
    from llvmlite import ir
    from numba import types

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return (types.uint32(types.float32), generate) if x == types.float32 else None


@intrinsic
def _to_float(typingctx: Any, bits: Any) -> Any:
    from llvmlite import ir
    from numba import types

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return (types.float32(types.uint32), generate) if bits == types.uint32 else None


@njit(inline="always")
def float32_bits(x):
    return _to_bits(np.float32(x))


@njit(inline="always")
def float32_of(bits):
    return _to_float(np.uint32(bits))


CUDA_THREADS = 256  # in a block, unless a kernel has its own number

cuda: Any = None  # numba-cuda's module in the files that import this name, once `uses_cuda` has put it there
_P = ParamSpec("_P")
_R = TypeVar("_R")


@cache
def cuda_module() -> Any:
    """Import numba-cuda. Raises RuntimeError with the remedy if it is missing."""
    try:
        # numba_cuda is imported first, because it replaces Numba's own target, which is deprecated.
        import numba_cuda
        from numba import cuda
    except ImportError:
        raise RuntimeError(
            "A CUDA tensor was given, and numba-cuda is not installed. Its kernels round on the GPU: "
            f"{pip_install('cuda12', 'cuda13')}, whichever CUDA your torch was built for; "
            "or move the tensor to the CPU with .cpu()."
        ) from None
    if numba_cuda.__version__.startswith("0.30.") and not hasattr(np, "row_stack"):
        raise RuntimeError(
            f"A CUDA tensor was given, and numba-cuda {numba_cuda.__version__} compiles nothing with NumPy "
            f"{np.__version__}, which has no np.row_stack: pip install 'numpy<2.5'; "
            "or move the tensor to the CPU with .cpu()."
        )
    # A small tensor makes a small grid, which the user cannot change.
    warnings.filterwarnings("ignore", message=r"Grid size \d+ will likely result in GPU under-utilization")
    return cuda


def uses_cuda(make_kernel: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function that makes the body of a CUDA kernel: its global `cuda` becomes numba-cuda's module.

    `cuda` is a global, not a variable that the body encloses, because CUDA's simulator swaps only globals.
    """

    @wraps(make_kernel)
    def make(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        make_kernel.__globals__["cuda"] = cuda_module()  # type: ignore[attr-defined]
        return make_kernel(*args, **kwargs)

    return make


def ptx_code(
    function: Callable[..., Any], signature: tuple[Any, ...], capability: tuple[int, int], threads: int
) -> str:
    """Compile a CUDA kernel to PTX for a compute capability, for blocks of at most `threads`."""
    cuda = cuda_module()
    from numba.cuda.core import ir
    from numba.cuda.core.compiler_lock import global_compiler_lock

    with global_compiler_lock, _shared_scopes(ir):
        text, _ = cuda.compile_ptx(function, signature, cc=capability, launch_bounds=threads)
    return str(text)


def for_device(function: types_module.FunctionType) -> types_module.FunctionType:
    """Copy a Python function for the card with its callees inlined, also those that are compiled for the CPU."""
    from numba import njit

    def of(value: Any) -> Any:
        called = getattr(value, "py_func", value)
        if isinstance(called, types_module.FunctionType):
            return njit(inline="always")(for_device(called))
        return value.compiled if isinstance(value, Deferred) else value

    # Globals and closures are copied: the function itself keeps its placeholders, which the CPU's loops need.
    code = function.__code__
    used = {name: of(value) for name, value in function.__globals__.items() if name in code.co_names}
    cells = tuple(types_module.CellType(of(cell.cell_contents)) for cell in function.__closure__ or ())
    inside = {**function.__globals__, **used}
    return types_module.FunctionType(code, inside, function.__name__, function.__defaults__, cells)
