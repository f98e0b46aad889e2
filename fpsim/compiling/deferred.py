"""Numba's decorators without an import of Numba, which takes a second and is not needed for cached machine code.

The decorators return placeholders. Numba's own object is made when a function that uses the placeholder is compiled.

Functions that a loop calls are compiled once for their types of arguments, and inlined by LLVM. If Numba inlines a
function (`inline="always"`), Numba reads the function again for every call, and types and lowers each copy: a hash that
is called 24 times takes seconds. LLVM inlines it in milliseconds. Numba's own `njit` would make each such function
callable from Python and optimise it separately, which takes longer still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from threading import local
from typing import Any


class Deferred:
    """Placeholder for an object of Numba in functions that Numba compiles.

    make: function that returns the object; called once.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    @cached_property
    def compiled(self) -> Any:
        """Numba's own object."""
        return self._make()

    # Numba reads the type of a global from this attribute.
    @property
    def _numba_type_(self) -> Any:
        from numba.core.registry import cpu_target

        value = self.compiled
        # `compiled` may have registered an intrinsic, which the context learns of only when it is refreshed.
        cpu_target.typing_context.refresh()
        return cpu_target.typing_context.resolve_value_type(value)


class Function(Deferred):
    """A Python function, `py_func`, that loops and CUDA kernels call.

    With `inline="always"` Numba inlines it. With `forceinline=True` LLVM inlines it in CPU loops, and Numba elsewhere.
    Numba has to inline a function that returns memory on its stack, and should inline one that takes arrays, because a
    call counts references to their owners.

    keeps_types: whether calls from Python, such as those of CUDA's simulator, run the Python function.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any], keeps_types: bool) -> None:
        super().__init__(self._compile)
        self.py_func, self._options = function, options  # `py_func` and `targetoptions` are Numba's names
        self._keeps_types = keeps_types

    @property
    def targetoptions(self) -> dict[str, Any]:
        """Options that Numba reads to decide whether it inlines the function."""
        # Each compilation decides: LLVM inlines in milliseconds where Numba takes seconds, but only in CPU loops.
        return {"inline": "always"} if self._options.get("forceinline") and not compiles_a_loop() else self._options

    def _compile(self) -> Any:
        import numba

        return numba.njit(**self.targetoptions)(self.py_func)

    @property
    def _numba_type_(self) -> Any:
        is_called = "inline" not in self.targetoptions and compiles_a_loop()
        return callee_type(self.py_func, self._options) if is_called else super()._numba_type_

    def __call__(self, *arguments: Any) -> Any:
        # The compiled function returns plain integers instead of NumPy's, whose width the simulator relies on.
        return (self.py_func if self._keeps_types else self.compiled)(*arguments)


class Intrinsic(Deferred):
    """Placeholder for an intrinsic: a function that returns a type to Numba and emits LLVM IR."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(self._register)
        self.generator = function

    def _register(self) -> Any:
        from numba.extending import intrinsic

        return intrinsic(self.generator)


def njit(function: Callable[..., Any] | None = None, *, keeps_types: bool = False, **options: Any) -> Any:
    """Defer `numba.njit`. keeps_types: see Function."""
    if function is None:
        return lambda function: Function(function, options, keeps_types)
    return Function(function, options, keeps_types)


def intrinsic(function: Callable[..., Any]) -> Any:
    """Defer `numba.extending.intrinsic`. The function has its own imports of Numba and llvmlite."""
    return Intrinsic(function)


def _carray() -> Any:
    from numba import carray

    return carray


carray: Any = Deferred(_carray)


# Functions that loops call

_Options = dict[str, Any]
_types: dict[str, dict[Any, Any]] = {}  # by the options of the loop, which its callees inherit
_thread = local()  # its `current`: the types for the loop that a thread compiles


def compiles_a_loop() -> bool:
    """True if this thread is inside `callees_of`, which means that it compiles for the CPU."""
    return getattr(_thread, "current", None) is not None


@contextmanager
def callees_of(options: _Options) -> Iterator[None]:
    """Compile functions inside of the block as callees of a loop with these options. The caller holds Numba's lock."""
    _thread.current = _types.setdefault(repr(sorted(options.items())), {})
    try:
        yield
    finally:
        _thread.current = None


def callee_type(function: Callable[..., Any], options: _Options) -> Any:
    """Return Numba's type of a function that a loop calls, one for all loops with the same options."""
    from numba.core import types

    known = _thread.current
    if function not in known:
        callee = Callee(function, options)
        known[function] = types.Dispatcher(callee), callee  # type: ignore[type-var]  # it keeps a weak reference
    return known[function][0]


def linked_libraries(library: Any) -> Iterable[Any]:
    """Return the libraries that a library calls, directly or not, each after all libraries that call it."""
    seen: set[Any] = set()
    finished: list[Any] = []

    def visit(one: Any) -> None:
        seen.add(one)
        for other in one._linking_libraries:
            if other not in seen:
                visit(other)
        finished.append(one)

    visit(library)
    # Callers first: LLVM's linker drops a function that nothing calls yet. The last one is the library itself.
    return reversed(finished[:-1])


class Callee:
    """The part of a dispatcher that Numba needs to type and lower a call; Python cannot call it."""

    # Numba reads this attribute to detect recursion, which no loop has.
    is_compiling = False

    def __init__(self, function: Callable[..., Any], options: _Options) -> None:
        from numba.core import utils

        self.py_func, self.targetoptions, self.pysig = function, options, utils.pysignature(function)
        self._compiled: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def get_call_template(self, args: Iterable[Any], kws: Any) -> tuple[Any, Any, tuple[Any, ...], dict[str, Any]]:
        from numba.core import types, typing

        if kws:
            raise TypeError(f"{self.py_func.__name__} is called with keywords. Pass its arguments by position.")
        # Types of literals lose their values: else each constant that is passed would cause a separate compilation.
        kinds = tuple(map(types.unliteral, args))  # type: ignore[attr-defined]
        if kinds not in self._compiled:
            self._compiled[kinds] = self._compile(kinds)
        _, signature = self._compiled[kinds]
        template = typing.make_concrete_template(self.py_func.__name__, key=self.py_func, signatures=[signature])
        return template, self.pysig, kinds, {}

    def _compile(self, kinds: tuple[Any, ...]) -> tuple[Any, Any]:
        """Compile for these types, and return a key by which Numba finds the code, and the signature."""
        done = compiled_library(self.py_func, kinds, self.targetoptions)
        # The library is marked as final but not optimised: LLVM optimises the loop together with all that it calls.
        done.library._finalized = True
        key = object()
        done.target_context.insert_user_function(key, done.fndesc, [done.library])
        return key, done.signature

    def get_overload(self, kinds: Iterable[Any]) -> Any:
        return self._compiled[tuple(kinds)][0]

    @property
    def nopython_signatures(self) -> list[Any]:
        return [signature for _, signature in self._compiled.values()]


def compiled_library(function: Callable[..., Any], kinds: tuple[Any, ...], options: _Options) -> Any:
    """Compile a function to LLVM IR with Numba, without wrappers for Python or C."""
    from numba.core import compiler
    from numba.core.dispatcher import _FunctionCompiler  # type: ignore[attr-defined]
    from numba.core.registry import cpu_target

    class Compiler(_FunctionCompiler):  # type: ignore[misc]
        def _customize_flags(self, flags: Any) -> Any:
            # Nothing calls the wrappers: `compile._entry_module` writes the entry of a loop, and callees need none.
            flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
            return flags

    return Compiler(function, cpu_target, {"nopython": True, **options}, {}, compiler.Compiler).compile(kinds, None)
