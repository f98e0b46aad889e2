"""Small models of transformers in native bfloat16, and the code of engines in the place of theirs."""

import copy
import importlib
import sys

import torch
import torch.nn.functional as F
from torch import nn

from fpsim.insight.engines.places import Permuted

BF16 = torch.bfloat16


def model_of(kind, attention="eager", vocabulary=64, layers=2, positions=64, gain=2.0):
    """A small model, with weights so many times as large as at first: its tokens differ then without a training."""
    t = importlib.import_module("transformers")
    ends = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 0, "attn_implementation": attention}
    base = dict(hidden_size=128, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, **ends)
    base |= {"intermediate_size": 256, "max_position_embeddings": positions}
    gpt2 = dict(n_embd=128, n_layer=layers, n_head=4, n_positions=positions, **ends)
    gpt2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    torch.manual_seed(0)
    model = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**base)),
        "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**base, num_local_experts=4)),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**gpt2)),
    }[kind]()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(gain)
            elif gain > 1:
                p.add_(0.2 * torch.randn_like(p))  # weights of norms are 1 else, which rounds nothing
    return model.eval()


def in_bf16(model, has_buffers):
    """The model as `model.to(bfloat16)`, or as `from_pretrained(dtype=bfloat16)` has it: its buffers are float32."""
    native = copy.deepcopy(model).to(BF16)
    if not has_buffers:
        for name, buffer in model.named_buffers():
            around, _, own = name.rpartition(".")
            setattr(native.get_submodule(around), own, buffer.clone())
    return native


# 48 sequences: one tie that falls otherwise moves the rest of its sequence by 1e-3, so that the mean of six sequences
# depends on the order of sums of the machine's BLAS by as much as the bound that tests have.
IDS = torch.randint(0, 64, (48, 48), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def log_softmax(model, ids=IDS):
    """Of each token but the first, given those before it: (batch, time - 1, vocabulary)."""
    return model(input_ids=ids, use_cache=False).logits[:, :-1].double().log_softmax(-1)


def chosen(found, ids=IDS):
    """The log-probabilities of the tokens themselves."""
    return found.gather(-1, ids[:, 1:, None]).squeeze(-1)


def log_probabilities(model, ids=IDS):
    return chosen(log_softmax(model, ids), ids)


def apart(x, y):
    return float((x - y).abs().mean())


def floor_of(native, ids=IDS):
    """Native bfloat16 beside itself, with sums permuted and its sequences one by one."""
    with Permuted():
        permuted = torch.cat([log_probabilities(native, row[None]) for row in ids])
    return apart(log_probabilities(native, ids), permuted)


# Engines: native bfloat16 models of transformers with the code of an engine in the place of theirs


def rms_norm(x, norm):
    """FlashInfer's `rmsnorm`: float32 until the result is stored."""
    x = x.float()
    wide = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return (wide * norm.weight.float()).to(BF16)


def fuse_norms(model):
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            module.forward = lambda x, norm=module: F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def fuse_residuals(model):
    """FlashInfer's `fused_add_rmsnorm`: what is added is stored, and normalised as it was before that."""
    residuals = []

    def normalise(x, norm):
        if not residuals:
            residuals.append(x)
            return rms_norm(x, norm)
        wide = x.float() + residuals.pop().float()
        residuals.append(wide.to(BF16))
        return rms_norm(wide, norm)

    def forward(layer, x, **named):
        x = layer.self_attn(hidden_states=normalise(x, layer.input_layernorm), **named)[0]
        return layer.mlp(normalise(x, layer.post_attention_layernorm))

    def last(x, norm):
        try:
            return normalise(x, norm)
        finally:
            residuals.clear()

    for layer in model.model.layers:
        layer.forward = lambda x, layer=layer, **named: forward(layer, x, **named)
    model.model.norm.forward = lambda x: last(x, model.model.norm)


def fuse_gates(model):
    """FlashInfer's `silu_and_mul`."""
    for layer in model.model.layers:

        def forward(x, mlp=layer.mlp):
            return mlp.down_proj((F.silu(mlp.gate_proj(x).float()) * mlp.up_proj(x).float()).to(BF16))

        layer.mlp.forward = forward


def rotate_in_float32(model):
    rotary, attentions = model.model.rotary_emb, [layer.self_attn for layer in model.model.layers]
    rotary.forward = lambda x, own=rotary.forward, **named: own(x.float(), **named)
    namespace = {**sys.modules[type(attentions[0]).__module__].__dict__}
    turn = namespace["apply_rotary_pos_emb"]
    namespace["apply_rotary_pos_emb"] = lambda q, k, *codes: tuple(x.to(BF16) for x in turn(q, k, *codes))
    for attention in attentions:
        own = type(attention).forward
        inner = getattr(own, "__wrapped__", own)
        function = type(inner)(inner.__code__, namespace, closure=inner.__closure__, argdefs=inner.__defaults__)
        function.__kwdefaults__ = inner.__kwdefaults__
        attention.forward = function.__get__(attention)


def keep_logits(model):
    head = model.lm_head
    head.forward = lambda x: F.linear(x.float(), head.weight.float())


def cast(x, amax):
    """To float8 and back: a float32 scale of a largest absolute value, as compressed-tensors and DeepSeek take it."""
    scale = (amax / 448).clamp(min=1e-30)
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


def by_row(x):
    return cast(x, x.float().abs().amax(-1, keepdim=True))


def by_block(x):
    return cast(x, x.float().abs().unflatten(-1, (-1, 128)).amax(-1).repeat_interleave(128, -1))


def by_square(w):
    blocks = F.max_pool2d(w.float().abs()[None], 128, ceil_mode=True)[0]
    amax = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return cast(w, amax[: w.shape[0], : w.shape[1]])


def in_fp8(of_x, of_w):
    def change(model):
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name != "lm_head":
                module.forward = lambda x, w=module.weight: F.linear(of_x(x), of_w(w)).to(BF16)

    return change


ENGINES = {
    "fused_norm": fuse_norms,
    "fused_residual_norm": fuse_residuals,
    "fused_silu_mul": fuse_gates,
    "rope_fp32": rotate_in_float32,
    "logits_fp32": keep_logits,
    "fp8_w8a8": in_fp8(by_row, by_row),
    "fp8_block": in_fp8(by_block, by_square),
}


def cache_in_fp8(model):
    """Keys and values as vLLM's `kv_cache_dtype="fp8"` stores them, which saturate."""
    t = importlib.import_module("transformers")

    class Stored(t.DynamicCache):
        def update(self, keys, values, *args, **kwargs):
            kept = (x.clamp(-448, 448).to(torch.float8_e4m3fn).to(BF16) for x in (keys, values))
            return super().update(*kept, *args, **kwargs)

    own = model.forward
    model.forward = lambda **named: own(**{**named, "use_cache": True, "past_key_values": Stored(config=model.config)})


ENGINES["kv_fp8"] = cache_in_fp8
