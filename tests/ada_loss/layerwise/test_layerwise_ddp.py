"""Adaptive scaling under DistributedDataParallel: each rank has scales of its own. As a script, one of the ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fpsim
from ada_loss import AdaLossScaled, Recorder


def model_of() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    return fpsim.quantize(net, fpsim.Policy(error="e5m2", weight_grad="e5m2"))


def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))
    return model(x).square().mean() * 10.0 ** -(4 + 4 * rank)  # ten thousand times smaller on the second rank


def as_rank(rank: int, store: str) -> dict[str, list[float]]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = found_as_rank(rank)  # its model may not outlive the process group: see test_updates_on_ranks.run
    dist.destroy_process_group()
    return found


def found_as_rank(rank: int) -> dict[str, list[float]]:
    model = model_of()
    wrapped = nn.parallel.DistributedDataParallel(model)
    with AdaLossScaled(model) as handle:
        handle.observer = recorder = Recorder()
        for _ in range(2):  # the second pass has DDP's rebuilt buckets
            wrapped.zero_grad()
            loss_of(wrapped, rank).backward()
    gradients = [value for p in model.parameters() for value in p.grad.flatten().tolist()]
    scales = [row["log2_scale"] for row in recorder.rows() if row["role"] == "error"]
    return {"gradients": gradients, "scales": scales}


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
@pytest.mark.full
def test_gradients_are_unscaled_before_they_are_reduced(tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, __file__]
    ranks = [
        subprocess.Popen([*command, rank, str(tmp_path / "store")], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in ("0", "1")
    ]
    try:
        found = [json.loads(rank.communicate(timeout=120)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for each in ranks:
            each.kill()
    alone = []
    for rank in (0, 1):
        model = model_of()
        with AdaLossScaled(model):
            loss_of(model, rank).backward()
        alone.append([p.grad for p in model.parameters()])
    mean = [value for a, b in zip(*alone, strict=True) for value in ((a + b) / 2).flatten().tolist()]
    assert found[0]["gradients"] == found[1]["gradients"] == mean
    assert min(found[1]["scales"]) > max(found[0]["scales"][:1])
    assert found[0]["scales"] != found[1]["scales"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(as_rank(int(sys.argv[1]), sys.argv[2])))
