"""Adaptive scaling: what must hold for every model, against float32 and plain emulation."""

from __future__ import annotations

import pytest
import torch
from layerwise_cases import AHEAD, RULES, assert_same, backward, gradients, seeded
from torch import Tensor, nn

from ada_loss import (
    AdaLossScaled,
    AdaLossTransformCast,
    AdaLossTransformConv2d,
    AdaLossTransformLinear,
    Recorder,
    layer_rule,
)
from fpsim import Policy, quantize


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("branches", ["exact", "original"])
def test_in_a_wide_format_scales_change_no_bit(case: tuple[nn.Module, Tensor], rule: str, branches: str) -> None:
    model, x = case
    model = model.double()
    x = x.double() if x.is_floating_point() else x
    if rule == "element_wise_range" and not isinstance(model, nn.Sequential):
        pytest.skip("it forms the products of linear layers and plain convolutions alone")
    # float64 carries it, so that scales reach far; float32's range is wide enough for these gradients at all of them
    plain, scaled = quantize(model, Policy(error="fp32")), quantize(model, Policy(error="fp32"))
    expected = backward(plain, x)
    if branches == "original":  # it rounds each branch before they are added
        if not layer_rule(rule).predicts:
            pytest.skip("what is measured has no branches")
        with AdaLossScaled(plain, rule="fixed", branches=branches):
            expected = backward(plain, x)
    init_scale = 2.0**40 if rule in AHEAD else 1.0
    with AdaLossScaled(scaled, rule=rule, branches=branches, init_scale=init_scale):
        assert_same(backward(scaled, x), expected)


@pytest.mark.parametrize("fmt", ["fp16", "e5m2", "e4m3fn", "bf16"])
def test_the_factor_one_is_plain_emulation(case: tuple[nn.Module, Tensor], fmt: str) -> None:
    model, x = case
    expected = backward(quantize(model, fmt), x)
    scaled = quantize(model, fmt)
    rule = layer_rule("fixed", fixed_loss_scale=1.0)
    with AdaLossScaled(scaled, rule=rule) as handle:
        got = backward(scaled, x)
    if fmt == "e4m3fn":  # it has no inf: what overflows is NaN there, and at a lower scale fits
        assert got.keys() == expected.keys()
        return
    assert_same(got, expected)
    assert handle.step == 1


@pytest.mark.parametrize("log2_scale", [-2, 5, 11])
def test_one_factor_and_a_first_scale_are_a_static_loss_scale(case: tuple[nn.Module, Tensor], log2_scale: int) -> None:
    model, x = case
    size = 2.0**-14
    policy = Policy(weight="fp16", activation="fp16", error="fp16", weight_grad="fp16")
    static = quantize(model, policy)
    static.zero_grad()
    out = static(x)
    (out * torch.randn(out.shape, generator=seeded(1)) * size * 2.0**log2_scale).sum().backward()
    expected = {name: g * 2.0**-log2_scale for name, g in gradients(static).items()}
    scaled = quantize(model, policy)
    with AdaLossScaled(scaled, rule="fixed", init_scale=2.0**log2_scale):
        assert_same(backward(scaled, x, size), expected)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("update_every", [1, 3])
def test_detached_a_model_is_what_it_was(case: tuple[nn.Module, Tensor], rule: str, update_every: int) -> None:
    model, x = case
    if rule == "element_wise_range":
        pytest.skip("not every product is its")
    if update_every > 1 and rule not in AHEAD:
        pytest.skip("what measures does so in every step")
    model = quantize(model, "e5m2")
    names, expected = list(model.state_dict()), backward(model, x, 1e-4)
    handle = AdaLossScaled(model, rule=rule, update_every=update_every)
    for _ in range(2):
        backward(model, x, 1e-4)
    assert list(model.state_dict()) == names
    assert handle.detach() is model
    model.load_state_dict(model.state_dict())
    for buffer in model.modules():  # running statistics do not enter a gradient in training
        assert not hasattr(buffer, "ada_loss")
    assert_same(backward(model, x, 1e-4), expected)


@pytest.mark.parametrize("fmt", ["fp16", "e5m2", "e4m3fn"])
@pytest.mark.parametrize("rule", ["approx_range", "abs_range", "exact", "current"])
def test_scaling_never_loses_more_than_no_scaling(case: tuple[nn.Module, Tensor], rule: str, fmt: str) -> None:
    model, x = case
    model = quantize(model, Policy(error=fmt, weight_grad=fmt))
    with AdaLossScaled(model, rule=rule) as handle:
        handle.observer = recorder = Recorder()
        for size in (1e-9, 1e-5, 1.0, 1e4):
            backward(model, x, size)
    rows = recorder.rows()
    assert {row["role"] for row in rows} == {"error", "weight_grad"}
    for row in rows:
        if not row["limited"] and row["log2_scale"] >= 0:
            assert row["underflow"] <= row["underflow_unscaled"]
        assert row["overflow"] == 0
        if rule == "exact" and not row["limited"]:
            assert row["underflow"] <= 1e-3
    small = [row for row in rows if row["step"] == 1 and row["role"] == "error"]
    assert sum(row["underflow"] < row["underflow_unscaled"] for row in small) > len(small) / 2


def test_formats_with_float32s_exponents_have_nothing_to_scale(case: tuple[nn.Module, Tensor]) -> None:
    model, x = case
    expected = backward(quantize(model, "bf16"), x, 1e-9)
    model = quantize(model, "bf16")
    with AdaLossScaled(model) as handle:
        handle.observer = recorder = Recorder()
        assert_same(backward(model, x, 1e-9), expected)
    assert {row["log2_scale"] for row in recorder.rows()} == {0.0}


def test_gpt2_and_resnet_train_with_every_product_scaled() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    for attention in ("eager", "sdpa"):
        config = GPT2Config(
            n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16, attn_implementation=attention
        )
        model = quantize(GPT2LMHeadModel(config), "e4m3fn")
        tokens = torch.randint(0, 32, (2, 8))
        with AdaLossScaled(model) as handle:
            handle.observer = recorder = Recorder()
            (model(tokens, labels=tokens).loss * 1e-4).backward()
        rows = [row for row in recorder.rows() if row["role"] == "error"]
        assert {row["underflow_unscaled"] for row in rows} == {1.0}
        # what underflows: the derivative of GELU's cube, which is small where its input is, and the gradients of
        # queries and keys, to which the fused operation gives the scale of the values' (in "eager" each has its own)
        lossy = (".act:pow", ".c_attn:addmm") if attention == "sdpa" else (".act:pow",)
        assert [row["site"] for row in rows if row["underflow"] > 0.1 and not row["site"].endswith(lossy)] == []
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
    model = quantize(ResNetForImageClassification(config), "e5m2")
    with AdaLossScaled(model, [AdaLossTransformConv2d(), AdaLossTransformLinear(), AdaLossTransformCast()]):
        (model(torch.randn(2, 3, 32, 32)).logits * torch.randn(2, 3) * 1e-6).sum().backward()
    assert all(bool(p.grad.any()) for name, p in model.named_parameters() if "weight" in name)
