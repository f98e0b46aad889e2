"""Parameters on several ranks: replicated ones stay equal, and sharded ones are those of one process.

As a script, one of two ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fpsim
from fpsim import Update, quantize_optimizer
from fpsim.torch_modes import place_of

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


SHARDED = {
    "stochastic": UPDATE,
    "kahan": Update(weight="bf16", compensation="kahan"),
    "master copy": Update(weight="bf16", rounding={"weight": "stochastic", "master": "stochastic"}, master="fp16"),
    "rows that share scales": Update(  # that of a bias is the whole bias, of which a rank has a half
        weight="bf16", states="e4m3fn per row fp32", overrides={"0.bias": Update(weight="bf16")}
    ),
    "each operation": Update(weight="bf16", arithmetic="torch"),
}


def wide() -> nn.Module:
    """701 rows, which two ranks share as 351 and 350; and one row, of which the second rank has nothing."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 701), nn.Tanh(), nn.Linear(701, 1))


def sharded(folder: Path, rank: int) -> None:
    """Both ranks have the same batches, so that the mean of their gradients is that of one process, bit for bit."""
    mesh = init_device_mesh("cpu", (2,))
    for name, update in SHARDED.items():
        model = fully_shard(wide(), mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        lost = fpsim.lost_updates(quantize_optimizer(optimizer, update, model, seed=3))
        steps(model, optimizer)
        first, *_ = model.parameters()
        assert place_of(first) == ((701, 6), (351 * rank, 0))
        assert place_of(first.full_tensor()) is None
        whole = [p.full_tensor().detach() for p in model.parameters()]
        torch.save({"weights": whole, "rows": [*lost.rows()]}, folder / f"{name} {rank}.pt")


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x in batches_of(0):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def replicated(folder: Path, rank: int) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 2))
    torch.manual_seed(rank)  # the ranks' own random numbers differ
    model = DistributedDataParallel(inner)
    torch.save(trained(model, inner, batches_of(rank)), folder / f"{rank}.pt")


def run(rank: int, folder: Path, kind: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.manual_seed(rank)
    {"replicated": replicated, "sharded": sharded}[kind](folder, rank)
    # The model is gone by now. One that outlives the process group joins gloo's threads while it holds Python's lock,
    # which one of them may be waiting for (torch 2.13).
    dist.destroy_process_group()


def run_ranks(folder: Path, kind: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, __file__]
    ranks = [subprocess.Popen([*command, str(rank), str(folder), kind], env=environment) for rank in range(2)]
    assert [rank.wait(timeout=600) for rank in ranks] == [0, 0]


@pytest.mark.full
def test_shards_of_two_ranks_are_the_weights_of_one_process_bit_for_bit(tmp_path):
    """FSDP2. The random bits of an element follow from its place in the whole parameter."""
    run_ranks(tmp_path, "sharded")
    for name, update in SHARDED.items():
        model = wide()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        quantize_optimizer(optimizer, update, model, seed=3)
        steps(model, optimizer)
        found = [torch.load(tmp_path / f"{name} {rank}.pt") for rank in range(2)]
        for weights in (saved["weights"] for saved in found):
            for p, q in zip(model.parameters(), weights, strict=True):
                assert torch.equal(p.detach(), q), name
        assert all(saved["rows"] for saved in found), name


@pytest.mark.full
def test_replicated_parameters_are_equal_on_two_ranks_and_have_moved(tmp_path):
    run_ranks(tmp_path, "replicated")
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(map(torch.equal, first, second))
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 2))
    alone = trained(inner, inner, [torch.cat(pair) for pair in zip(batches_of(0), batches_of(1), strict=True)])
    # the mean over ranks is added up in another order, and stochastic rounding follows: a spacing of bfloat16 each step
    assert all(torch.allclose(a, b, rtol=0, atol=4 * 2.0**-8) for a, b in zip(first, alone, strict=True))
    assert all((p == p.bfloat16().float()).all() for p in first)


if __name__ == "__main__":
    run(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
