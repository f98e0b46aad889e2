"""A card that is not there: launches of the CUDA kernels go to ptx_machine, which runs their PTX on the CPU.

All of a launch is what a card would see, but for the driver's cuLaunchKernel, in whose place `_launch` stands: it reads
the arguments as the driver does. The PTX is the one that nvJitLink would assemble.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import Array, Memory
from ptx_machine import Program, numba_arguments

from fpsim.compiling.card import CudaKernel, _described, _toolchain
from fpsim.compiling.kept import kept_code

CAPABILITY = (9, 0)
DEVICE, STREAM = 0, 0
# An instruction on floating-point registers or with a floating-point type.
FLOATING = re.compile(r"^\s*(?!\.|//)\S*\.(f16|f16x2|bf16|bf16x2|f32|f64|tf32)\b.*", re.MULTILINE)

_memory: list[np.ndarray] = []
_order = {"backwards": False}
_texts: dict[str, str] = {}


@contextmanager
def memory(
    *arrays: torch.Tensor | np.ndarray, reads: tuple[torch.Tensor | np.ndarray, ...] = ()
) -> Iterator[list[int]]:
    """Inside, kernels may reach these arrays, and may not write to those in `reads`. Gives the addresses, in order."""
    before = list(_memory)
    given = []
    for array in (*arrays, *reads):
        words = array.detach().numpy() if isinstance(array, torch.Tensor) else array
        view = words.view()
        view.flags.writeable = len(given) < len(arrays)
        given.append(view)
    _memory[:] = [*before, *given]
    try:
        yield [array.ctypes.data for array in given]
    finally:
        _memory[:] = before


@contextmanager
def backwards() -> Iterator[None]:
    """Inside, the last thread of the last block runs first."""
    _order["backwards"] = True
    try:
        yield
    finally:
        _order["backwards"] = False


def _launch(program: Program, *words: Any) -> tuple[int]:
    """In the place of cuLaunchKernel."""
    blocks, *others, threads, y, z, shared, stream, table, extra = words
    assert (others, y, z, shared, stream, extra) == ([1, 1], 1, 1, 0, STREAM, 0)
    count = len(program.kernel.params.offsets)
    addresses = (ctypes.c_void_p * count).from_address(table)
    arguments = [ctypes.c_int64.from_address(address or 0).value for address in addresses]
    program.launch_words(blocks, threads, arguments, _memory, _order["backwards"])
    return (0,)


def key_of(kernel: CudaKernel, capability: tuple[int, int]) -> str:
    """A name for what a kernel is compiled to: of all sources, its own code with what it uses, and the compilers."""
    words = kernel.name, kernel._signature, kernel.threads, capability, _toolchain(), _described(kernel._make_body())
    return hashlib.sha256(repr(words).encode()).hexdigest()


def ptx_of(kernel: CudaKernel, capability: tuple[int, int] = CAPABILITY) -> str:
    """What a kernel is compiled to, once in a run of the tests: Numba takes 1 to 15 seconds for it, in each process.

    The processes of a run share a folder, which is gone after it: see `PTX_OF_RUN` in conftest.py.
    """
    key = key_of(kernel, capability)
    if key not in _texts:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NUMBA_CACHE_DIR", os.environ["PTX_OF_RUN"])
            _texts[key] = kept_code(f"{key}.ptx", lambda: kernel.ptx(capability).encode()).decode()
    return _texts[key]


def load(kernel: CudaKernel, device: int = DEVICE, stream: int = STREAM) -> None:
    """In the place of CudaKernel.load: of what the kernel is compiled to."""
    bind(kernel, Program(ptx_of(kernel)))


def load_of_integers(kernel: CudaKernel, device: int = DEVICE, stream: int = STREAM) -> None:
    """The same, of a kernel that must not compute in floating point."""
    text = ptx_of(kernel)
    assert [line.group() for line in FLOATING.finditer(text)] == []
    bind(kernel, Program(text))


def bind(kernel: CudaKernel, program: Program) -> None:
    kernel.bind(DEVICE, _launch, program)


class EmulatedCard:
    """The machine that runs the kernels so; see `kernel_cases.Machine`."""

    threads: int | None = None

    def __call__(self, kernel: CudaKernel, blocks: int, *arguments: Any, reads: tuple[Any, ...] = ()) -> None:
        held = [a for a in arguments if isinstance(a, Memory | Array)]
        written = [a.x for a in held if isinstance(a, Array) or a.is_written]
        others = [a.x for a in held if isinstance(a, Memory) and not a.is_written]
        words: list[Any] = []
        for a in arguments:
            if isinstance(a, Array):
                words += numba_arguments([a.x.numpy()])[0]
            elif isinstance(a, Memory):
                words.append(a.x.data_ptr())
            else:
                words.append(0 if a is None else a)
        with memory(*written, reads=(*others, *reads)):
            kernel(DEVICE, STREAM, blocks, tuple(words))
