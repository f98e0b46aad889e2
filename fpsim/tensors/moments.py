"""Moments, range and exponents of a tensor, each from one pass, left on its device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fpsim.kernels.moments import (
    FIELDS,
    cuda_exponents,
    cuda_moments,
    exponents_loop,
    moments_loop,
    partial_words,
)
from fpsim.kernels.statistics import (
    AMAX,
    AMIN,
    COUNT,
    LOG_MEAN,
    LOG_MEAN_SQUARE,
    MAXIMUM,
    MEAN,
    MEAN_SQUARE,
    MINIMUM,
    NONZERO,
    Moments,
)
from fpsim.tensors.launch import parts_of, run_on_card, run_parts
from fpsim.tensors.spec import address_of, no_memory, require_floating
from fpsim.torch_internals import has_no_holes

__all__ = ["Moments", "amax_of", "binades", "keep_memory_of", "memory_of", "moments_of", "on_device"]


# For fewer elements than this, the hand-over to a second thread costs more than it saves.
PARALLEL_FROM = {True: 1 << 21, False: 1 << 19}  # the key says whether only amax is wanted


def join_rows(rows, only_amax, out):  # type: ignore[no-untyped-def]
    """Join the moments of a tensor's parts on the CPU, in Python. On a card, the kernel's last block joins them."""
    # Sums are added, not means, because parts differ in length.
    infinity = float("inf")
    count, nonzero, total, squares, logs, log_squares = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    lowest, highest, amax, amin = infinity, -infinity, 0.0, infinity
    for i in range(rows.shape[0]):
        amax = max(amax, rows[i, AMAX])
        if only_amax[0] == 0 and rows[i, COUNT] > 0.0:
            count += rows[i, COUNT]
            nonzero += rows[i, NONZERO]
            total += rows[i, MEAN] * rows[i, COUNT]
            squares += rows[i, MEAN_SQUARE] * rows[i, COUNT]
            lowest, highest = min(lowest, rows[i, MINIMUM]), max(highest, rows[i, MAXIMUM])
            if 0.0 < rows[i, AMIN] < infinity:
                amin = min(amin, rows[i, AMIN])
            logs += rows[i, LOG_MEAN] * rows[i, NONZERO]
            log_squares += rows[i, LOG_MEAN_SQUARE] * rows[i, NONZERO]
    out[AMAX] = amax
    if only_amax[0] == 0:
        out[COUNT], out[NONZERO] = count, nonzero
        out[MEAN], out[MEAN_SQUARE] = (total / count, squares / count) if count > 0.0 else (0.0, 0.0)
        out[MINIMUM], out[MAXIMUM] = (lowest, highest) if count > 0.0 else (0.0, 0.0)
        out[AMIN] = amin if amin < infinity else 0.0
        out[LOG_MEAN], out[LOG_MEAN_SQUARE] = (logs / nonzero, log_squares / nonzero) if nonzero > 0.0 else (0.0, 0.0)


def moments_of(x: Tensor, logs: bool = False, out: Tensor | None = None) -> Tensor:
    """Return the `Moments` of `x` as ten float64 on its device, from one pass; nothing is copied to the host.

    x: a tensor of any shape and strides, on the CPU or a CUDA device.
    logs: whether to compute the moments of log|x| too, which takes thirty times as long on the CPU.
    out: the tensor to write to.

    A CPU that flushes subnormals (torch.set_flush_denormal) may count float64's subnormals as zeros in the sums.

    >>> Moments(*moments_of(torch.tensor([3.0, 0.0, -1.0])).tolist())[:8]
    (3.0, 2.0, 0.6666666666666666, 3.3333333333333335, -1.0, 3.0, 3.0, 1.0)
    """
    require_floating(x)
    return _gather(x, False, logs, out)


def amax_of(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the largest magnitude of `x` in the amax field of ten float64; inf if an element is not finite.

    The other fields stay as they are.

    >>> float(amax_of(torch.tensor([3.0, -4.0]))[6])
    4.0
    """
    require_floating(x)
    return _gather(x, True, False, out)


def _gather(x: Tensor, only_amax: bool, logs: bool, out: Tensor | None) -> Tensor:
    x = _flat(x)
    if out is None:
        out = torch.zeros(FIELDS, dtype=torch.float64, device=x.device)
    n = x.numel()
    if x.is_cuda:
        from fpsim.compiling.card import array_words

        size, source = x.element_size(), address_of(x)
        blocks, integers, floats = partial_words(n, size)
        # The memory is zeroed, because the first integer counts the blocks that are done.
        rows = torch.zeros(integers, dtype=torch.int64, device=x.device)
        sums = torch.empty(floats, dtype=torch.float64, device=x.device)
        words = array_words(rows.data_ptr(), (integers,), 8)
        arguments = source, n, int(source % 16 == 0), *words, sums.data_ptr(), address_of(out)
        run_on_card(cuda_moments(size, only_amax, logs), x, blocks, arguments)
        return out
    size, source = x.element_size(), x.data_ptr()
    if not source and n:
        raise no_memory(x)
    loop = moments_loop(size, only_amax, logs)
    if n < PARALLEL_FROM[only_amax]:
        loop(source, n, out.data_ptr())
        return out
    parts = parts_of(n)
    rows = torch.zeros((len(parts), FIELDS), dtype=torch.float64, device=x.device)
    row, step = rows.data_ptr(), 8 * FIELDS
    run_parts(
        loop, [(source + first * size, length, row + i * step) for i, (first, length) in enumerate(parts)], x, rows
    )
    on_device(join_rows, rows, _flag_on(x.device, only_amax), out)
    return out


def binades(x: Tensor, power_begins: bool = False) -> tuple[Tensor, int]:
    """Count the elements of `x` in each binade; return the counts, int64 on its device, and the binade of entry 0.

    Entry i counts 2**(first+i) < |x| <= 2**(first+i+1): a power of two ends its binade. Zeros, inf and NaN are left
    out. The first entry contains all subnormals of the container, and its smallest normal number.

    power_begins: entry i counts 2**(first+i) <= |x| < 2**(first+i+1) instead, and the first entry counts only the
        subnormals.

    >>> counts, first = binades(torch.tensor([1.0, 1.5, 2.0, 0.0]))
    >>> {first + i: int(n) for i, n in enumerate(counts) if n}
    {-1: 1, 0: 2}
    >>> counts, first = binades(torch.tensor([1.0, 1.5, 2.0, 0.0]), power_begins=True)
    >>> {first + i: int(n) for i, n in enumerate(counts) if n}
    {0: 2, 1: 1}
    """
    require_floating(x)
    x = _flat(x)
    fields, bias = (256, 127) if x.dtype is torch.float32 else (2048, 1023)
    bins = torch.zeros(fields, dtype=torch.int64, device=x.device)
    if x.is_cuda:
        from fpsim.compiling.card import array_words

        source, n, size = address_of(x), x.numel(), x.element_size()
        arguments = source, n, int(source % 16 == 0), *array_words(bins.data_ptr(), (fields,), 8)
        run_on_card(cuda_exponents(size, power_begins), x, partial_words(n, size)[0], arguments)
    else:
        exponents_loop(x.element_size(), power_begins)(address_of(x), x.numel(), bins.data_ptr())
    return bins, -bias


def _flat(x: Tensor) -> Tensor:
    """Return a tensor with the same numbers, in float32 or float64, whose memory has no holes."""
    if x.dtype is not torch.float32 and x.dtype is not torch.float64:
        x = x.detach().float()
    return x if x.is_contiguous() or has_no_holes(x) else x.detach().contiguous()


def memory_of(x: Tensor) -> memoryview:
    """Return a memoryview of a CPU tensor: its items read as Python numbers. It is cached after `keep_memory_of`."""
    kept = getattr(x, "_fpsim_memory", None)
    return memoryview(x.numpy()) if kept is None else kept  # type: ignore[arg-type]


def keep_memory_of(x: Tensor) -> Tensor:
    """Cache the memoryview of a tensor that lives long and is used often; returns the tensor."""
    if x.device.type == "cpu":
        x._fpsim_memory = memoryview(x.numpy())  # type: ignore[attr-defined, arg-type]
    return x


# Flags are cached only on the CPU: a flag on a card would be filled on the stream of the first call, and read on
# others.
_FLAGS = [keep_memory_of(torch.full((1,), flag, dtype=torch.int64, device="cpu")) for flag in range(2)]


def _flag_on(device: torch.device, flag: bool) -> Tensor:
    """Return a flag in the memory of a device, filled on the current stream."""
    if device.type == "cpu":
        return _FLAGS[flag]
    return torch.full((1,), int(flag), dtype=torch.int64, device=device)


def on_device(function: Any, *arrays: Tensor) -> None:
    """Run a scalar function on the device of some small contiguous tensors, which the function changes in place.

    On the CPU the function is called with the memory of the tensors. On a CUDA device it runs as a kernel of one
    thread. The function may index its arguments and compute with numbers, `math` and other such functions, as far as
    Numba compiles these for CUDA.
    """
    device = arrays[0].device
    if device.type == "cpu":
        function(*[memory_of(a) for a in arrays])
        return
    from fpsim.compiling.card import array_words, scalar_kernel

    kernel = scalar_kernel(function, tuple((str(a.dtype).removeprefix("torch."), a.dim()) for a in arrays))
    words = (word for a in arrays for word in array_words(address_of(a), tuple(a.shape), a.element_size()))
    run_on_card(kernel, arrays[0], 1, tuple(words))
