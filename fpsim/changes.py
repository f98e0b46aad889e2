"""Versions of the numbers that this library computes, with the changes of each."""

from __future__ import annotations

from fpsim.checks import require_whole

__all__ = ["BITS", "CHANGES", "changes_since"]

# A release that computes other numbers for an equal configuration adds a line here: the features with other numbers, as
# an error quotes them. Sweeps keep the version with each cell.
CHANGES: dict[int, tuple[str, ...]] = {
    2: (
        "gradients through an autograd Function, or a reentrant checkpoint, that gives its input back",
        "weights and buffers that lie deeper than a child, in products under torch.compile, functional_call and "
        "func.grad",
        "an input or a weight that is used under no_grad and with a gradient, under vmap or with stochastic rounding",
        "writes in place under vmap and func.grad",
        "random numbers of a generator, and slices of a ParameterList, under torch.compile",
        "an async forward",
        "steps of optimizers that drop gradients, and nested states of optimizers",
        "float64 in fp32",
    ),
    3: ("gradients in bfloat16 tensors at a scale",),
    4: (
        "integers beside numbers of the format",
        "whole numbers of Python in comparisons, %, fmod, clamp and indexed writes",
        "float32 beside the format in einsum without a sum, addr, inner and torch._foreach functions",
        "float32 from windows, Fourier frequencies, sparse tensors, ldexp and bincount with weights",
        "nextafter, and mse_loss that reduces nothing",
        "code of an autograd Function or a hook in the backward pass, and what such a Function saves in a compiled "
        "program with stochastic rounding",
        "gradients behind an autograd Function that returns None, which were zeros in blocks, Hadamard transforms, "
        "large tensors and under vmap",
        "checkpoints, views of weights and autograd Functions where autocast is switched off",
        "weights, and views of them, that an autograd Function gives back, and writes to the views that one gives",
        "weights without a format that an autograd Function saves, under torch.compile or as views",
        "gradients of outputs that were repeated, indexed or joined with themselves last",
        "tangents of forward mode through blocks and Hadamard transforms, which were zeros, and those that the jvp of "
        "an autograd Function gives under torch.func",
        "blocks that hold an infinity, NaN or the largest number of float32, and operands of float64 models in blocks",
        "adaptive scaling where a parameter multiplies (layer scales, norms written by hand) in rules that predict",
        "writes to a part of x.data, and without a graph to a part of an input, a weight or a buffer, under torch.func",
        "what inductor compiles for processors with AVX2 and without AVX-512",
        "accumulators of tensor cores, and products of operands in a format in accumulators that align groups, where "
        "operands are subnormal, and overflows of such groups toward zero",
    ),
}
BITS = max(CHANGES)  # 1: all releases before the count began


def changes_since(bits: int) -> str:
    """Describe the features whose numbers differ from those of a version; "" if there are none.

    Args:
        bits: the version, from 1.

    >>> changes_since(BITS)
    ''
    >>> changes_since(2).split("; ")[0]
    'gradients in bfloat16 tensors at a scale'
    """
    require_whole("bits", bits, 1)
    return "; ".join(words for version, changed in CHANGES.items() if version > bits for words in changed)
