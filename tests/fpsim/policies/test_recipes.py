"""Recipes are what their sources say: operand by operand, layer by layer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tiers
import torch
from torch import nn

import fpsim
from fpsim import Policy, as_policy, quantize, recipe, recipes

# Operands of fprop (x, w), dgrad (dy, w) and wgrad (dy, x), as the sources have them: element, block, scale, rule,
# rounding, random bits, transform.
E4M3 = ("e4m3fn", "tensor", "fp32", "amax", "nearest_even", None, None)
E5M2 = ("e5m2", *E4M3[1:])
E4M3_DELAYED, E5M2_DELAYED = ((e, "tensor", "fp32", "delayed 1024 max 0", *E4M3[4:]) for e in ("e4m3fn", "e5m2"))
PART = ("e4m3fn", 128, "e8m0fnu", "ceil", "nearest_even", None, None)
TILE, ROW = (("e4m3fn", block, *PART[2:]) for block in ((128, 128), "row"))  # torchao rounds scales of rows too
MX8 = ("e4m3fn", 32, "e8m0fnu", "ceil", "nearest_even", None, None)
MX4 = ("e2m1fn", 32, "e8m0fnu", "floor gain 0.75", "stochastic", None, (64, "random"))
NV = ("e2m1fn", 16, "e4m3fn and fp32", "amax", "nearest_even", None, None)
NV_W = ("e2m1fn", (16, 16), *NV[2:])
NV_DY = (*NV[:4], "stochastic", 8, None)
NV_T, NV_DY_T = (*NV[:6], (16, "fixed")), (*NV_DY[:6], (16, "fixed"))
USED = ("fprop", None, None, None, None, None, None)  # what the forward product used, as it is
NV4, MXFP4 = ("e2m1fn", 16, "e4m3fn and fp32", *NV[3:]), ("e2m1fn", 32, "e8m0fnu", "floor", "nearest_even", None, None)
INT4 = ("FixedPoint(word_length=4, fraction_length=0, signed=True, symmetric=True)", 32, "fp32", "absmax", *NV[4:])
TOKEN, TERNARY = ((name, None, None, None, "own", None, None) for name in ("int8 per row", "ternary absmean"))
FLUSHED = ("fp16 without subnormals", None, None, None, "own", None, None)
BF16 = ("bf16", None, None, None, "nearest_even", None, None)
TABLE: dict[str, Any] = {
    "fp8_delayed": ((E4M3_DELAYED, E4M3_DELAYED), (E5M2_DELAYED, E4M3_DELAYED), (E5M2_DELAYED, E4M3_DELAYED)),
    "fp8_current": ((E4M3, E4M3), (E5M2, E4M3), (E5M2, E4M3)),
    "fp8_row": ((ROW, ROW), (ROW, ROW), (ROW, ROW)),
    "fp8_tile": ((PART, TILE), (PART, TILE), (PART, PART)),
    "mxfp8": ((MX8, MX8), (MX8, MX8), (MX8, MX8)),
    "mxfp4_sr": ((BF16, BF16), (MX4, MX4), (MX4, MX4)),
    "nvfp4": ((NV, NV_W), (NV_DY, NV_W), (NV_DY_T, NV_T)),
    "qat_mxfp4": ((None, MXFP4), (None, USED), (None, None)),
    "qat_nvfp4": ((NV4, NV4), (None, USED), (None, USED)),
    "qat_int4": ((None, INT4), (None, USED), (None, None)),
    "bitnet_b158": ((TOKEN, TERNARY), (None, USED), (None, USED)),
    "bf16": None,
    "fp16": None,
    "fp16_gfx90a": ((None, None), (FLUSHED, FLUSHED), (FLUSHED, FLUSHED)),
    "bf16_pure": None,
}


def words_of(operand: fpsim.Operand | None) -> tuple[Any, ...] | None:
    """An operand as a row of the table."""
    if operand is None:
        return None
    if operand.fmt is None:
        return operand.source, None, None, None, None, None, None
    f, transform = operand.fmt, operand.hadamard
    rest = operand.spec().rounding, operand.random_bits, transform and (transform.size, transform.signs)
    if not isinstance(f, fpsim.BlockFormat):
        return str(f), None, None, None, *rest
    rule = f.scale_rule
    if isinstance(rule, fpsim.Delayed):
        rule = f"delayed {rule.history} {rule.amax} {rule.margin}"
    if f.gain != 1:
        rule = f"{rule} gain {f.gain}"
    return str(f.element), f.block, str(f.scale) + " and fp32" * f.tensor_scale, rule, *rest


@pytest.mark.parametrize("name", TABLE)
def test_the_operands_are_those_of_the_source(name: str) -> None:
    products = recipe(name).products
    if TABLE[name] is None:
        assert products is None
        return
    assert products is not None
    assert not products.attention
    found = tuple(tuple(map(words_of, pair)) for pair in (products.fprop, products.dgrad, products.wgrad))
    assert found == TABLE[name]


def test_everything_else_is_bf16_and_master_values_are_float32() -> None:
    for row in recipes():
        policy, wide = recipe(row.name), "fp16" if row.name in ("fp16", "fp16_gfx90a") else "bf16"
        assert (policy.weight, policy.activation, policy.error) == (wide, wide, wide)
        assert policy.weight_grad == ("bf16" if row.name == "bf16_pure" else None)
    assert [*TABLE] == [row.name for row in recipes()]


def test_subnormals_of_the_backward_pass_are_zero_on_gfx90a() -> None:
    """The program of pytorch#182952: 64 terms of half the least normal number, of which none is left."""
    subnormal = torch.finfo(torch.float16).tiny / 2
    gradients = {}
    for name in ("fp16", "fp16_gfx90a"):
        layer = quantize(nn.Linear(64, 64, bias=False), recipe(name))
        with torch.no_grad():
            layer.weight.fill_(1.0)
        x = torch.ones(64, 64, requires_grad=True)
        out = layer(x)
        assert torch.equal(out, torch.full((64, 64), 64.0))
        out.backward(torch.full((64, 64), subnormal))
        gradients[name] = x.grad, layer.weight.grad
    for gradient in gradients["fp16"]:
        assert torch.equal(gradient, torch.full((64, 64), 64 * subnormal))
    for gradient in gradients["fp16_gfx90a"]:
        assert torch.equal(gradient, torch.zeros(64, 64))


def test_what_is_not_subnormal_is_what_fp16_has_on_gfx90a() -> None:
    operand = recipe("fp16_gfx90a").products.dgrad[0]
    least = torch.finfo(torch.float16).tiny
    x = torch.tensor(
        [least, -least, least - 2.0**-24, -(2.0**-24), 1.0, 65504.0, torch.inf, -torch.inf, torch.nan, -0.0]
    )
    found = operand.fmt.function(x, -1)
    native = x.half().float()
    kept = torch.tensor([True, True, False, False, True, True, True, True, True, True])
    expected = torch.where(kept, native, native * 0)
    assert torch.equal(found.view(torch.int32)[:8], expected.view(torch.int32)[:8])
    assert found[8].isnan()
    assert found[9].view(torch.int32).item() == -(2**31)


# Layers in high precision


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv, self.out, self.up, self.down = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.out(self.qkv(self.norm(x)))))


def gpt() -> nn.Sequential:
    """13 layers: a head, and 12 before it."""
    parts = {"tokens": nn.Embedding(5, 8), "a": Block(), "b": Block(), "c": Block()}
    torch.manual_seed(0)
    net = nn.Sequential()
    for name, part in {**parts, "norm": nn.LayerNorm(8), "head": nn.Linear(8, 5)}.items():
        net.add_module(name, part)
    return net


@pytest.mark.parametrize(
    ("name", "last"), [("fp8_tile", []), ("mxfp8", []), ("mxfp4_sr", []), ("nvfp4", ["c.up", "c.down"])]
)
def test_embeddings_norms_the_head_and_the_last_layers_stay_in_bf16(name: str, last: list[str]) -> None:
    kept = ["tokens", "a.norm", "b.norm", "c.norm", *last, "norm", "head"]  # 15 % of 12 layers are 1.8
    policy = recipe(name, gpt())
    assert [*policy.overrides] == kept
    assert {str(inner) for inner in policy.overrides.values()} == {str(recipe("bf16"))}
    rows = {row.module: row for row in fpsim.summary(quantize(gpt(), policy))}
    bf16 = {row.module: row for row in fpsim.summary(quantize(gpt(), recipe("bf16")))}
    assert {module for module, row in rows.items() if row[2:] == bf16[module][2:]} == set(kept)


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_current", "fp8_row", "bf16", "fp16"])
def test_other_recipes_keep_no_layer_apart(name: str) -> None:
    assert recipe(name, gpt()) == recipe(name)


def test_layers_are_found_whatever_their_class() -> None:
    attention = nn.MultiheadAttention(8, 2)
    weighted = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    convolution = nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 3, 3))
    net = nn.Sequential(convolution, nn.BatchNorm2d(3), nn.LSTM(8, 8), weighted, nn.ReLU(), attention)
    assert [*recipe("mxfp8", net).overrides] == ["1", "5"]
    assert [*recipe("nvfp4", net).overrides] == ["1", "3", "5"]
    assert [*recipe("nvfp4", nn.Linear(2, 2)).overrides] == []  # a policy has no override for the model itself


class Experts(nn.Module):
    """A layer of two experts, with a gate of its own name, and another `gate` that chooses nothing."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.add_module(gate, nn.Linear(8, 2))
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.shared = nn.Sequential()
        self.shared.add_module("gate", nn.Linear(8, 8))


@pytest.mark.parametrize("gate", ["gate", "router"])
def test_deepseeks_recipe_keeps_what_chooses_among_experts(gate: str) -> None:
    net = nn.Sequential(Experts(gate), nn.Linear(8, 5))
    assert [*recipe("fp8_tile", net).overrides] == [f"0.{gate}", "1"]
    assert [*recipe("mxfp8", net).overrides] == ["1"]


class _BitLinear(nn.Module):
    """BitNet's layer as its code has it, but for the normalisation, with a straight-through gradient."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        class Quantised(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                of_x = 127.0 / x.abs().max(dim=-1, keepdim=True).values.clamp_(min=1e-5)
                of_w = 1.0 / w.abs().mean().clamp_(min=1e-5)
                return (x * of_x).round().clamp_(-128, 127) / of_x, (w * of_w).round().clamp_(-1, 1) / of_w

            @staticmethod
            def backward(ctx: Any, dx: torch.Tensor, dw: torch.Tensor) -> Any:  # type: ignore[override]
                return dx, dw

        return nn.functional.linear(*Quantised.apply(x, self.weight))


def test_bitnet_is_the_layer_of_its_authors() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(48, 20, bias=False), torch.randn(3, 7, 48)
    products = recipe("bitnet_b158").products
    mine, theirs = quantize(layer, Policy(products=products)), _BitLinear(layer.weight.detach())
    results = []
    for model in (mine, theirs):
        leaf = x.clone().requires_grad_()
        for _ in range(3):
            y = model(leaf)
            y.square().mean().backward()
            with torch.no_grad():
                model.weight -= 0.5 * model.weight.grad
        results.append([y.detach(), leaf.grad, model.weight.grad, model.weight.detach()])
    for a, b in zip(*results, strict=True):  # up to the order of sums of 48 terms
        assert torch.allclose(a, b, rtol=0.0, atol=48 * 2.0**-24 * float(b.abs().max()))


def test_scales_of_rows_are_those_of_torchao() -> None:
    """Float8LinearConfig.from_recipe_name("rowwise") rounds the multiplier down to a power of two (torchao 0.18)."""
    torch.manual_seed(0)
    x = torch.randn(5, 40) * torch.tensor([1e-6, 1.0, 448.0, 3e4, 0.1]).unsqueeze(1)
    multiplier = torch.exp2(torch.floor(torch.log2(448 / x.double().abs().amax(1, keepdim=True))))
    expected = (x * multiplier).float().to(torch.float8_e4m3fn).double() / multiplier
    products = recipe("fp8_row").products
    assert products is not None
    assert torch.equal(fpsim.round_to(x, products.fprop[0].fmt, axis=1).double(), expected)  # type: ignore[union-attr]


# Changes


def test_every_part_stays_open() -> None:
    changed = recipe("mxfp8", gpt(), error=None, wgrad=("bf16", "bf16"), overrides={"head": None, "b.*": "fp16"})
    assert changed.error is None
    assert [*changed.overrides][-1] == "b.*"
    assert changed.overrides["head"] is None
    assert words_of(changed.products.wgrad[0]) == BF16
    assert words_of(changed.products.fprop[0]) == MX8
    assert recipe("bf16", attention=True).products.attention
    assert recipe("mxfp8") == recipe("mxfp8", output=None)


def test_what_is_no_recipe_is_refused_with_near_matches() -> None:
    with pytest.raises(
        ValueError, match=r"Unknown recipe 'fp8_delay'\. Did you mean 'fp8_delayed.*Known: fp8_delayed, "
    ):
        recipe("fp8_delay")
    with pytest.raises(
        ValueError, match=r"'wgrat' is not a field of a recipe\. Did you mean 'wgrad.*its products: .*dgrad"
    ):
        recipe("mxfp8", wgrat=("bf16", "bf16"))
    with pytest.raises(ValueError, match=r"'fp8_current' is a recipe, not a format\. Write 'recipe:fp8_current'"):
        quantize(nn.Linear(2, 2), "fp8_current")
    with pytest.raises(ValueError, match=r"Unknown recipe 'MXFP8'\. Did you mean 'mxfp8"):
        recipe("MXFP8")
    with pytest.raises(ValueError, match=r"Unknown recipe \['mxfp8'\]"):
        recipe(["mxfp8"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Unknown format 'fp8_curent'.*Near it is a recipe, 'recipe:fp8_current'"):
        quantize(nn.Linear(2, 2), "fp8_curent")
    with pytest.raises(ValueError, match="Unknown recipe 'mx'"):
        quantize(nn.Linear(2, 2), "recipe:mx")
    with pytest.raises(ValueError, match=r"Unknown recipe 'fp8'\. Did you mean 'fp8_current' or 'fp8_delayed'\?"):
        recipe("fp8")
    with pytest.raises(ValueError, match="Near it is a recipe, 'recipe:fp8_current'"):
        quantize(nn.Linear(2, 2), "fp8")
    with pytest.raises(ValueError, match=r"It is one of delayed scaling: use fprop=.*fpsim\.Delayed\(history=\.\.\.\)"):
        recipe("fp8_delayed", history=16)


# In use


def test_a_recipe_stands_where_a_format_does_and_knows_the_model() -> None:
    words = [str(fpsim.summary(quantize(gpt(), fmt))) for fmt in ("recipe:nvfp4", recipe("nvfp4", gpt()))]
    assert words[0] == words[1]
    assert as_policy("recipe:nvfp4", model=gpt()) == recipe("nvfp4", gpt())
    assert as_policy("fp16") == Policy("fp16", "fp16", "fp16", "fp16")
    x, y = torch.tensor(1.0), torch.tensor(2.0**-9)
    with fpsim.emulate("recipe:bf16"):
        assert (x + y).item() == 1.0


def test_a_policy_is_read_from_all_that_quantize_takes() -> None:
    nearest, drawn = fpsim.Operand("mxfp4"), fpsim.Operand("mxfp4", "stochastic")
    assert as_policy(None) == Policy()
    assert as_policy(Policy(error="bf16")) == Policy(error="bf16")
    assert as_policy("fp16", "stochastic") == Policy("fp16", "fp16", "fp16", "fp16", rounding="stochastic")
    assert as_policy("mxfp4") == Policy(products=fpsim.Products.all(nearest))
    assert as_policy("mxfp4", "stochastic") == Policy(products=fpsim.Products.all(drawn))
    with pytest.raises(ValueError, match=r"fp8_current is a recipe|'fp8_current' is a recipe"):
        as_policy("fp8_current")
    with pytest.raises(ValueError, match=r"Unknown rounding 'nearest'"):
        as_policy(None, "nearest")
    with pytest.raises(TypeError, match=r"fpsim\.Policy\(\*\*mapping\)"):
        as_policy({"error": "bf16"})  # type: ignore[arg-type]


@tiers.parametrize("name", TABLE, keep={"fp8_delayed", "mxfp8", "nvfp4"})
def test_a_model_trains_under_every_recipe(name: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    x, target = torch.randn(64, 32), torch.randn(64, 32) / 8
    model = quantize(net, recipe(name))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # float32 reaches a tenth; the coarsest of them half
    assert losses[-1] < losses[0] / 2


def test_the_page_lists_what_there_is() -> None:
    page = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text()
    table = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", page, re.MULTILINE)
    assert table == [tuple(row) for row in recipes()]


def test_a_policy_of_products_alone_takes_one_rounding_for_all_operands() -> None:
    policy = fpsim.as_policy("mxfp4")
    with pytest.raises(ValueError, match=r"rounding=.* was given with a policy whose roles are all float32"):
        policy.with_rounding({"weight": "stochastic"})
    assert str(policy.with_rounding("stochastic")) == "products: mxfp4 stochastic"
