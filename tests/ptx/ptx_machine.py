"""A machine for PTX on the CPU: it compiles a kernel with llvmlite, and launches it on arrays of NumPy.

Stricter than a card: what a card does not survive, leaves undefined or may do in any order is an error here that names
the line (a `Fault`): memory outside the arrays, an address that is not aligned, a race in shared memory, a barrier that
not all threads of a block reach, a loop without end.

What it cannot show: threads that run at once, and with that races in global memory; the order of memory without
fences; speed; and what ptxas makes of PTX, the instructions of a card's own. Of a card's approximations only the
documented size is known, see rcp.approx in ptx_operations.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from ptx_function import FAULTS, MACHINE
from ptx_text import parse
from ptx_thread import module, state_size

STEPS = 1 << 22  # branches backwards that a thread may take


class Fault(Exception):
    """The kernel did what a card would not survive, or leaves undefined."""


def _target() -> llvm.TargetMachine:
    """One for each engine, which owns it.

    Without optimisation: a kernel of moments takes 0.1 s to compile instead of 1.8 s, and then 0.02 s instead of
    0.006 s to run on 10**5 patterns.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    triple = llvm.Target.from_triple(llvm.get_process_triple())
    features = llvm.get_host_cpu_features().flatten()
    return triple.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=0, jit=True)


def _compiled(text: str) -> tuple[Any, Any]:
    """The engine, which owns the code, and the function `run` of an LLVM module."""
    target = _target()
    parsed = llvm.parse_assembly(text)
    parsed.triple, parsed.data_layout = target.triple, str(target.target_data)
    engine = llvm.create_mcjit_compiler(parsed, target)
    engine.finalize_object()
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    return engine, kind(engine.get_function_address("run"))


class Program:
    """A kernel that can be launched. fuses: ptxas may compute a product and its sum with one rounding; here it does.

    Raises UnknownPTX for what the translation does not know.
    """

    def __init__(self, text: str, fuses: bool = False) -> None:
        self.kernel = parse(text)
        self._lines = text.splitlines()
        ir, self.barriers = module(self.kernel, fuses)
        self._engine, self._run = _compiled(ir)

    def launch(self, blocks: int, threads: int, *values: Any, backwards: bool = False) -> None:
        """Run `blocks` of `threads`, with the arguments as `numba_arguments` takes them. Raises Fault.

        backwards: from the last thread to the first; what depends on the order is a mistake in the kernel.
        """
        self.launch_words(blocks, threads, *numba_arguments(values), backwards=backwards)

    def launch_words(
        self, blocks: int, threads: int, words: Sequence[int], arrays: Sequence[np.ndarray], backwards: bool = False
    ) -> None:
        """The same, of the words that the driver is given. arrays: the memory that the kernel may reach."""
        if threads > self.kernel.most_threads:
            raise Fault(f"{threads} threads in a block: the kernel is assembled for {self.kernel.most_threads}")
        given = np.zeros(len(MACHINE), np.int64)
        stride = state_size(self.kernel)
        kept = {
            "params": self._packed(words),
            "ranges": _ranges(arrays),
            "shared": np.empty(-(-self.kernel.shared.size // 16) * 16 + 16, np.uint8),
            "shadow": np.zeros((self.kernel.shared.size // 4 + 4, 2), np.int32),
            "states": np.empty((threads, stride), np.uint8),
            "statuses": np.zeros(threads, np.int64),
        }
        numbers = {"range_count": len(arrays), "stride": stride, "threads": threads, "blocks": blocks}
        numbers |= {"steps": STEPS, "backwards": int(backwards)}
        for i, name in enumerate(MACHINE):
            given[i] = kept[name].ctypes.data if name in kept else numbers.get(name, 0)
        if not self.barriers and not self.kernel.shared.size:
            self._go(given, 0, blocks)
            return
        order = range(blocks - 1, -1, -1) if backwards else range(blocks)
        for block in order:
            self._block(given, block, kept)

    def _block(self, given: np.ndarray, block: int, kept: dict[str, np.ndarray]) -> None:
        kept["shared"][:] = 0xA5
        kept["states"][:, :8] = 0
        while True:
            kept["shadow"][:] = 0
            self._go(given, block, block + 1)
            found = set(kept["statuses"].tolist())
            if found == {0}:
                return
            if len(found) > 1:
                raise Fault(f"block {block}: its threads wait at different barriers, or some have ended")

    def _go(self, given: np.ndarray, first: int, last: int) -> None:
        code = self._run(given.ctypes.data, first, last)
        if code < 0:
            line, kind = divmod(-code - 1, len(FAULTS))
            block, thread = given[MACHINE.index("at_block")], given[MACHINE.index("at_thread")]
            raise Fault(
                f"{self._lines[line - 1].strip()!r} {FAULTS[kind]}: line {line}, block {block}, thread {thread}"
            )

    def _packed(self, words: Sequence[int]) -> np.ndarray:
        params = self.kernel.params
        if len(words) != len(params.offsets):
            raise TypeError(f"{len(words)} words of arguments for {len(params.offsets)} parameters")
        ends = [*list(params.offsets.values())[1:], params.size]
        packed = np.zeros(params.size + 8, np.uint8)
        for word, first, end in zip(words, params.offsets.values(), ends, strict=True):
            size = min(end - first, 8)
            packed[first : first + size] = np.frombuffer((int(word) % 2**64).to_bytes(8, "little")[:size], np.uint8)
        return packed


def _ranges(arrays: Sequence[np.ndarray]) -> np.ndarray:
    rows = [(a.ctypes.data, a.ctypes.data + a.nbytes, int(a.flags.writeable)) for a in arrays]
    return np.array(rows or [(0, 0, 0)], np.int64)


def numba_arguments(values: Sequence[Any]) -> tuple[list[int], list[np.ndarray]]:
    """The words that numba-cuda gives a kernel, and the arrays it may reach, which are read only if NumPy says so.

    An array is its owner, its parent, its length, the size of an item, the address, the shape and the strides; a tuple
    is its elements.
    """
    words: list[int] = []
    arrays: list[np.ndarray] = []
    for value in values:
        if isinstance(value, np.ndarray):
            words += [0, 0, value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides]
            arrays.append(value)
        elif isinstance(value, tuple):
            inner, more = numba_arguments(value)
            words, arrays = words + inner, arrays + more
        else:
            words.append(int(value))
    return words, arrays
