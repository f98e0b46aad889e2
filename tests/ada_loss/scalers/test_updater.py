"""The whole step in one call: against the same step written out, alone and on two ranks."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ada_loss import GradScaler, Updater, loss_rule
from ada_loss.scalers.gradients import all_reduce_

TRACES = json.loads((Path(__file__).parents[2] / "data" / "golden_traces.json").read_text())


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def feeder(batches: list[Any]) -> Callable[[], Any]:
    return iter(batches).__next__


def batches(count: int, seed: int = 1) -> list[torch.Tensor]:
    return list(torch.randn(count, 3, 4, generator=torch.Generator().manual_seed(seed)).unbind())


def with_overflow(batch: torch.Tensor) -> torch.Tensor:
    return batch * math.inf


def updater_of(model: nn.Module, data: list[Any], scaler: GradScaler, **options: Any) -> Updater:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    return Updater(optimizer, lambda x: model(x).pow(2).sum(), feeder(data), scaler, **options)


def step_by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[torch.Tensor],
    weight_decay: float = 0.0,
    clip: float | None = None,
) -> float:
    """zero, accumulate, clip, decay, step: no scaling."""
    optimizer.zero_grad()
    total = 0.0
    for x in data:
        loss = model(x).pow(2).sum()
        loss.backward()
        total = total + loss.detach()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    with torch.no_grad():
        for p in model.parameters():
            p.grad += weight_decay * p
    optimizer.step()
    return float(total)


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("clip", [None, 0.25])
@pytest.mark.parametrize("weight_decay", [None, 0.0, 0.25])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("system", ["nnabla", "torch", "off"])
def test_an_update_is_the_step_written_out(
    system: str, accumulate: int, weight_decay: float | None, clip: float | None
) -> None:
    model = model_of()
    by_hand = copy.deepcopy(model)
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.125)
    data = batches(3 * accumulate)
    options = {"accumulate": accumulate, "weight_decay": weight_decay, "clip": clip}
    updater = updater_of(model, data, GradScaler(system), **options)
    for i in range(3):
        some = data[i * accumulate : (i + 1) * accumulate]
        expected = step_by_hand(by_hand, optimizer, some, weight_decay or 0.0, clip)
        assert updater.update() == expected
        assert_same(model, by_hand)


def test_an_overflow_is_retried_with_fresh_data_and_a_smaller_scale() -> None:
    model = model_of()
    by_hand = copy.deepcopy(model)
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.125)
    data = batches(4)
    scaler = GradScaler("nnabla", scale=8.0)
    updater = updater_of(model, [with_overflow(data[0]), with_overflow(data[1]), data[2], data[3]], scaler)
    assert updater.update() == step_by_hand(by_hand, optimizer, [data[2]])
    assert scaler.get_scale() == 2.0
    assert_same(model, by_hand)
    assert updater.data_feeder() is data[3]


def test_one_overflow_among_the_accumulated_batches_retries_them_all() -> None:
    model = model_of()
    by_hand = copy.deepcopy(model)
    data = batches(4)
    scaler = GradScaler("nnabla", scale=8.0)
    updater = updater_of(model, [data[0], with_overflow(data[1]), data[2], data[3]], scaler, accumulate=2)
    expected = step_by_hand(by_hand, torch.optim.SGD(by_hand.parameters(), lr=0.125), data[2:])
    assert updater.update() == expected
    assert_same(model, by_hand)


@pytest.mark.parametrize("retries", [0, 1, 100])
def test_it_gives_up_after_max_retries_without_an_error_and_without_a_change(retries: int) -> None:
    model = model_of()
    untouched = copy.deepcopy(model)
    fed: list[int] = []
    scaler = GradScaler("nnabla", scale=8.0)
    updater = updater_of(model, [], scaler, max_retries=retries, weight_decay=0.5, clip=1.0)

    def feed() -> torch.Tensor:
        fed.append(1)
        return torch.full((1, 4), math.nan)

    updater.data_feeder = feed
    assert updater.update() is None
    assert len(fed) == 1 + retries
    assert scaler.get_scale() == 8.0 / 2.0 ** (1 + retries)
    assert_same(model, untouched)


@pytest.mark.parametrize("trace", [t for t in TRACES if t["system"] == "nnabla"], ids=lambda t: t["note"])
def test_attempts_walk_through_nnablas_traces(trace: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.zeros(1))
    seen: list[float] = []
    scaler = GradScaler("nnabla", **trace["params"])
    values = iter([math.nan if overflow else 1.0 for overflow in trace["overflow"]])

    def feed() -> float:
        seen.append(scaler.get_scale())
        return next(values)

    sgd = torch.optim.SGD([weight], lr=0.0)
    updater = Updater(sgd, lambda v: (weight * v).sum(), feed, scaler, max_retries=0)
    for _ in trace["overflow"]:
        updater.update()
    assert [*seen, scaler.get_scale()] == [*trace["scale_before"], trace["scale_after"]]


def test_a_static_scale_is_not_retried_for_it_skips_nothing() -> None:
    model = model_of()
    updater = updater_of(model, [with_overflow(batches(1)[0])], GradScaler(8.0))
    assert updater.update() is not None
    assert all(p.isnan().all() for p in model[0].parameters())


def test_a_scalers_own_norm_limit_clips_here_too() -> None:
    model = model_of()
    by_hand = copy.deepcopy(model)
    data = batches(1)
    updater_of(model, data, GradScaler("cerebras", max_gradient_norm=0.25)).update()
    step_by_hand(by_hand, torch.optim.SGD(by_hand.parameters(), lr=0.125), data, clip=0.25)
    assert_same(model, by_hand)


def test_a_norm_that_overflows_is_retried() -> None:
    weight = nn.Parameter(torch.zeros(2))
    scaler = GradScaler("nnabla", scale=1.0)
    sgd = torch.optim.SGD([weight], lr=1.0)
    updater = Updater(sgd, lambda v: (weight * v).sum(), feeder([3e38, 0.5]), scaler, clip=10.0)
    updater.update()
    assert torch.equal(weight.detach(), torch.full((2,), -0.5))
    assert scaler.get_scale() == 0.5


@pytest.mark.parametrize(
    "spoilt",
    [
        {"accumulate": 0},
        {"accumulate": 1.5},
        {"weight_decay": -0.1},
        {"weight_decay": math.nan},
        {"clip": 0.0},
        {"max_retries": -1},
    ],
    ids=str,
)
def test_an_impossible_option_is_refused(spoilt: dict[str, Any]) -> None:
    name = next(iter(spoilt))
    with pytest.raises(ValueError, match=rf"{name}=.* makes no Updater: it must be .*\. Leave it out for "):
        updater_of(model_of(), [], GradScaler(), **spoilt)


def test_data_that_cannot_be_called_is_refused() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"data_feeder is .*must be callable.*lambda: next"):
        Updater(optimizer, model, batches(1), GradScaler())  # type: ignore[arg-type]


def test_grads_are_parameters_of_the_optimizer_and_go_with_a_group(tmp_path: Path) -> None:
    model = model_of()
    with pytest.raises(ValueError, match=r"grads was given without process_group.*or omit grads"):
        updater_of(model, [], GradScaler(), grads=[model[0].weight])
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        for grads, message in (
            ([], "grads is empty"),
            ([torch.ones(3)], r"a tensor of shape \(3,\), which is no"),
            (["0"], "holds '0'"),
        ):
            with pytest.raises(ValueError, match=message):
                updater_of(model, [], GradScaler(), grads=grads, process_group=dist.group.WORLD)
        updater_of(
            model, batches(1), GradScaler(), grads=model[0].parameters(), process_group=dist.group.WORLD
        ).update()
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*[Ss]parse.*")
def test_a_parameter_without_a_gradient_does_not_decay() -> None:
    model = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
    for layer in model:
        nn.init.ones_(layer.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    scaler = GradScaler("static", scale=1.0)
    Updater(optimizer, lambda x: model[0](x).sum(), feeder([torch.ones(1, 1)]), scaler, weight_decay=0.5).update()
    assert [layer.weight.item() for layer in model] == [1 - 0.125 * (1 + 0.5), 1.0]


def test_weight_decay_of_a_sparse_gradient_is_refused() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    data = feeder([torch.tensor([1, 1])])
    updater = Updater(optimizer, lambda i: table(i).sum(), data, GradScaler(), weight_decay=0.5)
    with pytest.raises(ValueError, match=r"weight_decay=0\.5 was given with a sparse gradient.*Leave it out"):
        updater.update()


@pytest.mark.filterwarnings("ignore:.*[Ss]parse.*")
def test_adding_sparse_gradients_over_a_group_is_refused() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    with pytest.raises(ValueError, match=r"sparse gradient.*adds dense ones.*leave out process_group"):
        all_reduce_(table.parameters(), dist.group.WORLD)


# --- two ranks ---
# Run as a script this file is one of them: it trains, and prints what it found as json.

RULES = {"nnabla": {"scale": 8.0, "N": 1}, "fairseq": {"scale_window": 2}, "deepspeed": {"delayed_shift": 2}}
STEPS = 4
SGD = {"lr": 0.03125, "momentum": 0.5}


class PartlyUsed(nn.Module):
    """`left` serves rank 0 alone, `idle` nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.body = model_of()
        self.left, self.idle = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)

    def loss(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        return (self.left(y) if rank == 0 else y).pow(2).sum()


def data_of(rank: int) -> list[torch.Tensor]:
    """A batch for each attempt; one attempt fails."""
    return batches(STEPS + 1, seed=10 + rank)


def found_by(model: PartlyUsed, scales: list[float]) -> dict[str, Any]:
    weights = [value.hex() for p in model.parameters() for value in p.detach().flatten().tolist()]
    return {"scales": scales, "weights": weights, "idle": model.idle.weight.grad is None}


def train_as_rank(rank: int, store: str, system: str) -> dict[str, Any]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model, scaler, scales = PartlyUsed(), GradScaler(system, **RULES[system]), []
    data = data_of(rank)
    if rank == 1:
        data[1] = with_overflow(data[1])
    feed = feeder(data)

    def noting_the_scale() -> torch.Tensor:
        scales.append(scaler.get_scale())
        return feed()

    updater = Updater(
        torch.optim.SGD(model.parameters(), **SGD),
        lambda x: model.loss(rank, x),
        noting_the_scale,
        scaler,
        weight_decay=0.125,
        process_group=dist.group.WORLD,
        clip=4.0,
    )
    for _ in range(STEPS):
        updater.update()
    dist.destroy_process_group()
    return found_by(model, [*scales, scaler.get_scale()])


def train_a_part_as_rank(rank: int, store: str, system: str) -> dict[str, Any]:
    """Train with the gradients of the first layer alone summed; the second layer's overflow on rank 1, once."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model, scaler, data = model_of(), GradScaler(system, **RULES[system]), data_of(rank)
    feed, attempts = feeder(data), iter(range(STEPS + 1))

    def loss(x: torch.Tensor) -> torch.Tensor:
        attempt = next(attempts)
        y = model(x).pow(2).sum()
        lost = model[1].bias.sum() * (math.inf if rank == 1 and attempt == 1 else 0.0)
        return y + lost

    sgd = torch.optim.SGD(model.parameters(), **SGD)
    shared = list(model[0].parameters())
    updater = Updater(sgd, loss, feed, scaler, process_group=dist.group.WORLD, grads=shared)
    for _ in range(STEPS):
        updater.update()
    dist.destroy_process_group()
    first, second = ([value.hex() for p in part.parameters() for value in p.flatten().tolist()] for part in model)
    return {"scale": scaler.get_scale(), "first": first, "second": second}


def train_a_part_in_one(system: str) -> list[dict[str, Any]]:
    """What both ranks should find: models of their own, the first layers' gradients added by hand, no scaling."""
    models = [model_of(), model_of()]
    optimizers = [torch.optim.SGD(m.parameters(), **SGD) for m in models]
    rule = loss_rule(system, **RULES[system])
    for attempt, both in enumerate(zip(data_of(0), data_of(1))):
        rule = rule.adjust(attempt != 1)
        if attempt == 1:
            continue
        for model, optimizer, x in zip(models, optimizers, both):
            optimizer.zero_grad()
            model(x).pow(2).sum().backward()
        for p, q in zip(models[0][0].parameters(), models[1][0].parameters()):
            p.grad, q.grad = p.grad + q.grad, p.grad + q.grad
        for optimizer in optimizers:
            optimizer.step()
    parts = [[[v.hex() for p in part.parameters() for v in p.flatten().tolist()] for part in m] for m in models]
    return [{"scale": rule.scale, "first": first, "second": second} for first, second in parts]


def train_in_one(system: str) -> dict[str, Any]:
    """What both ranks should find: both losses in a sum, no scaling, the second attempt left out."""
    model, rule, scales = PartlyUsed(), loss_rule(system, **RULES[system]), []
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for attempt, (x, y) in enumerate(zip(data_of(0), data_of(1))):
        scales.append(rule.scale)
        rule = rule.adjust(attempt != 1)
        if attempt == 1:
            continue
        optimizer.zero_grad()
        (model.loss(0, x) + model.loss(1, y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 4.0)
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.grad += 0.125 * p
        optimizer.step()
    return found_by(model, [*scales, rule.scale])


def found_by_ranks(which: str, system: str, folder: Path) -> list[dict[str, Any]]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ranks = []
    for rank in ("0", "1"):
        command = [sys.executable, __file__, which, rank, str(folder / "store"), system]
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
    try:
        return [json.loads(rank.communicate(timeout=120)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for each in ranks:
            each.kill()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
@pytest.mark.full
def test_gradients_that_are_not_summed_stay_a_ranks_own_and_their_overflow_is_retried_on_both(tmp_path: Path) -> None:
    found, expected = found_by_ranks("part", "nnabla", tmp_path), train_a_part_in_one("nnabla")
    assert found == expected
    assert found[0]["first"] == found[1]["first"]
    assert found[0]["second"] != found[1]["second"]


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
@pytest.mark.full
@pytest.mark.parametrize("system", RULES)  # each is two processes
def test_an_overflow_on_one_rank_is_retried_on_both_and_scales_agree(system: str, tmp_path: Path) -> None:
    found = found_by_ranks("all", system, tmp_path)
    assert found[0] == found[1] == train_in_one(system)
    assert found[0]["idle"]  # a gradient that no rank has stays missing


if __name__ == "__main__":
    torch.set_num_threads(1)
    train = train_as_rank if sys.argv[1] == "all" else train_a_part_as_rank
    print(json.dumps(train(int(sys.argv[2]), sys.argv[3], sys.argv[4])))
