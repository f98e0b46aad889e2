"""Targets of scaling: modules that transforms select, and operations that are products."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fpsim.checks import shown

__all__ = [
    "PRODUCTS",
    "AdaLossTransform",
    "AdaLossTransformBasicBlock",
    "AdaLossTransformBatchNorm",
    "AdaLossTransformBottleneck",
    "AdaLossTransformCast",
    "AdaLossTransformConv2d",
    "AdaLossTransformLinear",
    "Product",
]


class Product(NamedTuple):
    """One operand of a product, and how its gradient is computed.

    operand: the operand.
    other: the other operand. None if the operation hides it; then the operand's gradient is measured.
    terms: an element of the operand's gradient is the sum of this many products of the output's gradient and `other`.
    channel: a dimension of the output and a dimension of `other`. Only elements with equal indices along these
        dimensions are multiplied. None if there is no such pair.
    is_gate: whether elements are multiplied one by one. Such a product gets a factor only if `other` is a parameter.
    gain: a number by which the product is multiplied.
    """

    operand: Tensor
    other: Tensor | None
    terms: int
    channel: tuple[int, int] | None = None
    is_gate: bool = False
    gain: float = 1.0


def _linear(x: Tensor, weight: Tensor, *_: Any) -> list[Product]:
    if weight.dim() == 1:  # one output feature, without a dimension
        return [Product(x, weight, 1)]
    return [Product(x, weight, weight.shape[0], (-1, 0))]


def _convolution(x: Tensor, weight: Tensor, *_: Any) -> list[Product]:
    groups = x.shape[1 - (weight.dim() - x.dim())] // weight.shape[1]  # the input may have no batch dimension
    terms = weight.shape[0] // groups * math.prod(weight.shape[2:])
    # With groups no pair of dimensions says which elements are multiplied, so `element_wise_range` refuses groups.
    return [Product(x, weight, terms, (x.dim() - weight.dim() + 1, 0) if groups == 1 else None)]


def _transposed_convolution(x: Tensor, weight: Tensor, *_: Any) -> list[Product]:
    return [Product(x, weight, math.prod(weight.shape[1:]))]


def _matmul(a: Tensor, b: Tensor, *_: Any) -> list[Product]:
    inner = a.shape[-1]
    rows = a.shape[-2] if a.dim() > 1 else 1
    columns = b.shape[-1] if b.dim() > 1 else 1
    # The gradient of a broadcast operand is summed over the batch too.
    batch = math.prod(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    total = batch * rows * inner * columns
    return [Product(a, b, _per_element(total, a)), Product(b, a, _per_element(total, b))]


def _reversed_matmul(b: Tensor, a: Tensor, *_: Any) -> list[Product]:
    return _matmul(a, b)


def _added_matmul(_: Tensor, a: Tensor, b: Tensor, *__: Any) -> list[Product]:
    return _matmul(a, b)


def _outer(a: Tensor, b: Tensor, *_: Any) -> list[Product]:
    return [Product(a, b, b.numel()), Product(b, a, a.numel())]


def _einsum(equation: Any, *operands: Any) -> list[Product]:
    tensors = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], list | tuple) else list(operands)
    tensors = [t for t in tensors if isinstance(t, Tensor)]
    # Terms can be counted if letters name all dimensions of two operands. Otherwise the gradients are measured.
    if not isinstance(equation, str) or "." in equation or len(tensors) != 2:
        return _hidden(*tensors)
    a, b = tensors
    names = equation.replace(" ", "").split("->")[0].split(",")
    sizes = dict(zip("".join(names), (*a.shape, *b.shape), strict=True))
    total = math.prod(sizes.values())
    return [Product(a, b, _per_element(total, a)), Product(b, a, _per_element(total, b))]


def _hidden(*operands: Any) -> list[Product]:
    """Return the operands of an operation that hides products, such as the two products around attention's softmax."""
    return [Product(x, None, 1) for x in operands if isinstance(x, Tensor) and x.is_floating_point()]


def _matrices(operands: Sequence[Tensor], *_: Any) -> list[Product]:
    return _hidden(*operands)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> list[Product]:
    return _hidden(query, key, value)


def _gate(*operands: Any) -> list[Product]:
    """Return the product `x * weight`, in either order: a layer scale, or a hand-written normalisation's weight."""
    tensors = [x for x in operands if isinstance(x, Tensor)]
    if len(tensors) != 2 or not all(x.is_floating_point() for x in tensors):
        return []
    a, b = tensors
    total = math.prod(torch.broadcast_shapes(a.shape, b.shape))
    # A square, which has only one operand, is no gate.
    return [Product(x, other, _per_element(total, x), is_gate=True) for x, other in ((a, b), (b, a)) if x is not other]


def _added_gate(_: Tensor, a: Tensor, b: Tensor, value: Any = 1, *__: Any) -> list[Product]:
    return [p._replace(gain=float(value)) for p in _gate(a, b)]


def _per_element(total: int, x: Tensor) -> int:
    """Return the number of products that are added up in the gradient of one element of x."""
    return max(total // max(x.numel(), 1), 1)


# Keys are names of torch's functions. Each entry takes the arguments of its function.
PRODUCTS: dict[str, Callable[..., list[Product]]] = {
    "linear": _linear,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed_convolution),
    **dict.fromkeys(("matmul", "linalg_matmul", "mm", "bmm", "mv", "dot", "inner_product", "vdot"), _matmul),
    "rmatmul": _reversed_matmul,
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "addmm_", "baddbmm_", "addbmm_", "addmv_"), _added_matmul),
    **dict.fromkeys(("outer", "ger"), _outer),
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
    "linalg_multi_dot": _matrices,
    **dict.fromkeys(("mul", "multiply", "rmul", "imul", "mul_", "multiply_"), _gate),
    **dict.fromkeys(("addcmul", "addcmul_"), _added_gate),
    **dict.fromkeys(("bilinear", "tensordot", "chain_matmul", "inner", "linalg_vecdot"), _hidden),
}


@dataclass(frozen=True)
class AdaLossTransform:
    """Scale the gradients of products in all modules of a class, and in their submodules.

    Args:
        kind: a module class, several classes, or the name of a class, which may be defined anywhere.
    """

    kind: type[nn.Module] | tuple[type[nn.Module], ...] | str

    def __post_init__(self) -> None:
        kinds = self.kind if isinstance(self.kind, tuple) else (self.kind,)
        is_name = isinstance(self.kind, str) and self.kind.isidentifier()
        if not is_name and not (kinds and all(isinstance(k, type) and issubclass(k, nn.Module) for k in kinds)):
            raise TypeError(
                f"kind is {shown(self.kind)}. Expected: a class of modules such as torch.nn.Linear, several in a "
                f"tuple, or the name of one."
            )

    def matches(self, module: nn.Module) -> bool:
        """Return True if this transform selects a module. Raises TypeError for anything but a module."""
        if not isinstance(module, nn.Module):
            raise TypeError(f"module is {shown(module)}. Expected: a torch.nn.Module.")
        if isinstance(self.kind, str):
            return any(base.__name__ == self.kind for base in type(module).__mro__)
        return isinstance(module, self.kind)

    def __str__(self) -> str:
        return type(self).__name__ if type(self) is not AdaLossTransform else repr(self)


class AdaLossTransformLinear(AdaLossTransform):
    """nn.Linear: the gradient of its input gets a factor, and the gradients of its parameters do not."""

    def __init__(self) -> None:
        super().__init__(nn.Linear)


class AdaLossTransformConv2d(AdaLossTransform):
    """nn.Conv2d: the gradient of its input gets a factor, and the gradients of its parameters do not."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d)


class AdaLossTransformBatchNorm(AdaLossTransform):
    """Batch normalisation, which passes a scale on unchanged. The class is for lists written for the authors' code."""

    def __init__(self) -> None:
        super().__init__((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))


class AdaLossTransformBasicBlock(AdaLossTransform):
    """All products in the blocks of a small ResNet: of every class with the name BasicBlock."""

    def __init__(self) -> None:
        # The class is found by name, because each library of ResNets has a class of its own.
        super().__init__("BasicBlock")


class AdaLossTransformBottleneck(AdaLossTransform):
    """All products in the blocks of a large ResNet: of every class with the name Bottleneck."""

    def __init__(self) -> None:
        super().__init__("Bottleneck")


@dataclass(frozen=True)
class AdaLossTransformCast:
    """Scale the float32 gradients that enter the format at the model's outputs, by a factor from their statistics."""
