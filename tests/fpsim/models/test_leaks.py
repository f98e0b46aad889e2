"""Training steps leave nothing behind: neither objects nor memory grow with their number."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import tiers
import torch
from torch import nn

import ada_loss
import fpsim

STATM = Path("/proc/self/statm")  # pages: of the address space, then in memory
PAGE = os.sysconf("SC_PAGE_SIZE")
FORMATS = ["bf16", "e4m3fn", "mxfp8_e4m3", "nvfp4", "recipe:fp8_delayed", "recipe:mxfp8"]
FORMS = [*FORMATS, "stored", "adaptive", "watched"]


def step_of(form: str) -> Callable[[], None]:
    """A training step of a small network in a format, or with stored weights, adaptive scaling or `fpsim.watch`."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 32))
    model = net if form == "watched" else fpsim.quantize(net, form if form in FORMATS else "e4m3fn")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(1)
    if form == "stored":
        fpsim.quantize_optimizer(optimizer, "bf16_sr", model)
    elif form == "adaptive":
        ada_loss.AdaLossScaled(model)
    elif form == "watched":
        fpsim.watch(model, every=10, optimizer=optimizer)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(16, 32, generator=generator)).square().mean().backward()
        optimizer.step()

    return step


def objects_after(step: Callable[[], None], steps: int) -> int:
    for _ in range(steps):
        step()
    gc.collect()
    return len(gc.get_objects())


@tiers.parametrize("form", FORMS, keep={"recipe:fp8_delayed"})
def test_steps_leave_no_objects_behind(form: str) -> None:
    step = step_of(form)
    before = objects_after(step, 30)
    steps = 60
    assert objects_after(step, steps) - before < steps // 2  # not one for two steps


@pytest.mark.slow
@pytest.mark.skipif(not STATM.exists(), reason="no /proc/self/statm")
@pytest.mark.parametrize("form", FORMS)
def test_two_thousand_steps_leave_no_memory_behind(form: str) -> None:
    step = step_of(form)
    objects = objects_after(step, 200)
    pages = int(STATM.read_text().split()[1])
    assert objects_after(step, 2000) - objects < 100
    assert (int(STATM.read_text().split()[1]) - pages) * PAGE < 2_000_000  # a kilobyte a step
