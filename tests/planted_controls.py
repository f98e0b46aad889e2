"""Steps in which nothing is wrong, though something looks so, in each model and format: nothing may be named."""

from __future__ import annotations

import torch
from planted_grid import (
    ALL,
    ATTENDING,
    control,
)
from planted_models import LIBRARY, Planted
from torch import nn
from torch.nn.utils import parametrizations

import fpsim

PLAIN = ("float32", "half", "bfloat16", "autocast", "fp16", "bf16")


@control((*ALL, *LIBRARY), (*PLAIN, "mxfp4"))
def nothing(planted: Planted) -> None: ...


@control(ATTENDING, ("float32", "bfloat16", "fp16", "bf16"))
def mask_of_minus_1e9(planted: Planted) -> None:
    for block in planted.model.blocks:
        block.attention.fill = -1e9


@control(ATTENDING, ("float32", "half", "autocast", "fp16", "bf16"))
def mask_of_minus_1e4(planted: Planted) -> None:
    for block in planted.model.blocks:
        block.attention.fill = -1e4


@control(ATTENDING, ("float32", "fp16", "bf16"))
def mask_of_the_least_number(planted: Planted) -> None:
    for block in planted.model.blocks:
        block.attention.fill = torch.finfo(torch.float32).min


@control(ATTENDING, ("e4m3fn",))
def mask_of_minus_1e9_saturates_and_is_enough(planted: Planted) -> None:
    planted.scale = 2.0**9
    for block in planted.model.blocks:
        block.attention.fill = -1e9


@control(ALL, ("e4m3fn", "e5m2"))
def scaled_loss_in_eight_bits(planted: Planted) -> None:
    planted.scale = 2.0**9


@control(ALL, ("mxfp8_e4m3",))
def block_format(planted: Planted) -> None: ...


@control((*ALL, *LIBRARY), ("nvfp4", "mxfp4_sr", "fp8_current", "fp8_delayed"))
def a_recipe(planted: Planted) -> None:
    """An operand of 4 bits is fifty times as wrong as the bfloat16 around it, by nature."""
    planted.policy = fpsim.recipe(planted.fmt, planted.model)
    planted.late = lambda p: p.step()  # of which a delayed scale follows


@control(ALL, ("bf16",))
def operands_of_four_bits_in_blocks(planted: Planted) -> None:
    blocks = fpsim.BlockFormat("int4", 32, "fp32", "amax")
    planted.policy = fpsim.Policy("bf16", "bf16", "bf16", "bf16", products=fpsim.Products.all(blocks))


@control(ALL, ("half", "fp16"))
def a_module_that_is_not_used(planted: Planted) -> None:
    planted.model.spare = nn.Linear(4, 4)


@control(ALL, ("half", "fp16"))
def frozen_parameters(planted: Planted) -> None:
    for parameter in planted.model.blocks[0].parameters():
        parameter.requires_grad_(False)


@control(ALL, ("half", "fp16"))
def a_branch_that_begins_with_zeros(planted: Planted) -> None:
    nn.init.zeros_(planted.model.blocks[1].down.weight)


@control(("gpt", "decoder"), ("float32", "half", "bf16"))
def tied_weights(planted: Planted) -> None:
    planted.model.head.weight = planted.model.tokens.weight


@control(("gpt", "decoder"), ("float32",))
def sparse_embedding(planted: Planted) -> None:
    planted.model.tokens = nn.Embedding(8, 16, sparse=True)
    planted.late = lambda p: setattr(p, "optimizer", torch.optim.SGD(p.model.parameters(), 0.1))


@control(("gpt", "decoder"), ("float32", "half", "fp16"))
def padding_index(planted: Planted) -> None:
    planted.model.tokens = nn.Embedding(8, 16, padding_idx=0)


@control(ALL, ("float32", "half", "fp16"))
def dropout(planted: Planted) -> None:
    planted.point.plant = lambda x: nn.functional.dropout(x, 0.5)


@control(("gpt", "conv"), ("float32", "fp16"))
def weight_norm(planted: Planted) -> None:
    parametrizations.weight_norm(planted.model.head)


@control(ALL, ("float32",))
def adam_in_float32(planted: Planted) -> None:
    planted.late = lambda p: setattr(p, "optimizer", torch.optim.Adam(p.model.parameters(), 1e-3))


@control(ALL, ("fp16", "bf16"))
def adam_on_float32_parameters(planted: Planted) -> None:
    planted.late = lambda p: setattr(p, "optimizer", torch.optim.AdamW(p.model.parameters(), 1e-3))


@control(ALL, ("float32", "bfloat16"))
def a_rate_of_zero(planted: Planted) -> None:
    planted.late = lambda p: setattr(p, "optimizer", torch.optim.SGD(p.model.parameters(), 0.0))


@control(ALL, ("bfloat16",))
def a_rate_that_moves(planted: Planted) -> None:
    planted.late = lambda p: setattr(p, "optimizer", torch.optim.SGD(p.model.parameters(), 1.0))


@control(("conv",), ("float32", "half", "fp16"))
def in_evaluation(planted: Planted) -> None:
    planted.late = lambda p: p.model.eval()


@control(ALL, ("autocast",))
def a_scaler_that_fits(planted: Planted) -> None:
    planted.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    planted.late = lambda p: setattr(p, "optimizer", torch.optim.SGD(p.model.parameters(), 0.1))


@control(ALL, ("float32", "half", "fp16"))
def some_targets_ignored(planted: Planted) -> None:
    planted.y.view(-1)[0] = -100


@control(ALL, ("half", "fp16"))
def dead_rectifiers(planted: Planted) -> None:
    planted.point.plant = lambda x: x + (x - 100).relu()


@control(ALL, ("float32", "half", "fp16"))
def gradients_are_kept_from_the_step_before(planted: Planted) -> None:
    def late(p: Planted) -> None:
        p.step()
        p.clears = False

    planted.late = late
