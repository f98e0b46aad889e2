"""The amax of a whole tensor on a card, from one pass over it, and the numbers that all its blocks share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fpsim.compiling.compile import CUDA_THREADS, cuda_module, float32_bits, float32_of
from fpsim.compiling.deferred import njit
from fpsim.kernels.blocks import (
    FLOAT32_LARGEST,
    INFINITY,
    MAGNITUDE,
    MASK,
    NAN,
    amax_of_vector,
    counted_amax_of_vector,
    counted_magnitude,
)

if TYPE_CHECKING:
    from fpsim.compiling.card import CudaKernel

cuda: Any = None  # numba-cuda's module once a kernel is made; a global, because the simulator swaps globals

# Flags: the first of two numbers is the amax, or the multiplier; the second is the amax; an infinity saturates.
AMAX, MULTIPLIER, OF_TENSOR, SATURATES = 1, 2, 4, 8
PLACES = 4  # the two numbers that blocks share, the amax, and how many blocks of threads are done; all begin as -1
_FIRST, _SECOND, FOUND, _DONE = range(PLACES)


@njit(inline="always")
def multiplier(amax, largest):
    """Return largest / amax as float32, both patterns; 1 where amax is 0 (NVIDIA TransformerEngine,
    Float8CurrentScaling).

    The result for an infinite amax has no meaning.
    """
    nonzero = amax if amax != np.uint32(0) else largest
    return float32_bits(min(np.float32(float32_of(largest) / float32_of(nonzero)), FLOAT32_LARGEST))


def amax_kernel() -> Callable[..., None]:
    """Return the body of a CUDA kernel that finds the pattern of the amax of `n` uint32, by `counted_magnitude`.

    is_aligned: x begins at a multiple of 16 bytes. largest: of the elements' format, a pattern. asked: flags; the block
    of threads that finishes last writes the numbers that they ask for. out: PLACES int64.
    """
    from numba import int64, uint32

    from fpsim.compiling.card import vector_access

    global cuda
    cuda = cuda_module()
    load, _ = vector_access(32)
    u32 = np.uint32

    def kernel(x, n, is_aligned, largest, asked, out):
        shared = cuda.shared.array(CUDA_THREADS, uint32)
        t, thread, step, amax = cuda.threadIdx.x, cuda.grid(1), cuda.gridsize(1), u32(0)
        counted = INFINITY if asked & SATURATES else MAGNITUDE
        vectors = n // 4 if is_aligned else 0
        for i in range(thread, vectors, step):
            x0, x1, x2, x3 = load(x, i)
            # Most vectors hold no mask, infinity or NaN: one comparison of the amax of all patterns finds those that
            # do.
            most = amax_of_vector(x0, x1, x2, x3)
            if most >= MASK:
                most = counted_amax_of_vector(x0, x1, x2, x3, counted)
            amax = max(amax, most)
        for i in range(vectors * 4 + thread, n, step):
            amax = max(amax, counted_magnitude(x[i], counted))
        shared[t] = amax
        half = cuda.blockDim.x // 2
        cuda.syncthreads()
        while half > 0:
            if t < half:
                shared[t] = max(shared[t], shared[t + half])
            cuda.syncthreads()
            half //= 2
        if t > 0:
            return
        cuda.atomic.max(out, FOUND, int64(shared[0]))
        cuda.threadfence()  # a thread that sees this block as done also sees its result
        if cuda.atomic.add(out, _DONE, 1) == cuda.gridDim.x - 2:  # it began at -1
            cuda.threadfence()
            found = u32(cuda.atomic.max(out, FOUND, 0))
            if asked & MULTIPLIER and found >= INFINITY:
                out[_FIRST] = int64(float32_bits(np.float32(1)) if asked & SATURATES else NAN)
            elif asked & MULTIPLIER:
                out[_FIRST] = int64(multiplier(found, u32(largest)))
            elif asked & AMAX:
                out[_FIRST] = int64(found)
            if asked & OF_TENSOR:
                out[_SECOND] = int64(found)

    return kernel


@cache
def cuda_amax() -> CudaKernel:
    """Return the kernel with its launch, in any number of blocks."""
    from numba import types

    from fpsim.compiling.card import INTEGER, WORDS32, CudaKernel, for_card

    signature = WORDS32, INTEGER, INTEGER, INTEGER, INTEGER, types.Array(types.int64, 1, "C")
    return CudaKernel(lambda: for_card(amax_kernel()), signature, "amax")
