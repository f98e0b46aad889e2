"""NaN and infinities that were there before the step: in parameters, inputs, buffers, gradients and states."""

from __future__ import annotations

import math
from typing import Any

import torch
from planted_grid import (
    ALL,
    CAME_IN,
    EVERY,
    cause,
    first_floating,
)
from planted_models import LIBRARY, WIDTH, Planted
from planted_nets import (
    Net,
    net,
    reader,
)
from planted_steps import (
    Of,
    Step,
    around,
    case,
    in_training,
    labels,
    linear,
    mean_square,
    plant,
    seeded,
)
from torch import Tensor, nn
from torch.nn import functional as F

import fpsim

# Planted in each model and format


@cause("NaN came in", "{up}.weight", "parameter", EVERY, CAME_IN)
def nan_in_a_parameter(planted: Planted) -> None:
    planted.late = lambda p: first_floating(p).data.view(-1)[7].fill_(torch.nan)


@cause("inf came in", "{up}.weight", "parameter", EVERY, CAME_IN)
def inf_in_a_parameter(planted: Planted) -> None:
    planted.late = lambda p: first_floating(p).data.view(-1)[7].fill_(torch.inf)


@cause("-inf came in", "{up}.bias", "parameter", (*ALL, "bert"), ("float32", "half", "autocast", "fp16"))
def minus_inf_in_a_parameter(planted: Planted) -> None:
    planted.late = lambda p: p.part("up").bias.data[3].fill_(-torch.inf)


def embedded(planted: Planted) -> None:
    """Numbers in the place of words, as of an image in a model of language."""
    if not planted.x.is_floating_point():
        planted.x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1))


@cause("NaN came in", "x", "input", ("conv", "encoder", *LIBRARY), CAME_IN)
def nan_in_the_input(planted: Planted) -> None:
    embedded(planted)
    planted.late = lambda p: p.x.view(-1)[5].fill_(torch.nan)


@cause("inf came in", "x", "input", ("conv", "encoder", *LIBRARY), CAME_IN)
def inf_in_the_input(planted: Planted) -> None:
    embedded(planted)
    planted.late = lambda p: p.x.view(-1)[5].fill_(torch.inf)


@cause("NaN came in", "scales", "buffer", EVERY, CAME_IN)
def nan_in_a_buffer(planted: Planted) -> None:
    planted.late = lambda p: p.model.scales.view(-1)[5].fill_(torch.nan)


@cause("-inf came in", "{bn}.running_mean", "buffer", ("conv", "resnet"), ("float32", "half", "fp16"))
def minus_inf_in_running_mean(planted: Planted) -> None:
    def late(p: Planted) -> None:
        p.model.eval()
        p.part("bn").running_mean[2] = -torch.inf

    planted.late = late


@cause("inf came in", "{bn}.running_var", "buffer", ("conv", "resnet"), ("float32", "half", "fp16"))
def inf_in_running_var(planted: Planted) -> None:
    def late(p: Planted) -> None:
        p.model.eval()
        p.part("bn").running_var[2] = torch.inf

    planted.late = late


@cause("inf came in", "{up}.weight", "gradient", ("gpt", "conv", *LIBRARY), ("float32", "half", "autocast", "fp16"))
def inf_in_a_gradient(planted: Planted) -> None:
    def late(p: Planted) -> None:
        p.clears = False
        weight = first_floating(p)
        weight.grad = torch.zeros_like(weight)
        weight.grad.view(-1)[3] = torch.inf

    planted.late = late


@cause(
    "NaN came in",
    "{up}.weight exp_avg",
    "optimizer state",
    ("gpt", "conv", *LIBRARY),
    ("float32", "bfloat16", "autocast", "fp16"),
)
def nan_in_a_state(planted: Planted) -> None:
    def late(p: Planted) -> None:
        p.optimizer = torch.optim.Adam(p.model.parameters(), 1e-4)
        p.step()
        p.optimizer.step()
        p.optimizer.state[first_floating(p)]["exp_avg"].view(-1)[2] = torch.nan

    planted.late = late


# Whole steps


@case("NaN came in", "first.weight", "parameter", told="own")
def a_parameter_of_a_perceptron() -> Step:
    found = net("e5m2")
    found.model.get_parameter("first.weight").data[0, 0] = torch.nan
    return found


@case("inf came in", "cell.weight_hh", "parameter", told="own")
def a_parameter_of_a_cell() -> Step:
    model, ids = reader()
    model.get_parameter("cell.weight_hh").data[1, 1] = torch.inf
    return Step(model, lambda: model(ids).sum().backward())


@case("NaN came in", "words.weight", "parameter", told="own")
def a_row_of_an_embedding() -> Step:
    model, ids = reader(torch.bfloat16)
    model.get_parameter("words.weight").data[int(ids[0, 0])] = torch.nan
    return Step(model, lambda: model(ids).float().sum().backward())


@case(
    "NaN came in",
    "target",
    "input",
    told="own",
    missed="what is not an input of the model has no name, but the place that reads it",
)
def a_target_of_a_regression() -> Step:
    torch.manual_seed(0)
    model, x, target = Net(), torch.randn(4, 6), torch.zeros(4, 3)
    target[2, 1] = torch.nan
    return Step(model, lambda: F.mse_loss(model(x), target).backward())


@case("NaN came in", "x", "input", told="own")
def an_input_of_a_half_model() -> Step:
    torch.manual_seed(0)
    model, x = Net().half(), torch.randn(4, 6).half()
    x[3, 3] = torch.nan
    return Step(model, lambda: model(x).float().sum().backward())


@case("inf came in", "first.weight exp_avg_sq", "optimizer state", told="own")
def a_state_that_is_infinite() -> Step:
    planted = net()
    model, step = planted.model, planted.step
    optimizer = torch.optim.Adam(model.parameters())
    step()
    optimizer.step()
    optimizer.state[model.get_parameter("first.weight")]["exp_avg_sq"][0, 0] = torch.inf
    return Step(model, step, optimizer)


@case("NaN came in", "second.bias", "gradient", told="own")
def a_gradient_that_was_left() -> Step:
    planted = net(torch.float16)
    bias = planted.model.get_parameter("second.bias")
    bias.grad = torch.full_like(bias, torch.nan)
    return planted


@case("NaN came in", "1.running_mean", "buffer", told="own")
def statistics_that_are_no_numbers() -> Step:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    plain.get_buffer("1.running_mean")[0] = torch.nan
    model, x = fpsim.quantize(plain, "bf16"), torch.randn(8, 4)
    return Step(model, lambda: model(x).square().mean().backward())


@case("NaN came in", "input", "input", told="forum")
def nan_in_the_data() -> Step:
    x = seeded(4, 8)
    x[2, 3] = math.nan
    return plant(around(lambda m, x: x.tanh()), "autocast", x, mean_square)


@case("inf came in", "input", "input", told="forum")
def timestamps_cast_to_half() -> Step:
    x = seeded(4, 8)
    x[:, 0] = 1.7e9
    return plant(around(lambda m, x: x.tanh()), "half", x, mean_square)


@case("NaN came in", "0.weight", "parameter", told="forum")
def a_checkpoint_with_a_nan_row() -> Step:
    table = nn.Embedding(10, 8)
    table.weight.data[3] = math.nan
    model = nn.Sequential(table, linear(8, 4))
    return plant(model, "bf16", torch.tensor([[1, 3, 2]]), mean_square)


@case("NaN came in", "2.weight.*", "optimizer state", told="forum")
def a_resumed_adam_with_a_nan_state() -> Step:
    planted = plant(around(lambda m, x: x.relu()), "float32", seeded(4, 8), mean_square, torch.optim.Adam)
    planted.step()
    planted.optimizer.step()
    planted.optimizer.state[planted.model[2].weight]["exp_avg"][0, 0] = math.nan
    return planted


@case("inf came in", "0.weight.*", "gradient", told="forum")
def an_inf_left_in_grad() -> Step:
    """Gradients accumulate; the one before was inf and was not zeroed."""
    model = around(lambda m, x: x.relu())
    model(seeded(4, 8)).sum().backward()
    model[0].weight.grad[1, 1] = math.inf

    def step() -> Tensor:
        loss = mean_square(model(seeded(4, 8)))
        loss.backward()
        return loss

    return Step(model, step, torch.optim.SGD(model.parameters(), lr=0.1))


@case("NaN came in", "operand 2 of :sub", "input", told="unseen")
def labels_that_are_missing() -> Step:
    """NaN where nobody measured, left out after the square: its slope is 0 * NaN."""
    model = nn.Sequential(linear(6, 12), linear(12, 3)).bfloat16()
    x, y = seeded(8, 6).bfloat16(), seeded(8, 3).bfloat16()
    y[2, 1] = torch.nan
    return in_training(model, lambda: ((model(x) - y) ** 2)[~y.isnan()].float().mean())


@case("NaN came in", "input 2", "input", told="unseen")
def a_state_that_is_broken() -> Step:
    def forward(self: Any, x: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        return self.out(self.cells(x, state)[0][:, -1])

    torch.manual_seed(0)
    model = Of(forward, cells=nn.LSTM(4, 8, batch_first=True), out=linear(8, 3))
    state = torch.zeros(1, 3, 8)
    state[0, 1, 2] = torch.nan
    return in_training(
        model, lambda: F.cross_entropy(model(seeded(3, 5, 4), (state, torch.zeros(1, 3, 8))), labels(3, 3))
    )
