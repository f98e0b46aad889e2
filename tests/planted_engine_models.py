"""Two copies of a small model of transformers that run alike: what `planted_engine_kinds` plants a difference in.

A copy is changed as an engine's author would: by another class with the same name, by a hook, by its parameters and
buffers, or by the policy of one module.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

import fpsim
from fpsim import Policy, Products

FAMILIES = ("gpt2", "llama", "qwen2_moe", "mixtral", "mamba")
MODES = ("float32", "bf16", "fp8", "native")
BF16 = dict.fromkeys(("weight", "activation", "error", "weight_grad"), "bf16")

# How each family names its parts. A layer adds to its stream what a part makes of the stream behind a norm.
LAYERS = {"gpt2": "transformer.h", "mamba": "backbone.layers"}
ROTARY = "model.rotary_emb"
ATTENTION = {"gpt2": "attn", "mamba": ""}
BRANCHES = {
    "gpt2": (("ln_1", "attn"), ("ln_2", "mlp")),
    "mamba": (("norm", "mixer"),),
}
LLAMA_BRANCHES = (("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp"))


class Engines:
    """A case in the making: models a and b, equal until something is planted in b, the policies of both, and a batch.

    overrides: by side, the policies of single modules.
    """

    def __init__(self, source: random.Random, family: str, mode: str) -> None:
        self.source, self.family, self.mode = source, family, mode
        torch.manual_seed(source.randrange(2**31))
        self.hidden = source.choice((32, 48, 64))
        self.depth = source.choice((2, 2, 3))
        self.is_tied = family in ("gpt2", "mamba") or source.random() < 0.3
        self.eager = family == "mamba" or source.random() < 0.75
        self.a = self._model()
        self.is_perturbed = source.random() < 0.7
        if self.is_perturbed:
            self._perturb()
        if mode == "native":
            self.a = self.a.to(torch.bfloat16)
        self.b = copy.deepcopy(self.a)
        self.base = self._policy()
        self.overrides: dict[str, dict[str, Policy | None]] = {"a": {}, "b": {}}
        self.batch = self._batch()

    def _model(self) -> nn.Module:
        source, hidden = self.source, self.hidden
        std = source.choice((0.05, 0.1, 0.2))
        common = {"vocab_size": source.choice((64, 96, 128)), "initializer_range": std, "pad_token_id": 0}
        common |= {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": self.is_tied, "use_cache": False}
        heads = source.choice((2, 4))
        rotary = {
            "hidden_size": hidden,
            "num_hidden_layers": self.depth,
            "num_attention_heads": heads,
            "num_key_value_heads": source.choice((heads, heads // 2)),
            "intermediate_size": hidden * 2,
            "max_position_embeddings": 64,
        }
        moe = {"num_experts_per_tok": 2}
        attn = "eager" if self.eager else "sdpa"
        match self.family:
            case "gpt2":
                activation = source.choice(("gelu_new", "gelu"))
                options: dict[str, Any] = {"n_embd": hidden, "n_layer": self.depth, "n_head": heads, "n_positions": 64}
                options |= {"activation_function": activation, "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
                config: Any = transformers.GPT2Config(**common, **options)
            case "llama":
                config = transformers.LlamaConfig(**common, **rotary)
            case "qwen2_moe":
                shared = {"moe_intermediate_size": hidden, "shared_expert_intermediate_size": hidden}
                config = transformers.Qwen2MoeConfig(**common, **rotary, **moe, **shared, num_experts=4)
            case "mixtral":
                config = transformers.MixtralConfig(**common, **rotary, **moe, num_local_experts=4)
            case _:
                options = {"hidden_size": hidden, "num_hidden_layers": self.depth, "state_size": 8}
                config = transformers.MambaConfig(**common, **options)
        config._attn_implementation = attn
        return transformers.AutoModelForCausalLM.from_config(config).eval()

    @torch.no_grad()
    def _perturb(self) -> None:
        """Move norms' weights and all biases off their first values, as training does."""
        for parameter in self.a.parameters():
            if parameter.ndim == 1:
                parameter += torch.randn_like(parameter) * 0.15

    def _policy(self) -> Policy | None:
        if self.mode == "bf16":
            return Policy(**BF16)
        if self.mode == "fp8":
            which = self.source.choice(("per row", "per tensor"))
            operand: Any = "e4m3fn per row fp32" if which == "per row" else fpsim.Operand(per_tensor, name="per tensor")
            return Policy(**BF16, products=Products(fprop=(operand, operand)))
        return None

    def _batch(self) -> dict[str, Tensor]:
        source = self.source
        rows, length = source.choice((4, 6)), source.choice((12, 16))
        ids = torch.randint(3, self.a.config.vocab_size, (rows, length))
        if source.random() < 0.5:
            return {"input_ids": ids}
        mask = torch.ones_like(ids)
        side = source.choice(("left", "right"))
        for row in range(1, rows):
            padding = source.randrange(0, length // 2)
            if padding:
                mask[row, slice(0, padding) if side == "left" else slice(length - padding, None)] = 0
        return {"input_ids": ids * mask, "attention_mask": mask}

    @property
    def layers(self) -> list[str]:
        return [f"{LAYERS.get(self.family, 'model.layers')}.{i}" for i in range(self.depth)]

    @property
    def branches(self) -> tuple[tuple[str, str], ...]:
        return BRANCHES.get(self.family, LLAMA_BRANCHES)

    @property
    def attentions(self) -> list[str]:
        name = ATTENTION.get(self.family, "self_attn")
        return [f"{layer}.{name}" for layer in self.layers] if name else []

    @property
    def linears(self) -> list[str]:
        """Layers that are called, and whose weight nothing else uses; not the head, which may be tied."""
        kinds = (nn.Linear, Conv1D)
        return [n for n, m in self.a.named_modules() if isinstance(m, kinds) and n != "lm_head" and _width(m) >= 8]

    @property
    def norms(self) -> list[str]:
        return [name for name, module in self.a.named_modules() if type(module).__name__.endswith("Norm")]

    def override(self, side: str, name: str, **changes: Any) -> None:
        """The side's policy for one module: that of all others with `changes`."""
        self.overrides[side][name] = dataclasses.replace(self.base or Policy(), **changes)

    def built(self, side: str) -> nn.Module:
        model: nn.Module = getattr(self, side)
        if self.base is None and not self.overrides[side]:
            return model
        return fpsim.quantize(model, dataclasses.replace(self.base or Policy(), overrides=self.overrides[side]))

    def logits(self, side: str) -> Tensor:
        with torch.no_grad():
            return self.built(side)(**self.batch).logits

    def __str__(self) -> str:
        padded = "padded" if "attention_mask" in self.batch else "not padded"
        kept = f"{self.hidden}x{self.depth}, {'eager' if self.eager else 'sdpa'}{', tied' * self.is_tied}"
        return f"{self.family} {self.mode} ({kept}, {padded})"


def _width(module: nn.Module) -> int:
    return min(module.weight.shape)  # type: ignore[union-attr, return-value, arg-type]


def per_tensor(x: Tensor, axis: int | None = None) -> Tensor:
    return quantised(x, None)


def per_column(x: Tensor, axis: int) -> Tensor:
    """With a scale for each column, along the axis that the product does not sum over."""
    return quantised(x, -2 if axis in (-1, x.ndim - 1) else -1)


def quantised(x: Tensor, axis: int | None, factor: float = 1.0, amax: Tensor | float | None = None) -> Tensor:
    """x in e4m3fn and back, with one scale for all of it, or for each vector along `axis`."""
    if not x.numel():  # of an expert without tokens
        return x
    y = x.float()
    if amax is None:
        amax = y.abs().max() if axis is None else y.abs().amax(axis, keepdim=True)
    scale = torch.as_tensor(amax * factor / 448).clamp(min=1e-12)
    return ((y / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def rewrite(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give a module a class of the same name with another forward: `forward(original, self, *args, **kwargs)`."""
    original = type(module).forward
    body = {"forward": lambda self, *args, **kwargs: forward(original, self, *args, **kwargs)}
    module.__class__ = type(type(module).__name__, (type(module),), body)


def on_output(source: random.Random, module: nn.Module, change: Callable[[Any], Any]) -> str:
    """Change what a module returns, by a hook or by its class; the first of a tuple."""

    def changed(output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    if source.random() < 0.4:
        module.register_forward_hook(lambda module, args, output: changed(output))
        return "by a hook"
    rewrite(module, lambda original, self, *args, **kwargs: changed(original(self, *args, **kwargs)))
    return "in its class"


def layer_forward(
    branches: tuple[tuple[str, str], ...],
    *,
    kept: tuple[float, ...] = (1, 1),
    post: int | None = None,
    cast: Callable[[Tensor], Tensor] = lambda x: x,
) -> Callable[..., Tensor]:
    """The forward of a decoder layer, written once for all families.

    kept: what the stream is multiplied by where each branch is added. post: the branch whose norm follows the sum.
    cast: what becomes of the stream behind each sum.
    """

    def forward(original: Any, self: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args:  # GPT-2 passes these by place
            kwargs |= dict(zip(("past_key_values", "attention_mask"), args))
        for i, (norm, part) in enumerate(branches):
            if getattr(self, "residual_in_fp32", False):  # Mamba's
                hidden = hidden.float()
            inner = hidden.to(next(self.parameters()).dtype)
            inner = inner if i == post else getattr(self, norm)(inner)
            found = getattr(self, part)(inner, **kwargs) if i == 0 else getattr(self, part)(inner)
            found = found[0] if isinstance(found, tuple) else found
            hidden = hidden * kept[i] + found if kept[i] != 1 else hidden + found
            hidden = cast(getattr(self, norm)(hidden) if i == post else hidden)
        return hidden

    return forward


def attention_forward(
    *,
    scores: Callable[[Tensor], Tensor] = lambda s: s,
    softmax: Callable[[Tensor], Tensor] = lambda s: functional.softmax(s, -1, dtype=torch.float32),
    probabilities: Callable[[Tensor], Tensor] = lambda p: p,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Attention as transformers' eager code, with another step."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        groups = getattr(module, "num_key_value_groups", 1)
        k, v = (x if groups == 1 else x.repeat_interleave(groups, 1) for x in (k, v))
        s = scores(torch.matmul(q, k.transpose(2, 3)) * scaling)
        p = probabilities(softmax(s if mask is None else s + mask).to(q.dtype))
        return torch.matmul(p, v).transpose(1, 2).contiguous(), p

    return attend


def attend_by(module: Any, attend: Callable[..., Any] | str) -> None:
    """Have one attention use another function, under a name that transformers looks up, as engines register theirs."""
    name = attend
    if not isinstance(attend, str):
        name = f"planted_{id(attend)}"
        ALL_ATTENTION_FUNCTIONS.register(name, attend)
    module.config = copy.copy(module.config)
    module.config._attn_implementation_internal = name
