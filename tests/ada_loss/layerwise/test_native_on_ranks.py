"""Native per-layer scaling on two ranks: DDP, and FSDP2 with float16 parameters. As a script, one of the ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ada_loss
from ada_loss.layerwise.native import NativeScaling
from ada_loss.layerwise.native_hooks import NativePass
from ada_loss.rules.layer import Fixed

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static graph": {"static_graph": True},
    "views of buckets": {"gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
    "no_sync": {},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, uses_all: bool = True) -> Tensor:
        x = torch.tanh(self.first(x))
        x = self.last(x + torch.tanh(self.inner(x)) * 0.5)
        return self.unused(x) if uses_all else x


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(rank: int, size: int = 6) -> Tensor:
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(rank))


def replicated(kind: str, rank: int, *, is_scaled: bool) -> list[Tensor | None]:
    """Gradients after two steps: the second one has DDP's rebuilt buckets."""
    model = net()
    wrapped = DistributedDataParallel(model, **KINDS[kind])
    count = 3 * rank  # other powers on each rank

    def choose(*_: Any) -> int:
        nonlocal count
        count += 5
        return count % 13 - 4

    scale = NativePass({}, choose).scale if is_scaled else lambda loss: loss
    for _ in range(2):
        wrapped.zero_grad()
        if kind == "no_sync":
            with wrapped.no_sync():
                scale(wrapped(batch(rank + 2)).square().mean()).backward()
        scale(wrapped(batch(rank), uses_all=kind != "unused parameters").square().mean()).backward()
    return [p.grad for p in model.parameters()]


def sharded(dtype: torch.dtype | None, rank: int, size: float, scale: str, sites: list[str] | None = None) -> Any:
    """The whole gradients of a model in shards. sites: is filled with the names of what was scaled."""
    model, mesh = net(), init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in (model.first, model.inner, model.last, model.unused, model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    scaled: Any = lambda loss: loss
    if scale == "forced":
        count = 0

        def choose(*_: Any) -> int:
            nonlocal count
            count += 5
            return count % 13 - 4

        scaled = NativePass({}, choose).scale
    elif scale == "layers":
        layers = NativeScaling(model)
        scaled = ada_loss.GradScaler(layers=layers).scale
    for _ in range(2):  # the second pass has what FSDP made in the first
        model.zero_grad()
        x = batch(rank) if dtype is None else batch(rank).to(dtype)
        scaled(model(x).float().square().mean() * size).backward()
    if sites is not None:
        sites += layers.log2_scales()
    return [p.grad.full_tensor() for p in model.parameters()]


SMALL = 2.0**-24


def backs_off(rank: int) -> tuple[int, bool]:
    """How many of thirty steps were skipped, where the rule asks for too much, and whether the last one was."""
    model, mesh = net(), init_device_mesh("cpu", (2,))
    for layer in (model.first, model.inner, model.last, model.unused, model):
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    layers = NativeScaling(model, Fixed(2.0**10))
    scaler = ada_loss.GradScaler(layers=layers)
    optimizer, skipped = torch.optim.SGD(model.parameters(), 1e-3), []
    for _ in range(30):
        scaler.scale(model(batch(rank).half()).float().square().mean()).backward()
        before = model.first.weight.detach().clone().to_local()  # type: ignore[attr-defined]
        scaler.step(optimizer)
        skipped.append(torch.equal(before, model.first.weight.detach().to_local()))  # type: ignore[attr-defined]
        scaler.update()
        optimizer.zero_grad()
    return sum(skipped), skipped[-1]


def found_as_rank(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in KINDS:
        plain, ours = (replicated(kind, rank, is_scaled=s) for s in (False, True))
        found[kind] = [a is b if b is None else torch.equal(a, b) for a, b in zip(ours, plain, strict=True)]
    plain, ours = (sharded(None, rank, 1.0, scale) for scale in ("none", "forced"))
    found["shards"] = [torch.equal(a, b) for a, b in zip(ours, plain, strict=True)]
    found["sites"] = []
    true, half, layers = (
        sharded(dtype, rank, SMALL, scale, found["sites"] if scale == "layers" else None)
        for dtype, scale in ((None, "none"), (torch.float16, "none"), (torch.float16, "layers"))
    )
    count = sum(g.numel() for g in true)
    found["lost"] = sum(int((g == 0).sum()) for g in half) / count
    found["lost with layers"] = sum(int(((g == 0) & (t != 0)).sum()) for g, t in zip(layers, true, strict=True)) / count
    found["errors"] = [float((g - t).norm() / t.norm()) for g, t in zip(layers, true, strict=True)]
    found["skipped"], found["last was skipped"] = backs_off(rank)
    return found


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
@pytest.mark.full
def test_on_two_ranks_gradients_are_those_of_a_plain_pass_and_shards_in_float16_keep_small_ones(tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(__file__).parents[3])}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, rank, str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in ("0", "1")
    ]
    try:
        found = [json.loads(rank.communicate(timeout=200)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for each in ranks:
            each.kill()
    for of_rank in found:
        for kind in (*KINDS, "shards"):
            assert of_rank[kind] == [True] * 8, kind
        assert of_rank["lost"] > 0.9  # guards the next lines
        assert of_rank["lost with layers"] <= 0.001
        # four products in float16, each with a relative error of 2**-11 and sums of 16 terms of it
        assert max(of_rank["errors"]) <= 2.0**-7
        assert {"inner:linear", "last:linear", "unused:linear"} <= set(of_rank["sites"])
        assert of_rank["skipped"] <= 15
        assert not of_rank["last was skipped"]
    assert found[0]["skipped"] == found[1]["skipped"]  # ranks skip the same steps


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2)
    print(json.dumps(found_as_rank(int(sys.argv[1]))))
    dist.destroy_process_group()
