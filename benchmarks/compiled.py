"""Quantised models under inductor beside the same models without a compiler: `python benchmarks/compiled.py`.

Prints the table of docs/compile.md. Each model makes one step, forward and backward, from the same weights and the same
batch. There are two controls: compiled float32, for inductor orders some sums otherwise than torch does, with fpsim or
without; and the same model without a compiler, each result of a layer or normalisation changed at random by an ulp of
float32 or so before it is rounded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from report import resnet20
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import fpsim

NOISY = ("addmm", "linear", "conv2d", "layer_norm", "batch_norm", "rsqrt")
FORMATS = (None, "fp32", "bf16", "fp16", "e5m2", "recipe:fp8_current", "recipe:mxfp8")
LETTERS = 256


class Noise(TorchFunctionMode):
    """Entered before a quantised model runs, it sees what the emulation calls, before the results are rounded."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") not in NOISY:
            return out
        return out * (1 + 1e-7 * torch.randn_like(out))


def gpt2() -> nn.Module:
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 1, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=LETTERS, **no_dropout, **ends))


def llama() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=LETTERS, **sizes))


def step(model: nn.Module, run: Callable[..., Any]) -> list[Tensor]:
    """The outputs and all gradients."""
    torch.manual_seed(1)
    if hasattr(model, "config"):
        x = torch.randint(0, LETTERS, (2, 32))
        out, y = run(input_ids=x, use_cache=False).logits.view(-1, LETTERS), x.flatten()
    else:
        out, y = run(torch.randn(8, 3, 32, 32)), torch.arange(8)
    nn.functional.cross_entropy(out, y).backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def error(result: list[Tensor], wanted: list[Tensor]) -> float:
    """Relative, over all tensors together."""
    distance = sum(float((a - b).double().square().sum()) for a, b in zip(result, wanted, strict=True))
    return float(distance / sum(float(b.double().square().sum()) for b in wanted)) ** 0.5


def compared(make: Callable[[], nn.Module], fmt: str | None) -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = make()
    models = (plain, copy.deepcopy(plain), copy.deepcopy(plain))
    eager, model, other = (m if fmt is None else fpsim.quantize(m, fmt) for m in models)
    wanted, compiled = step(eager, eager), step(model, torch.compile(model, fullgraph=True))
    tensors = sum(torch.equal(a, b) for a, b in zip(compiled, wanted, strict=True))
    numbers = sum(int((a == b).sum()) for a, b in zip(compiled, wanted, strict=True)) / sum(a.numel() for a in wanted)
    with Noise():
        changed = step(other, other)
    errors = f"{error(compiled, wanted):.1e} | {error(changed, wanted):.1e}"
    return f"{tensors} of {len(wanted)} | {100 * numbers:.1f} % | {errors} |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, make in (("GPT-2", gpt2), ("Llama", llama), ("ResNet-20", resnet20)):
        for fmt in FORMATS:
            print(f"| {name} | {fmt or 'float32, not quantised'} | {compared(make, fmt)}", flush=True)
