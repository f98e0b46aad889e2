"""The bytes that an optimizer stores, counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fpsim import Update, quantize_optimizer, summary

# 3 x 100 numbers: 300; weight, copies, states, scales of AdamW's two states
CASES = {
    "float32": (Update(), (1200, 0, 2400, 0)),
    "bf16_sr": ("bf16_sr", (600, 0, 1200, 0)),
    "bf16 in all operations": ("bf16", (600, 0, 1200, 0)),
    "kahan": ("bf16_kahan", (600, 600, 1200, 0)),
    "pair": ("bf16_collage", (600, 600, 1200, 0)),
    "remainder": ("bf16_remainder", (600, 600, 2400, 0)),
    "fp16 master with a float32 scale": ("te_fp16_master", (600, 600, 2400, 4)),
    "FP8-LM": ("fp8_lm", (600, 0, 300 + 600, 3)),  # of weight, m and v a power of two: one byte each
    "8 bits": (
        Update(states={"exp_avg": "dynamic8 per 256 fp32", "exp_avg_sq": "udynamic8 per 256 fp32"}),
        (1200, 0, 600, 2 * 2 * 4),  # 300 numbers are two blocks
    ),
    "4 bits": (Update(states="dynamic4 per 128 fp32"), (1200, 0, 2 * 150, 2 * 3 * 4)),
    "rows": (Update(states="e4m3fn per row fp32"), (1200, 0, 600, 2 * 3 * 4)),
    "tiles": (Update(weight="e4m3fn per 2x64 fp32"), (300, 0, 2400, 2 * 2 * 4)),
    "small parameters stay": (Update(states="e4m3fn per tensor fp32", min_size=301), (1200, 0, 2400, 0)),
}


@pytest.mark.parametrize(("update", "sizes"), CASES.values(), ids=CASES)
def test_bytes_are_those_that_were_counted_by_hand(update, sizes):
    p = nn.Parameter(torch.ones(3, 100))
    optimizer = torch.optim.AdamW([("w", p)], lr=1e-3)
    quantized = quantize_optimizer(optimizer, update)
    p.grad = torch.ones(3, 100)
    optimizer.step()
    row, total = summary(quantized)
    assert tuple(row[name] for name in ("weight", "copies", "states", "scales")) == sizes
    assert row["bytes"] == sum(sizes)
    assert row["float32"] == 3600
    assert total == {**row, "parameter": "(all)"}


def test_all_is_the_sum_and_there_are_no_states_before_a_step():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = summary(quantize_optimizer(optimizer, Update(weight="bf16"), model))
    assert [row["parameter"] for row in rows] == ["weight", "bias", "(all)"]
    assert [row["bytes"] for row in rows] == [16, 4, 20]
    assert [row["states"] for row in rows] == [0, 0, 0]
