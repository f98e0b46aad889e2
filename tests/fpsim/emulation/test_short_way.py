"""The short way of a call gives what the long way gives: numbers, marks, gradients, sites, noise and errors."""

from __future__ import annotations

import copy
import linecache
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import tiers
import torch
import torch.nn.functional as F
from programs import draw, random_genes, run, space_of
from torch import Tensor, nn

import fpsim
from fpsim.emulation import mode, short_way
from fpsim.emulation.marks import format_of
from fpsim.emulation.scope import active

PROGRAMS = 120
SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {"fmt": "bf16"},
    "e4m3fn": {"fmt": "e4m3fn"},
    "e5m2 stochastic": {"fmt": "e5m2", "rounding": "stochastic"},
    "fp8_current": {"fmt": "recipe:fp8_current"},
    "weights alone": {"fmt": fpsim.Policy(weight="e4m3fn")},
}


def bits(x: Tensor | None) -> Any:
    if x is None or not x.is_floating_point():
        return None if x is None else x.tolist()
    return x.detach().contiguous().view(torch.int32 if x.dtype is torch.float32 else torch.int16).tolist()


def seen_of(model: nn.Module, inputs: list[Tensor], program: Any, is_recorded: bool) -> Any:
    """All that a run of a program shows."""
    fpsim.manual_seed(3)
    rows: Any = None
    try:
        if is_recorded:
            with fpsim.record(model) as recording:
                outcome = run(model, inputs, program)
            rows = [(row["site"], row["role"], row["underflow_count"], row["count"]) for row in recording.rows()]
        else:
            outcome = run(model, inputs, program)
    except Exception as error:
        return type(error).__name__, str(error)
    found = {name: (bits(x), format_of(x), x.requires_grad) for name, x in outcome.variables.items()}
    others = (outcome.shown, outcome.stays, outcome.gradients)
    return found, [{name: bits(x) for name, x in tensors.items()} for tensors in others], rows


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many calls went which way. `ways["is_long"] = 1` sends all of them the long way."""
    counted: Counter[str] = Counter()
    by_short_way = short_way.by_short_way

    def counting(*args: Any) -> Any:
        out = NotImplemented if counted["is_long"] else by_short_way(*args)
        counted["long" if out is NotImplemented else "short"] += 1
        return out

    monkeypatch.setattr(mode, "by_short_way", counting)
    return counted


@tiers.parametrize("name", SETTINGS, keep=tiers.every(3))
def test_random_programs_show_the_same_by_either_way(name: str, ways: Counter[str]) -> None:
    for number in range(PROGRAMS):
        program = draw(random_genes(number), "bf16")
        space = space_of(program.source())
        torch.default_generator.manual_seed(number)
        module, inputs = space["Program"](), [torch.randn(4, 4) for _ in range(2)]
        shown = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for ways["is_long"] in (0, 1):
                model = fpsim.quantize(copy.deepcopy(module), **SETTINGS[name])
                shown.append(seen_of(model, inputs, program, number % 3 == 0))
        linecache.cache.pop(space["__name__"], None)
        assert shown[0] == shown[1], program.source()
    assert ways["short"] > PROGRAMS


WITHOUT_GRADIENTS = [torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("is_frozen", [True, False], ids=["frozen", "not frozen"])
@pytest.mark.parametrize("off", WITHOUT_GRADIENTS, ids=lambda x: x.__name__)
@pytest.mark.parametrize("name", SETTINGS)
def test_random_programs_without_a_graph_show_the_same_by_either_way(
    name: str, off: Any, is_frozen: bool, ways: Counter[str]
) -> None:
    for number in range(PROGRAMS // 2):
        program = replace(draw(random_genes(1000 + number), "bf16"), has_gradients=False)
        space = space_of(program.source())
        torch.default_generator.manual_seed(number)
        module, inputs = space["Program"](), [torch.randn(4, 4) for _ in range(2)]
        shown = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for ways["is_long"] in (0, 1):
                model = fpsim.quantize(copy.deepcopy(module), **SETTINGS[name])
                each = []
                try:
                    with fpsim.frozen(model) if is_frozen else nullcontext():
                        for is_recorded in (False, number % 3 == 0, False):
                            with off():
                                each.append(seen_of(model, inputs, program, is_recorded))
                except RuntimeError as error:  # a weight was written to
                    each.append(str(error))
                shown.append(each)
        linecache.cache.pop(space["__name__"], None)
        assert shown[0] == shown[1], program.source()
    assert ways["short"] > PROGRAMS


class Layer(nn.Module):
    """A layer as language models have it: float32 on purpose, moves, a product with heads, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=i == 1) for i in range(3))
        self.up, self.down, self.gain = nn.Linear(32, 48), nn.Linear(48, 32), nn.Parameter(torch.rand(32))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        h = self.gain * wide.to(x.dtype)
        q, k, v = (f(h).view(*h.shape[:-1], 4, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        turned = torch.cat((-q[..., 4:], q[..., :4]), -1)
        out = F.scaled_dot_product_attention(q + turned, k, v).transpose(1, 2).reshape(x.shape).contiguous()
        x = x + out
        y: Tensor = x + self.down(F.silu(self.up(x)) / 3)
        return y


@pytest.fixture
def shortest(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many calls took the shortest way, by function."""
    counted: Counter[str] = Counter()
    way_of = short_way.way_of

    def counting(*args: Any) -> Any:
        way = way_of(*args)
        if way is not None:
            run = way.run

            def counted_run(*given: Any) -> Any:
                out = run(*given)
                counted[way.name] += out is not NotImplemented
                return out

            way.run = counted_run
        return way

    monkeypatch.setattr(short_way, "way_of", counting)
    return counted


@pytest.mark.parametrize("is_frozen", [True, False], ids=["frozen", "not frozen"])
@pytest.mark.parametrize("off", WITHOUT_GRADIENTS, ids=lambda x: x.__name__)
@pytest.mark.parametrize("fmt", ["bf16", "e4m3fn", "recipe:fp8_current", "recipe:mxfp8"])
def test_a_layer_without_a_graph_gives_the_same_by_every_way(
    fmt: str, off: Any, is_frozen: bool, ways: Counter[str], shortest: Counter[str]
) -> None:
    torch.default_generator.manual_seed(0)
    module, shown = nn.Sequential(Layer(), Layer(), Layer()), []
    texts = [torch.randn(2, 3, 32), torch.randn(1, 1, 32), torch.zeros(1, 2, 32), torch.randn(2, 3, 32) * torch.inf]
    for ways["is_long"] in (0, 1):
        model = fpsim.quantize(copy.deepcopy(module), fmt)
        with fpsim.frozen(model) if is_frozen else nullcontext(), off():
            outs = [model(x) for x in texts * 2]
        shown.append([(bits(x), format_of(x)) for x in outs])
    assert shown[0] == shown[1]
    expected = {"add", "mul", "rsqrt", "mean", "pow", "cat", "neg", "transpose", "silu", "scaled_dot_product_attention"}
    expected |= {"linear"} if is_frozen else set()
    expected |= {"to"} if fmt == "bf16" else set()
    assert expected <= {name for name, n in shortest.items() if n}


def test_what_changes_after_a_way_was_found_is_seen(shortest: Counter[str]) -> None:
    torch.default_generator.manual_seed(0)
    model, x = fpsim.quantize(nn.Sequential(Layer(), Layer()), "bf16"), torch.randn(2, 3, 32)
    with torch.no_grad():
        before = model(x)
        model[0].gain.mul_(2.0)  # a write to a weight
        doubled = model(x)
        model[0].gain.div_(2.0)
        assert not torch.equal(doubled, before)
        assert torch.equal(model(x), before)
        fpsim.set_policy(model, "recipe:fp8_current")  # another policy
        narrow = model(x)
        assert torch.equal(narrow, fpsim.quantize(fpsim.dequantize(model), "recipe:fp8_current")(x))
    model, said = fpsim.quantize(fpsim.dequantize(model), "bf16"), shortest["add"]
    with torch.no_grad(), fpsim.record(model) as recording:  # somebody looks
        assert torch.equal(model(x), before)
    assert any(row["site"].startswith("1:add") for row in recording.rows())
    out = model(x)  # with a graph
    assert torch.equal(out, before)
    assert out.requires_grad
    assert shortest["add"] == said


def test_what_is_written_to_after_a_call_is_rounded_again() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x + x
            y.data.copy_(torch.full_like(x, 1.01))
            y[0] = 3.0
            z = y * 1.0
            y.requires_grad_()
            return z + y

    x, shown = torch.rand(4), []
    for is_off in (True, False):
        with torch.no_grad() if is_off else nullcontext():
            shown.append(bits(fpsim.quantize(Writes(), "e5m2")(x).detach()))
    assert shown[0] == shown[1]


def test_most_calls_of_a_network_take_the_short_way(ways: Counter[str]) -> None:
    network = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Softmax(-1))
    fpsim.quantize(network, "e4m3fn")(torch.randn(4, 8)).sum().backward()
    assert ways["short"] >= 5
    assert ways["long"] == 0


CALLS = {
    "a weight given by name": lambda x, w: F.linear(x, weight=w),
    "a result in given memory": lambda x, w: torch.add(x, w, out=torch.empty(4, 4)),
    "a dtype in words": lambda x, w: torch.softmax(x * w, -1, dtype=torch.float32) + w,
    "in place": lambda x, w: F.relu(x * w, True),
    "an infinite quotient": lambda x, w: x / torch.zeros(4, 4),
    "a mask scaled by a number": lambda x, w: (x + w).masked_fill(w > 0, torch.finfo(torch.float32).min) / 8,
    "one tensor twice": lambda x, w: (x * x) @ (w @ w),
    "float32 on purpose": lambda x, w: (x.float() * w.float()).cos().mean(-1, keepdim=True) * x,
    "autocast switched off": lambda x, w: _without_autocast(x, w),
    "saved elsewhere": lambda x, w: _saved_elsewhere(x, w),
    "several, of which one is unknown": lambda x, w: torch.cat([x * w, x, torch.stack([x[0] * 2] * 4)]),
}


def _without_autocast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return (x * w) @ w


def _saved_elsewhere(x: Tensor, w: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return torch.tanh(x * w) @ w


class Called(nn.Module):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call, self.w = call, nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.call(x, self.w)
        return out


@pytest.mark.parametrize("fmt", ["bf16", "e4m3fn", "recipe:fp8_current"])
@pytest.mark.parametrize("name", CALLS)
def test_an_unusual_call_gives_the_same_by_either_way(name: str, fmt: str, ways: Counter[str]) -> None:
    torch.default_generator.manual_seed(0)
    module, x = Called(CALLS[name]), torch.randn(4, 4)
    shown = []
    for ways["is_long"] in (0, 1):
        model = fpsim.quantize(copy.deepcopy(module), fmt)
        try:
            out = model(x)
            if out.requires_grad:
                out.sum().backward()
            shown.append((bits(out), format_of(out), bits(model.w.grad)))
        except RuntimeError as error:
            shown.append(str(error))
    assert shown[0] == shown[1]


def test_a_policy_that_is_set_later_has_plans_of_its_own() -> None:
    model, x = fpsim.quantize(nn.Linear(4, 4, bias=False), "e4m3fn"), torch.randn(2, 4)
    before = model(x)
    fpsim.set_policy(model, "bf16")
    assert not torch.equal(model(x), before)
    assert torch.equal(model(x), fpsim.quantize(fpsim.dequantize(model), "bf16")(x))


@pytest.mark.parametrize("rounding", [None, "toward_zero"])
def test_blocks_of_one_name_plan_each_function_once_and_share_nothing_else(
    rounding: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[str] = []

    class Counted(short_way.Plan):
        def __init__(self, scope: Any, call: Any) -> None:
            planned.append(call.name)
            super().__init__(scope, call)

    monkeypatch.setattr(short_way, "Plan", Counted)
    x, fmt, scopes = torch.tensor([1.0, 1.0 + 2**-9]), "e7m11", []  # no other test has blocks of it
    for _ in range(2):
        with fpsim.emulate(fmt, rounding):
            y = x * x
            scopes.append(active.emulation.scope)
    assert planned.count("mul") == 1
    assert y.tolist() == [1.0, 1.0 + 2**-8]  # 1 + 2**-8 + 2**-18: the spacing is 2**-11
    first, second = scopes
    assert first.plans is second.plans
    assert first.counts["mul"] == second.counts["mul"] == 1
    assert first.counts is not second.counts
    assert first.listeners is not second.listeners


def test_a_policy_that_changes_between_two_blocks_is_read_anew() -> None:
    roundings = {"activation": "toward_zero"}
    policy, x = fpsim.Policy(activation="e4m3fn", rounding=roundings), torch.tensor([1.0])
    with fpsim.emulate(policy):
        down = x * 1.1
    roundings["activation"] = "up"
    with fpsim.emulate(policy):
        up = x * 1.1
    assert (down.item(), up.item()) == (1.0, 1.125)
