"""Calls that hide several operations: emulated inside, or refused."""

from __future__ import annotations

import pytest
import torch
from emulated_cases import FP16, is_fp16, randn
from torch import nn

import fpsim
from fpsim import emulate, quantize


def test_multihead_attention_is_emulated_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = quantize(nn.MultiheadAttention(8, 2, batch_first=True), FP16)
    x = randn(2, 5, 8)
    for need_weights in (True, False):
        for train in (True, False):
            attention.train(train)
            with fpsim.record(attention) as recording:
                out = attention(x, x, x, need_weights=need_weights)[0]
            assert is_fp16(out)
            operations = {row["site"].split(":")[1].rstrip("_0123456789") for row in recording.rows()}
            assert {"linear", "weight"} <= operations
            assert operations & {"scaled_dot_product_attention", "softmax", "baddbmm", "bmm"}


def test_a_transformer_layer_has_no_fast_path_around_the_emulation() -> None:
    layer = quantize(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), FP16).eval()
    x = randn(2, 5, 8)
    with torch.no_grad():
        fast = layer(x)
    assert is_fp16(fast)
    slow = layer.train()(x)
    assert torch.equal(fast, slow)


def test_a_fused_call_that_cannot_be_looked_into_is_refused() -> None:
    x, w, b = randn(2, 5, 8), randn(24, 8), randn(24)
    with emulate(FP16), pytest.raises(NotImplementedError, match=r"hides several.*nn\.MultiheadAttention"):
        torch._native_multi_head_attention(x, x, x, 8, 2, w, b, w[:8], b[:8])
