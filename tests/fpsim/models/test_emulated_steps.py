"""Steps of any optimizer, each operation rounded. The oracle: the same optimizer in torch's own bfloat16 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from processors import NEEDS_VECTORS
from test_format_steps import WHOLE, equal, give_gradients, pairs
from torch import Tensor, nn

import fpsim
from fpsim import Update, quantize_optimizer

OF_TORCH: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "weight_decay": 0.1, "lr_decay": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.7, "rho": 0.87, "weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.013, "centered": True, "momentum": 0.9, "alpha": 0.9}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.013, "betas": (0.87, 0.95)}),
    "NAdam": (
        torch.optim.NAdam,
        {"lr": 0.013, "betas": (0.87, 0.95), "decoupled_weight_decay": True, "weight_decay": 0.1},
    ),
    "RAdam": (torch.optim.RAdam, {"lr": 0.013, "betas": (0.6, 0.7)}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.013}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.013, "weight_decay": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.013, "weight_decay": 0.1}),
}


# ASGD multiplies by a float32 tensor of no axes there, which torch's kernel of `addcmul` casts to bfloat16 first;
# Adafactor takes its epsilon from the dtype of the list, which C++ reads.
NOT_AS_LIST = {"ASGD", "Adafactor"}
CASES = [(name, foreach) for name in OF_TORCH for foreach in (False, True) if not (foreach and name in NOT_AS_LIST)]
LION_RATE = 0.013


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023 (arXiv 2302.06675), as libraries write it."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                average, (beta1, beta2) = self.state[p]["exp_avg"], group["betas"]
                p.data.mul_(1 - group["lr"] * group["decay"])
                update = average.clone().mul_(beta1).add_(p.grad, alpha=1 - beta1).sign_()
                p.add_(update, alpha=-group["lr"])
                average.mul_(beta2).add_(p.grad, alpha=1 - beta2)


def hold(
    native: list[nn.Parameter], ours: list[nn.Parameter], a: torch.optim.Optimizer, b: torch.optim.Optimizer
) -> None:
    for step in range(6):
        give_gradients(native, ours, step)
        given = [q.grad for q in ours]
        a.step()
        b.step()
        assert all(q.grad is g for q, g in zip(ours, given, strict=True))
        for i, (p, q) in enumerate(zip(native, ours, strict=True)):
            assert equal(p, q), f"step {step}, parameter {i}"
            assert a.state[p].keys() == b.state[q].keys()
            for name, x in a.state[p].items():
                if isinstance(x, Tensor):
                    assert equal(x, b.state[q][name]), f"step {step}, {name} of parameter {i}"


@NEEDS_VECTORS
@pytest.mark.parametrize(("name", "foreach"), CASES, ids=[f"{name}{' foreach' * foreach}" for name, foreach in CASES])
def test_a_step_is_that_of_torchs_own_bfloat16(name: str, foreach: bool) -> None:
    kind, options = OF_TORCH[name]
    native, ours = pairs(shapes=WHOLE[:3] if name == "Adafactor" else WHOLE)  # which divides by the number of elements
    a, b = (kind(p, foreach=foreach, **options) for p in (native, ours))
    quantize_optimizer(b, Update(weight="bf16", arithmetic="torch"))
    hold(native, ours, a, b)


@NEEDS_VECTORS
def test_a_step_of_another_library_is_that_of_its_own_bfloat16() -> None:
    native, ours = pairs(shapes=WHOLE)
    a, b = Lion(native, LION_RATE), Lion(ours, LION_RATE)
    quantize_optimizer(b, Update(weight="bf16", arithmetic="torch"))
    hold(native, ours, a, b)


def test_a_run_that_goes_on_from_a_checkpoint_has_the_same_bits() -> None:
    def trained(stop: int | None) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        native, ours = pairs(shapes=WHOLE)
        optimizer = torch.optim.NAdam(ours, lr=0.013)
        quantize_optimizer(optimizer, Update(weight="bf16", arithmetic="format"))
        for step in range(8):
            if step == stop:
                state = optimizer.state_dict()
                optimizer = torch.optim.NAdam(ours, lr=0.013)
                quantize_optimizer(optimizer, Update(weight="bf16", arithmetic="format"))
                optimizer.load_state_dict(state)
            give_gradients(native, ours, step)
            optimizer.step()
        return ours, optimizer

    (whole, a), (stopped, b) = trained(None), trained(5)
    for p, q in zip(whole, stopped, strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(x, b.state[q][name]) for name, x in a.state[p].items())


def test_each_number_is_one_of_the_format_where_the_arithmetic_is() -> None:
    p = nn.Parameter(torch.ones(8))
    optimizer = torch.optim.RMSprop([p], lr=0.3, alpha=0.9, eps=1e-3)
    quantize_optimizer(optimizer, Update(weight="e4m3fn", arithmetic="format"))
    p.grad = torch.linspace(0.5, 4.0, 8)
    optimizer.step()
    r = {x: fpsim.round_to(torch.tensor(x), "e4m3fn").item() for x in (0.3, 0.1, 1e-3)}

    def q(x: Tensor) -> Tensor:
        return fpsim.round_to(x, "e4m3fn")

    g = q(torch.linspace(0.5, 4.0, 8))
    average = q(r[0.1] * g * g)  # `addcmul` is one operation, of zeros here
    root = q(q(average.sqrt()) + r[1e-3])
    assert torch.equal(optimizer.state[p]["square_avg"], average)
    assert torch.equal(p.detach(), q(1 - r[0.3] * (g / root)))


def test_nothing_is_left_behind_where_a_step_raises_and_what_is_lost_is_seen() -> None:
    p = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.RMSprop([p], lr=2.0**-14)
    quantized = quantize_optimizer(optimizer, Update(weight="bf16", arithmetic="torch"))
    lost = fpsim.lost_updates(quantized)
    p.grad = torch.ones(4)
    optimizer.step()
    assert lost.share == 1.0  # 2**-14 / 0.1 is less than half a spacing
    optimizer.param_groups[0]["eps"] = "no number"
    with pytest.raises(TypeError):
        optimizer.step()
    x = torch.full((3,), 1 / 3)
    assert torch.equal(x * 3, torch.ones(3))  # float32 again
    assert p.grad.tolist() == [1.0] * 4


def test_what_its_own_code_cannot_compute_is_refused() -> None:
    p, q = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    for update, words in (
        (Update(weight="bf16", arithmetic="torch", compensation="kahan"), "knows no compensation"),
        ([Update(weight="bf16", arithmetic="torch"), None], "Give all parameters one update"),
    ):
        optimizer = torch.optim.RMSprop([{"params": [p]}, {"params": [q]}])
        with pytest.raises(ValueError, match=words):
            quantize_optimizer(optimizer, update)
    optimizer = torch.optim.RMSprop([p])
    quantize_optimizer(optimizer, Update(weight="bf16", arithmetic="torch"))
    with pytest.raises(RuntimeError, match="got a closure"):
        optimizer.step(lambda: torch.tensor(0.0))
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.RMSprop(embedding.parameters())
    quantize_optimizer(optimizer, Update(weight="bf16", arithmetic="torch"))
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradient"):
        optimizer.step()


Step = Callable[[nn.Parameter, dict[str, Any], dict[str, Any]], object]


class Written(torch.optim.Optimizer):
    """An optimizer of one function of a parameter, its state and its group."""

    def __init__(self, params: Any, run: Step, lr: Any = 0.125) -> None:
        self.run = run
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.run(p, self.state[p], group)


def counts(p: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
    state["t"] = state.get("t", torch.full((1,), 256.0))
    state["t"] += 1  # 257 is no bfloat16


def keeps_float32(p: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
    assert p.grad is not None
    state["m"] = state.get("m", torch.zeros_like(p, dtype=torch.float32))
    state["m"].add_(p.grad.float() * 1e-3)


def averages_a_norm(p: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
    assert p.grad is not None
    norm = p.grad.norm()
    state["n"] = state.get("n", norm.clone())
    state["n"].mul_(0.9).add_(norm)


def reads_a_rate(p: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
    assert p.grad is not None
    state["rate"] = torch.tensor(float(group["lr"]))
    p.addcmul_(p.grad, p.grad, value=-float(group["lr"]))


def drops_its_gradient(p: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
    assert p.grad is not None
    p.sub_(p.grad * 0.125)
    p.grad = None


def writes_to_its_gradient(p: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
    assert p.grad is not None
    p.grad.clamp_(-0.125, 0.125)
    p.sub_(p.grad)


@pytest.mark.parametrize("shape", [(4,), ()], ids=str)
@pytest.mark.parametrize(
    "run", [counts, keeps_float32, averages_a_norm, reads_a_rate, drops_its_gradient, writes_to_its_gradient]
)
def test_what_a_step_keeps_has_the_dtype_that_it_was_made_in(run: Step, shape: tuple[int, ...]) -> None:
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        p = nn.Parameter(torch.ones(shape, dtype=dtype))
        rate = torch.tensor(0.013)
        optimizer = Written([p], run, rate)
        if dtype is torch.float32:
            quantize_optimizer(optimizer, Update(weight="bf16", arithmetic="torch"))
        for _ in range(5):
            if run is not drops_its_gradient or p.grad is None:
                p.grad = torch.full(shape, 1 / 3, dtype=torch.bfloat16).to(dtype)
            optimizer.step()
        found.append([p, *optimizer.state[p].values(), rate, *([] if p.grad is None else [p.grad])])
    native, ours = found
    assert len(native) == len(ours)
    assert all(equal(x, y) for x, y in zip(native, ours, strict=True))
    assert not hasattr(rate, "_fpsim")


def test_a_step_that_runs_the_step_of_its_base_is_one() -> None:
    class Decays(torch.optim.RMSprop):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            super().step()
            for p in self.param_groups[0]["params"]:
                p.mul_(1 - 0.013)

    torch.optim.RMSprop([nn.Parameter(torch.ones(1))])  # from here on torch calls hooks for the base's step, too
    native, ours = pairs(shapes=WHOLE)
    a, b = Decays(native, lr=0.013), Decays(ours, lr=0.013)
    quantized = quantize_optimizer(b, Update(weight="bf16", arithmetic="torch"))
    with fpsim.lost_updates(quantized) as lost:
        hold(native, ours, a, b)
    assert quantized.steps == 6
    assert len(lost.steps()) == 6


def test_a_step_that_runs_another_optimizer_is_emulated_whole(recwarn: pytest.WarningsRecorder) -> None:
    native, ours = pairs(shapes=WHOLE)
    found = []
    for parameters in (native, ours):
        inner = torch.optim.NAdam(parameters, lr=0.013)
        seen: list[nn.Parameter] = []

        def run(p: nn.Parameter, state: Any, group: Any, inner: Any = inner, seen: list[nn.Parameter] = seen) -> None:
            if not seen:
                inner.step()
            seen.append(p)
            p.mul_(0.99)

        found.append((Written(parameters, run), seen))
    b = found[1][0]
    quantize_optimizer(b, Update(weight="bf16", arithmetic="torch"))
    for step in range(4):
        give_gradients(native, ours, step)
        for optimizer, seen in found:
            seen.clear()
            with fpsim.emulate("fp16") if optimizer is b and step == 3 else nullcontext():
                optimizer.step()
    assert all(equal(p, q) for p, q in zip(native, ours, strict=True))
    assert not recwarn.list
