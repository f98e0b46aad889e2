"""Versions of the numbers that this library computes, with the changes of each."""

from __future__ import annotations

from fpsim.checks import require_whole

__all__ = ["BITS", "CHANGES", "changes_since"]

# A release that computes other numbers for an equal configuration adds an entry here: the features with other numbers,
# in words that an error message quotes. Sweeps store the version with each cell.
CHANGES: dict[int, tuple[str, ...]] = {
    2: (
        "gradients through an autograd Function, or a reentrant checkpoint, that returns its input",
        "weights and buffers of modules inside of child modules, in products under torch.compile, functional_call and "
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
        "integers combined with tensors of the format",
        "Python integers in comparisons, %, fmod, clamp and indexed writes",
        "float32 operands combined with operands of the format in addr, inner, torch._foreach functions and an einsum "
        "that sums nothing",
        "float32 results of windows, Fourier frequencies, sparse tensors, ldexp and bincount with weights",
        "nextafter, and mse_loss without a reduction",
        "code of an autograd Function or a hook in the backward pass, and what such a Function saves in a compiled "
        "program with stochastic rounding",
        "gradients behind an autograd Function that returns None, which were zeros in blocks, Hadamard transforms, "
        "large tensors and under vmap",
        "checkpoints, views of weights and autograd Functions where autocast is switched off",
        "weights, and views of weights, that an autograd Function returns, and writes to views that such a Function "
        "returns",
        "weights without a format that an autograd Function saves, under torch.compile or as views",
        "gradients of outputs whose last operation repeated them, indexed them or joined them with themselves",
        "tangents of forward mode through blocks and Hadamard transforms, which were zeros, and tangents that the jvp "
        "of an autograd Function returns under torch.func",
        "blocks that hold an infinity, NaN or the largest number of float32, and operands of float64 models in blocks",
        "adaptive scaling where a parameter multiplies (layer scales, norms written by hand) in rules that predict",
        "writes to a part of x.data, and writes without a graph to a part of an input, a weight or a buffer, under "
        "torch.func",
        "code that inductor compiles for processors with AVX2 but without AVX-512",
        "products of subnormal operands in accumulators of tensor cores, or in accumulators that align groups if the "
        "operands have a format, and overflows of such groups under rounding toward zero",
    ),
}
BITS = max(CHANGES)  # 1: all releases before the count began


def changes_since(bits: int) -> str:
    """Describe the features whose numbers have changed since a version; "" if there are none.

    Args:
        bits: the version, from 1.

    >>> changes_since(BITS)
    ''
    >>> changes_since(2).split("; ")[0]
    'gradients in bfloat16 tensors at a scale'
    """
    require_whole("bits", bits, 1)
    return "; ".join(words for version, changed in CHANGES.items() if version > bits for words in changed)
