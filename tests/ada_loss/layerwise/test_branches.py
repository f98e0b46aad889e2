"""Branches: the scale at which gradients with different scales are added."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layerwise_cases import Fork, gradients
from torch import Tensor, nn

from ada_loss import AdaLossScaled, AdaLossTransformCast, AdaLossTransformLinear, Recorder
from fpsim import Policy, quantize, round_to


def fork() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    model = quantize(Fork(), Policy(error="fp16"))
    a, b = torch.randn(2, 4) * 1e-8, torch.randn(2, 4) * 1e2
    return model, torch.randn(2, 4), a, b


def forked(model: nn.Module, x: Tensor, a: Tensor, b: Tensor, branches: str) -> list[dict[str, Any]]:
    with AdaLossScaled(model, [AdaLossTransformLinear(), AdaLossTransformCast()], branches=branches) as handle:
        handle.observer = recorder = Recorder()
        torch.autograd.backward(model(x), [a, b])
    return recorder.rows()


def test_branches_meet_at_their_largest_scale_at_which_the_sum_fits() -> None:
    model, x, a, b = fork()
    rows = {row["site"]: row for row in forked(model, x, a, b, "exact")}
    scales = [
        rows[f"{name}:linear"]["log2_scale"] + rows[f"{name}:linear"]["log2_power_of_two"]
        for name in ("small", "large")
    ]
    met = rows["first:linear"]
    assert scales[0] > scales[1] + 5
    assert met["log2_wanted"] == max(scales)
    ga, gb = (rows[f"{n}:linear"]["log2_scale"] for n in ("small", "large"))
    total = sum(
        (round_to(g * 2.0**k, "fp16") / 2.0**k) @ layer.weight.detach()
        for g, k, layer in ((a, ga, model.small), (b, gb, model.large))
    )
    k = met["log2_scale"]
    assert total.abs().max() * 2.0**k <= 65504
    assert torch.equal(model.first.weight.grad, (round_to(total * 2.0**k, "fp16") / 2.0**k).t() @ x)


def test_in_the_originals_way_each_branch_is_rounded_first() -> None:
    model, x, a, b = fork()
    rows = {row["site"]: row for row in forked(model, x, a, b, "original")}
    total = torch.zeros(2, 4)
    scales, amaxima = [], []
    for g, layer, name in ((a, model.small, "small"), (b, model.large, "large")):
        k = rows[f"{name}:linear"]["log2_scale"]
        share = (round_to(g * 2.0**k, "fp16") / 2.0**k) @ layer.weight.detach()
        out = int(k + rows[f"{name}:linear"]["log2_power_of_two"])
        share = round_to(share * 2.0**out, "fp16") / 2.0**out
        scales.append(out)
        amaxima.append(float(share.abs().max()))
        total = total + share
    from ada_loss.rules.formulas import branch_log2_scale

    k = branch_log2_scale(amaxima, scales, 65504.0)
    assert k == min(scales)  # the larger gradient does not fit at the smaller one's scale
    assert rows["first:linear"]["log2_wanted"] == k
    assert torch.equal(model.first.weight.grad, (round_to(total * 2.0**k, "fp16") / 2.0**k).t() @ x)


class Moved(Fork):
    """The same with the branches parted further on, or their operands made before either is used."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        if self.way == "behind a ReLU":
            h = F.relu(h)
            return self.small(h), self.large(h)
        a, b = h.flip(0), h.flip(1).flip(1)
        return self.small(a).flip(0), self.large(b)


@pytest.mark.parametrize("way", ["behind a ReLU", "made before"])
def test_in_the_originals_way_a_branch_is_rounded_where_it_ends_wherever_that_is(way: str) -> None:
    model, _, a, b = fork()
    nn.init.uniform_(model.first.weight, 0.5, 1.0)
    moved = Moved(way)
    moved.load_state_dict(model.state_dict())
    x, moved = torch.full((2, 4), 0.5), quantize(moved, Policy(error="fp16"))  # the ReLU passes all
    for k in range(-4, 24, 4):
        results = []
        for each in (model, moved):
            each.zero_grad()
            rows = forked(each, x, a * 2.0**k, b * 2.0**-k, "original")
            met = next(row["log2_wanted"] for row in rows if row["site"] == "first:linear")
            results.append((each.first.weight.grad, met))
        assert torch.equal(results[0][0], results[1][0]), k
        assert results[0][1] == results[1][1], k


def test_in_the_originals_way_branches_go_backward_twice() -> None:
    torch.manual_seed(0)
    model = quantize(Fork(), "fp16")
    x, results = torch.randn(3, 4, requires_grad=True), []
    for branches in ("exact", "original"):
        model.zero_grad()
        with AdaLossScaled(model, branches=branches):
            small, large = model(x)
            loss = (small.sin().sum() + large.sin().sum() * 2.0**-10) * 2.0**-10
            (g,) = torch.autograd.grad(loss, x, create_graph=True)
            g.square().sum().backward()
            results.append(gradients(model))
    for name, exact in results[0].items():  # nothing underflows here: the same to a few units in fp16's last place
        assert torch.allclose(exact, results[1][name], rtol=2.0**-7, atol=2.0**-9 * float(exact.abs().max())), name
