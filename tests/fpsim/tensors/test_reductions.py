"""Sums over ranks beside real ones: gloo's all_reduce, and processes that send float32 and round at each hop."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tiers import parametrize
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_reduce as all_reduce_with_gradient
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fpsim
from fpsim import Accumulator, Policy, Products, all_reduce, matmul, round_to

BF16 = ("fp32", torch.float32), ("bf16", torch.bfloat16)
SIZES = (1, 7, 1000, 4097, 200_003)
PRODUCTS = ("fprop", "dgrad", "wgrad")


def part_of(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + size)
    x = torch.randn(size, generator=generator) * torch.exp2(torch.randint(-8, 8, (size,), generator=generator))
    return x.to(dtype)


def given() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 256, generator=generator), torch.randn(33, 256, generator=generator)


def small_model() -> nn.Module:
    torch.manual_seed(5)
    layers = nn.Linear(64, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Dropout(0.2), nn.Linear(300, 900), nn.Linear(900, 7)
    return nn.Sequential(*layers)  # more than a MiB: two buckets


def a_rank(model: nn.Module, rank: int, ranks: int) -> None:
    """The passes of a rank, with a batch and dropout of its own."""
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(8 * ranks, 64, generator=generator), torch.randint(0, 7, (8 * ranks,), generator=generator)
    torch.manual_seed(rank)
    nn.functional.cross_entropy(model(x.chunk(ranks)[rank]), y.chunk(ranks)[rank]).backward()


class ByHand(nn.BatchNorm1d):
    """A batch norm over all ranks by torch's differentiable all_reduce, without running statistics."""

    def forward(self, x: Tensor) -> Tensor:
        def mean(y: Tensor) -> Tensor:
            summed: Tensor = all_reduce_with_gradient(y.sum(0)) / (len(x) * dist.get_world_size())
            return summed

        centred = x - mean(x)
        return centred * torch.rsqrt(mean(centred**2) + self.eps) * self.weight + self.bias


def of_a_dtensor() -> tuple[nn.Module, Tensor, Tensor]:
    """Two layers, their input and a gradient, of few bits: sums are exact in float32, and not in bfloat16."""
    generator = torch.Generator().manual_seed(3)
    w1, w2, x, dy = (
        torch.randint(-8, 9, shape, generator=generator) / 8 for shape in ((48, 72), (40, 48), (12, 72), (12, 40))
    )
    model = nn.Sequential(nn.Linear(72, 48, bias=False), nn.Linear(48, 40, bias=False))
    model.load_state_dict({"0.weight": w1, "1.weight": w2})
    return model, x, dy


def by_dtensor(ranks: int) -> list[Tensor]:
    """A column-wise and a row-wise layer of DTensor's in bfloat16: y, dx and both dw."""
    model, x, dy = of_a_dtensor()
    mesh = init_device_mesh("cpu", (ranks,))
    parallelize_module(model.bfloat16(), mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    x = x.bfloat16().requires_grad_()
    y = model(x)
    y.backward(dy.bfloat16())
    assert x.grad is not None
    return [y.detach().float(), x.grad.float(), *(p.grad.full_tensor().float() for p in model.parameters())]  # type: ignore[union-attr]


def as_e4m3(x: Tensor) -> Tensor:
    saturated = x.numpy().clip(-448, 448)  # where ml_dtypes gives NaN
    return torch.from_numpy(saturated.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


def by_gloo(rank: int, ranks: int, sizes: tuple[int, ...], folder: str) -> None:
    """A sum of each size; and a linear layer whose terms lie on the ranks, and whose parts are summed in bfloat16."""
    x, w = given()
    sent = (x.chunk(ranks, 1)[rank] @ w.chunk(ranks, 1)[rank].T).bfloat16()
    dist.all_reduce(sent)
    if rank == 0:
        torch.save(sent.float(), f"{folder}/layer.pt")

    if (parallel := by_dtensor(ranks)) and rank == 0:
        torch.save(parallel, f"{folder}/dtensor.pt")
    model = small_model()
    model[1], known = ByHand(300), model[1]  # type: ignore[index]
    model[1].load_state_dict(known.state_dict())  # type: ignore[index]
    a_rank(model, rank, ranks)
    for p in model.parameters():
        dist.all_reduce(p.grad)
    if rank == 0:
        torch.save([p.grad / ranks for p in model.parameters()], f"{folder}/synchronised.pt")  # type: ignore[operator]

    def in_bf16(_, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, and not their text
        """DDP's bf16_compress_hook, which asks for NCCL."""
        sent = bucket.buffer().to(torch.bfloat16).div_(ranks)
        future = dist.all_reduce(sent, async_op=True).get_future()
        return future.then(lambda f: f.value()[0].float())

    for hook in (None, in_bf16):
        model = nn.parallel.DistributedDataParallel(small_model())
        if hook is not None:
            model.register_comm_hook(None, hook)
        for _ in range(2):  # buckets are made anew after the first step
            model.zero_grad()
            a_rank(model, rank, ranks)
        if rank == 0:
            torch.save([p.grad for p in model.parameters()], f"{folder}/ddp-{'bf16' if hook else 'fp32'}.pt")
            torch.save([*model.module.buffers()], f"{folder}/buffers.pt")
    for fmt, dtype in BF16:
        for size in sizes:
            x = part_of(rank, size, dtype)
            dist.all_reduce(x)
            if rank == 0:
                torch.save(x, f"{folder}/{fmt}-{size}.pt")


def by_hops(rank: int, ranks: int, sizes: tuple[int, ...], folder: str) -> None:
    """A ring of processes that gloo has no dtype for: what arrives is added to what is here, and rounded."""
    for size in sizes:
        x = as_e4m3(part_of(rank, size, torch.float32))
        chunk = 2 * -(-size // (2 * ranks))
        pieces = list(x.split(chunk)) + [x.new_zeros(0)] * (ranks - len(x.split(chunk)))
        for hop in range(1, ranks):  # chunk c is at rank c - 1 - hop after so many hops
            sent, wanted = pieces[(rank + hop) % ranks], pieces[(rank + 1 + hop) % ranks]
            arrived = torch.empty_like(wanted)
            request = dist.isend(sent, (rank - 1) % ranks)
            dist.recv(arrived, (rank + 1) % ranks)
            request.wait()
            pieces[(rank + 1 + hop) % ranks] = as_e4m3(arrived + wanted)
        torch.save(pieces[rank], f"{folder}/{size}-{rank}.pt")


def _begin(rank: int, ranks: int, port: int, work: Callable[..., None], rest: tuple[Any, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    work(rank, ranks, *rest)
    dist.destroy_process_group()


def run(ranks: int, work: Callable[..., None], *rest: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_begin, args=(ranks, port, work, rest), nprocs=ranks)  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """So many ranks, and the folder of what their sums are."""
    folder = tmp_path_factory.mktemp("ranks")
    run(request.param, by_gloo, sizes_of(request.param), str(folder))
    return request.param, folder


def sizes_of(ranks: int) -> tuple[int, ...]:
    return (*SIZES, 1_600_001) if ranks < 4 else SIZES  # float32 in more segments than two of a rank


OF_RANKS = parametrize("real", [3, 2, 4, 8], keep={3}, indirect=True)


@OF_RANKS
def test_a_ring_has_the_bits_of_gloo(real: tuple[int, Path]) -> None:
    ranks, folder = real
    for fmt, dtype in BF16:
        for size in sizes_of(ranks):
            parts = [part_of(rank, size, dtype) for rank in range(ranks)]
            assert torch.equal(all_reduce(parts, fmt), torch.load(folder / f"{fmt}-{size}.pt")), (fmt, size)
    if ranks > 2:
        assert not torch.equal(all_reduce(parts, fmt), all_reduce(parts, fmt, "linear"))


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_ring_in_a_format_that_gloo_lacks_rounds_at_each_hop(ranks: int, tmp_path: Path) -> None:
    run(ranks, by_hops, SIZES, str(tmp_path))
    for size in SIZES:
        parts = [part_of(rank, size, torch.float32) for rank in range(ranks)]
        found = all_reduce(parts, "e4m3fn", rounding="nearest_even")
        order = [(c + 0) % ranks for c in range(ranks)]
        assert torch.equal(found, torch.cat([torch.load(tmp_path / f"{size}-{rank}.pt") for rank in order]))


def test_a_float64_is_rounded_once_before_it_is_sent() -> None:
    x = torch.tensor(
        [1 + 2.0**-8 + 2.0**-40], dtype=torch.float64
    )  # above a tie of bfloat16 by less than a float32 has
    assert torch.equal(all_reduce([x], "bf16"), torch.tensor([1 + 2.0**-7], dtype=torch.float64))
    with pytest.raises(NotImplementedError, match="all_reduce"):
        torch.func.vmap(lambda z: all_reduce([z, z], "bf16"))(x[None])


def test_parts_that_saturate_do_so_when_they_are_summed() -> None:
    a, words = torch.full((1, 4), 200.0), {"splits": 2, "split_format": "fp16"}
    assert matmul(a, a.T, Accumulator("fp16", overflow="saturate", **words)) == 65504
    assert matmul(a, a.T, Accumulator("fp16", **words)) == torch.inf


def test_a_convolution_of_no_images_has_an_accumulator_too() -> None:
    model = fpsim.quantize(nn.Conv2d(6, 8, 3), Policy(products=Products(accumulator="fp16")))
    assert model(torch.randn(0, 6, 9, 9)).shape == (0, 8, 7, 7)


def test_trees_and_lines_add_in_the_order_of_their_names() -> None:
    parts = [round_to(part_of(rank, 500, torch.float32), "bf16") for rank in range(5)]
    bf16 = [part.bfloat16() for part in parts]
    line = bf16[0]
    for part in bf16[1:]:
        line = line + part
    assert torch.equal(all_reduce(parts, "bf16", "linear"), line.float())
    tree = ((bf16[0] + bf16[1]) + (bf16[2] + bf16[3])) + bf16[4]
    assert torch.equal(all_reduce(parts, "bf16", "tree"), tree.float())
    assert torch.equal(all_reduce(bf16, "bf16", "tree"), tree)  # of the dtype that came
    assert torch.equal(all_reduce(parts[:1], "e4m3fn"), round_to(parts[0], "e4m3fn"))


def test_stochastic_sums_over_ranks_are_unbiased() -> None:
    torch.manual_seed(0)
    parts = [torch.full((20_000,), 1.0), torch.full((20_000,), 2.0**-10), torch.full((20_000,), 2.0**-11)]
    mean = float(all_reduce(parts, "bf16", rounding="stochastic").mean())
    assert abs(mean - 1.00146484375) < 5 * 2.0**-7 * 0.5 / 20_000**0.5
    assert float(all_reduce(parts, "bf16").mean()) == 1


@parametrize("ranks", [4, 3], keep={4})
@pytest.mark.parametrize("order", ["ring", "tree", "linear"])
def test_a_product_in_splits_is_the_sum_of_its_parts(order: str, ranks: int) -> None:
    torch.manual_seed(0)
    a, b, bias = torch.randn(6, 50), torch.randn(50, 9), torch.randn(9)
    for inner in (Accumulator("fp32", order="torch"), Accumulator("fp16", chunk=8)):
        words = {f: getattr(inner, f) for f in ("format", "chunk", "order")}
        split = Accumulator(**words, splits=ranks, split_format="bf16", split_order=order)
        parts = [matmul(x, y, inner) for x, y in zip(a.chunk(ranks, 1), b.chunk(ranks, 0), strict=True)]
        total = all_reduce(parts, "bf16", order)
        assert torch.equal(matmul(a, b, split), total)
        assert torch.equal(matmul(a, b, split, bias), round_to(total + bias, "bf16"))
        assert fpsim.as_accumulator(repr(split)) == split
    few = Accumulator("fp32", order="torch", splits=64, split_format="bf16", split_order="linear")
    assert torch.isfinite(matmul(a, b, few)).all()  # more ranks than terms


@pytest.mark.usefixtures("one_thread")
@OF_RANKS
@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
def test_gradients_of_ranks_have_the_bits_of_ddp(fmt: str, real: tuple[int, Path]) -> None:
    ranks, folder = real
    model = small_model()
    emulated = fpsim.Ranks(model, fmt)
    for _ in range(2):
        model.zero_grad()
        for rank in range(ranks):
            with emulated.rank() as number:
                a_rank(model, number, ranks)
            assert number == rank
        assert emulated.reduce() == ranks
    expected = torch.load(folder / f"ddp-{fmt}.pt")
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p.grad, grad)  # type: ignore[arg-type]
    for mine, real_one in zip(model.buffers(), torch.load(folder / "buffers.pt"), strict=True):
        assert torch.equal(mine, real_one)


def test_a_rank_that_fails_did_not_run_and_nothing_is_lost() -> None:
    model, x = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), torch.randn(4, 3)
    model(x).square().sum().backward()
    before, mean = model[0].weight.grad.clone(), model[1].running_mean.clone()  # type: ignore[union-attr,operator]
    ranks = fpsim.Ranks(model, averages=False)

    def fail() -> None:
        with ranks.rank():
            model(x).square().sum().backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.equal(model[0].weight.grad, before)  # type: ignore[arg-type]
    assert torch.equal(model[1].running_mean, mean)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="No rank ran"):
        ranks.reduce()
    for _ in range(2):
        with ranks.rank():
            model(x).square().sum().backward()
    assert ranks.reduce() == 2
    assert torch.allclose(model[0].weight.grad, 3 * before, atol=1e-5)  # added to what was there
    for bad in ([[nn.Parameter(x)]], [[model[0].weight, model[0].weight]]):
        with pytest.raises(TypeError, match="no parameter of the model, or is there twice"):
            fpsim.Ranks(model, buckets=bad)  # type: ignore[arg-type]
    some = fpsim.Ranks(model, buckets=[[model[0].weight]])  # type: ignore[list-item]
    with some.rank():
        model(x).sum().backward()
    for _ in range(2):  # the ranks stay
        with pytest.raises(TypeError, match="in no bucket"):
            some.reduce()


def test_a_parameter_that_no_rank_uses_has_no_gradient_and_one_that_some_use_has() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1), "c": nn.Linear(2, 1)})
    ranks, x = fpsim.Ranks(model), torch.ones(1, 2)
    for names in ("a", "ab"):
        with ranks.rank():
            sum(model[name](x).sum() for name in names).backward()  # type: ignore[union-attr]
    ranks.reduce()
    assert torch.equal(model["a"].weight.grad, torch.ones(1, 2))  # type: ignore[arg-type]
    assert torch.equal(model["b"].weight.grad, torch.full((1, 2), 0.5))  # type: ignore[arg-type]
    assert model["c"].weight.grad is None


@OF_RANKS
def test_a_layer_whose_terms_lie_on_ranks_has_the_bits_of_real_ranks(real: tuple[int, Path]) -> None:
    """DTensor's RowwiseParallel sums the forward product over ranks; its gradients are not summed."""
    ranks, folder = real
    layer, (x, w) = nn.Linear(256, 33, bias=False), given()
    with torch.no_grad():
        layer.weight.copy_(w)
    rowwise = Accumulator("fp32", order="torch", splits=ranks, split_format="bf16")
    model = fpsim.quantize(layer, Policy(products=Products(accumulator=(rowwise, None, None))))
    y, expected = model(x.requires_grad_()), torch.load(folder / "layer.pt")
    assert torch.allclose(y, expected, rtol=2.0**-7, atol=2.0**-5)  # a rank's own sums are torch's: a bit may differ
    assert (y == expected).float().mean() > 0.95
    y.sum().backward()
    dy = torch.ones(12, 33)
    for found, wanted in ((x.grad, dy @ w), (model.weight.grad, dy.T @ x.detach())):
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-4)  # type: ignore[arg-type]


@OF_RANKS
def test_column_and_row_wise_layers_have_the_bits_of_dtensors_own(real: tuple[int, Path]) -> None:
    ranks, folder = real
    over = Accumulator("fp32", order="torch", splits=ranks, split_format="bf16")
    roles = dict.fromkeys(("weight", "activation", "error", "weight_grad"), "bf16")
    columnwise, rowwise = Products(accumulator=(None, over, None)), Products(accumulator=(over, None, None))
    model, x, dy = of_a_dtensor()
    model = fpsim.quantize(
        model, Policy(**roles, products=columnwise, overrides={"1": Policy(**roles, products=rowwise)})
    )
    y = model(x.requires_grad_())
    y.backward(dy)
    expected = torch.load(folder / "dtensor.pt")
    for found, wanted in zip([y, x.grad, *(p.grad for p in model.parameters())], expected, strict=True):
        assert torch.equal(found, wanted)  # type: ignore[arg-type]


@OF_RANKS
def test_synchronised_batch_norms_meet_as_real_ranks_do(real: tuple[int, Path]) -> None:
    ranks, folder = real
    torch.set_num_threads(1)
    model = small_model()
    emulated = fpsim.Ranks(model, synchronised=["1"])
    emulated.run(lambda rank: a_rank(model, rank, ranks), range(ranks))
    assert emulated.reduce() == ranks
    largest = max(p.grad.abs().max() for p in model.parameters())  # type: ignore[union-attr]
    for p, expected in zip(model.parameters(), torch.load(folder / "synchronised.pt"), strict=True):
        # sums of 8 numbers a rank and of 900 products, each within half an ulp; a bias before a batch norm has 0
        assert (p.grad - expected).abs().max() < 1000 * 2.0**-24 * largest  # type: ignore[operator]
    whole, x = small_model(), torch.randn(8 * ranks, 64, generator=torch.Generator().manual_seed(7))
    whole(x)
    for buffer, expected in zip(model.buffers(), whole.buffers(), strict=True):
        assert torch.allclose(buffer, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "mxfp8_e4m3"])
def test_ranks_with_one_batch_for_all_are_as_one_rank_with_it(fmt: str) -> None:
    layers = nn.Conv2d(3, 8, 3), nn.SyncBatchNorm(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4)
    torch.manual_seed(1)
    plain, x = nn.Sequential(*layers), torch.randn(4, 3, 6, 6)
    alone, together = (fpsim.quantize(copy.deepcopy(plain), fmt) for _ in range(2))
    alone(x).square().sum().backward()
    emulated = fpsim.Ranks(together)
    emulated.run(lambda batch: together(batch).square().sum().backward(), [x, x, x])
    emulated.reduce()
    largest = max(p.grad.norm() for p in alone.parameters())  # type: ignore[union-attr]  # of a bias before it: 0
    bound = {"fp32": 2.0**-18, "bf16": 2.0**-8, "mxfp8_e4m3": 2.0**-8}[fmt]  # where a last bit of it is rounded away
    for p, q in zip(together.parameters(), alone.parameters(), strict=True):
        assert (p.grad - q.grad).norm() < bound * largest  # type: ignore[operator]


@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "an empty batch", "torch.batch_norm"])
def test_statistics_of_all_ranks_wherever_they_are_asked_for(way: str) -> None:
    class Direct(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            mean, var = self.running_mean, self.running_var
            return torch.batch_norm(x, self.weight, self.bias, mean, var, self.training, 0.1, self.eps, False)

    class Again(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=way == "reentrant")  # type: ignore[no-any-return]

    torch.manual_seed(2)
    norm = Direct(6) if way == "torch.batch_norm" else nn.BatchNorm1d(6)
    layers = nn.Linear(4, 6), norm, nn.Tanh(), nn.Linear(6, 2)
    model = Again(*layers) if "reentrant" in way else nn.Sequential(*layers)
    whole, x = copy.deepcopy(model), torch.randn(9, 4)
    sizes = [4, 0, 5] if way == "an empty batch" else [3, 3, 3]
    emulated = fpsim.Ranks(model, synchronised=["1"], averages=False)
    emulated.run(lambda batch: model(batch.requires_grad_()).square().sum().backward(), x.clone().split(sizes))
    emulated.reduce()
    whole(x.clone().requires_grad_()).square().sum().backward()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]
    for name in ("running_mean", "running_var"):
        assert torch.allclose(getattr(model[1], name), getattr(whole[1], name), rtol=1e-5, atol=1e-6)


def test_ranks_run_under_the_autocast_around_them_and_refuse_what_threads_miss() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    ranks = fpsim.Ranks(model, synchronised=["1"])
    with torch.autocast("cpu", torch.bfloat16):
        assert (
            ranks.run(lambda x: model[0](x).dtype if model(x) is not None else None, torch.ones(2, 3, 4))
            == [torch.bfloat16] * 2
        )
    ranks.reduce()
    with fpsim.emulate("bf16"), pytest.raises(RuntimeError, match="Use it in the step"):
        ranks.run(lambda x: model(x), torch.ones(2, 3, 4))
    with pytest.raises(RuntimeError, match=r"no rank called F\.batch_norm there"):
        ranks.run(lambda x: model[0](x), torch.ones(2, 3, 4))
    assert type(torch.batch_norm) is type(torch.relu)


def test_ranks_that_do_not_meet_are_an_error_and_change_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].weight.grad = torch.ones(4, 4)
    before = [b.clone() for b in model.buffers()]
    x = torch.randn(3, 8, 4)

    def step(rank: int) -> None:
        if rank == 2:
            return
        model(x[rank]).sum().backward()

    def fails(rank: int) -> None:
        model(x[rank]).sum().backward()
        if rank == 1:
            raise KeyError("mine")

    emulated = fpsim.Ranks(model, synchronised=[nn.BatchNorm1d])
    for run, error, words in (
        (step, RuntimeError, "ended its step.*Expected: ranks that call the same"),
        (fails, KeyError, "mine"),
    ):
        with pytest.raises(error, match=words):
            emulated.run(run, range(3))
        assert torch.equal(model[0].weight.grad, torch.ones(4, 4))
        assert model[2].weight.grad is None
        assert all(map(torch.equal, before, model.buffers()))
    with pytest.raises(RuntimeError, match=r"Expected: ranks\.run"), emulated.rank():
        pass
    emulated.run(lambda rank: model(x[rank]).sum().backward(), range(3))
    with pytest.raises(RuntimeError, match="in between"):
        emulated.run(lambda rank: None, range(3))
    assert emulated.reduce() == 3


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("1", TypeError, "a list of patterns"),
        ([3], TypeError, "module classes"),
        (["9"], ValueError, "matches no module"),
        (["0"], TypeError, "Expected: batch norms with running statistics"),
    ],
)
def test_what_cannot_be_synchronised_is_an_error(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fpsim.Ranks(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), synchronised=given)


@pytest.mark.parametrize("kind", ["linear", "convolution", "matmul"])
def test_each_product_has_an_accumulator_of_its_own(kind: str) -> None:
    torch.manual_seed(2)
    narrow = Accumulator("bf16")
    layers: dict[str, tuple[nn.Module, Tensor]] = {
        "linear": (nn.Linear(24, 8), torch.randn(5, 24)),
        "convolution": (nn.Conv2d(3, 4, 3, padding=1), torch.randn(2, 3, 6, 6)),
        "matmul": (_Matmul(), torch.randn(5, 24)),
    }
    layer, x = layers[kind]
    found = {}
    alone = {p: tuple(narrow if p == q else None for q in PRODUCTS) for p in PRODUCTS}
    for name, of in {"fp32": None, "bf16": narrow, **alone}.items():
        model = fpsim.quantize(layer, Policy(products=Products(accumulator=of)))
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
        found[name] = [y.detach(), leaf.grad, next(model.parameters()).grad]
    for i, product in enumerate(PRODUCTS):
        assert torch.equal(found[product][i], found["bf16"][i])  # type: ignore[arg-type]
        for j in {0, 1, 2} - {i}:
            assert torch.equal(found[product][j], found["fp32"][j])  # type: ignore[arg-type]
        assert not torch.equal(found["bf16"][i], found["fp32"][i])  # type: ignore[arg-type]


class _Matmul(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(24, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def test_a_compiled_product_in_splits_equals_eager() -> None:
    torch.manual_seed(3)
    rowwise = Accumulator("fp32", order="torch", splits=3, split_format="e5m2", split_order="tree")
    model = fpsim.quantize(nn.Linear(30, 4), Policy(products=Products(accumulator=rowwise)))
    x = torch.randn(7, 30)
    assert torch.equal(torch.compile(model, backend="aot_eager")(x), model(x))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"split_format": "bf16"}, "without splits"),
        ({"split_order": "tree"}, "without splits"),
        ({"splits": 1}, "not a number of parts"),
        ({"splits": 2, "split_order": "star"}, "Unknown split_order"),
        ({"splits": 2, "split_format": "e8m0fnu"}, "cannot accumulate"),
    ],
)
def test_splits_that_do_not_go_together_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Accumulator("fp32", **words)


def test_wrong_ranks_are_refused() -> None:
    x = torch.ones(3)
    for tensors, error, message in (
        ([], ValueError, "at least one"),
        ([x, torch.ones(4)], ValueError, r"tensors\[1\] has shape \(4,\)"),
        ([x, x.bfloat16()], ValueError, "bfloat16"),
        ([x, torch.ones(3, dtype=torch.int64)], TypeError, r"tensors\[1\]"),
    ):
        with pytest.raises(error, match=message):
            all_reduce(tensors)
    with pytest.raises(ValueError, match="Unknown order"):
        all_reduce([x], "bf16", "star")
    with pytest.raises(ValueError, match="rounding"):
        all_reduce([x], "bf16", rounding="up")
    with pytest.raises(ValueError, match=r"accumulator=.* has 2"):
        Products(accumulator=("bf16", None))
