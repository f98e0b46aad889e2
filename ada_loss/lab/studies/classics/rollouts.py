"""Two engines that compute the same policy diverge in bfloat16, and less in float16, Qi et al. 2025."""

from __future__ import annotations

import math
from functools import cache
from statistics import mean

import torch

import fpsim
from ada_loss.lab.studies.classics.frame import ByHand, Classic, Setting
from ada_loss.lab.studies.classics.telling import Picture, Row, Rows, Sentences, dots, label, panels
from ada_loss.lab.tasks.chars import chars, drawn, log_likelihood

# Unfused code rounds each result. Fused code rounds only the operands of products.
ENGINES = {
    "float32": lambda _: fpsim.Policy(),
    "unfused": lambda fmt: fpsim.Policy(weight=fmt, activation=fmt),
    "fused": lambda fmt: fpsim.Policy(products=fpsim.Products.all(fmt)),
}
FORMATS, PAIRS = ("bf16", "fp16"), ("unfused / fused", "float32 / unfused", "float32 / fused")  # trainer / rollout
PROMPT, CONTEXT = 8, 64  # characters


def settings(quick: bool) -> list[Setting]:
    steps, rollouts = (60, 16) if quick else (300, 64)
    return [{"steps": steps, "rollouts": rollouts, "format": fmt, "pair": pair} for fmt in FORMATS for pair in PAIRS]


# The result is cached, because all settings of a seed have the same model. It is not stored in a file, so a resumed run
# trains the model again.
@cache
def trained(steps: int, seed: int, device: str) -> ByHand:
    """Return the policy: the small GPT after some steps of training in float32."""
    fit, draw = ByHand(chars(seed), device), torch.Generator().manual_seed(seed)
    batches = (torch.randint(fit.size, (32,), generator=draw) for _ in range(steps))
    fit.steps(torch.optim.AdamW(fit.model.parameters(), lr=3e-3), batches)
    fit.model.eval()
    return fit


def measure(setting: Setting, seed: int, device: str) -> list[Row]:
    """Return how far two engines differ on characters that the rollout's engine draws.

    The numbers are differences of log-probabilities, and the KL divergence of the two engines.
    """
    fit = trained(setting["steps"], seed, device)
    policies = [ENGINES[engine](setting["format"]) for engine in setting["pair"].split(" / ")]
    engines = [fpsim.quantize(fit.model, policy) for policy in policies]
    text = drawn(engines[1], fit.test[0][: setting["rollouts"], :PROMPT], CONTEXT + 1)
    ours, theirs = (log_likelihood(engine, text)[:, PROMPT - 1 :] for engine in engines)
    ratio, kl = ours - theirs, fpsim.compare(fit.model, policies[1], policies[0], text[:, :-1]).kl
    means = {"difference": ratio.abs().mean(), "largest": ratio.abs().max(), "sequence": ratio.sum(dim=1).abs().mean()}
    return [{**{name: float(value) for name, value in means.items()}, "kl": kl}]


def holds(rows: Rows) -> bool:
    """Return True if, for each pair, bf16's mean difference is 4 to 16 times fp16's.

    The expected factor is 8, because fp16 has three more bits of significand.
    """
    return all(4 < x < 16 for pair in PAIRS for x in rows.times("format", "difference", "fp16", pair=pair)["bf16"])


def says(rows: Rows) -> Sentences:
    yield "An unfused engine rounds each result, and a fused one rounds the operands of products alone."
    yield "Pairs are named trainer / rollout."
    for pair in PAIRS:
        gap, kl = (rows.told("format", name, ".2g", pair=pair) for name in ("difference", "kl"))
        less = [mean(rows.times("format", name, "fp16", pair=pair)["bf16"]) for name in ("difference", "kl")]
        yield f"""For {pair}, |log p - log p'| of a character is {gap["bf16"]} in bf16 and {gap["fp16"]} in fp16,
            {less[0]:.1f} times less; the KL divergence {kl["bf16"]} and {kl["fp16"]} nats, {less[1]:.0f} times less."""
    far = [math.exp(max(rows.column("sequence", pair=PAIRS[0], format=fmt))) for fmt in FORMATS]
    yield f"""Three more bits are a factor of 8, and of 64 in the divergence. Over {CONTEXT + 1 - PROMPT} characters the
        importance ratio of {PAIRS[0]} is off by a factor of {far[0]:.3f} in bf16 and {far[1]:.4f} in fp16: the
        geometric mean over the texts, in the seed where it is largest."""


def draw(rows: Rows) -> Picture:
    picture, row = panels(2, 8.4, 3.6)
    shown = (("difference", "mean |log p - log p'|", "best"), ("kl", "KL divergence in nats", None))
    for axes, (name, y, legend) in zip(row, shown, strict=True):
        dots(axes, rows, "format", "pair", name)
        label(axes, "trainer / rollout; a dot for each seed", y, legend=legend, yscale="log")
    return picture


CLASSIC = Classic(settings, measure, holds, says, draw)
