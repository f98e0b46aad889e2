"""The papers that are reproduced: the claim of each, and the limits of its reproduction at this size."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CLASSICS", "Paper"]


class Paper(NamedTuple):
    """A published effect that is reproduced.

    title: the paper, and the effect in a line.
    claim: the claim of the paper.
    limits: the parts that are not shown at this size.
    """

    title: str
    claim: str
    limits: str


# The module of a classic has the classic's name, with _ in place of -. The module is imported on use, because a list of
# the names must not load torch.
CLASSICS = {
    "swamping": Paper(
        "Wang et al. 2018, arXiv 1812.08011: long sums in 16 bits stop growing, chunks repair it",
        "In 16 bits (1 sign, 6 exponent, 9 mantissa) a long sum swamps: once it is large enough, each further term "
        "is rounded away. Adding up chunks of 64 first, or rounding stochastically, repairs it.",
        "Swamping in a training. Whether the sums of a training swamp depends on how long they are and how their signs "
        "mix; here numbers of mean 1 are added, as in the paper's own figure, and nothing is trained.",
    ),
    "bf16-updates": Paper(
        "Zamirai et al. 2020, arXiv 2010.06192: updates that bf16 weights lose, and two repairs",
        "Training with bfloat16 weights is worse than in float32 because updates are rounded to nearest, which turns "
        "small ones into nothing. Stochastic rounding of the update, or Kahan's sum, closes the gap.",
        "Long trainings and large models: this is a GPT of 0.1 million weights in its first steps. Activations and "
        "gradients stay float32, so that only the update is at work; the paper computes in bfloat16 as well.",
    ),
    "fixed-point": Paper(
        "Gupta et al. 2015, arXiv 1502.02551: stochastic rounding trains in 16-bit fixed point",
        "A network whose weights, activations, gradients and updates are 16-bit fixed point trains as in float32 if "
        "rounding is stochastic, and hardly or not at all if it is to nearest.",
        "The paper's full MNIST and CIFAR-10: these are 4,000 digits for the training and 1,000 for the test, so that "
        "one percentage point is ten digits. Sums within products are float32; the paper's are fixed point, wide "
        "enough not to matter.",
    ),
    "underflow": Paper(
        "Micikevicius et al. 2017, arXiv 1710.03740: fp16 gradients underflow, a constant repairs it",
        "In fp16, small gradients become zero, and some networks do not train for that reason (Multibox SSD). A loss "
        "scaled by a constant moves all gradients up, into the part of fp16's range that they leave unused, and "
        "repairs it.",
        "SSD on 300 x 300 pictures, whose gradients are too small for fp16 by themselves. Scales below 1 stand for "
        "that here: they make the gradients as small as those of a loss averaged over many more numbers.",
    ),
    "depth-scales": Paper(
        "Zhao et al. 2020, IJCAI: in deep networks a scale for each layer does what no single scale does",
        "In a deep network gradients shrink from layer to layer, and no single scale of the loss fits all of them. "
        "Scales for each layer, computed from statistics, do fit, and nobody has to search for them.",
        "A training that needs more than one scale. The networks whose gradients span more than a format's range are "
        "not trained, since even float32 would hardly train them; the one that is trained needs no more than the best "
        "constant.",
    ),
    "rollouts": Paper(
        "Qi et al. 2025, arXiv 2510.26788: two engines diverge in bf16, and far less in fp16",
        "The engine that draws rollouts and the one that trains compute one policy with different kernels, and in "
        "bf16 their probabilities differ enough to bias reinforcement learning. fp16, with three more bits, closes the "
        "gap.",
        "Reinforcement learning, its collapse and its recovery. (The task rl trains under such gaps.) The policy is a "
        "GPT of 0.1 million weights with 64 characters of context, so that the gaps are small; only their ratio is "
        "compared. The engines differ in where they round, not in the order of their sums.",
    ),
}
