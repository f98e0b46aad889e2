"""What an operation writes to is known from its schema; what torch.distributed does between modules passes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tiers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize
from torch.utils.checkpoint import checkpoint

import fpsim
from fpsim.torch_internals import written_arguments


@torch.library.custom_op("fpsim_tests::gather", mutates_args=("buffer",))
def gather(buffer: Tensor, x: Tensor) -> Tensor:
    buffer.add_(x)
    return x * 2


@torch.library.custom_op("fpsim_tests::gather_second", mutates_args=("buffer",))
def gather_second(x: Tensor, buffer: Tensor) -> None:
    buffer.copy_(x * 3)


@pytest.mark.parametrize("fmt", ["fp32", "fp16", "e4m3fn"])
def test_a_buffer_that_an_operation_writes_to_is_written_to(fmt: str) -> None:
    buffer, second, x = torch.zeros(3), torch.zeros(3), torch.tensor([0.25, 1.0, -2.0])  # values of each format
    with fpsim.emulate(fmt):
        doubled = gather(buffer, x)
        gather(buffer=buffer, x=x)
        gather_second(x, second)
    assert torch.equal(buffer, 2 * x)
    assert torch.equal(doubled, 2 * x)
    assert torch.equal(second, 3 * x)


def test_what_is_written_is_rounded_where_it_is_used() -> None:
    buffer = torch.zeros(1)
    with fpsim.emulate("e4m3fn"):
        gather(buffer, torch.tensor([1.0]) * 1.0)
        gather(buffer, torch.tensor([0.0625]) * 1.0)
        used = buffer * 1.0
    assert used.item() == 1.0  # 1.0625 lies half way between 1 and 1.125: a tie goes to the even one


def test_the_statistics_of_a_fused_observer_move() -> None:
    observer = fpsim.quantize(FusedMovingAvgObsFakeQuantize(), "fp16")
    plain = FusedMovingAvgObsFakeQuantize()
    for size in (1.0, 4.0):
        x = torch.tensor([-2.0, 0.5, 1.0]) * size
        observer(x)
        plain(x)
    for name in ("min_val", "max_val"):
        moved = getattr(observer.activation_post_process, name)
        assert torch.equal(moved, getattr(plain.activation_post_process, name))


def test_a_schema_says_what_is_written() -> None:
    assert written_arguments(torch.ops.aten.add_.Tensor) == ({0}, {"self"})
    assert written_arguments(torch.ops.aten.add.Tensor) == (set(), set())
    assert written_arguments(torch.ops.fpsim_tests.gather_second.default) == ({1}, {"buffer"})
    assert written_arguments(torch.add) == (set(), set())  # its out= is not an argument in the order
    assert 0 in written_arguments(torch.relu_)[0]


# FSDP2 on two ranks


class Recomputed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def make(recomputes: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    kind = Recomputed if recomputes else nn.Sequential
    inner = kind(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh())  # the last tensor saved is the result
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), inner, nn.Linear(16, 4))


def train(model: nn.Module) -> list[Tensor]:
    generator, optimizer = torch.Generator().manual_seed(1), torch.optim.SGD(model.parameters(), lr=0.02)
    outputs = []
    for _ in range(5):
        optimizer.zero_grad()
        out = model(torch.randn(4, 8, generator=generator))
        out.square().sum().backward()
        optimizer.step()
        outputs.append(out.detach().clone())
    return outputs


def train_sharded(rank: int, fmt: str, recomputes: bool, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/rendezvous")
    mesh = init_device_mesh("cpu", (2,))
    model = fpsim.quantize(make(recomputes), fmt)
    for layer in (model[0], model[2], model[3], model):
        fully_shard(layer, mesh=mesh)
    outputs = train(model)
    parameters = [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]
    if rank == 0:
        torch.save([*outputs, *parameters], Path(folder, "sharded.pt"))
    dist.barrier()
    dist.destroy_process_group()


@tiers.parametrize(
    ("fmt", "recomputes"), [("fp32", False), ("bf16", False), ("bf16", True)], keep=lambda _, recomputes: recomputes
)
def test_fully_sharded_training_on_two_ranks_is_that_of_one_process(fmt: str, recomputes: bool, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = fpsim.quantize(make(), fmt)
    expected = [*train(model), *(p.detach() for p in model.parameters())]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.start_processes(train_sharded, args=(fmt, recomputes, str(tmp_path)), nprocs=2, start_method="spawn")
    for got, want in zip(torch.load(tmp_path / "sharded.pt"), expected, strict=True):
        # the mean of two equal gradients is exact; a step of SGD may be fused otherwise over a shard: one ulp
        assert torch.allclose(got, want, rtol=2**-23, atol=2**-29)
        if fmt == "bf16":
            assert torch.equal(got, want)
