"""Numba's decorators without an import of Numba, which takes a second and is not needed for cached machine code.

They return placeholders. Numba's own object is made when a function that uses it is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from fpsim.compiling.callees import callee_type, compiles_a_loop


class Deferred:
    """Placeholder for an object of Numba in functions that Numba compiles.

    make: returns the object; called once.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    @cached_property
    def compiled(self) -> Any:
        """Numba's object."""
        return self._make()

    # Numba looks under this name for the type of a global.
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

    keeps_types: calls from Python, such as those of CUDA's simulator, run the Python function.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any], keeps_types: bool) -> None:
        super().__init__(self._compile)
        self.py_func, self._options = function, options  # `py_func` and `targetoptions` are Numba's names
        self._keeps_types = keeps_types

    @property
    def targetoptions(self) -> dict[str, Any]:
        """Options that Numba reads to decide whether it inlines the function."""
        # Asked in each compilation: LLVM inlines in milliseconds where Numba takes seconds, but only in CPU loops.
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
