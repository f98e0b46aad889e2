"""Policy gradients: sampling, the loss with importance weights, and the divergence of two engines.

One engine samples (the rollout), another computes the gradient. Both have the same weights, but round at different
places, so the probabilities of the samples differ, and the gradient is off-policy.
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
# Distances of the ratio from 1 beyond which a token counts: a visible gap, and one that PPO clips.
WIDTHS = (0.01, 0.2)


class Targets(NamedTuple):
    """Targets for sampled tokens, each of shape (samples, tokens).

    tokens: the tokens.
    advantages: of the whole sample: its reward less the mean of its group.
    drawn: the log-probability of the token in the engine that drew it.
    rewards: of the whole sample.
    """

    tokens: Tensor
    advantages: Tensor
    drawn: Tensor
    rewards: Tensor

    def packed(self) -> Tensor:
        """One tensor, (samples, tokens, 4), as a batch of a training has it."""
        # Tokens are exact in it: float32 holds integers up to 2^24.
        return torch.stack([part.to(self.drawn.dtype) for part in self], dim=-1)

    @classmethod
    def of(cls, packed: Tensor) -> Targets:
        tokens, *others = packed.unbind(-1)
        return cls(tokens.long(), *others)


def drawn(forward: Callable[[Tensor], Tensor], prompts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Draw `count` tokens behind each prompt, one by one at temperature 1; return the texts and log-probabilities.

    The random numbers are torch's of the CPU, so that every device draws the same tokens. Without a cache: the text is
    computed again for each token.

    forward: tokens, (samples, time) -> logits of the next ones.
    Returns (samples, time + count), and (samples, count) float64.
    """
    text, known = prompts, []
    with torch.no_grad():
        for _ in range(count):
            # In float64, so that two engines differ by their own rounding only, not by that of the softmax.
            last = torch.log_softmax(forward(text)[:, -1].double(), dim=-1)
            token = torch.multinomial(last.exp().cpu(), 1).to(text.device)
            known.append(last.gather(-1, token))
            text = torch.cat([text, token], dim=1)
    return text, torch.cat(known, dim=1)


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities of tokens under the last logits, of which there may be more; (samples, tokens)."""
    return torch.log_softmax(logits[:, -tokens.shape[1] :], dim=-1).gather(-1, tokens[..., None])[..., 0]


def play(
    forward: Callable[[Tensor], Tensor],
    prompts: Tensor,
    answers: Tensor,
    reward: Callable[[Tensor, Tensor], Tensor],
    group: int,
) -> tuple[Tensor, Tensor]:
    """Draw samples of a policy as a batch from which it learns.

    forward: of the engine that draws.
    prompts, answers: (batch, time) and (batch, tokens).
    reward: drawn tokens and answers, (samples, tokens) each -> (samples,).
    group: samples of each prompt. The mean reward of the others and itself is the baseline (Shao et al. 2024, GRPO);
        it is not divided by the deviation, which would weigh prompts by how hard they are (Liu et al. 2025).
    Returns the inputs of the trainer, (batch * group, time + tokens - 1), and `Targets.packed`.
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
    """The loss whose gradient is that of the expected reward, of samples that another engine may have drawn.

    weights: "none"; "token", the ratio of the trainer's probability of a token to that of the engine that drew it; or
        "truncated", the same, at most 2 (Yao et al. 2025). They are constants: no gradient flows through them.

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
    """The probability that the policy draws the whole of the right answer: its expected reward, without drawing."""
    return log_probabilities(outputs.double(), targets).sum(1).exp().mean().item()


def _change(outputs: Tensor, targets: Tensor) -> Tensor:
    """log p - log q of each token: the trainer's, less that of the engine that drew it."""
    parts = Targets.of(targets)
    return log_probabilities(outputs.double(), parts.tokens) - parts.drawn


def sampled_reward(outputs: Tensor, targets: Tensor) -> float:
    """The mean reward of the drawn samples."""
    return Targets.of(targets).rewards[:, 0].mean().item()


def dlogp(outputs: Tensor, targets: Tensor) -> float:
    """The mean of |log p - log q|."""
    return _change(outputs, targets).abs().mean().item()


def kl(outputs: Tensor, targets: Tensor) -> float:
    """The estimate of KL(q | p) from tokens that q drew, r - 1 - log r (k3 of fpsim.mismatch)."""
    change = _change(outputs, targets)
    # expm1, as the ratio is near 1: exp(x) - 1 would cancel.
    return (change.expm1() - change).mean().item()


def outside(width: float) -> Callable[[Tensor, Tensor], float]:
    """The share of ratios p / q outside of 1 ± width."""

    def share(outputs: Tensor, targets: Tensor) -> float:
        return (_change(outputs, targets).expm1().abs() > width).double().mean().item()

    return share


CURVES: dict[str, Callable[[Tensor, Tensor], float]] = {
    "sampled_reward": sampled_reward,
    "dlogp": dlogp,
    "kl": kl,
    **{f"outside_{width}": outside(width) for width in WIDTHS},
}
