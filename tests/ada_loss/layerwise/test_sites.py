"""Sites: which have a scale of their own, which pass one on, and when the graph is followed to find them."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layerwise_cases import backward, seeded
from torch import Tensor, nn

from ada_loss import (
    AdaLossScaled,
    AdaLossTransform,
    AdaLossTransformBasicBlock,
    AdaLossTransformBatchNorm,
    AdaLossTransformConv2d,
    AdaLossTransformLinear,
    Recorder,
)
from fpsim import Policy, quantize, round_to


def test_transforms_choose_and_others_pass_the_scale_on() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 2)
    )
    model = quantize(net, Policy(error="e5m2"))
    x = torch.randn(4, 1, 6, 6)

    def chosen(*transforms: Any) -> set[str]:
        with AdaLossScaled(model, transforms) as handle:
            handle.observer = recorder = Recorder()
            backward(model, x, 1e-6)
        return {row["site"] for row in recorder.rows() if not math.isnan(row["unbound"])}

    assert chosen(AdaLossTransformLinear()) == {"5:linear", "4:linear"}
    assert chosen(AdaLossTransformConv2d()) == set()  # the images want no gradient
    assert chosen(AdaLossTransformBatchNorm()) == set()
    assert chosen(AdaLossTransform("Linear"), AdaLossTransformBatchNorm()) == {"5:linear", "4:linear"}
    assert chosen(AdaLossTransform(nn.Sequential)) == {"5:linear", "4:linear"}


def test_blocks_are_known_by_their_class() -> None:
    class BasicBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x + self.conv(x))

    model = quantize(nn.Sequential(nn.Conv2d(3, 3, 1), BasicBlock(), nn.Conv2d(3, 3, 1)), Policy(error="e5m2"))
    with AdaLossScaled(model, [AdaLossTransformBasicBlock()]) as handle:
        handle.observer = recorder = Recorder()
        backward(model, torch.randn(2, 3, 4, 4), 1e-6)
    assert {r["site"] for r in recorder.rows() if not math.isnan(r["unbound"])} == {"1.conv:conv2d"}


def test_layers_that_stay_in_float32_pass_the_scale_through() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    model = quantize(net, Policy(error="fp16", overrides={"1": None}))
    with AdaLossScaled(model, [AdaLossTransformLinear()]) as handle:
        handle.observer = recorder = Recorder()
        backward(model, torch.randn(8, 16, generator=seeded()), 1e-6)
    rows = {row["site"]: row for row in recorder.rows() if row["role"] == "error"}
    assert "1:linear" not in rows
    assert rows["0:linear"]["log2_wanted"] == rows["2:linear"]["log2_power_of_two"] > 0


class Added(nn.Module):
    """A layer, and an addition behind it, which hands the very tensor on that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x) + 1.0)


def test_a_gradient_that_passes_into_a_narrower_format_is_fitted_into_it() -> None:
    torch.manual_seed(0)
    policy = Policy(error="fp16", overrides={"inner": Policy(error="e4m3fn")})
    model = quantize(Added(), policy)
    out_gradient = torch.ones(2, 4)
    with AdaLossScaled(model, rule="fixed", init_scale=2.0**12) as handle:  # fits fp16, and is far beyond e4m3fn
        model(torch.randn(2, 4)).backward(out_gradient)
        k = handle.last_log2_scale("inner:linear")
    passed = round_to(out_gradient @ model.head.weight.detach(), "fp16")
    assert passed.abs().max() * 2.0**k <= 448 < passed.abs().max() * 2.0 ** (k + 1)
    assert torch.equal(model.inner.bias.grad, (round_to(passed * 2.0**k, "e4m3fn") / 2.0**k).sum(0))


def test_the_last_scale_is_known_where_it_only_passed() -> None:
    model = quantize(Added(), Policy(error="fp16"))
    with AdaLossScaled(model, rule="fixed", init_scale=2.0**3) as handle:
        assert handle.log2_scales() == {}
        with pytest.raises(KeyError, match=r"No gradient was rounded at 'inner:linear' as error\. Sites: none yet"):
            handle.last_log2_scale("inner:linear")
        backward(model, torch.randn(2, 4, generator=seeded()))
        assert handle.last_log2_scale("inner:linear") == handle.last_log2_scale(":add") == 3
        assert handle.log2_scales() == {"inner:linear": 3, ":add": 3, "head:linear": 3}
        handle.load_state_dict(handle.state_dict())
        assert handle.log2_scales() == {"inner:linear": 3, ":add": 3, "head:linear": 3}


def places(out: Tensor) -> int:
    """How many nodes behind a tensor know of a place."""
    found, seen, stack = 0, set(), [out.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found += "ada_loss" in node.metadata
            stack.extend(n for n, _ in node.next_functions)
    return found


def test_no_graph_is_followed_between_updates() -> None:
    torch.manual_seed(0)
    model = quantize(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), "e5m2")
    x, known = torch.randn(4, 8, generator=seeded()), []
    for rule, update_every in (("approx_range", 3), ("approx_range", 1), ("exact", 1)):
        with AdaLossScaled(model, rule=rule, update_every=update_every):
            for _ in range(7):
                out = model(x)
                known.append(places(out) > 0)
                out.backward(torch.ones_like(out) * 1e-6)
    assert known == [True, False, False] * 2 + [True] * 15


def test_no_graph_is_followed_for_a_place_that_came_once() -> None:
    torch.manual_seed(0)
    model = quantize(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), "e5m2")
    x, known = torch.randn(4, 8, generator=seeded()), []
    with AdaLossScaled(model, update_every=4):
        for step in range(12):
            out = model(model(x)) if step == 1 else model(x)
            known.append(places(out) > 0)
            out.backward(torch.ones_like(out) * 1e-6)
    assert known == [True, False, True, True, True, False, False, False] + [True, False, False, False]


def test_forward_passes_between_updates_are_given_the_same_places_again() -> None:
    model, x = quantize(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), "e5m2"), torch.ones(4, 8)
    with AdaLossScaled(model, update_every=100) as handle:
        given = []
        for _ in range(5):
            backward(model, x)
            given.append(list(handle._engine.unlinked.values()))
    assert not given[0]
    assert len(given[1]) == 6  # four parameters' and two results'; the ReLU moves what is rounded
    assert all(len(g) == len(given[1]) and all(map(operator.is_, g, given[1])) for g in given[2:])


def test_no_graph_is_followed_where_all_is_known_from_a_state() -> None:
    model, x = quantize(nn.Linear(8, 8), "e5m2"), torch.randn(4, 8, generator=seeded())
    with AdaLossScaled(model, update_every=4) as handle:
        backward(model, x)
        assert places(model(x)) == 0
        handle.load_state_dict(handle.state_dict())
        assert places(model(x)) == 0
