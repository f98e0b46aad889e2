"""Steps drawn in which nothing is wrong, though something looks so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from planted_bench import AUTOCAST, BLOCKS, NATIVE, RECIPES, ROWS, Bench, Block, wide
from planted_kinds import ANY, KINDS, Answer, Kind, kind
from torch import Tensor, nn
from torch.nn import functional as F

import fpsim

FINE = "nothing is wrong"
NOTHING = Answer("", "")


@kind(FINE, (*BLOCKS, *RECIPES), "none")
def a_recipe_or_block_format(b: Bench) -> Answer:
    return NOTHING


@kind(FINE, (*BLOCKS, *RECIPES), "none", bodies=("former",), depth=(2, 4))
def a_recipe_of_a_transformer(b: Bench) -> Answer:
    return NOTHING


@kind(FINE, ANY, "none")
def a_mean_over_segments(b: Bench) -> Answer:
    """0 / 0 in a branch that `where` does not choose; NaN of the way back reaches no parameter."""
    segment = torch.tensor([0, 0, 2, 2, 2, 0, 2, 0, 2, 2, 0, 0])
    assert len(segment) == ROWS
    n = torch.bincount(segment, minlength=3)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        s = torch.zeros(3, dtype=out.dtype).index_add(0, segment, out[:, 0] + out[:, 1])
        mean = torch.where(n > 0, s / n, torch.zeros_like(s))
        return wide(mean).square().sum() + F.cross_entropy(wide(out), y)

    b.loss = loss
    return NOTHING


@kind(FINE, ANY, "none")
def a_guarded_quotient(b: Bench) -> Answer:
    """The divisor is zero where a relu is shut; `where` takes nothing from there, and relu lets no NaN back."""
    # In bf16 0.1 / d is another number where d is small; the quotient of what has d in it is not.
    is_bf16 = "bf" in b.fmt

    def function(x: Tensor) -> Tensor:
        d = (x.sigmoid() - 0.4).relu()
        quotient = d * x.sigmoid() / d if is_bf16 else 0.1 / d
        return x + torch.where(d > 0, quotient, torch.zeros_like(d)).clamp(max=2) * 0.1

    b.point(function)
    return NOTHING


@kind(FINE, ANY, "none", bodies=("former",))
def a_mask_that_is_added(b: Bench) -> Answer:
    for stage in b.stages.values():
        if isinstance(stage, Block):
            stage.mask = "add"
    return NOTHING


@kind(FINE, ("half", "bfloat16"), "none")
def a_mean_square_of_floats(b: Bench) -> Answer:
    target = torch.randn(ROWS, 5)
    b.loss = lambda out, y: F.mse_loss(wide(out), target.to(wide(out).dtype))
    return Answer("", "", never=r"largest relative error of a result is 0\.[3-9]")


@kind(FINE, ("half", "bfloat16", "float32", "fp16"), "none")
def a_module_that_is_not_used(b: Bench) -> Answer:
    b.stages["head"].spare = nn.Linear(4, 4)
    return NOTHING


@kind(FINE, ("half", "bfloat16", "autocast", "fp16"), "none")
def dead_rectifiers(b: Bench) -> Answer:
    b.point(lambda x: x + (x - 50).relu())
    return NOTHING


@kind(FINE, ANY, "none")
def a_frozen_layer(b: Bench) -> Answer:
    module, _ = b.layer()
    module.weight.requires_grad_(False)
    return NOTHING


def added_up(b: Bench, count: int, term: Callable[[Tensor, int], Tensor]) -> Answer:
    def function(x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for i in range(count):
            total = total + term(x, i)
        return x + total / count

    b.point(function)
    return NOTHING


@kind(FINE, ANY, "none")
def a_sum_of_some_terms(b: Bench) -> Answer:
    """Added up in few bits, and no term is swamped: the sum is at most 64 times as large as one."""
    return added_up(b, b.random.choice((16, 32, 64)), lambda x, i: x.sigmoid())


@kind(FINE, ANY, "none")
def a_sum_that_crosses_zero(b: Bench) -> Answer:
    """What is left of the first terms cancels on the way, and the whole does not.

    The gradient of what 256 operations read is itself swamped where autograd adds it up in few bits: such are causes.
    """
    counts = (16, 64) if b.fmt in (*NATIVE, *AUTOCAST) else (16, 64, 256)
    return added_up(b, b.random.choice(counts), lambda x, i: x.tanh() if i % 2 else x.tanh() * -0.75)


@kind(FINE, ANY, "none")
def a_long_sum(b: Bench) -> Answer:
    """Thousands of terms in one operation, whose sum torch makes in float32."""
    times = b.random.choice((16, 64, 256))
    b.point(lambda x: x + x.repeat(*[1] * (x.dim() - 1), times).mean(-1, keepdim=True))
    return NOTHING


@kind(FINE, ("float32",), "none")
def updates_that_are_rounded_stochastically(b: Bench) -> Answer:
    """A single update is lost most times, by design."""
    rate, name = b.random.choice((1e-4, 1e-3)), b.random.choice(("bf16_sr", "bf16_kahan"))
    b.scale = 1.0

    def make(m: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(m.parameters(), rate)
        if not b.is_reference:
            fpsim.quantize_optimizer(optimizer, name, m)
        return optimizer

    b.optimizer = make
    return NOTHING


HEALTHY: dict[str, Kind] = {name: one for name, one in KINDS.items() if one.harm == "none"}
QUARTER = ("a recipe or block format", "a recipe of a transformer")
