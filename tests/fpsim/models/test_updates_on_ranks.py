"""Replicated parameters stay equal on all ranks, stochastic rounding included. As a script, one of two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fpsim import Update, quantize_optimizer

UPDATE = Update(weight="bf16", rounding="stochastic", states="bf16")


def trained(model: nn.Module, inner: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    quantize_optimizer(optimizer, UPDATE, inner, seed=3)
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def batches_of(rank: int) -> list[torch.Tensor]:
    return [torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank)) for step in range(4)]


def run(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 2))
    torch.manual_seed(rank)  # the ranks' own random numbers differ
    model = DistributedDataParallel(inner)
    torch.save(trained(model, inner, batches_of(rank)), folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_replicated_parameters_are_equal_on_two_ranks_and_have_moved(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, __file__]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)], env=environment) for rank in range(2)]
    assert [rank.wait(timeout=600) for rank in ranks] == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(map(torch.equal, first, second))
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 2))
    alone = trained(inner, inner, [torch.cat(pair) for pair in zip(batches_of(0), batches_of(1), strict=True)])
    # the mean over ranks is added up in another order, and stochastic rounding follows: a spacing of bfloat16 each step
    assert all(torch.allclose(a, b, rtol=0, atol=4 * 2.0**-8) for a, b in zip(first, alone, strict=True))
    assert all((p == p.bfloat16().float()).all() for p in first)


if __name__ == "__main__":
    run(int(sys.argv[1]), Path(sys.argv[2]))
