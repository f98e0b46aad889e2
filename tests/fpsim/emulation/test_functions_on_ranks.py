"""Own autograd Functions, and clipped gradients, under DistributedDataParallel. As a script, one of the ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from module_functions import Product
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fpsim import Operand, Policy, Products, quantize, round_to

FORMATS = ("native", "bf16", "e4m3fn", "clips")
PASSES = 2  # the second one has DDP's rebuilt buckets


class Gate(torch.autograd.Function):
    """Of several operations in both passes, in the newer form."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        return x * torch.sigmoid(x) * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * scale * (s + x * s * (1 - s)), (g * x * s).sum(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.scale = (
            nn.Linear(8, 16, bias=False),
            nn.Linear(16, 4),
            nn.Parameter(torch.rand(16)),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = Product.apply(x * 1.0, self.inner.weight)
        if h.requires_grad:
            h.register_hook(lambda g: g * 0.7)
        return self.outer(Gate.apply(h, self.scale))  # type: ignore[no-any-return]


def made(fmt: str) -> nn.Module:
    if fmt == "clips":  # layers of torch's, whose operands are those of the forward product
        torch.manual_seed(0)
        operand = Operand("e2m1fn per 8 mse(floor,ceil)", ste="clip")
        products = Products(fprop=(operand, operand), backward="dequantized")
        return quantize(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), Policy(products=products))
    return Net().bfloat16() if fmt == "native" else quantize(Net(), fmt)


def gradients(model: nn.Module, rank: int, times: int = 1) -> list[Tensor]:
    dtype = next(model.parameters()).dtype
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank)).to(dtype)
    for _ in range(times):
        model.zero_grad()
        model(x).backward(torch.ones(6, 4, dtype=dtype))
    return [p.grad.float() for p in model.parameters() if p.grad is not None]


def as_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {fmt: gradients(DistributedDataParallel(made(fmt)), rank, PASSES) for fmt in FORMATS}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 1])
def test_gradients_of_one_process_are_in_the_format_and_those_of_native_code(rank: int) -> None:
    found, native = gradients(made("bf16"), rank), gradients(made("native"), rank)
    for x, y in zip(found, native, strict=True):
        assert torch.equal(x, y)
    assert all(torch.equal(x, round_to(x, "e4m3fn")) for x in gradients(made("e4m3fn"), rank))


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
@pytest.mark.slow
def test_ranks_have_the_mean_of_the_gradients_of_single_processes(tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, __file__]
    ranks = [subprocess.Popen([*command, rank, str(tmp_path)], env=environment) for rank in ("0", "1")]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    finally:
        for each in ranks:
            each.kill()
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for fmt, found in first.items():
        alone = zip(*(gradients(made(fmt), rank) for rank in (0, 1)), strict=True)
        for x, other, (a, b) in zip(found, second[fmt], alone, strict=True):
            mean = (a + b) / 2  # of two numbers of few bits: exact in float32, native code rounds it
            assert torch.equal(x, other)
            assert torch.equal(x, round_to(mean, "bf16") if fmt == "native" else mean)
    for x, native in zip(first["bf16"], first["native"], strict=True):
        assert torch.equal(round_to(x, "bf16"), native)


if __name__ == "__main__":
    torch.set_num_threads(1)
    as_rank(int(sys.argv[1]), sys.argv[2])
