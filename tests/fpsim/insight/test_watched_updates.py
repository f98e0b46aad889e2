"""What watch says of an optimizer: which weights did not move, and what was lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fpsim
from fpsim import quantize_optimizer


def norm_and_linear(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for i in range(steps):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(i)).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        (model(x).float() - x.float().sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()


def test_norm_weights_of_a_bfloat16_model_that_stay_at_one_are_named():
    """A step of 2**-12 on weights of 1, whose neighbours are 2**-8 and 2**-7 away; biases begin at 0 and move."""
    model = norm_and_linear(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-12, weight_decay=0.0)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    with fpsim.watch(model, ["bf16"], every=1, optimizer=optimizer) as watching:
        train(model, optimizer, 3)
    still = [name for name, p in model.named_parameters() if torch.equal(p, first[name])]
    assert 0 < len(still) < len(first)
    assert "1.weight" in still
    assert watching.never_moved() == still
    assert f"No watched step has changed {', '.join(still)}." in str(watching)
    assert "Step 1 left " in str(watching)
    assert "% of the weights that had a gradient as they were." in str(watching)


def test_a_float32_model_moves_and_nothing_is_said_of_it():
    model = norm_and_linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with fpsim.watch(model, ["bf16"], every=1, optimizer=optimizer) as watching:
        train(model, optimizer, 2)
    assert watching.never_moved() == []
    assert "as they were" not in str(watching)
    assert watching.updates == []


@pytest.mark.parametrize("name", ["bf16", "te_fp16_master", "bf16_collage"])
def test_of_a_quantised_optimizer_the_weights_are_those_that_the_model_sees(name):
    model = norm_and_linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-12, weight_decay=0.0)
    quantized = quantize_optimizer(optimizer, name, model)
    with fpsim.watch(model, ["bf16"], every=1, optimizer=optimizer) as watching:
        train(model, optimizer, 1)
    assert "1.weight" in watching.never_moved()
    (lost,) = watching.updates
    assert lost.rows()
    assert "% of the updates were lost, stored as" in str(watching)
    assert quantized.observers == []


def test_watch_suggests_no_update_and_python_names_what_it_suggests():
    watching = fpsim.watch(norm_and_linear(), ["bf16"])
    watching.detach()
    with pytest.raises(AttributeError, match="suggest_update"):
        watching.suggest_update()  # type: ignore[attr-defined]
    assert watching.suggest().policy is not None
