"""What is lost little by little, or before the place where it shows; each case can be built in float64, to compare."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from planted_steps import Of, Step, case, in_training, labels, linear, seeded
from torch import Tensor, nn
from torch.nn import functional as F

import fpsim

MADE: dict[str, tuple[Callable[[str], Step], str]] = {}  # what makes a step by name, and the format it fails in
Make = Callable[[str], Step]


def made(kind: str, place: str, fmt: str, role: str = "activation") -> Callable[[Make], Make]:
    """Register a step that fails in a format, and is made in float64 to be compared with."""

    def registered(make: Make) -> Make:
        build = partial(make, fmt)
        build.__name__ = make.__name__  # type: ignore[attr-defined]
        case(kind, place, role, told="own")(build)
        MADE[make.__name__] = make, fmt
        return make

    return registered


def of_module(module: nn.Module, fmt: str) -> nn.Module:
    """The module in a format; "float64" holds the numbers that it has in a dtype of fewer bits."""
    if fmt == "float64":
        return module.double()
    if fmt in ("float32", "half", "bfloat16", "autocast"):
        return module.float() if fmt == "autocast" else module.to(getattr(torch, fmt))
    gradients = fpsim.Policy(error=fmt, weight_grad=fmt)
    return fpsim.quantize(module, gradients if fmt in ("e5m2", "e4m3fn") else fmt)


def stepped(
    module: nn.Module, fmt: str, x: Tensor, loss: Callable[[Tensor], Tensor], low: str = "", scaler: Any = None
) -> Step:
    """low: the dtype that numbers are rounded to before float64 has them."""
    if fmt == "float64" and low:
        module.to(getattr(torch, low))
    model = of_module(module, fmt)
    dtype = next(model.parameters()).dtype
    x = x.to(getattr(torch, low or "float32")).to(dtype) if x.is_floating_point() else x

    def step() -> Tensor:
        model.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=fmt == "autocast"):
            out = model(x)
        value = loss(out if out.dtype is torch.float64 else out.float())
        (value if scaler is None or fmt == "float64" else scaler.scale(value)).backward()
        return value

    return Step(model, step, scaler=scaler)


def entropy(y: Tensor) -> Tensor:
    """Two in three are of class 0, so that the gradients of biases are no sums that cancel."""
    return F.cross_entropy(y, labels(len(y), 3) % 2)


# Gradients that underflow little by little


def deep(depth: int, gain: float) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (linear(16, 16, gain), nn.Tanh())]
    return nn.Sequential(linear(8, 16), nn.Tanh(), *layers, linear(16, 4))


@made("gradient lost", r"\d+\.weight", "e5m2", "error|weight_grad")
def a_deep_network_in_e5m2(fmt: str) -> Step:
    return stepped(deep(10, 0.35), fmt, seeded(64, 8), entropy)


@made("gradient lost", r"\d+:(linear|tanh)", "half", "error|weight_grad")
def a_deep_network_in_half(fmt: str) -> Step:
    return stepped(deep(12, 0.3), fmt, seeded(64, 8), entropy, "float16")


def recurrent(steps: int, gain: float) -> nn.Module:
    """What it must remember came in at the first step."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.enter(x)
        for _ in range(steps):
            h = torch.tanh(self.cell(h))
        return self.out(h)  # type: ignore[no-any-return]

    return Of(forward, enter=linear(8, 16), cell=linear(16, 16, gain), out=linear(16, 4))


@made("gradient lost", r"(:tanh|cell:linear|encoder\.1:tanh).*", "half", "error|weight_grad")
def a_recurrence_in_half(fmt: str) -> Step:
    return stepped(recurrent(12, 0.3), fmt, seeded(64, 8), entropy, "float16")


@made("gradient lost", r"(:tanh|cell:linear|encoder\.1:tanh).*", "autocast", "error|weight_grad")
def a_recurrence_under_autocast(fmt: str) -> Step:
    return stepped(recurrent(12, 0.3), fmt, seeded(64, 8), entropy)


@made("gradient lost", r"(:tanh|cell:linear|encoder\.1:tanh).*", "autocast", "error|weight_grad")
def a_recurrence_whose_scaler_begins_too_low(fmt: str) -> Step:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    return stepped(recurrent(12, 0.3), fmt, seeded(64, 8), entropy, scaler=scaler)


@made("gradient lost", r"(:tanh|cell:linear|encoder\.1:tanh).*", "half", "error|weight_grad")
def a_reversed_gradient_in_half(fmt: str) -> Step:
    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return -1e-6 * gradient

    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.encoder(x)
        return torch.cat([self.task(h.detach()), self.domain(Reversed.apply(h))], -1)

    encoder = nn.Sequential(linear(8, 16), nn.Tanh())
    return stepped(
        Of(forward, encoder=encoder, task=linear(16, 4), domain=linear(16, 4)), fmt, seeded(64, 8), entropy, "float16"
    )


def branch(gain: float) -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x + self.gain * self.inner(x)  # type: ignore[no-any-return]

    inner = nn.Sequential(linear(16, 16), nn.GELU(), linear(16, 16))
    inside = Of(forward, gain=nn.Parameter(torch.full((16,), gain)), inner=inner)
    return nn.Sequential(linear(8, 16), inside, linear(16, 4))


@made("gradient lost", r"1\.inner\..*", "half", "error|weight_grad")
def a_layer_scale_in_half(fmt: str) -> Step:
    return stepped(branch(1e-7), fmt, seeded(32, 8), entropy, "float16")


@made("gradient lost", ".*", "e4m3fn", "error|weight_grad")
def a_temperature_in_e4m3(fmt: str) -> Step:
    model = nn.Sequential(linear(8, 16), nn.Tanh(), linear(16, 16), nn.Tanh(), linear(16, 4))
    return stepped(model, fmt, seeded(64, 8), lambda y: entropy(y / 50))


@made("gradient lost", ".*", "half", "error|weight_grad")
def no_scale_and_sigmoids_in_half(fmt: str) -> Step:
    model = nn.Sequential(linear(8, 16), nn.Tanh(), linear(16, 16), nn.Sigmoid(), linear(16, 4, 0.1))
    return stepped(model, fmt, seeded(64, 8), lambda y: (y * 1e-3).square().mean(), "float16")


# Numbers that were lost before the place


@made("cancellation", ":sub", "bfloat16")
def a_difference_of_large_outputs(fmt: str) -> Step:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.out(x) - 1000  # type: ignore[no-any-return]

    out = linear(8, 2)
    out.bias.data.fill_(1000.0)
    return stepped(Of(forward, out=out), fmt, seeded(16, 8), lambda y: (y - 0.1).square().mean(), "bfloat16")


def positions() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        places = torch.arange(len(x)).to(x.dtype)
        return self.out(self.enter(x) + torch.sin(places[:, None] * self.rate))  # type: ignore[no-any-return]

    rate = torch.linspace(0.5, 1.5, 8).bfloat16().float()
    return Of(forward, enter=linear(8, 8), out=linear(8, 4), rate=rate)


@made("error grows", ":sin", "bfloat16")
def a_sine_of_long_positions(fmt: str) -> Step:
    return stepped(positions(), fmt, seeded(600, 8), entropy, "bfloat16")


@made("error grows", "1:sin", "bfloat16")
def a_network_of_sines(fmt: str) -> Step:
    model = nn.Sequential(linear(2, 32), Of(lambda self, x: torch.sin(300 * x)), linear(32, 1))
    y = seeded(64, 1, seed=3)
    return stepped(model, fmt, seeded(64, 2), lambda out: (out - y.to(out.dtype)).square().mean(), "bfloat16")


@made("integers lost", ":cumsum", "bfloat16")
def positions_that_are_counted_in_bfloat16(fmt: str) -> Step:
    def forward(self: Any, x: Tensor) -> Tensor:
        places = torch.ones(len(x), dtype=x.dtype).cumsum(0) - 1
        return self.out(self.table(places.long().clamp(max=599)) * x)  # type: ignore[no-any-return]

    model = Of(forward, table=nn.Embedding(600, 8), out=linear(8, 4))
    model.table.weight.data.copy_(seeded(600, 8, seed=2))  # type: ignore[union-attr, operator]
    return stepped(model, fmt, seeded(600, 8), entropy, "bfloat16")


@made("division by zero", "1:rsqrt", "bfloat16")
def a_variance_in_one_pass(fmt: str) -> Step:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = x + 30.0
        mean = x.mean(-1, keepdim=True)
        return (x - mean) * torch.rsqrt(((x * x).mean(-1, keepdim=True) - mean**2).clamp(min=0))

    model = nn.Sequential(linear(8, 16), Of(forward), linear(16, 4))
    return stepped(model, fmt, seeded(16, 8), entropy, "bfloat16")


@made("logarithm of zero", ":log", "half")
def a_critic_that_is_sure_in_half(fmt: str) -> Step:
    model = nn.Sequential(linear(4, 16), nn.ReLU(), linear(16, 1), nn.Sigmoid())
    model[2].bias.data.fill_(12.0)
    return stepped(
        Of(lambda self, x: torch.log(1 - self.body(x)), body=model), fmt, seeded(8, 4), Tensor.mean, "float16"
    )


@made("logarithm of zero", ":log", "float32")
def a_chain_of_probabilities(fmt: str) -> Step:
    def forward(self: Any, x: Tensor) -> Tensor:
        seen = self.emit(x).softmax(-1) * 1e-3
        alpha = seen[0]
        for now in seen[1:]:
            alpha = (alpha @ self.turn.softmax(-1)) * now
        return -alpha.sum().log()

    return stepped(Of(forward, emit=linear(6, 4), turn=nn.Parameter(seeded(4, 4))), fmt, seeded(20, 6), Tensor.sum)


@made("logarithm of zero", ":log", "float32")
def a_product_of_survivals(fmt: str) -> Step:
    model = nn.Sequential(linear(6, 8), nn.Tanh(), linear(8, 64))
    forward = lambda self, x: -torch.sigmoid(self.body(x) - 4).prod(-1).log()
    return stepped(Of(forward, body=model), fmt, seeded(4, 6), Tensor.mean)


@made("logarithm of zero", ":log", "float32")
def a_critic_that_is_sure(fmt: str) -> Step:
    """1 - D is 0 in float64 too: of what makes it finite nothing trains."""
    model = nn.Sequential(linear(4, 16), nn.ReLU(), linear(16, 1), nn.Sigmoid())
    model[2].bias.data.fill_(50.0)
    return stepped(Of(lambda self, x: torch.log(1 - self.body(x)), body=model), fmt, seeded(8, 4), Tensor.mean)


def lab_step(fmt: str = "e4m3fn") -> Step:
    """The lab's own network of ten layers without norms."""
    from ada_loss.lab.tasks import deep_digits

    task = deep_digits(5)
    x, y = (part[:64] for part in task.train)
    model = fpsim.quantize(task.model, fpsim.Policy(error=fmt, weight_grad=fmt))
    return in_training(model, lambda: task.loss(model(x), y))
