"""Bit patterns that a rounding kernel is tried on: the borders of a format, and random ones."""

from __future__ import annotations

import numpy as np

from fpsim import FloatFormat
from fpsim.kernels.threefry import NOISE_BLOCK


def words_of(width: int) -> type:
    return np.uint32 if width == 32 else np.uint64


def borders(fmt: FloatFormat, width: int) -> np.ndarray:
    """Where a rounding of `fmt` changes its mind, each with its neighbours in the container; of both signs."""
    smallest, largest, ulp = fmt.smallest, fmt.largest, fmt.epsilon
    points = [0.0, *(smallest * factor for factor in (0.25, 0.5, 0.75, 1, 1.5, 2, 2.5)), fmt.smallest_normal]
    points += [fmt.smallest_normal * (1 + ulp / 2), 1 + ulp / 2, 1 + 3 * ulp / 2, 1 + ulp / 3, 2 - ulp / 4]
    points += [largest, largest * (1 + ulp / 8), largest * (1 + ulp / 4), largest * (1 + ulp / 2), largest * 2, np.inf]
    points += [np.finfo("f4").max, np.finfo("f4").tiny, 2.0**-149]
    with np.errstate(over="ignore", under="ignore"):
        words = np.array(points).astype(f"f{width // 8}").view(words_of(width))
    one, top = words.dtype.type(1), words.dtype.type(1 << (width - 1))
    around = np.unique(np.concatenate([words, words + one, words - one, [words.dtype.type(2 ** (width - 1) - 1)]]))
    return np.concatenate([around, around | top])


def everywhere(words: np.ndarray) -> np.ndarray:
    """Each of the words at each place of a noise block, and so in each place of a vector."""
    odd = words if len(words) % 2 else words[:-1]
    return np.concatenate([np.tile(odd, NOISE_BLOCK), words[-1:]])


def patterns(fmt: FloatFormat, width: int, count: int, random: np.random.Generator) -> np.ndarray:
    """Random patterns: half of them any, half near the format's range, and of those half with zeros at the end."""
    uint = words_of(width)
    words = random.integers(0, 2**width, count, dtype=uint)
    mantissa, bias = (23, 127) if width == 32 else (52, 1023)
    near = words[count // 2 :]
    lowest, highest = np.frexp(fmt.smallest)[1] - 4 + bias, np.frexp(fmt.largest)[1] + 2 + bias
    fields = random.integers(max(lowest, 0), min(highest, 2 * bias + 1) + 1, len(near)).astype(uint)
    near &= uint(2**width - 1 - ((2 * bias + 1) << mantissa))
    near |= fields << uint(mantissa)
    short = near[len(near) // 2 :]
    short &= ~((uint(1) << random.integers(0, mantissa + 1, len(short)).astype(uint)) - uint(1))
    return words
