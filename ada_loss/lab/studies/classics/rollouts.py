"""Two engines that compute one policy part in bfloat16, and less in float16, Qi et al. 2025."""

from __future__ import annotations

import math
from functools import cache
from statistics import mean
from typing import Any

import torch
from torch import nn

import fpsim
from ada_loss.lab.results.figures import colour
from ada_loss.lab.studies.classics.frame import Classic, Rows, data_of, of, spread
from ada_loss.lab.tasks.chars import CONTEXT, chars
from ada_loss.lab.tasks.policy_gradient import drawn, log_probabilities
from fpsim.insight.pictures import new_picture

FORMATS = ("bf16", "fp16")
PAIRS = {
    "unfused / fused": ("unfused", "fused"),
    "float32 / unfused": ("float32", "unfused"),
    "float32 / fused": ("float32", "fused"),
}  # trainer / rollout
PROMPT = 8  # characters


def policy(engine: str, fmt: str) -> fpsim.Policy:
    """An engine: unfused code rounds each result, fused code only the operands of products."""
    if engine == "unfused":
        return fpsim.Policy(weight=fmt, activation=fmt)
    return fpsim.Policy(products=fpsim.Products.all(fmt)) if engine == "fused" else fpsim.Policy()


def settings(quick: bool) -> list[dict[str, Any]]:
    steps, rollouts = (60, 16) if quick else (300, 64)
    return [{"steps": steps, "rollouts": rollouts, "format": fmt, "pair": pair} for fmt in FORMATS for pair in PAIRS]


@cache  # of a seed all settings have the same model; resumed, it is trained again
def trained(steps: int, seed: int, device: str) -> nn.Module:
    """The policy: the small GPT after some steps in float32."""
    task = chars(seed)
    model = task.model.to(device)
    (inputs, targets), _ = data_of(task, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randint(len(inputs), (32,), generator=draw)
        optimizer.zero_grad()
        task.loss(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()
    return model.eval()


def measure(setting: dict[str, Any], seed: int, device: str) -> Rows:
    """Characters that the rollout's engine draws, their log-probabilities under both, and the KL of the two."""
    model = trained(setting["steps"], seed, device)
    ours, theirs = (policy(engine, setting["format"]) for engine in PAIRS[setting["pair"]])
    trainer, rollout = fpsim.quantize(model, ours), fpsim.quantize(model, theirs)
    with torch.no_grad():
        prompts = data_of(chars(seed), device)[1][0][: setting["rollouts"], :PROMPT]
        text, known = drawn(rollout, prompts, CONTEXT + 1 - PROMPT)
        ratio = log_probabilities(trainer(text[:, :-1]).double(), text[:, PROMPT:]) - known
    whole = ratio.sum(dim=1)
    return [
        {
            "difference": float(ratio.abs().mean()),
            "largest": float(ratio.abs().max()),
            "sequence": float(whole.abs().mean()),
            "kl": fpsim.compare(model, theirs, ours, text[:, :-1]).kl,
        }
    ]


def _ratio(rows: Rows, pair: str, name: str) -> list[float]:
    """bf16's number over fp16's, for each seed."""
    bf16, fp16 = ([row[name] for row in of(rows, pair=pair, format=fmt)] for fmt in FORMATS)
    return [a / b for a, b in zip(bf16, fp16, strict=True)]


def holds(rows: Rows) -> bool:
    """bf16's mean difference is 4 to 16 times fp16's, for each pair: three bits of the significand are 8."""
    return all(4 < ratio < 16 for pair in PAIRS for ratio in _ratio(rows, pair, "difference"))


def says(rows: Rows) -> str:
    words = []
    for pair in PAIRS:
        difference, kl = (
            [spread([row[name] for row in of(rows, pair=pair, format=fmt)], ".2g") for fmt in FORMATS]
            for name in ("difference", "kl")
        )
        words.append(
            f"{pair}: |log p - log p'| of a character is {difference[0]} in bf16 and {difference[1]} in fp16, "
            f"{mean(_ratio(rows, pair, 'difference')):.1f} times less; the KL "
            f"divergence {kl[0]} and {kl[1]} nats, {mean(_ratio(rows, pair, 'kl')):.0f} times less."
        )
    far = {fmt: max(row["sequence"] for row in of(rows, pair="unfused / fused", format=fmt)) for fmt in FORMATS}
    return (
        f"An unfused engine rounds each result, a fused one the operands of products alone; trainer / rollout: "
        f"{' '.join(words)} Three more bits are a factor of 8, and of 64 in the divergence. Over "
        f"{CONTEXT + 1 - PROMPT} characters the importance ratio of unfused / fused is off by a factor of "
        f"{math.exp(far['bf16']):.3f} in bf16 and {math.exp(far['fp16']):.4f} in fp16, in the mean of the worst seed."
    )


def draw(rows: Rows) -> Any:
    picture = new_picture(8.4, 3.6)
    for axes, (name, words) in zip(
        picture.subplots(1, 2), (("difference", "mean |log p - log p'|"), ("kl", "KL divergence in nats")), strict=True
    ):
        for i, fmt in enumerate(FORMATS):
            for j, pair in enumerate(PAIRS):
                values = [row[name] for row in of(rows, pair=pair, format=fmt)]
                places = [j + 0.25 * (i - 0.5)] * len(values)
                axes.plot(places, values, "os"[i], color=colour(i), markersize=5, label=fmt if j == 0 else None)
        axes.set_yscale("log")
        axes.set_xticks(range(len(PAIRS)), [pair.replace(" / ", "\n/ ") for pair in PAIRS], fontsize=8)
        axes.set(ylabel=words, xlim=(-0.5, len(PAIRS) - 0.5), xlabel="trainer / rollout; a dot for each seed")
        axes.grid(axis="y", linewidth=0.4, alpha=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    picture.axes[0].legend(fontsize=8, frameon=False)
    return picture


CLASSIC = Classic(
    claim="The engine that draws rollouts and the one that trains compute one policy with different kernels, and in "
    "bf16 their probabilities part enough to bias reinforcement learning. fp16, with three more bits, closes the gap.",
    limits="Reinforcement learning, its collapse and its recovery: the task rl trains under such gaps. The policy is a "
    "GPT of 0.1 million weights with 64 characters of context, so that the gaps are small; their ratio is what is "
    "compared. The engines differ in where they round, not in the order of their sums.",
    settings=settings,
    measure=measure,
    holds=holds,
    says=says,
    draw=draw,
)
