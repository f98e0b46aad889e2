"""The torch functions that are products, each written in terms of a few forms that can be quantised.

To add a torch function, write a function that takes a `ProductCall` and then torch's own parameters, and add it to
`CALLS`. If this function returns NotImplemented, torch computes the call.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fpsim.emulation.arguments import roundable_in
from fpsim.emulation.attended import attended, dropout, softmax, weighted
from fpsim.emulation.forms import (
    Batched,
    ByVjp,
    Contraction,
    Convolution,
    ConvolutionSettings,
    Linear,
    Side,
    contraction,
    simplified,
)
from fpsim.emulation.products import ProductCall
from fpsim.emulation.scope import Attended, Scope
from fpsim.policies.attention import for_each_query_head, scaled_and_masked

__all__ = ["CALLS", "OF_ATTENTION", "compute_products", "has_products"]


def has_products(scope: Scope, name: str) -> bool:
    """True if an operation may have products to quantise here, or is a step of an attention with rounding points."""
    products = scope.products
    return products is not None and (name in CALLS or (name in OF_ATTENTION and products.points is not None))


def compute_products(
    call: ProductCall,
    function: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
) -> Any:
    """Compute a torch function with the operands of its products quantised.

    function: runs the torch function itself.
    target: the tensor that the call writes to, if any.
    Raises NotImplementedError for arguments that torch accepts, but that have no emulation.
    """
    named = {name: x for name, x in kwargs.items() if name != "out"}
    if (
        kwargs.get("out") is not None
        and torch.is_grad_enabled()
        and any(x.requires_grad for x in roundable_in(args, kwargs))
    ):
        # The call runs unchanged, so that torch raises its own error: a call with out= has no gradient.
        return function(args, kwargs)
    out = _computed(call, function, args, named)
    if out is NotImplemented:
        return function(args, kwargs)
    if not isinstance(target, Tensor):
        return out
    return (target if target.shape == out.shape else target.resize_(out.shape)).copy_(out)


def _computed(call: ProductCall, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    compute = CALLS.get(call.operation) or OF_ATTENTION[call.operation]
    # The signature is compared only after an error, not in each call. If the arguments fit, the TypeError has another
    # cause, and is raised as it is.
    try:
        return compute(call, *args, **kwargs)
    except TypeError:
        try:
            inspect.signature(compute).bind(call, *args, **kwargs)
        except TypeError as error:
            function(args, kwargs)  # raises torch's own error, if it has one
            raise NotImplementedError(
                f"The product at {call.site} was called in a way that is not emulated: {error}. Expected: the order of "
                f"arguments that torch documents."
            ) from None
        raise


# Matrix products


def _product(call: ProductCall, a: Tensor, b: Tensor, **rest: Any) -> Tensor:
    """Return a @ b. The product's w is the operand that is a weight, on whichever side; without a weight, w is b."""
    assert call.scope.products is not None
    # Only products of two activations belong to an attention; a product with a weight is a layer written by hand.
    if call.scope.products.points is not None and not (call.errors or call.is_weight(a) or call.is_weight(b)):
        return _product_of_attention(call, a, b, **rest)
    return _matmul_of(call, a, b, call.is_weight(a) and not call.is_weight(b), **rest)


def _product_of_attention(call: ProductCall, a: Tensor, b: Tensor, **rest: Any) -> Tensor:
    """Return q k^T; or p v, if one of the operands was computed from q k^T."""
    left, right = call.attended.get(id(a)), call.attended.get(id(b))
    if left is None and right is None:
        assert call.scope.products is not None
        assert call.scope.products.points is not None
        call.gives_scores = True
        return _matmul_of(call, a, b, False, specs=call.scope.products.points.qk, **rest)
    if a.dim() == 1:
        row = _moved(call, a, lambda x: x.unsqueeze(0))
        return _product_of_attention(call, row, b, **rest).squeeze(-2 if b.dim() > 1 else 0)
    if b.dim() == 1:
        column = _moved(call, b, lambda x: x.unsqueeze(1))
        return _product_of_attention(call, a, column, **rest).squeeze(-1)
    if left is None:  # (v p)^T = p^T v^T
        assert right is not None
        call.attended[id(columns := b.mT)] = right.moved(lambda x: x.mT, not right.is_turned)
        turned = [columns, a.mT]
        return _product_of_attention(call, *turned, **rest).mT
    return weighted(call, a, b, left, **rest)


def _note_moved(call: ProductCall, x: Tensor, made: Tensor, move: Callable[[Tensor], Tensor]) -> None:
    """Copy the state of an operand to its moved copy."""
    if (found := call.attended.get(id(x))) is not None:
        call.attended[id(made)] = found.moved(move)


def _moved(call: ProductCall, x: Tensor, move: Callable[[Tensor], Tensor]) -> Tensor:
    made = move(x)
    _note_moved(call, x, made, move)
    return made


def _matmul_of(call: ProductCall, a: Tensor, b: Tensor, w_is_left: bool, **rest: Any) -> Tensor:
    if a.dim() == 1:
        return _matmul_of(call, a.unsqueeze(0), b, w_is_left, **rest).squeeze(-2 if b.dim() > 1 else 0)
    if b.dim() == 1:
        return _matmul_of(call, a, b.unsqueeze(1), w_is_left, **rest).squeeze(-1)
    # a x = (x^T a^T)^T: the forms sum over the last axis of x, and w is on the right.
    if w_is_left:
        x, w = b.mT, a.mT
    else:
        x, w = a, b
    # One matrix for all rows is the weight (out, in) of a linear layer, whose gradient is one sum over the whole batch.
    if w.dim() == 2:
        w = w.mT
        y = call.compute(Linear(x, w), x, w, **rest)
    else:
        y = call.compute(Batched(x, w), x, w, **rest)
    return y.mT if w_is_left else y


def _matmul(call: ProductCall, input: Tensor, other: Tensor) -> Any:
    return _product(call, input, other) if call.takes(input, other) else NotImplemented


def _rmatmul(call: ProductCall, input: Tensor, other: Tensor) -> Any:
    return _matmul(call, other, input)


def _mm(call: ProductCall, input: Tensor, mat2: Tensor) -> Any:
    return _matmul(call, input, mat2)


def _mv(call: ProductCall, input: Tensor, vec: Tensor) -> Any:
    return _matmul(call, input, vec)


def _dot(call: ProductCall, input: Tensor, tensor: Tensor) -> Any:
    return _matmul(call, input, tensor)


def _vdot(call: ProductCall, input: Tensor, other: Tensor) -> Any:
    return _matmul(call, input, other)


def _vecdot(call: ProductCall, x: Tensor, y: Tensor, *, dim: int = -1) -> Any:
    if not call.takes(x, y):
        return NotImplemented
    rows, columns = x.movedim(dim, -1).unsqueeze(-2), y.movedim(dim, -1).unsqueeze(-1)
    return _product(_of(call, (x, rows), (y, columns)), rows, columns).squeeze((-2, -1))


def _inner(call: ProductCall, input: Tensor, other: Tensor) -> Any:
    if input.dim() == 0 or other.dim() == 0 or not call.takes(input, other):
        return NotImplemented
    a, b = input.reshape(-1, input.shape[-1]), other.reshape(-1, other.shape[-1]).mT
    return _product(_of(call, (input, a), (other, b)), a, b).reshape(*input.shape[:-1], *other.shape[:-1])


def _tensordot(call: ProductCall, a: Tensor, b: Tensor, dims: Any = 2) -> Any:
    if not call.takes(a, b):
        return NotImplemented
    if isinstance(dims, Tensor):
        dims = dims.tolist()
    if isinstance(dims, int):
        dims = [range(a.dim() - dims, a.dim()), range(dims)]
    of_a, of_b = ([d % x.dim() for d in axes] for x, axes in ((a, dims[0]), (b, dims[1])))
    # Without summed axes tensordot is an outer product, an elementwise operation: its operands are not quantised.
    if not of_a:
        return NotImplemented
    free_a, free_b = ([d for d in range(x.dim()) if d not in axes] for x, axes in ((a, of_a), (b, of_b)))
    rows = a.permute(*free_a, *of_a).reshape(math.prod(a.shape[d] for d in free_a), -1)
    columns = b.permute(*of_b, *free_b).reshape(-1, math.prod(b.shape[d] for d in free_b))
    y = _product(_of(call, (a, rows), (b, columns)), rows, columns)
    return y.reshape(*(a.shape[d] for d in free_a), *(b.shape[d] for d in free_b))


def _of(call: ProductCall, *pairs: tuple[Tensor, Tensor]) -> ProductCall:
    """Give reshaped operands the roles of their originals in the call, such as weight or error; return the call."""
    # The dictionaries hold references to the reshaped tensors: a later tensor could get the id of a freed one.
    call.weights.update({id(made): made for original, made in pairs if call.is_weight(original)})
    for original, made in pairs:
        if (found := call.attended.get(id(original))) is not None and id(made) not in call.attended:
            call.attended[id(made)] = found if made.shape == original.shape else Attended(None, None)
    if call.errors:
        call.errors.update({id(made): made for original, made in pairs if id(original) in call.errors})
    return call


# Products with something added


def _added(added: Tensor, beta: float, y: Tensor, alpha: float) -> Tensor:
    # With beta = 0 torch does not read the addend, which may be inf or NaN.
    if beta == 0:
        return y * alpha
    return torch.add(added if beta == 1 else added * beta, y, alpha=alpha)


def _addmm(call: ProductCall, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if not call.takes(mat1, mat2):
        return NotImplemented
    is_bias = input.dim() == 1 and mat2.dim() == 2 and input.shape[0] == mat2.shape[1]
    # A bias is added within the product, so that the sum is rounded once. A product with w on the left takes no bias.
    if beta == alpha == 1 and is_bias and not (call.is_weight(mat1) and not call.is_weight(mat2)):
        return _product(call, mat1, mat2, bias=input)
    return _added(input, beta, _product(call, mat1, mat2), alpha)


def _addmv(call: ProductCall, input: Tensor, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    return _added(input, beta, _product(call, mat, vec), alpha) if call.takes(mat, vec) else NotImplemented


def _baddbmm(
    call: ProductCall, input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    return _added(input, beta, _product(call, batch1, batch2), alpha) if call.takes(batch1, batch2) else NotImplemented


def _addbmm(
    call: ProductCall, input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    if not call.takes(batch1, batch2):
        return NotImplemented
    # addbmm sums over the batch too, which makes it one product with a longer sum.
    a, b = batch1.transpose(0, 1).flatten(1), batch2.flatten(0, 1)
    return _added(input, beta, _product(_of(call, (batch1, a), (batch2, b)), a, b), alpha)


def _grouped_mm(call: ProductCall, mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, **rest: Any) -> Any:
    """Multiply groups of rows by one matrix each, as a layer of experts does: group g ends before row offs[g]."""
    if not call.takes(mat_a, mat_b):
        return NotImplemented
    if mat_a.dim() != 2 or mat_b.dim() != 3 or offs is None or any(v is not None for v in rest.values()):
        raise NotImplementedError(
            f"grouped_mm at {call.site.partition(':')[0] or 'the top level'} has operands of "
            f"{mat_a.dim()} and {mat_b.dim()} axes, or a bias or dtype, whose products cannot be quantised. Expected: "
            f"(tokens, in) and (groups, in, out) with offs; or products one by one, with @."
        )
    # Each group is a separate product, so that blocks along the tokens do not cross from one expert to the next.
    # Rows behind the last group have no matrix: their results are zeros.
    ends = [0, *offs.tolist(), len(mat_a)]
    parts = [(mat_a[a:b], mat_b[g] if g < len(mat_b) else None) for g, (a, b) in enumerate(pairwise(ends))]
    sums = [
        x.new_zeros(len(x), mat_b.shape[2]) if w is None else _product(_of(call, (mat_b, w)), x, w, part=f".{g}")
        for g, (x, w) in enumerate(parts)
    ]
    return torch.cat(sums)


# Layers: their second operand is a weight, whatever its origin


def _linear(call: ProductCall, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not call.takes(input, weight, has_weight=True):
        return NotImplemented
    if weight.dim() == 1:
        y = call.compute(Linear(input, weight.unsqueeze(0)), input, weight.unsqueeze(0)).squeeze(-1)
        return y if bias is None else y + bias
    return call.compute(Linear(input, weight), input, weight, bias)


def _bilinear(call: ProductCall, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Compute a linear layer whose input is the products of all pairs of features, flattened."""
    if not (call.takes(input1, weight, has_weight=True) and call.takes(input2, weight, has_weight=True)):
        return NotImplemented
    x, w = (input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2), weight.flatten(1)
    return call.compute(Linear(x, w), x, w, bias)


# Convolutions


def _list(value: Any, n: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * n if len(values) == 1 else values


def _convolution(
    call: ProductCall,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    if not call.takes(input, weight, has_weight=True):
        return NotImplemented
    n = weight.dim() - 2
    is_single = input.dim() == n + 1
    x = input.unsqueeze(0) if is_single else input
    if isinstance(padding, str):
        x, padding = _padded(x, weight.shape[2:], padding, _list(dilation, n))
    stride, padding, dilation, output_padding = (_list(v, n) for v in (stride, padding, dilation, output_padding))
    settings = ConvolutionSettings(stride, padding, dilation, transposed, output_padding, groups)
    y = call.compute(Convolution(x, weight, settings), x, weight, bias)
    return y.squeeze(0) if is_single else y


def _padded(x: Tensor, kernel: Sequence[int], padding: str, dilation: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Return the input and its padding per side. If "same" pads an odd total, one zero is appended to the input."""
    if padding == "valid":
        return x, [0] * len(kernel)
    totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if any(total % 2 for total in totals):
        x = F.pad(x, [side for total in reversed(totals) for side in (0, total % 2)])
    return x, [total // 2 for total in totals]


def _conv(
    call: ProductCall,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    return _convolution(call, input, weight, bias, stride, padding, dilation, False, 0, groups)


def _conv_transpose(
    call: ProductCall,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    return _convolution(call, input, weight, bias, stride, padding, dilation, True, output_padding, groups)


def _convolution_backward(
    call: ProductCall,
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    """Return the gradients of a convolution, for `torch.nn.grad` and the backward of an autograd Function."""
    # The form has a first derivative only. For a second one, torch's own function is used.
    is_differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in (grad_output, input, weight))
    if is_differentiated or not call.takes(grad_output, weight, has_weight=True):
        return NotImplemented
    n = weight.dim() - 2
    stride, padding, dilation, output_padding = (_list(v, n) for v in (stride, padding, dilation, output_padding))
    settings = ConvolutionSettings(stride, padding, dilation, transposed, output_padding, groups)
    needs_x, needs_w, needs_bias = output_mask
    form = Convolution(input, weight, settings)
    return call.gradients(form, grad_output, input if needs_w else None, weight if needs_x else None, needs_bias)


_BY_CHANNELS, _OVER_BATCH = Side(2, 1), Side(1, 2)


def _conv_tbc(call: ProductCall, input: Tensor, weight: Tensor, bias: Tensor, pad: int = 0) -> Any:
    """Compute a convolution of x, (time, batch, in), with a weight, (kernel, in, out)."""
    if not call.takes(input, weight, has_weight=True):
        return NotImplemented

    # The bias is left out, because `ByVjp` takes a function that is linear in both operands.
    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.conv_tbc(x, w, x.new_zeros(w.shape[2]), pad)

    inner, outer = Side(1, 2), Side(2, 1)
    sides = (_BY_CHANNELS, inner), (_BY_CHANNELS, outer), (_OVER_BATCH, _OVER_BATCH)
    return call.compute(ByVjp(input, weight, f, sides), input, weight) + bias


# Sums of products given by a formula


def _einsum(call: ProductCall, *args: Any) -> Any:
    simple = simplified(args)
    if simple is None:
        return NotImplemented
    terms, operands, out = simple
    if len(operands) < 2 or not any(call.takes(a, b) for a, b in pairwise(operands)):
        return NotImplemented
    has_several = len(operands) > 2
    term, y = terms[0], operands[0]
    # Operands are contracted from left to right, as in torch without opt_einsum: another order rounds other results.
    for i in range(1, len(operands)):
        behind = set(out).union(*terms[i + 1 :])
        kept = out if i == len(operands) - 1 else "".join(c for c in dict.fromkeys(term + terms[i]) if c in behind)
        part = f".{i - 1}" if has_several else ""
        y = _einsum_of_two(call, contraction(term, terms[i], kept), y, operands[i], part)
        term = kept
    return y


def _einsum_of_two(call: ProductCall, c: Contraction, a: Tensor, b: Tensor, part: str) -> Tensor:
    if not c.inner or not call.takes(a, b):
        return torch.einsum(c.equation, a, b)
    rows, columns = c.operands(a, b)
    _note_moved(call, a, rows, lambda x: c.operands(x, b)[0])
    _note_moved(call, b, columns, lambda x: c.operands(a, x)[1])
    y = _product(_of(call, (a, rows), (b, columns)), rows, columns, operands=(c.equation, a, b), part=part)
    return c.result(y, a, b)


# Attention


def _attention(
    call: ProductCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Compute scaled_dot_product_attention as torch documents it: two products, and float32 operations between."""
    assert call.scope.products is not None
    points = call.scope.products.points
    if not call.scope.products.attention or not (call.takes(query, key) and call.takes(key, value)):
        return NotImplemented
    if enable_gqa:
        key, value = for_each_query_head(query, key, value)
    keys, of_qk = key.mT, {} if points is None else {"specs": points.qk}
    scores = _matmul_of(call, query, keys, False, operands=(query, keys), operation="matmul", part=".qk", **of_qk)
    scores = scaled_and_masked(scores, query.shape[-1], attn_mask, is_causal, scale)
    hides_all = scores.detach().isneginf().all(-1, keepdim=True)  # such a row gives zeros, as in torch
    scores, named = scores.masked_fill(hides_all, 0.0), {"operation": "matmul", "part": ".pv"}
    if points is not None:
        weights, found = attended(call, scores, hides_all, dropout_p)
        return weighted(call, weights, value, found, operands=(weights, value), **named)
    weights = torch.softmax(scores, -1).masked_fill(hides_all, 0.0)
    weights = F.dropout(weights, dropout_p) if dropout_p else weights
    return _matmul_of(call, weights, value, False, operands=(weights, value), **named)


def _several(call: ProductCall, *args: Any) -> Any:
    operands = [x for arg in args for x in (arg if isinstance(arg, tuple | list) else [arg]) if isinstance(x, Tensor)]
    if not any(call.takes(a, b) for a, b in pairwise(operands)):
        return NotImplemented
    raise NotImplementedError(
        f"{call.operation} at {call.site.partition(':')[0] or 'the top level'} hides several products in one call, "
        f"whose operands cannot be quantised. To do: write them one by one, with @."
    )


# Powers -1, 0 and 1 are an inverse, an identity and a copy: no product is hidden in them.
def _power(call: ProductCall, A: Tensor, n: int) -> Any:
    return NotImplemented if -2 < n < 2 else _several(call, A, A)


def _of_quantised_numbers(call: ProductCall, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        f"{call.operation} at {call.site.partition(':')[0] or 'the top level'} computes with numbers that are "
        f"quantised already. Expected: quantise the original model, in float32 or bf16; or leave these modules' "
        f"products as they are: Policy(overrides={{name: None}})."
    )


# aten's products of integers or of scaled float8, and the products of torch.ops.quantized.
_OF_QUANTISED_NUMBERS = """
    _int_mm _scaled_mm _scaled_mm_v2 _scaled_grouped_mm scaled_mm scaled_grouped_mm _weight_int8pack_mm
    _weight_int4pack_mm _weight_int4pack_mm_for_cpu _weight_int4pack_mm_with_scales_and_zeros
    linear_dynamic linear_relu_dynamic linear_dynamic_fp16 linear_relu_dynamic_fp16 linear_relu linear_leaky_relu
    linear_tanh conv1d_relu conv2d_relu conv3d_relu conv1d_dynamic conv2d_dynamic conv3d_dynamic
    """.split()

CALLS: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "bilinear": _bilinear,
    **dict.fromkeys(("matmul", "imatmul", "linalg_matmul"), _matmul),
    "rmatmul": _rmatmul,
    **dict.fromkeys(("mm", "bmm", "_sparse_mm", "spmm"), _mm),
    **dict.fromkeys(("grouped_mm", "_grouped_mm"), _grouped_mm),
    "mv": _mv,
    **dict.fromkeys(("dot", "inner_product"), _dot),
    "vdot": _vdot,
    "linalg_vecdot": _vecdot,
    "inner": _inner,
    "tensordot": _tensordot,
    **dict.fromkeys(("addmm", "addmm_"), _addmm),
    **dict.fromkeys(("addmv", "addmv_"), _addmv),
    **dict.fromkeys(("baddbmm", "baddbmm_"), _baddbmm),
    **dict.fromkeys(("addbmm", "addbmm_"), _addbmm),
    "einsum": _einsum,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _conv),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _conv_transpose),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "conv_tbc": _conv_tbc,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("linalg_multi_dot", "chain_matmul"), _several),
    **dict.fromkeys(("matrix_power", "linalg_matrix_power"), _power),
    **dict.fromkeys(_OF_QUANTISED_NUMBERS, _of_quantised_numbers),
}
OF_ATTENTION: dict[str, Callable[..., Any]] = {"softmax": softmax, **dict.fromkeys(("dropout", "dropout_"), dropout)}
