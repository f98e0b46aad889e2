"""Adaptive scaling of whole models: against arithmetic by hand, float32, and plain emulation."""

from __future__ import annotations

import copy
import itertools
import math
import operator
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fpsim
from ada_loss import (
    AdaLossScaled,
    AdaLossTransform,
    AdaLossTransformBasicBlock,
    AdaLossTransformBatchNorm,
    AdaLossTransformCast,
    AdaLossTransformConv2d,
    AdaLossTransformLinear,
    GradScaler,
    Recorder,
    layer_rule,
)
from ada_loss.layerwise.sites import SiteState
from ada_loss.rules import LAYER_RULES
from ada_loss.rules.layer import floor_log2
from fpsim import Policy, quantize, record, round_to, scaling
from fpsim.moments import Moments, moments_of
from fpsim.scaling import log2_scale_limits, rounded
from fpsim.spec import rounding_spec

RULES = list(LAYER_RULES)
AHEAD = ["approx_range", "abs_range", "element_wise_range", "fixed"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


class Residual(nn.Module):
    """Convolutions, batch normalisation, a shortcut, an in-place ReLU, pooling, a shared layer, concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding=1)
        self.bn = nn.BatchNorm2d(6)
        self.conv = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.twice = nn.Linear(12, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)), inplace=True)
        x = F.relu(x + self.conv(x))
        x = torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1)
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return self.head(x)


class Recurrent(nn.Module):
    """A recurrence with shared weights, an embedding tied to the output, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.inner = nn.Linear(16, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        e = self.embedding(x)
        h, states = torch.zeros_like(e[:, 0]), []
        for t in range(e.shape[1]):
            h = torch.tanh(self.inner(torch.cat([e[:, t], h], 1)))
            states.append(h)
        y = torch.stack(states, 1)
        y = self.norm(y + self.attention(y, y, y, need_weights=False)[0])
        return y @ self.embedding.weight.t()


def cases() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Tensor]]]]:
    def mlp() -> tuple[nn.Module, Tensor]:
        return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)), torch.randn(6, 5)

    yield "mlp", mlp
    yield "residual", lambda: (Residual(), torch.randn(4, 2, 6, 6))
    yield "recurrent", lambda: (Recurrent(), torch.randint(0, 11, (3, 5)))


CASES = dict(cases())


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return CASES[request.param]()


def backward(model: nn.Module, x: Tensor, size: float = 1.0) -> dict[str, Tensor]:
    model.zero_grad()
    out = model(x)
    (out * torch.randn(out.shape, generator=seeded(1)) * size).sum().backward()
    return gradients(model)


# What must hold for every model.


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


# By hand.


def test_a_linear_layers_scale_is_the_formulas() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 8, bias=False))
    model = quantize(model, Policy(error="fp16"))
    x, size = torch.randn(4, 16), 2.0**-22
    out_gradient = torch.randn(4, 8, generator=seeded(2)) * size
    with AdaLossScaled(model, [AdaLossTransformLinear()]) as handle:
        handle.observer = recorder = Recorder()
        model(x).backward(out_gradient)
    fp16 = fpsim.as_format("fp16")
    w = Moments(*moments_of(model[2].weight.detach()).tolist())
    gy = round_to(out_gradient, "fp16")
    g = Moments(*moments_of(gy).tolist())
    factor = layer_rule("approx_range").factor(g, w, 8, fp16.smallest, fp16.largest)
    k = floor_log2(factor)
    assert k > 4
    by_site = {row["site"]: row for row in recorder.rows()}
    assert by_site["2:linear"]["log2_scale"] == 0
    assert by_site["2:linear"]["unbound"] == pytest.approx(factor, rel=1e-12)
    assert by_site["0:linear"]["log2_wanted"] == by_site["0:linear"]["log2_scale"] == k
    gx = (gy @ model[2].weight.detach()) * (model[0](x) > 0)
    gx = round_to(gx * 2.0**k, "fp16") / 2.0**k
    assert torch.equal(model[0].weight.grad, gx.t() @ x)
    assert torch.equal(model[2].weight.grad, gy.t() @ torch.relu(model[0](x)))


class Called(nn.Module):
    def __init__(self, call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.call, self.first = call, nn.Linear(4, 4)
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4) * 1e-3), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.first(x), self.weight, self.bias)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w, b: F.linear(x, bias=b, weight=w),
        lambda x, w, b: F.linear(x, bias=None, weight=w),
        lambda x, w, b: F.linear(weight=w, input=x),
        lambda x, w, b: torch.matmul(other=w.t(), input=x),
        lambda x, w, b: torch.addmm(mat2=w.t(), mat1=x, input=b),
        lambda x, w, b: torch.baddbmm(b, batch2=w.t()[None], batch1=x[None])[0],
    ],
    ids=["bias first", "no bias", "weight first", "matmul", "addmm", "baddbmm"],
)
def test_operands_that_are_named_in_another_order_are_the_same_operands(call: Callable[..., Tensor]) -> None:
    scales = []
    for way in (F.linear, call):
        torch.manual_seed(0)
        model = quantize(Called(way), Policy(error="fp16"))
        with AdaLossScaled(model) as handle:
            backward(model, torch.randn(3, 4, generator=seeded()), 1e-6)
            scales.append(handle.last_log2_scale("first:linear"))
    assert scales[0] == scales[1] > 0


@pytest.mark.parametrize(
    ("product", "spelt"),
    [
        (lambda x, w: x @ w.t(), lambda x, w: torch.linalg.matmul(x, w.t())),
        (lambda x, w: torch.chain_matmul(x, w.t(), w), lambda x, w: torch.linalg.multi_dot([x, w.t(), w])),
        (lambda x, w: torch.inner(x, w[0]), lambda x, w: torch.linalg.vecdot(x, w[0])),
        (lambda x, w: F.linear(x, w[:1])[:, 0], lambda x, w: F.linear(x, w[0])),
    ],
    ids=["matmul", "multi_dot", "vecdot", "one output"],
)
@pytest.mark.filterwarnings("ignore:.*chain_matmul is deprecated:UserWarning")
def test_a_product_is_the_same_however_it_is_spelt(
    product: Callable[[Tensor, Tensor], Tensor], spelt: Callable[[Tensor, Tensor], Tensor]
) -> None:
    scales = []
    for way in (product, spelt):
        torch.manual_seed(0)
        model = quantize(Called(lambda x, w, _, way=way: way(x, w)), Policy(error="fp16"))
        with AdaLossScaled(model) as handle:
            backward(model, torch.randn(3, 4, generator=seeded()), 1e-2)
            scales.append(handle.last_log2_scale("first:linear"))
    assert scales[0] == scales[1] > 0


def test_parameters_gradients_are_rounded_at_the_scale_of_their_layer() -> None:
    layer = quantize(nn.Linear(4, 2, bias=False), Policy(error="e5m2", weight_grad="e5m2"))
    x = torch.randn(3, 4, generator=seeded())
    g = torch.randn(3, 2, generator=seeded(1)) * 2.0**-12
    with AdaLossScaled(layer, rule="fixed", init_scale=2.0**9):
        layer(x).backward(g)
    gy = round_to(g * 2.0**9, "e5m2") / 2.0**9
    assert torch.equal(layer.weight.grad, round_to(gy.t() @ x * 2.0**9, "e5m2") / 2.0**9)


def test_parameters_gradients_that_would_vanish_in_the_format_do_not_vanish_in_float32() -> None:
    # divided by the scale in float32, and not in the format (where 1e-9 would become 0)
    layer = quantize(nn.Linear(1, 1, bias=False), "fp16")
    with AdaLossScaled(layer, rule="fixed", init_scale=2.0**15):
        layer(torch.ones(1, 1)).backward(torch.full((1, 1), 1e-9))
    assert layer.weight.grad.item() == pytest.approx(1e-9, rel=2.0**-11)


def test_groups_count_only_their_own_terms() -> None:
    from ada_loss.transforms import PRODUCTS

    x, w = torch.ones(2, 6, 5, 5), torch.ones(8, 3, 3, 3)
    (product,) = PRODUCTS["conv2d"](x, w, None, 1, 1, 1, 2)
    assert product.terms == 8 // 2 * 9
    assert PRODUCTS["conv2d"](torch.ones(6, 5, 5), w)[0].terms == 8 // 2 * 9
    assert PRODUCTS["conv_transpose2d"](torch.ones(2, 8, 5, 5), torch.ones(8, 3, 2, 2))[0].terms == 3 * 4
    assert PRODUCTS["linear"](torch.ones(4, 7), torch.ones(3, 7))[0].terms == 3


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((4, 5), (5, 3)),
        ((2, 4, 5), (2, 5, 3)),
        ((2, 4, 5), (5, 3)),
        ((4, 5), (2, 5, 3)),
        ((2, 1, 4, 5), (6, 5, 3)),  # both are broadcast
        ((5,), (5,)),
        ((5,), (5, 3)),
    ],
    ids=str,
)
def test_a_matrix_products_terms_are_those_that_a_gradient_of_ones_adds_up(a: tuple[int], b: tuple[int]) -> None:
    from ada_loss.transforms import PRODUCTS

    x, y = torch.ones(a, requires_grad=True), torch.ones(b, requires_grad=True)
    torch.matmul(x, y).sum().backward()  # every element of a gradient counts its terms
    for product, operand in zip(PRODUCTS["matmul"](x, y), (x, y), strict=True):
        assert product.operand is operand
        assert torch.equal(operand.grad, torch.full_like(operand, product.terms))


def test_einsums_terms_are_counted_too() -> None:
    from ada_loss.transforms import PRODUCTS

    x, y = torch.ones(2, 3, 4, requires_grad=True), torch.ones(4, 5, requires_grad=True)
    torch.einsum("abc,cd->ad", x, y).sum().backward()
    for product in PRODUCTS["einsum"]("abc,cd->ad", x, y):
        assert torch.equal(product.operand.grad, torch.full_like(product.operand, product.terms))


@pytest.mark.parametrize("fmt", ["fp16", "e4m3fn"])
def test_an_overflow_limit_binds_in_every_step_also_between_updates(fmt: str) -> None:
    model = quantize(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), Policy(error=fmt, weight_grad=fmt))
    x = torch.randn(4, 8, generator=seeded())
    for rule in RULES:
        with AdaLossScaled(model, rule=rule, update_every=100 if rule in AHEAD else 1) as handle:
            handle.observer = recorder = Recorder()
            backward(model, x, 1e-6)  # large factors
            backward(model, x, 1e4)  # used again, ten orders of magnitude larger
        rows = [row for row in recorder.rows() if row["step"] == 2]
        assert rows
        assert all(row["overflow"] == 0 for row in rows)
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
        if rule != "fixed":
            assert any(row["limited"] for row in rows) or rule in ("current", "amax_history", "exact")


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_what_is_not_finite_is_never_lost_and_stops_nothing(rule: str, value: float) -> None:
    model = quantize(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), "fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = GradScaler("torch", init_scale=1.0)
    with AdaLossScaled(model, rule=rule) as handle:
        handle.observer = recorder = Recorder()
        for size in (1.0, value, 1.0):
            optimizer.zero_grad()
            before = copy.deepcopy(model.state_dict())
            out = model(torch.ones(3, 4))
            scaler.scale((out * size).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            changed = any(not torch.equal(before[name], p) for name, p in model.state_dict().items())
            assert changed == math.isfinite(size)
    if layer_rule(rule).predicts:  # what is measured has a scale of its own, also where a ReLU made zeros of it
        assert all(row["log2_scale"] == 0 for row in recorder.rows() if row["step"] == 2)
    assert handle.step == 3


def test_a_gradient_of_zeros_has_the_scale_with_which_it_came() -> None:
    model = quantize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), "fp16")
    for rule in RULES:
        model.zero_grad()
        with AdaLossScaled(model, rule=rule) as handle:
            handle.observer = recorder = Recorder()
            (model(torch.ones(3, 4)) * 0.0).sum().backward()
        assert {row["log2_scale"] for row in recorder.rows()} == {0.0}
        assert all(bool((p.grad == 0).all()) for p in model.parameters())


# Bounds, branches, casts.


def deep(width: int = 32, depth: int = 6) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width, bias=False), nn.ReLU()]
    for layer in layers[::2]:
        nn.init.normal_(layer.weight, std=math.sqrt(0.3 / width))  # gradients shrink by 2.6 a layer
    return nn.Sequential(*layers)


def test_the_originals_bounds_hold() -> None:
    model = quantize(deep(depth=12), Policy(error="fp16"))
    x = torch.randn(16, 32, generator=seeded())

    def scales(**bounds: Any) -> list[float]:
        with AdaLossScaled(model, [AdaLossTransformLinear()], **bounds) as handle:
            handle.observer = recorder = Recorder()
            backward(model, x, 1e-6)
        return [row["log2_scale"] for row in recorder.rows()]

    free = scales()
    assert max(free) > 10
    once = scales(scale_upper_bound=16.0, accum_upper_bound=1024.0)
    assert max(once) == 10
    assert max(b - a for a, b in itertools.pairwise(once)) <= 4
    slowly = scales(scale_upper_bound=2.0)
    assert max(b - a for a, b in itertools.pairwise(slowly)) == 1


class Fork(nn.Module):
    """Two branches whose gradients carry different scales, and one input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.small, self.large = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        return self.small(h), self.large(h)


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
    from ada_loss.rules.layer import branch_log2_scale

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


def test_a_cast_raises_what_enters_the_model() -> None:
    model = quantize(nn.Linear(4, 4), Policy(error="fp16"))
    for transforms, raised in (([AdaLossTransformLinear()], False), ([AdaLossTransformCast()], True), (None, True)):
        with AdaLossScaled(model, transforms) as handle:
            handle.observer = recorder = Recorder()
            backward(model, torch.ones(2, 4), 1e-9)
        assert (recorder.rows()[0]["log2_scale"] > 0) == raised


def test_a_lognormal_cast_measures_logarithms() -> None:
    model = quantize(nn.Linear(64, 64), Policy(error="fp16"))
    g = torch.exp(torch.randn(32, 64, generator=seeded()) * 3 - 20)
    with AdaLossScaled(model, rule=layer_rule("approx_range", lognormal=True)) as handle:
        handle.observer = recorder = Recorder()
        model(torch.ones(32, 64)).backward(g)
    fp16 = fpsim.as_format("fp16")
    factor = layer_rule("approx_range", lognormal=True).factor(
        Moments(*moments_of(g, logs=True).tolist()), Moments(*[0.0] * 10), 1, fp16.smallest, fp16.largest
    )
    row = recorder.rows()[0]
    assert row["unbound"] == pytest.approx(factor, rel=1e-9)
    assert row["underflow"] <= 1.5e-3 < 0.1 < row["underflow_unscaled"]


# Which modules.


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


def test_formats_with_float32s_exponents_have_nothing_to_scale(case: tuple[nn.Module, Tensor]) -> None:
    model, x = case
    expected = backward(quantize(model, "bf16"), x, 1e-9)
    model = quantize(model, "bf16")
    with AdaLossScaled(model) as handle:
        handle.observer = recorder = Recorder()
        assert_same(backward(model, x, 1e-9), expected)
    assert {row["log2_scale"] for row in recorder.rows()} == {0.0}


def test_each_role_and_module_has_the_range_of_its_own_format() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    policy = Policy(error="e4m3fn", weight_grad="fp16", overrides={"0": Policy(error="fp16")})
    model = quantize(net, policy)
    x = torch.randn(4, 8, generator=seeded())
    with AdaLossScaled(model, rule="current") as handle:
        handle.observer = recorder = Recorder()
        backward(model, x)
    largest = {"fp16 nearest_even": 65504.0, "e4m3fn nearest_even": 448.0}
    assert {row["format"] for row in recorder.rows()} == set(largest)


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


# Training as it is done.


def test_a_scale_is_reused_between_updates_and_computed_anew_after() -> None:
    model = quantize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), Policy(error="fp16"))
    x = torch.randn(4, 8, generator=seeded())
    with AdaLossScaled(model, [AdaLossTransformLinear()], update_every=3) as handle:
        handle.observer = recorder = Recorder()
        for size in (2.0**-18, 2.0**-12, 2.0**-8, 2.0**-16):
            backward(model, x, size)
    factors = [row["unbound"] for row in recorder.rows() if row["site"] == "1:linear" and row["role"] == "error"]
    assert factors[0] == factors[1] == factors[2]
    assert factors[3] == pytest.approx(factors[0] / 4, rel=0.01)  # of gradients four times larger


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan], ids=str)
@pytest.mark.parametrize("rule", AHEAD)
def test_a_gradient_that_tells_nothing_decides_nothing_for_the_steps_to_come(rule: str, value: float) -> None:
    # the first step of a residual network whose blocks begin with zero, or of a dynamic loss scale, which overflows
    torch.manual_seed(0)
    model = quantize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)), Policy(error="e5m2"))
    x = torch.randn(4, 8, generator=seeded())
    small = {"fixed": layer_rule("fixed", fixed_loss_scale=4.0)}.get(rule, rule)

    def scales(*sizes: float) -> list[dict[str, int]]:
        with AdaLossScaled(model, rule=small, update_every=4) as handle:
            found = []
            for size in sizes:
                backward(model, x, size)
                found.append(handle.log2_scales())
        return found

    used = scales(1e-6)[0]
    assert max(used.values()) > 0
    first = scales(value, 1e-6, 1e-6)
    assert set(first[0].values()) == {0}
    assert first[1:] == [used, used]
    later = scales(1e-6, 1e-6, 1e-6, 1e-6, value, 1e-6)  # the fifth step updates
    assert later[5] == used


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys, self.queries = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.queries(x) @ self.keys(x).t()


def test_a_place_that_comes_between_updates_is_measured_and_has_its_factor_from_the_next_step_on() -> None:
    torch.manual_seed(0)
    model = quantize(Scores(), Policy(error="e4m3fn"))
    x = torch.randn(4, 4, generator=seeded()) * 2.0**-8
    used, measured = [], {}
    for frozen in (False, True):
        with AdaLossScaled(model, update_every=100) as handle:
            model.keys.requires_grad_(not frozen)
            backward(model, x, 1e-4)
            model.keys.requires_grad_(True)
            backward(model, x, 1e-4)
            measured = handle.log2_scales()
            backward(model, x, 1e-4)
            used.append(handle.log2_scales())
    assert used[0] == used[1]
    assert used[0]["keys:linear"] > used[0][":matmul"]
    assert measured.pop("keys:linear") > 0
    assert measured.items() < used[0].items()


class Apart(Scores):
    """The keys' gradient comes by an addition, and by the product where that is asked for."""

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        keys = self.keys(x)
        return self.queries(x) @ (keys if both else keys.detach()).t() + keys


def test_a_product_that_a_graph_brings_after_all_was_known_has_its_factor_before_the_next_update() -> None:
    torch.manual_seed(0)
    model = quantize(Apart(), Policy(error="e4m3fn"))
    x = torch.randn(4, 4, generator=seeded()) * 2.0**-8
    with AdaLossScaled(model, update_every=100) as handle:
        updating, later = model(x, False), model(x)
        updating.backward(torch.full((4, 4), 1e-4))
        between = model(x)
        later.backward(torch.zeros(4, 4))  # brings the product, and tells nothing of it
        between.backward(torch.full((4, 4), 1e-4))
        backward(model, x, 1e-4)
        scales = handle.log2_scales()
    assert scales["keys:linear"] > scales[":add"]  # the sum alone would hand on its own


def test_weights_of_zero_decide_nothing_for_the_steps_to_come() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = quantize(net, Policy(error="e5m2"))
    x, scales = torch.randn(4, 8, generator=seeded()), []
    for zeroed in (False, True):
        model.load_state_dict(net.state_dict())
        with AdaLossScaled(model, rule="abs_range", update_every=4) as handle:
            if zeroed:
                nn.init.zeros_(model[1].weight)
                backward(model, x, 1e-4)
                model.load_state_dict(net.state_dict())
            backward(model, x, 1e-4)
            scales.append(handle.log2_scales())
    assert scales[0] == scales[1]
    assert scales[0]["0:linear"] > scales[0]["1:linear"]


def spied(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """What calls of a function gave."""
    given, function = [], getattr(owner, name)

    def spy(*args: Any, **kwargs: Any) -> Any:
        given.append(function(*args, **kwargs))
        return given[-1]

    monkeypatch.setattr(owner, name, spy)
    return given


@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
@pytest.mark.parametrize("fmt", ["fp16", "e5m2", "e4m3fn"])
def test_between_updates_gradients_are_looked_at_as_they_are_rounded_and_come_out_the_same(
    case: tuple[nn.Module, Tensor], fmt: str, rounding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = case
    model = quantize(model, Policy(error=fmt, weight_grad=fmt), rounding=rounding)
    at_once = spied(monkeypatch, scaling, "round_fitting_")
    sizes = (1e-6, 1e-6, 3e-6, 2.5e-7)

    def run(update_every: int, observer: Recorder | None) -> list[dict[str, Tensor]]:
        torch.manual_seed(0)
        with AdaLossScaled(model, update_every=update_every) as handle:
            handle.observer = observer
            return [backward(model, x, size) for size in sizes]

    kept = run(100, None)
    assert len(at_once) > len(sizes)
    for got, want in zip(run(100, Recorder()), kept, strict=True):
        assert_same(got, want)
    at_once.clear()
    monkeypatch.setattr(SiteState, "has_headroom", lambda _: False)
    for got, want in zip(run(100, None), kept, strict=True):
        assert_same(got, want)
    assert at_once == []
    assert_same(kept[1], run(1, None)[1])  # of gradients of the same size


@pytest.mark.parametrize("recorder", [None, Recorder()], ids=["alone", "recorded"])
def test_a_gradient_that_outgrows_its_scale_at_once_is_rounded_again_at_a_lower_one(recorder: Recorder | None) -> None:
    model = quantize(nn.Linear(1, 64), Policy(error="e4m3fn"))
    spec, x = rounding_spec("e4m3fn"), torch.ones(1, 1)
    gradient = torch.randn(1, 64, generator=seeded()) * torch.exp2(-torch.arange(64.0) % 16)
    with AdaLossScaled(model, update_every=100) as handle:
        handle.observer = recorder
        for size in (2.0**-20, 2.0**-20, 2.0**-3):
            model.zero_grad()
            (model(x) * (gradient * size)).sum().backward()
            if size < 0.1:
                before = handle.last_log2_scale(":linear")
        after = handle.last_log2_scale(":linear")
        assert after < before
        largest = float(gradient.abs().max()) / 8
        assert largest * 2.0**after <= 448 < largest * 2.0 ** (after + 1)
        fits = gradient.abs() / 8 <= 448 * 2.0**-before
        assert 0 < int(fits.sum()) < 64
        once = torch.where(fits, rounded(gradient / 8, spec, None, torch.tensor([before])), gradient / 8)
        assert torch.equal(gradients(model)["bias"], rounded(once, spec, None, torch.tensor([after]))[0])
        (model(x) * (gradient * 2.0**-20)).sum().backward()
        assert handle.last_log2_scale(":linear") == before  # kept all the same


def test_a_gradient_that_outgrows_its_scale_little_by_little_is_rounded_once() -> None:
    model = quantize(nn.ModuleList([nn.Linear(1, 8), nn.Linear(1, 8)]), Policy(error="e4m3fn"))
    spec, x = rounding_spec("e4m3fn"), torch.ones(1, 1)
    # at 2**10 the second is rounded to half of what is the smallest at 2**6, a tie
    gradient = torch.tensor([4.0, 2.0**-16 * (1 + 2.0**-10), 0.0, 1.0, 2.0, 3.0, 0.5, 0.25])
    with AdaLossScaled(model, update_every=100, scale_upper_bound=2.0**10) as handle:
        for size, other in ((2.0**-24, 0.0), (2.0**-4, 1.0), (1.0, 1.0)):  # what is zero tells nothing
            model.zero_grad()
            (model[0](x) * gradient * size + model[1](x) * other).sum().backward()
        after = handle.last_log2_scale("0:linear")
    assert after == 6  # 448 / 4 = 112
    assert torch.equal(gradients(model)["0.bias"], rounded(gradient, spec, None, torch.tensor([after])))


class Shifted(nn.Module):
    """Its gradients pass additions as the very tensors that were rounded behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) + 1.0) + 1.0


def test_recording_draws_no_noise_where_a_gradient_passes_that_was_rounded_already() -> None:
    torch.manual_seed(0)
    model = quantize(Shifted(), Policy(error="e5m2", weight_grad="e5m2"), rounding="stochastic")
    x, found = torch.randn(4, 8, generator=seeded()), []
    for observer in (None, Recorder()):
        torch.manual_seed(0)
        with AdaLossScaled(model, update_every=100) as handle:
            handle.observer = observer
            found.append([backward(model, x, 1e-6) for _ in range(4)])
            if observer is not None:
                rows = [row for row in observer.rows() if row["step"] == 4]
                scales = {row["site"]: row["log2_scale"] for row in rows if row["role"] == "error"}
                assert scales == handle.log2_scales()
                assert all(row["log2_wanted"] == row["log2_scale"] for row in rows)
    for got, want in zip(*found, strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("every", [1, 2])
def test_tallies_change_no_result_and_miss_no_gradient_that_is_rounded_at_once(every: int) -> None:
    model, x = quantize(nn.Linear(8, 64), Policy(error="e4m3fn"), rounding="stochastic"), torch.ones(4, 8)
    found, calls = [], {}
    for update_every, recorded in ((100, False), (100, True), (1, True)):
        torch.manual_seed(0)
        with AdaLossScaled(model, update_every=update_every), ExitStack() as stack:
            recording = stack.enter_context(record(model, every)) if recorded else None
            found.append([backward(model, x, size) for size in (2.0**-20, 2.0**-20, 2.0**-3, 2.0**-20)])
        if recording is not None:
            calls[update_every] = {(row["site"], row["role"]): row["calls"] for row in recording.rows()}
    for got, want in zip(found[1], found[0], strict=True):
        assert_same(got, want)
    assert calls[100] == calls[1]
    assert calls[100][":linear", "error"] == 4 // every


def test_between_updates_a_place_keeps_its_scale_whatever_another_has_to_lower() -> None:
    torch.manual_seed(0)
    model = quantize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), Policy(error="fp16"))
    model[1].weight.data[0] = 0.0  # nothing of this output's gradient reaches the first layer
    x, gradient = torch.randn(4, 8, generator=seeded()), torch.randn(4, 8, generator=seeded(1)) * 1e-7
    with AdaLossScaled(model, update_every=100) as handle:
        for _ in range(2):
            model(x).backward(gradient)
        before = handle.log2_scales()
        large = gradient.clone()
        large[:, 0] = 1e6
        model(x).backward(large)
        after = handle.log2_scales()
    assert after["1:linear"] < before["1:linear"]
    assert after["0:linear"] == before["0:linear"]


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


@pytest.mark.parametrize("ahead", [2, 3])
def test_updates_come_also_where_forward_passes_run_ahead(ahead: int) -> None:
    torch.manual_seed(0)
    model = quantize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), Policy(error="fp16"))
    x, scales = torch.randn(4, 8, generator=seeded()), []
    with AdaLossScaled(model, update_every=2) as handle:
        backward(model, x, 1e-4)
        for _ in range(4):
            outs = [model(x) for _ in range(ahead)]
            for out in outs:
                out.backward(torch.ones_like(out) * 1e-7)
            scales.append(handle.log2_scales())
    with AdaLossScaled(model) as handle:
        out = model(x)
        out.backward(torch.ones_like(out) * 1e-7)
        assert scales[-1] == handle.log2_scales()


class Halves(nn.Module):
    """Two layers that are called one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, half: str) -> Tensor:
        return getattr(self, half)(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("update_every", [2, 3, 4])
def test_updates_come_also_to_a_graph_that_is_made_before_the_step_that_updates(update_every: int) -> None:
    torch.manual_seed(0)
    model, x = quantize(Halves(), Policy(error="fp16")), torch.randn(4, 8, generator=seeded())
    with AdaLossScaled(model, update_every=update_every) as handle:
        (model(model(x, "first"), "last") * 1e-4).sum().backward()
        for _ in range(4):
            shared = model(x, "first")
            for retain in (True, False):  # the second layer is called again after the first backward pass
                (model(shared, "last") * 1e-7).sum().backward(retain_graph=retain)
        scales = handle.log2_scales()
    with AdaLossScaled(model) as handle:
        (model(model(x, "first"), "last") * 1e-7).sum().backward()
        assert scales == handle.log2_scales()


def test_steps_are_backward_passes_not_calls_of_a_layer() -> None:
    layer = nn.Linear(8, 8)
    model = quantize(nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer), Policy(error="fp16"))
    with AdaLossScaled(model, update_every=2) as handle:
        handle.observer = recorder = Recorder()
        for _ in range(4):
            backward(model, torch.randn(4, 8, generator=seeded()), 1e-9)
    assert handle.step == 4
    sites = [row["site"] for row in recorder.rows() if row["step"] == 1 and row["role"] == "error"]
    assert len(sites) == len(set(sites))  # a shared layer has a place for each of its uses


def test_accumulated_gradients_add_up() -> None:
    model = quantize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), "e5m2")
    a, b = torch.randn(3, 4, generator=seeded(1)), torch.randn(3, 4, generator=seeded(2))
    with AdaLossScaled(model) as handle:
        parts = [backward(model, x, 1e-5) for x in (a, b)]
        model.zero_grad()
        for x in (a, b):
            (model(x) * torch.randn(3, 2, generator=seeded(1)) * 1e-5).sum().backward()
        assert_same(gradients(model), {name: parts[0][name] + parts[1][name] for name in parts[0]})
    assert handle.step == 4


def test_a_loss_scaler_combines_with_it() -> None:
    model = quantize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), "e5m2")
    x = torch.randn(3, 4, generator=seeded())
    with AdaLossScaled(model, rule="current"):
        alone = backward(model, x, 1e-6)
        model.zero_grad()
        scaler = GradScaler(2.0**10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler.scale((model(x) * torch.randn(3, 2, generator=seeded(1)) * 1e-6).sum()).backward()
        scaler.unscale_(optimizer)
        assert_same(gradients(model), alone)  # the same mantissas at the top of the range, at every scale of the loss


def test_frozen_parameters_and_unused_outputs_need_no_gradient() -> None:
    model = Fork()
    model.small.weight.requires_grad_(False)
    model = quantize(model, "fp16")
    with AdaLossScaled(model):
        _, large = model(torch.randn(2, 4))
        large.sum().mul(1e-7).backward()
        assert model.small.weight.grad is None
        assert bool(model.first.weight.grad.any())
        model.zero_grad()
        small, _ = model(torch.randn(2, 4))
        small.sum().mul(1e-7).backward()  # through a frozen weight
        assert bool(model.first.weight.grad.any())


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.use_reentrant = use_reentrant  # None for no checkpoint

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.use_reentrant is None:
            return self.last(self.block(h))
        return self.last(checkpoint(self.block, h, use_reentrant=self.use_reentrant))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_no_gradient(use_reentrant: bool) -> None:
    results = []
    for way in (None, use_reentrant):
        model = quantize(Checkpointed(way), "e5m2")
        with AdaLossScaled(model, rule="current"):
            results.append(backward(model, torch.randn(4, 8, generator=seeded()), 1e-6))
    assert_same(*results)  # measured scales do not depend on what is upstream, which a nested backward hides


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_makes_no_step_of_its_own_and_no_other_places(use_reentrant: bool) -> None:
    model = quantize(Checkpointed(use_reentrant), "e5m2")
    with AdaLossScaled(model, update_every=2) as handle:
        handle.observer = recorder = Recorder()
        for size in (1e-3, 1e-5, 1e-7):
            backward(model, torch.randn(4, 8, generator=seeded()), size)
    assert handle.step == 3
    rows = recorder.rows()
    sites = [[row["site"] for row in rows if row["step"] == step] for step in (1, 2, 3)]
    assert sites[0] == sites[1] == sites[2]
    assert not any("#" in site for site in sites[0])
    factors = [row["unbound"] for row in rows if row["site"] == "block.2:linear"]
    assert factors[0] == factors[1] != factors[2]  # computed anew in the third step, inside the checkpoint too


def test_a_forward_pass_without_a_backward_pass_leaves_no_trace() -> None:
    # a validation that forgets torch.no_grad(), or a forward that was interrupted
    results = []
    x = torch.randn(4, 8, generator=seeded())
    for forwards in (0, 1):
        torch.manual_seed(0)
        model = quantize(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), "e5m2")
        with AdaLossScaled(model, rule="amax_history"):
            for _ in range(3):
                backward(model, x, 1e-6)
            for _ in range(forwards):
                model(x)
            results.append(backward(model, x, 1e-6))
    assert_same(*results)


def test_a_retained_graph_gives_the_same_again() -> None:
    model = quantize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), "e5m2")
    for rule in RULES:
        if rule == "amax_history":
            continue  # its second pass knows the first
        with AdaLossScaled(model, rule=rule):
            model.zero_grad()
            loss = (model(torch.randn(3, 4, generator=seeded())) * 1e-6).sum()
            loss.backward(retain_graph=True)
            once = gradients(model)
            model.zero_grad()
            loss.backward()
            assert_same(gradients(model), once)


def test_double_backward_goes_through_the_scaled_rounding() -> None:
    model = quantize(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), "fp16")
    x = torch.randn(3, 4, generator=seeded(), requires_grad=True)
    results = []
    for scaled in (False, True):
        model.zero_grad()
        handle = AdaLossScaled(model) if scaled else None
        (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        g.square().sum().backward()
        results.append(gradients(model))
        if handle is not None:
            handle.detach()
    for name in results[0]:  # nothing underflows here: the same numbers to a few units in the last place of fp16
        assert torch.allclose(results[0][name], results[1][name], rtol=2.0**-7, atol=1e-4), name


def test_a_partial_backward_leaves_no_scale_behind() -> None:
    model = quantize(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), "e5m2")
    x = torch.randn(3, 4, generator=seeded())
    with AdaLossScaled(model):
        expected = backward(model, x, 1e-6)
        out = model(x)
        weights = torch.randn(3, 2, generator=seeded(1))
        torch.autograd.grad((out * weights).sum() * 1e6, model[2].weight, retain_graph=True)
        model.zero_grad()
        (out * weights * 1e-6).sum().backward()
        assert_same(gradients(model), expected)


def test_transforms_of_torch_func_are_refused_with_what_to_do() -> None:
    model = quantize(nn.Linear(3, 1), "fp16")
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (torch.ones(2, 3),)).sum()

    plain = torch.func.grad(loss)(parameters)
    with AdaLossScaled(model), pytest.raises(NotImplementedError, match=r"Possible: loss\.backward\(\)"):
        torch.func.grad(loss)(parameters)
    assert_same(torch.func.grad(loss)(parameters), plain)


def test_two_models_with_two_optimizers_do_not_meet() -> None:
    # as a generator and a discriminator: one backward goes through both
    torch.manual_seed(0)
    generator = quantize(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4)), "e5m2")
    discriminator = quantize(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), "e5m2")
    z = torch.randn(5, 2)
    with AdaLossScaled(generator) as one, AdaLossScaled(discriminator) as two:
        (discriminator(generator(z)) * 1e-6).mean().backward()
        assert all(bool(p.grad.any()) for p in (*generator.parameters(), *discriminator.parameters()))
        (discriminator(generator(z).detach()) * 1e-6).mean().backward()
    assert (one.step, two.step) == (1, 2)


def test_a_gradient_that_was_rounded_at_a_scale_is_rounded_where_it_is_an_operand() -> None:
    model, x = quantize(nn.Linear(8, 8), "fp16"), torch.randn(4, 8, generator=seeded()).requires_grad_()
    with AdaLossScaled(model):
        (g,) = torch.autograd.grad((model(x) * 1e-7).sum(), x)
    assert not torch.equal(g, round_to(g, "fp16"))
    with fpsim.emulate("fp16"):
        y = g * 1024.0
    assert torch.equal(y, round_to(g, "fp16") * 1024.0)


def test_a_copy_of_the_model_is_not_scaled() -> None:
    model = quantize(nn.Linear(4, 4), "fp16")
    plain = backward(model, torch.ones(2, 4), 1e-9)
    with AdaLossScaled(model):
        assert_same(backward(copy.deepcopy(model), torch.ones(2, 4), 1e-9), plain)


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
        # what underflows is the derivative of GELU's cube, which is small where its input is
        assert [row["site"] for row in rows if row["underflow"] > 0.1 and not row["site"].endswith(".act:pow")] == []
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
    model = quantize(ResNetForImageClassification(config), "e5m2")
    with AdaLossScaled(model, [AdaLossTransformConv2d(), AdaLossTransformLinear(), AdaLossTransformCast()]):
        (model(torch.randn(2, 3, 32, 32)).logits * torch.randn(2, 3) * 1e-6).sum().backward()
    assert all(bool(p.grad.any()) for name, p in model.named_parameters() if "weight" in name)


# State, memory, words.


@pytest.mark.parametrize("rule", ["approx_range", "amax_history"])
def test_a_saved_state_goes_on_to_the_same_bits(rule: str, tmp_path: Any) -> None:
    def run(handle: AdaLossScaled, steps: range) -> list[dict[str, Tensor]]:
        return [backward(handle.model, x, 10.0 ** -(i % 7)) for i in steps]

    x = torch.randn(4, 8, generator=seeded())
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    every = 4 if rule in AHEAD else 1
    whole = AdaLossScaled(quantize(net, "e5m2"), rule=rule, update_every=every)
    expected = run(whole, range(10))
    first = AdaLossScaled(quantize(net, "e5m2"), rule=rule, update_every=every)
    run(first, range(6))
    torch.save(first.state_dict(), tmp_path / "scaling.pt")
    second = AdaLossScaled(quantize(net, "e5m2"), rule=rule, update_every=every)
    second.load_state_dict(torch.load(tmp_path / "scaling.pt", weights_only=True))
    assert second.state_dict() == first.state_dict()
    assert second.log2_scales() == first.log2_scales() != {}
    assert second.step == 6
    for got, want in zip(run(second, range(6, 10)), expected[6:], strict=True):
        assert_same(got, want)


def test_a_saved_state_goes_on_to_the_same_bits_where_the_next_gradient_outgrows_its_scale_at_once() -> None:
    model, x = quantize(nn.Linear(8, 64), Policy(error="e4m3fn"), rounding="stochastic"), torch.ones(4, 8)
    found = []
    for resumed in (False, True):
        torch.manual_seed(0)
        handle = AdaLossScaled(model, update_every=100)
        for _ in range(2):
            backward(model, x, 2.0**-20)
        if resumed:
            state = handle.state_dict()
            handle.detach()
            handle = AdaLossScaled(model, update_every=100)
            handle.load_state_dict(state)
        found.append(backward(model, x, 2.0**-3))
        handle.detach()
    assert_same(*found)


def test_branches_of_the_original_take_factors_from_a_state_not_scales() -> None:
    torch.manual_seed(0)
    model, x = quantize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "fp16"), torch.randn(4, 8, generator=seeded())
    settings = {"init_scale": 0.25, "update_every": 100, "branches": "original"}
    with AdaLossScaled(model, [AdaLossTransformLinear()], **settings) as handle:  # type: ignore[arg-type]
        backward(model, x, 1e-6)
        scales, state = handle.log2_scales(), handle.state_dict()
    with AdaLossScaled(model, [AdaLossTransformLinear()], **settings) as handle:  # type: ignore[arg-type]
        handle.load_state_dict(state)
        backward(model, x, 1e-4)  # of which the factor would be another
        assert handle.log2_scales() == scales
        assert scales["1:linear"] == -2  # as init_scale says
        assert scales["0:linear"] > 0


@pytest.mark.parametrize("rule", ["approx_range", "amax_history"])
def test_scales_stay_with_the_gradients_whatever_the_default_device(rule: str) -> None:
    torch.manual_seed(0)
    model = quantize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "e5m2", rounding="stochastic")
    x, weights = torch.randn(4, 8), torch.randn(4, 8) * 1e-6
    results, states, rows = [], [], []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        model.zero_grad()
        with torch.device(device), AdaLossScaled(model, rule=rule, update_every=2 if rule in AHEAD else 1) as handle:
            handle.observer = recorder = Recorder()
            for _ in range(3):
                (model(x) * weights).sum().backward()
                handle.load_state_dict(handle.state_dict())
            states.append(handle.state_dict())
        results.append(gradients(model))
        rows.append(str(recorder.rows()))
    assert_same(*results)
    assert states[0] == states[1]
    assert rows[0] == rows[1]


def test_a_copy_of_the_scaling_itself_is_refused_with_what_to_do() -> None:
    with AdaLossScaled(quantize(nn.Linear(2, 2), "fp16")) as handle:
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"neither copied nor pickled\. Copy or save its \.model and its state"):
                duplicate(handle)
        copy.deepcopy(handle.model)


def test_a_gradient_can_be_copied_and_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8, requires_grad=True)
    with AdaLossScaled(quantize(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), "e5m2")) as handle:
        (gradient,) = torch.autograd.grad(handle(x).sum() * 1e-7, [x])
    assert gradient.count_nonzero()
    torch.save(gradient, tmp_path / "gradient.pt")
    copies = [copy.deepcopy(gradient), pickle.loads(pickle.dumps(gradient)), torch.load(tmp_path / "gradient.pt")]
    for duplicate in copies:
        assert torch.equal(duplicate, gradient)
        with fpsim.emulate("e5m2"):  # as an operand it has no scale, whatever it was rounded at
            assert torch.equal(duplicate * 1, torch.zeros(4, 8))


SETTINGS: dict[str, Any] = {
    "rule": "abs_range",
    "transforms": [AdaLossTransformLinear()],
    "init_scale": 2.0,
    "update_every": 3,
    "scale_upper_bound": 16.0,
    "accum_upper_bound": 1024.0,
    "branches": "original",
    "u_min": "flush",
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_state_of_another_setting_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    model = quantize(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "fp16")
    with AdaLossScaled(model, **{name: SETTINGS[name]}) as one:
        backward(model, torch.ones(1, 2))
        torch.save(one.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    with AdaLossScaled(model, **{name: SETTINGS[name]}) as same:
        same.load_state_dict(state)
        assert same.step == 1
    said = {"transforms": "modules"}.get(name, name)
    with (
        AdaLossScaled(model) as other,
        pytest.raises(ValueError, match=rf"of other settings: {said}=.* This has {said}"),
    ):
        other.load_state_dict(state)


def test_a_state_of_another_parameter_of_the_rule_is_refused() -> None:
    model = quantize(nn.Linear(2, 2), "fp16")
    with AdaLossScaled(model, rule=layer_rule("exact", n_uf_threshold=0.5)) as one:
        state = one.state_dict()
    with (
        AdaLossScaled(model, rule="exact") as two,
        pytest.raises(ValueError, match=r"settings: params=\{'n_uf_threshold': 0\.5\}\. This has params=\{'n_uf_thr"),
    ):
        two.load_state_dict(state)


def test_a_state_without_settings_is_refused_with_what_it_lacks() -> None:
    with AdaLossScaled(quantize(nn.Linear(2, 2), "fp16")) as handle:
        with pytest.raises(ValueError, match=r"The state has \['scale'\], and lacks rule, init_scale, .* sites\."):
            handle.load_state_dict({"scale": 1})
        state = handle.state_dict()
        old = {name: state[name] for name in ("rule", "params", "step", "updated", "sites")}  # as 0.1 kept it
        with pytest.raises(ValueError, match=r"lacks init_scale, update_every, .*older ones kept the rule alone"):
            handle.load_state_dict(old)


def test_what_the_engine_keeps_does_not_grow_with_the_steps() -> None:
    model = quantize(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), "e5m2")
    with AdaLossScaled(model) as handle:
        sizes = []
        for _ in range(5):
            backward(model, torch.randn(4, 8, generator=seeded()))
            engine = handle._engine
            sizes.append((len(engine.states), len(engine.constants), len(engine.unlinked)))
    assert len(set(sizes)) == 1


def test_the_settings_can_be_read_and_not_set() -> None:
    given = {
        "init_scale": 8.0,
        "rule": layer_rule("abs_range"),
        "update_every": 5,
        "scale_upper_bound": 16.0,
        "accum_upper_bound": 1024.0,
        "branches": "original",
        "u_min": "normal",
    }
    with AdaLossScaled(quantize(nn.Linear(2, 2), "fp16"), **given) as handle:  # type: ignore[arg-type]
        assert {name: getattr(handle, name) for name in given} == given
        assert (handle.step, handle.observer) == (0, None)
        for name in (*given, "step"):
            with pytest.raises(AttributeError):
                setattr(handle, name, 1)


def test_bad_input_is_refused_with_what_to_do() -> None:
    model = quantize(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "fp16")
    with pytest.raises(ValueError, match=r"Linear is not quantised.*Call fpsim\.quantize\(model, fmt\) first"):
        AdaLossScaled(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="model came as function"):
        AdaLossScaled(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"AdaLossTransformConv2d matches no module\. Classes in the model: Linear, ReLU, S"
    ):
        AdaLossScaled(model, [AdaLossTransformConv2d()])
    with pytest.raises(TypeError, match=r"A transform came as 'Linear'\. Possible: AdaLossTransformLinear\(\)"):
        AdaLossScaled(model, ["Linear"])  # type: ignore[list-item]
    unheeded = ({"init_scale": 2.0}, {"update_every": 2}, {"scale_upper_bound": 16.0})
    for options, message in (
        ({"init_scale": 3.0}, "init_scale=3.0 is impossible. Possible: a power of two"),
        ({"init_scale": 0.0}, "init_scale=0.0"),
        ({"init_scale": math.inf}, "init_scale=inf"),
        ({"update_every": 0}, "update_every=0"),
        ({"scale_upper_bound": -1.0}, "scale_upper_bound=-1.0"),
        ({"accum_upper_bound": math.nan}, "accum_upper_bound=nan"),
        ({"accum_upper_bound": True}, "accum_upper_bound=True is impossible. Possible: a finite number above 0"),
        ({"update_every": True}, "update_every=True is impossible. Possible: 1 for every step, or more"),
        ({"branches": "both"}, "branches='both' is impossible. Possible: 'exact' or 'original'"),
        ({"u_min": "half"}, "u_min='half'"),
        ({"rule": "exact", "branches": "original"}, "branches='original' came with the rule 'exact'"),
        *(
            ({"rule": rule, **given}, f"{next(iter(given))}={next(iter(given.values()))} came with the rule '{rule}'")
            for rule in ("exact", "current", "amax_history")
            for given in unheeded
        ),
        ({"rule": "adaptive"}, "Unknown layer rule 'adaptive'"),
    ):
        with pytest.raises(ValueError, match=message.replace("(", r"\(")):
            AdaLossScaled(model, **options)  # type: ignore[arg-type]
    first = AdaLossScaled(model)
    with pytest.raises(ValueError, match=r"scaled already\. Call detach\(\)"):
        AdaLossScaled(model)
    first.detach()
    AdaLossScaled(model).detach()
    assert "ApproxRange(n_uf_threshold=0.001" in repr(first)
    product = quantize(Product(), "fp16")
    AdaLossScaled(product, rule="element_wise_range")
    with pytest.raises(NotImplementedError, match=r"matmul at :matmul is no linear layer.*transforms="):
        product(torch.ones(2, 2, requires_grad=True))


class Product(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x


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


def test_noise_of_stochastic_rounding_is_the_same_at_every_power_of_two() -> None:
    layer = quantize(nn.Linear(8, 8, bias=False), Policy(error="e5m2"), rounding="stochastic")
    g = torch.randn(4, 8, generator=seeded())
    results = []
    for log2_scale in (0, 6):
        torch.manual_seed(3)
        layer.zero_grad()
        with AdaLossScaled(layer, rule="fixed", init_scale=2.0**log2_scale):
            layer(torch.eye(8)[:4]).backward(g)
        results.append(layer.weight.grad.clone())
    assert torch.equal(*results)  # none of these is subnormal


@pytest.mark.parametrize("rule", ["abs_range", "exact"])
def test_gradients_may_be_kept_above_the_smallest_normal_number(rule: str) -> None:
    # all alike but for one: just above the flush point a constant has one digit, and every copy of it the same error
    fmt = fpsim.as_format("e4m3fn")
    gradient = torch.full((8, 4), 0.1 / 64)
    gradient[0, 0] = -0.9 / 64
    errors = {}
    for u_min in ("smallest", "normal"):
        layer = quantize(nn.Linear(4, 4), Policy(error=fmt))
        with AdaLossScaled(layer, rule=rule, u_min=u_min) as handle:
            layer(torch.ones(8, 4)).backward(gradient)
            k = handle.last_log2_scale(":linear")
        if u_min == "normal":
            lowest = fmt.smallest_normal / (2 if rule == "abs_range" else 1)  # its factor is rounded down
            assert lowest <= 0.1 / 64 * 2.0**k < 2 * lowest
        else:
            assert fmt.smallest / 2 < 0.1 / 64 * 2.0**k < 2 * fmt.smallest
        errors[u_min] = abs(layer.bias.grad[1].item() / gradient[:, 1].sum().item() - 1)
    assert errors["normal"] <= 2.0**-3 < errors["smallest"]


def test_weight_gradients_alone_are_raised_where_they_enter_the_format() -> None:
    layer = quantize(nn.Linear(4, 4), Policy(weight_grad="e4m3fn"))
    for rule in ("approx_range", "abs_range", "exact", "current"):
        layer.zero_grad()
        with AdaLossScaled(layer, rule=rule):
            layer(torch.randn(6, 4, generator=seeded())).backward(torch.randn(6, 4, generator=seeded(1)) * 1e-9)
        assert bool(layer.weight.grad.all()), rule


def test_limits_of_the_container_are_said() -> None:
    model = quantize(nn.Linear(4, 4), Policy(error="fp16"))
    high = log2_scale_limits(rounding_spec("fp16"), torch.float32)[1]
    with AdaLossScaled(model, rule="current") as handle:
        handle.observer = recorder = Recorder()
        backward(model, torch.ones(2, 4), 1e-30)
    row = recorder.rows()[0]
    assert (row["log2_scale"], row["limited"]) == (high, True)
    assert row["log2_wanted"] > high
