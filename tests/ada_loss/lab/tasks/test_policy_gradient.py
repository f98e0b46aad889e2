"""Learning from samples: what is drawn, the gradient against all samples counted out, and how far two engines part."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from ada_loss.lab.tasks.policy_gradient import (
    CURVES,
    Targets,
    drawn,
    expected_reward,
    log_probabilities,
    play,
    policy_gradient,
)
from ada_loss.lab.tasks.rl import DIGITS, EQUALS, PLUS, is_right, sums

P_LOGITS = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)
Q = (0.5, 0.25, 0.25)  # of the engine that draws: in four samples each token comes as often as it should
REWARDS = (0.0, 1.0, 0.25)
TOKENS = (0, 0, 1, 2)


def counted_out(weights: str, largest: float = math.inf) -> tuple[Tensor, Tensor]:
    """The gradient of the loss over all samples, and that of sum of w(y) q(y) r(y) log p(y), term by term."""
    logits = P_LOGITS.clone().requires_grad_()
    rewards = torch.tensor([REWARDS[t] for t in TOKENS], dtype=torch.float64)[:, None]
    known = torch.tensor([math.log(Q[t]) for t in TOKENS], dtype=torch.float64)[:, None]
    targets = Targets(torch.tensor(TOKENS)[:, None], rewards, known, rewards).packed()
    policy_gradient(logits.expand(4, 1, 3), targets, weights).backward()
    p = torch.softmax(P_LOGITS, 0)
    expected = torch.zeros(3, dtype=torch.float64)
    for token in range(3):
        weight = 1.0 if weights == "none" else min(p[token].item() / Q[token], largest)
        score = torch.eye(3, dtype=torch.float64)[token] - p  # the derivative of log p by the logits
        expected += Q[token] * weight * REWARDS[token] * score
    assert logits.grad is not None
    return -logits.grad, expected


@pytest.mark.parametrize(("weights", "largest"), [("none", math.inf), ("token", math.inf), ("truncated", 2.0)])
def test_the_gradient_is_the_sum_over_all_samples(weights: str, largest: float) -> None:
    given, expected = counted_out(weights, largest)
    torch.testing.assert_close(given, expected, rtol=1e-12, atol=1e-15)


def test_importance_weights_of_tokens_give_the_gradient_of_the_trainers_expected_reward() -> None:
    logits = P_LOGITS.clone().requires_grad_()
    (torch.softmax(logits, 0) * torch.tensor(REWARDS, dtype=torch.float64)).sum().backward()
    weighted, _ = counted_out("token")
    unweighted, _ = counted_out("none")
    torch.testing.assert_close(weighted, logits.grad, rtol=1e-12, atol=1e-15)
    assert (unweighted - logits.grad).abs().max() > 0.03  # the bias that the weights remove


def test_a_weight_is_cut_off_at_two() -> None:
    given = []
    for weights in ("token", "truncated"):
        logits = torch.tensor([0.0, 0.0], requires_grad=True)
        parts = (torch.tensor([[x]]) for x in (0.0, 1.0, math.log(1 / 8), 1.0))  # 1/2 here, 1/8 there: a ratio of 4
        policy_gradient(logits.expand(1, 1, 2), Targets(*parts).packed(), weights).backward()
        given.append(logits.grad.tolist())
    # w (1 - p): 4 / 2 and 2 / 2
    assert given == [[-2.0, 2.0], [-1.0, 1.0]]


def test_samples_are_drawn_with_their_probabilities_and_say_them() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([0.6, 0.3, 0.1]).log()
    text, known = drawn(lambda x: logits.expand(*x.shape, 3), torch.zeros(4000, 2, dtype=torch.long), 2)
    assert text.shape == (4000, 4)
    assert (text[:, :2] == 0).all()
    shares = text[:, 2:].flatten().bincount(minlength=3) / 8000
    # five deviations of a share of 8,000 draws: 5 sqrt(0.6 * 0.4 / 8000)
    assert (shares - torch.tensor([0.6, 0.3, 0.1])).abs().max() < 0.028
    torch.testing.assert_close(known, logits.double()[text[:, 2:]], rtol=1e-6, atol=1e-6)


def test_each_token_is_drawn_after_those_before_it() -> None:
    def forward(text: Tensor) -> Tensor:  # the next is the last plus one, for sure
        return torch.nn.functional.one_hot((text + 1) % 5, 5) * 1000.0

    text, known = drawn(forward, torch.tensor([[3], [0]]), 3)
    assert text.tolist() == [[3, 4, 0, 1], [0, 1, 2, 3]]
    assert known.tolist() == [[0.0] * 3] * 2


def test_a_play_gives_what_the_trainer_is_called_with_and_advantages_around_the_groups_mean() -> None:
    torch.manual_seed(0)
    prompts, answers = torch.tensor([[7, 8], [1, 2]]), torch.tensor([[0, 1, 0], [2, 2, 2]])
    logits = torch.tensor([2.0, 1.0, 0.0])
    reward = lambda tokens, right: (tokens == right).double().mean(1)
    x, y = play(lambda text: logits.expand(*text.shape, 3), prompts, answers, reward, 4)
    parts = Targets.of(y)
    assert x.shape == (8, 4)
    assert x[:, :2].tolist() == [[7, 8]] * 4 + [[1, 2]] * 4
    assert torch.equal(x[:, 2:], parts.tokens[:, :-1])  # the last token is no input
    right = answers.repeat_interleave(4, 0)
    for i in range(8):
        own = [sum(int(a == b) for a, b in zip(parts.tokens[j], right[j], strict=True)) / 3 for j in range(8)]
        group = own[:4] if i < 4 else own[4:]
        assert parts.rewards[i].tolist() == pytest.approx([own[i]] * 3)
        assert parts.advantages[i].tolist() == pytest.approx([own[i] - sum(group) / 4] * 3, abs=1e-6)
    torch.testing.assert_close(log_probabilities(logits.expand(8, 4, 3), parts.tokens), parts.drawn)


def test_the_curves_are_their_formulas() -> None:
    p, q = (0.5, 0.25), (0.4, 0.252)  # of two tokens, in the trainer and in the other engine
    logits = torch.tensor([[[math.log(p[0]), math.log(1 - p[0])], [math.log(p[1]), math.log(1 - p[1])]]])
    known = torch.tensor([[math.log(q[0]), math.log(q[1])]], dtype=torch.float64)
    rewards = torch.tensor([[0.75, 0.75]], dtype=torch.float64)
    targets = Targets(torch.tensor([[0, 0]]), rewards, known, rewards).packed()
    given = {name: curve(logits.double(), targets) for name, curve in CURVES.items()}
    ratios = [a / b for a, b in zip(p, q, strict=True)]  # 1.25 and 0.992
    expected = {
        "sampled_reward": 0.75,
        "dlogp": sum(abs(math.log(r)) for r in ratios) / 2,
        "kl": sum(r - 1 - math.log(r) for r in ratios) / 2,
        "outside_0.01": 0.5,
        "outside_0.2": 0.5,
    }
    assert given == pytest.approx(expected, rel=1e-6)  # the logits are of float32


def test_the_expected_reward_is_the_mean_probability_of_a_whole_answer() -> None:
    rows = [[[0.5, 0.5], [0.25, 0.75]], [[0.1, 0.9], [0.5, 0.5]]]
    logits = torch.tensor([[[1.0, 1.0], *row] for row in rows]).log()  # the row of a prompt's character counts not
    assert expected_reward(logits, torch.tensor([[0, 1], [1, 0]])) == pytest.approx((0.5 * 0.75 + 0.9 * 0.5) / 2)


def test_the_answers_are_the_sums_of_the_prompts() -> None:
    prompts, answers = sums(50, torch.Generator().manual_seed(3))
    for prompt, answer in zip(prompts.tolist(), answers.tolist(), strict=True):
        assert (prompt[DIGITS], prompt[-1]) == (PLUS, EQUALS)
        first, second = (int("".join(map(str, part))) for part in (prompt[:DIGITS], prompt[DIGITS + 1 : -1]))
        assert int("".join(map(str, reversed(answer)))) == first + second
    wrong = answers.clone()
    wrong[::2, -1] += 1
    assert is_right(wrong, answers).tolist() == [0.0, 1.0] * 25


def test_a_play_is_of_torchs_random_numbers_alone() -> None:
    prompts, answers = sums(3, torch.Generator().manual_seed(0))
    own = partial(play, lambda text: torch.zeros(*text.shape, 12), prompts, answers, is_right, 2)
    given = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        given.append(own()[1])
    assert torch.equal(given[0], given[1])
    assert not torch.equal(given[0], given[2])
