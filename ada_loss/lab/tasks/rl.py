"""A small GPT that learns addition from its own samples by policy gradient, after supervised steps."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ada_loss.lab.tasks.chars import SmallGPT
from ada_loss.lab.tasks.policy_gradient import CURVES, expected_reward, play, policy_gradient
from ada_loss.lab.tasks.task import Task, seeded, trained_with

__all__ = ["rl"]

PLUS, EQUALS, SYMBOLS = 10, 11, 12
DIGITS = 2  # the number of digits of each number
TRAIN, TEST = 512, 512
GROUP = 8  # the number of samples for each prompt
# The supervised training before the policy gradient: steps, sums in a step, learning rate.
TAUGHT, BATCH, RATE = 300, 128, 3e-3


def sums(count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return prompts such as "12+34=", and answers: the digits of the sum, last digit first, as in column addition."""
    parts = torch.randint(10, (count, 2, DIGITS), generator=draw)
    total = (parts * 10 ** torch.arange(DIGITS - 1, -1, -1)).sum((1, 2))
    signs = [torch.full((count, 1), sign) for sign in (PLUS, EQUALS)]
    answers = torch.stack([total // 10**place % 10 for place in range(DIGITS + 1)], dim=1)
    return torch.cat([parts[:, 0], signs[0], parts[:, 1], signs[1]], dim=1), answers


def is_right(tokens: Tensor, answers: Tensor) -> Tensor:
    """Return the reward of each answer, (samples,): 1 if all digits are right, else 0."""
    return (tokens == answers).all(dim=1).double()


# The result is cached, because all settings of a seed begin with the same model.
@lru_cache(maxsize=64)
def taught(seed: int, steps: int) -> nn.Module:
    """Train the initial policy by supervised learning, in float32, on sums from a separate random stream."""
    threads = torch.get_num_threads()
    # One thread is used, so that sums have a fixed order and a seed yields the same model.
    torch.set_num_threads(1)
    try:
        learner = seeded(seed, lambda: SmallGPT(SYMBOLS))
        # The seed is shifted by 2, because 0 and 1 are the seeds of the data.
        draw = torch.Generator().manual_seed(seed + 2)
        optimizer = torch.optim.AdamW(learner.parameters(), lr=RATE)
        for _ in range(steps):
            prompts, answers = sums(BATCH, draw)
            outputs = learner(torch.cat([prompts, answers[:, :-1]], dim=1))[:, -answers.shape[1] :]
            optimizer.zero_grad()
            F.cross_entropy(outputs.flatten(0, 1), answers.flatten()).backward()
            optimizer.step()
        optimizer.zero_grad()
    finally:
        torch.set_num_threads(threads)
    return learner


@trained_with(optimizer="adamw", learning_rate=6e-4, schedule="constant", warmup=5, epochs=1, batch_size=16)
def rl(seed: int = 0) -> Task:
    """Learn to add two numbers of two digits by policy gradient; the reward is 1 if all digits of an answer are right.

    First, 300 supervised steps train the policy, so that it gets some rewards. Then it draws eight answers to each
    prompt of a batch, in the format of its rollouts, and learns from them. The metric is the policy's expected reward
    on 512 sums, in the trainer's format; these sums are drawn independently of the training's sums. There are only
    10,000 sums in all, so the metric shows optimization, not generalization.

    Args:
        seed: the seed of the weights, and of the sums in supervised steps.
    """
    train, (prompts, answers) = (
        sums(count, torch.Generator().manual_seed(own)) for own, count in enumerate((TRAIN, TEST))
    )
    return Task(
        name="rl",
        model=taught(seed, TAUGHT),
        train=train,
        test=(torch.cat([prompts, answers[:, :-1]], dim=1), answers),
        loss=policy_gradient,
        metrics={"reward": expected_reward},
        goal={name: "maximize" if "reward" in name else "minimize" for name in ("reward", *CURVES)},
        play=partial(play, reward=is_right, group=GROUP),
        curves=CURVES,
    )


# Formats of a sweep may have a rollout for this task.
rl.plays = True  # type: ignore[attr-defined]
