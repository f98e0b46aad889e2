"""Tensor parallelism, attention's points and a cache in one policy, beside a GPT written out with ranks and casts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from readme_blocks import examples
from torch import Tensor

from fpsim import Policy, quantize

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"
RANKS, BLOCK, HEADS, LAYERS = 4, 8, 2, 2


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def e5m2(x: Tensor) -> Tensor:
    return x.to(torch.float8_e5m2).float()


def over_ranks(parts: list[Tensor]) -> Tensor:
    """The sum of what each rank sends in bfloat16, beginning with rank 0."""
    total = bf16(parts[0])
    for part in parts[1:]:
        total = bf16(total + bf16(part))
    return total


class Columnwise(torch.autograd.Function):
    """Each rank has columns of w: (in, out); the gradient of x is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        parts = [dy_r @ w_r.T for dy_r, w_r in zip(dy.chunk(RANKS, -1), w.chunk(RANKS, 1), strict=True)]
        return over_ranks(parts), x.T @ dy, dy.sum(0)


class Rowwise(torch.autograd.Function):
    """Each rank has rows of w, and the result is summed over the ranks; the bias is added once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        parts = [x_r @ w_r for x_r, w_r in zip(x.chunk(RANKS, -1), w.chunk(RANKS, 0), strict=True)]
        return bf16(over_ranks(parts) + bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return dy @ w.T, x.T @ dy, dy.sum(0)


class Fp8Attention(torch.autograd.Function):
    """Causal attention over blocks of keys, with casts. q, k, v: (batch, heads, positions, features)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = e4m3(q), e4m3(k), e4m3(v)
        hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf)
        largest = torch.full_like(scores[..., :1], -math.inf)
        total, out = torch.zeros_like(largest), torch.zeros_like(q)
        for i in range(0, k.shape[-2], BLOCK):
            one = scores[..., i : i + BLOCK]
            above = torch.maximum(largest, one.amax(-1, keepdim=True))
            exp, decay = torch.exp(one - above), torch.exp(largest - above)
            total = total * decay + exp.sum(-1, keepdim=True)
            out = out * decay + e4m3(exp * 256) @ v[..., i : i + BLOCK, :] / 256
            largest = above
        out = out / total
        ctx.save_for_backward(q, k, v, out, torch.exp(scores - largest) / total)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        q, k, v, out, p = ctx.saved_tensors
        do = e5m2(gradient)
        ds = e5m2(p * (do @ v.mT - (do * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1]))
        return ds @ k, ds.mT @ q, e4m3(p * 256).mT @ do / 256


def straight_through(x: Tensor) -> Tensor:
    return x + (e4m3(x.detach()) - x.detach())


def written_out(state: dict[str, Tensor], ids: Tensor) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])

    def layer(kind: Any, x: Tensor, name: str) -> Tensor:
        y: Tensor = kind.apply(x.flatten(0, 1), state[f"{name}.weight"], state[f"{name}.bias"])
        return y.unflatten(0, x.shape[:2])

    x = state["wte.weight"][ids] + state["wpe.weight"][torch.arange(ids.shape[1])]
    for i in range(LAYERS):
        qkv = layer(Columnwise, norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").chunk(3, -1)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in qkv)
        attended = Fp8Attention.apply(q, straight_through(k), straight_through(v)).transpose(1, 2).flatten(2)
        x = layer(Rowwise, attended, f"h.{i}.attn.c_proj") + x
        hidden = F.gelu(layer(Columnwise, norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"), approximate="tanh")
        x = x + layer(Rowwise, hidden, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ state["wte.weight"].T


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_gpt_under_one_policy_is_the_gpt_written_out(attention: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    (block,) = (code for code, _ in examples(PAGE) if "everything = " in code)
    assert len([line for line in block.splitlines() if line and "import" not in line]) <= 8
    names: dict[str, Any] = {}
    exec(block, names)
    everything = names["everything"]
    assert isinstance(everything, Policy)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=32, n_layer=LAYERS, n_head=HEADS, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation=attention,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)  # scores of 1 and more, biases that count
    ids = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(1))
    state = {name: p.detach().clone().requires_grad_() for name, p in model.transformer.named_parameters()}

    def loss_of(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")

    plain, model = model, quantize(model, everything)
    logits = model(ids).logits
    loss_of(logits).backward()
    expected = written_out(state, ids)
    loss_of(expected).backward()
    exact = plain(ids).logits
    loss_of(exact).backward()
    # a sum of another order moves few numbers over an edge of their format: far less than what the formats do
    assert (logits - expected).norm() < 0.01 * (logits - exact).norm()
    for name, p in model.transformer.named_parameters():
        far = (p.grad - dict(plain.transformer.named_parameters())[name].grad).norm()
        assert (p.grad - state[name].grad).norm() < 0.02 * far, name
