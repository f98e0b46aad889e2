"""Choice among candidate scales: compare a block's results, and keep the one with the least error."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from fpsim.compiling.compile import pointer, stack_array
from fpsim.compiling.deferred import carray, njit
from fpsim.compiling.native import Loop, compiled_loop
from fpsim.kernels.block_loops import LANES, LANES_OF_LONG, LONG_BLOCK

ERRORS = ("mse", "mae", "max")  # their indices are compiled into a kernel
GIVEN = -1  # in place of a rule for ties: the choice is made already, and is only carried out


@cache
def make_error(error: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return two functions: the error that an element adds to its block, and the sum of the errors of two parts."""

    # Differences are float32 and sums are float64, so that squares are exact. The order of the sums differs between a
    # processor, a card and a team of threads, but hardly matters for 32 squares.
    @njit(forceinline=True)
    def of_element(before, after):
        difference = np.float64(np.float32(after - before))
        return difference * difference if error == 0 else abs(difference)

    @njit(forceinline=True)
    def joined(a, b):
        return max(a, b) if error == 2 else a + b

    return of_element, joined


@cache
def cpu_along(error: int) -> Loop:
    """Return a loop that replaces blocks of `kept` by blocks of `other` that are nearer to `src`.

    The elements of a block lie side by side.

    The first arguments are addresses: src, kept and other (float32), dims (of BlockAxes), errors and chosen.

    errors: a float64 for each block, the error of the kept result, which is known from the second candidate on.
    chosen: a byte for each block, the number of its candidate.
    candidate: the number of `other`, from 1.
    ties: 1 to keep the later of two equal candidates, else 0; GIVEN if `chosen` says which blocks to take from `other`.
    first, last: the units of work, which are those of `block_loops.cpu_along`.
    """
    of_element, joined = make_error(error)
    i64, f32 = np.int64, np.float32

    # LLVM may change only the order of sums: otherwise a sum in float64 does not vectorise.
    @compiled_loop(error, fastmath={"reassoc"})
    def loop(src, kept, other, dims, errors, chosen, candidate, ties, first, last):
        d = carray(pointer(dims), (7,), i64)
        outer, rows, middle, columns, r, c = d[0], d[1], d[2], d[3], d[5], d[6]
        n, step = outer * rows * middle * columns, middle * columns
        row_blocks, column_blocks = -(-rows // r), -(-columns // c)
        blocks = outer * row_blocks * middle * column_blocks
        x, y, z = carray(pointer(src), (n,), f32), carray(pointer(kept), (n,), f32), carray(pointer(other), (n,), f32)
        e, k = carray(pointer(errors), (blocks,), np.float64), carray(pointer(chosen), (blocks,), np.uint8)
        unit = first
        # Neighbours along C are computed at once: a division for each block would take longer than the block.
        while unit < last:
            row, column = unit // column_blocks, unit % column_blocks
            rest, i = row // middle, row // middle % row_blocks
            line = ((rest // row_blocks * rows + i * r) * middle + row % middle) * columns
            height, count = min(r, rows - i * r), min(column_blocks - column, last - unit)
            for b in range(count):
                base, length = line + (column + b) * c, min(c, columns - (column + b) * c)
                before, after = e[unit + b] if candidate > 1 and ties != GIVEN else 0.0, 0.0
                for j in range(height if ties != GIVEN else 0):
                    start = base + j * step
                    xs, ys, zs = x[start : start + length], y[start : start + length], z[start : start + length]
                    for m in range(length if candidate == 1 else 0):
                        before = joined(before, of_element(xs[m], ys[m]))
                        after = joined(after, of_element(xs[m], zs[m]))
                    for m in range(length if candidate > 1 else 0):
                        after = joined(after, of_element(xs[m], zs[m]))
                is_taken = after < before or (ties == 1 and after == before)
                if ties == GIVEN:
                    is_taken = k[unit + b] == candidate
                else:
                    e[unit + b] = after if is_taken else before
                    k[unit + b] = candidate if is_taken else (0 if candidate == 1 else k[unit + b])
                # The copy has no branch, because no processor could predict which blocks are replaced.
                for j in range(height):
                    start = base + j * step
                    ys, zs = y[start : start + length], z[start : start + length]
                    for m in range(length):
                        ys[m] = zs[m] if is_taken else ys[m]
            unit += count

    return loop


@cache
def cpu_across(error: int) -> Loop:
    """Return the loop of `cpu_along` for blocks whose elements lie beside elements of other blocks in memory.

    first, last: the units of work, which are those of `block_loops.cpu_across`.
    """
    of_element, joined = make_error(error)
    i64, f32, new_errors = np.int64, np.float32, stack_array(LANES, np.float64)

    @compiled_loop(error)
    def loop(src, kept, other, dims, errors, chosen, candidate, ties, first, last):
        d = carray(pointer(dims), (7,), i64)
        outer, rows, middle, columns, inner, r, c = d[0], d[1], d[2], d[3], d[4], d[5], d[6]
        n, step = outer * rows * middle * columns * inner, middle * columns * inner
        row_blocks, column_blocks = -(-rows // r), -(-columns // c)
        blocks = outer * row_blocks * middle * column_blocks * inner
        x, y, z = carray(pointer(src), (n,), f32), carray(pointer(kept), (n,), f32), carray(pointer(other), (n,), f32)
        e, k = carray(pointer(errors), (blocks,), np.float64), carray(pointer(chosen), (blocks,), np.uint8)
        lanes = LANES if r * c <= LONG_BLOCK else LANES_OF_LONG
        lane_blocks = -(-inner // lanes)
        before, after = new_errors(), new_errors()
        for unit in range(first, last):
            block, lane = unit // lane_blocks, unit % lane_blocks * lanes
            rest, column = block // column_blocks, block % column_blocks
            rest, m = rest // middle, rest % middle
            o, row = rest // row_blocks, rest % row_blocks
            width, height, length = min(lanes, inner - lane), min(r, rows - row * r), min(c, columns - column * c)
            base = (((o * rows + row * r) * middle + m) * columns + column * c) * inner + lane
            es, ks = e[block * inner + lane : block * inner + lane + width], k[block * inner + lane :]
            for i in range(width):
                before[i] = 0.0 if candidate == 1 or ties == GIVEN else es[i]
                after[i] = 0.0
            for t in range(0 if ties == GIVEN else height * length):
                start = base + t // length * step + t % length * inner
                xs, ys, zs = x[start : start + width], y[start : start + width], z[start : start + width]
                if candidate == 1:
                    for i in range(width):
                        before[i] = joined(before[i], of_element(xs[i], ys[i]))
                for i in range(width):
                    after[i] = joined(after[i], of_element(xs[i], zs[i]))
            for i in range(0 if ties == GIVEN else width):
                is_taken = after[i] < before[i] or (ties == 1 and after[i] == before[i])
                es[i] = after[i] if is_taken else before[i]
                ks[i] = candidate if is_taken else (0 if candidate == 1 else ks[i])
            for t in range(height * length):
                start = base + t // length * step + t % length * inner
                ys, zs = y[start : start + width], z[start : start + width]
                for i in range(width):
                    ys[i] = zs[i] if ks[i] == candidate else ys[i]

    return loop
