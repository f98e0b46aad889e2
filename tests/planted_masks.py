"""Infinities that were put in: rows that are masked wholly, products with zero, and masks that leak."""

from __future__ import annotations

import math
from typing import Any

import torch
from planted_grid import (
    ALL,
    ANY,
    ATTENDING,
    at_point,
    cause,
)
from planted_models import Planted
from planted_nets import (
    LEGAL,
    Agent,
    net,
)
from planted_steps import (
    Of,
    Step,
    attention,
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


@at_point("zero times infinity", "mul", ALL, ANY)
def zero_times_infinity(x: Tensor) -> Tensor:
    shut = torch.zeros(x.shape[-1], dtype=x.dtype)
    shut[-1] = 1
    return x + (shut * torch.full_like(shut, -torch.inf)).exp()


@at_point("row masked wholly", "softmax", ALL, ANY)
def a_row_is_masked_wholly(x: Tensor) -> Tensor:
    shut = torch.zeros(x.shape, dtype=torch.bool)
    shut[0, 0] = True
    return x + x.masked_fill(shut, -torch.inf).softmax(-1)


@cause("mask leaks", "blocks.0.attention:softmax", "activation", ATTENDING, ("e2m3fn",))
def mask_leaks(planted: Planted) -> None:
    fmt = "e2m3fn"
    planted.policy = fpsim.Policy(fmt, fmt, fmt, fmt, float32=("softmax",))
    for block in planted.model.blocks:
        block.attention.fill = -1e4


# Whole steps


@case("infinity minus infinity", ":sub", told="own")
def infinity_minus_infinity() -> Step:
    def function(x: Tensor) -> Tensor:
        shut = torch.full_like(x, torch.inf)
        return x + (shut - shut)

    return net(None, function)


@case("row masked wholly", ":log_softmax", told="own")
def everything_is_masked_before_log_softmax() -> Step:
    return net(None, lambda x: x.masked_fill(torch.ones_like(x, dtype=torch.bool), -torch.inf).log_softmax(-1))


@case("row masked wholly", "1", told="forum")
def a_row_that_may_see_nobody() -> Step:
    mask = torch.zeros(6, 6)
    mask[4] = -math.inf
    model = attention(0.25, lambda s: s + mask.to(s.dtype))
    return plant(model, "autocast", seeded(2, 6, 16), mean_square)


@case("zero times infinity", "", told="loop")
def a_game_that_is_over() -> Step:
    """Nothing is legal in a last state: its best value is -inf, and (1 - done) * -inf is NaN."""
    model = Agent()
    optimizer, seen, after = torch.optim.Adam(model.parameters(), 1e-3), seeded(4, 6), seeded(4, 6, seed=1)
    done, reward = torch.tensor([0.0, 0.0, 1.0, 0.0]), torch.ones(4)

    def loss() -> Tensor:
        best = model(after).masked_fill(~LEGAL, -torch.inf).max(-1).values.detach()
        target = reward + 0.99 * (1 - done) * best
        return F.smooth_l1_loss(model(seen)[:, 0], target)

    return Step(model, step_of(model, loss, optimizer))


@case("zero times infinity", "", told="loop")
def an_entropy_of_what_is_not_legal() -> Step:
    model = fpsim.quantize(Agent(), "bf16")
    optimizer, seen = torch.optim.Adam(model.parameters(), 1e-3), seeded(2, 6)

    def loss() -> Tensor:
        logp = model(seen).float().masked_fill(~LEGAL[:2], -torch.inf).log_softmax(-1)
        return (logp.exp() * logp).sum(-1).mean() - logp[:, 0].mean()

    return Step(model, step_of(model, loss, optimizer))


@case("zero times infinity", ":kl_div", told="unseen")
def a_teacher_that_forbids_words() -> Step:
    """exp(-inf) * -inf, with log_target."""
    teacher, student = linear(8, 10), nn.Sequential(linear(8, 16), nn.Tanh(), linear(16, 10))
    x = seeded(4, 8)
    forbidden = torch.arange(10) > 7

    def loss() -> Tensor:
        with torch.no_grad():
            target = teacher(x).masked_fill(forbidden, -torch.inf).log_softmax(-1)
        return F.kl_div(student(x).log_softmax(-1), target, reduction="batchmean", log_target=True)

    return in_training(student, loss)


@case("row masked wholly", ":cross_entropy", told="unseen")
def a_last_batch_of_one_pair() -> Step:
    """NT-Xent leaves itself out, and there is nobody else."""
    model = nn.Sequential(linear(6, 16), nn.GELU(), linear(16, 8))
    x = seeded(1, 6)

    def loss() -> Tensor:
        z = F.normalize(model(x), dim=-1)
        scores = (z @ z.T / 0.1).masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
        return F.cross_entropy(scores.float(), torch.zeros(1, dtype=torch.long))

    return in_training(model, loss, auto=torch.bfloat16)


@case("row masked wholly", "heads:multi_head_attention_forward", told="unseen")
def a_sequence_of_padding() -> Step:
    def forward(self: Any, x: Tensor, padding: Tensor) -> Tensor:
        return self.out(self.heads(x, x, x, key_padding_mask=padding)[0].mean(1))

    torch.manual_seed(0)
    model = Of(forward, heads=nn.MultiheadAttention(8, 2, batch_first=True), out=linear(8, 3))
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1] = True
    return in_training(model, lambda: F.cross_entropy(model(seeded(3, 5, 8), padding), labels(3, 3)))
