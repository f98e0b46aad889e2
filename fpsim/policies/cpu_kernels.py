"""The bfloat16 kernels of torch on the CPU that round more than once, as functions for `Policy(kernels=...)`.

torch chooses vector or scalar code by the processor (`torch.backends.cpu.get_cpu_capability()`, or the environment's
ATEN_CPU_CAPABILITY). The functions follow this choice in each call, so that they compute as torch does in this process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fpsim.policies.attention import for_each_query_head, scaled_and_masked

__all__ = ["CPU_KERNELS", "fast_exp", "flash_attention", "power", "rsqrt"]

# kv_split_size of all instances of cpu_flash_attention in libtorch_cpu.so. The number of queries in a block does not
# change the sums of any row.
KEYS_IN_BLOCK = 512
LANES = {"AVX512": 16, "AVX2": 8}  # float32 numbers in a vector; a row's last ones, which fill none, use std::exp
LEAST_LOG = -87.33654  # the logarithm of float32's least normal number; below it, the result is 0
# Coefficients of f**0 to f**3 in Malossi et al. 2015 for 2**f - 1 - f, as in `Vectorized<float>::fexp_u20`
EXP2 = (0.00010703434948458272, 0.30354260500649682, -0.22433836478672356, -0.079204240219773236)


def fast_exp(x: Tensor) -> Tensor:
    """Return exp(x) of float32 numbers up to 0, with a relative error of up to 1e-4.

    The bits of a result are assembled from an exponent and a cubic. This is torch's `fexp_u20`, which torch's attention
    on the CPU uses for results of 16 bits. The gradient is exp(x).

    >>> fast_exp(torch.tensor([0.0, -1.0]))
    tensor([0.9999, 0.3679])
    """
    scaled = x.detach() * math.log2(math.e)
    part = scaled - scaled.floor()
    c0, c1, c2, c3 = EXP2
    bits = (scaled - (((part * c3 + c2) * part + c1) * part + c0) + 127) * 2.0**23
    fast = bits.clamp(min=0).to(torch.int32).view(torch.float32).masked_fill(x < LEAST_LOG, 0.0)
    exact = torch.exp(x)
    # The result is exactly `fast`, because the difference of two numbers as near as these is exact in float32. The
    # gradient is that of exp.
    return exact + (fast - exact).detach()


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Compute `scaled_dot_product_attention` as torch's `cpu_flash_attention` does for bfloat16.

    Scores, sums and the result are float32. Exponentials are added up in float32, and rounded to bfloat16 before their
    product with the values. In torch's vector code the exponentials come from `fast_exp`, except for the last ones of a
    row, which fill no vector; in its scalar code they are exact.

    Returns NotImplemented for other dtypes, and if torch uses its other kernel, which rounds once: with dropout, or if
    the head sizes differ.
    """
    if query.dtype != torch.bfloat16 or dropout_p or query.dim() != 4:
        return NotImplemented
    if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        return NotImplemented
    if not (query.numel() and key.numel()) or (attn_mask is not None and attn_mask.requires_grad):
        return NotImplemented
    if enable_gqa:
        key, value = for_each_query_head(query, key, value)
    # Inputs and buffers report dtype bfloat16, but hold the numbers that were given. to(bfloat16) rounds these.
    query, key, value = (x.to(torch.bfloat16).float() for x in (query, key, value))
    scores = query @ key.mT
    scores = scaled_and_masked(scores, query.shape[-1], attn_mask, is_causal, scale)
    largest = total = out = None
    for start in range(0, scores.shape[-1], KEYS_IN_BLOCK):
        one = scores[..., start : start + KEYS_IN_BLOCK]
        above = one.amax(-1, keepdim=True)
        above = above if largest is None else torch.maximum(largest, above)
        shift = above.masked_fill(above == -math.inf, 0.0)  # in a row in which all keys so far are hidden
        powers = _exponentials(one - shift)
        sums = powers.sum(-1, keepdim=True)
        product = powers.to(torch.bfloat16).float() @ value[..., start : start + KEYS_IN_BLOCK, :]
        if total is None or out is None or largest is None:
            total, out = sums, product
        else:
            # torch uses std::exp here too, because one number for each row fills no vector.
            decay = torch.exp(largest - shift)
            total, out = total * decay + sums, out * decay + product
        largest = above
    assert total is not None
    assert out is not None
    return (out * (1 / total.masked_fill(total == 0, 1.0))).to(torch.bfloat16)


def _exponentials(x: Tensor) -> Tensor:
    lanes = LANES.get(torch.backends.cpu.get_cpu_capability())
    if lanes is None:
        return torch.exp(x)
    whole = x.shape[-1] // lanes * lanes
    parts = [fast_exp(x[..., :whole])] if whole else []
    return torch.cat([*parts, torch.exp(x[..., whole:])], -1) if whole < x.shape[-1] else parts[0]


def power(input: Any, exponent: Any, *, out: Tensor | None = None) -> Any:
    """Compute x ** 3 and x ** -2 with each product rounded; round any other exponent to x's dtype first."""
    if out is not None or not isinstance(input, Tensor) or not isinstance(exponent, int | float):
        return NotImplemented
    # Float32 inputs are included, because torch computes the same products for them.
    if exponent == 3:
        return input * input * input
    if exponent == -2:
        return 1 / (input * input)
    if exponent == -0.5:
        return rsqrt(input)
    if input.dtype != torch.bfloat16 or _rounded(exponent) == exponent:
        return NotImplemented
    return input ** _rounded(exponent)


def _rounded(number: float) -> float:
    return torch.tensor(number, dtype=torch.bfloat16).item()


def rsqrt(input: Any, *, out: Tensor | None = None) -> Any:
    """Compute 1 / sqrt(x): torch's scalar code rounds both steps, and its vector code only the result."""
    if out is not None or not isinstance(input, Tensor) or input.dtype != torch.bfloat16 or not _is_scalar():
        return NotImplemented
    return 1 / input.sqrt()


def _is_scalar() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "DEFAULT"


CPU_KERNELS: dict[str, Callable[..., Any]] = {
    "pow": power,
    "rsqrt": rsqrt,
    "scaled_dot_product_attention": flash_attention,
}
