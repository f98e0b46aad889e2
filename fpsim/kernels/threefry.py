"""Random bits of stochastic rounding: a counter-based generator, and the assignment of its words to elements."""

from __future__ import annotations

import numpy as np

from fpsim.compiling.deferred import njit
from fpsim.kernels.containers import rotate_left

# Threefry-4x32: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
# It uses additions, rotations and exclusive ors of 32 bits, which every vector unit has. 12 rounds pass BigCrush
# (ibid.).
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

    All numbers are uint32. `rounds` is 12, or 20 as in the paper's recommendation.
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


# Noise comes in blocks of 128 words from 16 counters, so that 16 lanes work side by side. Counter 16 b + l yields four
# words. Word w is the noise of element 128 b + 32 w + l. With its halves exchanged, it is also the noise of element 128
# b + 32 w + 16 + l. Each element sees 32 uniform bits; the two elements share none of their leading 16 bits.
NOISE_BLOCK = 128
NOISE_LANES = 16


@njit(forceinline=True)
def key_words(key):
    """Return the two words of a noise key's 64 bits."""
    bits = np.uint64(np.int64(key))
    return np.uint32(bits & np.uint64(0xFFFFFFFF)), np.uint32(bits >> np.uint64(32))


@njit(forceinline=True)
def exchange_halves(word):
    """Return the word with its halves exchanged, the noise of a second element."""
    return rotate_left(np.uint32(word), 16)


@njit(forceinline=True)
def noise_words(counter, key0, key1):
    """Return the four noise words of one counter, see threefry.NOISE_BLOCK."""
    low = np.uint32(np.uint64(counter) & np.uint64(0xFFFFFFFF))
    high = np.uint32(np.uint64(counter) >> np.uint64(32))
    return threefry(low, high, np.uint32(key0), np.uint32(key1), NOISE_ROUNDS)


@njit(forceinline=True)
def fill_noise(noise, block, key0, key1):
    """Write the NOISE_BLOCK words of one block to `noise`."""
    # The high word is computed only once: 16 counters never cross a multiple of 2**32.
    first = np.uint64(block) * np.uint64(NOISE_LANES)
    low, high = np.uint32(first & np.uint64(0xFFFFFFFF)), np.uint32(first >> np.uint64(32))
    for lane in range(NOISE_LANES):
        w0, w1, w2, w3 = threefry(np.uint32(low + np.uint32(lane)), high, key0, key1, NOISE_ROUNDS)
        noise[lane], noise[lane + 16] = w0, exchange_halves(w0)
        noise[lane + 32], noise[lane + 48] = w1, exchange_halves(w1)
        noise[lane + 64], noise[lane + 80] = w2, exchange_halves(w2)
        noise[lane + 96], noise[lane + 112] = w3, exchange_halves(w3)


@njit(forceinline=True)
def element_noise(index, key0, key1):
    """Return the noise word of one element, see threefry.NOISE_BLOCK."""
    block, place = index // NOISE_BLOCK, index % NOISE_BLOCK
    part, lane = place // NOISE_LANES, place % NOISE_LANES
    w0, w1, w2, w3 = noise_words(block * NOISE_LANES + lane, key0, key1)
    word = w0 if part < 2 else (w1 if part < 4 else (w2 if part < 6 else w3))
    return exchange_halves(word) if part % 2 else word
