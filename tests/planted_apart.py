"""Forty steps that were written after `why` and run once: what it names of causes that it was not built on.

The models, the operations and the words are others than those of `planted_cases.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fpsim

Step = tuple[nn.Module, Callable[[], object], dict[str, Any]]
APART: dict[str, tuple[Callable[[], Step], str, str, str]] = {}


def apart(place: str, role: str, kind: str) -> Callable[[Callable[[], Step]], None]:
    """Register a step, and what must be named."""

    def registered(make: Callable[[], Step]) -> None:
        APART[make.__name__] = make, place, role, kind

    return registered


class Net(nn.Module):
    """A perceptron with a function between its layers."""

    def __init__(self, function: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(6, 12), nn.Linear(12, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))  # type: ignore[no-any-return]


class Reader(nn.Module):
    """A recurrent network on tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.out = nn.Embedding(10, 8), nn.GRUCell(8, 8), nn.Linear(8, 10)

    def forward(self, ids: Tensor) -> Tensor:
        state = torch.zeros(len(ids), 8, dtype=self.words.weight.dtype)
        for i in range(ids.shape[1]):
            state = self.cell(self.words(ids[:, i]), state)
        return self.out(state)  # type: ignore[no-any-return]


def net(dtype: Any = None, function: Callable[[Tensor], Tensor] = F.silu, gain: float = 1.0) -> Step:
    torch.manual_seed(3)
    model: nn.Module = Net(function)
    x, y = torch.randn(5, 6), torch.randint(0, 3, (5,))
    if isinstance(dtype, torch.dtype):
        model, x = model.to(dtype), x.to(dtype)
    elif dtype is not None:
        model = fpsim.quantize(model, dtype)
    return model, lambda: (F.cross_entropy(model(x).float(), y) * gain).backward(), {}


def reader(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(4)
    return Reader().to(dtype), torch.randint(0, 10, (3, 5))


@apart(":sinh", "activation", "overflow")
def sinh_in_half() -> Step:
    return net(torch.float16, lambda x: (x * 0 + 12.5).sinh().reciprocal() + x)


@apart(":prod", "activation", "overflow")
def product_of_many_in_fp16() -> Step:
    return net("fp16", lambda x: x + (x.abs() + 4).prod(-1, keepdim=True) * 1e-6)


@apart(":expm1", "activation", "overflow")
def expm1_in_half() -> Step:
    return net(torch.float16, lambda x: (x * 0 + 11.5).expm1().log1p() + x)


@apart(":logsumexp", "activation", "logarithm of zero")
def log_of_an_empty_sum() -> Step:
    return net(None, lambda x: x + x[:, :0].logsumexp(-1, keepdim=True))


@apart(":rsqrt", "activation", "division by zero")
def rsqrt_of_zero() -> Step:
    return net(None, lambda x: x * (x * 0).square().mean(-1, keepdim=True).rsqrt())


@apart(":rsqrt", "activation", "division by zero")
def lost_eps_below_rsqrt() -> Step:
    return net(torch.float16, lambda x: x * ((x * 1e-5).square().mean(-1, keepdim=True) + 1e-9).rsqrt())


@apart(":log2", "activation", "logarithm of zero")
def log2_of_zero() -> Step:
    return net(None, lambda x: x + x.relu().log2())


@apart(":asin", "activation", "outside of its domain")
def asin_of_two() -> Step:
    return net(None, lambda x: (x * 0 + 2).asin())


@apart(":pow", "activation", "root of a negative number")
def fractional_power() -> Step:
    return net(None, lambda x: x**0.3)


@apart(":var", "activation", "variance of one number")
def variance_of_one() -> Step:
    return net("bf16", lambda x: x + x[:, :1].var(-1, keepdim=True))


@apart(":div", "activation", "division by zero")
def divided_by_its_own_maximum() -> Step:
    return net(torch.bfloat16, lambda x: x * 0 / (x * 0).amax(-1, keepdim=True))


@apart(":sub", "activation", "infinity minus infinity")
def infinity_minus_infinity() -> Step:
    def function(x: Tensor) -> Tensor:
        shut = torch.full_like(x, torch.inf)
        return x + (shut - shut)

    return net(None, function)


@apart(":log_softmax", "activation", "row masked wholly")
def everything_is_masked_before_log_softmax() -> Step:
    return net(None, lambda x: x.masked_fill(torch.ones_like(x, dtype=torch.bool), -torch.inf).log_softmax(-1))


@apart(":linalg_vector_norm", "error", "infinite slope")
def slope_of_a_norm_of_zeros() -> Step:
    return net(None, lambda x: x + torch.linalg.vector_norm(x * 0, ord=2, dim=-1, keepdim=True).sqrt())


@apart(":pow", "error", "infinite slope")
def slope_of_a_power() -> Step:
    return net(None, lambda x: x + (x - x.amin(-1, keepdim=True)) ** 0.5)


@apart("first.weight", "parameter", "NaN came in")
def a_parameter_of_a_perceptron() -> Step:
    found = net("e5m2")
    found[0].get_parameter("first.weight").data[0, 0] = torch.nan
    return found


@apart("cell.weight_hh", "parameter", "inf came in")
def a_parameter_of_a_cell() -> Step:
    model, ids = reader()
    model.get_parameter("cell.weight_hh").data[1, 1] = torch.inf
    return model, lambda: model(ids).sum().backward(), {}


@apart("words.weight", "parameter", "NaN came in")
def a_row_of_an_embedding() -> Step:
    model, ids = reader(torch.bfloat16)
    model.get_parameter("words.weight").data[int(ids[0, 0])] = torch.nan
    return model, lambda: model(ids).float().sum().backward(), {}


@apart("target", "input", "NaN came in")
def a_target_of_a_regression() -> Step:
    torch.manual_seed(0)
    model, x, target = Net(), torch.randn(4, 6), torch.zeros(4, 3)
    target[2, 1] = torch.nan
    return model, lambda: F.mse_loss(model(x), target).backward(), {}


@apart("x", "input", "NaN came in")
def an_input_of_a_half_model() -> Step:
    torch.manual_seed(0)
    model, x = Net().half(), torch.randn(4, 6).half()
    x[3, 3] = torch.nan
    return model, lambda: model(x).float().sum().backward(), {}


@apart(":half", "activation", "overflow")
def an_input_that_half_does_not_hold() -> Step:
    torch.manual_seed(0)
    model, x = Net().half(), torch.full((2, 6), 1e5)
    return model, lambda: model(x.half()).float().sum().backward(), {}


@apart("first.weight", "weight", "overflow")
def a_weight_that_e5m2_does_not_hold() -> Step:
    torch.manual_seed(0)
    plain = Net()
    plain.first.weight.data[0, 0] = 3e5
    model, x = fpsim.quantize(plain, "e5m2"), torch.ones(2, 6)
    return model, lambda: model(x).sum().backward(), {}


@apart("first:linear", "activation", "overflow")
def a_layer_that_overflows_under_autocast() -> Step:
    torch.manual_seed(0)
    model, x = Net(), torch.ones(2, 6)
    model.first.weight.data.fill_(3e4)

    def step() -> None:
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        out.float().sum().backward()

    return model, step, {}


@apart("first:linear", "activation", "saturation")
def a_layer_that_saturates() -> Step:
    torch.manual_seed(0)
    plain = Net()
    plain.first.weight.data.fill_(200.0)
    model, x = fpsim.quantize(plain, "e4m3fn"), torch.full((2, 6), 4.0)
    return model, lambda: model(x).sum().backward(), {}


@apart("first:linear", "error", "gradient lost")
def a_gradient_lost_below_a_small_factor() -> Step:
    return net("e5m2", lambda x: torch.ones_like(x) + x * 1e-7)


@apart("second:linear", "error", "gradient lost")
def a_loss_of_a_small_size() -> Step:
    return net(torch.float16, gain=1e-9)


@apart("second:linear", "error", "overflow")
def a_loss_of_a_large_size() -> Step:
    return net(torch.float16, gain=1e7)


@apart(":mul", "activation", "underflow")
def a_result_that_underflows() -> Step:
    return net(torch.float16, lambda x: x + (x.detach() * 1e-8) * 1e8)


@apart(":sub", "activation", "cancellation")
def a_mean_that_is_large() -> Step:
    def function(x: Tensor) -> Tensor:
        y = x + 2000.0
        return y - y.mean(-1, keepdim=True)

    return net(torch.bfloat16, function)


@apart("", "update", "update lost")
def a_small_rate_with_momentum() -> Step:
    model, step, _ = net(torch.bfloat16)
    return model, step, {"optimizer": torch.optim.SGD(model.parameters(), 1e-7, momentum=0.9)}


@apart("", "update", "division by zero")
def rmsprop_in_half() -> Step:
    model, step, _ = net(torch.float16, gain=1e-3)
    return model, step, {"optimizer": torch.optim.RMSprop(model.parameters(), 1e-3)}


@apart("", "update", "division by zero")
def adamw_steps_inside_of_the_step() -> Step:
    model, step, _ = net(torch.float16, gain=1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def both() -> None:
        optimizer.zero_grad()
        step()
        optimizer.step()

    return model, both, {}


@apart("first.weight exp_avg_sq", "optimizer state", "inf came in")
def a_state_that_is_infinite() -> Step:
    model, step, _ = net()
    optimizer = torch.optim.Adam(model.parameters())
    step()
    optimizer.step()
    optimizer.state[model.get_parameter("first.weight")]["exp_avg_sq"][0, 0] = torch.inf
    return model, step, {"optimizer": optimizer}


@apart("second.bias", "gradient", "NaN came in")
def a_gradient_that_was_left() -> Step:
    model, step, _ = net(torch.float16)
    bias = model.get_parameter("second.bias")
    bias.grad = torch.full_like(bias, torch.nan)
    return model, step, {}


@apart("second.bias", "gradient", "overflow")
def a_sum_over_batches() -> Step:
    torch.manual_seed(0)
    model, x = Net().half(), torch.ones(1, 6).half()

    def step() -> None:
        model.zero_grad()
        for _ in range(3):
            (model(x).float().sum() * 3e4).backward()

    return model, step, {}


@apart(":nll_loss", "activation", "mean of nothing")
def no_target_is_left() -> Step:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 6)
    return model, lambda: F.nll_loss(model(x).log_softmax(-1), torch.full((4,), -100)).backward(), {}


@apart(":div", "activation", "division by zero")
def a_mean_over_no_tokens() -> Step:
    model, ids = reader()
    return model, lambda: (model(ids).sum() * 0 / (ids > 50).sum()).backward(), {}


@apart(":mean", "activation", "mean of nothing")
def a_mean_over_a_selection() -> Step:
    model, ids = reader(torch.bfloat16)
    return model, lambda: model(ids)[ids[:, 0] > 50].float().mean().backward(), {}


@apart("2.running_var", "buffer", "overflow")
def statistics_that_overflow() -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.BatchNorm1d(4), nn.Linear(4, 2)).half()
    x = torch.randn(8, 4).half() * 3e3
    return model, lambda: model(x).float().square().mean().backward(), {}


@apart("1.running_mean", "buffer", "NaN came in")
def statistics_that_are_no_numbers() -> Step:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    plain.get_buffer("1.running_mean")[0] = torch.nan
    model, x = fpsim.quantize(plain, "bf16"), torch.randn(8, 4)
    return model, lambda: model(x).square().mean().backward(), {}
