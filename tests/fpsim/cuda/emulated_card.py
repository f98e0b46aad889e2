"""The CUDA kernels on the CPU: the PTX that a launch assembles, run by ptx_machine on arrays of NumPy."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from ptx_machine import Program

from fpsim.kernels.compile import CUDA_THREADS
from fpsim.kernels.round import ALIGNED, HAS_KEY, HAS_SCALE, NO_MASKS, Masks, cuda_loop, elements_of_block
from fpsim.rounding import Plan

HOPPER = (9, 0)


@lru_cache(maxsize=8)
def rounding_ptx(rule: int, shape: int, width: int, masks: Masks = NO_MASKS) -> str:
    return cuda_loop(rule, shape, width, masks).ptx(HOPPER)


@lru_cache(maxsize=8)  # the code of one takes 10 MB while its module is kept
def rounding_program(rule: int, shape: int, width: int, masks: Masks = NO_MASKS) -> Program:
    return Program(rounding_ptx(rule, shape, width, masks))


def round_words(
    program: Program, x: np.ndarray, plan: Plan, key: int, log2_scale: int = 0, backwards: bool = False
) -> np.ndarray:
    """What the kernel of a plan makes of patterns: 16 bytes at once, and one by one with the key in memory.

    It may not touch anything else.
    """
    scale, kept_key, results = np.array([log2_scale]), np.array([key]), []
    for array in (x, scale, kept_key):
        array.flags.writeable = False
    blocks = -(-len(x) // elements_of_block(plan.rule, plan.width))
    for is_aligned in (True, False):
        y = _aligned(len(x), x.dtype)
        source = _aligned(len(x), x.dtype) if is_aligned else x
        if is_aligned:
            source[:] = x
            source.flags.writeable = False
        flags = (ALIGNED if is_aligned else HAS_KEY) | (HAS_SCALE if log2_scale else 0)
        memory = source, y, scale, kept_key
        word = key if is_aligned else ~key
        words = *(a.ctypes.data for a in memory), len(x), flags, word, *plan.parameters
        program.launch_words(blocks, CUDA_THREADS, words, memory, backwards)
        results.append(y)
    assert np.array_equal(*results)
    return results[0]


def _aligned(n: int, dtype: np.dtype) -> np.ndarray:
    """An array that begins at a multiple of 16 bytes, as those of torch do; full of what nobody wrote."""
    memory = np.full(n * dtype.itemsize + 16, 77, np.uint8)
    first = -memory.ctypes.data % 16
    return memory[first : first + n * dtype.itemsize].view(dtype)
