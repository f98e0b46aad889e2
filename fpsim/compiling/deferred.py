"""Numba's decorators, for modules that do not import Numba: that takes a second, and kept machine code needs none.

What they give stands for Numba's own object, which is made when a function that uses it is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from fpsim.compiling.callees import callee_type, compiles_a_loop


class Deferred:
    """Stands for an object of Numba in functions that Numba compiles.

    make: gives the object, once.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    @cached_property
    def compiled(self) -> Any:
        """Numba's object."""
        return self._make()

    @property
    def _numba_type_(self) -> Any:  # where Numba looks for the type of a global
        from numba.core.registry import cpu_target

        value = self.compiled
        cpu_target.typing_context.refresh()  # it learns of a new intrinsic
        return cpu_target.typing_context.resolve_value_type(value)


class Function(Deferred):
    """A Python function, `py_func`, that loops and CUDA kernels call.

    With `inline="always"` Numba inlines it. With `forceinline=True` LLVM does in loops of the CPU, which is faster, and
    Numba elsewhere. Numba must where memory on the stack would be gone when the function returns, and should where
    arrays are given, whose owners a call counts.

    keeps_types: where Python calls it, as CUDA's simulator does, it runs in Python: what is compiled gives plain
    integers in the place of NumPy's.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any], keeps_types: bool) -> None:
        super().__init__(self._compile)
        self.py_func, self._options = function, options  # `py_func` and `targetoptions` are Numba's names
        self._keeps_types = keeps_types

    @property
    def targetoptions(self) -> dict[str, Any]:
        """What Numba reads to know whether it inlines the function."""
        return {"inline": "always"} if self._options.get("forceinline") and not compiles_a_loop() else self._options

    def _compile(self) -> Any:
        import numba

        return numba.njit(**self.targetoptions)(self.py_func)

    @property
    def _numba_type_(self) -> Any:
        is_called = "inline" not in self.targetoptions and compiles_a_loop()
        return callee_type(self.py_func, self._options) if is_called else super()._numba_type_

    def __call__(self, *arguments: Any) -> Any:
        return (self.py_func if self._keeps_types else self.compiled)(*arguments)


class Intrinsic(Deferred):
    """A function that gives Numba a type and LLVM's instructions."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(self._register)
        self.generator = function

    def _register(self) -> Any:
        from numba.extending import intrinsic

        return intrinsic(self.generator)


def njit(function: Callable[..., Any] | None = None, *, keeps_types: bool = False, **options: Any) -> Any:
    """`numba.njit`, deferred. keeps_types: see Function."""
    if function is None:
        return lambda function: Function(function, options, keeps_types)
    return Function(function, options, keeps_types)


def intrinsic(function: Callable[..., Any]) -> Any:
    """`numba.extending.intrinsic`, deferred. The function imports what it needs of Numba and llvmlite itself."""
    return Intrinsic(function)


def _carray() -> Any:
    from numba import carray

    return carray


carray: Any = Deferred(_carray)
