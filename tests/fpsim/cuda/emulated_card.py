"""The CUDA kernels, launched as on a card, on the CPU: linked to PTX, and run by ptx_machine on arrays of NumPy."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from linked import linked
from numba import types
from ptx_machine import Program

from fpsim.kernels.compile import CUDA_THREADS
from fpsim.kernels.round import NO_MASKS, Masks, cuda_kernel
from fpsim.rounding import NOISE_BLOCK, NOISE_LANES, STOCHASTIC, Plan

WORDS = {32: types.Array(types.uint32, 1, "C"), 64: types.Array(types.uint64, 1, "C")}
INTEGERS = types.Array(types.int64, 1, "C")


@lru_cache(maxsize=8)
def rounding_ptx(rule: int, shape: int, width: int, masks: Masks = NO_MASKS) -> str:
    signature = WORDS[width], WORDS[width], INTEGERS, *[types.int64] * 11
    return linked(cuda_kernel(rule, shape, width, masks), signature)[0]


@lru_cache(maxsize=8)  # the code of one takes 10 MB while its module is kept
def rounding_program(rule: int, shape: int, width: int, masks: Masks = NO_MASKS) -> Program:
    return Program(rounding_ptx(rule, shape, width, masks))


def round_words(
    program: Program, x: np.ndarray, plan: Plan, key: int, log2_scale: int = 0, backwards: bool = False
) -> np.ndarray:
    """What the kernel of a plan makes of patterns. It may not touch anything else."""
    x.flags.writeable = False
    y, scale = np.full(len(x), 77, x.dtype), np.array([log2_scale])
    scale.flags.writeable = False
    threads = -(-len(x) // NOISE_BLOCK) * NOISE_LANES if plan.rule == STOCHASTIC else len(x)
    rest = len(x), *plan.parameters, key & 0xFFFFFFFF, key >> 32
    program.launch(-(-threads // CUDA_THREADS), CUDA_THREADS, x, y, scale, *rest, backwards=backwards)
    return y
