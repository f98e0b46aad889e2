"""The rule that forms every product of a backward pass, against the products formed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fpsim
from ada_loss import AdaLossScaled, AdaLossTransformConv2d, AdaLossTransformLinear, Recorder, layer_rule
from fpsim import Policy, quantize, round_to


@pytest.mark.parametrize("ratio", [None, 0.5, 1.0])
def test_element_wise_range_forms_every_product(ratio: float | None) -> None:
    torch.manual_seed(0)
    model = quantize(nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 5, bias=False)), Policy(error="fp16"))
    g = torch.randn(6, 5) * 1e-6
    g[0, 0] = 0
    g = round_to(g, "fp16")
    rule = layer_rule("element_wise_range", max_rescue_ratio=ratio)
    with AdaLossScaled(model, [AdaLossTransformLinear()], rule=rule) as handle:
        handle.observer = recorder = Recorder()
        model(torch.randn(6, 3)).backward(g)
    w = model[1].weight.detach().double()
    products = sorted(
        (abs(g[n, o].item()) * abs(w[o, i].item()) for n in range(6) for o in range(5) for i in range(4)), reverse=True
    )
    products = [p for p in products if p > 0]
    kept = products[: math.ceil(len(products) * (ratio or 1.0))]
    fp16 = fpsim.as_format("fp16")
    expected = min(max(fp16.smallest / kept[-1], 1.0), fp16.largest / (5 * products[0]))
    row = next(row for row in recorder.rows() if row["site"] == "1:linear")
    assert row["unbound"] == pytest.approx(expected, rel=1e-9)


def test_element_wise_range_works_for_convolutions() -> None:
    torch.manual_seed(0)
    model = quantize(
        nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.Conv2d(2, 3, 3, bias=False)), Policy(error="fp16")
    )
    g = round_to(torch.randn(2, 3, 2, 2) * 1e-5, "fp16")
    with AdaLossScaled(model, [AdaLossTransformConv2d()], rule="element_wise_range") as handle:
        handle.observer = recorder = Recorder()
        model(torch.randn(2, 1, 4, 4)).backward(g)
    w = model[1].weight.detach().double()
    products = [(g[:, f].double().flatten()[:, None] * w[f].flatten()[None]).abs() for f in range(3)]
    smallest, largest = min(p[p > 0].min().item() for p in products), max(p.max().item() for p in products)
    fp16 = fpsim.as_format("fp16")
    expected = min(max(fp16.smallest / smallest, 1.0), fp16.largest / (27 * largest))
    row = next(row for row in recorder.rows() if row["site"] == "1:conv2d")
    assert row["unbound"] == pytest.approx(expected, rel=1e-9)


def test_element_wise_range_forms_the_products_of_each_gradient_that_a_graph_is_given() -> None:
    model = quantize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), Policy(error="fp16"))
    model[1].weight.data *= 2.0**-12
    with AdaLossScaled(model, [AdaLossTransformLinear()], rule="element_wise_range") as handle:
        handle.observer = recorder = Recorder()
        loss = model(torch.ones(2, 8)).sum()
        for size in (2.0**-24, 2.0**-14, 2.0**-24):
            (loss * size).backward(retain_graph=True)
    factors = [row["unbound"] for row in recorder.rows() if row["site"] == "1:linear"]
    assert factors[0] == factors[2] == factors[1] * 2.0**10


@pytest.mark.parametrize("ratio", [None, 0.5])
def test_element_wise_range_takes_vectors_and_empty_batches(ratio: float | None) -> None:
    model = quantize(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)), Policy(error="fp16"))
    results = []
    for shape in ((3,), (1, 3), (0, 3)):
        with AdaLossScaled(model, rule=layer_rule("element_wise_range", max_rescue_ratio=ratio)) as handle:
            model(torch.ones(shape)).sum().mul(1e-7).backward()
            results.append(handle.log2_scales())
    assert results[0] == results[1]
    assert set(results[2].values()) == {0}


def test_element_wise_range_counts_more_products_than_float32_can() -> None:
    layer = quantize(nn.Linear(4097, 1, bias=False), Policy(error="fp16"))
    nn.init.constant_(layer.weight, 2.0**-6)
    x = torch.ones(4099, 1, requires_grad=True).expand(4099, 4097)
    rule = layer_rule("element_wise_range", max_rescue_ratio=1.0)
    with AdaLossScaled(layer, [AdaLossTransformLinear()], rule=rule) as handle:
        handle.observer = recorder = Recorder()
        layer(x).sum().mul(2.0**-24).backward()
    (row,) = (row for row in recorder.rows() if row["site"] == ":linear")
    assert row["unbound"] == 2.0**6  # of products of 2**-30, below the smallest number, 2**-24
