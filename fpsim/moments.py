"""Moments, range and exponents of a tensor, each in one pass, left on its device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpsim import kernels, ops
from fpsim.kernels import MOMENTS

__all__ = ["Moments", "amax_of", "binades", "keep_memory_of", "memory_of", "moments_of", "on_device"]


class Moments(NamedTuple):
    """What one pass over a tensor tells; as a tensor, ten float64 in this order.

    mean_square is the raw second moment, so that the variance is mean_square - mean**2. amax and amin are the largest
    and the smallest non-zero magnitude, amin 0 where all is zero. log_mean and log_mean_square are those of log|x| over
    non-zero elements, where they were asked for, else 0. Where an element is not finite amax is inf, and the rest says
    nothing; all is 0 for an empty tensor.
    """

    count: float  # type: ignore[assignment]  # a field here, a method of tuple there
    nonzero: float
    mean: float
    mean_square: float
    minimum: float
    maximum: float
    amax: float
    amin: float
    log_mean: float = 0.0
    log_mean_square: float = 0.0

    @property
    def variance(self) -> float:
        """Of the population: E[x**2] - E[x]**2."""
        return max(self.mean_square - self.mean * self.mean, 0.0)


# Below this many elements the hand-over to a second thread costs more than it saves.
PARALLEL_FROM = {True: 1 << 21, False: 1 << 19}  # by whether only amax is wanted


def _join(rows, only_amax, out):  # type: ignore[no-untyped-def]
    """Join the moments of a tensor's parts; runs in Python over the memory, and as a CUDA kernel of one thread."""
    infinity = float("inf")
    count, nonzero, total, squares, logs, log_squares = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    lowest, highest, amax, amin = infinity, -infinity, 0.0, infinity
    for i in range(rows.shape[0]):
        amax = max(amax, rows[i, 6])
        if only_amax[0] == 0 and rows[i, 0] > 0.0:
            count += rows[i, 0]
            nonzero += rows[i, 1]
            total += rows[i, 2] * rows[i, 0]
            squares += rows[i, 3] * rows[i, 0]
            lowest, highest = min(lowest, rows[i, 4]), max(highest, rows[i, 5])
            if 0.0 < rows[i, 7] < infinity:
                amin = min(amin, rows[i, 7])
            logs += rows[i, 8] * rows[i, 1]
            log_squares += rows[i, 9] * rows[i, 1]
    out[6] = amax
    if only_amax[0] == 0:
        out[0], out[1] = count, nonzero
        out[2], out[3] = (total / count, squares / count) if count > 0.0 else (0.0, 0.0)
        out[4], out[5] = (lowest, highest) if count > 0.0 else (0.0, 0.0)
        out[7] = amin if amin < infinity else 0.0
        out[8], out[9] = (logs / nonzero, log_squares / nonzero) if nonzero > 0.0 else (0.0, 0.0)


def moments_of(x: Tensor, logs: bool = False, out: Tensor | None = None) -> Tensor:
    """The `Moments` of `x` as ten float64 on its device, from one pass; nothing is copied to the host.

    x: any shape and strides, on the CPU or a CUDA device. logs: also those of log|x|, at thirty times the price on
    the CPU. out: where to put them.

    >>> Moments(*moments_of(torch.tensor([3.0, 0.0, -1.0])).tolist())[:8]
    (3.0, 2.0, 0.6666666666666666, 3.3333333333333335, -1.0, 3.0, 3.0, 1.0)
    """
    ops._require_floating(x)
    return _gather(x, False, logs, out)


def amax_of(x: Tensor, out: Tensor | None = None) -> Tensor:
    """The largest magnitude of `x`, inf if an element is not finite, in the amax field of ten float64; others stay.

    >>> float(amax_of(torch.tensor([3.0, -4.0]))[6])
    4.0
    """
    ops._require_floating(x)
    return _gather(x, True, False, out)


def _gather(x: Tensor, only_amax: bool, logs: bool, out: Tensor | None) -> Tensor:
    x = _flat(x)
    if out is None:
        out = torch.zeros(len(MOMENTS), dtype=torch.float64, device=x.device)
    n = x.numel()
    if x.is_cuda:
        rows = torch.zeros((kernels.MOMENTS_BLOCKS, len(MOMENTS)), dtype=torch.float64, device=x.device)
        with torch.cuda.device(x.device):
            stream = kernels.cuda_stream(torch.cuda.current_stream(x.device).cuda_stream)
            flat = x.detach().as_strided((n,), (1,))
            kernels.cuda_moments(only_amax, logs)(kernels.cuda_array(flat), n, kernels.cuda_array(rows), stream)
        on_device(_join, rows, _flag_on(x.device, only_amax), out)
        return out
    size, source = x.element_size(), x.data_ptr()
    loop = kernels.moments_loop(size, only_amax, logs)
    if n < PARALLEL_FROM[only_amax]:
        loop(source, n, out.data_ptr())
        return out
    parts = ops.parts_of(n)
    rows = torch.zeros((len(parts), len(MOMENTS)), dtype=torch.float64, device=x.device)
    row, step = rows.data_ptr(), 8 * len(MOMENTS)
    ops.run_parts(
        loop, [(source + first * size, length, row + i * step) for i, (first, length) in enumerate(parts)], x, rows
    )
    on_device(_join, rows, _flag_on(x.device, only_amax), out)
    return out


def binades(x: Tensor) -> tuple[Tensor, int]:
    """How many elements of `x` lie in each binade, as int64 on its device, and the binade of the first.

    Entry i counts 2**(first+i) < |x| <= 2**(first+i+1): a power of two ends its binade. Zeros, inf and NaN are left
    out; the first entry holds the container's subnormals, all of them, with its smallest normal.

    >>> counts, first = binades(torch.tensor([1.0, 1.5, 2.0, 0.0]))
    >>> {first + i: int(n) for i, n in enumerate(counts) if n}
    {-1: 1, 0: 2}
    """
    ops._require_floating(x)
    x = _flat(x)
    fields, bias = (256, 127) if x.dtype is torch.float32 else (2048, 1023)
    bins = torch.zeros(fields, dtype=torch.int64, device=x.device)
    if x.is_cuda:
        integer = torch.uint32 if x.dtype is torch.float32 else torch.uint64
        with torch.cuda.device(x.device):
            stream = kernels.cuda_stream(torch.cuda.current_stream(x.device).cuda_stream)
            flat = x.detach().as_strided((x.numel(),), (1,)).view(integer)
            arrays = kernels.cuda_array(flat), x.numel(), kernels.cuda_array(bins)
            kernels.cuda_exponents(x.element_size())(*arrays, stream)
    else:
        kernels.exponents_loop(x.element_size())(x.data_ptr(), x.numel(), bins.data_ptr())
    return bins, -bias


def _flat(x: Tensor) -> Tensor:
    """A tensor of the same numbers, in float32 or float64, whose memory has no holes."""
    if x.dtype is not torch.float32 and x.dtype is not torch.float64:
        x = x.detach().float()
    return x if x.is_contiguous() or ops._has_no_holes(x) else x.detach().contiguous()


def memory_of(x: Tensor) -> memoryview:
    """The memory of a CPU tensor, whose items are Python's numbers; at hand where `keep_memory_of` was called."""
    kept = getattr(x, "_fpsim_memory", None)
    return memoryview(x.numpy()) if kept is None else kept  # type: ignore[arg-type]


def keep_memory_of(x: Tensor) -> Tensor:
    """Ask once for the memory of a tensor that lives long and is used often; gives the tensor."""
    if x.device.type == "cpu":
        x._fpsim_memory = memoryview(x.numpy())  # type: ignore[attr-defined, arg-type]
    return x


_flags: dict[tuple[torch.device, bool], Tensor] = {}


def _flag_on(device: torch.device, flag: bool) -> Tensor:
    found = _flags.get((device, flag))
    if found is None:
        found = torch.full((1,), int(flag), dtype=torch.int64, device=device)
        _flags[device, flag] = keep_memory_of(found)
    return found


def on_device(function: Any, *arrays: Tensor) -> None:
    """Run a scalar function over small contiguous tensors of one device, where they are: it changes them in place.

    On the CPU the function is called with their memory, on a CUDA device as a kernel of one thread. It indexes its
    arguments and computes with numbers, `math` and other such functions: what Numba compiles for CUDA.
    """
    device = arrays[0].device
    if device.type == "cpu":
        function(*[memory_of(a) for a in arrays])
        return
    with torch.cuda.device(device):
        stream = kernels.cuda_stream(torch.cuda.current_stream(device).cuda_stream)
        views: list[Any] = [kernels.cuda_array(a) for a in arrays]
        kernels.cuda_scalar(function)(stream, *views)
