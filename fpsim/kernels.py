"""The loops over memory: one body, a CPU loop and a CUDA loop beneath it."""

from __future__ import annotations

import hashlib
import math
import types as types_module
import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from fpsim import rounding
from fpsim.rounding import (
    NOISE_BLOCK,
    NOISE_LANES,
    NOISE_ROUNDS,
    STOCHASTIC,
    make_at_scale,
    make_round,
    rotate_left,
    threefry,
)

_SOURCES = b"".join(Path(file).read_bytes() for file in (__file__, rounding.__file__))


class _Cache(FunctionCache):
    """Numba's cache on disk, keyed by what is compiled in: its own key changes with every process for closures.

    Each key, processor and state of the sources has files of its own. Numba's way, one index for all closures of a
    function, is written without a lock: two processes that compile at once could leave one rule's code under another's
    key.
    """

    def __init__(self, function: Callable[..., None], key: tuple[int, ...]) -> None:
        super().__init__(function)
        machine = repr((numba.__version__, cpu_target.target_context.codegen().magic_tuple()))
        digest = hashlib.sha256(_SOURCES + machine.encode()).hexdigest()[:16]
        self._cache_file = IndexDataCacheFile(
            cache_path=self._cache_path,
            filename_base="-".join((self._impl.filename_base, *map(str, key), digest)),
            source_stamp=self._impl.locator.get_source_stamp(),
        )

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        return signature


@intrinsic
def _pointer(typingctx: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.uintp), generate


@intrinsic
def _float64_bits(typingctx: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.int64(types.float64), generate


@njit(inline="always")
def exchange_halves(word):  # type: ignore[no-untyped-def]
    return rotate_left(np.uint32(word), 16)


@njit(inline="always")
def noise_words(counter, key0, key1):  # type: ignore[no-untyped-def]
    """The four noise words of one counter, see rounding.NOISE_BLOCK."""
    low = np.uint32(np.uint64(counter) & np.uint64(0xFFFFFFFF))
    high = np.uint32(np.uint64(counter) >> np.uint64(32))
    return threefry(low, high, np.uint32(key0), np.uint32(key1), NOISE_ROUNDS)


@njit(inline="always")
def fill_noise(noise, block, key0, key1):  # type: ignore[no-untyped-def]
    """The NOISE_BLOCK words of one block into `noise`."""
    first = np.uint64(block) * np.uint64(NOISE_LANES)  # 16 counters never cross 2**32: the high word is one
    low, high = np.uint32(first & np.uint64(0xFFFFFFFF)), np.uint32(first >> np.uint64(32))
    for lane in range(NOISE_LANES):
        w0, w1, w2, w3 = threefry(np.uint32(low + np.uint32(lane)), high, key0, key1, NOISE_ROUNDS)
        noise[lane], noise[lane + 16] = w0, exchange_halves(w0)
        noise[lane + 32], noise[lane + 48] = w1, exchange_halves(w1)
        noise[lane + 64], noise[lane + 80] = w2, exchange_halves(w2)
        noise[lane + 96], noise[lane + 112] = w3, exchange_halves(w3)


def _integers(width: int) -> tuple[Any, Any]:
    return (np.uint32, np.int32) if width == 32 else (np.uint64, np.int64)


@cache
def _cpu_body(rule: int, shape: int, width: int, in_place: bool, limited: bool) -> Callable[..., Any]:
    """Round the patterns of array `x` into `y`: two arrays that share no memory or, `in_place`, one.

    limited: patterns of a magnitude above `limit` stay as they are, and the largest magnitude is given back.
    """
    round_bits, at_scale = make_round(rule, shape, width), make_at_scale(width)
    uint, sint = _integers(width)
    to_top, magnitude_mask = uint(width - 32), uint((1 << (width - 1)) - 1)

    @njit(inline="always")
    def body(x, y, n, p, key, block, log2_scale, limit):  # type: ignore[no-untyped-def]
        shift, zero_sign, mask, odd = sint(p[0]), uint(p[5]), uint(p[6] << (width - 32)), uint(p[7])
        origin, largest, overflow, smallest = at_scale(p[1], p[2], p[3], p[4], log2_scale)
        amax = uint(0)
        if rule == STOCHASTIC:
            noise = np.empty(NOISE_BLOCK, np.uint32)
            for start in range(0, n, NOISE_BLOCK):
                fill_noise(noise, block, key[0], key[1])
                block += 1
                ys = y[start : start + NOISE_BLOCK]
                xs = ys if in_place else x[start : start + NOISE_BLOCK]
                for i in range(len(ys)):
                    bits, word = uint(uint(noise[i]) << to_top), xs[i]
                    rounded = round_bits(word, bits, shift, origin, largest, overflow, smallest, zero_sign, mask, odd)
                    if limited:
                        magnitude = uint(word & magnitude_mask)
                        amax = max(amax, magnitude)
                        rounded = word if magnitude > limit else rounded
                    ys[i] = rounded
        else:
            for i in range(n):
                word = x[i]
                rounded = round_bits(word, uint(0), shift, origin, largest, overflow, smallest, zero_sign, mask, odd)
                if limited:
                    magnitude = uint(word & magnitude_mask)
                    amax = max(amax, magnitude)
                    rounded = word if magnitude > limit else rounded
                y[i] = rounded
        return amax

    return body  # type: ignore[no-any-return]


@cache
def cpu_loop(rule: int, shape: int, width: int) -> Callable[..., None]:
    """Round `n` patterns from address `src` to address `dst` (which may be `src`).

    `parameters` is the address of a Plan's integers, `key` that of two uint32 words; the noise starts at block
    `block`, so that a tensor cut at multiples of NOISE_BLOCK gets the same bits. `log2_scale` is the address of an
    int64, see rounding.at_scale. Holds no lock, allocates no array but one block of noise.
    """
    uint, _ = _integers(width)
    out_of_place, in_place = (_cpu_body(rule, shape, width, same, False) for same in (False, True))

    @njit(nogil=True)
    def loop(src, dst, n, parameters, key, block, log2_scale):  # type: ignore[no-untyped-def]
        p = carray(_pointer(parameters), (8,), np.int64)
        scale = carray(_pointer(log2_scale), (1,), np.int64)[0]
        k = carray(_pointer(key), (2,), np.uint32)
        y = carray(_pointer(dst), (n,), uint)
        if src == dst:  # LLVM vectorises what it knows to be one array, and what it finds to be two at run time
            in_place(y, y, n, p, k, block, scale, uint(0))
        else:
            out_of_place(carray(_pointer(src), (n,), uint), y, n, p, k, block, scale, uint(0))

    loop._cache = _Cache(loop.py_func, (rule, shape, width))
    return loop  # type: ignore[no-any-return]


@cache
def cpu_fitting_loop(rule: int, shape: int, width: int) -> Callable[..., float]:
    """Round in place those of `n` patterns at address `src` whose magnitude is at most `ceiling`, in one pass.

    Gives the largest magnitude of all, inf where one is not finite. The rest is as in `cpu_loop`.
    """
    body = _cpu_body(rule, shape, width, True, True)
    uint, _ = _integers(width)
    floating, container = (np.float32, rounding.BINARY32) if width == 32 else (np.float64, rounding.BINARY64)
    infinity, one = uint(container.bits(float("inf"))), uint(1)

    @njit(nogil=True)
    def loop(src, n, parameters, key, block, log2_scale, ceiling):  # type: ignore[no-untyped-def]
        p = carray(_pointer(parameters), (8,), np.int64)
        scale = carray(_pointer(log2_scale), (1,), np.int64)[0]
        k = carray(_pointer(key), (2,), np.uint32)
        x = carray(_pointer(src), (n,), uint)
        scratch = np.full(1, ceiling, floating)
        words = scratch.view(uint)
        limit = words[0]
        if limit == infinity or np.float64(scratch[0]) > ceiling:
            limit = uint(limit - one)
        words[0] = min(body(x, x, n, p, k, block, scale, limit), infinity)
        return np.float64(scratch[0])

    loop._cache = _Cache(loop.py_func, (rule, shape, width))
    return loop  # type: ignore[no-any-return]


cuda: Any = None  # numba-cuda's module once it is needed; a global, because the simulator swaps it in those


def _cuda() -> Any:
    """numba-cuda, or an error that says how to get it."""
    global cuda
    try:
        import numba_cuda  # noqa: F401  numba's own target is deprecated; importing this replaces it
        from numba import cuda
    except ImportError:
        raise RuntimeError(
            "A CUDA tensor came, and numba-cuda is not installed. Its kernels round on the GPU: "
            "pip install 'fpsim[cuda12]' or 'fpsim[cuda13]', whichever CUDA your torch was built for; "
            "or move the tensor to the CPU with .cpu()."
        ) from None
    # a small tensor makes a small grid, and its owner cannot help it
    warnings.filterwarnings("ignore", message=r"Grid size \d+ will likely result in GPU under-utilization")
    return cuda


CUDA_THREADS = 256


def cuda_kernel(rule: int, shape: int, width: int) -> Callable[..., None]:
    """The body of a CUDA kernel as a Python function, for jit, PTX and the simulator alike.

    `x` and `y` are flat arrays of unsigned integers, `log2_scale` one of a single int64; the parameters are a Plan's.
    A thread rounds one pattern, or under STOCHASTIC the eight whose noise comes from one counter.
    """
    _cuda()
    round_bits, at_scale = make_round(rule, shape, width), make_at_scale(width)
    uint, sint = _integers(width)
    to_top = uint(width - 32)

    def kernel(x, y, log2_scale, n, shift, origin, largest, overflow, smallest, zero_sign, mask, odd, key0, key1):  # type: ignore[no-untyped-def]
        thread = cuda.grid(1)
        shift, zero_sign, mask, odd = sint(shift), uint(zero_sign), uint(mask << (width - 32)), uint(odd)
        origin, largest, overflow, smallest = at_scale(origin, largest, overflow, smallest, log2_scale[0])
        origin, largest, overflow, smallest = sint(origin), uint(largest), uint(overflow), uint(smallest)
        if rule == STOCHASTIC:
            block, lane = thread // NOISE_LANES, thread % NOISE_LANES
            words = noise_words(thread, key0, key1)
            for j in range(8):
                i = block * NOISE_BLOCK + j * NOISE_LANES + lane
                if i < n:
                    word = exchange_halves(words[j // 2]) if j % 2 else words[j // 2]
                    bits = uint(uint(word) << to_top)
                    y[i] = round_bits(x[i], bits, shift, origin, largest, overflow, smallest, zero_sign, mask, odd)
        elif thread < n:
            y[thread] = round_bits(x[thread], uint(0), shift, origin, largest, overflow, smallest, zero_sign, mask, odd)

    return kernel


@cache
def cuda_loop(rule: int, shape: int, width: int) -> Callable[..., None]:
    """The compiled kernel with its launch: (x, y, log2_scale, n, parameters, key0, key1, stream)."""
    kernel = _cuda().jit(cuda_kernel(rule, shape, width))

    def launch(
        x: Any, y: Any, log2_scale: Any, n: int, parameters: tuple[int, ...], key0: int, key1: int, stream: Any
    ) -> None:
        threads = -(-n // NOISE_BLOCK) * NOISE_LANES if rule == STOCHASTIC else n
        blocks = -(-threads // CUDA_THREADS)
        kernel[blocks, CUDA_THREADS, stream](x, y, log2_scale, n, *map(np.int64, parameters), key0, key1)

    return launch


@lru_cache(maxsize=64)
def cuda_stream(pointer: int) -> Any:
    """numba's face of a stream that torch owns."""
    return _cuda().external_stream(pointer)


def cuda_array(tensor: Any) -> Any:
    """numba's face of a CUDA tensor, no copy and no synchronisation."""
    return _cuda().as_cuda_array(tensor)


@cache
def tally_loop(size: int) -> Callable[..., None]:
    """Compare `n` numbers of `size` bytes before (address `src`) and after rounding (`dst`), in one pass.

    Adds to int64 counts, float64 sums and an int64 histogram, laid out as statistics._Accumulator says.
    """
    floating = np.float32 if size == 4 else np.float64

    @njit(nogil=True)
    def loop(src, dst, n, counts, sums, exponents, smallest_normal, saturated_from, largest):  # type: ignore[no-untyped-def]
        x = carray(_pointer(src), (n,), floating)
        r = carray(_pointer(dst), (n,), floating)
        c = carray(_pointer(counts), (7,), np.int64)
        s = carray(_pointer(sums), (3,), np.float64)
        h = carray(_pointer(exponents), (2048,), np.int64)
        for i in range(n):
            before, after = np.float64(x[i]), np.float64(r[i])
            magnitude, rounded = abs(before), abs(after)
            c[0] += 1
            if not magnitude < np.inf:
                c[5] += 1
                continue
            s[2] = max(s[2], magnitude)
            if magnitude > 0.0:
                c[1] += 1
                c[2] += rounded == 0.0
                h[_float64_bits(magnitude) >> 52] += 1
            c[3] += 0.0 < rounded < smallest_normal
            c[4] += (not rounded < np.inf) or (rounded == largest and magnitude >= saturated_from)
            c[6] += before == after
            if rounded < np.inf:
                s[0] += before * before
                s[1] += (after - before) * (after - before)

    loop._cache = _Cache(loop.py_func, (size,))
    return loop  # type: ignore[no-any-return]


@cache
def lost_loop(size: int) -> Callable[..., None]:
    """Count what `n` numbers of `size` bytes at `src` lost when they became those at `dst`.

    Adds to three int64 at `counts`: zeros before; other numbers that became zero; finite ones that did not stay so, or
    whose magnitude is above `limit`. By bit patterns, which vectorise.
    """
    uint, floating = (np.uint32, np.float32) if size == 4 else (np.uint64, np.float64)
    container = rounding.BINARY32 if size == 4 else rounding.BINARY64
    magnitude_mask = uint((1 << (8 * size - 1)) - 1)
    zero, infinity = uint(0), uint(container.bits(float("inf")))

    @njit(nogil=True)
    def loop(src, dst, n, limit, counts):  # type: ignore[no-untyped-def]
        x = carray(_pointer(src), (n,), uint)
        r = carray(_pointer(dst), (n,), uint)
        c = carray(_pointer(counts), (3,), np.int64)
        scratch = np.full(1, limit, floating)
        highest = scratch.view(uint)[0]
        if np.float64(scratch[0]) > limit:
            highest = uint(highest - uint(1))
        zeros, underflow, overflow = 0, 0, 0
        for i in range(n):
            before, after = uint(x[i] & magnitude_mask), uint(r[i] & magnitude_mask)
            zeros += before == zero
            underflow += (before != zero) & (after == zero)
            overflow += (before < infinity) & ((after >= infinity) | (before > highest))
        c[0] += zeros
        c[1] += underflow
        c[2] += overflow

    loop._cache = _Cache(loop.py_func, (size,))
    return loop  # type: ignore[no-any-return]


# What a pass over a tensor gathers: raw sums in a row of float64, one row for each part of the tensor.
MOMENTS = (
    "count",
    "nonzero",
    "sum",
    "square_sum",
    "minimum",
    "maximum",
    "amax",
    "amin",
    "log_sum",
    "log_square_sum",
)


@cache
def moments_loop(size: int, only_amax: bool, logs: bool) -> Callable[..., None]:
    """Gather MOMENTS of `n` numbers of `size` bytes from address `src` into ten float64 at `row`.

    The extremes go by bit patterns, which vectorise; so do the sums, because their order is left to the compiler.
    amax is inf where a number is not finite; amin is 0 where none is above 0. only_amax: the other fields stay.
    """
    uint, sint, floating = (np.uint32, np.int32, np.float32) if size == 4 else (np.uint64, np.int64, np.float64)
    container = rounding.BINARY32 if size == 4 else rounding.BINARY64
    magnitude_mask = uint((1 << (8 * size - 1)) - 1)
    sign_shift, one, zero = sint(8 * size - 1), uint(1), uint(0)
    infinity, nothing = uint(container.bits(float("inf"))), uint((1 << (8 * size)) - 1)

    @njit(nogil=True, fastmath={"reassoc"})
    def loop(src, n, row):  # type: ignore[no-untyped-def]
        bits = carray(_pointer(src), (n,), uint)
        values = carray(_pointer(src), (n,), floating)
        out = carray(_pointer(row), (10,), np.float64)
        scratch = np.empty(4, floating)
        words = scratch.view(uint)
        amax = zero
        if only_amax:
            for i in range(n):
                amax = max(amax, uint(bits[i] & magnitude_mask))
        else:
            nonzero, amin, lowest, highest = 0, nothing, sint(magnitude_mask), sint(~sint(magnitude_mask))
            total, squares, logs_total, log_squares = 0.0, 0.0, 0.0, 0.0
            for i in range(n):
                magnitude = uint(bits[i] & magnitude_mask)
                amax = max(amax, magnitude)
                amin = min(amin, uint(magnitude - one))  # zero wraps around to the largest
                nonzero += magnitude != zero
                word = sint(bits[i])
                ordered = sint(word ^ sint(sint(word >> sign_shift) & sint(magnitude_mask)))
                lowest, highest = min(lowest, ordered), max(highest, ordered)
                value = np.float64(values[i])
                total += value
                squares += value * value
                if logs and magnitude != zero:
                    log = math.log(abs(value))
                    logs_total += log
                    log_squares += log * log
            words[1] = uint(amin + one)
            words[2] = uint(lowest ^ sint(sint(lowest >> sign_shift) & sint(magnitude_mask)))
            words[3] = uint(highest ^ sint(sint(highest >> sign_shift) & sint(magnitude_mask)))
            whole, some = np.float64(max(n, 1)), np.float64(max(nonzero, 1))
            out[0], out[1], out[2], out[3] = n, nonzero, total / whole, squares / whole
            out[4], out[5] = (np.float64(scratch[2]), np.float64(scratch[3])) if n > 0 else (0.0, 0.0)
            out[7] = np.float64(scratch[1]) if nonzero > 0 else 0.0
            out[8], out[9] = logs_total / some, log_squares / some
        words[0] = min(amax, infinity)
        out[6] = np.float64(scratch[0])

    loop._cache = _Cache(loop.py_func, (size, only_amax, logs))
    return loop  # type: ignore[no-any-return]


@cache
def exponents_loop(size: int) -> Callable[..., None]:
    """Count `n` numbers from address `src` by binade into int64 at `bins`: bin f holds 2**(f-b) < |x| <= 2**(f-b+1).

    f is the exponent field of the next smaller magnitude, b the bias, so that a power of two ends its bin: at a
    threshold of that kind a tie falls. Zero, inf and NaN are not counted.
    """
    uint = np.uint32 if size == 4 else np.uint64
    container = rounding.BINARY32 if size == 4 else rounding.BINARY64
    magnitude_mask = uint((1 << (8 * size - 1)) - 1)
    infinity, mantissa_bits = uint(container.bits(float("inf"))), uint(container.mantissa_bits)

    @njit(nogil=True)
    def loop(src, n, bins):  # type: ignore[no-untyped-def]
        bits = carray(_pointer(src), (n,), uint)
        out = carray(_pointer(bins), (2 << (8 * size - 2 - container.mantissa_bits),), np.int64)
        for i in range(n):
            magnitude = uint(bits[i] & magnitude_mask)
            if uint(0) < magnitude < infinity:
                out[uint(magnitude - uint(1)) >> mantissa_bits] += 1

    loop._cache = _Cache(loop.py_func, (size,))
    return loop  # type: ignore[no-any-return]


MOMENTS_BLOCKS = 128  # of a fixed number, so that the sums' order, and with it their last bit, is the same every time


def cuda_moments_kernel(logs: bool) -> Callable[..., None]:
    """The body of the CUDA kernel that gathers MOMENTS of a flat array, one row of `rows` for each block."""
    _cuda()
    from numba import float64

    fields, threads, infinity = len(MOMENTS), CUDA_THREADS, math.inf

    def kernel(x, n, rows):  # type: ignore[no-untyped-def]
        shared = cuda.shared.array((fields, threads), float64)
        t = cuda.threadIdx.x
        count, nonzero, total, squares, logs_total, log_squares = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        lowest, highest, amax, amin = infinity, -infinity, 0.0, infinity
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            value = float64(x[i])
            magnitude = abs(value)
            count += 1.0
            total += value
            squares += value * value
            lowest, highest = min(lowest, value), max(highest, value)
            amax = max(amax, magnitude) if magnitude < infinity else infinity
            if magnitude > 0.0:
                nonzero += 1.0
                amin = min(amin, magnitude)
                if logs:
                    log = math.log(magnitude)
                    logs_total += log
                    log_squares += log * log
        # sums while they are joined; the means come last
        row = (count, nonzero, total, squares, lowest, highest, amax, amin, logs_total, log_squares)
        for field in range(fields):
            shared[field, t] = row[field]
        cuda.syncthreads()
        half = threads // 2
        while half > 0:
            if t < half:
                for field in range(fields):
                    a, b = shared[field, t], shared[field, t + half]
                    if field == 4 or field == 7:
                        shared[field, t] = min(a, b)
                    elif field == 5 or field == 6:
                        shared[field, t] = max(a, b)
                    else:
                        shared[field, t] = a + b
            cuda.syncthreads()
            half //= 2
        if t == 0:
            count, nonzero = max(shared[0, 0], 1.0), max(shared[1, 0], 1.0)
            for field in range(fields):
                value = shared[field, 0]
                if field == 2 or field == 3:
                    value /= count
                elif field > 7:
                    value /= nonzero
                rows[cuda.blockIdx.x, field] = value

    return kernel


def cuda_amax_kernel() -> Callable[..., None]:
    """The body of the CUDA kernel for the largest magnitude of each block's share: inf for what is not finite."""
    _cuda()
    from numba import float64

    threads, infinity = CUDA_THREADS, math.inf

    def kernel(x, n, rows):  # type: ignore[no-untyped-def]
        shared = cuda.shared.array(threads, float64)
        t = cuda.threadIdx.x
        amax = 0.0
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            magnitude = abs(float64(x[i]))
            amax = max(amax, magnitude) if magnitude < infinity else infinity
        shared[t] = amax
        cuda.syncthreads()
        half = threads // 2
        while half > 0:
            if t < half:
                shared[t] = max(shared[t], shared[t + half])
            cuda.syncthreads()
            half //= 2
        if t == 0:
            rows[cuda.blockIdx.x, 6] = shared[0]

    return kernel


def cuda_exponents_kernel(size: int) -> Callable[..., None]:
    """The body of the CUDA kernel that counts by binade as `exponents_loop` does; `bits` is flat and unsigned."""
    _cuda()
    uint = np.uint32 if size == 4 else np.uint64
    container = rounding.BINARY32 if size == 4 else rounding.BINARY64
    magnitude_mask = uint((1 << (8 * size - 1)) - 1)
    infinity, mantissa_bits = uint(container.bits(float("inf"))), uint(container.mantissa_bits)

    def kernel(bits, n, bins):  # type: ignore[no-untyped-def]
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            magnitude = uint(bits[i] & magnitude_mask)
            if uint(0) < magnitude < infinity:
                cuda.atomic.add(bins, uint(magnitude - uint(1)) >> mantissa_bits, 1)

    return kernel


@cache
def cuda_moments(only_amax: bool, logs: bool) -> Callable[..., None]:
    """The compiled kernel with its launch: (x, n, rows, stream), rows: (MOMENTS_BLOCKS, 10) float64."""
    kernel = _cuda().jit(cuda_amax_kernel() if only_amax else cuda_moments_kernel(logs))

    def launch(x: Any, n: int, rows: Any, stream: Any) -> None:
        kernel[MOMENTS_BLOCKS, CUDA_THREADS, stream](x, n, rows)

    return launch


@cache
def cuda_exponents(size: int) -> Callable[..., None]:
    """The compiled kernel with its launch: (bits, n, bins, stream)."""
    kernel = _cuda().jit(cuda_exponents_kernel(size))

    def launch(bits: Any, n: int, bins: Any, stream: Any) -> None:
        kernel[MOMENTS_BLOCKS, CUDA_THREADS, stream](bits, n, bins)

    return launch


@cache
def cuda_scalar(function: types_module.FunctionType) -> Callable[..., None]:
    """A Python function over small arrays as a kernel of one thread: (stream, *arrays). Decisions stay on the card."""
    # the simulator runs Python over arrays of its own kind, which nothing compiled can take
    compiled = _cuda().jit(function if numba.config.ENABLE_CUDASIM else for_device(function))

    def launch(stream: Any, *arrays: Any) -> None:
        compiled[1, 1, stream](*arrays)

    return launch


def for_device(function: types_module.FunctionType) -> types_module.FunctionType:
    """A copy of a Python function in which those that it calls are inlined."""

    def of(value: Any) -> Any:
        return njit(inline="always")(for_device(value)) if isinstance(value, types_module.FunctionType) else value

    code = function.__code__
    used = {name: of(value) for name, value in function.__globals__.items() if name in code.co_names}
    cells = tuple(types_module.CellType(of(cell.cell_contents)) for cell in function.__closure__ or ())
    inside = {**function.__globals__, **used}
    return types_module.FunctionType(code, inside, function.__name__, function.__defaults__, cells)
