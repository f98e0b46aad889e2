"""The door to torch and NumPy: `round_to` and its relatives."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from fpsim import kernels
from fpsim.formats import FloatFormat, as_format
from fpsim.rounding import NOISE_BLOCK, ROUNDINGS, Plan, make_plan, needs_wider_container, scale_limits

__all__ = ["Rounder", "RoundingSpec", "decode", "encode", "manual_seed", "round_to", "round_to_"]

_CONTAINERS = {32: torch.float32, 64: torch.float64}  # by width
FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# Below this many elements a second thread costs more than it saves: 30 us for the hand-over, 0.2 ns an element.
PARALLEL_FROM = 1 << 18
# Up to this many elements a second pass over the tensor costs less than a Python autograd node.
SMALL = 1 << 15


@dataclass(frozen=True)
class RoundingSpec:
    """What is done to a number: format, rounding rule, overflow and random bits, checked and complete."""

    fmt: FloatFormat
    rounding: str = "nearest_even"
    overflow: str = "inf"
    random_bits: int | None = None
    text: str = field(init=False, compare=False, repr=False)
    format_text: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        words = [str(self.fmt), self.rounding]
        if self.overflow != self.fmt.resolve_overflow():
            words.append(self.overflow)
        if self.random_bits:
            words.append(f"{self.random_bits} random bits")
        object.__setattr__(self, "text", " ".join(words))  # equal for equal specifications
        object.__setattr__(self, "format_text", repr(self.fmt))

    def __str__(self) -> str:
        return self.text

    def __hash__(self) -> int:
        return hash(self.text)  # kept by the string; the kernel is looked up in every call


@lru_cache(maxsize=None, typed=True)  # typed: True is no number of bits
def rounding_spec(
    fmt: str | FloatFormat,
    rounding: str = "nearest_even",
    overflow: str | None = None,
    random_bits: int | None = None,
) -> RoundingSpec:
    """Check and complete the words of `round_to`."""
    f = as_format(fmt)
    if rounding not in ROUNDINGS:
        raise ValueError(f"Unknown rounding {rounding!r}. Known: {', '.join(ROUNDINGS)}.")
    if random_bits is not None:
        if rounding != "stochastic":
            raise ValueError(f"random_bits={random_bits!r} came with rounding={rounding!r}; only 'stochastic' uses it.")
        if isinstance(random_bits, bool) or not isinstance(random_bits, int) or not 1 <= random_bits <= 32:
            raise ValueError(f"random_bits={random_bits!r} is impossible. Possible: 1 to 32, or None for 32.")
    return RoundingSpec(f, rounding, f.resolve_overflow(overflow), random_bits)


def _operator_words(
    fmt: str | FloatFormat, rounding: str, overflow: str | None, random_bits: int | None
) -> tuple[str, str, str, int]:
    """The operator's arguments, as constants of a compiled graph: torch.compile cannot trace how they are found."""
    spec = rounding_spec(fmt, rounding, overflow, random_bits)
    return spec.format_text, spec.rounding, spec.overflow, spec.random_bits or 0


# What torch.compiler.assume_constant_result does, without its import of torch._dynamo, which takes a second.
_operator_words._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Kernel:
    """A Plan with its compiled CPU loop and the address of its integers."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._parameters = np.array(plan.parameters, np.int64)
        self.address = self._parameters.ctypes.data
        self.loop = kernels.cpu_loop(plan.rule, plan.shape, plan.width)

    @cached_property
    def fitting_loop(self) -> Any:
        return kernels.cpu_fitting_loop(self.plan.rule, self.plan.shape, self.plan.width)


@cache
def _kernel(spec: RoundingSpec, width: int) -> _Kernel:
    return _Kernel(make_plan(spec.fmt, spec.rounding, spec.overflow, spec.random_bits, width))


@cache
def _width_for(spec: RoundingSpec, dtype: torch.dtype) -> int:
    """Width of the container in which `dtype` is rounded; 0 where there is nothing to do.

    Raises TypeError for a dtype that cannot hold every value of the format.
    """
    if dtype is torch.float64:
        return 64
    f = spec.fmt
    info = torch.finfo(dtype)
    precision = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}[dtype]
    smallest = f.min_exponent - f.mantissa_bits
    if f.mantissa_bits > precision or f.largest > info.max or 2.0**smallest < info.smallest_normal * 2**-precision:
        raise TypeError(
            f"A {str(dtype).removeprefix('torch.')} tensor cannot hold every value of {f}. "
            f"Possible here: float32 or float64. Convert it with x.float() first."
        )
    if f == as_format("fp32") and spec.overflow == "inf":
        return 0
    return 64 if needs_wider_container(f) else 32


# Noise keys. By default they are drawn from torch's own CPU generator, so that torch.manual_seed, fork_rng,
# get_rng_state and activation checkpointing reach the noise as they reach dropout.
_generator: torch.Generator | None = None


def manual_seed(seed: int | None) -> None:
    """Give the noise of stochastic rounding a stream of its own, seeded with `seed`.

    Without a call the noise follows `torch.manual_seed`; `manual_seed(None)` returns to that. Code under
    `torch.compile` always follows `torch.manual_seed`.

    >>> x = torch.full((4,), 1.5)
    >>> manual_seed(0); first = round_to(x, "e5m0", "stochastic")
    >>> manual_seed(0); torch.equal(first, round_to(x, "e5m0", "stochastic"))
    True
    >>> manual_seed(None)
    """
    global _generator
    _generator = None if seed is None else torch.Generator().manual_seed(seed)


@contextmanager
def noise_of_torch() -> Iterator[None]:
    """Inside, noise follows `torch.manual_seed`; the stream of `manual_seed`, if there is one, goes on afterwards."""
    global _generator
    own, _generator = _generator, None
    try:
        yield
    finally:
        _generator = own


def _new_key() -> Tensor:
    """64 bits that name one call, on the CPU."""
    return torch.empty((), dtype=torch.int64, device="cpu").random_(generator=_generator)


def _new_traceable_key() -> Tensor:
    """The same by one operation that returns, as tracers and transforms want it."""
    own: dict[str, Any] = {} if _generator is None or torch.compiler.is_compiling() else {"generator": _generator}
    return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu", **own)


_NO_KEY = np.zeros(2, np.uint32)
_NO_SCALE = np.zeros(1, np.int64)
_NO_KEY_ADDRESS, _NO_SCALE_ADDRESS = _NO_KEY.ctypes.data, _NO_SCALE.ctypes.data  # asked for once: it takes 0.8 us
_pools: dict[int, ThreadPoolExecutor] = {}


def _pool() -> ThreadPoolExecutor:
    # keyed by process: a forked DataLoader worker inherits the object, not its threads
    pid = os.getpid()
    pool = _pools.get(pid)
    if pool is None:  # two Python threads may come here at once; an executor without work has no threads
        pool = _pools.setdefault(pid, ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="fpsim"))
    return pool


def _run_part(loop: Any, arguments: tuple[Any, ...], *kept_alive: Any) -> Any:
    """One thread's part. It holds the tensors: Ctrl-C in the caller must not free memory that is written to."""
    return loop(*arguments)


def _launch(src: Tensor, dst: Tensor, kernel: _Kernel, key: Tensor | None, log2_scale: Tensor | None = None) -> None:
    """Round the memory of `src` into that of `dst`: same dtype, device and order, both without holes."""
    n = src.numel()
    if src.is_cuda:
        _launch_cuda(src, dst, n, kernel.plan, key, log2_scale)
        return
    scale_address = _NO_SCALE_ADDRESS if log2_scale is None else log2_scale.data_ptr()
    size = kernel.plan.width // 8
    key_address = _NO_KEY_ADDRESS if key is None else key.data_ptr()
    source, target = src.data_ptr(), dst.data_ptr()
    if n < PARALLEL_FROM:
        kernel.loop(source, target, n, kernel.address, key_address, 0, scale_address)
        return
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


def parts_of(n: int) -> list[tuple[int, int]]:
    """Where each thread's part of `n` elements begins, at a multiple of NOISE_BLOCK, and its length."""
    threads = torch.get_num_threads() if n >= PARALLEL_FROM else 1
    per_thread = -(-n // (threads * NOISE_BLOCK)) * NOISE_BLOCK
    return [(first, min(per_thread, n - first)) for first in range(0, max(n, 1), max(per_thread, 1))]


def run_parts(loop: Any, parts: Sequence[tuple[Any, ...]], *kept_alive: Any) -> list[Any]:
    """Call a compiled loop for each part, all but the first in the pool, and give what it gave."""
    others = [_pool().submit(_run_part, loop, part, *kept_alive) for part in parts[1:]]
    first = loop(*parts[0])
    return [first, *(other.result() for other in others)]


@cache
def _no_scale_on(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)


def _launch_cuda(
    src: Tensor, dst: Tensor, n: int, plan: Plan, key: Tensor | None, log2_scale: Tensor | None = None
) -> None:
    if n == 0:
        return
    integer = torch.uint32 if plan.width == 32 else torch.uint64
    word = 0 if key is None else int(key)
    with torch.cuda.device(src.device), torch.no_grad():
        stream = kernels.cuda_stream(torch.cuda.current_stream(src.device).cuda_stream)
        # as flat memory, whatever the strides: the two tensors have the same ones
        x, y = (t.detach().as_strided((n,), (1,)).view(integer) for t in (src, dst))
        launch = kernels.cuda_loop(plan.rule, plan.shape, plan.width)
        scale = _no_scale_on(src.device) if log2_scale is None else log2_scale.reshape(1)
        launch(*map(kernels.cuda_array, (x, y, scale)), n, plan.parameters, word & 0xFFFFFFFF, word >> 32, stream)


def _has_no_holes(x: Tensor) -> bool:
    return x.is_contiguous() or x.permute(*sorted(range(x.dim()), key=x.stride, reverse=True)).is_contiguous()


def log2_scale_limits(spec: RoundingSpec, dtype: torch.dtype) -> tuple[int, int]:
    """Between which exponents of a scale a tensor of this dtype can be rounded; (0, 0) where it cannot be scaled."""
    if dtype not in (torch.float32, torch.float64):
        return 0, 0
    return scale_limits(spec.fmt, 32 if dtype is torch.float32 else 64)


def round_memory_(x: Tensor, spec: RoundingSpec, key: Tensor | None = None, log2_scale: Tensor | None = None) -> None:
    """Round the memory of `x` in place, below autograd and without a trace in its version counter.

    log2_scale: an int64 on the device of `x`, within `log2_scale_limits`: round(x * 2**log2_scale) / 2**log2_scale.
    """
    width = _width_for(spec, x.dtype)
    if width == 0 or x.numel() == 0:
        return
    if spec.rounding == "stochastic":
        key = _new_key() if key is None else key
        direct = x.is_contiguous()  # noise goes by the logical index, so memory order must be logical order
    else:
        direct = _has_no_holes(x)
    if direct and x.dtype is _CONTAINERS[width]:
        _launch(x, x, _kernel(spec, width), key, log2_scale)
    else:
        x.detach().data.copy_(_rounded(x, spec, key, log2_scale))


def round_fitting_(x: Tensor, spec: RoundingSpec, log2_scale: Tensor, ceiling: float) -> float | None:
    """`round_memory_` that looks for the largest magnitude in the same pass and gives it, inf for what is not finite.

    Elements above `ceiling` stay as they are; if there is one, it is for the caller to round all at another scale.
    None, and nothing done, where there is no such loop: on a card, not in the container's dtype, not in one piece.
    """
    n, width = x.numel(), _width_for(spec, x.dtype)
    is_stochastic = spec.rounding == "stochastic"
    in_order = x.is_contiguous() or (not is_stochastic and _has_no_holes(x))
    if width == 0 or x.dtype is not _CONTAINERS[width] or not in_order or not x.is_cpu:
        return None
    kernel, key = _kernel(spec, width), _new_key() if is_stochastic and n else None
    source, scale, size = x.data_ptr(), log2_scale.data_ptr(), width // 8
    rest = kernel.address, _NO_KEY_ADDRESS if key is None else key.data_ptr()
    if n < PARALLEL_FROM:
        return kernel.fitting_loop(source, n, *rest, 0, scale, ceiling)  # type: ignore[no-any-return]
    parts = [
        (source + first * size, length, *rest, first // NOISE_BLOCK, scale, ceiling) for first, length in parts_of(n)
    ]
    return max(run_parts(kernel.fitting_loop, parts, x, kernel, key, log2_scale))


def _rounded(x: Tensor, spec: RoundingSpec, key: Tensor | None = None, log2_scale: Tensor | None = None) -> Tensor:
    """A rounded copy of `x` with its dtype and, where it has no holes, its strides."""
    width = _width_for(spec, x.dtype)
    if width == 0:
        return x.detach().clone()
    if spec.rounding == "stochastic" and key is None:
        key = _new_key()
    container = _CONTAINERS[width]
    direct = x.is_contiguous() or (spec.rounding != "stochastic" and _has_no_holes(x))
    if x.dtype is container and direct:
        out = torch.empty_like(x, requires_grad=False)
        _launch(x, out, _kernel(spec, width), key, log2_scale)
        return out
    wide = x.detach().to(container, memory_format=torch.contiguous_format, copy=True)
    _launch(wide, wide, _kernel(spec, width), key, log2_scale)
    return torch.empty_like(x, requires_grad=False).copy_(wide)


# The operator that torch.compile, FakeTensorMode and functorch see.


@torch.library.custom_op("fpsim::round", mutates_args=())
def _round_op(x: Tensor, fmt: str, rounding: str, overflow: str, random_bits: int, key: Tensor | None) -> Tensor:
    return _rounded(x, rounding_spec(fmt, rounding, overflow, random_bits or None), key)


@_round_op.register_fake
def _(x: Tensor, fmt: str, rounding: str, overflow: str, random_bits: int, key: Tensor | None) -> Tensor:
    _width_for(rounding_spec(fmt, rounding, overflow, random_bits or None), x.dtype)
    return torch.empty_like(x)


@_round_op.register_vmap
def _(info: Any, in_dims: Any, x: Tensor, *rest: Any) -> tuple[Tensor, int | None]:
    *words, key = rest
    dim, key_dim = in_dims[0], in_dims[-1]
    if key is None:
        return torch.ops.fpsim.round(x, *words, None), dim
    if key_dim is not None:  # randomness="different": one key serves, an element's index tells the samples apart
        key = key.select(key_dim, 0)
        if dim is None:
            x, dim = x.expand(info.batch_size, *x.shape), 0
    elif dim is not None:  # randomness="same": every sample starts from the same noise
        return torch.stack([torch.ops.fpsim.round(sample, *words, key) for sample in x.unbind(dim)]), 0
    return torch.ops.fpsim.round(x, *words, key), dim


def _setup_op(ctx: Any, inputs: Any, output: Any) -> None:
    pass


def _backward_op(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return gradient, None, None, None, None, None


_round_op.register_autograd(_backward_op, setup_context=_setup_op)


def _is_plain(x: Tensor) -> bool:
    """No transform, tracer or subclass is watching, and memory holds the values: the kernel may be called at once."""
    return (
        (type(x) is Tensor or type(x) is nn.Parameter)
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and not (x.is_neg() or x._is_zerotensor())  # type: ignore[operator]
        and (x.is_cpu or x.is_cuda)
    )


def _forward(x: Tensor, spec: RoundingSpec, key: Tensor | None) -> Tensor:
    if _is_plain(x):
        return _rounded(x, spec, key)
    if key is None and spec.rounding == "stochastic":
        key = _new_traceable_key()
    return torch.ops.fpsim.round(x, spec.format_text, spec.rounding, spec.overflow, spec.random_bits or 0, key)  # type: ignore[no-any-return]


class StraightThrough(torch.autograd.Function):
    """Round forward; let the gradient pass, or round it too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, spec: RoundingSpec | None, backward_spec: RoundingSpec | None) -> Tensor:
        return x.view_as(x) if spec is None else _forward(x, spec, None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.backward_spec = inputs[2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        if ctx.backward_spec is not None:
            gradient = _round_differentiably(gradient, ctx.backward_spec)
        return gradient, None, None


class _StraightThroughBothModes(StraightThrough):
    """The same, and tangents pass in forward mode. A class of its own: torch.compile refuses any with a jvp."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return tangent.view_as(tangent)


def _straight_through(x: Tensor, spec: RoundingSpec | None, backward_spec: RoundingSpec | None) -> Tensor:
    node = StraightThrough if torch.compiler.is_compiling() else _StraightThroughBothModes
    return node.apply(x, spec, backward_spec)  # type: ignore[no-any-return]


def _round_differentiably(x: Tensor, spec: RoundingSpec, log2_scale: Tensor | None = None) -> Tensor:
    if not _is_plain(x):
        return _straight_through(x, spec, None)
    if x.requires_grad and torch.is_grad_enabled():
        if x.numel() >= SMALL and log2_scale is None:
            return StraightThrough.apply(x, spec, None)  # type: ignore[no-any-return]
        out = x.clone()  # its backward is the straight-through gradient: 6 us a call, 20 less than a Function
        round_memory_(out, spec, None, log2_scale)
        return out
    return _rounded(x, spec, None, log2_scale)


def _require_floating(x: Any, name: str = "x") -> None:
    if isinstance(x, np.ndarray):
        raise TypeError(f"{name} is a numpy.ndarray. Possible here: a torch.Tensor; torch.from_numpy({name}) is one.")
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{name} is {type(x).__name__}. Possible: a torch.Tensor or a numpy.ndarray; wrap it with torch.as_tensor."
        )
    if x.layout is not torch.strided:
        raise TypeError(
            f"{name} has layout {str(x.layout).removeprefix('torch.')}. Possible: dense tensors. "
            f"Round its values: torch.sparse_coo_tensor(x.indices(), round_to(x.values(), ...), x.shape)."
        )
    if x.dtype not in FLOATING:
        raise TypeError(
            f"{name} has dtype {str(x.dtype).removeprefix('torch.')}. Possible: float32, float64, float16, bfloat16. "
            + ("Round x.real and x.imag." if x.dtype.is_complex else "Convert it with x.float().")
        )
    if x.device.type not in ("cpu", "cuda", "meta"):
        raise TypeError(f"{name} is on device {x.device}. Possible: cpu, cuda. Move it with x.cpu().")


def _require_out(out: Any, x: Any) -> None:
    """`out` fits `x`: two tensors, or two arrays."""
    library = "torch" if isinstance(x, Tensor) else "numpy"
    for what in ("dtype", "device", "shape"):
        came, wanted = getattr(out, what, None), getattr(x, what, None)  # NumPy 1 has no devices
        if came != wanted:
            if what == "shape":
                came, wanted = tuple(out.shape), tuple(x.shape)
            raise ValueError(f"out has {what} {came}, x has {wanted}. They must agree: {library}.empty_like(x) does.")
    if isinstance(out, Tensor):
        strides, is_contiguous = out.stride(), out.is_contiguous()
    else:
        strides, is_contiguous = out.strides, out.flags.c_contiguous
    if not is_contiguous:
        raise ValueError(
            f"out has strides {strides}, which is not contiguous. "
            f"Use {library}.empty(x.shape, dtype=x.dtype), or leave out= away."
        )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors share some of their memory, but not all."""
    distance = abs(a.data_ptr() - b.data_ptr())
    return 0 < distance < a.numel() * a.element_size()


@overload
def round_to(
    x: Tensor,
    fmt: str | FloatFormat,
    rounding: str = ...,
    overflow: str | None = ...,
    random_bits: int | None = ...,
    out: Tensor | None = ...,
) -> Tensor: ...
@overload
def round_to(
    x: np.ndarray[Any, Any],
    fmt: str | FloatFormat,
    rounding: str = ...,
    overflow: str | None = ...,
    random_bits: int | None = ...,
    out: np.ndarray[Any, Any] | None = ...,
) -> np.ndarray[Any, Any]: ...
def round_to(
    x: Any,
    fmt: str | FloatFormat,
    rounding: str = "nearest_even",
    overflow: str | None = None,
    random_bits: int | None = None,
    out: Any = None,
) -> Any:
    """Round every element of `x` to a value of `fmt`, kept in the dtype of `x`.

    NaN stays NaN; -0 keeps its sign where the format has one. Beyond the largest value the result is inf in formats
    that have one and the largest value in others; `overflow` ("inf", "nan", "saturate") chooses. float64 is rounded
    directly, never through float32. The gradient passes through unchanged (straight-through).

    x: float32, float64, float16 or bfloat16 tensor or ndarray, any shape and strides, on the CPU or a CUDA device.
    rounding: "nearest_even", "nearest_away", "toward_zero", "up", "down", "to_odd" or "stochastic".
    random_bits: for "stochastic", how many random bits decide (1 to 32); None uses every discarded bit up to 32.
    out: a contiguous tensor of the same shape, dtype and device to write to; no gradient then.
    Returns the same shape, dtype and device. Raises ValueError for words it does not know, TypeError for tensors it
    cannot round, among them a dtype that cannot hold every value of the format.

    >>> round_to(torch.tensor([1.0, 65519.0, 65520.0, -1e-8]), "fp16")
    tensor([1.0000e+00, 6.5504e+04,        inf, -0.0000e+00])
    >>> round_to(np.array([0.3, 500.0]), "e4m3fn")
    array([3.125e-01, 4.480e+02])
    """
    if torch.compiler.is_compiling() and isinstance(x, Tensor) and out is None:
        _require_floating(x)
        words = _operator_words(fmt, rounding, overflow, random_bits)
        key = _new_traceable_key() if rounding == "stochastic" else None
        return torch.ops.fpsim.round(x, *words, key)
    spec = rounding_spec(fmt, rounding, overflow, random_bits)
    if type(x) is Tensor and x.dtype is torch.float32 and out is None and not x.requires_grad and _is_plain(x):
        if x.layout is torch.strided:
            return _rounded(x, spec)
    if isinstance(x, np.ndarray):
        return _round_ndarray(x, spec, out)
    _require_floating(x)
    if out is None:
        return _round_differentiably(x, spec)
    _require_floating(out, "out")
    _require_out(out, x)
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise ValueError("out= keeps no gradient, and x or out requires one. Leave out= away, or use torch.no_grad().")
    if not _is_plain(x) or not _is_plain(out):
        return out.copy_(_round_differentiably(x, spec))
    width = _width_for(spec, x.dtype)
    if width == 0:
        return out.copy_(x.detach())
    direct = x.is_contiguous() and x.dtype is _CONTAINERS[width]
    if direct and not _overlap(x, out):
        _launch(x, out, _kernel(spec, width), _new_key() if spec.rounding == "stochastic" else None)
        torch.autograd.graph.increment_version(out)
        return out
    return out.copy_(_rounded(x, spec))


def _round_ndarray(x: np.ndarray[Any, Any], spec: RoundingSpec, out: Any) -> np.ndarray[Any, Any]:
    if x.dtype not in (np.float32, np.float64, np.float16) or not x.dtype.isnative:
        raise TypeError(
            f"x has dtype {x.dtype}. Possible: float32, float64, float16 in native byte order. "
            f"Convert it with x.astype(numpy.float32)."
        )
    if out is None:
        rounded = torch.from_numpy(np.array(x, order="C"))
        round_memory_(rounded, spec)
        return rounded.numpy()
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out is {type(out).__name__} and x a numpy.ndarray. Give an ndarray: numpy.empty_like(x).")
    _require_out(out, x)
    out[...] = _round_ndarray(x, spec, None)
    return out


def round_to_(
    x: Tensor,
    fmt: str | FloatFormat,
    rounding: str = "nearest_even",
    overflow: str | None = None,
    random_bits: int | None = None,
) -> Tensor:
    """Round `x` in place and return it: `round_to` without a second copy, any strides.

    The gradient passes through unchanged. A leaf that requires a gradient is refused, as torch does.

    >>> x = torch.tensor([[1.0, 2.1], [3.3, 4.0]])
    >>> round_to_(x.T, "e5m2"); x
    tensor([[1.0000, 3.5000],
            [2.0000, 4.0000]])
    tensor([[1.0000, 2.0000],
            [3.5000, 4.0000]])
    """
    spec = rounding_spec(fmt, rounding, overflow, random_bits)
    _require_floating(x)
    if torch.is_grad_enabled() and x.requires_grad and (x if x._base is None else x._base).is_leaf:
        raise RuntimeError(
            "round_to_ came with a leaf that requires a gradient, or a view of one; an in-place change would lose its "
            "history. Use round_to(x), or torch.no_grad()."
        )
    if not _is_plain(x):
        return x.copy_(_round_differentiably(x, spec))
    round_memory_(x, spec)
    torch.autograd.graph.increment_version(x)
    return x


class Rounder(nn.Module):
    """A layer that rounds activations forward and their gradients backward, each to its own format.

    A format of None leaves that direction alone. Shapes and dtypes pass unchanged.

    >>> layer = Rounder(forward="e4m3fn", backward="e5m2")
    >>> x = torch.tensor([0.3], requires_grad=True)
    >>> (layer(x) * 1.3).backward(); x.grad
    tensor([1.2500])
    """

    def __init__(
        self,
        forward: str | FloatFormat | None = None,
        backward: str | FloatFormat | None = None,
        rounding: str = "nearest_even",
        backward_rounding: str | None = None,
        overflow: str | None = None,
        backward_overflow: str | None = None,
    ) -> None:
        super().__init__()
        self.forward_spec = None if forward is None else rounding_spec(forward, rounding, overflow)
        self.backward_spec = (
            None if backward is None else rounding_spec(backward, backward_rounding or rounding, backward_overflow)
        )

    def forward(self, x: Tensor) -> Tensor:
        _require_floating(x)
        return _straight_through(x, self.forward_spec, self.backward_spec)

    def extra_repr(self) -> str:
        return f"forward={self.forward_spec or 'float32'}, backward={self.backward_spec or 'float32'}"


# Codes


def encode(x: Tensor, fmt: str | FloatFormat, rounding: str = "nearest_even", overflow: str | None = None) -> Tensor:
    """Round `x` to a format of up to 16 bits and give the codes: int32, the shape of `x`.

    NaN gives the canonical (first quiet) NaN. Raises ValueError where a NaN comes and the format has none.

    >>> encode(torch.tensor([1.0, -448.0]), "e4m3fn")
    tensor([ 56, 254], dtype=torch.int32)
    """
    f = _codable(fmt)
    _require_floating(x)
    values, codes = map(torch.from_numpy, _code_table(f))
    rounded = round_to(x.detach().double(), f, rounding, overflow)
    if not f.has_nan and rounded.isnan().any():
        raise ValueError(f"x holds NaN and {f} has no code for it. Possible: finite values; see torch.nan_to_num.")
    table, index = values.to(x.device), codes.to(x.device)
    result = index[torch.searchsorted(table, rounded).clamp_(max=len(table) - 1)]
    special = torch.full_like(result, f.encode(float("nan")) if f.has_nan else 0)
    result = torch.where(rounded.isnan(), special, result)
    if f.has_negative_zero:
        result = torch.where((rounded == 0) & rounded.signbit(), special.fill_(f.encode(-0.0)), result)
    return result


def decode(codes: Tensor, fmt: str | FloatFormat) -> Tensor:
    """The float32 values of integer codes of a format of up to 16 bits, the shape of `codes`.

    >>> decode(torch.tensor([0x3C00, 0x7C00]), "fp16")
    tensor([1., inf])
    """
    f = _codable(fmt)
    if not isinstance(codes, Tensor):
        raise TypeError(f"codes is {type(codes).__name__}. Possible: a torch.Tensor; wrap it with torch.as_tensor.")
    if codes.dtype.is_floating_point or codes.dtype.is_complex or codes.dtype is torch.bool:
        raise TypeError(f"codes has dtype {str(codes.dtype).removeprefix('torch.')}. Possible: any integer dtype.")
    index = codes.long()
    if codes.numel() and not 0 <= int(index.min()) <= int(index.max()) < 2**f.bits:
        raise ValueError(
            f"codes holds {int(index.min())} to {int(index.max())}. The codes of {f} are 0 to {2**f.bits - 1}."
        )
    return torch.from_numpy(_value_table(f)).to(codes.device)[index]


def _codable(fmt: str | FloatFormat) -> FloatFormat:
    f = as_format(fmt)
    if f.bits > 16:
        raise ValueError(f"{f} has {f.bits} bits. encode() and decode() take formats of up to 16 bits.")
    return f


# Arrays, not tensors: a tensor would keep the device or the tracer under which it was first asked for.


@cache
def _value_table(f: FloatFormat) -> np.ndarray[Any, Any]:
    return np.array([f.decode(code) for code in range(2**f.bits)], np.float32)


@cache
def _code_table(f: FloatFormat) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Ascending values, inf included, and their codes."""
    values = [*f.values()]
    if f.has_inf:
        values = [-math.inf, *values, math.inf]
    return np.array(values), np.array([f.encode(v) for v in values], np.int32)
