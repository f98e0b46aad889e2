"""Attention's points, compared with loops over blocks of keys that are written out here."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tiers
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fpsim
from fpsim import Attention, Operand, Policy, Products, quantize

MIN = torch.finfo(torch.float32).min
# float32's unit roundoff times the longest chain: a product over 16 features or 10 keys, and 8 operations around it
FLOAT32 = 26 * 2.0**-24
FP8 = Attention(
    q="e4m3fn", k="e4m3fn", v="e4m3fn", p="e4m3fn", p_scale=256, do="e5m2", ds="e5m2", s="bf16", exp="bf16",
    o="bf16", dp="fp16", diff="fp16", block_kv=4,
)  # fmt: skip
ONE_BLOCK = Attention(diff="bf16", exp="bf16", s="fp16", p="mxfp8_e4m3", v="mxfp8_e4m3", dp="bf16", ds="bf16")
CASTS = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1fn": ml_dtypes.float4_e2m1fn,
}


def policy(points: Attention, roles: str | None = None) -> Policy:
    return Policy(roles, roles, roles, roles, products=Products(attention=points))


class Written(nn.Module):
    """Attention as models write it."""

    def __init__(self, way: str, p: float = 0.0, is_causal: bool = False) -> None:
        super().__init__()
        self.way, self.p, self.is_causal = way, p, is_causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.way == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, mask, self.p, self.is_causal)
        if self.way in ("bmm", "baddbmm"):
            shape = *q.shape[:-2], q.shape[-2], v.shape[-1]
            q, k, v = (x.flatten(0, -3) for x in (q, k, v))
            mask = None if mask is None else mask.expand(*shape[:-1], k.shape[-2]).flatten(0, -3)
        scale = 1 / math.sqrt(q.shape[-1])
        if self.way == "einsum":
            scores = torch.einsum("...qd,...kd->...qk", q, k) * scale
        elif self.way == "baddbmm":
            scores = torch.baddbmm(torch.zeros(1, 1, 1), q, k.mT, beta=0, alpha=scale)
        else:
            scores = (torch.bmm if self.way == "bmm" else torch.matmul)(q, k.mT) * scale
        if self.is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).tril() == 0, MIN)
        scores = scores if mask is None else scores + mask
        weights = F.softmax(scores, -1, dtype=torch.float32).to(q.dtype) if self.way == "eager" else scores.softmax(-1)
        weights = F.dropout(weights, self.p, self.training)
        if self.way == "einsum":
            return torch.einsum("...qk,...kd->...qd", weights, v)
        if self.way == "turned":
            return (v.mT @ weights.mT).mT
        out = (torch.bmm if self.way in ("bmm", "baddbmm") else torch.matmul)(weights, v)
        return out.reshape(shape) if self.way in ("bmm", "baddbmm") else out


WAYS = ("sdpa", "matmul", "eager", "bmm", "baddbmm", "einsum", "turned")


def inputs(seed: int = 0, queries: int = 7, keys: int = 10) -> list[Tensor]:
    """q, k, v of few bits, whose products are exact in any order, and a gradient of the result."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randint(-7, 8, (2, 3, n, 16), generator=generator) / 4 for n in (queries, keys, keys, queries)]
    return [x.requires_grad_() for x in made[:3]] + [made[3]]


def stepped(module: Any, given: list[Tensor], mask: Tensor | None = None, seed: int = 0) -> list[Tensor]:
    *qkv, gradient = given
    torch.manual_seed(seed)
    out = module(*qkv, mask)
    return [out.detach(), *torch.autograd.grad(out, qkv, gradient)]


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(((a.double() - b.double()).abs().max() / b.abs().max()).item() for a, b in pairs)


def native(x: Tensor, name: str | None) -> Tensor:
    """A cast of NumPy's or ml_dtypes'."""
    if name is None:
        return x
    kind = {
        "fp16": np.float16,
        "bf16": ml_dtypes.bfloat16,
        "e4m3fn": ml_dtypes.float8_e4m3fn,
        "e5m2": ml_dtypes.float8_e5m2,
        "e2m1fn": ml_dtypes.float4_e2m1fn,
    }
    return torch.from_numpy(x.numpy().astype(kind[name]).astype(np.float32))


def flash(points: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, block: int) -> list[Tensor]:
    """Attention over blocks of keys, and its backward pass, as `Attention` says, with casts of other libraries."""
    at = {name: points.get(name) for name in ("q", "k", "v", "s", "diff", "exp", "p", "o", "do", "dp", "ds")}
    scale, p_scale = 1 / math.sqrt(q.shape[-1]), points.get("p_scale", 1)
    q, k, v = (native(x.detach(), at[name]) for x, name in zip((q, k, v), "qkv", strict=True))
    scores = native(q @ k.mT, at["s"]) * scale
    largest, total, out = torch.full_like(scores[..., :1], -math.inf), 0.0, 0.0
    blocks = [slice(i, i + block) for i in range(0, scores.shape[-1], block)]
    for keys in blocks:
        above = torch.maximum(largest, scores[..., keys].amax(-1, keepdim=True))
        exp = native(torch.exp(native(scores[..., keys] - above, at["diff"])), at["exp"])
        decay = torch.exp(largest - above)
        total = total * decay + exp.sum(-1, keepdim=True)
        out = out * decay + native(exp * p_scale, at["p"]) @ v[..., keys, :] / p_scale
        largest = above
    out = native(out / total, at["o"])
    do = native(gradient, at["do"])
    exp = native(torch.exp(native(scores - largest, at["diff"])), at["exp"])
    p = exp / total
    dp = native(do @ v.mT, at["dp"])
    ds = native(p * (dp - (do * out).sum(-1, keepdim=True)) * scale, at["ds"])
    return [out, ds @ k, ds.mT @ q, native(p * p_scale, at["p"]).mT @ do / p_scale]


@pytest.mark.parametrize("way", WAYS)
def test_an_attention_without_points_has_torchs_bits(way: str) -> None:
    plain = stepped(Written(way), inputs())
    for points in (Attention(), Attention(p_scale=1, block_kv=None)):
        for found, expected in zip(stepped(quantize(Written(way), policy(points)), inputs()), plain, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("block", [1, 3, 4, 10, 64])
@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_blocks_of_keys_without_formats_are_within_float32s_error_of_float64(way: str, block: int) -> None:
    doubles = [x.detach().double().requires_grad_(i < 3) for i, x in enumerate(inputs())]
    expected = stepped(Written("matmul"), doubles)
    found = stepped(quantize(Written(way), policy(Attention(block_kv=block))), inputs())
    assert worst(found, expected) < FLOAT32


@pytest.mark.parametrize("way", WAYS)
def test_points_round_where_a_loop_written_out_rounds(way: str) -> None:
    names = ("q", "k", "v", "s", "diff", "exp", "p", "o", "do", "dp", "ds")
    words = {name: str(getattr(FP8, name)).split()[0] for name in names} | {"p_scale": 256}
    for seed, block in ((0, 4), (1, 3), (2, 10), (3, 1)):
        *qkv, gradient = inputs(seed)
        points = Attention(**{**words, "block_kv": block})
        found = stepped(quantize(Written(way), policy(points)), [*qkv, gradient])
        for a, b in zip(found, flash(words, *qkv, gradient, block), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["q", "k", "v", "s", "diff", "exp", "p", "o", "do", "dp", "ds"])
def test_each_point_alone_rounds_where_the_loop_does(name: str) -> None:
    fmt = "e2m1fn" if name in ("q", "k", "v", "do") else "bf16" if name in ("diff", "exp", "o") else "e5m2"
    *qkv, gradient = inputs(5)
    points = Attention(**{name: fmt, "block_kv": 4})
    found = stepped(quantize(Written("sdpa"), policy(points)), [*qkv, gradient])
    assert worst(found, flash({name: fmt}, *qkv, gradient, 4)) < FLOAT32
    plain = flash({}, *qkv, gradient, 4)
    assert worst(found, plain) > 16 * FLOAT32  # it rounds


def test_one_block_of_all_keys_rounds_the_divided_weights() -> None:
    *qkv, gradient = inputs(6)
    q, k, v = (x.detach() for x in qkv)
    points = Attention(s="bf16", diff="fp16", exp="bf16", p="e4m3fn", p_scale=64, o="bf16", ds="e5m2", do="e5m2")
    found = stepped(quantize(Written("matmul"), policy(points)), [*qkv, gradient])
    scores = native(q @ k.mT, "bf16") * 0.25
    exp = native(torch.exp(native(scores - scores.amax(-1, keepdim=True), "fp16")), "bf16")
    weights = exp / exp.sum(-1, keepdim=True)
    p, do = native(weights * 64, "e4m3fn"), native(gradient, "e5m2")
    dp = do @ v.mT
    ds = native(weights * (dp - (weights * dp).sum(-1, keepdim=True)) * 0.25, "e5m2")
    expected = [native(p @ v / 64, "bf16"), ds @ k, ds.mT @ q, p.mT @ do / 64]
    assert worst(found, expected) < FLOAT32
    assert torch.equal(found[0], expected[0])


def test_blocks_of_a_format_lie_along_the_axis_that_a_product_sums_over() -> None:
    *qkv, gradient = inputs(7, queries=40, keys=40)
    q, k, v = (x.detach() for x in qkv)
    points = Attention(q="mxfp4", k="mxfp4", p="mxfp4", v="mxfp4", do="mxfp4", ds="mxfp4", block_kv=40)
    found = stepped(quantize(Written("matmul"), policy(points)), [*qkv, gradient])

    def mx(x: Tensor, axis: int) -> Tensor:
        return fpsim.round_to(x, "mxfp4", axis=axis)

    scores = mx(q, -1) @ mx(k, -1).mT * 0.25
    exp = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = exp.sum(-1, keepdim=True)
    out = mx(exp, -1) @ mx(v, -2) / total
    p, do = exp / total, mx(gradient, -1)
    ds = p * (do @ mx(v, -1).mT - (do * out).sum(-1, keepdim=True)) * 0.25
    expected = [out, mx(ds, -1) @ mx(k, -2), mx(ds, -2).mT @ mx(q, -2), mx(p, -2).mT @ mx(gradient, -2)]
    assert worst(found, expected) < FLOAT32


@pytest.mark.parametrize("points", [Attention(block_kv=4), Attention(p="fp32", s="fp32")], ids=["blocks", "one"])
@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_masks_and_rows_without_any_key_are_as_in_native_code(way: str, points: Attention) -> None:
    extremes = torch.zeros(2, 1, 7, 10)
    extremes[..., 6:] = MIN  # a window
    extremes[0, :, 2] = MIN  # uniform over all keys
    hidden = torch.zeros_like(extremes).masked_fill(extremes < 0, -math.inf)
    for mask in (extremes, hidden):
        if mask is hidden and way == "eager":
            mask[0, :, 2, 0] = 0.0  # native code has NaN where all keys are at -inf
        # of rows at float32's minimum torch's fused backward pass on the CPU has another gradient than its unfused one
        expected = stepped(Written("matmul" if mask is extremes else way), inputs(), mask)
        assert worst(stepped(quantize(Written(way), policy(points)), inputs(), mask), expected) < FLOAT32
    causal = stepped(Written(way, is_causal=True), inputs(keys=7))
    assert worst(stepped(quantize(Written(way, is_causal=True), policy(points)), inputs(keys=7)), causal) < FLOAT32


@pytest.mark.parametrize("points", [Attention(block_kv=4), Attention(p="fp32")], ids=["blocks", "one"])
@pytest.mark.parametrize("way", ["sdpa", "eager", "einsum"])
def test_dropout_is_torchs_own_for_the_same_seed(way: str, points: Attention) -> None:
    expected = stepped(Written("matmul", p=0.4), inputs(), seed=3)
    found = stepped(quantize(Written(way, p=0.4), policy(points)), inputs(), seed=3)
    assert worst(found, expected) < FLOAT32
    assert worst(found, stepped(Written("matmul"), inputs())) > 0.1


class Layer(nn.Module):
    """Attention of four heads between two linear layers."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.qkv, self.attention, self.out = nn.Linear(16, 48), Written(way), nn.Linear(16, 16)
        self.checkpoints = False

    def _inner(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._inner, x, use_reentrant=False) if self.checkpoints else self._inner(x)


def trained(model: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("points", [FP8, ONE_BLOCK], ids=["blocks", "one"])
@tiers.parametrize("roles", [None, "bf16"], keep={"bf16"})
@tiers.parametrize("way", ["sdpa", "eager", "einsum"], keep={"eager"})
def test_compiled_and_checkpointed_attention_has_the_same_bits(way: str, points: Attention, roles: str | None) -> None:
    torch.manual_seed(0)
    layer, x = Layer(way), torch.randn(2, 9, 16)
    eager = trained(quantize(copy.deepcopy(layer), policy(points, roles)), x)
    compiled = torch.compile(quantize(copy.deepcopy(layer), policy(points, roles)), backend="aot_eager", fullgraph=True)
    layer.checkpoints = True
    recomputed = quantize(layer, policy(points, roles))
    for found in (trained(compiled, x), trained(recomputed, x)):
        assert all(map(torch.equal, found, eager))


def test_multihead_attention_and_grouped_queries() -> None:
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(16, 4, batch_first=True), torch.randn(2, 9, 16)
    for with_weights in (True, False):
        plain = layer(x, x, x, need_weights=with_weights)[0]
        found = quantize(copy.deepcopy(layer), policy(Attention(block_kv=4)))(x, x, x, need_weights=with_weights)[0]
        assert worst([found], [plain]) < FLOAT32

    class Grouped(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    q, k, v, gradient = inputs()
    few = [q, k[:, :1].detach().requires_grad_(), v[:, :1].detach().requires_grad_(), gradient]
    assert worst(stepped(quantize(Grouped(), policy(Attention(block_kv=4))), few), stepped(Grouped(), few)) < FLOAT32


def test_a_softmax_of_other_numbers_is_left_alone() -> None:
    class Router(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(x, -1)

    x = torch.randn(4, 8)
    assert torch.equal(quantize(Router(), policy(Attention(exp="e2m1fn", block_kv=2)))(x), torch.softmax(x, -1))


def test_weights_that_are_no_softmax_any_more_are_refused_in_blocks_and_rounded_in_one() -> None:
    class Masked(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
            weights = torch.softmax(q @ k.mT, -1) * 0.5
            return weights @ v

    with pytest.raises(NotImplementedError, match=r"blocks of 4, and .*Expected: .*block_kv=None"):
        stepped(quantize(Masked(), policy(Attention(block_kv=4))), inputs())
    q, k, v, gradient = inputs()
    found = stepped(quantize(Masked(), policy(Attention(p="e4m3fn"))), [q, k, v, gradient])
    assert torch.equal(found[0], native(torch.softmax(q @ k.mT, -1).detach() * 0.5, "e4m3fn") @ v.detach())


class Changed(nn.Module):
    """Weights that something happens to between softmax and product."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        return self.change(scores, torch.softmax(scores, -1)) @ v


def _written(scores: Tensor, weights: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    write(weights)
    return weights


CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tril": lambda s, w: w.tril(),
    "flip": lambda s, w: w.flip(-1),
    "roll": lambda s, w: w.roll(1, -1),
    "index": lambda s, w: w[..., torch.arange(10).flip(0)],
    "sort": lambda s, w: w.sort(-1).values,
    "gather": lambda s, w: w.gather(-1, torch.zeros_like(w, dtype=torch.int64)),
    "unbind": lambda s, w: torch.stack(w.unbind(0)),
    "a view": lambda s, w: _written(s, w, lambda w: w[:, 0].zero_()),
    "data": lambda s, w: _written(s, w, lambda w: w.data.mul_(2)),
    "item": lambda s, w: _written(s, w, lambda w: w.__setitem__((0, 0, 0), 0.0)),
    "dropout_": lambda s, w: _written(s, w, lambda w: torch.dropout_(w, 0.5, True)),
    "scores": lambda s, w: (s.zero_(), w)[1],
    "scores' data": lambda s, w: (s.data.zero_(), w)[1],
    "a clone": lambda s, w: w.clone(),
    "turned twice": lambda s, w: w.mT.contiguous().mT,
    "split heads": lambda s, w: w.flatten(0, 1).unflatten(0, w.shape[:2]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_are_changed_have_torchs_result_or_are_refused_in_blocks(change: str) -> None:
    q, k, v, _ = (x.detach() for x in inputs())
    module = Changed(CHANGES[change])
    torch.manual_seed(0)
    expected = module(q, k, v)
    torch.manual_seed(0)
    model = quantize(module, policy(Attention(block_kv=3)))
    if change in ("scores", "scores' data", "a clone", "turned twice", "split heads"):
        assert worst([model(q, k, v)], [expected]) < FLOAT32
    else:
        with pytest.raises(NotImplementedError, match=r"Expected: .*block_kv=None"):
            model(q, k, v)


def test_keys_may_lie_along_the_axis_before_the_last() -> None:
    class Turned(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
            return torch.softmax((q @ k.mT).mT * 0.25, -2).mT @ v

    points = Attention(p="e4m3fn", v="e4m3fn", exp="bf16", block_kv=4)
    found = stepped(quantize(Turned(), policy(points)), inputs())
    for a, b in zip(found, stepped(quantize(Written("matmul"), policy(points)), inputs()), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(NotImplementedError, match="is over axis 1"):
        quantize(Elsewhere(), policy(points))(*[x.detach() for x in inputs()[:3]])


class Elsewhere(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT, 1) @ v


@pytest.mark.parametrize("points", [Attention(exp="bf16"), Attention(block_kv=2)], ids=["one", "blocks"])
def test_without_keys_the_result_is_zero(points: Attention) -> None:
    q, k, v = (x.detach()[..., :n, :] for x, n in zip(inputs(), (3, 0, 0), strict=False))
    assert torch.equal(quantize(Written("matmul"), policy(points))(q, k, v), torch.zeros(2, 3, 3, 16))


@tiers.parametrize("impl", ["eager", "sdpa"], keep={"eager"})
@tiers.parametrize("name", ["llama", "mistral", "gpt2", "bert"], keep={"mistral"})
def test_models_of_transformers_meet_every_point(name: str, impl: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    same = {"vocab_size": 64, "attn_implementation": impl}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, **same}
    torch.manual_seed(0)
    if name == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=1, **sizes))
    elif name == "mistral":
        config = transformers.MistralConfig(num_key_value_heads=1, sliding_window=4, **sizes)
        model = transformers.MistralForCausalLM(config)
    elif name == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, **same, bos_token_id=0, eos_token_id=0)
        model = transformers.GPT2LMHeadModel(config)
    else:
        model = transformers.BertModel(transformers.BertConfig(**sizes))
    model.eval()
    ids = torch.randint(0, 64, (2, 11), generator=torch.Generator().manual_seed(1))

    def run(points: Attention | None) -> list[Tensor]:
        copied = copy.deepcopy(model)
        copied = copied if points is None else quantize(copied, policy(points))
        out = copied(ids)[0]
        out.square().sum().backward()
        return [out.detach(), *(p.grad for p in copied.parameters() if p.grad is not None)]

    plain, blocks = run(None), run(Attention(block_kv=4))
    largest = max(x.norm() for x in plain)  # of a bias of keys the gradient is 0 but for rounding
    assert all((a - b).norm() < 64 * FLOAT32 * largest for a, b in zip(blocks, plain, strict=True))  # two layers
    copied = quantize(copy.deepcopy(model), policy(FP8))
    with fpsim.record(copied) as recording:
        copied(ids)[0].square().sum().backward()
    seen = {(row["site"].rpartition(".")[2], row["role"]) for row in recording.rows()}
    roles = {role for _, role in seen}
    assert {"fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "dgrad.dx", "wgrad.dy", "wgrad.x", "output"} <= roles
    assert {"diff", "exp"} <= roles


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"q": "fp9"}, "q='fp9' is not an operand"),
        ({"s": "mxfp4"}, "a point that enters no product"),
        ({"s": Operand(lambda x, axis: x, name="f")}, "a point that enters no product"),
        ({"q": Operand("mxfp4", hadamard=fpsim.Hadamard(16))}, "has a transform or a source"),
        ({"k": Operand(None, source="fprop")}, "has a transform or a source"),
        ({"p": "e4m3fn per tensor delayed", "block_kv": 4}, "a history or a mask of its own"),
        ({"v": Operand("e4m3fn", ste="clip"), "block_kv": 4}, "a history or a mask of its own"),
        ({"p": "e4m3fn", "p_scale": 3}, "Expected: a power of two"),
        ({"p": "e4m3fn", "p_scale": math.inf}, "Expected: a power of two"),
        ({"p_scale": 2}, "given without p"),
        ({"block_kv": 0}, "block_kv"),
    ],
)  # fmt: skip
def test_what_an_attention_cannot_be_is_an_error(given: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        Attention(**given)


def test_products_take_points_in_the_place_of_a_word() -> None:
    with pytest.raises(TypeError, match="True, False, or a fpsim\\.Attention"):
        Products(attention="yes")  # type: ignore[arg-type]
    assert Products(attention=Attention()).attention is False
    assert Products.all("mxfp4", attention=FP8).with_rounding("stochastic").points.q.rounding == "stochastic"  # type: ignore[union-attr]
    few = Products(attention=Attention(do="e2m1fn", ds="e5m2")).with_stochastic_gradients(6).points
    assert few is not None
    assert [str(few.do), str(few.ds)] == ["e2m1fn stochastic", "e5m2 nearest_even"]


def test_flex_attention_with_points_is_refused() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    class Flex(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return flex_attention(q, k, v)

    with pytest.raises(NotImplementedError, match="cannot quantise inside of it"):
        quantize(Flex(), policy(FP8))(*[x.detach() for x in inputs()[:3]])
