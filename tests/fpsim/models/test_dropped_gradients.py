"""Optimizers that drop each gradient in their step, and that keep their states a level deeper.

`Dropping` does what HeavyBall's optimizers do by default (heavyball/utils.py, `StatefulOptimizer`): `consume_grad=True`
sets `p.grad = None` as soon as a gradient is read, and `optimizer.state[p]` is `{0: {names and states}}`, for a
parameter may be stepped as several views.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiers import parametrize
from torch import Tensor, nn
from torch.optim import Optimizer

import fpsim
from fpsim import Update, quantize_optimizer

UPDATES: dict[str, Any] = {
    "bf16_sr": "bf16_sr",
    "bf16_remainder": "bf16_remainder",
    "te_fp16_master": "te_fp16_master",
    "kahan": Update(weight="bf16", compensation="kahan", states="bf16"),
    "pair": Update(weight="bf16", compensation="pair"),
    "int8 master": Update(weight="int8 per row fp32", master="fp16 per tensor fp32", states="e4m3fn per tensor fp32"),
    "in bf16": Update(weight="bf16", arithmetic="format"),
}


class Dropping(Optimizer):
    """RMSprop with momentum. drops, is_nested: as HeavyBall does by default. decays: also what has no gradient."""

    def __init__(self, params: Any, drops: bool = True, is_nested: bool = True, decays: float = 0.0) -> None:
        super().__init__(params, {"lr": 0.05})
        self.drops, self.is_nested, self.decays = drops, is_nested, decays

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad
                if self.decays:
                    p.mul_(1 - self.decays)
                if g is None:
                    continue
                if self.drops:
                    p.grad = None
                state = self.state[p].setdefault(0, {"initialised": {0}}) if self.is_nested else self.state[p]
                if "exp_avg" not in state:
                    state["exp_avg"], squares = torch.zeros_like(p), torch.zeros_like(p)
                    state["squares"] = [[(tuple(p.shape), squares)], None] if self.is_nested else squares
                squares = state["squares"][0][0][1] if self.is_nested else state["squares"]
                squares.mul_(0.9).addcmul_(g, g, value=0.1)
                state["exp_avg"].mul_(0.8).addcdiv_(g, squares.sqrt().add_(1e-6))
                p.add_(state["exp_avg"], alpha=-group["lr"])
        return loss

    def states(self, p: Tensor) -> list[Tensor]:
        state = self.state[p][0] if self.is_nested else self.state[p]
        return [state["exp_avg"], state["squares"][0][0][1] if self.is_nested else state["squares"]]


def parameters() -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=draw)) for shape in [(6, 40), (5,)]]


def give_gradients(params: list[nn.Parameter], seed: int) -> None:
    draw = torch.Generator().manual_seed(1000 + seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=draw)


def train(update: Any, steps: int = 4, **options: Any) -> tuple[list[nn.Parameter], Dropping]:
    params = parameters()
    optimizer = Dropping(params, **options)
    if update is not None:
        quantize_optimizer(optimizer, update)
    for seed in range(steps):
        give_gradients(params, seed)
        optimizer.step()
        assert all((p.grad is None) is optimizer.drops for p in params)
        optimizer.zero_grad()
    return params, optimizer


def same(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(x.detach(), y.detach()) for x, y in zip(a, b, strict=True))


@parametrize("name", UPDATES, keep={"bf16_sr", "bf16_remainder", "te_fp16_master"})
def test_an_optimizer_that_drops_its_gradients_stores_what_one_that_keeps_them_does(name: str) -> None:
    ours, optimizer = train(UPDATES[name])
    kept, other = train(UPDATES[name], drops=False)
    assert same(ours, kept)
    assert not any(torch.equal(p, q) for p, q in zip(ours, parameters(), strict=True)), "it trains"
    assert all(same(optimizer.states(p), other.states(q)) for p, q in zip(ours, kept, strict=True))


def test_after_each_step_weights_and_nested_states_are_rounded_once() -> None:
    """By hand: a plain step, whose weights and states torch casts to bfloat16."""
    ours, optimizer = train(Update(weight="bf16", states="bf16"))
    params = parameters()
    plain = Dropping(params)
    for p in params:
        p.data.copy_(p.detach().bfloat16())
    for seed in range(4):
        give_gradients(params, seed)
        plain.step()
        for x in [*(p.data for p in params), *(x for p in params for x in plain.states(p))]:
            x.copy_(x.bfloat16())
    assert same(ours, params)
    assert all(same(optimizer.states(p), plain.states(q)) for p, q in zip(ours, params, strict=True))


@parametrize("name", UPDATES, keep={"te_fp16_master"})
def test_a_parameter_without_a_gradient_stays_beside_one_whose_gradient_is_dropped(name: str) -> None:
    params = parameters()
    optimizer = Dropping(params)
    quantize_optimizer(optimizer, UPDATES[name])
    first, second = (p.detach().clone() for p in params)
    give_gradients(params[:1], 0)
    optimizer.step()
    assert not torch.equal(params[0], first)
    assert torch.equal(params[1], second)
    assert not optimizer.state[params[1]]


def test_what_a_step_writes_to_a_parameter_without_a_gradient_is_rounded() -> None:
    params = parameters()
    optimizer = Dropping(params, decays=0.1)
    quantize_optimizer(optimizer, Update(weight="bf16", master="fp16"))
    before = params[1].detach().clone()
    give_gradients(params[:1], 0)
    optimizer.step()
    master = (before.mul(1 - 0.1)).half().float()
    assert torch.equal(params[1].detach(), master.bfloat16().float())
    optimizer.step()
    assert torch.equal(params[1].detach(), master.mul(1 - 0.1).half().float().bfloat16().float())


@parametrize("name", [name for name in UPDATES if name != "in bf16"], keep={"bf16_sr"})
def test_gradients_that_only_the_closure_computes_and_the_step_drops(name: str) -> None:
    """A step with a closure is the step after it; another parameter, which has no gradient, is not rounded again."""
    results = []
    for has_closure in (True, False):
        p, idle = parameters()
        optimizer = Dropping([p, idle])
        quantize_optimizer(optimizer, UPDATES[name])
        given = idle.detach().clone()

        def closure(p: nn.Parameter = p) -> Tensor:
            loss = (p * 0.3).square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            if has_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        assert torch.equal(idle, given)
        results.append([p, *optimizer.states(p)])
    if name != "bf16_sr":  # what the closure sees is rounded with other random bits
        assert same(*results)
    assert torch.equal(results[0][0].detach().bfloat16().float(), results[0][0].detach()) or name == "int8 master"


def test_lbfgs_steps_only_what_its_closure_gives_a_gradient() -> None:
    moved, idle = parameters()
    optimizer = torch.optim.LBFGS([moved, idle], lr=0.1, max_iter=3)
    quantize_optimizer(optimizer, Update(weight="bf16", master="fp16", rounding={"weight": "stochastic"}))
    before, start = idle.detach().clone(), moved.detach().clone()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (moved * 0.3).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert torch.equal(moved.detach().bfloat16().float(), moved.detach())
    assert not torch.equal(moved.detach(), start)
    assert torch.equal(idle.detach(), before), "LBFGS adds zeros to it"


@parametrize("name", UPDATES, keep={"te_fp16_master"})
def test_an_optimizer_in_the_backward_pass_that_drops_its_gradients(name: str) -> None:
    """One optimizer for each parameter, whose step runs where its gradient has been accumulated."""
    results = []
    for is_inside in (True, False):
        params = parameters()
        optimizers = {p: Dropping([p]) for p in params}
        for p, optimizer in optimizers.items():
            quantize_optimizer(optimizer, UPDATES[name])
            if is_inside:
                p.register_post_accumulate_grad_hook(lambda p, o=optimizers: o[p].step())
        for _ in range(3):
            sum(((p + 0.3).square().sum() for p in params), torch.zeros(())).backward()
            for optimizer in optimizers.values() if not is_inside else ():
                optimizer.step()
        results.append(params)
    assert same(*results)
    assert not any(torch.equal(p, q) for p, q in zip(results[0], parameters(), strict=True)), "it trains"


# States a level deeper


def test_states_that_lie_deeper_are_rounded_as_those_that_do_not() -> None:
    for states in ("bf16", {"exp_avg": "e4m3fn per tensor", "squares": "fp16"}):
        update = Update(states=states)  # to nearest: random bits follow from the way to a state
        (ours, deep), (others, flat) = train(update), train(update, is_nested=False)
        assert same(ours, others)
        assert all(same(deep.states(p), flat.states(q)) for p, q in zip(ours, others, strict=True))


def test_the_bytes_of_states_that_lie_deeper_are_counted() -> None:
    tables = []
    for is_nested in (True, False):
        params = parameters()
        optimizer = Dropping(params, is_nested=is_nested)
        quantized = quantize_optimizer(optimizer, Update(weight="bf16", states="e4m3fn per tensor fp32"))
        give_gradients(params, 0)
        optimizer.step()
        tables.append([dict(row) for row in fpsim.summary(quantized)])
    assert tables[0] == tables[1]
    assert tables[0][-1]["states"] == 2 * (6 * 40 + 5)


def test_a_state_that_no_parameter_has_is_named_beside_integer_keys() -> None:
    params = parameters()
    optimizer = Dropping(params)
    quantize_optimizer(optimizer, Update(states={"exp_avg_sq": "bf16"}))
    give_gradients(params, 0)
    with pytest.raises(ValueError, match=r"exp_avg_sq.*Its states: exp_avg, squares"):
        optimizer.step()


def test_a_view_of_a_parameter_has_states_of_other_axes() -> None:
    """As HeavyBall's SOAP keeps them, (1, rows, columns); a factor in a list, of another size, stays float32."""
    p = nn.Parameter(torch.randn(4, 6))
    optimizer = torch.optim.SGD([p], lr=0.1)
    optimizer.state[p] = {0: {"exp_avg": torch.randn(1, 24), "Q": [torch.randn(4, 4), torch.randn(6, 6)]}}
    before = copy.deepcopy(optimizer.state[p][0])
    quantize_optimizer(optimizer, Update(states="bf16"))
    after = optimizer.state[p][0]
    assert torch.equal(after["exp_avg"], before["exp_avg"].bfloat16().float())
    assert same(after["Q"], before["Q"])


def test_a_run_resumes_with_states_that_lie_deeper() -> None:
    whole, _ = train("te_fp16_master", steps=5)
    params, optimizer = train("te_fp16_master", steps=3)
    saved = copy.deepcopy(optimizer.state_dict())
    later = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = Dropping(later)
    quantize_optimizer(resumed, "te_fp16_master")
    resumed.load_state_dict(saved)
    for seed in (3, 4):
        give_gradients(later, seed)
        resumed.step()
    assert same(later, whole)


def test_a_tool_that_tries_a_step_puts_deeper_states_back() -> None:
    model = nn.Linear(4, 3)
    optimizer = Dropping(model.parameters())
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

    def step() -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step()
    tensors = [x for p in model.parameters() for x in optimizer.states(p)]
    before = [x.clone() for x in tensors]
    fpsim.why(model, step, optimizer=optimizer)
    after = [x for p in model.parameters() for x in optimizer.states(p)]
    assert all(x is y for x, y in zip(tensors, after, strict=True))
    assert same(before, after)
