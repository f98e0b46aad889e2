"""Policy gradients: sampling, the loss with importance weights, and the divergence of two engines.

One engine samples (the rollout), and another computes the gradient. Both have the same weights, but they round at
different places. The probabilities of the samples therefore differ, and the gradient is off-policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "CURVES",
    "CUT",
    "WEIGHTS",
    "Targets",
    "drawn",
    "expected_reward",
    "log_probabilities",
    "play",
    "policy_gradient",
]

WEIGHTS = ("none", "token", "truncated")
CUT = 2.0  # the largest weight of "truncated", as in fpsim.mismatch; Yao et al. 2025 take 2 as well
# The curves count tokens whose ratio differs from 1 by more than 0.01, a visible gap, or by more than 0.2, PPO's clip.
WIDTHS = (0.01, 0.2)


class Targets(NamedTuple):
    """Targets for sampled tokens, each of shape (samples, tokens).

    tokens: the tokens.
    advantages: the advantage of the whole sample, which is its reward less the mean reward of its group.
    drawn: the log-probabilities of the tokens in the engine that drew them.
    rewards: the reward of the whole sample.
    """

    tokens: Tensor
    advantages: Tensor
    drawn: Tensor
    rewards: Tensor

    def packed(self) -> Tensor:
        """Return all fields as one tensor, (samples, tokens, 4), because a training batch has one tensor of targets."""
        # Tokens stay exact: float32 holds all integers up to 2^24.
        return torch.stack([part.to(self.drawn.dtype) for part in self], dim=-1)

    @classmethod
    def of(cls, packed: Tensor) -> Targets:
        tokens, *others = packed.unbind(-1)
        return cls(tokens.long(), *others)


def drawn(forward: Callable[[Tensor], Tensor], prompts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Draw `count` tokens after each prompt, one by one, at temperature 1; return texts and log-probabilities.

    The random numbers come from torch's generator on the CPU, so that every device draws the same tokens. There is no
    cache of keys and values: the whole text is computed again for each token.

    forward: a function from tokens, (samples, time), to the logits of the next tokens.
    Returns texts of shape (samples, time + count) and log-probabilities of shape (samples, count), in float64.
    """
    text, known = prompts, []
    with torch.no_grad():
        for _ in range(count):
            # The softmax is computed in float64, so that two engines differ only by their own rounding.
            last = torch.log_softmax(forward(text)[:, -1].double(), dim=-1)
            token = torch.multinomial(last.exp().cpu(), 1).to(text.device)
            known.append(last.gather(-1, token))
            text = torch.cat([text, token], dim=1)
    return text, torch.cat(known, dim=1)


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probabilities of tokens, (samples, tokens), from the last logits; earlier logits are ignored."""
    return torch.log_softmax(logits[:, -tokens.shape[1] :], dim=-1).gather(-1, tokens[..., None])[..., 0]


def play(
    forward: Callable[[Tensor], Tensor],
    prompts: Tensor,
    answers: Tensor,
    reward: Callable[[Tensor, Tensor], Tensor],
    group: int,
) -> tuple[Tensor, Tensor]:
    """Draw samples of a policy, and return them as a batch from which the policy learns.

    forward: the forward pass of the engine that draws.
    prompts, answers: tokens of shape (batch, time) and (batch, tokens).
    reward: a function from drawn tokens and answers, each (samples, tokens), to rewards, (samples,).
    group: the number of samples of each prompt. The baseline is the mean reward of the group (Shao et al. 2024, GRPO).
        The advantage is not divided by the deviation, which would weigh prompts by how hard they are (Liu et al. 2025).
    Returns the inputs of the trainer, (batch * group, time + tokens - 1), and the packed targets (`Targets.packed`).
    """
    count = answers.shape[1]
    text, known = drawn(forward, prompts.repeat_interleave(group, 0), count)
    tokens = text[:, -count:]
    rewards = reward(tokens, answers.repeat_interleave(group, 0)).to(known.dtype)
    advantages = rewards - rewards.view(-1, group).mean(1).repeat_interleave(group)
    parts = (part[:, None].expand_as(known) for part in (advantages, rewards))
    targets = Targets(tokens, next(parts), known, next(parts))
    return text[:, :-1], targets.packed().to(torch.get_default_dtype())


def policy_gradient(outputs: Tensor, targets: Tensor, weights: str = "none") -> Tensor:
    """Return the loss whose gradient is the policy gradient, for samples that another engine may have drawn.

    weights: "none"; "token", the ratio of the trainer's probability of a token to that of the engine that drew it; or
        "truncated", the same ratio, but at most 2 (Yao et al. 2025). Weights are constants: no gradient flows through
        them.

    >>> outputs = torch.zeros(1, 1, 2)  # both tokens at 1/2; the one that was drawn had 1/4 in the other engine
    >>> targets = Targets(*(torch.tensor([[x]]) for x in (0.0, 1.0, -2 * 0.6931472, 1.0))).packed()
    >>> [round(policy_gradient(outputs, targets, weights).item(), 4) for weights in ("none", "token", "truncated")]
    [0.6931, 1.3863, 1.3863]
    """
    parts = Targets.of(targets)
    known = log_probabilities(outputs, parts.tokens)
    ratio = (known.detach() - parts.drawn).exp()
    weight = {"none": torch.ones_like(ratio), "token": ratio, "truncated": ratio.clamp(max=CUT)}[weights]
    return -(weight * parts.advantages * known).mean()


def expected_reward(outputs: Tensor, targets: Tensor) -> float:
    """Return the probability that the policy draws the whole right answer: its expected reward, without sampling."""
    return log_probabilities(outputs.double(), targets).sum(1).exp().mean().item()


def _change(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return log p - log q of each token: p in the trainer, q in the engine that drew the token."""
    parts = Targets.of(targets)
    return log_probabilities(outputs.double(), parts.tokens) - parts.drawn


def sampled_reward(outputs: Tensor, targets: Tensor) -> float:
    """Return the mean reward of the drawn samples."""
    return Targets.of(targets).rewards[:, 0].mean().item()


def dlogp(outputs: Tensor, targets: Tensor) -> float:
    """Return the mean of |log p - log q|."""
    return _change(outputs, targets).abs().mean().item()


def kl(outputs: Tensor, targets: Tensor) -> float:
    """Estimate KL(q | p) from tokens that q drew, as the mean of r - 1 - log r, r = p / q (k3 of fpsim.mismatch)."""
    change = _change(outputs, targets)
    # expm1 is used because the ratio is near 1, where exp(x) - 1 would cancel digits.
    return (change.expm1() - change).mean().item()


def outside(width: float) -> Callable[[Tensor, Tensor], float]:
    """Return a function that measures the share of the ratios p / q outside of 1 ± width."""

    def share(outputs: Tensor, targets: Tensor) -> float:
        return (_change(outputs, targets).expm1().abs() > width).double().mean().item()

    return share


CURVES: dict[str, Callable[[Tensor, Tensor], float]] = {
    "sampled_reward": sampled_reward,
    "dlogp": dlogp,
    "kl": kl,
    **{f"outside_{width}": outside(width) for width in WIDTHS},
}
