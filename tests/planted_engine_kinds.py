"""Differences between two engines, each with its true place and kind.

A way to plant one is a function of a case (`planted_engine_models.Engines`) that changes b, and sometimes a alike, and
returns a `Truth`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from planted_engine_models import (
    FAMILIES,
    MODES,
    ROTARY,
    Engines,
    attend_by,
    attention_forward,
    layer_forward,
    on_output,
    per_column,
    per_tensor,
    quantised,
    rewrite,
)
from torch import Tensor, nn
from torch.nn import functional

from fpsim import Accumulator, Attention, Operand, Products

FORMULA, ROUNDING, FORMAT = "formula", "rounding point", "format or scale of an operand"
ORDER, STATE, WEIGHTS = "accumulator or order", "cache or state", "weights"
KINDS = (FORMULA, ROUNDING, FORMAT, ORDER, STATE, WEIGHTS)
POLICIES = ("float32", "bf16", "fp8")
ROTARIES = ("llama", "qwen2_moe", "mixtral")
ATTENTIVE = ("gpt2", *ROTARIES)


class Truth(NamedTuple):
    """place: the module. how: what was done. also: a second kind that is as true, where the two cannot be told apart.
    within: whether the modules inside of the place are right too, as where a whole layer's weights differ."""

    place: str
    how: str
    also: str = ""
    within: bool = False


class Way(NamedTuple):
    kind: str
    plant: Callable[[Engines], Truth]
    families: tuple[str, ...]
    modes: tuple[str, ...]
    needs_eager: bool


WAYS: dict[str, Way] = {}


def way(kind: str, families: Any = FAMILIES, modes: Any = MODES, needs_eager: bool = False) -> Any:
    def keep(plant: Callable[[Engines], Truth]) -> Callable[[Engines], Truth]:
        WAYS[plant.__name__] = Way(kind, plant, tuple(families), tuple(modes), needs_eager)
        return plant

    return keep


def _of(case: Engines, names: list[str]) -> tuple[str, Any]:
    name = case.source.choice(names)
    return name, case.b.get_submodule(name)


def _layer(case: Engines) -> tuple[str, Any]:
    return _of(case, case.layers)


# Formula


@way(FORMULA)
def epsilon_of_a_norm(case: Engines) -> Truth:
    name, norm = _of(case, case.norms)
    key = "eps" if hasattr(norm, "eps") else "variance_epsilon"
    factor = case.source.choice((10, 100, 1000))
    setattr(norm, key, getattr(norm, key) * factor)
    return Truth(name, f"epsilon times {factor}")


@way(FORMULA, ATTENTIVE)  # Mamba's mixer never calls its own
def another_activation(case: Engines) -> Truth:
    names = [name for name, _ in case.b.named_modules() if name.rsplit(".")[-1] in ("act", "act_fn")]
    name, act = _of(case, names)
    is_silu = "silu" in type(act).__name__.lower()
    others: dict[str, Callable[[Tensor], Tensor]] = {"quick": lambda x: x * torch.sigmoid(1.702 * x)}
    if is_silu:
        others["gelu"] = functional.gelu
    else:
        erf = "new" not in type(act).__name__.lower()
        others["the other gelu"] = lambda x: functional.gelu(x, approximate="tanh" if erf else "none")
    which = case.source.choice([*others])
    rewrite(act, lambda original, self, x: others[which](x))
    return Truth(name, f"activation {which}")


@way(FORMULA)
def order_of_a_norm(case: Engines) -> Truth:
    name, layer = _layer(case)
    post = case.source.randrange(len(case.branches))
    rewrite(layer, layer_forward(case.branches, post=post))
    return Truth(name, f"norm behind branch {post}")


@way(FORMULA)
def residual(case: Engines) -> Truth:
    name, layer = _layer(case)
    which = case.source.randrange(len(case.branches))
    factor = case.source.choice((0, 0.5, 0.9, 1.05))
    rewrite(layer, layer_forward(case.branches, kept=tuple(factor if i == which else 1 for i in range(2))))
    return Truth(name, f"residual of branch {which} times {factor}")


@way(FORMULA)
def norm_that_is_another(case: Engines) -> Truth:
    name, norm = _of(case, case.norms)
    if isinstance(norm, nn.LayerNorm):
        rewrite(norm, lambda original, self, x: functional.rms_norm(x, x.shape[-1:], self.weight, self.eps) + self.bias)
        return Truth(name, "RMSNorm in the place of LayerNorm")
    if case.source.random() < 0.5:
        rewrite(norm, lambda original, self, x: original(self, x - x.mean(-1, keepdim=True)))
        return Truth(name, "the mean is subtracted")
    rewrite(norm, lambda original, self, x: original(self, x) * (1 + 1 / 64))
    return Truth(name, "scaled by 1 + 1/64")


@way(FORMULA, ROTARIES)
def rotary_code(case: Engines) -> Truth:
    rotary: Any = case.b.get_submodule(ROTARY)
    which = case.source.choice(("base", "first positions alike", "scaled positions"))
    base = case.source.choice((5e3, 1e5, 1e6))

    def forward(original: Any, self: Any, x: Tensor, position_ids: Tensor) -> Any:
        if which == "first positions alike":
            return original(self, x, position_ids * (position_ids > 2))
        if which == "scaled positions":
            return original(self, x, position_ids * 0.75)
        count = self.inv_freq.numel()
        freqs = position_ids[..., None].float() * base ** (-torch.arange(count) / count)
        emb = torch.cat((freqs, freqs), -1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)

    rewrite(rotary, forward)
    return Truth(ROTARY, f"rotary: {which}" + f" {base:g}" * (which == "base"))


@way(FORMULA, ATTENTIVE)
def scale_of_attention(case: Engines) -> Truth:
    name, attention = _of(case, case.attentions)
    factor = case.source.choice((math.sqrt(2), 0.5, 1.05))
    attention.scaling *= factor
    return Truth(name, f"attention scale times {factor:.3g}")


@way(FORMULA, ATTENTIVE, needs_eager=True)
def steps_of_attention(case: Engines) -> Truth:
    name, attention = _of(case, case.attentions)
    if case.source.random() < 0.5:
        attend_by(attention, attention_forward(scores=lambda s: 2 * torch.tanh(s / 2)))
        return Truth(name, "scores capped at 2")

    def sunk(s: Tensor) -> Tensor:
        s = s.float()
        return functional.softmax(torch.cat((s, torch.zeros_like(s[..., :1])), -1), -1)[..., :-1]

    attend_by(attention, attention_forward(softmax=sunk))
    return Truth(name, "softmax with a sink")


@way(FORMULA, ("qwen2_moe", "mixtral"))
def router(case: Engines) -> Truth:
    name, gate = _of(case, [f"{layer}.mlp.gate" for layer in case.layers])

    def forward(original: Any, self: Any, x: Tensor) -> Any:
        logits, scores, indices = original(self, x)
        return logits, scores / scores.sum(-1, keepdim=True) * 0.9, indices

    rewrite(gate, forward)
    return Truth(name, "weights of experts sum to 0.9")


@way(FORMULA)
def temperature_of_the_head(case: Engines) -> Truth:
    how = on_output(case.source, case.b.get_submodule("lm_head"), lambda x: x / 1.1)
    return Truth("lm_head", f"temperature 1.1 {how}")


# Rounding point


def _halved(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).to(x.dtype)


@way(ROUNDING, modes=("float32",))
def result_cast(case: Engines) -> Truth:
    name, module = _of(case, [*case.linears, *case.norms, "lm_head"])
    dtype = case.source.choice((torch.bfloat16, torch.float16))
    how = on_output(case.source, module, _halved(dtype))
    return Truth(name, f"result in {dtype} {how}")


@way(ROUNDING, ATTENTIVE, ("float32", "native"), needs_eager=True)
def softmax_in_half(case: Engines) -> Truth:
    name, attention = _of(case, case.attentions)
    dtype = torch.bfloat16 if case.mode == "native" or case.source.random() < 0.5 else torch.float16

    def lowered(x: Tensor) -> Tensor:  # rows of padding alone would be -inf in fp16
        found = (x - x.amax(-1, keepdim=True)).clamp(min=-6e4).to(dtype).exp()
        return found / found.sum(-1, keepdim=True)

    steps: dict[str, Any] = {"softmax": {"softmax": lowered}}
    if case.mode == "float32":  # the others are in bfloat16 already
        steps |= {"probabilities": {"probabilities": _halved(dtype)}, "scores": {"scores": _halved(dtype)}}
    which = case.source.choice([*steps])
    attend_by(attention, attention_forward(**steps[which]))
    return Truth(name, f"{which} in {dtype}")


@way(ROUNDING, modes=("float32",))
def stream_in_bf16(case: Engines) -> Truth:
    name, layer = _layer(case)
    rewrite(layer, layer_forward(case.branches, cast=_halved(torch.bfloat16)))
    return Truth(name, "residual stream in bfloat16")


@way(ROUNDING, ROTARIES, ("float32",))
def rotary_in_bf16(case: Engines) -> Truth:
    rotary = case.b.get_submodule(ROTARY)
    if case.source.random() < 0.5:
        halved = _halved(torch.bfloat16)
        rewrite(rotary, lambda original, *args, **kwargs: tuple(map(halved, original(*args, **kwargs))))
        return Truth(ROTARY, "cos and sin in bfloat16")

    def forward(original: Any, self: Any, x: Tensor, position_ids: Tensor) -> Any:
        freqs = (position_ids[..., None].bfloat16() * self.inv_freq.bfloat16()).to(x.dtype)
        emb = torch.cat((freqs, freqs), -1)
        return emb.cos(), emb.sin()

    rewrite(rotary, forward)
    return Truth(ROTARY, "angles in bfloat16")


@way(ROUNDING, ("llama", "qwen2_moe", "mixtral", "mamba"), ("native",))
def norm_in_half(case: Engines) -> Truth:
    name, norm = _of(case, case.norms)

    def low(original: Any, self: Any, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def fused(original: Any, self: Any, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * y).to(x.dtype)

    which = case.source.choice((low, fused))
    rewrite(norm, which)
    return Truth(name, {"low": "all in bfloat16", "fused": "one rounding at the end"}[which.__name__])


@way(ROUNDING, ("llama",), ("native",))
def silu_with_one_rounding(case: Engines) -> Truth:
    name, mlp = _of(case, [f"{layer}.mlp" for layer in case.layers])

    def forward(original: Any, self: Any, x: Tensor) -> Tensor:
        return self.down_proj((self.act_fn(self.gate_proj(x).float()) * self.up_proj(x).float()).to(x.dtype))

    rewrite(mlp, forward)
    return Truth(name, "SiLU x up rounded once")


@way(ROUNDING, ("gpt2", "llama", "qwen2_moe", "mixtral"), ("native",))
def head_in_float32(case: Engines) -> Truth:
    head = case.b.get_submodule("lm_head")
    rewrite(head, lambda original, self, x: functional.linear(x.float(), self.weight.float()))
    return Truth("lm_head", "logits in float32")


@way(ROUNDING, modes=("bf16", "fp8"))
def result_left_in_float32(case: Engines) -> Truth:
    name, _ = _of(case, case.norms)  # of several operations; a product's result is rounded where it enters the next one
    case.override("b", name, activation=None)
    return Truth(name, "Policy(activation=None)", FORMAT)


@way(ROUNDING, modes=("float32",))
def output_of_products(case: Engines) -> Truth:
    name, _ = _of(case, [*case.linears, "lm_head"])
    fmt = case.source.choice(("bf16", "fp16"))
    case.override("b", name, products=Products(output=fmt))
    return Truth(name, f"Products(output={fmt})")


# Format or scale of an operand


@way(FORMAT, modes=POLICIES)
def operands_of_a_policy(case: Engines) -> Truth:
    name, _ = _of(case, [*case.linears, "lm_head"])
    column = Operand(per_column, name="per column")
    tensor = Operand(per_tensor, name="one scale for all")
    row = "e4m3fn per row fp32"
    pairs: dict[str, Any] = {
        "int8 per row": ("int8 per row fp32", "int8 per row fp32"),
        "e5m2": ("e5m2 per row fp32", "e5m2 per row fp32"),
        "mxfp8": ("mxfp8_e4m3", "mxfp8_e4m3"),
        "without scales": ("e4m3fn", "e4m3fn"),
        "x transposed": (column, row),
        "w transposed": (row, column),
        "x per tensor": (tensor, row),
        "in blocks of 16": ("e4m3fn per 16 fp32", "e4m3fn per 16 fp32"),
        "w alone": (None, "int8 per row fp32"),
    }
    if case.mode == "fp8":
        pairs["none"] = (None, None)
    which = case.source.choice([*pairs])
    case.override("b", name, products=Products(fprop=pairs[which]))
    return Truth(name, f"operands {which}")


@way(FORMAT, modes=("bf16", "fp8"))
def format_of_a_role(case: Engines) -> Truth:
    name, _ = _of(case, case.linears)
    role, fmt = case.source.choice((("weight", "fp16"), ("weight", "e4m3fn"), ("activation", "fp16")))
    case.override("b", name, **{role: fmt})
    return Truth(name, f"{role}={fmt}")


def _quantising(case: Engines, module: Any, axis: int | None, factor: float = 1.0, amax: float | None = None) -> None:
    def forward(original: Any, self: Any, x: Tensor) -> Tensor:
        return original(self, quantised(x, axis, factor, amax))

    rewrite(module, forward)


@way(FORMAT, modes=("float32", "native"))
def scale_by_code(case: Engines) -> Truth:
    name, module = _of(case, [*case.linears, "lm_head"])
    other = case.a.get_submodule(name)
    which = case.source.choice(("per row", "per tensor and per row", "transposed", "stale", "scale times 3"))
    if which != "per row":
        _quantising(case, other, None if which == "per tensor and per row" else -1)
    if which in ("per row", "per tensor and per row"):
        _quantising(case, module, -1)
    elif which == "transposed":
        _quantising(case, module, -2)
    elif which == "stale":
        _quantising(case, module, None, amax=case.source.choice((0.5, 1.0, 9.0)))
    else:
        _quantising(case, module, -1, factor=3)
    return Truth(name, f"code: {which}")


@way(FORMAT, ATTENTIVE, ("float32", "native"), needs_eager=True)
def probabilities_in_fp8(case: Engines) -> Truth:
    name, attention = _of(case, case.attentions)
    attend_by(attention, attention_forward(probabilities=lambda p: quantised(p, None)))
    return Truth(name, "probabilities in e4m3fn")


# Accumulator or order

ACCUMULATORS: dict[str, Any] = {
    "fp16": "fp16",
    "bf16 chunks": Accumulator("bf16", chunk=8, outer="fp32"),
    "4 ranks that send bf16": Accumulator("fp32", order="torch", splits=4, split_format="bf16"),
    "2 ranks that send fp16": Accumulator("fp32", order="torch", splits=2, split_format="fp16"),
    "hopper_fp8": "hopper_fp8",
    "toward zero": Accumulator("e8m13", rounding="toward_zero"),
}


@way(ORDER, modes=POLICIES)
def accumulator_of_a_policy(case: Engines) -> Truth:
    name, _ = _of(case, [*case.linears, "lm_head"])
    which = case.source.choice([*ACCUMULATORS])
    fprop: Any = case.base.products.fprop if case.base and case.base.products else (None, None)
    case.override("b", name, products=Products(fprop=fprop, accumulator=ACCUMULATORS[which]))
    return Truth(name, f"accumulator {which}")


@way(ORDER, ATTENTIVE, POLICIES)
def blocks_of_keys(case: Engines) -> Truth:
    name, _ = _of(case, case.attentions)
    point = {case.source.choice(("p", "exp")): case.source.choice(("bf16", "e4m3fn"))}
    block = case.source.choice((3, 4, 5))
    fprop: Any = case.base.products.fprop if case.base and case.base.products else (None, None)
    for side, options in (("a", {}), ("b", {"block_kv": block})):
        case.override(side, name, products=Products(fprop=fprop, attention=Attention(**point, **options)))
    return Truth(name, f"block_kv={block} with {point}")


@way(ORDER, ATTENTIVE, POLICIES)
def accumulator_of_an_attention(case: Engines) -> Truth:
    name, _ = _of(case, case.attentions)
    fprop: Any = case.base.products.fprop if case.base and case.base.products else (None, None)
    for side, options in (("a", {}), ("b", {"accumulator": case.source.choice(("fp16", "hopper_fp8"))})):
        case.override(side, name, products=Products(fprop=fprop, attention=Attention(p="bf16", **options)))
    return Truth(name, f"Attention({options})")


@way(ORDER, ("llama", "qwen2_moe", "mixtral", "mamba"), ("float32", "native"))
def sums_in_parts_by_code(case: Engines) -> Truth:
    names = [name for name in case.linears if isinstance(case.b.get_submodule(name), nn.Linear)]
    name, linear = _of(case, names)
    parts = case.source.choice((2, 4))

    def forward(original: Any, self: Any, x: Tensor) -> Tensor:
        xs, ws = x.chunk(parts, -1), self.weight.chunk(parts, -1)
        some = [functional.linear(y, w).bfloat16() for y, w in zip(xs, ws)]
        found = sum(some[1:], some[0]).to(x.dtype)
        return found if self.bias is None else found + self.bias

    rewrite(linear, forward)
    return Truth(name, f"{parts} partial sums in bfloat16", ROUNDING)


# Cache or state


@way(STATE, ATTENTIVE, POLICIES)
def cache_of_a_layer(case: Engines) -> Truth:
    name, _ = _of(case, case.attentions)
    fmt = case.source.choice(("e4m3fn", "e5m2", "int8 per row fp32", "e4m3fn per row fp32", "int4 per row fp32"))
    case.override("b", name, cache=case.source.choice(({"k": fmt}, {"v": fmt}, {"k": fmt, "v": fmt})))
    return Truth(name, f"cache {fmt}")


@way(STATE, ROTARIES)
@torch.no_grad()
def stale_frequencies(case: Engines) -> Truth:
    rotary: Any = case.b.get_submodule(ROTARY)
    which = case.source.choice(("rounded", "of another base", "interpolated"))
    old = rotary.inv_freq
    count = torch.arange(old.numel()) / old.numel()
    new = {"rounded": old.bfloat16(), "of another base": 1e5**-count, "interpolated": old / 2}[which]
    rotary.inv_freq = new.to(old.dtype)
    return Truth(ROTARY, f"inv_freq {which}")


class FrozenNorm(nn.BatchNorm1d):
    """Batch norm over the tokens, in the place of a layer's norm."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, -2)).view_as(x)


@way(STATE)
@torch.no_grad()
def batch_statistics(case: Engines) -> Truth:
    name = case.source.choice(case.norms)
    for model in (case.a, case.b):
        old: Any = model.get_submodule(name)
        norm = FrozenNorm(case.hidden).to(old.weight.dtype).eval()
        norm.weight.copy_(old.weight)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, norm)
    which = case.source.choice(("mean", "variance", "of the batch"))
    norm_: Any = case.b.get_submodule(name)
    if which == "of the batch":
        norm_.train()
        return Truth(name, "statistics of the batch", FORMULA)
    statistic = norm_.running_mean if which == "mean" else norm_.running_var
    statistic += torch.rand_like(statistic) * 0.1
    return Truth(name, f"stale running {which}")


@way(STATE, modes=("float32", "native"))
@torch.no_grad()
def stale_scale_in_a_buffer(case: Engines) -> Truth:
    name, _ = _of(case, [*case.linears, "lm_head"])
    factor = case.source.choice((0.5, 1.7, 3))
    seen: list[float] = []
    hook = case.a.get_submodule(name).register_forward_pre_hook(lambda m, args: seen.append(float(args[0].abs().max())))
    case.logits("a")
    hook.remove()
    for side, which in (("a", 1.0), ("b", factor)):
        one = getattr(case, side).get_submodule(name)
        one.register_buffer("input_amax", torch.tensor(max(seen) * which))
        rewrite(one, lambda original, self, x: original(self, quantised(x, None, amax=self.input_amax.float())))
    return Truth(name, f"amax in a buffer times {factor}")


# Weights


def _weight(case: Engines) -> tuple[str, Any]:
    name, module = _of(case, case.linears)
    return name, module.weight


@way(WEIGHTS)
@torch.no_grad()
def rounded_once_more(case: Engines) -> Truth:
    name, weight = _weight(case)
    fmt = case.source.choice(("bfloat16", "e4m3fn", "e4m3fn per row")) if case.mode == "float32" else "e4m3fn per row"
    if fmt == "e4m3fn per row":
        weight.copy_(quantised(weight, -1))
    else:
        weight.copy_(weight.to({"bfloat16": torch.bfloat16, "e4m3fn": torch.float8_e4m3fn}[fmt]).float())
    return Truth(name, f"weight in {fmt}")


@way(WEIGHTS)
@torch.no_grad()
def untied_head(case: Engines) -> Truth:
    head: Any = case.b.get_submodule("lm_head")
    weight = head.weight.detach().clone()
    which = case.source.choice(("another step", "rounded"))
    weight = quantised(weight, -1) if which == "rounded" else weight + torch.randn_like(weight) * 0.01
    head.weight = nn.Parameter(weight)
    return Truth("lm_head", f"head of its own, {which}" if case.is_tied else f"head {which}")


@way(WEIGHTS)
@torch.no_grad()
def another_checkpoint(case: Engines) -> Truth:
    size = case.source.choice((0.001, 0.01, 0.1))
    if case.source.random() < 0.6:
        name, weight = _weight(case)
        weight += torch.randn_like(weight) * size
        return Truth(name, f"weight of another step, {size}")
    name, layer = _layer(case)
    for parameter in layer.parameters():
        parameter += torch.randn_like(parameter) * size
    return Truth(name, f"all weights of a layer of another step, {size}", within=True)


@way(WEIGHTS)
@torch.no_grad()
def turned(case: Engines) -> Truth:
    square = [n for n in case.linears if len({*case.a.get_submodule(n).weight.shape}) == 1]
    name, module = _of(case, square or case.linears)
    if square:
        module.weight.copy_(module.weight.clone().T)
        return Truth(name, "weight transposed")
    module.weight.copy_(module.weight.flip(0))
    return Truth(name, "rows of a weight turned")


@way(WEIGHTS)
@torch.no_grad()
def norm_or_bias_not_loaded(case: Engines) -> Truth:
    names = [n for n in (*case.linears, *case.norms) if getattr(case.b.get_submodule(n), "bias", None) is not None]
    name, module = _of(case, names or case.norms)
    if names:
        module.bias.zero_()
        return Truth(name, "bias not loaded")
    module.weight.fill_(1)
    return Truth(name, "weight of a norm not loaded")


@way(WEIGHTS, ("qwen2_moe", "mixtral"))
@torch.no_grad()
def experts_in_another_order(case: Engines) -> Truth:
    name, experts = _of(case, [f"{layer}.mlp.experts" for layer in case.layers])
    for parameter in experts.parameters():
        parameter.copy_(parameter[torch.tensor([1, 0, 2, 3])])
    return Truth(name, "experts 0 and 1 exchanged")
