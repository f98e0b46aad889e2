"""What libraries' optimizers store, written from their sources with torch's own dtypes: the oracle of `fpsim.UPDATES`.

Each has two forms: the library's step in float32, as an optimizer that is to be quantised (`Ao`, `Msamp`), and the
library's own storage in bfloat16, float8 or float16, stepped by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

Rounded = Callable[[Tensor], Tensor]


def ao_step(
    p: Tensor, g: Tensor, step: int, m: Tensor, v: Tensor, lr: float, b1: float, b2: float, decay: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """torchao.optim.adam.single_param_adam with is_adamw, in float32: the new weight, and both moments."""
    p, g, m, v = p.float(), g.float(), m.float(), v.float()
    rate, count = torch.tensor(lr), torch.tensor(float(step))
    p = p - rate * decay * p
    m, v = m.lerp(g, 1 - b1), v.lerp(g.square(), 1 - b2)
    denominator = (v.sqrt() / (1 - b2**count).sqrt()) + eps
    return p - rate * (m / (1 - b1**count)) / denominator, m, v


class Ao(torch.optim.Optimizer):
    """torchao's AdamW, in float32."""

    def __init__(
        self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.999), decay: float = 0.1
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                m, v = state["exp_avg"], state["exp_avg_sq"]
                new = ao_step(p, p.grad, state["step"], m, v, group["lr"], *group["betas"], group["decay"], 1e-8)
                for x, y in zip((p, m, v), new, strict=True):
                    x.copy_(y)


def ao_stochastic(x: Tensor, random: Tensor) -> Tensor:
    """torchao.optim.quant_utils._fp32_to_bf16_sr with these 16 random bits, as int32."""
    bits = x.view(torch.int32)
    towards_zero = bits & -65536
    return torch.where(random < (bits & 0xFFFF), towards_zero + 0x10000, towards_zero).view(torch.float32).bfloat16()


def ao_fp8(x: Tensor, block: int) -> Tensor:
    """torchao.optim.subclass_fp8.quantize_fp8, and what dequantize makes of it."""
    rows = x.view(-1, block)
    scale = rows.abs().amax(-1).clip(1e-12) / torch.finfo(torch.float8_e4m3fn).max
    codes = (rows / scale.view(-1, 1)).to(torch.float8_e4m3fn)
    return (codes.float() * scale.view(-1, 1)).view(x.shape)


def ao_map(signed: bool, exponents: int = 7, bits: int = 8) -> Tensor:
    """torchao.optim.quant_utils.create_dynamic_map, and OptimState4bit's map without a sign."""
    if bits == 4 and not signed:
        return torch.linspace(0, 1, 17)[1:]
    found = [0.0, 1.0]
    for i in range(exponents):
        borders = torch.linspace(0.1, 1, 2 ** (i + bits - 1 - exponents + (not signed)) + 1)
        values = (10 ** (i - exponents + 1) * ((borders[:-1] + borders[1:]) / 2)).tolist()
        found += values + [-v for v in values] * signed
    return torch.tensor(sorted(found))


def ao_mapped(x: Tensor, block: int, values: Tensor) -> Tensor:
    """quantize_8bit_with_qmap or quantize_4bit_with_qmap, and dequant_with_qmap; one search in the place of another."""
    rows = x.view(-1, block)
    scale = rows.abs().amax(-1).clip(1e-12).view(-1, 1)
    scaled = rows / scale
    low = (torch.searchsorted(values, scaled, right=True) - 1).clip(min=0)  # the last that is not larger
    high = (low + 1).clip(max=len(values) - 1)
    goes_up = scaled - values[low] >= (values[high] - values[low]) * 0.5
    return (values[torch.where(goes_up, high, low)] * scale).view(x.shape)


class Msamp(torch.optim.Optimizer):
    """MS-AMP's AdamW (msamp/optim/adamw.cu, stage 1), in float32."""

    def __init__(self, params: Any, lr: float = 0.01, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                m, v = state["exp_avg"], state["exp_avg_sq"]
                new = msamp_stage1(p, p.grad, state["step"], m, v, group["lr"], group["decay"])
                for x, y in zip((p, m, v), new, strict=True):
                    x.copy_(y)


def msamp_stage1(
    p: Tensor, g: Tensor, step: int, m: Tensor, v: Tensor, lr: float, decay: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The weight from unrounded moments, and those."""
    p = p * (1 - lr * decay)
    m, v = 0.9 * m + (1 - 0.9) * g, 0.999 * v + (1 - 0.999) * (g * g)
    denominator = v.sqrt() / math.sqrt(1 - 0.999**step) + 1e-8
    return p - (lr / (1 - 0.9**step)) * (m / denominator), m, v


def msamp_factor(amax: float, largest: float) -> float:
    """ScalingMeta.compute_scaling_factor with a margin of 0."""
    return 2.0 ** math.floor(math.log2(largest / amax)) if amax > 0 and math.isfinite(amax) else 1.0


def msamp_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A ScalingTensor: codes at the factor of the tensor's amax."""
    if not x.numel():
        return x
    factor = msamp_factor(float(x.abs().max()), torch.finfo(dtype).max)
    return (x * factor).to(dtype).float() / factor


def te_fp16(x: np.ndarray) -> np.ndarray:
    """TransformerEngine, FusedAdam._apply_scale and get_unscaled_state, of a float16."""
    scale = np.abs(x).max() / np.float32(65504 / 2)
    codes = (x * (np.float32(1) / scale if scale > 0 else np.float32(0))).astype(np.float16)
    return codes.astype(np.float32) * scale


def te_split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """adam.cu, store_param_remainders: a float32 as a bfloat16's pattern, rounded by the remainder's sign, and that."""
    bits = x.view(np.uint32)
    remainder = (bits & 0xFFFF).astype(np.uint16).view(np.int16)
    high = (bits >> 16).astype(np.uint16)
    return high + (remainder < 0).astype(np.uint16), remainder


def te_joined(high: np.ndarray, remainder: np.ndarray) -> np.ndarray:
    """The float32 again."""
    undone = (high - (remainder < 0).astype(np.uint16)).astype(np.uint32)
    return (undone << np.uint32(16) | remainder.view(np.uint16)).view(np.float32)  # 16: int64 in NumPy 1 where x is 0-d


def optimi_adam(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, k: Tensor, lr: float, b1: float, b2: float, decay: float, eps: float
) -> None:
    """optimi.adam._single_param_adam with kahan_sum, long after the first step: the debiased betas are the betas."""
    p.mul_(1 - lr * decay)
    m.lerp_(g, weight=1 - b1)
    v.mul_(b2).addcmul_(g, g, value=1 - b2)
    k.addcdiv_(m, v.sqrt().add_(eps), value=-lr)
    old = p.detach().clone()
    p.add_(k)
    k.add_(old.sub_(p))


def optimi_sgd(p: Tensor, g: Tensor, k: Tensor, lr: float) -> None:
    """optimi.sgd._single_param_sgd with kahan_sum, without momentum."""
    k.add_(g, alpha=-lr)
    old = p.detach().clone()
    p.add_(k)
    k.add_(old.sub_(p))
