"""What an optimizer's step breaks, or does not change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from planted_grid import (
    EVERY,
    cause,
)
from planted_models import LIBRARY, Planted, llama_of
from planted_nets import (
    Rwkv,
    language_step,
    net,
    sharpness,
)
from planted_steps import (
    Own,
    Step,
    case,
    ids,
    in_training,
    labels,
    linear,
    mean_square,
    plant,
    seeded,
    step_of,
)
from torch import nn
from torch.nn import functional as F

import fpsim

# Planted in each model and format


@cause("division by zero", "", "update", EVERY, ("half",))
def eps_of_adam_is_lost(planted: Planted) -> None:
    planted.scale = 0.1  # squares are lost, and no gradient

    def late(p: Planted) -> None:
        p.optimizer = torch.optim.Adam(p.model.parameters(), 1e-3, foreach=p.name != "conv")

    planted.late = late


@cause("update lost", "", "update", EVERY, ("bfloat16", "half"))
def updates_are_lost(planted: Planted) -> None:
    def late(p: Planted) -> None:
        p.optimizer = torch.optim.SGD(p.model.parameters(), 1e-6)

    planted.late = late


@cause("overflow", "exp_avg_sq", "optimizer state", ("gpt", "conv", *LIBRARY), ("half",))
def squared_gradient_overflows(planted: Planted) -> None:
    planted.scale = 2.0**13

    def late(p: Planted) -> None:
        p.optimizer = torch.optim.Adam(p.model.parameters(), 1e-3, betas=(0.9, 0.1), eps=1e-4)

    planted.late = late


@cause("overflow", "", "update", EVERY, ("half",))
def rate_too_large(planted: Planted) -> None:
    planted.scale = 2.0**7

    def late(p: Planted) -> None:
        p.optimizer = torch.optim.SGD(p.model.parameters(), 6e4)

    planted.late = late


@cause("rate is NaN", "", "update", EVERY, ("float32", "half", "autocast", "fp16"))
def rate_is_nan(planted: Planted) -> None:
    planted.late = lambda p: setattr(p, "optimizer", torch.optim.SGD(p.model.parameters(), torch.nan))


@cause("rate is infinite", "", "update", EVERY, ("float32", "half", "autocast", "fp16"))
def rate_is_infinite(planted: Planted) -> None:
    planted.late = lambda p: setattr(p, "optimizer", torch.optim.SGD(p.model.parameters(), torch.inf))


@cause("update lost", "", "update", EVERY, ("fp16", "bf16", "e4m3fn"))
def updates_are_rounded_away(planted: Planted) -> None:
    if planted.fmt == "e4m3fn":
        planted.scale = 2.0**9  # so that no gradient is lost

    def late(p: Planted) -> None:
        fpsim.round_parameters_(p.model)
        p.optimizer = torch.optim.SGD(p.model.parameters(), 1e-5)

        def update(_: Planted) -> None:
            p.optimizer.step()
            fpsim.round_parameters_(p.model)

        p.after_backward = update

    planted.late = late


# Whole steps


@case("update lost", ".*", "update", told="own")
def a_small_rate_with_momentum() -> Step:
    planted = net(torch.bfloat16)
    return replace(planted, optimizer=torch.optim.SGD(planted.model.parameters(), 1e-7, momentum=0.9))


@case("division by zero", ".*", "update", told="own")
def rmsprop_in_half() -> Step:
    planted = net(torch.float16, gain=1e-3)
    return replace(planted, optimizer=torch.optim.RMSprop(planted.model.parameters(), 1e-3))


@case("division by zero", ".*", "update", told="own")
def adamw_steps_inside_of_the_step() -> Step:
    planted = net(torch.float16, gain=1e-3)
    optimizer = torch.optim.AdamW(planted.model.parameters(), 1e-3)

    def both() -> None:
        optimizer.zero_grad()
        planted.step()
        optimizer.step()

    return Step(planted.model, both)


@case("division by zero", r"0\.weight", "update", told="forum")
def adam_in_half() -> Step:
    """eps = 1e-8 is zero in half, and so is the square of a small gradient."""
    loss = lambda y: y.float().mean() * 1e-3
    adam = lambda parameters: torch.optim.Adam(parameters, lr=1e-3, foreach=False)
    return plant(nn.Sequential(linear(8, 4)), "half", seeded(4, 8), loss, adam)


@case("update lost", ".*", "update", told="forum")
def pure_bf16_at_a_small_learning_rate() -> Step:
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=1e-6)
    model = nn.Sequential(linear(8, 16), nn.Tanh(), linear(16, 4))
    return plant(model, "bfloat16", seeded(4, 8), mean_square, sgd)


@case("update lost", ".*", "update", told="post")
def a_llama_in_pure_bf16() -> Step:
    model = llama_of(32, initializer_range=0.2).to(torch.bfloat16)
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6)
    clip = lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    loss = lambda: model(input_ids=ids, labels=ids).loss
    return Step(model, step_of(model, loss, optimizer, after=clip))


class SignOfGradient(Own):
    """An optimizer of one's own."""

    def move(self, p: Any, lr: float) -> None:
        p.data.add_(p.grad.sign(), alpha=-lr)


@case("update lost", ".*", "update", told="loop")
def signs_that_move_nothing() -> Step:
    model = Rwkv(with_maximum=True).bfloat16()
    optimizer = SignOfGradient(model.parameters(), 1e-6)
    step = language_step(model, ids(2, 13, below=32), optimizer)
    return Step(model, step)


class OwnAdam(Own):
    """Adam as one writes it."""

    def move(self, p: Any, lr: float) -> None:
        state = self.state[p]
        if not state:
            state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
        state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
        state["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
        p.sub_(lr * state["m"] / (state["v"].sqrt() + 1e-8))


@case("division by zero", r"0\.weight", "update", told="unseen")
def an_adam_of_ones_own_in_half() -> Step:
    model = nn.Sequential(linear(8, 16), nn.SiLU(), linear(16, 4)).half()
    x = seeded(8, 8).half()
    loss = lambda: F.cross_entropy(model(x).float(), labels(8, 4)) * 0.01
    return in_training(model, loss, OwnAdam(model.parameters(), 1e-3))


@case("division by zero", "words.weight", "update", told="unseen")
def an_adam_without_eps() -> Step:
    """Rows of words that did not occur: 0 / 0."""
    torch.manual_seed(0)
    words = nn.Embedding(30, 8)
    model = nn.Sequential()
    model.add_module("words", words)
    model.add_module("out", linear(8, 30))
    ids = torch.arange(12)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=0.0)
    return in_training(model, lambda: F.cross_entropy(model(ids), ids), optimizer)


@case("NaN", "0.weight", "update", told="unseen")
def a_climb_without_a_gradient() -> Step:
    """All margins are kept: 0.05 / 0."""
    model = nn.Sequential(linear(4, 8), nn.Tanh(), linear(8, 1))
    model[2].weight.data.zero_()
    model[2].bias.data.fill_(5.0)
    return sharpness(model)
