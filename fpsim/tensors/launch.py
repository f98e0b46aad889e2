"""Launch of a kernel on a tensor's memory: number of threads, stream, and copies to another container."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fpsim.kernels.codebooks import BookNumbers, any_plan, halves_of, table_address, table_at
from fpsim.kernels.containers import narrow_loop, power_loop, widen_loop
from fpsim.kernels.core import BINARY32, BINARY64, BOOK, NUMBERS, SEARCHED_BOOK, Plan
from fpsim.kernels.round import (
    ALIGNED,
    HAS_KEY,
    HAS_SCALE,
    NO_MASKS,
    Masks,
    cpu_fitting_loop,
    cpu_loop,
    cuda_loop,
    elements_of_block,
)
from fpsim.kernels.threefry import NOISE_BLOCK
from fpsim.tensors.noise import is_captured, new_key, new_key_for
from fpsim.tensors.spec import CONTAINERS, RoundingSpec, address_of, container_width, no_memory
from fpsim.torch_internals import current_stream_handle, has_no_holes

if TYPE_CHECKING:
    from fpsim.compiling.card import CudaKernel

# For fewer elements than this, a second thread costs more than it saves: 30 us for the hand-over, 0.2 ns an element.
PARALLEL_FROM = 1 << 18


class Kernel:
    """A Plan with its compiled CPU loop and the address of its integers. masks: patterns that stay as they are."""

    def __init__(self, plan: Plan, masks: Masks) -> None:
        self.plan, self.masks = plan, masks
        self._parameters = np.array(plan.numbers, np.int64)
        self.address = self._parameters.ctypes.data

    @cached_property
    def loop(self) -> Any:
        return cpu_loop(self.plan.rule, self.plan.shape, self.plan.width, self.masks).native

    @cached_property
    def on_card(self) -> tuple[CudaKernel, int, tuple[int, ...]]:
        """CUDA kernel, the number of elements that a block of its threads rounds, and the plan's numbers."""
        rule, shape, width, numbers = self.plan
        return cuda_loop(rule, shape, width, self.masks), elements_of_block(rule, width), numbers

    @cached_property
    def fitting_loop(self) -> Any:
        return cpu_fitting_loop(self.plan.rule, self.plan.shape, self.plan.width).native


@cache
def kernel_for(spec: RoundingSpec, width: int, masks: Masks = NO_MASKS) -> Kernel:
    """Return the kernel that rounds numbers in a container of `width` bits."""
    return Kernel(any_plan(spec.fmt, spec.rounding, spec.overflow, spec.random_bits, width, spec.variant), masks)


def masks_of(spec: RoundingSpec, dtype: torch.dtype, width: int, keep_infinity: bool = True) -> Masks:
    """Return the patterns that stand for a mask in tensors of this dtype, in a container of `width` bits.

    Models write `torch.finfo(x.dtype).min` or -inf at positions that attention has to ignore. These values are not
    numbers of the computation: a format with less range must neither turn them into inf nor saturate them to a
    number that attention would see.

    keep_infinity: whether -inf is a mask, and was not computed from numbers.
    """
    if dtype is not torch.float32 and dtype is not torch.float64:
        # A 16-bit dtype is real, not emulated: the model chose its range.
        return NO_MASKS
    container = BINARY32 if width == 32 else BINARY64
    return Masks(container.bits(torch.finfo(dtype).max), keep_infinity and spec.saturates)


_known: dict[tuple[str, torch.dtype, bool, bool], tuple[Kernel | None, torch.dtype]] = {}


def _kernel_and_container(
    spec: RoundingSpec, dtype: torch.dtype, keep_masks: bool, keep_infinity: bool
) -> tuple[Kernel | None, torch.dtype]:
    """Return the kernel that rounds tensors of a dtype (None if there is nothing to do), and its container's dtype."""
    key = (spec.text, dtype, keep_masks, keep_infinity)
    width = container_width(spec, dtype)
    masks = masks_of(spec, dtype, width, keep_infinity) if keep_masks and width else NO_MASKS
    kernel = kernel_for(spec, width, masks) if width else None
    # Two threads may come here at once: with `setdefault`, both get the same kernel.
    return _known.setdefault(key, (kernel, CONTAINERS.get(width, dtype)))


_IS_ROCM = torch.version.hip is not None
_BEYOND_FLOAT64 = 4400  # log2 of a scale beyond all of float64, which spans 2**-1074 to 2**1024

_NO_KEY = np.zeros(2, np.uint32)
_NO_SCALE = np.zeros(1, np.int64)
# The addresses are cached, because asking NumPy for an address takes 0.8 us.
NO_KEY_ADDRESS, _NO_SCALE_ADDRESS = _NO_KEY.ctypes.data, _NO_SCALE.ctypes.data


class _Pool(ThreadPoolExecutor):
    # `submit` is bound now: the emulation patches ThreadPoolExecutor.submit to watch other pools.
    submit = ThreadPoolExecutor.submit


_pools: dict[int, _Pool] = {}


def thread_pool() -> _Pool:
    """Return the threads that run the parts of a large tensor."""
    # The pools are keyed by process: a forked DataLoader worker inherits the object, but not its threads.
    pid = os.getpid()
    pool = _pools.get(pid)
    # Two Python threads may come here at once; the executor that loses has no work, and therefore no threads.
    if pool is None:
        pool = _pools.setdefault(pid, _Pool(os.cpu_count() or 1, thread_name_prefix="fpsim"))
    return pool


def _run_part(future: Future[Any], loop: Any, arguments: tuple[Any, ...], *kept_alive: Any) -> None:
    """Run one thread's part.

    kept_alive: the tensors whose memory must stay allocated: Ctrl-C in the caller must not free memory that a thread
        writes to.
    """
    # False means that the caller has cancelled the part, and runs it itself.
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(loop(*arguments))
    except BaseException as error:
        future.set_exception(error)


def _hand_over(loop: Any, arguments: tuple[Any, ...], *kept_alive: Any) -> Future[Any]:
    # The future is made here, not by `submit`: if no thread can start, `submit` raises, but may have queued the part.
    future: Future[Any] = Future()
    # `submit` raises RuntimeError at the interpreter's end, or at a limit of threads: the part stays with the caller.
    with suppress(RuntimeError):
        thread_pool().submit(_run_part, future, loop, arguments, *kept_alive)
    return future


def launch(src: Tensor, dst: Tensor, kernel: Kernel, key: Tensor | None, log2_scale: Tensor | None = None) -> None:
    """Round the memory of `src` into the memory of `dst`. Both have the same dtype, device and order, and no holes."""
    n = src.numel()
    # An address on another device would crash the process.
    if log2_scale is not None and log2_scale.device != src.device:
        log2_scale = log2_scale.to(src.device)
    if src.is_cuda:
        launch_on_card(src, dst, n, kernel, key, log2_scale)
        return
    scale_address = _NO_SCALE_ADDRESS if log2_scale is None else log2_scale.data_ptr()
    key_address = NO_KEY_ADDRESS if key is None else key.data_ptr()
    # `data_ptr` is called once for an in-place rounding, because each call takes time that counts for small tensors.
    source = target = src.data_ptr()
    if dst is not src:
        target = dst.data_ptr()
    if not (source and target and key_address and scale_address) and n:
        raise no_memory(dst if source else src)
    if n < PARALLEL_FROM:
        kernel.loop(source, target, n, kernel.address, key_address, 0, scale_address)
        return
    size = kernel.plan.width // 8
    parts = [
        (
            source + first * size,
            target + first * size,
            length,
            kernel.address,
            key_address,
            first // NOISE_BLOCK,
            scale_address,
        )
        for first, length in parts_of(n)
    ]
    run_parts(kernel.loop, parts, src, dst, kernel, key, log2_scale)


def rounded_number(x: float, spec: RoundingSpec) -> float:
    """Round a Python number as an element of a float64 tensor, without a tensor that a mode could see."""
    kernel, _ = _kernel_and_container(spec, torch.float64, False, True)
    if kernel is None:
        return x
    number = np.array([x], np.float32 if kernel.plan.width == 32 else np.float64)
    address = number.ctypes.data
    kernel.loop(address, address, 1, kernel.address, NO_KEY_ADDRESS, 0, _NO_SCALE_ADDRESS)
    return float(number[0])


def parts_of(n: int) -> list[tuple[int, int]]:
    """Return the first element, a multiple of NOISE_BLOCK, and the length of each thread's part of `n` elements."""
    threads = torch.get_num_threads() if n >= PARALLEL_FROM else 1
    # Parts are whole blocks of noise, so that random bits do not depend on the number of threads.
    per_thread = -(-n // (threads * NOISE_BLOCK)) * NOISE_BLOCK
    return [(first, min(per_thread, n - first)) for first in range(0, max(n, 1), max(per_thread, 1))]


def run_parts(loop: Any, parts: Sequence[tuple[Any, ...]], *kept_alive: Any) -> list[Any]:
    """Call a compiled loop for each part, the first part in this thread and the others in the pool; return the results.

    A part that no thread has begun when the first part ends runs in this thread too.
    """
    others = [_hand_over(loop, part, *kept_alive) for part in parts[1:]]
    results = [loop(*parts[0])]
    for part, other in zip(parts[1:], others, strict=True):
        results.append(loop(*part) if other.cancel() else other.result())
    return results


def run_on_card(loop: CudaKernel, x: Tensor, blocks: int, arguments: tuple[float, ...]) -> None:
    """Launch a CUDA kernel on the device of `x`, on torch's current stream there."""
    if _IS_ROCM:
        raise NotImplementedError(
            "A tensor on an AMD GPU was given, which torch calls cuda too: the kernels are for NVIDIA's. "
            "Expected: move the tensor to the CPU with .cpu()."
        )
    device = x.get_device()
    if device == torch.cuda.current_device():
        loop(device, current_stream_handle(device), blocks, arguments)
        return
    with torch.cuda.device(device):
        loop(device, current_stream_handle(device), blocks, arguments)


def key_arguments(key: Tensor | None) -> tuple[int, int, int]:
    """Return a kernel's arguments for a noise key: (address, 1, 0) for a key on a card, else (0, 0, the 64 bits)."""
    if key is None:
        return 0, 0, 0
    return (address_of(key), 1, 0) if key.is_cuda else (0, 0, int(key.item()))


_tables: dict[tuple[int, int], Tensor] = {}  # tables of code books, by the address on the CPU and the card


def on_card(shape: int, parameters: tuple[int, ...], x: Tensor, places: tuple[int, ...] = (0,)) -> tuple[int, ...]:
    """Return a plan's integers; for a code book, with the address of the book's table on the card of `x`.

    shape: the shape of the Plan. places: the indices in `parameters` at which the Numbers of a Plan begin. Raises
        RuntimeError if the table would have to be copied while a CUDA graph is captured.
    """
    if shape not in (BOOK, SEARCHED_BOOK):
        return parameters
    words = list(parameters)
    for place in places:
        book = BookNumbers(*words[place : place + NUMBERS])
        key = table_address(book), x.get_device()
        table = _tables.get(key)
        if table is None:
            table = _tables.setdefault(key, _copied(key[0], x))
        low, high = halves_of(address_of(table))
        words[place : place + NUMBERS] = book._replace(low=low, high=high)
    return tuple(words)


def _copied(address: int, x: Tensor) -> Tensor:
    if is_captured(x):
        raise RuntimeError(
            "A code book whose table is not on the card yet was asked for while a CUDA graph is captured, when nothing "
            "can be copied. Run the same code once before, or fpsim.warm_up(device, formats, roundings)."
        )
    words = table_at(address)
    copied = torch.from_numpy(words.view(np.int32 if words.itemsize == 4 else np.int64)).to(x.device)
    # The table is cached, and other streams read it too.
    torch.cuda.current_stream(x.device).synchronize()
    return copied


def launch_on_card(
    src: Tensor, dst: Tensor, n: int, kernel: Kernel, key: Tensor | None, log2_scale: Tensor | None = None
) -> None:
    """Launch a kernel on a card, as `launch` does, without allocating, and reading only the memory of the arguments."""
    if n == 0:
        return
    source, target = address_of(src), address_of(dst)
    flags = 0 if (source | target) & 15 else ALIGNED
    scale = key_address = word = 0
    if log2_scale is not None:
        flags, scale = flags | HAS_SCALE, address_of(log2_scale)
    if key is not None:
        key_address, has_address, word = key_arguments(key)
        flags |= HAS_KEY * has_address
    # Both tensors are treated as flat memory, because they have the same strides.
    loop, per_block, numbers = kernel.on_card
    parameters = on_card(kernel.plan.shape, numbers, src)
    words = (source, target, scale, key_address, n, flags, word, *parameters)
    run_on_card(loop, src, -(-n // per_block), words)


def round_memory_(
    x: Tensor,
    spec: RoundingSpec,
    key: Tensor | None = None,
    log2_scale: Tensor | None = None,
    keep_masks: bool = False,
    keep_infinity: bool = True,
) -> None:
    """Round the memory of `x` in place, below autograd and without a bump of its version counter.

    key: the key of the noise; None draws a new key.
    log2_scale: an int64 on the device of `x`, within `log2_scale_limits`: the result is round(x * 2**log2_scale) /
        2**log2_scale.
    keep_masks: whether masks stay as they are. keep_infinity: whether -inf is such a mask: see masks_of.
    """
    # Kernels are looked up by the text of the spec, because a string caches its hash.
    known = _known.get((spec.text, x.dtype, keep_masks, keep_infinity))
    kernel, container = known or _kernel_and_container(spec, x.dtype, keep_masks, keep_infinity)
    if kernel is None or x.numel() == 0:
        return
    if spec.rounding == "stochastic":
        key = new_key_for(x) if key is None else key
        # Noise depends on the logical index, so that memory has to be in logical order.
        direct = x.is_contiguous()
    else:
        direct = x.is_contiguous() or has_no_holes(x)
    if direct and x.dtype is container:
        launch(x, x, kernel, key, log2_scale)
    else:
        memory = _each_once(x.detach().data)
        memory.copy_(rounded(memory, spec, key, log2_scale, keep_masks, keep_infinity))


def rounds_in_place(spec: RoundingSpec, keep_infinity: bool) -> Callable[[Tensor, int], None]:
    """Return `round_memory_` with masks, specialised to one spec, for callers that round many small results.

    The returned function takes a float32 tensor on the CPU, and the address of its memory.
    """
    kernel, container = _kernel_and_container(spec, torch.float32, True, keep_infinity)

    def round_any_(x: Tensor, start: int) -> None:
        round_memory_(x, spec, None, None, True, keep_infinity)

    if kernel is None or container is not torch.float32 or spec.rounding == "stochastic":
        return round_any_
    address = kernel.address

    def round_(x: Tensor, start: int) -> None:
        n = x.numel()
        if start and 0 < n < PARALLEL_FROM and x.is_contiguous():
            kernel.loop(start, start, n, address, NO_KEY_ADDRESS, 0, _NO_SCALE_ADDRESS)
        else:
            round_any_(x, start)

    return round_


def _each_once(x: Tensor) -> Tensor:
    """Return `x` without the dimensions in which it was expanded, so that each number of its memory occurs once."""
    for i, (step, size) in enumerate(zip(x.stride(), x.shape, strict=True)):
        if step == 0 and size > 1:
            x = x.narrow(i, 0, 1)
    return x


def round_fitting_(x: Tensor, spec: RoundingSpec, log2_scale: Tensor, ceiling: float) -> float | None:
    """Round as `round_memory_` does, and return the largest magnitude from the same pass; inf if one is not finite.

    Elements above `ceiling` stay as they are. If there are any, the caller has to round all elements at another scale.
    The function returns None, and does nothing, on a card, for another dtype than the container's, and for tensors with
    holes, because these cases have no loop.
    """
    n, width = x.numel(), container_width(spec, x.dtype)
    is_stochastic = spec.rounding == "stochastic"
    in_order = x.is_contiguous() or (not is_stochastic and has_no_holes(x))
    if width == 0 or x.dtype is not CONTAINERS[width] or not in_order or not x.is_cpu:
        return None
    kernel, key = kernel_for(spec, width), new_key() if is_stochastic and n else None
    source, scale, size = address_of(x), address_of(log2_scale), width // 8
    rest = kernel.address, NO_KEY_ADDRESS if key is None else key.data_ptr()
    if n < PARALLEL_FROM:
        return kernel.fitting_loop(source, n, *rest, 0, scale, ceiling)  # type: ignore[no-any-return]
    parts = [
        (source + first * size, length, *rest, first // NOISE_BLOCK, scale, ceiling) for first, length in parts_of(n)
    ]
    return max(run_parts(kernel.fitting_loop, parts, x, kernel, key, log2_scale))


def rounded(
    x: Tensor,
    spec: RoundingSpec,
    key: Tensor | None = None,
    log2_scale: Tensor | None = None,
    keep_masks: bool = False,
    keep_infinity: bool = True,
) -> Tensor:
    """Return a rounded copy of `x` with its dtype, and with its strides if it has no holes.

    The arguments are those of `round_memory_`.
    """
    known = _known.get((spec.text, x.dtype, keep_masks, keep_infinity))
    kernel, container = known or _kernel_and_container(spec, x.dtype, keep_masks, keep_infinity)
    if kernel is None:
        return x.detach().clone()
    if spec.rounding == "stochastic" and key is None:
        key = new_key_for(x)
    direct = x.is_contiguous() or (spec.rounding != "stochastic" and has_no_holes(x))
    if x.dtype is container and direct:
        out = torch.empty_like(x)
        launch(x, out, kernel, key, log2_scale)
        return out
    wide = _wider_copy(x.detach(), container)
    launch(wide, wide, kernel, key, log2_scale)
    result = _narrower(wide, x.dtype)
    if result.dtype is x.dtype and x.is_contiguous():
        return result
    return torch.empty_like(x, requires_grad=False).copy_(result)


def _wider_copy(x: Tensor, container: torch.dtype) -> Tensor:
    if container is torch.float64 and x.dtype is not torch.float64:
        return to_float64(x)
    return x.to(container, memory_format=torch.contiguous_format, copy=True)


def _narrower(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of a float64 container on the CPU as float32, for a narrower `dtype`; else return `x`."""
    if not x.is_cpu or x.dtype is not torch.float64 or dtype is torch.float64:
        return x
    out = torch.empty_like(x, dtype=torch.float32)
    source, target = address_of(x), address_of(out)
    parts = [(source + 8 * first, target + 4 * first, length) for first, length in parts_of(x.numel())]
    run_parts(narrow_loop(), parts, x, out)
    return out


def ldexp(x: Tensor, log2_scale: Tensor) -> Tensor:
    """Return a float64 tensor times 2**log2_scale, on any device, rounded at most once. torch.ldexp overflows early."""
    # With exponents beyond 2100, everything but zero becomes inf or 0.
    left, powers = log2_scale.long().clamp(-2100, 2100), []
    for _ in range(3):
        part = left.clamp(-1022, 1023)
        left = left - part
        powers.append(((part + 1023) << 52).view(torch.float64))  # a power of two by its pattern
    # The largest power comes last, so that a number is rounded once: intermediate products are normal, unless the
    # result is 0.
    last, *first = powers
    for power in first:
        x = x * power
    return x * last


def to_float64(x: Tensor, log2_scale: int | Tensor = 0) -> Tensor:
    """Return `x` times 2**log2_scale as contiguous float64, independent of the processor's treatment of subnormals.

    Each number is exact unless it leaves the range of float64: it becomes inf beyond the range, and is rounded to
    nearest even below it.

    x: a tensor of any floating dtype, which is returned itself if there is nothing to do.
    log2_scale: an integer, or a tensor on the device of `x`, which is not copied to the host from a card.
    """
    x = x.detach().resolve_neg()
    is_scaled = isinstance(log2_scale, Tensor) or log2_scale != 0
    if not x.is_cpu:
        wide = x.to(torch.float64).contiguous()
        return ldexp(wide, torch.as_tensor(log2_scale, device=x.device)) if is_scaled else wide
    if x.dtype is torch.float64:
        out = x.clone(memory_format=torch.contiguous_format) if is_scaled else x.contiguous()
    else:
        # For 16 bits, torch shifts the pattern, and flushes nothing.
        x = x.to(torch.float32).contiguous()
        out = torch.empty_like(x, dtype=torch.float64)
        source, target = address_of(x), address_of(out)
        parts = [(source + 4 * first, target + 8 * first, length) for first, length in parts_of(x.numel())]
        run_parts(widen_loop(), parts, x, out)
    if is_scaled:
        scale, target = max(-_BEYOND_FLOAT64, min(int(log2_scale), _BEYOND_FLOAT64)), out.data_ptr()
        run_parts(power_loop(), [(target + 8 * first, length, scale) for first, length in parts_of(out.numel())], out)
    return out
