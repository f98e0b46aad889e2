"""Numbers that stay finite, of which a narrow format keeps too little: underflow, cancellation, saturation."""

from __future__ import annotations

from typing import Any

import torch
from planted_grid import (
    ALL,
    EVERY,
    at_point,
    cause,
    first_floating,
)
from planted_models import Planted, llama_of, parts_of
from planted_nets import (
    Net,
    net,
)
from planted_steps import (
    Of,
    Step,
    case,
    in_training,
    labels,
    linear,
    mean_square,
    plant,
    seeded,
    step_of,
)
from torch import Tensor, nn
from torch.nn import functional as F

import fpsim

# Planted in each model and format


@at_point("underflow", "mul", ALL, ("half", "fp16", "e5m2"))
def product_underflows(x: Tensor) -> Tensor:
    return x.detach() * 1e-9 * 1e9 + x


@at_point("cancellation", "sub", ALL, ("half", "bfloat16", "fp16", "bf16"))
def difference_of_large_numbers(x: Tensor) -> Tensor:
    return (x * 0.01 + 4096.0) - 4096.0 + x * 1e-3


@cause("saturation", "{down}:", "activation", EVERY, ("e4m3fn",))
def result_saturates(planted: Planted) -> None:
    with torch.no_grad():
        if planted.part("up").bias is None:
            for name, weight in planted.model.named_parameters():  # as of a trained one: a random Llama is lost below
                weight.mul_(8 if "proj" in name else 1)
            planted.part("up").weight.mul_(30 if planted.name == "llama" else 1)
            planted.part("down").weight.mul_(100 if planted.name == "llama" else 1e4)
            return
        planted.part("up").bias.fill_(5)
        planted.part("down").weight.mul_(1e3 if planted.name in ALL else 1e4)


@cause("error grows", "{up}:", "activation", EVERY, ("bf16",))
def one_layer_too_narrow(planted: Planted) -> None:
    with torch.no_grad():
        first_floating(planted).mul_({"bert": 20, "llama": 20, "resnet": 6}.get(planted.name, 2))
    fmt = "bf16"
    planted.policy = fpsim.Policy(
        fmt, fmt, fmt, fmt, overrides={parts_of(planted.name)["up"]: fpsim.Policy("e2m1fn", "e2m1fn", fmt, fmt)}
    )


# Whole steps


@case("saturation", "first:linear", told="own")
def a_layer_that_saturates() -> Step:
    torch.manual_seed(0)
    plain = Net()
    plain.first.weight.data.fill_(200.0)
    model, x = fpsim.quantize(plain, "e4m3fn"), torch.full((2, 6), 4.0)
    return Step(model, lambda: model(x).sum().backward())


@case("underflow", ":mul", told="own")
def a_result_that_underflows() -> Step:
    return net(torch.float16, lambda x: x + (x.detach() * 1e-8) * 1e8)


@case("cancellation", ":sub", told="own")
def a_mean_that_is_large() -> Step:
    def function(x: Tensor) -> Tensor:
        y = x + 2000.0
        return y - y.mean(-1, keepdim=True)

    return net(torch.bfloat16, function)


@case("underflow", r"1\.gate", "weight", told="forum")
def a_learned_gate_of_a_millionth() -> Step:
    block = Of(lambda m, x: x + m.gate * m.fc(x), gate=nn.Parameter(torch.tensor(2e-8)), fc=linear(8, 8))
    model = nn.Sequential(linear(8, 8), block, linear(8, 4))
    return plant(model, "e5m2", seeded(4, 8), mean_square)


@case("saturation", "1", told="forum")
def activations_that_saturate_e4m3() -> Step:
    """No inf in sight: 448 is where the format ends, and every larger number is 448."""
    model = nn.Sequential(linear(8, 16), linear(16, 16, 400.0), linear(16, 4))
    return plant(model, "e4m3fn", seeded(4, 8) * 8, mean_square)


@case("saturation", r"model\.layers\.1\.mlp(\.down_proj)?", told="post")
def an_outlier_in_eight_bits() -> Step:
    plain = llama_of(32, initializer_range=0.1)
    with torch.no_grad():
        for layer in (plain.model.layers[1].mlp.up_proj, plain.model.layers[1].mlp.gate_proj):
            layer.weight[5] *= 60
    model = fpsim.quantize(plain, fpsim.Policy("e4m3fn", "e4m3fn", "e5m2", "e5m2"))
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    step = step_of(model, lambda: model(input_ids=ids, labels=ids).loss * 1024)
    return Step(model, step)


@case("underflow", "0:linear", "fprop.x", told="own")
def a_scale_of_the_past_after_a_spike() -> Step:
    """All of what comes in is below the least number at the scale that follows from the step before."""
    plain = nn.Sequential(linear(8, 4))
    model, x = fpsim.quantize(plain, fpsim.recipe("fp8_delayed", plain)), torch.ones(4, 8)
    model(x * 1e6).sum().backward()
    return in_training(model, lambda: model(x).square().sum())


@case("gradient lost", r"2\.weight", "weight_grad", told="own")
def a_scale_of_the_past_after_a_spike_of_gradients() -> Step:
    plain = nn.Sequential(linear(8, 8), nn.Tanh(), linear(8, 4))
    model, x = fpsim.quantize(plain, fpsim.recipe("fp8_delayed", plain)), seeded(4, 8)
    (model(x).square().sum() * 1e12).backward()
    return in_training(model, lambda: model(x).square().sum())


@case("underflow", "branch.gamma", "weight", told="unseen")
def a_layer_scale_that_e5m2_does_not_hold() -> Step:
    def scaled(self: Any, x: Tensor) -> Tensor:
        return x + self.gamma * self.mlp(x)

    mlp = nn.Sequential(linear(8, 16), nn.GELU(), linear(16, 8))
    plain = nn.Sequential()
    plain.add_module("stem", linear(6, 8))
    plain.add_module("branch", Of(scaled, mlp=mlp, gamma=nn.Parameter(torch.full((8,), 1e-6))))
    plain.add_module("head", linear(8, 3))
    model, x = fpsim.quantize(plain, "e5m2"), seeded(5, 6)
    return in_training(model, lambda: F.cross_entropy(model(x), labels(5, 3)) * 64)


@case("saturation", "act:square", told="unseen")
def a_squared_rectifier_in_eight_bits() -> Step:
    plain = nn.Sequential()
    plain.add_module("up", linear(8, 32, 20.0))
    plain.add_module("act", Of(lambda self, x: x.relu().square()))
    plain.add_module("down", linear(32, 4, 0.1))
    model, x = fpsim.quantize(plain, "e4m3fn"), seeded(16, 8)
    return in_training(model, lambda: F.cross_entropy(model(x), labels(16, 4)) * 64)
