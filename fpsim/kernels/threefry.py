"""Random bits of stochastic rounding: a counter-based generator, and the assignment of its words to elements."""

from __future__ import annotations

import numpy as np

from fpsim.compiling.deferred import njit
from fpsim.kernels.bits import rotate_left

# Threefry-4x32: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
# Additions, rotations and exclusive ors of 32 bits: what every vector unit has. Its 12 rounds pass BigCrush (ibid.).
NOISE_ROUNDS = 12
_PARITY = np.uint32(0x1BD11BDA)


@njit(forceinline=True)
def _mix(a, b, rotation):
    a = np.uint32(a + b)
    return a, np.uint32(rotate_left(b, rotation) ^ a)


@njit(forceinline=True)
def _four_rounds(x0, x1, x2, x3, r00, r01, r10, r11, r20, r21, r30, r31):
    x0, x1 = _mix(x0, x1, r00)
    x2, x3 = _mix(x2, x3, r01)
    x0, x3 = _mix(x0, x3, r10)
    x2, x1 = _mix(x2, x1, r11)
    x0, x1 = _mix(x0, x1, r20)
    x2, x3 = _mix(x2, x3, r21)
    x0, x3 = _mix(x0, x3, r30)
    x2, x1 = _mix(x2, x1, r31)
    return x0, x1, x2, x3


@njit(forceinline=True)
def threefry(c0, c1, k0, k1, rounds):
    """Return four random words of Threefry-4x32 for the counter (c0, c1, 0, 0) and the key (k0, k1, 0, 0).

    Everything is uint32; `rounds` is 12, or 20 as in the paper's recommendation.
    """
    u32 = np.uint32
    k4 = u32(u32(_PARITY ^ k0) ^ k1)
    x0, x1, x2, x3 = u32(c0 + k0), u32(c1 + k1), u32(0), u32(0)
    x0, x1, x2, x3 = _four_rounds(x0, x1, x2, x3, 10, 26, 11, 21, 13, 27, 23, 5)
    x0, x3 = u32(x0 + k1), u32(u32(x3 + k4) + u32(1))
    x0, x1, x2, x3 = _four_rounds(x0, x1, x2, x3, 6, 20, 17, 11, 25, 10, 18, 20)
    x1, x2, x3 = x1, u32(x2 + k4), u32(u32(x3 + k0) + u32(2))
    x0, x1, x2, x3 = _four_rounds(x0, x1, x2, x3, 10, 26, 11, 21, 13, 27, 23, 5)
    x1, x2, x3 = u32(x1 + k4), u32(x2 + k0), u32(u32(x3 + k1) + u32(3))
    if rounds > 12:
        x0, x1, x2, x3 = _four_rounds(x0, x1, x2, x3, 6, 20, 17, 11, 25, 10, 18, 20)
        x0, x1, x2, x3 = u32(x0 + k4), u32(x1 + k0), u32(x2 + k1), u32(x3 + u32(4))
        x0, x1, x2, x3 = _four_rounds(x0, x1, x2, x3, 10, 26, 11, 21, 13, 27, 23, 5)
        x0, x1, x3 = u32(x0 + k0), u32(x1 + k1), u32(x3 + u32(5))
    return x0, x1, x2, x3


# Noise comes in blocks of 128 words from 16 counters, so that 16 lanes work side by side. Counter 16 b + l gives
# four words; word w is the noise of element 128 b + 32 w + l and, with its halves exchanged, of element
# 128 b + 32 w + 16 + l. Each element sees 32 uniform bits; the two share none of their leading 16.
NOISE_BLOCK = 128
NOISE_LANES = 16
