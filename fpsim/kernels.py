"""The loops over memory: one body, a CPU loop and a CUDA loop beneath it."""

from __future__ import annotations

import hashlib
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
from fpsim.rounding import NOISE_BLOCK, NOISE_LANES, NOISE_ROUNDS, STOCHASTIC, make_round, rotate_left, threefry

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


@cache
def cpu_loop(rule: int, shape: int, width: int) -> Callable[..., None]:
    """Round `n` patterns from address `src` to address `dst` (which may be `src`).

    `parameters` is the address of a Plan's integers, `key` that of two uint32 words; the noise starts at block
    `block`, so that a tensor cut at multiples of NOISE_BLOCK gets the same bits. Holds no lock, allocates no array
    but one block of noise.
    """
    round_bits = make_round(rule, shape, width)
    uint, sint = (np.uint32, np.int32) if width == 32 else (np.uint64, np.int64)
    to_top = uint(width - 32)

    def make_body(in_place: bool) -> Callable[..., None]:
        @njit(inline="always")
        def body(x, y, n, p, key, block):  # type: ignore[no-untyped-def]
            shift, origin, largest, overflow = sint(p[0]), sint(p[1]), uint(p[2]), uint(p[3])
            smallest, zero_sign, mask, odd = uint(p[4]), uint(p[5]), uint(p[6] << (width - 32)), uint(p[7])
            if rule == STOCHASTIC:
                noise = np.empty(NOISE_BLOCK, np.uint32)
                for start in range(0, n, NOISE_BLOCK):
                    fill_noise(noise, block, key[0], key[1])
                    block += 1
                    ys = y[start : start + NOISE_BLOCK]
                    xs = ys if in_place else x[start : start + NOISE_BLOCK]
                    for i in range(len(ys)):
                        bits = uint(uint(noise[i]) << to_top)
                        ys[i] = round_bits(
                            xs[i], bits, shift, origin, largest, overflow, smallest, zero_sign, mask, odd
                        )
            else:
                for i in range(n):
                    y[i] = round_bits(x[i], uint(0), shift, origin, largest, overflow, smallest, zero_sign, mask, odd)

        return body  # type: ignore[no-any-return]

    out_of_place, in_place = make_body(False), make_body(True)

    @njit(nogil=True)
    def loop(src, dst, n, parameters, key, block):  # type: ignore[no-untyped-def]
        p = carray(_pointer(parameters), (8,), np.int64)
        k = carray(_pointer(key), (2,), np.uint32)
        y = carray(_pointer(dst), (n,), uint)
        if src == dst:  # LLVM vectorises what it knows to be one array, and what it finds to be two at run time
            in_place(y, y, n, p, k, block)
        else:
            out_of_place(carray(_pointer(src), (n,), uint), y, n, p, k, block)

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

    `x` and `y` are flat arrays of unsigned integers; the parameters are a Plan's. A thread rounds one pattern, or under
    STOCHASTIC the eight whose noise comes from one counter.
    """
    _cuda()
    round_bits = make_round(rule, shape, width)
    uint, sint = (np.uint32, np.int32) if width == 32 else (np.uint64, np.int64)
    to_top = uint(width - 32)

    def kernel(x, y, n, shift, origin, largest, overflow, smallest, zero_sign, mask, odd, key0, key1):  # type: ignore[no-untyped-def]
        thread = cuda.grid(1)
        shift, origin, largest, overflow = sint(shift), sint(origin), uint(largest), uint(overflow)
        smallest, zero_sign, mask, odd = uint(smallest), uint(zero_sign), uint(mask << (width - 32)), uint(odd)
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
    """The compiled kernel with its launch: (x, y, n, parameters, key0, key1, stream)."""
    kernel = _cuda().jit(cuda_kernel(rule, shape, width))

    def launch(x: Any, y: Any, n: int, parameters: tuple[int, ...], key0: int, key1: int, stream: Any) -> None:
        threads = -(-n // NOISE_BLOCK) * NOISE_LANES if rule == STOCHASTIC else n
        blocks = -(-threads // CUDA_THREADS)
        kernel[blocks, CUDA_THREADS, stream](x, y, n, *map(np.int64, parameters), key0, key1)

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
