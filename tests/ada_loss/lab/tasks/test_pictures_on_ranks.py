"""Pictures of a folder, trained data parallel over gloo with a scale for each layer. As a script, one of the ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import fpsim
from ada_loss import AdaLossScaled
from ada_loss.lab.tasks import find_task

FORMATS = fpsim.Policy(error="e5m2", weight_grad="fp16")
STEPS = 2


def batches_of(name: str, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each rank's own pictures, all of them in memory. A task of its own: a loader's second pass has another order."""
    task = find_task(name)(0)
    if isinstance(task.train, tuple):
        x, y = task.train
    else:
        torch.manual_seed(0)
        x, y = (torch.cat(parts) for parts in zip(*task.train))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    return [(x[chosen], y[chosen]) for chosen in order[: 4 * 2 * STEPS].view(STEPS, 2, 4)[:, rank]]


def as_rank(rank: int, store: str, name: str) -> dict[str, list[str]]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = found_as_rank(rank, name)
    dist.destroy_process_group()
    return found


def found_as_rank(rank: int, name: str) -> dict[str, list[str]]:
    task = find_task(name)(0)
    model = fpsim.quantize(task.model, FORMATS)
    wrapped, optimizer = nn.parallel.DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.125)
    with AdaLossScaled(model):
        for x, y in batches_of(name, rank):
            optimizer.zero_grad()
            task.loss(wrapped(x), y).backward()
            optimizer.step()
    return {"weights": [value.hex() for p in model.parameters() for value in p.flatten().tolist()]}


def found_in_one(name: str) -> dict[str, list[str]]:
    """Both ranks' gradients by hand, one after the other, and their mean."""
    task = find_task(name)(0)
    model = fpsim.quantize(task.model, FORMATS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    with AdaLossScaled(model):
        for both in zip(batches_of(name, 0), batches_of(name, 1)):
            gradients = []
            for x, y in both:
                optimizer.zero_grad()
                task.loss(model(x), y).backward()
                gradients.append([p.grad.clone() for p in model.parameters()])
            for p, a, b in zip(model.parameters(), *gradients):
                p.grad = a / 2 + b / 2  # DDP divides before it adds
            optimizer.step()
    return {"weights": [value.hex() for p in model.parameters() for value in p.flatten().tolist()]}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
@pytest.mark.full
@pytest.mark.parametrize("settings", ["depth=20,size=16", "model=resnet18,size=32"])
def test_two_ranks_train_a_network_on_pictures_as_one_process_would(settings: str, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    if settings.startswith("model") and importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    rng = np.random.default_rng(0)
    for label, channel in (("blue", 2), ("red", 0)):
        (tmp_path / "album" / label).mkdir(parents=True)
        for i in range(24):
            pixels = rng.integers(0, 100, (20, 20, 3)).astype(np.uint8)
            pixels[..., channel] += 120
            image.fromarray(pixels).save(tmp_path / "album" / label / f"{i}.png")
    name = f"pictures={tmp_path / 'album'},{settings}"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, __file__]
    ranks = [
        subprocess.Popen([*command, rank, str(tmp_path / "store"), name], stdout=subprocess.PIPE, env=environment)
        for rank in ("0", "1")
    ]
    try:
        found = [json.loads(rank.communicate(timeout=240)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert found[0] == found[1] == found_in_one(name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(as_rank(int(sys.argv[1]), sys.argv[2], sys.argv[3])))
