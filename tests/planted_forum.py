"""Forty failures as they are told in forums, with the answer written beside each before `why` was asked.

Written in one sitting from general knowledge, without a look at `fpsim/insight/reasons` or the other planted cases. An
answer is three patterns: `place` (a whole module or parameter), `role` and `kind` (in the first ten lines). Asked once:
39 of 40 were right. The one that was silent, `pure_bf16_at_a_small_learning_rate`, was mended. Two patterns got a word
that the text uses for the same thing ("activation" and "root of a negative number", "overflow").
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from planted_step import Of, Planted, around, attention, linear, mean_square, plant, seeded
from torch import Tensor, nn

INF = "inf|overflow|largest|beyond"
NAN = "NaN"
DIVISION = "divi|zero"
LOST = "lost|underflow|vanish|zero"
IDLE = "update|change|too small|lost|nothing"


# What came in


def nan_in_the_data() -> Planted:
    x = seeded(4, 8)
    x[2, 3] = math.nan
    return plant(around(lambda m, x: x.tanh()), "autocast", x, mean_square, "input.*|0.*", "input", NAN)


def timestamps_cast_to_half() -> Planted:
    x = seeded(4, 8)
    x[:, 0] = 1.7e9
    return plant(around(lambda m, x: x.tanh()), "half", x, mean_square, "input.*|0.*", "input", INF)


def a_checkpoint_with_a_nan_row() -> Planted:
    table = nn.Embedding(10, 8)
    table.weight.data[3] = math.nan
    model = nn.Sequential(table, linear(8, 4))
    return plant(model, "bf16", torch.tensor([[1, 3, 2]]), mean_square, "0.weight", "param|weight", NAN)


def the_std_of_a_constant_column() -> Planted:
    """Statistics of the data as buffers; one column never varied."""
    std = torch.ones(8)
    std[5] = 0
    normalise = Of(lambda m, x: (x - m.mean) / m.std, mean=torch.zeros(8), std=std)
    model = nn.Sequential(normalise, linear(8, 4))
    return plant(model, "fp16", seeded(4, 8), mean_square, "0", "result|output|activation", f"{DIVISION}|{INF}")


def a_resumed_adam_with_a_nan_state() -> Planted:
    planted = plant(
        around(lambda m, x: x.relu()),
        "float32",
        seeded(4, 8),
        mean_square,
        "2.weight.*",
        "state",
        NAN,
        torch.optim.Adam,
    )
    planted.step()
    planted.optimizer.step()
    planted.optimizer.state[planted.model[2].weight]["exp_avg"][0, 0] = math.nan
    return planted


def an_inf_left_in_grad() -> Planted:
    """Gradients accumulate; the one before was inf and was not zeroed."""
    model = around(lambda m, x: x.relu())
    model(seeded(4, 8)).sum().backward()
    model[0].weight.grad[1, 1] = math.inf

    def step() -> Tensor:
        loss = mean_square(model(seeded(4, 8)))
        loss.backward()
        return loss

    return Planted(model, step, "0.weight.*", "grad", INF, torch.optim.SGD(model.parameters(), lr=0.1))


# Attention


def scores_without_a_scale() -> Planted:
    model = attention(gain=90.0)
    return plant(model, "half", seeded(2, 6, 16), mean_square, "1", "result|output|activation", INF)


def a_row_that_may_see_nobody() -> Planted:
    mask = torch.zeros(6, 6)
    mask[4] = -math.inf
    model = attention(0.25, lambda s: s + mask.to(s.dtype))
    return plant(model, "autocast", seeded(2, 6, 16), mean_square, "1", "result|output|activation", NAN)


def one_minus_mask_times_a_large_number() -> Planted:
    """(1 - mask) * -1e9 in half: the number is -inf, and zero times it is NaN."""
    keep = torch.ones(6, 6).tril()
    fill = torch.tensor(-1e9)
    model = attention(0.25, lambda s: s + (1 - keep.to(s.dtype)) * fill.to(s.dtype))
    return plant(
        model, "half", seeded(2, 6, 16), mean_square, "1", "result|output|activation|operand|tensor", f"{NAN}|{INF}"
    )


def gumbel_of_an_underflowed_uniform() -> Planted:
    u = torch.rand(4, 8, generator=torch.Generator().manual_seed(0))
    u[1, 1] = 1e-9
    noise = lambda m, x: (x - torch.log(-torch.log(u.to(x.dtype)))).softmax(-1)
    model = around(noise)
    return plant(model, "half", seeded(4, 8), mean_square, "1", "result|output|activation", f"{INF}|log")


# Normalisation


def rms_norm_with_an_eps_that_half_has_not() -> Planted:
    norm = lambda m, x: x / (x.square().mean(-1, keepdim=True) + 1e-8).sqrt()
    x = seeded(4, 8)
    x[1] = 0
    return plant(around(norm), "half", x, mean_square, "1", "result|output|activation", f"{DIVISION}|{NAN}")


def the_square_of_a_norm_overflows() -> Planted:
    norm = lambda m, x: x / (x.square().sum(-1, keepdim=True) + 1e-3).sqrt()
    return plant(around(norm), "fp16", seeded(4, 8) * 300, mean_square, "1", "result|output|activation", INF)


def variance_as_a_difference_of_squares() -> Planted:
    """E[x^2] - E[x]^2 of a constant far from zero is negative after rounding; its root is NaN."""

    def norm(m: nn.Module, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (
            x.square().mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2
        ).sqrt()

    model = nn.Sequential(Of(norm), linear(8, 4))
    x = 37.3 + 0.01 * seeded(16, 8)
    return plant(model, "bf16", x, mean_square, "0", "result|output|activation", NAN)


def std_over_a_batch_of_one() -> Planted:
    norm = lambda m, x: (x - x.mean(0)) / (x.std(0) + 1e-5)
    return plant(around(norm), "autocast", seeded(1, 8), mean_square, "1", "result|output|activation", NAN)


def running_variance_beyond_half() -> Planted:
    norm = nn.BatchNorm1d(8)
    model = nn.Sequential(linear(8, 8, 2000.0), norm, linear(8, 4))
    return plant(model, "half", seeded(32, 8), mean_square, "1.running_var", "buffer", INF)


def weight_standardisation_of_a_zero_layer() -> Planted:
    layer = nn.Parameter(torch.zeros(8, 8))

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return x @ ((m.weight - m.weight.mean(1, keepdim=True)) / m.weight.std(1, keepdim=True))

    model = around(forward, weight=layer)
    return plant(
        model, "bfloat16", seeded(4, 8), mean_square, "1", "result|output|activation|weight", f"{DIVISION}|{NAN}"
    )


# Activations


def squared_relu_beyond_half() -> Planted:
    squared = lambda m, x: x.relu() ** 2
    return plant(around(squared), "half", seeded(4, 8) * 300, mean_square, "1", "result|output|activation", INF)


def sigmoid_by_hand() -> Planted:
    """1 / (1 + exp(-x)) at -12: the exponential is inf, its gradient NaN."""
    x = seeded(4, 8)
    x[0, 0] = -30
    model = nn.Sequential(
        Of(lambda m, x: 1 / (1 + torch.exp(-x * m.gate)), gate=nn.Parameter(torch.ones(8))), linear(8, 4)
    )
    return plant(model, "half", x, mean_square, "0", "result|output|activation", INF)


def softplus_as_log_of_exp() -> Planted:
    x = seeded(4, 8) * 16
    return plant(
        around(lambda m, x: torch.log(1 + torch.exp(x))), "fp16", x, mean_square, "1", "result|output|activation", INF
    )


def gated_product_overflows() -> Planted:
    gated = lambda m, x: m.wo(F.gelu(m.a(x)) * m.b(x))
    model = around(gated, a=linear(8, 16, 150.0), b=linear(8, 16, 300.0), wo=linear(16, 8))
    return plant(model, "autocast", seeded(4, 8) * 3, mean_square, "1", "result|output|activation", INF)


def a_residual_stream_that_grows() -> Planted:
    block = lambda: Of(lambda m, x: x + m.fc(x.relu()), fc=linear(8, 8, 6.0))
    model = nn.Sequential(*(block() for _ in range(12)))
    return plant(model, "half", seeded(4, 8), mean_square, r"\d+(\.fc)?", "result|output|activation", INF)


def recurrent_weights_above_one() -> Planted:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            state = (m.inside(x[:, t]) + m.again(state)).relu()
        return m.head(state)

    model = Of(forward, inside=linear(8, 8), again=linear(8, 8, 4.0), head=linear(8, 4))
    return plant(
        model, "fp16", seeded(4, 24, 8), mean_square, "again|model|\\(root\\)|self|", "result|output|activation", INF
    )


def generalised_mean_pooling() -> Planted:
    """x.clamp(1e-6)**3 underflows to zero; the cube root has an infinite gradient there."""
    pool = lambda m, x: x.clamp(min=1e-6).pow(3).mean(-1, keepdim=True).pow(1 / 3) * x
    model = around(pool)
    x = -seeded(4, 8).abs()
    with torch.no_grad():
        model[0].weight.abs_()
    return plant(
        model, "half", x, mean_square, "1", "grad|result|output|activation|error", f"{INF}|{NAN}|{DIVISION}|{LOST}"
    )


def sum_pooling_of_a_long_sequence() -> Planted:
    model = nn.Sequential(linear(8, 8), Of(lambda m, x: x.sum(1)), linear(8, 4))
    return plant(model, "half", 20 + seeded(2, 8192, 8), mean_square, "1", "result|output|activation", INF)


# Losses


def a_sigmoid_and_its_log() -> Planted:
    target = torch.zeros(4, 4)

    def loss(y: Tensor) -> Tensor:
        p = torch.sigmoid(y)
        return -(target * torch.log(p) + (1 - target) * torch.log(1 - p)).mean()

    x = seeded(4, 8) * 40
    return plant(
        nn.Sequential(linear(8, 4)), "half", x, loss, "loss.*|step.*|", "loss|result|output|step", f"{INF}|log|{NAN}"
    )


def log_of_a_softmax_that_underflows() -> Planted:
    target = torch.tensor([0, 1, 2, 3])
    loss = lambda y: -torch.log(y.softmax(-1))[torch.arange(4), target].mean()
    return plant(
        nn.Sequential(linear(8, 4, 40.0)),
        "half",
        seeded(4, 8),
        loss,
        "loss.*|step.*|",
        "loss|result|output|step",
        f"{INF}|log|{NAN}",
    )


def all_labels_ignored() -> Planted:
    target = torch.full((4,), -100)
    loss = lambda y: F.cross_entropy(y.float(), target)
    return plant(
        nn.Sequential(linear(8, 4)), "bfloat16", seeded(4, 8), loss, "loss.*|step.*|", "loss", f"{NAN}|{DIVISION}"
    )


def a_mean_over_a_mask_of_none() -> Planted:
    mask = torch.zeros(4)
    loss = lambda y: (y.square().mean(-1) * mask).sum() / mask.sum()
    return plant(nn.Sequential(linear(8, 4)), "fp16", seeded(4, 8), loss, "loss.*|step.*|", "loss", f"{NAN}|{DIVISION}")


def targets_that_were_not_normalised() -> Planted:
    target = torch.full((4, 4), 400.0)
    loss = lambda y: F.mse_loss(y, target.to(y.dtype))
    return plant(nn.Sequential(linear(8, 4)), "half", seeded(4, 8), loss, "loss.*|step.*|", "loss|result", INF)


def the_kl_of_a_variational_encoder() -> Planted:
    encoder = Of(lambda m, x: m.log_variance(x).exp(), log_variance=linear(8, 8, 20.0))
    return plant(
        nn.Sequential(linear(8, 8), encoder), "half", seeded(4, 8), mean_square, "1", "result|output|activation", INF
    )


def a_temperature_that_was_learned_too_far() -> Planted:
    """CLIP's logit_scale, which was not clamped: exp(12)."""
    clip = Of(lambda m, x: x * m.logit_scale.exp(), logit_scale=nn.Parameter(torch.tensor(12.0)))
    model = nn.Sequential(linear(8, 8), clip)
    return plant(
        model,
        "half",
        seeded(4, 8),
        lambda y: F.cross_entropy(y.float(), torch.arange(4)),
        "1",
        "result|output|activation",
        INF,
    )


def a_static_scale_that_the_loss_does_not_stand() -> Planted:
    target = seeded(4, 4, seed=1)
    loss = lambda y: (y - target.half()).square().mean() * 65536.0
    return plant(nn.Sequential(linear(8, 4)), "half", seeded(4, 8) * 2, loss, "loss.*|step.*|", "loss", INF)


def a_mean_over_no_selection() -> Planted:
    """A router sent no token to an expert, whose loss is the mean of nothing."""
    loss = lambda y: y[y > 1e4].mean() + y.square().mean()
    return plant(
        nn.Sequential(linear(8, 4)), "bf16", seeded(4, 8), loss, "loss.*|step.*|", "loss", f"{NAN}|{DIVISION}|empty"
    )


# Gradients


def the_root_of_a_zero_distance() -> Planted:
    """Finite forward; the gradient of a root at zero is inf, times zero NaN."""
    loss = lambda y: (y[0] - y[1]).square().sum().sqrt()
    x = seeded(1, 8).expand(2, 8).clone()
    return plant(
        nn.Sequential(linear(8, 4)),
        "autocast",
        x,
        loss,
        "loss.*|step.*|0|",
        "grad|error|loss",
        f"{NAN}|{INF}|{DIVISION}",
    )


def where_does_not_guard_a_root() -> Planted:
    guard = lambda m, x: torch.where(x > 0, x.sqrt(), torch.zeros_like(x))
    return plant(
        around(guard),
        "bf16",
        seeded(4, 8),
        mean_square,
        "1",
        "grad|error|result|activation",
        f"{NAN}|{INF}|log|{DIVISION}|root of a negative",
    )


def no_scaler_and_a_small_loss() -> Planted:
    """Native half: every gradient is below 2^-24."""
    loss = lambda y: (y.float() * 1e-5).square().mean()
    model = nn.Sequential(linear(8, 16), nn.Tanh(), linear(16, 4))
    return plant(model, "half", seeded(4, 8), loss, r"\d(\.(weight|bias))?|loss.*|model", "grad|error", LOST)


def a_learned_gate_of_a_millionth() -> Planted:
    block = Of(lambda m, x: x + m.gate * m.fc(x), gate=nn.Parameter(torch.tensor(2e-8)), fc=linear(8, 8))
    model = nn.Sequential(linear(8, 8), block, linear(8, 4))
    return plant(
        model,
        "e5m2",
        seeded(4, 8),
        mean_square,
        r"1(\.fc|\.gate)?(\.weight|\.bias)?",
        "grad|error|param|weight|operand|result",
        LOST,
    )


# The optimizer


def adam_in_half() -> Planted:
    """eps = 1e-8 is zero in half, and so is the square of a small gradient."""
    loss = lambda y: y.float().mean() * 1e-3
    adam = lambda parameters: torch.optim.Adam(parameters, lr=1e-3, foreach=False)
    return plant(
        nn.Sequential(linear(8, 4)),
        "half",
        seeded(4, 8),
        loss,
        r"0\.(weight|bias).*",
        "update",
        f"{NAN}|{INF}|{DIVISION}",
        adam,
    )


def pure_bf16_at_a_small_learning_rate() -> Planted:
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=1e-6)
    model = nn.Sequential(linear(8, 16), nn.Tanh(), linear(16, 4))
    return plant(model, "bfloat16", seeded(4, 8), mean_square, r".*", "update|step|optim", IDLE, sgd)


def activations_that_saturate_e4m3() -> Planted:
    """No inf in sight: 448 is where the format ends, and every larger number is 448."""
    model = nn.Sequential(linear(8, 16), linear(16, 16, 400.0), linear(16, 4))
    return plant(
        model, "e4m3fn", seeded(4, 8) * 8, mean_square, r"1", "result|output|activation", "saturat|largest|448"
    )


FORTY = tuple(
    case for case in dict(globals()).values() if getattr(case, "__annotations__", None) == {"return": "Planted"}
)
