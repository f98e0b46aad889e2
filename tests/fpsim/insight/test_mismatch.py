"""Two engines with one planted difference: the place, the kind and the shares that `mismatch` names."""

from __future__ import annotations

import copy
import math
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fpsim import Accumulator, Attention, Policy, Products, mismatch, quantize
from fpsim.__main__ import main
from fpsim.insight.engines.likelihoods import interval
from fpsim.insight.engines.remedies import fields_of
from fpsim.insight.engines.sides import Pair
from fpsim.torch_modes import CALL_SLOT

WIDTH, WORDS = 32, 64


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.tensor(1 / math.sqrt(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.mT) * self.scale
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return self.out(torch.softmax(scores.masked_fill(hidden, torch.finfo(x.dtype).min), -1) @ v)


class Experts(nn.Module):
    """A router, and the two of four experts that it chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(self.gate(x).softmax(-1), 2, -1)
        mask = F.one_hot(chosen, 4).to(x.dtype) * weights.unsqueeze(-1)
        return sum(mask.sum(-2)[..., i : i + 1] * F.gelu(e(x)) for i, e in enumerate(self.experts))  # type: ignore[return-value]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attend, self.norm2, self.mlp = Norm(), Attend(), Norm(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    made = Small().eval()
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return made


IDS = torch.randint(0, WORDS, (4, 12), generator=torch.Generator().manual_seed(1))


def _replaced(of: nn.Module, name: str, forward: Callable[..., Any]) -> nn.Module:
    module = of.get_submodule(name)
    module.forward = types.MethodType(forward, module)
    return of


def _epsilon(of: Any) -> None:
    of.blocks[1].norm2.eps = 1e-1


def _residual(of: Any) -> None:
    _replaced(of, "blocks.0", lambda self, x: self.attend(self.norm1(x)) + self.mlp(self.norm2(x)))


def _order_of_norm(of: Any) -> None:
    _replaced(of, "blocks.1", lambda self, x: (y := self.attend(self.norm1(x)) + x) + self.norm2(self.mlp(y)))


def _rounded_result(of: Any) -> None:
    of.blocks[0].mlp.experts[2].register_forward_hook(lambda module, given, out: out.to(torch.float8_e4m3fn).float())


def _half_softmax(of: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        hidden = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu(1)
        scores = ((q @ k.mT) * self.scale).masked_fill(hidden, torch.finfo(x.dtype).min)
        return self.out(torch.softmax(scores, -1).to(torch.float8_e5m2).to(x.dtype) @ v)  # type: ignore[no-any-return]

    _replaced(of, "blocks.1.attend", forward)


def _quantised_by_hand(of: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        scale = x.abs().amax() / 7
        return F.linear(torch.round(x / scale) * scale, self.weight, self.bias)

    _replaced(of, "blocks.0.attend.out", forward)


def _quantised_weight(of: Any) -> None:
    w = of.blocks[1].attend.qkv.weight
    w.data = w.data.to(torch.float8_e4m3fn).float()


def _untied(of: Any) -> None:
    of.head.weight = nn.Parameter(of.head.weight.detach() + 0.02)


def _stale(of: Any) -> None:
    of.blocks[0].attend.scale.mul_(1.1)


PLANTED: dict[str, tuple[Callable[[Any], None], str, str]] = {
    "an epsilon": (_epsilon, "blocks.1.norm2", "formula"),
    "a missing residual": (_residual, "blocks.0", "formula"),
    "the order of a norm": (_order_of_norm, "blocks.1", "formula"),
    "a result in E4M3": (_rounded_result, "blocks.0.mlp.experts.2", "rounding point"),
    "softmax in E5M2": (_half_softmax, "blocks.1.attend", "format or scale of an operand"),
    "an operand in four bits": (_quantised_by_hand, "blocks.0.attend.out", "format or scale of an operand"),
    "a weight in E4M3": (_quantised_weight, "blocks.1.attend.qkv", "weights"),
    "an untied head": (_untied, "head", "weights"),
    "a stale scale": (_stale, "blocks.0.attend", "cache or state"),
}


@pytest.mark.parametrize("cause", PLANTED)
@pytest.mark.parametrize("fmt", [None, "bf16"])
def test_a_planted_difference_is_named_with_its_kind(cause: str, fmt: str | None) -> None:
    plant, place, kind = PLANTED[cause]
    a = model()
    b = copy.deepcopy(a)
    plant(b)
    found = mismatch(a, b, IDS) if fmt is None else mismatch(quantize(a, fmt), quantize(b, fmt), IDS)
    assert [row["module"] for row in found] == [place]
    assert found[0]["kind"] == kind
    assert f"{place} (" in str(found)
    assert kind in str(found)
    assert found[0]["put_back"] == found[0]["added"] == 1.0
    assert found.halving == [(place, 0.0)]


BF16 = dict.fromkeys(("weight", "activation", "error", "weight_grad"), "bf16")
POLICIES: dict[str, tuple[Policy, Policy, str, str]] = {
    "granularity": (
        Policy(products=Products(fprop=("e4m3fn per row fp32", None))),
        Policy(products=Products(fprop=("e4m3fn per tensor fp32", None))),
        "format or scale of an operand",
        "operand x: e4m3fn per row fp32 nearest_even in a, e4m3fn per tensor fp32",
    ),
    "accumulator": (
        Policy(products=Products(accumulator="fp16")),
        Policy(products=Products(accumulator="cb16_chunk64")),
        "accumulator or order",
        "accumulator: fp16 in a",
    ),
    "splits": (
        Policy(products=Products(accumulator=Accumulator("fp32", order="torch", splits=2, split_format="bf16"))),
        Policy(products=Products(accumulator=Accumulator("fp32", order="torch", splits=4, split_format="bf16"))),
        "accumulator or order",
        "splits=4",
    ),
    "a role": (Policy(), Policy(**BF16), "rounding point", "activation: float32 in a, bf16"),
    "another role": (Policy(**BF16), Policy(**{**BF16, "activation": "fp16"}), "format or scale of an operand", "fp16"),
}


@pytest.mark.parametrize("case", POLICIES)
def test_policies_that_differ_in_one_module_are_told_apart(case: str) -> None:
    own, others, kind, words = POLICIES[case]
    of_a, of_b = (Policy(overrides={"blocks.1.mlp.gate": inner}) for inner in (own, others))
    found = mismatch(quantize(model(), of_a), quantize(model(), of_b), IDS)
    assert [(row["module"], row["kind"]) for row in found] == [("blocks.1.mlp.gate", kind)]
    assert words in found[0]["detail"]


def test_attentions_blocks_of_keys_are_an_order() -> None:
    wide = quantize(model(), Policy(products=Products(attention=Attention(p="e4m3fn", block_kv=4))))
    narrow = quantize(model(), Policy(products=Products(attention=Attention(p="e4m3fn", block_kv=3))))
    found = mismatch(wide, narrow, IDS)
    assert {row["module"] for row in found} == {"blocks.0.attend", "blocks.1.attend"}
    assert {row["kind"] for row in found} == {"accumulator or order"}
    assert any(t.what == "attention as in a" and t.kl == 0 for t in found.tried)


def _permuted(module: nn.Module) -> None:
    for linear in module.modules():
        if isinstance(linear, nn.Linear):
            order = torch.randperm(linear.in_features)
            linear.forward = types.MethodType(  # type: ignore[method-assign]
                lambda self, x, order=order: F.linear(x[..., order], self.weight[:, order], self.bias), linear
            )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("reorders", [False, True])
def test_nothing_is_named_where_nothing_differs_but_the_order_of_sums(seed: int, reorders: bool) -> None:
    a = model(seed)
    b = copy.deepcopy(a)
    if reorders:
        _permuted(b)
    found = mismatch(a, b, IDS)
    assert not found.is_beyond
    assert "no module is named" in str(found)
    if reorders:
        assert 0 < found.figures.mean_dlogp < 10 * found.floor.mean_dlogp


def test_the_figures_are_those_of_their_definitions() -> None:
    a, b = model(), model(1)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    found = mismatch(a, b, (IDS,), mask=lambda batch: mask, eps=0.1, attribution="none").figures
    with torch.no_grad():
        p, q = (m(IDS).double().log_softmax(-1)[:, :-1] for m in (a, b))
    chosen = [x.gather(-1, IDS[:, 1:, None]).squeeze(-1) for x in (p, q)]
    valid = (mask[:, 1:] * mask[:, :-1]).bool()
    d = (chosen[0] - chosen[1])[valid]
    ratio = d.exp()
    expected = {
        "mean_dlogp": d.abs().mean(),
        "largest_dlogp": d.abs().max(),
        "k1": -d.mean(),
        "k3": (ratio - 1 - d).mean(),
        "kl": (p.exp() * (p - q)).sum(-1)[valid].mean(),
        "outside": ((ratio - 1).abs() > 0.1).double().mean(),
        "flips": (p.argmax(-1) != q.argmax(-1))[valid].double().mean(),
    }
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(float(value), rel=1e-12), name
    assert found.perplexities[0] == pytest.approx(float((-chosen[0][valid].mean()).exp()), rel=1e-12)
    assert found.by_sequence[:, 1].tolist() == valid.sum(1).tolist()
    assert len(found.by_position) == IDS.shape[1] - 1


def test_two_places_share_the_divergence_and_both_are_put_back() -> None:
    a = model()
    b = copy.deepcopy(a)
    _epsilon(b)
    _quantised_by_hand(b)
    found = mismatch(a, b, IDS)
    assert {row["module"] for row in found} == {"blocks.1.norm2", "blocks.0.attend.out"}
    for row in found:  # put back by hand: b with one of the two alone
        other = copy.deepcopy(a)
        (_quantised_by_hand if row["module"] == "blocks.1.norm2" else _epsilon)(other)
        left = mismatch(a, other, IDS, attribution="none").figures.kl
        assert row["put_back"] == pytest.approx(1 - left / found.figures.kl, abs=1e-6)
        low, high = row["put_back_interval"]
        assert low <= row["put_back"] <= high
    assert found.passes < 2 * len([*a.named_modules()]) + 20


def test_experts_that_flip_are_counted_with_their_margin_and_replayed() -> None:
    a = model()
    b = quantize(a, Policy(overrides={"blocks.0.mlp.gate": Policy(products=Products(fprop=("mxfp4", "mxfp4")))}))
    found = mismatch(a, b, IDS)
    rows = {row["module"]: row for row in found.decisions}
    seen = []
    hooks = [m.blocks[0].mlp.gate.register_forward_hook(lambda *args: seen.append(args[-1].detach())) for m in (a, b)]  # type: ignore[union-attr,index]
    with torch.no_grad():
        a(IDS), b(IDS)
    for hook in hooks:
        hook.remove()
    chosen = [x.softmax(-1).topk(2, -1).indices.sort(-1).values for x in seen]
    flips = (chosen[0] != chosen[1]).any(-1).double().mean()
    assert rows["blocks.0.mlp"]["flips"] == pytest.approx(float(flips))
    assert 0 < flips < 1
    assert rows["blocks.0.mlp"]["margin_of_flips"] < rows["blocks.0.mlp"]["margin"]
    assert found.replayed < found.figures.kl
    assert "Decisions at blocks.0.mlp" in str(found)


def test_remedies_are_measured() -> None:
    bf16 = Policy(**BF16)
    b = Policy(**BF16, overrides={"head": Policy(**BF16, products=Products(fprop=("e2m1fn", "e2m1fn")))})
    found = mismatch(quantize(model(), bf16), quantize(model(), b), IDS)
    tried = {t.what: t for t in found.tried}
    assert tried["the head, head, in float32"].kl < 0.1 * found.figures.kl
    assert {module for module, _, _ in found.parts} == {"head"}
    assert {part for _, part, _ in found.parts} == {"operand x", "operand w"}
    assert found.weights.share >= 0
    assert 0 < found.weights.effective <= 1


def test_roundings_of_the_same_results_are_put_back_together() -> None:
    # a policy rounds results by its activations or by the output of its products: put back alone, each would be both
    fused = Policy(products=Products(fprop=("bf16", "bf16"), output="bf16"))
    assert dict(fields_of(Policy(**BF16), fused)) == {
        "weight": replace(fused, weight="bf16"),
        "activation and output": Policy(activation="bf16", products=Products(fprop=("bf16", "bf16"))),
        "operand x": Policy(products=Products(fprop=(None, "bf16"), output="bf16")),
        "operand w": Policy(products=Products(fprop=("bf16", None), output="bf16")),
    }
    back = dict(fields_of(fused, Policy(**BF16)))["activation and output"]
    assert (back.activation, back.products) == (None, Products(output="bf16"))
    found = mismatch(quantize(model(), Policy(**BF16)), quantize(model(), fused), IDS, attribution="back")
    assert "activation and output" in {part for _, part, _ in found.parts}


def test_a_cache_is_the_kind_of_modules_that_store_keys_and_values_alone() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    rollout = Policy(products=Products(fprop=("e4m3fn", "e4m3fn")), cache={"k": "e5m2", "v": "e5m2"})
    found = mismatch(quantize(llama, Policy()), quantize(llama, rollout), IDS, attribution="back")
    kinds = {row["module"]: row["kind"] for row in found}
    assert {name for name, kind in kinds.items() if kind == "cache or state"} == {"model.layers.0.self_attn"}
    assert kinds["lm_head"] == "format or scale of an operand"
    (words,) = [row["detail"] for row in found if row["module"] == "model.layers.0.self_attn"]
    assert "cache: as it is in a, k=e5m2 nearest_even, v=e5m2 nearest_even in b" in words
    assert {module for module, part, _ in found.parts if part == "cache"} <= {"model.layers.0.self_attn"}


def test_two_dtypes_of_a_real_model_and_names_that_are_mapped() -> None:
    a = model()
    half = copy.deepcopy(a).bfloat16()
    found = mismatch(a, half, IDS)
    assert {row["kind"] for row in found} == {"rounding point"}

    class Renamed(nn.Module):
        def __init__(self, of: Any) -> None:
            super().__init__()
            self.wte, self.h, self.final, self.lm = of.embed, of.blocks, of.norm, of.head

        def forward(self, ids: Tensor) -> Any:
            x = self.wte(ids)
            for block in self.h:
                x = block(x)
            return types.SimpleNamespace(logits=self.lm(self.final(x)) * 1.01)

    other = Renamed(copy.deepcopy(a))
    found = mismatch(a, other, IDS, names={"wte": "embed", "h": "blocks", "final": "norm", "lm": "head"})
    assert [(row["module"], row["kind"]) for row in found] == [("", "formula")]
    partly = mismatch(a, other, IDS, names={"h": "blocks"})
    assert partly.alone == {"a": ["embed", "norm", "head"], "b": ["wte", "final", "lm"]}
    assert "In a alone, and so not compared: embed, norm, head." in str(partly)


def test_models_are_left_as_they_were_even_where_one_raises() -> None:
    a = model()
    b = quantize(a, "bf16")
    before = [p.clone() for p in (*a.parameters(), *b.parameters())]
    state = torch.get_rng_state()
    mismatch(a, b, IDS)
    broken = copy.deepcopy(a)
    _replaced(broken, "blocks.1", lambda self, x: x.nothing)
    with pytest.raises(AttributeError, match="nothing"):
        mismatch(a, broken, IDS)
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, before, (*a.parameters(), *b.parameters())))
    for of in (a, b, broken):
        assert not any(CALL_SLOT in vars(m) for m in of.modules())
    assert torch.equal(a(IDS), a(IDS))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"batch": torch.randn(2, 3)}, TypeError, "has no ids"),
        ({"batch": []}, ValueError, "is empty|no ids"),
        ({"batch": 3}, TypeError, "Expected: ids, a tuple, a mapping"),
        ({"b": nn.Sequential(nn.Embedding(WORDS, WORDS))}, ValueError, "has the name of one of a"),
        ({"eps": 0}, ValueError, "eps"),
        ({"batch": IDS[:, :1]}, ValueError, "nothing is predicted"),
        ({"attribution": "all"}, ValueError, "attribution"),
        ({"mask": lambda batch: torch.ones(3)}, ValueError, "The mask has shape"),
        ({"logits": lambda out: out[0]}, ValueError, "logits"),
        ({"names": {"h": 3}}, TypeError, "a mapping from names"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], error: type[Exception], words: str) -> None:
    given: dict[str, Any] = {"a": model(), "b": model(), "batch": IDS, **change}
    a, b, batch = (given.pop(name) for name in ("a", "b", "batch"))
    with pytest.raises((error, TypeError), match=words):
        mismatch(a, b, batch, **given)


def test_dropout_and_batch_norms_of_models_in_training_are_those_of_eval() -> None:
    class Net(nn.Sequential):
        def forward(self, ids: Tensor) -> Tensor:
            return self[3](self[2](self[1](self[0](ids)).transpose(1, 2)).transpose(1, 2))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    a = Net(nn.Embedding(WORDS, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, WORDS))
    a(IDS)
    b = copy.deepcopy(a)
    b[3].register_forward_hook(lambda module, given, out: out.half().float())
    before = [x.clone() for x in (*a.buffers(), *b.buffers())]
    found = mismatch(a, b, IDS)
    assert [row["module"] for row in found] == ["3"]
    assert all(map(torch.equal, before, (*a.buffers(), *b.buffers())))
    assert a.training
    assert b[1].training
    with pytest.raises(ValueError, match="one module"):
        mismatch(a, a, IDS)


def test_nan_is_an_error_that_names_the_side() -> None:
    b = model()
    with torch.no_grad():
        b.norm.weight[0] = math.nan  # type: ignore[union-attr,index]
    with pytest.raises(ValueError, match=r"The logits of b have NaN"):
        mismatch(model(), b, IDS)


def test_an_interval_covers_the_share_in_95_of_100_draws() -> None:
    generator = torch.Generator().manual_seed(5)
    hits = 0
    for seed in range(200):
        whole = torch.rand(40, generator=generator).double() + 0.5
        part = whole * (0.3 + 0.2 * torch.randn(40, generator=generator).double())
        low, high = interval(part.numpy(), whole.numpy(), seed)
        hits += low <= 0.3 <= high
    assert 180 <= hits <= 199  # 95 % of 200 within three standard deviations


@tiers.parametrize("name", ["llama", "mixtral", "gpt2", "mamba"], keep={"llama"})
def test_models_of_transformers_are_taken_module_by_module(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    torch.manual_seed(0)
    if name == "llama":
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
        place = "model.layers.1.mlp.down_proj"
    elif name == "mixtral":
        made = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads, num_local_experts=4))
        place = "model.layers.1.self_attn.o_proj"
    elif name == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0)
        made, place = transformers.GPT2LMHeadModel(config), "transformer.h.0.mlp.c_fc"
    else:
        made = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, state_size=4))
        place = "backbone.layers.1.mixer.in_proj"
    made.eval()
    ids = IDS % 64
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    b = copy.deepcopy(made)
    b.get_submodule(place).register_forward_hook(lambda module, given, out: out.half().float())
    found = mismatch(made, b, batch)
    assert [(row["module"], row["kind"]) for row in found] == [(place, "rounding point")]
    assert not mismatch(made, copy.deepcopy(made), batch)


def test_a_run_that_begins_at_the_first_change_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    a = model()
    operand = "e4m3fn per row fp32"
    products = Products(fprop=(operand, operand))
    sides = [quantize(a, "bf16"), quantize(a, Policy(weight="bf16", activation="bf16", products=products))]
    found = mismatch(*sides, IDS)
    assert found.resumed > len(found)
    assert f"of which {found.resumed} begin" in str(found)
    run = Pair.run
    monkeypatch.setattr(Pair, "run", lambda *args, resume=None, **named: run(*args, **named))
    whole = mismatch(*sides, IDS)
    assert (whole.resumed, whole.passes) == (0, found.passes)
    assert [*found] == [*whole]
    assert found.halving == whole.halving


def test_no_run_begins_later_where_random_numbers_are_drawn() -> None:
    a = model()
    stochastic = Policy(weight="bf16", activation="bf16", rounding="stochastic")
    assert mismatch(a, quantize(a, stochastic), IDS).resumed == 0


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("an epsilon", "first apart at add"),
        ("a missing residual", "first apart at add"),
        ("softmax in E5M2", "b alone computes to"),
        ("an operand in four bits", "b alone computes abs, amax"),
    ],
)
def test_the_operation_is_named_from_which_on_code_is_apart(cause: str, words: str) -> None:
    a = model()
    b = copy.deepcopy(a)
    PLANTED[cause][0](b)
    assert words in mismatch(a, b, IDS)[0]["detail"]


SCRIPT = """
import torch, fpsim
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Embedding(50, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 50))
make_a = lambda: fpsim.quantize(net, "bf16")
make_b = lambda: fpsim.quantize(net, fpsim.Policy(overrides={"1": "e5m2"}, **dict.fromkeys(ROLES, "bf16")))
ROLES = ("weight", "activation")
make_same = make_a
batch = torch.randint(0, 50, (4, 16))
"""


def test_the_command_prints_the_report_behind_a_bar_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pair.py").write_text(SCRIPT)
    a, b, same, batch = (f"{tmp_path}/pair.py:{name}" for name in ("make_a", "make_b", "make_same", "batch"))
    assert main(["mismatch", a, b, "--batch", batch]) == 1
    found = capsys.readouterr()
    assert "Most: 1 (Linear): " in found.out
    assert found.err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main(["mismatch", a, same, "--batch", batch, "--attribution", "none"]) == 0
    bar = capsys.readouterr().err
    assert "1/28 passes, at most" in bar
    assert bar.endswith("\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pair.py", "pair.py:make_b"], "Expected FILE:NAME"),
        (["pair.py:make_a", "pair.py:make_c"], "does not define `make_c`"),
        (["none.py:make_a", "pair.py:make_b"], "Expected FILE:NAME"),
    ],
)
def test_the_command_refuses_what_is_not_there(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pair.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["mismatch", *words, "--batch", "pair.py:batch"])
    assert message in capsys.readouterr().err


class WithPositions(nn.Module):
    """Adds the embedding of positions, which come in one axis for all sequences; it stores what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, positions: Tensor | None = None, past: Any = None) -> Tensor:
        x = self.embed(input_ids) + (0 if positions is None else self.places(positions))
        if past is not None:
            past.seen.append(x.mean(1, keepdim=True))
            x = x + sum(past.seen)
        return self.head(x)


def test_as_many_positions_as_sequences_are_not_taken_apart_with_these() -> None:
    torch.manual_seed(0)
    a = WithPositions()
    b = quantize(a, "bf16")
    ids = torch.randint(0, WORDS, (8, 9))
    floors = [
        mismatch(a, b, {"input_ids": x, "positions": torch.arange(x.shape[1])}, attribution="none").floor
        for x in (ids, ids[:, :8])
    ]
    assert floors[1].mean_dlogp < 10 * floors[0].mean_dlogp < 1e-4


def test_a_cache_in_the_batch_is_the_same_in_each_run_and_left_as_it_was() -> None:
    torch.manual_seed(0)
    a = WithPositions()
    b = quantize(a, "bf16")
    ids, past = torch.randint(0, WORDS, (4, 5)), types.SimpleNamespace(seen=[torch.ones(4, 1, WIDTH)])
    found = mismatch(a, b, {"input_ids": ids, "past": past}, attribution="none").figures
    assert len(past.seen) == 1
    with torch.no_grad():
        p, q = (
            m(ids, past=types.SimpleNamespace(seen=[torch.ones(4, 1, WIDTH)])).double().log_softmax(-1)[:, :-1]
            for m in (a, b)
        )
    assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-9)


def test_figures_of_several_batches_are_those_of_all_their_tokens() -> None:
    a, b = model(), model(1)
    masks = torch.ones(2, *IDS.shape, dtype=torch.long)
    masks[0, :, :3] = 0  # padding on the left in all of the first batch
    masks[1, 0, 4:] = 0
    batches = [{"ids": ids, "kept": mask} for ids, mask in zip((IDS, IDS.flip(0)), masks)]
    found = mismatch(
        Named(a), Named(b), iter(batches), tokens=lambda x: x["ids"], mask=lambda x: x["kept"], attribution="none"
    )
    sums, counts, changes = torch.zeros(IDS.shape[1] - 1), torch.zeros(IDS.shape[1] - 1), []
    with torch.no_grad():
        for batch in batches:
            after = batch["ids"][:, 1:, None]
            p, q = (m(batch["ids"]).double().log_softmax(-1)[:, :-1].gather(-1, after).squeeze(-1) for m in (a, b))
            valid = (batch["kept"][:, 1:] * batch["kept"][:, :-1]).bool()
            sums, counts = sums + ((p - q).abs() * valid).sum(0), counts + valid.sum(0)
            changes.append((p - q)[valid])
    assert found.figures.by_position.tolist() == pytest.approx((sums / counts).tolist(), rel=1e-9)
    assert found.figures.at_position.tolist() == counts.tolist()
    weights = torch.cat(changes).exp().clamp(max=2.0)
    assert found.weights.effective == pytest.approx(float(weights.sum() ** 2 / (weights**2).sum() / len(weights)))
    alone = mismatch(Named(a), Named(b), batches[0], tokens=lambda x: x["ids"], mask=lambda x: x["kept"])
    assert [math.isnan(x) for x in alone.figures.by_position] == [True] * 3 + [False] * (IDS.shape[1] - 4)


class Named(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor, kept: Tensor) -> Tensor:
        return self.inner(ids)


class Adapted(nn.Module):
    """A model, which is another one's too, and an adapter of its logits."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.adapter = base, nn.Linear(WORDS, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.adapter(self.base(ids))


def test_what_one_side_has_alone_is_beyond_the_floor_too() -> None:
    base = model()
    found = mismatch(Adapted(base), base, IDS, names={"": "base"})
    assert not found
    assert found.is_beyond
    assert "modules that are not compared" in str(found)
    assert "In a alone, and so not compared: the model itself, adapter." in str(found)


class Noisy(nn.Module):
    """A model whose code draws random numbers in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, ids: Tensor) -> Tensor:
        return F.dropout(self.inner(ids), 0.1, training=True)


def test_random_numbers_are_no_order_of_sums() -> None:
    a = Noisy()
    b = copy.deepcopy(a)
    b.inner.blocks[0].attend.out.weight.data *= 1.01  # type: ignore[index,union-attr]
    found = mismatch(a, b, IDS)
    assert [row["module"] for row in found] == ["inner.blocks.0.attend.out"]
    assert found.floor.mean_dlogp < 1e-5


@pytest.mark.parametrize(("dtype", "word"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_a_native_model_beside_its_emulation_has_no_other_policy(dtype: torch.dtype, word: str) -> None:
    a = model()
    for side in (copy.deepcopy(a).to(dtype), quantize(a, word)):
        assert side(IDS).dtype in (dtype, torch.float32)
    pair = [copy.deepcopy(a).to(dtype), quantize(a, word)]
    assert all("float32 in" not in row["detail"] for row in mismatch(*pair, IDS))
    pair[1].head.weight.data[3] *= 2  # type: ignore[union-attr,operator]
    found = mismatch(*pair, IDS)
    assert "weights" in {row["kind"] for row in found}
    assert all("float32 in" not in row["detail"] for row in found)


def test_vocabularies_of_different_sizes_and_one_name_for_two_modules_are_refused() -> None:
    torch.manual_seed(0)
    a, b = WithPositions(), WithPositions()
    b.head = nn.Linear(WIDTH, WORDS + 8)
    with pytest.raises(ValueError, match=rf"a has logits of {WORDS} tokens, and b of {WORDS + 8}"):
        mismatch(a, b, IDS)
    with pytest.raises(ValueError, match="maps two modules of b to 'embed'"):
        mismatch(a, copy.deepcopy(a), IDS, names={"places": "embed"})


def test_a_perplexity_beyond_float64_is_infinite() -> None:
    a = model()
    a.head = nn.Linear(WIDTH, WORDS)
    a.head.weight.data *= 1e6  # type: ignore[union-attr,operator]
    found = mismatch(a, quantize(a, "bf16"), IDS, attribution="none")
    assert found.figures.perplexities == (math.inf, math.inf)
    assert {tried.what: tried.kl for tried in found.tried}[
        "fp16 in the place of bf16, whose logits are NaN"
    ] == math.inf
