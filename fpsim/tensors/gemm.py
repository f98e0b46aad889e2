"""Matrix products in an accumulator of any format: `matmul`, and `accumulate` below autograd."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from fpsim.formats.floats import FloatFormat, as_float_format
from fpsim.kernels.accumulate import Code, Sizes, cpu_loop, cuda_loop, memory_of, tiles
from fpsim.kernels.core import BINARY64, Plan, make_plan
from fpsim.kernels.sums import EXACT
from fpsim.tensors.accumulators import Accumulator, as_accumulator
from fpsim.tensors.autograd import require_no_forward_mode
from fpsim.tensors.launch import NO_KEY_ADDRESS, key_arguments, rounded, run_on_card, run_parts
from fpsim.tensors.noise import is_captured, new_key_for, new_traceable_key
from fpsim.tensors.reductions import reduced
from fpsim.tensors.spec import RoundingSpec, address_of, require_floating, rounding_spec
from fpsim.torch_internals import constant_under_compile, keep_none
from fpsim.torch_modes import PlainFunction, is_plain, layers_behind

__all__ = ["accumulate", "apply_accumulate_operator", "matmul"]

# For fewer terms than this, a second thread costs more than it saves: 30 us for the hand-over, about 1 ns a term.
PARALLEL_FROM = 1 << 17
# A product with fewer columns than this, and with more rows than columns, is computed as its transpose, so that vectors
# are full.
NARROW = 32


class Summation:
    """Arguments of an accumulator's kernels: compile-time constants, and the Numbers of three Plans."""

    def __init__(self, accumulator: Accumulator) -> None:
        f, outer = as_float_format(accumulator.format), as_float_format(accumulator.outer or accumulator.format)
        rounding, product_rounding, outer_rounding = accumulator.roundings
        p = make_plan(f, rounding, accumulator.overflow, *_noise(accumulator, f, rounding))
        overflow = accumulator.overflow if outer == f else None
        o = make_plan(outer, outer_rounding, overflow, *_noise(accumulator, outer, outer_rounding))
        q = Plan(EXACT, 0, 64, p.numbers)
        if accumulator.product is not None and product_rounding is not None:
            q = make_plan(
                as_float_format(accumulator.product),
                product_rounding,
                None,
                *_noise(accumulator, None, product_rounding),
            )
        grouped = 0 if accumulator.group is None else 1 if accumulator.sum_bits is None else 2
        self.code = Code(p.rule, p.shape, q.rule, q.shape, o.rule, o.shape, grouped)
        self.plans = p.numbers, q.numbers, o.numbers
        # The fields of Sizes from `chunk` on; exponents are stored as the exponent fields of a float64.
        a, b, *others = (0 if e is None else e + 1023 for e in accumulator.counted_exponents)
        lengths = tuple(
            n or 0 for n in (accumulator.chunk, accumulator.group, accumulator.group_bits, accumulator.sum_bits)
        )
        ulp_exponent = max(math.frexp(f.largest)[1] - 1, f.min_exponent) - f.mantissa_bits
        limit = BINARY64.bits(f.largest + math.ldexp(1.0, ulp_exponent))
        self.ends, self.turned_ends = (*lengths, a, b, *others, limit), (*lengths, b, a, *others, limit)
        self.is_stochastic = accumulator.is_stochastic

    @cached_property
    def loop(self) -> Any:
        return cpu_loop(self.code).native


def _noise(accumulator: Accumulator, fmt: FloatFormat | None, rounding: str) -> tuple[int | None, int, str]:
    """Return random bits, width and variant of a Plan.

    fmt: the format of a sum, which limits the number of random bits; None for products.
    """
    if rounding != "stochastic":
        return None, 64, "A"
    bits = accumulator.random_bits if fmt is None else accumulator.random_bits_of(fmt)
    return bits, 64, accumulator.variant


summation_of = cache(Summation)


def accumulate(
    a: Tensor, b: Tensor, accumulator: Accumulator, bias: Tensor | None = None, key: Tensor | None = None
) -> Tensor:
    """Return the product of batches of matrices in an accumulator, below autograd and without checks.

    a, b: (batch, rows, terms) and (batch, terms, columns), float32 on one device, of any strides.
    bias: (batch, rows, columns), of any strides, or None. It is added last: see `matmul`.
    key: the key of the noise of stochastic roundings, on the CPU; None draws a new key.
    Returns (batch, rows, columns) in float32, contiguous.
    """
    a, b, bias = a.detach(), b.detach(), None if bias is None else bias.detach()
    if accumulator.splits is not None:
        return _in_splits(a, b, accumulator, bias, key)
    if accumulator.order == "torch":
        product = torch.bmm(a, b)
        return product if bias is None else product.add_(bias)
    summation = summation_of(accumulator)
    if summation.is_stochastic and key is None:
        key = new_key_for(a)
    (batches, m, k), n = a.shape, b.shape[2]
    out = torch.empty((batches, m, n), dtype=torch.float32, device=a.device)
    if out.numel() == 0:
        return out
    target, ends = out, summation.ends
    # The product may be computed as its transpose, because multiplication commutes: the longer side goes along the
    # vectors.
    if n < NARROW and m > n:
        a, b, bias, target, m, n = b.mT, a.mT, None if bias is None else bias.mT, out.mT, n, m
        ends = summation.turned_ends
    of_bias = (0, 0, 0) if bias is None else bias.stride()
    strides = (*a.stride(), *b.stride(), *of_bias, *target.stride())
    sizes = Sizes._make((batches, m, n, k, *strides, int(bias is not None), *ends))
    run = _run_on_card if out.is_cuda else _run_on_cpu
    run(summation, sizes, key, a, b, out if bias is None else bias, out)
    return out


def _in_splits(a: Tensor, b: Tensor, accumulator: Accumulator, bias: Tensor | None, key: Tensor | None) -> Tensor:
    """Add up the terms of each rank's part, and then the sums of the parts as a collective does."""
    inner, spec = replace(accumulator, splits=None, split_format=None, split_order="ring"), _split_spec(accumulator)
    if inner.is_stochastic and key is None:
        key = new_key_for(a)
    ranks = accumulator.splits or 1
    pairs = [*zip(a.chunk(ranks, 2), b.chunk(ranks, 1), strict=True)]
    parts = [
        # Each rank has another key: otherwise the same elements of all parts would share their noise.
        rounded(accumulate(*pair, inner, None, None if key is None else key + rank), spec)
        for rank, pair in enumerate(pairs)
    ]
    # `chunk` returns fewer parts than ranks if there are few terms: the other ranks send zeros.
    parts += [torch.zeros_like(parts[0])] * (ranks - len(parts))
    total = reduced(parts, spec, accumulator.split_order)
    return total if bias is None else rounded(total.double() + bias.double(), spec).float()


@cache
def _split_spec(accumulator: Accumulator) -> RoundingSpec:
    is_same = accumulator.result_format == as_float_format(accumulator.format)  # as for an outer accumulator
    return rounding_spec(accumulator.result_format, overflow=accumulator.overflow if is_same else None)


def _run_on_cpu(summation: Summation, sizes: Sizes, key: Tensor | None, *tensors: Tensor) -> None:
    addresses = [address_of(x) for x in tensors]
    numbers = np.array((*sizes, *(integer for plan in summation.plans for integer in plan)), np.int64)
    rest = numbers.ctypes.data, NO_KEY_ADDRESS if key is None else key.data_ptr()
    count = tiles(sizes)
    work = sizes.batches * sizes.rows * sizes.columns * sizes.terms
    threads = min(count, torch.get_num_threads()) if work >= PARALLEL_FROM else 1
    ends = [count * i // threads for i in range(threads + 1)]
    # The memory is allocated here, one part for each thread: the loops allocate nothing but small tiles.
    memory, size = np.empty(threads * memory_of(sizes), np.uint8), memory_of(sizes)
    parts = [(*addresses, ends[i], ends[i + 1], *rest, memory.ctypes.data + i * size) for i in range(threads)]
    run_parts(summation.loop, parts, *tensors, numbers, key, memory)


def _run_on_card(summation: Summation, sizes: Sizes, key: Tensor | None, *tensors: Tensor) -> None:
    out = tensors[-1]
    addresses = [address_of(x if x.numel() else out) for x in tensors]
    plans = (integer for plan in summation.plans for integer in plan)
    loop, elements = cuda_loop(summation.code), sizes.batches * sizes.rows * sizes.columns
    words = *addresses, *sizes, *plans, *key_arguments(key)
    run_on_card(loop, out, -(-elements // loop.threads), words)


# The operator that torch.compile, FakeTensorMode and functorch see.


@torch.library.custom_op("fpsim::accumulate", mutates_args=())
def _accumulate_op(a: Tensor, b: Tensor, bias: Tensor | None, accumulator: str, key: Tensor | None) -> Tensor:
    return accumulate(a, b, as_accumulator(accumulator), bias, key)


@_accumulate_op.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None, accumulator: str, key: Tensor | None) -> Tensor:
    return a.new_empty((a.shape[0], a.shape[1], b.shape[2]))


@_accumulate_op.register_vmap
def _(
    info: Any, in_dims: Any, a: Tensor, b: Tensor, bias: Tensor | None, accumulator: str, key: Tensor | None
) -> tuple[Tensor, int]:
    n = info.batch_size
    a, b = _with_batch(a, in_dims[0], n), _with_batch(b, in_dims[1], n)
    bias = None if bias is None else _with_batch(bias, in_dims[2], n)
    # randomness="same": every sample starts from the same noise.
    if key is not None and in_dims[4] is None:
        biases = [None] * n if bias is None else bias.unbind()
        samples = zip(a.unbind(), b.unbind(), biases, strict=True)
        return torch.stack([torch.ops.fpsim.accumulate(x, y, c, accumulator, key) for x, y, c in samples]), 0
    # randomness="different": one key is enough, because the noise differs between elements.
    if key is not None:
        key = key.select(in_dims[4], 0)
    flat = (None if x is None else x.flatten(0, 1) for x in (a, b, bias))
    return torch.ops.fpsim.accumulate(*flat, accumulator, key).unflatten(0, (n, a.shape[1])), 0


def _with_batch(x: Tensor, dim: int | None, n: int) -> Tensor:
    return x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)


class Product(PlainFunction):
    """The operator with its gradients, which are products in the same accumulator."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, bias: Tensor | None, accumulator: str, key: Tensor | None) -> Tensor:
        return torch.ops.fpsim.accumulate(a, b, bias, accumulator, key)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, _, ctx.accumulator, key = inputs
        ctx.is_stochastic = key is not None
        keep_none(ctx)
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if dy is None:
            return None, None, None, None, None
        a, b = ctx.saved_tensors
        of_a, of_b = _gradient_words(ctx.accumulator)
        da = _apply(dy, b.mT, None, of_a, ctx.is_stochastic) if ctx.needs_input_grad[0] else None
        db = _apply(a.mT, dy, None, of_b, ctx.is_stochastic) if ctx.needs_input_grad[1] else None
        return da, db, dy if ctx.needs_input_grad[2] else None, None, None


def _apply(a: Tensor, b: Tensor, bias: Tensor | None, accumulator: str, is_stochastic: bool) -> Tensor:
    key = new_traceable_key(a) if is_stochastic else None
    return Product.apply(a, b, bias, accumulator, key)  # type: ignore[no-any-return]


def apply_accumulate_operator(a: Tensor, b: Tensor, bias: Tensor | None, accumulator: Accumulator) -> Tensor:
    """Run `accumulate` with the operator, which tracers see."""
    words, is_torch, is_stochastic = _words_of(accumulator)
    if is_torch:
        return accumulate(a, b, accumulator, bias)
    key = new_traceable_key(a) if is_stochastic else None
    return torch.ops.fpsim.accumulate(a, b, bias, words, key)  # type: ignore[no-any-return]


@constant_under_compile
def _operator_words(accumulator: str | Accumulator | FloatFormat) -> tuple[str, bool, bool]:
    """Return constants: an accumulator as text, for the operator; whether torch computes it; whether it draws noise."""
    return _words_of(as_accumulator(accumulator))


@constant_under_compile
def _gradient_words(accumulator: str) -> tuple[str, str]:
    """Return the texts of the accumulators of the gradients of a and b.

    In each of these products, dy replaces an operand, and the format of dy is unknown.
    """
    return _of_gradients(accumulator)


@cache
def _of_gradients(text: str) -> tuple[str, str]:
    accumulator = as_accumulator(text)
    if not isinstance(accumulator.operands, tuple):
        return text, text
    of_a, of_b = accumulator.operands
    return repr(replace(accumulator, operands=(None, of_b))), repr(replace(accumulator, operands=(of_a, None)))


@cache
def _words_of(accumulator: Accumulator) -> tuple[str, bool, bool]:
    return repr(accumulator), accumulator.is_torch, accumulator.is_stochastic


def matmul(
    a: Tensor, b: Tensor, accumulator: str | Accumulator | FloatFormat = "fp32", bias: Tensor | None = None
) -> Tensor:
    """`torch.matmul` in an accumulator of any format.

    Each element is added up from +0, term by term as `Accumulator` says, in the order of the contracted axis. Each
    sum is exact before it is rounded, subnormals included. NaN, inf and -0 follow IEEE 754; a sum beyond the format's
    largest value overflows as the accumulator says. Without terms the result is +0.

    The gradients of `a` and `b` are products in the same accumulator, and so are the gradients of these. The gradient
    of `bias`, and the sums over axes that were broadcast, are torch's. Stochastic noise follows `manual_seed`, and is
    the same on every device and with any number of threads.

    Every value of the result is a value of the accumulator's format. With chunks this is the outer accumulator's
    format, and with splits the splits' format.

    Args:
        a, b: float32 of the same device, in the shapes of torch.matmul: vectors, matrices, batches that broadcast; of
            any strides. They are not rounded: round them first, with `round_to`, where the hardware holds them in a
            format.
        accumulator: an Accumulator, or an argument of `as_accumulator`; "fp32" is torch's own product.
        bias: a float32 tensor that broadcasts to the result. It is added to the last sum (to the outer sum if there are
            chunks) with one more rounding, as the epilogue of a hardware product does.

    Returns:
        A float32 tensor of torch.matmul's shape.

    Raises:
        TypeError: for anything other than a float32 tensor.
        ValueError: for shapes that do not fit, for unknown accumulators, and for operands with numbers that are too
            small for the operand format of the accumulator.
        NotImplementedError: in forward-mode differentiation.

    >>> ones = torch.ones(4096)
    >>> matmul(ones, ones, "fp16"), matmul(ones, ones, "cb16_chunk64")
    (tensor(2048.), tensor(4096.))
    """
    text, is_torch, is_stochastic = _operator_words(accumulator)
    _require_matrices(a, b)
    left, right = a.unsqueeze(0) if a.ndim == 1 else a, b.unsqueeze(-1) if b.ndim == 1 else b
    batch = _batch_shape(left, right)
    kept_rows, kept_columns = () if a.ndim == 1 else left.shape[-2:-1], () if b.ndim == 1 else right.shape[-1:]
    shape = (*batch, *kept_rows, *kept_columns)
    if bias is not None:
        bias = _broadcast_bias(bias, shape, a.device)
    if is_torch:
        return torch.matmul(a, b) if bias is None else torch.matmul(a, b) + bias
    _refuse_forward_mode(a, b, bias)
    # Values are checked only where they exist: a trace has no values, and a check in a capture would synchronise.
    if is_plain(a) and is_plain(b) and not is_captured(a):
        _require_operands(a, b, as_accumulator(accumulator))
    m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
    # If b is one matrix for the whole batch, the batch becomes rows.
    if right.ndim == 2:
        batches, m = 1, math.prod(batch) * m
    else:
        batches = math.prod(batch)
        left, right = left.expand(*batch, m, k), right.expand(*batch, k, n)
    bias = None if bias is None else bias.reshape(batches, m, n)
    left, right = left.reshape(batches, m, k), right.reshape(batches, k, n)
    return _apply(left, right, bias, text, is_stochastic).reshape(shape)


def _require_operands(a: Tensor, b: Tensor, accumulator: Accumulator) -> None:
    """Raise ValueError for numbers between the subnormals of an operand's format, which would count with too large
    exponents.

    Larger numbers that are not rounded are accepted, because each counts with the exponent of its leading bit.
    """
    for name, x, fmt in zip("ab", (a, b), accumulator.operand_formats, strict=True):
        if fmt is None:
            continue
        ulps = x.detach() * 2.0 ** (fmt.mantissa_bits - fmt.min_exponent)
        if bool(((ulps != ulps.trunc()) & (x.detach().abs() < 2.0**fmt.min_exponent)).any()):
            raise ValueError(
                f"{name} holds numbers between the subnormals of {fmt}, in which the accumulator {accumulator} has its "
                f"operands. Expected: {name} rounded to {fmt}; or another format, "
                f"dataclasses.replace(as_accumulator(...), operands=...), None for operands that have a scale."
            )


def _require_matrices(a: Any, b: Any) -> None:
    for name, x in (("a", a), ("b", b)):
        require_floating(x, name)
        if x.dtype is not torch.float32:
            raise TypeError(
                f"{name} has dtype {str(x.dtype).removeprefix('torch.')}. Expected: float32, which holds the values of "
                f"every format. Convert it with {name}.float()."
            )
        if x.ndim == 0:
            raise ValueError(f"{name} is 0-d. Expected: vectors, matrices and batches of them. For a number use a * b.")
    if a.device != b.device:
        raise ValueError(f"a is on {a.device}, b on {b.device}. Move one of them: b.to(a.device).")
    terms = b.shape[0] if b.ndim == 1 else b.shape[-2]
    if a.shape[-1] != terms:
        raise ValueError(
            f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}: {a.shape[-1]} terms do not meet {terms}. "
            f"The last axis of a must be as long as the last but one of b, or b's only one."
        )


def _batch_shape(left: Tensor, right: Tensor) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]))
    except RuntimeError:
        raise ValueError(
            f"a has batches {tuple(left.shape[:-2])} and b {tuple(right.shape[:-2])}, which do not broadcast. "
            f"Axes must be equal or 1, aligned at the last."
        ) from None


def _refuse_forward_mode(*operands: Tensor | None) -> None:
    """Raise NotImplementedError in forward mode, for which the operator has no rule: torch would use a zero tangent."""
    if torch.compiler.is_compiling():
        require_no_forward_mode("matmul")
        return
    if any(x is not None and _has_tangent(x) for x in operands):
        raise NotImplementedError(
            "matmul was given a tangent of forward-mode differentiation. Expected: reverse mode, by backward, "
            "torch.func.grad or torch.func.vjp; or accumulator='fp32', which is torch's own product."
        )


def _has_tangent(x: Tensor) -> bool:
    try:
        return forward_ad.unpack_dual(x).tangent is not None
    except RuntimeError:  # vmap does not allow this question
        return any(map(_has_tangent, layers_behind(x)))


def _broadcast_bias(bias: Any, shape: tuple[int, ...], device: torch.device) -> Tensor:
    require_floating(bias, "bias")
    if bias.dtype is not torch.float32 or bias.device != device:
        raise TypeError(
            f"bias is {str(bias.dtype).removeprefix('torch.')} on {bias.device}. Expected: float32 on {device}."
        )
    try:
        return bias.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}, which does not broadcast to the result's {tuple(shape)}. "
            f"For one number of each column give a vector of {shape[-1] if shape else 1}."
        ) from None
